//! Opens an encoder in a Hugging Face directory.

use super::{EncoderConfig, chain};
use crate::ModelError;
use crate::family::{ClassifierWeights, HeadConfig};
use crate::weights::{CONFIG, Directory, weight_source};
use std::path::{Path, PathBuf};

/// The parameters that a directory without a classifier lacks, by the beginnings of their names in the chain. It may
/// have the other linear layer of the head: BERT's pooler belongs to the encoder, and ModernBERT's also to the language
/// model.
const NEW: [&[&str]; 2] = [&["head.classifier."], &["head.classifier.", "head.dense.", "head.norm."]];

/// A directory with an encoder's `config.json` and its weights in `model.safetensors`, or in the files listed in
/// `model.safetensors.index.json`, with or without a classifier. Opening reads and checks everything except the
/// weights' values, which are read buffer by buffer. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct EncoderDir {
    config: EncoderConfig,
    weights: Directory,
    has_classifier: bool,
}

impl EncoderDir {
    /// Reads the configuration and the headers of all weight files. Weights of a head that the files do not have are
    /// drawn from the task's seed.
    ///
    /// # Errors
    /// A missing or damaged file; a configuration that [`EncoderConfig::read`] rejects or that has fewer blocks than
    /// the weights; a tensor that is missing, duplicated, or of an unexpected shape or type; or a tensor of a block that
    /// the model does not have.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let directory = directory.into();
        let config = EncoderConfig::read(&directory.join(CONFIG))?;
        let has_classifier = config.head.is_classifier();
        Self::with(config, directory, has_classifier)
    }

    fn with(config: EncoderConfig, path: PathBuf, has_classifier: bool) -> Result<Self, ModelError> {
        let (chain, depth) = (chain(&config, None)?, config.num_hidden_layers);
        let open = |new: &[&str]| {
            let is_new = |param: &str| !has_classifier && new.iter().any(|start| param.starts_with(start));
            Directory::open_except(path.clone(), config.model_type.naming(), &chain, depth, is_new)
        };
        let weights = match open(NEW[0]) {
            Err(ModelError::TensorMissing { .. }) => open(NEW[1])?,
            opened => opened?,
        };
        Ok(Self { config, weights, has_classifier })
    }

    /// Returns whether the directory has a trained classifier.
    pub fn has_classifier(&self) -> bool {
        self.has_classifier
    }

    /// What the model does not use of the files, and what they do not have.
    pub(super) fn notes(&self) -> Vec<String> {
        self.weights.notes()
    }

    /// The model's configuration.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        self.weights.path()
    }

    /// The weight files, sorted by name.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.weights.files()
    }
}

impl ClassifierWeights for EncoderDir {
    fn directory(&self) -> &Path {
        self.weights.path()
    }

    fn has_classifier(&self) -> bool {
        Self::has_classifier(self)
    }

    fn classifier(&self, head: &HeadConfig) -> Result<Self, ModelError> {
        let config = EncoderConfig { head: head.clone(), ..self.config.clone() };
        Self::with(config, self.weights.path().to_owned(), self.has_classifier)
    }
}

weight_source!(EncoderDir);
