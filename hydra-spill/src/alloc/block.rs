//! The layout of a block: its header and its cache-line offset.

use super::figures::INSTALLED;
use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Blocks of at least this size are placed at varying cache lines.
pub(super) const LARGE: usize = 64 << 10;
/// The size of a cache line, which the widest vector loads read at a time.
pub(super) const LINE: usize = 64;
/// The distance at which a core's first-level cache confuses addresses (4K aliasing).
pub(super) const PAGE: usize = 4096;

/// The header, which ends where the block starts.
#[repr(C)]
pub(super) struct Header {
    /// The offset of the block in its allocation.
    pub offset: usize,
    pub tag: u8,
}

/// Returns the minimum offset of a block, for its header and its alignment.
fn least_offset(layout: Layout) -> usize {
    layout.align().max(size_of::<Header>().next_multiple_of(16))
}

/// Returns whether a block of `size` bytes with the alignment of `layout` gets a varying cache line.
pub(super) fn is_coloured(layout: Layout, size: usize) -> bool {
    size >= LARGE && layout.align() <= LINE
}

/// Returns the layout of the allocation for a block of `size` bytes, aligned as `layout`, including the
/// offset.
pub(super) fn whole(layout: Layout, size: usize) -> Option<Layout> {
    let (front, align) = match is_coloured(layout, size) {
        true => (PAGE, LINE),
        false => (least_offset(layout), layout.align().max(align_of::<Header>())),
    };
    Layout::from_size_align(size.checked_add(front)?, align).ok()
}

/// Returns the offset of the next block of this layout in its allocation.
///
/// An allocator places all large blocks at the start of a page. A loop over several of them then reads and
/// writes addresses that the first-level cache cannot distinguish, and runs two to three times slower than
/// memory allows. Therefore large blocks start at successive cache lines of a page, in steps that keep
/// consecutive blocks far apart.
pub(super) fn next_offset(layout: Layout) -> usize {
    static COLOUR: AtomicU64 = AtomicU64::new(0);
    const STEP: u64 = 25;
    if !is_coloured(layout, layout.size()) {
        return least_offset(layout);
    }
    let colour = COLOUR.fetch_add(STEP, Relaxed) as usize % (PAGE / LINE);
    LINE * (colour + 1)
}

/// Returns the header of a block.
///
/// # Safety
/// `block` was returned by [`open`] and not freed since.
pub(super) unsafe fn header_of(block: *mut u8) -> Header {
    // SAFETY: an allocation starts at least 16 bytes before its block.
    let header = unsafe { block.sub(16) }.cast::<Header>();
    // SAFETY: `open` wrote it at this suitably aligned address.
    unsafe { header.read() }
}

/// Writes the header of a new block of `tag` and returns the block's address.
///
/// # Safety
/// `base` is null or starts an allocation of `whole(layout, layout.size())` that the caller owns exclusively.
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
    // SAFETY: the offset is at least 16, so the header is within the allocation.
    let header = unsafe { block.sub(16) }.cast::<Header>();
    // SAFETY: the allocation is aligned for a header, and the offset is a multiple of 16.
    unsafe { header.write(Header { offset, tag }) };
    block
}
