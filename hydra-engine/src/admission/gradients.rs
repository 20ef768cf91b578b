//! The host memory that a model's gradients take within a minibatch. `task/pending_gradients.rs` explains why that
//! may be less than all of them.

use hydra_core::{Chain, TrainSpec};
use std::ops::Range;

/// The shards whose gradients a model keeps in host memory when compute, download and optimizer overlap: one claimed,
/// one computing, one being downloaded and one being stepped.
pub(super) const FLOWING: usize = 4;

/// The microbatch groups per replica whose gradients fit if no replica is to wait for a sum: one that computes, one
/// whose gradients are downloaded and added, and one by which a device may be ahead of another.
const FLOWING_GROUPS: usize = 3;

/// The number of microbatches of a minibatch whose gradients may be on the host at the same time, counted from the
/// first one that is not in the sum. With several replicas, later microbatches may arrive before earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// For buffers that one shard uses.
    pub own: usize,
    /// For buffers that several shards use: the gradients of a microbatch group wait for the last of these shards.
    pub shared: usize,
}

impl Window {
    /// No limit.
    pub(crate) const OPEN: Self = Self { own: usize::MAX, shared: usize::MAX };

    /// The window for minibatches of `microbatches`, in groups of `microbatch_group`, with `replicas` groups in
    /// flight. The gradients of a group are added up on its device first, and one group more than there are replicas
    /// does not wait for the sum. With `flows` the window is so long that replicas hardly ever wait.
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

    /// Returns whether the gradients of all `microbatches` of a minibatch may wait at the same time.
    pub(crate) fn has_all(self, microbatches: usize) -> bool {
        self != Self::OPEN && self.own.min(self.shared) >= microbatches
    }

    /// The window of a buffer that several shards use (`shared`), or one.
    pub(crate) fn for_buffer(self, shared: bool) -> usize {
        if shared { self.shared } else { self.own }
    }

    /// Bytes of the gradients that wait in the window, if one microbatch has `own` and `shared` bytes; 0 if
    /// microbatches are computed one after the other.
    fn bytes(self, own: u64, shared: u64) -> u64 {
        match self {
            Self::OPEN => 0,
            Self { own: of_own, shared: of_shared } => {
                own.saturating_mul(of_own as u64).saturating_add(shared.saturating_mul(of_shared as u64))
            }
        }
    }
}

/// The bytes of a model's gradients for one microbatch.
#[derive(Clone, Debug)]
pub(crate) struct GradientBytes {
    /// For each shard, the buffers and bytes of the gradients that its backward pass makes.
    pub(crate) shards: Vec<Vec<(usize, u64)>>,
    /// Bytes of buffers that several shards use.
    shared: u64,
    /// The part of `shared` that waits for another shard: all but the gradients of the last shard in backward order,
    /// which is the first in the chain.
    waiting: u64,
    /// The most bytes that one shard makes of gradients that wait for no other shard.
    largest: u64,
    /// Bytes of all gradients.
    all: u64,
    /// True if the optimizer waits for all gradients before it steps.
    pub(crate) together: bool,
}

impl GradientBytes {
    /// The gradients of these shards without those of buffers that are resident on the device, which stay there.
    pub(crate) fn of(
        chain: &Chain,
        spec: &TrainSpec,
        shards: &[Range<usize>],
        is_resident: impl Fn(usize) -> bool,
    ) -> Self {
        let buffers = || {
            let all = chain.buffers().iter().enumerate();
            all.filter(|(index, buffer)| buffer.trained && !is_resident(*index))
        };
        let uses = |layers: &[usize], shard: &Range<usize>| {
            layers.iter().filter(|layer| shard.contains(layer)).count() as u64
        };
        let made = |shard: &Range<usize>| {
            let of = |(index, buffer): (usize, &hydra_core::ParamBufferLayout)| {
                (index, uses(&buffer.layers, shard) * buffer.bytes())
            };
            buffers().map(of).filter(|(_, bytes)| *bytes > 0).collect::<Vec<_>>()
        };
        Self::from_shards(shards.iter().map(made).collect(), spec.clip.is_some() || spec.accumulate > 1)
    }

    /// Computes the sums from the buffers and bytes of each shard.
    pub(crate) fn from_shards(shards: Vec<Vec<(usize, u64)>>, together: bool) -> Self {
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

    /// Bytes of the gradients that wait in `window`.
    pub(super) fn in_window(&self, window: Window) -> u64 {
        window.bytes(self.all - self.shared, self.shared)
    }

    /// The memory for the gradients of `shards` shards at the same time, or for all if the optimizer waits for all.
    pub(crate) fn budget_bytes(&self, shards: usize) -> u64 {
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
        let tied = GradientBytes::from_shards(shards.to_vec(), false);
        assert_eq!([1, 2, 3].map(|shards| tied.budget_bytes(shards)), [210, 265, 265]);
        let together = GradientBytes { together: true, ..tied };
        assert_eq!(together.budget_bytes(1), 265);
    }

    #[test]
    fn gradients_wait_only_where_several_devices_compute_a_model() {
        let tied = GradientBytes::from_shards(vec![vec![(0, 100), (1, 10)], vec![(2, 30), (0, 100)]], true);
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
        assert!(!Window::OPEN.has_all(4), "an open window reserves no memory");
    }

    #[test]
    fn a_chain_has_gradients_of_what_it_trains() {
        use hydra_core::OptimizerSpec;
        use hydra_models::gpt2::{self, Gpt2Config};
        let chain = gpt2::chain(&Gpt2Config::preset("bytes-tiny").unwrap(), None).unwrap();
        let spec = TrainSpec::new(OptimizerSpec::adamw(1e-3), 1);
        let layers: Vec<Range<usize>> = (0..chain.len()).map(|layer| layer..layer + 1).collect();
        let cut = GradientBytes::of(&chain, &spec, &layers, |_| false);
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
        // In one shard nothing is shared, and both uses are computed together.
        let whole = GradientBytes::of(&chain, &spec, std::slice::from_ref(&(0..chain.len())), |_| false);
        assert_eq!(
            (whole.shared, whole.waiting, whole.largest, whole.budget_bytes(1)),
            (0, 0, cut.all, cut.all)
        );
        let clipped = GradientBytes::of(&chain, &TrainSpec { clip: Some(1.0), ..spec }, &layers, |_| false);
        assert_eq!(clipped.budget_bytes(1), cut.all);
    }
}
