//! The report of a run has a workload with the times of its shard tasks, which the simulator replays.

use crate::common::{Settings, adamw, gpt2_chain, spirals, tokens};
use hydra_core::optimizer::Sgd;
use hydra_core::{Chain, Length, TrainSpec};
use hydra_engine::{RunReport, TaskState, TrainTask};
use hydra_models::mlp;
use hydra_sched::{Epoch, EvaluationCost, PolicyKind, SimulationOptions, Workload, simulate};
use std::sync::Arc;

/// Five minibatches of at most four blocks, with evaluations in batches of four.
fn task(spec: TrainSpec) -> TrainTask {
    let spec = TrainSpec { length: Length::Steps(5), ..spec };
    TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec).validation(tokens(5, 3)).test(tokens(4, 2))
}

fn evaluations(of: &[(u64, u64)]) -> Vec<EvaluationCost> {
    of.iter().map(|&(after, microbatch_passes)| EvaluationCost { after, microbatch_passes }).collect()
}

/// The workload of a report, after checks that hold for every workload.
fn replayed(report: &RunReport) -> &Workload {
    let workload = report.workload.as_ref().expect("something was trained");
    assert_eq!(&Workload::from_json(&workload.to_json()).expect("a workload"), workload);
    let ran: u64 = report.devices.iter().map(|device| device.shard_tasks).sum();
    assert_eq!(workload.shard_tasks(), ran);
    for kind in PolicyKind::ALL {
        let replay = simulate(workload, &mut *kind.build(0), SimulationOptions::default()).expect("a replay");
        assert_eq!((replay.shard_tasks, replay.promotions + replay.promotions_saved), (ran, ran), "{kind}");
    }
    let compute_s: f64 = report.devices.iter().map(|device| device.compute_s).sum();
    let total_s = workload.total_s();
    assert!(total_s <= 1.001 * compute_s, "means times counts are sums");
    assert!(total_s >= 0.999 * compute_s, "{total_s} of {compute_s}");
    assert!(workload.processors.is_some() && workload.devices.iter().all(|device| device.threads > 0));
    workload
}

#[test]
fn the_workload_has_the_shard_tasks_of_the_run() {
    for policy in [PolicyKind::ShardedLrtfEager, PolicyKind::ShardedLrtf] {
        let settings =
            Settings { cuts: Some(vec![2, 4]), devices: 2, others: 2, policy, ..Settings::default() };
        let report = settings.run(task(adamw(4)));
        assert!(report.replay_s.is_some_and(|s| s > 0.0));
        let workload = replayed(&report);
        assert_eq!(workload.devices.len(), 2);
        let names: Vec<&str> = workload.tasks.iter().map(|task| task.name.as_str()).collect();
        assert_eq!(names, ["task", "other-0", "other-1"]);
        let first = &workload.tasks[0];
        assert_eq!((first.minibatches, first.shards.len()), (5, 3));
        assert_eq!(first.evaluations, evaluations(&[(0, 2), (5, 2 + 1)]));
        let last = &first.shards[2];
        assert_eq!(last.forward_s, 0.0, "the last forward is part of the backward");
        assert!(first.step_wait_s > 0.0 && last.backward_s > 0.0 && last.evaluate_s.is_some());
        assert!(first.shards.iter().all(|shard| shard.promote_s.is_some() && shard.bytes > Some(0)));
    }
}

#[test]
fn evaluations_during_training_and_microbatches_are_there() {
    let spec = TrainSpec { accumulate: 2, eval_every: Some(2), ..adamw(4) };
    let report = Settings { cuts: Some(vec![3]), ..Settings::default() }.run(task(spec));
    let first = &replayed(&report).tasks[0];
    assert!(report.replay_s.is_some_and(|s| s > 0.0));
    assert_eq!((first.minibatches, first.microbatches, first.epoch), (5, 2, None));
    let every = [(0, 3), (2, 3), (4, 3), (5, 3 + 2)];
    assert_eq!(first.evaluations, evaluations(&every));
}

#[test]
fn an_evaluation_that_tasks_share_is_recorded_once_with_those_that_computed_it() {
    let (chain, validation) = (gpt2_chain(), tokens(5, 3));
    for devices in [1, 2] {
        let mut run = Settings { devices, ..Settings::default() }.orchestrator();
        for index in 0..4 {
            let spec = TrainSpec { length: Length::Steps(5), ..adamw(4) };
            let task = TrainTask::new(format!("{index}"), chain.clone(), tokens(11, 1), spec);
            run.submit(task.validation(validation.clone())).expect("a task");
        }
        let report = run.run().expect("a run");
        assert!(report.replay_s.is_some_and(|s| s > 0.0));
        let tasks = &replayed(&report).tasks;
        let microbatch_passes = |after: u64| {
            let all = tasks.iter().flat_map(|task| &task.evaluations);
            all.filter(|of| of.after == after).map(|of| of.microbatch_passes).sum::<u64>()
        };
        assert_eq!((microbatch_passes(0), microbatch_passes(5)), (2, 4 * 2));
    }
}

