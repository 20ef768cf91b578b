//! The buffers of a store, each with its readers or its writer.

use super::SpillError;
use crate::{ParamBufferId, Reservation};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buffers in the form `T`, each at a position `P` if its store has positions.
pub(super) type Slots<T, P = ()> = Arc<Mutex<BTreeMap<ParamBufferId, Slot<T, P>>>>;

#[derive(Debug)]
pub(super) struct Slot<T, P = ()> {
    pub content: SlotContent<T>,
    pub version: u64,
    pub place: P,
    /// Released after the content is freed, because fields are dropped in this order.
    pub reservations: Vec<Reservation>,
}

#[derive(Debug)]
pub(super) enum SlotContent<T> {
    /// There is space, and nothing was inserted.
    Empty,
    /// Every reader has a clone of the lease.
    AtRest { stored: T, lease: Arc<()> },
    /// A writer has the master weights.
    Out,
    /// The master weights of a writer could not be put back.
    Lost { problem: String },
}

impl<T> SlotContent<T> {
    pub fn at_rest(stored: T) -> Self {
        Self::AtRest { stored, lease: Arc::new(()) }
    }

    /// Returns the stored buffer for a new reader.
    pub fn read(&self, id: ParamBufferId) -> Result<(&T, Arc<()>), SpillError> {
        match self {
            Self::AtRest { stored, lease } => Ok((stored, lease.clone())),
            Self::Empty => Err(SpillError::BufferMissing { buffer: id }),
            Self::Out => Err(SpillError::BufferBusy { buffer: id, readers: 0 }),
            Self::Lost { problem } => Err(SpillError::BufferLost { buffer: id, problem: problem.clone() }),
        }
    }

    /// Takes the stored buffer for a writer, if it has no readers.
    pub fn take(&mut self, id: ParamBufferId) -> Result<T, SpillError> {
        if let Self::AtRest { lease, .. } = self
            && let readers @ 1.. = readers(lease)
        {
            return Err(SpillError::BufferBusy { buffer: id, readers });
        }
        self.read(id)?;
        match std::mem::replace(self, Self::Out) {
            Self::AtRest { stored, .. } => Ok(stored),
            _ => unreachable!("only a buffer at rest can be read"),
        }
    }
}

/// The number of holders of a lease other than its store. If there are none, all reads happen before this
/// call, which the count alone would not guarantee.
fn readers(lease: &mut Arc<()>) -> usize {
    match Arc::get_mut(lease) {
        Some(()) => 0,
        // The last reader may have left since, but it was present at the check.
        None => (Arc::strong_count(lease) - 1).max(1),
    }
}

pub(super) fn lock<T, P>(slots: &Slots<T, P>) -> MutexGuard<'_, BTreeMap<ParamBufferId, Slot<T, P>>> {
    // No change of a slot can panic halfway, so a poisoned lock is still consistent.
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `f` with the slot of a buffer.
pub(super) fn slot<T, P, R>(
    slots: &Slots<T, P>,
    id: ParamBufferId,
    f: impl FnOnce(&mut Slot<T, P>) -> Result<R, SpillError>,
) -> Result<R, SpillError> {
    lock(slots).get_mut(&id).map_or(Err(SpillError::BufferMissing { buffer: id }), f)
}

/// Fills a new slot with a buffer, unless one with this id exists.
pub(super) fn insert<T>(
    slots: &Slots<T>,
    id: ParamBufferId,
    stored: T,
    reservations: Vec<Reservation>,
) -> Result<(), SpillError> {
    let slot = Slot { content: SlotContent::at_rest(stored), version: 0, place: (), reservations };
    match lock(slots).entry(id) {
        Entry::Occupied(_) => Err(SpillError::BufferExists { buffer: id }),
        Entry::Vacant(vacant) => {
            vacant.insert(slot);
            Ok(())
        }
    }
}

/// Takes a buffer for a writer, if it has no readers.
pub(super) fn take<T, P>(slots: &Slots<T, P>, id: ParamBufferId) -> Result<T, SpillError> {
    slot(slots, id, |slot| slot.content.take(id))
}

/// Ends a write.
pub(super) fn put_back<T, P>(
    slots: &Slots<T, P>,
    id: ParamBufferId,
    content: SlotContent<T>,
    committed: bool,
) {
    // The slot still exists: a buffer that is being written cannot be removed.
    if let Some(slot) = lock(slots).get_mut(&id) {
        slot.content = content;
        slot.version += u64::from(committed);
    }
}

/// Removes a buffer that is not in use, also one that was never inserted or is lost.
pub(super) fn discard<T, P>(slots: &Slots<T, P>, id: ParamBufferId) -> Result<(), SpillError> {
    if let Err(error @ SpillError::BufferBusy { .. }) = take(slots, id) {
        return Err(error);
    }
    // Closing the last buffer's file may take long, and others must not wait for it: the lock is not held.
    let gone = lock(slots).remove(&id);
    gone.map(drop).ok_or(SpillError::BufferMissing { buffer: id })
}
