//! The tiers that masters live in.
//!
//! A store keeps each image of parameters with its optimizer moments, and holds one rule above all: nobody
//! reads an image while it is written. Readers get shared bytes without a copy and count for as long as any
//! clone or slice of them lives; a writer gets the masters themselves, once the count is zero.

use crate::cuda::PinnedFloats;
use crate::{DeviceWriter, Reservation, SpillError};
use hydra_core::{DeviceBytes, FloatType, TaskId};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The name of an image in a store: images of the same index belong to different tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId {
    /// The task.
    pub task: TaskId,
    /// The image's index in the task's chain.
    pub image: usize,
    /// The part of the image.
    pub kind: ImageKind,
}

/// The parts of an image that a store holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ImageKind {
    /// The masters, which are trained.
    Masters,
    /// A copy of the parameters at their best, which no shard task reads: it stays on the host.
    Snapshot,
}

impl ImageId {
    /// The masters of an image.
    pub const fn new(task: TaskId, image: usize) -> Self {
        Self { task, image, kind: ImageKind::Masters }
    }

    /// The copy of its best parameters.
    pub const fn snapshot(self) -> Self {
        Self { kind: ImageKind::Snapshot, ..self }
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == ImageKind::Snapshot {
            f.write_str("the best of ")?;
        }
        write!(f, "image {} of {}", self.image, self.task)
    }
}

/// Floats of the host, in ordinary memory or in memory that a card copies from by itself.
#[derive(Debug)]
pub enum Floats {
    /// Ordinary memory.
    Heap(Vec<f32>),
    /// Page-locked memory.
    Pinned(PinnedFloats),
}

impl Default for Floats {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Self {
        Self::Heap(values)
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Heap(values) => values,
            Self::Pinned(values) => values,
        }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Heap(values) => values,
            Self::Pinned(values) => values,
        }
    }
}

/// A clone is in ordinary memory.
impl Clone for Floats {
    fn clone(&self) -> Self {
        Self::Heap(self.to_vec())
    }
}

impl PartialEq for Floats {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// The truth about an image: its parameters and what the optimizer remembers of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Masters {
    /// The parameters, laid out as the image.
    pub params: Floats,
    /// The parameters rounded to 16 bits, where that is what moves.
    pub narrow: Option<NarrowFloats>,
    /// The optimizer's moments, each laid out as the parameters: none for a frozen image or plain SGD, one
    /// for momentum, two for Adam.
    pub moments: Vec<Vec<f32>>,
}

impl Masters {
    /// Masters that move as they are.
    pub fn new(params: impl Into<Floats>, moments: Vec<Vec<f32>>) -> Self {
        Self { params: params.into(), narrow: None, moments }
    }

    /// The bytes of parameters, in both types, and moments.
    pub fn len_bytes(&self) -> u64 {
        let elements = self.params.len() + self.moments.iter().map(Vec::len).sum::<usize>();
        let narrow = self.narrow.as_ref().map_or(0, |narrow| size_of_val(&**narrow));
        (elements * size_of::<f32>() + narrow) as u64
    }

    /// Rounds all parameters anew, as after a write to them that was no step of the optimizer.
    pub fn round(&mut self) {
        if let Some(narrow) = &mut self.narrow {
            narrow.float.narrow(&self.params, narrow);
        }
    }
}

/// Floats of 16 bits, two to each of the [`Floats`] that they lie in.
#[derive(Clone, Debug, PartialEq)]
pub struct NarrowFloats {
    float: FloatType,
    len: usize,
    packed: Floats,
}

impl NarrowFloats {
    /// `values` rounded to `float`; `pin` gives the floats that they are packed in a place.
    ///
    /// # Panics
    /// If `float` is `f32`.
    pub fn of(values: &[f32], float: FloatType, pin: impl FnOnce(Vec<f32>) -> Floats) -> Self {
        let packed = pin(vec![0.0; values.len().div_ceil(2)]);
        let mut narrow = Self { float, len: values.len(), packed };
        float.narrow(values, &mut narrow);
        narrow
    }

    /// So many zeros.
    pub(crate) fn zeros(len: usize, float: FloatType) -> Self {
        Self { float, len, packed: vec![0.0; len.div_ceil(2)].into() }
    }

    /// Their type.
    pub fn float_type(&self) -> FloatType {
        self.float
    }
}

impl Deref for NarrowFloats {
    type Target = [u16];

    fn deref(&self) -> &[u16] {
        &bytemuck::cast_slice(&self.packed)[..self.len]
    }
}

