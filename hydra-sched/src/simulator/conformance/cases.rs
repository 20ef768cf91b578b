//! Random views and workloads for checking policies.

use std::ops::Range;

use proptest::prelude::*;

use crate::policy::cases::any_models;
use crate::policy::{ModelIndex, ModelView, Request};
use crate::simulator::{
    DeviceCost, Epoch, EvaluationCost, ParamBufferCost, Replacement, ShardCost, TaskCost, Variation,
    WorkingBytes, Workload,
};

/// One decision of one of four devices.
#[derive(Clone, Debug)]
pub(crate) struct Decision {
    /// The policy's seed.
    pub(crate) seed: u64,
    pub(crate) request: Request,
    pub(crate) claimable: Vec<ModelView>,
}

/// A decision between `count` models, with or without models to wait for, which are not among the claimable
/// ones.
pub(crate) fn any_decision(count: Range<usize>) -> impl Strategy<Value = Decision> {
    let other = |index| {
        let named = move |models: Vec<ModelView>| ModelView { model: ModelIndex(index), ..models[0] };
        prop::option::of(any_models(1..2).prop_map(named))
    };
    let waits = (other(super::MODELS - 1), other(super::MODELS - 2), 0.0..9.0f64);
    (any::<u64>(), any::<u64>(), 0..4usize, waits, any_models(count)).prop_map(
        |(seed, decision, device, (awaited, soon, even_s), claimable)| {
            let awaited_s = awaited.map_or(0.0, |model| model.remaining_s);
            let request = Request { awaited, awaited_s, soon, even_s, ..Request::new(device, 4, decision) };
            Decision { seed, request, claimable }
        },
    )
}

/// Eighths of seconds, so that many times are equal.
fn eighths(most: u8) -> impl Strategy<Value = f64> {
    (0..most).prop_map(|x| f64::from(x) / 8.0)
}

/// Bytes of frozen parts that shards of any task may have.
const FROZEN: [u64; 4] = [1, 9, 4, 12];

/// The frozen parts whose bits are set, as far as they fit in a shard of this many bytes.
fn frozen(bytes: u64, of: u8) -> Vec<ParamBufferCost> {
    let mut left = bytes;
    let parts = FROZEN.iter().zip(0_u64..).filter(|(_, id)| of >> id & 1 == 1);
    let fits = |(bytes, id): (&u64, u64)| {
        left = left.checked_sub(*bytes)?;
        Some(ParamBufferCost { id, bytes: *bytes })
    };
    parts.filter_map(fits).collect()
}

fn any_shard() -> impl Strategy<Value = ShardCost> {
    let evaluate = prop::option::of(eighths(9));
    let bytes = (1..30u64, prop_oneof![Just(0), 0..16_u8], any::<bool>());
    let down = (eighths(9), prop_oneof![Just(0.0), eighths(9)], 0..3_u64);
    // The first buffer is the same in all shards of a task; others are if their sizes are equal.
    let buffers = |own: u64| {
        let sizes = [own.min(1), own.saturating_sub(1)].into_iter().filter(|bytes| *bytes > 0);
        sizes.zip([0, own]).map(|(bytes, id)| ParamBufferCost { id, bytes }).collect::<Vec<_>>()
    };
    (eighths(9), eighths(9), evaluate, eighths(5), down, bytes).prop_map(
        move |(
            forward_s,
            backward_s,
            evaluate_s,
            promote_s,
            (download_s, gradients_s, sums),
            (bytes, of, cut),
        )| {
            let frozen = frozen(bytes, of);
            let own = bytes - frozen.iter().map(|part| part.bytes).sum::<u64>();
            ShardCost {
                evaluate_s,
                download_s,
                gradients_s,
                bytes: Some(bytes),
                working: WorkingBytes {
                    forward: 1,
                    backward: 2 * bytes,
                    input: bytes / 3,
                    gradients: bytes,
                    accumulation: sums * bytes / 2,
                },
                frozen,
                buffers: if cut { buffers(own) } else { Vec::new() },
                ..ShardCost::new(forward_s, backward_s, promote_s)
            }
        },
    )
}

/// Microbatches per minibatch, the two kinds of microbatch groups, epochs, and a first trained shard.
fn any_passes() -> impl Strategy<Value = ((u64, u64, u64), Option<Epoch>, usize)> {
    let epoch = prop::option::of((1..4u64, 1..4u64));
    ((1..4u64, 1..5u64, 1..4u64), epoch, 0..4usize).prop_map(|(microbatch_passes, epoch, first_trained)| {
        let short = |(minibatches, last): (u64, u64)| Epoch {
            minibatches,
            last_microbatches: last.min(microbatch_passes.0),
        };
        (microbatch_passes, epoch.map(short), first_trained)
    })
}

