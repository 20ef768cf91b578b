//! Writes the master weights of a chain as safetensors files, part by part.

use super::{INDEX, SaveForm, SavedType, WEIGHTS, is_count};
use hydra_core::{
    BUFFER_PART, BufferParam, Chain, ParamBufferLayout, ParamBufferReader, WeightError, replace_file,
};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::json;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

/// Converts an I/O error to a writer's error.
pub(crate) fn failed(path: &Path, source: io::Error) -> WeightError {
    WeightError::Write { path: path.to_owned(), source: source.into() }
}

/// A read or write error, separated again after the temporary file has been removed.
pub(crate) enum WriteFailure {
    Io(io::Error),
    Weights(WeightError),
}

impl From<WeightError> for WriteFailure {
    fn from(error: WeightError) -> Self {
        Self::Weights(error)
    }
}

impl From<io::Error> for WriteFailure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl WriteFailure {
    /// The error of writing this file.
    pub fn of(self, path: &Path) -> WeightError {
        match self {
            Self::Io(error) => failed(path, error),
            Self::Weights(error) => error,
        }
    }
}

/// Writes the weights of a model into a directory: the file [`WEIGHTS`] or, if the tensors take more than a file may
/// have, files `model-00001-of-0000N.safetensors` and the index that Transformers reads. The index is written last.
pub(crate) fn write_model(
    chain: &Chain,
    buffers: &dyn ParamBufferReader,
    dir: &Path,
    form: SaveForm,
    name: &dyn Fn(&str) -> Option<String>,
) -> Result<(), WeightError> {
    let files = Files::new(chain, form, name);
    if files.count <= 1 {
        return write_tensors(chain, buffers, &dir.join(WEIGHTS), form.dtype, name);
    }
    for file in 0..files.count {
        let of_file = |param: &str| name(param).filter(|tensor| files.of.get(tensor) == Some(&file));
        write_tensors(chain, buffers, &dir.join(files.name(file)), form.dtype, &of_file)?;
    }
    let path = dir.join(INDEX);
    let weight_map: BTreeMap<&str, String> =
        files.of.iter().map(|(tensor, file)| (tensor.as_str(), files.name(*file))).collect();
    let index = json!({ "metadata": { "total_size": files.bytes }, "weight_map": weight_map });
    let text = serde_json::to_vec_pretty(&index).map_err(|error| failed(&path, error.into()))?;
    replace_file(&path, |out| out.write_all(&text)).map_err(|error| failed(&path, error))
}

/// The files of a model's tensors. Tensors are in the order of the chain; a file ends before the tensor with which it
/// would be too large.
struct Files {
    of: BTreeMap<String, usize>,
    count: usize,
    /// The bytes of all tensors.
    bytes: u64,
}

impl Files {
    fn new(chain: &Chain, form: SaveForm, name: &dyn Fn(&str) -> Option<String>) -> Self {
        let mut sizes: Vec<(String, u64)> = Vec::new();
        for param in chain.buffers().iter().flat_map(|buffer| &buffer.params) {
            let (Some(tensor), bytes) = (name(&param.name), bytes_of(param, form.dtype) as u64) else {
                continue;
            };
            match sizes.last_mut().filter(|(last, _)| *last == tensor) {
                Some((_, whole)) => *whole += bytes,
                None => sizes.push((tensor, bytes)),
            }
        }
        let (mut file, mut in_file) = (0, 0);
        let (mut of, bytes) = (BTreeMap::new(), sizes.iter().map(|(_, bytes)| bytes).sum());
        for (tensor, bytes) in sizes {
            if in_file > 0 && in_file + bytes > form.shard_bytes {
                (file, in_file) = (file + 1, 0);
            }
            in_file += bytes;
            of.insert(tensor, file);
        }
        Self { of, count: file + 1, bytes }
    }

    /// The name of a file, as Transformers numbers them.
    fn name(&self, file: usize) -> String {
        format!("model-{:05}-of-{:05}.safetensors", file + 1, self.count)
    }
}

