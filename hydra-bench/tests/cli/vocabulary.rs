//! Vocabulary tables cut into layers.

use crate::common::{fails, json, says};
use serde_json::Value;
use std::path::Path;

const RUN: &str =
    "--vocabulary-parts 4 --steps 3 --batch 4 --accumulate 2 --context 16 --lr 1e-3 --eval-limit 2 --json";

/// Runs, and returns the report.
fn run(out: &Path, model: &str, more: &str) -> Value {
    let mut arguments = vec!["train", "--model", model];
    arguments.extend(RUN.split_whitespace().chain(more.split_whitespace()));
    arguments.extend(["--out", out.to_str().unwrap()]);
    says(&arguments);
    json(&out.join("report.json"))
}

#[test]
fn its_bits_depend_neither_on_cuts_nor_on_devices() {
    let root = tempfile::tempdir().unwrap();
    let cases = [
        ("bytes-llama-tiny", ""),
        ("bytes-llama-tiny", "--lora 2"),
        ("bytes-tiny", ""),
        ("bytes-tiny", "--lora 2"),
    ];
    for (model, adapted) in cases {
        let hash = |name: &str, more: &str| {
            let report = run(
                &root.path().join(format!("{name}-{model}{adapted}")),
                model,
                &format!("{more} {adapted}"),
            );
            report["tasks"][0]["weights_sha256"].as_str().unwrap().to_owned()
        };
        let whole = hash("whole", "--devices cpu:1x1 --force");
        // Embedding, blocks and head have four layers each.
        assert_eq!(
            hash("each", "--devices cpu:2x1 --cuts 1,2,3,4,5,6,7,8,9,10,11 --link 1GiB/s --force"),
            whole
        );
        assert_eq!(hash("some", "--devices cpu:1x2 --cuts 2,5,9,11 --microbatch-group 2 --force"), whole);
    }
}

#[test]
fn boundaries_between_parts_are_reserved_until_they_are_downloaded() {
    let root = tempfile::tempdir().unwrap();
    for (name, cuts) in [("embedding", "1,2,3,4,5,6,7,8,12"), ("head", "8,12,13,14,15,16,17,18,19")] {
        let out = root.path().join(name);
        let arguments = format!(
            "train --model bytes-llama-tiny --vocabulary-parts 8 --steps 2 --batch 8 --context 128 --lora 4 --eval-limit 1 --cuts {cuts} \
             --devices cpu:1x1 --device-memory 32MiB --link 1GiB/s --out {}",
            out.display()
        );
        says(&arguments.split_whitespace().collect::<Vec<_>>());
        let report = json(&out.join("report.json"));
        let unreserved = report["devices"][0]["unreserved_bytes"].as_u64().unwrap();
        // A boundary has 262,144.
        assert!(unreserved < 16_384, "{name}: {unreserved}");
    }
}

#[test]
fn what_is_written_is_whole() {
    for model in ["bytes-llama-tiny", "bytes-tiny"] {
        check_written(model);
    }
}

fn check_written(model: &str) {
    let root = tempfile::tempdir().unwrap();
    let report = run(&root.path().join("run"), model, "--devices cpu:1x1");
    let model = report["tasks"][0]["model_dir"].as_str().unwrap().to_owned();
    let loss = |more: &str| {
        let mut arguments =
            vec!["eval", "--model", &model, "--context", "16", "--devices", "cpu:1x1", "--json"];
        arguments.extend(more.split_whitespace());
        let said: Value = serde_json::from_str(&says(&arguments)).unwrap();
        said["loss"].as_f64().unwrap()
    };
    let (whole, cut) = (loss(""), loss("--vocabulary-parts 3"));
    assert!((whole - cut).abs() < 1e-5 * whole, "{cut} for {whole}");
    let adapted = run(&root.path().join("adapted"), &model, "--lora 2 --merge --devices cpu:1x1");
    assert_eq!(adapted["tasks"][0]["state"], "done");
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let one = ["train", "--steps", "1", "--vocabulary-parts"];
    let with = |more: &[&'static str]| [&one[..], more].concat();
    fails(&with(&["0"]), 2, &["--vocabulary-parts"]);
    fails(&with(&["2", "--model", "vit-tiny"]), 1, &["vocabulary_parts", "only language models have tables"]);
    let model = ["257", "--model", "bytes-llama-tiny"];
    fails(&with(&model), 1, &["vocabulary_parts", "257", "between 1 and the model's 256 tokens"]);
}
