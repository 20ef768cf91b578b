//! The final report as text: a leaderboard for each measure and data set, the devices, and the bytes transferred.

use super::differences::Differences;
use super::group::{TaskGroup, groups};
use super::seeds;
use super::task::{LAST, ReportTask, TrainingProgress, data, figure};
use crate::terminal::{Score, Table, thousands};
use anyhow::{Context, Result, ensure};
use hydra_core::ByteSize;
use hydra_engine::{Place, REPORT_SCHEMA, Skipped, Transfers};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The part of a report that the leaderboard reads. Numbers that JSON cannot express (an infinite perplexity, the loss of a
/// diverged task) are `null` in the file, hence optional here.
#[derive(Debug, Default, Deserialize)]
pub struct Report {
    makespan_s: Option<f64>,
    lower_bound_s: Option<f64>,
    /// Missing in reports of versions without replays.
    replay_s: Option<f64>,
    tokens_per_s: Option<f64>,
    policy: String,
    prefetch: bool,
    pub(super) tasks: Vec<ReportTask>,
    /// Missing in reports of versions without skipped tasks.
    #[serde(default)]
    skipped: Vec<Skipped>,
    devices: Vec<ReportedDevice>,
    transfers: Transfers,
    host_admitted_bytes: u64,
    host_budget_bytes: u64,
}

#[derive(Debug, Deserialize)]
struct ReportedDevice {
    name: String,
    threads: usize,
    budget_bytes: u64,
    peak_bytes: u64,
    peak_measured: bool,
    compute_s: f64,
    copy_s: f64,
    stall_s: f64,
    utilization: Option<f64>,
}

impl Report {
    /// Reads the tasks of a `report.json`.
    ///
    /// # Errors
    /// If the text is no report.
    pub fn parse(json: &str) -> Result<Self> {
        let value: serde_json::Value = serde_json::from_str(json).context("the report is not valid JSON")?;
        let schema = value.get("schema").and_then(serde_json::Value::as_u64);
        let schema = schema.context("the report has no `schema`: expected a report.json of hydra")?;
        ensure!(
            schema == u64::from(REPORT_SCHEMA),
            "the report has schema {schema}; this version of hydra reads schema {REPORT_SCHEMA}"
        );
        serde_json::from_value(value).context("the report does not match its schema")
    }

    /// Returns a report of a run that has none yet, from its tasks in the format of a report.
    pub fn so_far(tasks: Vec<serde_json::Value>) -> Result<Self> {
        let tasks =
            serde_json::from_value(tasks.into()).context("the metrics of the run do not make a report")?;
        Ok(Self { tasks, ..Self::default() })
    }

    /// Returns the report with its tasks in leaderboard order, each with its `rank`, or `null` if it is not ranked.
    pub(crate) fn with_ranks(json: &str) -> Result<String> {
        let mut value: Value = serde_json::from_str(json).context("the report is not valid JSON")?;
        let so_far = value.get("state").is_some();
        let report = match so_far {
            true => Self::so_far(value["tasks"].as_array().cloned().unwrap_or_default())?,
            false => Self::parse(json)?,
        };
        let groups = report.groups();
        // Tasks of different runs may have the same name.
        let place = |task: &ReportTask| report.tasks.iter().position(|other| std::ptr::eq(other, task));
        let ranked = groups.iter().flat_map(TaskGroup::ranked).filter_map(|(rank, task)| {
            let mut task = value["tasks"].get(place(task)?)?.clone();
            task["rank"] = serde_json::json!(rank);
            Some(task)
        });
        let ranked: Vec<Value> = ranked.collect();
        value["tasks"] = ranked.into();
        Ok(value.to_string())
    }

    /// Returns the task names of each group in leaderboard order.
    pub(super) fn in_order(&self) -> Vec<Vec<String>> {
        let names =
            |group: &TaskGroup<'_>| group.ranked().iter().map(|(_, task)| task.name.clone()).collect();
        self.groups().iter().map(names).collect()
    }

    /// Returns the failed and the skipped tasks, each with its reason.
    pub fn failures(&self) -> Vec<String> {
        let has_failed = |task: &&ReportTask| matches!(task.state.as_str(), "failed" | "skipped");
        let failed = self.tasks.iter().filter(has_failed).map(ReportTask::failure);
        let skipped = |task: &Skipped| format!("{} was skipped: {}", task.name, task.reason);
        failed.chain(self.skipped.iter().map(skipped)).collect()
    }

    /// Returns the number of models written.
    pub(crate) fn written(&self) -> usize {
        self.tasks.iter().filter(|task| task.model_dir.is_some()).count()
    }

    /// Returns true if a task was stopped before its end.
    pub(crate) fn stopped(&self) -> bool {
        self.tasks.iter().any(|task| task.state == "stopped")
    }

    /// Returns true if a task was stopped before its end, other than those for which `some` is true.
    pub(crate) fn stopped_but(&self, some: impl Fn(&str) -> bool) -> bool {
        self.tasks.iter().any(|task| task.state == "stopped" && !some(&task.name))
    }

    /// Returns true if every task was trained to its end.
    pub fn all_done(&self) -> bool {
        self.skipped.is_empty() && self.tasks.iter().all(|task| task.state == "done")
    }

    /// The number of tasks.
    pub fn task_count(&self) -> usize {
        self.tasks.len() + self.skipped.len()
    }

    /// The leaderboard and its notes, as the terminal shows them.
    pub fn render(&self) -> String {
        let (ranking, devices) = (self.ranking(), self.device_table());
        format!("{ranking}{}\n{devices}\n{}{}", self.limit(), self.summary(), self.optimizers())
    }

    /// Returns the note on `--eval-limit`, if it was given.
    fn limit(&self) -> String {
        let limits = self.tasks.iter().filter_map(|task| task.config["eval_limit"].as_u64());
        let images = self.tasks.iter().filter(|task| task.unit.as_deref() == Some("images")).count();
        let what = match images {
            0 => "blocks of each text",
            all if all == self.tasks.len() => "images of each split",
            _ => "blocks or images of each split",
        };
        let note = |items| format!("evaluated on the first {items} {what} (--eval-limit)\n");
        limits.max().map_or_else(String::new, note)
    }

    /// Returns the notes on tasks whose optimizer ran on the device: how many and why, and which differ bitwise from the host's.
    fn optimizers(&self) -> String {
        let mut text = String::new();
        let places = [
            (Place::Device, "optimizer"),
            (Place::Partial, "a part of the weights and their optimizer state"),
        ];
        for (place, what) in places {
            let placed: Vec<&ReportTask> =
                self.tasks.iter().filter(|task| task.optimizer.on == place).collect();
            if let Some(first) = placed.first() {
                let (some, all, why) = (placed.len(), self.tasks.len(), &first.optimizer.why);
                text.push_str(&format!("{what} on the device for {some} of {all} tasks: {why}\n"));
            }
        }
        let inexact = self.tasks.iter().filter(|task| !task.optimizer.exact);
        let names: Vec<&str> = inexact.map(|task| task.name.as_str()).collect();
        if !names.is_empty() {
            let names = names.join(", ");
            text.push_str(&format!("not bitwise equal to a run with the optimizer on the host: {names}\n"));
        }
        text
    }

    /// Returns the groups of tasks that are ranked together: those with the same measure and data.
    pub(super) fn groups(&self) -> Vec<TaskGroup<'_>> {
        groups(&self.tasks)
    }

    /// Returns the tasks as tables, one for each group, with notes on provisional numbers. Skipped tasks come last in the table
    /// of their data.
    pub fn ranking(&self) -> String {
        let groups = self.groups();
        let shown = |(index, group): (usize, &TaskGroup<'_>)| {
            let last = index + 1 == groups.len();
            let is_here = |skipped: &&Skipped| match groups
                .iter()
                .position(|group| group.data == data(&skipped.config))
            {
                Some(place) => place == index,
                None => last,
            };
            let skipped: Vec<&Skipped> = self.skipped.iter().filter(is_here).collect();
            let title = match groups.len() {
                1 => String::new(),
                _ => format!("{}:\n", group.title()),
            };
            format!("{title}{}", table(group, &skipped))
        };
        let tables: Vec<String> = groups.iter().enumerate().map(shown).collect();
        tables.join("\n")
    }

    fn device_table(&self) -> String {
        let names = "<device|>threads|>utilization|>compute|>copies|>stall|>peak memory|>budget";
        let mut table = Table::new(names.split('|'));
        for device in &self.devices {
            let measured = if device.peak_measured { "" } else { " reserved" };
            table.row(vec![
                device.name.clone(),
                device.threads.to_string(),
                device.utilization.map_or("-".into(), |u| format!("{:.1}%", 100.0 * u)),
                format!("{:.2} s", device.compute_s),
                format!("{:.2} s", device.copy_s),
                format!("{:.2} s", device.stall_s),
                format!("{}{measured}", ByteSize(device.peak_bytes)),
                ByteSize(device.budget_bytes).to_string(),
            ]);
        }
        table.render()
    }

    /// Returns the training throughput for each kind of item.
    fn rates(&self) -> String {
        let mut trained: BTreeMap<&str, u64> = BTreeMap::new();
        for task in &self.tasks {
            task.unit.iter().for_each(|unit| *trained.entry(unit).or_default() += task.units);
        }
        let seconds = self.makespan_s.filter(|seconds| *seconds > 0.0);
        let rate = |(unit, units): (&str, u64)| {
            let rate = seconds.map_or(f64::NAN, |seconds| units as f64 / seconds);
            format!("{} {unit}/s", thousands(rate))
        };
        match trained.is_empty() {
            true => format!("{} tokens/s", thousands(self.tokens_per_s.unwrap_or(f64::NAN))),
            false => trained.into_iter().map(rate).collect::<Vec<_>>().join(" and "),
        }
    }

    fn summary(&self) -> String {
        let seconds = |s: Option<f64>| s.map_or("-".to_owned(), |s| format!("{s:.2} s"));
        let prefetch = if self.prefetch { "prefetch" } else { "no prefetch" };
        let rate = self.rates();
        let replay = match (self.replay_s, self.makespan_s) {
            (Some(replay), Some(makespan)) if makespan > 0.0 => {
                format!(", replay {replay:.2} s: {:.3} of the makespan", replay / makespan)
            }
            _ => String::new(),
        };
        let Transfers { disk_read_bytes: read, disk_written_bytes: written, .. } = self.transfers;
        let disk = match read + written {
            0 => String::new(),
            _ => format!(", {} read from disk and {} written to it", ByteSize(read), ByteSize(written)),
        };
        format!(
            "makespan {} (lower bound {}{replay}), {rate}, {}, {prefetch}\n\
             moved {} to devices and {} to the host{disk}; host memory {} of {}\n",
            seconds(self.makespan_s),
            seconds(self.lower_bound_s),
            self.policy,
            ByteSize(self.transfers.promoted_bytes),
            ByteSize(self.transfers.demoted_bytes),
            ByteSize(self.host_admitted_bytes),
            ByteSize(self.host_budget_bytes),
        )
    }
}

