//! Texts that tasks generate at their evaluations, and the metrics of generated answers.

use crate::common::{fails, json, kill_and_resume, noted};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Two devices, and models in three shards.
const CUT: &str = "--devices cpu:2x1 --cuts 1,3 --no-cache --microbatch-group 1";

/// A directory with prompts in a file.
fn prompts(text: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("prompts.txt");
    fs::write(&file, text).unwrap();
    (dir, file)
}

/// The events of a kind, without their times.
fn events(run: &Path, kind: &str) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut found: Vec<Value> = lines.filter(|line| line["event"] == kind).collect();
    for event in &mut found {
        event.as_object_mut().unwrap().retain(|key, _| key != "at_s" && key != "time");
    }
    // Tasks end their evaluations in any order.
    found.sort_by_key(|event| (event["task"].to_string(), event["step"].as_u64()));
    found
}

/// The texts and log-probabilities that `hydra generate` gives.
fn generated(more: &str) -> Vec<[Value; 2]> {
    let [out, _] = noted(&format!("generate --json --temperature 0 --max-new-tokens 9 {more}"));
    let row = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    out.lines().map(row).map(|row| [row["text"].clone(), row["logprob"].clone()]).collect()
}

#[test]
fn tasks_sample_at_their_evaluations_what_their_models_generate() {
    let (dir, file) = prompts("Once \n\nA ship \n");
    let out = |name: &str| dir.path().join(name);
    let run = |name: &str, more: &str| {
        let out = out(name);
        noted(&format!(
            "select --model bytes-llama-tiny --lr 3e-3,1e-3 --batch 4 --steps 6 --eval-every 3 --eval-limit 4 {more} --out {}",
            out.display()
        ));
        json(&out.join("report.json"))
    };
    let texts = format!("--sample-prompts {} --sample-tokens 9", file.display());
    for adapters in ["", "--lora 4"] {
        let whole = run("whole", &format!("{texts} {adapters} --devices cpu:1x2 --force"));
        let cut = run("cut", &format!("{texts} {adapters} {CUT} --force"));
        let plain = run("plain", &format!("{adapters} --force"));
        let samples = events(&out("whole"), "samples");
        assert_eq!(samples, events(&out("cut"), "samples"));
        let moments: Vec<_> = samples.iter().map(|of| (of["task"].as_str(), of["step"].as_u64())).collect();
        let [a, b] = ["lr1e-3", "lr3e-3"].map(Some);
        assert_eq!(moments, [(a, Some(3)), (a, Some(6)), (b, Some(3)), (b, Some(6))]);
        assert_eq!(samples[0]["samples"][1]["prompt"], "A ship ");
        assert!(samples[1] != samples[3], "models differ");
        let hashes = |report: &Value| {
            let of = |task: &Value| (task["name"].to_string(), task["weights_sha256"].to_string());
            report["tasks"].as_array().unwrap().iter().map(of).collect::<BTreeMap<_, _>>()
        };
        assert_eq!([hashes(&whole), hashes(&cut)], [hashes(&plain), hashes(&plain)], "{adapters}");
        assert_eq!(cut["tasks"][0]["shards"], 3);
        let model = out("whole").join("models/lr3e-3");
        let of_model = match adapters {
            "" => format!("--model {}", model.display()),
            _ => format!("--model bytes-llama-tiny --adapter {}", model.display()),
        };
        let last = samples[3]["samples"].as_array().unwrap();
        let last: Vec<_> = last.iter().map(|of| [of["text"].clone(), of["logprob"].clone()]).collect();
        assert_eq!(last, generated(&format!("{of_model} --prompts {}", file.display())), "{adapters}");
    }
    let [report, _] = noted(&format!("report {}", out("cut").display()));
    assert!(report.contains("\nprompt \"Once \"\n  lr3e-3  after 6: \""), "{report}");
    let page = fs::read_to_string(out("cut").join("report.html")).unwrap();
    assert!(page.contains("A ship "), "the page has the samples");
}

