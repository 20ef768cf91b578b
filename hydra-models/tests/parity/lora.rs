//! Adapters, against PEFT.

use crate::reference::{Model, ids, reference, tensors};
use burn::tensor::Device;
use hydra_core::{AnyTensor, Chain, DeviceBytes, ModelWriter};
use hydra_models::decoder::{DecoderDir, hf_name, logits};
use hydra_models::family;
use hydra_models::lora::{AdapterDir, AdapterWriter, MergedWriter};
use hydra_models::weights::SavedType;
use std::path::Path;
use tempfile::TempDir;

/// PEFT's name of the gradient of an adapter parameter.
fn gradient_name(param: &str) -> String {
    let name = hf_name(param).replace(".lora.a.", ".lora_A.default.").replace(".lora.b.", ".lora_B.default.");
    format!("base_model.model.{name}")
}

fn base(path: &Path) -> Box<dyn family::Model> {
    family::load(path.join("base").to_str().unwrap()).unwrap()
}

/// The reference's base with its adapters, if they exist.
fn model() -> Option<(Model, AdapterDir)> {
    let path = reference("lora_tiny")?;
    let adapter = AdapterDir::open(path.join("adapter")).unwrap();
    let chain = base(&path).adapted(adapter.lora(), Some(adapter.clone())).unwrap();
    Some((Model::new(path, chain, gradient_name), adapter))
}

fn logits_of(path: &Path, chain: &Chain, buffer: &dyn Fn(usize) -> DeviceBytes) -> Vec<f32> {
    let config = DecoderDir::open(path.join("base")).unwrap().config().clone();
    let ids = ids(path).to_device(&Device::flex().autodiff());
    let found = logits(&config, chain, buffer, ids, &Device::flex());
    AnyTensor::from(found).into_host().as_f32().to_vec()
}

#[test]
fn logits_loss_and_gradients_equal_those_of_peft() {
    let Some((model, _)) = model() else { return };
    model.assert_logits(&logits_of(&model.path, &model.chain, &|buffer| model.buffer(buffer)));
    model.assert_loss_and_gradients();
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    if let Some((model, _)) = model() {
        model.assert_cuts_agree();
    }
}

#[test]
fn adapters_are_written_back_as_they_were() {
    let Some((model, adapter)) = model() else { return };
    let dir = TempDir::new().unwrap();
    let writer = AdapterWriter::new(base(&model.path).as_ref(), adapter.lora().clone());
    writer.write(&model.chain, &model.buffers(), dir.path()).unwrap();
    let weights = |dir: &Path| tensors(&dir.join("adapter_model.safetensors"));
    assert_eq!(weights(dir.path()), weights(&model.path.join("adapter")));
    let again = AdapterDir::open(dir.path()).unwrap();
    assert_eq!(again.lora(), adapter.lora());
    let json = |dir: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap()
    };
    let (written, peft) = (json(dir.path()), json(&model.path.join("adapter")));
    for key in ["peft_type", "r", "lora_alpha", "lora_dropout", "bias", "fan_in_fan_out", "task_type"] {
        assert_eq!(written[key], peft[key], "{key}");
    }
}

#[test]
fn a_merged_model_says_the_same() {
    let Some((model, adapter)) = model() else { return };
    let (dir, base) = (TempDir::new().unwrap(), base(&model.path));
    let writer = MergedWriter::new(base.as_ref(), adapter.lora().clone(), SavedType::F32).unwrap();
    writer.write(&model.chain, &model.buffers(), dir.path()).unwrap();
    let merged = family::load(dir.path().to_str().unwrap()).unwrap().chain().unwrap();
    let merged = Model::new(model.path.clone(), merged, hf_name);
    model.assert_logits(&logits_of(&model.path, &merged.chain, &|buffer| merged.buffer(buffer)));
    let plain = Model::new(model.path.clone(), base.chain().unwrap(), hf_name);
    let logits = |of: &Model| logits_of(&model.path, &of.chain, &|buffer| of.buffer(buffer));
    assert_ne!(logits(&plain), logits(&merged), "adapters say something");
}
