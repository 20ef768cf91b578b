//! Inputs and targets of language models.

use crate::ops;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, AnyTensor};

/// Splits an activation into its first tensor `[batch, tokens, ..]` and, if rows hold several examples, each token's
/// position in its example `[batch, tokens]`, which is passed on from layer to layer.
#[track_caller]
pub(crate) fn with_positions(x: Activation) -> (AnyTensor, Option<Tensor<2, Int>>) {
    let mut parts = x.into_parts();
    let found = parts.len();
    assert!(
        (1..=2).contains(&found),
        "expected an activation of one tensor and optional positions, found {found} tensors"
    );
    let positions = parts.split_off(1).pop();
    (parts.remove(0), positions.map(AnyTensor::into_int))
}

/// Checks that rows of ids `[batch, tokens]` are no longer than the model's positions, unless rows hold several
/// examples.
#[track_caller]
pub(crate) fn check_length(ids: &Tensor<2, Int>, several: bool, positions: usize) {
    let [_, tokens] = ids.dims();
    assert!(
        several || tokens <= positions,
        "a sequence of {tokens} tokens is longer than the model's {positions} positions: use a shorter context"
    );
}

/// The inverse of [`with_positions`].
pub(crate) fn along(x: impl Into<AnyTensor>, positions: Option<Tensor<2, Int>>) -> Activation {
    let x = Activation::of(x);
    match positions {
        Some(positions) => x.and(positions),
        None => x,
    }
}

/// The target of each token in `[batch, tokens]`, in order: the next token, and none at the end of a sequence.
pub(crate) fn next_tokens(ids: Tensor<2, Int>) -> Tensor<1, Int> {
    let [batch, tokens] = ids.dims();
    let next = ids.clone().narrow(1, 1, tokens - 1);
    let none = ids.narrow(1, 0, 1).full_like(ops::IGNORED);
    Tensor::cat(vec![next, none], 1).reshape([batch * tokens])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use hydra_core::{AnyTensor, HostTensor};

    #[test]
    fn a_token_predicts_the_next_and_the_last_nothing() {
        let ids = HostTensor::int(vec![1, 2, 3, 4, 5, 6], [2, 3]).to_device(&Device::flex().autodiff());
        let targets = AnyTensor::from(next_tokens(ids.into_int())).into_host();
        assert_eq!(targets.as_i32(), [2, 3, -1, 5, 6, -1]);
    }
}
