//! The end of a run with failures: each is reported, and everything else is written.
#![cfg(target_os = "linux")]

use crate::common::{interrupt, json, notes, spawn, text, wait_for, with_small_files};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

const SMALL: &str = "--batch 4 --context 32 --devices cpu:1x1 --device-memory 64MiB";

fn events(dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Starts a run, and interrupts it after these numbers of minibatches and ended tasks.
fn interrupted(command: &str, dir: &Path, out: Stdio, minibatches: usize, ended: usize) -> Output {
    let arguments: Vec<&str> = command.split_whitespace().chain(SMALL.split_whitespace()).collect();
    let child = spawn(&[&arguments[..], &["--out", dir.to_str().unwrap()]].concat(), out);
    wait_for(|| {
        let events = events(dir);
        let count = |kind: &str| events.iter().filter(|event| event["event"] == kind).count();
        count("minibatch") >= minibatches && count("end") >= ended
    });
    interrupt(&child);
    child.wait_with_output().unwrap()
}

/// The trace and the model exceed the file size limit; all other files fit.
#[test]
fn files_fail_for_themselves_and_each_is_named_beside_the_tasks() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let more =
        ["--steps", "4", "--cuts", "2,4", "--checkpoint-every", "never", "--out", dir.to_str().unwrap()];
    let arguments: Vec<&str> = ["train"].into_iter().chain(SMALL.split_whitespace()).chain(more).collect();
    let output = with_small_files(&arguments);
    let err = notes(&text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.starts_with("error: 1 of 1 tasks failed\n  b4-lr3e-4: the trained model could not be"),
        "{err}"
    );
    assert!(err.contains("run/trace.json` could not be written\n  caused by: "), "{err}");
    assert!(!err.contains("metrics.jsonl") && !err.contains(".svg"), "{err}");
    assert!(!text(&output.stdout).contains("results in"));
    let last = err.lines().last().unwrap();
    assert!(
        last.starts_with(
            "1 of 1 tasks failed because the disk is full; no model is written; free disk space"
        ),
        "{err}"
    );
    assert!(last.ends_with(&format!("hydra resume {}", dir.display())), "{err}");
    let told = events(&dir);
    let trained = told.iter().filter(|event| event["event"] == "minibatch").count();
    let [.., end, memory] = &told[..] else { panic!("{told:?}") };
    assert_eq!((trained, &end["event"], &memory["event"]), (4, &"end".into(), &"memory".into()));
    for name in ["schedule.svg", "losses.svg", "workload.json"] {
        assert!(dir.join(name).is_file(), "{name}");
    }
    assert_eq!(json(&dir.join("report.json"))["tasks"][0]["state"], "failed");
}

#[test]
fn an_interrupted_run_says_how_to_go_on_where_a_task_has_failed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let output = interrupted("select --lr 1e30,1e-3 --steps 1000000", &dir, Stdio::piped(), 3, 1);
    let err = notes(&text(&output.stderr));
    assert_eq!(output.status.code(), Some(130), "{err}");
    assert!(err.starts_with("error: 1 of 2 tasks failed\n  lr1e30: the loss is "), "{err}");
    assert!(err.ends_with(&format!("\nnote: continue with: hydra resume {}\n", dir.display())), "{err}");
    let out = text(&output.stdout);
    let stopped: Vec<&str> =
        out.lines().find(|line| line.contains("lr1e-3")).unwrap().split_whitespace().collect();
    let loss = stopped[stopped.len() - 4].parse::<f64>();
    assert!(stopped[0] == "1" && loss.is_ok() && stopped.last() == Some(&"stopped"), "{out}");
    assert!(out.contains("ranked by training loss"), "{out}");
}

#[test]
fn an_interrupted_run_says_how_to_go_on_where_its_report_cannot_be_printed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = interrupted("train --steps 1000000", &dir, full.into(), 1, 0);
    let err = notes(&text(&output.stderr));
    assert_eq!(output.status.code(), Some(130), "{err}");
    assert!(err.starts_with("error: standard output could not be written\n  caused by: "), "{err}");
    assert!(err.ends_with(&format!("\nnote: continue with: hydra resume {}\n", dir.display())), "{err}");
    assert_eq!(json(&dir.join("report.json"))["tasks"][0]["state"], "stopped");
}
