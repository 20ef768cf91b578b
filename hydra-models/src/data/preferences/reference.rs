//! Pairs with the log-probabilities of a reference model.

use crate::data::Content;
use hydra_core::{Batch, Dataset, DatasetError, HostTensor};
use std::sync::{Arc, OnceLock};

/// Preference pairs with a reference model's log-probabilities of both answers: the last part of the targets, `F32`
/// `[pairs, 2]`. They are zero until they are known, so that a run can be planned before the reference is scored.
///
/// Its [content](Content::content) is that of the pairs, because the log-probabilities follow from it and the reference.
pub struct WithReference {
    pairs: Arc<dyn Content>,
    log_probs: OnceLock<Vec<f32>>,
}

impl WithReference {
    /// Pairs whose log-probabilities are not known yet.
    pub fn new(pairs: Arc<dyn Content>) -> Self {
        Self { pairs, log_probs: OnceLock::new() }
    }

    /// Sets the log-probabilities of the first pairs, two for each. Returns `false` if they are known already or there are
    /// more of them than pairs.
    pub fn set(&self, log_probs: Vec<f32>) -> bool {
        log_probs.len() <= 2 * self.pairs.len() && self.log_probs.set(log_probs).is_ok()
    }

    fn with(&self, batch: Batch, items: &[usize]) -> Batch {
        let known = self.log_probs.get().map_or(&[][..], Vec::as_slice);
        let of_item = |item: &usize| [2 * item, 2 * item + 1].map(|at| known.get(at).copied().unwrap_or(0.0));
        let mut targets = batch.targets;
        targets.parts.push(HostTensor::float(items.iter().flat_map(of_item).collect(), [items.len(), 2]));
        Batch { targets, ..batch }
    }
}

impl Dataset for WithReference {
    fn name(&self) -> &str {
        self.pairs.name()
    }

    fn len(&self) -> usize {
        self.pairs.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        Ok(self.with(self.pairs.batch(items)?, items))
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        let largest = self.pairs.largest(items)?;
        let first: Vec<usize> = (0..largest.items).collect();
        Ok(self.with(largest, &first))
    }

    fn mean_part(&self) -> f64 {
        self.pairs.mean_part()
    }

    fn unit(&self) -> &'static str {
        self.pairs.unit()
    }
}

impl Content for WithReference {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        self.pairs.content(to)
    }

    fn units(&self) -> usize {
        self.pairs.units()
    }

    fn cut_by(&self, context: usize) -> crate::data::Cut {
        self.pairs.cut_by(context)
    }
}
