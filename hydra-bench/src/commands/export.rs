//! `hydra export`: writes a model for other programs, with its adapters merged, in another type, in several files or as GGUF.

use anyhow::{Context as _, Result, bail};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use hydra_core::ByteSize;
use hydra_engine::StopFlag;
use hydra_models::data::DecodeMemory;
use hydra_models::gguf::GgufType;
use hydra_models::lora::Base;
use hydra_models::tokenizer::replace_tokenizer;
use hydra_run::session::export::{UntilStopped, new_directory};
use hydra_run::session::generation::own_files;
use hydra_run::session::model::Trained;
use hydra_run::session::{Environment, Model};
use hydra_run::settings::{AdapterSettings, ModelSettings, OUTPUT, TaskName, classifies, find_base, flags};
use hydra_run::terminal::{Outcome, Usage, tell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `hydra export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Model: a Hugging Face model directory, a model of the local Hugging Face cache as org/name, or a directory of adapters
    /// whose base is found
    #[arg(long, value_name = "DIR", value_parser = NonEmptyStringValueParser::new(), required_unless_present = "adapter")]
    pub(crate) model: Option<String>,
    /// Adapters of the model, written by PEFT or by a task of a run
    #[arg(long, value_name = "DIR", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) adapter: Option<String>,
    /// Quantize the linear layers of the model below the adapters, as in training with --base
    #[arg(long, value_name = "TYPE", value_parser = flags::named::<Base>(&["nf4"]))]
    pub(crate) base: Option<Base>,
    /// Merge the adapters into the model's weights; without it, the adapters are exported alone
    #[arg(long)]
    pub(crate) merge: bool,
    /// Directory to write, which must not exist or be empty; with --format gguf the file to write, FILE.gguf
    #[arg(long, value_name = "DIR|FILE.gguf", help_heading = OUTPUT)]
    pub(crate) out: PathBuf,
    /// Format: safetensors (a Hugging Face directory), or gguf (a file for llama.cpp, of a language model or of its adapters)
    #[arg(long, value_enum, default_value = "safetensors", help_heading = OUTPUT)]
    pub(crate) format: Format,
    /// Type of the written weights; q8_0 only with --format gguf [default: that of the model's files; without --merge that of the
    /// adapters]
    #[arg(long, value_name = "f32|bf16|f16|q8_0", value_parser = flags::named::<GgufType>(GgufType::NAMES), help_heading = OUTPUT)]
    pub(crate) dtype: Option<GgufType>,
    /// Maximum size of the tensors in a safetensors file; a larger model has several files and an index, as Transformers writes
    /// them [default: 50GB]
    #[arg(long, value_name = "SIZE", help_heading = OUTPUT)]
    pub(crate) max_shard_size: Option<ByteSize>,
}

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A Hugging Face directory
    Safetensors,
    /// A file for llama.cpp
    Gguf,
}

/// The default of `--max-shard-size`, that of Transformers.
const SHARD_BYTES: u64 = 50_000_000_000;

/// Writes the model and prints where.
pub(crate) fn run(mut args: ExportArgs, around: &Environment) -> Result<Outcome> {
    check(&args)?;
    let adapters = resolve(&mut args)?;
    let mut settings = ModelSettings { model: args.model.clone(), ..flags::defaults() };
    settings.task = classifies(&adapters)?.then_some(TaskName::Classify);
    let mut model = Model::load(&settings.resolve()?, &Arc::new(DecodeMemory::new(ByteSize(u64::MAX))))?;
    if !model.has_weights() {
        bail!(Usage::new(format!(
            "--model `{}` has no weights to export: pass the directory of a trained model",
            args.model.unwrap_or_default()
        )));
    }
    model.as_trained(&adapters)?;
    tell(&model.note_of_origin(&adapters, &[0], ""));
    // Merged adapters have the texts that they had with `hydra generate`.
    let of_adapters: Vec<String> = args.adapter.iter().filter(|_| args.merge).cloned().collect();
    let (own, note) = own_files(&of_adapters, model.directory());
    if args.format == Format::Gguf {
        if let Some(own) = own {
            tell(&format!(
                "note: tokenizer and chat template: those of the model, not those of `{}`, which a GGUF file does not take",
                own.display()
            ));
        }
        return gguf(&args, &model, &adapters, around);
    }
    let dtype = args.dtype.and_then(GgufType::saved);
    let shard_bytes = args.max_shard_size.map_or(SHARD_BYTES, ByteSize::bytes);
    let exported = model.exported(&adapters, dtype, shard_bytes)?;
    note.as_deref().into_iter().for_each(tell);
    let stop = around.stop_flag()?;
    let written = new_directory(&args.out, |dir| {
        write(&exported, &stop, dir)?;
        Ok(own.map_or(Ok(()), |own| replace_tokenizer(own, dir))?)
    });
    if !is_written(written, &stop, &args.out)? {
        return Ok(Outcome::Interrupted);
    }
    let (files, bytes) = size(&args.out);
    let (dtype, out) = (exported.saved, args.out.display());
    around.print(&format!("exported to {out}: weights of {dtype}, {bytes} in {files} files\n"))?;
    Ok(Outcome::Done)
}

/// Writes the model as a GGUF file and prints where.
fn gguf(
    args: &ExportArgs,
    model: &Model,
    adapters: &AdapterSettings,
    around: &Environment,
) -> Result<Outcome> {
    let file = args.out.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (chain, writer, dtype) = model.for_gguf(adapters, args.dtype, file)?;
    let folder = args.out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let stop = around.stop_flag()?;
    let written = writer.write(&chain, &UntilStopped::new(&chain, &stop), folder);
    if !is_written(written.map_err(Into::into), &stop, &args.out)? {
        return Ok(Outcome::Interrupted);
    }
    let bytes = ByteSize(std::fs::metadata(&args.out)?.len());
    around.print(&format!("exported to {}: matrices of {dtype}, {bytes}\n", args.out.display()))?;
    Ok(Outcome::Done)
}

/// Refuses flags that do not go together.
fn check(args: &ExportArgs) -> Result<(), Usage> {
    if args.format == Format::Gguf && args.out.exists() {
        let out = args.out.display();
        return Err(Usage::new(format!("--out `{out}` exists: pass the name of a file that does not")));
    }
    let is_file = args.out.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    let refused = match args.format {
        Format::Safetensors if args.dtype == Some(GgufType::Q8) => {
            "--dtype q8_0 applies to GGUF files: pass --format gguf too"
        }
        Format::Safetensors if is_file => {
            "--out names a GGUF file: pass --format gguf too, or the name of a directory"
        }
        Format::Gguf if !is_file => "--format gguf writes a file: pass --out FILE.gguf",
        Format::Gguf if args.max_shard_size.is_some() => {
            "--max-shard-size applies to safetensors files, and a GGUF file is one file: omit it"
        }
        Format::Safetensors if args.max_shard_size.is_some() && args.adapter.is_some() && !args.merge => {
            "--max-shard-size applies to whole models, and adapters are one file: omit it, or pass --merge"
        }
        _ => return Ok(()),
    };
    Err(Usage::new(refused))
}

/// The adapters, and in `args` the model that they belong to.
fn resolve(args: &mut ExportArgs) -> Result<AdapterSettings> {
    if args.model.is_none() {
        args.model = args.adapter.take();
    }
    let mut settings = ModelSettings { model: args.model.take(), ..flags::defaults() };
    find_base(&mut settings, &mut args.adapter)?;
    args.model = settings.model;
    if args.base.is_some() && !args.merge {
        bail!(Usage::new(
            "--base applies to the model that adapters are merged into: pass --adapter DIR --merge too"
        ));
    }
    if args.merge && args.adapter.is_none() {
        bail!(Usage::new("--merge merges adapters: pass --adapter DIR too"));
    }
    let (merge, base) = (args.merge, args.base);
    Ok(AdapterSettings { merge, base, ..AdapterSettings::of(args.adapter.clone()) })
}

fn write(exported: &Trained, stop: &StopFlag, dir: &Path) -> Result<()> {
    let chain = &exported.chain;
    Ok(exported.writer.write(chain, &UntilStopped::new(chain, stop), dir)?)
}

/// Returns whether the model was written, or false if an interrupt ended it.
fn is_written(written: Result<()>, stop: &StopFlag, out: &Path) -> Result<bool> {
    match written {
        Err(_) if stop.is_stopped() => {
            tell(&format!("note: the export was interrupted: `{}` was not written", out.display()));
            Ok(false)
        }
        written => {
            written.with_context(|| format!("the model could not be exported to `{}`", out.display()))?;
            Ok(true)
        }
    }
}

/// The number and the bytes of the files in a directory.
fn size(dir: &Path) -> (usize, ByteSize) {
    let files =
        std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|file| file.metadata().ok());
    let sizes: Vec<u64> = files.filter(std::fs::Metadata::is_file).map(|file| file.len()).collect();
    (sizes.len(), ByteSize(sizes.iter().sum()))
}
