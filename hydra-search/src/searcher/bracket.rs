//! A bracket: trials on synchronous rungs.

use super::Action;
use crate::rank::{Decisions, Loss, Rung, TrialId};
use crate::space::Configuration;
use std::collections::VecDeque;

/// A planned rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RungPlan {
    /// Minibatches after which the losses are compared.
    pub step: usize,
    /// Trials that reach it, if none fails.
    pub trials: usize,
}

/// The rungs of successive halving: `trials` start, a share of `1/eta` advances at each rung, up to `steps`
/// minibatches at the last one; each rung has `eta` times the minibatches of the previous one.
///
/// The rule is that of Hyperband's inner loop (Li et al., "Hyperband", JMLR 18(185), 2018, algorithm 1):
/// `floor(trials / eta^i)` trials at rung `i` of `0..=halvings`. Steps are rounded down.
///
/// ```
/// let rungs = hydra_search::rungs(27, 2_700, 3, 3);
/// let rungs: Vec<_> = rungs.iter().map(|rung| (rung.trials, rung.step)).collect();
/// assert_eq!(rungs, [(27, 100), (9, 300), (3, 900), (1, 2_700)]);
/// ```
///
/// # Panics
/// If `eta` is zero.
pub fn rungs(trials: usize, steps: usize, eta: usize, halvings: u32) -> Vec<RungPlan> {
    let power = |exponent| eta.saturating_pow(exponent);
    let rung = |i| RungPlan { step: steps / power(halvings - i), trials: trials / power(i) };
    (0..=halvings).map(rung).collect()
}

/// The largest `s` with `eta^s <= of`.
pub(super) fn whole_log(of: usize, eta: usize) -> u32 {
    let fits = |exponent: &u32| eta.checked_pow(*exponent).is_some_and(|power| power <= of);
    (0..usize::BITS).take_while(fits).last().unwrap_or(0)
}

/// The largest number of halvings that leaves at least one trial for the last rung and `first_rung` minibatches for
/// the first.
pub(super) fn halvings(trials: usize, steps: usize, eta: usize, first_rung: usize) -> u32 {
    whole_log(trials, eta).min(whole_log(steps / first_rung, eta))
}

/// Trials on the rungs of one plan.
#[derive(Clone, Debug)]
pub(super) struct Bracket {
    first: usize,
    trials: usize,
    plan: Vec<RungPlan>,
    /// All rungs but the last, where no trial advances.
    rungs: Vec<Rung>,
    /// For each of those, the largest number of trials that its successor still expects from it.
    expected: Vec<usize>,
    actions: Vec<Action>,
}

impl Bracket {
    /// The trials from number `first` on, on these rungs.
    pub(super) fn new(first: usize, settings: Vec<Configuration>, plan: Vec<RungPlan>) -> Self {
        let pairs = plan.windows(2).map(|pair| Rung::new(pair[0].trials, pair[1].trials));
        let rungs: Vec<Rung> = pairs.collect();
        let (trials, until) = (settings.len(), plan.first().map_or(0, |rung| rung.step));
        let start = |(trial, settings)| Action::Start { trial, settings, until };
        let actions = (first..).map(TrialId).zip(settings).map(start).collect();
        Self { first, trials, expected: rungs.iter().map(Rung::most).collect(), plan, rungs, actions }
    }

    pub(super) fn has(&self, trial: TrialId) -> bool {
        (self.first..self.first + self.trials).contains(&trial.0)
    }

    pub(super) fn milestones(&self) -> Vec<usize> {
        self.plan.iter().map(|rung| rung.step).collect()
    }

    pub(super) fn next(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub(super) fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) {
        let Some(index) = self.plan.iter().position(|rung| rung.step == step) else { return };
        let Some(rung) = self.rungs.get_mut(index) else { return };
        let mut decided = VecDeque::from([(index, rung.take_loss(trial, loss))]);
        while let Some((index, decisions)) = decided.pop_front() {
            self.carry_out(index, decisions);
            // If fewer trials can advance than the next rung expects, it stops waiting for the others; they could not
            // be better there.
            let most = self.rungs[index].most();
            while self.expected[index] > most {
                self.expected[index] -= 1;
                if let Some(next) = self.rungs.get_mut(index + 1) {
                    decided.push_back((index + 1, next.one_fewer()));
                }
            }
        }
    }

    fn carry_out(&mut self, index: usize, decisions: Decisions) {
        let until = self.plan[index + 1].step;
        self.actions.extend(decisions.advanced.into_iter().map(|trial| Action::Continue { trial, until }));
        self.actions.extend(decisions.dropped.into_iter().map(|trial| Action::Stop { trial }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_logarithms_are_exact() {
        assert_eq!([1, 2, 3, 26, 27, 28, 81].map(|n| whole_log(n, 3)), [0, 0, 1, 2, 3, 3, 4]);
        assert_eq!((whole_log(0, 3), whole_log(usize::MAX, 2)), (0, 63));
    }

    #[test]
    fn trials_that_fail_leave_the_next_rung_smaller() {
        let settings = (0..4).map(|trial| Configuration::new().with("x", trial)).collect();
        let mut bracket = Bracket::new(0, settings, rungs(4, 4, 2, 2));
        let go = |trial, until| Action::Continue { trial: TrialId(trial), until };
        let stop = |trial| Action::Stop { trial: TrialId(trial) };
        let mut told = |trial, step, loss| {
            bracket.take_loss(TrialId(trial), step, loss);
            bracket.next()
        };
        assert_eq!(told(3, 1, Loss::of(1.0)).len(), 4, "only the start");
        assert_eq!(told(0, 1, Loss::Lost), [stop(0)]);
        assert_eq!(told(1, 1, Loss::Lost), [go(3, 2), stop(1)]);
        assert_eq!(told(3, 2, Loss::of(5.0)), [], "trial 2 may still come and be better");
        assert_eq!(told(2, 1, Loss::Lost), [stop(2), go(3, 4)], "no other trial comes");
    }
}
