//! LoRA adapters of a Llama (the demo uses a GPT-2), trained on instruction data with spilling.

use crate::common::{fails, hydra, json, says, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

/// Trains a small Llama, and writes instruction data.
pub static BASE: LazyLock<(TempDir, PathBuf, PathBuf)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let made = "train --model bytes-llama-tiny --batch 4 --context 32 --steps 2 --device-memory 64MiB --out";
    says(&made.split_whitespace().chain(out.to_str()).collect::<Vec<_>>());
    let data = root.path().join("chat.jsonl");
    let line = |i: usize| format!("{{\"prompt\": \"{i} and {i}?\", \"completion\": \" {}\"}}\n", 2 * i);
    fs::write(&data, (0..60).map(line).collect::<String>()).unwrap();
    (root, out.join("models/b4-lr3e-4"), data)
});

/// Runs a grid of adapters in a directory.
fn tuned(out: &Path, more: &str) -> Value {
    let (_, base, data) = &*BASE;
    let paths = ["--model", base.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let grid = "select --batch 8 --lr 1e-3 --steps 3";
    let grid = grid.split_whitespace().chain(more.split_whitespace()).chain(paths);
    says(&grid.chain(["--out", out.to_str().unwrap()]).collect::<Vec<_>>());
    json(&out.join("report.json"))
}

fn loss(model: &Path, more: &[&str]) -> f64 {
    let eval = ["eval", "--json", "--data", BASE.2.to_str().unwrap(), "--model", model.to_str().unwrap()];
    let result: Value = serde_json::from_str(&says(&[&eval[..], more].concat())).unwrap();
    result["loss"].as_f64().unwrap()
}

#[test]
fn a_grid_of_ranks_has_the_bits_of_one_at_a_time_and_adapters_are_evaluated_with_their_base() {
    let root = TempDir::new().unwrap();
    let spilled = tuned(
        &root.path().join("spilled"),
        "--lora 2,4 --devices cpu:2x1 --device-memory 64MiB --cuts 2,4 --lora-dropout 0.1",
    );
    let alone = tuned(
        &root.path().join("alone"),
        "--lora 4 --devices cpu:1x1 --device-memory 256MiB --lora-dropout 0.1",
    );
    let tasks = spilled["tasks"].as_array().unwrap();
    let names: Vec<&str> = tasks.iter().map(|task| task["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["r2", "r4"]);
    assert_eq!(tasks[1]["config"]["lora"], 4);
    assert_eq!(tasks[1]["weights_sha256"], alone["tasks"][0]["weights_sha256"]);
    assert_eq!(tasks[1]["losses"], alone["tasks"][0]["losses"]);
    let adapter = root.path().join("alone/models/b8-lr1e-3-r4");
    let config = json(&adapter.join("adapter_config.json"));
    assert_eq!((&config["r"], &config["peft_type"]), (&4.into(), &"LORA".into()));
    assert_eq!(config["target_modules"], serde_json::json!(["q_proj", "v_proj"]));
    assert!(adapter.join("adapter_model.safetensors").is_file() && !adapter.join("config.json").exists());
    let tokenizer = |dir: &Path| fs::read_to_string(dir.join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer(&adapter), tokenizer(&BASE.1), "adapters carry their tokenizer");
    let reported = alone["tasks"][0]["test"]["loss"].as_f64().unwrap();
    let evaluated = loss(&BASE.1, &["--adapter", adapter.to_str().unwrap()]);
    assert!((reported - evaluated).abs() < 1e-6, "{reported} and {evaluated}");
    assert!((loss(&BASE.1, &[]) - evaluated).abs() > 1e-4, "it has learned something");
}

#[test]
fn lists_of_targets_and_of_scalings_are_grids_with_the_bits_of_each_alone() {
    let root = TempDir::new().unwrap();
    let train = |name: &str, flags: &str| {
        let common = " --devices cpu:1x1 --device-memory 256MiB";
        tuned(&root.path().join(name), &format!("--lora 2 {flags}{common}"))
    };
    for (list, names, alone) in [
        (
            "--lora-targets q_proj;q_proj,mlp.down_proj",
            ["on-q_proj", "on-q_proj_mlp.down_proj"],
            "--lora-targets q_proj,mlp.down_proj",
        ),
        ("--lora-alpha 8,16", ["alpha8", "alpha16"], "--lora-alpha 16"),
    ] {
        let (all, alone) = (train(&format!("{}-all", names[0]), list), train(names[0], alone));
        let tasks = all["tasks"].as_array().unwrap();
        assert_eq!(tasks.iter().map(|task| &task["name"]).collect::<Vec<_>>(), names);
        assert_eq!(tasks[1]["weights_sha256"], alone["tasks"][0]["weights_sha256"], "{list}");
        assert_ne!(tasks[0]["weights_sha256"], tasks[1]["weights_sha256"], "{list}");
    }
}

#[test]
fn training_goes_on_from_adapters_and_merged_models_say_the_same() {
    let root = TempDir::new().unwrap();
    let first = root.path().join("first");
    tuned(&first, "--lora 4 --lora-targets q_proj,mlp.down_proj --device-memory 64MiB");
    let adapter = first.join("models/b8-lr1e-3-r4");
    let flags = format!("--adapter {} --merge --device-memory 64MiB", adapter.display());
    let report = tuned(&root.path().join("second"), &flags);
    let task = &report["tasks"][0];
    let before = loss(&BASE.1, &["--adapter", adapter.to_str().unwrap()]);
    let merged = root.path().join("second/models/b8-lr1e-3");
    assert!(merged.join("config.json").is_file() && !merged.join("adapter_config.json").exists());
    let trained = task["test"]["loss"].as_f64().unwrap();
    assert!(trained < before, "{trained} after {before}");
    let evaluated = loss(&merged, &[]);
    assert!((trained - evaluated).abs() < 1e-4, "{trained} and {evaluated}");
}

#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let model = ["--model", BASE.1.to_str().unwrap()];
    let select = |more: &[&'static str]| [&["select"][..], &model, more].concat();
    fails(&select(&["--lora", "4", "--lora-targets", "c_attn"]), 1, &["`c_attn`", "q_proj", "down_proj"]);
    fails(&select(&["--lora", "0"]), 2, &["--lora", "rank"]);
    fails(&select(&["--lora", "4,4"]), 2, &["given twice"]);
    fails(&select(&["--lora", "4", "--train", "head"]), 2, &["--train"]);
    fails(&select(&["--merge"]), 2, &["--lora"]);
    let parts = ["/nowhere/adapter_config.json` does not exist: pass the directory of adapters"];
    fails(&select(&["--adapter", "nowhere"]), 1, &parts);
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let gpt2 = "train --lora 2 --steps 1 --batch 4 --context 32 --device-memory 64MiB --out";
    says(&gpt2.split_whitespace().chain(out.to_str()).collect::<Vec<_>>());
    let adapter = out.join("models/b4-lr3e-4-r2");
    let found = format!("wrote, such as `{}`", adapter.display());
    for dir in [out.clone(), out.join("models")] {
        let parts = [&format!("`{}/adapter_config.json` does not exist", dir.display()), "PEFT", &*found];
        fails(&["eval", "--adapter", dir.to_str().unwrap()], 1, &parts);
    }
    let other = [&["eval"][..], &model, &["--adapter", adapter.to_str().unwrap()]].concat();
    fails(&other, 1, &["`c_attn`", "expected some of q_proj"]);
}

#[test]
fn a_base_in_four_bits_has_the_same_bits_spilled_and_is_evaluated_as_it_was_trained() {
    let root = TempDir::new().unwrap();
    for dtype in ["f32", "bf16"] {
        let run = |name: &str, more: &str| {
            let flags = format!("--lora 4 --base nf4 --dtype {dtype} {more}");
            tuned(&root.path().join(format!("{name}-{dtype}")), &flags)["tasks"][0].clone()
        };
        let spilled = run("spilled", "--devices cpu:2x1 --device-memory 64MiB --cuts 2,4 --accumulate 2");
        let whole = run("whole", "--devices cpu:1x2 --device-memory 256MiB --accumulate 2");
        assert_eq!(spilled["weights_sha256"], whole["weights_sha256"]);
        assert_eq!(spilled["losses"], whole["losses"]);
        let adapter = root.path().join(format!("whole-{dtype}/models/b8-lr1e-3-r4"));
        let with = |more: &[&str]| {
            loss(&BASE.1, &[&["--adapter", adapter.to_str().unwrap(), "--dtype", dtype], more].concat())
        };
        let (reported, own) = (whole["test"]["loss"].as_f64().unwrap(), with(&["--base", "nf4"]));
        assert!((reported - own).abs() < 1e-6, "{reported} and {own}");
    }
    let merged = root.path().join("merged");
    let task = tuned(&merged, "--lora 4 --base nf4 --merge --device-memory 64MiB")["tasks"][0].clone();
    let (reported, own) =
        (task["test"]["loss"].as_f64().unwrap(), loss(&merged.join("models/b8-lr1e-3-r4"), &[]));
    assert!((reported - own).abs() < 1e-4, "{reported} and {own}");
}

#[test]
fn a_base_in_four_bits_that_would_be_trained_or_cannot_be_is_refused_by_name() {
    let model = ["select", "--model", BASE.1.to_str().unwrap()];
    let select = |more: &[&'static str]| [&model[..], more].concat();
    fails(&select(&["--base", "nf4"]), 2, &["--base nf4", "pass --lora RANK"]);
    fails(&select(&["--lora", "4", "--base", "fp4"]), 2, &["fp4", "--base", "nf4"]);
    let saved = ["--lora", "4", "--base", "nf4", "--modules-to-save", "up_proj"];
    fails(&select(&saved), 1, &["`up_proj`", "the quantized matrix `layers.0.mlp.up_proj`"]);
    fails(&["eval", "--model", BASE.1.to_str().unwrap(), "--base", "nf4"], 2, &["--adapter DIR"]);
    fails(&["step", "--base", "nf4"], 2, &["--lora"]);
}

/// Copies adapters, with another value of a key in their configuration.
fn changed(from: &Path, to: &Path, key: &str, value: Value) {
    fs::create_dir(to).unwrap();
    let mut config = json(&from.join("adapter_config.json"));
    config[key] = value;
    fs::write(to.join("adapter_config.json"), config.to_string()).unwrap();
    fs::copy(from.join("adapter_model.safetensors"), to.join("adapter_model.safetensors")).unwrap();
}

#[test]
fn modules_that_are_saved_and_bases_that_are_changed_have_the_same_bits_spilled() {
    let root = TempDir::new().unwrap();
    let same = |name: &str, more: &str| {
        let spilled = format!("{more} --devices cpu:2x1 --device-memory 64MiB --cuts 2,4");
        let spilled = tuned(&root.path().join(format!("{name}-spilled")), &spilled);
        let whole =
            tuned(&root.path().join(name), &format!("{more} --devices cpu:1x1 --device-memory 256MiB"));
        assert_eq!(spilled["tasks"][0]["weights_sha256"], whole["tasks"][0]["weights_sha256"], "{name}");
        whole["tasks"][0]["test"]["loss"].as_f64().unwrap()
    };
    let flags = r"--lora 4 --rslora --lora-targets .*\.(q|down)_proj --modules-to-save lm_head,norm";
    let reported = same("saved", flags);
    let first = root.path().join("saved/models/b8-lr1e-3-r4");
    let config = json(&first.join("adapter_config.json"));
    assert_eq!(config["target_modules"], r".*\.(q|down)_proj");
    assert_eq!((&config["use_rslora"], &config["modules_to_save"][0]), (&true.into(), &"lm_head".into()));
    let evaluated = loss(&first, &[]);
    assert!((reported - evaluated).abs() < 1e-6, "the base is found: {reported} and {evaluated}");
    let pissa = root.path().join("pissa");
    changed(&first, &pissa, "init_lora_weights", "pissa".into());
    assert!((loss(&pissa, &[]) - evaluated).abs() > 1e-3, "the base is another one");
    let reported = same("residual", &format!("--adapter {}", pissa.display()));
    let second = root.path().join("residual/models/b8-lr1e-3");
    assert_eq!(json(&second.join("adapter_config.json"))["init_lora_weights"], "pissa");
    let evaluated = loss(&second, &[]);
    assert!((reported - evaluated).abs() < 1e-6, "{reported} and {evaluated}");
}

#[test]
fn what_adapters_say_and_is_not_done_is_named() {
    let root = TempDir::new().unwrap();
    let first = root.path().join("first");
    tuned(&first, "--lora 2 --lora-targets all-linear --device-memory 64MiB");
    let adapter = first.join("models/b8-lr1e-3-r2");
    let eval = |name: &str, key: &str, value: Value| {
        let dir = root.path().join(name);
        changed(&adapter, &dir, key, value);
        let (dir, data) = (dir.to_str().unwrap().to_owned(), BASE.2.to_str().unwrap().to_owned());
        ["eval", "--model", &dir, "--data", &data].map(str::to_owned)
    };
    let refused = |args: [String; 5], said: &[&str]| fails(&args.each_ref().map(String::as_str), 1, said);
    refused(eval("qalora", "use_qalora", true.into()), &["use_qalora", "merge_and_unload"]);
    refused(eval("dora", "use_dora", true.into()), &["use_dora", "merge_and_unload"]);
    refused(eval("fast", "init_lora_weights", "pissa_niter_4".into()), &["pissa_niter_4"]);
    refused(eval("lost", "base_model_name_or_path", "org/lost".into()), &["org/lost", "--model BASE"]);
    refused(eval("targets", "target_modules", vec!["q_proj"].into()), &["lora_A", "has no such parameter"]);
    let noted = eval("noted", "later_key", 3.into());
    let out = hydra(&noted.each_ref().map(String::as_str)).output().unwrap();
    let said = text(&out.stderr);
    assert!(out.status.success() && said.contains("note: ") && said.contains("`later_key`"), "{said}");
}

/// Copies a model in `f32` with the weights of one layer rounded to `bf16`. Returns the number of the other parameters.
fn with_a_layer_in_bf16(base: &Path, copy: &Path) -> u64 {
    fs::create_dir(copy).unwrap();
    for file in fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    let file = copy.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let (mut values, mut others) = (Vec::new(), 0);
    let tensors = header.as_object_mut().unwrap().iter_mut().filter(|(name, _)| *name != "__metadata__");
    for (name, tensor) in tensors {
        let [from, to] = [0, 1].map(|end| tensor["data_offsets"][end].as_u64().unwrap() as usize);
        let (old, first) = (&bytes[start + from..start + to], values.len());
        if name.starts_with("model.layers.0.") {
            values.extend(old.chunks_exact(4).flat_map(|value| [value[2], value[3]]));
            tensor["dtype"] = "BF16".into();
        } else {
            values.extend_from_slice(old);
            others += old.len() as u64 / 4;
        }
        tensor["data_offsets"] = serde_json::json!([first, values.len()]);
    }
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&file, [&length[..], header.as_bytes(), &values].concat()).unwrap();
    others
}

#[test]
fn a_note_counts_the_frozen_weights_that_stay_f32() {
    let root = TempDir::new().unwrap();
    let base = root.path().join("base");
    let others = with_a_layer_in_bf16(&BASE.1, &base);
    let paths = ["--model", base.to_str().unwrap(), "--data", BASE.2.to_str().unwrap()];
    let select =
        "select --batch 8 --lr 1e-3 --lora 2,4 --steps 1 --device-memory 64MiB --dry-run --frozen-dtype";
    let said = |frozen| {
        let arguments: Vec<&str> = select.split_whitespace().chain([frozen]).chain(paths).collect();
        text(&hydra(&arguments).output().unwrap().stderr)
    };
    let found = said("bf16");
    assert_eq!(found.matches("--frozen-dtype").count(), 1, "once for both ranks: {found}");
    assert!(found.contains(&format!("does not apply to {others} parameters of")), "{others}: {found}");
    assert!(said("f16").contains("--frozen-dtype f16 applies to none of the weights"));
}
