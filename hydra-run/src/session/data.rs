//! Loads the data of a spec for its model.

use super::labelled::{LabelReader, task_type};
use super::own::{self, OwnModel};
use super::pairs::{PairReader, check_settings};
use super::splits::{
    NAMES, Splits, context_of, counted, note_of_cut, note_of_merged, note_of_parts, note_of_sharegpt,
    note_of_truncated, note_of_unread, note_of_unused, notes_of_model, notes_of_unread,
};
use crate::settings::{ModelSettings, TaskName};
use crate::terminal::Usage;
use anyhow::{Context as _, Result, bail};
use hydra_core::{Dataset, FirstItems};
use hydra_models::data::{
    Column, Content, Context, Corpus, CorpusKind, DecodeMemory, ExampleFiles, ImageSource, InputRows,
    LabelledFiles, LossOn, PREPROCESSOR, Packing, PreferenceFiles, Preprocessor, Records, ScoredRows, Split,
    TokenForm, TokenSource, TokenSplits, WithReference,
};
use hydra_models::family::{Model, Reads, TaskType};
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The training and evaluation data of a run.
pub(crate) struct Data {
    pub(crate) train: Arc<dyn Content>,
    pub(crate) validation: Option<Arc<dyn Content>>,
    pub(crate) test: Option<Arc<dyn Content>>,
    /// Tokens of an item; `None` for images.
    pub(crate) context: Option<usize>,
    /// The name of items, such as "images".
    pub(crate) items: &'static str,
    /// Notes on unused, truncated and defaulted data, one per line.
    pub(crate) notes: Vec<String>,
    /// The training, validation and test splits again, if they have the log-probabilities of a reference.
    pub(crate) references: [Option<Arc<WithReference>>; 3],
}

impl Data {
    /// Returns the validation and the test data, limited to the first `limit` items.
    pub(crate) fn evaluated(&self, limit: Option<usize>) -> [Option<Arc<dyn Dataset>>; 2] {
        [&self.validation, &self.test].map(|data| {
            let data: Arc<dyn Dataset> = data.clone()?;
            Some(match limit {
                Some(most) => Arc::new(FirstItems::new(data, most)),
                None => data,
            })
        })
    }

    /// Returns the data of an embedding program, which has at least training data.
    fn of_own(own: &OwnModel) -> Result<Self, Usage> {
        let [train, validation, test] = own.splits.clone();
        let train = train.ok_or_else(|| Usage::new(format!("`{}` has no training data", own.data)))?;
        let references = [None, None, None];
        Ok(Self { train, validation, test, context: None, items: "items", notes: Vec::new(), references })
    }

    /// Returns one of the splits, if there is one.
    fn split(&self, split: Split) -> Option<&Arc<dyn Content>> {
        match split {
            Split::Train => Some(&self.train),
            Split::Validation => self.validation.as_ref(),
            Split::Test => self.test.as_ref(),
        }
    }

    /// Returns the training, validation and test splits.
    pub(crate) fn splits(&self) -> [Option<&dyn Content>; 3] {
        [Some(self.train.as_ref()), self.validation.as_deref(), self.test.as_deref()]
    }

    /// The note on a minibatch that is larger than the training data.
    pub(crate) fn note_of_batch(&self, batch: usize) -> Option<String> {
        note_of_batch(batch, self.train.len(), self.items, self.context)
    }
}

/// Reads data for a model.
pub(crate) enum Reader {
    Tokens(TokenReader),
    Labelled(Box<LabelReader>),
    Pairs(Box<PairReader>),
    Images(Preprocessor, Arc<DecodeMemory>),
    Own(Arc<OwnModel>),
}

/// Reads texts and examples for a language model.
pub(crate) struct TokenReader {
    tokenizer: Tokenizer,
    vocabulary: usize,
    /// The number of positions of the model.
    positions: usize,
    context: Context,
    loss_on: LossOn,
    pack: bool,
    columns: Vec<Column>,
}

/// The source given by `--data`.
pub(crate) enum Source {
    Tokens(TokenSource),
    Labelled(LabelledFiles),
    Pairs(PreferenceFiles),
    Images(ImageSource),
    Own(Data),
}

