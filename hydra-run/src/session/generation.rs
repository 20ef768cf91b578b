//! Generation: the prompts and settings of a request, and their continuations by a model with each of several adapters.

use super::model::Model;
use super::orchestrator::{Both, Environment, evaluating, share_of_host_memory, without_task};
use crate::settings::{AdapterSettings, DeviceSettings, ModelSettings, values};
use crate::terminal::{Show, Usage, tell, thousands};
use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use hydra_core::ByteSize;
use hydra_engine::{EngineError, RoundsTask, StopFlag};
use hydra_models::data::InputRows;
use hydra_models::generation::{Ended, Generated, KvCache, KvCacheForm, Limits, Prompt, Sampling, Sequences};
use hydra_models::tokenizer::{Chat, Conventions, Tokenizer, tokenizer_files};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The new tokens of a sequence if neither a flag nor the model limits them.
const NEW_TOKENS: usize = 128;

/// Transformers' default of `top_k` for sampling.
const TOP_K: usize = 50;

/// The part of host memory that the key-value cache may take.
const CACHE_PART: u64 = 4;

/// The tokens before new ones that their text may depend on.
const CONTEXT: usize = 8;

/// What is asked of a language model.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Generation")]
pub struct Asked {
    /// A prompt to continue; several are given by several flags
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Vec<String>,
    /// A file of prompts: rows with a `prompt`, or with `messages` that the model's chat template renders (.jsonl, .json, .csv, .tsv
    /// or .parquet), or a text file with one on each line
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Take each prompt as a message of the user, and render it with the model's chat template
    #[arg(long)]
    chat: bool,
    /// Maximum number of new tokens of a sequence [default: that of the model's generation_config.json, else 128]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    max_new_tokens: Option<usize>,
    /// Divisor of the logits before a token is drawn; 0 takes the most likely token [default: 0, unless the model's
    /// generation_config.json samples]
    #[arg(long, value_name = "X", value_parser = values::temperature, allow_hyphen_values = true)]
    temperature: Option<f64>,
    /// Draw from the N most likely tokens; 0 for all [default: that of generation_config.json, else 50]
    #[arg(long, value_name = "N", value_parser = values::top_k, allow_hyphen_values = true)]
    top_k: Option<usize>,
    /// Draw from the most likely tokens that have this probability together [default: that of generation_config.json, else 1]
    #[arg(long, value_name = "P", value_parser = values::top_p, allow_hyphen_values = true)]
    top_p: Option<f64>,
    /// Divisor of the positive logits of tokens that the sequence already has, and factor on negative ones [default: that of
    /// generation_config.json, else 1]
    #[arg(long, value_name = "X", value_parser = values::penalty, allow_hyphen_values = true)]
    repetition_penalty: Option<f64>,
    /// Number of samples of each prompt
    #[arg(long, value_name = "N", default_value = "1", value_parser = values::samples, allow_hyphen_values = true)]
    samples: usize,
    /// Seed of the draws [default: 0]
    #[arg(long, value_name = "N", value_parser = values::seed, allow_hyphen_values = true)]
    seed: Option<u64>,
    /// A text that ends a sequence, which is cut off before it; several are given by several flags
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Memory of the key-value cache; sequences for which it has no room wait for others to end [default: as much as all
    /// sequences need, at most a quarter of the host memory]
    #[arg(long, value_name = "SIZE")]
    cache_memory: Option<ByteSize>,
}

impl Asked {
    /// The most likely continuations of the prompts of a file, if there is one.
    pub(super) fn greedy(prompts: Option<PathBuf>, new_tokens: usize) -> Self {
        Self {
            prompt: Vec::new(),
            prompts,
            chat: false,
            max_new_tokens: Some(new_tokens),
            temperature: Some(0.0),
            top_k: None,
            top_p: None,
            repetition_penalty: Some(1.0),
            samples: 1,
            seed: None,
            stop: Vec::new(),
            cache_memory: None,
        }
    }

    /// Returns whether there are prompts.
    pub(super) fn has_prompts(&self) -> bool {
        self.prompts.is_some() || !self.prompt.is_empty()
    }
}

/// Prompts, and how they are continued.
pub struct Request {
    /// The prompts as texts; `None` for those of a model without a tokenizer.
    texts: Vec<Option<String>>,
    reading: Arc<Reading>,
    samples: usize,
    limits: Limits,
    sampling: Sampling,
    cache_memory: Option<ByteSize>,
    notes: Vec<String>,
}

/// What the text of new tokens depends on.
pub(super) struct Reading {
    tokenizer: Tokenizer,
    lacks_tokenizer: bool,
    /// The samples of all prompts, one prompt after the other.
    prompts: Vec<Prompt>,
    ends: Vec<u32>,
    stop: Vec<String>,
}

/// The continuation of a prompt.
#[derive(Clone, Debug, Serialize)]
pub struct Continued {
    /// `None`, as the text, without a tokenizer.
    pub prompt: Option<String>,
    /// The adapter that generated it, if the request has several.
    pub adapter: Option<String>,
    /// The index of the sample, if a prompt has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<usize>,
    /// The new text.
    pub text: Option<String>,
    /// The new tokens.
    pub token_ids: Vec<u32>,
    pub(crate) logprob: f64,
    /// `stop` for an end token or a stop text, or `length`; `None` if it was interrupted.
    pub finish_reason: Option<&'static str>,
    /// The number of the prompt.
    #[serde(skip)]
    pub number: usize,
}

/// How new tokens are shown while they are generated.
pub enum Shown {
    /// As the text of the only sequence on standard output.
    Text,
    /// As a bar on a terminal.
    Bar(MultiProgress),
    /// As a line now and then.
    Lines,
    /// Not at all.
    Nothing,
}

impl Request {
    /// Reads the prompts and the model's own settings of generation, for devices with this memory. Tokenizer, chat template and
    /// settings are those of the directory `own`, if there is one that has a tokenizer, instead of the model's.
    ///
    /// # Errors
    /// A model that generates no text, prompts that cannot be read or are too long, or settings that do not go together.
    pub fn new(model: &Model, asked: &Asked, device_memory: ByteSize, own: Option<&Path>) -> Result<Self> {
        Self::of(model, asked, device_memory, own, |conventions| prompts_of(asked, conventions))
    }

