//! The model and the data that a spec names.

use crate::settings::{AdapterSettings, ModelSettings};
use crate::terminal::{Usage, tell};
use anyhow::{Context as _, Result};
use hydra_core::{Chain, Dataset, FirstItems, FloatType, ModelWriter};
use hydra_models::data::{
    Context, Corpus, LossOn, Packing, Records, Split, TokenForm, TokenSource, TokenSplits, Tokens,
};
use hydra_models::family::{self, Reads};
use hydra_models::lora::{AdapterDir, AdapterWriter, MergedWriter};
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::path::PathBuf;
use std::sync::Arc;

/// The context when nobody says which, if the model has so many positions.
const DEFAULT_CONTEXT: usize = 512;

/// A model with its tokenizer, as a preset, a file or a directory describes it.
pub(crate) struct Model {
    model: Box<dyn family::Model>,
    name: String,
    dtype: FloatType,
    /// The layers that are trained, if not all are.
    train: Vec<String>,
    context: Context,
    loss_on: LossOn,
    pack: bool,
    tokenizer: Tokenizer,
}

impl Model {
    /// Reads the model of a spec. Weights are checked now and read when a task begins.
    pub(crate) fn load(spec: &ModelSettings) -> Result<Self> {
        let failed = || format!("the model `{}` could not be loaded", spec.name());
        let mut model = family::load(spec.name()).with_context(failed)?;
        spec.dropout.into_iter().for_each(|dropout| model.set_dropout(dropout));
        model.cut_vocabulary(spec.vocabulary_parts.unwrap_or(1)).with_context(failed)?;
        let Reads::Tokens { vocabulary, .. } = model.reads();
        let tokenizer = Tokenizer::for_model(model.directory(), vocabulary).with_context(failed)?;
        let context = context_of(model.reads(), spec.context)?;
        let (name, train) = (spec.name().to_owned(), spec.train.clone());
        let ModelSettings { dtype, loss_on, pack, .. } = *spec;
        Ok(Self { model, name, dtype, train, context, loss_on, pack, tokenizer })
    }

    /// The model as it is trained, with adapters of this rank, or as the settings say where there is none.
    pub(crate) fn trained(&self, adapters: &AdapterSettings, rank: Option<usize>) -> Result<Trained> {
        let failed = || format!("the model `{}` could not be built", self.name);
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        let lora = match (&adapter, rank) {
            (Some(adapter), _) => Some(adapter.lora().clone()),
            (None, rank) => rank.map(|rank| adapters.of_rank(rank, self.model.adapting().targets)),
        };
        let (chain, writer) = match lora {
            Some(lora) => {
                let chain = self.model.adapted(&lora, adapter).with_context(failed)?;
                let writer: Arc<dyn ModelWriter> = match adapters.merge {
                    true => Arc::new(MergedWriter::new(self.model.as_ref(), lora)?),
                    false => Arc::new(AdapterWriter::new(self.model.as_ref(), lora)),
                };
                (chain, writer)
            }
            None => (training(self.model.chain().with_context(failed)?, &self.train)?, self.model.writer()),
        };
        Ok(Trained { chain: Arc::new(chain.with_float_type(self.dtype)), writer })
    }

    /// The files that its weights and those of its adapters are in, as far as they come from files.
    pub(crate) fn files(&self, adapters: &AdapterSettings) -> Result<Vec<PathBuf>> {
        let adapter = adapters.adapter.as_ref().map(AdapterDir::open).transpose()?;
        Ok(self.model.files().into_iter().chain(adapter.map(|adapter| adapter.file())).collect())
    }

    /// All that its configuration says of what is computed and drawn.
    pub(crate) fn described(&self) -> Result<String> {
        Ok(self.model.description()?.to_string())
    }

    /// These splits of some data.
    pub(crate) fn splits(&self, source: &TokenSource, splits: &[Split]) -> Result<TokenSplits> {
        let Reads::Tokens { vocabulary, .. } = self.model.reads();
        let conventions = match source {
            TokenSource::Text(corpus) if self.pack => return Err(nothing_to_pack(corpus.name()).into()),
            TokenSource::Text(corpus) => {
                note_of_records(corpus).as_deref().into_iter().for_each(tell);
                Conventions::default()
            }
            TokenSource::Examples(_) => Conventions::of(&self.tokenizer, self.model.directory())?,
        };
        let (tokenizer, conventions) = (&self.tokenizer, &conventions);
        let (context, loss_on, pack) = (self.context, self.loss_on, self.pack);
        let form = TokenForm { tokenizer, conventions, context, vocabulary, loss_on, pack };
        let splits = source.splits(splits, &form)?;
        note_of_left_out(splits.left_out, splits.context).as_deref().into_iter().for_each(tell);
        splits.packing.iter().for_each(|packing| tell(&note_of_packing(packing, splits.context)));
        Ok(splits)
    }

    /// One split of some data.
    pub(crate) fn split(&self, source: &TokenSource, split: Split) -> Result<Arc<dyn Tokens>> {
        let splits = self.splits(source, &[split])?.splits;
        splits.into_iter().next().context("a split was asked for")
    }

    /// All data; validation and test may be missing.
    pub(crate) fn texts(&self, data: &str) -> Result<Texts> {
        let source = TokenSource::load(data)?;
        let (validation, test) = (source.has(Split::Validation), source.has(Split::Test));
        let wanted = [(Split::Train, true), (Split::Validation, validation), (Split::Test, test)];
        let wanted: Vec<Split> = wanted.into_iter().filter(|(_, has)| *has).map(|(split, _)| split).collect();
        let found = self.splits(&source, &wanted)?;
        let mut splits = found.splits.into_iter();
        let train = splits.next().context("the train split was asked for")?;
        let validation = if validation { splits.next() } else { None };
        Ok(Texts { train, validation, test: splits.next(), context: found.context, items: found.items })
    }
}

