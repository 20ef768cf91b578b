//! Bit-exactness on a device with its own memory: a spilled run equals the plain loop on that device. With the
//! feature `wgpu` the device is any with a Vulkan driver, including a software one.
#![cfg_attr(not(feature = "cube"), allow(dead_code, unused_imports))]

mod common;

use common::{Fragile, PLENTY, Points, config, gpt2_chain, mlp_chain, spirals, tokens};
use hydra_core::optimizer::Sgd;
use hydra_core::{ByteSize, Chain, Dataset, FloatType, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{
    DeviceSpec, EngineError, OptimizerPlacement, Orchestrator, Place, Placement, RunReport, TaskState,
    TrainTask, plain,
};
use hydra_models::{cnn, gpt2, mlp};
use std::sync::Arc;

#[cfg(not(feature = "wgpu"))]
#[test]
#[ignore = "needs the feature `wgpu`"]
fn runs_on_a_gpu_equal_the_plain_loop() {
    panic!("this build has no feature `wgpu`, and so none of the tests of it");
}

#[cfg(not(feature = "wgpu"))]
#[test]
fn a_build_without_the_feature_says_so() {
    for device in [DeviceSpec::cuda(0, PLENTY), DeviceSpec::wgpu(0, PLENTY).times(2).remove(1)] {
        let name = device.name.clone();
        let mut run = Orchestrator::new(vec![device]).unwrap();
        run.submit(TrainTask::new("task", mlp_chain(), spirals(), spec())).unwrap();
        let error = run.run().unwrap_err().to_string();
        assert!(error.starts_with(&format!("device `{name}`: this build does not support ")), "{error}");
    }
}

#[test]
fn devices_of_two_kinds_are_refused() {
    let devices = vec![DeviceSpec::cpu(PLENTY), DeviceSpec::wgpu(0, PLENTY)];
    let error = Orchestrator::new(devices).unwrap_err();
    assert!(
        matches!(&error, EngineError::MixedDevices { first, other } if first == "cpu:0" && other == "wgpu:0")
    );
}

fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(4), clip: Some(0.7), ..TrainSpec::new(OptimizerSpec::adamw(3e-3), 8) }
}

#[cfg(feature = "cube")]
mod on_a_device {
    use super::*;
    use hydra_core::cube::CubeAdapter;

    /// The device; prints a note if there is none.
    fn adapter() -> Option<CubeAdapter> {
        CubeAdapter::wgpu(0).inspect_err(|error| eprintln!("skipped: {error}")).ok()
    }

    fn orchestrator(devices: usize, memory: ByteSize, prefetch: bool) -> Orchestrator {
        Orchestrator::new(DeviceSpec::wgpu(0, memory).times(devices)).unwrap().prefetch(prefetch)
    }

    /// A chain, its training data, and its cut-points.
    type Example = (Arc<Chain>, Arc<dyn Dataset>, Vec<usize>);

    fn chains(float: FloatType) -> [Example; 4] {
        let cnn = cnn::CnnConfig { inputs: 2, channels: 4, stages: 2, blocks: 1, classes: 3 };
        let chains: [(Chain, Arc<dyn Dataset>, Vec<usize>); 4] = [
            (gpt2::chain(&config(), None).unwrap(), tokens(24, 1), vec![1, 2, 3, 4]),
            (mlp::chain(&[2, 16, 16, 16], 3).unwrap(), spirals(), vec![1, 2, 3]),
            (mlp::two_stream_chain(8, 2, 3).unwrap(), spirals(), vec![1, 2]),
            (cnn::chain(cnn).unwrap(), Arc::new(cnn::Waves::new(3, 24, 2, 8, 3)), vec![1, 2]),
        ];
        chains.map(|(chain, data, cuts)| (Arc::new(chain.with_float_type(float)), data, cuts))
    }