    /// Prepares the prompts that `given` returns.
    pub(super) fn of(
        model: &Model,
        asked: &Asked,
        device_memory: ByteSize,
        own: Option<&Path>,
        given: impl FnOnce(&Conventions) -> Result<Prompts>,
    ) -> Result<Self> {
        let Some((positions, vocabulary, tokenizer)) = model.generates_from() else {
            bail!(Usage::new(format!(
                "`{}` is no language model that generates text: pass GPT-2, Llama, Mistral or Qwen with a language model's head; `hydra \
                 predict` gives the classes of a classifier",
                model.name()
            )));
        };
        let of_own = own.map(Tokenizer::from_dir).transpose()?.flatten();
        let directory = of_own.as_ref().and(own).or(model.directory());
        let tokenizer = of_own.unwrap_or_else(|| tokenizer.clone());
        let lacks_tokenizer = matches!(tokenizer, Tokenizer::Missing(_));
        let conventions = Conventions::load(&tokenizer, directory)?;
        let has_settings = |directory: &&Path| directory.join(SETTINGS).exists();
        let own = OwnSettings::read(directory.filter(has_settings).or(model.directory()))?;
        if lacks_tokenizer && !asked.stop.is_empty() {
            bail!(Usage::new(format!(
                "--stop compares texts, and `{}` has no tokenizer: omit --stop, or pass --tokenizer",
                model.name()
            )));
        }
        let Prompts { given, unused, dated } = given(&conventions)?;
        let new_tokens = match asked.max_new_tokens {
            Some(given) => given,
            None => own.checked("max_new_tokens", values::count)?.unwrap_or(NEW_TOKENS),
        };
        let ends = own.ends()?.unwrap_or_else(|| conventions.end.into_iter().collect());
        let (mut prompts, mut texts) = (Vec::new(), Vec::new());
        for (at, given) in given.into_iter().enumerate() {
            let (ids, text) = match given {
                // A template writes the special tokens itself.
                Given::Rendered(text) => (tokenizer.encode(&text)?, Some(text)),
                Given::Text(text) => (tokenizer.encode_whole(&text)?, Some(text)),
                Given::Tokens(ids) => {
                    let text = (!lacks_tokenizer).then(|| tokenizer.decode(&ids)).transpose()?;
                    (ids, text)
                }
            };
            let start = conventions.start.filter(|_| ids.is_empty());
            let ids: Vec<u32> = ids.into_iter().chain(start).collect();
            check_prompt(&ids, (positions, vocabulary), at)?;
            prompts.extend((0..asked.samples).map(|sample| Prompt { ids: ids.clone(), sample }));
            texts.push(text);
        }
        let sampling = own.sampling(asked)?;
        let cut =
            prompts.iter().filter(|prompt| prompt.ids.len().saturating_add(new_tokens) > positions).count();
        let mut notes = own.notes();
        if !unused.is_empty() {
            let unused: Vec<String> = unused.into_iter().collect();
            notes.push(format!("note: not used of the prompts' rows: {}", unused.join(", ")));
        }
        if dated {
            notes.push(
                "note: the chat template uses today's date: Hydra always passes 26 July 2024, as in training"
                    .to_owned(),
            );
        }
        if own.lacks_end() {
            notes.push(format!(
                "note: `{SETTINGS}` names no end token, so that texts end after --max-new-tokens or before a --stop text"
            ));
        }
        if sampling.temperature == 0.0 && asked.seed.is_some() {
            notes.push("note: --seed is not used: a temperature of 0 takes the most likely token".to_owned());
        }
        if cut > 0 {
            notes.push(format!(
                "note: {cut} of {} sequences end before {new_tokens} new tokens, because the model has {positions} positions",
                prompts.len()
            ));
        }
        let limits = Limits {
            new_tokens,
            positions,
            ends: ends.clone(),
            cache_bytes: u64::MAX,
            item_sequences: Limits::item_sequences(vocabulary, device_memory.bytes()),
        };
        Ok(Self {
            texts,
            reading: Arc::new(Reading {
                tokenizer,
                lacks_tokenizer,
                prompts,
                ends,
                stop: asked.stop.clone(),
            }),
            samples: asked.samples,
            limits,
            sampling,
            cache_memory: asked.cache_memory,
            notes,
        })
    }

    /// Notes on settings of the model that are not used.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns whether there is one sequence.
    pub fn is_one(&self) -> bool {
        self.prompts().len() == 1
    }

    fn prompts(&self) -> &[Prompt] {
        &self.reading.prompts
    }

    /// The texts of the prompts.
    pub(super) fn texts(&self) -> impl Iterator<Item = Option<String>> {
        self.texts.iter().cloned()
    }

