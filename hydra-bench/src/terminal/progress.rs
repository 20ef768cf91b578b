//! Progress bars on a terminal: one for the pilot pass, one for each task, one for the whole with the devices'
//! utilization. In a pipe nothing is drawn.

use crate::terminal::error::tell;
use hydra_core::TaskId;
use hydra_engine::{Evaluation, EvaluationKind, Observer, RunEvent, Span, Track};
use hydra_partition::PilotProgress;
use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Of more tasks than this, only those that have begun and not ended have a bar.
const MAX_IDLE_BARS: usize = 16;
// A line that is wider than the terminal would take two rows, and of a dozen tasks some would find no room: the end of
// a message is left out instead.
const TASK_STYLE: &str = "{prefix:>12} {bar:12} {pos:>5}/{len:<5} {eta:>4} left  {wide_msg}";
const WHOLE_STYLE: &str =
    "   the whole {bar:12} {pos:>5}/{len:<5} {eta:>4} left  {elapsed:>4} gone  {wide_msg}";
// Of a task that trains no minibatch now: what stands where the time that is left did is its message's.
const RESTING_STYLE: &str = "{prefix:>12} {bar:12} {pos:>5}/{len:<5} {wide_msg}";

pub(crate) struct Progress {
    multi: MultiProgress,
    pilot: Option<ProgressBar>,
    whole: ProgressBar,
    tasks: Vec<TaskBar>,
    devices: Vec<Device>,
    crowded: bool,
    /// True if nothing is trained: its bar goes when the evaluation has ended.
    only_evaluates: bool,
}

#[derive(Default)]
struct TaskBar {
    name: String,
    /// Minibatches to train, or the batches of the evaluation where nothing is trained.
    steps: usize,
    bar: Option<ProgressBar>,
    /// The evaluation that is under way: when its first batch had ended, and which that was.
    evaluation: Option<(f64, usize)>,
    started_s: Option<f64>,
    /// Minibatches that an earlier run trained.
    before: usize,
    units: usize,
    unit: String,
}

struct Device {
    name: String,
    busy_s: f64,
}

/// Returns true if standard error is a terminal: only then bars and warnings are shown.
pub(crate) fn interactive() -> bool {
    io::stderr().is_terminal()
}

impl Progress {
    /// Bars on standard error, hidden where that is no terminal.
    pub(crate) fn new(multi: MultiProgress) -> Self {
        if !interactive() {
            multi.set_draw_target(ProgressDrawTarget::hidden());
        }
        let (pilot, whole, tasks, devices) = (None, ProgressBar::hidden(), Vec::new(), Vec::new());
        Self { multi, pilot, whole, tasks, devices, crowded: false, only_evaluates: false }
    }

    fn pilot(&mut self, task: &str, progress: PilotProgress) {
        let (done, layers, message) = match progress {
            PilotProgress::Measured { done, layers } => (done, layers, "layers measured"),
            PilotProgress::Verified { done, layers } => (done, layers, "layers tried in shards"),
        };
        let bar = self.pilot.get_or_insert_with(|| self.multi.add(bar_of(task, layers)));
        bar.set_message(message);
        bar.set_position(done as u64);
        if done == layers {
            self.end_pilot();
        }
    }

    fn end_pilot(&mut self) {
        if let Some(bar) = self.pilot.take() {
            bar.finish_and_clear();
            self.multi.remove(&bar);
        }
    }

    fn begin(&mut self, admission: &hydra_engine::Admission) {
        self.crowded = admission.tasks.len() > MAX_IDLE_BARS;
        let total: usize = admission.tasks.iter().map(|task| task.steps).sum();
        self.only_evaluates = total == 0;
        if !self.only_evaluates {
            self.whole = self.multi.add(ProgressBar::new(total as u64).with_style(style(WHOLE_STYLE)));
        }
        let idle = |name: &str| Device { name: name.to_owned(), busy_s: 0.0 };
        self.devices = admission.devices.iter().map(|(name, _)| idle(name)).collect();
        for task in &admission.tasks {
            let idle = !self.crowded && !self.only_evaluates;
            let bar = idle.then(|| self.add_bar(&task.name, task.steps));
            let (name, steps, unit) = (task.name.clone(), task.steps, task.unit.clone());
            self.tasks.push(TaskBar { name, steps, bar, unit, ..TaskBar::default() });
        }
    }

    fn add_bar(&self, name: &str, steps: usize) -> ProgressBar {
        let bar = bar_of(name, steps);
        if self.only_evaluates { self.multi.add(bar) } else { self.multi.insert_before(&self.whole, bar) }
    }

    /// Gives a task that has begun its bar.
    fn show(&mut self, task: TaskId) {
        let Some(of) = self.tasks.get(task.0).filter(|of| of.bar.is_none()) else { return };
        let bar = self.add_bar(&of.name, of.steps);
        go_on(&bar, of.before);
        self.tasks[task.0].bar = Some(bar);
    }

