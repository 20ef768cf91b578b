//! Results of checklist items, and helpers to measure.

use anyhow::{Context, Result, bail};
use hydra_core::panic_message;
use serde::Serialize;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Pass,
    Fails,
    #[serde(rename = "not applicable")]
    NotApplicable,
}

impl Verdict {
    pub(crate) fn of(passes: bool) -> Self {
        if passes { Self::Pass } else { Self::Fails }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) verdict: Verdict,
    /// The explanation.
    pub(crate) says: String,
    pub(crate) figure: String,
    pub(crate) rows: Vec<Value>,
}

impl Finding {
    pub(crate) fn new(
        verdict: Verdict,
        figure: impl Into<String>,
        says: impl Into<String>,
        rows: Vec<Value>,
    ) -> Self {
        Self { verdict, says: says.into(), figure: figure.into(), rows }
    }

    pub(crate) fn not_applicable(says: impl Into<String>) -> Self {
        Self::new(Verdict::NotApplicable, "-", says, Vec::new())
    }

    /// Fails with the problems, or passes with the explanation `good` if there are none.
    pub(crate) fn of(problems: &[String], figure: String, good: impl Into<String>, rows: Vec<Value>) -> Self {
        let says = if problems.is_empty() { good.into() } else { problems.join("; ") };
        Self::new(Verdict::of(problems.is_empty()), figure, says, rows)
    }
}

/// Runs `f` and turns a panic into an error, such as that of a layer without kernels for the device.
pub(crate) fn guarded<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| bail!("panicked: {}", panic_message(&*panic)))
}

/// Runs `f` and returns its result and seconds. `f` must wait for the device.
pub(crate) fn timed<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let since = Instant::now();
    let result = f()?;
    Ok((result, since.elapsed().as_secs_f64()))
}

/// Returns the seconds of the fastest repetition, after a warmup.
pub(crate) fn best_of(repetitions: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f().context("the warmup repetition failed")?;
    (0..repetitions).try_fold(f64::INFINITY, |best, _| Ok(best.min(timed(&mut f)?.1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_panics_is_an_error_that_says_so() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let error = guarded(|| -> Result<()> { panic!("no kernel for {}", "it") }).unwrap_err();
        std::panic::set_hook(quiet);
        assert_eq!(error.to_string(), "panicked: no kernel for it");
        assert_eq!(guarded(|| Ok(3)).unwrap(), 3);
    }
}
