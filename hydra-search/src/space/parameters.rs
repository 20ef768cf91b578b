//! A space: parameters by name.

use super::{Configuration, Parameter, Range, SpaceError, Value};
use crate::key::Key;
use crate::names;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The largest number of configurations of a grid.
const MOST: usize = 100_000;

/// The searched settings, by name.
///
/// A draw of a parameter is a function of the key and of the parameter's name, so other parameters do not change it.
/// The order in a file makes no difference.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, Value>", into = "BTreeMap<String, Value>")]
pub struct Space {
    parameters: BTreeMap<String, Parameter>,
    /// The names, each after those in its conditions, otherwise in alphabetical order.
    order: Vec<String>,
}

impl Space {
    /// The space of these parameters.
    ///
    /// # Errors
    /// [`SpaceError`] if a range is empty, or a condition names no other parameter, can never hold or is cyclic.
    pub fn new(parameters: BTreeMap<String, Parameter>) -> Result<Self, SpaceError> {
        parameters.iter().try_for_each(|(name, parameter)| parameter.range.check(name))?;
        check_conditions(&parameters)?;
        let order = order(&parameters)?;
        Ok(Self { parameters, order })
    }

    /// True if it has no parameters.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// The names of the parameters, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The parameter with this name.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.parameters.get(name)
    }

    /// The names and ranges, each after those in its conditions.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = (&str, &Range)> {
        self.order.iter().map(|name| (name.as_str(), &self.parameters[name].range))
    }

    /// True if a configuration that has all earlier parameters has this one too.
    pub(crate) fn applies(&self, name: &str, configuration: &Configuration) -> bool {
        let holds = |of: &String, values: &Vec<Value>| {
            let has = configuration.get(of).map(Value::identity);
            has.is_some_and(|has| values.iter().any(|value| value.identity() == has))
        };
        self.parameters[name].when.iter().all(|(of, values)| holds(of, values))
    }

    /// A configuration with a value of `choose` for each parameter whose conditions hold.
    pub(crate) fn build(&self, mut choose: impl FnMut(&str, &Range) -> Value) -> Configuration {
        let mut configuration = Configuration::new();
        for (name, range) in self.in_order() {
            if self.applies(name, &configuration) {
                configuration.set(name, choose(name, range));
            }
        }
        configuration
    }

    /// The configuration that a key draws.
    pub(crate) fn draw(&self, key: Key) -> Configuration {
        self.build(|name, range| range.draw(key.fold_name(name)))
    }

    /// Configurations with every combination of the values that these parameters may have together, for measurements
    /// that depend only on them. A range of real numbers has one value here, and so has every other parameter. If a
    /// condition depends on one of those, there are configurations with the parameter and without.
    ///
    /// # Errors
    /// [`SpaceError`] if a named parameter has too many values, or if there are too many configurations.
    pub fn combinations(&self, names: &[&str]) -> Result<Vec<Configuration>, SpaceError> {
        let mut all = vec![Configuration::new()];
        for (name, range) in self.in_order() {
            let one = || vec![range.draw(Key::new(0).fold_name(name))];
            let is_named = names.contains(&name);
            let values = match range {
                Range::Uniform { .. } | Range::Log { .. } => one(),
                _ if !is_named => one(),
                _ => range.values().ok_or_else(|| SpaceError::Endless { name: name.to_owned() })?,
            };
            let known = self.parameters[name].when.keys().all(|of| names.contains(&of.as_str()));
            let mut longer = Vec::new();
            for configuration in all {
                let applies = self.applies(name, &configuration);
                if !applies || is_named && !known {
                    longer.push(configuration.clone());
                }
                if applies || is_named && !known {
                    longer.extend(values.iter().map(|value| configuration.clone().with(name, value.clone())));
                }
                if longer.len() > MOST {
                    return Err(SpaceError::Large { most: MOST });
                }
            }
            all = longer;
        }
        Ok(all)
    }

    /// All configurations; the last parameter varies fastest.
    ///
    /// # Errors
    /// [`SpaceError`] if a parameter is a range of numbers, or if there are too many.
    pub(crate) fn grid(&self) -> Result<Vec<Configuration>, SpaceError> {
        let mut grid = vec![Configuration::new()];
        for (name, range) in self.in_order() {
            let values = range.values().ok_or_else(|| SpaceError::Endless { name: name.to_owned() })?;
            let mut longer = Vec::new();
            for configuration in grid {
                match self.applies(name, &configuration) {
                    true => longer
                        .extend(values.iter().map(|value| configuration.clone().with(name, value.clone()))),
                    false => longer.push(configuration),
                }
                if longer.len() > MOST {
                    return Err(SpaceError::Large { most: MOST });
                }
            }
            grid = longer;
        }
        Ok(grid)
    }
}

