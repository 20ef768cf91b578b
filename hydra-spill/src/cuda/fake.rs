//! A driver without a card, for tests: it uses the full freedom of a driver, and checks its callers.
//!
//! The card's memory is a heap with its own addresses. Each stream is a thread that makes the copies at the
//! time that its [`Pace`] specifies, so that a caller that does not wait sees wrong bytes. A copy that
//! accesses invalid memory, or memory that is freed during the copy, is recorded, and the test fails when the
//! driver is dropped.

use super::driver::{CopyStream, DeviceMemory, Driver, DriverError};
use std::alloc::Layout;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

const PAGE: usize = 4096;
/// The content of the card's memory before anything is written.
const UNWRITTEN: u8 = 0xCD;
/// How long a copy waits for one in the other direction before the test fails.
const RENDEZVOUS: Duration = Duration::from_secs(60);

/// The time at which a stream makes its copies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// Before the call that requests the copy returns: later writes to its source are not copied.
    AtOnce,
    /// Only when awaited, and only the awaited ones: a caller that does not wait sees nothing.
    WhenAwaited,
    /// This long after the previous one, whether awaited or not.
    After(Duration),
}

/// The way in which a copy fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The call that requests it returns the error.
    WhenAsked,
    /// The call panics.
    Panics,
    /// The call succeeds, nothing is copied, and waiting returns the error.
    WhenMade,
}

/// The driver; clones share its state.
#[derive(Clone, Debug)]
pub(crate) struct FakeDriver {
    shared: Arc<FakeShared>,
}

#[derive(Debug)]
struct FakeShared {
    pace: Pace,
    state: Mutex<CardState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CardState {
    /// The card's memory, by address.
    card: BTreeMap<u64, Vec<u8>>,
    next_address: u64,
    /// Page-locked memory: address and size.
    pages: BTreeMap<usize, usize>,
    page_limit: Option<usize>,
    lockings: usize,
    /// The number of requested copies.
    copies: u64,
    failure: Option<(u64, Failure)>,
    /// Requested copies that are not over.
    under_way: Vec<Copy>,
    /// The maximum number of copies in progress.
    most_under_way: usize,
    /// The directions that have reached the rendezvous, if there is one.
    rendezvous: Option<[bool; 2]>,
    violations: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
struct Copy {
    number: u64,
    up: bool,
    host: Range<usize>,
    card: Range<u64>,
    fails: bool,
}

fn refused(call: &'static str, code: &str, meaning: &str) -> DriverError {
    DriverError::Call { call, code: code.to_owned(), meaning: meaning.to_owned() }
}

fn overlap<T: PartialOrd>(a: &Range<T>, b: &Range<T>) -> bool {
    a.start < b.end && b.start < a.end
}

impl FakeDriver {
    pub(crate) fn new(pace: Pace) -> Self {
        // The card's addresses are not heap addresses.
        let state = CardState { next_address: 0x7_0000_0000_0000, ..CardState::default() };
        Self { shared: Arc::new(FakeShared { pace, state: Mutex::new(state), changed: Condvar::new() }) }
    }

    /// Refuses to lock more than this many bytes in total.
    pub(crate) fn limit_pages(&self, bytes: usize) {
        self.shared.state().page_limit = Some(bytes);
    }

    /// Makes the copy after the next `after` ones fail.
    pub(crate) fn fail_copy(&self, after: u64, failure: Failure) {
        let mut state = self.shared.state();
        state.failure = Some((state.copies + after, failure));
    }

    /// Makes the first copy in each direction wait for one in the other.
    pub(crate) fn meet(&self) {
        self.shared.state().rendezvous = Some([false; 2]);
    }

    /// Allocates memory of the card, aligned like an arena's ranges.
    pub(crate) fn allocate(&self, bytes: usize) -> u64 {
        let mut state = self.shared.state();
        let address = state.next_address;
        // A gap after each allocation, so that a copy beyond its end does not reach the next one.
        state.next_address += (bytes as u64 + 1).next_multiple_of(512) + 4096;
        state.card.insert(address, vec![UNWRITTEN; bytes]);
        address
    }

    pub(crate) fn free(&self, address: u64) {
        let mut state = self.shared.state();
        let memory = state.card.remove(&address).unwrap();
        let range = address..address + memory.len() as u64;
        if state.under_way.iter().any(|copy| overlap(&copy.card, &range)) {
            state.violations.push(format!("memory of the card at {address:x} was freed during a copy"));
        }
    }

    /// The card's current bytes at this address.
    pub(crate) fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut state = self.shared.state();
        state.on_card(&(address..address + bytes as u64)).unwrap().to_vec()
    }

    /// Returns whether no copy is in progress there.
    pub(crate) fn is_quiet(&self, address: u64, bytes: usize) -> bool {
        let range = address..address + bytes as u64;
        !self.shared.state().under_way.iter().any(|copy| overlap(&copy.card, &range))
    }

    /// The number of requested copies.
    pub(crate) fn copies(&self) -> u64 {
        self.shared.state().copies
    }

    /// The maximum number of copies in progress.
    pub(crate) fn most_under_way(&self) -> usize {
        self.shared.state().most_under_way
    }

    /// The page-locked bytes.
    pub(crate) fn locked(&self) -> usize {
        self.shared.state().pages.values().sum()
    }

    /// The number of times that pages were locked.
    pub(crate) fn lockings(&self) -> usize {
        self.shared.state().lockings
    }

    /// Takes the recorded violations.
    pub(crate) fn violations(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state().violations)
    }
}

