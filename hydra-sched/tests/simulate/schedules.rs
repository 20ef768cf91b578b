//! Simulated schedules with known times, and the performance of policies on drawn workloads.

use hydra_sched::{
    Claimable, DeviceCost, Draw, EvaluationCost, ModelIndex, ModelView, Occupation, ParamBufferCost, Policy,
    PolicyKind, Priority, Replacement, Request, ScheduleSpan, ShardCost, ShardTaskKind, ShardTimes,
    Simulation, SimulationOptions, TaskCost, WorkingBytes, Workload, replay, simulate,
};

/// A workload on devices that keep copies.
fn on(tasks: Vec<TaskCost>, devices: usize) -> Workload {
    Workload::new(tasks, vec![DeviceCost { keeps_copies: true, ..DeviceCost::default() }; devices])
}

fn one_shard(name: &str, minibatches: u64, backward_s: f64, promote_s: f64) -> TaskCost {
    TaskCost::new(name, minibatches, vec![ShardCost::new(0.0, backward_s, promote_s)])
}

fn run(workload: &Workload, kind: PolicyKind) -> Simulation {
    let options = SimulationOptions { prefetch: true, record: true };
    simulate(workload, &mut *kind.build(3), options).unwrap()
}

fn lrtf(workload: &Workload) -> Simulation {
    run(workload, PolicyKind::ShardedLrtfEager)
}

/// The whole schedule of a lone model of two shards, by hand: the second shard's promotion hides behind the
/// first one's forward, and nothing hides that of the first after a step.
#[test]
fn a_lone_model_waits_for_stale_copies_only() {
    let shards = vec![ShardCost::new(1.0, 2.0, 0.5), ShardCost::new(0.0, 3.0, 0.5)];
    let result = lrtf(&on(vec![TaskCost::new("a", 2, shards)], 1));
    let compute: Vec<_> =
        result.spans.iter().filter(|s| !matches!(s.what, Occupation::Promote { .. })).collect();
    let times: Vec<_> = compute.iter().map(|s| (s.shard, s.start_s, s.end_s)).collect();
    let expected =
        [(0, 0.5, 1.5), (1, 1.5, 4.5), (0, 4.5, 6.5), (0, 7.0, 8.0), (1, 8.0, 11.0), (0, 11.0, 13.0)];
    assert_eq!(times, expected);
    assert_eq!((result.promotions, result.promotions_saved, result.shard_tasks), (4, 2, 6));
    assert_eq!((result.makespan_s, result.bounds.chain_s, result.gap()), (13.0, 13.0, 1.0));
    assert_eq!(result.promotion_wait_s, 1.0);
    assert_eq!(result.utilization(), [12.0 / 13.0]);
}

#[test]
fn a_lone_model_of_one_shard_promotes_after_every_step_and_ends() {
    let mut workload = on(vec![one_shard("a", 5, 2.0, 0.5)], 3);
    workload.tasks[0].optimizer_s = 0.25;
    for kind in PolicyKind::ALL {
        let result = run(&workload, kind);
        assert_eq!((result.makespan_s, result.promotions), (5.0 * 2.5 + 4.0 * 0.25, 5), "{kind}");
        assert_eq!(result.gap(), 1.0);
    }
}

/// Eight models on eight devices wait for the host's single optimizer, which takes as long as a device for
/// each of them: it receives the first step after a second, and when it has done those of the last minibatch
/// except one, the last model computes for one more second.
#[test]
fn all_models_share_the_host_optimizer() {
    let model = |name: &str| TaskCost { optimizer_s: 1.0, ..one_shard(name, 10, 1.0, 0.0) };
    let mut workload = on(["a", "b", "c", "d", "e", "f", "g", "h"].map(model).into(), 8);
    for kind in PolicyKind::ALL {
        let result = run(&workload, kind);
        assert_eq!((result.makespan_s, result.bounds.host_s), (74.0, 74.0), "{kind}");
        assert_eq!(result.gap(), 1.0);
    }
    // A wait in a recorded run applies to each model separately.
    workload.tasks.iter_mut().for_each(|task| (task.optimizer_s, task.step_wait_s) = (0.0, 1.0));
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.bounds.host_s, result.gap()), (19.0, 0.0, 1.0));
}

/// Shards are updated in the order in which their backwards end, alternating between two models, by hand: `a`
/// ends its backwards at 1 and 2, `b` at 1.5 and 2.5, and each step takes a second.
#[test]
fn the_host_optimizer_takes_shards_in_the_order_of_their_backwards() {
    let model = |name: &str, arrival_s| {
        let shard = ShardCost::new(0.0, 1.0, 0.0);
        TaskCost { optimizer_s: 2.0, arrival_s, ..TaskCost::new(name, 2, vec![shard; 2]) }
    };
    let result = lrtf(&on(vec![model("a", 0.0), model("b", 0.5)], 2));
    let second = |task| {
        let starts = result.spans.iter().filter(|s| !matches!(s.what, Occupation::Promote { .. }));
        let starts = starts.filter(|s| (s.task, s.minibatch) == (task, 1));
        starts.map(|s| (s.shard, s.start_s)).collect::<Vec<_>>()
    };
    // Steps end at 2 and 4 for `a`, at 3 and 5 for `b`.
    assert_eq!(second(0), [(0, 4.0), (1, 4.0), (0, 5.0)]);
    assert_eq!(second(1), [(0, 5.0), (1, 5.0), (0, 6.0)]);
}

/// An idle device waits for parameters only from its commitment on.
#[test]
fn a_device_waits_for_promotions_from_its_commitment_on() {
    let mut workload = on(vec![one_shard("a", 1, 1.0, 0.5)], 1);
    workload.tasks[0].arrival_s = 10.0;
    assert_eq!((lrtf(&workload).makespan_s, lrtf(&workload).promotion_wait_s), (11.5, 0.5));
}

#[test]
fn another_model_hides_promotions() {
    let workload = on(vec![one_shard("a", 5, 2.0, 0.5), one_shard("b", 5, 2.0, 0.5)], 1);
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.promotion_wait_s), (20.5, 0.5));
    let without = SimulationOptions { prefetch: false, record: false };
    let without = simulate(&workload, &mut hydra_sched::ShardedLrtfEager, without).unwrap();
    assert_eq!((without.makespan_s, without.promotion_wait_s), (25.0, 5.0));
    assert!(without.spans.is_empty());
}

#[test]
fn a_shared_link_is_taken_in_turns() {
    let mut workload = on(vec![one_shard("a", 1, 1.0, 2.0), one_shard("b", 1, 1.0, 2.0)], 2);
    assert_eq!(lrtf(&workload).makespan_s, 3.0);
    workload.shared_link = true;
    assert_eq!(lrtf(&workload).makespan_s, 5.0);
}

/// Of three models of 4 s, two minibatches each, one at a time fits, until the first has ended, which frees
/// memory for two. While the first and the second alternate, the other device is idle.
#[test]
fn models_wait_for_room_on_the_host() {
    let models = ["a", "b", "c"].map(|name| one_shard(name, 2, 2.0, 0.0));
    let mut workload = on(models.into(), 2);
    assert_eq!(lrtf(&workload).makespan_s, 6.0);
    workload.host_bytes = Some(34);
    workload.tasks.iter_mut().for_each(|task| (task.masters_bytes, task.active_bytes) = (7, 10));
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.finished_s), (10.0, vec![8.0, 10.0, 10.0]));
    workload.host_bytes = Some(41);
    assert_eq!(lrtf(&workload).makespan_s, 6.0);
    workload.host_bytes = Some(30);
    let error = workload.check().unwrap_err().to_string();
    assert!(error.contains("host_bytes") && error.contains("masters_bytes"), "{error}");
}

