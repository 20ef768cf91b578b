//! Decoder configurations as JSON, with the defaults of each model type.

use super::config::{DecoderConfig, LayerType, ModelType, Rope};
use crate::ModelError;
use crate::family::HeadConfig;
use crate::family::supported::{QUANTIZATION, check_quantization, refuse};
use crate::ops::RotaryScaling;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

/// Transformers' defaults for keys that a model's file omits.
struct Defaults {
    vocab_size: usize,
    max_position_embeddings: usize,
    intermediate_size: usize,
    /// `None`: the number of query heads.
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
}

impl Defaults {
    fn of(model: ModelType) -> Self {
        let llama = Self {
            vocab_size: 32_000,
            max_position_embeddings: 2048,
            intermediate_size: 11_008,
            num_key_value_heads: None,
            head_dim: None,
        };
        let qwen = Self {
            vocab_size: 151_936,
            max_position_embeddings: 32_768,
            intermediate_size: 22_016,
            num_key_value_heads: Some(32),
            head_dim: None,
        };
        match model {
            ModelType::Llama => llama,
            ModelType::Mistral => Self {
                max_position_embeddings: 131_072,
                intermediate_size: 14_336,
                num_key_value_heads: Some(8),
                ..llama
            },
            ModelType::Qwen2 => qwen,
            ModelType::Qwen3 => Self { head_dim: Some(128), ..qwen },
        }
    }
}

/// The default window of models that have one.
const WINDOW: usize = 4096;
/// The default first block with a window, in Qwen models.
const MAX_WINDOW_LAYERS: usize = 28;
const THETA: f64 = 10_000.0;

