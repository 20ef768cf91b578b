//! ConvNeXt. The reference model in the repository was made by `hydra-bench/experiments/peers/make_images.py`.

use crate::reference::{Model, reference};
use hydra_models::convnext::{ConvNextDir, ConvNextWriter, chain, hf_name};

fn model() -> (Model, ConvNextDir) {
    let path = reference("convnext_tiny").expect("it is in the repository");
    let source = ConvNextDir::open(&path).unwrap();
    (Model::new(path, chain(source.config(), Some(source.clone())).unwrap(), hf_name), source)
}

#[test]
fn logits_equal_those_of_transformers() {
    let (model, _) = model();
    model.assert_logits(&model.class_logits());
}

#[test]
fn loss_and_gradients_equal_those_of_transformers() {
    model().0.assert_loss_and_gradients();
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    let (model, source) = model();
    model.assert_written_back(&ConvNextWriter::from(&source));
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    model().0.assert_cuts_agree();
}
