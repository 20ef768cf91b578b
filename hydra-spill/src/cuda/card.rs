//! The link to a card: promotions into an arena, by copies that run concurrently with the card's
//! computations.

use super::arena::{ARENA_ALIGN, Arena, offsets};
use super::dma::Dma;
use crate::link::check_length;
use crate::{DeviceLink, Direction, Floats, LinkError};
use bytes::Bytes;
use hydra_core::{DeviceBytes, DeviceError};
use std::any::Any;
use std::mem::size_of_val;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The address of bytes in the memory of a card.
pub struct DeviceAddress {
    /// The address of the first byte.
    pub address: u64,
    /// Keeps the bytes at this address.
    pub held: Box<dyn Any + Send + Sync>,
}

/// Memory of a card, as bytes that kernels read and as addresses that copies use.
///
/// # Safety
/// An address is valid for the bytes for as long as both the bytes and the [`DeviceAddress`] live. Allocated memory,
/// and parts lent of it, must not be used by anything else until the bytes are passed to a kernel, including
/// kernels that were launched earlier for a previous owner of the memory.
pub unsafe trait CardMemory: Send + Sync + 'static {
    /// Allocates bytes: permanently in a dedicated allocation, or until the bytes are dropped.
    ///
    /// # Errors
    /// If the card has no memory left.
    fn allocate(&self, len: u64, for_good: bool) -> Result<DeviceBytes, DeviceError>;

    /// Returns the addresses of bytes, in order; `None` for those that are not on this card. All are
    /// requested in one call, because each request may wait for a queue of the card's computations.
    ///
    /// # Errors
    /// If the bytes do not exist, because the card had no memory to compute them.
    fn locate(&self, bytes: &[DeviceBytes]) -> Result<Vec<Option<DeviceAddress>>, DeviceError>;
}

/// The link of a card whose memory is `M`.
///
/// Buffers that are uploaded together are placed in one range of an arena, by one sequence of copies and one
/// wait; the range is free again when the last of them is dropped. If the arena has no space or does not
/// exist yet, memory of the card's pools is used. Bytes may be dropped only after the card has finished all
/// work that reads them.
pub struct CardLink<M> {
    dma: Dma,
    memory: M,
    arena: Mutex<Option<ArenaMemory>>,
}

/// An arena and the memory that it divides.
#[derive(Clone)]
struct ArenaMemory {
    arena: Arena,
    bytes: DeviceBytes,
    address: u64,
    _held: Arc<dyn Any + Send + Sync>,
}

impl<M: CardMemory> CardLink<M> {
    /// Returns a link that copies with `dma` and has its name.
    pub fn new(dma: Dma, memory: M) -> Self {
        Self { dma, memory, arena: Mutex::default() }
    }

    fn arena(&self) -> MutexGuard<'_, Option<ArenaMemory>> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, direction: Direction, bytes: u64, error: DeviceError) -> LinkError {
        LinkError::Transfer { link: self.dma.name().to_owned(), direction, bytes, source: error.into() }
    }

    fn locate(&self, direction: Direction, bytes: &DeviceBytes) -> Result<DeviceAddress, LinkError> {
        Ok(self.locate_all(direction, std::slice::from_ref(bytes))?.remove(0))
    }

    fn locate_all(
        &self,
        direction: Direction,
        bytes: &[DeviceBytes],
    ) -> Result<Vec<DeviceAddress>, LinkError> {
        let total = || bytes.iter().map(|bytes| bytes.len() as u64).sum();
        let places = self.memory.locate(bytes).map_err(|error| self.failed(direction, total(), error))?;
        let found = |place: Option<DeviceAddress>| {
            place.ok_or_else(|| LinkError::Elsewhere { link: self.dma.name().to_owned() })
        };
        places.into_iter().map(found).collect()
    }

    /// Allocates ranges of these sizes, consecutive in the arena, and returns their addresses.
    fn ranges(&self, sizes: &[u64]) -> Result<Ranges, LinkError> {
        let (starts, total) = offsets(sizes.iter().copied());
        let total = total.max(ARENA_ALIGN);
        let slots = || starts.iter().zip(sizes).map(|(start, len)| *start as usize..(start + len) as usize);
        let lent = self.arena().clone();
        if let Some((lent, lease)) = lent.and_then(|lent| lent.arena.place(total).ok().map(|l| (lent, l))) {
            let (first, lease) = (lease.start(), Arc::new(lease));
            let part = |slot: Range<usize>| {
                let range = slot.start + first as usize..slot.end + first as usize;
                lent.bytes.leased(lease.clone()).slice(range)
            };
            let bytes = slots().map(part).collect();
            return Ok(Ranges { bytes, addresses: addresses(lent.address + first, &starts), _place: None });
        }
        let allocated = self.memory.allocate(total, false);
        let all = allocated.map_err(|error| self.failed(Direction::Upload, total, error))?;
        let place = self.locate(Direction::Upload, &all)?;
        let bytes = slots().map(|slot| all.slice(slot)).collect();
        Ok(Ranges { bytes, addresses: addresses(place.address, &starts), _place: Some(place) })
    }
}

