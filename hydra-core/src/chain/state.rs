//! State: parameters that layers update by observations of their batches instead of gradients, such as the running statistics
//! of a batch normalization.
//!
//! A layer of a training pass computes without the state and returns an *observation* of the batch. It returns it as the
//! "gradient" of the state: the observation leaves the device with the gradients of the same microbatch, once, in the backward
//! pass. A forward pass that is recomputed returns nothing twice. The host optimizer applies the observations to
//! the state in the order of the microbatches ([`StateRule::apply`]).

use super::graph_depth::GraphDepthOps;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::module::{
    Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::{Device, Tensor};
use std::cell::Cell;

/// How an observation changes a state: `keep * state + gain * observation`, in `f64`, rounded to `f32` once, as PyTorch
/// updates running statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateRule {
    /// The factor on the state.
    pub keep: f64,
    /// The factor on the observation.
    pub gain: f64,
}

impl StateRule {
    /// A sum of observations.
    pub const SUM: Self = Self { keep: 1.0, gain: 1.0 };

    /// An exponential moving average; `momentum` is the weight of an observation, as in PyTorch.
    pub const fn average(momentum: f64) -> Self {
        Self { keep: 1.0 - momentum, gain: momentum }
    }

    /// Applies the observations of one microbatch, element by element.
    pub fn apply(self, states: &mut [f32], observed: &[f32]) {
        let Self { keep, gain } = self;
        for (state, observed) in states.iter_mut().zip(observed) {
            *state = (gain * f64::from(*observed) + keep * f64::from(*state)) as f32;
        }
    }
}

/// A parameter that is state. A module that has one as a field [observes](Self::observe) batches in training passes, and reads
/// the [value](Self::val) in evaluations.
///
/// In a training pass, the value is that at the start of the minibatch; a layer whose output depended on it would differ from
/// one that updates it after each microbatch.
///
/// ```
/// # use burn::{module::Module, nn::Initializer};
/// # use burn::tensor::Device;
/// # use hydra_core::{Activation, Forward, Pass, State, StateRule};
/// /// Divides by the running mean of the batches' mean magnitude.
/// #[derive(Module, Debug)]
/// struct Scale {
///     magnitude: State<1>,
/// }
///
/// impl Scale {
///     fn new(device: &Device) -> Self {
///         let value = Initializer::Ones.init([1], device);
///         Self { magnitude: State::new(value, StateRule::average(0.1)) }
///     }
/// }
///
/// impl Forward for Scale {
///     fn forward(&self, x: Activation, pass: &Pass) -> Activation {
///         let x = x.into_float::<2>();
///         if !self.magnitude.is_observed(pass) {
///             return Activation::of(x / self.magnitude.val().unsqueeze::<2>());
///         }
///         let mean = x.clone().abs().mean();
///         let y = x / mean.clone().unsqueeze::<2>();
///         Activation::of(self.magnitude.observe(y, mean.detach()))
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct State<const D: usize> {
    value: Param<Tensor<D>>,
    rule: StateRule,
    fixed: bool,
}

impl<const D: usize> State<D> {
    /// A state that begins as `value`, lazy or not.
    pub fn new(value: Param<Tensor<D>>, rule: StateRule) -> Self {
        Self { value, rule, fixed: false }
    }

    /// The value.
    pub fn val(&self) -> Tensor<D> {
        // No gradient flows to it.
        self.value.val().detach()
    }

    /// Returns whether a layer observes the batch in this pass: it trains, and the state is not frozen. A frozen state is read
    /// in training passes too, as Keras and Burn do with a frozen batch normalization.
    pub fn is_observed(&self, pass: &crate::Pass) -> bool {
        pass.is_training() && !self.fixed
    }

    /// Returns `y`, whose backward pass returns `observed` as the observation of this microbatch. The loss has to depend on `y`.
    /// A layer observes a state once in a pass: further observations of the pass would be added to the first.
    ///
    /// # Panics
    /// If the shape is not that of the state.
    pub fn observe<const E: usize>(&self, y: Tensor<E>, observed: Tensor<D>) -> Tensor<E> {
        let state = self.value.val();
        let (expected, found) = (state.dims(), observed.dims());
        assert!(
            expected == found,
            "expected an observation of the state's shape {expected:?}, found {found:?}"
        );
        let observed = observed.detach().cast(state.dtype());
        let observed = if observed.device().is_autodiff() { observed } else { observed.autodiff() };
        let [y, state, observed] = [y.into_dispatch(), state.into_dispatch(), observed.into_dispatch()];
        Tensor::from_dispatch(<Dispatch as ObserveOps>::observe(y, state, observed))
    }

