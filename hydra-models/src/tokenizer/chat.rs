//! Chat templates, by which a conversation becomes the text that a model was made for.

use super::TokenizerError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value as Jinja};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The name of the template among those of its environment.
const NAME: &str = "chat";

/// A chat template as Hugging Face transformers renders it, in Jinja. It does not know what day it is: a template that
/// asks for that has the date that it falls back on. Cloning it is cheap.
#[derive(Clone)]
pub struct ChatTemplate {
    place: Arc<str>,
    environment: Arc<Environment<'static>>,
    /// The special tokens.
    known: Arc<Map<String, Value>>,
}

impl ChatTemplate {
    /// The template in the file `place`, with what it may name beside the messages.
    ///
    /// # Errors
    /// A text that is no template.
    pub(super) fn new(place: &Path, text: String, known: Map<String, Value>) -> Result<Self, TokenizerError> {
        let wrong =
            |source: Error| TokenizerError::Template { path: place.to_owned(), source: source.into() };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(wrong)?);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, without_generation_marks(&text)).map_err(wrong)?;
        let (place, environment, known) =
            (place.display().to_string().into(), Arc::new(environment), Arc::new(known));
        Ok(Self { place, environment, known })
    }

    /// The text of these messages, objects with a `role` and what it says; with `answer`, also how an answer begins.
    ///
    /// # Errors
    /// What the template says against the messages, or could not do.
    pub fn render(&self, messages: &[Value], answer: bool) -> Result<String, TokenizerError> {
        let mut context = (*self.known).clone();
        context.insert("messages".to_owned(), Value::Array(messages.to_vec()));
        context.insert("add_generation_prompt".to_owned(), Value::Bool(answer));
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(Jinja::from(Serde(&context))));
        rendered.map_err(|source| TokenizerError::Render {
            template: self.place.to_string(),
            source: source.into(),
        })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("place", &self.place).finish_non_exhaustive()
    }
}

/// What templates call when they refuse a conversation.
fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// JSON as Python writes it, with spaces after commas and colons, and on several lines where it is indented. The
/// library's own filter escapes what HTML would read, which transformers does not.
fn to_json(value: Jinja, options: Kwargs) -> Result<Jinja, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, "a value has no JSON").with_source(error)
    };
    let value = serde_json::to_value(value).map_err(failed)?;
    let mut out = String::new();
    write_json(&mut out, &value, indent, 0);
    Ok(Jinja::from_safe_string(out))
}

fn write_json(out: &mut String, value: &Value, indent: Option<usize>, depth: usize) {
    let items: Vec<(Option<&String>, &Value)> = match value {
        Value::Array(items) => items.iter().map(|item| (None, item)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, field)| (Some(name), field)).collect(),
        _ => return out.push_str(&value.to_string()),
    };
    let [open, close] = if value.is_array() { ['[', ']'] } else { ['{', '}'] };
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = indent.filter(|_| !items.is_empty()) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for (at, (name, item)) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        line(out, depth + 1);
        if let Some(name) = name {
            out.push_str(&Value::String((*name).clone()).to_string());
            out.push_str(": ");
        }
        write_json(out, item, indent, depth + 1);
    }
    line(out, depth);
    out.push(close);
}

/// The template without the marks around what a model says, a tag of transformers' own. What they leave of white space
/// control stays.
fn without_generation_marks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|end| start + end + 2) else { break };
        let tag = &rest[start + 2..end - 2];
        let (before, after) = (tag.starts_with('-'), tag.ends_with('-'));
        match tag.trim_matches('-').trim() {
            "generation" | "endgeneration" => {
                out.push_str(&rest[..start]);
                // A comment does what the tag did to the white space beside it.
                out.push_str(if before { "{#- " } else { "{# " });
                out.push_str(if after { "-#}" } else { "#}" });
            }
            _ => out.push_str(&rest[..end]),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::error::Error;

    fn template(text: &str) -> ChatTemplate {
        ChatTemplate::new(Path::new("chat_template.jinja"), text.to_owned(), Map::new()).unwrap()
    }

    fn messages() -> Vec<Value> {
        vec![
            json!({"role": "user", "content": " Why? "}),
            json!({"role": "assistant", "content": "Because <b>."}),
        ]
    }

    #[test]
    fn a_conversation_is_written_turn_by_turn() {
        let chatml = template(
            "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message.content.strip() + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        );
        let user = "<|im_start|>user\nWhy?<|im_end|>\n";
        assert_eq!(
            chatml.render(&messages(), false).unwrap(),
            format!("{user}<|im_start|>assistant\nBecause <b>.<|im_end|>\n")
        );
        assert_eq!(chatml.render(&messages()[..1], true).unwrap(), format!("{user}<|im_start|>assistant\n"));
    }

    #[test]
    fn what_templates_of_transformers_use_is_there() {
        let rendered = |text: &str| template(text).render(&messages(), false).unwrap();
        let spaces = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}";
        assert_eq!(rendered(spaces), "1");
        assert_eq!(
            rendered("{{ messages[1]['content'].split(' ')[0] }}{{ messages[-1].role }}"),
            "Becauseassistant"
        );
        assert_eq!(
            rendered("a {%- generation %} {{ messages[1].content }}{% endgeneration -%} b"),
            "a Because <b>.b"
        );
        assert_eq!(
            rendered("{{ messages[1] | tojson }}"),
            r#"{"role": "assistant", "content": "Because <b>."}"#
        );
        assert_eq!(rendered("{{ [1, []] | tojson(indent=2) }}"), "[\n  1,\n  []\n]");
        assert_eq!(rendered("{{ strftime_now is defined }}"), "False");
    }

    #[test]
    fn what_a_template_says_against_a_conversation_is_told() {
        let error =
            template("{{ raise_exception('Only user turns!') }}").render(&messages(), false).unwrap_err();
        let reason = error.source().unwrap().to_string();
        assert!(
            error.to_string().contains("chat_template.jinja") && reason.contains("Only user turns!"),
            "{reason}"
        );
    }
}
