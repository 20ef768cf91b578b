//! The driver of NVIDIA cards, called through cudarc.
//!
//! It uses the card's primary context, as CubeCL does: both see the same memory, and addresses that CubeCL
//! allocated can be used in copies.

use super::driver::{CopyStream, DeviceMemory, Driver, DriverError};
use crate::alloc;
use cudarc::driver::{CudaContext, result, sys};
use memmap2::MmapMut;
use std::collections::HashMap;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};

/// The size of large pages.
const LARGE_PAGE: usize = 2 << 20;

/// The size of other pages, at least.
const SMALL_PAGE: usize = 4096;

/// The bytes of new memory for which there is a thread, up to [`MOST_THREADS`] of them.
const BYTES_PER_THREAD: usize = 16 << 20;
const MOST_THREADS: usize = 8;

/// The driver of one NVIDIA card.
pub struct CudaDriver {
    context: Arc<CudaContext>,
    /// The page-locked memory, by the address of its first byte.
    locked: Mutex<HashMap<usize, MmapMut>>,
}

impl CudaDriver {
    /// Opens the driver of the card with this number.
    ///
    /// # Errors
    /// [`DriverError::Missing`] if no driver is installed, [`DriverError::Call`] if it has no such card or
    /// the card cannot be used.
    pub fn new(ordinal: usize) -> Result<Self, DriverError> {
        // Without the library, every call below would panic.
        // SAFETY: loading the driver's library runs only the driver's own initializers.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverError::Missing { library: "libcuda.so" });
        }
        let context = CudaContext::new(ordinal).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        Ok(Self { context, locked: Mutex::default() })
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<usize, MmapMut>> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The card's number.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver").field("ordinal", &self.ordinal()).finish()
    }
}

/// The error for a failed call of the driver.
fn failed(call: &'static str) -> impl Fn(result::DriverError) -> DriverError {
    move |error| {
        let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
        let meaning = error.error_string().map(|meaning| meaning.to_string_lossy().into_owned());
        DriverError::Call {
            call,
            code: name.unwrap_or_else(|_| format!("{:?}", error.0)),
            meaning: meaning.unwrap_or_else(|_| "an error unknown to this driver".to_owned()),
        }
    }
}

/// Makes the card's context current on the calling thread. `CudaContext::bind_to_thread` would also report
/// earlier failures in the drop of other objects.
fn bind(context: &CudaContext) -> Result<(), DriverError> {
    // SAFETY: the context lives as long as the reference to its owner.
    unsafe { result::ctx::set_current(context.cu_ctx()) }.map_err(failed("cuCtxSetCurrent"))
}

