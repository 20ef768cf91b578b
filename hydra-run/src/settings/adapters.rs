//! LoRA adapters of a frozen model.

use super::axis::repeated;
use super::{ModelSettings, check_frozen_dtype, values};
use crate::terminal::Usage;
use anyhow::Result;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use hydra_models::ModelError;
use hydra_models::family::TaskType;
use hydra_models::lora::{AdapterDir, Base, Lora, Targets};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The ranks of LoRA adapters that a grid compares, and the settings that they share.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Adapters")]
#[serde(default = "super::flags::defaults", deny_unknown_fields)]
pub struct AdapterSettings {
    /// Train LoRA adapters of this rank and freeze the model; several ranks, separated by commas, make a grid [default: train
    /// the model's own weights]
    #[arg(long, value_name = "RANK,..", value_delimiter = ',', value_parser = values::lora_rank, allow_hyphen_values = true)]
    pub lora: Vec<usize>,
    /// LoRA scaling: the adapter's output is multiplied by X / rank
    #[arg(long, value_name = "X", default_value = "8", value_parser = values::lora_alpha, allow_hyphen_values = true)]
    pub lora_alpha: f64,
    /// Dropout probability on the adapters' inputs
    #[arg(long, value_name = "P", default_value = "0", value_parser = values::dropout, allow_hyphen_values = true)]
    pub lora_dropout: f64,
    /// Linear layers that get adapters, as PEFT's target_modules: name suffixes separated by commas, `all-linear`, or a regular
    /// expression for full names [default: c_attn for GPT-2, else q_proj,v_proj]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub lora_targets: Vec<String>,
    /// Rank-stabilized LoRA: multiply the adapter's output by X / sqrt(rank), with X of --lora-alpha
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub rslora: bool,
    /// Modules that are trained fully in addition to the adapters, by name suffix, such as lm_head,embed_tokens
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub modules_to_save: Vec<String>,
    /// Start from the adapters in this directory, written by PEFT or by a task of an earlier run
    #[arg(long, value_name = "DIR", value_parser = NonEmptyStringValueParser::new())]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Quantize the linear layers of the frozen model, other than the head, to 4 bits: nf4, as bitsandbytes does [default: not
    /// quantized]
    #[arg(long, value_name = "TYPE", value_parser = super::flags::named::<Base>(&["nf4"]))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// Save whole models with the adapters merged into their weights, instead of adapters alone
    #[arg(long)]
    pub merge: bool,
}

impl AdapterSettings {
    /// The settings of a model with the adapters of this directory, or without adapters.
    pub fn of(adapter: Option<String>) -> Self {
        Self { adapter, ..super::flags::defaults() }
    }

    /// Returns what is evaluated: the directory of adapters if there is one, else `model`.
    pub fn or_model<'a>(&'a self, model: &'a str) -> &'a str {
        self.adapter.as_deref().unwrap_or(model)
    }

    /// Returns true if no adapter setting is given.
    pub(crate) fn is_none(&self) -> bool {
        *self == super::flags::defaults()
    }

    /// These settings with absolute paths.
    pub(crate) fn resolve(self) -> Result<Self> {
        let adapter = self.adapter.as_deref().map(super::model::absolute).transpose()?;
        Ok(Self { adapter, ..self })
    }

    /// Refuses settings that contradict each other.
    pub fn check(&self, model: &ModelSettings) -> Result<(), Usage> {
        if self.adapter.is_some() && !self.lora.is_empty() {
            let says = "--adapter and --lora exclude each other: the adapters of --adapter have a rank already; pass one of them";
            return Err(Usage::new(says));
        }
        let of_adapter = Self::of(self.adapter.clone());
        if self.adapter.is_some() && (Self { merge: false, base: None, ..self.clone() }) != of_adapter {
            let says = "--adapter excludes --lora-alpha, --lora-dropout, --lora-targets, --rslora and --modules-to-save: the \
                        adapter_config.json of its directory sets them; leave them out";
            return Err(Usage::new(says));
        }
        let adapts = self.adapter.is_some() || !self.lora.is_empty();
        if adapts && !model.train.is_empty() {
            return Err(Usage::new(
                "--train excludes --lora and --adapter, which freeze the model's own layers; pass one of them",
            ));
        }
        check_frozen_dtype(model.frozen_dtype, model.dtype)?;
        if model.frozen_dtype.is_some() && !adapts && model.train.is_empty() {
            return Err(Usage::new(
                "--frozen-dtype sets the type of weights that are not trained, and all are trained; pass --lora RANK, --adapter DIR \
                 or --train too",
            ));
        }
        if !adapts && self.base.is_some() {
            return Err(Usage::new(
                "--base nf4 freezes the model's linear layers and needs adapters to train; pass --lora RANK or --adapter DIR too",
            ));
        }
        if !adapts && !self.is_none() {
            return Err(Usage::new(
                "--lora-alpha, --lora-dropout, --lora-targets, --rslora, --modules-to-save and --merge need adapters; pass --lora RANK too",
            ));
        }
        match repeated(&self.lora) {
            Some(rank) => Err(Usage::new(format!("--lora {rank} is given twice; give each rank once"))),
            None => Ok(()),
        }
    }

