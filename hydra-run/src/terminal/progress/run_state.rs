//! The state of a run, updated by its events. Times come from the caller; nothing is printed here.

use super::RequestedMinibatches;
use crate::terminal::score::Score;
use hydra_core::TaskId;
use hydra_engine::{
    Admission, AdmittedTask, Estimate, Evaluation, EvaluationKind, RunEvent, Span, TaskState, Track,
};
use hydra_partition::PilotProgress;
use std::collections::BTreeMap;

/// The state of a run by the events so far. Times are seconds of one clock with an arbitrary zero.
#[derive(Debug, Default)]
pub(super) struct RunState {
    pub(super) now_s: f64,
    pub(super) admitted_s: f64,
    pub(super) pilot: Option<Pilot>,
    pub(super) tasks: Vec<Task>,
    pub(super) devices: Vec<Device>,
    /// The rate of all minibatches of this run.
    pub(super) pace: Pace,
    /// The rate of all minibatches and evaluations of this run, in the tasks' estimates of work.
    work: Pace,
    pub(super) stopping: bool,
    /// The times before the run was admitted, until they are reported.
    pub(super) preparation: Option<Preparation>,
    /// True if models and data have been read, from the first pilot pass on.
    pub(super) is_read: bool,
    /// The largest number of concurrent tasks, if other tasks are queued.
    queued: Option<usize>,
    /// True if a task has started.
    begins: bool,
    /// True if a device has computed.
    computes: bool,
    /// The minibatches that a search has requested so far.
    pub(super) asked: Option<RequestedMinibatches>,
    /// The number of tasks that have started.
    begun: usize,
}

/// The times of a run before it was admitted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Preparation {
    /// Seconds to read models and data.
    pub(crate) reading_s: f64,
    /// Seconds to measure and plan.
    pub(crate) measuring_s: f64,
}

/// The running pilot pass.
#[derive(Debug)]
pub(super) struct Pilot {
    pub(super) task: String,
    pub(super) done: usize,
    pub(super) layers: usize,
    pub(super) verb: &'static str,
}

#[derive(Debug)]
pub(super) struct Device {
    pub(super) name: String,
    busy_s: f64,
    /// The end of the last span of any device, in seconds since the run started.
    until_s: f64,
}

#[derive(Debug, Default)]
pub(super) struct Task {
    pub(super) name: String,
    /// `tokens` or `items`.
    pub(super) unit: String,
    /// Minibatches to train; zero if the task is an evaluation.
    pub(super) steps: usize,
    /// Trained minibatches, including those of an earlier run.
    pub(super) done: usize,
    pub(super) phase: ProgressPhase,
    /// The loss of the last minibatch.
    pub(super) loss: Option<f64>,
    /// Evaluations on the validation split: before training, the last one since, and the best since.
    pub(super) initial: Option<Evaluated>,
    pub(super) validation: Option<Evaluated>,
    pub(super) best: Option<Evaluated>,
    pub(super) test: Option<Evaluated>,
    pub(super) error: Option<String>,
    pub(super) evaluation: Option<Batches>,
    /// The rate of the minibatches that this run trained.
    pub(super) pace: Pace,
    work: EstimatedWork,
    /// True if its initial weights are loaded.
    has_begun: bool,
}

/// The work of a task's minibatches and evaluations: estimated seconds, or tokens (or items) without an estimate.
#[derive(Clone, Copy, Debug, Default)]
struct EstimatedWork {
    /// The rate of minibatches and evaluations.
    pace: Pace,
    /// The work of a minibatch and of an evaluation batch.
    minibatch: f64,
    batch: f64,
    /// Batches of future evaluations, without the evaluation before training.
    batches: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ProgressPhase {
    #[default]
    Waiting,
    /// Started, as the `turn`-th of the tasks.
    Running {
        turn: usize,
    },
    /// Paused until a command resumes it.
    Paused,
    Ended(TaskState),
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Evaluated {
    pub(super) score: Score,
    /// Minibatches trained before it.
    pub(super) step: usize,
}

/// The running evaluation.
#[derive(Debug)]
pub(super) struct Batches {
    pub(super) kind: EvaluationKind,
    pub(super) done: usize,
    pub(super) all: usize,
    pub(super) pace: Pace,
    /// Tokens (or items) of a batch.
    units: usize,
}

/// A rate, measured from the end of the first piece of work, because its start is not known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    first_s: Option<f64>,
    last_s: f64,
    units: f64,
    /// Units of the last piece of work.
    piece: f64,
}

impl Pace {
    pub(super) fn add(&mut self, units: f64, at_s: f64) {
        if units == 0.0 {
            return;
        }
        if self.first_s.is_some() {
            self.units += units;
        }
        self.first_s.get_or_insert(at_s);
        (self.last_s, self.piece) = (at_s, units);
    }

