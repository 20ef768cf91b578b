//! Opens a model in a Hugging Face directory.

use super::Architecture;
use crate::ModelError;
use crate::family::HeadConfig;
use crate::weights::{CONFIG, Directory};
use std::path::{Path, PathBuf};

/// A directory with a model's `config.json` and its weights in `model.safetensors`, or in the files listed in
/// `model.safetensors.index.json`. Opening reads and checks everything except the weights' values, which are read
/// buffer by buffer. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct PretrainedDir<C> {
    config: C,
    weights: Directory,
    has_classifier: bool,
}

impl<C: Architecture> PretrainedDir<C> {
    /// Reads the configuration and the headers of all weight files. Weights of a classifier's head that the files do not have are
    /// drawn from the task's seed.
    ///
    /// # Errors
    /// A missing or damaged file; a configuration that is not supported or that has fewer blocks than the weights; a tensor
    /// that is missing, duplicated, or of an unexpected shape or type; a tensor of a block that the model does not have;
    /// or a stored head that differs from the embedding although the head is tied.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let directory = directory.into();
        let config = C::read(&directory.join(CONFIG))?;
        let has_classifier = config.head().is_some_and(HeadConfig::is_classifier);
        Self::with(config, directory, has_classifier)
    }

    fn with(config: C, path: PathBuf, has_classifier: bool) -> Result<Self, ModelError> {
        let (chain, naming, depth) = (super::chain(&config, None)?, config.naming(), config.depth());
        let open = |drawn: &[&str]| {
            let is_new = |param: &str| !has_classifier && drawn.iter().any(|start| param.starts_with(start));
            Directory::open(path.clone(), naming, &chain, depth, is_new)
        };
        let [first, second] = C::DRAWN;
        let weights = match open(first) {
            Err(ModelError::TensorMissing { .. }) if !second.is_empty() => open(second)?,
            opened => opened?,
        };
        Ok(Self { config, weights, has_classifier })
    }

    /// The same weights for a classifier with this head. Weights of the head that the files do not have are drawn from the
    /// task's seed.
    ///
    /// # Errors
    /// Weights that do not fit a model with this head.
    pub(super) fn classifier(&self, head: &HeadConfig) -> Result<Self, ModelError> {
        let mut config = self.config.clone();
        config.head_mut().into_iter().for_each(|own| own.clone_from(head));
        Self::with(config, self.weights.path().to_owned(), self.has_classifier)
    }

    /// The same weights for a model of this configuration, which has the same tensors.
    pub(super) fn configured(self, config: C) -> Self {
        Self { config, ..self }
    }

    /// Returns whether the directory has a trained classifier.
    pub fn has_classifier(&self) -> bool {
        self.has_classifier
    }

    /// What the model does not use of the files, and what they do not have.
    pub(super) fn notes(&self) -> Vec<String> {
        self.weights.notes()
    }

    /// The weights.
    pub(super) fn weights(&self) -> &Directory {
        &self.weights
    }

    /// The source of initial weights.
    pub(super) fn into_weights(self) -> Directory {
        self.weights
    }

    /// The model's configuration.
    pub fn config(&self) -> &C {
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
