//! How stores hold the moments of an optimizer, and the access of a step to them.

use super::dynamic8::{self, BLOCK, BLOCK_BYTES, DynamicMap};
use crate::{LARGE_PARAM, LARGE_PARAM_ALIGN, ParamBufferLayout};
use std::ops::Range;
use std::sync::Arc;

/// Every quantized parameter begins with a block, wherever a buffer is cut.
const _: () = assert!(LARGE_PARAM_ALIGN.is_multiple_of(BLOCK));

/// How the values of a moment are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum MomentEncoding {
    /// As `f32`.
    #[default]
    F32,
    /// In blocks of the [signed 8-bit type](dynamic8::SIGNED), except for parameters of fewer than [`LARGE_PARAM`] elements,
    /// which have `f32`.
    Signed8,
    /// The same with the [unsigned 8-bit type](dynamic8::UNSIGNED): for values that are not negative.
    Unsigned8,
}

impl MomentEncoding {
    /// The map of a parameter of this many elements; `None` if its moment is `f32`.
    fn map(self, len: usize) -> Option<&'static DynamicMap> {
        match self {
            _ if len < LARGE_PARAM => None,
            Self::F32 => None,
            Self::Signed8 => Some(&dynamic8::SIGNED),
            Self::Unsigned8 => Some(&dynamic8::UNSIGNED),
        }
    }
}

/// Where a store has the elements of a moment of a buffer: a function of the buffer's layout and of the encoding alone.
///
/// Blocks are counted from the start of each parameter. The default is `f32`, laid out as the parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MomentLayout {
    encoding: MomentEncoding,
    /// The parameters with the gaps after them, by offset; none if all are `f32`.
    spans: Arc<[ParameterRange]>,
}

/// The elements from one parameter to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ParameterRange {
    /// The first element.
    start: usize,
    /// The number of bytes before it.
    bytes: usize,
    is_quantized: bool,
}

impl ParameterRange {
    fn bytes_before(&self, element: usize) -> usize {
        let inside = element - self.start;
        self.bytes
            + match self.is_quantized {
                true => dynamic8::bytes_before(inside),
                false => inside * size_of::<f32>(),
            }
    }
}

impl MomentLayout {
    /// The layout of a moment of `buffer` in this encoding.
    pub fn new(encoding: MomentEncoding, buffer: &ParamBufferLayout) -> Self {
        let mut spans: Vec<ParameterRange> = Vec::new();
        for param in &buffer.params {
            let bytes = spans.last().map_or(0, |span| span.bytes_before(param.offset));
            let is_quantized = encoding.map(param.len).is_some();
            spans.push(ParameterRange { start: param.offset, bytes, is_quantized });
        }
        match spans.iter().any(|span| span.is_quantized) {
            true => Self { encoding, spans: spans.into() },
            false => Self::default(),
        }
    }

    /// The bytes of some elements of the buffer. They begin and end with a piece of [`LARGE_PARAM_ALIGN`] elements, with a
    /// parameter, or with one of its [chunks](MomentMut::chunks).
    pub fn bytes_of(&self, elements: Range<usize>) -> Range<usize> {
        self.bytes_before(elements.start)..self.bytes_before(elements.end)
    }

    /// The 32-bit words of some elements, which begin and end as those of [`bytes_of`](Self::bytes_of) and are not within a
    /// parameter.
    pub fn words_of(&self, elements: Range<usize>) -> Range<usize> {
        let bytes = self.bytes_of(elements);
        bytes.start / size_of::<f32>()..bytes.end / size_of::<f32>()
    }

    /// Returns whether the elements of this parameter are quantized.
    pub fn is_quantized(&self, param: &crate::BufferParam) -> bool {
        self.span(param.offset).is_some_and(|span| span.is_quantized)
    }

    /// The moment of some elements of one parameter, for a step. `words` are those of the buffer from the element `start` on.
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn slice<'a>(&self, words: &'a mut [f32], start: usize, elements: Range<usize>) -> MomentMut<'a> {
        let before = self.bytes_before(start);
        let bytes = self.bytes_of(elements.clone());
        let bytes = bytes.start - before..bytes.end - before;
        let is_quantized = self.span(elements.start).is_some_and(|span| span.is_quantized);
        match self.encoding.map(LARGE_PARAM).filter(|_| is_quantized) {
            Some(map) => MomentMut::Blocks(map, &mut bytemuck::cast_slice_mut(words)[bytes]),
            None => {
                MomentMut::Floats(&mut words[bytes.start / size_of::<f32>()..bytes.end / size_of::<f32>()])
            }
        }
    }

    fn span(&self, element: usize) -> Option<&ParameterRange> {
        let after = self.spans.partition_point(|span| span.start <= element);
        self.spans.get(after.checked_sub(1)?)
    }

    fn bytes_before(&self, element: usize) -> usize {
        self.span(element).map_or(element * size_of::<f32>(), |span| span.bytes_before(element))
    }
}

/// A moment of consecutive elements of a parameter, as it is stored.
#[derive(Debug)]
pub enum MomentMut<'a> {
    /// The values.
    Floats(&'a mut [f32]),
    /// Blocks of an 8-bit type; the first element begins one.
    Blocks(&'static DynamicMap, &'a mut [u8]),
}

impl<'a> From<&'a mut [f32]> for MomentMut<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self::Floats(values)
    }
}

impl<'a> MomentMut<'a> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Floats(values) => values.len(),
            Self::Blocks(_, bytes) => dynamic8::elements_of(bytes.len()),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pieces of `elements` elements, a multiple of [`BLOCK`], in order.
    ///
    /// # Panics
    /// If it is no multiple.
    pub fn chunks(self, elements: usize) -> Box<dyn Iterator<Item = MomentMut<'a>> + 'a> {
        assert!(elements.is_multiple_of(BLOCK), "chunks of {elements} elements are no whole blocks");
        match self {
            Self::Floats(values) => Box::new(values.chunks_mut(elements).map(MomentMut::Floats)),
            Self::Blocks(map, bytes) => {
                let chunks = bytes.chunks_mut(elements / BLOCK * BLOCK_BYTES);
                Box::new(chunks.map(move |bytes| MomentMut::Blocks(map, bytes)))
            }
        }
    }

    /// Reads the elements of the block at this index; `out` has as many.
    #[inline(always)]
    pub(super) fn read(&mut self, block: usize, out: &mut [f32]) {
        match self {
            Self::Floats(values) => out.copy_from_slice(&values[block * BLOCK..][..out.len()]),
            Self::Blocks(map, bytes) => dynamic8::read_block(map, bytes, block, out),
        }
    }

    /// Writes the elements of the block at this index.
    #[inline(always)]
    pub(super) fn write(&mut self, block: usize, values: &[f32]) {
        match self {
            Self::Floats(of) => of[block * BLOCK..][..values.len()].copy_from_slice(values),
            Self::Blocks(map, bytes) => dynamic8::write_block(map, bytes, block, values),
        }
    }

    /// The values of all elements.
    pub fn values(&mut self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        values.chunks_mut(BLOCK).enumerate().for_each(|(block, values)| self.read(block, values));
        values
    }
}
