//! Examples as a dataset.

use super::encode::Example;
use super::pack;
use crate::data::source::{mean_units, numbers};
use crate::data::{Content, Cut, DataError, TokenForm};
use crate::ops::IGNORED;
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The bit of a stored id that marks a loss target; ids are below it.
const COUNTS: u32 = 1 << 31;

/// Examples of up to `context` tokens. Cloning is cheap.
///
/// As a [`Dataset`] an item is one example, or a row of several if they are packed. A batch is one row of all its
/// tokens, one example after the other, without padding: its inputs are the ids `[1, tokens]` and each token's position
/// in its example `[1, tokens]`. Its targets are the ids of loss targets and [`IGNORED`] elsewhere; the loss shifts
/// them, so it is a mean over all loss targets of the batch, and an example's first token is never one.
#[derive(Clone)]
pub struct Examples {
    name: Arc<str>,
    /// Maximum tokens of an item.
    context: usize,
    /// The id that fills the largest batch beyond its items' tokens.
    filler: u32,
    /// All ids, one example after the other.
    ids: Arc<[u32]>,
    /// The end offset of each example in `ids`.
    ends: Arc<[u32]>,
    /// Example indices, row by row.
    rows: Arc<[u32]>,
    /// The end offset of each row in `rows`.
    row_ends: Arc<[u32]>,
    /// Whether a row may hold several examples.
    packed: bool,
    /// Length of each given example before truncation.
    lengths: Arc<[u32]>,
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
        let too_many = || DataError::TooManyTokens { name: name.clone() };
        let of_32 = |tokens: usize| u32::try_from(tokens).map_err(|_| too_many());
        let lengths =
            examples.iter().map(|example| of_32(example.tokens)).collect::<Result<Arc<[u32]>, _>>()?;
        let unlearned = examples.iter().filter(|example| !example.learned).count();
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        for example in examples.into_iter().filter(|example| loss_targets(&example.counts) > 0) {
            check(&name, &example.ids, form.vocabulary)?;
            let counts = example.counts.into_iter().map(|counts| if counts { COUNTS } else { 0 });
            ids.extend(example.ids.into_iter().zip(counts).map(|(id, counts)| id | counts));
            ends.push(of_32(ids.len())?);
        }
        if ends.is_empty() {
            let (examples, context) = (lengths.len(), form.context.example);
            let cut_at = Some(context).filter(|_| unlearned < examples);
            return Err(DataError::NothingToLearn { name, examples, cut_at });
        }
        let filler = form.conventions.end.unwrap_or(0);
        let skipped = lengths.len() - ends.len() - unlearned;
        let (rows, row_ends) = rows(&ends, context, form.pack);
        Ok(Self {
            name: name.into(),
            context,
            filler,
            ids: ids.into(),
            ends: ends.into(),
            rows: rows.into(),
            row_ends: row_ends.into(),
            packed: form.pack,
            lengths,
            skipped,
            unlearned,
        })
    }

    /// How full the rows are, if examples are packed.
    pub fn packing(&self) -> Option<Packing> {
        let (examples, rows) = (self.ends.len(), self.row_ends.len());
        self.packed.then(|| Packing { examples, rows, tokens: self.ids.len() })
    }

    /// Examples without a loss target within the context; they are not items.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Examples without a loss target at any context; they are not items.
    pub fn unlearned(&self) -> usize {
        self.unlearned
    }

    /// Sets the maximum length of items of this dataset and of others of its task; it is at least the
    /// [longest](Self::longest).
    pub(in crate::data) fn set_context(&mut self, context: usize) {
        assert!(context >= self.longest());
        self.context = context;
    }

    /// The length of the longest item in tokens.
    pub fn longest(&self) -> usize {
        (0..self.row_ends.len()).map(|row| self.row(row).map(<[u32]>::len).sum()).max().unwrap_or(0)
    }

    /// The batch of these items, each with an extra example of `more` tokens without loss targets.
    fn batch_with(&self, items: &[usize], more: impl Fn(usize) -> usize) -> Result<Batch, DatasetError> {
        let (len, mut row) = (self.len(), Row::default());
        for &index in items {
            if index >= len {
                return Err(DatasetError::OutOfRange { dataset: self.name.to_string(), index, len });
            }
            let before = row.ids.len();
            self.row(index).for_each(|example| row.write(example));
            row.fill(more(row.ids.len() - before), self.filler);
        }
        let (loss_targets, tokens) = (row.loss_targets(), row.ids.len());
        let Row { ids, targets, positions, units } = row;
        let of = |ids| HostTensor::int(ids, [1, tokens]);
        let inputs = HostActivation { parts: vec![of(ids), of(positions)] };
        Ok(Batch {
            inputs,
            targets: HostActivation::of(of(targets)),
            items: items.len(),
            loss_targets,
            units,
        })
    }

    /// The stored ids of the examples of a row; loss targets carry [`COUNTS`].
    fn row(&self, row: usize) -> impl Iterator<Item = &[u32]> {
        let examples = &self.rows[range(&self.row_ends, row)];
        examples.iter().map(|example| &self.ids[range(&self.ends, *example as usize)])
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

/// The range of a part, given the parts' end offsets.
pub(in crate::data) fn range(ends: &[u32], part: usize) -> Range<usize> {
    let start = part.checked_sub(1).map_or(0, |before| ends[before]);
    start as usize..ends[part] as usize
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

/// A batch under construction, one example after the other.
#[derive(Default)]
struct Row {
    ids: Vec<i32>,
    targets: Vec<i32>,
    /// Each token's position in its example.
    positions: Vec<i32>,
    units: usize,
}

impl Row {
    /// Appends an example of stored ids.
    fn write(&mut self, marked: &[u32]) {
        let first = self.ids.len();
        self.units += marked.len();
        // The constructor checked that ids fit.
        self.ids.extend(marked.iter().map(|id| (id & !COUNTS) as i32));
        self.targets
            .extend(marked.iter().map(|id| if id & COUNTS != 0 { (id & !COUNTS) as i32 } else { IGNORED }));
        if let Some(target) = self.targets.get_mut(first) {
            // The end of one example does not predict the start of the next.
            *target = IGNORED;
        }
        self.positions.extend(0..marked.len() as i32);
    }

    /// Appends an example of this many tokens without loss targets.
    fn fill(&mut self, tokens: usize, filler: u32) {
        let end = self.ids.len() + tokens;
        self.ids.resize(end, filler as i32);
        self.targets.resize(end, IGNORED);
        self.positions.extend(0..tokens as i32);
    }

    /// The number of loss targets.
    fn loss_targets(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED).count()
    }
}

/// The number of loss targets; the first token is never one.
pub(super) fn loss_targets(counts: &[bool]) -> usize {
    counts.iter().skip(1).filter(|counts| **counts).count()
}

/// Rejects ids outside the vocabulary.
pub(in crate::data) fn check(name: &str, ids: &[u32], vocab_size: usize) -> Result<(), DataError> {
    let fits = |id: &u32| i32::try_from(*id).is_ok() && (*id as usize) < vocab_size;
    match ids.iter().position(|id| !fits(id)) {
        Some(position) => {
            Err(DataError::TokenOutOfRange { name: name.to_owned(), position, id: ids[position], vocab_size })
        }
        None => Ok(()),
    }
}

impl Dataset for Examples {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.row_ends.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        self.batch_with(items, |_| 0)
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        let first: Vec<usize> = (0..items.min(self.len())).collect();
        let units = mean_units(self.ids.len(), self.len(), first.len());
        Ok(Batch { units, ..self.batch_with(&first, |tokens| self.context - tokens)? })
    }

    fn mean_part(&self) -> f64 {
        self.ids.len() as f64 / (self.len() * self.context) as f64
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

impl Content for Examples {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        let lists: [&[u32]; 4] = [&self.ids, &self.ends, &self.rows, &self.row_ends];
        // Without packing the rows follow from the examples.
        numbers(&lists[..if self.packed { 4 } else { 2 }], to);
        Ok(())
    }

    fn units(&self) -> usize {
        self.ids.len()
    }

    fn cut_by(&self, context: usize) -> Cut {
        Cut::measure(&self.lengths, context)
    }
}

impl fmt::Debug for Examples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Examples")
            .field("name", &self.name)
            .field("examples", &self.ends.len())
            .field("tokens", &self.ids.len())
            .field("rows", &self.row_ends.len())
            .field("context", &self.context)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::LossOn;
    use super::*;
    use crate::data::Context;
    use crate::tokenizer::{Conventions, Tokenizer};

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
        let one = examples(&[(&[1, 2], &[0, 1]), (&[3, 4], &[0, 1])], 10).unwrap();
        let other = examples(&[(&[1, 2], &[1, 1]), (&[3, 4], &[0, 1])], 10).unwrap();
        assert_eq!(content(&one), content(&one.clone()));
        assert_ne!(content(&one), content(&other));
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