impl DerefMut for NarrowFloats {
    fn deref_mut(&mut self) -> &mut [u16] {
        &mut bytemuck::cast_slice_mut(&mut self.packed)[..self.len]
    }
}

/// The parameters of an image as they were at one version. It counts as a reader until `bytes` and all
/// clones and slices of them are dropped.
#[derive(Clone, Debug)]
pub struct ImageView {
    /// The parameters, in the machine's order.
    pub bytes: bytes::Bytes,
    /// How many writes were committed before.
    pub version: u64,
}

/// A place that keeps images.
///
/// It is a port: behind it stand memory of the host, files, and the memory of a device. Whatever the tier, a read never
/// sees half of a write, a version names one content, and an image that is in use is refused with
/// [`SpillError::ImageBusy`] instead of waited for, because who waits is the scheduler's to decide.
pub trait TierStore: Send + Sync {
    /// Takes an image in, at version 0. The reservation is the store's until the image is removed.
    ///
    /// # Errors
    /// [`SpillError::ImageExists`], [`SpillError::MomentLength`], [`SpillError::NarrowLength`], or
    /// [`SpillError::ReservationTooSmall`] if the reservation does not cover parameters and moments.
    fn insert(&self, id: ImageId, masters: Masters, reservation: Reservation) -> Result<(), SpillError>;

    /// The parameters as they move, to be read: rounded where the masters have them so. Several readers at once
    /// are welcome.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`], or [`SpillError::ImageBusy`] while a writer is out.
    fn read(&self, id: ImageId) -> Result<ImageView, SpillError>;

    /// The masters' parameters, `f32`, to be read; else as [`read`](Self::read).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_masters(&self, id: ImageId) -> Result<ImageView, SpillError>;

    /// The masters, to be written in place.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`], or [`SpillError::ImageBusy`] while anyone reads or writes the image.
    fn write(&self, id: ImageId) -> Result<ImageWriter, SpillError>;

    /// How many writes were committed; while a writer is out, without that one.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`].
    fn version(&self, id: ImageId) -> Result<u64, SpillError>;

    /// Gives an image up and releases its reservation.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`], or [`SpillError::ImageBusy`] while anyone reads or writes the image.
    fn remove(&self, id: ImageId) -> Result<Masters, SpillError>;

    /// Gives an image up, as [`remove`](Self::remove), when nobody wants what was in it.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    fn discard(&self, id: ImageId) -> Result<(), SpillError> {
        self.remove(id).map(drop)
    }

    /// The parameters of an image that lives on a device, to be read there, and how many writes were committed;
    /// `None` if it lives on the host. Whoever has them is a reader.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn on_device(&self, _id: ImageId) -> Result<Option<(DeviceBytes, u64)>, SpillError> {
        Ok(None)
    }

    /// The masters of an image that lives on a device, to be stepped there.
    ///
    /// # Errors
    /// As [`write`](Self::write), and [`SpillError::ImageMissing`] if it lives on the host.
    fn write_on_device(&self, id: ImageId) -> Result<DeviceWriter, SpillError> {
        Err(SpillError::ImageMissing { image: id })
    }
}

type PutBack = Box<dyn FnOnce(Masters, bool) + Send>;

/// The masters of an image, out of their store to be written.
///
/// Dropped without [`commit`](Self::commit), as when a step panics, they go back as they are under the old
/// version: what was written need not be undone, nor rounded yet where that is what moves. The lengths are the image's and must
/// stay what they are.
#[must_use = "dropping a writer puts the masters back under the old version"]
pub struct ImageWriter {
    masters: Masters,
    put_back: Option<PutBack>,
}

impl ImageWriter {
    /// For implementors of a store: `put_back` is called once, with the masters and whether they were
    /// committed.
    pub fn new(masters: Masters, put_back: impl FnOnce(Masters, bool) + Send + 'static) -> Self {
        Self { masters, put_back: Some(Box::new(put_back)) }
    }

    /// Puts the masters back as the next version.
    pub fn commit(mut self) {
        self.finish(true);
    }

    fn finish(&mut self, committed: bool) {
        if let Some(put_back) = self.put_back.take() {
            put_back(std::mem::take(&mut self.masters), committed);
        }
    }
}

impl Drop for ImageWriter {
    fn drop(&mut self) {
        self.finish(false);
    }
}

impl Deref for ImageWriter {
    type Target = Masters;

    fn deref(&self) -> &Masters {
        &self.masters
    }
}

