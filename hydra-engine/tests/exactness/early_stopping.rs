//! Early stopping: a task ends when its evaluations stop improving, after the same minibatch on all devices.

use crate::common::{Settings, adamw, config, mlp_chain, spirals, tokens};
use hydra_core::{Chain, Dataset, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{
    Checkpoint, Observer, OptimizerPlacement, RunEvent, StopFlag, TaskReport, TaskState, TrainTask,
};
use hydra_models::{gpt2, mlp};
use std::sync::Arc;
use tempfile::TempDir;

const STEPS: usize = 24;

/// A task whose validation loss goes up and down.
#[derive(Clone)]
struct Case {
    chain: Arc<Chain>,
    train: Arc<dyn Dataset>,
    validation: Arc<dyn Dataset>,
    spec: TrainSpec,
}

impl Case {
    fn mlp() -> Self {
        let spec =
            TrainSpec { optimizer: OptimizerSpec::sgd(0.5), ..TrainSpec::new(OptimizerSpec::sgd(0.5), 8) };
        Self::of(mlp_chain(), spirals(), Arc::new(mlp::Spirals::new(2, 30, 3)), spec)
    }

    fn gpt2() -> Self {
        let mut small = config();
        (small.n_layer, small.resid_pdrop) = (2, 0.3);
        let chain = Arc::new(gpt2::chain(&small, None).unwrap());
        Self::of(
            chain,
            tokens(9, 1),
            tokens(4, 7),
            TrainSpec { optimizer: OptimizerSpec::adamw(3e-2), ..adamw(4) },
        )
    }

    fn of(chain: Arc<Chain>, train: Arc<dyn Dataset>, validation: Arc<dyn Dataset>, spec: TrainSpec) -> Self {
        let spec = TrainSpec { length: Length::Steps(STEPS), eval_every: Some(2), clip: None, ..spec };
        Self { chain, train, validation, spec }
    }

    fn patient(&self, patience: usize) -> Self {
        Self { spec: TrainSpec { patience: Some(patience), ..self.spec.clone() }, ..self.clone() }
    }

    fn task(&self) -> TrainTask {
        let task = TrainTask::new("task", self.chain.clone(), self.train.clone(), self.spec.clone());
        task.validation(self.validation.clone()).test(self.train.clone())
    }
}

/// The minibatches after which a task with these evaluations ends.
fn ends_after(whole: &TaskReport, patience: usize) -> usize {
    let (mut best, mut since) = (f64::INFINITY, 0);
    for (step, result) in &whole.validations.evaluations {
        (best, since) = if result.loss < best { (result.loss, 0) } else { (best, since + 1) };
        if since == patience {
            return *step;
        }
    }
    STEPS
}

/// Compares a task with this patience with the same task with more patience.
fn agrees(task: &TaskReport, whole: &TaskReport, patience: usize, what: &str) {
    let end = ends_after(whole, patience);
    assert_eq!((task.state, task.error.as_deref()), (TaskState::Done, None), "{what}");
    assert_eq!((task.trained.steps, task.validations.stopped_early), (end, end < STEPS), "{what}");
    assert_eq!(task.losses, whole.losses[..end], "{what}");
    assert_eq!(task.validations.evaluations, whole.validations.evaluations[..end / 2], "{what}");
    let best =
        task.validations.evaluations.iter().find(|(step, _)| Some(*step) == task.validations.best_step);
    assert_eq!(task.validation.as_ref(), best.map(|(_, result)| result), "{what}");
}

#[test]
fn a_task_ends_when_it_gets_no_better() {
    for (name, case) in [("mlp", Case::mlp()), ("gpt2", Case::gpt2())] {
        let whole = Settings::default().task(case.task());
        let mut early = 0;
        for patience in [1, 2, 3] {
            let settings = |devices, prefetch, cuts, zero_copy, others| Settings {
                devices,
                prefetch,
                cuts: Some(cuts),
                zero_copy,
                others,
                ..Settings::default()
            };
            let mut seen: Option<TaskReport> = None;
            for settings in [
                settings(1, true, vec![], false, 0),
                settings(1, true, vec![1, 2], false, 0),
                settings(2, true, vec![1], false, 2),
                settings(2, false, vec![1, 2], false, 1),
                settings(1, true, vec![2], true, 1),
            ] {
                let what = format!("{name}, patience {patience}, {settings:?}");
                let task = settings.task(case.patient(patience).task());
                agrees(&task, &whole, patience, &what);
                early += usize::from(task.validations.stopped_early);
                let first = seen.get_or_insert(task.clone());
                assert_eq!(
                    (&task.test, &task.weights_sha256),
                    (&first.test, &first.weights_sha256),
                    "{what}"
                );
            }
            // The weights are the best ones.
            let seen = seen.unwrap();
            let spec =
                TrainSpec { length: Length::Steps(seen.validations.best_step.unwrap()), ..case.spec.clone() };
            let short = Settings::default().task(Case { spec, ..case.clone() }.task());
            assert_eq!(seen.weights_sha256, short.weights_sha256, "{name}, patience {patience}");
        }
        assert!(early >= 5, "{name}: no run ended early: {:?}", whole.validations.evaluations);
    }
}

#[test]
fn one_that_lives_on_the_device_ends_there_too() {
    let case = Case::mlp();
    let whole = Settings::default().task(case.task());
    let run = Settings::default().orchestrator().optimizer_placement(OptimizerPlacement::Device);
    let mut run = run;
    run.submit(case.patient(1).task()).unwrap();
    agrees(&run.run().unwrap().tasks[0], &whole, 1, "on the device");
}

/// Stops a run after a number of minibatches.
struct Stops(usize, StopFlag);

impl Observer for Stops {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { step, .. } if step + 1 == self.0) {
            self.1.stop();
        }
    }
}

#[test]
fn an_interrupted_task_keeps_its_patience() {
    let case = Case::mlp().patient(2);
    let whole = Settings::default().task(case.task());
    assert!(whole.validations.stopped_early, "{:?}", whole.validations.evaluations);
    for after in 1..=whole.trained.steps {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("task.safetensors");
        let task = || case.task().checkpoint_to(file.clone());
        let flag = StopFlag::new();
        let run = Settings::default().orchestrator().stop_flag(flag.clone());
        let mut run = run.observer(Box::new(Stops(after, flag)));
        run.submit(task()).unwrap();
        run.run().unwrap();
        let resumed = Settings::default().task(task().resume_from(Checkpoint::open(&file).unwrap()));
        assert_eq!(
            (resumed.state, resumed.validations.stopped_early),
            (TaskState::Done, true),
            "after {after}"
        );
        assert_eq!(
            (resumed.losses, resumed.validations.evaluations),
            (whole.losses.clone(), whole.validations.evaluations.clone())
        );
        assert_eq!(
            (resumed.test, resumed.weights_sha256),
            (whole.test.clone(), whole.weights_sha256.clone())
        );
        assert!(Checkpoint::open(&file).unwrap().is_finished());
    }
}
