//! The first evaluation of tasks that are equal until they train: distributes its batches and collects its sums.
//!
//! A batch has the same result bit for bit in each of these tasks, so each batch is computed once. At most as many
//! tasks as there are devices take batches; the others wait. The batches of a task that leaves are open again, and a
//! task that joins later starts with the known sums. Sums are added in the order of the batches, as one task alone
//! adds them. This module knows neither threads nor clocks nor the type of tasks.

use crate::protocol::Sums;
use hydra_core::TaskId;
use std::collections::{BTreeMap, BTreeSet};

/// An evaluation shared by several tasks.
#[derive(Debug)]
pub(super) struct SharedEvaluation {
    batches: usize,
    /// The number of leading batches whose sums are added up, and the sums.
    known: (usize, Sums),
    /// Sums of later batches, after one that is not known yet.
    ahead: BTreeMap<usize, Sums>,
    /// Batches that tasks have taken and not computed yet.
    taken: BTreeMap<usize, TaskId>,
    /// The tasks that wait for the result, in the order in which they joined.
    members: Vec<TaskId>,
    /// The tasks that computed batches.
    by: BTreeSet<TaskId>,
}

impl SharedEvaluation {
    /// An evaluation of `batches` batches without results.
    pub(super) fn new(batches: usize) -> Self {
        Self {
            batches,
            known: Default::default(),
            ahead: BTreeMap::new(),
            taken: BTreeMap::new(),
            members: Vec::new(),
            by: BTreeSet::new(),
        }
    }

    /// Adds a task, with the sums of the leading batches that its checkpoint has.
    pub(super) fn join(&mut self, task: TaskId, known: (usize, Sums)) {
        // A checkpoint with all batches would be after the evaluation.
        if known.0 > self.known.0 && known.0 < self.batches {
            self.known = known;
            self.ahead = self.ahead.split_off(&self.known.0);
            self.add_up();
        }
        self.members.push(task);
    }

    /// Removes a task and reopens its batches.
    pub(super) fn leave(&mut self, task: TaskId) {
        self.members.retain(|member| *member != task);
        self.taken.retain(|_, by| *by != task);
    }

    /// The tasks that wait for the result; those that have taken batches come first.
    pub(super) fn members(&self) -> Vec<TaskId> {
        let taking = |task: &&TaskId| self.is_taking(**task);
        let (first, then): (Vec<_>, Vec<_>) = self.members.iter().partition(taking);
        first.into_iter().chain(then).copied().collect()
    }

    fn is_taking(&self, task: TaskId) -> bool {
        self.taken.values().any(|by| *by == task)
    }

    /// Gives `task` the next open batch, if at most `most` tasks have batches.
    pub(super) fn take(&mut self, task: TaskId, most: usize) -> Option<usize> {
        let taking: BTreeSet<TaskId> = self.taken.values().copied().collect();
        if !taking.contains(&task) && taking.len() >= most {
            return None;
        }
        let is_open = |batch: &usize| !self.ahead.contains_key(batch) && !self.taken.contains_key(batch);
        let open = (self.known.0..self.batches).find(is_open)?;
        self.taken.insert(open, task);
        Some(open)
    }

    /// Records the sums of a batch, also from a task that has left since.
    pub(super) fn computed(&mut self, task: TaskId, batch: usize, sums: Sums) {
        if self.taken.get(&batch) == Some(&task) {
            self.taken.remove(&batch);
        }
        if batch >= self.known.0 && !self.ahead.contains_key(&batch) {
            self.ahead.insert(batch, sums);
            self.by.insert(task);
            self.add_up();
        }
    }

    fn add_up(&mut self) {
        let (batches, sums) = &mut self.known;
        while let Some(next) = self.ahead.remove(batches) {
            sums.append(&next);
            *batches += 1;
        }
    }

    /// The number of leading batches whose sums are known, and the sums.
    pub(super) fn known(&self) -> &(usize, Sums) {
        &self.known
    }

    /// The number of computed batches.
    pub(super) fn computed_batches(&self) -> usize {
        self.known.0 + self.ahead.len()
    }

    /// The tasks that computed batches in this run.
    pub(super) fn by(&self) -> &BTreeSet<TaskId> {
        &self.by
    }

    /// Returns whether every batch is known.
    pub(super) fn is_known(&self) -> bool {
        self.known.0 >= self.batches
    }

