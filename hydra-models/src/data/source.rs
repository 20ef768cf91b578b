//! What `--data` names: a text, or examples.

use super::examples::Encoded;
use super::{BlockSpec, Column, Corpus, DataError, ExampleFiles, Examples, LossOn, Packing, Split, Tally};
use crate::tokenizer::{Conventions, Tokenizer};
use hydra_core::{Dataset, DatasetError};
use std::path::Path;
use std::sync::Arc;

/// A dataset whose content can be compared.
pub trait Content: Dataset {
    /// Gives `to` all that its batches are made from, beside its form, piece by piece.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError>;

    /// The number of what its [`unit`](Dataset::unit) counts.
    fn units(&self) -> usize;

    /// What this context cuts off its items; nothing of items that have no length of their own.
    fn cut_by(&self, _context: usize) -> Cut {
        Cut::default()
    }
}

/// What a context cuts off examples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// The examples that are longer than the context.
    pub examples: usize,
    /// The tokens of theirs beyond it.
    pub tokens: usize,
    /// All examples.
    pub of_examples: usize,
    /// The tokens of all of them.
    pub of_tokens: usize,
    /// The tokens of the longest of them: the context that cuts off nothing.
    pub longest: usize,
}

impl Cut {
    /// What a context cuts off examples of these lengths.
    pub(super) fn of(lengths: &[u32], context: usize) -> Self {
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

/// Gives `to` lists of numbers, each after its length.
pub(super) fn numbers(lists: &[&[u32]], to: &mut dyn FnMut(&[u8])) {
    /// Numbers that are given at once.
    const PIECE: usize = 1 << 18;
    for list in lists {
        to(&(list.len() as i64).to_le_bytes());
        for some in list.chunks(PIECE) {
            let bytes: Vec<u8> = some.iter().flat_map(|number| number.to_le_bytes()).collect();
            to(&bytes);
        }
    }
}

/// Data for models that read tokens, in up to three splits.
#[derive(Clone, Debug)]
pub enum TokenSource {
    /// A text, which is cut into blocks.
    Text(Corpus),
    /// Examples of what a model is to say.
    Examples(ExampleFiles),
}

impl TokenSource {
    /// The data of a `--data` value: `builtin`, a file of rows or a directory with one for each split ([`ExampleFiles`], which
    /// takes the columns), or a text ([`Corpus`]).
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

    /// Returns whether there is this split.
    pub fn has(&self, split: Split) -> bool {
        match self {
            Self::Text(corpus) => corpus.has(split),
            Self::Examples(files) => files.has(split),
        }
    }

    /// These splits as datasets of one context. Blocks of a text are full and are never packed.
    ///
    /// # Errors
    /// Those of [`Corpus::blocks`], a split that is not there, a record that the model has no text for, and a split
    /// without anything to learn.
    pub fn splits(&self, splits: &[Split], form: &TokenForm<'_>) -> Result<TokenSplits, DataError> {
        match self {
            Self::Text(corpus) => {
                let context = form.context.block;
                let spec = BlockSpec { context, vocab_size: form.vocabulary };
                let blocks = |split: &Split| corpus.blocks(*split, form.tokenizer, spec);
                let splits = of(splits.iter().map(blocks).collect::<Result<Vec<_>, _>>()?);
                Ok(TokenSplits {
                    items: "blocks",
                    context,
                    cut: Cut::default(),
                    skipped: 0,
                    unlearned: 0,
                    packing: None,
                    tally: Tally::default(),
                    splits,
                })
            }
            Self::Examples(files) => examples(files, splits, form),
        }
    }
}

fn examples(files: &ExampleFiles, splits: &[Split], form: &TokenForm<'_>) -> Result<TokenSplits, DataError> {
    let encoded = splits.iter().map(|split| files.encode(*split, form)).collect::<Result<Vec<_>, _>>()?;
    let longest = encoded.iter().map(Encoded::longest).max().unwrap_or(0);
    // Of packed rows; the longest example fits.
    let row = form.context.block.max(longest);
    let mut tally = Tally::default();
    let dataset = |encoded: Encoded| {
        tally.add(&encoded.tally);
        Examples::new(encoded.name, encoded.examples, if form.pack { row } else { longest }, form)
    };
    let mut examples = encoded.into_iter().map(dataset).collect::<Result<Vec<_>, _>>()?;
    let context = examples.iter().map(Examples::longest).max().unwrap_or(longest);
    examples.iter_mut().for_each(|examples| examples.set_context(context));
    let (items, packing) = match form.pack {
        true => ("rows", examples.iter().map(Examples::packing).sum()),
        false => ("examples", None),
    };
    let cut = examples.iter().map(|examples| examples.cut_by(form.context.example)).sum();
    let skipped = examples.iter().map(Examples::skipped).sum();
    let unlearned = examples.iter().map(Examples::unlearned).sum();
    Ok(TokenSplits { items, context, cut, skipped, unlearned, packing, tally, splits: of(examples) })
}

fn of<T: Content + 'static>(splits: Vec<T>) -> Vec<Arc<dyn Content>> {
    splits.into_iter().map(|split| Arc::new(split) as Arc<dyn Content>).collect()
}

/// Splits of one source.
#[derive(Clone)]
pub struct TokenSplits {
    /// What an item is called, in the plural.
    pub items: &'static str,
    /// The tokens of an item, at most.
    pub context: usize,
    /// What is cut off examples.
    pub cut: Cut,
    /// Examples of which nothing that is learned lies within the context.
    pub skipped: usize,
    /// Examples of which nothing is learned at any context.
    pub unlearned: usize,
    /// How the examples of all these splits lie in rows, where they are packed.
    pub packing: Option<Packing>,
    /// What rows have that is not used.
    pub tally: Tally,
    /// The datasets, in the order in which they were asked for.
    pub splits: Vec<Arc<dyn Content>>,
}

/// The tokens that an item may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Those of a block of text, and those of a row of packed examples, unless an example is longer.
    pub block: usize,
    /// The most of an example: what is longer is cut.
    pub example: usize,
}

