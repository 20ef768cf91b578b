//! Copies between host memory and a card, in both directions concurrently.
//!
//! Each direction is a channel: a stream of the driver, and two chunks of page-locked memory. Page-locked
//! buffers are copied directly. All others are staged through the chunks: the host fills or empties one chunk
//! while the card copies the other, and small buffers share a chunk. A call enqueues all its copies, blocks
//! once, and returns when no copy accesses its caller's memory any more, also after an error or a panic.

use super::driver::{CopyStream, Driver, DriverError};
use super::pinned::{PinnedBuffer, PinnedPool};
use crate::link::Moved;
use crate::memory::aligned::AlignedBytes;
use crate::{Direction, LinkError, SpillError, alloc};
use bytes::Bytes;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The size in bytes of a staging chunk; each direction has two.
pub const STAGING_CHUNK: usize = 4 << 20;

/// The alignment of a buffer in a chunk, so that buffers do not share cache lines.
const PIECE_ALIGN: usize = 64;

/// The index of the mark after all copies; those of the chunks are 0 and 1.
const END: usize = 2;

/// Copies between the host and one card. Each direction makes one copy at a time, concurrently with the
/// other.
pub struct Dma {
    name: String,
    pool: PinnedPool,
    uploads: Mutex<Channel>,
    downloads: Mutex<Channel>,
    moved: Moved,
}

impl Dma {
    /// Returns the copy engine of the link `name`, staged in chunks of `chunk` bytes (usually
    /// [`STAGING_CHUNK`]), and takes four such chunks from the pool for as long as it lives.
    ///
    /// # Errors
    /// [`SpillError::Setup`] if the pool has no memory for the chunks or the driver has failed.
    pub fn new(
        name: impl Into<String>,
        driver: &dyn Driver,
        pool: PinnedPool,
        chunk: usize,
    ) -> Result<Self, SpillError> {
        let name = name.into();
        let owner = format!("staging of link `{name}`");
        let channel = || Channel::new(driver, &pool, chunk, &owner).map(Mutex::new);
        let (uploads, downloads) = (channel()?, channel()?);
        Ok(Self { name, pool, uploads, downloads, moved: Moved::default() })
    }

    /// Copies each part's bytes to its address on the card.
    ///
    /// # Errors
    /// [`LinkError::Transfer`] if the driver fails; the contents of the card's memory are then unspecified.
    ///
    /// # Safety
    /// At each address the card of this driver has at least as much memory as the part has bytes, which is
    /// not used until this returns. No two parts overlap.
    pub unsafe fn upload(&self, parts: &[(&[u8], u64)]) -> Result<(), LinkError> {
        let mut channel = lock(&self.uploads);
        // SAFETY: the caller's promise.
        let copied = unsafe { channel.upload(parts, &self.pool) };
        self.count(Direction::Upload, parts.iter().map(|(bytes, _)| bytes.len()).sum(), copied)
    }

    /// Copies from each part's address on the card into its bytes.
    ///
    /// # Errors
    /// [`LinkError::Transfer`] if the driver fails; the contents of the parts are then unspecified.
    ///
    /// # Safety
    /// At each address the card of this driver has at least as much memory as the part has bytes, which is
    /// not written until this returns.
    pub unsafe fn download_into(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), LinkError> {
        let bytes = parts.iter().map(|(_, out)| out.len()).sum();
        let mut channel = lock(&self.downloads);
        let parts = parts.iter_mut().map(|(from, out)| (*from, &mut **out));
        // SAFETY: the caller's promise.
        let copied = unsafe { channel.download_into(parts, &self.pool) };
        self.count(Direction::Download, bytes, copied)
    }