/// Promoted shards have bytes, and gradient downloads take time.
#[test]
fn memory_and_downloads_are_recorded() {
    let settings = Settings { cuts: Some(vec![2, 4]), zero_copy: false, cache: true, ..Settings::default() };
    let report = settings.run(task(adamw(4)));
    let workload = replayed(&report);
    for shard in &workload.tasks[0].shards {
        let buffers: u64 = shard.buffers.iter().map(|buffer| buffer.bytes).sum();
        assert_eq!((Some(buffers), shard.frozen.len()), (shard.bytes, 0));
        assert!(shard.gradients_s > 0.0 && shard.working.gradients > 0, "{shard:?}");
        assert!(shard.working.backward > shard.working.gradients, "{shard:?}");
    }
    let device = &workload.devices[0];
    let all = device.memory_bytes.zip(device.working_bytes).map(|(copies, working)| copies + working);
    // A part of the margin is always left free.
    let (all, budget) = (all.unwrap(), settings.memory.bytes());
    assert!(all < budget && all >= budget - budget / 8, "{all} of {budget}");
    let shared = Settings { zero_copy: true, ..settings }.run(task(adamw(4)));
    let device = &replayed(&shared).devices[0];
    assert_eq!((device.memory_bytes, device.working_bytes), (None, None), "nothing is moved");
}

#[test]
fn smaller_last_minibatches_of_epochs_are_replayed() {
    let report = |blocks, minibatches| {
        let spec = TrainSpec { accumulate: 2, length: Length::Steps(minibatches), ..adamw(2) };
        Settings::default().run(TrainTask::new("task", gpt2_chain(), tokens(blocks, 1), spec))
    };
    // One block cannot be split; of five, the last one is alone.
    let (whole, split) = (report(1, 2), report(5, 4));
    let microbatch_passes = |report: &RunReport| {
        let task = &replayed(report).tasks[0];
        (task.minibatches, task.microbatches, task.epoch)
    };
    assert_eq!(microbatch_passes(&whole), (2, 1, None));
    assert_eq!(microbatch_passes(&split), (4, 2, Some(Epoch { minibatches: 3, last_microbatches: 1 })));
    assert!([whole, split].iter().all(|report| report.replay_s.is_some_and(|s| s > 0.0)));
}

/// Backward passes of a run end at the shard of the first trained layer.
#[test]
fn frozen_shards_are_recorded_and_replayed() {
    let device = burn::tensor::Device::flex();
    let linear = |inputs, outputs| burn::nn::LinearConfig::new(inputs, outputs).init(&device);
    let chain = Chain::builder("frozen")
        .frozen("a", mlp::Dense { linear: linear(2, 8) })
        .layer("b", mlp::Dense { linear: linear(8, 8) })
        .layer("c", crate::common::Classifier { linear: linear(8, 3) })
        .build()
        .expect("a chain");
    let chain = Arc::new(chain);
    let report = |cuts: Vec<usize>| {
        let spec = TrainSpec { length: Length::Steps(3), ..adamw(4) };
        let task = TrainTask::new("task", chain.clone(), spirals(), spec);
        Settings { cuts: Some(cuts), ..Settings::default() }.run(task)
    };
    let frozen = report(vec![1, 2]);
    assert!(frozen.all_done() && frozen.replay_s.is_some_and(|s| s > 0.0));
    let first = &replayed(&frozen).tasks[0];
    assert_eq!((first.minibatches, first.first_trained, first.shards[0].backward_s), (3, 1, 0.0));
    assert!(first.shards[1].backward_s > 0.0);
    // With a trained layer in the first shard, they reach the first shard.
    assert_eq!(replayed(&report(vec![2])).tasks[0].first_trained, 0);
}

#[test]
fn what_was_not_trained_is_left_out() {
    let mut run = Settings::default().orchestrator();
    let broken = TrainSpec { length: Length::Steps(3), ..adamw(4) };
    let far = hydra_core::OptimizerSpec::from(Sgd { lr: 1e30, momentum: 0.0, weight_decay: 0.0 });
    let broken = TrainSpec { optimizer: far, clip: None, ..broken };
    run.submit(TrainTask::new("diverges", gpt2_chain(), tokens(11, 1), broken)).expect("a task");
    run.submit(task(adamw(4))).expect("a task");
    let report = run.run().expect("a run");
    assert_eq!(report.tasks[0].state, TaskState::Failed);
    assert_eq!(report.replay_s, None, "the run did more than the workload contains");
    let workload = report.workload.expect("one was trained");
    let diverged = workload.tasks.iter().find(|task| task.name == "diverges");
    assert!(diverged.is_none_or(|task| task.minibatches == report.tasks[0].trained.steps as u64));
    assert_eq!(workload.tasks.last().expect("the other").minibatches, 5);
}
