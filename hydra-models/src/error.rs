//! Errors of model configurations and files.

use hydra_core::CoreError;
use std::path::PathBuf;

/// A model that cannot be built, read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum ModelError {
    /// An invalid chain.
    #[error("the chain could not be built")]
    Chain(#[from] CoreError),
    /// An unknown model name.
    #[error(
        "`{found}` is not a model: expected {names}, a configuration `FILE.json`, a Hugging Face directory, or the name of a \
         model in the Hugging Face cache, such as org/name",
        names = known.join(", ")
    )]
    UnknownPreset { found: String, known: Vec<&'static str> },
    /// Neither a directory nor a possible repository name.
    #[error(
        "`{found}` is neither a directory nor the name of a repository on the Hugging Face hub, such as org/name"
    )]
    NoDirectory { found: String },
    /// A repository that is not in the Hugging Face cache at this revision.
    #[error(
        "`{name}` is not a directory, and the Hugging Face cache `{cache}` does not have {what}: download it with \
         `{download}`{others}",
        cache = cache.display(), what = at_revision(revision), others = cached(name, commits)
    )]
    NotCached {
        name: String,
        /// The branch, the tag or the commit.
        revision: String,
        cache: PathBuf,
        /// The repository's commits in the cache.
        commits: Box<[String]>,
        /// The download command.
        download: String,
    },
    /// A snapshot in the Hugging Face cache with missing files.
    #[error(
        "the Hugging Face cache has only some files of `{name}` in `{directory}`: download the rest with `{download}`",
        directory = directory.display()
    )]
    Incomplete {
        name: String,
        directory: PathBuf,
        /// The download command.
        download: String,
        source: Box<ModelError>,
    },
    /// An invalid or unsupported value.
    #[error("`{name}` is {found}, expected {expected}")]
    Config { name: &'static str, found: String, expected: String },
    /// Classes that the model's weights do not have.
    #[error(
        "the model `{model}` has {}, but the data has {found}: use data of the model's classes, or \
         a model whose head is not trained yet, which takes the data's classes",
        classes(expected), model = model.display(), found = listed(found)
    )]
    Classes { model: PathBuf, expected: Vec<String>, found: Vec<String> },
    /// A model that is not a classifier.
    #[error(
        "the data has {found} classes, but the model cannot predict them: use a model that reads images for images, and a language \
         model or a text encoder for texts"
    )]
    NoClassifier { found: usize },
    /// A family without adapter support.
    #[error(
        "models of type {model_type} cannot be trained with adapters: omit --lora and --adapter, or train some layers with --train"
    )]
    NoAdapters { model_type: &'static str },
    /// A directory without adapters.
    #[error(
        "`{file}` does not exist: pass the directory of adapters that a task of a run, or PEFT's `save_pretrained`, wrote{places}",
        file = file.display(), places = among(found)
    )]
    NoAdapter {
        file: PathBuf,
        /// The directories below that have adapters.
        found: Box<[PathBuf]>,
    },
    /// An adapter configuration with an invalid or unsupported value.
    #[error("`{path}` describes adapters that Hydra does not support", path = path.display())]
    AdapterConfig { path: PathBuf, source: Box<ModelError> },
    /// Adapters in an unsupported file format.
    #[error(
        "`{path}` is not supported, only adapter_model.safetensors: convert it with `python -c \"from peft.utils import \
         load_peft_weights as l; from safetensors.torch import save_file as s; d = '{directory}'; s({{k: v.contiguous() for k, \
         v in l(d, device='cpu').items()}}, d + '/adapter_model.safetensors')\"`",
        path = path.display(), directory = directory.display()
    )]
    AdapterFile { path: PathBuf, directory: PathBuf },
    /// Adapters whose base model is not found.
    #[error(
        "`{path}` contains adapters, and their configuration names {found} as the base model: pass the base with --model BASE and the \
         adapters with --adapter {path}",
        path = path.display()
    )]
    AdapterBase { path: PathBuf, found: String },
    /// A configuration file with an invalid or unsupported value.
    #[error("`{path}` describes a model that Hydra does not support", path = path.display())]
    ConfigFile { path: PathBuf, source: Box<ModelError> },
    /// A file that could not be read.
    #[error("`{path}` could not be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file that is not the expected JSON.
    #[error("`{path}` is not valid: replace it with the model's original file", path = path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A configuration that JSON cannot represent.
    #[error("the configuration could not be written as JSON")]
    Describe { source: serde_json::Error },
    /// A directory without weights.
    #[error(
        "`{directory}` has no weights: expected {names}; convert others with `save_pretrained`",
        directory = directory.display(), names = looked_for.join(" or ")
    )]
    NoWeights { directory: PathBuf, looked_for: Vec<&'static str> },
    /// A file listed in the index does not exist.
    #[error("`{index}` lists the file `{file}`, which is missing: download it too", index = index.display())]
    ShardMissing { index: PathBuf, file: String },
    /// A required tensor that is in no file.
    #[error("`{place}` has no tensor `{tensor}`: it belongs to another model or is incomplete", place = place.display())]
    TensorMissing { place: PathBuf, tensor: String },
    /// Two tensors for one parameter.
    #[error(
        "`{path}` has `{tensor}`, and `{other_path}` has `{other}` for the same parameter: remove one of them",
        path = path.display(), other_path = other_path.display()
    )]
    TensorTwice {
        path: PathBuf,
        tensor: String,
        /// The second tensor's file.
        other_path: PathBuf,
        other: String,
    },
    /// A tensor that the model does not have.
    #[error("`{path}` has the tensor `{tensor}`, but chain `{chain}` has no such parameter: it belongs to another model", path = path.display())]
    TensorUnknown { path: PathBuf, tensor: String, chain: String },
    /// A fresh part that neither the chain nor the file has.
    #[error("neither chain `{chain}` nor `{path}` has a layer or parameter `{part}` to initialize: check its spelling", path = path.display())]
    PartUnknown { path: PathBuf, part: String, chain: String },
    /// A tensor with an unexpected shape.
    #[error("`{path}`: tensor `{tensor}` has shape {found:?}, expected {expected:?}", path = path.display())]
    Shape { path: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },
    /// A tensor with an unsupported type.
    #[error("`{path}`: tensor `{tensor}` has type {found}, expected F32, F16 or BF16", path = path.display())]
    Type { path: PathBuf, tensor: String, found: String },
    /// A file with an invalid header.
    #[error("`{path}` is not a safetensors file or is damaged: download it again", path = path.display())]
    Header { path: PathBuf, source: safetensors::SafeTensorError },
    /// A file whose length does not match its header.
    #[error("`{path}` is damaged: it has {found} bytes, but its header requires {expected}; download it again", path = path.display())]
    Length { path: PathBuf, expected: u64, found: u64 },
}

