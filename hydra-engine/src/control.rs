//! Steering a run that goes on: commands from other threads, or from its observer.

use crate::error::CommandError;
use crate::train_task::TrainTask;
use crossbeam_channel::{Receiver, Sender, bounded};
use hydra_core::TaskId;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// A command to a run. Each takes effect between two minibatches of its task, so that what comes of it is exact.
///
/// Minibatches are counted from a task's beginning: one that pauses at 30 has trained 30, is evaluated if its spec says so
/// after 30, and trains no further until it is told to.
#[derive(Clone)]
pub enum Command {
    /// Pauses a task after so many minibatches: as soon as the minibatch that has begun is over, where none are given.
    Pause {
        /// The task's name.
        task: String,
        /// The minibatches that it is to have trained, no fewer than have begun.
        at: Option<usize>,
    },
    /// Lets a task go on that is paused, or will be: to its end, or until it pauses again after so many minibatches.
    Continue {
        /// The task's name.
        task: String,
        /// The minibatches that it is to have trained.
        until: Option<usize>,
    },
    /// Ends a task as [`TrainTask::stop_flag`] does: what it has is written, and kept.
    Stop {
        /// The task's name.
        task: String,
    },
    /// Ends a task after so many minibatches, with the evaluation that its spec has there: as soon as the minibatch that has
    /// begun is over, where none are given. What it has is written, and kept. One that has not begun, or stands there without
    /// its masters, begins first.
    End {
        /// The task's name.
        task: String,
        /// The minibatches that it is to have trained, no fewer than have begun.
        at: Option<usize>,
    },
    /// Changes nothing, and answers where a command would take effect.
    Place {
        /// The task's name.
        task: String,
        /// The minibatches that it is to have trained; at the next opportunity, where none are given.
        at: Option<usize>,
    },
    /// Changes nothing, and answers whether the task could be [added](Self::Submit) now.
    Check {
        /// The task, without what it begins with.
        task: Box<TrainTask>,
        /// The name of a task of this run of the same shape, or of a shape.
        like: String,
    },
    /// Writes the state that a task has after so many minibatches into a file, a checkpoint from which others can be
    /// [forked](TrainTask::fork_from). The answer comes when the file is whole. The task then goes on.
    Save {
        /// The task's name.
        task: String,
        /// The minibatches that it is to have trained, no fewer than have begun; at the next opportunity, where none are given.
        at: Option<usize>,
        /// The file, which is replaced.
        file: PathBuf,
    },
    /// Adds a task, which begins when there is room for it. Nothing is measured while a run goes on: it has the plan of a task
    /// of the same shape, or of a shape that was [measured](crate::Orchestrator::submit_shape) when the run began.
    Submit {
        /// The task.
        task: Box<TrainTask>,
        /// The name of a task of this run of the same shape, or of a shape: with the same chain and datasets, and as large
        /// minibatches.
        like: String,
    },
}

impl Command {
    /// The name of the task that it is about.
    pub fn task(&self) -> &str {
        match self {
            Self::Pause { task, .. }
            | Self::Continue { task, .. }
            | Self::Stop { task }
            | Self::End { task, .. }
            | Self::Place { task, .. }
            | Self::Save { task, .. } => task,
            Self::Submit { task, .. } | Self::Check { task, .. } => &task.name,
        }
    }

    /// Returns true if it changes nothing, whatever the answer.
    pub(crate) fn only_asks(&self) -> bool {
        matches!(self, Self::Place { .. } | Self::Check { .. })
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |f: &mut fmt::Formatter<'_>, name: &str, at: &Option<usize>| {
            f.debug_struct(name).field("task", &self.task()).field("at", at).finish()
        };
        match self {
            Self::Pause { at, .. } => named(f, "Pause", at),
            Self::Continue { until, .. } => named(f, "Continue", until),
            Self::Save { at, .. } => named(f, "Save", at),
            Self::Stop { .. } => named(f, "Stop", &None),
            Self::End { at, .. } => named(f, "End", at),
            Self::Place { at, .. } => named(f, "Place", at),
            Self::Submit { .. } => named(f, "Submit", &None),
            Self::Check { .. } => named(f, "Check", &None),
        }
    }
}

/// Where a command takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The task.
    pub task: TaskId,
    /// The minibatches that it has trained when the command takes effect.
    pub step: usize,
}

/// The answer to a command, which may not be there yet.
#[derive(Debug)]
pub struct Answer(Receiver<Result<Effect, CommandError>>);

impl Answer {
    /// Waits for the answer. An observer must not: the run waits for it.
    ///
    /// # Errors
    /// The reason for which the command could not be carried out.
    pub fn wait(self) -> Result<Effect, CommandError> {
        self.0.recv().unwrap_or(Err(CommandError::Over))
    }

    /// The answer, if it is there.
    pub fn get(&self) -> Option<Result<Effect, CommandError>> {
        self.0.try_recv().ok()
    }
}

/// A command with who waits for its answer.
pub(crate) struct Asked {
    pub command: Command,
    pub answer: Sender<Result<Effect, CommandError>>,
}

/// Steers a run that it was [given to](crate::Orchestrator::control), from any thread and for as long as the run goes on. Clones
/// steer the same run.
#[derive(Clone, Default)]
pub struct RunControl(Arc<Mutex<Commands>>);

#[derive(Default)]
struct Commands {
    asked: Vec<Asked>,
    over: bool,
}

impl fmt::Debug for RunControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunControl").finish_non_exhaustive()
    }
}

impl RunControl {
    /// A control of a run that has not begun. Commands wait until it has.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a command. Commands are carried out in the order in which they are given.
    pub fn send(&self, command: Command) -> Answer {
        let (answer, answered) = bounded(1);
        self.with(|commands| {
            // Where the run is over, the sender is dropped, which says so.
            if !commands.over {
                commands.asked.push(Asked { command, answer });
            }
        });
        Answer(answered)
    }

    /// Takes the commands that were given.
    pub(crate) fn take(&self) -> Vec<Asked> {
        self.with(|commands| std::mem::take(&mut commands.asked))
    }

    /// Returns whether nobody else could give one.
    pub(crate) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Takes no more commands.
    pub(crate) fn close(&self) {
        self.with(|commands| *commands = Commands { asked: Vec::new(), over: true });
    }

    fn with<T>(&self, work: impl FnOnce(&mut Commands) -> T) -> T {
        // A list of commands is whole whatever panicked.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(control: &RunControl) -> Answer {
        control.send(Command::Stop { task: "a".to_owned() })
    }

    #[test]
    fn a_run_that_is_over_answers() {
        let control = RunControl::new();
        let waiting = stop(&control);
        assert!(waiting.get().is_none());
        control.close();
        assert!(matches!(waiting.wait(), Err(CommandError::Over)));
        assert!(matches!(stop(&control).wait(), Err(CommandError::Over)));
    }

    #[test]
    fn commands_are_taken_once_and_in_their_order() {
        let control = RunControl::new();
        let answers: Vec<Answer> = (0..3).map(|_| stop(&control.clone())).collect();
        for (step, asked) in control.take().into_iter().enumerate() {
            asked.answer.send(Ok(Effect { task: TaskId(0), step })).unwrap();
        }
        assert!(control.take().is_empty());
        let steps: Vec<usize> = answers.into_iter().map(|answer| answer.wait().unwrap().step).collect();
        assert_eq!(steps, [0, 1, 2]);
    }
}
