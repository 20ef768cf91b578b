//! Models: chains of layers that end in a loss, the execution of layers, and the buffers that hold their
//! parameters.
//!
//! This module may use tensors and devices through their types. It does not depend on datasets, specs or
//! optimizers.

mod buffer;
mod builder;
mod compute;
mod foreign;
mod frozen;
mod graph_depth;
mod initializer;
mod layer;
pub mod nf4;
mod objective;
mod pass;
mod state;
mod vjp;
mod weights;

pub use buffer::*;
pub use builder::ChainBuilder;
pub use compute::*;
pub use foreign::{ForeignBackward, foreign};
pub use initializer::OwnInit;
pub use layer::{CostKey, Declared, Forward, Init, Layer, ParamInfo};
pub use objective::{Measures, Metric, Objective, Statistic, last_layer};
pub use pass::{DropoutMask, Mode, Pass, Site};
pub use state::{State, StateRule};
pub use vjp::vector_jacobian;
pub use weights::*;

use crate::{CoreError, DeviceBytes, DeviceTensor, FloatType};
use burn::tensor::Device;
use std::ops::Range;
use std::sync::Arc;

/// A layer of a chain.
pub struct ChainLayer {
    /// The layer's name, unique within the chain.
    pub name: String,
    /// Its parameters, in the order of [`Layer::params`].
    pub params: Vec<ParamRef>,
    /// Whether all of its parameters keep their initial values.
    pub frozen: bool,
    /// Its type and cost key, if it has one ([`Forward::cost_key`]).
    pub cost_key: Option<CostKey>,
    layer: Box<dyn Layer>,
}

impl ChainLayer {
    /// The uninitialized layer.
    pub fn layer(&self) -> &dyn Layer {
        self.layer.as_ref()
    }
}

/// A model as a sequence of layers, whose outputs an [`Objective`] turns into the loss.
///
/// A chain is uninitialized: layers have names, shapes and code, and the values of their parameters come from
/// the [`WeightSource`] buffer by buffer. It is immutable and shared between threads and tasks.
pub struct Chain {
    name: String,
    description: String,
    objective: Arc<dyn Objective>,
    layers: Vec<ChainLayer>,
    buffers: Vec<ParamBufferLayout>,
    float: FloatType,
    source: Arc<dyn WeightSource>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.layers.iter().map(|l| l.name.as_str()).collect();
        f.debug_struct("Chain").field("name", &self.name).field("layers", &names).finish()
    }
}

impl Chain {
    /// Starts a chain.
    pub fn builder(name: impl Into<String>) -> ChainBuilder {
        ChainBuilder::new(name.into())
    }

    /// Sets the float type on devices; the default is `f32`. Values do not change: what is trained keeps `f32` master
    /// weights, and a frozen buffer is stored in the narrower type alone only if its values are of it
    /// ([`Encoding::Narrow`]).
    pub fn with_float_type(mut self, float: FloatType) -> Self {
        self.float = float;
        self.buffers.iter_mut().for_each(|buffer| buffer.float = float);
        self.encode();
        self
    }

    /// Sets the float type in which frozen buffers are stored and copied to devices, which compute in `f32` and widen their
    /// copies, to the same bits. It applies to buffers whose source has values of this type
    /// ([`WeightSource::float_type`]) and that are not quantized; values that are drawn are rounded to it. Call it after the
    /// parameters to train are chosen, and after [`with_float_type`](Self::with_float_type); chains of a 16-bit type are
    /// unchanged.
    pub fn with_frozen_float_type(mut self, float: FloatType) -> Self {
        if self.float != FloatType::F32 {
            return self;
        }
        for index in 0..self.buffers.len() {
            if self.buffers[index].trained || self.buffers[index].encoding == Encoding::Nf4 {
                continue;
            }
            // A source of drawn values has the type of the buffer.
            self.buffers[index].float = float;
            if self.source.float_type(&self, index) != float {
                self.buffers[index].float = FloatType::F32;
            }
        }
        self.encode();
        self
    }

