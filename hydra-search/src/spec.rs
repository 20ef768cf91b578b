//! The description of a search, from a file or flags.

use crate::names;
use crate::space::{Configuration, Range, Space, TrialsError, check_all};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The search methods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// All configurations of the grid, trained to the end.
    #[default]
    Grid,
    /// Random configurations, trained to the end.
    Random,
    /// Successive halving.
    Halving,
    /// Hyperband: brackets of successive halving.
    Hyperband,
    /// Asynchronous successive halving in virtual time.
    Asha,
    /// Population-based training.
    Pbt,
    /// The tree-structured Parzen estimator, in batches.
    Tpe,
}

impl Method {
    /// Every method.
    pub const ALL: [Self; 7] =
        [Self::Grid, Self::Random, Self::Halving, Self::Hyperband, Self::Asha, Self::Pbt, Self::Tpe];

    /// The name in specs and flags, such as `halving`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Grid => "grid",
            Self::Random => "random",
            Self::Halving => "halving",
            Self::Hyperband => "hyperband",
            Self::Asha => "asha",
            Self::Pbt => "pbt",
            Self::Tpe => "tpe",
        }
    }

    fn has_rungs(self) -> bool {
        matches!(self, Self::Halving | Self::Hyperband | Self::Asha)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Method {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::ALL.into_iter().find(|method| method.name() == text).ok_or_else(|| SpecError::Method {
            found: text.to_owned(),
            suggestion: names::suggestion(text, &Self::ALL.map(Self::name)),
        })
    }
}

/// The description of a search. A field that is `None` has the default in its documentation; a field that the method
/// does not use is refused.
///
/// ```
/// let spec = hydra_search::Spec::from_toml(r#"
///     search = "halving"
///     trials = 27
///     steps = 2700
///
///     [space]
///     lr = "log:1e-5..1e-2"
///     batch = [8, 16]
///     optimizer = ["adamw", "sgd"]
///     momentum = { uniform = [0.0, 0.99], when = { optimizer = "sgd" } }
///
///     [[trial]]           # given trials come first, and count
///     lr = 3e-4
///     batch = 8
///     optimizer = "adamw"
/// "#)?;
/// spec.check_names(&["batch", "lr", "momentum", "optimizer", "seed"])?;
/// # Ok::<(), hydra_search::SpecError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// The search method.
    pub search: Method,
    /// The largest number of minibatches of a trial.
    pub steps: usize,
    /// The number of configurations to draw, including given ones; for `pbt` the size of the population. A grid has a
    /// fixed number. Hyperband uses as many brackets as draw no more than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trials: Option<usize>,
    /// Methods with rungs: 1 of `eta` trials advances, to `eta` times as many minibatches. Default 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta: Option<usize>,
    /// Methods with rungs: the smallest number of minibatches before a trial is stopped. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_rung: Option<usize>,
    /// `asha`: the number of virtual workers. Default 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<usize>,
    /// `pbt`: minibatches between two comparisons. Default: a tenth of `steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<usize>,
    /// `pbt`: the share of the population that is replaced, and the equal share of best members that replace it, at
    /// most 0.5. Default 0.2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// `pbt`: the probability that a setting is drawn anew instead of perturbed. Default 0.25.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resample: Option<f64>,
    /// `pbt`: the settings that change in a fork. Default: those with numeric ranges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explore: Option<Vec<String>>,
    /// `tpe`: random trials before the estimator is used. Default 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub startup: Option<usize>,
    /// `tpe`: trials per batch. Default 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_once: Option<usize>,
    /// The search space.
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub space: Space,
    /// Given trials, which come first.
    #[serde(default, rename = "trial", skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<Configuration>,
}

