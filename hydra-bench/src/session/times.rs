//! The time of a whole run, of which training is a part: reading, measuring, initial weights and writing.

use super::explain::duration;
use crate::run_dir::paths::seconds_of_byte;
use crate::settings::CheckpointArg;
use crate::terminal::Preparation;
use anyhow::Result;
use hydra_core::ByteSize;
use hydra_engine::{AdmittedRun, CheckpointEvery};
use serde::Serialize;
use std::path::Path;

/// The part of the time that automatic checkpoints take at most.
const CHECKPOINTS: f64 = 0.01;

/// The estimated seconds of a run by what it does.
#[derive(Debug, Serialize)]
pub(crate) struct Times {
    /// Reading models and data, as it took now.
    reading_s: f64,
    /// Measuring and planning, as it took now.
    measuring_s: f64,
    initial_weights_s: f64,
    /// Training and evaluating.
    running_s: f64,
    /// Bytes of the trained models.
    model_bytes: u64,
    /// Writing them; none where nothing can be written.
    writing_s: Option<f64>,
    /// What checkpoints take at most; none where their number is not known.
    checkpoints_s: Option<f64>,
}

impl Times {
    /// The times of a run that trains and evaluates for so long and writes so many bytes of models into a directory.
    pub(crate) fn new(
        run: &AdmittedRun,
        (preparation, running_s): (Preparation, f64),
        (dir, model_bytes): (&Path, u64),
        CheckpointArg(every): CheckpointArg,
    ) -> Result<Self> {
        let checkpoints_s = match every {
            None => Some(0.0),
            Some(CheckpointEvery::Auto) => Some(CHECKPOINTS * running_s),
            Some(_) => None,
        };
        Ok(Self {
            reading_s: preparation.reading_s,
            measuring_s: preparation.measuring_s,
            initial_weights_s: run.initial_weights_s()?,
            running_s,
            model_bytes,
            writing_s: seconds_of_byte(dir).map(|seconds| seconds * model_bytes as f64),
            checkpoints_s,
        })
    }

    fn whole_s(&self) -> f64 {
        let before = self.reading_s + self.measuring_s + self.initial_weights_s;
        before + self.running_s + self.writing_s.unwrap_or(0.0)
    }

    /// The times as a line, which is ended.
    pub(crate) fn render(&self) -> String {
        let bytes = ByteSize(self.model_bytes);
        let parts = [
            Some((self.reading_s, "to read models and data".to_owned())),
            Some((self.measuring_s, "to measure and plan".to_owned())),
            Some((self.initial_weights_s, "for initial weights".to_owned())),
            Some((self.running_s, "to train and evaluate".to_owned())),
            self.writing_s.map(|seconds| (seconds, format!("to write models of {bytes}"))),
        ];
        let parts = parts.into_iter().flatten();
        let parts: Vec<String> =
            parts.map(|(seconds, what)| format!("{} {what}", duration(seconds))).collect();
        let unknown =
            if self.writing_s.is_none() { format!(", and writing models of {bytes}") } else { String::new() };
        let checkpoints = match self.checkpoints_s {
            Some(0.0) => String::new(),
            Some(seconds) => format!("; checkpoints add up to {}", duration(seconds)),
            None => "; checkpoints are not in it".to_owned(),
        };
        format!(
            "the whole run: about {}: {}{unknown}{checkpoints}\n",
            duration(self.whole_s()),
            parts.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_is_more_than_training() {
        let times = Times {
            reading_s: 2.0,
            measuring_s: 3.0,
            initial_weights_s: 1.0,
            running_s: 120.0,
            model_bytes: 5 << 20,
            writing_s: Some(4.0),
            checkpoints_s: Some(1.2),
        };
        assert_eq!(
            times.render(),
            "the whole run: about 2 min 10 s: 2.0 s to read models and data, 3.0 s to measure and plan, 1.0 s for initial \
             weights, 2 min 00 s to train and evaluate, 4.0 s to write models of 5.00 MiB; checkpoints add up to 1.2 s\n"
        );
        let unknown = Times { writing_s: None, checkpoints_s: None, ..times }.render();
        assert!(unknown.contains("about 2 min 06 s: "), "{unknown}");
        assert!(
            unknown.ends_with(", and writing models of 5.00 MiB; checkpoints are not in it\n"),
            "{unknown}"
        );
    }
}
