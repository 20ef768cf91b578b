//! What `simulate` and `compare` share: reading a workload, and the watch that a policy is measured with.

use crate::settings::args::LabArgs;
use crate::terminal::error::tell;
use anyhow::{Context, Result};
use hydra_sched::{
    Asking, Claimable, LowerBounds, ModelIndex, ModelView, Policy, PolicyKind, Priority, Simulation,
    SimulationOptions, Workload, WorkloadError, simulate,
};
use serde::Serialize;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

/// More shard tasks than this take the better part of a minute, each policy.
const LONG: u64 = 100_000_000;
/// Numbers from here on are shown with a power of ten, and not with all their digits.
const LARGE: f64 = 1e9;

/// Reads the workload and changes it as the flags say.
pub(crate) fn load(args: &LabArgs) -> Result<Workload> {
    let standard_input = args.workload.as_os_str() == "-";
    let name = match standard_input {
        true => "the workload on standard input".to_owned(),
        false => format!("the workload `{}`", args.workload.display()),
    };
    let text = if standard_input { io::read_to_string(io::stdin()) } else { read(&args.workload) };
    let text = text.with_context(|| format!("{name} could not be read"))?;
    let workload = parse(&text, args).with_context(|| format!("{name} cannot be used"))?;
    note_of_size(workload.shard_tasks()).into_iter().for_each(|note| tell(&note));
    Ok(workload)
}

/// What to say of a workload that keeps its user waiting.
fn note_of_size(shard_tasks: u64) -> Option<String> {
    (shard_tasks > LONG).then(|| {
        format!(
            "note: {shard_tasks} shard tasks take minutes or hours to simulate; with fewer minibatches it is sooner"
        )
    })
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

fn parse(text: &str, args: &LabArgs) -> Result<Workload, WorkloadError> {
    let mut workload: Workload = serde_json::from_str(text)?;
    if let Some(count) = args.devices {
        if workload.devices.windows(2).any(|pair| pair[0] != pair[1]) {
            tell(&format!("note: --devices {count} makes all devices like the first one of the workload"));
        }
        workload = workload.on_devices(count);
    }
    if let (Some(seed), Some(variation)) = (args.seed, &mut workload.variation) {
        variation.seed = seed;
    }
    workload.check()?;
    Ok(workload)
}

/// A policy with a watch: how long its answers took.
struct Timed {
    policy: Box<dyn Policy>,
    spent: Duration,
}

impl Policy for Timed {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        self.policy.priority(model)
    }

    fn waits(&self) -> bool {
        self.policy.waits()
    }

    fn pick(&mut self, asking: &Asking, from: &dyn Claimable) -> Option<ModelIndex> {
        let asked = Instant::now();
        let picked = self.policy.pick(asking, from);
        self.spent += asked.elapsed();
        picked
    }
}

/// A simulation, and the mean measured nanoseconds in which the policy answered, the reading of the clock
/// included.
pub(crate) struct Measured {
    pub(crate) run: Simulation,
    pub(crate) decision_ns: f64,
}

/// Simulates a policy. `seed` is that of the random policy.
pub(crate) fn measure(
    workload: &Workload,
    policy: PolicyKind,
    seed: u64,
    options: SimulationOptions,
) -> Result<Measured> {
    let mut timed = Timed { policy: policy.build(seed), spent: Duration::ZERO };
    let run = simulate(workload, &mut timed, options)?;
    let decision_ns = timed.spent.as_nanos() as f64 / run.decisions.max(1) as f64;
    Ok(Measured { run, decision_ns })
}

/// The lower bounds by name, in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct Bounds {
    chain_s: f64,
    work_s: f64,
    level_s: f64,
    link_s: f64,
    host_s: f64,
    packing_s: f64,
    turns_s: f64,
}

impl From<&LowerBounds> for Bounds {
    fn from(bounds: &LowerBounds) -> Self {
        let LowerBounds { chain_s, work_s, level_s, link_s, host_s, packing_s, turns_s } = *bounds;
        Self { chain_s, work_s, level_s, link_s, host_s, packing_s, turns_s }
    }
}

impl Bounds {
    /// The name of the largest, which decides.
    pub(crate) fn best(&self) -> &'static str {
        let all = [
            ("work", self.work_s),
            ("level", self.level_s),
            ("link", self.link_s),
            ("host", self.host_s),
            ("packing", self.packing_s),
            ("turns", self.turns_s),
        ];
        let first = ("chain", self.chain_s);
        all.into_iter().fold(first, |best, bound| if bound.1 > best.1 { bound } else { best }).0
    }
}

/// The names of a workload's tasks, in its order.
pub(crate) fn task_names(workload: &Workload) -> Vec<String> {
    workload.tasks.iter().map(|task| task.name.clone()).collect()
}

