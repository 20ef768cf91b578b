//! Operations with a hand-written backward, each with a reference implementation in Burn's own operations.
//!
//! Tracked and untracked passes run the same kernel, so a forward without a graph has the same bits as the recomputed
//! one. Kernels work on independent rows, and sums over rows have a fixed order: no result depends on the number of
//! threads.
//!
//! The float operands of an op have the same type, `F32`, `BF16` or `F16`, as do its results and their gradients,
//! except for losses, which are `F32`. All ops compute in `f32`: 16-bit operands are widened first, and results are
//! rounded once, to nearest. Products of `BF16` matrices have sums in `f32`, whose bits `kernels::bf16` defines on CPUs.
//! (The factors of products within attention and the head are rounded too: on GPUs, and on CPUs for `BF16`. Head
//! gradients multiplied by a factor are rounded again.)

mod attention;
mod autodiff;
mod batch_norm;
mod counted;
#[cfg(feature = "cube")]
mod cube;
mod depthwise;
mod dropout;
mod embedding;
mod fork;
mod gelu;
mod head;
#[allow(unsafe_code)]
mod kernels;
mod linear;
mod log_sums;
mod math;
mod norm;
mod precision;
mod rms_norm;
mod segments;
mod swiglu;
mod tensors;

pub mod reference;

pub use attention::{
    Attention, GroupedAttention, KvCache, KvCacheForm, Rotary, RotaryScaling, causal_attention,
    causal_attention_within, grouped_attention, grouped_attention_within,
};
pub(crate) use attention::{
    BlockCache, cached_attention, grouped_working_elements, working_elements as attention_working_elements,
};
pub use batch_norm::{BatchStatistics, batch_norm};
#[cfg(feature = "cube")]
pub use cube::{products_library, supports};
pub use depthwise::depthwise;
pub use dropout::{dropout, dropout_onto};
pub use embedding::{embedding, lookup};
pub use fork::fork;
pub use gelu::{gelu, gelu_tanh};
pub use head::{IGNORED, head_loss, token_losses};
pub(crate) use linear::{Form, linear_by_row};
pub use linear::{
    linear, linear_nf4, linear_nf4_onto, linear_onto, linear_transposed, linear_transposed_onto,
};
pub(crate) use log_sums::log_sums;
pub(crate) use math::log_sum_exp;
pub use norm::layer_norm;
pub use precision::{Precision, bf16_products, set_precision};
pub use rms_norm::rms_norm;
pub use segments::segment_sums;
pub use swiglu::swiglu;

#[cfg(test)]
pub(crate) mod testing {
    use burn::tensor::{DType, Device, FloatDType, Gradients, Int, Tensor, TensorData};
    use half::bf16;
    use hydra_core::{AnyTensor, Key};

    pub use crate::synthetic::testing::with_threads;

