//! The data that a spec names, as its model reads it.

use crate::settings::ModelSettings;
use crate::terminal::{Usage, tell};
use anyhow::{Context as _, Result};
use hydra_core::{Dataset, FirstItems};
use hydra_models::data::{
    Content, Context, Corpus, DecodeMemory, LossOn, Packing, Parted, PictureSource, Preprocessor, Records,
    Split, TokenForm, TokenSource,
};
use hydra_models::family::{Model, Reads};
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::path::Path;
use std::sync::Arc;

/// The context when nobody says which, if the model has so many positions.
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
    Pictures(Preprocessor, Arc<DecodeMemory>),
}

/// How a model reads texts and examples.
pub(crate) struct TokenReader {
    tokenizer: Tokenizer,
    vocabulary: usize,
    context: Context,
    loss_on: LossOn,
    pack: bool,
}

/// What `--data` names.
pub(crate) enum Source {
    Tokens(TokenSource),
    Pictures(PictureSource),
}

impl Source {
    /// Returns whether there is this split.
    pub(crate) fn has(&self, split: Split) -> bool {
        match self {
            Self::Tokens(source) => source.has(split),
            Self::Pictures(source) => source.has(split),
        }
    }
}

/// Splits of one source, in the order in which they were asked for.
pub(crate) struct Splits {
    pub(crate) splits: Vec<Arc<dyn Content>>,
    pub(crate) context: Option<usize>,
    pub(crate) items: &'static str,
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
                Ok(Self::Tokens(TokenReader { tokenizer, vocabulary, context, loss_on, pack }))
            }
            Reads::Pictures { side, channels } => {
                check_for_pictures(spec, channels)?;
                let preprocessor = Preprocessor::of_model(model.directory(), side).with_context(failed)?;
                Ok(Self::Pictures(preprocessor, memory.clone()))
            }
        }
    }

    /// The tokenizer, where texts are read.
    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Tokens(reader) => Some(&reader.tokenizer),
            Self::Pictures(..) => None,
        }
    }

    /// Finds the data of a `--data` value for the model of this name.
    pub(crate) fn open(&self, data: &str, model: &str) -> Result<Source> {
        Ok(match self {
            Self::Tokens(_) => Source::Tokens(match TokenSource::load(data) {
                Err(_) if PictureSource::are_at(Path::new(data)) => {
                    return Err(of_other_kind(model, ["tokens", "pictures"], data).into());
                }
                source => source?,
            }),
            Self::Pictures(..) if data == "builtin" => {
                return Err(of_other_kind(model, ["pictures", "text"], data).into());
            }
            Self::Pictures(..) => Source::Pictures(PictureSource::open(Path::new(data))?),
        })
    }

    /// Reads these splits for a model, which is made one of their classes where they have some.
    pub(crate) fn read(&self, source: &Source, splits: &[Split], model: &mut dyn Model) -> Result<Splits> {
        match (self, source) {
            (Self::Tokens(reader), Source::Tokens(source)) => reader.read(source, splits, model),
            (Self::Pictures(preprocessor, memory), Source::Pictures(source)) => {
                let numbers = model.number_classes(source.classes())?;
                note_of_parts(source).into_iter().chain(notes_of_unread(source)).for_each(|note| tell(&note));
                let pictures = |split: &Split| {
                    let pictures = source.pictures(*split, preprocessor, &numbers, memory)?;
                    Ok(Arc::new(pictures) as Arc<dyn Content>)
                };
                let splits = splits.iter().map(pictures).collect::<Result<_>>()?;
                Ok(Splits { splits, context: None, items: "pictures" })
            }
            _ => anyhow::bail!("the data is not of the kind that was opened"),
        }
    }
}

impl TokenReader {
    fn read(&self, source: &TokenSource, splits: &[Split], model: &dyn Model) -> Result<Splits> {
        let conventions = match source {
            TokenSource::Text(corpus) if self.pack => return Err(nothing_to_pack(corpus.name()).into()),
            TokenSource::Text(corpus) => {
                note_of_records(corpus).as_deref().into_iter().for_each(tell);
                Conventions::default()
            }
            TokenSource::Examples(_) => Conventions::of(&self.tokenizer, model.directory())?,
        };
        let Self { tokenizer, vocabulary, context, loss_on, pack } = self;
        let (vocabulary, context, loss_on, pack) = (*vocabulary, *context, *loss_on, *pack);
        let form = TokenForm { tokenizer, conventions: &conventions, context, vocabulary, loss_on, pack };
        let splits = source.splits(splits, &form)?;
        note_of_left_out(splits.left_out, splits.context).as_deref().into_iter().for_each(tell);
        splits.remarks.notes().iter().for_each(|note| tell(note));
        splits.packing.iter().for_each(|packing| tell(&note_of_packing(packing, splits.context)));
        Ok(Splits { splits: splits.splits, context: Some(splits.context), items: splits.items })
    }
}

