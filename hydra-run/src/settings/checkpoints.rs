//! The checkpoint interval.

use crate::machine::text_in_files;
use clap::Args;
use hydra_engine::CheckpointEvery;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How often a run writes checkpoints.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Checkpoints")]
pub struct CheckpointSettings {
    /// How often each task saves its weights and optimizer state for `hydra resume`: auto (often at first, later each time the
    /// run is a twentieth longer, in less than 1% of the time), a time (90s, 10m, 2h), a number of the task's minibatches (500),
    /// or never [default: auto]
    #[arg(long, value_name = "auto|TIME|N|never", allow_hyphen_values = true)]
    pub(crate) checkpoint_every: Option<CheckpointArg>,
}

/// `--checkpoint-every`: an interval chosen by measured costs, a time, a number of minibatches, or none.
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
            Some(CheckpointEvery::Auto) => write!(f, "auto"),
            Some(CheckpointEvery::Minibatches(count)) => write!(f, "{count}"),
            Some(CheckpointEvery::Time(time)) => match time.as_secs() {
                hours if hours.is_multiple_of(3600) => write!(f, "{}h", hours / 3600),
                minutes if minutes.is_multiple_of(60) => write!(f, "{}m", minutes / 60),
                seconds => write!(f, "{seconds}s"),
            },
        }
    }
}

text_in_files!(CheckpointArg);

impl FromStr for CheckpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        match trimmed {
            "never" => return Ok(Self(None)),
            "auto" => return Ok(Self(Some(CheckpointEvery::Auto))),
            _ => {}
        }
        let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let time =
            |count: u32, seconds| CheckpointEvery::Time(Duration::from_secs(u64::from(count) * seconds));
        let count = digits.parse::<u32>().ok().filter(|count| *count > 0);
        let every = count.and_then(|count| match &trimmed[digits.len()..] {
            "" => Some(CheckpointEvery::Minibatches(count as usize)),
            "s" => Some(time(count, 1)),
            "m" => Some(time(count, 60)),
            "h" => Some(time(count, 3600)),
            _ => None,
        });
        let expected = "`auto`, a time such as 90s, 10m or 2h, minibatches such as 500, or `never`";
        every
            .map(|every| Self(Some(every)))
            .ok_or_else(|| format!("`{text}` is not a checkpoint interval: expected {expected}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_read_as_they_are_written() {
        let seconds = |seconds| CheckpointArg(Some(CheckpointEvery::Time(Duration::from_secs(seconds))));
        let minibatches = CheckpointArg(Some(CheckpointEvery::Minibatches(500)));
        let times = [("90s", seconds(90)), ("10m", seconds(600)), ("2h", seconds(7200))];
        let words = [("never", CheckpointArg(None)), ("auto", CheckpointArg::default())];
        for (text, arg) in times.into_iter().chain(words).chain([("500", minibatches)]) {
            assert_eq!((text.parse(), arg.to_string().as_str()), (Ok(arg), text));
        }
        assert_eq!(" 120s ".parse::<CheckpointArg>().map(String::from), Ok("2m".to_owned()));
        for text in ["", "m", "0", "-5", "1.5h", "10 m", "5d", "5000000000"] {
            let said = text.parse::<CheckpointArg>().unwrap_err();
            assert!(said.starts_with(&format!("`{text}` is not a checkpoint interval")), "{said}");
        }
    }
}