    /// Units per second, if two pieces of work have ended at different times.
    pub(super) fn rate(&self) -> Option<f64> {
        let seconds = self.last_s - self.first_s?;
        (seconds > 0.0 && self.units > 0.0).then(|| self.units / seconds)
    }

    /// The seconds that `units` will take from now on, if there is work left and a measured rate. The progress of an unfinished
    /// piece is estimated from the rate, at most a whole piece.
    pub(super) fn left_s(&self, units: f64, now_s: f64) -> Option<f64> {
        let rate = self.rate().filter(|_| units > 0.0)?;
        let in_progress = (rate * (now_s - self.last_s)).clamp(0.0, self.piece);
        Some((units - in_progress).max(0.0) / rate)
    }
}

impl Batches {
    pub(super) fn left_s(&self, now_s: f64) -> Option<f64> {
        self.pace.left_s((self.all.saturating_sub(self.done) * self.units) as f64, now_s)
    }
}

impl Device {
    /// The share of the run in which the device computed, in percent.
    pub(super) fn utilization(&self) -> f64 {
        100.0 * self.busy_s / self.until_s.max(1e-9)
    }
}

impl Task {
    /// A waiting task with `steps` minibatches and `units` tokens (or items) in all of them.
    pub(super) fn new(name: &str, unit: &str, steps: usize, units: u64) -> Self {
        let work = EstimatedWork { minibatch: units as f64 / steps.max(1) as f64, ..Default::default() };
        Self { name: name.to_owned(), unit: unit.to_owned(), steps, work, ..Self::default() }
    }

    pub(super) fn of(task: &AdmittedTask) -> Self {
        let Estimate { minibatch_s, evaluation_batch_s, evaluation_batches } = task.estimate;
        let mut new = Self::new(&task.name, &task.data.unit, task.steps, task.data.units);
        new.work.minibatch = minibatch_s;
        new.with_evaluations(evaluation_batch_s, evaluation_batches)
    }

    /// The task with `batches` future evaluation batches of `batch` work each.
    pub(super) fn with_evaluations(self, batch: f64, batches: u64) -> Self {
        Self { work: EstimatedWork { batch, batches, ..self.work }, ..self }
    }

    /// The remaining work.
    fn work_left(&self) -> f64 {
        match self.phase {
            ProgressPhase::Ended(_) => 0.0,
            _ => {
                let minibatches = self.steps.saturating_sub(self.done) as f64;
                minibatches * self.work.minibatch + self.work.batches as f64 * self.work.batch
            }
        }
    }

    pub(super) fn left_s(&self, now_s: f64) -> Option<f64> {
        self.work.pace.left_s(self.work_left(), now_s)
    }

    /// Returns true if only writing the model is left.
    fn is_writing(&self) -> bool {
        let all = self.steps > 0 && self.done >= self.steps && self.work.batches == 0;
        self.has_begun && all && self.evaluation.is_none()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.phase == ProgressPhase::Ended(TaskState::Failed)
    }

    /// The phase as a word: `waiting`, `running`, `writing`, `paused`, `done`, `failed` or `stopped`.
    pub(super) fn word(&self) -> &'static str {
        match self.phase {
            ProgressPhase::Waiting => "waiting",
            ProgressPhase::Running { .. } if self.is_writing() => "writing",
            ProgressPhase::Running { .. } => "running",
            ProgressPhase::Paused => "paused",
            ProgressPhase::Ended(TaskState::Done) => "done",
            ProgressPhase::Ended(TaskState::Failed) => "failed",
            ProgressPhase::Ended(_) => "stopped",
        }
    }

