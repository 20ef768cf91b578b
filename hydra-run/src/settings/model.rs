//! The model and its data.

use super::{flags, values};
use crate::terminal::Usage;
use anyhow::{Context, Result};
use clap::Args;
use clap::builder::{NonEmptyStringValueParser, TypedValueParser};
use hydra_core::FloatType;
use hydra_models::data::{Column, LossOn};
use hydra_models::family;
use hydra_models::objective::{PreferenceLoss, ProblemType};
use hydra_models::tokenizer::BuiltIn;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The model without `--model`.
pub const DEFAULT_MODEL: &str = "bytes-tiny";
const BUILTIN: &str = "builtin";
/// The beginning of the names of models and data that an embedding program brings.
const OWN: &str = "torch:";
const PROBLEM_TYPES: [&str; 3] = ["single_label_classification", "multi_label_classification", "regression"];

/// What a model is trained for, as `--task` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskName {
    /// A language model.
    Lm,
    /// A classifier of texts.
    Classify,
    /// A language model that prefers some answers to others.
    Preference,
    /// A reward model of answers.
    Reward,
}

impl TaskName {
    const NAMES: [&str; 4] = ["lm", "classify", "preference", "reward"];

    /// Whether it reads pairs of a chosen and a rejected answer.
    pub fn reads_pairs(self) -> bool {
        matches!(self, Self::Preference | Self::Reward)
    }
}

/// The model and its data.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Model and data")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub struct ModelSettings {
    /// The model: a preset, a configuration file or a directory.
    #[arg(long, value_name = "PRESET|FILE.json|DIR", value_parser = NonEmptyStringValueParser::new(), help = model_help())]
    pub model: Option<String>,
    /// Training data: `builtin` (a small text), a plain-text file, a WikiText directory, instruction data (FILE.jsonl, .json,
    /// .csv, .tsv or .parquet, or a directory of such files named train, validation and test), for a classifier texts with labels
    /// (the same kinds of files, or a folder of .txt files for each class), for --task preference and reward prompts with a
    /// chosen and a rejected answer (the same kinds of files), or an image folder. The last two tenths of a single
    /// file are its validation and test splits. With several models, one value for all or one for each, separated by commas
    /// [default: builtin]
    #[arg(long, value_name = "builtin|DIR|FILE", value_parser = NonEmptyStringValueParser::new())]
    pub data: Option<String>,
    /// What is trained: lm (a language model: the next token), classify (a classifier of texts with labels; a language model's
    /// head is replaced by a new one), preference (a language model, on pairs of a chosen and a rejected answer) or reward (a
    /// reward model, on such pairs) [default: what the model's head is for]
    #[arg(long, value_name = "lm|classify|preference|reward", value_parser = flags::named::<TaskName>(&TaskName::NAMES))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskName>,
    /// Loss of --task preference: dpo, ipo, kto (these compare with the model before training; kto reads single answers, each with
    /// a label), orpo or simpo [default: dpo]
    #[arg(long, value_name = "dpo|ipo|orpo|simpo|kto", value_parser = flags::named::<PreferenceLoss>(&PreferenceLoss::NAMES))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<PreferenceLoss>,
    /// Strength of --task preference: of the reference for dpo, ipo and kto, of the odds ratio for orpo, of the reward for simpo
    /// [default: 0.1]
    #[arg(long, value_name = "X", value_parser = values::beta, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// Reward margin of --loss simpo [default: 0.5]
    #[arg(long, value_name = "X", value_parser = values::gamma, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f64>,
    /// What labels are: single_label_classification (one class for each text), multi_label_classification (any number of classes)
    /// or regression (numbers) [default: lists are several classes, fractions are numbers, other labels are one class]
    #[arg(long, value_name = "TYPE", value_parser = flags::named::<ProblemType>(&PROBLEM_TYPES))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem_type: Option<ProblemType>,
    /// Column names of instruction data, texts with labels and preference data, as FIELD=COLUMN such as
    /// prompt=question,completion=answer, text=review,label=stars or chosen=better,rejected=worse [default: columns that have the fields' names]
    #[arg(long, value_name = "FIELD=COLUMN,..", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<Column>,
    /// Sequence length in tokens: of a block of plain text, an instruction example (longer ones are truncated) or a packed row
    /// [default: the model's maximum, but at most 512 for blocks, and for packed rows unless an example is longer]
    #[arg(long, value_name = "N", value_parser = values::context, allow_hyphen_values = true)]
    pub context: Option<usize>,
    /// Tokens of instruction data that the loss is computed on: completions (the assistant's answers), or all with the prompts
    #[arg(long, default_value = "completions", value_parser = loss_on())]
    #[serde(skip_serializing_if = "is_default")]
    pub loss_on: LossOn,
    /// Pack several examples of instruction data into each row of at most --context tokens; no example attends to another
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pack: bool,
    /// Tokenizer to use instead of the one in the model directory: bytes (one token per byte) or gpt2 [default: the directory's;
    /// without one, gpt2 for a vocabulary of 50257 ids, else bytes]
    #[arg(long, value_name = "bytes|gpt2", value_parser = flags::named::<BuiltIn>(&BuiltIn::NAMES))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<BuiltIn>,
    /// Dropout probability of every dropout in the model [default: the model configuration's]
    #[arg(long, value_name = "P", value_parser = values::dropout, allow_hyphen_values = true)]
    pub dropout: Option<f64>,
    /// Split the embedding and output matrices of a Llama, Mistral or Qwen model into N layers each, so that no device has to hold
    /// a whole matrix [default: not split]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary_parts: Option<usize>,
    /// Train only these layers and freeze the others: layer names, separated by commas, or last:N for the last N layers before
    /// the output head [default: all]
    #[arg(long, value_name = "LAYER,..", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub train: Vec<String>,
    /// Type of parameters, activations and gradients on devices and of their transfers; master weights and optimizer state are
    /// f32
    #[arg(long, default_value = "f32", value_parser = dtypes())]
    pub dtype: FloatType,
    /// Type in which weights that are not trained are stored and transferred, and widened on devices for --dtype f32: the type of
    /// the model's files, or the one that random weights are rounded to [default: f32]
    #[arg(long, value_name = "bf16|f16", value_parser = flags::named::<FloatType>(&["bf16", "f16"]))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frozen_dtype: Option<FloatType>,
    /// Seed of initial weights, data order and dropout
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed, allow_hyphen_values = true)]
    pub seed: u64,
}

