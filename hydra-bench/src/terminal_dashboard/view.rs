//! The state of the terminal dashboard, and its key bindings.

use anyhow::{Result, ensure};
use hydra_engine::TierMemory;
use hydra_run::run_dir::{
    Follower, SPEC, TRACE, is_taken, is_unfinished, last_spans, ranked, search_progress, shown,
};
use hydra_run::terminal::{Score, time};
use ratatui::crossterm::event::KeyCode;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The maximum number of points of a curve: more than a terminal has columns.
const POINTS: usize = 400;
/// The window of device utilization, in seconds.
const WINDOW: f64 = 10.0;

/// A run and the state of its view.
pub(super) struct View {
    dir: PathBuf,
    run: Follower,
    /// The run directory and the state of the run, in one line.
    pub(super) title: String,
    /// The tasks that pass the filter, in sorted order.
    pub(super) tasks: Vec<Value>,
    /// All tasks, in the order of the leaderboard.
    all: Vec<Value>,
    /// The name of each task and its points (minibatch, loss).
    pub(super) curves: Vec<(String, Vec<(f64, f64)>)>,
    /// The name of each device and its utilization over the last seconds, from 0 to 1.
    pub(super) devices: Vec<(String, f64)>,
    pub(super) tiers: Vec<TierMemory>,
    /// The settings in which the tasks differ.
    pub(super) settings: Vec<String>,
    /// The colour number of each task; tasks with equal values of the colouring setting share a number.
    pub(super) colours: BTreeMap<String, usize>,
    pub(super) chosen: Choices,
}

/// The choices that the user makes with keys.
#[derive(Default)]
pub(super) struct Choices {
    /// True if the loss axis is logarithmic.
    pub(super) log: bool,
    /// True if parallel coordinates are drawn instead of losses.
    pub(super) parallel: bool,
    /// The index of the first task in the table.
    pub(super) first: usize,
    /// The sort column (0 for the rank, then the settings), and whether the order is reversed.
    pub(super) sort: (usize, bool),
    /// The filter: words that must all match a task, such as `lr=1e-3` or a part of its name.
    pub(super) filter: String,
    /// True while the user types the filter.
    pub(super) typing: bool,
}

impl View {
    pub(super) fn new(dir: &Path) -> Result<Self> {
        ensure!(
            dir.join(SPEC).is_file(),
            "`{}` is not a run directory: it has no {SPEC}; expected one such as runs/select-1",
            dir.display()
        );
        let (run, dir) = (Follower::new(dir), dir.to_owned());
        Ok(Self {
            dir,
            run,
            title: String::new(),
            tasks: Vec::new(),
            all: Vec::new(),
            curves: Vec::new(),
            devices: Vec::new(),
            tiers: Vec::new(),
            settings: Vec::new(),
            colours: BTreeMap::new(),
            chosen: Choices::default(),
        })
    }

    /// Reads the new lines of the run's log.
    pub(super) fn refresh(&mut self) -> Result<()> {
        self.run.follow()?;
        let running = is_taken(&self.dir);
        let state = match (is_unfinished(&self.dir), running) {
            (false, _) => "ended",
            (true, true) => "running",
            (true, false) => "stopped; continue with hydra resume",
        };
        let journal = self.run.journal();
        self.title = format!("{}: {state}, running time {}", self.dir.display(), time(journal.at_s));
        if let Some((trained, asked)) = search_progress(&self.dir, journal) {
            self.title += &format!("; {trained} of {asked} minibatches requested so far");
        }
        self.all = ranked(journal, running)?["tasks"].as_array().cloned().unwrap_or_default();
        self.curves = journal.tasks.iter().map(|task| (task.name.clone(), points(task.losses()))).collect();
        self.tiers = journal.memory.last().map(|moment| moment.tiers.clone()).unwrap_or_default();
        self.devices = shares(&last_spans(&self.dir.join(TRACE))?);
        let differs = self.all.first().and_then(|task| task["differs"].as_object());
        self.settings = differs.map(|differs| differs.keys().cloned().collect()).unwrap_or_default();
        self.colours = self.colour_numbers();
        self.arrange();
        Ok(())
    }

    /// Filters and sorts the tasks.
    fn arrange(&mut self) {
        self.chosen.sort.0 = self.chosen.sort.0.min(self.settings.len());
        self.tasks = self.all.iter().filter(|task| self.chosen.passes_filter(task)).cloned().collect();
        let (column, down) = self.chosen.sort;
        if let Some(name) = column.checked_sub(1).map(|setting| &self.settings[setting]) {
            self.tasks.sort_by(|a, b| order(&a["differs"][name], &b["differs"][name]));
        }
        if down {
            self.tasks.reverse();
        }
        self.chosen.first = self.chosen.first.min(self.tasks.len().saturating_sub(1));
    }

    /// Returns the colour number of each task: the index of its learning rate, or of its value of the first setting in which the
    /// tasks differ.
    fn colour_numbers(&self) -> BTreeMap<String, usize> {
        let name = self.settings.iter().find(|name| *name == "lr").or(self.settings.first());
        let Some(name) = name else { return BTreeMap::new() };
        let mut values: Vec<&Value> = self.all.iter().map(|task| &task["differs"][name]).collect();
        values.sort_by(|a, b| order(a, b));
        values.dedup();
        let place = |task: &Value| values.iter().position(|value| **value == task["differs"][name]);
        let of = |task: &Value| Some((task["name"].as_str()?.to_owned(), place(task)?));
        self.all.iter().filter_map(of).collect()
    }

