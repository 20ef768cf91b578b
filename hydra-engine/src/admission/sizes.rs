//! The bytes of a task on which its room in memory depends.

use super::division::StoredImages;
use super::gradients::GradientBytes;
use super::placement::PlacedTask;
use crate::train_task::TrainTask;
use hydra_core::{Chain, FloatType, ImageLayout, TrainSpec};
use hydra_partition::PartitionPlan;

/// The bytes of an image's masters: its parameters, what they are rounded to, and their moments.
pub(super) fn master_bytes(image: &ImageLayout, spec: &TrainSpec) -> u64 {
    let moments = if image.trained { spec.optimizer.moments() as u64 } else { 0 };
    image.master_bytes() + moments * image.moment_bytes()
}

/// The bytes of the copy of an image's best parameters, where one is kept.
pub(crate) fn best_bytes(image: &ImageLayout, spec: &TrainSpec) -> Option<u64> {
    (image.trained && spec.eval_every.is_some()).then(|| image.moment_bytes())
}

/// The bytes that a store holds of an image: its masters and, where one is kept, the copy of its best parameters.
pub(crate) fn stored_bytes(image: &ImageLayout, spec: &TrainSpec) -> u64 {
    master_bytes(image, spec) + best_bytes(image, spec).unwrap_or(0)
}

/// The bytes of gradients that wait, for which a device-homed task has room on its device as long as it runs. Beside
/// them one parameter is there once more, while a sum is made of it or its best values are put back.
pub(crate) fn waiting(chain: &Chain, spec: &TrainSpec) -> u64 {
    let accumulates = spec.accumulate > 1;
    let trained = || chain.images().iter().filter(|image| image.trained);
    let again = |image: &&ImageLayout| accumulates || spec.eval_every.is_some() || image.layers.len() > 1;
    let params = trained().filter(again).flat_map(|image| &image.params);
    let largest = params.map(|param| (param.len * size_of::<f32>()) as u64).max().unwrap_or(0);
    trained().map(|image| waiting_of(image, accumulates)).sum::<u64>() + largest
}

/// The bytes of gradients of an image that wait: the uses of a tied parameter for each other, microbatches for
/// their sum. What is added up is `f32`, in memory of its own where the gradients are narrower.
fn waiting_of(image: &ImageLayout, accumulates: bool) -> u64 {
    let uses = image.layers.len() as u64;
    let sum = if image.float == FloatType::F32 { 0 } else { image.moment_bytes() };
    let tied = if uses > 1 { uses * image.bytes() + sum } else { 0 };
    tied + if accumulates { image.moment_bytes() } else { 0 }
}

/// The host memory that a task takes, beside its masters, while it is within a minibatch.
#[derive(Debug)]
pub(super) enum Work {
    /// Nothing is left to do.
    None,
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
    pub work: Work,
    /// Whether gradients stay on the device.
    pub device_homed: bool,
}

impl TaskSizes {
    pub(super) fn of(placed: &PlacedTask<'_>) -> Self {
        let PlacedTask { task, batch, plan, optimizer } = placed;
        let microbatches = if task.evaluate_only { 1 } else { task.spec.accumulate as u64 };
        let batch_bytes = batch.inputs.len_bytes() + batch.targets.len_bytes();
        Self {
            images: stored_images(task, plan, optimizer.on_device()),
            batches: batch_bytes.saturating_mul(microbatches),
            boundaries: boundary_bytes(task, plan),
            gradients: GradientBytes::of(&task.chain, &task.spec, &plan.shards()),
            work: Work::of(task, plan),
            device_homed: optimizer.on_device(),
        }
    }

    /// Whether nothing is left to do.
    pub(super) fn is_finished(&self) -> bool {
        matches!(self.work, Work::None)
    }

    /// Host bytes within a minibatch, if there is room for the gradients of so many shards.
    pub(super) fn active(&self, shards: usize) -> u64 {
        let gradients = match self.work {
            Work::None => return 0,
            Work::Evaluation => 0,
            Work::Training => self.gradients.room(shards),
            Work::Accumulation(bytes) => bytes,
        };
        gradients.saturating_add(self.boundaries).saturating_add(self.batches)
    }

    /// How many of them are for gradients that the optimizer may step with as they come; gradients on a device need none.
    pub(super) fn gradient_room(&self, shards: usize) -> u64 {
        if self.device_homed { u64::MAX } else { self.gradients.room(shards) }
    }
}

impl Work {
    fn of(task: &TrainTask, plan: &PartitionPlan) -> Self {
        match (task.is_finished(), task.evaluate_only, task.spec.accumulate) {
            (true, ..) => Self::None,
            (_, true, _) => Self::Evaluation,
            (.., 0 | 1) => Self::Training,
            _ => Self::Accumulation(summed_bytes(task, plan)),
        }
    }
}

fn stored_images(task: &TrainTask, plan: &PartitionPlan, device_homed: bool) -> StoredImages {
    let images = task.chain.images().iter();
    let stored = |bytes: u64| if task.is_finished() { 0 } else { bytes };
    StoredImages {
        masters: images.clone().map(|image| stored(stored_bytes(image, &task.spec))).collect(),
        promoted: images.map(ImageLayout::bytes).collect(),
        shards: plan.shards().into_iter().map(|range| task.chain.images_of(range)).collect(),
        may_leave: !device_homed && !task.is_finished(),
    }
}

/// The bytes of boundary activations at the cut-points, with one more of them for what is under way: in training, with
/// one gradient of them in each direction.
fn boundary_bytes(task: &TrainTask, plan: &PartitionPlan) -> u64 {
    let inputs = plan.shards.iter().skip(1).map(|shard| plan.layers[shard.first].input_bytes);
    let directions = if task.evaluate_only { 1 } else { 2 };
    inputs.clone().sum::<u64>() + directions * inputs.max().unwrap_or(0)
}

/// The bytes of gradients of microbatches, which are added up in `f32`: uses of the next one wait for the last of them,
/// and while the sum is kept the gradients of one more shard arrive.
fn summed_bytes(task: &TrainTask, plan: &PartitionPlan) -> u64 {
    let summed = |image: &ImageLayout| {
        let uses = image.bytes() * image.layers.len() as u64;
        uses.max(image.moment_bytes()) + (uses - image.bytes())
    };
    let sums: u64 = task.chain.images().iter().filter(|image| image.trained).map(summed).sum();
    sums + plan.shards.iter().map(|shard| shard.gradient_bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_counted_with_the_sums_that_it_is_added_up_in() {
        let image = |float, layers| ImageLayout {
            name: "image".to_owned(),
            params: Vec::new(),
            elements: 100,
            layers,
            trained: true,
            float,
        };
        let of = |float| {
            let (one, tied) = (image(float, vec![0]), image(float, vec![0, 3]));
            [(&one, false), (&one, true), (&tied, false), (&tied, true)]
                .map(|(image, sums)| waiting_of(image, sums))
        };
        assert_eq!(of(FloatType::F32), [0, 400, 800, 1200]);
        assert_eq!(of(FloatType::Bf16), [0, 400, 800, 1200]);
    }
}