    fn map_param(self, map: impl FnOnce(Param<Tensor<D>>) -> Param<Tensor<D>>) -> Self {
        Self { value: map(self.value), ..self }
    }
}

/// What a visitor or mapper can know of the parameter that it is at.
#[derive(Clone, Copy)]
struct Visited {
    rule: StateRule,
    fixed: bool,
}

thread_local! {
    // Burn's visitors see all float parameters alike.
    static VISITED: Cell<Option<Visited>> = const { Cell::new(None) };
}

/// Marks the parameter that is visited as state until it is dropped.
struct Visit;

impl Visit {
    fn begin(rule: StateRule, fixed: bool) -> Self {
        VISITED.set(Some(Visited { rule, fixed }));
        Self
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        VISITED.set(None);
    }
}

/// The rule of the parameter that this thread's visitor is at, if it is state.
pub(super) fn visited() -> Option<StateRule> {
    VISITED.get().map(|visited| visited.rule)
}

/// Fixes the states of a module for which the next item is true; other parameters take an item too.
pub(super) struct FixStates<'a>(pub std::slice::Iter<'a, bool>);

impl ModuleMapper for FixStates<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let fixed = self.0.next().copied().unwrap_or(false);
        VISITED.set(VISITED.get().map(|visited| Visited { fixed: visited.fixed || fixed, ..visited }));
        param
    }
}

impl<const D: usize> Module for State<D> {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let _visit = Visit::begin(self.rule, self.fixed);
        self.value.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let Self { value, rule, fixed } = self;
        let visit = Visit::begin(rule, fixed);
        let value = Module::map(value, mapper);
        let fixed = VISITED.get().map_or(fixed, |visited| visited.fixed);
        drop(visit);
        Self { value, rule, fixed }
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_param(|value| value.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.map_param(|value| value.fork(device))
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.value.collect_devices(devices)
    }

    fn materialize(self) -> Self {
        self.map_param(Module::materialize)
    }

    fn valid(&self) -> Self {
        Self { value: self.value.valid(), ..*self }
    }

    fn train(self) -> Self {
        self.map_param(Module::train)
    }
}

impl<const D: usize> ModuleDisplayDefault for State<D> {
    fn content(&self, content: Content) -> Option<Content> {
        self.value.content(content)
    }
}

impl<const D: usize> ModuleDisplay for State<D> {}

impl<const D: usize> std::fmt::Display for State<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({})", self.value.id)
    }
}

/// The observation as an op of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait ObserveOps: Backend {
    /// Returns `y`. The gradient of `state` is `observed`.
    fn observe(
        y: FloatTensor<Self>,
        state: FloatTensor<Self>,
        observed: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl ObserveOps for Flex {
    fn observe(y: FloatTensor<Self>, _: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        y
    }
}

#[cfg(feature = "cube")]
impl ObserveOps for burn::backend::Cube {
    fn observe(y: FloatTensor<Self>, _: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        y
    }
}

#[derive(Debug)]
struct ObserveBackward;

impl<B: GraphDepthOps> Backward<B, 2> for ObserveBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [y, state] = ops.parents;
        if let Some(node) = y {
            grads.register::<B>(node.id, gradient);
        }
        if let Some(node) = state {
            grads.register::<B>(node.id, B::row_major(ops.state));
        }
    }
}

