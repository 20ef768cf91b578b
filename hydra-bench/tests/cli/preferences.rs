//! Preference losses and reward models: the losses and rewards of TRL, from its models and adapters; the same bits whole, cut
//! and on several devices; one reference for all tasks; rows and settings that do not fit are refused.

use crate::common::{fails, json, kill_and_resume, noted, results};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

/// Models, data and results of TRL, made by experiments/peers/make_preferences.py.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/preferences")
}

/// Directories whose training and validation data are all pairs of a fixture.
static DATA: LazyLock<TempDir> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    for name in ["pairs", "chats", "rated"] {
        fs::create_dir(root.path().join(name)).unwrap();
        for split in ["train", "validation"] {
            let to = root.path().join(format!("{name}/{split}.jsonl"));
            fs::copy(fixtures().join(format!("{name}.jsonl")), to).unwrap();
        }
    }
    root
});

/// Forty pairs of several lengths in one file.
static MANY: LazyLock<(TempDir, String)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    let row = |index: usize| {
        let (kind, unkind) = ("so kind ".repeat(1 + index % 3), "rude ".repeat(1 + index % 4));
        format!(
            "{{\"prompt\": \"Say it of {index}: \", \"chosen\": \"{kind}\", \"rejected\": \"{unkind}\"}}\n"
        )
    };
    let path = root.path().join("many.jsonl");
    fs::write(&path, (0..40).map(row).collect::<String>()).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (root, path)
});

fn words(command: &str) -> Vec<&str> {
    command.split_whitespace().collect()
}

/// The first task of a run.
fn run(arguments: &str, out: &Path) -> Value {
    noted(&format!("{arguments} --out {}", out.display()));
    json(&out.join("report.json"))["tasks"][0].clone()
}

