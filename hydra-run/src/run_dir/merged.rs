//! The runs of one grid merged into one report: the parts that array jobs or nodes trained, and the tasks still missing.

use crate::run_dir::compared::compare;
use crate::run_dir::directory::{is_taken, is_unfinished, read_report};
use crate::run_dir::journal::Journal;
use crate::run_dir::leaderboard::Report;
use crate::run_dir::spec::RunSpec;
use crate::settings::{Part, divided};
use crate::terminal::Usage;
use anyhow::{Context, Result, bail};
use hydra_engine::REPORT_SCHEMA;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The report of several runs. A task that is in more than one of them is taken from the run in which it got farthest.
pub struct Merged {
    report: Report,
    json: Value,
    /// Notes on the leaderboard, one per line.
    notes: Vec<String>,
}

/// One of the runs.
struct MergedRun {
    dir: String,
    spec: RunSpec,
    running: bool,
    tasks: Vec<Value>,
    machines: Vec<Value>,
    /// The text of a note on lines of its journal that could not be read.
    unread: Option<String>,
}

impl Merged {
    /// Reads the runs in these directories.
    pub fn read(dirs: &[PathBuf]) -> Result<Self> {
        for (index, dir) in dirs.iter().enumerate() {
            let same = |other: &PathBuf| other == dir || other.canonicalize().ok() == dir.canonicalize().ok();
            if dir.exists() && dirs[..index].iter().any(same) {
                bail!(Usage::new(format!(
                    "`{}` is given twice: pass each run directory once",
                    dir.display()
                )));
            }
        }
        let runs = dirs.iter().map(|dir| MergedRun::read(dir)).collect::<Result<Vec<_>>>()?;
        check_one_grid(&runs)?;
        let all = all_of(&runs);
        let tasks: Vec<Value> = all.values().map(|found| found[0].clone()).collect();
        let missing = missing(&runs, &all)?;
        let mut notes: Vec<String> = missing.iter().map(MissingTasks::text).collect();
        notes.extend(runs.iter().filter_map(|run| run.unfinished(&tasks)));
        let twice = twice(&all);
        notes.extend(twice.iter().map(text_of_twice));
        notes.extend(different(&runs));
        notes.extend(
            runs.iter().filter_map(|run| Some(format!("unread: {}: {}", run.dir, run.unread.as_ref()?))),
        );
        let done = missing.is_empty() && tasks.iter().all(|task| task["state"] == "done");
        let state = match runs.iter().any(|run| run.running) {
            true => "running",
            false if done => "done",
            false => "stopped",
        };
        let missing: Vec<Value> = missing.iter().map(MissingTasks::json).collect();
        let mut json = json!({
            "schema": REPORT_SCHEMA, "state": state, "tasks": tasks, "missing": missing, "twice": twice,
            "runs": runs.iter().map(MergedRun::json).collect::<Value>(), "notes": notes,
        });
        compare(&mut json)?;
        Ok(Self { report: Report::so_far(tasks)?, json, notes })
    }

    /// Returns the merged report as JSON.
    ///
    /// # Errors
    /// If a figure cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        Ok(format!("{}\n", serde_json::to_string_pretty(&self.json)?))
    }

    /// Returns the leaderboard, the failures and the notes.
    pub fn render(&self) -> String {
        let lines = self.report.failures().into_iter().chain(self.notes.iter().cloned());
        let lines: String = lines.map(|line| format!("{line}\n")).collect();
        let between = if lines.is_empty() { "" } else { "\n" };
        format!("{}{between}{lines}", self.report.ranking())
    }
}

impl MergedRun {
    fn read(dir: &Path) -> Result<Self> {
        let journal = Journal::read(dir)?;
        let (tasks, running) = match is_unfinished(dir) {
            true => {
                let running = is_taken(dir);
                (journal.report(running), running)
            }
            false => (tasks_of(&read_report(dir)?).with_context(|| shown(dir))?, false),
        };
        let shown = dir.display().to_string();
        let of_run = |mut task: Value| {
            task["run"] = json!(shown);
            task
        };
        let tasks = tasks.into_iter().map(of_run).collect();
        let (spec, unread) = (RunSpec::in_dir(dir)?, journal.unread());
        Ok(Self { spec, dir: shown, running, tasks, machines: journal.machines, unread })
    }

    fn json(&self) -> Value {
        let part = self.spec.tasks.part.map(|part| part.to_string());
        json!({ "dir": self.dir, "part": part, "running": self.running, "machines": self.machines })
    }

    /// Returns a note on the unfinished tasks that got farthest in this run, if there are any.
    fn unfinished(&self, farthest: &[Value]) -> Option<String> {
        let ended = |task: &&Value| matches!(task["state"].as_str(), Some("done" | "failed" | "skipped"));
        let is_open = |task: &&Value| task["run"] == self.dir.as_str() && !ended(task);
        let open: Vec<Value> = farthest.iter().filter(is_open).cloned().collect();
        let states = Journal::states(&open);
        let counts: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
        let part = self.spec.tasks.part.map(|part| format!("part {part}, ")).unwrap_or_default();
        let (counts, dir) = (counts.join(", "), &self.dir);
        match self.running {
            _ if open.is_empty() => None,
            true => Some(format!("unfinished: {part}{dir}: {counts}; the run is running")),
            false => Some(format!("unfinished: {part}{dir}: {counts}; continue with: hydra resume {dir}")),
        }
    }
}

