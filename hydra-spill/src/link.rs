//! The port through which bytes move between the host and one device.
//!
//! A link copies whole buffers up to a device or down to the host and blocks until a copy is done; who
//! calls it from which thread decides what overlaps. [`HostCopyLink`] serves a logical device that is a
//! part of this machine's CPU and has memory of its own, [`ZeroCopyLink`] one that reads the host's memory in
//! place, and [`SimulatedLink`] slows another link down to a given bandwidth, so that what a GPU's transfers
//! cost shows in tests on a machine without one. The links of GPUs stand beside this file. The conformance
//! suite runs on every link.

use crate::{Floats, alloc};
use bytes::Bytes;
use hydra_core::{Bandwidth, DeviceBytes, DeviceId};
use std::collections::{TryReserveError, VecDeque};
use std::fmt;
use std::io;
use std::mem::size_of_val;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the device.
    Upload,
    /// From the device to the host.
    Download,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Upload => "up to the device",
            Self::Download => "down to the host",
        })
    }
}

/// Why a copy was not made.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The caller's buffer does not have the size of what is copied into it.
    #[error(
        "link `{link}`: the buffer on the device has {found} bytes, the caller's {expected}; give buffers of the same shape"
    )]
    Length {
        /// The link's name.
        link: String,
        /// Bytes of the caller's buffer.
        expected: u64,
        /// Bytes of the buffer on the device.
        found: u64,
    },
    /// The heap has no room for the copy, although a budget had.
    #[error(
        "link `{link}`: no memory for {bytes} bytes {direction}; set budgets below what the machine has free"
    )]
    Memory {
        /// The link's name.
        link: String,
        /// The direction of the copy.
        direction: Direction,
        /// The size of the copy.
        bytes: u64,
        /// The heap's answer.
        #[source]
        source: TryReserveError,
    },
    /// The bytes are in the memory of a device that this link does not reach.
    #[error(
        "link `{link}`: the bytes are in another device's memory; copy them with the link that brought them"
    )]
    Elsewhere {
        /// The link's name.
        link: String,
    },
    /// The device or its driver failed during a copy.
    #[error("link `{link}`: a copy of {bytes} bytes {direction} failed; see the cause")]
    Transfer {
        /// The link's name.
        link: String,
        /// The direction of the copy.
        direction: Direction,
        /// The size of the copy.
        bytes: u64,
        /// The error of the driver.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Moves bytes between the host and one device.
///
/// Uploaded bytes are never written after the copy, and they are aligned for every element type
/// ([`ELEMENT_ALIGN`] at least), as tensors are read from it in place.
pub trait DeviceLink: Send + Sync {
    /// A name for messages and reports.
    fn name(&self) -> &str;

    /// Returns whether what it gives may be a view of what it was given, which nobody can write then for as long as
    /// the view lives. Otherwise it is a copy that is independent of it.
    fn zero_copy(&self) -> bool {
        false
    }

    /// Copies host bytes into memory of the device. Dropping the last clone of the result frees that
    /// memory, or returns it to the link's free list.
    ///
    /// # Errors
    /// [`LinkError::Memory`] if the device has no room, [`LinkError::Transfer`] if the device fails.
    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError>;

    /// Copies several buffers in, which are let go of together as a rule: what a shard task is promoted with.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    fn upload_all(&self, host: &[Bytes]) -> Result<Vec<DeviceBytes>, LinkError> {
        host.iter().map(|bytes| self.upload(bytes)).collect()
    }

    /// Copies bytes of the device into new host memory.
    ///
    /// # Errors
    /// [`LinkError::Memory`] if the host has no room, [`LinkError::Transfer`] if the device fails,
    /// [`LinkError::Elsewhere`].
    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError>;

    /// Copies several buffers out, which come down together as a rule: what a shard task made.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    fn download_all(&self, device: &[DeviceBytes]) -> Result<Vec<Bytes>, LinkError> {
        device.iter().map(|bytes| self.download(bytes)).collect()
    }

    /// Copies floats of the device into the caller's buffer.
    ///
    /// # Errors
    /// [`LinkError::Length`] if `device` does not have four bytes for each element of `out`, which then
    /// stays as it is; [`LinkError::Transfer`] if the device fails, [`LinkError::Elsewhere`].
    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError>;

    /// These floats where this link copies them from best, as far as there is room: masters live there.
    fn pin(&self, floats: Vec<f32>) -> Floats {
        floats.into()
    }

    /// Gets ready for promotions of up to so many bytes, two of them at a time. What is more or larger takes
    /// another way, which may be slower.
    ///
    /// # Errors
    /// [`LinkError::Transfer`] if the device has no room for them.
    fn prepare(&self, _promotion: u64) -> Result<(), LinkError> {
        Ok(())
    }

    /// Bytes moved in this direction so far; a view moves none.
    fn moved(&self, direction: Direction) -> u64;
}

