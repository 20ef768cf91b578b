//! The settings of commands. Each group of flags is one struct, which is read from the command line and from files.
//! It depends on the library's types of settings, on `machine` and on `terminal`.
//! It does not open devices, models or run directories.

mod adapters;
mod checkpoints;
mod devices;
pub(crate) mod flags;
mod fork;
mod grid;
mod model;
mod output;
mod part;
mod run;
mod save;
mod search;
mod training;
pub(crate) mod values;
mod warmup;
mod watching;

pub(crate) use adapters::{AdapterSettings, classifies, find_base, other_base};
pub(crate) use checkpoints::{CheckpointArg, CheckpointSettings};
pub(crate) use devices::{DeviceSettings, policy_help};
pub(crate) use fork::ForkSettings;
pub(crate) use grid::{Grid, is_varied};
pub(crate) use model::{DEFAULT_MODEL, ModelSettings, TaskName, dtypes, is_own, model_help};
pub(crate) use output::{OUTPUT, OutSettings, ResultSettings};
pub(crate) use part::{Part, PartSettings, divided};
pub(crate) use run::RunSettings;
pub(crate) use save::SaveSettings;
pub(crate) use search::{SAMPLED, SearchSettings};
pub(crate) use training::{Configuration, TEXT_METRICS, TrainingSettings, check_accumulate};
pub(crate) use watching::{WatchSettings, address};
