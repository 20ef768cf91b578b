//! The transformer block: attention and a feed-forward network, each with a residual connection.

use super::{EncoderConfig, Pooling};
use crate::lora::{Adaptable, AdaptableMap, adapter_elements};
use crate::ops::{self, GroupedAttention, Rotary, RotaryScaling};
use crate::parts::{Activate, Linear, Norm, Pooled, along, initial, with_positions};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// A transformer block over rows of several sequences `[batch, tokens, width]`, which do not attend to each other:
/// normalized after each residual is added, or (ModernBERT) before attention and the feed-forward network. Positions are
/// passed on.
///
/// Where the head reads the first token of each sequence, the last block computes nothing else after attention: its output is
/// `[1, sequences, width]`, without positions.
#[derive(Module, Debug)]
pub struct EncoderBlock {
    /// Project to queries, keys and values, `[width, width]` each, or to all of them, `[3 * width, width]`.
    pub projections: Vec<Linear>,
    /// Attention's output projection, `[width, width]`.
    pub output: Linear,
    /// Attention's normalization; the first block of ModernBERT has none.
    pub attention_norm: Option<Norm>,
    /// The first layer of the feed-forward network, `[inner, width]`, or `[2 * inner, width]` with gates.
    pub inner: Linear,
    /// The second layer of the feed-forward network, `[width, inner]`.
    pub outer: Linear,
    /// The normalization of the feed-forward network.
    pub outer_norm: Norm,
    #[module(skip)]
    options: EncoderOptions,
}

#[derive(Clone, Debug)]
struct EncoderOptions {
    attention: GroupedAttention,
    activate: Activate,
    /// Whether normalizations precede attention and the feed-forward network, whose hidden vectors are gated.
    modern: bool,
    /// The tokens that the last block computes after attention, where the head reads no others.
    ends_in: Option<Pooled>,
    /// The dropout probabilities of attention's output, of the hidden vectors and of the feed-forward network's output.
    dropouts: [f64; 3],
    /// The standard deviations of the initial weights of projections into the residual stream, and of the others.
    deviations: [f64; 2],
}

impl EncoderOptions {
    fn new(config: &EncoderConfig, index: usize) -> Self {
        let (heads, modern) = (config.num_attention_heads, config.modern.as_ref());
        let head_width = config.hidden_size / heads;
        let attention_dropout = config.attention_probs_dropout_prob;
        let rotary = modern.map(|modern| {
            let [global, local] = modern.thetas;
            let theta = if modern.window(index).is_some() { local } else { global };
            Rotary::new(head_width, theta, RotaryScaling::Default)
        });
        let attention = GroupedAttention {
            heads,
            key_heads: heads,
            scale: 1.0 / (head_width as f64).sqrt(),
            causal: false,
            window: modern.and_then(|modern| modern.window(index)),
            rotary,
            dropout: attention_dropout,
            site: 0,
        };
        let dropouts = match modern {
            Some(modern) => [attention_dropout, modern.mlp_dropout, 0.0],
            None => [config.hidden_dropout_prob, 0.0, config.hidden_dropout_prob],
        };
        Self {
            attention,
            // Validation accepts only supported activations.
            activate: Activate::named(&config.hidden_act).unwrap_or(Activate::Gelu),
            modern: modern.is_some(),
            ends_in: (index + 1 == config.num_hidden_layers && config.pooling() == Pooling::First)
                .then_some(Pooled::First),
            dropouts,
            deviations: [config.outward_deviation(), config.initializer_range],
        }
    }
}

impl EncoderBlock {
    /// The block at `index`, without values.
    pub fn new(config: &EncoderConfig, index: usize) -> Self {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let modern = config.modern.as_ref();
        let [attention_bias, mlp_bias] =
            modern.map_or([true; 2], |modern| [modern.attention_bias, modern.mlp_bias]);
        let map = || Linear::new(width, width, attention_bias);
        let (projections, gated) = match modern {
            Some(_) => (vec![Linear::new(width, 3 * width, attention_bias)], 2 * inner),
            None => (vec![map(), map(), map()], inner),
        };
        Self {
            projections,
            output: map(),
            attention_norm: (modern.is_none() || index > 0).then(|| config.norm()),
            inner: Linear::new(width, gated, mlp_bias),
            outer: Linear::new(inner, width, mlp_bias),
            outer_norm: config.norm(),
            options: EncoderOptions::new(config, index),
        }
    }

