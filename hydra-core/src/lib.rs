//! What a model is, for every other crate of Hydra.
//!
//! A model is a [`Chain`]: a sequence of [`Layer`]s that ends in a loss. Users write Burn modules and
//! implement [`Forward`] for them; the blanket implementation makes them object-safe layers, so that
//! partitioner, scheduler and engine see no generics. What flows between layers is an [`Activation`],
//! what a layer is told beside it is a [`Pass`], what a chain learns from is a [`Dataset`], and how it
//! learns is a [`TrainSpec`].
//!
//! Parameters live in *images*: contiguous `f32` buffers, one for each layer and one for each parameter
//! that several layers share ([`ImageLayout`]). A chain is hollow: it holds shapes and names, never
//! parameter values; those come from its [`WeightSource`], image by image.
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
//! Invariant: this crate never spawns a thread (first values are drawn on
//! the threads of the rayon pool that the caller is in), never reads a clock
//! but for [`profile`] when it is asked to, never opens a file but in
//! [`replace_file`], with which the other crates write theirs, and never
//! uses what a global random generator gives: it is asked for numbers only to
//! recognise a module's own initializers by them ([`Forward::init`]).
#![forbid(unsafe_code)]

mod activation;
mod chain;
mod compute;
#[cfg(feature = "cube")]
pub mod cube;
mod dataset;
mod error;
mod files;
mod float;
mod ids;
mod initializer;
mod key;
mod layer;
mod level;
mod memory;
pub mod optimizer;
mod pass;
mod probe;
pub mod profile;
pub mod schedule;
mod settings;
mod spec;
mod units;
mod vjp;
mod weights;

pub use activation::{Activation, AnyTensor, HostActivation, HostTensor};
pub use chain::{Chain, ChainBuilder, ChainLayer, IMAGE_ALIGN, ImageLayout, ImageParam, ParamRef};
pub use compute::{
    BackwardFrom, LayerGradients, Measured, ShardBackward, backward_range, forget_graphs, forward_range,
    loss_value, promote_layers,
};
pub use dataset::{Batch, Dataset, DatasetError, Sampler, gather, gather_items};
pub use error::{CoreError, with_causes};
pub use files::{UNFINISHED, replace_file};
pub use float::FloatType;
pub use ids::{DeviceId, TaskId};
pub use initializer::OwnInit;
pub use key::Key;
pub use layer::{Declared, Forward, Init, Layer, ParamInfo};
pub use memory::{DeviceBuffer, DeviceBytes, DeviceError, DeviceTensor, finish, panic_message};
pub use optimizer::{Optimizer, OptimizerSpec};
pub use pass::{DropoutMask, Mode, Pass};
pub use probe::{MemoryProbe, NoProbe};
pub use schedule::Schedule;
pub use settings::{Setting, Settings};
pub use spec::{Decay, Length, TrainSpec};
pub use units::{AtLeast, Bandwidth, ByteSize, UnitError};
pub use vjp::vector_jacobian;
pub use weights::{ImageReader, ModelWriter, SeededInit, WeightError, WeightSource};
