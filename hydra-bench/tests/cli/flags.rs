//! Wrong command lines: the exit status, one clear message on standard error, nothing on standard output, no files left.

use crate::common::{fails, hydra, notes, says, text};
use std::fs;
use std::path::Path;

/// Flags that make a run of a second.
const SMALL: [&str; 8] = ["--steps", "1", "--batch", "2", "--context", "16", "--device-memory", "64MiB"];

#[test]
fn help_names_every_command_and_flag() {
    let output = hydra(&["--help"]).output().unwrap();
    assert!(output.status.success());
    let help = text(&output.stdout);
    for part in [
        "select",
        "train",
        "eval",
        "explain",
        "partition",
        "step",
        "doctor",
        "report",
        "three shards or more",
        "exit status",
    ] {
        assert!(help.contains(part), "{part} in {help}");
    }
    let help = text(&hydra(&["select", "--help"]).output().unwrap().stdout);
    for flag in [
        "--devices",
        "--device-memory",
        "--link",
        "--no-prefetch",
        "--no-cache",
        "--microbatch-group",
        "--replicas",
        "--cuts",
        "--policy",
        "--data",
        "--model",
        "--context",
        "--batch",
        "--accumulate",
        "--lr",
        "--epochs",
        "--steps",
        "--optimizer",
        "--weight-decay",
        "--no-decay-norms",
        "--clip",
        "--schedule",
        "--warmup",
        "--dropout",
        "--no-shuffle",
        "--seed",
        "--eval-every",
        "--patience",
        "--out",
        "--force",
        "--plan",
        "--json",
        "--dry-run",
        "--spec",
    ] {
        assert!(help.contains(flag), "{flag}");
    }
}

#[test]
fn values_that_cannot_be_read_are_usage_errors() {
    for (arguments, parts) in [
        (["--lr", "fast"], ["--lr", "`fast` is not a number"]),
        (["--lr", "nan"], ["--lr", "`nan`"]),
        (["--batch", "0"], ["--batch", "`0`"]),
        (["--batch", "100000000"], ["--batch", "`100000000`"]),
        (["--context", "0"], ["--context", "`0`"]),
        (["--replicas", "0"], ["--replicas", "`0`"]),
        (["--context", "100000000"], ["--context", "`100000000`"]),
        (["--devices", "cuda:0,0"], ["`cuda:0,0` names GPU 0 twice", "cuda:GPU,../L"]),
        (["--devices", "abacus"], ["`abacus` is not a device", "cpu:N"]),
        (["--device-memory", "lots"], ["`lots` is not a size", "64MiB"]),
        (["--policy", "lifo"], ["`lifo`", "srtf"]),
        (["--optimizer", "adam"], ["adamw", "sgd"]),
        (["--unknown", "1"], ["--unknown", "Usage"]),
    ] {
        fails(&arguments, 2, &parts);
    }
}

#[test]
fn flags_that_do_not_go_together_are_usage_errors() {
    fails(&["--context", "129"], 2, &["must be at most 128", "129"]);
    fails(&["--lr", "1e-3,0.001"], 2, &["given twice"]);
    fails(&["--batch", "4", "--accumulate", "5"], 2, &["accumulate"]);
    fails(&["--steps", "18446744073709551615"], 2, &["--steps", "to 4294967295"]);
    fails(
        &["train", "--steps", "4000000000", "--eval-every", "1000"],
        2,
        &["4000000 evaluations, expected at most 1000000", "pass a larger --eval-every"],
    );
    fails(
        &["partition", "--batch", "2", "--accumulate", "3"],
        2,
        &["--accumulate must be between 1 and --batch (2), got 3"],
    );
    fails(&["--spec", "spec.toml", "--lr", "1e-3"], 2, &["--spec", "--lr"]);
    fails(&["train", "--lr", "1e-3,1e-4"], 2, &["`1e-3,1e-4` is not a number"]);
    fails(&["--patience", "2"], 2, &["pass --eval-every N"]);
    fails(&["--precision", "tf32"], 2, &["--precision tf32 needs an NVIDIA GPU", "--devices cuda:0"]);
}

#[test]
fn data_that_is_missing_empty_or_no_text() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("blank.txt"), "\n \n").unwrap();
    fs::write(at("binary"), [0xFF, 0xFE, 0x00]).unwrap();
    fs::write(at("short.txt"), "a short text\n").unwrap();
    for (name, part) in [
        ("missing", "no such file or directory"),
        ("empty", "wiki.train.tokens"),
        ("blank.txt", "has no text"),
        ("binary", "is not UTF-8"),
        ("short.txt", "fewer than one block"),
    ] {
        fails(&["--data", &at(name)], 1, &[name, part]);
    }
}

