//! Progress bars on a terminal: one for each task, one for the whole with the devices' utilization. In a
//! pipe nothing is drawn.

use crate::error::tell;
use crate::runlog::state_name;
use hydra_core::TaskId;
use hydra_engine::{Observer, RunEvent, Span, Track};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};

/// Of more tasks than this, only those that have begun and not ended have a bar.
const MAX_IDLE_BARS: usize = 16;
// A line that is wider than the terminal would take two rows, and of a dozen tasks some would find no room: the end of
// a message is left out instead.
const TASK_STYLE: &str = "{prefix:>12} {bar:12} {pos:>5}/{len:<5} {eta:>4} left  {wide_msg}";
const WHOLE_STYLE: &str =
    "   the whole {bar:12} {pos:>5}/{len:<5} {eta:>4} left  {elapsed:>4} gone  {wide_msg}";
const ENDED_STYLE: &str = "{prefix:>12} {bar:12} {pos:>5}/{len:<5} {wide_msg}";

/// Draws the bars.
pub(crate) struct Progress {
    multi: MultiProgress,
    whole: ProgressBar,
    tasks: Vec<TaskBar>,
    devices: Vec<Device>,
    crowded: bool,
}

struct TaskBar {
    name: String,
    bar: Option<ProgressBar>,
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

/// Whether standard error is a terminal: only then bars and warnings are shown.
pub(crate) fn interactive() -> bool {
    io::stderr().is_terminal()
}

impl Progress {
    /// Bars on standard error, hidden where that is no terminal.
    pub(crate) fn new(multi: MultiProgress) -> Self {
        if !interactive() {
            multi.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self { multi, whole: ProgressBar::hidden(), tasks: Vec::new(), devices: Vec::new(), crowded: false }
    }

    fn begin(&mut self, admission: &hydra_engine::Admission) {
        self.crowded = admission.tasks.len() > MAX_IDLE_BARS;
        let total: usize = admission.tasks.iter().map(|task| task.steps).sum();
        self.whole = self.multi.add(ProgressBar::new(total as u64).with_style(style(WHOLE_STYLE)));
        let idle = |name: &str| Device { name: name.to_owned(), busy_s: 0.0 };
        self.devices = admission.devices.iter().map(|(name, _)| idle(name)).collect();
        for task in &admission.tasks {
            let bar = (!self.crowded).then(|| self.add_bar(&task.name, task.steps));
            let (name, unit) = (task.name.clone(), task.unit.clone());
            self.tasks.push(TaskBar { name, bar, started_s: None, before: 0, units: 0, unit });
        }
    }

    fn add_bar(&self, name: &str, steps: usize) -> ProgressBar {
        let bar = ProgressBar::new(steps as u64).with_style(style(TASK_STYLE)).with_prefix(name.to_owned());
        self.multi.insert_before(&self.whole, bar)
    }

    fn minibatch(&mut self, task: TaskId, steps: usize, loss: f64, units: usize, at_s: f64) {
        if self.tasks.get(task.0).is_some_and(|task| task.bar.is_none()) {
            let bar = self.add_bar(&self.tasks[task.0].name, steps);
            go_on(&bar, self.tasks[task.0].before);
            self.tasks[task.0].bar = Some(bar);
        }
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        let Some(bar) = &task.bar else { return };
        let started_s = *task.started_s.get_or_insert(at_s);
        bar.inc(1);
        self.whole.inc(1);
        bar.set_message(match at_s > started_s {
            // The first minibatch began before the clock of the task, so it is not counted.
            true => {
                task.units += units;
                let rate = thousands(task.units as f64 / (at_s - started_s));
                format!("loss {loss:.4}  {rate} {}/s", task.unit)
            }
            false => format!("loss {loss:.4}"),
        });
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

    fn evaluated(&self, task: TaskId, perplexity: f64) {
        if let Some(bar) = self.tasks.get(task.0).and_then(|task| task.bar.as_ref()) {
            bar.set_message(format!("perplexity {perplexity:.2}"));
        }
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
        match self.crowded {
            true => {
                bar.finish_and_clear();
                self.multi.remove(bar);
            }
            false => {
                bar.set_style(style(ENDED_STYLE));
                // The state stands where the time that is left did.
                bar.abandon_with_message(format!("{:<9}  {}", state_name(state), bar.message()));
            }
        }
    }
}

impl Observer for Progress {
    fn observe(&mut self, event: &RunEvent<'_>) {
        match *event {
            RunEvent::Admitted(admission) => self.begin(admission),
            RunEvent::Span(ref span) => self.span(span),
            RunEvent::Minibatch { task, steps, loss, units, at_s, .. } => {
                self.minibatch(task, steps, loss, units, at_s);
            }
            RunEvent::Evaluated { task, ref result, .. } => self.evaluated(task, result.perplexity),
            RunEvent::Ended { task, state, .. } => self.end(task, state),
            RunEvent::Resumed { task, step, .. } => self.resumed(task, step),
            RunEvent::Checkpointed { .. } => {}
            RunEvent::CheckpointFailed { task, error, .. } => self.warn(task, error),
            RunEvent::Stopping => self.whole.set_message("stopping"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.whole.abandon();
        if interactive() {
            // The bars leave the cursor at the end of their last line.
            tell("");
        }
    }
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
        for template in [TASK_STYLE, WHOLE_STYLE, ENDED_STYLE] {
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
            (ENDED_STYLE, "stopped    perplexity 115.71"),
            (WHOLE_STYLE, "cpu:0 90%  cpu:1 90%"),
        ] {
            assert!(template.ends_with("{wide_msg}"), "a longer message would go on in the next row");
            assert!(columns(template) + message.len() <= 80, "{template}: {}", columns(template));
        }
    }

    #[test]
    fn rates_are_short() {
        assert_eq!(thousands(950.2), "950");
        assert_eq!(thousands(12_345.0), "12.3k");
        assert_eq!(thousands(4_560_000.0), "4.56M");
        assert_eq!(thousands(f64::NAN), "-");
    }

    #[test]
    fn utilization_is_busy_time_over_all_time() {
        let device = |name: &str, busy_s| Device { name: name.to_owned(), busy_s };
        let devices = [device("cpu:0", 9.0), device("cpu:1", 5.0)];
        assert_eq!(utilizations(&devices, 10.0), "cpu:0 90%  cpu:1 50%");
    }
}
