//! Population-based training.

use super::draws::{Distinct, Draws};
use super::{Action, Repeat, Searcher};
use crate::key::Key;
use crate::rank::{Loss, Rung, TrialId};
use crate::space::{Configuration, Space};
use std::collections::BTreeMap;

/// The factors by which a number is perturbed.
const FACTORS: [f64; 2] = [0.8, 1.2];

/// Population-based training with truncation selection: after every interval, each member of the worst share of the
/// population is replaced by a fork of one of the best share, whose searched settings are perturbed or drawn anew
/// (Jaderberg et al., "Population based training of neural networks", arXiv 1711.09846, sections 3 and 4.1.1).
///
/// The population is compared at equal steps, and the replacement is a function of the seed, the member, the interval
/// and the ranking. A member continues as soon as it is certain that it is not among the worst.
#[derive(Clone, Debug)]
pub(super) struct Pbt {
    space: Space,
    explored: Vec<String>,
    resample: f64,
    key: Key,
    steps: usize,
    interval: usize,
    distinct: Distinct,
    /// The current trial of each member, and its settings.
    members: Vec<(TrialId, Configuration)>,
    /// The number of members in the worst share, and in the best.
    share: usize,
    /// The comparisons by interval. Members that pass one with certainty continue to the next.
    rungs: BTreeMap<usize, Rung>,
    /// The first comparison that is not complete.
    at: usize,
    begun: usize,
    /// Trials that wait for a comparison to complete, by interval.
    behind: BTreeMap<usize, Vec<TrialId>>,
    actions: Vec<Action>,
}

/// The settings of population-based training in a spec.
#[derive(Clone, Debug)]
pub(super) struct Evolution {
    pub(super) steps: usize,
    pub(super) interval: usize,
    pub(super) share: f64,
    pub(super) resample: f64,
    pub(super) explored: Vec<String>,
}

impl Pbt {
    /// A population of `members` draws.
    pub(super) fn new(draws: &Draws, members: usize, seed: u64, how: Evolution) -> Self {
        let mut distinct = Distinct::default();
        let settings = distinct.take_all((0..members).map(|number| (number, draws.draw(number))), 0);
        let members: Vec<_> = (0..).map(TrialId).zip(settings).collect();
        let until = how.interval.min(how.steps);
        let start = |(trial, settings): &(TrialId, Configuration)| Action::Start {
            trial: *trial,
            settings: settings.clone(),
            until,
        };
        let actions = members.iter().map(start).collect();
        let count = members.len();
        // At least one is replaced, and never one that is also among the best.
        let share = ((count as f64 * how.share) as usize).max(1).min(count / 2);
        Self {
            space: draws.space().clone(),
            explored: how.explored,
            resample: how.resample,
            key: Key::new(seed).fold_name("pbt"),
            steps: how.steps,
            interval: how.interval,
            distinct,
            begun: count,
            members,
            share,
            rungs: BTreeMap::new(),
            at: 1,
            behind: BTreeMap::new(),
            actions,
        }
    }

    /// The step of the comparison after this many intervals; the last one is the end, where no member is replaced.
    fn step(&self, intervals: usize) -> usize {
        self.interval.saturating_mul(intervals).min(self.steps)
    }

    /// The settings of the fork that replaces a member.
    fn explore(&self, parent: &Configuration, key: Key) -> Configuration {
        let mut settings = parent.clone();
        for (name, range) in self.space.in_order() {
            let key = key.fold_name(name);
            match (self.space.applies(name, &settings), settings.get(name)) {
                (false, _) => settings.remove(name),
                (true, None) => settings.set(name, range.draw(key)),
                (true, Some(_)) if !self.explored.iter().any(|explored| explored == name) => {}
                (true, Some(_)) if key.unit(1) < self.resample => settings.set(name, range.draw(key)),
                (true, Some(value)) => {
                    let value = range.neighbour(value, FACTORS[key.below(2, 2) as usize]);
                    settings.set(name, value);
                }
            }
        }
        settings
    }

    /// Completes the comparisons whose losses are all known: forks of the best replace the waiting members.
    fn replace(&mut self) {
        while self.rungs.get(&self.at).is_some_and(Rung::is_complete) {
            let best: Vec<TrialId> = self.rungs[&self.at].ranking().take(self.share).collect();
            let worst = self.behind.remove(&self.at).unwrap_or_default();
            for member in 0..self.members.len() {
                let old = self.members[member].0;
                if worst.contains(&old) {
                    self.actions.push(Action::Stop { trial: old });
                    self.replace_member(member, &best);
                }
            }
            self.rungs.remove(&self.at);
            self.at += 1;
        }
    }

    fn replace_member(&mut self, member: usize, best: &[TrialId]) {
        let key = self.key.fold(member as u64).fold(self.at as u64);
        // If no member has a finite loss, none can be copied.
        let Some(&parent) = best.get(key.below(0, best.len() as u64) as usize) else { return };
        let Some((_, settings)) = self.members.iter().find(|(trial, _)| *trial == parent) else { return };
        let settings = self.explore(settings, key);
        let trial = TrialId(self.begun);
        self.begun += 1;
        self.members[member] = (trial, settings.clone());
        let (at, until) = (self.step(self.at), self.step(self.at + 1));
        self.actions.push(Action::Fork { trial, parent, at, settings, until });
    }
}

impl Searcher for Pbt {
    fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) {
        if step >= self.steps {
            return;
        }
        let (at, count) = (step / self.interval, self.members.len());
        let rung = self.rungs.entry(at).or_insert_with(|| Rung::new(count, count - self.share));
        let decisions = rung.take_loss(trial, loss);
        self.behind.entry(at).or_default().extend(decisions.dropped);
        let until = self.step(at + 1);
        let goes_on = |trial| Action::Continue { trial, until };
        self.actions.extend(decisions.advanced.into_iter().map(goes_on));
        self.replace();
    }

    fn next(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    fn milestones(&self, _: TrialId) -> Vec<usize> {
        let steps = (1..).map(|intervals| self.step(intervals));
        steps.take_while(|step| *step < self.steps).chain([self.steps]).collect()
    }

    fn states(&self) -> Vec<(TrialId, usize)> {
        let steps: Vec<usize> = self.rungs.keys().map(|at| self.step(*at)).collect();
        let of = |(trial, _): &(TrialId, Configuration)| {
            steps.iter().map(|step| (*trial, *step)).collect::<Vec<_>>()
        };
        self.members.iter().flat_map(of).collect()
    }

    fn repeats(&self) -> &[Repeat] {
        self.distinct.repeats()
    }
}
