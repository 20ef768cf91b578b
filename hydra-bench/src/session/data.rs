//! The data that a spec names, as its model reads it.

use crate::settings::ModelSettings;
use crate::terminal::Usage;
use anyhow::{Context as _, Result};
use hydra_core::{Dataset, FirstItems};
use hydra_models::data::{
    Column, Content, Context, Corpus, Counts, Cut, DecodeMemory, ExampleFiles, ImageSource, LossOn, Packing,
    Parted, Preprocessor, Records, Split, TokenForm, TokenSource, TokenSplits,
};
use hydra_models::family::{Model, Reads};
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::path::Path;
use std::sync::Arc;

/// The context of blocks and packed rows without `--context`, if the model has so many positions.
const DEFAULT_CONTEXT: usize = 512;

/// The data that a run trains on and is measured on.
pub(crate) struct Data {
    pub(crate) train: Arc<dyn Content>,
    pub(crate) validation: Option<Arc<dyn Content>>,
    pub(crate) test: Option<Arc<dyn Content>>,
    /// The tokens of an item, where items have some.
    pub(crate) context: Option<usize>,
    /// What items are called.
    pub(crate) items: &'static str,
    /// What is not used, cut off or chosen, a line each.
    pub(crate) notes: Vec<String>,
}

impl Data {
    /// The validation and the test data: all items, or the first ones.
    pub(crate) fn evaluated(&self, limit: Option<usize>) -> [Option<Arc<dyn Dataset>>; 2] {
        [&self.validation, &self.test].map(|data| {
            let data: Arc<dyn Dataset> = data.clone()?;
            Some(match limit {
                Some(most) => Arc::new(FirstItems::new(data, most)),
                None => data,
            })
        })
    }

    /// The splits, of which all but the first may be missing.
    pub(crate) fn splits(&self) -> [Option<&dyn Content>; 3] {
        [Some(self.train.as_ref()), self.validation.as_deref(), self.test.as_deref()]
    }

    /// The note on a minibatch that is larger than the training data.
    pub(crate) fn note_of_batch(&self, batch: usize) -> Option<String> {
        note_of_batch(batch, self.train.len(), self.items, self.context)
    }
}

/// How a model reads data.
pub(crate) enum Reader {
    Tokens(TokenReader),
    Images(Preprocessor, Arc<DecodeMemory>),
}

/// How a model reads texts and examples.
pub(crate) struct TokenReader {
    tokenizer: Tokenizer,
    vocabulary: usize,
    /// The most tokens that the model has positions for.
    positions: usize,
    context: Context,
    loss_on: LossOn,
    pack: bool,
    columns: Vec<Column>,
}

/// What `--data` names.
pub(crate) enum Source {
    Tokens(TokenSource),
    Images(ImageSource),
}

impl Source {
    /// Returns whether there is this split.
    pub(crate) fn has(&self, split: Split) -> bool {
        match self {
            Self::Tokens(source) => source.has(split),
            Self::Images(source) => source.has(split),
        }
    }
}

/// Splits of one source, in the order in which they were asked for.
pub(crate) struct Splits {
    pub(crate) splits: Vec<Arc<dyn Content>>,
    pub(crate) context: Option<usize>,
    pub(crate) items: &'static str,
    pub(crate) notes: Vec<String>,
}

impl Reader {
    /// The way in which a model reads, with these settings.
    pub(crate) fn new(model: &dyn Model, spec: &ModelSettings, memory: &Arc<DecodeMemory>) -> Result<Self> {
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        match model.reads() {
            Reads::Tokens { positions, vocabulary } => {
                let tokenizer = match spec.tokenizer {
                    Some(built_in) => built_in.tokenizer(vocabulary),
                    None => Tokenizer::for_model(model.directory(), vocabulary),
                };
                let tokenizer = tokenizer.with_context(failed)?;
                let context = context_of(positions, spec.context)?;
                let ModelSettings { loss_on, pack, .. } = *spec;
                let columns = spec.columns.clone();
                let reader =
                    TokenReader { tokenizer, vocabulary, positions, context, loss_on, pack, columns };
                Ok(Self::Tokens(reader))
            }
            Reads::Images { side, channels } => {
                check_for_images(spec, channels)?;
                let preprocessor = Preprocessor::of_model(model.directory(), side).with_context(failed)?;
                Ok(Self::Images(preprocessor, memory.clone()))
            }
        }
    }

