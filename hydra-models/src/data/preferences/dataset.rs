//! Preference pairs as a dataset.

use super::encode::Encoded;
use super::files::PairForm;
use crate::data::examples::range;
use crate::data::source::{mean_units, numbers};
use crate::data::{Content, Cut, DataError};
use crate::objective::SEGMENTS;
use crate::ops::IGNORED;
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};

/// Pairs of texts, a chosen one and a rejected one, of up to `context` tokens each.
///
/// As a [`Dataset`] an item is one pair. A batch is one row of all its tokens, for each pair the chosen text and then the
/// rejected one, without padding: its inputs are the ids `[1, tokens]` and each token's position in its text `[1,
/// tokens]`. Every pair is one loss target.
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
pub struct PreferencePairs {
    name: String,
    /// Maximum tokens of a text.
    context: usize,
    /// The id that fills the largest batch beyond its items' tokens.
    filler: u32,
    /// All ids, one text after the other.
    ids: Vec<u32>,
    /// The end offset of each text in `ids`; texts `2 * i` and `2 * i + 1` are a pair.
    ends: Vec<u32>,
    /// The number of tokens before the answers of each pair.
    prompts: Vec<u32>,
    /// The length of each given text before truncation.
    lengths: Vec<u32>,
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
    /// Keeps the records that fit in the context. The context is at first the length of the longest text.
    pub(super) fn new(name: String, records: Vec<Encoded>, form: &PairForm<'_>) -> Result<Self, DataError> {
        let (reads, given) = (Reads::of(form), records.len());
        let fits = |record: &Encoded| match reads {
            // Nothing predicts a first token, and an answer without a token has no mean.
            Reads::Answers { .. } => record.texts.iter().all(|text| text.len() > record.prompt.max(1)),
            Reads::Lasts { .. } => record.tokens.iter().all(|tokens| *tokens <= form.context),
        };
        let lengths = records.iter().flat_map(|record| &record.tokens).map(|tokens| *tokens as u32).collect();
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
        let (mut ids, mut ends, mut prompts) = (Vec::new(), Vec::new(), Vec::new());
        for record in records {
            prompts.push(record.prompt as u32);
            for text in record.texts {
                ids.extend(text);
                let too_many = |_| DataError::TooManyTokens { name: name.clone() };
                ends.push(u32::try_from(ids.len()).map_err(too_many)?);
            }
        }
        let filler = form.conventions.end.unwrap_or(0);
        let mut dataset =
            Self { name, context: 0, filler, ids, ends, prompts, lengths, labels, margins, reads };
        dataset.context = dataset.longest();
        Ok(dataset)
    }

    /// The number of pairs.
    pub(super) fn pairs(&self) -> usize {
        self.prompts.len()
    }

    /// The length of the longest text in tokens.
    pub(super) fn longest(&self) -> usize {
        (0..self.ends.len()).map(|text| range(&self.ends, text).len()).max().unwrap_or(0)
    }

    /// Sets the maximum length of texts of this dataset and of others of its task; it is at least the
    /// [longest](Self::longest).
    pub(super) fn set_context(&mut self, context: usize) {
        assert!(context >= self.longest());
        self.context = context;
    }

    /// The batch of these pairs, each text followed by an example of `more` tokens that do not count.
    fn batch_with(&self, items: &[usize], more: impl Fn(usize) -> usize) -> Result<Batch, DatasetError> {
        let (len, mut row) = (self.len(), Row::default());
        for (pair, &index) in items.iter().enumerate() {
            if index >= len {
                return Err(DatasetError::OutOfRange { dataset: self.name.clone(), index, len });
            }
            for answer in 0..2 {
                let text = &self.ids[range(&self.ends, 2 * index + answer)];
                row.write(text, |at| self.segment(pair, answer, at, self.prompts[index] as usize));
                row.last(text, self.reads);
                row.fill(more(text.len()), self.filler);
            }
        }
        let tokens = row.ids.len();
        let of = |ids| HostTensor::int(ids, [1, tokens]);
        let units = row.lengths.iter().map(|length| *length as usize).sum();
        let margins = items.iter().map(|item| self.margins[*item]).collect();
        let mut targets = row.targets(margins, self.reads);
        if let Some(labels) = &self.labels {
            let labels = items.iter().map(|item| labels[*item]).collect();
            targets.parts.push(HostTensor::float(labels, [items.len()]));
        }
        let inputs = HostActivation { parts: vec![of(row.ids), of(row.positions)] };
        Ok(Batch { inputs, targets, items: items.len(), loss_targets: items.len(), units })
    }

