//! The state of an unfinished run, rebuilt from its spec and `metrics.jsonl`: a report before `report.json` exists.

use super::event::{LogLine, LoggedEvaluation, LoggedEvent, Number, Written};
use super::former::current_unit;
use crate::plots::memory::Moment;
use crate::run_dir::compared::compare;
use crate::run_dir::directory::{METRICS, PLANS, SPEC};
use crate::run_dir::paths::{could_not, safe_name};
use crate::run_dir::spec::RunSpec;
use crate::run_dir::task::LAST;
use crate::settings::Configuration;
use anyhow::{Context, Result};
use hydra_engine::{EvaluationKind, REPORT_SCHEMA, TaskState};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The state of a run after the events read so far.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    /// Tasks in grid order or, without a spec, in the order of their first events.
    pub tasks: Vec<Entry>,
    /// Seconds of the run at its last event, summed over its interruptions.
    pub at_s: f64,
    /// Unix time of the last event in seconds; `None` for files of versions that did not record it.
    pub time: Option<f64>,
    /// Memory samples of the run; empty for files of versions that did not record them.
    pub memory: Vec<Moment>,
    /// Builds and processors that trained the run, in order; empty for files of versions that did not record them.
    pub machines: Vec<Value>,
    /// The number of complete lines that are no event of this version.
    pub unread_lines: usize,
}

/// The state of a task.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    pub name: String,
    pub(crate) config: Value,
    /// `waiting` before the first event, then `running` or `paused`, and finally the state in which the task ended.
    pub(crate) state: String,
    pub(crate) error: Option<String>,
    shards: Option<usize>,
    /// Total minibatches.
    planned: Option<u64>,
    /// The loss of each minibatch; NaN if it is not finite, or its line is missing.
    losses: Vec<Number>,
    /// The kind of items that it trains on, such as tokens.
    unit: Option<String>,
    /// Items of each minibatch.
    pub(crate) units: Vec<u64>,
    evaluations: EvaluationResults,
    /// The texts generated last: minibatches done, and for each sample prompt `prompt` and `text`.
    samples: Option<(u64, Value)>,
    time: Option<f64>,
    /// The final weights, once they are written.
    written: Written,
}

/// The results of a task's evaluations.
#[derive(Clone, Debug, Default)]
struct EvaluationResults {
    initial: Option<LoggedEvaluation>,
    /// Validations during training: minibatches done, and the result.
    periodic: Vec<(u64, LoggedEvaluation)>,
    validation: Option<LoggedEvaluation>,
    test: Option<LoggedEvaluation>,
}

