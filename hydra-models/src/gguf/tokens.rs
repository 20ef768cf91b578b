//! The tokenizer and the chat template of a GGUF file.
//!
//! llama.cpp has two kinds of byte-pair encodings: `gpt2`, over bytes spelled as letters, whose splitting of texts into
//! words is known by a name, and `llama`, SentencePiece's, over characters with tokens for bytes.

use super::GgufError;
use super::file::Value;
use super::layout::GgufLayout;
use crate::tokenizer::{Tokenizer, templates, tokenizer_json};
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The space of SentencePiece.
const SPACE: char = '\u{2581}';

/// The kinds of tokens, as llama.cpp numbers them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The score of tokens that no merge makes.
const LEAST: f32 = -1000.0;

/// Regular expressions that split texts, and llama.cpp's names of them.
const SPLITS: [(&str, &str); 3] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken",
    ),
];

/// The metadata of a model's tokenizer and of its directory's chat template.
pub(super) fn metadata(
    tokenizer: &Tokenizer,
    directory: Option<&Path>,
    layout: &GgufLayout,
) -> Result<Vec<(String, Value)>, GgufError> {
    let refused = |found: String| GgufError::NoTokenizer {
        directory: directory.unwrap_or(Path::new(".")).to_owned(),
        found,
    };
    let Some(text) = tokenizer_json(tokenizer, directory)? else {
        return Err(refused("it has none".to_owned()));
    };
    let json: Json = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    let vocabulary = Vocabulary::read(&json, layout.vocabulary)?.map_err(refused)?;
    check(&json, vocabulary.of_characters).map_err(refused)?;
    let split = if vocabulary.of_characters { "default" } else { split(&json).map_err(refused)? };
    let mut metadata = vocabulary.metadata(split);
    let mut add = |key: &str, value: Value| metadata.push((format!("tokenizer.{key}"), value));
    let id = |token: &str| vocabulary.id(token).or_else(|| tokenizer.id(token));
    let special = named(directory)?.into_iter();
    let mut ids: BTreeMap<&str, u32> =
        special.filter_map(|(name, token)| Some((name, id(&token)?))).collect();
    // Configurations keep the ids of a larger vocabulary.
    for (name, id) in layout.special.iter().filter(|(_, id)| (*id as usize) < layout.vocabulary) {
        ids.entry(name).or_insert(*id);
    }
    for (name, id) in &ids {
        let name = match *name {
            "unk" => "unknown",
            "pad" => "padding",
            name => name,
        };
        add(&format!("ggml.{name}_token_id"), Value::Count(*id));
    }
    let (plain, whole) = (tokenizer.encode("a")?, tokenizer.encode_whole("a")?);
    let adds = |name: &str, at_end: bool| {
        let added = |ids: &[u32]| if at_end { ids.last().copied() } else { ids.first().copied() };
        whole.len() > plain.len() && added(&whole) == ids.get(name).copied() && added(&whole) != added(&plain)
    };
    add("ggml.add_bos_token", Value::Truth(adds("bos", false)));
    add("ggml.add_eos_token", Value::Truth(adds("eos", true)));
    if vocabulary.of_characters {
        add("ggml.add_space_prefix", Value::Truth(prefixes(&json)));
    }
    for (name, template) in directory.map(templates).transpose()?.unwrap_or_default() {
        match name.as_str() {
            "default" => add("chat_template", Value::Text(template)),
            name => add(&format!("chat_template.{name}"), Value::Text(template)),
        }
    }
    Ok(metadata)
}

/// The special tokens that a directory names.
fn named(directory: Option<&Path>) -> Result<Vec<(&'static str, String)>, GgufError> {
    let named = directory.map(crate::tokenizer::special_tokens).transpose()?.unwrap_or_default();
    let text = |key: &str| {
        let token: &Json = named.get(key)?;
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
    };
    let keys = [("bos", "bos_token"), ("eos", "eos_token"), ("unk", "unk_token"), ("pad", "pad_token")];
    Ok(keys.into_iter().filter_map(|(name, key)| Some((name, text(key)?))).collect())
}

