//! Encodes rows as tokens and loss masks.

use super::Record;
use super::dataset::loss_targets;
use super::remarks::Remark;
use crate::data::TokenForm;
use crate::tokenizer::TokenizerError;
use serde::{Deserialize, Serialize};

/// The tokens of an example that the loss covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// The responses: completions and the assistant's messages. Every token of a text.
    #[default]
    Completions,
    /// All tokens, including prompts.
    All,
}

impl LossOn {
    /// The names in flags and files.
    pub const NAMES: [&str; 2] = ["completions", "all"];
}

/// Token ids and the loss mask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct Example {
    pub(super) ids: Vec<u32>,
    pub(super) counts: Vec<bool>,
    /// The length before truncation to the context.
    pub(super) tokens: usize,
    /// Whether the example has a loss target before truncation.
    pub(super) learned: bool,
    /// Whether a token crosses the end of the prompt.
    pub(super) merged: bool,
    /// Unused fields of the row.
    pub(super) unused: Vec<String>,
    /// Other remarks about the example.
    pub(super) remarks: Vec<Remark>,
}

/// Why a row cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum ExampleError {
    /// The tokenizer or the chat template failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A conversation, but the model has no chat template.
    #[error(
        "the model has no chat template to render the conversation: add `chat_template.jinja` to its directory, or use \
         rows with `prompt` and `completion`"
    )]
    NoTemplate,
    /// A conversation without a message to train on.
    #[error(
        "no message has the role `assistant`, which the loss covers; the roles are {}: rename one, or use --loss-on all",
        roles.join(", ")
    )]
    NoAssistant { roles: Vec<String> },
    /// A tokenizer without an end-of-text token.
    #[error("the model's tokenizer has no end-of-text token: set `eos_token` in `tokenizer_config.json`")]
    NoEnd,
    /// The template renders an answer differently once messages follow it.
    #[error(
        "the chat template renders message {message} differently once others follow it, so the assistant's text cannot be \
         located: use conversations with a single, final answer, or --loss-on all"
    )]
    Rewritten {
        /// The message's number, counted from one.
        message: usize,
    },
    /// The template writes a tool's result inside an answer.
    #[error(
        "the chat template writes message {message}, of the role `tool`, inside an answer, so the model would be trained on \
         it: add `{{% generation %}}` blocks around the assistant's text to the template, or use --loss-on all"
    )]
    WithinAnswer {
        /// The message's number, counted from one.
        message: usize,
    },
    /// No part of the conversation lies in the template's `{% generation %}` blocks.
    #[error(
        "no part of the conversation lies in the chat template's `{{% generation %}}` blocks, so the loss is empty: put the \
         blocks around the assistant's text, remove them all, or use --loss-on all"
    )]
    NothingGenerated,
}

