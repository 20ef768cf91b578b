//! Run control during a run: with other devices, and after kills, the tasks and their bits are the same.

use crate::common::{Running, fails, hydra, json, says, spawn, text, wait_for};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};
use tempfile::TempDir;

/// Two tasks, `lr1e-3` and `lr3e-4`, whose length is set by `--steps`.
const COMMON: &str = "select --model bytes-tiny --batch 4 --lr 1e-3,3e-4 --context 32 --eval-limit 2 --no-initial-validation \
                      --progress none";
/// More than is ever trained here: such a run ends when every task has been stopped.
const LONG: &str = "--steps 100000";
const ONE: &str = "--devices cpu:1x1 --device-memory 64MiB";
const OTHER: &str = "--devices cpu:2x1 --device-memory 48MiB --policy random --cuts 2,4";

fn flags<'a>(out: &'a Path, more: &'a [&'a str]) -> Vec<&'a str> {
    let more = more.iter().flat_map(|more| more.split_whitespace());
    COMMON.split_whitespace().chain(more).chain(["--out", out.to_str().unwrap()]).collect()
}

/// Starts a run in the background, and waits until it accepts commands or has ended.
fn begin(arguments: &[&str], dir: &Path) -> Running {
    let _ = std::fs::remove_file(dir.join("control.sock"));
    let run = Running::new(spawn(arguments, Stdio::null()));
    wait_for(|| dir.join("control.sock").exists() || dir.join("report.json").exists());
    run
}

/// Sends a command with `hydra ctl`.
fn run_ctl(dir: &Path, command: &str) -> Output {
    let arguments = ["ctl", dir.to_str().unwrap()].into_iter().chain(command.split_whitespace());
    hydra(&arguments.collect::<Vec<_>>()).output().unwrap()
}