/// A minibatch keeps its memory until its master weights are updated.
#[test]
fn a_step_keeps_its_models_room() {
    let mut workload = on(["a", "b"].map(|name| one_shard(name, 1, 2.0, 0.0)).into(), 1);
    workload.tasks.iter_mut().for_each(|task| (task.optimizer_s, task.active_bytes) = (1.0, 10));
    assert_eq!(lrtf(&workload).makespan_s, 4.0);
    workload.host_bytes = Some(19);
    assert_eq!(lrtf(&workload).makespan_s, 5.0);
}

/// The peak of a device, by hand: two shards of 10 and 20 bytes; the second one's copy is promoted while the
/// first one computes; the input of each microbatch group's second microbatch is uploaded while the first one
/// computes.
#[test]
fn a_devices_peak_is_copies_and_what_is_computed_beside_them() {
    let working = WorkingBytes { forward: 7, backward: 30, ..WorkingBytes::default() };
    let first = ShardCost { bytes: Some(10), working, ..ShardCost::new(4.0, 8.0, 0.0) };
    let working = WorkingBytes { forward: 8, backward: 50, input: 5, ..WorkingBytes::default() };
    let second = ShardCost { bytes: Some(20), working, ..ShardCost::new(4.0, 8.0, 0.0) };
    let mut workload = on(vec![TaskCost::new("a", 1, vec![first, second])], 1);
    assert_eq!(lrtf(&workload).peak_bytes, [10 + 20 + 50]);
    (workload.tasks[0].microbatches, workload.tasks[0].microbatch_group) = (2, 2);
    assert_eq!(lrtf(&workload).peak_bytes, [10 + 20 + 50 + 5]);
    workload.tasks[0].shards[0].working.forward = 100;
    assert_eq!(lrtf(&workload).peak_bytes, [10 + 20 + 100 + 5]);
    workload.devices[0].keeps_copies = false;
    assert_eq!(lrtf(&workload).peak_bytes, [0], "no peak is recorded without a cache");
}

/// Inputs of the next shard task are uploaded while the current one computes, unless that computes them.
#[test]
fn inputs_come_with_promotions() {
    let shard = |input: u64| {
        let working = WorkingBytes { forward: 3, input, ..WorkingBytes::default() };
        ShardCost { bytes: Some(1), working, ..ShardCost::new(1.0, 1.0, 0.0) }
    };
    let mut workload = on(vec![TaskCost::new("a", 1, vec![shard(0), shard(100)])], 1);
    workload.tasks[0].evaluations = vec![EvaluationCost { after: 0, microbatch_passes: 2 }];
    assert_eq!(lrtf(&workload).peak_bytes, [2 + 3]);
    workload.tasks[0].evaluation_group = 2;
    assert_eq!(
        lrtf(&workload).peak_bytes,
        [2 + 3 + 100],
        "the second pass's input waits while the first computes"
    );
}

/// Gradients are downloaded in sequence before the optimizer step; an output that is used on the same device
/// does not wait.
#[test]
fn a_step_waits_for_its_gradients() {
    let mut one = one_shard("a", 2, 2.0, 0.0);
    one.shards[0].gradients_s = 1.0;
    assert_eq!(lrtf(&on(vec![one.clone()], 1)).makespan_s, 2.0 + 1.0 + 2.0);
    one.optimizer_s = 1.0;
    assert_eq!(lrtf(&on(vec![one], 1)).makespan_s, 2.0 + 1.0 + 1.0 + 2.0);
    let shard = ShardCost { download_s: 5.0, gradients_s: 1.5, ..ShardCost::new(1.0, 1.0, 0.0) };
    let two = TaskCost::new("a", 2, vec![shard; 2]);
    // The backwards end at 2 and 3, and their downloads at 3.5 and 5.
    assert_eq!(lrtf(&on(vec![two], 1)).makespan_s, 5.0 + 3.0);
}

/// The host optimizer starts when gradients arrive, and shares the processors from then on: `b` has ten
/// seconds of work, concurrent with a step of four at half the speed from the second to the tenth.
#[test]
fn a_step_shares_processors_when_its_gradients_are_there() {
    let mut a = one_shard("a", 2, 1.0, 0.0);
    (a.shards[0].gradients_s, a.optimizer_s) = (1.0, 4.0);
    let mut workload = on(vec![a, one_shard("b", 1, 10.0, 0.0)], 1);
    (workload.processors, workload.optimizer_threads, workload.devices[0].threads) = (Some(1), 1, 1);
    let result = run(&workload, PolicyKind::Fifo);
    assert_eq!(result.finished_s[1], 1.0 + 10.0 + 4.0);
}

/// Gradients of a later backward may arrive first, and bounds account for it.
#[test]
fn shards_are_stepped_as_their_gradients_come() {
    let shards = [ShardCost::new(10.0, 1.0, 0.0), ShardCost::new(0.0, 1.0, 0.0)];
    let mut task = TaskCost::new("a", 2, shards.to_vec());
    (task.optimizer_s, task.shards[1].gradients_s) = (100.0, 1.5);
    let result = lrtf(&on(vec![task], 1));
    // The first shard is updated from 12 to 62, and the second one until 112, while the forward of the first
    // computes.
    assert_eq!(result.makespan_s, 112.0 + 2.0);
    assert!(result.gap() >= 1.0, "{:?}", result.bounds);
}

/// Gradients that are accumulated over a microbatch group are downloaded once.
#[test]
fn one_sum_of_a_groups_gradients_goes_down() {
    let mut task = one_shard("a", 2, 1.0, 0.0);
    (task.microbatches, task.microbatch_group) = (3, 3);
    (task.shards[0].gradients_s, task.shards[0].working.gradients) = (2.0, 10);
    let makespan_s = |accumulation: u64, microbatch_group: u64| {
        let mut task = task.clone();
        (task.shards[0].working.accumulation, task.microbatch_group) = (accumulation, microbatch_group);
        lrtf(&on(vec![task], 1)).makespan_s
    };
    assert_eq!(makespan_s(0, 3), 7.0 + 3.0, "three of two seconds, from the end of the first one");
    assert_eq!(makespan_s(10, 3), 5.0 + 3.0);
    // Half of each of the first two takes a second.
    assert_eq!(makespan_s(5, 3), 5.0 + 3.0);
    assert_eq!(makespan_s(10, 1), 7.0 + 3.0, "nothing is accumulated over groups");
}

