use super::groups::stages;
use super::*;
use crate::simulator::{DeviceCost, Draw, LowerBounds, Occupation, ShardCost, TaskCost};

fn workload(models: usize, shards: usize, devices: usize) -> Workload {
    let mut list = vec![ShardCost { bytes: Some(10), ..ShardCost::new(1.0, 2.0, 0.25) }; shards];
    // The fused task of the last shard is its forward and its backward.
    list[shards - 1].backward_s = 3.0;
    let task = |index: usize| TaskCost::new(index.to_string(), 2, list.clone());
    let devices = vec![DeviceCost { keeps_copies: true, ..DeviceCost::default() }; devices];
    Workload::new((0..models).map(task).collect(), devices)
}

fn of(workload: &Workload, strategy: Strategy) -> StrategyOutcome {
    let rows = compare(workload, true).unwrap();
    rows.into_iter().find(|row| row.strategy == strategy).unwrap().outcome.unwrap()
}

/// Four models of 2 x 12 seconds on four devices, computed by hand.
#[test]
fn the_strategies_of_figure_1() {
    let workload = workload(4, 4, 4);
    let model = of(&workload, Strategy::ModelParallel);
    assert_eq!((model.runtime_s, model.utilization()), (4.0 * 24.0, 0.25));
    assert_eq!(of(&workload, Strategy::TaskParallel).runtime_s, 24.0);
    assert_eq!(of(&workload, Strategy::Hybrid).runtime_s, 48.0, "halves, one model at a time in each");
    // Four stages and four microbatches, of forward 1/4 and backward 2/4: seven of each in a row.
    let pipeline = of(&workload, Strategy::Pipeline);
    assert_eq!(pipeline.runtime_s, 4.0 * 2.0 * 7.0 * (0.25 + 0.5));
    assert_eq!(pipeline.busy_s, model.busy_s);
    assert_eq!(of(&workload, Strategy::DataParallel).runtime_s, 24.0, "communication hides here");
}

#[test]
fn data_parallelism_waits_for_its_communication() {
    let mut workload = workload(1, 1, 4);
    workload.tasks[0].shards[0].promote_s = Some(4.0);
    let outcome = of(&workload, Strategy::DataParallel);
    // Gather and scatter move 3/4 of the shard each, in 3 seconds each; compute takes 3/4.
    assert_eq!((outcome.runtime_s, outcome.busy_s), (2.0 * 6.0, vec![1.5; 4]));
    assert_eq!(outcome.moved_bytes, Some(2 * 4 * 15));
}

#[test]
fn what_does_not_fit_says_which_model() {
    let mut workload = workload(2, 4, 4);
    workload.devices.iter_mut().for_each(|device| device.memory_bytes = Some(100));
    let rows = compare(&workload, false).unwrap();
    let of = |strategy| &rows.iter().find(|row| row.strategy == strategy).unwrap().outcome;
    let expected = DoesNotFit { task: "0".into(), needed: 160, available: 100 };
    assert_eq!(of(Strategy::TaskParallel), &Err(expected));
    assert!(of(Strategy::ModelParallel).is_ok() && of(Strategy::Sharp).is_ok());
    assert_eq!(of(Strategy::Hybrid).as_ref().unwrap().runtime_s, 24.0, "two devices hold a model");
}

/// The first and longest task arrives late, and no strategy waits for it while another one is available.
#[test]
fn no_strategy_waits_for_a_task_while_another_is_there() {
    let mut workload = workload(3, 1, 1);
    workload.tasks.iter_mut().for_each(|task| task.shards[0].promote_s = Some(0.0));
    (workload.tasks[0].arrival_s, workload.tasks[0].minibatches) = (10.0, 4);
    workload.tasks[2].arrival_s = 30.0;
    for strategy in Strategy::ALL {
        let outcome = of(&workload, strategy);
        // Two minibatches of 3 s from 0, four from 10, and two from 30.
        assert_eq!(outcome.runtime_s, 36.0, "{strategy}");
        let starts: Vec<f64> = [0, 1, 2]
            .map(|task| {
                let own = outcome
                    .spans
                    .iter()
                    .filter(|s| s.task == task && !matches!(s.what, Occupation::Promote { .. }));
                own.map(|span| span.start_s).fold(f64::INFINITY, f64::min)
            })
            .into();
        assert_eq!(starts, [10.0, 0.0, 30.0], "{strategy}");
    }
}

