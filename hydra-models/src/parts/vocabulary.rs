//! Split vocabulary tables: layers that hold some rows of a table each, so that no layer is too large for a device.
//!
//! The embedding sums its parts' vectors for each token; all parts but one contribute zero. The head carries two values
//! from part to part: the log-sum-exp of the logits so far, and the logit of the target token once its part has
//! computed it. The loss is the mean of their difference (the online normalizer of Milakov and Gimelshein, "Online
//! normalizer calculation for softmax", arXiv 1805.02867, over parts instead of elements). Parts are in row order, so
//! the result does not depend on which of them share a shard. Its last bits do depend on the number of parts.

use super::{Segments, check_length, targets};
use crate::ops;
use burn::tensor::{Bool, FloatDType, Int, Tensor};
use hydra_core::{Activation, AnyTensor, Pass};
use std::ops::Range;

/// The position of a part in its table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The first token that it has a row for.
    first: usize,
    /// Whether it has the table's first rows; `ends`: its last rows.
    pub begins: bool,
    pub ends: bool,
}

/// The output of an embedding's parts so far.
pub(crate) struct Known {
    /// The vectors, `[batch, tokens, width]`.
    pub sum: Tensor<3>,
    /// The ids, `[batch, tokens]`.
    pub ids: Tensor<2, Int>,
    /// Tensors that are passed on.
    pub rest: Vec<AnyTensor>,
}

impl Place {
    /// The position of these rows in a table of `vocabulary` rows.
    pub fn of(rows: &Range<usize>, vocabulary: usize) -> Self {
        Self { first: rows.start, begins: rows.start == 0, ends: rows.end == vocabulary }
    }

    /// Whether it has the whole table.
    pub fn is_whole(self) -> bool {
        self.begins && self.ends
    }

    /// Adds the vectors of this part's tokens, for ids `[batch, tokens]`, to the sum `[batch, tokens, width]` of
    /// earlier parts, which precedes the ids unless this is the first part. `limits` are the vocabulary size and the
    /// longest sequence in tokens.
    ///
    /// # Panics
    /// If a row of a single example has more tokens than there are positions, or an id is not below the vocabulary
    /// size.
    #[track_caller]
    pub fn look_up(self, x: Activation, table: Tensor<2>, limits: [usize; 2]) -> Known {
        let mut parts = x.into_parts();
        let before = (!self.begins).then(|| parts.remove(0).into_float::<3>());
        let ids = parts.remove(0).into_int::<2>();
        if self.begins {
            // Remaining tensors are positions within examples, if rows hold several.
            check(&ids, !parts.is_empty(), limits);
        }
        let ([batch, tokens], [rows, width]) = (ids.dims(), table.dims());
        let (local, others) = own(ids.clone(), self.first, rows);
        let others = others.reshape([batch, tokens, 1]).expand([batch, tokens, width]);
        let found = ops::lookup(table, local).mask_fill(others, 0.0);
        let sum = match before {
            Some(before) => before + found,
            None => found,
        };
        Known { sum, ids, rest: parts }
    }

    /// Computes a part of the head from normalized vectors `[batch, tokens, width]` and the values of earlier parts.
    /// Returns the vectors, the log-sum-exp of the logits so far and the target's logit, each `[batch * tokens]` and
    /// `F32`; or, for the last part, the mean loss over the `batch * (tokens - 1)` predicted tokens, or fewer if
    /// targets are [ignored](ops::IGNORED), or the log-probabilities of the targets' [`Segments`].
    ///
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    #[track_caller]
    pub fn predict(
        self,
        hidden: Tensor<3>,
        before: Vec<AnyTensor>,
        table: Tensor<2>,
        pass: &Pass,
    ) -> Activation {
        let [batch, tokens, _] = hidden.dims();
        let targets = targets(pass, [batch, tokens]);
        let [mut total, mut said] = self.logits(hidden.clone(), table, targets.clone());
        let mut before = before.into_iter().map(AnyTensor::into_float::<1>);
        if let (Some(total_before), Some(said_before)) = (before.next(), before.next()) {
            (total, said) = (log_add(total_before, total), said_before + said);
        }
        if !self.ends {
            return Activation::of(hidden).and(total).and(said);
        }
        let ignored = targets.lower_elem(0);
        if let Some(segments) = Segments::of(pass) {
            return Activation::of(segments.log_probabilities((total - said).mask_fill(ignored, 0.0)));
        }
        let count = ignored.clone().bool_not().int().sum().float().cast(FloatDType::F32);
        Activation::of((total - said).mask_fill(ignored, 0.0).sum() / count)
    }

