//! Texts with labels as a dataset.

use super::class::Target;
use super::files::LabelForm;
use crate::data::DataError;
use crate::data::ragged::{Layout, RaggedDataset, RaggedItems, RaggedTokens, last, range};
use crate::data::source::numbers;
use crate::tokenizer::TokenSequence;
use hydra_core::{Batch, HostTensor};

/// Texts with labels, of up to `context` tokens each.
///
/// As a [`Dataset`](hydra_core::Dataset) an item is one text, or a text and its pair. A batch is one row of all its tokens,
/// one item after the other, without padding. Its inputs are the ids `[1, tokens]`, each token's position in its item
/// `[1, tokens]`, and, for a model with token types, the type of each token `[1, tokens]`. Part 0 of its targets is the
/// labels: classes `[items]`; of a multi-label classification, zeros and ones `[items, outputs]`; of a regression, numbers
/// `[items, outputs]`. Parts 1 to 3 are the [`Sequences`](crate::parts::Sequences): for each item, the position in the row of
/// its first token, its number of tokens, and the position in the row of its last token that is not the padding token. Every
/// item is a loss target.
pub type LabelledTexts = RaggedDataset<LabelledItems>;

/// The labels of [`LabelledTexts`].
pub struct LabelledItems {
    /// The type of each token, for a model with token types.
    types: Option<Vec<u32>>,
    /// The model's padding token.
    padding: Option<u32>,
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
    /// The items of these sequences and labels.
    pub(super) fn new(
        name: String,
        sequences: Vec<TokenSequence>,
        targets: &[Target],
        form: &LabelForm<'_>,
    ) -> Result<Self, DataError> {
        let (mut tokens, mut types) = (RaggedTokens::default(), form.token_types.then(Vec::new));
        tokens.set_lengths(sequences.iter().map(|sequence| sequence.tokens), &name)?;
        for sequence in sequences {
            tokens.push(sequence.ids, &name)?;
            types.iter_mut().for_each(|types| types.extend_from_slice(&sequence.types));
        }
        let filler = form.padding.filter(|id| (*id as usize) < form.vocabulary).unwrap_or(0);
        let items = LabelledItems { types, padding: form.padding, targets: Targets::new(targets, form) };
        Ok(Self::of_tokens(name, filler, tokens, items))
    }
}

impl RaggedItems for LabelledItems {
    fn complete(&self, batch: &mut Batch, layout: &Layout<'_>, items: &[usize]) {
        if let Some(types) = &self.types {
            let types = layout.each_token(0, |_, _, offset| types[offset] as i32);
            batch.inputs.parts.push(layout.row(types));
        }
        batch.targets.parts.push(self.targets.tensor(items));
        batch.targets.parts.extend(layout.sequences(self.padding, &[items.len()]));
    }

    fn content(&self, tokens: &RaggedTokens, to: &mut dyn FnMut(&[u8])) {
        let last = |item| last(&tokens.ids[range(&tokens.ends, item)], self.padding) as u32;
        let lasts: Vec<u32> = (0..tokens.ends.len()).map(last).collect();
        numbers(&[&tokens.ids, &tokens.ends, &lasts, self.types.as_deref().unwrap_or_default()], to);
        self.targets.content(to);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Content as _, Cut};
    use crate::tokenizer::Tokenizer;
    use hydra_core::{Dataset as _, DatasetError};

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
