//! The model of a configuration.

use super::{Architecture, PretrainedDir, PretrainedWriter};
use crate::ModelError;
use crate::family::{Adapting, HeadConfig, Labels, Model, Reads, TaskType};
use crate::gguf::{GgufError, GgufLayout};
use crate::lora::{AdapterDir, Lora, Plan, adapted_chain, plan_of};
use crate::ops::KvCacheForm;
use crate::weights::{ParamSource, SaveForm, in_file};
use hydra_core::{Chain, FloatType, ModelWriter};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model described by a configuration or a directory.
#[derive(Clone, Debug)]
pub struct PretrainedModel<C> {
    config: C,
    weights: Option<PretrainedDir<C>>,
}

impl<C: Architecture> PretrainedModel<C> {
    /// A model without weights.
    pub fn new(config: C) -> Self {
        Self { config, weights: None }
    }

    /// The model of a configuration file, without weights.
    ///
    /// # Errors
    /// A file that cannot be read, or a configuration that is not supported without weights.
    pub fn configured(file: &Path) -> Result<Self, ModelError> {
        let config = C::read(file)?;
        config.check_without_weights().map_err(|source| in_file(file, source))?;
        Ok(Self::new(config))
    }

    /// The model of a Hugging Face directory.
    ///
    /// # Errors
    /// Those of [`PretrainedDir::open`].
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let weights: PretrainedDir<C> = PretrainedDir::open(directory)?;
        Ok(Self { config: weights.config().clone(), weights: Some(weights) })
    }

    /// The configuration.
    pub fn config(&self) -> &C {
        &self.config
    }

    /// PEFT's view of a model that can have adapters.
    fn adaptable(&self) -> Result<Adapting, ModelError> {
        let adapting = self.config.adapting();
        match adapting.targets.is_empty() {
            true => Err(ModelError::NoAdapters { model_type: C::MODEL_TYPES[0] }),
            false => Ok(adapting),
        }
    }
}

impl<C: Architecture> Model for PretrainedModel<C> {
    fn reads(&self) -> Reads {
        self.config.reads()
    }

    fn number_classes(&mut self, names: &[String]) -> Result<Vec<i32>, ModelError> {
        let directory = self.weights.as_ref().map(PretrainedDir::directory);
        match self.config.classes_mut() {
            Some(classes) => classes.number(directory, names),
            None => Err(ModelError::NoClassifier { found: names.len() }),
        }
    }

    fn task_type(&self) -> TaskType {
        self.config.task_type()
    }

    fn classify(&mut self, labels: &Labels) -> Result<Vec<i32>, ModelError> {
        let trained = self.weights.as_ref().filter(|weights| weights.has_classifier());
        let directory = trained.map(PretrainedDir::directory);
        let mut head =
            self.config.head().ok_or(ModelError::NoClassifier { found: labels.names.len() })?.clone();
        let class = self.config.class(TaskType::SequenceClassification);
        let numbers = head.classify(class, directory, labels)?;
        // Neither the weights nor the head change if one fails.
        self.weights = self.weights.as_ref().map(|weights| weights.classifier(&head)).transpose()?;
        self.config.head_mut().into_iter().for_each(|own| own.clone_from(&head));
        Ok(numbers)
    }

    fn head(&self) -> Option<&HeadConfig> {
        self.config.head()
    }

    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        self.config.head_mut()
    }

    fn notes(&self) -> Vec<String> {
        self.weights.iter().flat_map(PretrainedDir::notes).collect()
    }

    fn has_token_types(&self) -> bool {
        self.config.has_token_types()
    }

    fn set_dropout(&mut self, probability: f64) {
        self.config.set_dropout(probability);
    }

    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        self.config.cut_vocabulary(parts)
    }

    fn cache_form(&self, float: FloatType, longest: usize) -> Option<KvCacheForm> {
        self.config.cache_form(float, longest)
    }

    fn is_quantized(&self) -> bool {
        self.weights.as_ref().is_some_and(|weights| weights.weights().has_quantized())
    }

    fn description(&self) -> Result<Value, ModelError> {
        self.config.description()
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        super::chain(&self.config, self.weights.clone())
    }

    fn writer(&self, saved: SaveForm) -> Arc<dyn ModelWriter> {
        let source = self.directory().map(Path::to_owned);
        Arc::new(PretrainedWriter::new(self.config.clone()).with_source(source).saved_as(saved))
    }

    fn adapted(&self, lora: &Lora, adapter: Option<AdapterDir>) -> Result<Chain, ModelError> {
        let adapting = self.adaptable()?;
        let base =
            self.weights.as_ref().map(|weights| Arc::new(weights.weights().clone()) as Arc<dyn ParamSource>);
        adapter.as_ref().map_or(Ok(()), |adapter| adapter.check_classes(self.classes()))?;
        let name = adapter.as_ref().map_or(adapting.name, |adapter| self.config.adapter_name(adapter));
        let files = Adapting { name, ..adapting };
        adapted_chain(lora, [&adapting, &files], base, adapter, |with| self.config.layers(Some(with)))
    }

    fn plan(&self, lora: &Lora) -> Result<Plan, ModelError> {
        plan_of(lora, &self.adaptable()?, |with| self.config.layers(Some(with)))
    }

    fn untied(&self) -> Option<Box<dyn Model>> {
        let config = self.config.untied()?;
        let weights = self.weights.clone().map(|weights| weights.configured(config.clone()));
        Some(Box::new(Self { config, weights }))
    }

    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        self.config.gguf()
    }

    fn adapting(&self) -> Adapting {
        self.config.adapting()
    }

    fn directory(&self) -> Option<&Path> {
        self.weights.as_ref().map(PretrainedDir::directory)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.weights.iter().flat_map(|weights| weights.files().map(PathBuf::from)).collect()
    }

    fn flops(&self, tokens: usize) -> f64 {
        self.config.flops(tokens)
    }
}
