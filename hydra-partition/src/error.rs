//! Errors of measuring and cutting a model, and of reading its plan.

use hydra_core::{ByteSize, DeviceError, DeviceId, WeightError};
use std::ops::Range;
use std::path::PathBuf;

/// An error of partitioning a model or of using a plan.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum PartitionError {
    /// A layer does not fit the device even as a separate shard.
    #[error(
        "layer `{layer}` needs at least {} bytes ({}) of device memory, and the budget is {} bytes ({}): its \
         parameters take {}, computing it takes {}{}, the double buffer{} takes {} and the margin {}",
        .needed, ByteSize(*.needed).at_least(), .budget, ByteSize(*.budget), ByteSize(*.param_bytes),
        ByteSize(*.peak_bytes), stands(*.standing_bytes), of_layer(.buffered.as_deref()), ByteSize(*.reserve),
        ByteSize(*.margin)
    )]
    LayerTooLarge {
        layer: String,
        /// The smallest budget in bytes with which every layer of the model fits as a shard, with this double
        /// buffer.
        needed: u64,
        /// The budget, in bytes.
        budget: u64,
        param_bytes: u64,
        peak_bytes: u64,
        /// The part of `peak_bytes` that is in use on the device before anything is copied to it.
        standing_bytes: u64,
        /// The double buffer, in bytes.
        reserve: u64,
        /// The layer whose parameters determine the double buffer, if it is in this model.
        buffered: Option<String>,
        /// The safety margin, in bytes.
        margin: u64,
    },
    /// A user-specified shard does not fit.
    #[error(
        "shard {shard} (layers {first} to {}) does not fit: its peak is {need} bytes ({}), {available} ({}) are available, its \
         parameters take {param_bytes} and the double buffer, which holds the parameters of the largest shard, \
         {reserve}; add a cut-point in the larger of the two, or leave the cuts to the partitioner",
        .end.saturating_sub(1), ByteSize(*.need).at_least(), ByteSize(*.available)
    )]
    ShardTooLarge {
        /// The shard, from zero.
        shard: usize,
        /// Its first layer.
        first: usize,
        /// The layer after its last.
        end: usize,
        need: u64,
        available: u64,
        param_bytes: u64,
        /// The double buffer in bytes.
        reserve: u64,
    },
    /// The device failed while it computed a layer or a shard.
    #[error(
        "the device failed at layer `{layer}` of `{chain}`, for the reason below; if it is out of memory, the device has less \
         memory than its budget"
    )]
    Unfinished {
        chain: String,
        /// The layer's name, or those of the first and last layer of a shard.
        layer: String,
        source: DeviceError,
    },
    /// The pass was stopped before its end.
    #[error("the pilot pass was stopped")]
    Stopped,
    /// User-specified cut-points are not ascending, or not inside the chain.
    #[error("the cut-points {cuts:?} do not fit {layers} layers: expected ascending numbers from 1 to {}", .layers.saturating_sub(1))]
    CutPoints { cuts: Vec<usize>, layers: usize },
    /// A layer panicked during the pilot pass.
    #[error("layer `{layer}` of chain `{chain}` failed in the pilot pass: {message}")]
    Layer {
        chain: String,
        /// The layer's name, or those of the first and last layer of a shard.
        layer: String,
        message: String,
    },
    /// A layer's output is not a function of its parameters, its input and its pass.
    #[error(
        "layer `{layer}` of chain `{chain}` gives another output when it is run again: the forward is recomputed for \
         the backward pass, so it must be a function of parameters, input and pass only; draw random numbers from the \
         pass (with `pass.site(0).dropout` in Rust, with PyTorch's functions in Python), and keep running statistics in \
         a state (a `State` in Rust, that of `nn.BatchNorm1d`, `2d` or `3d` in Python)"
    )]
    Unrepeatable { chain: String, layer: String },
    /// The initial values of a buffer could not be read.
    #[error("the pilot pass could not read the parameters of layers {} to {}", .layers.start, .layers.end.saturating_sub(1))]
    Weights { layers: Range<usize>, source: WeightError },
    /// The device did not run a job of the pilot pass.
    #[error("{device} did not run the pilot pass")]
    Device { device: DeviceId, source: Option<Box<dyn std::error::Error + Send + Sync>> },
    /// A plan is used with a chain of other layers.
    #[error("the plan is for layers {expected:?}, but chain `{chain}` has {found:?}: make a new plan")]
    OtherChain { chain: String, expected: Vec<String>, found: Vec<String> },
    /// A plan's file, or a directory of plans, could not be read.
    #[error("the partition plan {} could not be read", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file is not a partition plan.
    #[error("{} is not a partition plan: delete it, or name another file", path.display())]
    NotAPlan { path: PathBuf, source: serde_json::Error },
    /// A plan of another version of the format.
    #[error("the partition plan {} has schema {found}, expected {expected}: make a new plan", path.display())]
    Schema { path: PathBuf, found: u64, expected: u32 },
    /// A plan whose shards do not cover its layers once and in order.
    #[error("the shards of the partition plan {} do not cover its {layers} layers in order: make a new plan", path.display())]
    Uncovered { path: PathBuf, layers: usize },
    /// A plan that was edited, or made under other rules.
    #[error(
        "the shards of the partition plan {} are not those that its layers and rules give: make a new plan", path.display()
    )]
    Inconsistent { path: PathBuf },
    /// A plan could not be written.
    #[error("the partition plan could not be written to {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

fn stands(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(", including {} that are always in use on the device", ByteSize(bytes)),
    }
}

fn of_layer(layer: Option<&str>) -> String {
    layer.map_or_else(String::new, |layer| format!(" for `{layer}`"))
}
