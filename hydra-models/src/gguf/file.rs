//! Writes GGUF files.

use super::adapter::{AdapterParam, Adapters};
use super::layout::{GgufLayout, Transform};
use super::quantize::Encoder;
use super::{GgufError, GgufType, tokens};
use crate::family::Model;
use crate::lora::Lora;
use crate::tokenizer::Tokenizer;
use crate::weights::{WriteFailure, read_param};
use hydra_core::{BufferParam, Chain, ModelWriter, ParamBufferReader, WeightError, replace_file};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// The version of the format.
const VERSION: u32 = 3;
/// The version of ggml's quantized types.
const QUANTIZATION: u32 = 2;
/// Offsets of tensors are multiples of this number of bytes.
const ALIGNMENT: usize = 32;

/// A value of a file's metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Count(u32),
    Number(f32),
    Truth(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i32>),
    Numbers(Vec<f32>),
}

impl Value {
    /// The number of the type in the format.
    fn kind(&self) -> u32 {
        match self {
            Self::Count(_) => 4,
            Self::Number(_) => 6,
            Self::Truth(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::Integers(_) | Self::Numbers(_) => 9,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, kind: u32, length: usize| {
            out.extend(kind.to_le_bytes());
            out.extend((length as u64).to_le_bytes());
        };
        match self {
            Self::Count(count) => out.extend(count.to_le_bytes()),
            Self::Number(number) => out.extend(number.to_le_bytes()),
            Self::Truth(truth) => out.push(u8::from(*truth)),
            Self::Text(text) => write_text(text, out),
            Self::Texts(texts) => {
                list(out, 8, texts.len());
                texts.iter().for_each(|text| write_text(text, out));
            }
            Self::Integers(numbers) => {
                list(out, 5, numbers.len());
                numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
            }
            Self::Numbers(numbers) => {
                list(out, 6, numbers.len());
                numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
            }
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Writes a language model, or adapters of one, as a GGUF file of this name in a directory. The file is renamed into place when it
/// is complete.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    layout: GgufLayout,
    metadata: Vec<(String, Value)>,
    dtype: GgufType,
    file: String,
    /// Whose factors are written, if it is not the model.
    adapters: Option<Adapters>,
}

impl GgufWriter {
    /// A writer of `model` with this tokenizer, to a file of the name `file`, with matrices of this type.
    ///
    /// # Errors
    /// A model or a tokenizer that the format cannot hold.
    pub fn new(
        model: &dyn Model,
        tokenizer: &Tokenizer,
        dtype: GgufType,
        file: impl Into<String>,
    ) -> Result<Self, GgufError> {
        let layout = model.gguf()?;
        let directory = model.directory();
        let mut metadata = general(&layout, "model", directory, dtype);
        let prefixed =
            |(key, value): &(&str, Value)| (format!("{}.{key}", layout.architecture), value.clone());
        metadata.extend(layout.settings.iter().map(prefixed));
        metadata.extend(tokens::metadata(tokenizer, directory, &layout)?);
        Ok(Self { layout, metadata, dtype, file: file.into(), adapters: None })
    }

    /// A writer of adapters of `model`, those of the directory or of a task with these settings, which llama.cpp reads together with
    /// the model's file.
    ///
    /// # Errors
    /// A model that the format cannot hold, or adapters that replace values of the model.
    pub fn of_adapters(
        model: &dyn Model,
        lora: &Lora,
        directory: Option<&Path>,
        dtype: GgufType,
        file: impl Into<String>,
    ) -> Result<Self, GgufError> {
        let mut layout = model.gguf()?;
        layout.computed.clear();
        let adapters = Adapters::new(model.plan(lora)?)?;
        let mut metadata = general(&layout, "adapter", directory, dtype);
        metadata.extend(adapters.metadata());
        Ok(Self { layout, metadata, dtype, file: file.into(), adapters: Some(adapters) })
    }

    /// What llama.cpp computes in another way, each as a sentence without an end.
    pub fn notes(&self) -> &[String] {
        &self.layout.notes
    }

    /// What the file has of a parameter; `None` if adapters are written and it is not one of theirs.
    fn place(&self, param: &BufferParam) -> io::Result<Option<StoredTensor>> {
        let unknown = || io::Error::other(format!("llama.cpp has no tensor for `{}`", param.name));
        match &self.adapters {
            Some(adapters) => match AdapterParam::of(&param.name) {
                Some(of) => adapters.place(&of, &self.layout).ok_or_else(unknown).map(Some),
                None => Ok(None),
            },
            None => {
                let theirs = (self.layout.transformers)(&param.name);
                let name = self.layout.name(&theirs).ok_or_else(unknown)?;
                Ok(Some(StoredTensor { name, transform: self.layout.transform(&theirs), factor: 1.0 }))
            }
        }
    }

    /// The tensors of a chain, in its order. Consecutive parameters of one name are slices of one tensor.
    fn tensors<'a>(&self, chain: &'a Chain) -> io::Result<Vec<Tensor<'a>>> {
        let mut tensors: Vec<Tensor<'_>> = Vec::new();
        for (buffer, layout) in chain.buffers().iter().enumerate() {
            for param in &layout.params {
                let Some(StoredTensor { name, transform, factor }) = self.place(param)? else { continue };
                let piece = Piece { buffer, elements: layout.elements, param };
                match tensors.last_mut().filter(|last| last.name == name) {
                    Some(last) => {
                        last.shape[0] += param.shape[0];
                        last.pieces.push(piece);
                    }
                    None => tensors.push(Tensor {
                        transform,
                        factor,
                        name,
                        shape: param.shape.clone(),
                        kind: GgufType::F32,
                        pieces: vec![piece],
                    }),
                }
            }
        }
        for tensor in &mut tensors {
            if tensor.transform == Transform::Transpose {
                tensor.shape.reverse();
            }
            tensor.kind = self.kind(tensor);
        }
        Ok(tensors)
    }

    /// The type of a tensor: `F32` for vectors, norms and positions, as llama.cpp's converter has it.
    fn kind(&self, tensor: &Tensor<'_>) -> GgufType {
        let name = tensor.name.as_str();
        let [.., columns] = tensor.shape[..] else { return GgufType::F32 };
        let is_float =
            tensor.shape.len() == 1 || name.ends_with("_norm.weight") || name == "position_embd.weight";
        if is_float { GgufType::F32 } else { self.dtype.for_rows(columns) }
    }

    /// The bytes before the tensors' values.
    fn header(&self, tensors: &[Tensor<'_>]) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        let computed = &self.layout.computed;
        out.extend(VERSION.to_le_bytes());
        out.extend(((computed.len() + tensors.len()) as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_text(key, &mut out);
            out.extend(value.kind().to_le_bytes());
            value.write(&mut out);
        }
        let mut offset = 0;
        let mut info = |name: &str, shape: &[usize], kind: GgufType| {
            write_text(name, &mut out);
            out.extend((shape.len() as u32).to_le_bytes());
            // The format begins with the dimension of neighbours.
            shape.iter().rev().for_each(|size| out.extend((*size as u64).to_le_bytes()));
            out.extend(kind.number().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += kind.bytes(shape.iter().product()).next_multiple_of(ALIGNMENT);
        };
        computed.iter().for_each(|(name, values)| info(name, &[values.len()], GgufType::F32));
        tensors.iter().for_each(|tensor| info(&tensor.name, &tensor.shape, tensor.kind));
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }

    fn write_to(
        &self,
        chain: &Chain,
        buffers: &dyn ParamBufferReader,
        file: &mut File,
    ) -> Result<(), WriteFailure> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let tensors = self.tensors(chain)?;
        out.write_all(&self.header(&tensors))?;
        for (_, values) in &self.layout.computed {
            Encoder::new(GgufType::F32, &mut out).write(values)?;
            pad(GgufType::F32.bytes(values.len()), &mut out)?;
        }
        for tensor in &tensors {
            tensor.write(buffers, &mut out)?;
            pad(tensor.kind.bytes(tensor.shape.iter().product()), &mut out)?;
        }
        Ok(out.flush()?)
    }
}

/// The metadata that every file has.
fn general(
    layout: &GgufLayout,
    kind: &str,
    directory: Option<&Path>,
    dtype: GgufType,
) -> Vec<(String, Value)> {
    let name = directory.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let text = |key: &str, text: &str| (key.to_owned(), Value::Text(text.to_owned()));
    vec![
        text("general.architecture", layout.architecture),
        text("general.type", kind),
        text("general.name", name.as_deref().unwrap_or(kind)),
        ("general.file_type".to_owned(), Value::Count(dtype.file_number())),
        ("general.quantization_version".to_owned(), Value::Count(QUANTIZATION)),
    ]
}

/// Writes zeros after a tensor of this many bytes.
fn pad(bytes: usize, out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; ALIGNMENT][..bytes.next_multiple_of(ALIGNMENT) - bytes])
}

impl ModelWriter for GgufWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let path = dir.join(&self.file);
        fs::create_dir_all(dir).map_err(|error| WriteFailure::Io(error).of(dir))?;
        let write = |file: &mut File| self.write_to(chain, buffers, file);
        replace_file(&path, write).map_err(|failure: WriteFailure| failure.of(&path))
    }
}