/// A directory with a model of the preset `bytes-tiny`, written by a training of one step.
fn model_dir(root: &Path) -> std::path::PathBuf {
    let out = root.join("made");
    says(&[&["train", "--out", out.to_str().unwrap()][..], &SMALL[..]].concat());
    let models: Vec<_> = fs::read_dir(out.join("models")).unwrap().collect();
    models.into_iter().next().unwrap().unwrap().path()
}

#[test]
fn models_that_are_damaged_or_others() {
    let root = tempfile::tempdir().unwrap();
    let dir = model_dir(root.path());
    let path = dir.to_str().unwrap();
    let eval = ["eval", "--model", path, "--context", "16", "--device-memory", "64MiB"];
    says(&eval);
    let (config, weights) = (dir.join("config.json"), dir.join("model.safetensors"));
    let (good_config, good_weights) = (fs::read_to_string(&config).unwrap(), fs::read(&weights).unwrap());

    fs::write(&weights, &good_weights[..good_weights.len() / 2]).unwrap();
    fails(&eval, 1, &["model.safetensors", "damaged"]);
    fs::write(&weights, b"not at all").unwrap();
    fails(&eval, 1, &["model.safetensors"]);
    fs::remove_file(&weights).unwrap();
    fails(&eval, 1, &["has no weights"]);
    fs::write(&weights, &good_weights).unwrap();

    fs::write(&config, good_config.replace("\"gpt2\"", "\"mamba\"")).unwrap();
    fails(&eval, 1, &["mamba", "gpt2 or llama"]);
    fs::write(&config, good_config.replace("\"n_embd\": 64", "\"n_embd\": 32")).unwrap();
    fails(&eval, 1, &["has shape", "expected"]);
    fs::write(&config, "{").unwrap();
    fails(&eval, 1, &["config.json"]);
    fs::write(&config, &good_config).unwrap();
    says(&eval);

    let fewer = good_config.replace("\"n_layer\": 4", "\"n_layer\": 3");
    assert_ne!(fewer, good_config);
    fs::write(&config, fewer).unwrap();
    fails(&eval, 1, &["`n_layer` is 3, expected 4", "`transformer.h.3."]);
    fs::write(&config, &good_config).unwrap();

    let mut broken = good_weights.clone();
    let end = broken.len();
    broken[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, broken).unwrap();
    let output = hydra(&eval).output().unwrap();
    let err = text(&output.stderr);
    assert!(err.contains("is NaN: weights that are not finite") && !err.contains("learning rate"), "{err}");
    fails(&["eval", "--model", "gpt5"], 1, &["`gpt5` is not a model", "bytes-tiny"]);
}

#[test]
fn token_ids_that_the_model_has_not() {
    let root = tempfile::tempdir().unwrap();
    let dir = model_dir(root.path());
    // The directory gets another tokenizer, with an id beyond the model's 256.
    ["tokenizer.json", "tokenizer_config.json"]
        .iter()
        .for_each(|name| fs::remove_file(dir.join(name)).unwrap());
    let vocabulary: String =
        (0..26_u8).map(|i| format!("\"{}\": {},", (b'a' + i) as char, 900 + u32::from(i))).collect();
    fs::write(dir.join("vocab.json"), format!("{{{}\"Ġ\": 2, \"Ċ\": 3}}", vocabulary)).unwrap();
    fs::write(dir.join("merges.txt"), "#version: 0.2\n").unwrap();
    let text = root.path().join("text.txt");
    fs::write(&text, "some words on a line\n".repeat(100)).unwrap();
    let data = text.to_str().unwrap();
    fails(
        &["eval", "--model", dir.to_str().unwrap(), "--data", data, "--context", "16"],
        1,
        &["vocabulary has 256"],
    );
}

#[test]
fn several_devices_compute_one_model_as_far_as_it_is_asked() {
    let dry_run = |more: &str| {
        let base = "select --dry-run --batch 4 --accumulate 4 --lr 1e-3 --context 32 --devices cpu:3x1";
        says(&base.split_whitespace().chain(more.split_whitespace()).collect::<Vec<_>>())
    };
    for (more, most) in [("", 3), ("--replicas 2", 2), ("--replicas 9", 3)] {
        let said = dry_run(more);
        let expected = format!("replicas: up to {most} devices train one model of 1 of 1 tasks");
        assert!(said.contains(&expected), "{said}");
    }
    let said = dry_run("--replicas 1");
    assert!(!said.contains("devices train one model"), "{said}");
}