    fn evaluated(&mut self, kind: EvaluationKind, step: usize, result: &Evaluation) {
        self.evaluation = None;
        let now = Evaluated { score: result.into(), step };
        match kind {
            EvaluationKind::Initial => self.initial = Some(now),
            EvaluationKind::Test => self.test = Some(now),
            _ => {
                self.validation = Some(now);
                let is_kept = |best: &Evaluated| best.score.cost.total_cmp(&now.score.cost).is_le();
                self.best = Some(self.best.filter(is_kept).unwrap_or(now));
            }
        }
    }
}

impl EstimatedWork {
    /// Counts finished evaluation batches; returns their work.
    fn evaluates(&mut self, batches: usize, now_s: f64) -> f64 {
        let work = batches as f64 * self.batch;
        self.batches = self.batches.saturating_sub(batches as u64);
        self.pace.add(work, now_s);
        work
    }
}

impl RunState {
    /// Updates the state with an event at `now_s`.
    pub(super) fn observe(&mut self, event: &RunEvent<'_>, now_s: f64) {
        self.now_s = now_s;
        use RunEvent::{Evaluating, Minibatch, Span};
        self.computes |= matches!(event, Span(_) | Minibatch { .. } | Evaluating { .. });
        match *event {
            RunEvent::Pilot { task, progress } => {
                (self.pilot, self.is_read) = (Pilot::of(task, progress), true);
            }
            RunEvent::Admitted(admission) => self.admitted(admission),
            RunEvent::Span(ref span) => self.span(span),
            RunEvent::Minibatch { task, step, loss, units, .. } => {
                self.minibatch(task, step, loss, units as f64);
            }
            RunEvent::Evaluating { task, kind, batch, batches, units, .. } => {
                self.evaluating(task, kind, (batch + 1, batches), units);
            }
            RunEvent::Evaluated { task, kind, step, ref result, .. } => {
                self.evaluated(task, kind, step, result);
            }
            RunEvent::Resumed { task, step, .. } => {
                self.tasks.get_mut(task.0).into_iter().for_each(|task| task.done = step);
            }
            RunEvent::Submitted { admitted, .. } => self.tasks.push(Task::of(admitted)),
            RunEvent::Paused { task, .. } => {
                self.begun(task).into_iter().for_each(|task| task.phase = ProgressPhase::Paused);
            }
            RunEvent::Ended { task, state, error, .. } => self.ended(task, state, error),
            RunEvent::Stopping => self.stopping = true,
            RunEvent::Began { task, .. } => {
                self.begins = true;
                self.tasks.get_mut(task.0).into_iter().for_each(|task| task.has_begun = true);
            }
            RunEvent::Memory { .. }
            | RunEvent::Saved { .. }
            | RunEvent::Refused { .. }
            | RunEvent::Checkpointed { .. }
            | RunEvent::CheckpointFailed { .. } => {}
        }
    }

    fn admitted(&mut self, admission: &Admission) {
        let tasks = admission.tasks.iter();
        let tasks = tasks.map(Task::of);
        (self.queued, self.is_read) = (admission.max_concurrent, true);
        self.expect(tasks.collect(), admission.devices.iter().map(|(name, _)| name.as_str()));
    }