    pub(super) fn reading(&self) -> Arc<Reading> {
        self.reading.clone()
    }

    /// The sizes of the cache of a model that continues the prompts.
    fn cache_form(&self, model: &Model) -> Result<KvCacheForm> {
        let longest = Sequences::longest(self.prompts(), &self.limits);
        model.cache_form(longest).context("the model generates")
    }

    /// The sequences of a model, with a cache of `cache_bytes`, or as many as the longest one needs.
    pub(super) fn sequences(
        &self,
        model: &Model,
        cache_bytes: u64,
        on_token: impl Fn(usize, &Generated) -> bool + Send + Sync + 'static,
    ) -> Result<(KvCache, Sequences)> {
        let cache = KvCache::new(self.cache_form(model)?);
        let limits = Limits { cache_bytes, ..self.limits.clone() };
        let prompts = self.prompts().to_vec();
        Ok((cache.clone(), Sequences::new(prompts, limits, self.sampling, cache, on_token)))
    }
}

impl Reading {
    /// The text of new tokens after a prompt, up to a stop text, and whether it has one.
    pub(super) fn text(&self, prompt: usize, ids: &[u32]) -> Result<(String, bool)> {
        if self.lacks_tokenizer {
            return Ok(Default::default());
        }
        let ended = ids.last().is_some_and(|last| self.ends.contains(last));
        let ids = if ended { &ids[..ids.len() - 1] } else { ids };
        let before = &self.prompts[prompt].ids;
        let before = &before[before.len().saturating_sub(CONTEXT)..];
        let mut text = self.after(before, ids, true)?;
        if self.stop.is_empty() {
            return Ok((text, false));
        }
        // A stop text may have special tokens, which the text does not have.
        let stop = |text: &str| self.stop.iter().filter_map(|stop| text.find(stop.as_str())).min();
        let mut whole = self.after(before, ids, false)?;
        let Some(at) = stop(&whole) else { return Ok((text, false)) };
        if text == whole {
            text.truncate(at);
            return Ok((text, true));
        }
        let mut tokens = ids.len();
        while stop(&whole).is_some() {
            tokens -= 1;
            whole = self.after(before, &ids[..tokens], false)?;
        }
        // The token after these completes the stop text.
        text = self.after(before, &ids[..tokens], true)?;
        let longer = self.after(before, &ids[..=tokens], true)?;
        let ending = |stop: &String| {
            let from = longer.floor_char_boundary(text.len().saturating_sub(stop.len() - 1));
            longer[from..].find(stop.as_str()).map(|at| from + at)
        };
        if let Some(at) = self.stop.iter().filter_map(ending).min() {
            return Ok((longer[..at].to_owned(), true));
        }
        // It has special tokens. Its start may be in the text.
        if let Some(kept) = whole.get(at..).and_then(|rest| text.strip_suffix(rest)) {
            text.truncate(kept.len());
        }
        Ok((text, true))
    }

    /// The text of tokens after other ones, with or without special tokens.
    fn after(&self, before: &[u32], ids: &[u32], skips_special: bool) -> Result<String> {
        let decode = |ids: &[u32]| match skips_special {
            true => self.tokenizer.decode_text(ids),
            false => self.tokenizer.decode(ids),
        };
        // Some tokenizers write no space before the first word of a text.
        let (all, start) = (decode(&[before, ids].concat())?, decode(before)?);
        match all.strip_prefix(&start) {
            Some(text) => Ok(text.to_owned()),
            None => Ok(decode(ids)?),
        }
    }

    /// The text of an answer, without special tokens.
    pub(super) fn answer(&self, ids: &[u32]) -> Result<String> {
        let ids: Vec<u32> = ids.iter().copied().filter(|id| !self.ends.contains(id)).collect();
        Ok(self.tokenizer.decode_text(&ids)?)
    }
}

/// Any of these files is a tokenizer.
const TOKENIZERS: [&str; 3] = ["tokenizer.json", "vocab.json", "vocab.txt"];

/// The directory of adapters whose tokenizer, chat template and settings of generation are used instead of the model's, as
/// `AutoTokenizer` does, and the note on them. Several adapters share the prompts, so that they must have the same files. Where
/// the model has the same files, its own are used: its type may change how they are read.
pub fn own_files<'a>(adapters: &'a [String], model: Option<&Path>) -> (Option<&'a Path>, Option<String>) {
    // The other files of SentencePiece and Tekken tokenizers have what `tokenizer.json` has.
    let is_compared = |name: &PathBuf| {
        name.extension().is_none_or(|ending| ending != "model") && !name.ends_with("tekken.json")
    };
    let read = |directory: &Path| -> BTreeMap<PathBuf, Vec<u8>> {
        let names = tokenizer_files(directory).unwrap_or_default().into_iter().filter(is_compared);
        names
            .filter_map(|name| std::fs::read(directory.join(&name)).ok().map(|bytes| (name, bytes)))
            .collect()
    };
    let Some(first) = adapters.first().map(Path::new) else { return (None, None) };
    let files = read(first);
    let is_model = model.is_some_and(|model| read(model) == files);
    let have = |adapter: &String| TOKENIZERS.iter().any(|name| Path::new(adapter).join(name).exists());
    if is_model && adapters.len() == 1 || !adapters.iter().any(have) {
        return (None, None);
    }
    match adapters.iter().all(|adapter| read(Path::new(adapter)) == files) {
        true if is_model => (None, None),
        true => {
            (Some(first), Some(format!("note: tokenizer and chat template: those of `{}`", first.display())))
        }
        false => {
            let note = "note: the adapters have different tokenizers or chat templates: those of the model are used, because all \
                        adapters get the same prompts";
            (None, Some(note.to_owned()))
        }
    }
}