    fn agrees(report: &RunReport, plain: &plain::PlainRun, what: &str) {
        let task = &report.tasks[0];
        assert_eq!((task.error.as_deref(), task.state), (None, TaskState::Done), "{what}");
        assert_eq!(task.losses, plain.losses, "{what}");
        assert_eq!(task.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()), "{what}");
    }

    #[test]
    fn runs_on_a_gpu_equal_the_plain_loop() {
        agree_in(FloatType::F32);
    }

    /// The software driver has no `bf16`.
    #[test]
    fn runs_in_16_bits_on_a_gpu_equal_the_plain_loop() {
        agree_in(FloatType::F16);
    }

    fn agree_in(float: FloatType) {
        let Some(adapter) = adapter() else { return };
        if !hydra_models::ops::supports(&adapter.burn, float.dtype()) {
            return eprintln!("skipped: the device does not compute with {float}");
        }
        for (chain, data, cuts) in chains(float) {
            let name = format!("{} in {float}", chain.name());
            let plain = plain::train_on(&chain, data.as_ref(), &spec(), &adapter.burn).unwrap();
            let again = plain::train_on(&chain, data.as_ref(), &spec(), &adapter.burn).unwrap();
            assert_eq!(plain.weights_sha256, again.weights_sha256, "{name}: the device is deterministic");
            for (devices, cuts, prefetch) in
                [(1, vec![], true), (1, cuts.clone(), true), (1, cuts.clone(), false), (2, cuts, true)]
            {
                let mut run = orchestrator(devices, PLENTY, prefetch);
                let task = TrainTask::new("task", chain.clone(), data.clone(), spec());
                run.submit(task.cuts(cuts.clone())).unwrap();
                for other in 1..=devices as u64 {
                    let spec = TrainSpec { seed: other, ..spec() };
                    run.submit(TrainTask::new(format!("other-{other}"), mlp_chain(), spirals(), spec))
                        .unwrap();
                }
                agrees(&run.run().unwrap(), &plain, &format!("{name}, {devices} devices, cuts {cuts:?}"));
            }
        }
    }

    #[test]
    fn the_cpu_learns_about_the_same() {
        let Some(adapter) = adapter() else { return };
        // 16-bit types round in both, not always equally: earlier values differ in the last bits of `f32`.
        let types = [(FloatType::F32, 1e-6), (FloatType::F16, 2e-3)];
        let has = |float: FloatType| hydra_models::ops::supports(&adapter.burn, float.dtype());
        for (float, bound) in types.into_iter().filter(|(float, _)| has(*float)) {
            for (chain, data, _) in chains(float) {
                let there = plain::train_on(&chain, data.as_ref(), &spec(), &adapter.burn).unwrap();
                let here = plain::train(&chain, data.as_ref(), &spec()).unwrap();
                for (there, here) in there.losses.iter().zip(&here.losses) {
                    let apart = (there / here - 1.0).abs();
                    assert!(apart < bound, "{} in {float}: {there} against {here}", chain.name());
                }
            }
        }
    }

    /// With powers of two no product is rounded, so a fused operation that rounds twice, as in Mesa's CPU driver,
    /// gives the bits of one that rounds once.
    fn powers_of_two(accumulate: usize) -> TrainSpec {
        let optimizer = OptimizerSpec::from(Sgd { lr: 0.03125, momentum: 0.5, weight_decay: 0.0 });
        TrainSpec { accumulate, clip: None, optimizer, ..spec() }
    }

    #[test]
    fn tasks_that_live_on_a_gpu_equal_the_plain_loop() {
        agree_there_in(FloatType::F32);
    }

    /// The software driver has no `bf16`.
    #[test]
    fn tasks_in_16_bits_that_live_on_a_gpu_equal_the_plain_loop() {
        agree_there_in(FloatType::F16);
        agree_there_in(FloatType::Bf16);
    }

    fn agree_there_in(float: FloatType) {
        let Some(adapter) = adapter() else { return };
        if !hydra_models::ops::supports(&adapter.burn, float.dtype()) {
            return eprintln!("skipped: the device does not compute with {float}");
        }
        for (chain, data, cuts) in chains(float) {
            let name = format!("{} in {float}", chain.name());
            for (accumulate, cuts) in [(1, vec![]), (3, cuts)] {
                let spec = powers_of_two(accumulate);
                let plain = plain::train_on(&chain, data.as_ref(), &spec, &adapter.burn).unwrap();
                let mut run = orchestrator(1, PLENTY, true).optimizer_placement(OptimizerPlacement::Device);
                let task = TrainTask::new("task", chain.clone(), data.clone(), spec.clone());
                run.submit(task.cuts(cuts.clone())).unwrap();
                let other = TrainSpec { seed: 1, ..spec };
                run.submit(TrainTask::new("other", mlp_chain(), spirals(), other)).unwrap();
                let report = run.run().unwrap();
                agrees(&report, &plain, &format!("{name}, {accumulate} microbatches, cuts {cuts:?}"));
                assert_eq!(report.tasks[0].plan.optimizer.on, Place::Device, "{name}");
            }
        }
    }

    #[test]
    fn a_gpu_is_taken_unasked_where_its_steps_are_exact_and_marked_where_they_are_not() {
        if adapter().is_none() {
            return;
        }
        let (chain, data) = (gpt2_chain(), tokens(24, 1));
        let task = || {
            let spec = TrainSpec { clip: None, eval_every: Some(1), ..spec() };
            TrainTask::new("task", chain.clone(), data.clone(), spec).validation(tokens(5, 3))
        };
        let placed = |placement| {
            let mut run = orchestrator(1, PLENTY, true).optimizer_placement(placement);
            run.submit(task()).unwrap();
            let report = run.run().unwrap();
            assert_eq!(report.tasks[0].error, None);
            report.tasks.into_iter().next().unwrap()
        };
        let [host, auto, device] =
            [OptimizerPlacement::Host, OptimizerPlacement::Auto, OptimizerPlacement::Device].map(placed);
        eprintln!("auto: {:?}", auto.plan.optimizer);
        assert_eq!((host.plan.optimizer.on, device.plan.optimizer.on), (Place::Host, Place::Device));
        // By default the bits are the host's, on every device.
        assert_eq!((&auto.weights_sha256, auto.plan.optimizer.exact), (&host.weights_sha256, true));
        assert_eq!(auto.plan.optimizer.on == Place::Device, device.plan.optimizer.exact);
        assert!(!device.plan.optimizer.exact || device.weights_sha256 == host.weights_sha256);
        assert_eq!(device.validations.evaluations.len(), host.validations.evaluations.len());
        for (there, here) in device.losses.iter().zip(&host.losses) {
            assert!((there - here).abs() < 1e-5 * here.abs(), "{there} against {here}");
        }
        let (there, here) = (device.validation.unwrap().loss, host.validation.unwrap().loss);
        assert!((there - here).abs() < 1e-5 * here.abs(), "{there} against {here}");
    }

    #[test]
    fn what_does_not_fit_a_gpu_is_spilled() {
        if adapter().is_none() {
            return;
        }
        // Ten models with three copies of 4 MB each.
        let chain = Arc::new(mlp::chain(&[2, 1024, 1024], 3).unwrap());
        let with = |placement| {
            let mut run = orchestrator(1, ByteSize::mib(96), true).optimizer_placement(placement);
            for seed in 0..10 {
                let spec = TrainSpec { seed, length: Length::Steps(1), ..powers_of_two(1) };
                let spec = TrainSpec { optimizer: OptimizerSpec::adamw(1e-3), ..spec };
                run.submit(TrainTask::new(format!("{seed}"), chain.clone(), spirals(), spec)).unwrap();
            }
            run
        };
        let refused = with(OptimizerPlacement::Device).run().unwrap_err();
        assert!(matches!(refused, EngineError::OptimizerPlacement { .. }), "{refused}");
        let report = with(OptimizerPlacement::Auto).run().unwrap();
        for task in &report.tasks {
            // Some are resident in part if the device steps as the host does.
            let Placement { on, why, .. } = &task.plan.optimizer;
            assert_eq!(task.error, None);
            assert_ne!(*on, Place::Device);
            assert!(why.contains("everything would take") || why.contains("would not be bit-exact"), "{why}");
        }
    }

    #[test]
    fn the_best_weights_of_a_task_on_a_gpu_are_put_back() {
        // Rates so large that the losses rise again, but stay finite.
        best_are_put_back_in(FloatType::F32, 8.0, 6);
        best_are_put_back_in(FloatType::F16, 4.0, 5);
    }

    fn best_are_put_back_in(float: FloatType, lr: f64, steps: usize) {
        let Some(adapter) = adapter() else { return };
        if !hydra_models::ops::supports(&adapter.burn, float.dtype()) {
            return eprintln!("skipped: the device does not compute with {float}");
        }
        let [(chain, ..), ..] = chains(float);
        let optimizer = OptimizerSpec::from(Sgd { lr, momentum: 0.5, weight_decay: 0.0 });
        let length = Length::Steps(steps);
        let spec = TrainSpec { eval_every: Some(1), length, optimizer, ..powers_of_two(1) };
        let [host, device] = [OptimizerPlacement::Host, OptimizerPlacement::Device].map(|placement| {
            let mut run = orchestrator(1, PLENTY, true).optimizer_placement(placement);
            let task = TrainTask::new("task", chain.clone(), tokens(24, 1), spec.clone());
            run.submit(task.validation(tokens(5, 3)).test(tokens(4, 2))).unwrap();
            run.run().unwrap().tasks.remove(0)
        });
        assert_eq!((device.error.as_deref(), device.plan.optimizer.on), (None, Place::Device));
        assert!(
            device.validations.best_step.is_some_and(|step| step < steps),
            "{:?}",
            device.validations.evaluations
        );
        assert_eq!((device.validations.evaluations, device.test), (host.validations.evaluations, host.test));
        assert_eq!(device.weights_sha256, host.weights_sha256);
    }

    #[test]
    fn a_layer_that_fails_harms_no_other_task() {
        let Some(adapter) = adapter() else { return };
        let layer = |limit| Fragile { limit };
        let linear = burn::nn::LinearConfig::new(2, 3).init(&burn::tensor::Device::flex());
        let chain = Chain::builder("fragile")
            .layer("fragile", layer(10.0))
            .layer("head", crate::common::Classifier { linear })
            .build()
            .unwrap();
        let bad = Arc::new(Points { len: 24, bad: 12, panics: false });
        let plain = plain::train_on(&mlp_chain(), spirals().as_ref(), &spec(), &adapter.burn).unwrap();
        let mut run = orchestrator(1, PLENTY, true);
        run.submit(TrainTask::new("task", mlp_chain(), spirals(), spec()).cuts(vec![2])).unwrap();
        let spec = TrainSpec { shuffle: false, ..spec() };
        run.submit(TrainTask::new("bad", Arc::new(chain), bad, spec)).unwrap();
        let report = run.run().unwrap();
        agrees(&report, &plain, "with a task that fails");
        let error = report.tasks[1].error.as_deref().unwrap();
        assert!(report.tasks[1].state == TaskState::Failed && error.contains("which is above 10"), "{error}");
    }
}