fn any_task() -> impl Strategy<Value = TaskCost> {
    let evaluations = prop::collection::btree_map(0..6u64, 0..3u64, 0..3);
    // Also at the end, where drift uses the last minibatch.
    let evaluations = (evaluations, 0..3u64);
    let steps = (eighths(8), prop_oneof![Just(0.0), eighths(8)]);
    let drift = prop::sample::select(vec![-1.0, -0.5, 0.0, 1.0, 2.0]);
    let factor = prop::sample::select(vec![0.0, 0.5, 1.0, 2.0, 1e6]);
    let shards = prop::collection::vec(any_shard(), 1..5);
    let microbatch_passes = prop_oneof![Just(((1, 1, 1), None, 0)), any_passes()];
    let microbatch_passes = (microbatch_passes, prop_oneof![Just(1), 1..5usize]);
    (1..6u64, shards, 0..4u8, (steps, microbatch_passes), (drift, factor), evaluations).prop_map(
        |(
            minibatches,
            shards,
            arrival,
            (steps, microbatch_passes),
            (drift, factor),
            (mut evaluations, at_the_end),
        )| {
            let (microbatch_passes, replicas) = microbatch_passes;
            let mut task = TaskCost { replicas, ..TaskCost::new("", minibatches, shards) };
            (task.arrival_s, task.drift, task.estimate_factor) = (arrival.into(), drift, factor);
            (task.optimizer_s, task.step_wait_s) = steps;
            (
                (task.microbatches, task.microbatch_group, task.evaluation_group),
                task.epoch,
                task.first_trained,
            ) = microbatch_passes;
            task.first_trained = task.first_trained.min(task.shards.len() - 1);
            evaluations.insert(minibatches, at_the_end);
            let there = evaluations.into_iter().filter(|(after, _)| *after <= minibatches);
            task.evaluations =
                there.map(|(after, microbatch_passes)| EvaluationCost { after, microbatch_passes }).collect();
            task
        },
    )
}

fn any_device() -> impl Strategy<Value = DeviceCost> {
    let latency = prop_oneof![Just(0.0), eighths(5)];
    let copies = (any::<bool>(), prop::sample::select(Replacement::ALL.to_vec()));
    // Enough for the gradient accumulation of any shard too.
    let memory = (prop::option::of(60..200u64), prop::option::of(90..150u64));
    (1..4u8, memory, copies, 4..60u8, latency).prop_map(
        |(speed, (memory_bytes, working_bytes), (keeps_copies, replacement), link, latency_s)| DeviceCost {
            speed: speed.into(),
            memory_bytes,
            working_bytes,
            keeps_copies,
            replacement,
            link_bytes_per_s: Some(link.into()),
            latency_s,
            threads: 0,
        },
    )
}

/// A workload with every feature of the simulator, of one to six tasks. In half of them nothing is frozen,
/// because a device that caches copies of frozen parts must state its memory.
pub(crate) fn any_workload() -> impl Strategy<Value = Workload> {
    let stated = |mut workload: Workload| {
        let silent = workload.devices.iter_mut().filter(|of| of.keeps_copies && of.memory_bytes.is_none());
        silent.for_each(|device| device.memory_bytes = Some(100));
        workload
    };
    let unfrozen = |mut workload: Workload| {
        let shards = workload.tasks.iter_mut().flat_map(|task| &mut task.shards);
        shards.for_each(|shard| (shard.frozen, shard.buffers) = (Vec::new(), Vec::new()));
        workload
    };
    (prop_oneof![any_costs().prop_map(stated), any_costs().prop_map(unfrozen)], any_host())
        .prop_map(|(workload, host)| with_host(workload, &host))
}

/// Host memory beyond master weights, and bytes of master weights and of minibatches; processors, and threads
/// on them.
type Host = (Option<(u64, Vec<(u64, u64)>)>, Option<(usize, Vec<usize>)>);

fn any_host() -> impl Strategy<Value = Host> {
    let bytes = prop::collection::vec((0..20u64, 0..20u64), 6);
    let memory = prop::option::of((0..60u64, bytes));
    (memory, prop::option::of((1..5usize, prop::collection::vec(0..4usize, 5))))
}

/// The workload on a host with memory for the largest of its tasks in addition to all master weights.
fn with_host(mut workload: Workload, (memory, processors): &Host) -> Workload {
    if let Some((more, bytes)) = memory {
        for (task, (masters, active)) in workload.tasks.iter_mut().zip(bytes) {
            (task.masters_bytes, task.active_bytes) = (*masters, *active);
        }
        let masters: u64 = workload.tasks.iter().map(|task| task.masters_bytes).sum();
        let largest = workload.tasks.iter().map(|task| task.active_bytes).max();
        workload.host_bytes = Some(masters + largest.unwrap_or(0) + more);
    }
    if let Some((processors, threads)) = processors {
        workload.processors = Some(*processors);
        workload.optimizer_threads = threads[0];
        workload
            .devices
            .iter_mut()
            .zip(&threads[1..])
            .for_each(|(device, threads)| device.threads = *threads);
    }
    workload
}

fn any_costs() -> impl Strategy<Value = Workload> {
    let variation = prop::option::of((any::<u64>(), 0.0..0.9f64));
    let tasks = prop::collection::vec((any_task(), any::<bool>()), 1..7);
    (tasks, prop::collection::vec(any_device(), 1..5), any::<bool>(), variation).prop_map(
        |(tasks, devices, shared_link, variation)| {
            let task = |(index, (mut task, by_bytes)): (usize, (TaskCost, bool))| {
                task.name = index.to_string();
                if by_bytes {
                    task.shards.iter_mut().for_each(|shard| shard.promote_s = None);
                }
                task
            };
            let variation = variation.map(|(seed, relative)| Variation { seed, relative });
            let tasks = tasks.into_iter().enumerate().map(task).collect();
            Workload { shared_link, variation, ..Workload::new(tasks, devices) }
        },
    )
}
