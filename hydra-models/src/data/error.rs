//! Errors of text, example and image data.

use hydra_core::ByteSize;
use std::fmt;
use std::path::PathBuf;

use super::Split;
use super::examples::ExampleError;
use super::images::JpegError;
use crate::tokenizer::TokenizerError;

/// Data that cannot be read, or that yields no items.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum DataError {
    /// The path does not exist.
    #[error("no such file or directory: `{path}`; --data takes a WikiText directory, a plain-text file or `builtin`", path = path.display())]
    Missing { path: PathBuf },
    /// The file is not Parquet, or damaged.
    #[error("`{path}` is not a readable Parquet file: write it again or replace it", path = path.display())]
    ParquetFile { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// A Parquet file with an unsupported compression.
    #[error(
        "`{path}` uses the Parquet compression {codec}, which is not supported: convert it to Snappy, for example with python -c \
         \"import pandas; pandas.read_parquet('{path}').to_parquet('FILE.parquet', compression='snappy')\"",
        path = path.display()
    )]
    ParquetCodec { path: PathBuf, codec: String },
    /// A compressed file.
    #[error("`{path}` is compressed in an unsupported format: unpack it with `{unpack} {path}` and pass the unpacked file", path = path.display())]
    Compressed { path: PathBuf, unpack: &'static str },
    /// A file whose name is not that of a row file.
    #[error(
        "`{path}` is not a file of rows: expected FILE.jsonl, .json, .csv, .tsv or .parquet",
        path = path.display()
    )]
    NotRows { path: PathBuf },
    /// A row file without rows.
    #[error("`{path}` has no rows: add some, or remove the file", path = path.display())]
    NoRows { path: PathBuf },
    /// A JSON file that is one object with the rows in a field.
    #[error(
        "`{path}` is a single JSON object with its rows in `{field}`: convert it to JSON Lines, for example with jq -c \
         '.[\"{field}\"][]' {path} > FILE.jsonl",
        path = path.display()
    )]
    RowsWithin { path: PathBuf, field: String },
    /// Two columns have the same name.
    #[error("`{path}` has two columns named `{column}`: rename one of them", path = path.display())]
    ColumnTwice { path: PathBuf, column: String },
    /// A column in `--columns` that no row has.
    #[error(
        "--columns names the column `{column}`, but no row of `{path}` has it; the columns of the first row are {}",
        quoted(found), path = path.display()
    )]
    NoColumn { path: PathBuf, column: String, found: Vec<String> },
    /// None of the columns is used for training.
    #[error(
        "{place} of `{path}` has the columns {}, and Hydra trains on none of them: expected `text`, `prompt` and `completion`, `messages` or \
         `conversations`, `instruction` and `output`, or `input_ids`; --columns maps other column names to these, for example {example}",
        quoted(found), path = path.display()
    )]
    UnknownFields { path: PathBuf, place: RowPosition, found: Vec<String>, example: String },
    /// Several files match one split.
    #[error(
        "several files match the {split} split: {}; keep one of them, or pass one file",
        quoted_paths(found)
    )]
    SplitTwice { split: Split, found: Vec<PathBuf> },
    /// A split stored in numbered files, one of which is missing.
    #[error("`{path}` is one of {count} files of a split, and file {missing} is missing", path = path.display())]
    ShardMissing { path: PathBuf, count: usize, missing: usize },
    /// A directory without any split.
    #[error(
        "`{path}` contains none of the expected files: {names}{}",
        instead(found), path = directory.display(), names = looked_for.join(", ")
    )]
    NoSplits {
        directory: PathBuf,
        looked_for: Vec<&'static str>,
        /// Files in the directory that could be passed instead.
        found: Vec<PathBuf>,
    },
    /// The corpus does not have the split.
    #[error("`{corpus}` has no {split} split: add one of {names}", names = looked_for.join(", "))]
    SplitMissing { corpus: String, split: Split, looked_for: Vec<&'static str> },
    /// An unknown split name.
    #[error("`{found}` is not a split: expected train, validation or test")]
    UnknownSplit { found: String },
    /// A blank file.
    #[error("`{path}` has no text: every line is blank", path = path.display())]
    Empty { path: PathBuf },
    /// The file is not UTF-8.
    #[error("`{path}` is not UTF-8: invalid byte at offset {offset}; convert the file", path = path.display())]
    NotUtf8 {
        path: PathBuf,
        /// The offset of the first invalid byte, counted from zero.
        offset: usize,
    },
    /// The file could not be read.
    #[error("`{path}` could not be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The text could not be tokenized.
    #[error("the {split} split of `{corpus}` could not be tokenized")]
    Tokenize { corpus: String, split: Split, source: TokenizerError },
    /// An invalid row.
    #[error("{place} of `{path}`: {found}", path = path.display())]
    Record { path: PathBuf, place: RowPosition, found: String },
    /// A row that cannot be encoded for this model.
    #[error("{place} of `{path}` cannot be encoded for this model", path = path.display())]
    Example { path: PathBuf, place: RowPosition, source: ExampleError },
    /// Examples without any loss target.
    #[error(
        "{name} has no tokens to train on: {}",
        match cut_at {
            Some(context) => format!(
                "no loss target of {} lies within a context of {context}: use a longer \
                 --context, up to the model's number of positions, or shorter examples",
                counted(*examples)
            ),
            None => format!("no loss targets in {}", counted(*examples)),
        }
    )]
    NothingToLearn {
        name: String,
        examples: usize,
        /// The context length, if examples are longer.
        cut_at: Option<usize>,
    },
    /// A path without preference data.
    #[error(
        "`{path}` has no preference data: expected a file of rows with `prompt`, `chosen` and `rejected` (.jsonl, .json, .csv, \
         .tsv or .parquet), or a directory with such a file for each split, such as train.jsonl",
        path = path.display()
    )]
    NoPreferences { path: PathBuf },
    /// Preference pairs that are all longer than the context.
    #[error(
        "{name} has no pairs within the context: all {pairs} are too long for {context} tokens: use a longer --context, up to the \
         model's number of positions, or shorter texts"
    )]
    NoPairs { name: String, pairs: usize, context: usize },
    /// A path without texts that have labels.
    #[error(
        "`{path}` {found}: expected texts with labels, in a file of rows with `text` and `label` (.jsonl, .json, .csv, .tsv or \
         .parquet), a directory with such a file for each split, such as train.csv, or a directory with a folder for each \
         class, such as good/1.txt or train/good/1.txt",
        path = path.display()
    )]
    NoLabelledTexts {
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
    /// A label that the training data does not have.
    #[error(
        "{place} of `{path}`: `{field}` is `{label}`, which no training row has, only {}: correct or remove the row, add such \
         rows to the training data, or shuffle the rows if all are in one file",
        quoted(known), path = path.display()
    )]
    LabelUnknown { path: PathBuf, place: RowPosition, field: &'static str, label: String, known: Vec<String> },
    /// Training data of one class.
    #[error(
        "every training row of `{name}` has the label {}: add rows of other classes, or shuffle the rows if all are in one \
         file",
        quoted(classes)
    )]
    OneClass {
        name: String,
        /// The names of the class.
        classes: Vec<String>,
    },
    /// A model whose outputs are not those of the labels.
    #[error(
        "`{name}` has {expected} labels for each text, but the model has {found} outputs: use another model"
    )]
    Outputs { name: String, expected: usize, found: usize },
    /// A directory without images.
    #[error(
        "no images in `{path}`: expected a directory with one folder per class, such as train/cat/1.png, optionally \
         validation/ and test/, or CIFAR-10's files data_batch_1.bin to data_batch_5.bin and test_batch.bin",
        path = path.display()
    )]
    NoImages { path: PathBuf },
    /// A file outside the class folders.
    #[error("`{path}` is not in a class folder: move it to a folder named after its class", path = path.display())]
    NoClass { path: PathBuf },
    /// A class folder whose name is not UTF-8.
    #[error("the name of the class folder `{path}` is not UTF-8: rename it", path = path.display())]
    ClassName { path: PathBuf },
    /// A class folder without items.
    #[error("the class folder `{path}` has no {items}: add some, or remove the folder", path = path.display())]
    ClassEmpty {
        path: PathBuf,
        /// What the folder should contain.
        items: &'static str,
    },
    /// A folder inside a class folder.
    #[error("`{path}` is a folder inside a class folder: move its files to the class folder", path = path.display())]
    ClassWithin { path: PathBuf },
    /// A class folder that the training data does not have.
    #[error("the class of `{path}` is not in the training data, whose classes are {known}", path = path.display(), known = known.join(", "))]
    ClassUnknown { path: PathBuf, known: Vec<String> },
    /// A file that is neither PNG nor JPEG.
    #[error("`{path}` is not a PNG or JPEG file, found {found}: convert or remove it", path = path.display())]
    ImageKind { path: PathBuf, found: String },
    /// An image with an unsupported colour type.
    #[error("`{path}` is {found}, expected 8-bit RGB or greyscale: convert it", path = path.display())]
    ImageMode { path: PathBuf, found: &'static str },
    /// A damaged PNG.
    #[error("`{path}` could not be decoded: replace or remove it", path = path.display())]
    Image { path: PathBuf, source: image::ImageError },
    /// A damaged JPEG, or an unsupported kind of JPEG.
    #[error("`{path}` could not be decoded: replace or remove it", path = path.display())]
    Jpeg { path: PathBuf, source: JpegError },
    /// Decoding the image takes more host memory than is available.
    #[error(
        "`{path}`{} takes {needed} of host memory to decode, but {available} are available: raise --host-memory, shrink the \
         image, or remove it",
        of_pixels(size), path = path.display()
    )]
    ImageMemory { path: PathBuf, size: Option<[usize; 2]>, needed: ByteSize, available: ByteSize },
    /// An image of more pixels than Pillow accepts.
    #[error(
        "`{path}` has {width} by {height} pixels, more than the {most} above which Pillow rejects an image as a \
         decompression bomb: shrink or remove it",
        path = path.display()
    )]
    ImagePixels { path: PathBuf, width: usize, height: usize, most: u64 },
    /// An image of the wrong size for a model that does not resize images.
    #[error(
        "`{path}` has {} by {} pixels, expected {side} by {side}: the model's preprocessor_config.json sets `do_resize` to false",
        found[0], found[1], path = path.display()
    )]
    ImageSize { path: PathBuf, side: usize, found: [usize; 2] },
    /// A file that is not in the CIFAR-10 binary format.
    #[error("`{path}` is not a CIFAR-10 binary file: expected records of 3073 bytes with a class from 0 to 9, found {found}", path = path.display())]
    Cifar { path: PathBuf, found: String },
    /// Only some of CIFAR-10's files of a split exist.
    #[error("the {split} split of CIFAR-10 is incomplete: add the missing files {}", quoted_paths(missing))]
    CifarMissing { split: Split, missing: Vec<PathBuf> },
    /// More tokens than a 32-bit count holds.
    #[error("{name} has more than 4294967295 tokens: split it into several files")]
    TooManyTokens { name: String },
    /// A context without a loss target.
    #[error("a context of {context} has no token to predict: use at least 2")]
    ContextTooShort { context: usize },
    /// A text shorter than one block.
    #[error("{name} has {tokens} tokens, fewer than one block of context {context}: {}", advice(*tokens))]
    TooFewTokens {
        name: String,
        /// The number of tokens; also the largest usable context, if it is at least 2.
        tokens: usize,
        context: usize,
    },
    /// A token id outside the model's vocabulary.
    #[error(
        "{name}: the token at position {position} has id {id}, and the model's vocabulary has {vocab_size} ids: \
         use the model's own tokenizer"
    )]
    TokenOutOfRange {
        name: String,
        /// The token's position, counted from zero.
        position: usize,
        id: u32,
        vocab_size: usize,
    },
}