/// Returns the table of a group and its skipped tasks, with a column for each setting in which they differ.
fn table(group: &TaskGroup<'_>, skipped: &[&Skipped]) -> String {
    let what = group.measure.brief();
    let unfinished = group.is_unfinished();
    let forked = group.tasks.iter().any(|task| task.forked_from().is_some());
    let ranked = group.ranked();
    let configs = ranked.iter().map(|(_, task)| &task.config).chain(skipped.iter().map(|task| &task.config));
    let differences = Differences::of(configs);
    let mut columns = vec![">rank".to_owned(), "<task".to_owned()];
    columns.extend(differences.names.iter().map(|name| format!(">{name}")));
    columns.extend([">shards", ">steps"].map(str::to_owned));
    columns.push(format!(">initial {what}"));
    columns.extend(unfinished.then(|| ">training loss".to_owned()));
    columns.extend([format!(">validation {what}"), format!(">test {what}"), "<state".to_owned()]);
    columns.extend(forked.then(|| "<forked from".to_owned()));
    let mut table = Table::new(columns);
    let count = ranked.len();
    // An evaluation that generates no texts lacks their metrics.
    let measured = |score: &&Score| score.measure() == group.measure;
    for (place, (rank, task)) in ranked.into_iter().enumerate() {
        let shown = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
        let mut cells = vec![shown(rank.map(|rank| rank.to_string())), task.name.clone()];
        cells.extend(differences.texts(place));
        let TrainingProgress { steps, steps_in_all, .. } = task.progress;
        cells.extend([
            shown(task.shards.map(|shards| shards.to_string())),
            steps_in_all.map_or(steps.to_string(), |all| format!("{steps} of {all}")),
            shown(task.results.initial_validation.as_ref().filter(measured).map(result)),
        ]);
        cells.extend(unfinished.then(|| shown(task.training_loss().map(figure))));
        let validation = task.validated().map(|(step, score)| match step {
            Some(step) => format!("{} ({step})", result(score)),
            None => result(score),
        });
        cells.extend([
            shown(validation),
            shown(task.results.test.as_ref().filter(measured).map(result)),
            task.state(),
        ]);
        cells.extend(forked.then(|| shown(task.forked_from())));
        table.row(cells);
    }
    for (place, Skipped { name, .. }) in skipped.iter().enumerate() {
        let mut row = vec!["-".to_owned(), name.clone()];
        row.extend(differences.texts(count + place));
        row.extend(vec!["-".to_owned(); if unfinished { 6 } else { 5 }]);
        row.push("skipped".to_owned());
        row.extend(forked.then(|| "-".to_owned()));
        table.row(row);
    }
    format!("{}{}{}", table.render(), notes(group, unfinished), seeds::table(group))
}

