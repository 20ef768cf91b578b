//! The current state of a run's tasks, for status requests.

use hydra_core::TaskId;
use hydra_engine::{EvaluationKind, RunEvent, TaskState};
use serde_json::{Value, json};

/// All tasks of the run, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct TaskTable(Vec<TaskRow>);

/// The current state of a task.
#[derive(Clone, Debug)]
pub(crate) struct TaskRow {
    pub(crate) name: String,
    pub(crate) state: &'static str,
    /// Minibatches trained, and in total.
    pub(crate) minibatch: usize,
    minibatches: usize,
    train_loss: Option<f64>,
    validation_loss: Option<f64>,
}

impl TaskRow {
    /// Returns a task that has not started.
    pub(crate) fn waiting(name: &str, minibatch: usize, minibatches: usize) -> Self {
        let (name, state, train_loss, validation_loss) = (name.to_owned(), "waiting", None, None);
        Self { name, state, minibatch, minibatches, train_loss, validation_loss }
    }

    /// Returns the total minibatches.
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
    pub(crate) fn rows(&self) -> &[TaskRow] {
        &self.0
    }

    pub(crate) fn row(&self, name: &str) -> Option<&TaskRow> {
        self.0.iter().find(|row| row.name == name)
    }

    /// Returns the name of a task.
    pub(crate) fn name(&self, task: TaskId) -> Option<&str> {
        self.0.get(task.0).map(|row| row.name.as_str())
    }

    /// Marks a paused task as running.
    pub(crate) fn mark_resumed(&mut self, name: &str) {
        let paused = self.0.iter_mut().find(|row| row.name == name && row.state == "paused");
        paused.into_iter().for_each(|row| row.state = "running");
    }

    pub(crate) fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Admitted(admission) => {
                let row = |task: &hydra_engine::AdmittedTask| TaskRow::waiting(&task.name, 0, task.steps);
                self.0.extend(admission.tasks.iter().map(row));
            }
            RunEvent::Submitted { admitted, .. } => {
                self.0.push(TaskRow::waiting(&admitted.name, 0, admitted.steps));
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

    fn change(&mut self, task: TaskId, change: impl FnOnce(&mut TaskRow)) {
        if let Some(row) = self.0.get_mut(task.0) {
            change(row);
        }
    }
}
