//! Declarations of Burn modules: initial values, layouts, frozen parameters, and refused modules.
#![expect(clippy::disallowed_methods, reason = "the tests check that Burn's generator is restored")]

use burn::module::{Module, ModuleDisplay, Param, ParamId};
use burn::nn::attention::MultiHeadAttentionConfig;
use burn::nn::conv::{Conv1dConfig, Conv2dConfig};
use burn::nn::gru::GruConfig;
use burn::nn::transformer::TransformerEncoderConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNormConfig, Initializer, InstanceNormConfig,
    LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout, LstmConfig, PRelu, PReluConfig,
    RmsNormConfig,
};
use burn::tensor::{Device, Distribution, Tensor};
use hydra_core::{
    Activation, AnyTensor, Chain, CoreError, DeviceBytes, Forward, HostTensor, Init, Pass, forward_range,
    promote_layers,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Serializes tests that seed and draw from Burn's process-wide generator.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    TESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Module, Debug)]
struct Dense {
    linear: Linear,
}

impl Forward for Dense {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(self.linear.forward(x.into_float::<2>()))
    }
}

/// A layer of any module, with an identity forward.
#[derive(Module, Debug)]
struct Wrapper<M: Module> {
    inner: M,
}

impl<M: Module + ModuleDisplay + Sync + 'static> Forward for Wrapper<M> {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        x
    }
}

#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
}

impl Forward for Two {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        x
    }
}

fn device() -> Device {
    Device::flex()
}

fn linear(inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs).init(&device())
}

fn drawn_by(initializer: Initializer, inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs).with_initializer(initializer).init(&device())
}

fn build<M: Forward + Sync + 'static>(layer: M) -> Result<Chain, CoreError> {
    Chain::builder("c").layer("a", layer).layer("loss", Dense { linear: linear(3, 2) }).build()
}

fn of<M: Module + ModuleDisplay + Sync + 'static>(inner: M) -> Chain {
    build(Wrapper { inner }).unwrap()
}

/// The initializers of the first layer's parameters.
fn inits(chain: &Chain) -> Vec<Init> {
    chain.buffers()[0].params.iter().map(|param| param.init).collect()
}

fn initial_values(chain: &Chain, seed: u64) -> Vec<f32> {
    let mut out = vec![0.0; chain.buffers()[0].elements];
    chain.source().fill(chain, 0, seed, &mut out).unwrap();
    chain.buffers()[0].params.iter().flat_map(|param| out[param.range()].to_vec()).collect()
}

fn assert_close(found: Init, expected: Init) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    let same = match (found, expected) {
        (Init::Normal(a), Init::Normal(b)) | (Init::Uniform(a), Init::Uniform(b)) => close(a, b),
        (Init::NormalAround { mean, deviation }, Init::NormalAround { mean: m, deviation: d }) => {
            close(mean, m) && close(deviation, d)
        }
        (Init::UniformIn { low, high }, Init::UniformIn { low: l, high: h }) => {
            close(low, l) && close(high, h)
        }
        (a, b) => a == b,
    };
    assert!(same, "{found:?}, expected {expected:?}");
}