impl Source {
    /// Returns true if the source has this split.
    pub(crate) fn has(&self, split: Split) -> bool {
        match self {
            Self::Tokens(source) => source.has(split),
            Self::Labelled(source) => source.has(split),
            Self::Pairs(source) => source.has(split),
            Self::Images(source) => source.has(split),
            Self::Own(data) => data.split(split).is_some(),
        }
    }
}

impl Reader {
    /// Returns the reader of a model with these settings.
    pub(crate) fn new(model: &dyn Model, spec: &ModelSettings, memory: &Arc<DecodeMemory>) -> Result<Self> {
        if let Some(own) = own::find(spec)? {
            return Ok(Self::Own(own));
        }
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        let task = task_type(model, spec)?;
        check_settings(spec)?;
        match model.reads() {
            Reads::Tokens { positions, vocabulary } => {
                let tokenizer = match spec.tokenizer {
                    Some(built_in) => built_in.tokenizer(vocabulary),
                    None => Tokenizer::for_model(model.directory(), vocabulary),
                };
                let tokenizer = tokenizer.with_context(failed)?;
                if spec.task.is_some_and(TaskName::reads_pairs) {
                    return Ok(Self::Pairs(Box::new(PairReader::new(model, tokenizer, spec)?)));
                }
                if task == TaskType::SequenceClassification {
                    let reader = LabelReader::new(model, tokenizer, spec)?;
                    return Ok(Self::Labelled(Box::new(reader)));
                }
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
            Reads::Batches => bail!("`{}` reads batches that no program has brought", spec.name()),
        }
    }

    /// Returns the tokenizer of a model that reads texts.
    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Tokens(reader) => Some(&reader.tokenizer),
            Self::Labelled(reader) => Some(&reader.tokenizer),
            Self::Pairs(reader) => Some(&reader.tokenizer),
            Self::Images(..) | Self::Own(_) => None,
        }
    }

    /// Opens the source of a `--data` value for the model of this name.
    pub(crate) fn open(&self, data: &str, model: &str) -> Result<Source> {
        Ok(match self {
            Self::Tokens(reader) => Source::Tokens(match TokenSource::load(data, &reader.columns) {
                Err(_) if ImageSource::are_at(Path::new(data)) => {
                    return Err(of_other_kind(model, ["tokens", "images"], data).into());
                }
                source => source?,
            }),
            Self::Labelled(reader) => Source::Labelled(reader.open(data)?),
            Self::Pairs(reader) => Source::Pairs(reader.open(data)?),
            Self::Images(..) if data == "builtin" => {
                return Err(of_other_kind(model, ["images", "text"], data).into());
            }
            Self::Images(..) => Source::Images(ImageSource::open(Path::new(data))?),
            Self::Own(own) => Source::Own(Data::of_own(own)?),
        })
    }

    /// Reads splits for a model. A classifier without weights takes over the classes of the data.
    pub(crate) fn read(&self, source: &Source, splits: &[Split], model: &mut dyn Model) -> Result<Splits> {
        match (self, source) {
            (Self::Tokens(reader), Source::Tokens(source)) => reader.read(source, splits, model),
            (Self::Labelled(reader), Source::Labelled(source)) => reader.read(source, splits, model),
            (Self::Pairs(reader), Source::Pairs(source)) => reader.read(source, splits, model),
            (Self::Images(preprocessor, memory), Source::Images(source)) => {
                let numbers = model.number_classes(source.classes())?;
                let (name, held_out) = (source.name(), source.held_out());
                let unread = notes_of_unread(name, source.unread(), ".png or .jpg");
                let defaults = note_of_preprocessor(model.directory(), preprocessor.side());
                let notes = note_of_parts(name, held_out).into_iter().chain(unread).chain(defaults).collect();
                let images = |split: &Split| {
                    let images = source.images(*split, preprocessor, &numbers, memory)?;
                    Ok(Arc::new(images) as Arc<dyn Content>)
                };
                let splits = splits.iter().map(images).collect::<Result<_>>()?;
                Ok(Splits { splits, context: None, items: "images", notes, references: Vec::new() })
            }
            (Self::Own(_), Source::Own(data)) => {
                let split = |split: &Split| {
                    let found = data.split(*split).cloned();
                    found.with_context(|| format!("the data has no split of the kind {split:?}"))
                };
                let splits = splits.iter().map(split).collect::<Result<_>>()?;
                let (items, notes, references) = (data.items, Vec::new(), Vec::new());
                Ok(Splits { splits, context: None, items, notes, references })
            }
            _ => bail!("the data is not of the kind that was opened"),
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
            TokenSource::Examples(_) => Conventions::load(&self.tokenizer, model.directory())?,
        };
        let Self { tokenizer, vocabulary, context, loss_on, pack, .. } = self;
        let (vocabulary, context, loss_on, pack) = (*vocabulary, *context, *loss_on, *pack);
        let form = TokenForm { tokenizer, conventions: &conventions, context, vocabulary, loss_on, pack };
        let read = source.splits(splits, &form)?;
        let notes = match source {
            TokenSource::Text(corpus) => notes_of_text(corpus, splits, &read),
            TokenSource::Examples(files) => self.notes(files, &read),
        };
        Ok(Splits {
            splits: read.splits,
            context: Some(read.context),
            items: read.items,
            notes: notes.into_iter().chain(notes_of_model(model)).collect(),
            references: Vec::new(),
        })
    }

    /// Reads rows to score.
    pub(super) fn rows(&self, rows: &InputRows, model: &dyn Model) -> Result<(ScoredRows, Vec<String>)> {
        if self.pack {
            bail!(Usage::new("--pack applies to training data, and each row is scored by itself: omit it"));
        }
        let conventions = Conventions::load(&self.tokenizer, model.directory())?;
        let Self { tokenizer, vocabulary, context, loss_on, .. } = self;
        let (vocabulary, context, loss_on) = (*vocabulary, *context, *loss_on);
        let form =
            TokenForm { tokenizer, conventions: &conventions, context, vocabulary, loss_on, pack: false };
        let scored = rows.examples(&form)?;
        let (name, tally) = (rows.path().display().to_string(), &scored.tally);
        let notes = [
            note_of_alpaca(&name, tally.alpaca),
            note_of_sharegpt(&name, tally.sharegpt),
            note_of_merged(&name, tally.merged),
            note_of_truncated((&name, "text"), scored.cut, "", context.example, self.positions),
        ];
        let notes = notes.into_iter().flatten().chain(tally.remarks.notes()).chain(notes_of_model(model));
        let notes = notes.collect();
        Ok((scored, notes))
    }

    /// Returns the notes on unused parts of the examples.
    fn notes(&self, files: &ExampleFiles, splits: &TokenSplits) -> Vec<String> {
        let name = files.name();
        let tally = &splits.tally;
        let notes = [
            note_of_unread(name, files.unread()),
            note_of_unused(name, &tally.unused),
            files.have_labels().then(|| note_of_labels(name)),
            note_of_alpaca(name, tally.alpaca),
            note_of_sharegpt(name, tally.sharegpt),
            note_of_merged(name, tally.merged),
            note_of_empty(name, tally.empty).filter(|_| self.loss_on == LossOn::Completions),
            note_of_unlearned(name, splits.unlearned),
            note_of_cut(name, splits, self.context.example, self.positions),
            splits.packing.as_ref().map(|packing| note_of_packing(packing, splits.context)),
        ];
        notes.into_iter().flatten().chain(tally.remarks.notes()).collect()
    }
}

