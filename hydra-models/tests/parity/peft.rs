//! Every supported kind of adapter, against PEFT. `tests/fixtures/peft/make_adapters.py` made the fixtures.

use crate::reference::{Model, tensors};
use hydra_core::{Chain, ModelWriter};
use hydra_models::encoder::ModelType;
use hydra_models::family;
use hydra_models::lora::{AdapterDir, AdapterWriter, MergedWriter};
use hydra_models::weights::{SavedType, StoredWeights};
use hydra_models::{decoder, gpt2, vit};
use safetensors::SafeTensors;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Adapters that can be loaded and evaluated, but not trained.
const NOT_TRAINED: [&str; 3] = ["llama-tokens", "qwen2-tokens", "qwen2-shared-saved"];
/// Adapters that cannot be merged: a GPT-2 with a separate head table cannot be written, and modules without a bias
/// cannot get one.
const NOT_MERGED: [&str; 2] = ["gpt2-head-saved", "gpt2-table-saved"];

struct Case {
    name: String,
    path: PathBuf,
    base: Box<dyn family::Model>,
    adapter: AdapterDir,
}

fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/peft");
    let folders = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = folders.filter(|path| path.join("adapter_config.json").is_file()).collect();
    paths.sort();
    let case = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let kind = name.split('-').next().unwrap();
        let base = family::load(folder.join("bases").join(kind).to_str().unwrap()).unwrap();
        Case { adapter: AdapterDir::open(&path).unwrap(), name, path, base }
    };
    paths.into_iter().map(case).collect()
}

fn adapters(name: &str) -> String {
    format!("base_model.model.{}", name.replace(".lora.a.", ".lora_A.").replace(".lora.b.", ".lora_B."))
}

/// The names of gradients in the fixtures, by the kind of a case.
pub fn gradient_name(case: &str) -> fn(&str) -> String {
    match case.split('-').next() {
        Some("gpt2" | "gpt2_classifier") => |param| adapters(&gpt2::hf_name(param)),
        Some("vit") => |param| adapters(&vit::module_name(param)),
        Some("bert") => |param| adapters(&ModelType::Bert.hf_name()(param)),
        Some("roberta") => |param| adapters(&ModelType::Roberta.hf_name()(param)),
        Some("distilbert") => |param| adapters(&ModelType::DistilBert.hf_name()(param)),
        Some("modernbert") => |param| adapters(&ModelType::ModernBert.hf_name()(param)),
        _ => |param| adapters(&decoder::hf_name(param)),
    }
}

impl Case {
    fn model(&self) -> Model {
        let chain = self.base.adapted(self.adapter.lora(), Some(self.adapter.clone()));
        let chain =
            chain.unwrap_or_else(|error| panic!("{}: {}", self.name, hydra_core::with_causes(&error)));
        Model::new(self.path.clone(), chain, gradient_name(&self.name))
    }
}

#[test]
fn losses_and_gradients_are_those_of_peft() {
    for case in cases() {
        let (model, plan) = (case.model(), case.base.plan(case.adapter.lora()).unwrap());
        model.assert_loss();
        // PEFT decomposes weights in f32, and trains single rows of tables.
        match case.name.as_str() {
            name if name.ends_with("-tokens") => {}
            name if name.contains("pissa") || name.contains("olora") => {
                model.assert_loss_and_gradients_within(3e-4)
            }
            _ => model.assert_loss_and_gradients(),
        }
        model.assert_cuts_agree();
        assert_eq!(
            plan.check_trainable().is_err(),
            NOT_TRAINED.contains(&case.name.as_str()),
            "{}",
            case.name
        );
    }
}

#[test]
fn losses_of_training_classifiers_are_those_of_peft() {
    let has_losses = |case: &Case| case.path.join("train.json").is_file();
    let trained = cases().into_iter().filter(has_losses).map(|case| {
        case.model().assert_trains();
        case.name
    });
    let expected = [
        "bert-all-linear",
        "bert-classifier",
        "classifier-all-linear",
        "classifier-saved",
        "distilbert-classifier",
        "gpt2_classifier-saved",
        "llama_classifier-saved",
        "modernbert-classifier",
        "roberta-classifier",
    ];
    assert_eq!(trained.collect::<Vec<_>>(), expected);
}

