//! Buffers that several tasks share: stored once in any tier, under one id per task.
//!
//! Readers use the id that the buffer would have if it belonged to the task alone. An id is discarded like a
//! buffer, and the last one removes the bytes. Shared buffers are never written, so readers never wait.

use super::{InPlaceParams, MastersPart, Rewrite, SpillError, TierStore, ViewOf};
use crate::{DeviceWriter, Masters, ParamBufferId, ParamBufferView, ParamBufferWriter, Reservation};
use hydra_core::{DeviceBytes, FileVersion, with_causes};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The SHA-256 of each parameter of a buffer, for comparing the values of tasks.
pub type Hashes = Arc<[[u8; 32]]>;

/// The files from which a buffer was read, as they were then; none for values that were not read, and `None` if they are unknown.
pub type Files = Option<BTreeSet<FileVersion>>;

/// A store in which buffers can have several ids, over the stores that keep them.
///
/// [`join`](Self::join) and [`discard`](TierStore::discard) are for one thread, which tracks the tasks that
/// start and end.
pub struct SharedStore {
    below: Arc<dyn TierStore>,
    names: Arc<Mutex<Names>>,
}

#[derive(Default)]
struct Names {
    /// The buffer that each id refers to.
    of: BTreeMap<ParamBufferId, ParamBufferId>,
    shared: BTreeMap<ParamBufferId, Shared>,
}

/// A buffer with several ids.
struct Shared {
    names: usize,
    content: SharedContent,
}

enum SharedContent {
    /// It is not present yet; its reservation, unless it is being inserted now.
    Awaited(Option<Reservation>),
    There(Hashes, Files),
    Lost {
        problem: String,
    },
}

impl SharedStore {
    /// Returns a store in which every buffer has only its own id.
    pub fn new(below: Arc<dyn TierStore>) -> Self {
        Self { below, names: Arc::default() }
    }

    /// Returns the same ids over another view of the store below, such as one that reads through other
    /// memory.
    pub fn over(&self, below: Arc<dyn TierStore>) -> Self {
        Self { below, names: self.names.clone() }
    }

    /// Makes `name` an id of the buffer `shared`, which need not be present yet. The first id provides its
    /// reservation, which covers the master weights in their tier; reservations of later ones are released.
    pub fn join(&self, name: ParamBufferId, shared: ParamBufferId, reservation: Option<Reservation>) {
        let mut names = self.lock();
        let first = || Shared { names: 0, content: SharedContent::Awaited(reservation) };
        if names.of.insert(name, shared).is_none() {
            names.shared.entry(shared).or_insert_with(first).names += 1;
        }
    }

    /// Returns whether a buffer has an id, and thereby a reservation.
    pub fn has_names(&self, shared: ParamBufferId) -> bool {
        self.lock().shared.contains_key(&shared)
    }

    /// The hashes of a shared buffer, if it is present.
    pub fn hashes(&self, shared: ParamBufferId) -> Option<Hashes> {
        match &self.lock().shared.get(&shared)?.content {
            SharedContent::There(hashes, _) => Some(hashes.clone()),
            _ => None,
        }
    }

    /// The hashes of a shared buffer, if it is present and is known to have been read from these files.
    pub fn hashes_from(&self, shared: ParamBufferId, files: &Files) -> Option<Hashes> {
        match &self.lock().shared.get(&shared)?.content {
            SharedContent::There(hashes, from) if from.is_some() && from == files => Some(hashes.clone()),
            _ => None,
        }
    }

    /// Inserts a shared buffer, with the reservation of its first id. Its values were read from these files.
    ///
    /// # Errors
    /// Those of [`insert`](TierStore::insert), after which it is lost; [`SpillError::BufferMissing`] if it
    /// has no id, and [`SpillError::BufferExists`].
    pub fn put(
        &self,
        shared: ParamBufferId,
        masters: Masters,
        hashes: Hashes,
        files: Files,
    ) -> Result<(), SpillError> {
        let reservation = match self.lock().shared.get_mut(&shared).map(|shared| &mut shared.content) {
            Some(SharedContent::Awaited(reservation)) => reservation.take(),
            Some(SharedContent::There(..)) => return Err(SpillError::BufferExists { buffer: shared }),
            Some(SharedContent::Lost { problem }) => {
                return Err(SpillError::BufferLost { buffer: shared, problem: problem.clone() });
            }
            None => None,
        };
        let reservation = reservation.ok_or(SpillError::BufferMissing { buffer: shared })?;
        let inserted = self.below.insert(shared, masters, reservation);
        if let Some(of) = self.lock().shared.get_mut(&shared) {
            of.content = match &inserted {
                Ok(()) => SharedContent::There(hashes, files),
                Err(error) => SharedContent::Lost { problem: with_causes(error) },
            };
        }
        inserted
    }

