//! Models that GGUF files cannot hold.

use crate::ModelError;
use crate::family::Reads;
use crate::tokenizer::TokenizerError;
use std::path::PathBuf;

/// A model that cannot be written as GGUF.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum GgufError {
    /// The model cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A kind of model without a GGUF architecture.
    #[error(
        "the model is {found}, and GGUF files are written of language models of type gpt2, llama, mistral, qwen2 and qwen3: use \
         --format safetensors"
    )]
    Architecture { found: String },
    /// A setting that llama.cpp does not compute.
    #[error(
        "`{name}` is {found}, and llama.cpp computes the model only with {expected}: use --format safetensors"
    )]
    Setting { name: &'static str, found: String, expected: &'static str },
    /// Adapters with other values than factors of matrices.
    #[error("a GGUF file of adapters cannot hold {found}: pass --merge to write the whole model")]
    Adapters { found: String },
    /// A model without a tokenizer that can be written.
    #[error(
        "`{directory}` has no tokenizer that a GGUF file can hold: {found}; expected a byte-level BPE `tokenizer.json` (or \
         `vocab.json` with `merges.txt`), or a BPE with byte fallback: add one, or use --format safetensors",
        directory = directory.display()
    )]
    NoTokenizer { directory: PathBuf, found: String },
    /// A tokenizer with more tokens than the model.
    #[error(
        "the tokenizer has the id {id}, but the model has {vocabulary} ids: use the tokenizer of the model"
    )]
    TooManyTokens { id: u64, vocabulary: usize },
}

impl GgufError {
    /// The error for a model with these inputs, if its architecture has no GGUF form.
    pub(crate) fn reads(inputs: Reads) -> Self {
        let found = match inputs {
            Reads::Tokens { .. } => "a text encoder",
            Reads::Images { .. } => "a model that reads images",
            Reads::Batches => "a model of another program",
        };
        Self::Architecture { found: found.to_owned() }
    }
}
