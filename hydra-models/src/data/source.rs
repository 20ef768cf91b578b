//! The data that `--data` names: a text or examples.

use super::examples::Encoded;
use super::{
    BlockSpec, Column, Corpus, DataError, ExampleFiles, Examples, LossOn, Packing, Split, Tally, ragged,
};
use crate::tokenizer::{Conventions, Tokenizer};
use hydra_core::{Dataset, DatasetError};
use std::path::Path;
use std::sync::Arc;

/// A dataset whose content can be fingerprinted.
pub trait Content: Dataset {
    /// Passes everything that determines the batches, apart from their shape, to `to` piece by piece.
    ///
    /// # Errors
    /// The data cannot be read.
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError>;

    /// The number of [`unit`](Dataset::unit)s.
    fn units(&self) -> usize;

    /// What this context length truncates; nothing for items that have no length.
    fn cut_by(&self, _context: usize) -> Cut {
        Cut::default()
    }
}

/// Truncation of examples at a context length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Examples longer than the context.
    pub examples: usize,
    /// Tokens of theirs beyond the context.
    pub tokens: usize,
    /// The number of all examples.
    pub of_examples: usize,
    /// The number of tokens of all examples.
    pub of_tokens: usize,
    /// The length of the longest example in tokens: the smallest context that truncates nothing.
    pub longest: usize,
}

impl Cut {
    /// Truncation of examples of these lengths at a context.
    pub(super) fn measure(lengths: &[u32], context: usize) -> Self {
        let lengths = || lengths.iter().map(|length| *length as usize);
        Self {
            examples: lengths().filter(|length| *length > context).count(),
            tokens: lengths().map(|length| length.saturating_sub(context)).sum(),
            of_examples: lengths().len(),
            of_tokens: lengths().sum(),
            longest: lengths().max().unwrap_or(0),
        }
    }
}

impl std::iter::Sum for Cut {
    fn sum<I: Iterator<Item = Self>>(cuts: I) -> Self {
        cuts.fold(Self::default(), |sum, one| Self {
            examples: sum.examples + one.examples,
            tokens: sum.tokens + one.tokens,
            of_examples: sum.of_examples + one.of_examples,
            of_tokens: sum.of_tokens + one.of_tokens,
            longest: sum.longest.max(one.longest),
        })
    }
}

/// The mean units of this many items of a dataset with `units` units in `len` items, rounded.
pub(super) fn mean_units(units: usize, len: usize, items: usize) -> usize {
    (units * items + len / 2) / len
}

/// Passes lists of numbers to `to`, each preceded by its length.
pub(super) fn numbers(lists: &[&[u32]], to: &mut dyn FnMut(&[u8])) {
    /// Numbers per call.
    const PIECE: usize = 1 << 18;
    for list in lists {
        to(&(list.len() as i64).to_le_bytes());
        for some in list.chunks(PIECE) {
            let bytes: Vec<u8> = some.iter().flat_map(|number| number.to_le_bytes()).collect();
            to(&bytes);
        }
    }
}

/// Token data in up to three splits.
#[derive(Clone, Debug)]
pub enum TokenSource {
    /// A text, cut into blocks.
    Text(Corpus),
    /// Prompts with responses, or conversations.
    Examples(ExampleFiles),
}

impl TokenSource {
    /// Opens the data of a `--data` value: `builtin`, a file of rows or a directory with one per split
    /// ([`ExampleFiles`], which uses the columns), or a text ([`Corpus`]).
    ///
    /// # Errors
    /// Those of [`ExampleFiles::open`] and of [`Corpus::load`].
    pub fn load(data: &str, columns: &[Column]) -> Result<Self, DataError> {
        let path = Path::new(data);
        match ExampleFiles::are_at(path) {
            true => ExampleFiles::open(path, columns).map(Self::Examples),
            false => Corpus::load(data).map(Self::Text),
        }
    }

    /// Returns whether the source has this split.
    pub fn has(&self, split: Split) -> bool {
        match self {
            Self::Text(corpus) => corpus.has(split),
            Self::Examples(files) => files.has(split),
        }
    }

    /// Builds datasets of one context length from these splits. Blocks of text are full and are never packed.
    ///
    /// # Errors
    /// Those of [`Corpus::blocks`], a missing split, a row that cannot be encoded for the model, or a split without
    /// loss targets.
    pub fn splits(&self, splits: &[Split], form: &TokenForm<'_>) -> Result<TokenSplits, DataError> {
        match self {
            Self::Text(corpus) => {
                let context = form.context.block;
                let spec = BlockSpec { context, vocab_size: form.vocabulary };
                let blocks = |split: &Split| corpus.blocks(*split, form.tokenizer, spec);
                let splits = as_content(splits.iter().map(blocks).collect::<Result<Vec<_>, _>>()?);
                Ok(TokenSplits { items: "blocks", context, splits, ..TokenSplits::default() })
            }
            Self::Examples(files) => examples(files, splits, form),
        }
    }
}

fn examples(files: &ExampleFiles, splits: &[Split], form: &TokenForm<'_>) -> Result<TokenSplits, DataError> {
    let encoded = splits.iter().map(|split| files.encode(*split, form)).collect::<Result<Vec<_>, _>>()?;
    let longest = encoded.iter().map(Encoded::longest).max().unwrap_or(0);
    // The length of packed rows; the longest example fits.
    let row = form.context.block.max(longest);
    let mut tally = Tally::default();
    let dataset = |encoded: Encoded| {
        tally.add(&encoded.tally);
        Examples::new(encoded.name, encoded.examples, if form.pack { row } else { longest }, form)
    };
    let examples = encoded.into_iter().map(dataset).collect::<Result<Vec<_>, _>>()?;
    let packing = form.pack.then(|| examples.iter().filter_map(Examples::packing).sum());
    let skipped = examples.iter().map(Examples::skipped).sum();
    let unlearned = examples.iter().map(Examples::unlearned).sum();
    let items = if form.pack { "rows" } else { "examples" };
    let splits = ragged::splits(items, examples, form.context.example);
    Ok(TokenSplits { skipped, unlearned, packing, tally, ..splits })
}

