//! The terminal, except results: errors and exit statuses, the log, progress, interrupts, tables.
//! It depends on the engine's events, and on no other module of this crate.
//! It has no influence on training and writes no files.

pub mod error;
pub mod log;
pub(crate) mod numbers;
pub mod panics;
pub(crate) mod progress;
pub(crate) mod score;
pub(crate) mod stop;
pub(crate) mod table;

pub(crate) use error::{Interrupted, render};
pub use error::{Outcome, Usage, print, quietly, tell};
pub use numbers::Unit;
pub use numbers::fixed;
pub(crate) use progress::{Preparation, Progress, RequestedMinibatches, thousands};
pub use progress::{Show, interactive, time};
pub use score::percent;
pub use score::{Measure, Score};
pub use table::Table;
