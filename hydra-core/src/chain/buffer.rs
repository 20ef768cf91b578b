//! Buffers: contiguous buffers of parameters, and where in them each parameter lies.

use crate::{FloatType, HostTensor, Init};
use std::ops::Range;

/// Parameters start at multiples of so many bytes in a buffer of `f32`, and of half as many in one of 16 bits:
/// what the widest vector loads and the sub-buffers of a GPU need.
pub const BUFFER_ALIGN: usize = 512;

const ALIGN_ELEMENTS: usize = BUFFER_ALIGN / size_of::<f32>();

/// The place of a layer's parameter: a buffer and an index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamRef {
    /// The buffer.
    pub buffer: usize,
    /// The parameter's place in [`ParamBufferLayout::params`].
    pub slot: usize,
}

/// A parameter within a buffer.
#[derive(Clone, Debug)]
pub struct BufferParam {
    /// The full name: the layer's name and the path of fields.
    pub name: String,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// The first element within the buffer.
    pub offset: usize,
    /// The number of elements.
    pub len: usize,
    /// How it gets its first values when nobody gives any; [`Init::Module`] only where the module held values.
    pub init: Init,
    /// The values that the module held when it was given to the chain.
    pub given: Option<HostTensor>,
}

impl BufferParam {
    /// The elements of the buffer that are this parameter's.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Those of the parameter's elements that are among these of the buffer, if there are any.
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

/// One contiguous buffer of parameters that moves as one: all parameters of a layer that no other layer
/// names, or one parameter that several layers name (tied). A layer that is frozen in part has two: one of what is frozen,
/// and one of what is trained.
#[derive(Clone, Debug)]
pub struct ParamBufferLayout {
    /// The layer's name, or the tied parameter's.
    pub name: String,
    /// The parameters, by offset.
    pub params: Vec<BufferParam>,
    /// The length in elements, with the gaps that alignment leaves.
    pub elements: usize,
    /// The layers that name it, in chain order.
    pub layers: Vec<usize>,
    /// True if it is trained; frozen buffers have neither gradient nor optimizer state.
    pub trained: bool,
    /// The type in which it moves and is on devices, and that of its gradients.
    pub float: FloatType,
}

impl ParamBufferLayout {
    pub(super) fn new(name: String, layer: usize, trained: bool) -> Self {
        Self { name, params: Vec::new(), elements: 0, layers: vec![layer], trained, float: FloatType::F32 }
    }

    pub(super) fn push(
        &mut self,
        name: String,
        shape: Vec<usize>,
        init: Init,
        given: Option<HostTensor>,
    ) -> usize {
        let len = shape.iter().product();
        self.params.push(BufferParam { name, shape, offset: self.elements, len, init, given });
        self.elements += usize::next_multiple_of(len, ALIGN_ELEMENTS);
        self.params.len() - 1
    }

    /// The length in bytes of what moves.
    pub fn bytes(&self) -> u64 {
        (self.elements * self.float.bytes()) as u64
    }

    /// The length in bytes of the masters' parameters, which are `f32`, with what moves in their place if that
    /// is narrower. Each of the optimizer's moments has [`moment_bytes`](Self::moment_bytes).
    pub fn master_bytes(&self) -> u64 {
        self.moment_bytes() + if self.float == FloatType::F32 { 0 } else { self.bytes() }
    }

    /// The length in bytes of one of the optimizer's moments.
    pub fn moment_bytes(&self) -> u64 {
        (self.elements * size_of::<f32>()) as u64
    }

    /// Parameters in the buffer, without gaps.
    pub fn parameters(&self) -> u64 {
        self.params.iter().map(|p| p.len as u64).sum()
    }
}
