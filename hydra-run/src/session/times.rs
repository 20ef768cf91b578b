//! The time of a whole run: reading, measuring, initial weights, training and writing.

use super::explain::duration;
use crate::run_dir::paths::seconds_of_byte;
use crate::settings::CheckpointArg;
use crate::terminal::Preparation;
use anyhow::Result;
use hydra_core::ByteSize;
use hydra_engine::{AdmittedRun, CheckpointEvery};
use serde::Serialize;
use std::path::Path;

/// The maximum share of the time for automatic checkpoints.
const CHECKPOINTS: f64 = 0.01;

/// The estimated seconds of a run by phase.
#[derive(Debug, Serialize)]
pub(crate) struct Times {
    /// Reading models and data, as measured now.
    reading_s: f64,
    /// Measuring and planning, as measured now.
    measuring_s: f64,
    initial_weights_s: f64,
    /// Training and evaluating.
    running_s: f64,
    /// Bytes of the models to write.
    model_bytes: u64,
    /// Writing the models; `None` if the directory is not writable.
    writing_s: Option<f64>,
    /// The maximum for checkpoints; `None` if their number is unknown.
    checkpoints_s: Option<f64>,
}

impl Times {
    /// Returns the times of a run that trains and evaluates for `running_s` seconds and writes `model_bytes` to `dir`.
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

    /// Returns the times as a line with a newline.
    pub(crate) fn render(&self) -> String {
        let bytes = ByteSize(self.model_bytes);
        let parts = [
            Some((self.reading_s, "reading models and data".to_owned())),
            Some((self.measuring_s, "measuring and planning".to_owned())),
            Some((self.initial_weights_s, "initial weights".to_owned())),
            Some((self.running_s, "training and evaluation".to_owned())),
            self.writing_s.map(|seconds| (seconds, format!("writing models of {bytes}"))),
        ];
        let parts = parts.into_iter().flatten();
        let parts: Vec<String> =
            parts.map(|(seconds, what)| format!("{} {what}", duration(seconds))).collect();
        let unknown = if self.writing_s.is_none() {
            format!(", and unknown time for writing models of {bytes}")
        } else {
            String::new()
        };
        let checkpoints = match self.checkpoints_s {
            Some(0.0) => String::new(),
            Some(seconds) => format!("; checkpoints add at most {}", duration(seconds)),
            None => "; checkpoints not included".to_owned(),
        };
        format!("whole run: about {}: {}{unknown}{checkpoints}\n", duration(self.whole_s()), parts.join(", "))
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
            "whole run: about 2 min 10 s: 2.0 s reading models and data, 3.0 s measuring and planning, 1.0 s initial \
             weights, 2 min 00 s training and evaluation, 4.0 s writing models of 5.00 MiB; checkpoints add at most 1.2 s\n"
        );
        let unknown = Times { writing_s: None, checkpoints_s: None, ..times }.render();
        assert!(unknown.contains("about 2 min 06 s: "), "{unknown}");
        assert!(
            unknown
                .ends_with(", and unknown time for writing models of 5.00 MiB; checkpoints not included\n"),
            "{unknown}"
        );
    }
}
