//! The snapshot of a run as JSON: the state of its tasks, and its history up to the first line that is sent as an event.

use super::curves::{drawn, points_each};
use super::runs::state;
use super::socket;
use crate::plots::memory::Moment;
use crate::run_dir::journal::Entry;
use crate::run_dir::{Follower, MODELS, PAGE, add_commands, ranked, search_progress};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The maximum number of memory samples that are sent.
const MOMENTS: usize = 2000;

/// Returns the whole run, with the offset in `metrics.jsonl` from which events continue.
pub(super) fn whole(run: &mut Follower, dir: &Path) -> Result<Value> {
    run.follow()?;
    let mut whole = standings(run, dir)?;
    let journal = run.journal();
    let most = points_each(journal.tasks.len());
    let curve = |task: &Entry| {
        let mut curve = drawn(task.losses(), most);
        curve["task"] = json!(task.name);
        curve["validations"] = json!(task.validations());
        curve
    };
    whole["curves"] = journal.tasks.iter().map(curve).collect();
    let samples = |task: &Entry| {
        task.samples().map(|(step, samples)| json!({ "task": task.name, "step": step, "samples": samples }))
    };
    whole["samples"] = journal.tasks.iter().filter_map(samples).collect();
    whole["memory"] = memory(&journal.memory);
    whole["from"] = json!(run.read());
    Ok(whole)
}

/// Returns the state of the run and of its tasks, in the order of the leaderboard.
pub(super) fn standings(run: &Follower, dir: &Path) -> Result<Value> {
    let (journal, state) = (run.journal(), state(dir));
    let mut ranked = ranked(journal, state == "running")?;
    let (mut tasks, seeds) = (ranked["tasks"].take(), ranked["seeds"].take());
    add_commands(dir, &mut tasks);
    let search = search_progress(dir, journal);
    let search = search.map(|(trained, asked)| json!({ "trained": trained, "asked": asked }));
    Ok(json!({
        "search": search, "state": state, "at_s": journal.at_s, "time": journal.time, "tasks": tasks,
        "seeds": seeds,
        "controllable": state == "running" && socket::path(dir).exists(), "report": dir.join(PAGE).is_file(),
    }))
}

/// Returns the directory of the model that a task has written.
///
/// # Errors
/// A task that the run does not have, or whose model is not there.
pub(super) fn model(run: &mut Follower, dir: &Path, task: &str) -> Result<PathBuf> {
    run.follow()?;
    let standings = standings(run, dir)?;
    let mut tasks = standings["tasks"].as_array().into_iter().flatten();
    let found =
        tasks.find(|found| found["name"] == task).with_context(|| format!("no task is called `{task}`"))?;
    let written = found["model_dir"].as_str().map(Path::new);
    // A run directory that was moved or copied has its models still.
    let model = written.and_then(Path::file_name).map(|name| dir.join(MODELS).join(name));
    let model = model.filter(|model| model.is_dir());
    model.with_context(|| format!("task `{task}` has no model: it has not ended, or its model was removed"))
}

/// Returns the names and budgets of the tiers, and samples of reserved bytes. Samples that are merged keep the maximum.
fn memory(moments: &[Moment]) -> Value {
    let last = moments.last().map(|moment| moment.tiers.as_slice()).unwrap_or_default();
    let tiers: Vec<Value> =
        last.iter().map(|tier| json!({ "name": tier.name, "budget_bytes": tier.budget_bytes })).collect();
    let together = moments.len().div_ceil(MOMENTS).max(1);
    let points = moments.chunks(together).map(|moments| {
        let of = |name: &str| {
            let same = moments.iter().flat_map(|moment| &moment.tiers).filter(|tier| tier.name == name);
            same.map(|tier| tier.peak_bytes.max(tier.reserved_bytes)).max()
        };
        let bytes: Vec<Option<u64>> = last.iter().map(|tier| of(&tier.name)).collect();
        json!([moments.last().map(|moment| moment.at_s), bytes])
    });
    let now: Vec<u64> = last.iter().map(|tier| tier.reserved_bytes).collect();
    json!({ "tiers": tiers, "now": now, "points": points.collect::<Vec<Value>>() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_dir::METRICS;

    fn lines() -> String {
        let minibatch = |task: &str, step: u64, loss: f64| json!({ "event": "minibatch", "task": task, "step": step, "steps": 2, "loss": loss, "units": 8, "at_s": step });
        let end = |task: &str, loss: f64| {
            [
                json!({ "event": "evaluation", "task": task, "kind": "validation", "step": 2, "loss": loss, "at_s": 3.0 }),
                json!({ "event": "end", "task": task, "state": "done", "at_s": 3.0 }),
            ]
        };
        let tier = |bytes| json!([{ "name": "cpu:0", "reserved_bytes": bytes, "peak_bytes": bytes + 1, "budget_bytes": 9 }]);
        let memory = |at_s: f64, bytes: u64| json!({ "event": "memory", "tiers": tier(bytes), "at_s": at_s });
        let samples = json!({ "event": "samples", "task": "a", "step": 1, "samples": [{ "prompt": "p", "text": "t" }] });
        let lines = [
            &[
                samples,
                minibatch("a", 0, 5.0),
                minibatch("b", 0, 4.0),
                memory(0.5, 3),
                minibatch("a", 1, 3.0),
            ][..],
            &end("a", 2.0),
            &[minibatch("b", 1, 3.5), memory(2.5, 4)],
            &end("b", 1.0),
        ];
        lines.concat().iter().map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn a_run_is_told_whole_and_ranked() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(METRICS), lines()).unwrap();
        let mut run = Follower::new(dir.path());
        let whole = whole(&mut run, dir.path()).unwrap();
        let task = |place: usize, key: &str| whole["tasks"][place][key].clone();
        assert_eq!((task(0, "name"), task(0, "rank"), task(1, "name")), (json!("b"), json!(1), json!("a")));
        assert_eq!((task(0, "training_loss"), task(0, "losses")), (json!(3.75), Value::Null));
        let curve = &whole["curves"][0];
        assert_eq!((&curve["task"], &curve["losses"]), (&json!("a"), &json!([5.0, 3.0])));
        assert_eq!(
            whole["samples"],
            json!([{ "task": "a", "step": 1, "samples": [{ "prompt": "p", "text": "t" }] }])
        );
        assert_eq!(curve["validations"], json!([[2, 2.0]]));
        assert_eq!(
            whole["memory"],
            json!({
                "tiers": [{ "name": "cpu:0", "budget_bytes": 9 }], "now": [4], "points": [[0.5, [4]], [2.5, [5]]],
            })
        );
        assert_eq!((&whole["from"], &whole["state"]), (&json!(lines().len()), &json!("stopped")));
        assert_eq!(whole["controllable"], false);
    }
}
