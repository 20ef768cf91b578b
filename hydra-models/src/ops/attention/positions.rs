//! Rows that hold several examples that do not attend to each other.
//!
//! Examples are separated by their tokens' positions, which count up from zero in each example, as Transformers'
//! `position_ids` do.

use crate::ops::embedding::integers;
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use std::ops::Range;

/// A range of tokens in a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenRange<'a> {
    /// The first token.
    pub(super) first: usize,
    /// The length of the sequence in tokens.
    pub(super) length: usize,
    /// Each token's position in its example, if the sequence holds several examples.
    positions: Option<&'a [i64]>,
}

impl<'a> TokenRange<'a> {
    /// A whole sequence of a batch: one example, or several with these positions.
    pub(super) fn whole(positions: Option<&'a [i64]>, sequence: usize, length: usize) -> Self {
        Self { first: 0, length, positions: positions.map(|all| &all[sequence * length..][..length]) }
    }

    /// The range from this token on, without context.
    pub(super) fn alone(self, first: usize) -> Self {
        Self { first, positions: None, ..self }
    }

    /// The token ranges of the examples.
    pub(super) fn examples(self) -> impl Iterator<Item = Range<usize>> {
        let end = move |start: usize| {
            let next = self.positions.and_then(|all| all[start + 1..].iter().position(|at| *at == 0));
            next.map_or(self.length, |more| start + 1 + more)
        };
        let from = move |start: usize| (start < self.length).then(|| start..end(start));
        std::iter::successors(from(0), move |before| from(before.end))
    }
}

/// Checks the shape of the positions of tokens `[batch, tokens]`.
///
/// # Panics
/// If the shape differs.
#[track_caller]
pub(super) fn check(op: &str, positions: &Tensor<2, Int>, expected: [usize; 2]) {
    let found = positions.dims();
    assert!(found == expected, "{op} expects positions of shape {expected:?}, found {found:?}");
}

/// The positions of the tokens of rows, on the CPU.
///
/// # Panics
/// If a row does not start with zero, or a position is neither zero nor one more than the one before it.
#[track_caller]
pub(super) fn read(positions: FlexTensor, tokens: usize) -> Vec<i64> {
    let positions = integers(positions);
    for row in positions.chunks(tokens.max(1)) {
        let before = std::iter::once(-1).chain(row.iter().copied());
        let wrong =
            row.iter().zip(before).position(|(at, before)| *at != 0 && (before < 0 || *at != before + 1));
        if let Some(wrong) = wrong {
            panic!(
                "attention expects positions that count up from 0 in each example, found {} at token {wrong} of a row",
                row[wrong]
            );
        }
    }
    positions
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::tensor::{DType, Device, TensorData};

    fn read_rows(positions: Vec<i32>) -> Vec<i64> {
        let data = TensorData::new(positions, [2, 3]);
        let tensor = Tensor::<2, Int>::from_data(data, (&Device::flex(), DType::I32));
        read(tensor.try_into_primitive::<Flex>().unwrap(), 3)
    }

    #[test]
    fn a_row_is_cut_where_positions_begin_anew() {
        let positions = [0, 1, 2, 0, 1, 0, 0, 0, 0, 1];
        let examples = |row| TokenRange::whole(Some(&positions), row, 5).examples().collect::<Vec<_>>();
        assert_eq!(examples(0), [0..3, 3..5]);
        assert_eq!(examples(1), [0..1, 1..2, 2..3, 3..5]);
        assert!(TokenRange::whole(None, 1, 5).examples().eq(std::iter::once(0..5)));
        assert_eq!(TokenRange::whole(None, 0, 0).examples().count(), 0);
    }

    #[test]
    fn examples_begin_anywhere_but_positions_count_up() {
        assert_eq!(read_rows(vec![0, 1, 0, 0, 0, 1]), [0, 1, 0, 0, 0, 1]);
        for (wrong, found) in [
            (vec![0, 1, 2, 1, 2, 3], "found 1 at token 0"),
            (vec![0, 2, 3, 0, 1, 2], "found 2 at token 1"),
            (vec![0, 1, 2, 0, 1, -1], "found -1 at token 2"),
        ] {
            let panic = std::panic::catch_unwind(|| read_rows(wrong)).expect_err("a refusal");
            let refusal = hydra_core::panic_message(&*panic);
            assert!(refusal.contains(found), "{refusal}");
        }
    }
}
