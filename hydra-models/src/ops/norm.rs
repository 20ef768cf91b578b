//! Layer normalization.

use super::autodiff::*;
use super::kernels::vectorized;
use super::math::{sum, sum2, sums};
use super::tensors::{flex, float_type, floats, one_type, owned, rounded};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// Layer normalization (Ba, Kiros and Hinton, 2016) of the last dimension of `x`, `[batch, tokens, width]`,
/// with a weight and a bias of shape `[width]`.
///
/// # Panics
/// If widths or float types differ.
pub fn layer_norm(x: Tensor<3>, weight: Tensor<1>, bias: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let widths = [x.dims()[2], weight.dims()[0], bias.dims()[0]];
    assert!(
        widths == [widths[0]; 3],
        "layer_norm expects rows, a weight and a bias of one width, found {widths:?}"
    );
    one_type("layer_norm", [x.dtype(), weight.dtype(), bias.dtype()]);
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as NormOps>::norm_rows(x, weight, bias, epsilon))
}

/// The normalization as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait NormOps: Backend {
    /// The normalized rows of `x`, times `weight`, plus `bias`.
    fn norm_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait NormKernels: NormOps {
    /// The gradients of `x`, weight and bias, given that of the output.
    fn norm_rows_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3];
}

/// Rows whose weight and bias gradients are summed by one thread.
const ROWS: usize = 64;

/// The mean of a row and the inverse of its standard deviation.
///
/// The mean is corrected by the mean of the residuals, because its own rounding error would become large relative to a
/// small deviation.
#[inline(always)]
fn moments(row: &[f32], epsilon: f64) -> (f32, f32) {
    let n = row.len() as f64;
    let near = (sum(row, |x| x) / n) as f32;
    let [rest, squares] = sums(row, row, |x, _| [x - near, (x - near) * (x - near)]).map(|sum| sum / n);
    let variance = squares - rest * rest;
    // Rounding may leave a negative variance; NaN stays NaN.
    let variance = if variance < 0.0 { 0.0 } else { variance };
    ((f64::from(near) + rest) as f32, (1.0 / (variance + epsilon).sqrt()) as f32)
}

#[inline(always)]
fn norm_row(y: &mut [f32], x: &[f32], weight: &[f32], bias: &[f32], epsilon: f64) {
    let (mean, inverse) = moments(x, epsilon);
    for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
        *y = (x - mean) * inverse * w + b;
    }
}

/// Replaces a row's output gradient with the input's, and adds the row's weight and bias gradients to `sums`.
#[inline(always)]
fn backward_row(
    gradient: &mut [f32],
    x: &[f32],
    weight: &[f32],
    epsilon: f64,
    sums: (&mut [f32], &mut [f32]),
) {
    let n = x.len() as f64;
    let (mean, inverse) = moments(x, epsilon);
    for ((sum, &g), &x) in sums.0.iter_mut().zip(&*gradient).zip(x) {
        *sum += g * (x - mean) * inverse;
    }
    sums.1.iter_mut().zip(&*gradient).for_each(|(sum, g)| *sum += g);
    gradient.iter_mut().zip(weight).for_each(|(g, w)| *g *= w);
    let along_one = (sum(gradient, |g| g) / n) as f32;
    let along_x = (sum2(gradient, x, |g, x| g * (x - mean) * inverse) / n) as f32;
    for (g, &x) in gradient.iter_mut().zip(x) {
        *g = inverse * (*g - along_one - (x - mean) * inverse * along_x);
    }
}

impl NormOps for Flex {
    fn norm_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        profile::time(Part::Norm, || {
            let float = float_type(&x);
            let (x, weight, bias) = (owned(x), owned(weight), owned(bias));
            let (weight, bias) = (floats(&weight), floats(&bias));
            let width = weight.len();
            let mut y = vec![0.0; floats(&x).len()];
            let parts = y.par_chunks_mut(ROWS * width).zip(floats(&x).par_chunks(ROWS * width));
            parts.for_each(|(y, x)| {
                vectorized(
                    #[inline(always)]
                    || {
                        for (y, x) in y.chunks_mut(width).zip(x.chunks(width)) {
                            norm_row(y, x, weight, bias, epsilon);
                        }
                    },
                );
            });
            flex(y, x.shape(), float)
        })
    }
}

impl NormKernels for Flex {
    fn norm_rows_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3] {
        profile::time(Part::Norm, || backward(x, weight, gradient, epsilon))
    }
}

