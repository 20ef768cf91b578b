//! Sessions with the engine: creates models, data, devices and the orchestrator from settings, and runs them.
//!
//! The module may use every crate below and every module below it. It reads flags only through `settings`, and prints results
//! only through [`Environment::print`].

mod best;
mod controlled;
mod controller;
mod data;
mod endings;
mod explain;
pub mod export;
mod forks;
pub mod generation;
mod labelled;
pub(crate) mod logged;
pub(crate) mod memory_plan;
pub mod model;
mod orchestrator;
mod origin;
mod own;
mod pairs;
pub mod predict;
mod prediction;
mod reference;
pub(crate) mod reservations;
pub mod rows_out;
pub mod run;
mod samples;
mod search;
mod splits;
pub(crate) mod synthetic;
mod task_table;
mod tasks;
mod times;
pub mod watching;
mod ways_out;

pub use model::Model;
pub use model::{quantized, with_frozen_dtype};
pub use orchestrator::orchestrator;
pub use orchestrator::{
    Both, Environment, admit, decode_memory, devices, evaluating, note_of_cuts, note_of_decoding,
    note_of_memory, without_task,
};
pub use own::OwnModel;
pub use own::Registered;
pub use reference::score_with_base;
pub use splits::context_of;
pub use synthetic::Synthetic;
