//! Equalizes the graph depth of every layer's output, so that results do not depend on cuts: all tensors of
//! an output get one depth in the autodiff graph, and on GPUs row-major memory order.

use crate::{Activation, AnyTensor};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, DispatchTensor, FloatDType, Shape};

/// Returns the same values; every float tensor gets its own graph node, all at the same depth.
///
/// A backward pass adds the gradients of a tensor in the order of its consumers' depth, deepest first. A
/// tensor that passes unchanged through several layers would have consumers in all of them; their order would
/// differ between a whole chain and a cut one. Because every layer's output passes through this function, the
/// gradients at each boundary are complete before the preceding layer receives them, and the bits do not
/// depend on cuts. An output with a single float tensor is returned unchanged.
pub(crate) fn equalize_depth(x: Activation) -> Activation {
    let x = row_major(x);
    if x.parts().iter().filter(|part| part.is_float()).count() < 2 {
        return x;
    }
    let floats = x.parts().iter().filter_map(|part| match part {
        AnyTensor::Float(tensor) => Some(tensor.clone()),
        AnyTensor::Int(_) => None,
    });
    let Some(deepest) = floats.reduce(<Dispatch as GraphDepthOps>::join_depth) else { return x };
    let raise_depth =
        |tensor: DispatchTensor| <Dispatch as GraphDepthOps>::raise_depth(tensor, deepest.clone());
    let parts = x.into_parts().into_iter().map(|part| match part {
        AnyTensor::Float(tensor) => AnyTensor::Float(raise_depth(tensor)),
        int => int,
    });
    parts.collect()
}

/// Returns the same values with tensors of GPUs, and their gradients, in row-major order.
///
/// CubeCL kernels return tensors in other orders (a convolution puts the channels last), and the order of
/// summation over them depends on it. At a cut tensors are copied in row-major order, so they must also have
/// that order in a whole chain. Sums on the CPU do not depend on the memory order.
fn row_major(x: Activation) -> Activation {
    if cfg!(not(feature = "cube")) {
        return x;
    }
    let ordered = |part: AnyTensor| match (is_on_gpu(&part), part) {
        (true, AnyTensor::Float(tensor)) => AnyTensor::Float(<Dispatch as GraphDepthOps>::row_major(tensor)),
        (_, part) => part,
    };
    x.into_parts().into_iter().map(ordered).collect()
}

#[cfg(feature = "cube")]
fn is_on_gpu(part: &AnyTensor) -> bool {
    part.float_device().is_some_and(|device| crate::cube::place(&device).is_some())
}

#[cfg(not(feature = "cube"))]
fn is_on_gpu(_: &AnyTensor) -> bool {
    false
}

/// The operations as ops of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait GraphDepthOps: Backend {
    /// Returns a scalar that is deeper than both inputs and has no gradient.
    fn join_depth(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Returns `x` with a depth above its own and that of `other`.
    fn raise_depth(x: FloatTensor<Self>, other: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Returns `x` in row-major order, and its gradient likewise.
    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// A scalar zero on the device of `like`.
pub(super) fn zero<B: Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros(Shape::new([1]), &like.device(), FloatDType::from(DType::F32))
}

impl GraphDepthOps for Flex {
    fn join_depth(a: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        zero::<Self>(&a)
    }

    fn raise_depth(x: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }

    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

#[cfg(feature = "cube")]
impl GraphDepthOps for burn::backend::Cube {
    fn join_depth(a: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        zero::<Self>(&a)
    }

    fn raise_depth(x: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }

    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self> {
        burn_cubecl::kernel::into_contiguous(x)
    }
}

#[derive(Debug)]
struct JoinDepthBackward;

impl<B: Backend> Backward<B, 2> for JoinDepthBackward {
    type State = ();

    fn backward(self, _: Ops<(), 2>, _: &mut Gradients, _: &mut Checkpointer) {}
}

#[derive(Debug)]
struct RaiseDepthBackward;

impl<B: Backend> Backward<B, 2> for RaiseDepthBackward {
    type State = ();

    fn backward(self, ops: Ops<(), 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node), _] = ops.parents {
            grads.register::<B>(node.id, gradient);
        }
    }
}

#[derive(Debug)]
struct RowMajorBackward;

impl<B: GraphDepthOps> Backward<B, 1> for RowMajorBackward {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::row_major(gradient));
        }
    }
}

impl<B: GraphDepthOps, C: CheckpointStrategy> GraphDepthOps for Autodiff<B, C> {
    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let prep = RowMajorBackward.prepare::<C>([x.node()]).compute_bound();
        prep.stateless(B::row_major(x.into_primitive()))
    }

    fn join_depth(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        let prep = JoinDepthBackward.prepare::<C>([a.node(), b.node()]).compute_bound();
        prep.stateless(B::join_depth(a.into_primitive(), b.into_primitive()))
    }

    fn raise_depth(x: FloatTensor<Self>, other: FloatTensor<Self>) -> FloatTensor<Self> {
        let prep = RaiseDepthBackward.prepare::<C>([x.node(), other.node()]).compute_bound();
        prep.stateless(B::raise_depth(x.into_primitive(), other.into_primitive()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Tensor};

    fn leaf<const N: usize>(values: [f32; N]) -> Tensor<1> {
        Tensor::from_floats(values, &Device::flex().autodiff()).require_grad()
    }

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        AnyTensor::from(tensor).into_host().as_f32().to_vec()
    }

    #[test]
    fn values_and_gradients_pass_through() {
        let (a, b) = (leaf([0.5, -1.0]), leaf([1.0, 2.0, 3.0]));
        let y = equalize_depth(Activation::of(a.clone() * 3.0).and(b.clone() * 2.0));
        let (x, y) = (y.part(0).into_float::<1>(), y.part(1).into_float::<1>());
        assert_eq!(values(x.clone()), [1.5, -3.0]);
        let grads = (x.sum() + y.sum()).backward();
        assert_eq!(values(a.grad(&grads).unwrap()), [3.0; 2]);
        assert_eq!(values(b.grad(&grads).unwrap()), [2.0; 3]);
    }

    #[test]
    fn a_tensor_that_nothing_uses_gets_no_gradient() {
        let (a, b) = (leaf([1.0]), leaf([2.0]));
        let y = equalize_depth(Activation::of(a.clone()).and(b.clone()));
        let grads = y.part(0).into_float::<1>().sum().backward();
        assert!(a.grad(&grads).is_some() && b.grad(&grads).is_none());
    }
}
