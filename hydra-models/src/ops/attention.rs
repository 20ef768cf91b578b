//! Causal self-attention over queries, keys and values that one map made.

use super::causal_softmax;
use burn::tensor::Tensor;
use hydra_core::Pass;

/// How attention is computed.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The number of heads; it divides the width.
    pub heads: usize,
    /// The factor on the scores.
    pub scale: f64,
    /// The probability with which an attention weight is dropped while training.
    pub dropout: f64,
    /// The pass's site for that dropout.
    pub site: u64,
}

/// Scaled dot-product attention (Vaswani et al., 2017) in which a token sees itself and what came before:
/// `qkv` of shape `[batch, tokens, 3 * width]` holds queries, keys and values side by side, the result has
/// shape `[batch, tokens, width]`.
pub fn causal_attention(qkv: Tensor<3>, options: Attention, pass: &Pass) -> Tensor<3> {
    let [batch, tokens, triple] = qkv.dims();
    let (width, heads) = (triple / 3, options.heads);
    let part = |i: usize| {
        let part = qkv.clone().narrow(2, i * width, width);
        part.reshape([batch, tokens, heads, width / heads]).swap_dims(1, 2)
    };
    // [batch, heads, query, key]
    let scores = part(0).matmul(part(1).swap_dims(2, 3));
    let weights = pass.dropout(causal_softmax(scores, options.scale), options.dropout, options.site);
    weights.matmul(part(2)).swap_dims(1, 2).reshape([batch, tokens, width])
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use hydra_core::Activation;

    fn attend(qkv: Tensor<3>, dropout: f64, pass: &Pass) -> Vec<f32> {
        values(&causal_attention(qkv, Attention { heads: 2, scale: 0.5, dropout, site: 0 }, pass))
    }

    fn pass() -> Pass {
        Pass::train(Pass::key_of(1, 2, 3), Activation::default())
    }

    #[test]
    fn a_token_does_not_see_what_comes_after() {
        let qkv = normal(1, [1, 6, 24]);
        let changed = Tensor::cat(vec![qkv.clone().narrow(1, 0, 4), normal(2, [1, 2, 24])], 1);
        let (a, b) = (attend(qkv, 0.0, &pass()), attend(changed, 0.0, &pass()));
        assert_eq!(a[..4 * 8], b[..4 * 8]);
        assert_ne!(a[4 * 8..], b[4 * 8..]);
    }

    #[test]
    fn the_first_token_takes_its_own_value() {
        let qkv = normal(1, [1, 3, 24]);
        let own = values(&qkv.clone().narrow(2, 16, 8).narrow(1, 0, 1));
        assert_eq!(attend(qkv, 0.0, &pass())[..8], own);
    }

    #[test]
    fn dropout_follows_the_pass() {
        let qkv = || normal(1, [2, 6, 24]);
        let dropped = attend(qkv(), 0.5, &pass());
        assert_eq!(dropped, attend(qkv(), 0.5, &pass()));
        assert_ne!(dropped, attend(qkv(), 0.0, &pass()));
        let evaluate = Pass::evaluate(Activation::default());
        assert_eq!(attend(qkv(), 0.5, &evaluate), attend(qkv(), 0.0, &pass()));
    }
}
