//! The memory of this process while a run trains, compared with what the run reserved.

use super::procfs::of_this_process;
use hydra_core::ByteSize;
use hydra_spill::alloc::ReturnsFreed;
use serde_json::{Value, json};
use std::fs;

/// Growth that no run reserves: stacks, and what allocators keep of freed memory.
const MARGIN: u64 = 64 << 20;

/// The resident memory of this process when a run began to train.
pub(crate) struct ProcessMemory {
    start: u64,
}

/// The growth of this process during a run, and the memory that the run reserved.
pub(crate) struct ProcessGrowth {
    start: u64,
    peak: u64,
    reserved: u64,
}

impl ProcessMemory {
    /// Reads the resident memory and begins a new peak. Returns `None` if the system does not report them.
    pub(crate) fn begin() -> Option<Self> {
        // The memory of pilot passes is not the run's.
        drop(ReturnsFreed::start());
        // The system forgets the former peak; it starts again at the present size.
        fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Self { start: of_this_process("VmRSS")?.bytes() })
    }

    /// The peak since the beginning, of a run whose reserved memory had a peak of `reserved` bytes.
    pub(crate) fn growth(&self, reserved: u64) -> Option<ProcessGrowth> {
        Some(ProcessGrowth { start: self.start, peak: of_this_process("VmHWM")?.bytes(), reserved })
    }
}

impl ProcessGrowth {
    /// The figures under the keys of a report.
    pub(crate) fn json(&self) -> Value {
        json!({ "start_bytes": self.start, "peak_bytes": self.peak, "reserved_peak_bytes": self.reserved })
    }

    /// Returns a note if the process grew by more than the reserved memory, a twentieth of it, and a margin.
    pub(crate) fn note(&self) -> Option<String> {
        let grown = self.peak.saturating_sub(self.start);
        let beyond = grown.saturating_sub(self.reserved);
        (beyond > self.reserved / 20 + MARGIN).then(|| {
            let [grown, reserved, beyond] = [grown, self.reserved, beyond].map(ByteSize);
            format!(
                "note: this process took {grown} more memory while the run trained, {beyond} beyond the {reserved} that the run reserved: \
                 memory that modules or datasets take outside of tensors, or other work of the process, is in no budget"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growth(start: u64, peak: u64, reserved: u64) -> ProcessGrowth {
        ProcessGrowth { start: start << 20, peak: peak << 20, reserved: reserved << 20 }
    }

    #[test]
    fn growth_beyond_the_reserved_memory_is_noted() {
        assert_eq!(growth(400, 1500, 1000).note(), None, "less than a margin");
        assert_eq!(growth(400, 200, 0).note(), None, "the process shrank");
        let note = growth(400, 1900, 1000).note().unwrap();
        assert!(
            note.contains("1.46 GiB more memory") && note.contains("500.00 MiB beyond the 1000.00 MiB"),
            "{note}"
        );
    }

    #[test]
    fn the_peak_is_that_since_the_beginning() {
        let block = |mib: usize| std::hint::black_box(vec![1_u8; mib << 20]);
        drop(block(512));
        let Some(memory) = ProcessMemory::begin() else {
            return eprintln!("skipped: this system does not report the memory of a process");
        };
        drop(block(256));
        let grown = memory.growth(0).unwrap();
        assert!(grown.peak >= grown.start + (200 << 20), "{}", grown.json());
    }
}
