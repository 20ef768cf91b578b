//! Special and added tokens of a directory, with the rules of Transformers 5.

use super::TokenizerError;
use super::huggingface::{END_OF_TEXT, read};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::AddedToken;

/// The file with the tokenizer's class and special tokens.
pub(super) const CONFIG: &str = "tokenizer_config.json";
/// The older file of special tokens.
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// The older file of tokens added to a vocabulary.
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";

/// The names of special tokens common to all tokenizers of Transformers.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A directory's tokenizer settings apart from the vocabulary.
#[derive(Debug, Default)]
pub(super) struct Special {
    /// `tokenizer_config.json`.
    pub(super) config: Map<String, Value>,
    /// The Transformers class of the tokenizer without `Fast`, if the directory names it.
    pub(super) class: Option<String>,
    /// The end-of-text token, if a file names it.
    pub(super) end: Option<String>,
    /// Special tokens by their names in templates.
    pub(super) named: Map<String, Value>,
    /// Tokens added to the vocabulary, in order. Those of `added_tokens_decoder` and `added_tokens.json` have ids.
    pub(super) added: Vec<(Option<u32>, AddedToken)>,
}

impl Special {
    /// Reads `tokenizer_config.json`; if that has no `added_tokens_decoder`, also `special_tokens_map.json`, whose
    /// entries take precedence, and `added_tokens.json`.
    ///
    /// # Errors
    /// A file that cannot be read or is invalid.
    pub(super) fn read(directory: &Path) -> Result<Self, TokenizerError> {
        let config = object(&directory.join(CONFIG))?;
        let mut tokens = config.clone();
        let mut decoder = BTreeMap::new();
        if let Some(entries) = config.get("added_tokens_decoder").and_then(Value::as_object) {
            for (id, token) in entries {
                let wrong = |found: String| broken(&directory.join(CONFIG), found);
                let number = id.parse::<u32>();
                let number =
                    number.map_err(|_| wrong(format!("`{id}` in `added_tokens_decoder` is not an id")))?;
                let token = token_of(token, false)
                    .ok_or_else(|| wrong(format!("`added_tokens_decoder` has no token for `{id}`")))?;
                decoder.insert(number, token);
            }
        } else {
            tokens.extend(object(&directory.join(SPECIAL_TOKENS))?);
        }
        let class = class(&config, directory)?;
        let named = named(&tokens, class.as_deref());
        let extra = extra(&tokens);
        if !config.contains_key("added_tokens_decoder") {
            for (token, id) in object(&directory.join(ADDED_TOKENS))? {
                let wrong = || broken(&directory.join(ADDED_TOKENS), format!("the id of `{token}` is {id}"));
                let number = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)?;
                let special = named.values().any(|value| *value == token)
                    || extra.iter().any(|value| value.content == token);
                decoder.insert(number, AddedToken::from(token, special));
            }
        }
        let mut added: Vec<(Option<u32>, AddedToken)> =
            decoder.into_iter().map(|(id, token)| (Some(id), token)).collect();
        let names = tokens.iter().filter(|(name, _)| named.contains_key(*name));
        let specials = names.filter_map(|(_, token)| token_of(token, true)).chain(extra);
        for token in specials {
            if added.iter().all(|(_, known)| known.content != token.content) {
                added.push((None, token));
            }
        }
        let end = tokens.get("eos_token").and_then(content);
        Ok(Self { config, class, end, named, added })
    }

    /// A flag of `tokenizer_config.json`, or this default.
    pub(super) fn flag(&self, name: &str, default: bool) -> bool {
        self.config.get(name).and_then(Value::as_bool).unwrap_or(default)
    }
}

/// The JSON object in a file; empty if there is no file.
fn object(path: &Path) -> Result<Map<String, Value>, TokenizerError> {
    if !path.exists() {
        return Ok(Map::new());
    }
    serde_json::from_str(&read(path)?).map_err(|source| broken(path, source))
}

fn broken(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> TokenizerError {
    TokenizerError::Parse { path: path.to_owned(), source: source.into() }
}

/// The tokenizer's class: from `tokenizer_config.json`, else `config.json`, else by the model type.
fn class(config: &Map<String, Value>, directory: &Path) -> Result<Option<String>, TokenizerError> {
    let model = object(&directory.join("config.json"))?;
    let kind = model.get("model_type").and_then(Value::as_str);
    let given =
        config.get("tokenizer_class").or_else(|| model.get("tokenizer_class")).and_then(Value::as_str);
    Ok(match (given, kind) {
        // Transformers ignores the class in directories of these types.
        (_, Some("qwen2")) | (None, Some("qwen3")) => Some("Qwen2Tokenizer".to_owned()),
        (None, Some("gpt2")) => Some("GPT2Tokenizer".to_owned()),
        (None, Some("roberta")) => Some("RobertaTokenizer".to_owned()),
        (None, Some("bert" | "distilbert")) => Some("BertTokenizer".to_owned()),
        // Transformers reads the file of these types unchanged.
        (Some(_), Some("mistral" | "modernbert")) => Some("TokenizersBackend".to_owned()),
        // A `BertTokenizer` of another name.
        (Some("DistilBertTokenizer" | "DistilBertTokenizerFast"), _) => Some("BertTokenizer".to_owned()),
        (given, _) => given.map(|class| class.strip_suffix("Fast").unwrap_or(class).to_owned()),
    })
}

/// The named special tokens: the class's defaults where no file sets them, and further names that end in `_token`.
fn named(tokens: &Map<String, Value>, class: Option<&str>) -> Map<String, Value> {
    let end = END_OF_TEXT;
    let defaults: &[(&str, &str)] = match class {
        Some("GPT2Tokenizer") => &[("bos_token", end), ("eos_token", end), ("unk_token", end)],
        Some("Qwen2Tokenizer") => &[("eos_token", end), ("unk_token", end), ("pad_token", end)],
        Some("LlamaTokenizer") => &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")],
        Some("RobertaTokenizer") => &[
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "<unk>"),
            ("sep_token", "</s>"),
            ("pad_token", "<pad>"),
            ("cls_token", "<s>"),
            ("mask_token", "<mask>"),
        ],
        Some("BertTokenizer") => &[
            ("unk_token", "[UNK]"),
            ("sep_token", "[SEP]"),
            ("pad_token", "[PAD]"),
            ("cls_token", "[CLS]"),
            ("mask_token", "[MASK]"),
        ],
        _ => &[],
    };
    let mut named = Map::new();
    for name in NAMES {
        let default =
            || defaults.iter().find(|(known, _)| *known == name).map(|(_, token)| (*token).to_owned());
        let token = tokens.get(name).map_or_else(default, content);
        token.into_iter().for_each(|token| drop(named.insert(name.to_owned(), Value::String(token))));
    }
    let further =
        tokens.iter().filter(|(name, _)| name.ends_with("_token") && !NAMES.contains(&name.as_str()));
    let extra = ["extra_special_tokens", "model_specific_special_tokens"].map(|name| tokens.get(name));
    let extra = extra.into_iter().flatten().filter_map(Value::as_object).flatten();
    for (name, token) in further.chain(extra) {
        content(token).into_iter().for_each(|token| drop(named.insert(name.clone(), Value::String(token))));
    }
    named
}