    /// Handles a key; returns false if it quits the dashboard.
    pub(super) fn handle_key(&mut self, key: KeyCode) -> bool {
        if self.chosen.typing {
            self.chosen.edit_filter(key);
            self.arrange();
            return true;
        }
        let (chosen, last) = (&mut self.chosen, self.tasks.len().saturating_sub(1));
        match key {
            KeyCode::Esc if !chosen.filter.is_empty() => chosen.filter.clear(),
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('l') => chosen.log = !chosen.log,
            KeyCode::Char('p') => chosen.parallel = !chosen.parallel,
            KeyCode::Char('s') => chosen.sort.0 = (chosen.sort.0 + 1) % (self.settings.len() + 1),
            KeyCode::Char('r') => chosen.sort.1 = !chosen.sort.1,
            KeyCode::Char('/') => chosen.typing = true,
            KeyCode::Down | KeyCode::Char('j') => chosen.first = (chosen.first + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => chosen.first = chosen.first.saturating_sub(1),
            KeyCode::PageDown => chosen.first = (chosen.first + 10).min(last),
            KeyCode::PageUp => chosen.first = chosen.first.saturating_sub(10),
            _ => {}
        }
        self.arrange();
        true
    }
}

impl Choices {
    /// Returns true if a task matches every word of the filter.
    fn passes_filter(&self, task: &Value) -> bool {
        let matches = |word: &str| match word.split_once('=') {
            Some((name, value)) => setting(task, name) == value,
            None => task["name"].as_str().is_some_and(|name| name.contains(word)),
        };
        self.filter.split_whitespace().all(matches)
    }

    /// Handles a key while the user types the filter.
    fn edit_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(char) => self.filter.push(char),
            _ => {}
        }
    }
}

/// Returns the text of a task's setting.
pub(super) fn setting(task: &Value, name: &str) -> String {
    match &task["differs"][name] {
        Value::Null => "-".to_owned(),
        value => shown(name, value),
    }
}

/// Compares two values: numbers come before texts, and missing values last.
fn order(a: &Value, b: &Value) -> Ordering {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => a.is_null().cmp(&b.is_null()).then_with(|| a.to_string().cmp(&b.to_string())),
    }
}

/// Returns for each task with a result the positions of its settings on their axes, from 0 to 1, and last the position of its
/// result. Better results are higher.
pub(super) fn parallel(settings: &[String], tasks: &[Value]) -> Vec<(String, Vec<f64>)> {
    let results: Vec<(&Value, f64)> = tasks.iter().filter_map(|task| Some((task, result(task)?))).collect();
    let axis = |name: &String| {
        let mut values: Vec<&Value> = results.iter().map(|(task, _)| &task["differs"][name]).collect();
        values.sort_by(|a, b| order(a, b));
        values.dedup();
        values.into_iter().cloned().collect::<Vec<Value>>()
    };
    let axes: Vec<(&String, Vec<Value>)> = settings.iter().map(|name| (name, axis(name))).collect();
    let (low, high) = results.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), (_, result)| {
        (low.min(*result), high.max(*result))
    });
    let share = |place: usize, count: usize| place as f64 / (count.max(2) - 1) as f64;
    let of = |(task, result): &(&Value, f64)| {
        let places = axes.iter().map(|(name, values)| {
            let place = values.iter().position(|value| *value == task["differs"][name.as_str()]);
            share(place.unwrap_or_default(), values.len())
        });
        let result = if high > low { (high - result) / (high - low) } else { 0.5 };
        (task["name"].as_str().unwrap_or_default().to_owned(), places.chain([result]).collect())
    };
    results.iter().map(of).collect()
}

/// Returns the current figure that ranks a task, of its validation, of its best evaluation so far, or of its training; lower is
/// better.
fn result(task: &Value) -> Option<f64> {
    let score = |of: &Value| serde_json::from_value::<Score>(of.clone()).ok();
    let all = task["evaluations"].as_array().into_iter().flatten();
    let best = || all.filter_map(|one| score(&one[1])).min_by(|a, b| a.cost.total_cmp(&b.cost));
    let figure = match score(&task["validation"]).or_else(best) {
        Some(score) => score.metric.map_or(score.loss, |(measure, value)| measure.cost(value)),
        None => task["training_loss"].as_f64()?,
    };
    Some(figure).filter(|figure| figure.is_finite())
}

/// Averages losses over equal numbers of minibatches, ignoring losses that are not numbers.
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

/// Returns the utilization of each device over the last [`WINDOW`] seconds, from 0 to 1.
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
    fn values_are_places_on_axes_and_the_best_result_is_above() {
        let task = |name: &str, lr: f64, optimizer: &str, loss: f64| {
            json!({
                "name": name, "differs": { "lr": lr, "optimizer": optimizer }, "evaluations": [],
                "validation": { "loss": loss },
            })
        };
        let mut tasks =
            vec![task("a", 1e-3, "sgd", 2.0), task("b", 1e-2, "adamw", 1.0), task("c", 1e-1, "sgd", 1.5)];
        tasks.push(json!({ "name": "new", "differs": { "lr": 1.0, "optimizer": "sgd" }, "evaluations": [] }));
        let settings = ["lr", "optimizer"].map(str::to_owned);
        let found = parallel(&settings, &tasks);
        let expected = [("a", [0.0, 1.0, 0.0]), ("b", [0.5, 0.0, 1.0]), ("c", [1.0, 1.0, 0.5])];
        assert_eq!(found, expected.map(|(name, places)| (name.to_owned(), places.to_vec())));
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
