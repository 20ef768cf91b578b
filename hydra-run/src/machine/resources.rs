//! The machine's cores and free memory, and the other runs that use them.

use crate::machine::procfs::{self, AvailableMemory};
use crate::machine::reservations::{MachineReservations, OtherRun, card_name, in_one_line};
use anyhow::{Context, Result, ensure};
use hydra_core::ByteSize;
use serde::Serialize;
use std::path::Path;

/// The default share of available memory for all devices. On a CPU the rest is for master weights and optimizer state.
const DEVICE_SHARE: (u64, u64) = (2, 5);
/// The share of available memory for a whole run.
const RUN_SHARE: (u64, u64) = (9, 10);
/// The minimum share of available memory for the host, regardless of the devices' budgets.
const HOST_SHARE: (u64, u64) = (1, 2);

/// Memory and cores of the machine, serialized with the names of `hydra doctor`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Machine {
    /// Memory available without swapping; `None` if the system does not report it.
    #[serde(rename = "host_free_bytes")]
    pub free: Option<ByteSize>,
    /// The part of `free` that other runs have not reserved.
    #[serde(rename = "host_available_bytes")]
    pub available: Option<ByteSize>,
    /// True if a control group, such as a container's, limits it below the machine's memory.
    #[serde(rename = "host_is_limited")]
    pub limited: bool,
    /// Cores available to this process.
    pub cores: usize,
    /// What computes products of `bf16` on them.
    pub bf16_products: &'static str,
    /// The other runs on this machine.
    #[serde(rename = "other_runs")]
    pub others: Vec<OtherRun>,
    /// The memory of the default CPU device.
    pub cpu_device_bytes: Option<ByteSize>,
}

impl Machine {
    /// Reads the state of the machine, and the machine-wide reservations if given.
    pub(crate) fn look(reservations: Option<&MachineReservations>) -> Self {
        Self::look_at(Path::new("/"), reservations)
    }

    /// Reads the state of a machine with the file system at `root`.
    pub(super) fn look_at(root: &Path, reservations: Option<&MachineReservations>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let others = reservations.map(|reservations| reservations.others(root)).unwrap_or_default();
        let expected: Vec<(u32, ByteSize)> =
            others.iter().map(|other| (other.admitted.process, other.expected)).collect();
        let bf16_products = hydra_models::ops::bf16_products();
        let mut machine = Self { cores, bf16_products, others, ..Self::default() };
        if let Some(AvailableMemory { bytes, limited, left }) = procfs::free(root, &expected) {
            (machine.free, machine.available, machine.limited) = (Some(bytes), Some(left), limited);
        }
        machine.cpu_device_bytes = machine.device_share(1).ok();
        machine
    }

    /// Returns the note on other runs and the memory that they leave.
    pub(crate) fn note_of_others(&self) -> Option<String> {
        let left = self.available.map(|left| format!("; {left} of host memory are available"));
        Some(format!("note: {}{}", in_one_line(&self.others)?, left.unwrap_or_default()))
    }

    /// Returns the suffix of an error that names other runs.
    pub(crate) fn because_of_others(&self) -> String {
        in_one_line(&self.others).map(|words| format!("; {words}")).unwrap_or_default()
    }

    /// Returns the memory of a GPU that other runs have reserved.
    pub(crate) fn admitted_on(&self, card: usize) -> ByteSize {
        let name = card_name_here(card);
        let on_it = self.others.iter().filter_map(|other| other.admitted.cards.get(&name));
        ByteSize(on_it.fold(0, |sum, bytes| sum.saturating_add(bytes.bytes())))
    }

    /// Returns the default memory of each of `count` devices.
    pub(crate) fn device_share(&self, count: usize) -> Result<ByteSize> {
        let available = self.available.context(
            "the system does not report its free memory: pass --device-memory, such as --device-memory 1GiB",
        )?;
        let bytes = share(available, DEVICE_SHARE) / count.max(1) as u64;
        ensure!(
            bytes > 0,
            "no memory is available on this machine or within its control group: pass --device-memory{}",
            self.because_of_others()
        );
        Ok(ByteSize(bytes))
    }

    /// Returns the default host memory: the run's share minus the devices' budgets, but at least half of the available memory,
    /// because a run does not use up a device budget larger than the machine.
    pub(crate) fn host_share(&self, devices: ByteSize) -> Option<ByteSize> {
        let available = self.available?;
        let rest = share(available, RUN_SHARE).saturating_sub(devices.bytes());
        Some(ByteSize(rest.max(share(available, HOST_SHARE))))
    }

