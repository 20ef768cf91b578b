//! Models with a split vocabulary.

use crate::decoder::testing::{ParamBuffers, config};
use crate::decoder::{DecoderConfig, DecoderDir, DecoderWriter, chain};
use crate::synthetic::testing::{
    backward, bf16_agrees, ids_of_256, packed_ids_of_256, shards_agree, split_vocabulary_agrees, tensors_in,
};
use hydra_core::{Chain, ModelWriter};
use serde_json::json;
use tempfile::TempDir;

/// A model with a table of 256 rows in this many parts.
fn model(tied: bool, parts: usize) -> DecoderConfig {
    let whole = config(json!({
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "tie_word_embeddings": tied,
    }));
    DecoderConfig { vocabulary_parts: parts, ..whole }
}

/// A directory with the model of seed 7, written by a chain with this many parts.
fn written(tied: bool, parts: usize) -> TempDir {
    let (dir, config) = (TempDir::new().unwrap(), model(tied, parts));
    let chain = chain(&config, None).unwrap();
    DecoderWriter::new(config).write(&chain, &ParamBuffers::of(&chain, 7), dir.path()).unwrap();
    dir
}

fn read(dir: &TempDir, parts: usize) -> Chain {
    let source = DecoderDir::open(dir.path()).unwrap();
    let config = DecoderConfig { vocabulary_parts: parts, ..source.config().clone() };
    chain(&config, Some(source)).unwrap()
}

#[test]
fn a_cut_model_computes_what_the_whole_one_does() {
    for tied in [true, false] {
        let dir = written(tied, 1);
        let (whole, batch) = (backward(&read(&dir, 1), &ids_of_256()), ids_of_256());
        for parts in [2, 3, 7] {
            let cut = backward(&read(&dir, parts), &batch);
            assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0, "{} for {} in {parts}", cut.0, whole.0);
            // Gradients are in layer order: the tables' first, then the blocks', then the norm's and the tables'
            // again.
            let table = |from: usize, step: usize, of: &[Vec<f32>]| -> Vec<f32> {
                of.iter().skip(from).step_by(step).take(parts).flatten().copied().collect()
            };
            let blocks = whole.1.len() - 3;
            let close = |a: &[f32], b: &[f32], what: &str| {
                let (difference, size) = a.iter().zip(b).fold((0.0_f64, 0.0_f64), |(d, s), (a, b)| {
                    (d + f64::from(a - b).powi(2), s + f64::from(*b).powi(2))
                });
                assert_eq!(a.len(), b.len(), "{what}");
                assert!(difference.sqrt() <= 1e-5 * size.sqrt(), "{what} in {parts}: {difference} of {size}");
            };
            close(&table(0, 1, &cut.1), &whole.1[0], "the embedding");
            for block in 0..blocks {
                close(&cut.1[parts + block], &whole.1[1 + block], "a block");
            }
            close(&cut.1[parts + blocks], &whole.1[1 + blocks], "the norm");
            close(&table(parts + blocks + 1, 1, &cut.1), &whole.1[2 + blocks], "the head");
        }
    }
}

#[test]
fn bits_depend_neither_on_cuts_nor_on_threads() {
    for tied in [true, false] {
        split_vocabulary_agrees(&chain(&model(tied, 3), None).unwrap(), &ids_of_256());
    }
}

#[test]
fn several_examples_in_a_row_are_told_apart() {
    let packed = packed_ids_of_256();
    let dir = written(true, 1);
    let (whole, cut) = (backward(&read(&dir, 1), &packed), backward(&read(&dir, 3), &packed));
    assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0 && cut.0 != backward(&read(&dir, 3), &ids_of_256()).0);
    shards_agree(&read(&dir, 3), &packed, &[0, 1, 3, 6, 8]);
}

#[test]
fn it_computes_in_bf16() {
    bf16_agrees(|| chain(&model(false, 3), None).unwrap(), &ids_of_256(), &[0, 1, 4, 6, 8]);
}

#[test]
fn files_have_whole_tables_whatever_the_parts() {
    for tied in [true, false] {
        let whole = written(tied, 1);
        let again = TempDir::new().unwrap();
        let chain = read(&whole, 3);
        let writer = DecoderWriter::from(&DecoderDir::open(whole.path()).unwrap());
        writer.write(&chain, &ParamBuffers::of(&chain, 0), again.path()).unwrap();
        assert_eq!(tensors_in(again.path()), tensors_in(whole.path()));
        assert_eq!(ParamBuffers::of(&read(&again, 5), 0), ParamBuffers::of(&read(&whole, 5), 0));
    }
}

#[test]
fn an_impossible_number_of_parts_is_refused() {
    for parts in [0, 257] {
        let error = chain(&model(true, parts), None).unwrap_err().to_string();
        assert!(error.contains("vocabulary_parts") && error.contains("between 1 and"), "{error}");
    }
}
