//! Grids that exceed host memory, so that tasks are queued, and configurations that cannot fit and are skipped.

use crate::common::{fails, grid, hydra, json, says, text};
use serde_json::Value;
use std::path::Path;

/// Forty configurations of a small model.
fn forty() -> Vec<String> {
    let rates: Vec<String> = (1..=40).map(|rate| format!("{rate}e-4")).collect();
    let base = "select --batch 2 --context 16 --steps 2 --devices cpu:2x1 --device-memory 64MiB --model bytes-tiny --lr";
    base.split_whitespace().map(str::to_owned).chain([rates.join(",")]).collect()
}

fn run(text: &Path, more: &[&str]) -> String {
    let all = forty();
    let text = ["--data", text.to_str().unwrap()];
    says(&all.iter().map(String::as_str).chain(text).chain(more.iter().copied()).collect::<Vec<_>>())
}

fn hashes(dir: &Path) -> Vec<Value> {
    let report = json(&dir.join("report.json"));
    report["tasks"].as_array().unwrap().iter().map(|task| task["weights_sha256"].clone()).collect()
}

/// Returns the maximum number of concurrent tasks, from the events of a run.
fn most_at_once(dir: &Path) -> usize {
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let changes = events.filter_map(|event| match event["event"].as_str()? {
        "begin" => Some(1_isize),
        "end" => Some(-1),
        _ => None,
    });
    let now = changes.scan(0, |now, change| {
        *now += change;
        Some(*now)
    });
    now.max().unwrap_or(0).try_into().unwrap()
}

#[test]
fn forty_configurations_in_a_quarter_of_their_memory_have_the_weights_of_plenty() {
    let root = tempfile::tempdir().unwrap();
    // Little data, because each task is evaluated three times.
    let text = root.path().join("text.txt");
    std::fs::write(&text, "so little that forty of them are soon evaluated\n".repeat(40)).unwrap();
    let run = |more: &[&str]| run(&text, more);
    let needs: Value = serde_json::from_str(&run(&["--dry-run", "--json"])).unwrap();
    let tasks = needs["tasks"].as_array().unwrap();
    let sum = |key: &str| tasks.iter().map(|task| task[key].as_u64().unwrap()).sum::<u64>();
    let memory = format!("{}B", sum("master_bytes") / 4);
    let dirs = ["plenty", "quarter", "two"].map(|name| root.path().join(name));
    let [plenty, quarter, two] = dirs.each_ref().map(|dir| dir.to_str().unwrap());
    run(&["--out", plenty]);
    let shown = run(&["--host-memory", &memory, "--dry-run"]);
    assert!(shown.contains("queue: as many tasks run concurrently"), "{shown}");
    run(&["--host-memory", &memory, "--out", quarter]);
    run(&["--concurrent", "2", "--out", two]);
    let [plenty, quarter, two] = &dirs;
    assert_eq!(hashes(plenty).len(), 40);
    assert!(hashes(plenty).iter().all(Value::is_string));
    assert_eq!((hashes(quarter), hashes(two)), (hashes(plenty), hashes(plenty)));
    let most = most_at_once(quarter);
    assert!((2..=10).contains(&most), "{most} of 40 had begun at once");
    assert_eq!((most_at_once(plenty), most_at_once(two)), (40, 2));
    let report = json(&quarter.join("report.json"));
    assert!(report["host_peak_bytes"].as_u64().unwrap() <= sum("master_bytes") / 4);
}

#[test]
fn a_configuration_that_can_never_fit_is_left_out_and_the_others_are_trained() {
    // A minibatch of 128 items does not fit on the device, one of four does.
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run");
    let arguments = "select --model bytes-tiny --batch 4,128 --lr 1e-3 --context 32 --steps 2 --eval-limit 2 --devices cpu:1x1 \
         --device-memory 8MiB";
    let with = |more: &'static str| -> Vec<&str> {
        let more = more.split_whitespace().chain(["--out", out.to_str().unwrap()]);
        arguments.split_whitespace().chain(more).collect()
    };
    fails(
        &with("--strict"),
        1,
        &[
            "the run was refused; it fits with one of these (each was planned): --device-memory ",
            "task `b128`",
        ],
    );
    assert!(!out.exists());
    let output = hydra(&with("")).output().unwrap();
    let (shown, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: 1 of 2 tasks failed") && said.contains("b128 was skipped: layer `"));
    assert!(shown.lines().any(|line| line.contains("b128") && line.ends_with("skipped")), "{shown}");
    let report = json(&out.join("report.json"));
    assert_eq!(report["skipped"][0]["config"]["batch"], 128);
    let events = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    assert!(events.lines().any(|line| line.contains("skipped") && line.contains("b128")), "{events}");
    assert_eq!(report["tasks"][0]["state"], "done");
    // Only the skipped task is left.
    let again = hydra(&["resume", out.to_str().unwrap(), "--device-memory", "1GiB"]).output().unwrap();
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(json(&out.join("report.json"))["tasks"][1]["state"], "done");
}

#[test]
fn how_many_begin_is_a_whole_number_above_zero() {
    for bad in ["0", "-1", "x", ""] {
        let flag = format!("--concurrent={bad}");
        fails(&[&grid("")[..], &[&flag]].concat(), 2, &["--concurrent", "a whole number from 1"]);
    }
}
