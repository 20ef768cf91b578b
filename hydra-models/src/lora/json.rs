//! Adapter configurations in PEFT's format.

use super::targets::{Layers, Modules, Targets};
use super::{Base, Bias, Lora, LoraInit, TokenRows};
use crate::ModelError;
use crate::family::supported::refuse;
use serde_json::{Map, Value, json};

/// Keys of unsupported kinds of adapters; they must be absent, empty or false.
const REFUSED: [&str; 10] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
];

/// Keys other than those that [`lora`] reads that do not affect the computation. The configurations of initializations
/// matter only if `init_lora_weights` names them.
const WITHOUT_EFFECT: [&str; 15] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Keys that affect the computation, in the order of [`lora`].
const READ: [&str; 16] = [
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "lora_bias",
    "init_lora_weights",
    "modules_to_save",
    "ensure_weight_tying",
    "trainable_token_indices",
];

/// Typed access to the keys of a configuration.
struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn get(&self, name: &'static str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn wrong<T>(&self, name: &'static str, expected: &str) -> Result<T, ModelError> {
        Err(refuse(name, self.0.get(name).unwrap_or(&Value::Null), expected))
    }

    fn number(&self, name: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value.as_f64().map_or_else(|| self.wrong(name, "a number"), Ok),
        }
    }

    fn count(&self, name: &'static str, default: usize) -> Result<usize, ModelError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value.as_u64().map_or_else(|| self.wrong(name, "an integer"), |n| Ok(n as usize)),
        }
    }

    fn flag(&self, name: &'static str) -> Result<bool, ModelError> {
        match self.get(name) {
            None => Ok(false),
            Some(value) => value.as_bool().map_or_else(|| self.wrong(name, "true or false"), Ok),
        }
    }

    /// A list of strings; a single string is a list of one.
    fn texts(&self, name: &'static str) -> Result<Vec<String>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let texts = items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<_>>();
        texts.map_or_else(|| self.wrong(name, "a list of names"), Ok)
    }

    /// Names (sorted, because PEFT writes a set), or a regular expression.
    fn modules(&self, name: &'static str) -> Result<Option<Modules>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(pattern)) => Ok(Some(Modules::Pattern(pattern.clone()))),
            Some(Value::Array(_)) => {
                let mut names = self.texts(name)?;
                names.sort_unstable();
                Ok(Some(Modules::Names(names)))
            }
            Some(_) => self.wrong(name, "a list of names or a regular expression"),
        }
    }

    /// A map from regular expressions to values of one kind, in the order of the file.
    fn patterns<T>(
        &self,
        name: &'static str,
        value: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<(String, T)>, ModelError> {
        let Some(found) = self.get(name) else { return Ok(Vec::new()) };
        let pairs = found.as_object().and_then(|map| {
            map.iter().map(|(key, found)| Some((key.clone(), value(found)?))).collect::<Option<_>>()
        });
        pairs.map_or_else(|| self.wrong(name, "an object of numbers by regular expression"), Ok)
    }

    fn targets(&self) -> Result<Targets, ModelError> {
        Ok(match self.modules("target_modules")? {
            None => Targets::Family,
            Some(Modules::Pattern(text)) if text.eq_ignore_ascii_case(ALL_LINEAR) => Targets::AllLinear,
            Some(Modules::Pattern(pattern)) => Targets::Pattern(pattern),
            Some(Modules::Names(names)) => Targets::Names(names),
        })
    }

    fn layers(&self, targets: &Targets) -> Result<Option<Layers>, ModelError> {
        let patterns = self.texts("layers_pattern")?;
        let patterns: Vec<String> = patterns.into_iter().filter(|pattern| !pattern.is_empty()).collect();
        let Some(value) = self.get("layers_to_transform") else {
            return match patterns.is_empty() {
                true => Ok(None),
                false => self.wrong("layers_pattern", "no value if `layers_to_transform` is not set"),
            };
        };
        if !matches!(targets, Targets::Names(_) | Targets::Family) {
            return self.wrong("layers_to_transform", "no value if `target_modules` is a string, as in PEFT");
        }
        let indices = numbers(value);
        let indices = indices.map_or_else(|| self.wrong("layers_to_transform", "layer indices"), Ok)?;
        Ok((!indices.is_empty()).then_some(Layers { indices, patterns }))
    }

    fn bias(&self) -> Result<Bias, ModelError> {
        let Some(value) = self.get("bias") else { return Ok(Bias::None) };
        let known = Bias::NAMED.iter().find(|(name, _)| value == name);
        known.map_or_else(|| self.wrong("bias", "none, all or lora_only"), |(_, bias)| Ok(*bias))
    }

    fn init(&self) -> Result<LoraInit, ModelError> {
        let name = "init_lora_weights";
        let text = match self.get(name) {
            None | Some(Value::Bool(_)) => return Ok(LoraInit::Beside),
            Some(Value::String(text)) => text.as_str(),
            Some(_) => return self.wrong(name, "true, false or a string"),
        };
        match text.to_lowercase().as_str() {
            "gaussian" | "eva" | "orthogonal" => Ok(LoraInit::Beside),
            "mica" => Ok(LoraInit::FrozenB),
            "olora" => Ok(LoraInit::Olora),
            _ if text == "pissa" => Ok(LoraInit::Pissa),
            _ if text.starts_with("pissa_niter_") => self.wrong(name, RANDOM),
            "corda" | "lora_ga" | "loftq" => self.wrong(name, CHANGED),
            _ => self.wrong(name, "true, false, gaussian, eva, orthogonal, mica, pissa or olora"),
        }
    }

    fn tokens(&self) -> Result<Vec<TokenRows>, ModelError> {
        let name = "trainable_token_indices";
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let rows = match value {
            Value::Object(tables) => tables
                .iter()
                .map(|(module, rows)| Some(TokenRows { module: Some(module.clone()), rows: numbers(rows)? }))
                .collect::<Option<Vec<_>>>(),
            rows => numbers(rows).map(|rows| vec![TokenRows { module: None, rows }]),
        };
        rows.map_or_else(|| self.wrong(name, "token ids, or an object of token ids by table"), Ok)
    }
}

