//! Memory counters of devices, and the thread tag that selects the device to charge.

use hydra_core::DeviceId;
use std::cell::Cell;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The number of devices with their own counters. Further devices share the counters of the last one, which
/// are then too high for each of them and never too low.
pub const MAX_DEVICES: usize = 63;

/// Runs `f` and charges this thread's allocations during it to `device`, or to the host if it is `None`.
/// The previous tag is restored afterwards, also if `f` panics.
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

/// Charges this thread's allocations from now on to `device`, or to the host if it is `None`.
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

/// A lease of the counters of one device, until it is dropped.
///
/// Several runs in one process can each have a device 0; a lease gives each device its own counters.
/// If all are leased, the last one is shared.
#[derive(Debug)]
pub struct TagLease(DeviceId);

static LEASED: AtomicU64 = AtomicU64::new(0);

impl TagLease {
    /// Leases the free counters with the smallest value, and the lowest index of several: a thread of the
    /// previous owner that has not ended yet is still charged to them.
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

    /// The device id for the allocator and its probe.
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

/// The tag of memory that does not belong to a device. It is not counted.
const HOST: u8 = 0;

pub(super) static INSTALLED: AtomicBool = AtomicBool::new(false);

/// The counters of one tag, on separate cache lines so that devices do not slow each other down.
///
/// Relaxed ordering suffices: each counter is one atomic, whose modifications have one order, and the charge
/// of a block happens before its release because the block itself was passed between the threads.
#[repr(align(128))]
pub(super) struct Counters {
    pub live: AtomicU64,
    pub peak: AtomicU64,
    pub count: AtomicU64,
    /// The bytes reserved in the device's budget.
    pub reserved: AtomicU64,
    /// The maximum of `live` minus `reserved` since the peak was reset.
    pub unreserved: AtomicU64,
}

impl Counters {
    const fn new() -> Self {
        let [live, peak, count, reserved, unreserved] = [const { AtomicU64::new(0) }; 5];
        Self { live, peak, count, reserved, unreserved }
    }

    /// Records the bytes in use beyond the reservations, given the bytes in use `before`. Another thread may
    /// have freed memory and released its reservation in the meantime, so the bytes in use after reading the
    /// reservations count if they are fewer.
    #[cold]
    fn note_unreserved(&self, before: u64) {
        let reserved = self.reserved.load(SeqCst);
        let live = before.min(self.live.load(SeqCst));
        self.unreserved.fetch_max(live.saturating_sub(reserved), Relaxed);
    }

    /// Resets the peaks to the bytes in use.
    pub fn reset_peaks(&self) {
        let live = self.live.load(Relaxed);
        // Not a plain store, which could overwrite a higher peak of a concurrent allocation.
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
    // At most 63, so the cast is lossless.
    (device.0.min(MAX_DEVICES - 1) + 1) as u8
}

/// The tag for the thread's next allocation: the host's while it panics. The panic message, and debug
/// information that is read for a backtrace and cached, do not belong to a device.
pub(super) fn tag() -> u8 {
    if std::thread::panicking() { HOST } else { own_tag() }
}

/// The thread's tag, or the host's after the thread's locals were destroyed.
fn own_tag() -> u8 {
    TAG.try_with(Cell::get).unwrap_or(HOST)
}

fn set_tag(tag: u8) {
    // A thread that is ending has no tag and needs none.
    let _ = TAG.try_with(|cell| cell.set(tag));
}

pub(super) fn counters(tag: u8) -> &'static Counters {
    // Tags are at most `MAX_DEVICES`; the mask removes the bounds check.
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

/// Records the bytes reserved in a device's budget, for [`unreserved`](super::unreserved).
pub(crate) fn note_reserved(device: DeviceId, bytes: u64) {
    counters(tag_of(device)).reserved.store(bytes, Relaxed);
}

pub(super) fn credit(tag: u8, bytes: usize) {
    if tag != HOST {
        counters(tag).live.fetch_sub(bytes as u64, Relaxed);
    }
}

/// Counts and charges a new block, unless the allocation failed.
pub(super) fn count(base: *mut u8, bytes: usize, tag: u8) {
    if tag != HOST && !base.is_null() {
        counters(tag).count.fetch_add(1, Relaxed);
        charge(tag, bytes);
    }
}

/// Charges the change of a block's size. Only the difference is charged, so that concurrent measurements
/// include the whole block.
pub(super) fn recharge(tag: u8, old: usize, new: usize) {
    match new >= old {
        true => charge(tag, new - old),
        false => credit(tag, old - new),
    }
}
