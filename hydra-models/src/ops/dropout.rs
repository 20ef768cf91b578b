//! Dropout, alone or added to a residual, with masks generated on the fly.
//!
//! Burn's own product would save its factors, and its graph table would keep the inputs of an untracked forward until
//! the next backward; here only the mask's key is saved.

use super::autodiff::*;
use super::kernels::vectorized;
use super::math::ELEMENTS;
use super::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use hydra_core::{DropoutMask, Site};
use rayon::prelude::*;

/// [`Site::dropout`] of `x`, bit-identical.
///
/// # Panics
/// If the elements are not `F32`, `BF16` or `F16`.
pub fn dropout<const D: usize>(x: Tensor<D>, probability: f64, site: Site) -> Tensor<D> {
    one_type("dropout", [x.dtype()]);
    match site.dropout_mask(probability) {
        Some(mask) => Tensor::from_dispatch(<Dispatch as DropoutOps>::drop_out(x.into_dispatch(), mask)),
        None => x,
    }
}

/// `residual` plus the dropout of `x`; both have the same shape.
///
/// # Panics
/// If shapes or float types differ.
pub fn dropout_onto<const D: usize>(residual: Tensor<D>, x: Tensor<D>, mask: DropoutMask) -> Tensor<D> {
    assert_eq!(residual.dims(), x.dims(), "the residual and the addend have different shapes");
    one_type("dropout_onto", [residual.dtype(), x.dtype()]);
    let (residual, x) = (residual.into_dispatch(), x.into_dispatch());
    Tensor::from_dispatch(<Dispatch as DropoutOps>::drop_out_onto(residual, x, mask))
}

/// Dropout as backend ops.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait DropoutOps: Backend {
    /// `x` times its factors.
    fn drop_out(x: FloatTensor<Self>, mask: DropoutMask) -> FloatTensor<Self>;

    /// `residual` plus `x` times its factors.
    fn drop_out_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        mask: DropoutMask,
    ) -> FloatTensor<Self>;
}

/// The factors times `x`, plus the residual.
fn dropped(residual: Option<FlexTensor>, x: FlexTensor, mask: DropoutMask) -> FlexTensor {
    profile::time(Part::Activation, || {
        let float = float_type(&x);
        let (x, residual) = (owned(x), residual.map(owned));
        let values = floats(&x);
        let residual = residual.as_ref().map(floats);
        let mut out = vec![0.0; values.len()];
        out.par_chunks_mut(ELEMENTS).enumerate().for_each(|(i, out)| {
            let range = i * ELEMENTS..i * ELEMENTS + out.len();
            mask.fill(range.start as u64, out);
            let values = &values[range.clone()];
            vectorized(
                #[inline(always)]
                || match residual.map(|residual| &residual[range]) {
                    Some(residual) => {
                        let terms = values.iter().zip(residual);
                        out.iter_mut().zip(terms).for_each(|(out, (x, r))| *out = r + x * *out);
                    }
                    None => out.iter_mut().zip(values).for_each(|(out, x)| *out *= x),
                },
            );
        });
        flex(out, x.shape(), float)
    })
}

impl DropoutOps for Flex {
    fn drop_out(x: FloatTensor<Self>, mask: DropoutMask) -> FloatTensor<Self> {
        dropped(None, x, mask)
    }

    fn drop_out_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        mask: DropoutMask,
    ) -> FloatTensor<Self> {
        dropped(Some(residual), x, mask)
    }
}

#[derive(Debug)]
struct DropoutBackward;

impl<B: DropoutOps> Backward<B, 1> for DropoutBackward {
    type State = DropoutMask;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::drop_out(gradient, ops.state));
        }
    }
}

/// The same with the residual as the first parent, whose gradient is the output's.
#[derive(Debug)]
struct DropoutOntoBackward;

