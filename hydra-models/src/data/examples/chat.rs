//! Encodes conversations as tokens; the loss covers the assistant's tokens.
//!
//! The text is what Transformers renders for the whole conversation. If the template has `{% generation %}` blocks, the
//! loss covers every token that overlaps a block, even in part, as in Transformers. For a template without such blocks,
//! tracing reports where it writes each message; the loss then covers an answer from the end of the generation prompt
//! to the start of the next message.

use super::Conversation;
use super::encode::{Example, ExampleError, LossOn};
use super::record::ASSISTANT;
use super::remarks::Remark;
use crate::data::TokenForm;
use crate::tokenizer::{Chat, ChatTemplate, TokenizerError};
use serde_json::Value;
use std::ops::Range;

/// Byte ranges in a text.
type ByteRanges = Vec<Range<usize>>;

impl TokenForm<'_> {
    /// Encodes all tokens of a conversation.
    pub(super) fn encode_chat(&self, conversation: &Conversation) -> Result<Example, ExampleError> {
        let chat = self.conventions.chat.as_ref().ok_or(ExampleError::NoTemplate)?;
        let Conversation { messages, columns, .. } = conversation;
        let answers: Vec<usize> =
            (0..messages.len()).filter(|&at| messages[at]["role"] == ASSISTANT).collect();
        let rendered = chat.render(Chat { messages, columns }, &answers)?;
        let answers = Answers { chat, conversation, text: &rendered.text, answers: &answers };
        let (learned, opening) = match (self.loss_on, rendered.generated) {
            (LossOn::All, _) => (std::iter::once(0..rendered.text.len()).collect(), None),
            (LossOn::Completions, Some(marks)) => (answers.marked(marks, rendered.turns)?, None),
            (LossOn::Completions, None) if answers.answers.is_empty() => {
                return Err(ExampleError::NoAssistant { roles: roles(messages) });
            }
            (LossOn::Completions, None) => {
                let (places, opening) = answers.places(rendered.turns)?;
                answers.check_tools(&places)?;
                (places, opening)
            }
        };
        let fields = rendered.unused_fields.into_iter().filter(|name| !READ_HERE.contains(&name.as_str()));
        let mut remarks: Vec<Remark> = fields.map(Remark::UnusedField).collect();
        remarks.extend(rendered.dated.then_some(Remark::Dated));
        remarks.extend(opening.map(Remark::Opening));
        let tokens = self.tokenizer.encode_places(&rendered.text)?;
        let counts = covered(&tokens, &learned);
        let ids = tokens.into_iter().map(|(id, _)| id).collect();
        Ok(Example { ids, counts, remarks, unused: rendered.unused_columns, ..Example::default() })
    }

    /// Encodes a prompt and a completion made of messages; the loss covers everything after the prompt.
    pub(super) fn encode_completion(
        &self,
        conversation: &Conversation,
        prompt: usize,
    ) -> Result<Example, ExampleError> {
        let chat = self.conventions.chat.as_ref().ok_or(ExampleError::NoTemplate)?;
        let Conversation { messages, columns, .. } = conversation;
        let rendered = chat.render(Chat { messages, columns }, &[])?;
        let before = chat.prompt(Chat { messages: &messages[..prompt], columns })?.text;
        let ids = self.tokenizer.encode(&rendered.text)?;
        let mut remarks: Vec<Remark> = rendered.unused_fields.into_iter().map(Remark::UnusedField).collect();
        remarks.extend(rendered.dated.then_some(Remark::Dated));
        let example = self.after(&self.tokenizer.encode(&before)?, ids);
        Ok(Example { remarks, unused: rendered.unused_columns, ..example })
    }
}

/// The role of a tool's result.
const TOOL: &str = "tool";

/// Fields of messages that select what is trained on.
const READ_HERE: [&str; 2] = ["train", "weight"];

/// The distinct roles of messages.
fn roles(messages: &[Value]) -> Vec<String> {
    let roles = messages.iter().filter_map(|message| message["role"].as_str());
    let mut roles: Vec<String> = roles.map(|role| format!("`{role}`")).collect();
    roles.sort();
    roles.dedup();
    roles
}

