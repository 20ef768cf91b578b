//! ResNet. The reference models in the repository were made by `hydra-bench/experiments/peers/make_resnets.py`.

use crate::reference::{Model, reference};
use hydra_models::resnet::{ResNetDir, ResNetWriter, chain, hf_name};

fn models() -> [(Model, ResNetDir); 2] {
    ["resnet_basic", "resnet_bottleneck"].map(|name| {
        let path = reference(name).expect("it is in the repository");
        let source = ResNetDir::open(&path).unwrap();
        (Model::new(path, chain(source.config(), Some(source.clone())).unwrap(), hf_name), source)
    })
}

#[test]
fn logits_by_the_running_statistics_equal_those_of_transformers() {
    models().iter().for_each(|(model, _)| model.assert_logits(&model.class_logits()));
}

#[test]
fn loss_gradients_and_the_statistics_of_a_batch_equal_those_of_transformers() {
    models().iter().for_each(|(model, _)| model.assert_loss_and_gradients());
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    models().iter().for_each(|(model, source)| model.assert_written_back(&ResNetWriter::from(source)));
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    models().iter().for_each(|(model, _)| model.assert_cuts_agree());
}
