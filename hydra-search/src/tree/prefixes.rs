//! The tree of the trials of a search: the trial that is trained for each step, and the forks.

use super::HyperparamSchedule;
use crate::rank::TrialId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The point at which a trial diverges from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Branch {
    /// The trial that it diverges from, whose own task is trained there.
    pub parent: TrialId,
    /// The number of minibatches that both share.
    pub at: usize,
}

/// An edge of the tree: minibatches that are trained once for all trials that share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The trial that is trained.
    pub trial: TrialId,
    /// The first minibatch.
    pub from: usize,
    /// One past the last minibatch.
    pub to: usize,
    /// The trials that share it, including that one.
    pub shared_by: Vec<TrialId>,
}

/// The trials of a search as a tree in which equal prefixes are merged (Shin et al., "Hippo: Taming hyper-parameter
/// optimization of deep learning with stage trees", arXiv 2006.11972).
///
/// ```
/// use hydra_search::{HyperparamSchedule, StageTree, TrialId};
///
/// // Constant rates that decay at the end: warmup-stable-decay shares the constant part for every length of the
/// // decay.
/// let schedule = |decay: usize| HyperparamSchedule::new().then(1_000 - decay, "0.1").then(1_000, format!("over {decay}"));
/// let tree = StageTree::of([schedule(100), schedule(200), schedule(400)]);
/// assert_eq!(tree.branch(TrialId(1)).unwrap().at, 800);
/// assert_eq!(tree.branch(TrialId(2)).unwrap().at, 600);
/// let goals = [1_000; 3];
/// assert_eq!(tree.work(&goals), 1_000 + 200 + 400);
/// ```
#[derive(Clone, Debug, Default)]
pub struct StageTree {
    schedules: Vec<HyperparamSchedule>,
    branches: Vec<Option<Branch>>,
    /// The trials by the text of their first step: only those with the same text can share training.
    beginning: BTreeMap<String, Vec<TrialId>>,
}

impl StageTree {
    /// The tree of these trials, numbered from zero.
    pub fn of(schedules: impl IntoIterator<Item = HyperparamSchedule>) -> Self {
        let mut tree = Self::default();
        for schedule in schedules {
            let branch = tree.place(&schedule, |_, at| Some(at));
            tree.add(schedule, branch);
        }
        tree
    }

    /// Finds the earlier trial that shares the most steps with the next one, and the step at which they diverge; of
    /// several, the one with the lowest number.
    ///
    /// `state` returns the latest available state of an earlier trial with at most a given number of minibatches.
    pub(crate) fn place(
        &self,
        schedule: &HyperparamSchedule,
        state: impl Fn(TrialId, usize) -> Option<usize>,
    ) -> Option<Branch> {
        let mut most: Option<Branch> = None;
        for &other in schedule.first().and_then(|first| self.beginning.get(first)).into_iter().flatten() {
            let shared = schedule.shared(&self.schedules[other.0]);
            if most.is_none_or(|most| most.at < shared) {
                let at = state(other, shared).filter(|at| most.is_none_or(|most| most.at < *at));
                most = at.map(|at| Branch { parent: other, at }).or(most);
            }
        }
        most.filter(|branch| branch.at > 0)
    }

    /// Adds the next trial, which diverges from an earlier one at `branch`. One with its own schedule can be shared.
    pub(crate) fn add(&mut self, schedule: HyperparamSchedule, branch: Option<Branch>) -> TrialId {
        let trial = TrialId(self.branches.len());
        if let Some(first) = schedule.first() {
            self.beginning.entry(first.to_owned()).or_default().push(trial);
        }
        self.schedules.push(schedule);
        self.branches
            .push(branch.map(|Branch { parent, at }| Branch { parent: self.holder(parent, at), at }));
        trial
    }

    /// The point at which a trial diverges from another one; `None` for one that is trained from the start.
    pub fn branch(&self, trial: TrialId) -> Option<Branch> {
        self.branches[trial.0]
    }

    /// True if a trial equals another one from start to end.
    pub fn is_repeat(&self, trial: TrialId) -> bool {
        let length = self.schedules[trial.0].len();
        length > 0 && self.branch(trial).is_some_and(|branch| branch.at == length)
    }

    /// The trial whose task is trained when `trial` has trained `step` minibatches: itself, or one that it has not
    /// diverged from yet.
    pub fn holder(&self, trial: TrialId, step: usize) -> TrialId {
        match self.branch(trial) {
            Some(branch) if step <= branch.at => self.holder(branch.parent, step),
            _ => trial,
        }
    }

    /// The edges of the tree when each trial has trained the minibatches in `goals`, ordered by trained trial and
    /// first minibatch.
    pub fn edges(&self, goals: &[usize]) -> Vec<Edge> {
        let mut passed: BTreeMap<TrialId, Vec<(usize, usize, TrialId)>> = BTreeMap::new();
        for (trial, goal) in (0..).map(TrialId).zip(goals) {
            for (holder, from, to) in self.path(trial, *goal) {
                passed.entry(holder).or_default().push((from, to, trial));
            }
        }
        passed.into_iter().flat_map(|(holder, passages)| edges_along(holder, &passages)).collect()
    }

    /// Minibatches to train when each trial has trained those in `goals`.
    pub fn work(&self, goals: &[usize]) -> usize {
        self.edges(goals).iter().map(|edge| edge.to - edge.from).sum()
    }