/// A valid workload can be compared, even if its total bytes overflow.
#[test]
fn sizes_too_large_to_add_up_are_no_panic() {
    let text = |bytes: u64, minibatches: u64, memory: u64| {
        let shard = format!(r#"{{"forward_s": 1, "backward_s": 1, "bytes": {bytes}}}"#);
        let device = format!(r#"{{"memory_bytes": {memory}, "link_bytes_per_s": 1e9}}"#);
        format!(
            r#"{{"tasks": [{{"name": "a", "minibatches": {minibatches}, "shards": [{shard}, {shard}, {shard}]}},
                           {{"name": "b", "minibatches": 1, "shards": [{shard}]}}],
                 "devices": [{device}, {device}]}}"#
        )
    };
    for (bytes, minibatches, memory) in
        [(1, 1, u64::MAX), (20_000_000_000_000_000, 1_000, u64::MAX), (u64::MAX / 2, 3, u64::MAX)]
    {
        let workload = Workload::from_json(&text(bytes, minibatches, memory)).unwrap();
        let rows = compare(&workload, false).unwrap();
        assert!(rows.iter().any(|row| row.outcome.is_ok()), "{bytes}");
    }
}

/// A model that promotes many bytes in few of its shard tasks moves more than another one by the same number.
#[test]
fn bytes_that_move_are_those_that_were_promoted() {
    let mut workload = workload(1, 3, 1);
    workload.tasks[0].shards[2].bytes = Some(1_000);
    let outcome = of(&workload, Strategy::Sharp);
    // All three shards, and the first one again for its backward, in each of two minibatches.
    assert_eq!(outcome.moved_bytes, Some(2 * (10 + 10 + 1_000 + 10)));
    assert_eq!(of(&workload, Strategy::SpilledTaskParallel).moved_bytes, outcome.moved_bytes);
}

#[test]
fn stages_are_contiguous_and_even() {
    let shard = |s: f64| ShardCost::new(0.0, s, 0.0);
    let task = TaskCost::new("a", 1, [1.0, 1.0, 1.0, 3.0, 3.0].map(shard).to_vec());
    assert_eq!(stages(&task, 3), [0, 3, 4]);
    assert_eq!(stages(&task, 1), [0]);
    assert_eq!(stages(&task, 9), [0, 3, 4], "no stage is longer than the longest shard has to be");
}

/// No strategy is faster than all its compute on all devices, nor SHARP than its bounds; spans cover the
/// compute of the devices.
#[test]
fn every_strategy_does_all_the_work() {
    for seed in 0..20 {
        let draw =
            Draw { models: (1, 6), devices: (1, 4), shards: (1, 6), shard_tasks: (5, 60), ..Draw::default() };
        let workload = draw.workload(seed);
        let total_s = workload.total_s();
        let rows = compare(&workload, true).unwrap();
        for Row { strategy, outcome } in rows {
            let outcome = outcome.unwrap();
            let busy_s: f64 = outcome.busy_s.iter().sum();
            assert!((busy_s - total_s).abs() < 1e-6 * total_s, "{strategy} {busy_s} {total_s}");
            let compute =
                outcome.spans.iter().filter(|span| !matches!(span.what, Occupation::Promote { .. }));
            let spans_s: f64 = compute.map(|span| span.end_s - span.start_s).sum();
            assert!((spans_s - total_s).abs() < 1e-6 * total_s, "{strategy}");
            assert!(outcome.spans.iter().all(|span| span.end_s <= outcome.runtime_s * (1.0 + 1e-9)));
            assert!((0.0..=1.0 + 1e-9).contains(&outcome.utilization()));
            if strategy == Strategy::Sharp {
                let bound_s = LowerBounds::of(&workload, true).unwrap().best_s();
                assert!(outcome.runtime_s >= bound_s * (1.0 - 1e-9));
            }
        }
    }
}

#[test]
fn cost_and_energy_follow_from_the_runtime() {
    let outcome = StrategyOutcome {
        runtime_s: 3600.0,
        busy_s: vec![3600.0, 0.0],
        moved_bytes: None,
        spans: Vec::new(),
    };
    assert_eq!((outcome.device_hours(), outcome.utilization()), (2.0, 0.5));
    assert!((outcome.energy_kwh(PowerModel::default()) - 0.36).abs() < 1e-12);
}
