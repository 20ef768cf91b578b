//! Buffers: their ids, their master weights, and access to them.

use super::InPlaceParams;
use crate::{Floats, NarrowFloats};
use hydra_core::TaskId;
use hydra_core::optimizer::MomentLayout;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// The id of a buffer in a store: equal indices of different tasks are different buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamBufferId {
    /// The task.
    pub task: TaskId,
    /// The buffer's index in the task's chain.
    pub buffer: usize,
    /// The kind of content.
    pub kind: ParamBufferKind,
}

/// The kinds of content that a store holds for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParamBufferKind {
    /// The master weights, which are trained.
    Masters,
    /// A copy of the best parameters, which shard tasks do not read: it stays on the host.
    Snapshot,
    /// Frozen master weights that several tasks share, including this one.
    Shared,
}

impl ParamBufferId {
    /// The id of a buffer's master weights.
    pub const fn new(task: TaskId, buffer: usize) -> Self {
        Self { task, buffer, kind: ParamBufferKind::Masters }
    }

    /// The id of the buffer that this task shares with others.
    pub const fn shared(self) -> Self {
        Self { kind: ParamBufferKind::Shared, ..self }
    }

    /// The id of the copy of its best parameters.
    pub const fn snapshot(self) -> Self {
        Self { kind: ParamBufferKind::Snapshot, ..self }
    }
}

impl fmt::Display for ParamBufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, after] = match self.kind {
            ParamBufferKind::Masters => ["", ""],
            ParamBufferKind::Snapshot => ["the best of ", ""],
            ParamBufferKind::Shared => ["", " and other tasks"],
        };
        write!(f, "{before}parameter buffer {} of {}{after}", self.buffer, self.task)
    }
}

/// The master weights of a buffer: its parameters and the state of the optimizer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Masters {
    /// The parameters, laid out as the buffer.
    pub params: Floats,
    /// The parameters rounded to 16 bits, if those are promoted.
    pub narrow: Option<NarrowFloats>,
    /// The optimizer's moments: none for a frozen buffer or plain SGD, one for momentum, two for Adam. When master
    /// weights are inserted, an empty moment means zeros.
    pub moments: Vec<Moment>,
    /// The files that have the parameters, if they are read in place. The other parts are then empty.
    pub files: Option<Arc<InPlaceParams>>,
}

/// A moment of an optimizer, for all elements of a buffer or for a piece of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moment {
    /// Its bytes as 32-bit words; they are numbers where its layout has `f32`.
    pub words: Vec<f32>,
    /// Where the elements of the buffer are.
    pub layout: MomentLayout,
}

impl Moment {
    /// Zeros for some elements of a buffer.
    pub(crate) fn zeros(layout: &MomentLayout, elements: Range<usize>) -> Self {
        Self { words: vec![0.0; layout.words_of(elements).len()], layout: layout.clone() }
    }
}

/// A moment in `f32`, laid out as the parameters.
impl From<Vec<f32>> for Moment {
    fn from(words: Vec<f32>) -> Self {
        Self { words, layout: MomentLayout::default() }
    }
}

impl Masters {
    /// Frozen parameters that are read in place.
    pub fn in_place(files: Arc<InPlaceParams>) -> Self {
        Self { files: Some(files), ..Self::default() }
    }

    /// Parameters of a 16-bit type alone, as those of a frozen buffer whose source has them in it. A store reads them with
    /// [`read`](crate::TierStore::read); it has no `f32` values of them.
    pub fn frozen(params: NarrowFloats) -> Self {
        Self { narrow: Some(params), ..Self::default() }
    }

    /// The number of elements of each part.
    pub fn elements(&self) -> usize {
        self.narrow.as_ref().map_or(self.params.len(), |narrow| narrow.len())
    }

    /// Returns master weights with moments in `f32` that are promoted without rounding.
    pub fn new(params: impl Into<Floats>, moments: Vec<Vec<f32>>) -> Self {
        let moments = moments.into_iter().map(Moment::from).collect();
        Self { params: params.into(), moments, ..Self::default() }
    }

    /// The same with moments that are zero and laid out so.
    pub fn with_moments(self, layouts: Vec<MomentLayout>) -> Self {
        let empty = |layout| Moment { words: Vec::new(), layout };
        Self { moments: layouts.into_iter().map(empty).collect(), ..self }
    }