#[test]
fn a_budget_that_is_too_small_for_one_layer_is_refused_with_the_numbers() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run");
    let run =
        ["--devices", "cpu:1", "--device-memory", "64KiB", "--steps", "1", "--out", out.to_str().unwrap()];
    fails(&run, 1, &["64.00 KiB"]);
    assert!(!out.exists(), "a refused run leaves nothing");
    fails(&["partition", "--device-memory", "64KiB", "--batch", "2"], 1, &["64.00 KiB"]);
}

#[test]
fn cuts_by_hand_that_do_not_fit_are_refused() {
    for cuts in ["9", "3,1", "2,2"] {
        fails(&[&["--cuts", cuts, "--dry-run"][..], &SMALL[..]].concat(), 1, &["cut"]);
    }
    fails(&[&["--cuts", "0"][..], &SMALL[..]].concat(), 2, &["--cuts", "`0`"]);
}

#[test]
fn run_directories_that_cannot_be_used() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(at("full")).unwrap();
    fs::write(at("full") + "/something", "").unwrap();
    fails(&["--out", &at("full")], 1, &["is not empty", "--force"]);
    fs::write(at("file"), "").unwrap();
    fails(&["--out", &at("file")], 1, &["is a file"]);
    fails(&["--out", &(at("file") + "/below")], 1, &["could not be created"]);
    fails(&["--out", "/proc/hydra-run"], 1, &["/proc/hydra-run"]);
    for (name, part) in
        [("full", "is not empty"), ("file", "is a file"), ("file/below", "could not be created")]
    {
        fails(&[&["--dry-run", "--out", &at(name)][..], &SMALL[..]].concat(), 1, &[part]);
    }
    fails(&["--dry-run", "--out", "/proc/hydra-run"], 1, &["is not writable"]);
    assert_eq!(fs::read_dir(at("full")).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn a_run_directory_that_the_report_could_not_name_is_refused_before_anything_is_trained() {
    use std::os::unix::ffi::OsStrExt;
    let root = tempfile::tempdir().unwrap();
    let named = root.path().join(std::ffi::OsStr::from_bytes(b"\xff"));
    let at_it = hydra(&SMALL).arg("--out").arg(&named).output().unwrap();
    assert!(!named.exists());
    // The default run directories are in the current directory, which has such a name here.
    fs::create_dir(&named).unwrap();
    let below_it = hydra(&SMALL).current_dir(&named).output().unwrap();
    for output in [at_it, below_it] {
        let err = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()), "{err}");
        assert!(err.contains("is not valid UTF-8") && err.contains("--out"), "{err}");
    }
}

/// The README shows this command.
#[test]
fn batches_of_ones_own_are_not_held_to_the_memory_of_the_demo() {
    says(&["select", "--lr", "1e-3,3e-4", "--batch", "16,8", "--dry-run"]);
}

/// The first line on standard error after the run directory.
fn first_line(arguments: &[&str]) -> String {
    let output = hydra(arguments).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}");
    let mut lines = err.lines().filter(|line| !line.starts_with("run directory: "));
    lines.next().unwrap_or_default().to_owned()
}

#[test]
fn the_first_line_says_what_weights_and_tokenizer_are() {
    let root = tempfile::tempdir().unwrap();
    let random = "note: weights: random (seed 0); tokenizer: bytes; for pretrained weights pass a Hugging Face directory as --model";
    let out = root.path().join("made");
    let made = [&["train", "--json", "--out", out.to_str().unwrap()][..], &SMALL[..]].concat();
    assert_eq!(first_line(&made), random);
    assert_eq!(first_line(&[&["--dry-run", "--lr", "1e-3"][..], &SMALL[..]].concat()), random);
    assert_eq!(first_line(&[&["explain"][..], &SMALL[..]].concat()), random);
    let seeds = first_line(&[&["--dry-run", "--lr", "1e-3", "--seed", "3,4"][..], &SMALL[..]].concat());
    assert!(seeds.starts_with("note: weights: random (seeds 3, 4); "), "{seeds}");
    let eval = ["eval", "--context", "16", "--device-memory", "64MiB", "--json"];
    assert_eq!(first_line(&eval), random);
    let model = fs::read_dir(out.join("models")).unwrap().next().unwrap().unwrap().path();
    let read = first_line(&[&eval[..], &["--model", model.to_str().unwrap()]].concat());
    assert!(
        read.starts_with(&format!("note: weights: {}/model.safetensors; tokenizer: ", model.display())),
        "{read}"
    );
    assert!(!read.contains("random") && !read.contains("for pretrained weights"), "{read}");
    fs::remove_dir_all(out.join("checkpoints")).unwrap();
    fs::remove_file(out.join("report.json")).unwrap();
    let resumed = first_line(&["resume", out.to_str().unwrap()]);
    assert!(resumed.starts_with("note: weights at the start: random (seed 0); "), "{resumed}");
}

