//! Errors of a corpus and of the blocks cut from it.

use hydra_core::ByteSize;
use std::path::PathBuf;

use super::Split;
use super::examples::ExampleError;
use super::pictures::JpegError;
use crate::tokenizer::TokenizerError;

/// A corpus that cannot be read, or a text that gives no blocks.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum DataError {
    /// Nothing is at the path.
    #[error("no data at `{path}`: give a WikiText directory, a plain-text file or `builtin`", path = path.display())]
    Missing { path: PathBuf },
    /// A file of Parquet, and a program that was built without its feature.
    #[error(
        "`{path}` is a Parquet file, which this program was built without: build it with `--features parquet`, or write its \
         rows as JSON, a line each, into FILE.jsonl and give that, such as with: python -c \"import pandas; pandas.read_parquet('{path}').to_json('FILE.jsonl', orient='records', \
         lines=True)\"",
        path = path.display()
    )]
    Parquet { path: PathBuf },
    /// A file that is no Parquet, or damaged.
    #[error("`{path}` could not be read as Parquet: replace it, or write it anew", path = path.display())]
    ParquetFile { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// A table without the columns of records.
    #[error(
        "`{path}` has the columns {}, expected text, prompt and completion, input_ids, or messages: rename what is to be learned",
        quoted(found), path = path.display()
    )]
    ParquetColumns { path: PathBuf, found: Vec<String> },
    /// A row that is not what instruction data has.
    #[error("row {row} of `{path}`: expected text, a prompt and a completion, input_ids, or messages with a role and a content each; \
             found {found}", path = path.display())]
    ParquetRow {
        path: PathBuf,
        /// The row, counted from one.
        row: usize,
        found: String,
    },
    /// A directory without a split.
    #[error("`{path}` holds none of the files looked for: {names}", path = directory.display(), names = looked_for.join(", "))]
    NoSplits { directory: PathBuf, looked_for: Vec<&'static str> },
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
    /// A line that is not what instruction data has.
    #[error(
        "line {line} of `{path}`: expected {{\"text\": ..}}, {{\"prompt\": .., \"completion\": ..}}, {{\"input_ids\": ..}} or {{\"messages\": \
         [{{\"role\": .., \"content\": ..}}, ..]}}, found {found}",
        path = path.display()
    )]
    Record {
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        found: String,
    },
    /// A record that the model has no tokens for.
    #[error("line {line} of `{path}` is no example for this model", path = path.display())]
    Example {
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        source: ExampleError,
    },
    /// Examples of which nothing is trained on.
    #[error(
        "{name} has nothing to learn: of {} nothing that counts lies within a context of {context}; give a longer --context",
        counted(*examples)
    )]
    NothingToLearn { name: String, examples: usize, context: usize },
    /// A directory without pictures.
    #[error(
        "no pictures at `{path}`: give a directory with a folder for each class, such as train/cat/1.png, and perhaps \
         validation/ and test/, or CIFAR-10's data_batch_1.bin to data_batch_5.bin and test_batch.bin",
        path = path.display()
    )]
    NoPictures { path: PathBuf },
    /// A picture beside the folders of classes.
    #[error("`{path}` is in no class: put it into a folder with the name of its class", path = path.display())]
    NoClass { path: PathBuf },
    /// A class folder whose name is no text.
    #[error("the name of the class folder `{path}` is not UTF-8: give it another", path = path.display())]
    ClassName { path: PathBuf },
    /// A class folder without pictures.
    #[error("the class folder `{path}` has no pictures, PNG or JPEG: remove it, or fill it", path = path.display())]
    ClassEmpty { path: PathBuf },
    /// A folder where a picture should be.
    #[error("`{path}` is a folder inside of a class: put its pictures into the class's folder", path = path.display())]
    ClassWithin { path: PathBuf },
    /// A class that the training data does not have.
    #[error("`{path}` is a class that is not trained: train has {known}", path = path.display(), known = known.join(", "))]
    ClassUnknown { path: PathBuf, known: Vec<String> },
    /// A file that holds no picture that is read.
    #[error("`{path}` is no PNG and no JPEG, found {found}: convert it, or take it away", path = path.display())]
    PictureKind { path: PathBuf, found: String },
    /// A picture whose colours are of a kind that is not read.
    #[error("the colours of `{path}` are {found}, expected red, green and blue, or greys, of 8 bits: convert it", path = path.display())]
    PictureMode { path: PathBuf, found: &'static str },
    /// A PNG that is damaged.
    #[error("`{path}` could not be decoded: replace it, or take it away", path = path.display())]
    Picture { path: PathBuf, source: image::ImageError },
    /// A JPEG that is damaged, or of a kind that is not read.
    #[error("`{path}` could not be decoded: replace it, or take it away", path = path.display())]
    Jpeg { path: PathBuf, source: JpegError },
    /// An image that needs more host memory than there is.
    #[error(
        "`{path}`{} needs {needed} of host memory to be decoded, and there are {available}: give more --host-memory, make the \
         image smaller, or take it away",
        of_pixels(size), path = path.display()
    )]
    PictureMemory { path: PathBuf, size: Option<[usize; 2]>, needed: ByteSize, available: ByteSize },
    /// An image of more pixels than Pillow reads.
    #[error(
        "`{path}` has {width} by {height} pixels, more than the {most} beyond which Pillow refuses an image as a \
         decompression bomb: make it smaller, or take it away",
        path = path.display()
    )]
    PicturePixels { path: PathBuf, width: usize, height: usize, most: u64 },
    /// A picture of another size, where pictures are not resized.
    #[error(
        "`{path}` has {} by {} pixels, expected {side} by {side}: the model's preprocessor_config.json says `do_resize` false",
        found[0], found[1], path = path.display()
    )]
    PictureSize { path: PathBuf, side: usize, found: [usize; 2] },
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

fn quoted(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
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
