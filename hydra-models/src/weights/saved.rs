//! Data types of written weights.

use super::TensorFile;
use crate::ModelError;
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;

/// The data type of weights in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SavedType {
    /// Lossless.
    #[default]
    F32,
    /// The range of `F32` with 8 bits of precision.
    Bf16,
    /// 11 bits of precision, and values up to 65504.
    F16,
}

/// How weights are written: their type, and the size of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveForm {
    /// The type of the values.
    pub dtype: SavedType,
    /// The maximum bytes of the tensors in a file; a larger tensor has a file of its own.
    pub shard_bytes: u64,
}

/// One file.
impl From<SavedType> for SaveForm {
    fn from(dtype: SavedType) -> Self {
        Self { dtype, shard_bytes: u64::MAX }
    }
}

/// Values converted at a time.
const PIECE: usize = 1 << 14;

impl SavedType {
    /// The names in flags.
    pub const NAMES: &'static [&'static str] = &["f32", "bf16", "f16"];

    /// The type of the weights in these safetensors files, or `F32` if they differ or there are none.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged.
    pub fn of_files(files: &[PathBuf]) -> Result<Self, ModelError> {
        let mut found = None;
        for file in files {
            let file = TensorFile::open(file)?;
            let names = file.names();
            // A quantized matrix has tensors of its own, which are no weights.
            let parts: Vec<String> =
                names.iter().filter_map(|name| name.strip_suffix("absmax").map(str::to_owned)).collect();
            for name in names.iter().filter(|name| !parts.iter().any(|part| name.starts_with(part.as_str())))
            {
                let name = name.as_str();
                let of_tensor = match file.info(name).map(|info| info.dtype) {
                    Some(Dtype::F32) => Self::F32,
                    Some(Dtype::BF16) => Self::Bf16,
                    Some(Dtype::F16) => Self::F16,
                    // Integer tensors, such as masks.
                    _ => continue,
                };
                if *found.get_or_insert(of_tensor) != of_tensor {
                    return Ok(Self::F32);
                }
            }
        }
        Ok(found.unwrap_or_default())
    }

    /// The bytes per value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The name in a `config.json`.
    pub(crate) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    pub(super) fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Writes values, each rounded to the nearest one of this type.
    ///
    /// # Errors
    /// An I/O error, or a value too large for the type.
    pub(crate) fn write(self, values: &[f32], out: &mut impl Write) -> io::Result<()> {
        for piece in values.chunks(PIECE) {
            let bytes: Vec<u8> = match self {
                Self::F32 => piece.iter().flat_map(|value| value.to_le_bytes()).collect(),
                Self::Bf16 => piece.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
                Self::F16 => {
                    let lost = |value: &&f32| value.is_finite() && !f16::from_f32(**value).is_finite();
                    if let Some(value) = piece.iter().find(lost) {
                        let said = format!(
                            "the weight {value} is too large for f16: use bf16 or f32 (--save-dtype, or --dtype of `hydra export`)"
                        );
                        return Err(io::Error::new(io::ErrorKind::InvalidData, said));
                    }
                    piece.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect()
                }
            };
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}

impl fmt::Display for SavedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_the_nearest_and_none_becomes_infinite() {
        let written = |saved: SavedType, values: &[f32]| {
            let mut out = Vec::new();
            saved.write(values, &mut out).map(|()| out)
        };
        // Halfway between two values of bf16, the even one is chosen, as in PyTorch.
        assert_eq!(written(SavedType::Bf16, &[1.0, 1.0 + 1.0 / 256.0]).unwrap(), [0x80, 0x3F, 0x80, 0x3F]);
        assert_eq!(written(SavedType::F16, &[1.0, -2.0]).unwrap(), [0, 0x3C, 0, 0xC0]);
        assert_eq!(written(SavedType::F32, &[1.0]).unwrap(), 1.0_f32.to_le_bytes());
        let said = written(SavedType::F16, &[7e4]).unwrap_err().to_string();
        assert!(said.contains("70000 is too large for f16") && said.contains("--save-dtype"), "{said}");
        assert!(written(SavedType::F16, &[f32::NAN]).is_ok());
        for name in SavedType::NAMES {
            let read: SavedType = serde_json::from_str(&format!("\"{name}\"")).unwrap();
            assert_eq!(read.to_string(), *name);
        }
    }
}