impl<L: DeviceLink + ?Sized> DeviceLink for Arc<L> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn zero_copy(&self) -> bool {
        (**self).zero_copy()
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        (**self).upload(host)
    }

    fn upload_all(&self, host: &[Bytes]) -> Result<Vec<DeviceBytes>, LinkError> {
        (**self).upload_all(host)
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        (**self).download(device)
    }

    fn download_all(&self, device: &[DeviceBytes]) -> Result<Vec<Bytes>, LinkError> {
        (**self).download_all(device)
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        (**self).download_into(device, out)
    }

    fn pin(&self, floats: Vec<f32>) -> Floats {
        (**self).pin(floats)
    }

    fn prepare(&self, promotion: u64) -> Result<(), LinkError> {
        (**self).prepare(promotion)
    }

    fn moved(&self, direction: Direction) -> u64 {
        (**self).moved(direction)
    }
}

/// The alignment, in bytes, of the copies that [`DeviceLink::upload`] and [`DeviceLink::download`] return.
pub const ALIGN: usize = 64;

/// The alignment, in bytes, of whatever they return: enough for every element type.
pub const ELEMENT_ALIGN: usize = 16;

/// The link of a logical device that is a part of this machine's CPU: real copies within host memory.
///
/// The counting allocator charges uploads to the device and downloads to the host.
#[derive(Debug)]
pub struct HostCopyLink {
    name: String,
    device: DeviceId,
    idle: Arc<IdleBuffers>,
    uploaded: AtomicU64,
    downloaded: AtomicU64,
}

impl HostCopyLink {
    /// The link of `device`. It keeps no freed buffers.
    pub fn new(device: DeviceId) -> Self {
        let (uploaded, downloaded) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { name: format!("host copy, {device}"), device, idle: Arc::default(), uploaded, downloaded }
    }

    /// This link with a free list: up to `bytes` of freed device buffers are kept for copies of exactly
    /// their size, the oldest going first. Idle buffers are memory of the device, so a reservation has to
    /// stand for them.
    pub fn with_idle_limit(self, bytes: u64) -> Self {
        Self { idle: Arc::new(IdleBuffers { limit: bytes, kept: Mutex::default() }), ..self }
    }

    fn reachable<'a>(&self, device: &'a DeviceBytes) -> Result<&'a Bytes, LinkError> {
        device.as_host().ok_or_else(|| LinkError::Elsewhere { link: self.name.clone() })
    }

    fn memory_error(&self, direction: Direction, bytes: usize, source: TryReserveError) -> LinkError {
        LinkError::Memory { link: self.name.clone(), direction, bytes: bytes as u64, source }
    }
}

