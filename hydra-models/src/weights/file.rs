//! Reads a safetensors file tensor by tensor.

use super::is_count;
use super::quantized::Quantized;
use crate::ModelError;
use half::{bf16, f16};
use hydra_core::{BufferParam, FileSpan, FileVersion, FloatType};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes of the header's length field.
const PREFIX: u64 = 8;

/// The format's limit on the header's length.
const LONGEST_HEADER: u64 = 100_000_000;

/// Elements read and converted at a time.
const PIECE: usize = 1 << 16;

/// A file whose header has been read and checked.
#[derive(Clone, Debug)]
pub(crate) struct TensorFile {
    /// The file.
    pub path: PathBuf,
    /// The file as it was when its header was read.
    pub version: FileVersion,
    data: u64,
    metadata: Metadata,
    /// The quantized matrices.
    quantized: BTreeMap<String, Quantized>,
}

impl TensorFile {
    /// Reads the header and checks it against the file's length.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let read = |source| ModelError::Read { path: path.to_owned(), source };
        let header = |source| ModelError::Header { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(read)?;
        let version = FileVersion::new(path, &file.metadata().map_err(read)?);
        let found = version.bytes();
        let length = |expected| ModelError::Length { path: path.to_owned(), expected, found };
        if found < PREFIX {
            return Err(length(PREFIX));
        }
        let mut prefix = [0; PREFIX as usize];
        file.read_exact(&mut prefix).map_err(read)?;
        let size = u64::from_le_bytes(prefix);
        if size > LONGEST_HEADER {
            return Err(header(SafeTensorError::HeaderTooLarge));
        }
        let data = PREFIX + size;
        if found < data {
            return Err(length(data));
        }
        let mut text = vec![0; size as usize];
        file.read_exact(&mut text).map_err(read)?;
        let metadata: Metadata = serde_json::from_slice(&text)
            .map_err(|source| header(SafeTensorError::InvalidHeaderDeserialization(source)))?;
        let expected = data + metadata.data_len() as u64;
        if found != expected {
            return Err(length(expected));
        }
        let file = Self { path: path.to_owned(), version, data, metadata, quantized: BTreeMap::new() };
        Ok(Self { quantized: Quantized::all(&file)?, ..file })
    }

    /// The header entry of a tensor.
    pub fn info(&self, tensor: &str) -> Option<&TensorInfo> {
        self.metadata.info(tensor)
    }

    /// The type of a tensor's values, if it is one that [`read`](Self::read) converts.
    pub fn float_type(&self, tensor: &str) -> Option<FloatType> {
        if self.is_quantized(tensor) {
            return Some(FloatType::F32);
        }
        match self.info(tensor)?.dtype {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::BF16 => Some(FloatType::Bf16),
            _ => None,
        }
    }

    /// Returns whether a tensor is a quantized matrix, whose values are read as `f32`.
    pub fn is_quantized(&self, tensor: &str) -> bool {
        self.quantized.contains_key(tensor)
    }

    /// Some bytes of a tensor.
    pub(super) fn bytes(&self, tensor: &str, bytes: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let missing = || ModelError::TensorMissing { place: self.path.clone(), tensor: tensor.to_owned() };
        let info = self.info(tensor).ok_or_else(missing)?;
        let read = || {
            let mut file = self.open_at(info)?;
            file.seek_relative(bytes.start as i64)?;
            let mut out = vec![0; bytes.len()];
            file.read_exact(&mut out)?;
            Ok(out)
        };
        read().map_err(|source| ModelError::Read { path: self.path.clone(), source })
    }

    /// The text of a key of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Where a tensor's values are, from the element `first` on.
    pub fn span(&self, tensor: &str, first: usize) -> Option<FileSpan> {
        let info = self.info(tensor).filter(|_| !self.is_quantized(tensor))?;
        let offset = self.data + (info.data_offsets.0 + first * info.dtype.bitsize() / 8) as u64;
        Some(FileSpan { path: self.path.as_path().into(), offset })
    }

    /// The names of all tensors, in no particular order.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Returns whether a tensor has the same shape, type and bytes as a tensor of `other`, comparing piece by piece;
    /// `None` if one of them is missing.
    pub fn same(&self, tensor: &str, other: &Self, theirs: &str) -> Result<Option<bool>, ModelError> {
        let (Some(a), Some(b)) = (self.info(tensor), other.info(theirs)) else { return Ok(None) };
        if a.shape != b.shape || a.dtype != b.dtype {
            return Ok(Some(false));
        }
        let failed = |file: &Self, source| ModelError::Read { path: file.path.clone(), source };
        let open = |file: &Self, info| file.open_at(info).map_err(|source| failed(file, source));
        let (mut ours, mut theirs) = (open(self, a)?, open(other, b)?);
        let (mut left, mut right) = (vec![0; PIECE], vec![0; PIECE]);
        let mut rest = a.data_offsets.1 - a.data_offsets.0;
        while rest > 0 {
            let piece = rest.min(PIECE);
            ours.read_exact(&mut left[..piece]).map_err(|source| failed(self, source))?;
            theirs.read_exact(&mut right[..piece]).map_err(|source| failed(other, source))?;
            if left[..piece] != right[..piece] {
                return Ok(Some(false));
            }
            rest -= piece;
        }
        Ok(Some(true))
    }

