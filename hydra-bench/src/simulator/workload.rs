//! Reads workloads with stated costs, and applies flags to them.

use anyhow::{Context, Result};
use clap::Args;
use hydra_run::settings::values;
use hydra_run::terminal::tell;
use hydra_sched::{Replacement, Workload, WorkloadError};
use std::path::PathBuf;
use std::{fs, io};

/// The number of shard tasks above which a policy takes most of a minute.
const LONG: u64 = 100_000_000;

/// The workload to simulate.
#[derive(Debug, Args)]
pub(crate) struct SimulatorArgs {
    /// Workload file: tasks and devices as costs, in the JSON format of docs/scheduling.md; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) workload: PathBuf,
    /// Simulate N devices, each like the workload's first one [default: the workload's devices]
    #[arg(long, value_name = "N", value_parser = values::simulated_devices, allow_hyphen_values = true)]
    pub(crate) devices: Option<usize>,
    /// Cache parameters on the devices until their memory is needed [default: as the workload sets it]
    #[arg(long)]
    pub(crate) keep_copies: bool,
    /// Eviction rule of the parameter cache: next-use or least-recent [default: as the workload sets it]
    #[arg(long, value_name = "RULE", value_parser = values::replacement)]
    pub(crate) replacement: Option<Replacement>,
    /// Seed of the policy `random`, and of a workload's random variation [default: 0, and the workload's seed]
    #[arg(long, value_name = "N", value_parser = values::seed, allow_hyphen_values = true)]
    pub(crate) seed: Option<u64>,
}

/// Reads the workload and applies the flags.
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

/// Returns the note on a workload that takes long to simulate.
fn note_of_size(shard_tasks: u64) -> Option<String> {
    let how = "take minutes or hours to simulate; fewer minibatches take less time";
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
