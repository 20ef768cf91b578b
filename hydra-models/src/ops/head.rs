//! The language model head with its loss, or with the loss of each position, as one operation, so that logits are never
//! whole in memory.

use super::autodiff::*;
use super::counted::{self, Group};
use super::embedding::integers_below;
use super::kernels::{Keep, Mat, MatMut, Write, bf16, matmul, product_into, vectorized};
use super::math::{ELEMENTS, exp_in_place, max};
use super::tensors::{bits, flex, float_type, floats, one_type, owned, rounded};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use hydra_core::{FloatType, Pass};
use rayon::prelude::*;

/// The target of a position without a prediction; any negative number has this meaning.
pub const IGNORED: i32 = -1;

/// The mean cross-entropy, `F32` of shape `[1]`, of logits `hidden @ table^T` against `targets`.
///
/// `hidden` is `[positions, width]`, `table` `[vocabulary, width]`, and `targets` holds an id for each position, or a
/// negative number ([`IGNORED`]) if there is nothing to predict. Logits are computed for at most `chunk_rows` positions
/// at a time, four times as many on a CubeCL device. If anything is tracked, the gradients are computed in the same pass and kept until the backward.
///
/// On a CPU, positions without a target are skipped, except in a [worst-case pass](Pass::worst_case). This changes no
/// result: each position's loss and gradient have the same bits as if all positions were computed, and the table's
/// gradient is summed chunk by chunk.
///
///
/// # Panics
/// If shapes do not fit, float types differ, an id is not below the vocabulary, no position has a target, or
/// `chunk_rows` is zero.
pub fn head_loss(
    hidden: Tensor<2>,
    table: Tensor<2>,
    targets: Tensor<1, Int>,
    chunk_rows: usize,
    pass: &Pass,
) -> Tensor<1> {
    let options = HeadOptions::of("head_loss", [&hidden, &table], &targets, chunk_rows, pass);
    let (hidden, table, targets) = (hidden.into_dispatch(), table.into_dispatch(), targets.into_dispatch());
    Tensor::from_dispatch(<Dispatch as HeadOps>::head_loss(hidden, table, targets, options))
}

/// The cross-entropy of each position, `F32` of shape `[positions]`, with the operands of [`head_loss`]; 0 where a
/// position has no target. It is the negative log-probability of the target.
///
/// On a CPU each position's loss has the same bits whatever the other positions are, as far as the table is more than 64
/// wide and 64 long. The gradients need the logits again, which the backward computes again.
///
/// # Panics
/// As [`head_loss`], but no position needs a target.
pub fn token_losses(
    hidden: Tensor<2>,
    table: Tensor<2>,
    targets: Tensor<1, Int>,
    chunk_rows: usize,
    pass: &Pass,
) -> Tensor<1> {
    let options = HeadOptions::of("token_losses", [&hidden, &table], &targets, chunk_rows, pass);
    let (hidden, table, targets) = (hidden.into_dispatch(), table.into_dispatch(), targets.into_dispatch());
    Tensor::from_dispatch(<Dispatch as HeadOps>::token_losses(hidden, table, targets, options))
}

/// The settings of the head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadOptions {
    /// The maximum number of positions whose logits are in memory at the same time.
    pub(super) chunk_rows: usize,
    /// Whether positions without a target are computed too.
    worst_case: bool,
}

impl HeadOptions {
    /// The settings of `op` for these operands, which are checked.
    #[track_caller]
    fn of(
        op: &str,
        [hidden, table]: [&Tensor<2>; 2],
        targets: &Tensor<1, Int>,
        chunk_rows: usize,
        pass: &Pass,
    ) -> Self {
        let ([positions, width], [_, table_width], [count]) = (hidden.dims(), table.dims(), targets.dims());
        assert!(
            width == table_width && positions == count && chunk_rows > 0,
            "the head expects a table {width} wide, {positions} targets and chunks of at least one row; \
             found {table_width}, {count} and {chunk_rows}"
        );
        one_type(op, [hidden.dtype(), table.dtype()]);
        Self { chunk_rows, worst_case: pass.is_worst_case() }
    }

