//! Running a contiguous range of layers: forward without a graph, or recomputed forward and backward.
//!
//! The pilot pass and the executor both run shards through these functions, so what is measured is what is
//! run. Everything runs on the *autodiff* device, tracked or not: Burn's plain device fuses some ops that
//! its autodiff device decomposes, and the two differ in the last bits.

use crate::layer::scale;
use crate::{Activation, AnyTensor, Chain, DeviceBytes, Layer, Pass, vector_jacobian};
use burn::tensor::{DType, Device, Gradients, Tensor};
use std::ops::Range;

/// What a backward pass starts from.
#[derive(Clone, Debug)]
pub enum BackwardFrom {
    /// The range ends in the loss: start from this share of it (one for a whole minibatch, a microbatch's
    /// part of the minibatch's terms otherwise).
    Loss {
        /// The factor on the loss before its gradient is taken.
        weight: f64,
    },
    /// The gradient of each tensor of the range's output, from downstream.
    Gradient(Vec<Option<AnyTensor>>),
}

/// The gradients of one layer's parameters, in the layer's order.
pub type LayerGradients = Vec<Option<AnyTensor>>;

/// What the backward pass of a shard gives.
#[derive(Debug)]
pub struct ShardBackward {
    /// The mean loss of the microbatch, before any weight, where the range ends in the loss.
    pub loss: Option<f32>,
    /// The gradient of each tensor of the input; empty if none was asked for.
    pub inputs: Vec<Option<AnyTensor>>,
    /// The gradients of each layer's parameters.
    pub layers: Vec<LayerGradients>,
}

impl ShardBackward {
    /// Checks that the device computed all of it, which a CPU that returned did.
    ///
    /// # Panics
    /// With a [`DeviceError`](crate::DeviceError) if it did not.
    pub fn assert_computed(&self) {
        #[cfg(feature = "cube")]
        crate::cube::assert_computed(self.inputs.iter().chain(self.layers.iter().flatten()).flatten());
    }
}

/// Resident copies of the layers in `range`, their parameters views of what `image` gives. With `track`,
/// trained layers gather gradients. `device` is the plain device; the copies are on its autodiff device.
pub fn promote_layers(
    chain: &Chain,
    range: Range<usize>,
    image: &dyn Fn(usize) -> DeviceBytes,
    device: &Device,
    track: bool,
) -> Vec<Box<dyn Layer>> {
    let device = device.clone().autodiff();
    range
        .map(|index| {
            let layer = &chain.layers()[index];
            layer.layer().promote(&chain.layer_params(index, image), &device, track && !layer.frozen)
        })
        .collect()
}

/// The output of `layers`, of which the first has index `first` in the chain, without a graph: neither the
/// layers nor `x`, which is on the autodiff device, may be tracked.
pub fn forward_range(layers: &[Box<dyn Layer>], first: usize, x: Activation, pass: &Pass) -> Activation {
    let y = run(layers, first, x, pass);
    forget_untracked(&y);
    y
}

fn forget_untracked(y: &Activation) {
    let device = y.parts().iter().find_map(AnyTensor::float_device);
    if let Some(device) = device.filter(Device::is_autodiff) {
        forget_graphs(&device);
    }
}

/// Clears graphs that no tensor belongs to any more, on any device.
///
/// Burn notes every tensor of the autodiff device, tracked or not, in a table of graphs, and clears what is
/// gone from it in a backward pass only: half a kilobyte an op would stay behind in a long evaluation, and
/// all that a forward saved where a layer panicked. So a backward pass of nothing follows what has none.
/// Two do, because Burn passes over a graph that another thread looks at in the same moment, and the input of
/// a forward would then stay in memory until somebody's next pass.
pub fn forget_graphs(device: &Device) {
    for _ in 0..2 {
        let one = Tensor::<1>::ones([1], &device.clone().autodiff()).require_grad();
        drop(one.mul_scalar(1.0).backward());
    }
}

fn run(layers: &[Box<dyn Layer>], first: usize, x: Activation, pass: &Pass) -> Activation {
    layers.iter().enumerate().fold(x, |x, (i, layer)| layer.forward(x, &pass.for_layer(first + i)))
}

