//! The transformer block: attention and a feed-forward network, each with a residual connection.

use super::DecoderConfig;
use crate::lora::{Adaptable, AdaptableMap, adapter_elements, is_quantized};
use crate::ops;
use crate::parts::{Linear, Norm, Pooled, along, generating, initial, slots, with_positions};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// The linear layers of self-attention.
#[derive(Module, Debug)]
pub struct Attention {
    /// Projects to queries, `[heads * head width, width]`.
    pub q_proj: Linear,
    /// Projects to keys, `[key heads * head width, width]`.
    pub k_proj: Linear,
    /// Projects to values, likewise.
    pub v_proj: Linear,
    /// The output projection, `[width, heads * head width]`.
    pub o_proj: Linear,
    /// Normalizes each head's queries, if the model has it.
    pub q_norm: Option<Norm>,
    /// Normalizes each head's keys, likewise.
    pub k_norm: Option<Norm>,
}

/// The gated feed-forward network.
#[derive(Module, Debug)]
pub struct Mlp {
    /// The gate projection, `[inner, width]`.
    pub gate_proj: Linear,
    /// The up projection, `[inner, width]`.
    pub up_proj: Linear,
    /// The down projection, `[width, inner]`.
    pub down_proj: Linear,
}

/// A pre-norm transformer block over `[batch, tokens, width]`. Positions are passed on.
///
/// The last block of a classifier computes nothing after attention but the last token of each sequence: its output is
/// `[1, sequences, width]`.
#[derive(Module, Debug)]
pub struct DecoderBlock {
    /// Before attention.
    pub input_layernorm: Norm,
    /// Attention.
    pub self_attn: Attention,
    /// Before the feed-forward network.
    pub post_attention_layernorm: Norm,
    /// The feed-forward network.
    pub mlp: Mlp,
    #[module(skip)]
    options: DecoderOptions,
}

#[derive(Clone, Debug)]
struct DecoderOptions {
    attention: ops::GroupedAttention,
    /// The block's part of the cache of a model that generates.
    cache: Option<ops::BlockCache>,
    /// The tokens that the last block of a classifier computes after attention.
    ends_in: Option<Pooled>,
    /// The standard deviation of initial weights.
    deviation: f64,
    inner: usize,
}

impl DecoderOptions {
    fn new(config: &DecoderConfig, index: usize) -> Self {
        let attention = ops::GroupedAttention {
            heads: config.num_attention_heads,
            key_heads: config.num_key_value_heads,
            scale: 1.0 / (config.head_dim as f64).sqrt(),
            causal: true,
            window: config.window(index),
            rotary: Some(config.rotary()),
            dropout: config.attention_dropout,
            site: 0,
        };
        Self {
            attention,
            cache: config.head.cache.as_ref().map(|cache| cache.block(index)),
            ends_in: (index + 1 == config.num_hidden_layers && config.head.is_classifier())
                .then_some(Pooled::Last),
            deviation: config.initializer_range,
            inner: config.intermediate_size,
        }
    }
}

impl Attention {
    fn new(config: &DecoderConfig) -> Self {
        let (width, head) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.num_attention_heads * head, config.num_key_value_heads * head);
        let (bias, norms) = (config.has_qkv_bias(), config.has_head_norms());
        let norm = || norms.then(|| Norm::rms(head, config.rms_norm_eps));
        Self {
            q_proj: Linear::new(width, queries, bias),
            k_proj: Linear::new(width, keys, bias),
            v_proj: Linear::new(width, keys, bias),
            o_proj: Linear::new(queries, width, config.has_output_bias()),
            q_norm: norm(),
            k_norm: norm(),
        }
    }

    /// The output of attention before its projection.
    fn attend(
        &self,
        x: Tensor<3>,
        positions: Option<Tensor<2, Int>>,
        options: &DecoderOptions,
        pass: &Pass,
    ) -> Tensor<3> {
        let attention = &options.attention;
        let [for_queries, for_keys, for_values] = ops::fork(x);
        let queries = Norm::optional(self.q_norm.as_ref(), self.q_proj.forward(for_queries, pass));
        let keys = Norm::optional(self.k_norm.as_ref(), self.k_proj.forward(for_keys, pass));
        let values = self.v_proj.forward(for_values, pass);
        match positions {
            Some(at) if let Some(cache) = &options.cache => {
                ops::cached_attention([queries, keys, values], at, slots(pass), attention, cache)
            }
            Some(at) => ops::grouped_attention_within(queries, keys, values, at, attention, pass),
            None => ops::grouped_attention(queries, keys, values, attention, pass),
        }
    }
}

