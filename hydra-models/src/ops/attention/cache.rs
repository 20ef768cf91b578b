//! The keys and values of earlier tokens, which generation keeps for each sequence and block.

use crate::ops::tensors::{narrowed, widened};
use hydra_core::FloatType;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The sizes of a [`KvCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheForm {
    /// The number of blocks with attention.
    pub blocks: usize,
    /// The number of key and value heads.
    pub key_heads: usize,
    /// The width of a head.
    pub head_width: usize,
    /// The type of the stored values.
    pub float: FloatType,
    /// The tokens of the longest sequence.
    pub longest: usize,
}

impl KvCacheForm {
    /// The bytes that a sequence of this many tokens takes.
    pub fn bytes(&self, tokens: usize) -> u64 {
        let values = 2 * self.blocks * self.key_heads * self.head_width * tokens;
        (values * self.float.bytes()) as u64
    }
}

/// The keys and values that the blocks of a model have computed for the tokens of some sequences, in host memory. Sequences
/// are numbered by their slots. A clone is the same cache.
#[derive(Clone, Debug)]
pub struct KvCache(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    form: KvCacheForm,
    /// The blocks of each sequence.
    sequences: Mutex<BTreeMap<i32, Arc<[Mutex<Stored>]>>>,
}

/// Two handles of one cache are equal.
impl PartialEq for KvCache {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl KvCache {
    /// A cache without sequences.
    pub fn new(form: KvCacheForm) -> Self {
        Self(Arc::new(Shared { form, sequences: Mutex::default() }))
    }

    /// Its sizes.
    pub fn form(&self) -> KvCacheForm {
        self.0.form
    }

    /// Allocates memory for a sequence of up to `tokens` tokens in a slot, and drops the one that was there.
    pub fn begin(&self, slot: i32, tokens: usize) {
        let form = self.form();
        let blocks = (0..form.blocks).map(|_| Mutex::new(Stored::new(form, tokens))).collect();
        self.sequences().insert(slot, blocks);
    }

    /// Frees the memory of a sequence.
    pub fn end(&self, slot: i32) {
        self.sequences().remove(&slot);
    }

    /// The cache of one block.
    pub(crate) fn block(&self, block: usize) -> BlockCache {
        BlockCache { cache: self.clone(), block }
    }

    fn sequences(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Arc<[Mutex<Stored>]>>> {
        self.0.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The cache of one block.
#[derive(Clone, Debug)]
pub(crate) struct BlockCache {
    cache: KvCache,
    block: usize,
}

impl BlockCache {
    /// Its sizes.
    pub(crate) fn form(&self) -> KvCacheForm {
        self.cache.form()
    }

    /// Runs `f` with what the block has stored for the sequence in this slot. A negative slot stands for any sequence of the
    /// largest size: it has zeros, and what is written is dropped.
    ///
    /// # Panics
    /// If there is no sequence in the slot.
    pub(super) fn with<R>(&self, slot: i32, f: impl FnOnce(&mut Stored) -> R) -> R {
        if slot < 0 {
            return f(&mut Stored::new(self.form(), self.form().longest));
        }
        let sequence = self.cache.sequences().get(&slot).cloned();
        let sequence =
            sequence.unwrap_or_else(|| panic!("the key-value cache has no sequence in slot {slot}"));
        // Taken out, so that no lock is held while other threads help with the work.
        let place = || sequence[self.block].lock().unwrap_or_else(PoisonError::into_inner);
        let mut stored = std::mem::take(&mut *place());
        let result = f(&mut stored);
        *place() = stored;
        result
    }
}

/// The keys and values of one sequence and block: for each key head, the vectors of the tokens.
#[derive(Debug, Default)]
pub(super) struct Stored {
    pub(super) keys: Vectors,
    pub(super) values: Vectors,
}

impl Stored {
    fn new(form: KvCacheForm, tokens: usize) -> Self {
        let vectors = || Vectors::new(form.float, form.key_heads * tokens * form.head_width);
        Self { keys: vectors(), values: vectors() }
    }
}

/// Vectors of one type.
#[derive(Debug)]
pub(super) enum Vectors {
    F32(Vec<f32>),
    Narrow(Vec<u16>, FloatType),
}

impl Default for Vectors {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}

impl Vectors {
    fn new(float: FloatType, elements: usize) -> Self {
        match float {
            FloatType::F32 => Self::F32(vec![0.0; elements]),
            narrow => Self::Narrow(vec![0; elements], narrow),
        }
    }

    /// Splits them into parts of equal size.
    pub(super) fn split(&mut self, parts: usize) -> Vec<VectorsMut<'_>> {
        match self {
            Self::F32(all) => {
                let size = (all.len() / parts).max(1);
                all.chunks_mut(size).map(VectorsMut::F32).collect()
            }
            Self::Narrow(all, float) => {
                let size = (all.len() / parts).max(1);
                all.chunks_mut(size).map(|part| VectorsMut::Narrow(part, *float)).collect()
            }
        }
    }
}

/// Exclusively borrowed vectors.
#[derive(Debug)]
pub(super) enum VectorsMut<'a> {
    F32(&'a mut [f32]),
    Narrow(&'a mut [u16], FloatType),
}

impl VectorsMut<'_> {
    /// The number of elements.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Narrow(all, _) => all.len(),
        }
    }

    /// Writes elements from `at` on, rounded to the stored type.
    pub(super) fn write(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F32(all) => all[at..at + values.len()].copy_from_slice(values),
            Self::Narrow(all, float) => {
                all[at..at + values.len()].copy_from_slice(&narrowed(values, *float));
            }
        }
    }

    /// The elements of a range.
    pub(super) fn read(&self, range: std::ops::Range<usize>) -> std::borrow::Cow<'_, [f32]> {
        match self {
            Self::F32(all) => (&all[range]).into(),
            Self::Narrow(all, float) => widened(&all[range], *float).into(),
        }
    }
}
