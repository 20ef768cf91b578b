//! A reference model: results of Transformers, and the same model here.

use burn::tensor::Device;
use hydra_core::optimizer::{AdamW, Elements, MomentMut, Optimizer as _, Step};
use hydra_core::{
    Activation, AnyTensor, BackwardFrom, Chain, DeviceBytes, Encoding, HostActivation, HostTensor,
    ModelWriter, ParamBufferReader, Pass, ShardBackward, WeightError, backward_range, forward_range,
    promote_layers,
};
use hydra_models::parts::class_logits;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The folder of a reference model, if it exists.
pub fn reference(name: &str) -> Option<PathBuf> {
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
pub fn tensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
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
pub fn ids(path: &Path) -> HostTensor {
    let [ids, _] = batch(path);
    ids
}

/// Inputs and targets of batch 0: ids twice, or images and their classes.
fn batch(path: &Path) -> [HostTensor; 2] {
    let bytes = std::fs::read(path.join("inputs.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    // Without the batch dimension.
    let shape = |name: &str| file.tensor(name).unwrap().shape()[1..].to_vec();
    let words = |name: &str| {
        let (shape, view) = (shape(name), file.tensor(name).unwrap());
        let words = view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32);
        HostTensor::int(words.take(shape.iter().product()).collect(), shape)
    };
    let Ok(view) = file.tensor("pixel_values") else { return [words("input_ids"), words("input_ids")] };
    let (shape, pixels) = (shape("pixel_values"), view.data().chunks_exact(4));
    let pixels = pixels.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    [HostTensor::float(pixels.take(shape.iter().product()).collect(), shape), words("labels")]
}

/// Inputs and targets of batch 0 as a chain reads them. Sequences of several lengths are in one row with their
/// positions, and their labels are followed by their first positions, their lengths and the positions of their last
/// tokens.
fn activations(path: &Path) -> [HostActivation; 2] {
    let bytes = std::fs::read(path.join("inputs.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    if file.tensor("lengths").is_err() {
        return batch(path).map(HostActivation::of);
    }
    let words = |name: &str| -> Vec<i32> {
        let view = file.tensor(name).unwrap();
        view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32).collect()
    };
    let (ids, lengths, lasts) = (words("input_ids"), words("lengths"), words("lasts"));
    let (items, longest) = (lengths.len(), ids.len() / lengths.len());
    let rows = ids.chunks(longest).zip(&lengths).flat_map(|(row, length)| &row[..*length as usize]);
    let row: Vec<i32> = rows.copied().collect();
    let positions = lengths.iter().flat_map(|length| 0..*length).collect();
    let firsts: Vec<i32> =
        lengths.iter().scan(0, |at, length| Some(std::mem::replace(at, *at + length))).collect();
    let lasts = firsts.iter().zip(lasts).map(|(first, last)| first + last).collect();
    let view = file.tensor("labels").unwrap();
    let labels = match view.dtype() {
        Dtype::I64 => HostTensor::int(words("labels"), [items]),
        _ => {
            let numbers = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            HostTensor::float(numbers.collect(), view.shape()[1..].to_vec())
        }
    };
    let tokens = row.len();
    let mut inputs = vec![HostTensor::int(row, [1, tokens]), HostTensor::int(positions, [1, tokens])];
    if file.tensor("token_type_ids").is_ok() {
        let types = words("token_type_ids");
        let types = types.chunks(longest).zip(&lengths).flat_map(|(row, length)| &row[..*length as usize]);
        inputs.push(HostTensor::int(types.copied().collect(), [1, tokens]));
    }
    let places = [firsts, lengths, lasts].map(|places| HostTensor::int(places, [items]));
    let targets = std::iter::once(labels).chain(places).collect();
    [HostActivation { parts: inputs }, HostActivation { parts: targets }]
}

/// A model with the reference's weights.
pub struct Model {
    pub path: PathBuf,
    pub chain: Chain,
    buffers: Vec<bytes::Bytes>,
    /// Maps a parameter to its Transformers name.
    hf_name: fn(&str) -> String,
}

struct ParamBuffers<'a>(&'a [bytes::Bytes]);

impl ParamBufferReader for ParamBuffers<'_> {
    fn buffer(&self, buffer: usize) -> Result<bytes::Bytes, WeightError> {
        Ok(self.0[buffer].clone())
    }
}