    /// The trained trials and their ranges of minibatches, up to minibatch `goal` of `trial`.
    fn path(&self, trial: TrialId, goal: usize) -> Vec<(TrialId, usize, usize)> {
        let (mut path, mut of, mut to) = (Vec::new(), self.holder(trial, goal), goal);
        while to > 0 {
            let from = self.branch(of).map_or(0, |branch| branch.at);
            path.push((of, from, to));
            (of, to) = self.branch(of).map_or((of, 0), |branch| (branch.parent, branch.at));
        }
        path
    }
}

/// The edges along one trial, cut where another one diverges or ends.
fn edges_along(trial: TrialId, passages: &[(usize, usize, TrialId)]) -> Vec<Edge> {
    let mut cuts: Vec<usize> = passages.iter().flat_map(|(from, to, _)| [*from, *to]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let edge = |ends: &[usize]| {
        let (from, to) = (ends[0], ends[1]);
        let passes = |(_, end, other): &(usize, usize, TrialId)| (*end >= to).then_some(*other);
        Edge { trial, from, to, shared_by: passages.iter().filter_map(passes).collect() }
    };
    cuts.windows(2).map(edge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn steps(pieces: &[(usize, &str)]) -> HyperparamSchedule {
        pieces.iter().fold(HyperparamSchedule::new(), |schedule, (end, what)| schedule.then(*end, *what))
    }

    /// Learning rates with step decay.
    fn falling() -> StageTree {
        StageTree::of([
            steps(&[(100, "0.1"), (200, "0.01"), (300, "0.001")]),
            steps(&[(100, "0.1"), (200, "0.01"), (300, "0.002")]),
            steps(&[(100, "0.1"), (300, "0.02")]),
            steps(&[(300, "0.05")]),
            steps(&[(100, "0.1"), (200, "0.01"), (300, "0.001")]),
        ])
    }

    #[test]
    fn equal_prefixes_are_trained_once() {
        let tree = falling();
        let branch = |parent, at| Some(Branch { parent: TrialId(parent), at });
        let branches: Vec<_> = (0..5).map(|trial| tree.branch(TrialId(trial))).collect();
        assert_eq!(branches, [None, branch(0, 200), branch(0, 100), None, branch(0, 300)]);
        assert!(tree.is_repeat(TrialId(4)) && !tree.is_repeat(TrialId(1)));
        let all: Vec<_> =
            tree.edges(&[300; 5]).into_iter().map(|s| (s.trial.0, s.from, s.to, s.shared_by.len())).collect();
        assert_eq!(
            all,
            [
                (0, 0, 100, 4),
                (0, 100, 200, 3),
                (0, 200, 300, 2),
                (1, 200, 300, 1),
                (2, 100, 300, 1),
                (3, 0, 300, 1)
            ]
        );
        assert_eq!((tree.work(&[300; 5]), 5 * 300), (900, 1_500));
    }

    #[test]
    fn work_follows_how_far_each_goes() {
        let tree = falling();
        assert_eq!(tree.work(&[50, 0, 0, 0, 0]), 50);
        assert_eq!(tree.work(&[50, 80, 90, 0, 10]), 90, "all are the first one there");
        assert_eq!(
            tree.work(&[0, 250, 0, 0, 0]),
            250,
            "the first one is trained to where the second leaves it"
        );
        assert_eq!(tree.holder(TrialId(1), 200), TrialId(0));
        assert_eq!(tree.holder(TrialId(1), 201), TrialId(1));
    }

    #[test]
    fn a_branch_of_a_branch_hangs_on_who_is_trained_there() {
        let tree = StageTree::of([
            steps(&[(300, "a")]),
            steps(&[(200, "a"), (300, "b")]),
            steps(&[(200, "a"), (250, "b"), (300, "c")]),
            steps(&[(150, "a"), (300, "d")]),
        ]);
        assert_eq!(tree.branch(TrialId(2)), Some(Branch { parent: TrialId(1), at: 250 }));
        assert_eq!(tree.branch(TrialId(3)), Some(Branch { parent: TrialId(0), at: 150 }));
        assert_eq!(tree.work(&[0, 0, 300, 0]), 300);
    }

    #[test]
    fn what_cannot_be_had_is_not_shared() {
        let schedule = steps(&[(100, "a")]);
        let tree = StageTree::of([schedule.clone()]);
        assert_eq!(tree.place(&schedule, |_, _| None), None);
        let partly = tree.place(&schedule, |_, at| Some(at.min(40)));
        assert_eq!(partly, Some(Branch { parent: TrialId(0), at: 40 }));
    }

    proptest! {
        /// The work is the number of distinct prefixes, counted one by one.
        #[test]
        fn work_is_the_number_of_distinct_prefixes(
            trials in proptest::collection::vec(proptest::collection::vec(0u8..2, 6), 1..12),
            goals in proptest::collection::vec(0usize..=6, 12),
        ) {
            let schedule = |trial: &Vec<u8>| {
                trial.iter().zip(1..).fold(HyperparamSchedule::new(), |schedule, (what, end)| schedule.then(end, what.to_string()))
            };
            let tree = StageTree::of(trials.iter().map(schedule));
            let mut prefixes = std::collections::BTreeSet::new();
            for (trial, goal) in trials.iter().zip(&goals) {
                prefixes.extend((1..=*goal).map(|end| &trial[..end]));
            }
            prop_assert_eq!(tree.work(&goals[..trials.len()]), prefixes.len());
        }
    }
}