impl DerefMut for ImageWriter {
    fn deref_mut(&mut self) -> &mut Masters {
        &mut self.masters
    }
}

impl fmt::Debug for ImageWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (params, moments) = (self.masters.params.len(), self.masters.moments.len());
        f.debug_struct("ImageWriter").field("params", &params).field("moments", &moments).finish()
    }
}

/// Images in ordinary host memory.
#[derive(Debug, Default)]
pub struct DramStore {
    slots: Arc<Mutex<BTreeMap<ImageId, Slot>>>,
}

#[derive(Debug)]
struct Slot {
    content: Content,
    version: u64,
    /// Released after the content is freed, for fields are dropped in this order.
    _reservation: Reservation,
}

#[derive(Debug)]
enum Content {
    /// Every view that is out shares `params`.
    AtRest { params: Arc<Params>, moments: Vec<Vec<f32>> },
    /// A writer has the masters.
    Out,
}

#[derive(Debug)]
struct Params {
    wide: Floats,
    narrow: Option<NarrowFloats>,
}

struct Wide(Arc<Params>);

impl AsRef<[u8]> for Wide {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0.wide)
    }
}

/// The bytes that move.
struct Moving(Arc<Params>);

impl AsRef<[u8]> for Moving {
    fn as_ref(&self) -> &[u8] {
        match &self.0.narrow {
            Some(narrow) => bytemuck::cast_slice(narrow),
            None => bytemuck::cast_slice(&self.0.wide),
        }
    }
}

impl Content {
    fn new(masters: Masters) -> Self {
        let Masters { params: wide, narrow, moments } = masters;
        Self::AtRest { params: Arc::new(Params { wide, narrow }), moments }
    }

    /// The masters, if nobody reads them; otherwise the number of readers.
    fn take(&mut self) -> Result<Masters, usize> {
        match std::mem::replace(self, Self::Out) {
            Self::Out => Err(0),
            Self::AtRest { params, moments } => match Arc::try_unwrap(params) {
                Ok(Params { wide, narrow }) => Ok(Masters { params: wide, narrow, moments }),
                Err(params) => {
                    // The last reader may have left since, but it was there when it mattered.
                    let readers = (Arc::strong_count(&params) - 1).max(1);
                    *self = Self::AtRest { params, moments };
                    Err(readers)
                }
            },
        }
    }
}

impl DramStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<ImageId, Slot>> {
        lock(&self.slots)
    }

    fn view(&self, id: ImageId, of: fn(Arc<Params>) -> bytes::Bytes) -> Result<ImageView, SpillError> {
        let slots = self.slots();
        let slot = slots.get(&id).ok_or(SpillError::ImageMissing { image: id })?;
        match &slot.content {
            Content::AtRest { params, .. } => {
                Ok(ImageView { bytes: of(params.clone()), version: slot.version })
            }
            Content::Out => Err(SpillError::ImageBusy { image: id, readers: 0 }),
        }
    }
}

fn lock(slots: &Mutex<BTreeMap<ImageId, Slot>>) -> MutexGuard<'_, BTreeMap<ImageId, Slot>> {
    // Nothing panics halfway through a change of a slot, so a poisoned map is as good as any.
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many hold a lease beside its store. Where nobody does, all that readers did is over, which the count by itself
/// would not promise.
pub(crate) fn readers(lease: &mut Arc<()>) -> usize {
    match Arc::get_mut(lease) {
        Some(()) => 0,
        // The last reader may have left since, but it was there when it mattered.
        None => (Arc::strong_count(lease) - 1).max(1),
    }
}

/// Checks that the moments are as long as the parameters and that `reservation` covers both.
pub(crate) fn check(id: ImageId, masters: &Masters, reservation: &Reservation) -> Result<(), SpillError> {
    let params = masters.params.len();
    if let Some(narrow) = masters.narrow.as_ref().filter(|narrow| narrow.len() != params) {
        return Err(SpillError::NarrowLength { image: id, params, found: narrow.len() });
    }
    if let Some(moment) = masters.moments.iter().position(|m| m.len() != params) {
        let found = masters.moments[moment].len();
        return Err(SpillError::MomentLength { image: id, params, moment, found });
    }
    covers(reservation, masters.len_bytes())
}

/// Checks that `reservation` is enough for `needed` bytes.
pub(crate) fn covers(reservation: &Reservation, needed: u64) -> Result<(), SpillError> {
    let reserved = reservation.bytes();
    match needed <= reserved {
        true => Ok(()),
        false => {
            Err(SpillError::ReservationTooSmall { needed, reserved, owner: reservation.owner().to_owned() })
        }
    }
}

