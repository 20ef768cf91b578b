//! Matrices that bitsandbytes has quantized to NF4, in safetensors files.
//!
//! A matrix `W` is a tensor `W` of the indices' bytes, `W.absmax` with the scales of blocks, and `W.quant_state.bitsandbytes__nf4`,
//! a text in JSON. With double quantization the scales are bytes: numbers of entries of `W.nested_quant_map`, which are
//! multiplied by the entry of `W.nested_absmax` for their block, and then have an offset added.

use super::{TensorFile, in_file};
use crate::ModelError;
use crate::family::supported::refuse;
use hydra_core::nf4;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// The key of a state, after the matrix's name; the end is the type.
const STATE: &str = ".quant_state.bitsandbytes__";

/// A quantized matrix.
#[derive(Clone, Debug)]
pub(super) struct Quantized {
    /// The shape, `[out, in]`.
    pub shape: Vec<usize>,
    double: Option<Double>,
}

/// How scales are quantized.
#[derive(Clone, Debug)]
struct Double {
    /// The scales of a block.
    block: usize,
    map: Vec<f32>,
    offset: f32,
}

#[derive(Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

impl Quantized {
    /// The quantized matrices of a file, by name.
    ///
    /// # Errors
    /// Another type than NF4, other blocks or another table than bitsandbytes has by default, and a tensor that is missing or has
    /// another size.
    pub fn all(file: &TensorFile) -> Result<BTreeMap<String, Self>, ModelError> {
        let names = file.names().into_iter();
        let states = names.filter_map(|name| Some((name.split_once(STATE)?.0.to_owned(), name)));
        states.map(|(matrix, state)| Ok((matrix.clone(), Self::read(file, &matrix, &state)?))).collect()
    }

    fn read(file: &TensorFile, matrix: &str, state: &str) -> Result<Self, ModelError> {
        let wrong = |source| in_file(&file.path, source);
        let text = file.bytes(state, 0..file.len(state))?;
        let text = serde_json::from_slice::<QuantState>(&text);
        let state = text.map_err(|source| ModelError::Json { path: file.path.clone(), source })?;
        if state.quant_type != "nf4" {
            let expected = format!("nf4 for `{matrix}`: quantize the original model to NF4");
            return Err(wrong(refuse("quant_type", state.quant_type, expected)));
        }
        if state.blocksize != nf4::BLOCK {
            return Err(wrong(refuse(
                "blocksize",
                state.blocksize,
                format!("{} for `{matrix}`", nf4::BLOCK),
            )));
        }
        let map = file.values(&format!("{matrix}.quant_map"))?;
        if map != nf4::TABLE {
            return Err(wrong(refuse(
                "quant_map",
                format!("{map:?}"),
                format!("the table of NF4 for `{matrix}`"),
            )));
        }
        let elements: usize = state.shape.iter().product();
        let double = match state.nested_offset {
            None => None,
            Some(offset) => Some(Double {
                block: state.nested_blocksize.filter(|block| *block > 0).unwrap_or(256),
                map: file.values(&format!("{matrix}.nested_quant_map"))?,
                offset: offset as f32,
            }),
        };
        let scales = elements.div_ceil(nf4::BLOCK);
        let mut sizes = vec![(matrix.to_owned(), elements.div_ceil(2))];
        let each = if double.is_some() { 1 } else { size_of::<f32>() };
        sizes.push((format!("{matrix}.absmax"), scales * each));
        if let Some(Double { block, .. }) = &double {
            sizes.push((format!("{matrix}.nested_absmax"), scales.div_ceil(*block) * size_of::<f32>()));
            sizes.push((format!("{matrix}.nested_quant_map"), 256 * size_of::<f32>()));
        }
        match sizes.into_iter().find(|(tensor, bytes)| file.len(tensor) != *bytes) {
            Some((tensor, bytes)) => {
                let found = format!("{} bytes", file.len(&tensor));
                Err(wrong(refuse("quant_state", found, format!("{bytes} bytes in `{tensor}`"))))
            }
            None => Ok(Self { shape: state.shape, double }),
        }
    }

