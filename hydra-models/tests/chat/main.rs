//! Conversations are encoded to the same text, ids and labels as by Transformers and TRL.
//!
//! The templates in this folder are short versions of well-known ones. The expected results are in `expected.json`,
//! which `reference.py` wrote. If `HYDRA_TRANSFORMERS` names a Python with `transformers` and `trl`, its results are
//! compared too, including those for TRL's own templates.

use hydra_models::data::{Content, Context, LossOn, Split, TokenForm, TokenSource};
use hydra_models::tokenizer::{Chat, Conventions, Tokenizer};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// The variable that names a Python.
const PYTHON: &str = "HYDRA_TRANSFORMERS";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chat")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn parse(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap()
}

/// A model's directory with this template.
struct Model {
    dir: TempDir,
    tokenizer: Tokenizer,
    conventions: Conventions,
}

impl Model {
    fn with(template: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(folder().join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        let config =
            json!({"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"});
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap().unwrap();
        let conventions = Conventions::load(&tokenizer, Some(dir.path())).unwrap();
        Self { dir, tokenizer, conventions }
    }

    fn text(&self, row: &Value) -> Result<String, Box<dyn Error>> {
        let mut columns = row.as_object().unwrap().clone();
        let messages = columns.remove("messages").unwrap();
        let chat = Chat { messages: messages.as_array().unwrap(), columns: &columns };
        Ok(self.conventions.chat.as_ref().unwrap().render(chat, &[])?.text)
    }

    /// The ids of a row and its loss mask.
    fn encode(&self, row: &Value) -> Result<(Vec<u32>, Vec<bool>), Box<dyn Error>> {
        let path = self.dir.path().join("row.jsonl");
        fs::write(&path, format!("{row}\n"))?;
        let form = TokenForm {
            tokenizer: &self.tokenizer,
            conventions: &self.conventions,
            context: Context::uniform(1 << 16),
            vocabulary: 1 << 16,
            loss_on: LossOn::Completions,
            pack: false,
        };
        let splits = TokenSource::load(path.to_str().unwrap(), &[])?.splits(&[Split::Train], &form)?;
        let data: &Arc<dyn Content> = &splits.splits[0];
        let batch = data.batch(&[0])?;
        let ids = batch.inputs.parts[0].as_i32().iter().map(|id| *id as u32).collect();
        Ok((ids, batch.targets.parts[0].as_i32().iter().map(|target| *target >= 0).collect()))
    }
}

fn checksum(ids: &[u32]) -> u64 {
    ids.iter().fold(0, |sum, id| (sum * 31 + u64::from(*id) + 1) % (1 << 32))
}

fn runs(learned: &[bool]) -> String {
    let is = |at: usize| learned.get(at).copied().unwrap_or(false);
    let starts = (0..learned.len()).filter(|&at| is(at) && (at == 0 || !is(at - 1)));
    let ends = (1..=learned.len()).filter(|&at| is(at - 1) && !is(at));
    starts.zip(ends).map(|(start, end)| format!("{start}-{end}")).collect::<Vec<_>>().join(" ")
}

/// The difference of a row's result from the expected one.
fn difference(model: &Model, row: &Value, expected: &Value) -> Option<String> {
    let text = match (model.text(row), expected["error"].as_str()) {
        (Err(_), Some(_)) => return None,
        (Err(error), None) => {
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            return Some(format!("{why}, expected {:?}", expected["text"]));
        }
        (Ok(text), Some(error)) => return Some(format!("{text:?}, expected {error}")),
        (Ok(text), None) => text,
    };
    if text != expected["text"] {
        return Some(format!("{text:?}, expected {:?}", expected["text"]));
    }
    let (ids, learned) = match model.encode(row) {
        Ok(encoded) => encoded,
        Err(_) if expected["learned"] == "" => return None,
        Err(error) => {
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            // An error that states this cause is accepted.
            return (!why.contains("of the role `tool`, inside")).then(|| format!("{error}: {why}"));
        }
    };
    if expected["ids"].as_u64() != Some(checksum(&ids)) {
        return Some(format!("other ids: {ids:?}"));
    }
    match expected["learned"].as_str() {
        Some(expected) if runs(&learned) != expected => Some(format!(
            "learned {}, expected {expected}, of {:?}",
            runs(&learned),
            model.tokenizer.decode(&ids)
        )),
        Some(_) => None,
        None => wrongly_learned(model, row, &text, &ids, &learned),
    }
}

/// What is wrong with the loss mask of several answers: it must cover every answer in the text and no user message.
fn wrongly_learned(model: &Model, row: &Value, text: &str, ids: &[u32], learned: &[bool]) -> Option<String> {
    let said: Vec<u32> =
        ids.iter().zip(learned).filter(|(_, learned)| **learned).map(|(id, _)| *id).collect();
    let said = model.tokenizer.decode(&said).unwrap();
    let wrong = |message: &Value| {
        let content = message["content"].as_str().unwrap_or_default();
        let content = content.split("</think>").last().unwrap_or_default().trim();
        let answer = message["role"] == "assistant";
        !content.is_empty() && text.contains(content) && answer != said.contains(content)
    };
    let wrong = row["messages"].as_array().unwrap().iter().find(|message| wrong(message));
    wrong.map(|message| format!("learned {said:?}, wrong of {message}, in {text:?}"))
}

/// The differences from the expected results for all conversations with these templates.
fn differences(templates: &Path, expected: &Map<String, Value>) -> Vec<String> {
    let conversations = parse(&read(&folder().join("conversations.json")));
    let mut wrong = Vec::new();
    for (name, expected) in expected {
        let model = Model::with(&read(&templates.join(format!("{name}.jinja"))));
        for (row, conversation) in &conversations {
            let found = difference(&model, conversation, &expected[row]);
            wrong.extend(found.map(|found| format!("{name} {row}: {found}")));
        }
    }
    wrong
}

fn check(wrong: &[String]) {
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn conversations_are_those_of_transformers() {
    let expected = parse(&read(&folder().join("expected.json")));
    assert!(expected.len() > 14);
    check(&differences(&folder().join("templates"), &expected));
}

/// Runs a program with the named Python, if any.
fn python(arguments: &[&str]) -> Option<String> {
    let Some(python) = std::env::var_os(PYTHON) else {
        println!("skipped: {PYTHON} names no Python with transformers and trl");
        return None;
    };
    let output = Command::new(python).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn conversations_are_those_of_an_installed_transformers() {
    let reference = folder().join("reference.py");
    let reference = reference.to_str().unwrap();
    let Some(here) = python(&[reference]) else { return };
    check(&differences(&folder().join("templates"), &parse(&here)));
    let place =
        python(&["-c", "import trl, pathlib; print(pathlib.Path(trl.__file__).parent / 'chat_templates')"]);
    let Some(place) = place else { return };
    let Some(there) = python(&[reference, place.trim()]) else { return };
    check(&differences(Path::new(place.trim()), &parse(&there)));
}
