//! Settings of tasks by name, and the settings in which the tasks of a run differ.

use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The display order of settings. Other settings follow alphabetically; the seed is last.
const ORDER: [&str; 21] = [
    "model",
    "data",
    "batch",
    "lr",
    "optimizer",
    "weight_decay",
    "no_decay_norms",
    "clip",
    "schedule",
    "warmup",
    "decay_steps",
    "decay_to",
    "accumulate",
    "epochs",
    "steps",
    "lora",
    "dropout",
    "context",
    "loss",
    "beta",
    "gamma",
];
/// The setting that distinguishes repetitions of one experiment.
pub(crate) const SEED: &str = "seed";
/// Settings that may be paths.
const PATHS: [&str; 2] = ["model", "data"];
/// Settings that are off, or are expressed by another setting, if a task does not have them.
const OPTIONAL: [&str; 3] = ["epochs", "lora", "steps"];
/// The length of the longest number that is shown exactly. A longer one was sampled, and is rounded to four digits.
const LONGEST: usize = "1.2345e-4".len();

/// Settings of a task by flag name.
pub(crate) type Settings = BTreeMap<String, Value>;

/// Returns the settings in the `config` of a report's task. Unknown settings are missing.
pub(crate) fn settings(config: &Value) -> Settings {
    let mut settings = Settings::new();
    for (name, value) in config.as_object().into_iter().flatten() {
        match name.as_str() {
            "training" => training(value, &mut settings),
            // These do not affect training: the task's parent, and the size of its evaluations.
            "fork" | "eval_limit" => {}
            _ => drop(settings.insert(name.clone(), value.clone())),
        }
    }
    settings
}

/// Adds the settings of a training specification, including the nested ones of optimizer, schedule and length.
fn training(spec: &Value, settings: &mut Settings) {
    for (name, value) in spec.as_object().into_iter().flatten() {
        match (name.as_str(), value) {
            ("decay", decay) => {
                settings.insert("no_decay_norms".to_owned(), (*decay != "all").into());
            }
            (_, Value::Object(parts)) => {
                let kind = parts.get("name").and_then(Value::as_str);
                let key = |part: &str| match (part, kind) {
                    ("name" | "kind", _) => name.clone(),
                    ("lr" | "weight_decay", _) | (_, None) => part.to_owned(),
                    // An optimizer's constants are compared only among tasks with the same optimizer.
                    (constant, Some(optimizer)) => format!("{optimizer}.{constant}"),
                };
                settings.extend(parts.iter().map(|(part, value)| (key(part), value.clone())));
            }
            _ => drop(settings.insert(name.clone(), value.clone())),
        }
    }
    if settings.contains_key("decay_steps") {
        settings.entry("decay_to".to_owned()).or_insert(0.0.into());
    }
    for name in OPTIONAL.into_iter().filter(|_| spec.is_object()) {
        settings.entry(name.to_owned()).or_insert(Value::Null);
    }
}

/// The settings in which some tasks differ.
#[derive(Clone, Debug, Default)]
pub(crate) struct Differences {
    /// Names in display order.
    pub(crate) names: Vec<String>,
    /// Settings of each task.
    tasks: Vec<Settings>,
}

