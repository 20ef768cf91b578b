//! The softmax of attention scores in which a token sees itself and what came before.

use super::math::{exp_in_place, floats, max, owned, sum2};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use rayon::prelude::*;

/// The probabilities of attention: each row of `scores`, `[batch, heads, query, key]` with as many keys as
/// queries, times `scale` and through a softmax over the keys up to the query; later keys get zero.
///
/// # Panics
/// If the last two dimensions differ.
pub fn causal_softmax(scores: Tensor<4>, scale: f64) -> Tensor<4> {
    let [_, _, queries, keys] = scores.dims();
    assert_eq!(queries, keys, "causal attention expects as many keys as queries");
    Tensor::from_dispatch(<Dispatch as SoftmaxOps>::causal_rows(scores.into_dispatch(), scale as f32))
}

/// The softmax as an op of the backends.
#[backend_extension(Autodiff, Flex)]
pub(crate) trait SoftmaxOps: Backend {
    /// The probabilities of scores whose last two dimensions are equal.
    fn causal_rows(scores: FloatTensor<Self>, scale: f32) -> FloatTensor<Self>;
}

/// What a backend must compute for it to be differentiable.
pub(crate) trait SoftmaxKernels: SoftmaxOps {
    /// The gradient with respect to the scores for that of the probabilities.
    fn causal_rows_backward(
        probabilities: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        scale: f32,
    ) -> FloatTensor<Self>;
}

fn softmax_row(row: &mut [f32], query: usize, scale: f32) {
    let (seen, later) = row.split_at_mut(query + 1);
    // A negative scale turns the order round, so the largest is looked for after scaling.
    seen.iter_mut().for_each(|x| *x *= scale);
    let largest = max(seen);
    let factor = (1.0 / exp_in_place(seen, 1.0, largest)) as f32;
    seen.iter_mut().for_each(|x| *x *= factor);
    later.fill(0.0);
}

fn backward_row(gradient: &mut [f32], p: &[f32], query: usize, scale: f32) {
    let (seen, later) = gradient.split_at_mut(query + 1);
    let p = &p[..=query];
    let mean = sum2(seen, p, |g, p| g * p) as f32;
    seen.iter_mut().zip(p).for_each(|(g, &p)| *g = p * (*g - mean) * scale);
    later.fill(0.0);
}

impl SoftmaxOps for Flex {
    fn causal_rows(scores: FloatTensor<Self>, scale: f32) -> FloatTensor<Self> {
        let mut p = owned(scores);
        let keys = p.shape().dims::<4>()[3];
        p.storage_mut::<f32>().par_chunks_mut(keys * keys).for_each(|square| {
            square.chunks_mut(keys).enumerate().for_each(|(query, row)| softmax_row(row, query, scale));
        });
        p
    }
}

impl SoftmaxKernels for Flex {
    fn causal_rows_backward(
        probabilities: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        scale: f32,
    ) -> FloatTensor<Self> {
        let (p, mut gradient) = (owned(probabilities), owned(gradient));
        let keys = p.shape().dims::<4>()[3];
        let squares = gradient.storage_mut::<f32>().par_chunks_mut(keys * keys);
        squares.zip(floats(&p).par_chunks(keys * keys)).for_each(|(square, p)| {
            let rows = square.chunks_mut(keys).zip(p.chunks(keys)).enumerate();
            rows.for_each(|(query, (row, p))| backward_row(row, p, query, scale));
        });
        gradient
    }
}

#[derive(Debug)]
struct SoftmaxBackward;

impl<B: SoftmaxKernels> Backward<B, 1> for SoftmaxBackward {
    type State = (FloatTensor<B>, f32);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (probabilities, scale) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::causal_rows_backward(probabilities, gradient, scale));
        }
    }
}

impl<B: SoftmaxKernels, C: CheckpointStrategy> SoftmaxOps for Autodiff<B, C> {
    fn causal_rows(scores: FloatTensor<Self>, scale: f32) -> FloatTensor<Self> {
        match SoftmaxBackward.prepare::<C>([scores.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let p = B::causal_rows(scores.into_primitive(), scale);
                prep.finish((p.clone(), scale), p)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::causal_rows(scores.into_primitive(), scale)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;

    #[test]
    fn values_and_gradients_equal_the_reference() {
        for (tokens, scale) in [(1, 1.0), (5, 0.25), (33, -0.7)] {
            let x = || normal(3, [2, 3, tokens, tokens]).mul_scalar(4.0).detach().require_grad();
            let (a, b, weights) = (x(), x(), normal(4, [2, 3, tokens, tokens]));
            let (fast, slow) =
                (causal_softmax(a.clone(), scale), reference::causal_softmax(b.clone(), scale));
            assert!(distance(&values(&fast), &values(&slow)) < 1e-6);
            assert_eq!(values(&causal_softmax(untracked(a.clone()), scale)), values(&fast));
            let (fast, slow) = ((fast * weights.clone()).sum().backward(), (slow * weights).sum().backward());
            let (fast, slow) = (values(&a.grad(&fast).unwrap()), values(&b.grad(&slow).unwrap()));
            assert!(tokens == 1 || distance(&fast, &slow) < 1e-5);
        }
    }

    #[test]
    fn later_keys_get_nothing_and_a_row_sums_to_one() {
        let p = values(&causal_softmax(normal(5, [1, 1, 9, 9]).mul_scalar(50.0), 1.0));
        for (query, row) in p.chunks(9).enumerate() {
            assert!(row[query + 1..].iter().all(|&x| x == 0.0));
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn a_score_that_is_no_number_shows() {
        let p = causal_softmax(normal(5, [1, 1, 3, 3]).mul_scalar(f32::NAN), 1.0);
        assert!(values(&p)[0].is_nan());
    }
}
