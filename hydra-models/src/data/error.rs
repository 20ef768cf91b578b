//! Errors of a corpus and of the blocks cut from it.

use hydra_core::ByteSize;
use std::fmt;
use std::path::PathBuf;

use super::Split;
use super::examples::ExampleError;
use super::images::JpegError;
use crate::tokenizer::TokenizerError;

/// A corpus that cannot be read, or a text that gives no blocks.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum DataError {
    /// Nothing is at the path.
    #[error("no data at `{path}`: give a WikiText directory, a plain-text file or `builtin`", path = path.display())]
    Missing { path: PathBuf },
    /// A file that is not Parquet, or damaged.
    #[error("`{path}` could not be read as Parquet: replace it, or write it again", path = path.display())]
    ParquetFile { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// A file of Parquet whose compression is not read.
    #[error(
        "`{path}` is compressed in a way that this program does not read ({codec}): write it with Snappy, such as with: python -c \
         \"import pandas; pandas.read_parquet('{path}').to_parquet('FILE.parquet', compression='snappy')\"; or build the \
         program with `--features zstd` if it is Zstandard",
        path = path.display()
    )]
    ParquetCodec { path: PathBuf, codec: String },
    /// A compressed file.
    #[error("`{path}` is compressed in a way that is not read: unpack it with `{unpack} {path}` and give the file inside", path = path.display())]
    Compressed { path: PathBuf, unpack: &'static str },
    /// A file of rows without any.
    #[error("`{path}` has no rows: add some, or remove the file", path = path.display())]
    NoRows { path: PathBuf },
    /// A JSON file whose rows are a field of an object.
    #[error(
        "`{path}` is one object, whose rows are in `{field}`: write them as lines and give that, such as with: jq -c \
         '.[\"{field}\"][]' {path} > FILE.jsonl",
        path = path.display()
    )]
    RowsWithin { path: PathBuf, field: String },
    /// A table with two columns of one name.
    #[error("`{path}` has two columns `{column}`: rename one", path = path.display())]
    ColumnTwice { path: PathBuf, column: String },
    /// A column that `--columns` names and no row has.
    #[error(
        "--columns names the column `{column}`, which no row of `{path}` has: its first row has {}",
        quoted(found), path = path.display()
    )]
    NoColumn { path: PathBuf, column: String, found: Vec<String> },
    /// Fields of which none is learned.
    #[error(
        "{place} of `{path}` has the fields {}, none of which is learned: expected `text`, `prompt` and `completion`, `messages` or \
         `conversations`, `instruction` and `output`, or `input_ids`; --columns gives fields other columns, such as {example}",
        quoted(found), path = path.display()
    )]
    UnknownFields { path: PathBuf, place: Place, found: Vec<String>, example: String },
    /// Several files that could be a split.
    #[error("the {split} split could be {}: keep one of them, or give a file", quoted_paths(found))]
    SplitTwice { split: Split, found: Vec<PathBuf> },
    /// Some of the parts of a split.
    #[error("`{path}` is part of a split of {count} files, and part {missing} is missing", path = path.display())]
    ShardMissing { path: PathBuf, count: usize, missing: usize },
    /// A directory without a split.
    #[error(
        "`{path}` holds none of the files looked for: {names}{}",
        instead(found), path = directory.display(), names = looked_for.join(", ")
    )]
    NoSplits {
        directory: PathBuf,
        looked_for: Vec<&'static str>,
        /// Files in it that could be given instead.
        found: Vec<PathBuf>,
    },
    /// A split that the corpus does not have.
    #[error("`{corpus}` has no {split} split: add one of {names}", names = looked_for.join(", "))]
    SplitMissing { corpus: String, split: Split, looked_for: Vec<&'static str> },
    /// A word that names no split.
    #[error("`{found}` is not a split: expected train, validation or test")]
    UnknownSplit { found: String },
    /// A file without text.
    #[error("`{path}` has no text: every line of it is blank", path = path.display())]
    Empty { path: PathBuf },
    /// A file that is not UTF-8.
    #[error("`{path}` is not UTF-8: the byte at offset {offset} cannot stand there; convert the file", path = path.display())]
    NotUtf8 {
        path: PathBuf,
        /// The first wrong byte, counted from zero.
        offset: usize,
    },
    /// A file that could not be read.
    #[error("`{path}` could not be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The text could not be tokenized.
    #[error("the {split} split of `{corpus}` could not be tokenized")]
    Tokenize { corpus: String, split: Split, source: TokenizerError },
    /// A row that cannot be learned.
    #[error("{place} of `{path}`: {found}", path = path.display())]
    Record { path: PathBuf, place: Place, found: String },
    /// A row that the model has no tokens for.
    #[error("{place} of `{path}` is no example for this model", path = path.display())]
    Example { path: PathBuf, place: Place, source: ExampleError },
    /// Examples of which nothing is trained on.
    #[error(
        "{name} has nothing to learn: {}",
        match cut_at {
            Some(context) => format!(
                "nothing that is learned of {} lies within a context of {context}: give a longer \
                 --context, as far as the model has positions, or shorter examples",
                counted(*examples)
            ),
            None => format!("nothing is learned of {}", counted(*examples)),
        }
    )]
    NothingToLearn {
        name: String,
        examples: usize,
        /// The context, if examples are longer.
        cut_at: Option<usize>,
    },
    /// A directory without images.
    #[error(
        "no pictures at `{path}`: give a directory with a folder for each class, such as train/cat/1.png, and perhaps \
         validation/ and test/, or CIFAR-10's data_batch_1.bin to data_batch_5.bin and test_batch.bin",
        path = path.display()
    )]
    NoImages { path: PathBuf },
    /// An image beside the folders of classes.
    #[error("`{path}` is in no class: put it into a folder with the name of its class", path = path.display())]
    NoClass { path: PathBuf },
    /// A class folder whose name is no text.
    #[error("the name of the class folder `{path}` is not UTF-8: give it another", path = path.display())]
    ClassName { path: PathBuf },
    /// A class folder without images.
    #[error("the class folder `{path}` has no pictures, PNG or JPEG: remove it, or fill it", path = path.display())]
    ClassEmpty { path: PathBuf },
    /// A folder where an image should be.
    #[error("`{path}` is a folder inside of a class: put its pictures into the class's folder", path = path.display())]
    ClassWithin { path: PathBuf },
    /// A class that the training data does not have.
    #[error("`{path}` is a class that is not trained: train has {known}", path = path.display(), known = known.join(", "))]
    ClassUnknown { path: PathBuf, known: Vec<String> },
    /// A file that holds no image that is read.
    #[error("`{path}` is no PNG and no JPEG, found {found}: convert it, or take it away", path = path.display())]
    ImageKind { path: PathBuf, found: String },
    /// An image whose colours are of a kind that is not read.
    #[error("the colours of `{path}` are {found}, expected red, green and blue, or greys, of 8 bits: convert it", path = path.display())]
    ImageMode { path: PathBuf, found: &'static str },
    /// A PNG that is damaged.
    #[error("`{path}` could not be decoded: replace it, or take it away", path = path.display())]
    Image { path: PathBuf, source: image::ImageError },
    /// A JPEG that is damaged, or of a kind that is not read.
    #[error("`{path}` could not be decoded: replace it, or take it away", path = path.display())]
    Jpeg { path: PathBuf, source: JpegError },
    /// An image that needs more host memory than there is.
    #[error(
        "`{path}`{} needs {needed} of host memory to be decoded, and there are {available}: give more --host-memory, make the \
         image smaller, or take it away",
        of_pixels(size), path = path.display()
    )]
    ImageMemory { path: PathBuf, size: Option<[usize; 2]>, needed: ByteSize, available: ByteSize },
    /// An image of more pixels than Pillow reads.
    #[error(
        "`{path}` has {width} by {height} pixels, more than the {most} beyond which Pillow refuses an image as a \
         decompression bomb: make it smaller, or take it away",
        path = path.display()
    )]
    ImagePixels { path: PathBuf, width: usize, height: usize, most: u64 },
    /// An image of another size, where images are not resized.
    #[error(
        "`{path}` has {} by {} pixels, expected {side} by {side}: the model's preprocessor_config.json says `do_resize` false",
        found[0], found[1], path = path.display()
    )]
    ImageSize { path: PathBuf, side: usize, found: [usize; 2] },
    /// A file that is not of CIFAR-10.
    #[error("`{path}` is no binary file of CIFAR-10, whose records have 3073 bytes and a class from 0 to 9: found {found}", path = path.display())]
    Cifar { path: PathBuf, found: String },
    /// More tokens than are counted.
    #[error("{name} has more than 4294967295 tokens: cut it into several files")]
    TooManyTokens { name: String },
    /// A context too short for a prediction.
    #[error("a context of {context} has nothing to predict: the smallest is 2")]
    ContextTooShort { context: usize },
    /// A text shorter than one block.
    #[error("{name} has {tokens} tokens, fewer than one block of context {context}: {}", advice(*tokens))]
    TooFewTokens {
        name: String,
        /// How many there are; also the largest usable context, if it is 2 or more.
        tokens: usize,
        context: usize,
    },
    /// A token id that the model has no embedding for.
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

/// The place of a row in its file, counted from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The line on which it begins.
    Line(usize),
    /// Its number among the rows.
    Row(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}

/// The names that a message lists at most.
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
        found => format!("; it has {}: give one of them as --data, or rename them", quoted_paths(found)),
    }
}

fn counted(examples: usize) -> String {
    format!("{examples} example{}", if examples == 1 { "" } else { "s" })
}

fn advice(tokens: usize) -> String {
    match tokens {
        0 | 1 => "no context is short enough, give more text".to_owned(),
        usable => format!("the largest usable context is {usable}"),
    }
}
