//! Row files, in up to three splits.

use super::columns::Column;
use super::encode::Example;
use super::record::{Fields, Refusal};
use super::record_files::{RecordFiles, RecordOrigin, Records};
use super::row_files::RowFiles;
use super::{LossOn, Record, Tally};
use crate::data::{DataError, Split, TokenForm};
use std::path::Path;

/// The rows of a file or directory, held in memory.
pub type ExampleFiles = RecordFiles<Record>;

/// The encoded examples of a split.
pub(in crate::data) struct Encoded {
    pub(in crate::data) name: String,
    pub(in crate::data) examples: Vec<Example>,
    /// Unused data in their rows.
    pub(in crate::data) tally: Tally,
}

impl Encoded {
    /// The length of the longest example, up to truncation.
    pub(in crate::data) fn longest(&self) -> usize {
        self.examples.iter().map(|example| example.ids.len()).max().unwrap_or(0)
    }
}

impl ExampleFiles {
    /// Returns whether [`open`](Self::open) reads the path: a row file by its name, or a directory with one for a
    /// split.
    pub fn are_at(path: &Path) -> bool {
        RowFiles::are_at(path)
    }

    /// Opens a directory with a file per split (`train.jsonl`, `validation.csv`, `test-00000-of-00001.parquet`, ..), or
    /// a single file, whose last tenth of rows is the test split and the tenth before it the validation split.
    /// `columns` maps columns to fields.
    ///
    /// # Errors
    /// A file that cannot be read, has no rows or is not UTF-8, a row that is not a [`Record`], or a column that no row
    /// has.
    pub fn open(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
        Self::read(path, columns, record)
    }

    /// Returns whether some rows have a label as well as their text. Training ignores the label.
    pub fn have_labels(&self) -> bool {
        let labelled = |records: &Records<Record>| {
            ["label", "labels"].iter().any(|name| records.tally.unused.contains_key(*name))
                && records.located().any(|(_, record)| matches!(record, Record::Text(_)))
        };
        self.splits.iter().flatten().any(labelled)
    }

    /// Encodes the examples of a split.
    ///
    /// # Errors
    /// A missing split, or a row that cannot be encoded for the model.
    pub(in crate::data) fn encode(&self, split: Split, form: &TokenForm<'_>) -> Result<Encoded, DataError> {
        let (name, records) = self.split(split)?;
        let (examples, mut tally) = records.examples(form)?;
        examples.iter().for_each(|example| tally.unused(example.unused.iter()));
        if form.loss_on == LossOn::All {
            let masks = std::mem::take(&mut tally.masks);
            tally.add(&Tally { unused: masks, ..Tally::default() });
        }
        Ok(Encoded { name, examples, tally })
    }
}

impl Records<Record> {
    /// Encodes the records. The tally has the unused data in the rows, and what encoding them noticed.
    pub(super) fn examples(&self, form: &TokenForm<'_>) -> Result<(Vec<Example>, Tally), DataError> {
        let encode = |origin: RecordOrigin<'_>, record: &Record| {
            form.encode(record).map_err(|source| origin.not_encoded(source))
        };
        let (mut examples, mut tally) = (self.encode(encode)?, Tally::clone(&self.tally));
        for example in &mut examples {
            tally.remarks.add(std::mem::take(&mut example.remarks));
            tally.merged += usize::from(example.merged && form.loss_on == LossOn::Completions);
        }
        Ok((examples, tally))
    }
}

