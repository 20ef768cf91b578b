//! Whether the device could step what stays on it.

use super::subject::Subject;
use super::{Found, Verdict};
use anyhow::Result;
use hydra_engine::OptimizerCheck;
use serde_json::{Value, json};

/// The optimizer's steps on the device beside the host's, bit by bit.
pub(super) fn steps(subject: &Subject) -> Result<Found> {
    let Some(check) = subject.open()?.compare_optimizer()? else {
        return Ok(Found::not_applicable("the optimizer steps a CPU device's models on the host"));
    };
    Ok(judge(&check, subject.is_cuda()))
}

/// NVIDIA's cards round every operation of the formulas as the host does; others need not.
fn judge(check: &OptimizerCheck, must: bool) -> Found {
    let differing = check.differing();
    let figure = format!("{differing} of {} values differ", check.values());
    let rows = check.rules.iter().map(|rule| json!(rule)).collect::<Vec<Value>>();
    if check.is_exact() {
        let says = "a step on the device gives the host's bits: what stays there may be stepped there";
        return Found::new(Verdict::Pass, figure, says, rows);
    }
    let differs = |rule: &&hydra_engine::RuleCheck| rule.ordinary_differing + rule.extreme_differing > 0;
    let wrong: Vec<&str> = check.rules.iter().filter(differs).map(|rule| rule.rule).collect();
    let says = format!(
        "a step on the device is not the host's to the bit ({}): the host steps, unless asked otherwise",
        wrong.join("; ")
    );
    Found::new(if must { Verdict::Fails } else { Verdict::NotApplicable }, figure, says, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_engine::RuleCheck;

    #[test]
    fn a_device_that_must_be_exact_and_is_not_fails() {
        let rule = |rule, extreme_differing| RuleCheck {
            rule,
            ordinary: 8,
            ordinary_differing: 0,
            extreme: 8,
            extreme_differing,
            example: None,
        };
        let check = OptimizerCheck { rules: vec![rule("AdamW", 1), rule("SGD", 0)] };
        let [must, may] = [true, false].map(|must| judge(&check, must));
        assert_eq!((must.verdict, may.verdict), (Verdict::Fails, Verdict::NotApplicable));
        assert!(must.says.contains("(AdamW)") && must.figure == "1 of 32 values differ", "{must:?}");
        assert_eq!(must.rows[0]["extreme_differing"], 1);
        let exact = judge(&OptimizerCheck { rules: vec![rule("SGD", 0)] }, true);
        assert_eq!((exact.verdict, exact.figure.as_str()), (Verdict::Pass, "0 of 16 values differ"));
    }
}