    /// Copies from each part's address on the card this many bytes into new host memory, which is page-locked
    /// if the pool has enough, and otherwise from the heap. It is aligned to 64 bytes.
    ///
    /// # Errors
    /// [`LinkError::Memory`] if the heap has no memory either, [`LinkError::Transfer`] if the driver fails.
    ///
    /// # Safety
    /// That of [`download_into`](Self::download_into).
    pub unsafe fn download(&self, parts: &[(u64, usize)]) -> Result<Vec<Bytes>, LinkError> {
        let mut buffers = parts.iter().map(|(_, len)| self.landing(*len)).collect::<Result<Vec<_>, _>>()?;
        let froms = parts.iter().map(|(from, _)| *from);
        let mut into: Vec<(u64, &mut [u8])> =
            froms.zip(buffers.iter_mut().map(|buffer| buffer.bytes())).collect();
        // SAFETY: the caller's promise.
        unsafe { self.download_into(&mut into) }?;
        Ok(buffers.into_iter().map(Landing::into_bytes).collect())
    }

    /// Allocates host memory for a download.
    fn landing(&self, len: usize) -> Result<Landing, LinkError> {
        if let Ok(buffer) = self.pool.take(len, &self.name) {
            return Ok(Landing::Pinned(buffer));
        }
        let heap = alloc::with_tag(None, || AlignedBytes::zeros(len));
        heap.map(Landing::Heap).map_err(|source| LinkError::Memory {
            link: self.name.clone(),
            direction: Direction::Download,
            bytes: len as u64,
            source,
        })
    }

    /// Bytes copied in this direction so far.
    pub fn moved(&self, direction: Direction) -> u64 {
        self.moved.get(direction)
    }

    /// The link's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pool of the chunks, and of the results of [`download`](Self::download).
    pub fn pool(&self) -> &PinnedPool {
        &self.pool
    }

    fn count(
        &self,
        direction: Direction,
        bytes: usize,
        copied: Result<(), DriverError>,
    ) -> Result<(), LinkError> {
        copied.map(|()| self.moved.add(direction, bytes)).map_err(|error| LinkError::Transfer {
            link: self.name.clone(),
            direction,
            bytes: bytes as u64,
            source: error.into(),
        })
    }
}

impl fmt::Debug for Dma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dma").field("name", &self.name).field("pool", &self.pool).finish_non_exhaustive()
    }
}

fn lock(channel: &Mutex<Channel>) -> MutexGuard<'_, Channel> {
    // A panic leaves the channel drained, and every call starts with empty chunks.
    channel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// New host memory.
enum Landing {
    Pinned(PinnedBuffer),
    Heap(AlignedBytes),
}

impl Landing {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Pinned(buffer) => buffer,
            Self::Heap(buffer) => buffer.as_mut(),
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::Pinned(buffer) => buffer.into_bytes(),
            Self::Heap(buffer) => Bytes::from_owner(buffer),
        }
    }
}

/// One direction.
struct Channel {
    stream: Box<dyn CopyStream>,
    chunks: [PinnedBuffer; 2],
}

impl Channel {
    fn new(driver: &dyn Driver, pool: &PinnedPool, chunk: usize, owner: &str) -> Result<Self, SpillError> {
        let chunk = chunk.max(PIECE_ALIGN).next_multiple_of(PIECE_ALIGN);
        let chunks = [pool.take(chunk, owner)?, pool.take(chunk, owner)?];
        Ok(Self { stream: driver.open_stream(END + 1)?, chunks })
    }

    /// # Safety
    /// As [`Dma::upload`].
    unsafe fn upload(&mut self, parts: &[(&[u8], u64)], pool: &PinnedPool) -> Result<(), DriverError> {
        let mut in_flight = InFlightCopies::new(self);
        for (bytes, to) in parts.iter().filter(|(bytes, _)| !bytes.is_empty()) {
            // SAFETY: the caller's promise; the bytes are borrowed until the copies are over.
            unsafe {
                match pool.contains(bytes) {
                    true => in_flight.channel.stream.upload(bytes.as_ptr(), *to, bytes.len())?,
                    false => in_flight.stage_upload(bytes, *to)?,
                }
            }
        }
        in_flight.land()
    }

    /// # Safety
    /// As [`Dma::download_into`].
    unsafe fn download_into<'a>(
        &mut self,
        parts: impl Iterator<Item = (u64, &'a mut [u8])>,
        pool: &PinnedPool,
    ) -> Result<(), DriverError> {
        let mut in_flight = InFlightCopies::new(self);
        for (from, out) in parts.filter(|(_, out)| !out.is_empty()) {
            // SAFETY: the caller's promise; the bytes are borrowed until the copies are over, and are not
            // used here before that.
            unsafe {
                match pool.contains(out) {
                    true => in_flight.channel.stream.download(from, out.as_mut_ptr(), out.len())?,
                    false => in_flight.stage_download(from, out)?,
                }
            }
        }
        in_flight.land()
    }
}

