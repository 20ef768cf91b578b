//! Linear layers, on matrix products.
//!
//! A product stays in `f32` until the bias is added, so that the output is rounded once. For 16-bit tensors without
//! cuBLASLt this takes the memory of two more outputs while the op runs, because CubeCL has no kernel that adds a bias to
//! a product. A quantized weight is dequantized into memory of its own while an op runs.

use super::kernels::{nf4, sums};
use super::matmul::{Terms, has_library, multiplied, product, transposed};
use super::tensors::{
    arg, dims, elements, empty, float, floats, made_of, reshaped, units, whole, zero_floats,
};
use crate::ops::linear::{AffineKernels, AffineOps, Form};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use hydra_core::cube::exact;

/// Rows summed by one unit.
pub(super) const PART_ROWS: usize = 64;

/// The sum of all rows of `x`, of `width` elements each: first over every [`PART_ROWS`] rows, then over those sums.
pub(super) fn sum_rows(x: CubeTensor, width: usize) -> CubeTensor {
    let (rows, dtype) = (x.meta.num_elements() / width, x.dtype);
    add_parts(part_sums(x, [rows, width], PART_ROWS, DType::F32), dtype)
}

/// The sum of the rows of `[parts, width]`, in order.
pub(super) fn add_parts(parts: CubeTensor, dtype: DType) -> CubeTensor {
    let [rows, width] = dims(&parts);
    reshaped(part_sums(parts, [rows, width], rows, dtype), [width])
}

fn part_sums(x: CubeTensor, [rows, width]: [usize; 2], part_rows: usize, dtype: DType) -> CubeTensor {
    let parts = empty(&x, [rows.div_ceil(part_rows), width], dtype);
    let (cubes, floats) = (elements(&parts, parts.meta.num_elements()), [float(&x), float(&parts)]);
    sums::sum_parts::launch(&x.client, cubes, units(), arg(&x), arg(&parts), rows, width, part_rows, floats);
    parts
}

/// The largest tile of a product; slicing aims at as many such tiles as a large card computes concurrently.
const TILE: [usize; 2] = [256, 128];
const TILES: usize = 128;
/// The minimum number of rows of a slice.
const SLICE_ROWS: usize = 256;

/// `x^T @ y` for row-major `[rows, m]` and `[rows, n]`, such as the gradient of a weight; summed in `f32` and stored in
/// `dtype`.
///
/// A product with few tiles and many rows would leave most of a card idle, so the rows are cut into slices whose
/// products are computed as one batch and then summed in order; cuBLASLt does the same by itself.
fn product_over_rows(x: CubeTensor, y: CubeTensor, dtype: DType) -> CubeTensor {
    let ([rows, m], [_, n]) = (dims(&x), dims(&y));
    let slices = if has_library(&x) { 1 } else { slices(rows, [m, n]) };
    if slices == 1 {
        return product(transposed(x), y, dtype);
    }
    let [x, y] = [(x, m), (y, n)].map(|(of, width)| reshaped(of, [slices, rows / slices, width]));
    let sums = product(transposed(x), y, DType::F32);
    reshaped(add_parts(reshaped(sums, [slices, m * n]), dtype), [m, n])
}

/// The number of equal slices that the rows are cut into: a power of two.
fn slices(rows: usize, sides: [usize; 2]) -> usize {
    let tiles: usize = sides.iter().zip(TILE).map(|(side, of)| side.div_ceil(of)).product();
    let mut slices = 1;
    while slices * tiles < TILES && rows.is_multiple_of(2 * slices) && rows / (2 * slices) >= SLICE_ROWS {
        slices *= 2;
    }
    slices
}

/// `x @ weight` plus `terms`, with the rows of `x` and of the terms, by cuBLASLt; `None` if it cannot.
fn fused(x: &CubeTensor, weight: &CubeTensor, terms: Terms<'_>) -> Option<CubeTensor> {
    has_library(x).then_some(())?;
    let y = floats(x, [dims::<2>(x)[0], dims::<2>(weight)[1]]);
    multiplied(x, weight, &y, terms).then_some(y)
}

/// The rows of a `[batch, tokens, width]` tensor as a matrix.
fn as_rows(x: CubeTensor) -> CubeTensor {
    let [batch, tokens, width] = dims(&x);
    reshaped(x, [batch * tokens, width])
}

/// A weight as a matrix `[in, out]`, of the type of `like`: a view of a dense weight, the values of a quantized one.
fn as_matrix(weight: &CubeTensor, form: Form, like: &CubeTensor) -> CubeTensor {
    match form {
        Form::InOut => dense(weight, like),
        Form::OutIn => transposed(dense(weight, like)),
        Form::Nf4(shape) => {
            let values = floats(like, shape);
            let cubes = elements(&values, values.meta.num_elements().div_ceil(nf4::PER_WORD));
            let blocks = arg(&exact(weight.clone()));
            nf4::dequantize::launch(&values.client, cubes, units(), blocks, arg(&values), float(&values));
            transposed(values)
        }
    }
}

