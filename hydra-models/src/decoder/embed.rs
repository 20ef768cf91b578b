//! The first layer: embeds token ids.

use super::DecoderConfig;
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{Table, along, check_length, with_positions};
use burn::module::Module;
use hydra_core::{Activation, Forward, Init, Pass};

/// The embedding of tokens: ids `[batch, tokens]` become `[batch, tokens, width]`. Positions are passed on.
#[derive(Module, Debug)]
pub struct Embed {
    /// The token table, `[vocabulary, width]`; a tied head shares it.
    pub embed_tokens: Table,
    /// The longest sequence in tokens.
    pub positions: usize,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl Embed {
    /// The layer without values.
    pub fn new(config: &DecoderConfig) -> Self {
        Self {
            embed_tokens: Table::new(config.vocab_size, config.hidden_size),
            positions: config.max_position_embeddings,
            deviation: config.initializer_range,
        }
    }
}

impl Adaptable for Embed {}

impl Forward for Embed {
    /// # Panics
    /// If a row of a single example has more tokens than there are positions, or an id is not below the vocabulary
    /// size.
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let (ids, at) = with_positions(x);
        let ids = ids.into_int::<2>();
        check_length(&ids, at.is_some(), self.positions);
        along(ops::lookup(self.embed_tokens.weight.val(), ids), at)
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens] = *inputs.first()?.as_slice() else { return None };
        let [_, width] = self.embed_tokens.weight.lazy_shape().dims();
        Some((4 * batch * tokens * width * size_of::<f32>()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{HostTensor, Layer};

    #[test]
    #[should_panic(expected = "a sequence of 129 tokens is longer than the model's 128 positions")]
    fn a_context_that_is_too_long_is_refused() {
        let embed = Embed::new(&DecoderConfig::preset("bytes-llama-tiny").unwrap());
        let device = burn::tensor::Device::flex().autodiff();
        let table = HostTensor::float(vec![0.0; 256 * 64], [256, 64]);
        let layer = embed.promote(&[table.into()], &device, &[false]);
        let ids = HostTensor::int(vec![1; 129], [1, 129]).to_device(&device).into_int::<2>();
        layer.forward(Activation::of(ids), &Pass::evaluate(Activation::default()));
    }
}