/// Recomputes the forward of tracked `layers` and runs their backward.
///
/// With `input_gradients`, the float tensors of `x` become leaves and their gradients are returned; the
/// first trained shard needs none.
///
/// # Panics
/// If a layer does, or if the last layer does not return a loss of one element where one is needed.
pub fn backward_range(
    layers: Vec<Box<dyn Layer>>,
    first: usize,
    x: Activation,
    from: BackwardFrom,
    pass: &Pass,
    input_gradients: bool,
) -> ShardBackward {
    let x = if input_gradients { x.into_leaves() } else { x };
    let y = run(&layers, first, x.clone(), pass);
    let (loss, gradients) = match from {
        BackwardFrom::Loss { weight } => from_loss(y, weight),
        BackwardFrom::Gradient(upstream) => {
            (None, vector_jacobian(y.into_parts().into_iter().zip(upstream).collect()))
        }
    };
    let Some(mut gradients) = gradients else {
        let none = |layer: &dyn Layer| layer.params().iter().map(|_| None).collect();
        let inputs = if input_gradients { x.parts().iter().map(|_| None).collect() } else { Vec::new() };
        let gradients = layers.iter().map(|layer| none(layer.as_ref())).collect();
        let device = x.parts().iter().find_map(AnyTensor::float_device);
        drop((x, layers));
        device.filter(Device::is_autodiff).iter().for_each(forget_graphs);
        return ShardBackward { loss, inputs, layers: gradients };
    };
    let take = |part: &AnyTensor, gradients: &mut Gradients| part.take_gradient(gradients);
    let inputs = match input_gradients {
        true => x.parts().iter().map(|part| take(part, &mut gradients)).collect(),
        false => Vec::new(),
    };
    drop(x);
    let layers = layers.into_iter().map(|layer| layer.take_gradients(&mut gradients)).collect();
    ShardBackward { loss, inputs, layers }
}

fn from_loss(y: Activation, weight: f64) -> (Option<f32>, Option<Gradients>) {
    let found = y.parts().len();
    assert!(
        found == 1,
        "expected a loss alone from the last layer in a pass that trains, found {found} tensors"
    );
    let loss = y.into_float::<1>();
    let value = loss_value(&loss);
    let weighted = scale(loss.into(), weight).into_float::<1>();
    let gradients = weighted.is_tracked().then(|| weighted.backward());
    (Some(value), gradients)
}

/// The number in what the last layer returned.
///
/// # Panics
/// If that is not one `f32` of shape `[1]`.
pub fn loss_value(loss: &Tensor<1>) -> f32 {
    number(loss.clone().into(), "a loss")
}

/// What the last layer of a chain found in a pass that evaluates: means over the terms of the batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The loss.
    pub loss: f32,
    /// The chain's metrics, in the order of [`Chain::metrics`].
    pub metrics: Vec<f32>,
}

impl Measured {
    /// From what the last layer of `chain` returned in a pass that evaluates. More than the chain has names for is left
    /// out.
    ///
    /// # Panics
    /// If that is not a loss and the chain's metrics, each one `f32` of shape `[1]`.
    pub fn of(chain: &Chain, y: Activation) -> Self {
        let (names, found) = (chain.metrics(), y.parts().len());
        let mut parts = y.into_parts().into_iter();
        let Some(loss) = parts.next().filter(|_| found > names.len()) else {
            panic!(
                "expected a loss and {} metrics {names:?} from the last layer in a pass that evaluates, found {found} tensors",
                names.len(),
            );
        };
        let metrics = parts.zip(names).map(|(part, name)| number(part, &format!("a metric `{name}`")));
        Self { loss: number(loss, "a loss"), metrics: metrics.collect() }
    }
}

fn number(value: AnyTensor, what: &str) -> f32 {
    let value = value.into_host();
    let (dtype, shape) = (value.dtype, &value.shape);
    assert!(
        dtype == DType::F32 && shape[..] == [1],
        "expected {what} of F32 and of shape [1] from the last layer, found {dtype:?} and {shape:?}"
    );
    value.as_f32()[0]
}
