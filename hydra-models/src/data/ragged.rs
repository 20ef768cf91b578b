//! Datasets whose items have different numbers of tokens.
//!
//! A [`RaggedDataset`] holds token sequences of different lengths, one after the other, and gathers them into batches. What
//! its items have in addition, such as labels, is its type of [`RaggedItems`].

use super::source::{as_content, mean_units};
use super::{Content, Cut, DataError, TokenSplits};
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};
use std::fmt;
use std::ops::Range;

/// A bit of a stored id that its [`RaggedItems`] may set; ids are below it.
pub(super) const MARK: u32 = 1 << 31;

/// Token sequences, one after the other.
#[derive(Default)]
pub struct RaggedTokens {
    /// All ids.
    pub(super) ids: Vec<u32>,
    /// The end offset of each sequence in `ids`.
    pub(super) ends: Vec<u32>,
    /// The length of each given sequence before truncation. It may include sequences that are left out.
    pub(super) lengths: Vec<u32>,
}

/// What the items of a [`RaggedDataset`] have in addition to their tokens.
pub trait RaggedItems: Send + Sync {
    /// The parts of an item; each has up to as many tokens as the context.
    const PARTS: usize = 1;

    /// The number of parts of all items, given the number of sequences.
    fn parts(&self, sequences: usize) -> usize {
        sequences
    }

    /// The sequences of a part.
    fn sequences(&self, part: usize) -> impl Iterator<Item = usize> {
        std::iter::once(part)
    }

    /// Completes the batch of these items. It has ids and positions, `[1, tokens]` each, as inputs and no targets yet, and
    /// counts every item as a loss target.
    fn complete(&self, batch: &mut Batch, layout: &Layout<'_>, items: &[usize]);

    /// Passes everything that determines the batches to `to`, as [`Content::content`] does.
    fn content(&self, tokens: &RaggedTokens, to: &mut dyn FnMut(&[u8]));
}

/// Token sequences of different lengths as a dataset.
///
/// A batch is one row of all its tokens, one sequence after the other, without padding. Its first inputs are the ids
/// `[1, tokens]` and each token's position in its sequence `[1, tokens]`.
pub struct RaggedDataset<T> {
    name: String,
    /// Maximum tokens of a part of an item.
    context: usize,
    /// The id that fills the largest batch beyond its items' tokens.
    filler: u32,
    tokens: RaggedTokens,
    pub(super) items: T,
}

/// Where the sequences of a batch are.
pub struct Layout<'a> {
    /// All ids of the dataset.
    pub(super) stored: &'a [u32],
    /// The number of tokens of the batch.
    pub(super) tokens: usize,
    /// For each sequence, the position of its first token in the batch, and its range of stored ids.
    sequences: Vec<(usize, Range<usize>)>,
}

impl RaggedTokens {
    /// Appends a sequence. The name is that of the data.
    pub(super) fn push(
        &mut self,
        sequence: impl IntoIterator<Item = u32>,
        name: &str,
    ) -> Result<(), DataError> {
        self.ids.extend(sequence);
        self.ends.push(as_u32(self.ids.len(), name)?);
        Ok(())
    }

    /// Sets the lengths before truncation.
    pub(super) fn set_lengths(
        &mut self,
        lengths: impl Iterator<Item = usize>,
        name: &str,
    ) -> Result<(), DataError> {
        self.lengths = lengths.map(|length| as_u32(length, name)).collect::<Result<_, _>>()?;
        Ok(())
    }
}

fn as_u32(tokens: usize, name: &str) -> Result<u32, DataError> {
    u32::try_from(tokens).map_err(|_| DataError::TooManyTokens { name: name.to_owned() })
}

/// The range of a part, given the parts' end offsets.
pub(super) fn range(ends: &[u32], part: usize) -> Range<usize> {
    let start = part.checked_sub(1).map_or(0, |before| ends[before]);
    start as usize..ends[part] as usize
}

/// The position of the last token of a sequence that is not the padding; 0 if all are.
pub(super) fn last(ids: &[u32], padding: Option<u32>) -> usize {
    ids.iter().rposition(|id| Some(*id) != padding).unwrap_or(0)
}

/// Rejects ids outside the vocabulary.
pub(super) fn check(name: &str, ids: &[u32], vocab_size: usize) -> Result<(), DataError> {
    // Ids are stored as `i32`; no vocabulary comes near its largest value.
    let fits = |id: &u32| i32::try_from(*id).is_ok() && (*id as usize) < vocab_size;
    match ids.iter().position(|id| !fits(id)) {
        Some(position) => {
            Err(DataError::TokenOutOfRange { name: name.to_owned(), position, id: ids[position], vocab_size })
        }
        None => Ok(()),
    }
}

/// Makes the datasets of splits of one context length; `cut_at` is the context at which sequences were truncated.
pub(super) fn splits<T: RaggedItems + 'static>(
    items: &'static str,
    mut datasets: Vec<RaggedDataset<T>>,
    cut_at: usize,
) -> TokenSplits {
    let context = datasets.iter().map(RaggedDataset::longest).max().unwrap_or(0);
    datasets.iter_mut().for_each(|dataset| dataset.set_context(context));
    let cut = datasets.iter().map(|dataset| dataset.cut_by(cut_at)).sum();
    TokenSplits { items, context, cut, splits: as_content(datasets), ..TokenSplits::default() }
}