impl TierStore for DramStore {
    fn insert(&self, id: ImageId, masters: Masters, reservation: Reservation) -> Result<(), SpillError> {
        check(id, &masters, &reservation)?;
        let mut slots = self.slots();
        if slots.contains_key(&id) {
            return Err(SpillError::ImageExists { image: id });
        }
        slots.insert(id, Slot { content: Content::new(masters), version: 0, _reservation: reservation });
        Ok(())
    }

    fn read(&self, id: ImageId) -> Result<ImageView, SpillError> {
        self.view(id, |params| bytes::Bytes::from_owner(Moving(params)))
    }

    fn read_masters(&self, id: ImageId) -> Result<ImageView, SpillError> {
        self.view(id, |params| bytes::Bytes::from_owner(Wide(params)))
    }

    fn write(&self, id: ImageId) -> Result<ImageWriter, SpillError> {
        let mut slots = self.slots();
        let slot = slots.get_mut(&id).ok_or(SpillError::ImageMissing { image: id })?;
        let masters = slot.content.take().map_err(|readers| SpillError::ImageBusy { image: id, readers })?;
        let home = self.slots.clone();
        Ok(ImageWriter::new(masters, move |masters, committed| {
            // The slot is still there: an image that is being written cannot be removed.
            if let Some(slot) = lock(&home).get_mut(&id) {
                slot.content = Content::new(masters);
                slot.version += u64::from(committed);
            }
        }))
    }

    fn version(&self, id: ImageId) -> Result<u64, SpillError> {
        self.slots().get(&id).map(|slot| slot.version).ok_or(SpillError::ImageMissing { image: id })
    }

