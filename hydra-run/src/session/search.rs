//! Runs a search: receives losses, and decides how far each task trains.

use crate::run_dir::{Origin, PlannedTask, SearchLog, TrialNames, until};
use crate::session::forks::Forks;
use crate::terminal::{RequestedMinibatches, tell};
use anyhow::Result;
use hydra_core::TaskId;
use hydra_engine::{Checkpoint, Command, EvaluationKind, Observer, RunControl, RunEvent, TaskState};
use hydra_search::{Action, Report, Search, TrialId, TrialState};
use std::collections::BTreeMap;

/// Observes a run and controls it according to a search. Its decisions are a function of the losses.
pub(crate) struct Searcher {
    search: Search,
    log: SearchLog,
    control: RunControl,
    forks: Forks,
    /// Minibatches requested so far, for progress output.
    asked: RequestedMinibatches,
    /// The maximum minibatches of a trial.
    steps: usize,
    /// The trial of each task.
    trials: Vec<Option<TrialId>>,
    names: BTreeMap<String, TrialId>,
    named: TrialNames,
    /// Losses received and not yet reported to the search.
    losses: BTreeMap<(TrialId, usize), f64>,
    /// Minibatches that each trial has trained.
    trained: BTreeMap<TrialId, usize>,
    /// True if the run is being interrupted, to be resumed later.
    stopping: bool,
    /// True if the search cannot continue, and makes no more decisions.
    given_up: bool,
    /// The minibatch at which each trial is paused.
    paused: BTreeMap<TrialId, usize>,
}

impl Searcher {
    /// Continues a search over a run with its tasks submitted. `missing` are forks requested before the run was killed, whose
    /// parents' states are not saved yet.
    pub(crate) fn new(
        search: Search,
        log: SearchLog,
        control: RunControl,
        forks: Forks,
        missing: Vec<PlannedTask>,
        asked: RequestedMinibatches,
    ) -> Result<Self> {
        let mut this = Self {
            steps: forks.spec.training.steps.unwrap_or_default(),
            search,
            log,
            control,
            forks,
            asked,
            trials: Vec::new(),
            names: BTreeMap::new(),
            named: TrialNames::default(),
            losses: BTreeMap::new(),
            trained: BTreeMap::new(),
            stopping: false,
            given_up: false,
            paused: BTreeMap::new(),
        };
        // These actions are the tasks that were submitted.
        this.search.actions();
        missing.into_iter().filter(|fork| !fork.stopped).try_for_each(|fork| this.forks.request(fork))?;
        let known = this.search.trials().map(|view| (view.trial, view.branch.map(|branch| branch.at)));
        for (trial, from) in known.collect::<Vec<_>>() {
            let name = this.name(trial)?;
            from.into_iter().for_each(|at| this.asked.fork(&name, at));
            for (step, loss) in this.forks.maker.checkpoint(&name)?.iter().flat_map(Checkpoint::evaluations) {
                this.losses.insert((trial, step), loss);
            }
            this.names.insert(name, trial);
        }
        this.asked.set(this.search.work().trained);
        Ok(this)
    }

    fn name(&mut self, trial: TrialId) -> Result<String> {
        Ok(self.forks.spec.configuration(&self.search, trial, &mut self.named)?.name)
    }

    /// Reports the failure of a trial, and of forks that wait for its unsaved states.
    fn fail(&mut self, trial: TrialId) {
        self.paused.remove(&trial);
        let step = self.trained.get(&trial).copied().unwrap_or_default();
        self.report(&Report::Failed { trial, step });
        let orphans = self.name(trial).map(|name| self.forks.lose(&name)).unwrap_or_default();
        for (name, step) in
            orphans.iter().filter_map(|fork| Some((&fork.configuration.name, fork.parent_state()?.1)))
        {
            let orphan = self.names.get(name).copied();
            orphan.into_iter().for_each(|trial| self.report(&Report::Failed { trial, step }));
        }
    }

    fn trial_of(&self, task: TaskId) -> Option<TrialId> {
        self.trials.get(task.0).copied().flatten()
    }

    /// Passes a report to the search, and executes the resulting actions.
    fn report(&mut self, report: &Report) {
        // The search ignores irrelevant reports, such as the failure of a stopped trial.
        if self.given_up || self.search.take(report).is_err() {
            return;
        }
        let executed = self.log.push(report).and_then(|()| self.execute_actions());
        if let Err(error) = executed {
            self.give_up(&error);
        }
    }

    /// Stops all tasks of a search that cannot continue.
    fn give_up(&mut self, error: &anyhow::Error) {
        self.given_up = true;
        tell(&format!("error: the search cannot continue; its tasks stop: {error:#}"));
        self.names.keys().for_each(|task| drop(self.control.send(Command::Stop { task: task.clone() })));
    }

    /// Reports the loss of a trial at a step, if it is known.
    fn report_loss(&mut self, trial: TrialId, step: usize) {
        // A task resumed from an older checkpoint passes minibatches that were reported before.
        let known = self.search.trial(trial).is_some_and(|view| view.losses.contains_key(&step));
        if let Some(loss) = self.losses.remove(&(trial, step)).filter(|_| !known) {
            self.report(&Report::loss(trial, step, loss));
        }
    }

