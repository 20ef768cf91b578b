//! Links of logical devices that are a part of this machine's CPU.

use super::{DeviceLink, Direction, LinkError};
use crate::alloc;
use crate::memory::aligned::{AlignedBytes, ELEMENT_ALIGN, room};
use bytes::Bytes;
use hydra_core::{DeviceBytes, DeviceId};
use std::collections::{TryReserveError, VecDeque};
use std::mem::size_of_val;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
