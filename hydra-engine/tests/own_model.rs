//! The example of an own model does what it says, and so does its chain in 16 bits.

#[path = "../examples/own_model.rs"]
mod own_model;

use hydra_core::{ByteSize, FloatType, Length, TrainSpec};
use hydra_engine::{DeviceSpec, Orchestrator, TrainTask, plain};
use own_model::{Sines, main, model, spec};
use std::sync::Arc;

// One after the other: memory is measured for the whole process.
#[test]
fn the_example_does_what_it_says_and_learns_in_bf16() {
    main().unwrap();
    learns_in_bf16();
}

fn learns_in_bf16() {
    let chain = Arc::new(model(64, 8).build().unwrap().with_float_type(FloatType::Bf16));
    let (data, spec) = (Arc::new(Sines { points: 64, seed: 1 }), spec(3e-3));
    let spec = TrainSpec { length: Length::Epochs(6), ..spec };
    let plain = plain::train(&chain, data.as_ref(), &spec).unwrap();
    let mut orchestrator = Orchestrator::new(DeviceSpec::cpus(2, 1, ByteSize::mib(4))).unwrap();
    orchestrator.submit(TrainTask::new("bf16", chain, data, spec).cuts(vec![2, 4])).unwrap();
    let task = orchestrator.run().unwrap().tasks.remove(0);
    assert_eq!((task.error, &task.losses), (None, &plain.losses));
    assert_eq!(task.weights_sha256, Some(plain.weights_sha256));
    assert!(plain.losses[plain.losses.len() - 1] < plain.losses[0]);
}
