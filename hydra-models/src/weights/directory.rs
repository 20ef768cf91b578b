//! Reads the weights of a Hugging Face model directory.

use super::source::of_all;
use super::{TensorFile, WEIGHTS};
use crate::ModelError;
use hydra_core::{
    BufferParam, Chain, FileSpan, FileVersion, FloatType, PartReader, SeededInit, WeightError, WeightSource,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The file of a model's configuration.
pub(crate) const CONFIG: &str = "config.json";
/// The file that maps tensors to weight files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The tensor names of a model family.
#[derive(Clone, Copy, Debug)]
pub struct Naming {
    /// The prefix that is absent in models saved without a head: `transformer.`.
    pub prefix: &'static str,
    /// The part before the block index in a block's tensor names, after the prefix: `h.`.
    pub blocks: &'static str,
    /// The configuration key for the number of blocks: `n_layer`.
    pub depth: &'static str,
    /// The embedding, to which a head may be tied: `transformer.wte.weight`.
    pub embedding: &'static str,
    /// Whether every `weight` and `bias` in a block is a parameter; GPT-2's files have masks named `bias`.
    pub exact: bool,
    /// Maps a parameter of the chain to its Hugging Face name.
    pub name: fn(&str) -> String,
    /// A parameter's first row in the tensor of that name; nonzero for a slice of a table.
    pub first_row: fn(&str) -> usize,
}

impl Naming {
    /// The names of a model without a token table, all of whose weights and biases in blocks are parameters.
    pub fn new(
        prefix: &'static str,
        blocks: &'static str,
        depth: &'static str,
        name: fn(&str) -> String,
    ) -> Self {
        Self { prefix, blocks, depth, embedding: "", exact: true, name, first_row: |_| 0 }
    }
}

/// The head's table, if it is stored.
pub(crate) const HEAD: &str = "lm_head.weight";

/// The weights of a model in a directory: `model.safetensors`, or the files listed in `model.safetensors.index.json`.
/// Opening reads and checks everything except the values, which are read buffer by buffer. Cloning is cheap.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    naming: Naming,
    tensors: Arc<BTreeMap<String, TensorLocation>>,
    /// The parameters that the files do not have, by their names in the chain.
    new: Arc<BTreeSet<String>>,
    /// The tensors outside of blocks that no parameter has.
    unread: Arc<BTreeSet<String>>,
}

/// The tensor of a parameter.
#[derive(Clone, Debug)]
struct TensorLocation {
    file: Arc<TensorFile>,
    /// The tensor's name in the file.
    tensor: String,
}