/// The reason why a spec is invalid.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum SpecError {
    /// The text is not the TOML of a spec.
    #[error("the search cannot be read: {0}")]
    Toml(#[from] toml::de::Error),
    /// No method has this name.
    #[error("no search is called `{found}`: {suggestion}")]
    Method { found: String, suggestion: String },
    /// The spec has neither a space nor trials.
    #[error("there is nothing to search: give a space or trials")]
    Nothing,
    /// The number of trials is missing.
    #[error("the search `{method}` draws trials: set their number in `trials`")]
    Trials { method: Method },
    /// A field has an invalid value.
    #[error("`{name}` is {found}, expected {expected}")]
    Field { name: &'static str, found: String, expected: &'static str },
    /// The method does not use a field.
    #[error("the search `{method}` does not use `{name}`: remove it, or choose {of}")]
    Foreign { name: &'static str, method: Method, of: &'static str },
    /// A setting of the space, a trial or `explore` has an unknown name.
    #[error("no setting is called `{found}`: {suggestion}")]
    Name { found: String, suggestion: String },
    /// Population-based training has no setting to change.
    #[error(
        "the search `pbt` changes settings in forks, and no setting has a numeric range: name some in `explore`"
    )]
    Unexplored,
    /// The space is invalid.
    #[error(transparent)]
    Space(#[from] crate::space::SpaceError),
    /// A given trial is invalid.
    #[error(transparent)]
    Given(#[from] TrialsError),
}

impl Spec {
    /// Parses a spec from TOML. [`Search::new`](crate::Search::new) checks it.
    ///
    /// # Errors
    /// [`SpecError::Toml`], with the position.
    pub fn from_toml(text: &str) -> Result<Self, SpecError> {
        Ok(toml::from_str(text)?)
    }

    /// Checks everything except names, which depend on the task ([`Spec::check_names`]).
    ///
    /// # Errors
    /// [`SpecError`] for the first problem.
    pub fn check(&self) -> Result<(), SpecError> {
        self.check_foreign()?;
        self.check_counts()?;
        self.check_shares()?;
        check_all(self.given.clone())?;
        if self.space.is_empty() && self.given.is_empty() {
            return Err(SpecError::Nothing);
        }
        if self.search != Method::Grid && !self.space.is_empty() && self.trials.is_none() {
            return Err(SpecError::Trials { method: self.search });
        }
        if self.search == Method::Pbt {
            self.check_explored()?;
        }
        Ok(())
    }

    /// Checks the names of all settings of the space and the trials against the names that a task has.
    ///
    /// # Errors
    /// [`SpecError::Name`] with the first unknown name, and the nearest known one.
    pub fn check_names(&self, known: &[&str]) -> Result<(), SpecError> {
        let given = self.given.iter().flat_map(|trial| trial.iter().map(|(name, _)| name));
        match self.space.names().chain(given).find(|name| !known.contains(name)) {
            Some(name) => Err(unknown(name, known)),
            None => Ok(()),
        }
    }

    /// The number of draws: the requested number, or the given trials if nothing can be drawn.
    pub(crate) fn draws(&self) -> usize {
        match self.space.is_empty() {
            true => self.given.len(),
            false => self.trials.unwrap_or_default(),
        }
    }

    /// The settings that forks of a population change.
    pub(crate) fn explored(&self) -> Vec<String> {
        let number = |range: &Range| matches!(range, Range::Uniform { .. } | Range::Log { .. });
        let numbers =
            self.space.in_order().filter(|(_, range)| number(range)).map(|(name, _)| name.to_owned());
        self.explore.clone().unwrap_or_else(|| numbers.collect())
    }

    fn check_explored(&self) -> Result<(), SpecError> {
        let names: Vec<&str> = self.space.names().collect();
        let explored = self.explored();
        match explored.iter().find(|name| !names.contains(&name.as_str())) {
            Some(name) => Err(unknown(name, &names)),
            None if explored.is_empty() => Err(SpecError::Unexplored),
            None => Ok(()),
        }
    }

    fn check_foreign(&self) -> Result<(), SpecError> {
        let (method, rungs) = (self.search, "halving, hyperband or asha");
        let foreign = [
            ("trials", self.trials.is_some(), method != Method::Grid, "a search other than `grid`"),
            ("eta", self.eta.is_some(), method.has_rungs(), rungs),
            ("first_rung", self.first_rung.is_some(), method.has_rungs(), rungs),
            ("workers", self.workers.is_some(), method == Method::Asha, "asha"),
            ("interval", self.interval.is_some(), method == Method::Pbt, "pbt"),
            ("share", self.share.is_some(), method == Method::Pbt, "pbt"),
            ("resample", self.resample.is_some(), method == Method::Pbt, "pbt"),
            ("explore", self.explore.is_some(), method == Method::Pbt, "pbt"),
            ("startup", self.startup.is_some(), method == Method::Tpe, "tpe"),
            ("at_once", self.at_once.is_some(), method == Method::Tpe, "tpe"),
        ];
        match foreign.into_iter().find(|(_, given, own, _)| *given && !own) {
            Some((name, _, _, of)) => Err(SpecError::Foreign { name, method, of }),
            None => Ok(()),
        }
    }

    fn check_counts(&self) -> Result<(), SpecError> {
        /// A larger value is taken for a typing error.
        const MOST: usize = 1_000_000;
        let counts = [
            (
                "steps",
                Some(self.steps),
                1..=u32::MAX as usize,
                "a number of minibatches from 1 to 4294967295",
            ),
            ("trials", self.trials, 1..=MOST, "a number from 1 to 1000000"),
            ("eta", self.eta, 2..=MOST, "an integer of two or more, such as 3"),
            ("first_rung", self.first_rung, 1..=self.steps, "a number of minibatches from 1 to `steps`"),
            ("workers", self.workers, 1..=MOST, "a number from 1 to 1000000"),
            ("interval", self.interval, 1..=self.steps, "a number of minibatches from 1 to `steps`"),
            ("startup", self.startup, 1..=MOST, "a number from 1 to 1000000"),
            ("at_once", self.at_once, 1..=MOST, "a number from 1 to 1000000"),
        ];
        for (name, found, range, expected) in counts {
            if let Some(found) = found.filter(|found| !range.contains(found)) {
                return Err(SpecError::Field { name, found: found.to_string(), expected });
            }
        }
        Ok(())
    }

    fn check_shares(&self) -> Result<(), SpecError> {
        let shares = [
            ("share", self.share, f64::MIN_POSITIVE..=0.5, "a share above 0 of at most 0.5"),
            ("resample", self.resample, 0.0..=1.0, "a probability from 0 to 1"),
        ];
        for (name, found, range, expected) in shares {
            if let Some(found) = found.filter(|found| !range.contains(found)) {
                return Err(SpecError::Field { name, found: found.to_string(), expected });
            }
        }
        Ok(())
    }
}

fn unknown(found: &str, known: &[&str]) -> SpecError {
    SpecError::Name { found: found.to_owned(), suggestion: names::suggestion(found, known) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(text: &str) -> String {
        Spec::from_toml(text).and_then(|spec| spec.check()).unwrap_err().to_string()
    }

    #[test]
    fn every_method_is_known_by_one_name() {
        for method in Method::ALL {
            assert_eq!(method.name().parse::<Method>().unwrap(), method);
            let text = format!("search = \"{method}\"\nsteps = 1\n");
            assert_eq!(Spec::from_toml(&text).unwrap().search, method);
        }
        let error = "halfing".parse::<Method>().unwrap_err().to_string();
        assert_eq!(error, "no search is called `halfing`: did you mean `halving`?");
    }

    #[test]
    fn what_cannot_be_searched_is_refused() {
        for (text, expected) in [
            ("search = \"random\"\nsteps = 1", "there is nothing to search"),
            ("search = \"random\"\nsteps = 1\nspace = { lr = [1] }", "the search `random` draws trials"),
            ("search = \"grid\"\nsteps = 0", "`steps` is 0, expected a number of minibatches"),
            ("search = \"halving\"\nsteps = 9\neta = 1", "`eta` is 1, expected an integer of two or more"),
            ("search = \"halving\"\nsteps = 9\nfirst_rung = 10", "`first_rung` is 10"),
            ("search = \"random\"\nsteps = 9\neta = 3", "the search `random` does not use `eta`"),
            ("search = \"grid\"\nsteps = 9\ntrials = 3", "the search `grid` does not use `trials`"),
            ("search = \"pbt\"\nsteps = 9\nshare = 0.6", "`share` is 0.6, expected a share above 0"),
            ("search = \"pbt\"\nsteps = 9\nshare = 0.0", "`share` is 0, expected a share above 0"),
            ("search = \"pbt\"\nsteps = 9\nresample = nan", "`resample` is NaN, expected a probability"),
            (
                "search = \"pbt\"\nsteps = 9\ntrials = 2\nspace = { lr = [1] }",
                "the search `pbt` changes settings",
            ),
            (
                "search = \"pbt\"\nsteps = 9\ntrials = 2\nexplore = [\"rl\"]\nspace = { lr = [1] }",
                "no setting is called `rl`",
            ),
            ("search = \"grid\"\nsteps = 9\n[[trial]]\nlr = nan", "trial 1 has `lr` = NaN"),
            ("search = \"grid\"\nsteps = 9\nspaces = 1", "the search cannot be read"),
            ("search = \"grid\"\nsteps = 9\nspace = { lr = \"log:1..0\" }", "the search cannot be read"),
        ] {
            let found = says(text);
            assert!(found.starts_with(expected), "{text}: {found}");
        }
    }

    #[test]
    fn names_are_checked_with_a_suggestion() {
        let spec =
            Spec::from_toml("search = \"grid\"\nsteps = 1\nspace = { lr = [1] }\n[[trial]]\nbacth = 8")
                .unwrap();
        let error = spec.check_names(&["batch", "lr"]).unwrap_err().to_string();
        assert_eq!(error, "no setting is called `bacth`: did you mean `batch`?");
        assert!(spec.check_names(&["bacth", "lr"]).is_ok());
    }

    #[test]
    fn a_spec_survives_its_text() {
        let text = "search = \"asha\"\nsteps = 9\ntrials = 3\nworkers = 2\n\
                    [space]\nlr = \"log:1e-3..1\"\nbatch = [1, 2]\n[[trial]]\nlr = 1.0\n";
        let spec = Spec::from_toml(text).unwrap();
        assert_eq!(Spec::from_toml(&toml::to_string(&spec).unwrap()).unwrap(), spec);
    }
}
