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
    /// `{"messages": [{"role": .., "content": ..}, ..]}`: what the role `assistant` says is learned. Messages may have
    /// further fields, for the template.
    Chat(Vec<Value>),
}

/// The role of a model in a conversation.
pub(super) const ASSISTANT: &str = "assistant";

impl Record {
    /// Reads a line.
    ///
    /// # Errors
    /// What is there in place of a record, in words that go on after "found".
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| format!("no JSON ({error})"))?;
        let Value::Object(object) = value else { return Err(format!("{}, no object", kind(&value))) };
        if object.contains_key("messages") {
            return chat(&object).map(Self::Chat);
        }
        if object.contains_key("completion") || object.contains_key("prompt") {
            let text = |name| text(&object, name).map(str::to_owned);
            return Ok(Self::Completion { prompt: text("prompt")?, completion: text("completion")? });
        }
        match object.get("text") {
            Some(_) => text(&object, "text").map(|text| Self::Text(text.to_owned())),
            None if object.is_empty() => Err("an object without fields".to_owned()),
            None => Err(format!("an object with {}", names(&object))),
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

fn chat(object: &Map<String, Value>) -> Result<Vec<Value>, String> {
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
    Ok(messages.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_is_one_of_three_kinds() {
        let parse = |value: Value| Record::parse(&value.to_string()).unwrap();
        assert_eq!(parse(json!({"text": "a", "id": 3})), Record::Text("a".to_owned()));
        let (prompt, completion) = ("p".to_owned(), "c".to_owned());
        assert_eq!(
            parse(json!({"prompt": "p", "completion": "c"})),
            Record::Completion { prompt, completion }
        );
        let messages =
            json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "x": 1}]);
        assert_eq!(parse(json!({"messages": messages})), Record::Chat(messages.as_array().unwrap().clone()));
    }

    #[test]
    fn what_is_no_record_is_said() {
        for (line, found) in [
            ("{", "no JSON (EOF"),
            ("[1]", "a list, no object"),
            ("{}", "an object without fields"),
            (r#"{"id": 1, "answer": "a"}"#, "an object with `answer`, `id`"),
            (r#"{"prompt": "p"}"#, "an object with `prompt` and without `completion`"),
            (r#"{"prompt": 3, "completion": "c"}"#, "a number as `prompt`, which is text"),
            (r#"{"text": ["a"]}"#, "a list as `text`, which is text"),
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
