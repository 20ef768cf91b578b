//! Text encoders with classifiers. `hydra-bench/experiments/peers/make_encoders.py` made the reference models.

use crate::reference::{Model, reference};
use hydra_models::encoder::{EncoderDir, EncoderWriter, chain};

/// The reference models, each with the ending of the parameters whose gradients are rounding noise: a key bias adds the
/// same to all scores of a query.
const MODELS: [(&str, Option<&str>); 6] = [
    ("bert", Some("key.bias")),
    ("roberta", Some("key.bias")),
    ("xlm_roberta", Some("key.bias")),
    ("distilbert", Some("k_lin.bias")),
    ("modernbert", None),
    ("modernbert_first", None),
];

fn model(name: &str) -> (Model, EncoderDir) {
    let path = reference(&format!("encoder_{name}")).expect("it is in the repository");
    let source = EncoderDir::open(&path).unwrap_or_else(|e| panic!("{}", hydra_core::with_causes(&e)));
    let (chain, kind) = (chain(source.config(), Some(source.clone())).unwrap(), source.config().model_type);
    (Model::new(path, chain, kind.hf_name()), source)
}

#[test]
fn logits_equal_those_of_transformers_for_sequences_of_several_lengths() {
    for (name, _) in MODELS {
        let (model, _) = model(name);
        model.assert_logits_within(&model.class_logits(), 1e-5);
    }
}

#[test]
fn losses_and_gradients_equal_those_of_transformers() {
    for (name, noise) in MODELS {
        let (model, _) = model(name);
        match noise {
            Some(end) => model.assert_loss_and_gradients_but_nothing_for(end),
            None => model.assert_loss_and_gradients(),
        }
    }
}

#[test]
fn losses_of_training_equal_those_of_transformers() {
    MODELS.iter().for_each(|(name, _)| model(name).0.assert_trains());
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    for (name, _) in MODELS {
        let (model, source) = model(name);
        model.assert_written_back(&EncoderWriter::from(&source));
    }
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    MODELS.iter().for_each(|(name, _)| model(name).0.assert_cuts_agree());
}
