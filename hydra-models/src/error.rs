//! Errors of a model's description and of its files.

use hydra_core::CoreError;
use std::path::PathBuf;

/// A model that cannot be built, read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum ModelError {
    /// A chain that is invalid in itself.
    #[error("the chain could not be built")]
    Chain(#[from] CoreError),
    /// A word that names no preset.
    #[error(
        "`{found}` is not a model: expected {names}, a configuration `FILE.json`, a Hugging Face directory, or the name of a \
         model in the Hugging Face cache, such as org/name",
        names = known.join(", ")
    )]
    UnknownPreset { found: String, known: Vec<&'static str> },
    /// A name of no directory, which cannot be a repository on the hub either.
    #[error(
        "`{found}` is neither a directory nor the name of a repository on the Hugging Face hub, such as org/name"
    )]
    NoDirectory { found: String },
    /// A repository that the Hugging Face cache does not have at this revision.
    #[error(
        "no directory is called `{name}`, and the Hugging Face cache `{cache}` does not have {what}: download it with \
         `{download}`{others}",
        cache = cache.display(), what = at_revision(revision), others = cached(name, commits)
    )]
    NotCached {
        name: String,
        /// The branch, the tag or the commit.
        revision: String,
        cache: PathBuf,
        /// The commits of the repository that the cache has.
        commits: Box<[String]>,
        /// The command that downloads it.
        download: String,
    },
    /// A snapshot in the Hugging Face cache in which files are missing.
    #[error(
        "the Hugging Face cache has `{name}` in `{directory}` in part: download the rest with `{download}`",
        directory = directory.display()
    )]
    Incomplete {
        name: String,
        directory: PathBuf,
        /// The command that downloads the rest.
        download: String,
        source: Box<ModelError>,
    },
    /// A value that the model cannot have, or that is not supported.
    #[error("`{name}` is {found}, expected {expected}")]
    Config { name: &'static str, found: String, expected: String },
    /// Classes that a model's weights do not tell apart.
    #[error(
        "the model `{model}` tells {} apart, and the data has {found}: give data with folders of the model's classes, or \
         a model without weights, which is made for those of the data",
        classes(expected), model = model.display(), found = listed(found)
    )]
    Classes { model: PathBuf, expected: Vec<String>, found: Vec<String> },
    /// A model that tells no classes apart.
    #[error("the data has {found} classes, and the model is no classifier: give one that reads pictures")]
    NoClassifier { found: usize },
    /// A family whose models have no adapters here.
    #[error(
        "models of type {model_type} cannot be trained with adapters here: leave --lora and --adapter out, or train some layers with --train"
    )]
    NoAdapters { model_type: &'static str },
    /// The configuration of adapters with such a value.
    #[error("`{path}` describes adapters that cannot be used here", path = path.display())]
    AdapterConfig { path: PathBuf, source: Box<ModelError> },
    /// Adapters in a form that is not read.
    #[error(
        "`{path}` is not read, only adapter_model.safetensors: write it with `python -c \"from peft.utils import \
         load_peft_weights as l; from safetensors.torch import save_file as s; d = '{directory}'; s({{k: v.contiguous() for k, \
         v in l(d, device='cpu').items()}}, d + '/adapter_model.safetensors')\"`",
        path = path.display(), directory = directory.display()
    )]
    AdapterFile { path: PathBuf, directory: PathBuf },
    /// Adapters whose base is not found.
    #[error(
        "`{path}` holds adapters, whose configuration names {found} as their base: give it with --model BASE, and the \
         adapters with --adapter {path}",
        path = path.display()
    )]
    AdapterBase { path: PathBuf, found: String },
    /// A configuration file with such a value.
    #[error("`{path}` describes a model that cannot be trained here", path = path.display())]
    ConfigFile { path: PathBuf, source: Box<ModelError> },
    /// A file that could not be read.
    #[error("`{path}` could not be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file that is not the JSON it should be.
    #[error("`{path}` is not what its name says: replace it by the model's original one", path = path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A configuration that JSON has no words for.
    #[error("the configuration could not be written as JSON")]
    Describe { source: serde_json::Error },
    /// A directory without weights.
    #[error(
        "`{directory}` has no weights: expected {names}; convert others with `save_pretrained`",
        directory = directory.display(), names = looked_for.join(" or ")
    )]
    NoWeights { directory: PathBuf, looked_for: Vec<&'static str> },
    /// A file that the index names and that is not there.
    #[error("`{index}` names the file `{file}`, which is not beside it: download it too", index = index.display())]
    ShardMissing { index: PathBuf, file: String },
    /// A tensor that the model needs and no file has.
    #[error("`{place}` has no tensor `{tensor}`: it belongs to another model or is incomplete", place = place.display())]
    TensorMissing { place: PathBuf, tensor: String },
    /// A tensor that there are two of.
    #[error(
        "`{path}` has `{tensor}`, and `{other_path}` has `{other}` for the same parameter: take one of them away",
        path = path.display(), other_path = other_path.display()
    )]
    TensorTwice {
        path: PathBuf,
        tensor: String,
        /// The file of the second.
        other_path: PathBuf,
        other: String,
    },
    /// A tensor that the model does not have.
    #[error("`{path}` has the tensor `{tensor}`, and chain `{chain}` has no such parameter: it belongs to another model", path = path.display())]
    TensorUnknown { path: PathBuf, tensor: String, chain: String },
    /// A part that should begin anew is nowhere.
    #[error("neither chain `{chain}` nor `{path}` has a layer or a parameter `{part}`, which was to begin anew: look at its spelling", path = path.display())]
    PartUnknown { path: PathBuf, part: String, chain: String },
    /// A tensor of another shape than the model says.
    #[error("`{path}`: tensor `{tensor}` has shape {found:?}, expected {expected:?} by the model", path = path.display())]
    Shape { path: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },
    /// A tensor whose elements are no floats of a kind that is read.
    #[error("`{path}`: tensor `{tensor}` has type {found}, expected F32, F16 or BF16", path = path.display())]
    Type { path: PathBuf, tensor: String, found: String },
    /// A file whose header is broken.
    #[error("`{path}` is not a safetensors file or is damaged: download it again", path = path.display())]
    Header { path: PathBuf, source: safetensors::SafeTensorError },
    /// A file of another length than its header says.
    #[error("`{path}` is damaged: it has {found} bytes, expected {expected} by its header; download it again", path = path.display())]
    Length { path: PathBuf, expected: u64, found: u64 },
}

/// What of a repository was looked for.
fn at_revision(revision: &str) -> String {
    if revision == "main" { "it".to_owned() } else { format!("its revision `{revision}`") }
}

/// The other commits of a repository that are there.
fn cached(name: &str, commits: &[String]) -> String {
    let names: Vec<String> = commits.iter().map(|commit| format!("{name}@{commit}")).collect();
    if names.is_empty() { String::new() } else { format!(", or give one that it has: {}", joined(&names)) }
}

/// The names that an error lists at most.
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
