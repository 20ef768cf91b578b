//! Rows of instruction data.

use super::columns::{self, Column, LEARNED};
use super::tally::Tally;
use super::{messages, tokens};
use serde_json::{Map, Value};

/// The training data of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// `{"text": ..}`: the loss covers all of it.
    Text(String),
    /// `{"prompt": .., "completion": ..}`: the loss covers the completion.
    Completion {
        /// The prompt.
        prompt: String,
        /// The response.
        completion: String,
    },
    /// `{"messages": [{"role": .., "content": ..}, ..]}`: the loss covers the turns of the role `assistant`. Or a
    /// prompt and a completion that are such lists: the loss covers the completion.
    Chat(Conversation),
    /// `{"input_ids": [..]}`: tokens as given; the loss covers all except those that `labels` or a mask excludes.
    Tokens {
        /// The tokens.
        ids: Vec<u32>,
        /// The loss mask.
        learned: Vec<bool>,
    },
}

/// A conversation, and the other columns of its row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The turns: objects with a `role`; other fields are passed to the template.
    pub messages: Vec<Value>,
    /// Every other column of the row, in the order of the file: `tools`, `chat_template_kwargs`, ...
    pub columns: Map<String, Value>,
    /// The number of leading messages that form the prompt, in a row with `prompt` and `completion`: the loss covers
    /// every later message, regardless of its role.
    pub prompt: Option<usize>,
}

/// The role of the model in a conversation.
pub(super) const ASSISTANT: &str = "assistant";

impl Conversation {
    /// Returns whether the loss covers this message in a row with `messages`: the role is `assistant`, and neither
    /// `weight` is 0 nor `train` is false.
    pub fn learns(&self, message: usize) -> bool {
        let message = &self.messages[message];
        let weighs = message["weight"].as_f64() != Some(0.0) && message["train"] != Value::Bool(false);
        message["role"] == ASSISTANT && weighs
    }
}

/// Why a row is not a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// None of its fields is trained on.
    Unknown {
        /// The names of its fields.
        found: Vec<String>,
        /// A suggested `--columns` value.
        example: String,
    },
    /// Another error.
    Wrong(String),
}

impl From<String> for Refusal {
    fn from(found: String) -> Self {
        Self::Wrong(found)
    }
}

/// The published prompt template of Stanford's Alpaca (`train.py` of tatsu-lab/stanford_alpaca).
const ALPACA: &str = "Below is an instruction that describes a task. Write a response that appropriately completes the \
                      request.\n\n### Instruction:\n{instruction}\n\n### Response:";
const ALPACA_WITH_INPUT: &str = "Below is an instruction that describes a task, paired with an input that provides further \
                                 context. Write a response that appropriately completes the request.\n\n### \
                                 Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:";

/// A row whose fields are taken one by one. Fields that remain are unused.
pub(in crate::data) struct Fields {
    fields: Map<String, Value>,
    /// The names of null fields.
    nulls: Vec<String>,
    /// Fields that `--columns` names and that decide the kind of the row; empty if the row decides.
    named: Vec<&'static str>,
}

impl Fields {
    pub(in crate::data) fn new(mut fields: Map<String, Value>, columns: &[Column]) -> Self {
        let nulls =
            fields.iter().filter(|(_, value)| value.is_null()).map(|(name, _)| name.clone()).collect();
        fields.retain(|_, value| !value.is_null());
        Self { fields, nulls, named: columns::decisive(columns) }
    }

    /// Returns whether the row has this field and it is not null.
    pub(in crate::data) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Returns whether the row has this field and it is null.
    pub(in crate::data) fn is_null(&self, name: &str) -> bool {
        self.nulls.iter().any(|null| null == name)
    }

    /// Returns whether the row has this field and it is a text.
    pub(in crate::data) fn is_text(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(Value::is_string)
    }

    /// Returns whether the row has this field and it is a list.
    pub(in crate::data) fn is_list(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(Value::is_array)
    }

    /// The names of the remaining fields.
    pub(in crate::data) fn names(&self) -> impl Iterator<Item = &String> {
        self.fields.keys()
    }

