//! The link of a CubeCL device, which uses CubeCL's own copies.

use super::{DeviceLink, Direction, LinkError, Moved, check_length};
use crate::memory::aligned::at_alignment;
use bytes::Bytes;
use hydra_core::cube::{CubeAdapter, CubeBytes};
use hydra_core::{DeviceBytes, DeviceError};
use std::sync::Arc;

/// The link of a CubeCL device: each buffer is allocated in CubeCL's pools, and CubeCL copies it.
///
/// It serves every CubeCL runtime, and NVIDIA cards if memory cannot be page-locked. CubeCL copies on
/// the stream of the calling thread and orders it with the streams of others.
#[derive(Debug)]
pub struct CubeLink {
    name: String,
    adapter: CubeAdapter,
    moved: Moved,
}

impl CubeLink {
    /// Returns the link of the device of `adapter`, which messages call `device`.
    pub fn new(device: &str, adapter: CubeAdapter) -> Self {
        Self { name: format!("CubeCL's copies, {device}"), adapter, moved: Moved::default() }
    }

    fn failed(&self, direction: Direction, bytes: usize, error: DeviceError) -> LinkError {
        LinkError::Transfer { link: self.name.clone(), direction, bytes: bytes as u64, source: error.into() }
    }
}

impl DeviceLink for CubeLink {
    fn name(&self) -> &str {
        &self.name
    }

    fn frees_each(&self) -> bool {
        // Pools release a page only when nothing on it is used.
        false
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.upload_all(std::slice::from_ref(host)).map(|mut all| all.remove(0))
    }

    fn upload_all(&self, host: &[Bytes]) -> Result<Vec<DeviceBytes>, LinkError> {
        let total = host.iter().map(Bytes::len).sum();
        let copies =
            self.adapter.write(host).map_err(|error| self.failed(Direction::Upload, total, error))?;
        self.moved.add(Direction::Upload, total);
        Ok(copies.into_iter().map(|copy| DeviceBytes::Buffer(Arc::new(copy))).collect())
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        let elsewhere = || LinkError::Elsewhere { link: self.name.clone() };
        let bytes: &CubeBytes = device.as_buffer().ok_or_else(elsewhere)?;
        let read = bytes.read().map_err(|error| self.failed(Direction::Download, device.len(), error))?;
        self.moved.add(Direction::Download, read.len());
        // CubeCL reads into memory of its pools.
        at_alignment(read).map_err(|source| LinkError::Memory {
            link: self.name.clone(),
            direction: Direction::Download,
            bytes: device.len() as u64,
            source,
        })
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        check_length(&self.name, device.len(), out)?;
        bytemuck::cast_slice_mut(out).copy_from_slice(&self.download(device)?);
        Ok(())
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.moved.get(direction)
    }
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use super::*;
    use crate::link::conformance::conforms;

    #[test]
    fn the_link_of_a_device_behind_cubecl_conforms() {
        match CubeAdapter::wgpu(0) {
            Ok(adapter) => conforms(&CubeLink::new("wgpu:0", adapter)),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }
}