fn backward(x: FlexTensor, weight: FlexTensor, gradient: FlexTensor, epsilon: f64) -> [FlexTensor; 3] {
    let float = float_type(&x);
    let (x, weight, mut gradient) = (owned(x), owned(weight), owned(gradient));
    let weight = floats(&weight);
    let width = weight.len();
    let parts = gradient.storage_mut::<f32>().par_chunks_mut(ROWS * width);
    let parts = parts.zip(floats(&x).par_chunks(ROWS * width)).map(|(gradient, x)| {
        let (mut for_weight, mut for_bias) = (vec![0.0; width], vec![0.0; width]);
        vectorized(
            #[inline(always)]
            || {
                for (gradient, x) in gradient.chunks_mut(width).zip(x.chunks(width)) {
                    backward_row(gradient, x, weight, epsilon, (&mut for_weight, &mut for_bias));
                }
            },
        );
        (for_weight, for_bias)
    });
    let parts: Vec<(Vec<f32>, Vec<f32>)> = parts.collect();
    // Parts have a fixed number of rows and are summed in order.
    let (mut for_weight, mut for_bias) = (vec![0.0; width], vec![0.0; width]);
    for (part_weight, part_bias) in &parts {
        for_weight.iter_mut().zip(part_weight).for_each(|(sum, g)| *sum += g);
        for_bias.iter_mut().zip(part_bias).for_each(|(sum, g)| *sum += g);
    }
    [rounded(gradient, float), flex(for_weight, [width], float), flex(for_bias, [width], float)]
}

#[derive(Debug)]
struct NormBackward;

impl<B: NormKernels> Backward<B, 3> for NormBackward {
    type State = (FloatTensor<B>, FloatTensor<B>, f64);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, (x, weight, epsilon)) = (parents(&ops), ops.state);
        register::<B, 3>(grads, nodes, B::norm_rows_backward(x, weight, gradient, epsilon).map(Some));
    }
}

