//! The counting allocator, which attributes blocks of host memory to logical devices.
//!
//! On a CPU every logical device allocates from the same heap. To measure one of them, each thread has a tag,
//! the device it works for or none, and the allocator records the thread's tag in a header before each block.
//! A block is charged to the device in its header and credited to the same device when it is freed, on any
//! thread. A program installs the allocator with one line:
//!
//! ```
//! use hydra_spill::alloc::CountingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
//! ```
//!
//! Blocks of 64 KiB and more start at varying cache lines, so that loops over several of them run at the
//! speed of memory.
//!
//! The requested size is charged: headers and the inner allocator's rounding are costs of measuring and of
//! the heap, which a real device would not have.
//!
//! This module uses only the heap below it. It imports nothing else of this crate and never allocates.

mod block;
mod figures;

pub(crate) use figures::note_reserved;
pub use figures::{MAX_DEVICES, TagLease, tag_thread, with_tag};

use block::{Header, header_of, is_coloured, open, whole};
use figures::{INSTALLED, count, counters, credit, recharge, tag, tag_of};
use hydra_core::{DeviceId, MemoryProbe};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_long;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

/// A global allocator that counts, per logical device, the bytes that it allocates from `A`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator<A = System> {
    inner: A,
}

impl<A> CountingAllocator<A> {
    /// Returns an allocator that counts the allocations of `inner`.
    pub const fn new(inner: A) -> Self {
        Self { inner }
    }
}

/// The number of blocks ever allocated for `device`. A reallocated block counts once.
pub fn allocations(device: DeviceId) -> u64 {
    counters(tag_of(device)).count.load(Relaxed)
}

/// The peak number of bytes that `device` had in use beyond the reservations in its budget, since its peak
/// was reset. The budget must be [measured as](crate::Budget::measured_as) that device.
pub fn unreserved(device: DeviceId) -> u64 {
    counters(tag_of(device)).unreserved.load(Relaxed)
}

/// Returns whether a [`CountingAllocator`] is installed, that is, whether it has served an allocation.
pub fn installed() -> bool {
    INSTALLED.load(Relaxed)
}

/// Reads the counters of the counting allocator. It measures only if the program installed one.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocatorProbe;

impl MemoryProbe for AllocatorProbe {
    fn measures(&self) -> bool {
        installed()
    }

    fn in_use(&self, device: DeviceId) -> u64 {
        counters(tag_of(device)).live.load(Relaxed)
    }

    fn peak(&self, device: DeviceId) -> u64 {
        let counters = counters(tag_of(device));
        // A reset passes through zero.
        counters.peak.load(Relaxed).max(counters.live.load(Relaxed))
    }

    fn reset_peak(&self, device: DeviceId) {
        counters(tag_of(device)).reset_peaks();
    }
}

impl<A: GlobalAlloc> CountingAllocator<A> {
    /// Frees a block's allocation without crediting it.
    ///
    /// # Safety
    /// As [`GlobalAlloc::dealloc`] of this allocator.
    unsafe fn free(&self, block: *mut u8, layout: Layout) {
        // The layout was valid when the block was allocated.
        let Some(whole) = whole(layout, layout.size()) else { return };
        // SAFETY: the caller's block was allocated here.
        let offset = unsafe { header_of(block) }.offset;
        // SAFETY: the block is at this offset in its allocation.
        let base = unsafe { block.sub(offset) };
        // SAFETY: `base` was allocated by the inner allocator with this layout and is freed once.
        unsafe { self.inner.dealloc(base, whole) };
    }

    /// Replaces a block of `old` by one of `new`, for the same device, by allocating and copying.
    ///
    /// # Safety
    /// As [`GlobalAlloc::realloc`] of this allocator, with a block of device `tag`.
    unsafe fn move_block(&self, block: *mut u8, old: Layout, new: Layout, tag: u8) -> *mut u8 {
        let Some(whole) = whole(new, new.size()) else { return ptr::null_mut() };
        // SAFETY: `whole` includes the header, so its size is not zero.
        let base = unsafe { self.inner.alloc(whole) };
        if base.is_null() {
            return base;
        }
        recharge(tag, old.size(), new.size());
        // SAFETY: the allocation of `whole` is new.
        let moved = unsafe { open(base, new, tag) };
        // SAFETY: both blocks have this many bytes, and they do not overlap.
        unsafe { ptr::copy_nonoverlapping(block, moved, old.size().min(new.size())) };
        // SAFETY: the caller no longer uses the old block.
        unsafe { self.free(block, old) };
        moved
    }
}