    /// Opens the file at the start of a tensor's bytes.
    fn open_at(&self, info: &TensorInfo) -> io::Result<File> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.data + info.data_offsets.0 as u64))?;
        Ok(file)
    }

    /// Checks that a tensor has this shape and a supported type.
    pub fn check(&self, tensor: &str, expected: &[usize]) -> Result<(), ModelError> {
        let (path, name) = (self.path.clone(), tensor.to_owned());
        let Some(info) = self.info(tensor) else {
            return Err(ModelError::TensorMissing { place: path, tensor: name });
        };
        let quantized = self.quantized.get(tensor);
        let shape = quantized.map_or(&info.shape, |quantized| &quantized.shape);
        if shape != expected {
            let (expected, found) = (expected.to_vec(), shape.clone());
            return Err(ModelError::Shape { path, tensor: name, expected, found });
        }
        match info.dtype {
            _ if quantized.is_some() => Ok(()),
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => Ok(()),
            found => Err(ModelError::Type { path, tensor: name, found: found.to_string() }),
        }
    }

    /// Checks that a tensor has the shape of a parameter and a supported type; a count is an integer without dimensions.
    pub fn check_param(&self, tensor: &str, param: &BufferParam) -> Result<(), ModelError> {
        match self.info(tensor).filter(|_| is_count(param)) {
            Some(info) if info.dtype == Dtype::I64 && info.shape.iter().product::<usize>() == 1 => Ok(()),
            Some(info) if info.shape.is_empty() => self.check(tensor, &[]),
            _ => self.check(tensor, &param.shape),
        }
    }

    /// Reads a whole tensor, converted to `f32`; `out` has its number of elements.
    #[cfg(test)]
    pub fn read(&self, tensor: &str, out: &mut [f32]) -> Result<(), ModelError> {
        self.check_length(tensor, out.len())?;
        self.read_part(tensor, 0, out)
    }

    /// Fills `out` with elements of a tensor from index `from` on, converted to `f32`.
    pub fn read_part(&self, tensor: &str, from: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let elements = self.shape(tensor).map_or(0, |shape| shape.iter().product());
        if from.checked_add(out.len()).is_none_or(|end| end > elements) {
            self.check_length(tensor, from.saturating_add(out.len()))?;
        }
        if let Some(quantized) = self.quantized.get(tensor) {
            return quantized.values(self, tensor, from, out);
        }
        let read = self.read_checked(tensor, from, out);
        read.map_err(|source| ModelError::Read { path: self.path.clone(), source })
    }

    /// The shape of a tensor, or of the matrix that it has quantized.
    fn shape(&self, tensor: &str) -> Option<&[usize]> {
        let quantized = self.quantized.get(tensor).map(|quantized| quantized.shape.as_slice());
        quantized.or_else(|| Some(self.info(tensor)?.shape.as_slice()))
    }

    fn check_length(&self, tensor: &str, elements: usize) -> Result<(), ModelError> {
        match self.shape(tensor) {
            Some(shape) if shape.iter().product::<usize>() == elements => self.check(tensor, shape),
            _ => self.check(tensor, &[elements]),
        }
    }

    fn read_checked(&self, tensor: &str, from: usize, out: &mut [f32]) -> io::Result<()> {
        let Some(info) = self.info(tensor) else { return Err(io::ErrorKind::NotFound.into()) };
        let mut file = self.open_at(info)?;
        let size = info.dtype.bitsize() / 8;
        file.seek_relative((from * size) as i64)?;
        let mut buffer = vec![0; PIECE.min(out.len()) * size];
        for piece in out.chunks_mut(PIECE) {
            let bytes = &mut buffer[..piece.len() * size];
            file.read_exact(bytes)?;
            convert(info.dtype, bytes, piece);
        }
        Ok(())
    }
}

fn convert(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::BF16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        Dtype::I64 => each(bytes, out, |b| i64::from_le_bytes(b) as f32),
        _ => each(bytes, out, f32::from_le_bytes),
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *x = value(*bytes);
    }
}
