//! Predictions for the rows of a file: equal to the bit whole and cut, and equal to what `hydra eval` reports.

use crate::common::{fails, hydra, json, notes, text};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

const WHOLE: &str = "--devices cpu:1x2 --device-memory 256MiB";
const CUT: &str = "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3,4,5";

/// The output of a command that succeeds, and its notes.
fn noted(command: &str, more: &[&str]) -> [String; 2] {
    let output =
        hydra(&command.split_whitespace().chain(more.iter().copied()).collect::<Vec<_>>()).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{command}: {err}");
    [text(&output.stdout), notes(&err)]
}

/// The model of a run of one task.
fn trained(flags: &str, data: &Path, out: &Path) -> PathBuf {
    let flags =
        format!("train --device-memory 64MiB --data {} --out {} {flags}", data.display(), out.display());
    noted(&flags, &[]);
    fs::read_dir(out.join("models")).unwrap().next().unwrap().unwrap().path()
}

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Texts with labels in a directory, and classifiers that were trained on them: one class, several classes, numbers.
static CLASSIFIERS: LazyLock<(TempDir, [(PathBuf, PathBuf); 3])> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    let words = ["good", "bad", "dull"];
    let text = |at: usize| format!("{} and {} again", words[at % 3], words[at / 3 % 3]);
    let data = |name: &str, label: &dyn Fn(usize) -> Value| {
        let file = root.path().join(format!("{name}.jsonl"));
        let row = |at: usize| json!({"id": at, "text": text(at), "label": label(at)}).to_string() + "\n";
        fs::write(&file, (0..60).map(row).collect::<String>()).unwrap();
        file
    };
    let files = [
        data("one", &|at| json!(words[at % 3])),
        data("several", &|at| json!([words[at % 3], words[(at + 1) % 3]])),
        data("number", &|at| json!(0.5 + (at % 3) as f64)),
    ];
    let models = files.map(|file| {
        let out = root.path().join(file.file_stem().unwrap());
        let model = trained("--task classify --batch 8 --lr 3e-3 --steps 12 --lora 4", &file, &out);
        (model, file)
    });
    (root, models)
});

fn predict(model: &Path, data: &Path, more: &str) -> [String; 2] {
    noted(&format!("predict --model {} --data {} {more}", model.display(), data.display()), &[])
}

