//! Readers of flag values: each says what was found and what was expected.

use hydra_sched::PolicyKind;

/// The largest minibatch that is not taken for a slip of the hand.
const MAX_BATCH: usize = 65_536;
/// The longest context that is not taken for a slip of the hand.
const MAX_CONTEXT: usize = 1 << 20;
/// The most minibatches, epochs or layers that are not taken for a slip of the hand.
const MAX_COUNT: usize = u32::MAX as usize;

/// As many as a workload's file may ask for.
const MAX_SIMULATED_DEVICES: usize = 1_000_000;

/// Names as a sentence lists them: `a, b or c`.
pub(crate) fn any_of<T: AsRef<str>>(names: &[T]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    names.split_last().map_or_else(String::new, |(last, first)| format!("{} or {last}", first.join(", ")))
}

fn float(text: &str, what: &str, in_range: impl Fn(f64) -> bool) -> Result<f64, String> {
    if text.trim().is_empty() {
        return Err(format!("a value is empty: expected {what}"));
    }
    let value: f64 = text.trim().parse().map_err(|_| format!("`{text}` is not a number: expected {what}"))?;
    match value.is_finite() && in_range(value) {
        true => Ok(value),
        false => Err(format!("`{text}` is out of range: expected {what}")),
    }
}

fn integer(text: &str, what: &str, least: usize, most: usize) -> Result<usize, String> {
    if text.trim().is_empty() {
        return Err(format!("a value is empty: expected {what}"));
    }
    let value: Option<usize> = text.trim().parse().ok();
    value.filter(|n| (least..=most).contains(n)).ok_or_else(|| format!("`{text}` is not {what}"))
}

/// A learning rate.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    float(text, "a learning rate, a finite number of zero or above such as 3e-4", |x| x >= 0.0)
}

/// A weight decay.
pub(crate) fn decay(text: &str) -> Result<f64, String> {
    float(text, "a weight decay, a finite number of zero or above such as 0.01", |x| x >= 0.0)
}

/// A largest gradient norm.
pub(crate) fn clip(text: &str) -> Result<f64, String> {
    float(text, "a largest gradient norm, a finite number above zero such as 1.0", |x| x > 0.0)
}

/// A dropout probability.
pub(crate) fn dropout(text: &str) -> Result<f64, String> {
    float(text, "a probability from 0 up to, but not including, 1", |x| (0.0..1.0).contains(&x))
}

/// A minibatch size.
pub(crate) fn batch(text: &str) -> Result<usize, String> {
    integer(text, &format!("a batch size, a whole number from 1 to {MAX_BATCH}"), 1, MAX_BATCH)
}

/// A context length.
pub(crate) fn context(text: &str) -> Result<usize, String> {
    let what = format!("a context length, a whole number from 2 (one token and its target) to {MAX_CONTEXT}");
    integer(text, &what, 2, MAX_CONTEXT)
}

/// A count that cannot be zero.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    integer(text, &format!("a whole number from 1 to {MAX_COUNT}"), 1, MAX_COUNT)
}

/// A number of simulated devices.
pub(crate) fn simulated_devices(text: &str) -> Result<usize, String> {
    let most = MAX_SIMULATED_DEVICES;
    integer(text, &format!("a number of devices, a whole number from 1 to {most}"), 1, most)
}

/// Electric power.
pub(crate) fn watts(text: &str) -> Result<f64, String> {
    float(text, "watts, a finite number of zero or above such as 300", |x| x >= 0.0)
}

/// A number of warmup steps.
pub(crate) fn warmup(text: &str) -> Result<usize, String> {
    integer(text, &format!("a whole number from 0 to {MAX_COUNT}"), 0, MAX_COUNT)
}

/// A cut-point.
pub(crate) fn cut(text: &str) -> Result<usize, String> {
    let what =
        format!("a cut-point, the number (from 1 to {MAX_COUNT}) of the layer at which a shard begins");
    integer(text, &what, 1, MAX_COUNT)
}

/// A seed; at most what a TOML file can hold.
pub(crate) fn seed(text: &str) -> Result<u64, String> {
    integer(text, "a seed, a whole number from 0 to 2^63 - 1", 0, i64::MAX as usize).map(|n| n as u64)
}

/// `--policy` of a run, which keeps no copies on its devices. The default's former name is one of it in files.
pub(crate) fn policy_of_run(text: &str) -> Result<PolicyKind, String> {
    let expected = || PolicyKind::RUNS.map(PolicyKind::name).join(", ");
    match text.parse::<PolicyKind>() {
        Ok(kind) if PolicyKind::RUNS.contains(&kind) => Ok(kind),
        Ok(kind) => Err(format!(
            "`{kind}` decides by copies that stay on devices, and a run keeps no copies; choose one of: {}",
            expected()
        )),
        Err(_) if text == "sharded-lrtf-patient" => Ok(PolicyKind::default()),
        Err(_) => Err(format!("no scheduling policy is called `{text}`; choose one of: {}", expected())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_and_out_of_range() {
        assert_eq!(rate("3e-4"), Ok(3e-4));
        assert_eq!(rate("0"), Ok(0.0));
        assert!(["", "x", "nan", "inf", "-1e-3", "1e999"].iter().all(|text| rate(text).is_err()));
        assert_eq!(batch("16"), Ok(16));
        assert!(["", "0", "-8", "1.5", "65537"].iter().all(|text| batch(text).is_err()));
        assert!(["0", "1", "1048577"].iter().all(|text| context(text).is_err()));
        assert_eq!(context("2"), Ok(2));
        assert_eq!(dropout("0"), Ok(0.0));
        for read in [count, warmup, cut] {
            assert_eq!(read("4294967295"), Ok(MAX_COUNT));
            for text in ["4294967296", "18446744073709551615", "99999999999999999999"] {
                let error = read(text).unwrap_err();
                assert!(error.contains(text) && error.contains("to 4294967295"), "{error}");
            }
        }
        assert!(["1", "-0.1", "nan"].iter().all(|text| dropout(text).is_err()));
        assert_eq!(seed("9223372036854775807"), Ok(i64::MAX as u64));
        assert!(seed("9223372036854775808").is_err());
    }
}
