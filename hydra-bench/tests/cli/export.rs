//! Models exported for other programs: merged, in other types, in several files, as GGUF.

use crate::common::{Running, fails, hydra, interrupt, json, noted, says, spawn, text, wait_for};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
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
fn merged_adapters_keep_their_chat_template_and_their_base_is_compared() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    let own = root.path().join("own");
    fs::create_dir(&own).unwrap();
    for entry in fs::read_dir(adapter).unwrap().flatten() {
        fs::copy(entry.path(), own.join(entry.file_name())).unwrap();
    }
    fs::write(own.join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    let mut config = json(&own.join("adapter_config.json"));
    config["base_model_name_or_path"] = "org/another".into();
    fs::write(own.join("adapter_config.json"), config.to_string()).unwrap();
    let [model, own] = [model, &own].map(|path| path.display());
    let out = root.path().join("merged");
    let [_, notes] =
        noted(&format!("export --model {model} --adapter {own} --merge --out {}", out.display()));
    for expected in ["has adapters of another base, `org/another`", "tokenizer and chat template: those of"] {
        assert!(notes.contains(expected), "{notes}");
    }
    assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).unwrap(), "{{ messages[0].content }}");
    let generate = format!("generate --model {} --prompt a --chat --max-new-tokens 2 --json", out.display());
    assert_eq!(noted(&generate)[0].lines().count(), 1);
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

/// The parts of a GGUF file that tests compare.
struct Gguf {
    /// The values of texts, counts, numbers and truths as text, and the lengths of lists.
    metadata: BTreeMap<String, String>,
    /// The shape, the type and the bytes of each tensor.
    tensors: BTreeMap<String, (Vec<u64>, u32, Vec<u8>)>,
}

/// Reads numbers and texts from the start of a file.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: u64) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count as usize);
        self.0 = rest;
        bytes
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes(8).try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let length = self.u64();
        text(self.bytes(length))
    }

    fn value(&mut self, kind: u32) -> String {
        match kind {
            4 | 5 => self.u32().to_string(),
            6 => f32::from_bits(self.u32()).to_string(),
            7 => (self.bytes(1) == [1]).to_string(),
            8 => self.text(),
            9 => {
                let (kind, length) = (self.u32(), self.u64());
                (0..length).for_each(|_| drop(self.value(kind)));
                format!("{length} values")
            }
            kind => panic!("type {kind}"),
        }
    }
}

impl Gguf {
    fn read(path: &Path) -> Self {
        let file = fs::read(path).unwrap();
        let mut reader = Reader(&file);
        assert_eq!(reader.bytes(4), b"GGUF");
        assert_eq!(reader.u32(), 3);
        let (tensors, entries) = (reader.u64(), reader.u64());
        let metadata = (0..entries).map(|_| {
            let (key, kind) = (reader.text(), reader.u32());
            (key, reader.value(kind))
        });
        let metadata = metadata.collect();
        let info = |_| {
            let (name, dimensions) = (reader.text(), reader.u32());
            let shape: Vec<u64> = (0..dimensions).map(|_| reader.u64()).collect();
            (name, shape, reader.u32(), reader.u64())
        };
        let infos: Vec<_> = (0..tensors).map(info).collect();
        let start = (file.len() - reader.0.len()).next_multiple_of(32);
        let tensor = |(name, shape, kind, offset): (String, Vec<u64>, u32, u64)| {
            let values = shape.iter().product::<u64>() as usize;
            let bytes = match kind {
                0 => 4 * values,
                8 => values / 32 * 34,
                _ => 2 * values,
            };
            assert_eq!(offset % 32, 0);
            let from = start + offset as usize;
            (name, (shape, kind, file[from..from + bytes].to_vec()))
        };
        Self { metadata, tensors: infos.into_iter().map(tensor).collect() }
    }
}

