//! Running one shard task on a device's threads.

use crate::device::{LogicalDevice, panic_message};
use crate::error::EngineError;
use crate::event::{Computed, HostGradient, Output};
use hydra_core::{
    Activation, AnyTensor, BackwardFrom, Chain, HostActivation, HostTensor, Key, Layer, Pass, ShardBackward,
    backward_range, forget_graphs, forward_range, promote_layers,
};
use hydra_sched::ShardTaskKind;
use hydra_spill::{Resident, alloc};
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

/// The bytes of a shard task, all in device memory.
pub(crate) struct ShardInputs {
    pub resident: Resident,
    pub activation: HostActivation,
    pub targets: HostActivation,
    /// The gradient of the output, for a backward that does not start at the loss.
    pub upstream: HostGradient,
}

/// Runs a shard task, on a thread of the device's pool; a panic in a layer becomes an error.
pub(crate) fn run(
    device: &LogicalDevice,
    chain: &Chain,
    work: &ShardWork,
    inputs: ShardInputs,
) -> Result<Computed, EngineError> {
    let run = || match work.kind {
        ShardTaskKind::Forward | ShardTaskKind::Evaluate => forward(device, chain, work, inputs),
        ShardTaskKind::Backward => backward(device, chain, work, inputs),
    };
    let tag = Some(device.measured_as());
    let result = catch_unwind(AssertUnwindSafe(|| alloc::with_tag(tag, run)));
    if result.is_err() {
        // What the forward saved has no backward to free it.
        alloc::with_tag(tag, || forget_graphs(&device.burn));
    }
    result.map_err(|panic| EngineError::Layer {
        first: work.layers.start,
        end: work.layers.end,
        work: match work.kind {
            ShardTaskKind::Forward => "the forward",
            ShardTaskKind::Backward => "the backward",
            ShardTaskKind::Evaluate => "the evaluation",
        },
        step: work.step,
        message: panic_message(panic.as_ref()),
    })
}

fn layers(
    device: &LogicalDevice,
    chain: &Chain,
    work: &ShardWork,
    resident: &Resident,
) -> Vec<Box<dyn Layer>> {
    let track = work.kind == ShardTaskKind::Backward;
    promote_layers(chain, work.layers.clone(), &|image| resident.image(image), &device.burn, track)
}

fn pass(device: &LogicalDevice, work: &ShardWork, targets: &HostActivation) -> Pass {
    let targets = targets.to_device(&device.burn.clone().autodiff());
    match work.kind {
        ShardTaskKind::Evaluate => Pass::evaluate(targets),
        ShardTaskKind::Forward | ShardTaskKind::Backward => Pass::train(work.key, targets),
    }
}

fn forward(device: &LogicalDevice, chain: &Chain, work: &ShardWork, inputs: ShardInputs) -> Computed {
    let layers = layers(device, chain, work, &inputs.resident);
    let pass = pass(device, work, &inputs.targets);
    let x = inputs.activation.to_device(&device.burn.clone().autodiff());
    let y = forward_range(&layers, work.layers.start, x, &pass);
    if work.last {
        return Computed { output: Output::None, gradients: Vec::new(), loss: Some(loss(y)) };
    }
    let parts = y.into_host().parts.into_iter().map(|part| apart(part, &inputs.resident)).collect();
    Computed { output: Output::Activation(HostActivation { parts }), gradients: Vec::new(), loss: None }
}

/// What outlives a shard task is no view of its parameters: one that a layer passed on is copied.
fn apart(tensor: HostTensor, resident: &Resident) -> HostTensor {
    match tensor.is_float() && resident.holds(&tensor.bytes) {
        true => HostTensor::float(tensor.as_f32().to_vec(), tensor.shape),
        false => tensor,
    }
}

fn loss(y: Activation) -> f32 {
    let value = AnyTensor::from(y.into_float::<1>()).into_host();
    let elements = value.as_f32();
    assert!(elements.len() == 1, "expected a loss of shape [1] from the last layer, found {:?}", value.shape);
    elements[0]
}

fn backward(device: &LogicalDevice, chain: &Chain, work: &ShardWork, inputs: ShardInputs) -> Computed {
    let layers = layers(device, chain, work, &inputs.resident);
    let pass = pass(device, work, &inputs.targets);
    let autodiff = device.burn.clone().autodiff();
    let x = inputs.activation.to_device(&autodiff);
    let from = match work.last {
        true => BackwardFrom::Loss { weight: work.weight },
        false => BackwardFrom::Gradient(
            inputs.upstream.iter().map(|g| g.as_ref().map(|g| g.to_device(&device.burn))).collect(),
        ),
    };
    // The resident copy stays until the end: its reservation covers the parameters that the layers view.
    let ShardInputs { resident, .. } = inputs;
    let done = backward_range(layers, work.layers.start, x, from, &pass, work.input_gradients);
    let ShardBackward { loss, inputs, layers } = done;
    let host = |g: Option<AnyTensor>| g.map(|g| apart(g.into_host(), &resident));
    let output = match work.input_gradients {
        true => Output::Gradient(inputs.into_iter().map(host).collect()),
        false => Output::None,
    };
    let trained = |index: &usize| !chain.layers()[*index].frozen && !chain.layers()[*index].params.is_empty();
    let gradients = work.layers.clone().zip(layers).filter(|(index, _)| trained(index));
    let gradients =
        gradients.map(|(i, grads)| (i, grads.into_iter().map(host).collect::<Vec<Option<HostTensor>>>()));
    let gradients = gradients.collect();
    drop(resident);
    Computed { output, gradients, loss }
}