    /// Sets the encoding of every buffer by its type, its role and its source.
    fn encode(&mut self) {
        let is_narrow = |(index, buffer): (usize, &ParamBufferLayout)| {
            let float = buffer.float;
            float != FloatType::F32 && !buffer.trained && self.source.float_type(self, index) == float
        };
        let narrow: Vec<bool> = self.buffers.iter().enumerate().map(is_narrow).collect();
        let buffers = self.buffers.iter_mut().zip(narrow);
        for (buffer, narrow) in buffers.filter(|(buffer, _)| buffer.encoding != Encoding::Nf4) {
            buffer.encoding = if narrow { Encoding::Narrow } else { Encoding::Masters };
        }
    }

    /// Replaces what the chain is trained for. Its last layer then returns what this objective takes, for the targets of
    /// the datasets that go with it.
    ///
    /// # Errors
    /// Metrics without names of their own.
    pub fn with_objective(self, objective: impl Objective + 'static) -> Result<Self, CoreError> {
        self.map_objective(|_| Arc::new(objective))
    }

    /// Replaces the objective by the one that `map` makes of it, for example to evaluate the chain by other figures.
    ///
    /// # Errors
    /// Metrics without names of their own.
    pub fn map_objective(
        mut self,
        map: impl FnOnce(Arc<dyn Objective>) -> Arc<dyn Objective>,
    ) -> Result<Self, CoreError> {
        let objective = map(Arc::clone(&self.objective));
        builder::check_metrics(&self.name, objective.as_ref())?;
        if let Some(ChainLayer { name, params, frozen, layer, .. }) = self.layers.pop() {
            let layer = layer.with_objective(Arc::clone(&objective));
            self.layers.push(ChainLayer { name, params, frozen, cost_key: layer.cost_key(), layer });
        }
        Ok(Self { objective, ..self })
    }

    /// The float type that the layers see.
    pub fn float_type(&self) -> FloatType {
        self.float
    }

    /// The chain's name, for messages and fingerprints.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the chain is trained for: the loss of its outputs, and the metrics of evaluations.
    pub fn objective(&self) -> &dyn Objective {
        self.objective.as_ref()
    }

    /// The metric of this name: one of the objective's, `loss`, or the `perplexity` of a language model.
    ///
    /// # Errors
    /// The chain's evaluations have no such metric.
    pub fn metric(&self, name: &str) -> Result<Metric, CoreError> {
        let mut metrics = self.objective.metrics();
        metrics.push(Metric::lower("loss"));
        metrics.extend(self.objective.is_language_model().then(|| Metric::lower("perplexity")));
        let names = || metrics.iter().map(|metric| metric.name.as_str()).collect::<Vec<_>>().join(", ");
        metrics.iter().find(|metric| metric.name == name).cloned().ok_or_else(|| CoreError::NoSuchMetric {
            chain: self.name.clone(),
            metric: name.to_owned(),
            expected: names(),
        })
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// The first layer that reads the targets: the last one, unless an earlier one does
    /// ([`Forward::reads_targets`]).
    pub fn targets_from(&self) -> usize {
        let first = self.layers.iter().position(|layer| layer.layer().reads_targets());
        first.unwrap_or_else(|| self.len().saturating_sub(1))
    }

    /// Always false: a chain has at least the layer that returns the loss.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layers.
    pub fn layers(&self) -> &[ChainLayer] {
        &self.layers
    }

    /// The buffers, in the order of their first use in the chain.
    pub fn buffers(&self) -> &[ParamBufferLayout] {
        &self.buffers
    }

    /// The source of the initial values.
    pub fn source(&self) -> &dyn WeightSource {
        self.source.as_ref()
    }

    /// The buffers that these layers use, ascending and without duplicates.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn buffers_of(&self, layers: Range<usize>) -> Vec<usize> {
        let mut buffers: Vec<usize> =
            self.layers[layers].iter().flat_map(|l| l.params.iter().map(|p| p.buffer)).collect();
        buffers.sort_unstable();
        buffers.dedup();
        buffers
    }

