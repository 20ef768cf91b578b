//! Run control: commands to a running run from other threads or from its observer.

use crate::error::CommandError;
use crate::train_task::TrainTask;
use crossbeam_channel::{Receiver, Sender, bounded};
use hydra_core::TaskId;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// A command to a run. It takes effect between two minibatches of its task, so its result is exact.
///
/// Minibatches are counted from the start of a task: a task that pauses at 30 has trained 30 minibatches, has run the
/// evaluation after 30 if its spec has one, and trains no further until it is resumed.
#[derive(Clone)]
pub enum Command {
    /// Pauses a task after `at` minibatches, or at the end of the current minibatch.
    Pause {
        /// The task's name.
        task: String,
        /// The number of minibatches to train before the pause; at least those already started.
        at: Option<usize>,
    },
    /// Resumes a task that is or will be paused, up to its end or to the next pause after `until` minibatches.
    Continue {
        /// The task's name.
        task: String,
        /// The number of minibatches to train before the next pause.
        until: Option<usize>,
    },
    /// Ends a task as [`TrainTask::stop_flag`] does; its model is written.
    Stop {
        /// The task's name.
        task: String,
    },
    /// Ends a task after `at` minibatches, or at the end of the current minibatch, with the evaluation that its spec
    /// has there; its model is written. A task that has not started, or whose master weights are not loaded, starts
    /// first.
    End {
        /// The task's name.
        task: String,
        /// The number of minibatches to train before the end; at least those already started.
        at: Option<usize>,
    },
    /// Returns where a command would take effect; changes nothing.
    Place {
        /// The task's name.
        task: String,
        /// The number of minibatches to train; the next opportunity if `None`.
        at: Option<usize>,
    },
    /// Checks whether the task could be [added](Self::Submit) now; changes nothing.
    Check {
        /// The task, without its initial state.
        task: Box<TrainTask>,
        /// The name of a task or shape of this run with the same plan.
        like: String,
    },
    /// Writes the state of a task after `at` minibatches to a file: a checkpoint that other tasks can be
    /// [forked](TrainTask::fork_from) from. The answer arrives when the file is complete. The task then continues.
    Save {
        /// The task's name.
        task: String,
        /// The number of minibatches to train before saving, at least those already started; the next opportunity if
        /// `None`.
        at: Option<usize>,
        /// The file, which is replaced.
        file: PathBuf,
    },
    /// Adds a task, which starts when host memory allows. A running run measures nothing: the task takes the plan of
    /// a task of the same shape, or of a shape [measured](crate::Orchestrator::submit_shape) before the run.
    Submit {
        /// The task.
        task: Box<TrainTask>,
        /// The name of a task or shape of this run with the same chain, datasets and minibatch size.
        like: String,
    },
}

impl Command {
    /// The name of the task that the command concerns.
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

    /// Returns true if the command changes nothing.
    pub(crate) fn is_query(&self) -> bool {
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

/// The point at which a command takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The task.
    pub task: TaskId,
    /// Minibatches trained at that point.
    pub step: usize,
}

/// The pending answer to a command.
#[derive(Debug)]
pub struct Answer(Receiver<Result<Effect, CommandError>>);

impl Answer {
    /// Waits for the answer. An observer must not call this: the run waits for the observer.
    ///
    /// # Errors
    /// The reason why the command was refused.
    pub fn wait(self) -> Result<Effect, CommandError> {
        self.0.recv().unwrap_or(Err(CommandError::Over))
    }

    /// Returns the answer if it has arrived.
    pub fn get(&self) -> Option<Result<Effect, CommandError>> {
        self.0.try_recv().ok()
    }
}

/// A command, and the channel for its answer.
pub(crate) struct PendingCommand {
    pub command: Command,
    pub answer: Sender<Result<Effect, CommandError>>,
}

/// Controls the run that it was [passed to](crate::Orchestrator::control), from any thread, until the run ends.
/// Clones control the same run.
#[derive(Clone, Default)]
pub struct RunControl(Arc<Mutex<Commands>>);

#[derive(Default)]
struct Commands {
    asked: Vec<PendingCommand>,
    over: bool,
}

impl fmt::Debug for RunControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunControl").finish_non_exhaustive()
    }
}

impl RunControl {
    /// A control for a run that has not started. Commands wait for the start.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends a command. Commands are carried out in the order of sending.
    pub fn send(&self, command: Command) -> Answer {
        let (answer, answered) = bounded(1);
        self.with(|commands| {
            // After the run the sender is dropped, which the answer reports as `Over`.
            if !commands.over {
                commands.asked.push(PendingCommand { command, answer });
            }
        });
        Answer(answered)
    }

    /// Takes the commands that were sent.
    pub(crate) fn take(&self) -> Vec<PendingCommand> {
        self.with(|commands| std::mem::take(&mut commands.asked))
    }

    /// Returns whether no other handle exists that could send a command.
    pub(crate) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Rejects further commands.
    pub(crate) fn close(&self) {
        self.with(|commands| *commands = Commands { asked: Vec::new(), over: true });
    }

    fn with<T>(&self, work: impl FnOnce(&mut Commands) -> T) -> T {
        // A panic cannot leave a list of commands inconsistent.
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
