//! The shard tasks of one microbatch pass over a model, and their order.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a shard task: forward, backward or evaluation of its shard.
///
/// A training microbatch pass over a model of `S` shards has `2 S - 1` shard tasks: forward of shards `0 ..=
/// S-2`, then backward of shards `S-1 ..= 0`, the first of them fused with the last shard's forward. A model
/// of one shard has the single task backward 0. An evaluation microbatch pass has the `S` tasks evaluate `0
/// ..= S-1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardTaskKind {
    /// The forward of a shard that is not the last, in training.
    Forward,
    /// The backward of a shard; for the last shard, its forward and its backward.
    Backward,
    /// The forward of a shard in evaluation.
    Evaluate,
}

impl ShardTaskKind {
    /// The first shard task of a training microbatch pass over `shards` shards.
    pub const fn training_start(shards: usize) -> (Self, usize) {
        if shards <= 1 { (Self::Backward, 0) } else { (Self::Forward, 0) }
    }

    /// The first shard task of an evaluation microbatch pass.
    pub const fn evaluation_start() -> (Self, usize) {
        (Self::Evaluate, 0)
    }

    /// The shard task after this kind's on `shard`, in a microbatch pass over `shards` shards; `None` at the
    /// end of the pass.
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

/// Returns the number of microbatch passes in each microbatch group of a minibatch or evaluation: at most
/// `most`, which is at least one, and fewer if it has fewer `microbatch_passes` than the `usual` number, as
/// an epoch's last minibatch may. Then each of the `replicas` that usually has a microbatch group has one
/// too.
pub(crate) fn group_length(most: usize, replicas: usize, usual: usize, microbatch_passes: usize) -> usize {
    let microbatch_groups = usual.div_ceil(most).min(replicas).max(1);
    most.min(microbatch_passes.div_ceil(microbatch_groups)).max(1)
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

/// The shard tasks of a microbatch pass from `start` to its end.
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
    fn a_training_pass_goes_forward_and_back() {
        let microbatch_pass = |shards| tasks_from(ShardTaskKind::training_start(shards), shards);
        assert_eq!(microbatch_pass(1), [(Backward, 0)]);
        assert_eq!(microbatch_pass(2), [(Forward, 0), (Backward, 1), (Backward, 0)]);
        let three = [(Forward, 0), (Forward, 1), (Backward, 2), (Backward, 1), (Backward, 0)];
        assert_eq!(microbatch_pass(3), three);
        for shards in 1..20 {
            assert_eq!(microbatch_pass(shards).len(), 2 * shards - 1);
        }
    }

    #[test]
    fn a_place_with_fewer_passes_than_usual_has_a_group_for_each_replica_all_the_same() {
        let lengths = |replicas, usual| {
            (1..=8)
                .map(|microbatch_passes| group_length(4, replicas, usual, microbatch_passes))
                .collect::<Vec<usize>>()
        };
        assert_eq!(lengths(1, 8), [1, 2, 3, 4, 4, 4, 4, 4]);
        assert_eq!(lengths(2, 8), [1, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(lengths(8, 8), [1, 1, 2, 2, 3, 3, 4, 4], "two groups are two replicas");
        assert_eq!(lengths(2, 4), [1, 2, 3, 4, 4, 4, 4, 4], "usually one group");
        assert_eq!((group_length(usize::MAX, 2, 3, 3), group_length(1, 4, 8, 8)), (3, 1));
    }

    #[test]
    fn an_evaluation_pass_goes_forward_only() {
        let microbatch_pass = |shards| tasks_from(ShardTaskKind::evaluation_start(), shards);
        assert_eq!(microbatch_pass(1), [(Evaluate, 0)]);
        assert_eq!(microbatch_pass(3), [(Evaluate, 0), (Evaluate, 1), (Evaluate, 2)]);
    }
}
