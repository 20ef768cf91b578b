//! 16-bit floats on devices: spilled training equals the plain loop of the same type, moves half the bytes, and
//! learns as `f32` does.

use crate::common::{Settings, adamw, config, spirals, tokens};
use hydra_core::{ByteSize, Chain, Dataset, FloatType, Length, TrainSpec};
use hydra_engine::{TaskState, TrainTask, plain};
use hydra_models::{cnn, gpt2, mlp};
use std::sync::Arc;

const NARROW: [FloatType; 2] = [FloatType::Bf16, FloatType::F16];

fn gpt2_in(float: FloatType) -> Arc<Chain> {
    Arc::new(gpt2::chain(&config(), None).expect("a chain").with_float_type(float))
}

fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(5), ..adamw(4) }
}

fn agrees(chain: &Arc<Chain>, data: &Arc<dyn Dataset>, settings: &Settings, spec: &TrainSpec) {
    let plain = plain::train(chain, data.as_ref(), spec).expect("the plain loop");
    let report = settings.task(TrainTask::new("task", chain.clone(), data.clone(), spec.clone()));
    let what = format!("{} in {}, {settings:?}", chain.name(), chain.float_type());
    assert_eq!((report.error, &report.losses), (None, &plain.losses), "{what}");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256), "{what}");
}

#[test]
fn shards_equal_the_plain_loop() {
    let cut = Settings { cuts: Some(vec![1, 3]), ..Settings::default() };
    for float in NARROW {
        let (chain, data) = (gpt2_in(float), tokens(11, 1));
        for settings in [
            Settings::default(),
            cut.clone(),
            Settings { prefetch: false, threads: 2, ..cut.clone() },
            Settings { devices: 2, others: 2, cuts: Some(vec![2]), ..Settings::default() },
            Settings { zero_copy: true, cuts: Some(vec![1, 3]), ..Settings::default() },
        ] {
            agrees(&chain, &data, &settings, &spec());
        }
        agrees(&chain, &data, &cut, &TrainSpec { accumulate: 3, clip: None, ..spec() });
    }
}

#[test]
fn every_chain_trains_in_16_bits() {
    let waves: Arc<dyn Dataset> = Arc::new(cnn::Waves::new(3, 24, 2, 8, 3));
    let small = cnn::CnnConfig { inputs: 2, channels: 4, stages: 2, blocks: 1, classes: 3 };
    for float in NARROW {
        let chains = [
            (mlp::chain(&[2, 16, 16, 16], 3).expect("a chain"), spirals()),
            (mlp::two_stream_chain(8, 3, 3).expect("a chain"), spirals()),
            (cnn::chain(small).expect("a chain"), waves.clone()),
        ];
        for (chain, data) in chains {
            let settings = Settings { cuts: Some(vec![1, 2]), ..Settings::default() };
            agrees(&Arc::new(chain.with_float_type(float)), &data, &settings, &spec());
        }
    }
}

#[test]
fn half_the_bytes_move() {
    let run = |float| {
        let settings = Settings { cuts: Some(vec![1, 2, 3]), prefetch: false, ..Settings::default() };
        settings.run(TrainTask::new("task", gpt2_in(float), tokens(11, 1), spec()))
    };
    let (wide, narrow) = (run(FloatType::F32), run(FloatType::Bf16));
    let share = |narrow: u64, wide: u64| narrow as f64 / wide as f64;
    let up = share(narrow.transfers.promoted_bytes, wide.transfers.promoted_bytes);
    let down = share(narrow.transfers.demoted_bytes, wide.transfers.demoted_bytes);
    // Tokens have 32 bits in both.
    assert!((0.5..0.52).contains(&up) && (0.5..0.52).contains(&down), "{up}, {down}");
    let peak = share(narrow.devices[0].peak_bytes, wide.devices[0].peak_bytes);
    assert!(peak < 1.0, "{peak}");
}

#[test]
fn it_learns_what_f32_learns() {
    let spec = TrainSpec { length: Length::Steps(40), clip: None, ..adamw(4) };
    let losses = |float| plain::train(&gpt2_in(float), tokens(11, 1).as_ref(), &spec).expect("plain").losses;
    let (wide, narrow) = (losses(FloatType::F32), losses(FloatType::Bf16));
    let worst =
        wide.iter().zip(&narrow).map(|(wide, narrow)| (wide / narrow - 1.0).abs()).fold(0.0, f64::max);
    assert!(narrow[39] < 0.9 * narrow[0] && worst > 0.0 && worst < 0.005, "{worst}: {narrow:?}");
}

#[test]
fn best_weights_are_put_back() {
    let spec = TrainSpec { eval_every: Some(2), ..spec() };
    let chain = gpt2_in(FloatType::Bf16);
    let task = TrainTask::new("task", chain.clone(), tokens(11, 1), spec.clone());
    let settings = Settings { cuts: Some(vec![2, 3]), ..Settings::default() };
    let report = settings.task(task.validation(tokens(5, 3)).test(tokens(4, 2)));
    assert_eq!((report.error, report.state), (None, TaskState::Done));
    let best = report
        .validations
        .evaluations
        .iter()
        .min_by(|a, b| a.1.loss.total_cmp(&b.1.loss))
        .expect("evaluations");
    assert_eq!((report.validations.best_step, report.validation), (Some(best.0), Some(best.1.clone())));
    let short = TrainSpec { length: Length::Steps(best.0), eval_every: None, ..spec };
    let plain = plain::train(&chain, tokens(11, 1).as_ref(), &short).expect("the plain loop");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256), "the weights of step {}", best.0);
}

#[test]
fn budgets_hold_and_change_no_bit() {
    let task = || TrainTask::new("task", gpt2_in(FloatType::Bf16), tokens(11, 1), spec());
    let plain =
        plain::train(&gpt2_in(FloatType::Bf16), tokens(11, 1).as_ref(), &spec()).expect("the plain loop");
    let mut run = Settings::default().orchestrator();
    run.submit(task()).expect("a task");
    let least = run.admit().expect("it fits").admission().tasks[0].plan.min_device_memory_bytes;
    let settings = Settings { memory: ByteSize(least + least / 16), ..Settings::default() };
    let report = settings.run(task());
    let (device, task) = (&report.devices[0], &report.tasks[0]);
    assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{device:?}");
    assert!(task.plan.shards > 1 && task.weights_sha256.as_ref() == Some(&plain.weights_sha256), "{task:?}");
}
