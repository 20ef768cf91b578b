//! The shard tasks of one sweep over a model, and their order.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a shard task: forward, backward or evaluation of its shard.
///
/// A training sweep (one microbatch) over a model of `S` shards has `2 S - 1` shard tasks: forward of shards `0 ..=
/// S-2`, then backward of shards `S-1 ..= 0`, of which the first is fused with the last shard's forward. A model of
/// one shard has the single task backward 0. An evaluation sweep has the `S` tasks evaluate `0 ..= S-1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardTaskKind {
    /// The forward of a shard that is not the last, in training.
    Forward,
    /// The backward of a shard; of the last shard, its forward and its backward.
    Backward,
    /// The forward of a shard in evaluation.
    Evaluate,
}

impl ShardTaskKind {
    /// The first shard task of a training sweep over `shards` shards.
    pub const fn training_start(shards: usize) -> (Self, usize) {
        if shards <= 1 { (Self::Backward, 0) } else { (Self::Forward, 0) }
    }

    /// The first shard task of an evaluation sweep.
    pub const fn evaluation_start() -> (Self, usize) {
        (Self::Evaluate, 0)
    }

    /// The shard task after this kind's on `shard`, in a sweep over `shards` shards; `None` at the sweep's end.
    pub const fn following(self, shard: usize, shards: usize) -> Option<(Self, usize)> {
        match self {
            Self::Forward if shard + 2 < shards => Some((Self::Forward, shard + 1)),
            Self::Forward => Some((Self::Backward, shards.saturating_sub(1))),
            Self::Backward if shard > 0 => Some((Self::Backward, shard - 1)),
            Self::Evaluate if shard + 1 < shards => Some((Self::Evaluate, shard + 1)),
            Self::Backward | Self::Evaluate => None,
        }
    }
}

impl fmt::Display for ShardTaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Evaluate => "evaluate",
        })
    }
}

/// The shard tasks of a sweep from `start` to its end.
#[cfg(test)]
pub(super) fn tasks_from(start: (ShardTaskKind, usize), shards: usize) -> Vec<(ShardTaskKind, usize)> {
    let next = |&(kind, shard): &(ShardTaskKind, usize)| kind.following(shard, shards);
    std::iter::successors(Some(start), next).collect()
}

#[cfg(test)]
mod tests {
    use super::ShardTaskKind::{Backward, Evaluate, Forward};
    use super::*;

    #[test]
    fn a_training_sweep_goes_forward_and_back() {
        let sweep = |shards| tasks_from(ShardTaskKind::training_start(shards), shards);
        assert_eq!(sweep(1), [(Backward, 0)]);
        assert_eq!(sweep(2), [(Forward, 0), (Backward, 1), (Backward, 0)]);
        let three = [(Forward, 0), (Forward, 1), (Backward, 2), (Backward, 1), (Backward, 0)];
        assert_eq!(sweep(3), three);
        for shards in 1..20 {
            assert_eq!(sweep(shards).len(), 2 * shards - 1);
        }
    }

    #[test]
    fn an_evaluation_sweep_goes_forward_only() {
        let sweep = |shards| tasks_from(ShardTaskKind::evaluation_start(), shards);
        assert_eq!(sweep(1), [(Evaluate, 0)]);
        assert_eq!(sweep(3), [(Evaluate, 0), (Evaluate, 1), (Evaluate, 2)]);
    }
}
