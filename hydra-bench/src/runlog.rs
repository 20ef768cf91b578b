//! The run log: every event of a run as a line of `metrics.jsonl`, every span in the trace.

use crate::schedule::Timeline;
use crate::trace::TraceWriter;
use hydra_engine::{EvaluationKind, Observer, RunEvent, TaskState};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufWriter, LineWriter, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Listens to a run and writes what it hears.
pub(crate) struct RunLog {
    tasks: Vec<String>,
    metrics: LineWriter<File>,
    trace: TraceWriter<BufWriter<File>>,
    timeline: Timeline,
    failed: Option<io::Error>,
}

/// The observer's end of a run log that the command keeps.
#[derive(Clone)]
pub(crate) struct SharedRunLog(Arc<Mutex<Option<RunLog>>>);

impl SharedRunLog {
    /// A log of these tasks on these devices.
    pub(crate) fn new(
        metrics: File,
        trace: File,
        tasks: Vec<String>,
        devices: &[String],
    ) -> io::Result<Self> {
        let log = RunLog {
            timeline: Timeline::new(devices.len()),
            tasks,
            metrics: LineWriter::new(metrics),
            trace: TraceWriter::new(BufWriter::new(trace), devices)?,
            failed: None,
        };
        Ok(Self(Arc::new(Mutex::new(Some(log)))))
    }

    /// Ends the log and gives the compute spans, for the picture of the schedule.
    ///
    /// # Errors
    /// The first error of writing the log during the run.
    pub(crate) fn finish(&self) -> io::Result<Timeline> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut log = log.ok_or_else(|| io::Error::other("the run log has ended before"))?;
        if let Some(error) = log.failed.take() {
            return Err(error);
        }
        log.metrics.flush()?;
        log.trace.finish()?;
        Ok(log.timeline)
    }
}

impl Observer for SharedRunLog {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let Some(log) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // A full disk must not end the training; the first error is told at the end.
            if log.failed.is_none() {
                log.failed = log.write(event).err();
            }
        }
    }
}

impl RunLog {
    fn write(&mut self, event: &RunEvent<'_>) -> io::Result<()> {
        if let RunEvent::Span(span) = event {
            self.timeline.push(span);
            let task = self.tasks.get(span.task.0).map_or("", String::as_str);
            return self.trace.span(span, task);
        }
        let Some(line) = line(event, &self.tasks) else { return Ok(()) };
        serde_json::to_writer(&mut self.metrics, &line)?;
        self.metrics.write_all(b"\n")
    }
}

/// The line of an event; spans and admissions have none. Numbers that JSON has not (NaN) become `null`.
fn line(event: &RunEvent<'_>, tasks: &[String]) -> Option<Value> {
    let name = |task: &hydra_core::TaskId| tasks.get(task.0);
    Some(match event {
        RunEvent::Admitted(_) | RunEvent::Span(_) => return None,
        RunEvent::Minibatch { task, step, steps, loss, rate, units, at_s } => json!({
            "event": "minibatch", "task": name(task), "step": step, "steps": steps, "loss": loss,
            "rate": rate, "units": units, "at_s": at_s,
        }),
        RunEvent::Evaluated { task, kind, step, result, at_s } => json!({
            "event": "evaluation", "task": name(task), "kind": kind_name(*kind), "step": step,
            "loss": result.loss, "perplexity": result.perplexity,
            "predicted_tokens": result.predicted_tokens, "at_s": at_s,
        }),
        RunEvent::Ended { task, state, error, at_s } => json!({
            "event": "end", "task": name(task), "state": state_name(*state), "error": error, "at_s": at_s,
        }),
        RunEvent::Resumed { task, step, steps, at_s } => json!({
            "event": "resumed", "task": name(task), "step": step, "steps": steps, "at_s": at_s,
        }),
        RunEvent::Checkpointed { task, step, bytes, seconds, at_s } => json!({
            "event": "checkpoint", "task": name(task), "step": step, "bytes": bytes, "seconds": seconds,
            "at_s": at_s,
        }),
        RunEvent::CheckpointFailed { task, step, error, at_s } => json!({
            "event": "checkpoint_failed", "task": name(task), "step": step, "error": error, "at_s": at_s,
        }),
        RunEvent::Stopping => json!({ "event": "stopping" }),
    })
}

fn kind_name(kind: EvaluationKind) -> &'static str {
    match kind {
        EvaluationKind::Initial => "initial",
        EvaluationKind::Periodic => "periodic",
        EvaluationKind::Validation => "validation",
        EvaluationKind::Test => "test",
    }
}

/// The state as reports write it.
pub(crate) fn state_name(state: TaskState) -> &'static str {
    match state {
        TaskState::Done => "done",
        TaskState::Failed => "failed",
        TaskState::Stopped => "stopped",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{DeviceId, TaskId};
    use hydra_engine::{Evaluation, Span, Track, Work};

    #[test]
    fn every_event_is_a_line_and_every_span_a_trace_event() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(dir.path().join(name)).unwrap();
        let mut log = SharedRunLog::new(file("m"), file("t"), vec!["one".into()], &["cpu:0".into()]).unwrap();
        let task = TaskId(0);
        log.observe(&RunEvent::Minibatch {
            task,
            step: 0,
            steps: 2,
            loss: f64::NAN,
            rate: 0.1,
            units: 64,
            at_s: 1.0,
        });
        let result = Evaluation::of(2.0, 1);
        log.observe(&RunEvent::Evaluated { task, kind: EvaluationKind::Test, step: 1, result, at_s: 2.0 });
        log.observe(&RunEvent::Ended { task, state: TaskState::Failed, error: Some("broke"), at_s: 3.0 });
        let span = Span {
            track: Track::Compute(DeviceId(0)),
            task,
            work: Work::Forward,
            shard: 0,
            step: 0,
            start_s: 0.0,
            end_s: 1.0,
        };
        log.observe(&RunEvent::Span(span));
        assert_eq!(log.finish().unwrap().end_s(), 1.0);
        assert!(log.finish().is_err(), "a log ends once");
        let text = std::fs::read_to_string(dir.path().join("m")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[0]["event"], &lines[0]["loss"]), (&json!("minibatch"), &Value::Null));
        assert_eq!((&lines[1]["kind"], &lines[1]["task"]), (&json!("test"), &json!("one")));
        assert_eq!(lines[2]["error"], "broke");
        let trace: Value = serde_json::from_slice(&std::fs::read(dir.path().join("t")).unwrap()).unwrap();
        assert!(trace["traceEvents"].as_array().unwrap().iter().any(|event| event["ph"] == "X"));
    }
}