    /// Sets the tasks, all waiting, and the devices, all idle.
    pub(super) fn expect<'a>(&mut self, tasks: Vec<Task>, devices: impl Iterator<Item = &'a str>) {
        let idle = |name: &str| Device { name: name.to_owned(), busy_s: 0.0, until_s: 0.0 };
        (self.admitted_s, self.pilot) = (self.now_s, None);
        (self.tasks, self.devices) = (tasks, devices.map(idle).collect());
    }

    fn span(&mut self, span: &Span) {
        let Track::Compute(device) = span.track else { return };
        if let Some(device) = self.devices.get_mut(device.0) {
            device.busy_s += span.end_s - span.start_s;
        }
        self.devices.iter_mut().for_each(|device| device.until_s = device.until_s.max(span.end_s));
    }

    /// The task, which is running from now on if it was waiting or paused.
    fn begun(&mut self, task: TaskId) -> Option<&mut Task> {
        let task = self.tasks.get_mut(task.0)?;
        if matches!(task.phase, ProgressPhase::Waiting | ProgressPhase::Paused) {
            task.phase = ProgressPhase::Running { turn: self.begun };
            self.begun += 1;
        }
        Some(task)
    }

    fn minibatch(&mut self, task: TaskId, step: usize, loss: f64, units: f64) {
        let now_s = self.now_s;
        self.pace.add(units, now_s);
        let Some(task) = self.begun(task) else { return };
        task.pace.add(units, now_s);
        task.done = step + 1;
        task.loss = Some(loss);
        let work = task.work.minibatch;
        task.work.pace.add(work, now_s);
        self.work.add(work, now_s);
    }

    fn evaluating(&mut self, task: TaskId, kind: EvaluationKind, (done, all): (usize, usize), units: usize) {
        let now_s = self.now_s;
        let Some(task) = self.begun(task) else { return };
        let before = task.evaluation.take().filter(|before| before.kind == kind);
        let (mut pace, before) = before.map_or_else(Default::default, |before| (before.pace, before.done));
        let batches = done.saturating_sub(before);
        pace.add((batches * units) as f64, now_s);
        task.evaluation = Some(Batches { kind, done, all, pace, units });
        if kind != EvaluationKind::Initial {
            let work = task.work.evaluates(batches, now_s);
            self.work.add(work, now_s);
        }
    }

    fn evaluated(&mut self, task: TaskId, kind: EvaluationKind, step: usize, result: &Evaluation) {
        let now_s = self.now_s;
        let Some(task) = self.begun(task) else { return };
        // The last batch of an evaluation has no event of its own.
        let batches = task.evaluation.as_ref().map_or(1, |batches| batches.all.saturating_sub(batches.done));
        task.evaluated(kind, step, result);
        if kind != EvaluationKind::Initial {
            let work = task.work.evaluates(batches, now_s);
            self.work.add(work, now_s);
        }
    }

    fn ended(&mut self, task: TaskId, state: TaskState, error: Option<&str>) {
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        task.phase = ProgressPhase::Ended(state);
        task.evaluation = None;
        task.error = error.map(ToOwned::to_owned);
    }

    /// Returns true if no task trains.
    pub(super) fn only_evaluates(&self) -> bool {
        self.tasks.iter().all(|task| task.steps == 0)
    }

    /// The trained minibatches, and the total. A task that was done early adds only its trained minibatches to the total; the
    /// total of a search is the minibatches that it has requested.
    pub(super) fn minibatches(&self) -> (usize, usize) {
        if let Some(asked) = &self.asked {
            let own = |task: &Task| task.done.saturating_sub(asked.shared(&task.name));
            let done = self.tasks.iter().map(own).sum();
            return (done, asked.minibatches().max(done));
        }
        let all = |task: &Task| match task.phase {
            ProgressPhase::Ended(TaskState::Done) => task.done,
            _ => task.steps,
        };
        (self.tasks.iter().map(|task| task.done).sum(), self.tasks.iter().map(all).sum())
    }

    /// The unit of all tasks, if it is the same.
    pub(super) fn unit(&self) -> Option<&str> {
        let unit = self.tasks.first()?.unit.as_str();
        self.tasks.iter().all(|task| task.unit == unit).then_some(unit)
    }

    pub(super) fn elapsed_s(&self) -> f64 {
        self.now_s - self.admitted_s
    }

    /// The remaining seconds of training and evaluations, if work is left and a rate was measured.
    pub(super) fn left_s(&self) -> Option<f64> {
        // Future requests of a search depend on losses.
        let left = self.tasks.iter().map(Task::work_left).sum();
        self.work.left_s(left, self.now_s).filter(|_| self.asked.is_none())
    }

    /// The reason why a task waits, if it waits and the reason is known.
    pub(super) fn waits_for(&self, task: &Task) -> Option<&'static str> {
        let is_open = |task: &&Task| task.has_begun && !matches!(task.phase, ProgressPhase::Ended(_));
        match task.phase {
            ProgressPhase::Paused => Some("a command"),
            ProgressPhase::Waiting if task.has_begun => Some("a device"),
            ProgressPhase::Waiting if !self.computes => Some("initial weights"),
            ProgressPhase::Waiting if !self.begins => None,
            ProgressPhase::Waiting => {
                let open = self.tasks.iter().filter(is_open).count();
                let limited = self.queued.is_some_and(|most| open >= most);
                Some(if limited { "another task to end" } else { "host memory" })
            }
            ProgressPhase::Running { .. } | ProgressPhase::Ended(_) => None,
        }
    }

    /// The times before the first device computed, and the seconds for initial weights; once, when a device computes.
    pub(super) fn prepared(&mut self) -> Option<(Preparation, f64)> {
        let preparation = self.preparation.take_if(|_| self.computes)?;
        Some((preparation, self.now_s - self.admitted_s))
    }

    /// Returns true while models and data are read, before the first pilot pass.
    pub(super) fn is_reading(&self) -> bool {
        !self.is_read && self.tasks.is_empty()
    }

    /// The remaining seconds of a task, if work is left and a rate was measured.
    pub(super) fn left_of_s(&self, task: &Task) -> Option<f64> {
        task.left_s(self.now_s).filter(|_| self.asked.is_none())
    }

    pub(super) fn has_ended(&self) -> bool {
        self.tasks.iter().all(|task| matches!(task.phase, ProgressPhase::Ended(_)))
    }

    /// The task with the best validation during training, and the result; none if the tasks have different measures.
    pub(super) fn best(&self) -> Option<(usize, Evaluated)> {
        let results = || self.tasks.iter().enumerate().filter_map(|(index, task)| Some((index, task.best?)));
        let best = results().min_by(|(_, a), (_, b)| a.score.order(&b.score))?;
        let measure = best.1.score.measure();
        results().all(|(_, other)| other.score.measure() == measure).then_some(best)
    }

    /// Counts of tasks by phase: `4 running, 31 waiting, 12 done, 1 failed`.
    pub(super) fn counts<'a>(tasks: impl Iterator<Item = &'a Task>) -> String {
        Self::counted(tasks.map(|task| (task.word(), None)))
    }

    /// Counts of all tasks by phase, with the reasons of waiting tasks: `1 running, 2 waiting for host memory`.
    pub(super) fn counts_with_reasons(&self) -> String {
        Self::counted(self.tasks.iter().map(|task| (task.word(), self.waits_for(task))))
    }

    fn counted(tasks: impl Iterator<Item = (&'static str, Option<&'static str>)>) -> String {
        let mut counts = BTreeMap::new();
        tasks.for_each(|kind| *counts.entry(kind).or_insert(0) += 1);
        let words = ["running", "writing", "paused", "waiting", "done", "failed", "stopped"];
        let of_word = |word: &'static str| {
            let is_its = move |((of, _), _): &(&(&str, Option<&str>), &i32)| *of == word;
            counts.iter().filter(is_its).map(move |((_, reason), count)| {
                let reason = reason.filter(|_| word == "waiting").map(|reason| format!(" for {reason}"));
                format!("{count} {word}{}", reason.unwrap_or_default())
            })
        };
        words.into_iter().flat_map(of_word).collect::<Vec<_>>().join(", ")
    }
}

impl Pilot {
    /// The state of the pass after `progress`; none if it is finished.
    fn of(task: &str, progress: PilotProgress) -> Option<Self> {
        let (done, layers, verb) = match progress {
            PilotProgress::Measured { done, layers } => (done, layers, "measured"),
            PilotProgress::Verified { done, layers } => (done, layers, "verified in shards"),
        };
        (done < layers).then(|| Self { task: task.to_owned(), done, layers, verb })
    }
}
