//! The memory of an NVIDIA card as CubeCL allocates it.

use super::card::{CardMemory, DeviceAddress};
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use hydra_core::cube::{CubeAdapter, CubeBytes, from_server_error};
use hydra_core::{DeviceBytes, DeviceError, finish};
use std::sync::{Arc, Mutex};

/// The size from which temporary allocations are also dedicated.
const LARGE: usize = 1 << 30;

/// Memory of an NVIDIA card, from the pools that its kernels use.
///
/// All of it belongs to one CubeCL stream, on which the device computes, regardless of the calling thread.
/// Hydra's copies run on other streams, which CubeCL does not know about, so their destinations must be idle
/// when they start:
///
/// - a range of the arena is idle, because a shard task drops its promoted buffers after a wait for the card;
/// - newly allocated memory is idle, because allocating ends with a wait for the stream. CubeCL reuses a
///   piece of a pool as soon as the host has no handle of it, while kernels that use it are still queued.
///   Those on its stream were launched before the reuse, so the wait covers them too; memory that other
///   streams used is not reused before the card is done with it. A dedicated allocation is new, and the
///   driver has made it when CubeCL's call returns, unless a `cubecl.toml` sets `allocator = "async"`: then
///   it is made in the order of the stream, and the wait covers that.
///
/// The sources of copies are idle too: results are copied after the wait at the end of the shard task that
/// made them, and are kept until the copy is over.
#[derive(Debug)]
pub struct CudaMemory {
    adapter: CubeAdapter,
}

impl CudaMemory {
    /// Returns the memory of the card of `adapter`.
    pub fn new(adapter: CubeAdapter) -> Self {
        Self { adapter }
    }
}

// SAFETY: CubeCL gives each buffer its own memory for as long as a handle of it lives, and neither frees
// nor moves it while the resource that a place holds lives. The driver's addresses are those of the primary
// context, which CubeCL uses.
unsafe impl CardMemory for CudaMemory {
    fn allocate(&self, len: u64, for_good: bool) -> Result<DeviceBytes, DeviceError> {
        let CubeAdapter { burn, client, stream, .. } = &self.adapter;
        let len = usize::try_from(len).map_err(DeviceError::new)?;
        let by_itself = || client.memory_dedicated_allocation((), |()| client.empty(len));
        let handle = stream.executes(|| {
            let handle = match for_good || len >= LARGE {
                // CubeCL's pools have no pages of a quarter of the card or more. Exclusive use of the
                // device's thread is needed, because concurrent allocations on the stream would become
                // dedicated too.
                true => client.exclusive(by_itself).map_err(from_server_error)?,
                false => client.empty(len),
            };
            // Waits for kernels that used the memory, and for the driver, which may allocate in stream order:
            // Hydra's copies wait for neither.
            finish(burn, &[]).map(|()| handle)
        })?;
        client.check([&handle]).map_err(from_server_error)?;
        Ok(DeviceBytes::Buffer(Arc::new(self.adapter.bytes(handle))))
    }

    fn locate(&self, bytes: &[DeviceBytes]) -> Result<Vec<Option<DeviceAddress>>, DeviceError> {
        let client = &self.adapter.client;
        let one = |bytes: &DeviceBytes| {
            let Some(bytes) = bytes.as_buffer::<CubeBytes>() else { return Ok(None) };
            let handle = bytes.handle().clone();
            // On the stream of the memory. Another stream would count as a use that CubeCL tracks until that
            // stream and this one are idle.
            let ask = |handle| client.get_resource::<<CudaRuntime as Runtime>::Server>(handle);
            let resource = handle.stream.executes(|| ask(handle)).map_err(from_server_error)?;
            let address = resource.resource().ptr;
            // A resource is `Send`; the lock makes it `Sync`.
            Ok(Some(DeviceAddress { address, held: Box::new(Mutex::new(resource)) }))
        };
        // On the device's thread, after the work launched before: one call for all bytes.
        client.exclusive(|| bytes.iter().map(one).collect()).map_err(from_server_error)?
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CardLink, CudaDriver, Dma, PinnedPool, detect};
    use super::*;
    use crate::{Budget, DeviceLink};
    use burn::tensor::Tensor;
    use bytes::Bytes;
    use cubecl_runtime::config::memory::{CudaAllocator, CudaMemoryConfig, MemoryConfig};
    use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
    use hydra_core::cube::StreamId;
    use hydra_core::{AnyTensor, ByteSize};

