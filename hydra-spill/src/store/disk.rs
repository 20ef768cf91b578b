//! The tier of buffers that do not fit host memory: files.
//!
//! All buffers of a task are in one unnamed file, and those that it shares with others in another. Their
//! space is allocated before the first of them is written, so that a full disk is reported before training
//! starts (if the system can allocate space for a file), and nothing remains when the process is killed. The
//! bytes that a promotion copies come first in a buffer, so a promotion is one read of exactly those bytes.
//! Nothing is synced: the files are scratch space, and only checkpoints outlive a run. Without a sync, a
//! system does not report that a disk has lost written data. Therefore checksums are kept in memory, and the
//! next read detects the loss.
//!
//! All reads and writes pass through host memory that is reserved in a separate budget. Master weights that
//! are rewritten piece by piece are never entirely in host memory.

use super::scratch::{DiskTraffic, FileSlot, Positioned, Scratch, Shape, Stored, scratch_file};
use super::slots::{self, Slot, SlotContent, Slots};
use super::{InPlaceParams, MastersPart, PIECE, Rewrite, ViewOf, check};
use crate::{
    Budget, Masters, ParamBufferId, ParamBufferKind, ParamBufferView, ParamBufferWriter, Reservation,
    SpillError, TierStore,
};
use bytes::Bytes;
use hydra_core::{TaskId, leased, with_causes};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A store that keeps some buffers in files, and all others in the store below.
///
/// A buffer is on the disk from when it is [assigned](Self::assign) until it is removed. The reservation that
/// it is inserted with is in the disk's budget.
pub struct DiskStore {
    below: Arc<dyn TierStore>,
    slots: Slots<Stored, FileSlot>,
    moved: Arc<DiskTraffic>,
    /// The memory for bytes in transfer, if it is not the budget that its buffers were assigned with.
    working: Option<Budget>,
    /// The number of elements of a piece.
    piece: usize,
}

