//! The transformer block: attention and a feed-forward network, each with a residual connection.

use super::{Gpt2Config, Linear, Norm};
use crate::lora::{Adaptable, AdaptableMap, adapter_elements, is_quantized};
use crate::ops;
use crate::parts::{Activate, Pooled, along, generating, initial, slots, with_positions};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// The linear layers of self-attention.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// Projects to queries, keys and values, `[width, 3 * width]`.
    pub c_attn: Linear,
    /// The output projection, `[width, width]`.
    pub c_proj: Linear,
}

/// The feed-forward network.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[width, inner]`.
    pub c_fc: Linear,
    /// `[inner, width]`.
    pub c_proj: Linear,
}

/// A pre-norm transformer block over `[batch, tokens, width]`. Positions are passed on.
///
/// The last block of a classifier computes nothing after attention but the last token of each sequence: its output is
/// `[1, sequences, width]`.
#[derive(Module, Debug)]
pub struct Gpt2Block {
    /// Before attention.
    pub ln_1: Norm,
    /// Attention.
    pub attn: SelfAttention,
    /// Before the feed-forward network.
    pub ln_2: Norm,
    /// The feed-forward network.
    pub mlp: Mlp,
    #[module(skip)]
    options: Gpt2Options,
}

#[derive(Clone, Debug)]
struct Gpt2Options {
    /// The block's part of the cache of a model that generates.
    cache: Option<ops::BlockCache>,
    /// The tokens that the last block of a classifier computes after attention.
    ends_in: Option<Pooled>,
    heads: usize,
    scale: f64,
    attention_dropout: f64,
    residual_dropout: f64,
    activate: Activate,
    deviation: f64,
    /// The standard deviation of the initial weights of projections into the residual stream.
    projection_deviation: f64,
}

impl Gpt2Options {
    fn new(config: &Gpt2Config, index: usize) -> Self {
        // Validation accepts only supported activations.
        let activate = Activate::named(&config.activation_function).unwrap_or(Activate::GeluTanh);
        Self {
            cache: config.head.cache.as_ref().map(|cache| cache.block(index)),
            ends_in: (index + 1 == config.n_layer && config.head.is_classifier()).then_some(Pooled::Last),
            heads: config.n_head,
            scale: config.attention_scale(index),
            attention_dropout: config.attn_pdrop,
            residual_dropout: config.resid_pdrop,
            activate,
            deviation: config.initializer_range,
            projection_deviation: config.initializer_range / (2.0 * config.n_layer as f64).sqrt(),
        }
    }
}

impl Gpt2Block {
    /// The block at `index`, without values.
    pub fn new(config: &Gpt2Config, index: usize) -> Self {
        let (width, inner, epsilon) = (config.n_embd, config.inner(), config.layer_norm_epsilon);
        Self {
            ln_1: Norm::new(width, epsilon),
            attn: SelfAttention {
                c_attn: Linear::conv1d(width, 3 * width),
                c_proj: Linear::conv1d(width, width),
            },
            ln_2: Norm::new(width, epsilon),
            mlp: Mlp { c_fc: Linear::conv1d(width, inner), c_proj: Linear::conv1d(inner, width) },
            options: Gpt2Options::new(config, index),
        }
    }

    /// The output of attention before its projection.
    fn attend(&self, x: Tensor<3>, positions: Option<Tensor<2, Int>>, pass: &Pass) -> Tensor<3> {
        let Gpt2Options { heads, scale, attention_dropout, .. } = self.options;
        let attention = ops::Attention { heads, scale, dropout: attention_dropout, site: 0 };
        let qkv = self.attn.c_attn.forward(x, pass);
        match positions {
            Some(positions) if let Some(cache) = &self.options.cache => {
                let width = qkv.dims()[2] / 3;
                let parts = [0, 1, 2].map(|part| qkv.clone().narrow(2, part * width, width));
                ops::cached_attention(parts, positions, slots(pass), &grouped(heads, scale), cache)
            }
            Some(positions) => ops::causal_attention_within(qkv, positions, attention, pass),
            None => ops::causal_attention(qkv, attention, pass),
        }
    }

    /// The hidden vectors of the feed-forward network.
    fn inner(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let x = self.mlp.c_fc.forward(x, pass);
        self.options.activate.forward(x)
    }
}

/// The attention of these heads over separate queries, keys and values.
fn grouped(heads: usize, scale: f64) -> ops::GroupedAttention {
    ops::GroupedAttention {
        heads,
        key_heads: heads,
        scale,
        causal: true,
        window: None,
        rotary: None,
        dropout: 0.0,
        site: 0,
    }
}

impl Adaptable for Gpt2Block {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        let (SelfAttention { c_attn, c_proj }, mlp) = (&mut self.attn, &mut self.mlp);
        vec![
            c_attn.adaptable("attn.c_attn"),
            c_proj.adaptable("attn.c_proj"),
            mlp.c_fc.adaptable("mlp.c_fc"),
            mlp.c_proj.adaptable("mlp.c_proj"),
        ]
    }
}

impl Forward for Gpt2Block {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let (x, at) = with_positions(x);
        let x = x.into_float::<3>();
        let pass = &if self.options.cache.is_some() { generating(pass, &x) } else { pass.clone() };
        let [residual, x] = ops::fork(x);
        let inner = self.attend(self.ln_1.forward(x), at.clone(), pass);
        let dropout = self.options.residual_dropout;
        let ([residual, inner], at) =
            Pooled::after_attention(self.options.ends_in, [residual, inner], at, pass);
        let [residual, x] = ops::fork(self.attn.c_proj.dropped_onto(residual, inner, (1, dropout), pass));
        let inner = self.inner(self.ln_2.forward(x), pass);
        along(self.mlp.c_proj.dropped_onto(residual, inner, (2, dropout), pass), at)
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        let Gpt2Options { deviation, projection_deviation, .. } = self.options;
        let is_projection = name.ends_with("c_proj.weight");
        initial(name, shape, if is_projection { projection_deviation } else { deviation })
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let inner = self.mlp.c_fc.outputs();
        let vectors = batch * tokens * (32 * width + 8 * inner);
        let attention = ops::attention_working_elements([batch, tokens, width], self.options.heads);
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
        let cache = self.options.cache.as_ref().map(ops::BlockCache::form);
        let options = Gpt2Options { cache: None, ..self.options.clone() };
        Some(format!("{options:?}, cache {cache:?}, epsilon {} {}", self.ln_1.epsilon, self.ln_2.epsilon))
    }
}
