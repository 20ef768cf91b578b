//! Depthwise convolutions.

use super::autodiff::*;
use super::kernels::{Mat, sum_rows, vectorized};
use super::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use rayon::prelude::*;

/// The depthwise convolution of `x` `[items, height, width, channels]` with kernels `weight` `[channels, 1, side,
/// side]` of an odd side, plus `bias` `[channels]`: a cross-correlation with zero padding that keeps height and width:
/// [`reference::depthwise`](super::reference::depthwise).
///
/// # Panics
/// If shapes do not fit, the side is even, or float types differ.
pub fn depthwise(x: Tensor<4>, weight: Tensor<4>, bias: Tensor<1>) -> Tensor<4> {
    let ([.., channels], [kernels, one, side, other], [biases]) = (x.dims(), weight.dims(), bias.dims());
    assert!(
        one == 1 && side == other && side % 2 == 1,
        "depthwise expects kernels [channels, 1, side, side] of an odd side, found {:?}",
        weight.dims()
    );
    assert!(
        [kernels, biases] == [channels; 2],
        "depthwise expects a kernel and a bias for each of {channels} channels, found {kernels} and {biases}"
    );
    one_type("depthwise", [x.dtype(), weight.dtype(), bias.dtype()]);
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as DepthwiseOps>::depthwise(x, weight, bias))
}

/// The convolution as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait DepthwiseOps: Backend {
    /// The convolved channels, plus `bias`.
    fn depthwise(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait DepthwiseKernels: DepthwiseOps {
    /// The `wanted` gradients among those of `x`, weight and bias, given that of the output.
    fn depthwise_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3];
}

/// Channels computed together, and the number for the remainder.
const WIDE: usize = 32;
const NARROW: usize = 8;

/// The sizes of images and kernels.
#[derive(Clone, Copy)]
struct Sizes {
    items: usize,
    height: usize,
    width: usize,
    channels: usize,
    side: usize,
}

impl Sizes {
    fn of(x: &FlexTensor, weight: &FlexTensor) -> Self {
        let ([items, height, width, channels], [.., side]) =
            (x.shape().dims::<4>(), weight.shape().dims::<4>());
        Self { items, height, width, channels, side }
    }

    /// The elements of a row of positions.
    fn row(&self) -> usize {
        self.width * self.channels
    }

    /// The row of `x` that row `tap` of the kernel multiplies for output row `y`.
    #[inline(always)]
    fn source(&self, y: usize, tap: usize) -> Option<usize> {
        within(y, tap, self.side, self.height)
    }
}

/// The position, below `count`, that a kernel tap multiplies for output position `at`; `None` beyond the border.
#[inline(always)]
fn within(at: usize, tap: usize, side: usize, count: usize) -> Option<usize> {
    let place = (at + tap).checked_sub(side / 2)?;
    (place < count).then_some(place)
}

/// The kernels `[channels, taps]` as `[taps, channels]`; rotated by 180 degrees for the backward pass.
fn taps(weight: &[f32], sizes: Sizes, turned: bool) -> Vec<f32> {
    let (count, channels) = (sizes.side * sizes.side, sizes.channels);
    let mut taps = vec![0.0; weight.len()];
    for (channel, kernel) in weight.chunks(count).enumerate() {
        for (tap, weight) in kernel.iter().enumerate() {
            let tap = if turned { count - 1 - tap } else { tap };
            taps[tap * channels + channel] = *weight;
        }
    }
    taps
}

/// Sums `N` channels from `first` on at position `[y, x]` of an image, in the order of the taps.
#[inline(always)]
fn sum_place<const N: usize>(
    out: &mut [f32],
    image: &[f32],
    taps: &[f32],
    sizes: Sizes,
    (y, x, first): (usize, usize, usize),
) {
    let Sizes { side, width, channels, .. } = sizes;
    let mut sums = [0f32; N];
    sums.copy_from_slice(&out[..N]);
    for row in 0..side {
        let Some(source) = sizes.source(y, row) else { continue };
        for column in 0..side {
            let Some(place) = within(x, column, side, width) else { continue };
            let values = &image[(source * width + place) * channels + first..][..N];
            let weights = &taps[(row * side + column) * channels + first..][..N];
            for n in 0..N {
                sums[n] += values[n] * weights[n];
            }
        }
    }
    out[..N].copy_from_slice(&sums);
}

