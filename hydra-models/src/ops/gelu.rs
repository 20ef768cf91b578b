//! GPT-2's activation function.

use super::autodiff::*;
use super::kernels::{map, map2};
use super::math::exp;
use super::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::Tensor;
use hydra_core::profile::{self, Part};

/// The Gaussian error linear unit in its tanh approximation (Hendrycks and Gimpel, 2016), which GPT-2 calls
/// `gelu_new`, elementwise: [`reference::gelu_tanh`](super::reference::gelu_tanh).
///
/// # Panics
/// If the elements are not `F32`, `BF16` or `F16`.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    one_type("gelu_tanh", [x.dtype()]);
    Tensor::from_dispatch(<Dispatch as GeluOps>::gelu_tanh(x.into_dispatch()))
}

/// The activation as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait GeluOps: Backend {
    /// The activation of each element.
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait GeluKernels: GeluOps {
    /// The gradient of `x`, given that of the output.
    fn gelu_tanh_backward(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

pub(super) const CUBIC: f32 = 0.044_715;
// 2 * sqrt(2 / pi): 1 + tanh(u) is 2 * sigmoid(2u).
pub(super) const TWICE_ROOT: f32 = 1.595_769;

/// A little more than the smallest sigmoid.
const SMALLEST: f32 = 1e-38;

#[inline(always)]
fn sigmoid_of_twice(x: f32) -> f32 {
    1.0 / (1.0 + exp(-TWICE_ROOT * (x + CUBIC * x * x * x)))
}

#[inline(always)]
fn derivative(x: f32) -> f32 {
    let s = sigmoid_of_twice(x);
    let rest = x * s * (1.0 - s) * TWICE_ROOT * (1.0 + 3.0 * CUBIC * x * x);
    // For large |x| the exponential no longer compensates for the square of `x`.
    s + if s <= SMALLEST || s == 1.0 { 0.0 } else { rest }
}

impl GeluOps for Flex {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        profile::time(Part::Activation, || {
            let float = float_type(&x);
            let x = owned(x);
            flex(
                map(
                    floats(&x),
                    #[inline(always)]
                    |x| x * sigmoid_of_twice(x),
                ),
                x.shape(),
                float,
            )
        })
    }
}

impl GeluKernels for Flex {
    fn gelu_tanh_backward(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        profile::time(Part::Activation, || {
            let float = float_type(&x);
            let (x, gradient) = (owned(x), owned(gradient));
            flex(
                map2(
                    floats(&gradient),
                    floats(&x),
                    #[inline(always)]
                    |g, x| g * derivative(x),
                ),
                x.shape(),
                float,
            )
        })
    }
}

#[derive(Debug)]
struct GeluBackward;

impl<B: GeluKernels> Backward<B, 1> for GeluBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::gelu_tanh_backward(ops.state, gradient));
        }
    }
}

impl<B: GeluKernels, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match GeluBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let x = x.into_primitive();
                prep.finish(x.clone(), B::gelu_tanh(x))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::gelu_tanh(x.into_primitive())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;

    #[test]
    fn values_and_gradients_equal_the_reference() {
        let x = || normal(1, [3, 7, 5]).mul_scalar(3.0).detach().require_grad();
        let (a, b, weights) = (x(), x(), normal(2, [3, 7, 5]));
        let (fast, slow) = (gelu_tanh(a.clone()), reference::gelu_tanh(b.clone()));
        assert!(distance(&values(&fast), &values(&slow)) < 1e-6);
        let untracked = gelu_tanh(untracked(a.clone()));
        assert_eq!(values(&untracked), values(&fast), "a forward without a graph has the same bits");
        let (fast, slow) = ((fast * weights.clone()).sum().backward(), (slow * weights).sum().backward());
        assert!(distance(&values(&a.grad(&fast).unwrap()), &values(&b.grad(&slow).unwrap())) < 1e-6);
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones() {
        let x = (normal(1, [1037]) * 3.0).detach().require_grad();
        let y = gelu_tanh(x.clone());
        let (found, gradient) = (values(&y), values(&x.grad(&y.sum().backward()).unwrap()));
        let root = (2.0 / std::f64::consts::PI).sqrt();
        for (x, (y, g)) in values(&x).into_iter().map(f64::from).zip(found.into_iter().zip(gradient)) {
            let t = (root * (x + 0.044715 * x.powi(3))).tanh();
            let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x);
            assert!((f64::from(y) - 0.5 * x * (1.0 + t)).abs() < 1e-6 * x.abs().max(1.0), "at {x}: {y}");
            assert!((f64::from(g) - slope).abs() < 2e-6, "gradient at {x}: {g}");
        }
    }

    #[test]
    fn bf16_is_rounded_once() {
        let run = |floats: Floats| {
            let x = floats.leaf(normal(1, [3, 7, 5]) * 3.0);
            let y = gelu_tanh(x.clone());
            let out = values(&y);
            let grads = (y * floats.of(normal(2, [3, 7, 5]))).sum().backward();
            let untracked = gelu_tanh(untracked(x.clone()));
            assert_eq!((untracked.dtype(), values(&untracked)), (x.dtype(), out.clone()));
            [out, gradient(&x, &grads)]
        };
        for (found, widened) in run(Floats::Bf16).iter().zip(run(Floats::Widened)) {
            assert_rounded(found, &widened);
        }
        assert_eq!(with_threads(1, || run(Floats::Bf16)), with_threads(3, || run(Floats::Bf16)));
    }

    #[test]
    fn far_ends_are_zero_and_the_identity() {
        let x = Tensor::<1>::from_floats([-40.0, -1e6, 0.0, 40.0, 1e6], &burn::tensor::Device::flex());
        let y = values(&gelu_tanh(x));
        assert!(y[0].abs() < 1e-20 && y[1].abs() < 1e-20, "{y:?}");
        assert_eq!(y[2..], [0.0, 40.0, 1e6]);
        for far in [12.0, 40.0, 1e6, 1e13, 1e20, 1e38] {
            assert!(derivative(-far).abs() < 1e-20 && derivative(far) == 1.0, "at {far}");
        }
        assert!(derivative(f32::NAN).is_nan());
    }
}
