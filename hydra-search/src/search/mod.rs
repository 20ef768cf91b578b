//! The interface to a driver: actions out, losses in.
//!
//! It has two layers: the searcher's trials, and the tasks that are trained for them, which are fewer while trials
//! are equal.
//!
//! May touch: all other modules.
//! Never: reads a clock, or depends on the order of reports.

mod driver;
mod error;
mod report;
mod task;
mod tasks;
mod view;

pub use driver::Search;
pub use error::ReportError;
pub use report::Report;
pub use view::{Outcome, TrialState, TrialView, Work};
