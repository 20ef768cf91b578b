//! The progress of a run on standard error: lines, bars, or nothing.

use crate::common::{grid, hydra, interrupt, notes, spawn, text, wait_for};
use std::fs;
use std::num::NonZero;
use std::process::Stdio;

const SMALL: &str = "--steps 2 --cuts 2,4 --eval-every 1";

/// Returns the rows of a terminal with 80 columns after this output. The terminal treats a line feed as a new line.
fn on_a_terminal(output: &str) -> Vec<String> {
    let [rows, columns] = [24, 80].map(|size| NonZero::new(size).unwrap());
    let mut terminal = vt100::Parser::new(rows, columns, 0);
    terminal.process(output.replace('\n', "\r\n").as_bytes());
    terminal.screen().rows(0, columns.get()).collect()
}

#[test]
fn in_a_pipe_the_run_directory_is_named_first_and_then_every_evaluation_and_end() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let output = hydra(&grid(SMALL)).arg("--out").arg(&dir).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success() && notes(&err).is_empty(), "{err}");
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(lines[0], format!("run directory: {}", dir.display()));
    for task in ["lr1e-3", "lr3e-4"] {
        let of_task = lines.iter().filter_map(|line| line.strip_prefix(&format!("{task}: ")));
        let of_task: Vec<&str> = of_task.collect();
        let (initial, test) = (of_task[0], of_task[of_task.len() - 2]);
        assert!(
            initial.starts_with("validation perplexity ") && initial.ends_with(" before training"),
            "{err}"
        );
        assert!(of_task[1].starts_with("validation perplexity "), "{err}");
        assert!(of_task[1].contains(" after 1 of 2 minibatches"), "{err}");
        assert!(test.starts_with("test perplexity "), "{err}");
        assert_eq!(of_task.last(), Some(&"done after 2 of 2 minibatches"), "{err}");
    }
}

#[test]
fn a_run_without_a_given_directory_names_the_chosen_one() {
    let root = tempfile::tempdir().unwrap();
    let output = hydra(&grid(SMALL)).current_dir(root.path()).output().unwrap();
    assert_eq!(text(&output.stderr).lines().next(), Some("run directory: runs/select-1"));
}

#[test]
fn progress_none_prints_nothing() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let output = hydra(&grid(SMALL)).args(["--progress", "none", "--out"]).arg(&dir).output().unwrap();
    assert_eq!((output.status.code(), notes(&text(&output.stderr)).as_str()), (Some(0), ""));
}

#[test]
fn bars_end_with_what_was_trained() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let output = hydra(&grid(SMALL)).args(["--progress", "bars", "--out"]).arg(&dir).output().unwrap();
    let rows = on_a_terminal(&text(&output.stderr));
    let at = rows.iter().position(|row| row.starts_with("total ")).unwrap_or_else(|| panic!("{rows:#?}"));
    assert!(rows[at].starts_with("total ████████ 4/4  100%  "), "{rows:#?}");
    assert!(!rows[at].contains("left"), "{rows:#?}");
    assert!(rows[at + 1].starts_with("2 tasks: 2 done  cpu:0 "), "{rows:#?}");
    assert!(rows[at + 2].starts_with("best so far: lr"), "{rows:#?}");
    for (row, task) in rows[at + 3..].iter().zip(["lr1e-3", "lr3e-4"]) {
        assert!(row.starts_with(&format!("{task} ████████     2/2      done  ")), "{rows:#?}");
        assert!(row.contains("val ppl ") && row.contains("test ppl "), "{rows:#?}");
    }
    assert!(rows[at + 5..].iter().all(String::is_empty), "{rows:#?}");
}

#[test]
fn bars_of_an_interrupted_run_do_not_look_complete() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let more = ["--progress", "bars", "--out", dir.to_str().unwrap()];
    let child = spawn(&[&grid("--steps 1000000 --cuts 2,4")[..], &more].concat(), Stdio::piped());
    wait_for(|| fs::read_to_string(dir.join("metrics.jsonl")).is_ok_and(|lines| lines.contains("minibatch")));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let rows = on_a_terminal(&text(&output.stderr));
    let at = rows.iter().position(|row| row.starts_with("total ")).unwrap_or_else(|| panic!("{rows:#?}"));
    assert!(rows[at].contains("/2000000  0%  ") && !rows[at].contains("left"), "{rows:#?}");
    assert!(rows[at + 1].starts_with("2 tasks: 2 stopped  "), "{rows:#?}");
    assert!(rows[at + 2..].iter().any(|row| row.contains("/1000000  stopped")), "{rows:#?}");
}