/// The shapes and the bytes of the tensors of a safetensors file.
fn stored(path: &Path) -> BTreeMap<String, (Vec<u64>, Vec<u8>)> {
    let file = fs::read(path).unwrap();
    let data = 8 + Reader(&file).u64() as usize;
    let header: Value = serde_json::from_slice(&file[8..data]).unwrap();
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, info): (&String, &Value)| {
        let numbers = |key: &str| serde_json::from_value::<Vec<u64>>(info[key].clone()).unwrap();
        let place = numbers("data_offsets");
        let bytes = file[data + place[0] as usize..data + place[1] as usize].to_vec();
        (name.clone(), (numbers("shape"), bytes))
    };
    tensors.map(tensor).collect()
}

/// A disk that is full in the middle of an export leaves nothing, neither under the final name nor under another.
#[cfg(target_os = "linux")]
#[test]
fn an_export_to_a_full_disk_leaves_nothing() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    let given =
        ["export", "--model", model.to_str().unwrap(), "--adapter", adapter.to_str().unwrap(), "--merge"];
    for (name, more) in [("merged", &[][..]), ("merged.gguf", &["--format", "gguf"])] {
        let out = root.path().join(name);
        let output =
            crate::common::with_small_files(&[&given[..], more, &["--out", out.to_str().unwrap()]].concat());
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains("error: ") && err.contains("large"), "{err}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "{name}: {err}");
    }
}

/// Makes a copy of a Llama with matrices of 64 MiB, whose file has zeros that take no space on the disk.
#[cfg(unix)]
fn enlarged(model: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(model).unwrap().flatten() {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let mut config = json(&model.join("config.json"));
    let (small, large) = (config["intermediate_size"].clone(), Value::from(1 << 18));
    config["intermediate_size"] = large.clone();
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    let file = fs::read(model.join("model.safetensors")).unwrap();
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..end]).unwrap();
    let mut at = 0;
    for (name, tensor) in header.as_object_mut().unwrap() {
        let Some(shape) = tensor.get_mut("shape").and_then(Value::as_array_mut) else { continue };
        shape
            .iter_mut()
            .filter(|side| name.contains(".mlp.") && **side == small)
            .for_each(|side| *side = large.clone());
        let bytes = 4 * shape.iter().map(|side| side.as_u64().unwrap()).product::<u64>();
        tensor["data_offsets"] = serde_json::json!([at, at + bytes]);
        at += bytes;
    }
    let header = header.to_string();
    let path = to.join("model.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + at).unwrap();
}

