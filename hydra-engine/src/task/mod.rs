//! One task while it runs: its position, the inputs and replies that it waits for, and its results.
//!
//! May touch: its own state, its program, and the result of its admission.
//! Never: sends to a thread, reserves memory, or reads another task.

mod checkpoint_clock;
mod costs;
mod ending;
mod in_flight;
mod info;
mod live;
mod microbatch_pass;
mod pause;
mod pausing;
mod pending_gradients;
mod phase;
mod replicas;
mod results;
mod shared;
mod waits;

pub(crate) use costs::Costs;
pub(crate) use ending::{Fate, Rest};
pub(crate) use in_flight::Next;
pub(crate) use info::TaskInfo;
pub(crate) use live::{Claim, LiveTask, ParameterBytes, ThreadRequest};
pub(crate) use pause::Leaving;
pub(crate) use phase::{Change, Phase};
pub(crate) use results::Progress;
