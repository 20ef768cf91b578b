//! A search over a run: it hears losses, and tells tasks how far they go.

use crate::run_dir::{RunSpec, SearchLog, until};
use crate::session::tasks::TaskMaker;
use crate::terminal::tell;
use anyhow::{Context, Result};
use hydra_core::TaskId;
use hydra_engine::{Checkpoint, Command, EvaluationKind, Observer, RunControl, RunEvent, TaskState};
use hydra_search::{Action, Report, Search, Standing, TrialId};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Listens to a run and steers it as a search says. What it decides is a function of the losses.
pub(crate) struct Searcher {
    search: Search,
    spec: RunSpec,
    log: SearchLog,
    control: RunControl,
    maker: TaskMaker,
    /// Minibatches of a trial at most.
    steps: usize,
    /// The trial of each task of the run.
    trials: Vec<Option<TrialId>>,
    names: BTreeMap<String, TrialId>,
    /// The losses that were heard of and not reported.
    losses: BTreeMap<(TrialId, usize), f64>,
    /// Minibatches that each trial has been trained for, as far as was heard.
    trained: BTreeMap<TrialId, usize>,
    /// True if the run stops, for it to go on later.
    stopping: bool,
    /// True if the search cannot go on: nothing is decided any more.
    given_up: bool,
    /// Where each trial is paused.
    paused: BTreeMap<TrialId, usize>,
    /// The states that are saved, or will be, and whether they are.
    states: BTreeMap<(TrialId, usize), State>,
    /// Forks whose parent's state is not saved yet.
    forks: Vec<Action>,
}

struct State {
    file: PathBuf,
    saved: bool,
    /// True if a task began with it: it may read it yet, and does so again where the run goes on after a kill.
    forked: bool,
}

impl Searcher {
    /// A search as far as it has come, over a run of which it has submitted the tasks.
    pub(crate) fn new(
        search: Search,
        spec: RunSpec,
        log: SearchLog,
        control: RunControl,
        maker: TaskMaker,
    ) -> Result<Self> {
        let mut this = Self {
            steps: spec.training.steps.unwrap_or_default(),
            search,
            spec,
            log,
            control,
            maker,
            trials: Vec::new(),
            names: BTreeMap::new(),
            losses: BTreeMap::new(),
            trained: BTreeMap::new(),
            stopping: false,
            given_up: false,
            paused: BTreeMap::new(),
            states: BTreeMap::new(),
            forks: Vec::new(),
        };
        // Those are the tasks that were submitted.
        this.search.actions();
        this.forks = this.missing_forks()?;
        let known: Vec<TrialId> = this.search.trials().map(|view| view.trial).collect();
        for trial in known {
            let name = this.name(trial)?;
            for (step, loss) in this.maker.checkpoint(&name)?.iter().flat_map(Checkpoint::evaluations) {
                this.losses.insert((trial, step), loss);
            }
            this.names.insert(name, trial);
        }
        Ok(this)
    }

    /// The forks that were called for and are not among the tasks yet: the run was killed before their parents were saved.
    fn missing_forks(&self) -> Result<Vec<Action>> {
        let mut missing = Vec::new();
        for view in self.search.trials() {
            let (Some(branch), Standing::Training { until }) = (view.branch, view.standing) else { continue };
            let parent = self.name(branch.parent)?;
            if !self.maker.can_begin(&self.name(view.trial)?, Some(&(parent, branch.at)))? {
                let (trial, settings) = (view.trial, view.settings.clone());
                missing.push(Action::Fork { trial, parent: branch.parent, at: branch.at, settings, until });
            }
        }
        Ok(missing)
    }

    fn name(&self, trial: TrialId) -> Result<String> {
        Ok(self.spec.configuration(&self.search, trial)?.name)
    }

