//! The cost of the scheduler: one decision with a list and with a queue, and simulated shard tasks.
#![allow(missing_docs, reason = "criterion makes a public function of the group")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hydra_sched::{
    ModelIndex, ModelView, PolicyKind, Queue, Request, ShardCost, ShardedLrtf, SimulationOptions, TaskCost,
    View, Workload, simulate,
};

const MODELS: [usize; 3] = [10, 1_000, 10_000];

fn models(count: usize) -> Vec<ModelView> {
    let model = |index: usize| ModelView {
        model: ModelIndex(index),
        // A permutation, so that the position of the longest is arbitrary.
        remaining_s: (index * 7_919 % count) as f64,
        submitted: index as u64,
        next_shard: 0,
        cached: false,
        continues: false,
        ran_on: None,
    };
    (0..count).map(model).collect()
}

/// A whole decision as the simulator makes it: the chosen model leaves the queue and returns.
fn queue(c: &mut Criterion) {
    let mut group = c.benchmark_group("decision/queue");
    for kind in PolicyKind::ALL {
        for count in MODELS {
            let mut policy = kind.build(0);
            let mut queue = Queue::new(count);
            models(count).into_iter().for_each(|model| queue.insert(&*policy, model));
            let mut decision = 0;
            group.bench_function(BenchmarkId::new(kind.name(), count), |b| {
                b.iter(|| {
                    decision += 1;
                    let request = Request::new(0, 4, decision);
                    let chosen = queue.choose(&mut *policy, &request, &[]).expect("the queue is never empty");
                    let mut model = queue.remove(chosen).expect("the choice is in the queue");
                    model.remaining_s -= 1.0;
                    queue.insert(&*policy, black_box(model));
                });
            });
        }
    }
    group.finish();
}

/// The same decision with a list, as in a run with a few models.
fn list(c: &mut Criterion) {
    let mut group = c.benchmark_group("decision/list");
    for count in MODELS {
        let claimable = models(count);
        let mut policy = PolicyKind::ShardedLrtf.build(0);
        group.bench_function(BenchmarkId::new("sharded-lrtf", count), |b| {
            let view = View { request: Request::new(0, 4, 0), claimable: &claimable };
            b.iter(|| policy.choose(black_box(&view)));
        });
    }
    group.finish();
}

fn simulation(c: &mut Criterion) {
    let mut group = c.benchmark_group("simulate");
    group.sample_size(10);
    for count in [12, 1_000, 10_000] {
        let minibatches = (1_000_000 / (15 * count)) as u64;
        let workload = equal_models(count, minibatches).on_devices(8);
        group.throughput(Throughput::Elements(workload.shard_tasks()));
        group.bench_function(BenchmarkId::new("a million shard tasks, models", count), |b| {
            b.iter(|| simulate(&workload, &mut ShardedLrtf, SimulationOptions::default()));
        });
    }
    group.finish();
}

fn equal_models(count: usize, minibatches: u64) -> Workload {
    let shards = vec![ShardCost { bytes: Some(1), ..ShardCost::new(1.0, 2.0, 0.1) }; 8];
    let task = |index: usize| TaskCost::new(index.to_string(), minibatches, shards.clone());
    Workload::new((0..count).map(task).collect(), Vec::new())
}

/// One device with memory for every shard, so that all models are cached there, and a policy that uses this.
fn memory(c: &mut Criterion) {
    let mut group = c.benchmark_group("simulate with memory");
    group.sample_size(10);
    for count in [1_000, 8_000] {
        let mut workload = equal_models(count, 3).on_devices(1);
        workload.devices[0].keeps_copies = true;
        workload.devices[0].memory_bytes = Some(8 * count as u64);
        group.throughput(Throughput::Elements(workload.shard_tasks()));
        for kind in [PolicyKind::ShardedLrtf, PolicyKind::ShardedLrtfLocal] {
            group.bench_function(BenchmarkId::new(kind.name(), count), |b| {
                b.iter(|| simulate(&workload, &mut *kind.build(0), SimulationOptions::default()));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, queue, list, simulation, memory);
criterion_main!(benches);