#[test]
fn classes_have_probabilities_and_the_bits_of_any_cut() {
    let (root, [(model, data), ..]) = &*CLASSIFIERS;
    let merged = root.path().join("merged");
    let merged_text = merged.to_str().unwrap();
    // A directory of adapters is read with its base, which is the preset's: it has no files.
    let [_, said] = noted(
        "predict --task classify --data",
        &[data.to_str().unwrap(), "--adapter", model.to_str().unwrap()],
    );
    assert_eq!(said, "");
    let base = ["--adapter", model.to_str().unwrap()];
    let of = |flags: &str| noted(&format!("predict --data {} {flags}", data.display()), &base)[0].clone();
    let whole = of(WHOLE);
    assert_eq!(of(CUT), whole);
    assert_eq!(of(&format!("{CUT} --replicas 1 --host-memory 256MiB")), whole);
    let found = rows(&whole);
    assert_eq!(found.len(), 60);
    for (at, row) in found.iter().enumerate() {
        assert_eq!(row["id"], at, "rows keep their order and fields");
        let probabilities = row["probabilities"].as_object().unwrap();
        let names: Vec<&String> = probabilities.keys().collect();
        assert_eq!(names, ["bad", "dull", "good"]);
        let sum: f64 = probabilities.values().map(|p| p.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        let best =
            probabilities.iter().max_by(|a, b| a.1.as_f64().unwrap().total_cmp(&b.1.as_f64().unwrap()));
        assert_eq!(row["prediction"], *best.unwrap().0);
    }
    // The accuracy and the loss are those of an evaluation of the same rows.
    let test: Vec<&Value> = found[54..].iter().collect();
    let [evaluated, _] = noted(&format!("eval --json --task classify --data {}", data.display()), &base);
    let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
    let right = test.iter().filter(|row| row["prediction"] == row["label"]).count();
    assert!((evaluated["metrics"]["accuracy"].as_f64().unwrap() - right as f64 / 6.0).abs() < 1e-12);
    let entropy = |row: &&Value| -row["probabilities"][row["label"].as_str().unwrap()].as_f64().unwrap().ln();
    let loss = test.iter().map(entropy).sum::<f64>() / 6.0;
    assert!((loss - evaluated["loss"].as_f64().unwrap()).abs() < 1e-6, "{loss} and {evaluated}");
    assert!(!Path::new(merged_text).exists());
}

#[test]
fn several_classes_and_numbers_are_predicted() {
    let (root, [_, (several, data), (number, numbers)]) = &*CLASSIFIERS;
    let of = |adapter: &Path, data: &Path, flags: &str| {
        let adapter = ["--adapter", adapter.to_str().unwrap()];
        noted(&format!("predict --data {} {flags}", data.display()), &adapter)[0].clone()
    };
    let whole = of(several, data, WHOLE);
    assert_eq!(of(several, data, CUT), whole);
    let found = rows(&whole);
    let first = &found[0];
    let over = |name: &str| first["probabilities"][name].as_f64().unwrap() > 0.5;
    let predicted: Vec<&str> = ["bad", "dull", "good"].into_iter().filter(|name| over(name)).collect();
    assert_eq!(first["prediction"], json!(predicted));
    let out = root.path().join("numbers.csv");
    let [printed, _] = noted(
        &format!("predict --data {} --out {} {CUT}", numbers.display(), out.display()),
        &["--adapter", number.to_str().unwrap()],
    );
    assert_eq!(printed, "");
    let table = fs::read_to_string(&out).unwrap();
    let mut lines = table.lines();
    assert_eq!(lines.next(), Some("id,text,label,prediction"));
    let squared = |line: &str| {
        let cells: Vec<f64> = line.rsplit(',').take(2).map(|cell| cell.parse().unwrap()).collect();
        (cells[0] - cells[1]).powi(2)
    };
    let squares: Vec<f64> = lines.map(squared).collect();
    assert_eq!(squares.len(), 60);
    let flags = ["--adapter", number.to_str().unwrap()];
    let [evaluated, _] = noted(&format!("eval --json --task classify --data {}", numbers.display()), &flags);
    let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
    let loss = squares[54..].iter().sum::<f64>() / 6.0;
    assert!((loss - evaluated["loss"].as_f64().unwrap()).abs() < 1e-5, "{loss} and {evaluated}");
    // A table in, a table out.
    let csv = root.path().join("in.csv");
    fs::write(&csv, "text,more\n\"good, bad\",\ndull,x\n").unwrap();
    let table = of(several, &csv, WHOLE);
    let mut lines = table.lines();
    assert_eq!(
        lines.next(),
        Some("text,more,prediction,probabilities.bad,probabilities.dull,probabilities.good")
    );
    assert!(lines.next().unwrap().starts_with("\"good, bad\",,") && lines.count() == 1, "{table}");
}

/// Instruction data and a language model that was trained on it.
static LANGUAGE: LazyLock<(TempDir, PathBuf, PathBuf)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    let data = root.path().join("sums.jsonl");
    let line = |i: usize| format!("{{\"prompt\": \"{i} and {i}?\", \"completion\": \" {}\"}}\n", 2 * i);
    fs::write(&data, (0..40).map(line).collect::<String>()).unwrap();
    let model =
        trained("--model bytes-llama-tiny --batch 8 --steps 6 --lr 3e-3", &data, &root.path().join("run"));
    (root, model, data)
});

