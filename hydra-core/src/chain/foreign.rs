//! A computation outside Burn as one node of Burn's graph: a layer that calls another library computes its outputs there,
//! and its backward pass there too.

use super::graph_depth::zero;
use crate::{Activation, AnyTensor, HostTensor};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{
    AllocationProperty, Bytes, DType, Device, FloatDType, Shape, Tensor, TensorData, read_sync,
};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// The backward pass of a computation outside Burn. It takes the gradient of each output, `None` for integers and for
/// outputs that the loss does not depend on, and returns the gradient of each input, of the input's shape.
pub type ForeignBackward = Box<dyn FnOnce(Vec<Option<HostTensor>>) -> Vec<Option<HostTensor>> + Send>;

/// Returns outputs that were computed outside Burn from `inputs` as tensors of a CPU's autodiff device.
///
/// `backward` runs once in the backward pass, after the gradients of all outputs are known, and is dropped with the graph
/// if there is none. With `is_trained` it runs although no input needs a gradient, for parameters whose gradients it keeps
/// itself. All outputs have one depth in the graph, so that results do not depend on cuts.
///
/// # Panics
/// If `device` is not a CPU, or a tensor has no dimension or more than eight.
pub fn foreign(
    inputs: &Activation,
    outputs: Vec<HostTensor>,
    is_trained: bool,
    backward: ForeignBackward,
    device: &Device,
) -> Activation {
    let device = device.clone().autodiff();
    let of_inputs = vec![None; inputs.parts().len()];
    let call = Call(Arc::new(Mutex::new(ForeignState {
        gradients: vec![None; outputs.len()],
        of_inputs,
        backward: Some(backward),
    })));
    let root = Tensor::<1>::zeros([1], &device);
    let root = if is_trained { root.require_grad() } else { root };
    let mut node = root.into_dispatch();
    for (index, part) in inputs.parts().iter().enumerate() {
        if let AnyTensor::Float(x) = part {
            node = <Dispatch as ForeignOps>::foreign_input(node, x.clone(), call.clone(), index);
        }
    }
    let node = <Dispatch as ForeignOps>::foreign_call(node, call.clone());
    let outputs = outputs.into_iter().enumerate().map(|(index, output)| match output.to_device(&device) {
        AnyTensor::Float(y) => {
            AnyTensor::Float(<Dispatch as ForeignOps>::foreign_output(node.clone(), y, call.clone(), index))
        }
        int => int,
    });
    outputs.collect()
}

/// The state that the nodes of a computation share.
#[derive(Clone)]
pub(crate) struct Call(Arc<Mutex<ForeignState>>);

struct ForeignState {
    gradients: Vec<Option<HostTensor>>,
    of_inputs: Vec<Option<HostTensor>>,
    backward: Option<ForeignBackward>,
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

impl Call {
    fn with<T>(&self, change: impl FnOnce(&mut ForeignState) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn run(&self) {
        let (backward, gradients) =
            self.with(|state| (state.backward.take(), std::mem::take(&mut state.gradients)));
        // Outside the lock: the backward pass may panic.
        let Some(backward) = backward else { return };
        let of_inputs = backward(gradients);
        self.with(|state| {
            state.of_inputs.iter_mut().zip(of_inputs).for_each(|(of, gradient)| *of = gradient);
        });
    }
}

/// The nodes as ops of the backends: a root, one for each float input, the computation, and one for each float output.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait ForeignOps: Backend {
    /// Returns a scalar that depends on `node` and on the input `x`, the one at `index`.
    fn foreign_input(
        node: FloatTensor<Self>,
        x: FloatTensor<Self>,
        call: Call,
        index: usize,
    ) -> FloatTensor<Self>;

    /// Returns a scalar that depends on `node` and whose backward is the computation's.
    fn foreign_call(node: FloatTensor<Self>, call: Call) -> FloatTensor<Self>;

