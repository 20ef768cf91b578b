//! The rows of a terminal that show a run: first the totals, then the main tasks, then counts of the others.

use super::run_state::{Batches, Pilot, ProgressPhase, RunState, Task};
use super::words::{best, rate, reading, short, time, whole_rate};
use hydra_engine::{EvaluationKind, TaskState};

/// The width from which words are not abbreviated, in columns.
const WIDE: usize = 110;
/// The longest name on a narrow terminal, in columns.
const NAME: usize = 16;
/// One in this number of task rows is for failed tasks, even if more tasks are running.
const FAILED: usize = 4;

/// At most `height` rows of at most `width` columns each.
pub(super) fn rows(run: &RunState, width: usize, height: usize) -> Vec<String> {
    let mut rows: Vec<String> = run.pilot.iter().map(|pilot| of_pilot(pilot, width)).collect();
    rows.extend(reading(run).map(|reading| clipped(&reading, width)));
    if !run.tasks.is_empty() {
        if !run.only_evaluates() {
            rows.extend(head(run, width));
        }
        rows.extend(of_tasks(run, width, height.saturating_sub(rows.len())));
    }
    rows.truncate(height);
    rows
}

fn of_pilot(pilot: &Pilot, width: usize) -> String {
    let Pilot { task, done, layers, verb } = pilot;
    let row = format!("{task} {} {done}/{layers}", bar(*done, *layers, length(width)));
    with(row, [format!("layers {verb}")], width)
}

/// The totals: minibatches and times, counts of tasks, utilization of devices, and the best task so far.
fn head(run: &RunState, width: usize) -> Vec<String> {
    let (done, all) = run.minibatches();
    let row = format!("total {} {done}/{all}", bar(done, all, length(width)));
    let mut cells = vec![match run.asked {
        Some(_) => "requested so far".to_owned(),
        None => format!("{:.0}%", (100.0 * done as f64 / all.max(1) as f64).floor()),
    }];
    if let Some(left_s) = run.left_s() {
        cells.push(format!("{} left", time(left_s)));
    }
    cells.extend(whole_rate(run));
    cells.push(format!("{} elapsed", time(run.elapsed_s())));
    let mut head = vec![with(row, cells, width)];
    let counts = RunState::counts(run.tasks.iter());
    let stopping = run.stopping && !run.has_ended();
    let devices = run.devices.iter().map(|device| format!("{} {:.0}%", device.name, device.utilization()));
    let counts = format!("{}: {counts}", plural(run.tasks.len(), "task"));
    head.push(with(counts, stopping.then(|| "stopping".to_owned()).into_iter().chain(devices), width));
    let only = run.tasks.len() == 1;
    head.extend(best(run).filter(|_| !only).map(|best| clipped(&best, width)));
    head
}

/// The rows of tasks: all tasks if they fit into `height` rows, else the main tasks and a row that counts the others.
fn of_tasks(run: &RunState, width: usize, height: usize) -> Vec<String> {
    let all = run.tasks.len();
    let shown = chosen(run, if all <= height { height } else { height.saturating_sub(1) });
    let longest = shown.iter().map(|&task| run.tasks[task].name.chars().count()).max().unwrap_or(0);
    let name = if width < WIDE { longest.min(NAME) } else { longest.min(width / 4) };
    let row = |&task: &usize| of_task(run, &run.tasks[task], name, width);
    let mut rows: Vec<String> = shown.iter().map(row).collect();
    if shown.len() < all && height > 0 {
        let others = || run.tasks.iter().enumerate().filter(|(index, _)| !shown.contains(index));
        let counts = RunState::counts(others().map(|(_, task)| task));
        let count = all - shown.len();
        let of_all = shown.is_empty();
        rows.push(clipped(&if of_all { counts } else { format!("{count} others: {counts}") }, width));
    }
    rows
}

/// The `most` main tasks, in the order of submission. Preferred are the best task, failed and running tasks, ended tasks by
/// their validation losses, and waiting tasks.
fn chosen(run: &RunState, most: usize) -> Vec<usize> {
    let best = run.best().map(|(task, _)| task);
    let mut failures = 0;
    let rank = |(index, task): (usize, &Task)| {
        failures += usize::from(task.has_failed());
        let (group, order) = match task.phase {
            _ if best == Some(index) => (0, 0.0),
            ProgressPhase::Ended(TaskState::Failed) if failures <= most / FAILED => (1, 0.0),
            // A task keeps its row until it ends, because earlier tasks come first.
            ProgressPhase::Running { turn } => (2, turn as f64),
            ProgressPhase::Ended(TaskState::Failed) => (3, 0.0),
            ProgressPhase::Paused | ProgressPhase::Ended(_) => {
                (4, task.best.map_or(f64::INFINITY, |best| best.score.cost))
            }
            ProgressPhase::Waiting => (5, 0.0),
        };
        (group, order, index)
    };
    let mut ranks: Vec<(u8, f64, usize)> = run.tasks.iter().enumerate().map(rank).collect();
    ranks.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut shown: Vec<usize> = ranks.into_iter().take(most).map(|(.., index)| index).collect();
    shown.sort_unstable();
    shown
}

