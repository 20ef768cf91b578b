//! Loads and builds the model of a spec.

use super::data::{Data, Reader};
use super::pairs::{self, PairObjective};
use super::predict::Predicts;
use super::splits::notes_of_model;
use super::{origin, own};
use crate::settings::{AdapterSettings, ModelSettings, other_base};
use crate::terminal::{Usage, tell};
use anyhow::{Context as _, Result, bail};
use hydra_core::{Chain, Encoding, FloatType, ModelWriter, ParamBufferLayout};
use hydra_models::data::{Content, DecodeMemory, InputRows, Split, WithReference};
use hydra_models::family::{self, Labels};
use hydra_models::generation::{KvCache, KvCacheForm, NextToken, Sequences};
use hydra_models::gguf::{GgufType, GgufWriter};
use hydra_models::lora::{AdapterDir, AdapterWriter, Base, Lora, MergedWriter, Plan};
use hydra_models::objective::Predictions;
use hydra_models::tokenizer::{Tokenizer, TokenizerWriter};
use hydra_models::weights::{SaveForm, SavedType};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

/// A model, from a preset, a configuration file or a directory, with its data reader.
pub struct Model {
    model: Box<dyn family::Model>,
    name: String,
    dtype: FloatType,
    frozen_dtype: Option<FloatType>,
    /// Whether the note on frozen weights of another type was printed.
    frozen_noted: Once,
    /// The layers to train; all layers if empty.
    train: Vec<String>,
    reader: Reader,
    /// What is trained instead of the head's own task.
    objective: Option<PairObjective>,
    /// The memory for decoding images.
    memory: Arc<DecodeMemory>,
    /// Whether evaluations return the outputs of items.
    predicts: bool,
    /// The layers into which each vocabulary table is cut.
    vocabulary_parts: usize,
}

impl Model {
    /// Loads the model of a spec. Weights are checked now and read when a task starts. Images are decoded in `memory`.
    pub fn load(spec: &ModelSettings, memory: &Arc<DecodeMemory>) -> Result<Self> {
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        let mut model = match own::find(spec)? {
            Some(own) => (own.build)(),
            None => family::load(spec.name()).with_context(failed)?,
        };
        let objective = PairObjective::of(spec);
        // TRL switches dropout off for preferences and rewards.
        let dropout = spec.dropout.or(objective.map(|_| 0.0));
        dropout.into_iter().for_each(|dropout| model.set_dropout(dropout));
        let vocabulary_parts = spec.vocabulary_parts.unwrap_or(1);
        model.cut_vocabulary(vocabulary_parts).with_context(failed)?;
        let reader = Reader::new(model.as_ref(), spec, memory)?;
        let (name, train) = (spec.name().to_owned(), spec.train.clone());
        let (memory, predicts) = (memory.clone(), false);
        let (dtype, frozen_dtype) = (spec.dtype, spec.frozen_dtype);
        Ok(Self {
            model,
            name,
            dtype,
            frozen_dtype,
            frozen_noted: Once::new(),
            train,
            reader,
            objective,
            memory,
            predicts,
            vocabulary_parts,
        })
    }

