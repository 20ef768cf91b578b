//! Instruction data: examples of what a model is to say, from files of rows.
//!
//! A [`Record`] is a row: a text, a prompt with its completion, a conversation, or tokens. By a tokenizer and its
//! [`Conventions`](crate::tokenizer::Conventions) it becomes an example, tokens of which some are trained on;
//! [`Examples`] is the dataset of them: one an item, or packed, as many as a row has room for. What has no use of a row is
//! counted in a [`Tally`].

mod chat;
mod columns;
mod dataset;
mod encode;
mod files;
mod messages;
mod pack;
mod parquet;
mod record;
mod remarks;
mod rows;
mod splits;
mod table;
mod tally;
mod tokens;

pub use columns::{Column, ColumnError};
pub use dataset::{Examples, Packing};
pub use encode::{ExampleError, LossOn};
pub(in crate::data) use files::Encoded;
pub use files::ExampleFiles;
pub use record::{Conversation, Record};
pub use remarks::Remarks;
pub(in crate::data) use splits::in_no_split;
pub use tally::{Counts, Tally};