fn floats(of: &Value) -> Vec<f64> {
    of.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn losses_and_rewards_are_those_of_trl() {
    let (root, expected) = (TempDir::new().unwrap(), json(&fixtures().join("results.json")));
    let expected = expected.as_object().unwrap();
    assert_eq!(expected.len(), 11);
    for (case, expected) in expected {
        let [model, loss, data, adapter @ ..] = &words(case)[..] else { panic!("{case}") };
        let at = |name: String| fixtures().join(name).display().to_string();
        let trained = match (*loss, adapter) {
            ("reward", _) => format!("--model {} --task reward", at(format!("{model}_reward"))),
            (_, []) => format!("--model {}", at((*model).to_owned())),
            _ => format!("--model {} --adapter {}", at((*model).to_owned()), at(format!("{model}_adapter"))),
        };
        let gamma = if *loss == "simpo" { "--gamma 0.4" } else { "" };
        let task = match *loss {
            "reward" => String::new(),
            loss => format!("--task preference --loss {loss} --beta 0.3 {gamma}"),
        };
        let batch = match (*loss, *data) {
            ("kto", "pairs") => 16,
            ("kto", _) => 11,
            _ => 8,
        };
        let data = DATA.path().join(data);
        let command = format!(
            "train {trained} {task} --data {} --batch {batch} --lr 2e-3 --steps 12 --optimizer adamw --weight-decay 0 \
             --schedule constant --eval-every 12 --devices cpu:1x1",
            data.display()
        );
        let task = run(&command, &root.path().join(case.replace(' ', "-")));
        let close = |found: f64, expected: f64, what: &str| {
            assert!(
                (found - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                "{case}, {what}: {found} for {expected}"
            );
        };
        let (found, trl) = (floats(&task["losses"]), floats(&expected["losses"]));
        assert_eq!(found.len(), 12);
        found.iter().zip(&trl).for_each(|(found, trl)| close(*found, *trl, "a loss"));
        let validation = &task["evaluations"][0][1];
        close(
            validation["loss"].as_f64().unwrap(),
            expected["eval_loss"].as_f64().unwrap(),
            "the evaluation",
        );
        for (name, value) in expected["metrics"].as_object().unwrap() {
            close(validation["metrics"][name].as_f64().unwrap(), value.as_f64().unwrap(), name);
        }
        if *loss == "dpo" {
            assert_eq!(
                found[0],
                f64::from(std::f32::consts::LN_2),
                "{case}: the model is its reference at first"
            );
        }
    }
}

#[test]
fn bits_depend_neither_on_cuts_nor_on_devices() {
    let root = TempDir::new().unwrap();
    let data = &MANY.1;
    for (name, task) in [
        ("dpo", "--task preference --dropout 0.1"),
        ("lora", "--task preference --loss ipo --lora 4 --dtype bf16"),
        ("orpo", "--task preference --loss orpo --dtype bf16"),
        ("kto", "--task preference --loss kto"),
        ("reward", "--task reward --lora 4"),
    ] {
        let train =
            format!("train {task} --data {data} --batch 4 --lr 3e-3 --accumulate 2 --steps 4 --eval-every 2");
        let of = |at: &str, settings: &str| {
            let task = run(&format!("{train} {settings}"), &root.path().join(format!("{name}-{at}")));
            (task["shards"].as_u64().unwrap(), results(&task))
        };
        let (shards, whole) = of("whole", "--devices cpu:1x2 --device-memory 256MiB");
        assert_eq!(shards, 1);
        let (shards, cut) =
            of("cut", "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3,4,5 --microbatch-group 2");
        assert_eq!(shards, 6);
        assert!(cut == whole, "{name}");
        assert!(whole[0].is_string() && !whole[3].is_null());
    }
}

#[test]
fn means_are_over_the_minibatch_however_it_is_accumulated() {
    let root = TempDir::new().unwrap();
    for loss in ["dpo", "ipo", "orpo", "simpo", "kto"] {
        let losses = |accumulate: usize| {
            let train = format!(
                "train --task preference --loss {loss} --beta 0.5 --data {} --batch 8 --accumulate {accumulate} --lr 1e-3 --steps 6 \
                 --devices cpu:1x2 --no-initial-validation",
                MANY.1
            );
            floats(&run(&train, &root.path().join(format!("{loss}-{accumulate}")))["losses"])
        };
        let whole = losses(1);
        for accumulate in [3, 8] {
            let parts = losses(accumulate);
            let close = |(whole, part): (&f64, &f64)| (whole - part).abs() < 2e-5 * (1.0 + whole.abs());
            assert!(
                whole.iter().zip(&parts).all(close),
                "{loss}: {whole:?} in one microbatch, {parts:?} in {accumulate}"
            );
        }
    }
}

#[test]
fn a_killed_run_goes_on_to_the_same_bits() {
    let root = TempDir::new().unwrap();
    for task in ["--task preference --loss kto", "--task preference --lora 4", "--task reward"] {
        let name = task.replace([' ', '-'], "");
        let out = |kind: &str| root.path().join(format!("{name}-{kind}"));
        let train = format!(
            "train {task} --data {} --batch 4 --accumulate 2 --lr 3e-3 --steps 12 --eval-every 4",
            MANY.1
        );
        let of = |kind: &str| results(&json(&out(kind).join("report.json"))["tasks"][0]);
        run(&format!("{train} --devices cpu:1x2 --device-memory 256MiB"), &out("whole"));
        let cut = "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3 --checkpoint-every 2 --link 4MiB/s";
        let enough = |events: &str| events.matches("\"checkpoint\"").count() >= 2;
        kill_and_resume(&format!("{train} {cut}"), &out("killed"), enough, ("minibatch", 12));
        assert_eq!(of("killed"), of("whole"), "{task}");
    }
}

#[test]
fn one_reference_is_scored_for_all_tasks_and_found_again() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let command = format!(
        "select --task preference --data {} --batch 4 --lr 1e-3,3e-3 --grid beta=0.1,0.5 --steps 3 --eval-every 3 \
         --dropout 0 --metric reward_accuracy --devices cpu:1x2 --out {}",
        MANY.1,
        out.display()
    );
    let [ranked, said] = noted(&command);
    assert_eq!(
        said.matches("scoring 40 pairs of answers with the reference `bytes-tiny`, once").count(),
        1,
        "{said}"
    );
    assert_eq!(said.matches("scored in ").count(), 1, "{said}");
    assert!(ranked.contains("validation reward_accuracy") && ranked.contains("beta"), "{ranked}");
    assert!(!said.contains("do not compare"), "{said}");
    let tasks = json(&out.join("report.json"))["tasks"].clone();
    let tasks = tasks.as_array().unwrap();
    assert_eq!(tasks.len(), 4);
    // The order of the data does not depend on the settings in which the tasks differ.
    assert!(tasks.iter().all(|task| floats(&task["losses"])[0] == f64::from(std::f32::consts::LN_2)));
    let files: Vec<_> =
        fs::read_dir(out.join("reference")).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    assert_eq!(floats(&json(file)["train"]).len(), 2 * 32);
    // A run without its report is resumed.
    fs::remove_file(out.join("report.json")).unwrap();
    let [_, said] = noted(&format!("resume {}", out.display()));
    assert!(!said.contains("scoring"), "{said}");
    fs::remove_file(out.join("report.json")).unwrap();
    fs::write(file, "{}").unwrap();
    fails(&["resume", out.to_str().unwrap()], 1, &["the log-probabilities in `", "remove the file"]);
}

#[test]
fn the_reference_is_the_model_at_the_start_of_training() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let first = |arguments: &str| {
        let train =
            format!("train --task preference --data {} --lr 1e-3 --steps 1 {arguments} --force", MANY.1);
        floats(&run(&train, &out)["losses"])[0]
    };
    let adapter = fixtures().join("llama_adapter");
    let (llama, adapter) = (fixtures().join("llama").display().to_string(), adapter.display().to_string());
    for arguments in [
        "--batch 4 --lora 4 --devices cpu:1x1".to_owned(),
        "--batch 4 --model bytes-llama-tiny --lora 2 --seed 3 --devices cpu:1x1".to_owned(),
        "--batch 4 --model bytes-llama-tiny --lora 2 --seed 4 --devices cpu:1x1".to_owned(),
        format!("--batch 4 --model {llama} --adapter {adapter} --devices cpu:1x1"),
        // In a budget that holds one microbatch, and on the disk of the run directory.
        "--batch 8 --accumulate 8 --device-memory 12MiB --devices cpu:1x1".to_owned(),
        "--batch 4 --host-memory 6MiB --disk-memory 1GiB --devices cpu:1x1".to_owned(),
    ] {
        assert_eq!(first(&arguments), f64::from(std::f32::consts::LN_2), "{arguments}");
    }
    for arguments in
        ["--grid seed=1,2", "--lora 2,4", "--steps 3 --search random --trials 2 --sample seed=int:0..9"]
    {
        let select =
            format!("select --task preference --data {} --batch 4 --lr 1e-3 --dropout 0 {arguments}", MANY.1);
        fails(&words(&select), 2, &["are drawn for each seed and LoRA rank", "one --seed"]);
    }
}

