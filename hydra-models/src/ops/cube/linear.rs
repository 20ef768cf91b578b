//! The affine map, on matrix products.

use super::kernels::sums;
use super::matmul::{product, transposed};
use super::tensors::{arg, dims, elements, floats, reshaped, units, whole};
use crate::ops::linear::{AffineKernels, AffineOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;

/// Rows that one unit adds.
pub(super) const PART_ROWS: usize = 64;

/// The sum of all rows of `x`, which are `width` wide: of every [`PART_ROWS`] rows first, then of those sums.
pub(super) fn sum_rows(x: CubeTensor, width: usize) -> CubeTensor {
    let rows = x.meta.num_elements() / width;
    add_parts(part_sums(x, rows, width, PART_ROWS))
}

/// The sum of the rows of `[parts, width]`, in their order.
pub(super) fn add_parts(parts: CubeTensor) -> CubeTensor {
    let [rows, width] = dims(&parts);
    reshaped(part_sums(parts, rows, width, rows), [width])
}

fn part_sums(x: CubeTensor, rows: usize, width: usize, part_rows: usize) -> CubeTensor {
    let parts = floats(&x, [rows.div_ceil(part_rows), width]);
    let cubes = elements(&parts, parts.meta.num_elements());
    sums::sum_parts::launch(&x.client, cubes, units(), arg(&x), arg(&parts), rows, width, part_rows);
    parts
}

/// The rows of a `[batch, tokens, width]`, as a matrix.
fn as_rows(x: CubeTensor) -> CubeTensor {
    let [batch, tokens, width] = dims(&x);
    reshaped(whole(x), [batch * tokens, width])
}

impl AffineOps for Cube {
    fn affine(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([batch, tokens, _], [_, outputs], bias) = (dims(&x), dims(&weight), whole(bias));
        let y = product(as_rows(x), whole(weight));
        let cubes = elements(&y, y.meta.num_elements());
        sums::add_row::launch(&y.client, cubes, units(), arg(&y), arg(&bias), outputs);
        reshaped(y, [batch, tokens, outputs])
    }

    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (residual, bias, [_, outputs]) = (whole(residual), whole(bias), dims(&weight));
        let y = product(as_rows(x), whole(weight));
        let cubes = elements(&y, y.meta.num_elements());
        let (client, residual, shape) = (&y.client, &residual, residual.shape());
        sums::add_row_and_residual::launch(
            client,
            cubes,
            units(),
            arg(&y),
            arg(&bias),
            arg(residual),
            outputs,
        );
        reshaped(y, shape)
    }
}

impl AffineKernels for Cube {
    fn affine_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        let ([_, outputs], shape) = (dims(&weight), x.shape());
        let (gradient, weight) = (as_rows(gradient), whole(weight));
        let for_x = || reshaped(product(gradient.clone(), transposed(weight)), shape);
        let for_weight = || product(transposed(as_rows(x)), gradient.clone());
        let for_bias = || sum_rows(gradient.clone(), outputs);
        [wanted[0].then(for_x), wanted[1].then(for_weight), wanted[2].then(for_bias)]
    }
}