#[test]
fn a_killed_run_generates_the_same_texts() {
    let (dir, file) = prompts("Once \n\nA ship \n");
    let select = format!(
        "select --model bytes-llama-tiny --lr 3e-3,1e-3 --batch 4 --accumulate 2 --steps 24 --eval-every 4 --eval-limit 4 \
         --sample-prompts {} --sample-tokens 9",
        file.display()
    );
    let [whole, killed] = ["whole", "killed"].map(|name| dir.path().join(name));
    noted(&format!("{select} --devices cpu:1x2 --out {}", whole.display()));
    let whole = events(&whole, "samples");
    assert_eq!(whole.len(), 12);
    let enough = |events: &str| events.contains("\"samples\"") && events.contains("\"checkpoint\"");
    let cut = format!("{select} {CUT} --checkpoint-every 2 --link 4MiB/s");
    kill_and_resume(&cut, &killed, enough, ("samples", 12));
    // What was generated after the last checkpoint is generated again.
    let mut resumed = events(&killed, "samples");
    resumed.dedup();
    assert_eq!(resumed, whole);
}

#[test]
fn tasks_are_selected_by_the_answers_that_they_generate() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    let row = |sum: &str| format!("{}\n", json!({ "prompt": &sum[..4], "completion": &sum[4..] }));
    let rows: String = ["2+2=4", "1+1=2", "1+2=3", "3+2=5"].map(row).concat();
    fs::write(data.join("train.jsonl"), rows.repeat(20)).unwrap();
    fs::write(data.join("validation.jsonl"), &rows).unwrap();
    let out = dir.path().join("run");
    let [table, notes] = noted(&format!(
        "select --model bytes-tiny --data {} --lr 3e-3,1e-6 --batch 4 --epochs 5 --eval-every 20 --patience 2 --metric exact_match --out {}",
        data.display(),
        out.display()
    ));
    assert!(!notes.contains("exact_match"), "{notes}");
    let report = json(&out.join("report.json"));
    let [best, worst] = [0, 1].map(|task| &report["tasks"][task]);
    let metric = |of: &Value| of["metrics"]["exact_match"].as_f64().unwrap();
    assert!(metric(&best["validation"]) > 0.5 && metric(&worst["validation"]) == 0.0, "{table}");
    assert!(best["initial_validation"].get("metrics").is_none(), "no text is generated before training");
    assert_eq!((&worst["stopped_early"], &worst["best_step"]), (&json!(true), &json!(20)), "none is better");
    let mean: Vec<f64> = best["evaluations"].as_array().unwrap().iter().map(|of| metric(&of[1])).collect();
    let largest = mean.iter().copied().fold(0.0, f64::max);
    assert_eq!(metric(&best["validation"]), largest);
    let cells: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(cells[..2], ["1", "lr3e-3"], "{table}");
    assert!(table.contains("initial exact_match") && cells.contains(&"-"), "{table}");
    let rouge = best["validation"]["metrics"]["rouge_l"].as_f64().unwrap();
    assert!((rouge - largest).abs() < 1e-9, "an answer is one word");
}

#[test]
fn what_cannot_be_sampled_is_refused() {
    let (dir, file) = prompts("");
    let refused = |more: &str, parts: &[&str]| {
        let run =
            format!("train --model bytes-tiny --steps 2 --out {} {more}", dir.path().join("run").display());
        fails(&run.split_whitespace().collect::<Vec<_>>(), 2, parts);
    };
    refused("--metric rouge_l", &["the data has texts without prompts", "--loss-on all"]);
    refused("--sample-tokens 5", &["pass --sample-prompts FILE or --metric"]);
    refused("--metric bleu", &["no metric `bleu`", "exact_match, rouge_l"]);
    refused(
        &format!("--vocabulary-parts 2 --sample-prompts {}", file.display()),
        &["--sample-prompts needs a language model whose vocabulary is in one part"],
    );
    let run = format!("train --model bytes-tiny --steps 2 --sample-prompts {}", file.display());
    fails(&run.split_whitespace().collect::<Vec<_>>(), 1, &["has no prompts: write one on each line"]);
}
