//! A run in which nothing happens for a while, because the optimizer takes long, is not at its end. It has a process of its
//! own, because products of its size leave memory in use that other tests measure.

mod common;

use common::{Settings, adamw, spirals};
use hydra_core::{ByteSize, Length, TrainSpec};
use hydra_engine::{EngineError, TrainTask, plain};
use hydra_spill::alloc::CountingAllocator;
use std::sync::Arc;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

#[test]
fn a_backward_pass_waits_for_an_optimizer_that_takes_long() {
    // Layers of 63 MB of masters each, so that the optimizer reads and writes for longer than the run waits before it
    // looks whether anything can go on.
    let chain =
        Arc::new(hydra_models::mlp::chain(&[2, 2300, 2300, 2300, 2300, 2300, 2300], 3).expect("a chain"));
    let spec = TrainSpec { clip: None, length: Length::Steps(2), ..adamw(4) };
    let settings = Settings { memory: ByteSize::mib(400), threads: 2, ..Settings::default() };
    let task = TrainTask::new("task", chain.clone(), spirals(), spec.clone()).cuts((1..7).collect());
    let disk = TempDir::new().expect("a directory");
    let with = |host: u64| {
        let run = settings.orchestrator().host_memory(ByteSize(host));
        let mut run = run.disk(disk.path().to_owned(), ByteSize::mib(1024));
        run.submit(task.clone()).expect("a task");
        run
    };
    let Err(EngineError::HostMemory { needed, .. }) = with(1).admit() else { panic!("too little") };
    let report = with(needed).run().expect("a run").tasks.remove(0);
    assert_eq!((report.error, report.disk_bytes > 100_000_000), (None, true));
    let plain = plain::train(&chain, spirals().as_ref(), &spec).expect("the plain loop");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256));
}