// SAFETY: each block is in an allocation of the inner allocator, after a header with its offset. The offset
// is a multiple of the block's alignment, and so is the allocation's address, so the block is aligned. The
// layout of the whole follows from the block's layout, so it is freed with the layout that it was allocated
// with.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(whole) = whole(layout, layout.size()) else { return ptr::null_mut() };
        // SAFETY: `whole` includes the header, so its size is not zero.
        let base = unsafe { self.inner.alloc(whole) };
        let tag = tag();
        count(base, layout.size(), tag);
        // SAFETY: the allocation of `whole` is new.
        unsafe { open(base, layout, tag) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(whole) = whole(layout, layout.size()) else { return ptr::null_mut() };
        // SAFETY: `whole` includes the header, so its size is not zero.
        let base = unsafe { self.inner.alloc_zeroed(whole) };
        let tag = tag();
        count(base, layout.size(), tag);
        // SAFETY: the allocation of `whole` is new; the header is before the block.
        unsafe { open(base, layout, tag) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's block was allocated here.
        credit(unsafe { header_of(block) }.tag, layout.size());
        // SAFETY: the caller no longer uses the block.
        unsafe { self.free(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (Some(old), Some(new)) = (whole(layout, layout.size()), whole(layout, new_size)) else {
            return ptr::null_mut();
        };
        // SAFETY: the caller's block was allocated here.
        let Header { offset, tag } = unsafe { header_of(block) };
        if is_coloured(layout, layout.size()) != is_coloured(layout, new_size) {
            let Ok(new) = Layout::from_size_align(new_size, layout.align()) else { return ptr::null_mut() };
            // SAFETY: the caller's block has this layout and this tag.
            return unsafe { self.move_block(block, layout, new, tag) };
        }
        // SAFETY: the block is at this offset in its allocation.
        let base = unsafe { block.sub(offset) };
        // SAFETY: `base` was allocated with `old`; the size of `new` is valid for the alignment and not zero.
        let base = unsafe { self.inner.realloc(base, old, new.size()) };
        if base.is_null() {
            return base;
        }
        recharge(tag, layout.size(), new_size);
        // SAFETY: the bytes before the block, including the header, moved with the allocation.
        unsafe { base.add(offset) }
    }
}

/// Makes mimalloc keep freed memory for a day instead of returning it to the system after a second. The buffers of one
/// training step are reused by the next, and returning them costs a page fault per page. Large pages are
/// requested if the system has them, because an optimizer step accesses more memory than the TLB covers with
/// small ones. Call it once, before other threads start. `MIMALLOC_PURGE_DELAY` and
/// `MIMALLOC_ALLOW_LARGE_OS_PAGES` in the environment take precedence.
///
/// The process then keeps its peak memory, which its devices' budgets already account for, until [`ReturnsFreed`] returns it.
/// mimalloc would not even then return what is freed while it has no delay at all.
pub fn keep_freed_memory() {
    // SAFETY: the options exist in this version (a test checks their defaults). Setting one is a plain write
    // of one word, which no other thread reads yet.
    unsafe {
        libmimalloc_sys::mi_option_set_default(PURGE_DELAY, KEPT_MS);
        libmimalloc_sys::mi_option_set_default(libmimalloc_sys::mi_option_large_os_pages, 1);
    }
}

/// mimalloc's `purge_delay`, in milliseconds; the crate has no constant for it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// The milliseconds after which freed memory is returned otherwise: a day.
const KEPT_MS: c_long = 24 * 60 * 60 * 1000;

/// The milliseconds after which freed memory is returned while a [`ReturnsFreed`] lives: mimalloc's default.
const RETURNED_MS: c_long = 1000;

/// The number of live [`ReturnsFreed`], if [`keep_freed_memory`] was called.
static RETURNING: Mutex<usize> = Mutex::new(0);

/// While it lives, freed memory is returned to the system after a second even if the program has called
/// [`keep_freed_memory`], and when it is dropped, all freed memory is returned: for a phase that uses much memory once,
/// such as pilot passes.
#[derive(Debug)]
#[must_use = "freed memory is kept again when this is dropped"]
pub struct ReturnsFreed(bool);

impl ReturnsFreed {
    /// Starts to return freed memory.
    pub fn start() -> Self {
        let mut returning = RETURNING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: reading an option changes nothing.
        let keeps = *returning > 0 || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) } == KEPT_MS;
        let keeps = keeps && std::env::var_os("MIMALLOC_PURGE_DELAY").is_none();
        if keeps {
            *returning += 1;
            set_purge_delay(RETURNED_MS);
        }
        Self(keeps)
    }
}