    /// Returns `y`, the output at `index`, which depends on `node`.
    fn foreign_output(
        node: FloatTensor<Self>,
        y: FloatTensor<Self>,
        call: Call,
        index: usize,
    ) -> FloatTensor<Self>;
}

/// Values are computed outside, so the ops of a backend only pass tensors on.
macro_rules! pass_on {
    ($backend:ty) => {
        impl ForeignOps for $backend {
            fn foreign_input(
                node: FloatTensor<Self>,
                _: FloatTensor<Self>,
                _: Call,
                _: usize,
            ) -> FloatTensor<Self> {
                node
            }

            fn foreign_call(node: FloatTensor<Self>, _: Call) -> FloatTensor<Self> {
                node
            }

            fn foreign_output(
                _: FloatTensor<Self>,
                y: FloatTensor<Self>,
                _: Call,
                _: usize,
            ) -> FloatTensor<Self> {
                y
            }
        }
    };
}

pass_on!(Flex);
#[cfg(feature = "cube")]
pass_on!(burn::backend::Cube);

#[derive(Debug)]
struct InputBackward;

impl<B: Backend> Backward<B, 2> for InputBackward {
    type State = (Call, usize, Shape);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let scalar = grads.consume::<B>(&ops.node);
        let (call, index, shape) = ops.state;
        let [root, x] = ops.parents;
        if let Some(x) = x {
            let gradient = match call.with(|state| state.of_inputs[index].take()) {
                Some(gradient) => of_host::<B>(gradient, &shape, &scalar),
                // The graph before the input expects a gradient.
                None => B::float_zeros(shape, &scalar.device(), FloatDType::F32),
            };
            grads.register::<B>(x.id, gradient);
        }
        if let Some(root) = root {
            grads.register::<B>(root.id, scalar);
        }
    }
}

fn of_host<B: Backend>(gradient: HostTensor, shape: &Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    let HostTensor { bytes, shape: found, dtype } = gradient;
    assert!(
        dtype == DType::F32 && found[..] == shape[..],
        "expected a gradient of F32 and of the input's shape {shape:?}, found {dtype:?} and {found:?}"
    );
    let bytes = Bytes::from_shared(bytes, AllocationProperty::Native);
    B::float_from_data(TensorData::from_bytes(bytes, found, dtype), &like.device())
}

#[derive(Debug)]
struct CallBackward;

impl<B: Backend> Backward<B, 1> for CallBackward {
    type State = Call;

    fn backward(self, ops: Ops<Call, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let scalar = grads.consume::<B>(&ops.node);
        ops.state.run();
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, scalar);
        }
    }
}

#[derive(Debug)]
struct OutputBackward;

impl<B: Backend> Backward<B, 1> for OutputBackward {
    type State = (Call, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let scalar = zero::<B>(&gradient);
        let data = read_sync(B::float_into_data(gradient));
        let data = data.unwrap_or_else(|error| panic!("a gradient could not be read: {error:?}"));
        let (call, index) = ops.state;
        call.with(|state| state.gradients[index] = Some(data.into()));
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, scalar);
        }
    }
}