/// A device of 35 bytes and a larger one run three shards of 10 bytes: the first one is promoted for its
/// backward when that of the second has ended, and computes when the gradients of the last one are
/// downloaded.
#[test]
fn promotions_wait_for_room() {
    let working = WorkingBytes { backward: 15, gradients: 8, ..WorkingBytes::default() };
    let shard = ShardCost { bytes: Some(10), working, gradients_s: 3.0, ..ShardCost::new(1.0, 1.0, 0.5) };
    let mut workload = on(vec![TaskCost::new("a", 1, vec![shard; 3])], 1);
    let mut of = |working_bytes| {
        (workload.devices[0].memory_bytes, workload.devices[0].working_bytes) = (Some(20), working_bytes);
        let result = lrtf(&workload);
        let promotes = |span: &&ScheduleSpan| matches!(span.what, Occupation::Promote { .. });
        let last_s = result.spans.iter().filter(promotes).map(|span| span.start_s).fold(0.0, f64::max);
        (result.makespan_s, last_s, result.promotions, result.peak_bytes[0])
    };
    assert_eq!(of(Some(100)), (0.5 + 5.0, 1.5, 3, 61), "all copies stay");
    // The backwards of the others end at 3.5 and 4.5, and their downloads at 6.5 and 9.5.
    assert_eq!(of(Some(15)), (6.5 + 1.0, 4.5, 4, 35));
    assert_eq!(of(None), (0.5 + 5.0, 3.5, 4, 51), "promoted again during the backward before it");
    workload.devices[0].working_bytes = Some(4);
    let error = workload.check().unwrap_err().to_string();
    assert!(error.contains("shard 0 of task `a`") && error.contains("working_bytes"), "{error}");
}

/// Shard tasks also wait for memory, with or without a parameter cache.
#[test]
fn shard_tasks_wait_for_room() {
    let working = WorkingBytes { backward: 15, gradients: 15, ..WorkingBytes::default() };
    let shard = ShardCost { bytes: Some(10), working, gradients_s: 1.0, ..ShardCost::new(1.0, 1.0, 0.0) };
    let mut workload = on(vec![TaskCost::new("a", 1, vec![shard; 2])], 1);
    for keeps_copies in [true, false] {
        workload.devices[0].keeps_copies = keeps_copies;
        let mut makespan_s = |working_bytes| {
            (workload.devices[0].memory_bytes, workload.devices[0].working_bytes) = (Some(20), working_bytes);
            lrtf(&workload).makespan_s
        };
        assert_eq!(makespan_s(Some(15)), 4.0, "the last one waits for the gradients of the one before");
        assert_eq!(makespan_s(Some(20)), 3.0);
        assert_eq!(makespan_s(None), 3.0);
    }
}

/// Buffers of a shard are cached separately: neither buffers that are still cached nor those of another shard
/// are promoted again.
#[test]
fn buffers_come_and_go_by_themselves() {
    let buffer = |id, bytes| ParamBufferCost { id, bytes };
    let shard = |buffers| ShardCost { bytes: Some(10), buffers, ..ShardCost::new(1.0, 1.0, 1.0) };
    let promoted = |shards: Vec<ShardCost>, memory| {
        let mut workload = on(vec![TaskCost::new("a", 1, shards)], 1);
        workload.devices[0].memory_bytes = Some(memory);
        lrtf(&workload).promoted_bytes
    };
    let halves = |first| shard(vec![buffer(first, 5), buffer(first + 1, 5)]);
    assert_eq!(promoted(vec![halves(0), halves(2), halves(4)], 25), Some(30 + 5));
    assert_eq!(promoted(vec![shard(Vec::new()); 3], 25), Some(30 + 10), "copies of whole shards");
    let tied = [1, 2].map(|other| shard(vec![buffer(0, 4), buffer(other, 6)]));
    assert_eq!(promoted(tied.to_vec(), 100), Some(16));
    let mut wrong = on(vec![TaskCost::new("a", 1, vec![shard(vec![buffer(0, 4)])])], 1);
    wrong.devices[0].memory_bytes = Some(100);
    let error = wrong.check().unwrap_err().to_string();
    assert!(error.contains("the sum of `buffers` of shard 0 of task `a` is 4"), "{error}");
}

/// A replay uses the recorded time of each shard task: the second of two devices waits for the longer
/// microbatch, which a mean would not show. Unrecorded shard tasks take their stated time.
#[test]
fn a_replay_takes_what_each_shard_task_took() {
    let mut task = one_shard("a", 2, 2.0, 0.0);
    (task.microbatches, task.replicas) = (2, 2);
    task.evaluations = vec![EvaluationCost { after: 2, microbatch_passes: 2 }];
    task.shards[0].evaluate_s = Some(1.0);
    let workload = on(vec![task], 2);
    let mut times = ShardTimes::default();
    let replayed = |times: &ShardTimes| {
        let mut policy = PolicyKind::ShardedLrtfEager.build(0);
        replay(&workload, times, &mut *policy, SimulationOptions::default()).unwrap().makespan_s
    };
    assert_eq!(replayed(&times), 2.0 + 2.0 + 1.0);
    times.insert((0, ShardTaskKind::Backward, 0, 0), 1, 3.5);
    times.insert((0, ShardTaskKind::Backward, 0, 0), 0, 0.5);
    assert_eq!(replayed(&times), 3.5 + 2.0 + 1.0);
    // Batches of an evaluation are in their order, regardless of their numbers.
    times.insert((0, ShardTaskKind::Evaluate, 2, 0), 7, 0.25);
    times.insert((0, ShardTaskKind::Evaluate, 2, 0), 7, 1.5);
    assert_eq!(replayed(&times), 3.5 + 2.0 + 1.5);
    assert_eq!(replayed(&ShardTimes::default()), lrtf(&workload).makespan_s);
}

/// Two devices of one thread alternate on one processor.
#[test]
fn devices_share_processors() {
    let mut workload = on(vec![one_shard("a", 1, 2.0, 0.0), one_shard("b", 1, 4.0, 0.0)], 2);
    workload.processors = Some(1);
    assert_eq!(lrtf(&workload).makespan_s, 4.0, "a device without threads has processors of its own");
    workload.devices.iter_mut().for_each(|device| device.threads = 1);
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.finished_s), (6.0, vec![6.0, 4.0]));
    assert_eq!(result.promotion_wait_s, 0.0, "waiting for processors is not a wait for parameters");
    assert_eq!(result.busy_s.iter().sum::<f64>(), 6.0);
    workload.processors = Some(2);
    assert_eq!(lrtf(&workload).makespan_s, 4.0);
    // All threads of one device use the processors, even if they are fewer.
    workload.devices.iter_mut().for_each(|device| device.threads = 4);
    assert_eq!(lrtf(&workload).finished_s, [6.0, 4.0]);
    // The third device uses the second one's processor, and nothing is slower than alone.
    let tasks =
        [("a", 2), ("b", 1), ("c", 1)].map(|(name, minibatches)| one_shard(name, minibatches, 2.0, 0.0));
    let mut workload = on(tasks.into(), 3);
    workload.processors = Some(2);
    workload.devices.iter_mut().for_each(|device| device.threads = 1);
    assert_eq!(lrtf(&workload).finished_s, [4.0, 2.0, 4.0]);
    // The second waits until 2 s for two processors, and no other overtakes it, although one is free.
    (workload.devices[1].threads, workload.tasks[1].shards[0].backward_s) = (2, 3.0);
    workload.tasks[2].shards[0].backward_s = 1.0;
    assert_eq!(lrtf(&workload).finished_s, [7.0, 5.0, 6.0]);
    workload.processors = Some(0);
    assert!(workload.check().unwrap_err().to_string().contains("processors"));
}

