//! Opens a ResNet in a Hugging Face directory.

use super::{ResNetConfig, chain, hf_name};
use crate::ModelError;
use crate::weights::{CONFIG, Directory, Naming, weight_source};
use std::path::{Path, PathBuf};

const NAMING: Naming = Naming {
    prefix: "resnet.",
    blocks: "encoder.stages.",
    depth: "depths",
    embedding: "",
    exact: true,
    name: hf_name,
    first_row: |_| 0,
};

/// A directory with a ResNet's `config.json` and its weights in `model.safetensors`, or in the files listed in
/// `model.safetensors.index.json`. Opening reads and checks everything except the weights' values, which are read
/// buffer by buffer. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct ResNetDir {
    config: ResNetConfig,
    weights: Directory,
}

impl ResNetDir {
    /// Reads the configuration and the headers of all weight files.
    ///
    /// # Errors
    /// A missing or damaged file; a configuration that [`ResNetConfig::validate`] rejects or that has fewer stages or
    /// blocks than the weights; or a tensor that is missing, duplicated, or of an unexpected shape or type.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let directory = directory.into();
        let config = ResNetConfig::read(&directory.join(CONFIG))?;
        let weights = Directory::open(directory, NAMING, &chain(&config, None)?, config.depths.len())?;
        Ok(Self { config, weights })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ResNetConfig {
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

weight_source!(ResNetDir);
