//! The Gaussian error linear unit, in its tanh approximation and without it.

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
    Tensor::from_dispatch(<Dispatch as GeluOps>::gelu_in(x.into_dispatch(), GeluForm::Tanh))
}

/// The Gaussian error linear unit (Hendrycks and Gimpel, 2016): `x` times the probability that a standard normal number is
/// below it, elementwise. The probability is within 2e-7.
///
/// # Panics
/// If the elements are not `F32`, `BF16` or `F16`.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    one_type("gelu", [x.dtype()]);
    Tensor::from_dispatch(<Dispatch as GeluOps>::gelu_in(x.into_dispatch(), GeluForm::Exact))
}

/// Which of the two functions is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GeluForm {
    Tanh,
    Exact,
}

/// The activation as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait GeluOps: Backend {
    /// The activation of each element.
    fn gelu_in(x: FloatTensor<Self>, form: GeluForm) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait GeluKernels: GeluOps {
    /// The gradient of `x`, given that of the output.
    fn gelu_in_backward(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        form: GeluForm,
    ) -> FloatTensor<Self>;
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

/// The probability that a standard normal number is below `x`, with a small relative error also where it is small: the
/// complementary error function of Press et al., "Numerical Recipes" (1992), section 6.2.
#[inline(always)]
fn probability(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.170_872_77;
    for c in [
        -0.822_152_2,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = p * t + c;
    }
    // The exponential is clamped, and far ends are zero.
    let beyond = if z > 9.0 { 0.0 } else { 0.5 * t * exp(p - z * z) };
    if x < 0.0 { beyond } else { 1.0 - beyond }
}

#[inline(always)]
fn exact(x: f32) -> f32 {
    // Minus infinity times zero is no number.
    let x = if x < -1e30 { -1e30 } else { x };
    x * probability(x)
}

#[inline(always)]
fn exact_derivative(x: f32) -> f32 {
    // 1 / sqrt(2 pi)
    const PEAK: f32 = 0.398_942_3;
    let density = if x.abs() > 13.0 { 0.0 } else { PEAK * exp(-0.5 * x * x) };
    probability(x) + if density == 0.0 { 0.0 } else { x * density }
}

/// Applies a function to each element.
fn mapped(x: FloatTensor<Flex>, of: impl Fn(f32) -> f32 + Sync) -> FloatTensor<Flex> {
    profile::time(Part::Activation, || {
        let float = float_type(&x);
        let x = owned(x);
        flex(map(floats(&x), of), x.shape(), float)
    })
}

/// Multiplies each element of the gradient by a function of the input.
fn pulled(
    x: FloatTensor<Flex>,
    gradient: FloatTensor<Flex>,
    of: impl Fn(f32, f32) -> f32 + Sync,
) -> FloatTensor<Flex> {
    profile::time(Part::Activation, || {
        let float = float_type(&x);
        let (x, gradient) = (owned(x), owned(gradient));
        flex(map2(floats(&gradient), floats(&x), of), x.shape(), float)
    })
}

impl GeluOps for Flex {
    fn gelu_in(x: FloatTensor<Self>, form: GeluForm) -> FloatTensor<Self> {
        match form {
            GeluForm::Tanh => mapped(
                x,
                #[inline(always)]
                |x| x * sigmoid_of_twice(x),
            ),
            GeluForm::Exact => mapped(x, exact),
        }
    }
}

impl GeluKernels for Flex {
    fn gelu_in_backward(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        form: GeluForm,
    ) -> FloatTensor<Self> {
        match form {
            GeluForm::Tanh => pulled(
                x,
                gradient,
                #[inline(always)]
                |g, x| g * derivative(x),
            ),
            GeluForm::Exact => pulled(
                x,
                gradient,
                #[inline(always)]
                |g, x| g * exact_derivative(x),
            ),
        }
    }
}

#[derive(Debug)]
struct GeluBackward(GeluForm);

impl<B: GeluKernels> Backward<B, 1> for GeluBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::gelu_in_backward(ops.state, gradient, self.0));
        }
    }
}

impl<B: GeluKernels, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn gelu_in(x: FloatTensor<Self>, form: GeluForm) -> FloatTensor<Self> {
        match GeluBackward(form).prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let x = x.into_primitive();
                prep.finish(x.clone(), B::gelu_in(x, form))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::gelu_in(x.into_primitive(), form)),
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
    fn the_exact_unit_has_the_values_of_burn_with_and_without_a_graph() {
        let x = || normal(1, [3, 7, 95]).mul_scalar(3.0).detach().require_grad();
        let (a, b, weights) = (x(), x(), normal(2, [3, 7, 95]));
        let (fast, slow) = (gelu(a.clone()), burn::tensor::activation::gelu(b.clone()));
        assert!(distance(&values(&fast), &values(&slow)) < 1e-6);
        assert_eq!(
            values(&gelu(untracked(a.clone()))),
            values(&fast),
            "a forward without a graph has the same bits"
        );
        let (fast, slow) = ((fast * weights.clone()).sum().backward(), (slow * weights).sum().backward());
        assert!(distance(&values(&a.grad(&fast).unwrap()), &values(&b.grad(&slow).unwrap())) < 2e-6);
    }

    /// Expected values are from tables of the normal distribution.
    #[test]
    fn the_exact_unit_is_right_at_its_far_ends() {
        for (x, expected) in [(-5.0, -1.433_258e-6), (-8.0, -4.977e-15), (-12.0, -2.132e-32), (12.0, 12.0)] {
            assert!((exact(x) / expected - 1.0).abs() < 1e-3, "at {x}: {}", exact(x));
        }
        let far = [f32::MIN, -1e30, -40.0, 0.0, 40.0, f32::MAX].map(exact);
        assert!(far[..3].iter().all(|y| *y == 0.0) && far[3..] == [0.0, 40.0, f32::MAX], "{far:?}");
        assert_eq!(exact(f32::NEG_INFINITY), 0.0);
        for far in [14.0, 1e6, 1e30, f32::MAX] {
            assert!(exact_derivative(-far) == 0.0 && exact_derivative(far) == 1.0, "at {far}");
        }
        assert!(exact(f32::NAN).is_nan() && exact_derivative(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_is_rounded_once() {
        for of in [gelu_tanh, gelu] {
            let run = |floats: Floats| {
                let x = floats.leaf(normal(1, [3, 7, 5]) * 3.0);
                let y = of(x.clone());
                let out = values(&y);
                let grads = (y * floats.of(normal(2, [3, 7, 5]))).sum().backward();
                let untracked = of(untracked(x.clone()));
                assert_eq!((untracked.dtype(), values(&untracked)), (x.dtype(), out.clone()));
                [out, gradient(&x, &grads)]
            };
            for (found, widened) in run(Floats::Bf16).iter().zip(run(Floats::Widened)) {
                assert_rounded(found, &widened);
            }
            assert_eq!(with_threads(1, || run(Floats::Bf16)), with_threads(3, || run(Floats::Bf16)));
        }
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