/// Adds an image's contribution to output row `y`.
#[inline(always)]
fn sum_row(out: &mut [f32], image: &[f32], taps: &[f32], sizes: Sizes, y: usize) {
    let channels = sizes.channels;
    for (x, out) in out.chunks_mut(channels).enumerate() {
        let mut first = 0;
        while first + WIDE <= channels {
            sum_place::<WIDE>(&mut out[first..], image, taps, sizes, (y, x, first));
            first += WIDE;
        }
        while first + NARROW <= channels {
            sum_place::<NARROW>(&mut out[first..], image, taps, sizes, (y, x, first));
            first += NARROW;
        }
        while first < channels {
            sum_place::<1>(&mut out[first..], image, taps, sizes, (y, x, first));
            first += 1;
        }
    }
}

/// The convolution of images with taps, plus an optional bias.
fn convolved(x: &[f32], taps: &[f32], bias: Option<&[f32]>, sizes: Sizes) -> Vec<f32> {
    let (row, image) = (sizes.row(), sizes.row() * sizes.height);
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(row).enumerate().for_each(|(index, out)| {
        let (item, y) = (index / sizes.height, index % sizes.height);
        let image = &x[item * image..][..image];
        vectorized(
            #[inline(always)]
            || {
                if let Some(bias) = bias {
                    out.chunks_mut(bias.len()).for_each(|out| out.copy_from_slice(bias));
                }
                sum_row(out, image, taps, sizes, y);
            },
        );
    });
    out
}

/// The gradient of `N` channels from `first` on of row `row` of the kernels: `[side][N]`.
///
/// Positions within an image row are summed in `f32`, and rows in `f64`, in order.
#[inline(always)]
fn tap_gradients<const N: usize>(
    x: &[f32],
    gradient: &[f32],
    sizes: Sizes,
    (row, first): (usize, usize),
) -> Vec<f64> {
    let Sizes { items, height, width, channels, side } = sizes;
    let mut totals = vec![0f64; side * N];
    for item in 0..items {
        for y in 0..height {
            let Some(source) = sizes.source(y, row) else { continue };
            let at = |row: usize| (item * height + row) * sizes.row();
            let (x, gradient) = (&x[at(source)..][..sizes.row()], &gradient[at(y)..][..sizes.row()]);
            for (column, totals) in totals.chunks_mut(N).enumerate() {
                let mut sums = [0f32; N];
                // The output positions for which this tap is inside the image.
                let (from, to) =
                    ((side / 2).saturating_sub(column), (width + side / 2).saturating_sub(column));
                for place in from..to.min(width) {
                    let source = place + column - side / 2;
                    let values = &x[source * channels + first..][..N];
                    let gradients = &gradient[place * channels + first..][..N];
                    for n in 0..N {
                        sums[n] += values[n] * gradients[n];
                    }
                }
                totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += f64::from(sum));
            }
        }
    }
    totals
}

/// The gradient of the kernels, `[channels, side, side]`. Each thread computes whole sums.
fn kernel_gradients(x: &[f32], gradient: &[f32], sizes: Sizes) -> Vec<f32> {
    let Sizes { channels, side, .. } = sizes;
    let blocks = (0..channels).step_by(WIDE).flat_map(|first| (0..side).map(move |row| (row, first)));
    let blocks: Vec<(usize, usize)> = blocks.collect();
    let parts = blocks.par_iter().map(|&(row, first)| {
        vectorized(
            #[inline(always)]
            || match channels - first {
                WIDE.. => vec![tap_gradients::<WIDE>(x, gradient, sizes, (row, first))],
                rest => (first..first + rest)
                    .map(|channel| tap_gradients::<1>(x, gradient, sizes, (row, channel)))
                    .collect(),
            },
        )
    });
    let parts: Vec<Vec<Vec<f64>>> = parts.collect();
    let mut out = vec![0.0; channels * side * side];
    for ((row, first), parts) in blocks.into_iter().zip(parts) {
        let lanes = if channels - first < WIDE { 1 } else { WIDE };
        for (part, totals) in parts.iter().enumerate() {
            for (at, total) in totals.iter().enumerate() {
                let (column, channel) = (at / lanes, first + part + at % lanes);
                out[(channel * side + row) * side + column] = *total as f32;
            }
        }
    }
    out
}

