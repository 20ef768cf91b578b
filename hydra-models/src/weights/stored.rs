//! The initial weights of a chain as its buffers, for writing a model that is not trained.

use bytes::Bytes;
use hydra_core::{Chain, Encoding, ParamBufferReader, WeightError, nf4};
use std::cell::RefCell;
use std::ops::Range;

/// Reads the buffers of a chain from the chain's own source. If the source can read parts, at most a part is in memory;
/// otherwise the last buffer is. A quantized buffer has the values of its blocks.
pub struct StoredWeights<'a> {
    chain: &'a Chain,
    /// The seed of weights that the source draws.
    seed: u64,
    /// The last buffer that was read whole.
    last: RefCell<Option<(usize, Bytes)>>,
}

impl<'a> StoredWeights<'a> {
    /// A reader of the chain's initial weights for a task of this seed.
    pub fn new(chain: &'a Chain, seed: u64) -> Self {
        Self { chain, seed, last: RefCell::default() }
    }

    /// Returns whether the source has other values of a buffer than those of the blocks that training quantizes them to.
    fn is_quantized_here(&self, buffer: usize) -> bool {
        let nf4 = self.chain.buffers()[buffer].encoding == Encoding::Nf4;
        nf4 && !self.chain.source().is_quantized(self.chain, buffer)
    }
}

impl ParamBufferReader for StoredWeights<'_> {
    fn buffer(&self, buffer: usize) -> Result<Bytes, WeightError> {
        let mut last = self.last.borrow_mut();
        if let Some((_, bytes)) = last.as_ref().filter(|(read, _)| *read == buffer) {
            return Ok(bytes.clone());
        }
        *last = None;
        let mut values = vec![0_f32; self.chain.buffers()[buffer].elements];
        self.chain.source().fill(self.chain, buffer, self.seed, &mut values)?;
        if self.is_quantized_here(buffer) {
            for param in &self.chain.buffers()[buffer].params {
                let values = &mut values[param.range()];
                let mut blocks = vec![0; nf4::bytes_of(0..values.len()).len()];
                nf4::quantize(values, &mut blocks);
                nf4::dequantize(&blocks, 0, values);
            }
        }
        let bytes = of_floats(values);
        *last = Some((buffer, bytes.clone()));
        Ok(bytes)
    }

    fn part(&self, buffer: usize, elements: Range<usize>) -> Result<Bytes, WeightError> {
        let parts = self.chain.source().parts(self.chain, buffer);
        let Some(read) = parts.filter(|_| !self.is_quantized_here(buffer)) else {
            let each = size_of::<f32>();
            return Ok(self.buffer(buffer)?.slice(elements.start * each..elements.end * each));
        };
        let mut values = vec![0_f32; elements.len()];
        for (slot, param) in self.chain.buffers()[buffer].params.iter().enumerate() {
            let Some(wanted) = param.among(&elements) else { continue };
            let out = &mut values[wanted.start - elements.start..wanted.end - elements.start];
            read(slot, wanted.start - param.offset, out)?;
        }
        Ok(of_floats(values))
    }
}

/// The bytes of values, without a copy.
fn of_floats(values: Vec<f32>) -> Bytes {
    struct Floats(Vec<f32>);
    impl AsRef<[u8]> for Floats {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    Bytes::from_owner(Floats(values))
}
