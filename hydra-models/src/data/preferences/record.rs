//! Rows of preference data.

use crate::data::examples::{Fields, Tally, kind, messages};
use crate::objective::PreferenceLoss;
use serde_json::{Map, Value};

/// A prompt with its answers: a chosen and a rejected one, or one that is desirable or not.
#[derive(Clone, Debug, PartialEq)]
pub struct PreferenceRecord {
    pub(super) content: Content,
    /// Whether the only answer is desirable; `None` for two answers.
    pub(super) label: Option<bool>,
    /// By how much a reward model should prefer the chosen answer; zero by default.
    pub(super) margin: f32,
}

/// A prompt and answers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    /// Texts.
    Texts {
        /// The prompt; the answers follow it directly.
        prompt: String,
        answers: Vec<String>,
    },
    /// Messages of a conversation.
    Chat {
        prompt: Vec<Value>,
        answers: Vec<Vec<Value>>,
        /// Every other column of the row: `tools`, `chat_template_kwargs`, ...
        columns: Map<String, Value>,
    },
}

/// The fields with the answers of a pair.
const PAIR: &[&str] = &["chosen", "rejected"];
/// The field with the only answer.
const ONE: &[&str] = &["completion"];

impl PreferenceRecord {
    /// Reads the fields of a row and counts unused ones. Without a `prompt`, or with a text next to answers of messages,
    /// the prompt is what both answers start with, as in TRL.
    pub(super) fn from_fields(
        mut row: Fields,
        loss: Option<PreferenceLoss>,
        is_table: bool,
        tally: &mut Tally,
    ) -> Result<Self, String> {
        let is_one = loss == Some(PreferenceLoss::Kto) && (row.has("completion") || !row.has("chosen"));
        let names = if is_one { ONE } else { PAIR };
        let answers: Vec<Value> = names.iter().map(|name| row.required(name)).collect::<Result<_, _>>()?;
        if let [chosen, rejected] = &answers[..]
            && chosen == rejected
        {
            return Err("`chosen` and `rejected` are equal, which prefers nothing: remove the row".to_owned());
        }
        let label = is_one.then(|| label(&row.required("label")?)).transpose()?;
        // A reward model reads whole texts.
        let needs_prompt = loss.is_some();
        let margin = match loss.is_none() && row.has("margin") {
            true => margin(&row.required("margin")?, is_table)?,
            false => 0.0,
        };
        if needs_prompt && answers.iter().any(Value::is_string) && row.is_list("prompt") {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            return Err(format!(
                "`prompt` is a list of messages, but {} is text: write answers as lists of messages too, such as [{{\"role\": \
                 \"assistant\", \"content\": \"..\"}}]",
                names.join(" or ")
            ));
        }
        let content = if answers.iter().all(Value::is_string) {
            Content::texts(names, answers, row, needs_prompt, tally)?
        } else if answers.iter().all(Value::is_array) {
            Content::chat(names, answers, row, needs_prompt, tally)?
        } else {
            let found: Vec<&str> = answers.iter().map(kind).collect();
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            let (names, found) = (names.join(" and "), found.join(" and "));
            return Err(format!("{names} must be text or lists of messages, found {found}"));
        };
        Ok(Self { content, label, margin })
    }

    /// The record of one of the answers; the first is desirable.
    pub(super) fn alone(&self, answer: usize) -> Self {
        let content = match self.content.clone() {
            Content::Texts { prompt, answers } => {
                Content::Texts { prompt, answers: answers.into_iter().skip(answer).take(1).collect() }
            }
            Content::Chat { prompt, answers, columns } => {
                let answers = answers.into_iter().skip(answer).take(1).collect();
                Content::Chat { prompt, answers, columns }
            }
        };
        Self { content, label: Some(answer == 0), margin: 0.0 }
    }
}

impl Content {
    fn texts(
        names: &[&str],
        answers: Vec<Value>,
        mut row: Fields,
        needs_prompt: bool,
        tally: &mut Tally,
    ) -> Result<Self, String> {
        let text = |answer| if let Value::String(text) = answer { text } else { String::new() };
        let mut answers: Vec<String> = answers.into_iter().map(text).collect();
        let given = row.is_text("prompt");
        let prompt = match (given, &answers[..]) {
            (true, _) => row.text("prompt")?,
            (false, [one, other]) => {
                let common = one[..common_start(one, other)].to_owned();
                answers.iter_mut().for_each(|answer| drop(answer.drain(..common.len())));
                common
            }
            (false, _) => String::new(),
        };
        check(names, needs_prompt && prompt.is_empty(), given, answers.iter().map(String::is_empty))?;
        tally.unused(row.names());
        Ok(Self::Texts { prompt, answers })
    }