impl DepthwiseOps for Flex {
    fn depthwise(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        profile::time(Part::Matmul, || {
            let float = float_type(&x);
            let (x, weight, bias) = (owned(x), owned(weight), owned(bias));
            let sizes = Sizes::of(&x, &weight);
            let taps = taps(floats(&weight), sizes, false);
            flex(convolved(floats(&x), &taps, Some(floats(&bias)), sizes), x.shape(), float)
        })
    }
}

impl DepthwiseKernels for Flex {
    fn depthwise_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        profile::time(Part::Matmul, || {
            let float = float_type(&x);
            let (x, weight, gradient) = (owned(x), owned(weight), owned(gradient));
            let (sizes, gradients) = (Sizes::of(&x, &weight), floats(&gradient));
            let for_x = || {
                let taps = taps(floats(&weight), sizes, true);
                flex(convolved(gradients, &taps, None, sizes), x.shape(), float)
            };
            let for_weight = || flex(kernel_gradients(floats(&x), gradients, sizes), weight.shape(), float);
            let for_bias = || {
                let rows = gradients.len() / sizes.channels;
                flex(sum_rows(Mat::new(gradients, rows, sizes.channels), |x| x), [sizes.channels], float)
            };
            [wanted[0].then(for_x), wanted[1].then(for_weight), wanted[2].then(for_bias)]
        })
    }
}

#[derive(Debug)]
struct DepthwiseBackward;

impl<B: DepthwiseKernels> Backward<B, 3> for DepthwiseBackward {
    type State = [FloatTensor<B>; 2];

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, [x, weight]) = (parents(&ops), ops.state);
        let wanted = nodes.map(|node| node.is_some());
        register::<B, 3>(grads, nodes, B::depthwise_backward(x, weight, gradient, wanted));
    }
}

