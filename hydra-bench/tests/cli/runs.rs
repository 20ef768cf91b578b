//! Small whole runs: their output and their run directory.

use crate::common::{fails, grid, hydra, interrupt, json, notes, says, spawn, text, wait_for};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::LazyLock;

/// Two configurations of two steps on two devices, cut into three shards.
static RUN: LazyLock<Vec<&str>> = LazyLock::new(|| grid("--steps 2 --cuts 2,4 --eval-every 1"));

fn run(out: &Path, more: &[&str]) -> String {
    says(&[&RUN[..], &["--out", out.to_str().unwrap()], more].concat())
}

fn hashes(report: &Value) -> Vec<String> {
    let tasks = report["tasks"].as_array().unwrap();
    tasks.iter().map(|task| task["weights_sha256"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn layers_that_are_not_trained_are_written_as_they_were() {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    let weights = |run: &str, task: &str| {
        fs::read(dir(run).join("models").join(task).join("model.safetensors")).unwrap()
    };
    run(&dir("first"), &[]);
    let base = dir("first/models/lr1e-3");
    run(&dir("tuned"), &["--model", base.to_str().unwrap(), "--train", "last:1,head"]);
    let (before, after) = (weights("first", "lr1e-3"), weights("tuned", "lr3e-4"));
    let tensor = |file: &[u8], name: &str| {
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
        let at = |i: usize| header[name]["data_offsets"][i].as_u64().unwrap() as usize + 8 + length;
        file[at(0)..at(1)].to_vec()
    };
    for (name, stays) in [
        ("transformer.wte.weight", true),
        ("transformer.h.2.mlp.c_fc.weight", true),
        ("transformer.h.3.mlp.c_fc.weight", false),
        ("transformer.ln_f.bias", false),
    ] {
        assert_eq!(tensor(&before, name) == tensor(&after, name), stays, "{name}");
    }
}

#[test]
fn a_run_directory_holds_everything() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let printed = run(&dir, &[]);
    for part in ["rank", "lr1e-3", "lr3e-4", "done", "cpu:0", "cpu:1", "makespan", "results in"] {
        assert!(printed.contains(part), "{part} in\n{printed}");
    }
    check_report(&json(&dir.join("report.json")));
    check_metrics(&fs::read_to_string(dir.join("metrics.jsonl")).unwrap());
    check_trace(&json(&dir.join("trace.json")));
    let plots = [
        ("schedule.svg", "cpu:1"),
        ("losses.svg", "lr3e-4"),
        ("leaderboard.svg", "best: lr1e-3"),
        ("memory.svg", "budget 64.00 MiB"),
    ];
    for (name, part) in plots {
        let svg = fs::read_to_string(dir.join(name)).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains(part), "{name}");
    }
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    let whole =
        ["makespan", "tokens trained", "lr (logarithmic)", ">host memory<", "device_memory", "\"rows\":[["];
    assert!(page.starts_with("<!DOCTYPE html>") && whole.iter().all(|part| page.contains(part)), "{page}");
    for task in ["lr1e-3", "lr3e-4"] {
        assert_eq!(json(&dir.join(format!("plans/{task}.json")))["cut_points"], serde_json::json!([2, 4]));
        let model = dir.join("models").join(task);
        assert_eq!(json(&model.join("config.json"))["model_type"], "gpt2");
        assert!(model.join("model.safetensors").is_file());
    }
    let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 13, "{left:?}");
    shown_again_and_refused(&dir, &printed);
}

fn check_report(report: &Value) {
    assert_eq!(report["schema"], 1);
    for key in ["makespan_s", "lower_bound_s", "tokens_per_s"] {
        assert!(report[key].as_f64().unwrap() > 0.0, "{key}");
    }
    for task in report["tasks"].as_array().unwrap() {
        assert_eq!(
            (&task["state"], &task["error"], &task["shards"]),
            (&"done".into(), &Value::Null, &3.into())
        );
        assert_eq!((task["steps"].as_u64(), task["losses"].as_array().unwrap().len()), (Some(2), 2));
        assert_eq!(task["config"]["batch"], 4);
        for key in ["initial_validation", "validation", "test"] {
            let (loss, perplexity) =
                (task[key]["loss"].as_f64().unwrap(), task[key]["perplexity"].as_f64().unwrap());
            assert!((loss.exp() - perplexity).abs() < 1e-6 * perplexity, "{key}");
            assert_eq!(task[key]["predicted_tokens"].as_u64().unwrap() % 31, 0, "{key}");
        }
        assert_eq!(task["weights_sha256"].as_str().unwrap().len(), 64);
        let model = Path::new(task["model_dir"].as_str().unwrap());
        assert!(model.is_absolute() && model.is_dir());
    }
    for device in report["devices"].as_array().unwrap() {
        assert_eq!(device["budget_bytes"], 64 << 20);
        assert!(device["peak_bytes"].as_u64().unwrap() <= 64 << 20);
        assert!(["compute_s", "copy_s", "stall_s", "utilization"].iter().all(|key| device[key].is_f64()));
    }
    assert!(report["transfers"]["promoted_bytes"].as_u64().unwrap() > 0);
}

