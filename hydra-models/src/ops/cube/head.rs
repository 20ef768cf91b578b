//! The head and its loss, one chunk of positions at a time.
//!
//! Logits are `f32`. Their gradients are factors of matrix products and have the type of the other factor.
//!
//! Both are stored in parts of some thousand vocabulary entries each, and the products of all parts are computed as one
//! batch. The product for the hidden gradient, with few rows and columns, would have too few tiles for a card with an
//! unsplit inner dimension; and an odd vocabulary size, as GPT-2's, has rows that do not allow vector accesses.

use super::kernels::head::{self as kernels, PART};
use super::kernels::sums;
use super::matmul::{add_product_to, product, product_to, transposed};
use super::tensors::{
    arg, dims, elements, empty, float, floats, made_of, part, reshaped, rounded, rows, units, whole,
    whole_ids, wide,
};
use crate::ops::head::{HeadKernels, HeadOps, HeadOptions};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use std::ops::Range;

/// The parts of a vocabulary: [`PART`] entries each, the last at most as many.
#[derive(Clone, Copy)]
struct Parts {
    full: usize,
    last: usize,
}

impl Parts {
    fn of(vocabulary: usize) -> Self {
        let full = (vocabulary - 1) / PART;
        Self { full, last: vocabulary - full * PART }
    }

    /// Logits, or their gradients, as matrices `[parts, rows, entries]`.
    fn of_logits(self, logits: &CubeTensor, rows: usize) -> Vec<CubeTensor> {
        self.cut(logits, rows, |parts, entries| [parts, rows, entries])
    }

    /// A table, or its gradient, as matrices `[parts, entries, width]`.
    fn of_table(self, table: &CubeTensor, width: usize) -> Vec<CubeTensor> {
        self.cut(table, width, |parts, entries| [parts, entries, width])
    }

    /// The full parts, if any, and the last one, with `width` numbers per entry.
    fn cut(
        self,
        all: &CubeTensor,
        numbers: usize,
        shape: impl Fn(usize, usize) -> [usize; 3],
    ) -> Vec<CubeTensor> {
        let full = (self.full > 0).then(|| part(all, 0, shape(self.full, PART)));
        full.into_iter().chain([part(all, self.full * PART * numbers, shape(1, self.last))]).collect()
    }
}

/// The chunks of a CPU that a card computes at once. The losses of the rows of one would leave most of a card idle.
const CHUNKS: usize = 4;

/// One pass over the positions.
struct HeadPass {
    hidden: CubeTensor,
    table: CubeTensor,
    targets: CubeTensor,
    /// The gradient with respect to the positions' losses: one over the number of positions with a target, `[1]`, or
    /// that of each position, `[positions]`.
    shares: CubeTensor,
    /// Whether `shares` has one of each position.
    each: bool,
    losses: CubeTensor,
    /// The wanted gradients computed so far.
    for_hidden: Option<CubeTensor>,
    for_table: Option<CubeTensor>,
}

impl HeadPass {
    /// A pass for the gradients of the mean loss, or for those that the losses of the positions have.
    fn new(
        hidden: CubeTensor,
        table: CubeTensor,
        targets: CubeTensor,
        of_losses: Option<CubeTensor>,
    ) -> Self {
        let ([hidden, table], targets) = (whole([hidden, table]), whole_ids(targets));
        let (losses, each) = (wide(&hidden, targets.shape()), of_losses.is_some());
        let [shares] = match of_losses {
            Some(given) => whole([given]),
            None => {
                let share = wide(&hidden, [1]);
                kernels::share::launch(&hidden.client, rows(&hidden, 1), units(), arg(&targets), arg(&share));
                [share]
            }
        };
        Self { hidden, table, targets, shares, each, losses, for_hidden: None, for_table: None }
    }

    /// Computes the mean loss and the `wanted` gradients among those of hidden and table.
    fn mean(&mut self, chunk_rows: usize, wanted: [bool; 2]) -> CubeTensor {
        self.run(chunk_rows, wanted);
        let loss = wide(&self.hidden, [1]);
        let (client, cubes) = (&loss.client, rows(&loss, 1));
        kernels::mean_loss::launch(client, cubes, units(), arg(&self.losses), arg(&self.shares), arg(&loss));
        loss
    }

    /// Computes the losses and the `wanted` gradients.
    fn run(&mut self, chunk_rows: usize, wanted: [bool; 2]) {
        let ([positions, _], chunk_rows) = (dims::<2>(&self.hidden), CHUNKS * chunk_rows);
        if wanted[0] {
            self.for_hidden = Some(floats(&self.hidden, self.hidden.shape()));
        }
        for start in (0..positions).step_by(chunk_rows) {
            self.chunk(start..positions.min(start + chunk_rows), wanted);
        }
        self.for_table = self.for_table.take().map(|sum| rounded(sum, self.table.dtype));
    }

