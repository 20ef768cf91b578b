//! The gated activation of Llama and related models.

use super::autodiff::*;
use super::kernels::{map2, vectorized};
use super::math::{ELEMENTS, exp};
use super::tensors::{flex, float_type, floats, one_type, owned, rounded};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// `silu(gate) * up`, elementwise, the gated linear unit of Shazeer (2020) with `silu(x) = x / (1 + e^-x)`:
/// [`reference::swiglu`](super::reference::swiglu).
///
/// # Panics
/// If shapes or float types differ.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    let (expected, found) = (gate.dims(), up.dims());
    assert!(found == expected, "swiglu expects as many numbers as gates, {expected:?}; found {found:?}");
    one_type("swiglu", [gate.dtype(), up.dtype()]);
    let (gate, up) = (gate.into_dispatch(), up.into_dispatch());
    Tensor::from_dispatch(<Dispatch as SwigluOps>::swiglu(gate, up))
}

/// The activation as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait SwigluOps: Backend {
    /// `silu(gate) * up`.
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait SwigluKernels: SwigluOps {
    /// The gradients of gate and up, given that of the output.
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let s = 1.0 / (1.0 + exp(-x));
    // Below -87 the clamped exponential no longer grows, and its product with a large `x` would not be small.
    if x < -87.0 { 0.0 } else { s }
}

/// Replaces gate and up with their gradients.
#[inline(always)]
fn backward_of(gate: &mut f32, up: &mut f32, gradient: f32) {
    let (x, s) = (*gate, sigmoid(*gate));
    *gate = gradient * *up * (s + x * s * (1.0 - s));
    *up = gradient * x * s;
}

impl SwigluOps for Flex {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        profile::time(Part::Activation, || {
            let float = float_type(&gate);
            let (gate, up) = (owned(gate), owned(up));
            let out = map2(
                floats(&gate),
                floats(&up),
                #[inline(always)]
                |x, up| x * sigmoid(x) * up,
            );
            flex(out, gate.shape(), float)
        })
    }
}

impl SwigluKernels for Flex {
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        profile::time(Part::Activation, || backward(gate, up, gradient))
    }
}

fn backward(gate: FlexTensor, up: FlexTensor, gradient: FlexTensor) -> [FlexTensor; 2] {
    let float = float_type(&gate);
    let (mut gate, mut up, gradient) = (owned(gate), owned(up), owned(gradient));
    let parts = gate.storage_mut::<f32>().par_chunks_mut(ELEMENTS);
    let parts = parts.zip(up.storage_mut::<f32>().par_chunks_mut(ELEMENTS));
    parts.zip(floats(&gradient).par_chunks(ELEMENTS)).for_each(|((gate, up), gradient)| {
        vectorized(
            #[inline(always)]
            || {
                for ((gate, up), &gradient) in gate.iter_mut().zip(up).zip(gradient) {
                    backward_of(gate, up, gradient);
                }
            },
        );
    });
    [rounded(gate, float), rounded(up, float)]
}

#[derive(Debug)]
struct SwigluBackward;

impl<B: SwigluKernels> Backward<B, 2> for SwigluBackward {
    type State = [FloatTensor<B>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, [gate, up]) = (parents(&ops), ops.state);
        register::<B, 2>(grads, nodes, B::swiglu_backward(gate, up, gradient).map(Some));
    }
}

impl<B: SwigluKernels, C: CheckpointStrategy> SwigluOps for Autodiff<B, C> {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let nodes = [gate.node(), up.node()];
        let (gate, up) = (gate.into_primitive(), up.into_primitive());
        match SwigluBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::swiglu(gate.clone(), up.clone());
                prep.finish([gate, up], y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::swiglu(gate, up)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;

    const SHAPE: [usize; 3] = [3, 101, 67];

    /// The output, and the gradients of gate and up.
    fn run(swiglu: impl Fn(Tensor<3>, Tensor<3>) -> Tensor<3>, floats: Floats) -> [Vec<f32>; 3] {
        let leaf = |seed| floats.leaf(normal(seed, SHAPE) * 3.0);
        let (gate, up) = (leaf(1), leaf(2));
        let y = swiglu(gate.clone(), up.clone());
        let out = values(&y);
        let grads = (y * floats.of(normal(3, SHAPE))).sum().backward();
        [out, gradient(&gate, &grads), gradient(&up, &grads)]
    }

    #[test]
    fn values_and_gradients_equal_the_reference() {
        let (fast, slow) = (run(swiglu, Floats::F32), run(reference::swiglu, Floats::F32));
        for (fast, slow) in fast.iter().zip(&slow) {
            assert!(distance(fast, slow) < 1e-6);
        }
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones() {
        let wide = |seed| values(&(normal(seed, SHAPE) * 3.0)).into_iter().map(f64::from).collect::<Vec<_>>();
        let (gate, up, upstream) = (wide(1), wide(2), values(&normal(3, SHAPE)));
        let [y, d_gate, d_up] = run(swiglu, Floats::F32);
        for (i, (&x, &up)) in gate.iter().zip(&up).enumerate() {
            let (s, g) = (1.0 / (1.0 + (-x).exp()), f64::from(upstream[i]));
            let near =
                |found: f32, exact: f64| (f64::from(found) - exact).abs() < 2e-6 * exact.abs().max(1.0);
            assert!(near(y[i], x * s * up), "{x}, {up}: {}", y[i]);
            assert!(near(d_gate[i], g * up * s * (1.0 + x * (1.0 - s))), "{x}, {up}: {}", d_gate[i]);
            assert!(near(d_up[i], g * x * s), "{x}, {up}: {}", d_up[i]);
        }
    }

    #[test]
    fn far_ends_are_zero_and_the_identity() {
        let device = burn::tensor::Device::flex().autodiff();
        let gate = Tensor::<1>::from_floats([-100.0, -1e30, 0.0, 100.0, 1e6, 1e30], &device).require_grad();
        let y = swiglu(gate.clone(), gate.ones_like());
        let (found, gradient) = (values(&y), values(&gate.grad(&y.sum().backward()).unwrap()));
        assert!(found[..2].iter().chain(&gradient[..2]).all(|x| x.abs() < 1e-30), "{found:?} {gradient:?}");
        assert_eq!(found[2..], [0.0, 100.0, 1e6, 1e30]);
        assert_eq!(gradient[2..], [0.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn bf16_is_rounded_once() {
        for (found, widened) in run(swiglu, Floats::Bf16).iter().zip(run(swiglu, Floats::Widened)) {
            assert_rounded(found, &widened);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let one = with_threads(1, || run(swiglu, floats));
            assert_eq!(one, with_threads(3, || run(swiglu, floats)));
            let [gate, up] = [1, 2].map(|seed| untracked(floats.of(normal(seed, SHAPE) * 3.0)));
            assert_eq!(values(&swiglu(gate, up)), one[0]);
        }
    }

    #[test]
    #[should_panic(expected = "as many numbers as gates, [2, 3]; found [3, 2]")]
    fn shapes_that_differ_are_named() {
        swiglu(normal(1, [2, 3]), normal(2, [3, 2]));
    }
}