    /// The bytes of parameters, in both types, and moments.
    pub fn len_bytes(&self) -> u64 {
        let elements = self.params.len();
        let moments = self.moments.iter().map(|moment| moment.layout.bytes_of(0..elements).len());
        let narrow = self.narrow.as_ref().map_or(0, |narrow| size_of_val(&**narrow));
        (elements * size_of::<f32>() + moments.sum::<usize>() + narrow) as u64
    }

    /// The words of a part.
    ///
    /// # Panics
    /// If there is no such moment.
    pub fn part(&self, part: MastersPart) -> &[f32] {
        match part {
            MastersPart::Params => &self.params,
            MastersPart::Moment(moment) => &self.moments[moment].words,
        }
    }

    /// The words of a part, mutable.
    ///
    /// # Panics
    /// If there is no such moment.
    pub fn part_mut(&mut self, part: MastersPart) -> &mut [f32] {
        match part {
            MastersPart::Params => &mut self.params,
            MastersPart::Moment(moment) => &mut self.moments[moment].words,
        }
    }

    /// The words of some elements in a part of the master weights of a whole buffer.
    ///
    /// # Panics
    /// If there is no such moment.
    pub fn words_of(&self, part: MastersPart, elements: Range<usize>) -> Range<usize> {
        match part {
            MastersPart::Params => elements,
            MastersPart::Moment(moment) => self.moments[moment].layout.words_of(elements),
        }
    }

    /// Replaces empty moments by zeros.
    pub fn with_zeros(mut self) -> Self {
        let (elements, moments) = (self.params.len(), self.moments.iter_mut());
        moments
            .filter(|moment| moment.words.is_empty())
            .for_each(|moment| *moment = Moment::zeros(&moment.layout, 0..elements));
        self
    }

    /// Rounds all parameters again, after a write to them other than an optimizer step.
    pub fn round(&mut self) {
        if let Some(narrow) = &mut self.narrow {
            narrow.float.narrow(&self.params, narrow);
        }
    }
}

/// A part of the master weights of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MastersPart {
    /// The parameters.
    Params,
    /// The moment of this index.
    Moment(usize),
}

/// What a reader sees of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewOf {
    /// The parameters as they are promoted: all, or some elements of this many bytes each.
    Promoted(Option<(Range<usize>, usize)>),
    /// A part of the master weights: all of it, or some elements.
    Masters(MastersPart, Option<Range<usize>>),
}

/// The parameters of a buffer, or another part of its master weights, at one version. It counts as a reader
/// until `bytes` and all clones and slices of them are dropped.
#[derive(Clone, Debug)]
pub struct ParamBufferView {
    /// The parameters, in native byte order.
    pub bytes: bytes::Bytes,
    /// The number of writes committed before.
    pub version: u64,
}

/// The master weights of a buffer, taken out of their store for writing; access is exclusive.
pub type ParamBufferWriter = Writer<Masters>;

/// The master weights of a buffer in the form `M`, taken out of their store for writing.
///
/// If dropped without [`commit`](Self::commit), as when a step panics, they return to the store under the old
/// version with the values written so far, which are neither undone nor rounded. The lengths must not
/// change.
#[must_use = "dropping a writer puts the master weights back under the old version"]
pub struct Writer<M: Default> {
    masters: M,
    put_back: Option<Box<dyn FnOnce(M, bool) + Send>>,
}

impl<M: Default> Writer<M> {
    /// For implementors of a store: `put_back` is called once, with the master weights and whether they were
    /// committed.
    pub fn new(masters: M, put_back: impl FnOnce(M, bool) + Send + 'static) -> Self {
        Self { masters, put_back: Some(Box::new(put_back)) }
    }

    /// Returns the master weights to the store as the next version. A device must have finished writing them.
    pub fn commit(mut self) {
        self.finish(true);
    }

    fn finish(&mut self, committed: bool) {
        if let Some(put_back) = self.put_back.take() {
            put_back(std::mem::take(&mut self.masters), committed);
        }
    }
}

impl<M: Default> Drop for Writer<M> {
    fn drop(&mut self) {
        self.finish(false);
    }
}

impl<M: Default> Deref for Writer<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.masters
    }
}

impl<M: Default> DerefMut for Writer<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.masters
    }
}

impl<M: Default> fmt::Debug for Writer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}