    /// Notes on what its files have and it does not use.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        notes_of_model(self.model.as_ref())
    }

    /// Takes the classes of a classifier of texts from the adapters of the settings, if there are any.
    pub fn take_classes(&mut self, adapters: &AdapterSettings) -> Result<()> {
        if let (Reader::Labelled(reader), Some(adapter)) = (&mut self.reader, adapters.adapter.as_ref()) {
            reader.take_classes(AdapterDir::open(adapter)?);
        }
        Ok(())
    }

    /// Makes a classifier of texts what its files and the adapters of the settings are, without labels of data. Returns its
    /// labels.
    pub fn as_trained(&mut self, adapters: &AdapterSettings) -> Result<Option<Labels>> {
        self.take_classes(adapters)?;
        match &self.reader {
            Reader::Labelled(reader) => reader.as_trained(self.model.as_mut()).map(Some),
            _ => Ok(None),
        }
    }

    /// Reads rows to predict for and prints the notes on them. Chains built from now on return the outputs of items.
    pub fn rows(
        &mut self,
        rows: &InputRows,
        adapters: &AdapterSettings,
    ) -> Result<(Arc<dyn Content>, Predicts)> {
        let labels = self.as_trained(adapters)?;
        let (model, predicts) = (self.model.as_ref(), &mut self.predicts);
        *predicts = true;
        let (data, predicts, notes): (Arc<dyn Content>, _, _) = match (&self.reader, labels) {
            (Reader::Labelled(reader), Some(labels)) => {
                let (texts, notes) = reader.rows(rows, model)?;
                (Arc::new(texts), Predicts::Labels(labels), notes)
            }
            (Reader::Tokens(reader), _) => {
                let (scored, notes) = reader.rows(rows, model)?;
                (Arc::new(scored.data), Predicts::Tokens(scored.targets), notes)
            }
            _ => bail!(Usage::new(format!(
                "`{}` reads images, and `hydra predict` reads rows of texts: pass a model that reads texts",
                self.name
            ))),
        };
        notes.iter().for_each(|note| tell(note));
        Ok((data, predicts))
    }

    /// Its name in the settings.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The directory of its files.
    pub fn directory(&self) -> Option<&Path> {
        self.model.directory()
    }

    /// The numbers of positions and tokens, and the tokenizer, if it is a language model that generates text.
    pub(crate) fn generates_from(&self) -> Option<(usize, usize, &Tokenizer)> {
        let Reader::Tokens(_) = &self.reader else { return None };
        let family::Reads::Tokens { positions, vocabulary } = self.model.reads() else { return None };
        self.cache_form(1)?;
        Some((positions, vocabulary, self.reader.tokenizer()?))
    }

    /// Returns whether it has a tokenizer.
    pub(crate) fn has_tokenizer(&self) -> bool {
        self.reader.tokenizer().is_some_and(|tokenizer| !matches!(tokenizer, Tokenizer::Missing(_)))
    }

    /// The sizes of its key-value cache for sequences of up to `longest` tokens.
    pub(crate) fn cache_form(&self, longest: usize) -> Option<KvCacheForm> {
        self.model.cache_form(self.dtype, longest)
    }

    /// Returns the model, with the adapters of the settings or with new ones of a rank, as a chain that chooses the next tokens
    /// of sequences.
    pub(crate) fn generating(
        &mut self,
        (adapters, rank): (&AdapterSettings, Option<usize>),
        cache: KvCache,
        sequences: &Arc<Sequences>,
    ) -> Result<Arc<Chain>> {
        let (adapter, lora) = self.adapters_of(adapters, rank)?;
        self.model.head_mut().context("the model has no head")?.cache = Some(cache);
        let chain = match &lora {
            Some(lora) => self.model.adapted(lora, adapter),
            None => self.model.chain(),
        };
        self.model.head_mut().context("the model has no head")?.cache = None;
        let chain = chain.with_context(|| format!("the model `{}` could not be built", self.name))?;
        let chain = self.typed(chain.evaluated_only())?;
        Ok(Arc::new(NextToken::of(chain, sequences.clone())?))
    }

    /// Prints the notes on the adapters of the settings.
    pub(crate) fn tell_adapters(&self, adapters: &AdapterSettings) -> Result<()> {
        if let (Some(adapter), Some(lora)) = self.adapters_of(adapters, None)? {
            tell_adapters(Some(&adapter), &self.model.plan(&lora)?, adapters);
        }
        Ok(())
    }

    /// Returns whether it is a language model with its whole head in one layer, and is trained as one.
    pub(crate) fn is_language_model_alone(&self) -> bool {
        self.objective.is_none() && self.generates_from().is_some() && self.vocabulary_parts == 1
    }

    /// Returns whether it has weight files.
    pub fn has_weights(&self) -> bool {
        !self.model.files().is_empty()
    }

    /// Returns whether it is a classifier of texts.
    pub(crate) fn classifies_texts(&self) -> bool {
        matches!(self.reader, Reader::Labelled(_))
    }

    /// Returns whether the loss compares the model with a reference.
    pub(crate) fn has_reference(&self) -> bool {
        self.objective.is_some_and(PairObjective::has_reference)
    }

    /// Returns whether initial weights are drawn from a seed.
    pub(crate) fn is_drawn(&self) -> bool {
        self.model.files().is_empty()
    }

    /// Returns the chain that gives the log-probabilities of answers by the reference: the model before training, with the
    /// adapters of the settings. Drawn weights depend on the LoRA rank, as those of the trained chain do.
    pub(crate) fn reference(&self, adapters: &AdapterSettings, rank: Option<usize>) -> Result<Arc<Chain>> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let lora = match &adapter {
            Some(adapter) => Some(Self::on_base(adapter, adapters)),
            // New adapters change nothing.
            None => rank.map(|rank| self.lora(adapters, rank)).filter(|lora| self.needs_adapters(lora.base)),
        };
        self.scoring(lora, adapter)
    }

    /// Returns the same chain for adapters that were trained: the model without them.
    pub(crate) fn base_reference(&self, adapters: &AdapterSettings) -> Result<Arc<Chain>> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let lora = adapter.map(|adapter| Self::on_base(&adapter, adapters));
        self.scoring(lora.filter(|lora| self.needs_adapters(lora.base)), None)
    }

    /// Returns whether the base of adapters is another model than the one without adapters: its weights are drawn, or stored
    /// in another form.
    fn needs_adapters(&self, base: Base) -> bool {
        self.is_drawn() || base != Base::Float || self.model.is_quantized()
    }

    /// The settings of adapters on the base of the settings.
    fn on_base(adapter: &AdapterDir, adapters: &AdapterSettings) -> Lora {
        Lora { base: adapters.base.unwrap_or(adapter.lora().base), ..adapter.lora().clone() }
    }

    /// New adapters of this rank.
    fn lora(&self, adapters: &AdapterSettings, rank: usize) -> Lora {
        adapters.of_rank(rank, self.model.adapting().targets)
    }

    fn scoring(&self, lora: Option<Lora>, adapter: Option<AdapterDir>) -> Result<Arc<Chain>> {
        let chain = match lora {
            Some(lora) => self.model.adapted(&lora, adapter)?,
            None => self.model.chain()?,
        };
        Ok(Arc::new(self.typed(pairs::scoring(chain)?.evaluated_only())?))
    }

    /// Sets the strength and the margin of a preference loss of chains built from now on, if given.
    pub(crate) fn set_preference(&mut self, beta: Option<f64>, gamma: Option<f64>) {
        if let Some(PairObjective::Preference(preference)) = &mut self.objective {
            preference.beta = beta.unwrap_or(preference.beta);
            preference.gamma = gamma.unwrap_or(preference.gamma);
        }
    }

    /// Sets the dropout probability of chains built from now on.
    pub(crate) fn set_dropout(&mut self, probability: f64) {
        self.model.set_dropout(probability);
    }

    /// Returns the model for training: with LoRA adapters of `rank`, or with those of the settings.
    ///
    /// Weights are written in the type `save`, by default that of the model's files. New adapters are written in `f32` by default,
    /// and loaded ones in the type of their files.
    pub fn trained(
        &self,
        adapters: &AdapterSettings,
        rank: Option<usize>,
        save: Option<SavedType>,
    ) -> Result<Trained> {
        if self.model.is_quantized() && adapters.adapter.is_none() && rank.is_none() {
            return Err(quantized(&self.name).into());
        }
        let (trained, plan) = self.build(adapters, rank, OutputFormat::of(save))?;
        plan.map_or(Ok(()), |plan| plan.check_trainable())?;
        Ok(trained)
    }

    /// Returns the model for evaluation, with the adapters of the settings. It is planned without a backward pass.
    pub fn evaluated(&self, adapters: &AdapterSettings) -> Result<Arc<Chain>> {
        let chain = self.build(adapters, None, OutputFormat::of(None))?.0.chain;
        let chain = Arc::into_inner(chain).context("a chain that was just built has one owner")?;
        Ok(Arc::new(chain.evaluated_only()))
    }

    /// Returns the model as it is stored, with a writer of it: with the adapters of the settings merged, or of these adapters
    /// alone. Weights are written in the type `save`, by default that of their files, and files have at most `shard_bytes`.
    pub fn exported(
        &self,
        adapters: &AdapterSettings,
        save: Option<SavedType>,
        shard_bytes: u64,
    ) -> Result<Trained> {
        Ok(self.build(adapters, None, OutputFormat { save, shard_bytes })?.0)
    }

    /// Returns the model as it is stored with a writer of a GGUF file of this name, with the adapters of the settings merged, or of
    /// these adapters alone. Matrices are written in the type `dtype`, by default that of the files. Prints notes on the model.
    pub fn for_gguf(
        &self,
        adapters: &AdapterSettings,
        dtype: Option<GgufType>,
        file: &str,
    ) -> Result<(Arc<Chain>, Arc<dyn ModelWriter>, GgufType)> {
        let failed = || format!("the model `{}` could not be built", self.name);
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let alone = adapter.as_ref().filter(|_| !adapters.merge);
        let files = alone.map_or_else(|| self.model.files(), |adapter| vec![adapter.file()]);
        let dtype = dtype.map_or_else(|| SavedType::of_files(&files).map(Into::into), Ok)?;
        let tokenizer = self.reader.tokenizer();
        let writer = |model: &dyn family::Model| -> Result<Arc<dyn ModelWriter>> {
            // Models without a tokenizer read no texts, which their layout refuses.
            let writer = GgufWriter::new(model, tokenizer.unwrap_or(&Tokenizer::Bytes), dtype, file)?;
            writer.notes().iter().for_each(|note| tell(&format!("note: {note}")));
            Ok(Arc::new(writer))
        };
        let model = self.model.as_ref();
        let Some(adapter) = adapter else {
            return Ok((Arc::new(model.chain().with_context(failed)?), writer(model)?, dtype));
        };
        let lora = Self::on_base(&adapter, adapters);
        if !adapters.merge {
            let directory = adapters.adapter.as_ref().map(Path::new);
            let writer = GgufWriter::of_adapters(model, &lora, directory, dtype, file)?;
            let chain = model.adapted(&lora, Some(adapter)).with_context(failed)?;
            return Ok((Arc::new(chain), Arc::new(writer), dtype));
        }
        tell_base(&adapter, adapters);
        let merged = MergedWriter::with(model, lora.clone(), writer)?;
        let chain = model.adapted(&lora, Some(adapter)).with_context(failed)?;
        Ok((Arc::new(chain), Arc::new(merged), dtype))
    }

    /// The adapters of the settings, which are those of a directory or new ones of a rank.
    fn adapters_of(
        &self,
        adapters: &AdapterSettings,
        rank: Option<usize>,
    ) -> Result<(Option<AdapterDir>, Option<Lora>)> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let lora = match (&adapter, rank) {
            (Some(adapter), _) => Some(Self::on_base(adapter, adapters)),
            (None, rank) => rank.map(|rank| self.lora(adapters, rank)),
        };
        Ok((adapter, lora))
    }

    fn build(
        &self,
        adapters: &AdapterSettings,
        rank: Option<usize>,
        OutputFormat { save, shard_bytes }: OutputFormat,
    ) -> Result<(Trained, Option<Plan>)> {
        let failed = || format!("the model `{}` could not be built", self.name);
        let (adapter, lora) = self.adapters_of(adapters, rank)?;
        let files = match (&adapter, lora.is_some() && !adapters.merge) {
            (Some(adapter), true) => vec![adapter.file()],
            (None, true) => Vec::new(),
            (_, false) => self.model.files(),
        };
        let saved = save.map_or_else(|| SavedType::of_files(&files), Ok)?;
        let form = SaveForm { dtype: saved, shard_bytes };
        let Some(lora) = lora else {
            let chain = training(self.model.chain().with_context(failed)?, &self.train)?;
            let elements = elements(&chain, |_| true);
            return Ok((self.with(chain, self.model.writer(form), saved, elements)?, None));
        };
        let model = self.model.as_ref();
        let chain = model.adapted(&lora, adapter.clone()).with_context(failed)?;
        let plan = model.plan(&lora).with_context(failed)?;
        tell_adapters(adapter.as_ref(), &plan, adapters);
        let own = elements(&chain, |buffer| buffer.trained);
        let (writer, elements): (Arc<dyn ModelWriter>, u64) = match adapters.merge {
            true => {
                let merged = elements(&chain, |_| true) - own;
                (Arc::new(MergedWriter::new(model, lora, form)?), merged)
            }
            false => {
                let writer = AdapterWriter::new(model, lora).saved_as(saved);
                (Arc::new(adapter.iter().fold(writer, AdapterWriter::after)), own)
            }
        };
        Ok((self.with(chain, writer, saved, elements)?, Some(plan)))
    }

    fn with(
        &self,
        chain: Chain,
        writer: Arc<dyn ModelWriter>,
        saved: SavedType,
        elements: u64,
    ) -> Result<Trained> {
        let model_bytes = elements * saved.bytes() as u64;
        let chain = match self.objective {
            Some(objective) => objective.on(chain)?,
            None => chain,
        };
        let chain = self.typed(chain)?;
        let chain = if self.predicts { Predictions::of(chain)? } else { chain };
        let (chain, writer) = (Arc::new(chain), self.with_tokenizer(writer));
        Ok(Trained { chain, writer, saved, model_bytes })
    }

    /// The chain with the float types of the settings.
    fn typed(&self, chain: Chain) -> Result<Chain> {
        let chain = chain.with_float_type(self.dtype);
        let Some(frozen) = self.frozen_dtype else { return Ok(chain) };
        if self.dtype != FloatType::F32 {
            return Ok(chain);
        }
        let (chain, note) = with_frozen_dtype(chain, frozen, &self.name)?;
        if let Some(note) = note {
            self.frozen_noted.call_once(|| tell(&note));
        }
        Ok(chain)
    }

    /// Sets the float type of chains built from now on.
    pub(crate) fn set_float_type(&mut self, dtype: FloatType) {
        self.dtype = dtype;
    }

    /// Sets the type of frozen weights of chains built from now on; `None` is that of the chain.
    pub(crate) fn set_frozen_float_type(&mut self, dtype: Option<FloatType>) {
        self.frozen_dtype = dtype;
    }

    /// Cuts each vocabulary table into `parts` layers in chains built from now on.
    pub(crate) fn cut_vocabulary(&mut self, parts: usize) -> Result<()> {
        self.vocabulary_parts = parts;
        Ok(self.model.cut_vocabulary(parts)?)
    }

    /// Replaces the data settings.
    pub(crate) fn read_as(&mut self, spec: &ModelSettings) -> Result<()> {
        self.reader = Reader::new(self.model.as_ref(), spec, &self.memory)?;
        Ok(())
    }

    /// Wraps a writer so that it also writes the tokenizer of a language model.
    fn with_tokenizer(&self, writer: Arc<dyn ModelWriter>) -> Arc<dyn ModelWriter> {
        let source = self.model.directory().map(Path::to_owned);
        match self.reader.tokenizer().cloned() {
            Some(tokenizer) => Arc::new(TokenizerWriter::new(writer, tokenizer, source)),
            None => writer,
        }
    }

    /// Returns the weight files of the model and its adapters.
    pub(crate) fn files(&self, adapters: &AdapterSettings) -> Result<Vec<PathBuf>> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        Ok(self.model.files().into_iter().chain(adapter.map(|adapter| adapter.file())).collect())
    }

    /// Returns the note on the origin of initial weights, tokenizer and adapters. `which` names the model, or the time.
    pub fn note_of_origin(&self, adapters: &AdapterSettings, seeds: &[u64], which: &str) -> String {
        if let Reader::Own(own) = &self.reader {
            return format!("note: weights{which}: those of the modules of `{}`", own.model);
        }
        let tokenizer = self.reader.tokenizer().map(|known| origin::tokenizer(known, self.model.directory()));
        let weights = origin::weights(&self.model.files(), seeds);
        let parts = [
            Some(format!("note: weights{which}: {weights}")),
            tokenizer.map(|known| format!("tokenizer: {known}")),
            origin::adapters(adapters, seeds).map(|from| format!("adapters: {from}")),
            self.model.files().is_empty().then(|| origin::WAY_OUT.to_owned()),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let other = other_base(adapters, self.model.directory()).map(|note| format!("\n{note}"));
        parts.join("; ") + &other.unwrap_or_default()
    }

    /// Returns everything in the configuration that affects computation and random initialization, as JSON with sorted keys, so
    /// that equal configurations have equal texts.
    pub(crate) fn described(&self) -> Result<String> {
        let mut description = self.model.description()?;
        description.sort_all_objects();
        Ok(description.to_string())
    }

    /// Reads one split and prints the notes on it. A classifier without weights takes over the classes of the data.
    pub fn split(&mut self, data: &str, split: Split) -> Result<Arc<dyn Content>> {
        Ok(self.split_with_reference(data, split)?.0)
    }

    /// Like [`split`](Self::split), with the split again if it has the log-probabilities of a reference.
    pub fn split_with_reference(&mut self, data: &str, split: Split) -> Result<ReadSplit> {
        let source = self.reader.open(data, &self.name)?;
        let read = self.reader.read(&source, &[split], self.model.as_mut())?;
        read.notes.iter().for_each(|note| tell(note));
        let data = read.splits.into_iter().next().context("one split was requested")?;
        Ok((data, read.references.into_iter().next()))
    }

    /// Reads all splits; validation and test may be missing. A classifier without weights takes over the classes of the data.
    pub(crate) fn data(&mut self, data: &str) -> Result<Data> {
        let source = self.reader.open(data, &self.name)?;
        let (validation, test) = (source.has(Split::Validation), source.has(Split::Test));
        let wanted = [(Split::Train, true), (Split::Validation, validation), (Split::Test, test)];
        let wanted: Vec<Split> = wanted.into_iter().filter(|(_, has)| *has).map(|(split, _)| split).collect();
        let found = self.reader.read(&source, &wanted, self.model.as_mut())?;
        let mut splits = found.splits.into_iter();
        let train = splits.next().context("the train split was requested")?;
        let validation = if validation { splits.next() } else { None };
        let test = splits.next();
        let mut references = found.references.into_iter();
        let references = [true, validation.is_some(), test.is_some()]
            .map(|has| if has { references.next() } else { None });
        let (context, items, notes) = (found.context, found.items, found.notes);
        Ok(Data { train, validation, test, context, items, notes, references })
    }
}

