//! Workloads as text: parsing, writing, and the errors of each rule.

use hydra_sched::*;

const FULL: &str = r#"{
    "tasks": [
        {"name": "a", "minibatches": 3, "arrival_s": 2.5, "optimizer_s": 0.5, "step_wait_s": 0.1, "estimate_factor": 2.0, "drift": 1.0,
         "shards": [{"forward_s": 1.0, "backward_s": 2.0, "bytes": 100},
                    {"forward_s": 1.5, "backward_s": 4.0, "bytes": 50, "promote_s": 0.25}]},
        {"name": "b", "minibatches": 1, "microbatches": 4, "microbatch_group": 2, "epoch": {"minibatches": 1, "last_microbatches": 3},
         "shards": [{"forward_s": 0, "backward_s": 8, "bytes": 10}]}
    ],
    "devices": [{"speed": 2.0, "memory_bytes": 200, "replacement": "least-recent", "link_bytes_per_s": 50.0}, {"link_bytes_per_s": 100}],
    "shared_link": true,
    "variation": {"seed": 7, "relative": 0.1}
}"#;

fn with(change: impl FnOnce(&mut Workload)) -> WorkloadError {
    let mut workload = Workload::from_json(FULL).unwrap();
    change(&mut workload);
    workload.check().unwrap_err()
}

#[test]
fn reads_everything_and_writes_it_again() {
    let workload = Workload::from_json(FULL).unwrap();
    assert_eq!(Workload::from_json(&workload.to_json()).unwrap(), workload);
    assert_eq!(workload.shard_tasks(), 3 * 3 + 3);
    assert_eq!(workload.devices[0].replacement, Replacement::LeastRecent);
    assert_eq!(workload.promote_s(0, 0, 0), 2.0);
    assert_eq!(workload.promote_s(1, 0, 0), 1.0);
    assert_eq!(workload.promote_s(1, 0, 1), 0.25, "stated seconds come before bytes");
    assert_eq!(workload.tasks[0].pass_s(), 1.0 + 4.0 + 2.0);
    assert_eq!(workload.tasks[1].pass_s(), 8.0);
}

/// Workloads of earlier versions are read under their former keys, and written with the present ones.
#[test]
fn former_keys_are_read() {
    let former = r#"{"tasks": [{"name": "a", "minibatches": 2, "microbatches": 4, "visit": 2, "evaluation_visit": 3, "lanes": 2,
        "evaluations": [{"after": 1, "sweeps": 5}],
        "shards": [{"forward_s": 1, "backward_s": 2, "promote_s": 0, "bytes": 10, "images": [{"id": 0, "bytes": 10}],
                    "working": {"forward": 4, "backward": 8, "input": 1, "gradients": 2, "sums": 1}}]}],
        "devices": 1}"#;
    let workload = Workload::from_json(former).unwrap();
    let task = &workload.tasks[0];
    assert_eq!((task.microbatch_group, task.evaluation_group, task.replicas), (2, 3, 2));
    assert_eq!(task.evaluations, [EvaluationCost { after: 1, microbatch_passes: 5 }]);
    assert_eq!(task.shards[0].buffers, [ParamBufferCost { id: 0, bytes: 10 }]);
    assert_eq!(task.shards[0].working.accumulation, 1);
    let written = workload.to_json();
    assert_eq!(Workload::from_json(&written).unwrap(), workload);
    for key in ["visit", "evaluation_visit", "lanes", "sweeps", "images", "sums"] {
        assert!(!written.contains(&format!("\"{key}\"")), "{key}: {written}");
    }
}

#[test]
fn a_number_of_devices_is_that_many_equal_ones() {
    let text = r#"{"tasks": [{"name": "a", "minibatches": 1, "shards": [{"forward_s": 1, "backward_s": 1}]}], "devices": 3}"#;
    assert_eq!(Workload::from_json(text).unwrap().devices, vec![DeviceCost::default(); 3]);
}

/// The sums of an incomplete task are defined; `check` refuses it later.
#[test]
fn a_task_without_shards_has_no_work() {
    let task = TaskCost::new("a", 3, Vec::new());
    assert_eq!((task.microbatch_pass().count(), task.pass_s(), task.shard_tasks()), (0, 0.0, 0));
    let workload = Workload::new(vec![task], Vec::new());
    assert_eq!(workload.total_s(), 0.0);
}