/// The step of the first model takes half of the only processor, so that it and the second model's shard
/// task, which starts at the same time, both take twice as long, until the step's second is done.
#[test]
fn steps_share_processors_with_devices() {
    let mut workload = on(vec![one_shard("a", 2, 3.0, 0.0), one_shard("b", 1, 3.0, 0.0)], 1);
    workload.tasks[0].optimizer_s = 1.0;
    assert_eq!(lrtf(&workload).finished_s, [9.0, 6.0]);
    (workload.processors, workload.optimizer_threads, workload.devices[0].threads) = (Some(1), 1, 1);
    let result = lrtf(&workload);
    assert_eq!(result.finished_s, [10.0, 7.0]);
    // Two simultaneous steps have one optimizer and run in sequence.
    let mut workload = on(["a", "b"].map(|name| one_shard(name, 2, 2.0, 0.0)).into(), 2);
    workload.tasks.iter_mut().for_each(|task| task.optimizer_s = 1.0);
    assert_eq!(lrtf(&workload).finished_s, [5.0, 6.0]);
    (workload.processors, workload.optimizer_threads) = (Some(1), 1);
    assert_eq!(lrtf(&workload).finished_s, [5.0, 6.0], "these devices have processors of their own");
    workload.devices.iter_mut().for_each(|device| device.threads = 1);
    // The first has computed at 2 s; its step and the second share until 4, and that computes alone until 5.
    // The second's step and the first share until 7, that is alone until 8, and then the first's last step
    // and the second share until 10.
    assert_eq!(lrtf(&workload).finished_s, [8.0, 11.0]);
}

#[test]
fn the_fast_device_is_served_first() {
    let mut workload = on(vec![one_shard("a", 1, 4.0, 0.0)], 3);
    workload.devices[2].speed = 4.0;
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.busy_s), (1.0, vec![0.0, 0.0, 1.0]));
}

#[test]
fn a_model_is_not_there_before_it_arrives() {
    let mut workload = on(vec![one_shard("a", 1, 4.0, 0.0), one_shard("b", 1, 1.0, 0.0)], 2);
    workload.tasks[1].arrival_s = 10.0;
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.finished_s), (11.0, vec![4.0, 11.0]));
}

#[test]
fn evaluations_come_before_and_after_training() {
    let shards = vec![ShardCost { evaluate_s: Some(0.25), ..ShardCost::new(1.0, 2.0, 0.5) }; 2];
    let mut workload = on(vec![TaskCost::new("a", 1, shards)], 1);
    workload.tasks[0].evaluations = vec![
        EvaluationCost { after: 0, microbatch_passes: 1 },
        EvaluationCost { after: 1, microbatch_passes: 2 },
    ];
    workload.tasks[0].optimizer_s = 0.5;
    let result = lrtf(&workload);
    // The stale copies are promoted again after the step of shard 0, and its evaluation waits for that.
    let before_s = 0.5 + 0.25 + 0.25 + 0.25;
    assert_eq!(result.makespan_s, before_s + 5.0 + 0.25 + 0.5 + 0.25 + 0.25 + 0.25 + 0.25 + 0.25);
    assert_eq!((result.shard_tasks, result.first_start_s), (9, 0.5));
    assert_eq!((result.promotions, result.bounds.chain_s), (4, result.makespan_s));
    workload.devices[0].keeps_copies = false;
    assert_eq!(lrtf(&workload).promotions, 9);
}

/// Without a parameter cache the next shard task promotes its parameters again even if the running one
/// reads the same ones.
#[test]
fn without_copies_every_shard_task_is_promoted() {
    let mut task = one_shard("a", 2, 1.0, 0.5);
    task.evaluations = vec![
        EvaluationCost { after: 0, microbatch_passes: 5 },
        EvaluationCost { after: 2, microbatch_passes: 5 },
    ];
    let mut workload = on(vec![task], 1);
    workload.devices[0].keeps_copies = false;
    for kind in PolicyKind::ALL {
        let result = run(&workload, kind);
        assert_eq!((result.promotions, result.promotions_saved), (12, 0), "{kind}");
    }
    workload.devices[0].keeps_copies = true;
    assert_eq!(lrtf(&workload).promotions_saved, 9);
}

/// A model of one shard alternates with another's shard tasks: its master weights are final soon after these
/// start, and the default policy does not commit to the next of them before that.
#[test]
fn the_default_policy_commits_late_where_that_costs_nothing() {
    let mut long = one_shard("a", 20, 1.0, 0.25);
    long.optimizer_s = 0.25;
    let other = TaskCost::new("b", 1, vec![ShardCost::new(1.0, 1.0, 0.25); 5]);
    let workload = on(vec![long, other], 1);
    let gaps = |result: &Simulation| result.makespan_s - 0.25 - result.busy_s[0];
    // Nine of the nineteen gaps of half a second can be filled.
    assert_eq!(gaps(&run(&workload, PolicyKind::ShardedLrtf)), 10.0 * 0.5);
    assert!(gaps(&lrtf(&workload)) > 10.0 * 0.5);
}

/// A device that was held back, and for which only its own model is claimable, repeats its request after
/// every event: it promotes the next shard of `a` as soon as `x` is no longer worth waiting for.
#[test]
fn a_device_held_back_beside_its_own_model_is_asked_again() {
    let mut x = one_shard("x", 20, 3.0, 0.5);
    x.optimizer_s = 1.0;
    let shard = ShardCost { download_s: 1.0, ..ShardCost::new(4.0, 4.0, 1.0) };
    let a = TaskCost::new("a", 1, vec![shard; 4]);
    let result = run(&on(vec![x, a], 2), PolicyKind::ShardedLrtf);
    assert_eq!(result.finished_s[1], 29.0);
}

/// A policy that records its requests, and decides as another one does.
struct Recorder<'a> {
    policy: Box<dyn Policy>,
    heard: &'a mut Vec<Request>,
}

impl Policy for Recorder<'_> {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        self.policy.priority(model)
    }

    fn waits(&self) -> bool {
        true
    }

    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        self.heard.push(*request);
        self.policy.pick(request, from)
    }
}

fn heard(workload: &Workload, kind: PolicyKind) -> (Vec<Request>, Simulation) {
    let mut heard = Vec::new();
    let mut policy = Recorder { policy: kind.build(3), heard: &mut heard };
    let result = simulate(workload, &mut policy, SimulationOptions::default()).unwrap();
    (heard, result)
}

