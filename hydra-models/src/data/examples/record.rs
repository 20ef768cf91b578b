//! One line of instruction data.

use serde_json::{Map, Value};

/// What a line gives to learn from.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// `{"text": ..}`: all of it is learned.
    Text(String),
    /// `{"prompt": .., "completion": ..}`: the completion is learned.
    Completion {
        /// What is given.
        prompt: String,
        /// What the model is to say.
        completion: String,
    },
    /// `{"messages": [{"role": .., "content": ..}, ..]}`: the turns of the role `assistant` are learned.
    Chat(Conversation),
    /// `{"input_ids": [..]}`: tokens as they are, all of which are learned but those whose `labels` say -100.
    Tokens {
        /// The tokens.
        ids: Vec<u32>,
        /// Which of them are learned.
        learned: Vec<bool>,
    },
}

/// A conversation, and what its row has beside it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The turns, objects with a `role`; their other fields are for the template.
    pub messages: Vec<Value>,
    /// Every other column of the row, in the order of the file: `tools`, `chat_template_kwargs`, ...
    pub columns: Map<String, Value>,
}

/// The label of a token that is not learned, as Hugging Face's data has it.
const NOT_LEARNED: i64 = -100;

/// The role of a model in a conversation.
pub(super) const ASSISTANT: &str = "assistant";

impl Record {
    /// Reads a line.
    ///
    /// # Errors
    /// What is there in place of a record, in words that go on after "found".
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| format!("no JSON ({error})"))?;
        match value {
            Value::Object(object) => Self::of(&object),
            other => Err(format!("{}, no object", kind(&other))),
        }
    }

    /// Reads an object.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub(super) fn of(object: &Map<String, Value>) -> Result<Self, String> {
        if object.contains_key("messages") {
            return chat(object).map(Self::Chat);
        }
        if object.contains_key("completion") || object.contains_key("prompt") {
            let text = |name| text(object, name).map(str::to_owned);
            return Ok(Self::Completion { prompt: text("prompt")?, completion: text("completion")? });
        }
        if object.contains_key("input_ids") {
            return tokens(object);
        }
        match object.get("text") {
            Some(_) => text(object, "text").map(|text| Self::Text(text.to_owned())),
            None if object.is_empty() => Err("an object without fields".to_owned()),
            None => Err(format!("an object with {}", names(object))),
        }
    }
}

fn names(object: &Map<String, Value>) -> String {
    let names: Vec<String> = object.keys().take(6).map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A field that is text, and not empty.
fn text<'a>(object: &'a Map<String, Value>, name: &str) -> Result<&'a str, String> {
    match object.get(name) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("{} as `{name}`, which is text", kind(other))),
        None => Err(format!("an object with {} and without `{name}`", names(object))),
    }
}

/// Tokens, and their labels if there are any.
fn tokens(object: &Map<String, Value>) -> Result<Record, String> {
    let whole = |name: &str| -> Result<Vec<i64>, String> {
        let Value::Array(list) = &object[name] else {
            return Err(format!("{} as `{name}`, which is a list of whole numbers", kind(&object[name])));
        };
        let number = |value: &Value| {
            value
                .as_i64()
                .ok_or_else(|| format!("{} in `{name}`, which is a list of whole numbers", kind(value)))
        };
        list.iter().map(number).collect()
    };
    let ids = whole("input_ids")?;
    if ids.is_empty() {
        return Err("no token in `input_ids`".to_owned());
    }
    let labels = if object.contains_key("labels") { whole("labels")? } else { ids.clone() };
    if labels.len() != ids.len() {
        return Err(format!("{} `labels` for {} tokens", labels.len(), ids.len()));
    }
    if let Some(at) = (0..ids.len()).find(|&at| labels[at] != ids[at] && labels[at] != NOT_LEARNED) {
        let (label, id) = (labels[at], ids[at]);
        return Err(format!("the label {label} for token {id}, which is the token's own or {NOT_LEARNED}"));
    }
    let learned = labels.iter().map(|label| *label != NOT_LEARNED).collect();
    let id = |id: &i64| u32::try_from(*id).map_err(|_| format!("{id} in `input_ids`, which is no token"));
    Ok(Record::Tokens { ids: ids.iter().map(id).collect::<Result<_, _>>()?, learned })
}

