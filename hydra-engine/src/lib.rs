//! Running it: many chains, each larger than a device, trained exactly on few devices.
//!
//! An [`Orchestrator`] takes devices and [`TrainTask`]s. It measures and cuts every model, adds up the memory,
//! and trains: shard tasks of all models are interleaved by a policy, a shard's parameters are promoted while
//! another computes, gradients go down to the host, and the host optimizer steps the masters meanwhile. A
//! task's losses and final weights do not depend on any of this: they equal those of [`plain`], the unsharded
//! training loop, bit for bit.
//!
//! Start reading at `orchestrator.rs` (the face), `run.rs` (the event loop) and `claim.rs` (who runs next); `model.rs` and
//! `cursor.rs` say where a task stands, `worker.rs` and `host.rs` are the threads, `executor.rs` is one shard task; `fill.rs`
//! is where masters come from, `tiers.rs` where they live, and `keep.rs` with `checkpoint` what survives a run.
//!
//! Invariant: no bit of a result depends on a clock, a thread count or a hash's order; measured times decide only who
//! runs next and when a checkpoint is due. This crate never allocates on a device without a reservation, and never
//! lets a failing task reach another.
#![forbid(unsafe_code)]

mod admission;
mod admit;
mod asking;
mod checkpoint;
mod claim;
mod clock;
mod cursor;
mod device;
#[cfg(feature = "cube")]
mod device_optimizer;
mod disk;
mod error;
mod evaluation;
mod event;
mod executor;
mod failing;
mod fill;
mod gpu;
mod gradient;
mod gradient_room;
mod host;
mod host_memory;
mod host_room;
mod inputs;
mod keep;
mod loader;
mod model;
mod observer;
mod open;
mod optimizer;
mod optimizer_check;
mod orchestrator;
mod placement;
pub mod plain;
mod record;
mod report;
mod resident;
mod run;
mod stop;
mod summary;
mod task;
mod threads;
mod tiers;
mod weights;
mod worker;
mod writer;

pub use admission::{Admission, AdmittedTask};
pub use checkpoint::{Checkpoint, CheckpointError, CheckpointEvery};
pub use device::{DeviceKind, DeviceSpec};
pub use error::EngineError;
pub use evaluation::Evaluation;
pub use observer::{EvaluationKind, Observer, RunEvent, Silent, Span, Track, Work};
pub use open::OpenDevice;
pub use optimizer_check::{OptimizerCheck, RuleCheck};
pub use orchestrator::Orchestrator;
pub use placement::{OptimizerPlacement, Place, Placement};
pub use report::{DeviceReport, REPORT_SCHEMA, RunReport, TaskReport, TaskState, Transfers};
pub use stop::StopFlag;
pub use task::TrainTask;

/// The README's examples, compiled and run as tests of this crate's documentation.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
