//! The run log: writes every event of a run as a timestamped line of `metrics.jsonl`, and every span to the trace.

use crate::control::Control;
use crate::plots::schedule::Timeline;
use crate::run_dir::event::{LogLine, LoggedEvaluation, LoggedEvent, Number, Written};
use crate::run_dir::trace::TraceWriter;
use hydra_core::TaskId;
use hydra_engine::{Observer, RunEvent, Skipped};
use serde::Serialize;
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// The files of a run log. A failing file stops neither training nor the other files; its first error is reported at the end.
pub(crate) struct RunLog {
    tasks: Vec<String>,
    metrics: LineFile,
    /// Seconds of the run before it was resumed.
    from_s: f64,
    /// The trace, or the error that ended it.
    trace: io::Result<TraceWriter<BufWriter<File>>>,
    timeline: Timeline,
    /// The embedding program, if any, which reads the lines.
    control: Option<Control>,
}

/// The results of a finished log.
pub(crate) struct FinishedLog {
    /// Compute spans for the plot of the schedule.
    pub(crate) timeline: Timeline,
    pub(crate) metrics: io::Result<()>,
    pub(crate) trace: io::Result<()>,
}

/// A shared handle of a run log: the engine's observer and the command use it.
#[derive(Clone)]
pub(crate) struct SharedRunLog(Arc<Mutex<Option<RunLog>>>);

/// A task at the start of a run.
pub(crate) struct ConfiguredTask {
    pub(crate) task: String,
    pub(crate) config: Value,
    /// Total minibatches.
    pub(crate) steps: usize,
    /// The kind of items that it trains on.
    pub(crate) unit: String,
}

impl SharedRunLog {
    /// Appends to `metrics`, whose last event was `from_s` seconds after the run's start.
    pub(crate) fn new(
        metrics: File,
        trace: File,
        tasks: Vec<String>,
        on: &[String],
        from_s: f64,
        control: Option<Control>,
    ) -> io::Result<Self> {
        let (metrics, timeline) = (LineFile::new(metrics)?, Timeline::new(on.len()));
        let trace = Ok(TraceWriter::new(BufWriter::new(trace), on)?);
        control.iter().for_each(|control| control.written(metrics.whole));
        let log = RunLog { tasks, metrics, from_s, trace, timeline, control };
        Ok(Self(Arc::new(Mutex::new(Some(log)))))
    }

    /// Writes a `task` event for each task: its configuration, total minibatches and kind of items.
    pub(crate) fn configurations(&self, tasks: impl IntoIterator<Item = ConfiguredTask>) {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for ConfiguredTask { task, config, steps, unit } in tasks {
            let event = LoggedEvent::Task { task, config, steps: Some(steps as u64), unit: Some(unit) };
            if let Some(log) = log.as_mut() {
                log.push(event, Some(0.0));
            }
        }
    }

    /// Writes a `machine` event: the build and the processor that train from here on.
    pub(crate) fn machine(&self, machine: &Value) {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(log) = log.as_mut() {
            log.push(LoggedEvent::Machine { machine: machine.clone() }, Some(0.0));
        }
    }

    /// Finishes the log. A second call fails.
    pub(crate) fn finish(&self) -> io::Result<FinishedLog> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let log = log.ok_or_else(|| io::Error::other("the run log has been finished already"))?;
        let trace = log.trace.and_then(TraceWriter::finish).map(drop);
        Ok(FinishedLog { timeline: log.timeline, metrics: log.metrics.finish(), trace })
    }
}

impl RunLog {
    /// Writes an event with the Unix time. `at_s` are seconds since the run was started or resumed.
    fn push(&mut self, event: LoggedEvent, at_s: Option<f64>) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let time = Some(now.map_or(0.0, |now| now.as_millis() as f64 / 1e3));
        self.metrics.push(&LogLine { event, at_s: at_s.map(|at_s| self.from_s + at_s), time });
        self.control.iter().for_each(|control| control.written(self.metrics.whole));
    }
}

