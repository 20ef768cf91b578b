//! Types of values in GGUF files.

use crate::weights::SavedType;
use half::f16;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Write};

/// The type of a model's matrices in a GGUF file. Vectors are always `F32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GgufType {
    /// 32-bit floats.
    F32,
    /// `bfloat16`.
    Bf16,
    /// 16-bit floats, up to 65504.
    F16,
    /// Blocks of 32 integers of 8 bits with a scale of 16 bits. A matrix whose rows are not whole blocks is `F16`.
    #[serde(rename = "q8_0")]
    Q8,
}

/// The values of a block of `Q8_0`.
const BLOCK: usize = 32;

impl GgufType {
    /// The names in flags.
    pub const NAMES: &'static [&'static str] = &["f32", "bf16", "f16", "q8_0"];

    /// The same type in safetensors files, if they have it.
    pub fn saved(self) -> Option<SavedType> {
        match self {
            Self::F32 => Some(SavedType::F32),
            Self::Bf16 => Some(SavedType::Bf16),
            Self::F16 => Some(SavedType::F16),
            Self::Q8 => None,
        }
    }

    /// The type for a matrix with rows of this length.
    pub(super) fn for_rows(self, columns: usize) -> Self {
        if self == Self::Q8 && !columns.is_multiple_of(BLOCK) { Self::F16 } else { self }
    }

    /// The number of the type in `ggml.h`.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8 => 8,
            Self::Bf16 => 30,
        }
    }

    /// The number of the type of a whole file, `general.file_type`.
    pub(super) fn file_number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8 => 7,
            Self::Bf16 => 32,
        }
    }

    /// The bytes of values.
    pub(super) fn bytes(self, values: usize) -> usize {
        match self.saved() {
            Some(saved) => values * saved.bytes(),
            None => values / BLOCK * (BLOCK + size_of::<f16>()),
        }
    }
}

impl From<SavedType> for GgufType {
    fn from(saved: SavedType) -> Self {
        match saved {
            SavedType::F32 => Self::F32,
            SavedType::Bf16 => Self::Bf16,
            SavedType::F16 => Self::F16,
        }
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.saved() {
            Some(saved) => saved.fmt(f),
            None => f.write_str("q8_0"),
        }
    }
}

/// Writes the values of a tensor, which arrive in pieces of any length.
pub(super) struct Encoder<'a, W> {
    kind: GgufType,
    out: &'a mut W,
    /// The beginning of a block.
    rest: Vec<f32>,
}

impl<'a, W: Write> Encoder<'a, W> {
    pub(super) fn new(kind: GgufType, out: &'a mut W) -> Self {
        Self { kind, out, rest: Vec::new() }
    }

    /// Writes values. The number of all values of a `Q8_0` tensor is a multiple of the block.
    pub(super) fn write(&mut self, mut values: &[f32]) -> io::Result<()> {
        if let Some(saved) = self.kind.saved() {
            return saved.write(values, self.out);
        }
        if !self.rest.is_empty() {
            let missing = (BLOCK - self.rest.len()).min(values.len());
            self.rest.extend_from_slice(&values[..missing]);
            values = &values[missing..];
            if self.rest.len() < BLOCK {
                return Ok(());
            }
            write_blocks(&std::mem::take(&mut self.rest), self.out)?;
        }
        let whole = values.len() - values.len() % BLOCK;
        self.rest.extend_from_slice(&values[whole..]);
        write_blocks(&values[..whole], self.out)
    }
}

/// Writes whole blocks as ggml's reference does: the scale is the largest magnitude over 127, values are multiplied by
/// its reciprocal and rounded half away from zero, and the scale is stored in 16 bits.
fn write_blocks(values: &[f32], out: &mut impl Write) -> io::Result<()> {
    for block in values.chunks(BLOCK) {
        let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = f16::from_f32(scale);
        if !stored.is_finite() || block.iter().any(|value| !value.is_finite()) {
            let said = format!(
                "a block of weights up to {largest} is too large for q8_0: use bf16 or f32 (--dtype)"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, said));
        }
        let mut bytes = [0; BLOCK + size_of::<f16>()];
        bytes[..2].copy_from_slice(&stored.to_le_bytes());
        for (byte, value) in bytes[2..].iter_mut().zip(block) {
            *byte = ((value * inverse).round() as i8).to_le_bytes()[0];
        }
        out.write_all(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(kind: GgufType, pieces: &[&[f32]]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut encoder = Encoder::new(kind, &mut out);
        pieces.iter().try_for_each(|piece| encoder.write(piece))?;
        Ok(out)
    }

    #[test]
    fn blocks_have_the_bits_of_the_reference_and_do_not_depend_on_pieces() {
        let values: Vec<f32> = (0..96).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013).collect();
        let whole = encoded(GgufType::Q8, &[&values]).unwrap();
        assert_eq!(whole.len(), GgufType::Q8.bytes(96));
        for cut in [1, 31, 32, 33, 95] {
            assert_eq!(
                encoded(GgufType::Q8, &[&values[..cut], &[], &values[cut..]]).unwrap(),
                whole,
                "{cut}"
            );
        }
        // 12.7 over 127 is 0.1: halves are rounded away from zero, and the scale to 16 bits.
        let mut block = [0.0; 32];
        block[..5].copy_from_slice(&[12.7, -12.7, 0.25, -0.25, 0.1]);
        let bytes = encoded(GgufType::Q8, &[&block]).unwrap();
        assert_eq!(bytes[..2], f16::from_f32(0.1).to_le_bytes());
        let inverse = 1.0 / (12.7_f32 / 127.0);
        let expected = [127, -127, (0.25 * inverse).round() as i8, (-0.25 * inverse).round() as i8, 1];
        let found: Vec<i8> = bytes[2..7].iter().map(|byte| i8::from_le_bytes([*byte])).collect();
        assert_eq!(found, expected);
        assert_eq!(encoded(GgufType::Q8, &[&[0.0; 32]]).unwrap(), [0; 34]);
    }

    #[test]
    fn types_have_names_and_what_does_not_fit_is_refused() {
        for name in GgufType::NAMES {
            let read: GgufType = serde_json::from_str(&format!("\"{name}\"")).unwrap();
            assert_eq!(read.to_string(), *name);
        }
        assert_eq!((GgufType::Q8.for_rows(33), GgufType::Q8.for_rows(64)), (GgufType::F16, GgufType::Q8));
        let error = encoded(GgufType::Q8, &[&[1e9; 32]]).unwrap_err().to_string();
        assert!(error.contains("too large for q8_0"), "{error}");
    }
}
