//! The layer between: attention and a network for each token, each with a residual.

use super::{Affine, Gpt2Config, Norm};
use crate::ops;
use burn::module::Module;
use burn::tensor::{Tensor, activation};
use hydra_core::{Activation, Forward, Init, Pass};

/// The maps of self-attention.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// To queries, keys and values, `[width, 3 * width]`.
    pub c_attn: Affine,
    /// Back, `[width, width]`.
    pub c_proj: Affine,
}

/// The maps of the network.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[width, inner]`.
    pub c_fc: Affine,
    /// `[inner, width]`.
    pub c_proj: Affine,
}

/// What stands between the network's maps.
#[derive(Clone, Copy, Debug)]
enum Activate {
    GeluTanh,
    Gelu,
    Relu,
}

/// A transformer block, pre-normalized: `[batch, tokens, width]` stays that.
#[derive(Module, Debug)]
pub struct Block {
    /// Before attention.
    pub ln_1: Norm,
    /// Attention.
    pub attn: SelfAttention,
    /// Before the network.
    pub ln_2: Norm,
    /// The network.
    pub mlp: Mlp,
    #[module(skip)]
    options: Options,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    heads: usize,
    scale: f64,
    attention_dropout: f64,
    residual_dropout: f64,
    activate: Activate,
    deviation: f64,
    /// The standard deviation of what adds to the residual.
    projection_deviation: f64,
}

impl Options {
    fn new(config: &Gpt2Config, index: usize) -> Self {
        let activate = match config.activation_function.as_str() {
            "gelu" => Activate::Gelu,
            "relu" => Activate::Relu,
            // The configuration's validation lets no other through.
            _ => Activate::GeluTanh,
        };
        Self {
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

impl Block {
    /// The block at `index`, without values.
    pub fn new(config: &Gpt2Config, index: usize) -> Self {
        let (width, inner, epsilon) = (config.n_embd, config.inner(), config.layer_norm_epsilon);
        Self {
            ln_1: Norm::new(width, epsilon),
            attn: SelfAttention { c_attn: Affine::new(width, 3 * width), c_proj: Affine::new(width, width) },
            ln_2: Norm::new(width, epsilon),
            mlp: Mlp { c_fc: Affine::new(width, inner), c_proj: Affine::new(inner, width) },
            options: Options::new(config, index),
        }
    }

    fn attention(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let Options { heads, scale, attention_dropout, residual_dropout, .. } = self.options;
        let attention = ops::Attention { heads, scale, dropout: attention_dropout, site: 0 };
        let x = ops::causal_attention(self.attn.c_attn.forward(x), attention, pass);
        pass.dropout(self.attn.c_proj.forward(x), residual_dropout, 1)
    }

    fn network(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let x = self.mlp.c_fc.forward(x);
        let x = match self.options.activate {
            Activate::GeluTanh => ops::gelu_tanh(x),
            Activate::Gelu => activation::gelu(x),
            Activate::Relu => activation::relu(x),
        };
        pass.dropout(self.mlp.c_proj.forward(x), self.options.residual_dropout, 2)
    }
}

impl Forward for Block {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let x = x.into_float::<3>();
        let x = x.clone() + self.attention(self.ln_1.forward(x), pass);
        let x = x.clone() + self.network(self.ln_2.forward(x), pass);
        Activation::of(x)
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        match name {
            _ if name.ends_with("bias") => Init::Zeros,
            _ if name.starts_with("ln_") => Init::Ones,
            _ if name.ends_with("c_proj.weight") => Init::Normal(self.options.projection_deviation),
            _ => Init::Normal(self.options.deviation),
        }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let inner = self.mlp.c_fc.bias.lazy_shape()[0];
        let vectors = batch * tokens * (32 * width + 8 * inner);
        let scores = 8 * batch * self.options.heads * tokens * tokens;
        Some(((vectors + scores) * size_of::<f32>()) as u64)
    }
}
