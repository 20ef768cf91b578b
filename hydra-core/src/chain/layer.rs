//! The layer: the smallest unit at which a chain can be cut.
//!
//! Burn's `Module` cannot be a trait object, because its visitors are generic over a tensor's rank. Therefore
//! users implement [`Forward`] for their modules, one method over [`Activation`], and a blanket
//! implementation makes every such module a [`Layer`], object-safe and without type parameters. Chains are
//! `Box<dyn Layer>`, and neither the partitioner nor the scheduler depends on a model's type.

use super::graph_depth::equalize_depth;
use super::initializer::{Guesses, OwnInit, ParameterForm};
use super::objective::{LastLayer, Objective};
use super::state::{FixStates, StateRule, visited};
use crate::{Activation, AnyTensor, DeviceTensor, HostTensor, Key, Pass};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Gradients, Shape, Tensor};
use rayon::prelude::*;
use std::any::TypeId;
use std::sync::{Arc, Mutex, PoisonError};

/// The initializer of a parameter: each initial value is a function of a key and the element's index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// Normal with mean zero and this standard deviation.
    Normal(f64),
    /// Uniform between plus and minus this bound.
    Uniform(f64),
    /// This value for every element.
    Constant(f32),
    /// Normal with this mean and standard deviation.
    NormalAround {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        deviation: f64,
    },
    /// Uniform between these bounds.
    UniformIn {
        /// The lower bound.
        low: f64,
        /// The upper bound.
        high: f64,
    },
    /// The distribution of the module's own initializer. See [`Forward::init`].
    Module,
}

impl Init {
    /// Hydra's default for a parameter, by its field's name and its shape: ones for `gamma` (norms), zeros
    /// for other vectors, and uniform within `1 / sqrt(fan_in)` for matrices and kernels, as Burn's `Linear`
    /// and convolutions do. A matrix is `[in, out]`, a kernel `[out, in, ..]`.
    ///
    /// It ignores the module's own initializer. [`Forward::init`] can return it for modules whose parameters
    /// should not be drawn as Burn does.
    pub fn default_for(name: &str, shape: &[usize]) -> Self {
        let field = name.rsplit('.').next().unwrap_or(name);
        match shape {
            _ if field == "gamma" => Self::Ones,
            [] | [_] => Self::Zeros,
            [fan_in, _] => Self::Uniform(1.0 / (*fan_in as f64).sqrt()),
            [_, rest @ ..] => Self::Uniform(1.0 / (rest.iter().product::<usize>() as f64).sqrt()),
        }
    }

    /// This value for every element.
    pub(crate) fn constant(value: f32) -> Self {
        match value.to_bits() {
            bits if bits == 0f32.to_bits() => Self::Zeros,
            bits if bits == 1f32.to_bits() => Self::Ones,
            _ => Self::Constant(value),
        }
    }

    /// Fills `out` with the values for `key`, in parallel: a value depends only on its index.
    ///
    /// # Panics
    /// If it is [`Module`](Self::Module), which building a chain replaces with the module's own distribution.
    pub fn fill(self, key: Key, out: &mut [f32]) {
        match self {
            Self::Zeros => out.fill(0.0),
            Self::Ones => out.fill(1.0),
            Self::Constant(value) => out.fill(value),
            Self::Normal(std) => drawn(out, |i| (key.normal(i) * std) as f32),
            Self::Uniform(bound) => drawn(out, |i| ((key.uniform(i) * 2.0 - 1.0) * bound) as f32),
            Self::NormalAround { mean, deviation } => {
                drawn(out, |i| (key.normal(i) * deviation + mean) as f32)
            }
            Self::UniformIn { low, high } => drawn(out, |i| (key.uniform(i) * (high - low) + low) as f32),
            Self::Module => panic!("`Init::Module` has no values of its own; building a chain replaces it"),
        }
    }
}