fn check_metrics(lines: &str) {
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |event: &str| lines.iter().filter(|line| line["event"] == event).count();
    assert_eq!((count("minibatch"), count("end")), (4, 2));
    let first: Vec<(&Value, &Value)> =
        lines[..2].iter().map(|line| (&line["event"], &line["config"]["lr"])).collect();
    assert_eq!(first, [(&"task".into(), &1e-3.into()), (&"task".into(), &3e-4.into())]);
    assert!(lines.iter().all(|line| line["time"].as_f64() > Some(1.7e9)), "the clock is in every line");
    let kinds = |kind: &str| lines.iter().filter(|line| line["kind"] == kind).count();
    assert_eq!((kinds("initial"), kinds("test")), (2, 2));
    assert!(kinds("periodic") >= 2);
    let memory: Vec<&Value> = lines.iter().filter(|line| line["event"] == "memory").collect();
    let names = |line: &Value| -> Vec<Value> {
        line["tiers"].as_array().unwrap().iter().map(|tier| tier["name"].clone()).collect()
    };
    assert!(memory.len() >= 2 && lines.last() == memory.last().copied(), "{memory:?}");
    assert!(memory.iter().all(|line| names(line) == ["host memory", "cpu:0", "cpu:1"]), "{memory:?}");
}

fn check_trace(trace: &Value) {
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events
        .iter()
        .filter(|event| event["name"] == "thread_name")
        .filter_map(|event| event["args"]["name"].as_str())
        .collect();
    assert_eq!(names, ["cpu:0 compute", "cpu:0 copy", "cpu:1 compute", "cpu:1 copy", "host optimizer"]);
    let spans = |work: &str| events.iter().filter(|event| event["cat"] == work).count();
    // Two tasks of two minibatches: two forwards, then backwards of three shards, the last one fused.
    assert_eq!((spans("forward"), spans("backward")), (2 * 2 * 2, 2 * 2 * 3));
    assert!(spans("evaluate") > 0 && spans("promote") > 0 && spans("step") > 0);
}

fn shown_again_and_refused(dir: &Path, printed: &str) {
    let path = dir.to_str().unwrap();
    let again = says(&["report", path]);
    assert!(printed.starts_with(&again), "{again}\nagainst\n{printed}");
    let report = fs::read_to_string(dir.join("report.json")).unwrap();
    assert_eq!(says(&["report", path, "--json"]), report);
    fails(&[&RUN[..], &["--out", path]].concat(), 1, &["is not empty", "--force"]);
    assert_eq!(fs::read_to_string(dir.join("report.json")).unwrap(), report, "a refused run changes nothing");
}

#[test]
fn a_spec_runs_again_to_the_same_bits_and_json_is_alone() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (root.path().join("one"), root.path().join("two"));
    let first: Value = serde_json::from_str(&run(&one, &["--json"])).unwrap();
    assert_eq!(json(&one.join("report.json")), first);
    let spec = one.join("spec.toml");
    let arguments = ["--spec", spec.to_str().unwrap(), "--out", two.to_str().unwrap(), "--json"];
    let second: Value = serde_json::from_str(&says(&arguments)).unwrap();
    assert_eq!(hashes(&first), hashes(&second));
    assert_ne!(hashes(&first)[0], hashes(&first)[1]);
    assert_eq!(fs::read(&spec).unwrap(), fs::read(two.join("spec.toml")).unwrap());
    let forced: Value = serde_json::from_str(&says(&[&arguments[..], &["--force"]].concat())).unwrap();
    assert_eq!(hashes(&first), hashes(&forced));
}

