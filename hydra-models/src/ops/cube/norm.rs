//! Layer normalization.

use super::kernels::norm;
use super::linear::{PART_ROWS, add_parts, sum_rows};
use super::tensors::{arg, dims, elements, float, floats, rows, units, whole, wide};
use crate::ops::norm::{NormKernels, NormOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};

impl NormOps for Cube {
    fn norm_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let [x, weight, bias] = whole([x, weight, bias]);
        let ([width], y) = (dims(&weight), floats(&x, x.shape()));
        norm::norm_rows::launch(
            &y.client,
            rows(&y, y.meta.num_elements() / width),
            units(),
            arg(&x),
            arg(&weight),
            arg(&bias),
            arg(&y),
            width,
            epsilon as f32,
            float(&y),
        );
        y
    }
}

impl NormKernels for Cube {
    fn norm_rows_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3] {
        let [x, weight, gradient] = whole([x, weight, gradient]);
        let ([width], out) = (dims(&weight), floats(&x, x.shape()));
        let count = x.meta.num_elements() / width;
        let statistics = wide(&x, [count, 2]);
        norm::norm_rows_backward::launch(
            &x.client,
            rows(&x, count),
            units(),
            arg(&x),
            arg(&weight),
            arg(&gradient),
            arg(&out),
            arg(&statistics),
            width,
            epsilon as f32,
            float(&x),
        );
        let parts = wide(&x, [count.div_ceil(PART_ROWS), width]);
        norm::norm_weight_parts::launch(
            &x.client,
            elements(&x, parts.meta.num_elements()),
            units(),
            arg(&x),
            arg(&gradient),
            arg(&statistics),
            arg(&parts),
            count,
            width,
            PART_ROWS,
            float(&x),
        );
        [out, add_parts(parts, x.dtype), sum_rows(gradient, width)]
    }
}
