//! Which trained models are kept, and the type of their weights.

use super::{OUTPUT, flags, values};
use clap::Args;
use hydra_models::weights::SavedType;
use serde::{Deserialize, Serialize};

/// The trained models that a run keeps, and the type of their weights.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = OUTPUT)]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub struct SaveSettings {
    /// Keep only the models of the best N tasks on the leaderboard; others are deleted during the run [default: all]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_best: Option<usize>,
    /// Type of the weights in saved models [default: as in the model's own files; f32 for new models and for adapters]
    #[arg(long, value_name = "TYPE", value_parser = flags::named::<SavedType>(SavedType::NAMES))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) save_dtype: Option<SavedType>,
}

impl SaveSettings {
    /// Returns true if neither flag is given.
    pub(crate) fn is_none(&self) -> bool {
        *self == flags::defaults()
    }
}