    /// The error of a row whose kind no field decides.
    fn undecided(&self) -> Refusal {
        let null = self.nulls.iter().find(|null| LEARNED.contains(&null.as_str()));
        match null {
            Some(null) => Refusal::Wrong(is_null(null)),
            None => {
                let found = self.fields.keys().chain(&self.nulls).cloned().collect();
                Refusal::Unknown { found, example: example(&self.fields) }
            }
        }
    }

    /// Returns whether a field may decide the kind of the row.
    fn decides(&self, name: &str) -> bool {
        self.has(name) && (self.named.is_empty() || self.named.contains(&name))
    }

    /// Takes an optional field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.shift_remove(name)
    }

    /// Takes a required field.
    pub(in crate::data) fn required(&mut self, name: &str) -> Result<Value, String> {
        self.take(name).ok_or_else(|| match self.is_null(name) {
            true => is_null(name),
            false => {
                let names = self.fields.keys().chain(&self.nulls).map(|name| format!("`{name}`"));
                let names: Vec<String> = names.take(6).collect();
                format!(
                    "the row has no `{name}`{}: add it, or map another column to it, for example --columns {}",
                    if names.is_empty() { String::new() } else { format!(", but {}", names.join(", ")) },
                    columns_for(name, &self.fields)
                )
            }
        })
    }

    /// Takes a required text field.
    pub(in crate::data) fn text(&mut self, name: &str) -> Result<String, String> {
        match self.required(name)? {
            Value::String(text) => Ok(text),
            other => Err(format!("`{name}` must be text, found {}", kind(&other))),
        }
    }

    /// Takes the answer of a row, and counts an empty one. In tables, empty cells are null.
    fn answer(&mut self, name: &str, tally: &mut Tally) -> Result<String, String> {
        let text = self.text(name)?;
        tally.empty += usize::from(text.is_empty());
        Ok(text)
    }

    /// Takes all remaining fields.
    pub(in crate::data) fn rest(self) -> Map<String, Value> {
        self.fields
    }
}

impl Record {
    /// Reads the fields of a row and counts unused ones.
    ///
    /// The order of kinds follows TRL: tokens, else a prompt and a completion, else messages, else text; and else
    /// Alpaca's fields, which TRL does not support.
    pub(super) fn from_fields(mut row: Fields, tally: &mut Tally) -> Result<Self, Refusal> {
        refuse_preferences(&row)?;
        let chats = ["messages", "conversations"].into_iter().find(|name| row.decides(name));
        let record = if row.decides("input_ids") {
            tokens::read(&mut row, tally)?
        } else if row.decides("completion")
            || row.decides("prompt") && chats.is_none() && !row.decides("text")
        {
            return Self::completion(row, tally);
        } else if let Some(name) = chats {
            let messages = messages::read(row.required(name)?, name, tally)?;
            return Ok(Self::Chat(Conversation { messages, columns: row.rest(), prompt: None }));
        } else if row.decides("text") {
            Self::Text(row.text("text")?)
        } else if row.decides("instruction") || row.named.contains(&"output") {
            alpaca(&mut row, tally)?
        } else {
            return Err(row.undecided());
        };
        tally.unused(row.names());
        Ok(record)
    }

    /// Reads a prompt and a completion, both texts or both messages.
    fn completion(mut row: Fields, tally: &mut Tally) -> Result<Self, Refusal> {
        if !row.fields.get("prompt").or(row.fields.get("completion")).is_some_and(Value::is_array) {
            let (prompt, completion) = (row.text("prompt")?, row.answer("completion", tally)?);
            tally.unused(row.names());
            return Ok(Self::Completion { prompt, completion });
        }
        let mut messages = messages::read(row.required("prompt")?, "prompt", tally)?;
        let prompt = Some(messages.len());
        messages.extend(messages::read(row.required("completion")?, "completion", tally)?);
        if let Some(name) = ["weight", "train"].into_iter().find(|name| messages::any(&messages, name)) {
            return Err(format!("`{name}` is not supported in messages of a row with `prompt` and `completion`, whose loss covers the completion: use `messages` instead").into());
        }
        Ok(Self::Chat(Conversation { messages, columns: row.rest(), prompt }))
    }
}

