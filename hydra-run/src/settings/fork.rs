//! Forks: the settings in which a new task differs from the task that it is forked from.

use super::axis::Setting;
use super::training::LENGTHS;
use super::{Configuration, TrainingSettings, flags, values};
use crate::terminal::Usage;
use clap::Args;
use serde::Serialize;
use toml::{Table, Value};

/// The settings that a fork may change, and some that are refused with a reason.
#[derive(Clone, Debug, Args, Serialize)]
pub struct ForkSettings {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) training: TrainingSettings,
    /// With --weights-only: seed of data order and dropout
    #[arg(long, value_name = "N", value_parser = values::seed, allow_hyphen_values = true)]
    pub(crate) seed: Option<u64>,
    /// With --weights-only: rank of the LoRA adapters
    #[arg(long, value_name = "RANK", value_parser = values::lora_rank, allow_hyphen_values = true)]
    pub(crate) lora: Option<usize>,
    /// Always refused: all tasks of a run have the same sequence length
    #[arg(long, value_name = "N", value_parser = values::context, allow_hyphen_values = true)]
    pub(crate) context: Option<usize>,
}

/// Settings that all tasks of a run share: the flag, its description, and the reason.
const IN_COMMON: [(&str, &str, &str); 5] = [
    ("context", "--context", "it determines the measured shapes and the data"),
    ("eval_limit", "--eval-limit", "it determines the data"),
    ("sample_prompts", "--sample-prompts", "all tasks continue the same prompts"),
    ("sample_tokens", "--sample-tokens", "all tasks continue the same prompts"),
    ("initial_validation", "--no-initial-validation", "it applies to the whole run"),
];

impl Configuration {
    /// This configuration under another name, with the given settings changed.
    pub(crate) fn forked(&self, name: &str, texts: &flags::Texts) -> Result<Self, Usage> {
        let (settings, given) = flags::read::<ForkSettings>(texts)?;
        if let Some((_, what, why)) = IN_COMMON.iter().find(|(name, ..)| given.iter().any(|of| of == name)) {
            return Err(Usage::new(format!("a fork cannot change {what}: {why}; start another run")));
        }
        let mut fork = Self { name: name.to_owned(), ..self.clone() };
        if LENGTHS.iter().any(|length| given.iter().any(|of| of == length)) {
            LENGTHS.iter().for_each(|length| drop(fork.changes.remove(*length)));
        }
        let mut table = Table::try_from(&settings).map_err(Usage::from_error)?;
        for name in &given {
            if let Some(value) = table.remove(name) {
                fork = fork.with(name, one(name, value)?)?;
            }
        }
        Ok(fork)
    }
}

/// The value of a setting; of a flag that takes a list of a grid, the only one.
fn one(name: &str, value: Value) -> Result<Value, Usage> {
    match value {
        Value::Array(mut list) if Setting::named(name).is_some() => match list.len() {
            1 => Ok(list.remove(0)),
            count => Err(Usage::new(format!("{name}: expected one value for a fork, got {count}"))),
        },
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent() -> Configuration {
        let changes = Table::from_iter([("epochs".to_owned(), toml::Value::Integer(2))]);
        Configuration { name: "a".to_owned(), model: 0, batch: 4, lr: 1e-3, lora: None, seed: None, changes }
    }

    fn texts(of: &[(&str, &str)]) -> flags::Texts {
        of.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_fork_has_what_is_given_in_place_of_its_parents() {
        let given = [("lr", "1e-4"), ("steps", "9"), ("weight-decay", "0.5"), ("no-decay-norms", "true")];
        let fork = parent().forked("b", &texts(&given)).unwrap();
        assert_eq!((fork.name.as_str(), fork.batch, fork.lr), ("b", 4, 1e-4));
        let run = TrainingSettings { epochs: Some(1), ..flags::defaults() };
        let spec = run.of(&fork, 0, 1000).unwrap();
        assert_eq!(spec.length, hydra_core::Length::Steps(9), "steps take the place of epochs");
        assert_eq!(spec.decay, hydra_core::Decay::Matrices);
        let patience = parent().forked("b", &texts(&[("patience", "2")])).unwrap();
        assert_eq!(patience.changes["patience"].as_integer(), Some(2));
    }

    #[test]
    fn what_a_fork_cannot_have_is_refused_by_its_name() {
        for (name, text, says) in [
            ("context", "64", "a fork cannot change --context"),
            ("eval-limit", "2", "a fork cannot change --eval-limit"),
            ("rl", "1e-4", "`rl` is not a setting of a task"),
            ("lr", "fast", "lr: `fast` is not a number"),
            ("lr", "1e-3,1e-4", "expected one value for a fork, got 2"),
            ("schedule", "cosin", "schedule: unknown value `cosin`"),
            ("no-decay-norms", "maybe", "expected true"),
        ] {
            let said = parent().forked("b", &texts(&[(name, text)])).unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }
}
