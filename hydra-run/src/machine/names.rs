//! Parses the logical devices of `--devices`.

use hydra_spill::alloc::MAX_DEVICES;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Makes serde serialize a type as its text.
macro_rules! text_in_files {
    ($type:ty) => {
        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }
    };
}
pub(crate) use text_in_files;

const MAX_THREADS: usize = 256;
/// The largest accepted GPU number.
const MAX_CARD: usize = 63;

/// The logical devices of `--devices`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DevicesArg {
    /// CPU devices.
    Cpu {
        /// The number of devices.
        count: usize,
        /// Compute threads of each; `None` divides the cores evenly.
        threads: Option<usize>,
    },
    /// NVIDIA GPUs.
    Cuda(Gpus),
    /// Devices with a Vulkan driver.
    Wgpu(Gpus),
}

/// Logical devices on GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Distinct GPU numbers in the given order.
    pub(crate) cards: Vec<usize>,
    /// Logical devices on each GPU, at least one.
    pub(crate) logical: usize,
}

impl Gpus {
    pub(crate) fn count(&self) -> usize {
        self.cards.len() * self.logical
    }
}

impl DevicesArg {
    /// The default: one device with all cores.
    pub const ONE_CPU: Self = Self::Cpu { count: 1, threads: None };
}

/// Returns the compute threads of each of `count` CPU devices on a machine with `cores` cores.
pub(crate) fn threads_of_each(count: usize, threads: Option<usize>, cores: usize) -> usize {
    threads.unwrap_or((cores / count).max(1))
}

impl fmt::Display for DevicesArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { count, threads: Some(threads) } => write!(f, "cpu:{count}x{threads}"),
            Self::Cpu { count, threads: None } => write!(f, "cpu:{count}"),
            Self::Cuda(gpus) => write!(f, "cuda:{gpus}"),
            Self::Wgpu(gpus) => write!(f, "wgpu:{gpus}"),
        }
    }
}

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cards: Vec<String> = self.cards.iter().map(ToString::to_string).collect();
        f.write_str(&cards.join(","))?;
        if self.logical == 1 { Ok(()) } else { write!(f, "/{}", self.logical) }
    }
}

text_in_files!(DevicesArg);

impl FromStr for DevicesArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        let read = match kind {
            "cpu" => cpus(rest.unwrap_or("1")),
            "cuda" => gpus(rest.unwrap_or("0")).map(Self::Cuda),
            "wgpu" => gpus(rest.unwrap_or("0")).map(Self::Wgpu),
            _ => Err("is not a device".to_owned()),
        };
        read.map_err(|why| {
            format!(
                "`{text}` {why}: expected cpu:N (N logical devices that share the cores evenly), cpu:NxT (T threads \
                each), cuda:GPU,.. (NVIDIA GPUs by number), cuda:GPU,../L (L logical devices on each), or \
                wgpu: likewise, with up to {MAX_DEVICES} devices, T up to {MAX_THREADS} and GPU numbers up to \
                 {MAX_CARD}, such as cpu:2, cpu:2x1, cuda:0, cuda:0,1 or cuda:0/2"
            )
        })
    }
}

/// Parses the text after `cpu:`.
fn cpus(text: &str) -> Result<DevicesArg, String> {
    let (count, threads) = text.split_once('x').map_or((text, None), |(count, each)| (count, Some(each)));
    let count = within(count, 1, MAX_DEVICES).ok_or("has an invalid number of devices")?;
    let threads = threads.map(|text| within(text, 1, MAX_THREADS).ok_or("has an invalid number of threads"));
    Ok(DevicesArg::Cpu { count, threads: threads.transpose()? })
}

