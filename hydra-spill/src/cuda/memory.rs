//! The memory of an NVIDIA card as CubeCL allocates it.

use super::card::{CardMemory, Place};
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use hydra_core::cube::{CubeAdapter, CubeBytes, of_runtime};
use hydra_core::{DeviceBytes, DeviceError, finish};
use std::sync::{Arc, Mutex};

/// The size from which an allocation is made by itself also if it is soon freed again.
const LARGE: usize = 1 << 30;

/// Memory of an NVIDIA card, from the pools that its kernels use.
///
/// All of it belongs to one stream of CubeCL's, on which the device computes, whichever thread asks. Our copies are on
/// streams of ours, of which CubeCL's knows nothing, so what they write has to be idle when they begin:
///
/// - a range of the arena, because a shard task lets go of what was promoted after a wait for the card;
/// - memory that was just allocated, because allocating ends with a wait for the stream. CubeCL gives a piece of a pool
///   out again as soon as nobody on the host has it, with kernels that use it still in the queue. Those on its stream
///   were launched before it was given out, so the wait is for them too; what others used is not given out before
///   the card is done with it. An allocation by itself is new, and the driver has made it when CubeCL's call returns,
///   unless a `cubecl.toml` says `allocator = "async"`: then it is made in the order of the stream, and the wait is
///   for that.
///
/// The memory that they read is idle too: results are copied after the wait at the end of the shard task that made
/// them, and stay until the copy is over.
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
        let CubeAdapter { burn, client, stream, .. } = &self.adapter;
        let len = usize::try_from(len).map_err(DeviceError::new)?;
        let by_itself = || client.memory_dedicated_allocation((), |()| client.empty(len));
        let handle = stream.executes(|| {
            let handle = match for_good || len >= LARGE {
                // CubeCL's pools have no page of a quarter of the card or more. It is done in one go on the thread of
                // the device: whatever else is allocated on the stream meanwhile would be by itself too.
                true => client.exclusive(by_itself).map_err(of_runtime)?,
                false => client.empty(len),
            };
            // For kernels that used the memory, and for the driver, which may allocate in the order of the stream: our
            // copies wait for neither.
            finish(burn, &[]).map(|()| handle)
        })?;
        client.check([&handle]).map_err(of_runtime)?;
        Ok(DeviceBytes::Buffer(Arc::new(self.adapter.bytes(handle))))
    }

    fn locate(&self, bytes: &[DeviceBytes]) -> Result<Vec<Option<Place>>, DeviceError> {
        let client = &self.adapter.client;
        let one = |bytes: &DeviceBytes| {
            let Some(bytes) = bytes.as_buffer::<CubeBytes>() else { return Ok(None) };
            let handle = bytes.handle().clone();
            // On the stream of the memory. On another one this would be a use that CubeCL follows until that stream,
            // and this one before it, are idle.
            let ask = |handle| client.get_resource::<<CudaRuntime as Runtime>::Server>(handle);
            let resource = handle.stream.executes(|| ask(handle)).map_err(of_runtime)?;
            let address = resource.resource().ptr;
            // A resource may be sent to another thread, and a lock lets it be shared.
            Ok(Some(Place { address, held: Box::new(Mutex::new(resource)) }))
        };
        // On the thread of the device, which is asked behind what was launched before: once, not once for each.
        client.exclusive(|| bytes.iter().map(one).collect()).map_err(of_runtime)?
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

    /// Memory of the first card, or `None` with the reason printed.
    fn memory() -> Option<CudaMemory> {
        let found = detect();
        // CubeCL panics where it misses something.
        let problem = found.driver_problem.is_some() || found.compiler_problem.is_some();
        let usable = found.compiler && found.headers.is_some() && !problem;
        if !usable || found.cards.first().is_none_or(|card| card.problem.is_some()) {
            println!("skipped: a machine with a card, of which there is: {found:?}");
            return None;
        }
        // Allocations in the order of the stream, as a user's settings may have them: whoever waits for those is right
        // with the others too.
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

    /// Enough for a kernel to be still at it when a copy begins.
    const BYTES: usize = 4 << 20;

    /// Launches kernels that write a piece of a pool, and lets go of it. Where it is.
    fn written_later(memory: &CudaMemory) -> u64 {
        let mut tensor = Tensor::<1>::ones([BYTES / size_of::<f32>()], &memory.adapter.burn);
        for _ in 0..16 {
            tensor = tensor + 1.0;
        }
        let resident = AnyTensor::from(tensor).into_device_tensor();
        memory.locate(&[resident.bytes]).unwrap().remove(0).unwrap().address
    }

    /// Copies to the card as another thread does beside kernels, and looks at it when they have ended. Where it is.
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
        assert!(again.contains(&true), "no piece of a pool was given out again");
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
