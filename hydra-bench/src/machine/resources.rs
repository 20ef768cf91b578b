//! The machine's cores and free memory, and the runs that share them.

use crate::machine::procfs::{self, Free};
use crate::machine::reservations::{MachineReservations, OtherRun, card_name, in_one_line};
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
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Machine {
    /// Memory that can be had without swapping; `None` where the system does not tell.
    #[serde(rename = "host_free_bytes")]
    pub(crate) free: Option<ByteSize>,
    /// The part of it that no other run will come to use.
    #[serde(rename = "host_available_bytes")]
    pub(crate) available: Option<ByteSize>,
    /// True if a control group, such as that of a container, leaves less than the machine has.
    #[serde(rename = "host_is_limited")]
    pub(crate) limited: bool,
    /// Cores that this process may use.
    pub(crate) cores: usize,
    /// The other runs that are under way here.
    #[serde(rename = "other_runs")]
    pub(crate) others: Vec<OtherRun>,
}

impl Machine {
    /// Looks at the machine, and at what other runs say in the machine-wide reservations, if there is one.
    pub(crate) fn look(reservations: Option<&MachineReservations>) -> Self {
        Self::look_at(Path::new("/"), reservations)
    }

    /// The machine whose file system begins at `root`.
    pub(super) fn look_at(root: &Path, reservations: Option<&MachineReservations>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let others = reservations.map(|reservations| reservations.others(root)).unwrap_or_default();
        let expected: Vec<(u32, ByteSize)> =
            others.iter().map(|other| (other.admitted.process, other.expected)).collect();
        let machine = Self { cores, others, ..Self::default() };
        match procfs::free(root, &expected) {
            Some(Free { bytes, limited, left }) => {
                Self { free: Some(bytes), available: Some(left), limited, ..machine }
            }
            None => machine,
        }
    }

    /// The line on the other runs that are under way, and on what they leave.
    pub(crate) fn note_of_others(&self) -> Option<String> {
        let left = self.available.map(|left| format!(": {left} of host memory are left to plan with"));
        Some(format!("note: {}{}", in_one_line(&self.others)?, left.unwrap_or_default()))
    }

    /// The words about other runs that stand behind an error.
    pub(crate) fn because_of_others(&self) -> String {
        in_one_line(&self.others).map(|words| format!("; {words}")).unwrap_or_default()
    }

    /// The memory of a card that other runs have admitted.
    pub(crate) fn admitted_on(&self, card: usize) -> ByteSize {
        let name = card_name_here(card);
        let on_it = self.others.iter().filter_map(|other| other.admitted.cards.get(&name));
        ByteSize(on_it.fold(0, |sum, bytes| sum.saturating_add(bytes.bytes())))
    }

    /// The memory of each of `count` devices when nobody says how much.
    pub(crate) fn device_share(&self, count: usize) -> Result<ByteSize> {
        let available = self.available.context(
            "the system does not tell how much memory is free: give --device-memory, such as --device-memory 1GiB",
        )?;
        let bytes = share(available, DEVICE_SHARE) / count.max(1) as u64;
        ensure!(
            bytes > 0,
            "no memory is free, or none within the limit of a control group: give --device-memory{}",
            self.because_of_others()
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
        let others = if self.available < self.free { " and that other runs have not admitted" } else { "" };
        Some(format!(
            "note: {said} more than the {available} {free} here{others}: a run that comes to need more than these is \
             slowed down by swapping, or killed by the system"
        ))
    }
}

/// The name by which the runs of this machine know a card.
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

    /// A machine with so much memory.
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
        assert!(full.device_share(1).unwrap_err().to_string().contains("limit of a control group"));
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
            let rest = "more than the 24.00 GiB of memory that are free here";
            assert!(note.contains(figure) && note.contains(rest) && !note.contains('\n'), "{note}");
            assert!(note.contains("swapping, or killed"), "{note}");
        }
        let blind = with(None);
        assert_eq!(blind.note_of_budgets(Some(gib(1024)), None), None);
        let limited = Machine { limited: true, ..machine.clone() };
        let note = limited.note_of_budgets(Some(gib(25)), None).unwrap();
        assert!(note.contains("24.00 GiB that the limit of a control group leaves here:"), "{note}");
        let shared = Machine { free: Some(gib(30)), ..machine };
        let note = shared.note_of_budgets(Some(gib(25)), None).unwrap();
        assert!(
            note.contains("24.00 GiB of memory that are free here and that other runs have not"),
            "{note}"
        );
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
        assert!(note.starts_with("note: run `a` of process 7 has admitted 9 B"), "{note}");
        assert!(
            note.ends_with(": 0 B of host memory are left to plan with") && !note.contains('\n'),
            "{note}"
        );
        assert!(shared.device_share(1).unwrap_err().to_string().contains("; run `a` of process 7"));
        assert_eq!([0, 1].map(|card| shared.admitted_on(card)), [ByteSize::mib(10), ByteSize(0)]);
    }
}