impl Model {
    /// A model with the values of the chain's source, or the blocks of those that are quantized.
    pub fn new(path: PathBuf, chain: Chain, hf_name: fn(&str) -> String) -> Self {
        let buffer = |index: usize| {
            if chain.buffers()[index].encoding == Encoding::Nf4 {
                return chain.initial_values(index, 0).unwrap().bytes;
            }
            let mut out = vec![0.0; chain.buffers()[index].elements];
            chain.source().fill(&chain, index, 0, &mut out).unwrap();
            bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&out))
        };
        let buffers = (0..chain.buffers().len()).map(buffer).collect();
        Self { path, chain, buffers, hf_name }
    }

    pub fn buffer(&self, index: usize) -> DeviceBytes {
        self.buffers[index].clone().into()
    }

    fn pass(&self, device: &Device) -> Pass {
        let [_, targets] = activations(&self.path);
        Pass::train(Pass::key_of(0, 0, 0), targets.to_device(device))
    }

    fn inputs(&self, device: &Device) -> Activation {
        let [inputs, _] = activations(&self.path);
        inputs.to_device(device)
    }

    /// Loss and gradients.
    fn run(&self) -> ShardBackward {
        let (plain, buffer) = (Device::flex(), |i: usize| self.buffer(i));
        let device = plain.clone().autodiff();
        let layers = promote_layers(&self.chain, 0..self.chain.len(), &buffer, &plain, true);
        let (x, from) = (self.inputs(&device), BackwardFrom::Loss { weight: 1.0 });
        backward_range(layers, 0, x, from, &self.pass(&device), false)
    }

    /// Asserts that the losses of AdamW's steps on what is trained, and the loss after them, equal those of Transformers or PEFT in
    /// `train.json`.
    pub fn assert_trains(mut self) {
        let text = std::fs::read_to_string(self.path.join("train.json")).unwrap();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        let rule = AdamW { weight_decay: 0.0, ..AdamW::new(file["lr"].as_f64().unwrap()) };
        let mut moments: Vec<[Vec<f32>; 2]> =
            self.buffers.iter().map(|buffer| [(); 2].map(|()| vec![0.0; buffer.len() / 4])).collect();
        let check = |done: &ShardBackward, expected: &serde_json::Value, path: &Path| {
            let (loss, expected) = (f64::from(done.loss.expect("a loss")), expected.as_f64().unwrap());
            assert!((loss - expected).abs() < 1e-5, "{}: {loss} for {expected}", path.display());
        };
        let losses = file["losses"].as_array().unwrap();
        assert_eq!(losses.len(), 12);
        for (index, expected) in losses.iter().enumerate() {
            let done = self.run();
            check(&done, expected, &self.path);
            let step = Step { index, rate: rule.lr(), decays: false };
            for (at, (layer, gradients)) in self.chain.layers().iter().zip(done.layers).enumerate() {
                let places = layer.params.iter().zip(gradients).zip(self.chain.trained_params(at));
                for ((place, gradient), _) in places.filter(|(_, trained)| *trained) {
                    let range = self.chain.buffers()[place.buffer].params[place.slot].range();
                    let gradient = gradient.expect("a gradient").into_host();
                    let mut values: Vec<f32> = bytemuck::pod_collect_to_vec(&self.buffers[place.buffer][..]);
                    let moments = moments[place.buffer].each_mut();
                    let mut moments = moments.map(|moment| MomentMut::from(&mut moment[range.clone()]));
                    rule.update(
                        &step,
                        Elements::new(&mut values[range], gradient.as_f32(), &mut moments, None),
                    );
                    self.buffers[place.buffer] = bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&values));
                }
            }
        }
        check(&self.run(), &file["evaluation"], &self.path);
    }

    /// Loss and gradients by Transformers' names; those of tied parameters are summed.
    fn backward(&self) -> (f32, BTreeMap<String, Vec<f64>>) {
        let done = self.run();
        let mut gradients: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (index, (layer, found)) in self.chain.layers().iter().zip(done.layers).enumerate() {
            let trained = self.chain.trained_params(index);
            for ((place, gradient), trained) in layer.params.iter().zip(found).zip(trained) {
                if !trained {
                    assert!(gradient.is_none());
                    continue;
                }
                let name = (self.hf_name)(&self.chain.buffers()[place.buffer].params[place.slot].name);
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

    /// The buffers, to be written.
    pub fn buffers(&self) -> impl ParamBufferReader {
        ParamBuffers(&self.buffers)
    }

    /// The logits of a classifier for the batch.
    pub fn class_logits(&self) -> Vec<f32> {
        let device = Device::flex();
        let batch = activations(&self.path).map(|host| host.to_device(&device.clone().autodiff()));
        let found = class_logits(&self.chain, &|index| self.buffer(index), batch.into(), &device);
        AnyTensor::from(found).into_host().as_f32().to_vec()
    }

    /// Asserts that logits equal those of Transformers.
    pub fn assert_logits(&self, found: &[f32]) {
        self.assert_logits_within(found, 1e-4);
    }

    /// The same with this tolerance.
    pub fn assert_logits_within(&self, found: &[f32], most: f64) {
        let expected = &tensors(&self.path.join("fwd.safetensors"))["logits"];
        assert_eq!(found.len(), expected.len());
        let worst = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        println!("{}: logits differ by {worst:.1e} at most", self.path.display());
        assert!(worst < most, "{}: {worst}", self.path.display());
    }

    /// Asserts that the loss and all gradients equal those of Transformers.
    pub fn assert_loss_and_gradients(&self) {
        self.assert_gradients(None, 1e-5);
    }

    /// The same with a tolerance for reference weights that were computed in `f32`.
    pub fn assert_loss_and_gradients_within(&self, most: f64) {
        self.assert_gradients(None, most);
    }

    /// The same except for parameters with this name ending, whose gradients are rounding noise.
    pub fn assert_loss_and_gradients_but_nothing_for(&self, end: &str) {
        self.assert_gradients(Some(end), 1e-5);
    }

    /// Asserts that the loss equals that of Transformers.
    pub fn assert_loss(&self) {
        let (loss, _) = self.backward();
        let expected = tensors(&self.path.join("fwd.safetensors"))["loss"][0];
        assert!((f64::from(loss) - expected).abs() < 1e-5, "{}: {loss} for {expected}", self.path.display());
    }

    fn assert_gradients(&self, nothing: Option<&str>, most: f64) {
        self.assert_loss();
        let (loss, gradients) = self.backward();
        let expected = tensors(&self.path.join("grads.safetensors"));
        assert!(gradients.keys().eq(expected.keys()), "{}: {:?}", self.path.display(), gradients.keys());
        let mut worst = 0f64;
        for (name, expected) in &expected {
            if nothing.is_some_and(|end| name.ends_with(end)) {
                let none = |x: &f64| x.abs() < 1e-7;
                assert!(expected.iter().all(none) && gradients[name].iter().all(none), "{name}");
                continue;
            }
            let error = distance(&gradients[name], expected);
            assert!(error < most, "{}: {name}: {error}", self.path.display());
            worst = worst.max(error);
        }
        println!("{}: loss {loss}, gradients differ by {worst:.1e} at most", self.path.display());
    }

    /// Asserts that `writer` writes the reference's directory.
    pub fn assert_written_back(&self, writer: &dyn ModelWriter) {
        let dir = tempfile::TempDir::new().unwrap();
        writer.write(&self.chain, &ParamBuffers(&self.buffers), dir.path()).unwrap();
        let file = |dir: &Path, name: &str| std::fs::read(dir.join(name)).unwrap();
        let json = |dir: &Path, name: &str| -> serde_json::Value {
            serde_json::from_slice(&file(dir, name)).unwrap()
        };
        let there = |name: &&str| self.path.join(name).exists();
        for name in ["config.json", "generation_config.json"].into_iter().filter(there) {
            assert_eq!(json(dir.path(), name), json(&self.path, name));
        }
        let weights = |dir: &Path| tensors(&dir.join("model.safetensors"));
        assert_eq!(weights(dir.path()), weights(&self.path));
    }

    /// Asserts that a forward without a graph, cut after every layer, has the loss of the whole chain.
    pub fn assert_cuts_agree(&self) {
        let (whole, _) = self.backward();
        let (plain, buffer) = (Device::flex(), |i: usize| self.buffer(i));
        let device = plain.clone().autodiff();
        let pass = self.pass(&device);
        let mut x = self.inputs(&device);
        for index in 0..self.chain.len() {
            let layers = promote_layers(&self.chain, index..index + 1, &buffer, &plain, false);
            x = forward_range(&layers, index, x, &pass).into_host().to_device(&device);
        }
        assert_eq!(x.into_host().parts[0].as_f32(), [whole]);
    }
}

fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |x: f64, y: f64| x + y * y;
    let error = found.iter().zip(expected).map(|(a, b)| a - b).fold(0.0, norm).sqrt();
    error / expected.iter().copied().fold(0.0, norm).sqrt()
}
