//! Batch normalization.

use super::autodiff::*;
use super::kernels::vectorized;
use super::math::sums;
use super::tensors::{flex, float_type, floats, one_type, owned, rounded};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// Statistics of a batch, each of shape `[channels]` and without a gradient.
#[derive(Clone, Debug)]
pub struct BatchStatistics {
    /// The means.
    pub mean: Tensor<1>,
    /// The variances, with Bessel's correction, as running statistics have them.
    pub unbiased: Tensor<1>,
}

/// Batch normalization (Ioffe and Szegedy, 2015) of `x`, `[items, channels, places]`, by the statistics of the batch, with a
/// weight and a bias of shape `[channels]`. Variances that normalize have no correction, as in PyTorch.
///
/// # Panics
/// If sizes or float types differ, or a channel has a single value.
pub fn batch_norm(
    x: Tensor<3>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
) -> (Tensor<3>, BatchStatistics) {
    let ([items, channels, places], sizes) = (x.dims(), [weight.dims()[0], bias.dims()[0]]);
    assert!(
        sizes == [channels; 2],
        "batch_norm expects a weight and a bias for each of {channels} channels, found {sizes:?}"
    );
    assert!(
        items * places > 1,
        "batch_norm expects several values for each channel in a training pass, found {:?}: use larger batches",
        x.dims()
    );
    one_type("batch_norm", [x.dtype(), weight.dtype(), bias.dtype()]);
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    let statistics = <Dispatch as BatchNormOps>::batch_statistics(x.clone());
    let y = <Dispatch as BatchNormOps>::batch_normalized(x, weight, bias, statistics.clone(), epsilon);
    let statistics = Tensor::<2>::from_dispatch(statistics);
    let row = |row: usize| statistics.clone().slice([row..row + 1, 0..channels]).reshape([channels]);
    (Tensor::from_dispatch(y), BatchStatistics { mean: row(0), unbiased: row(2) })
}

/// The normalization as backend ops. Statistics are `F32`, `[3, channels]`: means, variances, and variances with Bessel's
/// correction.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait BatchNormOps: Backend {
    /// The statistics of `x`, without a gradient.
    fn batch_statistics(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The channels of `x` normalized by its own `statistics`, times `weight`, plus `bias`.
    fn batch_normalized(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait BatchNormKernels: BatchNormOps {
    /// The gradients of `x`, weight and bias, given that of the output.
    fn batch_normalized_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3];
}

/// The sizes of a batch `[items, channels, places]`.
#[derive(Clone, Copy)]
struct Sizes {
    items: usize,
    channels: usize,
    places: usize,
}

impl Sizes {
    fn of(x: &FlexTensor) -> Self {
        let [items, channels, places] = x.shape().dims();
        Self { items, channels, places }
    }

    /// The values of a channel.
    fn count(self) -> f64 {
        (self.items * self.places) as f64
    }

    /// The values of a channel in each item, in order.
    fn planes(self, values: &[f32], channel: usize) -> impl Iterator<Item = &[f32]> {
        let plane =
            move |item: usize| &values[(item * self.channels + channel) * self.places..][..self.places];
        (0..self.items).map(plane)
    }
}

/// Sums over the values of a channel in two batches, item by item.
fn channel_sums<const N: usize>(
    (a, b): (&[f32], &[f32]),
    sizes: Sizes,
    channel: usize,
    f: impl Fn(f32, f32) -> [f32; N],
) -> [f64; N] {
    let mut total = [0.0; N];
    for (a, b) in sizes.planes(a, channel).zip(sizes.planes(b, channel)) {
        let item = vectorized(
            #[inline(always)]
            || sums(a, b, &f),
        );
        total.iter_mut().zip(item).for_each(|(total, item)| *total += item);
    }
    total
}

/// The mean of a channel, its variance, and its variance with Bessel's correction.
fn moments(x: &[f32], sizes: Sizes, channel: usize) -> [f32; 3] {
    let count = sizes.count();
    let [total] = channel_sums((x, x), sizes, channel, |x, _| [x]);
    // The mean is corrected by the mean of the residuals, as in `norm.rs`.
    let near = (total / count) as f32;
    let residuals = channel_sums((x, x), sizes, channel, |x, _| [x - near, (x - near) * (x - near)]);
    let [rest, squares] = residuals.map(|sum| sum / count);
    let variance = squares - rest * rest;
    let variance = if variance < 0.0 { 0.0 } else { variance };
    [(f64::from(near) + rest) as f32, variance as f32, (variance * count / (count - 1.0)) as f32]
}

fn inverse(variance: f32, epsilon: f64) -> f32 {
    (1.0 / (f64::from(variance) + epsilon).sqrt()) as f32
}

/// The rows of statistics.
fn rows(statistics: &FlexTensor, channels: usize) -> [&[f32]; 2] {
    let values = floats(statistics);
    [&values[..channels], &values[channels..2 * channels]]
}

impl BatchNormOps for Flex {
    fn batch_statistics(x: FloatTensor<Self>) -> FloatTensor<Self> {
        profile::time(Part::Norm, || {
            let x = owned(x);
            let sizes = Sizes::of(&x);
            let of = |channel| moments(floats(&x), sizes, channel);
            let channels: Vec<[f32; 3]> = (0..sizes.channels).into_par_iter().map(of).collect();
            let row = |row: usize| channels.iter().map(move |of| of[row]);
            let rows = row(0).chain(row(1)).chain(row(2)).collect();
            flex(rows, [3, sizes.channels], hydra_core::FloatType::F32)
        })
    }

    fn batch_normalized(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        profile::time(Part::Norm, || {
            let float = float_type(&x);
            let (mut y, weight, bias, statistics) = (owned(x), owned(weight), owned(bias), owned(statistics));
            let sizes = Sizes::of(&y);
            let ([mean, variance], weight, bias) =
                (rows(&statistics, sizes.channels), floats(&weight), floats(&bias));
            let items = y.storage_mut::<f32>().par_chunks_mut(sizes.channels * sizes.places);
            items.for_each(|item| {
                for (channel, y) in item.chunks_mut(sizes.places).enumerate() {
                    let (mean, inverse) = (mean[channel], inverse(variance[channel], epsilon));
                    let (weight, bias) = (weight[channel], bias[channel]);
                    vectorized(
                        #[inline(always)]
                        || y.iter_mut().for_each(|y| *y = (*y - mean) * inverse * weight + bias),
                    );
                }
            });
            rounded(y, float)
        })
    }
}

impl BatchNormKernels for Flex {
    fn batch_normalized_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3] {
        profile::time(Part::Norm, || backward(x, weight, statistics, gradient, epsilon))
    }
}

