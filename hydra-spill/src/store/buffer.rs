//! Buffers: their names, their masters, and the ways in which a store lends them.

use crate::{Floats, NarrowFloats};
use hydra_core::TaskId;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// The name of a buffer in a store: buffers of the same index belong to different tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamBufferId {
    /// The task.
    pub task: TaskId,
    /// The buffer's index in the task's chain.
    pub buffer: usize,
    /// The part of the buffer.
    pub kind: ParamBufferKind,
}

/// The parts of a buffer that a store holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParamBufferKind {
    /// The masters, which are trained.
    Masters,
    /// A copy of the parameters at their best, which no shard task reads: it stays on the host.
    Snapshot,
    /// Masters that nobody trains and several tasks have, of which this is one.
    Shared,
}

impl ParamBufferId {
    /// The masters of a buffer.
    pub const fn new(task: TaskId, buffer: usize) -> Self {
        Self { task, buffer, kind: ParamBufferKind::Masters }
    }

    /// The buffer that this task has in common with others.
    pub const fn shared(self) -> Self {
        Self { kind: ParamBufferKind::Shared, ..self }
    }

    /// The copy of its best parameters.
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
        write!(f, "{before}image {} of {}{after}", self.buffer, self.task)
    }
}

/// The truth about a buffer: its parameters and what the optimizer remembers of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Masters {
    /// The parameters, laid out as the buffer.
    pub params: Floats,
    /// The parameters rounded to 16 bits, where that is what moves.
    pub narrow: Option<NarrowFloats>,
    /// The optimizer's moments, each laid out as the parameters: none for a frozen buffer or plain SGD, one
    /// for momentum, two for Adam. When masters are inserted, one that is empty stands for zeros.
    pub moments: Vec<Vec<f32>>,
}

impl Masters {
    /// Masters that move as they are.
    pub fn new(params: impl Into<Floats>, moments: Vec<Vec<f32>>) -> Self {
        Self { params: params.into(), narrow: None, moments }
    }

    /// The bytes of parameters, in both types, and moments.
    pub fn len_bytes(&self) -> u64 {
        let elements = self.params.len() * (1 + self.moments.len());
        let narrow = self.narrow.as_ref().map_or(0, |narrow| size_of_val(&**narrow));
        (elements * size_of::<f32>() + narrow) as u64
    }

    /// The floats of a part.
    ///
    /// # Panics
    /// If there is no such moment.
    pub fn part(&self, part: MastersPart) -> &[f32] {
        match part {
            MastersPart::Params => &self.params,
            MastersPart::Moment(moment) => &self.moments[moment],
        }
    }

    /// The floats of a part, to be written.
    ///
    /// # Panics
    /// If there is no such moment.
    pub fn part_mut(&mut self, part: MastersPart) -> &mut [f32] {
        match part {
            MastersPart::Params => &mut self.params,
            MastersPart::Moment(moment) => &mut self.moments[moment],
        }
    }

    /// These masters with zeros in moments that are empty.
    pub(crate) fn with_zeros(mut self) -> Self {
        let (elements, moments) = (self.params.len(), self.moments.iter_mut());
        moments.filter(|moment| moment.is_empty()).for_each(|moment| *moment = vec![0.0; elements]);
        self
    }

    /// Rounds all parameters anew, as after a write to them that was no step of the optimizer.
    pub fn round(&mut self) {
        if let Some(narrow) = &mut self.narrow {
            narrow.float.narrow(&self.params, narrow);
        }
    }
}

/// A part of the masters of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MastersPart {
    /// The parameters.
    Params,
    /// The moment of this index.
    Moment(usize),
}

/// The parameters of a buffer, or another part of its masters, as they were at one version. It counts as a reader until
/// `bytes` and all clones and slices of them are dropped.
#[derive(Clone, Debug)]
pub struct ParamBufferView {
    /// The parameters, in the machine's order.
    pub bytes: bytes::Bytes,
    /// How many writes were committed before.
    pub version: u64,
}

/// The masters of a buffer, out of their store to be written; nobody else has them.
pub type ParamBufferWriter = Writer<Masters>;

/// The masters of a buffer in the form `M`, out of their store to be written.
///
/// Dropped without [`commit`](Self::commit), as when a step panics, they go back as they are under the old
/// version: what was written need not be undone, nor rounded yet where that is what moves. The lengths are the buffer's
/// and must stay what they are.
#[must_use = "dropping a writer puts the masters back under the old version"]
pub struct Writer<M: Default> {
    masters: M,
    put_back: Option<Box<dyn FnOnce(M, bool) + Send>>,
}

impl<M: Default> Writer<M> {
    /// For implementors of a store: `put_back` is called once, with the masters and whether they were committed.
    pub fn new(masters: M, put_back: impl FnOnce(M, bool) + Send + 'static) -> Self {
        Self { masters, put_back: Some(Box::new(put_back)) }
    }

    /// Puts the masters back as the next version; a device has finished what writes them.
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
