//! Self-attention as one operation: over the concatenated queries, keys and values of one linear layer, or over those
//! of three layers, with rotary embeddings and query heads that share keys and values.
//!
//! Weights are computed for one block of queries at a time and then discarded. The backward recomputes them from two
//! numbers per row (Dao et al., "FlashAttention", 2022): the largest score and the inverse of the sum of the
//! exponentials. Combining both into a log-sum-exp would fail for scores so large that it rounds the sum away.
//!
//! If a row holds several examples, one after the other, each is computed as if it were in a row of its own.

mod cache;
mod cached;
mod group;
mod grouped;
mod narrow;
mod positions;
mod qkv;
mod rotary;

pub use cache::{KvCache, KvCacheForm};
pub use grouped::{GroupedAttention, grouped_attention, grouped_attention_within};
pub use qkv::{Attention, causal_attention, causal_attention_within};
pub use rotary::{Rotary, RotaryScaling};

pub(crate) use cache::BlockCache;
pub(crate) use cached::cached_attention;
pub(crate) use grouped::working_elements as grouped_working_elements;
pub(crate) use qkv::working_elements;

#[cfg(feature = "cube")]
pub(super) use {
    grouped::{GroupedKernels, GroupedOps, GroupedOptions, GroupedSaved},
    qkv::{AttentionKernels, AttentionOps, Options, Saved},
    rotary::Rotation,
};

/// Numbers saved for each row of scores.
pub(super) const STATISTICS: usize = 2;
