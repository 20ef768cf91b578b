//! Backtraces of layers that panic: the process keeps the debug information that is read for them.

use crate::alone;
use crate::common::{Fragile, Points, Settings, adamw};
use hydra_core::{ByteSize, Chain, Length, TrainSpec};
use hydra_engine::{RunReport, TaskState, TrainTask};
use hydra_models::mlp;
use std::process::Command;
use std::sync::Arc;

/// Set in the child process, since a process decides at its start whether it prints backtraces.
const WITH_BACKTRACES: &str = "HYDRA_TEST_WITH_BACKTRACES";

#[test]
fn debug_information_of_a_backtrace_is_charged_to_no_device() {
    if std::env::var_os(WITH_BACKTRACES).is_some() {
        return a_panic_and_a_run_after_it();
    }
    let _alone = alone();
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", "backtraces::debug_information_of_a_backtrace_is_charged_to_no_device"]);
    let output = again.env(WITH_BACKTRACES, "1").env("RUST_BACKTRACE", "1").output().unwrap();
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{printed}");
}

fn a_panic_and_a_run_after_it() {
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