#[test]
fn adapters_are_evaluated_against_their_base() {
    let root = TempDir::new().unwrap();
    let (model, data) = (fixtures().join("llama"), &MANY.1);
    let train = format!(
        "train --model {} --task preference --lora 4 --data {data} --batch 4 --lr 1e-2 --steps 6 --devices cpu:1x2",
        model.display()
    );
    let task = run(&train, &root.path().join("run"));
    let adapter = task["model_dir"].as_str().unwrap();
    let evaluate = format!("eval --model {adapter} --task preference --data {data} --devices cpu:1x1 --json");
    let [evaluated, said] = noted(&evaluate);
    assert!(said.contains("the reference: the model without the adapters"), "{said}");
    let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
    for of in ["loss", "predicted_tokens"] {
        let (found, expected) = (evaluated[of].as_f64().unwrap(), task["test"][of].as_f64().unwrap());
        assert!((found - expected).abs() <= 1e-6 * expected, "{of}: {found} for {expected}");
    }
    let reward = run(
        &format!(
            "train --model {} --task reward --lora 4 --data {data} --batch 4 --lr 1e-2 --steps 6 --devices cpu:1x2",
            model.display()
        ),
        &root.path().join("reward"),
    );
    let adapter = Path::new(reward["model_dir"].as_str().unwrap());
    assert_eq!(json(&adapter.join("adapter_config.json"))["task_type"], "SEQ_CLS");
    let evaluate =
        format!("eval --model {} --task reward --data {data} --devices cpu:1x1 --json", adapter.display());
    let evaluated: Value = serde_json::from_str(&noted(&evaluate)[0]).unwrap();
    let (found, expected) = (evaluated["loss"].as_f64().unwrap(), reward["test"]["loss"].as_f64().unwrap());
    assert!((found - expected).abs() <= 1e-6 * expected, "{found} for {expected}");
    assert_eq!(evaluated["metrics"]["reward_accuracy"], reward["test"]["metrics"]["reward_accuracy"]);
}