    fn remove(&self, id: ImageId) -> Result<Masters, SpillError> {
        let mut slots = self.slots();
        let slot = slots.get_mut(&id).ok_or(SpillError::ImageMissing { image: id })?;
        let masters = slot.content.take().map_err(|readers| SpillError::ImageBusy { image: id, readers })?;
        slots.remove(&id);
        Ok(masters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dram_store_conforms() {
        conformance::run(&|| Box::new(DramStore::new()));
    }

    #[test]
    fn reading_and_writing_move_no_parameters() {
        let store = DramStore::new();
        let (id, budget) = (conformance::ID, conformance::budget());
        conformance::insert(&store, id, &budget);
        let address = store.read(id).unwrap().bytes.as_ptr() as usize;
        let writer = store.write(id).unwrap();
        assert_eq!(writer.params.as_ptr() as usize, address);
        writer.commit();
        assert_eq!(store.read(id).unwrap().bytes.as_ptr() as usize, address);
        assert_eq!(store.remove(id).unwrap().params.as_ptr() as usize, address);
    }

    #[test]
    fn a_busy_image_says_who_holds_it() {
        let store = DramStore::new();
        let (id, budget) = (conformance::ID, conformance::budget());
        conformance::insert(&store, id, &budget);
        let view = (store.read(id).unwrap(), store.read(id).unwrap());
        assert_eq!(
            store.write(id).unwrap_err().to_string(),
            "image 5 of task 3 is busy: 2 readers hold it; drop their views first"
        );
        drop(view);
        let _writer = store.write(id).unwrap();
        assert_eq!(
            store.read(id).unwrap_err().to_string(),
            "image 5 of task 3 is busy: it is being written; commit or drop its writer first"
        );
    }
}

/// The promises of every store, whatever its tier.
#[cfg(test)]
pub(crate) mod conformance {
    use super::*;
    use crate::Budget;
    use hydra_core::ByteSize;

    pub(crate) const ID: ImageId = ImageId::new(TaskId(3), 5);

    pub(crate) fn budget() -> Budget {
        Budget::new("host memory", ByteSize::mib(1))
    }

    pub(crate) fn masters() -> Masters {
        let ramp = |scale: f32| (0..300).map(|i| i as f32 * scale).collect::<Vec<_>>();
        Masters::new(ramp(1.0), vec![ramp(0.5), ramp(-0.25)])
    }

    pub(crate) fn insert(store: &dyn TierStore, id: ImageId, budget: &Budget) {
        let masters = masters();
        let reservation = budget.reserve(masters.len_bytes(), id.to_string()).unwrap();
        store.insert(id, masters, reservation).unwrap();
    }

    /// Runs the suite; `make` gives an empty store.
    pub(crate) fn run(make: &dyn Fn() -> Box<dyn TierStore>) {
        what_goes_in_comes_out(make().as_ref());
        what_does_not_belong_is_refused(make().as_ref());
        views_hold_off_writers(make().as_ref());
        a_writer_holds_off_everyone(make().as_ref());
        writers_put_back_what_they_wrote(make().as_ref());
        nobody_sees_half_of_a_write(make().as_ref());
        what_moves_is_what_the_masters_were_rounded_to(make().as_ref());
    }

    fn floats(view: &ImageView) -> &[f32] {
        bytemuck::cast_slice(&view.bytes)
    }

    fn busy_with(result: Result<(), SpillError>) -> Option<usize> {
        match result {
            Err(SpillError::ImageBusy { image, readers }) => {
                assert_eq!(image, ID);
                Some(readers)
            }
            _ => None,
        }
    }

    fn what_goes_in_comes_out(store: &dyn TierStore) {
        let budget = budget();
        let other = ImageId { task: TaskId(2), ..ID };
        insert(store, ID, &budget);
        insert(store, other, &budget);
        let best = Masters::new(vec![7.0; 4], Vec::new());
        store.insert(ID.snapshot(), best.clone(), budget.reserve(16, "best").unwrap()).unwrap();
        assert_eq!(budget.used(), 2 * masters().len_bytes() + 16);
        let mut writer = store.write(ID.snapshot()).unwrap();
        writer.params[3] = 8.0;
        writer.commit();
        let view = store.read_masters(ID.snapshot()).unwrap();
        assert_eq!((floats(&view), view.version), (&[7.0, 7.0, 7.0, 8.0][..], 1));
        drop(view);
        store.discard(ID.snapshot()).unwrap();
        let view = store.read(ID).unwrap();
        assert_eq!((floats(&view), view.version), (&masters().params[..], 0));
        drop(view);
        assert_eq!(store.remove(ID).unwrap(), masters());
        assert_eq!(budget.used(), masters().len_bytes());
        let missing = |result| matches!(result, Err(SpillError::ImageMissing { image: ID }));
        assert!(missing(store.read(ID).map(drop)));
        assert!(missing(store.write(ID).map(drop)));
        assert!(missing(store.version(ID).map(drop)));
        assert!(missing(store.remove(ID).map(drop)));
        assert_eq!(store.remove(other).unwrap(), masters());
        assert_eq!(budget.used(), 0);
    }

    fn what_does_not_belong_is_refused(store: &dyn TierStore) {
        let budget = budget();
        let reserve = |bytes| budget.reserve(bytes, "someone").unwrap();
        let needed = masters().len_bytes();
        let small = store.insert(ID, masters(), reserve(needed - 1));
        let Err(SpillError::ReservationTooSmall { needed: n, reserved, owner }) = small else {
            panic!("expected a reservation that is too small, found {small:?}")
        };
        assert_eq!((n, reserved, owner.as_str()), (needed, needed - 1, "someone"));
        let uneven = Masters { moments: vec![vec![0.0; 300], vec![0.0; 299]], ..masters() };
        let uneven = store.insert(ID, uneven, reserve(needed));
        assert!(matches!(uneven, Err(SpillError::MomentLength { params: 300, moment: 1, found: 299, .. })));
        assert_eq!(budget.used(), 0, "a refused insertion releases its reservation");

        insert(store, ID, &budget);
        let again = store.insert(ID, Masters::default(), reserve(0));
        assert!(matches!(again, Err(SpillError::ImageExists { image: ID })));
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    fn views_hold_off_writers(store: &dyn TierStore) {
        let budget = budget();
        insert(store, ID, &budget);
        let (one, two) = (store.read(ID).unwrap(), store.read(ID).unwrap());
        assert_eq!(busy_with(store.write(ID).map(drop)), Some(2));
        drop(two);
        let slice = one.bytes.slice(8..16);
        drop(one);
        assert_eq!(busy_with(store.write(ID).map(drop)), Some(1));
        assert_eq!(busy_with(store.remove(ID).map(drop)), Some(1));
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&slice), [2.0, 3.0]);
        assert_eq!(floats(&store.read(ID).unwrap()), &masters().params[..]);
        drop(slice);
        drop(store.write(ID).unwrap());
        assert_eq!(store.remove(ID).unwrap(), masters());
    }

    fn a_writer_holds_off_everyone(store: &dyn TierStore) {
        let budget = budget();
        insert(store, ID, &budget);
        let writer = store.write(ID).unwrap();
        assert_eq!(busy_with(store.read(ID).map(drop)), Some(0));
        assert_eq!(busy_with(store.write(ID).map(drop)), Some(0));
        assert_eq!(busy_with(store.remove(ID).map(drop)), Some(0));
        assert_eq!(store.version(ID).unwrap(), 0);
        assert_eq!(budget.used(), masters().len_bytes(), "a writer's masters stay charged");
        drop(writer);
        assert!(store.read(ID).is_ok());
    }

    fn writers_put_back_what_they_wrote(store: &dyn TierStore) {
        let budget = budget();
        insert(store, ID, &budget);
        let mut expected = masters();
        for version in 1..4 {
            let mut writer = store.write(ID).unwrap();
            assert_eq!(*writer, expected);
            writer.params[version] = -1.0;
            writer.moments[1][version] = 7.0;
            writer.commit();
            expected.params[version] = -1.0;
            expected.moments[1][version] = 7.0;
            assert_eq!(store.version(ID).unwrap(), version as u64);
            let view = store.read(ID).unwrap();
            assert_eq!((floats(&view), view.version), (&expected.params[..], version as u64));
        }
        drop(store.write(ID).unwrap());
        assert_eq!(store.version(ID).unwrap(), 3);
        assert_eq!(store.remove(ID).unwrap(), expected);
    }

    fn nobody_sees_half_of_a_write(store: &dyn TierStore) {
        let budget = budget();
        let zeros = Masters::new(vec![0.0; 4096], Vec::new());
        let reservation = budget.reserve(zeros.len_bytes(), "zeros").unwrap();
        store.insert(ID, zeros, reservation).unwrap();
        let read = || {
            for _ in 0..500 {
                match store.read(ID) {
                    Ok(view) => assert!(floats(&view).iter().all(|x| *x == view.version as f32)),
                    Err(error) => assert_eq!(busy_with(Err(error)), Some(0)),
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(read);
            scope.spawn(read);
            // Readers end after a while, so the writer gets its turns at last.
            while store.version(ID).unwrap() < 100 {
                let next = store.version(ID).unwrap() + 1;
                match store.write(ID) {
                    Ok(mut writer) => {
                        writer.params.fill(next as f32);
                        writer.commit();
                    }
                    Err(_) => std::thread::yield_now(),
                }
            }
        });
        assert!(floats(&store.read(ID).unwrap()).iter().all(|x| *x == 100.0));
    }

    fn what_moves_is_what_the_masters_were_rounded_to(store: &dyn TierStore) {
        let budget = budget();
        let values: Vec<f32> = (0..301).map(|i| i as f32 * 0.1 - 7.0).collect();
        let narrow = |values: &[f32]| NarrowFloats::of(values, FloatType::Bf16, Floats::from);
        let with = |narrow| Masters { narrow: Some(narrow), ..Masters::new(values.clone(), Vec::new()) };
        let reserve = |bytes| budget.reserve(bytes, "someone").unwrap();
        let short = store.insert(ID, with(narrow(&values[1..])), reserve(2000));
        assert!(matches!(short, Err(SpillError::NarrowLength { params: 301, found: 300, .. })));
        let small = store.insert(ID, with(narrow(&values)), reserve(301 * 6 - 1));
        assert!(matches!(small, Err(SpillError::ReservationTooSmall { needed: 1806, .. })));
        store.insert(ID, with(narrow(&values)), reserve(301 * 6)).unwrap();

        let (moving, masters) = (store.read(ID).unwrap(), store.read_masters(ID).unwrap());
        assert_eq!(
            (bytemuck::cast_slice::<u8, u16>(&moving.bytes), floats(&masters)),
            (&*narrow(&values), &values[..])
        );
        drop(moving);
        assert_eq!(busy_with(store.write(ID).map(drop)), Some(1));
        drop(masters);
        let moving = store.read(ID).unwrap();
        assert_eq!(busy_with(store.write(ID).map(drop)), Some(1));
        drop(moving);
        let mut writer = store.write(ID).unwrap();
        writer.params.fill(1.25);
        writer.round();
        writer.commit();
        let moving = store.read(ID).unwrap().bytes;
        assert_eq!(bytemuck::cast_slice::<u8, u16>(&moving), [0x3FA0; 301]);
        drop(moving);
        let mut written = Masters::new(vec![1.25; 301], Vec::new());
        written.narrow = Some(narrow(&written.params));
        assert_eq!((store.remove(ID).unwrap(), budget.used()), (written, 0));
    }
}
