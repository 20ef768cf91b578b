//! The lines that tell of a run where no bars can be: in a pipe, or in a file.

use super::known::{Evaluated, Known, Pilot, Task};
use super::words::{best, reading, short, time, whole_rate};
use crate::terminal::score::Measure;
use hydra_core::TaskId;
use hydra_engine::{EvaluationKind, RunEvent, TaskState};

/// Seconds from one line for the whole to the next.
const EVERY_S: f64 = 10.0;

/// The lines of a run, which remember when the last one for the whole was said.
#[derive(Debug, Default)]
pub(super) struct Lines {
    said_s: f64,
}

impl Lines {
    /// The lines to say after an event, of which `known` knows already.
    pub(super) fn after(&mut self, event: &RunEvent<'_>, known: &Known) -> Vec<String> {
        if let RunEvent::Admitted(_) = event {
            self.said_s = known.now_s;
        }
        of_event(event, known).into_iter().chain(self.due(known)).collect()
    }

    /// The line for the whole, where it is time for one.
    pub(super) fn due(&mut self, known: &Known) -> Option<String> {
        if known.now_s - self.said_s < EVERY_S {
            return None;
        }
        self.said_s = known.now_s;
        whole(known)
    }
}

/// The line of an evaluation, or of a task's end.
fn of_event(event: &RunEvent<'_>, known: &Known) -> Option<String> {
    let task = |task: TaskId| known.tasks.get(task.0);
    match *event {
        RunEvent::Evaluated { task: id, kind, step, ref result, .. } => {
            let of = task(id)?;
            let now = Evaluated { score: result.into(), step };
            Some(evaluated(of, kind, &now, known.best() == Some((id.0, now))))
        }
        RunEvent::Ended { task: id, state, error, .. } => Some(ended(task(id)?, state, error)),
        _ => None,
    }
}

fn evaluated(task: &Task, kind: EvaluationKind, result: &Evaluated, is_best: bool) -> String {
    let what = if kind == EvaluationKind::Test { "test" } else { "validation" };
    let mut line = format!("{}: {}", task.name, result.named(what));
    if result.score.measure() != Measure::Loss {
        line += &format!(" (loss {})", short(result.score.loss, 4));
    }
    line += &match (kind, result.step) {
        (EvaluationKind::Initial, 0) => " before training".to_owned(),
        (_, step) => format!(" after {step} of {} minibatches", task.steps),
    };
    if is_best && kind != EvaluationKind::Initial && kind != EvaluationKind::Test {
        line += ", the best so far";
    }
    line
}

fn ended(task: &Task, state: TaskState, error: Option<&str>) -> String {
    let Task { name, done, steps, .. } = task;
    let early = if state == TaskState::Done && done < steps { " early" } else { "" };
    let error = error.map_or(String::new(), |error| format!(": {}", error.replace('\n', " ")));
    format!("{name}: {}{early} after {done} of {steps} minibatches{error}", task.word())
}

/// The whole in one line, if there is one yet: how far, how fast, how long yet, who does what, and the best so far.
fn whole(known: &Known) -> Option<String> {
    if let Some(pilot) = &known.pilot {
        let Pilot { task, done, layers, verb } = pilot;
        return Some(format!("{task}: {done} of {layers} layers {verb}"));
    }
    if let Some(reading) = reading(known) {
        return Some(reading);
    }
    known.tasks.first()?;
    let (done, all) = known.minibatches();
    let so_far = if known.asked.is_some() { " asked for so far" } else { "" };
    let mut line = format!("the whole: {done} of {all} minibatches{so_far}");
    for part in [
        whole_rate(known),
        known.left_s().map(|left_s| format!("{} left", time(left_s))),
        Some(format!("{} gone", time(known.gone_s()))),
    ] {
        part.into_iter().for_each(|part| line += &format!(", {part}"));
    }
    line += &format!("; {}", known.counts_with_reasons());
    let mut evaluated = known.tasks.iter().filter_map(|task| Some((task, task.evaluation.as_ref()?)));
    if let Some((task, batches)) = evaluated.next() {
        let others = evaluated.count();
        let more = if others == 0 { String::new() } else { format!(" and of {others} others") };
        line += &format!("; evaluation of {}{more}: {} of {} batches", task.name, batches.done, batches.all);
    }
    best(known).into_iter().for_each(|best| line += &format!("; {best}"));
    Some(line)
}