    /// A tensor of normal numbers on the autodiff device.
    pub fn normal<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
        let key = Key::new(seed);
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|i: usize| key.normal(i as u64) as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff())
    }

    /// The positions of the tokens of rows whose examples have these lengths.
    pub fn positions<const E: usize>(rows: &[[usize; E]]) -> Tensor<2, Int> {
        let row = |examples: &[usize; E]| examples.iter().flat_map(|length| 0..*length as i32).collect();
        let rows: Vec<Vec<i32>> = rows.iter().map(row).collect();
        let data = TensorData::new(rows.concat(), [rows.len(), rows[0].len()]);
        Tensor::from_data(data, (&Device::flex().autodiff(), DType::I32))
    }

    /// The row and the tokens of each example.
    pub fn examples<const E: usize>(rows: &[[usize; E]]) -> Vec<(usize, std::ops::Range<usize>)> {
        let row = |(row, lengths): (usize, &[usize; E])| {
            let ends = lengths.iter().scan(0, |end, length| {
                *end += length;
                Some((row, *end - length..*end))
            });
            ends.collect::<Vec<_>>()
        };
        rows.iter().enumerate().flat_map(row).collect()
    }

    /// The same values outside of any graph, on the autodiff device.
    pub fn untracked<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
        // `detach` does not work here: a detached leaf is still a leaf.
        let tensor = tensor.inner().autodiff();
        assert!(!tensor.is_tracked());
        tensor
    }

    /// The float operands of a test.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Floats {
        F32,
        Bf16,
        /// `F32`, with the values of `Bf16`.
        Widened,
    }

    impl Floats {
        pub fn of<const D: usize>(self, tensor: Tensor<D>) -> Tensor<D> {
            match self {
                Self::F32 => tensor,
                Self::Bf16 => tensor.cast(FloatDType::BF16),
                Self::Widened => tensor.cast(FloatDType::BF16).cast(FloatDType::F32),
            }
        }

        pub fn leaf<const D: usize>(self, tensor: Tensor<D>) -> Tensor<D> {
            self.of(tensor).detach().require_grad()
        }
    }

    /// The elements on the host; `bf16` is widened.
    pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
        AnyTensor::from(tensor.clone().cast(FloatDType::F32)).into_host().as_f32().to_vec()
    }

    /// The gradient of a leaf, of the leaf's type.
    #[track_caller]
    pub fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Vec<f32> {
        let gradient = leaf.grad(gradients).expect("a gradient");
        assert_eq!(gradient.dtype(), leaf.dtype(), "the gradient and its leaf have different types");
        values(&gradient)
    }

    /// Asserts that the `bf16` results are the `f32` results for the same values, rounded once.
    #[track_caller]
    pub fn assert_rounded(found: &[f32], widened: &[f32]) {
        let rounded: Vec<f32> = widened.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!(found, rounded);
    }

    /// Asserts that every error is at most `bound` times the largest exact element.
    #[track_caller]
    pub fn assert_within(bound: f64, what: &str, found: &[f32], exact: &[f32]) {
        let largest = exact.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        assert!(found.len() == exact.len() && found.iter().all(|x| x.is_finite()), "{what}: {found:?}");
        let error = found.iter().zip(exact).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        println!("{what}: {error:.2e} where the largest is {largest:.2e}");
        assert!(error <= bound * f64::from(largest), "{what}: {error} where the largest is {largest}");
    }

    /// Half the relative spacing of `bf16`, plus a margin for `f32`.
    pub const ROUNDING: f64 = 1.001 / 256.0;

    /// The distance of two tensors, relative to the norm of the second.
    pub fn distance(found: &[f32], expected: &[f32]) -> f64 {
        assert_eq!(found.len(), expected.len());
        let square = |x: f64| x * x;
        let error: f64 = found.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
        let norm: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
        (error / norm.max(1e-30)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::*;
    use super::*;
    use burn::tensor::{Device, Int, Tensor};
    use hydra_core::{Activation, Pass, panic_message};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn refusal<const D: usize>(op: impl FnOnce() -> Tensor<D>) -> String {
        let panic = catch_unwind(AssertUnwindSafe(op)).expect_err("several types in one op");
        panic_message(&*panic)
    }

    #[test]
    fn operands_of_several_types_are_refused_by_name() {
        let wide = || normal::<3>(1, [1, 2, 4]);
        let narrow = || Floats::Bf16.of(wide());
        let (square, row) = (|| Floats::Bf16.of(normal::<2>(2, [4, 4])), || normal::<1>(3, [4]));
        let ids = Tensor::<2, Int>::zeros([1, 2], &Device::flex().autodiff());
        let pass = Pass::train(Pass::key_of(1, 2, 3), Activation::default());
        let mask = pass.site(0).dropout_mask(0.5).unwrap();
        let targets = ids.clone().reshape([2]);
        let hidden = || wide().reshape([2, 4]);
        for (op, refusal) in [
            ("linear", refusal(|| linear(narrow(), square(), row()))),
            ("linear_onto", refusal(|| linear_onto(wide(), narrow(), square(), Floats::Bf16.of(row())))),
            ("layer_norm", refusal(|| layer_norm(narrow(), row(), row(), 1e-5))),
            ("dropout_onto", refusal(|| dropout_onto(wide(), narrow(), mask))),
            ("embedding", refusal(|| embedding(square(), normal(4, [2, 4]), ids))),
            ("head_loss", refusal(|| head_loss(hidden(), square(), targets, 1, &pass))),
        ] {
            let expected = format!("{op} expects floats of one type, F32, BF16 or F16; found [");
            assert!(refusal.starts_with(&expected), "{refusal}");
            assert!(refusal[expected.len()..].contains("F32"), "{refusal}");
            assert!(refusal[expected.len()..].contains("BF16"), "{refusal}");
        }
    }
}
