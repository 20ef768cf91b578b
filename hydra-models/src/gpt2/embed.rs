//! The first layer: embeds token ids.

use super::{Gpt2Config, Table};
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{along, check_length, with_positions};
use burn::module::Module;
use hydra_core::{Activation, Forward, Init, Pass};

/// The embedding of tokens and positions: ids `[batch, tokens]` become `[batch, tokens, width]`. If rows hold several
/// examples, positions are those within the examples and are passed on.
#[derive(Module, Debug)]
pub struct Embed {
    /// The token table, `[vocabulary, width]`; the head shares it.
    pub wte: Table,
    /// The position table, `[positions, width]`.
    pub wpe: Table,
    /// The dropout probability.
    pub dropout: f64,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl Embed {
    /// The layer without values.
    pub fn new(config: &Gpt2Config) -> Self {
        Self {
            wte: Table::new(config.vocab_size, config.n_embd),
            wpe: Table::new(config.n_positions, config.n_embd),
            dropout: config.embd_pdrop,
            deviation: config.initializer_range,
        }
    }
}

impl Adaptable for Embed {}

impl Forward for Embed {
    /// # Panics
    /// If a row of a single example has more tokens than there are positions, or an id is not below the vocabulary
    /// size.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let (ids, at) = with_positions(x);
        let ids = ids.into_int::<2>();
        check_length(&ids, at.is_some(), self.wpe.weight.val().dims()[0]);
        let (tokens, places) = (self.wte.weight.val(), self.wpe.weight.val());
        let x = match &at {
            Some(at) => ops::lookup(tokens, ids) + ops::lookup(places, at.clone()),
            None => ops::embedding(tokens, places, ids),
        };
        along(ops::dropout(x, self.dropout, pass.site(0)), at)
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens] = *inputs.first()?.as_slice() else { return None };
        let shape = self.wpe.weight.lazy_shape();
        let [positions, width] = shape.dims();
        // Vectors, the dropout mask and product, and a copy of the positions' gradient.
        let elements = 8 * batch * tokens * width + 2 * positions * width;
        Some((elements * size_of::<f32>()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{HostTensor, Layer};

    #[test]
    #[should_panic(expected = "a sequence of 129 tokens is longer than the model's 128 positions")]
    fn a_context_that_is_too_long_is_refused() {
        let embed = Embed::new(&Gpt2Config::preset("bytes-tiny").unwrap());
        let device = burn::tensor::Device::flex().autodiff();
        let values = |rows: usize| HostTensor::float(vec![0.0; rows * 64], [rows, 64]);
        let layer = embed.promote(&[values(256).into(), values(128).into()], &device, &[false; 2]);
        let ids = HostTensor::int(vec![1; 129], [1, 129]).to_device(&device).into_int::<2>();
        layer.forward(Activation::of(ids), &Pass::evaluate(Activation::default()));
    }
}