#[test]
fn a_run_is_recorded_as_a_workload_that_can_be_simulated() {
    let root = tempfile::tempdir().unwrap();
    let (dir, file) = (root.path().join("run"), root.path().join("w.json"));
    let printed = run(&dir, &["--record", file.to_str().unwrap()]);
    assert!(printed.contains("replay"), "{printed}");
    assert_eq!(fs::read(dir.join("workload.json")).unwrap(), fs::read(&file).unwrap());
    let (workload, report) = (json(&file), json(&dir.join("report.json")));
    assert!(report["replay_s"].as_f64().unwrap() > 0.0);
    for (task, trained) in
        workload["tasks"].as_array().unwrap().iter().zip(report["tasks"].as_array().unwrap())
    {
        assert_eq!((&task["name"], &task["minibatches"]), (&trained["name"], &trained["steps"]));
        assert_eq!(task["shards"].as_array().unwrap().len() as u64, trained["shards"].as_u64().unwrap());
    }
    let simulated = says(&["simulate", "--workload", file.to_str().unwrap(), "--policy", "fifo", "--json"]);
    let simulated: Value = serde_json::from_str(&simulated).unwrap();
    let ran: u64 =
        report["devices"].as_array().unwrap().iter().map(|d| d["shard_tasks"].as_u64().unwrap()).sum();
    assert_eq!(simulated["shard_tasks"].as_u64(), Some(ran));
    let nowhere = root.path().join("missing").join("w.json");
    fails(&[&RUN[..], &["--record", nowhere.to_str().unwrap()]].concat(), 2, &["--record", "missing"]);
    let before = fs::read(&file).unwrap();
    let new = root.path().join("new.json");
    for path in [&file, &new] {
        let refused = ["--out", dir.to_str().unwrap(), "--record", path.to_str().unwrap()];
        fails(&[&RUN[..], &refused].concat(), 1, &["is not empty"]);
    }
    assert_eq!(fs::read(&file).unwrap(), before, "a refused run changes nothing");
    assert!(!new.exists(), "and leaves nothing");
}

/// A file that cannot be opened is refused before training; a later failure affects no other file.
#[cfg(target_os = "linux")]
#[test]
fn neither_a_record_nor_a_plan_replaces_what_is_read() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("text.txt");
    fs::write(&file, "a text that nobody wants to lose\n".repeat(100)).unwrap();
    let (before, name) = (fs::read(&file).unwrap(), file.to_str().unwrap());
    let out = root.path().join("run");
    let train = ["train", "--data", name, "--record", name, "--steps", "1", "--out", out.to_str().unwrap()];
    fails(&train, 2, &["--record `", "the file given by --data"]);
    fails(&["partition", "--data", name, "--out", name], 2, &["--out `", "the file given by --data"]);
    assert!(fs::read(&file).unwrap() == before && !out.exists());
}

#[test]
fn a_record_that_cannot_be_written() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let out = dir.to_str().unwrap();
    let with = |record: &'static str| [&RUN[..], &["--out", out, "--record", record]].concat();
    fails(&with("/proc/no-such-file"), 2, &["--record `/proc/no-such-file` could not be written"]);
    assert!(!dir.exists(), "nothing was begun");
    let output = hydra(&with("/dev/full")).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(out.contains("lr1e-3") && err.contains("`/dev/full` could not be written"), "{out}{err}");
    check_report(&json(&dir.join("report.json")));
    check_trace(&json(&dir.join("trace.json")));
    assert!(["workload.json", "schedule.svg", "losses.svg"].iter().all(|name| dir.join(name).is_file()));
}

#[test]
fn plans_are_used_again() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (root.path().join("one"), root.path().join("two"));
    let first: Value = serde_json::from_str(&run(&one, &["--json"])).unwrap();
    let plans = one.join("plans");
    let second = run(&two, &["--json", "--plan", plans.to_str().unwrap()]);
    let second: Value = serde_json::from_str(&second).unwrap();
    assert_eq!(hashes(&first), hashes(&second));
    let plan = |dir: &Path| json(&dir.join("plans/lr1e-3.json"));
    assert_eq!(plan(&one), plan(&two), "measured times and all: no pilot pass was run");

    // A plan for another budget has usable measurements, so there is no warning; one for another batch size has none.
    let file = plans.join("lr1e-3.json");
    let warned = |more: &[&str]| {
        let mut command = hydra(&["--dry-run", "--context", "32", "--devices", "cpu:2x1", "--plan"]);
        let output = command.arg(&file).args(more).env("HYDRA_LOG", "warn").output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        notes(&text(&output.stderr))
    };
    assert_eq!(warned(&["--batch", "4", "--device-memory", "128MiB"]), "");
    let other = warned(&["--batch", "2", "--device-memory", "128MiB"]);
    assert!(other.contains("WARN the plan in") && other.contains("does not fit this run: "), "{other}");
}

