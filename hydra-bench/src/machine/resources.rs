//! The machine's cores and free memory.

use crate::machine::procfs;
use anyhow::{Context, Result, ensure};
use hydra_core::ByteSize;
use serde::Serialize;
use std::path::Path;

/// The share of free memory that all devices get when nobody says how much: on a CPU the masters need the rest.
const DEVICE_SHARE: (u64, u64) = (2, 5);
/// The share of free memory that a run may use in all.
const RUN_SHARE: (u64, u64) = (9, 10);
/// The least that the host gets, as a share of free memory, however large the devices' budgets are.
const HOST_SHARE: (u64, u64) = (1, 2);

/// The memory and the cores of the machine, under the names that `hydra doctor` gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Machine {
    /// Memory that can be had without swapping; `None` where the system does not tell.
    #[serde(rename = "host_free_bytes")]
    pub(crate) available: Option<ByteSize>,
    /// True if that is what a control group leaves, such as that of a container.
    #[serde(rename = "host_is_limited")]
    pub(crate) limited: bool,
    /// Cores that this process may use.
    pub(crate) cores: usize,
}

impl Machine {
    pub(crate) fn look() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (available, limited) = procfs::available(Path::new("/")).unzip();
        Self { cores, available, limited: limited.unwrap_or(false) }
    }

    /// The memory of each of `count` devices when nobody says how much.
    pub(crate) fn device_share(&self, count: usize) -> Result<ByteSize> {
        let available = self.available.context(
            "the system does not tell how much memory is free: give --device-memory, such as --device-memory 1GiB",
        )?;
        let bytes = share(available, DEVICE_SHARE) / count.max(1) as u64;
        ensure!(
            bytes > 0,
            "no memory is free, or none within the limit of a control group: give --device-memory"
        );
        Ok(ByteSize(bytes))
    }

    /// The host's part when nobody says how much: that of a run without the devices' budgets, but at least half of what
    /// is free, because a budget that is larger than the machine will not be used up.
    pub(crate) fn host_share(&self, devices: ByteSize) -> Option<ByteSize> {
        let available = self.available?;
        let rest = share(available, RUN_SHARE).saturating_sub(devices.bytes());
        Some(ByteSize(rest.max(share(available, HOST_SHARE))))
    }
}

fn share(of: ByteSize, (part, whole): (u64, u64)) -> u64 {
    of.bytes() / whole * part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_host_share_what_is_free() {
        let machine = Machine { cores: 2, available: Some(ByteSize(1000)), limited: false };
        assert_eq!(machine.device_share(2).unwrap(), ByteSize(200));
        assert_eq!(machine.host_share(ByteSize(400)), Some(ByteSize(500)));
        assert_eq!(machine.host_share(ByteSize(100)), Some(ByteSize(800)));
        assert_eq!(machine.host_share(ByteSize(5000)), Some(ByteSize(500)));
        let blind = Machine { cores: 2, available: None, limited: false };
        assert!(blind.device_share(1).unwrap_err().to_string().contains("--device-memory"));
        assert_eq!(blind.host_share(ByteSize(1)), None);
        let full = Machine { cores: 2, available: Some(ByteSize(0)), limited: true };
        assert!(full.device_share(1).unwrap_err().to_string().contains("limit of a control group"));
    }
}