fn chat(object: &Map<String, Value>) -> Result<Conversation, String> {
    let Some(Value::Array(messages)) = object.get("messages") else {
        return Err(format!("{} as `messages`, which is a list", kind(&object["messages"])));
    };
    for (at, message) in messages.iter().enumerate() {
        let wrong = |found: String| format!("{found} in message {} of `messages`", at + 1);
        let Value::Object(message) = message else { return Err(wrong(kind(message).to_owned())) };
        text(message, "role").map_err(wrong)?;
    }
    if !messages.iter().any(|message| message["role"] == ASSISTANT) {
        return Err("a conversation in which nobody has the role `assistant`".to_owned());
    }
    let columns = object.iter().filter(|(name, _)| *name != "messages");
    let columns = columns.map(|(name, value)| (name.clone(), value.clone())).collect();
    Ok(Conversation { messages: messages.clone(), columns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_is_one_of_four_kinds() {
        let parse = |value: Value| Record::parse(&value.to_string()).unwrap();
        assert_eq!(parse(json!({"text": "a", "id": 3})), Record::Text("a".to_owned()));
        let (prompt, completion) = ("p".to_owned(), "c".to_owned());
        assert_eq!(
            parse(json!({"prompt": "p", "completion": "c"})),
            Record::Completion { prompt, completion }
        );
        let messages =
            json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "x": 1}]);
        let (ids, learned) = (vec![3, 1], vec![false, true]);
        assert_eq!(
            parse(json!({"input_ids": [3, 1], "labels": [-100, 1]})),
            Record::Tokens { ids: ids.clone(), learned }
        );
        assert_eq!(parse(json!({"input_ids": [3, 1]})), Record::Tokens { ids, learned: vec![true, true] });
        let messages = messages.as_array().unwrap().clone();
        let columns = Map::from_iter([("tools".to_owned(), json!([]))]);
        assert_eq!(
            parse(json!({"messages": messages, "tools": []})),
            Record::Chat(Conversation { messages, columns })
        );
    }

    #[test]
    fn what_is_no_record_is_said() {
        for (line, found) in [
            ("{", "no JSON (EOF"),
            ("[1]", "a list, no object"),
            ("{}", "an object without fields"),
            (r#"{"id": 1, "answer": "a"}"#, "an object with `id`, `answer`"),
            (r#"{"prompt": "p"}"#, "an object with `prompt` and without `completion`"),
            (r#"{"prompt": 3, "completion": "c"}"#, "a number as `prompt`, which is text"),
            (r#"{"text": ["a"]}"#, "a list as `text`, which is text"),
            (r#"{"input_ids": "a"}"#, "a string as `input_ids`, which is a list of whole numbers"),
            (r#"{"input_ids": [1.5]}"#, "a number in `input_ids`, which is a list of whole numbers"),
            (r#"{"input_ids": []}"#, "no token in `input_ids`"),
            (r#"{"input_ids": [-1]}"#, "-1 in `input_ids`, which is no token"),
            (r#"{"input_ids": [1, 2], "labels": [1]}"#, "1 `labels` for 2 tokens"),
            (r#"{"input_ids": [1], "labels": [2]}"#, "the label 2 for token 1"),
            (r#"{"messages": "a"}"#, "a string as `messages`, which is a list"),
            (r#"{"messages": [{"role": "user"}, 3]}"#, "a number in message 2 of `messages`"),
            (r#"{"messages": [{"content": "a"}]}"#, "without `role` in message 1"),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "nobody has the role `assistant`"),
        ] {
            let error = Record::parse(line).unwrap_err();
            assert!(error.contains(found), "{error} for {line}");
        }
    }
}