/// Memory to be filled.
struct Ranges {
    bytes: Vec<DeviceBytes>,
    addresses: Vec<u64>,
    /// Memory outside of the arena.
    _place: Option<DeviceAddress>,
}

fn addresses(first: u64, starts: &[u64]) -> Vec<u64> {
    starts.iter().map(|start| first + start).collect()
}

impl<M: CardMemory> DeviceLink for CardLink<M> {
    fn name(&self) -> &str {
        self.dma.name()
    }

    fn frees_each(&self) -> bool {
        // All buffers of a promotion share one range of the arena.
        false
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.upload_all(std::slice::from_ref(host)).map(|mut all| all.remove(0))
    }

    fn upload_persistent(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        let len = (host.len() as u64).max(ARENA_ALIGN);
        let allocated = self.memory.allocate(len, true);
        let bytes = allocated.map_err(|error| self.failed(Direction::Upload, len, error))?;
        let place = self.locate(Direction::Upload, &bytes)?;
        // SAFETY: the memory is idle, because allocating ends with a wait for the stream, at least as long as `host`,
        // and is passed to a kernel only afterwards.
        unsafe { self.dma.upload(&[(&host[..], place.address)]) }?;
        Ok(bytes.slice(0..host.len()))
    }

    fn upload_all(&self, host: &[Bytes]) -> Result<Vec<DeviceBytes>, LinkError> {
        let sizes: Vec<u64> = host.iter().map(|bytes| bytes.len() as u64).collect();
        let Ranges { bytes, addresses, _place } = self.ranges(&sizes)?;
        let parts: Vec<(&[u8], u64)> = host.iter().map(|bytes| &bytes[..]).zip(addresses).collect();
        // SAFETY: the ranges were allocated, or lent exclusively by the arena, are as long as the parts, and
        // are passed to a kernel only afterwards. The previous holder of an arena range dropped it after the
        // card had finished with it, and newly allocated memory is idle.
        unsafe { self.dma.upload(&parts) }?;
        Ok(bytes)
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        self.download_all(std::slice::from_ref(device)).map(|mut all| all.remove(0))
    }

    fn download_all(&self, device: &[DeviceBytes]) -> Result<Vec<Bytes>, LinkError> {
        let places = self.locate_all(Direction::Download, device)?;
        let parts: Vec<(u64, usize)> =
            places.iter().zip(device).map(|(place, bytes)| (place.address, bytes.len())).collect();
        // SAFETY: the bytes are at these addresses for as long as the places live, and are never written.
        unsafe { self.dma.download(&parts) }
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        let place = self.locate(Direction::Download, device)?;
        check_length(self.name(), device.len(), out)?;
        // SAFETY: as above, and `out` has this many bytes.
        unsafe { self.dma.download_into(&mut [(place.address, bytemuck::cast_slice_mut(out))]) }
    }

    fn pin(&self, floats: Vec<f32>) -> Floats {
        // Floats that do not fit are staged with every copy. A quarter is left for downloads.
        let (budget, bytes) = (self.dma.pool().budget(), size_of_val(&floats[..]) as u64);
        if budget.used() + bytes > budget.capacity() - budget.capacity() / 4 {
            return floats.into();
        }
        match self.dma.pool().floats(&floats, "master weights") {
            Ok(pinned) => Floats::Pinned(Box::new(pinned)),
            Err(_) => floats.into(),
        }
    }

    fn prepare(&self, promotion: u64) -> Result<(), LinkError> {
        let len = promotion.next_multiple_of(ARENA_ALIGN).saturating_mul(2);
        let mut arena = self.arena();
        if len == 0 || arena.as_ref().is_some_and(|lent| lent.arena.capacity() >= len) {
            return Ok(());
        }
        // The previous arena is dropped first, because both may not fit. Ranges of it that are in use stay
        // valid.
        *arena = None;
        let bytes = match self.memory.allocate(len, true) {
            // Promotions then use memory of the pools, one buffer at a time.
            Err(DeviceError::OutOfMemory { .. }) => return Ok(()),
            bytes => bytes.map_err(|error| self.failed(Direction::Upload, len, error))?,
        };
        let place = self.locate(Direction::Upload, &bytes)?;
        let DeviceAddress { address, held } = place;
        *arena = Some(ArenaMemory { arena: Arena::new(len), bytes, address, _held: Arc::from(held) });
        Ok(())
    }

