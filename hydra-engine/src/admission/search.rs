//! The search for the plan of a run: one cost, and one function that takes the candidate of the lowest cost.
//!
//! The choices form a tree, because what can be chosen depends on earlier choices: the cuts, then the
//! [storage](super::plan), then the [concurrency](super::microbatch_group), then the [host memory](super::host_memory).
//! Each level lists its candidates in order of preference, and the plan of a candidate is the best one of the levels
//! below it.

use crate::error::EngineError;

/// When tasks start, from the best to the worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StartOrder {
    /// All at the beginning.
    #[default]
    Together,
    /// As their masters fit in host memory and the user's limit allows.
    Queued,
    /// As the user's limit allows, although masters of tasks that wait are on the disk.
    OnDisk,
}

/// The slowest tier that a run reads weights from while it trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Tier {
    /// Host memory.
    #[default]
    Memory,
    /// The files of frozen weights that are read in place.
    Files,
    /// The disk, which has masters.
    Disk,
}

/// How tasks are cut that want gradient accumulation buffers on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AccumulationBuffers {
    /// With memory for these buffers.
    #[default]
    Used,
    /// Without it.
    Plain,
    /// With it, although no microbatch group accumulates gradients.
    Unused,
}

/// The cost of a plan. Costs are compared field by field, in this order; lower is better, and the default is the lowest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost {
    /// Tasks that are skipped.
    pub skipped: usize,
    pub start: StartOrder,
    /// Devices without a model.
    pub idle: usize,
    pub tier: Tier,
    /// Shards whose gradients do not fit, counted from `usize::MAX`. Memory for all gradients costs most if it is taken
    /// from masters, which are on the disk.
    pub gradients: usize,
    /// Bytes on the disk.
    pub disk: u64,
    /// Models that do not fit of those that fill the waits of others: one more than there are devices.
    pub waits: usize,
    /// Bytes of batches that are not read ahead for the sake of concurrency.
    pub ahead: u64,
    pub sums: AccumulationBuffers,
}

/// Returns the plan of the lowest cost, the first of equal ones. Each candidate has a lower bound of its cost; it is
/// not planned if a plan before it costs no more.
///
/// # Errors
/// The error of the last candidate, if none fits.
pub(super) fn best<C, P>(
    candidates: impl IntoIterator<Item = (Cost, C)>,
    plan: impl Fn(C) -> Result<(Cost, P), EngineError>,
) -> Result<(Cost, P), EngineError> {
    let mut best = Err(EngineError::NoTask);
    for (bound, candidate) in candidates {
        if matches!(&best, Ok((cost, _)) if *cost <= bound) {
            continue;
        }
        match (plan(candidate), &best) {
            (Ok((cost, _)), Ok((least, _))) if *least <= cost => {}
            (Err(_), Ok(_)) => {}
            (planned, _) => best = planned,
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Costs of few values, so that many are equal.
    fn costs() -> impl Strategy<Value = Cost> {
        (0_usize..2, 0_usize..3, 0_u64..3).prop_map(|(skipped, idle, disk)| Cost {
            skipped,
            idle,
            disk,
            ..Cost::default()
        })
    }

    proptest! {
        #[test]
        fn the_first_plan_of_the_lowest_cost_is_chosen(
            candidates in prop::collection::vec((prop::option::of(costs()), any::<bool>()), 1..12),
        ) {
            // A bound is the cost itself or the lowest one.
            let bound = |(cost, tight): &(Option<Cost>, bool)| cost.filter(|_| *tight).unwrap_or_default();
            let listed = candidates.iter().map(bound).zip(0_usize..);
            let found = best(listed, |index| match candidates[index].0 {
                Some(cost) => Ok((cost, index)),
                None => Err(EngineError::OptimizerPlacement { task: index.to_string(), problem: String::new() }),
            });
            let feasible = || candidates.iter().enumerate().filter_map(|(index, (cost, _))| Some(((*cost)?, index)));
            match (found, feasible().min()) {
                (Ok(found), Some(least)) => prop_assert_eq!(found, least),
                (Err(EngineError::OptimizerPlacement { task, .. }), None) => {
                    prop_assert_eq!(task, (candidates.len() - 1).to_string());
                }
                (found, least) => prop_assert!(false, "{:?} {:?}", found.is_ok(), least),
            }
        }
    }
}
