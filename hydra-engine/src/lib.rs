//! Running it: many chains, each larger than a device, trained exactly on few devices.
//!
//! An [`Orchestrator`] takes devices and [`TrainTask`]s. It measures and cuts every model, adds up the memory,
//! and trains: shard tasks of all models are interleaved by a policy, a shard's parameters are promoted while
//! another computes, gradients go down to the host, and the host optimizer steps the masters meanwhile. A
//! task's losses and final weights do not depend on any of this: they equal those of [`plain`], the unsharded
//! training loop, bit for bit.
//!
//! Start reading at `orchestrator.rs` (the face) and `run/mod.rs` (the event loop). The rooms, from the top floor down, each
//! importing only what is below it: `orchestrator`, `run`, then `task`, `observer` and `report`, `admission`, `device`,
//! `optimizer`, `ahead_of_time`, `io` and `train_task`, `checkpoint`, `protocol`, and on the ground `stages`, `error` and `weights`. `plain` is
//! the reference loop.
//!
//! Invariant: no bit of a result depends on a clock, a thread count or a hash's order; measured times decide only who
//! runs next and when a checkpoint is due. This crate never allocates on a device without a reservation, and never
//! lets a failing task reach another.
#![forbid(unsafe_code)]

mod admission;
mod ahead_of_time;
mod checkpoint;
mod control;
mod device;
mod error;
mod io;
mod observer;
mod optimizer;
mod orchestrator;
pub mod plain;
mod protocol;
mod report;
mod run;
mod stages;
mod task;
mod train_task;
mod weights;

pub use admission::{
    Admission, AdmittedTask, Estimate, Measurements, OptimizerPlacement, Place, Placement, Skipped,
};
pub use checkpoint::{Checkpoint, CheckpointEvery, fork_obstacle};
pub use control::{Answer, Command, Effect, RunControl};
pub use device::{DeviceKind, DeviceSpec, OpenDevice};
pub use error::{CheckpointError, CommandError, EngineError};
pub use observer::{Observer, RunEvent, Silent, Span, TierMemory, Track, Work};
pub use optimizer::{OptimizerCheck, RuleCheck};
pub use orchestrator::Orchestrator;
pub use protocol::{Evaluation, StopFlag};
pub use report::{
    CheckpointReport, DeviceReport, PlanReport, REPORT_SCHEMA, RunReport, TaskReport, TaskTimes, Transfers,
    Validations,
};
pub use run::{AdmittedRun, Forecast, ForecastTask, LinkRate};
pub use stages::{EvaluationKind, MicrobatchGroup, TaskState};
pub use train_task::{EvaluationTask, TrainTask};