impl DeviceLink for HostCopyLink {
    fn name(&self) -> &str {
        &self.name
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        let reused = self.idle.take(host.len());
        let storage = reused.map_or_else(|| alloc::with_tag(Some(self.device), || room(host.len())), Ok);
        let storage = storage.map_err(|e| self.memory_error(Direction::Upload, host.len(), e))?;
        let bytes = Some(AlignedBytes::fill(storage, host));
        self.uploaded.fetch_add(host.len() as u64, Relaxed);
        Ok(Bytes::from_owner(DeviceBuffer { bytes, home: self.idle.clone() }).into())
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        let device = self.reachable(device)?;
        alloc::with_tag(None, || {
            let storage = room(device.len());
            let storage = storage.map_err(|e| self.memory_error(Direction::Download, device.len(), e))?;
            let bytes = AlignedBytes::fill(storage, device);
            self.downloaded.fetch_add(device.len() as u64, Relaxed);
            Ok(Bytes::from_owner(bytes))
        })
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        let device = self.reachable(device)?;
        let (expected, found) = (size_of_val(out) as u64, device.len() as u64);
        if expected != found {
            return Err(LinkError::Length { link: self.name.clone(), expected, found });
        }
        bytemuck::cast_slice_mut(out).copy_from_slice(device);
        self.downloaded.fetch_add(found, Relaxed);
        Ok(())
    }

    fn moved(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Upload => self.uploaded.load(Relaxed),
            Direction::Download => self.downloaded.load(Relaxed),
        }
    }
}

/// The link of a logical device that reads the host's memory in place: what it gives is a view of what it was
/// given. Only bytes whose alignment suits no tensor are copied.
///
/// Memory stays charged to whoever allocated it: images and batches to the host, what shard tasks made to the
/// device, also while the host reads it.
#[derive(Debug)]
pub struct ZeroCopyLink {
    name: String,
    copies: HostCopyLink,
}

impl ZeroCopyLink {
    /// The link of `device`.
    pub fn new(device: DeviceId) -> Self {
        Self { name: format!("shared memory, {device}"), copies: HostCopyLink::new(device) }
    }
}

fn is_aligned(bytes: &Bytes) -> bool {
    bytes.as_ptr().addr().is_multiple_of(ELEMENT_ALIGN)
}

impl DeviceLink for ZeroCopyLink {
    fn name(&self) -> &str {
        &self.name
    }

    fn zero_copy(&self) -> bool {
        true
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        if is_aligned(host) { Ok(host.clone().into()) } else { self.copies.upload(host) }
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        match device.as_host().filter(|bytes| is_aligned(bytes)) {
            Some(bytes) => Ok(bytes.clone()),
            None => self.copies.download(device),
        }
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        self.copies.download_into(device, out)
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.copies.moved(direction)
    }
}

/// Room for `len` bytes and for the shift that aligns them.
fn room(len: usize) -> Result<Vec<u8>, TryReserveError> {
    let mut storage = Vec::new();
    storage.try_reserve_exact(len.saturating_add(ALIGN - 1))?;
    Ok(storage)
}

/// These bytes, at a multiple of [`ALIGN`].
#[cfg(feature = "cube")]
pub(crate) fn at_alignment(bytes: Bytes) -> Result<Bytes, TryReserveError> {
    match bytes.as_ptr().addr().is_multiple_of(ALIGN) {
        true => Ok(bytes),
        false => Ok(Bytes::from_owner(AlignedBytes::fill(room(bytes.len())?, &bytes))),
    }
}

/// Bytes that begin at a multiple of [`ALIGN`], which a `Vec<u8>` alone does not promise.
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    storage: Vec<u8>,
    start: usize,
}

impl AlignedBytes {
    /// Copies `bytes` into storage that has [`room`] for them, so that it does not move. Only the shift
    /// is filled with zeros, the rest is written once.
    fn fill(mut storage: Vec<u8>, bytes: &[u8]) -> Self {
        let start = storage.as_ptr().addr().wrapping_neg() % ALIGN;
        storage.clear();
        storage.resize(start, 0);
        storage.extend_from_slice(bytes);
        Self { storage, start }
    }