fn of_pixels(size: &Option<[usize; 2]>) -> String {
    size.map_or(String::new(), |[width, height]| format!(" has {width} by {height} pixels and"))
}

/// The position of a row in its file, counted from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPosition {
    /// The line on which the row starts.
    Line(usize),
    /// The row's number.
    Row(usize),
    /// The whole file, a text.
    Text,
}

impl fmt::Display for RowPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Row(row) => write!(f, "row {row}"),
            Self::Text => f.write_str("the text"),
        }
    }
}

/// The most names that a message lists.
const NAMES: usize = 12;

fn quoted(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    let some: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
    some.join(", ") + if names.len() > NAMES { " .." } else { "" }
}

fn quoted_paths(paths: &[PathBuf]) -> String {
    quoted(&paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>())
}

fn instead(found: &[PathBuf]) -> String {
    match found {
        [] => String::new(),
        found => format!("; it contains {}: pass one of them to --data, or rename them", quoted_paths(found)),
    }
}

fn counted(examples: usize) -> String {
    format!("{examples} example{}", if examples == 1 { "" } else { "s" })
}

fn advice(tokens: usize) -> String {
    match tokens {
        0 | 1 => "no context is short enough; add text".to_owned(),
        usable => format!("the largest usable context is {usable}"),
    }
}
