//! The plots of an unfinished run: `hydra report --plots`.

use crate::common::{Halted, fails, grid, hydra, notes, says, spawn, text, wait_for};
use std::fs;
use std::path::Path;
use std::process::Stdio;

const DRAWN: [&str; 4] = ["losses.svg", "leaderboard.svg", "memory.svg", "report.html"];

/// Returns the output of `hydra report --plots`.
fn drawn(dir: &Path) -> String {
    let said = says(&["report", dir.to_str().unwrap(), "--plots"]);
    let end = format!("\ndrawn into {}: {}\n", dir.display(), DRAWN.join(", "));
    assert!(said.ends_with(&end), "{said}");
    said
}

#[test]
fn a_run_that_is_under_way_or_was_killed_is_drawn_when_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let out = ["--out", dir.to_str().unwrap()];
    let child = spawn(&[&grid("--steps 1000000 --cuts 2,4")[..], &out].concat(), Stdio::piped());
    wait_for(|| {
        fs::read_to_string(dir.join("metrics.jsonl")).is_ok_and(|lines| lines.contains("\"minibatch\""))
    });
    // The task stays where it is, however long the request takes.
    let halted = Halted::new(child);
    says(&["report", dir.to_str().unwrap()]);
    assert!(!DRAWN.iter().any(|name| dir.join(name).exists()), "nothing is drawn unasked");
    drawn(&dir);
    let page = || fs::read_to_string(dir.join("report.html")).unwrap();
    let parts = [
        "2 tasks in",
        "so far</h1>",
        "the run is in progress: ",
        "tokens trained",
        ">host memory<",
        "device_memory",
    ];
    assert!(parts.iter().all(|part| page().contains(part)), "{}", page());
    assert!(!page().contains("Schedule"), "{}", page());
    let part = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
    assert!(part("losses.svg").contains("lr3e-4") && part("memory.svg").contains("budget 64.00 MiB"));
    assert!(part("leaderboard.svg").starts_with("<svg"));

    drop(halted);
    drawn(&dir);
    assert!(page().contains("continue it with: hydra resume"), "{}", page());
    let json = says(&["report", dir.to_str().unwrap(), "--plots", "--json"]);
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "alone: {json}");
    // Runs of versions that did not record memory have no plot of it.
    let lines = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let lines: String = lines.split_inclusive('\n').filter(|line| !line.contains("\"memory\"")).collect();
    fs::write(dir.join("metrics.jsonl"), lines).unwrap();
    fs::remove_file(dir.join("memory.svg")).unwrap();
    let said = says(&["report", dir.to_str().unwrap(), "--plots"]);
    assert!(said.ends_with(": losses.svg, leaderboard.svg, report.html\n"), "{said}");
    assert!(!dir.join("memory.svg").exists() && !page().contains("host memory"));
    // A line that this version does not know is named.
    fs::write(dir.join("metrics.jsonl"), "{\"event\":\"moved\",\"task\":\"lr1e-3\"}\n").unwrap();
    let output = hydra(&["report", dir.to_str().unwrap()]).output().unwrap();
    let said = notes(&text(&output.stderr));
    assert!(said.starts_with("note: 1 line of metrics.jsonl is unknown to this version of Hydra"), "{said}");
}

#[test]
fn the_plots_of_a_run_that_has_ended_stay_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    says(&[&grid("--steps 2 --cuts 2,4")[..], &["--out", dir.to_str().unwrap()]].concat());
    let read = || DRAWN.map(|name| fs::read(dir.join(name)).unwrap());
    let before = read();
    let output = hydra(&["report", dir.to_str().unwrap(), "--plots"]).output().unwrap();
    assert!(output.status.success() && text(&output.stdout).contains("makespan"));
    let note = "note: the run is finished and has drawn its plots; nothing is drawn\n";
    assert_eq!(notes(&text(&output.stderr)), note);
    assert!(read() == before);
    let nowhere = root.path().join("nowhere");
    fails(&["report", nowhere.to_str().unwrap(), "--plots"], 1, &["no such directory"]);
}