/// The tokens of a vocabulary by their ids.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    merges: Vec<(String, String)>,
    /// Whether tokens are of characters, with others for bytes, instead of bytes spelled as letters.
    of_characters: bool,
}

impl Vocabulary {
    /// Reads a `tokenizer.json` for a model with this number of ids. The inner error describes another kind of
    /// tokenizer.
    fn read(json: &Json, size: usize) -> Result<Result<Self, String>, GgufError> {
        let model = &json["model"];
        let (kind, vocab) = (model["type"].as_str().unwrap_or("BPE"), model["vocab"].as_object());
        let Some(vocab) = vocab.filter(|_| kind == "BPE") else {
            return Ok(Err(format!("its model is {kind}")));
        };
        let of_characters = model["byte_fallback"].as_bool() == Some(true);
        let unknown = model["unk_token"].as_str().filter(|_| of_characters);
        let mut tokens: Vec<String> = (0..size).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![UNUSED; size];
        let mut set = |token: &str, id: Option<u64>, kind: i32| -> Result<(), GgufError> {
            let Some(id) = id else { return Ok(()) };
            let at = usize::try_from(id).ok().filter(|at| *at < size);
            let at = at.ok_or(GgufError::TooManyTokens { id, vocabulary: size })?;
            (tokens[at], kinds[at]) = (token.to_owned(), kind);
            Ok(())
        };
        for (token, id) in vocab {
            let is_byte =
                of_characters && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            let kind = match () {
                () if Some(token.as_str()) == unknown => UNKNOWN,
                () if is_byte => BYTE,
                () => NORMAL,
            };
            set(token, id.as_u64(), kind)?;
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let Some(content) = token["content"].as_str() else { continue };
            if Some(content) == unknown {
                continue;
            }
            match token["special"].as_bool() == Some(true) || looks_special(content) {
                true => set(content, token["id"].as_u64(), CONTROL)?,
                false => set(&content.replace(SPACE, " "), token["id"].as_u64(), USER_DEFINED)?,
            }
        }
        let merges = model["merges"].as_array().into_iter().flatten().filter_map(merge).collect();
        Ok(Ok(Self { tokens, kinds, merges, of_characters }))
    }

    fn id(&self, token: &str) -> Option<u32> {
        self.tokens.iter().position(|known| known == token).map(|id| id as u32)
    }

    fn metadata(&self, split: &str) -> Vec<(String, Value)> {
        let key = |key: &str, value| (format!("tokenizer.ggml.{key}"), value);
        let model = if self.of_characters { "llama" } else { "gpt2" };
        let last = match self.of_characters {
            true => key("scores", Value::Numbers(self.scores())),
            false => {
                // A space separates the parts, and none is within one.
                let spelled = |(one, other): &(String, String)| {
                    [one, other].map(|part| part.replace(' ', "\u{120}")).join(" ")
                };
                key("merges", Value::Texts(self.merges.iter().map(spelled).collect()))
            }
        };
        vec![
            key("model", Value::Text(model.to_owned())),
            key("pre", Value::Text(split.to_owned())),
            key("tokens", Value::Texts(self.tokens.clone())),
            key("token_type", Value::Integers(self.kinds.clone())),
            last,
        ]
    }

    /// The scores of SentencePiece: what merges earlier has a higher one.
    fn scores(&self) -> Vec<f32> {
        let mut ranks: HashMap<String, usize> = HashMap::new();
        for (rank, (one, other)) in self.merges.iter().enumerate() {
            ranks.entry(format!("{one}{other}")).or_insert(rank);
        }
        let made = self.merges.len();
        let score = |(token, kind): (&String, &i32)| match (*kind, ranks.get(token)) {
            (NORMAL, Some(rank)) => -(*rank as f32),
            (NORMAL, None) => -(made as f32),
            (UNKNOWN | BYTE | CONTROL, _) => 0.0,
            _ => LEAST,
        };
        self.tokens.iter().zip(&self.kinds).map(score).collect()
    }
}