/// A downloaded piece of a chunk.
struct Piece<'a> {
    at: usize,
    out: &'a mut [u8],
}

impl Piece<'_> {
    /// # Safety
    /// The chunk at `base` has the piece's bytes, and no copy writes them.
    unsafe fn land(self, base: *const u8) {
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(base.add(self.at), self.out.len()) };
        self.out.copy_from_slice(bytes);
    }
}

/// The copies of one call. They are always over when this is dropped.
struct InFlightCopies<'channel, 'out> {
    channel: &'channel mut Channel,
    /// The chunk that is being filled.
    now: usize,
    /// The used bytes of that chunk.
    used: usize,
    /// The downloaded pieces in each chunk.
    pieces: [Vec<Piece<'out>>; 2],
    landed: bool,
}

impl<'channel, 'out> InFlightCopies<'channel, 'out> {
    fn new(channel: &'channel mut Channel) -> Self {
        Self { channel, now: 0, used: 0, pieces: Default::default(), landed: false }
    }

    /// Copies through the chunks.
    ///
    /// # Safety
    /// As [`Dma::upload`].
    unsafe fn stage_upload(&mut self, mut bytes: &[u8], mut to: u64) -> Result<(), DriverError> {
        while !bytes.is_empty() {
            let (place, len) = self.place(bytes.len())?;
            let (piece, rest) = bytes.split_at(len);
            // SAFETY: this part of the chunk is free, no copy of it is in progress, and the caller guarantees
            // the card's memory.
            unsafe {
                place.copy_from_nonoverlapping(piece.as_ptr(), len);
                self.channel.stream.upload(place, to, len)?;
            }
            (bytes, to) = (rest, to + len as u64);
        }
        Ok(())
    }

    /// Copies into the chunks; the pieces are copied out of them once they have arrived.
    ///
    /// # Safety
    /// As [`Dma::download_into`].
    unsafe fn stage_download(&mut self, mut from: u64, mut out: &'out mut [u8]) -> Result<(), DriverError> {
        while !out.is_empty() {
            let (place, len) = self.place(out.len())?;
            let (piece, rest) = out.split_at_mut(len);
            // SAFETY: this part of the chunk is free, and the caller guarantees the card's memory.
            unsafe { self.channel.stream.download(from, place, len)? };
            let at = place.addr() - self.channel.chunks[self.now].base().addr();
            self.pieces[self.now].push(Piece { at, out: piece });
            (out, from) = (rest, from + len as u64);
        }
        Ok(())
    }

    /// Returns the next free position in a chunk, and how many of `bytes` bytes fit there.
    fn place(&mut self, bytes: usize) -> Result<(*mut u8, usize), DriverError> {
        if self.used == self.channel.chunks[self.now].len() {
            self.turn()?;
        }
        let chunk = &self.channel.chunks[self.now];
        let len = bytes.min(chunk.len() - self.used);
        // SAFETY: within the chunk.
        let place = unsafe { chunk.base().add(self.used) };
        // The chunk's length is also a multiple, so this never exceeds its end.
        self.used += len.next_multiple_of(PIECE_ALIGN);
        Ok((place, len))
    }

    /// Switches to the other chunk as soon as its copies are over.
    fn turn(&mut self) -> Result<(), DriverError> {
        self.channel.stream.mark(self.now)?;
        (self.now, self.used) = (1 - self.now, 0);
        // If its mark is from an earlier call, everything before it is already over.
        self.channel.stream.wait(self.now)?;
        self.land_chunk(self.now);
        Ok(())
    }

    /// Copies the pieces out of a chunk whose copies are over.
    fn land_chunk(&mut self, chunk: usize) {
        let base = self.channel.chunks[chunk].base();
        for piece in self.pieces[chunk].drain(..) {
            // SAFETY: the piece was placed in this chunk, and the copies into it are over.
            unsafe { piece.land(base) };
        }
    }

