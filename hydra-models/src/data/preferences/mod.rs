//! Preference data: prompts with a chosen and a rejected answer each, from row files.
//!
//! [`PreferenceFiles`] hold the rows; each is an item of [`PreferencePairs`], in the form of a preference loss or of a
//! reward model. [`WithReference`] adds the log-probabilities of a reference model to a dataset of pairs.

mod dataset;
mod encode;
mod files;
mod record;
mod reference;

pub use dataset::{Pairs, PreferencePairs};
pub use files::{PairForm, PreferenceFiles};
pub use reference::WithReference;
