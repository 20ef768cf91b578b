//! The tasks of a run as they are now, for whoever asks it.

use hydra_core::TaskId;
use hydra_engine::{EvaluationKind, RunEvent, TaskState};
use serde_json::{Value, json};

/// The tasks that the run has or had, in the order of their numbers.
#[derive(Debug, Default)]
pub(crate) struct TaskTable(Vec<Row>);

/// A task as it is now.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) state: &'static str,
    /// Minibatches that it has trained, and is to train in all.
    pub(crate) minibatch: usize,
    minibatches: usize,
    train_loss: Option<f64>,
    validation_loss: Option<f64>,
}

impl Row {
    /// A task that has not begun.
    pub(crate) fn waiting(name: &str, minibatch: usize, minibatches: usize) -> Self {
        let (name, state, train_loss, validation_loss) = (name.to_owned(), "waiting", None, None);
        Self { name, state, minibatch, minibatches, train_loss, validation_loss }
    }

    /// Minibatches that it is to train in all.
    pub(crate) fn minibatches(&self) -> usize {
        self.minibatches
    }

    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, "done" | "stopped" | "failed")
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "task": self.name, "state": self.state, "minibatch": self.minibatch, "minibatches": self.minibatches,
            "train_loss": self.train_loss, "validation_loss": self.validation_loss,
        })
    }
}

impl TaskTable {
    pub(crate) fn rows(&self) -> &[Row] {
        &self.0
    }

    pub(crate) fn row(&self, name: &str) -> Option<&Row> {
        self.0.iter().find(|row| row.name == name)
    }

    /// The name of a task.
    pub(crate) fn name(&self, task: TaskId) -> Option<&str> {
        self.0.get(task.0).map(|row| row.name.as_str())
    }

    /// A task that was paused was told to go on.
    pub(crate) fn goes_on(&mut self, name: &str) {
        let paused = self.0.iter_mut().find(|row| row.name == name && row.state == "paused");
        paused.into_iter().for_each(|row| row.state = "running");
    }

    pub(crate) fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Admitted(admission) => {
                let row = |task: &hydra_engine::AdmittedTask| Row::waiting(&task.name, 0, task.steps);
                self.0.extend(admission.tasks.iter().map(row));
            }
            RunEvent::Submitted { admitted, .. } => {
                self.0.push(Row::waiting(&admitted.name, 0, admitted.steps));
            }
            RunEvent::Began { task, .. } => self.change(*task, |row| row.state = "running"),
            RunEvent::Resumed { task, step, .. } => self.change(*task, |row| row.minibatch = *step),
            RunEvent::Minibatch { task, step, loss, .. } => self.change(*task, |row| {
                (row.minibatch, row.train_loss, row.state) = (step + 1, Some(*loss), "running");
            }),
            RunEvent::Evaluated { task, kind, result, .. } if *kind != EvaluationKind::Test => {
                self.change(*task, |row| row.validation_loss = Some(result.loss));
            }
            RunEvent::Paused { task, step, .. } => {
                self.change(*task, |row| (row.minibatch, row.state) = (*step, "paused"));
            }
            RunEvent::Ended { task, state, .. } => self.change(*task, |row| {
                row.state = match state {
                    TaskState::Done => "done",
                    TaskState::Stopped => "stopped",
                    TaskState::Failed => "failed",
                };
            }),
            _ => {}
        }
    }

    fn change(&mut self, task: TaskId, change: impl FnOnce(&mut Row)) {
        if let Some(row) = self.0.get_mut(task.0) {
            change(row);
        }
    }
}
