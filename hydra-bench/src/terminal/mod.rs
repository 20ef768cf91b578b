//! The terminal, apart from results: errors and exit statuses, the log, bars, interrupts, tables.
//! It may touch the engine's events and standard error; of this crate it imports nothing.
//! It never decides what is trained and never writes a file.

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
pub(crate) use progress::{Asked, Preparation, Progress, Show, interactive, thousands, time};
pub(crate) use score::{Measure, Score, percent};
pub(crate) use table::Table;