pub(super) fn as_content<T: Content + 'static>(splits: Vec<T>) -> Vec<Arc<dyn Content>> {
    splits.into_iter().map(|split| Arc::new(split) as Arc<dyn Content>).collect()
}

/// Datasets made from the splits of one source.
#[derive(Clone, Default)]
pub struct TokenSplits {
    /// The plural name of an item.
    pub items: &'static str,
    /// The maximum number of tokens in an item.
    pub context: usize,
    /// Truncation of examples.
    pub cut: Cut,
    /// Examples without a loss target within the context.
    pub skipped: usize,
    /// Examples without a loss target at any context.
    pub unlearned: usize,
    /// How the examples of all these splits are packed into rows, if they are packed.
    pub packing: Option<Packing>,
    /// Data in rows that is not used.
    pub tally: Tally,
    /// The datasets, in the requested order.
    pub splits: Vec<Arc<dyn Content>>,
}

/// Context lengths in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Length of a block of text, and of a row of packed examples unless an example is longer.
    pub block: usize,
    /// Maximum length of an example; longer ones are truncated.
    pub example: usize,
}

impl Context {
    /// The same length for blocks and examples.
    pub fn uniform(tokens: usize) -> Self {
        Self { block: tokens, example: tokens }
    }
}

/// Form of the datasets, and the model that they are for.
#[derive(Clone, Copy, Debug)]
pub struct TokenForm<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// End-of-text and chat conventions of the model.
    pub conventions: &'a Conventions,
    /// Context lengths.
    pub context: Context,
    /// The size of the model's vocabulary.
    pub vocabulary: usize,
    /// The part of an example that the loss covers.
    pub loss_on: LossOn,
    /// Whether examples are packed: several share one item up to the context length, and none attends to the others.
    pub pack: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn splits(source: &TokenSource, context: Context, pack: bool) -> TokenSplits {
        let tokenizer = Tokenizer::Bytes;
        let conventions = Conventions::load(&tokenizer, None).unwrap();
        let (tokenizer, conventions, loss_on) = (&tokenizer, &conventions, LossOn::Completions);
        let form = TokenForm { tokenizer, conventions, context, vocabulary: 256, loss_on, pack };
        source.splits(&[Split::Train, Split::Test], &form).unwrap()
    }

    #[test]
    fn splits_have_one_largest_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n{\"text\": \"d\"}\n{\"text\": \"abcdef\"}\n").unwrap();
        let source = TokenSource::load(path.to_str().unwrap(), &[]).unwrap();
        let shapes = |context| {
            let TokenSplits { items, context, splits, .. } = splits(&source, context, false);
            assert_eq!(items, "examples");
            let shape = |split: &Arc<dyn Content>| split.largest(1).unwrap().inputs.parts[0].shape.clone();
            (context, splits.iter().map(shape).collect::<Vec<_>>())
        };
        assert_eq!(shapes(Context::uniform(99)), (7, vec![vec![1, 7]; 2]), "an end follows");
        assert_eq!(shapes(Context::uniform(5)), (5, vec![vec![1, 5]; 2]));
        assert_eq!(shapes(Context { block: 3, example: 99 }), (7, vec![vec![1, 7]; 2]));
    }

    #[test]
    fn what_is_cut_is_counted_and_an_example_in_a_row_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n{\"text\": \"d\"}\n{\"text\": \"abcdef\"}\n").unwrap();
        let source = TokenSource::load(path.to_str().unwrap(), &[]).unwrap();
        let cut = |context, pack| splits(&source, context, pack).cut;
        let whole = Cut { examples: 0, tokens: 0, of_examples: 2, of_tokens: 11, longest: 7 };
        assert_eq!(cut(Context::uniform(7), false), whole);
        assert_eq!(cut(Context { block: 3, example: 7 }, true), whole);
        assert_eq!(cut(Context::uniform(3), false), Cut { examples: 2, tokens: 5, ..whole });
        let splits = splits(&source, Context::uniform(3), false);
        let sum: Cut = splits.splits.iter().map(|split| split.cut_by(6)).sum();
        assert_eq!(sum, Cut { examples: 1, tokens: 1, ..whole }, "of what was there before");
    }

    #[test]
    fn splits_of_packed_rows_have_one_largest_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n".repeat(30)).unwrap();
        let source = TokenSource::load(path.to_str().unwrap(), &[]).unwrap();
        let TokenSplits { items, context, packing, splits, .. } = splits(&source, Context::uniform(22), true);
        assert_eq!((items, context), ("rows", 20), "five of four tokens, their ends among them");
        assert_eq!(packing, Some(Packing { examples: 27, rows: 6, tokens: 4 * 27 }));
        assert_eq!(splits.iter().map(|split| split.len()).collect::<Vec<_>>(), [5, 1]);
        assert_eq!(splits[1].largest(1).unwrap().inputs.parts[1].shape, [1, 20]);
    }

    #[test]
    fn a_text_is_blocks_of_the_most() {
        let source = TokenSource::load("builtin", &[]).unwrap();
        let splits = splits(&source, Context::uniform(64), false);
        assert_eq!((splits.context, splits.skipped, splits.items), (64, 0, "blocks"));
        assert!(splits.splits.iter().all(|split| split.units() > 1000));
    }
}
