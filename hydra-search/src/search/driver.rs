//! The search: a searcher over the tasks that are trained for it.

use super::task::Phase;
use super::tasks::{Reported, Tasks};
use super::{Outcome, Report, ReportError, TrialState, TrialView, Work};
use crate::rank::{Loss, TrialId};
use crate::searcher::{Action, Repeat, Searcher, build};
use crate::space::Configuration;
use crate::spec::{Spec, SpecError};
use crate::tree::{Branch, HyperparamSchedules, StageTree};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// A running search, as a state machine: fetch actions, carry them out in any order and at any speed, report the
/// results, fetch again. Decisions are a function of the spec, the seed and the losses.
///
/// ```
/// use hydra_search::{Action, Search, Spec, Whole};
///
/// let spec = Spec::from_toml("search = 'halving'\ntrials = 9\nsteps = 90\nspace = { lr = 'log:1e-4..1' }")?;
/// let mut search = Search::new(&spec, 7, Box::new(Whole { steps: spec.steps }))?;
/// while search.outcome().is_none() {
///     for action in search.actions() {
///         // A real driver trains here; this loss falls with the steps and is least at a rate of 0.01.
///         if let Action::Start { trial, until, .. } | Action::Continue { trial, until } = action {
///             let lr = search.trial(trial).unwrap().settings.get("lr").unwrap().number().unwrap();
///             search.report(trial, until, (lr.log10() + 2.0).abs() + 1.0 / until as f64)?;
///         }
///     }
/// }
/// let best = search.outcome().unwrap().best.unwrap();
/// assert_eq!(search.trial(best).unwrap().losses.len(), 3, "it was compared at three rungs");
/// assert_eq!(search.work().trained, 9 * 10 + 3 * 20 + 60);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Search {
    searcher: Box<dyn Searcher>,
    schedules: Box<dyn HyperparamSchedules>,
    tasks: Tasks,
    trials: Vec<Trial>,
}

/// The searcher's view of a trial.
#[derive(Debug)]
struct Trial {
    settings: Configuration,
    /// The minibatches of its parent that a fork of the searcher starts after.
    from: usize,
    losses: BTreeMap<usize, Loss>,
    wanted: Option<usize>,
    furthest: usize,
    stopped: bool,
}

impl fmt::Debug for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Search")
            .field("trials", &self.trials)
            .field("tasks", &self.tasks)
            .finish_non_exhaustive()
    }
}

impl Search {
    /// The search of a spec. `schedules` returns the hyperparameter schedule of a configuration, so that equal
    /// prefixes are trained once; with [`Whole`](crate::Whole) only equal configurations share training.
    ///
    /// # Errors
    /// [`SpecError`] if the spec is invalid.
    pub fn new(spec: &Spec, seed: u64, schedules: Box<dyn HyperparamSchedules>) -> Result<Self, SpecError> {
        Ok(Self::own(build(spec, seed)?, schedules))
    }

    /// A search with a custom searcher.
    pub fn own(searcher: Box<dyn Searcher>, schedules: Box<dyn HyperparamSchedules>) -> Self {
        let mut search = Self { searcher, schedules, tasks: Tasks::default(), trials: Vec::new() };
        search.pass_losses(Vec::new());
        search
    }