    /// The positions to compute, `together` next to each other or none, for a table of this shape.
    fn groups(self, targets: &[Option<usize>], table: [usize; 2], together: usize) -> Vec<Group> {
        let Self { chunk_rows, worst_case } = self;
        match counted::most(targets.len(), chunk_rows, table) {
            Some(most) if !worst_case => counted::counted(targets, [chunk_rows, together], most),
            _ => counted::all(targets.len(), chunk_rows),
        }
    }
}

/// The head as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait HeadOps: Backend {
    /// The mean loss, `F32` of shape `[1]`.
    fn head_loss(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self>;

    /// The loss of each position, `F32` of shape `[positions]`.
    fn token_losses(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait HeadKernels: HeadOps {
    /// The loss, and the `wanted` gradients among those of hidden and table.
    fn head_loss_and_gradients(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> (FloatTensor<Self>, [Option<FloatTensor<Self>>; 2]);

    /// The `wanted` gradients among those of hidden and table, given those of the positions' losses.
    fn token_gradients(
        operands: (FloatTensor<Self>, FloatTensor<Self>, IntTensor<Self>),
        losses: FloatTensor<Self>,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];

    /// `x` times a factor, `F32` of shape `[1]`; rounded once more if `x` has 16 bits.
    fn scaled(x: FloatTensor<Self>, factor: &FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The elements of hidden and table, and their products.
trait Element: Copy + Sync {
    /// Neighbours whose order in sums depends on each other.
    const TOGETHER: usize;

    /// The elements of a tensor.
    fn of(tensor: &FlexTensor) -> &[Self];

    /// The product into a reused vector.
    fn product_into(out: &mut Vec<f32>, keep: Keep, a: Mat<'_, Self>, b: Mat<'_, Self>);

    /// The product into a matrix.
    fn write_product(out: &mut MatMut<'_>, a: Mat<'_, Self>, b: Mat<'_, Self>);

    /// Prepares the gradients of a row of logits as a factor.
    fn as_factor(row: &mut [f32]);

    /// The prepared rows.
    fn factors(rows: &[f32], cols: usize) -> Mat<'_, Self>;
}

impl Element for f32 {
    const TOGETHER: usize = 1;

    fn of(tensor: &FlexTensor) -> &[f32] {
        floats(tensor)
    }

    fn product_into(out: &mut Vec<f32>, keep: Keep, a: Mat<'_>, b: Mat<'_>) {
        product_into(out, keep, a, b);
    }

    fn write_product(out: &mut MatMut<'_>, a: Mat<'_>, b: Mat<'_>) {
        matmul(out, Write::Set, 1.0, a, b);
    }

    #[inline(always)]
    fn as_factor(_: &mut [f32]) {}

    fn factors(rows: &[f32], cols: usize) -> Mat<'_> {
        Mat::new(rows, rows.len() / cols, cols)
    }
}

/// `bf16`: gradients of logits are rounded before they are multiplied.
impl Element for u16 {
    /// The pairs of the products.
    const TOGETHER: usize = 2;

    fn of(tensor: &FlexTensor) -> &[u16] {
        bits(tensor)
    }

    fn product_into(out: &mut Vec<f32>, keep: Keep, a: Mat<'_, u16>, b: Mat<'_, u16>) {
        bf16::product_into(out, keep, a, b);
    }

    fn write_product(out: &mut MatMut<'_>, a: Mat<'_, u16>, b: Mat<'_, u16>) {
        bf16::matmul(out, Write::Set, a, b);
    }

    #[inline(always)]
    fn as_factor(row: &mut [f32]) {
        bf16::round_in_place(row);
    }

    fn factors(rows: &[f32], cols: usize) -> Mat<'_, u16> {
        bf16::halves(rows, rows.len() / cols, cols)
    }
}

/// A pass over the positions, one group at a time.
struct HeadPass {
    hidden: FlexTensor,
    table: FlexTensor,
    /// Whether products are of `bf16`.
    narrow: bool,
    targets: Vec<Option<usize>>,
    groups: Vec<Group>,
    /// The gradient with respect to each position's loss.
    shares: Vec<f32>,
    /// The wanted gradients computed so far.
    for_hidden: Option<Vec<f32>>,
    for_table: Option<Vec<f32>>,
}

impl HeadPass {
    fn new(
        hidden: FlexTensor,
        table: FlexTensor,
        targets: FlexTensor,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> Self {
        let narrow = float_type(&hidden) == FloatType::Bf16;
        let made = |tensor: FlexTensor| if narrow { tensor.to_contiguous() } else { owned(tensor) };
        let (hidden, table) = (made(hidden), made(table));
        let targets = integers_below(targets, table.shape()[0], ["target", "the vocabulary's"]);
        let together = if narrow { <u16 as Element>::TOGETHER } else { <f32 as Element>::TOGETHER };
        let groups = options.groups(&targets, table.shape().dims(), together);
        // Gradients of skipped positions are zero.
        let for_hidden = wanted[0].then(|| vec![0.0; hidden.shape().num_elements()]);
        let for_table = wanted[1].then(|| Vec::with_capacity(table.shape().num_elements()));
        Self { hidden, table, narrow, targets, groups, shares: Vec::new(), for_hidden, for_table }
    }

    /// Computes the mean loss and its wanted gradients.
    fn mean(&mut self) -> f32 {
        let terms = self.targets.iter().flatten().count();
        assert!(terms > 0, "no position has a target: a loss needs sequences of at least two tokens");
        self.shares = vec![(1.0 / terms as f64) as f32; self.targets.len()];
        let mut total = 0.0;
        // Losses are summed in position order, regardless of the threads that computed them.
        self.run(|_, loss| total += loss);
        (total / terms as f64) as f32
    }

    /// Computes the loss of each position.
    fn losses(&mut self) -> Vec<f32> {
        let mut losses = vec![0.0; self.targets.len()];
        self.run(|position, loss| losses[position] = loss as f32);
        losses
    }

    /// Computes the losses in position order, and the wanted gradients.
    fn run(&mut self, mut with_loss: impl FnMut(usize, f64)) {
        for group in std::mem::take(&mut self.groups) {
            let losses = if self.narrow { self.group::<u16>(&group) } else { self.group::<f32>(&group) };
            let losses = group.rows.iter().zip(losses);
            losses.for_each(|(row, loss)| loss.into_iter().for_each(|loss| with_loss(*row, loss)));
        }
    }

    /// The wanted gradients that were computed, of this type.
    fn into_gradients(mut self, float: FloatType) -> [Option<FlexTensor>; 2] {
        let shapes = [self.hidden.shape(), self.table.shape()];
        let gradients = [self.for_hidden.take(), self.for_table.take()];
        // The table may be a widened copy that is not used any more while its gradient is rounded.
        drop(self);
        let mut shapes = shapes.into_iter();
        gradients.map(|values| shapes.next().and_then(|shape| Some(flex(values?, shape, float))))
    }

    /// The losses of a group's positions; adds their contributions to the wanted gradients.
    fn group<T: Element>(&mut self, group: &Group) -> Vec<Option<f64>> {
        let ([positions, width], [vocabulary, _]) = (self.hidden.shape().dims(), self.table.shape().dims());
        let (hidden, table) = (self.hidden.clone(), self.table.clone());
        let table = Mat::new(T::of(&table), vocabulary, width);
        let hidden = Mat::new(T::of(&hidden), positions, width);
        let gathered;
        let hidden = match group.neighbours() {
            Some(rows) => hidden.rows(rows),
            None => {
                gathered = gather(hidden, &group.rows);
                Mat::new(&gathered, group.rows.len(), width)
            }
        };
        let logits = &mut Vec::new();
        T::product_into(logits, Keep::Nothing, hidden, table.t());
        let losses = self.rows::<T>(logits, &group.rows);
        let gradients = T::factors(logits, vocabulary);
        if let Some(out) = &mut self.for_hidden {
            write_hidden(&mut MatMut::new(out, positions, width), group, gradients, table);
        }
        if let Some(out) = &mut self.for_table {
            for rows in &group.chunks {
                let keep = if out.is_empty() { Keep::Nothing } else { Keep::Sum };
                T::product_into(out, keep, gradients.rows(rows.clone()).t(), hidden.rows(rows.clone()));
            }
        }
        losses
    }

    /// The losses of these positions; replaces their logits with gradients if any are wanted.
    fn rows<T: Element>(&self, logits: &mut [f32], positions: &[usize]) -> Vec<Option<f64>> {
        let gradients = self.for_hidden.is_some() || self.for_table.is_some();
        let vocabulary = self.table.shape()[0];
        let row = |(row, position): (&mut [f32], &usize)| match self.targets[*position] {
            Some(target) => Some(vectorized(
                #[inline(always)]
                || {
                    let (loss, sum) = row_loss(row, target);
                    if gradients {
                        row_gradient(row, target, sum, self.shares[*position]);
                        T::as_factor(row);
                    }
                    loss
                },
            )),
            None => {
                row.fill(0.0);
                None
            }
        };
        logits.par_chunks_mut(vocabulary).zip(positions).map(row).collect()
    }
}

/// Copies these rows of a matrix.
fn gather<T: Copy>(matrix: Mat<'_, T>, rows: &[usize]) -> Vec<T> {
    let rows: Vec<&[T]> = rows.iter().map(|row| matrix.row(*row)).collect();
    rows.concat()
}

/// Writes the gradients of a group's vectors, given those of its logits.
fn write_hidden<T: Element>(out: &mut MatMut<'_>, group: &Group, logits: Mat<'_, T>, table: Mat<'_, T>) {
    if let Some(rows) = group.neighbours() {
        return T::write_product(&mut out.rows(rows), logits, table);
    }
    let gradients = &mut Vec::new();
    T::product_into(gradients, Keep::Nothing, logits, table);
    for (row, gradient) in group.rows.iter().zip(gradients.chunks(gradients.len() / group.rows.len())) {
        out.row(*row).copy_from_slice(gradient);
    }
}

/// The loss of one position; replaces its logits with `e^(logit - largest)` and also returns their sum.
#[inline(always)]
fn row_loss(row: &mut [f32], target: usize) -> (f64, f64) {
    let (largest, logit) = (max(row), row[target]);
    let sum = exp_in_place(row, largest);
    // In this order a large logit does not round the rest away.
    (f64::from(largest) - f64::from(logit) + sum.ln(), sum)
}

#[inline(always)]
fn row_gradient(row: &mut [f32], target: usize, sum: f64, share: f32) {
    let factor = (f64::from(share) / sum) as f32;
    row.iter_mut().for_each(|x| *x *= factor);
    row[target] -= share;
}

impl HeadOps for Flex {
    fn head_loss(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        profile::time(Part::Head, || {
            flex(vec![HeadPass::new(hidden, table, targets, options, [false; 2]).mean()], [1], FloatType::F32)
        })
    }

    fn token_losses(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        profile::time(Part::Head, || {
            let losses = HeadPass::new(hidden, table, targets, options, [false; 2]).losses();
            let positions = losses.len();
            flex(losses, [positions], FloatType::F32)
        })
    }
}

impl HeadKernels for Flex {
    fn head_loss_and_gradients(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> (FloatTensor<Self>, [Option<FloatTensor<Self>>; 2]) {
        profile::time(Part::Head, || {
            let float = float_type(&hidden);
            let mut pass = HeadPass::new(hidden, table, targets, options, wanted);
            let loss = flex(vec![pass.mean()], [1], FloatType::F32);
            (loss, pass.into_gradients(float))
        })
    }

    fn token_gradients(
        (hidden, table, targets): (FloatTensor<Self>, FloatTensor<Self>, IntTensor<Self>),
        losses: FloatTensor<Self>,
        options: HeadOptions,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        profile::time(Part::Head, || {
            let float = float_type(&hidden);
            let mut pass = HeadPass::new(hidden, table, targets, options, wanted);
            pass.shares = floats(&owned(losses)).to_vec();
            pass.run(|_, _| {});
            pass.into_gradients(float)
        })
    }

    fn scaled(x: FloatTensor<Self>, factor: &FloatTensor<Self>) -> FloatTensor<Self> {
        let factor = floats(factor)[0];
        if factor == 1.0 {
            return x;
        }
        let float = float_type(&x);
        let mut x = owned(x);
        let parts = x.storage_mut::<f32>().par_chunks_mut(ELEMENTS);
        parts.for_each(|part| part.iter_mut().for_each(|x| *x *= factor));
        rounded(x, float)
    }
}

#[derive(Debug)]
struct HeadBackward;

impl<B: HeadKernels> Backward<B, 2> for HeadBackward {
    type State = [Option<FloatTensor<B>>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let factor = grads.consume::<B>(&ops.node);
        let nodes = parents(&ops);
        register::<B, 2>(grads, nodes, ops.state.map(|gradient| Some(B::scaled(gradient?, &factor))));
    }
}

#[derive(Debug)]
struct LossesBackward;

impl<B: HeadKernels> Backward<B, 2> for LossesBackward {
    type State = ((FloatTensor<B>, FloatTensor<B>, IntTensor<B>), HeadOptions, [bool; 2]);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let losses = grads.consume::<B>(&ops.node);
        let nodes = parents(&ops);
        let (operands, options, wanted) = ops.state;
        register::<B, 2>(grads, nodes, B::token_gradients(operands, losses, options, wanted));
    }
}

impl<B: HeadKernels, C: CheckpointStrategy> HeadOps for Autodiff<B, C> {
    fn head_loss(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let wanted = [hidden.is_tracked(), table.is_tracked()];
        let nodes = [hidden.node(), table.node()];
        let (hidden, table) = (hidden.into_primitive(), table.into_primitive());
        match HeadBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (loss, gradients) = B::head_loss_and_gradients(hidden, table, targets, options, wanted);
                prep.finish(gradients, loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::head_loss(hidden, table, targets, options)),
        }
    }

    fn token_losses(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let wanted = [hidden.is_tracked(), table.is_tracked()];
        let nodes = [hidden.node(), table.node()];
        let (hidden, table) = (hidden.into_primitive(), table.into_primitive());
        let losses = B::token_losses(hidden.clone(), table.clone(), targets.clone(), options);
        match LossesBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(((hidden, table, targets), options, wanted), losses),
            OpsKind::UnTracked(prep) => prep.finish(losses),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels::bf16::testing::{emulated, native};
    use super::super::{reference, testing::*};
    use super::*;
    use burn::tensor::{DType, TensorData};
    use hydra_core::{Activation, Key};

    #[derive(Clone, Copy, Debug)]
    struct Case {
        positions: usize,
        width: usize,
        vocabulary: usize,
        floats: Floats,
    }

    const CASES: [Case; 4] = [
        Case { positions: 7, width: 5, vocabulary: 11, floats: Floats::F32 },
        Case { positions: 1, width: 1, vocabulary: 2, floats: Floats::F32 },
        Case { positions: 13, width: 16, vocabulary: 4099, floats: Floats::F32 },
        Case { positions: 30, width: 33, vocabulary: 257, floats: Floats::F32 },
    ];

    impl Case {
        fn hidden(self) -> Tensor<2> {
            self.floats.leaf(normal(1, [self.positions, self.width]) * 2.0)
        }

        fn table(self) -> Tensor<2> {
            self.floats.leaf(normal(2, [self.vocabulary, self.width]))
        }

        /// Every fourth position but the first has no target.
        fn ids(self) -> Vec<i32> {
            let id = |i: usize| (Key::new(3).bits(i as u64) % self.vocabulary as u64) as i32;
            (0..self.positions).map(|i| if i % 4 == 3 { IGNORED } else { id(i) }).collect()
        }

        fn targets(self) -> Tensor<1, Int> {
            let device = burn::tensor::Device::flex().autodiff();
            Tensor::from_data(TensorData::new(self.ids(), [self.positions]), (&device, DType::I32))
        }

        /// Loss, and the gradients of hidden and table of `factor` times it.
        fn run(
            self,
            loss: impl Fn(Tensor<2>, Tensor<2>, Tensor<1, Int>) -> Tensor<1>,
            factor: f32,
        ) -> [Vec<f32>; 3] {
            let (hidden, table) = (self.hidden(), self.table());
            let loss = loss(hidden.clone(), table.clone(), self.targets());
            assert_eq!(loss.dtype(), DType::F32);
            let value = values(&loss);
            let loss = if factor == 1.0 { loss } else { loss * factor };
            let grads = loss.backward();
            [value, gradient(&hidden, &grads), gradient(&table, &grads)]
        }

        /// The same in `f64`, with loops.
        fn exact(self) -> [Vec<f32>; 3] {
            let wide = |t: Tensor<2>| values(&t).into_iter().map(f64::from).collect::<Vec<_>>();
            let (h, w, ids, d) = (wide(self.hidden()), wide(self.table()), self.ids(), self.width);
            let (mut dh, mut dw, mut loss) = (vec![0.0; h.len()], vec![0.0; w.len()], 0.0);
            let terms = ids.iter().filter(|&&id| id >= 0).count() as f64;
            for (i, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
                let logit = |v: usize| (0..d).map(|k| h[i * d + k] * w[v * d + k]).sum::<f64>();
                let logits: Vec<f64> = (0..self.vocabulary).map(logit).collect();
                let sum: f64 = logits.iter().map(|x| x.exp()).sum();
                loss += (sum.ln() - logits[id as usize]) / terms;
                for (v, x) in logits.iter().enumerate() {
                    let g = (x.exp() / sum - f64::from(v == id as usize)) / terms;
                    for k in 0..d {
                        dh[i * d + k] += g * w[v * d + k];
                        dw[v * d + k] += g * h[i * d + k];
                    }
                }
            }
            let narrow = |v: Vec<f64>| v.into_iter().map(|x| x as f32).collect();
            [vec![loss as f32], narrow(dh), narrow(dw)]
        }
    }

    fn pass() -> Pass {
        Pass::train(Pass::key_of(1, 2, 3), Activation::default())
    }

    fn chunked(chunk_rows: usize) -> impl Fn(Tensor<2>, Tensor<2>, Tensor<1, Int>) -> Tensor<1> {
        move |hidden, table, targets| head_loss(hidden, table, targets, chunk_rows, &pass())
    }

    /// Patterns of positions with targets: scattered, contiguous, few, all but few, one.
    fn patterns(positions: usize) -> [Vec<bool>; 6] {
        let of = |counts: &dyn Fn(usize) -> bool| (0..positions).map(counts).collect();
        [
            of(&|i| Key::new(5).bits(i as u64).is_multiple_of(3)),
            of(&|i| i % 50 >= 29 && i % 50 < 43),
            of(&|i| i % 97 == 5),
            of(&|i| i % 50 != 49),
            of(&|i| i == positions - 1),
            of(&|i| i > positions / 2),
        ]
    }

    #[test]
    fn positions_without_a_target_that_are_left_out_change_no_bit() {
        for (positions, width, vocabulary, chunk_rows) in
            [(300, 65, 129, 256), (300, 80, 700, 16), (521, 96, 5000, 128), (260, 130, 9001, 256)]
        {
            for (floats, counts) in
                [Floats::F32, Floats::Bf16].into_iter().flat_map(|f| patterns(positions).map(|c| (f, c)))
            {
                let case = Case { positions, width, vocabulary, floats };
                let ids = counts.iter().enumerate();
                let ids = ids.map(|(i, counts)| if *counts { (i * 7 % vocabulary) as i32 } else { IGNORED });
                let targets = TensorData::new(ids.collect::<Vec<_>>(), [positions]);
                let run = |pass: Pass| {
                    let (hidden, table) = (case.hidden(), case.table());
                    let targets = Tensor::from_data(targets.clone(), (&hidden.device(), DType::I32));
                    let loss = head_loss(hidden.clone(), table.clone(), targets, chunk_rows, &pass);
                    let (value, grads) = (values(&loss), loss.backward());
                    [value, gradient(&hidden, &grads), gradient(&table, &grads)]
                };
                let (all, counted) = (run(pass().worst_case()), run(pass()));
                let bits = |of: &[f32]| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&counted[0]), bits(&all[0]), "{case:?}");
                assert!(bits(&counted[1]) == bits(&all[1]), "{case:?}: hidden");
                // A sum of zeros may lose a negative sign when a position without a target is added.
                assert!(counted[2] == all[2], "{case:?}: table");
                assert_eq!(run(Pass::evaluate(Activation::default())), counted);
                let frozen = head_loss(
                    untracked(case.hidden()),
                    untracked(case.table()),
                    Tensor::from_data(targets.clone(), (&case.hidden().device(), DType::I32)),
                    chunk_rows,
                    &pass(),
                );
                assert_eq!(values(&frozen), counted[0]);
                assert_eq!(with_threads(3, || run(pass())), counted);
            }
        }
    }

    #[test]
    fn loss_and_gradients_equal_the_reference_and_the_exact_ones() {
        for case in CASES {
            let (exact, slow) = (case.exact(), case.run(reference::head_loss, 1.0));
            for chunk_rows in [1, 3, 1000] {
                for (i, found) in case.run(chunked(chunk_rows), 1.0).iter().enumerate() {
                    let (to_exact, to_slow) = (distance(found, &exact[i]), distance(found, &slow[i]));
                    assert!(to_exact < 2e-6 && to_slow < 2e-6, "{i}: {to_exact} and {to_slow}");
                }
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_sizes_equal_the_reference(
            positions in 1usize..20, width in 1usize..9, vocabulary in 2usize..40, chunk_rows in 1usize..25,
        ) {
            let case = Case { positions, width, vocabulary, floats: Floats::F32 };
            let (found, slow) = (case.run(chunked(chunk_rows), 1.0), case.run(reference::head_loss, 1.0));
            for (found, slow) in found.iter().zip(&slow) {
                // A loss close to zero is a difference of logits, and so are its gradients.
                let close = found.iter().zip(slow).all(|(a, b)| (a - b).abs() < 1e-6);
                assert!(close || distance(found, slow) < 1e-5, "{found:?} {slow:?}");
            }
        }
    }

    #[test]
    fn losses_of_positions_have_the_gradients_of_the_mean() {
        for case in CASES {
            let exact = case.exact();
            for chunk_rows in [1, 3, 1000] {
                let terms = case.ids().iter().filter(|id| **id >= 0).count() as f32;
                let mean = |hidden, table, targets| {
                    let losses = token_losses(hidden, table, targets, chunk_rows, &pass());
                    losses.sum_dim(0) / terms
                };
                for (found, exact) in case.run(mean, 1.0).iter().zip(&exact) {
                    assert!(distance(found, exact) < 2e-6, "{}", distance(found, exact));
                }
            }
        }
    }

    #[test]
    fn the_loss_of_a_position_does_not_depend_on_the_others() {
        for floats in [Floats::F32, Floats::Bf16] {
            let case = Case { positions: 90, width: 96, vocabulary: 300, floats };
            let losses = |ids: Vec<i32>, rows: std::ops::Range<usize>, chunk_rows| {
                let device = burn::tensor::Device::flex().autodiff();
                let hidden = case.hidden().narrow(0, rows.start, rows.len());
                let targets = Tensor::from_data(TensorData::new(ids, [rows.len()]), (&device, DType::I32));
                values(&token_losses(hidden, case.table(), targets, chunk_rows, &pass()))
            };
            let ids: Vec<i32> = (0..90).map(|i| (i * 7) % 300).collect();
            let all = losses(ids.clone(), 0..90, 90);
            assert_eq!(all, losses(ids.clone(), 0..90, 16));
            assert_eq!(all[..52], losses(ids[..52].to_vec(), 0..52, 64));
            assert_eq!(all[40..], losses(ids[40..].to_vec(), 40..90, 64));
            let some: Vec<i32> =
                ids.iter().zip(0..).map(|(id, i)| if i % 9 == 4 { *id } else { IGNORED }).collect();
            let some = losses(some, 0..90, 32);
            let kept = |i: usize| if i % 9 == 4 { all[i] } else { 0.0 };
            assert_eq!(some, (0..90).map(kept).collect::<Vec<_>>());
        }
    }

    /// The loss of one position with these logits.
    fn loss_of(logits: &[f32], target: i32) -> f32 {
        let device = burn::tensor::Device::flex().autodiff();
        let table = Tensor::from_data(TensorData::new(logits.to_vec(), [logits.len(), 1]), &device);
        let target = Tensor::from_data(TensorData::new(vec![target], [1]), (&device, DType::I32));
        values(&head_loss(Tensor::ones([1, 1], &device), table, target, 4, &pass()))[0]
    }

    #[test]
    fn logits_may_be_as_large_as_numbers_are() {
        for size in [1e-30, 1.0, 1e4, 1e30, f32::MAX] {
            assert_eq!(loss_of(&[size; 33], 7), 33f32.ln(), "equal logits of {size}");
        }
        let far = [1e4, -1e4, 0.0, 1e4];
        let losses: Vec<f32> = (0..4).map(|target| loss_of(&far, target)).collect();
        let two = std::f32::consts::LN_2;
        assert_eq!(losses, [two, 2e4 + two, 1e4 + two, two]);
        assert_eq!(loss_of(&[1.0, f32::NEG_INFINITY, 1.0], 0), two);
        assert_eq!(loss_of(&[1.0, f32::NEG_INFINITY, 1.0], 1), f32::INFINITY);
    }

    #[test]
    fn a_logit_that_is_no_number_shows() {
        for bad in [f32::NAN, f32::INFINITY] {
            for (place, target) in (0..37).flat_map(|place| [0, 5, 36].map(|target| (place, target))) {
                let mut logits = vec![0.5; 37];
                logits[place] = bad;
                assert!(loss_of(&logits, target).is_nan(), "{bad} at {place}");
            }
        }
        assert!(loss_of(&[f32::NEG_INFINITY; 5], 2).is_nan() && loss_of(&[f32::NAN; 5], 2).is_nan());
    }

    #[test]
    fn the_incoming_gradient_scales_the_gradients() {
        let case = CASES[0];
        let (one, half) = (case.run(chunked(3), 1.0), case.run(chunked(3), 0.5));
        assert_eq!(one[0], half[0]);
        for i in 1..3 {
            let halved: Vec<f32> = one[i].iter().map(|x| x * 0.5).collect();
            assert_eq!(half[i], halved);
        }
    }

    #[test]
    fn bf16_has_a_loss_of_f32_and_gradients_of_rounded_ones_of_logits() {
        for (i, case) in CASES.into_iter().enumerate() {
            let [narrow, widened] = [Floats::Bf16, Floats::Widened].map(|floats| Case { floats, ..case });
            let (found, exact) = (native(|| narrow.run(chunked(3), 1.0)), narrow.exact());
            assert!(distance(&found[0], &widened.run(chunked(3), 1.0)[0]) < 1e-6);
            for (part, exact) in exact.iter().enumerate().skip(1) {
                assert_within(2.0 * ROUNDING, &format!("head {i}, {part}"), &found[part], exact);
                // A scaled gradient is rounded again.
                let third: Vec<f32> = exact.iter().map(|x| x / 3.0).collect();
                let found = &narrow.run(chunked(3), 1.0 / 3.0)[part];
                assert_within(3.0 * ROUNDING, &format!("head {i}, {part}, scaled"), found, &third);
            }
            assert_eq!(emulated(|| narrow.run(chunked(3), 1.0)), found);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for floats in [Floats::F32, Floats::Bf16] {
            let case = Case { floats, ..CASES[2] };
            let one = with_threads(1, || case.run(chunked(5), 1.0));
            assert_eq!(one, with_threads(3, || case.run(chunked(5), 1.0)));
            let loss =
                head_loss(untracked(case.hidden()), untracked(case.table()), case.targets(), 5, &pass());
            assert_eq!(values(&loss), one[0]);
        }
    }

    #[test]
    fn only_what_is_tracked_gets_a_gradient() {
        let case = CASES[0];
        let both = case.run(chunked(3), 1.0);
        let (hidden, table) = (case.hidden(), untracked(case.table()));
        let grads = head_loss(hidden.clone(), table.clone(), case.targets(), 3, &pass()).backward();
        assert_eq!(values(&hidden.grad(&grads).unwrap()), both[1]);
        assert!(table.grad(&grads).is_none());
        let (hidden, table) = (untracked(case.hidden()), case.table());
        let grads = head_loss(hidden, table.clone(), case.targets(), 3, &pass()).backward();
        assert_eq!(values(&table.grad(&grads).unwrap()), both[2]);
    }

    #[test]
    #[should_panic(expected = "target 11 is not below the vocabulary's 11")]
    fn an_id_beyond_the_vocabulary_is_named() {
        let case = CASES[0];
        head_loss(case.hidden(), case.table(), case.targets().mul_scalar(0).add_scalar(11), 3, &pass());
    }

    #[test]
    #[should_panic(expected = "no position has a target")]
    fn positions_without_targets_are_refused() {
        let case = CASES[0];
        head_loss(case.hidden(), case.table(), case.targets().mul_scalar(0).sub_scalar(1), 3, &pass());
    }
}