#[test]
fn drift_and_variation_change_the_times_within_their_limits() {
    let workload = Workload::from_json(FULL).unwrap();
    let steady = Workload { variation: None, ..workload.clone() };
    let last = |workload: &Workload, minibatch| workload.seconds(0, minibatch, ShardTaskKind::Backward, 1);
    assert_eq!([last(&steady, 0), last(&steady, 1), last(&steady, 2)], [4.0, 6.0, 8.0]);
    let ratios: Vec<f64> = (0..3).map(|m| last(&workload, m) / last(&steady, m)).collect();
    assert!(ratios.iter().all(|ratio| (0.9..1.1).contains(ratio)), "{ratios:?}");
    assert!(ratios[0] != ratios[1] && ratios[1] != ratios[2]);
    assert_eq!(last(&workload, 1), last(&workload, 1));
    let walked: f64 = (0..3)
        .map(|m| {
            steady.tasks[0]
                .microbatch_pass()
                .map(|(kind, shard)| steady.seconds(0, m, kind, shard))
                .sum::<f64>()
        })
        .sum();
    assert_eq!(steady.task_s(0), walked);
}

#[test]
fn microbatches_and_frozen_shards_count_in_every_sum() {
    let mut task = TaskCost::new("a", 7, vec![ShardCost::new(1.0, 2.0, 0.0); 3]);
    (task.microbatches, task.first_trained) = (4, 1);
    task.epoch = Some(Epoch { minibatches: 3, last_microbatches: 1 });
    assert_eq!((task.training_passes(), task.pass_s()), (4 + 4 + 1 + 4 + 4 + 1 + 4, 1.0 + 1.0 + 2.0 + 2.0));
    assert_eq!(task.shard_tasks(), 22 * 4);
    let mut workload = Workload::new(vec![task], vec![DeviceCost::default()]);
    assert_eq!(workload.task_s(0), 22.0 * 6.0);
    let run =
        |workload: &Workload| simulate(workload, &mut ShardedLrtf, SimulationOptions::default()).unwrap();
    assert_eq!((run(&workload).shard_tasks, run(&workload).makespan_s), (22 * 4, workload.task_s(0)));
    workload.tasks[0].drift = 1.0;
    assert!((run(&workload).makespan_s - workload.task_s(0)).abs() < 1e-9);
}

/// Evaluations at the end come after the last minibatch.
#[test]
fn drift_ends_with_the_last_minibatch() {
    let task = |minibatches, drift| {
        let text = format!(
            r#"{{"tasks": [{{"name": "a", "minibatches": {minibatches}, "drift": {drift},
                "evaluations": [{{"after": {minibatches}, "microbatch_passes": 1}}],
                "shards": [{{"forward_s": 1, "backward_s": 1, "promote_s": 0}}]}}], "devices": 1}}"#
        );
        Workload::from_json(&text).unwrap()
    };
    let times = |workload: &Workload| {
        let minibatches = workload.tasks[0].minibatches;
        let training = (0..minibatches).map(|m| workload.seconds(0, m, ShardTaskKind::Backward, 0));
        let evaluation = workload.seconds(0, minibatches, ShardTaskKind::Evaluate, 0);
        training.chain([evaluation]).collect::<Vec<f64>>()
    };
    for (minibatches, drift, expected) in [
        (2, -1.0, vec![1.0, 0.0, 0.0]),
        (2, 1.0, vec![1.0, 2.0, 2.0]),
        (3, 1.0, vec![1.0, 1.5, 2.0, 2.0]),
        (1, 1.0, vec![1.0, 1.0]),
    ] {
        let workload = task(minibatches, drift);
        assert_eq!(times(&workload), expected, "{minibatches} minibatches, drift {drift}");
        assert_eq!(workload.task_s(0), expected.iter().sum::<f64>());
        let options = SimulationOptions::default();
        let run = simulate(&workload, &mut ShardedLrtfEager, options);
        assert_eq!(run.unwrap().makespan_s, workload.task_s(0));
    }
}