impl Journal {
    /// Reads the run in `dir` as far as it has been written.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(METRICS);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.with_context(|| could_not(&path, "read"))?,
        };
        let mut journal = Self::begin(dir);
        text.split_inclusive(|byte| *byte == b'\n').for_each(|line| journal.read_line(line));
        journal.count_shards(dir);
        Ok(journal)
    }

    /// Returns a journal with the tasks of the spec, before any event.
    pub(super) fn begin(dir: &Path) -> Self {
        let mut journal = Self::default();
        grid(dir).into_iter().for_each(|(name, config)| journal.entry(&name).config = config);
        journal
    }

    /// Reads the shard counts that are still unknown from the plans.
    pub(super) fn count_shards(&mut self, dir: &Path) {
        for task in self.tasks.iter_mut().filter(|task| task.shards.is_none()) {
            task.shards = shards(dir, &task.name);
        }
    }

    fn entry(&mut self, name: &str) -> &mut Entry {
        let place = self.tasks.iter().position(|task| task.name == name).unwrap_or(self.tasks.len());
        if place == self.tasks.len() {
            let (name, state) = (name.to_owned(), "waiting".to_owned());
            self.tasks.push(Entry { name, state, ..Entry::default() });
        }
        &mut self.tasks[place]
    }

    /// Records the event of a line. The last line of a file, without its end, may be incomplete and is ignored then.
    pub(super) fn read_line(&mut self, line: &[u8]) {
        match serde_json::from_slice(line) {
            Ok(line) => self.note(line),
            Err(_) => self.unread_lines += usize::from(line.ends_with(b"\n")),
        }
    }

    /// The text of a note on lines that this version cannot read; none if it read all.
    pub fn unread(&self) -> Option<String> {
        let lines = match self.unread_lines {
            0 => return None,
            1 => format!("1 line of {METRICS} is"),
            several => format!("{several} lines of {METRICS} are"),
        };
        Some(format!("{lines} unknown to this version of Hydra, and not shown"))
    }

    /// Records an event.
    pub(super) fn note(&mut self, line: LogLine) {
        let LogLine { event, at_s, time } = line;
        self.at_s = at_s.unwrap_or(self.at_s).max(self.at_s);
        self.time = time.or(self.time);
        if let Some(name) = event.task() {
            let entry = self.entry(name);
            // A configuration is repeated when a run is resumed, before the task goes on.
            if !matches!(event, LoggedEvent::Task { .. }) {
                entry.time = time.or(entry.time);
            }
            return entry.note(event);
        }
        match event {
            LoggedEvent::Machine { machine } if !self.machines.contains(&machine) => {
                self.machines.push(machine)
            }
            LoggedEvent::Memory { tiers } => self.memory.extend(at_s.map(|at_s| Moment { at_s, tiers })),
            _ => {}
        }
    }

    /// Returns the tasks under the keys of a report. `running` is true if a run holds the directory.
    pub fn report(&self, running: bool) -> Vec<Value> {
        self.tasks.iter().map(|task| task.report(running, usize::MAX)).collect()
    }

    /// Returns the same with only the last losses, as the leaderboard uses them.
    pub(crate) fn standings(&self, running: bool) -> Vec<Value> {
        self.tasks.iter().map(|task| task.report(running, LAST)).collect()
    }

    /// Returns the run so far as a JSON report.
    pub fn to_json(&self, running: bool) -> Result<String> {
        let (time, at_s, tasks) = (self.time, self.at_s, self.report(running));
        let state = if running { "running" } else { "stopped" };
        let mut json = json!({
            "schema": REPORT_SCHEMA, "state": state, "last_event_time": time, "at_s": at_s, "tasks": tasks,
        });
        compare(&mut json)?;
        Ok(format!("{}\n", serde_json::to_string_pretty(&json)?))
    }

    /// Returns the number of minibatches trained. Those that a fork inherited from its parent count once.
    pub(crate) fn trained(&self) -> usize {
        self.tasks.iter().map(|task| task.units.iter().filter(|units| **units > 0).count()).sum()
    }

    /// Returns true if every task has ended: a running run is only writing its files.
    pub fn has_ended(&self) -> bool {
        let open = |task: &Entry| matches!(task.state.as_str(), "waiting" | "running" | "paused");
        !self.tasks.is_empty() && !self.tasks.iter().any(open)
    }

    /// Returns the number of tasks in each state.
    pub fn states(tasks: &[Value]) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for task in tasks {
            *counts.entry(task["state"].as_str().unwrap_or_default()).or_insert(0) += 1;
        }
        counts
    }
}

impl Entry {
    fn note(&mut self, event: LoggedEvent) {
        let state = match &event {
            LoggedEvent::Skipped { .. } => "skipped",
            LoggedEvent::Paused { .. } => "paused",
            LoggedEvent::End { state, .. } => ended(*state),
            LoggedEvent::Task { .. }
            | LoggedEvent::Checkpoint { .. }
            | LoggedEvent::CheckpointFailed { .. }
            | LoggedEvent::Saved { .. } => &self.state,
            _ => "running",
        };
        self.state = state.to_owned();
        match event {
            LoggedEvent::Task { config, steps, unit, .. } => {
                self.config = config;
                self.planned = steps.or(self.planned);
                self.unit = unit.map(|unit| current_unit(&unit).to_owned());
            }
            LoggedEvent::Minibatch { step, steps, loss, units, .. } => {
                self.goes_on_from(step, steps);
                self.losses.push(loss);
                self.units.push(units);
            }
            LoggedEvent::Resumed { step, steps, .. } => self.goes_on_from(step, steps),
            LoggedEvent::Evaluation { kind, step, result, .. } => self.evaluations.add(kind, step, result),
            LoggedEvent::Samples { step, samples, .. } => self.samples = Some((step, samples)),
            LoggedEvent::Skipped { reason, .. } => self.error = reason,
            LoggedEvent::End { error, written, .. } => (self.error, self.written) = (error, written),
            _ => {}
        }
    }

    /// Discards the minibatches that a killed run trained after its last checkpoint, which are trained again.
    fn goes_on_from(&mut self, step: u64, planned: Option<u64>) {
        self.planned = planned.or(self.planned);
        // Lines that failed to be written are missing; the bound guards against a corrupt `step`.
        let trained = usize::try_from(step).unwrap_or(usize::MAX).min(self.losses.len() + (1 << 20));
        self.losses.resize(trained, Number::default());
        self.units.resize(trained, self.units.last().copied().unwrap_or_default());
        self.evaluations.periodic.retain(|(at, _)| *at <= step);
        (self.evaluations.validation, self.evaluations.test) = (None, None);
        (self.error, self.written) = (None, Written::default());
    }

    /// Returns the loss of each minibatch, `None` if it is not finite or unknown.
    pub fn losses(&self) -> impl ExactSizeIterator<Item = Option<f64>> {
        self.losses.iter().map(|loss| loss.finite())
    }

