//! `hydra explain`: the prediction of a run that is not made.

use crate::common::{fails, hydra, says};
use serde_json::Value;

/// A small run that is cut into several shards behind a simulated link.
const RUN: &str = "--steps 4 --batch 4 --context 32 --devices cpu:1x1 --device-memory 64MiB --cuts 2,4 --link 64MiB/s \
                   --eval-limit 4";

fn with<'a>(command: &'a str, more: &'a str) -> Vec<&'a str> {
    std::iter::once(command).chain(RUN.split_whitespace()).chain(more.split_whitespace()).collect()
}

#[test]
fn it_says_what_moves_how_long_it_takes_what_binds_and_what_helps() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run");
    let dry_run = [&with("train", "--dry-run")[..], &["--out", out.to_str().unwrap()]].concat();
    for printed in [says(&with("explain", "")), says(&dry_run)] {
        for part in [
            "largest shard",
            "simulated link of 64.00 MiB/s; parameter cache of ",
            "traffic and time per minibatch:",
            "gradients down",
            "predicted time: ",
            "utilization: cpu:0 ",
            "bottleneck: ",
            "not included in the predicted time: reading batches",
            "whole run: about ",
            " reading models and data, ",
            " measuring and planning, ",
            " initial weights, ",
            " writing models of ",
            "; checkpoints add at most ",
            "nothing was trained",
        ] {
            assert!(printed.contains(part), "{part} in\n{printed}");
        }
        assert!(
            printed.contains("simulated changes that help: ")
                || printed.contains("no simulated change gives a 1.1x speedup")
        );
    }
    assert!(!out.exists());
}

#[test]
fn its_json_has_the_needs_and_the_prediction() {
    let read = |arguments: &[&str]| -> Value { serde_json::from_str(&says(arguments)).unwrap() };
    let explained = read(&with("explain", "--json --lr 1e-3,3e-4"));
    assert_eq!(explained["tasks"].as_array().unwrap().len(), 2);
    assert_eq!(explained["tasks"][0]["shards"], 3);
    let prediction = &explained["prediction"];
    assert!(prediction["makespan_s"].as_f64().unwrap() > 0.0, "{prediction}");
    assert_eq!(prediction["simulated_one_in"], 1);
    assert_eq!(prediction["devices"][0]["link"]["kind"], "simulated");
    assert_eq!(prediction["devices"][0]["link"]["bytes_per_s"], 64.0 * 1024.0 * 1024.0);
    for task in prediction["tasks"].as_array().unwrap() {
        // Master weights change with every minibatch, so each minibatch promotes all parameters at least once, except the token
        // embedding, which both of its shards find in the cache.
        let [all, promoted] = ["parameter_bytes", "promoted_bytes"].map(|key| task[key].as_u64().unwrap());
        let table = 256 * 64 * size_of::<f32>() as u64;
        assert!(all > table && promoted >= all - table && promoted <= 2 * all, "{task}");
        assert!(
            task["gradient_down_bytes"].as_u64() > Some(0) && task["boundary_up_bytes"].as_u64() > Some(0)
        );
        assert!(task["finished_s"].as_f64() <= prediction["makespan_s"].as_f64(), "{prediction}");
    }
    let named = ["compute", "link-up", "link-down", "waits"].map(Value::from);
    assert!(named.contains(&prediction["binding"]), "{prediction}");
    for relief in prediction["relief"].as_array().unwrap() {
        assert!(relief["factor"].as_f64() > Some(1.1), "{relief}");
    }
    // A link that needs a minute for a model is the bottleneck on any machine.
    let slow: Vec<&str> = with("train", "--dry-run --json");
    let slow: Vec<&str> = slow.into_iter().map(|of| if of == "64MiB/s" { "64KiB/s" } else { of }).collect();
    let slow = read(&slow);
    assert_ne!(slow["prediction"]["binding"], "compute", "{slow}");
    let helps = &slow["prediction"]["relief"];
    let link =
        |relief: &Value| relief["change"] == "a link twice as fast" && relief["factor"].as_f64() > Some(1.5);
    assert!(helps.as_array().unwrap().iter().any(link), "{helps}");
}

