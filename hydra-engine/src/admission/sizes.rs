//! The bytes of a task on which its room in memory depends.

use super::cut::CutTask;
use super::division::StoredImages;
use super::gradients::{GradientBytes, Window};
use super::images::{stepped_bytes, stored_bytes};
use super::placement::Placement;
use crate::stages::Visit;
use crate::train_task::TrainTask;
use hydra_core::ImageLayout;
use hydra_partition::PartitionPlan;

/// How much of a task is computed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace {
    /// The sweeps of its visits.
    pub visit: Visit,
    /// The visits that are under way at once, each on a device.
    pub lanes: usize,
    /// True if there is room for the gradients of so many visits that lanes hardly wait for a sum.
    pub flows: bool,
}

impl Pace {
    /// One sweep after the other.
    #[cfg(test)]
    pub(super) const ONE: Self = Self { visit: Visit::ONE, lanes: 1, flows: false };
}

/// The host memory that a task takes, beside its masters, while it is within a minibatch.
#[derive(Debug)]
pub(super) enum Remaining {
    /// Nothing is left to do.
    Nothing,
    /// Only evaluations.
    Evaluation,
    /// Gradients of which the optimizer lets go as they come.
    Training,
    /// Gradients of microbatches, which take so many bytes with their sums.
    Accumulation(u64),
}

/// The bytes of a task, as far as its room depends on them.
#[derive(Debug)]
pub(super) struct TaskSizes {
    /// Its images in the store.
    pub images: StoredImages,
    /// The batches of a minibatch, or of an evaluation.
    pub batches: u64,
    /// Boundary activations at the cut-points, and their gradients.
    pub boundaries: u64,
    pub gradients: GradientBytes,
    pub remaining: Remaining,
    /// The sweeps of its visits.
    pub visit: Visit,
    /// The visits that are under way at once.
    pub lanes: usize,
    /// The microbatches whose gradients may wait for those of earlier ones.
    pub window: Window,
    /// True if gradients stay on the device.
    pub device_homed: bool,
}

impl TaskSizes {
    pub(super) fn of(cut: &CutTask<'_>, optimizer: &Placement, pace: Pace, devices: usize) -> Self {
        let CutTask { task, batch, plan, .. } = cut;
        let Pace { visit, lanes, flows } = pace;
        let microbatches = if task.evaluate_only { 1 } else { task.spec.accumulate.max(1) };
        let training_lanes = lanes.min(microbatches.div_ceil(visit.microbatches));
        let batch_bytes = batch.inputs.len_bytes() + batch.targets.len_bytes();
        let gradients = GradientBytes::of(&task.chain, &task.spec, &plan.shards());
        let window = Window::of_lanes(microbatches, visit.microbatches, training_lanes, flows);
        let in_window = gradients.in_window(window);
        Self {
            images: stored_images(cut, optimizer.on_device(), lanes),
            batches: batch_bytes.saturating_mul(microbatches.max(visit.batches * lanes) as u64),
            boundaries: boundary_bytes(task, plan, pace, training_lanes),
            remaining: match (task.is_finished(), task.evaluate_only, task.spec.accumulate) {
                (true, ..) => Remaining::Nothing,
                (_, true, _) => Remaining::Evaluation,
                (.., 0 | 1) => Remaining::Training,
                _ => Remaining::Accumulation(summed_bytes(task, plan, visit, devices) + in_window),
            },
            gradients,
            window,
            visit,
            lanes,
            device_homed: optimizer.on_device(),
        }
    }

    /// Returns true if nothing is left to do.
    pub(super) fn is_finished(&self) -> bool {
        matches!(self.remaining, Remaining::Nothing)
    }

    /// Host bytes within a minibatch, if there is room for the gradients of so many shards.
    pub(super) fn active(&self, shards: usize) -> u64 {
        let gradients = match self.remaining {
            Remaining::Nothing => return 0,
            Remaining::Evaluation => 0,
            Remaining::Training => self.gradients.room(shards),
            Remaining::Accumulation(bytes) => bytes,
        };
        gradients.saturating_add(self.boundaries).saturating_add(self.batches)
    }

    /// Those of them for gradients that the optimizer may step with as they come; nothing limits gradients on a device.
    pub(super) fn gradient_room(&self, shards: usize) -> u64 {
        if self.device_homed { u64::MAX } else { self.gradients.room(shards) }
    }
}

fn stored_images(cut: &CutTask<'_>, device_homed: bool, lanes: usize) -> StoredImages {
    let CutTask { task, plan, shared, .. } = cut;
    let images = task.chain.images().iter();
    let stored = |bytes: u64| if task.is_finished() { 0 } else { bytes };
    StoredImages {
        masters: images.clone().map(|image| stored(stored_bytes(image, &task.spec))).collect(),
        promoted: images.clone().map(ImageLayout::bytes).collect(),
        first: images.clone().map(ImageLayout::master_bytes).collect(),
        stepped: images.clone().map(|image| stepped_bytes(image, &task.spec)).collect(),
        written: images.map(ImageLayout::moment_bytes).collect(),
        shards: plan.shards().into_iter().map(|range| task.chain.images_of(range)).collect(),
        shared: shared.clone(),
        lanes,
        may_leave: !device_homed && !task.is_finished(),
    }
}

/// The bytes of boundary activations at the cut-points of all sweeps of the visits that are under way, with one more of them
/// in each for what is under way: in training, with one gradient of them for each sweep.
fn boundary_bytes(task: &TrainTask, plan: &PartitionPlan, pace: Pace, training_lanes: usize) -> u64 {
    let Pace { visit, lanes, .. } = pace;
    let inputs = plan.shards.iter().skip(1).map(|shard| plan.layers[shard.first].input_bytes);
    let (all, largest) = (inputs.clone().sum::<u64>(), inputs.max().unwrap_or(0));
    let of = |sweeps: usize, gradients: usize| {
        (sweeps as u64).saturating_mul(all).saturating_add((1 + gradients as u64).saturating_mul(largest))
    };
    let evaluation = of(visit.batches, 0).saturating_mul(lanes as u64);
    let training = || of(visit.microbatches, visit.microbatches).saturating_mul(training_lanes as u64);
    if task.evaluate_only { evaluation } else { evaluation.max(training()) }
}

/// The bytes of gradients of microbatches, which are added up in `f32`: uses of those of a visit wait for the last of them,
/// and while the sum is kept those of one more shard arrive, from each microbatch of the visit where another device was
/// faster than the first one's.
fn summed_bytes(task: &TrainTask, plan: &PartitionPlan, visit: Visit, devices: usize) -> u64 {
    let summed = |image: &ImageLayout| {
        let uses = image.bytes() * image.layers.len() as u64;
        uses.max(image.moment_bytes()) + visit.microbatches as u64 * (uses - image.bytes())
    };
    let sums: u64 = task.chain.images().iter().filter(|image| image.trained).map(summed).sum();
    let largest = plan.shards.iter().map(|shard| shard.gradient_bytes).max().unwrap_or(0);
    sums + largest * if devices > 1 { visit.microbatches as u64 } else { 1 }
}