/// A split, and the split again if it has the log-probabilities of a reference.
pub(crate) type ReadSplit = (Arc<dyn Content>, Option<Arc<WithReference>>);
/// How a model is written: the type of its weights, by default that of its files, and the bytes that a file may have.
struct OutputFormat {
    save: Option<SavedType>,
    shard_bytes: u64,
}

impl OutputFormat {
    fn of(save: Option<SavedType>) -> Self {
        Self { save, shard_bytes: u64::MAX }
    }
}

/// A model built for training.
pub struct Trained {
    /// The layers with their initial weights.
    pub chain: Arc<Chain>,
    /// Writes the trained weights.
    pub writer: Arc<dyn ModelWriter>,
    /// The type of the weights to write, and their approximate bytes.
    pub saved: SavedType,
    pub(crate) model_bytes: u64,
}

/// The error for a model with quantized matrices that is trained without adapters.
pub fn quantized(name: &str) -> Usage {
    Usage::new(format!(
        "`{name}` has quantized matrices, which cannot be trained; pass --lora RANK to train adapters of them"
    ))
}

/// Stores the frozen weights of a chain that computes in `f32` in this type, and returns a note on those that stay `f32`, if
/// there are any; an error if it applies to none.
pub fn with_frozen_dtype(
    chain: Chain,
    frozen: FloatType,
    name: &str,
) -> Result<(Chain, Option<String>), Usage> {
    let chain = chain.with_frozen_float_type(frozen);
    let is_other = |buffer: &ParamBufferLayout| {
        !buffer.trained && buffer.encoding != Encoding::Nf4 && buffer.float != frozen
    };
    if chain.widened_bytes(0..chain.len()) > 0 {
        let others = elements(&chain, is_other);
        let note = format!(
            "note: --frozen-dtype {frozen} does not apply to {others} parameters of `{name}`, which stay f32: the files have them, or \
             others of their layers, in another type"
        );
        return Ok((chain, (others > 0).then_some(note)));
    }
    Err(Usage::new(format!(
        "--frozen-dtype {frozen} applies to none of the weights of `{name}`: of those that are not trained, its files have none in \
         {frozen}; leave it out"
    )))
}

