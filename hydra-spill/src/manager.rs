//! Transfers of buffers and activations between a store and the memory of one device.

use crate::copies::{BufferCopy, Copies, HeldCopies};
use crate::memory::aligned::ALIGN;
use crate::store::covers;
use crate::{
    Budget, BudgetError, DeviceLink, Direction, InPlaceParams, ParamBufferId, Reservation, SpillError,
    TierStore,
};
use hydra_core::{DeviceBytes, DeviceId, DeviceTensor, HostTensor, TaskId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Buffers of one task in a device's memory: copies that are read and dropped, never written back.
#[derive(Debug)]
#[must_use = "a resident copy is dropped with this"]
pub struct ResidentCopy {
    buffers: BTreeMap<usize, Arc<BufferCopy>>,
    /// Released after the bytes are freed, because fields are dropped in this order. It covers the bytes
    /// without a copy's own reservation.
    reservation: Reservation,
}

impl ResidentCopy {
    /// Returns the shared bytes of a buffer. A clone that outlives the resident copy keeps memory that is
    /// no longer reserved, and a tensor of it may see other contents.
    ///
    /// # Panics
    /// If the buffer is not among [`buffers`](Self::buffers), that is, a shard read a buffer that was not
    /// promoted for it.
    #[track_caller]
    pub fn buffer(&self, buffer: usize) -> DeviceBytes {
        match self.buffers.get(&buffer) {
            Some(copy) => copy.bytes.clone(),
            None => panic!(
                "parameter buffer {buffer} was read, but `{}` promoted only {:?}",
                self.reservation.owner(),
                self.buffers().collect::<Vec<_>>()
            ),
        }
    }

    /// Returns whether these bytes are a view of a buffer. Bytes that outlive the resident copy must not be:
    /// if the link shares, the master weights could not be written meanwhile, and if it copies, the memory is
    /// reused.
    pub fn holds(&self, bytes: &DeviceBytes) -> bool {
        self.buffers.values().any(|copy| copy.bytes.overlaps(bytes))
    }

    /// The bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.values().map(|copy| copy.len()).sum()
    }

    /// The version that a buffer is a copy of, if it is present.
    pub fn version(&self, buffer: usize) -> Option<u64> {
        self.buffers.get(&buffer).map(|copy| copy.version)
    }

    /// The indices of the buffers, ascending.
    pub fn buffers(&self) -> impl Iterator<Item = usize> + '_ {
        self.buffers.keys().copied()
    }
}

/// The alignment overhead of a copy: the peak of a shard task covers it, and a cached copy reserves it
/// itself.
const UPKEEP: u64 = ALIGN as u64;

/// Uploads the inputs of shard tasks to one device, and downloads their results.
///
/// It decides nothing: the orchestrator chooses when to promote, and with which reservation.
pub struct SpillManager {
    device: DeviceId,
    budget: Budget,
    store: Arc<dyn TierStore>,
    link: Arc<dyn DeviceLink>,
    /// The parameter cache; `None` if each copy is dropped with its shard task.
    copies: Option<Copies>,
    /// Whether the cache has copies of buffers in the store. It always has those of buffers that are read in place.
    caches_stored: bool,
}

impl SpillManager {
    /// Returns a manager of `device`, whose memory `budget` counts and `link` reaches.
    pub fn new(
        device: DeviceId,
        budget: Budget,
        store: Arc<dyn TierStore>,
        link: Arc<dyn DeviceLink>,
    ) -> Self {
        Self { device, budget, store, link, copies: None, caches_stored: false }
    }

    /// Enables or disables the parameter cache, which keeps copies on the device after their shard task in
    /// otherwise unused memory; off by default. Results of a link that are views, or that are freed only
    /// together, are not cached.
    pub fn cache_copies(mut self, on: bool) -> Self {
        let can = on && self.link.frees_each();
        self.copies = can.then(Copies::default);
        self.caches_stored = can && !self.link.zero_copy();
        self
    }

