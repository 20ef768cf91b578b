//! The settings that only ModernBERT has.

use crate::ModelError;
use crate::family::supported::{check_activation, refuse};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// The vector that a head reads of each sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Pooling {
    /// That of the first token.
    #[default]
    #[serde(rename = "cls")]
    First,
    /// The mean over all tokens.
    #[serde(rename = "mean")]
    Mean,
}

/// The settings that only ModernBERT has, with the names and defaults of Transformers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct Modern {
    /// In local blocks, a token attends to tokens at a distance of at most half of this number.
    pub local_attention: usize,
    /// The dropout probability of the feed-forward networks' hidden vectors.
    pub mlp_dropout: f64,
    /// Whether attention's linear layers have biases.
    pub attention_bias: bool,
    /// Whether the feed-forward networks' linear layers have biases.
    pub mlp_bias: bool,
    /// Whether normalizations have biases.
    pub norm_bias: bool,
    /// Whether the first linear layer of the head has a bias.
    pub classifier_bias: bool,
    /// The activation function of the head.
    pub classifier_activation: String,
    /// The vector that the head reads.
    pub classifier_pooling: Pooling,
    /// Whether each block attends to all tokens.
    #[serde(skip)]
    pub is_global: Vec<bool>,
    /// The bases of the rotary frequencies in global and in local blocks.
    #[serde(skip)]
    pub thetas: [f64; 2],
}

impl Default for Modern {
    fn default() -> Self {
        Self {
            local_attention: 128,
            mlp_dropout: 0.0,
            attention_bias: false,
            mlp_bias: false,
            norm_bias: false,
            classifier_bias: false,
            classifier_activation: "gelu".to_owned(),
            classifier_pooling: Pooling::First,
            is_global: Vec::new(),
            thetas: [160_000.0, 10_000.0],
        }
    }
}

/// The types of layers.
const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

impl Modern {
    /// Reads the keys of a file for a model with this number of blocks; `path` is named in errors.
    ///
    /// # Errors
    /// A value of another kind, or one that is not supported.
    pub(super) fn read(path: &Path, file: &Map<String, Value>, blocks: usize) -> Result<Self, ModelError> {
        let wrong = |source| ModelError::Json { path: path.to_owned(), source };
        let mut modern: Self = serde_json::from_value(Value::Object(file.clone())).map_err(wrong)?;
        check_activation("classifier_activation", &modern.classifier_activation)?;
        modern.is_global = is_global(file, blocks)?;
        modern.thetas = thetas(file, modern.thetas)?;
        Ok(modern)
    }

    /// The window of the block at `index`, if it is local: the tokens in each direction, with its own.
    pub(super) fn window(&self, index: usize) -> Option<usize> {
        let is_local = self.is_global.get(index) == Some(&false);
        is_local.then_some(self.local_attention / 2 + 1)
    }
}

/// A key's value, if it is not null.
fn key<'a>(file: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    file.get(name).filter(|value| !value.is_null())
}

fn is_global(file: &Map<String, Value>, blocks: usize) -> Result<Vec<bool>, ModelError> {
    if let Some(found) = key(file, "layer_types") {
        let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
        let types = found.as_array().filter(|types| types.len() == blocks && types.iter().all(is_type));
        let expected = || format!("a list of {blocks} layer types, each {}", TYPES.join(" or "));
        let types = types.ok_or_else(|| refuse("layer_types", found, expected()))?;
        return Ok(types.iter().map(|value| value == TYPES[0]).collect());
    }
    let every = match key(file, "global_attn_every_n_layers") {
        None => 3,
        Some(found) => found
            .as_u64()
            .filter(|every| *every > 0)
            .ok_or_else(|| refuse("global_attn_every_n_layers", found, "an integer of at least 1"))?,
    };
    Ok((0..blocks as u64).map(|index| index.is_multiple_of(every)).collect())
}

/// The bases of both types of layers: those of `rope_parameters`, else those of older keys.
fn thetas(file: &Map<String, Value>, defaults: [f64; 2]) -> Result<[f64; 2], ModelError> {
    if let Some(found) = key(file, "rope_scaling") {
        return Err(refuse("rope_scaling", found, "null: the frequencies of ModernBERT are not scaled"));
    }
    let mut thetas = defaults;
    let older = ["global_rope_theta", "local_rope_theta"];
    for ((theta, layers), older) in thetas.iter_mut().zip(TYPES).zip(older) {
        let own = key(file, "rope_parameters").and_then(|all| all.get(layers));
        let kind = ["rope_type", "type"].into_iter().find_map(|name| own?.get(name)?.as_str());
        let kind = kind.unwrap_or("default");
        if kind != "default" {
            return Err(refuse("rope_parameters", kind, "rope_type default"));
        }
        let found = own.and_then(|own| own.get("rope_theta")).or_else(|| key(file, older));
        if let Some(found) = found {
            let value = found.as_f64().filter(|theta| *theta > 0.0);
            *theta = value.ok_or_else(|| refuse("rope_parameters", found, "a rope_theta above 0"))?;
        }
    }
    Ok(thetas)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn older_and_newer_files_give_the_same_layers() {
        let read = |value: Value| {
            let file: Map<String, Value> = serde_json::from_value(value).unwrap();
            Modern::read(Path::new("c"), &file, 4).unwrap()
        };
        let older = read(json!({
            "global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 50.0,
            "local_attention": 8, "classifier_pooling": "mean",
        }));
        let newer = read(json!({
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "local_attention": 8, "classifier_pooling": "mean",
        }));
        assert_eq!(older, newer);
        assert_eq!((newer.thetas, newer.classifier_pooling), ([500.0, 50.0], Pooling::Mean));
        assert_eq!([0, 1, 2, 3].map(|index| newer.window(index)), [None, Some(5), None, Some(5)]);
        let default = read(json!({}));
        assert_eq!(default.is_global, [true, false, false, true]);
        assert_eq!((default.thetas, default.window(1)), ([160_000.0, 10_000.0], Some(65)));
    }

    #[test]
    fn scaled_frequencies_are_refused_under_either_key() {
        for key in ["rope_type", "type"] {
            let file = json!({"rope_parameters": {"full_attention": {key: "linear", "factor": 2.0}}});
            let error = Modern::read(Path::new("c"), file.as_object().unwrap(), 4).unwrap_err().to_string();
            assert!(error.contains("`rope_parameters` is linear, expected rope_type default"), "{error}");
        }
    }
}