/// One device alternates between `late`, `near` and `here`. `late` is the longest, and its step never ends;
/// the wait of `near` starts when `here` does, which takes six seconds on a device of speed 1. By hand: with
/// `s` the start of `near`, it is promoted by `s + 1 / speed + wait + latency + promote`, and `here` ends at
/// `s + 7 / speed`.
#[test]
fn soon_is_the_longest_of_those_that_come_in_time() {
    let soon = |speed: f64, promote_s: f64, latency_s: f64, wait_s: f64| {
        let waits = |name: &str, step_wait_s, minibatches, promote_s| TaskCost {
            step_wait_s,
            ..one_shard(name, minibatches, 1.0, promote_s)
        };
        let (late, near) = (waits("late", 99.0, 99, 0.0), waits("near", wait_s, 50, promote_s));
        let tasks = vec![late, near, one_shard("here", 2, 6.0, 0.0), one_shard("there", 1, 1.0, 0.0)];
        let mut workload = on(tasks, 1);
        (workload.devices[0].speed, workload.devices[0].latency_s) = (speed, latency_s);
        let heard = heard(&workload, PolicyKind::Fifo).0;
        let fourth = heard.iter().find(|request| request.decision == 3).unwrap();
        fourth.soon.map(|model| model.model.0)
    };
    assert_eq!((soon(1.0, 0.0, 0.0, 6.0), soon(1.0, 0.0, 0.0, 6.25)), (Some(1), None));
    assert_eq!((soon(1.0, 4.0, 0.0, 2.0), soon(1.0, 4.25, 0.0, 2.0)), (Some(1), None));
    assert_eq!((soon(1.0, 0.0, 0.5, 5.5), soon(1.0, 0.0, 0.5, 5.75)), (Some(1), None));
    assert_eq!((soon(2.0, 1.0, 0.0, 2.0), soon(2.0, 1.0, 0.0, 2.25)), (Some(1), None));
}

/// A model that waits only for the download of its output is not awaited: `mid` can be claimed elsewhere
/// long before `here` ends.
#[test]
fn what_is_on_its_way_down_is_not_soon() {
    let shard = ShardCost { download_s: 1.0, ..ShardCost::new(1.0, 1.0, 0.0) };
    let mid = TaskCost::new("mid", 9, vec![shard; 2]);
    let tasks = vec![mid, one_shard("here", 9, 6.0, 0.0), one_shard("there", 9, 6.0, 0.0)];
    let mut workload = on(tasks, 1);
    workload.tasks[1].step_wait_s = 99.0;
    let heard = heard(&workload, PolicyKind::RoundRobin).0;
    assert!(heard.iter().all(|request| request.soon.is_none()), "{heard:?}");
}

/// The request of a device that was held back has the number of claims, not of requests.
#[test]
fn a_decision_counts_when_it_came_to_something() {
    let mut long = one_shard("a", 20, 1.0, 0.25);
    long.optimizer_s = 0.25;
    let other = TaskCost::new("b", 1, vec![ShardCost::new(1.0, 1.0, 0.25); 5]);
    let (heard, result) = heard(&on(vec![long, other], 1), PolicyKind::ShardedLrtf);
    let numbers: Vec<u64> = heard.iter().map(|request| request.decision).collect();
    assert!(result.decisions > result.shard_tasks, "it was held back");
    assert_eq!((numbers.len() as u64, numbers[0]), (result.decisions, 0));
    assert_eq!(numbers.last(), Some(&(result.shard_tasks - 1)));
    assert!(numbers.windows(2).all(|pair| pair[0] == pair[1] || pair[0] + 1 == pair[1]));
}

/// Two devices, the second twice as fast, which takes the first model: the awaited time uses its own speed,
/// and the even share of all work uses both speeds.
#[test]
fn awaited_and_even_go_by_the_speeds_of_devices() {
    let mut long = one_shard("long", 9, 4.0, 0.5);
    long.step_wait_s = 1.0;
    let others = ["b", "c", "d"].map(|name| one_shard(name, 9, 4.0, 0.0));
    let mut workload = on(std::iter::once(long).chain(others).collect(), 2);
    workload.devices[1].speed = 2.0;
    let heard = heard(&workload, PolicyKind::Fifo).0;
    // It computes `long` from 0.5 to 2.5, and its request is made when it starts: 32 seconds of compute are
    // left at twice the speed, and eight minibatches with a step and a promotion each.
    let request = heard.iter().find(|request| request.device == 1 && request.awaited.is_some()).unwrap();
    let awaited = request.awaited.unwrap();
    assert_eq!((awaited.model.0, awaited.continues, awaited.remaining_s), (0, true, 32.0));
    assert_eq!(request.awaited_s, 16.0 + 8.0 * 1.5);
    // No device has committed to 32 seconds of each of three models, and to 36 of `d`.
    assert_eq!(request.even_s, (3.0 * 32.0 + 36.0) / 3.0);
}

/// As before, with a model in the queue while the device is held back: it repeats its request in the middle
/// of its shard task, and promotes before that ends. Of nineteen gaps, eighteen are filled.
#[test]
fn a_device_that_computes_is_asked_again() {
    let mut long = one_shard("a", 20, 1.0, 0.25);
    long.optimizer_s = 0.25;
    let other = |name: &str| TaskCost::new(name, 1, vec![ShardCost::new(1.0, 1.0, 0.25); 5]);
    let workload = on(vec![long, other("b"), other("c")], 1);
    let result = run(&workload, PolicyKind::ShardedLrtf);
    assert_eq!(result.makespan_s - 0.25 - result.busy_s[0], 0.5);
}

#[test]
fn latency_comes_before_a_promotion_and_is_hidden_with_it() {
    let mut workload = on(vec![one_shard("a", 5, 2.0, 0.5), one_shard("b", 5, 2.0, 0.5)], 1);
    workload.devices[0].latency_s = 1.0;
    assert_eq!(lrtf(&workload).makespan_s, 1.5 + 20.0);
    workload.tasks.truncate(1);
    assert_eq!(lrtf(&workload).makespan_s, 5.0 * (1.5 + 2.0));
}

/// A model continues on its device without waiting for the download of its output, if it is claimed there
/// before.
#[test]
fn what_goes_down_is_waited_for_by_other_devices_only() {
    let shard = ShardCost { download_s: 0.5, ..ShardCost::new(1.0, 1.0, 0.0) };
    let mut workload = on(vec![TaskCost::new("a", 2, vec![shard; 2])], 1);
    assert_eq!(lrtf(&workload).makespan_s, 2.0 * 3.0);
    let without = SimulationOptions { prefetch: false, record: false };
    let result = simulate(&workload, &mut hydra_sched::ShardedLrtfEager, without).unwrap();
    assert_eq!(result.makespan_s, 2.0 * 3.0 + 4.0 * 0.5, "it is not claimed before it ends");
    workload.tasks[0].optimizer_s = 2.0;
    assert_eq!(lrtf(&workload).makespan_s, 2.0 * 3.0 + 1.0, "the optimizer takes longer");
}

#[test]
fn memory_keeps_copies_between_forward_and_backward() {
    let shard = |_| ShardCost { bytes: Some(10), ..ShardCost::new(1.0, 2.0, 0.1) };
    let mut workload = on(vec![TaskCost::new("a", 3, (0..8).map(shard).collect())], 1);
    let scarce = lrtf(&workload);
    // Only the second last shard is still in its slot on the way back.
    assert_eq!((scarce.promotions, scarce.promotions_saved), (3 * 14, 3));
    workload.devices[0].memory_bytes = Some(1_000);
    let plenty = lrtf(&workload);
    assert_eq!((plenty.promotions, plenty.promotions_saved), (3 * 8, 3 * 7));
    assert_eq!(plenty.bounds, scarce.bounds);
}

