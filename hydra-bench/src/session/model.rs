//! The model that a spec names.

use super::data::{Data, Reader};
use super::origin;
use crate::settings::{AdapterSettings, ModelSettings};
use crate::terminal::{Usage, tell};
use anyhow::{Context as _, Result};
use hydra_core::{Chain, FloatType, ModelWriter, ParamBufferLayout};
use hydra_models::data::{Content, DecodeMemory, Split};
use hydra_models::family;
use hydra_models::lora::{AdapterDir, AdapterWriter, MergedWriter, Plan};
use hydra_models::tokenizer::TokenizerWriter;
use hydra_models::weights::SavedType;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model with how it reads data, as a preset, a file or a directory describes it.
pub(crate) struct Model {
    model: Box<dyn family::Model>,
    name: String,
    dtype: FloatType,
    /// The layers that are trained, if not all are.
    train: Vec<String>,
    reader: Reader,
    /// The memory in which images are decoded.
    memory: Arc<DecodeMemory>,
}

impl Model {
    /// Reads the model of a spec. Weights are checked now and read when a task begins.
    /// Images are decoded in `memory`.
    pub(crate) fn load(spec: &ModelSettings, memory: &Arc<DecodeMemory>) -> Result<Self> {
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        let mut model = family::load(spec.name()).with_context(failed)?;
        spec.dropout.into_iter().for_each(|dropout| model.set_dropout(dropout));
        model.cut_vocabulary(spec.vocabulary_parts.unwrap_or(1)).with_context(failed)?;
        let reader = Reader::new(model.as_ref(), spec, memory)?;
        let (name, train) = (spec.name().to_owned(), spec.train.clone());
        Ok(Self { model, name, dtype: spec.dtype, train, reader, memory: memory.clone() })
    }

    /// Sets the probability of every dropout of the chains that are built from now on.
    pub(crate) fn set_dropout(&mut self, probability: f64) {
        self.model.set_dropout(probability);
    }

    /// The model as it is trained, with adapters of this rank, or as the settings say where there is none.
    ///
    /// Its weights are written in the type `save`, or else in that of its own files; adapters in `f32`, or in that of the files
    /// with which they begin.
    pub(crate) fn trained(
        &self,
        adapters: &AdapterSettings,
        rank: Option<usize>,
        save: Option<SavedType>,
    ) -> Result<Trained> {
        let (trained, plan) = self.made(adapters, rank, save)?;
        plan.map_or(Ok(()), |plan| plan.check_trainable())?;
        Ok(trained)
    }

    /// The model as it is evaluated, with the adapters that the settings name.
    pub(crate) fn evaluated(&self, adapters: &AdapterSettings) -> Result<Arc<Chain>> {
        Ok(self.made(adapters, None, None)?.0.chain)
    }

    fn made(
        &self,
        adapters: &AdapterSettings,
        rank: Option<usize>,
        save: Option<SavedType>,
    ) -> Result<(Trained, Option<Plan>)> {
        let failed = || format!("the model `{}` could not be built", self.name);
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let lora = match (&adapter, rank) {
            (Some(adapter), _) => Some(adapter.lora().clone()),
            (None, rank) => rank.map(|rank| adapters.of_rank(rank, self.model.adapting().targets)),
        };
        let files = match (&adapter, lora.is_some() && !adapters.merge) {
            (Some(adapter), true) => vec![adapter.file()],
            (None, true) => Vec::new(),
            (_, false) => self.model.files(),
        };
        let saved = save.map_or_else(|| SavedType::of_files(&files), Ok)?;
        let Some(lora) = lora else {
            let chain = training(self.model.chain().with_context(failed)?, &self.train)?;
            let elements = elements(&chain, |_| true);
            return Ok((self.with(chain, self.model.writer(saved), saved, elements), None));
        };
        let model = self.model.as_ref();
        let chain = model.adapted(&lora, adapter.clone()).with_context(failed)?;
        let plan = model.plan(&lora).with_context(failed)?;
        let unused = adapter.iter().flat_map(AdapterDir::notes).chain(plan.notes());
        unused.for_each(|unused| tell(&format!("note: {unused}")));
        let own = elements(&chain, |buffer| buffer.trained);
        let (writer, elements): (Arc<dyn ModelWriter>, u64) = match adapters.merge {
            true => {
                let merged = elements(&chain, |_| true) - own;
                (Arc::new(MergedWriter::new(model, lora, saved)?), merged)
            }
            false => {
                let writer = AdapterWriter::new(model, lora).saved_as(saved);
                (Arc::new(adapter.iter().fold(writer, AdapterWriter::after)), own)
            }
        };
        Ok((self.with(chain, writer, saved, elements), Some(plan)))
    }

    fn with(&self, chain: Chain, writer: Arc<dyn ModelWriter>, saved: SavedType, elements: u64) -> Trained {
        let model_bytes = elements * saved.bytes() as u64;
        let (chain, writer) = (Arc::new(chain.with_float_type(self.dtype)), self.with_tokenizer(writer));
        Trained { chain, writer, saved, model_bytes }
    }

    /// Changes the type of floats of the chains that are built from now on.
    pub(crate) fn set_float_type(&mut self, dtype: FloatType) {
        self.dtype = dtype;
    }

    /// Cuts the tables of its vocabulary into so many layers each in the chains that are built from now on.
    pub(crate) fn cut_vocabulary(&mut self, parts: usize) -> Result<()> {
        Ok(self.model.cut_vocabulary(parts)?)
    }

    /// Reads data from now on as these settings say.
    pub(crate) fn read_as(&mut self, spec: &ModelSettings) -> Result<()> {
        self.reader = Reader::new(self.model.as_ref(), spec, &self.memory)?;
        Ok(())
    }

    /// The writer that also writes the tokenizer, where the model reads texts.
    fn with_tokenizer(&self, writer: Arc<dyn ModelWriter>) -> Arc<dyn ModelWriter> {
        let source = self.model.directory().map(Path::to_owned);
        match self.reader.tokenizer().cloned() {
            Some(tokenizer) => Arc::new(TokenizerWriter::new(writer, tokenizer, source)),
            None => writer,
        }
    }

    /// The files that its weights and those of its adapters are in, as far as they come from files.
    pub(crate) fn files(&self, adapters: &AdapterSettings) -> Result<Vec<PathBuf>> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        Ok(self.model.files().into_iter().chain(adapter.map(|adapter| adapter.file())).collect())
    }

    /// The note on what its first weights, its tokenizer and its adapters are; `which` says of which model, or when.
    pub(crate) fn note_of_origin(&self, adapters: &AdapterSettings, seeds: &[u64], which: &str) -> String {
        let tokenizer = self.reader.tokenizer().map(|known| origin::tokenizer(known, self.model.directory()));
        let weights = origin::weights(&self.model.files(), seeds);
        let parts = [
            Some(format!("note: weights{which}: {weights}")),
            tokenizer.map(|known| format!("tokenizer: {known}")),
            origin::adapters(adapters, seeds).map(|from| format!("adapters: {from}")),
            self.model.files().is_empty().then(|| origin::WAY_OUT.to_owned()),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        parts.join("; ")
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
    /// The type of the weights that are written, and about as many bytes as these take.
    pub(crate) saved: SavedType,
    pub(crate) model_bytes: u64,
}

/// The number of parameters in some of the images of a chain.
fn elements(chain: &Chain, some: impl Fn(&ParamBufferLayout) -> bool) -> u64 {
    let params = chain.buffers().iter().filter(|buffer| some(buffer)).flat_map(|buffer| &buffer.params);
    params.map(|param| param.range().len() as u64).sum()
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
