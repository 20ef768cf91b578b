//! Grids over settings that have one value in most runs.

use super::{AdapterSettings, Configuration, TrainingSettings, flags, values};
use crate::terminal::Usage;
use clap::Args;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// The settings that can have a list of values in a grid. The flags `--batch`, `--lr` and `--lora` take lists themselves.
const VARIED: [&str; 17] = [
    "accumulate",
    "beta",
    "clip",
    "decay_steps",
    "decay_to",
    "dropout",
    "epochs",
    "gamma",
    "lora_alpha",
    "lora_dropout",
    "no_decay_norms",
    "optimizer",
    "schedule",
    "seed",
    "steps",
    "warmup",
    "weight_decay",
];

/// The varied settings that belong to the model, not to its training.
pub(super) const OF_MODEL: [&str; 5] = ["beta", "dropout", "gamma", "lora_alpha", "lora_dropout"];

/// Returns true if a setting can have a list of values in a grid.
pub fn is_varied(name: &str) -> bool {
    VARIED.contains(&name)
}

/// A list of values of one setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Varied {
    name: String,
    values: Vec<Value>,
}

/// The flags that parse the values of lists.
#[derive(Debug, Args, Serialize)]
struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    training: TrainingSettings,
    #[arg(long, value_parser = values::beta, allow_hyphen_values = true)]
    beta: Option<f64>,
    #[arg(long, value_parser = values::dropout, allow_hyphen_values = true)]
    dropout: Option<f64>,
    #[arg(long, value_parser = values::gamma, allow_hyphen_values = true)]
    gamma: Option<f64>,
    #[arg(long, value_parser = values::lora_alpha, allow_hyphen_values = true)]
    lora_alpha: Option<f64>,
    #[arg(long, value_parser = values::dropout, allow_hyphen_values = true)]
    lora_dropout: Option<f64>,
    #[arg(long, value_parser = values::seed, allow_hyphen_values = true)]
    seed: Option<u64>,
}

/// Reads `NAME=VALUE,..`.
pub(super) fn varied(text: &str) -> Result<Varied, String> {
    let (name, list) = text.split_once('=').ok_or("expected NAME=VALUE,.. such as weight_decay=0,0.1")?;
    let name = name.trim().replace('-', "_");
    if !is_varied(&name) {
        return Err(format!(
            "`{name}` cannot have a list of values: lists are for batch, lora, lr, {}",
            values::any_of(&VARIED)
        ));
    }
    let mut values = Vec::new();
    for text in list.split(',') {
        let value = value_of(&name, text.trim())?;
        if values.contains(&value) {
            return Err(format!("{name} = {value} is given twice; give each value once"));
        }
        values.push(value);
    }
    Ok(Varied { name, values })
}

/// A value in the notation of files.
fn value_of(name: &str, text: &str) -> Result<Value, String> {
    if let ("no_decay_norms", Ok(value)) = (name, text.parse()) {
        return Ok(Value::Boolean(value));
    }
    let texts = flags::Texts::from([(name.to_owned(), text.to_owned())]);
    let (settings, _) = flags::read::<Settings>(&texts).map_err(|error| error.to_string())?;
    let mut table = Table::try_from(&settings).map_err(|error| error.to_string())?;
    table.remove(name).ok_or_else(|| format!("{name}: `{text}` is not a value"))
}

/// The lists of a grid, by the names of their settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Grid(Table);

impl Grid {
    pub(crate) fn new(lists: Vec<Varied>) -> Result<Self, Usage> {
        let mut table = Table::new();
        for Varied { name, values } in lists {
            if table.insert(name.clone(), Value::Array(values)).is_some() {
                return Err(Usage::new(format!("{name} has two lists; give it one")));
            }
        }
        Ok(Self(table))
    }

    /// Returns true if no setting has a list.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if this setting has a list.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Refuses lists with values that the flags would refuse.
    pub(crate) fn check(&self) -> Result<(), Usage> {
        for (name, list) in &self.0 {
            let list = list
                .as_array()
                .ok_or_else(|| Usage::new(format!("grid.{name}: expected a list of values")))?;
            let texts: Vec<String> = list.iter().map(text_of).collect();
            varied(&format!("{name}={}", texts.join(",")))
                .map_err(|why| Usage::new(format!("grid.{name}: {why}")))?;
        }
        Ok(())
    }

    /// Refuses a list of `epochs` or `steps` together with the other setting, which would have no effect.
    pub(crate) fn check_lengths(&self, training: &TrainingSettings) -> Result<(), Usage> {
        let given = [("epochs", training.epochs.is_some()), ("steps", training.steps.is_some())];
        let both = given.into_iter().all(|(name, given)| given || self.has(name));
        let lists = given.into_iter().any(|(name, _)| self.has(name));
        match both && lists {
            true => Err(Usage::new(
                "a list of --epochs excludes --steps, and a list of --steps excludes --epochs; leave the other one out",
            )),
            false => Ok(()),
        }
    }

    /// Each of these configurations with each combination of the values.
    pub(crate) fn of(&self, mut grid: Vec<Configuration>) -> Vec<Configuration> {
        for (name, values) in &self.0 {
            let values = values.as_array().map_or(&[][..], Vec::as_slice);
            grid = grid.iter().flat_map(|one| values.iter().map(|value| one.with(name, value))).collect();
        }
        grid
    }