    /// The tokenizer, where texts are read.
    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Tokens(reader) => Some(&reader.tokenizer),
            Self::Images(..) => None,
        }
    }

    /// Finds the data of a `--data` value for the model of this name.
    pub(crate) fn open(&self, data: &str, model: &str) -> Result<Source> {
        Ok(match self {
            Self::Tokens(reader) => Source::Tokens(match TokenSource::load(data, &reader.columns) {
                Err(_) if ImageSource::are_at(Path::new(data)) => {
                    return Err(of_other_kind(model, ["tokens", "images"], data).into());
                }
                source => source?,
            }),
            Self::Images(..) if data == "builtin" => {
                return Err(of_other_kind(model, ["images", "text"], data).into());
            }
            Self::Images(..) => Source::Images(ImageSource::open(Path::new(data))?),
        })
    }

    /// Reads these splits for a model, which is made one of their classes where they have some.
    pub(crate) fn read(&self, source: &Source, splits: &[Split], model: &mut dyn Model) -> Result<Splits> {
        match (self, source) {
            (Self::Tokens(reader), Source::Tokens(source)) => reader.read(source, splits, model),
            (Self::Images(preprocessor, memory), Source::Images(source)) => {
                let numbers = model.number_classes(source.classes())?;
                let notes = note_of_parts(source).into_iter().chain(notes_of_unread(source)).collect();
                let images = |split: &Split| {
                    let images = source.images(*split, preprocessor, &numbers, memory)?;
                    Ok(Arc::new(images) as Arc<dyn Content>)
                };
                let splits = splits.iter().map(images).collect::<Result<_>>()?;
                Ok(Splits { splits, context: None, items: "images", notes })
            }
            _ => anyhow::bail!("the data is not of the kind that was opened"),
        }
    }
}

impl TokenReader {
    fn read(&self, source: &TokenSource, splits: &[Split], model: &dyn Model) -> Result<Splits> {
        let conventions = match source {
            TokenSource::Text(corpus) if self.pack => return Err(nothing_to_pack(corpus.name()).into()),
            TokenSource::Text(corpus) if !self.columns.is_empty() => {
                return Err(no_columns(corpus.name()).into());
            }
            TokenSource::Text(_) => Conventions::default(),
            TokenSource::Examples(_) => Conventions::of(&self.tokenizer, model.directory())?,
        };
        let Self { tokenizer, vocabulary, context, loss_on, pack, .. } = self;
        let (vocabulary, context, loss_on, pack) = (*vocabulary, *context, *loss_on, *pack);
        let form = TokenForm { tokenizer, conventions: &conventions, context, vocabulary, loss_on, pack };
        let splits = source.splits(splits, &form)?;
        let notes = match source {
            TokenSource::Text(corpus) => note_of_records(corpus).into_iter().collect(),
            TokenSource::Examples(files) => self.notes(files, &splits),
        };
        Ok(Splits { splits: splits.splits, context: Some(splits.context), items: splits.items, notes })
    }

    /// The notes on what is not used of examples.
    fn notes(&self, files: &ExampleFiles, splits: &TokenSplits) -> Vec<String> {
        let name = files.name();
        let unread: Vec<String> = files.unread().iter().map(|path| format!("`{}`", path.display())).collect();
        let tally = &splits.tally;
        let notes = [
            note_of_unread(name, &unread),
            note_of_unused(name, &tally.unused),
            note_of_alpaca(name, tally.alpaca),
            note_of_sharegpt(name, tally.sharegpt),
            note_of_merged(name, tally.merged),
            note_of_unlearned(name, splits.unlearned),
            note_of_cut(name, splits, self.context.example, self.positions),
            splits.packing.as_ref().map(|packing| note_of_packing(packing, splits.context)),
        ];
        notes.into_iter().flatten().chain(tally.remarks.notes()).collect()
    }
}