/// The special tokens without a name.
fn extra(tokens: &Map<String, Value>) -> Vec<AddedToken> {
    let filled =
        |name: &str| tokens.get(name).filter(|value| value.as_array().is_some_and(|list| !list.is_empty()));
    let list = filled("extra_special_tokens").or_else(|| filled("additional_special_tokens"));
    let list = list.and_then(Value::as_array).into_iter().flatten();
    list.filter_map(|token| token_of(token, true)).collect()
}

/// The text of a token: a string, or an object that contains it.
fn content(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

fn token_of(token: &Value, special: bool) -> Option<AddedToken> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Flags {
        single_word: bool,
        lstrip: bool,
        rstrip: bool,
        normalized: Option<bool>,
        special: bool,
    }
    let flags: Flags = serde_json::from_value(token.clone()).unwrap_or_default();
    let special = special || flags.special;
    let token = AddedToken::from(content(token)?, special);
    let token = token.single_word(flags.single_word).lstrip(flags.lstrip).rstrip(flags.rstrip);
    Some(token.normalized(flags.normalized.unwrap_or(!special)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn special(files: &[(&str, Value)]) -> Special {
        let dir = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, value)| fs::write(dir.path().join(name), value.to_string()).unwrap());
        Special::read(dir.path()).unwrap()
    }

    fn added(special: &Special) -> Vec<(Option<u32>, &str)> {
        special.added.iter().map(|(id, token)| (*id, token.content.as_str())).collect()
    }

    #[test]
    fn the_older_files_are_read_only_without_a_list_of_added_tokens() {
        let config = json!({"eos_token": "<old>", "image_token": "<image>", "use_token": true});
        let map = json!({"eos_token": {"content": "</s>", "lstrip": true}, "bos_token": "<s>"});
        let files = |config: Value| {
            special(&[
                (CONFIG, config),
                (SPECIAL_TOKENS, map.clone()),
                (ADDED_TOKENS, json!({"<s>": 7, "x": 8})),
            ])
        };
        let older = files(config.clone());
        let named = json!({"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"});
        assert_eq!(Value::Object(older.named.clone()), named);
        assert_eq!(added(&older), [(Some(7), "<s>"), (Some(8), "x"), (None, "</s>"), (None, "<image>")]);
        assert!(older.added[0].1.special && !older.added[1].1.special && older.added[2].1.lstrip);
        let mut newer = config;
        newer["added_tokens_decoder"] = json!({"9": {"content": "<t>", "special": true}});
        let newer = files(newer);
        assert_eq!(newer.named["eos_token"], "<old>");
        assert_eq!(added(&newer), [(Some(9), "<t>"), (None, "<old>"), (None, "<image>")]);
    }

    #[test]
    fn a_class_has_tokens_where_nobody_names_them() {
        let gpt2 = special(&[("config.json", json!({"model_type": "gpt2"}))]);
        assert_eq!(gpt2.named["eos_token"], END_OF_TEXT);
        assert_eq!(added(&gpt2), []);
        let none = special(&[
            ("config.json", json!({"model_type": "gpt2"})),
            (CONFIG, json!({"tokenizer_class": "GPT2TokenizerFast", "eos_token": null})),
        ]);
        assert_eq!((none.named.get("eos_token"), &none.named["bos_token"]), (None, &json!(END_OF_TEXT)));
        assert!(special(&[(CONFIG, json!({"tokenizer_class": "TokenizersBackend"}))]).named.is_empty());
    }

    #[test]
    fn extra_tokens_may_have_names() {
        let list = special(&[(CONFIG, json!({"additional_special_tokens": ["<a>", {"content": "<b>"}]}))]);
        assert_eq!(added(&list), [(None, "<a>"), (None, "<b>")]);
        let names = special(&[(CONFIG, json!({"extra_special_tokens": {"boi_token": "<boi>"}}))]);
        assert_eq!(names.named["boi_token"], "<boi>");
    }
}