#[cfg(unix)]
#[test]
fn an_interrupted_export_leaves_nothing() {
    let root = TempDir::new().unwrap();
    let (model, written) = (root.path().join("model"), root.path().join("written"));
    enlarged(&TRAINED.1, &model);
    for (name, format) in [("exported", "safetensors"), ("exported.gguf", "gguf")] {
        let out = written.join(name);
        fs::create_dir_all(&written).unwrap();
        let paths = ["--model", model.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let child = spawn(&[&["export", "--format", format][..], &paths].concat(), Stdio::piped());
        wait_for(|| written.join(format!("{name}.part")).exists());
        interrupt(&child);
        let output = Running::new(child).output();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{err}");
        assert!(err.contains(&format!("the export was interrupted: `{}` was not", out.display())), "{err}");
        assert_eq!(fs::read_dir(&written).unwrap().count(), 0, "{name}: {err}");
    }
}

#[test]
fn a_gguf_file_has_the_model_in_the_layout_of_llama_cpp() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    let written = |dtype: &str, more: &[&str]| {
        let out = root.path().join(format!("{dtype}{}.gguf", more.len()));
        let flags = ["--model", model.to_str().unwrap(), "--format", "gguf", "--dtype", dtype];
        export(&[&flags[..], more].concat(), &out);
        Gguf::read(&out)
    };
    let whole = written("f32", &[]);
    let key = |key: &str| whole.metadata[key].as_str();
    assert_eq!((key("general.architecture"), key("llama.block_count")), ("llama", "4"));
    assert_eq!((key("llama.attention.head_count"), key("llama.attention.head_count_kv")), ("4", "2"));
    assert_eq!((key("tokenizer.ggml.model"), key("tokenizer.ggml.tokens")), ("gpt2", "256 values"));
    assert_eq!((key("tokenizer.ggml.eos_token_id"), key("tokenizer.ggml.add_bos_token")), ("0", "false"));
    let stored = stored(&model.join("model.safetensors"));
    assert_eq!(whole.tensors.len(), stored.len());
    let same = |name: &str, theirs: &str| {
        let (shape, ours) = &stored[theirs];
        let shape: Vec<u64> = shape.iter().rev().copied().collect();
        let (found, kind, values) = &whole.tensors[name];
        assert_eq!((found, *kind), (&shape, 0), "{name}");
        assert!(values == ours, "{name}");
    };
    same("token_embd.weight", "model.embed_tokens.weight");
    same("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight");
    same("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight");
    same("output_norm.weight", "model.norm.weight");
    // The rows of a head of 16 alternate between its halves.
    let (_, _, values) = &whole.tensors["blk.0.attn_k.weight"];
    let (_, ours) = &stored["model.layers.0.self_attn.k_proj.weight"];
    let row = |bytes: &[u8], row: usize| bytes[row * 64 * 4..(row + 1) * 64 * 4].to_vec();
    for (place, of) in [(0, 0), (1, 8), (2, 1), (16, 16), (17, 24), (31, 31)] {
        assert!(row(values, place) == row(ours, of), "row {place}");
    }
    let small = written("q8_0", &[]);
    let kinds = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight"]
        .map(|name| small.tensors[name].1);
    assert_eq!(kinds, [8, 8, 0]);
    assert_eq!(small.metadata["general.file_type"], "7");
    // 176 inputs are no whole number of blocks.
    assert_eq!(small.tensors["blk.0.ffn_down.weight"].1, 1);
    let merged = written("f32", &["--adapter", adapter.to_str().unwrap(), "--merge"]);
    let changed = |name: &str| merged.tensors[name].2 != whole.tensors[name].2;
    assert!(
        changed("blk.0.attn_q.weight") && changed("blk.3.ffn_down.weight") && !changed("blk.0.attn_k.weight")
    );
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 3, "no part is left");
}

/// The values of a tensor of 32-bit floats in rows, and their length.
fn rows(file: &Gguf, name: &str) -> (Vec<f32>, usize) {
    let (shape, kind, bytes) = &file.tensors[name];
    assert_eq!(*kind, 0, "{name}");
    let values = bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap()));
    (values.collect(), shape[0] as usize)
}

#[test]
fn a_gguf_file_of_adapters_adds_what_a_merged_file_has() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    // Scales that differ: one alpha does not express them.
    let scaled = root.path().join("scaled");
    fs::create_dir(&scaled).unwrap();
    fs::copy(adapter.join("adapter_model.safetensors"), scaled.join("adapter_model.safetensors")).unwrap();
    let mut config = json(&adapter.join("adapter_config.json"));
    config["alpha_pattern"] = serde_json::json!({"down_proj": 3});
    fs::write(scaled.join("adapter_config.json"), config.to_string()).unwrap();
    for (name, adapter) in [("plain", adapter), ("scaled", &scaled)] {
        let written = |kind: &str, more: &[&str]| {
            let out = root.path().join(format!("{name}-{kind}.gguf"));
            let flags = ["--model", model.to_str().unwrap(), "--format", "gguf", "--dtype", "f32"];
            export(&[&flags[..], more].concat(), &out);
            Gguf::read(&out)
        };
        let with = ["--adapter", adapter.to_str().unwrap()];
        let (base, own) = (written("base", &[]), written("own", &with));
        let merged = written("merged", &[&with[..], &["--merge"]].concat());
        let key = |key: &str| own.metadata[key].as_str();
        assert_eq!((key("general.type"), key("general.architecture")), ("adapter", "llama"));
        assert_eq!((key("adapter.type"), own.tensors.len()), ("lora", 2 * 2 * 4));
        let alpha: f32 = key("adapter.lora.alpha").parse().unwrap();
        for name in ["blk.0.attn_q.weight", "blk.3.ffn_down.weight"] {
            let [(base, inputs), (merged, _)] = [&base, &merged].map(|file| rows(file, name));
            let (a, from) = rows(&own, &format!("{name}.lora_a"));
            let (b, rank) = rows(&own, &format!("{name}.lora_b"));
            assert_eq!((from, rank, b.len() / rank), (inputs, 4, base.len() / inputs));
            for (i, (base, merged)) in base.iter().zip(&merged).enumerate() {
                let (row, column) = (i / inputs, i % inputs);
                let product: f32 = (0..rank).map(|k| b[row * rank + k] * a[k * inputs + column]).sum();
                let sum = base + alpha / rank as f32 * product;
                assert!((sum - merged).abs() < 1e-6, "{name} {row} {column}: {sum} {merged}");
            }
            assert!(base != merged, "the adapters have an effect");
        }
    }
}

