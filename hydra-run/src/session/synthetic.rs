//! Random tokens for measurements.

use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor, Key};

/// Tokens generated from a key. Every block differs, and none is stored.
pub struct Synthetic {
    /// The key of the draws.
    pub key: Key,
    /// The tokens of a sequence.
    pub context: usize,
    /// The number of different tokens.
    pub vocabulary: u64,
    /// The number of sequences.
    pub len: usize,
}

impl Dataset for Synthetic {
    fn name(&self) -> &str {
        "synthetic tokens"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        if let Some(&index) = items.iter().find(|item| **item >= self.len) {
            return Err(DatasetError::OutOfRange { dataset: self.name().to_owned(), index, len: self.len });
        }
        let context = self.context as u64;
        let block = |item: &usize| (*item as u64 * context)..(*item as u64 + 1) * context;
        // A vocabulary that exceeds the type is refused with the model.
        let draw = |at: u64| (self.key.bits(at) % self.vocabulary) as i32;
        let ids: Vec<i32> = items.iter().flat_map(block).map(draw).collect();
        let ids = HostActivation::of(HostTensor::int(ids, [items.len(), self.context]));
        let (items, units) = (items.len(), items.len() * self.context);
        Ok(Batch { inputs: ids.clone(), targets: ids, items, loss_targets: units - items, units })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_a_function_of_the_key() {
        let data = |seed| Synthetic { key: Key::new(seed), context: 5, vocabulary: 7, len: 4 };
        let ids = |seed, items: &[usize]| data(seed).batch(items).unwrap().inputs.parts[0].as_i32().to_vec();
        assert_eq!(ids(1, &[2, 3]), [ids(1, &[2]), ids(1, &[3])].concat());
        assert!(ids(1, &[0, 1, 2, 3]).iter().all(|id| (0..7).contains(id)));
        assert_ne!(ids(1, &[0, 1]), ids(2, &[0, 1]));
        assert!(data(1).batch(&[4]).unwrap_err().to_string().contains("item 4"));
    }
}
