//! Seeds a backward pass with an upstream gradient.
//!
//! Burn starts a backward pass only from ones. The op here is a scalar whose gradient with respect to its
//! input is exactly the given upstream gradient, so no multiplication by it is recorded.

use super::graph_depth::zero;
use crate::AnyTensor;
use crate::tensor::by_rank;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients as GraphGradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{Gradients, Tensor};

/// The seed as an op of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub trait SeedOps: Backend {
    /// Returns a scalar of shape `[1]` whose gradient with respect to `y` is `gradient`, of the shape of `y`.
    fn vjp_seed(y: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl SeedOps for Flex {
    fn vjp_seed(y: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        zero::<Self>(&y)
    }
}

#[cfg(feature = "cube")]
impl SeedOps for burn::backend::Cube {
    fn vjp_seed(y: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        zero::<Self>(&y)
    }
}

#[derive(Debug)]
struct SeedBackward;

impl<B: SeedOps> Backward<B, 1> for SeedBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut GraphGradients, _: &mut Checkpointer) {
        let _ = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, ops.state);
        }
    }
}

impl<B: SeedOps, C: CheckpointStrategy> SeedOps for Autodiff<B, C> {
    fn vjp_seed(y: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let gradient = gradient.into_primitive();
        match SeedBackward.prepare::<C>([y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::vjp_seed(y.into_primitive(), gradient.clone());
                prep.finish(gradient, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::vjp_seed(y.into_primitive(), gradient)),
        }
    }
}

/// The vector-Jacobian product: runs the backward pass of tracked `outputs`, each seeded with its upstream
/// gradient of the same shape. Integer outputs, outputs without a gradient and outputs that depend on nothing
/// tracked are skipped; returns `None` if no output remains.
pub fn vector_jacobian(outputs: Vec<(AnyTensor, Option<AnyTensor>)>) -> Option<Gradients> {
    let seeds = outputs.into_iter().filter_map(|(y, gradient)| seed(y, gradient?));
    let total = seeds.reduce(|sum, seed| sum + seed)?;
    Some(total.backward())
}

fn seed(y: AnyTensor, gradient: AnyTensor) -> Option<Tensor<1>> {
    let (AnyTensor::Float(y), AnyTensor::Float(gradient)) = (y, gradient) else { return None };
    by_rank!(y.shape().num_dims(), D => {
        let y = Tensor::<D>::from_dispatch(y);
        if !y.is_tracked() {
            return None;
        }
        let gradient = Tensor::<D>::from_dispatch(gradient);
        let (expected, found) = (y.dtype(), gradient.dtype());
        assert!(expected == found, "expected a gradient of {expected:?}, the type of the output, found one of {found:?}");
        let gradient = if gradient.device().is_autodiff() { gradient } else { gradient.autodiff() };
        Some(Tensor::from_dispatch(<Dispatch as SeedOps>::vjp_seed(y.into_dispatch(), gradient.into_dispatch())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device};

    #[test]
    fn the_seed_equals_a_multiplication_and_a_sum() {
        let device = Device::flex().autodiff();
        let x = || Tensor::<2>::from_floats([[1.0, -2.0], [0.5, 3.0]], &device).require_grad();
        let g = Tensor::<2>::from_floats([[0.1, 0.2], [-0.3, 0.4]], &device);
        let (a, b) = (x(), x());
        let mut seeded = vector_jacobian(vec![(a.clone().tanh().into(), Some(g.clone().into()))]).unwrap();
        let summed = (b.clone().tanh() * g).sum().backward();
        assert_eq!(a.grad_remove(&mut seeded).unwrap().into_data(), b.grad(&summed).unwrap().into_data());
    }

    #[test]
    fn several_outputs_are_seeded_at_once() {
        let device = Device::flex().autodiff();
        let x = Tensor::<1>::from_floats([1.0, 2.0], &device).require_grad();
        let (y, z) = (x.clone().mul_scalar(2.0), x.clone().mul_scalar(3.0));
        let one = Tensor::<1>::from_floats([1.0, 10.0], &device);
        let two = Tensor::<1>::from_floats([100.0, 1000.0], &device);
        let mut grads =
            vector_jacobian(vec![(y.into(), Some(one.into())), (z.into(), Some(two.into()))]).unwrap();
        let grad = x.grad_remove(&mut grads).unwrap().into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(grad, [302.0, 3020.0]);
    }

    #[test]
    #[should_panic(expected = "expected a gradient of BF16, the type of the output, found one of F32")]
    fn a_gradient_of_another_type_is_named() {
        let x = Tensor::<1>::from_floats([1.0], &Device::flex().autodiff()).require_grad();
        let y = x.clone().cast(DType::BF16);
        vector_jacobian(vec![(y.into(), Some(x.into()))]);
    }

    #[test]
    fn outputs_that_depend_on_nothing_tracked_are_passed_over() {
        let device = Device::flex().autodiff();
        let y = Tensor::<1>::from_floats([1.0], &device);
        assert!(vector_jacobian(vec![(y.clone().into(), Some(y.into()))]).is_none());
    }
}
