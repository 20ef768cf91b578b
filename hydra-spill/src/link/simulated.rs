//! A link with a given bandwidth and latency.

use super::{DeviceLink, Direction, LinkError};
use crate::Floats;
use bytes::Bytes;
use hydra_core::{Bandwidth, DeviceBytes};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A link that is slowed down to a given bandwidth and latency: a copy of `n` bytes takes at least
/// `latency + n / bandwidth` (on average, see below), or as long as the inner link takes. One copy at a
/// time runs in each direction, and the directions are independent, as those of a PCIe bus are.
///
/// The thread sleeps for the rest of the time after the real copy. A sleep takes longer than requested, so
/// the excess is subtracted from the next ones in its direction, and the average over many copies is exact.
pub struct SimulatedLink {
    name: String,
    inner: Arc<dyn DeviceLink>,
    bandwidth: Bandwidth,
    latency: Duration,
    uploads: Mutex<Channel>,
    downloads: Mutex<Channel>,
}

impl SimulatedLink {
    /// Slows `inner` down to `bandwidth` in each direction, with `latency` before each copy. If the bandwidth
    /// is not a positive number, only the latency applies.
    pub fn new(inner: Arc<dyn DeviceLink>, bandwidth: Bandwidth, latency: Duration) -> Self {
        let name = format!("{}, simulated at {bandwidth}", inner.name());
        Self { name, inner, bandwidth, latency, uploads: Mutex::default(), downloads: Mutex::default() }
    }

    /// The time that a copy of `bytes` bytes should take.
    pub(super) fn due(&self, bytes: usize) -> Duration {
        let transfer = Duration::try_from_secs_f64(bytes as f64 / self.bandwidth.0);
        self.latency.saturating_add(transfer.unwrap_or_default())
    }

    fn timed<R>(
        &self,
        channel: &Mutex<Channel>,
        bytes: usize,
        copy: impl FnOnce() -> Result<R, LinkError>,
    ) -> Result<R, LinkError> {
        // Held until the copy's time is over, so that the next one in this direction waits.
        let mut channel = channel.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let copied = copy()?;
        let rest = channel.rest(self.due(bytes), start.elapsed());
        if !rest.is_zero() {
            channel.slept(rest, sleep(rest));
        }
        Ok(copied)
    }
}

impl DeviceLink for SimulatedLink {
    fn name(&self) -> &str {
        &self.name
    }

    fn zero_copy(&self) -> bool {
        self.inner.zero_copy()
    }

    fn frees_each(&self) -> bool {
        self.inner.frees_each()
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.timed(&self.uploads, host.len(), || self.inner.upload(host))
    }

    fn upload_persistent(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.timed(&self.uploads, host.len(), || self.inner.upload_persistent(host))
    }

    fn fills(&self) -> bool {
        self.inner.fills()
    }

    fn upload_filled(&self, len: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<DeviceBytes, LinkError> {
        self.timed(&self.uploads, len, || self.inner.upload_filled(len, fill))
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        self.timed(&self.downloads, device.len(), || self.inner.download(device))
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        self.timed(&self.downloads, device.len(), || self.inner.download_into(device, out))
    }

    fn pin(&self, floats: Vec<f32>) -> Floats {
        self.inner.pin(floats)
    }

    fn prepare(&self, promotion: u64) -> Result<(), LinkError> {
        self.inner.prepare(promotion)
    }

    fn prepared(&self) -> u64 {
        self.inner.prepared()
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.inner.moved(direction)
    }
}

/// One direction of a simulated link.
#[derive(Debug, Default)]
pub(super) struct Channel {
    /// The excess of earlier sleeps that later ones have not compensated yet.
    pub(super) overslept: Duration,
}

impl Channel {
    /// Returns the time left to sleep of the `due` time after the copy itself has `taken` some of it.
    pub(super) fn rest(&mut self, due: Duration, taken: Duration) -> Duration {
        let rest = due.saturating_sub(taken);
        let shortened = self.overslept.min(rest);
        self.overslept -= shortened;
        rest - shortened
    }

    pub(super) fn slept(&mut self, asked: Duration, took: Duration) {
        self.overslept += took.saturating_sub(asked);
    }
}

/// Sleeps at least that long and returns the actual duration.
#[expect(clippy::disallowed_methods, reason = "a simulated link needs real delays")]
fn sleep(time: Duration) -> Duration {
    let start = Instant::now();
    std::thread::sleep(time);
    start.elapsed()
}
