//! The descent of tasks that were forked while a run went on, as `control.jsonl` says.

use crate::run_dir::directory::CONTROL;
use crate::run_dir::follower::lines_from;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Gives each task that was forked its `parent` and the minibatch at which it was, `forked_at`.
pub(crate) fn add_descent(dir: &Path, tasks: &mut Value) {
    let mut parents = BTreeMap::new();
    let note = |line: &[u8]| {
        let Ok(line) = serde_json::from_slice::<Value>(line) else { return };
        if let Some(name) =
            line["name"].as_str().filter(|_| line["command"] == "fork" || line["command"] == "extend")
        {
            parents.insert(name.to_owned(), (line["task"].clone(), line["at"].clone()));
        }
    };
    // A file that cannot be read says nothing, as one that is not there.
    let _ = lines_from(&dir.join(CONTROL), 0, u64::MAX, note);
    for task in tasks.as_array_mut().into_iter().flatten() {
        if let Some((parent, at)) = task["name"].as_str().and_then(|name| parents.get(name)) {
            (task["parent"], task["forked_at"]) = (json!(parent), json!(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_and_extensions_name_their_parents() {
        let dir = tempfile::tempdir().unwrap();
        let mut tasks = json!([{ "name": "a" }, { "name": "a-f1" }, { "name": "a-x" }]);
        let without = tasks.clone();
        add_descent(dir.path(), &mut tasks);
        assert_eq!(tasks, without);
        let lines = [
            json!({ "command": "pause", "task": "a", "at": 3, "name": "a" }),
            json!({ "command": "fork", "task": "a", "at": 5, "name": "a-f1", "changes": { "lr": "1e-4" } }),
            json!({ "command": "extend", "task": "a-f1", "at": 9, "name": "a-x", "steps": 20 }),
        ];
        let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(dir.path().join(CONTROL), lines + "{\"half").unwrap();
        add_descent(dir.path(), &mut tasks);
        let of = |place: usize| (tasks[place]["parent"].as_str(), tasks[place]["forked_at"].as_u64());
        assert_eq!([of(0), of(1), of(2)], [(None, None), (Some("a"), Some(5)), (Some("a-f1"), Some(9))]);
    }
}
