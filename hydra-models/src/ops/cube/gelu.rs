//! The Gaussian error linear unit.

use super::kernels::activation;
use super::tensors::{arg, elements, float, floats, units, whole};
use crate::ops::gelu::{GeluForm, GeluKernels, GeluOps};
use burn::backend::Cube;
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use std::f32::consts::{FRAC_1_SQRT_2, PI};

/// The probability that a standard normal number is below `x`, of Burn's operations.
fn probability(x: FloatTensor<Cube>) -> FloatTensor<Cube> {
    let erf = Cube::float_erf(Cube::float_mul_scalar(x, FRAC_1_SQRT_2.into()));
    Cube::float_mul_scalar(Cube::float_add_scalar(erf, 1f32.into()), 0.5f32.into())
}

impl GeluOps for Cube {
    fn gelu_in(x: FloatTensor<Self>, form: GeluForm) -> FloatTensor<Self> {
        if form == GeluForm::Exact {
            return Self::float_mul(x.clone(), probability(x));
        }
        let [x] = whole([x]);
        let y = floats(&x, x.shape());
        let cubes = elements(&y, y.meta.num_elements());
        activation::gelu::launch(&y.client, cubes, units(), arg(&x), arg(&y), float(&x));
        y
    }
}

impl GeluKernels for Cube {
    fn gelu_in_backward(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        form: GeluForm,
    ) -> FloatTensor<Self> {
        if form == GeluForm::Exact {
            let square = Self::float_mul(x.clone(), x.clone());
            let density = Self::float_exp(Self::float_mul_scalar(square, (-0.5f32).into()));
            let density = Self::float_mul_scalar(density, (1.0 / (2.0 * PI).sqrt()).into());
            let slope = Self::float_add(probability(x.clone()), Self::float_mul(x, density));
            return Self::float_mul(gradient, slope);
        }
        let [x, gradient] = whole([x, gradient]);
        let out = floats(&x, x.shape());
        let cubes = elements(&out, out.meta.num_elements());
        let (client, gradient, float) = (&out.client, arg(&gradient), float(&x));
        activation::gelu_backward::launch(client, cubes, units(), arg(&x), gradient, arg(&out), float);
        out
    }
}