/// Refuses a prompt without tokens, without a position after it, or with tokens that the model does not have.
fn check_prompt(ids: &[u32], (positions, vocabulary): (usize, usize), at: usize) -> Result<(), Usage> {
    let (at, tokens) = (at + 1, ids.len());
    let refused = match ids.iter().find(|id| **id as usize >= vocabulary) {
        Some(id) => format!(
            "prompt {at} has the token {id}, and the model has {vocabulary} tokens: pass prompts for the tokenizer of this model"
        ),
        None if tokens == 0 => format!("prompt {at} is empty: give it a text"),
        None if tokens >= positions => format!(
            "prompt {at} has {tokens} tokens, and the model has {positions} positions, one of them for a new token: shorten the prompt"
        ),
        None => return Ok(()),
    };
    Err(Usage::new(refused))
}

/// Prompts, with what is not used of them.
#[derive(Default)]
pub(super) struct Prompts {
    pub(super) given: Vec<Given>,
    /// The columns and the message fields that are not used.
    pub(super) unused: BTreeSet<String>,
    /// Whether a chat template used the date.
    pub(super) dated: bool,
}

/// A prompt as it was given.
pub(super) enum Given {
    Text(String),
    /// Rendered with the chat template.
    Rendered(String),
    Tokens(Vec<u32>),
}

/// The prompts of the flags or of the file.
pub(super) fn prompts_of(asked: &Asked, conventions: &Conventions) -> Result<Prompts> {
    let unused = RefCell::new(BTreeSet::new());
    let dated = Cell::new(false);
    let prompts = |given: Vec<Given>| Prompts { given, unused: unused.take(), dated: dated.get() };
    let render = |messages: &[Value], columns: &Map<String, Value>| -> Result<Given> {
        let lacks = || {
            Usage::new(
                "the model has no chat template to render messages: add `chat_template.jinja` to its directory, or pass prompts of plain \
                 text, without --chat",
            )
        };
        let chat = conventions.chat.as_ref().ok_or_else(lacks)?;
        let rendered = chat.prompt(Chat { messages, columns })?;
        let fields = rendered.unused_fields.into_iter().map(|name| format!("{name} of messages"));
        unused.borrow_mut().extend(rendered.unused_columns.into_iter().chain(fields));
        dated.set(dated.get() || rendered.dated);
        Ok(Given::Rendered(rendered.text))
    };
    let plain = |text: String| -> Result<Given> {
        match asked.chat {
            true => render(&[json!({"role": "user", "content": text})], &Map::new()),
            false => Ok(Given::Text(text)),
        }
    };
    let Some(file) = &asked.prompts else {
        if asked.prompt.is_empty() {
            bail!(Usage::new("pass --prompt TEXT, or --prompts FILE"));
        }
        return Ok(prompts(asked.prompt.iter().cloned().map(plain).collect::<Result<_>>()?));
    };
    if !is_rows(file) {
        return Ok(prompts(lines(file)?.into_iter().map(plain).collect::<Result<_>>()?));
    }
    let rows = InputRows::open(file, &[])?;
    let row = |(at, row): (usize, &Map<String, Value>)| {
        let mut columns = row.clone();
        let given = ["messages", "prompt", "input_ids"]
            .map(|name| columns.remove(name).filter(|value| !value.is_null()));
        let [messages, prompt, ids] = given;
        // Cells of tables are texts.
        let messages = messages.map(|value| match value.as_str().map(serde_json::from_str) {
            Some(Ok(value)) => value,
            _ => value,
        });
        let prompt = match (messages, prompt, ids) {
            (Some(Value::Array(messages)), None, None) | (None, Some(Value::Array(messages)), None)
                if messages.iter().all(Value::is_object) =>
            {
                return render(&messages, &columns);
            }
            (None, Some(Value::String(text)), None) => plain(text)?,
            (None, None, Some(Value::Array(ids)))
                if !asked.chat
                    && let Some(ids) = tokens(&ids) =>
            {
                Given::Tokens(ids)
            }
            _ => bail!(
                "row {} of `{}` has no prompt: expected one of a text or messages in `prompt`, messages in `messages`, or (without \
                 --chat) tokens, whole numbers from 0, in `input_ids`",
                at + 1,
                file.display()
            ),
        };
        unused.borrow_mut().extend(columns.into_iter().map(|(name, _)| name));
        Ok(prompt)
    };
    Ok(prompts(rows.fields().enumerate().map(row).collect::<Result<_>>()?))
}

/// The tokens of a list.
fn tokens(ids: &[Value]) -> Option<Vec<u32>> {
    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

/// Returns whether a file has rows, by its name.
fn is_rows(file: &Path) -> bool {
    let name = file.to_string_lossy().to_ascii_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let endings = [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".tab", ".parquet"];
    endings.iter().any(|ending| name.ends_with(ending))
}

/// The lines of a text file that are not blank.
fn lines(file: &Path) -> Result<Vec<String>> {
    if file.extension().is_some_and(|ending| ending == "gz") {
        bail!(Usage::new(format!(
            "`{}` is a compressed text, and only rows are read compressed: pass it uncompressed, or rows in .jsonl.gz",
            file.display()
        )));
    }
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("the prompts in `{}` could not be read", file.display()))?;
    let text = text.trim_start_matches('\u{FEFF}');
    let lines: Vec<String> = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
    match lines.is_empty() {
        true => bail!("`{}` has no prompts: write one on each line", file.display()),
        false => Ok(lines),
    }
}

