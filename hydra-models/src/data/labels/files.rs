//! Row files and class folders of texts with labels, in up to three splits.

use super::LabelledTexts;
use super::class::{Located, Meaning, Target, resolve};
use super::label::{Entry, Label};
use super::record::LabelRecord;
use crate::data::examples::{
    Column, RecordFiles, RecordOrigin, Records, RowFiles, Tally, in_no_split, looked_for,
};
use crate::data::folders::{self, ByClass, HeldOut, ItemFiles, Unread};
use crate::data::{DataError, ExampleError, RowPosition, Split, TokenSplits, ragged, text};
use crate::objective::{Labels, ProblemType};
use crate::tokenizer::{TokenSequence, Tokenizer};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Texts with labels, held in memory.
#[derive(Clone, Debug)]
pub struct LabelledFiles {
    texts: RecordFiles<LabelRecord>,
    /// The targets of the texts of each split.
    targets: [Arc<[Target]>; 3],
    labels: Labels,
    indicators: bool,
    held_out: HeldOut,
    unread_in_folders: Unread,
}

/// Form of the datasets, and the model that they are for.
#[derive(Clone, Copy, Debug)]
pub struct LabelForm<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Maximum tokens of an item; longer texts are truncated.
    pub context: usize,
    /// The size of the model's vocabulary.
    pub vocabulary: usize,
    /// The model's padding token.
    pub padding: Option<u32>,
    /// Whether the model reads the type of each token.
    pub token_types: bool,
    /// The model's number of each of the data's [`labels`](LabelledFiles::labels).
    pub numbers: &'a [i32],
    /// The number of the model's outputs.
    pub outputs: usize,
}

/// The texts of all splits before their labels are interpreted, and what is not read of class folders.
struct Found {
    texts: RecordFiles<LabelRecord>,
    held_out: HeldOut,
    unread_in_folders: Unread,
}

/// The files that class folders of texts contain.
const TEXTS: ItemFiles = ItemFiles {
    name: ".txt files",
    include: |path| path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("txt")),
    // Directories of texts also contain descriptions.
    only_in_classes: false,
    missing: |path| DataError::NoLabelledTexts { path, found: NO_CLASSES },
};

const NO_CLASSES: &str = "has neither files of rows for a split nor class folders";

impl LabelledFiles {
    /// Opens a file of rows (CSV, TSV, JSON Lines, JSON or Parquet), a directory with such a file for each split, or a
    /// directory with a folder for each class, or with one for each split that has those, which contain a `.txt` file for
    /// each text.
    ///
    /// A row has a `text`, perhaps a second one in `text_pair`, and a `label` or `labels`; `columns` maps columns to these
    /// fields. Without a `problem`, labels with fractions are those of a regression, lists those of a multi-label
    /// classification, and all others are one class for each text. Lists that have as many zeros and ones each have one for each
    /// class. Classes are sorted: integers by value, names by text. They are those of the training data, and in other splits
    /// also the `classes` of the model.
    ///
    /// The last tenth of the rows of a single file is the test split and the tenth before it the validation split. Class
    /// folders without validation data have the last tenth of each training class as validation split, or the tenth
    /// before the last if the last is the test split because that is missing too.
    ///
    /// # Errors
    /// A path without such data, a file that cannot be read, a row without a text or a label, a label that does not fit the
    /// problem or that neither the training data nor the model has, or training data of one class.
    pub fn open(
        path: &Path,
        columns: &[Column],
        problem: Option<ProblemType>,
        classes: &[String],
    ) -> Result<Self, DataError> {
        let found = match RowFiles::are_at(path) {
            true => Found::in_rows(path, columns)?,
            false => Found::in_folders(path, columns)?,
        };
        let Found { texts, held_out, unread_in_folders } = found;
        let located = texts.splits.each_ref().map(|records| records.as_ref().map_or_else(Vec::new, located));
        let Meaning { labels, targets, indicators } = resolve(&texts.name, &located, problem, classes)?;
        let targets = targets.map(Arc::from);
        Ok(Self { texts, targets, labels, indicators, held_out, unread_in_folders })
    }

