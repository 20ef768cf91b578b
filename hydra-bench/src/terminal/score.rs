//! The figure by which evaluations are shown and ranked: accuracy for classifiers, perplexity for language models, else the loss.

use hydra_engine::Evaluation;
use serde::Deserialize;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// The name of the metric of classifiers.
const ACCURACY: &str = "accuracy";

/// A figure that models are ranked by, in the order of leaderboards with several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Measure {
    Accuracy,
    Perplexity,
    Loss,
}

/// The figures of an evaluation; a figure that is not a number is infinite.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(from = "Figures")]
pub(crate) struct Score {
    pub(crate) loss: f64,
    /// The perplexity of a language model.
    pub(crate) perplexity: Option<f64>,
    /// The accuracy of a classifier, from 0 to 1.
    pub(crate) accuracy: Option<f64>,
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
}

fn present<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Option<f64>>, D::Error> {
    Deserialize::deserialize(from).map(Some)
}

impl From<Figures> for Score {
    fn from(Figures { loss, perplexity, metrics }: Figures) -> Self {
        let number = |value: Option<f64>| value.unwrap_or(f64::INFINITY);
        let accuracy = metrics.get(ACCURACY).map(|value| value.unwrap_or(0.0));
        Self { loss: number(loss), perplexity: perplexity.map(number), accuracy }
    }
}

impl From<&Evaluation> for Score {
    fn from(result: &Evaluation) -> Self {
        let Evaluation { loss, perplexity, .. } = *result;
        Self { loss, perplexity, accuracy: result.metrics.get(ACCURACY).copied() }
    }
}

impl Measure {
    /// `accuracy`, `perplexity` or `loss`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Accuracy => ACCURACY,
            Self::Perplexity => "perplexity",
            Self::Loss => "loss",
        }
    }

    /// The short name.
    pub(crate) fn brief(self) -> &'static str {
        match self {
            Self::Accuracy => ACCURACY,
            Self::Perplexity => "ppl",
            Self::Loss => "loss",
        }
    }
}

impl Score {
    pub(crate) fn measure(&self) -> Measure {
        match (self.accuracy, self.perplexity) {
            (Some(_), _) => Measure::Accuracy,
            (None, Some(_)) => Measure::Perplexity,
            (None, None) => Measure::Loss,
        }
    }

    /// The figure by which the model is ranked.
    pub(crate) fn value(&self) -> f64 {
        self.accuracy.or(self.perplexity).unwrap_or(self.loss)
    }

    /// The order of two scores, the better one first. Scores of different measures have the order of the measures.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        let key = |score: &Self| score.accuracy.map_or(score.value(), |accuracy| -accuracy);
        self.measure().cmp(&other.measure()).then(key(self).total_cmp(&key(other)))
    }
}

/// An accuracy as a percentage.
pub(crate) fn percent(accuracy: f64) -> String {
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