    /// So many bytes, which `fill` writes into zeros.
    pub(crate) fn filled(len: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<Self> {
        let mut storage = room(len)?;
        let start = storage.as_ptr().addr().wrapping_neg() % ALIGN;
        storage.resize(start + len, 0);
        fill(&mut storage[start..])?;
        Ok(Self { storage, start })
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.storage[self.start..]
    }
}

/// A device buffer that goes to its link's free list when the last reader drops it.
struct DeviceBuffer {
    /// `None` only while it is dropped.
    bytes: Option<AlignedBytes>,
    home: Arc<IdleBuffers>,
}

impl AsRef<[u8]> for DeviceBuffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], AlignedBytes::as_ref)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            self.home.give(bytes);
        }
    }
}

/// Freed device buffers that wait for a copy of their size.
#[derive(Debug, Default)]
struct IdleBuffers {
    /// The most bytes that are kept; with zero nothing ever is.
    limit: u64,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The size of the contents and the storage, the oldest first.
    buffers: VecDeque<(usize, Vec<u8>)>,
    /// Bytes of all storage.
    bytes: u64,
}

impl IdleBuffers {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Nothing panics between two changes that belong together.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, len: usize) -> Option<Vec<u8>> {
        if self.limit == 0 {
            return None;
        }
        let mut kept = self.kept();
        let index = kept.buffers.iter().position(|(size, _)| *size == len)?;
        let (_, storage) = kept.buffers.remove(index)?;
        kept.bytes -= storage.capacity() as u64;
        Some(storage)
    }

    fn give(&self, freed: AlignedBytes) {
        let size = freed.storage.capacity() as u64;
        if size > self.limit {
            return;
        }
        let mut evicted = Vec::new();
        let mut kept = self.kept();
        while kept.bytes + size > self.limit
            && let Some((_, oldest)) = kept.buffers.pop_front()
        {
            kept.bytes -= oldest.capacity() as u64;
            evicted.push(oldest);
        }
        kept.bytes += size;
        let len = freed.storage.len() - freed.start;
        // The list's own memory is the host's, whoever drops the buffer.
        alloc::with_tag(None, || kept.buffers.push_back((len, freed.storage)));
        // Freeing may take long, and nobody has to wait for it.
        drop(kept);
        drop(evicted);
    }
}

/// A link that is as slow as a given bandwidth and latency make it: a copy of `n` bytes takes at least
/// `latency + n / bandwidth` (on average, see below), or as long as the inner link takes. One copy at a
/// time runs in each direction, and the directions are independent, as those of a PCIe bus are.
///
/// The thread sleeps for what is left after the real copy. Sleeping takes longer than asked, so what a sleep
/// took too long comes off the following ones in its direction, and the average over many copies is right.
#[derive(Debug)]
pub struct SimulatedLink<L> {
    name: String,
    inner: L,
    bandwidth: Bandwidth,
    latency: Duration,
    uploads: Mutex<Lane>,
    downloads: Mutex<Lane>,
}

impl<L: DeviceLink> SimulatedLink<L> {
    /// Slows `inner` down to `bandwidth` in each direction, with `latency` before each copy. A bandwidth
    /// that is not a positive number leaves the latency alone.
    pub fn new(inner: L, bandwidth: Bandwidth, latency: Duration) -> Self {
        let name = format!("{}, simulated at {bandwidth}", inner.name());
        Self { name, inner, bandwidth, latency, uploads: Mutex::default(), downloads: Mutex::default() }
    }

    /// The time that a copy of so many bytes is to take.
    fn due(&self, bytes: usize) -> Duration {
        let transfer = Duration::try_from_secs_f64(bytes as f64 / self.bandwidth.0);
        self.latency.saturating_add(transfer.unwrap_or_default())
    }

    fn timed<R>(
        &self,
        lane: &Mutex<Lane>,
        bytes: usize,
        copy: impl FnOnce() -> Result<R, LinkError>,
    ) -> Result<R, LinkError> {
        // Held until the copy's time is over, so that the next one in this direction waits.
        let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let copied = copy()?;
        let rest = lane.rest(self.due(bytes), start.elapsed());
        if !rest.is_zero() {
            lane.slept(rest, sleep(rest));
        }
        Ok(copied)
    }
}