#[test]
fn a_dry_run_says_what_it_needs_and_trains_nothing() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let printed = run(&dir, &["--dry-run"]);
    for part in ["lr1e-3", "2,4", "cpu:1", "double buffer", "host memory", "nothing was trained"] {
        assert!(printed.contains(part), "{part} in\n{printed}");
    }
    assert!(!dir.exists());
    let admission: Value = serde_json::from_str(&run(&dir, &["--dry-run", "--json"])).unwrap();
    assert_eq!(admission["tasks"].as_array().unwrap().len(), 2);
    for task in admission["tasks"].as_array().unwrap() {
        assert_eq!((&task["shards"], &task["cut_points"]), (&3.into(), &serde_json::json!([2, 4])));
        let shards = task["shard_needs"].as_array().unwrap();
        let ends: Vec<_> =
            shards.iter().map(|shard| (shard["first"].as_u64(), shard["end"].as_u64())).collect();
        assert_eq!(ends, [(Some(0), Some(2)), (Some(2), Some(4)), (Some(4), Some(6))]);
        assert!(shards.iter().all(|shard| shard["peak_bytes"].as_u64().unwrap() > 0));
    }
}

#[test]
fn the_log_shows_the_plans_when_it_is_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let arguments = [&RUN[..], &["--out", dir.to_str().unwrap()]].concat();
    let output = hydra(&arguments).env("HYDRA_LOG", "info").output().unwrap();
    let log = text(&output.stderr);
    assert!(output.status.success(), "{log}");
    assert!(log.contains("lr3e-4: 3 shard(s) of 6 layers"), "{log}");
}

#[test]
fn a_model_is_trained_written_evaluated_and_trained_on() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (root.path().join("one"), root.path().join("two"));
    let (one_path, two_path) = (one.to_str().unwrap(), two.to_str().unwrap());
    let small = ["--batch", "4", "--context", "32", "--device-memory", "64MiB", "--json"];
    let train = |more: &[&str]| -> Value {
        serde_json::from_str(&says(&[&["train", "--steps", "2"], &small[..], more].concat())).unwrap()
    };
    let trained = train(&["--out", one_path]);
    let model = trained["tasks"][0]["model_dir"].as_str().unwrap();
    let eval = says(&[&["eval", "--model", model, "--split", "validation"], &small[..]].concat());
    let eval: Value = serde_json::from_str(&eval).unwrap();
    assert_eq!(
        eval["loss"], trained["tasks"][0]["validation"]["loss"],
        "the written model is the trained one"
    );
    assert_eq!(eval["predicted_tokens"], trained["tasks"][0]["validation"]["predicted_tokens"]);
    assert!(eval["tokens"].as_u64() > eval["predicted_tokens"].as_u64());
    let further = train(&["--out", two_path, "--model", model]);
    assert_eq!(further["tasks"][0]["initial_validation"]["loss"], eval["loss"]);
}

#[test]
fn a_partition_gives_cut_points_and_budgets() {
    let small = ["--batch", "4", "--context", "64", "--devices", "cpu:1x1"];
    let partition = |memory: &str, more: &[&str]| {
        says(&[&["partition", "--device-memory", memory], &small[..], more].concat())
    };
    let wide: Value = serde_json::from_str(&partition("1GiB", &["--json"])).unwrap();
    assert_eq!(wide["cut_points"], serde_json::json!([]));
    assert_eq!(wide["layers"], serde_json::json!(["embed", "h.0", "h.1", "h.2", "h.3", "head"]));
    let single = wide["single_shard_bytes"].as_u64().unwrap();
    let least = wide["min_device_memory_bytes"].as_u64().unwrap();
    assert!(least < single, "{least} {single}");
    let narrow: Value = serde_json::from_str(&partition(&(single * 2 / 3).to_string(), &["--json"])).unwrap();
    assert!(!narrow["cut_points"].as_array().unwrap().is_empty());
    // The suggested budgets work.
    let cuts = |memory: u64| {
        let plan: Value = serde_json::from_str(&partition(&memory.to_string(), &["--json"])).unwrap();
        plan["cut_points"].as_array().unwrap().len()
    };
    assert!(cuts(least) > 0);
    assert_eq!(cuts(single), 0);
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("plan.json");
    let table = partition("1GiB", &["--out", file.to_str().unwrap()]);
    // Also rounded, as printed in the table.
    let after = |what: &str| table.split(what).nth(1).unwrap().split([',', '\n']).next().unwrap().to_owned();
    for shown in [after("trains from "), after("uncut from ")] {
        assert!(partition(&shown, &[]).contains("trains from "), "{shown}");
    }
    assert!(table.contains("shard") && table.contains("1.00 GiB"), "{table}");
    assert_eq!(json(&file)["cut_points"], serde_json::json!([]));
}

