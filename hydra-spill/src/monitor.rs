//! The interface to mutexes and condition variables.

use std::sync::{Condvar, Mutex, PoisonError};

/// A mutex with a condition variable: the only platform interface of double buffer and arena, so that
/// the model checker runs the same code as the engine.
pub trait Monitor {
    /// A guarded state.
    type Cell<S>;

    /// Guards `state`.
    fn guard<S>(state: S) -> Self::Cell<S>;

    /// Runs `f` with exclusive access to the state, then wakes every waiting thread.
    fn enter<S, R>(cell: &Self::Cell<S>, f: impl FnOnce(&mut S) -> R) -> R;

    /// Runs `f` with exclusive access to the state, again after each wake, until it returns a value.
    fn wait_for<S, R>(cell: &Self::Cell<S>, f: impl FnMut(&mut S) -> Option<R>) -> R;
}

/// The monitor of the standard library.
#[derive(Clone, Copy, Debug)]
pub enum StdMonitor {}

impl Monitor for StdMonitor {
    type Cell<S> = (Mutex<S>, Condvar);

    fn guard<S>(state: S) -> Self::Cell<S> {
        (Mutex::new(state), Condvar::new())
    }

    fn enter<S, R>((state, changed): &Self::Cell<S>, f: impl FnOnce(&mut S) -> R) -> R {
        // Poisoning is ignored: no transition panics halfway, so the state is consistent between calls.
        let answer = f(&mut state.lock().unwrap_or_else(PoisonError::into_inner));
        changed.notify_all();
        answer
    }

    fn wait_for<S, R>((state, changed): &Self::Cell<S>, mut f: impl FnMut(&mut S) -> Option<R>) -> R {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(answer) = f(&mut state) {
                return answer;
            }
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Monitor;

    /// The same code under the model checker, which runs every interleaving of the threads.
    pub(crate) enum LoomMonitor {}

    impl Monitor for LoomMonitor {
        type Cell<S> = (loom::sync::Mutex<S>, loom::sync::Condvar);

        fn guard<S>(state: S) -> Self::Cell<S> {
            (loom::sync::Mutex::new(state), loom::sync::Condvar::new())
        }

        fn enter<S, R>((state, changed): &Self::Cell<S>, f: impl FnOnce(&mut S) -> R) -> R {
            let answer = f(&mut state.lock().unwrap());
            changed.notify_all();
            answer
        }

        fn wait_for<S, R>((state, changed): &Self::Cell<S>, mut f: impl FnMut(&mut S) -> Option<R>) -> R {
            let mut state = state.lock().unwrap();
            loop {
                if let Some(answer) = f(&mut state) {
                    return answer;
                }
                state = changed.wait(state).unwrap();
            }
        }
    }
}