    fn minibatch(&mut self, task: TaskId, loss: f64, units: usize, at_s: f64) {
        self.show(task);
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        let Some(bar) = &task.bar else { return };
        let started_s = *task.started_s.get_or_insert(at_s);
        bar.inc(1);
        self.whole.inc(1);
        let mut message = format!("loss {}", short(loss, 4));
        // The first minibatch began before the clock of the task, so it is not counted.
        if at_s > started_s {
            task.units += units;
            let rate = thousands(task.units as f64 / (at_s - started_s));
            message += &format!("  {rate} {}/s", task.unit);
        }
        bar.set_message(message);
    }

    fn evaluating(&mut self, task: TaskId, kind: EvaluationKind, batches: Batches, at_s: f64) {
        if let Some(of) = self.tasks.get_mut(task.0).filter(|of| of.steps == 0) {
            of.steps = batches.all;
        }
        self.show(task);
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        let Some(bar) = &task.bar else { return };
        let begins = task.evaluation.is_none();
        let since = *task.evaluation.get_or_insert((at_s, batches.done));
        let pace = batches.pace(since, at_s);
        if self.only_evaluates {
            bar.set_position(batches.done as u64);
            bar.set_message(pace.map_or(String::new(), |(_, rate)| format!("{rate} {}/s", task.unit)));
            return;
        }
        if begins {
            bar.set_style(style(RESTING_STYLE));
        }
        let what = if kind == EvaluationKind::Test { "test" } else { "eval" };
        let pace = pace.map(|(left, rate)| format!(" {left:#} left  {rate} {}/s", task.unit));
        bar.set_message(format!("{what} {}/{}{}", batches.done, batches.all, pace.unwrap_or_default()));
    }

    fn resumed(&mut self, task: TaskId, step: usize) {
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        task.before = step;
        task.bar.iter().for_each(|bar| go_on(bar, step));
        go_on(&self.whole, self.whole.position() as usize + step);
    }

    fn warn(&self, task: TaskId, text: &str) {
        let name = self.tasks.get(task.0).map_or("", |task| task.name.as_str());
        self.multi.suspend(|| tell(&format!("warning: {name}: {text}")));
    }

    fn evaluated(&mut self, task: TaskId, result: &Evaluation) {
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        let Some(bar) = &task.bar else { return };
        if task.evaluation.take().is_some() {
            bar.set_style(style(TASK_STYLE));
        }
        bar.set_message(match result.perplexity {
            Some(perplexity) => format!("perplexity {}", short(perplexity, 2)),
            None => format!("loss {}", short(result.loss, 4)),
        });
    }

    fn span(&mut self, span: &Span) {
        let Track::Compute(device) = span.track else { return };
        let Some(device) = self.devices.get_mut(device.0) else { return };
        device.busy_s += span.end_s - span.start_s;
        self.whole.set_message(utilizations(&self.devices, span.end_s));
    }

    fn end(&mut self, task: TaskId, state: hydra_engine::TaskState) {
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        let Some(bar) = &task.bar else { return };
        // What it did not train, nobody waits for.
        self.whole.dec_length(bar.length().unwrap_or(0).saturating_sub(bar.position()));
        if self.crowded || self.only_evaluates {
            bar.finish_and_clear();
            return self.multi.remove(bar);
        }
        bar.set_style(style(RESTING_STYLE));
        // The state stands where the time that is left did.
        let state = serde_json::json!(state);
        let state = state.as_str().unwrap_or_default();
        bar.abandon_with_message(format!("{state:<9}  {}", bar.message()));
    }
}