    /// The list of `seed`, if there is one: the seeds of the configurations' initial weights.
    pub(crate) fn seeds(&self) -> Option<Vec<u64>> {
        let seeds = self.0.get("seed")?.as_array()?;
        Some(seeds.iter().filter_map(|seed| u64::try_from(seed.as_integer()?).ok()).collect())
    }
}

/// A value in the notation of a command line.
fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Float(number) => number.to_string(),
        other => other.to_string(),
    }
}

impl Configuration {
    /// This configuration with another value of a setting.
    fn with(&self, name: &str, value: &Value) -> Self {
        let mut one = self.clone();
        match (name, value.as_integer().map(u64::try_from)) {
            ("seed", Some(Ok(seed))) => one.seed = Some(seed),
            _ => drop(one.changes.insert(name.to_owned(), value.clone())),
        }
        one
    }

    /// Its changes of the model's settings; tasks with equal changes share one chain.
    pub(crate) fn of_model(&self) -> Table {
        let own = self.changes.iter().filter(|(name, _)| OF_MODEL.contains(&name.as_str()));
        own.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// The adapter settings of the run with this configuration's changes.
    pub(crate) fn adapters(&self, of_run: &AdapterSettings) -> AdapterSettings {
        AdapterSettings {
            lora_alpha: self.number("lora_alpha").unwrap_or(of_run.lora_alpha),
            lora_dropout: self.number("lora_dropout").unwrap_or(of_run.lora_dropout),
            ..of_run.clone()
        }
    }

    /// Its changed number for a setting, if it has one.
    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        self.changes.get(name)?.as_float()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(lists: &[&str]) -> Grid {
        Grid::new(lists.iter().map(|text| varied(text).unwrap()).collect()).unwrap()
    }

    fn training() -> TrainingSettings {
        TrainingSettings { batch: vec![8], lr: vec![1e-3], epochs: Some(1), ..flags::defaults() }
    }

    #[test]
    fn every_combination_is_a_configuration() {
        let lists = grid(&["weight-decay=0,0.1", "optimizer=adamw,lion", "seed=1"]);
        let all = lists.of(training().grid().unwrap());
        assert_eq!((all.len(), all[0].seed), (4, Some(1)));
        let spec = training().of(&all[3], 0, 100).unwrap();
        assert_eq!((spec.seed, spec.optimizer.name()), (1, "lion"));
        assert_eq!(serde_json::to_value(&spec.optimizer).unwrap()["weight_decay"], 0.1);
        assert_eq!(lists.seeds(), Some(vec![1]));
    }

    #[test]
    fn every_setting_that_has_lists_is_read_and_trained() {
        for list in [
            "accumulate=1,2",
            "beta=0.1,0.5",
            "clip=0.5,1",
            "decay_steps=1,2",
            "decay_to=0,0.5",
            "dropout=0,0.1",
            "epochs=1,2",
            "gamma=0,0.5",
            "lora_alpha=8,16",
            "lora_dropout=0,0.1",
            "no_decay_norms=false,true",
            "optimizer=adamw,sgd",
            "schedule=linear,cosine",
            "seed=0,1",
            "steps=10,20",
            "warmup=0.1,5",
            "weight_decay=0,0.1",
        ] {
            let lists = grid(&[list]);
            let all = lists.of(training().grid().unwrap());
            let specs: Vec<_> = all.iter().map(|one| training().of(one, 0, 100).unwrap()).collect();
            let (name, _) = list.split_once('=').unwrap();
            let of_wsd = ["decay_steps", "decay_to"].contains(&name);
            assert_eq!(specs[0] == specs[1], OF_MODEL.contains(&name) || of_wsd, "{list}");
            assert_ne!(all[0], Configuration { name: all[0].name.clone(), ..all[1].clone() }, "{list}");
            let text = toml::to_string(&lists).unwrap();
            assert_eq!(toml::from_str::<Grid>(&text).unwrap(), lists, "{text}");
            lists.check().unwrap();
        }
        assert_eq!(VARIED.len(), 17);
    }

    #[test]
    fn what_is_no_list_of_values_is_refused_by_its_name() {
        for (text, says) in [
            ("weight_decay", "expected NAME=VALUE,.."),
            (
                "context=64,128",
                "`context` cannot have a list of values: lists are for batch, lora, lr, accumulate, beta, clip",
            ),
            ("optimizer=adamw,adan", "optimizer: unknown value `adan`: expected one of"),
            ("weight_decay=0,x", "weight_decay: `x` is not a number"),
            ("weight_decay=0.1,0.10", "weight_decay = 0.1 is given twice"),
            ("seed=1,", "seed: a value is empty"),
        ] {
            let said = varied(text).unwrap_err();
            assert!(said.contains(says), "{said}");
        }
        let twice = ["seed=1,2", "seed=3,4"].map(|text| varied(text).unwrap());
        assert!(Grid::new(twice.to_vec()).unwrap_err().to_string().contains("seed has two lists"));
        let file: Grid = toml::from_str("clip = [0.5, -1.0]").unwrap();
        assert!(file.check().unwrap_err().to_string().starts_with("grid.clip: clip: `-1` is out of range"));
    }
}
