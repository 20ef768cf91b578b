//! The length of the warmup.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `--warmup`: a number of minibatches, or a fraction of the training's minibatches. A fraction is rounded up, as
/// `TrainingArguments` of Transformers 5 rounds the same `warmup_steps`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Warmup {
    Steps(usize),
    Share(f64),
}

impl Warmup {
    /// The minibatches of the warmup of a training of `trained` minibatches.
    pub(crate) fn steps(self, trained: usize) -> usize {
        match self {
            Self::Steps(steps) => steps,
            // The cast saturates.
            Self::Share(share) => (trained as f64 * share).ceil() as usize,
        }
    }
}

impl fmt::Display for Warmup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Share(share) => write!(f, "{share}"),
        }
    }
}

impl FromStr for Warmup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        if let Ok(steps) = super::values::warmup(trimmed) {
            return Ok(Self::Steps(steps));
        }
        match trimmed.parse::<f64>() {
            Ok(share) if (0.0..1.0).contains(&share) => Ok(Self::Share(share)),
            _ => Err(format!(
                "`{text}` is not a warmup: expected a number of minibatches from 0 to {}, or a fraction of them below 1 such as \
                 0.1",
                super::values::MAX_COUNT
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_minibatches_and_shares_are_rounded_up_as_in_transformers() {
        let steps = |text: &str, trained| text.parse::<Warmup>().unwrap().steps(trained);
        assert_eq!((steps("100", 7), steps("1", 7), steps("0", 7)), (100, 1, 0));
        // `TrainingArguments(warmup_steps=share).get_warmup_steps(trained)` of Transformers 5.24.
        for (share, trained, expected) in
            [("0.1", 1000, 100), ("0.1", 1001, 101), ("0.07", 100, 8), ("0.03", 33, 1), ("0.5", 1, 1)]
        {
            assert_eq!(steps(share, trained), expected, "{share} of {trained}");
        }
        assert_eq!(steps("0.5", usize::MAX), usize::MAX / 2 + 1);
        for text in ["", "x", "-1", "1.5", "1.0", "nan", "-0.1", "4294967296"] {
            let said = text.parse::<Warmup>().unwrap_err();
            assert!(
                said.starts_with(&format!("`{text}` is not a warmup")) && said.contains("4294967295"),
                "{said}"
            );
        }
    }
}