#[test]
fn texts_have_the_log_probability_that_an_evaluation_sums() {
    let (root, model, data) = &*LANGUAGE;
    let [whole, said] = predict(model, data, WHOLE);
    assert_eq!(said, "");
    for flags in [CUT, "--devices cpu:2x1 --device-memory 64MiB --cuts 3"] {
        assert_eq!(predict(model, data, flags)[0], whole);
    }
    let found = rows(&whole);
    assert_eq!(found.len(), 40);
    assert_eq!(found[12]["prompt"], "12 and 12?");
    assert_eq!(found[12]["tokens"], 4, "two digits with a space, and the end");
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap();
    let row = &found[3];
    let perplexity = (-number(row, "logprob") / number(row, "tokens")).exp();
    assert!((perplexity - number(row, "perplexity")).abs() < 1e-9 * perplexity);
    let evaluated = noted(
        &format!("eval --json --split test --data {} --model", data.display()),
        &[model.to_str().unwrap()],
    );
    let evaluated: Value = serde_json::from_str(&evaluated[0]).unwrap();
    let sum = |name: &str| found[36..].iter().map(|row| number(row, name)).sum::<f64>();
    assert_eq!(evaluated["predicted_tokens"].as_f64().unwrap(), sum("tokens"));
    let loss = -sum("logprob") / sum("tokens");
    assert!((loss - evaluated["loss"].as_f64().unwrap()).abs() < 1e-6, "{loss} and {evaluated}");
    // The second text has no token to predict, and the third is cut.
    let texts = root.path().join("texts.jsonl");
    fs::write(&texts, "{\"text\": \"abc\"}\n{\"input_ids\": [7], \"n\": 1}\n{\"text\": \"abcdefgh\"}\n")
        .unwrap();
    let [printed, said] = predict(model, &texts, "--context 5");
    let found = rows(&printed);
    let tokens: Vec<&Value> = found.iter().map(|row| &row["tokens"]).collect();
    assert_eq!(tokens, [3, 0, 4]);
    assert_eq!(found[1], json!({"input_ids": [7], "n": 1, "logprob": null, "tokens": 0, "perplexity": null}));
    assert!(said.contains("1 of 3 texts of `") && said.contains("are truncated to 5 tokens"), "{said}");
}

#[test]
fn flags_of_training_are_named_and_change_nothing() {
    let (_, model, data) = &*LANGUAGE;
    let [plain, said] = predict(model, data, WHOLE);
    assert_eq!(said, "");
    let training = "--train last:1 --dropout 0.5 --microbatch-group 4 --policy fifo";
    let [printed, said] = predict(model, data, &format!("{WHOLE} {training}"));
    assert_eq!(printed, plain);
    assert_eq!(said, "note: hydra predict does not use --train, --dropout, --microbatch-group, --policy\n");
}

#[test]
fn what_cannot_be_predicted_is_refused_by_name() {
    let (root, model, data) = &*LANGUAGE;
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let refused = |flags: &[&str], status, parts: &[&str]| {
        fails(&[&["predict", "--model", model], flags].concat(), status, parts);
    };
    refused(&[], 2, &["--data FILE"]);
    refused(&["--data", "nowhere.jsonl"], 1, &["nowhere.jsonl` could not be read"]);
    refused(&["--data", &file("a.txt", "text")], 1, &["a.txt` is not a file of rows", ".csv"]);
    refused(&["--data", data, "--out", "x.txt"], 2, &["--out `x.txt`", "FILE.jsonl"]);
    refused(&["--data", data, "--batch", "4"], 2, &["--batch applies to classifiers"]);
    refused(&["--data", data, "--pack"], 2, &["--pack", "omit it"]);
    refused(&["--data", data, "--cuts", "99"], 1, &["cut"]);
    let small = ["predict", "--model", model, "--data", data, "--device-memory", "64KiB"];
    let err = text(&hydra(&small).output().unwrap().stderr);
    assert!(err.contains(&format!("error: `{model}` could not be evaluated\n  caused by: layer `")), "{err}");
    let wrong = file("wrong.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n");
    refused(&["--data", &wrong], 1, &["line 2 of `", "wrong.jsonl", "`text` must be text"]);
    let taken = file("taken.jsonl", "{\"text\": \"a\", \"logprob\": 1}\n");
    refused(&["--data", &taken], 1, &["a field `logprob`", "rename it"]);
    refused(&["--data", &wrong, "--task", "classify"], 1, &["has no classifier", "--adapter"]);
    let (_, [(adapter, _), ..]) = &*CLASSIFIERS;
    let adapter = adapter.to_str().unwrap();
    refused(&["--data", data, "--adapter", adapter], 1, &["`prompt`", "line 1 of `", "text=COLUMN"]);
    let wrong = file("none.csv", "text,n\na,1\n");
    refused(&["--data", &wrong, "--adapter", adapter], 1, &["`c_attn`", "q_proj"]);
    let images = ["predict", "--model", "vit-tiny", "--data", &wrong];
    fails(&images, 2, &["reads images", "reads texts"]);
    assert_eq!(json(&Path::new(adapter).join("adapter_config.json"))["task_type"], "SEQ_CLS");
}