// SAFETY: each allocation is a heap allocation, until it is unlocked.
unsafe impl Driver for FakeDriver {
    fn lock_pages(&self, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        let mut state = self.shared.state();
        let locked: usize = state.pages.values().sum();
        let refusal = refused("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory");
        if state.page_limit.is_some_and(|limit| locked + bytes > limit) {
            return Err(refusal);
        }
        let layout = Layout::from_size_align(bytes, PAGE).unwrap();
        // SAFETY: the pool never requests an empty allocation.
        let memory = NonNull::new(unsafe { std::alloc::alloc(layout) }).ok_or(refusal)?;
        // SAFETY: this many bytes were allocated. The pattern reveals bytes that the caller did not write.
        unsafe { memory.write_bytes(UNWRITTEN, bytes) };
        state.pages.insert(memory.as_ptr().expose_provenance(), bytes);
        state.lockings += 1;
        Ok(memory)
    }

    unsafe fn unlock_pages(&self, memory: NonNull<u8>) -> Result<(), DriverError> {
        let mut state = self.shared.state();
        let start = memory.as_ptr().addr();
        let bytes = state.pages.remove(&start).expect("memory that this driver has locked");
        if state.under_way.iter().any(|copy| overlap(&copy.host, &(start..start + bytes))) {
            state.violations.push(format!("page-locked memory at {start:x} was freed during a copy"));
        }
        // SAFETY: allocated above with the same layout, and the caller no longer uses it.
        unsafe { std::alloc::dealloc(memory.as_ptr(), Layout::from_size_align(bytes, PAGE).unwrap()) };
        Ok(())
    }

    fn open_stream(&self, marks: usize) -> Result<Box<dyn CopyStream>, DriverError> {
        let queue = Arc::new(Queue::default());
        let (shared, source) = (self.shared.clone(), queue.clone());
        let worker = std::thread::spawn(move || source.work(&shared));
        let shared = self.shared.clone();
        Ok(Box::new(Stream { shared, queue, worker: Some(worker), marks: vec![0; marks] }))
    }

    fn memory(&self) -> Result<DeviceMemory, DriverError> {
        let total = 1 << 30;
        let used = self.shared.state().card.values().map(|memory| memory.len() as u64).sum::<u64>();
        Ok(DeviceMemory { free: total - used, total })
    }
}