/// Rejects preference data.
fn refuse_preferences(row: &Fields) -> Result<(), Refusal> {
    if !row.named.is_empty() {
        return Ok(());
    }
    if row.has("chosen") && row.has("rejected") {
        let field = match (row.has("prompt"), row.is_list("chosen")) {
            (true, chosen) if chosen == row.is_list("prompt") => "completion",
            (_, true) => "messages",
            (_, false) => "text",
        };
        return Err(format!(
            "the row is preference data (`chosen` and `rejected`): train on it with --task preference or --task reward; or on \
             the chosen responses only, with --columns {field}=chosen"
        )
        .into());
    }
    let labelled = row.fields.get("label").is_some_and(Value::is_boolean);
    if labelled && row.has("prompt") && row.has("completion") {
        return Err(
            "the row is preference data (`prompt`, `completion` and `label`): train on it with --task preference --loss kto; or on \
             all completions regardless of their label, with --columns completion=completion"
                .to_owned()
                .into(),
        );
    }
    Ok(())
}

/// Renders an instruction with Alpaca's template.
fn alpaca(row: &mut Fields, tally: &mut Tally) -> Result<Record, String> {
    let (instruction, completion) = (row.text("instruction")?, row.answer("output", tally)?);
    let input = match row.take("input") {
        None => String::new(),
        Some(Value::String(input)) => input,
        Some(other) => return Err(format!("`input` must be text, found {}", kind(&other))),
    };
    let template = if input.is_empty() { ALPACA } else { ALPACA_WITH_INPUT };
    let (before, after) = template.split_once("{instruction}").expect("the template has an instruction");
    let prompt = format!("{before}{instruction}{}", after.replace("{input}", &input));
    tally.alpaca += 1;
    Ok(Record::Completion { prompt, completion })
}

/// A `--columns` value that adds a missing field.
fn columns_for(field: &str, fields: &Map<String, Value>) -> String {
    /// Names of the two texts of a row in published data.
    const PAIRS: [(&str, &str); 5] = [
        ("sentence1", "sentence2"),
        ("premise", "hypothesis"),
        ("question", "sentence"),
        ("question1", "question2"),
        ("text1", "text2"),
    ];
    let pair = PAIRS.iter().find(|(one, other)| fields.contains_key(*one) && fields.contains_key(*other));
    match pair.filter(|_| field == "text") {
        Some((one, other)) => format!("text={one},text_pair={other}"),
        None => columns::quoted(field, match_for(field, fields).unwrap_or("COLUMN")),
    }
}

/// A column whose name suggests this field: a text, unless the field is a label.
fn match_for<'a>(field: &str, fields: &'a Map<String, Value>) -> Option<&'a str> {
    const PROMPTS: &[&str] = &["question", "query", "instruction", "input", "source", "problem", "prompt"];
    const COMPLETIONS: &[&str] =
        &["answer", "response", "output", "completion", "target", "solution", "reply", "summary"];
    const TEXTS: &[&str] =
        &["sentence", "review", "content", "body", "tweet", "comment", "document", "title"];
    const LABELS: &[&str] = &[
        "class",
        "category",
        "sentiment",
        "score",
        "rating",
        "stars",
        "target",
        "intent",
        "emotion",
        "answer",
    ];
    let names = match field {
        "prompt" | "instruction" => PROMPTS,
        "completion" | "output" => COMPLETIONS,
        "text" => TEXTS,
        "label" | "labels" => LABELS,
        _ => &[],
    };
    let is_text = |name: &&&str| fields.get(**name).is_some_and(|value| names == LABELS || value.is_string());
    names.iter().find(is_text).and_then(|name| fields.get_key_value(*name)).map(|(name, _)| name.as_str())
}

/// Suggests a `--columns` value for a row with other fields.
fn example(fields: &Map<String, Value>) -> String {
    let first =
        |is: fn(&Value) -> bool| fields.iter().find(|(_, value)| is(value)).map(|(name, _)| name.as_str());
    let list_of_objects =
        |value: &Value| value.as_array().is_some_and(|list| list.iter().any(Value::is_object));
    let columns = match (match_for("prompt", fields), match_for("completion", fields)) {
        (Some(prompt), Some(completion)) => {
            format!("{},{}", columns::quoted("prompt", prompt), columns::quoted("completion", completion))
        }
        _ => match (first(list_of_objects), first(is_words)) {
            (Some(messages), _) => columns::quoted("messages", messages),
            (None, text) => columns::quoted("text", text.unwrap_or("COLUMN")),
        },
    };
    format!("--columns {columns}")
}

