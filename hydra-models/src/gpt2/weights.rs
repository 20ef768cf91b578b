//! A GPT-2 in a Hugging Face directory: what it is and where its tensors lie.

use super::{Gpt2Config, chain, hf_name};
use crate::ModelError;
use crate::weights::{TensorFile, WEIGHTS, read_json};
use hydra_core::{Chain, WeightError, WeightSource};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

pub(super) const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// The embedding, with which the head is tied, and the head where it is stored all the same.
const EMBEDDING: &str = "transformer.wte.weight";
const HEAD: &str = "lm_head.weight";

/// A directory with a GPT-2's `config.json` and its weights, in `model.safetensors` or in the files that
/// `model.safetensors.index.json` names. Everything but the weights' values is read and checked when it is
/// opened; the values are read image by image. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct Gpt2Dir {
    directory: PathBuf,
    config: Gpt2Config,
    tensors: Arc<BTreeMap<String, Place>>,
}

/// The place of a parameter's values.
#[derive(Clone, Debug)]
struct Place {
    file: Arc<TensorFile>,
    /// The tensor's name in the file.
    tensor: String,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Gpt2Dir {
    /// Reads the configuration and the headers of all weight files.
    ///
    /// # Errors
    /// A file that is missing or damaged, a configuration that [`Gpt2Config::validate`] refuses or that has
    /// fewer blocks than the weights, a tensor that is missing, there twice, or of another shape or type than
    /// expected, and a head that is not the embedding.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let directory = directory.into();
        let config = read_config(&directory.join(CONFIG))?;
        let files = open_files(&directory)?;
        check_layers(&directory, &config, &files)?;
        let mut tensors = BTreeMap::new();
        for image in chain(&config, None)?.images() {
            for param in &image.params {
                let name = hf_name(&param.name);
                let place = find(&directory, &files, &name)?;
                place.file.check(&place.tensor, &param.shape)?;
                tensors.insert(name, place);
            }
        }
        check_head(&directory, &files, tensors.get(EMBEDDING))?;
        Ok(Self { directory, config, tensors: Arc::new(tensors) })
    }

    /// The model's configuration.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The files that the weights are in, in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let files: BTreeSet<&Path> = self.tensors.values().map(|place| place.file.path.as_path()).collect();
        files.into_iter()
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        match self.tensors.get(name) {
            Some(place) => place.file.read(&place.tensor, out),
            None => Err(ModelError::TensorMissing { place: self.directory.clone(), tensor: name.to_owned() }),
        }
    }
}

impl WeightSource for Gpt2Dir {
    fn fill(&self, chain: &Chain, image: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        for param in &chain.images()[image].params {
            self.read(&hf_name(&param.name), &mut out[param.range()])
                .map_err(|source| WeightError::Read { param: param.name.clone(), source: source.into() })?;
        }
        Ok(())
    }
}

pub(super) fn read_config(path: &Path) -> Result<Gpt2Config, ModelError> {
    let config: Gpt2Config = read_json(path)?;
    let refused = |source| ModelError::ConfigFile { path: path.to_owned(), source: Box::new(source) };
    config.validate().map_err(refused)?;
    Ok(config)
}

/// One file, or those of the index in the order of their names.
fn open_files(directory: &Path) -> Result<Vec<Arc<TensorFile>>, ModelError> {
    let (single, index) = (directory.join(WEIGHTS), directory.join(INDEX));
    if single.is_file() {
        return Ok(vec![Arc::new(TensorFile::open(&single)?)]);
    }
    if !index.is_file() {
        let looked_for = vec![WEIGHTS, INDEX];
        return Err(ModelError::NoWeights { directory: directory.to_owned(), looked_for });
    }
    let names: BTreeSet<String> = read_json::<Index>(&index)?.weight_map.into_values().collect();
    let open = |file: String| {
        let path = directory.join(&file);
        // A name that leads out of the directory is as good as none.
        let inside = Path::new(&file).components().all(|c| matches!(c, Component::Normal(_)));
        match inside && path.is_file() {
            true => TensorFile::open(&path).map(Arc::new),
            false => Err(ModelError::ShardMissing { index: index.clone(), file }),
        }
    };
    names.into_iter().map(open).collect()
}

