//! The seats of connections: so many are open at once. Where all are taken, the oldest one that is not a stream of events
//! goes, so that slow connections, however many, keep out nobody who comes after them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::task::AbortHandle;

/// The most connections at once, and the most of them that are streams of events.
pub(super) const CONNECTIONS: usize = 96;
pub(super) const STREAMS: usize = 32;

/// Those that are taken, the oldest first.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    next: u64,
    connections: BTreeMap<u64, (Connection, Option<AbortHandle>)>,
}

/// A connection's own: whether it is a stream of events now.
#[derive(Clone, Default)]
pub(super) struct Connection(Arc<AtomicBool>);

impl Connection {
    /// The connection is a stream of events until this is dropped; none if too many are.
    pub(super) fn stream(&self, connections: &Connections) -> Option<Stream> {
        let taken = connections.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.connections.values().filter(|(connection, _)| connection.0.load(Relaxed)).count() >= STREAMS
        {
            return None;
        }
        self.0.store(true, Relaxed);
        Some(Stream(self.clone()))
    }
}

/// A stream of events, while it is open.
pub(super) struct Stream(Connection);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.0.store(false, Relaxed);
    }
}

impl Connections {
    /// Makes room for one more, and gives it its number and its seat.
    pub(super) fn take(&self) -> (u64, Connection) {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while taken.connections.len() >= CONNECTIONS {
            let oldest = taken
                .connections
                .iter()
                .find(|(_, (connection, _))| !connection.0.load(Relaxed))
                .map(|(number, _)| *number);
            // Streams leave seats to others, for there are fewer of them than seats.
            let Some((_, handle)) = oldest.and_then(|number| taken.connections.remove(&number)) else {
                break;
            };
            handle.iter().for_each(AbortHandle::abort);
        }
        let (number, connection) = (taken.next, Connection::default());
        taken.next += 1;
        taken.connections.insert(number, (connection.clone(), None));
        (number, connection)
    }

    /// Says what is to be ended when the seat is taken away.
    pub(super) fn held_by(&self, number: u64, handle: AbortHandle) {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.connections.get_mut(&number).into_iter().for_each(|(_, held)| *held = Some(handle.clone()));
    }

    /// The connection has ended.
    pub(super) fn leave(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_is_no_stream_makes_room() {
        let connections = Connections::default();
        let (first, connection) = connections.take();
        let stream = connection.stream(&connections).unwrap();
        let (second, _) = connections.take();
        (2..CONNECTIONS).for_each(|_| drop(connections.take()));
        let has = |number| connections.0.lock().unwrap().connections.contains_key(&number);
        assert!(has(first) && has(second));
        let (last, _) = connections.take();
        assert!(has(first) && !has(second) && has(last));
        drop(stream);
        connections.take();
        assert!(!has(first), "it is no stream any more");
        connections.leave(last);
        assert!(!has(last));
    }

    #[test]
    fn streams_leave_connections_to_others() {
        let connections = Connections::default();
        let open: Vec<_> =
            (0..CONNECTIONS).map_while(|_| connections.take().1.stream(&connections)).collect();
        assert_eq!(open.len(), STREAMS);
        drop(open);
        assert!(connections.take().1.stream(&connections).is_some());
    }
}
