//! Running one shard task on a device's threads.

use super::LogicalDevice;
use crate::error::EngineError;
use crate::protocol::{Computed, Gradient, Output};
use hydra_core::{
    Activation, AnyTensor, BackwardFrom, Chain, DeviceTensor, Key, Layer, Measured, Pass, ShardBackward,
    backward_range, finish, forget_graphs, forward_range, panic_message, promote_layers,
};
use hydra_sched::ShardTaskKind;
use hydra_spill::{ResidentCopy, alloc};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a shard task is, beside its bytes.
#[derive(Clone, Debug)]
pub(crate) struct ShardWork {
    pub layers: Range<usize>,
    pub kind: ShardTaskKind,
    /// Whether the shard ends in the loss.
    pub last: bool,
    /// Whether an earlier shard needs the gradient of the input.
    pub input_gradients: bool,
    /// The microbatch's share of the minibatch's loss terms.
    pub weight: f64,
    /// The key of a training pass.
    pub key: Key,
    /// The minibatch, for messages.
    pub step: usize,
}

/// What a shard task reads, all in device memory. It is kept until the device has finished the shard task.
pub(crate) struct ShardInputs {
    pub resident: ResidentCopy,
    pub activation: Vec<DeviceTensor>,
    pub targets: Vec<DeviceTensor>,
    /// The gradient of the output, for a backward that does not start at the loss.
    pub upstream: Gradient<DeviceTensor>,
}

/// Runs a shard task, on a thread of the device's pool, until the device has finished it; a panic in a layer
/// becomes an error.
pub(crate) fn run(
    device: &LogicalDevice,
    chain: &Chain,
    work: &ShardWork,
    inputs: ShardInputs,
) -> Result<Computed, EngineError> {
    let run = || {
        let computed = match work.kind {
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => forward(device, chain, work, &inputs),
            ShardTaskKind::Backward => backward(device, chain, work, &inputs),
        };
        finish(&device.burn, &computed.made()).map(|()| computed)
    };
    let tag = Some(device.measured_as());
    let result = catch_unwind(AssertUnwindSafe(|| alloc::with_tag(tag, run)));
    if result.is_err() {
        alloc::with_tag(tag, || {
            // What the forward saved has no backward to free it.
            forget_graphs(&device.burn);
            // What was promoted is let go of below; nothing of the device may read it any more. If the device
            // cannot even wait, the panic's message says more.
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
            // With the forward that is computed again.
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

fn layers(
    device: &LogicalDevice,
    chain: &Chain,
    work: &ShardWork,
    resident: &ResidentCopy,
) -> Vec<Box<dyn Layer>> {
    let track = work.kind == ShardTaskKind::Backward;
    promote_layers(chain, work.layers.clone(), &|image| resident.image(image), &device.burn, track)
}

fn pass(device: &LogicalDevice, work: &ShardWork, targets: &[DeviceTensor]) -> Pass {
    let targets = Activation::from_device_tensors(targets, &device.burn.clone().autodiff());
    match work.kind {
        ShardTaskKind::Evaluate => Pass::evaluate(targets),
        ShardTaskKind::Forward | ShardTaskKind::Backward => Pass::train(work.key, targets),
    }
}

fn forward(device: &LogicalDevice, chain: &Chain, work: &ShardWork, inputs: &ShardInputs) -> Computed {
    let layers = layers(device, chain, work, &inputs.resident);
    let pass = pass(device, work, &inputs.targets);
    let x = Activation::from_device_tensors(&inputs.activation, &device.burn.clone().autodiff());
    let y = forward_range(&layers, work.layers.start, x, &pass);
    if work.last {
        return Computed {
            output: Output::None,
            gradients: Vec::new(),
            measured: Some(Measured::of(chain, y)),
        };
    }
    let parts = y.into_parts().into_iter().map(|part| inputs.apart(part)).collect();
    Computed { output: Output::Activation(parts), gradients: Vec::new(), measured: None }
}

impl ShardInputs {
    /// What outlives a shard task is no view of what was promoted for it: a tensor that a layer passed on is
    /// copied, but for inputs on the host, which stay for whoever views them.
    fn apart(&self, tensor: AnyTensor) -> DeviceTensor {
        let tensor = tensor.into_device_tensor();
        let inputs = self.activation.iter().chain(&self.targets).chain(self.upstream.iter().flatten());
        let mut inputs = inputs.filter(|input| input.bytes.as_host().is_none());
        let promoted =
            self.resident.holds(&tensor.bytes) || inputs.any(|input| input.bytes.overlaps(&tensor.bytes));
        if promoted { tensor.copied() } else { tensor }
    }
}

fn backward(device: &LogicalDevice, chain: &Chain, work: &ShardWork, inputs: &ShardInputs) -> Computed {
    let layers = layers(device, chain, work, &inputs.resident);
    let pass = pass(device, work, &inputs.targets);
    let x = Activation::from_device_tensors(&inputs.activation, &device.burn.clone().autodiff());
    let from = match work.last {
        true => BackwardFrom::Loss { weight: work.weight },
        false => BackwardFrom::Gradient(
            inputs.upstream.iter().map(|g| g.as_ref().map(|g| g.to_device(&device.burn))).collect(),
        ),
    };
    let done = backward_range(layers, work.layers.start, x, from, &pass, work.input_gradients);
    let apart = |gradients: Vec<Option<AnyTensor>>| -> Gradient<DeviceTensor> {
        gradients.into_iter().map(|g| g.map(|g| inputs.apart(g))).collect()
    };
    let ShardBackward { loss, inputs, layers } = done;
    let output = match work.input_gradients {
        true => Output::Gradient(apart(inputs)),
        false => Output::None,
    };
    let trained = |index: &usize| !chain.layers()[*index].frozen && !chain.layers()[*index].params.is_empty();
    let gradients = work.layers.clone().zip(layers).filter(|(index, _)| trained(index));
    let measured = loss.map(|loss| Measured { loss, metrics: Vec::new() });
    Computed { output, gradients: gradients.map(|(i, of)| (i, apart(of))).collect(), measured }
}
