//! Preference pairs as a dataset.

use super::encode::Encoded;
use super::files::PairForm;
use crate::data::DataError;
use crate::data::ragged::{Layout, RaggedDataset, RaggedItems, RaggedTokens};
use crate::data::source::numbers;
use crate::objective::SEGMENTS;
use crate::ops::IGNORED;
use hydra_core::{Batch, HostTensor};

/// Pairs of texts, a chosen one and a rejected one, of up to `context` tokens each.
///
/// As a [`Dataset`](hydra_core::Dataset) an item is one pair. A batch is one row of all its tokens, for each pair the chosen
/// text and then the rejected one, without padding: its inputs are the ids `[1, tokens]` and each token's position in its
/// text `[1, tokens]`. Every pair is one loss target.
///
/// For a preference loss the targets are: part 0, the ids of the tokens that count and [`IGNORED`] elsewhere, `[1,
/// tokens]`; part 1, the segment of each such token and -1 elsewhere, `[1, tokens]`; part 2, the number of tokens of each
/// segment, `F32` `[pairs, 3]`. Segments of pair `i` are `3 * i` (the chosen answer), `3 * i + 1` (the rejected one) and
/// `3 * i + 2` (the prompt before the chosen answer, without its first token, if the loss reads it).
///
/// For KTO an item is one answer. The first text of its pair is the prompt with the answer, and the second one the prompt
/// with the answer of the item before it in the dataset; the first item has that of the last one. (TRL takes the item
/// before it in blocks of a minibatch.) Part 3 of the targets names the desirable answers, `F32` `[items]`, 1 or 0.
///
/// For a reward model, part 0 is the margin of each pair, `F32` `[pairs]`, and parts 1 to 3 are the
/// [`Sequences`](crate::parts::Sequences) of the texts, `[pairs, 2]`.
pub type PreferencePairs = RaggedDataset<Pairs>;

/// What [`PreferencePairs`] have in addition to their texts. Texts `2 * i` and `2 * i + 1` are a pair.
pub struct Pairs {
    /// The number of tokens before the answers of each pair.
    prompts: Vec<u32>,
    /// Whether each item is desirable, for KTO.
    labels: Option<Vec<f32>>,
    /// The margin of each pair, for reward models.
    margins: Vec<f32>,
    reads: Reads,
}

/// What the targets of a batch hold.
#[derive(Clone, Copy, Debug)]
enum Reads {
    /// The answers, and the chosen prompts if `prompts`.
    Answers { prompts: bool },
    /// The last token of each text that is not the padding.
    Lasts { padding: Option<u32> },
}

impl PreferencePairs {
    /// Keeps the records that fit in the context.
    pub(super) fn new(name: String, records: Vec<Encoded>, form: &PairForm<'_>) -> Result<Self, DataError> {
        let (reads, given, mut tokens) = (Reads::of(form), records.len(), RaggedTokens::default());
        let fits = |record: &Encoded| match reads {
            // Nothing predicts a first token, and an answer without a token has no mean.
            Reads::Answers { .. } => record.texts.iter().all(|text| text.len() > record.prompt.max(1)),
            Reads::Lasts { .. } => record.tokens.iter().all(|tokens| *tokens <= form.context),
        };
        tokens.set_lengths(records.iter().flat_map(|record| record.tokens.iter().copied()), &name)?;
        let mut records: Vec<Encoded> = records.into_iter().filter(fits).collect();
        if records.is_empty() {
            return Err(DataError::NoPairs { name, pairs: given, context: form.context });
        }
        let labels = records.iter().map(|record| Some(f32::from(u8::from(record.label?)))).collect();
        let labels: Option<Vec<f32>> = labels;
        if labels.is_some() {
            add_mismatched(&mut records, form.context);
        }
        let margins = records.iter().map(|record| record.margin).collect();
        let prompts = records.iter().map(|record| record.prompt as u32).collect();
        for text in records.into_iter().flat_map(|record| record.texts) {
            tokens.push(text, &name)?;
        }
        let filler = form.conventions.end.unwrap_or(0);
        Ok(Self::of_tokens(name, filler, tokens, Pairs { prompts, labels, margins, reads }))
    }
}