/// A weight in row-major order.
///
/// # Panics
/// If it is not of the type of `like`.
fn dense(weight: &CubeTensor, like: &CubeTensor) -> CubeTensor {
    let [weight, _] = whole([weight.clone(), like.clone()]);
    weight
}

impl AffineOps for Cube {
    fn affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        let ([batch, tokens, _], outputs) = (dims(&x), form.outputs(dims(&weight)));
        let [x, bias] = whole([x, bias]);
        let (weight, x) = (as_matrix(&weight, form, &x), as_rows(x));
        if let Some(y) = fused(&x, &weight, Terms { bias: Some(&bias), onto: None }) {
            return reshaped(y, [batch, tokens, outputs]);
        }
        let xw = product(x, weight, DType::F32);
        let (y, room) = made_of(&xw, 0, bias.dtype);
        let (client, cubes) = (&y.client, elements(&y, y.meta.num_elements()));
        sums::add_row::launch(client, cubes, units(), arg(&xw), arg(&bias), room, outputs, float(&y));
        reshaped(y, [batch, tokens, outputs])
    }

    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        let (outputs, shape) = (form.outputs(dims(&weight)), residual.shape());
        let [residual, x, bias] = whole([residual, x, bias]);
        let (weight, x, residual) = (as_matrix(&weight, form, &x), as_rows(x), as_rows(residual));
        if let Some(y) = fused(&x, &weight, Terms { bias: Some(&bias), onto: Some(&residual) }) {
            return reshaped(y, shape);
        }
        let xw = product(x, weight, DType::F32);
        let (y, room) = made_of(&xw, 0, bias.dtype);
        sums::add_row_and_residual::launch(
            &y.client,
            elements(&y, y.meta.num_elements()),
            units(),
            arg(&xw),
            arg(&bias),
            arg(&residual),
            room,
            outputs,
            float(&y),
        );
        reshaped(y, shape)
    }

    /// Generation does not run on GPUs.
    fn product_by_row(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self> {
        Self::product(x, weight, form)
    }

    fn product(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self> {
        let ([batch, tokens, _], outputs, dtype) = (dims(&x), form.outputs(dims(&weight)), x.dtype);
        let [x] = whole([x]);
        let weight = as_matrix(&weight, form, &x);
        reshaped(product(as_rows(x), weight, dtype), [batch, tokens, outputs])
    }

    fn product_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        let shape = residual.shape();
        let [residual, x] = whole([residual, x]);
        if has_library(&x) {
            let (matrix, rows) = (as_matrix(&weight, form, &x), as_rows(x.clone()));
            let onto = as_rows(residual.clone());
            if let Some(y) = fused(&rows, &matrix, Terms { bias: None, onto: Some(&onto) }) {
                return reshaped(y, shape);
            }
        }
        // A bias of zeros is one row that stays in the cache.
        let bias = zero_floats(&residual, [form.outputs(dims(&weight))]);
        Self::affine_onto(residual, x, weight, bias, form)
    }
}

impl AffineKernels for Cube {
    fn affine_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        form: Form,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        let (outputs, shape, dtype) = (form.outputs(dims(&weight)), x.shape(), x.dtype);
        let [x, gradient] = whole([x, gradient]);
        let weight = wanted[0].then(|| as_matrix(&weight, form, &x));
        let gradient = as_rows(gradient);
        let for_x = |weight| reshaped(product(gradient.clone(), transposed(weight), dtype), shape);
        let for_weight = || match form {
            Form::InOut => product_over_rows(as_rows(x), gradient.clone(), dtype),
            // A quantized weight has no gradient.
            Form::OutIn | Form::Nf4(_) => product_over_rows(gradient.clone(), as_rows(x), dtype),
        };
        let for_bias = || sum_rows(gradient.clone(), outputs);
        [weight.map(for_x), wanted[1].then(for_weight), wanted[2].then(for_bias)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_where_a_product_has_few_tiles_for_many_rows() {
        // The weights of a GPT-2 block, its head's table, and cases that cannot be sliced or are too small.
        let cases = [
            (4096, [768, 768], 8),
            (4096, [768, 2304], 4),
            (4096, [768, 3072], 2),
            (4096, [3072, 768], 2),
            (4096, [50257, 768], 1),
            (4095, [768, 768], 1),
            (1536, [768, 768], 4),
            (511, [8, 8], 1),
        ];
        for (rows, sides, expected) in cases {
            assert_eq!(slices(rows, sides), expected, "{rows} {sides:?}");
        }
    }
}
