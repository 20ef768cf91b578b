//! Tests of directories.

use super::super::testing::{ParamBuffers, config};
use super::super::*;
use super::super::{Gpt2Writer, logits};
use crate::weights::{CONFIG, HEAD, INDEX, WEIGHTS};
use burn::tensor::DType;
use half::{bf16, f16};
use hydra_core::{AnyTensor, FloatType, HostTensor, ModelWriter, WeightError};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A directory with a model of seed 7, as the writer writes it.
fn written() -> (TempDir, ParamBuffers) {
    let dir = TempDir::new().unwrap();
    let chain = chain(&config(), None).unwrap();
    let buffers = ParamBuffers::of(&chain, 7);
    Gpt2Writer::new(config()).write(&chain, &buffers, dir.path()).unwrap();
    (dir, buffers)
}

fn load(dir: &Path) -> ParamBuffers {
    let source = Gpt2Dir::open(dir).unwrap();
    let chain = chain(&source.config().clone(), Some(source)).unwrap();
    ParamBuffers::of(&chain, 0)
}

/// The values of every tensor of a written model, by name.
fn tensors(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(dir.join(WEIGHTS)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, TensorView)| {
        (name, (view.shape().to_vec(), bytemuck::pod_collect_to_vec(view.data())))
    };
    file.tensors().into_iter().map(tensor).collect()
}

