//! The progress of a run on standard error: bars on a terminal, lines in a pipe. `run_state` has the state of the run, and `bars`
//! and `lines` format it; none of them reads a clock. `ticker` updates the display while there are no events.

mod bars;
mod lines;
mod requested;
mod run_state;
#[cfg(test)]
mod tests;
mod ticker;
mod words;

use crate::terminal::error::tell;
use console::Term;
use hydra_core::TaskId;
use hydra_engine::{Observer, RunEvent};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use lines::Lines;
pub(crate) use requested::RequestedMinibatches;
pub(crate) use run_state::Preparation;
use run_state::RunState;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use ticker::Ticker;
pub(crate) use words::thousands;
pub use words::time;

/// The shortest interval between two redraws for events of single steps, in seconds.
const DRAWN_EVERY_S: f64 = 0.1;

/// The way in which progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// Bars, on a terminal.
    Bars,
    /// A line now and then.
    Lines,
    /// Not at all.
    Nothing,
}

/// Observes a run and the measurements before it, and shows the progress.
pub struct Progress {
    /// Dropped before the display, in the order of the fields, so that the last output is the end of the run.
    _ticker: Option<Ticker>,
    display: Arc<Mutex<Display>>,
}

/// The state of the run and its output.
struct Display {
    multi: MultiProgress,
    show: Show,
    run: RunState,
    lines: Lines,
    /// The rows on the terminal.
    bar: Option<ProgressBar>,
    drawn_s: f64,
    outside: Outside,
}

/// The display's access to terminal, clock and standard error.
struct Outside {
    /// Rows and columns of the terminal.
    size: fn() -> (u16, u16),
    /// Seconds.
    clock: Box<dyn Fn() -> f64 + Send>,
    /// Prints a line.
    say: Box<dyn Fn(&str) + Send>,
}

/// Returns true if standard error is a terminal; only then bars and warnings are shown by default.
pub fn interactive() -> bool {
    io::stderr().is_terminal()
}

impl Progress {
    /// Progress on standard error.
    pub(crate) fn new(multi: MultiProgress, show: Show) -> Self {
        match show {
            Show::Bars if interactive() => {}
            // Bars were requested explicitly; there may be a terminal behind the pipe.
            Show::Bars => multi.set_draw_target(ProgressDrawTarget::term_like(Box::new(Term::stderr()))),
            Show::Lines | Show::Nothing => multi.set_draw_target(ProgressDrawTarget::hidden()),
        }
        let begun = Instant::now();
        let outside = Outside {
            size: || Term::stderr().size(),
            clock: Box::new(move || begun.elapsed().as_secs_f64()),
            say: Box::new(tell),
        };
        let shown = show != Show::Nothing;
        Self::of(Display::new(multi, show, outside), |tick| shown.then(|| Ticker::start(tick)))
    }

    /// The progress of a search, with the minibatches that it has requested.
    pub(crate) fn of_search(self, asked: RequestedMinibatches) -> Self {
        self.display.lock().unwrap_or_else(PoisonError::into_inner).run.asked = Some(asked);
        self
    }

    /// The progress of a run with these times before it was admitted, which are reported when the first device computes.
    pub(crate) fn after(self, preparation: Preparation) -> Self {
        let mut display = self.display.lock().unwrap_or_else(PoisonError::into_inner);
        (display.run.preparation, display.run.is_read) = (Some(preparation), true);
        drop(display);
        self
    }

    /// A display that a ticker also updates while there are no events.
    fn of(display: Display, ticker: impl FnOnce(Tick) -> Option<Ticker>) -> Self {
        let display = Arc::new(Mutex::new(display));
        let ticking = display.clone();
        let tick = move || ticking.lock().unwrap_or_else(PoisonError::into_inner).tick();
        Self { _ticker: ticker(Box::new(tick)), display }
    }
}

/// Updates a display.
type Tick = Box<dyn FnMut() + Send>;

impl Display {
    fn new(multi: MultiProgress, show: Show, outside: Outside) -> Self {
        let (run, lines, bar) = (RunState::default(), Lines::default(), None);
        Self { multi, show, run, lines, bar, drawn_s: f64::NEG_INFINITY, outside }
    }

    fn observe(&mut self, event: &RunEvent<'_>) {
        let now_s = (self.outside.clock)();
        self.run.observe(event, now_s);
        if let RunEvent::CheckpointFailed { task, error, .. } = *event {
            self.warn(task, error);
        }
        if let Some(prepared) = words::prepared(&mut self.run).filter(|_| self.show != Show::Nothing) {
            self.multi.suspend(|| (self.outside.say)(&prepared));
        }
        match self.show {
            Show::Bars if !self.can_wait(event, now_s) => self.draw(),
            Show::Lines => {
                self.lines.after(event, &self.run).iter().for_each(|line| (self.outside.say)(line))
            }
            Show::Bars | Show::Nothing => {}
        }
    }

    /// Updates the times while there are no events.
    fn tick(&mut self) {
        self.run.now_s = (self.outside.clock)();
        match self.show {
            Show::Bars => self.draw(),
            Show::Lines => self.lines.due(&self.run).iter().for_each(|line| (self.outside.say)(line)),
            Show::Nothing => {}
        }
    }

    /// Returns true for an event of a single step shortly after a redraw.
    fn can_wait(&self, event: &RunEvent<'_>, now_s: f64) -> bool {
        use RunEvent::{Evaluating, Memory, Minibatch, Span};
        let small = matches!(event, Span(_) | Minibatch { .. } | Evaluating { .. } | Memory { .. });
        small && now_s - self.drawn_s < DRAWN_EVERY_S
    }

    fn draw(&mut self) {
        self.drawn_s = self.run.now_s;
        let (height, width) = (self.outside.size)();
        // A row as wide as the terminal may wrap, and the last row is for the cursor.
        let [width, height] = [width, height].map(|size| usize::from(size).saturating_sub(1));
        let rows = bars::rows(&self.run, width, height);
        if rows.is_empty() {
            return self.clear();
        }
        let bar = self.bar.get_or_insert_with(|| {
            // One bar, whose message has all rows.
            let style = ProgressStyle::with_template("{msg}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            self.multi.add(ProgressBar::new_spinner().with_style(style))
        });
        bar.set_message(rows.join("\n"));
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            self.multi.remove(&bar);
        }
    }

    fn warn(&self, task: TaskId, text: &str) {
        let name = self.run.tasks.get(task.0).map_or("", |task| task.name.as_str());
        self.multi.suspend(|| tell(&format!("warning: {name}: {text}")));
    }
}

impl Observer for Progress {
    fn observe(&mut self, event: &RunEvent<'_>) {
        self.display.lock().unwrap_or_else(PoisonError::into_inner).observe(event);
    }
}

impl Drop for Display {
    /// Leaves the last rows of a run on the terminal; clears those of an evaluation or a measurement.
    fn drop(&mut self) {
        if self.run.only_evaluates() {
            return self.clear();
        }
        if self.show == Show::Bars {
            self.draw();
        }
        if let Some(bar) = self.bar.take() {
            bar.abandon();
            // The bars leave the cursor at the end of their last row.
            tell("");
        }
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
