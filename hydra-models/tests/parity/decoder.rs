//! Llama, Mistral, Qwen2 and Qwen3.

use crate::reference::{Model, ids, reference};
use burn::tensor::Device;
use hydra_core::AnyTensor;
use hydra_models::decoder::{DecoderDir, DecoderWriter, chain, hf_name, logits};

const MODELS: [&str; 5] = ["llama_tiny", "llama3_tiny", "mistral_tiny", "qwen2_tiny", "qwen3_tiny"];

/// The existing reference models.
fn models() -> impl Iterator<Item = (Model, DecoderDir)> {
    MODELS.into_iter().filter_map(reference).map(|path| {
        let source = DecoderDir::open(&path).unwrap();
        (Model::new(path, chain(source.config(), Some(source.clone())).unwrap(), hf_name), source)
    })
}

#[test]
fn logits_equal_those_of_transformers() {
    for (model, source) in models() {
        let ids = ids(&model.path).to_device(&Device::flex().autodiff());
        let found = logits(source.config(), &model.chain, &|i| model.buffer(i), ids, &Device::flex());
        model.assert_logits(AnyTensor::from(found).into_host().as_f32());
    }
}

#[test]
fn loss_and_gradients_equal_those_of_transformers() {
    models().for_each(|(model, _)| model.assert_loss_and_gradients());
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    models().for_each(|(model, source)| model.assert_written_back(&DecoderWriter::from(&source)));
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    models().for_each(|(model, _)| model.assert_cuts_agree());
}
