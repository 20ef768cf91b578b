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
mod event;
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
pub use differences::shown;
pub(crate) use directory::{
    FileBytes, MLFLOW, MODELS, REFERENCE, SCHEDULE, TENSORBOARD, TaskFiles, WORKLOAD,
};
pub use directory::{
    METRICS, PAGE, REPORT, RunDir, SOCKET, SPEC, TRACE, is_taken, is_unfinished, read_report, write_in,
};
pub use event::{LogLine, LoggedEvaluation, LoggedEvent, Number, Written};
pub use follower::Follower;
pub(crate) use follower::{length, lines_from};
pub(crate) use inputs::Inputs;
pub use journal::Journal;
pub(crate) use keep_best::{BestModels, without_removed};
pub use leaderboard::Report;
pub use merged::Merged;
pub use naming::TrialNames;
pub use paths::{check_not_read, could_not, remove_file};
pub(crate) use paths::{entries, lies_in};
pub(crate) use run_command::CommandLog;
pub use run_command::{RunCommand, read_commands};
pub(crate) use run_log::{ConfiguredTask, SharedRunLog};
pub use samples::samples;
pub use searched::search_progress;
pub(crate) use searched::{Origin, PlannedTask, SearchLog, until};
pub use spec::CommandName;
pub use spec::RunSpec;
pub use standings::ranked;
pub use timeline::last_spans;