    /// The path as given.
    pub fn name(&self) -> &str {
        self.texts.name()
    }

    /// The labels: the problem that they pose, and the names of the classes.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Returns whether each label is a list of zeros and ones, one for each class.
    pub fn have_indicators(&self) -> bool {
        self.indicators
    }

    /// The splits that were cut off a single file, each with a class that it lacks and the training split has.
    pub fn lacking(&self) -> Vec<(Split, &str)> {
        let files = |split: Split| self.texts.splits[split as usize].as_ref().map(|texts| &texts.files);
        let Some(train) = files(Split::Train) else { return Vec::new() };
        let has = |split: Split, class: u32| {
            self.targets[split as usize].iter().any(|target| match target {
                Target::Class(of) => *of == class,
                Target::Classes(of) => of.contains(&class),
                Target::Numbers(_) => false,
            })
        };
        let lacks = |split: Split| {
            files(split).filter(|files| *files == train)?;
            let mut names = (0..).zip(&self.labels.names);
            let (_, name) = names.find(|(class, _)| has(Split::Train, *class) && !has(split, *class))?;
            Some((split, name.as_str()))
        };
        [Split::Validation, Split::Test].into_iter().filter_map(lacks).collect()
    }

    /// Returns whether the data has this split.
    pub fn has(&self, split: Split) -> bool {
        self.texts.has(split)
    }

    /// The splits that were taken from the training data of class folders.
    pub fn held_out(&self) -> HeldOut {
        self.held_out
    }

    /// Row files in the directory that belong to no split, and texts of a split.
    pub fn unread(&self) -> &[PathBuf] {
        self.texts.unread()
    }

    /// Files and folders in a directory of class folders that are not read.
    pub fn unread_in_folders(&self) -> &Unread {
        &self.unread_in_folders
    }

    /// Builds datasets of one context length from these splits.
    ///
    /// # Errors
    /// A missing split, a text that cannot be encoded for the model or has no tokens, or a model with other outputs than
    /// [`labels`](Self::labels).
    pub fn splits(&self, splits: &[Split], form: &LabelForm<'_>) -> Result<TokenSplits, DataError> {
        self.check_outputs(form)?;
        let mut tally = Tally::default();
        let dataset = |split: &Split| {
            let (name, texts) = self.texts.split(*split)?;
            tally.add(&texts.tally);
            let encode = |origin: RecordOrigin<'_>, LabelRecord { text, pair, .. }: &LabelRecord| {
                form.encode(origin, text, pair.as_deref())
            };
            LabelledTexts::new(name, texts.encode(encode)?, &self.targets[*split as usize], form)
        };
        let datasets = splits.iter().map(dataset).collect::<Result<Vec<_>, _>>()?;
        Ok(TokenSplits { tally, ..ragged::splits("texts", datasets, form.context) })
    }

    /// Rejects a model whose outputs do not fit the labels.
    fn check_outputs(&self, form: &LabelForm<'_>) -> Result<(), DataError> {
        let Labels { problem, names } = &self.labels;
        let exists = |number: &i32| usize::try_from(*number).is_ok_and(|number| number < form.outputs);
        let numbered = form.numbers.len() == names.len() && form.numbers.iter().all(exists);
        match numbered && (*problem != ProblemType::Regression || names.len() == form.outputs) {
            true => Ok(()),
            false => {
                let (name, expected) = (self.texts.name.clone(), names.len());
                Err(DataError::Outputs { name, expected, found: form.outputs })
            }
        }
    }
}

impl LabelForm<'_> {
    /// The tokens of a text, or of a pair of texts.
    pub(super) fn encode(
        &self,
        origin: RecordOrigin<'_>,
        text: &str,
        pair: Option<&str>,
    ) -> Result<TokenSequence, DataError> {
        let sequence = self.tokenizer.encode_sequence(text, pair, self.context);
        let sequence = sequence.map_err(|source| origin.not_encoded(ExampleError::Tokenizer(source)))?;
        if sequence.ids.is_empty() {
            let found = "`text` is empty, and the tokenizer adds no tokens to it: fill it in, or remove it";
            return Err(origin.wrong(found.to_owned()));
        }
        origin.check(&sequence.ids, self.vocabulary)?;
        Ok(sequence)
    }
}