/// Refuses settings that say how tokens are read.
fn check_for_images(spec: &ModelSettings, channels: usize) -> Result<(), Usage> {
    let name = spec.name();
    let given = [
        ("--context", spec.context.is_some()),
        ("--pack", spec.pack),
        ("--tokenizer", spec.tokenizer.is_some()),
        ("--loss-on", spec.loss_on != LossOn::default()),
        ("--columns", !spec.columns.is_empty()),
    ];
    if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
        return Err(Usage::new(format!("{flag} is for tokens, and `{name}` reads pictures: leave it out")));
    }
    match channels {
        3 => Ok(()),
        _ => Err(Usage::new(format!(
            "the model `{name}` reads pictures of {channels} colours, and data has three, red, green and blue: give a \
             model whose `num_channels` is 3"
        ))),
    }
}

/// Refuses data of a kind that the model does not read.
fn of_other_kind(model: &str, [reads, found]: [&str; 2], data: &str) -> Usage {
    Usage::new(format!(
        "`{model}` reads {reads}, and the data `{data}` is {found}: give --data with {reads}, or a --model that reads {found}"
    ))
}

/// The note on splits that are parts of the training data.
fn note_of_parts(source: &ImageSource) -> Option<String> {
    let name = source.name();
    match source.parted() {
        Parted::Nothing => None,
        Parted::Validation => Some(format!(
            "note: `{name}` has no validation data: the last tenth of each class of the training data is"
        )),
        Parted::ValidationAndTest => Some(format!(
            "note: `{name}` has training data alone: the last tenth of each class is the test data, and the tenth before it \
             the validation data"
        )),
    }
}

/// The notes on what lies beside the images that are read.
fn notes_of_unread(source: &ImageSource) -> Vec<String> {
    let (name, unread) = (source.name(), source.unread());
    let mut notes = Vec::new();
    match unread.files() {
        0 => {}
        1 => notes.push(format!(
            "note: 1 file of `{name}` is not read, for its ending is not .png or .jpg: {unread}"
        )),
        files => notes.push(format!(
            "note: {files} files of `{name}` are not read, for their endings are not .png or .jpg: {unread}"
        )),
    }
    if !unread.folders().is_empty() {
        let folders: Vec<String> = unread.folders().iter().map(|folder| format!("`{folder}`")).collect();
        notes.push(format!(
            "note: these folders of `{name}` are not read, for they are those of no split (train; validation, valid, val, dev or \
             eval; test) or of one that has another folder: {}",
            folders.join(", ")
        ));
    }
    notes
}

/// The note on files of rows that belong to no split.
fn note_of_unread(name: &str, unread: &[String]) -> Option<String> {
    let (some, more) = (&unread[..unread.len().min(NAMES)], if unread.len() > NAMES { " .." } else { "" });
    (!unread.is_empty()).then(|| {
        format!(
            "note: `{name}` has files that belong to no split and are not read: {}{more}; a split's files are called train, \
             validation or test",
            some.join(", ")
        )
    })
}

/// The note on fields of rows without a use.
fn note_of_unused(name: &str, unused: &Counts) -> Option<String> {
    let some =
        unused.iter().take(NAMES).map(|(field, rows)| format!("`{field}` ({})", counted(*rows, "row")));
    let (some, more) = (some.collect::<Vec<_>>().join(", "), unused.len().saturating_sub(NAMES));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!unused.is_empty()).then(|| {
        format!("note: fields of `{name}` are not used: {some}{more}; --columns FIELD=COLUMN reads a column as another field")
    })
}

/// The note on rows that a published template writes.
fn note_of_alpaca(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: {} of `{name}` with `instruction` and `output` are written with Alpaca's prompt template, \"Below is an \
             instruction that describes a task ..\"; without it: --columns prompt=instruction,completion=output",
            counted(rows, "row")
        )
    })
}

/// The note on roles that have other names.
fn note_of_sharegpt(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: {} of `{name}` have the roles of ShareGPT: `human` is read as `user`, and `gpt` as `assistant`",
            counted(rows, "conversation")
        )
    })
}

/// The note on prompts whose end is no end of a token.
fn note_of_merged(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: in {} of `{name}` the prompt has other tokens at its end where the completion follows: what is learned \
             begins where they differ, as in TRL",
            counted(rows, "row")
        )
    })
}