impl<B: DepthwiseKernels, C: CheckpointStrategy> DepthwiseOps for Autodiff<B, C> {
    fn depthwise(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), bias.node()];
        let (x, weight, bias) = (x.into_primitive(), weight.into_primitive(), bias.into_primitive());
        match DepthwiseBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::depthwise(x.clone(), weight.clone(), bias);
                prep.finish([x, weight], y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::depthwise(x, weight, bias)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;
    use half::bf16;

    /// `[items, height, width, channels]` and the side of the kernels.
    const SHAPES: [([usize; 4], usize); 6] = [
        ([1, 1, 1, 1], 1),
        ([1, 1, 1, 3], 7),
        ([2, 5, 4, 9], 3),
        ([2, 9, 11, 40], 7),
        ([1, 2, 3, 33], 7),
        ([3, 8, 8, 64], 5),
    ];

    type Inputs = (Tensor<4>, Tensor<4>, Tensor<1>);

    fn inputs(floats: Floats, (shape, side): ([usize; 4], usize)) -> Inputs {
        let kernels = floats.leaf(normal(2, [shape[3], 1, side, side]));
        (floats.leaf(normal(1, shape)), kernels, floats.leaf(normal(3, [shape[3]])))
    }

    fn run(
        op: impl Fn(Tensor<4>, Tensor<4>, Tensor<1>) -> Tensor<4>,
        floats: Floats,
        (x, weight, bias): Inputs,
    ) -> [Vec<f32>; 4] {
        let y = op(x.clone(), weight.clone(), bias.clone());
        let out = values(&y);
        let grads = (y * floats.of(normal(4, x.dims()))).sum().backward();
        [out, gradient(&x, &grads), gradient(&weight, &grads), gradient(&bias, &grads)]
    }

    /// The output and the gradients in `f64`, by definition.
    fn exact((shape, side): ([usize; 4], usize), (x, weight, bias): Inputs) -> [Vec<f32>; 4] {
        let [items, height, width, channels] = shape;
        let (x, weight, bias) = (values(&x), values(&weight), values(&bias));
        let upstream = values(&normal(4, shape));
        let (mut y, mut dx) = (vec![0f64; x.len()], vec![0f64; x.len()]);
        let (mut dw, mut db) = (vec![0f64; weight.len()], vec![0f64; channels]);
        let at = |item: usize, row: usize, column: usize, channel: usize| {
            ((item * height + row) * width + column) * channels + channel
        };
        for place in 0..x.len() {
            let (channel, column) = (place % channels, place / channels % width);
            let (row, item) = (place / channels / width % height, place / channels / width / height);
            y[place] += f64::from(bias[channel]);
            db[channel] += f64::from(upstream[place]);
            for tap in 0..side * side {
                let (r, c) = (row + tap / side, column + tap % side);
                let inside =
                    (side / 2..side / 2 + height).contains(&r) && (side / 2..side / 2 + width).contains(&c);
                if inside {
                    let source = at(item, r - side / 2, c - side / 2, channel);
                    let weight_at = channel * side * side + tap;
                    y[place] += f64::from(x[source]) * f64::from(weight[weight_at]);
                    dx[source] += f64::from(upstream[place]) * f64::from(weight[weight_at]);
                    dw[weight_at] += f64::from(upstream[place]) * f64::from(x[source]);
                }
            }
        }
        let _ = items;
        [y, dx, dw, db].map(|values| values.into_iter().map(|x| x as f32).collect())
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones() {
        for shape in SHAPES {
            let found = run(depthwise, Floats::F32, inputs(Floats::F32, shape));
            let exact = exact(shape, inputs(Floats::F32, shape));
            for (found, exact) in found.iter().zip(&exact) {
                assert!(distance(found, exact) < 5e-7, "{shape:?}: {}", distance(found, exact));
            }
        }
    }

    #[test]
    fn values_and_gradients_equal_the_reference() {
        for shape in SHAPES {
            let found = run(depthwise, Floats::F32, inputs(Floats::F32, shape));
            let slow = run(reference::depthwise, Floats::F32, inputs(Floats::F32, shape));
            for (found, slow) in found.iter().zip(&slow) {
                assert!(distance(found, slow) < 1e-6, "{shape:?}: {}", distance(found, slow));
            }
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_a_graph() {
        for shape in SHAPES {
            let all =
                |threads| with_threads(threads, || run(depthwise, Floats::F32, inputs(Floats::F32, shape)));
            let one = all(1);
            assert_eq!(one, all(3));
            let (x, weight, bias) = inputs(Floats::F32, shape);
            let alone = depthwise(untracked(x), untracked(weight), untracked(bias));
            assert_eq!(values(&alone), one[0]);
        }
    }

    #[test]
    fn bf16_is_that_of_the_same_values_in_f32_rounded_once() {
        let shape = ([2, 9, 11, 40], 7);
        let narrow = run(depthwise, Floats::Bf16, inputs(Floats::Bf16, shape));
        let (x, weight, bias) = inputs(Floats::Widened, shape);
        let wide = run(depthwise, Floats::Widened, (x, weight, bias));
        for (narrow, wide) in narrow.iter().zip(&wide) {
            let rounded: Vec<f32> = wide.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
            assert_eq!(narrow, &rounded);
        }
    }

    #[test]
    fn what_is_not_tracked_costs_nothing_and_changes_nothing() {
        let shape = SHAPES[3];
        let all = run(depthwise, Floats::F32, inputs(Floats::F32, shape));
        let (x, weight, bias) = inputs(Floats::F32, shape);
        let y = depthwise(untracked(x), weight.clone(), untracked(bias));
        let grads = (y * normal(4, shape.0)).sum().backward();
        assert_eq!(gradient(&weight, &grads), all[2]);
    }

    #[test]
    #[should_panic(expected = "a kernel and a bias for each of 4 channels, found 3 and 4")]
    fn shapes_that_do_not_fit_are_named() {
        depthwise(normal(1, [1, 2, 2, 4]), normal(2, [3, 1, 3, 3]), normal(3, [4]));
    }
}
