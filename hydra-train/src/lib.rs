//! Training many deep-learning models, each larger than a device's memory, on few devices, exactly.
//!
//! This is the crate that programs import. It cuts every model into shards, keeps the shards in host memory
//! or on disk, promotes them to a device only while they compute, and interleaves the shards of all models so
//! that no device waits. Every model is bitwise equal to the result of training it alone and whole in a plain
//! loop.
//!
//! A model is a [`Chain`](model::Chain) of layers, and a layer is a [Burn](burn) module with one
//! [`forward`](model::Forward). A [`TrainTask`](engine::TrainTask) is a chain, a [`Dataset`](data::Dataset)
//! and a [`TrainSpec`](model::TrainSpec), the training configuration. An
//! [`Orchestrator`](engine::Orchestrator) has devices with memory budgets, trains the submitted tasks, and
//! returns a report.
//!
//! ```
//! use hydra_train::mlp::{self, Spirals};
//! use hydra_train::prelude::*;
//!
//! // A perceptron with two hidden layers, which classifies points on three spirals.
//! let classes = 3;
//! let chain = Arc::new(mlp::chain(&[2, 64, 64], classes)?);
//! let spirals = |seed, points| Arc::new(Spirals::new(seed, points, classes));
//!
//! // Two learning rates on two logical devices of one thread and 16 MiB each.
//! let devices = DeviceSpec::cpu(ByteSize::mib(16)).threads(1).times(2);
//! let mut orchestrator = Orchestrator::new(devices)?;
//! for lr in [3e-2, 3e-3] {
//!     let spec = TrainSpec { length: Length::Epochs(4), ..TrainSpec::new(OptimizerSpec::adamw(lr), 32) };
//!     let task = TrainTask::new(format!("lr-{lr}"), chain.clone(), spirals(1, 256), spec);
//!     orchestrator.submit(task.test(spirals(2, 64)))?;
//! }
//!
//! let report = orchestrator.run()?;
//! for task in &report.tasks {
//!     let test = task.test.as_ref().expect("a task that is done has been tested");
//!     println!("{}: loss {:.3}, accuracy {:.2}", task.name, test.loss, test.metrics["accuracy"]);
//! }
//! assert!(report.all_done());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where to go next:
//!
//! - A custom model: [`Forward`](model::Forward), [`Chain::builder`](model::Chain::builder), and the example
//!   `own_model`, from its layers and its dataset to weights that are saved and read back.
//! - A language model: [`family`] resolves a name or a Hugging Face directory to [`gpt2`] or [`decoder`]
//!   (Llama, Mistral, Qwen), with [`data`], [`tokenizer`] and [`weights`]; [`lora`] trains adapters for one.
//! - Checkpoints, budgets, disk, observers: [`Orchestrator`](engine::Orchestrator) and
//!   [`TrainTask`](engine::TrainTask).
//! - A custom optimizer: [`optimizer`], and the example `own_optimizer`.
//! - A custom loss with its metrics: [`Objective`](model::Objective), the objectives of classifiers in [`objective`], and the
//!   example `own_objective`.
//! - The loop that results are bitwise equal to: [`plain`].
//! - A custom scheduling policy, and a simulator for it: [`policy`].
//!
//! [`prelude`] is the only import that most programs need. The crates behind this one can also be used
//! directly; `docs/architecture.md` names them and describes how they work together.
//!
//! Invariant: this crate contains no code, only re-exports.
#![forbid(unsafe_code)]

/// Burn, in the version and with the features that Hydra uses.
///
/// A program's layers are modules of this Burn. `derive(Module)` expands to paths that begin with `burn`, so
/// that name must be in scope: through [`prelude`], or with `use hydra_train::burn;`. A program then needs no
/// direct dependency on Burn.
pub use burn;

pub mod model {
    //! Models and training specs: layers, chains, activations.
    #[doc(inline)]
    pub use hydra_core::*;
}

pub mod data {
    //! Data: the dataset trait, and texts split into blocks of tokens.
    #[doc(inline)]
    pub use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor, Sampler};
    #[doc(inline)]
    pub use hydra_models::data::*;
}

pub mod weights {
    //! Sources of initial weights and writers of trained ones: the traits, and safetensors for any chain.
    #[doc(inline)]
    pub use hydra_core::{ModelWriter, ParamBufferReader, SeededInit, WeightError, WeightSource};
    #[doc(inline)]
    pub use hydra_models::weights::*;
}

pub mod engine {
    //! The engine: the orchestrator, its devices and tasks, reports and observers.
    #[doc(inline)]
    pub use hydra_engine::*;
}

pub mod memory {
    //! Memory and transfers: budgets, stores, links, and the counting allocator.
    #[doc(inline)]
    pub use hydra_spill::*;
}

pub mod partition {
    //! Partitioning: costs, rules, and saved plans.
    #[doc(inline)]
    pub use hydra_partition::*;
}

pub mod policy {
    //! Scheduling: the policy trait, the policies, and a simulator that compares them.
    #[doc(inline)]
    pub use hydra_sched::*;
}

#[doc(inline)]
pub use hydra_core::{optimizer, schedule};
#[doc(inline)]
pub use hydra_engine::plain;
#[doc(inline)]
pub use hydra_models::{
    BatchNorm, ModelError, cnn, decoder, family, gpt2, lora, mlp, objective, ops, tokenizer,
};

pub mod prelude {
    //! The imports of most programs: `use hydra_train::prelude::*;`.
    //!
    //! It includes Burn itself, the parts of Burn that layers use, and `Arc`, in which chains and datasets
    //! are shared.

    #[doc(no_inline)]
    pub use burn::{
        self,
        module::Module,
        nn,
        tensor::{Device, FloatDType, Int, Tensor, activation},
    };
    #[doc(no_inline)]
    pub use hydra_core::{
        Activation, Bandwidth, Batch, ByteSize, Chain, ChainBuilder, Dataset, DatasetError, Decay, FloatType,
        Forward, HostActivation, HostTensor, Init, Key, Length, Measures, Metric, Objective, OptimizerSpec,
        Pass, Schedule, State, StateRule, TrainSpec,
        optimizer::{AdamW, Elements, Optimizer, Sgd},
        schedule::{Constant, Cosine, Curve, Linear, WarmupStableDecay},
    };
    #[doc(no_inline)]
    pub use hydra_engine::{
        Checkpoint, CheckpointEvery, DeviceSpec, EngineError, Evaluation, EvaluationTask, Observer,
        Orchestrator, RunEvent, RunReport, StopFlag, TaskReport, TaskState, TrainTask, plain,
    };
    #[doc(no_inline)]
    pub use hydra_models::{
        BatchNorm,
        data::{BlockSpec, Corpus, Split},
        gpt2::{self, Gpt2Config, Gpt2Writer},
        tokenizer::Tokenizer,
        weights::{SafetensorsSource, SafetensorsWriter},
    };
    #[doc(no_inline)]
    pub use hydra_sched::PolicyKind;
    #[doc(no_inline)]
    pub use hydra_spill::alloc::CountingAllocator;
    #[doc(no_inline)]
    pub use std::sync::Arc;
}

/// The examples of `docs/library.md`, compiled and run as tests of this crate's documentation.
#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
struct LibraryExamples;
