//! Root-mean-square normalization.

use super::autodiff::*;
use super::kernels::vectorized;
use super::math::{sum, sum2};
use super::tensors::{flex, float_type, floats, one_type, owned, rounded};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// Root mean square normalization (Zhang and Sennrich, 2019) of the last dimension of `x`, `[batch, tokens, width]`,
/// with a weight: `x / sqrt(mean(x^2) + epsilon) * weight`. If the last dimension is a multiple of the weight's width,
/// each part of that width is normalized separately, as for the queries and keys of each head.
///
/// # Panics
/// If the width is not a multiple of the weight's, or float types differ.
pub fn rms_norm(x: Tensor<3>, weight: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let ([_, _, width], [part]) = (x.dims(), weight.dims());
    assert!(
        part > 0 && width.is_multiple_of(part),
        "rms_norm expects rows that are a multiple of the weight's width, which is {part}; found {width}"
    );
    one_type("rms_norm", [x.dtype(), weight.dtype()]);
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(<Dispatch as RmsNormOps>::rms_rows(x, weight, epsilon))
}

/// The normalization as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait RmsNormOps: Backend {
    /// Normalizes the rows of `x`, as wide as `weight`, and multiplies them by `weight`.
    fn rms_rows(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait RmsNormKernels: RmsNormOps {
    /// The `wanted` gradients among those of `x` and the weight, given that of the output.
    fn rms_rows_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];
}

/// Rows whose weight gradient is summed by one thread.
const ROWS: usize = 64;

/// One over the root of the mean square.
#[inline(always)]
fn inverse_root(row: &[f32], epsilon: f64) -> f32 {
    let mean = sum(row, |x| x * x) / row.len() as f64;
    (1.0 / (mean + epsilon).sqrt()) as f32
}

#[inline(always)]
fn norm_row(row: &mut [f32], weight: &[f32], epsilon: f64) {
    let inverse = inverse_root(row, epsilon);
    row.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * inverse * w);
}

/// Replaces a row's output gradient with the input's, and adds the row's weight gradient to `for_weight`.
#[inline(always)]
fn backward_row(gradient: &mut [f32], x: &[f32], weight: &[f32], epsilon: f64, for_weight: &mut [f32]) {
    let inverse = inverse_root(x, epsilon);
    for ((sum, &g), &x) in for_weight.iter_mut().zip(&*gradient).zip(x) {
        *sum += g * (x * inverse);
    }
    gradient.iter_mut().zip(weight).for_each(|(g, w)| *g *= w);
    let along = (sum2(gradient, x, |g, x| g * (x * inverse)) / x.len() as f64) as f32;
    for (g, &x) in gradient.iter_mut().zip(x) {
        *g = inverse * (*g - x * inverse * along);
    }
}

impl RmsNormOps for Flex {
    fn rms_rows(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        profile::time(Part::Norm, || {
            let float = float_type(&x);
            let (mut x, weight) = (owned(x), owned(weight));
            let weight = floats(&weight);
            x.storage_mut::<f32>().par_chunks_mut(ROWS * weight.len()).for_each(|rows| {
                vectorized(
                    #[inline(always)]
                    || {
                        for row in rows.chunks_mut(weight.len()) {
                            norm_row(row, weight, epsilon);
                        }
                    },
                );
            });
            rounded(x, float)
        })
    }
}

impl RmsNormKernels for Flex {
    fn rms_rows_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        let [for_x, for_weight] = profile::time(Part::Norm, || backward(x, weight, gradient, epsilon));
        [wanted[0].then_some(for_x), wanted[1].then_some(for_weight)]
    }
}

fn backward(x: FlexTensor, weight: FlexTensor, gradient: FlexTensor, epsilon: f64) -> [FlexTensor; 2] {
    let float = float_type(&x);
    let (x, weight, mut gradient) = (owned(x), owned(weight), owned(gradient));
    let weight = floats(&weight);
    let width = weight.len();
    let parts = gradient.storage_mut::<f32>().par_chunks_mut(ROWS * width);
    let parts = parts.zip(floats(&x).par_chunks(ROWS * width)).map(|(gradient, x)| {
        let mut for_weight = vec![0.0; width];
        vectorized(
            #[inline(always)]
            || {
                for (gradient, x) in gradient.chunks_mut(width).zip(x.chunks(width)) {
                    backward_row(gradient, x, weight, epsilon, &mut for_weight);
                }
            },
        );
        for_weight
    });
    let parts: Vec<Vec<f32>> = parts.collect();
    // Parts have a fixed number of rows and are summed in order.
    let mut for_weight = vec![0.0; width];
    for part in &parts {
        for_weight.iter_mut().zip(part).for_each(|(sum, g)| *sum += g);
    }
    [rounded(gradient, float), flex(for_weight, [width], float)]
}

#[derive(Debug)]
struct RmsNormBackward;

impl<B: RmsNormKernels> Backward<B, 2> for RmsNormBackward {
    type State = (FloatTensor<B>, FloatTensor<B>, f64);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, (x, weight, epsilon)) = (parents(&ops), ops.state);
        let wanted = nodes.map(|node| node.is_some());
        register::<B, 2>(grads, nodes, B::rms_rows_backward(x, weight, gradient, epsilon, wanted));
    }
}

