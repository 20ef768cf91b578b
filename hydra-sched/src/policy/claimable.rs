//! The models that can be claimed, in a policy's order.

use super::{ModelIndex, ModelView};

/// A model's place in a policy's order; the least comes first.
///
/// Equal times go to the model submitted first, and the index decides between equal counts, so that the order is
/// total and no choice depends on where a model stands in a view. Times are ordered as by [`f64::total_cmp`], so that
/// a time that is not a number has its place too (a positive one after every number). What holds of times holds of
/// the keys of [`Priority::least_first`] and [`Priority::greatest_first`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority {
    key: u64,
    submitted: u64,
    pub(crate) model: ModelIndex,
}

impl Priority {
    /// Longer remaining time first.
    pub fn longest(model: &ModelView) -> Self {
        Self::greatest_first(model.remaining_s, model)
    }

    /// Shorter remaining time first.
    pub fn shortest(model: &ModelView) -> Self {
        Self::least_first(model.remaining_s, model)
    }

    /// Earlier submission first.
    pub fn first_submitted(model: &ModelView) -> Self {
        Self::of(0, model)
    }

    /// The model with the smaller key first, in an order of one's own; equal keys go to the model submitted
    /// first. Keys may be in any unit, and are ordered as times are: as by [`f64::total_cmp`].
    pub fn least_first(key: f64, model: &ModelView) -> Self {
        Self::of(ordered(key), model)
    }

    /// The model with the larger key first, otherwise as [`Priority::least_first`].
    pub fn greatest_first(key: f64, model: &ModelView) -> Self {
        Self::of(!ordered(key), model)
    }

    fn of(key: u64, model: &ModelView) -> Self {
        Self { key, submitted: model.submitted, model: model.model }
    }
}

/// Bits that are ordered as [`f64::total_cmp`] orders the numbers.
pub(crate) fn ordered(x: f64) -> u64 {
    let bits = x.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}

/// The models that a device can claim, in a policy's order.
pub trait Claimable {
    /// The number of models.
    fn count(&self) -> usize;

    /// The first in the policy's order.
    fn first(&self) -> Option<ModelView>;

    /// The first in the policy's order among those whose next shard is on the asking device.
    fn first_cached(&self) -> Option<ModelView>;

    /// The first in the policy's order among those that the asking device committed to last, or none that keeps copies did; see
    /// [`ModelView::ran_on`].
    fn first_here(&self) -> Option<ModelView>;

    /// The model with `rank` others submitted before it.
    fn nth_submitted(&self, rank: usize) -> Option<ModelView>;

    /// The first model after this one in submission order.
    fn submitted_after(&self, after: (u64, ModelIndex)) -> Option<ModelView>;

    /// All of them in submission order. This takes a time linear in their number, where the questions above take a
    /// logarithm from a [`Queue`](crate::Queue).
    fn iter(&self) -> Box<dyn Iterator<Item = ModelView> + '_> {
        Box::new((0..self.count()).filter_map(|rank| self.nth_submitted(rank)))
    }

    /// This model, if the device can claim it.
    fn get(&self, model: ModelIndex) -> Option<ModelView> {
        self.iter().find(|other| other.model == model)
    }
}

/// The models of one view: each question is one pass over them.
pub(crate) struct Listed<'a> {
    models: &'a [ModelView],
    first: Option<ModelView>,
    first_cached: Option<ModelView>,
    first_here: Option<ModelView>,
}

impl<'a> Listed<'a> {
    /// The models as this device is shown them.
    pub(crate) fn new(
        models: &'a [ModelView],
        device: usize,
        priority: impl Fn(&ModelView) -> Priority,
    ) -> Self {
        let first_of = |is_one: &dyn Fn(&ModelView) -> bool| {
            models.iter().filter(|model| is_one(model)).min_by_key(|model| priority(model)).copied()
        };
        let (first, first_cached) = (first_of(&|_| true), first_of(&|model| model.cached));
        let first_here = first_of(&|model| model.ran_on.is_none_or(|on| on == device));
        Self { models, first, first_cached, first_here }
    }
}

impl Listed<'_> {
    fn submitted(&self) -> Vec<ModelView> {
        let mut models = self.models.to_vec();
        models.sort_unstable_by_key(|model| (model.submitted, model.model));
        models
    }
}

impl Claimable for Listed<'_> {
    fn count(&self) -> usize {
        self.models.len()
    }

    fn first(&self) -> Option<ModelView> {
        self.first
    }

    fn first_cached(&self) -> Option<ModelView> {
        self.first_cached
    }

    fn first_here(&self) -> Option<ModelView> {
        self.first_here
    }

    fn nth_submitted(&self, rank: usize) -> Option<ModelView> {
        self.submitted().get(rank).copied()
    }

    fn submitted_after(&self, after: (u64, ModelIndex)) -> Option<ModelView> {
        let later = self.models.iter().filter(|model| (model.submitted, model.model) > after);
        later.min_by_key(|model| (model.submitted, model.model)).copied()
    }

    fn iter(&self) -> Box<dyn Iterator<Item = ModelView> + '_> {
        Box::new(self.submitted().into_iter())
    }

    fn get(&self, model: ModelIndex) -> Option<ModelView> {
        self.models.iter().find(|other| other.model == model).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::cases::models;

    #[test]
    fn bits_are_ordered_as_the_numbers_are() {
        let numbers = [-f64::NAN, f64::NEG_INFINITY, -2.0, -0.0, 0.0, 1e-300, 1.0, f64::INFINITY, f64::NAN];
        assert!(numbers.windows(2).all(|pair| ordered(pair[0]) < ordered(pair[1])));
    }

    #[test]
    fn a_key_of_ones_own_orders_and_ties_go_by_submission() {
        let models = models(&[(9.0, 2), (1.0, 1), (1.0, 0), (5.0, 3)]);
        let keys = [0.5, -2.0, -2.0, f64::NAN];
        let order = |priority: fn(f64, &ModelView) -> Priority| {
            let mut order: Vec<usize> = (0..4).collect();
            order.sort_by_key(|&index| priority(keys[index], &models[index]));
            order
        };
        assert_eq!(order(Priority::least_first), [2, 1, 0, 3]);
        assert_eq!(order(Priority::greatest_first), [3, 0, 2, 1]);
        let longest = Priority::greatest_first(models[0].remaining_s, &models[0]);
        assert_eq!(longest, Priority::longest(&models[0]));
    }
}
