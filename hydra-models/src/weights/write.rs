//! Writes the master weights of a chain as a safetensors file, part by part.

use super::SavedType;
use hydra_core::{BUFFER_PART, Chain, ParamBufferReader, WeightError, replace_file};
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Converts an I/O error to a writer's error.
pub(crate) fn failed(path: &Path, source: io::Error) -> WeightError {
    WeightError::Write { path: path.to_owned(), source: source.into() }
}

/// A read or write error, separated again after the temporary file has been removed.
enum Failure {
    Io(io::Error),
    Weights(WeightError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
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
    write_with_metadata(chain, buffers, path, saved, name, None)
}

/// The same with an entry of the file's metadata, a key and its text.
pub(crate) fn write_with_metadata(
    chain: &Chain,
    buffers: &dyn ParamBufferReader,
    path: &Path,
    saved: SavedType,
    name: &dyn Fn(&str) -> Option<String>,
    metadata: Option<(&str, String)>,
) -> Result<(), WeightError> {
    let write = |file: &mut File| {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let header = header(chain, saved, name, metadata.clone())?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (index, buffer) in chain.buffers().iter().enumerate() {
            let params: Vec<_> = buffer.params.iter().filter(|param| name(&param.name).is_some()).collect();
            for start in (0..buffer.elements).step_by(BUFFER_PART) {
                let part = start..buffer.elements.min(start + BUFFER_PART);
                let mut written = params.iter().filter_map(|param| param.among(&part)).peekable();
                if written.peek().is_none() {
                    continue;
                }
                let bytes = buffers.part(index, part.clone()).map_err(Failure::Weights)?;
                for elements in written {
                    let [from, to] = [elements.start, elements.end].map(|at| (at - start) * size_of::<f32>());
                    let bytes = &bytes[from..to];
                    match bytemuck::try_cast_slice(bytes) {
                        Ok(values) => saved.write(values, &mut out)?,
                        Err(_) => saved.write(&bytemuck::pod_collect_to_vec::<u8, f32>(bytes), &mut out)?,
                    }
                }
            }
        }
        Ok(out.flush()?)
    };
    replace_file(path, write).map_err(|failure| match failure {
        Failure::Io(error) => failed(path, error),
        Failure::Weights(error) => error,
    })
}

/// Builds the header: tensors in buffer order, without gaps. Consecutive parameters of one name are slices of one
/// tensor, concatenated by rows.
fn header(
    chain: &Chain,
    saved: SavedType,
    name: &dyn Fn(&str) -> Option<String>,
    metadata: Option<(&str, String)>,
) -> io::Result<Vec<u8>> {
    let mut tensors: Vec<(String, TensorInfo)> = Vec::new();
    let mut end = 0;
    for param in chain.buffers().iter().flat_map(|buffer| &buffer.params) {
        let Some(name) = name(&param.name) else { continue };
        let start = end;
        end += param.len * saved.bytes();
        match tensors.last_mut().filter(|(last, _)| *last == name) {
            Some((_, whole)) => {
                whole.shape[0] += param.shape[0];
                whole.data_offsets.1 = end;
            }
            None => {
                let (shape, data_offsets) = (param.shape.clone(), (start, end));
                tensors.push((name, TensorInfo { dtype: saved.dtype(), shape, data_offsets }));
            }
        }
    }
    // Transformers rejects files that do not name the framework.
    let mut all = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    all.extend(metadata.map(|(key, text)| (key.to_owned(), text)));
    let metadata = Metadata::new(Some(all), tensors).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}
