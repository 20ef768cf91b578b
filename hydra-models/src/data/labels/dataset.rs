//! Texts with labels as a dataset.

use super::class::Target;
use super::files::LabelForm;
use crate::data::examples::range;
use crate::data::source::{mean_units, numbers};
use crate::data::{Content, Cut, DataError};
use crate::tokenizer::TokenSequence;
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};
use std::fmt;

/// Texts with labels, of up to `context` tokens each.
///
/// As a [`Dataset`] an item is one text, or a text and its pair. A batch is one row of all its tokens, one item after the
/// other, without padding. Its inputs are the ids `[1, tokens]`, each token's position in its item `[1, tokens]`, and, for a
/// model with token types, the type of each token `[1, tokens]`. Part 0 of its targets is the labels: classes `[items]`;
/// of a multi-label classification, zeros and ones `[items, outputs]`; of a regression, numbers `[items, outputs]`. Parts
/// 1 to 3 are the [`Sequences`](crate::parts::Sequences): for each item, the position in the row of its first token, its
/// number of tokens, and the position in the row of its last token that is not the padding token. Every item is a loss
/// target.
pub struct LabelledTexts {
    name: String,
    /// Maximum tokens of an item.
    context: usize,
    /// The id that fills the largest batch beyond its items' tokens.
    filler: u32,
    /// All ids, one item after the other.
    ids: Vec<u32>,
    /// The type of each token, for a model with token types.
    types: Option<Vec<u32>>,
    /// The end offset of each item in `ids`.
    ends: Vec<u32>,
    /// The position in its item of each item's last token that is not padding.
    lasts: Vec<u32>,
    /// The length of each item before truncation.
    lengths: Vec<u32>,
    targets: Targets,
}

/// The labels of all items, with the model's numbers of classes.
#[derive(PartialEq)]
enum Targets {
    /// The class of each item.
    Single(Vec<u32>),
    /// The classes of all items, one item after the other, and the end offset of each item.
    Several { classes: Vec<u32>, ends: Vec<u32>, outputs: usize },
    /// The numbers of each item.
    Numbers { values: Vec<f32>, outputs: usize },
}

impl LabelledTexts {
    /// The items of these sequences and labels. The context is at first the length of the longest.
    pub(super) fn new(
        name: String,
        sequences: Vec<TokenSequence>,
        targets: &[Target],
        form: &LabelForm<'_>,
    ) -> Result<Self, DataError> {
        let too_many = || DataError::TooManyTokens { name: name.clone() };
        let of_32 = |tokens: usize| u32::try_from(tokens).map_err(|_| too_many());
        let (mut ids, mut types, mut ends) = (Vec::new(), form.token_types.then(Vec::new), Vec::new());
        let (mut lasts, mut lengths) = (Vec::new(), Vec::new());
        for sequence in sequences {
            let last = sequence.ids.iter().rposition(|id| Some(*id) != form.padding);
            lasts.push(of_32(last.unwrap_or(0))?);
            lengths.push(of_32(sequence.tokens)?);
            ids.extend(sequence.ids);
            types.iter_mut().for_each(|types| types.extend_from_slice(&sequence.types));
            ends.push(of_32(ids.len())?);
        }
        let context = (0..ends.len()).map(|item| range(&ends, item).len()).max().unwrap_or(0);
        let filler = form.padding.filter(|id| (*id as usize) < form.vocabulary).unwrap_or(0);
        let targets = Targets::new(targets, form);
        Ok(Self { name, context, filler, ids, types, ends, lasts, lengths, targets })
    }

    /// The length of the longest item in tokens.
    pub(super) fn longest(&self) -> usize {
        (0..self.ends.len()).map(|item| range(&self.ends, item).len()).max().unwrap_or(0)
    }

    /// Sets the maximum length of items of this dataset and of others of its task; it is at least the
    /// [longest](Self::longest).
    pub(super) fn set_context(&mut self, context: usize) {
        assert!(context >= self.longest());
        self.context = context;
    }

