//! The tree-structured Parzen estimator, in batches.

mod density;

use super::draws::{Distinct, Draws};
use super::{Action, Repeat, Searcher};
use crate::key::Key;
use crate::rank::{Loss, TrialId};
use crate::space::{Configuration, Range, Value};
use density::Density;
use std::collections::{BTreeMap, BTreeSet};

/// The share of the trials that count as good.
const GOOD: f64 = 0.15;
/// Candidates drawn from the density of the good values; the best is tried.
const CANDIDATES: u64 = 24;

/// The tree-structured Parzen estimator (Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS
/// 2011, section 4): trials are split into good and bad ones, each parameter has a density `l` of its good and `g` of
/// its bad values, and the next trial is the candidate, drawn from `l`, with the largest `l / g`.
///
/// Trials come in batches. A batch is a function of the seed and of all earlier losses, so it starts when the
/// previous one has ended. Each trial of a batch draws its own candidates, so that they differ. Parameters are
/// treated independently; one with conditions uses the values of the trials that had it.
#[derive(Clone, Debug)]
pub(super) struct Tpe {
    draws: Draws,
    key: Key,
    trials: usize,
    steps: usize,
    startup: usize,
    at_once: usize,
    drawn: usize,
    distinct: Distinct,
    begun: Vec<Configuration>,
    losses: BTreeMap<TrialId, Loss>,
    open: BTreeSet<TrialId>,
}

/// The settings of the estimator in a spec.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batches {
    /// Trials before the estimator is used, including given ones.
    pub(super) startup: usize,
    /// Trials of each batch after that.
    pub(super) at_once: usize,
}

impl Tpe {
    /// `trials` draws, the first `startup` of them at random.
    pub(super) fn new(draws: Draws, trials: usize, steps: usize, seed: u64, batches: Batches) -> Self {
        Self {
            startup: batches.startup.max(draws.given()).min(trials),
            at_once: batches.at_once,
            key: Key::new(seed).fold_name("tpe"),
            draws,
            trials,
            steps,
            drawn: 0,
            distinct: Distinct::default(),
            begun: Vec::new(),
            losses: BTreeMap::new(),
            open: BTreeSet::new(),
        }
    }

    /// The next batch that has a trial in it.
    fn next_batch(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        while actions.is_empty() && self.drawn < self.trials {
            let end = match self.drawn < self.startup {
                true => self.startup,
                false => self.trials.min(self.drawn + self.at_once),
            };
            let ranked = self.ranked();
            while self.drawn < end {
                let settings = match self.drawn < self.startup {
                    true => self.draws.draw(self.drawn),
                    false => self.propose(&ranked),
                };
                actions.extend(self.start(settings));
                self.drawn += 1;
            }
        }
        actions
    }

    fn start(&mut self, settings: Configuration) -> Option<Action> {
        let trial = TrialId(self.begun.len());
        self.distinct.take(self.drawn, &settings, trial).then(|| {
            self.begun.push(settings.clone());
            self.open.insert(trial);
            Action::Start { trial, settings, until: self.steps }
        })
    }

    /// The trials with known losses, best first.
    fn ranked(&self) -> Vec<TrialId> {
        let mut ranked: Vec<(Loss, TrialId)> =
            self.losses.iter().map(|(trial, loss)| (*loss, *trial)).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, trial)| trial).collect()
    }

    /// The configuration of the next draw.
    fn propose(&self, ranked: &[TrialId]) -> Configuration {
        let key = self.key.fold(self.drawn as u64);
        let (good, bad) = ranked.split_at((GOOD * ranked.len() as f64).ceil() as usize);
        self.draws.space().build(|name, range| self.choose(name, range, good, bad, key.fold_name(name)))
    }

    fn choose(&self, name: &str, range: &Range, good: &[TrialId], bad: &[TrialId], key: Key) -> Value {
        let values = |of: &[TrialId]| -> Vec<&Value> {
            of.iter().filter_map(|trial| self.begun[trial.0].get(name)).collect()
        };
        let (good, bad) = (Density::of(range, &values(good)), Density::of(range, &values(bad)));
        let candidates = (0..CANDIDATES).map(|candidate| good.draw(key.fold(candidate)));
        let scored = candidates.map(|point| (good.log(point) - bad.log(point), point));
        let best = scored.reduce(|best, other| if other.0 > best.0 { other } else { best });
        Density::value(range, best.map_or(0.5, |(_, point)| point))
    }
}

impl Searcher for Tpe {
    fn take_loss(&mut self, trial: TrialId, _: usize, loss: Loss) {
        self.losses.insert(trial, loss);
        self.open.remove(&trial);
    }

    fn next(&mut self) -> Vec<Action> {
        if self.open.is_empty() { self.next_batch() } else { Vec::new() }
    }

    fn milestones(&self, _: TrialId) -> Vec<usize> {
        vec![self.steps]
    }

    fn repeats(&self) -> &[Repeat] {
        self.distinct.repeats()
    }
}
