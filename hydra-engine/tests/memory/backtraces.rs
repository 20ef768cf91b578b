//! Backtraces of layers that panic: the process keeps the debug information that is read for them.

use crate::common::{Fragile, Points, Settings, adamw};
use hydra_core::{ByteSize, Chain, Length, TrainSpec};
use hydra_engine::{RunReport, TaskState, TrainTask};
use hydra_models::mlp;
use std::sync::Arc;

#[test]
fn debug_information_of_a_backtrace_is_charged_to_no_device() {
    in_own_process!("RUST_BACKTRACE" = "1");
    let memory = ByteSize::mib(8);
    let run = |bad: usize| -> RunReport {
        let linear = |inputs, outputs| {
            burn::nn::LinearConfig::new(inputs, outputs).init(&burn::tensor::Device::flex())
        };
        let chain = Chain::builder("fragile").layer("a", mlp::Dense { linear: linear(2, 16) });
        let chain = chain.layer("f", Fragile { limit: 400.0 });
        let chain = chain.layer("c", crate::common::Classifier { linear: linear(16, 3) }).build().unwrap();
        let spec = TrainSpec { shuffle: false, length: Length::Steps(6), ..adamw(16) };
        let data = Arc::new(Points { len: 128, bad, panics: false });
        let mut run = Settings { memory, ..Settings::default() }.orchestrator();
        run.submit(TrainTask::new("task", Arc::new(chain), data, spec)).unwrap();
        run.run().unwrap()
    };
    for (bad, state) in [(32, TaskState::Failed), (128, TaskState::Done), (32, TaskState::Failed)] {
        let report = run(bad);
        assert_eq!(report.tasks[0].state, state, "{report:?}");
        let device = &report.devices[0];
        assert!(device.peak_measured && device.peak_bytes <= memory.bytes(), "{device:?}");
    }
}