/// What a file has of a parameter.
pub(super) struct StoredTensor {
    /// The tensor's name.
    pub name: String,
    pub transform: Transform,
    /// What the values are multiplied by.
    pub factor: f32,
}

/// A tensor of the file.
struct Tensor<'a> {
    name: String,
    /// The shape in the file, rows first.
    shape: Vec<usize>,
    kind: GgufType,
    transform: Transform,
    factor: f32,
    pieces: Vec<Piece<'a>>,
}

/// A parameter of a tensor, with the index and the number of elements of its buffer.
struct Piece<'a> {
    buffer: usize,
    elements: usize,
    param: &'a BufferParam,
}

impl Tensor<'_> {
    fn write(&self, buffers: &dyn ParamBufferReader, out: &mut impl Write) -> Result<(), WriteFailure> {
        let mut encoder = Encoder::new(self.kind, out);
        let each = |take: &mut dyn FnMut(&[f32]) -> Result<(), WriteFailure>| {
            let mut scaled = |values: &[f32]| match self.factor {
                1.0 => take(values),
                factor => take(&values.iter().map(|value| value * factor).collect::<Vec<f32>>()),
            };
            self.pieces.iter().try_for_each(|Piece { buffer, elements, param }| {
                read_param(buffers, (*buffer, *elements), param, 0..param.len, &mut scaled)
            })
        };
        if self.transform == Transform::Keep {
            return each(&mut |values| Ok(encoder.write(values)?));
        }
        let mut values = Vec::with_capacity(self.shape.iter().product());
        each(&mut |piece| {
            values.extend_from_slice(piece);
            Ok(())
        })?;
        let rows = self.shape[0];
        let columns = values.len() / rows;
        match self.transform {
            Transform::Transpose => {
                let row = |row: usize| values.iter().skip(row).step_by(rows).copied().collect::<Vec<f32>>();
                (0..rows).try_for_each(|at| encoder.write(&row(at)))?;
            }
            Transform::Heads(heads) => {
                let source = |row: usize| alternated(row, rows / heads);
                (0..rows).try_for_each(|row| encoder.write(&values[source(row) * columns..][..columns]))?;
            }
            Transform::Keep => {}
        }
        Ok(())
    }
}

/// The row, in the order of Transformers, that llama.cpp has at `row`, for heads of this width: its rotary embedding turns
/// neighbours, and that of Transformers turns the elements `i` and `i + width / 2`.
fn alternated(row: usize, width: usize) -> usize {
    let (head, own) = (row / width * width, row % width);
    head + own % 2 * (width / 2) + own / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_alternate_between_its_halves() {
        let rows: Vec<usize> = (0..8).map(|row| alternated(row, 4)).collect();
        assert_eq!(rows, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn values_have_their_types_and_lengths() {
        let bytes = |value: Value| {
            let mut out = Vec::new();
            value.write(&mut out);
            (value.kind(), out)
        };
        assert_eq!(bytes(Value::Count(7)), (4, vec![7, 0, 0, 0]));
        assert_eq!(bytes(Value::Truth(true)), (7, vec![1]));
        let text = [&2_u64.to_le_bytes()[..], b"ab"].concat();
        assert_eq!(bytes(Value::Text("ab".to_owned())), (8, text.clone()));
        let list = [&8_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &text].concat();
        assert_eq!(bytes(Value::Texts(vec!["ab".to_owned()])), (9, list));
    }
}
