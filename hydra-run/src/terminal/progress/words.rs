//! The formats of figures that rows and lines share.

use super::run_state::{Evaluated, Preparation, RunState};
use crate::terminal::score::Measure;

impl Evaluated {
    /// `validation perplexity 5.60`, or the model's other measure.
    pub(super) fn named(&self, of: &str) -> String {
        format!("{of} {} {}", self.score.measure().name(), self.figure())
    }

    /// The short form `val ppl 5.60`.
    pub(super) fn brief(&self, of: &str) -> String {
        let name = match self.score.measure() {
            Measure::ACCURACY => "acc",
            measure => measure.brief(),
        };
        format!("{of} {name} {}", self.figure())
    }

    fn figure(&self) -> String {
        let value = self.score.value();
        let measure = self.score.measure();
        measure.shown(value, |value| short(value, if measure == Measure::Perplexity { 2 } else { 4 }))
    }
}

/// The times before the first device computed; once, when a device computes, and only if they add up to a second.
pub(super) fn prepared(run: &mut RunState) -> Option<String> {
    let (Preparation { reading_s, measuring_s }, weights_s) = run.prepared()?;
    let all_s = reading_s + measuring_s + weights_s;
    let [all, reading, measuring, weights] = [all_s, reading_s, measuring_s, weights_s].map(time);
    let line = format!(
        "prepared in {all}: {reading} to read models and data, {measuring} to measure and plan, {weights} for initial weights"
    );
    (all_s >= 1.0).then_some(line)
}

/// The line for the time before the first pilot pass.
pub(super) fn reading(run: &RunState) -> Option<String> {
    run.is_reading().then(|| format!("reading models and data, {} elapsed", time(run.now_s)))
}

/// The best validation so far, with its task.
pub(super) fn best(run: &RunState) -> Option<String> {
    let (task, result) = run.best()?;
    Some(format!("best so far: {}, {}", run.tasks[task].name, result.named("validation")))
}

/// The rate of all tasks, if they have the same unit.
pub(super) fn whole_rate(run: &RunState) -> Option<String> {
    Some(rate(run.pace.rate()?, run.unit()?))
}

/// `12.3k tokens/s`.
pub(super) fn rate(rate: f64, unit: &str) -> String {
    format!("{} {unit}/s", thousands(rate))
}

/// A number with `decimals` decimals, or with three digits if it is large, so that a diverged loss stays short.
pub(super) fn short(value: f64, decimals: usize) -> String {
    if value.abs() < 1e5 { format!("{value:.decimals$}") } else { format!("{value:.2e}") }
}

/// A time with at most seven characters: `45s`, `12m05s`, `3h05m`, `6d`; less than a second is rounded up.
pub fn time(seconds: f64) -> String {
    let (whole, minutes) = (seconds.ceil().max(1.0), (seconds / 60.0).round());
    match seconds {
        s if !s.is_finite() => "-".to_owned(),
        _ if whole < 60.0 => format!("{whole:.0}s"),
        _ if whole < 3600.0 => format!("{:.0}m{:02.0}s", (whole / 60.0).floor(), whole % 60.0),
        s if s < 360_000.0 => format!("{:.0}h{:02.0}m", (minutes / 60.0).floor(), minutes % 60.0),
        s => format!("{:.0}d", s / 86_400.0),
    }
}

/// A rate with at most four digits: `950`, `12.3k`, `4.56M`.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        v if !v.is_finite() => "-".to_owned(),
        v if v < 1e3 => format!("{v:.0}"),
        v if v < 1e6 => format!("{:.1}k", v / 1e3),
        v => format!("{:.2}M", v / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([4.470_21, 1.234e30].map(|value| short(value, 4)), ["4.4702", "1.23e30"]);
        assert_eq!([-99_999.0, f64::INFINITY].map(|value| short(value, 2)), ["-99999.00", "inf"]);
        let rates = [950.2, 12_345.0, 4_560_000.0, f64::NAN].map(thousands);
        assert_eq!(rates, ["950", "12.3k", "4.56M", "-"]);
    }

    #[test]
    fn times_are_short() {
        let times = [0.001, 45.2, 59.1, 725.0, 3599.0, 3599.5, 7500.0, 359_999.0, 6e5, f64::INFINITY];
        let shown = ["1s", "46s", "1m00s", "12m05s", "59m59s", "1h00m", "2h05m", "100h00m", "7d", "-"];
        assert_eq!(times.map(time), shown);
    }
}
