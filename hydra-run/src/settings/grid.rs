//! Grids: every combination of the values of their axes. It opens no files.

use super::axis::{Axis, Setting, SettingGroup};
use super::training::LENGTHS;
use super::{AdapterSettings, Configuration, ModelSettings, TrainingSettings, flags};
use crate::terminal::Usage;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// The setting whose values are contexts of models, not changes of configurations.
const CONTEXT: &str = "context";

/// The axes of a grid in the order of their names, without those of the flags `--batch`, `--lr` and `--lora`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Table", into = "Table")]
pub struct Grid(Vec<Axis>);

impl Grid {
    pub(crate) fn new(mut axes: Vec<Axis>) -> Result<Self, Usage> {
        axes.sort_by(|one, other| one.name.cmp(&other.name));
        match axes.windows(2).find(|pair| pair[0].name == pair[1].name) {
            Some(pair) => Err(Usage::new(format!("{} has two lists; give it one", pair[0].name))),
            None => Ok(Self(axes)),
        }
    }

    /// Returns true if no setting has a list.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if this setting has a list.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|axis| axis.name == name)
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

    /// The configurations: every combination of batch sizes, learning rates, ranks and the other lists, in this order.
    pub(crate) fn of(
        &self,
        training: &TrainingSettings,
        adapters: &AdapterSettings,
    ) -> Result<Vec<Configuration>, Usage> {
        training.check_lists()?;
        let whole = |list: &[usize]| list.iter().map(|number| *number as i64).collect::<Vec<_>>();
        let ranks = (!adapters.lora.is_empty()).then(|| Axis::new("lora", whole(&adapters.lora)));
        let flags = [Axis::new("batch", whole(&training.batch)), Axis::new("lr", training.lr.clone())];
        let mut grid = vec![Configuration::default()];
        let others = self.0.iter().filter(|axis| axis.name != CONTEXT);
        for Axis { name, values } in flags.iter().chain(&ranks).chain(others) {
            let with = |one: &Configuration, value: &Value| one.clone().with(name, value.clone());
            let longer = grid.iter().flat_map(|one| values.iter().map(move |value| with(one, value)));
            grid = longer.collect::<Result<_, _>>()?;
        }
        for one in &mut grid {
            let rank = one.lora.map(|rank| format!("-r{rank}")).unwrap_or_default();
            one.name = format!("b{}-lr{:e}{rank}", one.batch, one.lr);
        }
        Ok(grid)
    }

    /// The list of `seed`, if there is one: the seeds of the configurations' initial weights.
    pub(crate) fn seeds(&self) -> Option<Vec<u64>> {
        self.whole("seed")
    }

    /// The whole numbers in the list of a setting, if it has one.
    fn whole<T: TryFrom<i64>>(&self, name: &str) -> Option<Vec<T>> {
        let Axis { values, .. } = self.0.iter().find(|axis| axis.name == name)?;
        Some(values.iter().filter_map(|value| T::try_from(value.as_integer()?).ok()).collect())
    }

    /// Each model with each context of the list, if there is one: each context needs data of its own.
    pub(crate) fn models(&self, models: Vec<ModelSettings>) -> Vec<ModelSettings> {
        let Some(contexts) = self.whole::<usize>(CONTEXT) else { return models };
        let with = |one: ModelSettings| {
            contexts.iter().map(move |context| ModelSettings { context: Some(*context), ..one.clone() })
        };
        models.into_iter().flat_map(with).collect()
    }

    /// The number of contexts of each model.
    pub(crate) fn contexts(&self) -> usize {
        self.whole::<usize>(CONTEXT).map_or(1, |contexts| contexts.len())
    }

    /// Refuses a list of contexts in a file that does not have each model with each of them.
    pub(crate) fn check_contexts(&self, models: usize) -> Result<(), Usage> {
        match models % self.contexts() {
            0 => Ok(()),
            _ => Err(Usage::new(
                "grid.context: a spec has each model once for each of these, in [model] and [[models]]; change them together",
            )),
        }
    }
}

impl TryFrom<Table> for Grid {
    type Error = Usage;

    /// Refuses lists with values that the flags would refuse.
    fn try_from(table: Table) -> Result<Self, Usage> {
        let axis = |(name, list): (String, Value)| {
            let list = list.as_array().ok_or_else(|| format!("grid.{name}: expected a list of values"))?;
            let texts: Vec<String> = list.iter().map(flags::text_of).collect();
            let separator = Setting::named(&name).map_or(',', Setting::separator).to_string();
            let read = format!("{name}={}", texts.join(&separator)).parse();
            read.map_err(|why: String| format!("grid.{name}: {why}"))
        };
        Self::new(table.into_iter().map(axis).collect::<Result<_, _>>().map_err(Usage::new)?)
    }
}

impl From<Grid> for Table {
    fn from(Grid(axes): Grid) -> Self {
        axes.into_iter().map(|Axis { name, values }| (name, Value::Array(values))).collect()
    }
}

