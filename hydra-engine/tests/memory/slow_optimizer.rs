//! A run that idles because the optimizer is slow is not finished, and a stop during that time loses nothing.

use crate::common::{Settings, adamw, spirals};
use hydra_core::{ByteSize, Length, TrainSpec};
use hydra_engine::{
    Checkpoint, EngineError, EvaluationKind, Observer, RunEvent, StopFlag, TaskState, TrainTask, plain,
};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

#[test]
fn a_backward_pass_waits_for_an_optimizer_that_takes_long() {
    in_own_process!();
    // Layers with 63 MB of master weights each, so that the optimizer takes longer than the run waits before it
    // checks for progress.
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
    assert_eq!((report.error, report.plan.disk_bytes > 100_000_000), (None, true));
    let plain = plain::train(&chain, spirals().as_ref(), &spec).expect("the plain loop");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256));
}

/// Stops the run a while after the last evaluation that selects the best weights, while these are restored.
struct StopsLate {
    flag: StopFlag,
    after: Duration,
}

impl Observer for StopsLate {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Evaluated { step: 2, kind: EvaluationKind::Periodic, .. } = event {
            let (flag, after) = (self.flag.clone(), self.after);
            std::thread::spawn(move || {
                #[expect(clippy::disallowed_methods, reason = "a run may be stopped at any time")]
                std::thread::sleep(after);
                flag.stop();
            });
        }
    }
}

#[test]
fn a_task_that_is_stopped_while_its_best_weights_come_back_is_kept() {
    in_own_process!();
    let chain = Arc::new(hydra_models::mlp::chain(&[2, 2300, 2300, 2300], 3).expect("a chain"));
    let spec = TrainSpec { clip: None, length: Length::Steps(2), eval_every: Some(2), ..adamw(4) };
    let settings = Settings { memory: ByteSize::mib(800), threads: 2, ..Settings::default() };
    let task = || {
        let task = TrainTask::new("task", chain.clone(), spirals(), spec.clone()).cuts(vec![2]);
        task.validation(spirals()).test(spirals()).initial_validation(false)
    };
    let whole = settings.task(task());
    for milliseconds in [0, 2, 5, 10, 20, 40] {
        let dir = TempDir::new().expect("a directory");
        let file = dir.path().join("task.safetensors");
        let flag = StopFlag::new();
        let late = StopsLate { flag: flag.clone(), after: Duration::from_millis(milliseconds) };
        let mut run = settings.orchestrator().stop_flag(flag).observer(Box::new(late));
        run.submit(task().checkpoint_to(file.clone())).expect("a task");
        let stopped = run.run().expect("a run").tasks.remove(0);
        let kept = Checkpoint::open(&file).expect("it was kept, wherever it was stopped");
        assert_eq!((kept.step(), kept.is_finished()), (2, stopped.state == TaskState::Done));
        let resumed = settings.task(task().resume_from(kept));
        assert_eq!((resumed.state, &resumed.test), (TaskState::Done, &whole.test), "{milliseconds}");
        assert_eq!(resumed.weights_sha256, whole.weights_sha256);
    }
}