fn drawn(out: &mut [f32], value: impl Fn(u64) -> f32 + Sync) {
    const PART: usize = 1 << 14;
    out.par_chunks_mut(PART).enumerate().for_each(|(part, values)| {
        values.iter_mut().zip((part * PART) as u64..).for_each(|(out, i)| *out = value(i));
    });
}

/// A Burn module with one forward function: the trait that users implement for their layers.
///
/// The module's parameters may be lazy (Hydra initializes them, see [`init`](Self::init)) or hold values
/// (Hydra uses those). Every random number must come from the pass: use [`pass.site(0).dropout(x,
/// probability)`](crate::Site::dropout). Burn's `Dropout` draws from a process-wide generator, also in
/// evaluations, so a recomputed forward would return a different output; a run detects and refuses such a
/// layer. A layer keeps no state of its own between forwards. What a training run updates by the batches that it has seen, such
/// as running statistics, is a [`State`](super::State); Burn's `BatchNorm` updates itself, and is refused when a chain is
/// built.
///
/// Parameters that Burn freezes (`freeze` and `no_grad` of a module, `set_require_grad(false)` of a
/// parameter) keep their initial values and have neither gradients nor moments. A layer with some frozen
/// parameters, such as a frozen map with a trained adapter, is partly trained; a layer with only frozen
/// parameters is frozen, as with [`ChainBuilder::frozen`](crate::ChainBuilder::frozen).
pub trait Forward: Module {
    /// Computes the layer's output for `x`. The last layer of a chain returns the mean loss, of shape `[1]`,
    /// and reads the targets from [`Pass::targets`]. See [`FloatType`](crate::FloatType) for chains with
    /// 16-bit floats.
    ///
    /// Wrong shapes may panic: the panic fails the task with its message and does not affect other tasks.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation;

    /// Returns the initializer of the lazy parameter `name` (a path such as `attn.weight`) of `shape`.
    ///
    /// The default is [`Init::Module`]: the module's own initializer, such as the `Initializer` in the
    /// configuration of a Burn module, or the closure of a `Param::uninitialized`. It is called once, when
    /// the chain is built, and its result is classified:
    ///
    /// - draws from a uniform or a normal distribution, with bounds from any formula: the parameter gets that
    ///   distribution (to about six digits), and its values are drawn with the task's seed like all others,
    ///   so that they depend neither on Burn's seed nor on threads or other tasks;
    /// - one constant value, or values that are not random: those values;
    /// - anything else, such as `Initializer::Orthogonal`: the chain is refused. A layer with a single random
    ///   number whose distribution no other parameter of the layer has is refused too, because one draw does
    ///   not identify a distribution.
    ///
    /// Burn's generator is seeded for this and continues afterwards from a number that it drew itself. If
    /// another thread draws from the generator at that moment, the chain may be refused with the same error.
    ///
    /// If a layer overrides this method, none of its own initializers is called. Override it for parameters
    /// that are so large that a chain should not hold one of them in memory while it is built.
    fn init(&self, _name: &str, _shape: &[usize]) -> Init {
        Init::Module
    }

    /// The bytes of device memory that the layer's forward and backward take in addition to parameters,
    /// gradients and boundary activations, for inputs of these shapes. Those of the last layer include what the chain's
    /// objective takes. Used only where memory cannot be
    /// measured. With the default, `None`, the partitioner assumes a generous multiple of the boundary.
    fn working_bytes(&self, _inputs: &[Vec<usize>]) -> Option<u64> {
        None
    }