impl FakeShared {
    fn state(&self) -> MutexGuard<'_, CardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a requested copy.
    fn ask(&self, up: bool, host: Range<usize>, card: Range<u64>) -> Result<Copy, DriverError> {
        let mut state = self.state();
        let number = state.copies;
        state.copies += 1;
        let failure = state.failure.filter(|(at, _)| *at == number).map(|(_, failure)| failure);
        let call = if up { "cuMemcpyHtoDAsync" } else { "cuMemcpyDtoHAsync" };
        assert_ne!(failure, Some(Failure::Panics), "requested by the test");
        if failure == Some(Failure::WhenAsked) {
            return Err(refused(call, "CUDA_ERROR_ILLEGAL_ADDRESS", "requested by the test"));
        }
        if state.on_card(&card).is_none() {
            state.violations.push(format!("copy {number} leaves its memory on the card: {card:x?}"));
            return Err(refused(call, "CUDA_ERROR_INVALID_VALUE", "no memory of the card"));
        }
        let locked = state.pages.range(..=host.start).next_back();
        if locked.is_none_or(|(at, bytes)| at + bytes < host.end) {
            state.violations.push(format!("copy {number} uses memory that is not page-locked: {host:x?}"));
        }
        let copy = Copy { number, up, host, card, fails: failure == Some(Failure::WhenMade) };
        state.under_way.push(copy.clone());
        state.most_under_way = state.most_under_way.max(state.under_way.len());
        Ok(copy)
    }

    /// Makes a copy.
    fn make(&self, copy: &Copy) -> Result<(), DriverError> {
        let mut state = self.rendezvous(copy.up);
        state.under_way.retain(|other| other != copy);
        if copy.fails {
            return Err(refused("cuEventSynchronize", "CUDA_ERROR_LAUNCH_FAILED", "requested by the test"));
        }
        // If the memory was freed in the meantime, that is already recorded.
        let Some(card) = state.on_card(&copy.card) else { return Ok(()) };
        let host = std::ptr::with_exposed_provenance_mut::<u8>(copy.host.start);
        // SAFETY: the caller keeps the host's range valid until the copy is over, and the card's has the same
        // length and is borrowed.
        unsafe {
            match copy.up {
                true => host.copy_to_nonoverlapping(card.as_mut_ptr(), card.len()),
                false => host.copy_from_nonoverlapping(card.as_ptr(), card.len()),
            }
        }
        Ok(())
    }

    /// Waits for a copy in the other direction, if the test requests it.
    fn rendezvous(&self, up: bool) -> MutexGuard<'_, CardState> {
        let mut state = self.state();
        if let Some(arrived) = &mut state.rendezvous {
            arrived[usize::from(up)] = true;
            self.changed.notify_all();
        }
        let alone = |state: &mut CardState| state.rendezvous.is_some_and(|arrived| arrived != [true; 2]);
        let waited = self.changed.wait_timeout_while(state, RENDEZVOUS, alone);
        let (mut state, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            state.rendezvous = None;
            state.violations.push("no copy was made in the other direction meanwhile".to_owned());
        }
        state
    }
}

impl CardState {
    fn on_card(&mut self, range: &Range<u64>) -> Option<&mut [u8]> {
        let (start, memory) = self.card.range_mut(..=range.start).next_back()?;
        memory.get_mut((range.start - start) as usize..(range.end - start) as usize)
    }
}

impl Drop for FakeShared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.pages.is_empty() {
            state.violations.push(format!("page-locked memory was never freed: {:x?}", state.pages));
        }
        if !std::thread::panicking() {
            assert_eq!(state.violations, Vec::<String>::new());
        }
    }
}

