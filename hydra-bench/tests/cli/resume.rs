//! Resuming killed or interrupted runs: nothing saved is trained again, and the results are those of an uninterrupted run.

use crate::common::{Halted, fails, grid, hydra, interrupt, json, notes, says, spawn, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Two configurations on two devices, cut into three shards, long enough to be killed.
static RUN: LazyLock<Vec<&str>> = LazyLock::new(|| grid("--steps 40 --cuts 2,4 --eval-every 15"));

const TASKS: [&str; 2] = ["lr1e-3", "lr3e-4"];

/// The results that must not depend on interruptions.
fn results(dir: &Path) -> Vec<Value> {
    let report = json(&dir.join("report.json"));
    let kept =
        ["name", "state", "losses", "initial_validation", "validation", "test", "evaluations", "best_step"];
    let task = |task: &Value| {
        let model = PathBuf::from(task["model_dir"].as_str().unwrap());
        assert!(model.join("model.safetensors").is_file());
        kept.iter().chain(&["weights_sha256"]).map(|key| task[key].clone()).collect::<Value>()
    };
    report["tasks"].as_array().unwrap().iter().map(task).collect()
}

fn events(dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn begin(run: &[&str], dir: &Path) -> Child {
    // A slow link leaves time to act on the run.
    let slow = ["--checkpoint-every", "2", "--link", "20MiB/s", "--out", dir.to_str().unwrap()];
    spawn(&[run, &slow].concat(), Stdio::piped())
}

/// Waits until a run has written this number of checkpoints of each task.
#[expect(clippy::disallowed_methods, reason = "another process tells of its doings only by its files")]
fn wait_for_checkpoints(dir: &Path, child: &mut Child, count: usize) {
    let begun = Instant::now();
    loop {
        let events = events(dir);
        let kept = |task: &str| {
            events.iter().filter(|event| event["event"] == "checkpoint" && event["task"] == task).count()
        };
        let kept = TASKS.map(kept);
        if kept.iter().all(|kept| *kept >= count) {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "the run has ended after {kept:?} checkpoints");
        assert!(begun.elapsed() < Duration::from_secs(120), "{kept:?} checkpoints in two minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Resumes a run. Returns standard error without progress.
fn resume(dir: &Path, more: &[&str]) -> String {
    let output = hydra(&[&["resume", dir.to_str().unwrap()], more].concat()).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    notes(&err)
}

#[test]
fn a_killed_run_goes_on_to_the_results_of_one_that_was_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let (whole, killed) = (root.path().join("whole"), root.path().join("killed"));
    says(&[&RUN[..], &["--checkpoint-every", "never", "--out", whole.to_str().unwrap()]].concat());
    let mut child = begin(&RUN, &killed);
    wait_for_checkpoints(&killed, &mut child, 2);
    // The run is still going, however long the request takes.
    let halted = Halted::new(child);
    let taken = ["resume", killed.to_str().unwrap()];
    fails(&taken, 1, &["another run is using the directory", "wait until it has ended"]);
    let replaced = ["--force", "--dry-run", "--out", killed.to_str().unwrap()];
    fails(&replaced, 1, &["another run is using the directory"]);
    reported(&killed, "the run is in progress: 2 running; the last event was ", "training");
    drop(halted);
    let before = events(&killed);
    reported(&killed, "continue it with: hydra resume", "stopped");
    let so_far: Value = serde_json::from_str(&says(&["report", killed.to_str().unwrap(), "--json"])).unwrap();
    assert_eq!((&so_far["state"], &so_far["tasks"][0]["config"]["lr"]), (&"stopped".into(), &1e-3.into()));
    let said = resume(
        &killed,
        &[
            "--devices",
            "cpu:1x2",
            "--device-memory",
            "40MiB",
            "--policy",
            "fifo",
            "--link",
            "8GiB/s",
            "--host-memory",
            "7MiB",
            "--disk-memory",
            "32MiB",
        ],
    );
    assert_eq!(said, "note: resuming tasks: 2 from a checkpoint\n");
    assert_eq!(results(&killed), results(&whole));
    let report = json(&killed.join("report.json"));
    let on_disk = |task: &Value| task["disk_bytes"].as_u64() > Some(0);
    assert!(
        report["tasks"].as_array().unwrap().iter().any(on_disk),
        "masters that were in memory are on the disk"
    );
    check_what_was_trained_again(&before, &events(&killed));
    nothing_is_left(&killed);
}

#[test]
fn a_killed_run_on_packed_examples_goes_on_in_the_same_rows_and_texts() {
    let root = tempfile::tempdir().unwrap();
    let (whole, killed, data) =
        (root.path().join("whole"), root.path().join("killed"), root.path().join("a.jsonl"));
    let line = |i: usize| {
        let (prompt, answer) = ("why ".repeat(i % 4 + 1), "so ".repeat(i % 3 + 1));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{answer}\"}}\n")
    };
    fs::write(&data, (0..60).map(line).collect::<String>()).unwrap();
    let prompts = root.path().join("prompts.txt");
    fs::write(&prompts, "why \nso ").unwrap();
    let texts = ["--metric", "exact_match", "--sample-prompts", prompts.to_str().unwrap()];
    let run = [&RUN[..], &["--pack", "--data", data.to_str().unwrap()], &texts].concat();
    let alone = [&run[..], &["--checkpoint-every", "never", "--out", whole.to_str().unwrap()]].concat();
    assert!(hydra(&alone).output().unwrap().status.success());
    let mut child = begin(&run, &killed);
    wait_for_checkpoints(&killed, &mut child, 2);
    drop(Halted::new(child));
    let said = resume(&killed, &["--link", "8GiB/s"]);
    assert!(said.contains("resuming tasks: 2 from a checkpoint\n"), "{said}");
    assert!(said.contains("note: 60 examples packed into "), "{said}");
    assert_eq!(results(&killed), results(&whole));
    let texts = |dir: &Path| {
        let events = events(dir).into_iter().filter(|event| event["event"] == "samples");
        let text = |event: Value| {
            let [task, step] = ["task", "step"].map(|key| event[key].to_string());
            ((task, step), event["samples"].clone())
        };
        events.map(text).collect::<BTreeMap<_, _>>()
    };
    assert_eq!((texts(&killed), texts(&killed).len()), (texts(&whole), 2 * 3));
}

/// Asserts that an unfinished run is reported as far as it has got, with this text at the end and this state of its tasks.
fn reported(dir: &Path, end: &str, state: &str) {
    let said = says(&["report", dir.to_str().unwrap()]);
    for task in TASKS {
        let row = said.lines().find(|line| line.contains(task)).unwrap();
        let parts = [" of 40", state, " 3 "];
        assert!(parts.iter().all(|part| row.contains(part)), "{said}");
    }
    assert!(said.contains(end) && said.contains("training loss"), "{said}");
}

/// Only the minibatches after the last checkpoint are trained again, with the same losses.
fn check_what_was_trained_again(before: &[Value], all: &[Value]) {
    let after = &all[before.len()..];
    let seconds =
        |events: &[Value]| -> Vec<f64> { events.iter().filter_map(|e| e["at_s"].as_f64()).collect() };
    let last = seconds(before).into_iter().fold(0.0, f64::max);
    assert!(seconds(after).iter().all(|at_s| *at_s >= last), "the seconds go on");
    let resumed: Vec<&Value> = after.iter().filter(|event| event["event"] == "resumed").collect();
    assert_eq!(resumed.len(), 2);
    for task in TASKS {
        let of = |events: &[Value], kind: &str| -> Vec<Value> {
            events.iter().filter(|e| e["event"] == kind && e["task"] == task).cloned().collect()
        };
        let from = of(after, "resumed")[0]["step"].as_u64().unwrap();
        assert!(from >= 2, "{task} begins at {from}");
        let trained = of(after, "minibatch");
        assert_eq!(trained[0]["step"].as_u64(), Some(from), "{task}");
        assert_eq!(trained.len() as u64, 40 - from, "{task}");
        for earlier in of(before, "minibatch").iter().filter(|e| e["step"].as_u64() >= Some(from)) {
            let again = trained.iter().find(|e| e["step"] == earlier["step"]).unwrap();
            assert_eq!(again["loss"], earlier["loss"], "{task}");
        }
    }
}

fn nothing_is_left(dir: &Path) {
    // Without its report, the run is rebuilt from the files of its tasks.
    let before = results(dir);
    fs::remove_file(dir.join("report.json")).unwrap();
    assert_eq!(resume(dir, &[]), "note: nothing is left to do: every task is finished\n");
    assert_eq!(results(dir), before);
    let report = fs::read(dir.join("report.json")).unwrap();
    assert_eq!(resume(dir, &[]), "note: nothing is left to do: every task is finished\n");
    assert_eq!(fs::read(dir.join("report.json")).unwrap(), report, "the report stays as it is");
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_says_how_to_go_on() {
    let root = tempfile::tempdir().unwrap();
    let (whole, stopped) = (root.path().join("whole"), root.path().join("stopped"));
    let mut child = begin(&RUN, &stopped);
    wait_for_checkpoints(&stopped, &mut child, 1);
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).ends_with(&format!("note: continue with: hydra resume {}\n", stopped.display()))
    );
    let trained = events(&stopped).iter().filter(|event| event["event"] == "minibatch").count();
    resume(&stopped, &["--link", "8GiB/s"]);
    says(&[&RUN[..], &["--out", whole.to_str().unwrap()]].concat());
    assert_eq!(results(&stopped), results(&whole));
    let all = events(&stopped).iter().filter(|event| event["event"] == "minibatch").count();
    assert_eq!((all, trained < 80), (80, true), "an interrupted run trains nothing twice");
}

#[cfg(unix)]
#[test]
fn a_warning_that_nobody_can_read_ends_nothing() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    let mut child = begin(&RUN, &run);
    wait_for_checkpoints(&run, &mut child, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    // Neither a checkpoint nor a warning can be written.
    for task in TASKS {
        let part = run.join(format!("checkpoints/{task}.safetensors.part"));
        // The run may have been killed while writing one.
        let _ = fs::remove_file(&part);
        fs::create_dir(part).unwrap();
    }
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let program = hydra(&[]).get_program().to_owned();
    let mut command = Command::new(program);
    command.arg("resume").arg(&run).args(["--link", "8GiB/s"]).env("HYDRA_RESERVATIONS", "");
    command.stdout(Stdio::null()).stderr(full);
    assert!(command.status().unwrap().success());
    let failed = events(&run).iter().filter(|event| event["event"] == "checkpoint_failed").count();
    assert!(failed > 2, "{failed} checkpoints failed");
    assert!(results(&run).iter().all(|task| task[1] == "done"));
}

#[test]
fn what_cannot_go_on_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    fails(&["resume", &path("nowhere")], 1, &["nowhere` is not a run directory: there is no such directory"]);
    fails(&["resume", &path("")], 1, &["is not a run directory: it has no spec.toml"]);
    fails(&["resume"], 2, &["<DIR>"]);
    let never = root.path().join("never");
    let short = ["train", "--steps", "2", "--batch", "4", "--context", "32", "--device-memory", "64MiB"];
    let mut command = hydra(&short);
    let output = command.args(["--checkpoint-every", "never", "--out"]).arg(&never).output().unwrap();
    assert!(output.status.success() && !never.join("checkpoints").exists());
    let spec = fs::read_to_string(never.join("spec.toml")).unwrap();
    assert!(spec.contains("checkpoint_every = \"never\""), "{spec}");
    let (lines, report) = (events(&never), fs::read(never.join("report.json")).unwrap());
    assert_eq!(resume(&never, &[]), "note: nothing is left to do: every task is finished\n");
    assert_eq!(events(&never), lines, "what is finished is not trained again");
    assert_eq!(fs::read(never.join("report.json")).unwrap(), report);
    let run = root.path().join("run");
    let mut child = begin(&RUN, &run);
    wait_for_checkpoints(&run, &mut child, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    fails(&["resume", &path("run"), "--devices", "cpu:2", "--link", "fast"], 2, &["--link"]);
    let spec = fs::read_to_string(run.join("spec.toml")).unwrap();
    fs::write(run.join("spec.toml"), spec.replace("seed = 0", "seed = 1")).unwrap();
    fails(
        &["resume", &path("run")],
        1,
        &["its seed is 0, expected 1", "resume it with the settings that it was started with"],
    );
    fs::write(run.join("spec.toml"), &spec).unwrap();
    // A partial one may exist too, from when the run was killed.
    let file = run.join(format!("checkpoints/{}.safetensors", TASKS[0]));
    fs::write(&file, "half").unwrap();
    fails(&["resume", &path("run")], 1, &["is not a checkpoint", "it has 4 bytes"]);
    fs::remove_file(&file).unwrap();
    let said = resume(&run, &["--link", "8GiB/s"]);
    assert_eq!(said, "note: resuming tasks: 1 from a checkpoint, 1 from the start (`lr1e-3`)\n");
}

#[test]
fn a_run_of_an_earlier_version_goes_on_with_the_names_of_its_tasks() {
    let root = tempfile::tempdir().unwrap();
    let [new, old] = ["run", "old"].map(|name| root.path().join(name));
    ended(root.path());
    let spec = fs::read_to_string(new.join("spec.toml")).unwrap();
    let earlier = root.path().join("earlier.toml");
    fs::write(&earlier, spec.replace("names = \"differences\"\n", "")).unwrap();
    says(&["select", "--spec", earlier.to_str().unwrap(), "--out", old.to_str().unwrap()]);
    let names = |dir: &Path| results(dir).iter().map(|task| task[0].clone()).collect::<Vec<_>>();
    assert_eq!(
        (names(&new), names(&old)),
        (vec!["lr1e-3".into(), "lr3e-4".into()], vec!["b4-lr1e-3".into(), "b4-lr3e-4".into()])
    );
    fs::remove_file(old.join("report.json")).unwrap();
    fs::remove_file(old.join("checkpoints/b4-lr3e-4.safetensors")).unwrap();
    assert_eq!(resume(&old, &[]), "note: resuming tasks: 1 from the start (`b4-lr3e-4`), 1 finished\n");
    assert_eq!(names(&old), [Value::from("b4-lr1e-3"), "b4-lr3e-4".into()]);
}

/// A finished short run.
fn ended(root: &Path) -> PathBuf {
    let dir = root.join("run");
    let short = grid("--steps 2 --cuts 2,4");
    says(&[&short[..], &["--out", dir.to_str().unwrap()]].concat());
    dir
}

#[test]
fn a_run_that_was_killed_while_it_drew_is_put_together_again() {
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let written = |name: &str| dir.join(name).metadata().unwrap().modified().unwrap();
    let drawn = ["trace.json", "schedule.svg", "losses.svg", "workload.json"];
    let last = written("report.json");
    assert!(drawn.iter().all(|name| written(name) <= last), "a directory with a report has everything else");

    for name in ["report.json", "schedule.svg", "losses.svg"] {
        fs::remove_file(dir.join(name)).unwrap();
    }
    fs::write(dir.join("trace.json"), "{\"half").unwrap();
    let half = ["schedule.svg.part", "plans/gone.json.part", "checkpoints/lr1e-3.safetensors.part"];
    half.iter().for_each(|name| fs::write(dir.join(name), "half").unwrap());
    assert_eq!(resume(&dir, &[]), "note: nothing is left to do: every task is finished\n");
    assert!(json(&dir.join("trace.json"))["traceEvents"].is_array());
    for name in ["report.json", "schedule.svg", "losses.svg", "workload.json"] {
        assert!(dir.join(name).is_file(), "{name}");
    }
    assert!(!half.iter().any(|name| dir.join(name).exists()), "nothing half written is left");

    let before = results(&dir);
    let moved = root.path().join("moved");
    fs::rename(&dir, &moved).unwrap();
    fs::remove_file(moved.join("report.json")).unwrap();
    resume(&moved, &[]);
    assert_eq!(results(&moved), before, "with the models where they are now");
}

#[test]
fn a_finished_run_says_that_it_records_nothing_and_which_model_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let record = root.path().join("w.json");
    let said = resume(&dir, &["--record", record.to_str().unwrap()]);
    let unrecorded =
        format!("note: nothing was trained, so nothing was recorded to `{}`\n", record.display());
    assert!(said.starts_with("note: nothing is left to do") && said.ends_with(&unrecorded), "{said}");
    assert!(!record.exists());

    let before = results(&dir);
    fs::remove_dir_all(dir.join("models/lr3e-4")).unwrap();
    let path = dir.to_str().unwrap();
    let gone = ["their models are missing from", "`lr3e-4`; to train them again, delete", "hydra resume"];
    fails(&["resume", path], 1, &gone);
    let report = fs::read(dir.join("report.json")).unwrap();
    fs::remove_file(dir.join("report.json")).unwrap();
    fails(&["resume", path], 1, &gone);
    fs::write(dir.join("report.json"), report).unwrap();
    // The suggested fix works.
    fs::remove_file(dir.join("checkpoints/lr3e-4.safetensors")).unwrap();
    assert_eq!(resume(&dir, &[]), "note: resuming tasks: 1 from the start (`lr3e-4`), 1 finished\n");
    assert_eq!(results(&dir), before);
    // It is ignored while tasks are left.
    fs::remove_dir_all(dir.join("models/lr3e-4")).unwrap();
    fs::remove_file(dir.join("checkpoints/lr1e-3.safetensors")).unwrap();
    let said = resume(&dir, &[]);
    assert!(
        said.starts_with("note: resuming tasks: 1 from the start (`lr1e-3`), 1 finished\nnote: "),
        "{said}"
    );
    assert!(said.contains(gone[1]), "{said}");
}

#[test]
fn a_task_that_begins_from_the_start_needs_the_model_and_the_data_of_the_runs_begin() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    let base = "select --batch 4 --context 32 --device-memory 64MiB --steps 1";
    let train = |out: &str, more: &[&str]| {
        let base: Vec<&str> = base.split_whitespace().collect();
        says(&[&base[..], more, &["--out", out]].concat());
    };
    // Two models of the same architecture.
    train(&path("two"), &["--lr", "1e-3,1e-4"]);
    let model = path("two/models/lr1e-3");
    let (weights, other) =
        (model.clone() + "/model.safetensors", path("two/models/lr1e-4/model.safetensors"));
    let data = path("text.txt");
    fs::write(&data, "some words again and again. ".repeat(99)).unwrap();
    let run = root.path().join("run");
    train(run.to_str().unwrap(), &["--lr", "1e-3,1e-4", "--model", &model, "--data", &data]);
    let before = results(&run);

    let as_it_was = fs::read(&weights).unwrap();
    fs::copy(other, &weights).unwrap();
    // A finished task requires neither.
    resume(&run, &[]);
    fs::remove_file(run.join("checkpoints/lr1e-4.safetensors")).unwrap();
    let refused = |parts: &[&str]| {
        let task = ["task `lr1e-4` has no checkpoint and starts from the beginning", "restore it"];
        fails(&["resume", run.to_str().unwrap()], 1, &[&task[..], parts].concat());
    };
    refused(&["the model `", &model]);
    fs::write(&weights, as_it_was).unwrap();
    let text = fs::read_to_string(&data).unwrap();
    fs::write(&data, text.replace("words", "lines")).unwrap();
    // The other task's checkpoint refuses a change; without a checkpoint, the hash does.
    fs::remove_file(run.join("checkpoints/lr1e-3.safetensors")).unwrap();
    fs::remove_file(run.join("report.json")).unwrap();
    fails(&["resume", run.to_str().unwrap()], 1, &["task `lr1e-3` has", "the data `", &data]);
    fs::write(&data, text).unwrap();
    let said = resume(&run, &[]);
    assert_eq!(said, "note: resuming tasks: 2 from the start (`lr1e-3`, `lr1e-4`)\n");
    assert_eq!(results(&run), before);
}