    /// Identifies everything that determines what this layer computes and costs besides its type, the names
    /// and shapes of its parameters and the shapes of its input: number of heads, dropout, activation; an
    /// empty text if there is nothing else. Layers of one type with equal cost keys, parameters and inputs
    /// are profiled once, which saves most of a pilot pass if a chain repeats a block. Include every field,
    /// also fields added later: if two different layers return equal keys, the measurements of the first are
    /// used for both. With the default, `None`, each layer is profiled on its own.
    ///
    /// It is called once, when the chain is built. A derived `Debug` of a struct that holds the options is
    /// sufficient:
    ///
    /// ```
    /// # use burn::{module::Module, nn::Linear};
    /// # use hydra_core::{Activation, Forward, Pass};
    /// #[derive(Clone, Debug)]
    /// struct Options {
    ///     heads: usize,
    ///     dropout: f64,
    /// }
    ///
    /// #[derive(Module, Debug)]
    /// struct Block {
    ///     linear: Linear,
    ///     #[module(skip)]
    ///     options: Options,
    /// }
    ///
    /// impl Forward for Block {
    ///     fn forward(&self, x: Activation, pass: &Pass) -> Activation {
    ///         let x = self.linear.forward(x.into_float::<2>());
    ///         Activation::of(pass.site(0).dropout(x, self.options.dropout))
    ///     }
    ///
    ///     fn cost_key(&self) -> Option<String> {
    ///         Some(format!("{:?}", self.options))
    ///     }
    /// }
    /// ```
    fn cost_key(&self) -> Option<String> {
        None
    }

    /// Returns whether the frozen matrix `name` is quantized to 4 bits ([`nf4`](crate::nf4)): its shape stays `[out, in]` where
    /// values are read and written, and a device gets its blocks, a tensor of the shape [`nf4::shape`](crate::nf4::shape). The layer
    /// computes with an operation that reads blocks. The default is false.
    fn is_quantized(&self, _name: &str) -> bool {
        false
    }

    /// Returns whether the layer reads [`Pass::targets`] although it is not the last one, as the parts of a
    /// loss that is divided among layers do. Targets are then on the device for this layer and all that
    /// follow. The default is false.
    fn reads_targets(&self) -> bool {
        false
    }
}

/// A layer's type and its [`cost_key`](Forward::cost_key), which together with names and shapes determine its
/// cost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CostKey {
    /// The type of the module.
    pub module: TypeId,
    /// The text that the layer returned.
    pub text: String,
}

/// A parameter of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamInfo {
    /// The field path, such as `attn.weight`.
    pub name: String,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Burn's identifier. Layers whose parameters have the same identifier share (tie) them.
    pub id: ParamId,
}

/// A parameter of a layer as the user declared it.
#[derive(Clone, Debug)]
pub struct Declared {
    /// Its name, its shape as forwards see it, and its identifier.
    pub info: ParamInfo,
    /// The values that it held, if it was not lazy.
    pub given: Option<HostTensor>,
    /// Whether Burn trains it; `None` if the module's load mapper is not supported.
    pub trained: Option<bool>,
    /// Whether the module reads it while it is mapped, as it does with running statistics.
    pub running: bool,
    /// Whether it is quantized ([`Forward::is_quantized`]).
    pub quantized: bool,
    /// How observations change it, if it is state.
    pub state: Option<StateRule>,
}

/// A layer with its type erased.
///
/// A layer is first as the user declared it, while its chain is built, then *uninitialized* (parameters have
/// names and shapes but no memory) or *materialized* (promoted to a device).
pub trait Layer: Send + Sync {
    /// The float parameters of an uninitialized or materialized layer, in the module's order.
    fn params(&self) -> Vec<ParamInfo>;

    /// The parameters as the user declared them. Does not initialize any.
    fn declared(&self) -> Vec<Declared>;

    /// Returns the uninitialized layer, and the recognized initializers of the parameters for which `own` is
    /// true; `None` for the others, and for values that a parameter held and keeps. Holds the values of one
    /// parameter at a time.
    fn uninitialized(self: Box<Self>, own: &[bool]) -> (Box<dyn Layer>, Vec<Option<OwnInit>>);

    /// The initializer of a lazy parameter.
    fn init(&self, name: &str, shape: &[usize]) -> Init;

    /// See [`Forward::working_bytes`].
    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64>;

    /// See [`Forward::cost_key`].
    fn cost_key(&self) -> Option<CostKey>;