impl Found {
    fn in_rows(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
        let texts = RecordFiles::read(path, columns, |origin, fields, tally| {
            LabelRecord::from_fields(fields, origin.is_table(), columns, tally)
                .map_err(|found| origin.wrong(found))
        })?;
        Ok(Self { texts, held_out: HeldOut::Nothing, unread_in_folders: Unread::default() })
    }

    fn in_folders(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
        let none = |found| Err(DataError::NoLabelledTexts { path: path.to_owned(), found });
        if !path.exists() {
            return none("does not exist");
        }
        if !path.is_dir() {
            return none("is not a file of rows");
        }
        let mut unread = Unread::default();
        let has_splits = Split::ALL.into_iter().any(|split| folders::of_split(path, split).is_some());
        let found = in_no_split(path);
        if !has_splits && !found.is_empty() {
            let looked_for = looked_for(Split::Train);
            return Err(DataError::NoSplits { directory: path.to_owned(), looked_for, found });
        }
        let (names, splits) = match has_splits {
            true => folders::splits(path, &TEXTS, &mut unread)?,
            false => {
                let (names, texts) = folders::classes(path, &TEXTS, &mut unread)?.into_iter().unzip();
                (names, [Some(texts), None, None])
            }
        };
        if let Some(Column { column, .. }) = columns.first() {
            let (path, column) = (path.to_owned(), column.clone());
            return Err(DataError::NoColumn { path, column, found: Vec::new() });
        }
        let (splits, held_out) = folders::hold_out(splits);
        let read = |texts: Option<ByClass<PathBuf>>| texts.map(|texts| of_files(&texts, &names)).transpose();
        let texts = RecordFiles {
            name: path.display().to_string(),
            splits: Split::try_each(splits, read)?,
            unread: Vec::new(),
            looked_for: |split| folders::names(split).to_vec(),
        };
        Ok(Self { texts, held_out, unread_in_folders: unread })
    }
}

/// Reads the files of each class. Items alternate between classes.
fn of_files(texts: &ByClass<PathBuf>, names: &[String]) -> Result<Records<LabelRecord>, DataError> {
    let (mut files, mut records) = (Vec::new(), Vec::new());
    for (path, class) in folders::alternate(texts) {
        let bytes = fs::read(&path).map_err(|source| DataError::Read { path: path.clone(), source })?;
        let record = LabelRecord {
            text: text::utf8(&path, bytes)?,
            pair: None,
            field: "class folder",
            label: Label::One(Entry::of_folder(names[class].clone())),
        };
        records.push((files.len(), RowPosition::Text, record));
        files.push(path);
    }
    Ok(Records { files: files.into(), records: records.into(), tally: Arc::default() })
}