    /// The values of elements of the matrix, from `first` on.
    pub fn values(
        &self,
        file: &TensorFile,
        matrix: &str,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let elements: usize = self.shape.iter().product();
        let of = first / nf4::BLOCK..(first + out.len()).div_ceil(nf4::BLOCK);
        let half = nf4::BLOCK / 2;
        let indices = file.bytes(matrix, of.start * half..(of.end * half).min(elements.div_ceil(2)))?;
        let scales = self.scales(file, matrix, of.clone())?;
        let mut blocks = vec![0; scales.len() * nf4::BLOCK_BYTES];
        let parts = blocks.chunks_exact_mut(nf4::BLOCK_BYTES).zip(scales.iter().zip(indices.chunks(half)));
        for (block, (scale, indices)) in parts {
            let (own, rest) = block.split_at_mut(size_of::<f32>());
            own.copy_from_slice(&scale.to_ne_bytes());
            rest[..indices.len()].copy_from_slice(indices);
        }
        nf4::dequantize(&blocks, first - of.start * nf4::BLOCK, out);
        Ok(())
    }

    /// The scales of these blocks of the matrix.
    fn scales(&self, file: &TensorFile, matrix: &str, of: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let absmax = format!("{matrix}.absmax");
        let Some(Double { block, map, offset }) = &self.double else { return file.floats(&absmax, of) };
        let codes = file.bytes(&absmax, of.clone())?;
        let nested = of.start / block..of.end.div_ceil(*block);
        let nested_scales = file.floats(&format!("{matrix}.nested_absmax"), nested.clone())?;
        let scale = |(at, code): (usize, &u8)| {
            // The product is rounded before the sum.
            let product = map[usize::from(*code)] * nested_scales[at / block - nested.start];
            product + offset
        };
        Ok((of.start..).zip(&codes).map(scale).collect())
    }
}

impl TensorFile {
    /// The bytes of a tensor; zero if it is missing.
    fn len(&self, tensor: &str) -> usize {
        self.info(tensor).map_or(0, |info| info.data_offsets.1 - info.data_offsets.0)
    }

