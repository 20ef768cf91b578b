//! The interface for moving bytes between the host and one device.
//!
//! A link copies whole buffers to a device or to the host and blocks until a copy is done; the threads that
//! call it determine which copies overlap. [`HostCopyLink`] serves a logical device that is part of this
//! machine's CPU and has its own memory, [`ZeroCopyLink`] one that reads the host's memory in place, and
//! [`SimulatedLink`] slows another link down to a given bandwidth, so that tests show the cost of a GPU's
//! transfers on a machine without one. The links of GPUs are in other modules. The conformance suite runs on
//! every link.
//!
//! This module may use memory and the tags of the allocator. It does not depend on buffers or stores.

use crate::Floats;
use crate::memory::aligned::AlignedBytes;
use bytes::Bytes;
use hydra_core::DeviceBytes;
use std::collections::TryReserveError;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[cfg(test)]
pub(crate) mod conformance;
#[cfg(feature = "cube")]
mod cube;
mod host;
mod simulated;

#[cfg(feature = "cube")]
pub use cube::CubeLink;
pub use host::{HostCopyLink, ZeroCopyLink};
pub use simulated::SimulatedLink;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the device.
    Upload,
    /// From the device to the host.
    Download,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Upload => "to the device",
            Self::Download => "to the host",
        })
    }
}

/// The bytes that a link has copied in each direction.
#[derive(Debug, Default)]
pub(crate) struct Moved([AtomicU64; 2]);

impl Moved {
    pub fn add(&self, direction: Direction, bytes: usize) {
        self.0[direction as usize].fetch_add(bytes as u64, Relaxed);
    }

    pub fn get(&self, direction: Direction) -> u64 {
        self.0[direction as usize].load(Relaxed)
    }
}

