//! The layout of a block: a header in front of it, and the cache line that it begins at.

use super::figures::INSTALLED;
use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Blocks of so many bytes and more begin at a cache line of their own choice.
pub(super) const LARGE: usize = 64 << 10;
/// A cache line: what the widest vectors load at once.
pub(super) const LINE: usize = 64;
/// The distance at which addresses are taken for one another by a core's first-level cache.
pub(super) const PAGE: usize = 4096;

/// The end of what lies in front of each block.
#[repr(C)]
pub(super) struct Header {
    /// From the beginning of the allocation to the block.
    pub offset: usize,
    pub tag: u8,
}

/// The bytes that lie in front of a block at least, for its header and its alignment.
fn least_offset(layout: Layout) -> usize {
    layout.align().max(size_of::<Header>().next_multiple_of(16))
}

/// Returns whether a block of `size` bytes with the alignment of `layout` chooses its cache line.
pub(super) fn is_coloured(layout: Layout, size: usize) -> bool {
    size >= LARGE && layout.align() <= LINE
}

/// The layout of a block of `size` bytes, aligned as `layout`, with what lies in front of it.
pub(super) fn whole(layout: Layout, size: usize) -> Option<Layout> {
    let (front, align) = match is_coloured(layout, size) {
        true => (PAGE, LINE),
        false => (least_offset(layout), layout.align().max(align_of::<Header>())),
    };
    Layout::from_size_align(size.checked_add(front)?, align).ok()
}

/// The offset of the next block of this layout in its allocation.
///
/// An allocator places all large blocks alike, at the beginning of a page. A loop over several of them then reads and
/// writes addresses that differ in nothing that the first-level cache looks at, and is two to three times as slow as
/// memory. So large blocks begin at one line of a page after another, in steps that keep neighbours far apart.
pub(super) fn next_offset(layout: Layout) -> usize {
    static COLOUR: AtomicU64 = AtomicU64::new(0);
    const STEP: u64 = 25;
    if !is_coloured(layout, layout.size()) {
        return least_offset(layout);
    }
    let colour = COLOUR.fetch_add(STEP, Relaxed) as usize % (PAGE / LINE);
    LINE * (colour + 1)
}

/// The header of a block.
///
/// # Safety
/// `block` was returned by [`open`] and not freed since.
pub(super) unsafe fn header_of(block: *mut u8) -> Header {
    // SAFETY: an allocation begins 16 bytes in front of its block at the latest.
    let header = unsafe { block.sub(16) }.cast::<Header>();
    // SAFETY: `open` wrote it there, at an address that suits it.
    unsafe { header.read() }
}

/// Writes the header of a new block of `tag` and returns where it begins.
///
/// # Safety
/// `base` is null or begins an allocation of `whole(layout, layout.size())` that nobody else has.
pub(super) unsafe fn open(base: *mut u8, layout: Layout, tag: u8) -> *mut u8 {
    if base.is_null() {
        return base;
    }
    if !INSTALLED.load(Relaxed) {
        INSTALLED.store(true, Relaxed);
    }
    let offset = next_offset(layout);
    // SAFETY: the allocation is longer than the offset by the block's size.
    let block = unsafe { base.add(offset) };
    // SAFETY: the offset is 16 at least, so the header lies within the allocation.
    let header = unsafe { block.sub(16) }.cast::<Header>();
    // SAFETY: the allocation is aligned for a header, and the offset is a multiple of 16.
    unsafe { header.write(Header { offset, tag }) };
    block
}
