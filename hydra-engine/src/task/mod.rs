//! One task while it runs: where it stands, what it waits for, and what it has to show.
//!
//! May touch: its own state, the stages, and what admission said of it.
//! Never: sends to a thread, reserves memory, or knows another task.

mod checkpoint_clock;
mod costs;
mod ending;
mod facts;
mod flight;
mod gradient_room;
mod lanes;
mod live;
mod pause;
mod pausing;
mod phase;
mod results;
mod shared;
mod sweep;
mod waits;

pub(crate) use costs::Costs;
pub(crate) use ending::{Fate, Rest};
pub(crate) use facts::Facts;
pub(crate) use live::{Claim, LiveTask, ParameterBytes, Request};
pub(crate) use pause::Leaving;
pub(crate) use phase::{Change, Phase};
pub(crate) use results::Progress;
