//! How a model's texts begin and end, and how conversations are written: what stands beside a tokenizer's vocabulary.

use super::chat::ChatTemplate;
use super::huggingface::{END_OF_TEXT, read};
use super::{Tokenizer, TokenizerError};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// The file that names special tokens.
const CONFIG: &str = "tokenizer_config.json";
/// The file in which newer directories keep their template.
const TEMPLATE: &str = "chat_template.jinja";

/// The byte that ends a text of bytes: no text has it.
const NUL: u32 = 0;

/// The conventions of a model's texts.
#[derive(Clone, Debug, Default)]
pub struct Conventions {
    /// The token that ends a text.
    pub end: Option<u32>,
    /// The way in which conversations become text.
    pub chat: Option<ChatTemplate>,
}

impl Conventions {
    /// Those of a tokenizer, and of the directory that it was read from.
    ///
    /// The end of a text is the `eos_token` of `tokenizer_config.json`, else `<|endoftext|>` where the vocabulary has it;
    /// of bytes it is the byte 0. The template is `chat_template.jinja`, else the `chat_template` of
    /// `tokenizer_config.json` (of several the one called `default`).
    ///
    /// # Errors
    /// A file that cannot be read or is no JSON, a template that is none, or an `eos_token` without an id.
    pub fn of(tokenizer: &Tokenizer, directory: Option<&Path>) -> Result<Self, TokenizerError> {
        let config = directory.map(Config::read).transpose()?.unwrap_or_default();
        let end = match (tokenizer, text_of(&config.eos_token)) {
            (Tokenizer::Bytes, _) => Some(NUL),
            (_, Some(end)) => Some(id_of(tokenizer, end, directory)?),
            (_, None) => tokenizer.id(END_OF_TEXT),
        };
        let chat = directory.map(|directory| config.template(directory)).transpose()?.flatten();
        Ok(Self { end, chat })
    }
}

fn id_of(tokenizer: &Tokenizer, token: &str, directory: Option<&Path>) -> Result<u32, TokenizerError> {
    let unknown = || TokenizerError::UnknownEnd {
        path: directory.unwrap_or(Path::new("")).join(CONFIG),
        token: token.to_owned(),
    };
    tokenizer.id(token).ok_or_else(unknown)
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    bos_token: Value,
    eos_token: Value,
    chat_template: Value,
}

/// The text of a special token, which is a string or an object around one.
fn text_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

impl Config {
    fn read(directory: &Path) -> Result<Self, TokenizerError> {
        let path = directory.join(CONFIG);
        if !path.exists() {
            return Ok(Self::default());
        }
        serde_json::from_str(&read(&path)?)
            .map_err(|source| TokenizerError::Parse { path, source: source.into() })
    }

    fn template(&self, directory: &Path) -> Result<Option<ChatTemplate>, TokenizerError> {
        let file = directory.join(TEMPLATE);
        let (path, text) = match file.exists() {
            true => (file.clone(), Some(read(&file)?)),
            false => (directory.join(CONFIG), self.own_template().map(str::to_owned)),
        };
        let known = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)];
        let known: Map<String, Value> =
            known.into_iter().map(|(name, token)| (name.to_owned(), text_of(token).into())).collect();
        text.map(|text| ChatTemplate::new(&path, text, known)).transpose()
    }

    /// The template, or of several the default one.
    fn own_template(&self) -> Option<&str> {
        let named = |template: &&Value| template["name"] == "default";
        let several = self.chat_template.as_array();
        let default = several.and_then(|several| several.iter().find(named)?.get("template"));
        default.unwrap_or(&self.chat_template).as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::error::Error;
    use std::fs;
    use tempfile::TempDir;

    /// A directory with a tokenizer of a few letters and these further files.
    fn directory(files: &[(&str, String)]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let vocab = json!({"a": 0, "b": 1, "<|endoftext|>": 2, "</s>": 3});
        fs::write(dir.path().join("vocab.json"), vocab.to_string()).unwrap();
        fs::write(dir.path().join("merges.txt"), "").unwrap();
        files.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
        dir
    }

    fn of(dir: &TempDir) -> Result<Conventions, TokenizerError> {
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap().unwrap();
        Conventions::of(&tokenizer, Some(dir.path()))
    }

    fn with_config(config: Value) -> TempDir {
        directory(&[(CONFIG, config.to_string())])
    }

    #[test]
    fn the_end_is_the_one_that_the_directory_names() {
        assert_eq!(of(&directory(&[])).unwrap().end, Some(2));
        assert_eq!(of(&with_config(json!({"eos_token": "</s>"}))).unwrap().end, Some(3));
        assert_eq!(of(&with_config(json!({"eos_token": {"content": "b"}}))).unwrap().end, Some(1));
        assert_eq!(of(&with_config(json!({"eos_token": null}))).unwrap().end, Some(2));
        let error = of(&with_config(json!({"eos_token": "<eos>"}))).unwrap_err().to_string();
        assert!(error.contains("`<eos>`") && error.contains(CONFIG), "{error}");
    }

    #[test]
    fn tokenizers_without_a_directory_have_ends_too() {
        assert_eq!(Conventions::of(&Tokenizer::Gpt2, None).unwrap().end, Some(50_256));
        assert_eq!(Conventions::of(&Tokenizer::Bytes, None).unwrap().end, Some(0));
        assert!(Conventions::of(&Tokenizer::Gpt2, None).unwrap().chat.is_none());
    }

    #[test]
    fn a_template_is_a_file_or_stands_in_the_configuration() {
        let rendered = |dir: &TempDir| of(dir).unwrap().chat.map(|chat| chat.render(&[], false).unwrap());
        assert_eq!(rendered(&directory(&[])), None);
        assert_eq!(rendered(&with_config(json!({"chat_template": "one"}))).as_deref(), Some("one"));
        let several = json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]);
        assert_eq!(rendered(&with_config(json!({"chat_template": several}))).as_deref(), Some("yes"));
        let config = json!({"chat_template": "older", "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        let both = directory(&[
            (CONFIG, config.to_string()),
            (TEMPLATE, "{{ bos_token }}newer{{ eos_token }}".to_owned()),
        ]);
        assert_eq!(rendered(&both).as_deref(), Some("<s>newer</s>"));
    }

    #[test]
    fn what_is_broken_is_named() {
        let error = of(&directory(&[(CONFIG, "{".to_owned())])).unwrap_err();
        assert!(error.to_string().contains(CONFIG), "{error}");
        let error = of(&directory(&[(TEMPLATE, "{% if %}".to_owned())])).unwrap_err();
        assert!(error.to_string().contains(TEMPLATE) && error.source().is_some(), "{error}");
    }
}
