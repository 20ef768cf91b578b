//! Checks of optimizer steps on the device.

use super::found::{Finding, Verdict};
use super::subject::{Subject, supports};
use super::training::{SmallModel, each_model};
use anyhow::Result;
use hydra_core::{FloatType, TrainSpec};
use hydra_engine::{OptimizerCheck, OptimizerPlacement, RuleCheck, TaskReport};
use serde_json::{Value, json};

/// Compares optimizer steps on the device bitwise with the host's: on random elements, and in training.
pub(super) fn steps(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let floats = [FloatType::F32, FloatType::Bf16].into_iter().filter(|float| supports(&device.burn, *float));
    let Some(check) = device.compare_optimizer(&floats.collect::<Vec<_>>())? else {
        return Ok(Finding::not_applicable("models of CPU devices are stepped on the host"));
    };
    drop(device);
    let mut rows = check.rules.iter().map(|rule| json!(rule)).collect();
    let mut problems = each_model(subject, &mut rows, |model| trained(subject, model))?;
    if check.is_exact() {
        problems.extend(rows.iter().filter_map(differs));
    }
    Ok(judge(&check, &problems, subject.is_cuda(), rows))
}

/// Trains a small model with its optimizer on the device, and the same model stepped on the host.
fn trained(subject: &Subject, model: &SmallModel) -> Result<Value> {
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
    Some(format!("{name}: the weights after steps on the device differ from those after steps on the host"))
}

/// NVIDIA GPUs must round every operation as the host does; other devices may differ.
fn judge(check: &OptimizerCheck, problems: &[String], must: bool, rows: Vec<Value>) -> Finding {
    let figure = format!("{} of {} values differ", check.differing(), check.values());
    if !problems.is_empty() {
        return Finding::new(Verdict::Fails, figure, problems.join("; "), rows);
    }
    if check.is_exact() {
        let says = "steps on the device are bitwise equal to the host's: device-resident models may be stepped there";
        return Finding::new(Verdict::Pass, figure, says, rows);
    }
    let differs = |rule: &&RuleCheck| rule.ordinary_differing + rule.extreme_differing > 0;
    let wrong: Vec<&str> = check.rules.iter().filter(differs).map(|rule| rule.rule.as_str()).collect();
    let says = format!(
        "steps on the device are not bitwise equal to the host's ({}): the host steps by default",
        wrong.join("; ")
    );
    Finding::new(if must { Verdict::Fails } else { Verdict::NotApplicable }, figure, says, rows)
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