    /// Some elements of a tensor of `f32`.
    fn floats(&self, tensor: &str, elements: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let each = size_of::<f32>();
        let bytes = self.bytes(tensor, elements.start * each..elements.end * each)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// All elements of a tensor of `f32`.
    fn values(&self, tensor: &str) -> Result<Vec<f32>, ModelError> {
        match self.info(tensor).map(|info| info.dtype) {
            Some(Dtype::F32) => self.floats(tensor, 0..self.len(tensor) / size_of::<f32>()),
            Some(found) => {
                let (path, tensor) = (self.path.clone(), tensor.to_owned());
                Err(ModelError::Type { path, tensor, found: found.to_string() })
            }
            None => Err(ModelError::TensorMissing { place: self.path.clone(), tensor: tensor.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family;
    use crate::lora::{Base, Lora};
    use hydra_core::{Chain, Encoding};
    use serde_json::Value;
    use sha2::{Digest, Sha256};
    use std::path::{Path, PathBuf};
    use tempfile::TempDir;

    /// A Llama that Transformers quantized with bitsandbytes 0.50.2, once or twice; `make_quantized.py` wrote it.
    fn folder(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantized").join(name)
    }

    fn adapted(dir: &Path, base: Base) -> Result<Chain, ModelError> {
        let lora = Lora { rank: 2, base, ..Lora::default() };
        family::load(dir.to_str().unwrap())?.adapted(&lora, None)
    }

    /// The values of the quantized matrices.
    fn matrices(chain: &Chain) -> BTreeMap<String, Vec<f32>> {
        let mut all = BTreeMap::new();
        for (index, buffer) in chain.buffers().iter().enumerate() {
            let mut values = vec![0.0; buffer.elements];
            chain.source().fill(chain, index, 0, &mut values).unwrap();
            for param in buffer.params.iter().filter(|param| param.name.ends_with("_proj.weight")) {
                all.insert(param.name.clone(), values[param.range()].to_vec());
            }
        }
        all
    }

    #[test]
    fn values_are_those_that_bitsandbytes_reads() {
        for name in ["single", "double"] {
            let file = TensorFile::open(&folder(name).join("dequantized.safetensors")).unwrap();
            let chain = family::load(folder(name).to_str().unwrap()).unwrap().chain().unwrap();
            let found = matrices(&chain);
            assert_eq!(found.len(), 7);
            for (param, values) in found {
                let mut expected = vec![0.0; values.len()];
                file.read(&format!("model.{param}"), &mut expected).unwrap();
                assert_eq!(values, expected, "{name} {param}");
            }
        }
    }

    /// Asserts that codes, scales and values of a matrix are those that bitsandbytes has, and that parts of it are read.
    fn assert_hashes(file: &TensorFile, matrix: &str, quantized: &Quantized, expected: &Value) {
        let elements: usize = quantized.shape.iter().product();
        let codes = file.bytes(matrix, 0..elements.div_ceil(2)).unwrap();
        let scales = quantized.scales(file, matrix, 0..elements.div_ceil(nf4::BLOCK)).unwrap();
        let mut values = vec![0.0; elements];
        quantized.values(file, matrix, 0, &mut values).unwrap();
        for (key, bytes) in [
            ("codes", codes.as_slice()),
            ("absmax", bytemuck::cast_slice(&scales)),
            ("dequantized", bytemuck::cast_slice(&values)),
        ] {
            assert_eq!(expected[key], format!("{:x}", Sha256::digest(bytes)), "{matrix}: {key}");
        }
        for first in [1, elements / 2, elements.saturating_sub(300)] {
            let mut part = vec![0.0; 300.min(elements - first)];
            quantized.values(file, matrix, first, &mut part).unwrap();
            assert_eq!(part, values[first..][..part.len()], "{matrix} from {first}");
        }
    }

    #[test]
    fn codes_and_scales_and_values_have_the_hashes_of_bitsandbytes() {
        let text = std::fs::read_to_string(folder("hashes.json")).unwrap();
        let hashes: Value = serde_json::from_str(&text).unwrap();
        for name in ["single", "double"] {
            let file = TensorFile::open(&folder(name).join("model.safetensors")).unwrap();
            let matrices = Quantized::all(&file).unwrap();
            assert_eq!(matrices.len(), 7);
            for (matrix, quantized) in matrices {
                assert_hashes(&file, &matrix, &quantized, &hashes[name][&matrix]);
            }
        }
        // Matrices of odd sizes; scales of the larger ones have two blocks.
        let file = TensorFile::open(&folder("drawn.safetensors")).unwrap();
        let matrices = Quantized::all(&file).unwrap();
        assert_eq!(matrices.len(), 4);
        for (matrix, quantized) in matrices {
            assert_hashes(&file, &matrix, &quantized, &hashes["drawn_twice"][&matrix]);
        }
    }

    #[test]
    fn blocks_are_stored_as_they_are_and_read_in_parts() {
        for name in ["single", "double"] {
            let chain = adapted(&folder(name), Base::Float).unwrap();
            let quantized: Vec<_> =
                chain.buffers().iter().enumerate().filter(|(_, b)| b.encoding == Encoding::Nf4).collect();
            assert_eq!(quantized.len(), 1);
            let (index, buffer) = quantized[0];
            assert!(
                chain.source().is_quantized(&chain, index) && chain.source().spans(&chain, index).is_none()
            );
            let read = chain.source().parts(&chain, index).unwrap();
            let mut all = vec![0.0; buffer.elements];
            chain.source().fill(&chain, index, 0, &mut all).unwrap();
            for (slot, param) in buffer.params.iter().enumerate() {
                let mut words = vec![0; buffer.words_of(param.range()).len()];
                assert!(buffer.encode(&all[param.range()], true, &mut words), "{}", param.name);
                for (first, len) in [(0, 64), (64, 200), (3, 130)] {
                    let mut part = vec![0.0; len];
                    read(slot, first, &mut part).unwrap();
                    assert_eq!(part, all[param.offset + first..][..len]);
                }
            }
        }
    }

    /// The fixture with a changed text in its file, of the same length.
    fn changed(from: &str, to: &str) -> String {
        let dir = TempDir::new().unwrap();
        assert_eq!(from.len(), to.len());
        for file in ["config.json", "model.safetensors"] {
            let mut bytes = std::fs::read(folder("single").join(file)).unwrap();
            while let Some(at) = bytes.windows(from.len()).position(|part| part == from.as_bytes()) {
                bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
            }
            std::fs::write(dir.path().join(file), bytes).unwrap();
        }
        hydra_core::with_causes(&adapted(dir.path(), Base::Nf4).unwrap_err())
    }

    #[test]
    fn other_types_are_refused_by_name() {
        let said = changed("\"quant_type\": \"nf4\"", "\"quant_type\": \"fp4\"");
        assert!(said.contains("`quant_type` is fp4, expected nf4"), "{said}");
        let said = changed("\"blocksize\": 64", "\"blocksize\": 32");
        assert!(said.contains("`blocksize` is 32, expected 64"), "{said}");
        let said = changed("\"bnb_4bit_quant_type\": \"nf4\"", "\"bnb_4bit_quant_type\": \"fp4\"");
        assert!(said.contains("`quantization_config` is bitsandbytes fp4"), "{said}");
    }
}
