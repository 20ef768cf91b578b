//! Row files of preference data, in up to three splits.

use super::PreferencePairs;
use super::encode::Encoded;
use super::record::PreferenceRecord;
use crate::data::examples::{Column, RecordFiles, RecordOrigin, RowFiles, Tally};
use crate::data::{DataError, RowPosition, Split, TokenSplits, ragged};
use crate::objective::PreferenceLoss;
use crate::tokenizer::{Conventions, Tokenizer};
use hydra_core::Dataset as _;
use std::path::Path;

/// Preference data, held in memory.
pub type PreferenceFiles = RecordFiles<PreferenceRecord>;

/// Form of the datasets, and the model that they are for.
#[derive(Clone, Copy, Debug)]
pub struct PairForm<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Start, end-of-text and chat conventions of the model.
    pub conventions: &'a Conventions,
    /// Maximum tokens of a text, prompt and answer. Longer texts are truncated for a preference loss, and their pairs
    /// left out for a reward model, as in TRL.
    pub context: usize,
    /// The size of the model's vocabulary.
    pub vocabulary: usize,
    /// The loss; a reward model's if `None`.
    pub loss: Option<PreferenceLoss>,
    /// The model's padding token, which a reward model does not read.
    pub padding: Option<u32>,
}

impl PreferenceFiles {
    /// Opens a file of rows or a directory with one for each split, as
    /// [`ExampleFiles::open`](crate::data::ExampleFiles::open) does. A row has a `prompt`, and a `chosen` and a `rejected`
    /// answer, as texts or as lists of messages; for KTO also a `completion` with a `label`. `columns` maps columns to
    /// these fields. Without a `prompt`, it is what both answers start with; only a reward model, without a loss, needs
    /// none. For KTO, pairs are first all chosen answers and then all rejected ones, as in TRL.
    ///
    /// # Errors
    /// A path without such files, a file that cannot be read, or a row without two different answers.
    pub fn open(path: &Path, columns: &[Column], loss: Option<PreferenceLoss>) -> Result<Self, DataError> {
        if !RowFiles::are_at(path) {
            return Err(DataError::NoPreferences { path: path.to_owned() });
        }
        let read = |origin: RecordOrigin<'_>, fields, tally: &mut Tally| {
            PreferenceRecord::from_fields(fields, loss, origin.is_table(), tally)
                .map_err(|found| origin.wrong(found))
        };
        let mut files = Self::read(path, columns, read)?;
        if loss == Some(PreferenceLoss::Kto) {
            for rows in files.splits.iter_mut().flatten() {
                rows.records = alone(&rows.records).into();
            }
        }
        Ok(files)
    }

    /// Builds datasets of one context length from these splits.
    ///
    /// # Errors
    /// A missing split, a row that cannot be encoded for the model, or a split without any pair that fits in the context.
    pub fn splits(&self, splits: &[Split], form: &PairForm<'_>) -> Result<TokenSplits, DataError> {
        let kto = form.loss == Some(PreferenceLoss::Kto);
        let (mut tally, mut skipped, mut unlearned) = (Tally::default(), 0, 0);
        let mut datasets = Vec::new();
        for split in splits {
            let (name, rows) = self.split(*split)?;
            let mut records = rows.encode(|origin, record| form.encode_at(origin, record))?;
            for record in &mut records {
                tally.remarks.add(std::mem::take(&mut record.remarks));
                tally.unused(record.unused.iter());
            }
            unlearned += records.iter().filter(|record| record.is_equal()).count();
            tally.add(&rows.tally);
            tally.merged += records.iter().filter(|record| form.loss.is_some() && record.merged).count();
            let all = records.len();
            let dataset = PreferencePairs::new(name, records, form)?;
            skipped += all - dataset.len();
            datasets.push(dataset);
        }
        let splits = ragged::splits(if kto { "answers" } else { "pairs" }, datasets, form.context);
        Ok(TokenSplits { skipped, unlearned, tally, ..splits })
    }
}