impl TryFrom<BTreeMap<String, Value>> for Space {
    type Error = SpaceError;

    fn try_from(described: BTreeMap<String, Value>) -> Result<Self, SpaceError> {
        let read = |(name, described)| Ok((String::clone(&name), Parameter::read(&name, described)?));
        Self::new(described.into_iter().map(read).collect::<Result<_, SpaceError>>()?)
    }
}

impl From<Space> for BTreeMap<String, Value> {
    fn from(space: Space) -> Self {
        space.parameters.into_iter().map(|(name, parameter)| (name, parameter.write())).collect()
    }
}

fn check_conditions(parameters: &BTreeMap<String, Parameter>) -> Result<(), SpaceError> {
    for (name, parameter) in parameters {
        for (of, values) in &parameter.when {
            let Some(other) = parameters.get(of).filter(|_| of != name) else {
                let others: Vec<&str> =
                    parameters.keys().filter(|other| *other != name).map(String::as_str).collect();
                let suggestion = names::suggestion(of, &others);
                return Err(SpaceError::Condition { name: name.clone(), of: of.clone(), suggestion });
            };
            if let Some(value) = values.iter().find(|value| !other.range.contains(value)) {
                let (name, of, value) = (name.clone(), of.clone(), value.to_string());
                return Err(SpaceError::Never { name, of, value, values: described(&other.range) });
            }
        }
    }
    Ok(())
}

fn described(range: &Range) -> String {
    let join = |values: &[Value]| values.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
    match range {
        Range::Choice(values) => join(values),
        Range::Uniform { low, high } | Range::Log { low, high } => format!("{low} to {high}"),
        Range::Int { low, high } => format!("{low} to {high}"),
    }
}