/// Which tokens overlap any of the ranges, even in part. Ranges and tokens are sorted.
fn covered(tokens: &[(u32, Range<usize>)], places: &[Range<usize>]) -> Vec<bool> {
    let mut at = 0;
    let is_covered = |(_, token): &(u32, Range<usize>)| {
        while at < places.len() && token.start >= places[at].end {
            at += 1;
        }
        at < places.len() && token.end > places[at].start
    };
    tokens.iter().map(is_covered).collect()
}

/// The answers of a conversation whose template has no `{% generation %}` blocks.
struct Answers<'a> {
    chat: &'a ChatTemplate,
    conversation: &'a Conversation,
    text: &'a str,
    /// Indices of the assistant's messages.
    answers: &'a [usize],
}

impl Answers<'_> {
    fn is_learned(&self, answer: usize) -> bool {
        self.conversation.learns(answer)
    }

    /// The trained part of the template's `{% generation %}` blocks: all except messages that are not trained on.
    fn marked(&self, mut marks: ByteRanges, turns: Option<ByteRanges>) -> Result<ByteRanges, ExampleError> {
        if let Some(silent) = self.answers.iter().find(|answer| !self.is_learned(**answer)) {
            let turns = turns.ok_or(ExampleError::Rewritten { message: silent + 1 })?;
            let silent = |(answer, _): &(&usize, &Range<usize>)| !self.is_learned(**answer);
            let silent: Vec<&Range<usize>> =
                self.answers.iter().zip(&turns).filter(silent).map(|(_, turn)| turn).collect();
            marks.retain(|mark| !silent.iter().any(|turn| turn.contains(&mark.start)));
        } else if marks.iter().all(Range::is_empty) {
            return Err(ExampleError::NothingGenerated);
        }
        Ok(marks)
    }

    /// The trained range of each answer, given where the messages are written if that is known, and the end of a
    /// generation prompt that no answer starts with, if there is one.
    fn places(&self, turns: Option<ByteRanges>) -> Result<(ByteRanges, Option<String>), ExampleError> {
        let Some(turns) = turns else { return Ok((self.by_prefixes()?, None)) };
        let (mut places, mut opening) = (Vec::new(), None);
        for (answer, turn) in self.answers.iter().zip(turns).filter(|(answer, _)| self.is_learned(**answer)) {
            let Header { length, unmet } = self.header(*answer, &self.text[turn.clone()])?;
            opening = opening.or(unmet);
            places.push(turn.start + length..turn.end);
        }
        Ok((places, opening))
    }

    /// Rejects a template that writes a tool's result inside an answer instead of in a turn of its own.
    fn check_tools(&self, learned: &[Range<usize>]) -> Result<(), ExampleError> {
        let Conversation { messages, columns, .. } = self.conversation;
        let tools: Vec<usize> = (0..messages.len()).filter(|&at| messages[at]["role"] == TOOL).collect();
        if tools.is_empty() {
            return Ok(());
        }
        let turns = self.chat.render(Chat { messages, columns }, &tools)?.turns;
        for (message, turn) in tools.into_iter().zip(turns.into_iter().flatten()) {
            let said = messages[message]["content"].as_str().map(str::trim).filter(|said| !said.is_empty());
            let is_learned = |said: &str| learned.iter().any(|place| self.text[place.clone()].contains(said));
            if self.text[turn].trim().is_empty() && said.is_some_and(is_learned) {
                return Err(ExampleError::WithinAnswer { message: message + 1 });
            }
        }
        Ok(())
    }

    /// The start of an answer's turn that the template's generation prompt already contains.
    fn header(&self, answer: usize, turn: &str) -> Result<Header, ExampleError> {
        // A template cannot always render a generation prompt without messages.
        let Conversation { messages, columns, .. } = self.conversation;
        let asked = |messages| {
            let chat = Chat { messages, columns };
            Ok::<_, TokenizerError>((self.chat.render(chat, &[])?.text, self.chat.prompt(chat)?.text))
        };
        // Some templates reject the messages before the answer; their generation prompt after all messages is the same.
        let (plain, prompt) = asked(&messages[..answer.max(1)]).or_else(|_| asked(messages))?;
        let kept = common(&plain, &prompt);
        let request = &prompt[kept..];
        let length = common(request, turn);
        if length == request.len() {
            return Ok(Header { length, unmet: None });
        }
        // The generation prompt may replace the end of the text before it: then the turn starts with the prompt's end.
        let ends = (1..=turn.len()).rev().filter(|&end| kept < plain.len() && turn.is_char_boundary(end));
        match ends.into_iter().find(|&end| prompt.ends_with(&turn[..end])) {
            Some(length) => Ok(Header { length, unmet: None }),
            None => Ok(Header { length, unmet: Some(request[length..].to_owned()) }),
        }
    }

    /// The trained ranges if the template does not write its messages in a loop: an answer is the text that its
    /// conversation adds to the generation prompt.
    fn by_prefixes(&self) -> Result<ByteRanges, ExampleError> {
        let columns = &self.conversation.columns;
        let place = |answer: &usize| {
            let until = |end| Chat { messages: &self.conversation.messages[..end], columns };
            let before = self.chat.prompt(until(*answer))?.text;
            let after = self.chat.render(until(answer + 1), &[])?.text;
            match after.starts_with(&before) && self.text.starts_with(&after) {
                true => Ok(before.len()..after.len()),
                false => Err(ExampleError::Rewritten { message: answer + 1 }),
            }
        };
        self.answers.iter().filter(|answer| self.is_learned(**answer)).map(place).collect()
    }
}

