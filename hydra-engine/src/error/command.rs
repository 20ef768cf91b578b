//! The errors of commands to a run.

use super::EngineError;

/// The reason why a command to a run was refused. The run is not affected.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The run is over.
    #[error("the run is over")]
    Over,
    /// No task of the run has this name.
    #[error("no task is called `{task}`: the tasks of the run are {}", known.join(", "))]
    NoTask {
        /// The name.
        task: String,
        /// The names of the run's tasks.
        known: Vec<String>,
    },
    /// The task is over.
    #[error("task `{task}` has ended and takes no more commands")]
    Ended {
        /// The task.
        task: String,
    },
    /// The task trains no further.
    #[error("task `{task}` has trained its last minibatch or is ending, and takes no more commands")]
    Ending {
        /// The task.
        task: String,
    },
    /// A minibatch that the task has passed or will not reach.
    #[error("minibatch {at} is out of range for task `{task}`: expected {first} to {last}")]
    Place {
        /// The task.
        task: String,
        /// The requested minibatch.
        at: usize,
        /// The first one that it can pause at.
        first: usize,
        /// The last one.
        last: usize,
    },
    /// A task of another shape than the measured one.
    #[error(
        "task `{task}` cannot use the plan of `{like}`: its {what} differs, and a running run measures no new plan"
    )]
    Shape {
        /// The task.
        task: String,
        /// The task or shape whose plan it requests.
        like: String,
        /// The property that differs.
        what: &'static str,
    },
    /// A task whose plan no other task can use.
    #[error("no task can be added with the plan of `{task}`: {why}")]
    NoSpace {
        /// The task.
        task: String,
        /// The obstacle and a remedy.
        why: &'static str,
    },
    /// Any other error of the engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
}
