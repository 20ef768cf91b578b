//! A tensor with several readers whose gradients are accumulated in place.

use super::autodiff::*;
use super::kernels::{map2, vectorized};
use super::math::ELEMENTS;
use super::tensors::{flex, float_type, floats, owned, rounded};
#[cfg(feature = "cube")]
use burn::backend::ops::FloatTensorOps;
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// `x` for each of its readers.
///
/// The readers' gradients are summed as for clones of `x`, in an order that depends on the graph alone, but on the
/// threads of the current pool and without memory for the sum.
pub fn fork<const D: usize, const N: usize>(x: Tensor<D>) -> [Tensor<D>; N] {
    if !x.is_tracked() {
        return std::array::from_fn(|_| x.clone());
    }
    // A leaf of the graph gets a single reader: its gradient stays available to callers, so it cannot be accumulated in
    // place.
    let x = <Dispatch as ForkOps>::reader(x.into_dispatch(), HasGradient::default());
    let begun = HasGradient::default();
    std::array::from_fn(|_| Tensor::from_dispatch(<Dispatch as ForkOps>::reader(x.clone(), begun.clone())))
}

/// True once a reader has registered a gradient.
type HasGradient = Arc<AtomicBool>;

/// Readers as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait ForkOps: Backend {
    /// `x`, for one of its readers.
    fn reader(x: FloatTensor<Self>, begun: HasGradient) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait ForkKernels: ForkOps {
    /// The sum of two gradients of the same shape and type.
    fn sum(before: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl ForkOps for Flex {
    fn reader(x: FloatTensor<Self>, _: HasGradient) -> FloatTensor<Self> {
        x
    }
}

impl ForkKernels for Flex {
    fn sum(before: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let float = float_type(&gradient);
        let (mut sum, gradient) = (owned(before), owned(gradient));
        rounded(if add_in_place(&mut sum, floats(&gradient)) { sum } else { added(&sum, &gradient) }, float)
    }
}

/// Adds `values` to a tensor if it has no other reader.
fn add_in_place(sum: &mut FlexTensor, values: &[f32]) -> bool {
    let Some(out) = sum.try_storage_mut::<f32>().filter(|out| out.len() == values.len()) else {
        return false;
    };
    out.par_chunks_mut(ELEMENTS).zip(values.par_chunks(ELEMENTS)).for_each(|(out, values)| {
        vectorized(
            #[inline(always)]
            || out.iter_mut().zip(values).for_each(|(out, x)| *out += x),
        );
    });
    true
}

fn added(a: &FlexTensor, b: &FlexTensor) -> FlexTensor {
    flex(map2(floats(a), floats(b), |a, b| a + b), a.shape(), float_type(a))
}

#[cfg(feature = "cube")]
impl ForkOps for burn::backend::Cube {
    fn reader(x: FloatTensor<Self>, _: HasGradient) -> FloatTensor<Self> {
        x
    }
}

#[cfg(feature = "cube")]
impl ForkKernels for burn::backend::Cube {
    fn sum(before: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        <Self as FloatTensorOps<Self>>::float_add(gradient, before)
    }
}

#[derive(Debug)]
struct ReaderBackward;

impl<B: ForkKernels> Backward<B, 1> for ReaderBackward {
    type State = HasGradient;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [Some(node)] = ops.parents else { return };
        let gradient = match ops.state.swap(true, Ordering::Relaxed) {
            // The gradient that earlier readers have registered.
            true => B::sum(grads.consume::<B>(&node), gradient),
            false => gradient,
        };
        grads.register::<B>(node.id, gradient);
    }
}

impl<B: ForkKernels, C: CheckpointStrategy> ForkOps for Autodiff<B, C> {
    fn reader(x: FloatTensor<Self>, begun: HasGradient) -> FloatTensor<Self> {
        match ReaderBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(begun, x.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(x.into_primitive()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{normal, with_threads};
    use super::*;
    use burn::tensor::{DType, Device};

    /// A leaf, or a tensor computed from it: `[40, 900]`.
    fn read(x: &Tensor<2>, inner: bool) -> Tensor<2> {
        if inner { x.clone().mul_scalar(1.5) } else { x.clone() }
    }

    fn backward(x: &Tensor<2>, y: Tensor<2>) -> Vec<u8> {
        let mut gradients = y.sum().backward();
        x.grad_remove(&mut gradients).unwrap().into_data().bytes().to_vec()
    }

    #[test]
    fn gradients_are_added_as_those_of_clones_are() {
        let readers = |[a, b]: [Tensor<2>; 2]| a.tanh() + b.exp();
        for (inner, dtype) in [(true, DType::F32), (false, DType::F32), (true, DType::BF16)] {
            let x = || normal::<2>(3, [40, 900]).cast(dtype).require_grad();
            let (forked, cloned) = (x(), x());
            let y = read(&cloned, inner);
            let expected = backward(&cloned, readers([y.clone(), y]));
            let found = backward(&forked, readers(fork(read(&forked, inner))));
            assert_eq!(found, expected, "{inner}, {dtype:?}");
        }
    }

    #[test]
    fn gradients_of_three_readers_are_added_in_one_order_on_any_threads() {
        let gradient = || {
            let x = normal::<2>(3, [40, 900]).require_grad();
            let [a, b, c] = fork(read(&x, true));
            backward(&x, a.powi_scalar(2) + b.exp() + c.mul_scalar(0.7))
        };
        let one = with_threads(1, gradient);
        assert_eq!(with_threads(3, gradient), one);
        // 1.5 times the derivatives at `y = 1.5 x`.
        let x: Vec<f32> = normal::<2>(3, [40, 900]).into_data().try_to_vec().unwrap();
        for (gradient, x) in one.chunks_exact(4).zip(x) {
            let (gradient, y) = (f32::from_le_bytes(gradient.try_into().unwrap()), 1.5 * x);
            let expected = 1.5 * (2.0 * y + y.exp() + 0.7);
            assert!((gradient - expected).abs() <= 1e-4 * (1.0 + expected.abs()), "{gradient} {expected}");
        }
    }

    #[test]
    fn a_reader_that_leads_nowhere_adds_nothing() {
        let x = normal::<2>(3, [4, 9]).require_grad();
        let [a, b, _] = fork(x.clone().mul_scalar(2.0));
        drop(b.exp());
        let gradients = a.mul_scalar(5.0).sum().backward();
        assert_eq!(
            x.grad(&gradients).unwrap().into_data(),
            Tensor::<2>::full([4, 9], 10.0, &Device::flex()).into_data()
        );
    }

    #[test]
    fn what_is_read_elsewhere_is_not_written() {
        let (before, gradient) = (vec![1.0, 2.0], vec![10.0, 20.0]);
        let before = flex(before, [2], hydra_core::FloatType::F32);
        let gradient = || flex(gradient.clone(), [2], hydra_core::FloatType::F32);
        let read = before.clone();
        let sum = Flex::sum(before, gradient());
        assert_eq!((floats(&read), floats(&sum)), (&[1.0, 2.0][..], &[11.0, 22.0][..]));
        let place = floats(&sum).as_ptr();
        drop(read);
        let again = Flex::sum(sum, gradient());
        assert_eq!((floats(&again), floats(&again).as_ptr()), (&[21.0, 42.0][..], place));
    }

    #[test]
    fn an_untracked_tensor_is_its_own_reader() {
        let x = Tensor::<1>::from_floats([1.0, 2.0], &Device::flex());
        let [a, b] = fork(x.clone());
        assert_eq!((a.into_data(), b.into_data()), (x.clone().into_data(), x.into_data()));
    }
}
