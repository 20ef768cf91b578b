//! Errors of a tokenizer and of the text it is given.

use std::path::PathBuf;

/// A tokenizer that cannot be had, or a text it cannot encode.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum TokenizerError {
    /// The directory that should hold the tokenizer is missing.
    #[error("`{path}` is not a directory: give the directory that holds the model's files", path = directory.display())]
    NotADirectory { directory: PathBuf },
    /// A tokenizer file could not be read.
    #[error("the tokenizer file `{path}` could not be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A tokenizer file is not what its name says.
    #[error("the tokenizer file `{path}` is broken: replace it by the model's original one", path = path.display())]
    Parse { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// The token that ends a text is in no vocabulary.
    #[error("`{path}` says that `{token}` ends a text, and the tokenizer has no such token", path = path.display())]
    UnknownEnd { path: PathBuf, token: String },
    /// A chat template is none.
    #[error("the chat template in `{path}` is broken: replace it by the model's original one", path = path.display())]
    Template { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// A chat template did not write a conversation.
    #[error("the chat template in `{template}` could not write the conversation")]
    Render { template: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// One of `vocab.json` and `merges.txt` stands alone.
    #[error("`{directory}` has `{found}` but no `{missing}`; a byte-pair tokenizer needs both", directory = directory.display())]
    Incomplete { directory: PathBuf, found: &'static str, missing: &'static str },
    /// A directory without a tokenizer, or with one of a form that is not read.
    #[error("`{directory}` has {} and no `tokenizer.json`: {}", found.as_deref().unwrap_or("weights"), way_out(directory, found.is_some()), directory = directory.display())]
    NoTokenizer {
        directory: PathBuf,
        /// What it has in place of one, in words.
        found: Option<String>,
    },
    /// Several chat templates, none of which is the one that is used where nothing asks for another.
    #[error(
        "the chat templates of `{template}` are {names} and none is `default`: rename one, or give rows with `tools` if one is `tool_use`"
    )]
    NoDefaultTemplate { template: String, names: String },
    /// A column is not what the chat template is given as.
    #[error(
        "the column `{column}` has {found}, expected {expected}: change the rows, or leave the column out"
    )]
    TemplateColumn { column: String, found: String, expected: String },
    /// A line of `merges.txt` is not two tokens.
    #[error("line {line} of `{path}` is `{found}`, expected two tokens with a space between them", path = path.display())]
    Merge {
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        found: String,
    },
    /// A model without a tokenizer of its own has fewer ids than bytes.
    #[error(
        "the model has a vocabulary of {vocab_size} and no tokenizer files, and a byte-level tokenizer needs {smallest} ids: \
         add `tokenizer.json` (or `vocab.json` and `merges.txt`) to the model's directory"
    )]
    VocabularyTooSmall {
        vocab_size: usize,
        /// The smallest one that bytes fit.
        smallest: usize,
    },
    /// A built-in tokenizer has more ids than the model that it was asked for.
    #[error(
        "the tokenizer `{name}` needs {smallest} ids and the model has a vocabulary of {vocab_size}: leave --tokenizer out, or give another"
    )]
    TooFewIds { name: String, vocab_size: usize, smallest: usize },
    /// A run of white space that the byte-pair splitter cannot take.
    #[error("the text has {found} bytes of white space in a row, at most {limit} are taken: is it a text?")]
    WhitespaceRun {
        /// The longest run, in bytes.
        found: usize,
        /// The longest that is taken, in bytes.
        limit: usize,
    },
    /// A directory's tokenizer refused a text.
    #[error("the tokenizer `{tokenizer}` could not encode the text that begins with {start:?}")]
    Encode {
        tokenizer: String,
        /// The first characters of the text.
        start: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A directory's tokenizer could not turn ids into text.
    #[error("the tokenizer `{tokenizer}` could not decode {ids} ids")]
    Decode { tokenizer: String, ids: usize, source: Box<dyn std::error::Error + Send + Sync> },
}

/// What to do about a directory without a tokenizer that is read. Transformers can convert what it has.
fn way_out(directory: &std::path::Path, convertible: bool) -> String {
    let directory = directory.display();
    let convert = format!(
        "write it with `python -c \"from transformers import AutoTokenizer as T; \
         T.from_pretrained('{directory}').save_pretrained('{directory}')\"`, or "
    );
    format!(
        "{}copy the tokenizer's files from the model's original, or give rows of token ids (`input_ids`), or --tokenizer bytes \
         if the model's ids are bytes",
        if convertible { &convert } else { "" }
    )
}
