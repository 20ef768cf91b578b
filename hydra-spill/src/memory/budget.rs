//! Memory budgets: every allocation on a device or for keeping data on the host requires a reservation.

use crate::alloc;
use hydra_core::{ByteSize, DeviceId};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A budget refused a reservation.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum BudgetError {
    /// Fewer bytes are free than were requested.
    #[error(
        "`{owner}` needs {} of `{budget}`, but {} of {} are free; the rest is held by {holders}: {}",
        ByteSize(*requested).at_least(), ByteSize(*available), ByteSize(*capacity), advice(*requested, *capacity)
    )]
    Refused {
        /// The requested bytes.
        requested: u64,
        /// The free bytes.
        available: u64,
        capacity: u64,
        budget: String,
        owner: String,
        holders: String,
    },
}

fn advice(requested: u64, capacity: u64) -> &'static str {
    match requested > capacity {
        true => "it can never fit; raise the budget, or ask for less with smaller shards or a smaller batch",
        false => "wait until some of it is released, raise the budget, or train fewer tasks concurrently",
    }
}

/// The maximum number of holders that a refusal names.
const NAMED_HOLDERS: usize = 3;

/// The bytes of one memory, such as `cpu:0` or `host memory`. Clones share them.
#[derive(Clone, Debug)]
pub struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    capacity: u64,
    /// The device whose memory it is, if the counting allocator measures it.
    measured_as: Option<DeviceId>,
    state: Mutex<BudgetState>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct BudgetState {
    /// Bytes that cannot be reserved.
    spare: u64,
    used: u64,
    peak: u64,
    /// The peak since it was last taken.
    recent_peak: u64,
    /// The number of releases so far.
    releases: u64,
    /// Bytes by owner; an owner without bytes has no entry.
    holders: BTreeMap<Arc<str>, u64>,
}

/// Bytes of a [`Budget`] that are reserved until this is dropped.
#[derive(Debug)]
#[must_use = "a reservation is released when it is dropped"]
pub struct Reservation {
    budget: Budget,
    owner: Arc<str>,
    bytes: u64,
}

impl Budget {
    /// Returns a budget of `capacity`, all of it free.
    pub fn new(name: impl Into<String>, capacity: ByteSize) -> Self {
        Self::of(name.into(), capacity, None)
    }

    /// Returns the budget of a device whose memory the counting allocator measures, which then reports memory
    /// in use beyond the reservations ([`alloc::unreserved`]).
    pub fn measured_as(device: DeviceId, name: impl Into<String>, capacity: ByteSize) -> Self {
        let budget = Self::of(name.into(), capacity, Some(device));
        alloc::note_reserved(device, 0);
        budget
    }

    fn of(name: String, capacity: ByteSize, measured_as: Option<DeviceId>) -> Self {
        let (capacity, state) = (capacity.bytes(), Mutex::default());
        Self { inner: Arc::new(Inner { name, capacity, measured_as, state, released: Condvar::new() }) }
    }

    /// Sets the number of bytes that cannot be reserved.
    pub fn leave_free(&self, bytes: u64) {
        self.state().spare = bytes;
    }

    /// The name, for messages.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The total bytes.
    pub fn capacity(&self) -> u64 {
        self.inner.capacity
    }

    /// The reserved bytes.
    pub fn used(&self) -> u64 {
        self.state().used
    }