impl<B: DropoutOps> Backward<B, 2> for DropoutOntoBackward {
    type State = DropoutMask;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [residual, x] = parents(&ops);
        let for_x = x.map(|_| B::drop_out(gradient.clone(), ops.state));
        register::<B, 2>(grads, [x, residual], [for_x, Some(gradient)]);
    }
}

impl<B: DropoutOps, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
    fn drop_out(x: FloatTensor<Self>, mask: DropoutMask) -> FloatTensor<Self> {
        match DropoutBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(mask, B::drop_out(x.into_primitive(), mask)),
            OpsKind::UnTracked(prep) => prep.finish(B::drop_out(x.into_primitive(), mask)),
        }
    }

    fn drop_out_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        mask: DropoutMask,
    ) -> FloatTensor<Self> {
        let nodes = [residual.node(), x.node()];
        let (residual, x) = (residual.into_primitive(), x.into_primitive());
        match DropoutOntoBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(mask, B::drop_out_onto(residual, x, mask)),
            OpsKind::UnTracked(prep) => prep.finish(B::drop_out_onto(residual, x, mask)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use hydra_core::{Activation, Pass};

    fn pass() -> Pass {
        Pass::train(Pass::key_of(1, 2, 3), Activation::default())
    }

    /// More elements than one thread handles at a time, and an odd number.
    const SHAPE: [usize; 3] = [3, 101, 67];

    /// The output, and the gradients of residual and x.
    fn run(floats: Floats, onto: impl Fn(Tensor<3>, Tensor<3>) -> Tensor<3>) -> [Vec<f32>; 3] {
        let leaf = |seed| floats.leaf(normal(seed, SHAPE));
        let (residual, x) = (leaf(1), leaf(2));
        let y = onto(residual.clone(), x.clone());
        let out = values(&y);
        let grads = (y * floats.of(normal(3, SHAPE))).sum().backward();
        [out, gradient(&residual, &grads), gradient(&x, &grads)]
    }

    #[test]
    fn values_and_gradients_have_the_bits_of_burns() {
        let mask = pass().site(7).dropout_mask(0.3).unwrap();
        let fused = run(Floats::F32, |residual, x| dropout_onto(residual, x, mask));
        assert_eq!(fused, run(Floats::F32, |residual, x| residual + pass().site(7).dropout(x, 0.3)));
        assert_eq!(fused, run(Floats::F32, |residual, x| residual + dropout(x, 0.3, pass().site(7))));
        assert!(fused[2].iter().filter(|g| **g == 0.0).count() > SHAPE.iter().product::<usize>() / 4);
    }

    #[test]
    fn bf16_is_rounded_once() {
        let mask = pass().site(7).dropout_mask(0.3).unwrap();
        let onto = |floats| run(floats, |residual, x| dropout_onto(residual, x, mask));
        for (found, widened) in onto(Floats::Bf16).iter().zip(onto(Floats::Widened)) {
            assert_rounded(found, &widened);
        }
        let alone = run(Floats::Bf16, |residual, x| residual + dropout(x, 0.3, pass().site(7)));
        assert_eq!(alone, run(Floats::Bf16, |residual, x| residual + pass().site(7).dropout(x, 0.3)));
        assert_eq!(alone[1..], onto(Floats::Bf16)[1..]);
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        let mask = pass().site(7).dropout_mask(0.3).unwrap();
        for floats in [Floats::F32, Floats::Bf16] {
            let onto = || run(floats, |residual, x| dropout_onto(residual, x, mask));
            let one = with_threads(1, onto);
            assert_eq!(one, with_threads(3, onto));
            let [residual, x] = [1, 2].map(|seed| untracked(floats.of(normal(seed, SHAPE))));
            assert_eq!(values(&dropout_onto(residual, x, mask)), one[0]);
        }
    }

    #[test]
    fn an_evaluation_drops_nothing() {
        let x = normal(1, [2, 3, 4]);
        let evaluate = Pass::evaluate(Activation::default());
        assert_eq!(values(&dropout(x.clone(), 0.9, evaluate.site(0))), values(&x));
    }
}
