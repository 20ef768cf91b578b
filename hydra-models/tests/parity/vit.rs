//! The vision transformer.

use crate::reference::{Model, batch, reference};
use burn::tensor::Device;
use hydra_core::AnyTensor;
use hydra_models::vit::{VitDir, VitWriter, chain, hf_name, logits};

/// The name in memory, by which transformers 5 calls gradients; files keep older ones.
fn name_in_memory(param: &str) -> String {
    let names = [
        ("vit.encoder.layer.", "vit.layers."),
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    ];
    names.iter().fold(hf_name(param), |name, (file, memory)| name.replace(file, memory))
}

/// The reference model, if it is there.
fn model() -> Option<(Model, VitDir)> {
    let path = reference("vit_tiny")?;
    let source = VitDir::open(&path).unwrap();
    Some((Model::new(path, chain(source.config(), Some(source.clone())).unwrap(), name_in_memory), source))
}

#[test]
fn logits_equal_those_of_transformers() {
    let Some((model, source)) = model() else { return };
    let [pictures, _] = batch(&model.path);
    let pictures = pictures.to_device(&Device::flex().autodiff());
    let found = logits(source.config(), &model.chain, &|i| model.image(i), pictures, &Device::flex());
    model.assert_logits(AnyTensor::from(found).into_host().as_f32());
}

#[test]
fn loss_and_gradients_equal_those_of_transformers() {
    let Some((model, _)) = model() else { return };
    // A bias adds the same to all scores of a query.
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