impl<B: ForeignOps, C: CheckpointStrategy> ForeignOps for Autodiff<B, C> {
    fn foreign_input(
        node: FloatTensor<Self>,
        x: FloatTensor<Self>,
        call: Call,
        index: usize,
    ) -> FloatTensor<Self> {
        let prep = InputBackward.prepare::<C>([node.node(), x.node()]).compute_bound();
        let state = (call.clone(), index, x.shape());
        let y = B::foreign_input(node.into_primitive(), x.into_primitive(), call, index);
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn foreign_call(node: FloatTensor<Self>, call: Call) -> FloatTensor<Self> {
        let prep = CallBackward.prepare::<C>([node.node()]).compute_bound();
        let y = B::foreign_call(node.into_primitive(), call.clone());
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish(call, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn foreign_output(
        node: FloatTensor<Self>,
        y: FloatTensor<Self>,
        call: Call,
        index: usize,
    ) -> FloatTensor<Self> {
        let prep = OutputBackward.prepare::<C>([node.node()]).compute_bound();
        let y = B::foreign_output(node.into_primitive(), y.into_primitive(), call.clone(), index);
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish((call, index), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(values: [f32; 2]) -> Tensor<1> {
        Tensor::<1>::from_floats(values, &Device::flex().autodiff()).require_grad()
    }

    fn values(x: impl Into<AnyTensor>) -> Vec<f32> {
        x.into().into_host().as_f32().to_vec()
    }

    /// The sum and the product of two tensors, with the gradients that are written out.
    fn sum_and_product(a: &Tensor<1>, b: &Tensor<1>) -> Activation {
        let (x, y) = (values(a.clone()), values(b.clone()));
        let both = |f: fn(f32, f32) -> f32| {
            HostTensor::float(x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect(), [2])
        };
        let outputs = vec![both(|x, y| x + y), HostTensor::int(vec![7], [1]), both(|x, y| x * y)];
        let backward = Box::new(move |gradients: Vec<Option<HostTensor>>| {
            let of = |index: usize| {
                gradients[index].as_ref().map_or(vec![0.0; 2], |gradient| gradient.as_f32().to_vec())
            };
            let (sum, product) = (of(0), of(2));
            let with = |other: &[f32]| (0..2).map(|i| sum[i] + product[i] * other[i]).collect();
            vec![Some(HostTensor::float(with(&y), [2])), Some(HostTensor::float(with(&x), [2]))]
        });
        let inputs = Activation::of(a.clone()).and(b.clone());
        foreign(&inputs, outputs, false, backward, &Device::flex())
    }

    #[test]
    fn gradients_are_those_of_the_same_computation_in_burn() {
        let [(a, b), (c, d)] = [(); 2].map(|()| (leaf([1.5, -2.0]), leaf([0.25, 3.0])));
        let y = sum_and_product(&a.clone().sin(), &b);
        assert_eq!(y.part(1).into_host(), HostTensor::int(vec![7], [1]));
        let loss = y.part(0).into_float::<1>().mul_scalar(3.0) + y.part(2).into_float::<1>();
        let grads = loss.sum().backward();
        let sin = c.clone().sin();
        let loss = (sin.clone() + d.clone()).mul_scalar(3.0) + sin * d.clone();
        let expected = loss.sum().backward();
        assert_eq!(values(a.grad(&grads).unwrap()), values(c.grad(&expected).unwrap()));
        assert_eq!(values(b.grad(&grads).unwrap()), values(d.grad(&expected).unwrap()));
    }

    #[test]
    fn an_output_that_the_loss_does_not_use_has_no_gradient() {
        let (a, b) = (leaf([1.0, 2.0]), leaf([3.0, 5.0]));
        let y = sum_and_product(&a, &b);
        let grads = y.part(2).into_float::<1>().sum().backward();
        assert_eq!(values(a.grad(&grads).unwrap()), [3.0, 5.0]);
    }

    #[test]
    fn parameters_are_trained_where_no_input_has_a_gradient() {
        let ran = |is_trained: bool| {
            let ran = Arc::new(Mutex::new(None));
            let of_call = Arc::clone(&ran);
            let backward = Box::new(move |gradients: Vec<Option<HostTensor>>| {
                *of_call.lock().unwrap() = gradients[0].as_ref().map(|gradient| gradient.as_f32().to_vec());
                vec![None]
            });
            let x = Activation::of(Tensor::<1>::ones([2], &Device::flex().autodiff()));
            let output = vec![HostTensor::float(vec![1.0, 2.0], [2])];
            let y = foreign(&x, output, is_trained, backward, &Device::flex()).into_float::<1>();
            if y.is_tracked() {
                drop(y.mul_scalar(2.0).sum().backward());
            }
            ran.lock().unwrap().clone()
        };
        assert_eq!((ran(true), ran(false)), (Some(vec![2.0; 2]), None));
    }

    #[test]
    fn an_input_without_a_gradient_has_zeros() {
        let a = leaf([1.0, 2.0]);
        let backward = Box::new(|_: Vec<Option<HostTensor>>| vec![None]);
        let x = Activation::of(a.clone().sin());
        let y = foreign(&x, vec![HostTensor::float(vec![1.0], [1])], false, backward, &Device::flex());
        let grads = y.into_float::<1>().backward();
        assert_eq!(values(a.grad(&grads).unwrap()), [0.0; 2]);
    }
}
