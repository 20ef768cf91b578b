//! The tier of buffers whose master weights are resident on a device.
//!
//! If a device fits the parameters, moments and gradients of a buffer in addition to what spilled shard tasks take,
//! no copies of it are necessary: the master weights stay there, shard tasks read them, or their rounded copy, in
//! place, and the optimizer step runs there. Other users see an ordinary store: reads download a copy, writes upload
//! the result.

use super::slots::{self, SlotContent, Slots};
use super::{InPlaceParams, MastersPart, Rewrite, ViewOf, Writer, check, overwrite, rewrite_whole};
use crate::{
    BudgetError, DeviceLink, Floats, LinkError, Masters, Moment, ParamBufferId, ParamBufferView,
    ParamBufferWriter,
};
use crate::{NarrowFloats, Reservation, SpillError, TierStore};
use bytes::Bytes;
use hydra_core::optimizer::MomentLayout;
use hydra_core::{DeviceBytes, FloatType, leased, with_causes};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The master weights of a buffer in the memory of a device.
#[derive(Clone, Debug, Default)]
pub struct DeviceMasters {
    /// The parameters, laid out as the buffer.
    pub params: DeviceBytes,
    /// The parameters rounded to 16 bits, if shard tasks read those.
    pub narrow: Option<DeviceNarrow>,
    /// The optimizer's moments.
    pub moments: Vec<DeviceMoment>,
}

/// A moment of an optimizer in the memory of a device.
#[derive(Clone, Debug)]
pub struct DeviceMoment {
    /// Its bytes.
    pub bytes: DeviceBytes,
    /// Where the elements of the buffer are.
    pub layout: MomentLayout,
}

/// 16-bit floats in the memory of a device.
#[derive(Clone, Debug)]
pub struct DeviceNarrow {
    /// The float type.
    pub float: FloatType,
    /// Two bytes per float.
    pub bytes: DeviceBytes,
}

impl DeviceMasters {
    /// The bytes that a reader sees.
    fn part(&self, of: ViewOf) -> DeviceBytes {
        let some = |bytes: &DeviceBytes, elements: Range<usize>, each: usize| {
            bytes.slice(elements.start * each..elements.end * each)
        };
        match of {
            ViewOf::Promoted(None) => self.moving().clone(),
            ViewOf::Promoted(Some((elements, each))) => some(self.moving(), elements, each),
            ViewOf::Masters(MastersPart::Params, None) => self.params.clone(),
            ViewOf::Masters(MastersPart::Params, Some(elements)) => {
                some(&self.params, elements, size_of::<f32>())
            }
            ViewOf::Masters(MastersPart::Moment(moment), elements) => {
                let DeviceMoment { bytes, layout } = &self.moments[moment];
                elements.map_or(bytes.clone(), |elements| bytes.slice(layout.bytes_of(elements)))
            }
        }
    }

    /// The bytes that shard tasks read.
    fn moving(&self) -> &DeviceBytes {
        self.narrow.as_ref().map_or(&self.params, |narrow| &narrow.bytes)
    }
}

/// The master weights of a buffer on a device, taken out of their store for a step; access is exclusive. They
/// are written in place, or replaced by others of the same length.
pub type DeviceWriter = Writer<DeviceMasters>;

/// The buffers that are resident on a device.
struct DeviceResident {
    buffers: BTreeSet<ParamBufferId>,
    link: Arc<dyn DeviceLink>,
    /// Memory for buffers that are not inserted yet.
    reserved: Mutex<Reservation>,
}

/// A store that keeps the master weights of some buffers on a device, and everything else in the store below.
///
/// A resident buffer takes a part of the store's reservation on the device in addition to one on the host, which is
/// kept: a copy may be downloaded at any time.
pub struct DeviceResidentStore {
    below: Arc<dyn TierStore>,
    resident: Arc<OnceLock<DeviceResident>>,
    slots: Slots<DeviceMasters>,
}

impl DeviceResidentStore {
    /// Returns a store in which nothing is resident on a device yet.
    pub fn new(below: Arc<dyn TierStore>) -> Self {
        Self { below, resident: Arc::default(), slots: Slots::default() }
    }

    /// Returns the same store over another view of the store below, such as one that reads through other
    /// memory.
    pub fn over(&self, below: Arc<dyn TierStore>) -> Self {
        Self { below, resident: self.resident.clone(), slots: self.slots.clone() }
    }

