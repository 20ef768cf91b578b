//! The run directory: its files, its lock, the spec and the logs. Files are replaced atomically.
//!
//! The module uses the disk, `settings`, `machine`, `terminal` and the plots. It never loads a model or uses a device.

mod best;
pub(crate) mod commanded;
pub(crate) mod compared;
pub(crate) mod controlled;
pub(crate) mod differences;
pub(crate) mod directory;
pub(crate) mod drawn;
pub(crate) mod follower;
mod former;
mod group;
pub(crate) mod inputs;
pub(crate) mod journal;
pub(crate) mod keep_best;
mod leaderboard;
pub(crate) mod merged;
mod naming;
pub(crate) mod paths;
pub(crate) mod run_command;
pub(crate) mod run_log;
mod samples;
mod schedules;
pub(crate) mod searched;
mod seeds;
pub(crate) mod spec;
pub(crate) mod standings;
mod task;
pub(crate) mod timeline;
pub(crate) mod trace;

pub(crate) use commanded::add_commands;
pub(crate) use compared::compare;
pub(crate) use controlled::apply;
pub(crate) use differences::shown;
pub(crate) use directory::{
    FileBytes, METRICS, MLFLOW, MODELS, PAGE, REFERENCE, REPORT, RunDir, SCHEDULE, SOCKET, SPEC, TENSORBOARD,
    TRACE, TaskFiles, WORKLOAD, is_taken, is_unfinished, read_report, write_in,
};
pub(crate) use follower::{Follower, length, lines_from};
pub(crate) use inputs::Inputs;
pub(crate) use journal::Journal;
pub(crate) use keep_best::{BestModels, without_removed};
pub(crate) use leaderboard::Report;
pub(crate) use merged::Merged;
pub(crate) use naming::TrialNames;
pub(crate) use paths::{check_not_read, could_not, entries, lies_in, remove_file};
pub(crate) use run_command::{CommandLog, RunCommand, read_commands};
pub(crate) use run_log::{ConfiguredTask, SharedRunLog};
pub(crate) use samples::samples;
pub(crate) use searched::{Origin, PlannedTask, SearchLog, search_progress, until};
pub(crate) use spec::{CommandName, RunSpec};
pub(crate) use standings::ranked;
pub(crate) use timeline::last_spans;
