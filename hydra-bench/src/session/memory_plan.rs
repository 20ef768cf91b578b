//! The needs of a run, as `--dry-run` and `hydra explain` print them, with the prediction of how it will go.

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

/// The admission as JSON, in which each task says how it is cut, the bytes of files, the prediction, and the times of the whole
/// run.
pub(crate) fn json(
    admission: &Admission,
    files: FileBytes,
    prediction: Option<&Prediction>,
    times: Option<&Times>,
) -> Result<String> {
    let needs = |shard: &ShardPlan| {
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
        cut["shard_needs"] = task.plan.shards.iter().map(needs).collect();
    }
    let FileBytes { checkpoints, models, .. } = files;
    value["files"] = json!({ "checkpoint_bytes": checkpoints, "model_bytes": models });
    value["prediction"] = serde_json::to_value(prediction).context("the prediction is no JSON")?;
    value["times"] = serde_json::to_value(times).context("the times are no JSON")?;
    Ok(format!("{value:#}\n"))
}

/// The admission as text, with the bytes of files, the prediction and the times of the whole run.
pub(crate) fn render(
    admission: &Admission,
    files: FileBytes,
    prediction: Option<&Prediction>,
    times: Option<&Times>,
) -> String {
    let mut text = format!("{}\n", tasks(&admission.tasks, admission.disk_budget_bytes.is_some()));
    for (name, budget) in &admission.devices {
        let (budget, reserve) = (ByteSize(*budget), ByteSize(admission.reserve_bytes));
        text.push_str(&format!("{name}: {budget}, {reserve} of it for the double buffer\n"));
    }
    if let Some(budget) = admission.disk_budget_bytes {
        let [disk, working, budget] =
            [admission.disk_bytes, admission.host_working_bytes, budget].map(ByteSize);
        text.push_str(&format!(
            "disk: {disk} of {budget} for masters, for work on which host memory has {working}\n"
        ));
    }
    for Skipped { name, reason, .. } in &admission.skipped {
        text.push_str(&format!("skipped: {name}, which can never fit: {reason}\n"));
    }
    if let Some(most) = admission.queued {
        let limit = if most < admission.tasks.len() { format!(", at most {most}") } else { String::new() };
        text.push_str(&format!(
            "tasks begin in turn: so many at once as host memory has room for{limit}; the others wait until some have ended\n"
        ));
    }
    text.push_str(&microbatch_groups(&admission.tasks));
    text.push_str(&replicas(&admission.tasks));
    let [admitted, budget] = [admission.host_admitted_bytes, admission.host_budget_bytes].map(ByteSize);
    let (models, time) = (admission.active_models, duration(admission.estimated_s));
    text.push_str(&format!(
        "host memory: {admitted} of {budget}, up to {models} models within a minibatch\nestimated time: {time} of \
         compute; transfers between host and devices are left out\n"
    ));
    let [checkpoints, models] = [files.checkpoints, files.models].map(ByteSize);
    text.push_str(&format!(
        "run directory: up to {checkpoints} for checkpoints until their tasks end, and {models} for models\n"
    ));
    let predicted = prediction.map_or_else(
        || "no predicted time: the simulator does not take so large a run\n".to_owned(),
        explain::render,
    );
    let whole = times.map(Times::render).unwrap_or_default();
    format!("{text}{predicted}{whole}nothing was trained (--dry-run)\n")
}

/// The microbatch groups that have more than one microbatch pass, each with the number of tasks that make it.
fn microbatch_groups(tasks: &[AdmittedTask]) -> String {
    let mut microbatch_groups: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for AdmittedTask { microbatch_group, .. } in tasks {
        *microbatch_groups.entry((microbatch_group.microbatches, microbatch_group.batches)).or_default() += 1;
    }
    microbatch_groups.remove(&(1, 1));
    let line = |((microbatches, batches), count): ((usize, usize), usize)| {
        format!(
            "visits of {count} of {} tasks: a promoted shard computes {microbatches} of the microbatches of a minibatch, and \
             {batches} of the batches of an evaluation, before the next has its turn\n",
            tasks.len()
        )
    };
    microbatch_groups.into_iter().map(line).collect()
}

/// The devices that compute one model at once, where it may be several.
fn replicas(tasks: &[AdmittedTask]) -> String {
    let several = tasks.iter().filter(|task| task.replicas > 1);
    let Some(most) = several.clone().map(|task| task.replicas).max() else { return String::new() };
    let (count, all) = (several.count(), tasks.len());
    format!(
        "up to {most} devices compute one model at once, of {count} of {all} tasks, where they have no other\n"
    )
}

fn tasks(tasks: &[AdmittedTask], with_disk: bool) -> String {
    let on_disk = with_disk.then_some(">on the disk");
    let names = [
        "<task",
        ">parameters",
        ">trained",
        ">frozen",
        ">minibatches",
        ">trained on",
        ">shards",
        ">largest shard",
        ">masters",
    ]
    .into_iter();
    let mut table = Table::new(names.chain(on_disk).chain([">in a minibatch", ">estimated", "<cut-points"]));
    for task in tasks {
        let cuts: Vec<String> = task.plan.cut_points.iter().map(ToString::to_string).collect();
        let mut row = vec![
            task.name.clone(),
            task.parameters.to_string(),
            task.trained_parameters.to_string(),
            (task.parameters - task.trained_parameters).to_string(),
            task.steps.to_string(),
            format!("{} {}", task.units, task.unit),
            task.plan.shards.len().to_string(),
            ByteSize(task.plan.shards.iter().map(ShardPlan::most_bytes).max().unwrap_or(0)).to_string(),
            ByteSize(task.master_bytes).to_string(),
        ];
        row.extend(with_disk.then(|| ByteSize(task.disk_bytes).to_string()));
        row.push(ByteSize(task.active_bytes).to_string());
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
            queued: Some(1),
            skipped: Vec::new(),
            estimated_s: 90.0,
        };
        let files = FileBytes { checkpoints: 5 << 30, next: 1 << 30, models: 6 << 30 };
        let text = render(&admission, files, None, None);
        assert!(text.contains("no predicted time"), "{text}");
        for part in [
            "cpu:0: 64.00 MiB, 8.00 MiB",
            "1.00 GiB of 2.00 GiB",
            "up to 3 models",
            "tasks begin in turn",
            "3.00 GiB of 4.00 GiB for masters, for work on which host memory has 64.00 MiB",
            "1 min 30 s of compute; transfers",
            "up to 5.00 GiB for checkpoints until their tasks end, and 6.00 GiB for models",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let json = json(&admission, files, None, None).unwrap();
        assert!(json.contains("\"active_models\": 3") && json.contains("\"checkpoint_bytes\": 5368709120"));
    }
}
