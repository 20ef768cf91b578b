//! Examples as a dataset.

use super::encode::Example;
use super::pack;
use crate::data::ragged::{Layout, MARK, RaggedDataset, RaggedItems, RaggedTokens, check, range};
use crate::data::source::numbers;
use crate::data::{DataError, TokenForm};
use crate::ops::IGNORED;
use hydra_core::Batch;

/// Examples of up to `context` tokens.
///
/// As a [`Dataset`](hydra_core::Dataset) an item is one example, or a row of several if they are packed. A batch is one row
/// of all its tokens, one example after the other, without padding: its inputs are the ids `[1, tokens]` and each token's
/// position in its example `[1, tokens]`. Its targets are the ids of loss targets and [`IGNORED`] elsewhere; the loss shifts
/// them, so it is a mean over all loss targets of the batch, and an example's first token is never one.
pub type Examples = RaggedDataset<ExampleRows>;

/// The rows of [`Examples`]. The stored ids of loss targets are marked.
pub struct ExampleRows {
    /// Example indices, row by row.
    rows: Vec<u32>,
    /// The end offset of each row in `rows`.
    row_ends: Vec<u32>,
    /// How full the rows are, if one may hold several examples.
    packing: Option<Packing>,
    /// Examples dropped because of the context.
    skipped: usize,
    /// Examples without loss targets.
    unlearned: usize,
}

impl Examples {
    /// Keeps the examples with loss targets, in rows of at most `context` tokens if they are packed.
    pub(in crate::data) fn new(
        name: String,
        examples: Vec<Example>,
        context: usize,
        form: &TokenForm<'_>,
    ) -> Result<Self, DataError> {
        if form.context.example < 2 {
            return Err(DataError::ContextTooShort { context: form.context.example });
        }
        let (given, mut tokens) = (examples.len(), RaggedTokens::default());
        tokens.set_lengths(examples.iter().map(|example| example.tokens), &name)?;
        let unlearned = examples.iter().filter(|example| !example.learned).count();
        for example in examples.into_iter().filter(|example| loss_targets(&example.counts) > 0) {
            check(&name, &example.ids, form.vocabulary)?;
            let marked = |(id, counts): (u32, bool)| if counts { id | MARK } else { id };
            tokens.push(example.ids.into_iter().zip(example.counts).map(marked), &name)?;
        }
        let kept = tokens.ends.len();
        if kept == 0 {
            let cut_at = Some(form.context.example).filter(|_| unlearned < given);
            return Err(DataError::NothingToLearn { name, examples: given, cut_at });
        }
        let filler = form.conventions.end.unwrap_or(0);
        let (rows, row_ends) = rows(&tokens.ends, context, form.pack);
        let packing = Packing { examples: kept, rows: row_ends.len(), tokens: tokens.ids.len() };
        let (packing, skipped) = (form.pack.then_some(packing), given - kept - unlearned);
        let items = ExampleRows { rows, row_ends, packing, skipped, unlearned };
        Ok(Self::of_tokens(name, filler, tokens, items))
    }

    /// How full the rows are, if examples are packed.
    pub fn packing(&self) -> Option<Packing> {
        self.items.packing
    }

    /// Examples without a loss target within the context; they are not items.
    pub fn skipped(&self) -> usize {
        self.items.skipped
    }

    /// Examples without a loss target at any context; they are not items.
    pub fn unlearned(&self) -> usize {
        self.items.unlearned
    }
}

impl RaggedItems for ExampleRows {
    fn parts(&self, _sequences: usize) -> usize {
        self.row_ends.len()
    }

    fn sequences(&self, row: usize) -> impl Iterator<Item = usize> {
        self.rows[range(&self.row_ends, row)].iter().map(|example| *example as usize)
    }

    fn complete(&self, batch: &mut Batch, layout: &Layout<'_>, _items: &[usize]) {
        let targets = layout.each_token(IGNORED, |_, at, offset| {
            let id = layout.stored[offset];
            // The end of one example does not predict the start of the next.
            if at > 0 && id & MARK != 0 { (id & !MARK) as i32 } else { IGNORED }
        });
        batch.loss_targets = targets.iter().filter(|target| **target != IGNORED).count();
        batch.targets.parts.push(layout.row(targets));
    }