/// The tasks of a dry run, and its standard error.
fn planned(arguments: &str) -> (Vec<String>, String) {
    let more = "--dry-run --json --context 16 --device-memory 64MiB --devices cpu:1x1";
    let words: Vec<&str> = arguments.split_whitespace().chain(more.split_whitespace()).collect();
    let output = hydra(&words).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{arguments}: {err}");
    let needs: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names =
        needs["tasks"].as_array().unwrap().iter().map(|task| task["name"].as_str().unwrap().to_owned());
    (names.collect(), err)
}

#[test]
fn nothing_multiplies_that_nobody_has_listed() {
    let (tasks, err) = planned("select --model bytes-tiny");
    assert_eq!(tasks, ["b8-lr3e-4"]);
    assert!(
        err.contains(
            "note: by default --batch 8 and --lr 3e-4; pass a list such as --lr 1e-3,3e-4 to compare"
        ),
        "{err}"
    );
    let (tasks, err) = planned("select --model bytes-tiny --lr 1e-3,1e-4");
    assert_eq!(tasks.len(), 2);
    assert!(err.contains("note: by default --batch 8; ") && !err.contains("--lr 3e-4"), "{err}");
    let (tasks, err) = planned("select --model bytes-tiny --weight-decay 0.1 --batch 4 --lr 1e-3");
    assert_eq!(tasks.len(), 1);
    assert!(!err.contains("by default"), "{err}");
    // No flag selects what to train: this is the demo on another device.
    let demo = says(&["--dry-run", "--json", "--steps", "3", "--devices", "cpu:1x1"]);
    let demo: serde_json::Value = serde_json::from_str(&demo).unwrap();
    assert_eq!(demo["tasks"].as_array().unwrap().len(), 12);
}

#[test]
fn lists_of_any_setting_need_no_steps() {
    for (lists, count) in [
        ("--optimizer adamw,adamw8bit,sgd,lion --weight-decay 0,0.1", 8),
        ("--epochs 1,2", 2),
        ("--seed 0,1 --schedule linear,cosine --warmup 0.1", 4),
        ("--dropout 0,0.1 --accumulate 1,2", 4),
        ("--lora 2 --lora-alpha 8,16", 2),
    ] {
        let length = if lists.contains("--epochs") { "" } else { "--epochs 1" };
        let (mut tasks, _) =
            planned(&format!("select --model bytes-tiny --batch 4 --lr 1e-3 {lists} {length}"));
        assert_eq!(tasks.len(), count, "{lists}");
        tasks.sort_unstable();
        tasks.dedup();
        assert_eq!(tasks.len(), count, "{tasks:?}");
    }
    fails(&["--steps", "3", "--epochs", "1,2"], 2, &["a list of --epochs excludes --steps"]);
    fails(&["--lora-alpha", "8,16"], 2, &["add --lora"]);
    fails(&["--lr", "1e-3,3e-4", "--trials", "2"], 2, &["--trials applies to a search", "add --search"]);
    fails(&["--optimizer", "adamw,adan"], 2, &["unknown value `adan`"]);
}

#[test]
fn flags_of_other_programs_and_other_slips_are_told_what_to_write() {
    let foreign =
        "train --per-device-train-batch-size 4 --gradient-accumulation-steps 4 --learning-rate 2e-5";
    let foreign: Vec<&str> = foreign.split(' ').collect();
    fails(
        &foreign,
        2,
        &["write --batch 16 --accumulate 4", "corrected: hydra train --batch 16 --accumulate 4 --lr 2e-5"],
    );
    fails(&["--lr", "1e-3", "1e-4"], 2, &["--lr are separated by commas: write --lr 1e-3,1e-4"]);
    fails(&["--device-memory", "4"], 2, &["`4` has no unit: write 4GB or 4GiB"]);
    fails(&["train", "--warmup", "1.5"], 2, &["`1.5` is not a warmup", "such as 0.1"]);
    let gigabytes = says(
        &[
            &["train", "--dry-run", "--warmup", "0.1", "--device-memory", "4G", "--steps", "20"][..],
            &SMALL[2..6],
        ]
        .concat(),
    );
    assert!(gigabytes.contains("3.73 GiB"), "{gigabytes}");
}