impl Observer for Progress {
    fn observe(&mut self, event: &RunEvent<'_>) {
        match *event {
            RunEvent::Admitted(admission) => self.begin(admission),
            RunEvent::Span(ref span) => self.span(span),
            RunEvent::Pilot { task, progress } => self.pilot(task, progress),
            RunEvent::Minibatch { task, loss, units, at_s, .. } => self.minibatch(task, loss, units, at_s),
            RunEvent::Evaluating { task, kind, batch, batches, units, at_s } => {
                self.evaluating(task, kind, Batches { done: batch + 1, all: batches, units }, at_s);
            }
            RunEvent::Evaluated { task, ref result, .. } => self.evaluated(task, result),
            RunEvent::Ended { task, state, .. } => self.end(task, state),
            RunEvent::Resumed { task, step, .. } => self.resumed(task, step),
            RunEvent::Began { .. } | RunEvent::Checkpointed { .. } => {}
            RunEvent::CheckpointFailed { task, error, .. } => self.warn(task, error),
            RunEvent::Stopping => self.whole.set_message("stopping"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end_pilot();
        self.whole.abandon();
        if interactive() && self.whole.length().is_some_and(|steps| steps > 0) {
            // The bars leave the cursor at the end of their last line.
            tell("");
        }
    }
}

fn bar_of(name: &str, steps: usize) -> ProgressBar {
    ProgressBar::new(steps as u64).with_style(style(TASK_STYLE)).with_prefix(name.to_owned())
}

/// Puts a bar where an earlier run left it; what that took says nothing about the time that is left.
fn go_on(bar: &ProgressBar, at: usize) {
    bar.set_position(at as u64);
    bar.reset_eta();
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants that a test reads; a wrong one would only look plainer.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn utilizations(devices: &[Device], now_s: f64) -> String {
    let share = |device: &Device| {
        let busy = 100.0 * device.busy_s / now_s.max(1e-9);
        format!("{} {busy:.0}%", device.name)
    };
    devices.iter().map(share).collect::<Vec<_>>().join("  ")
}

struct Batches {
    done: usize,
    all: usize,
    /// Tokens (or items) of one.
    units: usize,
}

impl Batches {
    /// The time that is left and the units a second, when so many batches were done at `since`.
    fn pace(&self, since: (f64, usize), at_s: f64) -> Option<(HumanDuration, String)> {
        let (begun_s, before) = since;
        let one_s = (at_s - begun_s) / self.done.checked_sub(before).filter(|done| *done > 0)? as f64;
        let left = Duration::try_from_secs_f64(one_s * self.all.saturating_sub(self.done) as f64).ok()?;
        Some((HumanDuration(left), thousands(self.units as f64 / one_s)))
    }
}

/// A number with so many decimals, or with three digits where it is large: a loss that diverges leaves room for the rest.
fn short(value: f64, decimals: usize) -> String {
    if value.abs() < 1e5 { format!("{value:.decimals$}") } else { format!("{value:.2e}") }
}

/// A rate with at most four digits: `950`, `12.3k`, `4.56M`.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        v if !v.is_finite() => "-".to_owned(),
        v if v < 1e3 => format!("{v:.0}"),
        v if v < 1e6 => format!("{:.1}k", v / 1e3),
        v => format!("{:.2}M", v / 1e6),
    }
}

/// Writes log lines above the bars.
#[derive(Clone)]
pub(crate) struct LogWriter(pub(crate) MultiProgress);

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_understood() {
        for template in [TASK_STYLE, WHOLE_STYLE, RESTING_STYLE] {
            assert!(ProgressStyle::with_template(template).is_ok());
        }
    }

    /// Columns of a template before its message: of a placeholder, those that it is padded to.
    fn columns(template: &str) -> usize {
        let columns = |part: &str| match part.split_once('}') {
            Some((placeholder, text)) => {
                let padded = placeholder.trim_start_matches(|c: char| !c.is_ascii_digit());
                padded.parse().unwrap_or(0) + text.chars().count()
            }
            None => part.chars().count(),
        };
        template.split('{').map(columns).sum()
    }

    #[test]
    fn a_bar_is_one_row_of_a_terminal_of_80_columns() {
        for (template, message) in [
            (TASK_STYLE, "loss 4.4702  12.3k tokens/s"),
            (RESTING_STYLE, "stopped    perplexity 115.71"),
            (RESTING_STYLE, "test 1200/2400 10m left  12.3k tokens/s"),
            (TASK_STYLE, "loss -1.23e30  12.3k tokens/s"),
            (WHOLE_STYLE, "cpu:0 90%  cpu:1 90%"),
        ] {
            assert!(template.ends_with("{wide_msg}"), "a longer message would go on in the next row");
            assert!(columns(template) + message.len() <= 80, "{template}: {}", columns(template));
        }
    }

    #[test]
    fn an_evaluation_says_how_fast_it_is_and_how_long_yet() {
        let batches = |done| Batches { done, all: 240, units: 4096 };
        assert!(batches(1).pace((2.0, 1), 2.0).is_none(), "one batch has no pace");
        let (left, rate) = batches(61).pace((2.0, 1), 122.0).unwrap();
        assert_eq!((format!("{left:#}"), rate.as_str()), ("6m".to_owned(), "2.0k"));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([4.470_21, 1.234e30].map(|value| short(value, 4)), ["4.4702", "1.23e30"]);
        assert_eq!([-99_999.0, f64::INFINITY].map(|value| short(value, 2)), ["-99999.00", "inf"]);
        let rates = [950.2, 12_345.0, 4_560_000.0, f64::NAN].map(thousands);
        assert_eq!(rates, ["950", "12.3k", "4.56M", "-"]);
    }

    #[test]
    fn utilization_is_busy_time_over_all_time() {
        let device = |name: &str, busy_s| Device { name: name.to_owned(), busy_s };
        let devices = [device("cpu:0", 9.0), device("cpu:1", 5.0)];
        assert_eq!(utilizations(&devices, 10.0), "cpu:0 90%  cpu:1 50%");
    }
}
