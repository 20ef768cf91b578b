//! Linear layers over a sequence of vectors, with or without a bias and a residual.
//!
//! A weight keeps the layout of its family's files and is never copied to another.

use super::autodiff::*;
use super::kernels::nf4::{
    Nf4, Side, product as product_nf4, product_bf16 as product_nf4_bf16, product_by_row as nf4_by_row,
};
use super::kernels::{Mat, Start, bf16, product, rows, sum_rows};
use super::tensors::{bits, flex, flex_bits, float_type, floats, one_type, owned};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use hydra_core::{FloatType, nf4};

/// `x @ weight + bias` for `x` of shape `[batch, tokens, in]`, a weight `[in, out]` and a bias `[out]`.
///
/// # Panics
/// If shapes do not match or float types differ.
pub fn linear(x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
    one_type("linear", [x.dtype(), weight.dtype(), bias.dtype()]);
    map(None, x, weight, Some(bias), Form::InOut)
}

/// `residual + x @ weight + bias`: [`linear`] onto a residual of shape `[batch, tokens, out]`.
///
/// # Panics
/// If shapes do not match or float types differ.
pub fn linear_onto(residual: Tensor<3>, x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
    let ([batch, tokens, _], [outputs]) = (x.dims(), bias.dims());
    fits("linear_onto", &residual, [batch, tokens, outputs]);
    one_type("linear_onto", [residual.dtype(), x.dtype(), weight.dtype(), bias.dtype()]);
    map(Some(residual), x, weight, Some(bias), Form::InOut)
}

/// `x @ weight^T + bias` for `x` of shape `[batch, tokens, in]`, a weight `[out, in]` and a bias `[out]` or none.
///
/// # Panics
/// If shapes do not match or float types differ.
pub fn linear_transposed(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<3> {
    check_transposed("linear_transposed", x.dtype(), &x, &weight, bias.as_ref());
    map(None, x, weight, bias, Form::OutIn)
}

/// `residual + x @ weight^T + bias`: [`linear_transposed`] onto a residual of shape `[batch, tokens, out]`.
///
/// # Panics
/// If shapes do not match or float types differ.
pub fn linear_transposed_onto(
    residual: Tensor<3>,
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<3> {
    let ([batch, tokens, _], [outputs, _]) = (x.dims(), weight.dims());
    fits("linear_transposed_onto", &residual, [batch, tokens, outputs]);
    check_transposed("linear_transposed_onto", residual.dtype(), &x, &weight, bias.as_ref());
    map(Some(residual), x, weight, bias, Form::OutIn)
}

/// [`linear_transposed`] for a quantized weight `[out, in]`: the tensor of its blocks
/// ([`nf4::shape`]), which has no gradient. It is dequantized to the type of `x`: on a CPU
/// while products pack it, on a GPU as a whole while the op runs.
///
/// # Panics
/// If shapes do not match, float types differ, or the weight is tracked and gradients are computed.
pub fn linear_nf4(x: Tensor<3>, blocks: Tensor<2>, shape: [usize; 2], bias: Option<Tensor<1>>) -> Tensor<3> {
    check_nf4("linear_nf4", x.dtype(), &x, (&blocks, shape), bias.as_ref());
    map(None, x, blocks, bias, Form::Nf4(shape))
}

/// `residual + x @ weight^T + bias`: [`linear_nf4`] onto a residual of shape `[batch, tokens, out]`.
///
/// # Panics
/// As for [`linear_nf4`].
pub fn linear_nf4_onto(
    residual: Tensor<3>,
    x: Tensor<3>,
    blocks: Tensor<2>,
    shape: [usize; 2],
    bias: Option<Tensor<1>>,
) -> Tensor<3> {
    let [batch, tokens, _] = x.dims();
    fits("linear_nf4_onto", &residual, [batch, tokens, shape[0]]);
    check_nf4("linear_nf4_onto", residual.dtype(), &x, (&blocks, shape), bias.as_ref());
    map(Some(residual), x, blocks, bias, Form::Nf4(shape))
}

/// `x @ weight` for `x` of shape `[batch, tokens, in]`, so that the bits of a row depend neither on the number of rows nor
/// on the other rows. It is fast for few rows, because each element of the weight is read once.
pub(crate) fn linear_by_row(x: Tensor<3>, weight: Tensor<2>, form: Form) -> Tensor<3> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(<Dispatch as AffineOps>::product_by_row(x, weight, form))
}

#[track_caller]
fn check_nf4(
    op: &str,
    first: DType,
    x: &Tensor<3>,
    (blocks, [outputs, expected]): (&Tensor<2>, [usize; 2]),
    bias: Option<&Tensor<1>>,
) {
    let ([_, _, inputs], words) = (x.dims(), nf4::shape(outputs * expected));
    assert!(inputs == expected, "{op} expects vectors of the weight's {expected} inputs, found {inputs}");
    let found = blocks.dims();
    assert!(
        found == words && blocks.dtype() == DType::F32,
        "{op} expects blocks of shape {words:?} of F32, found {found:?} of {:?}",
        blocks.dtype()
    );
    let found = bias.map_or(outputs, |bias| bias.dims()[0]);
    assert!(found == outputs, "{op} expects a bias of the weight's {outputs} outputs, found {found}");
    one_type(op, [first, x.dtype(), bias.map_or(first, Tensor::dtype)]);
}

#[track_caller]
fn fits(op: &str, residual: &Tensor<3>, expected: [usize; 3]) {
    let found = residual.dims();
    assert!(found == expected, "{op} expects a residual of shape {expected:?}, found {found:?}");
}

#[track_caller]
fn check_transposed(op: &str, first: DType, x: &Tensor<3>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) {
    let ([_, _, inputs], [outputs, expected]) = (x.dims(), weight.dims());
    assert!(inputs == expected, "{op} expects vectors of the weight's {expected} inputs, found {inputs}");
    let found = bias.map_or(outputs, |bias| bias.dims()[0]);
    assert!(found == outputs, "{op} expects a bias of the weight's {outputs} outputs, found {found}");
    one_type(op, [first, x.dtype(), weight.dtype(), bias.map_or(first, Tensor::dtype)]);
}

/// The layout of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `[in, out]`, as in Transformers' `Conv1D`.
    InOut,
    /// `[out, in]`, as in Transformers' `Linear`.
    OutIn,
    /// The blocks of a quantized `[out, in]`.
    Nf4([usize; 2]),
}

