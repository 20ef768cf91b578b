//! Instruction data: files with one JSON object per line.

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

/// Runs the program, and returns its output and the note on the fill of packed rows.
fn packed(arguments: &[&str]) -> (String, String) {
    let output = hydra(arguments).output().unwrap();
    let (out, err) = (text(&output.stdout), notes(&text(&output.stderr)));
    assert!(output.status.success(), "{arguments:?}: {err}{out}");
    (out, err)
}

/// A packed run's task.
fn trained_in_rows(data: &Path, out: &Path, more: &str) -> Value {
    let (data, dir) = (data.to_str().unwrap(), out.to_str().unwrap());
    let base = "select --batch 4 --lr 1e-3 --steps 3 --pack --context 64".split_whitespace();
    let base = base.chain(["--data", data, "--out", dir]).chain(more.split_whitespace());
    let (_, note) = packed(&base.collect::<Vec<_>>());
    assert_eq!(note, "note: 40 examples packed into 14 rows of 64 tokens, 84% full\n");
    json(&out.join("report.json"))["tasks"][0].clone()
}

#[test]
fn packed_examples_are_learned_and_spilled_training_has_the_bits_of_training_on_the_device() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    for (name, model) in [
        ("gpt2", "bytes-tiny"),
        ("llama", "bytes-llama-tiny"),
        ("lora", "bytes-llama-tiny --lora 2 --lora-dropout 0.1"),
    ] {
        let run = |way: &str, more: &str| {
            let more = format!("--model {model} --dropout 0.1 {more}");
            trained_in_rows(&data, &root.path().join(format!("{name}-{way}")), &more)
        };
        let whole = run("whole", "--devices cpu:1x1 --device-memory 256MiB --accumulate 2 --eval-every 2");
        let spilled = run(
            "spilled",
            "--devices cpu:2x1 --device-memory 64MiB --cuts 1,3,4 --accumulate 2 --eval-every 2",
        );
        for kept in ["weights_sha256", "losses", "validation", "test", "evaluations"] {
            assert_eq!(spilled[kept], whole[kept], "{name}: {kept}");
        }
        assert_eq!(whole["config"]["pack"], true);
        let spec = fs::read_to_string(root.path().join(format!("{name}-whole/spec.toml"))).unwrap();
        assert!(spec.contains("pack = true") && spec.contains("context = 64"), "{spec}");
    }
}

#[test]
fn packed_examples_have_the_loss_that_they_have_alone() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let eval = ["eval", "--json", "--split", "train", "--batch", "32", "--data", data.to_str().unwrap()];
    let result = |out: &str| serde_json::from_str::<Value>(out).unwrap();
    let alone = result(&says(&eval));
    let (out, note) = packed(&[&eval[..], &["--pack"]].concat());
    // The longest row is full: the model has 128 positions.
    assert!(note.starts_with("note: 32 examples packed into 5 rows of 1"), "{note}");
    let packed = result(&out);
    assert_eq!(packed["predicted_tokens"], alone["predicted_tokens"]);
    assert_eq!(packed["tokens"], alone["tokens"]);
    let loss = |result: &Value| result["loss"].as_f64().unwrap();
    assert!((loss(&packed) - loss(&alone)).abs() < 1e-6 * loss(&alone), "{packed} and {alone}");
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let parts = ["--pack", "`builtin` is plain text", "omit --pack", "--data FILE.jsonl"];
    fails(&["select", "--pack", "--dry-run"], 2, &parts);
    fails(&["eval", "--pack"], 2, &parts);
    let plan = ["select", "--pack", "--dry-run", "--data", data.to_str().unwrap(), "--context", "64"];
    let (out, note) = packed(&plan);
    assert!(note.contains("packed into 14 rows of 64 tokens") && out.contains("b8-lr3e-4"), "{note}{out}");
}

#[test]
fn answers_and_their_ends_count() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let loss_targets = |more: &[&str]| {
        let eval = ["eval", "--json", "--data", data.to_str().unwrap()];
        let result: Value = serde_json::from_str(&says(&[&eval[..], more].concat())).unwrap();
        result["predicted_tokens"].as_u64().unwrap()
    };
    let answers: usize = (36..40).map(|i| 3 * (i % 3 + 1) + 1).sum();
    let prompts: usize = (36..40).map(|i| 4 * (i % 5 + 1)).sum();
    assert_eq!(loss_targets(&[]), answers as u64, "a byte each, of the last tenth");
    assert_eq!(
        loss_targets(&["--loss-on", "all"]),
        (answers + prompts - 4) as u64,
        "nothing predicts a first byte"
    );
}

