//! Fingerprints of plans.

use hydra_core::{Batch, Chain, HostActivation};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// Everything that a plan depends on. Two runs with equal fingerprints can use the same plan, and two with
/// the [`same costs`](Self::same_costs) the same pilot pass.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// The SHA-256 of the chain's architecture and of `config`, in hexadecimal digits.
    pub architecture: String,
    /// Settings that affect costs but not names and shapes, such as dropout; for readers.
    pub config: String,
    /// The number of items in a microbatch.
    pub items: usize,
    /// The shapes of the first layer's input, which include the context length.
    pub inputs: Vec<Vec<usize>>,
    /// The shapes of the targets.
    pub targets: Vec<Vec<usize>>,
    /// The type of parameters and activations.
    pub dtype: String,
    /// The device's compute threads.
    pub threads: usize,
    /// The probe that measured memory.
    pub probe: String,
    /// The device's memory in bytes.
    pub budget: u64,
    /// The double buffer in bytes.
    pub reserve: u64,
    /// User-specified cut-points.
    pub cuts: Option<Vec<usize>>,
}

impl Fingerprint {
    /// Returns the fingerprint of a chain with a microbatch. `config` is a text for everything that affects
    /// costs but not the names and shapes of parameters, such as dropout or a number of heads.
    pub fn new(chain: &Chain, batch: &Batch, config: &str) -> Self {
        let shapes = |x: &HostActivation| x.parts.iter().map(|part| part.shape.clone()).collect();
        Self {
            architecture: sha256(&[&chain.architecture(), config]),
            config: config.to_owned(),
            items: batch.items,
            inputs: shapes(&batch.inputs),
            targets: shapes(&batch.targets),
            dtype: floats(chain),
            threads: 1,
            probe: String::new(),
            budget: 0,
            reserve: 0,
            cuts: None,
        }
    }

    /// Sets the number of the device's threads and the name of the probe that measures its memory.
    pub fn on(self, threads: usize, probe: &str) -> Self {
        Self { threads, probe: probe.to_owned(), ..self }
    }

    /// Sets the budget and the double buffer, in bytes.
    pub fn under(self, budget: u64, reserve: u64) -> Self {
        Self { budget, reserve, ..self }
    }

    /// Sets user-specified cut-points, if any.
    pub fn cut_at(self, cuts: Option<&[usize]>) -> Self {
        Self { cuts: cuts.map(<[usize]>::to_vec), ..self }
    }

    /// Returns whether layers cost the same under both: everything except budget, double buffer and cuts is
    /// equal.
    pub fn same_costs(&self, other: &Self) -> bool {
        *self == other.clone().under(self.budget, self.reserve).cut_at(self.cuts.as_deref())
    }

    /// Returns the fields in which `other` differs, with both values.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let fields: [(&str, String, String); 11] = [
            ("architecture", self.architecture.clone(), other.architecture.clone()),
            ("config", self.config.clone(), other.config.clone()),
            ("items", self.items.to_string(), other.items.to_string()),
            ("inputs", format!("{:?}", self.inputs), format!("{:?}", other.inputs)),
            ("targets", format!("{:?}", self.targets), format!("{:?}", other.targets)),
            ("dtype", self.dtype.clone(), other.dtype.clone()),
            ("threads", self.threads.to_string(), other.threads.to_string()),
            ("probe", self.probe.clone(), other.probe.clone()),
            ("budget", self.budget.to_string(), other.budget.to_string()),
            ("reserve", self.reserve.to_string(), other.reserve.to_string()),
            ("cuts", format!("{:?}", self.cuts), format!("{:?}", other.cuts)),
        ];
        let differ = fields.into_iter().filter(|(_, mine, theirs)| mine != theirs);
        differ.map(|(name, mine, theirs)| format!("{name}: {mine} here, {theirs} there")).collect()
    }
}

/// The float type of a chain, and that of its frozen buffers if it is another.
fn floats(chain: &Chain) -> String {
    let float = chain.float_type();
    match chain.buffers().iter().find(|buffer| buffer.float != float) {
        Some(narrow) => format!("{float}, frozen {}", narrow.float),
        None => float.to_string(),
    }
}

/// Returns the digest of the parts, each terminated by a byte that is not valid in UTF-8.
fn sha256(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update([0xFF]);
    }
    hash.finalize().iter().fold(String::new(), |mut hex, byte| {
        // Writing to a string does not fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy;
    use hydra_core::FloatType;

    #[test]
    fn what_decides_costs_is_told_from_what_decides_cuts() {
        let chain = toy::chain(3);
        let batch = toy::batch(2);
        let base = Fingerprint::new(&chain, &batch, "dropout 0").on(2, "counting").under(100, 10);
        assert_eq!(base.architecture.len(), 64);
        assert!(base.same_costs(&base.clone().under(200, 20).cut_at(Some(&[1]))));
        let others = [
            Fingerprint::new(&toy::chain(4), &batch, "dropout 0").on(2, "counting").under(100, 10),
            Fingerprint::new(&chain, &toy::batch(3), "dropout 0").on(2, "counting").under(100, 10),
            Fingerprint::new(&chain, &batch, "dropout 0.1").on(2, "counting").under(100, 10),
            Fingerprint::new(&toy::chain(3).with_float_type(FloatType::Bf16), &batch, "dropout 0")
                .on(2, "counting")
                .under(100, 10),
            base.clone().on(1, "counting"),
            base.clone().on(2, "none"),
        ];
        for other in others {
            assert!(!base.same_costs(&other), "{other:?}");
            assert!(!base.differences(&other).is_empty());
        }
        let other_targets = Batch { targets: toy::batch(3).targets, ..batch };
        assert_ne!(base.targets, Fingerprint::new(&chain, &other_targets, "").targets);
        assert_ne!(sha256(&["ab", "c"]), sha256(&["a", "bc"]));
        let differences = base.differences(&base.clone().under(100, 11));
        assert_eq!(differences, ["reserve: 10 here, 11 there"]);
    }
}
