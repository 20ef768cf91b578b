//! The progress of a run on standard error: bars on a terminal, lines in a pipe. What is known of the run is in `known`,
//! and drawn by `bars` or told by `lines`, none of which reads a clock; `ticker` has both go on while nothing happens.

mod asked;
mod bars;
mod known;
mod lines;
#[cfg(test)]
mod tests;
mod ticker;
mod words;

use crate::terminal::error::tell;
pub(crate) use asked::Asked;
use console::Term;
use hydra_core::TaskId;
use hydra_engine::{Observer, RunEvent};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use known::Known;
pub(crate) use known::Preparation;
use lines::Lines;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use ticker::Ticker;
pub(crate) use words::{thousands, time};

/// Bars are drawn no more often, but for what is more than a step.
const DRAWN_EVERY_S: f64 = 0.1;

/// The way in which progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Show {
    Bars,
    Lines,
    Nothing,
}

/// Listens to a run, or to what is measured before it, and shows how far it is.
pub(crate) struct Progress {
    /// Dropped before the display, in the order of the fields: what is shown last is how the run ended.
    _ticker: Option<Ticker>,
    display: Arc<Mutex<Display>>,
}

/// What is shown, and where.
struct Display {
    multi: MultiProgress,
    show: Show,
    known: Known,
    lines: Lines,
    /// The rows that are on the terminal.
    bar: Option<ProgressBar>,
    drawn_s: f64,
    outside: Outside,
}

/// What a display asks of the world around it.
struct Outside {
    /// Rows and columns of the terminal.
    size: fn() -> (u16, u16),
    /// Seconds.
    clock: Box<dyn Fn() -> f64 + Send>,
    /// Says a line.
    say: Box<dyn Fn(&str) + Send>,
}

/// Returns true if standard error is a terminal: only then bars and warnings are shown unasked.
pub(crate) fn interactive() -> bool {
    io::stderr().is_terminal()
}

impl Progress {
    /// Progress on standard error.
    pub(crate) fn new(multi: MultiProgress, show: Show) -> Self {
        match show {
            Show::Bars if interactive() => {}
            // Somebody has asked for bars, who may know of a terminal behind the pipe.
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

    /// The same of a run whose search says what it has asked for so far.
    pub(crate) fn of_search(self, asked: Asked) -> Self {
        self.display.lock().unwrap_or_else(PoisonError::into_inner).known.asked = Some(asked);
        self
    }

    /// The same of a run that took so long to be admitted, which is reported when a device computes.
    pub(crate) fn after(self, preparation: Preparation) -> Self {
        let mut display = self.display.lock().unwrap_or_else(PoisonError::into_inner);
        (display.known.preparation, display.known.is_read) = (Some(preparation), true);
        drop(display);
        self
    }

    /// A display that something else has go on too, while nothing is heard.
    fn of(display: Display, ticker: impl FnOnce(Tick) -> Option<Ticker>) -> Self {
        let display = Arc::new(Mutex::new(display));
        let ticking = display.clone();
        let tick = move || ticking.lock().unwrap_or_else(PoisonError::into_inner).tick();
        Self { _ticker: ticker(Box::new(tick)), display }
    }
}

/// Has a display go on.
type Tick = Box<dyn FnMut() + Send>;

impl Display {
    fn new(multi: MultiProgress, show: Show, outside: Outside) -> Self {
        let (known, lines, bar) = (Known::default(), Lines::default(), None);
        Self { multi, show, known, lines, bar, drawn_s: f64::NEG_INFINITY, outside }
    }

    fn observe(&mut self, event: &RunEvent<'_>) {
        let now_s = (self.outside.clock)();
        self.known.observe(event, now_s);
        if let RunEvent::CheckpointFailed { task, error, .. } = *event {
            self.warn(task, error);
        }
        if let Some(prepared) = words::prepared(&mut self.known).filter(|_| self.show != Show::Nothing) {
            self.multi.suspend(|| (self.outside.say)(&prepared));
        }
        match self.show {
            Show::Bars if !self.can_wait(event, now_s) => self.draw(),
            Show::Lines => {
                self.lines.after(event, &self.known).iter().for_each(|line| (self.outside.say)(line))
            }
            Show::Bars | Show::Nothing => {}
        }
    }

    /// Goes on while nothing is heard: times have changed.
    fn tick(&mut self) {
        self.known.now_s = (self.outside.clock)();
        match self.show {
            Show::Bars => self.draw(),
            Show::Lines => self.lines.due(&self.known).iter().for_each(|line| (self.outside.say)(line)),
            Show::Nothing => {}
        }
    }

    /// Returns true for one of many small steps, when bars have just been drawn.
    fn can_wait(&self, event: &RunEvent<'_>, now_s: f64) -> bool {
        use RunEvent::{Evaluating, Memory, Minibatch, Span};
        let small = matches!(event, Span(_) | Minibatch { .. } | Evaluating { .. } | Memory { .. });
        small && now_s - self.drawn_s < DRAWN_EVERY_S
    }

    fn draw(&mut self) {
        self.drawn_s = self.known.now_s;
        let (height, width) = (self.outside.size)();
        // A row as wide as the terminal may take two, and the last one is for the cursor.
        let [width, height] = [width, height].map(|size| usize::from(size).saturating_sub(1));
        let rows = bars::rows(&self.known, width, height);
        if rows.is_empty() {
            return self.clear();
        }
        let bar = self.bar.get_or_insert_with(|| {
            // One bar whose message is all rows.
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
        let name = self.known.tasks.get(task.0).map_or("", |task| task.name.as_str());
        self.multi.suspend(|| tell(&format!("warning: {name}: {text}")));
    }
}

impl Observer for Progress {
    fn observe(&mut self, event: &RunEvent<'_>) {
        self.display.lock().unwrap_or_else(PoisonError::into_inner).observe(event);
    }
}

impl Drop for Display {
    /// Leaves the rows of a run as they are at its end, and nothing of what was only measured.
    fn drop(&mut self) {
        if self.known.only_evaluates() {
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