    fn chunk(&mut self, positions: Range<usize>, wanted: [bool; 2]) {
        let ([all, width], [vocabulary, _]) = (dims(&self.hidden), dims(&self.table));
        let (count, parts) = (positions.len(), Parts::of(vocabulary));
        let hidden = reshaped(self.hidden_rows(&positions), [1, count, width]);
        let logits = wide(&hidden, [count * vocabulary]);
        let tables = parts.of_table(&self.table, width);
        for (logits, table) in parts.of_logits(&logits, count).iter().zip(&tables) {
            product_to(hidden.clone(), transposed(table.clone()), logits);
        }
        let gradients = self.losses(logits, &positions, parts, wanted != [false; 2]);
        let gradients = || parts.of_logits(&gradients, count).into_iter();
        if wanted[0] {
            self.write_hidden(gradients().zip(tables), positions.start * width);
        }
        if wanted[1] {
            let multiply_to = if self.for_table.is_some() { add_product_to } else { product_to };
            let for_table = self.for_table.get_or_insert_with(|| {
                // An intermediate sum is not rounded yet.
                let dtype = if count == all { self.table.dtype } else { DType::F32 };
                empty(&self.table, [vocabulary, width], dtype)
            });
            for (gradients, out) in gradients().zip(parts.of_table(for_table, width)) {
                multiply_to(transposed(gradients), hidden.clone(), &out);
            }
        }
    }

    /// Writes the gradients of a chunk's hidden vectors, starting at element `start`: the sums over the parts of the
    /// vocabulary, in order.
    fn write_hidden(&self, parts: impl Iterator<Item = (CubeTensor, CubeTensor)>, start: usize) {
        let Some(out) = &self.for_hidden else { return };
        let products: Vec<CubeTensor> =
            parts.map(|(gradients, table)| product(gradients, table, DType::F32)).collect();
        let [.., rest] = products.as_slice() else { return };
        let cubes = elements(rest, rest.meta.num_elements());
        match &products[..products.len() - 1] {
            [parts] => sums::sum_to::launch(
                &out.client,
                cubes,
                units(),
                arg(parts),
                arg(rest),
                arg(out),
                start,
                float(out),
            ),
            _ => sums::copy_to::launch(&out.client, cubes, units(), arg(rest), arg(out), start, float(out)),
        }
    }

    /// A copy of some hidden vectors: a view might not be aligned for vector accesses.
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
    fn losses(
        &self,
        logits: CubeTensor,
        positions: &Range<usize>,
        parts: Parts,
        gradients: bool,
    ) -> CubeTensor {
        // Without gradients, `out` takes no memory.
        let dtype = if gradients { self.table.dtype } else { logits.dtype };
        let (out, room) = made_of(&logits, 0, dtype);
        kernels::row_losses::launch(
            &logits.client,
            rows(&logits, positions.len()),
            units(),
            arg(&logits),
            room,
            arg(&self.targets),
            arg(&self.shares),
            arg(&self.losses),
            positions.start,
            parts.last,
            self.table.shape()[0],
            f32::NAN,
            gradients,
            self.each,
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
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        HeadPass::new(hidden, table, targets, None).mean(options.chunk_rows, [false; 2])
    }

    fn token_losses(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let mut pass = HeadPass::new(hidden, table, targets, None);
        pass.run(options.chunk_rows, [false; 2]);
        pass.losses
    }
}

impl HeadKernels for Cube {
    fn head_loss_and_gradients(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> (FloatTensor<Self>, [Option<FloatTensor<Self>>; 2]) {
        let mut pass = HeadPass::new(hidden, table, targets, None);
        let loss = pass.mean(options.chunk_rows, wanted);
        (loss, [pass.for_hidden, pass.for_table])
    }

    fn token_gradients(
        (hidden, table, targets): (FloatTensor<Self>, FloatTensor<Self>, IntTensor<Self>),
        losses: FloatTensor<Self>,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        let mut pass = HeadPass::new(hidden, table, targets, Some(losses));
        pass.run(options.chunk_rows, wanted);
        [pass.for_hidden, pass.for_table]
    }

    fn scaled(x: FloatTensor<Self>, factor: &FloatTensor<Self>) -> FloatTensor<Self> {
        let ([x], [factor]) = (whole([x]), whole([factor.clone()]));
        let y = floats(&x, x.shape());
        let cubes = elements(&y, y.meta.num_elements());
        sums::scale::launch(&y.client, cubes, units(), arg(&x), arg(&factor), arg(&y), float(&y));
        y
    }
}
