//! Texts, examples and images as datasets.
//!
//! A [`Corpus`] is a text in up to three [`Split`]s: the built-in one, a WikiText directory, or a plain-text file. Its
//! lines are tokenized one by one, blank lines yield nothing, and all ids are joined and cut into [`TokenBlocks`] of
//! the context length, a dataset whose items are blocks. [`ExampleFiles`] hold prompts and responses; each pair is an
//! item of [`Examples`]. A [`TokenSource`] is either. [`LabelledFiles`] hold texts with labels; each text is an item of
//! [`LabelledTexts`]. [`PreferenceFiles`] hold prompts with two answers each, the items of [`PreferencePairs`]. The files hold
//! their rows as [`RecordFiles`], and the items of all three are token sequences of different lengths, a [`RaggedDataset`]. An
//! [`ImageSource`] holds images with classes; each image is an item of [`Images`].

mod blocks;
mod builtin;
#[cfg(test)]
mod builtin_text;
mod corpus;
mod error;
mod examples;
mod folders;
mod images;
mod labels;
mod preferences;
mod ragged;
mod records;
mod source;
mod text;
mod wikitext;

pub use blocks::{BlockSpec, TokenBlocks};
pub use corpus::{Corpus, CorpusKind, Split};
pub use error::{DataError, RowPosition};
pub use examples::{
    Column, ColumnError, Conversation, Counts, ExampleError, ExampleFiles, ExampleRows, Examples, InputRows,
    LossOn, Packing, Record, RecordFiles, Remarks, ScoredRows, Tally,
};
pub use folders::{HeldOut, Unread};
pub(crate) use images::preprocessed_side;
pub use images::{DecodeMemory, ImageSource, Images, JpegError, PREPROCESSOR, Preprocessor};
pub use labels::{LabelForm, LabelledFiles, LabelledItems, LabelledTexts, unlabelled};
pub use preferences::{PairForm, Pairs, PreferenceFiles, PreferencePairs, WithReference};
pub use ragged::{RaggedDataset, RaggedItems};
pub use records::Records;
pub use source::{Content, Context, Cut, TokenForm, TokenSource, TokenSplits};
