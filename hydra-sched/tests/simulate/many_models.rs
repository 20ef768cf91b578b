//! The time of a simulation grows linearly with its shard tasks, not quadratically.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use hydra_sched::{PolicyKind, ShardCost, SimulationOptions, TaskCost, Workload, simulate};

/// The processor time of this thread, unaffected by other activity on the machine; the wall-clock time if the
/// system does not report it.
fn computed() -> Duration {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    // The time since the thread was last scheduled is added when it yields.
    std::thread::yield_now();
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| BEGUN.elapsed(), Duration::from_nanos)
}

/// The time to simulate this many models on one device with memory for all of them.
fn took(models: usize, kind: PolicyKind) -> Duration {
    let shards = vec![ShardCost { bytes: Some(1), ..ShardCost::new(1.0, 2.0, 0.1) }; 8];
    let task = |index: usize| TaskCost::new(index.to_string(), 3, shards.clone());
    let tasks = (0..models).map(task).collect();
    let mut workload = Workload::new(tasks, Vec::new()).on_devices(1);
    workload.devices[0].keeps_copies = true;
    workload.devices[0].memory_bytes = Some(8 * models as u64);
    let begun = computed();
    let run = simulate(&workload, &mut *kind.build(0), SimulationOptions::default()).expect("a run");
    assert_eq!(run.promotions, 3 * 8 * models as u64);
    computed() - begun
}

/// Eight times the models took more than sixty times as long when every copy on a device was examined in
/// every decision. Caches shared with other processes double the expected ratio.
#[test]
fn copies_on_a_device_are_not_looked_through() {
    for kind in [PolicyKind::ShardedLrtf, PolicyKind::ShardedLrtfLocal] {
        let few = took(1_000, kind).max(took(1_000, kind));
        let many = took(8_000, kind);
        assert!(many < 30 * few, "{kind}: {few:?} and {many:?}");
    }
}
