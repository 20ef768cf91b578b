//! Runs: from settings to trained models, with everything that surrounds them.
//!
//! A program that runs commands imports this crate. [`session`] loads models and data, builds the orchestrator and trains the
//! tasks of a [`run_dir::RunSpec`]; [`embedded`] does so on a thread inside another program. Modules import modules below them
//! in this table, never above:
//!
//! | module | contents |
//! | --- | --- |
//! | [`embedded`] | a command inside another program: its end, its events and its errors as values |
//! | [`session`] | loading of models and data, the orchestrator, and a run of its tasks |
//! | [`dashboard`] | runs in a browser: the server and the dashboard's files |
//! | [`trackers`] | experiment trackers: TensorBoard and MLflow |
//! | [`run_dir`] | the run directory: its files, the spec, the logs |
//! | [`settings`] | groups of flags, which are also the tables of `spec.toml` |
//! | [`machine`], [`plots`] | memory, devices and drivers of the machine; plots of runs |
//! | [`terminal`] | errors and exit statuses, the log, progress, tables |
//! | [`control_socket`] | the socket that receives the commands of run control |
//! | [`control`] | the state that a command shares with an embedding program |
//!
//! Invariant: this crate computes nothing that a result depends on. It passes settings to the engine, and writes and shows the
//! results.
#![forbid(unsafe_code)]

pub mod control;
pub mod control_socket;
pub mod dashboard;
pub mod embedded;
pub mod machine;
pub mod plots;
pub mod run_dir;
pub mod session;
pub mod settings;
pub mod terminal;
pub mod trackers;