    fn content(&self, tokens: &RaggedTokens, to: &mut dyn FnMut(&[u8])) {
        let lists: [&[u32]; 4] = [&tokens.ids, &tokens.ends, &self.rows, &self.row_ends];
        // Without packing the rows follow from the examples.
        numbers(&lists[..if self.packing.is_some() { 4 } else { 2 }], to);
    }
}

/// Statistics of packed rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// The number of examples.
    pub examples: usize,
    /// The number of rows.
    pub rows: usize,
    /// The number of tokens of all examples.
    pub tokens: usize,
}

impl std::iter::Sum for Packing {
    fn sum<I: Iterator<Item = Self>>(packings: I) -> Self {
        packings.fold(Self::default(), |sum, one| Self {
            examples: sum.examples + one.examples,
            rows: sum.rows + one.rows,
            tokens: sum.tokens + one.tokens,
        })
    }
}

/// The rows of the examples with these end offsets, and the end offset of each row.
fn rows(ends: &[u32], context: usize, pack: bool) -> (Vec<u32>, Vec<u32>) {
    if !pack {
        let examples = 0..ends.len() as u32;
        return (examples.clone().collect(), examples.map(|example| example + 1).collect());
    }
    let lengths: Vec<usize> = (0..ends.len()).map(|example| range(ends, example).len()).collect();
    let rows = pack::rows(&lengths, context);
    let ends = rows.iter().scan(0, |end, row| {
        *end += row.len() as u32;
        Some(*end)
    });
    (rows.concat(), ends.collect())
}

/// The number of loss targets; the first token is never one.
pub(super) fn loss_targets(counts: &[bool]) -> usize {
    counts.iter().skip(1).filter(|counts| **counts).count()
}

#[cfg(test)]
mod tests {
    use super::super::LossOn;
    use super::*;
    use crate::data::{Content as _, Context};
    use crate::tokenizer::{Conventions, Tokenizer};
    use hydra_core::{Dataset as _, DatasetError};

    fn examples(examples: &[(&[u32], &[u8])], vocabulary: usize) -> Result<Examples, DataError> {
        lying(examples, vocabulary, (4, false))
    }

    fn lying(
        examples: &[(&[u32], &[u8])],
        vocabulary: usize,
        (most, pack): (usize, bool),
    ) -> Result<Examples, DataError> {
        let conventions = Conventions { end: Some(9), ..Conventions::default() };
        let (tokenizer, conventions) = (&Tokenizer::Bytes, &conventions);
        let form = TokenForm {
            tokenizer,
            conventions,
            context: Context::uniform(most),
            vocabulary,
            loss_on: LossOn::Completions,
            pack,
        };
        let example = |(ids, counts): &(&[u32], &[u8])| {
            let counts: Vec<bool> = counts.iter().map(|counts| *counts == 1).collect();
            let (tokens, learned) = (ids.len(), loss_targets(&counts) > 0);
            Example { ids: ids.to_vec(), counts, tokens, learned, ..Example::default() }
        };
        Examples::new("the data".to_owned(), examples.iter().map(example).collect(), most, &form)
    }

    /// The ids, positions and targets of a batch.
    fn rows(batch: &Batch) -> [Vec<i32>; 3] {
        let [ids, positions] = batch.inputs.parts.as_slice() else { panic!("two inputs") };
        [ids, positions, &batch.targets.parts[0]].map(|part| part.as_i32().to_vec())
    }

    #[test]
    fn a_batch_is_one_row_and_counts_what_is_to_be_said() {
        let data = examples(&[(&[1, 2, 3], &[0, 1, 1]), (&[4, 5, 6, 7], &[1, 0, 0, 1])], 10).unwrap();
        let batch = data.batch(&[1, 0]).unwrap();
        assert_eq!(rows(&batch), [[4, 5, 6, 7, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2], [-1, -1, -1, 7, -1, 2, 3]]);
        assert_eq!(batch.inputs.parts[0].shape, [1, 7]);
        assert_eq!(
            (batch.items, batch.loss_targets, batch.units),
            (2, 3, 7),
            "nothing predicts a first token"
        );
        assert!(matches!(data.batch(&[2]), Err(DatasetError::OutOfRange { index: 2, len: 2, .. })));
        assert_eq!((data.longest(), data.units(), data.skipped()), (4, 7, 0));
    }