fn backward(
    x: FlexTensor,
    weight: FlexTensor,
    statistics: FlexTensor,
    gradient: FlexTensor,
    epsilon: f64,
) -> [FlexTensor; 3] {
    let float = float_type(&x);
    let (x, weight, statistics, mut gradient) = (owned(x), owned(weight), owned(statistics), owned(gradient));
    let sizes @ Sizes { channels, places, .. } = Sizes::of(&x);
    let ([mean, variance], weight, x) = (rows(&statistics, channels), floats(&weight), floats(&x));
    let of = |channel: usize| {
        let (mean, inverse) = (mean[channel], inverse(variance[channel], epsilon));
        channel_sums((floats(&gradient), x), sizes, channel, |g, x| [g, g * (x - mean) * inverse])
    };
    let sums: Vec<[f64; 2]> = (0..channels).into_par_iter().map(of).collect();
    let items = gradient.storage_mut::<f32>().par_chunks_mut(channels * places);
    items.zip(x.par_chunks(channels * places)).for_each(|(gradient, x)| {
        for (channel, (g, x)) in gradient.chunks_mut(places).zip(x.chunks(places)).enumerate() {
            let (mean, inverse) = (mean[channel], inverse(variance[channel], epsilon));
            let [along_one, along_x] = sums[channel].map(|sum| (sum / sizes.count()) as f32);
            let scale = weight[channel] * inverse;
            vectorized(
                #[inline(always)]
                || {
                    for (g, &x) in g.iter_mut().zip(x) {
                        *g = scale * (*g - along_one - (x - mean) * inverse * along_x);
                    }
                },
            );
        }
    });
    let column = |row: usize| sums.iter().map(|of| of[row] as f32).collect();
    [rounded(gradient, float), flex(column(1), [channels], float), flex(column(0), [channels], float)]
}

#[derive(Debug)]
struct BatchNormBackward;

impl<B: BatchNormKernels> Backward<B, 3> for BatchNormBackward {
    type State = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, f64);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, (x, weight, statistics, epsilon)) = (parents(&ops), ops.state);
        let gradients = B::batch_normalized_backward(x, weight, statistics, gradient, epsilon);
        register::<B, 3>(grads, nodes, gradients.map(Some));
    }
}

impl<B: BatchNormKernels, C: CheckpointStrategy> BatchNormOps for Autodiff<B, C> {
    fn batch_statistics(x: FloatTensor<Self>) -> FloatTensor<Self> {
        // A constant, which nothing tracks.
        FloatTensor::<Self>::new(B::batch_statistics(x.into_primitive()))
    }

