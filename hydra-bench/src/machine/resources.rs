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

    /// The note on budgets that are larger than the memory that is free: that of the host, and of each of so many CPU
    /// devices.
    pub(crate) fn note_of_budgets(
        &self,
        host: Option<ByteSize>,
        devices: Option<(usize, ByteSize)>,
    ) -> Option<String> {
        let available = self.available?;
        let on_devices = devices.map(|(count, each)| each.bytes().saturating_mul(count as u64));
        let is_more = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes > available.bytes());
        let host_bytes = host.map(|host| host.bytes());
        let said = match (host, devices, on_devices) {
            (Some(host), _, _) if is_more(host_bytes) => format!("--host-memory {host} is"),
            (_, Some((count, each)), Some(all)) if is_more(on_devices) => match count {
                1 => format!("--device-memory {each} is"),
                _ => format!(
                    "--device-memory {each} on each of {count} devices is {}, which is",
                    ByteSize(all)
                ),
            },
            (Some(host), Some(_), Some(all)) if is_more(Some(all.saturating_add(host.bytes()))) => {
                let sum = ByteSize(all.saturating_add(host.bytes()));
                format!(
                    "--host-memory {host} and --device-memory, {} on all devices, are {sum}, which is",
                    ByteSize(all)
                )
            }
            _ => return None,
        };
        let free =
            if self.limited { "that the limit of a control group leaves" } else { "of memory that are free" };
        Some(format!(
            "note: {said} more than the {available} {free} here: a run that comes to need more than these is slowed down \
             by swapping, or killed by the system"
        ))
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

    #[test]
    fn budgets_beyond_the_machine_are_said_with_both_figures() {
        let gib = |count: u64| ByteSize(count << 30);
        let machine = Machine { cores: 2, available: Some(gib(24)), limited: false };
        let note = |host: Option<u64>, devices: Option<(usize, u64)>| {
            machine.note_of_budgets(host.map(gib), devices.map(|(count, each)| (count, gib(each))))
        };
        for fits in
            [note(None, None), note(Some(24), None), note(None, Some((2, 12))), note(Some(12), Some((1, 12)))]
        {
            assert_eq!(fits, None);
        }
        for (note, figure) in [
            (note(Some(1024), None), "--host-memory 1024.00 GiB is more"),
            (note(Some(1024), Some((1, 1))), "--host-memory 1024.00 GiB is more"),
            (note(None, Some((1, 25))), "--device-memory 25.00 GiB is more"),
            (note(None, Some((3, 10))), "on each of 3 devices is 30.00 GiB, which is more"),
            (note(Some(20), Some((2, 4))), "8.00 GiB on all devices, are 28.00 GiB, which is more"),
            (note(None, Some((usize::MAX, 1))), "--device-memory 1.00 GiB on each of"),
        ] {
            let note = note.unwrap();
            let rest = "more than the 24.00 GiB of memory that are free here";
            assert!(note.contains(figure) && note.contains(rest) && !note.contains('\n'), "{note}");
            assert!(note.contains("swapping, or killed"), "{note}");
        }
        let blind = Machine { available: None, ..machine };
        assert_eq!(blind.note_of_budgets(Some(gib(1024)), None), None);
        let limited = Machine { limited: true, ..machine };
        let note = limited.note_of_budgets(Some(gib(25)), None).unwrap();
        assert!(note.contains("24.00 GiB that the limit of a control group leaves"), "{note}");
    }
}
