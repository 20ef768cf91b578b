//! Training many deep-learning models, each larger than a device's memory, on few devices, exactly.
//!
//! This is the crate that a program imports. It cuts every model into shards, keeps the shards in host memory or on disk,
//! promotes them to a device only while they compute, and interleaves the shards of all models so that no device waits.
//! Every model ends with the same bits as if it had been trained alone, whole, by a plain loop.
//!
//! A model is a [`Chain`](model::Chain) of layers, and a layer is a [Burn](burn) module with one
//! [`forward`](model::Forward). A [`TrainTask`](engine::TrainTask) is a chain, a [`Dataset`](data::Dataset) and a
//! [`TrainSpec`](model::TrainSpec), which says how to learn. An [`Orchestrator`](engine::Orchestrator) has devices with
//! memory budgets, trains the tasks that are submitted to it, and reports.
//!
//! ```
//! use hydra_train::mlp::{self, Spirals};
//! use hydra_train::prelude::*;
//!
//! // A perceptron with two hidden layers, and points on three spirals that it learns to tell apart.
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
//! - A model of one's own: [`Forward`](model::Forward), [`Chain::builder`](model::Chain::builder), and the example
//!   `own_model`, from its layers and its dataset to weights that are saved and read back.
//! - A language model: [`family`] finds what a name or a Hugging Face directory stands for, [`gpt2`] and [`decoder`] (Llama,
//!   Mistral, Qwen) are what it finds, with [`data`], [`tokenizer`] and [`weights`]; [`lora`] trains adapters beside one.
//! - Checkpoints, budgets, disk, observers: [`Orchestrator`](engine::Orchestrator) and [`TrainTask`](engine::TrainTask).
//! - An optimizer of one's own: [`optimizer`], and the example `own_optimizer`.
//! - The loop that all of it equals bit for bit: [`plain`].
//! - A scheduling policy of one's own, and a simulator for it: [`policy`].
//!
//! [`prelude`] is the one import line that most programs need. The crates behind this one can each be used by
//! themselves; `docs/architecture.md` names them and shows how they work together.
//!
//! Invariant: this crate holds no code of its own, only names.
#![forbid(unsafe_code)]

/// Burn, in the version and with the features that Hydra has.
///
/// A program's own layers are modules of this Burn. `derive(Module)` expands to paths that begin with `burn`, so that name
/// has to be in scope where it is derived: through [`prelude`], or with `use hydra_train::burn;`. A program then needs no
/// dependency on Burn of its own.
pub use burn;

pub mod model {
    //! Models and how they learn: layers, chains, activations, training specs.
    #[doc(inline)]
    pub use hydra_core::*;
}

pub mod data {
    //! Data: the port, and texts cut into blocks of tokens.
    #[doc(inline)]
    pub use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor, Sampler};
    #[doc(inline)]
    pub use hydra_models::data::*;
}

pub mod weights {
    //! Sources of first values and writers of trained ones: the ports, and safetensors for any chain.
    #[doc(inline)]
    pub use hydra_core::{ModelWriter, ParamBufferReader, SeededInit, WeightError, WeightSource};
    #[doc(inline)]
    pub use hydra_models::weights::*;
}

pub mod engine {
    //! Running it: the orchestrator, its devices and tasks, what it reports, and who hears of it.
    #[doc(inline)]
    pub use hydra_engine::*;
}

pub mod memory {
    //! Memory, and how bytes move: budgets, stores, links, and the allocator that measures.
    #[doc(inline)]
    pub use hydra_spill::*;
}

pub mod partition {
    //! Partitioning: costs, rules, and the plans that are saved.
    #[doc(inline)]
    pub use hydra_partition::*;
}

pub mod policy {
    //! Scheduling: the port, the policies, and the laboratory that simulates and compares them.
    #[doc(inline)]
    pub use hydra_sched::*;
}

#[doc(inline)]
pub use hydra_core::{optimizer, schedule};
#[doc(inline)]
pub use hydra_engine::plain;
#[doc(inline)]
pub use hydra_models::{ModelError, cnn, decoder, family, gpt2, lora, mlp, ops, tokenizer};

pub mod prelude {
    //! The imports of most programs: `use hydra_train::prelude::*;`.
    //!
    //! Burn itself is among it, and of Burn what a layer is made of; so is `Arc`, in which chains and datasets are shared.

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
        Forward, HostActivation, HostTensor, Init, Key, Length, OptimizerSpec, Pass, Schedule, TrainSpec,
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
struct Library;
