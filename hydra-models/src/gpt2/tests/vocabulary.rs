//! Models with a split vocabulary.

use crate::gpt2::testing::ParamBuffers;
use crate::gpt2::{Gpt2Config, Gpt2Dir, Gpt2Writer, chain, hf_name};
use crate::synthetic::testing::{
    backward, bf16_agrees, ids_of_256, packed_ids_of_256, split_vocabulary_agrees, tensors_in,
};
use hydra_core::{Chain, ModelWriter};
use tempfile::TempDir;

/// A model with a table of 256 rows in this many parts.
fn model(parts: usize, dropout: f64) -> Gpt2Config {
    Gpt2Config {
        vocabulary_parts: parts,
        n_layer: 2,
        embd_pdrop: dropout,
        attn_pdrop: dropout,
        resid_pdrop: dropout,
        ..Gpt2Config::preset("bytes-tiny").unwrap()
    }
}

/// A directory with the model of seed 7, written by a chain with this many parts.
fn written(parts: usize) -> TempDir {
    let (dir, config) = (TempDir::new().unwrap(), model(parts, 0.0));
    let chain = chain(&config, None).unwrap();
    Gpt2Writer::new(config).write(&chain, &ParamBuffers::of(&chain, 7), dir.path()).unwrap();
    dir
}

fn read(dir: &TempDir, parts: usize) -> Chain {
    let source = Gpt2Dir::open(dir.path()).unwrap();
    let config = Gpt2Config { vocabulary_parts: parts, ..source.config().clone() };
    chain(&config, Some(source)).unwrap()
}

/// The gradients of all parameters, in the order of a file.
fn in_order(chain: &Chain, gradients: &[Vec<f32>]) -> Vec<(String, Vec<f32>)> {
    let refs = chain.layers().iter().flat_map(|layer| &layer.params).zip(gradients);
    let mut all: Vec<(String, Vec<f32>)> = Vec::new();
    // A table's gradients as embedding and as head.
    for (place, gradient) in refs {
        let param = &chain.buffers()[place.buffer].params[place.slot].name;
        let name = format!("{} {}", hf_name(param), all.len() > 4);
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.extend(gradient),
            None => all.push((name, gradient.clone())),
        }
    }
    all
}

#[test]
fn a_cut_model_computes_what_the_whole_one_does() {
    let dir = written(1);
    for batch in [ids_of_256(), packed_ids_of_256()] {
        let chain = read(&dir, 1);
        let whole = backward(&chain, &batch);
        let expected = in_order(&chain, &whole.1);
        for parts in [2, 3, 7] {
            let chain = read(&dir, parts);
            let cut = backward(&chain, &batch);
            assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0, "{} for {} in {parts}", cut.0, whole.0);
            let found = in_order(&chain, &cut.1);
            assert_eq!(found.len(), expected.len());
            for (name, expected) in &expected {
                let (_, found) = found.iter().find(|(known, _)| known == name).unwrap();
                let error = crate::ops::testing::distance(found, expected);
                // The gradient of a bias's key third is only rounding noise; it is a small part of the whole.
                assert!(error < 1e-5, "{name} in {parts}: {error}");
            }
        }
    }
    assert_ne!(backward(&read(&dir, 3), &ids_of_256()).0, backward(&read(&dir, 3), &packed_ids_of_256()).0);
}

#[test]
fn bits_depend_neither_on_cuts_nor_on_threads_with_dropout() {
    for batch in [ids_of_256(), packed_ids_of_256()] {
        split_vocabulary_agrees(&chain(&model(3, 0.1), None).unwrap(), &batch);
    }
}

#[test]
fn it_computes_in_bf16() {
    bf16_agrees(|| chain(&model(3, 0.1), None).unwrap(), &ids_of_256(), &[0, 1, 4, 6, 8]);
}

#[test]
fn files_have_whole_tables_whatever_the_parts() {
    let (whole, again) = (written(1), TempDir::new().unwrap());
    let writer = Gpt2Writer::from(&Gpt2Dir::open(whole.path()).unwrap());
    let chain = read(&whole, 3);
    writer.write(&chain, &ParamBuffers::of(&chain, 0), again.path()).unwrap();
    assert_eq!(tensors_in(again.path()), tensors_in(whole.path()));
    assert_eq!(ParamBuffers::of(&read(&again, 5), 0), ParamBuffers::of(&read(&whole, 5), 0));
}

#[test]
fn an_impossible_number_of_parts_is_refused() {
    for parts in [0, 257] {
        let error = chain(&model(parts, 0.0), None).unwrap_err().to_string();
        assert!(error.contains("vocabulary_parts") && error.contains("between 1 and"), "{error}");
    }
}