impl<T: RaggedItems> RaggedDataset<T> {
    /// The items of these sequences. The context is at first the length of the [longest](Self::longest).
    pub(super) fn of_tokens(name: String, filler: u32, tokens: RaggedTokens, items: T) -> Self {
        let mut dataset = Self { name, context: 0, filler, tokens, items };
        dataset.context = dataset.longest();
        dataset
    }

    /// The length of the longest item in tokens; if items have several parts, of the longest part.
    pub fn longest(&self) -> usize {
        let length = |part| self.items.sequences(part).map(|at| range(&self.tokens.ends, at).len()).sum();
        (0..self.parts()).map(length).max().unwrap_or(0)
    }

    /// Sets the maximum length of items of this dataset and of others of its task; it is at least the
    /// [longest](Self::longest).
    pub(super) fn set_context(&mut self, context: usize) {
        assert!(context >= self.longest());
        self.context = context;
    }

    /// The number of parts of all items.
    fn parts(&self) -> usize {
        self.items.parts(self.tokens.ends.len())
    }

    /// The batch of these items. If `fill`, each part is followed by a sequence of filler tokens up to the context, which are
    /// no loss targets.
    fn batch_with(&self, items: &[usize], fill: bool) -> Result<Batch, DatasetError> {
        let (len, n) = (self.len(), items.len());
        if let Some(&index) = items.iter().find(|index| **index >= len) {
            return Err(DatasetError::OutOfRange { dataset: self.name.clone(), index, len });
        }
        let (mut ids, mut positions, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        for part in items.iter().flat_map(|item| item * T::PARTS..(item + 1) * T::PARTS) {
            let end = ids.len() + self.context;
            for sequence in self.items.sequences(part) {
                let stored = range(&self.tokens.ends, sequence);
                sequences.push((ids.len(), stored.clone()));
                positions.extend(0..stored.len() as i32);
                // The constructors checked that ids fit.
                ids.extend(self.tokens.ids[stored].iter().map(|id| (id & !MARK) as i32));
            }
            if fill {
                positions.extend(0..(end - ids.len()) as i32);
                ids.resize(end, self.filler as i32);
            }
        }
        let units = sequences.iter().map(|(_, stored)| stored.len()).sum();
        let layout = Layout { stored: &self.tokens.ids, tokens: ids.len(), sequences };
        let inputs = HostActivation { parts: [ids, positions].map(|values| layout.row(values)).into() };
        let targets = HostActivation { parts: Vec::new() };
        let mut batch = Batch { inputs, targets, items: n, loss_targets: n, units };
        self.items.complete(&mut batch, &layout, items);
        Ok(batch)
    }
}

impl Layout<'_> {
    /// One value for each token, `[1, tokens]`.
    pub(super) fn row(&self, values: Vec<i32>) -> HostTensor {
        HostTensor::int(values, [1, self.tokens])
    }

    /// One value for each token: `filler` for filler tokens. `value` takes the index of a sequence in the batch, a token's
    /// position in it and the token's offset in the stored ids.
    pub(super) fn each_token(&self, filler: i32, value: impl Fn(usize, usize, usize) -> i32) -> Vec<i32> {
        let mut values = vec![filler; self.tokens];
        for (sequence, (first, stored)) in self.sequences.iter().enumerate() {
            for (at, offset) in stored.clone().enumerate() {
                values[first + at] = value(sequence, at, offset);
            }
        }
        values
    }

    /// The [`Sequences`](crate::parts::Sequences), three tensors of this shape: for each sequence, the position of its first
    /// token, its number of tokens, and the position of its last token that is not the padding.
    pub(super) fn sequences(&self, padding: Option<u32>, shape: &[usize]) -> [HostTensor; 3] {
        let places = self.sequences.iter().map(|(first, stored)| {
            let last = first + last(&self.stored[stored.clone()], padding);
            [*first, stored.len(), last].map(|place| place as i32)
        });
        let places: Vec<[i32; 3]> = places.collect();
        [0, 1, 2].map(|of| HostTensor::int(places.iter().map(|place| place[of]).collect(), shape))
    }
}

impl<T: RaggedItems> Dataset for RaggedDataset<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.parts() / T::PARTS
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        self.batch_with(items, false)
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        let first: Vec<usize> = (0..items.min(self.len())).collect();
        let units = mean_units(self.tokens.ids.len(), self.len(), first.len());
        Ok(Batch { units, ..self.batch_with(&first, true)? })
    }

    fn mean_part(&self) -> f64 {
        self.tokens.ids.len() as f64 / (self.parts() * self.context) as f64
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

impl<T: RaggedItems> Content for RaggedDataset<T> {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        self.items.content(&self.tokens, to);
        Ok(())
    }

    fn units(&self) -> usize {
        self.tokens.ids.len()
    }

    fn cut_by(&self, context: usize) -> Cut {
        Cut::measure(&self.tokens.lengths, context)
    }
}

impl<T> fmt::Debug for RaggedDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RaggedDataset")
            .field("name", &self.name)
            .field("sequences", &self.tokens.ends.len())
            .field("tokens", &self.tokens.ids.len())
            .field("context", &self.context)
            .finish()
    }
}
