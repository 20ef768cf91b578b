//! Instruction data: examples of what a model is to say, from files with one JSON object a line.
//!
//! A [`Record`] is a line: a text, a prompt with its completion, or a conversation. By a tokenizer and its
//! [`Conventions`](crate::tokenizer::Conventions) it becomes an example, tokens of which some are trained on;
//! [`Examples`] is the dataset of them: one an item, or packed, as many as a row has room for.

mod chat;
mod dataset;
mod encode;
mod files;
mod pack;
#[cfg(feature = "parquet")]
mod parquet;
mod record;
mod remarks;

pub use dataset::{Examples, Packing};
pub use encode::{ExampleError, LossOn};
pub use files::ExampleFiles;
pub use record::{Conversation, Record};
pub use remarks::Remarks;
