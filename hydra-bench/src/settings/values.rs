//! Readers of flag values: each says what was found and what was expected.

use hydra_engine::CheckpointEvery;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The largest minibatch that is not taken for a slip of the hand.
const MAX_BATCH: usize = 65_536;
/// The longest context that is not taken for a slip of the hand.
const MAX_CONTEXT: usize = 1 << 20;
/// The most minibatches, epochs or layers that are not taken for a slip of the hand.
const MAX_COUNT: usize = u32::MAX as usize;

/// As many as a workload's file may ask for.
const MAX_SIMULATED_DEVICES: usize = 1_000_000;

/// `--checkpoint-every`: a time, so many minibatches, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct CheckpointArg(pub(crate) Option<CheckpointEvery>);

impl Default for CheckpointArg {
    fn default() -> Self {
        Self(Some(CheckpointEvery::default()))
    }
}

impl fmt::Display for CheckpointArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => write!(f, "never"),
            Some(CheckpointEvery::Minibatches(count)) => write!(f, "{count}"),
            Some(CheckpointEvery::Time(time)) => match time.as_secs() {
                hours if hours.is_multiple_of(3600) => write!(f, "{}h", hours / 3600),
                minutes if minutes.is_multiple_of(60) => write!(f, "{}m", minutes / 60),
                seconds => write!(f, "{seconds}s"),
            },
        }
    }
}

impl From<CheckpointArg> for String {
    fn from(arg: CheckpointArg) -> Self {
        arg.to_string()
    }
}

impl TryFrom<String> for CheckpointArg {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for CheckpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        if trimmed == "never" {
            return Ok(Self(None));
        }
        let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let seconds = match &trimmed[digits.len()..] {
            "" => None,
            "s" => Some(1),
            "m" => Some(60),
            "h" => Some(3600),
            _ => return Err(no_interval(text)),
        };
        let count = digits.parse::<u32>().ok().filter(|count| *count > 0).ok_or_else(|| no_interval(text))?;
        Ok(Self(Some(match seconds {
            Some(seconds) => CheckpointEvery::Time(Duration::from_secs(u64::from(count) * seconds)),
            None => CheckpointEvery::Minibatches(count as usize),
        })))
    }
}

fn no_interval(text: &str) -> String {
    format!(
        "`{text}` is no interval; expected a time such as 90s, 10m or 2h, minibatches such as 500, or `never`"
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_read_as_they_are_written() {
        let seconds = |seconds| CheckpointArg(Some(CheckpointEvery::Time(Duration::from_secs(seconds))));
        let minibatches = CheckpointArg(Some(CheckpointEvery::Minibatches(500)));
        let cases = [
            ("90s", seconds(90)),
            ("10m", seconds(600)),
            ("2h", seconds(7200)),
            ("500", minibatches),
            ("never", CheckpointArg(None)),
        ];
        for (text, arg) in cases {
            assert_eq!((text.parse(), arg.to_string().as_str()), (Ok(arg), text));
        }
        assert_eq!(" 120s ".parse::<CheckpointArg>().map(String::from), Ok("2m".to_owned()));
        for text in ["", "m", "0", "-5", "1.5h", "10 m", "5d", "5000000000"] {
            assert!(
                text.parse::<CheckpointArg>().unwrap_err().starts_with(&format!("`{text}` is no interval"))
            );
        }
    }

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