    fn lock(&self) -> MutexGuard<'_, Names> {
        // No change can panic halfway, so a poisoned lock is still consistent.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the buffer of this id, if it is not shared.
    fn own(&self, id: ParamBufferId) -> Result<ParamBufferId, SpillError> {
        match self.lock().of.contains_key(&id) {
            true => Err(SpillError::BufferShared { buffer: id }),
            false => Ok(id),
        }
    }
}

impl TierStore for SharedStore {
    fn insert(
        &self,
        id: ParamBufferId,
        masters: Masters,
        reservation: Reservation,
    ) -> Result<(), SpillError> {
        self.below.insert(self.own(id)?, masters, reservation)
    }

    fn view(&self, id: ParamBufferId, of: ViewOf) -> Result<ParamBufferView, SpillError> {
        self.below.view(self.identity(id), of)
    }

    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError> {
        self.below.write(self.own(id)?)
    }

    fn write_pieces(&self, id: ParamBufferId, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
        self.below.write_pieces(self.own(id)?, rewrite)
    }

    fn write_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
        words: &[f32],
    ) -> Result<(), SpillError> {
        self.below.write_part(self.own(id)?, part, elements, words)
    }

    fn version(&self, id: ParamBufferId) -> Result<u64, SpillError> {
        self.below.version(self.identity(id))
    }

    fn in_place(&self, id: ParamBufferId) -> Result<Option<(Arc<InPlaceParams>, u64)>, SpillError> {
        self.below.in_place(self.identity(id))
    }

    fn remove(&self, id: ParamBufferId) -> Result<Masters, SpillError> {
        self.below.remove(self.own(id)?)
    }

    /// Discards an id, and with the last one the buffer.
    fn discard(&self, id: ParamBufferId) -> Result<(), SpillError> {
        let shared = self.identity(id);
        let is_last = self.lock().shared.get(&shared).is_none_or(|of| of.names == 1);
        if is_last {
            // Also if nothing was inserted yet: its space on a disk is freed too.
            match self.below.discard(shared) {
                Err(SpillError::BufferMissing { .. }) if shared != id => {}
                discarded => discarded?,
            }
        }
        let mut names = self.lock();
        names.of.remove(&id);
        let gone = match is_last {
            true => names.shared.remove(&shared),
            false => {
                names.shared.entry(shared).and_modify(|of| of.names -= 1);
                None
            }
        };
        drop(names);
        drop(gone);
        Ok(())
    }

    fn identity(&self, id: ParamBufferId) -> ParamBufferId {
        self.lock().of.get(&id).copied().unwrap_or(id)
    }

    fn on_device(&self, id: ParamBufferId) -> Result<Option<(DeviceBytes, u64)>, SpillError> {
        self.below.on_device(self.identity(id))
    }

    fn write_on_device(&self, id: ParamBufferId) -> Result<DeviceWriter, SpillError> {
        self.below.write_on_device(self.own(id)?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{self, ID, budget, masters};
    use super::*;
    use crate::DramStore;
    use hydra_core::TaskId;
    use std::fs;
    use std::path::Path;

    const SHARED: ParamBufferId = ID.shared();
    const OTHER: ParamBufferId = ParamBufferId::new(TaskId(9), 2);

    fn store() -> SharedStore {
        SharedStore::new(Arc::new(DramStore::new()))
    }

    fn hashes(of: u8) -> Hashes {
        Arc::new([[of; 32]])
    }

    /// A store with a buffer of two ids.
    fn with_two_names(budget: &crate::Budget) -> SharedStore {
        let store = store();
        let reservation = budget.reserve(masters().len_bytes(), "the first").unwrap();
        store.join(ID, SHARED, Some(reservation));
        store.join(OTHER, SHARED, None);
        store
    }

    #[test]
    fn the_store_of_shared_buffers_conforms() {
        conformance::run(&|| Arc::new(store()));
    }

    #[test]
    fn an_buffer_is_there_once_under_all_of_its_names() {
        let budget = budget();
        let store = with_two_names(&budget);
        assert!(store.has_names(SHARED) && store.hashes(SHARED).is_none());
        assert!(matches!(store.read(ID), Err(SpillError::BufferMissing { .. })), "it is not inserted yet");
        store.put(SHARED, masters(), hashes(1), None).unwrap();
        assert_eq!((store.hashes(SHARED), budget.used()), (Some(hashes(1)), masters().len_bytes()));
        let again = store.put(SHARED, masters(), hashes(1), None);
        assert!(matches!(again, Err(SpillError::BufferExists { .. })));
        let [one, other] = [ID, OTHER].map(|name| store.read(name).unwrap());
        assert_eq!((one.bytes.as_ptr(), one.version), (other.bytes.as_ptr(), other.version));
        assert_eq!([ID, OTHER, SHARED].map(|id| store.identity(id)), [SHARED; 3]);
        assert_eq!(store.version(OTHER).unwrap(), 0);
    }

    #[test]
    fn the_last_name_takes_the_bytes_with_it() {
        let budget = budget();
        let store = with_two_names(&budget);
        store.put(SHARED, masters(), hashes(1), None).unwrap();
        let view = store.read(OTHER).unwrap();
        store.discard(ID).unwrap();
        assert!(
            matches!(store.discard(ID), Err(SpillError::BufferMissing { .. })),
            "it is not an id any more"
        );
        assert!(store.has_names(SHARED) && budget.used() > 0);
        assert!(matches!(store.discard(OTHER), Err(SpillError::BufferBusy { readers: 1, .. })));
        drop(view);
        store.discard(OTHER).unwrap();
        assert_eq!((store.has_names(SHARED), budget.used()), (false, 0));
        // It can be inserted again.
        let reservation = budget.reserve(masters().len_bytes(), "the next").unwrap();
        store.join(OTHER, SHARED, Some(reservation));
        let files: Files =
            Some(BTreeSet::from([FileVersion::new(Path::new("."), &fs::metadata(".").unwrap())]));
        assert_eq!(store.hashes_from(SHARED, &files), None);
        store.put(SHARED, masters(), hashes(2), files.clone()).unwrap();
        assert_eq!(store.hashes(SHARED), Some(hashes(2)));
        let from = [files, Some(BTreeSet::new()), None].map(|files| store.hashes_from(SHARED, &files));
        assert_eq!(from, [Some(hashes(2)), None, None]);
    }

    #[test]
    fn room_goes_with_the_names_where_nothing_came() {
        let budget = budget();
        let store = with_two_names(&budget);
        [OTHER, ID].into_iter().for_each(|name| store.discard(name).unwrap());
        assert_eq!((store.has_names(SHARED), budget.used()), (false, 0));
        let homeless = store.put(SHARED, masters(), hashes(1), None);
        assert!(matches!(homeless, Err(SpillError::BufferMissing { buffer: SHARED })));
    }

    #[test]
    fn nobody_writes_what_others_read() {
        let budget = budget();
        let store = with_two_names(&budget);
        store.put(SHARED, masters(), hashes(1), None).unwrap();
        let refused = |result: Result<(), SpillError>| {
            assert!(matches!(result, Err(SpillError::BufferShared { buffer: ID })), "{result:?}");
        };
        refused(store.write(ID).map(drop));
        refused(store.write_on_device(ID).map(drop));
        refused(store.remove(ID).map(drop));
        refused(store.insert(ID, masters(), budget.reserve(masters().len_bytes(), "own").unwrap()));
    }

    #[test]
    fn what_could_not_be_put_there_is_lost_for_all() {
        let budget = budget();
        let store = store();
        store.join(ID, SHARED, Some(budget.reserve(1, "too little").unwrap()));
        let small = store.put(SHARED, masters(), hashes(1), None);
        assert!(matches!(small, Err(SpillError::ReservationTooSmall { .. })));
        let lost = store.put(SHARED, masters(), hashes(1), None).unwrap_err().to_string();
        assert!(lost.contains("was lost"), "{lost}");
    }
}
