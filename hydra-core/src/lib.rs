//! Models, for every other crate of Hydra.
//!
//! A model is a [`Chain`]: a sequence of [`Layer`]s that ends in a loss. Users write Burn modules and implement
//! [`Forward`] for them; the blanket implementation makes them object-safe layers, so that partitioner, scheduler and
//! engine see no generics. What flows between layers is an [`Activation`], what a layer is told beside it is a
//! [`Pass`], what a chain learns from is a [`Dataset`], and how it learns is a [`TrainSpec`].
//!
//! Parameters live in *buffers*: contiguous `f32` buffers, one for each layer and one for each parameter
//! that several layers share ([`ParamBufferLayout`]). A chain is uninitialized: it holds shapes and names, never
//! parameter values; those come from its [`WeightSource`], buffer by buffer.
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
//! Invariant: this crate never spawns a thread (first values are drawn on the threads of the rayon pool that the caller
//! is in), never reads a clock but for [`profile`] when it is asked to, never opens a file but in [`replace_file`],
//! with which the other crates write theirs, and never uses what a global random generator gives: it is asked for
//! numbers only to recognise a module's own initializers by them ([`Forward::init`]).
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
pub use dataset::{Batch, Dataset, DatasetError, FirstItems, Sampler, gather, gather_items, gather_largest};
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