    /// The batch of these items, each followed by an example of `more` filler tokens that no label refers to.
    fn batch_with(&self, items: &[usize], more: impl Fn(usize) -> usize) -> Result<Batch, DatasetError> {
        let (n, len) = (items.len(), self.len());
        let mut row = Row { types: self.types.as_ref().map(|_| Vec::new()), ..Row::default() };
        for &index in items {
            if index >= len {
                return Err(DatasetError::OutOfRange { dataset: self.name.clone(), index, len });
            }
            let tokens = range(&self.ends, index);
            let types = self.types.as_ref().map(|types| &types[tokens.clone()]);
            row.write(&self.ids[tokens.clone()], types, self.lasts[index]);
            row.fill(more(tokens.len()), self.filler);
        }
        let Row { ids, positions, types, firsts, lengths, lasts } = row;
        let (tokens, units) = (ids.len(), lengths.iter().map(|length| *length as usize).sum());
        let inputs = [Some(ids), Some(positions), types].into_iter().flatten();
        let sequences = [firsts, lengths, lasts].map(|values| HostTensor::int(values, [n]));
        Ok(Batch {
            inputs: HostActivation { parts: inputs.map(|part| HostTensor::int(part, [1, tokens])).collect() },
            targets: HostActivation { parts: [vec![self.targets.tensor(items)], sequences.into()].concat() },
            items: n,
            loss_targets: n,
            units,
        })
    }
}

/// A batch under construction, one item after the other.
#[derive(Default)]
struct Row {
    ids: Vec<i32>,
    /// Each token's position in its item.
    positions: Vec<i32>,
    types: Option<Vec<i32>>,
    firsts: Vec<i32>,
    lengths: Vec<i32>,
    lasts: Vec<i32>,
}

impl Row {
    /// Appends an item whose last token that is not padding is `last`.
    fn write(&mut self, ids: &[u32], types: Option<&[u32]>, last: u32) {
        let first = self.ids.len() as i32;
        self.firsts.push(first);
        self.lengths.push(ids.len() as i32);
        self.lasts.push(first + last as i32);
        // Ids were checked to be in the vocabulary.
        self.ids.extend(ids.iter().map(|id| *id as i32));
        self.positions.extend(0..ids.len() as i32);
        for (all, types) in self.types.iter_mut().zip(types) {
            all.extend(types.iter().map(|of_token| *of_token as i32));
        }
    }

    /// Appends an example of this many tokens that is not an item.
    fn fill(&mut self, tokens: usize, filler: u32) {
        let end = self.ids.len() + tokens;
        self.ids.resize(end, filler as i32);
        self.positions.extend(0..tokens as i32);
        self.types.iter_mut().for_each(|types| types.resize(end, 0));
    }
}

impl Targets {
    /// The labels of the model of `form`. Each of its numbers is below its number of outputs.
    fn new(targets: &[Target], form: &LabelForm<'_>) -> Self {
        let (outputs, number) = (form.outputs, |class: &u32| form.numbers[*class as usize] as u32);
        let (mut single, mut several, mut ends, mut values) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for target in targets {
            match target {
                Target::Class(class) => single.push(number(class)),
                Target::Classes(classes) => {
                    several.extend(classes.iter().map(number));
                    ends.push(several.len() as u32);
                }
                Target::Numbers(numbers) => {
                    let mut of_item = vec![0.0; outputs];
                    for (value, at) in numbers.iter().zip(form.numbers) {
                        of_item[*at as usize] = *value;
                    }
                    values.extend(of_item);
                }
            }
        }
        match targets.first() {
            Some(Target::Classes(_)) => Self::Several { classes: several, ends, outputs },
            Some(Target::Numbers(_)) => Self::Numbers { values, outputs },
            _ => Self::Single(single),
        }
    }

    /// The labels of these items.
    fn tensor(&self, items: &[usize]) -> HostTensor {
        let n = items.len();
        match self {
            Self::Single(classes) => {
                HostTensor::int(items.iter().map(|item| classes[*item] as i32).collect(), [n])
            }
            Self::Several { classes, ends, outputs } => {
                let mut values = vec![0.0; n * outputs];
                for (row, item) in values.chunks_exact_mut(*outputs).zip(items) {
                    classes[range(ends, *item)].iter().for_each(|class| row[*class as usize] = 1.0);
                }
                HostTensor::float(values, [n, *outputs])
            }
            Self::Numbers { values, outputs } => {
                let of_item = |item: &usize| &values[item * outputs..(item + 1) * outputs];
                HostTensor::float(items.iter().flat_map(of_item).copied().collect(), [n, *outputs])
            }
        }
    }

