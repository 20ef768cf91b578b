//! A grid divided among several runs, and their merged report.

use crate::common::{fails, grid, hydra, json, notes, says, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Four configurations of two minibatches.
const GRID: &str = "select --batch 4,2 --lr 1e-3,3e-4 --context 32 --devices cpu:2x1 --device-memory 64MiB --steps 2 --cuts 2,4";

fn run(out: &Path, more: &[&str]) -> String {
    let arguments: Vec<&str> = GRID.split_whitespace().chain(more.iter().copied()).collect();
    let output = hydra(&[&arguments[..], &["--out", out.to_str().unwrap()]].concat()).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    notes(&err)
}

fn hashes(tasks: &Value) -> BTreeMap<String, String> {
    let word = |task: &Value, key: &str| task[key].as_str().unwrap().to_owned();
    let tasks = tasks.as_array().unwrap().iter();
    tasks.map(|task| (word(task, "name"), word(task, "weights_sha256"))).collect()
}

fn merged(dirs: &[&PathBuf]) -> Value {
    let dirs: Vec<&str> = dirs.iter().map(|dir| dir.to_str().unwrap()).collect();
    serde_json::from_str(&says(&[&["report", "--json"], &dirs[..]].concat())).unwrap()
}

#[test]
fn the_parts_of_a_grid_are_the_grid() {
    let root = tempfile::tempdir().unwrap();
    let [whole, one, two, three] = ["whole", "1", "2", "3"].map(|name| root.path().join(name));
    assert_eq!(run(&whole, &[]), "");
    // Tasks with batch size 4 train twice as many examples: the first two parts have one each.
    assert_eq!(run(&one, &["--part", "1/3"]), "note: part 1/3: 1 of the grid's 4 tasks: b4-lr1e-3\n");
    // From a spec, as in an array job.
    let spec = whole.join("spec.toml");
    let from_spec = ["--spec", spec.to_str().unwrap(), "--part", "2/3", "--out", two.to_str().unwrap()];
    let output = hydra(&from_spec).output().unwrap();
    assert_eq!(notes(&text(&output.stderr)), "note: part 2/3: 1 of the grid's 4 tasks: b4-lr3e-4\n");

    let early = merged(&[&one, &two]);
    assert_eq!((&early["state"], &early["missing"][0]["part"]), (&"stopped".into(), &"3/3".into()));
    assert_eq!(early["missing"][0]["tasks"], serde_json::json!(["b2-lr1e-3", "b2-lr3e-4"]));
    let said = says(&["report", one.to_str().unwrap(), two.to_str().unwrap()]);
    assert!(said.ends_with("\nmissing: part 3/3: b2-lr1e-3, b2-lr3e-4\n"), "{said}");

    run(&three, &["--part", "3/3"]);
    let all = merged(&[&one, &two, &three]);
    assert_eq!(hashes(&all["tasks"]), hashes(&json(&whole.join("report.json"))["tasks"]));
    assert_eq!((&all["state"], &all["notes"]), (&"done".into(), &serde_json::json!([])));
    let ranking = |said: &str| said.lines().take_while(|line| !line.is_empty()).count();
    let together = says(&["report", one.to_str().unwrap(), two.to_str().unwrap(), three.to_str().unwrap()]);
    assert_eq!(ranking(&together), ranking(&says(&["report", whole.to_str().unwrap()])), "{together}");

    let twice = merged(&[&whole, &three]);
    assert_eq!(twice["twice"].as_array().unwrap().len(), 2);
    assert!(twice["twice"].as_array().unwrap().iter().all(|task| task["equal"] == true));
    let lines = fs::read_to_string(two.join("metrics.jsonl")).unwrap();
    let (from, to) = ("\"processor\":", "\"processor\":\"another\",\"was\":");
    let unknown = "{\"event\":\"moved\"}\n";
    fs::write(two.join("metrics.jsonl"), lines.replace(from, to) + unknown).unwrap();
    let said = says(&["report", one.to_str().unwrap(), two.to_str().unwrap()]);
    assert!(said.contains("bitwise equal results are not guaranteed: hydra "), "{said}");
    let unread = format!("unread: {}: 1 line of metrics.jsonl is unknown", two.display());
    assert!(said.contains(&unread), "{said}");
    a_part_goes_on(&three);
}

/// A killed part trains only its own tasks when it is resumed.
fn a_part_goes_on(part: &Path) {
    let before = hashes(&json(&part.join("report.json"))["tasks"]);
    fs::remove_file(part.join("report.json")).unwrap();
    fs::remove_file(part.join("checkpoints/b2-lr1e-3.safetensors")).unwrap();
    let open = merged(&[&part.to_owned(), &part.parent().unwrap().join("1")]);
    assert_eq!(hashes(&open["tasks"]).len(), 3, "what a run without a report has written is known");
    let output = hydra(&["resume", part.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(hashes(&json(&part.join("report.json"))["tasks"]), before);
}

#[test]
fn what_is_no_part_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run");
    let refused = |more: &[&str], parts: &[&str]| {
        let all = [&grid("--steps 2")[..], more, &["--out", out.to_str().unwrap()]].concat();
        fails(&all, 2, parts);
        assert!(!out.exists());
    };
    for (part, why) in
        [("0/8", "1/8 to 8/8"), ("9/8", "1/8 to 8/8"), ("3/", "expected K/N"), ("x", "expected K/N")]
    {
        refused(&["--part", part], &[&format!("`{part}`"), why]);
    }
    refused(&["--part", "3/3"], &["--part 3/3 is empty", "at most 2 parts"]);
    refused(&["--only", "b4"], &["--only: the grid has no task `b4`; its tasks are lr1e-3, lr3e-4"]);
    refused(&["--only", "lr1e-3", "--part", "1/2"], &["cannot be used with"]);
    let search = "select --batch 4 --context 32 --steps 2 --search random --trials 2 --sample lr=log:1e-4..1e-2 --part 1/2";
    let search: Vec<&str> = search.split_whitespace().collect();
    fails(&search, 2, &["--part and --only divide a grid", "a search compares its trials during training"]);
    let here = root.path().to_str().unwrap();
    fails(&["report", here, here], 2, &["is given twice"]);
    fails(&["report", here, "nowhere"], 1, &["is not a run directory"]);
    fails(&["report", here, "nowhere", "--plots"], 2, &["--plots draws into one run directory"]);
}

#[test]
fn runs_on_other_data_are_not_ranked_together() {
    let root = tempfile::tempdir().unwrap();
    let dirs = ["one", "two"].map(|name| {
        let data = root.path().join(format!("{name}.txt"));
        fs::write(&data, format!("{name} word after another. ").repeat(99)).unwrap();
        let out = root.path().join(name);
        run(&out, &["--only", "b4-lr1e-3", "--data", data.to_str().unwrap()]);
        out
    });
    let [one, two] = dirs.each_ref().map(|dir| dir.to_str().unwrap());
    fails(&["report", one, two], 1, &["are not parts of one grid", "the SHA-256 of models or data"]);
}