/// Refuses settings that say how tokens are read.
fn check_for_pictures(spec: &ModelSettings, channels: usize) -> Result<(), Usage> {
    let name = spec.name();
    let given = [
        ("--context", spec.context.is_some()),
        ("--pack", spec.pack),
        ("--tokenizer", spec.tokenizer.is_some()),
        ("--loss-on", spec.loss_on != LossOn::default()),
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
fn note_of_parts(source: &PictureSource) -> Option<String> {
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
fn notes_of_unread(source: &PictureSource) -> Vec<String> {
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

/// The note on examples that are not trained on.
fn note_of_left_out(left_out: usize, context: usize) -> Option<String> {
    (left_out > 0).then(|| {
        format!(
            "note: {left_out} example{} left out, of which nothing that is to be learned lies within a context of \
             {context}: give a longer --context",
            if left_out == 1 { " is" } else { "s are" }
        )
    })
}

/// The note on how full rows of so many tokens are.
fn note_of_packing(packing: &Packing, context: usize) -> String {
    let Packing { examples, rows, tokens } = packing;
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
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

/// The note on a file of records, of which every character is trained on as if it were text.
fn note_of_records(corpus: &Corpus) -> Option<String> {
    let name = corpus.name();
    let (found, field) = match corpus.records()? {
        Records::JsonLines { fields } => {
            (format!("JSON in every line{}", named("fields", &fields)), fields.into_iter().next())
        }
        Records::Json => ("one value of JSON".to_owned(), None),
        Records::Table { separator: ',', columns } => {
            (format!("a table with commas between its columns{}", named("names", &columns)), None)
        }
        Records::Table { columns, .. } => {
            (format!("a table with tabs between its columns{}", named("names", &columns)), None)
        }
    };
    let text = "write what is to be learned into a text file and give that";
    let how = field.map_or(text.to_owned(), |field| {
        let lines =
            "name it FILE.jsonl if its lines have `text`, `prompt` and `completion`, or `messages`; or";
        format!("{lines} {text}, such as with: jq -r '.[\"{field}\"]' {name} > text.txt")
    });
    Some(format!(
        "note: `{name}` is read as plain text, punctuation and names of fields and all; it has {found}: {how}"
    ))
}

/// The first of some names, in words.
fn named(what: &str, names: &[String]) -> String {
    let some: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > NAMES { " .." } else { "" };
    if some.is_empty() { String::new() } else { format!(" with the {what} {}{more}", some.join(", ")) }
}

/// The context that was asked for, if the model has the positions, or the default.
pub(crate) fn context_of(positions: usize, asked: Option<usize>) -> Result<Context, Usage> {
    let Some(context) = asked else { return Ok(Context::AtMost(positions.min(DEFAULT_CONTEXT))) };
    if context <= positions {
        return Ok(Context::Exactly(context));
    }
    Err(Usage::new(format!(
        "--context {context} is longer than the model, which has {positions} positions: give --context {positions} \
         or less"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_fits_the_positions() {
        let context = |asked, positions| context_of(positions, asked);
        assert_eq!(context(None, 128).unwrap(), Context::AtMost(128));
        assert_eq!(context(None, 1024).unwrap(), Context::AtMost(512));
        assert_eq!(context(Some(1024), 1024).unwrap(), Context::Exactly(1024));
        let error = context(Some(129), 128).unwrap_err().to_string();
        assert!(error.contains("129") && error.contains("128 positions"), "{error}");
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
        let note = note_of_batch(9, 8, "pictures", None).unwrap();
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
        for part in [
            "is read as plain text",
            "the fields `answer`, `prompt`, `id`",
            "jq -r '.[\"answer\"]'",
            "a.data > text",
            "name it FILE.jsonl if",
        ] {
            assert!(lines.contains(part), "{part} in {lines}");
        }
        let table = note("a.csv", &"a,b,c,d,e,f,g\n".repeat(9)).unwrap();
        assert!(
            table.contains(
                "a table with commas between its columns with the names `a`, `b`, `c`, `d`, `e`, `f` ..:"
            ),
            "{table}"
        );
        assert!(note("a.json", "[\n1,\n2,\n3\n]\n").unwrap().contains("it has one value of JSON: write"));
        assert_eq!(note("a.txt", "some words, and more\n"), None);
        assert_eq!(note_of_records(&Corpus::builtin()), None);
    }
}