/// The copies of a stream.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<Queued>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queued {
    waiting: VecDeque<Copy>,
    /// The numbers of copies that were enqueued, made and awaited.
    enqueued: u64,
    made: u64,
    awaited: u64,
    /// The first failure that was not returned yet.
    failure: Option<DriverError>,
    closed: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, Queued> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream's thread.
    fn work(&self, shared: &FakeShared) {
        while let Some(copy) = self.next(shared.pace) {
            if let Pace::After(delay) = shared.pace {
                doze(delay);
            }
            let made = shared.make(&copy);
            let mut state = self.state();
            state.made += 1;
            if let Err(failure) = made {
                state.failure.get_or_insert(failure);
            }
            self.changed.notify_all();
        }
    }

    fn next(&self, pace: Pace) -> Option<Copy> {
        let early = |state: &Queued| matches!(pace, Pace::WhenAwaited) && state.made >= state.awaited;
        let idle = |state: &mut Queued| !state.closed && (state.waiting.is_empty() || early(state));
        let state = self.changed.wait_while(self.state(), idle);
        state.unwrap_or_else(PoisonError::into_inner).waiting.pop_front()
    }

    fn enqueue(&self, copy: Copy) -> u64 {
        let mut state = self.state();
        state.waiting.push_back(copy);
        state.enqueued += 1;
        self.changed.notify_all();
        state.enqueued
    }

    /// Waits until this many copies are made.
    fn wait(&self, copies: u64) -> MutexGuard<'_, Queued> {
        let mut state = self.state();
        state.awaited = state.awaited.max(copies);
        self.changed.notify_all();
        let state = self.changed.wait_while(state, |state| state.made < copies);
        state.unwrap_or_else(PoisonError::into_inner)
    }
}

#[expect(clippy::disallowed_methods, reason = "a fake of something slow")]
fn doze(time: Duration) {
    std::thread::sleep(time);
}

struct Stream {
    shared: Arc<FakeShared>,
    queue: Arc<Queue>,
    worker: Option<JoinHandle<()>>,
    /// The number of copies enqueued before each mark.
    marks: Vec<u64>,
}

impl Stream {
    fn copy(&self, up: bool, host: usize, card: u64, bytes: usize) -> Result<(), DriverError> {
        let copy = self.shared.ask(up, host..host + bytes, card..card + bytes as u64)?;
        let enqueued = self.queue.enqueue(copy);
        if let Pace::AtOnce = self.shared.pace {
            drop(self.queue.wait(enqueued));
        }
        Ok(())
    }
}

// SAFETY: copies are made in order, and waiting returns after the awaited ones.
unsafe impl CopyStream for Stream {
    unsafe fn upload(&mut self, from: *const u8, to: u64, bytes: usize) -> Result<(), DriverError> {
        self.copy(true, from.expose_provenance(), to, bytes)
    }

    unsafe fn download(&mut self, from: u64, to: *mut u8, bytes: usize) -> Result<(), DriverError> {
        self.copy(false, to.expose_provenance(), from, bytes)
    }

    fn mark(&mut self, mark: usize) -> Result<(), DriverError> {
        self.marks[mark] = self.queue.state().enqueued;
        Ok(())
    }

    fn wait(&mut self, mark: usize) -> Result<(), DriverError> {
        let failure = self.queue.wait(self.marks[mark]).failure.take();
        failure.map_or(Ok(()), Err)
    }

