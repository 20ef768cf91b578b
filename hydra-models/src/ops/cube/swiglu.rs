//! The gated activation.

use super::kernels::activation;
use super::tensors::{arg, elements, float, floats, units, whole};
use crate::ops::swiglu::{SwigluKernels, SwigluOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};

impl SwigluOps for Cube {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let [gate, up] = whole([gate, up]);
        let y = floats(&gate, gate.shape());
        let cubes = elements(&y, y.meta.num_elements());
        activation::swiglu::launch(&y.client, cubes, units(), arg(&gate), arg(&up), arg(&y), float(&y));
        y
    }
}

impl SwigluKernels for Cube {
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let [gate, up, gradient] = whole([gate, up, gradient]);
        let out = [(); 2].map(|()| floats(&gate, gate.shape()));
        let cubes = elements(&gate, gate.meta.num_elements());
        let [d_gate, d_up] = out.each_ref().map(arg);
        let (client, gradient, float) = (&gate.client, arg(&gradient), float(&gate));
        activation::swiglu_backward::launch(
            client,
            cubes,
            units(),
            arg(&gate),
            arg(&up),
            gradient,
            d_gate,
            d_up,
            float,
        );
        out
    }
}