    /// See [`Forward::reads_targets`].
    fn reads_targets(&self) -> bool;

    /// Returns a materialized copy on `device` with these parameters, in the order of
    /// [`params`](Self::params). Parameters for which `track` is true collect gradients; `device` must then
    /// be an autodiff device.
    ///
    /// # Panics
    /// If either has fewer items than the layer has parameters.
    fn promote(&self, params: &[DeviceTensor], device: &Device, track: &[bool]) -> Box<dyn Layer>;

    /// The layer with these of its states, in the order of [`params`](Self::params), fixed: training passes read them. The items
    /// of other parameters mean nothing.
    fn with_fixed_states(self: Box<Self>, fixed: &[bool]) -> Box<dyn Layer>;

    /// The layer as the last one of a chain with this objective, which replaces one that it has.
    fn with_objective(self: Box<Self>, objective: Arc<dyn Objective>) -> Box<dyn Layer>;

    /// The output for `x`.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation;

    /// Takes the gradients of this materialized, tracked layer's parameters, in the order of
    /// [`params`](Self::params); `None` for a parameter that is not tracked or does not affect the loss.
    fn take_gradients(&self, gradients: &mut Gradients) -> Vec<Option<AnyTensor>>;
}

impl<M: Forward + Sync + 'static> Layer for M {
    fn params(&self) -> Vec<ParamInfo> {
        let mut list = ListParams::default();
        self.visit(&mut list);
        list.params
    }

    fn declared(&self) -> Vec<Declared> {
        let mut declare = Declare { params: Layer::params(self).into_iter(), declared: Vec::new() };
        self.visit(&mut declare);
        let running = Arc::default();
        let _ = self.clone().map(&mut Watch { at: 0, running: Arc::clone(&running) });
        for at in running.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            declare.declared[*at].running = true;
        }
        for declared in &mut declare.declared {
            declared.quantized = Forward::is_quantized(self, &declared.info.name);
        }
        declare.declared
    }

    fn uninitialized(self: Box<Self>, own: &[bool]) -> (Box<dyn Layer>, Vec<Option<OwnInit>>) {
        let mut hollowing = Uninitialized { own: own.iter(), guesses: Guesses::default() };
        let uninitialized = (*self).map(&mut hollowing);
        (Box::new(uninitialized), hollowing.guesses.resolve())
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        Forward::init(self, name, shape)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        Forward::working_bytes(self, inputs)
    }

    fn cost_key(&self) -> Option<CostKey> {
        Forward::cost_key(self).map(|text| CostKey { module: TypeId::of::<M>(), text })
    }

    fn reads_targets(&self) -> bool {
        Forward::reads_targets(self)
    }

    fn with_fixed_states(self: Box<Self>, fixed: &[bool]) -> Box<dyn Layer> {
        Box::new((*self).map(&mut FixStates(fixed.iter())))
    }

    fn with_objective(self: Box<Self>, objective: Arc<dyn Objective>) -> Box<dyn Layer> {
        Box::new(LastLayer { layer: self, objective })
    }

    fn promote(&self, params: &[DeviceTensor], device: &Device, track: &[bool]) -> Box<dyn Layer> {
        let mut promote = Promote { params: params.iter().zip(track), device };
        Box::new(self.clone().map(&mut promote))
    }

    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        equalize_depth(Forward::forward(self, x, pass))
    }

    fn take_gradients(&self, gradients: &mut Gradients) -> Vec<Option<AnyTensor>> {
        let mut take = TakeGradients { gradients, taken: Vec::new() };
        self.visit(&mut take);
        take.taken
    }
}

#[derive(Default)]
struct ListParams {
    path: Vec<String>,
    params: Vec<ParamInfo>,
}

impl ModuleVisitor for ListParams {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // `lazy_shape` does not initialize a lazy parameter.
        let shape = param.lazy_shape().to_vec();
        self.params.push(ParamInfo { name: self.path.join("."), shape, id: param.id });
    }
}

