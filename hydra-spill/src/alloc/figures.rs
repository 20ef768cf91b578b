//! Figures of devices, and the tag by which a thread says whose it allocates.

use hydra_core::DeviceId;
use std::cell::Cell;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The number of devices with figures of their own. Devices beyond share the figures of the last one, which
/// are then too high for each of them and never too low.
pub const MAX_DEVICES: usize = 63;

/// Runs `f` while what this thread allocates is charged to `device`, or to the host if there is none.
/// The thread's former tag comes back afterwards, also when `f` panics.
pub fn with_tag<R>(device: Option<DeviceId>, f: impl FnOnce() -> R) -> R {
    struct Restore(u8);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_tag(self.0);
        }
    }
    let _restore = Restore(own_tag());
    tag_thread(device);
    f()
}

/// From now on, what this thread allocates is charged to `device`, or to the host if there is none.
pub fn tag_thread(device: Option<DeviceId>) {
    set_tag(device.map_or(HOST, tag_of));
}

/// The device that this thread's allocations are charged to; `None` for the host.
#[cfg(test)]
pub(super) fn current_tag() -> Option<DeviceId> {
    match own_tag() {
        HOST => None,
        tag => Some(DeviceId(usize::from(tag) - 1)),
    }
}

/// The figures of one device, for as long as this is held.
///
/// Several runs may live in one process, each with a device 0 of its own; leasing gives each device figures
/// that no other uses. When all are taken, the last one is shared.
#[derive(Debug)]
pub struct TagLease(DeviceId);

static LEASED: AtomicU64 = AtomicU64::new(0);

impl TagLease {
    /// Takes the free figures that count the least, the lowest of several: a thread that still ends is charged to whoever
    /// had the figures before.
    pub fn take() -> Self {
        let mut leased = LEASED.load(Relaxed);
        loop {
            let free = (0..MAX_DEVICES - 1).filter(|device| leased >> device & 1 == 0);
            let live = |device: &usize| counters(tag_of(DeviceId(*device))).live.load(Relaxed);
            let Some(free) = free.min_by_key(live) else {
                return Self(DeviceId(MAX_DEVICES - 1));
            };
            match LEASED.compare_exchange_weak(leased, leased | 1 << free, Relaxed, Relaxed) {
                Ok(_) => return Self(DeviceId(free)),
                Err(now) => leased = now,
            }
        }
    }

    /// The device as the allocator and its probe know it.
    pub fn device(&self) -> DeviceId {
        self.0
    }
}

impl Drop for TagLease {
    fn drop(&mut self) {
        if self.0.0 < MAX_DEVICES - 1 {
            LEASED.fetch_and(!(1 << self.0.0), Relaxed);
        }
    }
}

/// The tag of memory that belongs to no device. It is not counted.
const HOST: u8 = 0;

pub(super) static INSTALLED: AtomicBool = AtomicBool::new(false);

/// The figures of one tag, alone on its cache lines so that devices do not slow one another down.
///
/// Relaxed ordering suffices: each figure is one atomic, whose modifications have one order, and the charge
/// of a block happens before its release because the block itself was handed over.
#[repr(align(128))]
pub(super) struct Counters {
    pub live: AtomicU64,
    pub peak: AtomicU64,
    pub count: AtomicU64,
    /// What is reserved of the device's budget.
    pub reserved: AtomicU64,
    /// The most that `live` was above `reserved` since the peak was reset.
    pub unreserved: AtomicU64,
}

impl Counters {
    const fn new() -> Self {
        let [live, peak, count, reserved, unreserved] = [const { AtomicU64::new(0) }; 5];
        Self { live, peak, count, reserved, unreserved }
    }

    /// Notes what is in use beyond what is reserved, where `before` was in use a moment ago. Meanwhile another thread may have
    /// freed some and released its reservation, so what is in use after the reservations were read counts, if that is less.
    #[cold]
    fn note_unreserved(&self, before: u64) {
        let reserved = self.reserved.load(SeqCst);
        let live = before.min(self.live.load(SeqCst));
        self.unreserved.fetch_max(live.saturating_sub(reserved), Relaxed);
    }

    /// Starts new peaks at what is in use now.
    pub fn reset_peaks(&self) {
        let live = self.live.load(Relaxed);
        // Not plain stores of the figures: those could overwrite a higher peak of a concurrent allocation.
        self.peak.store(0, Relaxed);
        self.peak.fetch_max(live, Relaxed);
        self.unreserved.store(0, Relaxed);
        self.unreserved.fetch_max(live.saturating_sub(self.reserved.load(Relaxed)), Relaxed);
    }
}

static COUNTERS: [Counters; MAX_DEVICES + 1] = [const { Counters::new() }; MAX_DEVICES + 1];

thread_local! {
    static TAG: Cell<u8> = const { Cell::new(HOST) };
}

pub(super) fn tag_of(device: DeviceId) -> u8 {
    // At most 63, so the cast loses nothing.
    (device.0.min(MAX_DEVICES - 1) + 1) as u8
}

/// The tag of what the thread allocates now: the host's while it panics. The message, and the debug information that is read
/// for a backtrace and stays for the next one, are no device's, wherever the panic began.
pub(super) fn tag() -> u8 {
    if std::thread::panicking() { HOST } else { own_tag() }
}

/// The thread's tag; the host's while the thread ends and its locals are gone.
fn own_tag() -> u8 {
    TAG.try_with(Cell::get).unwrap_or(HOST)
}

fn set_tag(tag: u8) {
    // A thread that ends has no tag any more, and needs none.
    let _ = TAG.try_with(|cell| cell.set(tag));
}

pub(super) fn counters(tag: u8) -> &'static Counters {
    // Tags are at most `MAX_DEVICES`; the mask tells the compiler.
    &COUNTERS[usize::from(tag) & MAX_DEVICES]
}

pub(super) fn charge(tag: u8, bytes: usize) {
    if tag == HOST {
        return;
    }
    let counters = counters(tag);
    let live = counters.live.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    if live > counters.peak.load(Relaxed) {
        counters.peak.fetch_max(live, Relaxed);
    }
    if live.saturating_sub(counters.reserved.load(Relaxed)) > counters.unreserved.load(Relaxed) {
        counters.note_unreserved(live);
    }
}

/// Says what is reserved of a device's budget now, for [`unreserved`](super::unreserved).
pub(crate) fn note_reserved(device: DeviceId, bytes: u64) {
    counters(tag_of(device)).reserved.store(bytes, Relaxed);
}

pub(super) fn credit(tag: u8, bytes: usize) {
    if tag != HOST {
        counters(tag).live.fetch_sub(bytes as u64, Relaxed);
    }
}

/// Counts and charges a new block of so many bytes, unless there was no memory for it.
pub(super) fn count(base: *mut u8, bytes: usize, tag: u8) {
    if tag != HOST && !base.is_null() {
        counters(tag).count.fetch_add(1, Relaxed);
        charge(tag, bytes);
    }
}

/// Charges a block that has another size now. Only the difference: what is in use on other threads meanwhile is measured
/// with all of the block.
pub(super) fn recharge(tag: u8, old: usize, new: usize) {
    match new >= old {
        true => charge(tag, new - old),
        false => credit(tag, old - new),
    }
}
