//! The memory of an NVIDIA card as CubeCL allocates it.

use super::card::{CardMemory, Place};
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use hydra_core::cube::{CubeAdapter, CubeBytes, of_runtime};
use hydra_core::{DeviceBuffer, DeviceBytes, DeviceError, finish};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// What is allocated by itself also if it is soon freed again.
const LARGE: usize = 1 << 30;

/// Memory of an NVIDIA card, from the pools that its kernels use.
#[derive(Debug)]
pub struct CudaMemory {
    adapter: CubeAdapter,
}

impl CudaMemory {
    /// The memory of the card of `adapter`.
    pub fn new(adapter: CubeAdapter) -> Self {
        Self { adapter }
    }
}

// SAFETY: CubeCL gives each buffer memory of its own for as long as a handle of it lives, and neither frees
// nor moves it while the resource lives that a place holds. Drivers' addresses are those of the primary
// context, which CubeCL uses.
unsafe impl CardMemory for CudaMemory {
    fn allocate(&self, len: u64, for_good: bool) -> Result<DeviceBytes, DeviceError> {
        let client = &self.adapter.client;
        let len = usize::try_from(len).map_err(DeviceError::new)?;
        // CubeCL's pools have no page of a quarter of the card or more.
        let handle = match for_good || len >= LARGE {
            true => client.memory_dedicated_allocation((), |()| client.empty(len)),
            false => client.empty(len),
        };
        // The driver allocates in the order of CubeCL's stream, on which our copies do not wait.
        finish(&self.adapter.burn, &[])?;
        client.check([&handle]).map_err(of_runtime)?;
        Ok(DeviceBytes::Buffer(Arc::new(self.adapter.bytes(handle))))
    }

    fn lend(
        &self,
        bytes: &DeviceBytes,
        range: Range<usize>,
        lease: Arc<dyn Any + Send + Sync>,
    ) -> DeviceBytes {
        match bytes.as_buffer::<CubeBytes>() {
            Some(all) => DeviceBytes::Buffer(all.clone().on_lease(lease).slice(range)),
            None => bytes.slice(range),
        }
    }

    fn locate(&self, bytes: &[DeviceBytes]) -> Result<Vec<Option<Place>>, DeviceError> {
        let client = &self.adapter.client;
        let one = |bytes: &DeviceBytes| {
            let Some(bytes) = bytes.as_buffer::<CubeBytes>() else { return Ok(None) };
            let resource = client.get_resource::<<CudaRuntime as Runtime>::Server>(bytes.handle().clone());
            let resource = resource.map_err(of_runtime)?;
            let address = resource.resource().ptr;
            // A resource may be sent to another thread, and a lock lets it be shared.
            Ok(Some(Place { address, held: Box::new(Mutex::new(resource)) }))
        };
        // On the thread of the device, which is asked behind what was launched before: once, not once for each.
        client.exclusive(|| bytes.iter().map(one).collect()).map_err(of_runtime)?
    }
}
