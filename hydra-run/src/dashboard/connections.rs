//! The limit on open connections. A new connection at the limit closes the oldest one that is not an event stream, so slow
//! connections cannot block later ones.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::task::AbortHandle;

/// The maximum number of open connections, and of event streams among them.
pub(super) const CONNECTIONS: usize = 96;
pub(super) const STREAMS: usize = 32;

/// The open connections, the oldest first.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Mutex<Open>>);

#[derive(Default)]
struct Open {
    next: u64,
    connections: BTreeMap<u64, (Connection, Option<AbortHandle>)>,
}

/// The state of one connection: whether it is an event stream now.
#[derive(Clone, Default)]
pub(super) struct Connection(Arc<AtomicBool>);

impl Connection {
    /// Marks the connection as an event stream until the result is dropped. Returns `None` if [`STREAMS`] are open.
    pub(super) fn stream(&self, connections: &Connections) -> Option<EventStream> {
        let open = connections.0.lock().unwrap_or_else(PoisonError::into_inner);
        if open.connections.values().filter(|(connection, _)| connection.0.load(Relaxed)).count() >= STREAMS {
            return None;
        }
        self.0.store(true, Relaxed);
        Some(EventStream(self.clone()))
    }
}

/// An open event stream.
pub(super) struct EventStream(Connection);

impl Drop for EventStream {
    fn drop(&mut self) {
        self.0.0.store(false, Relaxed);
    }
}

impl Connections {
    /// Registers a connection and returns its number. Closes the oldest connection that is not an event stream if the limit is
    /// reached.
    pub(super) fn open(&self) -> (u64, Connection) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while open.connections.len() >= CONNECTIONS {
            let oldest = open
                .connections
                .iter()
                .find(|(_, (connection, _))| !connection.0.load(Relaxed))
                .map(|(number, _)| *number);
            // Never fails: STREAMS is less than CONNECTIONS.
            let Some((_, handle)) = oldest.and_then(|number| open.connections.remove(&number)) else {
                break;
            };
            handle.iter().for_each(AbortHandle::abort);
        }
        let (number, connection) = (open.next, Connection::default());
        open.next += 1;
        open.connections.insert(number, (connection.clone(), None));
        (number, connection)
    }

    /// Sets the task that is aborted when the connection is closed for a newer one.
    pub(super) fn set_handle(&self, number: u64, handle: AbortHandle) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.connections.get_mut(&number).into_iter().for_each(|(_, held)| *held = Some(handle.clone()));
    }

    /// Removes a connection that has ended.
    pub(super) fn close(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_is_no_stream_is_closed() {
        let connections = Connections::default();
        let (first, connection) = connections.open();
        let stream = connection.stream(&connections).unwrap();
        let (second, _) = connections.open();
        (2..CONNECTIONS).for_each(|_| drop(connections.open()));
        let has = |number| connections.0.lock().unwrap().connections.contains_key(&number);
        assert!(has(first) && has(second));
        let (last, _) = connections.open();
        assert!(has(first) && !has(second) && has(last));
        drop(stream);
        connections.open();
        assert!(!has(first), "it is no stream any more");
        connections.close(last);
        assert!(!has(last));
    }

    #[test]
    fn streams_leave_connections_to_others() {
        let connections = Connections::default();
        let open: Vec<_> =
            (0..CONNECTIONS).map_while(|_| connections.open().1.stream(&connections)).collect();
        assert_eq!(open.len(), STREAMS);
        drop(open);
        assert!(connections.open().1.stream(&connections).is_some());
    }
}
