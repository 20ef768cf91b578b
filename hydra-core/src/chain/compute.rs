//! Runs a contiguous range of layers: forward without a graph, or recomputed forward and backward.
//!
//! The pilot pass and the executor both run shards through these functions, so measurements match execution.
//! Everything runs on the *autodiff* device, tracked or not: Burn's plain device fuses some ops that its
//! autodiff device decomposes, and the results differ in the last bits.

use crate::{Activation, AnyTensor, Chain, DeviceBytes, DeviceTensor, Layer, Pass, vector_jacobian};
use burn::tensor::{DType, Device, Gradients, Tensor};
use std::ops::Range;

/// The start of a backward pass.
#[derive(Clone, Debug)]
pub enum BackwardFrom {
    /// The range ends in the loss. The backward pass starts from this factor on it: one for a whole
    /// minibatch, otherwise the microbatch's share of the minibatch's loss targets.
    Loss {
        /// The factor on the loss before its gradient is taken.
        weight: f64,
    },
    /// The gradient of each output tensor of the range, from the next shard.
    Gradient(Vec<Option<AnyTensor>>),
}

/// The gradients of one layer's parameters, in the layer's order; `None` for frozen parameters and for those
/// that do not affect the loss.
pub type LayerGradients = Vec<Option<AnyTensor>>;

/// The result of a shard's backward pass.
#[derive(Debug)]
pub struct ShardBackward {
    /// The mean loss of the microbatch, before weighting, if the range ends in the loss.
    pub loss: Option<f32>,
    /// The gradient of each input tensor; empty if none was requested.
    pub inputs: Vec<Option<AnyTensor>>,
    /// The gradients of each layer's parameters.
    pub layers: Vec<LayerGradients>,
}

impl ShardBackward {
    /// Returns all gradients, each in memory of its own in row-major order. A gradient that is a view, such as a
    /// transpose, is copied there, which takes its size once more until the view is freed.
    pub fn into_device_tensors(self) -> Vec<DeviceTensor> {
        let gradients = self.inputs.into_iter().chain(self.layers.into_iter().flatten()).flatten();
        gradients.map(AnyTensor::into_device_tensor).collect()
    }
}

/// Returns materialized copies of the layers in `range`, whose parameters are views of the bytes that
/// `buffer` returns. With `track`, trained parameters collect gradients. `device` is the plain device; the
/// copies are on its autodiff device.
///
/// # Panics
/// If the range reaches beyond the layers, or a buffer is shorter than its layout.
pub fn promote_layers(
    chain: &Chain,
    range: Range<usize>,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    device: &Device,
    track: bool,
) -> Vec<Box<dyn Layer>> {
    let device = device.clone().autodiff();
    range
        .map(|index| {
            let tracked: Vec<bool> = chain.trained_params(index).map(|trained| track && trained).collect();
            let params = chain.layer_params(index, buffer, &device);
            chain.layers()[index].layer().promote(&params, &device, &tracked)
        })
        .collect()
}

/// Computes the output of `layers` without a graph. The first of them has index `first` in the chain. Neither
/// the layers nor `x`, which is on the autodiff device, may be tracked.
pub fn forward_range(layers: &[Box<dyn Layer>], first: usize, x: Activation, pass: &Pass) -> Activation {
    let y = run(layers, first, x, pass);
    autodiff_device(&y).iter().for_each(forget_graphs);
    y
}

fn autodiff_device(x: &Activation) -> Option<Device> {
    x.parts().iter().find_map(AnyTensor::float_device).filter(Device::is_autodiff)
}

/// Clears graphs that no tensor belongs to any more, on any device.
///
/// Burn records every tensor of the autodiff device, tracked or not, in a table of graphs, and removes dead
/// entries only in a backward pass. Without this, a long evaluation would leak half a kilobyte per op, and a
/// layer that panics would leak everything that its forward saved. Therefore an empty backward pass follows
/// every pass without one. It is run twice, because Burn skips a graph that another thread is looking at in
/// the same moment, and the input of a forward would then stay in memory until the next pass of any thread.
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
/// With `input_gradients`, the float tensors of `x` become leaves and their gradients are returned; the first
/// trained shard needs none.
///
/// # Panics
/// If a layer panics, or if the last layer does not return a loss of one element where one is required.
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
        let inputs = if input_gradients { vec![None; x.parts().len()] } else { Vec::new() };
        let gradients = layers.iter().map(|layer| vec![None; layer.params().len()]).collect();
        let device = autodiff_device(&x);
        drop((x, layers));
        device.iter().for_each(forget_graphs);
        return ShardBackward { loss, inputs, layers: gradients };
    };
    let inputs = match input_gradients {
        true => x.parts().iter().map(|part| part.take_gradient(&mut gradients)).collect(),
        false => Vec::new(),
    };
    drop(x);
    let layers = layers.into_iter().map(|layer| layer.take_gradients(&mut gradients)).collect();
    ShardBackward { loss, inputs, layers }
}