fn shown(dir: &Path) -> String {
    format!("the report in `{}` cannot be shown", dir.display())
}

/// Returns the tasks of a report, including the skipped ones.
fn tasks_of(text: &str) -> Result<Vec<Value>> {
    Report::parse(text)?;
    let report: Value = serde_json::from_str(text)?;
    let list = |key: &str| report[key].as_array().cloned().unwrap_or_default();
    let skipped = list("skipped").into_iter().map(|task| {
        json!({
            "name": task["name"], "config": task["config"], "state": "skipped", "error": task["reason"],
            "steps": 0,
        })
    });
    Ok(list("tasks").into_iter().chain(skipped).collect())
}

/// Fails if the runs have different inputs, so that their tasks cannot be ranked together.
fn check_one_grid(runs: &[MergedRun]) -> Result<()> {
    let mut noted = runs.iter().filter_map(|run| Some((run, run.spec.inputs.as_ref()?)));
    let Some((first, inputs)) = noted.next() else { return Ok(()) };
    match noted.find(|(_, other)| *other != inputs) {
        Some((other, _)) => bail!(
            "`{}` and `{}` are not parts of one grid: the SHA-256 of models or data in their spec.toml differ; pass \
            run directories of one grid",
            first.dir,
            other.dir
        ),
        None => Ok(()),
    }
}

/// Returns the tasks of the runs in order, keyed by name and configuration; the farthest instance of each is first.
fn all_of(runs: &[MergedRun]) -> BTreeMap<(usize, String), Vec<&Value>> {
    let mut all: BTreeMap<(usize, String), Vec<&Value>> = BTreeMap::new();
    let mut order: Vec<(&Value, &Value)> = Vec::new();
    for task in runs.iter().flat_map(|run| &run.tasks) {
        let known =
            order.iter().position(|(name, config)| *name == &task["name"] && same(config, &task["config"]));
        let at = known.unwrap_or(order.len());
        if known.is_none() {
            order.push((&task["name"], &task["config"]));
        }
        let name = task["name"].as_str().unwrap_or_default().to_owned();
        all.entry((at, name)).or_default().push(task);
    }
    all.values_mut().for_each(|found| found.sort_by_key(|task| Reverse(progress_of(task))));
    all
}

/// Returns true if two configurations are equal apart from the paths of model and data, or one of them is incomplete.
fn same(one: &Value, other: &Value) -> bool {
    let known = |config: &Value| config.get("training").is_some();
    let without_paths = |config: &Value| {
        let mut config = config.clone();
        (config["model"], config["data"]) = (Value::Null, Value::Null);
        config
    };
    !known(one) || !known(other) || without_paths(one) == without_paths(other)
}

/// Returns the sort key for how far a task has got.
fn progress_of(task: &Value) -> (u8, u64) {
    let state = match task["state"].as_str() {
        Some("done") => 4,
        Some("failed") => 3,
        Some("waiting") => 1,
        Some("skipped") => 0,
        _ => 2,
    };
    (state, task["steps"].as_u64().unwrap_or_default())
}

/// Tasks of the grid that no run has; those of one part if the parts are known.
struct MissingTasks {
    part: Option<Part>,
    tasks: Vec<String>,
}

impl MissingTasks {
    fn text(&self) -> String {
        let tasks = self.tasks.join(", ");
        self.part.map_or_else(|| format!("missing: {tasks}"), |part| format!("missing: part {part}: {tasks}"))
    }

    fn json(&self) -> Value {
        json!({ "part": self.part.map(|part| part.to_string()), "tasks": self.tasks })
    }
}

fn missing(runs: &[MergedRun], all: &BTreeMap<(usize, String), Vec<&Value>>) -> Result<Vec<MissingTasks>> {
    let mut missing: BTreeMap<Option<(usize, usize)>, Vec<String>> = BTreeMap::new();
    let mut looked_for: Vec<String> = all.keys().map(|(_, name)| name.clone()).collect();
    for run in runs.iter().filter(|run| run.spec.search.is_none()) {
        let (grid, parts) = (run.spec.whole_grid()?, run.spec.tasks.part.map(|part| part.parts));
        let of = parts.map(|parts| divided(&grid, &run.spec.training, parts));
        for (index, one) in grid.iter().enumerate().filter(|(_, one)| !looked_for.contains(&one.name)) {
            let part = parts.zip(of.as_ref()).map(|(parts, of)| (parts, of[index]));
            missing.entry(part).or_default().push(one.name.clone());
        }
        looked_for.extend(grid.into_iter().map(|one| one.name));
    }
    let part = |(parts, number)| Part { number, parts };
    Ok(missing.into_iter().map(|(of, tasks)| MissingTasks { part: of.map(part), tasks }).collect())
}