    /// Waits until all copies are over, and empties the chunks.
    fn land(mut self) -> Result<(), DriverError> {
        self.channel.stream.mark(END)?;
        self.channel.stream.wait(END)?;
        self.landed = true;
        self.land_chunk(1 - self.now);
        self.land_chunk(self.now);
        Ok(())
    }
}

impl Drop for InFlightCopies<'_, '_> {
    fn drop(&mut self) {
        if !self.landed {
            // The original error was already returned; errors that follow from it are ignored.
            let _ = self.channel.stream.drain();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::arena::{Arena, Lease, offsets};
    use super::super::fake::{Failure, FakeDriver, PACES, Pace};
    use super::super::pinned::PinnedError;
    use super::*;
    use crate::link::conformance::pattern;
    use crate::memory::aligned::ALIGN;
    use crate::{Budget, BudgetError};
    use hydra_core::ByteSize;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    /// The parts of a link, over a simulated card.
    struct Bench {
        driver: FakeDriver,
        dma: Dma,
    }

    impl Bench {
        fn new(pace: Pace, chunk: usize) -> Self {
            let driver = FakeDriver::new(pace);
            let budget = Budget::new("page-locked memory", ByteSize::mib(8));
            let pool = PinnedPool::new(Arc::new(driver.clone()), budget);
            let dma = Dma::new("fake", &driver, pool, chunk).unwrap();
            Self { driver, dma }
        }

        fn upload(&self, parts: &[(&[u8], u64)]) -> Result<(), LinkError> {
            // SAFETY: the fake checks that the memory exists before it copies, and the tests use it
            // sequentially.
            let result = unsafe { self.dma.upload(parts) };
            let targets = parts.iter().map(|(bytes, to)| (*to, bytes.len()));
            assert!(targets.into_iter().all(|(to, len)| self.driver.is_quiet(to, len)));
            result
        }

        fn download_into(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), LinkError> {
            // SAFETY: as above.
            let result = unsafe { self.dma.download_into(parts) };
            assert!(parts.iter().all(|(from, out)| self.driver.is_quiet(*from, out.len())));
            result
        }

        fn download(&self, from: u64, len: usize) -> Result<Bytes, LinkError> {
            // SAFETY: as above.
            unsafe { self.dma.download(&[(from, len)]) }.map(|mut all| all.remove(0))
        }

        /// Uploads bytes to newly allocated memory on the card.
        fn uploaded(&self, bytes: &[u8]) -> u64 {
            let at = self.driver.allocate(bytes.len());
            self.upload(&[(bytes, at)]).unwrap();
            at
        }

        fn pinned(&self, bytes: &[u8]) -> Bytes {
            let mut buffer = self.dma.pool.take(bytes.len(), "test").unwrap();
            buffer.copy_from_slice(bytes);
            buffer.into_bytes()
        }

        fn moved(&self) -> (u64, u64) {
            (self.dma.moved(Direction::Upload), self.dma.moved(Direction::Download))
        }
    }

    const CHUNKS: [usize; 3] = [1, 4096, 1 << 16];
    const SIZES: [usize; 8] = [0, 1, 63, 64, 65, 4096, 8192, 100_003];

    fn benches() -> impl Iterator<Item = Bench> {
        PACES.into_iter().flat_map(|pace| CHUNKS.map(|chunk| Bench::new(pace, chunk)))
    }

    #[test]
    fn contents_arrive_from_anywhere_and_come_back_anywhere() {
        for bench in benches() {
            for len in SIZES {
                // Unaligned, on the heap and in page-locked memory.
                let bytes = pattern(len, len + 3);
                let pinned = bench.pinned(&bytes);
                for host in [&bytes[3..], &pinned[3..]] {
                    let before = bench.moved();
                    let at = bench.uploaded(host);
                    assert_eq!(bench.driver.read(at, len), host);
                    let mut heap = vec![0; len + 1];
                    let mut locked = bench.dma.pool.take(len + 1, "test").unwrap();
                    bench.download_into(&mut [(at, &mut heap[1..])]).unwrap();
                    bench.download_into(&mut [(at, &mut locked[1..])]).unwrap();
                    assert_eq!((&heap[1..], &locked[1..]), (host, host));
                    let len = len as u64;
                    assert_eq!(bench.moved(), (before.0 + len, before.1 + 2 * len));
                    bench.driver.free(at);
                }
            }
        }
    }

    #[test]
    fn parts_of_all_kinds_go_in_one_call() {
        for bench in benches() {
            let parts: Vec<Vec<u8>> = (0..40).map(|i| pattern(i, [5, 700, 0, 9000][i % 4])).collect();
            let hosts: Vec<Bytes> = parts
                .iter()
                .enumerate()
                .map(|(i, part)| if i % 3 == 0 { bench.pinned(part) } else { part.clone().into() })
                .collect();
            let (starts, len) = offsets(hosts.iter().map(|host| host.len() as u64));
            let base = bench.driver.allocate(len as usize);
            let addresses: Vec<u64> = starts.iter().map(|start| base + start).collect();
            let sources: Vec<_> = hosts.iter().map(|host| &host[..]).zip(addresses.clone()).collect();
            bench.upload(&sources).unwrap();
            let mut outs: Vec<Vec<u8>> = hosts.iter().map(|host| vec![0; host.len()]).collect();
            let mut targets: Vec<_> =
                addresses.iter().copied().zip(outs.iter_mut().map(|out| &mut out[..])).collect();
            bench.download_into(&mut targets).unwrap();
            assert_eq!(outs, parts);
        }
    }

    #[test]
    fn page_locked_memory_is_copied_from_where_it_is() {
        let bench = Bench::new(Pace::WhenAwaited, 64);
        let parts: Vec<Bytes> = (0..5).map(|i| bench.pinned(&pattern(i, 10_000))).collect();
        let base = bench.driver.allocate(50_000);
        let sources: Vec<_> =
            parts.iter().map(|part| &part[..]).zip((0..5).map(|i| base + i * 10_000)).collect();
        bench.upload(&sources).unwrap();
        assert_eq!(bench.driver.copies(), 5, "one copy for each part");
        let downloaded = bench.download(base, 50_000).unwrap();
        assert_eq!((bench.driver.copies(), downloaded.len()), (6, 50_000));
        assert_eq!(downloaded, parts.concat());
    }

    #[test]
    fn a_chunk_is_filled_or_emptied_while_the_other_one_is_copied() {
        // A caller that waits longer than necessary has fewer copies in progress, because copies run only
        // when awaited.
        let bench = Bench::new(Pace::WhenAwaited, 64);
        let host = pattern(3, 64 * 10);
        bench.uploaded(&host);
        assert_eq!((bench.driver.copies(), bench.driver.most_under_way()), (10, 2));
        let bench = Bench::new(Pace::WhenAwaited, 64);
        let from = bench.driver.allocate(host.len());
        bench.download_into(&mut [(from, &mut vec![0; host.len()])]).unwrap();
        assert_eq!((bench.driver.copies(), bench.driver.most_under_way()), (10, 2));
    }

    #[test]
    fn small_buffers_share_a_chunk() {
        let bench = Bench::new(Pace::WhenAwaited, 4096);
        let base = bench.driver.allocate(64 * 100);
        let parts: Vec<_> = (0..64).map(|i| pattern(i, 60)).collect();
        let sources: Vec<_> = (0..64).map(|i| (&parts[i][..], base + 100 * i as u64)).collect();
        bench.upload(&sources).unwrap();
        assert_eq!(bench.driver.most_under_way(), 64, "none is awaited before the end");
    }

    #[test]
    fn the_host_may_write_its_buffers_when_a_call_returns() {
        for bench in benches() {
            let mut locked = bench.dma.pool.take(5000, "test").unwrap();
            let mut heap = pattern(1, 5000);
            locked.copy_from_slice(&heap);
            let (first, second) = (bench.driver.allocate(5000), bench.driver.allocate(5000));
            bench.upload(&[(&locked, first), (&heap, second)]).unwrap();
            locked.fill(0);
            heap.fill(0);
            assert_eq!(bench.driver.read(first, 5000), pattern(1, 5000));
            assert_eq!(bench.driver.read(second, 5000), pattern(1, 5000));
        }
    }

    #[test]
    fn what_is_fetched_is_aligned_and_on_the_heap_if_need_be() {
        let bench = Bench::new(Pace::WhenAwaited, 4096);
        let at = bench.uploaded(&pattern(1, 1000));
        let downloaded = bench.download(at, 1000).unwrap();
        assert!(bench.dma.pool.contains(&downloaded));
        drop(downloaded.clone());
        let budget = bench.dma.pool.budget();
        let rest = budget.reserve(budget.available(), "another").unwrap();
        let heap = bench.download(at, 1000).unwrap();
        assert!(!bench.dma.pool.contains(&heap) && heap.as_ptr().addr().is_multiple_of(ALIGN));
        assert_eq!((&downloaded, &heap), (&pattern(1, 1000).into(), &pattern(1, 1000).into()));
        assert_eq!(bench.download(at, 0).unwrap().len(), 0);
        let endless = bench.download(at, usize::MAX / 2).unwrap_err();
        assert!(matches!(endless, LinkError::Memory { direction: Direction::Download, .. }), "{endless}");
        drop(rest);
    }

    /// Two parts that are staged, through both chunks several times, and two that are not.
    fn mixed(bench: &Bench, seed: usize) -> [Bytes; 4] {
        let part = |i| pattern(seed + i, 500);
        [part(0).into(), bench.pinned(&part(1)), part(2).into(), bench.pinned(&part(3))]
    }

    #[test]
    fn a_failed_copy_is_told_and_leaves_the_channel_as_it_was() {
        for pace in PACES {
            for failure in [Failure::WhenAsked, Failure::WhenMade] {
                let bench = Bench::new(pace, 128);
                let base = bench.driver.allocate(2000);
                let addresses = [0, 500, 1000, 1500].map(|at| base + at);
                let parts = mixed(&bench, 1);
                let sources: Vec<_> = parts.iter().map(|part| &part[..]).zip(addresses).collect();
                // Four copies for each staged part and one for each other.
                for copy in 0..10 {
                    let before = bench.moved();
                    bench.driver.fail_copy(copy, failure);
                    let error = bench.upload(&sources).unwrap_err();
                    assert_eq!(
                        error.to_string(),
                        "link `fake`: a copy of 2000 bytes to the device failed; see the cause"
                    );
                    let cause = std::error::Error::source(&error).unwrap().to_string();
                    assert!(
                        cause.contains("CUDA_ERROR_") && cause.ends_with("requested by the test"),
                        "{cause}"
                    );
                    bench.upload(&sources).unwrap();
                    assert_eq!(bench.driver.read(base, 2000), parts.concat());

                    let mut out = vec![0; 2000];
                    bench.driver.fail_copy(copy % 8, failure);
                    let down = |out: &mut [u8]| {
                        let (one, two) = out.split_at_mut(500);
                        bench.download_into(&mut [(base, one), (base + 500, two)])
                    };
                    assert!(matches!(down(&mut out), Err(LinkError::Transfer { bytes: 2000, .. })));
                    down(&mut out).unwrap();
                    assert_eq!(out, parts.concat());
                    assert_eq!(
                        bench.moved(),
                        (before.0 + 2000, before.1 + 2000),
                        "failed copies are not counted"
                    );
                }
            }
        }
    }

    #[test]
    fn a_panic_leaves_no_copy_under_way() {
        for pace in PACES {
            let bench = Bench::new(pace, 128);
            let at = bench.driver.allocate(500);
            let heap = pattern(7, 500);
            bench.driver.fail_copy(3, Failure::Panics);
            let panicked = catch_unwind(AssertUnwindSafe(|| bench.upload(&[(&heap, at)])));
            assert!(panicked.is_err() && bench.driver.is_quiet(at, 500));
            bench.upload(&[(&heap, at)]).unwrap();
            assert_eq!(bench.driver.read(at, 500), heap);
        }
    }

    #[test]
    fn chunks_that_the_pool_cannot_give_are_refused_in_words() {
        let driver = FakeDriver::new(Pace::AtOnce);
        let budget = Budget::new("page-locked memory", ByteSize(3 * 4096));
        let pool = PinnedPool::new(Arc::new(driver.clone()), budget.clone());
        let error = Dma::new("fake", &driver, pool, 4096).unwrap_err();
        let SpillError::Setup(error) = error else { panic!("{error}") };
        let Some(PinnedError::Budget { source }) = error.downcast_ref() else { panic!("{error}") };
        let BudgetError::Refused { owner, requested, .. } = source;
        assert_eq!((owner.as_str(), *requested), ("staging of link `fake`", 4096));
        assert_eq!((budget.used(), driver.locked()), (0, 0));
    }

    #[test]
    fn both_directions_copy_at_the_same_time() {
        for pace in PACES {
            let bench = Bench::new(pace, 4096);
            let (from, to) = (bench.uploaded(&pattern(1, 100)), bench.driver.allocate(100));
            let mut out = vec![0; 100];
            bench.driver.meet();
            std::thread::scope(|scope| {
                scope.spawn(|| bench.upload(&[(&pattern(2, 100), to)]).unwrap());
                scope.spawn(|| bench.download_into(&mut [(from, &mut out)]).unwrap());
            });
            assert_eq!((out, bench.driver.read(to, 100)), (pattern(1, 100), pattern(2, 100)));
            assert_eq!(bench.driver.violations(), [""; 0]);
        }
    }

    #[test]
    fn threads_copy_in_both_directions_without_mixing_anything_up() {
        for pace in PACES {
            let bench = Bench::new(pace, 1024);
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let bench = &bench;
                    scope.spawn(move || {
                        for round in 0..25 {
                            let host = pattern(thread * 100 + round, 5000);
                            let host = if round % 2 == 0 { host.into() } else { bench.pinned(&host) };
                            let at = bench.uploaded(&host);
                            assert_eq!(bench.download(at, 5000).unwrap(), host);
                            bench.driver.free(at);
                        }
                    });
                }
            });
            assert_eq!(bench.moved(), (4 * 25 * 5000, 4 * 25 * 5000));
        }
    }