#[test]
fn it_counts_the_parameters_that_are_trained_and_the_time_of_the_whole() {
    let read = |more: &str| -> Value { serde_json::from_str(&says(&with("explain", more))).unwrap() };
    let [all, adapters] = ["--json", "--json --lora 4"].map(read);
    let count = |of: &Value, key: &str| of["tasks"][0][key].as_u64().unwrap();
    assert_eq!(count(&all, "parameters"), count(&all, "trained_parameters"));
    // Two matrices of rank 4 at the linear layer of 64 to 192 in each of four blocks.
    assert_eq!(count(&adapters, "trained_parameters"), 4 * 4 * (64 + 192));
    assert_eq!(
        count(&adapters, "parameters") - count(&adapters, "trained_parameters"),
        count(&all, "parameters")
    );
    let times = &all["times"];
    assert_eq!(times["running_s"], all["prediction"]["makespan_s"]);
    assert_eq!(times["model_bytes"], 4 * count(&all, "parameters"));
    for part in ["reading_s", "measuring_s", "initial_weights_s", "writing_s", "checkpoints_s"] {
        assert!(times[part].as_f64() > Some(0.0), "{part} in {times}");
    }
    let table = says(&with("explain", "--lora 4"));
    let row = |part: &str| {
        let line = table.lines().find(|line| line.contains(part)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row("cut-points")[1..4], ["parameters", "trainable", "frozen"]);
    assert!(table.contains(" 4096 "), "{table}");
}

#[test]
fn it_explains_the_spec_of_a_run_and_parts_of_its_grid() {
    let root = tempfile::tempdir().unwrap();
    let (out, spec) = (root.path().join("run"), root.path().join("run/spec.toml"));
    let select = with("select", "--lr 1e-3,3e-4 --no-initial-validation --checkpoint-every never");
    says(&[&select[..], &["--out", out.to_str().unwrap()]].concat());
    let explain = |more: &[&str]| -> Value {
        let asked = ["explain", "--json", "--spec", spec.to_str().unwrap()];
        serde_json::from_slice(&hydra(&[&asked, more].concat()).output().unwrap().stdout).unwrap()
    };
    let names = |explained: &Value| {
        explained["tasks"].as_array().unwrap().iter().map(|of| of["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&explain(&[])), ["lr1e-3", "lr3e-4"]);
    assert_eq!(names(&explain(&["--only", "lr3e-4"])), ["lr3e-4"]);
    fails(&["explain", "--spec", spec.to_str().unwrap(), "--batch", "8"], 2, &["--batch"]);
}

/// Three tasks train the last layers of one model, or adapters, on a device that holds all of it. The frozen layers are promoted
/// once for all tasks, and the trained ones once in each minibatch, or twice if they are not used again immediately.
#[test]
fn what_tasks_have_in_common_is_promoted_once_as_it_says() {
    let root = tempfile::tempdir().unwrap();
    for (name, of) in
        [("end", "--train last:1,head --lr 1e-3,5e-4,1e-4"), ("adapters", "--lora 2,4,8 --lr 1e-3")]
    {
        let run = "--steps 3 --batch 2 --context 16 --devices cpu:1x1 --device-memory 64MiB --cuts 2,4 --link 512MiB/s \
                   --no-initial-validation --eval-limit 2 --json";
        let arguments: Vec<&str> = run.split_whitespace().chain(of.split_whitespace()).collect();
        let explained: Value = serde_json::from_str(&says(&[&["explain"], &arguments[..]].concat())).unwrap();
        let prediction = &explained["prediction"];
        let out = root.path().join(name);
        let out = ["--out", out.to_str().unwrap()];
        let report: Value =
            serde_json::from_str(&says(&[&["select"], &arguments[..], &out].concat())).unwrap();
        let (promoted, all) = (&report["transfers"]["parameter_bytes"], &prediction["parameter_bytes"]);
        assert_eq!(promoted, &prediction["promoted_bytes"], "{name}");
        let parameters = prediction["tasks"][0]["parameter_bytes"].as_u64().unwrap();
        assert!(all.as_u64().unwrap() < 2 * parameters, "{name}: {all} of three tasks of {parameters}");
        assert!(report["replay_s"].as_f64() > Some(0.0), "{name}");
        // Prefetched shards are not always on the device at the peak of compute.
        let [taken, most] =
            [&report["devices"][0], &prediction["devices"][0]].map(|of| of["peak_bytes"].as_f64().unwrap());
        assert!(taken <= 1.05 * most && most <= 1.25 * taken, "{name}: {taken} of {most}");
    }
}

#[test]
fn a_device_more_is_of_no_use_where_every_processor_has_a_thread() {
    let processors = std::thread::available_parallelism().unwrap().get();
    let helps = |devices: &str| {
        let run = format!(
            "explain --steps 4 --batch 4 --context 32 --lr 1e-3,5e-4,3e-4,1e-4 --devices {devices} --json"
        );
        let explained: Value =
            serde_json::from_str(&says(&run.split_whitespace().collect::<Vec<_>>())).unwrap();
        let relief = explained["prediction"]["relief"].as_array().unwrap().clone();
        relief.iter().any(|of| of["change"] == "one device more")
    };
    assert!(!helps(&format!("cpu:1x{processors}")), "its threads would share the processors");
    if processors > 1 {
        assert!(helps("cpu:1x1"));
    } else {
        eprintln!("skipped: there is one processor, and a second device would share it");
    }
}

#[test]
fn without_a_copy_no_link_is_in_it() {
    let run =
        ["explain", "--steps", "2", "--batch", "2", "--context", "16", "--devices", "cpu:1x1", "--json"];
    let explained: Value = serde_json::from_str(&says(&run)).unwrap();
    let prediction = &explained["prediction"];
    assert_eq!(prediction["devices"][0]["link"], serde_json::json!({ "kind": "zero-copy" }));
    let moved = ["link_up", "link_down"].map(|key| prediction[key].as_f64().unwrap());
    assert_eq!((moved, prediction["promoted_bytes"].as_u64()), ([0.0, 0.0], Some(0)), "{prediction}");
    assert_eq!(prediction["tasks"][0]["gradient_down_bytes"], 0, "{prediction}");
    assert_ne!(prediction["binding"], "link-up");
}

#[test]
fn it_refuses_what_a_run_refuses() {
    fails(
        &with("explain", "--microbatch-group 2"),
        2,
        &["--microbatch-group must be between 1 and --accumulate (1), got 2"],
    );
    fails(&with("explain", "--accumulate 5"), 2, &["--accumulate must be between 1 and --batch (4), got 5"]);
    fails(&["explain", "--device-memory", "64KiB", "--batch", "2", "--strict"], 1, &["the run was refused"]);
    let unknown = crate::common::hydra(&["explain", "--out", "runs"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2), "it writes nothing");
}