/// The names of so many devices.
pub(crate) fn device_names(count: usize) -> Vec<String> {
    (0..count).map(|device| format!("device {device}")).collect()
}

/// The mean of some numbers, 0 of none.
pub(crate) fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// How times are shown that are compared with each other: all in one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Milliseconds,
    Seconds,
    Hours,
}

impl Unit {
    /// The unit that suits the longest of the times.
    pub(crate) fn of(longest_s: f64) -> Self {
        match longest_s {
            s if s < 1.0 => Self::Milliseconds,
            s if s < 7200.0 => Self::Seconds,
            _ => Self::Hours,
        }
    }

    /// A time in this unit.
    pub(crate) fn show(self, seconds: f64) -> String {
        match self {
            Self::Milliseconds => format!("{} ms", fixed(1e3 * seconds, 3)),
            Self::Seconds => format!("{} s", fixed(seconds, 2)),
            Self::Hours => format!("{} h", fixed(seconds / 3600.0, 3)),
        }
    }
}

/// A number with so many decimals, or with four significant digits where it is large.
pub(crate) fn fixed(number: f64, decimals: usize) -> String {
    if number.abs() < LARGE { format!("{number:.decimals$}") } else { format!("{number:.3e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNEQUAL: &str = r#"{
        "tasks": [{"name": "a", "minibatches": 2, "shards": [{"forward_s": 1, "backward_s": 2, "promote_s": 0.5}]}],
        "devices": [{"speed": 2}, {"speed": 1}],
        "variation": {"seed": 3, "relative": 0.1}
    }"#;

    #[test]
    fn a_watch_changes_nothing() {
        // A drawn workload on which waiting pays, and one that varies.
        let drawn = hydra_sched::Draw::default().workload(3);
        for workload in [&drawn, &parse(UNEQUAL, &args(None, None)).unwrap()] {
            for policy in PolicyKind::ALL {
                let watched = measure(workload, policy, 7, SimulationOptions::default()).unwrap();
                let alone = simulate(workload, &mut *policy.build(7), SimulationOptions::default()).unwrap();
                assert_eq!(watched.run, alone);
                assert!(watched.decision_ns > 0.0);
            }
        }
        let makespan_s =
            |kind| measure(&drawn, kind, 7, SimulationOptions::default()).unwrap().run.makespan_s;
        assert!(makespan_s(PolicyKind::ShardedLrtfPatient) != makespan_s(PolicyKind::ShardedLrtf));
    }

    fn args(devices: Option<usize>, seed: Option<u64>) -> LabArgs {
        LabArgs { workload: "-".into(), devices, seed }
    }

    #[test]
    fn flags_change_the_workload() {
        let as_is = parse(UNEQUAL, &args(None, None)).unwrap();
        assert_eq!((as_is.devices.len(), as_is.variation.unwrap().seed), (2, 3));
        let changed = parse(UNEQUAL, &args(Some(3), Some(9))).unwrap();
        assert_eq!(changed.devices.iter().map(|device| device.speed).collect::<Vec<_>>(), [2.0; 3]);
        assert_eq!(changed.variation.unwrap().seed, 9);
        let none = UNEQUAL.replace(r#"[{"speed": 2}, {"speed": 1}]"#, "0");
        assert!(matches!(parse(&none, &args(None, None)), Err(WorkloadError::NoDevices)));
        assert_eq!(parse(&none, &args(Some(4), None)).unwrap().devices.len(), 4);
    }

    #[test]
    fn times_share_a_unit() {
        assert_eq!(Unit::of(0.25).show(0.25), "250.000 ms");
        assert_eq!(Unit::of(100.0).show(0.25), "0.25 s");
        assert_eq!(Unit::of(7200.0).show(1800.0), "0.500 h");
        assert_eq!(Unit::of(1e300).show(3.6e303), "1.000e300 h");
        assert_eq!(
            [0.5, 999_999_999.0, 1e9, -1e9].map(|x| fixed(x, 1)),
            ["0.5", "999999999.0", "1.000e9", "-1.000e9"]
        );
    }

    #[test]
    fn a_workload_that_takes_long_is_said() {
        assert_eq!(note_of_size(LONG), None);
        let note = note_of_size(9_000_000_000).unwrap();
        assert!(note.starts_with("note: 9000000000 shard tasks") && !note.contains('\n'), "{note}");
    }

    #[test]
    fn the_largest_bound_is_named() {
        let bounds = LowerBounds { chain_s: 1.0, work_s: 3.0, level_s: 3.0, ..LowerBounds::default() };
        assert_eq!(Bounds::from(&bounds).best(), "work");
    }
}