    fn chat(
        names: &[&str],
        answers: Vec<Value>,
        mut row: Fields,
        needs_prompt: bool,
        tally: &mut Tally,
    ) -> Result<Self, String> {
        let own = row.is_list("prompt").then(|| row.required("prompt")).transpose()?;
        let answers = names.iter().zip(answers).map(|(name, answer)| messages::read(answer, name, tally));
        let mut answers = answers.collect::<Result<Vec<_>, _>>()?;
        let prompt: Vec<Value> = match (own, &answers[..]) {
            (Some(prompt), _) => messages::read(prompt, "prompt", tally)?,
            (None, [one, other]) => {
                let common = one.iter().zip(other).take_while(|(one, other)| one == other).count();
                let prompt = one[..common].to_vec();
                answers.iter_mut().for_each(|answer| drop(answer.drain(..common)));
                prompt
            }
            (None, _) => Vec::new(),
        };
        if let Some(name) = ["weight", "train"]
            .into_iter()
            .find(|name| answers.iter().any(|answer| messages::any(answer, name)))
        {
            return Err(format!(
                "`{name}` is not supported in messages of preference data, whose losses cover whole answers: remove it"
            ));
        }
        // An empty list is no list of messages.
        check(names, needs_prompt && prompt.is_empty(), false, answers.iter().map(Vec::is_empty))?;
        // A prompt that is text has no place in a conversation.
        let unused = "prompt".to_owned();
        tally.unused(row.has("prompt").then_some(&unused).into_iter());
        let mut columns = row.rest();
        columns.shift_remove("prompt");
        Ok(Self::Chat { prompt, answers, columns })
    }
}

/// Whether an answer is desirable: also as 1 or 0, and as text, which all cells of a table are.
fn label(value: &Value) -> Result<bool, String> {
    let text = value.as_str().map(str::to_ascii_lowercase);
    match (value, value.as_f64(), text.as_deref()) {
        (Value::Bool(label), ..) => Ok(*label),
        (_, Some(1.0), _) | (.., Some("true" | "1")) => Ok(true),
        (_, Some(0.0), _) | (.., Some("false" | "0")) => Ok(false),
        _ => Err(format!("`label` must be true (desirable) or false, found {}", shown(value))),
    }
}

/// The margin of a pair.
fn margin(value: &Value, is_table: bool) -> Result<f32, String> {
    let of_cell = || value.as_str().filter(|_| is_table)?.trim().parse().ok();
    let number = value.as_f64().or_else(of_cell).map(|number| number as f32);
    number
        .filter(|number| number.is_finite())
        .ok_or_else(|| format!("`margin` must be a finite number, found {}", shown(value)))
}

/// Describes a value for messages.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => format!("`{text}`"),
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}

/// The length of the text that both start with, as TRL takes it for the prompt: without a space at its end, which belongs
/// to the answers.
fn common_start(one: &str, other: &str) -> usize {
    let mut pairs = one.char_indices().zip(other.chars());
    let differs = pairs.find(|((_, one), other)| one != other).map(|((at, _), _)| at);
    let common = differs.unwrap_or_else(|| one.len().min(other.len()));
    common - usize::from(one[..common].ends_with(' '))
}

