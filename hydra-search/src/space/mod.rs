//! The search space: settings with their values, parameters with their ranges and conditions, and drawing from them.
//!
//! May touch: names, values and keys.
//! Never: uses trials, losses or steps, or defines the settings of a task.

mod configuration;
mod error;
mod parameter;
mod parameters;
mod range;
mod shorthand;
mod value;

pub(crate) use configuration::check_all;
pub use configuration::{Configuration, trials_from_jsonl, trials_from_toml};
pub use error::{ShorthandError, SpaceError, TrialsError};
pub use parameter::Parameter;
pub use parameters::Space;
pub use range::Range;
pub use shorthand::parse_parameter;
pub use value::Value;
