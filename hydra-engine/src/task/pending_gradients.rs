//! The pending-gradient budget: the host memory of a task for gradients that wait for the optimizer.
//!
//! A backward pass produces gradients shard by shard, and the optimizer releases them buffer by buffer. If it may
//! step a buffer as soon as its gradient is complete, only a part of the gradients exists at a time. A shard task is
//! not claimed until its gradients fit in the budget. The wait always ends: a buffer is stepped when the first shard
//! of the chain that uses it has produced its gradient, and gradients that other shards produce of it, such as the
//! head of a tied embedding, have memory of their own.

use crate::admission::{GradientBytes, Window};

/// The pending-gradient budget of a task, and the bytes in use.
#[derive(Debug)]
pub(crate) struct PendingGradientBudget {
    bytes: GradientBytes,
    limit: u64,
    /// Bytes of each buffer's gradients that are claimed and not yet stepped.
    waiting: Vec<u64>,
    /// The sum of `waiting`.
    taken: u64,
    /// Microbatches of the minibatch that are in each buffer's accumulated gradient.
    added: Vec<usize>,
    window: Window,
}

impl PendingGradientBudget {
    pub(crate) fn new(bytes: GradientBytes, limit: u64, window: Window, buffers: usize) -> Self {
        Self { bytes, limit, waiting: vec![0; buffers], taken: 0, added: vec![0; buffers], window }
    }

    /// Returns whether the gradients of a shard's backward pass of this microbatch fit.
    pub(crate) fn has_space(&self, shard: usize, microbatch: usize) -> bool {
        let buffers = &self.bytes.shards[shard];
        let made: u64 = buffers.iter().map(|(_, bytes)| bytes).sum();
        let is_in_window = |(buffer, _): &(usize, u64)| {
            microbatch
                < self.added[*buffer].saturating_add(self.window.for_buffer(self.bytes.is_shared(*buffer)))
        };
        buffers.iter().all(is_in_window) && (self.bytes.together || self.taken + made <= self.limit)
    }

    /// Records that `microbatches` microbatches of a buffer's gradient are accumulated.
    pub(crate) fn added(&mut self, buffer: usize, microbatches: usize) {
        self.added[buffer] = microbatches;
    }

    /// Reserves the gradients of a claimed backward pass.
    pub(crate) fn claimed(&mut self, shard: usize) {
        if self.bytes.together {
            return;
        }
        for (buffer, bytes) in &self.bytes.shards[shard] {
            self.waiting[*buffer] += bytes;
            self.taken += bytes;
        }
    }

    /// Releases the gradient of a buffer that the optimizer has stepped.
    pub(crate) fn stepped(&mut self, buffer: usize) {
        self.taken -= std::mem::take(&mut self.waiting[buffer]);
        self.added[buffer] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_shard_waits_until_there_is_room() {
        let bytes = GradientBytes::from_shards((0..3).map(|buffer| vec![(buffer, 30)]).collect(), false);
        let mut budget = PendingGradientBudget::new(bytes, 60, Window::OPEN, 3);
        budget.claimed(2);
        assert!(budget.has_space(1, 0));
        budget.claimed(1);
        assert!(!budget.has_space(0, 0));
        budget.stepped(2);
        assert!(budget.has_space(0, 0));
    }

    #[test]
    fn a_microbatch_waits_for_the_sums_of_those_before_it() {
        // A tied embedding in the first and the last shard.
        let bytes = GradientBytes::from_shards(vec![vec![(0, 9), (1, 1)], vec![(2, 5), (0, 9)]], true);
        let mut budget = PendingGradientBudget::new(bytes, 0, Window { own: 2, shared: 3 }, 3);
        let claimable = |budget: &PendingGradientBudget, shard| {
            (0..5).take_while(|m| budget.has_space(shard, *m)).count()
        };
        assert_eq!([0, 1].map(|shard| claimable(&budget, shard)), [2, 2]);
        budget.added(2, 1);
        assert_eq!([0, 1].map(|shard| claimable(&budget, shard)), [2, 3]);
        budget.added(2, 2);
        assert_eq!(claimable(&budget, 1), 3, "the embedding's are not in the sum");
        budget.added(0, 1);
        assert_eq!(claimable(&budget, 1), 4);
        [0, 2].into_iter().for_each(|buffer| budget.stepped(buffer));
        assert_eq!(claimable(&budget, 1), 2, "in the next minibatch");
    }

    fn shards() -> impl Strategy<Value = Vec<Vec<(usize, u64)>>> {
        prop::collection::vec(prop::collection::btree_map(0..6_usize, 1..50_u64, 0..4), 1..6)
            .prop_map(|shards| shards.into_iter().map(|made| made.into_iter().collect()).collect())
    }

    proptest! {
        /// Backward passes from the last shard to the first, in the smallest budget: once the optimizer has stepped
        /// all complete buffers, the next pass always fits.
        #[test]
        fn the_least_room_is_enough(shards in shards(), flowing in 1..4_usize) {
            let bytes = GradientBytes::from_shards(shards.clone(), false);
            let limit = bytes.budget_bytes(flowing);
            let mut budget = PendingGradientBudget::new(bytes, limit, Window::OPEN, 6);
            let mut pending: BTreeSet<usize> = BTreeSet::new();
            for shard in (0..shards.len()).rev() {
                if !budget.has_space(shard, 0) {
                    let later = |buffer: usize| shards[..=shard].iter().flatten().any(|(other, _)| *other == buffer);
                    let complete: Vec<usize> = pending.iter().copied().filter(|buffer| !later(*buffer)).collect();
                    complete.into_iter().for_each(|buffer| budget.stepped(buffer));
                }
                prop_assert!(budget.has_space(shard, 0));
                budget.claimed(shard);
                pending.extend(shards[shard].iter().map(|(buffer, _)| *buffer));
                prop_assert!(budget.taken <= limit);
                prop_assert_eq!(budget.taken, budget.waiting.iter().sum::<u64>());
            }
        }
    }
}