    /// Returns whether every batch is known and none is being computed again.
    pub(super) fn is_over(&self) -> bool {
        self.is_known() && self.taken.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::Measured;
    use proptest::prelude::*;

    fn batch(index: usize) -> (Measured, usize) {
        (
            Measured {
                loss: (index as f32 * 0.7).cos(),
                sums: vec![index as f32 / 3.0],
                rows: vec![index as f32],
            },
            1 + index % 4,
        )
    }

    fn sums_of(index: usize) -> Sums {
        sums(index..index + 1)
    }

    fn sums(batches: impl Iterator<Item = usize>) -> Sums {
        batches.fold(Sums::default(), |mut sums, index| {
            let (measured, loss_targets) = batch(index);
            sums.add(&measured, loss_targets).unwrap();
            sums
        })
    }

    #[test]
    fn one_device_has_one_task_evaluate_and_another_takes_over_what_it_leaves() {
        let [a, b] = [TaskId(0), TaskId(1)];
        let mut shared = SharedEvaluation::new(3);
        shared.join(a, Default::default());
        shared.join(b, Default::default());
        assert_eq!((shared.take(a, 1), shared.take(b, 1)), (Some(0), None));
        // The next batch is taken while the one before it computes.
        assert_eq!((shared.take(a, 1), shared.take(b, 1)), (Some(1), None));
        shared.computed(a, 0, sums_of(0));
        shared.leave(a);
        assert_eq!((shared.members(), shared.take(b, 1)), (vec![b], Some(1)));
        assert_eq!(shared.take(b, 1), Some(2));
        shared.computed(b, 2, sums_of(2));
        assert_eq!((shared.known().0, shared.computed_batches(), shared.is_over()), (1, 2, false));
        shared.computed(b, 1, sums_of(1));
        assert_eq!((shared.is_over(), shared.known()), (true, &(3, sums(0..3))));
        assert_eq!(shared.by().iter().copied().collect::<Vec<_>>(), [a, b]);
    }

    #[test]
    fn what_two_compute_counts_once_and_is_waited_for() {
        let [a, b] = [TaskId(0), TaskId(1)];
        let mut shared = SharedEvaluation::new(1);
        shared.join(a, Default::default());
        shared.join(b, Default::default());
        shared.take(a, 1);
        shared.leave(a);
        shared.take(b, 1);
        // It was computing when its task left.
        shared.computed(a, 0, sums_of(0));
        assert!(!shared.is_over(), "the other one computes yet");
        shared.computed(b, 0, sums_of(0));
        assert_eq!((shared.is_over(), shared.known()), (true, &(1, sums(0..1))));
    }

    #[test]
    fn the_checkpoint_that_knows_the_most_counts() {
        let mut shared = SharedEvaluation::new(5);
        shared.join(TaskId(0), (1, sums(0..1)));
        shared.take(TaskId(0), 2);
        shared.take(TaskId(0), 2);
        shared.computed(TaskId(0), 2, sums_of(2));
        shared.join(TaskId(1), (2, sums(0..2)));
        assert_eq!(shared.known(), &(3, sums(0..3)));
        shared.join(TaskId(2), (1, sums(0..1)));
        shared.join(TaskId(3), (9, Sums::default()));
        assert_eq!(shared.known(), &(3, sums(0..3)));
        assert_eq!(shared.take(TaskId(2), 2), Some(3));
    }

    proptest! {
        /// For any order of joins, claims, results and leaves: every remaining task ends with the sums of a task
        /// alone, each batch is computed once if no task leaves, and some task can always go on.
        #[test]
        fn every_task_that_stays_ends_with_the_sums(
            batches in 1..9_usize,
            devices in 1..4_usize,
            resumed in prop::collection::vec(0..9_usize, 1..6),
            events in prop::collection::vec((0..4_u8, 0..6_usize), 0..60),
        ) {
            let mut shared = SharedEvaluation::new(batches);
            // The batches that each task has taken and not computed: at most one computes and one is next.
            let mut queues: BTreeMap<TaskId, Vec<usize>> = BTreeMap::new();
            let (mut computed, mut left) = (0, 0);
            let is_new = resumed.iter().all(|known| known % batches == 0);
            let mut coming = resumed.into_iter().enumerate().map(|(task, known)| (TaskId(task), known % batches));
            let fair = (0..).map(|i| (if i % 2 == 0 { 1 } else { 2 }, i / 2 % 6));
            for (count, (kind, task)) in events.into_iter().chain(fair).enumerate() {
                let id = TaskId(task);
                match kind {
                    0 => if let Some((id, known)) = coming.next() {
                        shared.join(id, (known, sums(0..known)));
                        queues.insert(id, Vec::new());
                    },
                    1 => if let Some(queue) = queues.get_mut(&id).filter(|queue| queue.len() < 2)
                        && let Some(batch) = shared.take(id, devices)
                    {
                        queue.push(batch);
                    },
                    2 => if let Some(queue) = queues.get_mut(&id).filter(|queue| !queue.is_empty()) {
                        let batch = queue.remove(0);
                        shared.computed(id, batch, sums_of(batch));
                        computed += 1;
                    },
                    _ => if queues.len() > 1 && let Some(queue) = queues.remove(&id) {
                        left += queue.len();
                        shared.leave(id);
                    },
                }
                let taking: BTreeSet<TaskId> = shared.taken.values().copied().collect();
                prop_assert!(taking.len() <= devices);
                let (known, so_far) = shared.known();
                prop_assert_eq!(so_far, &sums(0..*known));
                if queues.is_empty() && coming.len() == 0 || shared.is_over() {
                    break;
                }
                prop_assert!(count < 400 || queues.is_empty(), "somebody goes on: {:?}", shared);
                if count >= 400 { break }
            }
            if shared.is_over() {
                prop_assert_eq!(shared.known(), &(batches, sums(0..batches)));
                if left == 0 {
                    prop_assert!(computed <= batches && (computed == batches || !is_new));
                }
            }
        }
    }
}
