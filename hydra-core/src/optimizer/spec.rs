//! The optimizer of a task: shared, comparable and serializable.

use super::{AdamW, Elements, Optimizer, REGISTERED, Sgd, Step};
use crate::{CoreError, Settings};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// An optimizer with its settings. Clones share it.
///
/// Two are equal if their names and settings are equal. Files store its `name` and, at the same level, its
/// settings. If the name in a file is not registered, the result is a placeholder for a task's own optimizer:
/// it compares equal to that optimizer, which is all that a checkpoint requires, and a spec with it is
/// refused ([`TrainSpec::validate`](crate::TrainSpec::validate)).
#[derive(Clone)]
pub struct OptimizerSpec(Arc<dyn Optimizer>);

impl OptimizerSpec {
    /// [`AdamW`] with betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01.
    pub fn adamw(lr: f64) -> Self {
        AdamW::new(lr).into()
    }

    /// [`Sgd`] with momentum 0.9 and no decay.
    pub fn sgd(lr: f64) -> Self {
        Sgd::new(lr).into()
    }

    /// The names of the built-in optimizers.
    pub fn names() -> impl ExactSizeIterator<Item = &'static str> {
        REGISTERED.iter().map(|of| of.name)
    }

    /// Returns the built-in optimizer with this name, learning rate and weight decay, and default settings
    /// otherwise, or `None` if there is none.
    pub fn named(name: &str, lr: f64, weight_decay: f64) -> Option<Self> {
        REGISTERED.iter().find(|of| of.name == name).map(|of| (of.new)(lr, weight_decay))
    }

    fn description(&self) -> Description {
        Description { name: self.name().to_owned(), settings: self.settings() }
    }
}

impl<R: Optimizer> From<R> for OptimizerSpec {
    fn from(rule: R) -> Self {
        Self(Arc::new(rule))
    }
}

impl Deref for OptimizerSpec {
    type Target = dyn Optimizer;

    fn deref(&self) -> &dyn Optimizer {
        self.0.as_ref()
    }
}

impl fmt::Debug for OptimizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for OptimizerSpec {
    fn eq(&self, other: &Self) -> bool {
        self.description() == other.description()
    }
}

impl Serialize for OptimizerSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.description().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OptimizerSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let described = Description::deserialize(deserializer)?;
        match REGISTERED.iter().find(|of| of.name == described.name) {
            Some(of) => (of.read)(&described.settings).map_err(D::Error::custom),
            None => Ok(described.into()),
        }
    }
}

/// An optimizer as stored in a file. It cannot step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Description {
    name: String,
    #[serde(flatten)]
    settings: Settings,
}

impl Optimizer for Description {
    fn name(&self) -> &str {
        &self.name
    }

    fn settings(&self) -> Settings {
        self.settings.clone()
    }

    fn lr(&self) -> f64 {
        self.settings.number("lr").unwrap_or_default()
    }

    fn moments(&self) -> usize {
        0
    }

    fn validate(&self) -> Result<(), CoreError> {
        let expected = "a built-in optimizer, or an `Optimizer` that the task provides";
        Err(CoreError::Spec { name: "optimizer", found: self.name.clone(), expected })
    }

    fn update(&self, _: &Step, _: Elements<'_, '_>) {
        panic!("the optimizer `{}` is known only by its name and cannot step", self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainSpec;

    #[test]
    fn optimizers_have_the_usual_constants() {
        let expected = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        assert_eq!((OptimizerSpec::adamw(0.1), expected.moments(), expected.lr()), (expected.into(), 2, 0.1));
        let expected = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 };
        assert_eq!((OptimizerSpec::sgd(0.1), expected.moments(), expected.lr()), (expected.into(), 1, 0.1));
        assert_eq!(Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.1 }.moments(), 0);
    }

    #[test]
    fn files_have_the_name_and_the_settings() {
        let adamw = "name = \"adamw\"\nlr = 0.001\nbeta1 = 0.9\nbeta2 = 0.999\neps = 0.00000001\nweight_decay = 0.01\n";
        assert_eq!(toml::to_string(&OptimizerSpec::adamw(1e-3)).unwrap(), adamw);
        let sgd = "name = \"sgd\"\nlr = 1.0\nmomentum = 0.9\nweight_decay = 0.0\n";
        assert_eq!(toml::to_string(&OptimizerSpec::sgd(1.0)).unwrap(), sgd);
        let read = |text: &str| toml::from_str::<OptimizerSpec>(text).map_err(|error| error.to_string());
        assert_eq!(read(adamw), Ok(OptimizerSpec::adamw(1e-3)));
        assert!(read(adamw).unwrap().downcast_ref::<AdamW>().is_some());
        assert_eq!(read(&sgd.replace("1.0", "1")), Ok(OptimizerSpec::sgd(1.0)), "a whole number too");
        assert_ne!(read(sgd), Ok(OptimizerSpec::sgd(1.5)));
        let missing = read("name = \"sgd\"\nlr = 1.0\nmomentum = 0.9\n").unwrap_err();
        assert!(missing.contains("`weight_decay` is missing"), "{missing}");
    }

    #[derive(Debug)]
    struct Own(f64);

    impl Optimizer for Own {
        fn name(&self) -> &str {
            "own"
        }

        fn settings(&self) -> Settings {
            Settings::new().with("lr", self.0).with("beta", 0.5)
        }

        fn lr(&self) -> f64 {
            self.0
        }

        fn moments(&self) -> usize {
            1
        }

        fn update(&self, _: &Step, elements: Elements<'_, '_>) {
            elements.update(|p, g, [m]| (p - g, [m]));
        }
    }

    #[test]
    fn an_optimizer_of_a_task_is_known_again_and_not_run_from_a_file() {
        let own = OptimizerSpec::from(Own(0.25));
        let text = toml::to_string(&own).unwrap();
        let read: OptimizerSpec = toml::from_str(&text).unwrap();
        assert_eq!((&read, read.lr()), (&own, 0.25));
        assert_ne!(read, Own(0.5).into());
        assert!(TrainSpec::new(own, 8).validate().is_ok());
        let refused = TrainSpec::new(read, 8).validate().unwrap_err().to_string();
        assert!(refused.starts_with("`optimizer` is own, expected a built-in optimizer"), "{refused}");
        assert!(TrainSpec::new(Own(f64::NAN), 8).validate().is_err(), "every learning rate is checked");
    }
}