/// The tensor of this name, with or without the prefix that models without a head are saved without.
fn find(directory: &Path, files: &[Arc<TensorFile>], name: &str) -> Result<Place, ModelError> {
    let bare = name.strip_prefix("transformer.").unwrap_or(name);
    let named = |tensor: &str| {
        let files = files.iter().filter(|file| file.info(tensor).is_some());
        files.map(|file| Place { file: file.clone(), tensor: tensor.to_owned() }).collect::<Vec<_>>()
    };
    let mut places = named(name);
    places.extend(named(bare));
    if let [one, other, ..] = places.as_slice() {
        return Err(ModelError::TensorTwice {
            path: one.file.path.clone(),
            tensor: one.tensor.clone(),
            other_path: other.file.path.clone(),
            other: other.tensor.clone(),
        });
    }
    places.pop().ok_or_else(|| {
        let place = match files {
            [file] => file.path.clone(),
            _ => directory.to_owned(),
        };
        ModelError::TensorMissing { place, tensor: name.to_owned() }
    })
}

/// The block that a tensor belongs to, such as 3 for `transformer.h.3.ln_1.bias`.
fn block_of(tensor: &str) -> Option<usize> {
    let bare = tensor.strip_prefix("transformer.").unwrap_or(tensor);
    bare.strip_prefix("h.")?.split_once('.')?.0.parse().ok()
}

/// Refuses weights of more blocks than the configuration has: the model would be another one, cut short.
fn check_layers(directory: &Path, config: &Gpt2Config, files: &[Arc<TensorFile>]) -> Result<(), ModelError> {
    let names = files.iter().flat_map(|file| file.names());
    let beyond = names.filter_map(|name| block_of(&name).map(|block| (block, name)));
    let beyond: BTreeSet<(usize, String)> = beyond.filter(|(block, _)| *block >= config.n_layer).collect();
    let (Some((_, tensor)), Some((last, _))) = (beyond.first(), beyond.last()) else { return Ok(()) };
    let needed = last.saturating_add(1);
    let source = ModelError::Config {
        name: "n_layer",
        found: config.n_layer.to_string(),
        expected: format!(
            "{needed}, because the weights have the tensor `{tensor}`: take the config.json that belongs to \
             the weights, or remove the further blocks from them"
        ),
    };
    Err(ModelError::ConfigFile { path: directory.join(CONFIG), source: Box::new(source) })
}

