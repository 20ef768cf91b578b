//! Links of logical devices that are part of this machine's CPU.

use super::{DeviceLink, Direction, LinkError, Moved, check_length};
use crate::alloc;
use crate::memory::aligned::{AlignedBytes, ELEMENT_ALIGN, allocate};
use bytes::Bytes;
use hydra_core::{DeviceBytes, DeviceId};
use std::collections::TryReserveError;

/// The link of a logical device that is part of this machine's CPU: real copies within host memory.
///
/// The counting allocator charges uploads to the device and downloads to the host.
#[derive(Debug)]
pub struct HostCopyLink {
    name: String,
    device: DeviceId,
    moved: Moved,
}

impl HostCopyLink {
    /// Returns the link of `device`.
    pub fn new(device: DeviceId) -> Self {
        Self { name: format!("host copy, {device}"), device, moved: Moved::default() }
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
        let storage = alloc::with_tag(Some(self.device), || allocate(host.len()));
        let storage = storage.map_err(|e| self.memory_error(Direction::Upload, host.len(), e))?;
        self.moved.add(Direction::Upload, host.len());
        Ok(Bytes::from_owner(AlignedBytes::fill(storage, host)).into())
    }

    fn fills(&self) -> bool {
        true
    }

    fn upload_filled(&self, len: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<DeviceBytes, LinkError> {
        let bytes = alloc::with_tag(Some(self.device), || AlignedBytes::zeros(len));
        let mut bytes = bytes.map_err(|e| self.memory_error(Direction::Upload, len, e))?;
        fill(bytes.as_mut());
        self.moved.add(Direction::Upload, len);
        Ok(Bytes::from_owner(bytes).into())
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        let device = self.reachable(device)?;
        alloc::with_tag(None, || {
            let storage = allocate(device.len());
            let storage = storage.map_err(|e| self.memory_error(Direction::Download, device.len(), e))?;
            let bytes = AlignedBytes::fill(storage, device);
            self.moved.add(Direction::Download, device.len());
            Ok(Bytes::from_owner(bytes))
        })
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        let device = self.reachable(device)?;
        check_length(&self.name, device.len(), out)?;
        bytemuck::cast_slice_mut(out).copy_from_slice(device);
        self.moved.add(Direction::Download, device.len());
        Ok(())
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.moved.get(direction)
    }
}

/// The link of a logical device that reads the host's memory in place: its results are views of its
/// arguments. Only bytes whose alignment is insufficient for tensors are copied.
///
/// Memory stays charged to the thread's device that allocated it: buffers and batches to the host, results of
/// shard tasks to the device, also while the host reads them.
#[derive(Debug)]
pub struct ZeroCopyLink {
    name: String,
    copies: HostCopyLink,
}

impl ZeroCopyLink {
    /// Returns the link of `device`.
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

    fn fills(&self) -> bool {
        true
    }

    fn upload_filled(&self, len: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<DeviceBytes, LinkError> {
        self.copies.upload_filled(len, fill)
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
