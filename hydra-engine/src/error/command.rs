//! The errors of commands to a run.

use super::EngineError;

/// The reasons for which a command to a run could not be carried out. The run goes on as it did.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The run is over.
    #[error("the run is over")]
    Over,
    /// No task of the run has this name.
    #[error("no task is called `{task}`: the run has {}", known.join(", "))]
    NoTask {
        /// The name.
        task: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// The task is over.
    #[error("task `{task}` is over: nothing can be done with it any more")]
    Ended {
        /// The task.
        task: String,
    },
    /// The task trains no further.
    #[error(
        "task `{task}` has trained its last minibatch, or is told to end: nothing can be done with it any more"
    )]
    Ending {
        /// The task.
        task: String,
    },
    /// A place that the task has passed, or will never come to.
    #[error("task `{task}` is past minibatch {at}, or ends before: give one from {first} to {last}")]
    Place {
        /// The task.
        task: String,
        /// The minibatches that were asked for.
        at: usize,
        /// The fewest that it can pause after.
        first: usize,
        /// The most.
        last: usize,
    },
    /// A task that is not of the shape that was measured.
    #[error(
        "task `{task}` is not of the shape of `{like}`: its {what} is another, and a run measures nothing while it goes on"
    )]
    Shape {
        /// The task.
        task: String,
        /// The task whose plan it was to have.
        like: String,
        /// What differs.
        what: &'static str,
    },
    /// A task whose plan nobody else can have.
    #[error("no task can be added beside `{task}`: {why}")]
    NoSpace {
        /// The task.
        task: String,
        /// The obstacle, and what to do.
        why: &'static str,
    },
    /// Something that a run could have been refused for, or that failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}
