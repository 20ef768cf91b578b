//! Second step: cuts each model into shards that fit every device.

use super::measure::{Costs, MeasuredTask, PilotContext, stands_alike};
use super::skipped::SkippedTasks;
use crate::error::{EngineError, refused};
use crate::train_task::TrainTask;
use hydra_core::Batch;
use hydra_partition::{
    Demand, PartitionError, PartitionPlan, Pipeline, Profile, Rules, choose_reserve, pipelined_reserve,
};
use hydra_spill::ParamBufferId;
use std::ops::Range;
use std::sync::Arc;

/// A task with the plan of its shards.
#[derive(Clone)]
pub(super) struct CutTask<'a> {
    pub task: &'a TrainTask,
    pub batch: Batch,
    costs: Arc<Costs>,
    pub plan: Arc<PartitionPlan>,
    /// For each buffer, the stored buffer that it shares with other tasks; filled in after the cut.
    pub shared: Vec<Option<ParamBufferId>>,
    /// For each buffer, whether it is read in place; filled in after the cut.
    pub in_place: Vec<bool>,
}

impl CutTask<'_> {
    /// The cut of another task with the same model and batch.
    pub(super) fn with_task<'b>(&self, task: &'b TrainTask) -> CutTask<'b> {
        CutTask { task, ..self.clone() }
    }
}

/// The limits that all plans of a run respect.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of the smallest device.
    pub budget: u64,
    /// The part of `budget` that the double buffer takes.
    pub reserve: u64,
    /// True if the gradient accumulation buffers of all tasks that want them fit.
    sums: bool,
}

impl Limits {
    /// The limits of tasks on devices of at least `budget` bytes with this pipeline. A task that does not fit
    /// is refused by name, or skipped; of two tasks that do not fit together the later one is.
    pub(super) fn for_those_that_fit<'a>(
        tasks: Vec<MeasuredTask<'a>>,
        (budget, pipeline): (u64, Pipeline),
        skipped_tasks: &mut SkippedTasks,
    ) -> Result<(Vec<MeasuredTask<'a>>, Self), EngineError> {
        if !skipped_tasks.allowed || Self::of(&tasks, budget, pipeline).is_ok() {
            let limits = Self::of(&tasks, budget, pipeline)?;
            return Ok((tasks, limits));
        }
        let mut fitting: Vec<MeasuredTask<'a>> = Vec::new();
        for measured in tasks {
            let task = measured.task;
            fitting.push(measured);
            if let Err(error) = Self::of(&fitting, budget, pipeline) {
                fitting.pop();
                skipped_tasks.skip(task, error)?;
            }
        }
        skipped_tasks.check(&fitting)?;
        let limits = Self::of(&fitting, budget, pipeline)?;
        Ok((fitting, limits))
    }

    /// The limits of tasks on devices of at least `budget` bytes; a task that does not fit is refused by name.
    fn of(tasks: &[MeasuredTask<'_>], budget: u64, pipeline: Pipeline) -> Result<Self, EngineError> {
        let demands =
            |sums: bool| -> Vec<Demand<'_>> { tasks.iter().map(|task| task.demand(sums)).collect() };
        let pipelined =
            |demands: &[Demand<'_>], reserve| pipelined_reserve(demands, budget, reserve, pipeline);
        let with_sums = demands(true);
        if let Ok(reserve) = choose_reserve(&with_sums, budget) {
            return Ok(Self { budget, reserve: pipelined(&with_sums, reserve), sums: true });
        }
        let demands = demands(false);
        let reserve = choose_reserve(&demands, budget).map_err(|error| {
            let alone = demands.iter().position(|demand| choose_reserve(&[*demand], budget).is_err());
            refused(&tasks[alone.unwrap_or(0)].task.name)(error.into())
        })?;
        Ok(Self { budget, reserve: pipelined(&demands, reserve), sums: false })
    }
}

impl MeasuredTask<'_> {
    /// The device memory that the task asks for. With `sums`, this includes gradient accumulation buffers if the task
    /// wants them.
    fn demand(&self, sums: bool) -> Demand<'_> {
        let with_sums = self.with_sums.as_ref().filter(|_| sums);
        let profile = with_sums.unwrap_or(&self.costs.profile);
        Demand { profile, cuts: self.task.execution.cuts.as_deref() }
    }

    /// The cut-points given by the user, or those that leave memory for gradient accumulation buffers.
    fn cuts(&self, rules: &Rules, limits: &Limits) -> Option<Vec<usize>> {
        let shards = |by: &Profile| hydra_partition::cut(by, rules).ok();
        let with_sums = || self.with_sums.as_ref().filter(|_| limits.sums).and_then(shards);
        let points = |shards: Vec<Range<usize>>| shards.iter().skip(1).map(|range| range.start).collect();
        self.task.execution.cuts.clone().or_else(|| with_sums().map(points))
    }
}

