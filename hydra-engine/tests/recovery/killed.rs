//! Tasks that share a base, killed at random moments, and resumed with other settings: microbatch groups, replicas,
//! the parameter cache, devices, cuts, budgets and the disk are drawn for each life. They have the bits of the plain
//! loop.

use crate::common::{PLENTY, Settings, adamw, last_layers, tokens};
use hydra_core::{ByteSize, Chain, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{
    Checkpoint, CheckpointEvery, EngineError, Observer, Orchestrator, RunEvent, RunReport, StopFlag,
    TaskState, TrainTask, plain,
};
use hydra_sched::PolicyKind;
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

const TASKS: usize = 3;
const MICROBATCHES: usize = 3;

/// One chain, whose frozen layers all tasks share.
fn chain() -> &'static Arc<Chain> {
    static CHAIN: OnceLock<Arc<Chain>> = OnceLock::new();
    CHAIN.get_or_init(last_layers)
}

fn spec(index: usize) -> TrainSpec {
    let optimizer = OptimizerSpec::adamw(1e-3 * (1 + index) as f64);
    TrainSpec { optimizer, length: Length::Steps(4), accumulate: MICROBATCHES, ..adamw(4) }
}

/// The plain loop's results for each task.
fn alone() -> &'static [String; TASKS] {
    static HASHES: OnceLock<[String; TASKS]> = OnceLock::new();
    HASHES.get_or_init(|| {
        std::array::from_fn(|index| {
            let run = plain::train(chain(), tokens(11, 1).as_ref(), &spec(index));
            run.expect("the plain loop").weights_sha256
        })
    })
}

/// A run from its start, or from a kill, to the next kill or to its end.
#[derive(Clone, Debug)]
struct Life {
    settings: Settings,
    /// Quarters of the base that fit on a device beyond its minimum.
    quarters: u64,
    /// Host memory, in percent between the minimum and the memory for all master weights.
    share: u64,
    /// Minibatches between checkpoints.
    every: usize,
    /// Events after which it is killed.
    killed_after: usize,
}

fn file(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("{index}.safetensors"))
}

/// After a number of minibatches and checkpoints, copies all checkpoints to the directory of the next life: the files
/// at a kill. Later writes are ignored.
struct Kill {
    after: usize,
    from: PathBuf,
    to: PathBuf,
    stop: StopFlag,
}

impl Observer for Kill {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if !matches!(event, RunEvent::Minibatch { .. } | RunEvent::Checkpointed { .. }) || self.after == 0 {
            return;
        }
        self.after -= 1;
        if self.after == 0 {
            for index in (0..TASKS).filter(|index| file(&self.from, *index).exists()) {
                fs::copy(file(&self.from, index), file(&self.to, index)).expect("a copy");
            }
            self.stop.stop();
        }
    }
}

impl Life {
    /// The tasks, each resumed from its checkpoint in a directory.
    fn submitted(&self, mut run: Orchestrator, dir: &Path) -> Orchestrator {
        let Settings { cuts, microbatch_group, replicas, .. } = &self.settings;
        for index in 0..TASKS {
            let task = TrainTask::new(format!("task-{index}"), chain().clone(), tokens(11, 1), spec(index));
            let task = cuts.iter().cloned().fold(task, TrainTask::cuts);
            let task = microbatch_group.iter().copied().fold(task, TrainTask::microbatch_group);
            let task = replicas.iter().copied().fold(task, TrainTask::most_devices);
            let file = file(dir, index);
            let there = file.exists().then(|| Checkpoint::open(&file).expect("a whole checkpoint"));
            let task = there.into_iter().fold(task, TrainTask::resume_from);
            run.submit(task.checkpoint_to(file)).expect("a task");
        }
        run
    }

    /// A run with the drawn device and host memory.
    fn orchestrator(&self, dir: &Path, scratch: &Path) -> Orchestrator {
        let mut settings = self.settings.clone();
        let admitted = self.submitted(settings.orchestrator(), dir).admit().expect("it fits");
        let plan = &admitted.admission().tasks[0].plan;
        let least =
            plan.shards.iter().map(|shard| shard.peak_bytes + shard.param_bytes).max().expect("shards");
        let base: u64 =
            chain().buffers().iter().filter(|buffer| !buffer.trained).map(|buffer| buffer.bytes()).sum();
        let begins = (0..TASKS).all(|index| !file(dir, index).exists());
        assert!(!begins || admitted.admission().shared_bytes() == base, "the tasks share their base");
        settings.memory = ByteSize(2 * least + self.quarters * base / 4);
        let needed = |disk: bool| {
            let run = settings.orchestrator().host_memory(ByteSize(1));
            let run = if disk { run.disk(scratch.to_owned(), PLENTY) } else { run };
            match self.submitted(run, dir).admit() {
                Err(EngineError::HostMemory { needed, .. }) => needed,
                other => panic!("expected too little host memory, found {other:?}"),
            }
        };
        let (least, all) = (needed(true), needed(false));
        let host = ByteSize(least + all.saturating_sub(least) * self.share / 100);
        let run = settings.orchestrator().host_memory(host).disk(scratch.to_owned(), PLENTY);
        run.checkpoint_every(CheckpointEvery::Minibatches(self.every))
    }
}

/// Lives one after another; the last one is not killed.
fn lived(lives: &[Life]) -> RunReport {
    let dirs: Vec<TempDir> = lives.iter().map(|_| TempDir::new().expect("a directory")).collect();
    let scratch = TempDir::new().expect("a directory");
    let mut reports = lives.iter().enumerate().map(|(number, life)| {
        let dir = dirs[number].path();
        let run = life.orchestrator(dir, scratch.path());
        let run = match dirs.get(number + 1) {
            Some(next) => {
                let (from, to, stop) = (dir.to_owned(), next.path().to_owned(), StopFlag::new());
                let kill = Kill { after: life.killed_after, from, to, stop: stop.clone() };
                run.stop_flag(stop).observer(Box::new(kill))
            }
            None => run,
        };
        life.submitted(run, dir).run().expect("a run")
    });
    // A life that ends before it is killed is the last.
    let over = |report: &RunReport| report.tasks.iter().all(|task| task.state == TaskState::Done);
    reports.find(over).expect("the last life comes to its end")
}

prop_compose! {
    fn life()(
        devices in 1usize..=3,
        threads in 1usize..=2,
        zero_copy: bool,
        cuts in prop::collection::btree_set(1usize..5, 1..=4),
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        prefetch: bool,
        cache: bool,
        microbatch_group in prop::option::of(1usize..=MICROBATCHES),
        replicas in prop::option::of(1usize..=3),
        quarters in 0_u64..=8,
        share in 0_u64..=100,
        every in 1usize..=2,
        killed_after in 1usize..=14,
    ) -> Life {
        let cuts = Some(cuts.into_iter().collect());
        let settings = Settings { devices, threads, zero_copy, cuts, policy, prefetch, cache, microbatch_group, replicas, ..Settings::default() };
        Life { settings, quarters, share, every, killed_after }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]
    #[test]
    fn no_kill_and_no_setting_changes_a_bit(lives in prop::collection::vec(life(), 2..=4)) {
        for (task, expected) in lived(&lives).tasks.iter().zip(alone()) {
            prop_assert_eq!((&task.error, task.weights_sha256.as_ref()), (&None, Some(expected)), "{}", task.name);
        }
    }
}
