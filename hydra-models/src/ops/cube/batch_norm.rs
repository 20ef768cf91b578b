//! Batch normalization, in Burn's own operations.

use super::tensors::{dims, whole};
use crate::ops::batch_norm::{BatchNormKernels, BatchNormOps};
use burn::backend::Cube;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Shape};
use hydra_core::cube::exact;

type Tensor = FloatTensor<Cube>;

fn wide(tensor: Tensor) -> Tensor {
    match tensor.dtype {
        DType::F32 => tensor,
        _ => Cube::float_cast(tensor, FloatDType::F32),
    }
}

/// The tensor in row-major order, in this type.
fn stored(tensor: Tensor, dtype: DType) -> Tensor {
    match dtype == tensor.dtype {
        true => exact(tensor),
        false => exact(Cube::float_cast(tensor, dtype.into())),
    }
}

/// The means and variances of statistics.
fn rows(statistics: Tensor) -> [Tensor; 2] {
    let [_, channels] = dims(&statistics);
    let row = |row: usize| {
        let range = [(row..row + 1).into(), (0..channels).into()];
        Cube::float_reshape(Cube::float_slice(statistics.clone(), &range), Shape::new([channels]))
    };
    [row(0), row(1)]
}

impl BatchNormOps for Cube {
    fn batch_statistics(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [x] = whole([x]);
        let [items, channels, places] = dims(&x);
        let count = items * places;
        let rows = Self::float_swap_dims(wide(x), 0, 1);
        let rows = Self::float_reshape(rows, Shape::new([channels, count]));
        let mean = Self::float_mean_dim(rows.clone(), 1);
        let centered = Self::float_sub(rows, mean.clone());
        let variance = Self::float_mean_dim(Self::float_mul(centered.clone(), centered), 1);
        let correction = count as f64 / (count as f64 - 1.0);
        let unbiased = Self::float_mul_scalar(variance.clone(), correction.into());
        exact(Self::float_swap_dims(Self::float_cat(vec![mean, variance, unbiased], 1), 0, 1))
    }

    fn batch_normalized(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype;
        let ([x, weight, bias], [mean, variance]) = (whole([x, weight, bias]), rows(statistics));
        stored(Self::batch_norm(wide(x), wide(weight), wide(bias), mean, variance, epsilon), dtype)
    }
}

impl BatchNormKernels for Cube {
    fn batch_normalized_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        statistics: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> [FloatTensor<Self>; 3] {
        let dtype = x.dtype;
        let ([x, weight, gradient], [mean, variance]) = (whole([x, weight, gradient]), rows(statistics));
        let of =
            Self::batch_norm_train_backward(wide(x), wide(weight), mean, variance, epsilon, wide(gradient));
        [of.x_grad, of.gamma_grad, of.beta_grad].map(|gradient| stored(gradient, dtype))
    }
}