/// Cuts every task. Tasks with the same model and batch share one plan.
pub(super) fn cut<'a>(
    tasks: Vec<MeasuredTask<'a>>,
    limits: &Limits,
    pilot: &PilotContext<'_>,
    skipped_tasks: &mut SkippedTasks,
) -> Result<Vec<CutTask<'a>>, EngineError> {
    let mut cut: Vec<CutTask<'a>> = Vec::new();
    for measured in tasks {
        match plan(&measured, limits, pilot, &cut) {
            Ok(plan) => {
                let MeasuredTask { task, batch, costs, .. } = measured;
                cut.push(CutTask { task, batch, costs, plan, shared: Vec::new(), in_place: Vec::new() });
            }
            Err(error) => skipped_tasks.skip(measured.task, error)?,
        }
    }
    skipped_tasks.check(&cut)?;
    Ok(cut)
}

/// The plan of a task: the plan of an equal task, a saved one, or a new one.
fn plan(
    measured: &MeasuredTask<'_>,
    limits: &Limits,
    pilot: &PilotContext<'_>,
    others: &[CutTask<'_>],
) -> Result<Arc<PartitionPlan>, EngineError> {
    let MeasuredTask { task, batch, costs, .. } = measured;
    let rules = Rules::new(limits.budget, limits.reserve, costs.profile.measured);
    let cuts = measured.cuts(&rules, limits);
    let own_cuts = task.execution.cuts.is_none() && cuts.is_some();
    let fingerprint = costs.fingerprint.clone().under(limits.budget, limits.reserve);
    let fingerprint = fingerprint.cut_at(cuts.as_deref());
    let same = |cut: &&CutTask<'_>| Arc::ptr_eq(&cut.costs, costs) && cut.plan.fingerprint == fingerprint;
    if let Some(known) = others.iter().find(same) {
        return Ok(known.plan.clone());
    }
    let find = |path| PartitionPlan::find(path, &fingerprint);
    let is_usable = |plan: &PartitionPlan| {
        plan.rules == rules && stands_alike(costs.profile.standing_bytes, plan.standing_bytes)
    };
    let plan = match pilot.plans.path.as_deref().map(find).transpose()?.flatten() {
        Some(plan) if is_usable(&plan) => plan.check_layers(&task.chain).map(|()| plan)?,
        // No saved plan, or one made with another margin or for smaller thread buffers.
        _ => pilot.with_partitioner(task, |partitioner| {
            let plan = |cuts: Option<&[usize]>| {
                let mut plan = partitioner.plan(&costs.profile, fingerprint.clone(), rules, cuts)?;
                partitioner.verify(&mut plan, &task.chain, batch, pilot.device)?;
                Ok(plan)
            };
            match plan(cuts.as_deref()) {
                // The user did not ask for these cut-points, so others are tried.
                Err(PartitionError::ShardTooLarge { .. } | PartitionError::Unfinished { .. }) if own_cuts => {
                    plan(None)
                }
                plan => plan,
            }
        })?,
    };
    tracing::info!(task = task.name, "partition plan\n{plan}");
    Ok(Arc::new(plan))
}