/// A merge, written as a pair or as a text with a space.
fn merge(merge: &Json) -> Option<(String, String)> {
    match merge {
        Json::String(text) => text.split_once(' ').map(|(one, other)| (one.to_owned(), other.to_owned())),
        Json::Array(pair) => Some((pair.first()?.as_str()?.to_owned(), pair.get(1)?.as_str()?.to_owned())),
        _ => None,
    }
}

/// Returns whether a token that is not marked as special is one by its form, as llama.cpp's converter decides it.
fn looks_special(token: &str) -> bool {
    let is_between = |start: &str, end: &str| token.starts_with(start) && token.ends_with(end);
    let named = ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&token);
    named || is_between("<|", "|>") || is_between("<\u{ff5c}", "\u{ff5c}>") || is_between("<unused", ">")
}

/// Refuses what llama.cpp does not do: changes of texts before they are split, and tokens that depend on their place in a word.
fn check(json: &Json, of_characters: bool) -> Result<(), String> {
    let kind = |value: &Json| value["type"].as_str().unwrap_or_default().to_owned();
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if json["model"][key].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(format!("its model has a `{key}`, which llama.cpp does not read"));
        }
    }
    let (normalizer, splits) = (kind(&json["normalizer"]), kind(&json["pre_tokenizer"]));
    if of_characters {
        return match splits.as_str() {
            "" | "Metaspace" => Ok(()),
            other => Err(format!(
                "it has tokens for bytes and splits texts by {other}, which llama.cpp has no name for"
            )),
        };
    }
    match normalizer.as_str() {
        // The converter of llama.cpp leaves it out too.
        "" | "NFC" => Ok(()),
        other => Err(format!("its normalizer is {other}, which llama.cpp does not apply to tokens of bytes")),
    }
}

/// llama.cpp's name of the way in which a byte-level tokenizer splits texts into words.
fn split(json: &Json) -> Result<&'static str, String> {
    let parts = match &json["pre_tokenizer"] {
        Json::Object(one) if one.get("type").is_some_and(|kind| kind == "Sequence") => {
            one.get("pretokenizers").and_then(Json::as_array).cloned().unwrap_or_default()
        }
        Json::Null => Vec::new(),
        one => vec![one.clone()],
    };
    let parts: Vec<&Map<String, Json>> = parts.iter().filter_map(Json::as_object).collect();
    let truth = |part: &Map<String, Json>, key: &str| part.get(key).and_then(Json::as_bool);
    for part in &parts {
        let spaced = truth(part, "add_prefix_space") == Some(true);
        let digits = truth(part, "individual_digits") == Some(false);
        let removes = part.get("behavior").is_some_and(|found| found != "Isolated");
        if spaced || digits || removes || truth(part, "invert") == Some(true) {
            return Err(format!(
                "it splits texts by {}, which llama.cpp has no name for",
                Json::from((*part).clone())
            ));
        }
    }
    let is = |part: &Map<String, Json>, kind: &str| part.get("type").is_some_and(|found| found == kind);
    let words = |part: &Map<String, Json>| part.get("use_regex").is_none_or(|found| found == true);
    let expression =
        |part: &Map<String, Json>| part.get("pattern")?.get("Regex")?.as_str().map(str::to_owned);
    let unmerged = json["model"]["merges"].as_array().is_none_or(Vec::is_empty);
    match parts.as_slice() {
        [level] if is(level, "ByteLevel") && (words(level) || unmerged) => Ok("gpt-2"),
        [digits, level] if is(digits, "Digits") && is(level, "ByteLevel") && words(level) => Ok("smollm"),
        [split, level] if is(split, "Split") && is(level, "ByteLevel") && !words(level) => {
            let found = expression(split).unwrap_or_default();
            let known = SPLITS.iter().find(|(expression, _)| *expression == found);
            known
                .map(|(_, name)| *name)
                .ok_or_else(|| format!("it splits texts by `{found}`, which llama.cpp has no name for"))
        }
        _ => {
            let kinds: Vec<String> =
                parts.iter().filter_map(|part| part.get("type")).map(Json::to_string).collect();
            Err(format!("it splits texts by {}, which llama.cpp has no name for", kinds.join(" and ")))
        }
    }
}