fn from_loss(y: Activation, weight: f64) -> (Option<f32>, Option<Gradients>) {
    let loss = y.into_float::<1>();
    let value = loss_value(&loss);
    let weighted = if weight == 1.0 { loss } else { loss.mul_scalar(weight as f32) };
    let gradients = weighted.is_tracked().then(|| weighted.backward());
    (Some(value), gradients)
}

/// Returns the number in the last layer's output.
///
/// # Panics
/// If it is not one `f32` of shape `[1]`.
pub fn loss_value(loss: &Tensor<1>) -> f32 {
    number(loss.clone().into(), "a loss")
}

/// The output of a chain's last layer for a batch in an evaluation pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The loss, a mean over the batch's loss targets.
    pub loss: f32,
    /// The sums of the objective's [`Measures`](crate::Measures).
    pub sums: Vec<f32>,
    /// The rows of the objective's measures, one item after the other.
    pub rows: Vec<f32>,
}

impl Measured {
    /// Reads the output of a chain's last layer in an evaluation pass.
    ///
    /// # Panics
    /// If it is not a loss, one `F32` of shape `[1]`, with `F32` measures.
    pub fn from_output(y: Activation) -> Self {
        let mut parts = y.into_parts().into_iter();
        let loss =
            parts.next().unwrap_or_else(|| panic!("expected a loss from the last layer, found nothing"));
        let (sums, rows) = parts.partition::<Vec<_>, _>(|part| part.rank() == 1);
        let figures = |parts: Vec<AnyTensor>| parts.into_iter().flat_map(figures).collect();
        Self { loss: number(loss, "a loss"), sums: figures(sums), rows: figures(rows) }
    }

    /// The loss of a training pass.
    pub fn of_loss(loss: f32) -> Self {
        Self { loss, sums: Vec::new(), rows: Vec::new() }
    }
}

