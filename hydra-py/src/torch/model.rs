//! A chain of PyTorch modules as a model that commands find by its name.

use super::data::TorchData;
use super::described;
use super::layer::TorchLayer;
use hydra_core::{Chain, Metric, ModelWriter, WeightError, WeightSource};
use hydra_models::ModelError;
use hydra_models::data::Content;
use hydra_models::family::{Adapting, Model, Reads};
use hydra_models::lora::{AdapterDir, Lora, Plan};
use hydra_models::weights::{SafetensorsWriter, SaveForm};
use hydra_run::embedded::OwnModel;
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the model and the data of a `_Run` of Python.
pub(crate) fn own_model(python: &Bound<'_, PyAny>) -> PyResult<OwnModel> {
    let model = TorchModel::new(python)?;
    let split = |name: &str| {
        let data = python.getattr(name)?;
        let data = if data.is_none() { None } else { Some(TorchData::new(data)?) };
        Ok::<_, PyErr>(data.map(|data| Arc::new(data) as Arc<dyn Content>))
    };
    Ok(OwnModel {
        model: model.name.clone(),
        data: python.getattr("data")?.extract()?,
        splits: [split("train")?, split("validation")?, split("test")?],
        build: Box::new(move || Box::new(model.clone())),
    })
}

/// A chain of modules.
#[derive(Clone)]
struct TorchModel {
    name: String,
    layers: Vec<TorchLayer>,
    language_model: bool,
    metrics: Vec<Metric>,
    /// The dropout of a setting, which modules do not have.
    dropout: Option<f64>,
}

impl TorchModel {
    fn new(python: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut ids = HashMap::new();
        let layers = python.getattr("layers")?.try_iter()?;
        let layers = layers.map(|layer| TorchLayer::new(layer?, &mut ids)).collect::<PyResult<_>>()?;
        let name = python.getattr("model")?.extract()?;
        let language_model = python.getattr("language_model")?.extract()?;
        let metrics: Vec<(String, bool)> = python.getattr("metrics")?.extract()?;
        let metrics = metrics.into_iter().map(|(name, higher_is_better)| Metric { name, higher_is_better });
        Ok(Self { name, layers, language_model, metrics: metrics.collect(), dropout: None })
    }
}

/// The error for a setting that changes the layers of Hydra's own models.
fn refused(name: &'static str, found: impl ToString) -> ModelError {
    let expected = "none: the layers are modules of PyTorch, which a setting does not change".to_owned();
    ModelError::Config { name, found: found.to_string(), expected }
}

impl Model for TorchModel {
    fn reads(&self) -> Reads {
        Reads::Batches
    }

    fn set_dropout(&mut self, probability: f64) {
        self.dropout = Some(probability);
    }

    fn description(&self) -> Result<Value, ModelError> {
        Ok(json!({ "torch": self.name }))
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        if let Some(dropout) = self.dropout {
            return Err(refused("dropout", dropout));
        }
        // The name identifies the modules and their initial values.
        let builder = Chain::builder("torch").description(&self.name).metrics(self.metrics.clone());
        let builder = if self.language_model { builder.language_model() } else { builder };
        let add = |builder: hydra_core::ChainBuilder, layer: &TorchLayer| {
            builder.boxed(layer.name(), Box::new(layer.clone()))
        };
        let builder = self.layers.iter().fold(builder, add);
        Ok(builder.weights(TorchWeights { name: self.name.clone(), layers: self.layers.clone() }).build()?)
    }

    fn writer(&self, _: SaveForm) -> Arc<dyn ModelWriter> {
        Arc::new(SafetensorsWriter)
    }

    fn adapted(&self, lora: &Lora, _: Option<AdapterDir>) -> Result<Chain, ModelError> {
        Err(refused("lora", lora.rank))
    }

    fn plan(&self, lora: &Lora) -> Result<Plan, ModelError> {
        Err(refused("lora", lora.rank))
    }

    fn adapting(&self) -> Adapting {
        Adapting::new(&[], str::to_owned)
    }

    fn directory(&self) -> Option<&Path> {
        None
    }

    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn flops(&self, _: usize) -> f64 {
        f64::NAN
    }
}

/// The values of the modules' own parameters.
struct TorchWeights {
    name: String,
    layers: Vec<TorchLayer>,
}

impl WeightSource for TorchWeights {
    fn fill(&self, chain: &Chain, buffer: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let layout = &chain.buffers()[buffer];
        let layer = &self.layers[layout.layers[0]];
        layout.params.iter().try_for_each(|param| {
            // The full name begins with the layer's.
            let name = &param.name[layer.name().len() + 1..];
            layer.read(name, &mut out[param.range()]).map_err(|error| {
                let source = Python::attach(|py| described(py, &error)).into();
                WeightError::Read { param: param.name.clone(), source }
            })
        })
    }

    fn origin(&self, _: &Chain, buffer: usize, _: u64) -> Option<String> {
        Some(format!("{} {buffer}", self.name))
    }
}