    /// The peak number of reserved bytes, since the start or the last [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> u64 {
        self.state().peak
    }

    /// Takes the peak number of reserved bytes since the last call, or since the start. There is one such
    /// mark for all callers; [`peak`](Self::peak) is unchanged.
    pub fn take_recent_peak(&self) -> u64 {
        let mut state = self.state();
        let used = state.used;
        std::mem::replace(&mut state.recent_peak, used)
    }

    /// The total bytes minus those that cannot be reserved.
    pub fn usable(&self) -> u64 {
        self.capacity().saturating_sub(self.state().spare)
    }

    /// The bytes that can be reserved now.
    pub fn available(&self) -> u64 {
        self.available_in(&self.state())
    }

    fn available_in(&self, state: &BudgetState) -> u64 {
        self.capacity().saturating_sub(state.spare).saturating_sub(state.used)
    }

    /// Notifies the counting allocator of the reserved bytes. Called with the state locked, so that the last
    /// value is correct.
    fn note(&self, state: &BudgetState) {
        if let Some(device) = self.inner.measured_as {
            alloc::note_reserved(device, state.used);
        }
    }

    /// Resets the peak to the reserved bytes.
    pub fn reset_peak(&self) {
        let mut state = self.state();
        state.peak = state.used;
    }

    /// Reserves `bytes` for `owner`, which refusals of other requests name.
    ///
    /// # Errors
    /// [`BudgetError::Refused`] if fewer are free; it names the largest holders.
    pub fn reserve(&self, bytes: u64, owner: impl Into<String>) -> Result<Reservation, BudgetError> {
        self.take(self.state(), bytes, owner.into().into())
    }

    /// The number of releases so far, for [`wait_for_release`](Self::wait_for_release).
    pub(crate) fn releases(&self) -> u64 {
        self.state().releases
    }

    /// Waits up to `patience` for a release after the first `seen`.
    pub(crate) fn wait_for_release(&self, seen: u64, patience: Duration) {
        let none = |state: &mut BudgetState| state.releases == seen;
        drop(self.inner.released.wait_timeout_while(self.state(), patience, none));
    }

    fn take(
        &self,
        mut state: MutexGuard<'_, BudgetState>,
        bytes: u64,
        owner: Arc<str>,
    ) -> Result<Reservation, BudgetError> {
        let available = self.available_in(&state);
        if bytes > available {
            return Err(BudgetError::Refused {
                requested: bytes,
                available,
                capacity: self.capacity(),
                budget: self.name().to_owned(),
                owner: owner.to_string(),
                holders: state.biggest_holders(),
            });
        }
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        state.recent_peak = state.recent_peak.max(state.used);
        state.hold(&owner, bytes);
        self.note(&state);
        drop(state);
        Ok(Reservation { budget: self.clone(), owner, bytes })
    }

    /// Reserves `bytes` for `owner`, or returns `None` if fewer are free.
    pub fn try_reserve(&self, bytes: u64, owner: impl Into<String>) -> Option<Reservation> {
        // Avoids formatting an error that is discarded.
        if bytes > self.available() {
            return None;
        }
        self.reserve(bytes, owner).ok()
    }

    /// Returns whether `other` is a clone of this budget.
    pub fn is(&self, other: &Budget) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    fn state(&self) -> MutexGuard<'_, BudgetState> {
        // No change of the state can panic halfway, so a poisoned lock is still consistent.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BudgetState {
    fn hold(&mut self, owner: &Arc<str>, bytes: u64) {
        if bytes > 0 {
            *self.holders.entry(owner.clone()).or_default() += bytes;
        }
    }

    fn release(&mut self, owner: &Arc<str>, bytes: u64) {
        if let Some(held) = self.holders.get_mut(owner) {
            *held -= bytes;
            if *held == 0 {
                self.holders.remove(owner);
            }
        }
    }

    fn biggest_holders(&self) -> String {
        let mut holders: Vec<_> = self.holders.iter().collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
        let named = holders.iter().take(NAMED_HOLDERS);
        let mut text: Vec<_> =
            named.map(|(owner, bytes)| format!("`{owner}` ({})", ByteSize(**bytes))).collect();
        match holders.len() {
            0 => return "no task".to_owned(),
            n if n > NAMED_HOLDERS => text.push(format!("{} more", n - NAMED_HOLDERS)),
            _ => {}
        }
        text.join(", ")
    }
}

impl Reservation {
    /// The reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The owner's name.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The budget that they are reserved in.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Splits `bytes` off into a separate reservation of the same owner.
    ///
    /// # Panics
    /// If fewer bytes are reserved.
    #[track_caller]
    pub fn split(&mut self, bytes: u64) -> Reservation {
        let (owner, reserved) = (&self.owner, self.bytes);
        assert!(bytes <= reserved, "`{owner}` reserved {reserved} bytes, {bytes} cannot be split off");
        self.bytes -= bytes;
        Reservation { budget: self.budget.clone(), owner: self.owner.clone(), bytes }
    }

    /// Releases all but `bytes`; does nothing if fewer are reserved.
    pub fn shrink_to(&mut self, bytes: u64) {
        if bytes < self.bytes {
            drop(self.split(self.bytes - bytes));
        }
    }