impl Configuration {
    /// This configuration with another value of a setting.
    pub(super) fn with(mut self, name: &str, value: Value) -> Result<Self, Usage> {
        let refused = |what| Usage::new(format!("{name} = {value} is not a {what}"));
        let whole = || {
            let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
            number.ok_or_else(|| refused("whole number"))
        };
        match name {
            "batch" => self.batch = whole()? as usize,
            "lora" => self.lora = Some(whole()? as usize),
            "seed" => self.seed = Some(whole()?),
            "lr" => {
                let number = value.as_float().or(value.as_integer().map(|number| number as f64));
                self.lr = number.ok_or_else(|| refused("number"))?;
            }
            _ => drop(self.changes.insert(name.to_owned(), value)),
        }
        Ok(self)
    }

    /// Its changes of the model's and the adapters' settings; tasks with equal changes share one chain.
    pub(crate) fn of_model(&self) -> Table {
        let mut own = self.changes.clone();
        own.retain(|name, _| Setting::group_of(name) != SettingGroup::Training);
        own
    }

    /// The settings of a group, `of_run`, with its changes.
    pub(crate) fn changed<S: Clone + Serialize + DeserializeOwned>(
        &self,
        of_run: &S,
        group: SettingGroup,
    ) -> Result<S, Usage> {
        let mut changes = self.changes.clone();
        changes.retain(|name, _| Setting::group_of(name) == group);
        if changes.is_empty() {
            return Ok(of_run.clone());
        }
        let mut table = Table::try_from(of_run).map_err(Usage::from_error)?;
        if LENGTHS.iter().any(|length| changes.contains_key(*length)) {
            LENGTHS.iter().for_each(|length| drop(table.remove(*length)));
        }
        table.extend(changes);
        table.try_into().map_err(Usage::from_error)
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
        Grid::new(lists.iter().map(|text| text.parse().unwrap()).collect()).unwrap()
    }

    fn training() -> TrainingSettings {
        TrainingSettings { batch: vec![8], lr: vec![1e-3], epochs: Some(1), ..flags::defaults() }
    }

    #[test]
    fn every_combination_is_a_configuration() {
        let lists = grid(&["weight-decay=0,0.1", "optimizer=adamw,lion", "seed=1"]);
        let all = lists.of(&training(), &flags::defaults()).unwrap();
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
            "lora_targets=c_attn;c_attn,mlp.c_fc",
            "no_decay_norms=false,true",
            "optimizer=adamw,sgd",
            "schedule=linear,cosine",
            "seed=0,1",
            "steps=10,20",
            "warmup=0.1,5",
            "weight_decay=0,0.1",
        ] {
            let lists = grid(&[list]);
            let all = lists.of(&training(), &flags::defaults()).unwrap();
            let specs: Vec<_> = all.iter().map(|one| training().of(one, 0, 100).unwrap()).collect();
            let (name, _) = list.split_once('=').unwrap();
            let of_wsd = ["decay_steps", "decay_to"].contains(&name);
            assert_eq!(
                specs[0] == specs[1],
                Setting::group_of(name) != SettingGroup::Training && name != "seed" || of_wsd,
                "{list}"
            );
            assert_ne!(all[0], Configuration { name: all[0].name.clone(), ..all[1].clone() }, "{list}");
            let text = toml::to_string(&lists).unwrap();
            assert_eq!(toml::from_str::<Grid>(&text).unwrap(), lists, "{text}");
        }
    }

    #[test]
    fn what_is_no_list_of_values_is_refused_by_its_name() {
        for (text, says) in [
            ("weight_decay", "expected NAME=VALUE,.."),
            (
                "dtype=f32,bf16",
                "`dtype` cannot have a list of values: lists are for batch, lora, lr, accumulate, beta, clip",
            ),
            ("optimizer=adamw,adan", "optimizer: unknown value `adan`: expected one of"),
            ("weight_decay=0,x", "weight_decay: `x` is not a number"),
            ("weight_decay=0.1,0.10", "weight_decay = 0.1 is given twice"),
            ("seed=1,", "seed: a value is empty"),
        ] {
            let said = text.parse::<Axis>().unwrap_err();
            assert!(said.contains(says), "{said}");
        }
        let twice = ["seed=1,2", "seed=3,4"].map(|text| text.parse().unwrap());
        assert!(Grid::new(twice.to_vec()).unwrap_err().to_string().contains("seed has two lists"));
        let file = toml::from_str::<Grid>("clip = [0.5, -1.0]").unwrap_err();
        assert!(file.message().starts_with("grid.clip: clip: `-1` is out of range"), "{file}");
        let whole: Grid = toml::from_str("lora_alpha = [8, 16.0]").unwrap();
        assert_eq!(whole, grid(&["lora-alpha=8,16"]), "a whole number is a number");
    }
}