    /// Returns the texts generated last: minibatches done, and a list of `prompt` and `text`.
    pub(crate) fn samples(&self) -> Option<(u64, &[Value])> {
        let (step, samples) = self.samples.as_ref()?;
        Some((*step, samples.as_array()?))
    }

    /// Returns the validations before, during and after training: minibatches done, and the loss.
    pub(crate) fn validations(&self) -> Vec<(u64, Option<f64>)> {
        let loss = |result: &LoggedEvaluation| result.loss.finite();
        let first = self.evaluations.initial.iter().map(|result| (0, loss(result)));
        let periodic = self.evaluations.periodic.iter().map(|(step, result)| (*step, loss(result)));
        let last = self.evaluations.validation.iter().map(|result| (self.losses.len() as u64, loss(result)));
        first.chain(periodic).chain(last).collect()
    }

    fn report(&self, running: bool, last: usize) -> Value {
        let losses = &self.losses[self.losses.len().saturating_sub(last)..];
        let left = !running && matches!(self.state.as_str(), "running" | "paused");
        json!({
            "name": self.name, "config": self.config, "state": if left { "stopped" } else { &self.state },
            "doing": self.doing(running), "error": self.error, "shards": self.shards, "steps": self.losses.len(),
            "steps_in_all": self.planned, "losses": losses,
            "initial_validation": self.evaluations.initial, "evaluations": self.evaluations.periodic,
            "validation": self.evaluations.validation, "test": self.evaluations.test,
            "weights_sha256": self.written.weights_sha256, "model_dir": self.written.model_dir,
            "last_event_time": self.time, "unit": self.unit, "units": self.units.iter().sum::<u64>(),
        })
    }

    /// Returns the current activity of a running task.
    fn doing(&self, running: bool) -> Option<&'static str> {
        if !running || self.state != "running" {
            return None;
        }
        let trained = self.losses.len() as u64;
        Some(match self.planned {
            Some(planned) if trained >= planned && planned > 0 => "evaluating",
            _ if trained == 0 && self.evaluations.initial.is_none() => "beginning",
            _ => "training",
        })
    }
}

impl EvaluationResults {
    /// Adds the result of an evaluation after `step` minibatches.
    fn add(&mut self, kind: EvaluationKind, step: u64, result: LoggedEvaluation) {
        match kind {
            EvaluationKind::Initial => self.initial = Some(result),
            EvaluationKind::Periodic => {
                self.periodic.retain(|(at, _)| *at < step);
                self.periodic.push((step, result));
            }
            EvaluationKind::Validation => self.validation = Some(result),
            EvaluationKind::Test => self.test = Some(result),
        }
    }
}

/// The name of a final state.
fn ended(state: TaskState) -> &'static str {
    match state {
        TaskState::Done => "done",
        TaskState::Failed => "failed",
        TaskState::Stopped => "stopped",
    }
}

/// Returns the configurations of the spec's grid with their settings; empty if the spec cannot be read.
fn grid(dir: &Path) -> Vec<(String, Value)> {
    let Ok(text) = fs::read_to_string(dir.join(SPEC)) else { return Vec::new() };
    let Ok(spec) = toml::from_str::<RunSpec>(&text) else { return Vec::new() };
    let grid = spec.grid().unwrap_or_default();
    let config = |one: &Configuration| {
        let model = spec.model_of(one);
        let mut config = json!({
            "model": model.model, "batch": one.batch, "lr": one.lr, "context": model.context, "data": model.data,
        });
        one.lora.iter().for_each(|rank| config["lora"] = (*rank).into());
        config
    };
    grid.into_iter().map(|one| (one.name.clone(), config(&one))).collect()
}

