//! Cuts the tokens of a text into blocks of the context length.

use std::fmt;
use std::sync::Arc;

use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};

use super::source::numbers;
use super::{Content, DataError, ragged};

/// Token ids cut into blocks of `context` tokens; a shorter remainder at the end is dropped. Cloning is cheap.
///
/// As a [`Dataset`] its items are the blocks. A batch's inputs and targets are the same `[items, context]` ids; the
/// loss shifts them by one, so a block has `context - 1` loss targets.
#[derive(Clone)]
pub struct TokenBlocks {
    name: Arc<str>,
    tokens: Arc<[u32]>,
    context: usize,
}

/// Block length, and vocabulary of the model that the blocks are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSpec {
    /// The length of a block in tokens, at least 2.
    pub context: usize,
    /// The number of ids in the model's vocabulary; every token is below it.
    pub vocab_size: usize,
}

impl TokenBlocks {
    /// Cuts these tokens into blocks.
    ///
    /// # Errors
    /// A context below 2 or longer than the text, or an id at or above `vocab_size`.
    pub fn new(tokens: impl Into<Arc<[u32]>>, spec: BlockSpec) -> Result<Self, DataError> {
        Self::named("the text", tokens, spec)
    }

    /// Like [`new`](Self::new), with a name for error messages.
    pub fn named(
        name: impl Into<Arc<str>>,
        tokens: impl Into<Arc<[u32]>>,
        spec: BlockSpec,
    ) -> Result<Self, DataError> {
        let blocks = Self { name: name.into(), tokens: tokens.into(), context: spec.context };
        blocks.check(spec.vocab_size)?;
        Ok(blocks)
    }

    fn check(&self, vocab_size: usize) -> Result<(), DataError> {
        let (context, tokens, name) = (self.context, self.tokens.len(), || self.name.to_string());
        if context < 2 {
            return Err(DataError::ContextTooShort { context });
        }
        if tokens < context {
            return Err(DataError::TooFewTokens { name: name(), tokens, context });
        }
        ragged::check(&self.name, &self.tokens, vocab_size)
    }

    /// The number of whole blocks, at least one.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.tokens.len() / self.context
    }

    /// The ids of a block.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn block(&self, index: usize) -> &[u32] {
        &self.tokens[index * self.context..(index + 1) * self.context]
    }

    /// All ids of the text, including the dropped remainder.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The length of a block in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The number of loss targets in a pass over all blocks: `context - 1` per block.
    pub fn predicted_tokens(&self) -> usize {
        self.len() * (self.context - 1)
    }

    fn gather(&self, items: &[usize]) -> Result<Vec<i32>, DatasetError> {
        let mut ids = Vec::with_capacity(items.len() * self.context);
        for &index in items {
            if index >= self.len() {
                return Err(DatasetError::OutOfRange {
                    dataset: self.name.to_string(),
                    index,
                    len: self.len(),
                });
            }
            // The constructor checked that ids fit.
            ids.extend(self.block(index).iter().map(|&id| id as i32));
        }
        Ok(ids)
    }
}

impl Dataset for TokenBlocks {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        TokenBlocks::len(self)
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let ids = HostTensor::int(self.gather(items)?, [items.len(), self.context]);
        Ok(Batch {
            inputs: HostActivation::of(ids.clone()),
            targets: HostActivation::of(ids),
            items: items.len(),
            loss_targets: items.len() * (self.context - 1),
            units: items.len() * self.context,
        })
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

impl Content for TokenBlocks {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        numbers(&[&self.tokens], to);
        Ok(())
    }

    fn units(&self) -> usize {
        self.tokens.len()
    }
}

impl fmt::Debug for TokenBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, context) = (self.tokens.len(), self.context);
        f.debug_struct("TokenBlocks")
            .field("name", &self.name)
            .field("tokens", &tokens)
            .field("context", &context)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks(tokens: usize, context: usize) -> Result<TokenBlocks, DataError> {
        TokenBlocks::new((0..tokens as u32).collect::<Vec<_>>(), BlockSpec { context, vocab_size: tokens })
    }

    #[test]
    fn the_remainder_is_dropped() {
        let blocks = blocks(11, 4).unwrap();
        assert_eq!(blocks.len(), 2);
        assert_eq!(blocks.block(1), [4, 5, 6, 7]);
        assert_eq!(blocks.tokens().len(), 11);
        assert_eq!(blocks.predicted_tokens(), 6);
    }

    #[test]
    fn a_context_without_a_target_is_an_error() {
        for context in [0, 1] {
            let error = blocks(11, context).unwrap_err();
            assert!(matches!(error, DataError::ContextTooShort { context: c } if c == context), "{error}");
        }
    }

    #[test]
    fn a_text_shorter_than_a_block_names_the_largest_context() {
        let error = blocks(37, 38).unwrap_err().to_string();
        assert!(error.contains("37 tokens") && error.contains("largest usable context is 37"), "{error}");
        assert_eq!(blocks(37, 37).unwrap().len(), 1);
        let error = TokenBlocks::new([3], BlockSpec { context: 2, vocab_size: 5 }).unwrap_err().to_string();
        assert!(error.contains("add text"), "{error}");
    }

    #[test]
    fn an_id_outside_of_the_vocabulary_is_named() {
        let error =
            TokenBlocks::new([1, 2, 300, 400], BlockSpec { context: 2, vocab_size: 256 }).unwrap_err();
        assert!(
            matches!(error, DataError::TokenOutOfRange { position: 2, id: 300, vocab_size: 256, .. }),
            "{error}"
        );
        let error =
            TokenBlocks::new([1, u32::MAX], BlockSpec { context: 2, vocab_size: usize::MAX }).unwrap_err();
        assert!(matches!(error, DataError::TokenOutOfRange { position: 1, .. }), "{error}");
    }

    #[test]
    fn a_batch_holds_its_items_in_order() {
        let blocks = blocks(12, 4).unwrap();
        let batch = blocks.batch(&[2, 0]).unwrap();
        let ids = &batch.inputs.parts[0];
        assert_eq!(ids.shape, [2, 4]);
        assert_eq!(ids.as_i32(), [8, 9, 10, 11, 0, 1, 2, 3]);
        assert_eq!(batch.inputs, batch.targets);
        assert_eq!((batch.items, batch.loss_targets, batch.units), (2, 6, 8));
        assert_eq!((Dataset::len(&blocks), blocks.unit(), Dataset::name(&blocks)), (3, "tokens", "the text"));
    }

    #[test]
    fn an_item_outside_of_the_dataset_is_an_error() {
        let error = blocks(12, 4).unwrap().batch(&[0, 3]).unwrap_err();
        assert!(matches!(error, DatasetError::OutOfRange { index: 3, len: 3, .. }), "{error}");
    }

    proptest! {
        #[test]
        fn blocks_joined_are_the_text_without_its_remainder(tokens in 2_usize..200, context in 2_usize..50) {
            prop_assume!(context <= tokens);
            let blocks = blocks(tokens, context).unwrap();
            let joined: Vec<u32> = (0..blocks.len()).flat_map(|i| blocks.block(i).to_vec()).collect();
            prop_assert_eq!(joined.as_slice(), &blocks.tokens()[..tokens / context * context]);
            prop_assert!(tokens - joined.len() < context);
        }
    }
}