/// The lines on standard error about renamed flags.
fn renamed(arguments: &[&str]) -> (Option<i32>, Vec<String>) {
    let output = hydra(arguments).output().unwrap();
    let err = text(&output.stderr);
    let is_note = |line: &&str| line.starts_with("note: --") && line.contains(" is now ");
    (output.status.code(), err.lines().filter(is_note).map(str::to_owned).collect())
}

#[test]
fn old_spellings_of_flags_work_with_a_note() {
    let note = |old: &str, new: &str| format!("note: {old} is now {new}; the old spelling goes away in 0.3");
    let old = "--accumulate 2 --visit 2 --devices-per-model=1 --room-for-forks --dry-run";
    let old: Vec<&str> = old.split(' ').chain(SMALL).collect();
    let expected = [
        note("--visit", "--microbatch-group"),
        note("--devices-per-model", "--replicas"),
        note("--room-for-forks", "--reserve-for-forks"),
    ];
    assert_eq!(renamed(&[&["train"], &old[..]].concat()), (Some(0), expected.to_vec()));
    assert_eq!(renamed(&[&["--lr", "1e-3"], &old[..]].concat()).1, expected);
    let refused = hydra(&["train", "--visit=2"]).output().unwrap();
    let err = text(&refused.stderr);
    assert!(
        err.ends_with("error: --microbatch-group must be between 1 and --accumulate (1), got 2\n"),
        "{err}"
    );
    let report = ["report", "no-such-directory", "--pictures"];
    assert_eq!(renamed(&report), (Some(1), vec![note("--pictures", "--plots")]));
    let help = says(&["train", "--help"]);
    assert!(!help.contains("--visit") && !help.contains("--room-for-forks"), "{help}");
    fails(&["report", "no-such-directory", "--visit", "2"], 2, &["unexpected argument '--visit'"]);
}

/// Every file below a directory, with its bytes.
fn files(dir: &Path) -> std::collections::BTreeMap<std::path::PathBuf, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: std::path::PathBuf| match path.is_dir() {
        true => files(&path),
        false => [(path.clone(), fs::read(&path).unwrap())].into(),
    };
    entries.flat_map(below).collect()
}

#[test]
fn a_forced_run_that_fails_leaves_the_old_one() {
    let root = tempfile::tempdir().unwrap();
    let model = model_dir(root.path());
    let (out, model) = (root.path().join("made"), model.to_str().unwrap());
    let before = files(&out);
    let forced = |more: &[&str], status, parts: &[&str]| {
        fails(&[&["train", "--force", "--out", out.to_str().unwrap()][..], more].concat(), status, parts);
        assert!(files(&out) == before, "{more:?} changed the directory");
    };
    let plans = out.join("plans");
    forced(&["--model", model], 2, &["--model", "is inside the run directory"]);
    forced(&["--plan", plans.to_str().unwrap()], 2, &["--plan", "is inside the run directory"]);
    forced(
        &["--data", out.join("spec.toml").to_str().unwrap()],
        2,
        &["--data", "is inside the run directory"],
    );
    forced(&["--model", "gpt5"], 1, &["`gpt5` is not a model"]);
    forced(&["--data", "no-such-text"], 1, &["no such file or directory"]);
    forced(&["--plan", "no-such-plan"], 1, &["no-such-plan"]);
    forced(&["--context", "129"], 2, &["must be at most 128"]);
    forced(&["--device-memory", "64KiB"], 1, &["64.00 KiB"]);
    says(&[&["train", "--force", "--dry-run", "--out", out.to_str().unwrap()][..], &SMALL[..]].concat());
    assert!(files(&out) == before, "a dry run changed the directory");
}

