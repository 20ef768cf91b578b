//! What `--data` names: a text, or examples.

use super::{BlockSpec, Corpus, DataError, ExampleFiles, Examples, LossOn, Packing, Remarks, Split};
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
    /// The data of a `--data` value: `builtin`, a file `*.jsonl` or `*.parquet`, or a directory with one for each split
    /// ([`ExampleFiles`]), or a text ([`Corpus`]).
    ///
    /// # Errors
    /// Those of [`ExampleFiles::open`] and of [`Corpus::load`].
    pub fn load(data: &str) -> Result<Self, DataError> {
        let path = Path::new(data);
        match ExampleFiles::are_at(path) {
            true => ExampleFiles::open(path).map(Self::Examples),
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
    /// Those of [`Corpus::blocks`] and of [`ExampleFiles::examples`].
    pub fn splits(&self, splits: &[Split], form: &TokenForm<'_>) -> Result<TokenSplits, DataError> {
        let context = form.context.most();
        match self {
            Self::Text(corpus) => {
                let spec = BlockSpec { context, vocab_size: form.vocabulary };
                let blocks = |split: &Split| corpus.blocks(*split, form.tokenizer, spec);
                let blocks = splits.iter().map(blocks).collect::<Result<Vec<_>, _>>()?;
                Ok(TokenSplits {
                    items: "blocks",
                    context,
                    left_out: 0,
                    remarks: Remarks::default(),
                    packing: None,
                    splits: of(blocks),
                })
            }
            Self::Examples(files) => {
                let examples = |split: &Split| files.examples(*split, form);
                let mut examples = splits.iter().map(examples).collect::<Result<Vec<_>, _>>()?;
                let longest = examples.iter().map(Examples::longest).max().unwrap_or(context);
                let context = form.context.of(longest);
                examples.iter_mut().for_each(|examples| examples.set_context(context));
                let mut remarks = Remarks::default();
                examples.iter().for_each(|examples| remarks.extend(examples.remarks().clone()));
                let left_out = examples.iter().map(Examples::left_out).sum();
                let (items, packing) = match form.pack {
                    true => ("rows", examples.iter().map(Examples::packing).sum()),
                    false => ("examples", None),
                };
                Ok(TokenSplits { items, context, left_out, remarks, packing, splits: of(examples) })
            }
        }
    }
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
    /// Examples of which nothing counts within the context.
    pub left_out: usize,
    /// What is to be said of the examples of all these splits.
    pub remarks: Remarks,
    /// How the examples of all these splits lie in rows, where they are packed.
    pub packing: Option<Packing>,
    /// The datasets, in the order in which they were asked for.
    pub splits: Vec<Arc<dyn Content>>,
}

/// The tokens that an item may have, and that there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// So many, whether an item has them or not.
    Exactly(usize),
    /// As many as the longest item has, up to so many; so many in blocks of a text.
    AtMost(usize),
}

impl Context {
    /// The most tokens that an item may have.
    pub fn most(self) -> usize {
        let (Self::Exactly(most) | Self::AtMost(most)) = self;
        most
    }

    /// The tokens of items of which the longest has so many.
    fn of(self, longest: usize) -> usize {
        match self {
            Self::Exactly(context) => context,
            Self::AtMost(most) => longest.min(most),
        }
    }
}

/// The form of datasets, and the model that they are for.
#[derive(Clone, Copy, Debug)]
pub struct TokenForm<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How its texts end and how conversations are written.
    pub conventions: &'a Conventions,
    /// The tokens of an item: what is longer is cut.
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
        let source = TokenSource::load(path.to_str().unwrap()).unwrap();
        let shapes = |context| {
            let TokenSplits { items, context, splits, .. } = splits(&source, context, false);
            assert_eq!(items, "examples");
            let shape = |split: &Arc<dyn Content>| split.largest(1).unwrap().inputs.parts[0].shape.clone();
            (context, splits.iter().map(shape).collect::<Vec<_>>())
        };
        assert_eq!(shapes(Context::AtMost(99)), (7, vec![vec![1, 7]; 2]), "an end follows");
        assert_eq!(shapes(Context::AtMost(5)), (5, vec![vec![1, 5]; 2]));
        assert_eq!(shapes(Context::Exactly(12)), (12, vec![vec![1, 12]; 2]));
    }

    #[test]
    fn splits_of_packed_rows_have_one_largest_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n".repeat(30)).unwrap();
        let source = TokenSource::load(path.to_str().unwrap()).unwrap();
        let TokenSplits { items, context, packing, splits, .. } = splits(&source, Context::AtMost(22), true);
        assert_eq!((items, context), ("rows", 20), "five of four tokens, their ends among them");
        assert_eq!(packing, Some(Packing { examples: 27, rows: 6, tokens: 4 * 27 }));
        assert_eq!(splits.iter().map(|split| split.len()).collect::<Vec<_>>(), [5, 1]);
        assert_eq!(splits[1].largest(1).unwrap().inputs.parts[1].shape, [1, 20]);
    }

    #[test]
    #[cfg(not(feature = "parquet"))]
    fn a_file_of_parquet_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("train.parquet");
        fs::write(&path, "PAR1").unwrap();
        for data in [path.as_path(), dir.path()] {
            let said = TokenSource::load(data.to_str().unwrap()).unwrap_err().to_string();
            assert!(said.contains("train.parquet` is a Parquet file"), "{said}");
            assert!(said.contains("--features parquet") && said.contains("FILE.jsonl"), "{said}");
        }
    }

    #[test]
    fn a_text_is_blocks_of_the_most() {
        let source = TokenSource::load("builtin").unwrap();
        let splits = splits(&source, Context::AtMost(64), false);
        assert_eq!((splits.context, splits.left_out, splits.items), (64, 0, "blocks"));
        assert!(splits.splits.iter().all(|split| split.units() > 1000));
    }
}