/// The keys of a file.
struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    /// The value of a key that exists and is not null.
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &'static str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| refuse(name, value, expected))
    }

    fn size(&self, name: &'static str) -> Result<Option<usize>, ModelError> {
        self.read(name, "an integer", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn number(&self, name: &'static str, default: f64) -> Result<f64, ModelError> {
        Ok(self.read(name, "a number", Value::as_f64)?.unwrap_or(default))
    }

    fn flag(&self, name: &'static str) -> Result<bool, ModelError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    fn text(&self, name: &'static str) -> Result<Option<String>, ModelError> {
        self.read(name, "a string", |value| value.as_str().map(str::to_owned))
    }
}

/// The model type in a file.
fn model(keys: &Keys<'_>) -> Result<ModelType, ModelError> {
    let found = keys.text("model_type")?.unwrap_or_else(|| "missing".to_owned());
    let known = || ModelType::ALL.map(ModelType::name).join(", ");
    let model = ModelType::ALL.into_iter().find(|model| model.name() == found);
    model.ok_or_else(|| refuse("model_type", &found, known()))
}

/// Rejects settings that Transformers supports but the layers here do not.
fn check_supported(keys: &Keys<'_>) -> Result<(), ModelError> {
    check_quantization(keys.0)?;
    match keys.number("partial_rotary_factor", 1.0)? {
        1.0 => Ok(()),
        found => {
            Err(refuse("partial_rotary_factor", found, "1: partial rotary embeddings are not supported"))
        }
    }
}

/// The supported kinds of scaling.
const SCALINGS: &str = "default or llama3";

/// Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.
fn rope(keys: &Keys<'_>) -> Result<Rope, ModelError> {
    let object = |name| {
        let object = keys.read(name, "an object", |value| value.as_object().cloned())?;
        Ok::<_, ModelError>(object.filter(|object| !object.is_empty()))
    };
    let parameters = match object("rope_scaling")? {
        Some(scaling) => scaling,
        None => object("rope_parameters")?.unwrap_or_default(),
    };
    if let Some((name, _)) = parameters.iter().find(|(_, value)| value.is_object()) {
        let expected = "one rotary embedding for all layers";
        return Err(refuse("rope_parameters", format!("a separate one for `{name}`"), expected));
    }
    let own = Keys(&parameters);
    check_supported(&own)?;
    let theta = own.number("rope_theta", keys.number("rope_theta", THETA)?)?;
    let kind = own.text("rope_type")?.or(own.text("type")?);
    let scaling = match kind.as_deref() {
        None | Some("default") => RotaryScaling::Default,
        Some("llama3") => llama3(&own)?,
        Some(other) => return Err(refuse("rope_type", other, SCALINGS)),
    };
    Ok(Rope { theta, scaling })
}

fn llama3(keys: &Keys<'_>) -> Result<RotaryScaling, ModelError> {
    let missing = |name| refuse(name, "missing", "a number, because rope_type is llama3");
    let number = |name| keys.read(name, "a number", Value::as_f64)?.ok_or_else(|| missing(name));
    let positions = "original_max_position_embeddings";
    Ok(RotaryScaling::Llama3 {
        factor: number("factor")?,
        low_freq_factor: number("low_freq_factor")?,
        high_freq_factor: number("high_freq_factor")?,
        original_positions: keys.size(positions)?.ok_or_else(|| missing(positions))?,
    })
}

/// The window, and the first block with it if there are no layer types.
fn window(keys: &Keys<'_>, model: ModelType) -> Result<(Option<usize>, usize), ModelError> {
    // Null means no window; a missing key means the model's default.
    let window = match keys.0.get("sliding_window") {
        None => Some(WINDOW),
        Some(_) => keys.size("sliding_window")?,
    };
    match model {
        ModelType::Llama => Ok((None, 0)),
        ModelType::Mistral => Ok((window, 0)),
        ModelType::Qwen2 | ModelType::Qwen3 => {
            let (first, slides) = (keys.size("max_window_layers")?, keys.flag("use_sliding_window")?);
            Ok((window.filter(|_| slides), first.unwrap_or(MAX_WINDOW_LAYERS)))
        }
    }
}

fn layer_types(keys: &Keys<'_>, model: ModelType) -> Result<Option<Vec<LayerType>>, ModelError> {
    if !matches!(model, ModelType::Qwen2 | ModelType::Qwen3) {
        return Ok(None);
    }
    let Some(types) = keys.read("layer_types", "a list", |value| value.as_array().cloned())? else {
        return Ok(None);
    };
    let layer_type = |value: &Value| match value.as_str() {
        Some("full_attention") => Ok(LayerType::Full),
        Some("sliding_attention") => Ok(LayerType::Sliding),
        _ => Err(refuse("layer_types", value, "only full_attention and sliding_attention")),
    };
    types.iter().map(layer_type).collect::<Result<Vec<_>, _>>().map(Some)
}

impl DecoderConfig {
    /// Reads a configuration from the keys of a file, without [validating](Self::validate) it.
    ///
    /// # Errors
    /// An unsupported model type, rotary scaling or kind of weights, or a value of the wrong type.
    pub fn from_json(mut file: Map<String, Value>) -> Result<Self, ModelError> {
        let keys = Keys(&file);
        let model = model(&keys)?;
        check_supported(&keys)?;
        let defaults = Defaults::of(model);
        let size = |name, default| Ok::<_, ModelError>(keys.size(name)?.unwrap_or(default));
        let hidden_size = size("hidden_size", 4096)?;
        let num_attention_heads = size("num_attention_heads", 32)?;
        // Null means the number of query heads; a missing key means the model's default.
        let key_heads = match file.contains_key("num_key_value_heads") {
            true => keys.size("num_key_value_heads")?,
            false => defaults.num_key_value_heads,
        };
        let head_dim = keys.size("head_dim")?.or(defaults.head_dim);
        let (sliding_window, max_window_layers) = window(&keys, model)?;
        let config = Self {
            model_type: model,
            head: HeadConfig::read(&file)?,
            vocab_size: size("vocab_size", defaults.vocab_size)?,
            max_position_embeddings: size("max_position_embeddings", defaults.max_position_embeddings)?,
            hidden_size,
            intermediate_size: size("intermediate_size", defaults.intermediate_size)?,
            num_hidden_layers: size("num_hidden_layers", 32)?,
            num_attention_heads,
            num_key_value_heads: key_heads.unwrap_or(num_attention_heads),
            head_dim: head_dim.unwrap_or(hidden_size / num_attention_heads.max(1)),
            hidden_act: keys.text("hidden_act")?.unwrap_or_else(|| "silu".to_owned()),
            rms_norm_eps: keys.number("rms_norm_eps", 1e-6)?,
            initializer_range: keys.number("initializer_range", 0.02)?,
            attention_dropout: keys.number("attention_dropout", 0.0)?,
            attention_bias: keys.flag("attention_bias")?,
            mlp_bias: keys.flag("mlp_bias")?,
            tie_word_embeddings: keys.flag("tie_word_embeddings")?,
            rope: rope(&keys)?,
            sliding_window,
            max_window_layers,
            layer_types: layer_types(&keys, model)?,
            vocabulary_parts: 1,
            other: Map::new(),
        };
        // Weights are written as floats.
        file.remove(QUANTIZATION);
        Ok(Self { other: file, ..config })
    }

    /// The keys of a file with this configuration: the original ones, with changed values overwritten.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut file = self.other.clone();
        self.head.write(&mut file);
        file.insert("model_type".to_owned(), json!(self.model_type.name()));
        let read = Self::from_json(file.clone()).ok();
        let known = read.as_ref().map(Self::known).unwrap_or_default();
        for (name, value) in self.known() {
            if known.get(&name) != Some(&value) {
                file.insert(name, value);
            }
        }
        if read.is_none_or(|read| read.rope != self.rope) {
            file.remove("rope_theta");
            file.remove("rope_scaling");
            file.insert("rope_parameters".to_owned(), self.rope.json());
        }
        file
    }

    /// The fields by their names in files.
    fn known(&self) -> Map<String, Value> {
        let types = self.layer_types.as_ref().map(|types| {
            let name = |layer: &LayerType| match layer {
                LayerType::Full => "full_attention",
                LayerType::Sliding => "sliding_attention",
            };
            types.iter().map(name).collect::<Vec<_>>()
        });
        let known = [
            ("vocab_size", json!(self.vocab_size)),
            ("max_position_embeddings", json!(self.max_position_embeddings)),
            ("hidden_size", json!(self.hidden_size)),
            ("intermediate_size", json!(self.intermediate_size)),
            ("num_hidden_layers", json!(self.num_hidden_layers)),
            ("num_attention_heads", json!(self.num_attention_heads)),
            ("num_key_value_heads", json!(self.num_key_value_heads)),
            ("head_dim", json!(self.head_dim)),
            ("hidden_act", json!(self.hidden_act)),
            ("rms_norm_eps", json!(self.rms_norm_eps)),
            ("initializer_range", json!(self.initializer_range)),
            ("attention_dropout", json!(self.attention_dropout)),
            ("attention_bias", json!(self.attention_bias)),
            ("mlp_bias", json!(self.mlp_bias)),
            ("tie_word_embeddings", json!(self.tie_word_embeddings)),
            ("sliding_window", json!(self.sliding_window)),
            ("use_sliding_window", json!(self.sliding_window.is_some())),
            ("max_window_layers", json!(self.max_window_layers)),
            ("layer_types", json!(types)),
        ];
        known.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Rope {
    fn json(self) -> Value {
        match self.scaling {
            RotaryScaling::Default => json!({"rope_type": "default", "rope_theta": self.theta}),
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                json!({
                    "rope_type": "llama3",
                    "rope_theta": self.theta,
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_positions,
                })
            }
        }
    }
}

impl Serialize for DecoderConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for DecoderConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_json(Map::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: Value) -> Result<DecoderConfig, ModelError> {
        let config = DecoderConfig::from_json(file.as_object().unwrap().clone())?;
        config.validate().map(|()| config)
    }

    /// A small model of this type, with these keys replaced.
    fn small(model_type: &str, keys: Value) -> Value {
        let mut file = json!({
            "model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 3,
        });
        file.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        file
    }

    #[test]
    fn what_a_file_does_not_say_is_what_transformers_takes() {
        let sizes = |model: &str| {
            let config = read(json!({"model_type": model})).unwrap();
            let heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
            (config.vocab_size, config.intermediate_size, heads, config.window(0), config.tie_word_embeddings)
        };
        assert_eq!(sizes("llama"), (32_000, 11_008, [32, 32, 128], None, false));
        assert_eq!(sizes("mistral"), (32_000, 14_336, [32, 8, 128], Some(4096), false));
        assert_eq!(sizes("qwen2"), (151_936, 22_016, [32, 32, 128], None, false));
        assert_eq!(sizes("qwen3"), (151_936, 22_016, [32, 32, 128], None, false));
        let qwen3 = read(json!({"model_type": "qwen3", "hidden_size": 1024})).unwrap();
        assert_eq!(qwen3.head_dim, 128, "not the width over the heads");
        let null =
            read(json!({"model_type": "mistral", "num_key_value_heads": null, "sliding_window": null}));
        let null = null.unwrap();
        assert_eq!((null.num_key_value_heads, null.window(0)), (32, None));
    }

    #[test]
    fn the_rotary_embedding_is_read_as_older_and_newer_files_have_it() {
        let rope = |keys| read(small("llama", keys)).unwrap().rope;
        let llama3 = json!({
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let with = |key: &str, value: Value| {
            let mut object = llama3.clone();
            object[key] = value;
            object
        };
        let mut newer = with("rope_type", json!("llama3"));
        newer["rope_theta"] = json!(5e5);
        let older = json!({"rope_theta": 5e5, "rope_scaling": with("rope_type", json!("llama3"))});
        let oldest = json!({"rope_theta": 5e5, "rope_scaling": with("type", json!("llama3"))});
        let newer = rope(json!({"rope_parameters": newer}));
        assert_eq!((rope(older), rope(oldest)), (newer, newer));
        assert!(matches!(newer.scaling, RotaryScaling::Llama3 { original_positions: 8192, .. }));
        assert_eq!(newer.theta, 5e5);
        let plain = Rope { theta: 1e4, scaling: RotaryScaling::Default };
        assert_eq!(rope(json!({})), plain);
        assert_eq!(rope(json!({"rope_scaling": null})), plain);
        assert_eq!(rope(json!({"rope_scaling": {"type": "default"}})), plain);
        assert_eq!(rope(json!({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0})).theta, 7.0);
    }

    #[test]
    fn windows_are_those_of_the_models() {
        let windows = |model: &str, keys| {
            let config = read(small(model, keys)).unwrap();
            (0..3).map(|index| config.window(index)).collect::<Vec<_>>()
        };
        let none = vec![None; 3];
        assert_eq!(windows("llama", json!({"sliding_window": 8})), none);
        assert_eq!(windows("mistral", json!({"sliding_window": 8})), vec![Some(8); 3]);
        assert_eq!(windows("qwen2", json!({"sliding_window": 8, "max_window_layers": 1})), none);
        let used = json!({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": true});
        assert_eq!(windows("qwen2", used.clone()), [None, Some(8), Some(8)]);
        let mut typed = used;
        typed["layer_types"] = json!(["sliding_attention", "full_attention", "full_attention"]);
        assert_eq!(windows("qwen3", typed), [Some(8), None, None]);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let refusal = |file: Value| read(file).unwrap_err().to_string();
        let llama = |keys| refusal(small("llama", keys));
        let rope = |kind: &str| llama(json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}}));
        let quantized = json!({"quantization_config": {"quant_method": "gptq", "bits": 4}});
        let per_layer = json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}});
        for (refusal, expected) in [
            (refusal(json!({})), "`model_type` is missing, expected llama, mistral, qwen2, qwen3"),
            (refusal(small("gemma3", json!({}))), "`model_type` is gemma3, expected llama, mistral, "),
            (
                llama(json!({"architectures": ["LlamaForTokenClassification"]})),
                "`architectures` is LlamaForTokenClassification, expected LlamaForCausalLM or LlamaModel or LlamaFor",
            ),
            (
                llama(json!({"architectures": "LlamaModel"})),
                "`architectures` is \"LlamaModel\", expected a list",
            ),
            (llama(quantized), "`quantization_config` is gptq, expected unquantized weights"),
            (rope("yarn"), "`rope_type` is yarn, expected default or llama3"),
            (rope("dynamic"), "`rope_type` is dynamic, expected default or llama3"),
            (rope("llama3"), "`low_freq_factor` is missing, expected a number, because rope_type is llama3"),
            (llama(json!({"rope_scaling": {"type": "linear"}})), "`rope_type` is linear, expected"),
            (llama(per_layer), "`rope_parameters` is a separate one for `full_attention`, expected one"),
            (llama(json!({"partial_rotary_factor": 0.5})), "`partial_rotary_factor` is 0.5, expected 1"),
            (llama(json!({"hidden_act": "gelu"})), "`hidden_act` is gelu, expected silu or swish"),
            (llama(json!({"hidden_size": "wide"})), "`hidden_size` is \"wide\", expected an integer"),
            (llama(json!({"tie_word_embeddings": 1})), "`tie_word_embeddings` is 1, expected true or false"),
            (
                refusal(small("qwen3", json!({"layer_types": ["full_attention", "chunked_attention", "x"]}))),
                "`layer_types` is \"chunked_attention\", expected only full_attention and sliding_attention",
            ),
        ] {
            assert!(refusal.starts_with(expected), "{refusal}");
        }
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        let refusal = |model: &str, keys| read(small(model, keys)).unwrap_err().to_string();
        let llama = |keys| refusal("llama", keys);
        let types = |types: Value| refusal("qwen2", json!({"layer_types": types}));
        let llama3 = |low: f64, high: f64, original: usize| {
            llama(json!({"rope_scaling": {
                "rope_type": "llama3", "factor": 2.0, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }}))
        };
        for (refusal, expected) in [
            (llama(json!({"vocab_size": 0})), "`vocab_size` is 0, expected at least 1"),
            (llama(json!({"num_attention_heads": 0})), "`num_attention_heads` is 0"),
            (llama(json!({"hidden_size": 1u64 << 40})), "`hidden_size` is 1099511627776, expected at most"),
            (llama(json!({"num_hidden_layers": u64::MAX})), "`num_hidden_layers` is 18446744073709551615"),
            (
                llama(json!({"max_position_embeddings": 1})),
                "`max_position_embeddings` is 1, expected at least 2",
            ),
            (
                llama(json!({"num_key_value_heads": 3})),
                "`num_key_value_heads` is 3, expected a divisor of num_attention_heads, which is 4",
            ),
            (llama(json!({"head_dim": 15})), "`head_dim` is 15, expected an even number"),
            (
                llama(json!({"head_dim": 1 << 20, "num_attention_heads": 64})),
                "`head_dim` is 1048576, expected",
            ),
            (llama(json!({"rms_norm_eps": 0.0})), "`rms_norm_eps` is 0, expected a number above 0"),
            (llama(json!({"attention_dropout": 1.0})), "`attention_dropout` is 1"),
            (llama(json!({"rope_theta": -1.0})), "`rope_theta` is -1"),
            (llama3(4.0, 4.0, 64), "`high_freq_factor` is 4, expected more than low_freq_factor, which is 4"),
            (llama3(1.0, 4.0, 0), "`original_max_position_embeddings` is 0"),
            (refusal("mistral", json!({"sliding_window": 0})), "`sliding_window` is 0"),
            (types(json!(["full_attention"])), "`layer_types` is a list of 1, expected one type for each"),
            (
                types(json!(["full_attention", "sliding_attention", "full_attention"])),
                "`layer_types` is sliding_attention for some blocks, expected full_attention only",
            ),
        ] {
            assert!(refusal.starts_with(expected), "{refusal}");
        }
    }

    #[test]
    fn what_was_read_is_written_back_and_changes_are_written() {
        let file = small(
            "qwen2",
            json!({
                "sliding_window": 8, "use_sliding_window": false, "rope_theta": 1e6, "rope_scaling": null,
                "transformers_version": "4.40.1", "bos_token_id": [1, 2],
            }),
        );
        let config: DecoderConfig = serde_json::from_value(file.clone()).unwrap();
        assert_eq!(serde_json::to_value(&config).unwrap(), file);
        let mut changed = config.clone();
        (changed.num_hidden_layers, changed.attention_dropout) = (2, 0.1);
        changed.rope.theta = 10.0;
        let written = serde_json::to_value(&changed).unwrap();
        let mut expected = file;
        expected["num_hidden_layers"] = json!(2);
        expected["attention_dropout"] = json!(0.1);
        expected["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10.0});
        for old in ["rope_theta", "rope_scaling"] {
            expected.as_object_mut().unwrap().remove(old);
        }
        assert_eq!(written, expected);
        let again: DecoderConfig = serde_json::from_value(written).unwrap();
        assert_eq!(DecoderConfig { other: changed.other.clone(), ..again }, changed);
    }

    #[test]
    fn a_refusal_is_serdes_error_too() {
        let error = serde_json::from_str::<DecoderConfig>(r#"{"model_type": "bloom"}"#).unwrap_err();
        assert!(error.to_string().contains("`model_type` is bloom, expected llama"), "{error}");
    }
}
