//! `hydra export`: writes a model for other programs, with its adapters merged, in another type or in several files.

use crate::session::export::new_directory;
use crate::session::model::Trained;
use crate::session::{Environment, Model};
use crate::settings::{AdapterSettings, ModelSettings, OUTPUT, TaskName, classifies, find_base, flags};
use crate::terminal::{Outcome, Usage, tell};
use anyhow::{Context as _, Result, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use hydra_core::ByteSize;
use hydra_models::data::DecodeMemory;
use hydra_models::weights::{SavedType, StoredWeights};
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
    /// Merge the adapters into the model's weights; without it, the adapters are exported alone
    #[arg(long)]
    pub(crate) merge: bool,
    /// Directory to write, which must not exist or be empty
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub(crate) out: PathBuf,
    /// Type of the written weights [default: that of the model's files; without --merge that of the adapters]
    #[arg(long, value_name = "f32|bf16|f16", value_parser = flags::named::<SavedType>(SavedType::NAMES), help_heading = OUTPUT)]
    pub(crate) dtype: Option<SavedType>,
    /// Maximum size of the tensors in a file; a larger model has several files and an index, as Transformers writes them
    #[arg(long, value_name = "SIZE", default_value = "50GB", help_heading = OUTPUT)]
    pub(crate) max_shard_size: ByteSize,
}

/// Writes the model and prints where.
pub(crate) fn run(mut args: ExportArgs, around: &Environment) -> Result<Outcome> {
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
    let exported = model.exported(&adapters, args.dtype, args.max_shard_size.bytes())?;
    new_directory(&args.out, |dir| write(&exported, dir))
        .with_context(|| format!("the model could not be exported to `{}`", args.out.display()))?;
    let (files, bytes) = size(&args.out);
    let (dtype, out) = (exported.saved, args.out.display());
    around.print(&format!("exported to {out}: weights of {dtype}, {bytes} in {files} files\n"))?;
    Ok(Outcome::Done)
}

/// The adapters, and in `args` the model that they belong to.
fn resolve(args: &mut ExportArgs) -> Result<AdapterSettings> {
    if args.model.is_none() {
        args.model = args.adapter.take();
    }
    let mut settings = ModelSettings { model: args.model.take(), ..flags::defaults() };
    find_base(&mut settings, &mut args.adapter)?;
    args.model = settings.model;
    if args.merge && args.adapter.is_none() {
        bail!(Usage::new("--merge merges adapters: pass --adapter DIR too"));
    }
    Ok(AdapterSettings { merge: args.merge, ..AdapterSettings::of(args.adapter.clone()) })
}

fn write(exported: &Trained, dir: &Path) -> Result<()> {
    let chain = &exported.chain;
    Ok(exported.writer.write(chain, &StoredWeights::new(chain, 0), dir)?)
}

/// The number and the bytes of the files in a directory.
fn size(dir: &Path) -> (usize, ByteSize) {
    let files =
        std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|file| file.metadata().ok());
    let sizes: Vec<u64> = files.filter(std::fs::Metadata::is_file).map(|file| file.len()).collect();
    (sizes.len(), ByteSize(sizes.iter().sum()))
}