    /// Makes these buffers resident on the device of `link` from their insertion on. `reserved` is the memory there
    /// for them and for other [reservations](Self::reserve): it is taken before anything else on the device can use
    /// it. May be called once.
    pub fn assign(
        &self,
        buffers: impl IntoIterator<Item = ParamBufferId>,
        link: Arc<dyn DeviceLink>,
        reserved: Reservation,
    ) {
        let (buffers, reserved) = (buffers.into_iter().collect(), Mutex::new(reserved));
        let first = self.resident.set(DeviceResident { buffers, link, reserved });
        assert!(first.is_ok(), "resident buffers are assigned once");
    }

    /// Splits memory off from the reservation on the device, or reserves it there if that is too small.
    ///
    /// # Errors
    /// [`BudgetError::Refused`](crate::BudgetError::Refused) if neither has the bytes.
    ///
    /// # Panics
    /// If no buffers were assigned.
    pub fn reserve(&self, bytes: u64, owner: &str) -> Result<Reservation, BudgetError> {
        self.resident.get().expect("buffers were assigned").reserve(bytes, owner)
    }

    /// Returns the device of a buffer, if it is not in the store below.
    fn resident_device(&self, id: ParamBufferId) -> Option<&DeviceResident> {
        self.resident.get().filter(|resident| resident.buffers.contains(&id))
    }

    /// Returns master weights that were taken out.
    fn put_back(&self, id: ParamBufferId) -> impl FnOnce(SlotContent<DeviceMasters>, bool) + use<> {
        let slots = self.slots.clone();
        move |content, committed| slots::put_back(&slots, id, content, committed)
    }
}

impl DeviceResident {
    fn reserve(&self, bytes: u64, owner: &str) -> Result<Reservation, BudgetError> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        match bytes <= reserved.bytes() {
            true => Ok(reserved.split(bytes)),
            false => reserved.budget().reserve(bytes, owner),
        }
    }
}

fn upload(link: &dyn DeviceLink, masters: Masters) -> Result<DeviceMasters, LinkError> {
    let params = link.upload_persistent(&Bytes::from_owner(masters.params))?;
    let narrow = masters.narrow.map(|narrow| {
        let float = narrow.float_type();
        link.upload_persistent(&Bytes::from_owner(narrow)).map(|bytes| DeviceNarrow { float, bytes })
    });
    let moments = masters.moments.into_iter().map(|Moment { words, layout }| {
        let words = Bytes::from_owner(Floats::from(words));
        link.upload_persistent(&words).map(|bytes| DeviceMoment { bytes, layout })
    });
    Ok(DeviceMasters { params, narrow: narrow.transpose()?, moments: moments.collect::<Result<_, _>>()? })
}

/// Downloads master weights to the host. The rounded copy is recomputed instead of downloaded.
fn download(link: &dyn DeviceLink, masters: &DeviceMasters) -> Result<Masters, LinkError> {
    let download = |bytes: &DeviceBytes| {
        let mut floats = vec![0.0; bytes.len() / size_of::<f32>()];
        link.download_into(bytes, &mut floats).map(|()| floats)
    };
    let moment = |DeviceMoment { bytes, layout }: &DeviceMoment| {
        download(bytes).map(|words| Moment { words, layout: layout.clone() })
    };
    let moments = masters.moments.iter().map(moment).collect::<Result<_, _>>()?;
    let params = download(&masters.params)?;
    let narrow = masters.narrow.as_ref().map(|narrow| match params.is_empty() {
        true => Ok(NarrowFloats::from_bytes(&link.download(&narrow.bytes)?, narrow.float)),
        false => Ok(NarrowFloats::of(&params, narrow.float, Floats::from)),
    });
    let narrow = narrow.transpose()?;
    Ok(Masters { narrow, moments, ..Masters::new(params, Vec::new()) })
}

impl TierStore for DeviceResidentStore {
    fn insert(
        &self,
        id: ParamBufferId,
        masters: Masters,
        reservation: Reservation,
    ) -> Result<(), SpillError> {
        let Some(resident) = self.resident_device(id) else {
            return self.below.insert(id, masters, reservation);
        };
        check(id, &masters, &reservation)?;
        if slots::lock(&self.slots).contains_key(&id) {
            return Err(SpillError::BufferExists { buffer: id });
        }
        let device_reservation = resident.reserve(masters.len_bytes(), reservation.owner())?;
        slots::insert(
            &self.slots,
            id,
            upload(resident.link.as_ref(), masters.with_zeros())?,
            vec![device_reservation, reservation],
        )
    }

