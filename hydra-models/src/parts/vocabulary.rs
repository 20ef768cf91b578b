//! A vocabulary that is cut: layers that each have some rows of a table, so that no table is too large for a device.
//!
//! The embedding adds up what its parts know of each token, of which all but one know nothing. The head goes through its
//! parts with the logarithm of the sum of what the logits so far are the logarithms of, and with the logit of the token
//! that is to be predicted, if a part has had it: the loss is the mean of their difference (the online normalizer of
//! Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, over parts instead of elements).
//! Parts come in the order of their rows, so what comes out does not depend on which of them share a shard. It does depend,
//! in its last bits, on how many parts there are.

use super::{check_length, next_tokens};
use crate::ops;
use burn::tensor::{Bool, FloatDType, Int, Tensor};
use hydra_core::{Activation, AnyTensor, Pass};
use std::ops::Range;

/// The place of a part among those of its table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The first token that it has a row for.
    first: usize,
    /// True if it has the table's first rows, or its last ones.
    pub begins: bool,
    pub ends: bool,
}

/// What the parts of an embedding know so far.
pub(crate) struct Known {
    /// The vectors, `[batch, tokens, width]`.
    pub sum: Tensor<3>,
    /// The ids, `[batch, tokens]`.
    pub ids: Tensor<2, Int>,
    /// What rides along.
    pub rest: Vec<AnyTensor>,
}

impl Place {
    /// The place of these rows in a table of so many.
    pub fn of(rows: &Range<usize>, vocabulary: usize) -> Self {
        Self { first: rows.start, begins: rows.start == 0, ends: rows.end == vocabulary }
    }

    /// The vectors of tokens with those of a part's rows, from ids `[batch, tokens]`, in front of which the sum of earlier
    /// parts `[batch, tokens, width]` may stand. `limits` are the number of ids, and the longest sequence in tokens.
    ///
    /// # Panics
    /// If rows of one example each have more tokens than there are positions, or an id is not below the vocabulary.
    #[track_caller]
    pub fn look_up(self, x: Activation, table: Tensor<2>, limits: [usize; 2]) -> Known {
        let mut parts = x.into_parts();
        let before = (!self.begins).then(|| parts.remove(0).into_float::<3>());
        let ids = parts.remove(0).into_int::<2>();
        if self.begins {
            // What is left are positions within examples, if rows hold several.
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

    /// What a part of the head makes of normalized vectors `[batch, tokens, width]` and what earlier parts gave: the vectors
    /// with the logarithm of the sum of all exponentials of logits so far and the logit of the next token, each
    /// `[batch * tokens]` and `F32`; or, of the last part, the mean loss over `batch * (tokens - 1)` predicted tokens, or fewer
    /// where targets are [ignored](ops::IGNORED).
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
        let ids = pass.targets().part(0).into_int::<2>();
        let [batch, tokens, _] = hidden.dims();
        assert!(
            ids.dims() == [batch, tokens] && tokens > 1,
            "expected targets of shape {:?} with at least two tokens, found {:?}",
            [batch, tokens],
            ids.dims()
        );
        let targets = next_tokens(ids);
        let [mut total, mut said] = self.logits(hidden.clone(), table, targets.clone());
        let mut before = before.into_iter().map(AnyTensor::into_float::<1>);
        if let (Some(total_before), Some(said_before)) = (before.next(), before.next()) {
            (total, said) = (log_add(total_before, total), said_before + said);
        }
        if !self.ends {
            return Activation::of(hidden).and(total).and(said);
        }
        let ignored = targets.lower_elem(0);
        let count = ignored.clone().bool_not().int().sum().float().cast(FloatDType::F32);
        Activation::of((total - said).mask_fill(ignored, 0.0).sum() / count)
    }

    /// The logarithm of the sum of the exponentials of its logits, and the logit of each target that it has a row for.
    fn logits(self, hidden: Tensor<3>, table: Tensor<2>, targets: Tensor<1, Int>) -> [Tensor<1>; 2] {
        let ([batch, tokens, _], [rows, _]) = (hidden.dims(), table.dims());
        let count = batch * tokens;
        let logits = ops::linear_transposed(hidden, table, None);
        let logits = logits.cast(FloatDType::F32).reshape([count, rows]);
        let largest = logits.clone().max_dim(1).detach();
        let total = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
        let (local, others) = own(targets, self.first, rows);
        let said = logits.gather(1, local.reshape([count, 1])).reshape([count]);
        [total.reshape([count]), said.mask_fill(others, 0.0)]
    }
}

/// The rows of each of so many parts of a vocabulary: as many each as evenly as can be, the first ones one more.
pub(crate) fn rows(vocabulary: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let (each, more) = (vocabulary / parts, vocabulary % parts);
    let start = move |part: usize| part * each + part.min(more);
    (0..parts).map(move |part| start(part)..start(part + 1))
}

/// The parts of a table, which have these rows, by the names of their layers: `embed.ROW` for `embed`.
pub(crate) fn named<P>(layer: &str, rows: &[Range<usize>], parts: Vec<P>) -> Vec<(String, P)> {
    let names = rows.iter().map(|rows| format!("{layer}.{}", rows.start));
    names.zip(parts).collect()
}

/// The most elements that a part of an embedding, or one of a head, has at hand for vectors of `[batch, tokens, width]`.
pub(crate) fn embedding_elements([batch, tokens, width]: [usize; 3]) -> usize {
    10 * batch * tokens * width
}

/// As [`embedding_elements`], for a head with so many rows.
pub(crate) fn head_elements([batch, tokens, width]: [usize; 3], rows: usize) -> usize {
    batch * tokens * (6 * rows + 8 * width) + 8192 * width
}

/// The row with which a part of a table begins, by the name of its parameter in a layer `embed.ROW` or `head.ROW`; `None` of
/// any other name. And the parameter's name within the layer.
pub(crate) fn in_part(param: &str) -> Option<(usize, &str)> {
    let own = param.strip_prefix("embed.").or_else(|| param.strip_prefix("head."))?;
    let (row, own) = own.split_once('.')?;
    Some((row.parse().ok()?, own))
}

/// Of ids those that a part has rows for, counted from its first row, and where the others are, in whose place 0 stands.
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

/// The logarithm of the sum of what two numbers are the logarithms of.
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
