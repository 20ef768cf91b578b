//! The layer: the smallest unit a chain is cut at.
//!
//! Burn's `Module` cannot be a trait object, because its visitors are generic over a tensor's rank. So
//! users implement [`Forward`] for their modules, one method over [`Activation`], and every such module is
//! a [`Layer`] by the blanket implementation, object-safe and without type parameters: chains are
//! `Box<dyn Layer>` and neither the partitioner nor the scheduler knows a model's type.

use crate::{Activation, AnyTensor, DeviceTensor, HostTensor, Key, Pass, activation::by_rank, level::level};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, DispatchTensor, Gradients, Shape, Tensor};
use rayon::prelude::*;

/// How a parameter gets its first values, element by element, as a function of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean zero and this standard deviation.
    Normal(f64),
    /// Uniform in plus or minus this bound.
    Uniform(f64),
}

impl Init {
    /// The default for a parameter by its field's name and its shape: ones for `gamma` (norms), zeros for
    /// other vectors, and uniform in `1 / sqrt(fan_in)` for matrices and kernels, as Burn's `Linear` and
    /// convolutions do. A matrix is `[in, out]`, a kernel `[out, in, ..]`.
    pub fn default_for(name: &str, shape: &[usize]) -> Self {
        let field = name.rsplit('.').next().unwrap_or(name);
        match shape {
            _ if field == "gamma" => Self::Ones,
            [] | [_] => Self::Zeros,
            [fan_in, _] => Self::Uniform(1.0 / (*fan_in as f64).sqrt()),
            [_, rest @ ..] => Self::Uniform(1.0 / (rest.iter().product::<usize>() as f64).sqrt()),
        }
    }

    /// Fills `out` with the values that `key` gives, in parallel: a value depends on its place alone.
    pub fn fill(self, key: Key, out: &mut [f32]) {
        match self {
            Self::Zeros => out.fill(0.0),
            Self::Ones => out.fill(1.0),
            Self::Normal(std) => drawn(out, |i| (key.normal(i) * std) as f32),
            Self::Uniform(bound) => drawn(out, |i| ((key.uniform(i) * 2.0 - 1.0) * bound) as f32),
        }
    }
}

fn drawn(out: &mut [f32], value: impl Fn(u64) -> f32 + Sync) {
    const PART: usize = 1 << 14;
    out.par_chunks_mut(PART).enumerate().for_each(|(part, values)| {
        values.iter_mut().zip((part * PART) as u64..).for_each(|(out, i)| *out = value(i));
    });
}

/// What users write: a Burn module with one forward.
///
/// The module's parameters may be lazy (Hydra gives them their first values, by [`init`](Self::init)) or
/// hold values already (those are taken). Every random number must come from the pass; a layer keeps no
/// state from one forward to the next, so running statistics are not supported.
pub trait Forward: Module {
    /// The layer's output for `x`. The last layer of a chain returns the mean loss, of shape `[1]`, and
    /// finds what to compare with in [`Pass::targets`].
    ///
    /// Wrong shapes may panic: the panic fails the task with its message and harms no other.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation;

    /// How the lazy parameter `name` (a path such as `attn.weight`) of `shape` gets its first values.
    fn init(&self, name: &str, shape: &[usize]) -> Init {
        Init::default_for(name, shape)
    }

    /// Bytes that the layer's forward and backward need on a device beside parameters, gradients and
    /// boundary, for an input of these shapes. Used only where memory cannot be measured; the default,
    /// `None`, makes the partitioner take a generous multiple of the boundary.
    fn working_bytes(&self, _inputs: &[Vec<usize>]) -> Option<u64> {
        None
    }
}

/// A parameter of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamInfo {
    /// The path of fields, such as `attn.weight`.
    pub name: String,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Burn's identity. Layers whose parameters have the same identity share (tie) them.
    pub id: ParamId,
}

