//! Rows of a table by their numbers.

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
use rayon::prelude::*;

/// The rows of `table`, `[rows, width]`, that `ids`, `[batch, tokens]`, name: `[batch, tokens, width]`.
///
/// # Panics
/// If an id names no row.
pub fn embedding(table: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::rows_of(table.into_dispatch(), ids.into_dispatch()))
}

/// The lookup as an op of the backends.
#[backend_extension(Autodiff, Flex)]
pub(crate) trait EmbeddingOps: Backend {
    /// The rows of `table` that `ids` name.
    fn rows_of(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self>;
}

/// What a backend must compute for it to be differentiable.
pub(crate) trait EmbeddingKernels: EmbeddingOps {
    /// The gradient of a table of so many rows for that of the output.
    fn rows_of_backward(rows: usize, ids: IntTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
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
    fn rows_of(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let ([rows, width], [batch, tokens]) = (table.shape().dims(), ids.shape().dims());
        let (table, numbers) = (owned(table), row_numbers(ids, rows));
        let mut out = vec![0f32; numbers.len() * width];
        let table = floats(&table);
        out.par_chunks_mut(width)
            .zip(&numbers)
            .for_each(|(out, row)| out.copy_from_slice(&table[row * width..(row + 1) * width]));
        flex(out, [batch, tokens, width])
    }
}

impl EmbeddingKernels for Flex {
    fn rows_of_backward(rows: usize, ids: IntTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let [_, _, width] = gradient.shape().dims();
        let (gradient, numbers) = (owned(gradient), row_numbers(ids, rows));
        // Rows that no id names are never touched, so that they take no memory yet.
        let mut out = vec![0f32; rows * width];
        for (row, gradient) in numbers.iter().zip(floats(&gradient).chunks(width)) {
            let out = &mut out[row * width..(row + 1) * width];
            out.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        }
        flex(out, [rows, width])
    }
}

#[derive(Debug)]
struct EmbeddingBackward;

impl<B: EmbeddingKernels> Backward<B, 1> for EmbeddingBackward {
    type State = (usize, IntTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (rows, ids) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::rows_of_backward(rows, ids, gradient));
        }
    }
}

impl<B: EmbeddingKernels, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
    fn rows_of(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let [rows, _] = table.shape().dims();
        match EmbeddingBackward.prepare::<C>([table.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::rows_of(table.into_primitive(), ids.clone());
                prep.finish((rows, ids), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rows_of(table.into_primitive(), ids)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use burn::tensor::{Device, TensorData, module};

    fn ids(values: [[i32; 3]; 2]) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::from(values), (&Device::flex().autodiff(), DType::I32))
    }

    #[test]
    fn values_and_gradients_equal_those_of_burn() {
        let table = || normal(1, [5, 4]).require_grad();
        let (a, b, ids) = (table(), table(), ids([[4, 0, 4], [1, 4, 2]]));
        let (fast, slow) = (embedding(a.clone(), ids.clone()), module::embedding(b.clone(), ids.clone()));
        assert_eq!(values(&fast), values(&slow));
        assert_eq!(values(&embedding(untracked(a.clone()), ids)), values(&slow));
        let weights = normal(2, [2, 3, 4]);
        let (fast, slow) = ((fast * weights.clone()).sum().backward(), (slow * weights).sum().backward());
        assert_eq!(values(&a.grad(&fast).unwrap()), values(&b.grad(&slow).unwrap()));
    }

    #[test]
    #[should_panic(expected = "id 5 is not below the table's 5 rows")]
    fn an_id_beyond_the_table_is_named() {
        embedding(normal(1, [5, 4]), ids([[4, 0, 4], [1, 5, 2]]));
    }

    #[test]
    #[should_panic(expected = "id -1 is not below")]
    fn a_negative_id_is_named() {
        embedding(normal(1, [5, 4]), ids([[4, 0, 4], [1, -1, 2]]));
    }
}
