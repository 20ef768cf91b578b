//! Models for tests of policies.

use std::ops::Range;

use proptest::prelude::*;

use super::{ModelIndex, ModelView};
#[cfg(test)]
use super::{Request, View};

/// Models with the given remaining seconds and submission counts, in this order.
pub(crate) fn models(of: &[(f64, u64)]) -> Vec<ModelView> {
    let model = |(index, &(remaining_s, submitted))| ModelView {
        model: ModelIndex(index),
        remaining_s,
        submitted,
        next_shard: 0,
        cached: false,
        continues: false,
        ran_on: None,
    };
    of.iter().enumerate().map(model).collect()
}

/// The view of a single device at its first decision.
#[cfg(test)]
pub(crate) fn view_of(claimable: &[ModelView]) -> View<'_> {
    View { request: Request::new(0, 1, 0), claimable }
}

/// Models with arbitrary remaining times, including not-a-number and many equal ones.
pub(crate) fn any_models(count: Range<usize>) -> impl Strategy<Value = Vec<ModelView>> {
    let seconds = prop_oneof![4 => (0..5u8).prop_map(f64::from), 1 => any::<f64>()];
    let devices = prop::option::of(0..3usize);
    prop::collection::vec((seconds, 0..6u64, any::<bool>(), any::<bool>(), devices), count).prop_map(|of| {
        let times: Vec<_> = of.iter().map(|&(seconds, submitted, ..)| (seconds, submitted)).collect();
        let mut models = models(&times);
        for (model, (.., cached, continues, ran_on)) in models.iter_mut().zip(of) {
            (model.cached, model.continues, model.ran_on) = (cached, continues, ran_on);
        }
        models
    })
}