/// Memory for four of six shards, by hand. A minibatch reverses its direction, so the last read is the next
/// read: each replacement keeps two shards less than there are. Evaluations are cyclic, where the least
/// recently used is the next read.
#[test]
fn what_is_read_next_stays() {
    let shard = |_| ShardCost { bytes: Some(10), ..ShardCost::new(1.0, 2.0, 0.1) };
    let mut task = TaskCost::new("a", 1, (0..6).map(shard).collect());
    task.evaluations = vec![EvaluationCost { after: 1, microbatch_passes: 3 }];
    let promotions = |replacement| {
        let mut workload = on(vec![task.clone()], 1);
        (workload.devices[0].memory_bytes, workload.devices[0].replacement) = (Some(40), replacement);
        let result = lrtf(&workload);
        assert_eq!(result.fewest_bytes(&workload), Some(10 * (6 + 2 + 6 + 2 + 4)));
        result.promotions
    };
    assert_eq!(promotions(Replacement::NextUse), (6 + 2) + (6 + 2 + 4));
    assert_eq!(promotions(Replacement::LeastRecent), (6 + 2) + 3 * 6);
}

/// Three shards on a device with memory for two. Each microbatch on its own promotes the last shard and the
/// first one again; in a microbatch group of all four, each shard is promoted unless it is still cached.
#[test]
fn a_group_promotes_once_for_all_its_microbatches() {
    let mut task = TaskCost::new("a", 2, vec![ShardCost::new(1.0, 2.0, 0.5); 3]);
    task.shards[2].backward_s = 3.0;
    task.microbatches = 4;
    let result = |microbatch_group| {
        let task = TaskCost { microbatch_group, ..task.clone() };
        lrtf(&on(vec![task], 1))
    };
    let (alone, visited) = (result(1), result(4));
    assert_eq!((alone.shard_tasks, visited.shard_tasks), (2 * 4 * 5, 2 * 4 * 5));
    assert_eq!((alone.promotions, visited.promotions), (2 * (4 + 3 * 2), 2 * 4));
    assert_eq!((visited.makespan_s, visited.gap()), (2.0 * (0.5 + 36.0), 1.0));
}

/// Four microbatches of one model on several devices: as many run concurrently as it has replicas, if there
/// is no other model.
#[test]
fn several_devices_compute_a_model_that_is_alone() {
    let model = |replicas| TaskCost { microbatches: 4, replicas, ..model("a", 3, &[(1.0, 2.0), (0.0, 3.0)]) };
    let makespan = |tasks: Vec<TaskCost>, devices| {
        let run = lrtf(&on(tasks, devices));
        assert!(run.makespan_s >= run.bounds.best_s(), "{:?}", run.bounds);
        run.makespan_s
    };
    // A microbatch pass takes six seconds.
    assert_eq!([1, 2, 3, 4].map(|devices| makespan(vec![model(4)], devices)), [72.0, 36.0, 36.0, 18.0]);
    assert_eq!(makespan(vec![model(2)], 4), 36.0);
    assert_eq!(makespan(vec![model(1)], 4), 72.0);
    let evaluated =
        TaskCost { evaluations: vec![EvaluationCost { after: 3, microbatch_passes: 2 }], ..model(2) };
    assert_eq!(makespan(vec![evaluated], 2), 36.0 + 1.0);
    // Each of two models has its own device, until the short one has ended.
    let short = TaskCost { name: "b".into(), minibatches: 1, ..model(2) };
    assert_eq!(makespan(vec![model(2), short], 2), 48.0);
}

#[test]
fn the_next_shard_waits_for_what_its_own_microbatch_made() {
    let shard = ShardCost { download_s: 1.5, ..ShardCost::new(1.0, 1.0, 0.0) };
    let mut task = TaskCost::new("a", 1, vec![shard; 2]);
    (task.microbatches, task.microbatch_group) = (2, 2);
    let result = lrtf(&on(vec![task.clone()], 1));
    let compute = result.spans.iter().filter(|span| !matches!(span.what, Occupation::Promote { .. }));
    let starts: Vec<_> = compute.map(|span| (span.shard, span.start_s)).collect();
    // The forwards end at 1 and 2, and their downloads at 2.5 and 4, in sequence; the downloads of the
    // backwards that end at 3.5 and 5 end at 5.5 and 7.
    assert_eq!(starts, [(0, 0.0), (0, 1.0), (1, 2.5), (1, 4.0), (0, 5.5), (0, 7.0)]);
    task.microbatch_group = 1;
    assert_eq!(lrtf(&on(vec![task], 1)).makespan_s, 6.0, "handed on, and it waits for nothing");
}

/// Of three shards only the last is trained: the others are promoted once, and evaluations find them cached.
#[test]
fn copies_of_frozen_shards_stay_valid() {
    let shard = ShardCost { bytes: Some(10), ..ShardCost::new(1.0, 2.0, 0.5) };
    let mut task = TaskCost::new("a", 3, vec![shard; 3]);
    (task.microbatches, task.first_trained, task.optimizer_s) = (2, 2, 1.5);
    task.evaluations = vec![EvaluationCost { after: 3, microbatch_passes: 2 }];
    let mut workload = on(vec![task], 1);
    workload.devices[0].memory_bytes = Some(40);
    let result = lrtf(&workload);
    assert_eq!(result.shard_tasks, 3 * 2 * 3 + 2 * 3);
    assert_eq!(result.promotions, 2 + 3 + 1, "the last one again after each of three steps");
    // Two microbatch passes of 4 s per minibatch. The step of 1.5 s and the promotion after it hide behind
    // two frozen forwards.
    assert_eq!((result.makespan_s, result.gap()), (0.5 + 3.0 * 8.0 + 2.0 * 3.0, 1.0));
}

/// Models of equal length, half of each frozen, on devices with memory for all of them together: each model
/// stays where it is cached, and the promoted bytes are nearly the minimum. The paper's version moves them
/// between devices.
#[test]
fn models_stay_where_their_copies_are() {
    for (models, devices, shards) in [(4, 2, 8), (6, 3, 6), (6, 2, 4), (8, 4, 8)] {
        let shard = ShardCost { bytes: Some(100), promote_s: None, ..ShardCost::new(5.0, 15.0, 0.0) };
        let task = |index| {
            let mut task = TaskCost::new(format!("{index}"), 12, vec![shard.clone(); shards]);
            (task.microbatches, task.first_trained, task.optimizer_s) = (2, shards / 2, 20.0);
            task
        };
        let mut workload = on((0..models).map(task).collect(), devices);
        // Otherwise all models advance in step, and every policy leaves them on their devices.
        workload.variation = Some(hydra_sched::Variation { seed: 1, relative: 0.1 });
        for device in &mut workload.devices {
            let capacity = (models * shards / devices * 100) as u64;
            (device.memory_bytes, device.link_bytes_per_s) = (Some(capacity), Some(12.0));
        }
        let of = |kind| {
            let result = run(&workload, kind);
            let (promoted, fewest) =
                (result.promoted_bytes.unwrap(), result.fewest_bytes(&workload).unwrap());
            (promoted as f64, promoted as f64 / fewest as f64, result.makespan_s)
        };
        let (kept, eager) = (of(PolicyKind::ShardedLrtf), of(PolicyKind::ShardedLrtfEager));
        assert!(kept.1 <= 1.05, "{models} on {devices}: {kept:?}");
        assert!(
            kept.0 < 0.9 * eager.0 && kept.2 <= 1.01 * eager.2,
            "{models} on {devices}: {kept:?} {eager:?}"
        );
    }
}

