//! The model that a spec names.

use super::data::{Data, Reader};
use crate::settings::{AdapterSettings, ModelSettings};
use crate::terminal::{Usage, tell};
use anyhow::{Context as _, Result};
use hydra_core::{Chain, FloatType, ModelWriter};
use hydra_models::data::{Content, Split};
use hydra_models::family;
use hydra_models::lora::{AdapterDir, AdapterWriter, MergedWriter};
use std::path::PathBuf;
use std::sync::Arc;

/// A model with how it reads data, as a preset, a file or a directory describes it.
pub(crate) struct Model {
    model: Box<dyn family::Model>,
    name: String,
    dtype: FloatType,
    /// The layers that are trained, if not all are.
    train: Vec<String>,
    reader: Reader,
}

impl Model {
    /// Reads the model of a spec. Weights are checked now and read when a task begins.
    pub(crate) fn load(spec: &ModelSettings) -> Result<Self> {
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        let mut model = family::load(spec.name()).with_context(failed)?;
        spec.dropout.into_iter().for_each(|dropout| model.set_dropout(dropout));
        model.cut_vocabulary(spec.vocabulary_parts.unwrap_or(1)).with_context(failed)?;
        let reader = Reader::new(model.as_ref(), spec)?;
        let (name, train) = (spec.name().to_owned(), spec.train.clone());
        Ok(Self { model, name, dtype: spec.dtype, train, reader })
    }

    /// The model as it is trained, with adapters of this rank, or as the settings say where there is none.
    pub(crate) fn trained(&self, adapters: &AdapterSettings, rank: Option<usize>) -> Result<Trained> {
        let failed = || format!("the model `{}` could not be built", self.name);
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let lora = match (&adapter, rank) {
            (Some(adapter), _) => Some(adapter.lora().clone()),
            (None, rank) => rank.map(|rank| adapters.of_rank(rank, self.model.adapting().targets)),
        };
        let (chain, writer) = match lora {
            Some(lora) => {
                let chain = self.model.adapted(&lora, adapter).with_context(failed)?;
                let writer: Arc<dyn ModelWriter> = match adapters.merge {
                    true => Arc::new(MergedWriter::new(self.model.as_ref(), lora)?),
                    false => Arc::new(AdapterWriter::new(self.model.as_ref(), lora)),
                };
                (chain, writer)
            }
            None => (training(self.model.chain().with_context(failed)?, &self.train)?, self.model.writer()),
        };
        Ok(Trained { chain: Arc::new(chain.with_float_type(self.dtype)), writer })
    }

    /// The files that its weights and those of its adapters are in, as far as they come from files.
    pub(crate) fn files(&self, adapters: &AdapterSettings) -> Result<Vec<PathBuf>> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        Ok(self.model.files().into_iter().chain(adapter.map(|adapter| adapter.file())).collect())
    }

    /// Everything in its configuration that decides what is computed and drawn, with the keys of objects sorted, so that
    /// equal configurations are equal texts.
    pub(crate) fn described(&self) -> Result<String> {
        let mut description = self.model.description()?;
        description.sort_all_objects();
        Ok(description.to_string())
    }

    /// One split of some data, with notes on what is not used of it. A classifier without weights is made one of its classes.
    pub(crate) fn split(&mut self, data: &str, split: Split) -> Result<Arc<dyn Content>> {
        let source = self.reader.open(data, &self.name)?;
        let read = self.reader.read(&source, &[split], self.model.as_mut())?;
        read.notes.iter().for_each(|note| tell(note));
        read.splits.into_iter().next().context("a split was asked for")
    }

    /// All data; validation and test may be missing. A classifier without weights is made one of its classes.
    pub(crate) fn data(&mut self, data: &str) -> Result<Data> {
        let source = self.reader.open(data, &self.name)?;
        let (validation, test) = (source.has(Split::Validation), source.has(Split::Test));
        let wanted = [(Split::Train, true), (Split::Validation, validation), (Split::Test, test)];
        let wanted: Vec<Split> = wanted.into_iter().filter(|(_, has)| *has).map(|(split, _)| split).collect();
        let found = self.reader.read(&source, &wanted, self.model.as_mut())?;
        let mut splits = found.splits.into_iter();
        let train = splits.next().context("the train split was asked for")?;
        let validation = if validation { splits.next() } else { None };
        let (context, items, notes) = (found.context, found.items, found.notes);
        Ok(Data { train, validation, test: splits.next(), context, items, notes })
    }
}

/// A model as it is trained.
pub(crate) struct Trained {
    pub(crate) chain: Arc<Chain>,
    pub(crate) writer: Arc<dyn ModelWriter>,
}

/// The chain with nothing trained but these layers, or as it is where none are named.
fn training(chain: Chain, layers: &[String]) -> Result<Chain, Usage> {
    if layers.is_empty() {
        return Ok(chain);
    }
    let mut names = Vec::new();
    for layer in layers {
        match layer.strip_prefix("last:") {
            Some(count) => names.extend(last_layers(&chain, count)?),
            None => names.push(layer.clone()),
        }
    }
    chain.training_only(&names).map_err(|error| Usage::new(format!("--train: {error}")))
}

/// The names of the last layers before the head.
fn last_layers(chain: &Chain, count: &str) -> Result<Vec<String>, Usage> {
    let names: Vec<&String> = chain.layers().iter().map(|layer| &layer.name).collect();
    let blocks = &names[1..names.len() - 1];
    match count.parse::<usize>() {
        Ok(count) if (1..=blocks.len()).contains(&count) => {
            Ok(blocks[blocks.len() - count..].iter().map(|name| (*name).clone()).collect())
        }
        _ => Err(Usage::new(format!(
            "--train last:{count} is no number of layers between the first and the head: the model has {}",
            blocks.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_trained_by_name_or_counted_from_the_end() {
        let chain = || family::load("bytes-tiny").unwrap().chain().unwrap();
        let trained = |layers: &[&str]| {
            let layers: Vec<String> = layers.iter().map(|layer| (*layer).to_owned()).collect();
            training(chain(), &layers).map(|chain| {
                let layers = chain.layers().iter().filter(|layer| !layer.frozen);
                layers.map(|layer| layer.name.clone()).collect::<Vec<_>>().join(" ")
            })
        };
        assert_eq!(trained(&[]).unwrap(), "embed h.0 h.1 h.2 h.3 head");
        assert_eq!(trained(&["last:2", "head"]).unwrap(), "h.2 h.3 head");
        assert_eq!(trained(&["h.0", "last:1"]).unwrap(), "h.0 h.3");
        for wrong in ["last:0", "last:5", "last:x", "last:"] {
            let error = trained(&[wrong]).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("the model has 4"), "{error}");
        }
        let error = trained(&["h.7"]).unwrap_err().to_string();
        assert!(error.contains("--train") && error.contains("`h.7`") && error.contains("`h.3`"), "{error}");
    }
}