/// Refuses a missing prompt, and answers that are empty.
fn check(
    names: &[&str],
    lacks_prompt: bool,
    given: bool,
    are_empty: impl Iterator<Item = bool>,
) -> Result<(), String> {
    let example = "add it, or map another column to it, for example --columns prompt=question";
    match (lacks_prompt, given, names) {
        (true, true, _) => return Err("`prompt` is empty: fill it in, or remove the row".to_owned()),
        (true, false, [one, other]) => {
            return Err(format!(
                "the row has no `prompt` of the form of its answers, and `{one}` and `{other}` do not start with a common one: \
                 {example}"
            ));
        }
        (true, false, _) => return Err(format!("the row has no `prompt`: {example}")),
        (false, ..) => {}
    }
    match names.iter().zip(are_empty).find(|(_, is_empty)| *is_empty) {
        Some((name, _)) => {
            Err(format!("`{name}` has no answer after the prompt: fill it in, or remove the row"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const DPO: Option<PreferenceLoss> = Some(PreferenceLoss::Dpo);
    const KTO: Option<PreferenceLoss> = Some(PreferenceLoss::Kto);

    fn read(row: Value, loss: Option<PreferenceLoss>) -> Result<(PreferenceRecord, Tally), String> {
        let Value::Object(row) = row else { panic!("a row is an object") };
        let mut tally = Tally::default();
        let record = PreferenceRecord::from_fields(Fields::new(row, &[]), loss, false, &mut tally)?;
        Ok((record, tally))
    }

    fn texts(prompt: &str, answers: &[&str], label: Option<bool>) -> PreferenceRecord {
        let answers = answers.iter().map(|answer| (*answer).to_owned()).collect();
        PreferenceRecord {
            content: Content::Texts { prompt: prompt.to_owned(), answers },
            label,
            margin: 0.0,
        }
    }

    #[test]
    fn a_row_has_a_prompt_or_answers_with_a_common_start() {
        let (record, tally) =
            read(json!({"prompt": "p ", "chosen": "c", "rejected": "r", "id": 1}), DPO).unwrap();
        assert_eq!((record, tally.unused), (texts("p ", &["c", "r"], None), [("id".to_owned(), 1)].into()));
        let implicit =
            read(json!({"chosen": "The sky is blue", "rejected": "The sky is gré"}), DPO).unwrap().0;
        assert_eq!(implicit, texts("The sky is", &[" blue", " gré"], None));
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let [user, yes, no] = [turn("user", "u"), turn("assistant", "y"), turn("assistant", "n")];
        let row = json!({"prompt": "u", "chosen": [user, yes], "rejected": [user, no], "tools": []});
        let (PreferenceRecord { content: Content::Chat { prompt, answers, columns }, .. }, tally) =
            read(row, DPO).unwrap()
        else {
            panic!("a conversation")
        };
        assert_eq!((prompt, answers), (vec![user.clone()], vec![vec![yes.clone()], vec![no.clone()]]));
        assert_eq!(columns.keys().collect::<Vec<_>>(), ["tools"]);
        assert_eq!(tally.unused, [("prompt".to_owned(), 1)].into());
        let row = json!({"prompt": [user], "chosen": [yes], "rejected": [no]});
        let content = read(row, DPO).unwrap().0.content;
        assert!(matches!(content, Content::Chat { prompt, .. } if prompt == [user]));
        let pair = |margin: Value| read(json!({"chosen": "a", "rejected": "b", "margin": margin}), None);
        let (record, tally) = pair(json!(0.5)).unwrap();
        assert!(record.margin == 0.5 && tally.unused.is_empty(), "{:?}", tally.unused);
        assert_eq!(pair(json!("much")).unwrap_err(), "`margin` must be a finite number, found `much`");
        let (record, tally) =
            read(json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1}), DPO).unwrap();
        assert_eq!(
            (record.margin, tally.unused),
            (0.0, [("margin".to_owned(), 1)].into()),
            "DPO has no margin"
        );
    }

    #[test]
    fn rows_that_prefer_nothing_are_refused() {
        for (row, part) in [
            (json!({"prompt": "p", "chosen": "a", "rejected": "a"}), "`chosen` and `rejected` are equal"),
            (json!({"prompt": "p", "chosen": "a"}), "the row has no `rejected`"),
            (json!({"chosen": "a", "rejected": "b"}), "do not start with a common one"),
            (json!({"prompt": "", "chosen": "a", "rejected": "b"}), "`prompt` is empty"),
            (json!({"prompt": "p", "chosen": "", "rejected": "b"}), "`chosen` has no answer"),
            (json!({"chosen": "ab", "rejected": "a"}), "`rejected` has no answer"),
            (
                json!({"prompt": "p", "chosen": "a", "rejected": ["b"]}),
                "must be text or lists of messages, found a string and a list",
            ),
            (json!({"prompt": "p", "chosen": 1, "rejected": 2}), "found a number and a number"),
            (
                json!({"prompt": [{"role": "user", "content": "u"}], "chosen": "a", "rejected": "b"}),
                "`prompt` is a list of messages, but `chosen` or `rejected` is text: write answers as lists",
            ),
            (json!({"prompt": "p", "chosen": ["a"], "rejected": ["b"]}), "message 1 of `chosen`"),
        ] {
            let error = read(row, DPO).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_rated_row_has_one_answer_and_pairs_have_two_such_rows() {
        let row = |label: Value| json!({"prompt": "p", "completion": "c", "label": label});
        assert_eq!(read(row(true.into()), KTO).unwrap().0, texts("p", &["c"], Some(true)));
        let pair = read(json!({"prompt": "p", "chosen": "c", "rejected": "r"}), KTO).unwrap().0;
        let alone = [pair.alone(0), pair.alone(1)];
        assert_eq!(alone, [texts("p", &["c"], Some(true)), texts("p", &["r"], Some(false))]);
        for (row, part) in [
            (row("yes".into()), "`label` must be true (desirable) or false, found `yes`"),
            (row(2.into()), "must be true (desirable) or false, found 2"),
            (json!({"prompt": "p", "completion": "c"}), "the row has no `label`"),
            (json!({"prompt": "p", "label": true}), "the row has no `completion`"),
            (json!({"completion": "c", "label": true}), "the row has no `prompt`: add it"),
        ] {
            let error = read(row, KTO).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let labels = [json!("True"), json!("0"), json!(1), json!(0.0)];
        assert_eq!(labels.map(|value| label(&value)), [Ok(true), Ok(false), Ok(true), Ok(false)]);
    }
}