    /// Adds the bytes of `other` to this reservation.
    ///
    /// # Panics
    /// If `other` is of another budget: bytes cannot move between memories.
    #[track_caller]
    pub fn merge(&mut self, mut other: Reservation) {
        let (ours, theirs) = (self.budget.name(), other.budget.name());
        assert!(
            self.budget.is(&other.budget),
            "`{}` reserved of `{ours}`, `{}` of `{theirs}`: they cannot be merged",
            self.owner,
            other.owner
        );
        let bytes = std::mem::take(&mut other.bytes);
        let mut state = self.budget.state();
        state.release(&other.owner, bytes);
        state.hold(&self.owner, bytes);
        drop(state);
        self.bytes += bytes;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.state();
        state.used -= self.bytes;
        state.releases += 1;
        state.release(&self.owner, self.bytes);
        self.budget.note(&state);
        drop(state);
        self.budget.inner.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::MemoryProbe;
    use proptest::prelude::*;

    fn budget(bytes: u64) -> Budget {
        Budget::new("cpu:0", ByteSize(bytes))
    }

    #[test]
    fn a_refusal_names_what_was_asked_what_there_is_and_who_holds_the_rest() {
        let budget = budget(10 << 20);
        let held: Vec<_> = [("a", 1), ("b", 4), ("c", 2), ("d", 1)]
            .map(|(owner, mib)| budget.reserve(mib << 20, owner).unwrap())
            .into();
        let error = budget.reserve(3 << 20, "task 7").unwrap_err();
        assert_eq!(
            error.to_string(),
            "`task 7` needs 3.00 MiB of `cpu:0`, but 2.00 MiB of 10.00 MiB are free; the rest is held by \
             `b` (4.00 MiB), `c` (2.00 MiB), `a` (1.00 MiB), 1 more: wait until some of it is released, raise \
             the budget, or train fewer tasks concurrently"
        );
        assert!(budget.try_reserve(3 << 20, "task 7").is_none());
        drop(held);
        assert!(budget.try_reserve(3 << 20, "task 7").is_some());
        assert!(budget.try_reserve(10 << 20, "task 7").is_some(), "all of it");
        let error = budget.reserve(u64::MAX, "task 7").unwrap_err().to_string();
        assert!(error.contains("held by no task: it can never fit"), "{error}");
    }

    #[test]
    fn the_peak_stays_until_it_is_reset() {
        let budget = budget(100);
        let rest = budget.reserve(30, "a").unwrap();
        drop(budget.reserve(60, "b").unwrap());
        assert_eq!((budget.used(), budget.peak(), budget.available()), (30, 90, 70));
        budget.reset_peak();
        assert_eq!(budget.peak(), 30);
        drop(rest);
    }

    #[test]
    fn the_recent_peak_is_of_the_time_since_it_was_taken() {
        let budget = budget(100);
        let rest = budget.reserve(30, "a").unwrap();
        drop(budget.reserve(60, "b").unwrap());
        assert_eq!([(); 2].map(|()| budget.take_recent_peak()), [90, 30]);
        drop(rest);
        assert_eq!([(); 2].map(|()| budget.take_recent_peak()), [30, 0]);
        drop(budget.reserve(20, "c").unwrap());
        budget.reset_peak();
        assert_eq!((budget.take_recent_peak(), budget.peak()), (20, 0), "the two are independent");
    }

    #[test]
    fn what_is_left_free_is_nobodys() {
        let budget = budget(100);
        let held = budget.reserve(60, "a").unwrap();
        budget.leave_free(10);
        assert_eq!(
            (budget.capacity(), budget.usable(), budget.available(), budget.peak()),
            (100, 90, 30, 60)
        );
        assert!(budget.try_reserve(31, "b").is_none());
        let all = budget.try_reserve(30, "b").expect("all that is left");
        assert_eq!((budget.available(), budget.peak()), (0, 90));
        drop((held, all));
        budget.leave_free(200);
        assert_eq!((budget.usable(), budget.available()), (0, 0));
    }

    #[test]
    fn what_is_in_use_beyond_reservations_is_counted() {
        let (device, probe) = (DeviceId(22), alloc::AllocatorProbe);
        let in_use = |n: usize| alloc::with_tag(Some(device), || std::hint::black_box(vec![7_u8; n]));
        let budget = Budget::measured_as(device, "cpu:22", ByteSize(10_000));
        probe.reset_peak(device);
        let reservation = budget.reserve(1000, "a shard task").unwrap();
        let block = in_use(1000);
        assert_eq!(alloc::unreserved(device), 0);
        drop(in_use(300));
        assert_eq!(alloc::unreserved(device), 300);
        drop(block);
        drop(reservation);
        probe.reset_peak(device);
        assert_eq!((alloc::unreserved(device), probe.peak(device)), (0, 0));
        drop(in_use(70));
        assert_eq!(alloc::unreserved(device), 70, "nothing is reserved any more");
    }

    #[test]
    #[should_panic(expected = "`a` reserved of `cpu:0`, `b` of `cpu:1`")]
    fn reservations_of_different_budgets_do_not_merge() {
        let other = Budget::new("cpu:1", ByteSize(10));
        budget(10).reserve(1, "a").unwrap().merge(other.reserve(1, "b").unwrap());
    }

    #[test]
    #[should_panic(expected = "`a` reserved 3 bytes, 4 cannot be split off")]
    fn no_more_is_split_off_than_there_is() {
        drop(budget(10).reserve(3, "a").unwrap().split(4));
    }

    #[test]
    fn threads_together_never_get_more_than_there_is() {
        let budget = budget(100);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let budget = &budget;
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for i in 0..2000_u64 {
                        match budget.reserve((i * 7 + thread * 13) % 40, format!("thread {thread}")) {
                            Ok(reservation) => held.push(reservation),
                            Err(_) => held.truncate(held.len() / 2),
                        }
                        assert!(budget.used() <= budget.capacity());
                    }
                });
            }
        });
        assert!(budget.peak() <= 100 && budget.peak() > 40, "{}", budget.peak());
        assert_eq!(budget.used(), 0);
        assert!(budget.state().holders.is_empty());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Reserve { bytes: u64, owner: u8 },
        Release(prop::sample::Index),
        Split(prop::sample::Index, u64),
        Shrink(prop::sample::Index, u64),
        Merge(prop::sample::Index, prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        let at = any::<prop::sample::Index>;
        prop_oneof![
            4 => (0..60_u64, 0..4_u8).prop_map(|(bytes, owner)| Op::Reserve { bytes, owner }),
            2 => at().prop_map(Op::Release),
            1 => (at(), 0..60_u64).prop_map(|(i, bytes)| Op::Split(i, bytes)),
            1 => (at(), 0..60_u64).prop_map(|(i, bytes)| Op::Shrink(i, bytes)),
            1 => (at(), at()).prop_map(|(i, j)| Op::Merge(i, j)),
        ]
    }

    fn apply(op: Op, budget: &Budget, held: &mut Vec<Reservation>) {
        if let Op::Reserve { bytes, owner } = op {
            let free = budget.available();
            match budget.reserve(bytes, format!("owner {owner}")) {
                Ok(reservation) => held.push(reservation),
                Err(BudgetError::Refused { available, .. }) => {
                    assert!(available == free && bytes > free);
                }
            }
            return;
        }
        if held.is_empty() {
            return;
        }
        match op {
            Op::Reserve { .. } => {}
            Op::Release(i) => drop(held.swap_remove(i.index(held.len()))),
            Op::Split(i, bytes) => {
                let from = i.get_mut(held);
                let part = from.split(bytes.min(from.bytes()));
                held.push(part);
            }
            Op::Shrink(i, bytes) => i.get_mut(held).shrink_to(bytes),
            Op::Merge(i, j) => {
                let other = held.swap_remove(i.index(held.len()));
                match held.is_empty() {
                    true => held.push(other),
                    false => j.get_mut(held).merge(other),
                }
            }
        }
    }

    fn check(budget: &Budget, held: &[Reservation]) {
        let mut owners = BTreeMap::new();
        for reservation in held.iter().filter(|r| r.bytes() > 0) {
            *owners.entry(reservation.owner.clone()).or_insert(0) += reservation.bytes();
        }
        let state = budget.state();
        assert_eq!(state.used, held.iter().map(Reservation::bytes).sum::<u64>());
        assert_eq!(state.holders, owners);
        assert!(state.used <= state.recent_peak && state.recent_peak <= state.peak);
        assert!(state.peak <= budget.capacity());
    }

    proptest! {
        #[test]
        fn what_is_used_is_what_reservations_hold(ops in prop::collection::vec(op(), 0..80)) {
            let (budget, mut held) = (budget(100), Vec::new());
            for op in ops {
                apply(op, &budget, &mut held);
                check(&budget, &held);
            }
            drop(held);
            check(&budget, &[]);
        }
    }
}
