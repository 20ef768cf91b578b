//! The thread that updates a display while there are no events. It ends with the display.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The time from one tick to the next.
const EVERY: Duration = Duration::from_secs(1);

/// Calls a function once a second until it is dropped.
pub(super) struct Ticker {
    end: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts the thread; does nothing if the system has no thread for it.
    pub(super) fn start(tick: impl FnMut() + Send + 'static) -> Self {
        Self::after(is_over_a_second_later, tick)
    }

    /// Calls `tick` after each wait for which `is_last` returns false.
    pub(super) fn after(
        mut is_last: impl FnMut(&Receiver<Infallible>) -> bool + Send + 'static,
        mut tick: impl FnMut() + Send + 'static,
    ) -> Self {
        let (end, ended) = channel();
        let work = move || {
            while !is_last(&ended) {
                tick();
            }
        };
        let thread = Builder::new().name("hydra-progress".to_owned()).spawn(work).ok();
        Self { end: Some(end), thread }
    }
}

fn is_over_a_second_later(ended: &Receiver<Infallible>) -> bool {
    ended.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout)
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the ticker only ends its updates.
            let _ = thread.join();
        }
    }
}