/// Refuses a stored head that is not the embedding.
fn check_head(
    directory: &Path,
    files: &[Arc<TensorFile>],
    embedding: Option<&Place>,
) -> Result<(), ModelError> {
    let Some(head) = files.iter().find(|file| file.info(HEAD).is_some()) else { return Ok(()) };
    let Some(embedding) = embedding else { return Ok(()) };
    if head.same(HEAD, &embedding.file, &embedding.tensor)? != Some(false) {
        return Ok(());
    }
    let source = ModelError::Config {
        name: HEAD,
        found: format!("different from `{}`", embedding.tensor),
        expected: "the same shape, type and values, because the head is tied to the embedding: tie them and save the model \
                   again"
            .to_owned(),
    };
    Err(ModelError::ConfigFile { path: directory.to_owned(), source: Box::new(source) })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Images, config};
    use super::super::{Gpt2Writer, logits};
    use super::*;
    use burn::tensor::DType;
    use half::{bf16, f16};
    use hydra_core::{AnyTensor, FloatType, HostTensor, ModelWriter};
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
    use std::fs;
    use tempfile::TempDir;

    /// A directory with a model of seed 7, as the writer writes it.
    fn written() -> (TempDir, Images) {
        let dir = TempDir::new().unwrap();
        let chain = chain(&config(), None).unwrap();
        let images = Images::of(&chain, 7);
        Gpt2Writer::new(config()).write(&chain, &images, dir.path()).unwrap();
        (dir, images)
    }

    fn load(dir: &Path) -> Images {
        let source = Gpt2Dir::open(dir).unwrap();
        let chain = chain(&source.config().clone(), Some(source)).unwrap();
        Images::of(&chain, 0)
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
        let views = tensors.iter().map(|(name, (shape, bytes))| {
            (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
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
        let (dir, images) = written();
        assert_eq!(load(dir.path()), images);
    }

    #[test]
    fn half_precision_files_are_read() {
        let (dir, images) = written();
        let round = |images: &Images, round: fn(f32) -> f32| -> Vec<Vec<f32>> {
            let image =
                |bytes: &bytes::Bytes| bytemuck::pod_collect_to_vec(bytes).into_iter().map(round).collect();
            images.0.iter().map(image).collect()
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
            assert_eq!(round(&load(dir.path()), |x| x), round(&images, rounded));
        }
    }

    #[test]
    fn several_files_and_names_without_the_prefix_are_read() {
        let (dir, images) = written();
        let mut halves = [BTreeMap::new(), BTreeMap::new()];
        let mut weight_map = BTreeMap::new();
        for (i, (name, tensor)) in f32_bytes(dir.path()).into_iter().enumerate() {
            let name = name.strip_prefix("transformer.").unwrap().to_owned();
            weight_map.insert(name.clone(), format!("part-{}.safetensors", i % 2));
            halves[i % 2].insert(name, tensor);
        }
        // What a checkpoint may hold besides.
        halves[0].insert("h.0.attn.bias".to_owned(), (vec![1, 1, 2, 2], vec![0; 16]));
        for (i, half) in halves.iter().enumerate() {
            save(&dir.path().join(format!("part-{i}.safetensors")), Dtype::F32, half);
        }
        fs::remove_file(dir.path().join(WEIGHTS)).unwrap();
        let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
        fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        assert_eq!(load(dir.path()), images);

        fs::remove_file(dir.path().join("part-1.safetensors")).unwrap();
        let error = refusal(dir.path());
        assert!(error.contains("names the file `part-1.safetensors`"), "{error}");
        let index = serde_json::json!({"weight_map": {"wte.weight": "../part-0.safetensors"}});
        fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        assert!(refusal(dir.path()).contains("names the file `../part-0.safetensors`"));
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
        let (dir, images) = written();
        let (file, mut tensors) = (dir.path().join(WEIGHTS), f32_bytes(dir.path()));
        tensors.insert(HEAD.to_owned(), tensors[EMBEDDING].clone());
        save(&file, Dtype::F32, &tensors);
        assert_eq!(load(dir.path()), images);
        *tensors.get_mut(HEAD).unwrap().1.last_mut().unwrap() ^= 1;
        save(&file, Dtype::F32, &tensors);
        assert!(reason(dir.path()).contains("`lm_head.weight` is different from `transformer.wte.weight`"));
        // As a model has whose head alone was given more ids.
        let (shape, mut bytes) = tensors[EMBEDDING].clone();
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
        assert!(
            error.contains(&format!("has `{name}`")) && error.contains(&format!("has `{bare}`")),
            "{error}"
        );

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
        let last = chain.images().len() - 1;
        let mut out = vec![0.0; chain.images()[last].elements];
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
        let expected = format!("tensor `{name}` has shape [4, 4], expected [16] by the model");
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
        let mut out = vec![0.0; wider.images()[0].elements];
        assert!(matches!(wider.source().fill(&wider, 0, 0, &mut out), Err(WeightError::Read { .. })));
    }

    #[test]
    fn logits_are_those_of_every_position() {
        let (_, images) = written();
        let ids = |last| HostTensor::int(vec![1, 2, last], [1, 3]).to_device(&burn::tensor::Device::flex());
        let run = |float, last| {
            let chain = chain(&config(), None).unwrap().with_float_type(float);
            let master =
                |i: usize| HostTensor::view(images.0[i].clone(), [chain.images()[i].elements], DType::F32);
            let image = |i: usize| master(i).in_type(float).bytes.into();
            let logits = logits(&config(), &chain, &image, ids(last), &burn::tensor::Device::flex());
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
}