/// Prints the notes on adapters.
fn tell_adapters(adapter: Option<&AdapterDir>, plan: &Plan, settings: &AdapterSettings) {
    let unused = adapter.into_iter().flat_map(AdapterDir::notes).chain(plan.notes());
    unused.for_each(|unused| tell(&format!("note: {unused}")));
    adapter.into_iter().for_each(|adapter| tell_base(adapter, settings));
}

/// Prints the note on the base of adapters, if their file decides it.
fn tell_base(adapter: &AdapterDir, adapters: &AdapterSettings) {
    if adapters.base.is_none() && adapter.lora().base == Base::Nf4 {
        tell("note: the adapters were trained on a base that was quantized to nf4, and so it is here");
    }
}

/// Counts the parameters in the buffers of a chain for which `some` is true.
fn elements(chain: &Chain, some: impl Fn(&ParamBufferLayout) -> bool) -> u64 {
    let params = chain.buffers().iter().filter(|buffer| some(buffer)).flat_map(|buffer| &buffer.params);
    params.map(|param| param.range().len() as u64).sum()
}

/// Freezes all layers of a chain except `layers`. Freezes nothing if `layers` is empty.
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

/// Returns the names of the last `count` layers before the head.
fn last_layers(chain: &Chain, count: &str) -> Result<Vec<String>, Usage> {
    let names: Vec<&String> = chain.layers().iter().map(|layer| &layer.name).collect();
    let blocks = &names[1..names.len() - 1];
    match count.parse::<usize>() {
        Ok(count) if (1..=blocks.len()).contains(&count) => {
            Ok(blocks[blocks.len() - count..].iter().map(|name| (*name).clone()).collect())
        }
        _ => Err(Usage::new(format!(
            "--train last:{count}: expected a number from 1 to {}, the layers between the first one and the head",
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
            assert!(error.contains(wrong) && error.contains("from 1 to 4"), "{error}");
        }
        let error = trained(&["h.7"]).unwrap_err().to_string();
        assert!(error.contains("--train") && error.contains("`h.7`") && error.contains("`h.3`"), "{error}");
    }
}
