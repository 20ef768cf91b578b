//! Seconds since a run started, the same on every thread.

use std::time::Instant;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}

/// A span of time on the run's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Time {
    pub start_s: f64,
    pub end_s: f64,
}

impl Time {
    pub(crate) fn seconds(&self) -> f64 {
        self.end_s - self.start_s
    }
}
