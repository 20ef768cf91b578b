//! Tests of directories.

use super::super::testing::{ParamBuffers, config};
use super::super::*;
use super::super::{DecoderWriter, logits};
use crate::weights::CONFIG;
use crate::weights::{HEAD, INDEX, WEIGHTS};
use burn::tensor::{DType, Device};
use hydra_core::{AnyTensor, HostTensor, ModelWriter};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A directory with a model of seed 7, as the writer writes it.
fn written(keys: Value) -> (TempDir, ParamBuffers) {
    let (dir, config) = (TempDir::new().unwrap(), config(keys));
    let chain = chain(&config, None).unwrap();
    let buffers = ParamBuffers::of(&chain, 7);
    DecoderWriter::new(config).write(&chain, &buffers, dir.path()).unwrap();
    (dir, buffers)
}

fn load(dir: &Path) -> ParamBuffers {
    let source = DecoderDir::open(dir).unwrap();
    let chain = chain(&source.config().clone(), Some(source)).unwrap();
    ParamBuffers::of(&chain, 0)
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// The tensors of a written model, by name.
fn tensors(dir: &Path) -> Tensors {
    let bytes = fs::read(dir.join(WEIGHTS)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, TensorView)| (name, (view.shape().to_vec(), view.data().to_vec()));
    file.tensors().into_iter().map(tensor).collect()
}

fn save(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

/// The messages of the error of opening a directory, and of its source.
fn refusal(dir: &Path) -> String {
    hydra_core::with_causes(&DecoderDir::open(dir).unwrap_err())
}

#[test]
fn what_was_written_loads_to_the_same_bits() {
    let llama3 = json!({
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    });
    for keys in [
        json!({}),
        json!({"tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true}),
        json!({"rope_parameters": llama3, "head_dim": 6}),
        json!({"model_type": "mistral", "sliding_window": 5}),
        json!({"model_type": "qwen2", "use_sliding_window": true, "max_window_layers": 1}),
        json!({"model_type": "qwen3"}),
    ] {
        let (dir, buffers) = written(keys.clone());
        assert_eq!(load(dir.path()), buffers, "{keys}");
        let found = DecoderDir::open(dir.path()).unwrap().config().clone();
        let (other, head) = (found.other.clone(), found.head.clone());
        assert_eq!(found, DecoderConfig { other, head, ..config(keys) });
    }
}

#[test]
fn several_files_and_names_without_the_prefix_are_read() {
    let (dir, buffers) = written(json!({}));
    let mut halves = [BTreeMap::new(), BTreeMap::new()];
    for (i, (name, tensor)) in tensors(dir.path()).into_iter().enumerate() {
        halves[i % 2].insert(name.strip_prefix("model.").unwrap_or(&name).to_owned(), tensor);
    }
    // Extra tensors that an older checkpoint may hold.
    halves[0].insert("layers.0.self_attn.rotary_emb.inv_freq".to_owned(), (vec![2], vec![0; 8]));
    let mut weight_map = BTreeMap::new();
    for (i, half) in halves.iter().enumerate() {
        let file = format!("model-{i}.safetensors");
        save(&dir.path().join(&file), half);
        weight_map.extend(half.keys().map(|name| (name.clone(), file.clone())));
    }
    fs::remove_file(dir.path().join(WEIGHTS)).unwrap();
    fs::write(dir.path().join(INDEX), json!({"weight_map": weight_map}).to_string()).unwrap();
    assert_eq!(load(dir.path()), buffers);
    assert_eq!(DecoderDir::open(dir.path()).unwrap().files().count(), 2);
}

#[test]
fn a_head_is_there_where_it_is_not_tied_and_is_the_embedding_where_it_is() {
    let (dir, _) = written(json!({}));
    let (file, mut all) = (dir.path().join(WEIGHTS), tensors(dir.path()));
    all.remove(HEAD);
    save(&file, &all);
    assert!(refusal(dir.path()).contains("has no tensor `lm_head.weight`"));

    let (dir, buffers) = written(json!({"tie_word_embeddings": true}));
    let (file, mut all) = (dir.path().join(WEIGHTS), tensors(dir.path()));
    assert!(!all.contains_key(HEAD));
    all.insert(HEAD.to_owned(), all["model.embed_tokens.weight"].clone());
    save(&file, &all);
    assert_eq!(load(dir.path()), buffers);
    *all.get_mut(HEAD).unwrap().1.last_mut().unwrap() ^= 1;
    save(&file, &all);
    assert!(refusal(dir.path()).contains("`lm_head.weight` is different from `model.embed_tokens.weight`"));
}

#[test]
fn tensors_that_the_model_does_not_have_are_named() {
    let (dir, _) = written(json!({"model_type": "qwen2"}));
    let (file, good) = (dir.path().join(WEIGHTS), tensors(dir.path()));
    let with = |name: &str| {
        let mut more = good.clone();
        more.insert(name.to_owned(), (vec![1], vec![0; 4]));
        save(&file, &more);
        refusal(dir.path())
    };
    let more = with("model.layers.2.input_layernorm.weight");
    assert!(more.contains("`num_hidden_layers` is 2, expected 3"), "{more}");
    for name in ["model.layers.0.self_attn.q_norm.weight", "layers.1.self_attn.o_proj.bias"] {
        let unknown = with(name);
        assert!(unknown.contains(&format!("has the tensor `{name}`")), "{unknown}");
    }
}

#[test]
fn directories_that_hold_no_such_model_are_refused() {
    let (dir, _) = written(json!({}));
    let path = dir.path().join(CONFIG);
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    file["quantization_config"] = json!({"quant_method": "awq"});
    fs::write(&path, file.to_string()).unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("config.json") && error.contains("`quantization_config` is awq"), "{error}");
    fs::write(&path, "{").unwrap();
    assert!(matches!(DecoderDir::open(dir.path()), Err(ModelError::Json { .. })));
    fs::remove_file(&path).unwrap();
    assert!(matches!(DecoderDir::open(dir.path()), Err(ModelError::Read { .. })));
}

#[test]
fn logits_are_those_of_every_position() {
    let keys = json!({"model_type": "qwen3"});
    let (_, buffers) = written(keys.clone());
    let (config, device) = (config(keys), Device::flex());
    let chain = chain(&config, None).unwrap();
    let run = |last| {
        let ids = HostTensor::int(vec![1, 2, last], [1, 3]).to_device(&device);
        let buffer = |i: usize| buffers.0[i].clone().into();
        let logits = logits(&config, &chain, &buffer, ids, &device);
        assert_eq!((logits.dims(), logits.dtype()), ([1, 3, 11], DType::F32));
        AnyTensor::from(logits).into_host().as_f32().to_vec()
    };
    let (a, b) = (run(3), run(4));
    assert_eq!(a[..22], b[..22]);
    assert_ne!(a[22..], b[22..]);
}