/// Returns the answer to a command, which must succeed.
pub fn ctl(dir: &Path, command: &str) -> Value {
    let output = run_ctl(dir, &format!("{command} --json"));
    assert!(output.status.success(), "{command}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Waits until every task has trained some minibatches.
fn trained(dir: &Path) {
    let minibatch = |row: &Value| row["minibatch"].as_u64().unwrap();
    wait_for(|| ctl(dir, "status")["tasks"].as_array().unwrap().iter().all(|row| minibatch(row) > 2));
}

/// Returns the minibatch at which a command took effect.
fn at(dir: &Path, command: &str) -> u64 {
    ctl(dir, command)["at"].as_u64().unwrap()
}

/// Stops tasks after the same number of minibatches. All are paused before.
fn stop_together(dir: &Path, tasks: &[&str]) {
    let places = tasks.iter().map(|task| at(dir, &format!("pause {task}")));
    let end = places.max().unwrap() + 30;
    for task in tasks {
        assert_eq!(at(dir, &format!("stop {task} --at {end}")), end);
    }
    tasks.iter().for_each(|task| drop(ctl(dir, &format!("resume {task}"))));
}

/// Waits for the successful end of a run, and returns its standard error.
fn ends(run: Running) -> String {
    let output = run.output();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    err
}

/// Returns the state, the minibatches and the hash of each task.
fn outcome(dir: &Path) -> BTreeMap<String, (Value, Value, Value)> {
    let report = json(&dir.join("report.json"));
    let of = |task: &Value, key: &str| task[key].clone();
    let seen = |task: &Value| (of(task, "state"), of(task, "steps"), of(task, "weights_sha256"));
    let tasks = report["tasks"].as_array().unwrap().iter();
    tasks.map(|task| (task["name"].as_str().unwrap().to_owned(), seen(task))).collect()
}

/// Replays a run on other devices, and asserts that its outcome is the same.
fn assert_replayed(dir: &Path, again: &Path, more: &str) {
    let replay = format!("--replay {}", dir.join("control.jsonl").display());
    let output = hydra(&flags(again, &[more, OTHER, &replay])).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        outcome(again),
        outcome(dir),
        "{}",
        std::fs::read_to_string(dir.join("control.jsonl")).unwrap()
    );
}

#[test]
fn a_session_has_one_outcome_on_other_devices_and_a_fork_without_changes_is_its_parent() {
    let root = TempDir::new().unwrap();
    let (dir, again) = (root.path().join("run"), root.path().join("again"));
    let more = format!("{LONG} --eval-every 5");
    let run = begin(&flags(&dir, &[&more, ONE, "--reserve-for-forks"]), &dir);
    trained(&dir);
    let (a, b) = ("lr1e-3", "lr3e-4");
    let place = at(&dir, &format!("pause {a}"));
    for fork in ["--name same", "--name other --lr 1e-4 --weight-decay 0.1 --clip 1"] {
        // Its shape has no clipping.
        let refused = run_ctl(&dir, &format!("fork {a} {fork}"));
        assert_eq!(refused.status.success(), !fork.contains("clip"), "{}", text(&refused.stderr));
    }
    assert_eq!(at(&dir, &format!("fork {a} --name other --lr 1e-4 --schedule linear --warmup 3")), place);
    let of_fork = at(&dir, "fork other --weight-decay 0.5 --steps 90000");
    assert!(of_fork >= place);
    // Named by the settings in which the tasks differ, and those that the fork changes.
    let name = "lr1e-4-wd0.5-linear-warmup3-steps90000-f1";
    let status = ctl(&dir, "status");
    let row = status["tasks"].as_array().unwrap().iter().find(|row| row["task"] == name).unwrap();
    assert_eq!((&row["parent"], row["forked_at"].as_u64()), (&"other".into(), Some(of_fork)));
    stop_together(&dir, &[a, "same"]);
    let paused = at(&dir, "pause other");
    ctl(&dir, &format!("resume other --until {}", paused + 3));
    ctl(&dir, &format!("stop {name}"));
    ctl(&dir, &format!("stop {b}"));
    ctl(&dir, "stop other");
    ends(run);
    let found = outcome(&dir);
    assert_eq!(found.len(), 5);
    assert!(found.values().all(|(state, _, hash)| state == "stopped" && hash.is_string()), "{found:?}");
    assert_eq!(found[a], found["same"]);
    assert_ne!(found[a].2, found["other"].2);
    let shown = says(&["report", dir.to_str().unwrap()]);
    assert!(shown.contains("forked from") && shown.contains("weight-decay 0.5"), "{shown}");
    assert_replayed(&dir, &again, &more);
    // Nothing is left to do.
    let resumed = hydra(&["resume", dir.to_str().unwrap()]).output().unwrap();
    assert!(resumed.status.success() && text(&resumed.stderr).contains("nothing is left to do"));
    fails(&["ctl", dir.to_str().unwrap(), "status"], 1, &["no run is in progress", "hydra report"]);
}

#[test]
fn a_task_that_is_extended_deleted_or_begun_anew_is_so_when_it_is_repeated() {
    let root = TempDir::new().unwrap();
    let (dir, again) = (root.path().join("run"), root.path().join("again"));
    let run = begin(&flags(&dir, &[LONG, ONE, "--reserve-for-forks"]), &dir);
    trained(&dir);
    let (a, b) = ("lr1e-3", "lr3e-4");
    let place = at(&dir, &format!("pause {a}"));
    ctl(&dir, &format!("fork {a} --name same"));
    let extended = ctl(&dir, &format!("extend {a} --steps 200000 --name longer"));
    assert_eq!((extended["task"].as_str(), extended["at"].as_u64()), (Some("longer"), Some(place)));
    ctl(&dir, &format!("fork {b} --name anew --weights-only --seed 7 --steps 9"));
    ctl(&dir, &format!("delete {b}"));
    stop_together(&dir, &["same", "longer"]);
    ends(run);
    let found = outcome(&dir);
    assert_eq!(found["same"], found["longer"], "a constant rate does not depend on the length");
    assert_eq!((&found["anew"].0, &found["anew"].1), (&"done".into(), &9.into()));
    assert_eq!(found[b].0, "deleted");
    assert!(!dir.join("models").join(b).exists() && dir.join("models/anew").is_dir());
    assert!(!dir.join(format!("checkpoints/{b}.safetensors")).exists());
    assert_replayed(&dir, &again, LONG);
}

#[test]
fn what_is_paused_keeps_the_run_waiting_also_after_a_kill() {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("run");
    let run = begin(&flags(&dir, &[LONG, ONE]), &dir);
    let place = at(&dir, "pause lr1e-3");
    ctl(&dir, "stop lr3e-4");
    let is = |task: &str, state: &str| {
        let status = ctl(&dir, "status");
        let mut rows = status["tasks"].as_array().unwrap().iter();
        rows.any(|row| row["task"] == task && row["state"] == state)
    };
    wait_for(|| is("lr1e-3", "paused") && is("lr3e-4", "stopped"));
    let err = text(&run.killed().stderr);
    let waits = format!("all remaining tasks are paused (`lr1e-3` after {place} minibatches)");
    assert!(err.contains(&waits), "{err}");
    let resumed = ["resume", dir.to_str().unwrap(), "--progress", "none"];
    let run = begin(&resumed, &dir);
    wait_for(|| is("lr1e-3", "paused") && is("lr3e-4", "stopped"));
    ctl(&dir, &format!("resume lr1e-3 --until {}", place + 2));
    wait_for(|| is("lr1e-3", "paused"));
    // It stays paused until it is resumed.
    ctl(&dir, &format!("stop lr1e-3 --at {}", place + 4));
    ctl(&dir, "resume lr1e-3");
    let err = ends(run);
    assert!(err.contains(&format!("paused: `lr1e-3` ({place})")) && err.contains(&waits), "{err}");
    assert_replayed(&dir, &root.path().join("again"), LONG);
}

/// Sends commands to a run that is killed after `answered` answers, while the next command is being sent. Asserts that no
/// answered command is lost, and that the resumed run has the outcome of its replay.
fn killed_after(answered: usize, wait_ms: u64) {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("run");
    let more = "--steps 60 --checkpoint-every 7";
    let run = begin(&flags(&dir, &[more, ONE]), &dir);
    let (a, b) = ("lr1e-3", "lr3e-4");
    let commands = [
        format!("fork {a} --name one --lr 1e-4"),
        format!("stop {b} --at 50"),
        format!("fork {a} --at 45 --name two --schedule linear"),
        format!("fork {b} --at 48 --name three --weights-only --steps 8"),
        "fork one --name four --weight-decay 0.5".to_owned(),
        format!("extend {a} --steps 70 --name five"),
        "delete one --at 55".to_owned(),
    ];
    let mut answers = Vec::new();
    for command in &commands[..answered.min(commands.len())] {
        // On a busy machine a command may come too late; it is then refused and changes nothing.
        let output = run_ctl(&dir, &format!("{command} --json"));
        answers.extend(
            output.status.success().then(|| serde_json::from_slice::<Value>(&output.stdout).unwrap()),
        );
    }
    let next = commands.get(answered).map(|command| {
        let (dir, command) = (dir.clone(), format!("{command} --json"));
        std::thread::spawn(move || run_ctl(&dir, &command))
    });
    if wait_ms > 0 {
        pause(wait_ms);
    }
    drop(run);
    if let Some(output) = next.map(|next| next.join().unwrap()).filter(|output| output.status.success()) {
        answers.push(serde_json::from_slice(&output.stdout).unwrap());
    }
    let log = std::fs::read_to_string(dir.join("control.jsonl")).unwrap_or_default();
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    for answer in &answers {
        let is_it = |line: &&Value| line["task"] == answer["task"] || line["name"] == answer["task"];
        assert!(
            lines.iter().filter(is_it).any(|line| line["at"] == answer["at"]),
            "{answer} is not in {log}"
        );
    }
    let resumed = ["resume", dir.to_str().unwrap(), "--devices", "cpu:2x1", "--progress", "none"];
    let output = hydra(&resumed).output().unwrap();
    assert!(output.status.success(), "{log}{}", text(&output.stderr));
    let mut found = outcome(&dir);
    // A run that was killed before the first logged command has nothing to replay.
    let replay = match log.is_empty() {
        true => String::new(),
        false => format!("--replay {}", dir.join("control.jsonl").display()),
    };
    let again = root.path().join("again");
    let output = hydra(&flags(&again, &[more, ONE, &replay])).output().unwrap();
    assert!(output.status.success(), "{log}{}", text(&output.stderr));
    // The state of a deleted task may be lost by a kill.
    let mut whole = outcome(&again);
    found.retain(|_, (state, ..)| state != "deleted");
    whole.retain(|_, (state, ..)| state != "deleted");
    assert_eq!(found, whole, "{log}");
}

#[expect(clippy::disallowed_methods, reason = "a process is killed at a drawn moment")]
fn pause(milliseconds: u64) {
    std::thread::sleep(std::time::Duration::from_millis(milliseconds));
}

#[test]
fn no_command_that_was_answered_is_lost_by_a_kill() {
    [1, 3, 6].into_iter().for_each(|answered| killed_after(answered, 0));
}

/// The number of kills is that of HYDRA_KILLS, by default 200.
#[test]
#[ignore = "it takes half an hour"]
fn no_command_that_was_answered_is_lost_by_hundreds_of_kills() {
    let count = std::env::var("HYDRA_KILLS").ok().and_then(|count| count.parse().ok()).unwrap_or(200_u64);
    for kill in 0..count {
        let drawn = kill.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        killed_after((drawn % 8) as usize, (drawn >> 8) % 900);
        println!("kill {kill}: nothing was lost");
    }
}

#[test]
fn what_cannot_be_done_is_refused_by_name_and_changes_nothing() {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("run");
    let run = begin(&flags(&dir, &["--steps 400", ONE]), &dir);
    trained(&dir);
    let place = at(&dir, "pause lr1e-3");
    let other = at(&dir, "pause lr3e-4");
    let shown = dir.to_str().unwrap();
    for (command, status, parts) in [
        ("pause lr1e-2", 1, vec!["no task is called `lr1e-2`", "did you mean `lr1e-3`?"]),
        ("pause lr1e-3 --at 0", 1, vec!["minibatch 0 is out of range", "to 399"]),
        ("stop lr1e-3 --at 400", 1, vec!["minibatch 400 is out of range", "to 399"]),
        ("fork lr1e-3 --at 0", 1, vec!["minibatch 0 is out of range"]),
        ("fork lr1e-3 --context 64", 1, vec!["a fork cannot change --context"]),
        (
            "fork lr1e-3 --batch 8",
            1,
            vec!["the batch of a fork must be its parent's, 4, got 8", "--weights-only"],
        ),
        (
            "fork lr1e-3 --batch 8 --weights-only",
            1,
            vec!["no measured task has the shape", "start another run"],
        ),
        ("fork lr1e-3 --seed 7", 1, vec!["the seed of a fork"]),
        ("fork lr1e-3 --optimizer sgd", 1, vec!["optimizer"]),
        ("fork lr1e-3 --name lr3e-4", 1, vec!["a task called `lr3e-4` exists already"]),
        ("fork lr1e-3 --name a/b", 1, vec!["`a/b` is not a valid task name"]),
        ("fork lr1e-3 --schedule wsd", 1, vec!["decay-steps"]),
        ("fork lr1e-3 --lr 1e-3,1e-4", 1, vec!["expected one value"]),
        ("fork lr1e-3 --lr fast", 2, vec!["`fast` is not a number"]),
        ("fork lr1e-3 --rl 1e-3", 2, vec!["--rl"]),
        ("extend lr1e-3 --steps 400", 1, vec!["--steps of an extended task must be larger than 400"]),
        ("extend lr1e-3", 2, vec!["--steps"]),
        ("halt lr1e-3", 2, vec!["halt"]),
    ] {
        let output = run_ctl(&dir, command);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{command}: {err}");
        parts.iter().for_each(|part| assert!(err.contains(part), "{command}: {part:?} in {err}"));
    }
    let log = std::fs::read_to_string(dir.join("control.jsonl")).unwrap();
    assert_eq!(log.lines().count(), 2, "{log}");
    let status = ctl(&dir, "status");
    let minibatches = |row: &Value| row["minibatch"].as_u64().unwrap();
    let rows = status["tasks"].as_array().unwrap();
    assert!(rows.len() == 2 && minibatches(&rows[0]) <= place && minibatches(&rows[1]) <= other, "{status}");
    drop(run);
    fails(&["ctl", shown, "status"], 1, &["no run is in progress", "hydra resume"]);
    fails(&["ctl", root.path().to_str().unwrap(), "status"], 2, &["is not a run directory"]);
    fails(&["ctl", "nowhere", "status"], 2, &["there is no such directory"]);
    let spec = dir.join("spec.toml");
    fails(&["select", "--replay", "nowhere.jsonl"], 2, &["--replay `nowhere.jsonl`: there is no such file"]);
    fails(&["select", "--replay", spec.to_str().unwrap()], 1, &["line 1 of", "is not a command"]);
}

#[test]
fn a_search_owns_its_tasks_and_says_how_they_are() {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("run");
    let searched = "--model bytes-tiny --batch 4 --context 32 --eval-limit 2 --search halving --trials 3 --steps 90000 --sample \
                    lr=log:1e-5..1e-2 --no-initial-validation --progress none --devices cpu:1x1 --device-memory 64MiB --out";
    let arguments = ["select"].into_iter().chain(searched.split_whitespace()).chain([dir.to_str().unwrap()]);
    let run = begin(&arguments.collect::<Vec<_>>(), &dir);
    assert_eq!(ctl(&dir, "status")["tasks"].as_array().unwrap().len(), 3);
    let task = ctl(&dir, "status")["tasks"][0]["task"].as_str().unwrap().to_owned();
    let refused = run_ctl(&dir, &format!("stop {task}"));
    assert!(text(&refused.stderr).contains("only `status` is available"), "{}", text(&refused.stderr));
    drop(run);
}
