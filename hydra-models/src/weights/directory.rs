//! A Hugging Face directory: where the tensors of a model lie, and what is read of it.

use super::{TensorFile, WEIGHTS};
use crate::ModelError;
use hydra_core::{BufferParam, Chain, WeightError, WeightSource};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The file of a model's configuration.
pub(crate) const CONFIG: &str = "config.json";
/// The file that says which other files the weights are in.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// How a family of models calls its tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Naming {
    /// What models without a head are saved without: `transformer.`.
    pub prefix: &'static str,
    /// What the names of a block's tensors begin with behind the prefix, before the block's number: `h.`.
    pub blocks: &'static str,
    /// The configuration's name for the number of blocks: `n_layer`.
    pub depth: &'static str,
    /// The embedding, with which a head can be tied: `transformer.wte.weight`.
    pub embedding: &'static str,
    /// True if whatever is called `weight` or `bias` in a block is a parameter; files of GPT-2 have masks of that name.
    pub exact: bool,
    /// The name that Hugging Face gives a parameter of the chain.
    pub name: fn(&str) -> String,
    /// The row of the tensor of that name with which a parameter of the chain begins: not 0 where it is a part of one.
    pub first_row: fn(&str) -> usize,
}

/// The head's table, where it is stored.
pub(crate) const HEAD: &str = "lm_head.weight";

/// The weights of a model in a directory: `model.safetensors`, or the files that `model.safetensors.index.json` names.
/// Everything but the values is read and checked when it is opened; the values are read buffer by buffer. Cloning it is
/// cheap.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    naming: Naming,
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

