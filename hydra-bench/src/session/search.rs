//! A search over a run: it hears losses, and tells tasks how far they go.

use crate::run_dir::{Origin, Planned, SearchLog, TrialNames, until};
use crate::session::forks::Forks;
use crate::terminal::{Asked, tell};
use anyhow::Result;
use hydra_core::TaskId;
use hydra_engine::{Checkpoint, Command, EvaluationKind, Observer, RunControl, RunEvent, TaskState};
use hydra_search::{Action, Report, Search, Standing, TrialId};
use std::collections::BTreeMap;

/// Listens to a run and steers it as a search says. What it decides is a function of the losses.
pub(crate) struct Searcher {
    search: Search,
    log: SearchLog,
    control: RunControl,
    forks: Forks,
    /// For whoever shows how far the run is.
    asked: Asked,
    /// Minibatches of a trial at most.
    steps: usize,
    /// The trial of each task of the run.
    trials: Vec<Option<TrialId>>,
    names: BTreeMap<String, TrialId>,
    named: TrialNames,
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
}

impl Searcher {
    /// A search as far as it has come, over a run of which it has submitted the tasks but those that are `missing`: forks that
    /// were called for before the run was killed, and whose parents were not saved yet.
    pub(crate) fn new(
        search: Search,
        log: SearchLog,
        control: RunControl,
        forks: Forks,
        missing: Vec<Planned>,
        asked: Asked,
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
        // Those are the tasks that were submitted.
        this.search.actions();
        missing.into_iter().filter(|fork| !fork.stopped).try_for_each(|fork| this.forks.ask(fork))?;
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

    /// Reports that a trial is trained no further, and that nothing is forked from states of it that were not saved.
    fn fail(&mut self, trial: TrialId) {
        self.paused.remove(&trial);
        let step = self.trained.get(&trial).copied().unwrap_or_default();
        self.report(&Report::Failed { trial, step });
        let orphans = self.name(trial).map(|name| self.forks.lose(&name)).unwrap_or_default();
        for (name, step) in
            orphans.iter().filter_map(|fork| Some((&fork.configuration.name, fork.place()?.1)))
        {
            let orphan = self.names.get(name).copied();
            orphan.into_iter().for_each(|trial| self.report(&Report::Failed { trial, step }));
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

    /// Reports what there is to say of a trial that waits after so many minibatches.
    fn report_pause(&mut self, trial: TrialId, step: usize) {
        let sent = self.search.trial(trial).map(|view| view.standing);
        if self.search.compares(trial, step) {
            self.report_loss(trial, step);
        } else if sent == Some(Standing::Training { until: step }) {
            self.report(&Report::Reached { trial, step });
        }
    }

    /// Carries out what the search says now.
    fn carry_out(&mut self) -> Result<()> {
        let actions = self.search.actions();
        self.asked.set(self.search.work().trained);
        for action in actions.iter().filter(|action| matches!(action, Action::Fork { .. })) {
            let fork = self.planned(action)?;
            self.forks.ask(fork)?;
        }
        self.keep_states()?;
        for action in actions {
            self.act(&action)?;
        }
        self.forks.add_ready()?;
        if self.search.outcome().is_some() {
            // Whoever waits yet is not needed any more.
            let waiting: Vec<TrialId> = self.paused.keys().copied().collect();
            waiting.into_iter().try_for_each(|trial| self.stop(trial))?;
        }
        Ok(())
    }

    /// Has those states saved from which something may be forked, before their tasks go on; others can go.
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
            // It begins when the state that it begins with is saved.
            Action::Fork { .. } => {}
        }
        Ok(())
    }

    /// The task that an action begins.
    fn planned(&mut self, action: &Action) -> Result<Planned> {
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
        Ok(Planned { until, origin, ..Planned::from(configuration) })
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
                if let Err(error) = self.carry_out() {
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
                tracing::warn!("a command to `{task}` could not be carried out: {error}");
                // Of a run that stops, tasks end before they are saved where that was asked for: when it goes on, they are.
                trial.filter(|_| !self.stopping).into_iter().for_each(|trial| self.fail(trial));
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