impl<B: RmsNormKernels, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_rows(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node()];
        let (x, weight) = (x.into_primitive(), weight.into_primitive());
        match RmsNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::rms_rows(x.clone(), weight.clone(), epsilon);
                prep.finish((x, weight, epsilon), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rms_rows(x, weight, epsilon)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;

    /// Rows, and the width of the weight.
    const SHAPES: [([usize; 3], usize); 6] = [
        ([1, 1, 1], 1),
        ([2, 3, 5], 5),
        ([3, 50, 48], 48),
        ([1, 7, 1100], 1100),
        ([2, 9, 48], 16),
        ([2, 70, 15], 3),
    ];

    type Inputs = (Tensor<3>, Tensor<1>);

    fn inputs(floats: Floats, (shape, width): ([usize; 3], usize)) -> Inputs {
        let x = floats.leaf(normal(1, shape) * 3.0 + 2.0);
        (x, floats.leaf(normal(2, [width]) + 1.0))
    }

    fn run(
        norm: impl Fn(Tensor<3>, Tensor<1>, f64) -> Tensor<3>,
        floats: Floats,
        (x, weight): Inputs,
    ) -> [Vec<f32>; 3] {
        let y = norm(x.clone(), weight.clone(), 1e-5);
        let out = values(&y);
        let grads = (y * floats.of(normal(4, x.dims()))).sum().backward();
        [out, gradient(&x, &grads), gradient(&weight, &grads)]
    }

    /// The output and the gradients in `f64`, with loops.
    fn exact(floats: Floats, (x, weight): Inputs) -> [Vec<f32>; 3] {
        let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
        let (n, upstream) = (weight.dims()[0], floats.of(normal(4, x.dims())));
        let (g, x, weight) = (wide(values(&upstream)), wide(values(&x)), wide(values(&weight)));
        let (mut y, mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; x.len()], vec![0.0; n]);
        for start in (0..x.len()).step_by(n) {
            let row = &x[start..start + n];
            let root = (row.iter().map(|x| x * x).sum::<f64>() / n as f64 + 1e-5).sqrt();
            let inner: Vec<f64> = (0..n).map(|i| g[start + i] * weight[i]).collect();
            let along = inner.iter().zip(row).map(|(a, x)| a * x / root).sum::<f64>() / n as f64;
            for i in 0..n {
                y[start + i] = row[i] / root * weight[i];
                dw[i] += g[start + i] * row[i] / root;
                dx[start + i] = (inner[i] - row[i] / root * along) / root;
            }
        }
        [y, dx, dw].map(|v| v.into_iter().map(|x| x as f32).collect())
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones_and_the_reference() {
        for shape in SHAPES {
            let inputs = || inputs(Floats::F32, shape);
            let found = run(rms_norm, Floats::F32, inputs());
            for (what, expected) in [
                ("exact", exact(Floats::F32, inputs())),
                ("reference", run(reference::rms_norm, Floats::F32, inputs())),
            ] {
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let error = distance(found, expected);
                    // The gradient of a one-element row is nearly zero.
                    assert!(error < 2e-6 || (shape.1 == 1 && i == 1), "{shape:?}, {i}, {what}: {error}");
                }
            }
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
        #[test]
        fn any_sizes_equal_the_exact_ones(
            batch in 1usize..4, tokens in 1usize..70, parts in 1usize..4, width in 3usize..90,
        ) {
            let case = || inputs(Floats::F32, ([batch, tokens, parts * width], width));
            let (found, exact) = (run(rms_norm, Floats::F32, case()), exact(Floats::F32, case()));
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                proptest::prop_assert!(distance(found, exact) < 1e-5, "{i}: {}", distance(found, exact));
            }
        }
    }

    #[test]
    fn bf16_is_rounded_once() {
        for shape in SHAPES {
            let run = |floats| run(rms_norm, floats, inputs(floats, shape));
            let (found, widened) = (run(Floats::Bf16), run(Floats::Widened));
            for (found, widened) in found.iter().zip(&widened) {
                assert_rounded(found, widened);
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let inputs = || inputs(floats, ([5, 40, 66], 33));
            let one = with_threads(1, || run(rms_norm, floats, inputs()));
            assert_eq!(one, with_threads(3, || run(rms_norm, floats, inputs())));
            let (x, weight) = inputs();
            assert_eq!(values(&rms_norm(untracked(x), untracked(weight), 1e-5)), one[0]);
        }
    }

    #[test]
    fn a_row_of_zeros_stays_that_and_a_number_that_is_none_shows_in_its_row() {
        let (x, weight) = inputs(Floats::F32, ([1, 3, 37], 37));
        let zeros = values(&rms_norm(x.zeros_like(), weight.clone(), 1e-5));
        assert!(zeros.iter().all(|x| *x == 0.0));
        for bad in [f32::NAN, f32::INFINITY] {
            let mut data = values(&x);
            data[37 + 36] = bad;
            let x = Tensor::from_data(burn::tensor::TensorData::new(data, [1, 3, 37]), &x.device());
            let y = values(&rms_norm(x, weight.clone(), 1e-5));
            let rows: Vec<bool> = y.chunks(37).map(|row| row.iter().any(|y| y.is_nan())).collect();
            assert_eq!(rows, [false, true, false], "{bad}");
        }
    }

    #[test]
    #[should_panic(expected = "a multiple of the weight's width, which is 4; found 6")]
    fn widths_that_do_not_fit_are_named() {
        rms_norm(normal(1, [1, 1, 6]), normal(2, [4]), 1e-5);
    }
}
