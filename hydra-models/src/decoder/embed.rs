//! The first layer, or the first layers of a model with a split vocabulary: embed token ids.

use super::DecoderConfig;
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::vocabulary::{Place, embedding_elements};
use crate::parts::{Table, along, check_length, with_positions};
use burn::module::Module;
use hydra_core::{Activation, Forward, Init, Pass};
use std::ops::Range;

/// The embedding of tokens: ids `[batch, tokens]` become `[batch, tokens, width]`. Positions are passed on.
///
/// With a split vocabulary, a layer has some rows of the table. It adds its tokens' vectors to the sum of earlier parts `[batch,
/// tokens, width]`, which precedes the ids in the input unless this is the first part. All parts but the last pass the ids on.
#[derive(Module, Debug)]
pub struct Embed {
    /// The token table or some rows of it, `[rows, width]`; a tied head shares it.
    pub embed_tokens: Table,
    #[module(skip)]
    place: Place,
    /// The vocabulary size, and the longest sequence in tokens.
    limits: [usize; 2],
    /// The standard deviation of initial weights.
    deviation: f64,
}

impl Embed {
    /// The layer of these rows of the table, without values.
    pub fn new(config: &DecoderConfig, rows: &Range<usize>) -> Self {
        Self {
            embed_tokens: Table::new(rows.len(), config.hidden_size),
            place: Place::of(rows, config.vocab_size),
            limits: [config.vocab_size, config.max_position_embeddings],
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
        let table = self.embed_tokens.weight.val();
        if self.place.is_whole() {
            let (ids, at) = with_positions(x);
            let ids = ids.into_int::<2>();
            check_length(&ids, at.is_some(), self.limits[1]);
            return along(ops::lookup(table, ids), at);
        }
        let known = self.place.look_up(x, table, self.limits);
        let sum = Activation::of(known.sum);
        let sum = if self.place.ends { sum } else { sum.and(known.ids) };
        known.rest.into_iter().fold(sum, Activation::and)
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, ..] = *inputs.first()?.as_slice() else { return None };
        let [_, width] = self.embed_tokens.weight.lazy_shape().dims();
        let elements = match self.place.is_whole() {
            true => 4 * batch * tokens * width,
            false => embedding_elements([batch, tokens, width]),
        };
        Some((elements * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        let Self { place, limits, .. } = self;
        (!place.is_whole()).then(|| format!("{place:?} {limits:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{HostTensor, Layer};

    #[test]
    #[should_panic(expected = "a sequence of 129 tokens is longer than the model's 128 positions")]
    fn a_context_that_is_too_long_is_refused() {
        let embed = Embed::new(&DecoderConfig::preset("bytes-llama-tiny").unwrap(), &(0..256));
        let device = burn::tensor::Device::flex().autodiff();
        let table = HostTensor::float(vec![0.0; 256 * 64], [256, 64]);
        let layer = embed.promote(&[table.into()], &device, &[false]);
        let ids = HostTensor::int(vec![1; 129], [1, 129]).to_device(&device).into_int::<2>();
        layer.forward(Activation::of(ids), &Pass::evaluate(Activation::default()));
    }
}
