//! Classifiers of texts: the same bits whole, cut and on several devices; selected by a metric, evaluated from their written
//! files, with adapters; labels and settings that do not fit are refused.

use crate::common::{fails, hydra, json, kill_and_resume, noted, results, text};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

const WORDS: [&[&str]; 3] = [
    &["love", "great", "happy", "superb"],
    &["hate", "awful", "sad", "broken"],
    &["train", "table", "monday", "paper"],
];
const CLASSES: [&str; 3] = ["positive", "negative", "neutral"];

/// Texts of three classes in a CSV file; every tenth row has another class than its words.
static TWEETS: LazyLock<(TempDir, String)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    let row = |index: usize| {
        let class = index * 7 % 3;
        let word = |at: usize| WORDS[class][(index / 3 + at * index) % 4];
        let label = CLASSES[if index % 10 == 9 { (class + 1) % 3 } else { class }];
        format!("\"{} the {}, {}\",{label}\n", word(0), word(1), word(2))
    };
    let rows: String = (0..120).map(row).collect();
    let path = root.path().join("tweets.csv");
    fs::write(&path, format!("text,label\n{rows}")).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (root, path)
});

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// The task of a run. Its one note is on the labels.
fn run(arguments: &str, out: &Path) -> Value {
    let data = &TWEETS.1;
    let [_, said] = noted(&format!("{arguments} --task classify --data {data} --out {}", out.display()));
    assert!(said.starts_with("note: the labels of `") && said.lines().count() == 1, "{said}");
    assert!(said.contains("are 3 classes: `negative`, `neutral`, `positive`; each text has one"), "{said}");
    json(&out.join("report.json"))["tasks"][0].clone()
}

const TRAIN: &str = "train --batch 8 --lr 3e-3 --dropout 0.1";

#[test]
fn its_bits_depend_neither_on_cuts_nor_on_devices() {
    let root = TempDir::new().unwrap();
    for dtype in ["f32", "bf16"] {
        let train =
            format!("{TRAIN} --accumulate 2 --steps 6 --eval-every 3 --metric f1_macro --dtype {dtype}");
        let of = |name: &str, settings: &str| {
            let task = run(&format!("{train} {settings}"), &root.path().join(format!("{dtype}-{name}")));
            (task["shards"].as_u64().unwrap(), results(&task))
        };
        let (shards, whole) = of("whole", "--devices cpu:1x2 --device-memory 256MiB");
        assert_eq!(shards, 1);
        let (shards, cut) =
            of("cut", "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3,4,5 --microbatch-group 2");
        assert_eq!(shards, 6);
        assert!(cut == whole, "{dtype}");
    }
}

#[test]
fn an_encoders_bits_depend_neither_on_cuts_nor_on_devices_nor_on_a_kill() {
    let root = TempDir::new().unwrap();
    let row = |index: usize| {
        let (first, second) = (WORDS[index % 3][index / 3 % 4], WORDS[index * 7 % 3][index % 4]);
        format!("\"{first} the {second}\",{}\n", (index % 11) as f64 / 4.0 - 1.0)
    };
    let data = root.path().join("numbers.csv");
    fs::write(&data, format!("text,label\n{}", (0..120).map(row).collect::<String>())).unwrap();
    let out = |name: &str| root.path().join(name);
    let train = format!(
        "train --model bytes-bert-tiny --task classify --metric spearman --batch 8 --accumulate 2 --lr 3e-3 --dropout 0.1 \
         --steps 24 --eval-every 8 --data {}",
        data.display()
    );
    let of = |name: &str| {
        let task = json(&out(name).join("report.json"))["tasks"][0].clone();
        (task["shards"].as_u64().unwrap(), results(&task))
    };
    noted(&format!("{train} --devices cpu:1x2 --device-memory 256MiB --out {}", out("whole").display()));
    let (shards, whole) = of("whole");
    assert!(shards == 1 && whole[2][0][1]["metrics"]["spearman"].is_number(), "{}", whole[2]);
    let cut = "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3 --checkpoint-every 2 --link 4MiB/s";
    let enough = |events: &str| events.matches("\"checkpoint\"").count() >= 2;
    kill_and_resume(&format!("{train} {cut}"), &out("killed"), enough, ("minibatch", 24));
    assert_eq!(of("killed"), (4, whole));
}

