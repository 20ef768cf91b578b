//! What is shown of a run, and what the keys change of it.

use crate::run_dir::{Follower, SPEC, TRACE, is_taken, is_unfinished, last_spans, ranked, search_progress};
use crate::terminal::time;
use anyhow::{Result, ensure};
use hydra_engine::TierMemory;
use ratatui::crossterm::event::KeyCode;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The most points of a curve: more than a terminal has columns.
const POINTS: usize = 400;
/// The seconds over which devices' shares are taken.
const WINDOW: f64 = 10.0;

/// A run as it is shown.
pub(super) struct View {
    dir: PathBuf,
    run: Follower,
    /// Where it is and how it stands, in a line.
    pub(super) title: String,
    /// The tasks in the order of the leaderboard.
    pub(super) tasks: Vec<Value>,
    /// Of each task its name, and points of minibatches and losses.
    pub(super) curves: Vec<(String, Vec<(f64, f64)>)>,
    /// Of each device its name, and the share of the last seconds in which it computed.
    pub(super) devices: Vec<(String, f64)>,
    pub(super) tiers: Vec<TierMemory>,
    /// True if losses are drawn on a logarithmic axis.
    pub(super) log: bool,
    /// The first task in the table.
    pub(super) first: usize,
}

impl View {
    pub(super) fn new(dir: &Path) -> Result<Self> {
        ensure!(
            dir.join(SPEC).is_file(),
            "`{}` is not a run directory: it has no {SPEC}; expected one such as runs/select-1",
            dir.display()
        );
        let (run, dir) = (Follower::new(dir), dir.to_owned());
        let (title, tasks, curves, devices, tiers) = Default::default();
        Ok(Self { dir, run, title, tasks, curves, devices, tiers, log: false, first: 0 })
    }

    /// Reads what is new.
    pub(super) fn look(&mut self) -> Result<()> {
        self.run.follow(|_| {})?;
        let running = is_taken(&self.dir);
        let state = match (is_unfinished(&self.dir), running) {
            (false, _) => "ended",
            (true, true) => "running",
            (true, false) => "stopped: hydra resume goes on with it",
        };
        let journal = self.run.journal();
        self.title = format!("{}: {state}, {} of running", self.dir.display(), time(journal.at_s));
        if let Some((trained, asked)) = search_progress(&self.dir, journal) {
            self.title += &format!("; {trained} of {asked} minibatches asked for so far");
        }
        self.tasks = ranked(journal, running)?.as_array().cloned().unwrap_or_default();
        self.curves = journal.tasks.iter().map(|task| (task.name.clone(), points(task.losses()))).collect();
        self.tiers = journal.memory.last().map(|moment| moment.tiers.clone()).unwrap_or_default();
        self.devices = shares(&last_spans(&self.dir.join(TRACE))?);
        self.first = self.first.min(self.tasks.len().saturating_sub(1));
        Ok(())
    }

    /// Does what a key says; false if it says that this is enough.
    pub(super) fn takes(&mut self, key: KeyCode) -> bool {
        let last = self.tasks.len().saturating_sub(1);
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('l') => self.log = !self.log,
            KeyCode::Down | KeyCode::Char('j') => self.first = (self.first + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => self.first = self.first.saturating_sub(1),
            KeyCode::PageDown => self.first = (self.first + 10).min(last),
            KeyCode::PageUp => self.first = self.first.saturating_sub(10),
            _ => {}
        }
        true
    }
}

/// Means over equal numbers of minibatches, of those that are numbers.
fn points(losses: impl ExactSizeIterator<Item = Option<f64>>) -> Vec<(f64, f64)> {
    let each = losses.len().div_ceil(POINTS).max(1);
    let losses: Vec<Option<f64>> = losses.collect();
    let stretches = losses.chunks(each).enumerate();
    let mean = |(place, losses): (usize, &[Option<f64>])| {
        let numbers: Vec<f64> = losses.iter().copied().flatten().collect();
        let sum: f64 = numbers.iter().sum();
        (!numbers.is_empty()).then(|| ((place * each) as f64, sum / numbers.len() as f64))
    };
    stretches.filter_map(mean).collect()
}

/// The share of the last seconds in which each device computed.
fn shares(timeline: &Value) -> Vec<(String, f64)> {
    let list = |key: &str| timeline[key].as_array().cloned().unwrap_or_default();
    let (tracks, spans) = (list("tracks"), list("spans"));
    let number = |span: &Value, place: usize| span[place].as_f64().unwrap_or_default();
    let end = spans.iter().map(|span| number(span, 2)).fold(0.0, f64::max);
    let begin = spans.iter().map(|span| number(span, 1)).fold(end, f64::min).max(end - WINDOW);
    let share = |track: &Value| {
        let name = track[1].as_str()?.strip_suffix(" compute")?;
        let own = spans.iter().filter(|span| span[0] == track[0]);
        let busy: f64 = own.map(|span| (number(span, 2) - number(span, 1).max(begin)).max(0.0)).sum();
        Some((name.to_owned(), if end > begin { (busy / (end - begin)).min(1.0) } else { 0.0 }))
    };
    tracks.iter().filter_map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn long_curves_are_means_and_skip_what_is_no_number() {
        let short = points([Some(2.0), None, Some(1.0)].into_iter());
        assert_eq!(short, [(0.0, 2.0), (2.0, 1.0)]);
        let long = points((0..1000).map(|step| Some(f64::from(step))));
        assert_eq!((long.len(), long[1]), (334, (3.0, 4.0)));
    }

    #[test]
    fn devices_are_busy_for_a_share_of_the_last_seconds() {
        let spans = json!([
            [1, 0.0, 50.0, "a", "forward", 0],
            [1, 92.0, 97.0, "a", "forward", 0],
            [2, 96.0, 100.0, "a", "promote", 0],
            [3, 88.0, 100.0, "b", "forward", 0],
        ]);
        let tracks = json!([[1, "cpu:0 compute"], [2, "cpu:0 copy"], [3, "cpu:1 compute"]]);
        let found = shares(&json!({ "tracks": tracks, "spans": spans }));
        assert_eq!(found, [("cpu:0".to_owned(), 0.5), ("cpu:1".to_owned(), 1.0)]);
        assert!(shares(&json!({ "tracks": [], "spans": [] })).is_empty());
    }
}