    /// Adapters of this rank, on the layers of `--lora-targets` or else on `targets`.
    pub fn of_rank(&self, rank: usize, targets: &[&str]) -> Lora {
        let known = || targets.iter().map(|target| (*target).to_owned()).collect();
        let names: Vec<String> =
            if self.lora_targets.is_empty() { known() } else { self.lora_targets.clone() };
        // A regular expression may contain commas.
        let text = names.join(",");
        let targets = match text.as_str() {
            _ if text.eq_ignore_ascii_case("all-linear") => Targets::AllLinear,
            _ if text.contains(|c| r"\()[]{}*+?|^$".contains(c)) => Targets::Pattern(text),
            _ => Targets::Names(names),
        };
        Lora {
            rank,
            alpha: self.lora_alpha,
            dropout: self.lora_dropout,
            targets,
            rslora: self.rslora,
            modules_to_save: self.modules_to_save.clone(),
            base: self.base.unwrap_or_default(),
            ..Lora::default()
        }
    }
}

/// Returns whether the adapters of the settings are those of a classifier of texts.
pub fn classifies(adapters: &AdapterSettings) -> Result<bool> {
    let Some(adapter) = &adapters.adapter else { return Ok(false) };
    Ok(AdapterDir::open(adapter)?.task_type() == Some(TaskType::SequenceClassification))
}

/// If `--model` names a directory of adapters, sets the model to their base model and `adapter` to the directory.
///
/// # Errors
/// Adapters whose base model is not found, and a directory that also holds a model.
pub fn find_base(model: &mut ModelSettings, adapter: &mut Option<String>) -> Result<()> {
    let path = PathBuf::from(model.name());
    if adapter.is_some() || !path.is_dir() {
        return Ok(());
    }
    let Some(name) = AdapterDir::base_of(&path)? else { return Ok(()) };
    if MODEL.iter().any(|file| path.join(file).is_file()) {
        let path = path.display();
        return Err(Usage::new(format!(
            "`{path}` holds both a model and adapters; pass --model {path} --adapter {path} to use both, or move the model to \
             another directory"
        ))
        .into());
    }
    let base = local(&path, &name).ok_or_else(|| {
        let found = format!("`{name}`, which is not a directory with a model here,");
        ModelError::AdapterBase { path: path.clone(), found }
    })?;
    let base = base.canonicalize().unwrap_or(base);
    let text = |path: &Path| super::model::absolute(&path.to_string_lossy());
    (model.model, *adapter) = (Some(text(&base)?), Some(text(&path)?));
    Ok(())
}

/// A note on adapters whose configuration names another base than this model's directory. Directories move, so that one of the same
/// name is the same base where the named one is not here.
pub fn other_base(settings: &AdapterSettings, model: Option<&Path>) -> Option<String> {
    let (adapters, model) = (Path::new(settings.adapter.as_ref()?), model?);
    // A configuration that cannot be read ends the command where the adapters are opened.
    let named = AdapterDir::base_of(adapters).ok()??;
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_same = match local(adapters, &named) {
        Some(base) => whole(&base) == whole(model),
        // The cache of the Hugging Face hub has `models--org--name` for `org/name`.
        None => {
            Path::new(&named).file_name() == model.file_name()
                || model.to_string_lossy().contains(&named.replace('/', "--"))
        }
    };
    let adapters = adapters.display();
    (!is_same).then(|| format!("note: `{adapters}` has adapters of another base, `{named}`"))
}

/// The weight files of a model, which a directory of adapters does not have.
const MODEL: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// The directory of a base model that adapters call `name`: relative to the current directory, to theirs, or to its parent.
fn local(adapters: &Path, name: &str) -> Option<PathBuf> {
    let sibling = adapters.parent().map(|parent| parent.join(name));
    let places = [Some(PathBuf::from(name)), Some(adapters.join(name)), sibling];
    places.into_iter().flatten().find(|place| place.join("config.json").is_file())
}

#[cfg(test)]
mod tests {
    use super::super::{Grid, TrainingSettings, flags};
    use super::*;
    use hydra_core::FloatType;

    fn settings() -> AdapterSettings {
        flags::defaults()
    }

