//! The log-sum-exp of rows of logits and one logit of each, as one operation, for heads whose logits are in parts.

use super::autodiff::*;
use super::embedding::integers_below;
use super::kernels::vectorized;
use super::math::{exp_in_place, log_sum_exp, max};
use super::reference;
use super::tensors::{flex, float_type, floats, owned, rounded};
use burn::tensor::{Device, Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::FloatType;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// The log-sum-exp of each row of `logits`, `[rows, columns]`, and its logit in the column that `columns` `[rows]` holds, or 0 if
/// that is negative: each `F32` of shape `[rows]`.
///
/// On a CPU, the backward keeps one number for each logit, in the memory of the logits if nothing else needs them. Other devices
/// run [`reference::log_sums`].
///
/// # Panics
/// If there is not one column for each row, or a column is not below the number of columns.
pub(crate) fn log_sums(logits: Tensor<2>, columns: Tensor<1, Int>) -> [Tensor<1>; 2] {
    let ([rows, _], [found]) = (logits.dims(), columns.dims());
    assert!(rows == found, "expected the column of each of {rows} rows, found {found} columns");
    if logits.device() != Device::flex() {
        return reference::log_sums(logits, columns);
    }
    let (logits, columns) = (logits.into_dispatch(), columns.into_dispatch());
    let both = Tensor::<2>::from_dispatch(<Dispatch as LogSumOps>::log_sums(logits, columns));
    [0, 1].map(|row| both.clone().narrow(0, row, 1).reshape([rows]))
}

/// The sums as a backend op.
#[backend_extension(Autodiff, Flex)]
pub(crate) trait LogSumOps: Backend {
    /// The log-sum-exp of each row, and its logit in a column, `F32` of shape `[2, rows]`.
    fn log_sums(logits: FloatTensor<Self>, columns: IntTensor<Self>) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait LogSumKernels: LogSumOps {
    /// The same, with what the backward needs of the logits.
    fn log_sums_and_exponentials(
        logits: FloatTensor<Self>,
        columns: IntTensor<Self>,
    ) -> (FloatTensor<Self>, Exponentials<FloatTensor<Self>>);

    /// The gradient of the logits, given that of the output.
    fn log_sums_backward(
        exponentials: Exponentials<FloatTensor<Self>>,
        columns: IntTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// The exponentials of logits relative to the largest of their row.
#[derive(Clone, Debug)]
pub(crate) struct Exponentials<T> {
    values: T,
    /// The sum of each row.
    sums: Vec<f64>,
    /// The type of the logits.
    float: FloatType,
}

/// The column of each row; none if it is negative.
fn numbers(columns: FlexTensor, count: usize) -> Vec<Option<usize>> {
    integers_below(columns, count, ["column", "the number of columns,"])
}

/// The logit in a column.
fn at(row: &[f32], column: Option<usize>) -> f32 {
    column.map_or(0.0, |column| row[column])
}

/// The output for these log-sum-exps and logits.
fn both(terms: impl ExactSizeIterator<Item = (f64, f32)>) -> FlexTensor {
    let rows = terms.len();
    let (mut sums, logits): (Vec<f32>, Vec<f32>) = terms.map(|(sum, logit)| (sum as f32, logit)).unzip();
    sums.extend(logits);
    flex(sums, [2, rows], FloatType::F32)
}

impl LogSumOps for Flex {
    fn log_sums(logits: FloatTensor<Self>, columns: IntTensor<Self>) -> FloatTensor<Self> {
        profile::time(Part::Head, || {
            let [_, count]: [usize; 2] = logits.shape().dims();
            let (logits, columns) = (owned(logits), numbers(columns, count));
            let rows = floats(&logits).par_chunks(count).zip(&columns);
            let terms: Vec<(f64, f32)> =
                rows.map(|(row, column)| (log_sum_exp(row), at(row, *column))).collect();
            both(terms.into_iter())
        })
    }
}

impl LogSumKernels for Flex {
    fn log_sums_and_exponentials(
        logits: FloatTensor<Self>,
        columns: IntTensor<Self>,
    ) -> (FloatTensor<Self>, Exponentials<FloatTensor<Self>>) {
        profile::time(Part::Head, || {
            let [_, count]: [usize; 2] = logits.shape().dims();
            let (float, columns) = (float_type(&logits), numbers(columns, count));
            let mut values = owned(logits);
            let rows = values.storage_mut::<f32>().par_chunks_mut(count).zip(&columns);
            let term = |(row, column): (&mut [f32], &Option<usize>)| {
                let (largest, logit) = (max(row), at(row, *column));
                let sum = vectorized(
                    #[inline(always)]
                    || exp_in_place(row, largest),
                );
                (sum, f64::from(largest) + sum.ln(), logit)
            };
            let terms: Vec<(f64, f64, f32)> = rows.map(term).collect();
            let sums = terms.iter().map(|(sum, ..)| *sum).collect();
            let out = both(terms.into_iter().map(|(_, total, logit)| (total, logit)));
            (out, Exponentials { values, sums, float })
        })
    }

    fn log_sums_backward(
        Exponentials { mut values, sums, float }: Exponentials<FloatTensor<Self>>,
        columns: IntTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        profile::time(Part::Head, || {
            let [_, count]: [usize; 2] = values.shape().dims();
            let (columns, gradient) = (numbers(columns, count), owned(gradient));
            let (of_sums, of_logits) = floats(&gradient).split_at(sums.len());
            let upstream = sums.par_iter().zip(of_sums).zip(of_logits);
            let rows = values.storage_mut::<f32>().par_chunks_mut(count).zip(&columns);
            rows.zip(upstream).for_each(|((row, column), ((sum, of_sum), of_logit))| {
                let factor = (f64::from(*of_sum) / sum) as f32;
                vectorized(
                    #[inline(always)]
                    || {
                        for x in row.iter_mut() {
                            *x *= factor;
                        }
                    },
                );
                if let Some(column) = column {
                    row[*column] += of_logit;
                }
            });
            rounded(values, float)
        })
    }
}

#[derive(Debug)]
struct LogSumBackward;

impl<B: LogSumKernels> Backward<B, 1> for LogSumBackward {
    type State = (Exponentials<FloatTensor<B>>, IntTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, (exponentials, columns)) = (parents(&ops), ops.state);
        register::<B, 1>(grads, nodes, [Some(B::log_sums_backward(exponentials, columns, gradient))]);
    }
}

impl<B: LogSumKernels, C: CheckpointStrategy> LogSumOps for Autodiff<B, C> {
    fn log_sums(logits: FloatTensor<Self>, columns: IntTensor<Self>) -> FloatTensor<Self> {
        let nodes = [logits.node()];
        let logits = logits.into_primitive();
        match LogSumBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, exponentials) = B::log_sums_and_exponentials(logits, columns.clone());
                prep.finish((exponentials, columns), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::log_sums(logits, columns)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use burn::tensor::{DType, TensorData};

    const SHAPE: [usize; 2] = [13, 1501];

    /// A column for each row but every third.
    fn columns() -> Tensor<1, Int> {
        let column = |row: usize| if row % 3 == 2 { -1 } else { (row * 117 % SHAPE[1]) as i32 };
        let data = TensorData::new((0..SHAPE[0]).map(column).collect::<Vec<_>>(), [SHAPE[0]]);
        Tensor::from_data(data, (&Device::flex().autodiff(), DType::I32))
    }

    /// Both outputs, and the gradient of the logits.
    fn run(log_sums: impl Fn(Tensor<2>, Tensor<1, Int>) -> [Tensor<1>; 2], floats: Floats) -> [Vec<f32>; 3] {
        let logits = floats.leaf(normal(1, SHAPE) * 4.0);
        let [sums, own] = log_sums(logits.clone(), columns());
        assert!([&sums, &own].iter().all(|x| x.dtype() == DType::F32));
        let outputs = [values(&sums), values(&own)];
        let grads = ((sums * normal(2, [SHAPE[0]])).sum() + (own * normal(3, [SHAPE[0]])).sum()).backward();
        let [sums, own] = outputs;
        [sums, own, gradient(&logits, &grads)]
    }

    #[test]
    fn values_and_gradients_equal_the_reference() {
        let (fast, slow) = (run(log_sums, Floats::F32), run(reference::log_sums, Floats::F32));
        for (fast, slow) in fast.iter().zip(&slow) {
            assert!(distance(fast, slow) < 1e-6);
        }
        assert_eq!(fast[1], slow[1], "logits are copied");
        assert!((0..SHAPE[0]).all(|row| (fast[1][row] == 0.0) == (row % 3 == 2)));
    }

    #[test]
    fn gradients_equal_the_exact_ones() {
        let [sums, _, found] = run(log_sums, Floats::F32);
        let [logits, upstream] = [values(&(normal(1, SHAPE) * 4.0)), values(&normal::<1>(2, [SHAPE[0]]))];
        let (own, columns) = (values(&normal::<1>(3, [SHAPE[0]])), columns().into_data());
        let columns = columns.as_slice::<i32>().unwrap();
        for (row, logits) in logits.chunks(SHAPE[1]).enumerate() {
            let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
            assert!((f64::from(sums[row]) - sum.ln()).abs() < 1e-6 * sum.ln());
            for (column, logit) in logits.iter().enumerate() {
                let share = f64::from(*logit).exp() / sum * f64::from(upstream[row]);
                let exact = share + if columns[row] == column as i32 { f64::from(own[row]) } else { 0.0 };
                let found = f64::from(found[row * SHAPE[1] + column]);
                assert!((found - exact).abs() < 2e-6 * exact.abs().max(1e-3), "{row}, {column}: {found}");
            }
        }
    }

    #[test]
    fn logits_of_bf16_are_widened_and_their_gradient_is_rounded_once() {
        let ([sums, own, gradient], [wide_sums, wide_own, wide]) =
            (run(log_sums, Floats::Bf16), run(log_sums, Floats::Widened));
        assert_eq!((sums, own), (wide_sums, wide_own));
        assert_rounded(&gradient, &wide);
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let one = with_threads(1, || run(log_sums, floats));
            assert_eq!(one, with_threads(3, || run(log_sums, floats)));
            let outputs = log_sums(untracked(floats.of(normal(1, SHAPE) * 4.0)), columns());
            assert_eq!(outputs.map(|x| values(&x)), one[..2]);
        }
    }

    #[test]
    fn logits_that_are_used_again_are_not_changed() {
        let logits = Floats::F32.leaf(normal(1, SHAPE));
        let before = values(&logits);
        let [sums, _] = log_sums(logits.clone(), columns());
        sums.sum().backward();
        assert_eq!(values(&logits), before);
    }

    #[test]
    #[should_panic(expected = "column 3 is not below the number of columns, 3")]
    fn columns_that_no_row_has_are_named() {
        let columns = TensorData::from([0, 3]);
        log_sums(normal(1, [2, 3]), Tensor::from_data(columns, (&Device::flex().autodiff(), DType::I32)));
    }
}