    fn content(&self, to: &mut dyn FnMut(&[u8])) {
        let header = |form, outputs: &usize| [form, *outputs as u32];
        match self {
            Self::Single(classes) => numbers(&[&header(0, &0), classes], to),
            Self::Several { classes, ends, outputs } => numbers(&[&header(1, outputs), classes, ends], to),
            Self::Numbers { values, outputs } => {
                let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
                numbers(&[&header(2, outputs), &bits], to);
            }
        }
    }
}

impl Dataset for LabelledTexts {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.ends.len()
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
        self.ids.len() as f64 / (self.len() * self.context) as f64
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

impl Content for LabelledTexts {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        numbers(&[&self.ids, &self.ends, &self.lasts, self.types.as_deref().unwrap_or_default()], to);
        self.targets.content(to);
        Ok(())
    }

    fn units(&self) -> usize {
        self.ids.len()
    }

    fn cut_by(&self, context: usize) -> Cut {
        Cut::measure(&self.lengths, context)
    }
}

impl fmt::Debug for LabelledTexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LabelledTexts")
            .field("name", &self.name)
            .field("texts", &self.ends.len())
            .field("tokens", &self.ids.len())
            .field("context", &self.context)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    const FORM: LabelForm<'static> = LabelForm {
        tokenizer: &Tokenizer::Bytes,
        context: 9,
        vocabulary: 10,
        padding: None,
        token_types: false,
        numbers: &[2, 0, 1],
        outputs: 3,
    };

    /// Items of these ids; the second half of an item's tokens are of type 1.
    fn texts(items: &[&[u32]], targets: &[Target], form: &LabelForm<'_>) -> LabelledTexts {
        let sequence = |ids: &&[u32]| TokenSequence {
            ids: ids.to_vec(),
            types: (0..ids.len()).map(|at| u32::from(2 * at >= ids.len())).collect(),
            tokens: ids.len() + 1,
        };
        LabelledTexts::new("the data".to_owned(), items.iter().map(sequence).collect(), targets, form)
            .unwrap()
    }

    fn two(form: &LabelForm<'_>) -> LabelledTexts {
        texts(&[&[1, 2, 3], &[4, 5]], &[Target::Class(0), Target::Class(2)], form)
    }

    fn ints(parts: &[HostTensor]) -> Vec<Vec<i32>> {
        parts.iter().map(|part| part.as_i32().to_vec()).collect()
    }

    fn content(data: &LabelledTexts) -> Vec<u8> {
        let mut all = Vec::new();
        data.content(&mut |bytes| all.extend_from_slice(bytes)).unwrap();
        all
    }

    #[test]
    fn a_batch_is_one_row_with_the_places_of_its_items() {
        let data = two(&LabelForm { token_types: true, ..FORM });
        let batch = data.batch(&[1, 0]).unwrap();
        assert_eq!(ints(&batch.inputs.parts), [[4, 5, 1, 2, 3], [0, 1, 0, 1, 2], [0, 1, 0, 0, 1]]);
        assert_eq!(batch.inputs.parts[2].shape, [1, 5]);
        let targets = ints(&batch.targets.parts);
        assert_eq!(targets, [[1, 2], [0, 2], [2, 3], [1, 4]], "the model's classes, firsts, lengths, lasts");
        assert!(batch.targets.parts.iter().all(|part| part.shape == [2]));
        assert_eq!((batch.items, batch.loss_targets, batch.units, data.unit()), (2, 2, 5, "tokens"));
        assert!(matches!(data.batch(&[2]), Err(DatasetError::OutOfRange { index: 2, len: 2, .. })));
        assert_eq!(two(&FORM).batch(&[0]).unwrap().inputs.parts.len(), 2);
    }

    #[test]
    fn the_last_token_is_not_padding() {
        let items: [&[u32]; 4] = [&[7, 1, 7, 7], &[7, 7], &[1, 2], &[7, 3]];
        let targets = vec![Target::Class(0); 4];
        let lasts = |padding| {
            let data = texts(&items, &targets, &LabelForm { padding, ..FORM });
            data.batch(&[0, 1, 2, 3]).unwrap().targets.parts[3].as_i32().to_vec()
        };
        assert_eq!(lasts(Some(7)), [1, 4, 7, 9], "the first one where all are padding");
        assert_eq!(lasts(None), [3, 5, 7, 9]);
    }

    #[test]
    fn no_batch_is_larger_than_the_largest() {
        let mut data = two(&LabelForm { token_types: true, padding: Some(9), ..FORM });
        data.set_context(5);
        let largest = data.largest(2).unwrap();
        assert_eq!(
            ints(&largest.inputs.parts),
            [[1, 2, 3, 9, 9, 4, 5, 9, 9, 9], [0, 1, 2, 0, 1, 0, 1, 0, 1, 2], [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]]
        );
        assert_eq!(ints(&largest.targets.parts), [[2, 1], [0, 5], [3, 2], [2, 6]]);
        assert_eq!((largest.items, largest.loss_targets, largest.units), (2, 2, 5), "tokens as in the mean");
        assert_eq!((data.mean_part(), data.units()), (0.5, 5));
        assert_eq!(data.largest(1).unwrap().inputs.parts[0].shape, [1, 5]);
        assert_eq!(data.largest(9).unwrap().items, 2);
    }

    #[test]
    fn several_classes_and_numbers_have_the_places_of_the_model() {
        let classes = [Target::Classes(vec![0, 2]), Target::Classes(vec![]), Target::Classes(vec![1])];
        let items: [&[u32]; 3] = [&[1], &[2], &[3]];
        let batch = texts(&items, &classes, &LabelForm { outputs: 4, ..FORM }).batch(&[2, 0, 1]).unwrap();
        let labels = &batch.targets.parts[0];
        assert_eq!(labels.shape, [3, 4]);
        assert_eq!(labels.as_f32(), [1., 0., 0., 0., 0., 1., 1., 0., 0., 0., 0., 0.]);
        let numbers = [vec![0.5, 1.5, 2.5], vec![3.5, 4.5, 5.5]].map(Target::Numbers);
        let batch = texts(&items[..2], &numbers, &FORM).batch(&[1, 0]).unwrap();
        assert_eq!(batch.targets.parts[0].shape, [2, 3]);
        assert_eq!(batch.targets.parts[0].as_f32(), [4.5, 5.5, 3.5, 1.5, 2.5, 0.5]);
    }

    #[test]
    fn what_determines_batches_is_the_content() {
        let one = content(&two(&FORM));
        assert_eq!(one, content(&two(&LabelForm { context: 5, ..FORM })));
        for form in [
            LabelForm { numbers: &[0, 1, 2], ..FORM },
            LabelForm { padding: Some(5), ..FORM },
            LabelForm { token_types: true, ..FORM },
        ] {
            assert_ne!(one, content(&two(&form)), "{form:?}");
        }
        let of = |targets: [Target; 2], outputs| {
            let numbers = &[0, 1, 2][..outputs];
            content(&texts(&[&[1, 2, 3], &[4, 5]], &targets, &LabelForm { outputs, numbers, ..FORM }))
        };
        let single = of([Target::Class(0), Target::Class(0)], 1);
        let several = of([Target::Classes(vec![0]), Target::Classes(vec![0])], 1);
        let numbers = of([Target::Numbers(vec![0.0]), Target::Numbers(vec![0.0])], 1);
        assert!(single != several && several != numbers && numbers != single);
        assert_ne!(numbers, of([Target::Numbers(vec![0.0]), Target::Numbers(vec![1.0])], 1));
        assert_ne!(several, of([Target::Classes(vec![0]), Target::Classes(vec![0])], 2));
    }

    #[test]
    fn what_a_context_truncates_is_measured_before_truncation() {
        let cut = two(&FORM).cut_by(3);
        assert_eq!(cut, Cut { examples: 1, tokens: 1, of_examples: 2, of_tokens: 7, longest: 4 });
    }
}