#[test]
fn a_vocabulary_in_parts_has_the_same_losses() {
    let root = TempDir::new().unwrap();
    let (model, data) = (fixtures().join("llama"), &MANY.1);
    let losses = |loss: &str, parts: &str| {
        let train = format!(
            "train --model {} --task preference --loss {loss} --data {data} --batch 4 --lr 1e-3 --steps 3 --devices cpu:1x1 {parts}",
            model.display()
        );
        floats(&run(&train, &root.path().join(format!("{loss}{}", parts.len())))["losses"])
    };
    for loss in ["dpo", "orpo"] {
        let (whole, parts) = (losses(loss, ""), losses(loss, "--vocabulary-parts 3"));
        assert!(whole.iter().zip(&parts).all(|(a, b)| (a - b).abs() < 1e-5 * a), "{whole:?} {parts:?}");
    }
}

#[test]
fn rows_and_settings_that_do_not_fit_are_refused() {
    let root = TempDir::new().unwrap();
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let equal = file("equal.csv", "prompt,chosen,rejected\na,b,c\na,b,b\n");
    let alone = file("alone.jsonl", "{\"chosen\": \"b\", \"rejected\": \"c\"}\n");
    let other = file("other.csv", "question,better,worse\na,b,c\n");
    let reward = fixtures().join("llama_reward").display().to_string();
    let many = &MANY.1;
    for (arguments, status, parts) in [
        (format!("--task preference --data {equal}"), 1, &["line 3 of `", "equal.csv", "are equal"][..]),
        (format!("--task preference --data {alone}"), 1, &["line 1 of `", "the row has no `prompt`"]),
        (
            format!("--task preference --data {other}"),
            1,
            &["line 2 of `", "the row has no `chosen`, but `question`"],
        ),
        ("--task preference".to_owned(), 2, &["the built-in text has none", "`chosen` and `rejected`"]),
        (format!("--loss orpo --data {many}"), 2, &["--loss applies to preferences: pass --task preference"]),
        (format!("--task reward --beta 1 --data {many}"), 2, &["--beta applies to preferences"]),
        (format!("--task preference --gamma 1 --data {many}"), 2, &["--gamma applies to the loss simpo"]),
        (format!("--task preference --pack --data {many}"), 2, &["--pack applies to --task lm"]),
        (format!("--task preference --beta 0 --data {many}"), 2, &["expected a finite number above zero"]),
        (
            format!("--task preference --problem-type regression --data {many}"),
            2,
            &["--problem-type applies to classifiers"],
        ),
        (format!("--task preference --model {reward} --data {many}"), 2, &["has no language model head"]),
        (
            format!("--task preference --metric f1_macro --data {many} --eval-every 1"),
            2,
            &["reward_accuracy, reward_margin"],
        ),
        (format!("--task lm --data {many}"), 1, &["--task preference or --task reward", "completion=chosen"]),
        (format!("--task reward --model vit-tiny --data {many}"), 2, &["reads images"]),
    ] {
        let arguments = format!("train {arguments} --batch 1 --steps 1 --dropout 0");
        fails(&words(&arguments), status, parts);
    }
    let eval = format!("eval --task preference --data {many}");
    fails(&words(&eval), 2, &["compare a model with the one before its training", "--loss orpo or simpo"]);
    let mapped = format!(
        "train --task preference --columns prompt=question,chosen=better,rejected=worse --data {other} --batch 1 --steps 1"
    );
    noted(&format!("{mapped} --out {}", root.path().join("mapped").display()));
}