    /// Reports that a trial is trained no further, and that nothing is forked from states of it that were not saved.
    fn fail(&mut self, trial: TrialId) {
        self.paused.remove(&trial);
        let step = self.trained.get(&trial).copied().unwrap_or_default();
        self.report(&Report::Failed { trial, step });
        let is_saved = |of: &(TrialId, usize)| self.states.get(of).is_some_and(|state| state.saved);
        let lost = |fork: &mut Action| origin(fork).is_some_and(|of| of.0 == trial && !is_saved(&of));
        let orphans: Vec<Action> = self.forks.extract_if(.., lost).collect();
        for (orphan, (_, step)) in orphans.iter().filter_map(|fork| Some((fork.trial(), origin(fork)?))) {
            self.report(&Report::Failed { trial: orphan, step });
        }
    }

    fn trial_of(&self, task: TaskId) -> Option<TrialId> {
        self.trials.get(task.0).copied().flatten()
    }

    /// Tells the search, and does what follows.
    fn report(&mut self, report: &Report) {
        // One that nobody wants, such as the failure of a trial that was stopped, changes nothing.
        if self.given_up || self.search.take(report).is_err() {
            return;
        }
        let carried_out = self.log.push(report).and_then(|()| self.carry_out());
        if let Err(error) = carried_out {
            self.give_up(&error);
        }
    }

    /// A search that cannot go on lets no task wait for it.
    fn give_up(&mut self, error: &anyhow::Error) {
        self.given_up = true;
        tell(&format!("error: the search cannot go on, and what is paused stops: {error:#}"));
        self.names.keys().for_each(|task| drop(self.control.send(Command::Stop { task: task.clone() })));
    }

    /// Reports the loss of a trial at a step, if it is known.
    fn report_loss(&mut self, trial: TrialId, step: usize) {
        // A task that goes on from an older checkpoint comes by places where it was before.
        let known = self.search.trial(trial).is_some_and(|view| view.losses.contains_key(&step));
        if let Some(loss) = self.losses.remove(&(trial, step)).filter(|_| !known) {
            self.report(&Report::loss(trial, step, loss));
        }
    }

    /// Carries out what the search says now.
    fn carry_out(&mut self) -> Result<()> {
        let (forks, actions): (Vec<Action>, Vec<Action>) =
            self.search.actions().into_iter().partition(|action| origin(action).is_some());
        self.forks.extend(forks);
        self.keep_states()?;
        let origins: Vec<(TrialId, usize)> = self.forks.iter().filter_map(origin).collect();
        origins.into_iter().try_for_each(|(parent, at)| self.save(parent, at))?;
        for action in actions {
            self.act(action)?;
        }
        self.fork_from_saved()?;
        if self.search.outcome().is_some() {
            // Whoever waits yet is not needed any more.
            let waiting: Vec<TrialId> = self.paused.keys().copied().collect();
            waiting.into_iter().try_for_each(|trial| self.stop(trial))?;
        }
        Ok(())
    }

    /// Has those states saved from which something may be forked, before their tasks go on; others can go.
    fn keep_states(&mut self) -> Result<()> {
        let mut held = self.search.held();
        held.extend(self.forks.iter().filter_map(origin));
        for (trial, step) in held.iter().copied() {
            if self.paused.get(&trial) == Some(&step) {
                self.save(trial, step)?;
            }
        }
        let gone = self.states.extract_if(.., |of, state| state.saved && !state.forked && !held.contains(of));
        // A file that cannot be removed is in nobody's way.
        gone.for_each(|(_, state)| drop(std::fs::remove_file(state.file)));
        Ok(())
    }