/// An error of copying.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum LinkError {
    /// The caller's buffer does not have the size of the copied bytes.
    #[error(
        "link `{link}`: the buffer on the device has {found} bytes, the caller's {expected}; pass buffers of the same shape"
    )]
    Length { link: String, expected: u64, found: u64 },
    /// The heap has no memory for the copy, although the budget allows it.
    #[error(
        "link `{link}`: no memory for a copy of {bytes} bytes {direction}; set budgets below the machine's free memory"
    )]
    Memory { link: String, direction: Direction, bytes: u64, source: TryReserveError },
    /// The bytes are in the memory of a device that this link does not reach.
    #[error(
        "link `{link}`: the bytes are in another device's memory; copy them with the link that uploaded them"
    )]
    Elsewhere { link: String },
    /// The device or its driver failed during a copy.
    #[error("link `{link}`: a copy of {bytes} bytes {direction} failed; see the cause")]
    Transfer {
        link: String,
        direction: Direction,
        bytes: u64,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Returns an error if the caller's buffer and the bytes on the device differ in length.
pub(crate) fn check_length(link: &str, device: usize, out: &[f32]) -> Result<(), LinkError> {
    let (expected, found) = (size_of_val(out) as u64, device as u64);
    match expected == found {
        true => Ok(()),
        false => Err(LinkError::Length { link: link.to_owned(), expected, found }),
    }
}

/// Moves bytes between the host and one device.
///
/// Uploaded bytes are never written after the copy, and they are aligned for every element type (at least
/// [`ELEMENT_ALIGN`](crate::ELEMENT_ALIGN)), because tensors read them in place.
pub trait DeviceLink: Send + Sync {
    /// The name in messages and reports.
    fn name(&self) -> &str;

    /// Returns whether results may be views of their arguments, which then cannot be written as long as
    /// the view lives. Otherwise results are independent copies.
    fn zero_copy(&self) -> bool {
        false
    }

    /// Returns whether the memory of each uploaded buffer is free for others as soon as that buffer is
    /// dropped, so that buffers can be cached individually. Otherwise buffers that are uploaded together are
    /// freed together.
    fn frees_each(&self) -> bool {
        true
    }

    /// Copies host bytes into memory of the device. Dropping the last clone of the result frees that memory.
    ///
    /// # Errors
    /// [`LinkError::Memory`] if the device has no memory left, [`LinkError::Transfer`] if the device fails.
    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError>;

    /// Uploads bytes that stay on the device, such as resident masters, into memory that no promotion uses.
    /// Errors are those of [`upload`](Self::upload).
    fn upload_persistent(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.upload(host)
    }

    /// Uploads several buffers that are usually dropped together, such as those of a shard task.
    /// Errors are those of [`upload`](Self::upload).
    fn upload_all(&self, host: &[Bytes]) -> Result<Vec<DeviceBytes>, LinkError> {
        host.iter().map(|bytes| self.upload(bytes)).collect()
    }

    /// Returns whether [`upload_filled`](Self::upload_filled) writes to the device's memory without a copy on the host.
    fn fills(&self) -> bool {
        false
    }

    /// Allocates `len` bytes of the device, zeroed, and calls `fill` to write them. The caller has reserved as much host
    /// memory, unless the link [fills](Self::fills). Errors are those of [`upload`](Self::upload).
    fn upload_filled(&self, len: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<DeviceBytes, LinkError> {
        let bytes = AlignedBytes::zeros(len).map_err(|source| LinkError::Memory {
            link: self.name().to_owned(),
            direction: Direction::Upload,
            bytes: len as u64,
            source,
        });
        let mut bytes = bytes?;
        fill(bytes.as_mut());
        self.upload(&Bytes::from_owner(bytes))
    }

    /// Copies bytes of the device into new host memory.
    ///
    /// # Errors
    /// [`LinkError::Memory`] if the host has no memory left, [`LinkError::Transfer`] if the device fails,
    /// [`LinkError::Elsewhere`].
    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError>;

    /// Downloads several buffers together, such as the results of a shard task. Errors are those of
    /// [`download`](Self::download).
    fn download_all(&self, device: &[DeviceBytes]) -> Result<Vec<Bytes>, LinkError> {
        device.iter().map(|bytes| self.download(bytes)).collect()
    }

    /// Copies floats of the device into the caller's buffer.
    ///
    /// # Errors
    /// [`LinkError::Length`] if `device` does not have four bytes for each element of `out`, which is then
    /// unchanged; [`LinkError::Transfer`] if the device fails, [`LinkError::Elsewhere`].
    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError>;

    /// Moves these floats to memory that this link copies from fastest, if there is enough; master weights
    /// are kept there.
    fn pin(&self, floats: Vec<f32>) -> Floats {
        floats.into()
    }

    /// Prepares for two concurrent promotions of up to this many bytes each. Further or larger ones take
    /// another path, which may be slower.
    ///
    /// # Errors
    /// [`LinkError::Transfer`] if the device has no memory for them.
    fn prepare(&self, _promotion: u64) -> Result<(), LinkError> {
        Ok(())
    }

    /// The bytes of device memory that [`prepare`](Self::prepare) has allocated.
    fn prepared(&self) -> u64 {
        0
    }

    /// The bytes copied in this direction so far; views are not counted.
    fn moved(&self, direction: Direction) -> u64;
}

#[cfg(test)]
mod tests {
    use super::conformance::{aligned, conforms, floats, pattern};
    use super::simulated::Channel;
    use super::*;
    use crate::alloc::{self, AllocatorProbe};
    use crate::memory::aligned::ALIGN;
    use hydra_core::{Bandwidth, DeviceId, MemoryProbe};
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::time::Duration;

    const FAST: Bandwidth = Bandwidth(64e9);
    const PROBE: AllocatorProbe = AllocatorProbe;

    // Devices of the tests of this file: 20 to 29.
    fn links(first: usize) -> [Box<dyn DeviceLink>; 3] {
        [
            Box::new(HostCopyLink::new(DeviceId(first))),
            Box::new(SimulatedLink::new(
                Arc::new(HostCopyLink::new(DeviceId(first))),
                FAST,
                Duration::from_micros(1),
            )),
            Box::new(ZeroCopyLink::new(DeviceId(first + 2))),
        ]
    }

    #[test]
    fn every_link_conforms() {
        links(20).iter().for_each(|link| conforms(link.as_ref()));
    }

    #[test]
    fn what_is_copied_in_is_charged_to_the_device_and_what_comes_out_is_not() {
        let device = DeviceId(24);
        let link = HostCopyLink::new(device);
        let len = 1 << 20;
        let copy = link.upload(&Bytes::from(pattern(0, len))).unwrap();
        let charged = (len + ALIGN - 1) as u64;
        assert_eq!(PROBE.in_use(device), charged);
        let back = alloc::with_tag(Some(device), || link.download(&copy)).unwrap();
        let clone = copy.clone();
        drop(copy);
        assert_eq!((PROBE.in_use(device), back.len()), (charged, len));
        std::thread::spawn(|| drop(clone)).join().unwrap();
        assert_eq!((PROBE.in_use(device), PROBE.peak(device)), (0, charged));
    }

    #[test]
    fn what_is_shared_stays_charged_to_who_made_it() {
        let (device, len) = (DeviceId(29), 1 << 20);
        let link = ZeroCopyLink::new(device);
        let host = aligned(&pattern(0, len));
        let copy = link.upload(&host).unwrap();
        assert_eq!((PROBE.in_use(device), copy.len()), (0, len));
        let made = DeviceBytes::from(alloc::with_tag(Some(device), || aligned(&pattern(1, len))));
        let charged = PROBE.in_use(device);
        let taken = link.download(&made).unwrap();
        drop(made);
        assert!(charged >= len as u64 && PROBE.in_use(device) == charged);
        drop(taken);
        assert_eq!(PROBE.in_use(device), 0);
    }

    #[test]
    fn a_copy_is_due_after_latency_and_transfer() {
        let due = |bandwidth, bytes| {
            let latency = Duration::from_micros(20);
            SimulatedLink::new(Arc::new(HostCopyLink::new(DeviceId(27))), Bandwidth(bandwidth), latency)
                .due(bytes)
        };
        assert_eq!(due(1e9, 1_000_000), Duration::from_micros(1020));
        assert_eq!(due(1e9, 0), Duration::from_micros(20));
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(due(odd, 1000), Duration::from_micros(20), "{odd}");
        }
    }

    #[test]
    fn a_simulated_link_passes_errors_on_and_names_itself() {
        let link =
            SimulatedLink::new(Arc::new(HostCopyLink::new(DeviceId(28))), Bandwidth(1e9), Duration::ZERO);
        assert_eq!(link.name(), "host copy, device 28, simulated at 953.67 MiB/s");
        let error = link.download_into(&floats(&[1.0]).into(), &mut [0.0; 2]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "link `host copy, device 28`: the buffer on the device has 4 bytes, the caller's 8; pass buffers of the same shape"
        );
    }

    proptest! {
        // Copies and sleeps of arbitrary lengths: the times add up regardless of the clock.
        #[test]
        fn oversleeping_is_made_up_for(copies in prop::collection::vec((0u64..5000, 0u64..3000, 0u64..2000), 1..50)) {
            let time = Duration::from_micros;
            let (mut channel, mut wanted, mut spent) = (Channel::default(), Duration::ZERO, Duration::ZERO);
            for (due, taken, oversleeps) in copies {
                let (due, taken) = (time(due), time(taken));
                let rest = channel.rest(due, taken);
                prop_assert!(taken + rest <= due.max(taken));
                let mut slept = Duration::ZERO;
                if !rest.is_zero() {
                    slept = rest + time(oversleeps);
                    channel.slept(rest, slept);
                }
                wanted += due.max(taken);
                spent += taken + slept;
                // Never faster in total than the bandwidth, and never slower by more than the recorded debt.
                prop_assert_eq!(spent, wanted + channel.overslept);
            }
        }
    }
}