type Converted = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn save(path: &Path, dtype: Dtype, tensors: &Converted) {
    let views = tensors
        .iter()
        .map(|(name, (shape, bytes))| (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

fn converted(dir: &Path, convert: impl Fn(f32) -> Vec<u8>) -> Converted {
    let bytes = |values: Vec<f32>| values.into_iter().flat_map(&convert).collect();
    tensors(dir).into_iter().map(|(name, (shape, values))| (name, (shape, bytes(values)))).collect()
}

fn f32_bytes(dir: &Path) -> Converted {
    converted(dir, |x| x.to_le_bytes().to_vec())
}

fn refusal(dir: &Path) -> String {
    Gpt2Dir::open(dir).unwrap_err().to_string()
}

#[test]
fn what_was_written_loads_to_the_same_bits() {
    let (dir, buffers) = written();
    assert_eq!(load(dir.path()), buffers);
}

#[test]
fn half_precision_files_are_read() {
    let (dir, buffers) = written();
    let round = |buffers: &ParamBuffers, round: fn(f32) -> f32| -> Vec<Vec<f32>> {
        let buffer =
            |bytes: &bytes::Bytes| bytemuck::pod_collect_to_vec(bytes).into_iter().map(round).collect();
        buffers.0.iter().map(buffer).collect()
    };
    type Half = (Dtype, fn(f32) -> Vec<u8>, fn(f32) -> f32);
    let halves: [Half; 2] = [
        (Dtype::F16, |x| f16::from_f32(x).to_le_bytes().to_vec(), |x| f16::from_f32(x).to_f32()),
        (Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes().to_vec(), |x| bf16::from_f32(x).to_f32()),
    ];
    let file = dir.path().join(WEIGHTS);
    let original = fs::read(&file).unwrap();
    for (dtype, convert, rounded) in halves {
        fs::write(&file, &original).unwrap();
        save(&file, dtype, &converted(dir.path(), convert));
        assert_eq!(round(&load(dir.path()), |x| x), round(&buffers, rounded));
    }
}

#[test]
fn several_files_and_names_without_the_prefix_are_read() {
    let (dir, buffers) = written();
    let mut halves = [BTreeMap::new(), BTreeMap::new()];
    let mut weight_map = BTreeMap::new();
    for (i, (name, tensor)) in f32_bytes(dir.path()).into_iter().enumerate() {
        let name = name.strip_prefix("transformer.").unwrap().to_owned();
        weight_map.insert(name.clone(), format!("part-{}.safetensors", i % 2));
        halves[i % 2].insert(name, tensor);
    }
    // Extra tensors that a checkpoint may hold.
    halves[0].insert("h.0.attn.bias".to_owned(), (vec![1, 1, 2, 2], vec![0; 16]));
    for (i, half) in halves.iter().enumerate() {
        save(&dir.path().join(format!("part-{i}.safetensors")), Dtype::F32, half);
    }
    fs::remove_file(dir.path().join(WEIGHTS)).unwrap();
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
    fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
    assert_eq!(load(dir.path()), buffers);

    fs::remove_file(dir.path().join("part-1.safetensors")).unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("lists the file `part-1.safetensors`"), "{error}");
    let index = serde_json::json!({"weight_map": {"wte.weight": "../part-0.safetensors"}});
    fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
    assert!(refusal(dir.path()).contains("lists the file `../part-0.safetensors`"));
}

fn reason(dir: &Path) -> String {
    std::error::Error::source(&Gpt2Dir::open(dir).unwrap_err()).unwrap().to_string()
}

#[test]
fn weights_of_more_blocks_than_the_configuration_are_refused() {
    let (dir, _) = written();
    let (file, good) = (dir.path().join(WEIGHTS), f32_bytes(dir.path()));
    let layers = config().n_layer;
    for prefix in ["transformer.", ""] {
        let mut more = good.clone();
        for block in [layers + 1, layers] {
            more.insert(format!("{prefix}h.{block}.ln_1.bias"), (vec![1], vec![0; 4]));
        }
        save(&file, Dtype::F32, &more);
        assert!(refusal(dir.path()).contains("config.json"));
        let (reason, tensor) = (reason(dir.path()), format!("`{prefix}h.{layers}.ln_1.bias`"));
        let expected = format!("`n_layer` is {layers}, expected {}", layers + 2);
        assert!(reason.contains(&expected) && reason.contains(&tensor), "{reason}");
    }
    save(&file, Dtype::F32, &good);
    Gpt2Dir::open(dir.path()).unwrap();
}

#[test]
fn a_stored_head_must_be_the_embedding() {
    let (dir, buffers) = written();
    let (file, mut tensors) = (dir.path().join(WEIGHTS), f32_bytes(dir.path()));
    tensors.insert(HEAD.to_owned(), tensors["transformer.wte.weight"].clone());
    save(&file, Dtype::F32, &tensors);
    assert_eq!(load(dir.path()), buffers);
    *tensors.get_mut(HEAD).unwrap().1.last_mut().unwrap() ^= 1;
    save(&file, Dtype::F32, &tensors);
    assert!(reason(dir.path()).contains("`lm_head.weight` is different from `transformer.wte.weight`"));
    // As in a model whose head alone was extended with ids.
    let (shape, mut bytes) = tensors["transformer.wte.weight"].clone();
    bytes.resize(bytes.len() + 4 * shape[1], 0);
    tensors.insert(HEAD.to_owned(), (vec![shape[0] + 1, shape[1]], bytes));
    save(&file, Dtype::F32, &tensors);
    assert!(reason(dir.path()).contains("`lm_head.weight` is different from `transformer.wte.weight`"));
}

#[test]
fn a_tensor_that_is_there_twice_is_refused() {
    let (dir, _) = written();
    let (file, name, bare) = (dir.path().join(WEIGHTS), "transformer.ln_f.bias", "ln_f.bias");
    let mut tensors = f32_bytes(dir.path());
    tensors.insert(bare.to_owned(), tensors[name].clone());
    save(&file, Dtype::F32, &tensors);
    let error = refusal(dir.path());
    assert!(error.contains(&format!("has `{name}`")) && error.contains(&format!("has `{bare}`")), "{error}");

    tensors.remove(bare);
    let twice = BTreeMap::from([(name.to_owned(), tensors[name].clone())]);
    save(&dir.path().join("a.safetensors"), Dtype::F32, &tensors);
    save(&dir.path().join("b.safetensors"), Dtype::F32, &twice);
    fs::remove_file(file).unwrap();
    let index = serde_json::json!({"weight_map": {"x": "a.safetensors", name: "b.safetensors"}});
    fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("a.safetensors") && error.contains("b.safetensors"), "{error}");
}

#[test]
fn damaged_files_are_named() {
    let (dir, _) = written();
    let file = dir.path().join(WEIGHTS);
    let whole = fs::read(&file).unwrap();
    let huge = [&u64::MAX.to_le_bytes(), &whole[8..]].concat();
    let broken = [&whole[..8], b"[", &whole[9..]].concat();
    let longer = [&whole[..], &[0]].concat();
    let cases = [
        (whole[..whole.len() - 1].to_vec(), "is damaged: it has"),
        (longer, "is damaged: it has"),
        (whole[..100].to_vec(), "is damaged: it has 100 bytes"),
        (whole[..3].to_vec(), "is damaged: it has 3 bytes"),
        (Vec::new(), "is damaged: it has 0 bytes"),
        (huge, "is not a safetensors file"),
        (broken, "is not a safetensors file"),
    ];
    for (bytes, message) in cases {
        fs::write(&file, bytes).unwrap();
        let error = refusal(dir.path());
        assert!(error.contains("model.safetensors`") && error.contains(message), "{error}");
    }
}

#[test]
fn a_file_that_is_cut_after_it_was_opened_is_an_error() {
    let (dir, _) = written();
    let source = Gpt2Dir::open(dir.path()).unwrap();
    let chain = chain(&config(), Some(source)).unwrap();
    fs::File::options().write(true).open(dir.path().join(WEIGHTS)).unwrap().set_len(4000).unwrap();
    let last = chain.buffers().len() - 1;
    let mut out = vec![0.0; chain.buffers()[last].elements];
    let error = chain.source().fill(&chain, last, 0, &mut out).unwrap_err();
    assert!(matches!(error, WeightError::Read { .. }), "{error}");
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let (dir, _) = written();
    let file = dir.path().join(WEIGHTS);
    let name = "transformer.h.1.mlp.c_fc.bias";
    let good = f32_bytes(dir.path());

    let mut missing = good.clone();
    missing.remove(name);
    save(&file, Dtype::F32, &missing);
    assert!(refusal(dir.path()).contains(&format!("has no tensor `{name}`")));

    let mut reshaped = good.clone();
    reshaped.get_mut(name).unwrap().0 = vec![4, 4];
    save(&file, Dtype::F32, &reshaped);
    let expected = format!("tensor `{name}` has shape [4, 4], expected [16]");
    assert!(refusal(dir.path()).contains(&expected));

    save(&file, Dtype::I32, &good);
    assert!(refusal(dir.path()).contains("has type I32, expected F32, F16 or BF16"));
}

#[test]
fn directories_that_hold_no_such_model_are_refused() {
    let (dir, _) = written();
    fs::remove_file(dir.path().join(WEIGHTS)).unwrap();
    assert!(refusal(dir.path()).contains("has no weights: expected model.safetensors or"));
    let config = dir.path().join(CONFIG);
    fs::write(&config, r#"{"model_type": "llama"}"#).unwrap();
    assert_eq!(reason(dir.path()), "`model_type` is llama, expected gpt2");
    fs::write(&config, "{").unwrap();
    assert!(matches!(Gpt2Dir::open(dir.path()), Err(ModelError::Json { .. })));
    fs::remove_file(&config).unwrap();
    assert!(matches!(Gpt2Dir::open(dir.path()), Err(ModelError::Read { .. })));
}

#[test]
fn a_chain_of_another_shape_is_refused() {
    let (dir, _) = written();
    let source = Gpt2Dir::open(dir.path()).unwrap();
    let wider = chain(&Gpt2Config { n_embd: 8, ..config() }, Some(source)).unwrap();
    let mut out = vec![0.0; wider.buffers()[0].elements];
    assert!(matches!(wider.source().fill(&wider, 0, 0, &mut out), Err(WeightError::Read { .. })));
}

#[test]
fn logits_are_those_of_every_position() {
    let (_, buffers) = written();
    let ids = |last| HostTensor::int(vec![1, 2, last], [1, 3]).to_device(&burn::tensor::Device::flex());
    let run = |float, last| {
        let chain = chain(&config(), None).unwrap().with_float_type(float);
        let master =
            |i: usize| HostTensor::view(buffers.0[i].clone(), [chain.buffers()[i].elements], DType::F32);
        let buffer = |i: usize| master(i).in_type(float).bytes.into();
        let logits = logits(&config(), &chain, &buffer, ids(last), &burn::tensor::Device::flex());
        assert_eq!(logits.dims(), [1, 3, 11]);
        AnyTensor::from(logits).into_host().as_f32().to_vec()
    };
    let (a, b) = (run(FloatType::F32, 3), run(FloatType::F32, 4));
    assert_eq!(a[..22], b[..22]);
    assert_ne!(a[22..], b[22..]);
    let largest = a.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let narrow = run(FloatType::Bf16, 3);
    assert!(narrow != a && narrow.iter().zip(&a).all(|(x, y)| (x - y).abs() < 0.03 * largest));
}
