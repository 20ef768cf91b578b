//! A disk that loses data during a run: the task with master weights there fails with the reason, all others have the
//! bits that they have alone, and the failed one can be resumed elsewhere from its checkpoint.
#![cfg(target_os = "linux")]

use crate::common::{Settings, adamw, gpt2_chain, mlp_chain, scratch_files, spirals, tokens};
use hydra_core::{ByteSize, Length, TaskId, TrainSpec};
use hydra_engine::{
    Checkpoint, CheckpointEvery, EngineError, Observer, Orchestrator, RunEvent, RunReport, Span, TaskState,
    TrainTask, Work, plain,
};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[derive(Clone, Copy, Debug)]
enum Damage {
    /// The file is truncated to nothing.
    Shorter,
    /// The file has other content.
    Other,
}

impl Damage {
    fn to(self, file: &Path) {
        let len = fs::metadata(file).expect("a file").len();
        let mut file = File::options().write(true).open(file).expect("a file");
        match self {
            Self::Shorter => file.set_len(0).expect("a shorter file"),
            Self::Other => file.write_all(&vec![0xA5; len as usize]).expect("other bytes"),
        }
    }

    /// The error of the task with its master weights there.
    fn said(self) -> &'static str {
        match self {
            Self::Shorter => "failed to fill whole buffer",
            Self::Other => "the bytes read are not those that were written",
        }
    }
}

/// Damages the largest file when every buffer of the first task has been stepped, and so written, for a number of
/// minibatches. From then on the task reads all of its buffers before it writes one, so no write hides the damage.
struct Breaks {
    dir: PathBuf,
    step: usize,
    damage: Damage,
    /// Buffers that are still to be written in that minibatch.
    buffers: usize,
}

impl Observer for Breaks {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Span(Span { task: TaskId(0), work: Work::Step, step, .. }) = event
            && step + 1 == self.step
        {
            self.buffers -= 1;
            if self.buffers == 0 {
                self.damage.to(scratch_files(&self.dir).last().expect("a file"));
            }
        }
    }
}

fn spec(clip: Option<f64>) -> TrainSpec {
    TrainSpec { length: Length::Steps(5), clip, ..adamw(4) }
}

/// The task whose master weights are in the largest file.
fn large(spec: &TrainSpec) -> TrainTask {
    TrainTask::new("large", gpt2_chain(), tokens(11, 1), spec.clone()).cuts(vec![1, 2, 3, 4])
}

fn small(spec: &TrainSpec) -> TrainTask {
    TrainTask::new("small", mlp_chain(), spirals(), spec.clone()).cuts(vec![1, 2])
}

/// A run of both tasks, with all master weights on the disk.
fn both(settings: &Settings, large: &TrainTask, spec: &TrainSpec, dir: &Path) -> Orchestrator {
    let with = |host: u64| {
        let run = settings.orchestrator().host_memory(ByteSize(host)).disk(dir.to_owned(), ByteSize::mib(64));
        let mut run = run.checkpoint_every(CheckpointEvery::Minibatches(1));
        run.submit(large.clone()).expect("a task");
        run.submit(small(spec)).expect("a task");
        run
    };
    match with(1).admit() {
        Err(EngineError::HostMemory { needed, .. }) => with(needed),
        other => panic!("expected too little host memory, found {other:?}"),
    }
}

fn damaged(settings: &Settings, large: &TrainTask, spec: &TrainSpec, damage: Damage) -> RunReport {
    let dir = TempDir::new().expect("a directory");
    let at = dir.path().canonicalize().expect("a directory");
    let buffers = gpt2_chain().buffers().len();
    let breaks = Breaks { dir: at.clone(), step: 3, damage, buffers };
    let report = both(settings, large, spec, &at).observer(Box::new(breaks)).run().expect("a run");
    assert_eq!(scratch_files(&at), Vec::<PathBuf>::new(), "the run is over");
    let [large, small] = &report.tasks[..] else { panic!("two tasks") };
    let said = large.error.clone().unwrap_or_default();
    assert_eq!(large.state, TaskState::Failed, "{damage:?} {settings:?} {said}");
    assert!(said.contains(" of task 0 could not be read in `") && said.contains(damage.said()), "{said}");
    let alone = plain::train(&mlp_chain(), spirals().as_ref(), spec).expect("the plain loop");
    assert_eq!((small.state, small.error.as_deref()), (TaskState::Done, None));
    assert_eq!(small.weights_sha256.as_ref(), Some(&alone.weights_sha256));
    assert!(report.host_peak_bytes <= report.host_budget_bytes, "{report:?}");
    report
}

#[test]
fn a_file_that_is_damaged_fails_its_task_and_no_other() {
    for (damage, clip) in [(Damage::Shorter, None), (Damage::Other, Some(0.7)), (Damage::Other, None)] {
        for (devices, prefetch, zero_copy) in [(1, true, false), (2, true, true), (1, false, false)] {
            let settings = Settings { devices, prefetch, zero_copy, ..Settings::default() };
            damaged(&settings, &large(&spec(clip)), &spec(clip), damage);
        }
    }
}

#[test]
fn what_was_kept_of_a_task_whose_file_is_damaged_goes_on() {
    let (dir, spec) = (TempDir::new().expect("a directory"), spec(None));
    let file = dir.path().join("large.safetensors");
    let spec = TrainSpec { eval_every: Some(2), ..spec };
    let task = || large(&spec).validation(tokens(5, 3)).checkpoint_to(file.clone());
    damaged(&Settings::default(), &task(), &TrainSpec { eval_every: None, ..spec.clone() }, Damage::Other);
    let kept = Checkpoint::open(&file).expect("a checkpoint");
    assert!((1..=3).contains(&kept.step()), "{}", kept.step());
    let resumed = Settings::default().task(task().resume_from(kept));
    let whole = Settings::default().task(large(&spec).validation(tokens(5, 3)));
    assert_eq!((resumed.state, resumed.losses), (TaskState::Done, whole.losses));
    assert_eq!(resumed.weights_sha256, whole.weights_sha256);
}
