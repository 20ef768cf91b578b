//! Generation of text: sequences whose next tokens are chosen from a language model's logits.
//!
//! A model generates in rounds. In a round, every sequence passes all of the model's layers: the tokens of its prompt that
//! are not in the key-value cache yet, up to 512 of them, or its newest token. [`Sequences`] is the
//! data of the rounds, and [`NextToken`] is the objective that chooses the tokens.
//!
//! The tokens of a sequence are a function of the model, its prompt, the [`Sampling`] and the number of the sample: not of
//! budgets, cuts, devices, threads or the other sequences.
//!
//! May use: `ops` (the cache), `parts` (the size of a group). Never: opens files or tokenizes.

mod objective;
mod sampling;
mod sequences;

pub use crate::ops::{KvCache, KvCacheForm};
pub use objective::NextToken;
pub use sampling::Sampling;
pub use sequences::{Ended, Generated, Judged, Limits, Prompt, Sequences};