#[test]
fn first_values_are_distributed_as_the_module_says() {
    let _alone = alone();
    let bound = 1.0 / 8f64.sqrt();
    let xavier = (2.0f64 / (8 + 16) as f64).sqrt();
    type Case = (Initializer, Init);
    let cases: [Case; 8] = [
        (Initializer::Zeros, Init::Zeros),
        (Initializer::Ones, Init::Ones),
        (Initializer::Constant { value: 0.5 }, Init::Constant(0.5)),
        (Initializer::Uniform { min: -0.25, max: 0.25 }, Init::Uniform(0.25)),
        (Initializer::Uniform { min: 1.0, max: 3.0 }, Init::UniformIn { low: 1.0, high: 3.0 }),
        (Initializer::Normal { mean: 2.0, std: 0.5 }, Init::NormalAround { mean: 2.0, deviation: 0.5 }),
        (Initializer::XavierNormal { gain: 1.0 }, Init::Normal(xavier)),
        (Initializer::XavierUniform { gain: 1.0 }, Init::Uniform(3f64.sqrt() * xavier)),
    ];
    for (initializer, expected) in cases {
        let chain = of(drawn_by(initializer, 8, 16));
        inits(&chain).into_iter().for_each(|found| assert_close(found, expected));
    }
    for device in [device(), device().autodiff()] {
        let chain = of(LinearConfig::new(8, 16).init(&device));
        inits(&chain).into_iter().for_each(|found| assert_close(found, Init::Uniform(bound)));
    }
    // Large enough for several iterations of the comparison.
    let chain = of(EmbeddingConfig::new(9_000, 16).init(&device()));
    assert_close(inits(&chain)[0], Init::Normal(1.0));
    let chain = of(PReluConfig::new().init(&device()));
    assert_eq!(inits(&chain), [Init::Constant(0.25)]);
    assert_eq!(initial_values(&chain, 3), [0.25]);
    let chain = of(LayerNormConfig::new(4).init(&device()));
    assert_eq!(inits(&chain), [Init::Ones, Init::Zeros]);
}

#[test]
fn few_numbers_are_drawn_as_the_rest_of_their_layer() {
    let _alone = alone();
    for (inputs, outputs) in [(8, 1), (1, 1), (2, 1), (1, 2)] {
        let bound = 1.0 / (inputs as f64).sqrt();
        let found = inits(&of(linear(inputs, outputs)));
        assert_eq!(found.len(), 2);
        found.into_iter().for_each(|found| assert_close(found, Init::Uniform(bound)));
        let normal = drawn_by(Initializer::Normal { mean: 0.0, std: 0.3 }, inputs, outputs);
        inits(&of(normal)).into_iter().for_each(|found| assert_close(found, Init::Normal(0.3)));
    }
    let alone: Param<Tensor<1>> = Initializer::Uniform { min: 0.0, max: 2.0 }.init([1], &device());
    let error = build(Wrapper { inner: alone }).unwrap_err();
    assert!(
        matches!(&error, CoreError::UnknownInitializer { layer, param } if layer == "a" && param == "inner")
    );
}

#[test]
fn values_follow_the_tasks_seed_and_no_other() {
    let _alone = alone();
    let values = |burn: u64, seed| {
        device().seed(burn);
        initial_values(&of(linear(8, 16)), seed)
    };
    assert_eq!(values(1, 7), values(2, 7));
    assert_ne!(values(1, 7), values(1, 8));
}

#[test]
fn chains_of_clones_draw_alike() {
    let _alone = alone();
    for layout in [LinearLayout::Row, LinearLayout::Col] {
        let module = LinearConfig::new(6, 2).with_layout(layout).init(&device());
        let (one, two) = (of(module.clone()), of(module));
        assert_eq!(inits(&one), inits(&two));
        assert!(two.buffers()[0].params.iter().all(|param| param.given.is_none()));
        assert_eq!(initial_values(&one, 5), initial_values(&two, 5));
        assert_ne!(initial_values(&two, 5), initial_values(&two, 6));
    }
}

#[test]
fn what_is_drawn_otherwise_is_refused_and_what_is_not_drawn_is_taken() {
    let _alone = alone();
    let orthogonal = drawn_by(Initializer::Orthogonal { gain: 1.0 }, 8, 8).no_bias();
    let error = build(Wrapper { inner: orthogonal }).unwrap_err();
    assert!(
        matches!(&error, CoreError::UnknownInitializer { param, .. } if param == "inner.weight"),
        "{error}"
    );
    assert!(error.to_string().contains("Forward::init"));
    let read = drawn_by(Initializer::Orthogonal { gain: 1.0 }, 8, 8).no_bias();
    let expected = AnyTensor::from(read.weight.val()).into_host().as_f32().to_vec();
    assert_eq!(initial_values(&of(read), 1), expected);

    let sines = |device: &Device, _: bool| Tensor::<1>::from_floats([0.1, 0.9, -0.4], device).sin();
    let table = Param::uninitialized(ParamId::new(), sines, device(), true, [3].into());
    let expected: Vec<f32> = AnyTensor::from(sines(&device(), true)).into_host().as_f32().to_vec();
    assert_eq!(initial_values(&of(table), 1), expected);
}

