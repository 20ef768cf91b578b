//! Optimizer steps on the device.

use super::found::{Found, Verdict};
use super::subject::{Subject, supports};
use super::training::{Model, each_model};
use anyhow::Result;
use hydra_core::{FloatType, TrainSpec};
use hydra_engine::{OptimizerCheck, OptimizerPlacement, RuleCheck, TaskReport};
use serde_json::{Value, json};

/// The optimizer's steps on the device beside the host's, bit by bit: of drawn elements, and in training.
pub(super) fn steps(subject: &Subject) -> Result<Found> {
    let device = subject.open()?;
    let floats = [FloatType::F32, FloatType::Bf16].into_iter().filter(|float| supports(&device.burn, *float));
    let Some(check) = device.compare_optimizer(&floats.collect::<Vec<_>>())? else {
        return Ok(Found::not_applicable("the optimizer steps a CPU device's models on the host"));
    };
    drop(device);
    let mut rows = check.rules.iter().map(|rule| json!(rule)).collect();
    let mut problems = each_model(subject, &mut rows, |model| trained(subject, model))?;
    if check.is_exact() {
        problems.extend(rows.iter().filter_map(differs));
    }
    Ok(judge(&check, &problems, subject.is_cuda(), rows))
}

/// A small device-homed model beside the same one stepped on the host.
fn trained(subject: &Subject, model: &Model) -> Result<Value> {
    let spec = TrainSpec { clip: None, ..model.spec(subject.pick(20, 4)) };
    let run = |placement| -> Result<TaskReport> {
        let run = subject.placed(subject.device.memory, placement)?;
        Ok(model.train(run, spec.clone())?.tasks.remove(0))
    };
    let (host, device) = (run(OptimizerPlacement::Host)?, run(OptimizerPlacement::Device)?);
    Ok(json!({
        "model": model.name, "same_weights": host.weights_sha256 == device.weights_sha256,
        "same_losses": host.losses == device.losses, "stall_on_host_s": host.times.optimizer_stall_s,
        "stall_on_device_s": device.times.optimizer_stall_s,
    }))
}

fn differs(row: &Value) -> Option<String> {
    let name = row["model"].as_str().filter(|_| row["same_weights"] == false)?;
    Some(format!("{name}: stepped on the device, its weights are not those of the host's steps"))
}

/// NVIDIA's cards round every operation of the formulas as the host does; others need not.
fn judge(check: &OptimizerCheck, problems: &[String], must: bool, rows: Vec<Value>) -> Found {
    let figure = format!("{} of {} values differ", check.differing(), check.values());
    if !problems.is_empty() {
        return Found::new(Verdict::Fails, figure, problems.join("; "), rows);
    }
    if check.is_exact() {
        let says = "a step on the device gives the host's bits: what stays there may be stepped there";
        return Found::new(Verdict::Pass, figure, says, rows);
    }
    let differs = |rule: &&RuleCheck| rule.ordinary_differing + rule.extreme_differing > 0;
    let wrong: Vec<&str> = check.rules.iter().filter(differs).map(|rule| rule.rule.as_str()).collect();
    let says = format!(
        "a step on the device is not the host's to the bit ({}): the host steps, unless asked otherwise",
        wrong.join("; ")
    );
    Found::new(if must { Verdict::Fails } else { Verdict::NotApplicable }, figure, says, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_must_be_exact_and_is_not_fails() {
        let eight = RuleCheck { ordinary: 8, extreme: 8, ..RuleCheck::default() };
        let rule = |rule: &str, differing| RuleCheck {
            rule: rule.to_owned(),
            extreme_differing: differing,
            ..eight.clone()
        };
        let check = OptimizerCheck { rules: vec![rule("AdamW", 1), rule("SGD", 0)] };
        let [must, may] = [true, false].map(|must| judge(&check, &[], must, Vec::new()));
        assert_eq!((must.verdict, may.verdict), (Verdict::Fails, Verdict::NotApplicable));
        assert!(must.says.contains("(AdamW)") && must.figure == "1 of 32 values differ", "{must:?}");
        let exact = OptimizerCheck { rules: vec![rule("SGD", 0)] };
        let passes = judge(&exact, &[], true, Vec::new());
        assert_eq!((passes.verdict, passes.figure.as_str()), (Verdict::Pass, "0 of 16 values differ"));
        let row = json!({"model": "mlp", "same_weights": false});
        let problems: Vec<String> = differs(&row).into_iter().collect();
        let fails = judge(&exact, &problems, false, vec![row]);
        assert!(fails.verdict == Verdict::Fails && fails.says.starts_with("mlp: "), "{fails:?}");
    }
}