impl<B: NormKernels, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn norm_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), bias.node()];
        let (x, weight, bias) = (x.into_primitive(), weight.into_primitive(), bias.into_primitive());
        match NormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::norm_rows(x.clone(), weight.clone(), bias, epsilon);
                prep.finish((x, weight, epsilon), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::norm_rows(x, weight, bias, epsilon)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;

    type Inputs = (Tensor<3>, Tensor<1>, Tensor<1>);

    fn inputs(floats: Floats, shape: [usize; 3]) -> Inputs {
        let x = floats.leaf(normal(1, shape) * 3.0 + 2.0);
        (x, floats.leaf(normal(2, [shape[2]]) + 1.0), floats.leaf(normal(3, [shape[2]])))
    }

    fn run(
        norm: impl Fn(Tensor<3>, Tensor<1>, Tensor<1>, f64) -> Tensor<3>,
        floats: Floats,
        (x, weight, bias): Inputs,
    ) -> [Vec<f32>; 4] {
        let y = norm(x.clone(), weight.clone(), bias.clone(), 1e-5);
        let out = values(&y);
        let grads = (y * floats.of(normal(4, x.dims()))).sum().backward();
        [out, gradient(&x, &grads), gradient(&weight, &grads), gradient(&bias, &grads)]
    }

    #[test]
    fn values_and_gradients_equal_the_reference() {
        for shape in [[1, 1, 2], [2, 3, 5], [3, 50, 48], [1, 7, 1100]] {
            let inputs = || inputs(Floats::F32, shape);
            let fast = run(layer_norm, Floats::F32, inputs());
            let slow = run(reference::layer_norm, Floats::F32, inputs());
            for (fast, slow) in fast.iter().zip(&slow) {
                // A row of two becomes plus and minus one, and its gradient nearly zero.
                assert!(distance(fast, slow) < 2e-6 || shape[2] == 2, "{shape:?}");
            }
        }
    }

    /// The output and the gradients in `f64`, with loops.
    fn exact(floats: Floats, (x, weight, bias): Inputs) -> [Vec<f32>; 4] {
        let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
        let (n, upstream) = (x.dims()[2], floats.of(normal(4, x.dims())));
        let (g, x, weight, bias) =
            (wide(values(&upstream)), wide(values(&x)), wide(values(&weight)), wide(values(&bias)));
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let (mut dw, mut db) = (vec![0.0; n], vec![0.0; n]);
        for start in (0..x.len()).step_by(n) {
            let row = &x[start..start + n];
            let mean = row.iter().sum::<f64>() / n as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            let unit: Vec<f64> = row.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt()).collect();
            let inner: Vec<f64> = (0..n).map(|i| g[start + i] * weight[i]).collect();
            let along_one = inner.iter().sum::<f64>() / n as f64;
            let along_x = inner.iter().zip(&unit).map(|(a, b)| a * b).sum::<f64>() / n as f64;
            for i in 0..n {
                y[start + i] = unit[i] * weight[i] + bias[i];
                dw[i] += g[start + i] * unit[i];
                db[i] += g[start + i];
                dx[start + i] = (inner[i] - along_one - unit[i] * along_x) / (variance + 1e-5).sqrt();
            }
        }
        [y, dx, dw, db].map(|v| v.into_iter().map(|x| x as f32).collect())
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones() {
        for shape in [[1, 1, 3], [2, 3, 5], [3, 50, 48], [1, 7, 1100]] {
            let inputs = || inputs(Floats::F32, shape);
            let (found, exact) = (run(layer_norm, Floats::F32, inputs()), exact(Floats::F32, inputs()));
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                assert!(distance(found, exact) < 2e-6, "{shape:?}, {i}: {}", distance(found, exact));
            }
        }
    }

    /// Rows whose elements are `offset` plus normal numbers of this deviation.
    fn rows(shape: [usize; 3], deviation: f32, offset: f32) -> Inputs {
        let (_, weight, bias) = inputs(Floats::F32, shape);
        (Floats::F32.leaf(normal(1, shape) * deviation + offset), weight, bias)
    }

    #[test]
    fn rows_of_one_number_become_the_bias() {
        for width in [1, 3, 64, 768, 1024, 1600, 5000] {
            for number in [0.0, 0.1, -1.1, 33.3, 1001.7, 12_345.678, -1e9] {
                let (x, weight, bias) = rows([1, 2, width], 0.0, number);
                let y = values(&layer_norm(x, weight, bias.clone(), 1e-5));
                assert!(y.chunks(width).all(|row| row == values(&bias)), "{width} times {number}");
            }
        }
    }

    #[test]
    fn rows_far_from_zero_and_nearly_alike_equal_the_exact_ones() {
        for (deviation, offset) in
            [(1.0, 1000.0), (0.1, 100.0), (1e-2, 0.0), (1e-4, 0.0), (1e-8, 0.0), (1e6, 1e7)]
        {
            let case = || rows([2, 3, 768], deviation, offset);
            let (found, exact) = (run(layer_norm, Floats::F32, case()), exact(Floats::F32, case()));
            // The mean of a row is a 32-bit number.
            let bound = 2e-6 + f64::from(f32::EPSILON * offset / deviation);
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                let error = distance(found, exact);
                assert!(error < bound, "{deviation} around {offset}, {i}: {error} for {bound}");
            }
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
        #[test]
        fn any_sizes_equal_the_exact_ones(
            batch in 1usize..4, tokens in 1usize..70, width in 3usize..90, size in -6i32..7, offset in -2i32..3,
        ) {
            let (shape, deviation) = ([batch, tokens, width], 2f32.powi(size));
            let case = || rows(shape, deviation, deviation * offset as f32);
            let (found, exact) = (run(layer_norm, Floats::F32, case()), exact(Floats::F32, case()));
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                proptest::prop_assert!(distance(found, exact) < 1e-5, "{i}: {}", distance(found, exact));
            }
        }
    }

    #[test]
    fn a_number_that_is_none_shows_in_its_row() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (x, weight, bias) = rows([1, 3, 37], 1.0, 0.0);
            let mut data = values(&x);
            data[37 + 36] = bad;
            let x = Tensor::from_data(burn::tensor::TensorData::new(data, [1, 3, 37]), &x.device());
            let y = values(&layer_norm(x, weight, bias, 1e-5));
            assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i / 37 == 1)), "{bad}: {y:?}");
        }
    }

    #[test]
    #[should_panic(expected = "of one width, found [6, 3, 3]")]
    fn widths_that_differ_are_named() {
        layer_norm(normal(1, [1, 1, 6]), normal(2, [3]), normal(3, [3]), 1e-5);
    }

    #[test]
    fn bf16_is_rounded_once() {
        for shape in [[1, 1, 3], [2, 3, 5], [3, 50, 48], [1, 7, 1100]] {
            let run = |floats| run(layer_norm, floats, inputs(floats, shape));
            let (found, widened) = (run(Floats::Bf16), run(Floats::Widened));
            let exact = exact(Floats::Bf16, inputs(Floats::Bf16, shape));
            for (i, found) in found.iter().enumerate() {
                assert_rounded(found, &widened[i]);
                assert_within(ROUNDING, &format!("layer_norm {shape:?}, {i}"), found, &exact[i]);
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let run = || run(layer_norm, floats, inputs(floats, [5, 40, 33]));
            let one = with_threads(1, run);
            assert_eq!(one, with_threads(3, run));
            let (x, weight, bias) = inputs(floats, [5, 40, 33]);
            assert_eq!(values(&layer_norm(untracked(x), untracked(weight), untracked(bias), 1e-5)), one[0]);
        }
    }
}
