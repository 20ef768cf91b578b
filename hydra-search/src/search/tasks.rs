//! The tasks of a search: the training for its trials, shared while they are equal.

use super::task::{Phase, Task};
use super::{Report, ReportError};
use crate::rank::{Loss, TrialId};
use crate::searcher::Action;
use crate::space::Configuration;
use crate::tree::{Branch, HyperparamSchedule, StageTree};
use std::collections::BTreeMap;

/// A trial whose loss at a step became known.
pub(super) type Reported = (TrialId, usize, Loss);

/// One task for each trial, and the tree of their equal prefixes. The task of a trial that has not diverged from
/// another one is not started: the other one's task represents it.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    tree: StageTree,
    tasks: Vec<Task>,
    /// The trials that wait for a loss, by the task that provides it and the step.
    waiting: BTreeMap<(TrialId, usize), Vec<TrialId>>,
    /// Pending actions.
    actions: Vec<Action>,
}

impl Tasks {
    /// Adds a trial with its own schedule, which shares prefixes with earlier ones where possible.
    pub(super) fn add(
        &mut self,
        settings: Configuration,
        milestones: Vec<usize>,
        schedule: HyperparamSchedule,
    ) -> TrialId {
        let branch = self.tree.place(&schedule, |other, shared| self.can_share(other, shared, &milestones));
        self.push(settings, milestones, schedule, branch)
    }

    /// Adds a trial that is forked from another one.
    pub(super) fn add_fork(
        &mut self,
        settings: Configuration,
        milestones: Vec<usize>,
        branch: Branch,
    ) -> TrialId {
        // A fork has no schedule of its own, so later trials cannot share its training.
        self.push(settings, milestones, HyperparamSchedule::new(), Some(branch))
    }

    fn push(
        &mut self,
        settings: Configuration,
        milestones: Vec<usize>,
        schedule: HyperparamSchedule,
        branch: Option<Branch>,
    ) -> TrialId {
        let trial = self.tree.add(schedule, branch);
        let branch = self.tree.branch(trial);
        self.tasks.push(Task::new(settings, milestones.clone(), branch.map_or(0, |branch| branch.at)));
        if let Some(branch) = branch {
            let parent = &mut self.tasks[branch.parent.0];
            parent.children.push(trial);
            // Equal trials fail equally.
            let failed = parent.failed.filter(|failed| *failed < branch.at);
            self.tasks[trial.0].failed = failed;
        }
        for stop in milestones {
            let holder = self.tree.holder(trial, stop);
            self.tasks[holder.0].stops.insert(stop);
        }
        trial
    }

    /// Returns `shared` if the state of `other` at that step is available, and its losses up to there at these
    /// milestones.
    ///
    /// This depends on the requests so far, not on the training done: the tree must not depend on timing.
    fn can_share(&self, other: TrialId, shared: usize, milestones: &[usize]) -> Option<usize> {
        let holder = self.tree.holder(other, shared);
        let task = &self.tasks[holder.0];
        let gone = task.unwanted && !self.parts_later(holder);
        let ahead = task.goal <= shared && !gone && task.failed != Some(shared);
        let can_report = |step: &usize| self.tasks[self.tree.holder(other, *step).0].can_report(*step);
        let known = milestones.iter().take_while(|step| **step <= shared).all(can_report);
        ((ahead || self.keeps(holder, shared)) && known).then_some(shared)
    }

    /// True if a trial that has not diverged yet will be forked from this state, so that it is held.
    fn keeps(&self, holder: TrialId, at: usize) -> bool {
        let there = |child: &&TrialId| self.from(**child) == at;
        self.tasks[holder.0].children.iter().filter(there).any(|child| self.may_part(*child))
    }

    /// True if a trial may still diverge from this one.
    fn parts_later(&self, trial: TrialId) -> bool {
        self.tasks[trial.0].children.iter().any(|child| self.may_part(*child))
    }

    /// True if a trial is still equal to another one, and it or one of its children may diverge.
    fn may_part(&self, trial: TrialId) -> bool {
        let task = &self.tasks[trial.0];
        let may_go_on = !task.unwanted && task.asked < task.end();
        task.goal <= self.from(trial) && (may_go_on || self.parts_later(trial))
    }

    /// The step at which a trial diverges from another one; zero if it is trained from the start.
    fn from(&self, trial: TrialId) -> usize {
        self.tree.branch(trial).map_or(0, |branch| branch.at)
    }

    /// The loss of a trial at a step, if known.
    fn loss(&self, trial: TrialId, step: usize) -> Option<Loss> {
        self.tasks[self.tree.holder(trial, step).0].loss(step)
    }

