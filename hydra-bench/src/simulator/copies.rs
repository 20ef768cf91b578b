//! Compares the replacement rules of the parameter cache on one workload.

use crate::simulator::measure::measure;
use anyhow::Result;
use hydra_sched::{PolicyKind, Replacement, SimulationOptions, Workload};
use serde::Serialize;

/// The maximum number of shard tasks to record, which take most of a gigabyte.
const MOST_RECORDED: u64 = 10_000_000;

/// The result of a replacement rule.
#[derive(Debug, Serialize)]
pub(crate) struct CopiesRow {
    /// The replacement rule, or `none` without a cache.
    pub(crate) copies: &'static str,
    pub(crate) promoted_bytes: u64,
    /// The optimum: the fewest promoted bytes of any replacement in the same schedule.
    pub(crate) fewest_bytes: u64,
    pub(crate) over_fewest: f64,
    pub(crate) promotions: u64,
    pub(crate) promotions_saved: u64,
    pub(crate) makespan_s: f64,
}

/// Simulates each rule under the default policy. Returns nothing if no device has a cache, a device states no memory, or there
/// are too many shard tasks to record.
pub(crate) fn compare_copies(workload: &Workload, seed: u64) -> Result<Vec<CopiesRow>> {
    let keeps = workload.devices.iter().any(|device| device.keeps_copies);
    if !keeps || workload.shard_tasks() > MOST_RECORDED {
        return Ok(Vec::new());
    }
    let rules = Replacement::ALL.map(Some).into_iter().rev();
    let rows = [None].into_iter().chain(rules).map(|rule| row(workload, rule, seed));
    Ok(rows.collect::<Result<Option<_>>>()?.unwrap_or_default())
}

fn row(workload: &Workload, rule: Option<Replacement>, seed: u64) -> Result<Option<CopiesRow>> {
    let mut workload = workload.clone();
    for device in &mut workload.devices {
        device.keeps_copies &= rule.is_some();
        device.replacement = rule.unwrap_or_default();
    }
    let options = SimulationOptions { record: true, ..SimulationOptions::default() };
    let run = measure(&workload, PolicyKind::default(), seed, options)?.run;
    let (fewest_bytes, promoted_bytes) = (run.fewest_bytes(&workload), run.promoted_bytes);
    Ok(promoted_bytes.zip(fewest_bytes).map(|(promoted_bytes, fewest_bytes)| CopiesRow {
        copies: rule.map_or("none", Replacement::name),
        promoted_bytes,
        fewest_bytes,
        over_fewest: promoted_bytes as f64 / fewest_bytes.max(1) as f64,
        promotions: run.promotions,
        promotions_saved: run.promotions_saved,
        makespan_s: run.makespan_s,
    }))
}
