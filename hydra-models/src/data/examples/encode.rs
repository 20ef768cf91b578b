//! From a record to tokens, some of which are trained on.

use super::Record;
use super::remarks::Remark;
use crate::data::TokenForm;
use crate::tokenizer::TokenizerError;
use serde::{Deserialize, Serialize};

/// The tokens of an example whose prediction counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// What the model is to say: completions, and what the assistant says. All of a text.
    #[default]
    Completions,
    /// All tokens, prompts and all.
    All,
}

impl LossOn {
    /// The words for it.
    pub const NAMES: [&str; 2] = ["completions", "all"];
}

/// Tokens, and which of them count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Example {
    pub(super) ids: Vec<u32>,
    pub(super) counts: Vec<bool>,
    pub(super) remarks: Vec<Remark>,
}

/// Why a record is no example.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum ExampleError {
    /// The tokenizer or the template refused it.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A conversation without a template.
    #[error(
        "the model has no chat template to write a conversation with: put `chat_template.jinja` into its directory, or give \
         lines with `prompt` and `completion`"
    )]
    NoTemplate,
    /// A model without an end of texts.
    #[error(
        "the model's tokenizer has no token that ends a text: name one as `eos_token` in `tokenizer_config.json`"
    )]
    NoEnd,
    /// An answer that is written in another way once more is said after it.
    #[error(
        "the chat template writes message {message} in another way where others follow, so that what the assistant said \
         cannot be told apart: give conversations that end with their one answer, or --loss-on all"
    )]
    Rewritten {
        /// The message, counted from one.
        message: usize,
    },
    /// A conversation of which the chat template marks nothing.
    #[error(
        "the chat template marks nothing of the conversation with `{{% generation %}}`, so that nothing is learned: put the \
         marks around what the assistant says, take them all out, or give --loss-on all"
    )]
    NothingGenerated,
}

/// A text with the places, in bytes, where what counts begins and ends.
struct Marked {
    text: String,
    counts: Vec<(usize, usize)>,
}

impl TokenForm<'_> {
    /// The tokens of a record, cut to the context.
    pub(super) fn encode(&self, record: &Record) -> Result<Example, ExampleError> {
        let marked = match record {
            Record::Text(text) => Marked { text: text.clone(), counts: vec![(0, text.len())] },
            Record::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let counts = vec![(prompt.len(), text.len())];
                Marked { text, counts }
            }
            Record::Chat(conversation) => {
                let mut example = self.encode_chat(conversation)?;
                example.ids.truncate(self.context.most());
                example.counts.truncate(self.context.most());
                return Ok(example);
            }
            Record::Tokens { ids, learned } => return Ok(self.cut(ids, learned)),
        };
        let mut ids = self.tokenizer.encode_whole(&marked.text)?;
        let mut counts = vec![self.loss_on == LossOn::All; ids.len()];
        for (from, to) in &marked.counts {
            let from = self.tokens_before(&marked, *from, &ids)?;
            let to = self.tokens_before(&marked, *to, &ids)?;
            counts[from..to.max(from)].fill(true);
        }
        let end = self.conventions.end.ok_or(ExampleError::NoEnd)?;
        if ids.last() != Some(&end) {
            ids.push(end);
            counts.push(true);
        }
        // Whoever put it there, the model is to say it.
        counts.last_mut().into_iter().for_each(|last| *last = true);
        ids.truncate(self.context.most());
        counts.truncate(self.context.most());
        Ok(Example { ids, counts, ..Example::default() })
    }

    /// Tokens that nobody has to make any more, cut to the context.
    fn cut(&self, ids: &[u32], learned: &[bool]) -> Example {
        let most = self.context.most().min(ids.len());
        let counts = learned[..most].iter().map(|learned| *learned || self.loss_on == LossOn::All);
        Example { ids: ids[..most].to_vec(), counts: counts.collect(), ..Example::default() }
    }

    /// The number of tokens of the text up to a place, which is counted as TRL counts a prompt's: by itself.
    fn tokens_before(&self, marked: &Marked, place: usize, ids: &[u32]) -> Result<usize, ExampleError> {
        if place == marked.text.len() {
            return Ok(ids.len());
        }
        let before = self.tokenizer.encode_whole(&marked.text[..place])?;
        let mut tokens = before.len().min(ids.len());
        // An end that the tokenizer puts after every text does not stand in the middle of this one.
        while tokens > 0
            && Some(before[tokens - 1]) == self.conventions.end
            && ids[tokens - 1] != before[tokens - 1]
        {
            tokens -= 1;
        }
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Conversation;
    use super::*;
    use crate::data::Context;
    use crate::tokenizer::{Conventions, Tokenizer};
    use serde_json::json;
    use std::fs;
    use tempfile::TempDir;

    /// A model's directory: letters, and special tokens that begin and end texts.
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
        let tokenizer = dir.map_or(Tokenizer::Bytes, |dir| Tokenizer::from_dir(dir.path()).unwrap().unwrap());
        let conventions = Conventions::of(&tokenizer, dir.map(TempDir::path)).unwrap();
        let form = TokenForm {
            tokenizer: &tokenizer,
            conventions: &conventions,
            context: Context::AtMost(context),
            vocabulary: 256,
            loss_on,
            pack: false,
        };
        form.encode(record)
    }

    /// The ids, and after a bar those that count, in their places.
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
        assert_eq!(of(completion("a", "b:")), "5 2 3 6 | . . 3 6", "one token holds an end and a beginning");
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
        // Nothing follows the last answer: the template ends it.
        assert_eq!(of(chat(&["b", "b"]), LossOn::Completions), "7 3 1 4 0 3 1 4 | . . . . . . 1 4");
    }

    #[test]
    fn what_cannot_be_told_apart_is_refused() {
        let error = encode_in(None, &chat(&["a", "b"]), 9, LossOn::All).unwrap_err();
        assert!(error.to_string().contains("no chat template"), "{error}");
        let last = "{% for m in messages %}{{ m.content }}{{ ';' if loop.last }}{% endfor %}";
        let dir = directory(Some(last));
        let turns = chat(&["a", "b", "a", "b"]);
        assert_eq!(
            shown(&encode_in(Some(&dir), &turns, 9, LossOn::Completions).unwrap()),
            "0 1 0 1 4 | . 1 . 1 4"
        );
    }
}
