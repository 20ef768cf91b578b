//! The model and the texts that a spec names.

use crate::settings::ModelSettings;
use crate::terminal::{Usage, tell};
use anyhow::{Context, Result};
use hydra_core::{Chain, Dataset, FirstItems, ModelWriter};
use hydra_models::data::{BlockSpec, Corpus, Records, Split, TokenBlocks};
use hydra_models::family::{self, Reads};
use hydra_models::tokenizer::Tokenizer;
use std::path::PathBuf;
use std::sync::Arc;

/// The context when nobody says which, if the model has so many positions.
const DEFAULT_CONTEXT: usize = 512;

/// A model with its tokenizer, as a preset, a file or a directory describes it.
pub(crate) struct Model {
    pub(crate) chain: Arc<Chain>,
    pub(crate) writer: Arc<dyn ModelWriter>,
    /// The tokens of a block.
    pub(crate) context: usize,
    model: Box<dyn family::Model>,
    tokenizer: Tokenizer,
    /// The files that its weights are in, if it has some.
    pub(crate) files: Vec<PathBuf>,
}

impl Model {
    /// Reads the model of a spec. Weights are checked now and read when a task begins.
    pub(crate) fn load(spec: &ModelSettings) -> Result<Self> {
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        let mut model = family::load(spec.name()).with_context(failed)?;
        spec.dropout.into_iter().for_each(|dropout| model.set_dropout(dropout));
        let Reads::Tokens { vocabulary, .. } = model.reads();
        let tokenizer = Tokenizer::for_model(model.directory(), vocabulary).with_context(failed)?;
        let chain = model.chain().with_context(failed)?.with_float_type(spec.dtype);
        let context = context_of(model.reads(), spec.context)?;
        let (writer, files) = (model.writer(), model.files());
        Ok(Self { chain: Arc::new(chain), writer, context, model, tokenizer, files })
    }

    /// All that its configuration says of what is computed and drawn.
    pub(crate) fn described(&self) -> Result<String> {
        Ok(self.model.description()?.to_string())
    }

    pub(crate) fn blocks(&self, corpus: &Corpus, split: Split) -> Result<TokenBlocks> {
        let Reads::Tokens { vocabulary: vocab_size, .. } = self.model.reads();
        let form = BlockSpec { context: self.context, vocab_size };
        Ok(corpus.blocks(split, &self.tokenizer, form)?)
    }

    /// The texts of a corpus; validation and test may be missing.
    pub(crate) fn texts(&self, data: &str) -> Result<Texts> {
        let corpus = Corpus::load(data)?;
        note_of_records(&corpus).as_deref().into_iter().for_each(tell);
        let blocks = |split| self.blocks(&corpus, split).map(Arc::new);
        let optional = |split| corpus.has(split).then(|| blocks(split)).transpose();
        Ok(Texts {
            train: blocks(Split::Train)?,
            validation: optional(Split::Validation)?,
            test: optional(Split::Test)?,
        })
    }
}

/// The texts that a run trains on and is measured on.
pub(crate) struct Texts {
    pub(crate) train: Arc<TokenBlocks>,
    pub(crate) validation: Option<Arc<TokenBlocks>>,
    pub(crate) test: Option<Arc<TokenBlocks>>,
}

impl Texts {
    /// The validation and the test data: all blocks, or the first ones.
    pub(crate) fn evaluated(&self, limit: Option<usize>) -> [Option<Arc<dyn Dataset>>; 2] {
        [&self.validation, &self.test].map(|blocks| {
            let blocks = blocks.clone()?;
            Some(match limit {
                Some(most) => Arc::new(FirstItems::new(blocks, most)),
                None => blocks as Arc<dyn Dataset>,
            })
        })
    }

    pub(crate) fn tokens(&self) -> [Option<&[u32]>; 3] {
        [Some(&self.train), self.validation.as_ref(), self.test.as_ref()].map(|blocks| Some(blocks?.tokens()))
    }
}