/// A model as it is trained.
pub(crate) struct Trained {
    pub(crate) chain: Arc<Chain>,
    pub(crate) writer: Arc<dyn ModelWriter>,
}

/// The data that a run trains on and is measured on.
pub(crate) struct Texts {
    pub(crate) train: Arc<dyn Tokens>,
    pub(crate) validation: Option<Arc<dyn Tokens>>,
    pub(crate) test: Option<Arc<dyn Tokens>>,
    /// The tokens of an item.
    pub(crate) context: usize,
    /// What items are called.
    pub(crate) items: &'static str,
}

impl Texts {
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

    /// What the splits consist of.
    pub(crate) fn content(&self) -> [Option<Vec<&[u32]>>; 3] {
        let [validation, test] =
            [&self.validation, &self.test].map(|data| data.as_ref().map(|data| data.content()));
        [Some(self.train.content()), validation, test]
    }
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
pub(crate) fn note_of_batch(batch: usize, train: usize, items: &str, context: usize) -> Option<String> {
    (batch > train).then(|| {
        format!(
            "note: batch {batch} is more than the training data has, {train} {items} of {context} tokens: every \
             minibatch is all of it; give a smaller --batch, a shorter --context or more --data"
        )
    })
}

/// The names that a note lists at most.
const NAMES: usize = 6;

/// The note on a file of records, of which every character is trained on as if it were text.
pub(crate) fn note_of_records(corpus: &Corpus) -> Option<String> {
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

/// The chain with nothing trained but these layers, or as it is where none are named.
fn training(chain: Chain, layers: &[String]) -> Result<Chain, Usage> {
    if layers.is_empty() {
        return Ok(chain);
    }
    let mut names = Vec::new();
    for layer in layers {
        match layer.strip_prefix("last:") {
            Some(count) => names.extend(last_layers(&chain, count)?),
            None => names.push(layer.clone()),
        }
    }
    chain.training_only(&names).map_err(|error| Usage::new(format!("--train: {error}")))
}

/// The names of the last layers before the head.
fn last_layers(chain: &Chain, count: &str) -> Result<Vec<String>, Usage> {
    let names: Vec<&String> = chain.layers().iter().map(|layer| &layer.name).collect();
    let blocks = &names[1..names.len() - 1];
    match count.parse::<usize>() {
        Ok(count) if (1..=blocks.len()).contains(&count) => {
            Ok(blocks[blocks.len() - count..].iter().map(|name| (*name).clone()).collect())
        }
        _ => Err(Usage::new(format!(
            "--train last:{count} is no number of layers between the first and the head: the model has {}",
            blocks.len()
        ))),
    }
}

/// The context that was asked for, if the model has the positions, or the default.
pub(crate) fn context_of(
    Reads::Tokens { positions, .. }: Reads,
    asked: Option<usize>,
) -> Result<Context, Usage> {
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
        let context = |asked, positions| context_of(Reads::Tokens { positions, vocabulary: 256 }, asked);
        assert_eq!(context(None, 128).unwrap(), Context::AtMost(128));
        assert_eq!(context(None, 1024).unwrap(), Context::AtMost(512));
        assert_eq!(context(Some(1024), 1024).unwrap(), Context::Exactly(1024));
        let error = context(Some(129), 128).unwrap_err().to_string();
        assert!(error.contains("129") && error.contains("128 positions"), "{error}");
    }

    #[test]
    fn layers_are_trained_by_name_or_counted_from_the_end() {
        let chain = || family::load("bytes-tiny").unwrap().chain().unwrap();
        let trained = |layers: &[&str]| {
            let layers: Vec<String> = layers.iter().map(|layer| (*layer).to_owned()).collect();
            training(chain(), &layers).map(|chain| {
                let layers = chain.layers().iter().filter(|layer| !layer.frozen);
                layers.map(|layer| layer.name.clone()).collect::<Vec<_>>().join(" ")
            })
        };
        assert_eq!(trained(&[]).unwrap(), "embed h.0 h.1 h.2 h.3 head");
        assert_eq!(trained(&["last:2", "head"]).unwrap(), "h.2 h.3 head");
        assert_eq!(trained(&["h.0", "last:1"]).unwrap(), "h.0 h.3");
        for wrong in ["last:0", "last:5", "last:x", "last:"] {
            let error = trained(&[wrong]).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("the model has 4"), "{error}");
        }
        let error = trained(&["h.7"]).unwrap_err().to_string();
        assert!(error.contains("--train") && error.contains("`h.7`") && error.contains("`h.3`"), "{error}");
    }

    #[test]
    fn how_full_rows_are_is_said() {
        let note = |examples, rows, tokens| note_of_packing(&Packing { examples, rows, tokens }, 512);
        assert_eq!(note(412, 97, 48_000), "note: 412 examples packed into 97 rows of 512 tokens, 96% full");
        assert_eq!(note(1, 1, 512), "note: 1 example packed into 1 row of 512 tokens, 100% full");
    }

    #[test]
    fn a_batch_beyond_the_text_is_said() {
        assert_eq!(note_of_batch(8, 8, "blocks", 32), None);
        let note = note_of_batch(9, 8, "blocks", 32).unwrap();
        assert!(note.contains("batch 9") && note.contains("8 blocks of 32 tokens"), "{note}");
        assert!(!note.contains('\n'), "one line");
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
