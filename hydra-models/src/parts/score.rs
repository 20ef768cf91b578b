//! The head of a decoder's sequence classifier.

use super::{Linear, Norm, RmsNorm, Sequences};
use crate::lora::Adaptable;
use burn::module::{Module, ModuleDisplay};
use burn::tensor::Tensor;
use hydra_core::{Activation, Forward, Init, Pass};

/// The normalization after the last block.
pub trait FinalNorm: Module + ModuleDisplay + Sync + 'static {
    /// Normalizes the last dimension of `[batch, tokens, width]`.
    fn normalize(&self, x: Tensor<3>) -> Tensor<3>;
}

impl FinalNorm for Norm {
    fn normalize(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(x)
    }
}

impl FinalNorm for RmsNorm {
    fn normalize(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(x)
    }
}

/// The final normalization and the linear layer without a bias of Transformers' `..ForSequenceClassification`. Computes
/// logits `[items, outputs]` from one row `[1, tokens, width]` that holds all [`Sequences`]: those of each sequence's
/// last token that is not the padding. Other tokens are not normalized.
#[derive(Module, Debug)]
pub struct ScoreHead<N: FinalNorm> {
    /// The final normalization.
    pub norm: N,
    /// The linear layer, `[outputs, width]`.
    pub score: Linear,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl<N: FinalNorm> ScoreHead<N> {
    /// The layer without values, from vectors of `width` to this number of outputs.
    pub fn new(norm: N, width: usize, outputs: usize, deviation: f64) -> Self {
        Self { norm, score: Linear::new(width, outputs, false), deviation }
    }
}

/// Returns whether a parameter of a chain belongs to the linear layer of its [`ScoreHead`].
pub(crate) fn is_score(param: &str) -> bool {
    param.starts_with("head.score.")
}

/// PEFT trains the head in full and gives it no adapter.
impl<N: FinalNorm> Adaptable for ScoreHead<N> {}

impl<N: FinalNorm> Forward for ScoreHead<N> {
    /// # Panics
    /// If the input has several rows, or the targets do not hold the sequences.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let lasts = Sequences::rows(x.part(0).into_float(), Sequences::of(pass).lasts);
        let hidden = self.norm.normalize(lasts.unsqueeze_dim(0));
        Activation::of(self.score.forward(hidden, pass).squeeze_dim::<2>(0))
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        match name {
            _ if name.ends_with("bias") => Init::Zeros,
            _ if name.starts_with("norm") => Init::Ones,
            _ => Init::Normal(self.deviation),
        }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [outputs, _] = self.score.weight.lazy_shape().dims();
        // A sequence has at least one token.
        let elements = batch * tokens * (10 * width + 8 * outputs) + 128 * width;
        Some((elements * size_of::<f32>()) as u64)
    }
}