/// Parses the text after `cuda:` and `wgpu:`.
fn gpus(text: &str) -> Result<Gpus, String> {
    let (list, logical) = text.split_once('/').map_or((text, "1"), |(list, logical)| (list, logical));
    let logical = within(logical, 1, MAX_DEVICES).ok_or("has an invalid number of logical devices")?;
    let mut cards = Vec::new();
    for card in list.split(',') {
        let card = within(card, 0, MAX_CARD).ok_or("has an invalid GPU number")?;
        if cards.contains(&card) {
            return Err(format!("names GPU {card} twice (for two logical devices on it use cuda:{card}/2)"));
        }
        cards.push(card);
    }
    let gpus = Gpus { cards, logical };
    if gpus.count() > MAX_DEVICES { Err(format!("is {} devices", gpus.count())) } else { Ok(gpus) }
}

/// Parses a number of plain digits in a range.
fn within(text: &str, least: usize, most: usize) -> Option<usize> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|n| plain && (least..=most).contains(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(text: &str) -> DevicesArg {
        text.parse().unwrap()
    }

    #[test]
    fn devices_read_and_print() {
        for (text, count, threads) in [("cpu:1", 1, None), ("cpu:2", 2, None), ("cpu:2x1", 2, Some(1))] {
            assert_eq!(devices(text), DevicesArg::Cpu { count, threads });
            assert_eq!(devices(text).to_string(), text);
        }
        assert_eq!(devices("cpu"), DevicesArg::ONE_CPU);
        let cases: [(&str, &[usize], usize); 5] = [
            ("0", &[0], 1),
            ("0,1", &[0, 1], 1),
            ("3,1", &[3, 1], 1),
            ("0/2", &[0], 2),
            ("0,1/3", &[0, 1], 3),
        ];
        for (rest, cards, logical) in cases {
            let gpus = Gpus { cards: cards.to_vec(), logical };
            assert_eq!(devices(&format!("cuda:{rest}")), DevicesArg::Cuda(gpus.clone()));
            assert_eq!(devices(&format!("wgpu:{rest}")), DevicesArg::Wgpu(gpus.clone()));
            assert_eq!(DevicesArg::Cuda(gpus.clone()).to_string(), format!("cuda:{rest}"));
            assert_eq!(DevicesArg::Wgpu(gpus).to_string(), format!("wgpu:{rest}"));
        }
        assert_eq!(devices("cuda"), devices("cuda:0"));
        assert_eq!(devices("wgpu:0/1").to_string(), "wgpu:0");
    }

    #[test]
    fn logical_devices_lie_on_cards_in_order() {
        let DevicesArg::Cuda(gpus) = devices("cuda:2,0/2") else { panic!("not CUDA") };
        assert_eq!(gpus.count(), 4);
        assert_eq!((gpus.cards, gpus.logical), (vec![2, 0], 2));
    }

    #[test]
    fn devices_share_the_cores_evenly() {
        assert_eq!([1, 2, 3].map(|count| threads_of_each(count, None, 8)), [8, 4, 2]);
        assert_eq!((threads_of_each(4, None, 2), threads_of_each(2, Some(3), 2)), (1, 3));
    }

    #[test]
    fn what_is_no_device_is_told_what_there_is() {
        let wrong = "|:|cpu:|cpu:0|cpu:x1|cpu:2x|cpu:2x0|cpu:-1|cpu:+1|cpu:999|tpu:1|CPU:1|gpu:0|cuda:|cuda:a|cuda:-1|cuda:0,|cuda:,0|cuda:64|cuda:0/|\
                     cuda:0/0|cuda:0/2/2|cuda:/2|cuda:0x2|cuda:0 |cuda:0/64|cuda:0,1/32|wgpu:|wgpu:0/x|cuda0|cuda:99999999999999999999";
        for text in wrong.split('|') {
            let error = text.parse::<DevicesArg>().unwrap_err();
            for part in [&format!("`{text}`"), "cpu:NxT", "cuda:GPU,../L", "wgpu:"] {
                assert!(error.contains(part), "{error}");
            }
        }
        assert!("cuda:1,1".parse::<DevicesArg>().unwrap_err().contains("names GPU 1 twice"));
        assert!("cuda:0,1/32".parse::<DevicesArg>().unwrap_err().contains("is 64 devices"));
    }
}