/// The start of a turn.
struct Header {
    /// The bytes that the generation prompt already contains.
    length: usize,
    /// The rest of the generation prompt if the turn does not start with it.
    unmet: Option<String>,
}

/// The length in bytes of the longest common prefix, at a character boundary.
fn common(one: &str, other: &str) -> usize {
    let same = one.chars().zip(other.chars()).take_while(|(one, other)| one == other);
    same.map(|(c, _)| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Context;
    use crate::tokenizer::{BuiltIn, Conventions};
    use serde_json::{Map, json};
    use std::fs;

    /// The text with the trained parts between bars, and the notes.
    fn learned(
        template: &str,
        messages: Value,
        columns: Value,
    ) -> Result<(String, Vec<String>), ExampleError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        let tokenizer = BuiltIn::Bytes.tokenizer(256).unwrap();
        let conventions = Conventions::load(&tokenizer, Some(dir.path())).unwrap();
        let form = TokenForm {
            tokenizer: &tokenizer,
            conventions: &conventions,
            context: Context::uniform(999),
            vocabulary: 256,
            loss_on: LossOn::Completions,
            pack: false,
        };
        let columns: Map<String, Value> = columns.as_object().unwrap().clone();
        let messages = messages.as_array().unwrap().clone();
        let example = form.encode_chat(&Conversation { messages, columns, prompt: None })?;
        let mut shown = Vec::new();
        let mut before = false;
        for (id, counts) in example.ids.iter().zip(&example.counts) {
            shown.extend((*counts != before).then_some(b'|'));
            shown.push(*id as u8);
            before = *counts;
        }
        let mut remarks = super::super::Remarks::default();
        remarks.add(example.remarks);
        let notes = example.unused.into_iter().chain(remarks.notes()).collect();
        Ok((String::from_utf8(shown).unwrap(), notes))
    }

    fn said(turns: &[(&str, &str)]) -> Value {
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
    }

    const TWO: [(&str, &str); 4] = [
        ("user", "q"),
        ("assistant", "<think>t</think>a"),
        ("user", "r"),
        ("assistant", "<think>u</think>b"),
    ];

    /// Drops the reasoning of earlier turns, as Qwen3 and gpt-oss do.
    const FORGETFUL: &str = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content if loop.last else m.content.split('</think>')[-1] }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

    #[test]
    fn an_answer_that_is_rewritten_is_learned_as_it_is_written() {
        let (text, notes) = learned(FORGETFUL, said(&TWO), json!({})).unwrap();
        assert_eq!(text, "<u>q;<a>|a;|<u>r;<a>|<think>u</think>b;");
        assert!(notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn an_answer_is_learned_from_where_it_differs_from_the_generation_prompt() {
        let opened = FORGETFUL.replace("%}<a>{%", "%}<a><think>\n{%");
        let (text, notes) = learned(&opened, said(&[("user", "q"), ("assistant", "a")]), json!({})).unwrap();
        assert_eq!(text, "<u>q;<a>|a;");
        assert!(notes[0].contains("generation prompt") && notes[0].contains(r#""<think>\n""#), "{notes:?}");
    }

    #[test]
    fn the_assistant_may_begin() {
        let turns = said(&[("assistant", "a"), ("user", "q"), ("assistant", "b")]);
        assert_eq!(learned(FORGETFUL, turns.clone(), json!({})).unwrap().0, "<a>|a;|<u>q;<a>|b;");
        let indexed = FORGETFUL.replace("{% for", "{{ messages[0].role[:0] }}{% for");
        assert_eq!(learned(&indexed, turns, json!({})).unwrap().0, "<a>|a;|<u>q;<a>|b;");
    }

    #[test]
    fn a_message_may_say_that_it_is_not_learned() {
        let mut turns = said(&TWO);
        turns[1]["train"] = json!(false);
        assert_eq!(
            learned(FORGETFUL, turns.clone(), json!({})).unwrap(),
            ("<u>q;<a>a;<u>r;<a>|<think>u</think>b;".to_owned(), Vec::new())
        );
        let marked = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% else %}{% generation %}{{ m.content }}{% endgeneration %}.{% endif %}{% endfor %}";
        turns[1]["weight"] = json!(0);
        assert_eq!(
            learned(marked, turns, json!({})).unwrap().0,
            "q;<think>t</think>a.r;|<think>u</think>b|."
        );
    }

    #[test]
    fn what_marks_hold_is_learned_and_nothing_else() {
        let marked = "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}";
        let turns = [("user", "é"), ("assistant", "ü")];
        assert_eq!(learned(marked, said(&turns), json!({})).unwrap().0, "u:é;a:|ü!|;");
        let none = marked.replace("m.role == 'assistant'", "m.role == 'model'");
        let error = learned(&none, said(&turns), json!({})).unwrap_err();
        assert!(matches!(error, ExampleError::NothingGenerated), "{error}");
    }

    #[test]
    fn what_a_template_does_not_use_is_said() {
        let messages = json!([
            {"role": "user", "content": "q", "name": "n"}, {"role": "assistant", "content": "a", "tool_calls": []}
        ]);
        let (_, notes) = learned(FORGETFUL, messages, json!({"tools": [], "id": 1})).unwrap();
        let mut columns = notes[..2].to_vec();
        columns.sort();
        assert_eq!(columns, ["id", "tools"]);
        assert_eq!(notes.len(), 4);
        for (note, field) in notes[2..].iter().zip(["`name`", "`tool_calls`"]) {
            assert!(
                note.starts_with(&format!("note: the chat template ignores the message field {field}")),
                "{note}"
            );
        }
    }

    #[test]
    fn what_a_tool_says_inside_an_answer_is_refused() {
        let messages = json!([
            {"role": "user", "content": "q"}, {"role": "assistant", "content": "c"},
            {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a r"}
        ]);
        let within = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role[0] }}>{{ m.content }}{% if messages[loop.index] and messages[loop.index].role == 'tool' %}[{{ messages[loop.index].content }}]{% endif %};{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
        let error = learned(within, messages.clone(), json!({})).unwrap_err();
        assert!(matches!(error, ExampleError::WithinAnswer { message: 3 }), "{error}");
        let (text, _) = learned(FORGETFUL, messages, json!({})).unwrap();
        assert_eq!(text, "<u>q;<a>|c;|<t>r;<a>|a r;");
    }

    #[test]
    fn a_template_without_a_loop_over_messages_is_asked_again() {
        let numbers = "{% for i in range(messages | length) %}{{ messages[i].role[0] }}:{{ messages[i].content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
        assert_eq!(
            learned(numbers, said(&[("user", "q"), ("assistant", "a")]), json!({})).unwrap().0,
            "u:q;a:|a;"
        );
        let last = numbers.replace("};{%", "}{{ ';' if loop.last }}{%");
        let error = learned(&last, said(&TWO), json!({})).unwrap_err();
        assert!(matches!(error, ExampleError::Rewritten { message: 2 }), "{error}");
    }
}