impl Pairs {
    /// The segment of the token at `at` of an answer of a batch's pair; `prompt` is the number of tokens before the answer.
    fn segment(&self, pair: usize, answer: usize, at: usize, prompt: u32) -> Option<usize> {
        let Reads::Answers { prompts } = self.reads else { return None };
        let of_pair = match at {
            // Nothing predicts a first token.
            0 => None,
            _ if at >= prompt as usize => Some(answer),
            _ => (prompts && answer == 0).then_some(SEGMENTS - 1),
        };
        of_pair.map(|segment| SEGMENTS * pair + segment)
    }

    /// The ids of the tokens that count, their segments, and the number of tokens of each segment.
    fn answers(&self, ids: &[i32], layout: &Layout<'_>, items: &[usize]) -> [HostTensor; 3] {
        let segments = layout.each_token(-1, |text, at, _| {
            let segment = self.segment(text / 2, text % 2, at, self.prompts[items[text / 2]]);
            segment.map_or(-1, |segment| segment as i32)
        });
        let mut lengths = vec![0.0; SEGMENTS * items.len()];
        let counted = segments.iter().filter_map(|segment| usize::try_from(*segment).ok());
        counted.for_each(|segment| lengths[segment] += 1.0);
        let ids = ids.iter().zip(&segments);
        let ids = ids.map(|(id, segment)| if *segment < 0 { IGNORED } else { *id }).collect();
        let lengths = HostTensor::float(lengths, [items.len(), SEGMENTS]);
        [layout.row(ids), layout.row(segments), lengths]
    }
}

impl RaggedItems for Pairs {
    const PARTS: usize = 2;

    fn complete(&self, batch: &mut Batch, layout: &Layout<'_>, items: &[usize]) {
        let each = |values: &[f32]| {
            HostTensor::float(items.iter().map(|item| values[*item]).collect(), [items.len()])
        };
        let targets = &mut batch.targets.parts;
        match self.reads {
            Reads::Answers { .. } => {
                targets.extend(self.answers(batch.inputs.parts[0].as_i32(), layout, items));
            }
            Reads::Lasts { padding } => {
                targets.push(each(&self.margins));
                targets.extend(layout.sequences(padding, &[items.len(), 2]));
            }
        }
        targets.extend(self.labels.as_deref().map(each));
    }

    fn content(&self, tokens: &RaggedTokens, to: &mut dyn FnMut(&[u8])) {
        let reads = match self.reads {
            Reads::Answers { prompts } => [0, u32::from(prompts)],
            // No id is as large as the number for no padding.
            Reads::Lasts { padding } => [1, padding.unwrap_or(u32::MAX)],
        };
        numbers(&[&reads, &tokens.ids, &tokens.ends, &self.prompts], to);
        if let Some(labels) = &self.labels {
            numbers(&[&labels.iter().map(|label| *label as u32).collect::<Vec<_>>()], to);
        }
        if self.margins.iter().any(|margin| *margin != 0.0) {
            numbers(&[&self.margins.iter().map(|margin| margin.to_bits()).collect::<Vec<_>>()], to);
        }
    }
}

/// Gives each record with one answer a second text: its prompt with the answer of the record before it.
fn add_mismatched(records: &mut [Encoded], context: usize) {
    let answer = |record: &Encoded| record.texts[0][record.prompt..].to_vec();
    let answers: Vec<Vec<u32>> = records.iter().map(answer).collect();
    for (at, record) in records.iter_mut().enumerate() {
        let before = &answers[at.checked_sub(1).unwrap_or(answers.len() - 1)];
        let mut text = [&record.texts[0][..record.prompt], before].concat();
        text.truncate(context);
        record.texts.push(text);
    }
}

impl Reads {
    fn of(form: &PairForm<'_>) -> Self {
        match form.loss {
            Some(loss) => Self::Answers { prompts: loss.reads_prompts() },
            None => Self::Lasts { padding: form.padding },
        }
    }
}