/// Copies that no step leaves valid do not put a model before the others: on one device all models advance in
/// step, from the first minibatch on, so that they can be compared early.
#[test]
fn equal_models_keep_step_where_copies_stay() {
    let shard = ShardCost { bytes: Some(100), promote_s: None, ..ShardCost::new(5.0, 15.0, 0.0) };
    let task = |index| TaskCost::new(format!("{index}"), 40, vec![shard.clone(); 2]);
    let mut workload = on((0..12).map(task).collect(), 1);
    (workload.devices[0].memory_bytes, workload.devices[0].link_bytes_per_s) = (Some(2000), Some(50.0));
    workload.devices[0].keeps_copies = true;
    let mut trained = [0; 12];
    for span in run(&workload, PolicyKind::ShardedLrtf).spans {
        if span.what == Occupation::Compute(ShardTaskKind::Backward) && span.shard == 0 {
            trained[span.task] += 1;
            let (least, most) = (trained.iter().min().unwrap(), trained.iter().max().unwrap());
            assert!(most - least <= 1, "{trained:?}");
        }
    }
    assert_eq!(trained, [40; 12]);
}

/// Without a parameter cache, no model has a preferred device.
#[test]
fn where_no_copies_stay_no_device_is_preferred() {
    let mut workload = Draw { promote_s: 0.05, ..Draw::default() }.workload(3);
    let of = |workload: &Workload, kind| run(workload, kind).spans;
    assert_eq!(of(&workload, PolicyKind::ShardedLrtfLocal), of(&workload, PolicyKind::ShardedLrtfEager));
    workload.devices.iter_mut().for_each(|device| device.keeps_copies = true);
    assert_ne!(of(&workload, PolicyKind::ShardedLrtfLocal), of(&workload, PolicyKind::ShardedLrtfEager));
}

/// Three tasks adapt one frozen base of 40 bytes in two shards, with adapters of 2 bytes, which each step
/// makes stale.
#[test]
fn what_is_frozen_is_promoted_once_for_all_tasks() {
    let part = |id| ParamBufferCost { id, bytes: 20 };
    let shard = |id| ShardCost { bytes: Some(22), frozen: vec![part(id)], ..ShardCost::new(1.0, 2.0, 1.1) };
    let task = |name: &str| TaskCost::new(name, 4, vec![shard(7), shard(9)]);
    let mut workload = on(["a", "b", "c"].map(task).into(), 1);
    workload.devices[0].memory_bytes = Some(60);
    let result = lrtf(&workload);
    assert_eq!(result.promoted_bytes, Some(40 + 3 * 4 * 2 * 2), "the base, and each part once a minibatch");
    assert_eq!(result.promotions_saved, 3 * 4, "the first shard's backward finds its own part too");
    // Cached parts take none of the time of a promotion.
    let seconds: Vec<f64> = result.spans.iter().map(|span| span.end_s - span.start_s).collect();
    assert!(
        seconds.iter().all(|s| [1.1, 0.1, 1.0, 2.0].iter().any(|one| (s - one).abs() < 1e-9)),
        "{seconds:?}"
    );
    workload.devices[0].keeps_copies = false;
    assert_eq!(lrtf(&workload).promoted_bytes, Some(3 * 4 * 3 * 22), "nothing stays");
    workload.devices[0].keeps_copies = true;
    workload.devices[0].memory_bytes = None;
    let error = workload.check().unwrap_err().to_string();
    assert!(error.contains("device 0") && error.contains("memory_bytes"), "{error}");
    workload.devices[0].memory_bytes = Some(60);
    workload.tasks[1].shards[0].frozen[0].bytes = 19;
    let error = workload.check().unwrap_err().to_string();
    assert!(error.contains("frozen.bytes of shard 0 of task `b` is 19"), "{error}");
    workload.tasks[1].shards[0].frozen = vec![part(7), part(9)];
    let error = workload.check().unwrap_err().to_string();
    assert!(error.contains("the sum of `frozen` of shard 0 of task `b` is 40"), "{error}");
}

/// The bounds ignore downloads and latencies.
#[test]
fn a_makespan_over_no_bound_is_no_gap_of_one() {
    let mut workload = on(vec![one_shard("a", 2, 0.0, 0.0)], 1);
    assert_eq!((lrtf(&workload).makespan_s, lrtf(&workload).gap()), (0.0, 1.0));
    workload.devices[0].latency_s = 1.0;
    let result = lrtf(&workload);
    assert_eq!((result.makespan_s, result.bounds.best_s(), result.gap()), (2.0, 0.0, f64::INFINITY));
}

/// Sums of bytes that overflow 64 bits: two copies on a device, and all promoted bytes.
#[test]
fn sizes_too_large_to_add_up_are_no_panic() {
    let text = format!(
        r#"{{"tasks": [
            {{"name": "a", "minibatches": 2, "shards": [{{"forward_s": 1, "backward_s": 1, "promote_s": 0, "bytes": {0}}}]}},
            {{"name": "b", "minibatches": 2, "shards": [{{"forward_s": 1, "backward_s": 1, "promote_s": 0, "bytes": {0}}}]}}
        ], "devices": 1}}"#,
        1_u64 << 63
    );
    let result = lrtf(&Workload::from_json(&text).unwrap());
    assert_eq!((result.promotions, result.promoted_bytes), (4, Some(u64::MAX)));
}

#[test]
fn bytes_are_counted_as_they_are_promoted() {
    let shards = [(10, 0.1), (70, 0.1), (1_000, 0.1)]
        .map(|(bytes, s)| ShardCost { bytes: Some(bytes), ..ShardCost::new(1.0, 2.0, s) });
    let mut workload = on(vec![TaskCost::new("a", 2, shards.into())], 1);
    // There is memory for two copies: the second shard's is still cached for its backward, the first one's is
    // not.
    assert_eq!(lrtf(&workload).promoted_bytes, Some(2 * (10 + 70 + 1_000 + 10)));
    workload.tasks[0].shards[1].bytes = None;
    assert_eq!(lrtf(&workload).promoted_bytes, None);
}

/// Estimates that are wrong by a factor, for half of the models in each direction, are corrected by the first
/// measurements.
#[test]
fn wrong_estimates_are_corrected() {
    let draw = Draw { models: (8, 24), devices: (2, 6), ..Draw::default() };
    for seed in 0..40 {
        let right = draw.workload(seed);
        let mut wrong = right.clone();
        for (index, task) in wrong.tasks.iter_mut().enumerate() {
            task.estimate_factor = if index % 2 == 0 { 2.0 } else { 0.5 };
        }
        let run = |workload| {
            simulate(workload, &mut hydra_sched::ShardedLrtf, SimulationOptions::default()).unwrap()
        };
        let (right, wrong) = (run(&right), run(&wrong));
        assert_eq!(right.bounds, wrong.bounds);
        assert!(wrong.makespan_s <= 1.03 * right.makespan_s, "seed {seed}: {} {}", wrong.gap(), right.gap());
    }
}

