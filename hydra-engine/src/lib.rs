//! The engine: trains many chains, each larger than a device, exactly on few devices.
//!
//! An [`Orchestrator`] takes devices and [`TrainTask`]s. It measures and cuts every model, adds up the memory, and
//! trains: a policy interleaves the shard tasks of all models, a shard's parameters are promoted while another
//! computes, gradients are downloaded to the host, and the host optimizer steps the masters meanwhile. A task's
//! losses and final weights do not depend on any of this: they equal those of [`plain`], the unsharded training loop,
//! bit for bit.
//!
//! Start reading at `orchestrator.rs` (the public API) and `run/mod.rs` (the event loop). The modules form layers,
//! each importing only layers below it, from top to bottom: `orchestrator`; `run`; `task`, `observer` and `report`;
//! `admission`; `device`; `optimizer`; `ahead_of_time`, `io` and `train_task`; `checkpoint`; `protocol`; `error`
//! and `weights`. `plain` is the reference loop.
//!
//! Invariant: no bit of a result depends on a clock, a thread count or a hash order; measured times only decide which
//! task runs next and when a checkpoint is due. This crate never allocates on a device without a reservation, and a
//! failing task never affects another.
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
mod task;
mod train_task;
mod weights;

pub use admission::{
    Admission, AdmittedTask, Estimate, FrozenWeights, Measurements, MinibatchMemory, OptimizerPlacement,
    Place, Placement, Skipped, Storage, TrainingData,
};
pub use checkpoint::{Checkpoint, CheckpointEvery, fork_obstacle};
pub use control::{Answer, Command, Effect, RunControl};
pub use device::{DeviceKind, DeviceSpec, OpenDevice};
pub use error::{CheckpointError, CommandError, EngineError};
pub use hydra_sched::program::{EvaluationKind, MicrobatchGroup};
pub use observer::{Observer, RunEvent, Silent, Span, TierMemory, Track, Work};
pub use optimizer::{OptimizerCheck, RuleCheck};
pub use orchestrator::Orchestrator;
pub use protocol::{Evaluation, StopFlag, TaskState};
pub use report::{
    CheckpointReport, DeviceReport, PlanReport, REPORT_SCHEMA, RunReport, TaskReport, TaskTimes, Trained,
    Transfers, Validations,
};
pub use run::{AdmittedRun, Forecast, ForecastTask, LinkRate};
pub use train_task::{EvaluationTask, RoundsTask, TrainTask};