impl Mlp {
    fn new(config: &DecoderConfig) -> Self {
        let (width, inner, bias) = (config.hidden_size, config.intermediate_size, config.has_mlp_bias());
        Self {
            gate_proj: Linear::new(width, inner, bias),
            up_proj: Linear::new(width, inner, bias),
            down_proj: Linear::new(inner, width, bias),
        }
    }

    /// The hidden vectors of the feed-forward network.
    fn inner(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let [x, gated] = ops::fork(x);
        ops::swiglu(self.gate_proj.forward(gated, pass), self.up_proj.forward(x, pass))
    }
}

impl DecoderBlock {
    /// The block at `index`, without values.
    pub fn new(config: &DecoderConfig, index: usize) -> Self {
        let norm = || Norm::rms(config.hidden_size, config.rms_norm_eps);
        Self {
            input_layernorm: norm(),
            self_attn: Attention::new(config),
            post_attention_layernorm: norm(),
            mlp: Mlp::new(config),
            options: DecoderOptions::new(config, index),
        }
    }
}

impl Adaptable for DecoderBlock {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        let Attention { q_proj, k_proj, v_proj, o_proj, .. } = &mut self.self_attn;
        let Mlp { gate_proj, up_proj, down_proj } = &mut self.mlp;
        vec![
            q_proj.adaptable("self_attn.q_proj"),
            k_proj.adaptable("self_attn.k_proj"),
            v_proj.adaptable("self_attn.v_proj"),
            o_proj.adaptable("self_attn.o_proj"),
            gate_proj.adaptable("mlp.gate_proj"),
            up_proj.adaptable("mlp.up_proj"),
            down_proj.adaptable("mlp.down_proj"),
        ]
    }
}

impl Forward for DecoderBlock {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let (x, at) = with_positions(x);
        let (x, options) = (x.into_float::<3>(), &self.options);
        let pass = &if options.cache.is_some() { generating(pass, &x) } else { pass.clone() };
        let [residual, x] = ops::fork(x);
        let attended = self.self_attn.attend(self.input_layernorm.forward(x), at.clone(), options, pass);
        let ([residual, attended], at) =
            Pooled::after_attention(options.ends_in, [residual, attended], at, pass);
        let [residual, x] = ops::fork(self.self_attn.o_proj.forward_onto(residual, attended, pass));
        let inner = self.mlp.inner(self.post_attention_layernorm.forward(x), pass);
        along(self.mlp.down_proj.forward_onto(residual, inner, pass), at)
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.options.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [queries, _] = self.self_attn.q_proj.weight.lazy_shape().dims();
        let vectors = batch * tokens * (12 * width + 12 * queries + 8 * self.options.inner);
        let attention = ops::grouped_working_elements([batch, tokens, queries], &self.options.attention);
        let adapters = batch * tokens * adapter_elements(self);
        Some(((vectors + attention + adapters) * size_of::<f32>()) as u64)
    }

    fn is_quantized(&self, name: &str) -> bool {
        is_quantized(self, name)
    }

    fn reads_targets(&self) -> bool {
        self.options.cache.is_some() || self.options.ends_in.is_some()
    }

    fn cost_key(&self) -> Option<String> {
        let DecoderOptions { attention, cache, ends_in, deviation, inner } = &self.options;
        Some(format!(
            "{attention:?}, cache {:?}, {ends_in:?}, {deviation} {inner}, epsilon {}, quantized {}",
            cache.as_ref().map(ops::BlockCache::form),
            self.input_layernorm.epsilon,
            is_quantized(self, "mlp.up_proj.weight")
        ))
    }
}