struct Declare {
    params: std::vec::IntoIter<ParamInfo>,
    declared: Vec<Declared>,
}

impl ModuleVisitor for Declare {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(mut info) = self.params.next() else { return };
        let form = ParameterForm::from_param(param);
        if let Some(form) = &form {
            info.shape.clone_from(&form.shape);
        }
        let given = param.is_initialized().then(|| AnyTensor::from(param.val()).into_host());
        let trained = form.map(|form| form.trained);
        let state = visited();
        self.declared.push(Declared { info, given, trained, running: false, quantized: false, state });
    }
}

/// Records which parameters are read while a module is mapped. Each read returns the original value.
struct Watch {
    at: usize,
    running: Arc<Mutex<Vec<usize>>>,
}

impl ModuleMapper for Watch {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, shape) = (param.id, param.lazy_shape());
        let (at, running) = (self.at, Arc::clone(&self.running));
        self.at += 1;
        let read = move |_: &Device, _: bool| {
            running.lock().unwrap_or_else(PoisonError::into_inner).push(at);
            param.val()
        };
        Param::uninitialized(id, read, Device::flex(), true, shape)
    }
}

struct Uninitialized<'a> {
    own: std::slice::Iter<'a, bool>,
    guesses: Guesses,
}

impl ModuleMapper for Uninitialized<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Clones of a lazy parameter share its initialization, so a new parameter replaces it.
        let id = param.id;
        let shape =
            ParameterForm::from_param(&param).map_or(param.lazy_shape(), |form| Shape::from(form.shape));
        match self.own.next() {
            Some(true) => self.guesses.add(param),
            _ => self.guesses.skip(),
        }
        let absent = |_: &Device, _: bool| panic!("a parameter of an uninitialized layer was read");
        Param::uninitialized(id, absent, Device::flex(), true, shape)
    }
}

struct Promote<'a> {
    /// Each parameter with whether it collects gradients.
    params: std::iter::Zip<std::slice::Iter<'a, DeviceTensor>, std::slice::Iter<'a, bool>>,
    device: &'a Device,
}

impl ModuleMapper for Promote<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((resident, track)) = self.params.next() else {
            panic!("fewer parameters were given than the layer has");
        };
        let tensor: Tensor<D> = resident.to_device(self.device).into_float();
        let tensor = if *track { tensor.require_grad() } else { tensor };
        Param::initialized(param.id, tensor)
    }
}

struct TakeGradients<'a> {
    gradients: &'a mut Gradients,
    taken: Vec<Option<AnyTensor>>,
}

impl ModuleVisitor for TakeGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.taken.push(param.val().grad_remove(self.gradients).map(Into::into));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_goes_by_names_and_shapes() {
        let rule = |name: &str, shape: &[usize]| Init::default_for(name, shape);
        assert_eq!((rule("norm.gamma", &[4]), rule("norm.beta", &[4])), (Init::Ones, Init::Zeros));
        assert_eq!(
            (rule("gamma.weight", &[4, 9]), rule("w", &[9, 4])),
            (Init::Uniform(0.5), Init::Uniform(1.0 / 3.0))
        );
        assert_eq!(rule("conv", &[7, 4, 2, 2]), Init::Uniform(0.25));
    }

    #[test]
    fn a_value_depends_on_its_place_alone() {
        let key = Key::new(5);
        let mut values = vec![0.0; 40_001];
        Init::Normal(0.5).fill(key, &mut values);
        let expected = |i: usize| (key.normal(i as u64) * 0.5) as f32;
        assert!((0..values.len()).all(|i| values[i] == expected(i)));
        Init::Uniform(2.0).fill(key, &mut values);
        let expected = |i: usize| ((key.uniform(i as u64) * 2.0 - 1.0) * 2.0) as f32;
        assert!((0..values.len()).all(|i| values[i] == expected(i)));
    }
}