/// Returns the number of shards in a task's plan.
fn shards(dir: &Path, task: &str) -> Option<usize> {
    let plan = fs::read(dir.join(PLANS).join(format!("{}.json", safe_name(task)))).ok()?;
    let plan: Value = serde_json::from_slice(&plan).ok()?;
    plan["cut_points"].as_array().map(|cuts| cuts.len() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    fn journal(lines: &[Value]) -> Journal {
        let mut journal = Journal::default();
        lines.iter().filter_map(|line| LogLine::deserialize(line).ok()).for_each(|line| journal.note(line));
        journal
    }

    fn minibatch(step: u64, loss: f64, at_s: f64) -> Value {
        json!({ "event": "minibatch", "task": "a", "step": step, "steps": 4, "loss": loss, "units": 64, "at_s": at_s, "time": 100.0 + at_s })
    }

    #[test]
    fn what_a_killed_run_trained_again_counts_once() {
        let evaluation = json!({ "event": "evaluation", "task": "a", "kind": "periodic", "step": 2, "loss": 3.5, "predicted_tokens": 9 });
        let lines = [
            json!({ "event": "task", "task": "a", "config": { "batch": 2 }, "steps": 4 }),
            json!({ "event": "task", "task": "b", "config": { "batch": 4 }, "steps": 4 }),
            minibatch(0, 5.0, 1.0),
            minibatch(1, 4.0, 2.0),
            evaluation,
            json!({ "event": "resumed", "task": "a", "step": 1, "steps": 4, "at_s": 3.0, "time": 200.0 }),
            minibatch(1, 4.0, 4.0),
        ];
        let killed = journal(&lines[..5]);
        let [a, b] = <[Value; 2]>::try_from(killed.report(false)).unwrap();
        assert_eq!((&a["state"], &a["steps"], &a["steps_in_all"]), (&"stopped".into(), &2.into(), &4.into()));
        assert_eq!(
            (&a["evaluations"][0][0], &b["state"], &b["doing"]),
            (&2.into(), &"waiting".into(), &Value::Null)
        );
        assert_eq!(killed.report(true)[0]["doing"], "training");
        let going_on = journal(&lines);
        let a = &going_on.report(true)[0];
        assert_eq!((&a["losses"], &a["evaluations"]), (&json!([5.0, 4.0]), &json!([])));
        assert_eq!((going_on.at_s, going_on.time), (4.0, Some(104.0)));
    }

    #[test]
    fn a_task_that_ended_says_how() {
        let end = json!({ "event": "end", "task": "a", "state": "failed", "error": "broke", "at_s": 3.0 });
        let begun = journal(&[minibatch(0, 5.0, 1.0)]);
        let ended = journal(&[minibatch(0, 5.0, 1.0), end]);
        assert_eq!(
            [Journal::default(), begun, ended.clone()].map(|run| run.has_ended()),
            [false, false, true]
        );
        let a = &ended.report(true)[0];
        assert_eq!(
            (&a["state"], &a["error"], &a["doing"]),
            (&"failed".into(), &"broke".into(), &Value::Null)
        );
        assert_eq!(Journal::states(&ended.report(true)), BTreeMap::from([("failed", 1)]));
    }

    #[test]
    fn a_task_that_is_left_out_waits_for_nothing() {
        let skipped = json!({ "event": "skipped", "task": "a", "reason": "too large", "at_s": 0.0 });
        let a = &journal(&[skipped]).report(true)[0];
        assert_eq!(
            (&a["state"], &a["error"], &a["doing"]),
            (&"skipped".into(), &"too large".into(), &Value::Null)
        );
    }

    #[test]
    fn memory_is_kept_with_its_times() {
        let tier = |bytes: u64| json!({ "name": "cpu:0", "reserved_bytes": bytes, "peak_bytes": 9, "budget_bytes": 10 });
        let line = |at_s: f64, tiers: Value| json!({ "event": "memory", "tiers": tiers, "at_s": at_s });
        let lines = [line(1.0, json!([tier(2)])), line(2.0, json!("half")), line(3.0, json!([tier(4)]))];
        let journal = journal(&lines);
        let kept: Vec<(f64, u64)> =
            journal.memory.iter().map(|moment| (moment.at_s, moment.tiers[0].reserved_bytes)).collect();
        assert_eq!((kept, journal.at_s, journal.tasks.len()), (vec![(1.0, 2), (3.0, 4)], 3.0, 0));
    }

    #[test]
    fn a_half_written_line_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let text = format!("{}\n{{\"event\":\"min", minibatch(0, 5.0, 1.0));
        fs::write(dir.path().join(METRICS), text).unwrap();
        let journal = Journal::read(dir.path()).unwrap();
        assert_eq!((journal.tasks.len(), journal.tasks[0].units.as_slice()), (1, &[64][..]));
        assert_eq!(journal.unread(), None);
        assert!(Journal::read(&dir.path().join("nowhere")).unwrap().tasks.is_empty());
    }

    #[test]
    fn lines_of_another_version_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let later = r#"{"event":"teleported","task":"a","at_s":2.0}"#;
        fs::write(dir.path().join(METRICS), format!("{later}\n{}\n{later}\n", minibatch(0, 5.0, 1.0)))
            .unwrap();
        let journal = Journal::read(dir.path()).unwrap();
        let note = journal.unread().unwrap();
        assert_eq!(note, "2 lines of metrics.jsonl are unknown to this version of Hydra, and not shown");
        assert_eq!(journal.tasks[0].units, [64]);
        let mut follower = crate::run_dir::Follower::new(dir.path());
        follower.follow().unwrap();
        assert_eq!(follower.journal().unread(), Some(note));
    }
}