/// A layer without its type.
///
/// Values of it are *hollow* (parameters have names and shapes, no memory) or *resident* (promoted).
pub trait Layer: Send + Sync {
    /// The float parameters in the module's order.
    fn params(&self) -> Vec<ParamInfo>;

    /// The values that parameters held when the module was given, `None` for lazy ones.
    fn given(&self) -> Vec<Option<HostTensor>>;

    /// How a lazy parameter gets its first values.
    fn init(&self, name: &str, shape: &[usize]) -> Init;

    /// See [`Forward::working_bytes`].
    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64>;

    /// A copy whose parameters hold no memory.
    fn hollow(&self) -> Box<dyn Layer>;

    /// A resident copy on `device` with these parameters, in the order of [`params`](Self::params).
    /// With `track`, the parameters gather gradients; `device` must then be an autodiff device.
    fn promote(&self, params: &[DeviceTensor], device: &Device, track: bool) -> Box<dyn Layer>;

    /// The output for `x`.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation;

    /// Takes the gradients of this resident, tracked layer's parameters, in the order of
    /// [`params`](Self::params); `None` for a parameter that the loss does not reach.
    fn take_gradients(&self, gradients: &mut Gradients) -> Vec<Option<AnyTensor>>;
}

impl<M: Forward + Sync + 'static> Layer for M {
    fn params(&self) -> Vec<ParamInfo> {
        let mut list = ListParams::default();
        self.visit(&mut list);
        list.params
    }

    fn given(&self) -> Vec<Option<HostTensor>> {
        let mut given = Given(Vec::new());
        self.visit(&mut given);
        given.0
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        Forward::init(self, name, shape)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        Forward::working_bytes(self, inputs)
    }

    fn hollow(&self) -> Box<dyn Layer> {
        Box::new(self.clone().map(&mut Hollow))
    }

    fn promote(&self, params: &[DeviceTensor], device: &Device, track: bool) -> Box<dyn Layer> {
        let mut promote = Promote { params: params.iter(), device, track };
        Box::new(self.clone().map(&mut promote))
    }

    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        level(Forward::forward(self, x, pass))
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
        // `lazy_shape` does not initialise a lazy parameter.
        let shape = param.lazy_shape().to_vec();
        self.params.push(ParamInfo { name: self.path.join("."), shape, id: param.id });
    }
}

struct Given(Vec<Option<HostTensor>>);

impl ModuleVisitor for Given {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.is_initialized().then(|| AnyTensor::from(param.val()).into_host());
        self.0.push(value);
    }
}

struct Hollow;

impl ModuleMapper for Hollow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Clones of a lazy parameter share its initialisation, so a new parameter takes its place.
        let shape: Shape = param.lazy_shape();
        let absent = |_: &Device, _: bool| panic!("a parameter of a hollow layer was read");
        Param::uninitialized(param.id, absent, Device::flex(), true, shape)
    }
}

struct Promote<'a> {
    params: std::slice::Iter<'a, DeviceTensor>,
    device: &'a Device,
    track: bool,
}

impl ModuleMapper for Promote<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(resident) = self.params.next() else {
            panic!("fewer parameters were given than the layer has");
        };
        let tensor: Tensor<D> = resident.to_device(self.device).into_float();
        let tensor = if self.track { tensor.require_grad() } else { tensor };
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

/// Adds a scalar factor to a loss of shape `[1]`, for microbatches that weigh less than the whole.
pub(crate) fn scale(loss: AnyTensor, factor: f64) -> AnyTensor {
    match loss {
        AnyTensor::Float(t) if factor != 1.0 => scale_float(t, factor),
        loss => loss,
    }
}

fn scale_float(tensor: DispatchTensor, factor: f64) -> AnyTensor {
    use burn::backend::TensorMetadata;
    by_rank!(tensor.shape().num_dims(), D => {
        Tensor::<D>::from_dispatch(tensor).mul_scalar(factor as f32).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