    #[test]
    fn each_rank_is_a_configuration_of_each_other_setting() {
        let training = TrainingSettings { batch: vec![8], lr: vec![1e-3, 3e-4], ..flags::defaults() };
        let names = |adapters: AdapterSettings| {
            let grid = Grid::default().of(&training, &adapters).unwrap();
            grid.into_iter().map(|one| (one.name, one.lora)).collect::<Vec<_>>()
        };
        let name = |name: &str, rank| (name.to_owned(), rank);
        assert_eq!(names(settings()), [name("b8-lr1e-3", None), name("b8-lr3e-4", None)]);
        assert_eq!(
            names(AdapterSettings { lora: vec![4, 16], ..settings() }),
            [
                name("b8-lr1e-3-r4", Some(4)),
                name("b8-lr1e-3-r16", Some(16)),
                name("b8-lr3e-4-r4", Some(4)),
                name("b8-lr3e-4-r16", Some(16)),
            ]
        );
    }

    #[test]
    fn what_makes_no_sense_together_is_refused() {
        let model: ModelSettings = flags::defaults();
        let lora = || AdapterSettings { lora: vec![4], ..settings() };
        assert!(lora().check(&model).is_ok() && settings().check(&model).is_ok());
        let refused =
            |adapters: AdapterSettings, model: &ModelSettings| adapters.check(model).unwrap_err().to_string();
        assert!(refused(AdapterSettings { merge: true, ..settings() }, &model).contains("pass --lora"));
        assert!(
            refused(AdapterSettings { lora: vec![4, 8, 4], ..lora() }, &model)
                .contains("--lora 4 is given twice")
        );
        let both = AdapterSettings { adapter: Some("x".to_owned()), ..lora() };
        assert!(refused(both, &model).contains("--adapter"));
        let own = AdapterSettings { adapter: Some("x".to_owned()), rslora: true, ..settings() };
        assert!(refused(own, &model).contains("--rslora"));
        let quantized = || AdapterSettings { base: Some(Base::Nf4), ..settings() };
        assert!(refused(quantized(), &model).contains("--base nf4 freezes"));
        let of_adapter = AdapterSettings { adapter: Some("x".to_owned()), ..quantized() };
        assert!(of_adapter.check(&model).is_ok());
        assert_eq!(quantized().of_rank(4, &[]).base, Base::Nf4);
        let narrow = ModelSettings { frozen_dtype: Some(FloatType::Bf16), ..model.clone() };
        assert!(lora().check(&narrow).is_ok());
        assert!(refused(settings(), &narrow).contains("all are trained; pass --lora"));
        let both = ModelSettings { dtype: FloatType::Bf16, ..narrow };
        assert!(refused(lora(), &both).contains("--frozen-dtype applies to --dtype f32"));
        let some = ModelSettings { train: vec!["head".to_owned()], ..model };
        assert!(refused(lora(), &some).contains("--train"));
    }

    #[test]
    fn a_directory_of_adapters_is_read_beside_its_base() {
        let root = tempfile::TempDir::new().unwrap();
        let folder = root.path().canonicalize().unwrap();
        let (base, dir) = (folder.join("base"), folder.join("tuned"));
        [&base, &dir].iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        let config = |name: &str| format!("{{\"base_model_name_or_path\": \"{name}\"}}");
        let named = |name: &str| std::fs::write(dir.join("adapter_config.json"), config(name)).unwrap();
        let find = || {
            let mut model = ModelSettings { model: dir.to_str().map(str::to_owned), ..flags::defaults() };
            let mut adapter = None;
            find_base(&mut model, &mut adapter).map(|()| (model.model, adapter))
        };
        named("base");
        let said = find().unwrap_err().to_string();
        assert!(
            said.contains("`base`") && said.contains("--model BASE") && said.contains("--adapter"),
            "{said}"
        );
        std::fs::write(base.join("config.json"), "{}").unwrap();
        let text = |path: &Path| path.to_str().map(str::to_owned);
        assert_eq!(find().unwrap(), (text(&base), text(&dir)));
        named(base.to_str().unwrap());
        assert_eq!(find().unwrap(), (text(&base), text(&dir)));
        std::fs::write(dir.join("model.safetensors"), "").unwrap();
        assert!(find().unwrap_err().to_string().contains("holds both a model and adapters"));
        named("");
        assert!(find().unwrap_err().to_string().contains("no model"));
    }

    #[test]
    fn targets_are_those_of_the_family_unless_they_are_named() {
        let targets = |named: &[&str]| {
            let lora_targets = named.iter().map(|name| (*name).to_owned()).collect();
            AdapterSettings { lora_targets, ..settings() }.of_rank(4, &["c_attn"]).targets
        };
        assert_eq!(targets(&[]), vec!["c_attn".to_owned()].into());
        assert_eq!(targets(&["mlp.c_proj"]), vec!["mlp.c_proj".to_owned()].into());
        assert_eq!(targets(&["All-Linear"]), Targets::AllLinear);
        assert_eq!(targets(&[r".*\.\d{1", r"2}\..*"]), Targets::Pattern(r".*\.\d{1,2}\..*".to_owned()));
        assert_eq!(settings().of_rank(4, &[]).alpha, Lora::ALPHA);
    }
}
