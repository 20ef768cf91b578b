//! Task attributes that come from `control.jsonl`: the parent of a fork, and whether a task was deleted.

use crate::run_dir::directory::CONTROL;
use crate::run_dir::follower::lines_from;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Sets `parent` and `forked_at` (in minibatches) of every forked task, and the state `deleted` of every task that was deleted
/// and has ended.
pub(crate) fn add_commands(dir: &Path, tasks: &mut Value) {
    let (mut parents, mut deleted) = (BTreeMap::new(), BTreeSet::new());
    let note = |line: &[u8]| {
        let Ok(line) = serde_json::from_slice::<Value>(line) else { return };
        match (line["command"].as_str(), line["name"].as_str(), line["task"].as_str()) {
            (Some("fork" | "extend"), Some(name), Some(task)) => {
                parents.insert(name.to_owned(), (task.to_owned(), line["at"].clone()));
            }
            (Some("delete"), _, Some(task)) => drop(deleted.insert(task.to_owned())),
            _ => {}
        }
    };
    // An unreadable file is treated as a missing one.
    let _ = lines_from(&dir.join(CONTROL), 0, u64::MAX, note);
    for task in tasks.as_array_mut().into_iter().flatten() {
        let name = task["name"].as_str().unwrap_or_default();
        let is_over = matches!(task["state"].as_str(), Some("done" | "stopped" | "failed"));
        let is_deleted = is_over && deleted.contains(name);
        if let Some((parent, at)) = parents.get(name) {
            (task["parent"], task["forked_at"]) = (json!(parent), json!(at));
        }
        if is_deleted {
            task["state"] = json!("deleted");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_name_their_parents_and_what_ended_and_was_deleted_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let mut tasks = json!([
            { "name": "a", "state": "stopped" }, { "name": "a-f1", "state": "running" }, { "name": "a-x" },
        ]);
        let without = tasks.clone();
        add_commands(dir.path(), &mut tasks);
        assert_eq!(tasks, without);
        let lines = [
            json!({ "command": "pause", "task": "a", "at": 3, "name": "a" }),
            json!({ "command": "fork", "task": "a", "at": 5, "name": "a-f1", "changes": { "lr": "1e-4" } }),
            json!({ "command": "extend", "task": "a-f1", "at": 9, "name": "a-x", "steps": 20 }),
            json!({ "command": "delete", "task": "a", "at": 9 }),
            json!({ "command": "delete", "task": "a-f1", "at": 12 }),
        ];
        let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(dir.path().join(CONTROL), lines + "{\"half").unwrap();
        add_commands(dir.path(), &mut tasks);
        let of = |place: usize| (tasks[place]["parent"].as_str(), tasks[place]["forked_at"].as_u64());
        assert_eq!([of(0), of(1), of(2)], [(None, None), (Some("a"), Some(5)), (Some("a-f1"), Some(9))]);
        assert_eq!((&tasks[0]["state"], &tasks[1]["state"]), (&"deleted".into(), &"running".into()));
    }
}