#[test]
fn adapters_are_written_back_as_peft_wrote_them() {
    let json = |dir: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap()
    };
    for case in cases().iter().filter(|case| !NOT_TRAINED.contains(&case.name.as_str())) {
        let (model, dir) = (case.model(), TempDir::new().unwrap());
        let writer = AdapterWriter::new(case.base.as_ref(), case.adapter.lora().clone()).after(&case.adapter);
        writer.write(&model.chain, &model.buffers(), dir.path()).unwrap();
        if case.name != "llama-bf16" {
            assert_same(&case.name, dir.path(), &case.path);
        }
        let (written, peft) = (json(dir.path()), json(&case.path));
        for (key, value) in peft.as_object().unwrap() {
            let same = match key.as_str() {
                "base_model_name_or_path" | "fan_in_fan_out" => continue,
                "target_modules" if value.is_array() => sorted(&written[key]) == sorted(value),
                "layers_pattern" if value.is_string() => written[key] == serde_json::json!([value]),
                _ => {
                    written[key] == *value
                        || *value == serde_json::json!([])
                        || as_number(&written[key], value)
                }
            };
            assert!(same, "{}: `{key}` is {}, expected {value}", case.name, written[key]);
        }
        let again = AdapterDir::open(dir.path()).unwrap();
        assert_eq!(again.lora(), case.adapter.lora(), "{}", case.name);
        let read = case.base.adapted(again.lora(), Some(again.clone())).unwrap();
        Model::new(case.path.clone(), read, gradient_name(&case.name)).assert_loss();
    }
}

/// Asserts that a directory has the tensors that PEFT wrote; a table shared by embedding and head is stored once.
fn assert_same(name: &str, found: &Path, peft: &Path) {
    let values = |dir: &Path| tensors(&dir.join("adapter_model.safetensors"));
    let (found, mut peft) = (values(found), values(peft));
    if name == "qwen2-embeddings" {
        peft.remove("base_model.model.lm_head.weight");
    }
    assert!(found.keys().eq(peft.keys()), "{name}: {:?}", found.keys());
    found.iter().for_each(|(tensor, values)| assert!(*values == peft[tensor], "{name}: {tensor}"));
}

fn sorted(value: &Value) -> Vec<String> {
    let mut names: Vec<String> = value.as_array().unwrap().iter().map(Value::to_string).collect();
    names.sort();
    names
}

fn as_number(a: &Value, b: &Value) -> bool {
    a.as_f64().is_some() && a.as_f64() == b.as_f64()
}

#[test]
fn a_cut_vocabulary_makes_the_same_of_saved_tables() {
    let tables = ["saved", "tokens", "embeddings"];
    let has_table =
        |case: &Case| tables.iter().any(|table| case.name.contains(table)) && !case.name.starts_with("vit");
    for mut case in cases().into_iter().filter(has_table) {
        case.base.cut_vocabulary(3).unwrap();
        let (model, dir) = (case.model(), TempDir::new().unwrap());
        model.assert_loss();
        if NOT_TRAINED.contains(&case.name.as_str()) {
            continue;
        }
        let writer = AdapterWriter::new(case.base.as_ref(), case.adapter.lora().clone()).after(&case.adapter);
        writer.write(&model.chain, &model.buffers(), dir.path()).unwrap();
        assert_same(&case.name, dir.path(), &case.path);
    }
}

#[test]
fn merged_models_have_the_same_loss() {
    for case in cases() {
        let (model, dir) = (case.model(), TempDir::new().unwrap());
        let writer = MergedWriter::new(case.base.as_ref(), case.adapter.lora().clone(), SavedType::F32);
        assert_eq!(writer.is_err(), NOT_MERGED.contains(&case.name.as_str()), "{}", case.name);
        let Ok(writer) = writer else { continue };
        writer.write(&model.chain, &model.buffers(), dir.path()).unwrap();
        let merged = family::load(dir.path().to_str().unwrap()).unwrap().chain().unwrap();
        Model::new(case.path.clone(), merged, gradient_name(&case.name)).assert_loss();
    }
}

/// Writes the initial weights of a chain.
fn write(chain: &Chain, writer: &dyn ModelWriter, dir: &Path) {
    writer.write(chain, &StoredWeights::new(chain, 0), dir).unwrap();
}

/// The sha256 of tensors, by case, type of the base, and tensor.
type Merged = BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>>;

#[test]
fn merged_weights_have_the_bits_of_peft() {
    let merged: Merged = serde_json::from_str(include_str!("../fixtures/peft/merged.json")).unwrap();
    let cases: Vec<Case> = cases().into_iter().filter(|case| merged.contains_key(&case.name)).collect();
    assert_eq!(cases.len(), merged.len());
    for (case, (dtype, saved)) in cases
        .iter()
        .flat_map(|case| [("float32", SavedType::F32), ("bfloat16", SavedType::Bf16)].map(|of| (case, of)))
    {
        let (dir, out) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write(&case.base.chain().unwrap(), case.base.writer(saved.into()).as_ref(), dir.path());
        let base = family::load(dir.path().to_str().unwrap()).unwrap();
        let lora = case.adapter.lora();
        let chain = base.adapted(lora, Some(case.adapter.clone())).unwrap();
        let writer = MergedWriter::new(base.as_ref(), lora.clone(), saved).unwrap();
        write(&chain, &writer, out.path());
        let bytes = std::fs::read(out.path().join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (name, expected) in &merged[&case.name][dtype] {
            let found = format!("{:x}", Sha256::digest(file.tensor(name).unwrap().data()));
            assert_eq!(found, *expected, "{} {dtype}: {name}", case.name);
        }
    }
}
