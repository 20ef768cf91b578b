//! Rows of the tokens' table by their numbers, plus those of the positions.

use super::math::{flex, floats, owned};
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// The rows of `tokens`, `[vocabulary, width]`, that `ids`, `[batch, length]`, name, plus the first `length`
/// rows of `positions`, `[positions, width]`: `[batch, length, width]`.
///
/// # Panics
/// If an id names no row, there are fewer positions than `length`, or the tables' widths differ.
pub fn embedding(tokens: Tensor<2>, positions: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let ([_, width], [places, found], [_, length]) = (tokens.dims(), positions.dims(), ids.dims());
    assert!(
        found == width && length <= places,
        "an embedding of {length} positions, {width} wide, expects at least as many rows of that width; \
         found {places} rows of {found}"
    );
    let (tokens, positions) = (tokens.into_dispatch(), positions.into_dispatch());
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::embed(tokens, positions, ids.into_dispatch()))
}

/// The lookup as an op of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait EmbeddingOps: Backend {
    /// The rows of `tokens` that `ids` name, plus those of `positions`.
    fn embed(
        tokens: FloatTensor<Self>,
        positions: FloatTensor<Self>,
        ids: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// What a backend must compute for it to be differentiable.
pub(crate) trait EmbeddingKernels: EmbeddingOps {
    /// The gradient of a table of so many rows, of which `ids` names one for each row of `gradient`.
    fn token_gradient(rows: usize, ids: IntTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The gradient of a table of so many positions, each the sum over the batch.
    fn position_gradient(rows: usize, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The integers of a tensor.
pub(super) fn integers(tensor: FlexTensor) -> Vec<i64> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::I32 => tensor.storage::<i32>().iter().map(|&id| i64::from(id)).collect(),
        DType::I64 => tensor.storage::<i64>().to_vec(),
        found => panic!("expected ids of type I32 or I64, found {found:?}"),
    }
}

fn row_numbers(ids: FlexTensor, rows: usize) -> Vec<usize> {
    let number = |id: i64| match usize::try_from(id) {
        Ok(row) if row < rows => row,
        _ => panic!("id {id} is not below the table's {rows} rows"),
    };
    integers(ids).into_iter().map(number).collect()
}

impl EmbeddingOps for Flex {
    fn embed(
        tokens: FloatTensor<Self>,
        positions: FloatTensor<Self>,
        ids: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        profile::time(Part::Embedding, || {
            let ([rows, width], [batch, length]) = (tokens.shape().dims(), ids.shape().dims());
            let (tokens, positions, numbers) = (owned(tokens), owned(positions), row_numbers(ids, rows));
            let mut out = vec![0f32; numbers.len() * width];
            let (tokens, positions) = (floats(&tokens), floats(&positions));
            out.par_chunks_mut(width).zip(&numbers).enumerate().for_each(|(i, (out, row))| {
                let (token, place) = (&tokens[row * width..], &positions[(i % length) * width..]);
                out.iter_mut().zip(token.iter().zip(place)).for_each(|(out, (a, b))| *out = a + b);
            });
            flex(out, [batch, length, width])
        })
    }
}

/// Adds each row of `gradient` to the row of the sum that `number` gives for it.
fn scatter(rows: usize, gradient: FlexTensor, number: impl Fn(usize) -> usize) -> FlexTensor {
    profile::time(Part::Embedding, || {
        let [_, _, width] = gradient.shape().dims();
        let gradient = owned(gradient);
        // Rows that nothing is added to are never touched, so that they take no memory yet.
        let mut out = vec![0f32; rows * width];
        for (i, gradient) in floats(&gradient).chunks(width).enumerate() {
            let out = &mut out[number(i) * width..][..width];
            out.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        }
        flex(out, [rows, width])
    })
}

impl EmbeddingKernels for Flex {
    fn token_gradient(rows: usize, ids: IntTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let numbers = row_numbers(ids, rows);
        scatter(rows, gradient, |i| numbers[i])
    }

    fn position_gradient(rows: usize, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let [_, length, _] = gradient.shape().dims();
        scatter(rows, gradient, |i| i % length)
    }
}

#[derive(Debug)]
struct EmbeddingBackward;

impl<B: EmbeddingKernels> Backward<B, 2> for EmbeddingBackward {
    type State = ([usize; 2], IntTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let ([tokens, positions], ids) = ops.state;
        let [for_tokens, for_positions] = ops.parents;
        if let Some(node) = for_positions {
            grads.register::<B>(node.id, B::position_gradient(positions, gradient.clone()));
        }
        if let Some(node) = for_tokens {
            grads.register::<B>(node.id, B::token_gradient(tokens, ids, gradient));
        }
    }
}

impl<B: EmbeddingKernels, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
    fn embed(
        tokens: FloatTensor<Self>,
        positions: FloatTensor<Self>,
        ids: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let rows = [tokens.shape()[0], positions.shape()[0]];
        let nodes = [tokens.node(), positions.node()];
        let (tokens, positions) = (tokens.into_primitive(), positions.into_primitive());
        match EmbeddingBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::embed(tokens, positions, ids.clone());
                prep.finish((rows, ids), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::embed(tokens, positions, ids)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;
    use burn::tensor::{Device, TensorData};

    fn ids(values: [[i32; 3]; 2]) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::from(values), (&Device::flex().autodiff(), DType::I32))
    }

    #[test]
    fn values_and_gradients_equal_those_of_burn() {
        let table = |seed, rows| normal(seed, [rows, 4]).detach().require_grad();
        let run = |embed: fn(Tensor<2>, Tensor<2>, Tensor<2, Int>) -> Tensor<3>| {
            let (tokens, positions) = (table(1, 5), table(3, 7));
            let y = embed(tokens.clone(), positions.clone(), ids([[4, 0, 4], [1, 4, 2]]));
            let out = values(&y);
            let grads = (y * normal(2, [2, 3, 4])).sum().backward();
            [out, values(&tokens.grad(&grads).unwrap()), values(&positions.grad(&grads).unwrap())]
        };
        let (fast, slow) = (run(embedding), run(reference::embedding));
        for (fast, slow) in fast.iter().zip(&slow) {
            assert!(distance(fast, slow) < 1e-7);
        }
        assert_eq!(fast[2][3 * 4..], [0.0; 16], "positions beyond the sequence get nothing");
        let (tokens, positions) = (untracked(table(1, 5)), untracked(table(3, 7)));
        assert_eq!(values(&embedding(tokens, positions, ids([[4, 0, 4], [1, 4, 2]]))), fast[0]);
    }

    #[test]
    #[should_panic(expected = "id 5 is not below the table's 5 rows")]
    fn an_id_beyond_the_table_is_named() {
        embedding(normal(1, [5, 4]), normal(2, [3, 4]), ids([[4, 0, 4], [1, 5, 2]]));
    }

    #[test]
    #[should_panic(expected = "id -1 is not below")]
    fn a_negative_id_is_named() {
        embedding(normal(1, [5, 4]), normal(2, [3, 4]), ids([[4, 0, 4], [1, -1, 2]]));
    }

    #[test]
    #[should_panic(expected = "found 2 rows of 4")]
    fn too_few_positions_are_named() {
        embedding(normal(1, [5, 4]), normal(2, [2, 4]), ids([[4, 0, 4], [1, 1, 2]]));
    }
}
