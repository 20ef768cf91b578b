//! Embedding lookup, alone or plus position embeddings.

use super::autodiff::*;
use super::tensors::{bits, flex, flex_bits, float_type, floats, one_type, owned, widened};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::FloatType;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// The rows of `tokens` `[vocabulary, width]` selected by `ids` `[batch, length]`, plus the first `length` rows of
/// `positions` `[positions, width]`: `[batch, length, width]`.
///
/// # Panics
/// If an id is out of range, there are fewer positions than `length`, or the tables' widths or float types differ.
pub fn embedding(tokens: Tensor<2>, positions: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let ([_, width], [places, found], [_, length]) = (tokens.dims(), positions.dims(), ids.dims());
    assert!(
        found == width && length <= places,
        "an embedding of {length} positions, {width} wide, expects at least as many rows of that width; \
         found {places} rows of {found}"
    );
    one_type("embedding", [tokens.dtype(), positions.dtype()]);
    let (tokens, positions) = (tokens.into_dispatch(), positions.into_dispatch());
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::embed(tokens, positions, ids.into_dispatch()))
}

/// The rows of `tokens` `[vocabulary, width]` selected by `ids` `[batch, length]`: `[batch, length, width]`.
///
/// # Panics
/// If an id is out of range, or the elements are not `F32`, `BF16` or `F16`.
pub fn lookup(tokens: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    one_type("lookup", [tokens.dtype()]);
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::lookup(tokens.into_dispatch(), ids.into_dispatch()))
}

