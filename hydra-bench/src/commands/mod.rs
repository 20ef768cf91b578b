//! The commands, one file each: flags that are theirs alone, and what they do with the rooms below.
//! They may touch everything but the command line that calls them.
//! They never compute what a result depends on.

pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod ctl;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod explain;
pub(crate) mod man;
pub(crate) mod partition;
pub(crate) mod report;
pub(crate) mod resume;
pub(crate) mod select;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod step;
pub(crate) mod train;
pub(crate) mod watch;
