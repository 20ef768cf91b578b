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
pub(crate) mod export;
mod forks;
pub(crate) mod generation;
mod labelled;
pub(crate) mod logged;
pub(crate) mod memory_plan;
pub(crate) mod model;
pub(crate) mod orchestrator;
mod origin;
mod own;
mod pairs;
pub(crate) mod predict;
mod prediction;
mod reference;
pub(crate) mod reservations;
pub(crate) mod rows_out;
pub(crate) mod run;
mod samples;
mod search;
mod splits;
pub(crate) mod synthetic;
mod task_table;
mod tasks;
mod times;
pub(crate) mod watching;
mod ways_out;

pub(crate) use model::{Model, quantized};
pub(crate) use orchestrator::{
    Both, Environment, admit, decode_memory, devices, evaluating, note_of_cuts, note_of_decoding,
    note_of_memory, orchestrator, without_task,
};
pub use own::OwnModel;
pub(crate) use own::Registered;
pub(crate) use reference::score_with_base;
pub(crate) use splits::context_of;
pub(crate) use synthetic::Synthetic;