    /// Returns whether the parameter cache is enabled for buffers in the store. A link that shares memory needs no copies of
    /// them; copies of buffers that are read in place can be cached nevertheless.
    pub fn caches_copies(&self) -> bool {
        self.caches_stored
    }

    /// Returns the buffer of a task, or the one that it shares with other tasks, whose copy serves all of
    /// them.
    fn identity(&self, task: TaskId, buffer: usize) -> ParamBufferId {
        self.store.identity(ParamBufferId::new(task, buffer))
    }

    /// Holds the buffers of a task that are cached on the device in the store's version: they are not evicted
    /// until a shard task has read them.
    pub fn hold(&self, task: TaskId, buffers: &[usize]) -> HeldCopies {
        let Some(copies) = &self.copies else { return HeldCopies::default() };
        let held = |&buffer: &usize| {
            let id = self.identity(task, buffer);
            Some((buffer, copies.hold(id, self.store.version(id).ok()?)?))
        };
        HeldCopies { buffers: buffers.iter().filter_map(held).collect() }
    }

    /// The bytes of those buffers of a task that are cached on the device in the store's version.
    pub fn cached_bytes(&self, task: TaskId, buffers: &[usize]) -> u64 {
        let Some(copies) = &self.copies else { return 0 };
        let bytes = |&buffer: &usize| {
            let id = self.identity(task, buffer);
            copies.bytes(id, self.store.version(id).ok()?)
        };
        buffers.iter().filter_map(bytes).sum()
    }

    /// Rates each cached copy by its buffer ([`TierStore::identity`]). Copies that are worth nothing are
    /// evicted immediately, the others in ascending order of worth when a reservation needs their memory.
    pub fn rate_copies(&self, worth: impl Fn(ParamBufferId) -> f64) {
        self.copies.iter().for_each(|copies| copies.rate(&worth));
    }

    /// Evicts the cached copies that match, such as those of buffers that are written or not read any more.
    /// A shard task that holds one continues with it.
    pub fn forget_copies(&self, is_one: impl Fn(&ParamBufferId) -> bool) {
        self.copies.iter().for_each(|copies| copies.forget(&is_one));
    }

    /// Reserves memory on the device, evicting cached copies if that suffices; `None` if it does not.
    pub fn try_reserve(&self, bytes: u64, owner: &str) -> Option<Reservation> {
        let missing = bytes.saturating_sub(self.budget.available());
        if let Some(copies) = self.copies.as_ref().filter(|_| missing > 0) {
            copies.evict(missing);
        }
        self.budget.try_reserve(bytes, owner)
    }