    fn batch_normalized(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), bias.node()];
        let (x, weight, bias) = (x.into_primitive(), weight.into_primitive(), bias.into_primitive());
        let statistics = statistics.into_primitive();
        match BatchNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::batch_normalized(x.clone(), weight.clone(), bias, statistics.clone(), epsilon);
                prep.finish((x, weight, statistics, epsilon), y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::batch_normalized(x, weight, bias, statistics, epsilon))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    type Inputs = (Tensor<3>, Tensor<1>, Tensor<1>);

    const SHAPES: [[usize; 3]; 5] = [[2, 1, 1], [2, 3, 5], [3, 50, 48], [1, 7, 1100], [40, 6, 1]];

    fn inputs(floats: Floats, shape: [usize; 3], (deviation, offset): (f32, f32)) -> Inputs {
        let x = floats.leaf(normal(1, shape) * deviation + offset);
        (x, floats.leaf(normal(2, [shape[1]]) + 1.0), floats.leaf(normal(3, [shape[1]])))
    }

    /// The output, the gradients of x, weight and bias, and the statistics.
    fn run(floats: Floats, (x, weight, bias): Inputs) -> [Vec<f32>; 6] {
        let (y, of) = batch_norm(x.clone(), weight.clone(), bias.clone(), 1e-5);
        let (out, statistics) = (values(&y), [&of.mean, &of.unbiased].map(values));
        let grads = (y * floats.of(normal(4, x.dims()))).sum().backward();
        let [mean, unbiased] = statistics;
        [out, gradient(&x, &grads), gradient(&weight, &grads), gradient(&bias, &grads), mean, unbiased]
    }

    /// The same in `f64`, with loops.
    fn exact(floats: Floats, (x, weight, bias): Inputs) -> [Vec<f32>; 6] {
        let wide = |t: Vec<f32>| t.into_iter().map(f64::from).collect::<Vec<_>>();
        let [items, channels, places] = x.dims();
        let upstream = wide(values(&floats.of(normal(4, x.dims()))));
        let (x, weight, bias) = (wide(values(&x)), wide(values(&weight)), wide(values(&bias)));
        let n = (items * places) as f64;
        let mut out = [(); 2].map(|()| vec![0.0; x.len()]);
        let mut of_channel = [(); 4].map(|()| vec![0.0; channels]);
        for channel in 0..channels {
            let plane = |item: usize| (item * channels + channel) * places;
            let at: Vec<usize> = (0..items).flat_map(|item| plane(item)..plane(item) + places).collect();
            let mean = at.iter().map(|i| x[*i]).sum::<f64>() / n;
            let variance = at.iter().map(|i| (x[*i] - mean).powi(2)).sum::<f64>() / n;
            let inverse = 1.0 / (variance + 1e-5).sqrt();
            let unit = |i: usize| (x[i] - mean) * inverse;
            let along_one = at.iter().map(|i| upstream[*i]).sum::<f64>();
            let along_x = at.iter().map(|i| upstream[*i] * unit(*i)).sum::<f64>();
            for &i in &at {
                out[0][i] = unit(i) * weight[channel] + bias[channel];
                let centered = upstream[i] - along_one / n - unit(i) * along_x / n;
                out[1][i] = weight[channel] * inverse * centered;
            }
            let found = [along_x, along_one, mean, variance * n / (n - 1.0)];
            of_channel.iter_mut().zip(found).for_each(|(all, found)| all[channel] = found);
        }
        let ([y, dx], [dw, db, mean, unbiased]) = (out, of_channel);
        [y, dx, dw, db, mean, unbiased].map(|v| v.into_iter().map(|x| x as f32).collect())
    }

    #[test]
    fn values_gradients_and_statistics_equal_the_exact_ones() {
        for (shape, spread) in
            SHAPES.into_iter().zip([(3.0, 2.0), (1.0, 0.0), (0.1, 5.0), (1.0, 30.0), (9.0, 1.0)])
        {
            let case = || inputs(Floats::F32, shape, spread);
            let (found, exact) = (run(Floats::F32, case()), exact(Floats::F32, case()));
            // Two values become plus and minus one, and their gradient nearly zero.
            let bound = 4e-6 + f64::from(f32::EPSILON * spread.1 / spread.0);
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                let error = distance(found, exact);
                assert!(
                    error < bound || (i == 1 && shape == SHAPES[0]),
                    "{shape:?}, {i}: {error} for {bound}"
                );
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let case = || inputs(floats, [5, 40, 33], (1.0, 0.5));
            let one = with_threads(1, || run(floats, case()));
            assert_eq!(one, with_threads(3, || run(floats, case())));
            let (x, weight, bias) = case();
            let plain = batch_norm(untracked(x), untracked(weight), untracked(bias), 1e-5).0;
            assert_eq!(values(&plain), one[0]);
        }
    }

    #[test]
    fn bf16_is_rounded_once() {
        for shape in SHAPES {
            let run = |floats| run(floats, inputs(floats, shape, (1.0, 0.25)));
            let (found, widened) = (run(Floats::Bf16), run(Floats::Widened));
            found[..4].iter().zip(&widened).for_each(|(found, widened)| assert_rounded(found, widened));
            assert_eq!(found[4..], widened[4..], "statistics are not rounded");
        }
    }

    #[test]
    fn batches_without_statistics_and_sizes_that_differ_are_named() {
        let refusal = |x: [usize; 3], width: usize| {
            let run = || drop(batch_norm(normal(1, x), normal(2, [width]), normal(3, [width]), 1e-5));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("no statistics");
            hydra_core::panic_message(&*panic)
        };
        assert!(
            refusal([1, 4, 1], 4)
                .contains("several values for each channel in a training pass, found [1, 4, 1]")
        );
        assert!(refusal([2, 4, 3], 3).contains("each of 4 channels, found [3, 3]"));
    }
}
