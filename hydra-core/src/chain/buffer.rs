//! Parameter buffers: contiguous memory for parameters, and the offset of each parameter in it.

use super::nf4;
use super::state::StateRule;
use crate::{FloatType, HostTensor, Init};
use std::ops::Range;

/// Parameters start at multiples of this many bytes in a buffer of `f32`, and of half as many in a 16-bit
/// buffer. The widest vector loads and the sub-buffers of a GPU need this alignment.
pub const BUFFER_ALIGN: usize = 512;

/// Parameters of at least this many elements start at multiples of [`LARGE_PARAM_ALIGN`] elements.
pub const LARGE_PARAM: usize = 4096;

/// The alignment of large parameters: blocks of an optimizer's quantized moments are counted from the start of a parameter, and
/// a part of a buffer that begins at a multiple of it begins with a block.
pub const LARGE_PARAM_ALIGN: usize = 256;

const ALIGN_ELEMENTS: usize = BUFFER_ALIGN / size_of::<f32>();
/// Every parameter begins with a block.
const _: () = assert!(ALIGN_ELEMENTS.is_multiple_of(nf4::BLOCK));

/// A reference to a layer's parameter: a buffer and an index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamRef {
    /// The index of the buffer in [`Chain::buffers`](super::Chain::buffers).
    pub buffer: usize,
    /// The parameter's index in [`ParamBufferLayout::params`].
    pub slot: usize,
}

/// A parameter within a buffer.
#[derive(Clone, Debug)]
pub struct BufferParam {
    /// The full name: the layer's name and the field path.
    pub name: String,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// The first element within the buffer.
    pub offset: usize,
    /// The number of elements.
    pub len: usize,
    /// The initializer of a parameter without given values; [`Init::Module`] only if the module held values.
    pub init: Init,
    /// The values that the module held when it was added to the chain.
    pub given: Option<HostTensor>,
    /// How observations change it, if it is state ([`State`](super::State)).
    pub state: Option<StateRule>,
}

impl BufferParam {
    /// The parameter's range of elements within the buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Returns the intersection of the parameter's elements with `elements`, or `None` if it is empty.
    pub fn among(&self, elements: &Range<usize>) -> Option<Range<usize>> {
        let own = self.range();
        let (start, end) = (own.start.max(elements.start), own.end.min(elements.end));
        (start < end).then_some(start..end)
    }

    /// Returns whether the parameter is a vector, as norms and biases are.
    pub fn is_vector(&self) -> bool {
        self.shape.len() <= 1
    }
}

/// How a store holds the parameters of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// `f32` master weights, plus a copy rounded to the element type if that is narrower.
    #[default]
    Masters,
    /// Values of the element type alone, which is narrower than `f32`. They are exact: the buffer is frozen, and its
    /// source holds values of this type ([`WeightSource::float_type`](crate::WeightSource::float_type)).
    Narrow,
    /// Blocks of [`nf4`] alone. The buffer has frozen matrices that a layer declares as quantized
    /// ([`Forward::is_quantized`](crate::Forward::is_quantized)) and no others; devices get the same blocks. Their values are those
    /// that quantization leaves of the source's.
    Nf4,
}

/// A contiguous buffer of parameters that is copied as a unit: all parameters that only one layer uses, or
/// one parameter that several layers share (tied). A partly frozen layer has two buffers: one of frozen
/// parameters and one of trained ones, and state that training changes has one of its own.
#[derive(Clone, Debug)]
pub struct ParamBufferLayout {
    /// The layer's name, or the tied parameter's.
    pub name: String,
    /// The parameters, by offset.
    pub params: Vec<BufferParam>,
    /// The length in elements, including alignment gaps.
    pub elements: usize,
    /// The layers that use the buffer, in chain order.
    pub layers: Vec<usize>,
    /// Whether training changes the buffer; frozen buffers have neither gradients nor optimizer state.
    pub trained: bool,
    /// The element type in copies for devices, and of the gradients. That of a frozen buffer may be narrower than the chain's:
    /// devices then widen their copies.
    pub float: FloatType,
    /// How a store holds the parameters.
    pub encoding: Encoding,
}

impl ParamBufferLayout {
    pub(super) fn new(name: String, layer: usize, trained: bool) -> Self {
        let (float, encoding) = (FloatType::F32, Encoding::default());
        Self { name, params: Vec::new(), elements: 0, layers: vec![layer], trained, float, encoding }
    }

