//! Hyperband.

use super::bracket::{Bracket, RungPlan, rungs};
use super::draws::{Distinct, Draws};
use super::{Action, Repeat, Searcher};
use crate::rank::{Loss, TrialId};

/// The brackets of Hyperband, from the one with most early stopping (`halvings` times) to the one with none; each
/// starts with `ceil((halvings + 1) * eta^s / (s + 1))` trials (Li et al., "Hyperband: A novel bandit-based approach
/// to hyperparameter optimization", JMLR 18(185), 2018, algorithm 1).
///
/// ```
/// let brackets = hydra_search::brackets(81, 3, 4);
/// let first: Vec<_> = brackets.iter().map(|rungs| (rungs[0].trials, rungs[0].step)).collect();
/// assert_eq!(first, [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]);
/// ```
///
/// # Panics
/// If `eta` is zero.
pub fn brackets(steps: usize, eta: usize, halvings: u32) -> Vec<Vec<RungPlan>> {
    let count = halvings as usize + 1;
    let trials = |s: u32| count.saturating_mul(eta.saturating_pow(s)).div_ceil(s as usize + 1);
    (0..=halvings).rev().map(|s| rungs(trials(s), steps, eta, s)).collect()
}

/// Brackets of successive halving that hedge against stopping too early, run concurrently. The brackets of a search
/// share only trials that they draw twice.
#[derive(Clone, Debug)]
pub(super) struct Hyperband {
    brackets: Vec<Bracket>,
    repeats: Vec<Repeat>,
}

impl Hyperband {
    /// The brackets of `halvings` and fewer.
    pub(super) fn new(draws: &Draws, steps: usize, eta: usize, halvings: u32) -> Self {
        let (mut first, mut number) = (0, 0);
        let mut made = Self { brackets: Vec::new(), repeats: Vec::new() };
        for plan in brackets(steps, eta, halvings) {
            let numbers = number..number + plan[0].trials;
            number = numbers.end;
            let mut distinct = Distinct::default();
            let settings = distinct.take_all(numbers.map(|number| (number, draws.draw(number))), first);
            // A bracket with fewer draws has smaller rungs, and no empty rung.
            let halvings = plan.len() as u32 - 1;
            let plan = rungs(settings.len(), steps, eta, halvings);
            let plan = plan.into_iter().map(|rung| RungPlan { trials: rung.trials.max(1), ..rung }).collect();
            made.repeats.extend_from_slice(distinct.repeats());
            let count = settings.len();
            made.brackets.push(Bracket::new(first, settings, plan));
            first += count;
        }
        made
    }
}

impl Searcher for Hyperband {
    fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) {
        if let Some(bracket) = self.brackets.iter_mut().find(|bracket| bracket.has(trial)) {
            bracket.take_loss(trial, step, loss);
        }
    }

    fn next(&mut self) -> Vec<Action> {
        self.brackets.iter_mut().flat_map(Bracket::next).collect()
    }

    fn milestones(&self, trial: TrialId) -> Vec<usize> {
        let bracket = self.brackets.iter().find(|bracket| bracket.has(trial));
        bracket.map_or_else(Vec::new, Bracket::milestones)
    }

    fn repeats(&self) -> &[Repeat] {
        &self.repeats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Li et al. 2018, algorithm 1 with R = 81 and eta = 3, the example of table 1.
    #[test]
    fn the_brackets_are_those_of_the_paper() {
        let brackets = brackets(81, 3, 4);
        let pairs =
            |rungs: &[RungPlan]| rungs.iter().map(|rung| (rung.trials, rung.step)).collect::<Vec<_>>();
        let expected: [&[(usize, usize)]; 5] = [
            &[(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
            &[(34, 3), (11, 9), (3, 27), (1, 81)],
            &[(15, 9), (5, 27), (1, 81)],
            &[(8, 27), (2, 81)],
            &[(5, 81)],
        ];
        assert_eq!(brackets.iter().map(|rungs| pairs(rungs)).collect::<Vec<_>>(), expected);
        // No bracket exceeds the budget of (s_max + 1) R, if every rung is trained from the start.
        let work = |rungs: &Vec<RungPlan>| rungs.iter().map(|rung| rung.trials * rung.step).sum::<usize>();
        assert!(brackets.iter().map(work).all(|work| (351..=405).contains(&work)));
    }
}
