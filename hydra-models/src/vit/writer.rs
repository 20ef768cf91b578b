//! Writing a vision transformer as Hugging Face transformers does.

use super::{VitConfig, VitDir, hf_name};
use crate::weights::{CONFIG, Export, failed};
use hydra_core::{Chain, ImageReader, ModelWriter, WeightError};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Writes a trained vision transformer into a directory that transformers' `from_pretrained` and [`VitDir`] read:
/// `config.json`, `model.safetensors` in `F32`, and the preprocessor's configuration, with other files like it where the
/// model came from a directory. Each file gets its name only when it is complete.
#[derive(Clone, Debug)]
pub struct VitWriter {
    pub(super) config: VitConfig,
    pub(super) source: Option<PathBuf>,
}

impl VitWriter {
    /// A writer of a model that came from nowhere.
    pub fn new(config: VitConfig) -> Self {
        Self { config, source: None }
    }

    fn json(&self) -> serde_json::Result<Map<String, Value>> {
        serde_json::from_value(serde_json::to_value(&self.config)?)
    }
}

impl From<&VitDir> for VitWriter {
    /// A writer that also copies what belongs to the model in its directory.
    fn from(source: &VitDir) -> Self {
        Self { config: source.config().clone(), source: Some(source.directory().to_owned()) }
    }
}

impl ModelWriter for VitWriter {
    fn write(&self, chain: &Chain, images: &dyn ImageReader, dir: &Path) -> Result<(), WeightError> {
        let config = self.json().map_err(|e| failed(&dir.join(CONFIG), e.into()))?;
        let (architecture, source) = ("ViTForImageClassification", self.source.as_deref());
        let export = Export { config, architecture, source, name: &hf_name };
        export.write_for_pictures(self.config.image_size, chain, images, dir)
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain;
    use super::*;
    use crate::family::Classes;
    use crate::weights::testing::Images;
    use std::fs;
    use tempfile::TempDir;

    #[test]
    fn what_was_written_loads_to_the_same_bits_with_what_belongs_to_it() {
        let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let config = VitConfig::preset("vit-tiny").unwrap();
        let config = VitConfig { labels: Classes::numbered(3), ..config };
        let fresh = chain(&config, None).unwrap();
        let images = Images::of(&fresh, 7);
        VitWriter::new(config.clone()).write(&fresh, &images, from.path()).unwrap();
        let file = from.path().join("preprocessor_config.json");
        assert!(fs::read_to_string(&file).unwrap().contains("ViTImageProcessor"));
        fs::write(&file, "{}").unwrap();
        let source = VitDir::open(from.path()).unwrap();
        assert_eq!(source.config().labels.count(), 3);
        let loaded = chain(source.config(), Some(source.clone())).unwrap();
        assert_eq!(Images::of(&loaded, 0), images);
        VitWriter::from(&source).write(&loaded, &images, to.path()).unwrap();
        for name in ["config.json", "model.safetensors", "preprocessor_config.json"] {
            assert_eq!(fs::read(from.path().join(name)).unwrap(), fs::read(to.path().join(name)).unwrap());
        }
        let other = serde_json::json!({"model_type": "vit", "hidden_size": 96}).to_string();
        fs::write(to.path().join(CONFIG), other).unwrap();
        let error = VitDir::open(to.path()).unwrap_err().to_string();
        assert!(error.contains("expected") && error.contains("model.safetensors"), "{error}");
    }
}
