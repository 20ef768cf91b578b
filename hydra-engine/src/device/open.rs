//! A device outside of a run, for measurements of the machine.

use super::{DeviceSpec, Hardware, PageLocked};
use crate::error::EngineError;
use crate::optimizer::{OptimizerCheck, Tried, memory_of};
use hydra_core::{ByteSize, DeviceId, FloatType, MemoryProbe};
use hydra_spill::{DeviceLink, alloc, alloc::AllocatorProbe};
use std::fmt;
use std::sync::Arc;

/// A device with the link and the memory probe that it would have in a run.
pub struct OpenDevice {
    /// The plain device, for Burn.
    pub burn: burn::tensor::Device,
    /// The link to its memory.
    pub link: Arc<dyn DeviceLink>,
    /// The memory probe.
    pub probe: Arc<dyn MemoryProbe>,
    tag: alloc::TagLease,
}

impl fmt::Debug for OpenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenDevice").field("link", &self.link.name()).finish_non_exhaustive()
    }
}

impl OpenDevice {
    /// Opens the device of `spec`, without a simulated link and with this much page-locked host memory. A GPU must be
    /// opened on the thread that computes on it, because its memory belongs to that thread's stream.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the machine or this build lacks it.
    pub fn new(spec: &DeviceSpec, page_locked: ByteSize) -> Result<Self, EngineError> {
        let tag = alloc::TagLease::take();
        let locked = PageLocked::new(page_locked);
        let hardware = Hardware::open(spec, tag.device(), Arc::new(AllocatorProbe), &locked)?;
        let Hardware { burn, link, probe, .. } = hardware;
        Ok(Self { burn, link, probe, tag })
    }

    /// Compares the optimizer's steps on the device with those on the host, bit by bit, for random elements and
    /// gradients of these types, which the device must support. `None` if the device uses host memory, where both are
    /// the same code.
    ///
    /// # Errors
    /// Those of the device.
    pub fn compare_optimizer(&self, floats: &[FloatType]) -> Result<Option<OptimizerCheck>, EngineError> {
        Ok(memory_of(self.link.clone(), &self.burn).compare(Tried::Every(floats))?)
    }

    /// The device's tag for its probe; a thread with this tag ([`alloc::with_tag`]) allocates for it.
    pub fn measured_as(&self) -> DeviceId {
        self.tag.device()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_device_opens_and_copies() {
        let spec = &DeviceSpec::cpu(ByteSize::mib(1));
        let device = OpenDevice::new(spec, ByteSize::mib(1)).unwrap();
        let uploaded = device.link.upload(&bytes::Bytes::from_static(b"some bytes")).unwrap();
        assert_eq!(device.link.download(&uploaded).unwrap(), &b"some bytes"[..]);
        assert_eq!(device.compare_optimizer(&[FloatType::F32]).unwrap(), None);
    }
}