#[test]
fn what_is_no_instruction_data_is_named_with_its_line() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("a.jsonl");
    let data = file.to_str().unwrap();
    for (lines, parts) in [
        ("{\"text\": \"a\"}\nnot json\n", &["a.jsonl", "line 2", "not a JSON object"][..]),
        (
            "{\"answer\": \"a\"}\n",
            &["line 1", "has the columns `answer`", "`prompt` and `completion`", "--columns"],
        ),
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
    // Prompts of 12, 16 and 20 bytes leave no byte of the answers.
    assert!(err.contains("examples are skipped") && err.contains("truncated to 12 tokens"), "{err}");
    assert!(err.contains("of 32 examples") && err.contains("--context 30 keeps all"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
}

#[test]
fn the_tokenizer_is_the_directorys_or_the_run_is_refused() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let task = trained(&data, &root.path().join("run"), "--device-memory 64MiB");
    let model = PathBuf::from(task["model_dir"].as_str().unwrap());
    let (model_path, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let eval = |data: &str, more: &[&str]| -> Vec<String> {
        let base = ["eval", "--json", "--device-memory", "64MiB", "--model", model_path, "--data", data];
        base.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
    };
    let loss = |data: &str, more: &[&str]| {
        let arguments = eval(data, more);
        let said = says(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        serde_json::from_str::<Value>(&said).unwrap()["loss"].as_f64().unwrap()
    };
    let whole = loss(data, &[]);
    assert_eq!(whole, task["test"]["loss"].as_f64().unwrap());
    // As written by an earlier version, without a tokenizer.
    ["tokenizer.json", "tokenizer_config.json"]
        .iter()
        .for_each(|name| fs::remove_file(model.join(name)).unwrap());
    let refused = |parts: &[&str]| {
        let arguments = eval(data, &[]);
        fails(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), 1, parts);
    };
    refused(&[
        "has weights and no `tokenizer.json`",
        "copy the original model's tokenizer files",
        "--tokenizer bytes",
    ]);
    assert_eq!(loss(data, &["--tokenizer", "bytes"]), whole);
    let ids = root.path().join("ids.jsonl");
    fs::write(&ids, "{\"input_ids\": [1, 2, 3]}\n".repeat(9)).unwrap();
    loss(ids.to_str().unwrap(), &[]);
    fs::write(model.join("tokenizer.model"), "x").unwrap();
    refused(&["`tokenizer.model`", "SentencePiece", "save_pretrained"]);
}

#[test]
fn tables_are_read_by_their_columns_and_what_is_not_used_is_said() {
    let root = TempDir::new().unwrap();
    let data = prompts(root.path());
    let rows = fs::read_to_string(&data).unwrap();
    let rows: Vec<Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cell = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let line = |row: &Value| format!("7,\"{}\",{}\r\n", cell(row, "prompt"), cell(row, "completion"));
    let table = root.path().join("faq.csv");
    let header = "\u{FEFF}id,question,the answer\r\n".to_owned();
    fs::write(&table, header + &rows.iter().map(line).collect::<String>()).unwrap();
    let array = root.path().join("faq.json");
    fs::write(&array, Value::Array(rows.clone()).to_string()).unwrap();
    let loss = |data: &Path, more: &[&str]| {
        let eval = ["eval", "--json", "--data", data.to_str().unwrap()];
        let output = hydra(&[&eval[..], more].concat()).output().unwrap();
        let (out, err) = (text(&output.stdout), notes(&text(&output.stderr)));
        assert!(output.status.success(), "{err}");
        (serde_json::from_str::<Value>(&out).unwrap()["loss"].clone(), err)
    };
    let (expected, none) = loss(&data, &[]);
    assert_eq!(none, "");
    assert_eq!(loss(&array, &[]), (expected.clone(), none));
    let (found, note) = loss(&table, &["--columns", "prompt=question,completion=the answer"]);
    assert_eq!(found, expected);
    assert!(note.contains("`id` (4 rows)") && note.lines().count() == 1, "{note}");
    let refused = ["eval", "--data", table.to_str().unwrap()];
    fails(&refused, 1, &["line 2 of", "`question`, `the answer`", "--columns text=question"]);
    fails(&["eval", "--columns", "text=a"], 2, &["--columns", "`builtin` is plain text"]);
    fails(&["eval", "--columns", "body=a"], 2, &["`body` is not a field that Hydra reads"]);
}

#[test]
fn a_run_says_once_what_it_does_not_use() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("a.jsonl");
    let row = |i: usize| format!("{{\"text\": \"{}\", \"id\": {i}}}\n", "word ".repeat(i % 7 * 8 + 1));
    fs::write(&file, (0..40).map(row).collect::<String>()).unwrap();
    let run = "--model bytes-tiny --batch 4 --lr 1e-3 --devices cpu:1x1 --data".split(' ');
    let run: Vec<&str> = run.chain(file.to_str()).collect();
    for command in [&["select", "--dry-run"][..], &["explain"], &["train", "--dry-run"]] {
        let output = hydra(&[command, &run].concat()).output().unwrap();
        let err = notes(&text(&output.stderr));
        assert!(output.status.success(), "{err}");
        let said = |part: &str| err.lines().filter(|line| line.contains(part)).count();
        assert_eq!(
            (said("`id` (40 rows)"), said("are truncated to 128 tokens")),
            (1, 1),
            "{command:?}: {err}"
        );
        assert!(err.contains("this is the model's maximum, and the longest example has 246 tokens"), "{err}");
    }
}