/// Fails on settings that apply to tokens only.
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
        return Err(Usage::new(format!("{flag} applies to token data, and `{name}` reads images: omit it")));
    }
    match channels {
        3 => Ok(()),
        _ => Err(Usage::new(format!(
            "the model `{name}` expects images with {channels} channels, and data has 3 (RGB): pass a model whose \
            `num_channels` is 3"
        ))),
    }
}

/// Returns the error for data of a kind that the model does not read.
fn of_other_kind(model: &str, [reads, found]: [&str; 2], data: &str) -> Usage {
    Usage::new(format!(
        "`{model}` reads {reads}, and the data `{data}` is {found}: pass --data with {reads}, or a --model that reads {found}"
    ))
}

/// Returns the note on labels of texts that a language model is trained on.
fn note_of_labels(name: &str) -> String {
    format!(
        "note: the texts of `{name}` have labels, and a language model is trained on the texts alone: --task classify trains a \
        classifier"
    )
}

/// Returns the note on rows formatted with Alpaca's prompt template.
fn note_of_alpaca(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: {} of `{name}` with `instruction` and `output` are formatted with Alpaca's prompt template, \"Below is an \
            instruction that describes a task ..\"; to disable it: --columns prompt=instruction,completion=output",
            counted(rows, "row")
        )
    })
}