/// Passes the elements `wanted` of a parameter to `take`, in order and in pieces. `buffer` is the index of its buffer;
/// only [parts](BUFFER_PART) of it are read.
pub(crate) fn read_param<E: From<WeightError>>(
    buffers: &dyn ParamBufferReader,
    (buffer, elements): (usize, usize),
    param: &BufferParam,
    wanted: Range<usize>,
    mut take: impl FnMut(&[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let (mut at, end) = (param.offset + wanted.start, param.offset + wanted.end);
    while at < end {
        let start = at - at % BUFFER_PART;
        let part = start..elements.min(start + BUFFER_PART);
        let until = end.min(part.end);
        let bytes = buffers.part(buffer, part)?;
        let bytes = &bytes[(at - start) * size_of::<f32>()..(until - start) * size_of::<f32>()];
        match bytemuck::try_cast_slice(bytes) {
            Ok(values) => take(values)?,
            Err(_) => take(&bytemuck::pod_collect_to_vec::<u8, f32>(bytes))?,
        }
        at = until;
    }
    Ok(())
}

/// Writes the parameters of `chain` that `name` maps to a tensor name, in the type `saved`. The file is renamed into
/// place when it is complete, and at most a part of a buffer is in memory.
pub(crate) fn write_tensors(
    chain: &Chain,
    buffers: &dyn ParamBufferReader,
    path: &Path,
    saved: SavedType,
    name: &dyn Fn(&str) -> Option<String>,
) -> Result<(), WeightError> {
    write_with_metadata(chain, buffers, path, saved, name, &[])
}

/// The same with entries of the file's metadata, keys and their texts.
pub(crate) fn write_with_metadata(
    chain: &Chain,
    buffers: &dyn ParamBufferReader,
    path: &Path,
    saved: SavedType,
    name: &dyn Fn(&str) -> Option<String>,
    metadata: &[(&str, String)],
) -> Result<(), WeightError> {
    let write = |file: &mut File| {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let header = header(chain, saved, name, metadata)?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (index, buffer, counts) in passes(chain) {
            let is_written = |param: &&BufferParam| name(&param.name).is_some() && is_count(param) == counts;
            let params: Vec<_> = buffer.params.iter().filter(is_written).collect();
            for start in (0..buffer.elements).step_by(BUFFER_PART) {
                let part = start..buffer.elements.min(start + BUFFER_PART);
                let mut written = params.iter().filter_map(|param| param.among(&part)).peekable();
                if written.peek().is_none() {
                    continue;
                }
                let bytes = buffers.part(index, part.clone())?;
                for elements in written {
                    let [from, to] = [elements.start, elements.end].map(|at| (at - start) * size_of::<f32>());
                    let bytes = &bytes[from..to];
                    let values: Cow<'_, [f32]> = match bytemuck::try_cast_slice(bytes) {
                        Ok(values) => values.into(),
                        Err(_) => bytemuck::pod_collect_to_vec(bytes).into(),
                    };
                    match counts {
                        true => write_counts(&values, &mut out)?,
                        false => saved.write(&values, &mut out)?,
                    }
                }
            }
        }
        Ok(out.flush()?)
    };
    replace_file(path, write).map_err(|failure: WriteFailure| failure.of(path))
}

/// The buffers, first for counts and then for all other parameters: PyTorch's reader needs the wider type first.
fn passes(chain: &Chain) -> impl Iterator<Item = (usize, &ParamBufferLayout, bool)> {
    let buffers =
        |counts| chain.buffers().iter().enumerate().map(move |(index, buffer)| (index, buffer, counts));
    [true, false].into_iter().flat_map(buffers)
}

fn write_counts(counts: &[f32], out: &mut impl Write) -> io::Result<()> {
    counts.iter().try_for_each(|count| out.write_all(&(*count as i64).to_le_bytes()))
}

/// The bytes of a parameter in a file.
fn bytes_of(param: &BufferParam, saved: SavedType) -> usize {
    param.len * if is_count(param) { size_of::<i64>() } else { saved.bytes() }
}

/// Builds the header: tensors in the order of [`passes`], without gaps. Consecutive parameters of one name are slices of one
/// tensor, concatenated by rows.
fn header(
    chain: &Chain,
    saved: SavedType,
    name: &dyn Fn(&str) -> Option<String>,
    metadata: &[(&str, String)],
) -> io::Result<Vec<u8>> {
    let mut tensors: Vec<(String, TensorInfo)> = Vec::new();
    let mut end = 0;
    let params = passes(chain)
        .flat_map(|(_, buffer, counts)| buffer.params.iter().filter(move |param| is_count(param) == counts));
    for param in params {
        let Some(name) = name(&param.name) else { continue };
        let start = end;
        end += bytes_of(param, saved);
        match tensors.last_mut().filter(|(last, _)| *last == name) {
            Some((_, whole)) => {
                whole.shape[0] += param.shape[0];
                whole.data_offsets.1 = end;
            }
            None => {
                let data_offsets = (start, end);
                let (dtype, shape) = match is_count(param) {
                    true => (Dtype::I64, Vec::new()),
                    false => (saved.dtype(), param.shape.clone()),
                };
                tensors.push((name, TensorInfo { dtype, shape, data_offsets }));
            }
        }
    }
    // Transformers rejects files that do not name the framework.
    let mut all = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    all.extend(metadata.iter().map(|(key, text)| ((*key).to_owned(), text.clone())));
    let metadata = Metadata::new(Some(all), tensors).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}
