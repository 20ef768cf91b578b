//! Models exported for other programs: merged, in other types, in several files.

use crate::common::{fails, hydra, json, says, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

/// A small Llama, adapters of it that were trained, and instruction data.
static TRAINED: LazyLock<(TempDir, PathBuf, PathBuf, PathBuf)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    let data = root.path().join("chat.jsonl");
    let line = |i: usize| format!("{{\"prompt\": \"{i} and {i}?\", \"completion\": \" {}\"}}\n", 2 * i);
    fs::write(&data, (0..60).map(line).collect::<String>()).unwrap();
    let train = |flags: &str, out: &Path| {
        let flags = flags.split_whitespace().chain(["--out", out.to_str().unwrap()]);
        says(&["train"].into_iter().chain(flags).collect::<Vec<_>>());
    };
    let (base, tuned) = (root.path().join("base"), root.path().join("tuned"));
    train("--model bytes-llama-tiny --batch 4 --context 32 --steps 2 --device-memory 64MiB", &base);
    let model = base.join("models/b4-lr3e-4");
    let flags =
        "--lora 4 --lora-targets q_proj,mlp.down_proj --batch 8 --lr 1e-2 --steps 4 --device-memory 64MiB";
    train(&format!("{flags} --model {} --data {}", model.display(), data.display()), &tuned);
    let adapter = fs::read_dir(tuned.join("models")).unwrap().next().unwrap().unwrap().path();
    (root, model, adapter, data)
});

fn export(flags: &[&str], out: &Path) -> String {
    let out = out.to_str().unwrap();
    let printed = says(&[&["export"], flags, &["--out", out]].concat());
    assert!(printed.starts_with(&format!("exported to {out}: ")), "{printed}");
    assert!(!Path::new(&format!("{out}.part")).exists());
    printed
}

fn loss(model: &Path, more: &[&str]) -> f64 {
    let data = TRAINED.3.to_str().unwrap();
    let eval =
        ["eval", "--json", "--device-memory", "64MiB", "--data", data, "--model", model.to_str().unwrap()];
    let result: Value = serde_json::from_str(&says(&[&eval[..], more].concat())).unwrap();
    result["loss"].as_f64().unwrap()
}

#[test]
fn a_merged_model_says_what_its_adapters_say() {
    let (_, model, adapter, _) = &*TRAINED;
    let (model, adapter) = (model.to_str().unwrap(), adapter.to_str().unwrap());
    let root = TempDir::new().unwrap();
    let merged = root.path().join("deep/merged");
    export(&["--model", model, "--adapter", adapter, "--merge"], &merged);
    let expected = loss(Path::new(model), &["--adapter", adapter]);
    assert!((loss(&merged, &[]) - expected).abs() < 1e-6);
    assert!((loss(Path::new(model), &[]) - expected).abs() > 1e-4, "the adapters have an effect");
    assert!(merged.join("tokenizer.json").is_file() && !merged.join("adapter_config.json").exists());
    // The base is found by the adapters' configuration.
    let again = root.path().join("again");
    export(&["--adapter", adapter, "--merge"], &again);
    let file = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
    assert_eq!(file(&again), file(&merged));
}

#[test]
fn a_model_of_several_files_is_the_model() {
    let (_, model, ..) = &*TRAINED;
    let root = TempDir::new().unwrap();
    let (one, several) = (root.path().join("one"), root.path().join("several"));
    let from = ["--model", model.to_str().unwrap()];
    export(&from, &one);
    let same = |name: &str| fs::read(one.join(name)).unwrap() == fs::read(model.join(name)).unwrap();
    assert!(same("model.safetensors") && same("tokenizer.json"), "nothing changes without flags");
    export(&[&from[..], &["--max-shard-size", "100kB"]].concat(), &several);
    let index = json(&several.join("model.safetensors.index.json"));
    let files =
        |dir: &Path| fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name()).collect::<Vec<_>>();
    let count = files(&several).iter().filter(|file| file.to_str().unwrap().starts_with("model-")).count();
    assert!(count > 2 && !several.join("model.safetensors").exists(), "{:?}", files(&several));
    let map = index["weight_map"].as_object().unwrap();
    let name = format!("model-00001-of-{count:05}.safetensors");
    assert_eq!(map["model.embed_tokens.weight"], Value::from(name));
    let parameters = fs::metadata(one.join("model.safetensors")).unwrap().len();
    let total = index["metadata"]["total_size"].as_u64().unwrap();
    assert!(total < parameters && parameters - total < 10_000, "{total} of {parameters}");
    assert_eq!(loss(&several, &[]), loss(&one, &[]));
}