impl Form {
    /// The number of outputs of a weight of this shape.
    pub(super) fn outputs(self, [rows, cols]: [usize; 2]) -> usize {
        match self {
            Self::InOut => cols,
            Self::OutIn => rows,
            Self::Nf4([outputs, _]) => outputs,
        }
    }

    /// The transposed left side and the right side of a weight's gradient.
    fn sides<T>(self, x: T, gradient: T) -> (T, T) {
        if self == Self::InOut { (x, gradient) } else { (gradient, x) }
    }
}

fn map(
    residual: Option<Tensor<3>>,
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    form: Form,
) -> Tensor<3> {
    let residual = residual.map(Tensor::into_dispatch);
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.map(Tensor::into_dispatch));
    Tensor::from_dispatch(match (residual, bias) {
        (None, Some(bias)) => <Dispatch as AffineOps>::affine(x, weight, bias, form),
        (Some(residual), Some(bias)) => <Dispatch as AffineOps>::affine_onto(residual, x, weight, bias, form),
        (None, None) => <Dispatch as AffineOps>::product(x, weight, form),
        (Some(residual), None) => <Dispatch as AffineOps>::product_onto(residual, x, weight, form),
    })
}

/// Linear layers as backend ops; `weight` represents the matrix `[in, out]` in any layout.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait AffineOps: Backend {
    /// `x @ weight + bias`.
    fn affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self>;

    /// `residual + x @ weight + bias`.
    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self>;

    /// `x @ weight`.
    fn product(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self>;

    /// `x @ weight`, where the bits of a row do not depend on other rows.
    fn product_by_row(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self>;

    /// `residual + x @ weight`.
    fn product_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait AffineKernels: AffineOps {
    /// The `wanted` gradients among those of `x`, weight and bias, given that of the output.
    fn affine_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        form: Form,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3];
}

/// The rows of a `[batch, tokens, width]` tensor as a matrix.
fn as_rows<T: Copy>(x: &FlexTensor, elements: impl Fn(&FlexTensor) -> &[T]) -> Mat<'_, T> {
    let [batch, tokens, width] = x.shape().dims();
    Mat::new(elements(x), batch * tokens, width)
}

