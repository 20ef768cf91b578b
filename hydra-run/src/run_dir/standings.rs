//! The tasks of a run so far in leaderboard order.

use crate::run_dir::compared::compare;
use crate::run_dir::journal::Journal;
use crate::run_dir::leaderboard::Report;
use anyhow::Result;
use serde_json::{Value, json};

/// Returns the tasks with their ranks under the keys of a report, and `seeds` if tasks differ in the seed alone. Each task has
/// `training_loss`, the mean of its last losses, instead of `losses`.
pub fn ranked(journal: &Journal, running: bool) -> Result<Value> {
    let mut tasks = journal.standings(running);
    for task in &mut tasks {
        let losses: Vec<f64> =
            task["losses"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        task["training_loss"] = json!((!losses.is_empty()).then_some(mean));
    }
    let so_far = json!({ "state": "so far", "tasks": tasks }).to_string();
    let mut ranked: Value = serde_json::from_str(&Report::with_ranks(&so_far)?)?;
    compare(&mut ranked)?;
    let each = ranked["tasks"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut);
    each.for_each(|task| drop(task.remove("losses")));
    Ok(ranked)
}
