//! Embedding lookup and the tables' gradients.

use super::kernels::embedding as kernels;
use super::tensors::{arg, dims, elements, empty, float, floats, units, whole, whole_ids, zero_floats};
use crate::ops::embedding::{EmbeddingKernels, EmbeddingOps};
use burn::backend::Cube;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

impl EmbeddingOps for Cube {
    fn embed(
        tokens: FloatTensor<Self>,
        positions: FloatTensor<Self>,
        ids: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([tokens, positions], ids) = (whole([tokens, positions]), whole_ids(ids));
        let ([_, width], [batch, length]) = (dims(&tokens), dims(&ids));
        let out = floats(&tokens, [batch, length, width]);
        kernels::embed::launch(
            &out.client,
            elements(&out, out.meta.num_elements()),
            units(),
            arg(&tokens),
            arg(&positions),
            arg(&ids),
            arg(&out),
            length,
            width,
            f32::NAN,
            float(&out),
        );
        out
    }

    fn lookup(tokens: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let ([tokens], ids) = (whole([tokens]), whole_ids(ids));
        let ([_, width], [batch, length]) = (dims(&tokens), dims(&ids));
        let out = floats(&tokens, [batch, length, width]);
        let (cubes, float) = (elements(&out, out.meta.num_elements()), float(&out));
        let (tokens, ids) = (arg(&tokens), arg(&ids));
        kernels::lookup::launch(&out.client, cubes, units(), tokens, ids, arg(&out), width, f32::NAN, float);
        out
    }
}

/// For each position, the next one with the same id, and whether it is the first.
fn links(ids: &CubeTensor) -> [CubeTensor; 2] {
    let count = ids.meta.num_elements();
    let links = [(); 2].map(|()| empty(ids, [count], DType::U32));
    let (next, first) = (arg(&links[0]), arg(&links[1]));
    kernels::link_places::launch(&ids.client, elements(ids, count), units(), arg(ids), next, first);
    links
}

impl EmbeddingKernels for Cube {
    fn token_gradient(rows: usize, ids: IntTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let (ids, [gradient]) = (whole_ids(ids), whole([gradient]));
        let [_, _, width] = dims(&gradient);
        let (out, [next, first]) = (zero_floats(&gradient, [rows, width]), links(&ids));
        kernels::token_gradient::launch(
            &out.client,
            elements(&out, gradient.meta.num_elements()),
            units(),
            arg(&ids),
            arg(&next),
            arg(&first),
            arg(&gradient),
            arg(&out),
            width,
            float(&out),
        );
        out
    }

    fn position_gradient(rows: usize, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let [gradient] = whole([gradient]);
        let [batch, length, width] = dims(&gradient);
        let out = floats(&gradient, [rows, width]);
        kernels::position_gradient::launch(
            &out.client,
            elements(&out, out.meta.num_elements()),
            units(),
            arg(&gradient),
            arg(&out),
            batch,
            length,
            width,
            float(&out),
        );
        out
    }
}