/// The note on a minibatch that is larger than the training text.
pub(crate) fn note_of_batch(batch: usize, blocks: usize, context: usize) -> Option<String> {
    (batch > blocks).then(|| {
        format!(
            "note: batch {batch} is more than the training text has, {blocks} blocks of {context} tokens: every \
             minibatch is the whole text; give a smaller --batch, a shorter --context or more --data"
        )
    })
}

/// The names that a note lists at most.
const NAMES: usize = 6;

/// The note on a file of records, of which every character is trained on as if it were text.
pub(crate) fn note_of_records(corpus: &Corpus) -> Option<String> {
    let name = corpus.name();
    let (found, field) = match corpus.records()? {
        Records::JsonLines { fields } => {
            (format!("JSON in every line{}", named("fields", &fields)), fields.into_iter().next())
        }
        Records::Json => ("one value of JSON".to_owned(), None),
        Records::Table { separator: ',', columns } => {
            (format!("a table with commas between its columns{}", named("names", &columns)), None)
        }
        Records::Table { columns, .. } => {
            (format!("a table with tabs between its columns{}", named("names", &columns)), None)
        }
    };
    let text = "write what is to be learned into a text file and give that";
    let how = field.map_or(text.to_owned(), |field| {
        format!("{text}, such as with: jq -r '.[\"{field}\"]' {name} > text.txt")
    });
    Some(format!(
        "note: `{name}` is read as plain text, punctuation and names of fields and all; it has {found}: {how}"
    ))
}

/// The first of some names, in words.
fn named(what: &str, names: &[String]) -> String {
    let some: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > NAMES { " .." } else { "" };
    if some.is_empty() { String::new() } else { format!(" with the {what} {}{more}", some.join(", ")) }
}

/// The context that was asked for, if the model has the positions, or the default.
pub(crate) fn context_of(
    Reads::Tokens { positions, .. }: Reads,
    asked: Option<usize>,
) -> Result<usize, Usage> {
    let context = asked.unwrap_or(positions.min(DEFAULT_CONTEXT));
    if context <= positions {
        return Ok(context);
    }
    Err(Usage::new(format!(
        "--context {context} is longer than the model, which has {positions} positions: give --context {positions} \
         or less"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_fits_the_positions() {
        let context = |asked, positions| context_of(Reads::Tokens { positions, vocabulary: 256 }, asked);
        assert_eq!(context(None, 128).unwrap(), 128);
        assert_eq!(context(None, 1024).unwrap(), 512);
        assert_eq!(context(Some(1024), 1024).unwrap(), 1024);
        let error = context(Some(129), 128).unwrap_err().to_string();
        assert!(error.contains("129") && error.contains("128 positions"), "{error}");
    }

    #[test]
    fn a_batch_beyond_the_text_is_said() {
        assert_eq!(note_of_batch(8, 8, 32), None);
        let note = note_of_batch(9, 8, 32).unwrap();
        assert!(note.contains("batch 9") && note.contains("8 blocks of 32 tokens"), "{note}");
        assert!(!note.contains('\n'), "one line");
    }

    #[test]
    fn records_are_said_with_what_they_have() {
        let dir = tempfile::tempdir().unwrap();
        let note = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).unwrap();
            note_of_records(&Corpus::open(&dir.path().join(name)).unwrap())
        };
        let lines =
            note("a.jsonl", &"{\"id\": 7, \"prompt\": \"why\", \"answer\": \"so\"}\n".repeat(9)).unwrap();
        for part in [
            "is read as plain text",
            "the fields `answer`, `prompt`, `id`",
            "jq -r '.[\"answer\"]'",
            "a.jsonl > text",
        ] {
            assert!(lines.contains(part), "{part} in {lines}");
        }
        let table = note("a.csv", &"a,b,c,d,e,f,g\n".repeat(9)).unwrap();
        assert!(
            table.contains(
                "a table with commas between its columns with the names `a`, `b`, `c`, `d`, `e`, `f` ..:"
            ),
            "{table}"
        );
        assert!(note("a.json", "[\n1,\n2,\n3\n]\n").unwrap().contains("it has one value of JSON: write"));
        assert_eq!(note("a.txt", "some words, and more\n"), None);
        assert_eq!(note_of_records(&Corpus::builtin()), None);
    }
}