    /// The bytes of the buffers that these layers use, which promoting them copies.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn param_bytes(&self, layers: Range<usize>) -> u64 {
        self.buffers_of(layers).into_iter().map(|i| self.buffers[i].bytes()).sum()
    }

    /// The bytes of the gradients of these layers, that is, of their trained buffers. A tied parameter counts
    /// once for every layer that uses it, because each layer computes its own gradient.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn gradient_bytes(&self, layers: Range<usize>) -> u64 {
        let trained = |p: &&ParamRef| self.buffers[p.buffer].trained;
        let bytes = |p: &ParamRef| (self.buffers[p.buffer].params[p.slot].len * self.float.bytes()) as u64;
        self.layers[layers].iter().flat_map(|l| l.params.iter().filter(trained).map(bytes)).sum()
    }

    /// The number of parameters of the whole model; a tied one counts once. State does not count.
    pub fn parameters(&self) -> u64 {
        let params = self.buffers.iter().flat_map(|buffer| &buffer.params);
        params.filter(|param| param.state.is_none()).map(|param| param.len as u64).sum()
    }

    /// The bytes that a device takes to widen the parameters of these layers to its float type
    /// ([`with_frozen_float_type`](Self::with_frozen_float_type)). A tied parameter counts once for every layer that uses it.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn widened_bytes(&self, layers: Range<usize>) -> u64 {
        let is_widened = |p: &&ParamRef| self.buffers[p.buffer].is_widened(self.float);
        let bytes = |p: &ParamRef| (self.buffers[p.buffer].params[p.slot].len * self.float.bytes()) as u64;
        self.layers[layers].iter().flat_map(|l| l.params.iter().filter(is_widened).map(bytes)).sum()
    }

    /// The parameters of the layer at `layer`, as views of the buffers that `buffer` returns, which are on `device`, plain or
    /// autodiff. Parameters that are stored in a narrower type are widened there. A quantized matrix is a tensor of the shape
    /// [`nf4::shape`] and of type `F32`, whose numbers are the bits of its blocks.
    ///
    /// # Panics
    /// If there is no such layer, or a buffer is shorter than its layout.
    pub fn layer_params(
        &self,
        layer: usize,
        buffer: &dyn Fn(usize) -> DeviceBytes,
        device: &Device,
    ) -> Vec<DeviceTensor> {
        let view = |p: &ParamRef| {
            let layout = &self.buffers[p.buffer];
            let param = &layout.params[p.slot];
            let bytes = buffer(p.buffer).slice(layout.bytes_of(param.range()));
            match layout.encoding {
                Encoding::Nf4 => DeviceTensor::view(bytes, nf4::shape(param.len), FloatType::F32.dtype()),
                _ => {
                    let stored = DeviceTensor::view(bytes, param.shape.clone(), layout.float.dtype());
                    if layout.is_widened(self.float) { stored.widened(device) } else { stored }
                }
            }
        };
        self.layers[layer].params.iter().map(view).collect()
    }

    /// The [builder's](ChainBuilder::description) description.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// A text that is equal for chains of the same architecture: names and shapes of all layers, ties, frozen
    /// parameters, and the builder's description.
    pub fn architecture(&self) -> String {
        let layers: Vec<String> = self.layers.iter().map(|l| self.described(l)).collect();
        self.around(&layers)
    }

    /// Returns whether evaluations of both chains are known to be bitwise equal for equal values and batches.
    /// This holds for the same chain, and for chains with equal [descriptions](ChainBuilder::description)
    /// that differ at most in which parameters are frozen.
    pub fn evaluates_as(&self, other: &Self) -> bool {
        let has_description = |chain: &Self| !chain.description.is_empty();
        let cost_keys =
            |chain: &Self| chain.layers.iter().map(|layer| layer.cost_key.clone()).collect::<Vec<_>>();
        let language_model = |chain: &Self| chain.objective.is_language_model();
        let computes =
            |chain: &Self| (chain.float, language_model(chain), chain.computed(), cost_keys(chain));
        std::ptr::eq(self, other)
            || has_description(self) && has_description(other) && computes(self) == computes(other)
    }

    /// Describes a layer with its parameters and their buffers; frozen ones are marked.
    fn described(&self, layer: &ChainLayer) -> String {
        let mark = |frozen: bool| if frozen { "!" } else { "" };
        let param = |p: &ParamRef| {
            let (buffer, param) = (&self.buffers[p.buffer], &self.buffers[p.buffer].params[p.slot]);
            // A fully frozen layer is marked as a whole.
            let frozen = mark(!buffer.trained && !layer.frozen);
            let state = param.state.map(|StateRule { keep, gain }| format!("~{keep},{gain}"));
            format!("{}{frozen}@{}{:?}{}", param.name, p.buffer, param.shape, state.unwrap_or_default())
        };
        let params: Vec<String> = layer.params.iter().map(param).collect();
        format!("{}{}({})", layer.name, mark(layer.frozen), params.join(","))
    }

    /// Describes all layers without marks of frozen ones: a tied parameter is named after its first layer's.
    fn computed(&self) -> String {
        let param = |p: &ParamRef| {
            let param = &self.buffers[p.buffer].params[p.slot];
            format!("{}{:?}", param.name, param.shape)
        };
        let layer = |l: &ChainLayer| {
            format!("{}({})", l.name, l.params.iter().map(param).collect::<Vec<_>>().join(","))
        };
        self.around(&self.layers.iter().map(layer).collect::<Vec<_>>())
    }

    /// Adds the chain's other properties to descriptions of all layers.
    fn around(&self, layers: &[String]) -> String {
        format!("{}[{}]{}:{}", self.name, self.description, self.objective.name(), layers.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::objective::LossInLastLayer;
    use super::*;
    use crate::Activation;
    use burn::module::{Module, Param};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::DType;
    use burn::tensor::{Device, Tensor};

    #[derive(Module, Debug)]
    struct Dense {
        linear: Linear,
    }

    impl Forward for Dense {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            Activation::of(self.linear.forward(x.into_float::<2>()))
        }
    }

    /// A [`Dense`] with a cost key.
    #[derive(Module, Debug)]
    struct Noted {
        linear: Linear,
    }

    impl Forward for Noted {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            Activation::of(self.linear.forward(x.into_float::<2>()))
        }

        fn cost_key(&self) -> Option<String> {
            Some(String::new())
        }
    }

    #[derive(Module, Debug)]
    struct Tied {
        table: Param<Tensor<2>>,
        bias: Param<Tensor<1>>,
    }

    impl Forward for Tied {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    #[derive(Module, Debug)]
    struct Twin {
        one: Param<Tensor<1>>,
        two: Param<Tensor<1>>,
    }

    impl Forward for Twin {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    fn dense(inputs: usize, outputs: usize) -> Dense {
        Dense { linear: LinearConfig::new(inputs, outputs).init(&Device::flex()) }
    }

    fn tied(table: &Param<Tensor<2>>) -> Tied {
        Tied { table: table.clone(), bias: Param::from_tensor(Tensor::ones([3], &Device::flex())) }
    }

    fn table(rows: usize) -> Param<Tensor<2>> {
        Param::from_tensor(Tensor::ones([rows, 3], &Device::flex()))
    }

    #[test]
    fn a_layer_is_one_buffer_with_aligned_parameters() {
        let chain = Chain::builder("mlp").layer("a", dense(3, 5)).layer("b", dense(5, 2)).build().unwrap();
        assert_eq!(chain.buffers().len(), 2);
        let buffer = &chain.buffers()[0];
        assert_eq!(buffer.params[0].name, "a.linear.weight");
        assert_eq!((buffer.params[0].offset, buffer.params[1].offset), (0, 128));
        assert!(!buffer.params[0].is_vector() && buffer.params[1].is_vector());
        assert_eq!(buffer.bytes(), 1024);
        assert_eq!(chain.parameters(), (3 * 5 + 5 + 5 * 2 + 2) as u64);
        assert_eq!(chain.param_bytes(0..2), 2048);
    }

    #[test]
    fn a_tied_parameter_is_an_buffer_that_both_layers_name() {
        let shared = table(4);
        let chain =
            Chain::builder("tied").layer("in", tied(&shared)).layer("out", tied(&shared)).build().unwrap();
        assert_eq!(chain.buffers().len(), 3);
        assert_eq!(chain.buffers()[0].layers, [0, 1]);
        assert_eq!(chain.buffers_of(1..2), [0, 2]);
        assert_eq!(chain.param_bytes(0..2), 3 * 512);
        assert_eq!(chain.gradient_bytes(0..2), (2 * 12 + 2 * 3) * 4);
    }

    #[test]
    fn values_that_modules_hold_are_taken_and_lazy_ones_follow_the_seed() {
        let shared = table(4);
        let chain =
            Chain::builder("c").layer("a", tied(&shared)).layer("b", dense(3, 3)).layer("c", dense(3, 3));
        let chain = chain.build().unwrap();
        let fill = |buffer: usize, seed| {
            let mut out = vec![0.0; chain.buffers()[buffer].elements];
            chain.source().fill(&chain, buffer, seed, &mut out).unwrap();
            out
        };
        assert_eq!(fill(0, 1)[..12], [1.0; 12]);
        let weights = fill(1, 1);
        assert!(weights[..9].iter().all(|w| w.abs() <= 1.0 / 3f32.sqrt() && *w != 0.0));
        assert_eq!(weights, fill(1, 1));
        assert!(weights != fill(1, 2) && weights != fill(2, 1), "each seed and buffer has its own values");
        assert_ne!(weights[..3], weights[128..131], "and each parameter");
    }

    #[derive(Module, Debug)]
    struct Plain {
        #[module(skip)]
        unused: usize,
    }

    impl Forward for Plain {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    #[test]
    fn a_narrower_type_halves_what_moves_and_not_the_moments() {
        let chain = || Chain::builder("c").layer("a", dense(3, 5)).build().unwrap();
        let (wide, narrow) = (chain(), chain().with_float_type(FloatType::Bf16));
        let bytes = |chain: &Chain| {
            let buffer = &chain.buffers()[0];
            [buffer.bytes(), buffer.moment_bytes(), buffer.master_bytes(), chain.gradient_bytes(0..1)]
        };
        assert_eq!((bytes(&wide), bytes(&narrow)), ([1024, 1024, 1024, 80], [512, 1024, 1536, 40]));
        let buffer = DeviceBytes::from(bytes::Bytes::from_iter((0..512).map(|i| (i / 256) as u8)));
        let [weight, bias] = &narrow.layer_params(0, &|_| buffer.clone(), &Device::flex())[..] else {
            panic!("two parameters")
        };
        assert_eq!((&weight.bytes.as_host().unwrap()[..], weight.dtype), (&[0; 30][..], DType::BF16));
        assert_eq!((&bias.bytes.as_host().unwrap()[..], bias.dtype), (&[1; 10][..], DType::BF16));
    }

    #[test]
    fn layers_without_parameters_are_neither_trained_nor_frozen() {
        let plain = || Plain { unused: 0 };
        let none = Chain::builder("c").layer("a", plain()).layer("b", plain()).build().unwrap();
        assert_eq!((none.buffers().len(), none.parameters(), none.first_trained()), (0, 0, 0));
        let chain = |frozen: bool| {
            let builder = Chain::builder("c").layer("a", plain());
            let builder =
                if frozen { builder.frozen("b", dense(2, 2)) } else { builder.layer("b", dense(2, 2)) };
            builder.layer("c", dense(2, 2)).build().unwrap()
        };
        assert_eq!((chain(false).first_trained(), chain(true).first_trained()), (1, 2));
        assert_ne!(chain(false).architecture(), chain(true).architecture());
    }

    #[test]
    fn chains_evaluate_alike_if_their_notes_say_so_whatever_is_frozen() {
        let builder_of = |first| Chain::builder("c").description("two layers").layer("a", first);
        let builder = || builder_of(dense(2, 2));
        let chain = |builder: ChainBuilder| builder.layer("b", dense(2, 2)).build().unwrap();
        let (one, other) = (chain(builder()), chain(builder()));
        assert!(one.evaluates_as(&one) && one.evaluates_as(&other));
        let frozen = Chain::builder("c").description("two layers").frozen("a", dense(2, 2));
        assert!(one.evaluates_as(&chain(frozen)));
        let linear = dense(2, 2).linear;
        let weight = linear.weight.clone().set_require_grad(false);
        let in_part = builder_of(Dense { linear: Linear { weight, ..linear } });
        assert!(one.evaluates_as(&chain(in_part)), "the buffers may differ");
        let silent = || chain(Chain::builder("c").layer("a", dense(2, 2)));
        let same = silent();
        assert!(same.evaluates_as(&same) && !same.evaluates_as(&silent()), "without a description");
        let others = [
            silent(),
            chain(builder().description("two others")),
            chain(builder().metrics(["accuracy"])),
            chain(builder().language_model()),
            chain(builder()).with_float_type(FloatType::Bf16),
            chain(Chain::builder("c").description("two layers").layer("a", Plain { unused: 0 })),
            builder().layer("b", Noted { linear: dense(2, 2).linear }).build().unwrap(),
        ];
        for other in others {
            assert!(!one.evaluates_as(&other), "{}", other.architecture());
        }
    }

    #[test]
    fn what_is_wrong_with_a_chain_is_named() {
        assert!(matches!(Chain::builder("none").build(), Err(CoreError::EmptyChain { .. })));
        let shared = table(4);
        let twice = Chain::builder("c").layer("a", dense(2, 2)).layer("a", dense(2, 2)).build();
        assert!(matches!(twice, Err(CoreError::DuplicateLayer { layer, .. }) if layer == "a"));
        let bias = Param::from_tensor(Tensor::ones([3], &Device::flex()));
        let within = Chain::builder("c").layer("a", Twin { one: bias.clone(), two: bias }).build();
        assert!(matches!(within, Err(CoreError::SharedWithinLayer { param, .. }) if param == "two"));
        let ones = |device: &Device, _: bool| Tensor::ones([5, 3], device);
        let table = Param::uninitialized(shared.id, ones, Device::flex(), true, [5, 3].into());
        let other = Tied { table, ..tied(&shared) };
        let shapes = Chain::builder("c").layer("a", tied(&shared)).layer("b", other).build();
        assert!(matches!(shapes, Err(CoreError::TiedShapes { second_shape, .. }) if second_shape == [5, 3]));
        for metrics in [vec!["loss"], vec![""], vec!["a", "a"]] {
            let metrics = Chain::builder("c").layer("a", dense(2, 2)).metrics(metrics).build();
            assert!(matches!(metrics, Err(CoreError::MetricName { .. })));
        }
        let two = Chain::builder("c").layer("a", dense(2, 2)).objective(LossInLastLayer::default());
        assert!(matches!(two.language_model().build(), Err(CoreError::TwoObjectives { .. })));
        let half_frozen = Chain::builder("c").frozen("a", tied(&shared)).layer("b", tied(&shared)).build();
        assert!(matches!(half_frozen, Err(CoreError::TiedFrozen { .. })));
        let all_frozen = Chain::builder("c").frozen("a", dense(2, 2)).build();
        assert!(matches!(all_frozen, Err(CoreError::NothingToTrain { .. })));
    }
}