    /// Applies the reports of an interrupted search, in their original order. The actions that follow are discarded;
    /// [`Search::trials`] has the current state of every trial.
    ///
    /// # Errors
    /// [`ReportError`] if the reports are not those of this spec and seed.
    pub fn replay<'a>(&mut self, reports: impl IntoIterator<Item = &'a Report>) -> Result<(), ReportError> {
        reports.into_iter().try_for_each(|report| self.take(report))?;
        self.actions();
        Ok(())
    }

    /// The pending actions, in a valid order. Each action is returned once.
    pub fn actions(&mut self) -> Vec<Action> {
        self.tasks.fetch_actions()
    }

    /// Reports the loss of a trial after `step` minibatches, as an action requested. A loss that is not finite ends
    /// the trial. A repeated report has no effect.
    ///
    /// # Errors
    /// [`ReportError`] if no action requested it; nothing is changed then.
    pub fn report(&mut self, trial: TrialId, step: usize, loss: f64) -> Result<(), ReportError> {
        self.take(&Report::loss(trial, step, loss))
    }

    /// Reports that a trial has reached the step of an action at which its loss is not [compared](Self::compares).
    ///
    /// # Errors
    /// [`ReportError`] if no action requested it, or its loss is compared there; nothing is changed then.
    pub fn reach(&mut self, trial: TrialId, step: usize) -> Result<(), ReportError> {
        self.take(&Report::Reached { trial, step })
    }

    /// Reports the failure of a trial after `step` minibatches. It counts as [`Loss::Lost`] at all later steps, and
    /// so do trials that would have been forked from it after `step`.
    ///
    /// # Errors
    /// [`ReportError`] if it is not being trained; nothing is changed then.
    pub fn fail(&mut self, trial: TrialId, step: usize) -> Result<(), ReportError> {
        self.take(&Report::Failed { trial, step })
    }

    /// Applies a report.
    ///
    /// # Errors
    /// [`ReportError`] if it does not follow from the actions; nothing is changed then.
    pub fn take(&mut self, report: &Report) -> Result<(), ReportError> {
        let known = self.tasks.report(report)?;
        self.pass_losses(known);
        Ok(())
    }

    /// The result of the search; `None` while it runs.
    pub fn outcome(&self) -> Option<Outcome> {
        let over = self.trials.iter().all(|trial| trial.wanted.is_none());
        over.then(|| Outcome { best: self.leaderboard().into_iter().next() })
    }

    /// The trials with a finite last loss: by minibatches trained, most first, then by loss.
    pub fn leaderboard(&self) -> Vec<TrialId> {
        let last = |(trial, of): (usize, &Trial)| {
            let (step, loss) = of.losses.last_key_value()?;
            (!loss.is_lost()).then_some((Reverse(*step), *loss, TrialId(trial)))
        };
        let mut ranked: Vec<_> = self.trials.iter().enumerate().filter_map(last).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, trial)| trial).collect()
    }

    /// All trials, by number.
    pub fn trials(&self) -> impl ExactSizeIterator<Item = TrialView<'_>> {
        (0..self.trials.len()).map(|trial| self.view(TrialId(trial)))
    }

    /// The trial with this number.
    pub fn trial(&self, trial: TrialId) -> Option<TrialView<'_>> {
        (trial.0 < self.trials.len()).then(|| self.view(trial))
    }

    /// The draws that were equal to an earlier trial, for the user's information.
    pub fn repeats(&self) -> &[Repeat] {
        self.searcher.repeats()
    }

    /// The steps at which losses of the trials so far may be requested, in order.
    pub fn milestones(&self) -> Vec<usize> {
        let of = |trial| self.searcher.milestones(TrialId(trial));
        let all: BTreeSet<usize> = (0..self.trials.len()).flat_map(of).collect();
        all.into_iter().collect()
    }

    /// True if the loss of a trial at a step is compared, its own or that of a trial that is still equal. At other
    /// steps of actions the state is needed but no loss: they are reported as [`Report::Reached`].
    pub fn compares(&self, trial: TrialId, step: usize) -> bool {
        trial.0 < self.trials.len() && self.tasks.task(trial).stops.contains(&step)
    }

    /// The states that a future [`Action::Fork`] may start from: trial and number of minibatches. Other states can be
    /// dropped, except the current one of each trial. Call this after reports and before their actions are carried out.
    pub fn held(&self) -> Vec<(TrialId, usize)> {
        self.tasks.held(self.searcher.states())
    }

    /// The tree of the trials, whose edges are trained once.
    pub fn tree(&self) -> &StageTree {
        self.tasks.tree()
    }

    /// The minibatches requested so far.
    pub fn work(&self) -> Work {
        let apart = self.trials.iter().map(|trial| trial.furthest.saturating_sub(trial.from)).sum();
        Work { trained: self.tasks.trained(), apart }
    }

    fn view(&self, trial: TrialId) -> TrialView<'_> {
        let of = &self.trials[trial.0];
        let (tree, last) = (self.tree(), of.losses.last_key_value().map_or(0, |(step, _)| *step));
        TrialView {
            trial,
            settings: &of.settings,
            branch: tree.branch(trial),
            same_as: tree.is_repeat(trial).then(|| tree.holder(trial, self.tasks.task(trial).end())),
            task: tree.holder(trial, last),
            begun: self.tasks.task(trial).is_begun(),
            until: self.tasks.task(trial).sent,
            losses: &of.losses,
            standing: self.standing(trial),
        }
    }

    fn standing(&self, trial: TrialId) -> TrialState {
        let (of, task) = (&self.trials[trial.0], self.tasks.task(trial));
        let finished = of.losses.contains_key(&task.end());
        match task.phase {
            _ if task.failed.is_some() => TrialState::Failed,
            Phase::Training => TrialState::Training { until: task.sent },
            _ if finished => TrialState::Finished,
            Phase::Stopped => TrialState::Stopped,
            Phase::Unstarted | Phase::Needed if of.stopped => TrialState::Stopped,
            Phase::Unstarted | Phase::Needed => TrialState::Shared,
            Phase::Idle => TrialState::Waiting,
        }
    }

    /// Passes losses to the searcher and carries out its actions, until none follow.
    fn pass_losses(&mut self, known: Vec<Reported>) {
        let mut known = VecDeque::from(known);
        loop {
            let actions = self.searcher.next();
            if !actions.is_empty() {
                known.extend(self.apply_actions(actions));
            } else if let Some((trial, step, loss)) = known.pop_front() {
                let of = &mut self.trials[trial.0];
                of.losses.insert(step, loss);
                of.wanted = None;
                self.searcher.take_loss(trial, step, loss);
            } else {
                break;
            }
        }
        self.tasks.settle();
    }

    /// Records the searcher's actions; returns the losses that are known already. All trials are placed before any is
    /// trained, so that they can be forked where they diverge.
    fn apply_actions(&mut self, actions: Vec<Action>) -> Vec<Reported> {
        actions.iter().for_each(|action| self.place(action));
        let wants = |action: &Action| match *action {
            Action::Start { trial, until, .. }
            | Action::Continue { trial, until }
            | Action::Fork { trial, until, .. } => self.want(trial, until),
            Action::Stop { trial } => {
                self.trials[trial.0].stopped = true;
                self.tasks.release(trial);
                None
            }
        };
        actions.iter().filter_map(wants).collect()
    }

    fn want(&mut self, trial: TrialId, until: usize) -> Option<Reported> {
        let of = &mut self.trials[trial.0];
        of.wanted = Some(until);
        of.furthest = until;
        self.tasks.want(trial, until)
    }

    fn place(&mut self, action: &Action) {
        let milestones = self.searcher.milestones(action.trial());
        let (settings, from, placed) = match action {
            Action::Start { settings, .. } => {
                let schedule = self.schedules.schedule(settings);
                (settings, 0, self.tasks.add(settings.clone(), milestones, schedule))
            }
            Action::Fork { parent, at, settings, .. } => {
                let branch = Branch { parent: *parent, at: *at };
                (settings, *at, self.tasks.add_fork(settings.clone(), milestones, branch))
            }
            Action::Continue { .. } | Action::Stop { .. } => return,
        };
        assert_eq!(
            placed,
            action.trial(),
            "a searcher numbers its trials in the order in which it begins them"
        );
        let (losses, wanted, stopped) = Default::default();
        self.trials.push(Trial { settings: settings.clone(), from, losses, wanted, furthest: from, stopped });
    }
}