/// The lookup as backend ops.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait EmbeddingOps: Backend {
    /// The rows of `tokens` selected by `ids`, plus those of `positions`.
    fn embed(
        tokens: FloatTensor<Self>,
        positions: FloatTensor<Self>,
        ids: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The rows of `tokens` selected by `ids`.
    fn lookup(tokens: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait EmbeddingKernels: EmbeddingOps {
    /// The gradient of a table with `rows` rows; `ids` has one id for each row of `gradient`.
    fn token_gradient(rows: usize, ids: IntTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The gradient of a position table with `rows` rows, each the sum over the batch.
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

/// The integers of a tensor; none where they are negative.
///
/// # Panics
/// If one is not below `limit`. `[what, of]` are the names of an integer and of the limit.
#[track_caller]
pub(super) fn integers_below(tensor: FlexTensor, limit: usize, [what, of]: [&str; 2]) -> Vec<Option<usize>> {
    let number = |number: i64| {
        let number = usize::try_from(number).ok()?;
        assert!(number < limit, "{what} {number} is not below {of} {limit}");
        Some(number)
    };
    integers(tensor).into_iter().map(number).collect()
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
            let (float, numbers) = (float_type(&tokens), row_numbers(ids, rows));
            let (tokens, positions) = (tokens.to_contiguous(), positions.to_contiguous());
            let mut out = vec![0f32; numbers.len() * width];
            let parts = out.par_chunks_mut(width).zip(&numbers).enumerate();
            if float == FloatType::F32 {
                let (tokens, positions) = (floats(&tokens), floats(&positions));
                parts.for_each(|(i, (out, row))| {
                    let (token, place) = (&tokens[row * width..], &positions[(i % length) * width..]);
                    out.iter_mut().zip(token.iter().zip(place)).for_each(|(out, (a, b))| *out = a + b);
                });
            } else {
                // Only the rows that are read are widened.
                let (tokens, positions) =
                    (bits(&tokens), widened(&bits(&positions)[..length * width], float));
                parts.for_each(|(i, (out, row))| {
                    float.widen(&tokens[row * width..][..width], out);
                    let place = &positions[(i % length) * width..];
                    out.iter_mut().zip(place).for_each(|(out, b)| *out += b);
                });
            }
            flex(out, [batch, length, width], float)
        })
    }

    fn lookup(tokens: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        profile::time(Part::Embedding, || {
            let ([rows, width], [batch, length]) = (tokens.shape().dims(), ids.shape().dims());
            let (float, numbers) = (float_type(&tokens), row_numbers(ids, rows));
            let (tokens, shape) = (tokens.to_contiguous(), [batch, length, width]);
            match float {
                FloatType::F32 => flex(gathered(floats(&tokens), width, &numbers), shape, float),
                narrow => flex_bits(gathered(bits(&tokens), width, &numbers), shape, narrow),
            }
        })
    }
}

/// The rows of a table with these indices.
fn gathered<T: Copy>(table: &[T], width: usize, numbers: &[usize]) -> Vec<T> {
    let mut out = Vec::with_capacity(numbers.len() * width);
    numbers.iter().for_each(|row| out.extend_from_slice(&table[row * width..][..width]));
    out
}

/// For each of `rows` indices, the sum of the rows of `gradient` that `number` maps to it.
fn sums(rows: usize, gradient: &[f32], width: usize, number: impl Fn(usize) -> usize) -> Vec<f32> {
    // Rows without a summand are never touched, so they take no physical memory yet.
    let mut out = vec![0f32; rows * width];
    for (i, gradient) in gradient.chunks(width).enumerate() {
        let out = &mut out[number(i) * width..][..width];
        out.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
    out
}

/// [`sums`], rounded. Only rows with a summand are ever `f32`.
fn rounded_sums(
    rows: usize,
    gradient: &[f32],
    width: usize,
    number: impl Fn(usize) -> usize,
    narrow: FloatType,
) -> Vec<u16> {
    let numbers: Vec<usize> = (0..gradient.len() / width).map(number).collect();
    let mut named = numbers.clone();
    named.sort_unstable();
    named.dedup();
    let place = |i: usize| named.partition_point(|&row| row < numbers[i]);
    let mut out = vec![0; rows * width];
    for (row, sum) in named.iter().zip(sums(named.len(), gradient, width, place).chunks(width)) {
        narrow.narrow(sum, &mut out[row * width..][..width]);
    }
    out
}

/// Adds each row of `gradient` to the row of the result that `number` maps it to.
fn scatter(rows: usize, gradient: FlexTensor, number: impl Fn(usize) -> usize) -> FlexTensor {
    profile::time(Part::Embedding, || {
        let (float, [_, _, width]) = (float_type(&gradient), gradient.shape().dims());
        let gradient = owned(gradient);
        let (gradient, shape) = (floats(&gradient), [rows, width]);
        match float {
            FloatType::F32 => flex(sums(rows, gradient, width, number), shape, float),
            narrow => flex_bits(rounded_sums(rows, gradient, width, number, narrow), shape, narrow),
        }
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

#[derive(Debug)]
struct LookupBackward;

impl<B: EmbeddingKernels> Backward<B, 1> for LookupBackward {
    type State = (usize, IntTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (rows, ids) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::token_gradient(rows, ids, gradient));
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

    fn lookup(tokens: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let (rows, nodes, tokens) = (tokens.shape()[0], [tokens.node()], tokens.into_primitive());
        match LookupBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::lookup(tokens, ids.clone());
                prep.finish((rows, ids), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::lookup(tokens, ids)),
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

    fn table(floats: Floats, seed: u64, rows: usize) -> Tensor<2> {
        floats.leaf(normal(seed, [rows, 4]))
    }

    type Embed = fn(Tensor<2>, Tensor<2>, Tensor<2, Int>) -> Tensor<3>;

    /// The output, and the gradients of tokens and positions.
    fn run(embed: Embed, floats: Floats) -> [Vec<f32>; 3] {
        let (tokens, positions) = (table(floats, 1, 5), table(floats, 3, 7));
        let y = embed(tokens.clone(), positions.clone(), ids([[4, 0, 4], [1, 4, 2]]));
        let out = values(&y);
        let grads = (y * floats.of(normal(2, [2, 3, 4]))).sum().backward();
        [out, gradient(&tokens, &grads), gradient(&positions, &grads)]
    }

    #[test]
    fn values_and_gradients_equal_those_of_burn() {
        let (fast, slow) = (run(embedding, Floats::F32), run(reference::embedding, Floats::F32));
        for (fast, slow) in fast.iter().zip(&slow) {
            assert!(distance(fast, slow) < 1e-7);
        }
        assert_eq!(fast[2][3 * 4..], [0.0; 16], "positions beyond the sequence get nothing");
    }

    proptest::proptest! {
        #[test]
        fn any_sizes_equal_those_of_burn_and_are_rounded_once(
            batch in 1usize..5, length in 1usize..7, more in 0usize..3, width in 1usize..40, rows in 1usize..9,
        ) {
            let run = |embed: Embed, floats: Floats| {
                let table = |seed, rows| floats.leaf(normal(seed, [rows, width]));
                let (tokens, positions) = (table(1, rows), table(2, length + more));
                let ids: Vec<i32> = (0..batch * length).map(|i| ((i * i + i / 3) % rows) as i32).collect();
                let device = (&Device::flex().autodiff(), DType::I32);
                let ids = Tensor::from_data(TensorData::new(ids, [batch, length]), device);
                let y = embed(tokens.clone(), positions.clone(), ids);
                let out = values(&y);
                let grads = (y * floats.of(normal(3, [batch, length, width]))).sum().backward();
                [out, gradient(&tokens, &grads), gradient(&positions, &grads)]
            };
            let (found, slow) = (run(embedding, Floats::F32), run(reference::embedding, Floats::F32));
            let (narrow, widened) = (run(embedding, Floats::Bf16), run(embedding, Floats::Widened));
            for i in 0..3 {
                proptest::prop_assert!(distance(&found[i], &slow[i]) < 1e-6, "{i}");
                assert_rounded(&narrow[i], &widened[i]);
            }
        }
    }

    #[test]
    fn bf16_is_rounded_once() {
        let (found, widened) = (run(embedding, Floats::Bf16), run(embedding, Floats::Widened));
        for (found, widened) in found.iter().zip(&widened) {
            assert_rounded(found, widened);
        }
        assert_eq!(found[1][3 * 4..4 * 4], [0.0; 4], "a token that is not there gets nothing");
        assert_eq!(found[2][3 * 4..], [0.0; 16], "positions beyond the sequence get nothing");
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let one = with_threads(1, || run(embedding, floats));
            assert_eq!(one, with_threads(3, || run(embedding, floats)));
            let (tokens, positions) = (untracked(table(floats, 1, 5)), untracked(table(floats, 3, 7)));
            assert_eq!(values(&embedding(tokens, positions, ids([[4, 0, 4], [1, 4, 2]]))), one[0]);
        }
    }

    #[test]
    fn a_lookup_has_the_bits_of_an_embedding_whose_positions_are_zero() {
        let alone = |tokens: Tensor<2>, positions: Tensor<2>, ids: Tensor<2, Int>| {
            // Tracked like the other, so that it has a gradient.
            lookup(tokens, ids) + positions.sum().mul_scalar(0.0).reshape([1, 1, 1])
        };
        let summed = |tokens, positions: Tensor<2>, ids| embedding(tokens, positions.mul_scalar(0.0), ids);
        for floats in [Floats::F32, Floats::Bf16] {
            let (found, expected) = (run(alone, floats), run(summed, floats));
            assert_eq!(found[..2], expected[..2]);
            let tokens = untracked(table(floats, 1, 5));
            assert_eq!(values(&lookup(tokens, ids([[4, 0, 4], [1, 4, 2]]))), found[0]);
            assert_eq!(with_threads(1, || run(alone, floats)), with_threads(3, || run(alone, floats)));
        }
    }

    #[test]
    #[should_panic(expected = "id 5 is not below the table's 5 rows")]
    fn an_id_beyond_the_table_of_a_lookup_is_named() {
        lookup(normal(1, [5, 4]), ids([[4, 0, 4], [1, 5, 2]]));
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
