//! GPT-2 against Hugging Face transformers: logits, loss and gradients of the same weights. One reference model is in
//! the repository (`fixtures/parity`); another, beside it, is taken where it is there.

use burn::tensor::Device;
use hydra_core::{
    Activation, BackwardFrom, Chain, HostTensor, ImageReader, ModelWriter, Pass, WeightError, backward_range,
    forward_range, promote_layers,
};
use hydra_models::gpt2::{Gpt2Config, Gpt2Dir, Gpt2Writer, chain, hf_name, logits};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const MODELS: [&str; 2] = ["tiny", "tiny_pert"];

/// The folder of a reference model, where there is one.
fn reference(name: &str) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [here.join("tests/fixtures/parity"), here.join("../../shared/parity")];
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.is_dir());
    if found.is_none() {
        assert_ne!(name, "tiny", "it is in the repository");
        println!("skipped: {name} is not in the repository, and not in {}", folders[1].display());
    }
    found
}

/// The `F32` or `F64` tensors of a file.
fn tensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |view: &safetensors::tensor::TensorView| -> Vec<f64> {
        let data = view.data();
        match data.len() / view.shape().iter().product::<usize>() {
            4 => data.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
            _ => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        }
    };
    file.tensors().into_iter().map(|(name, view)| (name, values(&view))).collect()
}

/// The ids of batch 0.
fn ids(path: &Path) -> HostTensor {
    let bytes = std::fs::read(path.join("inputs.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("input_ids").unwrap();
    let [_, batch, tokens] = *view.shape() else { panic!("ids of shape {:?}", view.shape()) };
    let ids = view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32);
    HostTensor::int(ids.take(batch * tokens).collect(), [batch, tokens])
}

struct Model {
    path: PathBuf,
    config: Gpt2Config,
    chain: Chain,
    images: Vec<bytes::Bytes>,
}

fn open(name: &str) -> Option<Model> {
    let path = reference(name)?;
    let source = Gpt2Dir::open(&path).unwrap();
    let config = source.config().clone();
    let chain = chain(&config, Some(source)).unwrap();
    let image = |index: usize| {
        let mut out = vec![0.0; chain.images()[index].elements];
        chain.source().fill(&chain, index, 0, &mut out).unwrap();
        bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&out))
    };
    let images = (0..chain.images().len()).map(image).collect();
    Some(Model { path, config, chain, images })
}

impl Model {
    fn pass(&self, device: &Device) -> Pass {
        Pass::train(Pass::key_of(0, 0, 0), Activation::of(ids(&self.path).to_device(device).into_int::<2>()))
    }

    /// Loss and gradients by transformers' names, tied ones added.
    fn backward(&self) -> (f32, BTreeMap<String, Vec<f64>>) {
        let (plain, image) = (Device::flex(), |i: usize| self.images[i].clone().into());
        let device = plain.clone().autodiff();
        let layers = promote_layers(&self.chain, 0..self.chain.len(), &image, &plain, true);
        let x = Activation::of(ids(&self.path).to_device(&device).into_int::<2>());
        let from = BackwardFrom::Loss { weight: 1.0 };
        let done = backward_range(layers, 0, x, from, &self.pass(&device), false);
        let mut gradients: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (layer, found) in self.chain.layers().iter().zip(done.layers) {
            for (place, gradient) in layer.params.iter().zip(found) {
                let name = hf_name(&self.chain.images()[place.image].params[place.slot].name);
                let gradient = gradient.expect("a gradient").into_host();
                let gradient = gradient.as_f32().iter().map(|&x| f64::from(x));
                match gradients.entry(name) {
                    std::collections::btree_map::Entry::Vacant(entry) => {
                        entry.insert(gradient.collect());
                    }
                    std::collections::btree_map::Entry::Occupied(mut entry) => {
                        entry.get_mut().iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
                    }
                }
            }
        }
        (done.loss.expect("a loss"), gradients)
    }
}

fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |x: f64, y: f64| x + y * y;
    let error = found.iter().zip(expected).map(|(a, b)| a - b).fold(0.0, norm).sqrt();
    error / expected.iter().copied().fold(0.0, norm).sqrt()
}

#[test]
fn logits_equal_those_of_transformers() {
    for model in MODELS.into_iter().filter_map(open) {
        let image = |i: usize| model.images[i].clone().into();
        let ids = ids(&model.path).to_device(&Device::flex().autodiff());
        let found = logits(&model.config, &model.chain, &image, ids, &Device::flex());
        let found = hydra_core::AnyTensor::from(found).into_host();
        let expected = &tensors(&model.path.join("fwd.safetensors"))["logits"];
        assert_eq!(found.as_f32().len(), expected.len());
        let worst =
            found.as_f32().iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        println!("{}: logits differ by {worst:.1e} at most", model.path.display());
        assert!(worst < 1e-4, "{worst}");
    }
}

#[test]
fn loss_and_gradients_equal_those_of_transformers() {
    for model in MODELS.into_iter().filter_map(open) {
        let (loss, gradients) = model.backward();
        let expected = tensors(&model.path.join("fwd.safetensors"))["loss"][0];
        assert!((f64::from(loss) - expected).abs() < 1e-5, "{loss} for {expected}");
        let expected = tensors(&model.path.join("grads.safetensors"));
        assert!(gradients.keys().eq(expected.keys()), "{:?}", gradients.keys());
        let mut worst = 0f64;
        for (name, expected) in &expected {
            let error = distance(&gradients[name], expected);
            assert!(error < 1e-5, "{name}: {error}");
            worst = worst.max(error);
        }
        println!("{}: loss {loss}, gradients differ by {worst:.1e} at most", model.path.display());
    }
}

struct Images<'a>(&'a [bytes::Bytes]);

impl ImageReader for Images<'_> {
    fn image(&self, image: usize) -> Result<bytes::Bytes, WeightError> {
        Ok(self.0[image].clone())
    }
}

#[test]
fn a_checkpoint_of_transformers_is_written_back_as_it_was() {
    for model in MODELS.into_iter().filter_map(open) {
        let dir = tempfile::TempDir::new().unwrap();
        let writer = Gpt2Writer::from(&Gpt2Dir::open(&model.path).unwrap());
        writer.write(&model.chain, &Images(&model.images), dir.path()).unwrap();
        let file = |dir: &Path, name: &str| std::fs::read(dir.join(name)).unwrap();
        let json = |dir: &Path, name: &str| -> serde_json::Value {
            serde_json::from_slice(&file(dir, name)).unwrap()
        };
        for name in ["config.json", "generation_config.json"] {
            assert_eq!(json(dir.path(), name), json(&model.path, name));
        }
        let weights = |dir: &Path| tensors(&dir.join("model.safetensors"));
        assert_eq!(weights(dir.path()), weights(&model.path));
    }
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    for model in MODELS.into_iter().filter_map(open) {
        let (whole, _) = model.backward();
        let (plain, image) = (Device::flex(), |i: usize| model.images[i].clone().into());
        let device = plain.clone().autodiff();
        let pass = model.pass(&device);
        let mut x = Activation::of(ids(&model.path).to_device(&device).into_int::<2>());
        for index in 0..model.chain.len() {
            let layers = promote_layers(&model.chain, index..index + 1, &image, &plain, false);
            x = forward_range(&layers, index, x, &pass).into_host().to_device(&device);
        }
        assert_eq!(x.into_host().parts[0].as_f32(), [whole]);
    }
}
