//! The first layer, or the first layers of a model with a split vocabulary: embed token ids.

use super::{Gpt2Config, Table};
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::vocabulary::{Place, embedding_elements};
use crate::parts::{along, check_length, with_positions};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Forward, HostTensor, Init, Pass};
use std::ops::Range;

/// The embedding of tokens and positions: ids `[batch, tokens]` become `[batch, tokens, width]`. If rows hold several
/// examples, positions are those within the examples and are passed on.
///
/// With a split vocabulary, a layer has some rows of the token table. It adds its tokens' vectors to the sum of earlier parts
/// `[batch, tokens, width]`, which precedes the ids in the input unless this is the first part. The last part adds the position
/// vectors; until then the ids are passed on.
#[derive(Module, Debug)]
pub struct Embed {
    /// The token table or some rows of it, `[rows, width]`; the head shares it.
    pub wte: Table,
    /// The position table, `[positions, width]`, in the layer with the last rows.
    pub wpe: Option<Table>,
    #[module(skip)]
    place: Place,
    /// The vocabulary size, and the longest sequence in tokens.
    limits: [usize; 2],
    /// The dropout probability after the last part.
    dropout: f64,
    /// The standard deviation of initial weights.
    deviation: f64,
}

impl Embed {
    /// The layer of these rows of the table, without values.
    pub fn new(config: &Gpt2Config, rows: &Range<usize>) -> Self {
        let place = Place::of(rows, config.vocab_size);
        Self {
            wte: Table::new(rows.len(), config.n_embd),
            wpe: place.ends.then(|| Table::new(config.n_positions, config.n_embd)),
            place,
            limits: [config.vocab_size, config.n_positions],
            dropout: config.embd_pdrop,
            deviation: config.initializer_range,
        }
    }

    /// The output of a layer with the whole token table and this position table.
    fn whole(&self, x: Activation, places: Tensor<2>, pass: &Pass) -> Activation {
        let (ids, at) = with_positions(x);
        let ids = ids.into_int::<2>();
        check_length(&ids, at.is_some(), self.limits[1]);
        let tokens = self.wte.weight.val();
        let x = match &at {
            Some(at) => ops::lookup(tokens, ids) + ops::lookup(places, at.clone()),
            None => ops::embedding(tokens, places, ids),
        };
        along(ops::dropout(x, self.dropout, pass.site(0)), at)
    }

    /// The output of a part, with the position table in the last one.
    fn part(&self, x: Activation, places: Option<Tensor<2>>, pass: &Pass) -> Activation {
        let known = self.place.look_up(x, self.wte.weight.val(), self.limits);
        let sum = match places {
            Some(table) => {
                let at = known.rest.first().map(|at| at.clone().into_int::<2>());
                let x = known.sum + places_of(table, known.ids.dims(), at);
                Activation::of(ops::dropout(x, self.dropout, pass.site(0)))
            }
            None => Activation::of(known.sum).and(known.ids),
        };
        known.rest.into_iter().fold(sum, Activation::and)
    }
}

/// The position vectors of tokens `[batch, tokens]`: those within their examples if rows hold several.
fn places_of(table: Tensor<2>, [batch, tokens]: [usize; 2], at: Option<Tensor<2, Int>>) -> Tensor<3> {
    let in_order = || {
        let row = 0..tokens as i32;
        let rows = (0..batch).flat_map(|_| row.clone()).collect();
        HostTensor::int(rows, [batch, tokens]).to_device(&table.device()).into_int::<2>()
    };
    let at = at.unwrap_or_else(in_order);
    ops::lookup(table, at)
}

impl Adaptable for Embed {}

impl Forward for Embed {
    /// # Panics
    /// If a row of a single example has more tokens than there are positions, or an id is not below the vocabulary
    /// size.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        match self.wpe.as_ref().map(|table| table.weight.val()) {
            Some(places) if self.place.is_whole() => self.whole(x, places, pass),
            places => self.part(x, places, pass),
        }
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, ..] = *inputs.first()?.as_slice() else { return None };
        let ([_, width], [_, positions]) = (self.wte.weight.lazy_shape().dims(), self.limits);
        let elements = match self.place.is_whole() {
            // Vectors, the dropout mask and product, and a copy of the positions' gradient.
            true => 8 * batch * tokens * width + 2 * positions * width,
            false => {
                let places = if self.wpe.is_some() { 6 * batch * tokens * width } else { 0 };
                embedding_elements([batch, tokens, width]) + places
            }
        };
        Some((elements * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        let Self { place, limits, dropout, .. } = self;
        (!place.is_whole()).then(|| format!("{place:?} {limits:?} {dropout}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{HostTensor, Layer};

    #[test]
    #[should_panic(expected = "a sequence of 129 tokens is longer than the model's 128 positions")]
    fn a_context_that_is_too_long_is_refused() {
        let embed = Embed::new(&Gpt2Config::preset("bytes-tiny").unwrap(), &(0..256));
        let device = burn::tensor::Device::flex().autodiff();
        let values = |rows: usize| HostTensor::float(vec![0.0; rows * 64], [rows, 64]);
        let layer = embed.promote(&[values(256).into(), values(128).into()], &device, &[false; 2]);
        let ids = HostTensor::int(vec![1; 129], [1, 129]).to_device(&device).into_int::<2>();
        layer.forward(Activation::of(ids), &Pass::evaluate(Activation::default()));
    }
}