impl Drop for ReturnsFreed {
    fn drop(&mut self) {
        let mut returning = RETURNING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.0 {
            *returning -= 1;
            // SAFETY: mimalloc collects the heap of the calling thread, and free memory of all threads, at any time.
            unsafe { libmimalloc_sys::mi_collect(true) };
            set_purge_delay(if *returning == 0 { KEPT_MS } else { RETURNED_MS });
        }
    }
}

fn set_purge_delay(milliseconds: c_long) {
    // SAFETY: an option is a word that mimalloc reads when it frees memory. Every value of it is valid at any time, and the
    // lock excludes another writer.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, milliseconds) };
}

#[cfg(test)]
mod tests {
    use super::block::{LARGE, LINE};
    use super::figures::current_tag;
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::hint::black_box;
    use std::sync::mpsc;
    use std::thread;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator::new(System);

    const PROBE: AllocatorProbe = AllocatorProbe;

    // Each test has its own devices, because tests run concurrently.
    fn bytes_on(device: DeviceId, n: usize) -> Vec<u8> {
        with_tag(Some(device), || black_box(vec![7; n]))
    }

    #[test]
    fn leases_are_apart_and_come_back() {
        let (one, two) = (TagLease::take(), TagLease::take());
        assert_ne!(one.device(), two.device());
        let freed = one.device();
        drop(one);
        let again: Vec<TagLease> = (0..MAX_DEVICES + 3).map(|_| TagLease::take()).collect();
        assert!(again.iter().any(|lease| lease.device() == freed));
        assert!(again.iter().all(|lease| lease.device() != two.device()));
        assert_eq!(again[again.len() - 1].device(), DeviceId(MAX_DEVICES - 1));
        drop(again);
        let left = bytes_on(freed, 1000);
        assert_ne!(TagLease::take().device(), freed, "no lease starts with bytes of a previous one");
        drop(left);
    }

    #[test]
    fn a_block_freed_on_another_thread_credits_the_device_that_allocated_it() {
        let (owner, other) = (DeviceId(50), DeviceId(51));
        let block = bytes_on(owner, 1000);
        assert!(PROBE.measures());
        assert_eq!((PROBE.in_use(owner), PROBE.in_use(other)), (1000, 0));
        let freed = move || with_tag(Some(other), || drop(block));
        thread::spawn(freed).join().unwrap();
        assert_eq!((PROBE.in_use(owner), PROBE.in_use(other)), (0, 0));
        assert_eq!((PROBE.peak(owner), PROBE.peak(other)), (1000, 0));
        assert_eq!((allocations(owner), allocations(other)), (1, 0));
    }