/// The policy follows costs that double over the run: the makespan stays near the bound, which knows
/// the actual costs.
#[test]
fn drifting_costs_are_followed() {
    let draw = Draw { models: (8, 24), devices: (2, 6), ..Draw::default() };
    for seed in 0..40 {
        let mut workload = draw.workload(seed);
        workload.tasks.iter_mut().step_by(2).for_each(|task| task.drift = 1.0);
        let mut policy = hydra_sched::ShardedLrtf;
        let result = simulate(&workload, &mut policy, SimulationOptions::default()).unwrap();
        assert!(result.gap() <= 1.05, "seed {seed}: {}", result.gap());
    }
}

/// The gap stated in docs/scheduling.md, on a part of its workloads.
#[test]
fn lrtf_stays_near_the_lower_bound() {
    let draw = Draw { promote_s: 0.05, optimizer: 0.05, ..Draw::default() };
    let gaps = |draw: Draw, policy: &mut dyn Policy, prefetch| -> Vec<f64> {
        let options = SimulationOptions { prefetch, record: false };
        let gap = |seed| simulate(&draw.workload(seed), policy, options).unwrap().gap();
        let mut gaps: Vec<f64> = (0..200).map(gap).collect();
        gaps.sort_by(f64::total_cmp);
        gaps
    };
    let plain = gaps(Draw::default(), &mut hydra_sched::ShardedLrtfEager, false);
    assert!(plain[100] <= 1.001 && plain[199] <= 1.01, "{} {}", plain[100], plain[199]);
    let lrtf = gaps(draw, &mut hydra_sched::ShardedLrtf, true);
    assert!(lrtf[100] <= 1.01 && lrtf[199] <= 1.06, "{} {}", lrtf[100], lrtf[199]);
    let fifo = gaps(draw, &mut hydra_sched::Fifo, true);
    assert!(fifo[100] > lrtf[199], "the drawn workloads distinguish the policies: {}", fifo[100]);
}

#[test]
fn the_local_policy_saves_promotions_and_loses_no_more_than_its_tolerance() {
    let (mut saved, mut saved_by_local) = (0, 0);
    for seed in 0..60 {
        let mut workload = Draw { promote_s: 0.05, shards: (1, 8), ..Draw::default() }.workload(seed);
        workload.tasks.iter_mut().flat_map(|task| &mut task.shards).for_each(|shard| shard.bytes = Some(1));
        let keeps = |device: &mut DeviceCost| (device.memory_bytes, device.keeps_copies) = (Some(8), true);
        workload.devices.iter_mut().for_each(keeps);
        let options = SimulationOptions { prefetch: false, record: false };
        let plain = simulate(&workload, &mut hydra_sched::ShardedLrtfEager, options).unwrap();
        let local = simulate(&workload, &mut hydra_sched::ShardedLrtfLocal::default(), options).unwrap();
        saved += plain.promotions_saved;
        saved_by_local += local.promotions_saved;
        let most_s = plain.makespan_s * (1.0 + hydra_sched::ShardedLrtfLocal::TOLERANCE);
        assert!(local.makespan_s <= most_s, "seed {seed}: {} {}", local.makespan_s, plain.makespan_s);
    }
    assert!(saved_by_local as f64 > 1.2 * saved as f64, "{saved} {saved_by_local}");
}

/// A run without transfers, deciding when a device is idle: the paper's model.
fn plain(workload: &Workload, kind: PolicyKind, seed: u64) -> Simulation {
    let options = SimulationOptions { prefetch: false, record: true };
    simulate(workload, &mut *kind.build(seed), options).unwrap()
}

/// A model with these forwards and backwards.
fn model(name: &str, minibatches: u64, shards: &[(f64, f64)]) -> TaskCost {
    let shard = |&(forward_s, backward_s): &(f64, f64)| ShardCost::new(forward_s, backward_s, 0.0);
    TaskCost::new(name, minibatches, shards.iter().map(shard).collect())
}

/// A long model and two short ones on two devices: the default waits for the long one's optimizer, while the
/// paper's version makes it wait for a shard task; the others are completed all the same.
#[test]
fn the_default_waits_and_nothing_starves() {
    let long = TaskCost { step_wait_s: 1.0, ..model("long", 10, &[(1.0, 2.0)]) };
    let workload = on(vec![long, model("b", 1, &[(1.0, 5.0)]), model("c", 1, &[(1.0, 5.0)])], 2);
    let end_of_long = |kind: PolicyKind| {
        let result = plain(&workload, kind, 0);
        assert_eq!(result.shard_tasks, 12, "{kind}");
        result.finished_s[0]
    };
    assert_eq!(end_of_long(PolicyKind::ShardedLrtf), 10.0 * 2.0 + 9.0 * 1.0);
    assert!(end_of_long(PolicyKind::ShardedLrtfEager) > 10.0 * 2.0 + 9.0 * 1.0);
}

/// Two short models and a long one on two devices: policies that start the long one last wait for it.
#[test]
fn lrtf_levels_what_the_others_leave_to_the_end() {
    let short = |name: &str| model(name, 1, &[(1.0, 2.0)]);
    let workload = on(vec![short("a"), short("b"), model("long", 2, &[(1.0, 2.0)])], 2);
    let makespan = |kind: PolicyKind| plain(&workload, kind, 0).makespan_s;
    assert_eq!((makespan(PolicyKind::ShardedLrtf), makespan(PolicyKind::ShardedLrtfEager)), (4.0, 4.0));
    assert_eq!((makespan(PolicyKind::Fifo), makespan(PolicyKind::Srtf)), (6.0, 6.0));
}

/// The whole schedule of two models on one device, by hand.
#[test]
fn lrtf_alternates_between_models_of_equal_length() {
    use ShardTaskKind::{Backward, Forward};
    let two = ["a", "b"].map(|name| model(name, 1, &[(1.0, 2.0), (9.0, 3.0)]));
    let result = plain(&on(two.into(), 1), PolicyKind::ShardedLrtfEager, 0);
    let compute = result.spans.iter().filter(|span| !matches!(span.what, Occupation::Promote { .. }));
    let order: Vec<_> = compute.map(|span| (span.task, span.what, span.shard)).collect();
    // Remaining before each choice: 6 6, 5 6, 5 5, 2 5, 2 2, - 2.
    let expected = [
        (0, Forward, 0),
        (1, Forward, 0),
        (0, Backward, 1),
        (1, Backward, 1),
        (0, Backward, 0),
        (1, Backward, 0),
    ];
    assert_eq!(order, expected.map(|(task, kind, shard)| (task, Occupation::Compute(kind), shard)));
    assert_eq!(result.makespan_s, 12.0);
}

#[test]
fn models_of_one_shard_run_on_every_device_at_once() {
    let workload = on(["a", "b", "c", "d"].map(|name| model(name, 3, &[(1.0, 2.0)])).into(), 4);
    for kind in PolicyKind::ALL {
        let result = plain(&workload, kind, 1);
        assert_eq!((result.shard_tasks, result.makespan_s), (12, 6.0), "{kind}");
    }
}

#[test]
fn random_makes_different_schedules_of_different_seeds() {
    let shards = [(1.0, 2.0), (1.0, 2.0)];
    let workload = on(["a", "b", "c", "d", "e"].map(|name| model(name, 3, &shards)).into(), 2);
    let drawn = |seed| plain(&workload, PolicyKind::Random, seed).spans;
    assert_ne!(drawn(1), drawn(2));
}
