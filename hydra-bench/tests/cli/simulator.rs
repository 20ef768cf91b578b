//! `hydra simulate` and `hydra compare` from the command line: consistent results, plots, and errors for invalid input.

use crate::common::{fails, hydra, says, text};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// A workload in the repository.
fn kept(name: &str) -> String {
    format!("{}/experiments/workloads/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

fn json_of(arguments: &[&str]) -> Value {
    serde_json::from_str(&says(arguments)).unwrap()
}

fn simulated(name: &str, more: &[&str]) -> Value {
    json_of(&[&["simulate", "--json", "--workload", &kept(name)], more].concat())
}

/// A workload of one task, with this after its `name`.
fn one_task(rest: &str) -> String {
    format!(r#"{{"tasks": [{{"name": "a", {rest}}}], "devices": 1}}"#)
}

const SHARD: &str = r#""shards": [{"forward_s": 1, "backward_s": 2, "promote_s": 0.5}]"#;

#[test]
fn a_simulation_holds_together() {
    for (name, devices, tasks, shard_tasks) in [("small", 2, 4, 62), ("paper-grid", 4, 12, 78_930)] {
        let result = simulated(name, &[]);
        let number = |field: &str| result[field].as_f64().unwrap();
        assert_eq!(result["policy"], "sharded-lrtf");
        assert_eq!((&result["devices"], &result["shard_tasks"]), (&devices.into(), &shard_tasks.into()));
        assert!(number("makespan_s") >= number("lower_bound_s"));
        let bounds = result["bounds"].as_object().unwrap();
        let best = bounds.values().map(|bound| bound.as_f64().unwrap()).fold(0.0, f64::max);
        assert!(bounds.len() >= 5 && best == number("lower_bound_s"), "{bounds:?}");
        assert!((number("over_bound") - number("makespan_s") / best).abs() < 1e-12);
        let utilization = result["utilization"].as_array().unwrap();
        assert_eq!(utilization.len(), devices);
        assert!(utilization.iter().all(|share| (0.0..=1.0).contains(&share.as_f64().unwrap())));
        let promoted = number("promotions") + number("promotions_saved");
        assert_eq!(promoted, number("shard_tasks"), "every shard task is promoted or finds a copy");
        assert!(number("decisions") >= number("shard_tasks") && number("decision_ns") > 0.0);
        let ends = result["tasks"].as_array().unwrap();
        let last = ends.iter().map(|task| task["finished_s"].as_f64().unwrap()).fold(0.0, f64::max);
        assert_eq!((ends.len(), last), (tasks, number("makespan_s")));
    }
}

#[test]
fn the_kept_grid_is_that_of_the_experiment() {
    let path = format!("{}/runs/sched-grid/workload-4.json", env!("CARGO_MANIFEST_DIR"));
    let [kept, measured] = [kept("paper-grid"), path].map(|path| read(Path::new(&path)));
    let workload = |text: &str| hydra_sched::Workload::from_json(text).unwrap();
    assert_eq!(workload(&kept), workload(&measured));
}

#[test]
fn flags_change_what_is_simulated() {
    let makespan = |more: &[&str]| simulated("small", more)["makespan_s"].as_f64().unwrap();
    let one = simulated("small", &["--devices", "1"]);
    assert_eq!(one["utilization"].as_array().unwrap().len(), 1);
    assert!(makespan(&["--devices", "1"]) > makespan(&[]));
    assert!(makespan(&["--no-prefetch"]) > makespan(&[]));
    assert!(makespan(&["--policy", "sharded-lrtf-eager"]) > makespan(&[]));
    assert!(makespan(&["--policy", "srtf"]) > makespan(&[]));
    assert_eq!(simulated("small", &["--policy", "fifo", "--seed", "3"])["policy"], "fifo");
}

#[test]
fn the_same_seed_gives_the_same_output() {
    let result = |seed: &str| {
        let mut result = simulated("small", &["--policy", "random", "--seed", seed]);
        assert!(result.as_object_mut().unwrap().remove("decision_ns").is_some());
        result
    };
    assert_eq!(result("7"), result("7"));
    assert_ne!(result("7")["tasks"], result("8")["tasks"]);
}

#[test]
fn the_gantt_chart_has_a_row_for_each_device() {
    let root = tempfile::tempdir().unwrap();
    for (name, devices) in [("small", "3"), ("paper-grid", "4")] {
        let file = root.path().join("gantt.svg");
        let arguments = ["simulate", "--workload", &kept(name), "--devices", devices, "--gantt"];
        says(&[&arguments[..], &[file.to_str().unwrap()]].concat());
        let svg = fs::read_to_string(file).unwrap();
        let count: usize = devices.parse().unwrap();
        for device in 0..count {
            assert!(svg.contains(&format!("\ndevice {device}\n")), "{name} has no row {device}");
        }
        assert!(!svg.contains(&format!("\ndevice {count}\n")));
        assert!(svg.contains("promotion, below a row") && svg.trim_end().ends_with("</svg>"));
        // Promotions have a row of their own; the last one of this height is in the legend.
        assert!(svg.matches("height=\"8\"").count() > count);
    }
}

#[test]
fn both_print_short_tables() {
    let told = says(&["simulate", "--workload", &kept("small")]);
    for part in
        ["4 tasks with 62 shard tasks on 2 devices", "makespan", "(chain)", "on average", "two shards"]
    {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(told.lines().count() < 20, "{told}");
    let told = says(&["compare", "--workload", &kept("paper-grid"), "--busy-watts", "250"]);
    for part in [
        "speedup of SHARP",
        "task-parallel",
        "task-parallel does not fit: task `batch 16 rate 3e-4` needs 24000000000 bytes",
        "model-parallel leaves 75.0% idle: one stage of one model computes at a time",
        "data-parallel leaves nothing idle",
        "250 W",
        "docs/scheduling.md",
        "over the bound",
        "sharded-lrtf-local",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
}

#[test]
fn models_that_no_device_holds_are_trained_by_those_that_spill() {
    let result = json_of(&["compare", "--json", "--workload", &kept("larger-than-devices")]);
    let rows = result["strategies"].as_array().unwrap();
    let fits = rows.iter().filter(|row| row["does_not_fit"].is_null());
    let names: Vec<&str> = fits.map(|row| row["strategy"].as_str().unwrap()).collect();
    assert_eq!(names, ["spilled-task-parallel", "sharp"]);
    // They promote the same shards as on larger devices, in the same time.
    let on_larger = json_of(&["compare", "--json", "--workload", &kept("paper-grid")]);
    let sharp = |of: &Value| of["strategies"].as_array().unwrap().last().unwrap()["runtime_s"].clone();
    assert_eq!(sharp(&result), sharp(&on_larger));
}

#[test]
fn a_comparison_has_every_strategy_and_policy() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("new/compare");
    let result =
        json_of(&["compare", "--json", "--workload", &kept("paper-grid"), "--out", out.to_str().unwrap()]);
    let rows = result["strategies"].as_array().unwrap();
    let of = |name: &str| rows.iter().find(|row| row["strategy"] == name).unwrap();
    for name in hydra_sched::Strategy::ALL.map(hydra_sched::Strategy::name) {
        let row = of(name);
        let fits = row["does_not_fit"].is_null();
        assert_eq!(fits, name != "task-parallel", "{row}");
        assert_eq!(fits, row["runtime_s"].is_f64() && row["energy_kwh"].is_f64(), "{row}");
        assert!(!row["assumptions"].as_str().unwrap().is_empty());
    }
    let faster = |name: &str| of(name)["sharp_is_faster_by"].as_f64().unwrap();
    assert_eq!(faster("sharp"), 1.0);
    assert!(faster("model-parallel") > 3.9 && faster("pipeline") > 1.5, "{result}");
    let policies = result["policies"].as_array().unwrap();
    for policy in hydra_sched::PolicyKind::ALL {
        let row = policies.iter().find(|row| row["policy"] == policy.name()).unwrap();
        assert!(row["over_bound"].as_f64().unwrap() >= 1.0 - 1e-9, "{row}");
    }
    let written: Value = serde_json::from_str(&read(&out.join("compare.json"))).unwrap();
    assert_eq!(written, result);
    for (file, part) in [
        ("runtime.svg", "model-parallel"),
        ("utilization.svg", "25.0%"),
        ("policies.svg", "round-robin"),
        ("schedule.svg", "device 3"),
    ] {
        let svg = read(&out.join(file));
        assert!(svg.starts_with("<svg") && svg.contains(part), "{part} in {file}");
    }
}

/// The minimum of bytes is Belady's if all cache entries of a workload have the same size, as in these.
#[test]
fn what_copies_save_is_compared_with_the_fewest_bytes() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().to_str().unwrap();
    let workload = |name: &str| format!("{}/runs/cached-copies/{name}.json", env!("CARGO_MANIFEST_DIR"));
    for (name, most) in [("accumulation", 1.0), ("evaluations", 1.05)] {
        let result = json_of(&["compare", "--json", "--workload", &workload(name), "--out", out]);
        let copies = result["copies"].as_array().unwrap();
        let names: Vec<&str> = copies.iter().map(|row| row["copies"].as_str().unwrap()).collect();
        assert_eq!(names, ["none", "least-recent", "next-use"]);
        let bytes = |row: usize| copies[row]["promoted_bytes"].as_u64().unwrap();
        assert!(bytes(0) > bytes(1) && bytes(1) > bytes(2), "{copies:?}");
        assert!(copies[2]["over_fewest"].as_f64().unwrap() <= most, "{copies:?}");
        assert!(read(&root.path().join("copies.svg")).contains("least-recent"));
        let told = says(&["simulate", "--workload", &workload(name), "--replacement", "least-recent"]);
        assert!(told.contains(&format!("{}, and", copies[1]["promotions"])), "{told}");
    }
    // Without caches there is nothing to compare, and the plot of an earlier workload is removed.
    let result = json_of(&["compare", "--json", "--workload", &kept("small"), "--out", out]);
    assert_eq!(result["copies"].as_array().unwrap().len(), 0);
    assert!(!root.path().join("copies.svg").exists());
}

#[test]
fn what_strategies_leave_out_is_said() {
    let varied = one_task(&format!(r#""minibatches": 3, "drift": 0.5, {SHARD}"#));
    let output = hydra(&["compare", "--workload", "-"]).write_stdin(varied).output().unwrap();
    assert!(text(&output.stdout).contains("The strategies ignore the workload's drift.\n"));
    assert!(!says(&["compare", "--workload", &kept("small")]).contains("leave out"));
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn workloads_come_from_standard_input_too() {
    let workload = one_task(&format!(r#""minibatches": 3, {SHARD}"#));
    let output = hydra(&["simulate", "--json", "--workload", "-"]).write_stdin(workload).output().unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["makespan_s"], 3.0 * 2.5);
    let output = hydra(&["compare", "--workload", "-"]).write_stdin("").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("the workload on standard input cannot be used"));
}

#[test]
fn workloads_that_cannot_be_used() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("workload.json");
    let file = path.to_str().unwrap();
    let two = format!(
        r#"{{"tasks": [{{"name": "a", "minibatches": 1, {SHARD}}}, {{"name": "a", "minibatches": 1, {SHARD}}}], "devices": 1}}"#
    );
    let shards = |costs: &str| one_task(&format!(r#""minibatches": 2, "shards": [{{{costs}}}]"#));
    let cases: Vec<(String, &[&str])> = vec![
        (r#"{"tasks": [], "devices": 2}"#.into(), &["has no task"]),
        (two, &["two tasks are called `a`"]),
        (one_task(&format!(r#""minibatches": 0, {SHARD}"#)), &["task `a` has no minibatch"]),
        (one_task(r#""minibatches": 1, "shards": []"#), &["task `a`", "at least one shard"]),
        (shards(r#""forward_s": -1, "backward_s": 1"#), &["forward_s of shard 0 of task `a` is -1"]),
        (shards(r#""forward_s": NaN, "backward_s": 1"#), &["not a workload", "line 1"]),
        (shards(r#""forward_s": null, "backward_s": 1"#), &["not a workload", "line 1"]),
        (shards(r#""forward_s": 1e999, "backward_s": 1"#), &["not a workload", "out of range"]),
        (shards(r#""forward_s": 1, "backward_s": 1e308"#), &["the time of all shard tasks is inf"]),
        (shards(r#""forward_s": 1, "backward_s": 1, "bytes": 9"#), &["no `link_bytes_per_s`"]),
        (shards(r#""forward": 1"#), &["unknown field `forward`"]),
        (shards(r#""forward_s": 1, "backward_s": 1"#).replace(": 1}", ": 0}"), &["has no device"]),
        ("".into(), &["not a workload", "EOF"]),
        ("tasks = []".into(), &["not a workload", "line 1 column 2"]),
        ("[]".into(), &["not a workload"]),
    ];
    for (workload, parts) in cases {
        fs::write(&path, &workload).unwrap();
        let parts = [&["workload.json` cannot be used"], parts].concat();
        for command in ["simulate", "compare"] {
            fails(&[command, "--workload", file], 1, &parts);
        }
    }
    fs::write(&path, [0xFF, 0xFE]).unwrap();
    fails(&["simulate", "--workload", file], 1, &["workload.json` could not be read", "UTF-8"]);
    fails(&["simulate", "--workload", root.path().to_str().unwrap()], 1, &["could not be read", "directory"]);
    let missing = root.path().join("missing.json");
    fails(&["compare", "--workload", missing.to_str().unwrap()], 1, &["missing.json", "No such file"]);
}

#[test]
fn flags_that_are_wrong_are_usage_errors() {
    let small = kept("small");
    for (flag, value, parts) in [
        ("--policy", "lifo", ["`lifo`", "sharded-lrtf, sharded-lrtf-eager, fifo"]),
        ("--devices", "0", ["`0`", "from 1 to 1000000"]),
        ("--devices", "-1", ["`-1`", "--devices"]),
        ("--devices", "1000001", ["`1000001`", "--devices"]),
        ("--devices", "cpu:2", ["`cpu:2`", "--devices"]),
        ("--seed", "x", ["`x`", "--seed"]),
        ("--replacement", "lru", ["`lru`", "next-use or least-recent"]),
    ] {
        fails(&["simulate", "--workload", &small, flag, value], 2, &parts);
    }
    fails(&["compare", "--workload", &small, "--idle-watts", "nan"], 2, &["`nan`", "--idle-watts"]);
    fails(&["simulate"], 2, &["--workload <FILE>"]);
    fails(&["compare", "--workload", &small, "--gantt", "x"], 2, &["--gantt"]);
}

#[test]
fn what_is_written_replaces_no_workload() {
    let root = tempfile::tempdir().unwrap();
    let workload = root.path().join("compare.json");
    let (file, dir) = (workload.to_str().unwrap(), root.path().to_str().unwrap());
    let json = fs::read(kept("small")).unwrap();
    fs::write(&workload, &json).unwrap();
    let gantt = format!("{dir}/../{}/compare.json", root.path().file_name().unwrap().to_str().unwrap());
    fails(
        &["simulate", "--workload", file, "--gantt", &gantt],
        2,
        &["--gantt `", "the file given by --workload"],
    );
    fails(&["compare", "--workload", file, "--out", dir], 2, &["--out `", "the file given by --workload"]);
    assert_eq!(fs::read(&workload).unwrap(), json);
}

#[test]
fn plots_that_cannot_be_written() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    let small = kept("small");
    // The results are printed anyway.
    let unwritten = |arguments: &[&str], told: &str, parts: &[&str]| {
        let output = hydra(&[arguments, &["--workload", &small]].concat()).output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {err}");
        assert!(out.contains(told) && err.starts_with("error: "), "{arguments:?}: {out}{err}");
        assert!(parts.iter().all(|part| err.contains(part)), "{arguments:?}: {parts:?} in {err}");
    };
    let gantt = |path: &str, parts: &[&str]| unwritten(&["simulate", "--gantt", path], "lower bound", parts);
    gantt(&at("no/such/dir.svg"), &["dir.svg` could not be written", "No such file"]);
    gantt(&at(""), &["could not be written", "directory"]);
    let compare = |path: &str, part: &str| unwritten(&["compare", "--out", path], "over the bound", &[part]);
    fs::write(at("file"), "").unwrap();
    compare(&at("file"), "file` could not be created");
    fs::create_dir_all(at("dir/runtime.svg")).unwrap();
    compare(&at("dir"), "runtime.svg` could not be written");
}

#[test]
fn what_is_too_large_for_a_plot_is_simulated_without() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let many = ["--workload", &kept("small"), "--devices", "300"];
    let gantt = root.path().join("gantt.svg");
    fails(
        &[&["simulate", "--gantt", gantt.to_str().unwrap()], &many[..]].concat(),
        1,
        &["--gantt cannot draw", "300 devices are too many"],
    );
    assert!(!gantt.exists());
    let compare = ["compare", "--out", out.to_str().unwrap()];
    // The plot of two devices must not remain next to the results of 300.
    says(&[&compare[..], &many[..2]].concat());
    assert!(out.join("schedule.svg").is_file());
    let output = hydra(&[&compare[..], &many[..]].concat()).output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stderr).starts_with("note: schedule.svg is not drawn: 300 devices"));
    assert!(out.join("runtime.svg").is_file() && !out.join("schedule.svg").exists());
    assert!(read(&out.join("compare.json")).contains("\"devices\": 300"));
}

/// The plot is refused before anything is simulated.
#[test]
fn a_workload_that_takes_long_is_announced() {
    let root = tempfile::tempdir().unwrap();
    let gantt = root.path().join("gantt.svg");
    let arguments = ["simulate", "--workload", "-", "--gantt", gantt.to_str().unwrap()];
    let told = |minibatches: u64| {
        let workload = one_task(&format!(r#""minibatches": {minibatches}, {SHARD}"#));
        let output = hydra(&arguments).write_stdin(workload).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    let (long, short) = (told(9_000_000_000), told(100_000_000));
    assert!(long.starts_with("note: 9000000000 shard tasks take"), "{long}");
    assert!(short.starts_with("error: --gantt cannot draw"), "{short}");
}

#[test]
fn drift_goes_down_to_nothing_and_not_below() {
    let shard = r#""shards": [{"forward_s": 1, "backward_s": 1, "promote_s": 0}]"#;
    let makespan = |drift: f64| {
        let rest = format!(
            r#""minibatches": 2, "drift": {drift}, "evaluations": [{{"after": 2, "microbatch_passes": 1}}], {shard}"#
        );
        let arguments = ["simulate", "--json", "--workload", "-"];
        let output = hydra(&arguments).write_stdin(one_task(&rest)).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["makespan_s"].as_f64().unwrap()
    };
    assert_eq!([-1.0, 0.0, 1.0].map(makespan), [1.0, 3.0, 1.0 + 2.0 + 2.0]);
}

#[test]
fn times_beyond_all_measure_are_short() {
    let root = tempfile::tempdir().unwrap();
    let (gantt, out) = (root.path().join("gantt.svg"), root.path().join("out"));
    let workload = one_task(r#""minibatches": 3, "shards": [{"forward_s": 1, "backward_s": 1e300}]"#);
    for (command, flag, path) in [("simulate", "--gantt", &gantt), ("compare", "--out", &out)] {
        let arguments = [command, "--workload", "-", flag, path.to_str().unwrap()];
        let output = hydra(&arguments).write_stdin(workload.clone()).output().unwrap();
        let told = text(&output.stdout);
        assert!(output.status.success() && told.contains("8.333e296 h"), "{told}");
        assert!(told.lines().all(|line| line.len() < 200), "{told}");
    }
    let drawn = read(&gantt) + &read(&out.join("runtime.svg"));
    assert!(drawn.contains("3.000e300 s") && drawn.lines().all(|line| line.len() < 300), "{drawn}");
}

/// `hydra simulate ... | head -0`: standard output is closed before anything is written, because the workload arrives
/// later.
#[test]
fn a_closed_standard_output_is_no_error() {
    for command in ["simulate", "compare"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_hydra"))
            .args([command, "--json", "--workload", "-"])
            .env_remove("HYDRA_LOG")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        child.stdin.take().unwrap().write_all(read(Path::new(&kept("small"))).as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{command}");
    }
}
