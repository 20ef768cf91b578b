//! Root-mean-square normalization.

use super::kernels::norm;
use super::linear::{PART_ROWS, add_parts};
use super::tensors::{arg, dims, elements, float, floats, rows, units, whole, wide};
use crate::ops::rms_norm::{RmsNormKernels, RmsNormOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};

impl RmsNormOps for Cube {
    fn rms_rows(x: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        let [x, weight] = whole([x, weight]);
        let ([width], y) = (dims(&weight), floats(&x, x.shape()));
        let cubes = rows(&y, y.meta.num_elements() / width);
        let (client, float) = (&y.client, float(&y));
        let epsilon = epsilon as f32;
        norm::rms_rows::launch(client, cubes, units(), arg(&x), arg(&weight), arg(&y), width, epsilon, float);
        y
    }
}

impl RmsNormKernels for Cube {
    fn rms_rows_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        let [x, weight, gradient] = whole([x, weight, gradient]);
        let ([width], out) = (dims(&weight), floats(&x, x.shape()));
        let count = x.meta.num_elements() / width;
        let statistics = wide(&x, [count, 2]);
        norm::rms_rows_backward::launch(
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
        let for_weight = || {
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
            add_parts(parts, x.dtype)
        };
        let for_weight = wanted[1].then(for_weight);
        [wanted[0].then_some(out), for_weight]
    }
}
