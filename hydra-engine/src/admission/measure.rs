//! First step: measures the cost of each model's layers, from a saved plan or by a pilot pass.

use crate::device::LogicalDevice;
use crate::error::{EngineError, guarded, refused};
use crate::protocol::StopFlag;
use crate::train_task::TrainTask;
use hydra_core::{Batch, Chain, gather_largest};
use hydra_partition::{
    Fingerprint, InitialValues, PartitionError, PartitionPlan, PilotPartitioner, PilotProgress, Profile,
};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// The costs shared by tasks of the same architecture and batch.
pub(super) struct Costs {
    chain: Arc<Chain>,
    pub fingerprint: Fingerprint,
    pub profile: Profile,
}

/// A task with the costs of its layers.
pub(super) struct MeasuredTask<'a> {
    pub task: &'a TrainTask,
    /// The measured microbatch, which is the largest of the dataset.
    pub batch: Batch,
    pub costs: Arc<Costs>,
    /// The costs with which the task is cut so that shards leave memory for gradient accumulation, if it should be.
    pub with_sums: Option<Profile>,
}

impl MeasuredTask<'_> {
    /// The same task, with memory for gradient accumulation if it wants that and `sums` holds.
    pub(super) fn cut_with(&self, sums: bool) -> Self {
        let with_sums = self.with_sums.clone().filter(|_| sums);
        Self { batch: self.batch.clone(), costs: self.costs.clone(), with_sums, ..*self }
    }
}

/// Saved plans, and options that distinguish them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plans {
    /// A plan file, or a directory of plan files.
    pub path: Option<PathBuf>,
    /// Options that affect costs and are visible neither in chains nor in devices.
    pub config: String,
    /// Costs measured by other admissions.
    pub measurements: Measurements,
}

/// Measured costs of layers that several [orchestrators](crate::Orchestrator) of one process share: a chain and
/// microbatch is measured once. Clones share one collection.
#[derive(Clone, Default)]
pub struct Measurements(Arc<Mutex<Vec<Arc<Costs>>>>);

impl std::fmt::Debug for Measurements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Measurements").finish_non_exhaustive()
    }
}

impl Measurements {
    fn find(&self, is_same: impl Fn(&&Arc<Costs>) -> bool) -> Option<Arc<Costs>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().find(is_same).cloned()
    }

    fn add(&self, costs: &Arc<Costs>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(costs.clone());
    }
}

/// Receives the name of a task and the progress of its pilot pass.
pub(crate) type OnProgress<'a> = &'a dyn Fn(&str, PilotProgress);

/// Returns the costs with which a task is cut to leave memory for gradient accumulation, if it should be.
pub(super) type WithSums<'a> = &'a dyn Fn(&TrainTask, &Profile) -> Option<Profile>;

/// The context of pilot passes.
pub(super) struct PilotContext<'a> {
    pub device: &'a LogicalDevice,
    pub plans: &'a Plans,
    pub on_progress: OnProgress<'a>,
    pub stop: &'a StopFlag,
}

/// Measures every task; tasks of the same architecture and batch are measured once.
pub(super) fn measure<'a>(
    tasks: impl Iterator<Item = &'a TrainTask>,
    pilot: &PilotContext<'_>,
    with_sums: WithSums<'_>,
) -> Result<Vec<MeasuredTask<'a>>, EngineError> {
    let mut measured: Vec<MeasuredTask<'a>> = Vec::new();
    for task in tasks {
        measured.push(pilot.measure(task, with_sums, &measured).map_err(refused(&task.name))?);
    }
    Ok(measured)
}

/// The microbatch that is measured for a task.
pub(super) fn largest_microbatch(task: &TrainTask) -> Result<Batch, EngineError> {
    let items = task.spec.microbatch();
    let batch = guarded("reading a batch", || Ok(gather_largest(task.train.as_ref(), items)?))?;
    Ok(batch.in_type(task.chain.float_type()))
}

/// The chain of a task's rounds, if it is another one than the task's, with its largest batch.
fn rounds(task: &TrainTask) -> Result<Option<(&Chain, Batch)>, EngineError> {
    let Some(of) = task.rounds.as_ref().filter(|of| !Arc::ptr_eq(&of.chain, &task.chain)) else {
        return Ok(None);
    };
    let batch = guarded("reading a batch", || Ok(gather_largest(of.data.as_ref(), 1)?))?;
    Ok(Some((&of.chain, batch.in_type(of.chain.float_type()))))
}

