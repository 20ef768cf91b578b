//! What is adapted, and how strongly.

use crate::ModelError;

/// Adapters of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The inner width of the product.
    pub rank: usize,
    /// The product counts `alpha / rank` times.
    pub alpha: f64,
    /// The probability with which an element of an adapter's input is dropped while training.
    pub dropout: f64,
    /// The maps that are adapted, by the last parts of their names: `q_proj` is the one of every block.
    pub targets: Vec<String>,
}

/// No adapter is as wide as this.
const WIDEST: usize = 1 << 16;

impl Lora {
    /// PEFT's default for [`alpha`](Self::alpha).
    pub const ALPHA: f64 = 8.0;

    /// The factor on the product.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// The same with other names of the targets.
    pub(crate) fn with_targets(mut self, name: for<'a> fn(&'a str) -> &'a str) -> Self {
        self.targets.iter_mut().for_each(|target| *target = name(target).to_owned());
        self.targets.dedup();
        self
    }

    /// Returns whether the map of this name is adapted.
    pub(super) fn targets(&self, map: &str) -> bool {
        let is = |target: &String| {
            map.strip_suffix(target.as_str()).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        self.targets.iter().any(is)
    }

    /// What costs and results depend on beside names and shapes.
    pub(crate) fn note(&self) -> String {
        format!("lora {} alpha {} dropout {}", self.rank, self.alpha, self.dropout)
    }

    /// Checks the numbers, and that each target names one of these maps.
    ///
    /// # Errors
    /// The first value that cannot be.
    pub fn validate(&self, maps: &[&str]) -> Result<(), ModelError> {
        let refuse =
            |name, found: String, expected: String| Err(ModelError::Config { name, found, expected });
        if !(1..=WIDEST).contains(&self.rank) {
            return refuse("lora rank", self.rank.to_string(), format!("1 to {WIDEST}"));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return refuse("lora alpha", self.alpha.to_string(), "a number above 0".to_owned());
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refuse("lora dropout", self.dropout.to_string(), "at least 0 and below 1".to_owned());
        }
        let one = |target: &String| Self { targets: vec![target.clone()], ..self.clone() };
        let known = |target: &&String| maps.iter().any(|map| one(target).targets(map));
        match self.targets.iter().find(|target| !known(target)) {
            _ if self.targets.is_empty() => {
                refuse("lora targets", "missing".to_owned(), format!("some of {}", last_parts(maps)))
            }
            Some(target) => {
                refuse("lora targets", format!("`{target}`"), format!("some of {}", last_parts(maps)))
            }
            None => Ok(()),
        }
    }
}

/// The names by which maps are asked for.
fn last_parts(maps: &[&str]) -> String {
    let mut names: Vec<String> = Vec::new();
    for map in maps {
        let last = map.rsplit('.').next().unwrap_or(map).to_owned();
        // One that two maps have names both; the longer name tells them apart.
        if !names.contains(&last) {
            names.push(last);
        }
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(targets: &[&str]) -> Lora {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        Lora { rank: 4, alpha: 8.0, dropout: 0.0, targets }
    }

    const MAPS: [&str; 3] = ["attn.c_attn", "attn.c_proj", "mlp.c_proj"];

    #[test]
    fn a_target_is_the_end_of_a_name() {
        let targets = |targets: &[&str]| MAPS.map(|map| lora(targets).targets(map));
        assert_eq!(targets(&["c_attn"]), [true, false, false]);
        assert_eq!(targets(&["c_proj"]), [false, true, true]);
        assert_eq!(targets(&["mlp.c_proj"]), [false, false, true]);
        assert_eq!(targets(&["proj", "attn"]), [false; 3], "whole parts");
        assert_eq!(lora(&["c_attn"]).scale(), 2.0);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let refused = |lora: Lora| lora.validate(&MAPS).unwrap_err().to_string();
        assert!(lora(&["c_attn", "mlp.c_proj"]).validate(&MAPS).is_ok());
        assert!(refused(lora(&["q_proj"])).contains("`q_proj`, expected some of c_attn, c_proj"));
        assert!(refused(lora(&[])).contains("missing"));
        assert!(refused(Lora { rank: 0, ..lora(&["c_attn"]) }).starts_with("`lora rank` is 0"));
        assert!(refused(Lora { alpha: f64::NAN, ..lora(&["c_attn"]) }).starts_with("`lora alpha` is NaN"));
        assert!(refused(Lora { dropout: 1.0, ..lora(&["c_attn"]) }).starts_with("`lora dropout` is 1"));
    }
}