#[test]
fn what_is_no_such_json_is_told_where() {
    for (text, says) in [
        ("", "not a workload"),
        ("tasks: []", "line 1"),
        (r#"{"tasks": [], "device": 1}"#, "device"),
        (r#"{"tasks": []}"#, "devices"),
        (r#"{"tasks": [], "devices": -1}"#, "found -1"),
        (r#"{"tasks": [], "devices": 1.5}"#, "found 1.5"),
        (r#"{"tasks": [], "devices": 99999999999}"#, "found 99999999999"),
        (r#"{"tasks": [], "devices": "two"}"#, "found \"two\""),
        (r#"{"tasks": [], "devices": [{"sped": 1}]}"#, "sped"),
        (r#"{"tasks": [{"name": "a", "minibatches": -1, "shards": []}], "devices": 1}"#, "-1"),
        (
            r#"{"tasks": [{"name": "a", "minibatches": 1, "shards": [{"forward_s": 1e999}]}], "devices": 1}"#,
            "range",
        ),
    ] {
        let error = Workload::from_json(text).unwrap_err();
        assert!(matches!(error, WorkloadError::Json(_)), "{text}: {error:?}");
        let message = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error}: {message}").contains(says), "{text}: {error}: {message}");
    }
}

#[test]
fn every_rule_names_what_breaks_it() {
    let cases = [
        (with(|w| w.tasks.clear()), "no task"),
        (with(|w| w.devices.clear()), "no device"),
        (with(|w| w.tasks[1].name = "a".into()), "`a`"),
        (with(|w| w.tasks[1].minibatches = 0), "`b`"),
        (with(|w| w.tasks[1].shards.clear()), "`b`"),
        (with(|w| w.tasks[1].microbatches = 0), "microbatches of task `b` is 0"),
        (with(|w| w.tasks[1].microbatch_group = 0), "microbatch_group of task `b` is 0"),
        (with(|w| w.tasks[1].evaluation_group = 0), "evaluation_group of task `b` is 0"),
        (
            with(|w| w.tasks[1].epoch = Some(Epoch { minibatches: 0, last_microbatches: 1 })),
            "epoch.minibatches of",
        ),
        (with(|w| w.tasks[1].microbatches = 2), "epoch.last_microbatches of task `b` is 3"),
        (with(|w| w.tasks[0].first_trained = 2), "first_trained of task `a` is 2; it must be less than"),
        (with(|w| (w.tasks[1].microbatches, w.tasks[1].minibatches) = (u64::MAX, u64::MAX)), "shard tasks"),
        (with(|w| w.tasks[1].minibatches = u64::MAX), "shard tasks"),
        (with(|w| w.tasks[0].shards[1].backward_s = -2.0), "backward_s of shard 1 of task `a` is -2"),
        (with(|w| w.tasks[0].shards[1].forward_s = f64::NAN), "forward_s of shard 1 of task `a` is NaN"),
        (with(|w| w.tasks[0].shards[0].promote_s = Some(f64::INFINITY)), "promote_s of shard 0"),
        (with(|w| w.tasks[0].arrival_s = -1.0), "arrival_s of task `a` is -1"),
        (with(|w| w.tasks[0].optimizer_s = f64::NAN), "optimizer_s of task `a`"),
        (with(|w| w.tasks[0].step_wait_s = -1.0), "step_wait_s of task `a` is -1"),
        (with(|w| w.tasks[0].estimate_factor = -0.5), "estimate_factor of task `a` is -0.5"),
        (with(|w| w.tasks[0].estimate_factor = f64::NAN), "estimate_factor of task `a` is NaN"),
        (with(|w| w.tasks[0].estimate_factor = 1e307), "at most a million"),
        (with(|w| w.tasks[0].drift = -1.5), "drift of task `a` is -1.5"),
        (with(|w| w.devices[1].speed = 0.0), "speed of device 1 is 0"),
        (with(|w| w.devices[1].speed = 1e-308), "the time of all shard tasks is inf"),
        (with(|w| w.tasks[0].shards[0].backward_s = 8e307), "the time of all shard tasks is inf"),
        (with(|w| w.devices[0].link_bytes_per_s = Some(f64::NAN)), "link_bytes_per_s of device 0"),
        (with(|w| w.devices[1].link_bytes_per_s = None), "device 1 has no `link_bytes_per_s`"),
        (with(|w| w.devices[0].memory_bytes = Some(199)), "200"),
        (with(|w| w.tasks[0].shards[1].bytes = None), "`bytes`"),
        (with(|w| w.variation = Some(Variation { seed: 0, relative: 1.0 })), "relative of variation is 1"),
    ];
    for (error, says) in cases {
        assert!(error.to_string().contains(says), "{error} does not say {says}");
    }
}