    fn view(&self, id: ParamBufferId, of: ViewOf) -> Result<ParamBufferView, SpillError> {
        let Some(resident) = self.resident_device(id) else { return self.below.view(id, of) };
        let (part, lease, version) = slots::slot(&self.slots, id, |slot| {
            slot.content.read(id).map(|(masters, lease)| (masters.part(of), lease, slot.version))
        })?;
        let bytes = resident.link.download(&part)?;
        Ok(ParamBufferView { bytes: leased(bytes, lease), version })
    }

    fn write_pieces(&self, id: ParamBufferId, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
        match self.resident_device(id) {
            Some(_) => rewrite_whole(self.write(id)?, rewrite),
            None => self.below.write_pieces(id, rewrite),
        }
    }

    fn write_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
        words: &[f32],
    ) -> Result<(), SpillError> {
        match self.resident_device(id) {
            Some(_) => overwrite(self.write(id)?, part, elements, words),
            None => self.below.write_part(id, part, elements, words),
        }
    }

    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError> {
        let Some(resident) = self.resident_device(id) else { return self.below.write(id) };
        let (device_resident, put_back) = (slots::take(&self.slots, id)?, self.put_back(id));
        let masters = match download(resident.link.as_ref(), &device_resident) {
            Ok(masters) => masters,
            Err(error) => {
                put_back(SlotContent::at_rest(device_resident), false);
                return Err(error.into());
            }
        };
        let link = resident.link.clone();
        Ok(ParamBufferWriter::new(masters, move |masters, committed| {
            if !committed {
                return put_back(SlotContent::at_rest(device_resident), false);
            }
            // Both may not fit.
            drop(device_resident);
            let lost = |error| SlotContent::Lost { problem: with_causes(&error) };
            let content = upload(link.as_ref(), masters).map_or_else(lost, SlotContent::at_rest);
            put_back(content, true);
        }))
    }

    fn version(&self, id: ParamBufferId) -> Result<u64, SpillError> {
        match self.resident_device(id) {
            Some(_) => slots::slot(&self.slots, id, |slot| Ok(slot.version)),
            None => self.below.version(id),
        }
    }

    fn in_place(&self, id: ParamBufferId) -> Result<Option<(Arc<InPlaceParams>, u64)>, SpillError> {
        if self.resident_device(id).is_some() { Ok(None) } else { self.below.in_place(id) }
    }

    fn remove(&self, id: ParamBufferId) -> Result<Masters, SpillError> {
        let Some(resident) = self.resident_device(id) else { return self.below.remove(id) };
        let (device_resident, put_back) = (slots::take(&self.slots, id)?, self.put_back(id));
        let masters = download(resident.link.as_ref(), &device_resident);
        put_back(SlotContent::at_rest(device_resident), false);
        let masters = masters?;
        slots::lock(&self.slots).remove(&id);
        Ok(masters)
    }

    fn discard(&self, id: ParamBufferId) -> Result<(), SpillError> {
        if self.resident_device(id).is_some() {
            slots::discard(&self.slots, id)
        } else {
            self.below.discard(id)
        }
    }

    fn on_device(&self, id: ParamBufferId) -> Result<Option<(DeviceBytes, u64)>, SpillError> {
        let Some(_) = self.resident_device(id) else { return Ok(None) };
        slots::slot(&self.slots, id, |slot| {
            let (masters, lease) = slot.content.read(id)?;
            Ok(Some((masters.moving().leased(lease), slot.version)))
        })
    }

    fn write_on_device(&self, id: ParamBufferId) -> Result<DeviceWriter, SpillError> {
        let Some(_) = self.resident_device(id) else { return self.below.write_on_device(id) };
        let (masters, put_back) = (slots::take(&self.slots, id)?, self.put_back(id));
        let put_back = move |masters, committed| put_back(SlotContent::at_rest(masters), committed);
        Ok(DeviceWriter::new(masters, put_back))
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{self, ID, masters};
    use super::*;
    use crate::link::conformance::FailingLink;
    use crate::{Budget, DramStore, HeldCopies, HostCopyLink, SpillManager};
    use hydra_core::{ByteSize, DeviceId, TaskId};
    use std::sync::atomic::Ordering::Relaxed;

    const DEVICE: DeviceId = DeviceId(2);

    /// A store in which buffers of the conformance suite's tasks are resident on a device, except for task 9.
    fn store(link: Arc<dyn DeviceLink>) -> (Arc<DeviceResidentStore>, Budget) {
        let store = DeviceResidentStore::new(Arc::new(DramStore::new()));
        let budget = Budget::new("cpu:2", ByteSize::mib(1));
        let ids = |task| (0..8).map(move |buffer| ParamBufferId::new(TaskId(task), buffer));
        let buffers = ids(2).chain(ids(3)).flat_map(|id| [id, id.shared()]);
        store.assign(buffers, link, budget.reserve(0, "resident").unwrap());
        (Arc::new(store), budget)
    }

    fn copies() -> Arc<dyn DeviceLink> {
        Arc::new(HostCopyLink::new(DEVICE))
    }

    #[test]
    fn the_store_of_a_device_conforms() {
        conformance::run(&|| store(copies()).0);
        conformance::run_quantized(&|| store(copies()).0);
        conformance::run(&|| Arc::new(DeviceResidentStore::new(Arc::new(DramStore::new()))));
    }

    #[test]
    fn a_promotion_of_what_lives_there_moves_nothing() {
        let (store, budget) = store(copies());
        let host = conformance::budget();
        let elsewhere = ParamBufferId::new(TaskId(9), 5);
        conformance::insert(store.as_ref(), ID, &host);
        conformance::insert(store.as_ref(), elsewhere, &host);
        assert_eq!(budget.used(), masters().len_bytes(), "one of the tasks is resident on the device");
        let link = Arc::new(HostCopyLink::new(DEVICE));
        let manager = SpillManager::new(DEVICE, budget.clone(), store.clone(), link);
        let promote = |task, bytes| {
            let reservation = budget.reserve(bytes, "shard").unwrap();
            manager.promote(task, &[5], &[], HeldCopies::default(), reservation).unwrap().0
        };
        let resident = promote(ID.task, 0);
        assert_eq!((resident.bytes(), resident.version(5), manager.uploaded_bytes()), (1200, Some(0), 0));
        let buffer = resident.buffer(5);
        assert!(resident.holds(&buffer.slice(8..16)), "a view of it must be copied");
        assert_eq!(bytemuck::cast_slice::<u8, f32>(buffer.as_host().unwrap()), &masters().params[..]);
        drop(buffer);
        let busy = store.write_on_device(ID).unwrap_err();
        assert!(matches!(busy, SpillError::BufferBusy { readers: 1, .. }), "{busy}");
        drop(resident);
        drop(store.write_on_device(ID).unwrap());
        assert!(matches!(store.write_on_device(elsewhere), Err(SpillError::BufferMissing { .. })));
        let best = Masters::new(vec![1.0; 300], Vec::new());
        store.insert(ID.snapshot(), best, host.reserve(1200, "best").unwrap()).unwrap();
        assert!(store.on_device(ID.snapshot()).unwrap().is_none(), "the best weights stay on the host");
        assert_eq!(budget.used(), masters().len_bytes());
        let spilled = promote(TaskId(9), 1200);
        assert_eq!(manager.uploaded_bytes(), 1200);
        drop(spilled);
    }

    #[test]
    fn a_step_on_the_device_is_the_next_version_for_everyone() {
        let (store, budget) = store(copies());
        let host = conformance::budget();
        conformance::insert(store.as_ref(), ID, &host);
        let mut writer = store.write_on_device(ID).unwrap();
        let busy = store.read(ID).unwrap_err();
        assert!(matches!(busy, SpillError::BufferBusy { readers: 0, .. }), "{busy}");
        assert!(store.on_device(ID).is_err() && store.discard(ID).is_err());
        writer.params = Bytes::from_owner(Floats::from(vec![4.0; 300])).into();
        writer.moments[1].bytes = writer.params.clone();
        writer.commit();
        assert_eq!(store.version(ID).unwrap(), 1);
        let (copy, version) = store.on_device(ID).unwrap().unwrap();
        assert_eq!((copy.len(), version), (1200, 1));
        drop(copy);
        let view = store.read(ID).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&view.bytes), [4.0; 300]);
        drop(view);
        let stepped = Masters::new(vec![4.0; 300], vec![masters().moments[0].words.clone(), vec![4.0; 300]]);
        assert_eq!(*store.write(ID).unwrap(), stepped);
        store.discard(ID).unwrap();
        assert_eq!((budget.used(), host.used()), (0, 0));
        assert!(matches!(store.discard(ID), Err(SpillError::BufferMissing { .. })));
    }

    #[test]
    fn what_shard_tasks_read_there_is_what_the_masters_are_rounded_to() {
        let (store, budget) = store(copies());
        let host = conformance::budget();
        let narrow = |masters: Masters| {
            let narrow = NarrowFloats::of(&masters.params, FloatType::Bf16, Floats::from);
            Masters { narrow: Some(narrow), ..masters }
        };
        let masters = narrow(masters());
        let bits: Vec<u16> = masters.narrow.as_deref().unwrap().to_vec();
        store.insert(ID, masters.clone(), host.reserve(300 * 14, "task").unwrap()).unwrap();
        assert_eq!(budget.used(), 300 * 14, "master weights, their rounded copy, and two moments");
        let (copy, _) = store.on_device(ID).unwrap().unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, u16>(copy.as_host().unwrap()), bits);
        drop(copy);

        let mut writer = store.write_on_device(ID).unwrap();
        let ones = NarrowFloats::of(&[1.0; 300], FloatType::Bf16, Floats::from);
        writer.params = Bytes::from_owner(Floats::from(vec![1.0; 300])).into();
        writer.narrow.as_mut().unwrap().bytes = Bytes::from_owner(ones).into();
        writer.commit();
        let view = store.read(ID).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, u16>(&view.bytes), [0x3F80; 300]);
        drop(view);
        let view = store.read_masters(ID).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&view.bytes), [1.0; 300]);
        drop(view);
        let moments = masters.moments;
        let stepped = narrow(Masters { moments, ..Masters::new(vec![1.0; 300], Vec::new()) });
        assert_eq!(store.remove(ID).unwrap(), stepped);
        assert_eq!((budget.used(), host.used()), (0, 0));
    }

    #[test]
    fn memory_that_was_reserved_before_is_for_resident_buffers() {
        let store = DeviceResidentStore::new(Arc::new(DramStore::new()));
        let budget = Budget::new("cpu:2", ByteSize::mib(1));
        let bytes = masters().len_bytes();
        store.assign([ID], copies(), budget.reserve(bytes + 8, "resident").unwrap());
        let others = budget.reserve(budget.available(), "other tasks").unwrap();
        let host = conformance::budget().reserve(bytes, "a").unwrap();
        store.insert(ID, masters(), host).unwrap();
        let pending = store.reserve(8, "a").unwrap();
        assert!(store.reserve(1, "a").is_err(), "nothing is left");
        drop((pending, others));
        store.discard(ID).unwrap();
        assert_eq!((budget.used(), store.reserve(8, "a").unwrap().bytes()), (0, 8));
    }

    #[test]
    fn a_device_without_room_refuses_an_buffer() {
        let store = DeviceResidentStore::new(Arc::new(DramStore::new()));
        let budget = Budget::new("cpu:2", ByteSize(3599));
        store.assign([ID], copies(), budget.reserve(0, "resident").unwrap());
        let host = conformance::budget();
        let reservation = host.reserve(3600, "task").unwrap();
        let refused = store.insert(ID, masters(), reservation).unwrap_err();
        assert!(matches!(refused, SpillError::Budget(_)), "{refused}");
        assert_eq!(host.used(), 0);
        assert!(matches!(store.read(ID), Err(SpillError::BufferMissing { .. })));
    }

    #[test]
    fn what_could_not_be_brought_up_again_is_lost_and_says_so() {
        let (link, fails) = FailingLink::new(DEVICE);
        let (store, budget) = store(Arc::new(link));
        fails.store(true, Relaxed);
        let host = conformance::budget();
        let reservation = || host.reserve(masters().len_bytes(), "task").unwrap();
        assert!(matches!(store.insert(ID, masters(), reservation()), Err(SpillError::Link(_))));
        assert_eq!((budget.used(), host.used()), (0, 0), "a failed upload holds nothing");
        fails.store(false, Relaxed);
        store.insert(ID, masters(), reservation()).unwrap();
        fails.store(true, Relaxed);
        assert!(matches!(store.write(ID), Err(SpillError::Link(_))));
        assert!(matches!(store.read(ID), Err(SpillError::Link(_))));
        assert!(matches!(store.remove(ID), Err(SpillError::Link(_))));
        fails.store(false, Relaxed);
        assert_eq!(store.version(ID).unwrap(), 0);
        let mut writer = store.write(ID).unwrap();
        writer.params[0] = 1.0;
        fails.store(true, Relaxed);
        writer.commit();
        fails.store(false, Relaxed);
        let lost = store.read(ID).map(drop).unwrap_err().to_string();
        assert!(
            lost.ends_with(
                "a copy of 1200 bytes to the device failed; see the cause: the device fell off the bus"
            ),
            "{lost}"
        );
        assert!(matches!(store.on_device(ID), Err(SpillError::BufferLost { .. })));
        store.discard(ID).unwrap();
        assert_eq!((budget.used(), host.used()), (0, 0));
    }
}