/// A weight as a matrix `[in, out]`.
fn as_matrix<T: Copy>(weight: &FlexTensor, form: Form, elements: impl Fn(&FlexTensor) -> &[T]) -> Mat<'_, T> {
    let [rows, cols] = weight.shape().dims();
    let matrix = Mat::new(elements(weight), rows, cols);
    if form == Form::InOut { matrix } else { matrix.t() }
}

/// `start + x @ weight`, or with the transposed weight for the gradient of `x`.
fn times(
    start: Start<'_>,
    x: Mat<'_>,
    (weight, form): (&FlexTensor, Form),
    transposed: bool,
    float: FloatType,
) -> Vec<f32> {
    match form {
        Form::Nf4(shape) => product_nf4(start, x, quantized(weight, shape, transposed), float),
        _ => {
            let weight = as_matrix(weight, form, floats);
            product(start, x, if transposed { weight.t() } else { weight })
        }
    }
}

/// The same in `bf16`.
fn times_bf16(
    start: Start<'_, u16>,
    x: Mat<'_, u16>,
    (weight, form): (&FlexTensor, Form),
    transposed: bool,
) -> Vec<u16> {
    match form {
        Form::Nf4(shape) => product_nf4_bf16(start, x, quantized(weight, shape, transposed)),
        _ => {
            let weight = as_matrix(weight, form, bits);
            bf16::product(start, x, if transposed { weight.t() } else { weight })
        }
    }
}

/// `x @ weight`, where the bits of a row do not depend on other rows. The products of `bf16` are always so.
fn by_row(x: FlexTensor, weight: FlexTensor, form: Form) -> FlexTensor {
    let float = float_type(&x);
    if float == FloatType::Bf16 {
        return mapped(None, x, weight, None, form);
    }
    profile::time(Part::Matmul, || {
        let (x, weight) = (owned(x), owned(weight));
        let [batch, tokens, _]: [usize; 3] = x.shape().dims();
        let left = as_rows(&x, floats);
        let y = match form {
            Form::Nf4(shape) => nf4_by_row(left, quantized(&weight, shape, false), float),
            _ => rows::product(left, as_matrix(&weight, form, floats)),
        };
        flex(y, [batch, tokens, form.outputs(weight.shape().dims())], float)
    })
}

/// A quantized weight, or the transposed one, as the right side of a product.
fn quantized(blocks: &FlexTensor, [outputs, inputs]: [usize; 2], transposed: bool) -> (Nf4<'_>, Side) {
    let side = if transposed { Side::Plain } else { Side::Transposed };
    (Nf4::new(bytemuck::cast_slice(floats(blocks)), outputs, inputs), side)
}

/// The addends of a linear layer.
fn start<'a, T>(
    residual: Option<&'a FlexTensor>,
    bias: Option<&'a FlexTensor>,
    elements: impl Fn(&FlexTensor) -> &[T],
) -> Start<'a, T> {
    match (residual.map(&elements), bias.map(&elements)) {
        (Some(residual), Some(bias)) => Start::Sum(residual, bias),
        (Some(residual), None) => Start::Matrix(residual),
        (None, Some(bias)) => Start::Rows(bias),
        (None, None) => Start::Nothing,
    }
}

fn mapped(
    residual: Option<FlexTensor>,
    x: FlexTensor,
    weight: FlexTensor,
    bias: Option<FlexTensor>,
    form: Form,
) -> FlexTensor {
    profile::time(Part::Matmul, || {
        let float = float_type(&x);
        let shape = |x: &FlexTensor, weight: &FlexTensor| -> [usize; 3] {
            let [batch, tokens, _] = x.shape().dims();
            [batch, tokens, form.outputs(weight.shape().dims())]
        };
        if float == FloatType::Bf16 {
            let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
            let [residual, bias] = [residual, bias].map(|added| added.map(|added| added.to_contiguous()));
            let start = start(residual.as_ref(), bias.as_ref(), bits);
            let y = times_bf16(start, as_rows(&x, bits), (&weight, form), false);
            return flex_bits(y, shape(&x, &weight), float);
        }
        let (x, weight) = (owned(x), owned(weight));
        let [residual, bias] = [residual, bias].map(|added| added.map(owned));
        let start = start(residual.as_ref(), bias.as_ref(), floats);
        let y = times(start, as_rows(&x, floats), (&weight, form), false, float);
        flex(y, shape(&x, &weight), float)
    })
}