    /// Reports a trial that is paused after `step` minibatches.
    fn report_pause(&mut self, trial: TrialId, step: usize) {
        let sent = self.search.trial(trial).map(|view| view.standing);
        if self.search.compares(trial, step) {
            self.report_loss(trial, step);
        } else if sent == Some(TrialState::Training { until: step }) {
            self.report(&Report::Reached { trial, step });
        }
    }

    /// Executes the pending actions of the search.
    fn execute_actions(&mut self) -> Result<()> {
        let actions = self.search.actions();
        self.asked.set(self.search.work().trained);
        for action in actions.iter().filter(|action| matches!(action, Action::Fork { .. })) {
            let fork = self.planned(action)?;
            self.forks.request(fork)?;
        }
        self.keep_states()?;
        for action in actions {
            self.act(&action)?;
        }
        self.forks.add_ready()?;
        if self.search.outcome().is_some() {
            // Paused trials are no longer needed.
            let waiting: Vec<TrialId> = self.paused.keys().copied().collect();
            waiting.into_iter().try_for_each(|trial| self.stop(trial))?;
        }
        Ok(())
    }

    /// Requests the states that may be forked before their tasks continue, and removes the others.
    fn keep_states(&mut self) -> Result<()> {
        let held = self.search.held();
        let held = held.into_iter().map(|(trial, step)| Ok((self.name(trial)?, step)));
        let held = held.collect::<Result<_>>()?;
        self.forks.hold(held)
    }

    fn act(&mut self, action: &Action) -> Result<()> {
        match *action {
            Action::Continue { trial, until } => {
                self.paused.remove(&trial);
                let task = self.name(trial)?;
                let until = Some(until).filter(|until| *until < self.steps);
                drop(self.control.send(Command::Continue { task, until }));
            }
            Action::Stop { trial } => self.stop(trial)?,
            Action::Start { .. } => {
                let planned = self.planned(action)?;
                self.forks.add(&planned)?;
            }
            // A fork starts when the state that it starts from is saved.
            Action::Fork { .. } => {}
        }
        Ok(())
    }

    /// Returns the task that an action starts.
    fn planned(&mut self, action: &Action) -> Result<PlannedTask> {
        let configuration = self.forks.spec.configuration(&self.search, action.trial(), &mut self.named)?;
        self.names.insert(configuration.name.clone(), action.trial());
        let origin = match action {
            Action::Fork { parent, at, .. } => {
                self.asked.fork(&configuration.name, *at);
                let (task, changes) = (self.name(*parent)?, BTreeMap::new());
                Some(Origin { task, at: *at, changes, weights_only: false })
            }
            _ => None,
        };
        let until = until(action).filter(|until| *until < self.steps);
        Ok(PlannedTask { until, origin, ..PlannedTask::from(configuration) })
    }

    fn stop(&mut self, trial: TrialId) -> Result<()> {
        self.paused.remove(&trial);
        let task = self.name(trial)?;
        drop(self.control.send(Command::Stop { task }));
        Ok(())
    }

    fn add_task(&mut self, name: &str) {
        self.trials.push(self.names.get(name).copied());
    }
}

impl Observer for Searcher {
    fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Admitted(admission) => {
                admission.tasks.iter().for_each(|task| self.add_task(&task.name));
                if let Err(error) = self.execute_actions() {
                    self.give_up(&error);
                }
                for left in &admission.skipped {
                    let trial = self.names.get(&left.name).copied();
                    trial.into_iter().for_each(|trial| self.fail(trial));
                }
            }
            RunEvent::Submitted { admitted, .. } => self.add_task(&admitted.name),
            RunEvent::Evaluated { task, kind, step, result, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                let last = *step == self.steps;
                if *kind == EvaluationKind::Periodic || last && *kind == EvaluationKind::Validation {
                    self.losses.entry((trial, *step)).or_insert(result.cost());
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
                self.report_pause(trial, *step);
            }
            RunEvent::Saved { task, step, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                if let Err(error) = self.name(trial).and_then(|name| self.forks.saved(&name, *step)) {
                    self.give_up(&error);
                }
            }
            RunEvent::Refused { task, error, .. } => {
                let trial = self.names.get(*task).copied();
                tracing::warn!("a command to `{task}` failed: {error}");
                // Tasks of an interrupted run may end before a requested state is saved. It is saved after the run is resumed.
                trial.filter(|_| !self.stopping).into_iter().for_each(|trial| self.fail(trial));
            }
            RunEvent::Ended { task, state: TaskState::Failed | TaskState::Stopped, .. } => {
                let Some(trial) = self.trial_of(*task) else { return };
                if !self.stopping {
                    self.fail(trial);
                }
            }
            RunEvent::Ended { task, state: TaskState::Done, .. } => {
                // A task that was finished before is not evaluated again.
                let Some(trial) = self.trial_of(*task) else { return };
                self.report_loss(trial, self.steps);
            }
            _ => {}
        }
    }
}
