//! The messages of a conversation, also as ShareGPT names their fields and roles.

use super::record::{ASSISTANT, kind};
use super::tally::Tally;
use serde_json::{Map, Value};

/// The names of roles in a `from` of ShareGPT, and what they are called elsewhere.
const ROLES: [(&str, &str); 6] = [
    ("human", "user"),
    ("gpt", ASSISTANT),
    ("system", "system"),
    ("user", "user"),
    (ASSISTANT, ASSISTANT),
    ("tool", "tool"),
];

/// Reads the messages in the field of this name.
pub(super) fn read(value: Value, field: &str, tally: &mut Tally) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = value else {
        return Err(format!("{} as `{field}`, which is a list of messages", kind(&value)));
    };
    if messages.is_empty() {
        return Err(format!("no message in `{field}`"));
    }
    let wrong = |at: usize, found: String| format!("{found} in message {} of `{field}`", at + 1);
    let mut sharegpt = false;
    let messages = messages.into_iter().enumerate().map(|(at, message)| {
        let Value::Object(mut message) = message else { return Err(wrong(at, kind(&message).to_owned())) };
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
pub(super) fn any(messages: &[Value], name: &str) -> bool {
    messages.iter().any(|message| !message[name].is_null())
}

/// Renames `from` to `role` and `value` to `content`, as TRL does. Returns whether the role had another name.
fn rename(message: &mut Map<String, Value>) -> Result<bool, String> {
    if let Some(content) = message.shift_remove("value") {
        message.insert("content".to_owned(), content);
    }
    let Some(from) = message.shift_remove("from") else { return Ok(false) };
    let Value::String(from) = from else { return Err(format!("{} as `from`, which is text", kind(&from))) };
    let Some((name, role)) = ROLES.iter().find(|(name, _)| *name == from) else {
        let known = ROLES.map(|(name, _)| name).join(", ");
        return Err(format!("the role `{from}`, which is not one of {known} (rename it),"));
    };
    message.insert("role".to_owned(), Value::String((*role).to_owned()));
    Ok(name != role)
}

/// Refuses messages without a role, and those that ask for something else than to be learned or not.
fn check(message: &Map<String, Value>) -> Result<(), String> {
    let is_assistant = match message.get("role") {
        Some(Value::String(role)) => role == ASSISTANT,
        Some(other) => return Err(format!("{} as `role`, which is text,", kind(other))),
        None => {
            let names: Vec<String> = message.keys().take(6).map(|name| format!("`{name}`")).collect();
            return Err(format!("{} without `role`", names.join(", ")));
        }
    };
    let given = |name: &str| message.get(name).filter(|value| !value.is_null());
    let learned = match given("weight") {
        None => None,
        Some(weight) => match weight.as_f64() {
            Some(0.0) => Some(("weight", false)),
            Some(1.0) => Some(("weight", true)),
            _ => return Err(format!("`weight` {weight}, which is 0 (not learned) or 1 (learned),")),
        },
    };
    let trained = match given("train") {
        None => None,
        Some(Value::Bool(train)) => Some(("train", *train)),
        Some(train) => return Err(format!("`train` {train}, which is true or false,")),
    };
    if let Some((name, _)) =
        [learned, trained].into_iter().flatten().find(|(_, learned)| *learned && !is_assistant)
    {
        return Err(format!(
            "`{name}` asks to learn what the role {} says, and what the role `{ASSISTANT}` says is learned: leave it out",
            message["role"]
        ));
    }
    match given("train_detail").or(given("training_detail")) {
        Some(_) => Err("`train_detail`, which is not followed (leave it out, or give `train`),".to_owned()),
        None => Ok(()),
    }
}
