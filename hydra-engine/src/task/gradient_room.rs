//! Host memory for gradients: how much a model within a minibatch has, and what of it is taken.
//!
//! A backward pass makes gradients shard by shard, and the optimizer lets go of them image by image. Where it may step as
//! soon as an image's gradient is complete, not all of them are ever there at once: a shard task that makes more is not
//! claimed before there is room for them. That never waits for ever. An image that one shard alone uses is stepped
//! without waiting for anything, and those that several shards use, as a tied embedding, have room of their own.

use crate::admission::GradientBytes;

/// The room of a task's gradients, and what is taken of it.
#[derive(Debug)]
pub(crate) struct GradientRoom {
    bytes: GradientBytes,
    room: u64,
    /// Of each image: what was claimed and has not been stepped with.
    waiting: Vec<u64>,
    /// Of all images.
    taken: u64,
}

impl GradientRoom {
    pub(crate) fn new(bytes: GradientBytes, room: u64, images: usize) -> Self {
        Self { bytes, room, waiting: vec![0; images], taken: 0 }
    }

    /// Returns whether there is room for the gradients of a shard's backward pass.
    pub(crate) fn has_room(&self, shard: usize) -> bool {
        let made: u64 = self.bytes.shards[shard].iter().map(|(_, bytes)| bytes).sum();
        self.bytes.together || self.taken + made <= self.room
    }

    /// A shard's backward pass was claimed.
    pub(crate) fn claimed(&mut self, shard: usize) {
        if self.bytes.together {
            return;
        }
        for (image, bytes) in &self.bytes.shards[shard] {
            self.waiting[*image] += bytes;
            self.taken += bytes;
        }
    }

    /// The optimizer has let go of an image's gradient.
    pub(crate) fn stepped(&mut self, image: usize) {
        self.taken -= std::mem::take(&mut self.waiting[image]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_shard_waits_until_there_is_room() {
        let bytes = GradientBytes::made_by((0..3).map(|image| vec![(image, 30)]).collect(), false);
        let mut room = GradientRoom::new(bytes, 60, 3);
        room.claimed(2);
        assert!(room.has_room(1));
        room.claimed(1);
        assert!(!room.has_room(0));
        room.stepped(2);
        assert!(room.has_room(0));
    }

    fn shards() -> impl Strategy<Value = Vec<Vec<(usize, u64)>>> {
        prop::collection::vec(prop::collection::btree_map(0..6_usize, 1..50_u64, 0..4), 1..6)
            .prop_map(|shards| shards.into_iter().map(|made| made.into_iter().collect()).collect())
    }

    proptest! {
        /// Backward passes from the last shard to the first, in the least room: when the optimizer has stepped with all
        /// that is complete, the next one always finds room.
        #[test]
        fn the_least_room_is_enough(shards in shards(), flowing in 1..4_usize) {
            let bytes = GradientBytes::made_by(shards.clone(), false);
            let limit = bytes.room(flowing);
            let mut room = GradientRoom::new(bytes, limit, 6);
            let mut pending: BTreeSet<usize> = BTreeSet::new();
            for shard in (0..shards.len()).rev() {
                if !room.has_room(shard) {
                    let later = |image: usize| shards[..=shard].iter().flatten().any(|(other, _)| *other == image);
                    let complete: Vec<usize> = pending.iter().copied().filter(|image| !later(*image)).collect();
                    complete.into_iter().for_each(|image| room.stepped(image));
                }
                prop_assert!(room.has_room(shard));
                room.claimed(shard);
                pending.extend(shards[shard].iter().map(|(image, _)| *image));
                prop_assert!(room.taken <= limit);
                prop_assert_eq!(room.taken, room.waiting.iter().sum::<u64>());
            }
        }
    }
}
