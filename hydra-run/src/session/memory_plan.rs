//! The memory plan of a run with the prediction of its time, as `--dry-run` and `hydra explain` print them.

use super::explain::{self, duration};
use super::prediction::Prediction;
use super::times::Times;
use crate::run_dir::FileBytes;
use crate::terminal::Table;
use anyhow::{Context, Result};
use hydra_core::ByteSize;
use hydra_engine::{Admission, AdmittedTask, Skipped};
use hydra_partition::ShardPlan;
use serde_json::json;
use std::collections::BTreeMap;

/// Returns the admission as JSON, with the cut-points and shards of each task, the bytes of files, the prediction, and the times
/// of the whole run.
pub(crate) fn json(
    admission: &Admission,
    files: FileBytes,
    prediction: Option<&Prediction>,
    times: Option<&Times>,
) -> Result<String> {
    let memory = |shard: &ShardPlan| {
        json!({
            "first": shard.first, "end": shard.end, "peak_bytes": shard.peak_bytes,
            "verified_bytes": shard.verified_bytes,
        })
    };
    let mut value = serde_json::to_value(admission).context("the admission could not be written as JSON")?;
    for (index, task) in admission.tasks.iter().enumerate() {
        let cut = &mut value["tasks"][index];
        cut["cut_points"] = json!(task.plan.cut_points);
        cut["shards"] = json!(task.plan.shards.len());
        cut["shard_needs"] = task.plan.shards.iter().map(memory).collect();
    }
    let FileBytes { checkpoints, models, .. } = files;
    value["files"] = json!({ "checkpoint_bytes": checkpoints, "model_bytes": models });
    value["prediction"] =
        serde_json::to_value(prediction).context("the prediction could not be written as JSON")?;
    value["times"] = serde_json::to_value(times).context("the times could not be written as JSON")?;
    Ok(format!("{value:#}\n"))
}

/// Returns the same as text.
pub(crate) fn render(
    admission: &Admission,
    files: FileBytes,
    prediction: Option<&Prediction>,
    times: Option<&Times>,
) -> String {
    let mut text =
        format!("memory plan:\n{}\n", tasks(&admission.tasks, admission.disk_budget_bytes.is_some()));
    for (name, budget) in &admission.devices {
        let (budget, reserve) = (ByteSize(*budget), ByteSize(admission.reserve_bytes));
        text.push_str(&format!(
            "device {name}: budget {budget}, including {reserve} for the double buffer\n"
        ));
    }
    if let Some(budget) = admission.disk_budget_bytes {
        let [disk, working, budget] =
            [admission.disk_bytes, admission.host_working_bytes, budget].map(ByteSize);
        text.push_str(&format!(
            "disk: {disk} of {budget} for master weights and optimizer state, staged through {working} of host memory\n"
        ));
    }
    let in_place = admission.tasks.iter().map(|task| task.storage.in_place_bytes).max().unwrap_or(0);
    if in_place > 0 {
        text.push_str(&format!(
            "frozen weights: read in place from the models' files, up to {} for a task; host memory has no copy\n",
            ByteSize(in_place)
        ));
    }
    for Skipped { name, reason, .. } in &admission.skipped {
        text.push_str(&format!("skipped: {name}, which cannot fit: {reason}\n"));
    }
    if let Some(most) = admission.max_concurrent {
        let limit = if most < admission.tasks.len() { format!(" (at most {most})") } else { String::new() };
        text.push_str(&format!(
            "queue: as many tasks run concurrently as fit in host memory{limit}; the others start when tasks end\n"
        ));
    }
    text.push_str(&microbatch_groups(&admission.tasks));
    text.push_str(&replicas(&admission.tasks));
    let [admitted, budget] = [admission.host_admitted_bytes, admission.host_budget_bytes].map(ByteSize);
    let (models, time) = (admission.active_models, duration(admission.estimated_s));
    text.push_str(&format!(
        "host memory: {admitted} of {budget}, with at most {models} models in a minibatch concurrently\nestimated compute \
        time: {time}, without transfers between host and devices\n"
    ));
    let [checkpoints, models] = [files.checkpoints, files.models].map(ByteSize);
    text.push_str(&format!(
        "run directory: up to {checkpoints} of checkpoints, removed when their tasks end, and {models} of models\n"
    ));
    let predicted = prediction.map_or_else(
        || "\nno prediction: the run is too large for the simulator\n".to_owned(),
        explain::render,
    );
    let whole = times.map(Times::render).unwrap_or_default();
    format!("{text}{predicted}{whole}nothing was trained (--dry-run)\n")
}

