//! The first layer: embeds tokens with their positions and types.

use super::EncoderConfig;
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{Norm, Table, along, initial};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// The embeddings: ids, positions and optional token types, `[batch, tokens]` each, become `[batch, tokens, width]`.
/// Positions are passed on.
#[derive(Module, Debug)]
pub struct Embeddings {
    /// The token table, `[vocabulary, width]`.
    pub words: Table,
    /// The position table, `[positions, width]`, if the model has one.
    pub positions: Option<Table>,
    /// The table of token types, `[types, width]`, if the model has one.
    pub types: Option<Table>,
    /// After the sum.
    pub norm: Norm,
    #[module(skip)]
    options: EmbeddingOptions,
}

#[derive(Clone, Debug)]
struct EmbeddingOptions {
    /// The row of the position table of a sequence's first token.
    first_position: usize,
    dropout: f64,
    deviation: f64,
}

impl Embeddings {
    /// The layer without values.
    pub fn new(config: &EncoderConfig) -> Self {
        let width = config.hidden_size;
        let options = EmbeddingOptions {
            first_position: config.first_position(),
            dropout: config.hidden_dropout_prob,
            deviation: config.initializer_range,
        };
        let has_positions = config.modern.is_none();
        Self {
            words: Table::new(config.vocab_size, width),
            positions: has_positions.then(|| Table::new(config.max_position_embeddings, width)),
            types: (config.type_vocab_size > 0).then(|| Table::new(config.type_vocab_size, width)),
            norm: config.norm(),
            options,
        }
    }

    /// The sums of the vectors of each token, with token types of zero if there are none.
    fn sums(&self, ids: Tensor<2, Int>, at: Tensor<2, Int>, types: Option<Tensor<2, Int>>) -> Tensor<3> {
        let types = types.unwrap_or_else(|| ids.zeros_like());
        let mut x = ops::lookup(self.words.weight.val(), ids);
        if let Some(table) = &self.types {
            x = x + ops::lookup(table.weight.val(), types);
        }
        if let Some(table) = &self.positions {
            x = x + ops::lookup(table.weight.val(), at.add_scalar(self.options.first_position as i32));
        }
        x
    }
}

impl Adaptable for Embeddings {}

impl Forward for Embeddings {
    /// # Panics
    /// If there are no positions, or an id, a position or a token type is not below the rows of its table.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let mut parts = x.into_parts().into_iter();
        let (ids, at, types) = (parts.next(), parts.next(), parts.next());
        let at = at.expect("an encoder expects ids and positions, found only ids").into_int::<2>();
        let ids = ids.expect("an encoder expects ids").into_int::<2>();
        let x = self.sums(ids, at.clone(), types.map(|types| types.into_int()));
        along(ops::dropout(self.norm.forward(x), self.options.dropout, pass.site(0)), Some(at))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.options.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens] = *inputs.first()?.as_slice() else { return None };
        let [_, width] = self.words.weight.lazy_shape().dims();
        Some((20 * batch * tokens * width * size_of::<f32>()) as u64)
    }
}