impl Observer for SharedRunLog {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(log) = log.as_mut() else { return };
        if let RunEvent::Admitted(admission) = event {
            for Skipped { name, reason, .. } in &admission.skipped {
                let (task, reason) = (name.clone(), Some(reason.to_string()));
                log.push(LoggedEvent::Skipped { task, reason }, Some(0.0));
            }
        }
        if let RunEvent::Submitted { admitted, .. } = event {
            log.tasks.push(admitted.name.clone());
        }
        if let RunEvent::Span(span) = event {
            log.timeline.push(span);
            let task = log.tasks.get(span.task.0).map_or("", String::as_str);
            if let Ok(trace) = &mut log.trace
                && let Err(error) = trace.span(span, task)
            {
                log.trace = Err(error);
            }
        } else if let Some((event, at_s)) = logged(event, &log.tasks) {
            log.push(event, at_s);
        }
        if let Some((event, at_s)) = samples(event, &log.tasks) {
            log.push(event, at_s);
        }
    }
}

/// A file of complete lines. A line that fails to be written is dropped; later lines are still written.
struct LineFile {
    file: File,
    /// Length of the complete lines.
    whole: u64,
    /// True if a partial line may follow them.
    torn: bool,
    failed: Option<io::Error>,
}

impl LineFile {
    /// Appends to a file.
    fn new(mut file: File) -> io::Result<Self> {
        let whole = file.seek(SeekFrom::End(0))?;
        Ok(Self { file, whole, torn: false, failed: None })
    }

    fn push(&mut self, line: &impl Serialize) {
        let text = serde_json::to_string(line).map_err(io::Error::from);
        if let Err(error) = text.and_then(|text| self.write(format!("{text}\n").as_bytes())) {
            self.failed.get_or_insert(error);
        }
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        self.mend()?;
        self.torn = true;
        self.file.write_all(line)?;
        self.torn = false;
        self.whole += line.len() as u64;
        Ok(())
    }

    /// Truncates a partial line.
    fn mend(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.whole)?;
            self.file.seek(SeekFrom::Start(self.whole))?;
            self.torn = false;
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        let mended = self.mend();
        self.failed.map_or(mended, Err)
    }
}

/// Returns the event as it is logged, and its time. Spans, admissions and progress are not logged.
fn logged(event: &RunEvent<'_>, tasks: &[String]) -> Option<(LoggedEvent, Option<f64>)> {
    let name = |task: &TaskId| tasks.get(task.0).cloned();
    let (event, at_s) = match event {
        RunEvent::Pilot { .. } | RunEvent::Admitted(_) | RunEvent::Span(_) | RunEvent::Evaluating { .. } => {
            return None;
        }
        RunEvent::Stopping => return Some((LoggedEvent::Stopping, None)),
        RunEvent::Saved { task, step, file, at_s } => {
            (LoggedEvent::Saved { task: name(task)?, step: *step as u64, file: file.to_path_buf() }, at_s)
        }
        RunEvent::Refused { task, error, at_s } => {
            let error = hydra_core::with_causes(*error);
            (LoggedEvent::Refused { task: (*task).to_owned(), error }, at_s)
        }
        RunEvent::Submitted { admitted, config, at_s, .. } => {
            let (config, unit) = ((*config).clone(), Some(admitted.data.unit.clone()));
            let steps = Some(admitted.steps as u64);
            (LoggedEvent::Task { task: admitted.name.clone(), config, steps, unit }, at_s)
        }
        RunEvent::Paused { task, step, at_s } => {
            (LoggedEvent::Paused { task: name(task)?, step: *step as u64 }, at_s)
        }
        RunEvent::Began { task, at_s } => (LoggedEvent::Begin { task: name(task)? }, at_s),
        RunEvent::Minibatch { task, step, steps, loss, rate, units, at_s } => {
            let minibatch = LoggedEvent::Minibatch {
                task: name(task)?,
                step: *step as u64,
                steps: Some(*steps as u64),
                loss: Number(*loss),
                rate: Number(*rate),
                units: *units as u64,
            };
            (minibatch, at_s)
        }
        RunEvent::Evaluated { task, kind, step, result, at_s } => {
            let result = LoggedEvaluation::from(result);
            (LoggedEvent::Evaluation { task: name(task)?, kind: *kind, step: *step as u64, result }, at_s)
        }
        RunEvent::Memory { tiers, at_s } => (LoggedEvent::Memory { tiers: tiers.to_vec() }, at_s),
        RunEvent::Ended { task, state, error, written: (sha256, dir), at_s } => {
            let written =
                Written { weights_sha256: sha256.map(str::to_owned), model_dir: dir.map(Path::to_path_buf) };
            let error = error.map(str::to_owned);
            (LoggedEvent::End { task: name(task)?, state: *state, error, written }, at_s)
        }
        RunEvent::Resumed { task, step, steps, at_s } => {
            let (step, steps) = (*step as u64, Some(*steps as u64));
            (LoggedEvent::Resumed { task: name(task)?, step, steps }, at_s)
        }
        RunEvent::Checkpointed { task, step, bytes, seconds, at_s } => {
            let (step, bytes, seconds) = (*step as u64, *bytes, *seconds);
            (LoggedEvent::Checkpoint { task: name(task)?, step, bytes, seconds }, at_s)
        }
        RunEvent::CheckpointFailed { task, step, error, at_s } => {
            let (step, error) = (*step as u64, error.to_string());
            (LoggedEvent::CheckpointFailed { task: name(task)?, step, error }, at_s)
        }
    };
    Some((event, Some(*at_s)))
}

