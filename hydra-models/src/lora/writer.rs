//! Writing adapters as PEFT does.

use super::directory::{CONFIG, WEIGHTS};
use super::{Lora, is_adapter, peft_name};
use crate::family::{Adapting, Model};
use crate::weights::{SavedType, failed, write_tensors};
use hydra_core::{Chain, ImageReader, ModelWriter, WeightError, replace_file};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::path::Path;

/// Writes a model's trained adapters into a directory that PEFT's `from_pretrained` and
/// [`AdapterDir`](super::AdapterDir) read: `adapter_config.json` and `adapter_model.safetensors`.
#[derive(Clone, Debug)]
pub struct AdapterWriter {
    lora: Lora,
    /// The directory of the model beside which the adapters stand.
    base: Option<String>,
    fan_in_fan_out: bool,
    name: fn(&str) -> String,
    task: Option<&'static str>,
    saved: SavedType,
}

impl AdapterWriter {
    /// A writer of adapters of `model`.
    pub fn new(model: &dyn Model, lora: Lora) -> Self {
        let Adapting { fan_in_fan_out, name, target, task, .. } = model.adapting();
        let base = model.directory().map(|directory| directory.display().to_string());
        let (lora, saved) = (lora.with_targets(target), SavedType::F32);
        Self { lora, base, fan_in_fan_out, name, task, saved }
    }

    /// A writer of weights of this type.
    pub fn saved_as(self, saved: SavedType) -> Self {
        Self { saved, ..self }
    }

    fn config_text(&self) -> serde_json::Result<Vec<u8>> {
        let Lora { rank, alpha, dropout, targets } = &self.lora;
        // PEFT's type for it is an integer, where it is one.
        let alpha = if alpha.fract() == 0.0 { json!(*alpha as u64) } else { json!(alpha) };
        let config = json!({
            "base_model_name_or_path": self.base, "bias": "none", "fan_in_fan_out": self.fan_in_fan_out,
            "inference_mode": true, "init_lora_weights": true, "lora_alpha": alpha, "lora_dropout": dropout,
            "peft_type": "LORA", "r": rank, "target_modules": targets, "task_type": self.task,
            "use_dora": false, "use_rslora": false,
        });
        let mut text = serde_json::to_vec_pretty(&config)?;
        text.push(b'\n');
        Ok(text)
    }
}

impl ModelWriter for AdapterWriter {
    fn write(&self, chain: &Chain, images: &dyn ImageReader, dir: &Path) -> Result<(), WeightError> {
        fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
        let (weights, config) = (dir.join(WEIGHTS), dir.join(CONFIG));
        let name = |param: &str| is_adapter(param).then(|| peft_name(&(self.name)(param)));
        write_tensors(chain, images, &weights, self.saved, &name)?;
        let text = self.config_text().map_err(|e| failed(&config, e.into()))?;
        replace_file(&config, |out| out.write_all(&text)).map_err(|e| failed(&config, e))
    }
}
