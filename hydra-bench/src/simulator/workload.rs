//! Workloads of stated costs, read and changed as flags say.

use crate::settings::values;
use crate::terminal::tell;
use anyhow::{Context, Result};
use clap::Args;
use hydra_sched::{Replacement, Workload, WorkloadError};
use std::path::PathBuf;
use std::{fs, io};

/// More shard tasks than this take the better part of a minute, each policy.
const LONG: u64 = 100_000_000;

/// The workload that is simulated.
#[derive(Debug, Args)]
pub(crate) struct SimulatorArgs {
    /// Tasks and devices as costs, in JSON as docs/scheduling.md describes it; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) workload: PathBuf,
    /// Take so many devices, each like the workload's first one [default: the workload's own]
    #[arg(long, value_name = "N", value_parser = values::simulated_devices, allow_hyphen_values = true)]
    pub(crate) devices: Option<usize>,
    /// Devices keep copies of parameters until their place is needed, which those of a run do not [default: as the
    /// workload says]
    #[arg(long)]
    pub(crate) keep_copies: bool,
    /// The copy that goes when a device that keeps copies needs its room: next-use or least-recent [default: as the
    /// workload says]
    #[arg(long, value_name = "RULE", value_parser = values::replacement)]
    pub(crate) replacement: Option<Replacement>,
    /// The seed of the policy `random`, and of the variation of a workload that has one [default: 0, and the
    /// workload's own]
    #[arg(long, value_name = "N", value_parser = values::seed, allow_hyphen_values = true)]
    pub(crate) seed: Option<u64>,
}

/// Reads the workload and changes it as the flags say.
pub(crate) fn load(args: &SimulatorArgs) -> Result<Workload> {
    let file = &args.workload;
    let (name, text) = match file.as_os_str() == "-" {
        true => ("the workload on standard input".to_owned(), io::read_to_string(io::stdin())),
        false => (format!("the workload `{}`", file.display()), fs::read_to_string(file)),
    };
    let text = text.with_context(|| format!("{name} could not be read"))?;
    let workload = parse(&text, args).with_context(|| format!("{name} cannot be used"))?;
    note_of_size(workload.shard_tasks()).iter().for_each(|note| tell(note));
    Ok(workload)
}

/// The note on a workload that keeps its user waiting.
fn note_of_size(shard_tasks: u64) -> Option<String> {
    let how = "take minutes or hours to simulate; with fewer minibatches it is sooner";
    (shard_tasks > LONG).then(|| format!("note: {shard_tasks} shard tasks {how}"))
}

fn parse(text: &str, args: &SimulatorArgs) -> Result<Workload, WorkloadError> {
    let mut workload: Workload = serde_json::from_str(text)?;
    if let Some(count) = args.devices {
        if workload.devices.windows(2).any(|pair| pair[0] != pair[1]) {
            tell(&format!("note: --devices {count} makes all devices like the first one of the workload"));
        }
        workload = workload.on_devices(count);
    }
    for device in &mut workload.devices {
        device.keeps_copies |= args.keep_copies;
        device.replacement = args.replacement.unwrap_or(device.replacement);
    }
    if let (Some(seed), Some(variation)) = (args.seed, &mut workload.variation) {
        variation.seed = seed;
    }
    workload.check()?;
    Ok(workload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::UNEQUAL;

    fn args(devices: Option<usize>, seed: Option<u64>) -> SimulatorArgs {
        SimulatorArgs { workload: "-".into(), devices, keep_copies: false, replacement: None, seed }
    }

    #[test]
    fn flags_change_the_workload() {
        let as_is = parse(UNEQUAL, &args(None, None)).unwrap();
        assert_eq!((as_is.devices.len(), as_is.variation.unwrap().seed), (2, 3));
        let changed = parse(UNEQUAL, &args(Some(3), Some(9))).unwrap();
        assert_eq!(changed.devices.iter().map(|device| device.speed).collect::<Vec<_>>(), [2.0; 3]);
        assert_eq!(changed.variation.unwrap().seed, 9);
        let copies = SimulatorArgs {
            keep_copies: true,
            replacement: Some(Replacement::LeastRecent),
            ..args(None, None)
        };
        let copies = parse(UNEQUAL, &copies).unwrap();
        assert!(copies.devices.iter().all(|d| d.keeps_copies && d.replacement == Replacement::LeastRecent));
        let none = UNEQUAL.replace(r#"[{"speed": 2}, {"speed": 1}]"#, "0");
        assert!(matches!(parse(&none, &args(None, None)), Err(WorkloadError::NoDevices)));
        assert_eq!(parse(&none, &args(Some(4), None)).unwrap().devices.len(), 4);
    }

    #[test]
    fn a_workload_that_takes_long_is_said() {
        assert_eq!(note_of_size(LONG), None);
        let note = note_of_size(9_000_000_000).unwrap();
        assert!(note.starts_with("note: 9000000000 shard tasks") && !note.contains('\n'), "{note}");
    }
}