impl AffineOps for Flex {
    fn affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        mapped(None, x, weight, Some(bias), form)
    }

    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        mapped(Some(residual), x, weight, Some(bias), form)
    }

    fn product(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self> {
        mapped(None, x, weight, None, form)
    }

    fn product_by_row(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self> {
        by_row(x, weight, form)
    }

    fn product_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        mapped(Some(residual), x, weight, None, form)
    }
}

impl AffineKernels for Flex {
    fn affine_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        form: Form,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        profile::time(Part::Matmul, || {
            let float = float_type(&x);
            let is_trained = matches!(form, Form::Nf4(_)) && wanted[1];
            assert!(!is_trained, "a quantized weight has no gradient: freeze it");
            if float == FloatType::Bf16 {
                let [x, weight, gradient] = [x, weight, gradient].map(|tensor| tensor.to_contiguous());
                let (rows, gradients) = (as_rows(&x, bits), as_rows(&gradient, bits));
                let product = |a, b| bf16::product(Start::Nothing, a, b);
                let for_x = || {
                    let y = times_bf16(Start::Nothing, gradients, (&weight, form), true);
                    flex_bits(y, x.shape(), float)
                };
                let for_weight = || {
                    let (left, right) = form.sides(rows, gradients);
                    flex_bits(product(left.t(), right), weight.shape(), float)
                };
                let outputs = form.outputs(weight.shape().dims());
                let for_bias = || flex(sum_rows(gradients, bf16::wide), [outputs], float);
                return [wanted[0].then(for_x), wanted[1].then(for_weight), wanted[2].then(for_bias)];
            }
            let (x, weight, gradient) = (owned(x), owned(weight), owned(gradient));
            let (rows, gradients) = (as_rows(&x, floats), as_rows(&gradient, floats));
            let for_x =
                || flex(times(Start::Nothing, gradients, (&weight, form), true, float), x.shape(), float);
            let for_weight = || {
                let (left, right) = form.sides(rows, gradients);
                flex(product(Start::Nothing, left.t(), right), weight.shape(), float)
            };
            let outputs = form.outputs(weight.shape().dims());
            let for_bias = || flex(sum_rows(gradients, |x| x), [outputs], float);
            [wanted[0].then(for_x), wanted[1].then(for_weight), wanted[2].then(for_bias)]
        })
    }
}

/// Saved for the backward: `x`, the weight and its layout.
type Saved<B> = (FloatTensor<B>, FloatTensor<B>, Form);

/// The backward of all linear layers. Parents are the optional residual, `x`, the weight and the optional bias.
#[derive(Debug)]
struct AffineBackward {
    /// Whether the first parent is a residual, whose gradient is the output's.
    onto: bool,
}

impl<B: AffineKernels, const N: usize> Backward<B, N> for AffineBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let nodes = parents(&ops);
        let (residual, maps) = nodes.split_at(usize::from(self.onto));
        let nodes: [Option<NodeId>; 3] = std::array::from_fn(|i| maps.get(i).copied().flatten());
        let (x, weight, form) = ops.state;
        let wanted = nodes.map(|node| node.is_some());
        let gradients = B::affine_backward(x, weight, gradient.clone(), form, wanted);
        register::<B, 3>(grads, nodes, gradients);
        if let [Some(residual)] = residual {
            grads.register::<B>(*residual, gradient);
        }
    }
}

/// Applies `$weight` to `$x`, and saves both if a node is tracked.
macro_rules! tracked {
    ($onto:expr, $nodes:expr, $x:ident, $weight:ident, $form:ident, $map:expr) => {{
        let nodes = $nodes;
        let ($x, $weight) = ($x.into_primitive(), $weight.into_primitive());
        match (AffineBackward { onto: $onto }).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = ($x.clone(), $weight.clone(), $form);
                let y = $map;
                prep.finish(saved, y)
            }
            OpsKind::UnTracked(prep) => prep.finish($map),
        }
    }};
}

