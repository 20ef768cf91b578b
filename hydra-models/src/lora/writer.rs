//! Writes adapters in PEFT's format.

use super::{
    AdapterDir, BASE, Base, CONFIG, LABELS, Lora, NF4, PROBLEM, WEIGHTS, base_layer_name, is_adapter, json,
    peft_name,
};
use crate::family::{Adapting, HeadConfig, Model};
use crate::weights::{SavedType, failed, write_with_metadata};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError, replace_file};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;

/// Writes a model's trained adapters into a directory that PEFT's `from_pretrained` and
/// [`AdapterDir`](super::AdapterDir) read: `adapter_config.json` and `adapter_model.safetensors`.
#[derive(Clone, Debug)]
pub struct AdapterWriter {
    lora: Lora,
    /// The directory of the base model.
    base: Option<String>,
    adapting: Adapting,
    /// The head of a classifier of texts.
    head: Option<HeadConfig>,
    /// The adapters that training started from.
    from: Option<AdapterDir>,
    saved: SavedType,
}

impl AdapterWriter {
    /// A writer of the adapters of `model`.
    pub fn new(model: &dyn Model, lora: Lora) -> Self {
        let adapting = model.adapting();
        let base = model.directory().map(|directory| directory.display().to_string());
        let (lora, head) = (adapting.named(lora), model.head().filter(|head| head.is_classifier()).cloned());
        Self { lora, base, adapting, head, from: None, saved: SavedType::F32 }
    }

    /// Sets the data type of written weights.
    pub fn saved_as(self, saved: SavedType) -> Self {
        Self { saved, ..self }
    }

    /// Continues the adapters of a directory: keeps the keys of its configuration that do not affect the computation,
    /// and its values of parameters that are not trained.
    pub fn after(self, adapter: &AdapterDir) -> Self {
        Self { from: Some(adapter.clone()), ..self }
    }

    fn config_text(&self) -> serde_json::Result<Vec<u8>> {
        let mut config = match &self.from {
            Some(adapter) => adapter.config().clone(),
            None => Map::from_iter([("task_type".to_owned(), json!(self.adapting.task))]),
        };
        let own = json::config(&self.lora);
        // An initialization other than from the seed is kept as configured.
        let kept = |key: &str| self.from.is_some() && key == "init_lora_weights";
        config.extend(own.into_iter().filter(|(key, _)| !kept(key)));
        config.insert("base_model_name_or_path".to_owned(), json!(self.base));
        config.insert("fan_in_fan_out".to_owned(), json!(self.adapting.fan_in_fan_out));
        config.sort_keys();
        let mut text = serde_json::to_vec_pretty(&Value::Object(config))?;
        text.push(b'\n');
        Ok(text)
    }

    /// The tensor name of a chain's parameter, if it is trained or has values other than the base's.
    fn tensor(&self, param: &str, written: &BTreeSet<&str>, adapted: &BTreeSet<&str>) -> Option<String> {
        let name = (self.adapting.name)(param);
        if is_adapter(param) {
            return Some(peft_name(&name));
        }
        match self.from.as_ref().and_then(|adapter| adapter.tensor(&name)) {
            Some(tensor) => Some(tensor),
            None if !written.contains(param) => None,
            None => {
                let map = param.rsplit_once('.').map_or("", |(map, _)| map);
                Some(if adapted.contains(map) { base_layer_name(&name) } else { peft_name(&name) })
            }
        }
    }
}

impl ModelWriter for AdapterWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
        let (weights, config) = (dir.join(WEIGHTS), dir.join(CONFIG));
        let params = |trained: bool| {
            let buffers = chain.buffers().iter().filter(move |buffer| buffer.trained || !trained);
            buffers.flat_map(|buffer| &buffer.params).map(|param| param.name.as_str())
        };
        let trained: BTreeSet<&str> = params(true).collect();
        let adapted: BTreeSet<&str> =
            params(false).filter_map(|param| param.strip_suffix(".lora.a.weight")).collect();
        let name = |param: &str| self.tensor(param, &trained, &adapted);
        let labels = |head: &HeadConfig| {
            [
                (LABELS, json!(head.classes().id2label).to_string()),
                (PROBLEM, head.problem().name().to_owned()),
            ]
        };
        let base = (self.lora.base == Base::Nf4).then(|| (BASE, NF4.to_owned()));
        let metadata: Vec<(&str, String)> = self.head.iter().flat_map(labels).chain(base).collect();
        write_with_metadata(chain, buffers, &weights, self.saved, &name, &metadata)?;
        let text = self.config_text().map_err(|e| failed(&config, e.into()))?;
        replace_file(&config, |out| out.write_all(&text)).map_err(|e| failed(&config, e))
    }

    fn reads_parts(&self) -> bool {
        true
    }
}
