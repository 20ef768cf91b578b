//! Chat templates, which render a conversation as text.
//!
//! Rendering matches `apply_chat_template` of Transformers 5, except that `strftime_now` always returns the same day,
//! so that runs are reproducible.

mod json;
mod python;
mod source;
mod trace;
mod values;

use super::TokenizerError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Value as Jinja};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use trace::{Counted, Trace};

/// The template used by default.
pub(super) const DEFAULT: &str = "default";
/// The template for conversations with tools, if it exists.
const TOOL_USE: &str = "tool_use";

/// The column with additional template variables, as in TRL.
const OPTIONS: &str = "chat_template_kwargs";

/// Message fields for reasoning. Most templates read the first, those of gpt-oss the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Arguments of `apply_chat_template` that control its output; the data cannot set them.
const ARGUMENTS: [&str; 14] = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
];

/// The chat templates of a model. Cloning is cheap.
#[derive(Clone)]
pub struct ChatTemplate {
    place: Arc<str>,
    environment: Arc<Environment<'static>>,
    /// For each template, whether it has `{% generation %}` blocks.
    marked: Arc<BTreeMap<String, bool>>,
    /// The special tokens by name.
    known: Arc<Map<String, Value>>,
}

/// A conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// The messages: objects with a `role`.
    pub messages: &'a [Value],
    /// The other columns of its row.
    pub columns: &'a Map<String, Value>,
}

/// A rendered conversation. Ranges are in bytes.
#[derive(Clone, Debug, Default)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The ranges of `{% generation %}` blocks, in order; `None` if the template has none.
    pub generated: Option<Vec<Range<usize>>>,
    /// The range of each requested message, if the template writes them one after the other.
    pub turns: Option<Vec<Range<usize>>>,
    /// Columns, and keys of `chat_template_kwargs`, that the template did not read.
    pub unused_columns: Vec<String>,
    /// Message fields that the template did not read.
    pub unused_fields: Vec<String>,
    /// Whether the template used the date.
    pub dated: bool,
}

