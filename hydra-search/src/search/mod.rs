//! The search as whoever drives it sees it: actions out, losses in.
//!
//! Two floors: the searcher's trials, and the tasks that are trained for them, which are fewer where trials are the same
//! for a while. It may touch all other rooms. It never reads a clock, and what it answers in all depends on what it was told
//! in all, never on the order.

mod driver;
mod error;
mod report;
mod task;
mod tasks;
mod view;

pub use driver::Search;
pub use error::ReportError;
pub use report::Report;
pub use view::{Outcome, Standing, TrialView, Work};
