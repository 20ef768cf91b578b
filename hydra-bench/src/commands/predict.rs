//! `hydra predict`: the rows of a file with what a model predicts for them.

use super::eval::evaluated;
use anyhow::{Context as _, Result, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use hydra_core::{ByteSize, replace_file};
use hydra_models::data::InputRows;
use hydra_models::lora::Base;
use hydra_run::session::generation::own_files;
use hydra_run::session::predict::Predicts;
use hydra_run::session::rows_out::RowFormat;
use hydra_run::session::{Environment, Model, decode_memory, note_of_memory};
use hydra_run::settings::{
    AdapterSettings, DeviceSettings, ModelSettings, OUTPUT, TaskName, classifies, find_base, flags, values,
};
use hydra_run::terminal::{Outcome, Usage, tell};
use serde_json::{Map, Value};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

/// The default of `--batch` for classifiers.
const BATCH: usize = 8;

/// `hydra predict`.
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    pub(crate) model: ModelSettings,
    /// Predict with the adapters in this directory, written by PEFT or by a task of a run
    #[arg(long, value_name = "DIR", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) adapter: Option<String>,
    /// Quantize the linear layers of the model below the adapters, as in training with --base
    #[arg(long, value_name = "TYPE", value_parser = flags::named::<Base>(&["nf4"]))]
    pub(crate) base: Option<Base>,
    /// Texts per forward pass of a classifier; the outputs change only by rounding. A language model scores one text at a time
    /// [default: 8]
    #[arg(long, value_name = "N", value_parser = values::batch, allow_hyphen_values = true)]
    pub(crate) batch: Option<usize>,
    #[command(flatten)]
    pub(crate) devices: DeviceSettings,
    /// File for the rows, FILE.jsonl, FILE.csv or FILE.tsv [default: standard output, in the format of the data]
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub(crate) out: Option<PathBuf>,
}

/// Predicts and writes the rows.
pub(crate) fn run(mut args: PredictArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let devices = args.devices.clone().resolve(&around.machine)?;
    find_base(&mut args.model, &mut args.adapter)?;
    let Some(data) = args.model.data.clone() else {
        bail!(Usage::new(
            "pass --data FILE with the rows to predict for: .jsonl, .json, .csv, .tsv or .parquet"
        ));
    };
    if args.model.task.is_some_and(TaskName::reads_pairs) {
        bail!(Usage::new(
            "--task preference and --task reward train on pairs, and predictions are for single texts: omit --task, which the model's \
             head decides"
        ));
    }
    args.out.as_deref().map_or(Ok(()), check_out)?;
    let format = RowFormat::of(args.out.as_deref(), Path::new(&data))?;
    let adapters = AdapterSettings { base: args.base, ..AdapterSettings::of(args.adapter) };
    if args.model.task.is_none() && classifies(&adapters)? {
        args.model.task = Some(TaskName::Classify);
    }
    let spec = args.model.resolve()?;
    devices.check_dtype(spec.dtype)?;
    adapters.check(&spec)?;
    let rows = InputRows::open(Path::new(&data), &spec.columns)?;
    let mut model = Model::load(&spec, &decode_memory(&devices, &around.machine))?;
    let (content, predicts) = model.rows(&rows, &adapters)?;
    tell(&model.note_of_origin(&adapters, &[spec.seed], ""));
    let of_adapters: Vec<String> = adapters.adapter.iter().cloned().collect();
    // A preset has the tokenizer that its adapters were trained with.
    if let (Some(own), _) = own_files(&of_adapters, model.directory())
        && model.directory().is_some()
    {
        let own = own.display();
        tell(&format!(
            "note: tokenizer and chat template: those of the model, not those of `{own}`, which predictions do not use"
        ));
    }
    let batch = match (&predicts, args.batch) {
        (Predicts::Labels(_), batch) => batch.unwrap_or(BATCH),
        (Predicts::Tokens(_), None) => 1,
        (Predicts::Tokens(_), Some(_)) => bail!(Usage::new(
            "--batch applies to classifiers, and a language model scores one text at a time: omit it"
        )),
    };
    check_names(&rows, predicts.names())?;
    note_of_memory(&devices, &around.machine).as_deref().into_iter().for_each(tell);
    let chain = model.evaluated(&adapters)?;
    let of = (&devices, &spec, &adapters);
    let result = evaluated(of, around, ("hydra predict", ByteSize(0)), (chain, content, batch))?;
    let written = with_predictions(&rows, predicts.fields(&result.rows)?);
    match &args.out {
        Some(out) => write(out, format, &written)?,
        None => {
            let mut text = Vec::new();
            format.write(&written, &mut text)?;
            around.print(&String::from_utf8(text)?)?;
        }
    }
    Ok(Outcome::Done)
}

/// Refuses a file that cannot be written, before the time that predictions take.
pub(super) fn check_out(out: &Path) -> Result<(), Usage> {
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match (out.is_dir() || !parent.is_dir(), out.exists() && !out.is_file()) {
        (true, _) => {
            Err(Usage::new(format!("--out `{}` must be a file in an existing directory", out.display())))
        }
        // The file is renamed into place, which would remove a pipe or a device.
        (_, true) => Err(Usage::new(format!(
            "--out `{}` is no regular file: omit --out to write to standard output, or pass the name of a file",
            out.display()
        ))),
        _ => Ok(()),
    }
}

/// The file that a path names, through symbolic links.
fn target(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Refuses rows with a field that a prediction would replace, or whose column in a table has the name of one of its parts.
fn check_names(rows: &InputRows, names: &[&str]) -> Result<()> {
    let is_taken = |name: &str| {
        let part = format!("{name}.");
        rows.fields().any(|row| row.keys().any(|key| key == name || key.starts_with(&part)))
    };
    match names.iter().find(|name| is_taken(name)) {
        Some(name) => bail!(
            "the rows of `{}` have a field `{name}`, which the predictions are written to: rename it",
            rows.path().display()
        ),
        None => Ok(()),
    }
}

/// The rows with the fields of their predictions at the end.
fn with_predictions(rows: &InputRows, predictions: Vec<Map<String, Value>>) -> Vec<Map<String, Value>> {
    let add = |(row, predicted): (&Map<String, Value>, Map<String, Value>)| {
        let mut row = row.clone();
        row.extend(predicted);
        row
    };
    rows.fields().zip(predictions).map(add).collect()
}

/// Writes a text file, which is renamed into place when it is complete.
pub(super) fn write_text(path: &Path, text: &str) -> Result<()> {
    let written = replace_file(&target(path), |file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("`{}` could not be written", path.display()))
}

/// Writes the file, which is renamed into place when it is complete.
fn write(path: &Path, format: RowFormat, rows: &[Map<String, Value>]) -> Result<()> {
    let written = replace_file(&target(path), |file| {
        let mut out = BufWriter::new(file);
        format.write(rows, &mut out)?;
        out.flush()
    });
    written
        .map_err(|error: io::Error| error)
        .with_context(|| format!("`{}` could not be written", path.display()))
}