/// Reads the record of a row of a file, and counts unused fields.
pub(super) fn record(
    origin: RecordOrigin<'_>,
    fields: Fields,
    tally: &mut Tally,
) -> Result<Record, DataError> {
    Record::from_fields(fields, tally).map_err(|refusal| match refusal {
        Refusal::Unknown { found, example } => {
            let RecordOrigin { path, place } = origin;
            DataError::UnknownFields { path: path.to_owned(), place, found, example }
        }
        Refusal::Wrong(found) => origin.wrong(found),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Context, Examples};
    use crate::tokenizer::{Conventions, Tokenizer};
    use hydra_core::Dataset;
    use std::fs;

    fn text(n: usize) -> String {
        (0..n).map(|i| format!("{{\"text\": \"{i}\"}}\n")).collect()
    }

    fn encoded(files: &ExampleFiles, split: Split, loss_on: LossOn) -> (usize, Tally) {
        let tokenizer = Tokenizer::Bytes;
        let conventions = Conventions::load(&tokenizer, None).unwrap();
        let (tokenizer, conventions, context) = (&tokenizer, &conventions, Context::uniform(8));
        let form = TokenForm { tokenizer, conventions, context, vocabulary: 256, loss_on, pack: false };
        let Encoded { name, examples, tally } = files.encode(split, &form).unwrap();
        (Examples::new(name, examples, 8, &form).unwrap().len(), tally)
    }

    fn lens(files: &ExampleFiles) -> [usize; 3] {
        let len = |split| if files.has(split) { encoded(files, split, LossOn::Completions).0 } else { 0 };
        Split::ALL.map(len)
    }

    #[test]
    fn the_last_tenths_of_a_file_are_validation_and_test() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("data.JSONL");
        for (lines, expected) in
            [(1, [1, 0, 0]), (2, [2, 0, 0]), (3, [1, 1, 1]), (9, [7, 1, 1]), (40, [32, 4, 4])]
        {
            fs::write(&file, text(lines) + "\n \n").unwrap();
            assert!(ExampleFiles::are_at(&file));
            assert_eq!(lens(&ExampleFiles::open(&file, &[]).unwrap()), expected, "{lines} lines");
        }
    }

    #[test]
    fn a_directory_has_files_of_several_forms() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!ExampleFiles::are_at(dir.path()));
        fs::write(dir.path().join("train-00000-of-00002.jsonl"), text(5)).unwrap();
        fs::write(dir.path().join("train-00001-of-00002.jsonl"), text(2)).unwrap();
        fs::write(dir.path().join("val.csv"), "id,text\n1,a\n2,\"b, c\"\n").unwrap();
        fs::write(dir.path().join("more.json"), "[]").unwrap();
        let files = ExampleFiles::open(dir.path(), &[]).unwrap();
        assert!(ExampleFiles::are_at(dir.path()));
        assert_eq!(lens(&files), [7, 2, 0]);
        assert!(files.unread()[0].ends_with("more.json"));
        assert_eq!(encoded(&files, Split::Validation, LossOn::All).1.unused["id"], 2);
        assert!(!ExampleFiles::are_at(&dir.path().join("none.jsonl")));
    }

    #[test]
    fn masks_have_no_use_where_everything_is_learned() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        fs::write(&file, "{\"input_ids\": [1, 2], \"labels\": [-100, 2]}\n").unwrap();
        let files = ExampleFiles::open(&file, &[]).unwrap();
        assert_eq!(encoded(&files, Split::Train, LossOn::Completions).1.unused.len(), 0);
        assert_eq!(encoded(&files, Split::Train, LossOn::All).1.unused["labels"], 1);
    }

    #[test]
    fn labels_of_texts_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        for (row, expected) in [
            ("{\"text\": \"a\", \"label\": 1}", true),
            ("{\"text\": \"a\", \"labels\": [\"x\"]}", true),
            ("{\"text\": \"a\", \"id\": 1}", false),
            ("{\"prompt\": \"a\", \"completion\": \"b\", \"label\": 1}", false),
        ] {
            fs::write(&file, row).unwrap();
            assert_eq!(ExampleFiles::open(&file, &[]).unwrap().have_labels(), expected, "{row}");
        }
    }

    #[test]
    fn a_row_that_is_no_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |name: &str, text: &str, columns: &[&str]| {
            let columns: Vec<Column> = columns.iter().map(|column| column.parse().unwrap()).collect();
            fs::write(dir.path().join(name), text).unwrap();
            ExampleFiles::open(&dir.path().join(name), &columns).unwrap_err().to_string()
        };
        let error = refused("chat.jsonl", "{\"text\": \"a\"}\n\n{\"answer\": 3}\n", &[]);
        assert!(error.contains("line 3 of `") && error.contains("has the columns `answer`"), "{error}");
        assert!(error.contains("`prompt` and `completion`"), "{error}");
        let error = refused("a.csv", "question;answer\na;b\n", &[]);
        assert!(error.contains("line 2") && error.contains("`question;answer`"), "{error}");
        let error = refused("b.csv", "prompt,completion\n\"a\",\n", &[]);
        assert!(error.contains("line 2") && error.contains("`completion` is null or empty"), "{error}");
        let error = refused("c.csv", "question,answer\na,b\n", &["prompt=question", "completion=reply"]);
        assert!(error.contains("the column `reply`") && error.contains("`question`, `answer`"), "{error}");
        let error = refused("d.tsv", "text\n", &[]);
        assert!(error.contains("d.tsv` has no rows"), "{error}");
    }
}