impl Differences {
    /// Returns the differences between tasks with these configurations. A setting that some tasks lack (such as the momentum of
    /// AdamW) depends on another setting, and is not counted as a difference.
    pub(crate) fn of<'a>(configs: impl IntoIterator<Item = &'a Value>) -> Self {
        Self::between(configs.into_iter().map(settings).collect())
    }

    pub(super) fn between(tasks: Vec<Settings>) -> Self {
        let mut values: BTreeMap<&String, BTreeSet<String>> = BTreeMap::new();
        for (name, value) in tasks.iter().flatten() {
            // The same model or data may have different paths on different machines.
            let is_path = PATHS.contains(&name.as_str());
            let value = if is_path { shown(name, value) } else { value.to_string() };
            values.entry(name).or_default().insert(value);
        }
        let differ = values.into_iter().filter(|(_, values)| values.len() > 1);
        let mut names: Vec<String> = differ.map(|(name, _)| name.clone()).collect();
        names.sort_by_key(|name| place(name));
        Self { names, tasks }
    }

    /// Returns the differences without the seed, and whether the seed was one of them.
    pub(crate) fn without_seed(self) -> (Self, bool) {
        let names: Vec<String> = self.names.iter().filter(|name| *name != SEED).cloned().collect();
        let has_seed = names.len() < self.names.len();
        (Self { names, ..self }, has_seed)
    }

    /// Returns a setting of a task, or `None` if it is unset.
    pub(crate) fn value(&self, task: usize, name: &str) -> Option<&Value> {
        self.tasks.get(task)?.get(name).filter(|value| !value.is_null())
    }

    /// Returns the display text of a task's setting.
    pub(crate) fn text(&self, task: usize, name: &str) -> String {
        self.value(task, name).map_or_else(|| "-".to_owned(), |value| shown(name, value))
    }

    /// Returns the display texts of a task's differing settings.
    pub(crate) fn texts(&self, task: usize) -> Vec<String> {
        self.names.iter().map(|name| self.text(task, name)).collect()
    }

    /// Returns a task's differing settings as a JSON object.
    pub(crate) fn json(&self, task: usize) -> Value {
        let of = |name: &String| (name.clone(), self.value(task, name).cloned().unwrap_or_default());
        Value::Object(self.names.iter().map(of).collect::<Map<_, _>>())
    }
}

/// Returns the sort key of a setting.
pub(crate) fn place(name: &str) -> (usize, String) {
    let known = ORDER.iter().position(|known| *known == name).unwrap_or(ORDER.len());
    (if name == SEED { usize::MAX } else { known }, name.to_owned())
}

/// Returns the display text of a value: paths by their last component, sampled numbers with four digits.
pub fn shown(name: &str, value: &Value) -> String {
    match value {
        Value::String(path) if PATHS.contains(&name) => last_part(path),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => number_text(name, number.as_f64().unwrap_or_default()),
        Value::Array(values) => values.iter().map(|value| shown(name, value)).collect::<Vec<_>>().join(","),
        Value::Null => "off".to_owned(),
        other => other.to_string(),
    }
}

/// Returns a number as text; learning rates and other small numbers in scientific notation.
fn number_text(name: &str, number: f64) -> String {
    let small = number != 0.0 && number.abs() < 1e-2;
    let (exact, rounded) = match name == "lr" || small || number.abs() >= 1e7 {
        true => (format!("{number:e}"), format!("{number:.3e}")),
        false => (number.to_string(), format!("{number:.4}")),
    };
    if exact.len() > LONGEST { without_zeros(&rounded) } else { exact }
}

/// Strips trailing zeros from the decimals of a number.
fn without_zeros(number: &str) -> String {
    let (decimals, exponent) = number.find('e').map_or((number, ""), |at| number.split_at(at));
    let decimals = match decimals.contains('.') {
        true => decimals.trim_end_matches('0').trim_end_matches('.'),
        false => decimals,
    };
    format!("{decimals}{exponent}")
}

/// Returns the last component of a path, without `.json`.
pub(crate) fn last_part(path: &str) -> String {
    let part = Path::new(path).file_name().map(|part| part.to_string_lossy().into_owned());
    let part = part.unwrap_or_else(|| path.to_owned());
    part.strip_suffix(".json").map(str::to_owned).unwrap_or(part)
}

