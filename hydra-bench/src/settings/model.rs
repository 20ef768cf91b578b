//! The model and its text.

use super::{flags, values};
use crate::terminal::Usage;
use anyhow::{Context, Result};
use clap::Args;
use clap::builder::{NonEmptyStringValueParser, TypedValueParser};
use hydra_core::FloatType;
use hydra_models::data::{Column, LossOn};
use hydra_models::family;
use hydra_models::tokenizer::BuiltIn;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The model when nobody says which.
pub(crate) const DEFAULT_MODEL: &str = "bytes-tiny";
const BUILTIN: &str = "builtin";

/// The model and its text.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Model and data")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub(crate) struct ModelSettings {
    #[arg(long, value_name = "PRESET|FILE.json|DIR", value_parser = NonEmptyStringValueParser::new(), help = model_help())]
    pub(crate) model: Option<String>,
    /// `builtin`, a WikiText directory, a plain-text file, instruction data: FILE.jsonl, .json, .csv, .tsv or .parquet, or a
    /// directory with such files called train, validation and test, or a directory of images. Of a file the last two tenths are
    /// validation and test. For several models, one for all or one for each, separated by commas [default: builtin]
    #[arg(long, value_name = "builtin|DIR|FILE", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) data: Option<String>,
    /// The columns of instruction data that are read as fields, such as prompt=question,completion=answer
    #[arg(long, value_name = "FIELD=COLUMN,..", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) columns: Vec<Column>,
    /// Tokens in a block of text, an example or a packed row; a longer example is cut [default: the model's positions, but at
    /// most 512 for blocks, and for rows unless an example is longer]
    #[arg(long, value_name = "N", value_parser = values::context, allow_hyphen_values = true)]
    pub(crate) context: Option<usize>,
    /// The tokens of instruction data whose prediction counts: what the model is to say, or prompts too
    #[arg(long, default_value = "completions", value_parser = loss_on())]
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) loss_on: LossOn,
    /// Lay several examples of instruction data in each item, in rows of at most --context tokens; none sees anything of the
    /// others
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) pack: bool,
    /// Read texts as bytes, or with GPT-2's tokenizer, in place of the tokenizer of the model's directory [default: the
    /// directory's; of a model without one bytes, or GPT-2's for its 50257 ids]
    #[arg(long, value_name = "bytes|gpt2", value_parser = flags::named::<BuiltIn>(&BuiltIn::NAMES))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokenizer: Option<BuiltIn>,
    /// The probability of every dropout in the model [default: as its configuration says]
    #[arg(long, value_name = "P", value_parser = values::dropout, allow_hyphen_values = true)]
    pub(crate) dropout: Option<f64>,
    /// Cut the tables of tokens of the model (a Llama, Mistral or Qwen) into so many layers each, so that a device need not have
    /// room for a whole one [default: whole]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vocabulary_parts: Option<usize>,
    /// Train these layers alone and keep the others as they are: their names, separated by commas, or last:N for the last
    /// N before the head [default: all]
    #[arg(long, value_name = "LAYER,..", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) train: Vec<String>,
    /// The type of parameters, activations and gradients on devices, and of what moves between them and the host,
    /// where masters are f32
    #[arg(long, default_value = "f32", value_parser = dtypes())]
    pub(crate) dtype: FloatType,
    /// The seed of initial weights, data order and dropout
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed, allow_hyphen_values = true)]
    pub(crate) seed: u64,
}

/// The help of `--model`.
pub(crate) fn model_help() -> String {
    let presets: Vec<&str> = family::presets().map(|preset| preset.name).collect();
    format!(
        "A preset ({}) or a configuration, trained from scratch, or a Hugging Face directory, or org/name in the Hugging Face \
         cache [default: {DEFAULT_MODEL}]",
        values::any_of(&presets)
    )
}

/// A reader of `--dtype`. The third type is for devices in tests.
pub(crate) fn dtypes() -> impl TypedValueParser<Value = FloatType> {
    flags::named(&["f32", "bf16"])
}

/// A reader of `--loss-on`.
fn loss_on() -> impl TypedValueParser<Value = LossOn> {
    flags::named(&LossOn::NAMES)
}

impl ModelSettings {
    pub(crate) fn name(&self) -> &str {
        self.model.as_deref().unwrap_or(DEFAULT_MODEL)
    }

    pub(crate) fn text(&self) -> &str {
        self.data.as_deref().unwrap_or(BUILTIN)
    }

    /// The settings of each model that is named. Several are separated by commas, and so are several data, of which there is
    /// one for all models or one for each; what is there under a name with commas is one.
    pub(crate) fn each(self) -> Result<Vec<Self>, Usage> {
        let (models, data) = (parted(self.model.as_deref()), parted(self.data.as_deref()));
        if data.len() > 1 && data.len() != models.len() {
            return Err(Usage::new(format!(
                "--data names {}, and --model {}: give data for all models, or one for each",
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

    /// A name that is short, of this model.
    pub(crate) fn short_name(&self) -> String {
        // A repository on the hub may have a revision behind it.
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

    /// These settings with the defaults in place of what is not given; paths become absolute.
    pub(crate) fn resolve(self) -> Result<Self> {
        let (model, data) = (self.name(), self.text());
        Ok(Self {
            model: Some(if Path::new(model).exists() { absolute(model)? } else { model.to_owned() }),
            data: Some(if data == BUILTIN { data.to_owned() } else { absolute(data)? }),
            ..self
        })
    }
}

/// The parts of a list, or what is not one.
fn parted(text: Option<&str>) -> Vec<Option<String>> {
    match text {
        Some(text) if !Path::new(text).exists() => {
            text.split(',').map(|part| Some(part.to_owned())).collect()
        }
        text => vec![text.map(str::to_owned)],
    }
}

/// Leaves what nobody asked for out of specs.
fn is_default(loss_on: &LossOn) -> bool {
    *loss_on == LossOn::default()
}

pub(super) fn absolute(path: &str) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("`{path}` is not a usable path"))?;
    let text = path.to_str().with_context(|| format!("the path `{}` is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}