/// Returns the note on examples without loss targets.
fn note_of_unlearned(name: &str, examples: usize) -> Option<String> {
    (examples > 0).then(|| {
        let are = if examples == 1 { "is" } else { "are" };
        format!(
            "note: {} of `{name}` {are} skipped: no tokens count for the loss",
            counted(examples, "example")
        )
    })
}

/// Returns the note on rows with an empty answer.
fn note_of_empty(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: the completion of {} of `{name}` is empty: the end-of-text token alone is trained there",
            counted(rows, "row")
        )
    })
}

/// Returns the note on the fill of packed rows of `context` tokens.
fn note_of_packing(packing: &Packing, context: usize) -> String {
    let Packing { examples, rows, tokens } = packing;
    let full = tokens * 100 / (rows * context).max(1);
    let (examples, rows) = (counted(*examples, "example"), counted(*rows, "row"));
    format!("note: {examples} packed into {rows} of {context} tokens, {full}% full")
}

/// Returns the error for `--pack` with plain text.
fn nothing_to_pack(text: &str) -> Usage {
    Usage::new(format!(
        "--pack applies to instruction data, and `{text}` is plain text, whose blocks are full already: omit --pack, or \
        pass --data FILE.jsonl"
    ))
}

/// Returns the error for `--columns` with plain text.
fn no_columns(text: &str) -> Usage {
    Usage::new(format!(
        "--columns applies to tables, and `{text}` is plain text: omit it, or pass --data FILE.csv, .tsv, .json, .jsonl or \
        .parquet"
    ))
}

/// Returns the note on a minibatch larger than the training data of `train` items.
fn note_of_batch(batch: usize, train: usize, items: &str, context: Option<usize>) -> Option<String> {
    let of = context.map_or(String::new(), |context| format!(" of {context} tokens"));
    let shorter = if context.is_some() { ", a shorter --context" } else { "" };
    (batch > train).then(|| {
        format!(
            "note: the batch size {batch} exceeds the training data, {train} {items}{of}: every minibatch has all of them; \
            pass a smaller --batch{shorter} or more --data"
        )
    })
}

/// Returns the note on the defaults that replace a missing file of a model's directory.
fn note_of_preprocessor(directory: Option<&Path>, side: usize) -> Option<String> {
    let directory = directory.filter(|directory| !directory.join(PREPROCESSOR).is_file())?;
    Some(format!(
        "note: `{}` has no {PREPROCESSOR}: images are resized bilinearly to {side} x {side}, and their values are from -1 to 1",
        directory.display()
    ))
}

/// Returns the notes on what splits of a text leave out.
fn notes_of_text(corpus: &Corpus, splits: &[Split], read: &TokenSplits) -> Vec<String> {
    let notes = [
        note_of_records(corpus),
        note_of_unread(corpus.name(), corpus.unread()),
        note_of_blank_lines(&corpus.blank_lines(splits)),
        note_of_remainders(corpus, splits, read),
    ];
    notes.into_iter().flatten().collect()
}

/// Returns the note on the blank lines of files.
fn note_of_blank_lines(blank: &BTreeMap<&Path, usize>) -> Option<String> {
    let of_file = |(path, lines): (&&Path, &usize)| {
        format!("{} of `{}`", counted(*lines, "blank line"), path.display())
    };
    let files: Vec<String> = blank.iter().map(of_file).collect();
    let are = if blank.values().sum::<usize>() == 1 { "is" } else { "are" };
    (!files.is_empty()).then(|| format!("note: {} {are} left out", files.join(" and ")))
}

/// Returns the note on tokens after the last whole block, if they are more than 1% of a split. There is none on the built-in
/// corpus, which no user chose the length of.
fn note_of_remainders(corpus: &Corpus, splits: &[Split], read: &TokenSplits) -> Option<String> {
    let context = read.context;
    let of_split = |(split, data): (&Split, &Arc<dyn Content>)| {
        let (tokens, left) = (data.units(), data.units() % context);
        (100 * left > tokens).then(|| format!("the last {left} of {tokens} tokens of the {split} split"))
    };
    let parts: Vec<String> = splits.iter().zip(&read.splits).filter_map(of_split).collect();
    (!parts.is_empty() && corpus.kind() != CorpusKind::Builtin).then(|| {
        format!(
            "note: {} of `{}` make no whole block of {context} tokens and are left out",
            parts.join(" and "),
            corpus.name()
        )
    })
}

