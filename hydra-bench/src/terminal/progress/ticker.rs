//! The thread that has a display go on while nothing happens. It ends with the display.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The time from one tick to the next.
const EVERY: Duration = Duration::from_secs(1);

/// Does something once a second until it is dropped.
pub(super) struct Ticker {
    end: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Begins; where the system has no thread for it, nothing is done.
    pub(super) fn start(tick: impl FnMut() + Send + 'static) -> Self {
        Self::after(is_over_a_second_later, tick)
    }

    /// Does something after each wait that does not say that it was the last.
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
            // One that has panicked has drawn nothing since: what is drawn last comes from another.
            let _ = thread.join();
        }
    }
}
