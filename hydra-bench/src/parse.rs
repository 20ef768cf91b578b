//! Readers of flag values: each says what was found and what was expected.

use hydra_spill::alloc::MAX_DEVICES;
use std::fmt;
use std::str::FromStr;

/// The largest minibatch that is not taken for a slip of the hand.
const MAX_BATCH: usize = 65_536;
/// The longest context that is not taken for a slip of the hand.
const MAX_CONTEXT: usize = 1 << 20;
const MAX_THREADS: usize = 256;
/// The most minibatches, epochs or layers that are not taken for a slip of the hand.
const MAX_COUNT: usize = u32::MAX as usize;

/// As many as a workload's file may ask for.
const MAX_SIMULATED_DEVICES: usize = 1_000_000;

/// Logical devices as `--devices` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DevicesArg {
    /// How many there are.
    pub(crate) count: usize,
    /// The compute threads of each; `None` shares the cores evenly.
    pub(crate) threads: Option<usize>,
}

impl DevicesArg {
    /// The compute threads of each device on a machine of so many cores.
    pub(crate) fn threads_on(&self, cores: usize) -> usize {
        self.threads.unwrap_or((cores / self.count).max(1))
    }
}

impl fmt::Display for DevicesArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.threads {
            Some(threads) => write!(f, "cpu:{}x{threads}", self.count),
            None => write!(f, "cpu:{}", self.count),
        }
    }
}

impl FromStr for DevicesArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!(
                "`{text}` {why}: expected cpu:N (N logical devices that share the cores evenly) or cpu:NxT \
                 (T threads each), with N up to {MAX_DEVICES} and T up to {MAX_THREADS}, such as cpu:2 or cpu:2x1"
            )
        };
        let Some(rest) = text.strip_prefix("cpu:").or((text == "cpu").then_some("1")) else {
            let cuda = ["cuda", "gpu"].iter().any(|name| text.starts_with(name));
            let why =
                if cuda { "cannot be had, because CUDA is not in this build" } else { "is not a device" };
            return Err(wrong(why));
        };
        let (count, threads) = match rest.split_once('x') {
            Some((count, threads)) => (count, Some(threads)),
            None => (rest, None),
        };
        let number = |text: &str, most: usize| text.parse().ok().filter(|n| (1..=most).contains(n));
        let count = number(count, MAX_DEVICES).ok_or_else(|| wrong("has no usable number of devices"))?;
        let threads = threads
            .map(|text| number(text, MAX_THREADS).ok_or_else(|| wrong("has no usable number of threads")))
            .transpose()?;
        Ok(Self { count, threads })
    }
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
    fn devices_read_and_print() {
        for (text, count, threads) in [("cpu:1", 1, None), ("cpu:2", 2, None), ("cpu:2x1", 2, Some(1))] {
            let devices: DevicesArg = text.parse().unwrap();
            assert_eq!(devices, DevicesArg { count, threads });
            assert_eq!(devices.to_string(), text);
        }
        assert_eq!("cpu".parse(), Ok(DevicesArg { count: 1, threads: None }));
    }

    #[test]
    fn devices_share_the_cores_evenly() {
        let threads = |text: &str, cores| text.parse::<DevicesArg>().unwrap().threads_on(cores);
        assert_eq!(threads("cpu:1", 8), 8);
        assert_eq!(threads("cpu:2", 8), 4);
        assert_eq!(threads("cpu:3", 8), 2);
        assert_eq!(threads("cpu:4", 2), 1);
        assert_eq!(threads("cpu:2x3", 2), 3);
    }

    #[test]
    fn what_is_no_device_is_told_what_there_is() {
        for text in
            ["", "cpu:", "cpu:0", "cpu:x1", "cpu:2x", "cpu:2x0", "cpu:-1", "cpu:999", "tpu:1", "CPU:1"]
        {
            let error = text.parse::<DevicesArg>().unwrap_err();
            assert!(error.contains(&format!("`{text}`")) && error.contains("cpu:NxT"), "{error}");
        }
        assert!("cuda:0".parse::<DevicesArg>().unwrap_err().contains("CUDA is not in this build"));
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