impl ChatTemplate {
    /// The templates of the file `place` by name, and the special tokens available to them.
    ///
    /// # Errors
    /// An invalid template.
    pub(super) fn new(
        place: &Path,
        templates: BTreeMap<String, String>,
        known: Map<String, Value>,
    ) -> Result<Self, TokenizerError> {
        let wrong =
            |source: Error| TokenizerError::Template { path: place.to_owned(), source: source.into() };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(wrong)?);
        python::extend(&mut environment);
        environment.add_function("raise_exception", python::raise_exception);
        environment.add_filter("tojson", json::to_json);
        let mut marked = BTreeMap::new();
        for (name, text) in templates {
            let source = source::instrument(&text);
            environment.add_template_owned(name.clone(), source.text).map_err(wrong)?;
            marked.insert(name, source.marked);
        }
        let (place, known) = (place.display().to_string().into(), Arc::new(known));
        Ok(Self { place, environment: Arc::new(environment), marked: Arc::new(marked), known })
    }

    /// Renders a conversation, and locates the messages with these indices in the text.
    ///
    /// # Errors
    /// The template rejects the conversation or fails, or a column is not what Transformers accepts.
    pub fn render(&self, chat: Chat<'_>, turns: &[usize]) -> Result<Rendered, TokenizerError> {
        self.rendered(chat, turns, false)
    }

    fn rendered(&self, chat: Chat<'_>, turns: &[usize], answer: bool) -> Result<Rendered, TokenizerError> {
        let (trace, name, text) = self.text_of(chat, answer)?;
        let seen = trace.take();
        let unused = |name: &String| !seen.columns.contains(name);
        let options = chat.columns.get(OPTIONS).and_then(Value::as_object).into_iter().flat_map(Map::keys);
        let options = options.filter(|name| unused(name)).map(|name| format!("{OPTIONS}.{name}"));
        let columns = chat.columns.keys().filter(|name| *name != OPTIONS && unused(name)).cloned();
        let fields = chat.messages.iter().filter_map(Value::as_object).flatten();
        let fields = fields.filter(|(_, value)| !value.is_null()).map(|(name, _)| name);
        let mut unused_fields: Vec<String> =
            fields.filter(|name| !is_read(&seen.fields, name)).cloned().collect();
        unused_fields.sort();
        unused_fields.dedup();
        Ok(Rendered {
            generated: self.marked.get(name).is_some_and(|marked| *marked).then_some(seen.generated.clone()),
            turns: seen.turns(turns, text.len()),
            unused_columns: columns.chain(options).collect(),
            unused_fields,
            dated: seen.dated,
            text,
        })
    }

    /// Renders a conversation with a generation prompt at its end.
    ///
    /// # Errors
    /// Those of [`render`](Self::render).
    pub fn prompt(&self, chat: Chat<'_>) -> Result<Rendered, TokenizerError> {
        self.rendered(chat, &[], true)
    }

    /// Renders a conversation and returns the trace, the template's name and the text.
    fn text_of(&self, chat: Chat<'_>, answer: bool) -> Result<(Arc<Trace>, &str, String), TokenizerError> {
        let trace = Arc::new(Trace::default());
        let fields = self.context(chat, answer, &trace)?;
        let name = self.name_for(&fields)?;
        let context = Jinja::from_object(Context { fields, trace: trace.clone() });
        let mut out = Counted { text: Vec::new(), trace: trace.clone() };
        let template = self.environment.get_template(name);
        let rendered = template.and_then(|template| template.render_captured_to(context, &mut out).map(drop));
        rendered.map_err(|source| TokenizerError::Render {
            template: self.place.to_string(),
            source: source.into(),
        })?;
        Ok((trace, name, String::from_utf8_lossy(&out.text).into_owned()))
    }

    /// The name of the template that Transformers would select.
    fn name_for(&self, context: &HashMap<String, Jinja>) -> Result<&str, TokenizerError> {
        let has_tools = context.get("tools").is_some_and(|tools| !tools.is_none());
        let wanted = if has_tools && self.marked.contains_key(TOOL_USE) { TOOL_USE } else { DEFAULT };
        let found = self.marked.keys().find(|name| *name == wanted);
        found.map(String::as_str).ok_or_else(|| TokenizerError::NoDefaultTemplate {
            template: self.place.to_string(),
            names: self.marked.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
        })
    }

    /// The template's variables. Later entries replace earlier ones: columns, special tokens, the row's options, and
    /// Transformers' own variables.
    fn context(
        &self,
        chat: Chat<'_>,
        answer: bool,
        trace: &Arc<Trace>,
    ) -> Result<HashMap<String, Jinja>, TokenizerError> {
        let mut fields: HashMap<String, Jinja> = HashMap::new();
        let options = options(chat.columns.get(OPTIONS))?;
        for (name, value) in chat.columns.iter().filter(|(name, _)| *name != OPTIONS).chain(&*self.known) {
            fields.insert(name.clone(), values::from_json(value));
        }
        for name in ["tools", "documents"] {
            let given = options.and_then(|options| options.get(name)).or_else(|| chat.columns.get(name));
            fields.insert(name.to_owned(), values::from_json(&list_of_objects(name, given)?));
        }
        for (name, value) in options.into_iter().flatten().filter(|(name, _)| !fields_set_here(name)) {
            fields.insert(name.clone(), values::from_json(value));
        }
        let messages = chat.messages.iter().enumerate();
        let messages = messages.map(|(at, message)| values::message(at, &normalized(message), trace));
        fields.insert("messages".to_owned(), values::list(messages.collect()));
        fields.insert("add_generation_prompt".to_owned(), Jinja::from(answer));
        for (name, function) in functions(trace) {
            fields.insert(name.to_owned(), function);
        }
        Ok(fields)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("place", &self.place).finish_non_exhaustive()
    }
}

fn fields_set_here(name: &str) -> bool {
    ["tools", "documents"].contains(&name)
}

/// Returns whether a message field was read, under its own name or one that Transformers maps it to.
fn is_read(read: &std::collections::BTreeSet<String>, name: &str) -> bool {
    match REASONING.contains(&name) {
        true => REASONING.iter().any(|name| read.contains(*name)),
        false => read.contains(name),
    }
}

/// The options of a row (`chat_template_kwargs`).
fn options(given: Option<&Value>) -> Result<Option<&Map<String, Value>>, TokenizerError> {
    let wrong = |found: String, expected: &str| TokenizerError::TemplateColumn {
        column: OPTIONS.to_owned(),
        found,
        expected: expected.to_owned(),
    };
    match given {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(options)) => {
            match options.keys().find(|name| ARGUMENTS.contains(&name.as_str())) {
                Some(name) => Err(wrong(format!("`{name}`"), "only variables of the chat template")),
                None => Ok(Some(options)),
            }
        }
        Some(other) => Err(wrong(other.to_string(), "an object")),
    }
}

