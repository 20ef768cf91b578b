//! The models that a run writes: the best ones, their type and their disk space.

use crate::common::{fails, grid, hydra, json, notes, says, spawn, text, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;

/// Four tasks with different losses, not in the order of their names. The best two models are kept.
const RATES: &str = "--lr 1e-5,1e-3,1e-4,3e-3 --steps 6 --eval-limit 4 --keep-best 2";

fn run(dir: &Path) -> Vec<String> {
    let line = format!("select --batch 4 --context 32 --device-memory 64MiB {RATES} --out {}", dir.display());
    line.split_whitespace().map(str::to_owned).collect()
}

fn models(dir: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(dir.join("models")).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

/// Returns the best two tasks by validation loss, and whether the report names a model for each task.
fn best(dir: &Path) -> (BTreeSet<String>, Vec<(String, bool)>) {
    let report = json(&dir.join("report.json"));
    let tasks = report["tasks"].as_array().unwrap();
    let name = |task: &Value| task["name"].as_str().unwrap().to_owned();
    let mut by_loss: Vec<(f64, String)> =
        tasks.iter().map(|task| (task["validation"]["loss"].as_f64().unwrap(), name(task))).collect();
    by_loss.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let named = tasks.iter().map(|task| (name(task), task["model_dir"].is_string())).collect();
    (by_loss.into_iter().take(2).map(|(_, name)| name).collect(), named)
}

fn check_best(dir: &Path) {
    let (best, named) = best(dir);
    assert_eq!(models(dir), best);
    for (name, has_model) in named {
        assert_eq!(has_model, best.contains(&name), "{name}");
    }
}

#[test]
fn the_best_models_alone_are_kept_also_of_a_run_that_was_killed() {
    let root = tempfile::tempdir().unwrap();
    let (whole, killed) = (root.path().join("whole"), root.path().join("killed"));
    let arguments = |dir: &Path| run(dir);
    says(&arguments(&whole).iter().map(String::as_str).collect::<Vec<_>>());
    check_best(&whole);
    assert_eq!(fs::read_dir(whole.join("checkpoints")).unwrap().count(), 4, "checkpoints stay");
    let resumed = hydra(&["resume", whole.to_str().unwrap()]).output().unwrap();
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    assert!(text(&resumed.stderr).contains("nothing is left to do"), "{}", text(&resumed.stderr));

    // Killed with a model written, and another one that the run would have removed.
    let slow = ["--concurrent", "1", "--link", "20MiB/s"].map(str::to_owned);
    let arguments = [&run(&killed)[..], &slow].concat();
    let mut child = spawn(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), Stdio::null());
    let written = || fs::read_dir(killed.join("models")).is_ok_and(|models| models.count() > 0);
    wait_for(written);
    child.kill().unwrap();
    child.wait().unwrap();
    fs::write(killed.join("models/mine.txt"), "not the run's").unwrap();
    let resumed = hydra(&["resume", killed.to_str().unwrap()]).output().unwrap();
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    assert_eq!(fs::read_to_string(killed.join("models/mine.txt")).unwrap(), "not the run's");
    fs::remove_file(killed.join("models/mine.txt")).unwrap();
    check_best(&killed);
    assert_eq!(best(&whole), best(&killed));
    fails(&["train", "--keep-best", "0"], 2, &["--keep-best"]);
}

/// Returns the types of the weights in a file, and `dtype` of its configuration.
fn types(model: &Path, weights: &str) -> (BTreeSet<String>, Value) {
    let bytes = fs::read(model.join(weights)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let types = header.as_object().unwrap().values().filter_map(|tensor| tensor["dtype"].as_str());
    let types = types.map(str::to_owned).collect();
    let config = fs::read(model.join("config.json")).ok().map(|text| serde_json::from_slice(&text).unwrap());
    (types, config.map_or(Value::Null, |config: Value| config["dtype"].clone()))
}

#[test]
fn models_have_the_type_of_their_base_or_the_one_that_is_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let train = |name: &str, more: &[&str]| {
        let out = root.path().join(name);
        let base = ["train", "--batch", "2", "--context", "16", "--steps", "1", "--eval-limit", "1"];
        let output = hydra(&[&base, more, &["--out", out.to_str().unwrap()]].concat()).output().unwrap();
        let err = text(&output.stderr);
        assert!(output.status.success(), "{err}");
        (out.join("models").read_dir().unwrap().next().unwrap().unwrap().path(), notes(&err))
    };
    let one = |name: &str| BTreeSet::from([name.to_owned()]);
    let weights = "model.safetensors";
    let (plain, said) = train("plain", &[]);
    assert_eq!((types(&plain, weights), said.as_str()), ((one("F32"), "float32".into()), ""));
    let (half, said) = train("bf16", &["--save-dtype", "bf16"]);
    assert_eq!(types(&half, weights), (one("BF16"), "bfloat16".into()));
    assert!(said.contains("note: models are written in bf16, as --save-dtype requests"), "{said}");
    let base = half.to_str().unwrap();
    let (same, said) = train("same", &["--model", base]);
    assert_eq!(types(&same, weights), (one("BF16"), "bfloat16".into()));
    assert!(said.contains("written in bf16, as the files of") && said.contains("--save-dtype f32"), "{said}");
    let (wide, said) = train("wide", &["--model", base, "--save-dtype", "f32"]);
    assert_eq!((types(&wide, weights), said.as_str()), ((one("F32"), "float32".into()), ""));
    let (adapter, said) = train("adapter", &["--model", base, "--lora", "2"]);
    assert_eq!((types(&adapter, "adapter_model.safetensors").0, said.as_str()), (one("F32"), ""));
    let (adapter, _) = train("f16", &["--model", base, "--lora", "2", "--save-dtype", "f16"]);
    assert_eq!(types(&adapter, "adapter_model.safetensors").0, one("F16"));
    let (merged, _) = train("merged", &["--model", base, "--lora", "2", "--merge"]);
    assert_eq!(types(&merged, weights), (one("BF16"), "bfloat16".into()));
    // The written model is read again.
    says(&["eval", "--model", base, "--data", "builtin", "--context", "16", "--device-memory", "64MiB"]);
    fails(&["train", "--save-dtype", "f64"], 2, &["--save-dtype", "f32, bf16, f16"]);
}

#[test]
fn a_dry_run_says_how_much_is_written() {
    let small = |more: &'static str| -> Vec<&str> {
        let planned = grid("--model bytes-tiny --steps 2 --eval-limit 2 --dry-run");
        planned.into_iter().chain(more.split_whitespace()).collect()
    };
    let all = says(&small(""));
    assert!(
        all.contains("run directory: up to ")
            && all.contains(" of checkpoints, removed when their tasks end"),
        "{all}"
    );
    let bytes = |more| {
        let json: Value = serde_json::from_str(&says(&small(more))).unwrap();
        json["files"].clone()
    };
    let (all, half) = (bytes("--json"), bytes("--json --save-dtype f32"));
    assert_eq!(all, half);
    let parameters = |files: &Value| files["model_bytes"].as_u64().unwrap();
    assert!(parameters(&all) > 0 && all["checkpoint_bytes"].as_u64().unwrap() > parameters(&all));
    let never = bytes("--json --checkpoint-every never");
    assert_eq!((never["checkpoint_bytes"].as_u64(), &never["model_bytes"]), (Some(0), &all["model_bytes"]));
    let many = "select --batch 4 --lr 1e-3,3e-4,1e-4,3e-5 --context 32 --devices cpu:2x1 --device-memory 64MiB --model bytes-tiny \
                --steps 2 --dry-run --json --keep-best 1";
    let many: Value = serde_json::from_str(&says(&many.split_whitespace().collect::<Vec<_>>())).unwrap();
    assert_eq!(
        2 * parameters(&many["files"]),
        3 * parameters(&all),
        "one that is kept, and two on their way"
    );
}
