//! The buffers of a store, each with its readers or its writer.

use super::SpillError;
use crate::{ParamBufferId, Reservation};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buffers in the form `T`, each in a place `P` where its store has such.
pub(super) type Slots<T, P = ()> = Arc<Mutex<BTreeMap<ParamBufferId, Slot<T, P>>>>;

#[derive(Debug)]
pub(super) struct Slot<T, P = ()> {
    pub content: Content<T>,
    pub version: u64,
    pub place: P,
    /// Released after the content is freed, for fields are dropped in this order.
    pub reservations: Vec<Reservation>,
}

#[derive(Debug)]
pub(super) enum Content<T> {
    /// There is room, and nothing was inserted.
    Empty,
    /// Every reader has a clone of the lease.
    AtRest { stored: T, lease: Arc<()> },
    /// A writer has the masters.
    Out,
    /// The masters that a writer left could not be put back.
    Lost { problem: String },
}

impl<T> Content<T> {
    pub fn at_rest(stored: T) -> Self {
        Self::AtRest { stored, lease: Arc::new(()) }
    }

    /// The stored buffer, for one reader more.
    pub fn read(&self, id: ParamBufferId) -> Result<(&T, Arc<()>), SpillError> {
        match self {
            Self::AtRest { stored, lease } => Ok((stored, lease.clone())),
            Self::Empty => Err(SpillError::BufferMissing { buffer: id }),
            Self::Out => Err(SpillError::BufferBusy { buffer: id, readers: 0 }),
            Self::Lost { problem } => Err(SpillError::BufferLost { buffer: id, problem: problem.clone() }),
        }
    }

    /// Takes the stored buffer for a writer, if nobody reads it.
    pub fn take(&mut self, id: ParamBufferId) -> Result<T, SpillError> {
        if let Self::AtRest { lease, .. } = self
            && let readers @ 1.. = readers(lease)
        {
            return Err(SpillError::BufferBusy { buffer: id, readers });
        }
        self.read(id)?;
        match std::mem::replace(self, Self::Out) {
            Self::AtRest { stored, .. } => Ok(stored),
            _ => unreachable!("only an image at rest can be read"),
        }
    }
}

/// How many hold a lease beside its store. Where nobody does, all that readers did is over, which the count by itself
/// would not promise.
fn readers(lease: &mut Arc<()>) -> usize {
    match Arc::get_mut(lease) {
        Some(()) => 0,
        // The last reader may have left since, but it was there when it mattered.
        None => (Arc::strong_count(lease) - 1).max(1),
    }
}

pub(super) fn lock<T, P>(slots: &Slots<T, P>) -> MutexGuard<'_, BTreeMap<ParamBufferId, Slot<T, P>>> {
    // Nothing panics halfway through a change of a slot, so a poisoned map is as good as any.
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

/// Fills a new slot with a buffer, unless there is one of that name.
pub(super) fn insert<T>(
    slots: &Slots<T>,
    id: ParamBufferId,
    stored: T,
    reservations: Vec<Reservation>,
) -> Result<(), SpillError> {
    let slot = Slot { content: Content::at_rest(stored), version: 0, place: (), reservations };
    match lock(slots).entry(id) {
        Entry::Occupied(_) => Err(SpillError::BufferExists { buffer: id }),
        Entry::Vacant(vacant) => {
            vacant.insert(slot);
            Ok(())
        }
    }
}

/// Takes a buffer for a writer, if nobody reads it.
pub(super) fn take<T, P>(slots: &Slots<T, P>, id: ParamBufferId) -> Result<T, SpillError> {
    slot(slots, id, |slot| slot.content.take(id))
}

/// Ends a writer.
pub(super) fn put_back<T, P>(slots: &Slots<T, P>, id: ParamBufferId, content: Content<T>, committed: bool) {
    // The slot is still there: a buffer that is being written cannot be removed.
    if let Some(slot) = lock(slots).get_mut(&id) {
        slot.content = content;
        slot.version += u64::from(committed);
    }
}

/// Removes a buffer that nobody reads or writes, also one that was never inserted or is lost.
pub(super) fn discard<T, P>(slots: &Slots<T, P>, id: ParamBufferId) -> Result<(), SpillError> {
    if let Err(error @ SpillError::BufferBusy { .. }) = take(slots, id) {
        return Err(error);
    }
    // The last buffer's file may take long to go, for which nobody else is to wait: it goes without the lock.
    let gone = lock(slots).remove(&id);
    gone.map(drop).ok_or(SpillError::BufferMissing { buffer: id })
}