    /// A promotion as a link makes it: one range of the arena, one call, one wait.
    fn promote(bench: &Bench, arena: &Arena, base: u64, buffers: &[Vec<u8>]) -> (Lease, Vec<u64>) {
        let (starts, len) = offsets(buffers.iter().map(|buffer| buffer.len() as u64));
        let lease = arena.place_when_free(len).unwrap();
        let addresses: Vec<u64> = starts.iter().map(|start| base + lease.start() + start).collect();
        let parts: Vec<_> = buffers.iter().map(|buffer| &buffer[..]).zip(addresses.clone()).collect();
        bench.upload(&parts).unwrap();
        (lease, addresses)
    }

    #[test]
    fn promotions_follow_each_other_through_an_arena_and_none_is_overwritten_while_it_is_read() {
        for pace in PACES {
            let bench = Bench::new(pace, 1024);
            let arena = Arena::new(2 * 4096);
            let base = bench.driver.allocate(arena.capacity() as usize);
            let buffers = |round: usize| {
                [100 + 37 * round % 900, 2000, 1 + round % 7].map(|len| pattern(round, len)).to_vec()
            };
            // The same number as a double buffer: one in use, one waiting.
            let (send, promoted) = std::sync::mpsc::sync_channel(0);
            // Reported at the end, because after a panic here the copier would wait forever for held memory.
            let mut wrong = Vec::new();
            std::thread::scope(|scope| {
                let (bench, arena) = (&bench, &arena);
                scope.spawn(move || {
                    for round in 0..200 {
                        send.send(promote(bench, arena, base, &buffers(round))).unwrap();
                    }
                });
                for (round, (lease, addresses)) in promoted.iter().enumerate() {
                    for (buffer, at) in buffers(round).iter().zip(addresses) {
                        let right = bench.driver.read(at, buffer.len()) == *buffer;
                        if !right || bench.download(at, buffer.len()).unwrap() != *buffer {
                            wrong.push(round);
                        }
                    }
                    drop(lease);
                }
            });
            assert_eq!((arena.used(), wrong), (0, vec![]), "{pace:?}");
        }
    }
}
