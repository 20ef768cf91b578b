//! Tensors at the boundaries of layers, in row-major order.
//!
//! CubeCL's convolutions leave images with the channels last, and Burn's sums over them take an order that
//! depends on it. Where a chain is cut, tensors travel in row-major order, so that they must have it where it is
//! whole: else bits would depend on cuts.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Cube, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

/// The same numbers in row-major order, and their gradient likewise, on CubeCL's devices; on the CPU, whose sums do
/// not depend on it, `x` itself.
pub(crate) fn row_major<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as LayoutOps>::row_major(x.into_dispatch()))
}

/// The layout as an op of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait LayoutOps: Backend {
    /// `x` in row-major order.
    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl LayoutOps for Flex {
    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

impl LayoutOps for Cube {
    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self> {
        burn_cubecl::kernel::into_contiguous(x)
    }
}

#[derive(Debug)]
struct LayoutBackward;

impl<B: LayoutOps> Backward<B, 1> for LayoutBackward {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::row_major(gradient));
        }
    }
}

impl<B: LayoutOps, C: CheckpointStrategy> LayoutOps for Autodiff<B, C> {
    fn row_major(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match LayoutBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), B::row_major(x.into_primitive())),
            OpsKind::UnTracked(prep) => prep.finish(B::row_major(x.into_primitive())),
        }
    }
}
