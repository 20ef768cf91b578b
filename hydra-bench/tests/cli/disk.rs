//! Runs whose master weights do not fit in host memory: they are on disk, the results are equal, and the files are removed.

use crate::common::{fails, grid, hydra, json, says, text};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// Two configurations on two devices, with a shard for every layer.
static RUN: LazyLock<Vec<&str>> = LazyLock::new(|| grid("--steps 4 --eval-limit 4 --cuts 1,2,3,4,5"));
/// Half of the master weights.
const HOST: [&str; 2] = ["--host-memory", "4MiB"];
const DISK: [&str; 2] = ["--disk-memory", "16MiB"];

fn with<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    std::iter::once(&RUN[..]).chain(parts.iter().copied()).flatten().copied().collect()
}

fn report(dir: &Path) -> Value {
    json(&dir.join("report.json"))
}

fn results(report: &Value) -> Vec<Value> {
    let keys = ["name", "state", "losses", "validation", "test", "weights_sha256"];
    let task = |task: &Value| keys.iter().map(|key| task[key].clone()).collect();
    report["tasks"].as_array().unwrap().iter().map(task).collect()
}

fn on_disk(report: &Value) -> u64 {
    report["tasks"].as_array().unwrap().iter().map(|task| task["disk_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn masters_on_the_disk_give_the_results_of_host_memory() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let out = |name: &str| path(name).to_str().unwrap().to_owned();
    says(&with(&[&["--out", &out("memory")]]));
    let memory = report(&path("memory"));
    assert_eq!((on_disk(&memory), &memory["transfers"]["disk_read_bytes"]), (0, &0.into()));

    let shown = says(&with(&[&HOST, &DISK, &["--out", &out("disk")]]));
    assert!(shown.contains(" read from disk and "), "{shown}");
    let disk = report(&path("disk"));
    assert_eq!(results(&disk), results(&memory));
    assert!(on_disk(&disk) > 2 << 20, "{disk:#}");
    assert!(disk["transfers"]["disk_written_bytes"].as_u64().unwrap() > on_disk(&disk));
    let model = |of: &str| fs::read(path(of).join("models/lr1e-3/model.safetensors")).unwrap();
    assert!(model("disk") == model("memory"));

    // In another directory, from the spec, without checkpoints.
    fs::create_dir(path("scratch")).unwrap();
    let scratch = out("scratch");
    says(&with(&[&HOST, &DISK, &["--disk", &scratch, "--out", &out("there")]]));
    assert_eq!(fs::read_dir(path("scratch")).unwrap().count(), 0);
    let spec = path("there").join("spec.toml");
    says(&["select", "--spec", spec.to_str().unwrap(), "--out", &out("again")]);
    let again = report(&path("again"));
    assert_eq!((results(&again), on_disk(&again)), (results(&memory), on_disk(&disk)));
    fs::remove_dir_all(path("again").join("checkpoints")).unwrap();
    fs::remove_file(path("again").join("report.json")).unwrap();
    let resumed = hydra(&["resume", &out("again"), "--disk-memory", "8MiB"]).output().unwrap();
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    assert_eq!(results(&report(&path("again"))), results(&memory));
}

#[test]
fn a_dry_run_says_what_lives_on_the_disk() {
    let shown = says(&with(&[&HOST, &DISK, &["--dry-run"]]));
    assert!(shown.contains("on disk") && shown.contains(" of 16.00 MiB for master weights"), "{shown}");
    let needs: Value = serde_json::from_str(&says(&with(&[&HOST, &DISK, &["--dry-run", "--json"]]))).unwrap();
    let bytes = |key: &str| needs[key].as_u64().unwrap();
    assert_eq!((bytes("disk_bytes"), bytes("disk_budget_bytes")), (on_disk(&needs), 16 << 20));
    assert!(bytes("disk_bytes") > 0 && bytes("host_working_bytes") > 0);
    assert!(bytes("host_admitted_bytes") <= 4 << 20, "{needs:#}");
}

#[test]
fn a_disk_that_cannot_be_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run");
    // Less than each of the two requires alone, so that neither can wait for the other.
    let host = ["--host-memory", "3MiB"];
    let run = |more: &[&'static str]| [&with(&[&host, more])[..], &["--out", out.to_str().unwrap()]].concat();
    fails(
        &run(&[]),
        1,
        &["the run was refused", "it fits with one of these (each was planned)", "; --disk-memory "],
    );
    fails(&run(&["--disk-memory", "1MiB"]), 1, &["on the disk `", "the disk budget is 1.00 MiB"]);
    fails(&run(&["--disk-memory", "1MiB", "--disk", "/there/is/none"]), 2, &["`/there/is/none`"]);
    fails(&run(&["--disk", "."]), 2, &["pass --disk-memory SIZE too"]);
    fails(&run(&["--disk-memory", "much"]), 2, &["--disk-memory", "`much` is not a size"]);
    fails(&["eval", "--disk-memory", "1GiB"], 2, &["add --disk DIR"]);
    assert!(!out.exists(), "nothing is left behind");
}

#[test]
fn a_disk_in_the_run_that_is_replaced_is_refused_and_the_run_stays() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run").to_str().unwrap().to_owned();
    says(&with(&[&["--out", &out]]));
    let models = root.path().join("run/models");
    let inside = ["--disk", models.to_str().unwrap(), "--out", &out, "--force"];
    fails(&with(&[&HOST, &DISK, &inside]), 2, &["--disk `", "is inside the run directory"]);
    assert!(
        models.join("lr1e-3/model.safetensors").is_file() && root.path().join("run/report.json").is_file()
    );
}