fn of_task(run: &RunState, task: &Task, name: usize, width: usize) -> String {
    let (done, all) = match &task.evaluation {
        Some(batches) if task.steps == 0 => (batches.done, batches.all),
        _ => (task.done, task.steps),
    };
    let clipped = clipped(&task.name, name);
    let row = format!("{clipped:>name$} {} {done:>5}/{all:<5}", bar(done, all, length(width)));
    with(row, cells(run, task, width >= WIDE), width)
}

/// The cells after a task's bar, the most important first.
fn cells(run: &RunState, task: &Task, wide: bool) -> Vec<String> {
    let early = task.phase == ProgressPhase::Ended(TaskState::Done) && task.done < task.steps;
    let mut cells = match (&task.evaluation, task.phase) {
        (Some(batches), _) => of_evaluation(batches, task, run.now_s, wide),
        (None, ProgressPhase::Running { .. }) => {
            let left = run.left_of_s(task).map(|left_s| format!("{:>3} left", time(left_s)));
            let writing = (task.word() == "writing").then(|| "writing its model".to_owned());
            left.or(writing).into_iter().collect()
        }
        (None, _) if early => vec!["done early".to_owned()],
        (None, ProgressPhase::Waiting) => {
            let waits = run.waits_for(task).map(|what| format!("waiting for {what}"));
            vec![waits.unwrap_or_else(|| task.word().to_owned())]
        }
        (None, ProgressPhase::Paused) => vec!["paused, waiting for a command".to_owned()],
        (None, _) => {
            let error = task.error.iter().map(|error| format!(": {}", error.replace('\n', " ")));
            vec![task.word().to_owned() + &error.collect::<String>()]
        }
    };
    let running = matches!(task.phase, ProgressPhase::Running { .. });
    let training = if wide { "training" } else { "train" };
    let stopped = task.phase == ProgressPhase::Ended(TaskState::Stopped);
    let loss = task.loss.filter(|_| (running || stopped) && task.evaluation.is_none());
    cells.extend(loss.map(|loss| format!("{training} loss {}", short(loss, 4))));
    cells.extend(figures(task, wide));
    let pace = task.pace.rate().filter(|_| running && task.evaluation.is_none());
    cells.extend(pace.map(|pace| rate(pace, &task.unit)));
    cells
}

/// The figures of a task's evaluations: the best validation, the test, and the last validation if it is not the best.
fn figures(task: &Task, wide: bool) -> Vec<String> {
    let last = task.validation.filter(|last| task.best.is_some_and(|best| best.score.cost < last.score.cost));
    let initial = task.initial.filter(|_| task.best.is_none());
    let best = if last.is_some() { ["best val", "best validation"] } else { ["val", "validation"] };
    let all = [
        (task.best, best),
        (initial, ["initial val", "initial validation"]),
        (task.test, ["test", "test"]),
        (last, ["last val", "last validation"]),
    ];
    let shown = all.into_iter().filter_map(|(score, [brief, whole])| {
        score.map(|result| if wide { result.named(whole) } else { result.brief(brief) })
    });
    shown.collect()
}

fn of_evaluation(batches: &Batches, task: &Task, now_s: f64, wide: bool) -> Vec<String> {
    let Batches { kind, done, all, pace, .. } = batches;
    let what = match kind {
        EvaluationKind::Test => "testing",
        _ => "validating",
    };
    let mut cells = Vec::new();
    if task.steps > 0 {
        cells.push(format!("{what} {done}/{all}"));
    }
    cells.extend(batches.left_s(now_s).map(|left_s| format!("{} left", time(left_s))));
    let pace = pace.rate().filter(|_| wide || task.steps == 0);
    cells.extend(pace.map(|pace| rate(pace, &task.unit)));
    cells
}

/// The length of a bar in columns.
fn length(width: usize) -> usize {
    if width < WIDE { 8 } else { 20 }
}

fn bar(done: usize, all: usize, length: usize) -> String {
    // The bar is full only when everything is done.
    let full = (done * length).checked_div(all).unwrap_or(0).min(length);
    "█".repeat(full) + &"░".repeat(length - full)
}

/// Appends the cells that fit. The first one is clipped; others are omitted, because half a number is wrong.
fn with(mut row: String, cells: impl IntoIterator<Item = String>, width: usize) -> String {
    for (place, cell) in cells.into_iter().enumerate() {
        if place > 0 && row.chars().count() + 2 + cell.chars().count() > width {
            continue;
        }
        row += "  ";
        row += &cell;
    }
    clipped(&row, width)
}

/// The text, shortened with an ellipsis to at most `width` columns.
fn clipped(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let Some(kept) = width.checked_sub(1) else { return String::new() };
    format!("{}…", text.chars().take(kept).collect::<String>())
}

fn plural(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