/// Selects every linear module except the head of a language model.
pub(super) const ALL_LINEAR: &str = "all-linear";

/// Why randomized PiSSA is an error.
const RANDOM: &str = "pissa: PEFT recomputes the base of this adapter with random numbers on every load; save it with \
                      `save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL)`, which converts it to plain LoRA";

/// Why adapters of a modified base model are an error.
const CHANGED: &str = "an initialization that leaves the base model unchanged, or pissa or olora: these adapters require a base model \
                       modified with data or quantization that is not in their files; save them with \
                       `save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL)`, or merge them with PEFT's \
                       `merge_and_unload`";

/// A number or a list of numbers.
fn numbers(value: &Value) -> Option<Vec<usize>> {
    let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    items.iter().map(|item| Some(item.as_u64()? as usize)).collect()
}

/// Returns whether a key has an effect.
fn has_effect(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// Reads a configuration. Returns the settings, and notes about unused keys.
pub(super) fn lora(config: &Map<String, Value>) -> Result<(Lora, Vec<String>), ModelError> {
    let keys = Keys(config);
    if config.get("peft_type").is_none_or(|kind| kind != "LORA") {
        return keys.wrong("peft_type", "LORA");
    }
    let is_set = |name: &&str| config.get(*name).is_some_and(has_effect);
    if let Some(name) = REFUSED.into_iter().find(is_set) {
        let way =
            "no value: adapters of this kind are not supported; merge them with PEFT's `merge_and_unload`";
        return keys.wrong(name, way);
    }
    let targets = keys.targets()?;
    let lora = Lora {
        rank: keys.count("r", 8)?,
        alpha: keys.number("lora_alpha", Lora::ALPHA)?,
        dropout: keys.number("lora_dropout", 0.0)?,
        exclude: keys.modules("exclude_modules")?.filter(|e| *e != Modules::Names(Vec::new())),
        layers: keys.layers(&targets)?,
        targets,
        rank_pattern: keys.patterns("rank_pattern", |value| value.as_u64().map(|rank| rank as usize))?,
        alpha_pattern: keys.patterns("alpha_pattern", Value::as_f64)?,
        rslora: keys.flag("use_rslora")?,
        bias: keys.bias()?,
        lora_bias: keys.flag("lora_bias")?,
        init: keys.init()?,
        modules_to_save: keys.texts("modules_to_save")?,
        ensure_weight_tying: keys.flag("ensure_weight_tying")?,
        tokens: keys.tokens()?,
        base: Base::Float,
    };
    lora.validate()?;
    let known = |name: &str| [&REFUSED[..], &WITHOUT_EFFECT, &READ].concat().contains(&name);
    let unused = config.iter().filter(|(name, value)| !known(name) && has_effect(value));
    Ok((lora, unused.map(|(name, value)| format!("`{name}` ({value}) has no effect in Hydra")).collect()))
}

/// The configuration of adapters with these settings, without model-specific keys.
pub(super) fn config(lora: &Lora) -> Map<String, Value> {
    // PEFT declares alpha as an integer; write it as one if it is.
    let number = |x: f64| if x.fract() == 0.0 { json!(x as i64) } else { json!(x) };
    let modules = |modules: &Modules| match modules {
        Modules::Names(names) => json!(names),
        Modules::Pattern(pattern) => json!(pattern),
    };
    let targets = match &lora.targets {
        Targets::Family => Value::Null,
        Targets::Names(names) => json!(names),
        Targets::Pattern(pattern) => json!(pattern),
        Targets::AllLinear => json!(ALL_LINEAR),
    };
    let some = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
    let bias = Bias::NAMED.iter().find(|(_, bias)| *bias == lora.bias).map(|(name, _)| *name);
    let ranks: Map<String, Value> =
        lora.rank_pattern.iter().map(|(key, rank)| (key.clone(), json!(rank))).collect();
    let alphas: Map<String, Value> =
        lora.alpha_pattern.iter().map(|(key, x)| (key.clone(), number(*x))).collect();
    let init = match lora.init {
        LoraInit::Beside => json!(true),
        LoraInit::FrozenB => json!("mica"),
        LoraInit::Pissa => json!("pissa"),
        LoraInit::Olora => json!("olora"),
    };
    let config = json!({
        "alpha_pattern": alphas, "bias": bias, "ensure_weight_tying": lora.ensure_weight_tying,
        "exclude_modules": lora.exclude.as_ref().map(modules), "inference_mode": true, "init_lora_weights": init,
        "layers_pattern": some(lora.layers.as_ref().map_or(&[], |layers| &layers.patterns)),
        "layers_to_transform": lora.layers.as_ref().map(|layers| &layers.indices),
        "lora_alpha": number(lora.alpha), "lora_bias": lora.lora_bias, "lora_dropout": lora.dropout,
        "modules_to_save": some(&lora.modules_to_save), "peft_type": "LORA", "r": lora.rank, "rank_pattern": ranks,
        "target_modules": targets, "use_dora": false, "use_rslora": lora.rslora,
    });
    match config {
        Value::Object(config) => config,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(keys: Value) -> Result<(Lora, Vec<String>), ModelError> {
        let mut config = json!({"peft_type": "LORA", "r": 4, "target_modules": ["v_proj", "q_proj"]});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        lora(config.as_object().unwrap())
    }

    fn refused(keys: Value) -> String {
        read(keys).unwrap_err().to_string()
    }

    #[test]
    fn settings_are_those_of_peft_and_are_written_back() {
        let (plain, notes) = read(json!({})).unwrap();
        assert_eq!((plain.rank, plain.alpha, notes.len()), (4, 8.0, 0));
        assert_eq!(plain.targets, vec!["q_proj".to_owned(), "v_proj".to_owned()].into());
        for keys in [
            json!({"use_rslora": true, "lora_alpha": 2.5, "lora_dropout": 0.1}),
            json!({"target_modules": r".*\.q_proj", "exclude_modules": ".*0.*", "bias": "all"}),
            json!({"target_modules": "all-linear", "exclude_modules": ["q_proj"], "bias": "lora_only"}),
            json!({"layers_to_transform": [0, 2], "layers_pattern": "layers", "lora_bias": true}),
            json!({"rank_pattern": {"b": 2, "a": 3}, "alpha_pattern": {"a": 4}, "init_lora_weights": "pissa"}),
            json!({"modules_to_save": ["lm_head"], "ensure_weight_tying": true, "init_lora_weights": "OLoRA"}),
            json!({"init_lora_weights": "mica", "target_modules": null}),
        ] {
            let (found, notes) = read(keys.clone()).unwrap();
            assert_ne!(found, plain, "{keys}");
            assert!(notes.is_empty(), "{notes:?}");
            assert_eq!(lora(&config(&found)).unwrap().0, found, "{keys}");
        }
        let one = read(json!({"layers_to_transform": 1})).unwrap().0;
        assert_eq!(one.layers.unwrap().indices, [1]);
    }

    #[test]
    fn kinds_that_are_not_read_are_refused_by_name() {
        for (keys, named) in [
            (json!({"use_dora": true}), "`use_dora` is true"),
            (json!({"target_parameters": ["x"]}), "`target_parameters`"),
            (json!({"peft_type": "IA3"}), "`peft_type` is \"IA3\""),
            (json!({"init_lora_weights": "pissa_niter_4"}), "pissa_niter_4"),
            (json!({"init_lora_weights": "loftq"}), "loftq"),
            (json!({"init_lora_weights": "corda"}), "merge_and_unload"),
            (json!({"init_lora_weights": "new"}), "`init_lora_weights` is \"new\""),
            (json!({"bias": "some"}), "`bias`"),
            (json!({"layers_pattern": "h"}), "`layers_to_transform` is not set"),
            (json!({"layers_to_transform": 1, "target_modules": ".*"}), "`target_modules` is a string"),
            (json!({"rank_pattern": {"a": "b"}}), "`rank_pattern`"),
            (json!({"r": 0}), "`lora rank` is 0"),
        ] {
            let said = refused(keys.clone());
            assert!(said.contains(named), "{keys}: {said}");
        }
    }

    #[test]
    fn what_is_not_known_is_noted() {
        let keys = json!({"later": {"x": 1}, "nothing": null, "off": false, "task_type": "CAUSAL_LM"});
        let (_, notes) = read(keys).unwrap();
        assert_eq!(notes, ["`later` ({\"x\":1}) has no effect in Hydra"]);
        let empty = json!({"loftq_config": {}, "eva_config": null, "megatron_core": "megatron.core"});
        assert!(read(empty).unwrap().1.is_empty());
    }

    #[test]
    fn rows_of_tables_are_read() {
        let rows = |value: Value| read(json!({"trainable_token_indices": value})).unwrap().0.tokens;
        assert_eq!(rows(json!([1, 2])), [TokenRows { module: None, rows: vec![1, 2] }]);
        assert_eq!(rows(json!({"wte": [3]})), [TokenRows { module: Some("wte".to_owned()), rows: vec![3] }]);
    }
}
