//! A session with the engine: the model and the data, devices and the orchestrator that settings ask for.
//! It may touch every crate below and every room below it.
//! It never reads flags that are not in `settings`, and never prints results.

mod best;
mod board;
mod controller;
mod data;
mod endings;
mod explain;
mod forks;
pub(crate) mod ledger;
pub(crate) mod logged;
pub(crate) mod model;
pub(crate) mod needs;
pub(crate) mod orchestrator;
mod origin;
mod prediction;
pub(crate) mod run;
mod search;
mod steered;
pub(crate) mod synthetic;
mod tasks;
mod times;
pub(crate) mod watching;
mod ways_out;

pub(crate) use data::context_of;
pub(crate) use model::Model;
pub(crate) use orchestrator::{
    Both, Surroundings, admit, decode_memory, devices, note_of_cuts, note_of_decoding, note_of_memory,
    orchestrator,
};
pub(crate) use synthetic::Synthetic;
