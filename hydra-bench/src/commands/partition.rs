//! `hydra partition`: measures a model and prints its cut-points.

use anyhow::{Context, Result};
use clap::Args;
use hydra_core::{ByteSize, OptimizerSpec, TrainSpec};
use hydra_engine::TrainTask;
use hydra_models::data::Split;
use hydra_partition::PartitionPlan;
use hydra_run::run_dir::check_not_read;
use hydra_run::session::{Environment, Model, decode_memory, note_of_cuts, orchestrator};
use hydra_run::settings::{
    AdapterSettings, DeviceSettings, ModelSettings, OUTPUT, check_accumulate, find_base, values,
};
use hydra_run::terminal::{Outcome, Usage, print, tell};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// More host memory than any machine has. Nothing trains, so no plan is refused for lack of host memory.
const ANY_HOST_MEMORY: ByteSize = ByteSize(1 << 60);

/// `hydra partition`.
#[derive(Debug, Args)]
pub(crate) struct PartitionArgs {
    #[command(flatten)]
    pub(crate) model: ModelSettings,
    /// Minibatch size: items in one optimizer step
    #[arg(long, value_name = "N", default_value = "8", value_parser = values::batch, allow_hyphen_values = true)]
    pub(crate) batch: usize,
    /// Gradient accumulation: number of microbatches that each minibatch is split into
    #[arg(long, value_name = "N", default_value = "1", value_parser = values::count)]
    pub(crate) accumulate: usize,
    #[command(flatten)]
    pub(crate) adapters: AdapterSettings,
    #[command(flatten)]
    pub(crate) devices: DeviceSettings,
    /// Save the plan as JSON, for --plan
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub(crate) out: Option<PathBuf>,
    /// Print the plan and the budgets as JSON, and nothing else, on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Partitions and prints the plan.
pub(crate) fn run(args: PartitionArgs, around: &Environment) -> Result<Outcome> {
    let plan = plan(&args, around)?;
    if let Some(file) = &args.out {
        plan.save(file)?;
    }
    print(&if args.json { json_of(&plan) } else { plan.to_string() })?;
    Ok(Outcome::Done)
}

fn plan(args: &PartitionArgs, around: &Environment) -> Result<Arc<PartitionPlan>> {
    check_accumulate(args.accumulate, args.batch)?;
    let devices = args.devices.clone().resolve(&around.machine)?;
    let (mut spec, mut adapters) = (args.model.clone(), args.adapters.clone());
    find_base(&mut spec, &mut adapters.adapter)?;
    let spec = spec.resolve()?;
    if let Some(file) = &args.out {
        let read = [("--model", Path::new(spec.name())), ("--data", Path::new(spec.text()))];
        check_not_read("--out", file, &read)?;
    }
    devices.check_dtype(spec.dtype)?;
    note_of_cuts(&devices).iter().for_each(|note| tell(note));
    let mut model = Model::load(&spec, &decode_memory(&devices, &around.machine))?;
    adapters.check(&spec)?;
    let data = model.split(spec.text(), Split::Train)?;
    let trained = model.trained(&adapters, adapters.lora.first().copied(), None)?;
    // Cut-points depend on the microbatch, not on the optimizer's settings.
    let train = TrainSpec::new(OptimizerSpec::adamw(1e-3), args.batch);
    let train = TrainSpec { accumulate: args.accumulate, seed: spec.seed, ..train };
    train.validate().map_err(Usage::from_error)?;
    let mut task = TrainTask::new(spec.name(), trained.chain, data, train);
    if let Some(cuts) = devices.cuts.clone() {
        task = task.cuts(cuts);
    }
    // Nothing trains, so nothing is spilled to disk.
    let devices = DeviceSettings { disk_memory: None, ..devices };
    let orchestrator = orchestrator(&devices, spec.dtype, spec.seed, around)?;
    let mut orchestrator = orchestrator.host_memory(ANY_HOST_MEMORY);
    orchestrator.submit(task)?;
    let run = orchestrator.admit().context("the model could not be partitioned")?;
    let task = run.admission().tasks.first().context("no task was admitted")?;
    Ok(task.plan.clone())
}

fn json_of(plan: &PartitionPlan) -> String {
    let layers: Vec<&str> = plan.layers.iter().map(|layer| layer.name.as_str()).collect();
    let value = json!({
        "cut_points": plan.cut_points, "layers": layers,
        "min_device_memory_bytes": plan.min_device_memory_bytes,
        "single_shard_bytes": plan.single_shard_bytes, "plan": plan,
    });
    format!("{value:#}\n")
}