/// Standing device bytes vary by this much between processes. The margin leaves more free.
const STANDING_DIFFERS: u64 = 16 << 10;

/// Returns whether `planned` standing bytes on a device are at least `here` bytes, up to [`STANDING_DIFFERS`].
pub(super) fn stands_alike(here: u64, planned: u64) -> bool {
    here <= planned.saturating_add(STANDING_DIFFERS)
}

impl PilotContext<'_> {
    fn measure<'a>(
        &self,
        task: &'a TrainTask,
        with_sums: WithSums<'_>,
        others: &[MeasuredTask<'_>],
    ) -> Result<MeasuredTask<'a>, EngineError> {
        let batch = largest_microbatch(task)?;
        let mut config = self.plans.config.clone();
        if let Some(of) = &task.rounds {
            // The memory of a layer depends on what its data keeps, such as the longest sequence.
            let keys = of.chain.layers().iter().map(|layer| format!("{:?}", layer.layer().cost_key()));
            let keys = keys.collect::<Vec<_>>().join(" ");
            let largest = gather_largest(of.data.as_ref(), 1)?;
            let Fingerprint { architecture, inputs, targets, .. } =
                Fingerprint::new(&of.chain, &largest, &keys);
            config = format!("{config}, in rounds {architecture} of {inputs:?} and {targets:?}");
        }
        let fingerprint =
            Fingerprint::new(&task.chain, &batch, &config).on(self.device.spec.threads, &self.device.model);
        // Names and shapes do not identify the computation of a layer; they suffice only if the chain has a cost key.
        // (Layers within the chain have their own keys, which the partitioner compares.)
        let same_model = |chain: &Arc<Chain>| {
            let noted = !chain.description().is_empty();
            Arc::ptr_eq(chain, &task.chain) || noted && chain.architecture() == task.chain.architecture()
        };
        let same = |of: &&Arc<Costs>| same_model(&of.chain) && of.fingerprint.same_costs(&fingerprint);
        let known = others.iter().map(|other| &other.costs).find(same).cloned();
        let known = known.or_else(|| self.plans.measurements.find(same));
        let measured = || {
            let costs = self.costs(task, &batch, fingerprint.clone()).map(Arc::new)?;
            self.plans.measurements.add(&costs);
            Ok::<_, EngineError>(costs)
        };
        let costs = known.map_or_else(measured, Ok)?;
        let with_sums = with_sums(task, &costs.profile);
        Ok(MeasuredTask { task, batch, costs, with_sums })
    }

    /// The costs from a saved plan or a pilot pass.
    fn costs(&self, task: &TrainTask, batch: &Batch, fingerprint: Fingerprint) -> Result<Costs, EngineError> {
        let find = |path| PartitionPlan::find_profile(path, &fingerprint);
        let profile = match self.plans.path.as_deref().map(find).transpose()?.flatten() {
            Some(profile) => self.standing_here(profile),
            None => guarded("the pilot pass", || {
                self.with_partitioner(task, |partitioner| {
                    partitioner.measure(&task.chain, batch, self.device)
                })
            })?,
        };
        Ok(Costs { chain: task.chain.clone(), fingerprint, profile })
    }

    /// Adapts a saved profile to this process: its standing bytes are raised to those measured here, for example
    /// because a processor with a larger cache has larger buffers for matrix products.
    fn standing_here(&self, profile: Profile) -> Profile {
        let here = self.device.probe.in_use(self.device.measured_as());
        match stands_alike(here, profile.standing_bytes) {
            true => profile,
            false => Profile { standing_bytes: here, ..profile },
        }
    }

    /// Calls `work` with a partitioner that starts from the task's initial weights, also runs its rounds, and reports its
    /// progress.
    pub(super) fn with_partitioner<T>(
        &self,
        task: &TrainTask,
        work: impl FnOnce(&PilotPartitioner<'_>) -> Result<T, PartitionError>,
    ) -> Result<T, EngineError> {
        let rounds = rounds(task)?;
        let values = InitialValues::new(&task.chain, task.spec.seed);
        let report = |progress| (self.on_progress)(&task.name, progress);
        let is_stopped = || self.stop.is_stopped();
        let partitioner = PilotPartitioner::new(&values).with_progress(&report).with_stop(&is_stopped);
        Ok(match &rounds {
            Some((chain, batch)) => work(&partitioner.also(chain, batch)),
            None => work(&partitioner),
        }?)
    }
}