#[test]
fn weights_are_rounded_to_the_type() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    for dtype in ["bf16", "f16"] {
        let out = root.path().join(dtype);
        let printed = export(&["--model", model.to_str().unwrap(), "--dtype", dtype], &out);
        assert!(printed.contains(&format!("weights of {dtype}")), "{printed}");
        let name = if dtype == "bf16" { "bfloat16" } else { "float16" };
        assert_eq!(json(&out.join("config.json"))["dtype"], name);
        let (whole, half) = (loss(model, &[]), loss(&out, &[]));
        assert!(whole != half && (whole - half).abs() < 1e-2, "{whole} and {half}");
    }
    // Adapters alone.
    let out = root.path().join("adapters");
    export(&["--adapter", adapter.to_str().unwrap(), "--dtype", "bf16"], &out);
    let bytes = |dir: &Path| fs::metadata(dir.join("adapter_model.safetensors")).unwrap().len();
    assert!(2 * bytes(&out) < bytes(adapter) + 4000 && !out.join("config.json").exists());
    let (whole, half) = (loss(adapter, &[]), loss(&out, &[]));
    assert!(whole != half && (whole - half).abs() < 1e-2, "{whole} and {half}");
}

#[test]
fn what_cannot_be_exported_is_refused_by_name() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    let out = root.path().join("out");
    let refused = |flags: &[&str], status: i32, parts: &[&str]| {
        fails(&[&["export"], flags, &["--out", out.to_str().unwrap()]].concat(), status, parts);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "nothing is left");
    };
    let (model, adapter) = (model.to_str().unwrap(), adapter.to_str().unwrap());
    refused(&[], 2, &["--model"]);
    refused(&["--model", "bytes-tiny"], 2, &["`bytes-tiny` has no weights", "pass the directory"]);
    refused(&["--model", "nowhere"], 1, &["`nowhere` is not a model"]);
    refused(&["--model", model, "--merge"], 2, &["--merge", "--adapter DIR"]);
    refused(&["--model", model, "--adapter", "nowhere"], 1, &["adapter_config.json"]);
    refused(&["--model", model, "--dtype", "q8"], 2, &["q8", "bf16"]);
    // Adapters of a wider model, and adapters whose base is gone.
    let other = TempDir::new().unwrap();
    let train =
        "train --model bytes-tiny --lora 2 --steps 1 --batch 4 --context 32 --device-memory 64MiB --out";
    let run = other.path().join("run");
    says(&train.split_whitespace().chain(run.to_str()).collect::<Vec<_>>());
    let of_other = run.join("models/b4-lr3e-4-r2");
    let of_other = of_other.to_str().unwrap();
    refused(
        &["--model", model, "--adapter", of_other, "--merge"],
        1,
        &["`c_attn`", "expected some of q_proj"],
    );
    let gone = other.path().join("gone");
    fs::create_dir(&gone).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(Path::new(adapter).join(name), gone.join(name)).unwrap();
    }
    let mut config = json(&gone.join("adapter_config.json"));
    config["base_model_name_or_path"] = "no/such/base".into();
    fs::write(gone.join("adapter_config.json"), config.to_string()).unwrap();
    refused(&["--adapter", gone.to_str().unwrap(), "--merge"], 1, &["no/such/base", "--model BASE"]);
    // Weights that the type cannot hold end the export in its middle.
    fs::create_dir(&out).unwrap();
    fs::write(out.join("mine"), "").unwrap();
    let arguments = ["export", "--model", model, "--out", out.to_str().unwrap()];
    fails(&arguments, 2, &["is not empty"]);
    assert_eq!(text(&hydra(&arguments).output().unwrap().stdout), "");
}
