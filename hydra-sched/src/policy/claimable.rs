//! The claimable models, in a policy's order.

use super::{ModelIndex, ModelView};

/// A model's position in a policy's order; the smallest comes first.
///
/// Equal times are ordered by submission, and equal submission counts by index, so the order is total and no
/// choice depends on a model's position in a view. Times are ordered by [`f64::total_cmp`], so not-a-number
/// is ordered too (a positive one after every number). The same holds for the keys of
/// [`Priority::least_first`] and [`Priority::greatest_first`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority {
    key: u64,
    submitted: u64,
    pub(crate) model: ModelIndex,
}

impl Priority {
    /// Orders by descending remaining time.
    pub fn longest(model: &ModelView) -> Self {
        Self::greatest_first(model.remaining_s, model)
    }

    /// Orders by ascending remaining time.
    pub fn shortest(model: &ModelView) -> Self {
        Self::least_first(model.remaining_s, model)
    }

    /// Orders by submission.
    pub fn first_submitted(model: &ModelView) -> Self {
        Self::from_key(0, model)
    }

    /// Orders by ascending custom key; equal keys are ordered by submission. Keys may have any unit, and are
    /// ordered by [`f64::total_cmp`].
    pub fn least_first(key: f64, model: &ModelView) -> Self {
        Self::from_key(ordered(key), model)
    }

    /// Orders by descending custom key, otherwise like [`Priority::least_first`].
    pub fn greatest_first(key: f64, model: &ModelView) -> Self {
        Self::from_key(!ordered(key), model)
    }

    fn from_key(key: u64, model: &ModelView) -> Self {
        Self { key, submitted: model.submitted, model: model.model }
    }
}

/// Returns bits that are ordered like the numbers under [`f64::total_cmp`].
pub(crate) fn ordered(x: f64) -> u64 {
    let bits = x.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}

/// The models that a device can claim, in a policy's order.
pub trait Claimable {
    /// The number of models.
    fn count(&self) -> usize;

    /// The first model in the policy's order.
    fn first(&self) -> Option<ModelView>;

    /// The first model in the policy's order whose next shard is cached on the device.
    fn first_cached(&self) -> Option<ModelView>;

    /// The first model in the policy's order that last committed to the device, or to no device with a cache;
    /// see [`ModelView::ran_on`].
    fn first_here(&self) -> Option<ModelView>;

    /// The model with `rank` earlier submitted ones.
    fn nth_submitted(&self, rank: usize) -> Option<ModelView>;

    /// The first model after this one in submission order.
    fn submitted_after(&self, after: (u64, ModelIndex)) -> Option<ModelView>;

    /// All models in submission order. Takes linear time, while the other methods take logarithmic time in a
    /// [`Queue`](crate::Queue).
    fn iter(&self) -> Box<dyn Iterator<Item = ModelView> + '_> {
        Box::new((0..self.count()).filter_map(|rank| self.nth_submitted(rank)))
    }

    /// Returns this model if the device can claim it.
    fn get(&self, model: ModelIndex) -> Option<ModelView> {
        self.iter().find(|other| other.model == model)
    }
}

/// The models of one view; each method is one pass over them.
pub(crate) struct Listed<'a> {
    models: &'a [ModelView],
    first: Option<ModelView>,
    first_cached: Option<ModelView>,
    first_here: Option<ModelView>,
}

impl<'a> Listed<'a> {
    /// Returns the models as this device sees them.
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