    fn save(&mut self, trial: TrialId, step: usize) -> Result<()> {
        if !self.states.contains_key(&(trial, step)) {
            let task = self.name(trial)?;
            let file = self.maker.state_file(&task, step)?;
            let saved = file.exists();
            if !saved {
                let save = Command::Save { task, at: Some(step), file: file.clone() };
                drop(self.control.send(save));
            }
            self.states.insert((trial, step), State { file, saved, forked: false });
        }
        Ok(())
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Continue { trial, until } => {
                self.paused.remove(&trial);
                let task = self.name(trial)?;
                let until = Some(until).filter(|until| *until < self.steps);
                drop(self.control.send(Command::Continue { task, until }));
            }
            Action::Stop { trial } => self.stop(trial)?,
            Action::Start { trial, .. } => self.submit(trial, &action, None)?,
            // It begins when the state that it begins with is saved.
            Action::Fork { .. } => {}
        }
        Ok(())
    }

    fn stop(&mut self, trial: TrialId) -> Result<()> {
        self.paused.remove(&trial);
        let task = self.name(trial)?;
        drop(self.control.send(Command::Stop { task }));
        Ok(())
    }

    /// Adds the forks whose parent's state is there.
    fn fork_from_saved(&mut self) -> Result<()> {
        let saved = |action: &mut Action| {
            origin(action).and_then(|of| self.states.get(&of)).is_some_and(|state| state.saved)
        };
        let ready: Vec<Action> = self.forks.extract_if(.., saved).collect();
        for action in ready {
            let state = origin(&action).and_then(|of| self.states.get_mut(&of));
            let state = state.map(|state| {
                state.forked = true;
                state.file.clone()
            });
            self.submit(action.trial(), &action, state)?;
        }
        Ok(())
    }

    fn submit(&mut self, trial: TrialId, action: &Action, state: Option<PathBuf>) -> Result<()> {
        let configuration = self.spec.configuration(&self.search, trial)?;
        let like = self.maker.like(&configuration, &self.maker.training(&self.spec, &configuration)?);
        let like =
            like.with_context(|| format!("no task of the shape of `{}` was measured", configuration.name))?;
        let parent = origin(action)
            .map(|(parent, at)| Ok::<_, anyhow::Error>((self.name(parent)?, at)))
            .transpose()?;
        let mut task = self.maker.task(&self.spec, &configuration, parent.as_ref())?;
        if let Some(file) = state {
            task = task.fork_from(Checkpoint::open(file)?);
        }
        if let Some(until) = until(action).filter(|until| *until < self.steps) {
            task = task.until(until);
        }
        self.names.insert(configuration.name, trial);
        drop(self.control.send(Command::Submit { task: Box::new(task), like }));
        Ok(())
    }

    fn add_task(&mut self, name: &str) {
        self.trials.push(self.names.get(name).copied());
    }
}

/// The state that a fork begins with.
fn origin(action: &Action) -> Option<(TrialId, usize)> {
    match action {
        Action::Fork { parent, at, .. } => Some((*parent, *at)),
        _ => None,
    }
}

impl Observer for Searcher {
    fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Admitted(admission) => {
                admission.tasks.iter().for_each(|task| self.add_task(&task.name));
                if let Err(error) = self.carry_out() {
                    self.give_up(&error);
                }
                for left in &admission.left_out {
                    let trial = self.names.get(&left.name).copied();
                    trial.into_iter().for_each(|trial| self.fail(trial));
                }
            }
            RunEvent::Submitted { admitted, .. } => self.add_task(&admitted.name),
            RunEvent::Evaluated { task, kind, step, result, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                let last = *step == self.steps;
                if *kind == EvaluationKind::Periodic || last && *kind == EvaluationKind::Validation {
                    self.losses.entry((trial, *step)).or_insert(result.loss);
                }
                if last {
                    self.report_loss(trial, *step);
                }
            }
            RunEvent::Stopping => self.stopping = true,
            RunEvent::Minibatch { task, step, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                self.trained.insert(trial, step + 1);
            }
            RunEvent::Paused { task, step, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                self.trained.insert(trial, *step);
                self.paused.insert(trial, *step);
                self.report_loss(trial, *step);
            }
            RunEvent::Saved { task, step, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                self.states.get_mut(&(trial, *step)).into_iter().for_each(|state| state.saved = true);
                if let Err(error) = self.fork_from_saved() {
                    self.give_up(&error);
                }
            }
            RunEvent::Refused { task, error, .. } => {
                let trial = self.names.get(*task).copied();
                tracing::warn!("a command to `{task}` could not be carried out: {error}");
                trial.into_iter().for_each(|trial| self.fail(trial));
            }
            RunEvent::Ended { task, state: TaskState::Failed | TaskState::Stopped, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                if !self.stopping {
                    self.fail(trial);
                }
            }
            RunEvent::Ended { task, state: TaskState::Done, .. } => {
                // One that had come to its end before was not evaluated again.
                let Some(trial) = self.trial_of(*task) else { return };
                self.report_loss(trial, self.steps);
            }
            _ => {}
        }
    }
}
