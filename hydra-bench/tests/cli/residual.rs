//! A residual network with running statistics on images: the same bits whole, cut, on two devices, killed and resumed; evaluated
//! from its written files.

use crate::common::{assert_evaluates_as_tested, fails, hydra, json, results, says, spawn, text, wait_for};
use crate::convolutions::STRIPES;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use tempfile::TempDir;

const TRAIN: &str = "train --model resnet-mini --batch 8 --accumulate 2 --lr 3e-3";

fn arguments(settings: &str, out: &Path) -> Vec<String> {
    let run = format!("{TRAIN} {settings} --data {} --out {}", STRIPES.1, out.display());
    run.split_whitespace().map(str::to_owned).collect()
}

/// The task of a run.
fn run(settings: &str, out: &Path) -> Value {
    says(&arguments(settings, out).iter().map(String::as_str).collect::<Vec<_>>());
    json(&out.join("report.json"))["tasks"][0].clone()
}

#[test]
fn its_bits_depend_neither_on_cuts_nor_on_devices_nor_on_a_kill() {
    let root = TempDir::new().unwrap();
    let long = "--steps 12 --eval-every 4";
    let whole = run(&format!("{long} --devices cpu:1x2 --device-memory 256MiB"), &root.path().join("whole"));
    assert_eq!(whole["shards"], 1);
    let cut = format!("{long} --devices cpu:2x1 --device-memory 64MiB --cuts 1,2,4,6");
    let killed = root.path().join("killed");
    let slow = arguments(&format!("{cut} --checkpoint-every 2 --link 8MiB/s"), &killed);
    let mut child = spawn(&slow.iter().map(String::as_str).collect::<Vec<_>>(), Stdio::piped());
    let events = || fs::read_to_string(killed.join("metrics.jsonl")).unwrap_or_default();
    wait_for(|| events().matches("\"checkpoint\"").count() >= 2);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(events().matches("\"minibatch\"").count() < 12, "the run was killed before its end");
    let output = hydra(&["resume", killed.to_str().unwrap(), "--link", "8GiB/s"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let gone_on = json(&killed.join("report.json"))["tasks"][0].clone();
    assert_eq!((gone_on["shards"].as_u64(), results(&gone_on)), (Some(5), results(&whole)));
}

#[test]
fn what_it_learned_is_written_with_its_statistics_and_evaluated() {
    let root = TempDir::new().unwrap();
    let task = run("--steps 36 --devices cpu:1x2", &root.path().join("run"));
    let accuracy = task["test"]["metrics"]["accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.8, "{accuracy}");
    let model = task["model_dir"].as_str().unwrap();
    let file = |name: &str| json(&Path::new(model).join(name));
    assert_eq!(file("config.json")["architectures"][0], "ResNetForImageClassification");
    assert_eq!(file("preprocessor_config.json")["size"]["width"], 32);
    let bytes = fs::read(Path::new(model).join("model.safetensors")).unwrap();
    // A safetensors file: the length of its header, the header, and the values.
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let count = &header["resnet.embedder.embedder.normalization.num_batches_tracked"];
    let at = start + count["data_offsets"][0].as_u64().unwrap() as usize;
    assert_eq!(
        (&count["dtype"], &bytes[at..at + 8]),
        (&"I64".into(), &72u64.to_le_bytes()[..]),
        "two microbatches each"
    );
    assert_evaluates_as_tested(model, &STRIPES.1, &task);
}

#[test]
fn what_it_has_no_use_for_is_refused() {
    let with = |more: &str| {
        let root = TempDir::new().unwrap();
        let arguments = arguments(&format!("--steps 1 {more}"), &root.path().join("run"));
        let output = hydra(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
        assert!(!output.status.success());
        text(&output.stderr).to_string()
    };
    assert!(with("--lora 4").contains("resnet"), "{}", with("--lora 4"));
    let dropout = with("--dropout 0.1");
    assert!(dropout.contains("`dropout` is 0.1, expected 0, because a ResNet has no dropout"), "{dropout}");
    fails(&["train", "--model", "resnet-mini", "--steps", "1"], 2, &["`resnet-mini` reads images"]);
}
