//! The bytes of images where they are stored and promoted from, and of the gradients that wait beside them.

use hydra_core::{Chain, FloatType, ImageLayout, TrainSpec};
use hydra_partition::{PartitionPlan, ShardPlan};
use hydra_sched::ImageCost;
use hydra_spill::{ImageId, PIECE};

/// The bytes of an image's masters: its parameters, what they are rounded to, and their moments.
pub(super) fn master_bytes(image: &ImageLayout, spec: &TrainSpec) -> u64 {
    let moments = if image.trained { spec.optimizer.moments() as u64 } else { 0 };
    image.master_bytes() + moments * image.moment_bytes()
}

/// The bytes of the snapshot of an image's best parameters, if its task takes one.
pub(crate) fn best_bytes(image: &ImageLayout, spec: &TrainSpec) -> Option<u64> {
    (image.trained && spec.keeps_best()).then(|| image.moment_bytes())
}

/// The bytes that a store holds of an image: its masters and the snapshot of its best parameters.
pub(crate) fn stored_bytes(image: &ImageLayout, spec: &TrainSpec) -> u64 {
    master_bytes(image, spec) + best_bytes(image, spec).unwrap_or(0)
}

/// The bytes that the optimizer has of an image on the disk at once.
pub(crate) fn stepped_bytes(image: &ImageLayout, spec: &TrainSpec) -> u64 {
    let (elements, piece) = (image.elements as u64, image.elements.min(PIECE) as u64);
    stored_bytes(image, spec).checked_div(elements).unwrap_or(0) * piece
}

/// The bytes of gradients that wait, for which a device-homed task has room on its device as long as it runs. Beside
/// them one parameter is there once more, while a sum is made of it or its best values are put back.
pub(crate) fn waiting(chain: &Chain, spec: &TrainSpec) -> u64 {
    let accumulates = spec.accumulate > 1;
    let trained = || chain.images().iter().filter(|image| image.trained);
    let again = |image: &&ImageLayout| accumulates || spec.keeps_best() || image.layers.len() > 1;
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

/// The images of a shard, as parts that have copies of their own on devices.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShardImages {
    /// Those that nobody steps, by their names.
    pub frozen: Vec<ImageCost>,
    /// Those of the task alone.
    pub stepped: Vec<ImageCost>,
}

/// The images of each shard.
pub(super) fn shard_images(
    chain: &Chain,
    plan: &PartitionPlan,
    name: impl Fn(usize) -> ImageId,
) -> Vec<ShardImages> {
    let bytes = |image: usize| chain.images()[image].bytes();
    let frozen = |image: usize| {
        let id = name(image);
        ImageCost { id: (id.task.0 as u64) << 32 | id.image as u64, bytes: bytes(image) }
    };
    let stepped = |image: usize| ImageCost { id: image as u64, bytes: bytes(image) };
    let of = |shard: &ShardPlan| {
        let images = chain.images_of(shard.range()).into_iter();
        let (trained, others): (Vec<usize>, Vec<usize>) =
            images.partition(|image| chain.images()[*image].trained);
        ShardImages {
            frozen: others.into_iter().map(frozen).collect(),
            stepped: trained.into_iter().map(stepped).collect(),
        }
    };
    plan.shards.iter().map(of).collect()
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
