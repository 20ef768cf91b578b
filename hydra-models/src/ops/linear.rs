//! The affine map of a sequence of vectors, alone or onto a residual.

use super::autodiff::*;
use super::kernels::{Mat, Start, product, sum_rows};
use super::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};

/// `x @ weight + bias` for `x` of shape `[batch, tokens, in]`, a weight `[in, out]` and a bias `[out]`.
///
/// # Panics
/// If the shapes do not fit or float types differ.
pub fn linear(x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
    one_type("linear", [x.dtype(), weight.dtype(), bias.dtype()]);
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as AffineOps>::affine(x, weight, bias))
}

/// `residual + x @ weight + bias`: [`linear`] onto a residual of shape `[batch, tokens, out]`.
///
/// # Panics
/// If the shapes do not fit or float types differ.
pub fn linear_onto(residual: Tensor<3>, x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
    let ([batch, tokens, _], [outputs]) = (x.dims(), bias.dims());
    let (expected, found) = ([batch, tokens, outputs], residual.dims());
    assert!(found == expected, "linear_onto expects a residual of shape {expected:?}, found {found:?}");
    one_type("linear_onto", [residual.dtype(), x.dtype(), weight.dtype(), bias.dtype()]);
    let (residual, x) = (residual.into_dispatch(), x.into_dispatch());
    let (weight, bias) = (weight.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as AffineOps>::affine_onto(residual, x, weight, bias))
}

/// The map as ops of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait AffineOps: Backend {
    /// `x @ weight + bias`.
    fn affine(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `residual + x @ weight + bias`.
    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// The operations that a backend must compute for it to be differentiable.
pub(crate) trait AffineKernels: AffineOps {
    /// The gradients of what is `wanted`, of `x`, weight and bias, for that of the output.
    fn affine_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3];
}

/// The rows of a `[batch, tokens, width]`, as a matrix.
fn as_rows(x: &FlexTensor) -> Mat<'_> {
    let [batch, tokens, width] = x.shape().dims();
    Mat::new(floats(x), batch * tokens, width)
}

fn map(residual: Option<FlexTensor>, x: FlexTensor, weight: FlexTensor, bias: FlexTensor) -> FlexTensor {
    profile::time(Part::Matmul, || {
        let float = float_type(&x);
        let (x, weight, bias) = (owned(x), owned(weight), owned(bias));
        let ([batch, tokens, _], [inputs, outputs]) = (x.shape().dims(), weight.shape().dims());
        let residual = residual.map(owned);
        let start = match &residual {
            Some(residual) => Start::Sum(floats(residual), floats(&bias)),
            None => Start::Rows(floats(&bias)),
        };
        let y = product(start, as_rows(&x), Mat::new(floats(&weight), inputs, outputs));
        flex(y, [batch, tokens, outputs], float)
    })
}

impl AffineOps for Flex {
    fn affine(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        map(None, x, weight, bias)
    }

    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        map(Some(residual), x, weight, bias)
    }
}

impl AffineKernels for Flex {
    fn affine_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        profile::time(Part::Matmul, || {
            let float = float_type(&x);
            let (x, weight, gradient) = (owned(x), owned(weight), owned(gradient));
            let [inputs, outputs] = weight.shape().dims();
            let (rows, gradients) = (as_rows(&x), as_rows(&gradient));
            let for_x = || {
                let weight = Mat::new(floats(&weight), inputs, outputs);
                flex(product(Start::Nothing, gradients, weight.t()), x.shape(), float)
            };
            let for_weight = || flex(product(Start::Nothing, rows.t(), gradients), weight.shape(), float);
            let for_bias = || flex(sum_rows(gradients), [outputs], float);
            [wanted[0].then(for_x), wanted[1].then(for_weight), wanted[2].then(for_bias)]
        })
    }
}

/// The tensors saved for the backward: `x` and the weight.
type Saved<B> = (FloatTensor<B>, FloatTensor<B>);

/// Registers the gradients of `x`, weight and bias, as far as they are tracked.
fn pull_back<B: AffineKernels>(
    (x, weight): Saved<B>,
    gradient: FloatTensor<B>,
    nodes: [Option<NodeId>; 3],
    grads: &mut Gradients,
) {
    let gradients = B::affine_backward(x, weight, gradient, nodes.map(|node| node.is_some()));
    register::<B, 3>(grads, nodes, gradients);
}

#[derive(Debug)]
struct AffineBackward;

impl<B: AffineKernels> Backward<B, 3> for AffineBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let nodes = parents(&ops);
        pull_back::<B>(ops.state, gradient, nodes, grads);
    }
}

/// The same with the residual as the first parent, whose gradient is the output's.
#[derive(Debug)]
struct AffineOntoBackward;

impl<B: AffineKernels> Backward<B, 4> for AffineOntoBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [residual, nodes @ ..] = parents(&ops);
        pull_back::<B>(ops.state, gradient.clone(), nodes, grads);
        register::<B, 1>(grads, [residual], [Some(gradient)]);
    }
}

impl<B: AffineKernels, C: CheckpointStrategy> AffineOps for Autodiff<B, C> {
    fn affine(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), bias.node()];
        let (x, weight, bias) = (x.into_primitive(), weight.into_primitive(), bias.into_primitive());
        match AffineBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::affine(x.clone(), weight.clone(), bias);
                prep.finish((x, weight), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::affine(x, weight, bias)),
        }
    }

    fn affine_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let nodes = [residual.node(), x.node(), weight.node(), bias.node()];
        let (residual, x) = (residual.into_primitive(), x.into_primitive());
        let (weight, bias) = (weight.into_primitive(), bias.into_primitive());
        match AffineOntoBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::affine_onto(residual, x.clone(), weight.clone(), bias);
                prep.finish((x, weight), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::affine_onto(residual, x, weight, bias)),
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn bf16_is_rounded_once() {
        for (case, onto) in CASES.iter().flat_map(|case| [(case, false), (case, true)]) {
            let [narrow, widened] = [Floats::Bf16, Floats::Widened].map(|floats| Case { floats, ..*case });
            let (found, exact) = (narrow.run(onto), narrow.exact(onto));
            for (i, (found, widened)) in found.iter().zip(widened.run(onto)).enumerate() {
                assert_rounded(found, &widened);
                assert_within(ROUNDING, &format!("linear {:?}, {i}", case.shape), found, &exact[i]);
            }
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
