//! Errors of a model's description and of its files.

use hydra_core::CoreError;
use std::path::PathBuf;

/// A model that cannot be built, read or written.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A chain that is invalid in itself.
    #[error("the chain could not be built")]
    Chain(#[from] CoreError),
    /// A word that names no preset.
    #[error("`{found}` is not a model: expected {names}, a configuration `FILE.json` or a Hugging Face directory", names = known.join(", "))]
    UnknownPreset {
        /// The value that was given.
        found: String,
        /// The presets there are.
        known: Vec<&'static str>,
    },
    /// A value that the model cannot have, or that is not supported.
    #[error("`{name}` is {found}, expected {expected}")]
    Config {
        /// The value's name.
        name: &'static str,
        /// The value that was given.
        found: String,
        /// The values that are allowed.
        expected: String,
    },
    /// A configuration file with such a value.
    #[error("`{path}` describes a model that cannot be trained here", path = path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// The value.
        #[source]
        source: Box<ModelError>,
    },
    /// A file that could not be read.
    #[error("`{path}` could not be read", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file that is not the JSON it should be.
    #[error("`{path}` is not what its name says: replace it by the model's original one", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's error, with its place.
        #[source]
        source: serde_json::Error,
    },
    /// A directory without weights.
    #[error(
        "`{directory}` has no weights: expected {names}; convert others with `save_pretrained`",
        directory = directory.display(), names = looked_for.join(" or ")
    )]
    NoWeights {
        /// The directory.
        directory: PathBuf,
        /// The file names looked for.
        looked_for: Vec<&'static str>,
    },
    /// A file that the index names and that is not there.
    #[error("`{index}` names the file `{file}`, which is not beside it: download it too", index = index.display())]
    ShardMissing {
        /// The index.
        index: PathBuf,
        /// The file's name.
        file: String,
    },
    /// A tensor that the model needs and no file has.
    #[error("`{place}` has no tensor `{tensor}`: it belongs to another model or is incomplete", place = place.display())]
    TensorMissing {
        /// The file or directory.
        place: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor that there are two of.
    #[error(
        "`{path}` has `{tensor}`, and `{other_path}` has `{other}` for the same parameter: take one of them away",
        path = path.display(), other_path = other_path.display()
    )]
    TensorTwice {
        /// The file of the first.
        path: PathBuf,
        /// Its name there.
        tensor: String,
        /// The file of the second.
        other_path: PathBuf,
        /// Its name there.
        other: String,
    },
    /// A tensor that the model does not have.
    #[error("`{path}` has the tensor `{tensor}`, and chain `{chain}` has no such parameter: it belongs to another model", path = path.display())]
    TensorUnknown {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The chain's name.
        chain: String,
    },
    /// A part that should begin anew is nowhere.
    #[error("neither chain `{chain}` nor `{path}` has a layer or a parameter `{part}`, which was to begin anew: look at its spelling", path = path.display())]
    PartUnknown {
        /// The file.
        path: PathBuf,
        /// The name that was given.
        part: String,
        /// The chain's name.
        chain: String,
    },
    /// A tensor of another shape than the model says.
    #[error("`{path}`: tensor `{tensor}` has shape {found:?}, expected {expected:?} by the model", path = path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The shape that the model asks for.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor whose elements are no floats of a kind that is read.
    #[error("`{path}`: tensor `{tensor}` has type {found}, expected F32, F16 or BF16", path = path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The type in the file.
        found: String,
    },
    /// A file whose header is broken.
    #[error("`{path}` is not a safetensors file or is damaged: download it again", path = path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault of the header.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A file of another length than its header says.
    #[error("`{path}` is damaged: it has {found} bytes, expected {expected} by its header; download it again", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// The bytes it should have.
        expected: u64,
        /// The bytes it has.
        found: u64,
    },
}
