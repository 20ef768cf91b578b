//! Progress lines, for pipes and files, where bars cannot be drawn.

use super::run_state::{Evaluated, Pilot, RunState, Task};
use super::words::{best, reading, short, time, whole_rate};
use crate::terminal::score::Measure;
use hydra_core::TaskId;
use hydra_engine::{EvaluationKind, RunEvent, TaskState};

/// The interval of the lines with totals, in seconds.
const EVERY_S: f64 = 10.0;

/// The lines of a run, with the time of the last line with totals.
#[derive(Debug, Default)]
pub(super) struct Lines {
    printed_s: f64,
}

impl Lines {
    /// The lines to print after an event, which `run_state` has been updated with.
    pub(super) fn after(&mut self, event: &RunEvent<'_>, run: &RunState) -> Vec<String> {
        if let RunEvent::Admitted(_) = event {
            self.printed_s = run.now_s;
        }
        of_event(event, run).into_iter().chain(self.due(run)).collect()
    }

    /// The line with totals, if it is due.
    pub(super) fn due(&mut self, run: &RunState) -> Option<String> {
        if run.now_s - self.printed_s < EVERY_S {
            return None;
        }
        self.printed_s = run.now_s;
        total(run)
    }
}

/// The line about an evaluation, or about the end of a task.
fn of_event(event: &RunEvent<'_>, run: &RunState) -> Option<String> {
    let task = |task: TaskId| run.tasks.get(task.0);
    match *event {
        RunEvent::Evaluated { task: id, kind, step, ref result, .. } => {
            let of = task(id)?;
            let now = Evaluated { score: result.into(), step };
            Some(evaluated(of, kind, &now, run.best() == Some((id.0, now))))
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

/// One line with minibatches, rate, times, counts of tasks and the best task so far; none before there is a task.
fn total(run: &RunState) -> Option<String> {
    if let Some(pilot) = &run.pilot {
        let Pilot { task, done, layers, verb } = pilot;
        return Some(format!("{task}: {done} of {layers} layers {verb}"));
    }
    if let Some(reading) = reading(run) {
        return Some(reading);
    }
    run.tasks.first()?;
    let (done, all) = run.minibatches();
    let so_far = if run.asked.is_some() { " requested so far" } else { "" };
    let mut line = format!("total: {done} of {all} minibatches{so_far}");
    for part in [
        whole_rate(run),
        run.left_s().map(|left_s| format!("{} left", time(left_s))),
        Some(format!("{} elapsed", time(run.elapsed_s()))),
    ] {
        part.into_iter().for_each(|part| line += &format!(", {part}"));
    }
    line += &format!("; {}", run.counts_with_reasons());
    let mut evaluated = run.tasks.iter().filter_map(|task| Some((task, task.evaluation.as_ref()?)));
    if let Some((task, batches)) = evaluated.next() {
        let others = evaluated.count();
        let more = if others == 0 { String::new() } else { format!(" and of {others} others") };
        line += &format!("; evaluation of {}{more}: {} of {} batches", task.name, batches.done, batches.all);
    }
    best(run).into_iter().for_each(|best| line += &format!("; {best}"));
    Some(line)
}
