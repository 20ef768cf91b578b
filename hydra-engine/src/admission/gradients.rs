//! The host memory that a model's gradients take within a minibatch; `task/pending_gradients.rs` says why that may be less
//! than all of them.

use hydra_core::{Chain, TrainSpec};
use std::ops::Range;

/// The shards for whose gradients a model has host memory: the one that is claimed, the one that computes, one that is
/// downloaded and one that the optimizer steps.
pub(super) const FLOWING: usize = 4;

/// The microbatch groups of each replica whose gradients have room where no replica waits for the sums: the one that computes, the one whose
/// gradients are downloaded and added, and one for what one device is ahead of another.
const FLOWING_GROUPS: usize = 3;

/// The microbatches of a minibatch whose gradients may be on the host at once, from the first one on that is not in the sum:
/// later ones come first where several devices compute one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Of buffers that one shard uses.
    pub own: usize,
    /// Of buffers that several shards use: those of a microbatch group wait for the last one of them.
    pub shared: usize,
}

impl Window {
    /// All that are computed.
    pub(crate) const OPEN: Self = Self { own: usize::MAX, shared: usize::MAX };

    /// That of minibatches of so many microbatches, of which so many microbatch groups of so many are under way at once. Microbatches
    /// of one microbatch group add up on their device before they come; one more than there are replicas does not wait for the sum. With
    /// `flows` there is room for so many that replicas hardly wait for one.
    pub(super) fn of_replicas(
        microbatches: usize,
        microbatch_group: usize,
        replicas: usize,
        flows: bool,
    ) -> Self {
        if replicas < 2 {
            return Self::OPEN;
        }
        let flowing =
            if flows { FLOWING_GROUPS.saturating_mul(microbatch_group).saturating_mul(replicas) } else { 0 };
        let (own, shared) = (microbatch_group + replicas, microbatch_group.saturating_mul(replicas + 1));
        let [own, shared] = [own, shared].map(|least| least.max(flowing).min(microbatches));
        Self { own, shared }
    }

    /// Returns whether the gradients of so many microbatches, all of a minibatch, may wait at once.
    pub(crate) fn has_all(self, microbatches: usize) -> bool {
        self != Self::OPEN && self.own.min(self.shared) >= microbatches
    }

    /// That of a buffer that several shards use, or one.
    pub(crate) fn of(self, shared: bool) -> usize {
        if shared { self.shared } else { self.own }
    }

    /// Bytes of the gradients of all buffers that wait in it, of which those of one microbatch take so many; none where
    /// microbatches come one after the other.
    fn bytes(self, own: u64, shared: u64) -> u64 {
        match self {
            Self::OPEN => 0,
            Self { own: of_own, shared: of_shared } => {
                own.saturating_mul(of_own as u64).saturating_add(shared.saturating_mul(of_shared as u64))
            }
        }
    }
}

/// The bytes of a model's gradients.
#[derive(Clone, Debug)]
pub(crate) struct GradientBytes {
    /// The buffers and bytes of the gradients that the backward pass of each shard makes.
    pub(crate) shards: Vec<Vec<(usize, u64)>>,
    /// Bytes of buffers that several shards use.
    shared: u64,
    /// Those of them that wait for another shard: all but what the last one makes, which is the first of the chain.
    waiting: u64,
    /// The most that a shard makes with which buffers are complete.
    largest: u64,
    /// Bytes of everything.
    all: u64,
    /// True if the optimizer waits for all of them.
    pub(crate) together: bool,
}

impl GradientBytes {
    pub(crate) fn of(chain: &Chain, spec: &TrainSpec, shards: &[Range<usize>]) -> Self {
        let buffers = || chain.buffers().iter().enumerate().filter(|(_, buffer)| buffer.trained);
        let uses = |layers: &[usize], shard: &Range<usize>| {
            layers.iter().filter(|layer| shard.contains(layer)).count() as u64
        };
        let made = |shard: &Range<usize>| {
            let of = |(index, buffer): (usize, &hydra_core::ParamBufferLayout)| {
                (index, uses(&buffer.layers, shard) * buffer.bytes())
            };
            buffers().map(of).filter(|(_, bytes)| *bytes > 0).collect::<Vec<_>>()
        };
        Self::made_by(shards.iter().map(made).collect(), spec.clip.is_some() || spec.accumulate > 1)
    }