fn order(parameters: &BTreeMap<String, Parameter>) -> Result<Vec<String>, SpaceError> {
    let mut order: Vec<String> = Vec::new();
    while order.len() < parameters.len() {
        let ready = |name: &&String| {
            !order.contains(name) && parameters[*name].when.keys().all(|of| order.contains(of))
        };
        let left = |name: &&String| !order.contains(name);
        match parameters.keys().find(ready) {
            Some(next) => order.push(next.clone()),
            None => {
                let name = parameters.keys().find(left).cloned().unwrap_or_default();
                return Err(SpaceError::Circle { name });
            }
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(text: &str) -> Result<Space, String> {
        toml::from_str(text).map_err(|error| error.message().to_owned())
    }

    const CONDITIONS: &str = r#"
        optimizer = ["adamw", "sgd"]
        momentum = { choice = [0.0, 0.9], when = { optimizer = "sgd" } }
        lr = "log:1e-5..1e-2"
    "#;

    #[test]
    fn a_parameter_is_drawn_when_its_conditions_hold() {
        let space = space(CONDITIONS).unwrap();
        let mut with = 0;
        for index in 0..100 {
            let drawn = space.draw(Key::new(1).fold(index));
            let sgd = drawn.get("optimizer") == Some(&"sgd".into());
            assert_eq!(drawn.get("momentum").is_some(), sgd, "{drawn}");
            assert!(drawn.get("lr").is_some());
            with += usize::from(sgd);
        }
        assert!((30..70).contains(&with));
    }

    #[test]
    fn a_draw_does_not_depend_on_what_else_is_drawn() {
        let (narrow, wide) = (space("lr = \"log:1e-5..1e-2\"").unwrap(), space(CONDITIONS).unwrap());
        for index in 0..20 {
            let key = Key::new(2).fold(index);
            assert_eq!(narrow.draw(key).get("lr"), wide.draw(key).get("lr"));
        }
    }

    #[test]
    fn a_grid_has_every_configuration_once_and_in_order() {
        let grid = space("lr = [1e-3, 1e-4]\nbatch = [16, 8]").unwrap().grid().unwrap();
        let shown: Vec<String> = grid.iter().map(Configuration::to_string).collect();
        assert_eq!(shown, ["batch=16 lr=1e-3", "batch=16 lr=1e-4", "batch=8 lr=1e-3", "batch=8 lr=1e-4"]);
        let conditional = "optimizer = [\"adamw\", \"sgd\"]\n\
                           momentum = { choice = [0, 0.9], when = { optimizer = [\"sgd\"] } }";
        let grid = space(conditional).unwrap().grid().unwrap();
        let shown: Vec<String> = grid.iter().map(Configuration::to_string).collect();
        assert_eq!(shown, ["optimizer=adamw", "momentum=0 optimizer=sgd", "momentum=0.9 optimizer=sgd"]);
        assert_eq!(space("layers = { int = [1, 3] }").unwrap().grid().unwrap().len(), 3);
        let endless = space(CONDITIONS).unwrap().grid().unwrap_err().to_string();
        assert!(endless.starts_with("a grid tries every value, and `lr` is a range"), "{endless}");
        let large = space("a = \"int:1..1000\"\nb = \"int:1..1000\"").unwrap().grid().unwrap_err();
        assert_eq!(large, SpaceError::Large { most: MOST });
    }

    #[test]
    fn wrong_spaces_are_refused_with_the_name() {
        for (text, says) in [
            ("lr = { log = [1e-5] }", "`lr` is {\"log\":[1e-5]}: give a list of values"),
            ("lr = { lgo = [1e-5, 1e-2] }", "`lr` is {\"lgo\""),
            ("lr = { log = [1e-5, 1e-2], int = [1, 2] }", "`lr` is {\"int\""),
            ("lr = \"log:1..0\"", "`lr`: `log:1..0` is an empty range"),
            ("lr = []", "`lr` has no values"),
            ("a = { choice = [1], when = { b = 1 } }", "`a` has a condition on `b`, which is not another"),
            (
                "batch = [1]\nb = { choice = [1], when = { bacth = 1 } }",
                "`b` has a condition on `bacth`, which is not another parameter: did you mean `batch`?",
            ),
            (
                "a = [1, 2]\nb = { choice = [1], when = { a = 3 } }",
                "`b` has the condition that `a` is 3, which never holds: its values are 1, 2",
            ),
            (
                "a = { choice = [1], when = { b = 1 } }\nb = { choice = [1], when = { a = 1 } }",
                "`a` depends on itself",
            ),
        ] {
            let error = space(text).unwrap_err();
            assert!(error.starts_with(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_space_survives_its_text() {
        let space =
            space(&format!("{CONDITIONS}\nlayers = \"int:1..8\"\ndropout = \"uniform:0..0.3\"")).unwrap();
        let text = toml::to_string(&space).unwrap();
        assert_eq!(toml::from_str::<Space>(&text).unwrap(), space, "{text}");
    }

    #[test]
    fn combinations_are_of_the_named_parameters_alone() {
        let space: Space = toml::from_str(
            r#"
            batch = [8, 16]
            clip = { uniform = [0.5, 1.0], when = { schedule = "linear" } }
            lora = { int = [2, 4], when = { batch = 16 } }
            lr = "log:1e-5..1e-2"
            schedule = ["linear", "cosine"]
            "#,
        )
        .unwrap();
        let all = space.combinations(&["batch", "clip", "lora"]).unwrap();
        let shown = |of: &Configuration| {
            let whole = |name| of.get(name).map(|value| value.number().unwrap() as i64);
            (whole("batch").unwrap(), whole("lora"), of.get("clip").is_some())
        };
        let mut found: Vec<_> = all.iter().map(shown).collect();
        found.sort_unstable();
        let ranks = [(8, None), (16, Some(2)), (16, Some(3)), (16, Some(4))];
        let expected: Vec<_> =
            ranks.into_iter().flat_map(|(batch, rank)| [(batch, rank, false), (batch, rank, true)]).collect();
        assert_eq!(found, expected, "a condition on what is not named may hold or not");
        assert!(all.iter().all(|of| of.get("lr").is_some() && of.get("schedule").is_some()));
        let draws: Vec<_> = (0..200).map(|key| shown(&space.draw(Key::new(key)))).collect();
        assert!(draws.iter().all(|draw| found.contains(draw)), "no draw has another");
    }
}
