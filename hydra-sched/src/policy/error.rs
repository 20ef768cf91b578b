//! Errors of policy names and estimates.

use thiserror::Error;

use super::ShardTaskKind;

/// A policy that cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum PolicyError {
    /// No policy has this name.
    #[error("no scheduling policy is called `{found}`; choose one of: {expected}")]
    Unknown { found: String, expected: String },
}

/// Estimates that do not form a [`CostModel`](crate::CostModel).
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum CostError {
    /// There are no shards.
    #[error("a model must have at least one shard to be scheduled, but the estimates have none")]
    NoShards,
    /// The three lists differ in length.
    #[error(
        "the estimates must have one time per shard and kind of shard task; found {forward} \
         forward, {backward} backward and {evaluate} evaluate times: partition the model again"
    )]
    Lengths { forward: usize, backward: usize, evaluate: usize },
    /// A time is negative, infinite or not a number.
    #[error(
        "the estimated {kind} of shard {shard} takes {found} s; a time must be finite and not \
         negative: partition the model again"
    )]
    Seconds {
        kind: ShardTaskKind,
        shard: usize,
        /// The invalid time, in seconds.
        found: f64,
    },
}