#[test]
fn what_a_gguf_file_cannot_hold_is_refused_by_name() {
    let (_, model, adapter, _) = &*TRAINED;
    let root = TempDir::new().unwrap();
    let other = TempDir::new().unwrap();
    let refused = |flags: &[&str], out: &str, status: i32, parts: &[&str]| {
        let out = root.path().join(out);
        fails(&[&["export"], flags, &["--out", out.to_str().unwrap()]].concat(), status, parts);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "nothing is left");
    };
    let (from, adapter) = (model.to_str().unwrap(), adapter.to_str().unwrap());
    let gguf = ["--model", from, "--format", "gguf"];
    refused(&gguf, "dir", 2, &["--out FILE.gguf"]);
    refused(&["--model", from], "a.gguf", 2, &["--format gguf"]);
    refused(&["--model", from, "--dtype", "q8_0"], "dir", 2, &["--dtype q8_0", "--format gguf"]);
    refused(&[&gguf[..], &["--max-shard-size", "1MB"]].concat(), "a.gguf", 2, &["--max-shard-size"]);
    let pissa = other.path().join("pissa");
    fs::create_dir(&pissa).unwrap();
    fs::copy(Path::new(adapter).join("adapter_model.safetensors"), pissa.join("adapter_model.safetensors"))
        .unwrap();
    let mut config = json(&Path::new(adapter).join("adapter_config.json"));
    config["init_lora_weights"] = "pissa".into();
    fs::write(pissa.join("adapter_config.json"), config.to_string()).unwrap();
    refused(
        &[&gguf[..], &["--adapter", pissa.to_str().unwrap()]].concat(),
        "a.gguf",
        1,
        &["PiSSA", "pass --merge"],
    );
    let copy = |name: &str, keys: Value| {
        let to = other.path().join(name);
        fs::create_dir(&to).unwrap();
        fs::copy(model.join("model.safetensors"), to.join("model.safetensors")).unwrap();
        let mut config = json(&model.join("config.json"));
        keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
        fs::write(to.join("config.json"), config.to_string()).unwrap();
        to.to_str().unwrap().to_owned()
    };
    let bare = copy("bare", serde_json::json!({}));
    refused(
        &["--model", &bare, "--format", "gguf"],
        "a.gguf",
        1,
        &["bare` has no tokenizer", "`tokenizer.json`"],
    );
    let classifier = other.path().join("classifier");
    let rows: String = (0..20).map(|i| format!("{{\"text\": \"{i}\", \"label\": {}}}\n", i % 2)).collect();
    let data = other.path().join("labels.jsonl");
    fs::write(&data, rows).unwrap();
    let train = "train --task classify --steps 1 --batch 4 --device-memory 64MiB --data";
    let paths = [data.to_str().unwrap(), "--out", classifier.to_str().unwrap()];
    assert!(
        hydra(&train.split_whitespace().chain(paths).collect::<Vec<_>>()).output().unwrap().status.success()
    );
    let trained = classifier.join("models/b4-lr3e-4");
    let flags = ["--model", trained.to_str().unwrap(), "--format", "gguf"];
    refused(&flags, "a.gguf", 1, &["a classifier", "--format safetensors"]);
}