    #[test]
    fn a_peak_starts_again_at_what_is_in_use() {
        let device = DeviceId(52);
        let kept = bytes_on(device, 100);
        drop(bytes_on(device, 900));
        assert_eq!(PROBE.peak(device), 1000);
        PROBE.reset_peak(device);
        assert_eq!(PROBE.peak(device), 100);
        drop(bytes_on(device, 50));
        assert_eq!(PROBE.peak(device), 150);
        drop(kept);
        assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (0, 150));
    }

    #[test]
    fn a_block_keeps_its_device_when_it_grows_and_shrinks_elsewhere() {
        let (owner, other) = (DeviceId(53), DeviceId(54));
        let mut block = bytes_on(owner, 64);
        with_tag(Some(other), || {
            block.reserve_exact(1 << 20);
            assert_eq!(PROBE.in_use(owner), 64 + (1 << 20));
            block.shrink_to_fit();
        });
        assert_eq!((PROBE.in_use(owner), allocations(owner)), (64, 1));
        assert_eq!((PROBE.in_use(other), allocations(other)), (0, 0));
        assert_eq!(block, [7; 64]);
    }

    #[test]
    fn zeroed_blocks_are_zero_and_charged() {
        let device = DeviceId(55);
        for n in [1, 15, 4096, 3 << 20] {
            let block = with_tag(Some(device), || black_box(vec![0u64; n]));
            assert!(block.iter().all(|&word| word == 0));
            assert_eq!(PROBE.in_use(device), 8 * n as u64);
        }
        assert_eq!(PROBE.in_use(device), 0);
    }

    #[test]
    fn blocks_have_the_alignment_that_was_asked_for() {
        let device = DeviceId(56);
        for shift in 0..=16 {
            let layout = Layout::from_size_align(100, 1 << shift).unwrap();
            with_tag(Some(device), || {
                // SAFETY: the layout's size is not zero.
                let block = unsafe { std::alloc::alloc(layout) };
                assert!(!block.is_null());
                assert_eq!(block.addr() % layout.align(), 0);
                // SAFETY: the block has 100 bytes.
                unsafe { block.write_bytes(0xAB, 100) };
                // SAFETY: the block was allocated with this layout.
                let block = unsafe { std::alloc::realloc(block, layout, 5000) };
                assert_eq!(block.addr() % layout.align(), 0);
                // SAFETY: the first 100 bytes were written and moved with the block.
                let kept = unsafe { std::slice::from_raw_parts(block, 100) };
                assert_eq!(kept, [0xAB; 100]);
                assert_eq!(PROBE.in_use(device), 5000);
                let layout = Layout::from_size_align(5000, layout.align()).unwrap();
                // SAFETY: the block was reallocated to this layout.
                unsafe { std::alloc::dealloc(block, layout) };
            });
        }
        assert_eq!(PROBE.in_use(device), 0);
    }

    #[test]
    fn large_blocks_begin_at_lines_of_their_own() {
        let device = DeviceId(59);
        let layout = Layout::from_size_align(LARGE, 4).unwrap();
        // SAFETY: the layout's size is not zero.
        let blocks = [(); 8].map(|()| with_tag(Some(device), || unsafe { ALLOCATOR.alloc(layout) }));
        assert!(blocks.iter().all(|block| block.addr() % LINE == 0));
        // Not their addresses, which differ anyway if the system places blocks anywhere in a page.
        let lines: std::collections::BTreeSet<usize> =
            // SAFETY: the blocks were allocated here.
            blocks.iter().map(|block| unsafe { header_of(*block) }.offset / LINE).collect();
        // Other tests allocate concurrently.
        assert!(lines.len() > 2, "{lines:?}");
        assert_eq!(PROBE.in_use(device), 8 * LARGE as u64);
        // SAFETY: the blocks have this layout and are freed once.
        blocks.iter().for_each(|block| unsafe { ALLOCATOR.dealloc(*block, layout) });
        assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (0, 8 * LARGE as u64));
    }

    #[test]
    fn blocks_that_become_large_and_small_again_keep_contents_and_charge() {
        let device = DeviceId(60);
        for align in [1, 16, 64, 128, 8192] {
            let mut layout = Layout::from_size_align(1000, align).unwrap();
            // SAFETY: the layout's size is not zero.
            let mut block = with_tag(Some(device), || unsafe { ALLOCATOR.alloc(layout) });
            // SAFETY: the block has 1000 bytes.
            unsafe { block.write_bytes(0x5A, 1000) };
            for size in [LARGE - 1, LARGE, 3 * LARGE, LARGE + 1, 5000, 2 * LARGE, 1000] {
                // SAFETY: the block has this layout, and the new size is not zero.
                block = unsafe { ALLOCATOR.realloc(block, layout, size) };
                layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: the first 1000 bytes were written and moved with the block.
                assert_eq!(unsafe { std::slice::from_raw_parts(block, 1000) }, [0x5A; 1000]);
                assert_eq!((block.addr() % align, PROBE.in_use(device)), (0, size as u64));
            }
            // SAFETY: the block has this layout and is freed once.
            unsafe { ALLOCATOR.dealloc(block, layout) };
        }
        assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (0, 3 * LARGE as u64));
        assert_eq!(allocations(device), 5, "a reallocated block counts once");
    }

    #[test]
    fn freed_memory_is_kept() {
        // SAFETY: reading an option changes nothing.
        let delay = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
            assert_eq!(delay(), 1000, "the default of `purge_delay`: another option has its number now");
            keep_freed_memory();
            assert_eq!(delay(), KEPT_MS);
            let two = [ReturnsFreed::start(), ReturnsFreed::start()];
            assert_eq!(delay(), 1000);
            let [one, other] = two;
            drop(one);
            assert_eq!(delay(), 1000);
            drop(other);
            assert_eq!(delay(), KEPT_MS);
        }
    }

    #[test]
    fn a_size_that_leaves_no_room_for_the_header_is_refused() {
        let layout = Layout::from_size_align(isize::MAX as usize, 1).unwrap();
        // SAFETY: the layout's size is not zero.
        assert!(unsafe { ALLOCATOR.alloc(layout) }.is_null());
        // SAFETY: the layout's size is not zero.
        assert!(unsafe { ALLOCATOR.alloc_zeroed(layout) }.is_null());
        let device = DeviceId(57);
        let block = bytes_on(device, 10);
        let small = Layout::from_size_align(10, 1).unwrap();
        // SAFETY: the block has this layout, and is unchanged if the reallocation is refused.
        let refused = unsafe { ALLOCATOR.realloc(block.as_ptr().cast_mut(), small, isize::MAX as usize) };
        assert!(refused.is_null());
        assert_eq!((PROBE.in_use(device), block), (10, vec![7; 10]));
    }

    #[test]
    fn devices_that_allocate_at_the_same_time_are_told_apart() {
        let first = 30;
        let (send, receive) = mpsc::channel();
        thread::scope(|scope| {
            for i in 0..8 {
                let send = send.clone();
                scope.spawn(move || {
                    let blocks = (0..200).map(|n| bytes_on(DeviceId(first + i), 1 + n * (i + 1)));
                    blocks.for_each(|block| send.send(block).unwrap());
                });
            }
        });
        let held = |i: usize| (0..200).map(|n| 1 + n * (i as u64 + 1)).sum::<u64>();
        for i in 0..8 {
            let device = DeviceId(first + i);
            assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (held(i), held(i)));
            assert_eq!(allocations(device), 200);
        }
        drop(send);
        receive.into_iter().for_each(drop);
        assert!((0..8).all(|i| PROBE.in_use(DeviceId(first + i)) == 0));
    }

    #[test]
    fn devices_beyond_the_last_share_its_figures() {
        let last = DeviceId(MAX_DEVICES - 1);
        let block = bytes_on(DeviceId(1000), 77);
        assert_eq!((PROBE.in_use(last), PROBE.in_use(DeviceId(MAX_DEVICES))), (77, 77));
        drop(block);
        assert_eq!(PROBE.in_use(last), 0);
    }

    #[test]
    fn what_a_panic_allocates_is_no_devices() {
        /// Allocates while the stack unwinds, as a backtrace does for debug information, and keeps the
        /// memory.
        struct Keeps<'a>(&'a std::sync::Mutex<Vec<u8>>);
        impl Drop for Keeps<'_> {
            fn drop(&mut self) {
                *self.0.lock().unwrap() = vec![1; 1 << 20];
                let tagged = with_tag(Some(DeviceId(21)), || vec![1; 1 << 20]);
                self.0.lock().unwrap().extend(tagged);
            }
        }
        let (device, kept) = (DeviceId(20), std::sync::Mutex::default());
        let panics = || {
            with_tag(Some(device), || {
                let _keeps = Keeps(&kept);
                std::panic::resume_unwind(Box::new(()))
            })
        };
        let panicked: thread::Result<()> = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
        assert!(panicked.is_err());
        assert_eq!(kept.into_inner().unwrap().len(), 2 << 20);
        assert_eq!(([20, 21].map(|of| PROBE.peak(DeviceId(of))), current_tag()), ([0, 0], None));
        drop(bytes_on(device, 100));
        assert_eq!(PROBE.peak(device), 100, "later allocations are charged again");
    }

    #[test]
    fn tags_nest_and_come_back_after_a_panic() {
        assert_eq!(current_tag(), None);
        with_tag(Some(DeviceId(3)), || {
            let panics = || with_tag(Some(DeviceId(4)), || std::panic::resume_unwind(Box::new("expected")));
            assert!(std::panic::catch_unwind(panics).is_err());
            assert_eq!(current_tag(), Some(DeviceId(3)));
            with_tag(None, || assert_eq!(current_tag(), None));
            assert_eq!(current_tag(), Some(DeviceId(3)));
        });
        assert_eq!(current_tag(), None);
        let tagged = thread::spawn(|| {
            tag_thread(Some(DeviceId(5)));
            current_tag()
        });
        assert_eq!(tagged.join().unwrap(), Some(DeviceId(5)));
    }

    #[test]
    fn a_thread_that_ends_may_still_allocate() {
        struct AllocatesAtTheEnd(mpsc::Sender<Vec<u8>>);
        impl Drop for AllocatesAtTheEnd {
            fn drop(&mut self) {
                self.0.send(black_box(vec![1; 4096])).unwrap();
            }
        }
        thread_local! {
            static LAST: Cell<Option<AllocatesAtTheEnd>> = const { Cell::new(None) };
        }
        let (send, receive) = mpsc::channel();
        thread::spawn(|| LAST.set(Some(AllocatesAtTheEnd(send)))).join().unwrap();
        assert_eq!(receive.recv().unwrap(), [1; 4096]);
    }

    proptest! {
        #[test]
        fn figures_follow_every_sequence(steps in prop::collection::vec((0u8..4, prop_oneof![1usize..5000, LARGE - 50..LARGE + 50], 0u32..10), 1..60)) {
            let device = DeviceId(58);
            PROBE.reset_peak(device);
            let (mut blocks, mut live, mut peak) = (Vec::<(*mut u8, Layout)>::new(), 0, 0);
            for (step, size, shift) in steps {
                match step {
                    0 | 1 => {
                        let layout = Layout::from_size_align(size, 1 << shift).unwrap();
                        // SAFETY: the layout's size is not zero.
                        blocks.push((with_tag(Some(device), || unsafe { ALLOCATOR.alloc(layout) }), layout));
                        live += size as u64;
                    }
                    2 => if let Some((block, layout)) = blocks.pop() {
                        // SAFETY: the block has this layout, and the new size is not zero.
                        let moved = unsafe { ALLOCATOR.realloc(block, layout, size) };
                        blocks.push((moved, Layout::from_size_align(size, layout.align()).unwrap()));
                        live = live + size as u64 - layout.size() as u64;
                    },
                    _ => if let Some((block, layout)) = blocks.pop() {
                        // SAFETY: the block has this layout and was removed from the list.
                        unsafe { ALLOCATOR.dealloc(block, layout) };
                        live -= layout.size() as u64;
                    },
                }
                peak = peak.max(live);
                prop_assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (live, peak));
            }
            for (block, layout) in blocks {
                // SAFETY: the block has this layout and is freed once.
                unsafe { ALLOCATOR.dealloc(block, layout) };
            }
            prop_assert_eq!(PROBE.in_use(device), 0);
        }
    }
}