impl<B: AffineKernels, C: CheckpointStrategy> AffineOps for Autodiff<B, C> {
    fn affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        let (nodes, bias) = ([x.node(), weight.node(), bias.node()], bias.into_primitive());
        tracked!(false, nodes, x, weight, form, B::affine(x, weight, bias, form))
    }

    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        let nodes = [residual.node(), x.node(), weight.node(), bias.node()];
        let (residual, bias) = (residual.into_primitive(), bias.into_primitive());
        tracked!(true, nodes, x, weight, form, B::affine_onto(residual, x, weight, bias, form))
    }

    fn product(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self> {
        tracked!(false, [x.node(), weight.node()], x, weight, form, B::product(x, weight, form))
    }

    fn product_by_row(x: FloatTensor<Self>, weight: FloatTensor<Self>, form: Form) -> FloatTensor<Self> {
        tracked!(false, [x.node(), weight.node()], x, weight, form, B::product_by_row(x, weight, form))
    }

    fn product_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        form: Form,
    ) -> FloatTensor<Self> {
        let nodes = [residual.node(), x.node(), weight.node()];
        let residual = residual.into_primitive();
        tracked!(true, nodes, x, weight, form, B::product_onto(residual, x, weight, form))
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels::bf16::testing::{chain, emulated, native};
    use super::super::testing::*;
    use super::*;

    #[derive(Clone, Copy)]
    struct Case {
        shape: [usize; 3],
        outputs: usize,
        floats: Floats,
    }

    const CASES: [Case; 4] = [
        Case { shape: [1, 1, 1], outputs: 1, floats: Floats::F32 },
        Case { shape: [2, 5, 7], outputs: 3, floats: Floats::F32 },
        Case { shape: [3, 33, 48], outputs: 65, floats: Floats::F32 },
        Case { shape: [1, 70, 129], outputs: 200, floats: Floats::F32 },
    ];

    impl Case {
        fn inputs(self) -> [Tensor<3>; 2] {
            let [batch, tokens, _] = self.shape;
            let leaf = |seed, shape| self.floats.leaf(normal(seed, shape));
            [leaf(1, self.shape), leaf(2, [batch, tokens, self.outputs])]
        }

        fn params(self) -> (Tensor<2>, Tensor<1>) {
            let leaf = self.floats.leaf(normal(3, [self.shape[2], self.outputs]));
            (leaf, self.floats.leaf(normal(4, [self.outputs])))
        }

        fn upstream(self) -> Tensor<3> {
            let [batch, tokens, _] = self.shape;
            self.floats.of(normal(5, [batch, tokens, self.outputs]))
        }

        /// The output and the gradients of x, residual, weight and bias.
        fn run(self, onto: bool) -> [Vec<f32>; 5] {
            let ([x, residual], (weight, bias)) = (self.inputs(), self.params());
            let (w, b) = (weight.clone(), bias.clone());
            let y = match onto {
                true => linear_onto(residual.clone(), x.clone(), w, b),
                false => linear(x.clone(), w, b),
            };
            let out = values(&y);
            let grads = (y * self.upstream()).sum().backward();
            let residual = if onto { gradient(&residual, &grads) } else { Vec::new() };
            [out, gradient(&x, &grads), residual, gradient(&weight, &grads), gradient(&bias, &grads)]
        }

        /// The same in `f64`, with loops.
        fn exact(self, onto: bool) -> [Vec<f32>; 5] {
            let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
            let ([x, residual], (w, b)) = (self.inputs(), self.params());
            let (rows, ins, outs) = (self.shape[0] * self.shape[1], self.shape[2], self.outputs);
            let g = wide(values(&self.upstream()));
            let (x, r, w, b) =
                (wide(values(&x)), wide(values(&residual)), wide(values(&w)), wide(values(&b)));
            let (mut y, mut dx) = (vec![0.0; rows * outs], vec![0.0; rows * ins]);
            let (mut dw, mut db) = (vec![0.0; ins * outs], vec![0.0; outs]);
            for (i, o) in (0..rows).flat_map(|i| (0..outs).map(move |o| (i, o))) {
                y[i * outs + o] = b[o] + if onto { r[i * outs + o] } else { 0.0 };
                db[o] += g[i * outs + o];
                for k in 0..ins {
                    y[i * outs + o] += x[i * ins + k] * w[k * outs + o];
                    dx[i * ins + k] += g[i * outs + o] * w[k * outs + o];
                    dw[k * outs + o] += x[i * ins + k] * g[i * outs + o];
                }
            }
            let narrow = |v: Vec<f64>| v.into_iter().map(|x| x as f32).collect();
            [y, dx, if onto { g } else { Vec::new() }, dw, db].map(narrow)
        }
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones() {
        for (case, onto) in CASES.iter().flat_map(|case| [(case, false), (case, true)]) {
            for (i, (found, exact)) in case.run(onto).iter().zip(&case.exact(onto)).enumerate() {
                assert!(distance(found, exact) < 1e-6, "{:?}, {i}: {}", case.shape, distance(found, exact));
            }
        }
    }

    /// `len` chains of `terms` terms, each rounded.
    fn chains(
        len: usize,
        terms: usize,
        start: impl Fn(usize) -> f32,
        term: impl Fn(usize, usize) -> (f32, f32),
    ) -> Vec<f32> {
        let chain = |i| chain(start(i), &(0..terms).map(|k| term(i, k)).collect::<Vec<_>>());
        (0..len).map(|i| bf16::wide(bf16::rounded(chain(i)))).collect()
    }

    impl Case {
        /// The results in `bf16`: the chains that define them, each rounded once.
        fn chained(self, onto: bool) -> [Vec<f32>; 5] {
            let ([x, residual], (w, b)) = (self.inputs(), self.params());
            let (rows, ins, outs) = (self.shape[0] * self.shape[1], self.shape[2], self.outputs);
            let ([x, r], g) = ([x, residual].map(|input| values(&input)), values(&self.upstream()));
            let (w, b) = (values(&w), values(&b));
            let start = |i: usize| if onto { r[i] + b[i % outs] } else { b[i % outs] };
            let y = chains(rows * outs, ins, start, |i, k| (x[i / outs * ins + k], w[k * outs + i % outs]));
            let from_zero = |_| 0.0;
            let dx =
                chains(rows * ins, outs, from_zero, |i, o| (g[i / ins * outs + o], w[i % ins * outs + o]));
            let dw =
                chains(ins * outs, rows, from_zero, |i, k| (x[k * ins + i / outs], g[k * outs + i % outs]));
            let db = crate::ops::kernels::sum_rows(Mat::new(&g, rows, outs), |x| x);
            let db = db.into_iter().map(|x| bf16::wide(bf16::rounded(x))).collect();
            [y, dx, if onto { g } else { Vec::new() }, dw, db]
        }
    }

    #[test]
    fn bf16_has_the_chains_of_its_definition_rounded_once() {
        for (case, onto) in CASES.iter().flat_map(|case| [(case, false), (case, true)]) {
            let case = Case { floats: Floats::Bf16, ..*case };
            let (found, exact, chained) = (native(|| case.run(onto)), case.exact(onto), case.chained(onto));
            for (i, found) in found.iter().enumerate() {
                assert_eq!(*found, chained[i], "{:?}, {i}", case.shape);
                assert_within(ROUNDING, &format!("linear {:?}, {i}", case.shape), found, &exact[i]);
            }
            assert_eq!(emulated(|| case.run(onto)), found);
            // The layout of a weight affects no order.
            assert_eq!(case.run_transposed(onto, true), found);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for (onto, floats) in [false, true].into_iter().flat_map(|on| [(on, Floats::F32), (on, Floats::Bf16)])
        {
            let case = Case { floats, ..CASES[3] };
            let one = with_threads(1, || case.run(onto));
            assert_eq!(one, with_threads(3, || case.run(onto)));
            let ([x, residual], (w, b)) = (case.inputs(), case.params());
            let (x, residual, w, b) = (untracked(x), untracked(residual), untracked(w), untracked(b));
            let y = if onto { linear_onto(residual, x, w, b) } else { linear(x, w, b) };
            assert_eq!(values(&y), one[0]);
        }
    }

    /// A weight `[in, out]` as `[out, in]`.
    fn turned(weight: &Tensor<2>) -> Tensor<2> {
        let [inputs, outputs] = weight.dims();
        let values = values(weight);
        let turned = (0..inputs * outputs).map(|i| values[i % inputs * outputs + i / inputs]).collect();
        let turned = burn::tensor::TensorData::new(turned, [outputs, inputs]);
        Tensor::from_data(turned, (&weight.device(), weight.dtype())).require_grad()
    }

    impl Case {
        /// [`Case::run`] with a transposed weight, whose gradient is transposed back; optionally without a bias.
        fn run_transposed(self, onto: bool, bias: bool) -> [Vec<f32>; 5] {
            let ([x, residual], (weight, b)) = (self.inputs(), self.params());
            let (weight, b) = (turned(&weight), bias.then_some(b));
            let (w, bias) = (weight.clone(), b.clone());
            let y = match onto {
                true => linear_transposed_onto(residual.clone(), x.clone(), w, bias),
                false => linear_transposed(x.clone(), w, bias),
            };
            let out = values(&y);
            let grads = (y * self.upstream()).sum().backward();
            let residual = if onto { gradient(&residual, &grads) } else { Vec::new() };
            let [outputs, inputs] = weight.dims();
            let by_outputs = gradient(&weight, &grads);
            let for_weight = (0..inputs * outputs).map(|i| by_outputs[i % outputs * inputs + i / outputs]);
            let for_bias = b.map_or_else(Vec::new, |bias| gradient(&bias, &grads));
            [out, gradient(&x, &grads), residual, for_weight.collect(), for_bias]
        }
    }

    #[test]
    fn transposed_weights_give_the_exact_values_and_gradients_with_a_bias_and_without() {
        for (case, onto) in CASES.iter().flat_map(|case| [(case, false), (case, true)]) {
            let exact = case.exact(onto);
            let (with, without) = (case.run_transposed(onto, true), case.run_transposed(onto, false));
            for (i, (found, exact)) in with.iter().zip(&exact).enumerate() {
                assert!(distance(found, exact) < 1e-6, "{:?}, {i}: {}", case.shape, distance(found, exact));
            }
            let bias = values(&case.params().1);
            let less: Vec<f32> = exact[0].iter().zip(bias.iter().cycle()).map(|(y, b)| y - b).collect();
            assert!(distance(&without[0], &less) < 1e-6);
            // The bias affects no other gradient.
            assert_eq!(without[1..4], with[1..4]);
        }
    }

    #[test]
    fn threads_and_tracking_change_no_bits_of_transposed_weights() {
        for (onto, bias) in [(false, false), (false, true), (true, false), (true, true)] {
            let run = |floats| Case { floats, ..CASES[3] }.run_transposed(onto, bias);
            for floats in [Floats::F32, Floats::Bf16] {
                let one = with_threads(1, || run(floats));
                assert_eq!(one, with_threads(3, || run(floats)));
                let case = Case { floats, ..CASES[3] };
                let ([x, residual], (w, b)) = (case.inputs().map(untracked), case.params());
                let (w, b) = (untracked(turned(&w)), bias.then(|| untracked(b)));
                let y = match onto {
                    true => linear_transposed_onto(residual, x, w, b),
                    false => linear_transposed(x, w, b),
                };
                assert_eq!(values(&y), one[0]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "expects vectors of the weight's 4 inputs, found 5")]
    fn a_transposed_weight_of_other_inputs_is_named() {
        linear_transposed(normal(1, [1, 2, 5]), normal(2, [5, 4]), None);
    }

    #[test]
    #[should_panic(expected = "expects a bias of the weight's 5 outputs, found 4")]
    fn a_bias_of_other_outputs_is_named() {
        linear_transposed(normal(1, [1, 2, 4]), normal(2, [5, 4]), Some(normal(3, [4])));
    }

    #[test]
    #[should_panic(expected = "expects a residual of shape [2, 3, 4], found [1, 6, 4]")]
    fn a_residual_of_another_shape_is_named() {
        linear_onto(normal(1, [1, 6, 4]), normal(2, [2, 3, 5]), normal(3, [5, 4]), normal(4, [4]));
    }

    #[test]
    fn what_is_not_tracked_gets_no_gradient() {
        let ([x, residual], (w, b)) = (CASES[1].inputs(), CASES[1].params());
        let (x, b) = (untracked(x), untracked(b));
        let grads = linear_onto(residual.clone(), x.clone(), w.clone(), b.clone()).sum().backward();
        assert!(x.grad(&grads).is_none() && b.grad(&grads).is_none());
        assert_eq!(values(&residual.grad(&grads).unwrap()), vec![1.0; 30]);
        assert!(w.grad(&grads).is_some());
    }
}