#[test]
fn a_search_goes_by_the_metric() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let select = "select --model bytes-bert-tiny --search halving --trials 3 --steps 6 --eta 3 --sample lr=log:1e-4..1e-2 \
                  --metric f1_macro --batch 8 --no-initial-validation --devices cpu:2x1 --device-memory 64MiB";
    run(select, &out);
    let report = json(&out.join("report.json"));
    let tasks = report["tasks"].as_array().unwrap();
    let of = |task: &Value, name: &str| {
        let first = &task["evaluations"][0][1];
        first.get(name).unwrap_or(&first["metrics"][name]).as_f64().unwrap()
    };
    let (best, others): (Vec<_>, Vec<_>) =
        tasks.iter().partition(|task| task["losses"].as_array().unwrap().len() == 6);
    assert_eq!((best.len(), others.len()), (1, 2));
    assert!(others.iter().all(|task| of(task, "f1_macro") < of(best[0], "f1_macro")), "{report}");
    assert!(others.iter().any(|task| of(task, "loss") < of(best[0], "loss")), "the loss chooses another one");
}

#[test]
fn the_best_weights_by_a_metric_are_written_and_evaluated() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let task = run(&format!("{TRAIN} --epochs 6 --eval-every 6 --metric f1_macro --devices cpu:1x2"), &out);
    let f1 = |of: &Value| of["metrics"]["f1_macro"].as_f64().unwrap();
    let evaluations = task["evaluations"].as_array().unwrap();
    let best = evaluations.iter().map(|evaluation| f1(&evaluation[1])).fold(0.0, f64::max);
    assert_eq!(f1(&task["validation"]), best);
    assert!(best > 0.5, "{best} is learned");
    assert_eq!(task["validation"]["selected_by"]["name"], "f1_macro");
    let by_loss = run(
        &format!("{TRAIN} --epochs 6 --eval-every 6 --metric loss --devices cpu:1x2"),
        &root.path().join("loss"),
    );
    assert_eq!(by_loss["evaluations"][0][1]["loss"], task["evaluations"][0][1]["loss"], "the same training");
    let losses = by_loss["evaluations"].as_array().unwrap().iter().map(|of| of[1]["loss"].as_f64().unwrap());
    assert_eq!(by_loss["validation"]["loss"].as_f64(), losses.min_by(f64::total_cmp));

    let model = task["model_dir"].as_str().unwrap();
    let config = json(&Path::new(model).join("config.json"));
    assert_eq!(config["architectures"][0], "GPT2ForSequenceClassification");
    assert_eq!(config["id2label"]["2"], "positive", "classes are sorted");
    assert_eq!(config["problem_type"], "single_label_classification");
    let [ranked, _] = noted(&format!("resume {}", out.display()));
    assert!(ranked.contains("validation f1_macro"), "{ranked}");

    // The directory is a classifier: nothing has to name the task.
    let evaluate = format!("eval --model {model} --data {} --devices cpu:1x1", TWEETS.1);
    let evaluated = |more: &str| {
        let [shown, _] = noted(&format!("{evaluate} {more}"));
        shown
    };
    let said: Value = serde_json::from_str(&evaluated("--json")).unwrap();
    assert_eq!(said["metrics"], task["test"]["metrics"]);
    let (loss, tested) = (said["loss"].as_f64().unwrap(), task["test"]["loss"].as_f64().unwrap());
    assert!((loss - tested).abs() <= 1e-5 * tested, "{loss} for {tested}");
    let shown = evaluated("");
    for metric in ["accuracy", "f1_macro", "f1_micro", "matthews_correlation"] {
        assert!(shown.contains(metric), "{shown}");
    }
}

