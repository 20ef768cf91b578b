//! The last layer, or the last layers of a model with a split vocabulary: the loss.

use super::DecoderConfig;
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{HeadRows, Norm, Table, before_last, initial, table_logits};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use hydra_core::{Activation, Chain, DeviceBytes, Forward, Init, Pass};
use std::ops::Range;

/// The final normalization and the language model head, whose table is its own or that of the token embedding. Computes
/// the mean loss over the `batch * (tokens - 1)` predicted tokens, of shape `[1]`, or fewer if targets are
/// [ignored](crate::ops::IGNORED), from `[batch, tokens, width]`; the pass's targets are the model's input ids `[batch, tokens]`.
/// For a model that generates, it computes the logits `[sequences, vocabulary]` after the last token of each sequence.
///
/// With a split vocabulary, a layer has some rows of the table. It takes the vectors, which the first part normalizes, and returns
/// them with the log-sum-exp of the logits so far and the target's logit, each `[batch * tokens]` and `F32`. The last part returns
/// the loss.
#[derive(Module, Debug)]
pub struct Head {
    /// The final normalization, in the layer with the first rows.
    pub norm: Option<Norm>,
    /// The table or some rows of it, `[rows, width]`.
    pub lm_head: Table,
    #[module(skip)]
    rows: HeadRows,
    /// The standard deviation of initial weights.
    deviation: f64,
}

impl Head {
    /// The layer of these rows of the table, without values; if the head is tied, they are those of `embedding`.
    pub fn new(config: &DecoderConfig, rows: &Range<usize>, embedding: &Table) -> Self {
        let own = || Table::new(rows.len(), config.hidden_size);
        let lm_head = if config.tie_word_embeddings { embedding.tied() } else { own() };
        let rows = HeadRows::of(rows, config.vocab_size, &config.head);
        let norm = rows.begins().then(|| Norm::rms(config.hidden_size, config.rms_norm_eps));
        Self { norm, lm_head, rows, deviation: config.initializer_range }
    }
}

impl Adaptable for Head {}

impl Forward for Head {
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        self.rows.forward(x, self.norm.as_ref(), &self.lm_head, pass)
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        self.rows.working_bytes(inputs, &self.lm_head)
    }

    fn cost_key(&self) -> Option<String> {
        self.rows.cost_key(self.norm.as_ref().map(|norm| norm.epsilon))
    }

    fn reads_targets(&self) -> bool {
        matches!(self.rows, HeadRows::Part(_))
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
