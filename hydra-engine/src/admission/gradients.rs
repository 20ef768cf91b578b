//! The host memory that a model's gradients take within a minibatch; `task/gradient_room.rs` says why that may be less
//! than all of them.

use hydra_core::{Chain, TrainSpec};
use std::ops::Range;

/// The shards for whose gradients a model has host memory: the one that is claimed, the one that computes, one that is
/// downloaded and one that the optimizer steps.
pub(super) const FLOWING: usize = 4;

/// The bytes of a model's gradients.
#[derive(Clone, Debug)]
pub(crate) struct GradientBytes {
    /// The images and bytes of the gradients that the backward pass of each shard makes.
    pub(crate) shards: Vec<Vec<(usize, u64)>>,
    /// Bytes of images that several shards use.
    shared: u64,
    /// The most that a shard makes of other images.
    largest: u64,
    /// Bytes of everything.
    all: u64,
    /// True if the optimizer waits for all of them.
    pub(crate) together: bool,
}

impl GradientBytes {
    pub(crate) fn of(chain: &Chain, spec: &TrainSpec, shards: &[Range<usize>]) -> Self {
        let images = || chain.images().iter().enumerate().filter(|(_, image)| image.trained);
        let uses = |layers: &[usize], shard: &Range<usize>| {
            layers.iter().filter(|layer| shard.contains(layer)).count() as u64
        };
        let made = |shard: &Range<usize>| {
            let of = |(index, image): (usize, &hydra_core::ImageLayout)| {
                (index, uses(&image.layers, shard) * image.bytes())
            };
            images().map(of).filter(|(_, bytes)| *bytes > 0).collect::<Vec<_>>()
        };
        Self::made_by(shards.iter().map(made).collect(), spec.clip.is_some() || spec.accumulate > 1)
    }

    /// The bytes of shards that make so much of these images.
    pub(crate) fn made_by(shards: Vec<Vec<(usize, u64)>>, together: bool) -> Self {
        let users = |image: usize| shards.iter().flatten().filter(|(other, _)| *other == image).count();
        let sum = |made: &[(usize, u64)], shared: bool| -> u64 {
            made.iter().filter(|(image, _)| (users(*image) > 1) == shared).map(|(_, bytes)| bytes).sum()
        };
        Self {
            shared: shards.iter().map(|made| sum(made, true)).sum(),
            largest: shards.iter().map(|made| sum(made, false)).max().unwrap_or(0),
            all: shards.iter().flatten().map(|(_, bytes)| bytes).sum(),
            shards,
            together,
        }
    }

    /// The room for the gradients of so many shards at once; for all where the optimizer waits for all.
    pub(crate) fn room(&self, shards: usize) -> u64 {
        match self.together {
            true => self.all,
            false => self.largest.saturating_mul(shards as u64).saturating_add(self.shared).min(self.all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_for_shards_and_for_what_several_of_them_use() {
        // A tied embedding in the first and the last shard.
        let shards = [vec![(0, 100), (1, 10)], vec![(2, 30)], vec![(3, 20)], vec![(4, 5), (0, 100)]];
        let tied = GradientBytes::made_by(shards.to_vec(), false);
        assert_eq!([1, 2, 3].map(|shards| tied.room(shards)), [230, 260, 265]);
        let together = GradientBytes { together: true, ..tied };
        assert_eq!(together.room(1), 265);
    }

    #[test]
    fn a_chain_has_gradients_of_what_it_trains() {
        use hydra_core::OptimizerSpec;
        use hydra_models::gpt2::{self, Gpt2Config};
        let chain = gpt2::chain(&Gpt2Config::preset("bytes-tiny").unwrap(), None).unwrap();
        let spec = TrainSpec::new(OptimizerSpec::adamw(1e-3), 1);
        let layers: Vec<Range<usize>> = (0..chain.len()).map(|layer| layer..layer + 1).collect();
        let cut = GradientBytes::of(&chain, &spec, &layers);
        let (tied, others): (Vec<_>, Vec<_>) =
            chain.images().iter().partition(|image| image.layers.len() > 1);
        assert!(!tied.is_empty());
        assert_eq!(cut.shared, tied.iter().map(|image| 2 * image.bytes()).sum::<u64>());
        assert_eq!(cut.all, cut.shared + others.iter().map(|image| image.bytes()).sum::<u64>());
        assert_eq!(cut.largest, others.iter().map(|image| image.bytes()).max().unwrap());
        // In one shard nothing is shared, and both uses are made at once.
        let whole = GradientBytes::of(&chain, &spec, std::slice::from_ref(&(0..chain.len())));
        assert_eq!((whole.shared, whole.largest, whole.room(1)), (0, cut.all, cut.all));
        let clipped = GradientBytes::of(&chain, &TrainSpec { clip: Some(1.0), ..spec }, &layers);
        assert_eq!(clipped.room(1), cut.all);
    }
}
