//! The figure by which evaluations are shown and ranked: the metric that the task is selected by, accuracy for classifiers,
//! perplexity for language models, else the loss.

use hydra_core::Metric;
use hydra_engine::Evaluation;
use serde::Deserialize;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// The name of the metric by which classifiers are ranked unless they are selected by another one.
const ACCURACY: &str = "accuracy";

/// A figure that models are ranked by, in the order of leaderboards with several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measure {
    /// A metric of the task.
    Metric {
        /// Its name.
        name: &'static str,
        /// Whether larger values are better.
        higher_is_better: bool,
    },
    /// The perplexity of a language model, smaller being better.
    Perplexity,
    /// The loss, smaller being better.
    Loss,
}

/// The figures of an evaluation; a figure that is not a number is infinite.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(from = "Figures")]
pub struct Score {
    /// The mean loss.
    pub loss: f64,
    /// The perplexity of a language model.
    pub perplexity: Option<f64>,
    /// The metric that ranks it, such as the accuracy of a classifier, from 0 to 1.
    pub metric: Option<(Measure, f64)>,
    /// The figure by which the best weights are kept, smaller being better: the loss, or the metric that the task is
    /// selected by.
    pub cost: f64,
}

/// The figures in a report; infinities and NaN are `null` in JSON.
#[derive(Deserialize)]
struct Figures {
    loss: Option<f64>,
    /// Absent if the model is not a language model.
    #[serde(default, deserialize_with = "present")]
    perplexity: Option<Option<f64>>,
    #[serde(default)]
    metrics: BTreeMap<String, Option<f64>>,
    #[serde(default)]
    selected_by: Option<Metric>,
}

fn present<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Option<f64>>, D::Error> {
    Deserialize::deserialize(from).map(Some)
}

impl From<Figures> for Score {
    fn from(Figures { loss, perplexity, metrics, selected_by }: Figures) -> Self {
        let number = |value: Option<f64>| value.unwrap_or(f64::INFINITY);
        let metric = |name: &str| metrics.get(name).copied();
        let (loss, metric) = (number(loss), ranked_by(selected_by.as_ref(), metric));
        let cost = match (&selected_by, metric) {
            (Some(_), Some((measure, value))) => measure.cost(value),
            _ => loss,
        };
        Self { loss, perplexity: perplexity.map(number), metric, cost }
    }
}

impl From<&Evaluation> for Score {
    fn from(result: &Evaluation) -> Self {
        let Evaluation { loss, perplexity, ref metrics, ref selected_by, .. } = *result;
        let metric = |name: &str| metrics.get(name).copied().map(|value| (!value.is_nan()).then_some(value));
        Self { loss, perplexity, metric: ranked_by(selected_by.as_ref(), metric), cost: result.cost() }
    }
}

/// The metric that ranks an evaluation and its value; the worst one if it is not a number.
fn ranked_by(
    selected_by: Option<&Metric>,
    value_of: impl Fn(&str) -> Option<Option<f64>>,
) -> Option<(Measure, f64)> {
    let accuracy = Metric::higher(ACCURACY);
    let Metric { name, higher_is_better } = selected_by.unwrap_or(&accuracy);
    let worst = match *higher_is_better {
        true if name == ACCURACY => 0.0,
        true => f64::NEG_INFINITY,
        false => f64::INFINITY,
    };
    let measure = Measure::Metric { name: interned(name), higher_is_better: *higher_is_better };
    value_of(name).map(|value| (measure, value.unwrap_or(worst)))
}

/// The name for the rest of the process; the metrics of a process are few.
fn interned(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let name: &'static str = name.to_owned().leak();
    names.insert(name);
    name
}

impl Measure {
    /// The accuracy.
    pub const ACCURACY: Self = Self::Metric { name: ACCURACY, higher_is_better: true };

    /// The name of the metric, `perplexity` or `loss`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Metric { name, .. } => name,
            Self::Perplexity => "perplexity",
            Self::Loss => "loss",
        }
    }

    /// The short name.
    pub(crate) fn brief(self) -> &'static str {
        match self {
            Self::Perplexity => "ppl",
            other => other.name(),
        }
    }

    /// A value as text: an accuracy as a percentage, another metric with four decimals, and a perplexity or loss as
    /// `figure` writes it.
    pub(crate) fn shown(self, value: f64, figure: impl FnOnce(f64) -> String) -> String {
        match self {
            Self::ACCURACY => percent(value),
            Self::Metric { .. } => format!("{value:.4}"),
            Self::Perplexity | Self::Loss => figure(value),
        }
    }

    /// The value with the sign by which smaller is better.
    pub fn cost(self, value: f64) -> f64 {
        if matches!(self, Self::Metric { higher_is_better: true, .. }) { -value } else { value }
    }
}

impl Score {
    /// A loss without other figures.
    pub(crate) fn of_loss(loss: f64) -> Self {
        Self { loss, perplexity: None, metric: None, cost: loss }
    }

    pub(crate) fn measure(&self) -> Measure {
        match (self.metric, self.perplexity) {
            (Some((measure, _)), _) => measure,
            (None, Some(_)) => Measure::Perplexity,
            (None, None) => Measure::Loss,
        }
    }

    /// The figure by which the model is ranked.
    pub(crate) fn value(&self) -> f64 {
        self.metric.map(|(_, value)| value).or(self.perplexity).unwrap_or(self.loss)
    }

    /// The order of two scores, the better one first. Scores of different measures have the order of the measures.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        let cost = |score: &Self| score.measure().cost(score.value());
        self.measure().cmp(&other.measure()).then(cost(self).total_cmp(&cost(other)))
    }
}

/// An accuracy as a percentage.
pub fn percent(accuracy: f64) -> String {
    format!("{:.2}%", 100.0 * accuracy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn score(json: Value) -> Score {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn each_kind_of_model_has_its_measure() {
        let classifier = score(json!({ "loss": 0.5, "metrics": { "accuracy": 0.75, "other": null } }));
        let language = score(json!({ "loss": 2.0, "perplexity": null, "predicted_tokens": 9 }));
        let other = score(json!({ "loss": null }));
        let measures = [classifier, language, other].map(|score| score.measure().name());
        assert_eq!(measures, ["accuracy", "perplexity", "loss"]);
        assert_eq!([classifier, language, other].map(|s| s.value()), [0.75, f64::INFINITY, f64::INFINITY]);
        assert_eq!(percent(classifier.value()), "75.00%");
    }

    #[test]
    fn more_accuracy_is_better_and_less_of_the_others() {
        let right =
            |accuracy: f64, loss: f64| score(json!({ "loss": loss, "metrics": { "accuracy": accuracy } }));
        assert!(right(0.9, 5.0).order(&right(0.8, 0.1)).is_lt());
        assert!(right(0.9, 5.0).order(&right(0.9, 0.1)).is_eq());
        let ppl = |value: f64| score(json!({ "loss": value.ln(), "perplexity": value }));
        assert!(ppl(3.0).order(&ppl(4.0)).is_lt() && right(0.1, 9.0).order(&ppl(1.0)).is_lt());
    }
}
