//! What the layers of a model that generates read besides hidden states.

use crate::ops::{self, Form};
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Pass};

/// The maximum number of tokens of one sequence in a row whose products are computed by row. Packing a weight for more is worth its
/// time.
const BY_ROW: usize = 64;

/// The maximum number of sequences in one row.
pub(crate) const SEQUENCES: usize = 256;

/// The slot of each token's sequence in the key-value cache, `[1, tokens]`: part 0 of the pass's targets. It is negative in
/// pilot passes.
pub(crate) fn slots(pass: &Pass) -> Tensor<2, Int> {
    pass.targets().part(0).into_int()
}

/// The pass for a row of tokens `[1, tokens, width]`: the next tokens of one sequence's prompt, or one token of each of several
/// sequences, whose bits must not depend on each other.
pub(crate) fn generating(pass: &Pass, x: &Tensor<3>) -> Pass {
    let [_, tokens, _] = x.dims();
    let [_, sequences] = lasts(pass).dims();
    if tokens > BY_ROW && sequences < tokens { pass.clone() } else { pass.clone().by_row() }
}

/// The places of the last tokens of sequences in the row, `[1, sequences]`: part 1 of the pass's targets.
fn lasts(pass: &Pass) -> Tensor<2, Int> {
    pass.targets().part(1).into_int()
}

/// The vectors `[1, sequences, width]` of the last token of each sequence.
pub(crate) fn last_tokens(x: Tensor<3>, pass: &Pass) -> Tensor<3> {
    let [_, tokens, width] = x.dims();
    let lasts = lasts(pass);
    let [_, sequences] = lasts.dims();
    x.reshape([tokens, width]).select(0, lasts.reshape([sequences])).unsqueeze_dim(0)
}

/// The logits `[sequences, vocabulary]` of normalized vectors `[1, sequences, width]` for a table `[vocabulary, width]`.
pub(crate) fn next_logits(x: Tensor<3>, table: Tensor<2>) -> Activation {
    Activation::of(ops::linear_by_row(x, table, Form::OutIn).squeeze_dim::<2>(0))
}