/// Returns the note on plain text that looks like JSON. Its punctuation and field names are trained on.
fn note_of_records(corpus: &Corpus) -> Option<String> {
    let name = corpus.name();
    let (found, ending) = match corpus.records()? {
        Records::JsonLines { fields } => (format!("JSON in every line{}", named("fields", &fields)), "jsonl"),
        Records::Json => ("one JSON value".to_owned(), "json"),
    };
    Some(format!(
        "note: `{name}` is read as plain text, including punctuation and field names, but has {found}: to train on its rows, \
        rename it to FILE.{ending}"
    ))
}

/// Returns the first names as text.
fn named(what: &str, names: &[String]) -> String {
    let some: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > NAMES { " .." } else { "" };
    if some.is_empty() { String::new() } else { format!(" with the {what} {}{more}", some.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(note.contains("batch size 9") && note.contains("8 blocks of 32 tokens"), "{note}");
        assert!(!note.contains('\n'), "one line");
        let note = note_of_batch(9, 8, "images", None).unwrap();
        assert!(note.contains("training data, 8 images: every") && !note.contains("--context"), "{note}");
    }

    #[test]
    fn what_a_text_leaves_out_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let notes = |path: &Path, splits: &[Split]| {
            let source = TokenSource::load(path.to_str().unwrap(), &[]).unwrap();
            let (tokenizer, conventions) = (Tokenizer::Bytes, Conventions::default());
            let (context, loss_on) = (Context::uniform(8), LossOn::default());
            let form = TokenForm {
                tokenizer: &tokenizer,
                conventions: &conventions,
                context,
                vocabulary: 256,
                loss_on,
                pack: false,
            };
            let read = source.splits(splits, &form).unwrap();
            let TokenSource::Text(corpus) = source else { panic!("no text") };
            notes_of_text(&corpus, splits, &read)
        };
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("train.txt", &format!("{}\n \n", "a line of 16 by\n".repeat(50)));
        write("test.txt", &format!("{}\nabcd", "a line of 16 by\n".repeat(5)));
        write("val.txt", &format!("{}abcd", "a line of 16 by\n".repeat(50)));
        let name = dir.path().display();
        let all = notes(dir.path(), &Split::ALL);
        assert_eq!(
            all[0],
            format!(
                "note: 1 blank line of `{name}/test.txt` and 2 blank lines of `{name}/train.txt` are left out"
            )
        );
        let left = "note: the last 4 of 84 tokens of the test split of";
        assert_eq!(
            all[1..],
            [format!("{left} `{name}` make no whole block of 8 tokens and are left out")],
            "4 of 804 are few"
        );
        assert_eq!(notes(dir.path(), &[Split::Validation]), [""; 0]);
        write("train-2.txt", "more\n");
        let unread = notes(dir.path(), &[Split::Validation]);
        assert!(unread.len() == 1 && unread[0].contains("train-2.txt`; "), "{unread:?}");
        assert_eq!(notes(Path::new("builtin"), &Split::ALL), [""; 0]);
    }

    #[test]
    fn a_guessed_preprocessor_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let note = note_of_preprocessor(Some(dir.path()), 96).unwrap();
        let part = "` has no preprocessor_config.json: images are resized bilinearly to 96 x 96, and";
        assert!(note.contains(part), "{note}");
        assert_eq!(note_of_preprocessor(None, 96), None);
        std::fs::write(dir.path().join(PREPROCESSOR), "{}").unwrap();
        assert_eq!(note_of_preprocessor(Some(dir.path()), 96), None);
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
        for part in
            ["is read as plain text", "the fields `prompt`, `answer`, `id`", "rename it to FILE.jsonl"]
        {
            assert!(lines.contains(part), "{part} in {lines}");
        }
        assert!(note("a.txt", "[\n1,\n2,\n3\n]\n").unwrap().contains("but has one JSON value: to train"));
        assert_eq!(note("b.txt", "some words, and more\n"), None);
        assert_eq!(note_of_records(&Corpus::builtin()), None);
    }
}