impl<B: ObserveOps + GraphDepthOps, C: CheckpointStrategy> ObserveOps for Autodiff<B, C> {
    fn observe(
        y: FloatTensor<Self>,
        state: FloatTensor<Self>,
        observed: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        match ObserveBackward.prepare::<C>([y.node(), state.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(observed.into_primitive(), y.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(y.into_primitive()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, AnyTensor, Chain, Forward, OptimizerSpec, ParamBufferLayout, Pass};
    use burn::nn::Initializer;

    fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        AnyTensor::from(tensor).into_host().as_f32().to_vec()
    }

    #[test]
    fn an_observation_is_the_gradient_of_its_state_and_leaves_others_alone() {
        let device = Device::flex().autodiff();
        let x = Tensor::<1>::from_floats([1.0, -2.0], &device).require_grad();
        let state = State::new(
            Param::initialized(burn::module::ParamId::new(), Tensor::<1>::zeros([3], &device).require_grad()),
            StateRule::average(0.25),
        );
        let observed = Tensor::from_floats([5.0, 6.0, 7.0], &device);
        let y = state.observe(x.clone() * 3.0, observed);
        assert_eq!(host(y.clone()), [3.0, -6.0]);
        let gradients = (y * 0.5).sum().backward();
        assert_eq!(host(x.grad(&gradients).unwrap()), [1.5; 2]);
        assert_eq!(host(state.value.val().grad(&gradients).unwrap()), [5.0, 6.0, 7.0]);
    }

    #[test]
    fn a_rule_is_applied_in_f64_and_rounded_once() {
        let mut states = [0.1f32, 7.0];
        StateRule::average(0.1).apply(&mut states, &[0.7, -7.0]);
        let expected = |state: f32, seen: f32| (0.1 * f64::from(seen) + 0.9 * f64::from(state)) as f32;
        assert_eq!(states, [expected(0.1, 0.7), expected(7.0, -7.0)]);
        StateRule::SUM.apply(&mut states[1..], &[1.0]);
        assert_eq!(states[1], expected(7.0, -7.0) + 1.0);
    }

    /// A factor with a state.
    #[derive(Module, Debug)]
    struct Scale {
        factor: Param<Tensor<1>>,
        magnitude: State<1>,
    }

    impl Scale {
        fn new() -> Self {
            let ones = || Initializer::Ones.init([3], &Device::flex());
            Self { factor: ones(), magnitude: State::new(ones(), StateRule::average(0.25)) }
        }
    }

    impl Forward for Scale {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    #[test]
    fn state_has_a_buffer_that_no_optimizer_steps() {
        let chain = Chain::builder("c").layer("a", Scale::new()).frozen("b", Scale::new()).build().unwrap();
        let of = |buffer: &ParamBufferLayout| {
            let names: Vec<&str> = buffer.params.iter().map(|param| param.name.as_str()).collect();
            (names.join(" "), buffer.trained, buffer.is_state(), buffer.is_optimized(), buffer.adds_up())
        };
        let buffers: Vec<_> = chain.buffers().iter().map(of).collect();
        let text = str::to_owned;
        assert_eq!(
            buffers,
            [
                (text("a.factor"), true, false, true, true),
                (text("a.magnitude"), true, true, false, false),
                (text("b.factor b.magnitude"), false, false, false, false),
            ]
        );
        assert_eq!(chain.parameters(), 2 * 3, "state does not count");
        let moments =
            |buffer: usize| OptimizerSpec::adamw(1e-3).moment_layouts(&chain.buffers()[buffer]).len();
        assert_eq!([0, 1, 2].map(moments), [2, 0, 0]);
        let described = chain.architecture();
        assert!(described.contains("a.magnitude@1[3]~0.75,0.25"), "{described}");
        let only = || {
            Chain::builder("c")
                .layer("a", Scale { factor: Scale::new().factor.set_require_grad(false), ..Scale::new() })
        };
        let refused = only().build().unwrap_err();
        assert!(matches!(refused, crate::CoreError::NothingToTrain { .. }), "{refused}");
    }

    #[test]
    fn a_shared_state_has_one_rule() {
        let shared: Param<Tensor<1>> = Initializer::Ones.init([3], &Device::flex());
        let scale = |momentum| Scale {
            magnitude: State::new(shared.clone(), StateRule::average(momentum)),
            ..Scale::new()
        };
        let chain =
            |momentum| Chain::builder("c").layer("a", scale(0.25)).layer("b", scale(momentum)).build();
        assert_eq!(chain(0.25).unwrap().buffers().iter().filter(|buffer| buffer.is_state()).count(), 1);
        let refused = chain(0.5).unwrap_err();
        assert!(matches!(refused, crate::CoreError::TiedStates { .. }), "{refused}");
    }

    #[test]
    fn a_frozen_state_is_read_in_training_passes() {
        let training = Pass::train(Pass::key_of(1, 2, 3), Activation::default());
        let open = Scale::new();
        assert!(open.magnitude.is_observed(&training));
        assert!(!open.magnitude.is_observed(&Pass::evaluate(Activation::default())));
        // The first item is that of the factor.
        let map = |fixed: [bool; 2]| Scale::new().map(&mut FixStates(fixed.iter()));
        assert!(map([true, false]).magnitude.is_observed(&training));
        let fixed = map([false, true]);
        assert!(!fixed.magnitude.is_observed(&training));
        assert!(
            !fixed.map(&mut FixStates([false; 2].iter())).magnitude.is_observed(&training),
            "it stays so"
        );
        assert!(visited().is_none());
    }

    #[test]
    #[should_panic(expected = "expected an observation of the state's shape [3], found [2]")]
    fn an_observation_of_another_shape_is_named() {
        let device = Device::flex().autodiff();
        let state = State::<1>::new(Initializer::Zeros.init([3], &device), StateRule::SUM);
        state.observe(Tensor::<1>::ones([1], &device), Tensor::ones([2], &device));
    }
}