    /// Returns the note on budgets that exceed the available memory: of the host, and of each of the CPU devices.
    pub(crate) fn note_of_budgets(
        &self,
        host: Option<ByteSize>,
        devices: Option<(usize, ByteSize)>,
    ) -> Option<String> {
        let available = self.available?;
        let on_devices = devices.map(|(count, each)| each.bytes().saturating_mul(count as u64));
        let is_more = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes > available.bytes());
        let host_bytes = host.map(|host| host.bytes());
        let budgets = match (host, devices, on_devices) {
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
            if self.limited { "available within the limit of the control group" } else { "of free memory" };
        let others = if self.available < self.free { " not reserved by other runs" } else { "" };
        Some(format!(
            "note: {budgets} more than the {available} {free}{others}: a run that uses more will swap, or be killed by the \
            system"
        ))
    }
}

/// Returns the machine-wide name of a GPU of this process.
pub(crate) fn card_name_here(card: usize) -> String {
    card_name(card, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

fn share(of: ByteSize, (part, whole): (u64, u64)) -> u64 {
    of.bytes() / whole * part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::reservations::Admitted;

    /// Returns a machine with this much memory.
    fn with(available: Option<ByteSize>) -> Machine {
        Machine { cores: 2, available, free: available, ..Machine::default() }
    }

    #[test]
    fn devices_and_host_share_what_is_free() {
        let machine = with(Some(ByteSize(1000)));
        assert_eq!(machine.device_share(2).unwrap(), ByteSize(200));
        assert_eq!(machine.host_share(ByteSize(400)), Some(ByteSize(500)));
        assert_eq!(machine.host_share(ByteSize(100)), Some(ByteSize(800)));
        assert_eq!(machine.host_share(ByteSize(5000)), Some(ByteSize(500)));
        let blind = with(None);
        assert!(blind.device_share(1).unwrap_err().to_string().contains("--device-memory"));
        assert_eq!(blind.host_share(ByteSize(1)), None);
        let full = Machine { limited: true, ..with(Some(ByteSize(0))) };
        assert!(full.device_share(1).unwrap_err().to_string().contains("within its control group"));
    }

    #[test]
    fn budgets_beyond_the_machine_are_said_with_both_figures() {
        let gib = |count: u64| ByteSize(count << 30);
        let machine = with(Some(gib(24)));
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
            let rest = "more than the 24.00 GiB of free memory";
            assert!(note.contains(figure) && note.contains(rest) && !note.contains('\n'), "{note}");
            assert!(note.contains("will swap, or be killed"), "{note}");
        }
        let blind = with(None);
        assert_eq!(blind.note_of_budgets(Some(gib(1024)), None), None);
        let limited = Machine { limited: true, ..machine.clone() };
        let note = limited.note_of_budgets(Some(gib(25)), None).unwrap();
        assert!(note.contains("24.00 GiB available within the limit of the control group:"), "{note}");
        let shared = Machine { free: Some(gib(30)), ..machine };
        let note = shared.note_of_budgets(Some(gib(25)), None).unwrap();
        assert!(note.contains("24.00 GiB of free memory not reserved by other runs"), "{note}");
    }

    #[test]
    fn other_runs_are_named_in_notes_and_errors() {
        let cards = [(card_name_here(0), ByteSize::mib(5))].into();
        let admitted = Admitted { process: 7, run: "a".to_owned(), host_bytes: ByteSize(9), at_s: 0, cards };
        let other = OtherRun { admitted, expected: ByteSize(4) };
        let alone = with(Some(ByteSize(0)));
        assert_eq!((alone.note_of_others(), alone.because_of_others()), (None, String::new()));
        let shared = Machine { others: vec![other.clone(), other], ..alone };
        let note = shared.note_of_others().unwrap();
        assert!(note.starts_with("note: run `a` (process 7) has reserved 9 B"), "{note}");
        assert!(note.ends_with("; 0 B of host memory are available") && !note.contains('\n'), "{note}");
        assert!(shared.device_share(1).unwrap_err().to_string().contains("; run `a` (process 7)"));
        assert_eq!([0, 1].map(|card| shared.admitted_on(card)), [ByteSize::mib(10), ByteSize(0)]);
    }
}
