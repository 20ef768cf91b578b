//! Inputs and targets of language models.

use crate::ops;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, AnyTensor, Pass};

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

/// The target of each token in `[batch, tokens]`, in order, of a pass for vectors of this shape.
///
/// # Panics
/// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
#[track_caller]
pub(crate) fn targets(pass: &Pass, [batch, tokens]: [usize; 2]) -> Tensor<1, Int> {
    let ids = pass.targets().part(0).into_int::<2>();
    assert!(
        ids.dims() == [batch, tokens] && tokens > 1,
        "expected targets of shape {:?} with at least two tokens, found {:?}",
        [batch, tokens],
        ids.dims()
    );
    next_tokens(ids)
}

/// The output of a language model's head for normalized vectors `[batch, tokens, width]` and the head's table: the mean
/// loss `[1]`; or, if the targets have [`Segments`], the log-probability of each segment.
#[track_caller]
pub(crate) fn language_model(
    hidden: Tensor<3>,
    table: Tensor<2>,
    chunk_rows: usize,
    pass: &Pass,
) -> Activation {
    let [batch, tokens, width] = hidden.dims();
    let (hidden, targets) = (hidden.reshape([batch * tokens, width]), targets(pass, [batch, tokens]));
    match Segments::of(pass) {
        None => Activation::of(ops::head_loss(hidden, table, targets, chunk_rows, pass)),
        Some(segments) => {
            let losses = ops::token_losses(hidden, table, targets, chunk_rows, pass);
            Activation::of(segments.log_probabilities(losses))
        }
    }
}

/// The parts of a batch's sequences whose log-probabilities are wanted: parts 1 and 2 of the pass's targets.
#[derive(Clone, Debug)]
pub(crate) struct Segments {
    /// The segment of each token, counted from 0, `[batch, tokens]`; negative for tokens of none.
    pub of_tokens: Tensor<2, Int>,
    /// The number of loss targets of each segment, `F32` of shape `[items, segments of an item]`.
    pub lengths: Tensor<2>,
}

impl Segments {
    /// The segments of a pass, if its targets have them.
    pub fn of(pass: &Pass) -> Option<Self> {
        (pass.targets().parts().len() > 1).then(|| Self {
            of_tokens: pass.targets().part(1).into_int(),
            lengths: pass.targets().part(2).into_float(),
        })
    }

    /// The sums of log-probabilities, `F32` of shape `[items, segments of an item]`, given the cross-entropy of each
    /// position.
    pub fn log_probabilities(self, losses: Tensor<1>) -> Tensor<2> {
        let [items, each] = self.lengths.dims();
        let sums = ops::segment_sums(losses, next_tokens(self.of_tokens), items * each);
        sums.neg().reshape([items, each])
    }
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
