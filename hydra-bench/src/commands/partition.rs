//! `hydra partition`: measures a model and shows where it is cut.

use crate::run_dir::paths::check_not_read;
use crate::run_dir::spec::{DevicesSpec, ModelSpec, check_accumulate, check_dtype};
use crate::session::model::Model;
use crate::session::orchestrator::{Surroundings, note_of_cuts, orchestrator};
use crate::settings::args::PartitionArgs;
use crate::terminal::error::{Outcome, Usage, print, tell};
use anyhow::{Context, Result};
use hydra_core::{ByteSize, OptimizerSpec, TrainSpec};
use hydra_engine::TrainTask;
use hydra_models::data::{Corpus, Split};
use hydra_partition::PartitionPlan;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// More host memory than any machine has: nothing trains, so a plan is not refused for want of it.
const ANY_HOST_MEMORY: ByteSize = ByteSize(1 << 60);

/// Partitions and prints the plan.
pub(crate) fn run(args: &PartitionArgs, around: &Surroundings) -> Result<Outcome> {
    let plan = plan(args, around)?;
    if let Some(file) = &args.out {
        plan.save(file)?;
    }
    print(&if args.json { json_of(&plan) } else { plan.to_string() })?;
    Ok(Outcome::Done)
}

fn plan(args: &PartitionArgs, around: &Surroundings) -> Result<Arc<PartitionPlan>> {
    check_accumulate(args.accumulate, args.batch)?;
    let devices = DevicesSpec::new(&args.devices, false, &around.machine)?;
    let spec = ModelSpec::new(&args.model)?;
    if let Some(file) = &args.out {
        let read = [("--model", Path::new(&spec.model)), ("--data", Path::new(&spec.data))];
        check_not_read("--out", file, &read)?;
    }
    check_dtype(spec.dtype, devices.precision)?;
    note_of_cuts(&devices).iter().for_each(|note| tell(note));
    let model = Model::load(&spec)?;
    let context = model.context(spec.context)?;
    let corpus = Corpus::load(&spec.data)?;
    let blocks = model.blocks(&corpus, Split::Train, context)?;
    // Only the microbatch decides where a model is cut, not how it learns.
    let train = TrainSpec {
        accumulate: args.accumulate,
        seed: spec.seed,
        ..TrainSpec::new(OptimizerSpec::adamw(1e-3), args.batch)
    };
    train.validate().map_err(Usage::from_error)?;
    let mut task = TrainTask::new(&spec.model, model.chain.clone(), Arc::new(blocks), train);
    if let Some(cuts) = devices.cuts.clone() {
        task = task.cuts(cuts);
    }
    // Nothing trains, so nothing is on a disk either.
    let devices = DevicesSpec { disk_memory_bytes: None, ..devices };
    let mut orchestrator =
        orchestrator(&devices, spec.dtype, spec.seed, around)?.host_memory(ANY_HOST_MEMORY);
    orchestrator.submit(task)?;
    let admission = orchestrator.admit().context("the model could not be partitioned")?;
    let task = admission.tasks.first().context("nothing was admitted")?;
    Ok(task.plan.clone())
}

fn json_of(plan: &PartitionPlan) -> String {
    let layers: Vec<&str> = plan.layers.iter().map(|layer| layer.name.as_str()).collect();
    let value = json!({
        "cut_points": plan.cut_points,
        "layers": layers,
        "min_device_memory_bytes": plan.min_device_memory_bytes,
        "single_shard_bytes": plan.single_shard_bytes,
        "plan": plan,
    });
    format!("{value:#}\n")
}