/// The bytes of all buffers, saturating.
fn bytes_of(buffers: &[(ParamBufferId, u64)]) -> u64 {
    buffers.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

impl DiskStore {
    /// Returns a store in which nothing is on the disk yet.
    pub fn new(below: Arc<dyn TierStore>) -> Self {
        Self { below, slots: Slots::default(), moved: Arc::default(), working: None, piece: PIECE }
    }

    /// Returns the same store with reads and writes in memory reserved in `working` instead. Its user then
    /// never takes memory from others, however many of its reads it holds.
    pub fn within(&self, working: Budget) -> Self {
        let (below, slots, moved) = (self.below.clone(), self.slots.clone(), self.moved.clone());
        Self { below, slots, moved, working: Some(working), piece: self.piece }
    }

    /// Assigns buffers to files in `dir`, with the bytes of their master weights, and allocates the space of
    /// all of them. Bytes that are read or written are in memory that is temporarily reserved in `working`.
    ///
    /// # Errors
    /// [`SpillError::DiskHeadroom`] if the directory cannot be written to or has too little space; then none
    /// of the buffers is assigned.
    pub fn assign(
        &self,
        dir: &Path,
        working: &Budget,
        buffers: &[(ParamBufferId, u64)],
    ) -> Result<(), SpillError> {
        // Buffers that a task shares with others remain after it has ended.
        let mut files: BTreeMap<(TaskId, bool), Vec<(ParamBufferId, u64)>> = BTreeMap::new();
        let of = |id: ParamBufferId| (id.task, id.kind == ParamBufferKind::Shared);
        buffers.iter().for_each(|buffer| files.entry(of(buffer.0)).or_default().push(*buffer));
        let no_room =
            |source| SpillError::DiskHeadroom { dir: dir.to_owned(), bytes: bytes_of(buffers), source };
        let mut assigned = BTreeMap::new();
        for buffers in files.into_values() {
            let file = scratch_file(dir, bytes_of(&buffers)).map_err(no_room)?;
            assigned.extend(self.slots_in(file, dir, working, &buffers));
        }
        slots::lock(&self.slots).append(&mut assigned);
        Ok(())
    }

    /// Returns consecutive empty slots in a file.
    fn slots_in(
        &self,
        file: Box<dyn Positioned>,
        dir: &Path,
        working: &Budget,
        buffers: &[(ParamBufferId, u64)],
    ) -> BTreeMap<ParamBufferId, Slot<Stored, FileSlot>> {
        let (dir, working, moved) = (dir.to_owned(), working.clone(), self.moved.clone());
        let scratch = Arc::new(Scratch { file, dir, working, piece: self.piece, moved });
        let mut end = 0;
        let slot = |&(id, bytes): &(ParamBufferId, u64)| {
            let place = FileSlot { scratch: scratch.clone(), offset: end, bytes };
            end += bytes;
            (id, Slot { place, content: SlotContent::Empty, version: 0, reservations: Vec::new() })
        };
        buffers.iter().map(slot).collect()
    }

    /// The bytes read from files so far.
    pub fn bytes_read(&self) -> u64 {
        self.moved.read.load(Relaxed)
    }

    /// The bytes written to files so far.
    pub fn bytes_written(&self) -> u64 {
        self.moved.written.load(Relaxed)
    }

    fn holds(&self, id: ParamBufferId) -> bool {
        slots::lock(&self.slots).contains_key(&id)
    }

    /// Reserves host memory for bytes that are read.
    fn reserve_working(
        &self,
        place: &FileSlot,
        id: ParamBufferId,
        bytes: u64,
    ) -> Result<Reservation, SpillError> {
        let working = self.working.as_ref().unwrap_or(&place.scratch.working);
        Ok(working.reserve(bytes, id.to_string())?)
    }

    /// Takes the master weights out, with the memory that they are in.
    fn take(&self, id: ParamBufferId) -> Result<(FileSlot, Stored, Masters, Reservation), SpillError> {
        let (place, stored) =
            slots::slot(&self.slots, id, |slot| Ok((slot.place.clone(), slot.content.take(id)?)))?;
        let load = || {
            let reservation = self.reserve_working(&place, id, stored.shape.bytes())?;
            let mut masters = stored.shape.zeros(0..stored.shape.len());
            place.load(id, &stored, 0..stored.shape.len(), &mut masters)?;
            Ok((masters, reservation))
        };
        match load() {
            Ok((masters, reservation)) => Ok((place, stored, masters, reservation)),
            Err(error) => {
                slots::put_back(&self.slots, id, SlotContent::at_rest(stored), false);
                Err(error)
            }
        }
    }

    /// Changes a buffer on the disk. `change` calls its argument before it writes anything.
    fn changed(
        &self,
        id: ParamBufferId,
        change: impl FnOnce(&FileSlot, &mut Stored, &mut dyn FnMut()) -> Result<(), SpillError>,
    ) -> Result<(), SpillError> {
        let (place, mut stored) =
            slots::slot(&self.slots, id, |slot| Ok((slot.place.clone(), slot.content.take(id)?)))?;
        let content = SlotContent::at_rest(stored.clone());
        let mut out = Rewriting { home: self.slots.clone(), id, content, committed: false };
        // Until all of it is written, its content is neither the old nor the new one.
        let mut began =
            || out.content = SlotContent::Lost { problem: "only a part of it was rewritten".to_owned() };
        let changed = change(&place, &mut stored, &mut began);
        match (&changed, &mut out.content) {
            (Ok(()), content) => (*content, out.committed) = (SlotContent::at_rest(stored), true),
            (Err(error), SlotContent::Lost { problem }) => *problem = with_causes(error),
            (Err(_), _) => {}
        }
        changed
    }

    /// Rewrites the pieces of a buffer in order. Calls `began` before the first write.
    fn rewrite(
        &self,
        (place, id): (&FileSlot, ParamBufferId),
        stored: &mut Stored,
        rewrite: &mut Rewrite<'_>,
        began: &mut dyn FnMut(),
    ) -> Result<(), SpillError> {
        let pieces = place.pieces(0..stored.shape.len());
        let most = pieces.map(|piece| stored.shape.bytes_of(&piece)).max().unwrap_or(0);
        let _reservation = self.reserve_working(place, id, most)?;
        let mut masters = Masters::default();
        for piece in place.pieces(0..stored.shape.len()) {
            if !stored.shape.fits(&masters, &piece) {
                // There is memory for one piece.
                drop(std::mem::take(&mut masters));
                masters = stored.shape.zeros(piece.clone());
            }
            place.load(id, stored, piece.clone(), &mut masters)?;
            rewrite(piece.start, &mut masters)?;
            began();
            place.save(id, (stored, piece.start), &masters)?;
        }
        Ok(())
    }
}

/// Writes `masters` to the disk and returns the new content.
fn written(
    place: &FileSlot,
    id: ParamBufferId,
    mut stored: Stored,
    masters: &Masters,
) -> SlotContent<Stored> {
    let elements = masters.elements();
    let narrow = masters.narrow.as_ref().is_none_or(|narrow| narrow.len() == elements);
    if !(Shape::of(masters) == stored.shape && narrow && stored.shape.fits(masters, &(0..elements))) {
        return SlotContent::Lost { problem: "its lengths have changed".to_owned() };
    }
    match place.save(id, (&mut stored, 0), masters) {
        Ok(()) => SlotContent::at_rest(stored),
        Err(error) => SlotContent::Lost { problem: with_causes(&error) },
    }
}

/// A buffer that is taken out for rewriting, and the content that is put back when this is dropped.
struct Rewriting {
    home: Slots<Stored, FileSlot>,
    id: ParamBufferId,
    content: SlotContent<Stored>,
    committed: bool,
}

impl Drop for Rewriting {
    fn drop(&mut self) {
        let content = std::mem::replace(&mut self.content, SlotContent::Empty);
        slots::put_back(&self.home, self.id, content, self.committed);
    }
}

impl TierStore for DiskStore {
    fn insert(
        &self,
        id: ParamBufferId,
        masters: Masters,
        reservation: Reservation,
    ) -> Result<(), SpillError> {
        if !self.holds(id) {
            return self.below.insert(id, masters, reservation);
        }
        check(id, &masters, &reservation)?;
        let shape = Shape::of(&masters);
        let place = slots::slot(&self.slots, id, |slot| match slot.content {
            SlotContent::Empty if shape.bytes() <= slot.place.bytes => {
                slot.content = SlotContent::Out;
                Ok(slot.place.clone())
            }
            SlotContent::Empty => Err(SpillError::ReservationTooSmall {
                needed: shape.bytes(),
                reserved: slot.place.bytes,
                owner: reservation.owner().to_owned(),
            }),
            _ => Err(SpillError::BufferExists { buffer: id }),
        })?;
        let mut stored = Stored::nothing(shape, self.piece);
        let saved = place.save(id, (&mut stored, 0), &masters);
        slots::slot(&self.slots, id, |slot| {
            slot.content = SlotContent::Empty;
            saved?;
            slot.content = SlotContent::at_rest(stored);
            slot.reservations.push(reservation);
            Ok(())
        })
    }

    fn view(&self, id: ParamBufferId, of: ViewOf) -> Result<ParamBufferView, SpillError> {
        if !self.holds(id) {
            return self.below.view(id, of);
        }
        let (place, stored, lease, version) = slots::slot(&self.slots, id, |slot| {
            let (stored, lease) = slot.content.read(id)?;
            Ok((slot.place.clone(), stored.clone(), lease, slot.version))
        })?;
        let (part, elements) = match of {
            ViewOf::Promoted(elements) => (stored.shape.moving(), elements.map(|(elements, _)| elements)),
            ViewOf::Masters(part, elements) => (stored.shape.part(part), elements),
        };
        let elements = elements.unwrap_or(0..stored.shape.len());
        let read = place.covering(&elements, &stored.shape);
        let (whole, some) = (part.bytes_of(read.clone()), part.bytes_of(elements));
        let reservation = self.reserve_working(&place, id, whole.len() as u64)?;
        let bytes = Bytes::from_owner(place.view(id, &stored, &part, read)?);
        let [start, end] = [some.start, some.end].map(|at| at - whole.start);
        let bytes = leased(bytes, Arc::new((reservation, lease))).slice(start..end);
        Ok(ParamBufferView { bytes, version })
    }

    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError> {
        if !self.holds(id) {
            return self.below.write(id);
        }
        let (place, stored, masters, reservation) = self.take(id)?;
        let home = self.slots.clone();
        Ok(ParamBufferWriter::new(masters, move |masters, committed| {
            let content = match committed {
                true => written(&place, id, stored, &masters),
                false => SlotContent::at_rest(stored),
            };
            // The next user may need the memory.
            drop(masters);
            drop(reservation);
            slots::put_back(&home, id, content, committed);
        }))
    }

    fn write_pieces(&self, id: ParamBufferId, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
        if !self.holds(id) {
            return self.below.write_pieces(id, rewrite);
        }
        self.changed(id, |place, stored, began| self.rewrite((place, id), stored, rewrite, began))
    }

    fn write_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
        words: &[f32],
    ) -> Result<(), SpillError> {
        if !self.holds(id) {
            return self.below.write_part(id, part, elements, words);
        }
        self.changed(id, |place, stored, began| {
            place.check_pieces(stored, elements.clone());
            began();
            place.overwrite(id, stored, (part, elements), words)
        })
    }

    fn version(&self, id: ParamBufferId) -> Result<u64, SpillError> {
        if !self.holds(id) {
            return self.below.version(id);
        }
        slots::slot(&self.slots, id, |slot| match slot.content {
            SlotContent::Empty => Err(SpillError::BufferMissing { buffer: id }),
            _ => Ok(slot.version),
        })
    }

    fn in_place(&self, id: ParamBufferId) -> Result<Option<(Arc<InPlaceParams>, u64)>, SpillError> {
        if self.holds(id) { Ok(None) } else { self.below.in_place(id) }
    }

    fn remove(&self, id: ParamBufferId) -> Result<Masters, SpillError> {
        if !self.holds(id) {
            return self.below.remove(id);
        }
        let (_, _, masters, _room) = self.take(id)?;
        // The lock is not held while its file is closed, as in `discard`.
        let _gone = slots::lock(&self.slots).remove(&id);
        Ok(masters)
    }

    fn discard(&self, id: ParamBufferId) -> Result<(), SpillError> {
        if self.holds(id) { slots::discard(&self.slots, id) } else { self.below.discard(id) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{self, ID, masters};
    use super::*;
    use crate::{BudgetError, DramStore, NarrowFloats};
    use hydra_core::{ByteSize, FloatType};
    use std::io;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Mutex, MutexGuard};

    const ROOM: u64 = 1 << 15;
    const OTHER: ParamBufferId = ParamBufferId { task: TaskId(2), ..ID };
    const ELSEWHERE: ParamBufferId = ParamBufferId { task: TaskId(9), ..ID };

    fn working() -> Budget {
        Budget::new("host memory for master weights on the disk", ByteSize::mib(1))
    }

    /// A store in which the conformance suite's buffers are on the disk.
    fn store(working: &Budget) -> DiskStore {
        let store = DiskStore::new(Arc::new(DramStore::new()));
        store.assign(&std::env::temp_dir(), working, &[(OTHER, ROOM), (ID, ROOM)]).unwrap();
        store
    }

    /// The same with pieces of `piece` elements.
    fn in_pieces(working: &Budget, piece: usize) -> DiskStore {
        let store = DiskStore { piece, ..DiskStore::new(Arc::new(DramStore::new())) };
        store.assign(&std::env::temp_dir(), working, &[(OTHER, ROOM), (ID, ROOM)]).unwrap();
        store
    }

    /// A file in memory that fails on demand.
    struct Failing {
        content: Mutex<Vec<u8>>,
        fails: Arc<AtomicBool>,
    }

    impl Failing {
        fn attempt(&self) -> io::Result<MutexGuard<'_, Vec<u8>>> {
            match self.fails.load(Relaxed) {
                true => Err(io::Error::other("the disk is gone")),
                false => Ok(self.content.lock().unwrap()),
            }
        }
    }

    impl Positioned for Failing {
        fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
            let content = self.attempt()?;
            out.copy_from_slice(&content[at as usize..][..out.len()]);
            Ok(())
        }

        fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
            self.attempt()?[at as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
    }

    /// A store whose buffers are in this file.
    fn store_in(
        file: impl Positioned + 'static,
        working: &Budget,
        buffers: &[(ParamBufferId, u64)],
    ) -> DiskStore {
        let store = DiskStore::new(Arc::new(DramStore::new()));
        let mut slots = store.slots_in(Box::new(file), Path::new("/scratch"), working, buffers);
        slots::lock(&store.slots).append(&mut slots);
        store
    }

    fn failing<F: Positioned + 'static>(
        working: &Budget,
        file: fn(Failing) -> F,
    ) -> (DiskStore, Arc<AtomicBool>) {
        let fails = Arc::new(AtomicBool::new(false));
        let content = Failing { content: Mutex::new(vec![0; ROOM as usize]), fails: fails.clone() };
        (store_in(file(content), working, &[(ID, ROOM)]), fails)
    }

    #[test]
    fn the_disk_store_conforms() {
        conformance::run(&|| Arc::new(store(&working())));
        for piece in [1, 64, 299, 300] {
            conformance::run(&|| Arc::new(in_pieces(&working(), piece)));
        }
        for piece in [256, 512, PIECE] {
            conformance::run_quantized(&|| Arc::new(in_pieces(&working(), piece)));
        }
        conformance::run(&|| Arc::new(DiskStore::new(Arc::new(DramStore::new()))));
    }

    /// A file in memory that loses writes.
    struct Forgetful(Failing);

    impl Positioned for Forgetful {
        fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.read_at(at, out)
        }

        fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
            match self.0.fails.load(Relaxed) {
                true => Ok(()),
                false => self.0.write_at(at, bytes),
            }
        }
    }

    #[test]
    fn what_a_disk_has_lost_is_not_taken_for_masters() {
        let (working, host) = (working(), conformance::budget());
        let (store, forgets) = failing(&working, Forgetful);
        conformance::insert(&store, ID, &host);
        let mut writer = store.write(ID).unwrap();
        writer.params[0] += 1.0;
        forgets.store(true, Relaxed);
        writer.commit();
        forgets.store(false, Relaxed);
        for error in [store.read(ID).unwrap_err(), store.write(ID).unwrap_err()] {
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(error.to_string().contains("could not be read in `/scratch`"), "{error}");
            assert_eq!(cause, "the bytes read are not those that were written");
        }
        assert_eq!(working.used(), 0);
    }

    #[test]
    fn only_what_is_settled_lives_on_the_disk() {
        let (working, host) = (working(), conformance::budget());
        let store = store(&working);
        conformance::insert(&store, ID, &host);
        conformance::insert(&store, ELSEWHERE, &host);
        assert_eq!((store.bytes_written(), store.bytes_read()), (3600, 0));
        assert_eq!((store.holds(ID), store.holds(ELSEWHERE)), (true, false));
        drop(store.read(ELSEWHERE).unwrap());
        assert!(matches!(store.read(OTHER), Err(SpillError::BufferMissing { buffer: OTHER })));
        assert!(matches!(store.version(OTHER), Err(SpillError::BufferMissing { buffer: OTHER })));
        assert_eq!((store.bytes_read(), working.peak()), (0, 0));
        store.discard(OTHER).unwrap();
        store.discard(ID).unwrap();
        assert_eq!(host.used(), masters().len_bytes(), "buffers that are not assigned");
        assert!(matches!(store.discard(ID), Err(SpillError::BufferMissing { buffer: ID })));
    }

    #[test]
    fn a_promotion_reads_exactly_what_moves_and_reserves_it() {
        let (working, host) = (working(), conformance::budget());
        let store = store(&working);
        conformance::insert(&store, ID, &host);
        let view = store.read(ID).unwrap();
        assert_eq!((store.bytes_read(), working.used()), (1200, 1200));
        assert!(
            view.bytes.as_ptr().addr().is_multiple_of(crate::memory::aligned::ALIGN),
            "it can be read in place"
        );
        let slice = view.bytes.slice(0..4);
        drop(view);
        assert_eq!(working.used(), 1200, "a slice of a view keeps all of it");
        drop(slice);

        let narrow = NarrowFloats::of(&[1.5; 300], FloatType::Bf16, Into::into);
        let mixed = Masters { narrow: Some(narrow), ..Masters::new(vec![1.5; 300], vec![vec![2.0; 300]]) };
        store.insert(OTHER, mixed.clone(), host.reserve(3000, "bf16").unwrap()).unwrap();
        let view = store.read(OTHER).unwrap();
        assert_eq!((store.bytes_read(), working.used()), (1800, 600));
        assert_eq!(bytemuck::cast_slice::<u8, u16>(&view.bytes), [0x3FC0; 300]);
        drop(view);
        let view = store.read_masters(OTHER).unwrap();
        assert_eq!((view.bytes.len(), working.used()), (1200, 1200));
        drop(view);
        let writer = store.write(OTHER).unwrap();
        assert_eq!((&*writer, working.used()), (&mixed, 3000));
        drop(writer);
        assert_eq!((working.used(), working.peak()), (0, 3000));
    }

    /// If the file system can allocate space for a file, all of it is allocated before anything is written.
    #[cfg(target_os = "linux")]
    #[test]
    fn space_is_taken_when_buffers_are_settled() {
        use std::fs;
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().canonicalize().unwrap();
        let flags = rustix::fs::FallocateFlags::empty();
        if let Err(why) = rustix::fs::fallocate(tempfile::tempfile_in(&at).unwrap(), flags, 0, 1) {
            eprintln!("skipped: the file system of {} cannot allocate space for a file: {why}", at.display());
            return;
        }
        let store = DiskStore::new(Arc::new(DramStore::new()));
        store.assign(&at, &working(), &[(ID, 300 << 10), (ID.snapshot(), 100 << 10)]).unwrap();
        let open = fs::read_dir("/proc/self/fd").unwrap().flatten().map(|file| file.path());
        let mut scratch = open.filter(|file| fs::read_link(file).is_ok_and(|file| file.starts_with(&at)));
        let file = fs::metadata(scratch.next().unwrap()).unwrap();
        assert_eq!((file.len(), scratch.next()), (400 << 10, None));
        assert!(file.blocks() * 512 >= file.len(), "{} blocks", file.blocks());
    }

    /// Buffers of one task, which are in one file.
    fn neighbours(store: &DiskStore, host: &Budget) -> [(ParamBufferId, Masters); 3] {
        let next = ParamBufferId::new(ID.task, ID.buffer + 1);
        let narrow = NarrowFloats::of(&[1.5; 301], FloatType::Bf16, Into::into);
        let mixed = Masters { narrow: Some(narrow), ..Masters::new(vec![1.5; 301], vec![vec![2.0; 301]]) };
        let buffers =
            [(ID, masters()), (ID.snapshot(), Masters::new(vec![7.0; 5], Vec::new())), (next, mixed)];
        for (id, masters) in &buffers {
            let reservation = host.reserve(masters.len_bytes(), "task").unwrap();
            store.insert(*id, masters.clone(), reservation).unwrap();
        }
        buffers
    }

    #[test]
    fn buffers_of_one_file_leave_each_other_alone() {
        let (working, host) = (working(), conformance::budget());
        let store = DiskStore::new(Arc::new(DramStore::new()));
        let next = ParamBufferId::new(ID.task, ID.buffer + 1);
        store
            .assign(&std::env::temp_dir(), &working, &[(ID, 3600), (ID.snapshot(), 20), (next, 3010)])
            .unwrap();
        let mut buffers = neighbours(&store, &host);
        for (step, at) in [0, 2, 1, 0, 1, 2].into_iter().enumerate() {
            let (id, masters) = &mut buffers[at];
            let mut writer = store.write(*id).unwrap();
            for masters in [&mut *writer, masters] {
                masters.params.fill(step as f32);
                masters.round();
            }
            writer.commit();
            for (id, masters) in &buffers {
                assert_eq!(*store.write(*id).unwrap(), *masters, "{id}");
                let view = store.read_masters(*id).unwrap();
                assert_eq!(bytemuck::cast_slice::<u8, f32>(&view.bytes), &masters.params[..], "{id}");
            }
        }
        for (id, masters) in buffers {
            assert_eq!(store.remove(id).unwrap(), masters);
        }
        assert_eq!((working.used(), host.used()), (0, 0));
    }

    /// The file has a hole before the buffers, and takes no more space than they do.
    #[cfg(unix)]
    #[test]
    fn an_buffer_may_lie_beyond_four_gibibytes_of_its_file() {
        let (working, host) = (working(), conformance::budget());
        let hole = (ParamBufferId::new(ID.task, 0), 9 << 30);
        let store = store_in(tempfile::tempfile().unwrap(), &working, &[hole, (ID, ROOM)]);
        conformance::insert(&store, ID, &host);
        store.write(ID).unwrap().commit();
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    #[test]
    fn a_read_that_fails_changes_no_version() {
        let (working, host) = (working(), conformance::budget());
        let (store, fails) = failing(&working, |file| file);
        conformance::insert(&store, ID, &host);
        store.write(ID).unwrap().commit();
        fails.store(true, Relaxed);
        assert!(store.write(ID).is_err() && store.read(ID).is_err());
        fails.store(false, Relaxed);
        assert_eq!(store.version(ID).unwrap(), 1);
        assert_eq!(store.read(ID).unwrap().version, 1);
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    #[test]
    fn a_writer_of_another_length_loses_its_buffer_alone() {
        let host = conformance::budget();
        let others: [fn(&mut Masters); 4] = [
            |masters| drop(masters.moments.pop()),
            |masters| masters.moments[1].words.truncate(128),
            |masters| masters.moments[1].words.extend([0.0; 64]),
            |masters| masters.moments[0].words.clear(),
        ];
        for change in others {
            let store = in_pieces(&working(), 64);
            conformance::insert(&store, ID, &host);
            conformance::insert(&store, OTHER, &host);
            let mut writer = store.write(ID).unwrap();
            change(&mut writer);
            writer.commit();
            let lost = store.read(ID).unwrap_err().to_string();
            assert!(lost.ends_with("was lost when it was put back: its lengths have changed"), "{lost}");
            assert_eq!(store.remove(OTHER).unwrap(), masters());
        }
    }

    #[test]
    fn a_writer_that_is_dropped_writes_nothing() {
        let (working, host) = (working(), conformance::budget());
        let store = store(&working);
        conformance::insert(&store, ID, &host);
        let mut writer = store.write(ID).unwrap();
        writer.params.fill(9.0);
        drop(writer);
        assert_eq!((store.bytes_written(), store.version(ID).unwrap()), (3600, 0));
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    #[test]
    fn what_could_not_be_written_back_is_lost_and_says_so() {
        let (working, host) = (working(), conformance::budget());
        let (store, fails) = failing(&working, |file| file);
        let reservation = || host.reserve(masters().len_bytes(), "task").unwrap();
        fails.store(true, Relaxed);
        assert!(matches!(store.insert(ID, masters(), reservation()), Err(SpillError::Disk { .. })));
        assert_eq!(host.used(), 0, "a failed write holds nothing");
        fails.store(false, Relaxed);
        store.insert(ID, masters(), reservation()).unwrap();
        fails.store(true, Relaxed);
        let error = store.read(ID).unwrap_err();
        assert_eq!(
            with_causes(&error),
            "parameter buffer 5 of task 3 could not be read in `/scratch`: the disk is gone"
        );
        assert!(matches!(store.write(ID), Err(SpillError::Disk { .. })));
        assert!(matches!(store.remove(ID), Err(SpillError::Disk { .. })));
        fails.store(false, Relaxed);
        assert_eq!(*store.write(ID).unwrap(), masters());
        let mut writer = store.write(ID).unwrap();
        writer.params[0] = 1.0;
        fails.store(true, Relaxed);
        writer.commit();
        fails.store(false, Relaxed);
        let lost = "parameter buffer 5 of task 3 was lost when it was put back: parameter buffer 5 of task 3 could not be written in \
                    `/scratch`: the disk is gone";
        assert_eq!(store.read(ID).unwrap_err().to_string(), lost);
        assert_eq!(store.write(ID).unwrap_err().to_string(), lost);
        store.discard(ID).unwrap();
        assert_eq!((working.used(), host.used()), (0, 0));
    }

    #[test]
    fn one_piece_at_a_time_is_in_host_memory() {
        let (working, host) = (working(), conformance::budget());
        let store = in_pieces(&working, 64);
        conformance::insert(&store, ID, &host);
        let mut keeps = |_: usize, piece: &mut Masters| {
            assert!(piece.params.len() <= 64);
            Ok(())
        };
        store.write_pieces(ID, &mut keeps).unwrap();
        assert_eq!((working.used(), working.peak()), (0, 64 * 12));
        let view = store.read_part(ID, MastersPart::Moment(0), 65..66).unwrap();
        assert_eq!((view.bytes.len(), working.used(), working.peak()), (4, 64 * 4, 64 * 12));
        assert_eq!((store.bytes_read(), store.bytes_written()), (3600 + 256, 2 * 3600));
    }

    #[test]
    fn moments_come_after_parameters_and_take_no_memory() {
        let (working, host) = (working(), conformance::budget());
        let store = in_pieces(&working, 64);
        let Masters { params, moments, .. } = masters();
        let first = Masters::new(params.to_vec(), vec![Vec::new(); 2]);
        assert_eq!(first.len_bytes(), masters().len_bytes());
        store.insert(ID, first, host.reserve(3600, "task").unwrap()).unwrap();
        let zeros = Masters { moments: vec![vec![0.0; 300].into(); 2], ..masters() };
        assert_eq!((&*store.write(ID).unwrap(), store.version(ID).unwrap()), (&zeros, 0));
        let peak = working.take_recent_peak();
        for (moment, values) in moments.iter().enumerate() {
            for (piece, values) in values.words.chunks(64).enumerate() {
                store
                    .write_part(
                        ID,
                        MastersPart::Moment(moment),
                        64 * piece..64 * piece + values.len(),
                        values,
                    )
                    .unwrap();
            }
        }
        assert_eq!((peak, working.take_recent_peak()), (3600, 0));
        for elements in [0..63, 1..65, 256..301, 320..384] {
            let values = vec![9.0; elements.len()];
            let write = || store.write_part(ID, MastersPart::Moment(1), elements.clone(), &values);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).is_err(), "{elements:?}");
        }
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    #[test]
    fn what_is_rewritten_in_part_is_lost_and_what_is_not_stays() {
        let refuses = |at: usize| {
            move |start: usize, piece: &mut Masters| match start == at {
                true => Err(SpillError::BufferMissing { buffer: OTHER }),
                false => {
                    piece.params.fill(1.0);
                    Ok(())
                }
            }
        };
        let (working, host) = (working(), conformance::budget());
        let store = in_pieces(&working, 64);
        [ID, OTHER].into_iter().for_each(|id| conformance::insert(&store, id, &host));
        assert!(matches!(store.write_pieces(ID, &mut refuses(0)), Err(SpillError::BufferMissing { .. })));
        assert_eq!((store.version(ID).unwrap(), &*store.write(ID).unwrap()), (0, &masters()));
        assert!(matches!(store.write_pieces(ID, &mut refuses(128)), Err(SpillError::BufferMissing { .. })));
        let lost = |id| matches!(store.read(id), Err(SpillError::BufferLost { .. }));
        assert!(lost(ID) && !lost(OTHER));
        let panics = |store: &DiskStore| {
            let mut step = |start: usize, _: &mut Masters| {
                assert!(start < 64, "a step panics");
                Ok(())
            };
            let step = std::panic::AssertUnwindSafe(|| store.write_pieces(OTHER, &mut step));
            std::panic::catch_unwind(step)
        };
        assert!(panics(&store).is_err());
        let said = store.read(OTHER).unwrap_err().to_string();
        assert!(said.ends_with("was lost when it was put back: only a part of it was rewritten"), "{said}");
        assert_eq!((working.used(), store.version(OTHER).unwrap()), (0, 0));
        [ID, OTHER].into_iter().for_each(|id| store.discard(id).unwrap());
    }

    #[test]
    fn without_room_in_host_memory_an_buffer_stays_as_it_is() {
        let (working, host) = (Budget::new("working", ByteSize(3600)), conformance::budget());
        let store = store(&working);
        conformance::insert(&store, ID, &host);
        let held = working.reserve(2401, "someone").unwrap();
        let refused = store.read(ID).unwrap_err();
        assert!(
            matches!(refused, SpillError::Budget(BudgetError::Refused { requested: 1200, .. })),
            "{refused}"
        );
        assert!(matches!(store.write(ID), Err(SpillError::Budget(_))));
        drop(held);
        drop(store.write(ID).unwrap());
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    #[test]
    fn who_reads_within_a_budget_of_its_own_takes_nothing_from_others() {
        let (working, own, host) = (working(), Budget::new("own", ByteSize(3600)), conformance::budget());
        let store = store(&working);
        conformance::insert(&store, ID, &host);
        let theirs = store.within(own.clone());
        let held = [(); 3].map(|()| theirs.read_masters(ID).unwrap().bytes);
        assert_eq!((own.used(), working.used()), (3600, 0));
        let refused = theirs.read_masters(ID).unwrap_err();
        assert!(
            matches!(refused, SpillError::Budget(BudgetError::Refused { requested: 1200, .. })),
            "{refused}"
        );
        drop(store.read(ID).unwrap());
        assert!(
            matches!(store.write(ID), Err(SpillError::BufferBusy { readers: 3, .. })),
            "they are readers"
        );
        drop(held);
        let mut writer = theirs.write(ID).unwrap();
        assert_eq!((own.used(), working.peak()), (3600, 1200));
        writer.params[0] = 7.0;
        writer.commit();
        assert_eq!((store.version(ID).unwrap(), store.bytes_read()), (1, theirs.bytes_read()));
        assert_eq!(store.remove(ID).unwrap().params[0], 7.0);
        assert!(matches!(theirs.read(ID), Err(SpillError::BufferMissing { .. })), "it is one store");
    }

    #[test]
    fn a_directory_without_room_is_refused_and_named() {
        let store = DiskStore::new(Arc::new(DramStore::new()));
        let dir = std::env::temp_dir();
        let missing = dir.join("there is no such directory");
        let refused = |dir: &Path, bytes| {
            let error = store.assign(dir, &working(), &[(OTHER, 1), (ID, bytes)]).unwrap_err();
            assert!(matches!(error, SpillError::DiskHeadroom { .. }) && !store.holds(OTHER), "{error}");
            error.to_string()
        };
        assert!(refused(&missing, 1023).starts_with("no space for 1.00 KiB of master weights in `"));
        assert!(
            refused(&dir, u64::MAX).contains("of master weights in"),
            "more than can be counted, with the other"
        );
        let both = store.assign(&dir, &working(), &[(ID, u64::MAX), (ID.snapshot(), 2)]).unwrap_err();
        assert!(matches!(both, SpillError::DiskHeadroom { bytes: u64::MAX, .. }), "{both}");
        let said = refused(&dir, 1 << 60);
        assert!(said.contains("of master weights in") && said.contains(&dir.display().to_string()), "{said}");

        let (working, host) = (working(), conformance::budget());
        store.assign(&dir, &working, &[(ID, 3599)]).unwrap();
        let larger = store.insert(ID, masters(), host.reserve(3600, "task").unwrap());
        assert!(matches!(larger, Err(SpillError::ReservationTooSmall { needed: 3600, reserved: 3599, .. })));
        assert_eq!(host.used(), 0);
    }
}
