//! Where the sequences of a batch in one row are: what the last block of a text classifier, or its head, reads besides hidden states.

use burn::tensor::{Int, Tensor};
use hydra_core::Pass;

/// The token of each sequence that a text classifier's head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pooled {
    /// The first one.
    First,
    /// The last one that is not the padding token.
    Last,
}

impl Pooled {
    /// The rows of these tokens, `[1, sequences, width]`, of `x`, `[1, tokens, width]`.
    ///
    /// # Panics
    /// If `x` has several rows, or the targets do not hold the sequences.
    fn rows(self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let Sequences { firsts, lasts, .. } = Sequences::of(pass);
        let at = if self == Self::First { firsts } else { lasts };
        Sequences::rows(x, at).unsqueeze_dim(0)
    }

    /// The residual, attention's output and the positions, with which a block goes on after attention: those of all tokens, or, without
    /// positions, those of the tokens that the head reads (`this`).
    pub fn after_attention(
        this: Option<Self>,
        [residual, attended]: [Tensor<3>; 2],
        positions: Option<Tensor<2, Int>>,
        pass: &Pass,
    ) -> ([Tensor<3>; 2], Option<Tensor<2, Int>>) {
        match this {
            Some(pooled) => ([residual, attended].map(|x| pooled.rows(x, pass)), None),
            None => ([residual, attended], positions),
        }
    }
}

/// The positions of a batch's sequences in its one row of tokens. A dataset puts them after the labels: parts 1 to 3 of the
/// pass's targets, integers `[items]` each, or `[items, sequences of an item]`.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// The position of the first token of each sequence.
    pub firsts: Tensor<1, Int>,
    /// The number of tokens of each sequence.
    pub lengths: Tensor<1, Int>,
    /// The position of the last token of each sequence that is not the padding token; of the first token if all are.
    pub lasts: Tensor<1, Int>,
}

impl Sequences {
    /// The sequences of a pass's batch.
    ///
    /// # Panics
    /// If the targets do not hold them.
    pub fn of(pass: &Pass) -> Self {
        let part = |index| {
            let part = pass.targets().part(index);
            match *part.shape() {
                [items, each] => part.into_int::<2>().reshape([items * each]),
                _ => part.into_int(),
            }
        };
        Self { firsts: part(1), lengths: part(2), lasts: part(3) }
    }

    /// The rows `[items, width]` of `x`, `[1, tokens, width]`, at these positions `[items]`.
    pub fn rows(x: Tensor<3>, at: Tensor<1, Int>) -> Tensor<2> {
        let [batch, tokens, width] = x.dims();
        assert!(batch == 1, "expected one row of tokens, found {batch}");
        x.reshape([tokens, width]).select(0, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{gradient, normal, values};
    use burn::tensor::Device;
    use hydra_core::Activation;

    #[test]
    fn rows_and_their_gradients_are_those_at_the_positions() {
        let device = Device::flex().autodiff();
        let ints = |values: [i32; 2]| Tensor::<1, Int>::from_data(values, &device);
        let targets = Activation::of(ints([0, 1])).and(ints([0, 3])).and(ints([3, 2])).and(ints([1, 4]));
        let Sequences { firsts, lasts, .. } = Sequences::of(&Pass::evaluate(targets));
        let x = normal::<3>(1, [1, 5, 2]).require_grad();
        let all = values(&x);
        assert_eq!(values(&Sequences::rows(x.clone(), firsts)), [&all[0..2], &all[6..8]].concat());
        let last = Sequences::rows(x.clone(), lasts);
        assert_eq!(values(&last), [&all[2..4], &all[8..10]].concat());
        let slopes = gradient(&x, &last.sum().backward());
        assert_eq!(slopes, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
    }
}