    pub(crate) fn push(
        &mut self,
        name: String,
        shape: Vec<usize>,
        init: Init,
        given: Option<HostTensor>,
    ) -> usize {
        let len: usize = shape.iter().product();
        let offset = match len >= LARGE_PARAM {
            true => self.elements.next_multiple_of(LARGE_PARAM_ALIGN),
            false => self.elements,
        };
        self.params.push(BufferParam { name, shape, offset, len, init, given, state: None });
        self.elements = offset + len.next_multiple_of(ALIGN_ELEMENTS);
        self.params.len() - 1
    }

    /// Returns whether observations change the buffer, and no optimizer.
    pub fn is_state(&self) -> bool {
        self.trained && self.params.iter().any(|param| param.state.is_some())
    }

    /// Returns whether devices that compute in `float` widen their copies of the buffer.
    pub(crate) fn is_widened(&self, float: FloatType) -> bool {
        self.encoding == Encoding::Narrow && self.float != float
    }

    /// Returns whether an optimizer steps the buffer.
    pub fn is_optimized(&self) -> bool {
        self.trained && !self.is_state()
    }

    /// Returns whether the gradients of several microbatches may be added without those of other layers. Gradients of a tied
    /// parameter are first added layer by layer, and observations of state are not added at all.
    pub fn adds_up(&self) -> bool {
        self.is_optimized() && self.layers.len() == 1
    }

    /// The number of bytes that a copy to a device moves.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(0..self.elements).len() as u64
    }

    /// The bytes of these elements in a copy for a device. Elements of [`Encoding::Nf4`] begin with a block.
    pub fn bytes_of(&self, elements: Range<usize>) -> Range<usize> {
        match (self.encoding, self.float.bytes()) {
            (Encoding::Nf4, _) => nf4::bytes_of(elements),
            (_, each) => elements.start * each..elements.end * each,
        }
    }

    /// The 16-bit words of these elements in a store that has no `f32` of the buffer.
    pub fn words_of(&self, elements: Range<usize>) -> Range<usize> {
        let bytes = self.bytes_of(elements);
        bytes.start / size_of::<u16>()..bytes.end / size_of::<u16>()
    }

    /// Writes values in the form of a copy for a device, unless that is `f32`. Returns whether it has exactly these values, to the
    /// bit; values that are quantized only have to be finite, unless they `are_exact` already, as those of a checkpoint.
    ///
    /// # Panics
    /// If `out` does not have the [words](Self::words_of) of the values, or they are `f32`.
    pub fn encode(&self, values: &[f32], are_exact: bool, out: &mut [u16]) -> bool {
        match self.encoding {
            Encoding::Nf4 if are_exact => nf4::requantize(values, bytemuck::cast_slice_mut(out)),
            Encoding::Nf4 => {
                nf4::quantize(values, bytemuck::cast_slice_mut(out));
                values.iter().all(|value| value.is_finite())
            }
            _ => {
                self.float.narrow(values, out);
                self.float.has(out, values)
            }
        }
    }

    /// The values of words that [`encode`](Self::encode) has written.
    ///
    /// # Panics
    /// Those of [`encode`](Self::encode).
    pub fn decode(&self, words: &[u16], out: &mut [f32]) {
        match self.encoding {
            Encoding::Nf4 => nf4::dequantize(bytemuck::cast_slice(words), 0, out),
            _ => self.float.widen(words, out),
        }
    }

    /// The bytes that a store holds of the parameters, by their [`encoding`](Self::encoding). The moments of an optimizer
    /// come in addition.
    pub fn master_bytes(&self) -> u64 {
        match (self.encoding, self.float) {
            (Encoding::Masters, FloatType::F32) => self.moment_bytes(),
            (Encoding::Masters, _) => self.moment_bytes() + self.bytes(),
            (Encoding::Narrow | Encoding::Nf4, _) => self.bytes(),
        }
    }

    /// The bytes of the elements as `f32`, as gradients and most optimizer moments are.
    pub fn moment_bytes(&self) -> u64 {
        (self.elements * size_of::<f32>()) as u64
    }

    /// The number of parameters in the buffer, without alignment gaps.
    pub fn parameters(&self) -> u64 {
        self.params.iter().map(|p| p.len as u64).sum()
    }
}