impl<L: DeviceLink> DeviceLink for SimulatedLink<L> {
    fn name(&self) -> &str {
        &self.name
    }

    fn zero_copy(&self) -> bool {
        self.inner.zero_copy()
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.timed(&self.uploads, host.len(), || self.inner.upload(host))
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        self.timed(&self.downloads, device.len(), || self.inner.download(device))
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        self.timed(&self.downloads, device.len(), || self.inner.download_into(device, out))
    }

    fn pin(&self, floats: Vec<f32>) -> Floats {
        self.inner.pin(floats)
    }

    fn prepare(&self, promotion: u64) -> Result<(), LinkError> {
        self.inner.prepare(promotion)
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.inner.moved(direction)
    }
}

/// One direction of a simulated link.
#[derive(Debug, Default)]
struct Lane {
    /// The time that earlier sleeps took too long, less what later ones were shortened by.
    overslept: Duration,
}

impl Lane {
    /// The time that is left to sleep of the `due` time when the copy itself has `taken` some of it.
    fn rest(&mut self, due: Duration, taken: Duration) -> Duration {
        let rest = due.saturating_sub(taken);
        let shortened = self.overslept.min(rest);
        self.overslept -= shortened;
        rest - shortened
    }

    fn slept(&mut self, asked: Duration, took: Duration) {
        self.overslept += took.saturating_sub(asked);
    }
}

/// Sleeps at least that long and returns how long it was.
#[expect(clippy::disallowed_methods, reason = "a simulated link stands for the passing of time")]
fn sleep(time: Duration) -> Duration {
    let start = Instant::now();
    std::thread::sleep(time);
    start.elapsed()
}

#[cfg(test)]
pub(crate) mod conformance;

#[cfg(test)]
mod tests {
    use super::conformance::{aligned, conforms, floats, pattern};
    use super::*;
    use crate::alloc::{AllocatorProbe, allocations};
    use hydra_core::MemoryProbe;
    use proptest::prelude::*;

    const FAST: Bandwidth = Bandwidth(64e9);
    const PROBE: AllocatorProbe = AllocatorProbe;

    // Devices of the tests of this file: 20 to 29.
    fn links(first: usize) -> [Box<dyn DeviceLink>; 4] {
        let pooled = || HostCopyLink::new(DeviceId(first + 1)).with_idle_limit(1 << 20);
        [
            Box::new(HostCopyLink::new(DeviceId(first))),
            Box::new(pooled()),
            Box::new(SimulatedLink::new(pooled(), FAST, Duration::from_micros(1))),
            Box::new(ZeroCopyLink::new(DeviceId(first + 2))),
        ]
    }

    #[test]
    fn every_link_conforms() {
        links(20).iter().for_each(|link| conforms(link.as_ref()));
    }