/// Returns a line for each microbatch group size larger than 1, with the number of tasks that use it.
fn microbatch_groups(tasks: &[AdmittedTask]) -> String {
    let mut microbatch_groups: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for AdmittedTask { microbatch_group, .. } in tasks {
        *microbatch_groups.entry((microbatch_group.microbatches, microbatch_group.batches)).or_default() += 1;
    }
    microbatch_groups.remove(&(1, 1));
    let line = |((microbatches, batches), count): ((usize, usize), usize)| {
        format!(
            "microbatch group of {count} of {} tasks: a promoted shard computes {microbatches} microbatches of a minibatch, or \
            {batches} batches of an evaluation, before the next shard is promoted\n",
            tasks.len()
        )
    };
    microbatch_groups.into_iter().map(line).collect()
}

/// Returns the line on data-parallel replicas, if a task may have several.
fn replicas(tasks: &[AdmittedTask]) -> String {
    let several = tasks.iter().filter(|task| task.replicas > 1);
    let Some(most) = several.clone().map(|task| task.replicas).max() else { return String::new() };
    let (count, all) = (several.count(), tasks.len());
    format!(
        "replicas: up to {most} devices train one model of {count} of {all} tasks concurrently, if they have no other work\n"
    )
}

fn tasks(tasks: &[AdmittedTask], with_disk: bool) -> String {
    let on_disk = with_disk.then_some(">on disk");
    let names = [
        "<task",
        ">parameters",
        ">trainable",
        ">frozen",
        ">minibatches",
        ">trained on",
        ">shards",
        ">largest shard",
        ">weights + optimizer",
    ]
    .into_iter();
    let mut table =
        Table::new(names.chain(on_disk).chain([">gradients + activations", ">compute time", "<cut-points"]));
    for task in tasks {
        let cuts: Vec<String> = task.plan.cut_points.iter().map(ToString::to_string).collect();
        let mut row = vec![
            task.name.clone(),
            task.parameters.to_string(),
            task.trained_parameters.to_string(),
            (task.parameters - task.trained_parameters).to_string(),
            task.steps.to_string(),
            format!("{} {}", task.data.units, task.data.unit),
            task.plan.shards.len().to_string(),
            ByteSize(task.plan.shards.iter().map(ShardPlan::most_bytes).max().unwrap_or(0)).to_string(),
            ByteSize(task.storage.master_bytes).to_string(),
        ];
        row.extend(with_disk.then(|| ByteSize(task.storage.disk_bytes).to_string()));
        row.push(ByteSize(task.memory.active_bytes).to_string());
        row.extend([duration(task.estimated_s), cuts.join(",")]);
        table.row(row);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admission_says_devices_and_host() {
        let admission = Admission {
            tasks: Vec::new(),
            devices: vec![("cpu:0".to_owned(), 64 << 20)],
            reserve_bytes: 8 << 20,
            host_budget_bytes: 2 << 30,
            host_admitted_bytes: 1 << 30,
            host_ahead_bytes: 1 << 20,
            host_working_bytes: 64 << 20,
            disk_bytes: 3 << 30,
            disk_budget_bytes: Some(4 << 30),
            active_models: 3,
            max_concurrent: Some(1),
            skipped: Vec::new(),
            estimated_s: 90.0,
        };
        let files = FileBytes { checkpoints: 5 << 30, next: 1 << 30, models: 6 << 30 };
        let text = render(&admission, files, None, None);
        assert!(text.contains("no prediction"), "{text}");
        for part in [
            "device cpu:0: budget 64.00 MiB, including 8.00 MiB",
            "1.00 GiB of 2.00 GiB",
            "at most 3 models",
            "queue: as many tasks run",
            "3.00 GiB of 4.00 GiB for master weights and optimizer state, staged through 64.00 MiB",
            "compute time: 1 min 30 s, without transfers",
            "up to 5.00 GiB of checkpoints, removed when their tasks end, and 6.00 GiB of models",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let json = json(&admission, files, None, None).unwrap();
        assert!(json.contains("\"active_models\": 3") && json.contains("\"checkpoint_bytes\": 5368709120"));
    }
}
