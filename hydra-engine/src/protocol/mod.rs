//! The lowest layer: the messages between threads and the types that they carry.
//!
//! May touch: errors, and the crates below.
//! Never: starts a thread, decides anything, or reads the state of a run.

mod batches;
mod clock;
mod evaluation;
mod event;
mod host_headroom;
mod payload;
mod stop;
mod task_state;

pub(crate) use batches::{Loaded, Reading};
pub(crate) use clock::{Clock, Time};
pub use evaluation::Evaluation;
pub(crate) use evaluation::{SavedEvaluation, Sums, statistic_of_targets};
pub(crate) use event::{Event, LoadedWeights, Reporter, Ticket, Written};
pub(crate) use host_headroom::{HeadroomAhead, HostHeadroom};
pub(crate) use payload::{Computed, Gradient, Inputs, LayerGradients, Made, Output, kept_bytes};
pub use stop::StopFlag;
pub use task_state::TaskState;
