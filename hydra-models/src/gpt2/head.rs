//! The last layer, or the last layers of a model with a split vocabulary: the loss.

use super::{Gpt2Config, Norm, Table};
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{HeadRows, before_last, table_logits};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use hydra_core::{Activation, Chain, DeviceBytes, Forward, Init, Pass};
use std::ops::Range;

/// The final normalization and the language model head, which shares the token embedding's table. Computes the mean
/// loss over the `batch * (tokens - 1)` predicted tokens, of shape `[1]`, or fewer if targets are
/// [ignored](crate::ops::IGNORED), from `[batch, tokens, width]`; the pass's targets are the model's input ids `[batch, tokens]`.
/// For a model that generates, it computes the logits `[sequences, vocabulary]` after the last token of each sequence.
///
/// With a split vocabulary, a layer has some rows of the table. It takes the vectors, which the first part normalizes, and returns
/// them with the log-sum-exp of the logits so far and the target's logit, each `[batch * tokens]` and `F32`. The last part returns
/// the loss.
#[derive(Module, Debug)]
pub struct Head {
    /// The final normalization, in the layer with the first rows.
    pub ln_f: Option<Norm>,
    /// The token table or some rows of it, `[rows, width]`.
    pub wte: Table,
    #[module(skip)]
    rows: HeadRows,
}

impl Head {
    /// The layer of these rows of the table, without values; they are the parameter of `wte`.
    pub fn new(config: &Gpt2Config, rows: &Range<usize>, wte: &Table) -> Self {
        let rows = HeadRows::of(rows, config.vocab_size, &config.head);
        let ln_f = rows.begins().then(|| Norm::new(config.n_embd, config.layer_norm_epsilon));
        Self { ln_f, wte: wte.tied(), rows }
    }
}

impl Adaptable for Head {}

impl Forward for Head {
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        self.rows.forward(x, self.ln_f.as_ref(), &self.wte, pass)
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        if name.ends_with("bias") { Init::Zeros } else { Init::Ones }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        self.rows.working_bytes(inputs, &self.wte)
    }

    fn cost_key(&self) -> Option<String> {
        self.rows.cost_key(self.ln_f.as_ref().map(|norm| norm.epsilon))
    }

    fn reads_targets(&self) -> bool {
        matches!(self.rows, HeadRows::Part(_))
    }
}

/// The `F32` logits `[batch, tokens, vocabulary]` of a GPT-2 for inputs of its [chain](super::chain), without dropout,
/// on the plain `device`. Layers are promoted one after the other from the bytes that `buffer` returns; the logits are
/// not chunked.
///
/// # Panics
/// If `chain` is not the chain of `config`, or the inputs do not fit it.
pub fn logits(
    config: &Gpt2Config,
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    inputs: impl Into<Activation>,
    device: &Device,
) -> Tensor<3> {
    let (x, [weight, bias, table]) =
        before_last(chain, buffer, (inputs.into(), Activation::default()), device);
    let x = ops::layer_norm(x, weight.into_float(), bias.into_float(), config.layer_norm_epsilon);
    table_logits(x, table)
}
