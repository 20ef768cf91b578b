//! A ConvNeXt in a Hugging Face directory: what it is and where its tensors lie.

use super::{ConvNextConfig, chain, hf_name};
use crate::ModelError;
use crate::weights::{CONFIG, Directory, Naming};
use hydra_core::{Chain, WeightError, WeightSource};
use std::path::{Path, PathBuf};

const NAMING: Naming = Naming {
    prefix: "convnext.",
    blocks: "encoder.stages.",
    depth: "num_stages",
    embedding: "",
    exact: true,
    name: hf_name,
    first_row: |_| 0,
};

/// A directory with a ConvNeXt's `config.json` and its weights, in `model.safetensors` or in the files that
/// `model.safetensors.index.json` names. Everything but the weights' values is read and checked when it is
/// opened; the values are read buffer by buffer. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct ConvNextDir {
    config: ConvNextConfig,
    weights: Directory,
}

impl ConvNextDir {
    /// Reads the configuration and the headers of all weight files.
    ///
    /// # Errors
    /// A file that is missing or damaged, a configuration that [`ConvNextConfig::validate`] refuses or that has fewer stages
    /// or blocks than the weights, and a tensor that is missing, there twice, or of another shape or type than expected.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let directory = directory.into();
        let config = ConvNextConfig::read(&directory.join(CONFIG))?;
        let weights = Directory::open(directory, NAMING, &chain(&config, None)?, config.num_stages)?;
        Ok(Self { config, weights })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ConvNextConfig {
        &self.config
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        self.weights.path()
    }

    /// The files that the weights are in, in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.weights.files()
    }
}

impl WeightSource for ConvNextDir {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        self.weights.fill(chain, buffer, seed, out)
    }

    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        self.weights.origin(chain, buffer, seed)
    }
}