impl TensorLocation {
    fn is_quantized(&self) -> bool {
        self.file.is_quantized(&self.tensor)
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Parses a JSON file.
pub(crate) fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, ModelError> {
    let text = fs::read(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

/// Adds the file's path to an error about its contents.
pub(crate) fn in_file(path: &Path, source: ModelError) -> ModelError {
    ModelError::ConfigFile { path: path.to_owned(), source: Box::new(source) }
}

impl Directory {
    /// Reads the headers of all weight files and finds the parameters of `chain`, which has `depth` blocks. Parameters for which
    /// `is_new` returns true are not looked for in the files, but drawn from the task's seed.
    ///
    /// # Errors
    /// A missing or damaged file; blocks, or parameters of blocks, that the chain does not have; a tensor that is
    /// missing, duplicated, or of an unexpected shape or type; or a stored head that differs from the embedding
    /// although the chain ties them.
    pub fn open(
        path: PathBuf,
        naming: Naming,
        chain: &Chain,
        depth: usize,
        is_new: impl Fn(&str) -> bool,
    ) -> Result<Self, ModelError> {
        let files = Files { directory: &path, naming, files: open_files(&path)? };
        files.check_depth(depth)?;
        let (new, stored): (Vec<_>, Vec<_>) = params(chain).partition(|param| is_new(&param.name));
        let mut tensors = BTreeMap::new();
        for param in stored {
            let name = (naming.name)(&param.name);
            let place = files.find(&name)?;
            place.file.check_param(&place.tensor, param)?;
            tensors.insert(name, place);
        }
        if naming.exact {
            files.check_known(&tensors, chain.name())?;
        }
        let mut unread = files.unread(&tensors);
        if chain.objective().is_language_model() && !tensors.contains_key(HEAD) {
            files.check_tied_head(tensors.get(naming.embedding))?;
            // A stored table has the values of the embedding, which the head reads.
            unread.remove(HEAD);
        }
        let new = new.into_iter().map(|param| param.name.clone()).collect();
        Ok(Self { path, naming, tensors: Arc::new(tensors), new: Arc::new(new), unread: Arc::new(unread) })
    }

    /// Returns whether any parameter is drawn.
    pub fn has_new(&self) -> bool {
        !self.new.is_empty()
    }

    /// What the files have in addition to the model's parameters outside of blocks, and what they do not have.
    pub fn notes(&self) -> Vec<String> {
        let listed = |names: Vec<String>| format!("`{}`", names.join("`, `"));
        let place = self.path.display();
        let unread = (!self.unread.is_empty()).then(|| {
            let names = listed(self.unread.iter().cloned().collect());
            format!("the model does not use {names} of `{place}`")
        });
        let new = self.has_new().then(|| {
            let names = listed(self.new.iter().map(|param| (self.naming.name)(param)).collect());
            format!("`{place}` has no {names}: new weights are drawn with the seed")
        });
        unread.into_iter().chain(new).collect()
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The weight files, sorted by name.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let files: BTreeSet<&Path> = self.tensors.values().map(|place| place.file.path.as_path()).collect();
        files.into_iter()
    }

    /// The tensor name of a parameter.
    fn name(&self, param: &BufferParam) -> String {
        let name = (self.naming.name)(&param.name);
        let shared = name == HEAD && !self.tensors.contains_key(HEAD);
        if shared { self.naming.embedding.to_owned() } else { name }
    }

    /// Reads elements of a parameter, from `first` on.
    fn read_part(&self, param: &BufferParam, first: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let name = self.name(param);
        match self.tensors.get(&name) {
            Some(place) => place.file.read_part(&place.tensor, self.start(param) + first, out),
            None => Err(ModelError::TensorMissing { place: self.path.clone(), tensor: name }),
        }
    }

    /// A parameter's first element in its tensor.
    fn start(&self, param: &BufferParam) -> usize {
        (self.naming.first_row)(&param.name) * param.shape.iter().skip(1).product::<usize>()
    }
}

/// Reads single parameters.
pub(crate) trait ParamSource: WeightSource {
    /// Reads a parameter of the model's chain.
    ///
    /// # Errors
    /// A missing tensor, or a file that cannot be read.
    fn read(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), ModelError>;

    /// Returns whether the source does not have a parameter, which is then drawn from the task's seed.
    fn draws(&self, param: &BufferParam) -> bool;

    /// Returns whether the files have quantized matrices.
    fn has_quantized(&self) -> bool;
}

impl ParamSource for Directory {
    /// Reads a parameter. An untied head reads the embedding if the files store the table only once.
    fn read(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), ModelError> {
        self.read_part(param, 0, out)
    }

    fn draws(&self, param: &BufferParam) -> bool {
        self.new.contains(&param.name)
    }

    fn has_quantized(&self) -> bool {
        self.tensors.values().any(TensorLocation::is_quantized)
    }
}

impl WeightSource for Directory {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let params = &chain.buffers()[buffer].params;
        if params.iter().any(|param| self.draws(param)) {
            SeededInit.fill(chain, buffer, seed, out)?;
        }
        for param in params.iter().filter(|param| !self.draws(param)) {
            self.read(param, &mut out[param.range()]).map_err(|source| unread(param, source))?;
        }
        Ok(())
    }

    /// The files that the values are read from, and the seed that others are drawn with.
    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        let (new, stored): (Vec<_>, Vec<_>) =
            chain.buffers()[buffer].params.iter().partition(|param| self.draws(param));
        let places = stored.into_iter().map(|param| self.tensors.get(&self.name(param)));
        let files = places.map(|place| place.map(|place| place.file.path.display().to_string()));
        let files: BTreeSet<String> = files.collect::<Option<_>>()?;
        let files = files.into_iter().collect::<Vec<_>>().join(" and ");
        match new.as_slice() {
            [] => Some(files),
            [first, ..] => {
                Some(format!("{files} but for {}: {}", first.name, SeededInit.origin(chain, buffer, seed)?))
            }
        }
    }

    fn files_of(&self, chain: &Chain, buffer: usize) -> Option<BTreeSet<FileVersion>> {
        let stored = chain.buffers()[buffer].params.iter().filter(|param| !self.draws(param));
        stored.map(|param| Some(self.tensors.get(&self.name(param))?.file.version.clone())).collect()
    }

    fn float_type(&self, chain: &Chain, buffer: usize) -> FloatType {
        let params = chain.buffers()[buffer].params.iter();
        let places = params.map(|param| self.tensors.get(&self.name(param)).filter(|_| !self.draws(param)));
        of_all(places.map(|place| place.and_then(|place| place.file.float_type(&place.tensor))))
    }

    fn parts<'a>(&'a self, chain: &'a Chain, buffer: usize) -> Option<PartReader<'a>> {
        let params = &chain.buffers()[buffer].params;
        if params.iter().any(|param| self.draws(param)) {
            return None;
        }
        Some(Box::new(move |slot, first, out| {
            let param = &params[slot];
            self.read_part(param, first, out).map_err(|source| unread(param, source))
        }))
    }

    fn spans(&self, chain: &Chain, buffer: usize) -> Option<Vec<FileSpan>> {
        let float = self.float_type(chain, buffer);
        let span = |param: &BufferParam| {
            let place = self.tensors.get(&self.name(param)).filter(|_| !self.draws(param))?;
            let is_of_type = place.file.float_type(&place.tensor) == Some(float);
            is_of_type.then(|| place.file.span(&place.tensor, self.start(param))).flatten()
        };
        chain.buffers()[buffer].params.iter().map(span).collect()
    }

    fn is_quantized(&self, chain: &Chain, buffer: usize) -> bool {
        let place = |param: &BufferParam| self.tensors.get(&self.name(param));
        let mut params = chain.buffers()[buffer].params.iter();
        params.all(|param| place(param).is_some_and(TensorLocation::is_quantized))
    }
}

/// The error for a parameter that cannot be read.
pub(crate) fn unread(param: &BufferParam, source: ModelError) -> WeightError {
    WeightError::Read { param: param.name.clone(), source: source.into() }
}

fn params(chain: &Chain) -> impl Iterator<Item = &BufferParam> {
    chain.buffers().iter().flat_map(|buffer| &buffer.params)
}

/// Opens the single weight file, or those of the index, sorted by name.
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
        // A path that leads out of the directory is invalid.
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

    /// The names that a tensor may have in files: with or without the prefix, and those of the first BERT.
    fn spellings(&self, name: &str) -> Vec<String> {
        let older = |name: &str| {
            let weight = name.replace("LayerNorm.weight", "LayerNorm.gamma");
            weight.replace("LayerNorm.bias", "LayerNorm.beta")
        };
        let bare = self.bare(name);
        let mut all: Vec<String> = Vec::new();
        for spelling in [name.to_owned(), bare.to_owned(), older(name), older(bare)] {
            if !all.contains(&spelling) {
                all.push(spelling);
            }
        }
        all
    }

    /// Finds the tensor of this name by any of its spellings.
    fn find(&self, name: &str) -> Result<TensorLocation, ModelError> {
        let named = |tensor: &String| {
            let files = self.files.iter().filter(|file| file.info(tensor).is_some());
            let place =
                |file: &Arc<TensorFile>| TensorLocation { file: file.clone(), tensor: tensor.clone() };
            files.map(place).collect::<Vec<_>>()
        };
        let mut places: Vec<TensorLocation> = self.spellings(name).iter().flat_map(named).collect();
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

    /// The block index in a tensor's name, such as 3 in `transformer.h.3.ln_1.bias`.
    fn block_of(&self, tensor: &str) -> Option<usize> {
        self.bare(tensor).strip_prefix(self.naming.blocks)?.split_once('.')?.0.parse().ok()
    }

    /// Rejects weights of more blocks than configured, because the model would be a truncated one.
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
                "{needed}, because the weights have the tensor `{tensor}`: use the config.json that belongs to \
                 the weights, or remove the extra blocks from them"
            ),
        };
        Err(in_file(&self.directory.join(CONFIG), source))
    }

    /// Rejects parameters of blocks that the chain does not have, because it would compute something else without them.
    fn check_known(&self, known: &BTreeMap<String, TensorLocation>, chain: &str) -> Result<(), ModelError> {
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

    /// The tensors of floats outside of blocks that are not known.
    fn unread(&self, known: &BTreeMap<String, TensorLocation>) -> BTreeSet<String> {
        let known: BTreeSet<&str> = known.values().map(|place| place.tensor.as_str()).collect();
        // A quantized matrix has further tensors, such as `lm_head.weight.absmax`. The frequencies of rotary embeddings are
        // no weights, as in Transformers.
        let is_known = |name: &str| {
            let matrix = name.split_once(".weight.").map(|(module, _)| format!("{module}.weight"));
            known.contains(matrix.as_deref().unwrap_or(name)) || name.contains("rotary_emb.inv_freq")
        };
        // Tensors of integers, such as BERT's `position_ids`, are no weights.
        let floats = |file: &Arc<TensorFile>| {
            let names = file.names().into_iter().filter(|name| file.float_type(name).is_some());
            names.collect::<Vec<_>>()
        };
        let names = self.files.iter().flat_map(floats);
        names.filter(|name| self.block_of(name).is_none() && !is_known(name.as_str())).collect()
    }

    /// Rejects a stored head that differs from the embedding.
    fn check_tied_head(&self, embedding: Option<&TensorLocation>) -> Result<(), ModelError> {
        let Some(head) = self.files.iter().find(|file| file.info(HEAD).is_some()) else { return Ok(()) };
        let Some(embedding) = embedding else { return Ok(()) };
        if head.same(HEAD, &embedding.file, &embedding.tensor)? != Some(false) {
            return Ok(());
        }
        let source = ModelError::Config {
            name: HEAD,
            found: format!("different from `{}`", embedding.tensor),
            expected: "the same shape, type and values, because the head is tied to the embedding: tie the weights and save \
                       the model again"
                .to_owned(),
        };
        Err(in_file(self.directory, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family;
    use crate::weights::SavedType;
    use crate::weights::testing::ParamBuffers;
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
    use tempfile::TempDir;

    #[test]
    fn tensors_that_a_language_model_does_not_use_are_named() {
        let dir = TempDir::new().unwrap();
        let model = family::load("bytes-tiny").unwrap();
        let chain = model.chain().unwrap();
        let writer = model.writer(SavedType::F32.into());
        writer.write(&chain, &ParamBuffers::of(&chain, 7), dir.path()).unwrap();
        let path = dir.path().join(WEIGHTS);
        let bytes = fs::read(&path).unwrap();
        let written = SafeTensors::deserialize(&bytes).unwrap();
        let zero = [0_u8; 4];
        let notes = |more: &[&str]| {
            let added = more.iter().map(|name| match *name {
                HEAD => ((*name).to_owned(), written.tensor("transformer.wte.weight").unwrap()),
                _ => ((*name).to_owned(), TensorView::new(Dtype::F32, vec![1], &zero).unwrap()),
            });
            let all: Vec<(String, TensorView)> = written.tensors().into_iter().chain(added).collect();
            fs::write(&path, serialize(all, None).unwrap()).unwrap();
            family::load(dir.path().to_str().unwrap()).unwrap().notes()
        };
        let buffers = ["transformer.h.0.attn.bias", "h.1.attn.masked_bias", "rotary_emb.inv_freq"];
        assert!(notes(&[&buffers[..], &[HEAD]].concat()).is_empty());
        let place = dir.path().display();
        let expected = format!("the model does not use `lm_head.bias`, `v_head.summary.weight` of `{place}`");
        assert_eq!(notes(&["v_head.summary.weight", "lm_head.bias", HEAD]), [expected]);
    }
}
