//! Parsers of flag values. Their errors name the value found and the value expected.

use hydra_sched::Replacement;
use std::ops::RangeInclusive;

/// The largest minibatch that is not taken for a typing error.
const MAX_BATCH: usize = 65_536;
/// The largest rank that is not taken for a typing error.
const MAX_RANK: usize = 65_536;
/// The longest context that is not taken for a typing error.
const MAX_CONTEXT: usize = 1 << 20;
/// The largest number of minibatches, epochs or layers that is not taken for a typing error.
pub(super) const MAX_COUNT: usize = u32::MAX as usize;

/// The largest number of devices in a workload file.
const MAX_SIMULATED_DEVICES: usize = 1_000_000;

/// Lists names for a sentence: `a, b or c`.
pub fn any_of<T: AsRef<str>>(names: &[T]) -> String {
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

fn integer(text: &str, what: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    if text.trim().is_empty() {
        return Err(format!("a value is empty: expected {what}"));
    }
    let value: Option<usize> = text.trim().parse().ok();
    value.filter(|n| range.contains(n)).ok_or_else(|| format!("`{text}` is not {what}"))
}

/// Defines parsers of numbers, each by its name, the value that it expects and its range.
macro_rules! readers {
    ($type:ty, $read:ident: $($name:ident, $what:expr, $range:expr;)*) => {
        $(/// Parses a value of this setting, which must be within its range.
        pub fn $name(text: &str) -> Result<$type, String> {
            $read(text, &format!($what), $range)
        })*
    };
}

readers! { f64, float:
    rate, "a learning rate, a finite number of zero or above such as 3e-4", |x| x >= 0.0;
    decay, "a weight decay, a finite number of zero or above such as 0.01", |x| x >= 0.0;
    clip, "a maximum gradient norm, a finite number above zero such as 1.0", |x| x > 0.0;
    dropout, "a probability from 0 up to, but not including, 1", |x| (0.0..1.0).contains(&x);
    beta, "a finite number above zero such as 0.1", |x| x > 0.0;
    gamma, "a finite number of zero or above such as 0.5", |x| x >= 0.0;
    lora_alpha, "a finite number above zero such as 16", |x| x > 0.0;
    temperature, "a temperature, a finite number of zero or above such as 0.7", |x| x >= 0.0;
    top_p, "a probability above 0 and at most 1 such as 0.9", |x| x > 0.0 && x <= 1.0;
    penalty, "a finite number above zero such as 1.1", |x| x > 0.0;
    share, "a fraction, a number from 0 to 1 such as 0.1", |x| (0.0..=1.0).contains(&x);
    watts, "a power in watts, a finite number of zero or above such as 300", |x| x >= 0.0;
}

readers! { usize, integer:
    batch, "a batch size, a whole number from 1 to {MAX_BATCH}", 1..=MAX_BATCH;
    samples, "a number of samples, a whole number from 1 to {MAX_BATCH}", 1..=MAX_BATCH;
    lora_rank, "a LoRA rank, a whole number from 1 to {MAX_RANK}", 1..=MAX_RANK;
    context, "a context length, a whole number from 2 (one token and its target) to {MAX_CONTEXT}", 2..=MAX_CONTEXT;
    count, "a whole number from 1 to {MAX_COUNT}", 1..=MAX_COUNT;
    simulated_devices, "a number of devices, a whole number from 1 to {MAX_SIMULATED_DEVICES}", 1..=MAX_SIMULATED_DEVICES;
    top_k, "a number of tokens, a whole number from 0 to {MAX_COUNT}", 0..=MAX_COUNT;
    warmup, "a whole number from 0 to {MAX_COUNT}", 0..=MAX_COUNT;
    cut, "a cut-point, the number (from 1 to {MAX_COUNT}) of a layer at which a shard begins", 1..=MAX_COUNT;
}

/// A seed, at most the largest integer of a TOML file.
pub fn seed(text: &str) -> Result<u64, String> {
    integer(text, "a seed, a whole number from 0 to 2^63 - 1", 0..=i64::MAX as usize).map(|n| n as u64)
}

/// `--replacement` of simulated devices.
pub fn replacement(text: &str) -> Result<Replacement, String> {
    let named = Replacement::ALL.into_iter().find(|rule| rule.name() == text);
    let all = Replacement::ALL.map(Replacement::name);
    named.ok_or_else(|| format!("unknown replacement rule `{text}`: expected {}", any_of(&all)))
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