/// The labels of a split.
fn located<'a>(records: &'a Records<LabelRecord>) -> Vec<Located<'a>> {
    let locate = |(origin, LabelRecord { field, label, .. }): (RecordOrigin<'a>, &'a LabelRecord)| Located {
        origin,
        field,
        label,
        is_cell: origin.is_table(),
    };
    records.located().map(locate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Cut;
    use crate::tokenizer::testing::wordpiece;
    use hydra_core::Batch;
    use std::sync::Arc;
    use tempfile::TempDir;

    const BYTES: LabelForm<'static> = LabelForm {
        tokenizer: &Tokenizer::Bytes,
        context: 99,
        vocabulary: 256,
        padding: None,
        token_types: false,
        numbers: &[0, 1],
        outputs: 2,
    };

    fn directory(files: &[(&str, &str)]) -> TempDir {
        let dir = TempDir::new().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn columns(columns: &[&str]) -> Vec<Column> {
        columns.iter().map(|column| column.parse().unwrap()).collect()
    }

    fn open(path: &Path, names: &[&str]) -> Result<LabelledFiles, String> {
        LabelledFiles::open(path, &columns(names), None, &[]).map_err(|error| error.to_string())
    }

    /// Opens a file of this name and text.
    fn file(name: &str, text: &str) -> Result<LabelledFiles, String> {
        open(&directory(&[(name, text)]).path().join(name), &[])
    }

    fn lens(files: &LabelledFiles) -> [usize; 3] {
        files.texts.splits.each_ref().map(|texts| texts.as_ref().map_or(0, |texts| texts.records.len()))
    }

    /// All items of a split in one batch.
    fn batch(files: &LabelledFiles, split: Split, form: &LabelForm<'_>) -> Batch {
        let data = files.splits(&[split], form).unwrap().splits.remove(0);
        data.batch(&(0..data.len()).collect::<Vec<_>>()).unwrap()
    }

    fn labels(files: &LabelledFiles, split: Split) -> Vec<i32> {
        batch(files, split, &BYTES).targets.parts[0].as_i32().to_vec()
    }

    #[test]
    fn equal_rows_are_equal_batches_in_every_file_format() {
        let json = "{\"text\": \"a, b\", \"label\": 7}\n{\"text\": \" c\", \"label\": 10, \"id\": 1}\n";
        let array = format!("[{}]", json.trim_end().replace('\n', ","));
        let files = [
            file("a.jsonl", json),
            file("a.json", &array),
            file("a.csv", "text,label\n\"a, b\",7\n c,10\n"),
            file("a.tsv", "text\tlabel\na, b\t7\n c\t10\n"),
        ];
        for files in files.map(Result::unwrap) {
            assert_eq!(files.labels().names, ["7", "10"]);
            assert_eq!(lens(&files), [2, 0, 0]);
            let batch = batch(&files, Split::Train, &LabelForm { numbers: &[1, 0], ..BYTES });
            let ids: Vec<i32> = "a, b c".bytes().map(i32::from).collect();
            assert_eq!(batch.inputs.parts[0].as_i32(), ids, "texts are not stripped");
            assert_eq!(batch.targets.parts[0].as_i32(), [1, 0]);
        }
    }

    #[test]
    fn a_parquet_table_has_labels() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
        let of = |name: &str| LabelledFiles::open(&fixtures.join(name), &[], None, &[]).unwrap();
        let (table, lines) = (of("labels.parquet"), of("labels.jsonl"));
        assert_eq!((table.labels(), lens(&table)), (lines.labels(), [8, 1, 1]));
        let form = LabelForm { numbers: &[0, 1, 2], outputs: 3, ..BYTES };
        for split in Split::ALL {
            let [table, lines] = [&table, &lines].map(|files| batch(files, split, &form));
            assert_eq!((table.inputs, table.targets), (lines.inputs, lines.targets));
        }
    }

    #[test]
    fn one_file_has_three_splits_and_a_directory_one_file_for_each() {
        let rows = |rows: usize| {
            let row = |row| format!("{{\"text\": \"{row}\", \"label\": {}}}\n", row % 2);
            (0..rows).map(row).collect::<String>()
        };
        assert_eq!(lens(&file("a.jsonl", &rows(40)).unwrap()), [32, 4, 4]);
        let dir = directory(&[
            ("train-00000-of-00002.jsonl", &rows(4)),
            ("train-00001-of-00002.jsonl", &rows(2)),
            ("val.csv", "text,label\na,1\n"),
            ("other.csv", ""),
        ]);
        let files = open(dir.path(), &[]).unwrap();
        assert_eq!(lens(&files), [6, 1, 0]);
        assert!(files.has(Split::Validation) && !files.has(Split::Test));
        assert!(files.unread()[0].ends_with("other.csv"));
        assert_eq!(
            (labels(&files, Split::Train), labels(&files, Split::Validation)),
            (vec![0, 1, 0, 1, 0, 1], vec![1])
        );
        let error = files.splits(&[Split::Test], &BYTES).err().unwrap().to_string();
        assert!(error.contains("has no test split") && error.contains("test.jsonl"), "{error}");
    }

    #[test]
    fn columns_have_other_names_and_the_rest_is_unused() {
        let dir = directory(&[("a.csv", "premise,hypothesis,gold,id\na,b,yes,1\nc,d,no,2\n")]);
        let names = ["text=premise", "text_pair=hypothesis", "label=gold"];
        let files = open(&dir.path().join("a.csv"), &names).unwrap();
        assert_eq!(files.labels().names, ["no", "yes"]);
        let splits = files.splits(&[Split::Train], &BYTES).unwrap();
        assert_eq!(splits.tally.unused, [("id".to_owned(), 2)].into());
        assert_eq!(splits.splits[0].batch(&[0]).unwrap().inputs.parts[0].as_i32(), [97, 98]);
        let error = open(&dir.path().join("a.csv"), &["text=sentence"]).unwrap_err();
        assert!(error.contains("names the column `sentence`"), "{error}");
        let error = open(&dir.path().join("a.csv"), &[]).unwrap_err();
        assert!(
            error.contains("line 2 of `") && error.contains("--columns text=premise,text_pair=hypothesis"),
            "{error}"
        );
    }

    #[test]
    fn classes_are_folders() {
        let dir = directory(&[
            ("train/good/1.txt", "a"),
            ("train/good/2.txt", "b"),
            ("train/bad/1.txt", "c\n"),
            ("train/bad/2.txt", "d"),
            ("train/notes.txt", ""),
            ("train/bad/x.md", ""),
            ("val/good/1.txt", "e"),
            ("more/x/1.txt", ""),
        ]);
        let files = open(dir.path(), &[]).unwrap();
        assert_eq!((files.labels().names.join(" "), lens(&files)), ("bad good".to_owned(), [4, 1, 0]));
        assert_eq!(labels(&files, Split::Train), [0, 1, 0, 1], "classes in turn");
        let batch = batch(&files, Split::Train, &BYTES);
        assert_eq!(batch.inputs.parts[0].as_i32(), b"c\nadb".map(i32::from));
        assert_eq!(batch.targets.parts[2].as_i32(), [2, 1, 1, 1]);
        let unread = files.unread_in_folders();
        assert_eq!((unread.files(), unread.folders()), (2, &["more".to_owned()][..]));
        assert_eq!(files.held_out(), HeldOut::Nothing);
        let error = files.splits(&[Split::Test], &BYTES).err().unwrap().to_string();
        assert!(error.contains("has no test split: add one of test"), "{error}");
    }

    #[test]
    fn class_folders_without_splits_hold_out_the_last_of_each_class() {
        let names = ["2", "10"].map(|class| (0..20).map(move |text| format!("{class}/{text:02}.txt")));
        let names: Vec<String> = names.into_iter().flatten().collect();
        let dir = directory(&names.iter().map(|name| (name.as_str(), name.as_str())).collect::<Vec<_>>());
        let files = open(dir.path(), &[]).unwrap();
        assert_eq!((files.labels().names.join(" "), lens(&files)), ("2 10".to_owned(), [32, 4, 4]));
        assert_eq!(files.held_out(), HeldOut::ValidationAndTest);
        assert_eq!(labels(&files, Split::Test), [1, 0, 1, 0], "folders are in the order of their names");
        let numbers = LabelledFiles::open(dir.path(), &[], Some(ProblemType::Regression), &[]).unwrap();
        let form = LabelForm { numbers: &[0], outputs: 1, ..BYTES };
        assert_eq!(batch(&numbers, Split::Test, &form).targets.parts[0].as_f32(), [10.0, 2.0, 10.0, 2.0]);
    }

    #[test]
    fn what_is_wrong_with_class_folders_is_named() {
        let of = |files: &[(&str, &str)], names: &[&str]| open(directory(files).path(), names).unwrap_err();
        let two = [("train/a/1.txt", "x"), ("train/b/1.txt", "x")];
        let with = |more| of(&[&two[..], &[more]].concat(), &[]);
        let error = with(("train/c/1.md", "x"));
        assert!(error.contains("train/c` has no .txt files: add some"), "{error}");
        let error = with(("train/a/b/1.txt", "x"));
        assert!(error.contains("train/a/b` is a folder inside a class folder"), "{error}");
        let error = with(("test/c/1.txt", "x"));
        assert!(error.contains("test/c` is not in the training data, whose classes are a, b"), "{error}");
        let error = of(&[("train/a/1.txt", "x")], &[]);
        assert!(error.contains("every training row of") && error.contains("has the label `a`"), "{error}");
        let error = of(&[("train/1.txt", "x")], &[]);
        assert!(error.contains("train` has neither files of rows for a split nor class folders"), "{error}");
        let error = of(&two, &["label=x"]);
        assert!(error.contains("--columns names the column `x`"), "{error}");
        let dir = directory(&two);
        let error =
            LabelledFiles::open(dir.path(), &[], Some(ProblemType::Regression), &[]).unwrap_err().to_string();
        let place = format!(
            "the text of `{}`: `class folder` is `a`, expected a number",
            dir.path().join(two[0].0).display()
        );
        assert!(error.contains(&place), "{error}");
        fs::write(dir.path().join(two[1].0), [0xFF]).unwrap();
        let error = open(dir.path(), &[]).unwrap_err();
        assert!(error.contains("b/1.txt` is not UTF-8"), "{error}");
    }

    #[test]
    fn a_path_without_texts_that_have_labels_is_refused() {
        let dir = directory(&[("a.txt", "x")]);
        let error = |name: &str| open(&dir.path().join(name), &[]).unwrap_err();
        assert!(
            error("none.csv").contains("none.csv` does not exist: expected texts with labels"),
            "{}",
            error("none.csv")
        );
        assert!(error("a.txt").contains("a.txt` is not a file of rows"), "{}", error("a.txt"));
        assert!(
            error("").contains("has neither files of rows for a split nor class folders"),
            "{}",
            error("")
        );
        let unnamed = open(directory(&[("all.csv", "text,label\na,1\n")]).path(), &[]).unwrap_err();
        assert!(
            unnamed.contains("train.jsonl") && unnamed.contains("all.csv`: pass one of them"),
            "{unnamed}"
        );
    }

    #[test]
    fn a_wrong_row_is_named_with_its_file_and_line() {
        for (name, text, parts) in [
            ("a.csv", "text,label\na,1\nb,\n", &["line 3 of `", "a.csv`", "`label` is null or empty"][..]),
            (
                "a.jsonl",
                "{\"text\": \"a\", \"label\": \"\"}\n",
                &["line 1 of `", "`label` has an empty name"],
            ),
            ("a.jsonl", "{\"text\": \"a\"}\n", &["line 1 of `", "the row has no `label`"]),
            ("a.csv", "label,other\n1,x\n", &["line 2 of `", "the row has no `text`"]),
            ("a.csv", "text,label\na,0.5\nb,c\n", &["line 3 of `", "`label` is `c`, expected a number"]),
            (
                "a.csv",
                "text,label\na,0.5\nb,inf\n",
                &["line 3 of `", "`label` is `inf`, expected a finite number"],
            ),
            (
                "a.csv",
                "text,label\na,x\nb,x\nc,y\nd,z\n",
                &["line 4 of `", "`label` is `y`", "shuffle the rows"],
            ),
            ("a.csv", "text,label\na,x\nb,x\n", &["every training row of `", "has the label `x`"]),
            ("a.json", "[{\"text\": \"a\", \"label\": {}}]", &["row 1 of `", "found an object"]),
        ] {
            let error = file(name, text).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error} for {text}");
        }
    }

    #[test]
    fn pairs_have_special_tokens_and_types_and_what_is_cut_is_counted() {
        let dir = directory(&[(
            "a.jsonl",
            "{\"text\": \"the film was good\", \"text_pair\": \"a b\", \"label\": \"x\"}\n{\"text\": \"\", \"label\": \"y\"}\n",
        )]);
        wordpiece(dir.path());
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap().unwrap();
        let files = open(&dir.path().join("a.jsonl"), &[]).unwrap();
        let form =
            LabelForm { tokenizer: &tokenizer, padding: Some(0), token_types: true, vocabulary: 20, ..BYTES };
        let whole = batch(&files, Split::Train, &form);
        let parts =
            |batch: &Batch| batch.inputs.parts.iter().map(|part| part.as_i32().to_vec()).collect::<Vec<_>>();
        assert_eq!(
            parts(&whole),
            [
                [2, 18, 13, 19, 11, 3, 5, 6, 3, 2, 3],
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1],
                [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0]
            ]
        );
        assert_eq!(
            whole.targets.parts[1..].iter().map(|part| part.as_i32()).collect::<Vec<_>>(),
            [[0, 9], [9, 2], [8, 10]]
        );
        let short = LabelForm { context: 6, ..form };
        assert_eq!(parts(&batch(&files, Split::Train, &short))[0], [2, 18, 13, 3, 5, 3, 2, 3]);
        let splits = files.splits(&[Split::Train], &short).unwrap();
        let cut = Cut { examples: 1, tokens: 3, of_examples: 2, of_tokens: 11, longest: 9 };
        assert_eq!((splits.items, splits.context, splits.cut), ("texts", 6, cut));
        let error = files.splits(&[Split::Train], &LabelForm { context: 3, ..form }).err().unwrap();
        let error = hydra_core::with_causes(&error);
        assert!(error.contains("line 1 of `") && error.contains("a context of 3 has no space"), "{error}");
        let error =
            files.splits(&[Split::Train], &LabelForm { vocabulary: 19, ..form }).err().unwrap().to_string();
        assert!(error.contains("line 1 of `") && error.contains("has id 19"), "{error}");
        // A tokenizer that adds no tokens returns none for an empty text.
        let error = files.splits(&[Split::Train], &BYTES).err().unwrap().to_string();
        assert!(error.contains("line 2 of `") && error.contains("`text` is empty"), "{error}");
    }

    #[test]
    fn splits_have_one_largest_length() {
        let dir = directory(&[("train.csv", "text,label\na,0\nb,1\n"), ("test.csv", "text,label\nabcd,0\n")]);
        let files = open(dir.path(), &[]).unwrap();
        let shapes = |context| {
            let form = LabelForm { context, ..BYTES };
            let TokenSplits { context, splits, .. } =
                files.splits(&[Split::Train, Split::Test], &form).unwrap();
            let shape = |split: &Arc<dyn crate::data::Content>| {
                split.largest(1).unwrap().inputs.parts[0].shape.clone()
            };
            (context, splits.iter().map(shape).collect::<Vec<_>>())
        };
        assert_eq!(shapes(99), (4, vec![vec![1, 4]; 2]));
        assert_eq!(shapes(3), (3, vec![vec![1, 3]; 2]));
    }

    #[test]
    fn a_model_with_other_outputs_is_refused() {
        let several = file("a.jsonl", "{\"text\": \"a\", \"labels\": [0.5, 1]}\n").unwrap();
        let classes =
            file("a.jsonl", "{\"text\": \"a\", \"label\": 0}\n{\"text\": \"b\", \"label\": 1}\n").unwrap();
        let train = [Split::Train];
        let error = several.splits(&train, &LabelForm { outputs: 3, ..BYTES }).err().unwrap().to_string();
        assert!(error.contains("has 2 labels for each text, but the model has 3 outputs"), "{error}");
        assert!(classes.splits(&train, &LabelForm { outputs: 3, ..BYTES }).is_ok());
        for numbers in [&[0, 2][..], &[0, -1], &[0]] {
            assert!(classes.splits(&train, &LabelForm { numbers, ..BYTES }).is_err(), "{numbers:?}");
        }
    }

    #[test]
    fn the_content_has_labels_and_texts() {
        let content = |text: &str, form: &LabelForm<'_>| {
            let files = file("a.csv", &format!("text,label\n{text}")).unwrap();
            let mut all = Vec::new();
            let data = files.splits(&[Split::Train], form).unwrap().splits.remove(0);
            data.content(&mut |bytes| all.extend_from_slice(bytes)).unwrap();
            all
        };
        let one = content("a,0\nb,1\n", &BYTES);
        assert_eq!(one, content("a,x\nb,y\n", &BYTES), "names do not matter");
        assert_ne!(one, content("a,1\nb,0\n", &BYTES));
        assert_ne!(one, content("a,0\nc,1\n", &BYTES));
        assert_ne!(one, content("a,0\nb,1\n", &LabelForm { numbers: &[1, 0], ..BYTES }));
    }
}