    /// Memory of the first card, or `None` after printing the reason.
    fn memory() -> Option<CudaMemory> {
        let found = detect();
        // CubeCL panics if something is missing.
        let problem = found.driver_problem.is_some() || found.compiler_problem.is_some();
        let usable = found.compiler && found.headers.is_some() && !problem;
        if !usable || found.cards.first().is_none_or(|card| card.problem.is_some()) {
            println!("skipped: this machine has no usable card: {found:?}");
            return None;
        }
        // Stream-ordered allocation, which user settings may select: waiting that is correct for it is
        // correct for the default too.
        let cuda = CudaMemoryConfig { allocator: CudaAllocator::Async };
        let memory = MemoryConfig { cuda, ..Default::default() };
        CubeClRuntimeConfig::try_set(CubeClRuntimeConfig { memory, ..Default::default() });
        Some(CudaMemory::new(CubeAdapter::cuda(0).unwrap()))
    }

    fn link(memory: &CudaMemory) -> CardLink<CudaMemory> {
        let driver = Arc::new(CudaDriver::new(0).unwrap());
        let budget = Budget::new("page-locked memory", ByteSize::mib(32));
        let dma =
            Dma::new("card 0", driver.as_ref(), PinnedPool::new(driver.clone(), budget), 1 << 20).unwrap();
        CardLink::new(dma, CudaMemory::new(memory.adapter.clone()))
    }

    /// Enough bytes for a kernel to be still running when a copy starts.
    const BYTES: usize = 4 << 20;

    /// Launches kernels that write a piece of a pool, and drops it. Returns its address.
    fn written_later(memory: &CudaMemory) -> u64 {
        let mut tensor = Tensor::<1>::ones([BYTES / size_of::<f32>()], &memory.adapter.burn);
        for _ in 0..16 {
            tensor = tensor + 1.0;
        }
        let resident = AnyTensor::from(tensor).into_device_tensor();
        memory.locate(&[resident.bytes]).unwrap().remove(0).unwrap().address
    }

    /// Copies to the card as another thread does while kernels run, and checks the bytes when they have
    /// ended. Returns its address.
    fn copied(memory: &CudaMemory, link: &CardLink<CudaMemory>, seed: u8) -> u64 {
        let host = Bytes::from(vec![seed; BYTES]);
        let copy = std::thread::scope(|scope| scope.spawn(|| link.upload(&host).unwrap()).join().unwrap());
        finish(&memory.adapter.burn, &[]).unwrap();
        assert!(link.download(&copy).unwrap() == host, "a kernel or an allocation came after the copy");
        memory.locate(&[copy]).unwrap().remove(0).unwrap().address
    }

    #[test]
    fn no_kernel_that_was_launched_before_uses_what_is_allocated() {
        let Some(memory) = memory() else { return };
        let link = link(&memory);
        let again: Vec<bool> =
            (0..4).map(|seed| written_later(&memory) == copied(&memory, &link, seed)).collect();
        assert!(again.contains(&true), "no piece of a pool was reused");
    }

    #[test]
    fn an_arena_is_allocated_before_anything_is_copied_to_it() {
        let Some(memory) = memory() else { return };
        for seed in 0..4 {
            let link = link(&memory);
            written_later(&memory);
            link.prepare(BYTES as u64).unwrap();
            copied(&memory, &link, seed);
        }
    }

    #[test]
    fn memory_is_of_the_stream_of_who_opened_the_card_whoever_asks() {
        let Some(memory) = memory() else { return };
        assert_eq!(memory.adapter.stream, StreamId::current());
        let ask = || {
            assert_ne!(memory.adapter.stream, StreamId::current());
            for for_good in [true, false] {
                let bytes = memory.allocate(1 << 20, for_good).unwrap();
                let handle = bytes.as_buffer::<CubeBytes>().unwrap().handle();
                assert_eq!((handle.stream, handle.size_in_used()), (memory.adapter.stream, 1 << 20));
                let places = memory.locate(&[bytes.clone(), bytes.slice(512..1024)]).unwrap();
                let at: Vec<u64> = places.iter().map(|place| place.as_ref().unwrap().address).collect();
                assert_eq!(at[1] - at[0], 512);
            }
        };
        std::thread::scope(|scope| scope.spawn(ask).join().unwrap());
    }
}
