//! Texts with labels, for sequence classifiers.
//!
//! [`LabelledFiles`] are rows with a text, or two, and a label, or class folders of text files. The labels decide what a
//! model is trained for, unless that is given. [`LabelledTexts`] is the dataset of a split: an item is the tokens of one
//! text, or of two, and its label.

mod class;
mod dataset;
mod files;
mod label;
mod record;
mod unlabelled;

pub use dataset::{LabelledItems, LabelledTexts};
pub use files::{LabelForm, LabelledFiles};
pub use unlabelled::unlabelled;