/// Returns notes that explain the numbers of unfinished tasks.
fn notes(group: &TaskGroup<'_>, unfinished: bool) -> String {
    let so_far = group.tasks.iter().any(|task| task.validated().is_some_and(|(step, _)| step.is_some()));
    let mut notes = Vec::new();
    notes.extend(unfinished.then(|| format!("training loss: the mean of the last {LAST} minibatches")));
    notes.extend(so_far.then(|| "validation (n): the best so far, after n minibatches".to_owned()));
    let ranked = !group.is_validated() && group.tasks.iter().any(|task| task.training_loss().is_some());
    notes.extend(
        (unfinished && ranked)
            .then(|| "ranked by training loss: no trained weights are validated yet".to_owned()),
    );
    if notes.is_empty() { String::new() } else { format!("{}\n", notes.join("; ")) }
}

/// Returns the figure by which a result is ranked.
fn result(score: &Score) -> String {
    score.measure().shown(score.value(), figure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> serde_json::Value {
        let task = |name: &str, state: &str, ppl: serde_json::Value| {
            let lr = if name == "best" { 3e-4 } else { 1e-3 };
            json!({
                "name": name, "config": { "batch": 8, "lr": lr }, "state": state, "shards": 3, "steps": 20,
                "error": (state == "failed").then_some("the loss is NaN at step 3"), "cut_points": [1, 3],
                "losses": [5.5, null], "initial_validation": { "loss": 5.5, "perplexity": 250.0, "predicted_tokens": 9 },
                "validation": { "loss": 1.0, "perplexity": ppl, "predicted_tokens": 9 }, "test": null,
            })
        };
        json!({
            "schema": REPORT_SCHEMA, "makespan_s": 12.0, "lower_bound_s": 11.5, "replay_s": 11.8, "tokens_per_s": 12345.6,
            "policy": "sharded-lrtf", "prefetch": true,
            "tasks": [
                task("worse", "done", json!(9.5)), task("broken", "failed", json!(1.0)),
                task("best", "done", json!(4.25)), task("diverged", "done", json!(null)),
            ],
            "devices": [{
                "name": "cpu:0", "threads": 1, "budget_bytes": 1 << 24, "peak_bytes": 1 << 23, "peak_measured": true,
                "compute_s": 11.0, "copy_s": 0.5, "stall_s": 0.1, "utilization": 0.917, "shard_tasks": 4,
            }],
            "transfers": { "promoted_bytes": 1 << 30, "demoted_bytes": 1 << 20 },
            "host_admitted_bytes": 1 << 20, "host_budget_bytes": 1 << 30,
        })
    }

    /// Returns the tasks of all groups with their ranks.
    fn ranked(report: &Report) -> Vec<(Option<usize>, &ReportTask)> {
        report.groups().iter().flat_map(TaskGroup::ranked).collect()
    }

    #[test]
    fn what_is_measured_differently_is_ranked_apart() {
        let mut json = report();
        let validated = [(0.5, 0.25), (0.9, 0.25), (0.0, 0.25), (0.5, 0.125)];
        for (task, (accuracy, loss)) in json["tasks"].as_array_mut().unwrap().iter_mut().zip(validated) {
            task["config"]["data"] = json!("pets");
            (task["unit"], task["units"]) = (json!("images"), json!(1200));
            task["initial_validation"] = json!({ "loss": 2.0, "metrics": { "accuracy": 0.1 } });
            task["validation"] = json!({ "loss": loss, "metrics": { "accuracy": accuracy } });
        }
        let text = Report::parse(&json.to_string()).unwrap().render();
        assert!(text.contains("validation accuracy") && text.contains("50.00%"), "{text}");
        assert!(text.contains(" 400 images/s,") && !text.contains("tokens/s"), "{text}");
        let words = rows(&text);
        let ranks: Vec<_> = words[1..5].iter().map(|row| (row[0], row[1])).collect();
        // Of equal accuracies, the one with the lower loss is first.
        assert_eq!(ranks, [("1", "diverged"), ("1", "worse"), ("3", "best"), ("-", "broken")], "{text}");
        let mut language = report()["tasks"][2].clone();
        (language["name"], language["config"]["data"]) = (json!("gpt2"), json!("builtin"));
        (language["unit"], language["units"]) = (json!("tokens"), json!(12_000));
        json["tasks"].as_array_mut().unwrap().insert(0, language);
        let report = Report::parse(&json.to_string()).unwrap();
        let text = report.render();
        assert!(text.starts_with("accuracy on pets:\n"), "{text}");
        assert!(text.contains("\n\nperplexity on builtin:\n"), "{text}");
        assert!(text.contains(" 400 images/s and 1.0k tokens/s,"), "{text}");
        let last = ranked(&report).into_iter().last().unwrap();
        assert_eq!((last.0, last.1.name.as_str()), (Some(1), "gpt2"), "ranks are of a group");
    }

    #[test]
    fn data_of_one_name_are_the_same_in_runs_on_several_machines_alone() {
        let groups = |runs: [Value; 2]| {
            let mut json = report();
            let tasks = json["tasks"].as_array_mut().unwrap();
            tasks.truncate(2);
            for ((task, run), data) in tasks.iter_mut().zip(runs).zip(["/a/pets", "/b/pets"]) {
                (task["run"], task["config"]["data"]) = (run, json!(data));
            }
            Report::parse(&json.to_string()).unwrap().groups().len()
        };
        assert_eq!(groups([json!(null), json!(null)]), 2);
        assert_eq!(groups([json!("one"), json!("one")]), 2);
        assert_eq!(groups([json!("one"), json!("two")]), 1);
    }

    #[test]
    fn the_best_come_first_and_the_failed_last() {
        let report = Report::parse(&report().to_string()).unwrap();
        let ranked: Vec<_> = ranked(&report).iter().map(|(rank, task)| (*rank, task.name.as_str())).collect();
        assert_eq!(ranked, [(Some(1), "best"), (Some(2), "worse"), (Some(3), "diverged"), (None, "broken")]);
        assert_eq!(report.failures(), ["broken: the loss is NaN at step 3"]);
        assert!(!report.stopped());
    }

    #[test]
    fn models_without_a_perplexity_are_ranked_by_their_loss() {
        let mut json = report();
        for (task, loss) in json["tasks"].as_array_mut().unwrap().iter_mut().zip([0.5, 0.1, 0.25, 0.125]) {
            task["initial_validation"] = json!({ "loss": 2.0, "predicted_tokens": 9 });
            task["validation"] = json!({ "loss": loss, "predicted_tokens": 9 });
        }
        let report = Report::parse(&json.to_string()).unwrap();
        let ranked: Vec<_> = ranked(&report).iter().map(|(_, task)| task.name.as_str()).collect();
        assert_eq!(ranked, ["diverged", "best", "worse", "broken"]);
        let text = report.render();
        let parts = ["validation loss", "0.125", "ppl"].map(|part| text.contains(part));
        assert_eq!(parts, [true, true, false], "{text}");
    }

    #[test]
    fn equal_ones_have_equal_ranks_and_what_was_not_validated_has_none() {
        let mut json = report();
        let tasks = json["tasks"].as_array_mut().unwrap();
        tasks.push(tasks[0].clone());
        tasks[3]["validation"] = json!(null);
        let report = Report::parse(&json.to_string()).unwrap();
        let ranks: Vec<_> = ranked(&report).iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [Some(1), Some(2), Some(2), None, None]);
        let text = report.render();
        let last: Vec<&str> = text.lines().take(6).skip(4).map(str::trim_start).collect();
        assert!(last[0].starts_with("-  diverged") && last[1].starts_with("-  broken"), "{text}");
    }

    /// Returns the rows of the table, each split into words.
    fn rows(text: &str) -> Vec<Vec<&str>> {
        text.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn stopped_tasks_show_what_they_have() {
        let mut json = report();
        for (task, loss) in json["tasks"].as_array_mut().unwrap().iter_mut().zip([4.5, 4.25, 3.5, 4.0]) {
            (task["state"], task["validation"], task["losses"]) =
                (json!("stopped"), json!(null), json!([loss, null]));
        }
        let text = Report::parse(&json.to_string()).unwrap().render();
        let names: Vec<[&str; 2]> = rows(&text)[1..5].iter().map(|row| [row[0], row[1]]).collect();
        assert_eq!(names, [["1", "best"], ["2", "diverged"], ["3", "broken"], ["4", "worse"]], "{text}");
        assert!(rows(&text)[1].contains(&"3.500") && text.contains("ranked by training loss"), "{text}");
        json["tasks"][0]["evaluations"] = json!([
            [10, { "loss": 2.0, "perplexity": 7.5, "predicted_tokens": 9 }],
            [20, { "loss": 2.1, "perplexity": 8.5, "predicted_tokens": 9 }],
        ]);
        let text = Report::parse(&json.to_string()).unwrap().render();
        let rows = rows(&text);
        assert_eq!(rows[1][..2], ["1", "worse"], "{text}");
        assert!(rows[1].windows(2).any(|cells| cells == ["7.500", "(10)"]), "{text}");
        assert_eq!(rows[2][..2], ["-", "best"], "what is not validated stands behind, by its loss: {text}");
        assert!(text.contains("validation (n): the best so far") && !text.contains("ranked by"), "{text}");
    }

    #[test]
    fn a_failed_task_says_where_its_best_weights_are() {
        let mut json = report();
        let failed = &mut json["tasks"][1];
        (failed["best_step"], failed["model_dir"]) = (json!(2), json!("/runs/broken"));
        let said = Report::parse(&json.to_string()).unwrap().failures();
        let expected =
            "broken: the loss is NaN at step 3; its best weights, after 2 minibatches, are in `/runs/broken`";
        assert_eq!(said, [expected]);
    }

    #[test]
    fn the_text_says_it_all() {
        let text = Report::parse(&report().to_string()).unwrap().render();
        let best = text.lines().nth(1).unwrap();
        for part in ["1  best", "3e-4", "250.0", "4.250", "done"] {
            assert!(best.contains(part), "{part} in {best}");
        }
        let parts = "91.7%|8.00 MiB|16.00 MiB|12.00 s|11.50 s|11.80 s: 0.983 of the makespan|12.3k tokens/s|1.00 GiB|inf";
        for part in parts.split('|') {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn optimizers_on_the_device_are_said_and_marked_where_the_bits_are_not_the_hosts() {
        let mut report = report();
        let says = |report: &serde_json::Value| Report::parse(&report.to_string()).unwrap().render();
        assert!(!says(&report).contains("optimizer on"));
        report["tasks"][0]["optimizer"] = json!({ "on": "device", "exact": true, "why": "everything fits" });
        let text = says(&report);
        assert!(text.ends_with("\noptimizer on the device for 1 of 4 tasks: everything fits\n"), "{text}");
        report["tasks"][2]["optimizer"] = json!({ "on": "device", "exact": false, "why": "asked for" });
        let text = says(&report);
        assert!(
            text.ends_with("\nnot bitwise equal to a run with the optimizer on the host: best\n"),
            "{text}"
        );
    }

    #[test]
    fn other_files_are_refused_with_a_reason() {
        let says = |text: &str| format!("{:#}", Report::parse(text).unwrap_err());
        assert!(says("{").contains("not valid JSON"));
        assert!(says("{}").contains("no `schema`"));
        assert!(says("{\"schema\": 99}").contains("schema 99"));
        assert!(says("{\"schema\": 1}").contains("missing field"));
    }

    #[test]
    fn numbers_keep_their_digits() {
        assert_eq!([2.5, 250.04, 50257.0, 1e9].map(figure), ["2.500", "250.0", "50257", "1.00e9"]);
    }
}