trait NoBias {
    fn no_bias(self) -> Self;
}

impl NoBias for Linear {
    fn no_bias(self) -> Self {
        Self { bias: None, ..self }
    }
}

#[derive(Module, Debug)]
struct OwnInitLayer {
    weight: Param<Tensor<1>>,
}

impl Forward for OwnInitLayer {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        x
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(0.02)
    }
}

fn never(shape: usize) -> Param<Tensor<1>> {
    let absent = |_: &Device, _: bool| panic!("this must not be read");
    Param::uninitialized(ParamId::new(), absent, device(), true, [shape].into())
}

#[test]
fn a_layer_that_says_how_it_is_drawn_is_not_initialized() {
    let _alone = alone();
    let chain = build(OwnInitLayer { weight: never(3) }).unwrap();
    assert_eq!(inits(&chain), [Init::Normal(0.02)]);
}

#[test]
fn burns_generator_goes_on_from_its_own_seed() {
    let _alone = alone();
    let next = |seed| {
        device().seed(seed);
        let _ = of(linear(4, 4));
        let draws = Tensor::<1>::random([4], Distribution::Uniform(0.0, 1.0), &device());
        AnyTensor::from(draws).into_host().as_f32().to_vec()
    };
    assert_eq!(next(1), next(1));
    assert_ne!(next(1), next(2));
}

#[test]
fn a_transposed_layout_is_that_of_the_forward() {
    let _alone = alone();
    let linear = LinearConfig::new(8, 16).with_layout(LinearLayout::Col).init(&device());
    let other = LinearConfig::new(16, 1).init(&device());
    let chain = Chain::builder("c").layer("a", Dense { linear }).layer("b", Dense { linear: other });
    let chain = chain.build().unwrap();
    assert_eq!(chain.buffers()[0].params[0].shape, [8, 16]);
    let mut masters = vec![0.0; chain.buffers()[0].elements];
    chain.source().fill(&chain, 0, 1, &mut masters).unwrap();
    let elements = masters.len();
    let buffer = DeviceBytes::from(HostTensor::float(masters, [elements]).bytes);
    let layers = promote_layers(&chain, 0..1, &|_| buffer.clone(), &device(), false);
    let x = Tensor::<2>::ones([5, 8], &device().autodiff());
    let y = forward_range(&layers, 0, Activation::of(x), &Pass::evaluate(Activation::default()));
    assert_eq!(y.into_float::<2>().dims(), [5, 16]);
}

#[test]
fn what_burn_freezes_is_frozen() {
    let _alone = alone();
    let frozen = |linear: Linear| {
        let chain = build(Dense { linear }).unwrap();
        (chain.layers()[0].frozen, chain.buffers()[0].trained)
    };
    assert_eq!(frozen(linear(4, 3)), (false, true));
    assert_eq!(frozen(linear(4, 3).no_grad()), (true, false));
    assert_eq!(frozen(linear(4, 3).freeze()), (true, false));
    assert_eq!(frozen(linear(4, 3).freeze().unfreeze()), (false, true));
    // Parameters that hold values, on a device with and without autodiff.
    for device in [device(), device().autodiff()] {
        let held = || {
            let linear = LinearConfig::new(4, 3).init(&device);
            let _ = (linear.weight.val(), linear.bias.as_ref().map(Param::val));
            linear
        };
        assert_eq!(frozen(held()), (false, true));
        assert_eq!(frozen(held().no_grad()), (true, false));
    }
}

