//! What `--data` names: a text, or examples.

use super::{BlockSpec, Corpus, DataError, ExampleFiles, Examples, LossOn, Split};
use crate::tokenizer::{Conventions, Tokenizer};
use hydra_core::Dataset;
use std::path::Path;
use std::sync::Arc;

/// A dataset of tokens whose content can be compared.
pub trait Tokens: Dataset {
    /// All that its batches are made from, beside its form.
    fn content(&self) -> Vec<&[u32]>;

    /// The number of its tokens.
    fn tokens(&self) -> usize;
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
    /// The data of a `--data` value: `builtin`, a file `*.jsonl` or a directory with one for each split
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

    /// What an item of its datasets is called, in the plural.
    pub fn items(&self) -> &'static str {
        match self {
            Self::Text(_) => "blocks",
            Self::Examples(_) => "examples",
        }
    }

    /// These splits as datasets of one context.
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
                Ok(TokenSplits { context, left_out: 0, splits: of(blocks) })
            }
            Self::Examples(files) => {
                let examples = |split: &Split| files.examples(*split, form);
                let mut examples = splits.iter().map(examples).collect::<Result<Vec<_>, _>>()?;
                let longest = examples.iter().map(Examples::longest).max().unwrap_or(context);
                let context = form.context.of(longest);
                examples.iter_mut().for_each(|examples| examples.fill_up_to(context));
                let left_out = examples.iter().map(Examples::left_out).sum();
                Ok(TokenSplits { context, left_out, splits: of(examples) })
            }
        }
    }
}

fn of<T: Tokens + 'static>(splits: Vec<T>) -> Vec<Arc<dyn Tokens>> {
    splits.into_iter().map(|split| Arc::new(split) as Arc<dyn Tokens>).collect()
}

/// Splits of one source.
#[derive(Clone)]
pub struct TokenSplits {
    /// The tokens of an item.
    pub context: usize,
    /// Examples of which nothing counts within the context.
    pub left_out: usize,
    /// The datasets, in the order in which they were asked for.
    pub splits: Vec<Arc<dyn Tokens>>,
}

/// The tokens of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// So many, to which short examples are filled up.
    Exactly(usize),
    /// As many as the longest example has, up to so many; so many in blocks of a text.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn splits(source: &TokenSource, context: Context) -> TokenSplits {
        let tokenizer = Tokenizer::Bytes;
        let conventions = Conventions::of(&tokenizer, None).unwrap();
        let (tokenizer, conventions, loss_on) = (&tokenizer, &conventions, LossOn::Completions);
        let form = TokenForm { tokenizer, conventions, context, vocabulary: 256, loss_on };
        source.splits(&[Split::Train, Split::Test], &form).unwrap()
    }

    #[test]
    fn items_of_all_splits_have_one_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n{\"text\": \"d\"}\n{\"text\": \"abcdef\"}\n").unwrap();
        let source = TokenSource::load(path.to_str().unwrap()).unwrap();
        let shapes = |context| {
            let TokenSplits { context, splits, .. } = splits(&source, context);
            let shape = |split: &Arc<dyn Tokens>| split.batch(&[0]).unwrap().inputs.parts[0].shape.clone();
            (context, splits.iter().map(shape).collect::<Vec<_>>())
        };
        assert_eq!(shapes(Context::AtMost(99)), (7, vec![vec![1, 7]; 2]), "an end follows");
        assert_eq!(shapes(Context::AtMost(5)), (5, vec![vec![1, 5]; 2]));
        assert_eq!(shapes(Context::Exactly(12)), (12, vec![vec![1, 12]; 2]));
        assert_eq!(source.items(), "examples");
    }

    #[test]
    fn a_text_is_blocks_of_the_most() {
        let source = TokenSource::load("builtin").unwrap();
        let splits = splits(&source, Context::AtMost(64));
        assert_eq!((splits.context, splits.left_out, source.items()), (64, 0, "blocks"));
        assert!(splits.splits.iter().all(|split| split.tokens() > 1000));
    }
}