/// The file with settings of generation.
const SETTINGS: &str = "generation_config.json";

/// The settings of generation that a model's directory has.
#[derive(Debug, Default)]
struct OwnSettings {
    keys: Map<String, Value>,
    /// Whether `config.json` has them, for lack of a `generation_config.json`.
    of_model: bool,
}

/// Keys that are used.
const USED: [&str; 6] =
    ["do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens"];

/// Keys that change tokens and are not used, with the values that change nothing.
const UNUSED: [(&str, &[f64]); 31] = [
    ("num_beams", &[1.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("min_p", &[0.0]),
    ("typical_p", &[1.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("suppress_tokens", &[]),
    ("begin_suppress_tokens", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("bad_words_ids", &[]),
    ("force_words_ids", &[]),
    ("constraints", &[]),
    ("penalty_alpha", &[0.0]),
    ("max_length", &[20.0]),
    ("max_time", &[]),
    ("stop_strings", &[]),
    ("top_h", &[]),
    ("sequence_bias", &[]),
    ("guidance_scale", &[1.0]),
    ("exponential_decay_length_penalty", &[]),
    ("remove_invalid_values", &[]),
    ("watermarking_config", &[]),
    ("diversity_penalty", &[0.0]),
    ("num_return_sequences", &[1.0]),
    ("token_healing", &[]),
    ("dola_layers", &[]),
];

impl OwnSettings {
    /// Reads `generation_config.json`. If there is no such file, the settings are read from `config.json`. Both as Transformers does,
    /// which takes no end token from `config.json` if the other file names none.
    fn read(directory: Option<&Path>) -> Result<Self> {
        let Some(directory) = directory else { return Ok(Self { keys: Map::new(), of_model: true }) };
        let read = |name: &str| -> Result<Option<Map<String, Value>>> {
            let path = directory.join(name);
            match std::fs::read_to_string(&path) {
                Ok(text) => serde_json::from_str(&text)
                    .map(Some)
                    .with_context(|| format!("`{}` is no JSON object", path.display())),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error).with_context(|| format!("`{}` could not be read", path.display())),
            }
        };
        let (own, model) = (read(SETTINGS)?, read("config.json")?.unwrap_or_default());
        let of_model = own.is_none();
        let known = |key: &str| {
            key == "eos_token_id" || USED.contains(&key) || UNUSED.iter().any(|(unused, _)| key == *unused)
        };
        let keys = own.unwrap_or_else(|| {
            model
                .iter()
                .filter(|(key, _)| known(key))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect()
        });
        Ok(Self { keys, of_model })
    }

    /// The file that has the keys.
    fn file(&self) -> &'static str {
        if self.of_model { "config.json" } else { SETTINGS }
    }

    /// The value of a key, if it is there, read as the flag of this name is.
    fn checked<T>(&self, key: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, Usage> {
        let Some(value) = self.keys.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        let refused = |error| Usage::new(format!("`{key}` in {}: {error}", self.file()));
        read(&value.to_string()).map(Some).map_err(refused)
    }

    /// Whether there is a `generation_config.json` that names no end token.
    fn lacks_end(&self) -> bool {
        !self.of_model && self.keys.get("eos_token_id").is_none_or(Value::is_null)
    }

    /// The tokens that end a sequence, if the settings decide it.
    fn ends(&self) -> Result<Option<Vec<u32>>, Usage> {
        let Some(value) = self.keys.get("eos_token_id").filter(|value| !value.is_null()) else {
            return Ok((!self.of_model).then(Vec::new));
        };
        let mut ids = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        // A negative number is no token, so that nothing ends a sequence early.
        ids.retain(|id| id.as_i64().is_none_or(|id| id >= 0));
        let refused =
            || Usage::new(format!("`eos_token_id` is {value}: expected a token, or a list of tokens"));
        tokens(&ids).map(Some).ok_or_else(refused)
    }

    /// How tokens are chosen.
    fn sampling(&self, asked: &Asked) -> Result<Sampling, Usage> {
        let samples = match self.keys.get("do_sample") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(samples)) => *samples,
            Some(found) => {
                let file = self.file();
                return Err(Usage::new(format!("`do_sample` of {file} is {found}: expected true or false")));
            }
        };
        let temperature = match asked.temperature {
            Some(given) => given,
            None if samples => self.checked("temperature", values::temperature)?.unwrap_or(1.0),
            None => 0.0,
        };
        let own_penalty = self.checked("repetition_penalty", values::penalty)?;
        let repetition_penalty = asked.repetition_penalty.or(own_penalty).unwrap_or(1.0);
        if temperature == 0.0 {
            for (flag, given) in [("--top-k", asked.top_k.is_some()), ("--top-p", asked.top_p.is_some())] {
                if given {
                    return Err(Usage::new(format!(
                        "{flag} applies to sampling, and a temperature of 0 takes the most likely token: pass --temperature 1 too, or omit {flag}"
                    )));
                }
            }
            if asked.samples > 1 {
                return Err(Usage::new(
                    "all samples of the most likely tokens are equal: pass --temperature 1 too, or omit --samples",
                ));
            }
            return Ok(Sampling { repetition_penalty, ..Sampling::default() });
        }
        Ok(Sampling {
            temperature,
            top_k: asked.top_k.or(self.checked("top_k", values::top_k)?).unwrap_or(TOP_K),
            top_p: asked.top_p.or(self.checked("top_p", values::share)?).unwrap_or(1.0),
            repetition_penalty,
            seed: asked.seed.unwrap_or_default(),
        })
    }

    /// Notes on keys that are not used.
    fn notes(&self) -> Vec<String> {
        let changes = |(key, neutral): &&(&str, &[f64])| match self.keys.get(*key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(list)) if list.is_empty() => false,
            Some(value) => value.as_f64().is_none_or(|value| !neutral.contains(&value)),
        };
        let unused = UNUSED.iter().filter(changes).map(|(key, _)| *key);
        let unused: Vec<&str> = unused.collect();
        match unused.is_empty() {
            true => Vec::new(),
            false => vec![format!("note: not used of {}: {}", self.file(), unused.join(", "))],
        }
    }
}

/// Continues the prompts of a request with a model with each of these adapters. All pass a promoted shard before the next one
/// is promoted.
///
/// Returns what was generated, and the error that ended it early.
///
/// # Errors
/// A model that cannot be built or does not fit the memory.
pub fn generate(
    model: &mut Model,
    adapters: &[AdapterSettings],
    request: &Request,
    (devices, spec): (&DeviceSettings, &ModelSettings),
    around: &Environment,
    shown: Shown,
) -> Result<(Vec<Continued>, Option<anyhow::Error>)> {
    let (prompts, form) = (request.prompts(), request.cache_form(model)?);
    let bytes = |prompt: &Prompt| form.bytes(request.limits.tokens(prompt.ids.len()));
    let all: u64 = prompts.iter().map(bytes).sum();
    let largest = prompts.iter().map(bytes).max().unwrap_or(0);
    let part = share_of_host_memory(devices, &around.machine, CACHE_PART) / adapters.len() as u64;
    let cache_bytes = match request.cache_memory {
        Some(given) => all.min(given.bytes() / adapters.len() as u64),
        None => all.min(part.max(largest)),
    };
    if cache_bytes < largest {
        let [given, needed] = [cache_bytes, largest].map(|bytes| ByteSize(bytes * adapters.len() as u64));
        bail!(Usage::new(format!(
            "--cache-memory {given} has no room for the longest sequence, whose key-value cache takes {}{}: pass --cache-memory {} or \
             more",
            ByteSize(largest),
            if adapters.len() > 1 { " for each adapter" } else { "" },
            format_args!("{}B", needed.bytes())
        )));
    }
    let (host, caches) =
        (share_of_host_memory(devices, &around.machine, 1), cache_bytes * adapters.len() as u64);
    if caches >= host {
        bail!(Usage::new(format!(
            "the key-value cache of {} is not below the host memory of {}: pass more --host-memory, a smaller --cache-memory, or fewer \
             --max-new-tokens",
            ByteSize(caches),
            ByteSize(host)
        )));
    }
    let meter = Arc::new(ProgressMeter::new(request, adapters.len(), shown));
    let mut tasks = Vec::new();
    let mut data = Vec::new();
    for adapters in adapters {
        model.tell_adapters(adapters)?;
        let on_token = meter.clone().on_token(request);
        let (cache, sequences) = request.sequences(model, cache_bytes, on_token)?;
        let sequences = Arc::new(sequences);
        let chain = model.generating((adapters, None), cache, &sequences)?;
        tasks.push(RoundsTask {
            name: adapters.or_model(spec.name()).to_owned(),
            chain,
            data: sequences.clone(),
            seed: spec.seed,
        });
        data.push(sequences);
    }
    let quiet = around.showing(Show::Nothing);
    let orchestrator = evaluating(devices, spec.dtype, spec.seed, &quiet)?;
    let stop: StopFlag = around.stop_flag()?;
    around.print_note_of_others();
    let registrar = around.registrar(devices, "hydra generate");
    let orchestrator = orchestrator.stop_flag(stop).observer(Box::new(Both(registrar, quiet.progress())));
    let done = orchestrator.evaluate_in_rounds(tasks);
    let (promoted, failure) = match done {
        Ok(report) => (Some(ByteSize(report.transfers.parameter_bytes)), None),
        Err(EngineError::Stopped) => (None, None),
        Err(error) => (None, Some(explained(error, spec.name()))),
    };
    let mut made = Vec::new();
    for (adapters, data) in adapters.iter().zip(data) {
        for (at, Generated { ids, logprob, ended }) in data.generated().into_iter().enumerate() {
            let (text, _) = request.reading.text(at, &ids)?;
            let text = (!request.reading.lacks_tokenizer).then_some(text);
            made.push(Continued {
                prompt: request.texts[at / request.samples].clone(),
                adapter: adapters.adapter.clone(),
                sample: (request.samples > 1).then_some(at % request.samples),
                text,
                token_ids: ids,
                logprob,
                number: at / request.samples,
                finish_reason: ended.map(|ended| if ended == Ended::Length { "length" } else { "stop" }),
            });
        }
    }
    meter.end(made.first().and_then(|made: &Continued| made.text.as_deref()), promoted);
    Ok((made, failure))
}

/// The error of a generation that failed. Tasks have the names of their adapters, or of the model.
fn explained(error: EngineError, model: &str) -> anyhow::Error {
    if let EngineError::Failed { task, source } = &error
        && let EngineError::BadLoss { .. } = **source
    {
        return anyhow!(
            "`{task}` gives logits that are not finite: check its weights, or pass another --dtype"
        );
    }
    let (task, cause) = without_task(error);
    cause.context(format!("`{}` could not generate texts", task.as_deref().unwrap_or(model)))
}

/// Shows the progress of all sequences.
struct ProgressMeter {
    shown: Shown,
    begun: Instant,
    state: Mutex<Counted>,
}

struct Counted {
    tokens: u64,
    most: u64,
    /// The sequences that have a new token, and all.
    sequences: [usize; 2],
    told: Duration,
    bar: Option<ProgressBar>,
    /// The bytes of the only text that are printed.
    printed: usize,
}

/// The time between two lines.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl ProgressMeter {
    fn new(request: &Request, adapters: usize, shown: Shown) -> Self {
        let new = |prompt: &Prompt| request.limits.tokens(prompt.ids.len()) - prompt.ids.len();
        let most = (request.prompts().iter().map(new).sum::<usize>() * adapters) as u64;
        let bar = match &shown {
            Shown::Bar(terminal) => {
                let style = ProgressStyle::with_template(
                    "{bar:30} {pos}/{len} tokens, {msg} sequences begun, {per_sec}, at most {eta} left",
                );
                let bar = ProgressBar::new(most);
                Some(terminal.add(style.map_or_else(|_| bar.clone(), |style| bar.clone().with_style(style))))
            }
            _ => None,
        };
        let sequences = [0, request.prompts().len() * adapters];
        let counted = Counted { tokens: 0, most, sequences, told: Duration::ZERO, bar, printed: 0 };
        Self { shown, begun: Instant::now(), state: Mutex::new(counted) }
    }

    /// Counts a token, and returns whether its sequence has a stop text.
    fn on_token(
        self: Arc<Self>,
        request: &Request,
    ) -> impl Fn(usize, &Generated) -> bool + Send + Sync + 'static {
        let reading = request.reading.clone();
        move |prompt, made| {
            // A stop text is cut off, and may begin in an earlier token.
            let streams = matches!(self.shown, Shown::Text) && reading.stop.is_empty();
            let begins = made.ids.len() == 1;
            if reading.stop.is_empty() && !streams {
                self.count(begins);
                return false;
            }
            // A tokenizer that fails does so again at the end, where it is reported.
            let (text, stops) = reading.text(prompt, &made.ids).unwrap_or_default();
            if streams {
                self.print(&text);
            }
            self.count(begins);
            stops
        }
    }

    fn count(&self, begins: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.tokens += 1;
        state.sequences[0] += usize::from(begins);
        let [begun, all] = state.sequences;
        if let Some(bar) = &state.bar {
            if begins {
                bar.set_message(format!("{begun}/{all}"));
            }
            bar.inc(1);
        }
        let now = self.begun.elapsed();
        if matches!(self.shown, Shown::Lines) && now - state.told >= LINE_EVERY {
            state.told = now;
            let rate = state.tokens as f64 / now.as_secs_f64();
            let left = state.most.saturating_sub(state.tokens) as f64 / rate;
            tell(&format!(
                "generated {} of at most {} tokens, {begun} of {all} sequences begun, {rate:.1} tokens per second, at most {left:.0} s left",
                thousands(state.tokens as f64),
                thousands(state.most as f64)
            ));
        }
    }

    /// Prints what is new of the only text. The last character may be half of one.
    fn print(&self, text: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let text = text.trim_end_matches('\u{FFFD}');
        if let Some(new) = text.get(state.printed..) {
            print!("{new}");
            let _ = std::io::stdout().flush();
            state.printed = text.len();
        }
    }

    /// Ends the display, with what is not printed yet of the only text, and the bytes of parameters that devices received if all
    /// texts were generated.
    fn end(&self, text: Option<&str>, promoted: Option<ByteSize>) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Shown::Text, Some(text)) = (&self.shown, text) {
            println!("{}", text.get(state.printed..).unwrap_or_default());
        }
        state.bar.iter().for_each(ProgressBar::finish_and_clear);
        let promoted = promoted.filter(|bytes| bytes.bytes() > 0);
        let promoted = promoted.map(|bytes| format!("; {bytes} of parameters were promoted"));
        // In a pipe, what is over soon is silent.
        let is_told = state.told > Duration::ZERO || promoted.is_some();
        if matches!(self.shown, Shown::Bar(_)) || matches!(self.shown, Shown::Lines) && is_told {
            let s = self.begun.elapsed().as_secs_f64();
            let rate = state.tokens as f64 / s.max(1e-9);
            tell(&format!(
                "generated {} tokens in {s:.2} s, {rate:.1} per second{}",
                thousands(state.tokens as f64),
                promoted.unwrap_or_default()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_change_tokens_and_are_not_used_are_named() {
        let keys = json!({"force_words_ids": [[5]], "constraints": [{}], "num_beams": 1, "min_p": null});
        let own = OwnSettings { keys: keys.as_object().unwrap().clone(), of_model: false };
        assert_eq!(own.notes(), ["note: not used of generation_config.json: force_words_ids, constraints"]);
        let keys = json!({"suppress_tokens": [], "remove_invalid_values": false, "token_healing": true});
        let own = OwnSettings { keys: keys.as_object().unwrap().clone(), of_model: true };
        assert_eq!(own.notes(), ["note: not used of config.json: token_healing"]);
    }

    /// The settings of a directory with these files.
    fn settings(files: &[(&str, Value)]) -> OwnSettings {
        let dir = tempfile::tempdir().unwrap();
        files
            .iter()
            .for_each(|(name, keys)| std::fs::write(dir.path().join(name), keys.to_string()).unwrap());
        OwnSettings::read(Some(dir.path())).unwrap()
    }

    #[test]
    fn settings_are_those_of_the_configuration_without_a_file_of_their_own() {
        let model = json!({"eos_token_id": 7, "repetition_penalty": 1.5, "max_length": 9, "hidden_size": 8});
        let own = settings(&[("config.json", model.clone())]);
        assert_eq!(own.notes(), ["note: not used of config.json: max_length"]);
        assert_eq!(own.checked("repetition_penalty", values::penalty).unwrap(), Some(1.5));
        assert_eq!(own.ends().unwrap(), Some(vec![7]));
        let own =
            settings(&[("config.json", model), ("generation_config.json", json!({"eos_token_id": [-1, 3]}))]);
        assert!(
            own.notes().is_empty() && own.checked("repetition_penalty", values::penalty).unwrap().is_none()
        );
        assert_eq!(own.ends().unwrap(), Some(vec![3]), "a negative number is no token");
    }

    #[test]
    fn adapters_have_their_own_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let directory = |name: &str, files: &[(&str, &str)]| {
            let directory = dir.path().join(name);
            std::fs::create_dir(&directory).unwrap();
            files.iter().for_each(|(file, text)| std::fs::write(directory.join(file), text).unwrap());
            directory.to_str().unwrap().to_owned()
        };
        let (tokenizer, template) = (("tokenizer.json", "{}"), ("chat_template.jinja", "a"));
        let model = directory("model", &[tokenizer, template, (SETTINGS, "{}"), ("config.json", "{}")]);
        let [same, own, again] = [("same", "a"), ("own", "b"), ("again", "b")]
            .map(|(name, template)| directory(name, &[tokenizer, ("chat_template.jinja", template)]));
        let none = directory("none", &[]);
        let of = |adapters: &[&String]| {
            let adapters: Vec<String> = adapters.iter().map(|adapter| (*adapter).clone()).collect();
            let (found, note) = own_files(&adapters, Some(Path::new(&model)));
            (found.map(Path::to_owned), note)
        };
        for adapters in [&[][..], &[&same], &[&none], &[&same, &same], &[&none, &none]] {
            assert_eq!(of(adapters), (None, None), "{adapters:?}");
        }
        let more = directory("more", &[tokenizer, template]);
        let templates = Path::new(&more).join("additional_chat_templates");
        std::fs::create_dir(&templates).unwrap();
        std::fs::write(templates.join("tool_use.jinja"), "c").unwrap();
        for adapters in [&[&own][..], &[&own, &again], &[&more]] {
            let (found, note) = of(adapters);
            assert!(
                found == Some(PathBuf::from(adapters[0])) && note.unwrap().contains("those of `"),
                "{adapters:?}"
            );
        }
        for adapters in [[&own, &same], [&same, &own], [&own, &none]] {
            let (found, note) = of(&adapters);
            assert!(found.is_none() && note.unwrap().contains("different tokenizers"), "{adapters:?}");
        }
    }

    #[test]
    fn a_temperature_that_is_not_used_is_not_refused() {
        let asked = |temperature| Asked { temperature, ..Asked::greedy(None, 1) };
        let own = settings(&[("generation_config.json", json!({"temperature": -1.0, "top_p": 0.0}))]);
        assert_eq!(own.sampling(&asked(None)).unwrap().temperature, 0.0);
        assert_eq!(own.sampling(&asked(Some(1.0))).unwrap().top_p, 0.0, "the most likely token");
        let own = settings(&[("generation_config.json", json!({"temperature": -1.0, "do_sample": true}))]);
        let error = own.sampling(&asked(None)).unwrap_err().to_string();
        assert!(error.contains("`temperature` in generation_config.json"), "{error}");
    }

    #[test]
    fn texts_have_no_special_tokens_which_stop_texts_may_have() {
        let dir = tempfile::tempdir().unwrap();
        let special = json!({"id": 2, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                             "normalized": false, "special": true});
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "pre_tokenizer": {"type": "Whitespace"}, "decoder": null, "added_tokens": [special],
            "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1, "<end>": 2}}
        });
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap().unwrap();
        let text = |stop: &[&str], ids: &[u32]| {
            let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
            let prompts = vec![Prompt { ids: vec![0], sample: 0 }];
            let reading = Reading {
                tokenizer: tokenizer.clone(),
                lacks_tokenizer: false,
                prompts,
                ends: vec![9],
                stop,
            };
            reading.text(0, ids).unwrap()
        };
        let found = |text: &str, stopped| (text.to_owned(), stopped);
        assert_eq!(text(&[], &[1, 2, 1, 9]), found(" b b", false));
        assert_eq!(text(&["a"], &[1, 2, 0, 1]), found(" b ", true));
        assert_eq!(text(&["<end>"], &[1, 2]), found(" b", true), "the stop text is a special token");
        assert_eq!(text(&["b <end>"], &[1, 1, 2]), found(" b ", true));
        assert_eq!(text(&["b b"], &[1, 2, 1, 1]), found(" b ", true), "not over a special token");
    }
}
