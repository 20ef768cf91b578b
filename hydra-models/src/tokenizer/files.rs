//! Writes a model's tokenizer files next to the model.

use super::builtin::{self, BuiltIn};
use super::conventions::TEMPLATES;
use super::{Tokenizer, TokenizerError};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError, replace_file};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory's tokenizer and chat template files; existing ones are copied along with a written model.
const FILES: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
];

/// Writes a model together with the tokenizer that it was trained with, from a directory or built in.
pub struct TokenizerWriter {
    model: Arc<dyn ModelWriter>,
    tokenizer: Tokenizer,
    /// The directory that the model was loaded from.
    source: Option<PathBuf>,
}

impl TokenizerWriter {
    /// A writer that runs `model` and adds this tokenizer, or that of the model in `source`.
    pub fn new(model: Arc<dyn ModelWriter>, tokenizer: Tokenizer, source: Option<PathBuf>) -> Self {
        Self { model, tokenizer, source }
    }
}

impl ModelWriter for TokenizerWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        self.model.write(chain, buffers, dir)?;
        self.source.as_ref().map_or(Ok(()), |source| copy_tokenizer(source, dir))?;
        let which = match self.tokenizer {
            Tokenizer::Bytes => BuiltIn::Bytes,
            Tokenizer::Gpt2 => BuiltIn::Gpt2,
            Tokenizer::HuggingFace(_) | Tokenizer::Missing(_) => return Ok(()),
        };
        let files = builtin::files(which).map_err(|error| failed(dir, io::Error::other(error)))?;
        files.iter().try_for_each(|(name, text)| {
            let path = dir.join(name);
            replace_file(&path, |out| out.write_all(text.as_bytes())).map_err(|e| failed(&path, e))
        })
    }

    fn reads_parts(&self) -> bool {
        self.model.reads_parts()
    }
}

/// The `tokenizer.json` of a tokenizer: that of its directory, or one with the same tokens; `None` for a directory without
/// a tokenizer.
///
/// # Errors
/// A file that cannot be read, or a tokenizer that cannot be written as JSON.
pub(crate) fn tokenizer_json(
    tokenizer: &Tokenizer,
    directory: Option<&Path>,
) -> Result<Option<String>, TokenizerError> {
    let built_in = |which| Ok(builtin::files(which)?.into_iter().next().map(|(_, text)| text));
    match tokenizer {
        Tokenizer::Bytes => built_in(BuiltIn::Bytes),
        Tokenizer::Gpt2 => built_in(BuiltIn::Gpt2),
        Tokenizer::Missing(_) => Ok(None),
        Tokenizer::HuggingFace(tokenizer) => {
            let file =
                directory.map(|directory| directory.join("tokenizer.json")).filter(|file| file.is_file());
            let read = |file: PathBuf| {
                fs::read_to_string(&file).map_err(|source| TokenizerError::Read { path: file, source })
            };
            file.map_or_else(|| tokenizer.to_json(), read).map(Some)
        }
    }
}

/// The names of the tokenizer and chat template files that a directory has, relative to it.
///
/// # Errors
/// A directory of chat templates that cannot be read.
pub fn tokenizer_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let is_there = |name: &PathBuf| directory.join(name).is_file();
    let mut names: Vec<PathBuf> = FILES.iter().map(PathBuf::from).filter(is_there).collect();
    let templates = directory.join(TEMPLATES);
    if templates.is_dir() {
        for entry in fs::read_dir(templates)? {
            let name = Path::new(TEMPLATES).join(entry?.file_name());
            names.extend(name.extension().is_some_and(|ending| ending == "jinja").then_some(name));
        }
    }
    Ok(names)
}

/// Copies the existing tokenizer and chat template files of a directory.
///
/// # Errors
/// A file that cannot be read or written.
pub(crate) fn copy_tokenizer(source: &Path, dir: &Path) -> Result<(), WeightError> {
    let names = tokenizer_files(source).map_err(|e| failed(source, e))?;
    if names.iter().any(|name| name.starts_with(TEMPLATES)) {
        let templates = dir.join(TEMPLATES);
        fs::create_dir_all(&templates).map_err(|e| failed(&templates, e))?;
    }
    copy_files(source, dir, &names)
}

/// Replaces the tokenizer and chat template files of a model's directory by those of another directory.
///
/// # Errors
/// A file that cannot be read, written or removed.
pub fn replace_tokenizer(source: &Path, dir: &Path) -> Result<(), WeightError> {
    let old = tokenizer_files(dir).map_err(|e| failed(dir, e))?;
    let remove = |path: PathBuf| fs::remove_file(&path).map_err(|e| failed(&path, e));
    old.iter().map(|name| dir.join(name)).try_for_each(remove)?;
    copy_tokenizer(source, dir)
}

/// Copies these files of a directory, if they exist.
///
/// # Errors
/// A file that cannot be read or written.
pub(crate) fn copy_files(source: &Path, dir: &Path, names: &[impl AsRef<Path>]) -> Result<(), WeightError> {
    for name in names {
        let (from, to) = (source.join(name), dir.join(name));
        if from.is_file() && !same_file(&from, &to) {
            let copy = |out: &mut File| io::copy(&mut File::open(&from)?, out).map(drop);
            replace_file(&to, copy).map_err(|e| failed(&to, e))?;
        }
    }
    Ok(())
}

fn failed(path: &Path, source: io::Error) -> WeightError {
    WeightError::Write { path: path.to_owned(), source: source.into() }
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