/// The note on examples that say nothing to learn.
fn note_of_unlearned(name: &str, examples: usize) -> Option<String> {
    (examples > 0).then(|| {
        let are = if examples == 1 { "is" } else { "are" };
        format!(
            "note: {} of `{name}` {are} left out, of which nothing is learned",
            counted(examples, "example")
        )
    })
}

/// The note on what a context cuts off, and on what keeps it.
fn note_of_cut(name: &str, splits: &TokenSplits, context: usize, positions: usize) -> Option<String> {
    let Cut { examples, tokens, of_examples, of_tokens, longest } = splits.cut;
    let skipped = match splits.skipped {
        0 => String::new(),
        1 => "; 1 example is left out, of which nothing that is learned remains".to_owned(),
        more => format!("; {more} examples are left out, of which nothing that is learned remains"),
    };
    let keeps = match longest <= positions {
        true => format!("--context {longest} keeps all"),
        false if context < positions => {
            format!(
                "--context {positions}, the model's positions, keeps more; the longest has {longest} tokens"
            )
        }
        false => format!(
            "the model has no more positions, and the longest has {longest} tokens: split long examples"
        ),
    };
    (examples > 0).then(|| {
        format!(
            "note: {examples} of {} of `{name}` are cut at a context of {context}, {tokens} of their {of_tokens} tokens are \
             lost{skipped}: {keeps}",
            counted(of_examples, "example")
        )
    })
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The note on how full rows of so many tokens are.
fn note_of_packing(packing: &Packing, context: usize) -> String {
    let Packing { examples, rows, tokens } = packing;
    let full = tokens * 100 / (rows * context).max(1);
    let (examples, rows) = (counted(*examples, "example"), counted(*rows, "row"));
    format!("note: {examples} packed into {rows} of {context} tokens, {full}% full")
}

/// Refuses to pack a text.
fn nothing_to_pack(text: &str) -> Usage {
    Usage::new(format!(
        "--pack lays examples of instruction data side by side, and `{text}` is plain text, whose blocks are full: leave \
         --pack out, or give --data FILE.jsonl"
    ))
}

/// Refuses columns of a text.
fn no_columns(text: &str) -> Usage {
    Usage::new(format!(
        "--columns names columns of rows, and `{text}` is plain text: leave it out, or give --data FILE.csv, .tsv, .json, .jsonl or \
         .parquet"
    ))
}

/// The note on a minibatch that is larger than the training data of so many `items`.
fn note_of_batch(batch: usize, train: usize, items: &str, context: Option<usize>) -> Option<String> {
    let of = context.map_or(String::new(), |context| format!(" of {context} tokens"));
    let shorter = if context.is_some() { ", a shorter --context" } else { "" };
    (batch > train).then(|| {
        format!(
            "note: batch {batch} is more than the training data has, {train} {items}{of}: every minibatch is all of it; \
             give a smaller --batch{shorter} or more --data"
        )
    })
}

/// The names that a note lists at most.
const NAMES: usize = 6;

/// The note on a text that looks like rows, of which every character is trained on.
fn note_of_records(corpus: &Corpus) -> Option<String> {
    let name = corpus.name();
    let (found, ending) = match corpus.records()? {
        Records::JsonLines { fields } => (format!("JSON in every line{}", named("fields", &fields)), "jsonl"),
        Records::Json => ("one value of JSON".to_owned(), "json"),
    };
    Some(format!(
        "note: `{name}` is read as plain text, punctuation and names of fields and all; it has {found}: to learn from its rows, \
         name it FILE.{ending}"
    ))
}

/// The first of some names, in words.
fn named(what: &str, names: &[String]) -> String {
    let some: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > NAMES { " .." } else { "" };
    if some.is_empty() { String::new() } else { format!(" with the {what} {}{more}", some.join(", ")) }
}

/// The context that was asked for, if the model has the positions, or the default: examples are as long as the model's positions
/// allow, and blocks of text have at most [`DEFAULT_CONTEXT`] tokens.
pub(crate) fn context_of(positions: usize, asked: Option<usize>) -> Result<Context, Usage> {
    match asked {
        None => Ok(Context { block: positions.min(DEFAULT_CONTEXT), example: positions }),
        Some(context) if context <= positions => Ok(Context::of(context)),
        Some(context) => Err(Usage::new(format!(
            "--context {context} is longer than the model, which has {positions} positions: give --context {positions} \
             or less"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_fits_the_positions() {
        let context = |asked, positions| context_of(positions, asked);
        assert_eq!(context(None, 128).unwrap(), Context::of(128));
        assert_eq!(context(None, 1024).unwrap(), Context { block: 512, example: 1024 });
        assert_eq!(context(Some(1024), 1024).unwrap(), Context::of(1024));
        let error = context(Some(129), 128).unwrap_err().to_string();
        assert!(error.contains("129") && error.contains("128 positions"), "{error}");
    }

    #[test]
    fn what_is_cut_is_said_with_what_keeps_it() {
        let note = |longest, skipped, context| {
            let cut = Cut { examples: 2, tokens: 30, of_examples: 40, of_tokens: 900, longest };
            let (items, tally) = ("examples", hydra_models::data::Tally::default());
            let splits = TokenSplits {
                items,
                context,
                cut,
                skipped,
                unlearned: 0,
                packing: None,
                tally,
                splits: Vec::new(),
            };
            note_of_cut("a.jsonl", &splits, context, 128).unwrap()
        };
        assert_eq!(
            note(100, 0, 64),
            "note: 2 of 40 examples of `a.jsonl` are cut at a context of 64, 30 of their 900 tokens are lost: --context 100 \
             keeps all"
        );
        let note_of_more = note(200, 1, 64);
        assert!(
            note_of_more.contains("1 example is left out")
                && note_of_more.contains("--context 128, the model's")
        );
        assert!(note(200, 0, 128).ends_with(
            "the model has no more positions, and the longest has 200 tokens: split long examples"
        ));
    }

    #[test]
    fn fields_without_a_use_are_said_with_the_number_of_rows() {
        let unused = Counts::from([("id".to_owned(), 40), ("source".to_owned(), 1)]);
        let note = note_of_unused("a.csv", &unused).unwrap();
        assert!(note.contains("`id` (40 rows), `source` (1 row); --columns"), "{note}");
        assert_eq!(note_of_unused("a.csv", &Counts::default()), None);
    }

    #[test]
    fn how_full_rows_are_is_said() {
        let note = |examples, rows, tokens| note_of_packing(&Packing { examples, rows, tokens }, 512);
        assert_eq!(note(412, 97, 48_000), "note: 412 examples packed into 97 rows of 512 tokens, 96% full");
        assert_eq!(note(1, 1, 512), "note: 1 example packed into 1 row of 512 tokens, 100% full");
    }

    #[test]
    fn a_batch_beyond_the_text_is_said() {
        assert_eq!(note_of_batch(8, 8, "blocks", Some(32)), None);
        let note = note_of_batch(9, 8, "blocks", Some(32)).unwrap();
        assert!(note.contains("batch 9") && note.contains("8 blocks of 32 tokens"), "{note}");
        assert!(!note.contains('\n'), "one line");
        let note = note_of_batch(9, 8, "images", None).unwrap();
        assert!(note.contains("has, 8 pictures: every") && !note.contains("--context"), "{note}");
    }

    #[test]
    fn records_are_said_with_what_they_have() {
        let dir = tempfile::tempdir().unwrap();
        let note = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).unwrap();
            note_of_records(&Corpus::open(&dir.path().join(name)).unwrap())
        };
        let lines =
            note("a.data", &"{\"id\": 7, \"prompt\": \"why\", \"answer\": \"so\"}\n".repeat(9)).unwrap();
        for part in ["is read as plain text", "the fields `prompt`, `answer`, `id`", "name it FILE.jsonl"] {
            assert!(lines.contains(part), "{part} in {lines}");
        }
        assert!(note("a.txt", "[\n1,\n2,\n3\n]\n").unwrap().contains("it has one value of JSON: to learn"));
        assert_eq!(note("b.txt", "some words, and more\n"), None);
        assert_eq!(note_of_records(&Corpus::builtin()), None);
    }
}
