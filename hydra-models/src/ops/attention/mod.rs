//! Causal self-attention as one operation: over queries, keys and values that one map made, and over those of three maps,
//! turned by their positions, where several heads of queries share keys and values.
//!
//! Weights are computed for a block of queries at a time and are gone after it; for the backward they are
//! computed again from two numbers of each row (Dao et al., "FlashAttention", 2022): the largest score and the
//! inverse of the sum of the exponentials. Both in one, as log-sum-exp, would not do where scores are so large
//! that it rounds the sum away.
//!
//! Where a row holds several examples, one after the other, each is computed as if it were a row of its own.

mod group;
mod grouped;
mod positions;
mod qkv;
mod rotary;

pub use grouped::{GroupedAttention, grouped_attention, grouped_attention_within};
pub use qkv::{Attention, causal_attention, causal_attention_within};
pub use rotary::{Rotary, RotaryScaling};

pub(crate) use grouped::working_elements as grouped_working_elements;
pub(crate) use qkv::working_elements;

#[cfg(feature = "cube")]
pub(super) use {
    grouped::{GroupedKernels, GroupedOps, GroupedOptions, GroupedSaved},
    qkv::{AttentionKernels, AttentionOps, Options, Saved},
    rotary::Rotation,
};

/// Numbers that are saved for each row of scores.
pub(super) const STATISTICS: usize = 2;
