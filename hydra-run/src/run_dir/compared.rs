//! Comparisons between the tasks of a JSON report: the settings in which they differ, and statistics over seeds.

use crate::run_dir::differences::{Differences, add_differences};
use crate::run_dir::group::TaskGroup;
use crate::run_dir::leaderboard::Report;
use crate::run_dir::seeds::repeated;
use anyhow::Result;
use serde_json::Value;

/// Adds two keys to a JSON report: `differs` of each task, its values of the settings in which the tasks differ; and `seeds`,
/// the statistics of tasks that differ in the seed alone, if there are any.
pub(crate) fn compare(report: &mut Value) -> Result<()> {
    let Some(tasks) = report["tasks"].as_array_mut() else { return Ok(()) };
    add_differences(tasks);
    let read = Report::so_far(tasks.clone())?;
    let of = |group: &TaskGroup<'_>| {
        let (differences, _) = Differences::of(group.tasks.iter().map(|task| &task.config)).without_seed();
        repeated(group).iter().map(|one| one.json(group, &differences)).collect::<Vec<_>>()
    };
    let seeds: Vec<Value> = read.groups().iter().flat_map(of).collect();
    if !seeds.is_empty() {
        report["seeds"] = seeds.into();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn task(name: &str, lr: f64, seed: u64, loss: f64) -> Value {
        let training = json!({ "batch": 8, "seed": seed, "optimizer": { "name": "sgd", "lr": lr } });
        let result = json!({ "loss": loss, "perplexity": loss.exp(), "predicted_tokens": 9 });
        json!({
            "name": name, "state": "done", "steps": 4, "validation": result, "test": null,
            "config": { "batch": 8, "lr": lr, "data": "builtin", "training": training },
        })
    }

    fn tasks() -> Vec<Value> {
        let mut other = task("lr1e-2-seed2", 1e-2, 2, 9.0);
        other["state"] = json!("failed");
        vec![
            task("lr1e-2-seed1", 1e-2, 1, 5.0),
            other,
            task("lr1e-3-seed1", 1e-3, 1, 1.0),
            task("lr1e-3-seed2", 1e-3, 2, 2.0),
            task("lr1e-3-seed3", 1e-3, 3, 3.0),
        ]
    }

    #[test]
    fn tasks_that_differ_in_the_seed_alone_have_a_mean_and_a_deviation() {
        let mut report = json!({ "tasks": tasks() });
        compare(&mut report).unwrap();
        let seeds = report["seeds"].as_array().unwrap();
        assert_eq!(seeds.len(), 2);
        let [best, other] = [&seeds[0], &seeds[1]];
        assert_eq!((&best["differs"], &best["n"]), (&json!({ "lr": 1e-3 }), &json!(3)));
        assert_eq!(best["tasks"], json!(["lr1e-3-seed1", "lr1e-3-seed2", "lr1e-3-seed3"]));
        assert_eq!(best["validation"]["loss"], json!({ "mean": 2.0, "deviation": 1.0 }));
        assert_eq!((&best["test"], &other["n"]), (&Value::Null, &json!(1)));
        assert_eq!(other["validation"]["loss"], json!({ "mean": 5.0, "deviation": null }));
        assert_eq!(report["tasks"][2]["differs"], json!({ "lr": 1e-3, "seed": 1 }));
        let text = Report::so_far(tasks()).unwrap().ranking();
        let (_, table) = text.split_once("over seeds, ").unwrap();
        let rows: Vec<Vec<&str>> =
            table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["lr", "seeds", "validation", "ppl", "test", "ppl"]);
        // e, e^2 and e^3, whose mean is 10.06 and whose deviation is 8.987.
        assert_eq!(rows[1], ["1e-3", "3", "10.064", "±", "8.987", "-"]);
        assert_eq!(rows[2], ["1e-2", "1", "of", "2", "148.4", "-"]);
    }

    #[test]
    fn tasks_without_a_repetition_have_no_table_and_forks_with_changes_are_no_repetition() {
        let mut tasks = vec![task("a", 1e-3, 1, 1.0), task("b", 1e-2, 2, 1.0)];
        assert!(!Report::so_far(tasks.clone()).unwrap().ranking().contains("over seeds"));
        tasks.push(task("c", 1e-3, 2, 1.0));
        assert!(Report::so_far(tasks.clone()).unwrap().ranking().contains("over seeds"));
        tasks[2]["config"]["fork"] = json!({ "of": "b", "at": 2, "changes": { "lr": "1e-3" } });
        assert!(!Report::so_far(tasks.clone()).unwrap().ranking().contains("over seeds"));
        // A trial that continues another trial's state has the same bits as one trained alone.
        tasks[2]["config"]["fork"] = json!({ "of": "b", "at": 2 });
        assert!(Report::so_far(tasks).unwrap().ranking().contains("over seeds"));
    }
}