/// Returns the tasks that several runs trained to the end, and whether their weights are equal.
fn twice(all: &BTreeMap<(usize, String), Vec<&Value>>) -> Vec<Value> {
    let trained = all.iter().map(|((_, name), found)| {
        (name, found.iter().filter(|task| task["state"] == "done").copied().collect::<Vec<_>>())
    });
    let several = trained.filter(|(_, found)| found.len() > 1).map(|(name, found)| {
        let runs: Vec<&Value> = found.iter().map(|task| &task["run"]).collect();
        let hash = &found[0]["weights_sha256"];
        let equal = hash.is_string() && found.iter().all(|task| &task["weights_sha256"] == hash);
        json!({ "task": name, "runs": runs, "equal": equal })
    });
    several.collect()
}

fn text_of_twice(twice: &Value) -> String {
    let runs: Vec<&str> = twice["runs"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let (task, runs) = (twice["task"].as_str().unwrap_or_default(), runs.join(", "));
    let equal = if twice["equal"] == true { "with equal weights" } else { "with different weights" };
    format!("twice: {task} was trained to its end in {runs}, {equal}; the leaderboard has the first one")
}

/// Returns the note on differing builds or processors, if they differ.
fn different(runs: &[MergedRun]) -> Option<String> {
    let mut kinds: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (run, machine) in runs.iter().flat_map(|run| run.machines.iter().map(move |machine| (run, machine))) {
        let word = |key: &str| machine[key].as_str().unwrap_or("unknown");
        let kind = format!("hydra {} for {} on {}", word("hydra"), word("system"), word("processor"));
        kinds.entry(kind).or_default().push(&run.dir);
    }
    let texts: Vec<String> =
        kinds.iter().map(|(kind, dirs)| format!("{kind} ({})", dirs.join(", "))).collect();
    (texts.len() > 1).then(|| {
        format!(
            "different builds or processors, for which bitwise equal results are not guaranteed: {}",
            texts.join("; ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(name: &str, run: &str, state: &str, steps: u64, hash: &str) -> Value {
        let config = json!({ "training": { "batch": 2 }, "data": run });
        json!({
            "name": name, "run": run, "state": state, "steps": steps, "weights_sha256": hash, "config": config,
        })
    }

    fn run(dir: &str, tasks: Vec<Value>, processor: &str) -> MergedRun {
        let spec = format!(
            "format = 1\ncommand = 'select'\n[model]\n[training]\nbatch = [2]\nlr = [0.1, 0.2, 0.3]\n[tasks]\npart = '{dir}/3'\n\
             [devices]\n"
        );
        let machine = json!({ "hydra": "1", "system": "s", "processor": processor });
        let spec = toml::from_str(&spec).unwrap();
        MergedRun { dir: dir.to_owned(), spec, running: false, tasks, machines: vec![machine], unread: None }
    }

    #[test]
    fn what_came_farthest_counts_and_what_was_trained_twice_is_named() {
        let runs = [
            run("1", vec![task("a", "1", "stopped", 5, "x"), task("b", "1", "done", 9, "y")], "p"),
            run("2", vec![task("a", "2", "done", 9, "x"), task("b", "2", "done", 9, "z")], "p"),
        ];
        let all = all_of(&runs);
        let first: Vec<&Value> = all.values().map(|found| &found[0]["run"]).collect();
        assert_eq!(first, ["2", "1"]);
        let twice = twice(&all);
        assert_eq!(twice, [json!({ "task": "b", "runs": ["1", "2"], "equal": false })]);
        assert!(text_of_twice(&twice[0]).contains("in 1, 2, with different weights"));
        assert_eq!(different(&runs), None);
        let farthest: Vec<Value> = all.values().map(|found| found[0].clone()).collect();
        assert_eq!(runs[0].unfinished(&farthest), None, "it went on elsewhere");
        let alone: Vec<Value> = runs[0].tasks.clone();
        let said = runs[0].unfinished(&alone).unwrap();
        assert_eq!(said, "unfinished: part 1/3, 1: 1 stopped; continue with: hydra resume 1");
        assert_eq!(runs[1].unfinished(&alone), None);
    }

    #[test]
    fn tasks_of_one_name_and_other_settings_are_others() {
        let mut other = task("a", "2", "done", 9, "x");
        other["config"]["training"]["batch"] = json!(4);
        let runs = [run("1", vec![task("a", "1", "done", 9, "x")], "p"), run("2", vec![other], "p")];
        assert_eq!(all_of(&runs).len(), 2);
    }

    #[test]
    fn missing_parts_and_other_processors_are_named() {
        let runs = [run("1", vec![task("b2-lr1e-1", "1", "done", 9, "x")], "p"), run("3", Vec::new(), "q")];
        let missing = missing(&runs, &all_of(&runs)).unwrap();
        let texts: Vec<String> = missing.iter().map(MissingTasks::text).collect();
        assert_eq!(texts, ["missing: part 2/3: b2-lr2e-1", "missing: part 3/3: b2-lr3e-1"]);
        let said = different(&runs).unwrap();
        assert!(said.contains("not guaranteed: hydra 1 for s on p (1); hydra 1 for s on q (3)"), "{said}");
    }
}