    /// Requests the loss of a trial at a step; returns it if it is known.
    pub(super) fn want(&mut self, trial: TrialId, step: usize) -> Option<Reported> {
        self.tasks[trial.0].asked = step;
        let holder = self.tree.holder(trial, step);
        self.need(holder, step);
        if let Some(loss) = self.loss(trial, step) {
            return Some((trial, step, loss));
        }
        self.waiting.entry((holder, step)).or_default().push(trial);
        self.reach(holder);
        None
    }

    /// Records that a task is needed up to a step, and its ancestors up to where it diverges from them.
    fn need(&mut self, trial: TrialId, step: usize) {
        let task = &mut self.tasks[trial.0];
        task.goal = task.goal.max(step);
        if let Some(branch) = self.tree.branch(trial) {
            self.need(branch.parent, branch.at);
        }
    }

    /// Sends a task as far as it is needed.
    fn reach(&mut self, trial: TrialId) {
        match (self.tasks[trial.0].phase, self.tree.branch(trial)) {
            (Phase::Unstarted, None) => self.begin(trial),
            (Phase::Unstarted, Some(branch)) => {
                self.tasks[trial.0].phase = Phase::Needed;
                self.reach(branch.parent);
                self.start_needed(branch.parent);
            }
            (Phase::Idle, _) => self.go_on(trial),
            _ => {}
        }
    }

    fn begin(&mut self, trial: TrialId) {
        let branch = self.tree.branch(trial);
        let task = &mut self.tasks[trial.0];
        let (settings, until) = (task.settings.clone(), task.next_stop());
        (task.phase, task.sent) = (Phase::Training, until);
        self.actions.push(match branch {
            None => Action::Start { trial, settings, until },
            Some(Branch { parent, at }) => Action::Fork { trial, parent, at, settings, until },
        });
        self.start_needed(trial);
    }

    fn go_on(&mut self, trial: TrialId) {
        let task = &mut self.tasks[trial.0];
        if task.phase == Phase::Idle && task.sent < task.goal && task.failed.is_none() {
            let until = task.next_stop();
            (task.phase, task.sent) = (Phase::Training, until);
            self.actions.push(Action::Continue { trial, until });
            self.start_needed(trial);
        }
    }

    /// Starts the forks of a task that has been sent to the step at which they diverge.
    fn start_needed(&mut self, parent: TrialId) {
        let task = &self.tasks[parent.0];
        if !task.is_begun() {
            return;
        }
        let ready =
            |child: &TrialId| self.tasks[child.0].phase == Phase::Needed && self.from(*child) <= task.sent;
        let ready: Vec<TrialId> = task.children.iter().copied().filter(ready).collect();
        ready.into_iter().for_each(|child| self.begin(child));
    }

    /// Applies a report; returns the trials whose losses became known.
    pub(super) fn report(&mut self, report: &Report) -> Result<Vec<Reported>, ReportError> {
        match *report {
            Report::Loss { trial, step, loss } => {
                let loss = loss.map_or(Loss::Lost, Loss::of);
                Ok(if self.accepts(trial, step, loss)? {
                    self.take_loss(trial, step, loss)
                } else {
                    Vec::new()
                })
            }
            Report::Reached { trial, step } => self.reached(trial, step).map(|()| Vec::new()),
            Report::Failed { trial, step } => self.failed(trial, step),
        }
    }

    /// Records that a task has reached its step; no loss is requested there.
    fn reached(&mut self, trial: TrialId, step: usize) -> Result<(), ReportError> {
        let task = self.begun(trial)?;
        if task.stops.contains(&step) {
            return Err(ReportError::Compared { trial, step });
        }
        match task.phase {
            Phase::Training if step == task.sent => self.tasks[trial.0].phase = Phase::Idle,
            // A repeated report.
            _ if step <= task.sent => {}
            Phase::Training => return Err(ReportError::Step { trial, step, wanted: task.sent }),
            _ => return Err(ReportError::NotTraining { trial, at: task.sent, step }),
        }
        Ok(())
    }

    /// True if the loss is requested, false if it is known already.
    fn accepts(&self, trial: TrialId, step: usize, loss: Loss) -> Result<bool, ReportError> {
        let task = self.begun(trial)?;
        if let Some(before) = task.results.get(&step) {
            let number = |loss: Loss| loss.number().unwrap_or(f64::NAN);
            let (same, before, loss) = (*before == loss, number(*before), number(loss));
            return if same {
                Ok(false)
            } else {
                Err(ReportError::Contradiction { trial, step, before, loss })
            };
        }
        match task.phase {
            Phase::Training if step == task.sent => Ok(true),
            Phase::Training => Err(ReportError::Step { trial, step, wanted: task.sent }),
            _ => Err(ReportError::NotTraining { trial, at: task.sent, step }),
        }
    }

    fn begun(&self, trial: TrialId) -> Result<&Task, ReportError> {
        let task = self.tasks.get(trial.0).filter(|task| task.is_begun());
        task.ok_or(ReportError::Unknown { trial })
    }

    fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) -> Vec<Reported> {
        let task = &mut self.tasks[trial.0];
        task.phase = Phase::Idle;
        task.results.insert(step, loss);
        let waiting = self.waiting.remove(&(trial, step)).unwrap_or_default();
        waiting.into_iter().map(|trial| (trial, step, loss)).collect()
    }

    fn failed(&mut self, trial: TrialId, step: usize) -> Result<Vec<Reported>, ReportError> {
        let task = self.begun(trial)?;
        if task.failed == Some(step) {
            return Ok(Vec::new());
        }
        if task.phase == Phase::Stopped || task.failed.is_some() {
            return Err(ReportError::NotTraining { trial, at: task.sent, step });
        }
        if step > task.sent {
            return Err(ReportError::Step { trial, step, wanted: task.sent });
        }
        self.tasks[trial.0].phase = Phase::Stopped;
        self.fail(trial, step);
        let lost =
            |(holder, at): &(TrialId, usize)| self.tasks[holder.0].failed.is_some_and(|failed| failed < *at);
        let lost: Vec<(TrialId, usize)> = self.waiting.keys().copied().filter(lost).collect();
        let report = |key: (TrialId, usize)| {
            let trials = self.waiting.remove(&key).unwrap_or_default();
            trials.into_iter().map(move |trial| (trial, key.1, Loss::Lost))
        };
        Ok(lost.into_iter().flat_map(report).collect())
    }

    /// Records that a task failed, and with it those that would be forked from a later step.
    fn fail(&mut self, trial: TrialId, step: usize) {
        let never = |child: &TrialId| step < self.from(*child);
        let never: Vec<TrialId> = self.tasks[trial.0].children.iter().copied().filter(never).collect();
        self.tasks[trial.0].failed = Some(step);
        for child in never {
            if self.tasks[child.0].is_begun() {
                self.tasks[child.0].phase = Phase::Stopped;
                self.actions.push(Action::Stop { trial: child });
            }
            self.fail(child, step);
        }
    }

    /// Records that the searcher has released a trial.
    pub(super) fn release(&mut self, trial: TrialId) {
        self.tasks[trial.0].unwanted = true;
    }

    /// Continues tasks that are needed further, and stops those that are not needed.
    pub(super) fn settle(&mut self) {
        for trial in (0..self.tasks.len()).map(TrialId) {
            self.go_on(trial);
            let task = &self.tasks[trial.0];
            let useless = task.unwanted && task.phase == Phase::Idle && task.sent < task.end();
            let called = |child: &TrialId| self.tasks[child.0].phase == Phase::Needed;
            if useless && !self.parts_later(trial) && !task.children.iter().any(called) {
                self.tasks[trial.0].phase = Phase::Stopped;
                self.actions.push(Action::Stop { trial });
            }
        }
    }

    pub(super) fn fetch_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// The states that trials may still be forked from: trial and number of minibatches.
    pub(super) fn held(&self, more: Vec<(TrialId, usize)>) -> Vec<(TrialId, usize)> {
        let parts = |trial: &TrialId| self.tasks[trial.0].phase == Phase::Needed || self.may_part(*trial);
        let parts = (0..self.tasks.len()).map(TrialId).filter(parts);
        let branches =
            parts.filter_map(|trial| self.tree.branch(trial)).map(|branch| (branch.parent, branch.at));
        let more = more.into_iter().map(|(trial, at)| (self.tree.holder(trial, at), at));
        let reached = |(trial, at): &(TrialId, usize)| {
            let task = &self.tasks[trial.0];
            task.is_begun() && task.failed.is_none_or(|failed| *at <= failed)
        };
        let mut held: Vec<(TrialId, usize)> = branches.chain(more).filter(reached).collect();
        held.sort_unstable();
        held.dedup();
        held
    }

    pub(super) fn tree(&self) -> &StageTree {
        &self.tree
    }

    pub(super) fn task(&self, trial: TrialId) -> &Task {
        &self.tasks[trial.0]
    }

    /// Minibatches requested by actions, up to where a task failed.
    pub(super) fn trained(&self) -> usize {
        let to = |task: &Task| task.failed.map_or(task.sent, |failed| failed.min(task.sent));
        self.tasks
            .iter()
            .enumerate()
            .map(|(trial, task)| to(task).saturating_sub(self.from(TrialId(trial))))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: usize = 100;

    /// A schedule that is `a` up to a step, and unique from there.
    fn parting(at: usize) -> HyperparamSchedule {
        HyperparamSchedule::new().then(at, "a").then(STEPS, format!("from {at}"))
    }

    fn add(tasks: &mut Tasks, schedule: HyperparamSchedule, milestones: &[usize]) -> TrialId {
        tasks.add(Configuration::new(), milestones.to_vec(), schedule)
    }

    fn branch(tasks: &Tasks, trial: TrialId) -> Option<(usize, usize)> {
        tasks.tree().branch(trial).map(|branch| (branch.parent.0, branch.at))
    }

    /// One that goes to 10, and one that diverges from it at 60 and needs its end.
    fn two() -> Tasks {
        let mut tasks = Tasks::default();
        let first = add(&mut tasks, parting(STEPS), &[10, STEPS]);
        let second = add(&mut tasks, parting(60), &[10, STEPS]);
        assert_eq!(branch(&tasks, second), Some((0, 60)));
        tasks.want(first, 10);
        tasks.want(second, STEPS);
        tasks
    }

    #[test]
    fn what_is_shared_does_not_depend_on_who_was_faster() {
        let (mut slow, mut fast) = (two(), two());
        fast.report(&Report::loss(TrialId(0), 10, 1.0)).unwrap();
        fast.settle();
        assert_eq!((slow.task(TrialId(0)).sent, fast.task(TrialId(0)).sent), (10, 60));
        for tasks in [&mut slow, &mut fast] {
            // The state at 30 will be passed without being kept, although the slow one has not reached it.
            let late = add(tasks, parting(30), &[10, STEPS]);
            assert_eq!(branch(tasks, late), None);
            // At 60 it is kept for the other one, and may be passed.
            let later = add(tasks, parting(80), &[10, STEPS]);
            assert_eq!(branch(tasks, later), Some((0, 80)));
        }
    }

    #[test]
    fn a_trial_shares_where_its_losses_are_known() {
        let shares = |milestones: &[usize]| {
            let mut tasks = Tasks::default();
            let first = add(&mut tasks, parting(STEPS), &[20]);
            tasks.want(first, 20);
            let second = add(&mut tasks, parting(STEPS), milestones);
            branch(&tasks, second)
        };
        assert_eq!(shares(&[20, STEPS]), Some((0, STEPS)));
        assert_eq!(shares(&[10, 20, STEPS]), None, "the loss at 10 is not requested on the way to 20");
        assert_eq!(shares(&[30, STEPS]), Some((0, STEPS)));
    }

    #[test]
    fn forks_are_handed_out_when_their_parent_has_been_sent_so_far() {
        let mut tasks = two();
        let trials = |tasks: &mut Tasks| tasks.fetch_actions().iter().map(Action::trial).collect::<Vec<_>>();
        assert_eq!(trials(&mut tasks), [TrialId(0)]);
        assert_eq!(tasks.held(Vec::new()), [(TrialId(0), 60)]);
        tasks.report(&Report::loss(TrialId(0), 10, 1.0)).unwrap();
        tasks.settle();
        assert_eq!(trials(&mut tasks), [TrialId(0), TrialId(1)]);
        assert!(tasks.held(Vec::new()).is_empty(), "the driver has the fork now");
    }

    #[test]
    fn a_task_that_waits_where_another_one_parts_has_no_loss_to_tell() {
        let mut tasks = two();
        let first = TrialId(0);
        tasks.report(&Report::loss(first, 10, 1.0)).unwrap();
        tasks.settle();
        let reached = |step| Report::Reached { trial: first, step };
        assert!(matches!(tasks.report(&reached(10)), Err(ReportError::Compared { .. })));
        assert!(matches!(tasks.report(&reached(70)), Err(ReportError::Step { wanted: 60, .. })));
        assert_eq!(tasks.report(&reached(60)), Ok(Vec::new()));
        assert_eq!(tasks.report(&reached(60)), Ok(Vec::new()), "the same report twice is one");
        assert!(tasks.want(first, STEPS).is_none());
        assert_eq!((tasks.task(first).phase, tasks.task(first).sent), (Phase::Training, STEPS));
    }

    #[test]
    fn who_fails_takes_those_along_who_are_still_the_same() {
        let mut tasks = two();
        tasks.report(&Report::loss(TrialId(0), 10, 1.0)).unwrap();
        tasks.settle();
        tasks.fetch_actions();
        let told = tasks.report(&Report::Failed { trial: TrialId(0), step: 40 }).unwrap();
        assert_eq!(told, [(TrialId(1), STEPS, Loss::Lost)]);
        assert_eq!(
            tasks.fetch_actions(),
            [Action::Stop { trial: TrialId(1) }],
            "it waits for no trial any more"
        );
        let late = add(&mut tasks, parting(80), &[10, STEPS]);
        assert_eq!(tasks.want(late, 10), Some((late, 10, Loss::of(1.0))));
        assert_eq!(tasks.want(late, STEPS), Some((late, STEPS, Loss::Lost)));
        assert_eq!(tasks.trained(), 40);
    }
}
