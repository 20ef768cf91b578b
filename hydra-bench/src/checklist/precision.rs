//! Checks of float types: compares the losses of a GPT-2 in each type with those of the CPU in `f32`.

use super::found::{Finding, Verdict};
use super::subject::{Subject, supports};
use super::training;
use anyhow::{Result, ensure};
use burn::tensor::Device;
use hydra_core::{FloatType, OptimizerSpec, TrainSpec};
use hydra_engine::plain;
use hydra_models::ops::{Precision, set_precision};
use serde_json::{Value, json};

/// A float type, and the maximum relative difference of its losses from the CPU's.
struct FloatCheck {
    name: &'static str,
    float: FloatType,
    tf32: bool,
    /// Allows for the summation order in `f32`, and for some roundings in the others: TF32 has 11 bits, `bf16` 8.
    bound: f64,
}

const FLOATS: [FloatCheck; 3] = [
    FloatCheck { name: "f32", float: FloatType::F32, tf32: false, bound: 1e-5 },
    FloatCheck { name: "tf32", float: FloatType::F32, tf32: true, bound: 2e-3 },
    FloatCheck { name: "bf16", float: FloatType::Bf16, tf32: false, bound: 5e-3 },
];

/// Trains on the CPU, and on the device in every supported type.
pub(super) fn losses(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let expected = train(subject, FloatType::F32, &Device::flex())?;
    let mut rows = Vec::new();
    for check in &FLOATS {
        if (check.tf32 && !subject.is_cuda()) || !supports(&device.burn, check.float) {
            continue;
        }
        set_precision(if check.tf32 { Precision::Tf32 } else { Precision::F32 });
        let found = train(subject, check.float, &device.burn);
        set_precision(Precision::F32);
        let found = found?;
        let (worst, bound) = (farthest(&expected, &found), check.bound);
        rows.push(json!({
            "floats": check.name, "worst": worst, "bound": bound, "losses": found, "cpu": expected,
        }));
    }
    Ok(judge(rows))
}

/// Returns the largest relative difference of losses; NaN if one of them is NaN.
fn farthest(expected: &[f64], found: &[f64]) -> f64 {
    let apart = expected.iter().zip(found).map(|(expected, found)| (found / expected - 1.0).abs());
    apart.fold(0.0, |worst, x| if x.is_nan() || x > worst { x } else { worst })
}

fn judge(rows: Vec<Value>) -> Finding {
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap_or(f64::NAN);
    let name = |row: &Value| row["floats"].as_str().unwrap_or_default().to_owned();
    let figure: Vec<String> =
        rows.iter().map(|row| format!("{} {:.1e}", name(row), number(row, "worst"))).collect();
    // NaN exceeds every bound.
    let beyond = |row: &&Value| number(row, "worst").is_nan() || number(row, "worst") > number(row, "bound");
    let wrong: Vec<String> = rows.iter().filter(beyond).map(name).collect();
    let says = match wrong.as_slice() {
        [] => "the losses in each type are within its bound of the CPU's f32 losses".to_owned(),
        _ => format!(
            "the losses exceed the allowed difference from the CPU's f32 losses: {}",
            wrong.join(", ")
        ),
    };
    Finding::new(Verdict::of(wrong.is_empty()), figure.join(", "), says, rows)
}

fn train(subject: &Subject, float: FloatType, device: &Device) -> Result<Vec<f64>> {
    let model = training::gpt2(subject, float)?;
    // A learning rate at which a difference in the last bit is not amplified.
    let spec = TrainSpec { optimizer: OptimizerSpec::adamw(5e-4), ..model.spec(subject.pick(30, 8)) };
    let losses = plain::train_on(&model.chain, model.data.as_ref(), &spec, device)?.losses;
    ensure!(!losses.is_empty(), "nothing was trained");
    Ok(losses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_is_the_farthest() {
        assert_eq!(farthest(&[2.0, 4.0], &[2.0, 3.0]), 0.25);
        assert!(farthest(&[2.0, 4.0, 5.0], &[2.0, f64::NAN, 9.0]).is_nan());
    }

    #[test]
    fn losses_beyond_their_bound_fail() {
        let row = |floats: &str, worst: f64| json!({"floats": floats, "worst": worst, "bound": 1e-2});
        let good = judge(vec![row("f32", 1e-7), row("bf16", 9e-3)]);
        assert_eq!((good.verdict, good.figure.as_str()), (Verdict::Pass, "f32 1.0e-7, bf16 9.0e-3"));
        for bad in [2e-2, f64::NAN] {
            let bad = judge(vec![row("f32", 1e-7), row("bf16", bad)]);
            assert!(bad.verdict == Verdict::Fails && bad.says.ends_with("losses: bf16"), "{bad:?}");
        }
    }
}
