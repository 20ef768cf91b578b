//! The settings of commands. Each group of flags is one struct, which is read from the command line and from files.
//! It depends on the library's types of settings, on `machine` and on `terminal`.
//! It does not open devices, models or run directories.

mod adapters;
mod axis;
mod checkpoints;
mod devices;
pub mod flags;
mod fork;
mod grid;
mod model;
mod output;
mod part;
mod run;
mod save;
mod search;
mod training;
pub mod values;
mod warmup;
mod watching;

pub use adapters::other_base;
pub use adapters::{AdapterSettings, classifies, find_base};
pub use axis::Setting;
pub(crate) use axis::SettingGroup;
pub(crate) use checkpoints::CheckpointArg;
pub use checkpoints::CheckpointSettings;
pub use devices::DeviceSettings;
pub use devices::policy_help;
pub use fork::ForkSettings;
pub use grid::Grid;
pub(crate) use model::is_own;
pub use model::{DEFAULT_MODEL, ModelSettings, TaskName, check_frozen_dtype, dtypes, model_help};
pub use output::OutSettings;
pub use output::{OUTPUT, ResultSettings};
pub use part::PartSettings;
pub(crate) use part::{Part, divided};
pub use run::RunSettings;
pub use save::SaveSettings;
pub use search::SearchSettings;
pub use training::{Configuration, check_accumulate};
pub(crate) use training::{TEXT_METRICS, TrainingSettings};
pub(crate) use watching::WatchSettings;
pub use watching::address;