    fn drain(&mut self) -> Result<(), DriverError> {
        let all = self.queue.state().enqueued;
        let failure = self.queue.wait(all).failure.take();
        failure.map_or(Ok(()), Err)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.queue.state().closed = true;
        self.queue.changed.notify_all();
        // Joined, so that the thread releases its reference to the driver before this one does.
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

/// Every pace.
pub(crate) const PACES: [Pace; 3] = [Pace::AtOnce, Pace::WhenAwaited, Pace::After(Duration::from_micros(50))];

mod tests {
    use super::*;

    fn lock(driver: &FakeDriver, bytes: &[u8]) -> NonNull<u8> {
        let pages = driver.lock_pages(bytes.len()).unwrap();
        // SAFETY: this many bytes were locked.
        unsafe { pages.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        pages
    }

    #[test]
    fn copies_are_made_in_order_and_no_earlier_than_the_pace_says() {
        for pace in PACES {
            let driver = FakeDriver::new(pace);
            let mut stream = driver.open_stream(2).unwrap();
            let (card, pages) = (driver.allocate(4), lock(&driver, b"once"));
            // SAFETY: both have four bytes, and are freed after the stream was drained.
            unsafe { stream.upload(pages.as_ptr(), card, 4) }.unwrap();
            let early = driver.read(card, 4);
            match pace {
                Pace::AtOnce => assert_eq!(early, b"once"),
                Pace::WhenAwaited => assert_eq!(early, [UNWRITTEN; 4]),
                Pace::After(_) => {}
            }
            stream.wait(1).unwrap();
            stream.mark(0).unwrap();
            // SAFETY: as above; the second half is downloaded after it.
            unsafe { stream.download(card + 2, pages.as_ptr(), 2) }.unwrap();
            stream.wait(0).unwrap();
            assert_eq!(driver.read(card, 4), b"once");
            stream.drain().unwrap();
            // SAFETY: four bytes, which no copy writes any more.
            assert_eq!(unsafe { std::slice::from_raw_parts(pages.as_ptr(), 4) }, b"cece");
            drop(stream);
            // SAFETY: locked above, and no copy is under way.
            unsafe { driver.unlock_pages(pages) }.unwrap();
            assert_eq!((driver.copies(), driver.is_quiet(card, 4), driver.violations()), (2, true, vec![]));
        }
    }

    #[test]
    fn what_callers_must_not_do_is_noted() {
        let driver = FakeDriver::new(Pace::WhenAwaited);
        let mut stream = driver.open_stream(1).unwrap();
        let (card, pages) = (driver.allocate(16), lock(&driver, &[0; 32]));
        let unlocked = [0_u8; 16];
        // SAFETY: the fake checks ranges before it copies, and copies only valid ones.
        unsafe {
            assert!(stream.upload(pages.as_ptr(), card + 1, 16).is_err());
            stream.upload(unlocked.as_ptr(), card, 16).unwrap();
            stream.upload(pages.as_ptr(), card, 16).unwrap();
        }
        driver.free(card);
        stream.drain().unwrap();
        let noted = driver.violations().join("\n");
        for expected in ["leaves its memory", "not page-locked", "was freed during a copy"] {
            assert!(noted.contains(expected), "{noted}");
        }
        // SAFETY: locked above, and no copy is under way.
        unsafe { driver.unlock_pages(pages) }.unwrap();
    }

    #[test]
    #[should_panic(expected = "never freed")]
    fn a_driver_that_was_misused_fails_its_test() {
        let driver = FakeDriver::new(Pace::AtOnce);
        driver.lock_pages(10).map(drop).unwrap();
    }

    #[test]
    fn copies_fail_as_they_are_told_to() {
        for (failure, asked) in [(Failure::WhenAsked, true), (Failure::WhenMade, false)] {
            let driver = FakeDriver::new(Pace::WhenAwaited);
            let mut stream = driver.open_stream(1).unwrap();
            let (card, pages) = (driver.allocate(4), lock(&driver, b"text"));
            driver.fail_copy(1, failure);
            // SAFETY: both have four bytes, and are freed after the stream was drained.
            let mut copy = |at| unsafe { stream.upload(pages.as_ptr().add(at), card + at as u64, 1) };
            copy(0).unwrap();
            assert_eq!(copy(1).is_err(), asked);
            copy(2).unwrap();
            assert_eq!(stream.drain().is_ok(), asked);
            stream.drain().unwrap();
            assert_eq!(driver.read(card, 4), [b't', UNWRITTEN, b'x', UNWRITTEN]);
            // SAFETY: locked above, and no copy is under way.
            unsafe { driver.unlock_pages(pages) }.unwrap();
        }
    }
}
