//! The vision transformer.

use crate::reference::{Model, reference};
use hydra_core::ModelWriter;
use hydra_models::family;
use hydra_models::lora::{AdapterDir, AdapterWriter, MergedWriter};
use hydra_models::vit::{VitDir, VitWriter, chain, module_name};
use hydra_models::weights::SavedType;
use tempfile::TempDir;

/// The reference model, if it exists.
fn model() -> Option<(Model, VitDir)> {
    let path = reference("vit_tiny")?;
    let source = VitDir::open(&path).unwrap();
    Some((Model::new(path, chain(source.config(), Some(source.clone())).unwrap(), module_name), source))
}

#[test]
fn logits_equal_those_of_transformers() {
    let Some((model, _)) = model() else { return };
    model.assert_logits(&model.class_logits());
}

#[test]
fn loss_and_gradients_equal_those_of_transformers() {
    let Some((model, _)) = model() else { return };
    // A key bias adds the same to all scores of a query.
    model.assert_loss_and_gradients_but_nothing_for("k_proj.bias");
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    let Some((model, source)) = model() else { return };
    model.assert_written_back(&VitWriter::from(&source));
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    let Some((model, _)) = model() else { return };
    model.assert_cuts_agree();
}

/// PEFT's name of the gradient of an adapter parameter.
fn gradient_name(param: &str) -> String {
    let name = module_name(param).replace(".lora.a.", ".lora_A.default.");
    format!("base_model.model.{}", name.replace(".lora.b.", ".lora_B.default."))
}

/// The reference adapters in the repository, made by `hydra-bench/experiments/peers/make_images.py`.
fn adapted() -> (Model, Box<dyn family::Model>, AdapterDir) {
    let path = reference("vit_lora_tiny").expect("it is in the repository");
    let base = family::load(path.join("base").to_str().unwrap()).unwrap();
    let adapter = AdapterDir::open(path.join("adapter")).unwrap();
    let chain = base.adapted(adapter.lora(), Some(adapter.clone())).unwrap();
    (Model::new(path, chain, gradient_name), base, adapter)
}

#[test]
fn logits_loss_and_gradients_of_adapters_equal_those_of_peft() {
    let (model, ..) = adapted();
    model.assert_logits(&model.class_logits());
    model.assert_loss_and_gradients();
    model.assert_cuts_agree();
}

#[test]
fn adapters_of_peft_are_written_back_as_they_were_and_merged() {
    let (model, base, adapter) = adapted();
    let dir = TempDir::new().unwrap();
    let writer = AdapterWriter::new(base.as_ref(), adapter.lora().clone());
    writer.write(&model.chain, &model.buffers(), dir.path()).unwrap();
    let bytes = |dir: &std::path::Path| crate::reference::tensors(&dir.join("adapter_model.safetensors"));
    assert_eq!(bytes(dir.path()), bytes(&model.path.join("adapter")));
    assert_eq!(AdapterDir::open(dir.path()).unwrap().lora(), adapter.lora());
    let merged = MergedWriter::new(base.as_ref(), adapter.lora().clone(), SavedType::F32).unwrap();
    merged.write(&model.chain, &model.buffers(), &dir.path().join("whole")).unwrap();
    let whole = VitDir::open(dir.path().join("whole")).unwrap();
    let whole =
        Model::new(model.path.clone(), chain(whole.config(), Some(whole.clone())).unwrap(), module_name);
    whole.assert_logits(&whole.class_logits());
}