/// Returns the event of the texts that were generated at an evaluation, if there are any.
fn samples(event: &RunEvent<'_>, tasks: &[String]) -> Option<(LoggedEvent, Option<f64>)> {
    let RunEvent::Evaluated { task, kind, step, result, at_s } = event else { return None };
    let samples: Value = serde_json::from_str(result.rounds.as_ref()?).ok()?;
    let task = tasks.get(task.0).cloned()?;
    Some((LoggedEvent::Samples { task, kind: Some(*kind), step: *step as u64, samples }, Some(*at_s)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::schedule::span;
    use hydra_engine::{Evaluation, EvaluationKind, TaskState, TierMemory, Work};
    use serde_json::json;
    use std::collections::BTreeMap;

    fn log(metrics: File, trace: File) -> SharedRunLog {
        SharedRunLog::new(metrics, trace, vec!["one".into()], &["cpu:0".into()], 10.0, None).unwrap()
    }

    #[test]
    fn every_event_is_a_line_and_every_span_a_trace_event() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(dir.path().join(name)).unwrap();
        let mut log = log(file("m"), file("t"));
        let config = json!({ "lr": 0.5 });
        log.configurations([ConfiguredTask {
            task: "one".to_owned(),
            config,
            steps: 2,
            unit: "tokens".to_owned(),
        }]);
        let task = TaskId(0);
        let (steps, units, loss) = (2, 64, f64::NAN);
        log.observe(&RunEvent::Minibatch { task, step: 0, steps, loss, rate: 0.1, units, at_s: 1.0 });
        let result = Evaluation {
            loss: 2.0,
            perplexity: Some(7.4),
            loss_targets: 1,
            metrics: BTreeMap::from([("accuracy".to_owned(), 0.5)]),
            selected_by: None,
            rows: Vec::new(),
            rounds: None,
        };
        log.observe(&RunEvent::Evaluated { task, kind: EvaluationKind::Test, step: 1, result, at_s: 2.0 });
        let (state, error, written) = (TaskState::Failed, Some("broke"), (Some("f00d"), None));
        log.observe(&RunEvent::Ended { task, state, error, written, at_s: 3.0 });
        let [reserved_bytes, peak_bytes, budget_bytes] = [2, 3, 4];
        let tier = TierMemory { name: "cpu:0".to_owned(), reserved_bytes, peak_bytes, budget_bytes };
        log.observe(&RunEvent::Memory { tiers: &[tier], at_s: 4.0 });
        log.observe(&RunEvent::Span(span(Work::Forward, 0.0, 1.0)));
        let ended = log.finish().unwrap();
        assert_eq!(ended.timeline.end_s, 1.0);
        assert!(ended.metrics.is_ok() && ended.trace.is_ok());
        assert!(log.finish().is_err(), "a log ends once");
        let text = std::fs::read_to_string(dir.path().join("m")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 5);
        assert_eq!((&lines[0]["event"], &lines[0]["config"]["lr"]), (&json!("task"), &json!(0.5)));
        let at_s: Vec<f64> = lines.iter().map(|line| line["at_s"].as_f64().unwrap()).collect();
        assert_eq!(at_s, [10.0, 11.0, 12.0, 13.0, 14.0], "the seconds go on");
        let time = |line: &Value| line["time"].as_f64().unwrap();
        assert!(lines.iter().all(|line| time(line) > 1.7e9), "the clock is said");
        let lines = &lines[1..];
        assert_eq!((&lines[0]["event"], &lines[0]["loss"]), (&json!("minibatch"), &Value::Null));
        assert_eq!((&lines[1]["kind"], &lines[1]["task"]), (&json!("test"), &json!("one")));
        assert_eq!((&lines[1]["perplexity"], &lines[1]["predicted_tokens"]), (&json!(7.4), &json!(1)));
        assert_eq!((&lines[2]["error"], &lines[2]["weights_sha256"]), (&json!("broke"), &json!("f00d")));
        let tier = json!({ "name": "cpu:0", "reserved_bytes": 2, "peak_bytes": 3, "budget_bytes": 4 });
        assert_eq!((&lines[3]["event"], &lines[3]["tiers"]), (&json!("memory"), &json!([tier])));
        let trace: Value = serde_json::from_slice(&std::fs::read(dir.path().join("t")).unwrap()).unwrap();
        assert!(trace["traceEvents"].as_array().unwrap().iter().any(|event| event["ph"] == "X"));
    }

    #[test]
    fn a_trace_that_fails_harms_neither_metrics_nor_plot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = File::create(&path).unwrap();
        let mut log = log(file, File::open(&path).unwrap());
        // More than one write takes.
        (0..1000).for_each(|_| log.observe(&RunEvent::Span(span(Work::Forward, 0.0, 1.0))));
        log.observe(&RunEvent::Stopping);
        let ended = log.finish().unwrap();
        assert_eq!(ended.timeline.end_s, 1.0);
        assert!(ended.metrics.is_ok() && ended.trace.is_err());
        let line = std::fs::read_to_string(&path).unwrap();
        assert!(line.starts_with("{\"event\":\"stopping\",\"time\":") && line.ends_with("}\n"), "{line}");
    }

    #[test]
    fn a_line_that_could_not_be_written_is_missing_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        std::fs::write(&path, "1\n").unwrap();
        let open = || File::options().write(true).open(&path).unwrap();
        let mut lines = LineFile::new(open()).unwrap();
        lines.push(&json!(2));
        // A full disk takes a part of a line, and has free space again later.
        let file = std::mem::replace(&mut lines.file, File::open(&path).unwrap());
        lines.push(&json!(3));
        std::fs::write(&path, "1\n2\n3 and a ha").unwrap();
        lines.push(&json!(4));
        lines.file = file;
        lines.push(&json!(5));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n2\n5\n");
        assert!(lines.finish().is_err(), "missing lines are reported");

        let mut lines = LineFile::new(open()).unwrap();
        let file = std::mem::replace(&mut lines.file, File::open(&path).unwrap());
        lines.push(&json!(6));
        std::fs::write(&path, "1\n2\n5\n6 and a ha").unwrap();
        lines.file = file;
        assert!(lines.finish().is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n2\n5\n", "also at the end");
    }
}