impl TokenForm<'_> {
    /// Encodes a row, truncated to the context.
    pub(super) fn encode(&self, record: &Record) -> Result<Example, ExampleError> {
        let mut example = match record {
            Record::Text(text) => self.whole("", text)?,
            Record::Completion { prompt, completion } => {
                self.whole(prompt, &format!("{prompt}{completion}"))?
            }
            Record::Chat(conversation) => match conversation.prompt {
                Some(prompt) => self.encode_completion(conversation, prompt)?,
                None => self.encode_chat(conversation)?,
            },
            Record::Tokens { ids, learned } => {
                Example { ids: ids.clone(), counts: learned.clone(), ..Example::default() }
            }
        };
        if self.loss_on == LossOn::All {
            example.counts.fill(true);
        }
        example.tokens = example.ids.len();
        example.learned = loss_targets(&example.counts) > 0;
        example.ids.truncate(self.context.example);
        example.counts.truncate(self.context.example);
        Ok(example)
    }

    /// Encodes a text with the tokenizer's start and end tokens; the loss covers everything after the prompt.
    fn whole(&self, prompt: &str, text: &str) -> Result<Example, ExampleError> {
        let mut example =
            self.after(&self.tokenizer.encode_whole(prompt)?, self.tokenizer.encode_whole(text)?);
        let end = self.conventions.end.ok_or(ExampleError::NoEnd)?;
        if example.ids.last() != Some(&end) {
            example.ids.push(end);
            example.counts.push(true);
        }
        // The model has to learn to end the text, no matter where its end token comes from.
        example.counts.last_mut().into_iter().for_each(|last| *last = true);
        Ok(example)
    }

    /// Tokens with a loss on those after the prompt. As in TRL 1.16, the completion starts at the first token that
    /// differs from the separately tokenized prompt.
    pub(super) fn after(&self, prompt: &[u32], ids: Vec<u32>) -> Example {
        let common = prompt.iter().zip(&ids).take_while(|(one, other)| one == other).count();
        // An end token that the tokenizer appends to every text crosses no boundary.
        let merged = prompt[common..].iter().any(|id| Some(*id) != self.conventions.end);
        let counts = (0..ids.len()).map(|at| at >= common).collect();
        Example { ids, counts, merged, ..Example::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Conversation;
    use super::*;
    use crate::data::Context;
    use crate::tokenizer::{Conventions, Tokenizer};
    use serde_json::json;
    use std::fs;
    use tempfile::TempDir;

    /// A model directory whose tokenizer has letters, and special tokens that start and end texts.
    fn directory(template: Option<&str>) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let vocab = json!({"a": 0, "b": 1, "ab": 2, ":": 3, ";": 4, "<s>": 5, "</s>": 6, "u": 7});
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [
                {"id": 5, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                 "normalized": false, "special": true},
                {"id": 6, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                 "normalized": false, "special": true}],
            "pre_tokenizer": null, "decoder": null,
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                           {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]},
                                   "</s>": {"id": "</s>", "ids": [6], "tokens": ["</s>"]}}},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                      "vocab": vocab, "merges": ["a b"]}
        });
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let config = json!({"eos_token": "</s>", "chat_template": template});
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        dir
    }

    fn encode_in(
        dir: Option<&TempDir>,
        record: &Record,
        context: usize,
        loss_on: LossOn,
    ) -> Result<Example, ExampleError> {
        let tokenizer =
            dir.map_or_else(|| Tokenizer::Bytes, |dir| Tokenizer::from_dir(dir.path()).unwrap().unwrap());
        let conventions = Conventions::load(&tokenizer, dir.map(TempDir::path)).unwrap();
        let form = TokenForm {
            tokenizer: &tokenizer,
            conventions: &conventions,
            context: Context::uniform(context),
            vocabulary: 256,
            loss_on,
            pack: false,
        };
        form.encode(record)
    }

    /// The ids, and after a bar the loss targets in their positions.
    fn shown(example: &Example) -> String {
        let counts = example.ids.iter().zip(&example.counts);
        let counts: Vec<String> =
            counts.map(|(id, counts)| if *counts { id.to_string() } else { ".".to_owned() }).collect();
        let ids: Vec<String> = example.ids.iter().map(u32::to_string).collect();
        format!("{} | {}", ids.join(" "), counts.join(" "))
    }

    fn completion(prompt: &str, completion: &str) -> Record {
        Record::Completion { prompt: prompt.to_owned(), completion: completion.to_owned() }
    }

    #[test]
    fn an_example_is_its_prompt_its_completion_and_the_end() {
        let of = |record, context, loss_on| shown(&encode_in(None, &record, context, loss_on).unwrap());
        let (all, completions) = (LossOn::All, LossOn::Completions);
        assert_eq!(of(completion("\u{1}\u{2}", "\u{3}"), 9, completions), "1 2 3 0 | . . 3 0");
        assert_eq!(of(completion("\u{1}\u{2}", "\u{3}"), 9, all), "1 2 3 0 | 1 2 3 0");
        assert_eq!(of(completion("\u{1}\u{2}", "\u{3}"), 3, completions), "1 2 3 | . . 3");
        assert_eq!(of(Record::Text("\u{1}\u{2}".to_owned()), 9, completions), "1 2 0 | 1 2 0");
        let tokens = || Record::Tokens { ids: vec![7, 8, 9], learned: vec![false, true, true] };
        assert_eq!(of(tokens(), 9, completions), "7 8 9 | . 8 9");
        assert_eq!(
            (of(tokens(), 2, completions), of(tokens(), 9, all)),
            ("7 8 | . 8".into(), "7 8 9 | 7 8 9".into())
        );
    }

    #[test]
    fn a_tokenizer_that_begins_and_ends_texts_does_so_once() {
        let dir = directory(None);
        let of = |record| shown(&encode_in(Some(&dir), &record, 9, LossOn::Completions).unwrap());
        assert_eq!(of(completion("a", "b:")), "5 2 3 6 | . 2 3 6", "one token holds an end and a beginning");
        let merged = |prompt: &str| {
            encode_in(Some(&dir), &completion(prompt, "b:"), 9, LossOn::Completions).unwrap().merged
        };
        assert!(merged("a") && !merged(":"));
        assert_eq!(of(completion("a:", "b")), "5 0 3 1 6 | . . . 1 6");
    }

    const TURNS: &str = "{% for m in messages %}{{ 'u:' if m.role == 'user' else 'a:' }}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

    fn chat(turns: &[&str]) -> Record {
        let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
        let turns = turns.iter().enumerate();
        let messages = turns.map(|(at, text)| json!({"role": role(at), "content": text})).collect();
        Record::Chat(Conversation { messages, ..Default::default() })
    }

    #[test]
    fn what_the_assistant_says_counts_in_every_turn() {
        let dir = directory(Some(TURNS));
        let of = |record, loss_on| shown(&encode_in(Some(&dir), &record, 99, loss_on).unwrap());
        let two = chat(&["b", "b", "b", "ab"]);
        assert_eq!(
            of(two.clone(), LossOn::Completions),
            "7 3 1 4 0 3 1 4 7 3 1 4 0 3 2 4 | . . . . . . 1 4 . . . . . . 2 4"
        );
        let all = of(two, LossOn::All);
        assert!(!all.contains('.'), "{all}");
        // The template itself ends the last answer.
        assert_eq!(of(chat(&["b", "b"]), LossOn::Completions), "7 3 1 4 0 3 1 4 | . . . . . . 1 4");
    }

    #[test]
    fn a_conversation_without_a_template_is_refused() {
        let error = encode_in(None, &chat(&["a", "b"]), 9, LossOn::All).unwrap_err();
        assert!(error.to_string().contains("no chat template"), "{error}");
    }

    #[test]
    fn a_token_that_lies_in_an_answer_in_part_is_learned() {
        let last = "{% for m in messages %}{{ m.content }}{{ ';' if loop.last }}{% endfor %}";
        let dir = directory(Some(last));
        let turns = chat(&["a", "b", "a", "b"]);
        assert_eq!(shown(&encode_in(Some(&dir), &turns, 9, LossOn::Completions).unwrap()), "2 2 4 | 2 2 4");
    }

    #[test]
    fn a_completion_of_messages_is_learned_whoever_says_it() {
        let dir = directory(Some(TURNS));
        let Record::Chat(mut conversation) = chat(&["b", "b", "b", "ab"]) else { panic!("no chat") };
        conversation.prompt = Some(2);
        let of = |conversation: &Conversation| {
            shown(
                &encode_in(Some(&dir), &Record::Chat(conversation.clone()), 99, LossOn::Completions).unwrap(),
            )
        };
        // The template starts an answer after the prompt, but the completion is a question: the loss starts where they
        // differ.
        assert_eq!(of(&conversation), "7 3 1 4 0 3 1 4 7 3 1 4 0 3 2 4 | . . . . . . . . 7 3 1 4 0 3 2 4");
        conversation.prompt = Some(3);
        assert_eq!(of(&conversation), "7 3 1 4 0 3 1 4 7 3 1 4 0 3 2 4 | . . . . . . . . . . . . . . 2 4");
    }

    #[test]
    fn messages_without_weight_and_columns_without_a_use_are_told() {
        let dir = directory(Some(TURNS));
        let Record::Chat(mut conversation) = chat(&["b", "b", "b", "ab"]) else { panic!("no chat") };
        conversation.messages[1]["weight"] = json!(0);
        conversation.columns.insert("id".to_owned(), json!(1));
        let example = encode_in(Some(&dir), &Record::Chat(conversation), 6, LossOn::Completions).unwrap();
        assert_eq!(shown(&example), "7 3 1 4 0 3 | . . . . . .");
        assert_eq!((example.tokens, example.learned, example.unused), (16, true, vec!["id".to_owned()]));
    }

    #[test]
    fn a_conversation_without_an_assistant_is_learned_whole_or_refused() {
        let dir = directory(Some(TURNS));
        let of = |loss_on| encode_in(Some(&dir), &chat(&["b"]), 9, loss_on);
        let error = of(LossOn::Completions).unwrap_err().to_string();
        assert!(error.contains("no message has the role `assistant`") && error.contains("`user`"), "{error}");
        assert_eq!(shown(&of(LossOn::All).unwrap()), "7 3 1 4 | 7 3 1 4");
    }
}
