//! Conventions of a model's texts apart from the vocabulary: the end-of-text token and the chat template.

use super::chat::{ChatTemplate, DEFAULT};
use super::huggingface::{END_OF_TEXT, read};
use super::special::{CONFIG, Special};
use super::{Tokenizer, TokenizerError};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file with the chat template in newer directories.
const TEMPLATE: &str = "chat_template.jinja";
/// The folder with additional chat templates.
pub(super) const TEMPLATES: &str = "additional_chat_templates";

/// The end-of-text byte of the byte tokenizer; no text contains it.
const NUL: u32 = 0;

/// The special tokens and the chat template of a model.
#[derive(Clone, Debug, Default)]
pub struct Conventions {
    /// The start token, `bos_token`, if the tokenizer has one.
    pub start: Option<u32>,
    /// The padding token, `pad_token`, if the tokenizer has one.
    pub padding: Option<u32>,
    /// The end-of-text token.
    pub end: Option<u32>,
    /// The chat template.
    pub chat: Option<ChatTemplate>,
}

impl Conventions {
    /// The conventions of a tokenizer and of the directory that it was read from.
    ///
    /// The end-of-text token is the directory's `eos_token`, else `<|endoftext|>` if the vocabulary has it; for bytes
    /// it is byte 0. The templates are `chat_template.jinja` and those in `additional_chat_templates`, else the
    /// `chat_template` of `tokenizer_config.json`, which may be a list of named templates.
    ///
    /// # Errors
    /// A file that cannot be read or is not JSON, an invalid template, or an `eos_token` without an id.
    pub fn load(tokenizer: &Tokenizer, directory: Option<&Path>) -> Result<Self, TokenizerError> {
        let special = directory.map(Special::read).transpose()?.unwrap_or_default();
        let end = match (tokenizer, &special.end) {
            (Tokenizer::Bytes, _) => Some(NUL),
            (Tokenizer::Gpt2, _) => tokenizer.id(END_OF_TEXT),
            (Tokenizer::Missing(_), _) => None,
            (Tokenizer::HuggingFace(_), Some(end)) => Some(id_of(tokenizer, end, directory)?),
            (Tokenizer::HuggingFace(_), None) => {
                let of_class = special.named.get("eos_token").and_then(Value::as_str);
                of_class.and_then(|end| tokenizer.id(end)).or_else(|| tokenizer.id(END_OF_TEXT))
            }
        };
        let start = match tokenizer {
            Tokenizer::Gpt2 => tokenizer.id(END_OF_TEXT),
            _ => named(tokenizer, &special, "bos_token"),
        };
        let padding = named(tokenizer, &special, "pad_token");
        let chat = directory.map(|directory| template(directory, special)).transpose()?.flatten();
        Ok(Self { start, padding, end, chat })
    }
}

/// The id of the special token that a directory gives this name.
fn named(tokenizer: &Tokenizer, special: &Special, name: &str) -> Option<u32> {
    let token = special.named.get(name)?;
    tokenizer.id(token.as_str().or_else(|| token.get("content")?.as_str())?)
}

fn id_of(tokenizer: &Tokenizer, token: &str, directory: Option<&Path>) -> Result<u32, TokenizerError> {
    let unknown = || TokenizerError::UnknownEnd {
        path: directory.unwrap_or(Path::new("")).join(CONFIG),
        token: token.to_owned(),
    };
    tokenizer.id(token).ok_or_else(unknown)
}

/// The templates of a directory; files take precedence over the configuration.
fn template(directory: &Path, special: Special) -> Result<Option<ChatTemplate>, TokenizerError> {
    let (place, templates) = texts(directory, &special)?;
    let found = Some(templates).filter(|templates| !templates.is_empty());
    found.map(|templates| ChatTemplate::new(&place, templates, special.named)).transpose()
}

/// The texts of a directory's chat templates by their names.
///
/// # Errors
/// A file that cannot be read or is not JSON.
pub(crate) fn templates(directory: &Path) -> Result<BTreeMap<String, String>, TokenizerError> {
    Ok(texts(directory, &Special::read(directory)?)?.1)
}

/// The special tokens that a directory names, by their names in its configuration.
///
/// # Errors
/// A file that cannot be read or is not JSON.
pub(crate) fn special_tokens(directory: &Path) -> Result<Map<String, Value>, TokenizerError> {
    Ok(Special::read(directory)?.named)
}

/// The texts of the templates by their names, and the file that has the first one.
fn texts(directory: &Path, special: &Special) -> Result<(PathBuf, BTreeMap<String, String>), TokenizerError> {
    let file = directory.join(TEMPLATE);
    let mut templates = BTreeMap::new();
    for path in further(&directory.join(TEMPLATES))? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        templates.insert(name, read(&path)?);
    }
    if file.exists() {
        templates.insert(DEFAULT.to_owned(), read(&file)?);
    }
    let place = if templates.is_empty() { directory.join(CONFIG) } else { file };
    if templates.is_empty() {
        templates = in_configuration(special.config.get("chat_template"));
    }
    Ok((place, templates))
}

/// The `*.jinja` files of a folder, if it exists.
fn further(folder: &Path) -> Result<Vec<std::path::PathBuf>, TokenizerError> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let unread = |source| TokenizerError::Read { path: folder.to_owned(), source };
    let entries = std::fs::read_dir(folder).map_err(unread)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(unread));
    let paths = paths.collect::<Result<Vec<_>, _>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "jinja")).collect())
}

/// The templates in the configuration, by name.
fn in_configuration(template: Option<&Value>) -> BTreeMap<String, String> {
    match template {
        Some(Value::String(text)) => BTreeMap::from([(DEFAULT.to_owned(), text.clone())]),
        Some(Value::Array(several)) => {
            let text = |one: &Value, name| one.get(name).and_then(Value::as_str).map(str::to_owned);
            several.iter().filter_map(|one| Some((text(one, "name")?, text(one, "template")?))).collect()
        }
        _ => BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Chat;
    use super::*;
    use serde_json::json;
    use std::error::Error;
    use std::fs;
    use tempfile::TempDir;

    /// A directory with a tokenizer of a few letters and these additional files.
    fn directory(files: &[(&str, String)]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let vocab = json!({"a": 0, "b": 1, "<|endoftext|>": 2, "</s>": 3});
        fs::write(dir.path().join("vocab.json"), vocab.to_string()).unwrap();
        fs::write(dir.path().join("merges.txt"), "").unwrap();
        files.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
        dir
    }

    fn of(dir: &TempDir) -> Result<Conventions, TokenizerError> {
        let tokenizer = Tokenizer::from_dir(dir.path())?.unwrap();
        Conventions::load(&tokenizer, Some(dir.path()))
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
        assert_eq!(Conventions::load(&Tokenizer::Gpt2, None).unwrap().end, Some(50_256));
        assert_eq!(Conventions::load(&Tokenizer::Bytes, None).unwrap().end, Some(0));
        assert!(Conventions::load(&Tokenizer::Gpt2, None).unwrap().chat.is_none());
    }

    #[test]
    fn a_template_is_a_file_or_stands_in_the_configuration() {
        let rendered = |dir: &TempDir| {
            let chat = Chat { messages: &[], columns: &Map::new() };
            of(dir).unwrap().chat.map(|template| template.render(chat, &[]).unwrap().text)
        };
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