#[test]
fn cuts_that_contradict_a_plan_win_and_it_is_noted() {
    let root = tempfile::tempdir().unwrap();
    let plan = root.path().join("plan.json");
    let small = ["--batch", "2", "--context", "16", "--device-memory", "64MiB", "--cuts"];
    let partition = |more: &[&str]| hydra(&[&["partition"], &small[..], more].concat()).output().unwrap();
    assert!(partition(&["2", "--out", plan.to_str().unwrap()]).status.success());
    let err = text(&partition(&["2", "--plan", plan.to_str().unwrap()]).stderr);
    assert_eq!(err, "", "the plan has these cuts");
    let output = partition(&["3", "--json", "--plan", plan.to_str().unwrap()]);
    let err = text(&output.stderr);
    assert!(err.starts_with("note: --cuts 3 takes precedence") && err.contains("plan.json"), "{err}");
    assert!(text(&output.stdout).contains("\"cut_points\": [\n    3\n  ]"));
}

#[test]
fn a_batch_beyond_the_text_is_noted() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("text.txt");
    fs::write(&data, "some words on a line\n".repeat(10)).unwrap();
    let out = root.path().join("run");
    let arguments = ["train", "--dry-run", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let more = ["--batch", "64", "--steps", "1", "--context", "16", "--device-memory", "64MiB"];
    let output = hydra(&[&arguments[..], &more[..]].concat()).output().unwrap();
    let err = notes(&text(&output.stderr));
    assert!(output.status.success(), "{err}");
    assert!(err.starts_with("note: the batch size 64 exceeds") && err.lines().count() == 1, "{err}");
}

/// Standard error of a short dry run that succeeds.
fn noted(more: &[&str]) -> String {
    let base = ["train", "--dry-run", "--batch", "4", "--context", "16", "--devices", "cpu:1x1"];
    let output = hydra(&[&base[..], more].concat()).output().unwrap();
    let err = notes(&text(&output.stderr));
    assert!(output.status.success() && err.lines().count() <= 1, "{err}");
    err
}

#[test]
fn what_trains_otherwise_than_it_seems_is_noted() {
    let small = ["--device-memory", "64MiB"];
    let with = |more: &[&str]| noted(&[&small[..], more].concat());
    let warmup = with(&["--warmup", "100", "--steps", "3"]);
    assert!(warmup.contains("--warmup 100 ") && warmup.contains("after 3 minibatches"), "{warmup}");
    assert_eq!(with(&["--warmup", "2", "--steps", "3"]), "");
    let host = with(&["--steps", "3", "--host-memory", "1000TiB"]);
    assert!(host.starts_with("note: --host-memory 1024000.00 GiB is more than the "), "{host}");
    let device = noted(&["--steps", "3", "--device-memory", "1000TiB"]);
    assert!(device.starts_with("note: --device-memory 1024000.00 GiB is more than the "), "{device}");

    let root = tempfile::tempdir().unwrap();
    let data = |name: &str, line: &str| {
        let file = root.path().join(name);
        fs::write(&file, line.repeat(60)).unwrap();
        with(&["--steps", "3", "--data", file.to_str().unwrap()])
    };
    let lines = data("a.data", "{\"id\": 7, \"text\": \"some words\"}\n");
    assert!(lines.contains("is read as plain text") && lines.contains("the fields `text`, `id`"), "{lines}");
    let unused = data("a.jsonl", "{\"id\": 7, \"text\": \"some words\"}\n");
    assert!(unused.contains("unused fields of `") && unused.contains("`id` (60 rows)"), "{unused}");
    assert_eq!(data("a.txt", "some words, and more of them\n"), "");
}

#[test]
fn layers_that_no_model_has_are_refused() {
    fails(&["select", "--train", "h.9"], 2, &["--train", "`h.9`", "`head`"]);
    fails(&["select", "--train", "last:9"], 2, &["--train last:9", "from 1 to 4"]);
    fails(&["select", "--train", ""], 2, &["--train"]);
}

#[test]
fn reports_that_cannot_be_shown() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).to_str().unwrap().to_owned();
    fails(&["report", &at("nowhere")], 1, &["no such directory"]);
    fails(&["report", &at("")], 1, &["is not a run directory"]);
    fs::write(at("report.json"), "{\"schema\": 1").unwrap();
    fails(&["report", &at("")], 1, &["not valid JSON"]);
    fs::write(at("report.json"), "{\"schema\": 77}").unwrap();
    fails(&["report", &at("")], 1, &["schema 77"]);
}

#[test]
fn specs_that_cannot_be_run() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("spec.toml");
    fails(&["--spec", file.to_str().unwrap()], 1, &["could not be read"]);
    fs::write(&file, "lr = 3").unwrap();
    fails(&["--spec", file.to_str().unwrap()], 1, &["is not a spec"]);
}
