//! Model types for every other crate of Hydra.
//!
//! A model is a [`Chain`]: a sequence of [`Layer`]s that ends in a loss. Users write Burn modules and
//! implement [`Forward`] for them; the blanket implementation makes them object-safe layers, so that
//! partitioner, scheduler and engine need no generics. Layers take and return an [`Activation`] and receive
//! their other arguments in a [`Pass`]. A chain is trained on a [`Dataset`] as a [`TrainSpec`] specifies.
//!
//! Parameters are stored in *parameter buffers*: contiguous memory, one buffer per layer and one per parameter
//! that several layers share ([`ParamBufferLayout`], with its [`Encoding`]). A chain is uninitialized: it holds shapes and
//! names, not parameter values; those come from its [`WeightSource`], buffer by buffer.
//!
//! ```
//! use hydra_core::{ByteSize, Key};
//!
//! let budget: ByteSize = "64MiB".parse().unwrap();
//! assert_eq!(budget.bytes(), 64 << 20);
//! // Random numbers are a function of a key and an index, never of a global generator.
//! assert_eq!(Key::new(7).fold(1).bits(42), Key::new(7).fold(1).bits(42));
//! ```
//!
//! Invariants: this crate never spawns a thread (initial values are drawn on the caller's rayon pool), reads
//! no clock except in [`profile`] after it was started, opens no file except in [`replace_file`], which the
//! other crates use to write files, and never uses values of a global random generator: it draws from one
//! only to recognize a module's own initializers ([`Forward::init`]).
#![forbid(unsafe_code)]

mod chain;
mod dataset;
mod device;
mod error;
mod evaluations;
mod files;
mod ids;
mod key;
pub mod optimizer;
pub mod profile;
pub mod schedule;
mod settings;
mod spec;
mod tensor;
mod units;

pub use chain::*;
pub use dataset::{
    Batch, Dataset, DatasetError, FirstItems, Rounds, Sampler, gather, gather_items, gather_largest,
};
pub use device::*;
pub use error::{CoreError, with_causes};
pub use evaluations::Evaluations;
pub use files::{UNFINISHED, replace_file};
pub use ids::{DeviceId, TaskId};
pub use key::Key;
pub use optimizer::{Optimizer, OptimizerSpec};
pub use schedule::Schedule;
pub use settings::{Setting, Settings};
pub use spec::{Decay, Length, TrainSpec};
pub use tensor::*;
pub use units::{Bandwidth, ByteSize, UnitError};