    /// The log-sum-exp of this part's logits, and the logit of each target in its rows.
    fn logits(self, hidden: Tensor<3>, table: Tensor<2>, targets: Tensor<1, Int>) -> [Tensor<1>; 2] {
        let ([batch, tokens, _], [rows, _]) = (hidden.dims(), table.dims());
        let logits = ops::linear_transposed(hidden, table, None).reshape([batch * tokens, rows]);
        let (local, others) = own(targets, self.first, rows);
        ops::log_sums(logits, local.mask_fill(others, -1))
    }
}

/// The rows of each part of a vocabulary, split as evenly as possible; the first parts have one more.
pub(crate) fn rows(vocabulary: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let (each, more) = (vocabulary / parts, vocabulary % parts);
    let start = move |part: usize| part * each + part.min(more);
    (0..parts).map(move |part| start(part)..start(part + 1))
}

/// Names the layer of a table, `embed`, or those of its parts by their first rows, `embed.ROW`.
pub(crate) fn named<P>(layer: &str, rows: &[Range<usize>], parts: Vec<P>) -> Vec<(String, P)> {
    let name = |part: &Range<usize>| match rows.len() {
        1 => layer.to_owned(),
        _ => format!("{layer}.{}", part.start),
    };
    rows.iter().map(name).zip(parts).collect()
}

/// The maximum number of elements that a part of an embedding holds for vectors `[batch, tokens, width]`.
pub(crate) fn embedding_elements([batch, tokens, width]: [usize; 3]) -> usize {
    10 * batch * tokens * width
}

/// The maximum number of elements that a part of a head with `rows` rows holds.
pub(crate) fn head_elements([batch, tokens, width]: [usize; 3], rows: usize) -> usize {
    batch * tokens * (6 * rows + 8 * width) + 8192 * width
}

/// Parses the parameter name of a layer `embed.ROW` or `head.ROW`: the part's first row, and the parameter's name
/// within the layer. `None` for other names.
pub(crate) fn in_part(param: &str) -> Option<(usize, &str)> {
    let own = param.strip_prefix("embed.").or_else(|| param.strip_prefix("head."))?;
    let (row, own) = own.split_once('.')?;
    Some((row.parse().ok()?, own))
}

/// Ids relative to the part's first row, with 0 for ids outside the part, and a mask of the latter.
fn own<const D: usize>(ids: Tensor<D, Int>, first: usize, rows: usize) -> (Tensor<D, Int>, Tensor<D, Bool>) {
    let local = ids.sub_scalar(first as i32);
    let others = local.clone().lower_elem(0).bool_or(local.clone().greater_equal_elem(rows as i32));
    (local.mask_fill(others.clone(), 0), others)
}

#[track_caller]
fn check(ids: &Tensor<2, Int>, several: bool, [vocabulary, positions]: [usize; 2]) {
    check_length(ids, several, positions);
    let ids = AnyTensor::from(ids.clone()).into_host();
    let above = ids.as_i32().iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= vocabulary));
    assert!(above.is_none(), "{above:?} names none of the {vocabulary} rows of the table");
}

/// `log(exp(a) + exp(b))`.
fn log_add(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    let larger = a.clone().max_pair(b.clone()).detach();
    ((a - larger.clone()).exp() + (b - larger.clone()).exp()).log() + larger
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_evenly() {
        let of = |vocabulary, parts| rows(vocabulary, parts).collect::<Vec<_>>();
        assert_eq!(of(11, 3), [0..4, 4..8, 8..11]);
        assert_eq!(of(4, 4), [0..1, 1..2, 2..3, 3..4]);
    }

    #[test]
    fn names_of_parts_begin_with_their_first_row() {
        assert_eq!(in_part("embed.40.wte.weight"), Some((40, "wte.weight")));
        assert_eq!(in_part("head.0.norm.weight"), Some((0, "norm.weight")));
        assert_eq!(in_part("embed.wte.weight").or(in_part("h.0.ln_1.bias")), None);
    }
}
