//! Texts and the blocks of tokens that are cut from them.
//!
//! A [`Corpus`] is a text in up to three [`Split`]s: the built-in one, a WikiText directory, or a plain-text
//! file. Its lines are tokenized one by one, blank lines give nothing, all ids are joined and cut into
//! [`TokenBlocks`] of the context length, a dataset whose items are blocks.

mod blocks;
mod builtin;
#[cfg(test)]
mod builtin_text;
mod corpus;
mod error;
mod records;
mod text;
mod wikitext;

pub use blocks::{BlockSpec, TokenBlocks};
pub use corpus::{Corpus, CorpusKind, Split};
pub use error::DataError;
pub use records::Records;