    /// The bytes of shards that make so much of these buffers.
    pub(crate) fn made_by(shards: Vec<Vec<(usize, u64)>>, together: bool) -> Self {
        let all = |of: &dyn Fn(usize, usize) -> bool| -> Vec<u64> {
            let sum = |(shard, made): (usize, &Vec<(usize, u64)>)| {
                made.iter().filter(|(buffer, _)| of(shard, *buffer)).map(|(_, bytes)| bytes).sum()
            };
            shards.iter().enumerate().map(sum).collect()
        };
        let waits = |shard: usize, buffer: usize| users(&shards[..shard], buffer) > 0;
        Self {
            shared: all(&|_, buffer| users(&shards, buffer) > 1).iter().sum(),
            waiting: all(&waits).iter().sum(),
            largest: all(&|shard, buffer| !waits(shard, buffer)).into_iter().max().unwrap_or(0),
            all: shards.iter().flatten().map(|(_, bytes)| bytes).sum(),
            shards,
            together,
        }
    }

    /// Returns whether several shards use a buffer.
    pub(crate) fn is_shared(&self, buffer: usize) -> bool {
        users(&self.shards, buffer) > 1
    }

    /// Bytes of the gradients that wait in a window.
    pub(super) fn in_window(&self, window: Window) -> u64 {
        window.bytes(self.all - self.shared, self.shared)
    }

    /// The room for the gradients of so many shards at once; for all where the optimizer waits for all.
    pub(crate) fn room(&self, shards: usize) -> u64 {
        match self.together {
            true => self.all,
            false => self.largest.saturating_mul(shards as u64).saturating_add(self.waiting).min(self.all),
        }
    }
}

/// The number of shards that use a buffer.
fn users(shards: &[Vec<(usize, u64)>], buffer: usize) -> usize {
    shards.iter().filter(|made| made.iter().any(|(other, _)| *other == buffer)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_for_shards_and_for_what_waits_for_others() {
        // A tied embedding in the first and the last shard.
        let shards = [vec![(0, 100), (1, 10)], vec![(2, 30)], vec![(3, 20)], vec![(4, 5), (0, 100)]];
        let tied = GradientBytes::made_by(shards.to_vec(), false);
        assert_eq!([1, 2, 3].map(|shards| tied.room(shards)), [210, 265, 265]);
        let together = GradientBytes { together: true, ..tied };
        assert_eq!(together.room(1), 265);
    }

    #[test]
    fn gradients_wait_only_where_several_devices_compute_a_model() {
        let tied = GradientBytes::made_by(vec![vec![(0, 100), (1, 10)], vec![(2, 30), (0, 100)]], true);
        let window = |microbatches, microbatch_group, replicas| {
            Window::of_replicas(microbatches, microbatch_group, replicas, false)
        };
        assert_eq!((window(8, 2, 1), tied.in_window(Window::OPEN)), (Window::OPEN, 0));
        assert_eq!(window(8, 1, 2), Window { own: 3, shared: 3 });
        assert_eq!(window(8, 2, 2), Window { own: 4, shared: 6 });
        assert_eq!(window(4, 2, 2), Window { own: 4, shared: 4 }, "no more than there are");
        assert_eq!(tied.in_window(window(8, 2, 2)), 4 * 40 + 6 * 200);
        let flowing = |microbatches, replicas| Window::of_replicas(microbatches, 1, replicas, true);
        assert_eq!(flowing(8, 2), Window { own: 6, shared: 6 });
        assert_eq!((flowing(4, 2), flowing(8, 1)), (Window { own: 4, shared: 4 }, Window::OPEN));
        assert!(flowing(4, 2).has_all(4) && !flowing(8, 2).has_all(8));
        assert!(!Window::OPEN.has_all(4), "nothing has room that nobody counts");
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
            chain.buffers().iter().partition(|buffer| buffer.layers.len() > 1);
        assert!(!tied.is_empty());
        assert_eq!(cut.shared, tied.iter().map(|buffer| 2 * buffer.bytes()).sum::<u64>());
        assert_eq!(cut.all, cut.shared + others.iter().map(|buffer| buffer.bytes()).sum::<u64>());
        assert_eq!(cut.waiting, cut.shared / 2, "that of the head");
        let completed = |layer: usize| -> u64 {
            let buffers = chain.buffers().iter().filter(|buffer| buffer.layers[0] == layer);
            buffers.map(|buffer| buffer.bytes()).sum()
        };
        assert_eq!(cut.largest, (0..chain.len()).map(completed).max().unwrap());
        // In one shard nothing is shared, and both uses are made at once.
        let whole = GradientBytes::of(&chain, &spec, std::slice::from_ref(&(0..chain.len())));
        assert_eq!((whole.shared, whole.waiting, whole.largest, whole.room(1)), (0, 0, cut.all, cut.all));
        let clipped = GradientBytes::of(&chain, &TrainSpec { clip: Some(1.0), ..spec }, &layers);
        assert_eq!(clipped.room(1), cut.all);
    }
}