#[test]
fn host_memory_is_enough_as_a_refusal_says_it() {
    let small = "train --batch 4 --context 64 --devices cpu:1x1 --device-memory 64MiB --cuts 2,4 --dry-run";
    let with = |memory: &str| {
        let arguments: Vec<&str> = small.split_whitespace().chain(["--host-memory", memory]).collect();
        hydra(&arguments).output().unwrap()
    };
    let refused = text(&with("1MiB").stderr);
    let least = refused.split("needs at least ").nth(1).unwrap().split(" (").next().unwrap();
    let output = with(least);
    assert!(output.status.success(), "{refused}{least}: {}", text(&output.stderr));
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_writes_what_it_has() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let arguments = [
        "train",
        "--steps",
        "1000000",
        "--batch",
        "2",
        "--context",
        "16",
        "--device-memory",
        "64MiB",
        "--json",
        "--out",
        dir.to_str().unwrap(),
    ];
    let child = spawn(&arguments, Stdio::piped());
    wait_for(|| fs::read_to_string(dir.join("metrics.jsonl")).is_ok_and(|lines| lines.contains("minibatch")));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let how = format!("note: continue with: hydra resume {}\n", dir.display());
    assert_eq!((output.status.code(), notes(&text(&output.stderr))), (Some(130), how));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json(&dir.join("report.json")), report);
    let task = &report["tasks"][0];
    assert_eq!(task["state"], "stopped");
    let steps = task["steps"].as_u64().unwrap();
    assert!((1..1_000_000).contains(&steps) && steps == task["losses"].as_array().unwrap().len() as u64);
    let model = task["model_dir"].as_str().unwrap();
    says(&["eval", "--model", model, "--context", "16", "--device-memory", "64MiB"]);
}

#[test]
fn a_task_that_gets_no_better_is_done_early() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let base = "train --batch 4 --lr 0 --context 32 --device-memory 64MiB --steps 40 --eval-every 2 --patience 3 --out";
    let arguments: Vec<&str> = base.split(' ').chain([dir.to_str().unwrap()]).collect();
    let printed = says(&arguments);
    assert!(printed.contains("done early"), "{printed}");
    let task = &json(&dir.join("report.json"))["tasks"][0];
    // The first evaluation is the best one, and three more are equally good.
    assert_eq!((&task["steps"], &task["best_step"]), (&8.into(), &2.into()));
    assert_eq!((&task["state"], &task["stopped_early"]), (&"done".into(), &true.into()));
    let resumed = hydra(&["resume", dir.to_str().unwrap()]).output().unwrap();
    assert!(
        text(&resumed.stderr).contains("nothing is left to do") && text(&resumed.stdout).contains("early")
    );
}

#[test]
fn a_diverging_task_fails_with_its_step_and_the_others_go_on() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let arguments = [
        "select",
        "--steps",
        "8",
        "--batch",
        "2",
        "--lr",
        "1e30,1e-3",
        "--context",
        "16",
        "--device-memory",
        "64MiB",
        "--devices",
        "cpu:1",
        "--out",
        dir.to_str().unwrap(),
    ];
    let output = hydra(&arguments).output().unwrap();
    let err = notes(&text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.starts_with("error: 1 of 2 tasks failed") && err.contains("step"), "{err}");
    let report = json(&dir.join("report.json"));
    assert_eq!(
        (&report["tasks"][0]["state"], &report["tasks"][1]["state"]),
        (&"failed".into(), &"done".into())
    );
    assert!(report["tasks"][0]["error"].as_str().unwrap().contains("step"));
    assert!(says(&["report", dir.to_str().unwrap()]).contains("failed"));
}
