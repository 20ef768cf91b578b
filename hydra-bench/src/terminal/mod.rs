//! The terminal, except results: errors and exit statuses, the log, progress, interrupts, tables.
//! It depends on the engine's events, and on no other module of this crate.
//! It has no influence on training and writes no files.

pub(crate) mod error;
pub(crate) mod log;
pub(crate) mod numbers;
pub(crate) mod panics;
pub(crate) mod progress;
pub(crate) mod score;
pub(crate) mod stop;
pub(crate) mod table;

pub(crate) use error::{Interrupted, Outcome, Usage, print, quietly, render, tell};
pub(crate) use numbers::{Unit, fixed};
pub(crate) use progress::{Preparation, Progress, RequestedMinibatches, Show, interactive, thousands, time};
pub(crate) use score::{Measure, Score, percent};
pub(crate) use table::Table;