    #[test]
    fn no_batch_is_larger_than_the_largest() {
        let mut data = examples(&[(&[1, 2, 3], &[0, 1, 1]), (&[4, 5], &[1, 1])], 10).unwrap();
        data.set_context(5);
        let largest = data.largest(2).unwrap();
        assert_eq!(
            rows(&largest),
            [
                [1, 2, 3, 9, 9, 4, 5, 9, 9, 9],
                [0, 1, 2, 0, 1, 0, 1, 0, 1, 2],
                [-1, 2, 3, -1, -1, -1, 5, -1, -1, -1]
            ]
        );
        assert_eq!((largest.items, largest.loss_targets, largest.units), (2, 3, 5), "tokens as in the mean");
        assert_eq!(data.mean_part(), 0.5);
        let one = data.largest(1).unwrap();
        assert_eq!((one.items, one.inputs.parts[0].shape.clone(), one.units), (1, vec![1, 5], 3));
        assert_eq!(data.largest(9).unwrap().items, 2);
        let tokens = |batch: Batch| batch.inputs.parts[0].shape[1];
        for items in [&[0, 1][..], &[1, 0], &[0], &[1]] {
            assert!(tokens(data.batch(items).unwrap()) <= tokens(data.largest(items.len()).unwrap()));
        }
    }

    #[test]
    fn examples_of_which_nothing_counts_are_left_out() {
        let data = examples(&[(&[1, 2], &[1, 0]), (&[3, 4], &[0, 1]), (&[], &[])], 10).unwrap();
        assert_eq!((data.len(), data.skipped(), data.unlearned()), (1, 0, 2));
        assert_eq!(data.batch(&[0]).unwrap().inputs.parts[0].as_i32(), [3, 4]);
        let error = examples(&[(&[1, 2], &[1, 0])], 10).unwrap_err().to_string();
        assert!(error.contains("no loss targets in 1 example"), "{error}");
    }

    #[test]
    fn an_id_that_the_model_does_not_have_is_named() {
        let error = examples(&[(&[1, 300], &[0, 1])], 256).unwrap_err();
        assert!(matches!(error, DataError::TokenOutOfRange { position: 1, id: 300, .. }), "{error}");
    }

    fn content(data: &Examples) -> Vec<u8> {
        let mut all = Vec::new();
        data.content(&mut |bytes| all.extend_from_slice(bytes)).unwrap();
        all
    }

    #[test]
    fn what_counts_is_part_of_the_content() {
        let one = || examples(&[(&[1, 2], &[0, 1]), (&[3, 4], &[0, 1])], 10).unwrap();
        let other = examples(&[(&[1, 2], &[1, 1]), (&[3, 4], &[0, 1])], 10).unwrap();
        assert_eq!(content(&one()), content(&one()));
        assert_ne!(content(&one()), content(&other));
    }

    #[test]
    fn packed_examples_are_told_apart_by_positions() {
        let three: &[(&[u32], &[u8])] =
            &[(&[1, 2], &[1, 1]), (&[3, 4, 5], &[0, 1, 1]), (&[6, 7, 8], &[1, 1, 1])];
        let data = lying(three, 10, (6, true)).unwrap();
        assert_eq!((data.len(), data.longest(), data.units()), (2, 6, 8));
        assert_eq!(data.packing(), Some(Packing { examples: 3, rows: 2, tokens: 8 }));
        let batch = data.batch(&[0, 1]).unwrap();
        let [ids, positions, targets] = rows(&batch);
        assert_eq!(ids, [3, 4, 5, 6, 7, 8, 1, 2]);
        assert_eq!(positions, [0, 1, 2, 0, 1, 2, 0, 1]);
        assert_eq!(targets, [-1, 4, 5, -1, 7, 8, -1, 2], "no example predicts another");
        assert_eq!((batch.items, batch.loss_targets, batch.units), (2, 5, 8));
        assert!(matches!(data.batch(&[2]), Err(DatasetError::OutOfRange { index: 2, len: 2, .. })));
    }

    #[test]
    fn rows_are_part_of_the_content_where_examples_are_packed() {
        let two: &[(&[u32], &[u8])] = &[(&[1, 2], &[0, 1]), (&[3, 4], &[0, 1])];
        let length = |form| content(&lying(two, 10, form).unwrap()).len();
        assert_eq!([length((4, false)), length((4, true))], [2 * 8 + 6 * 4, 4 * 8 + 9 * 4]);
        let rows = |most| lying(two, 10, (most, true)).unwrap();
        assert_ne!(content(&rows(3)), content(&rows(4)));
        assert_eq!(lying(two, 10, (4, false)).unwrap().packing(), None);
    }
}