/// Returns new memory, of large pages if the system has them, that is in place, and the offset of its first
/// byte. Several threads make the system supply it, which is most of the work of locking it.
fn supplied(bytes: usize) -> std::io::Result<(MmapMut, usize)> {
    let large = bytes >= LARGE_PAGE;
    let len = if large { bytes.saturating_add(LARGE_PAGE) } else { bytes };
    let mut memory = MmapMut::map_anon(len)?;
    let start = if large { memory.as_ptr().align_offset(LARGE_PAGE) } else { 0 };
    #[cfg(target_os = "linux")]
    {
        // A system without large pages supplies small ones.
        let _ = if large { memory.advise_range(memmap2::Advice::HugePage, start, bytes) } else { Ok(()) };
        // Pages that a child of this process shared would be copied when they are written, and no longer be those of
        // the card.
        let _ = memory.advise(memmap2::Advice::DontFork);
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = bytes.div_ceil(BYTES_PER_THREAD).min(processors).min(MOST_THREADS);
    let share = bytes.div_ceil(threads).next_multiple_of(LARGE_PAGE);
    let supply = |part: &mut [u8]| part.iter_mut().step_by(SMALL_PAGE).for_each(|byte| *byte = 0);
    thread::scope(|scope| {
        let mut parts = memory[start..][..bytes].chunks_mut(share);
        let own = parts.next();
        // What no thread can be started for is supplied when it is registered.
        parts.for_each(|part| drop(Builder::new().spawn_scoped(scope, move || supply(part))));
        own.into_iter().for_each(supply);
    });
    Ok((memory, start))
}

// SAFETY: an anonymous map is exclusively owned memory of zeros; it is kept until it is unlocked.
unsafe impl Driver for CudaDriver {
    /// Registers memory that threads have put in place. `cuMemHostAlloc` takes five to eight times as long.
    fn lock_pages(&self, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        bind(&self.context)?;
        let (mut memory, start) = supplied(bytes).map_err(|error| DriverError::Call {
            call: "mmap",
            code: error.kind().to_string(),
            meaning: error.to_string(),
        })?;
        let first = NonNull::from(&mut memory[start..]).cast::<u8>();
        // SAFETY: the map has this many bytes from there on, and lives until they are unregistered; the flag makes
        // them page-locked for every context.
        let registered = unsafe {
            sys::cuMemHostRegister_v2(first.as_ptr().cast(), bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        };
        registered.result().map_err(failed("cuMemHostRegister"))?;
        // The list's own memory is charged to the host, as the pool's.
        alloc::with_tag(None, || self.locked().insert(first.as_ptr().addr(), memory));
        Ok(first)
    }

    unsafe fn unlock_pages(&self, memory: NonNull<u8>) -> Result<(), DriverError> {
        bind(&self.context)?;
        // SAFETY: the caller promises that the memory came from `lock_pages` and is no longer used.
        let unregistered = unsafe { sys::cuMemHostUnregister(memory.as_ptr().cast()) };
        let map = self.locked().remove(&memory.as_ptr().addr());
        unregistered.result().map_err(|error| {
            // The card may still use it, so it is kept until the process ends.
            std::mem::forget(map);
            failed("cuMemHostUnregister")(error)
        })
    }

    fn open_stream(&self, marks: usize) -> Result<Box<dyn CopyStream>, DriverError> {
        bind(&self.context)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let stream = stream.map_err(failed("cuStreamCreate"))?;
        // Its drop destroys the events created so far if creating one fails.
        let mut opened = Box::new(Stream { context: self.context.clone(), stream, events: Vec::new() });
        for _ in 0..marks {
            opened.events.push(sleeping_event()?);
        }
        Ok(opened)
    }

    fn memory(&self) -> Result<DeviceMemory, DriverError> {
        bind(&self.context)?;
        let (free, total) = result::mem_get_info().map_err(failed("cuMemGetInfo"))?;
        Ok(DeviceMemory { free: free as u64, total: total as u64 })
    }
}

/// Creates an event whose waiters block instead of spinning.
fn sleeping_event() -> Result<sys::CUevent, DriverError> {
    let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32
        | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    let mut event = ptr::null_mut();
    // SAFETY: the driver writes one event if it succeeds. cudarc's own function takes only one flag.
    unsafe { sys::cuEventCreate(&raw mut event, flags) }.result().map_err(failed("cuEventCreate"))?;
    Ok(event)
}

struct Stream {
    context: Arc<CudaContext>,
    stream: sys::CUstream,
    events: Vec<sys::CUevent>,
}

// SAFETY: the driver's handles may be used from any thread with the context bound, as every call here
// ensures; one thread at a time uses them, because every call borrows the stream exclusively.
unsafe impl Send for Stream {}

// SAFETY: the driver runs the copies of a stream in order. An event is over after the work enqueued before
// it, and `cuStreamSynchronize` returns when the stream is idle, or when the context is lost and nothing
// runs in it any more.
unsafe impl CopyStream for Stream {
    unsafe fn upload(&mut self, from: *const u8, to: u64, bytes: usize) -> Result<(), DriverError> {
        bind(&self.context)?;
        // SAFETY: the caller promises both ranges until the copy is over.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream) }
            .result()
            .map_err(failed("cuMemcpyHtoDAsync"))
    }

    unsafe fn download(&mut self, from: u64, to: *mut u8, bytes: usize) -> Result<(), DriverError> {
        bind(&self.context)?;
        // SAFETY: the caller promises both ranges until the copy is over.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream) }
            .result()
            .map_err(failed("cuMemcpyDtoHAsync"))
    }

    fn mark(&mut self, mark: usize) -> Result<(), DriverError> {
        bind(&self.context)?;
        // SAFETY: event and stream live until this is dropped.
        unsafe { result::event::record(self.events[mark], self.stream) }.map_err(failed("cuEventRecord"))
    }

    fn wait(&mut self, mark: usize) -> Result<(), DriverError> {
        bind(&self.context)?;
        // SAFETY: the event lives until this is dropped.
        unsafe { result::event::synchronize(self.events[mark]) }.map_err(failed("cuEventSynchronize"))
    }

    fn drain(&mut self) -> Result<(), DriverError> {
        // Not skipped if binding fails: the stream knows its context.
        let bound = bind(&self.context);
        // SAFETY: the stream lives until this is dropped.
        let drained = unsafe { result::stream::synchronize(self.stream) };
        drained.map_err(failed("cuStreamSynchronize")).and(bound)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A failed driver cannot release anything, and a drop cannot return the error.
        let _ = self.drain();
        for event in self.events.drain(..) {
            // SAFETY: created in `open_stream`, destroyed once, and nothing waits for it.
            let _ = unsafe { result::event::destroy(event) };
        }
        // SAFETY: likewise.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Dma, PinnedPool};
    use super::*;
    use crate::{Budget, Direction};
    use hydra_core::ByteSize;

    /// The driver of the first card, or `None` after printing the reason.
    fn driver() -> Option<CudaDriver> {
        match CudaDriver::new(0) {
            Ok(driver) => Some(driver),
            Err(error) => {
                let said = error.to_string();
                assert!(
                    said.contains("libcuda.so was not found; install") || said.contains("CUDA_ERROR_"),
                    "{said}"
                );
                eprintln!("skipped: {said}");
                None
            }
        }
    }

    /// Memory of the card that is freed when this is dropped.
    struct Allocation(sys::CUdeviceptr);

    impl Allocation {
        fn new(driver: &CudaDriver, bytes: usize) -> Self {
            bind(&driver.context).unwrap();
            // SAFETY: nothing is read before it is written.
            Self(unsafe { result::malloc_sync(bytes) }.unwrap())
        }
    }

    impl Drop for Allocation {
        fn drop(&mut self) {
            // SAFETY: allocated above, and every copy is over when its call returns.
            unsafe { result::free_sync(self.0) }.unwrap();
        }
    }

    #[test]
    fn a_card_copies_from_anywhere_to_anywhere_and_back() {
        let Some(driver) = driver().map(Arc::new) else { return };
        let memory = driver.memory().unwrap();
        assert!(0 < memory.free && memory.free <= memory.total);
        let pool = PinnedPool::new(driver.clone(), Budget::new("page-locked memory", ByteSize::mib(16)));
        let dma = Dma::new("card 0", driver.as_ref(), pool.clone(), 64 << 10).unwrap();
        let floats: Vec<f32> = (0..700_001).map(|i| i as f32).collect();
        let heap: &[u8] = bytemuck::cast_slice(&floats);
        let mut locked = pool.take(heap.len(), "test").unwrap();
        locked.copy_from_slice(heap);
        for host in [heap, &locked[..], &heap[3..], &locked[3..]] {
            let card = Allocation::new(&driver, heap.len());
            let mut out = vec![0; host.len()];
            // SAFETY: the allocation is large enough and not used elsewhere.
            let fetched = unsafe {
                dma.upload(&[(host, card.0)]).unwrap();
                dma.download_into(&mut [(card.0, &mut out)]).unwrap();
                dma.download(&[(card.0, host.len())]).unwrap().remove(0)
            };
            assert!(out == host && fetched == host);
        }
        assert!(
            dma.moved(Direction::Upload) > 0 && dma.moved(Direction::Download) > dma.moved(Direction::Upload)
        );
    }

    #[test]
    fn threads_copy_in_both_directions_and_each_gets_its_own() {
        let Some(driver) = driver().map(Arc::new) else { return };
        let pool = PinnedPool::new(driver.clone(), Budget::new("page-locked memory", ByteSize::mib(16)));
        let dma = Dma::new("card 0", driver.as_ref(), pool, 64 << 10).unwrap();
        thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (driver, dma) = (&driver, &dma);
                scope.spawn(move || {
                    let card = Allocation::new(driver, 1 << 20);
                    for round in 0..50 {
                        let host = vec![thread * 50 + round; 1 << 20];
                        // SAFETY: the allocation is large enough and owned by this thread.
                        let fetched = unsafe {
                            dma.upload(&[(&host, card.0)]).unwrap();
                            dma.download(&[(card.0, host.len())]).unwrap().remove(0)
                        };
                        assert!(fetched == host);
                    }
                });
            }
        });
    }

    #[test]
    fn what_the_driver_refuses_is_named() {
        let Some(driver) = driver() else { return };
        let error = driver.lock_pages(1 << 60).unwrap_err().to_string();
        assert!(error.starts_with("mmap failed with out of memory"), "{error}");
        let missing = CudaDriver::new(4096).unwrap_err().to_string();
        assert!(missing.contains("CUDA_ERROR_INVALID_DEVICE"), "{missing}");
    }
}