/// The JSON in a file.
pub(crate) fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, ModelError> {
    let text = fs::read(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

/// An error of what a file says, with the file.
pub(crate) fn in_file(path: &Path, source: ModelError) -> ModelError {
    ModelError::ConfigFile { path: path.to_owned(), source: Box::new(source) }
}

impl Directory {
    /// Reads the headers of all weight files, and finds the parameters of `chain`, which has so many blocks.
    ///
    /// # Errors
    /// A file that is missing or damaged, blocks or parameters of blocks that the chain does not have, a tensor that is
    /// missing, there twice, or of another shape or type than expected, and a stored head that is not the embedding of a
    /// chain whose head is.
    pub fn open(path: PathBuf, naming: Naming, chain: &Chain, depth: usize) -> Result<Self, ModelError> {
        let files = Files { directory: &path, naming, files: open_files(&path)? };
        files.check_depth(depth)?;
        let mut tensors = BTreeMap::new();
        for param in params(chain) {
            let name = (naming.name)(&param.name);
            let place = files.find(&name)?;
            place.file.check(&place.tensor, &param.shape)?;
            tensors.insert(name, place);
        }
        if naming.exact {
            files.check_known(&tensors, chain.name())?;
        }
        if !tensors.contains_key(HEAD) {
            files.check_tied_head(tensors.get(naming.embedding))?;
        }
        Ok(Self { path, naming, tensors: Arc::new(tensors) })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that the weights are in, in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let files: BTreeSet<&Path> = self.tensors.values().map(|place| place.file.path.as_path()).collect();
        files.into_iter()
    }

    /// The name of a parameter's tensor.
    fn name(&self, param: &BufferParam) -> String {
        let name = (self.naming.name)(&param.name);
        let shared = name == HEAD && !self.tensors.contains_key(HEAD);
        if shared { self.naming.embedding.to_owned() } else { name }
    }

    /// The values of a parameter; a head that is its own reads the embedding where the files have it once for both.
    pub fn read(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), ModelError> {
        let name = self.name(param);
        let from = (self.naming.first_row)(&param.name) * param.shape.iter().skip(1).product::<usize>();
        match self.tensors.get(&name) {
            Some(place) => place.file.read_part(&place.tensor, from, out),
            None => Err(ModelError::TensorMissing { place: self.path.clone(), tensor: name }),
        }
    }
}

/// Gives the values of parameters one by one.
pub(crate) trait ParamSource: WeightSource {
    /// The values of a parameter of a chain of the model.
    ///
    /// # Errors
    /// A tensor that is missing, and a file that cannot be read.
    fn read(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), ModelError>;
}

impl WeightSource for Directory {
    fn fill(&self, chain: &Chain, buffer: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        for param in &chain.buffers()[buffer].params {
            self.read(param, &mut out[param.range()])
                .map_err(|source| WeightError::Read { param: param.name.clone(), source: source.into() })?;
        }
        Ok(())
    }

    /// The files that the values are in.
    fn origin(&self, chain: &Chain, buffer: usize, _: u64) -> Option<String> {
        let params = chain.buffers()[buffer].params.iter();
        let places = params.map(|param| self.tensors.get(&self.name(param)));
        let files = places.map(|place| place.map(|place| place.file.path.display().to_string()));
        let files: BTreeSet<String> = files.collect::<Option<_>>()?;
        Some(files.into_iter().collect::<Vec<_>>().join(" and "))
    }
}

fn params(chain: &Chain) -> impl Iterator<Item = &BufferParam> {
    chain.buffers().iter().flat_map(|buffer| &buffer.params)
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

/// The weight files of a directory.
struct Files<'a> {
    directory: &'a Path,
    naming: Naming,
    files: Vec<Arc<TensorFile>>,
}

impl Files<'_> {
    /// A tensor's name without the prefix.
    fn bare<'a>(&self, name: &'a str) -> &'a str {
        name.strip_prefix(self.naming.prefix).unwrap_or(name)
    }

    /// The tensor of this name, with or without the prefix that models without a head are saved without.
    fn find(&self, name: &str) -> Result<Place, ModelError> {
        let named = |tensor: &str| {
            let files = self.files.iter().filter(|file| file.info(tensor).is_some());
            files.map(|file| Place { file: file.clone(), tensor: tensor.to_owned() }).collect::<Vec<_>>()
        };
        let (bare, mut places) = (self.bare(name), named(name));
        if bare != name {
            places.extend(named(bare));
        }
        if let [one, other, ..] = places.as_slice() {
            return Err(ModelError::TensorTwice {
                path: one.file.path.clone(),
                tensor: one.tensor.clone(),
                other_path: other.file.path.clone(),
                other: other.tensor.clone(),
            });
        }
        places.pop().ok_or_else(|| {
            let place = match self.files.as_slice() {
                [file] => file.path.clone(),
                _ => self.directory.to_owned(),
            };
            ModelError::TensorMissing { place, tensor: name.to_owned() }
        })
    }

    /// The block that a tensor belongs to, such as 3 for `transformer.h.3.ln_1.bias`.
    fn block_of(&self, tensor: &str) -> Option<usize> {
        self.bare(tensor).strip_prefix(self.naming.blocks)?.split_once('.')?.0.parse().ok()
    }

    /// Refuses weights of more blocks than the configuration has: the model would be another one, cut short.
    fn check_depth(&self, depth: usize) -> Result<(), ModelError> {
        let names = self.files.iter().flat_map(|file| file.names());
        let beyond = names.filter_map(|name| self.block_of(&name).map(|block| (block, name)));
        let beyond: BTreeSet<(usize, String)> = beyond.filter(|(block, _)| *block >= depth).collect();
        let (Some((_, tensor)), Some((last, _))) = (beyond.first(), beyond.last()) else { return Ok(()) };
        let needed = last.saturating_add(1);
        let source = ModelError::Config {
            name: self.naming.depth,
            found: depth.to_string(),
            expected: format!(
                "{needed}, because the weights have the tensor `{tensor}`: take the config.json that belongs to \
                 the weights, or remove the further blocks from them"
            ),
        };
        Err(in_file(&self.directory.join(CONFIG), source))
    }

    /// Refuses parameters of blocks that the chain does not have: it would compute something else without them.
    fn check_known(&self, known: &BTreeMap<String, Place>, chain: &str) -> Result<(), ModelError> {
        let known: BTreeSet<&str> = known.values().map(|place| place.tensor.as_str()).collect();
        let unknown = |name: &String| {
            let parameter = name.ends_with(".weight") || name.ends_with(".bias");
            parameter && self.block_of(name).is_some() && !known.contains(name.as_str())
        };
        let names = self.files.iter().flat_map(|file| file.names().into_iter().map(move |name| (name, file)));
        let first = names.filter(|(name, _)| unknown(name)).min_by(|(a, _), (b, _)| a.cmp(b));
        first.map_or(Ok(()), |(tensor, file)| {
            Err(ModelError::TensorUnknown { path: file.path.clone(), tensor, chain: chain.to_owned() })
        })
    }

    /// Refuses a stored head that is not the embedding.
    fn check_tied_head(&self, embedding: Option<&Place>) -> Result<(), ModelError> {
        let Some(head) = self.files.iter().find(|file| file.info(HEAD).is_some()) else { return Ok(()) };
        let Some(embedding) = embedding else { return Ok(()) };
        if head.same(HEAD, &embedding.file, &embedding.tensor)? != Some(false) {
            return Ok(());
        }
        let source = ModelError::Config {
            name: HEAD,
            found: format!("different from `{}`", embedding.tensor),
            expected: "the same shape, type and values, because the head is tied to the embedding: tie them and save \
                       the model again"
                .to_owned(),
        };
        Err(in_file(self.directory, source))
    }
}