    /// Like [`try_reserve`](Self::try_reserve), but waits up to `patience` for others to release the missing
    /// bytes.
    ///
    /// # Errors
    /// [`BudgetError::Refused`], without waiting if `bytes` exceeds the capacity.
    pub fn reserve_when_free(
        &self,
        bytes: u64,
        owner: &str,
        patience: Duration,
    ) -> Result<Reservation, BudgetError> {
        let end = Instant::now() + patience;
        loop {
            let releases = self.budget.releases();
            if let Some(reservation) = self.try_reserve(bytes, owner) {
                return Ok(reservation);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || bytes > self.budget.usable() {
                return self.budget.reserve(bytes, owner);
            }
            self.budget.wait_for_release(releases, left);
        }
    }

    /// Copies buffers of a task from the store to the device, except those that are `held` there, together
    /// with tensors of the host that the shard task reads. The buffers' views are dropped after the copy, so
    /// that the optimizer can write the master weights while the device computes on the copy. Buffers that are
    /// read in place are read from their files into the device's memory. If the link
    /// shares, the view is the resident copy, and the master weights are busy until it is dropped. The same
    /// holds if they are resident on the device ([`TierStore::on_device`]): then nothing is copied, and the
    /// reservation need not cover them, because the store's does. The caller reserves the tensors' bytes
    /// separately or in the reservation.
    ///
    /// # Errors
    /// [`SpillError::ReservationElsewhere`] and [`SpillError::ReservationTooSmall`] if the reservation is not
    /// in this device's budget or does not cover the buffers, and errors of the store's read and of the link.
    /// The reservation is then released, and nothing is copied.
    pub fn promote(
        &self,
        task: TaskId,
        buffers: &[usize],
        inputs: &[HostTensor],
        held: HeldCopies,
        mut reservation: Reservation,
    ) -> Result<(ResidentCopy, Vec<DeviceTensor>), SpillError> {
        self.owns(&reservation)?;
        let mut buffers: BTreeSet<usize> = buffers.iter().copied().collect();
        let (mut bytes, mut versions, mut needed) = (Vec::new(), Vec::new(), 0);
        let mut read = Vec::new();
        buffers.retain(|buffer| !held.buffers.contains_key(buffer));
        let device_resident = self.on_device(task, &buffers)?;
        buffers.retain(|buffer| !device_resident.contains_key(buffer));
        for &buffer in &buffers {
            let id = ParamBufferId::new(task, buffer);
            if let Some((files, version)) = self.store.in_place(id)? {
                needed += files.len_bytes() as u64;
                covers(&reservation, needed)?;
                read.push((buffer, (self.read_in_place(id, &files)?, version)));
                continue;
            }
            let view = self.store.read(id)?;
            needed += view.bytes.len() as u64;
            covers(&reservation, needed)?;
            bytes.push(view.bytes);
            versions.push(view.version);
        }
        bytes.extend(inputs.iter().map(|input| input.bytes.clone()));
        buffers.retain(|buffer| read.iter().all(|(other, _)| other != buffer));
        let mut copies = self.link.upload_all(&bytes)?.into_iter();
        let stored = buffers.into_iter().zip(copies.by_ref().zip(versions));
        let stored = stored.map(|copy| (copy, self.caches_stored));
        let copied = read.into_iter().map(|copy| (copy, true)).chain(stored).map(
            |((buffer, (bytes, version)), caches)| {
                let upkeep = || self.try_reserve(UPKEEP, reservation.owner());
                let copies = self.copies.as_ref().filter(|_| caches);
                let cache = copies.and_then(|copies| Some((copies, upkeep()?)));
                let Some((copies, upkeep)) = cache else {
                    return (buffer, BufferCopy::new(bytes, version, None));
                };
                let mut covered = reservation.split(bytes.len() as u64);
                covered.merge(upkeep);
                let copy = BufferCopy::new(bytes, version, Some(covered));
                copies.insert(self.identity(task, buffer), copy.clone());
                (buffer, copy)
            },
        );
        let buffers = copied.chain(device_resident).chain(held.buffers).collect();
        let inputs = inputs.iter().zip(copies).map(|(input, copy)| uploaded(input, copy)).collect();
        Ok((ResidentCopy { buffers, reservation }, inputs))
    }

    /// Reads a buffer from its files into memory of the device.
    fn read_in_place(&self, id: ParamBufferId, files: &InPlaceParams) -> Result<DeviceBytes, SpillError> {
        let _staging = (!self.link.fills()).then(|| files.reserve(id)).transpose()?;
        let mut read = Ok(());
        let mut fill = |out: &mut [u8]| read = files.read(0..files.elements(), out);
        let bytes = self.link.upload_filled(files.len_bytes(), &mut fill)?;
        read.map(|()| bytes)
    }

    /// Returns the buffers that are resident on the device.
    fn on_device(
        &self,
        task: TaskId,
        buffers: &BTreeSet<usize>,
    ) -> Result<BTreeMap<usize, Arc<BufferCopy>>, SpillError> {
        let device_resident = |&buffer: &usize| {
            let copy = self.store.on_device(ParamBufferId::new(task, buffer)).transpose()?;
            Some(copy.map(|(bytes, version)| (buffer, BufferCopy::new(bytes, version, None))))
        };
        buffers.iter().filter_map(device_resident).collect()
    }

    fn owns(&self, reservation: &Reservation) -> Result<(), SpillError> {
        match reservation.budget().is(&self.budget) {
            true => Ok(()),
            false => Err(SpillError::ReservationElsewhere {
                expected: self.budget.name().to_owned(),
                found: reservation.budget().name().to_owned(),
                owner: reservation.owner().to_owned(),
            }),
        }
    }

    /// Copies tensors from the host to the device. The caller reserves the bytes. Errors are those of the
    /// link.
    pub fn upload(&self, tensors: &[HostTensor]) -> Result<Vec<DeviceTensor>, SpillError> {
        let bytes: Vec<_> = tensors.iter().map(|tensor| tensor.bytes.clone()).collect();
        let copies = self.link.upload_all(&bytes)?;
        Ok(tensors.iter().zip(copies).map(|(tensor, copy)| uploaded(tensor, copy)).collect())
    }

    /// Copies the tensors that are present from the device to the host, and drops them on the device.
    /// Errors are those of the link.
    pub fn download(
        &self,
        tensors: Vec<Option<DeviceTensor>>,
    ) -> Result<Vec<Option<HostTensor>>, SpillError> {
        let bytes: Vec<DeviceBytes> = tensors.iter().flatten().map(|tensor| tensor.bytes.clone()).collect();
        let mut copies = self.link.download_all(&bytes)?.into_iter();
        let mut taken = |tensor: DeviceTensor| {
            copies.next().map(|copy| HostTensor::view(copy, tensor.shape, tensor.dtype))
        };
        Ok(tensors.into_iter().map(|tensor| tensor.and_then(&mut taken)).collect())
    }

    /// The total bytes copied to the device, of buffers and activations.
    pub fn uploaded_bytes(&self) -> u64 {
        self.link.moved(Direction::Upload)
    }

    /// The total bytes copied from the device, of activations and gradients.
    pub fn downloaded_bytes(&self) -> u64 {
        self.link.moved(Direction::Download)
    }

    /// The budget of the device's memory.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The link to the device.
    pub fn link(&self) -> &Arc<dyn DeviceLink> {
        &self.link
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The store from which buffers are promoted.
    pub fn store(&self) -> &Arc<dyn TierStore> {
        &self.store
    }
}

/// Returns `tensor` with its bytes on the device.
fn uploaded(tensor: &HostTensor, bytes: DeviceBytes) -> DeviceTensor {
    DeviceTensor::view(bytes, tensor.shape.clone(), tensor.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::conformance::FailingLink;
    use crate::{
        DramStore, HostCopyLink, InPlaceParam, LinkError, Masters, SharedStore, SourceFile, ZeroCopyLink,
    };
    use bytes::Bytes;
    use hydra_core::{ByteSize, FloatType};
    use std::sync::atomic::Ordering::Relaxed;

    const TASK: TaskId = TaskId(1);
    const DEVICE: DeviceId = DeviceId(2);

    /// A store with buffers 0..3 of 100, 200 and 300 parameters with the values 0, 1 and 2, and a device of
    /// 2000 bytes.
    fn manager(link: impl DeviceLink + 'static) -> SpillManager {
        let host = Budget::new("host memory", ByteSize::mib(1));
        let store = DramStore::new();
        for buffer in 0..3 {
            let masters = Masters::new(vec![buffer as f32; 100 * (buffer + 1)], Vec::new());
            let reservation = host.reserve(masters.len_bytes(), "masters").unwrap();
            store.insert(ParamBufferId::new(TASK, buffer), masters, reservation).unwrap();
        }
        SpillManager::new(DEVICE, Budget::new("cpu:2", ByteSize(2000)), Arc::new(store), Arc::new(link))
    }

    fn floats(bytes: &DeviceBytes) -> &[f32] {
        bytemuck::cast_slice(bytes.as_host().unwrap())
    }

    fn promote(
        manager: &SpillManager,
        buffers: &[usize],
        bytes: u64,
        task: TaskId,
    ) -> Result<ResidentCopy, SpillError> {
        let reservation = manager.budget().reserve(bytes, "shard 4")?;
        manager.promote(task, buffers, &[], HeldCopies::default(), reservation).map(|(resident, _)| resident)
    }

    #[test]
    fn promoted_buffers_are_copies_that_leave_the_masters_free() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let resident = promote(&manager, &[2, 0, 2], 1600, TASK).unwrap();
        assert_eq!(resident.buffers().collect::<Vec<_>>(), [0, 2]);
        assert_eq!((resident.bytes(), manager.uploaded_bytes()), (1600, 1600));
        assert_eq!((resident.version(2), resident.version(1)), (Some(0), None));

        let mut writer = manager.store().write(ParamBufferId::new(TASK, 2)).unwrap();
        writer.params.fill(-1.0);
        writer.commit();
        assert_eq!(floats(&resident.buffer(2)), [2.0; 300]);
        let again = promote(&manager, &[2], 400, TASK);
        assert!(matches!(again, Err(SpillError::ReservationTooSmall { needed: 1200, reserved: 400, .. })));

        drop(resident);
        assert_eq!((manager.budget().used(), manager.downloaded_bytes()), (0, 0));
        let again = promote(&manager, &[2], 1200, TASK).unwrap();
        assert_eq!(again.version(2), Some(1));
        assert_eq!(floats(&again.buffer(2)), [-1.0; 300]);
    }

    #[test]
    fn a_shared_buffer_is_busy_until_it_is_demoted() {
        let manager = manager(crate::ZeroCopyLink::new(DEVICE));
        let id = ParamBufferId::new(TASK, 1);
        let master = manager.store().read(id).unwrap().bytes;
        let resident = promote(&manager, &[0, 1], 1200, TASK).unwrap();
        let buffer = resident.buffer(1);
        assert_eq!((buffer.as_host().unwrap().as_ptr(), manager.uploaded_bytes()), (master.as_ptr(), 0));
        drop(buffer);
        let part = DeviceBytes::from(master.slice(4..8));
        assert!(resident.holds(&part) && !resident.holds(&Bytes::from(vec![0; 8]).into()));
        drop(part);
        assert_eq!(manager.budget().used(), 1200, "bytes that are read are reserved, shared or not");
        drop(master);
        let busy = manager.store().write(id).map(drop).unwrap_err();
        assert!(matches!(busy, SpillError::BufferBusy { readers: 1, .. }), "{busy}");
        drop(resident);
        assert!(manager.store().write(id).is_ok());
    }

    #[test]
    fn a_refused_promotion_holds_nothing() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let small = promote(&manager, &[0, 1, 2], 1599, TASK).unwrap_err();
        assert_eq!(
            small.to_string(),
            "the reservation of `shard 4` is 1.56 KiB, at least 2.35 KiB are needed: reserve the bytes of all buffers"
        );
        assert_eq!(manager.uploaded_bytes(), 0, "nothing is copied if it does not fit");
        let missing = promote(&manager, &[0], 400, TaskId(0)).unwrap_err();
        assert!(
            matches!(missing, SpillError::BufferMissing { buffer } if buffer == ParamBufferId::new(TaskId(0), 0))
        );
        let elsewhere = Budget::new("cpu:2", ByteSize(2000)).reserve(400, "shard 4").unwrap();
        let elsewhere = manager.promote(TASK, &[0], &[], HeldCopies::default(), elsewhere);
        assert!(matches!(elsewhere, Err(SpillError::ReservationElsewhere { .. })));
        let writer = manager.store().write(ParamBufferId::new(TASK, 0)).unwrap();
        let busy = promote(&manager, &[0], 400, TASK).unwrap_err();
        assert!(matches!(busy, SpillError::BufferBusy { readers: 0, .. }));
        drop(writer);
        assert_eq!(manager.budget().used(), 0);
        for buffer in 0..3 {
            assert!(
                manager.store().write(ParamBufferId::new(TASK, buffer)).is_ok(),
                "no view is left of {buffer}"
            );
        }
    }

    #[test]
    #[should_panic(expected = "parameter buffer 1 was read, but `shard 4` promoted only [0, 2]")]
    fn an_buffer_that_was_not_promoted_is_named() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let _ = promote(&manager, &[0, 2], 1600, TASK).unwrap().buffer(1);
    }