    fn prepared(&self) -> u64 {
        self.arena().as_ref().map_or(0, |lent| lent.arena.capacity())
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.dma.moved(direction)
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::Driver;
    use super::super::fake::{Failure, FakeDriver, Pace};
    use super::super::pinned::PinnedPool;
    use super::*;
    use crate::Budget;
    use crate::link::conformance::{conforms, pattern};
    use burn::tensor::{DType, Device};
    use hydra_core::{AnyTensor, ByteSize, DeviceBuffer};
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    /// Memory of the simulated card.
    struct Heap(FakeDriver);

    #[derive(Debug)]
    struct Allocation {
        driver: FakeDriver,
        address: u64,
    }

    impl Drop for Allocation {
        fn drop(&mut self) {
            self.driver.free(self.address);
        }
    }

    #[derive(Clone)]
    struct HeapBytes {
        of: Arc<Allocation>,
        range: Range<usize>,
        _lease: Option<Arc<dyn Any + Send + Sync>>,
    }

    impl std::fmt::Debug for HeapBytes {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_tuple("HeapBytes").field(&self.range).finish()
        }
    }

    impl DeviceBuffer for HeapBytes {
        fn len(&self) -> usize {
            self.range.len()
        }

        fn slice(&self, range: Range<usize>) -> Arc<dyn DeviceBuffer> {
            let range = self.range.start + range.start..self.range.start + range.end;
            Arc::new(Self { range, ..self.clone() })
        }

        fn overlaps(&self, _: &dyn DeviceBuffer) -> bool {
            unreachable!("links do not ask")
        }

        fn tensor(&self, _: &[usize], _: DType, _: &Device) -> AnyTensor {
            unreachable!("links do not compute")
        }

        fn copied(&self) -> Arc<dyn DeviceBuffer> {
            unreachable!("links do not compute")
        }