#[test]
fn modules_that_the_documents_name_have_first_values() {
    let _alone = alone();
    let device = device();
    let encoder = TransformerEncoderConfig::new(8, 16, 2, 1).with_dropout(0.0);
    let chains = [
        of(Conv2dConfig::new([2, 4], [3, 3]).init(&device)),
        of(Conv1dConfig::new(4, 1, 3).init(&device)),
        of(EmbeddingConfig::new(9, 4).init(&device)),
        of(GroupNormConfig::new(2, 4).init(&device)),
        of(InstanceNormConfig::new(4).init(&device)),
        of(RmsNormConfig::new(4).init(&device)),
        of(LstmConfig::new(3, 4, true).init(&device)),
        of(GruConfig::new(3, 4, true).init(&device)),
        of(MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0).init(&device)),
        of(encoder.init(&device)),
    ];
    for chain in chains {
        assert!(inits(&chain).iter().all(|init| *init != Init::Module), "{:?}", inits(&chain));
        assert!(initial_values(&chain, 1).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn a_layer_that_is_frozen_in_part_has_two_buffers() {
    let _alone = alone();
    let two = || Two { a: linear(4, 4).no_grad(), b: linear(4, 4) };
    let chain = build(two()).unwrap();
    let buffer = |buffer: usize| {
        let layout = &chain.buffers()[buffer];
        let names: Vec<&str> = layout.params.iter().map(|param| param.name.as_str()).collect();
        (layout.trained, layout.name.as_str(), names)
    };
    assert_eq!(buffer(0), (false, "a", vec!["a.a.weight", "a.a.bias"]));
    assert_eq!(buffer(1), (true, "a", vec!["a.b.weight", "a.b.bias"]));
    assert!(!chain.layers()[0].frozen);
    assert_eq!(chain.trained_params(0).collect::<Vec<_>>(), [false, false, true, true]);
    assert_eq!((chain.first_trained(), chain.gradient_bytes(0..1)), (0, (16 + 4) * 4));
    let whole = build(Two { a: linear(4, 4), b: linear(4, 4) }).unwrap();
    assert_ne!(chain.architecture(), whole.architecture());
    let frozen = Chain::builder("c").frozen("a", two()).layer("b", Dense { linear: linear(4, 2) }).build();
    let frozen = frozen.unwrap();
    assert!(frozen.layers()[0].frozen && frozen.buffers().len() == 2 && !frozen.buffers()[0].trained);
}

#[test]
fn burn_freezes_one_parameter_by_itself() {
    let _alone = alone();
    let linear = linear(4, 3);
    let weight = linear.weight.clone().set_require_grad(false);
    let chain = build(Dense { linear: Linear { weight, ..linear } }).unwrap();
    assert_eq!(chain.trained_params(0).collect::<Vec<_>>(), [false, true]);
    assert_eq!((chain.buffers()[0].trained, chain.buffers()[1].trained), (false, true));
}

#[test]
fn running_statistics_are_refused_by_name() {
    let _alone = alone();
    #[derive(Module, Debug)]
    struct Normed {
        linear: Linear,
        norm: BatchNorm,
    }
    impl Forward for Normed {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }
    let normed = Normed { linear: linear(4, 4), norm: BatchNormConfig::new(4).init(&device()) };
    let error = build(normed).unwrap_err();
    let named = matches!(&error, CoreError::RunningStatistics { layer, param, .. }
        if layer == "a" && param == "norm.running_mean");
    assert!(named, "{error}");
    assert!(error.to_string().contains("use `hydra_models::BatchNorm`"), "{error}");
}

#[test]
fn a_panic_of_a_layer_names_it() {
    let _alone = alone();
    let error = build(Wrapper { inner: never(3) }).unwrap_err();
    let named = matches!(&error, CoreError::LayerPanicked { layer, message, .. }
        if layer == "a" && message == "this must not be read");
    assert!(named, "{error}");

    #[derive(Module, Debug)]
    struct Rude {
        norm: LayerNorm,
        table: Embedding,
        slope: PRelu,
    }
    impl Forward for Rude {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }

        fn init(&self, name: &str, _: &[usize]) -> Init {
            panic!("no `{name}` here")
        }
    }
    let rude = Rude {
        norm: LayerNormConfig::new(4).init(&device()),
        table: EmbeddingConfig::new(4, 4).init(&device()),
        slope: PReluConfig::new().init(&device()),
    };
    let message = build(rude).unwrap_err().to_string();
    assert!(message.contains("`a`") && message.contains("no `norm.gamma` here"), "{message}");
}
