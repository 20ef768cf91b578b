//! The events of a run as lines of `metrics.jsonl`: the form in which they are written, read and followed.

use hydra_core::Metric;
use hydra_engine::{Evaluation, EvaluationKind, TaskState, TierMemory};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogLine {
    /// The event.
    #[serde(flatten)]
    pub event: LoggedEvent,
    /// Seconds since the start of the run, summed over its interruptions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_s: Option<f64>,
    /// Unix time in seconds; `None` in files of versions that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
}

/// An event of a run. `task` is the name of its task, and `step` counts minibatches.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum LoggedEvent {
    /// A task of the run.
    Task {
        /// The name of the task.
        task: String,
        /// Its configuration, as in the report.
        #[serde(default)]
        config: Value,
        /// Total minibatches.
        steps: Option<u64>,
        /// The kind of items that it trains on, such as tokens.
        unit: Option<String>,
    },
    /// The build and the processor that train from here on.
    Machine {
        /// The machine, as in the report.
        machine: Value,
    },
    /// A task that can never fit, and without which the run continues.
    #[serde(alias = "left_out")]
    Skipped {
        /// The name of the task.
        task: String,
        /// Why it does not fit.
        reason: Option<String>,
    },
    /// The initial weights of a task are in memory.
    Begin {
        /// The name of the task.
        task: String,
    },
    /// A minibatch was trained.
    Minibatch {
        /// The name of the task.
        task: String,
        /// The minibatch, from zero.
        step: u64,
        /// Total minibatches.
        steps: Option<u64>,
        /// The loss before the update.
        loss: Number,
        /// The learning rate.
        #[serde(default)]
        rate: Number,
        /// The tokens, images or items in it.
        #[serde(default)]
        units: u64,
    },
    /// The weights after `step` minibatches were evaluated.
    Evaluation {
        /// The name of the task.
        task: String,
        /// The data and the time of the evaluation.
        kind: EvaluationKind,
        /// Minibatches done.
        step: u64,
        /// The result.
        #[serde(flatten)]
        result: LoggedEvaluation,
    },
    /// Texts were generated at an evaluation.
    Samples {
        /// The name of the task.
        task: String,
        /// The data and the time of the evaluation.
        kind: Option<EvaluationKind>,
        /// Minibatches done.
        step: u64,
        /// For each sample prompt `prompt` and `text`.
        samples: Value,
    },
    /// A checkpoint was written.
    Checkpoint {
        /// The name of the task.
        task: String,
        /// Minibatches done.
        step: u64,
        /// The size of the file.
        bytes: u64,
        /// The time that writing took.
        seconds: f64,
    },
    /// A checkpoint could not be written, and the task continues.
    CheckpointFailed {
        /// The name of the task.
        task: String,
        /// Minibatches done.
        step: u64,
        /// The reason.
        error: String,
    },
    /// A task waits for a command.
    Paused {
        /// The name of the task.
        task: String,
        /// Minibatches done.
        step: u64,
    },
    /// A task continues from a checkpoint.
    Resumed {
        /// The name of the task.
        task: String,
        /// Minibatches done.
        step: u64,
        /// Total minibatches.
        steps: Option<u64>,
    },
    /// The state of a task was saved; other tasks can be forked from it.
    Saved {
        /// The name of the task.
        task: String,
        /// Minibatches done.
        step: u64,
        /// The file.
        file: PathBuf,
    },
    /// A command was refused.
    Refused {
        /// The name in the command; there may be no such task.
        task: String,
        /// The reason.
        error: String,
    },
    /// The memory of the run at this time.
    Memory {
        /// Host memory, the disk if masters are there, and the devices.
        tiers: Vec<TierMemory>,
    },
    /// A task ended.
    End {
        /// The name of the task.
        task: String,
        /// How it ended.
        #[serde(default = "done")]
        state: TaskState,
        /// The error message of a failed task.
        error: Option<String>,
        /// The final weights.
        #[serde(flatten)]
        written: Written,
    },
    /// The run was interrupted.
    Stopping,
}

/// The result of an evaluation, under the keys of a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoggedEvaluation {
    /// The mean loss.
    pub loss: Number,
    /// The targets of the loss.
    pub predicted_tokens: Option<u64>,
    /// The perplexity of a language model.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<Number>,
    /// Other metrics, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, Number>,
    /// The metric by which the weights are selected, if it is not the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selected_by: Option<Metric>,
}