        fn leased(&self, lease: Arc<dyn Any + Send + Sync>) -> Arc<dyn DeviceBuffer> {
            Arc::new(Self { _lease: Some(lease), ..self.clone() })
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    // SAFETY: the driver's heap gives each allocation its own addresses until it is freed.
    unsafe impl CardMemory for Heap {
        fn allocate(&self, len: u64, _: bool) -> Result<DeviceBytes, DeviceError> {
            let free = self.0.memory().unwrap().free;
            if len > free {
                return Err(DeviceError::OutOfMemory { bytes: len });
            }
            let of = Allocation { driver: self.0.clone(), address: self.0.allocate(len as usize) };
            let bytes = HeapBytes { of: Arc::new(of), range: 0..len as usize, _lease: None };
            Ok(DeviceBytes::Buffer(Arc::new(bytes)))
        }

        fn locate(&self, bytes: &[DeviceBytes]) -> Result<Vec<Option<DeviceAddress>>, DeviceError> {
            let place = |bytes: &HeapBytes| DeviceAddress {
                address: bytes.of.address + bytes.range.start as u64,
                held: Box::new(bytes.of.clone()),
            };
            Ok(bytes.iter().map(|bytes| bytes.as_buffer::<HeapBytes>().map(place)).collect())
        }
    }

    fn link(driver: &FakeDriver, pinned: u64) -> CardLink<Heap> {
        let budget = Budget::new("page-locked memory", ByteSize(pinned));
        let pool = PinnedPool::new(Arc::new(driver.clone()), budget);
        let dma = Dma::new("a card", driver, pool, 1 << 16).unwrap();
        CardLink::new(dma, Heap(driver.clone()))
    }

    #[test]
    fn the_link_of_a_card_conforms() {
        for pace in [Pace::AtOnce, Pace::WhenAwaited, Pace::After(Duration::from_micros(50))] {
            // With and without an arena, with and without page-locked memory for results.
            for (promotion, pinned) in [(0, 4 * MIB), (MIB, 4 * MIB), (4096, 4 << 16)] {
                let driver = FakeDriver::new(pace);
                let link = link(&driver, pinned);
                link.prepare(promotion).unwrap();
                conforms(&link);
                drop(link);
                assert_eq!(driver.violations(), [""; 0]);
            }
        }
    }

    #[test]
    fn a_promotion_is_one_range_and_uses_it_again() {
        let driver = FakeDriver::new(Pace::WhenAwaited);
        let link = link(&driver, 4 * MIB);
        link.prepare(480_000).unwrap();
        let parts = |seed| [70_000, 3, 400_000].map(|len| Bytes::from(pattern(seed, len)));
        let arena = || link.arena().clone().unwrap().arena;
        let first = link.upload_all(&parts(0)).unwrap();
        let second = link.upload_all(&parts(1)).unwrap();
        let used = arena().used();
        assert!((2 * 470_003..2 * 470_003 + 6 * 512).contains(&used));
        // A third promotion goes outside the arena, and a finished one frees its space.
        let third = link.upload_all(&parts(2)).unwrap();
        let fourth = link.upload_all(&parts(3)).unwrap();
        let (outside, tail) = (driver.memory().unwrap().free, first[2].slice(5..10));
        drop((third, fourth, first));
        assert!(driver.memory().unwrap().free > outside);
        assert_eq!(arena().used(), used, "a slice of it holds the range");
        assert_eq!(link.download(&tail).unwrap(), &parts(0)[2][5..10]);
        drop(tail);
        assert!(arena().used() < used);
        let free = driver.memory().unwrap().free;
        for round in 0..1000 {
            let promoted = link.upload_all(&parts(round)).unwrap();
            assert_eq!(link.download(&promoted[2]).unwrap(), parts(round)[2], "round {round}");
        }
        assert_eq!(driver.memory().unwrap().free, free, "a thousand swaps take no more memory");
        for (copy, host) in second.iter().zip(parts(1)) {
            assert_eq!(link.download(copy).unwrap(), host, "other swaps leave a range unchanged");
        }
    }

    #[test]
    fn what_stays_on_the_card_is_outside_of_the_arena() {
        let driver = FakeDriver::new(Pace::WhenAwaited);
        let link = link(&driver, 4 * MIB);
        assert_eq!(link.prepared(), 0);
        link.prepare(480_000).unwrap();
        assert!(link.prepared() >= 2 * 480_000);
        let parts = [70_000, 3, 0].map(|len| Bytes::from(pattern(7, len)));
        let staying = parts.each_ref().map(|part| link.upload_persistent(part).unwrap());
        assert_eq!(link.arena().clone().unwrap().arena.used(), 0);
        for (copy, part) in staying.iter().zip(&parts) {
            assert_eq!(&link.download(copy).unwrap(), part);
        }
    }

    #[test]
    fn masters_live_in_page_locked_memory_as_far_as_there_is_room() {
        let driver = FakeDriver::new(Pace::AtOnce);
        let link = link(&driver, MIB);
        let pinned: Vec<Floats> = (0..3).map(|i| link.pin(vec![i as f32; 100_000])).collect();
        assert!(matches!(pinned[..], [Floats::Pinned(_), Floats::Heap(_), Floats::Heap(_)]));
        assert!(link.dma.pool().budget().available() >= MIB / 4, "a quarter is left");
        assert!(pinned.iter().enumerate().all(|(i, floats)| floats.iter().all(|x| *x == i as f32)));
    }

    #[test]
    fn a_full_card_is_an_error_and_nothing_else() {
        let driver = FakeDriver::new(Pace::AtOnce);
        let link = link(&driver, MIB);
        link.prepare(1 << 40).unwrap();
        let copy = link.upload(&Bytes::from(pattern(1, 1000))).unwrap();
        assert_eq!(link.download(&copy).unwrap(), pattern(1, 1000), "without an arena");
        let error = link.memory.allocate(1 << 40, false).map(drop).unwrap_err();
        assert_eq!(error, DeviceError::OutOfMemory { bytes: 1 << 40 });
        link.prepare(4096).unwrap();
        driver.fail_copy(0, Failure::WhenMade);
        assert!(link.upload(&Bytes::from(pattern(0, 1000))).is_err());
        assert_eq!(link.arena().clone().unwrap().arena.used(), 0);
        let copy = link.upload(&Bytes::from(pattern(1, 1000))).unwrap();
        assert_eq!(link.download(&copy).unwrap(), pattern(1, 1000));
        let elsewhere = DeviceBytes::from(Bytes::from_static(b"here"));
        assert!(matches!(link.download(&elsewhere), Err(LinkError::Elsewhere { .. })));
    }
}
