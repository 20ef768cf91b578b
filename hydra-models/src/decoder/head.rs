//! The last layer: the loss.

use super::DecoderConfig;
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{
    RmsNorm, SEQUENCES, Table, before_last, language_model, last_tokens, next_logits, table_logits,
};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use hydra_core::{Activation, Chain, DeviceBytes, Forward, Init, Pass};

/// The final normalization and the language model head, whose table is its own or that of the token embedding. Computes
/// the mean loss over the `batch * (tokens - 1)` predicted tokens, of shape `[1]`, from `[batch, tokens, width]`; the
/// pass's targets are the model's input ids `[batch, tokens]`.
#[derive(Module, Debug)]
pub struct Head {
    /// The final normalization.
    pub norm: RmsNorm,
    /// The table, `[vocabulary, width]`.
    pub lm_head: Table,
    /// The number of tokens whose logits are in memory at a time.
    pub chunk_rows: usize,
    /// Whether it returns the logits `[sequences, vocabulary]` after the last token of each sequence instead of the loss.
    pub generates: bool,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl Head {
    /// The layer without values; if the head is tied, its table is the parameter of `embedding`.
    pub fn new(config: &DecoderConfig, embedding: &Table) -> Self {
        let own = || Table::new(config.vocab_size, config.hidden_size);
        Self {
            norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps),
            lm_head: if config.tie_word_embeddings { embedding.tied() } else { own() },
            chunk_rows: config.chunk_rows(),
            generates: config.head.cache.is_some(),
            deviation: config.initializer_range,
        }
    }
}

impl Adaptable for Head {}

impl Forward for Head {
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        if self.generates {
            let last = self.norm.forward(last_tokens(x.part(0).into_float(), pass));
            return next_logits(last, self.lm_head.weight.val());
        }
        let hidden = self.norm.forward(x.part(0).into_float());
        language_model(hidden, self.lm_head.weight.val(), self.chunk_rows, pass)
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        if name.starts_with("norm") { Init::Ones } else { Init::Normal(self.deviation) }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [vocabulary, _] = self.lm_head.weight.lazy_shape().dims();
        let elements = match self.generates {
            // Logits of as many sequences as the row has at most, and copies of them.
            true => 4 * tokens.min(SEQUENCES) * vocabulary + 8 * batch * tokens * width,
            false => 2 * self.chunk_rows * vocabulary + 8 * batch * tokens * width + 8192 * width,
        };
        Some((elements * size_of::<f32>()) as u64)
    }
}

/// The `F32` logits `[batch, tokens, vocabulary]` of a decoder for inputs of its [chain](super::chain), without
/// dropout, on the plain `device`. Layers are promoted one after the other from the bytes that `buffer` returns; the
/// logits are not chunked.
///
/// # Panics
/// If `chain` is not the chain of `config`, or the inputs do not fit it.
pub fn logits(
    config: &DecoderConfig,
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    inputs: impl Into<Activation>,
    device: &Device,
) -> Tensor<3> {
    let (x, [weight, table]) = before_last(chain, buffer, (inputs.into(), Activation::default()), device);
    table_logits(ops::rms_norm(x, weight.into_float(), config.rms_norm_eps), table)
}

/// The logits `[items, outputs]` of a decoder with a classifier for the inputs and the targets of a batch, a row of all
/// its sequences.
///
/// # Panics
/// If `chain` is not the chain of `config`, or the inputs or targets do not fit it.
pub fn class_logits(
    config: &DecoderConfig,
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    (inputs, targets): (Activation, Activation),
    device: &Device,
) -> Tensor<2> {
    let (x, [weight, score]) = before_last(chain, buffer, (inputs, targets), device);
    let x = ops::rms_norm(x, weight.into_float(), config.rms_norm_eps);
    ops::linear_transposed(x, score.into_float(), None).squeeze_dim(0)
}
