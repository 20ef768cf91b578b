//! GPT-2's activation function.

use super::kernels::activation;
use super::tensors::{arg, elements, float, floats, units, whole};
use crate::ops::gelu::{GeluKernels, GeluOps};
use burn::backend::Cube;
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;

impl GeluOps for Cube {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [x] = whole([x]);
        let y = floats(&x, x.shape());
        let cubes = elements(&y, y.meta.num_elements());
        activation::gelu::launch(&y.client, cubes, units(), arg(&x), arg(&y), float(&x));
        y
    }
}

impl GeluKernels for Cube {
    fn gelu_tanh_backward(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let [x, gradient] = whole([x, gradient]);
        let out = floats(&x, x.shape());
        let cubes = elements(&out, out.meta.num_elements());
        let (client, gradient, float) = (&out.client, arg(&gradient), float(&x));
        activation::gelu_backward::launch(client, cubes, units(), arg(&x), gradient, arg(&out), float);
        out
    }
}