    /// The segment of the token at `at` of an answer of a batch's pair.
    fn segment(&self, pair: usize, answer: usize, at: usize, prompt: usize) -> Option<usize> {
        let Reads::Answers { prompts } = self.reads else { return None };
        let of_pair = match at {
            // Nothing predicts a first token.
            0 => None,
            _ if at >= prompt => Some(answer),
            _ => (prompts && answer == 0).then_some(SEGMENTS - 1),
        };
        of_pair.map(|segment| SEGMENTS * pair + segment)
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

/// A batch under construction, one text after the other.
#[derive(Default)]
struct Row {
    ids: Vec<i32>,
    /// Each token's position in its text.
    positions: Vec<i32>,
    /// Each token's segment.
    segments: Vec<i32>,
    /// The position of the first token of each text, and its number of tokens.
    firsts: Vec<i32>,
    lengths: Vec<i32>,
    /// The position of the last token of each text that is not the padding.
    lasts: Vec<i32>,
}

impl Row {
    /// Appends a text.
    fn write(&mut self, text: &[u32], segment: impl Fn(usize) -> Option<usize>) {
        self.firsts.push(self.ids.len() as i32);
        self.lengths.push(text.len() as i32);
        // Ids were checked to be in the vocabulary.
        self.ids.extend(text.iter().map(|id| *id as i32));
        self.positions.extend(0..text.len() as i32);
        self.segments.extend((0..text.len()).map(|at| segment(at).map_or(-1, |segment| segment as i32)));
    }

    /// Notes where the text that was written last ends.
    fn last(&mut self, text: &[u32], reads: Reads) {
        let Reads::Lasts { padding } = reads else { return };
        let last = text.iter().rposition(|id| Some(*id) != padding).unwrap_or(0);
        self.lasts.push((self.ids.len() - text.len() + last) as i32);
    }

    /// Appends an example of this many tokens that do not count.
    fn fill(&mut self, tokens: usize, filler: u32) {
        let end = self.ids.len() + tokens;
        self.ids.resize(end, filler as i32);
        self.positions.extend(0..tokens as i32);
        self.segments.resize(end, -1);
    }

    /// The targets of a batch of pairs with these margins.
    fn targets(&self, margins: Vec<f32>, reads: Reads) -> HostActivation {
        let (pairs, tokens) = (margins.len(), self.ids.len());
        if let Reads::Lasts { .. } = reads {
            let sequences = [&self.firsts, &self.lengths, &self.lasts];
            let sequences = sequences.map(|of| HostTensor::int(of.clone(), [pairs, 2]));
            let margins = HostTensor::float(margins, [pairs]);
            return HostActivation { parts: [vec![margins], sequences.into()].concat() };
        }
        let mut lengths = vec![0.0; SEGMENTS * pairs];
        let counted = self.segments.iter().filter_map(|segment| usize::try_from(*segment).ok());
        counted.for_each(|segment| lengths[segment] += 1.0);
        let ids = self.ids.iter().zip(&self.segments);
        let ids = ids.map(|(id, segment)| if *segment < 0 { IGNORED } else { *id }).collect();
        let parts = vec![
            HostTensor::int(ids, [1, tokens]),
            HostTensor::int(self.segments.clone(), [1, tokens]),
            HostTensor::float(lengths, [pairs, SEGMENTS]),
        ];
        HostActivation { parts }
    }
}

impl Dataset for PreferencePairs {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.pairs()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        self.batch_with(items, |_| 0)
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        let first: Vec<usize> = (0..items.min(self.len())).collect();
        let units = mean_units(self.ids.len(), self.len(), first.len());
        Ok(Batch { units, ..self.batch_with(&first, |tokens| self.context - tokens)? })
    }

    fn mean_part(&self) -> f64 {
        self.ids.len() as f64 / (2 * self.len() * self.context) as f64
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

impl Content for PreferencePairs {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        let reads = match self.reads {
            Reads::Answers { prompts } => [0, u32::from(prompts)],
            // No id is as large as the number for no padding.
            Reads::Lasts { padding } => [1, padding.unwrap_or(u32::MAX)],
        };
        numbers(&[&reads, &self.ids, &self.ends, &self.prompts], to);
        let labels = self.labels.as_ref().map(|labels| labels.iter().map(|label| *label as u32).collect());
        labels.into_iter().for_each(|labels: Vec<u32>| numbers(&[&labels], to));
        if self.margins.iter().any(|margin| *margin != 0.0) {
            let bits: Vec<u32> = self.margins.iter().map(|margin| margin.to_bits()).collect();
            numbers(&[&bits], to);
        }
        Ok(())
    }

    fn units(&self) -> usize {
        self.ids.len()
    }

    fn cut_by(&self, context: usize) -> Cut {
        Cut::measure(&self.lengths, context)
    }
}