/// What is missing from the cache: the repository or its revision.
fn at_revision(revision: &str) -> String {
    if revision == "main" { "it".to_owned() } else { format!("its revision `{revision}`") }
}

/// The other cached commits of a repository.
fn cached(name: &str, commits: &[String]) -> String {
    let names: Vec<String> = commits.iter().map(|commit| format!("{name}@{commit}")).collect();
    if names.is_empty() { String::new() } else { format!(", or use a cached revision: {}", joined(&names)) }
}

/// The directories among which one is meant.
fn among(found: &[PathBuf]) -> String {
    let names: Vec<String> = found.iter().map(|path| format!("`{}`", path.display())).collect();
    if names.is_empty() { String::new() } else { format!(", such as {}", joined(&names)) }
}

/// The most names that an error lists.
const NAMES: usize = 8;

/// `3 classes (cat, dog, owl)`.
fn classes(names: &[String]) -> String {
    let count = names.len();
    format!("{count} class{} ({})", if count == 1 { "" } else { "es" }, joined(names))
}

/// `3 (cat, dog, owl)`.
fn listed(names: &[String]) -> String {
    format!("{} ({})", names.len(), joined(names))
}

fn joined(names: &[String]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES).map(String::as_str).collect();
    format!("{}{}", shown.join(", "), if names.len() > NAMES { ", .." } else { "" })
}