/// Returns whether a value is text other than a number, which tables store as text.
fn is_words(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.trim().parse::<f64>().is_err())
}

fn is_null(name: &str) -> String {
    format!("`{name}` is null or empty: fill it in, or remove the row")
}

pub(in crate::data) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::super::tally::Counts;
    use super::*;
    use serde_json::json;

    fn read(row: Value, columns: &[&str]) -> Result<(Record, Tally), Refusal> {
        let columns: Vec<Column> = columns.iter().map(|column| column.parse().unwrap()).collect();
        let Value::Object(row) = row else { panic!("a row is an object") };
        let mut tally = Tally::default();
        let fields = Fields::new(columns::rename(&columns, row), &columns);
        Record::from_fields(fields, &mut tally).map(|record| (record, tally))
    }

    fn record(row: Value) -> Record {
        read(row, &[]).unwrap().0
    }

    fn unused(row: Value, columns: &[&str]) -> String {
        let unused: Counts = read(row, columns).unwrap().1.unused;
        unused.into_keys().collect::<Vec<_>>().join(" ")
    }

    fn completion(prompt: &str, completion: &str) -> Record {
        Record::Completion { prompt: prompt.to_owned(), completion: completion.to_owned() }
    }

    fn tokens(ids: &[u32], learned: &[u8]) -> Record {
        Record::Tokens { ids: ids.to_vec(), learned: learned.iter().map(|learned| *learned == 1).collect() }
    }

    #[test]
    fn a_row_is_one_of_several_kinds() {
        assert_eq!(record(json!({"text": "a", "id": 3})), Record::Text("a".to_owned()));
        assert_eq!(record(json!({"prompt": "", "completion": "c"})), completion("", "c"));
        let (empty, tally) = read(json!({"prompt": "p", "completion": ""}), &[]).unwrap();
        assert_eq!((empty, tally.empty), (completion("p", ""), 1));
        assert_eq!(read(json!({"instruction": "i", "output": ""}), &[]).unwrap().1.empty, 1);
        let messages =
            json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "x": 1}]);
        let chat = Record::Chat(Conversation {
            messages: messages.as_array().unwrap().clone(),
            columns: Map::from_iter([("tools".to_owned(), json!([])), ("id".to_owned(), json!(1))]),
            prompt: None,
        });
        assert_eq!(record(json!({"messages": messages, "tools": [], "none": null, "id": 1})), chat);
        let sharegpt = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "x": 1}]);
        let Record::Chat(read) = record(json!({"conversations": sharegpt})) else { panic!("no chat") };
        assert_eq!(Value::Array(read.messages), messages);
        let both = json!([{"role": "user", "from": "human", "content": "q", "value": "q"},
            {"role": "assistant", "from": null, "content": "a", "value": null, "x": 1}]);
        let Record::Chat(read) = record(json!({"messages": both})) else { panic!("no chat") };
        assert_eq!(Value::Array(read.messages), messages, "what is null or equal");
        let twice =
            json!([{"role": "human", "from": "human", "value": "q"}, {"from": "gpt", "value": "a", "x": 1}]);
        let Record::Chat(read) = record(json!({"messages": twice})) else { panic!("no chat") };
        assert_eq!(Value::Array(read.messages), messages, "a role by its other name");
        let parts = json!({"prompt": [messages[0]], "completion": [messages[1]], "tools": [], "id": 1});
        let Record::Chat(read) = record(parts) else { panic!("no chat") };
        assert_eq!((Value::Array(read.messages), read.prompt), (messages, Some(1)));
    }

    #[test]
    fn kinds_are_chosen_as_trl_does_and_the_rest_is_unused() {
        for (row, columns, expected) in [
            (json!({"text": "a", "label": 1, "none": null}), &[][..], "label"),
            (json!({"input_ids": [1], "text": "a", "length": 1}), &[], "length text"),
            (json!({"prompt": "p", "completion": "c", "messages": [], "text": "a"}), &[], "messages text"),
            (json!({"prompt": "p", "text": "a"}), &[], "prompt"),
            (json!({"text": "a", "instruction": "i", "output": "o"}), &[], "instruction output"),
            (json!({"text": "a", "instruction": "i", "output": "o"}), &["output=output"], "text"),
            (
                json!({"question": "q", "answer": "a", "id": 1}),
                &["prompt=question", "completion=answer"],
                "id",
            ),
            (json!({"text": "t", "body": "b"}), &["text=body"], "column text"),
            (json!({"prompt": "p", "chosen": "c", "rejected": "r"}), &["completion=chosen"], "rejected"),
            (json!({"input_ids": [1], "labels": [1], "completion_mask": [0]}), &[], "completion_mask"),
        ] {
            assert_eq!(unused(row.clone(), columns), expected, "{row}");
        }
        // Tables have a column for each field of any row.
        assert_eq!(record(json!({"messages": null, "text": "a"})), Record::Text("a".to_owned()));
    }

    #[test]
    fn instructions_are_written_as_alpaca_published_it() {
        let (written, tally) =
            read(json!({"instruction": "Add {input}.", "input": "", "output": "o"}), &[]).unwrap();
        assert_eq!(
            written,
            completion(
                "Below is an instruction that describes a task. Write a response that appropriately completes the \
                 request.\n\n### Instruction:\nAdd {input}.\n\n### Response:",
                "o"
            )
        );
        assert_eq!((tally.alpaca, tally.unused.len()), (1, 0));
        let Record::Completion { prompt, .. } =
            record(json!({"instruction": "Add.", "input": "1, 2", "output": "3"}))
        else {
            panic!("no completion")
        };
        assert!(prompt.starts_with(
            "Below is an instruction that describes a task, paired with an input that provides "
        ));
        assert!(prompt.ends_with("### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:"), "{prompt}");
    }

    #[test]
    fn masks_say_what_is_learned_and_padding_is_left_out() {
        for (row, expected) in [
            (json!({"input_ids": [3, 1]}), tokens(&[3, 1], &[1, 1])),
            (json!({"input_ids": [3, 1], "labels": [-100, 1]}), tokens(&[3, 1], &[0, 1])),
            (json!({"input_ids": [3, 1], "completion_mask": [0, 1]}), tokens(&[3, 1], &[0, 1])),
            (
                json!({"input_ids": [3, 1, 2], "completion_mask": [false, true, true], "assistant_masks": [1, 1, 0]}),
                tokens(&[3, 1, 2], &[0, 1, 0]),
            ),
            (json!({"input_ids": [3, 1, 9], "attention_mask": [1, 1, 0]}), tokens(&[3, 1], &[1, 1])),
            (
                json!({"input_ids": [9, 9, 3, 1], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, 3, 1],
                       "position_ids": [1, 1, 0, 1]}),
                tokens(&[3, 1], &[1, 1]),
            ),
            (json!({"input_ids": [9], "attention_mask": [0]}), tokens(&[], &[])),
        ] {
            assert_eq!(record(row.clone()), expected, "{row}");
        }
    }

    #[test]
    fn weights_say_which_messages_are_learned() {
        let messages = json!([
            {"role": "user", "content": "q", "weight": 0},
            {"role": "assistant", "content": "a", "weight": 0},
            {"role": "assistant", "content": "b", "weight": 1.0},
            {"role": "assistant", "content": "c", "train": false},
            {"role": "assistant", "content": "d", "train": true, "weight": null},
        ]);
        let (read, tally) = read(json!({"messages": messages}), &[]).unwrap();
        let Record::Chat(chat) = read else { panic!("no chat") };
        assert_eq!((0..5).map(|at| chat.learns(at)).collect::<Vec<_>>(), [false, false, true, false, true]);
        let masks: Vec<String> = tally.masks.into_keys().collect();
        assert_eq!(masks, ["messages[].train", "messages[].weight"]);
    }

    #[test]
    fn what_is_no_record_is_said() {
        let user = json!({"role": "user", "content": "a"});
        for (row, found) in [
            (json!({"prompt": "p"}), "the row has no `completion`: add it"),
            (json!({"prompt": "p", "response": "r"}), "--columns completion=response"),
            (json!({"completion": "c"}), "the row has no `prompt`, but `completion`: "),
            (json!({"prompt": "p", "completion": null}), "`completion` is null or empty"),
            (json!({"text": null, "id": 1}), "`text` is null or empty"),
            (json!({"prompt": 3, "completion": "c"}), "`prompt` must be text, found a number"),
            (json!({"prompt": "p", "completion": [user]}), "`completion` must be text, found a list"),
            (
                json!({"prompt": [user], "completion": "c"}),
                "`completion` must be a list of messages, found a string",
            ),
            (json!({"text": ["a"]}), "`text` must be text, found a list"),
            (json!({"instruction": "i", "response": "r"}), "--columns output=response"),
            (json!({"instruction": "i", "output": "r", "input": 3}), "`input` must be text, found a number"),
            (json!({"input_ids": "a"}), "`input_ids` must be a list of integers, found a string"),
            (json!({"input_ids": [1.5]}), "`input_ids` must be a list of integers, but contains a number"),
            (json!({"input_ids": [[1, 2]]}), "`input_ids` must be a list of integers, but contains a list"),
            (json!({"input_ids": []}), "`input_ids` is empty"),
            (json!({"input_ids": [-1]}), "-1 in `input_ids` is not a token id"),
            (json!({"input_ids": [1, 2], "labels": [1]}), "`labels` has 1 entries for 2 tokens"),
            (json!({"input_ids": [1], "labels": [2]}), "label 2 of token 1"),
            (
                json!({"input_ids": [1, 2], "completion_mask": [1]}),
                "`completion_mask` has 1 entries for 2 tokens",
            ),
            (
                json!({"input_ids": [1, 2], "assistant_masks": [1, 0.5]}),
                "`assistant_masks` must be a list of zeros and ones, but contains 0.5",
            ),
            (json!({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}), "between ones at token 2"),
            (
                json!({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}),
                "`position_ids` has 0 where 2 is expected",
            ),
            (json!({"messages": "a"}), "`messages` must be a list of messages, found a string"),
            (json!({"messages": []}), "`messages` has no messages"),
            (json!({"messages": [user, 3]}), "message 2 of `messages`: expected an object, found a number"),
            (
                json!({"messages": [{"content": "a"}]}),
                "message 1 of `messages`: no `role` among the fields `content`",
            ),
            (
                json!({"conversations": [{"from": "observation", "value": "a"}]}),
                "unknown role `observation` in `from`",
            ),
            (
                json!({"messages": [user, {"role": "user", "content": "a", "value": "b"}]}),
                "message 2 of `messages`: `content` and `value` differ: remove one of them",
            ),
            (
                json!({"messages": [{"role": "user", "from": "gpt", "value": "a"}]}),
                "`role` and `from` differ: remove one of them",
            ),
            (
                json!({"messages": [{"role": "assistant", "weight": 0.5}]}),
                "`weight` must be 0 (not trained on) or 1 (trained on), found 0.5",
            ),
            (
                json!({"messages": [{"role": "assistant", "train": "no"}]}),
                "`train` must be true or false, found \"no\"",
            ),
            (
                json!({"messages": [{"role": "user", "train": true}]}),
                "`train` requests training on the role \"user\"",
            ),
            (
                json!({"messages": [{"role": "assistant", "train_detail": []}]}),
                "`train_detail` is not supported",
            ),
            (json!({"prompt": "p", "chosen": "a", "rejected": "b"}), "--columns completion=chosen"),
            (json!({"prompt": "p", "chosen": [user], "rejected": [user]}), "--columns messages=chosen"),
            (json!({"prompt": "p", "completion": "c", "label": true}), "--task preference --loss kto"),
        ] {
            match read(row.clone(), &[]).unwrap_err() {
                Refusal::Wrong(error) => assert!(error.contains(found), "{error} for {row}"),
                unknown => panic!("{unknown:?} for {row}"),
            }
        }
    }

    #[test]
    fn unknown_fields_are_refused_with_what_columns_could_say() {
        for (row, expected) in [
            (json!({"id": 1, "question": "q", "answer": "a"}), "--columns prompt=question,completion=answer"),
            (json!({"id": 1, "tweet text": "a"}), "--columns 'text=tweet text'"),
            (json!({"topic": "t", "dialog": [{"role": "user"}]}), "--columns messages=dialog"),
            (json!({"id": 1}), "--columns text=COLUMN"),
            (json!({}), "--columns text=COLUMN"),
        ] {
            let Refusal::Unknown { example, .. } = read(row.clone(), &[]).unwrap_err() else {
                panic!("{row}")
            };
            assert_eq!(example, expected);
        }
    }
}
