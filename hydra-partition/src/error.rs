//! Errors of measuring and cutting a model, and of reading its plan.

use hydra_core::{ByteSize, DeviceError, DeviceId, WeightError};
use std::ops::Range;
use std::path::PathBuf;

/// Why a model could not be partitioned, or a plan not be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum PartitionError {
    /// A layer does not fit the device even as a shard of its own.
    #[error(
        "layer `{layer}` needs a device memory of {} bytes ({}) by itself and {} bytes ({}) are given: its \
         parameters take {}, all that computing with it takes is {}{}, the double buffer{} is {} and the margin {}",
        .needed, ByteSize(*.needed).at_least(), .budget, ByteSize(*.budget), ByteSize(*.param_bytes),
        ByteSize(*.peak_bytes), stands(*.standing_bytes), of_layer(.buffered.as_deref()), ByteSize(*.reserve),
        ByteSize(*.margin)
    )]
    LayerTooLarge {
        layer: String,
        /// The smallest budget in bytes under which every layer of the model fits by itself, with this double buffer.
        needed: u64,
        /// The budget there is, in bytes.
        budget: u64,
        param_bytes: u64,
        peak_bytes: u64,
        /// Those of them that are in use on the device before anything is brought there.
        standing_bytes: u64,
        /// The double buffer, in bytes.
        reserve: u64,
        /// The layer whose parameters it holds, if that is one of this model.
        buffered: Option<String>,
        /// The safety margin, in bytes.
        margin: u64,
    },
    /// A shard that was cut by hand does not fit.
    #[error(
        "shard {shard} (layers {first} to {}) does not fit: it needs {need} bytes ({}) and there is room for \
         {room} ({}), its parameters take {param_bytes} and the double buffer, which holds the parameters of the \
         largest shard, {reserve}; cut the larger of the two again, or leave the cuts to the partitioner",
        .end.saturating_sub(1), ByteSize(*.need).at_least(), ByteSize(*.room)
    )]
    ShardTooLarge {
        /// The shard, from zero.
        shard: usize,
        /// Its first layer.
        first: usize,
        /// The layer after its last.
        end: usize,
        need: u64,
        room: u64,
        param_bytes: u64,
        /// The double buffer in bytes.
        reserve: u64,
    },
    /// The device could not finish a layer's or a shard's work.
    #[error(
        "layer `{layer}` of `{chain}` was not finished, for the reason below; if that is memory, the device has less of it \
         than its budget says"
    )]
    Unfinished {
        chain: String,
        /// The layer's name, or the first and the last of a shard's.
        layer: String,
        source: DeviceError,
    },
    /// The pass was stopped before its end.
    #[error("the pilot pass was stopped before its end")]
    Stopped,
    /// Cut-points that were given by hand are not ascending, or not inside the chain.
    #[error("the cut-points {cuts:?} do not cut {layers} layers: expected ascending numbers from 1 to {}", .layers.saturating_sub(1))]
    CutPoints { cuts: Vec<usize>, layers: usize },
    /// A layer panicked during the pilot pass.
    #[error("layer `{layer}` of chain `{chain}` failed in the pilot pass: {message}")]
    Layer {
        chain: String,
        /// The layer's name, or the first and the last one's where a whole shard ran.
        layer: String,
        message: String,
    },
    /// A layer's output is not a function of its parameters, its input and its pass.
    #[error(
        "layer `{layer}` of chain `{chain}` gives another output when it is run again: a forward is computed again for \
         the backward pass, so it has to be a function of parameters, input and `Pass` alone; use `pass.site(0).dropout` \
         instead of a dropout that draws from random state of its own, and keep no running statistics"
    )]
    Unrepeatable { chain: String, layer: String },
    /// The masters of a buffer could not be had.
    #[error("the pilot pass could not read the parameters of layers {} to {}", .layers.start, .layers.end.saturating_sub(1))]
    Weights { layers: Range<usize>, source: WeightError },
    /// The device did not run what the pilot pass asked of it.
    #[error("{device} did not run the pilot pass")]
    Device { device: DeviceId, source: Option<Box<dyn std::error::Error + Send + Sync>> },
    /// A plan is verified against a chain of other layers.
    #[error("the plan describes the layers {expected:?} and chain `{chain}` has {found:?}: make a new plan")]
    OtherChain { chain: String, expected: Vec<String>, found: Vec<String> },
    /// A plan's file, or a directory of plans, could not be read.
    #[error("the partition plan {} could not be read", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file holds no partition plan.
    #[error("{} is not a partition plan: delete it, or name another file", path.display())]
    NotAPlan { path: PathBuf, source: serde_json::Error },
    /// A plan of another version of the format.
    #[error("the partition plan {} has schema {found}, expected {expected}: make it again", path.display())]
    Schema { path: PathBuf, found: u64, expected: u32 },
    /// A plan whose shards are not its layers, each once and in order.
    #[error("the shards of the partition plan {} do not cover its {layers} layers in order: make it again", path.display())]
    Uncovered { path: PathBuf, layers: usize },
    /// A plan that was changed, or made by other rules.
    #[error(
        "the shards of the partition plan {} are not what its layers and rules give: make it again", path.display()
    )]
    Inconsistent { path: PathBuf },
    /// A plan could not be written.
    #[error("the partition plan could not be written to {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

fn stands(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(" with {} that stand on the device anyhow", ByteSize(bytes)),
    }
}

fn of_layer(layer: Option<&str>) -> String {
    layer.map_or_else(String::new, |layer| format!(" for `{layer}`"))
}
