//! The seats of connections: so many are open at once. Where all are taken, the oldest one that is not a stream of events
//! goes, so that slow connections, however many, keep out nobody who comes after them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::task::AbortHandle;

/// The most connections at once, and the most of them that are streams of events.
pub(super) const SEATS: usize = 96;
pub(super) const STREAMS: usize = 32;

/// Those that are taken, the oldest first.
#[derive(Clone, Default)]
pub(super) struct Seats(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    next: u64,
    seats: BTreeMap<u64, (Seat, Option<AbortHandle>)>,
}

/// A connection's own: whether it is a stream of events now.
#[derive(Clone, Default)]
pub(super) struct Seat(Arc<AtomicBool>);

impl Seat {
    /// The connection is a stream of events until this is dropped; none if too many are.
    pub(super) fn stream(&self, seats: &Seats) -> Option<Stream> {
        let taken = seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.seats.values().filter(|(seat, _)| seat.0.load(Relaxed)).count() >= STREAMS {
            return None;
        }
        self.0.store(true, Relaxed);
        Some(Stream(self.clone()))
    }
}

/// A stream of events, while it is open.
pub(super) struct Stream(Seat);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.0.store(false, Relaxed);
    }
}

impl Seats {
    /// Makes room for one more, and gives it its number and its seat.
    pub(super) fn take(&self) -> (u64, Seat) {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while taken.seats.len() >= SEATS {
            let oldest =
                taken.seats.iter().find(|(_, (seat, _))| !seat.0.load(Relaxed)).map(|(number, _)| *number);
            // Streams leave seats to others, for there are fewer of them than seats.
            let Some((_, handle)) = oldest.and_then(|number| taken.seats.remove(&number)) else { break };
            handle.iter().for_each(AbortHandle::abort);
        }
        let (number, seat) = (taken.next, Seat::default());
        taken.next += 1;
        taken.seats.insert(number, (seat.clone(), None));
        (number, seat)
    }

    /// Says what is to be ended when the seat is taken away.
    pub(super) fn held_by(&self, number: u64, handle: AbortHandle) {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.seats.get_mut(&number).into_iter().for_each(|(_, held)| *held = Some(handle.clone()));
    }

    /// The connection has ended.
    pub(super) fn leave(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).seats.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_is_no_stream_makes_room() {
        let seats = Seats::default();
        let (first, seat) = seats.take();
        let stream = seat.stream(&seats).unwrap();
        let (second, _) = seats.take();
        (2..SEATS).for_each(|_| drop(seats.take()));
        let has = |number| seats.0.lock().unwrap().seats.contains_key(&number);
        assert!(has(first) && has(second));
        let (last, _) = seats.take();
        assert!(has(first) && !has(second) && has(last));
        drop(stream);
        seats.take();
        assert!(!has(first), "it is no stream any more");
        seats.leave(last);
        assert!(!has(last));
    }

    #[test]
    fn streams_leave_seats_to_others() {
        let seats = Seats::default();
        let open: Vec<_> = (0..SEATS).map_while(|_| seats.take().1.stream(&seats)).collect();
        assert_eq!(open.len(), STREAMS);
        drop(open);
        assert!(seats.take().1.stream(&seats).is_some());
    }
}