fn figures(part: AnyTensor) -> Vec<f32> {
    let part = part.into_host();
    assert!(part.dtype == DType::F32, "expected measures of F32 from the objective, found {:?}", part.dtype);
    part.as_f32().to_vec()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Forward, HostTensor};
    use burn::module::{Module, Param};
    use burn::nn::{Linear, LinearConfig};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[derive(Module, Debug)]
    struct Dense {
        linear: Linear,
    }

    impl Forward for Dense {
        fn forward(&self, x: Activation, pass: &Pass) -> Activation {
            Activation::of(pass.site(0).dropout(self.linear.forward(x.into_float::<2>()), 0.5))
        }
    }

    /// A frozen map plus a trained one.
    #[derive(Module, Debug)]
    struct Adapted {
        base: Linear,
        adapter: Linear,
    }

    impl Forward for Adapted {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            let x = x.into_float::<2>();
            Activation::of((self.base.forward(x.clone()) + self.adapter.forward(x)).tanh())
        }
    }

    #[derive(Module, Debug)]
    struct Mean {
        #[module(skip)]
        loss_targets: usize,
    }

    impl Forward for Mean {
        fn forward(&self, x: Activation, pass: &Pass) -> Activation {
            let loss = Activation::of(x.into_float::<2>().mean());
            if pass.is_training() {
                loss
            } else {
                (0..self.loss_targets).fold(loss, |y, _| y.and(Tensor::<1>::ones([1], &device())))
            }
        }
    }

    /// A layer that adds a tensor that passes through: at the end of its graph, or scaled at its start.
    #[derive(Module, Debug)]
    struct Rider {
        linear: Linear,
        scaled: bool,
    }

    impl Forward for Rider {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            let rides = x.part(1).into_float::<2>();
            let added = if self.scaled { rides.clone() * 0.3 } else { rides.clone() };
            let hidden = self.linear.forward(x.part(0).into_float::<2>());
            Activation::of((hidden + added).sin()).and(rides)
        }
    }

    #[derive(Module, Debug)]
    struct First {
        #[module(skip)]
        unused: usize,
    }

    impl Forward for First {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            Activation::of(x.part(0).into_float::<2>().mean())
        }
    }

    fn device() -> Device {
        Device::flex()
    }

    /// A frozen layer, two trained ones, and a mean.
    fn chain() -> Chain {
        let dense = || Dense { linear: LinearConfig::new(4, 4).init(&device()) };
        let builder = Chain::builder("c").frozen("a", dense()).layer("b", dense()).layer("c", dense());
        builder.layer("mean", Mean { loss_targets: 2 }).metrics(["one", "other"]).build().unwrap()
    }

    fn promoted(chain: &Chain, range: Range<usize>, track: bool) -> Vec<Box<dyn Layer>> {
        let buffer = |buffer: usize| {
            let mut values = vec![0.0; chain.buffers()[buffer].elements];
            chain.source().fill(chain, buffer, 1, &mut values).unwrap();
            let elements = values.len();
            DeviceBytes::from(HostTensor::float(values, [elements]).bytes)
        };
        promote_layers(chain, range, &buffer, &device(), track)
    }

    fn input() -> Activation {
        let x = HostTensor::float((0..32).map(|i| i as f32).collect(), [8, 4]);
        Activation::of(x.to_device(&device().autodiff()))
    }

    fn host(gradients: &LayerGradients) -> Vec<Vec<f32>> {
        let host = |gradient: &Option<AnyTensor>| gradient.clone().unwrap().into_host().as_f32().to_vec();
        gradients.iter().map(host).collect()
    }

    #[test]
    fn a_range_computes_what_the_whole_chain_does() {
        let (chain, pass) = (chain(), Pass::train(Pass::key_of(1, 2, 3), Activation::default()));
        let forward = |range: Range<usize>, x| {
            forward_range(&promoted(&chain, range.clone(), false), range.start, x, &pass)
        };
        let back = |range: Range<usize>, x, from, inputs| {
            backward_range(promoted(&chain, range.clone(), true), range.start, x, from, &pass, inputs)
        };
        let from_loss = |weight| BackwardFrom::Loss { weight };
        let whole = back(0..4, input(), from_loss(1.0), false);
        assert!(whole.inputs.is_empty() && whole.layers[0].iter().all(Option::is_none), "frozen");
        assert_eq!(whole.loss, Some(loss_value(&forward(0..4, input()).into_float())));

        let x = forward(0..2, input());
        let late = back(2..4, x.clone(), from_loss(1.0), true);
        assert_eq!((late.loss, host(&late.layers[0])), (whole.loss, host(&whole.layers[2])));
        let early = back(0..2, input(), BackwardFrom::Gradient(late.inputs), false);
        assert_eq!((early.loss, host(&early.layers[1])), (None, host(&whole.layers[1])));

        let half = back(2..4, x, from_loss(0.5), false);
        let halved: Vec<f32> = host(&late.layers[0])[1].iter().map(|g| g * 0.5).collect();
        assert_eq!(
            (half.loss, &host(&half.layers[0])[1]),
            (whole.loss, &halved),
            "the loss is that before its weight"
        );
    }

    /// A linear map that holds values that do not depend on the buffer layout.
    fn held(from: f32) -> Linear {
        let values = |count: usize| (0..count).map(|i| (from + i as f32).sin()).collect();
        let tensor = |values, shape: &[usize]| HostTensor::float(values, shape.to_vec()).to_device(&device());
        Linear {
            weight: Param::from_tensor(tensor(values(16), &[4, 4]).into_float()),
            bias: Some(Param::from_tensor(tensor(values(4), &[4]).into_float())),
        }
    }

    /// Gradients of the whole chain, or of the chain cut before each layer.
    fn gradients(chain: &Chain, cut: bool) -> Vec<LayerGradients> {
        let pass = Pass::train(Pass::key_of(1, 2, 3), Activation::default());
        let ends = if cut { (1..=chain.len()).collect() } else { vec![chain.len()] };
        let starts = [0].into_iter().chain(ends.iter().copied());
        let shards: Vec<Range<usize>> = starts.zip(&ends).map(|(start, end)| start..*end).collect();
        let back = |(from, mut layers): (BackwardFrom, Vec<LayerGradients>), range: &Range<usize>| {
            let before = promoted(chain, 0..range.start, false);
            let x = forward_range(&before, 0, input(), &pass);
            let shard = promoted(chain, range.clone(), true);
            let wanted = range.start > chain.first_trained();
            let done = backward_range(shard, range.start, x, from, &pass, wanted);
            layers.splice(0..0, done.layers);
            (BackwardFrom::Gradient(done.inputs), layers)
        };
        let from_loss = (BackwardFrom::Loss { weight: 1.0 }, Vec::new());
        let down = shards.iter().rev().take_while(|range| range.end > chain.first_trained());
        down.fold(from_loss, back).1
    }

    #[test]
    fn what_is_trained_of_a_layer_has_the_gradients_that_it_has_where_all_is() {
        let [first, base, adapter] = [0.1, 0.2, 0.3].map(|from| [from, from + 1.0].map(held));
        let chain = |freeze: fn(Linear) -> Linear| {
            let adapted =
                |at: usize| Adapted { base: freeze(base[at].clone()), adapter: adapter[at].clone() };
            let builder = Chain::builder("c").layer("a", Dense { linear: freeze(first[0].clone()) });
            let builder = builder.layer("b", adapted(0)).layer("c", adapted(1));
            builder.layer("mean", Mean { loss_targets: 0 }).build().unwrap()
        };
        let (whole, part) = (chain(|linear| linear), chain(Module::no_grad));
        assert_eq!((whole.buffers().len(), part.buffers().len(), part.first_trained()), (3, 5, 1));
        let (all, trained) = (gradients(&whole, false), gradients(&part, false));
        for cut in [gradients(&part, true), trained.clone()] {
            let last = cut.len() - 3;
            for (layer, found) in [1, 2].into_iter().zip(&cut[last..]) {
                assert!(found[..2].iter().all(Option::is_none), "the base of layer {layer}");
                let adapter = |of: &LayerGradients| host(&of[2..].to_vec());
                assert_eq!(adapter(found), adapter(&all[layer]), "the adapter of layer {layer}");
            }
        }
    }

    #[test]
    fn gradients_of_what_rides_along_add_up_in_one_order_however_a_chain_is_cut() {
        // Burn adds gradients in the order of depth; parts that start at the same depth come last.
        let rider = |scaled| Rider { linear: LinearConfig::new(4, 4).init(&device()), scaled };
        let builder = (0..4).fold(Chain::builder("c"), |b, k| b.layer(format!("{k}"), rider(k > 1)));
        let chain = builder.layer("loss", First { unused: 0 }).build().unwrap();
        let pass = Pass::train(Pass::key_of(1, 2, 3), Activation::default());
        let x = || input().and(input().into_parts().remove(0));
        let back = |range: Range<usize>, from| {
            let layers = promoted(&chain, 0..range.start, false);
            let x = forward_range(&layers, 0, x(), &pass);
            backward_range(promoted(&chain, range.clone(), true), range.start, x, from, &pass, true).inputs
        };
        let loss = || BackwardFrom::Loss { weight: 1.0 };
        let whole = host(&back(0..5, loss()));
        for cuts in [vec![1], vec![2], vec![3], vec![1, 3], vec![1, 2, 3, 4]] {
            let ends = cuts.iter().copied().chain([5]);
            let shards: Vec<Range<usize>> =
                [0].into_iter().chain(cuts.clone()).zip(ends).map(|(a, b)| a..b).collect();
            let inputs = shards.into_iter().rev().fold(None, |from: Option<LayerGradients>, range| {
                Some(back(range, from.map_or_else(loss, BackwardFrom::Gradient)))
            });
            assert_eq!(host(&inputs.unwrap()), whole, "{cuts:?}");
        }
    }

    #[test]
    fn layers_that_no_gradient_reaches_have_none() {
        let (chain, pass) = (chain(), Pass::train(Pass::key_of(1, 2, 3), Activation::default()));
        let nothing = BackwardFrom::Gradient(vec![None]);
        let none = backward_range(promoted(&chain, 0..2, true), 0, input(), nothing, &pass, true);
        assert_eq!((none.loss, none.inputs.len(), none.layers.len()), (None, 1, 2));
        assert!(none.layers.iter().chain([&none.inputs]).flatten().all(Option::is_none));
    }

    #[test]
    fn what_is_no_loss_or_lacks_a_metric_is_told() {
        let chain = chain();
        let pass = Pass::evaluate(Activation::default());
        let y = forward_range(&promoted(&chain, 0..4, false), 0, input(), &pass);
        assert_eq!(Measured::from_output(y).sums, [1.0, 1.0]);
        let ones = |length| Tensor::<1>::ones([length], &device());
        let (loss, objective) = (Activation::of(ones(1)), chain.objective());
        let more = objective.measure(&loss.clone().and(ones(1)).and(ones(1)).and(ones(1)), &pass);
        assert_eq!(more.sums.unwrap().dims(), [2], "unnamed tensors are ignored");
        let says = |run: &dyn Fn()| {
            let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
            crate::panic_message(panic.as_ref())
        };
        let fewer = says(&|| drop(objective.loss(&loss.clone().and(ones(1)), &pass)));
        assert!(fewer.contains("a loss and 2 metrics [\"one\", \"other\"] from the last layer"), "{fewer}");
        let wide = says(&|| drop(objective.measure(&loss.clone().and(ones(2)).and(ones(1)), &pass)));
        assert!(wide.contains("expected a metric `one` of F32 and of shape [1]"), "{wide}");
    }
}
