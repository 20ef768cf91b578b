//! Entries of the machine-wide reservations, and their texts.

use hydra_core::ByteSize;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The maximum number of runs named in a line.
const NAMED: usize = 4;

/// The memory that a run has admitted: the content of its entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Admitted {
    /// Its process ID.
    pub(crate) process: u32,
    /// The Unix time of its admission in seconds.
    pub(crate) at_s: u64,
    /// The run directory, or the command if there is none.
    pub(crate) run: String,
    /// Host memory, including that of devices in host memory.
    pub(crate) host_bytes: ByteSize,
    /// Memory on NVIDIA GPUs by [`card_name`].
    #[serde(default)]
    pub(crate) cards: BTreeMap<String, ByteSize>,
}

/// Another run on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OtherRun {
    #[serde(flatten)]
    pub(crate) admitted: Admitted,
    /// Host memory that it has admitted and not allocated yet.
    #[serde(rename = "host_expected_bytes")]
    pub(crate) expected: ByteSize,
}

impl OtherRun {
    /// Returns the run with the memory that its process holds now.
    pub(super) fn new(admitted: Admitted, held: ByteSize) -> Self {
        let expected = ByteSize(admitted.host_bytes.bytes().saturating_sub(held.bytes()));
        Self { admitted, expected }
    }

    fn words(&self) -> String {
        let Admitted { process, run, host_bytes, cards, .. } = &self.admitted;
        let on = cards.iter().map(|(card, bytes)| format!(", and {bytes} of GPU {card}"));
        let expected = match self.expected {
            ByteSize(0) => String::new(),
            expected => format!(" ({expected} not allocated yet)"),
        };
        let cards: String = on.collect();
        format!("run `{run}` (process {process}) has reserved {host_bytes} of host memory{expected}{cards}")
    }
}

/// Returns the reservations of other runs in one line, or `None` if there are none.
pub(crate) fn in_one_line(others: &[OtherRun]) -> Option<String> {
    let named: Vec<String> = others.iter().take(NAMED).map(OtherRun::words).collect();
    let rest = others.get(NAMED..).unwrap_or_default();
    let sum = rest.iter().fold(0_u64, |sum, other| sum.saturating_add(other.admitted.host_bytes.bytes()));
    let more = match rest.len() {
        0 => String::new(),
        count => format!("; {count} more have reserved {}", ByteSize(sum)),
    };
    (!named.is_empty()).then(|| named.join("; ") + &more)
}

/// Returns the machine-wide name of a GPU: its entry in `CUDA_VISIBLE_DEVICES`, or its number.
pub(crate) fn card_name(card: usize, visible: Option<&str>) -> String {
    let listed = visible.and_then(|list| list.split(',').nth(card)).map(str::trim);
    listed.filter(|name| !name.is_empty()).map_or_else(|| card.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(run: &str, host: u64, held: u64) -> OtherRun {
        let host_bytes = ByteSize::mib(host);
        let admitted = Admitted { process: 7, run: run.to_owned(), host_bytes, ..Admitted::default() };
        OtherRun::new(admitted, ByteSize::mib(held))
    }

    #[test]
    fn what_a_run_holds_is_not_expected_any_more() {
        let expected = |held| other("a", 10, held).expected;
        assert_eq!([0, 4, 10, 11].map(expected), [10, 6, 0, 0].map(ByteSize::mib));
    }

    #[test]
    fn a_line_names_the_runs_and_how_much() {
        assert_eq!(in_one_line(&[]), None);
        let mut on_card = other("b", 2, 2);
        on_card.admitted.cards = [("0".to_owned(), ByteSize::mib(3))].into();
        assert_eq!(
            in_one_line(&[other("a", 10, 4), on_card]).unwrap(),
            "run `a` (process 7) has reserved 10.00 MiB of host memory (6.00 MiB not allocated yet); \
             run `b` (process 7) has reserved 2.00 MiB of host memory, and 3.00 MiB of GPU 0"
        );
        let many: Vec<OtherRun> = (0..6).map(|_| other("a", 10, 0)).collect();
        let said = in_one_line(&many).unwrap();
        assert!(said.ends_with("; 2 more have reserved 20.00 MiB") && !said.contains('\n'), "{said}");
        assert_eq!(said.matches("process 7").count(), 4);
    }

    #[test]
    fn cards_have_one_name_in_all_processes() {
        let name = |card, visible| card_name(card, visible);
        assert_eq!([name(0, None), name(3, None)], ["0", "3"]);
        assert_eq!([name(0, Some("2, GPU-1a")), name(1, Some("2, GPU-1a"))], ["2", "GPU-1a"]);
        assert_eq!([name(0, Some("")), name(2, Some("5"))], ["0", "2"]);
    }
}