/// Returns whether SentencePiece's tokenizer adds a space before a text.
fn prefixes(json: &Json) -> bool {
    let normalizer = &json["normalizer"];
    let prepends = |one: &Json| one["type"] == "Prepend";
    let normalizes = prepends(normalizer)
        || normalizer["normalizers"].as_array().is_some_and(|all| all.iter().any(prepends));
    let metaspace = &json["pre_tokenizer"];
    let scheme = metaspace["prepend_scheme"].as_str();
    let adds = scheme.map_or(metaspace["add_prefix_space"] == true, |scheme| scheme != "never");
    normalizes || metaspace["type"] == "Metaspace" && adds
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_of_the_form_of_special_ones_are_special() {
        for token in ["<|im_end|>", "<\u{ff5c}User\u{ff5c}>", "<unused7>", "<mask>"] {
            assert!(looks_special(token), "{token}");
        }
        for token in ["<think>", "<|im_end", "unused7>", "pad"] {
            assert!(!looks_special(token), "{token}");
        }
    }

    #[test]
    fn splits_are_known_by_their_names() {
        let level = |words: bool| json!({"type": "ByteLevel", "use_regex": words});
        let of = |pre: Json| split(&json!({"pre_tokenizer": pre, "model": {"merges": ["a b"]}}));
        let sequence = |parts: Json| json!({"type": "Sequence", "pretokenizers": parts});
        let regex = |text: &str| json!({"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated"});
        assert_eq!(of(level(true)), Ok("gpt-2"));
        for (expression, name) in SPLITS {
            assert_eq!(of(sequence(json!([regex(expression), level(false)]))), Ok(name));
        }
        assert_eq!(
            of(sequence(json!([{"type": "Digits", "individual_digits": true}, level(true)]))),
            Ok("smollm")
        );
        assert!(of(sequence(json!([regex("x+"), level(false)]))).unwrap_err().contains("`x+`"));
        assert!(of(json!({"type": "Whitespace"})).unwrap_err().contains("\"Whitespace\""));
        assert_eq!(split(&json!({"pre_tokenizer": level(false), "model": {"merges": []}})), Ok("gpt-2"));
    }

    #[test]
    fn a_vocabulary_of_characters_has_scores_in_the_order_of_merges() {
        let json = json!({
            "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
                "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "a": 3, "b": 4, "ab": 5, "aba": 6},
                "merges": ["a b", ["ab", "a"]]},
            "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true},
                {"id": 8, "content": "\u{2581}x", "special": false}],
        });
        let vocabulary = Vocabulary::read(&json, 10).unwrap().unwrap();
        assert_eq!(vocabulary.tokens[7..], ["[PAD7]", " x", "[PAD9]"]);
        let kinds = [UNKNOWN, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, UNUSED, USER_DEFINED, UNUSED];
        assert_eq!(vocabulary.kinds, kinds);
        assert_eq!(vocabulary.scores(), [0.0, 0.0, 0.0, -2.0, -2.0, -0.0, -1.0, LEAST, LEAST, LEAST]);
        let error = Vocabulary::read(&json, 8).err().unwrap().to_string();
        assert!(error.contains("the id 8") && error.contains("8 ids"), "{error}");
        let unigram = json!({"model": {"type": "Unigram", "vocab": []}});
        assert_eq!(Vocabulary::read(&unigram, 8).unwrap().err().unwrap(), "its model is Unigram");
    }
}