#[test]
fn adapters_of_a_quantized_base_are_evaluated_predicted_and_merged_on_it() {
    let root = TempDir::new().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/preferences");
    let (model, data) = (fixtures.join("llama").display().to_string(), root.path().join("rows.jsonl"));
    let rows = (0..20).map(|i| format!("{{\"text\": \"Praise the film: it made me smile {i}\"}}\n"));
    fs::write(&data, rows.collect::<String>()).unwrap();
    let (data, out) = (data.display(), root.path().join("run"));
    let done = |command: String| {
        let output = hydra(&command.split_whitespace().collect::<Vec<_>>()).output().unwrap();
        let err = text(&output.stderr);
        assert!(output.status.success(), "{command}: {err}");
        (text(&output.stdout), err)
    };
    done(format!(
        "train --model {model} --base nf4 --lora 4 --data {data} --lr 1e-2 --batch 4 --steps 4 --context 32 --devices cpu:1x1 --out {}",
        out.display()
    ));
    let adapter = json(&out.join("report.json"))["tasks"][0]["model_dir"].as_str().unwrap().to_owned();
    let loss = |of: &str| {
        let (said, err) =
            done(format!("eval {of} --data {data} --context 32 --split train --devices cpu:1x1 --json"));
        (serde_json::from_str::<serde_json::Value>(&said).unwrap()["loss"].as_f64().unwrap(), err)
    };
    let (quantized, said) = loss(&format!("--model {model} --adapter {adapter}"));
    assert!(said.contains("trained on a base that was quantized to nf4"), "{said}");
    assert_eq!(loss(&format!("--model {model} --adapter {adapter} --base nf4")).0, quantized);
    let merged = root.path().join("merged");
    done(format!("export --model {model} --adapter {adapter} --merge --out {}", merged.display()));
    let whole = loss(&format!("--model {}", merged.display())).0;
    assert!((whole - quantized).abs() < 1e-6 * quantized, "{whole} for {quantized}");
    let (predicted, _) = done(format!(
        "predict --model {model} --adapter {adapter} --data {data} --context 32 --devices cpu:1x1"
    ));
    let figure = |row: &str, name: &str| {
        serde_json::from_str::<serde_json::Value>(row).unwrap()[name].as_f64().unwrap()
    };
    // The training split is the first sixteen rows.
    let sums = |name: &str| predicted.lines().take(16).map(|row| figure(row, name)).sum::<f64>();
    let mean = -sums("logprob") / sums("tokens");
    assert!((mean - quantized).abs() < 1e-5 * quantized, "{mean} for {quantized}");
    // It continues conversations as the merged model does, and to the same bits in shards.
    let chats = root.path().join("chats.jsonl");
    let chat = |said: &str| format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"{said}\"}}]}}\n");
    fs::write(&chats, ["Praise the film", "Praise a soup"].map(chat).concat()).unwrap();
    let generated = |of: &str| {
        let (said, _) =
            done(format!("generate {of} --prompts {} --max-new-tokens 8 --json", chats.display()));
        said.lines().map(|row| serde_json::from_str(row).unwrap()).collect::<Vec<serde_json::Value>>()
    };
    let adapted = format!("--model {model} --adapter {adapter}");
    let whole = generated(&format!("{adapted} --devices cpu:1x2"));
    let cut = generated(&format!("{adapted} --devices cpu:2x1 --device-memory 16MiB --cuts 1,2 --no-cache"));
    assert_eq!((&cut, whole.len()), (&whole, 2));
    assert!(whole[0]["prompt"].as_str().unwrap().contains("Praise the film"), "{}", whole[0]);
    for (one, other) in
        whole.iter().zip(generated(&format!("--model {} --devices cpu:1x2", merged.display())))
    {
        assert_eq!(one["token_ids"], other["token_ids"]);
        let [one, other] = [one, &other].map(|row| row["logprob"].as_f64().unwrap());
        assert!((one - other).abs() < 1e-4, "{one} for {other}");
    }
}