#[test]
fn adapters_are_written_with_their_head_and_evaluated() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let task = run(&format!("{TRAIN} --lora 4 --epochs 2 --devices cpu:1x2"), &out);
    let adapter = task["model_dir"].as_str().unwrap();
    let config = json(&Path::new(adapter).join("adapter_config.json"));
    assert_eq!(config["task_type"], "SEQ_CLS");
    let command = format!(
        "eval --model bytes-tiny --adapter {adapter} --task classify --data {} --devices cpu:1x1 --json",
        TWEETS.1
    );
    let [said, _] = noted(&command);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["metrics"], task["test"]["metrics"]);

    // Later data may have some of the classes, which keep the adapter's numbers.
    let later = root.path().join("later");
    fs::create_dir(&later).unwrap();
    let of = |class: &str| {
        fs::read_to_string(&TWEETS.1)
            .unwrap()
            .lines()
            .filter(|line| line.ends_with(class))
            .fold(String::new(), |rows, line| rows + line + "\n")
    };
    let evaluated = |rows: &str| {
        fs::write(later.join("test.csv"), format!("text,label\n{rows}")).unwrap();
        let [said, _] = noted(&command.replace(&TWEETS.1, later.to_str().unwrap()));
        serde_json::from_str::<Value>(&said).unwrap()
    };
    let all = evaluated(&CLASSES.map(of).concat());
    let parts = CLASSES.map(|class| evaluated(&of(class)));
    let items = |of: &Value| of["predicted_tokens"].as_f64().unwrap();
    let loss = |of: &Value| of["loss"].as_f64().unwrap() * items(of);
    let sum = parts.iter().map(loss).sum::<f64>();
    assert!((loss(&all) - sum).abs() < 1e-4 * sum && items(&all) == 120.0, "{sum} for {}", loss(&all));
}

#[test]
fn numbers_are_a_regression() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("scores.jsonl");
    let row = |index: usize| {
        let text = "good ".repeat(1 + index % 5);
        format!("{{\"text\": \"{}\", \"label\": {}}}\n", text.trim_end(), 0.5 * (index % 5) as f64)
    };
    fs::write(&file, (0..60).map(row).collect::<String>()).unwrap();
    let (data, out) = (file.display(), root.path().join("run"));
    let train =
        format!("{TRAIN} --task classify --data {data} --out {} --epochs 3 --metric spearman", out.display());
    let [ranked, said] = noted(&format!("{train} --devices cpu:1x2"));
    assert!(said.contains("regression"), "{said}");
    assert!(ranked.contains("validation spearman"), "{ranked}");
    assert!(ranked.contains("AutoModelForSequenceClassification.from_pretrained"), "{ranked}");
    let task = json(&out.join("report.json"))["tasks"][0].clone();
    let metrics = &task["test"]["metrics"];
    let (mse, loss) = (metrics["mse"].as_f64().unwrap(), task["test"]["loss"].as_f64().unwrap());
    assert!((mse - loss).abs() < 1e-5 * loss.max(1.0), "{mse} for {loss}");
    assert!(metrics["pearson"].is_number() && metrics["spearman"].is_number());
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let root = TempDir::new().unwrap();
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let refused = |data: &str, more: &str, status: i32, parts: &[&str]| {
        let train = format!("train --model bytes-tiny --steps 1 --data {data} {more}");
        fails(&words(&train), status, parts);
    };
    let unlabelled = file("unlabelled.csv", "text,label\ngood,yes\nbad,\nfine,yes\nworse,no\n");
    refused(&unlabelled, "--task classify", 1, &["unlabelled.csv", "line 3", "label"]);
    let alike = file("alike.csv", &format!("text,label\n{}", "good,yes\n".repeat(20)));
    refused(&alike, "--task classify", 1, &["alike.csv", "yes"]);
    let score = file("score.csv", &format!("text,label\n{}fine,0.5\n", "good,1\nbad,0\n".repeat(9)));
    refused(
        &score,
        "--task classify --problem-type single_label_classification",
        1,
        &["score.csv", "line 20", "0.5"],
    );
    let command = format!("train --steps 1 --data {} --task classify --metric bleu", TWEETS.1);
    let output = hydra(&words(&command)).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("no metric `bleu`"), "{said}");
    assert!(said.contains("its evaluations have accuracy, f1_macro"), "{said}");
    refused(&TWEETS.1, "--task classify --pack", 2, &["--pack applies to language models"]);
    refused(&TWEETS.1, "--problem-type regression", 2, &["--task classify"]);
    refused("builtin", "--task classify", 2, &["a classifier of texts needs texts with labels"]);
}