    #[test]
    fn tensors_travel_in_and_out_unchanged() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let tensors =
            [HostTensor::float(vec![1.0, -0.0, f32::MAX, 4.0], [2, 2]), HostTensor::int(vec![1, 2, 3], [3])];
        let uploaded = manager.upload(&tensors).unwrap();
        let reservation = manager.budget().reserve(428, "shard 4").unwrap();
        let (resident, with) =
            manager.promote(TASK, &[0], &tensors, HeldCopies::default(), reservation).unwrap();
        assert_eq!((resident.bytes(), manager.uploaded_bytes()), (400, 2 * 28 + 400));
        for uploaded in [uploaded, with] {
            for (host, device) in tensors.iter().zip(&uploaded) {
                let bytes = device.bytes.as_host().unwrap();
                assert_ne!(host.bytes.as_ptr(), bytes.as_ptr(), "device memory is not the host's");
            }
            // A missing tensor leaves a gap.
            let gapped = [Some(uploaded[0].clone()), None, Some(uploaded[1].clone())];
            let [first, second] = tensors.clone().map(Some);
            assert_eq!(manager.download(gapped.into()).unwrap(), [first, None, second]);
        }
        assert_eq!(manager.downloaded_bytes(), 56);
    }

    /// A manager with a parameter cache, over `manager`'s store and budget.
    fn caching(link: impl DeviceLink + 'static) -> SpillManager {
        manager(link).cache_copies(true)
    }

    /// Promotes buffers, reserving the missing bytes as a shard task does, and drops them.
    fn read(manager: &SpillManager, buffers: &[usize]) -> u64 {
        let held = manager.hold(TASK, buffers);
        let needed: u64 = buffers.iter().map(|buffer| 400 * (*buffer as u64 + 1)).sum();
        let reservation = manager.try_reserve(needed - held.bytes(), "shard 4").expect("memory");
        let before = manager.uploaded_bytes();
        let (resident, _) = manager.promote(TASK, buffers, &[], held, reservation).unwrap();
        for &buffer in buffers {
            assert_eq!(floats(&resident.buffer(buffer)).len(), 100 * (buffer + 1));
        }
        manager.uploaded_bytes() - before
    }

    #[test]
    fn copies_stay_until_their_masters_change() {
        let manager = caching(HostCopyLink::new(DEVICE));
        assert_eq!((read(&manager, &[0, 1]), read(&manager, &[0, 1])), (1200, 0));
        assert_eq!(manager.budget().used(), 1200 + 2 * UPKEEP);
        manager.store().write(ParamBufferId::new(TASK, 1)).unwrap().commit();
        assert_eq!(manager.hold(TASK, &[0, 1]).bytes(), 400, "a copy of another version does not count");
        assert_eq!(read(&manager, &[0, 1]), 800);
        manager.forget_copies(|id| id.buffer == 0);
        assert_eq!(read(&manager, &[0, 1]), 400);
        manager.forget_copies(|_| true);
        assert_eq!(manager.budget().used(), 0);
    }

    #[test]
    fn a_copy_of_what_tasks_have_in_common_is_there_for_all_of_them() {
        let (other, shared) = (TaskId(7), ParamBufferId::new(TASK, 0).shared());
        let host = Budget::new("host memory", ByteSize::mib(1));
        let store = SharedStore::new(Arc::new(DramStore::new()));
        store.join(ParamBufferId::new(TASK, 0), shared, Some(host.reserve(400, "the first").unwrap()));
        store.join(ParamBufferId::new(other, 4), shared, None);
        store.put(shared, Masters::new(vec![3.0; 100], Vec::new()), Arc::new([]), None).unwrap();
        let link = Arc::new(HostCopyLink::new(DEVICE));
        let budget = Budget::new("cpu:2", ByteSize(2000));
        let manager = SpillManager::new(DEVICE, budget, Arc::new(store), link).cache_copies(true);
        assert_eq!(manager.cached_bytes(other, &[4]), 0);
        assert_eq!(read(&manager, &[0]), 400);
        assert_eq!((manager.cached_bytes(other, &[4]), manager.hold(other, &[4]).bytes()), (400, 400));
        let held = manager.hold(other, &[4]);
        let reservation = manager.try_reserve(0, "the other").unwrap();
        let (resident, _) = manager.promote(other, &[4], &[], held, reservation).unwrap();
        assert_eq!((floats(&resident.buffer(4))[0], manager.uploaded_bytes()), (3.0, 400));
        drop(resident);
        manager.rate_copies(|id| if id == shared { 1.0 } else { 0.0 });
        assert_eq!(manager.cached_bytes(TASK, &[0]), 400);
        manager.forget_copies(|id| *id == shared);
        assert_eq!((manager.cached_bytes(other, &[4]), manager.budget().used()), (0, 0));
    }

    #[test]
    fn copies_go_when_their_room_is_needed_those_of_the_least_worth_first() {
        let manager = caching(HostCopyLink::new(DEVICE));
        read(&manager, &[0, 1]);
        manager.rate_copies(|id| if id.buffer == 0 { 1.0 } else { 2.0 });
        assert_eq!(read(&manager, &[2]), 1200);
        let there: Vec<usize> = (0..3).filter(|buffer| manager.hold(TASK, &[*buffer]).bytes() > 0).collect();
        assert_eq!(there, [2], "both had to go for 1200 of 2000 bytes");
        read(&manager, &[0]);
        manager.rate_copies(|id| if id.buffer == 0 { 2.0 } else { 1.0 });
        read(&manager, &[1]);
        assert_eq!((manager.hold(TASK, &[0]).bytes(), manager.hold(TASK, &[2]).bytes()), (400, 0));
    }

    #[test]
    fn a_copy_that_a_shard_task_holds_does_not_go() {
        let manager = caching(HostCopyLink::new(DEVICE));
        read(&manager, &[0, 1]);
        let held = manager.hold(TASK, &[0]);
        assert!(manager.try_reserve(1600, "shard 4").is_none());
        assert_eq!(manager.hold(TASK, &[1]).bytes(), 800, "nothing is evicted if it would not suffice");
        let reservation = manager.try_reserve(1500, "shard 4").expect("that of buffer 1");
        assert_eq!(manager.hold(TASK, &[0, 1]).bytes(), 400);
        manager.rate_copies(|_| 0.0);
        let (resident, _) = manager
            .promote(TASK, &[0], &[], held, reservation)
            .expect("a copy that is rated zero is still there for its holder");
        assert_eq!(resident.version(0), Some(0));
        drop(resident);
        assert_eq!(manager.budget().used(), 0);
    }

    #[test]
    fn who_waits_for_memory_gets_that_of_copies_and_what_others_release() {
        let manager = caching(HostCopyLink::new(DEVICE));
        read(&manager, &[0]);
        let minute = Duration::from_secs(60);
        let other = manager.try_reserve(1000, "another").expect("memory");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| manager.reserve_when_free(1900, "shard 4", minute));
            drop(other);
            assert_eq!(waiter.join().unwrap().expect("memory").bytes(), 1900);
        });
        assert_eq!(manager.budget().used(), 0);
        assert!(manager.reserve_when_free(2001, "shard 4", minute).is_err(), "never free: refused at once");
        let _other = manager.try_reserve(2000, "another").expect("all of it");
        assert!(manager.reserve_when_free(1, "shard 4", Duration::from_millis(1)).is_err());
    }

    #[test]
    fn views_and_what_goes_together_do_not_stay() {
        let manager = caching(crate::ZeroCopyLink::new(DEVICE));
        read(&manager, &[0, 1]);
        assert_eq!((manager.hold(TASK, &[0, 1]).bytes(), manager.budget().used()), (0, 0));
        assert!(manager.store().write(ParamBufferId::new(TASK, 0)).is_ok(), "no view is left");
    }

    #[test]
    fn a_link_that_fails_leaves_nothing_reserved() {
        let (link, fails) = FailingLink::new(DEVICE);
        let manager = manager(link);
        drop(promote(&manager, &[1, 0], 1200, TASK).unwrap());
        fails.store(true, Relaxed);
        let failed = promote(&manager, &[0], 400, TASK).map(drop).unwrap_err();
        assert!(matches!(failed, SpillError::Link(LinkError::Transfer { bytes: 400, .. })), "{failed}");
        assert_eq!(manager.budget().used(), 0);
        assert!(manager.store().write(ParamBufferId::new(TASK, 2)).is_ok());
    }

    #[test]
    fn a_buffer_that_is_read_in_place_is_read_once_while_its_copy_is_cached() {
        let links: [Arc<dyn DeviceLink>; 2] =
            [Arc::new(HostCopyLink::new(DEVICE)), Arc::new(ZeroCopyLink::new(DEVICE))];
        for link in links {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("model.safetensors");
            let values: Vec<f32> = (0..100).map(|i| i as f32).collect();
            std::fs::write(&path, [&[0; 3][..], bytemuck::cast_slice(&values)].concat()).unwrap();
            let file = SourceFile::open(&path).unwrap();
            let working = Budget::new("working", ByteSize(0));
            let params = vec![InPlaceParam { elements: 0..100, file, offset: 3 }];
            let take = |_, _: &[u8]| Ok::<_, SpillError>(());
            let files = InPlaceParams::check(params, (100, FloatType::F32), working.clone(), take).unwrap();
            let (store, id) = (DramStore::new(), ParamBufferId::new(TASK, 0));
            let nothing = working.reserve(0, "masters").unwrap();
            store.insert(id, Masters::in_place(Arc::new(files)), nothing).unwrap();
            assert!(matches!(store.read(id), Err(SpillError::InPlace { .. })));
            let budget = Budget::new("cpu:2", ByteSize(2000));
            let manager = SpillManager::new(DEVICE, budget, Arc::new(store), link).cache_copies(true);
            let first = promote(&manager, &[0], 400, TASK).unwrap();
            assert_eq!(floats(&first.buffer(0)), values);
            let held = manager.hold(TASK, &[0]);
            let reservation = manager.budget().reserve(0, "again").unwrap();
            let (again, _) = manager.promote(TASK, &[0], &[], held, reservation).unwrap();
            assert_eq!((floats(&again.buffer(0)), manager.uploaded_bytes()), (&values[..], 400));
            drop((first, again));
            assert_eq!(manager.budget().used(), 400 + UPKEEP, "{}", manager.link().name());
            manager.forget_copies(|_| true);
            std::fs::write(&path, [1; 403]).unwrap();
            let changed = promote(&manager, &[0], 400, TASK).unwrap_err();
            assert!(matches!(changed, SpillError::SourceChanged { .. }), "{changed}");
            assert_eq!(manager.budget().used(), 0);
        }
    }
}
