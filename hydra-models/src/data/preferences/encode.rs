//! Encodes rows of preference data as tokens.

use super::files::PairForm;
use super::record::{Content, PreferenceRecord};
use crate::data::ExampleError;
use crate::data::examples::Remark;
use crate::objective::PreferenceLoss;
use crate::tokenizer::{Chat, Rendered};
use serde_json::{Map, Value};

/// The tokens of a record.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Encoded {
    /// The prompt with each answer.
    pub(super) texts: Vec<Vec<u32>>,
    /// The number of tokens before the answers, the same for all.
    pub(super) prompt: usize,
    /// The lengths of the texts before truncation.
    pub(super) tokens: Vec<usize>,
    /// Whether the only answer is desirable.
    pub(super) label: Option<bool>,
    /// The margin of a reward model.
    pub(super) margin: f32,
    /// Whether a token crosses the end of the prompt.
    pub(super) merged: bool,
    /// Unused columns of a conversation's row, and other remarks about it.
    pub(super) unused: Vec<String>,
    pub(super) remarks: Vec<Remark>,
}

impl Encoded {
    /// Whether both texts of a pair are equal.
    pub(super) fn is_equal(&self) -> bool {
        matches!(&self.texts[..], [one, other] if one == other)
    }
}

/// What the chat template does not use of a row, and remarks.
#[derive(Default)]
struct Noticed {
    unused: Vec<String>,
    remarks: Vec<Remark>,
}

impl Noticed {
    fn add(&mut self, rendered: Rendered) {
        let fields = rendered.unused_fields.into_iter().map(Remark::UnusedField);
        let remarks = fields.chain(rendered.dated.then_some(Remark::Dated));
        let (unused, remarks): (Vec<String>, Vec<Remark>) = (rendered.unused_columns, remarks.collect());
        self.unused.extend(unused.into_iter().filter(|name| !self.unused.contains(name)).collect::<Vec<_>>());
        self.remarks
            .extend(remarks.into_iter().filter(|one| !self.remarks.contains(one)).collect::<Vec<_>>());
    }
}

impl PairForm<'_> {
    /// Encodes a row as TRL does. As in TRL 1.16, the answers start at the first token where one of the texts differs from
    /// the separately tokenized prompt.
    pub(super) fn encode(&self, record: &PreferenceRecord) -> Result<Encoded, ExampleError> {
        let mut noticed = Noticed::default();
        let (prompt, texts) = match &record.content {
            Content::Texts { prompt, answers } => {
                let whole =
                    |answer: &String| self.ended(self.tokenizer.encode_whole(&format!("{prompt}{answer}"))?);
                let texts = answers.iter().map(whole).collect::<Result<Vec<_>, _>>()?;
                (self.tokenizer.encode_whole(prompt)?, texts)
            }
            Content::Chat { prompt, answers, columns } => {
                self.chat(prompt, answers, columns, &mut noticed)?
            }
        };
        let prompt = self.started(prompt);
        let mut texts: Vec<Vec<u32>> = texts.into_iter().map(|text| self.started(text)).collect();
        let common =
            |text: &Vec<u32>| prompt.iter().zip(text).take_while(|(one, other)| one == other).count();
        let start = texts.iter().map(common).min().unwrap_or(0);
        // An end token that the tokenizer appends to every text crosses no boundary.
        let merged = prompt[start..].iter().any(|id| Some(*id) != self.conventions.end);
        let tokens = texts.iter().map(Vec::len).collect();
        texts.iter_mut().for_each(|text| text.truncate(self.context));
        let Noticed { unused, remarks } = noticed;
        let PreferenceRecord { label, margin, .. } = *record;
        Ok(Encoded { texts, prompt: start, tokens, label, margin, merged, unused, remarks })
    }

    /// The prompt and the texts of a conversation.
    fn chat(
        &self,
        prompt: &[Value],
        answers: &[Vec<Value>],
        columns: &Map<String, Value>,
        noticed: &mut Noticed,
    ) -> Result<(Vec<u32>, Vec<Vec<u32>>), ExampleError> {
        let chat = self.conventions.chat.as_ref().ok_or(ExampleError::NoTemplate)?;
        let mut whole = |answer: &Vec<Value>| {
            let messages = [prompt, answer.as_slice()].concat();
            let rendered = chat.render(Chat { messages: &messages, columns }, &[])?;
            let ids = self.tokenizer.encode(&rendered.text)?;
            noticed.add(rendered);
            if self.adds_tokens() { self.ended(ids) } else { Ok(ids) }
        };
        let before = match prompt.is_empty() {
            true => Vec::new(),
            false => self.tokenizer.encode(&chat.prompt(Chat { messages: prompt, columns })?.text)?,
        };
        Ok((before, answers.iter().map(&mut whole).collect::<Result<_, _>>()?))
    }

    /// Whether TRL's trainer of the loss puts the tokenizer's own tokens around every text.
    fn adds_tokens(&self) -> bool {
        matches!(self.loss, Some(PreferenceLoss::Orpo | PreferenceLoss::Simpo))
    }

    /// The text with the end-of-text token at its end.
    fn ended(&self, mut ids: Vec<u32>) -> Result<Vec<u32>, ExampleError> {
        let end = self.conventions.end.ok_or(ExampleError::NoEnd)?;
        if ids.last() != Some(&end) {
            ids.push(end);
        }
        Ok(ids)
    }

    /// The text with the start token at its start, if the loss has one.
    fn started(&self, mut ids: Vec<u32>) -> Vec<u32> {
        match self.conventions.start.filter(|_| self.adds_tokens()) {
            Some(start) if ids.first() != Some(&start) => ids.insert(0, start),
            _ => {}
        }
        ids
    }
}
