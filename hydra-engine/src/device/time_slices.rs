//! Time slicing of processors among CPU devices, if their threads are more than the processors.

use super::{DeviceKind, DeviceSpec};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The processors that the compute workers of CPU devices share, as a queue.
///
/// A shard task holds a processor for each of its threads until it ends. If the devices have more threads than there
/// are processors, later shard tasks wait, instead of all being slowed down by the kernel's scheduler. A running
/// shard task waits for no other one, so the queue always advances.
pub(crate) struct TimeSlices {
    processors: usize,
    queue: Mutex<TurnQueue>,
    moved: Condvar,
}

struct TurnQueue {
    free: usize,
    /// Tickets of the waiting workers, first come first served.
    waiting: VecDeque<u64>,
    /// The next ticket.
    next: u64,
}

/// The processors of a shard task; dropping it frees them.
pub(crate) struct TimeSlice<'a> {
    of: &'a TimeSlices,
    processors: usize,
}

impl TimeSlices {
    pub(crate) fn new(processors: usize) -> Self {
        let queue = TurnQueue { free: processors, waiting: VecDeque::new(), next: 0 };
        Self { processors, queue: Mutex::new(queue), moved: Condvar::new() }
    }

    /// Waits for the first place in the queue and for a processor for each of the device's threads, at most all of
    /// them.
    pub(crate) fn take(&self, device: &DeviceSpec) -> TimeSlice<'_> {
        let processors = device.threads_here().min(self.processors);
        if processors == 0 {
            return TimeSlice { of: self, processors };
        }
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push_back(number);
        while queue.waiting.front() != Some(&number) || queue.free < processors {
            queue = self.moved.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.waiting.pop_front();
        queue.free -= processors;
        // The next one may fit too.
        self.moved.notify_all();
        TimeSlice { of: self, processors }
    }

    fn lock(&self) -> MutexGuard<'_, TurnQueue> {
        // No code panics while the lock is held.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TimeSlice<'_> {
    fn drop(&mut self) {
        self.of.lock().free += self.processors;
        self.of.moved.notify_all();
    }
}

impl DeviceSpec {
    /// The threads that compute on this machine's processors; zero for a GPU, whose thread only submits work.
    pub(crate) fn threads_here(&self) -> usize {
        if self.kind == DeviceKind::Cpu { self.threads } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::unbounded;
    use hydra_core::ByteSize;

    fn cpu(threads: usize) -> DeviceSpec {
        DeviceSpec::cpu(ByteSize::mib(1)).threads(threads)
    }

    /// Waits until the queue has `count` entries.
    fn queued(time_slices: &TimeSlices, count: usize) {
        while time_slices.lock().waiting.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn whoever_came_first_is_first() {
        let (time_slices, (began, begins)) = (TimeSlices::new(2), unbounded());
        let first = time_slices.take(&cpu(1));
        let second = time_slices.take(&cpu(1));
        std::thread::scope(|scope| {
            for (place, threads) in [2, 1, 8].into_iter().enumerate() {
                let (time_slices, began) = (&time_slices, began.clone());
                scope.spawn(move || {
                    let time_slice = time_slices.take(&cpu(threads));
                    began.send(place).unwrap();
                    drop(time_slice);
                });
                queued(time_slices, place + 1);
            }
            drop(first);
            // One processor is free, the first one in the queue needs two, and no later one overtakes it.
            queued(&time_slices, 3);
            assert!(begins.is_empty());
            // A GPU has processors of its own.
            drop(time_slices.take(&DeviceSpec::cuda(0, ByteSize::mib(1))));
            drop(second);
            assert_eq!([0; 3].map(|_| begins.recv().unwrap()), [0, 1, 2]);
        });
        assert_eq!(time_slices.lock().free, 2);
    }

    #[test]
    fn a_panic_gives_the_turn_back() {
        let time_slices = TimeSlices::new(1);
        let panics = std::panic::AssertUnwindSafe(|| {
            let _turn = time_slices.take(&cpu(1));
            panic!("a layer");
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        drop(time_slices.take(&cpu(1)));
    }
}