/// The help of `--model`.
pub fn model_help() -> String {
    let presets: Vec<&str> = family::presets().map(|preset| preset.name).collect();
    format!(
        "Model: a preset ({}) or a configuration FILE.json, both with random initial weights; or trained weights from a Hugging \
         Face model directory, or from the local Hugging Face cache as org/name; `hydra select` takes several, separated by \
         commas [default: {DEFAULT_MODEL}]",
        values::any_of(&presets)
    )
}

/// The parser of `--dtype`. The third float type is for devices in tests.
pub fn dtypes() -> impl TypedValueParser<Value = FloatType> {
    flags::named(&["f32", "bf16"])
}

/// Refuses `--frozen-dtype` with a `--dtype` of 16 bits.
pub fn check_frozen_dtype(frozen: Option<FloatType>, dtype: FloatType) -> Result<(), Usage> {
    match frozen {
        Some(_) if dtype != FloatType::F32 => Err(Usage::new(format!(
            "--frozen-dtype applies to --dtype f32, and --dtype {dtype} stores weights that are not trained in its own type; leave one of \
             the two out"
        ))),
        _ => Ok(()),
    }
}

/// The parser of `--loss-on`.
fn loss_on() -> impl TypedValueParser<Value = LossOn> {
    flags::named(&LossOn::NAMES)
}

impl ModelSettings {
    /// The name or directory of the model, or that of the default one.
    pub fn name(&self) -> &str {
        self.model.as_deref().unwrap_or(DEFAULT_MODEL)
    }

    /// The name or path of the data, or that of the built-in text.
    pub fn text(&self) -> &str {
        self.data.as_deref().unwrap_or(BUILTIN)
    }

    /// The settings of each model. Commas separate models, and also data, with one value for all models or one for each; an
    /// existing path whose name has commas is one value.
    pub(crate) fn each(self) -> Result<Vec<Self>, Usage> {
        let (models, data) = (parted(self.model.as_deref()), parted(self.data.as_deref()));
        if data.len() > 1 && data.len() != models.len() {
            return Err(Usage::new(format!(
                "--data has {} values and --model {}; pass one --data for all models, or one for each",
                data.len(),
                models.len()
            )));
        }
        let of = |(index, model): (usize, Option<String>)| {
            let data = data.get(index).or(data.first()).cloned().flatten();
            Self { model, data, ..self.clone() }
        };
        Ok(models.into_iter().enumerate().map(of).collect())
    }

    /// A short name of this model.
    pub(crate) fn short_name(&self) -> String {
        if let Some(name) = self.name().strip_prefix(OWN) {
            return name.to_owned();
        }
        // A repository on the hub may have a revision suffix.
        let name = self.name();
        let name = Path::new(
            name.split_once('@').filter(|_| !Path::new(name).exists()).map_or(name, |(name, _)| name),
        );
        let name = if name.extension().is_some_and(|end| end == "json") {
            name.with_extension("")
        } else {
            name.to_owned()
        };
        name.file_name().map_or_else(|| self.name().to_owned(), |name| name.to_string_lossy().into_owned())
    }

    /// These settings with the defaults for those that are not given, and with absolute paths.
    pub fn resolve(self) -> Result<Self> {
        let (model, data) = (self.name(), self.text());
        if is_own(model) || is_own(data) {
            return Ok(Self { model: Some(model.to_owned()), data: Some(data.to_owned()), ..self });
        }
        Ok(Self {
            model: Some(if Path::new(model).exists() { absolute(model)? } else { model.to_owned() }),
            data: Some(if data == BUILTIN { data.to_owned() } else { absolute(data)? }),
            ..self
        })
    }
}

/// Returns whether a model or data of this name is one that an embedding program brings.
pub(crate) fn is_own(name: &str) -> bool {
    name.starts_with(OWN)
}

/// The parts of a list separated by commas; an existing path is one part.
fn parted(text: Option<&str>) -> Vec<Option<String>> {
    match text {
        Some(text) if !Path::new(text).exists() => {
            text.split(',').map(|part| Some(part.to_owned())).collect()
        }
        text => vec![text.map(str::to_owned)],
    }
}

/// Returns true for the default, which is left out of specs.
fn is_default(loss_on: &LossOn) -> bool {
    *loss_on == LossOn::default()
}

pub(super) fn absolute(path: &str) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("`{path}` is not a usable path"))?;
    let text = path.to_str().with_context(|| format!("the path `{}` is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}