    /// The output of attention before its projection.
    fn attend(&self, x: Tensor<3>, positions: Tensor<2, Int>, pass: &Pass) -> Tensor<3> {
        let [queries, keys, values] = match self.projections.as_slice() {
            [query, key, value] => {
                let [for_queries, for_keys, for_values] = ops::fork(x);
                let queries = query.forward(for_queries, pass);
                [queries, key.forward(for_keys, pass), value.forward(for_values, pass)]
            }
            all => all.iter().fold(x, |x, map| map.forward(x, pass)).chunk(3, 2).try_into().unwrap_or_else(
                |parts: Vec<_>| panic!("expected queries, keys and values, found {} parts", parts.len()),
            ),
        };
        ops::grouped_attention_within(queries, keys, values, positions, &self.options.attention, pass)
    }

    /// The hidden vectors of the feed-forward network.
    fn hidden(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let (x, activate) = (self.inner.forward(x, pass), self.options.activate);
        if !self.options.modern {
            return activate.forward(x);
        }
        let inner = x.dims()[2] / 2;
        let gates = x.clone().narrow(2, inner, inner);
        let hidden = activate.forward(x.narrow(2, 0, inner)) * gates;
        ops::dropout(hidden, self.options.dropouts[1], pass.site(2))
    }
}

impl Adaptable for EncoderBlock {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        let Self { projections, output, inner, outer, .. } = self;
        let names = ["projections.0", "projections.1", "projections.2"];
        let projections = projections.iter_mut().zip(names).map(|(map, name)| map.adaptable(name));
        let others = [output.adaptable("output"), inner.adaptable("inner"), outer.adaptable("outer")];
        projections.chain(others).collect()
    }
}

impl Forward for EncoderBlock {
    /// # Panics
    /// If there are no positions, or the targets do not hold the sequences whose first tokens it computes.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let (x, at) = with_positions(x);
        let at = at.expect("an encoder's block expects positions");
        let normed = |norm: Option<&Norm>, x, here: bool| Norm::optional(norm.filter(|_| here), x);
        let (before, after) = (self.options.modern, !self.options.modern);
        let (attention, outer) = (self.attention_norm.as_ref(), Some(&self.outer_norm));
        let [residual, x] = ops::fork(x.into_float::<3>());
        let attended = self.attend(normed(attention, x, before), at.clone(), pass);
        let ([residual, attended], at) =
            Pooled::after_attention(self.options.ends_in, [residual, attended], Some(at), pass);
        let [output_dropout, _, outer_dropout] = self.options.dropouts;
        let x = self.output.dropped_onto(residual, attended, (1, output_dropout), pass);
        let x = normed(attention, x, after);
        let [residual, x] = ops::fork(x);
        let hidden = self.hidden(normed(outer, x, before), pass);
        let x = self.outer.dropped_onto(residual, hidden, (3, outer_dropout), pass);
        along(normed(outer, x, after), at)
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        let [outward, inward] = self.options.deviations;
        let is_outward = ["output.weight", "outer.weight"].contains(&name);
        initial(name, shape, if is_outward { outward } else { inward })
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [inner, _] = self.inner.weight.lazy_shape().dims();
        let vectors = batch * tokens * (40 * width + 8 * inner);
        let attention = ops::grouped_working_elements([batch, tokens, width], &self.options.attention);
        let adapters = batch * tokens * adapter_elements(self);
        Some(((vectors + attention + adapters) * size_of::<f32>()) as u64)
    }

    fn reads_targets(&self) -> bool {
        self.options.ends_in.is_some()
    }

    fn cost_key(&self) -> Option<String> {
        Some(format!("{:?}, epsilon {}", self.options, self.outer_norm.epsilon))
    }
}
