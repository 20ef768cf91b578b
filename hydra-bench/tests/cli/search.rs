//! Searches: trials are compared, stopped and forked, with the same outcome on all devices and after kills.

use crate::common::{fails, hydra, json, says, spawn};
use crate::dashboard::{Served, path_of};
use serde_json::{Value, json as value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const COMMON: &str = "select --model bytes-tiny --batch 4 --context 32 --eval-limit 4 --no-initial-validation \
                      --progress none --device-memory 64MiB --sample lr=log:1e-5..1e-2";

fn search(out: &Path, more: &str) -> String {
    let flags = COMMON.split_whitespace().chain(more.split_whitespace());
    says(&flags.chain(["--out", out.to_str().unwrap()]).collect::<Vec<_>>())
}

/// Returns the state, the minibatches and the hash of each task.
fn outcome(out: &Path) -> BTreeMap<String, (Value, Value, Value)> {
    let report = json(&out.join("report.json"));
    let tasks = report["tasks"].as_array().unwrap().iter();
    let of = |task: &Value, key: &str| task[key].clone();
    let seen = |task: &Value| (of(task, "state"), of(task, "steps"), of(task, "weights_sha256"));
    tasks.map(|task| (task["name"].as_str().unwrap().to_owned(), seen(task))).collect()
}

fn log(out: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(out.join("search.jsonl")).unwrap();
    // The minibatch at which a trial waits for another one that may fork from it depends on the order of losses, because the
    // other one may have been decided before.
    let of_order = |line: &&str| !line.starts_with("{\"report\":\"reached\"");
    let mut lines: Vec<String> = text.lines().filter(of_order).map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_method_has_one_outcome_on_other_devices_and_policies() {
    let root = TempDir::new().unwrap();
    for (method, minibatches) in [
        ("halving --trials 9 --steps 9 --weight-decay 0.1", "21 minibatches"),
        ("hyperband --trials 14 --steps 9", "minibatches"),
        ("asha --trials 6 --steps 9 --workers 3", "minibatches"),
        ("pbt --trials 4 --steps 6 --interval 2", "minibatches"),
        ("tpe --trials 12 --steps 2", "24 minibatches"),
        ("random --trials 3 --steps 2 --sample seed=int:0..9", "6 minibatches"),
    ] {
        let name = method.split(' ').next().unwrap();
        let (one, two) = (root.path().join(format!("{name}-1")), root.path().join(format!("{name}-2")));
        let said = search(&one, &format!("--search {method} --devices cpu:1x1"));
        assert!(said.contains("search: ") && said.contains(minibatches), "{said}");
        assert!(said.contains("the best is lr"), "{said}");
        search(&two, &format!("--search {method} --devices cpu:2x1 --policy random --cuts 2,4"));
        assert_eq!(outcome(&one), outcome(&two), "{method}");
        assert_eq!(log(&one), log(&two), "{method}");
    }
}

#[test]
fn lists_of_any_setting_are_a_grid() {
    let root = TempDir::new().unwrap();
    let (out, alone) = (root.path().join("grid"), root.path().join("alone"));
    let flags = "--model bytes-tiny --batch 4 --context 32 --eval-limit 1 --no-initial-validation --steps 2 --devices cpu:1x1";
    let of = |command: &str, out: &Path| {
        let words = command.split_whitespace().chain(flags.split_whitespace());
        says(&words.chain(["--out", out.to_str().unwrap()]).collect::<Vec<_>>())
    };
    let said = of("select --lr 3e-4 --dropout 0,0.1 --weight-decay 0,0.1 --seed=3,4", &out);
    let heads: Vec<&str> = said.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(heads[..6], ["rank", "task", "weight_decay", "dropout", "seed", "shards"], "{said}");
    assert!(!said.contains("search: ") && said.contains("over seeds, mean ± standard deviation"), "{said}");
    of("train --lr 3e-4 --dropout 0.1 --weight-decay 0.1 --seed 4", &alone);
    let report = json(&out.join("report.json"));
    let training = |task: &&Value| {
        let training = &task["config"]["training"];
        let decay = training["optimizer"]["weight_decay"] == 0.1;
        task["config"]["dropout"] == 0.1 && decay && training["seed"] == 4
    };
    let names: BTreeSet<&str> =
        report["tasks"].as_array().unwrap().iter().map(|task| task["name"].as_str().unwrap()).collect();
    assert!(
        names.len() == 8 && names.contains("wd0.1-drop0.1-seed4") && names.contains("wd0-drop0-seed3"),
        "{names:?}"
    );
    let seeds = report["seeds"].as_array().unwrap();
    assert!(seeds.len() == 4 && seeds.iter().all(|one| one["n"] == 2), "{seeds:?}");
    assert_eq!(
        seeds[0]["differs"].as_object().unwrap().keys().collect::<Vec<_>>(),
        ["weight_decay", "dropout"]
    );
    let same = report["tasks"].as_array().unwrap().iter().find(training).unwrap();
    assert_eq!(same["weights_sha256"], json(&alone.join("report.json"))["tasks"][0]["weights_sha256"]);
}

#[test]
fn a_list_of_contexts_or_epochs_has_the_bits_of_each_alone() {
    let root = TempDir::new().unwrap();
    // Three minibatches of 16 examples of 64 tokens are an epoch.
    let data = root.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("train.txt"), (0..900).map(|word| format!("{word} ")).collect::<String>())
        .unwrap();
    let run = |command: &str, name: &str| {
        let (out, data) = (root.path().join(name), data.display());
        let flags = format!("--data {data} --model bytes-tiny --batch 16 --lr 3e-4 --devices cpu:1x1 --out");
        let words = command.split_whitespace().chain(flags.split_whitespace());
        says(&words.chain(out.to_str()).collect::<Vec<_>>());
        json(&out.join("report.json"))["tasks"].clone()
    };
    for (flag, list, names, more) in [
        ("context", "16,32", ["ctx16", "ctx32"], "--steps 2"),
        ("epochs", "1,2", ["ep1", "ep2"], "--context 64"),
    ] {
        let tasks = run(&format!("select --{flag} {list} {more}"), flag);
        let tasks = tasks.as_array().unwrap();
        assert_eq!(tasks.iter().map(|task| &task["name"]).collect::<Vec<_>>(), names);
        for (task, one) in tasks.iter().zip(list.split(',')) {
            let alone =
                run(&format!("train --{flag} {one} {more}"), names[usize::from(one == "2" || one == "32")]);
            assert_eq!(task["weights_sha256"], alone[0]["weights_sha256"], "{flag} {one}");
        }
        assert_ne!(tasks[0]["weights_sha256"], tasks[1]["weights_sha256"], "{flag}");
    }
    let said = ["--context", "16,32", "--cuts", "2,4", "--steps", "1"];
    crate::common::fails(&said, 2, &["--cuts requires a single model, and --model and --context name 2"]);
}

/// Trials of an asynchronous search start during the run. All shapes that their settings can produce were measured at the
/// start, also if the first trial has another one.
#[test]
fn trials_that_begin_later_have_other_batches_adapters_and_optimizers() {
    let root = TempDir::new().unwrap();
    let space = root.path().join("space.toml");
    let written = "[space]\noptimizer = ['adamw', 'sgd']\nclip = { choice = [0.5, 1.0], when = { optimizer = 'sgd' } }\n";
    std::fs::write(&space, written).unwrap();
    let space = format!("--space {}", space.display());
    for (method, keys) in [
        ("asha --trials 7 --steps 4 --workers 1 --sample batch=2,3,4", &["batch"][..]),
        (&*format!("asha --trials 7 --steps 4 --workers 1 {space}"), &["optimizer", "clip"]),
        ("tpe --trials 14 --steps 2 --sample lora=2,4", &["lora"]),
        (
            &*format!("pbt --trials 6 --steps 6 --interval 2 --sample batch=2,3,4 {space}"),
            &["batch", "optimizer"],
        ),
    ] {
        let name = method.split(' ').next().unwrap();
        let dir = |devices: usize| root.path().join(format!("{name}-{}-{devices}", keys[0]));
        search(&dir(1), &format!("--search {method} --devices cpu:1x1"));
        search(&dir(2), &format!("--search {method} --devices cpu:2x1 --policy random --cuts 2,4"));
        assert_eq!(outcome(&dir(1)), outcome(&dir(2)), "{method}");
        assert_eq!(log(&dir(1)), log(&dir(2)), "{method}");
        let report = json(&dir(1).join("report.json"));
        let tasks = report["tasks"].as_array().unwrap();
        for key in keys {
            let values: BTreeSet<String> = tasks.iter().map(|task| setting(task, key)).collect();
            assert!(values.len() > 1, "{method}: {key} is {values:?}");
        }
        assert!(tasks.iter().all(|task| !task["name"].as_str().unwrap().starts_with("shape")), "{report}");
    }
}

/// Returns a setting of a task from its report.
fn setting(task: &Value, key: &str) -> String {
    let (config, training) = (&task["config"], &task["config"]["training"]);
    let found = [&config[key], &training[key], &config["lora"]["rank"]];
    found.into_iter().find(|value| !value.is_null()).map(Value::to_string).unwrap_or_default()
}

/// One of them by itself.
#[test]
fn a_trial_that_begins_later_has_the_bits_that_it_has_alone() {
    let root = TempDir::new().unwrap();
    let (out, alone) = (root.path().join("search"), root.path().join("alone"));
    search(&out, "--search asha --trials 7 --steps 4 --workers 1 --sample batch=2,3,4 --devices cpu:2x1");
    let report = json(&out.join("report.json"));
    let tasks = report["tasks"].as_array().unwrap();
    let first = &tasks[0]["config"]["batch"];
    let later = tasks.iter().find(|task| task["config"]["batch"] != *first && task["steps"] == 1).unwrap();
    let [rate, batch] = ["lr", "batch"].map(|key| later["config"][key].to_string());
    let flags = format!(
        "train --model bytes-tiny --batch {batch} --context 32 --eval-limit 4 --no-initial-validation --steps 4 \
         --eval-at 1 --device-memory 64MiB --lr {rate} --progress none --out {}",
        alone.display()
    );
    says(&flags.split_whitespace().collect::<Vec<_>>());
    let losses = |task: &Value| task["losses"][0].clone();
    assert_eq!(losses(&json(&alone.join("report.json"))["tasks"][0]), losses(later), "to the bit");
    let served = Served::new(&[&out]);
    let run = served.get(&path_of(&out)).json();
    let trained: u64 = tasks.iter().map(|task| task["steps"].as_u64().unwrap()).sum();
    assert_eq!(run["search"], value!({ "trained": trained, "asked": trained }));
}

#[test]
fn a_winner_has_the_bits_that_it_has_alone() {
    let root = TempDir::new().unwrap();
    let (out, alone) = (root.path().join("search"), root.path().join("alone"));
    search(&out, "--search halving --trials 3 --steps 6 --eta 3 --devices cpu:2x1");
    let report = json(&out.join("report.json"));
    let done = report["tasks"].as_array().unwrap().iter().find(|task| task["state"] == "done").unwrap();
    let rate = done["config"]["lr"].to_string();
    let flags = "train --model bytes-tiny --batch 4 --context 32 --eval-limit 4 --no-initial-validation --steps 6 \
                 --eval-at 2 --device-memory 64MiB --lr";
    says(&flags.split_whitespace().chain([&*rate, "--out", alone.to_str().unwrap()]).collect::<Vec<_>>());
    assert_eq!(json(&alone.join("report.json"))["tasks"][0]["weights_sha256"], done["weights_sha256"]);
}

#[test]
fn trials_are_given_by_a_file_and_equal_ones_are_one() {
    let root = TempDir::new().unwrap();
    let (file, out) = (root.path().join("trials.jsonl"), root.path().join("out"));
    std::fs::write(&file, "{\"lr\": 1e-3}\n{\"lr\": 0.001}\n{\"lr\": 3e-4, \"schedule\": \"linear\"}\n")
        .unwrap();
    let flags = COMMON.replace(" --sample lr=log:1e-5..1e-2", "") + " --search grid --steps 2 --trials-file";
    let flags = flags.split_whitespace().chain([file.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    let output = hydra(&flags.collect::<Vec<_>>()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("sample 1 is lr1e-3-constant"), "{said}");
    let names: Vec<String> = outcome(&out).into_keys().collect();
    assert_eq!(names, ["lr1e-3-constant", "lr3e-4-linear"]);
    let report = json(&out.join("report.json"));
    assert_eq!(report["tasks"][1]["config"]["training"]["schedule"]["kind"], "linear");
}

#[test]
fn searches_that_make_no_sense_are_refused_with_what_to_do() {
    let refused = |more: &str, says: &[&str]| {
        let flags: Vec<&str> = COMMON.split_whitespace().chain(more.split_whitespace()).collect();
        fails(&flags, 2, says);
    };
    refused("--search halving --trials 9", &["--steps N"]);
    refused("--search halving --trials 9 --epochs 1", &["--steps N", "no --epochs"]);
    refused("--search halving --steps 9", &["`trials`"]);
    refused(
        "--search asha --trials 9 --steps 9 --sample batch=int:1..100",
        &["100 combinations of batch", "halving"],
    );
    refused(
        "--search random --trials 2 --steps 9 --sample rl=1,2",
        &["`rl` cannot be searched", "weight_decay"],
    );
    refused("--search random --trials 2 --steps 9 --sample clip=lgo:1..2", &["log:LOW..HIGH"]);
    refused("--search random --trials 2 --steps 9 --sample warmup=uniform:1..2", &["warmup"]);
    refused("--search halfing --trials 2 --steps 9", &["halving"]);
    refused("--search random --trials 2 --steps 9 --eta 3", &["the search `random` does not use `eta`"]);
    let train = COMMON.replace("select", "train") + " --search random --trials 2 --steps 2";
    fails(&train.split_whitespace().collect::<Vec<_>>(), 2, &["hydra select"]);
}

/// Waits until a search has received this number of reports, or has ended.
#[expect(clippy::disallowed_methods, reason = "another process tells of its doings only by its files")]
fn wait_for_reports(dir: &Path, child: &mut Child, count: usize) {
    let told = || std::fs::read_to_string(dir.join("search.jsonl")).map_or(0, |text| text.lines().count());
    while told() < count && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Starts a search that writes to `killed`, kills it when it has received this number of reports, and asserts that it goes on
/// to the outcome of `whole`.
fn assert_goes_on(search: &str, killed: &Path, whole: &Path, reports: usize) {
    let all = search.split_whitespace().chain(["--out", killed.to_str().unwrap()]);
    let mut child = spawn(&all.collect::<Vec<_>>(), Stdio::null());
    wait_for_reports(killed, &mut child, reports);
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = ["resume", killed.to_str().unwrap(), "--devices", "cpu:2x1", "--progress", "none"];
    let output = hydra(&resumed).output().unwrap();
    assert!(output.status.success(), "{search}: {}", String::from_utf8(output.stderr).unwrap());
    assert_eq!(log(killed), log(whole), "{search}");
    let done = |out: &Path| {
        let done = outcome(out).into_iter().filter(|(_, (state, ..))| state == "done");
        done.collect::<Vec<_>>()
    };
    assert!(!done(whole).is_empty());
    assert_eq!(done(killed), done(whole), "{search}");
}

#[test]
fn a_search_that_was_killed_goes_on_to_the_outcome_of_one_that_was_left_alone() {
    let root = TempDir::new().unwrap();
    for (method, reports) in [
        ("halving --trials 9 --steps 18", 5),
        ("pbt --trials 4 --steps 24 --interval 4", 9),
        ("asha --trials 6 --steps 18 --workers 1 --sample batch=2,4 --sample seed=int:0..9", 4),
    ] {
        let name = method.split(' ').next().unwrap();
        let (whole, killed) = (root.path().join(name), root.path().join(format!("{name}-killed")));
        let flags = format!("--search {method} --devices cpu:1x1 --checkpoint-every 2");
        search(&whole, &flags);
        assert_goes_on(&format!("{COMMON} {flags}"), &killed, &whole, reports);
    }
}

/// Trials that differ only in the learning rate's decay.
const DECAYS: &str = "--batch 4 --context 32 --eval-limit 4 --no-initial-validation --device-memory 64MiB --model bytes-tiny \
                      --schedule wsd --warmup 2 --progress none";

fn decays(out: &Path, more: &str) -> String {
    let flags = format!("select {DECAYS} {more}");
    says(&flags.split_whitespace().chain(["--out", out.to_str().unwrap()]).collect::<Vec<_>>())
}

/// Returns the number of minibatches that a run has trained, from its metrics.
fn trained(out: &Path) -> usize {
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    metrics.lines().filter(|line| line.contains("\"event\":\"minibatch\"")).count()
}

#[test]
fn what_trials_have_in_common_is_trained_once_with_the_bits_of_each_alone() {
    let root = TempDir::new().unwrap();
    let (one, two) = (root.path().join("one"), root.path().join("two"));
    let grid = "--search grid --steps 12 --lr 3e-3 --sample decay_steps=2,4,6 --sample decay_to=0,0.5 --eval-every 5";
    let said = decays(&one, &format!("{grid} --devices cpu:1x1"));
    // The trials are equal up to 11, 9 and 7 minibatches.
    let edges = 12 + 1 + 2 * 3 + 2 * 5;
    assert_eq!(trained(&one), edges);
    assert!(
        said.contains(&format!(
            "6 trials, {edges} minibatches ({} saved by sharing common prefixes",
            6 * 12 - edges
        )),
        "{said}"
    );
    assert!(said.contains("forked from") && said.contains("decay2-to0 after 11"), "{said}");
    decays(&two, &format!("{grid} --devices cpu:2x1 --policy random --cuts 2,4"));
    assert_eq!(outcome(&one), outcome(&two));
    assert_eq!(trained(&two), edges);
    let report = json(&one.join("report.json"));
    let tasks = report["tasks"].as_array().unwrap();
    assert_eq!(tasks.iter().filter(|task| task["state"] == "done").count(), 6);
    for task in tasks {
        let alone = root.path().join(task["name"].as_str().unwrap());
        let schedule = &task["config"]["training"]["schedule"];
        let to = schedule.get("decay_to").map_or("0".to_owned(), Value::to_string);
        let flags = format!(
            "train {DECAYS} --steps 12 --lr 3e-3 --eval-every 5 --decay-steps {} --decay-to {to}",
            schedule["decay_steps"]
        );
        says(&flags.split_whitespace().chain(["--out", alone.to_str().unwrap()]).collect::<Vec<_>>());
        let hash = |task: &Value| task["weights_sha256"].clone();
        assert_eq!(hash(&json(&alone.join("report.json"))["tasks"][0]), hash(task), "{}", task["name"]);
    }
}

#[test]
fn stage_trees_have_one_outcome_on_other_devices_and_after_a_kill() {
    let root = TempDir::new().unwrap();
    let space = "--sample lr=1e-3,3e-3 --sample decay_steps=int:2..14 --steps 18 --checkpoint-every 2";
    for (method, reports) in [
        ("grid --sample decay_to=0,0.5", 1),
        ("random --trials 6", 1),
        ("halving --trials 9", 4),
        ("hyperband --trials 14", 6),
        ("asha --trials 9 --workers 3", 4),
        ("tpe --trials 14", 8),
    ] {
        let name = method.split(' ').next().unwrap();
        let space = if name == "grid" { space.replace("int:2..14", "3,9,14") } else { space.to_owned() };
        let [whole, two, killed] =
            ["", "-two", "-killed"].map(|end| root.path().join(format!("{name}{end}")));
        let flags = format!("--search {method} {space}");
        let said = decays(&whole, &format!("{flags} --devices cpu:1x1"));
        assert!(said.contains(&format!(", {} minibatches (", trained(&whole))), "{said}");
        decays(&two, &format!("{flags} --devices cpu:2x1 --policy random --cuts 2,4"));
        assert_eq!(outcome(&whole), outcome(&two), "{method}");
        assert_eq!(log(&whole), log(&two), "{method}");
        assert_goes_on(&format!("select {DECAYS} {flags} --devices cpu:1x1"), &killed, &whole, reports);
    }
}

#[test]
fn a_space_in_a_file_has_conditions_and_stays_with_the_run() {
    let root = TempDir::new().unwrap();
    let [file, one, two] = ["space.toml", "one", "two"].map(|name| root.path().join(name));
    let space = "[space]\nschedule = [\"constant\", \"wsd\"]\ndecay_steps = { choice = [2, 3], when = { schedule = \"wsd\" } }\n";
    std::fs::write(&file, space).unwrap();
    let base = "select --model bytes-tiny --batch 4 --context 32 --eval-limit 4 --no-initial-validation --progress none \
                --device-memory 64MiB --lr 1e-3 --search grid --steps 5 --sample weight_decay=0,0.1 --space";
    let flags: Vec<&str> = base.split_whitespace().chain([file.to_str().unwrap()]).collect();
    says(&[&flags[..], &["--out", one.to_str().unwrap()]].concat());
    let report = json(&one.join("report.json"));
    let kind = |task: &Value| task["config"]["training"]["schedule"]["kind"].as_str().unwrap().to_owned();
    let mut kinds: Vec<String> = report["tasks"].as_array().unwrap().iter().map(kind).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["constant", "constant", "wsd", "wsd", "wsd", "wsd"]);
    let refused = |text: &str, more: &str, says: &[&str]| {
        std::fs::write(&file, text).unwrap();
        fails(&[&flags[..], &more.split_whitespace().collect::<Vec<_>>()].concat(), 2, says);
    };
    refused("[space]\nwramup = [1, 2]\n", "", &["`wramup`", "`warmup`"]);
    refused("[space]\nlr = [1e-3, 1e-4]\n", "--sample lr=1e-3,1e-2", &["--sample lr", "--space"]);
    for text in ["[spaces]\n", "[space]\nwarmup = { choice = [1, 2], when = { seed = 1 } }\n"] {
        std::fs::write(&file, text).unwrap();
        fails(&flags, 1, &["space.toml` cannot be used"]);
    }
    std::fs::remove_file(&file).unwrap();
    let spec = one.join("spec.toml");
    says(&["select", "--spec", spec.to_str().unwrap(), "--progress", "none", "--out", two.to_str().unwrap()]);
    assert_eq!(outcome(&one), outcome(&two));
}

#[test]
fn trials_are_evaluated_where_they_are_compared_and_at_their_end() {
    let root = TempDir::new().unwrap();
    let (out, alone) = (root.path().join("search"), root.path().join("alone"));
    // Rungs that only an interval of one minibatch meets.
    search(&out, "--search halving --trials 9 --steps 25 --devices cpu:2x1");
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let periodic = lines.filter(|line| line["event"] == "evaluation" && line["kind"] == "periodic");
    let mut evaluated: BTreeMap<u64, usize> = BTreeMap::new();
    periodic.for_each(|line| *evaluated.entry(line["step"].as_u64().unwrap()).or_default() += 1);
    assert_eq!(evaluated, [(2, 9), (8, 3), (25, 1)].into());
    assert!(std::fs::read_to_string(out.join("spec.toml")).unwrap().contains("eval_at = [2, 8]"));
    let report = json(&out.join("report.json"));
    let done = report["tasks"].as_array().unwrap().iter().find(|task| task["state"] == "done").unwrap();
    let rate = done["config"]["lr"].to_string();
    let flags = "train --model bytes-tiny --batch 4 --context 32 --eval-limit 4 --no-initial-validation --steps 25 \
                 --eval-at 2,8 --device-memory 64MiB --lr";
    says(&flags.split_whitespace().chain([&*rate, "--out", alone.to_str().unwrap()]).collect::<Vec<_>>());
    assert_eq!(json(&alone.join("report.json"))["tasks"][0]["weights_sha256"], done["weights_sha256"]);
}