/// `tools` or `documents`: a list of objects, possibly JSON in a string; null if absent.
fn list_of_objects(column: &str, given: Option<&Value>) -> Result<Value, TokenizerError> {
    let wrong = |found: &Value| TokenizerError::TemplateColumn {
        column: column.to_owned(),
        found: found.to_string().chars().take(60).collect(),
        expected: "a list of objects".to_owned(),
    };
    let Some(given) = given else { return Ok(Value::Null) };
    let read = match given {
        Value::String(text) => serde_json::from_str(text).map_err(|_| wrong(given))?,
        other => other.clone(),
    };
    match &read {
        Value::Null => Ok(read),
        Value::Array(items) if items.iter().all(Value::is_object) => Ok(read),
        _ => Err(wrong(given)),
    }
}

/// A message without null fields, with its reasoning under every name that templates read.
fn normalized(message: &Value) -> Value {
    let given = message.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let given: Map<String, Value> = given.map(|(name, value)| (name.clone(), value.clone())).collect();
    let Some(reasoning) = REASONING.iter().find_map(|name| given.get(*name)).cloned() else {
        return Value::Object(given);
    };
    let mut fields = Map::from_iter([(REASONING[1].to_owned(), reasoning.clone())]);
    fields.extend(given);
    fields.insert(REASONING[0].to_owned(), reasoning);
    Value::Object(fields)
}

/// The variables of a rendering; reads are recorded.
#[derive(Debug)]
struct Context {
    fields: HashMap<String, Jinja>,
    trace: Arc<Trace>,
}

impl Object for Context {
    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Jinja> {
        let value = self.fields.get(key)?;
        self.trace.note(|seen, _| {
            if !seen.columns.contains(key) {
                seen.columns.insert(key.to_owned());
            }
        });
        Some(value.clone())
    }
}

/// The functions available to templates, including those that instrumentation calls.
fn functions(trace: &Arc<Trace>) -> [(&'static str, Jinja); 3] {
    let [generated, entered, dated] = [0; 3].map(|_| trace.clone());
    let generation = move |state: &mut minijinja::State<'_, '_>, named: Kwargs| -> Result<Jinja, Error> {
        let caller: Jinja = named.get("caller")?;
        let text = caller.call(state, &[])?;
        let length = text.as_str().map_or(0, str::len);
        generated.note(|seen, at| seen.generated.push(at..at + length));
        Ok(text)
    };
    let enter = move |value: Jinja, number: usize| {
        values::message_number(&value).into_iter().for_each(|message| entered.enter(number, message));
    };
    let date = move |format: String| {
        dated.note(|seen, _| seen.dated = true);
        fixed_date(&format)
    };
    [
        (source::GENERATION, Jinja::from_function(generation)),
        (source::ENTER, Jinja::from_function(enter)),
        ("strftime_now", Jinja::from_function(date)),
    ]
}

/// Formats Friday, 26 July 2024, the default date of Llama's templates, with `strftime` directives.
fn fixed_date(format: &str) -> Result<String, Error> {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        let directive = match (c, chars.clone().next()) {
            ('%', Some('-')) => chars.nth(1).map(|c| c.to_string()).map(|c| format!("-{c}")),
            ('%', Some(_)) => chars.next().map(|c| c.to_string()),
            _ => {
                out.push(c);
                continue;
            }
        };
        out.push_str(match directive.as_deref().unwrap_or_default() {
            "Y" | "G" => "2024",
            "y" | "g" => "24",
            "m" => "07",
            "-m" => "7",
            "B" => "July",
            "b" | "h" => "Jul",
            "d" | "e" | "-d" => "26",
            "A" => "Friday",
            "a" => "Fri",
            "u" | "w" => "5",
            "j" | "-j" => "208",
            "H" | "M" | "S" | "k" => "00",
            "-H" | "-M" | "-S" => "0",
            "I" | "-I" => "12",
            "p" => "AM",
            "f" => "000000",
            "F" => "2024-07-26",
            "D" | "x" => "07/26/24",
            "T" | "X" => "00:00:00",
            "c" => "Fri Jul 26 00:00:00 2024",
            "V" | "W" => "30",
            "U" => "29",
            "C" => "20",
            "z" | "Z" => "",
            "%" => "%",
            other => {
                let unknown = format!("strftime_now does not support `%{other}`");
                return Err(Error::new(ErrorKind::InvalidOperation, unknown));
            }
        });
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