/// Sets `differs` of each task of a JSON report: its values of the settings in which the tasks differ.
pub(crate) fn add_differences(tasks: &mut [Value]) {
    let differences = Differences::of(tasks.iter().map(|task| &task["config"]));
    for (index, task) in tasks.iter_mut().enumerate() {
        task["differs"] = differences.json(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(lr: f64, optimizer: Value, schedule: Value, clip: Value) -> Value {
        let mut optimizer = optimizer;
        optimizer["lr"] = json!(lr);
        let training = json!({
            "batch": 8, "seed": 0, "optimizer": optimizer, "schedule": schedule, "clip": clip, "decay": "all",
            "length": { "epochs": 1 },
        });
        json!({ "batch": 8, "lr": lr, "model": "/a/gpt2.json", "training": training })
    }

    fn adamw(decay: f64) -> Value {
        json!({ "name": "adamw", "beta1": 0.9, "weight_decay": decay })
    }

    #[test]
    fn tasks_differ_in_what_they_set_and_not_in_what_follows_from_it() {
        let constant = json!({ "kind": "constant", "warmup": 0 });
        let wsd = json!({ "kind": "wsd", "warmup": 0, "decay_steps": 20 });
        let sgd = json!({ "name": "sgd", "momentum": 0.9, "beta1": 0.5, "weight_decay": 0.0 });
        let tasks = [
            config(1e-3, adamw(0.0), constant.clone(), Value::Null),
            config(1e-4, sgd, wsd, json!(0.5)),
            config(3.604317984956313e-3, adamw(0.001), constant.clone(), Value::Null),
        ];
        let found = Differences::of(&tasks);
        assert_eq!(found.names, ["lr", "optimizer", "weight_decay", "clip", "schedule"]);
        assert_eq!(found.texts(0), ["1e-3", "adamw", "0", "-", "constant"]);
        assert_eq!(found.texts(1), ["1e-4", "sgd", "0", "0.5", "wsd"]);
        assert_eq!(found.texts(2), ["3.604e-3", "adamw", "1e-3", "-", "constant"]);
        assert_eq!(found.json(1)["optimizer"], "sgd");
        assert!(Differences::of(&tasks[..1]).names.is_empty(), "one task differs from none");
        let alike = [tasks[0].clone(), tasks[0].clone()];
        assert!(Differences::of(&alike).names.is_empty());
    }

    #[test]
    fn a_length_of_epochs_and_one_of_steps_differ_and_unknown_settings_do_not() {
        let constant = json!({ "kind": "constant", "warmup": 0 });
        let mut tasks = [0.1, 0.1].map(|lr| config(lr, adamw(0.0), constant.clone(), Value::Null));
        tasks[1]["training"]["length"] = json!({ "steps": 40 });
        let found = Differences::of(&tasks);
        assert_eq!(found.names, ["epochs", "steps"]);
        assert_eq!([found.text(0, "steps"), found.text(1, "steps")], ["-", "40"]);
        // `spec.toml` describes a task that has not started with fewer settings than its first event does.
        let partly = [tasks[0].clone(), json!({ "batch": 8, "lr": 0.1 })];
        assert!(Differences::of(&partly).names.is_empty());
        (tasks[1], tasks[0]["training"]["seed"]) = (tasks[0].clone(), json!(1));
        let (rest, has_seed) = Differences::of(&tasks).without_seed();
        assert!(rest.names.is_empty() && has_seed);
    }

    #[test]
    fn numbers_that_were_drawn_have_four_digits_and_given_ones_all() {
        let rates = [1e-3, 6e-4, 1.25e-5, 3.604317984956313e-3, 2.84000001e-4, 0.010000001];
        let shown = |name: &'static str| move |number: f64| number_text(name, number);
        assert_eq!(rates.map(shown("lr")), ["1e-3", "6e-4", "1.25e-5", "3.604e-3", "2.84e-4", "1e-2"]);
        let others = [0.0, 0.1, 1.0, 0.106599108872, 0.03000000001, 0.005, 1e-7];
        assert_eq!(others.map(shown("weight_decay")), ["0", "0.1", "1", "0.1066", "0.03", "5e-3", "1e-7"]);
    }

    #[test]
    fn models_in_several_places_are_told_apart_by_their_names() {
        let of = |models: [&str; 2]| Differences::of(&models.map(|model| json!({ "model": model }))).names;
        assert!(of(["/one/llama", "/two/llama"]).is_empty());
        assert_eq!(of(["/one/llama", "/one/gpt2"]), ["model"]);
    }

    #[test]
    fn a_rank_beside_none_is_a_difference() {
        let constant = json!({ "kind": "constant", "warmup": 0 });
        let mut tasks = [0.1, 0.1].map(|lr| config(lr, adamw(0.0), constant.clone(), Value::Null));
        tasks[1]["lora"] = json!(8);
        let mut tasks = tasks.map(|config| json!({ "config": config }));
        add_differences(&mut tasks);
        assert_eq!(
            [&tasks[0]["differs"], &tasks[1]["differs"]],
            [&json!({ "lora": null }), &json!({ "lora": 8 })]
        );
    }
}
