//! Asynchronous successive halving in virtual time.

use super::bracket::halvings;
use super::draws::{Distinct, Draws};
use super::{Action, Repeat, RungPlan, Searcher, rungs};
use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use std::collections::{BTreeMap, BTreeSet};

/// Asynchronous successive halving: a free worker advances a trial that is among the best `1/eta` of its rung so far,
/// or starts a new one, without waiting (Li et al., "A system for massively parallel hyperparameter tuning", MLSys
/// 2020, algorithm 2).
///
/// As published, the decisions depend on timing. Here the workers are virtual: the spec sets their number, each
/// minibatch takes one unit of virtual time, and the next jobs are decided at a virtual time: first all losses of
/// that time, then the workers in order. Losses that arrive earlier are held back. So the number and the speed of
/// devices change nothing; more virtual workers keep more devices busy.
#[derive(Clone, Debug)]
pub(super) struct Asha {
    settings: Vec<Configuration>,
    distinct: Distinct,
    /// The number of trials that have started.
    begun: usize,
    eta: usize,
    rungs: Vec<AsyncRung>,
    workers: Vec<Option<Job>>,
    clock: u64,
    arrived: BTreeMap<(TrialId, usize), Loss>,
    stopped: BTreeSet<TrialId>,
}

#[derive(Clone, Debug)]
struct AsyncRung {
    step: usize,
    ranked: BTreeSet<(Loss, TrialId)>,
    advanced: BTreeSet<TrialId>,
}

/// The job of a virtual worker.
#[derive(Clone, Copy, Debug)]
struct Job {
    trial: TrialId,
    rung: usize,
    ends: u64,
}

impl Asha {
    /// `trials` draws for `workers` virtual workers, on the rungs of [`Halving`](super::halving::Halving).
    pub(super) fn new(
        draws: &Draws,
        trials: usize,
        steps: usize,
        eta: usize,
        first_rung: usize,
        workers: usize,
    ) -> Self {
        let mut distinct = Distinct::default();
        let settings = distinct.take_all((0..trials).map(|number| (number, draws.draw(number))), 0);
        let rung = |plan: RungPlan| {
            let (ranked, advanced) = Default::default();
            AsyncRung { step: plan.step, ranked, advanced }
        };
        let halvings = halvings(settings.len(), steps, eta, first_rung);
        Self {
            rungs: rungs(settings.len(), steps, eta, halvings).into_iter().map(rung).collect(),
            settings,
            distinct,
            begun: 0,
            eta,
            workers: vec![None; workers],
            clock: 0,
            arrived: BTreeMap::new(),
            stopped: BTreeSet::new(),
        }
    }

    /// Assigns jobs to all idle workers, in order.
    fn assign(&mut self, actions: &mut Vec<Action>) {
        for worker in 0..self.workers.len() {
            if self.workers[worker].is_none() {
                let job = self.advance(actions).or_else(|| self.start(actions));
                self.workers[worker] = job;
            }
        }
    }

    /// Advances the best ready trial of the highest rung that has one.
    fn advance(&mut self, actions: &mut Vec<Action>) -> Option<Job> {
        let (index, trial) = (0..self.rungs.len().saturating_sub(1))
            .rev()
            .find_map(|index| Some((index, self.rungs[index].ready(self.eta)?)))?;
        let rung = &mut self.rungs[index];
        rung.advanced.insert(trial);
        let (from, until) = (rung.step, self.rungs[index + 1].step);
        actions.push(Action::Continue { trial, until });
        Some(Job { trial, rung: index + 1, ends: self.clock + (until - from) as u64 })
    }

    /// Starts the next trial.
    fn start(&mut self, actions: &mut Vec<Action>) -> Option<Job> {
        let (trial, until) = (TrialId(self.begun), self.rungs[0].step);
        let settings = self.settings.get(self.begun)?.clone();
        self.begun += 1;
        actions.push(Action::Start { trial, settings, until });
        Some(Job { trial, rung: 0, ends: self.clock + until as u64 })
    }

    /// The workers whose jobs end next, at one virtual time, if the losses of all these jobs have arrived.
    fn next_to_end(&self) -> Option<Vec<(usize, Job, Loss)>> {
        let busy = || self.workers.iter().enumerate().filter_map(|(worker, job)| Some((worker, (*job)?)));
        let ends = busy().map(|(_, job)| job.ends).min()?;
        let loss = |(worker, job): (usize, Job)| {
            Some((worker, job, *self.arrived.get(&(job.trial, self.rungs[job.rung].step))?))
        };
        busy().filter(|(_, job)| job.ends == ends).map(loss).collect()
    }

    /// Stops the trials at a rung that can no longer advance; a rung has at most as many trials as are drawn.
    fn stop_hopeless(&mut self, index: usize, actions: &mut Vec<Action>) {
        let most = self.settings.len() / self.eta;
        if index + 1 == self.rungs.len() {
            return;
        }
        let hopeless: Vec<TrialId> = {
            let rung = &self.rungs[index];
            let ranked = rung.ranked.iter().enumerate();
            let hopeless = ranked.filter(|(better, (loss, _))| *better >= most || loss.is_lost());
            hopeless.map(|(_, (_, trial))| *trial).filter(|trial| !rung.advanced.contains(trial)).collect()
        };
        self.stop(hopeless, actions);
    }

    /// Stops all waiting trials when no worker has a job left.
    fn stop_rest(&mut self, actions: &mut Vec<Action>) {
        let waiting = self.rungs.split_last().map_or(&[][..], |(_, rungs)| rungs).iter();
        let waiting = waiting.flat_map(|rung| {
            rung.ranked.iter().map(|(_, trial)| *trial).filter(|trial| !rung.advanced.contains(trial))
        });
        let waiting = waiting.collect();
        self.stop(waiting, actions);
    }

    fn stop(&mut self, trials: Vec<TrialId>, actions: &mut Vec<Action>) {
        let new = trials.into_iter().filter(|trial| self.stopped.insert(*trial));
        actions.extend(new.map(|trial| Action::Stop { trial }));
    }
}

impl AsyncRung {
    /// The best trial of the top `1/eta` that has not advanced yet.
    fn ready(&self, eta: usize) -> Option<TrialId> {
        let top = self.ranked.iter().take(self.ranked.len() / eta);
        let mut top = top.filter(|(loss, trial)| !loss.is_lost() && !self.advanced.contains(trial));
        top.next().map(|(_, trial)| *trial)
    }
}

impl Searcher for Asha {
    fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) {
        self.arrived.insert((trial, step), loss);
    }

    /// The actions of the next virtual time.
    fn next(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.begun == 0 {
            self.assign(&mut actions);
        }
        while actions.is_empty() {
            let Some(ended) = self.next_to_end() else { break };
            for (worker, job, loss) in ended {
                self.clock = job.ends;
                self.workers[worker] = None;
                self.arrived.remove(&(job.trial, self.rungs[job.rung].step));
                self.rungs[job.rung].ranked.insert((loss, job.trial));
            }
            (0..self.rungs.len()).for_each(|rung| self.stop_hopeless(rung, &mut actions));
            self.assign(&mut actions);
            if self.workers.iter().all(Option::is_none) {
                self.stop_rest(&mut actions);
            }
        }
        actions
    }

    fn milestones(&self, _: TrialId) -> Vec<usize> {
        self.rungs.iter().map(|rung| rung.step).collect()
    }

    fn repeats(&self) -> &[Repeat] {
        self.distinct.repeats()
    }
}
