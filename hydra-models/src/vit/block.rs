//! The transformer block: attention and a feed-forward network, each with a residual connection.

use super::VitConfig;
use crate::lora::{Adaptable, AdaptableMap, adapter_elements};
use crate::ops;
use crate::parts::{Activate, Linear, Norm, initial};
use burn::module::Module;
use burn::tensor::Tensor;
use hydra_core::{Activation, Forward, Init, Pass};

/// The query, key and value projections, each `[width, width]`.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// Projects to queries.
    pub query: Linear,
    /// Projects to keys.
    pub key: Linear,
    /// Projects to values.
    pub value: Linear,
}

/// A linear layer in a module of its own, as in Transformers.
#[derive(Module, Debug)]
pub struct DenseLayer {
    /// The linear layer.
    pub dense: Linear,
}

/// Attention and its output projection.
#[derive(Module, Debug)]
pub struct VitAttention {
    /// Query, key and value projections.
    pub attention: SelfAttention,
    /// The output projection, `[width, width]`.
    pub output: DenseLayer,
}

/// A pre-norm transformer block over `[items, patches, width]`. The last one computes nothing after attention but the class token,
/// which is all that the head reads: its output is `[items, 1, width]`.
#[derive(Module, Debug)]
pub struct VitBlock {
    /// Before attention.
    pub layernorm_before: Norm,
    /// Attention.
    pub attention: VitAttention,
    /// Before the feed-forward network.
    pub layernorm_after: Norm,
    /// The first layer of the feed-forward network, `[inner, width]`.
    pub intermediate: DenseLayer,
    /// The second layer of the feed-forward network, `[width, inner]`.
    pub output: DenseLayer,
    #[module(skip)]
    options: VitOptions,
}

#[derive(Clone, Debug)]
struct VitOptions {
    attention: ops::GroupedAttention,
    activate: Activate,
    /// The dropout probability before a residual is added.
    dropout: f64,
    deviation: f64,
    inner: usize,
    /// Whether it is the last block.
    is_last: bool,
}

impl VitOptions {
    fn new(config: &VitConfig, index: usize) -> Self {
        let heads = config.num_attention_heads;
        let attention = ops::GroupedAttention {
            heads,
            key_heads: heads,
            scale: 1.0 / ((config.hidden_size / heads) as f64).sqrt(),
            causal: false,
            window: None,
            rotary: None,
            dropout: config.attention_probs_dropout_prob,
            site: 0,
        };
        // Validation accepts only supported activations.
        let activate = Activate::named(&config.hidden_act).unwrap_or(Activate::Gelu);
        let (dropout, deviation) = (config.hidden_dropout_prob, config.initializer_range);
        let is_last = index + 1 == config.num_hidden_layers;
        Self { attention, activate, dropout, deviation, inner: config.intermediate_size, is_last }
    }
}

impl VitBlock {
    /// The block at `index`, without values.
    pub fn new(config: &VitConfig, index: usize) -> Self {
        let (width, inner, bias) = (config.hidden_size, config.intermediate_size, config.qkv_bias);
        let norm = || Norm::new(width, config.layer_norm_eps);
        let map = || Linear::new(width, width, bias);
        let dense = |inputs, outputs| DenseLayer { dense: Linear::new(inputs, outputs, true) };
        let attention = SelfAttention { query: map(), key: map(), value: map() };
        Self {
            layernorm_before: norm(),
            attention: VitAttention { attention, output: dense(width, width) },
            layernorm_after: norm(),
            intermediate: dense(width, inner),
            output: dense(inner, width),
            options: VitOptions::new(config, index),
        }
    }

    /// The output of attention before its projection.
    fn attend(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let SelfAttention { query, key, value } = &self.attention.attention;
        let [for_queries, for_keys, for_values] = ops::fork(x);
        let (queries, keys) = (query.forward(for_queries, pass), key.forward(for_keys, pass));
        let values = value.forward(for_values, pass);
        ops::grouped_attention(queries, keys, values, &self.options.attention, pass)
    }
}

impl Adaptable for VitBlock {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        let SelfAttention { query, key, value } = &mut self.attention.attention;
        vec![
            query.adaptable("attention.attention.query"),
            key.adaptable("attention.attention.key"),
            value.adaptable("attention.attention.value"),
            self.attention.output.dense.adaptable("attention.output.dense"),
            self.intermediate.dense.adaptable("intermediate.dense"),
            self.output.dense.adaptable("output.dense"),
        ]
    }
}

impl Forward for VitBlock {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let [residual, x] = ops::fork(x.into_float::<3>());
        let attended = self.attend(self.layernorm_before.forward(x), pass);
        let [residual, attended] = match self.options.is_last {
            true => [residual, attended].map(|x| x.narrow(1, 0, 1)),
            false => [residual, attended],
        };
        let (output, dropout) = (&self.attention.output.dense, self.options.dropout);
        let [residual, x] = ops::fork(output.dropped_onto(residual, attended, (1, dropout), pass));
        let inner = self.intermediate.dense.forward(self.layernorm_after.forward(x), pass);
        let inner = self.options.activate.forward(inner);
        Activation::of(self.output.dense.dropped_onto(residual, inner, (2, dropout), pass))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.options.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, patches, width] = *inputs.first()?.as_slice() else { return None };
        let vectors = items * patches * (32 * width + 8 * self.options.inner);
        let attention = ops::grouped_working_elements([items, patches, width], &self.options.attention);
        let adapters = items * patches * adapter_elements(self);
        Some(((vectors + attention + adapters) * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        Some(format!("{:?}, epsilon {}", self.options, self.layernorm_before.epsilon))
    }
}
