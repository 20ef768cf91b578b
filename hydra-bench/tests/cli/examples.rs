//! Instruction data: files with one JSON object a line.

use crate::common::{fails, hydra, json, notes, says, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Prompts of all lengths with short answers.
fn prompts(dir: &Path) -> PathBuf {
    let file = dir.join("chat.jsonl");
    let line = |i: usize| {
        let (prompt, answer) = ("why ".repeat(i % 5 + 1), "so ".repeat(i % 3 + 1));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{answer}\"}}\n")
    };
    fs::write(&file, (0..40).map(line).collect::<String>()).unwrap();
    file
}

fn trained(data: &Path, out: &Path, more: &str) -> Value {
    let (data, dir) = (data.to_str().unwrap(), out.to_str().unwrap());
    let base = ["select", "--batch", "8", "--lr", "1e-3", "--steps", "3", "--data", data, "--out", dir];
    says(&base.into_iter().chain(more.split_whitespace()).collect::<Vec<_>>());
    json(&out.join("report.json"))["tasks"][0].clone()
}

#[test]
fn completions_are_learned_and_spilled_training_has_the_bits_of_training_on_the_device() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let run = |name: &str, more: &str| trained(&data, &root.path().join(name), more);
    let one = run("one", "--devices cpu:1x1 --device-memory 256MiB");
    let spilled = run("spilled", "--devices cpu:2x1 --device-memory 64MiB --cuts 2,4 --accumulate 3");
    let rounded = run("rounded", "--devices cpu:1x1 --device-memory 256MiB --accumulate 3");
    assert_eq!(spilled["weights_sha256"], rounded["weights_sha256"]);
    assert_eq!(spilled["losses"], rounded["losses"]);
    let of_all = run("all", "--devices cpu:1x1 --device-memory 256MiB --loss-on all");
    assert_ne!((&one["losses"], &one["weights_sha256"]), (&of_all["losses"], &of_all["weights_sha256"]));
    let spec = fs::read_to_string(root.path().join("one/spec.toml")).unwrap();
    assert!(spec.contains("context = 30") && !spec.contains("loss_on"), "the longest example: {spec}");
    let spec = fs::read_to_string(root.path().join("all/spec.toml")).unwrap();
    assert!(spec.contains("loss_on = \"all\""), "{spec}");
}

#[test]
fn answers_and_their_ends_count() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let terms = |more: &[&str]| {
        let eval = ["eval", "--json", "--data", data.to_str().unwrap()];
        let result: Value = serde_json::from_str(&says(&[&eval[..], more].concat())).unwrap();
        result["predicted_tokens"].as_u64().unwrap()
    };
    let answers: usize = (36..40).map(|i| 3 * (i % 3 + 1) + 1).sum();
    let prompts: usize = (36..40).map(|i| 4 * (i % 5 + 1)).sum();
    assert_eq!(terms(&[]), answers as u64, "a byte each, of the last tenth");
    assert_eq!(terms(&["--loss-on", "all"]), (answers + prompts - 4) as u64, "nothing predicts a first byte");
}

#[test]
fn what_is_no_instruction_data_is_named_with_its_line() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("a.jsonl");
    let data = file.to_str().unwrap();
    for (lines, parts) in [
        ("{\"text\": \"a\"}\nnot json\n", &["a.jsonl", "line 2", "found no JSON"][..]),
        ("{\"answer\": \"a\"}\n", &["line 1", "\"prompt\"", "found an object with `answer`"]),
        (
            "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n",
            &["line 1", "no chat template", "chat_template.jinja"],
        ),
    ] {
        fs::write(&file, lines.repeat(9)).unwrap();
        fails(&["select", "--data", data, "--device-memory", "64MiB"], 1, parts);
    }
}

#[test]
fn examples_that_a_context_cuts_off_are_left_out_with_a_note() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let eval = ["eval", "--data", data.to_str().unwrap(), "--split", "train", "--context", "12"];
    let output = hydra(&eval).output().unwrap();
    let (out, err) = (text(&output.stdout), notes(&text(&output.stderr)));
    assert!(output.status.success() && out.contains("predicted of"), "{err}{out}");
    // Prompts of 12, 16 and 20 bytes leave no byte of their answers.
    assert!(err.contains("examples are left out") && err.contains("a context of 12"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
}
