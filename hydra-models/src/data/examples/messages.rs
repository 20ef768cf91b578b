//! The messages of a conversation, including ShareGPT's names of fields and roles.

use super::record::{ASSISTANT, kind};
use super::tally::Tally;
use serde_json::{Map, Value};

/// ShareGPT's role names in `from`, and the usual names.
const ROLES: [(&str, &str); 6] = [
    ("human", "user"),
    ("gpt", ASSISTANT),
    ("system", "system"),
    ("user", "user"),
    (ASSISTANT, ASSISTANT),
    ("tool", "tool"),
];

/// Reads the messages in this field.
pub(in crate::data) fn read(value: Value, field: &str, tally: &mut Tally) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = value else {
        return Err(format!("`{field}` must be a list of messages, found {}", kind(&value)));
    };
    if messages.is_empty() {
        return Err(format!("`{field}` has no messages"));
    }
    let wrong = |at: usize, found: String| format!("message {} of `{field}`: {found}", at + 1);
    let mut sharegpt = false;
    let messages = messages.into_iter().enumerate().map(|(at, message)| {
        let Value::Object(mut message) = message else {
            return Err(wrong(at, format!("expected an object, found {}", kind(&message))));
        };
        sharegpt |= rename(&mut message).map_err(|found| wrong(at, found))?;
        check(&message).map_err(|found| wrong(at, found))?;
        Ok(Value::Object(message))
    });
    let messages: Vec<Value> = messages.collect::<Result<_, _>>()?;
    tally.sharegpt += usize::from(sharegpt);
    for name in ["weight", "train"] {
        if any(&messages, name) {
            tally.mask(&format!("messages[].{name}"));
        }
    }
    Ok(messages)
}

/// Returns whether any message has a field that is not null.
pub(in crate::data) fn any(messages: &[Value], name: &str) -> bool {
    messages.iter().any(|message| !message[name].is_null())
}

/// Renames `from` to `role` and `value` to `content`, as TRL does. Returns whether the role was renamed.
fn rename(message: &mut Map<String, Value>) -> Result<bool, String> {
    if let Some(content) = message.shift_remove("value") {
        put(message, ["content", "value"], content)?;
    }
    let from = message.shift_remove("from");
    let Some(from) = from.filter(|from| !from.is_null()) else { return Ok(false) };
    let Value::String(from) = from else { return Err(format!("`from` must be text, found {}", kind(&from))) };
    let Some((name, role)) = ROLES.iter().find(|(name, _)| *name == from) else {
        let known = ROLES.map(|(name, _)| name).join(", ");
        return Err(format!("unknown role `{from}` in `from`: expected one of {known}"));
    };
    if message.get("role").is_some_and(|found| *found == **name) {
        message.shift_remove("role");
    }
    put(message, ["role", "from"], Value::String((*role).to_owned()))?;
    Ok(name != role)
}

/// Inserts the value of the field `of` as `name`, unless that is there already. Rejects two different values.
fn put(message: &mut Map<String, Value>, [name, of]: [&str; 2], value: Value) -> Result<(), String> {
    match message.get(name).filter(|found| !found.is_null()) {
        Some(found) if value.is_null() || *found == value => Ok(()),
        Some(_) => Err(format!("`{name}` and `{of}` differ: remove one of them")),
        None => {
            message.insert(name.to_owned(), value);
            Ok(())
        }
    }
}

/// Rejects messages without a role, and unsupported requests about what to train on.
fn check(message: &Map<String, Value>) -> Result<(), String> {
    let is_assistant = match message.get("role") {
        Some(Value::String(role)) => role == ASSISTANT,
        Some(other) => return Err(format!("`role` must be text, found {}", kind(other))),
        None => {
            let names: Vec<String> = message.keys().take(6).map(|name| format!("`{name}`")).collect();
            return Err(format!("no `role` among the fields {}", names.join(", ")));
        }
    };
    let given = |name: &str| message.get(name).filter(|value| !value.is_null());
    let learned = match given("weight") {
        None => None,
        Some(weight) => match weight.as_f64() {
            Some(0.0) => Some(("weight", false)),
            Some(1.0) => Some(("weight", true)),
            _ => {
                return Err(format!("`weight` must be 0 (not trained on) or 1 (trained on), found {weight}"));
            }
        },
    };
    let trained = match given("train") {
        None => None,
        Some(Value::Bool(train)) => Some(("train", *train)),
        Some(train) => return Err(format!("`train` must be true or false, found {train}")),
    };
    if let Some((name, _)) =
        [learned, trained].into_iter().flatten().find(|(_, learned)| *learned && !is_assistant)
    {
        return Err(format!(
            "`{name}` requests training on the role {}, but only the role `{ASSISTANT}` is trained on: remove it",
            message["role"]
        ));
    }
    match given("train_detail").or(given("training_detail")) {
        Some(_) => Err("`train_detail` is not supported: remove it, or use `train`".to_owned()),
        None => Ok(()),
    }
}