impl Context {
    /// The same for blocks and examples.
    pub fn of(tokens: usize) -> Self {
        Self { block: tokens, example: tokens }
    }
}

/// The form of datasets, and the model that they are for.
#[derive(Clone, Copy, Debug)]
pub struct TokenForm<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How its texts end and how conversations are written.
    pub conventions: &'a Conventions,
    /// The tokens of an item.
    pub context: Context,
    /// The number of ids that the model has.
    pub vocabulary: usize,
    /// What counts of an example.
    pub loss_on: LossOn,
    /// True if examples are packed: one item has as many as the context has room for, and none sees the others.
    pub pack: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn splits(source: &TokenSource, context: Context, pack: bool) -> TokenSplits {
        let tokenizer = Tokenizer::Bytes;
        let conventions = Conventions::of(&tokenizer, None).unwrap();
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
        assert_eq!(shapes(Context::of(99)), (7, vec![vec![1, 7]; 2]), "an end follows");
        assert_eq!(shapes(Context::of(5)), (5, vec![vec![1, 5]; 2]));
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
        assert_eq!(cut(Context::of(7), false), whole);
        assert_eq!(cut(Context { block: 3, example: 7 }, true), whole);
        assert_eq!(cut(Context::of(3), false), Cut { examples: 2, tokens: 5, ..whole });
        let splits = splits(&source, Context::of(3), false);
        let sum: Cut = splits.splits.iter().map(|split| split.cut_by(6)).sum();
        assert_eq!(sum, Cut { examples: 1, tokens: 1, ..whole }, "of what was there before");
    }

    #[test]
    fn splits_of_packed_rows_have_one_largest_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n".repeat(30)).unwrap();
        let source = TokenSource::load(path.to_str().unwrap(), &[]).unwrap();
        let TokenSplits { items, context, packing, splits, .. } = splits(&source, Context::of(22), true);
        assert_eq!((items, context), ("rows", 20), "five of four tokens, their ends among them");
        assert_eq!(packing, Some(Packing { examples: 27, rows: 6, tokens: 4 * 27 }));
        assert_eq!(splits.iter().map(|split| split.len()).collect::<Vec<_>>(), [5, 1]);
        assert_eq!(splits[1].largest(1).unwrap().inputs.parts[1].shape, [1, 20]);
    }

    #[test]
    fn a_text_is_blocks_of_the_most() {
        let source = TokenSource::load("builtin", &[]).unwrap();
        let splits = splits(&source, Context::of(64), false);
        assert_eq!((splits.context, splits.skipped, splits.items), (64, 0, "blocks"));
        assert!(splits.splits.iter().all(|split| split.units() > 1000));
    }
}