impl From<&Evaluation> for LoggedEvaluation {
    fn from(result: &Evaluation) -> Self {
        Self {
            loss: Number(result.loss),
            predicted_tokens: Some(result.loss_targets),
            perplexity: result.perplexity.map(Number),
            metrics: result.metrics.iter().map(|(name, value)| (name.clone(), Number(*value))).collect(),
            selected_by: result.selected_by.clone(),
        }
    }
}

/// The final weights of a task.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Written {
    /// SHA-256 of the parameters.
    pub weights_sha256: Option<String>,
    /// The directory of the model.
    pub model_dir: Option<PathBuf>,
}

/// A number that is `null` in JSON if it is not finite, and NaN if it is read from `null`.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Number(pub f64);

impl Number {
    /// The number, if it is finite.
    pub fn finite(self) -> Option<f64> {
        Some(self.0).filter(|number| number.is_finite())
    }
}

impl Default for Number {
    fn default() -> Self {
        Self(f64::NAN)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(from)?.map_or_else(Self::default, Self))
    }
}

/// Reads a number that is there, though it may be `null`.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Number>, D::Error> {
    Number::deserialize(from).map(Some)
}

/// The state of ended tasks in files of versions that did not record it.
fn done() -> TaskState {
    TaskState::Done
}

impl LoggedEvent {
    /// The name of the task that the event belongs to. A refused command belongs to none.
    pub fn task(&self) -> Option<&str> {
        match self {
            Self::Task { task, .. }
            | Self::Skipped { task, .. }
            | Self::Begin { task }
            | Self::Minibatch { task, .. }
            | Self::Evaluation { task, .. }
            | Self::Samples { task, .. }
            | Self::Checkpoint { task, .. }
            | Self::CheckpointFailed { task, .. }
            | Self::Paused { task, .. }
            | Self::Resumed { task, .. }
            | Self::Saved { task, .. }
            | Self::End { task, .. } => Some(task),
            Self::Machine { .. } | Self::Refused { .. } | Self::Memory { .. } | Self::Stopping => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let lines = [
            json!({ "event": "task", "task": "a", "config": { "lr": 0.5 }, "steps": 2, "unit": "tokens", "at_s": 0.0, "time": 1.5 }),
            json!({ "event": "minibatch", "task": "a", "step": 0, "steps": 2, "loss": null, "rate": 0.1, "units": 64, "at_s": 1.0 }),
            json!({ "event": "evaluation", "task": "a", "kind": "test", "step": 1, "loss": 2.0, "predicted_tokens": 9, "perplexity": null, "metrics": { "accuracy": 0.5 }, "at_s": 2.0 }),
            json!({ "event": "memory", "tiers": [{ "name": "cpu:0", "reserved_bytes": 2, "peak_bytes": 3, "budget_bytes": 4 }], "at_s": 3.0 }),
            json!({ "event": "checkpoint_failed", "task": "a", "step": 1, "error": "full", "at_s": 3.5 }),
            json!({ "event": "end", "task": "a", "state": "stopped", "error": null, "weights_sha256": "f00d", "model_dir": "m", "at_s": 4.0 }),
            json!({ "event": "stopping", "time": 2.5 }),
        ];
        for line in lines {
            let read: LogLine = serde_json::from_value(line.clone()).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&serde_json::to_string(&read).unwrap()).unwrap(), line);
        }
    }

    #[test]
    fn lines_of_earlier_versions_are_read_and_unknown_ones_are_not() {
        let read = |line: Value| serde_json::from_value::<LogLine>(line);
        let skipped = read(json!({ "event": "left_out", "task": "a", "reason": "too large" })).unwrap();
        assert!(matches!(skipped.event, LoggedEvent::Skipped { reason: Some(_), .. }));
        let end = read(json!({ "event": "end", "task": "a", "at_s": 3.0 })).unwrap();
        assert!(matches!(end.event, LoggedEvent::End { state: TaskState::Done, .. }));
        let minibatch = read(json!({ "event": "minibatch", "task": "a", "step": 0, "loss": 1.5 })).unwrap();
        assert!(matches!(minibatch.event, LoggedEvent::Minibatch { loss: Number(1.5), .. }));
        assert!(read(json!({ "event": "unheard", "task": "a" })).is_err());
        assert!(read(json!({ "event": "minibatch", "task": "a" })).is_err());
    }
}
