//! Runs one shard task on a device's threads.

use super::LogicalDevice;
use crate::error::EngineError;
use crate::protocol::{Computed, Gradient, Inputs, Output};
use hydra_core::{
    Activation, AnyTensor, BackwardFrom, Chain, DeviceTensor, Key, Layer, Measured, Pass, ShardBackward,
    backward_range, finish, forget_graphs, forward_range, panic_message, promote_layers,
};
use hydra_sched::ShardTaskKind;
use hydra_spill::{ResidentCopy, alloc};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A shard task without its data.
#[derive(Clone, Debug)]
pub(crate) struct ShardWork {
    pub layers: Range<usize>,
    pub kind: ShardTaskKind,
    /// True if the shard ends in the loss.
    pub last: bool,
    /// True if an earlier shard uses the gradient of the input.
    pub input_gradients: bool,
    /// The microbatch's share of the minibatch's loss targets.
    pub weight: f64,
    /// The objective's statistic of the minibatch, in training.
    pub statistic: Option<f64>,
    /// The key of a training pass.
    pub key: Key,
    /// The minibatch, for messages.
    pub step: usize,
}

/// The resident copy and the inputs of a shard task, in device memory until the device has finished it.
pub(crate) struct Promoted {
    /// Dropped before the resident copy, whose reservation may cover them; fields are dropped in declaration order.
    pub inputs: Inputs<DeviceTensor>,
    pub resident: ResidentCopy,
}

/// Runs a shard task on a thread of the device's pool until the device has finished it; a panic in a layer becomes an
/// error.
pub(crate) fn run(
    device: &LogicalDevice,
    chain: &Chain,
    work: &ShardWork,
    promoted: Promoted,
) -> Result<Computed, EngineError> {
    let run = || {
        let computed = computed(device, chain, work, &promoted);
        finish(&device.burn, &computed.made()).map(|()| computed)
    };
    let tag = Some(device.measured_as());
    let result = catch_unwind(AssertUnwindSafe(|| alloc::with_tag(tag, run)));
    if result.is_err() {
        alloc::with_tag(tag, || {
            // No backward pass follows that would free the saved activations.
            forget_graphs(&device.burn);
            // The promoted copy is dropped below, so the device must have finished reading it. If the wait fails, the
            // panic's message is more useful.
            let _ = finish(&device.burn, &[]);
        });
    }
    let result = result.map_err(|panic| panic_message(panic.as_ref()));
    let done = result.and_then(|done| done.map_err(|error| error.to_string()));
    done.map_err(|message| EngineError::Layer {
        layers: names(chain, &work.layers),
        first: work.layers.start,
        end: work.layers.end,
        work: match work.kind {
            ShardTaskKind::Forward => "the forward",
            // Includes the recomputed forward.
            ShardTaskKind::Backward => "the forward or the backward",
            ShardTaskKind::Evaluate => "the evaluation",
        },
        step: work.step,
        message,
    })
}

/// The layers of a shard by their names.
fn names(chain: &Chain, range: &Range<usize>) -> String {
    let name = |layer: usize| chain.layers().get(layer).map_or("?", |layer| layer.name.as_str());
    match range.len() {
        1 => format!("layer `{}`", name(range.start)),
        _ => format!("one of the layers `{}` to `{}`", name(range.start), name(range.end - 1)),
    }
}

/// Promotes the layers, and runs them forward and, in a backward shard task, backward.
fn computed(device: &LogicalDevice, chain: &Chain, work: &ShardWork, promoted: &Promoted) -> Computed {
    let Promoted { resident, inputs } = promoted;
    let autodiff = device.burn.clone().autodiff();
    let track = work.kind == ShardTaskKind::Backward;
    let buffer = |buffer| resident.buffer(buffer);
    let layers = promote_layers(chain, work.layers.clone(), &buffer, &device.burn, track);
    let targets = Activation::from_device_tensors(&inputs.targets, &autodiff);
    let pass = match work.kind {
        ShardTaskKind::Evaluate => Pass::evaluate(targets),
        ShardTaskKind::Forward | ShardTaskKind::Backward => {
            Pass::train(work.key, targets).with_statistic(work.statistic)
        }
    };
    let x = Activation::from_device_tensors(inputs.activation.as_deref().unwrap_or_default(), &autodiff);
    if track {
        return backward(device, chain, work, promoted, layers, x, &pass);
    }
    let y = forward_range(&layers, work.layers.start, x, &pass);
    let (output, measured) = match work.last {
        true => (Output::None, Some(Measured::from_output(y))),
        false => {
            let parts = y.into_parts().into_iter().map(|part| promoted.apart(part)).collect();
            (Output::Activation(parts), None)
        }
    };
    Computed { output, gradients: Vec::new(), measured }
}

impl Promoted {
    /// Returns the tensor in its own memory: an output must not view the promoted copy. A tensor that a layer passed
    /// on is copied, except host inputs, which stay alive while they are viewed.
    fn apart(&self, tensor: AnyTensor) -> DeviceTensor {
        let tensor = tensor.into_device_tensor();
        let mut inputs = self.inputs.tensors().filter(|input| input.bytes.as_host().is_none());
        let promoted =
            self.resident.holds(&tensor.bytes) || inputs.any(|input| input.bytes.overlaps(&tensor.bytes));
        if promoted { tensor.copied() } else { tensor }
    }
}

fn backward(
    device: &LogicalDevice,
    chain: &Chain,
    work: &ShardWork,
    promoted: &Promoted,
    layers: Vec<Box<dyn Layer>>,
    x: Activation,
    pass: &Pass,
) -> Computed {
    let upstream = promoted.inputs.upstream.iter().flatten();
    let from = match work.last {
        true => BackwardFrom::Loss { weight: work.weight },
        false => {
            BackwardFrom::Gradient(upstream.map(|g| g.as_ref().map(|g| g.to_device(&device.burn))).collect())
        }
    };
    let done = backward_range(layers, work.layers.start, x, from, pass, work.input_gradients);
    let apart = |gradients: Vec<Option<AnyTensor>>| -> Gradient<DeviceTensor> {
        gradients.into_iter().map(|g| g.map(|g| promoted.apart(g))).collect()
    };
    let ShardBackward { loss, inputs, layers } = done;
    let output = match work.input_gradients {
        true => Output::Gradient(apart(inputs)),
        false => Output::None,
    };
    let trained = |index: &usize| !chain.layers()[*index].frozen && !chain.layers()[*index].params.is_empty();
    let gradients = work.layers.clone().zip(layers).filter(|(index, _)| trained(index));
    let measured = loss.map(Measured::of_loss);
    Computed { output, gradients: gradients.map(|(i, of)| (i, apart(of))).collect(), measured }
}
