//! Errors of tokenizers.

use std::path::PathBuf;

/// A tokenizer that cannot be loaded, or a text that it cannot encode.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum TokenizerError {
    /// The model directory does not exist.
    #[error("`{path}` is not a directory: pass the directory with the model's files", path = directory.display())]
    NotADirectory { directory: PathBuf },
    /// A tokenizer file could not be read.
    #[error("the tokenizer file `{path}` could not be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A tokenizer file is invalid.
    #[error("the tokenizer file `{path}` is invalid: replace it with the model's original file", path = path.display())]
    Parse { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// The end-of-text token is not in the vocabulary.
    #[error("`{path}` sets the end-of-text token `{token}`, which the tokenizer does not have", path = path.display())]
    UnknownEnd { path: PathBuf, token: String },
    /// A chat template is invalid.
    #[error("the chat template in `{path}` is invalid: replace it with the model's original file", path = path.display())]
    Template { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// A chat template failed to render a conversation.
    #[error("the chat template in `{template}` failed to render the conversation")]
    Render { template: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// Only one of `vocab.json` and `merges.txt` exists.
    #[error("`{directory}` has `{found}` but no `{missing}`: a byte-pair tokenizer requires both", directory = directory.display())]
    Incomplete { directory: PathBuf, found: &'static str, missing: &'static str },
    /// A directory without a tokenizer, or with one in an unsupported format.
    #[error("`{directory}` has {} and no `tokenizer.json`: {}", found.as_deref().unwrap_or("weights"), conversion_advice(directory, found.is_some()), directory = directory.display())]
    NoTokenizer {
        directory: PathBuf,
        /// A description of the unsupported tokenizer.
        found: Option<String>,
    },
    /// Several chat templates, none of which is the default.
    #[error(
        "`{template}` has the chat templates {names}, but none is named `default`: rename one; a template named `tool_use` applies to rows with `tools`"
    )]
    NoDefaultTemplate { template: String, names: String },
    /// A column that the chat template cannot take.
    #[error("the column `{column}` has {found}, expected {expected}: change or remove the column")]
    TemplateColumn { column: String, found: String, expected: String },
    /// A line of `merges.txt` that is not two tokens.
    #[error("line {line} of `{path}` is `{found}`, expected two tokens separated by a space", path = path.display())]
    Merge {
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        found: String,
    },
    /// A model without tokenizer files that has fewer ids than bytes.
    #[error(
        "the model has a vocabulary of {vocab_size} and no tokenizer files, but the byte tokenizer requires {smallest} ids: \
         add `tokenizer.json` (or `vocab.json` and `merges.txt`) to the model's directory"
    )]
    VocabularyTooSmall {
        vocab_size: usize,
        /// The smallest vocabulary for bytes.
        smallest: usize,
    },
    /// A built-in tokenizer with more ids than the model.
    #[error(
        "the tokenizer `{name}` requires {smallest} ids, but the model has a vocabulary of {vocab_size}: omit --tokenizer, or choose another"
    )]
    TooFewIds { name: String, vocab_size: usize, smallest: usize },
    /// A run of white space that is too long for the byte-pair splitter.
    #[error(
        "the text has a run of {found} bytes of white space, the limit is {limit}: check that the file is text"
    )]
    WhitespaceRun {
        /// The longest run, in bytes.
        found: usize,
        /// The maximum, in bytes.
        limit: usize,
    },
    /// A context that the added tokens leave nothing of.
    #[error(
        "a context of {most} has no space for a text, to which the tokenizer adds {added} tokens: use at least {}",
        added + 1
    )]
    ContextTooShort {
        /// The context, in tokens.
        most: usize,
        /// The number of added tokens.
        added: usize,
    },
    /// A directory's tokenizer failed to encode a text.
    #[error("the tokenizer `{tokenizer}` could not encode the text starting with {start:?}")]
    Encode {
        tokenizer: String,
        /// The first characters of the text.
        start: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A directory's tokenizer failed to decode ids.
    #[error("the tokenizer `{tokenizer}` could not decode {ids} ids")]
    Decode { tokenizer: String, ids: usize, source: Box<dyn std::error::Error + Send + Sync> },
}

/// Advice for a directory without a readable tokenizer; Transformers may be able to convert it.
fn conversion_advice(directory: &std::path::Path, convertible: bool) -> String {
    let directory = directory.display();
    let convert = format!(
        "convert it with `python -c \"from transformers import AutoTokenizer as T; \
         T.from_pretrained('{directory}').save_pretrained('{directory}')\"`, or "
    );
    format!(
        "{}copy the original model's tokenizer files, or use rows of token ids (`input_ids`), or --tokenizer bytes \
         if the model's ids are bytes",
        if convertible { &convert } else { "" }
    )
}
