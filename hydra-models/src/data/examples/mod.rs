//! Instruction data: prompts and responses, conversations and texts from row files.
//!
//! A [`Record`] is a row: a text, a prompt with its completion, a conversation, or tokens. A tokenizer and its
//! [`Conventions`](crate::tokenizer::Conventions) encode it as an example, token ids with a loss mask. [`Examples`] is
//! the dataset: one example per item, or several packed into a row. A [`Tally`] counts the unused data of rows.

mod chat;
mod columns;
mod dataset;
mod encode;
mod files;
mod input;
pub(in crate::data) mod messages;
mod pack;
mod parquet;
mod record;
mod record_files;
mod remarks;
mod row_files;
mod rows;
mod splits;
mod table;
mod tally;
mod tokens;

pub use columns::{Column, ColumnError};
pub use dataset::{ExampleRows, Examples, Packing};
pub use encode::{ExampleError, LossOn};
pub(in crate::data) use files::Encoded;
pub use files::ExampleFiles;
pub use input::{InputRows, ScoredRows};
pub use record::{Conversation, Record};
pub(in crate::data) use record::{Fields, kind};
pub use record_files::RecordFiles;
pub(in crate::data) use record_files::{RecordOrigin, Records};
pub(in crate::data) use remarks::Remark;
pub use remarks::Remarks;
pub(in crate::data) use row_files::RowFiles;
pub(in crate::data) use splits::{files_in, in_no_split, looked_for};
pub use tally::{Counts, Tally};