impl PairForm<'_> {
    fn encode_at(&self, origin: RecordOrigin<'_>, record: &PreferenceRecord) -> Result<Encoded, DataError> {
        let pair = self.encode(record).map_err(|source| origin.not_encoded(source))?;
        pair.texts.iter().try_for_each(|text| origin.check(text, self.vocabulary))?;
        Ok(pair)
    }
}

/// The rows with one answer each: those of pairs are first all chosen ones and then all rejected ones.
fn alone(rows: &[(usize, RowPosition, PreferenceRecord)]) -> Vec<(usize, RowPosition, PreferenceRecord)> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for (file, place, record) in rows {
        match record.label {
            Some(_) => first.push((*file, *place, record.clone())),
            None => {
                first.push((*file, *place, record.alone(0)));
                second.push((*file, *place, record.alone(1)));
            }
        }
    }
    [first, second].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Content;
    use hydra_core::Batch;
    use std::fs;
    use std::sync::Arc;

    fn open(text: &str, loss: Option<PreferenceLoss>) -> Result<PreferenceFiles, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        fs::write(&path, text).unwrap();
        PreferenceFiles::open(&path, &[], loss).map_err(|error| error.to_string())
    }

    const ROWS: &str = "{\"prompt\": \"ab\", \"chosen\": \"c\", \"rejected\": \"de\"}\n\
                        {\"prompt\": \"f\", \"chosen\": \"gh\", \"rejected\": \"i\"}\n";

    fn form<'a>(conventions: &'a Conventions, loss: Option<PreferenceLoss>, context: usize) -> PairForm<'a> {
        PairForm {
            tokenizer: &Tokenizer::Bytes,
            conventions,
            context,
            vocabulary: 256,
            loss,
            padding: Some(0),
        }
    }

    fn splits(loss: Option<PreferenceLoss>, context: usize) -> TokenSplits {
        let conventions = Conventions::load(&Tokenizer::Bytes, None).unwrap();
        open(ROWS, loss).unwrap().splits(&[Split::Train], &form(&conventions, loss, context)).unwrap()
    }

    fn batch(loss: Option<PreferenceLoss>, items: &[usize]) -> Batch {
        splits(loss, 99).splits[0].batch(items).unwrap()
    }

    fn ints(part: &hydra_core::HostTensor) -> &[i32] {
        part.as_i32()
    }

    #[test]
    fn a_batch_of_answers_says_where_they_are() {
        let batch = batch(Some(PreferenceLoss::Dpo), &[0, 1]);
        let ids: Vec<i32> = "abc\0abde\0fgh\0fi\0".bytes().map(i32::from).collect();
        assert_eq!(ints(&batch.inputs.parts[0]), ids);
        assert_eq!(ints(&batch.inputs.parts[1]), [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]);
        let targets = &batch.targets.parts;
        let segments = [-1, -1, 0, 0, -1, -1, 1, 1, 1, -1, 3, 3, 3, -1, 4, 4];
        assert_eq!(ints(&targets[1]), segments);
        let kept: Vec<i32> = ids.iter().zip(segments).map(|(id, of)| if of < 0 { -1 } else { *id }).collect();
        assert_eq!(ints(&targets[0]), kept);
        assert_eq!(
            (targets[2].as_f32(), &targets[2].shape[..]),
            (&[2.0, 3.0, 0.0, 3.0, 2.0, 0.0][..], &[2, 3][..])
        );
        assert_eq!((batch.items, batch.loss_targets, batch.units, targets.len()), (2, 2, 16, 3));
        let prompts = self::batch(Some(PreferenceLoss::Orpo), &[0]);
        assert_eq!(ints(&prompts.targets.parts[1]), [-1, 2, 0, 0, -1, -1, 1, 1, 1]);
        assert_eq!(prompts.targets.parts[2].as_f32(), [2.0, 3.0, 1.0]);
    }

    #[test]
    fn a_batch_for_a_reward_model_has_sequences() {
        let batch = batch(None, &[1]);
        assert_eq!(ints(&batch.inputs.parts[0]), "fgh\0fi\0".bytes().map(i32::from).collect::<Vec<_>>());
        let sequences: Vec<&[i32]> = batch.targets.parts[1..].iter().map(ints).collect();
        assert_eq!(sequences, [[0, 4], [4, 3], [2, 5]], "the end token is the padding");
        assert_eq!((batch.items, batch.loss_targets), (1, 1));
    }

    #[test]
    fn a_batch_of_rated_answers_has_them_with_the_prompts_of_others() {
        let batch = batch(Some(PreferenceLoss::Kto), &[0, 3]);
        // Answers are `c` and `gh`, and then `de` and `i`. Each prompt also has the answer of the row before it.
        let ids: Vec<i32> = "abc\0abi\0fi\0fde\0".bytes().map(i32::from).collect();
        assert_eq!(ints(&batch.inputs.parts[0]), ids);
        let targets = &batch.targets.parts;
        assert_eq!(ints(&targets[1]), [-1, -1, 0, 0, -1, -1, 1, 1, -1, 3, 3, -1, 4, 4, 4]);
        assert_eq!(targets[2].as_f32(), [2.0, 2.0, 0.0, 2.0, 3.0, 0.0]);
        assert_eq!((targets[3].as_f32(), targets.len()), (&[1.0, 0.0][..], 4));
    }

    #[test]
    fn long_texts_are_truncated_or_left_out() {
        let cut = splits(Some(PreferenceLoss::Dpo), 4);
        assert_eq!((cut.items, cut.context, cut.skipped, cut.splits[0].len()), ("pairs", 4, 0, 2));
        assert_eq!((cut.cut.examples, cut.cut.tokens, cut.cut.longest), (1, 1, 5));
        let short = splits(Some(PreferenceLoss::Dpo), 2);
        assert_eq!((short.skipped, short.splits[0].len()), (1, 1), "the first prompt alone has 2 tokens");
        let rewards = splits(None, 4);
        assert_eq!((rewards.skipped, rewards.splits[0].len(), rewards.context), (1, 1, 4));
        let conventions = Conventions::load(&Tokenizer::Bytes, None).unwrap();
        let files = open(ROWS, Some(PreferenceLoss::Dpo)).unwrap();
        let error =
            files.splits(&[Split::Train], &form(&conventions, Some(PreferenceLoss::Dpo), 1)).err().unwrap();
        assert!(error.to_string().contains("has no pairs within the context"), "{error}");
    }

    #[test]
    fn no_batch_is_larger_than_the_largest() {
        for loss in [None, Some(PreferenceLoss::Dpo)] {
            let data = &splits(loss, 99).splits[0];
            let largest = data.largest(2).unwrap();
            assert_eq!((largest.inputs.parts[0].shape.clone(), largest.items), (vec![1, 20], 2));
            assert_eq!(data.largest(1).unwrap().inputs.parts[0].shape, [1, 10]);
        }
    }

    #[test]
    fn a_wrong_row_is_named_with_its_file_and_line() {
        let error = open("{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"b\"}\n", None).unwrap_err();
        assert!(error.contains("line 1 of `") && error.contains("are equal"), "{error}");
        let error = open("{\"text\": \"a\"}\n", None).unwrap_err();
        assert!(error.contains("the row has no `chosen`, but `text`"), "{error}");
        let error = PreferenceFiles::open(Path::new("none.jsonl"), &[], None).unwrap_err().to_string();
        assert!(error.contains("`none.jsonl` has no preference data"), "{error}");
    }

    #[test]
    fn the_content_depends_on_what_is_compared() {
        let content = |loss| {
            let mut all = Vec::new();
            let data: &Arc<dyn Content> = &splits(loss, 99).splits[0];
            data.content(&mut |bytes| all.extend_from_slice(bytes)).unwrap();
            all
        };
        assert_eq!(content(Some(PreferenceLoss::Dpo)), content(Some(PreferenceLoss::Ipo)));
        assert_ne!(content(Some(PreferenceLoss::Dpo)), content(Some(PreferenceLoss::Orpo)));
        assert_ne!(content(Some(PreferenceLoss::Dpo)), content(None));
    }
}
