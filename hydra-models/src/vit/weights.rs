//! A vision transformer in a Hugging Face directory: what it is and where its tensors lie.

use super::{VitConfig, chain, hf_name};
use crate::ModelError;
use crate::weights::{CONFIG, Directory, Naming, ParamSource};
use hydra_core::{BufferParam, Chain, WeightError, WeightSource};
use std::path::{Path, PathBuf};

const NAMING: Naming = Naming {
    prefix: "vit.",
    blocks: "encoder.layer.",
    depth: "num_hidden_layers",
    embedding: "",
    exact: true,
    name: hf_name,
    first_row: |_| 0,
};

/// A directory with a vision transformer's `config.json` and its weights, in `model.safetensors` or in the files that
/// `model.safetensors.index.json` names. Everything but the weights' values is read and checked when it is
/// opened; the values are read buffer by buffer. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct VitDir {
    config: VitConfig,
    weights: Directory,
}

impl VitDir {
    /// Reads the configuration and the headers of all weight files.
    ///
    /// # Errors
    /// A file that is missing or damaged, a configuration that [`VitConfig::validate`] refuses or that has
    /// fewer blocks than the weights, and a tensor that is missing, there twice, or of another shape or type than
    /// expected.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let directory = directory.into();
        let config = VitConfig::read(&directory.join(CONFIG))?;
        let weights = Directory::open(directory, NAMING, &chain(&config, None)?, config.num_hidden_layers)?;
        Ok(Self { config, weights })
    }

    /// The model's configuration.
    pub fn config(&self) -> &VitConfig {
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

impl ParamSource for VitDir {
    fn read(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), ModelError> {
        self.weights.read(param, out)
    }
}

impl WeightSource for VitDir {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        self.weights.fill(chain, buffer, seed, out)
    }

    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        self.weights.origin(chain, buffer, seed)
    }
}
