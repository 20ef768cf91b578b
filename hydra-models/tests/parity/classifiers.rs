//! Sequence classifiers. `hydra-bench/experiments/peers/make_classifiers.py` made the reference models.

use crate::reference::{Model, reference};
use hydra_models::decoder;
use hydra_models::family::{self, Labels, TaskType};
use hydra_models::gpt2;
use hydra_models::objective::ProblemType;
use hydra_models::weights::SavedType;

const SINGLE: ProblemType = ProblemType::SingleLabelClassification;

/// The reference models, with what they were trained for and the number of outputs.
const MODELS: [(&str, ProblemType, usize); 5] = [
    ("gpt2", SINGLE, 3),
    ("llama", ProblemType::MultiLabelClassification, 3),
    ("mistral", ProblemType::Regression, 1),
    ("qwen2", SINGLE, 2),
    ("qwen3", ProblemType::Regression, 2),
];

/// Opens each reference model, cut into this many parts of the vocabulary, and calls `check`.
fn each(parts: usize, check: impl Fn(&str, Box<dyn family::Model>, Model)) {
    for (name, ..) in MODELS {
        let path = reference(&format!("classifier_{name}")).expect("it is in the repository");
        let mut model = family::load(path.to_str().unwrap()).unwrap();
        assert_eq!((model.task_type(), model.padding()), (TaskType::SequenceClassification, Some(1)));
        model.cut_vocabulary(parts).unwrap();
        let hf_name = if name == "gpt2" { gpt2::hf_name } else { decoder::hf_name };
        let chain = model.chain().unwrap();
        check(name, model, Model::new(path, chain, hf_name));
    }
}

#[test]
fn logits_equal_those_of_transformers_for_sequences_of_several_lengths() {
    each(1, |_, _, model| model.assert_logits_within(&model.class_logits(), 1e-5));
}

#[test]
fn losses_and_gradients_equal_those_of_transformers() {
    each(1, |_, _, model| model.assert_loss_and_gradients());
}

#[test]
fn losses_of_training_equal_those_of_transformers() {
    each(1, |_, _, model| model.assert_trains());
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    each(1, |_, family, model| model.assert_written_back(family.writer(SavedType::F32.into()).as_ref()));
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    each(1, |_, _, model| model.assert_cuts_agree());
}

#[test]
fn a_cut_vocabulary_has_the_same_loss() {
    each(3, |_, family, model| {
        model.assert_loss();
        model.assert_cuts_agree();
        model.assert_written_back(family.writer(SavedType::F32.into()).as_ref());
    });
}

#[test]
fn a_trained_head_keeps_its_labels_and_refuses_others() {
    for (name, problem, outputs) in MODELS {
        let path = reference(&format!("classifier_{name}")).expect("it is in the repository");
        let mut model = family::load(path.to_str().unwrap()).unwrap();
        let mut names: Vec<String> = (0..outputs).map(|class| format!("LABEL_{class}")).collect();
        if name == "gpt2" {
            names = ["cat", "dog", "owl"].map(str::to_owned).into();
        }
        let expected = if name == "gpt2" { vec![1, 2, 0] } else { (0..outputs as i32).collect() };
        assert_eq!(model.classify(&Labels { problem, names: names.clone() }).unwrap(), expected, "{name}");
        assert!(model.notes().is_empty(), "{name}: {:?}", model.notes());
        let chain = model.chain().unwrap();
        Model::new(path, chain, |name| name.to_owned()).assert_loss();
        names.push("new".to_owned());
        let error = model.classify(&Labels { problem, names: names.clone() }).unwrap_err().to_string();
        assert!(error.contains(&format!("classifier_{name}")) && error.contains("new"), "{error}");
        let other = if problem == SINGLE { ProblemType::Regression } else { SINGLE };
        let error = model.classify(&Labels { problem: other, names }).unwrap_err().to_string();
        assert!(error.starts_with("`problem_type` is ") && error.contains("which the labels"), "{error}");
    }
}
