//! The commands, one file each: their own flags and their execution.
//! They depend on every module below `cli`, which calls them.
//! They compute nothing that a result depends on.

pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod ctl;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod explain;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod man;
pub(crate) mod partition;
pub(crate) mod predict;
pub(crate) mod report;
pub(crate) mod resume;
pub(crate) mod select;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod step;
pub(crate) mod train;
pub(crate) mod watch;