    #[test]
    fn what_is_copied_in_is_charged_to_the_device_and_what_comes_out_is_not() {
        let device = DeviceId(24);
        let link = HostCopyLink::new(device);
        let len = 1 << 20;
        let copy = link.upload(&Bytes::from(pattern(0, len))).unwrap();
        let charged = (len + ALIGN - 1) as u64;
        assert_eq!(PROBE.in_use(device), charged);
        let back = alloc::with_tag(Some(device), || link.download(&copy)).unwrap();
        let clone = copy.clone();
        drop(copy);
        assert_eq!((PROBE.in_use(device), back.len()), (charged, len));
        std::thread::spawn(|| drop(clone)).join().unwrap();
        assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (0, charged));
    }

    #[test]
    fn what_is_shared_stays_charged_to_who_made_it() {
        let (device, len) = (DeviceId(29), 1 << 20);
        let link = ZeroCopyLink::new(device);
        let host = aligned(&pattern(0, len));
        let copy = link.upload(&host).unwrap();
        assert_eq!((PROBE.in_use(device), copy.len()), (0, len));
        let made = DeviceBytes::from(alloc::with_tag(Some(device), || aligned(&pattern(1, len))));
        let charged = PROBE.in_use(device);
        let taken = link.download(&made).unwrap();
        drop(made);
        assert!(charged >= len as u64 && PROBE.in_use(device) == charged);
        drop(taken);
        assert_eq!(PROBE.in_use(device), 0);
    }

    #[test]
    fn freed_buffers_are_used_again_within_the_limit() {
        let device = DeviceId(25);
        let room = |len: usize| (len + ALIGN - 1) as u64;
        let link = HostCopyLink::new(device).with_idle_limit(room(1000) + room(2000));
        let copy = |len: usize| link.upload(&Bytes::from(pattern(len, len))).unwrap();
        drop((copy(1000), copy(2000)));
        assert_eq!((PROBE.in_use(device), allocations(device)), (room(1000) + room(2000), 2));
        let (again, other) = (copy(1000), copy(1001));
        assert_eq!((allocations(device), &again.as_host().unwrap()[..]), (3, &pattern(1000, 1000)[..]));
        drop(other);
        assert_eq!(PROBE.in_use(device), room(1000) + room(1001), "the oldest, of 2000, made room");
        drop(again);
        assert_eq!(PROBE.in_use(device), room(1000) + room(1001));
        drop(copy(1 << 20));
        assert_eq!(PROBE.in_use(device), room(1000) + room(1001), "what exceeds the limit is freed");
        let outlives = copy(1001);
        drop(link);
        assert_eq!(PROBE.in_use(device), room(1001) + room(1000));
        drop(outlives);
        assert_eq!(PROBE.in_use(device), 0);
    }

    #[test]
    fn a_link_without_an_idle_limit_keeps_nothing() {
        let device = DeviceId(26);
        let link = HostCopyLink::new(device);
        (0..3).for_each(|_| drop(link.upload(&Bytes::from(pattern(0, 500))).unwrap()));
        assert_eq!((PROBE.in_use(device), allocations(device)), (0, 3));
    }

    #[test]
    fn a_copy_is_due_after_latency_and_transfer() {
        let due = |bandwidth, bytes| {
            let latency = Duration::from_micros(20);
            SimulatedLink::new(HostCopyLink::new(DeviceId(27)), Bandwidth(bandwidth), latency).due(bytes)
        };
        assert_eq!(due(1e9, 1_000_000), Duration::from_micros(1020));
        assert_eq!(due(1e9, 0), Duration::from_micros(20));
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(due(odd, 1000), Duration::from_micros(20), "{odd}");
        }
    }

    #[test]
    fn a_simulated_link_passes_errors_on_and_names_itself() {
        let link = SimulatedLink::new(HostCopyLink::new(DeviceId(28)), Bandwidth(1e9), Duration::ZERO);
        assert_eq!(link.name(), "host copy, device 28, simulated at 953.67 MiB/s");
        let error = link.download_into(&floats(&[1.0]).into(), &mut [0.0; 2]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "link `host copy, device 28`: the buffer on the device has 4 bytes, the caller's 8; give buffers of the same shape"
        );
    }

    proptest! {
        // Copies and sleeps of made-up lengths: the times add up, whatever the clock does.
        #[test]
        fn oversleeping_is_made_up_for(copies in prop::collection::vec((0u64..5000, 0u64..3000, 0u64..2000), 1..50)) {
            let time = Duration::from_micros;
            let (mut lane, mut wanted, mut spent) = (Lane::default(), Duration::ZERO, Duration::ZERO);
            for (due, taken, oversleeps) in copies {
                let (due, taken) = (time(due), time(taken));
                let rest = lane.rest(due, taken);
                prop_assert!(taken + rest <= due.max(taken));
                let mut slept = Duration::ZERO;
                if !rest.is_zero() {
                    slept = rest + time(oversleeps);
                    lane.slept(rest, slept);
                }
                wanted += due.max(taken);
                spent += taken + slept;
                // Never faster than the bandwidth in sum, and never slower by more than what is owed.
                prop_assert_eq!(spent, wanted + lane.overslept);
            }
        }
    }
}
