//! One task while it runs: where it stands, what it waits for, and what it has to show.
//!
//! May touch: its own state, the stages, and what admission said of it.
//! Never: sends to a thread, reserves memory, or knows another task.

mod checkpoint;
mod evaluation;
mod failing;
mod gradient_room;
mod model;
mod waits;

pub(crate) use checkpoint::Kept;
pub(crate) use model::{Claim, Model, Progress};
pub(crate) use waits::Waits;
