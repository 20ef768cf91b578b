//! The head and its loss, a chunk of positions at a time.
//!
//! Logits are `f32`. Their gradients are factors of matrix products, and so have the type of the other factor.

use super::kernels::{head as kernels, sums};
use super::matmul::{product, transposed};
use super::tensors::{
    arg, dims, elements, float, floats, made_of, rounded, rows, units, whole, whole_ids, wide,
};
use crate::ops::head::{HeadKernels, HeadOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use std::ops::Range;

/// One pass over the positions.
struct HeadPass {
    hidden: CubeTensor,
    table: CubeTensor,
    targets: CubeTensor,
    /// One over the number of positions with a target, `[1]`.
    share: CubeTensor,
    losses: CubeTensor,
    /// The gradients that are wanted, as far as they are computed.
    for_hidden: Option<CubeTensor>,
    for_table: Option<CubeTensor>,
}

impl HeadPass {
    fn new(hidden: CubeTensor, table: CubeTensor, targets: CubeTensor) -> Self {
        let ([hidden, table], targets) = (whole([hidden, table]), whole_ids(targets));
        let (share, losses) = (wide(&hidden, [1]), wide(&hidden, targets.shape()));
        kernels::share::launch(&hidden.client, rows(&hidden, 1), units(), arg(&targets), arg(&share));
        Self { hidden, table, targets, share, losses, for_hidden: None, for_table: None }
    }

    /// Computes the loss, and the gradients of what is `wanted`: hidden and table.
    fn run(&mut self, chunk_rows: usize, wanted: [bool; 2]) -> CubeTensor {
        let [positions, _] = dims(&self.hidden);
        if wanted[0] {
            self.for_hidden = Some(floats(&self.hidden, self.hidden.shape()));
        }
        for start in (0..positions).step_by(chunk_rows) {
            self.chunk(start..positions.min(start + chunk_rows), wanted);
        }
        self.for_table = self.for_table.take().map(|sum| rounded(sum, self.table.dtype));
        let loss = wide(&self.hidden, [1]);
        let (client, cubes) = (&loss.client, rows(&loss, 1));
        kernels::mean_loss::launch(client, cubes, units(), arg(&self.losses), arg(&self.share), arg(&loss));
        loss
    }

    fn chunk(&mut self, positions: Range<usize>, wanted: [bool; 2]) {
        let ([all, width], dtype) = (dims(&self.hidden), self.hidden.dtype);
        let hidden = self.hidden_rows(&positions);
        let logits = product(hidden.clone(), transposed(self.table.clone()), DType::F32);
        let gradients = self.losses(logits, &positions, wanted != [false; 2]);
        if let Some(out) = &self.for_hidden {
            let part = product(gradients.clone(), self.table.clone(), dtype);
            let (client, cubes) = (&part.client, elements(&part, part.meta.num_elements()));
            let start = positions.start * width;
            sums::copy_to::launch(client, cubes, units(), arg(&part), arg(out), start, float(out));
        }
        if wanted[1] {
            // What others are added to is not rounded yet.
            let dtype = if positions.len() == all { dtype } else { DType::F32 };
            let part = product(transposed(gradients), hidden, dtype);
            match &self.for_table {
                Some(sum) => {
                    let cubes = elements(sum, sum.meta.num_elements());
                    sums::add_to::launch(&sum.client, cubes, units(), arg(sum), arg(&part));
                }
                None => self.for_table = Some(part),
            }
        }
    }

    /// A copy of some of the hidden vectors: a view could start where no device reads whole vectors.
    fn hidden_rows(&self, positions: &Range<usize>) -> CubeTensor {
        let [all, width] = dims(&self.hidden);
        if positions.len() == all {
            return self.hidden.clone();
        }
        let part = floats(&self.hidden, [positions.len(), width]);
        let cubes = elements(&part, part.meta.num_elements());
        let (hidden, start) = (arg(&self.hidden), positions.start * width);
        sums::copy_from::launch(&part.client, cubes, units(), hidden, arg(&part), start, float(&part));
        part
    }

    /// Writes the losses of a chunk's positions, and returns the gradients of its logits if `gradients`.
    fn losses(&self, logits: CubeTensor, positions: &Range<usize>, gradients: bool) -> CubeTensor {
        // Where there are no gradients, they take no memory.
        let dtype = if gradients { self.table.dtype } else { logits.dtype };
        let (out, room) = made_of(&logits, 0, dtype);
        kernels::row_losses::launch(
            &logits.client,
            rows(&logits, positions.len()),
            units(),
            arg(&logits),
            room,
            arg(&self.targets),
            arg(&self.share),
            arg(&self.losses),
            positions.start,
            self.table.shape()[0],
            f32::NAN,
            gradients,
            float(&out),
        );
        out
    }
}

impl HeadOps for Cube {
    fn head_loss(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        chunk_rows: usize,
    ) -> FloatTensor<Self> {
        HeadPass::new(hidden, table, targets).run(chunk_rows, [false; 2])
    }
}

impl HeadKernels for Cube {
    fn head_loss_and_gradients(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        chunk_rows: usize,
        wanted: [bool; 2],
    ) -> (FloatTensor<Self>, [Option<FloatTensor<Self>>; 2]) {
        let mut pass = HeadPass::new(hidden, table, targets);
        let loss = pass.run(chunk_rows, wanted);
        (loss, [pass.for_hidden, pass.for_table])
    }

    fn scaled(x: FloatTensor<Self>, factor: &FloatTensor<Self>) -> FloatTensor<Self> {
        let ([x], [factor]) = (whole([x]), whole([factor.clone()]));
        let y = floats(&x, x.shape());
        let cubes = elements(&y, y.meta.num_elements());
        sums::scale::launch(&y.client, cubes, units(), arg(&x), arg(&factor), arg(&y), float(&y));
        y
    }
}
