//! Depthwise convolutions.

use super::kernels::depthwise;
use super::linear::{add_parts, sum_rows};
use super::tensors::{arg, dims, elements, float, floats, reshaped, units, whole, wide};
use crate::ops::depthwise::{DepthwiseKernels, DepthwiseOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;

/// Image rows whose contribution to the kernels' gradient one unit sums.
const PART_ROWS: usize = 16;

/// The convolution plus the bias; without a bias, the one with kernels rotated by 180 degrees.
fn convolved(x: CubeTensor, weight: CubeTensor, bias: Option<CubeTensor>) -> CubeTensor {
    let ([_, height, width, channels], [.., side]) = (dims::<4>(&x), dims::<4>(&weight));
    let y = floats(&x, x.shape());
    let with_bias = bias.is_some();
    // Without a bias the placeholder is not read.
    let bias = bias.unwrap_or_else(|| weight.clone());
    depthwise::depthwise::launch(
        &y.client,
        elements(&y, y.meta.num_elements()),
        units(),
        arg(&x),
        arg(&weight),
        arg(&bias),
        arg(&y),
        height,
        width,
        channels,
        side,
        usize::from(with_bias),
        usize::from(!with_bias),
        float(&y),
    );
    y
}

impl DepthwiseOps for Cube {
    fn depthwise(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [x, weight, bias] = whole([x, weight, bias]);
        convolved(x, weight, Some(bias))
    }
}

impl DepthwiseKernels for Cube {
    fn depthwise_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        let [x, weight, gradient] = whole([x, weight, gradient]);
        let ([items, height, width, channels], [.., side]) = (dims::<4>(&x), dims::<4>(&weight));
        let rows = items * height;
        let for_weight = || {
            let parts = wide(&x, [rows.div_ceil(PART_ROWS), channels * side * side]);
            depthwise::depthwise_weight_parts::launch(
                &x.client,
                elements(&x, parts.meta.num_elements()),
                units(),
                arg(&x),
                arg(&gradient),
                arg(&parts),
                rows,
                height,
                width,
                channels,
                side,
                PART_ROWS,
                float(&x),
            );
            reshaped(add_parts(parts, x.dtype), weight.shape())
        };
        let for_weight = wanted[1].then(for_weight);
        let for_bias = wanted[2].then(|| sum_rows(gradient.clone(), channels));
        let for_x = wanted[0].then(|| convolved(gradient.clone(), weight.clone(), None));
        [for_x, for_weight, for_bias]
    }
}
