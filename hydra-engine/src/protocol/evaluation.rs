//! What a chain is worth on a dataset: the mean of its loss and of its metrics over all terms.

use hydra_core::Measured;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The loss of a chain over a dataset, and its metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The mean loss over all terms (natural logarithm).
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// The terms: predicted tokens of a language model.
    pub predicted_tokens: u64,
    /// The means of the chain's metrics over all terms, by name; see
    /// [`ChainBuilder::metrics`](hydra_core::ChainBuilder::metrics).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
}

impl Evaluation {
    /// The evaluation of a sum of losses over so many terms, without metrics.
    pub fn of(loss_sum: f64, terms: u64) -> Self {
        Sums { loss: loss_sum, terms, metrics: Vec::new() }.mean(&[])
    }
}

/// An evaluation that is under way: sums over the terms of the batches so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    #[serde(rename = "sum")]
    loss: f64,
    terms: u64,
    /// In the chain's order; empty before the first batch.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "numbers")]
    metrics: Vec<f64>,
}

impl Sums {
    /// Adds a batch of so many terms.
    pub(crate) fn add(&mut self, batch: &Measured, terms: usize) {
        self.loss += f64::from(batch.loss) * terms as f64;
        self.terms += terms as u64;
        self.metrics.resize(batch.metrics.len(), 0.0);
        for (sum, mean) in self.metrics.iter_mut().zip(&batch.metrics) {
            *sum += f64::from(*mean) * terms as f64;
        }
    }

    /// The means, the metrics under these names.
    pub(crate) fn mean(&self, names: &[String]) -> Evaluation {
        let over = self.terms.max(1) as f64;
        let loss = self.loss / over;
        let metrics = names.iter().cloned().zip(self.metrics.iter().map(|sum| sum / over)).collect();
        Evaluation { loss, perplexity: loss.exp(), predicted_tokens: self.terms, metrics }
    }
}

/// An evaluation in a checkpoint, by what is finite of it: a perplexity can be infinite, which JSON has not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedEvaluation {
    loss: f64,
    terms: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    metrics: BTreeMap<String, Option<f64>>,
}

impl From<Evaluation> for SavedEvaluation {
    fn from(evaluation: Evaluation) -> Self {
        let Evaluation { loss, predicted_tokens: terms, metrics, .. } = evaluation;
        Self { loss, terms, metrics: metrics.into_iter().map(|(name, mean)| (name, finite(mean))).collect() }
    }
}

impl From<SavedEvaluation> for Evaluation {
    fn from(kept: SavedEvaluation) -> Self {
        let SavedEvaluation { loss, terms, metrics } = kept;
        let metrics = metrics.into_iter().map(|(name, mean)| (name, mean.unwrap_or(f64::NAN))).collect();
        Self { loss, perplexity: loss.exp(), predicted_tokens: terms, metrics }
    }
}

fn finite(number: f64) -> Option<f64> {
    number.is_finite().then_some(number)
}

/// Numbers of which some may be none, `null` in JSON.
mod numbers {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(numbers: &[f64], to: S) -> Result<S::Ok, S::Error> {
        numbers.iter().copied().map(super::finite).collect::<Vec<_>>().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
        let numbers = Vec::<Option<f64>>::deserialize(from)?;
        Ok(numbers.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        vec!["right".to_owned(), "close".to_owned()]
    }

    fn sums() -> Sums {
        let mut sums = Sums::default();
        sums.add(&Measured { loss: 2.0, metrics: vec![0.5, f32::NAN] }, 4);
        sums.add(&Measured { loss: 5.0, metrics: vec![1.0, 1.0] }, 2);
        sums
    }

    #[test]
    fn batches_weigh_by_their_terms() {
        let mean = sums().mean(&names());
        assert_eq!((mean.loss, mean.predicted_tokens), (3.0, 6));
        assert_eq!(mean.metrics["right"], 4.0 / 6.0);
        assert!(mean.metrics["close"].is_nan());
        assert_eq!(Evaluation::of(18.0, 6), Evaluation { metrics: BTreeMap::new(), ..mean });
    }

    #[test]
    fn what_is_kept_comes_back() {
        let text = serde_json::to_string(&sums()).unwrap();
        assert_eq!(text, r#"{"sum":18.0,"terms":6,"metrics":[4.0,null]}"#);
        let back: Sums = serde_json::from_str(&text).unwrap();
        assert_eq!((back.loss, back.terms, back.metrics[0]), (18.0, 6, 4.0));
        assert!(back.metrics[1].is_nan());
        let kept = serde_json::to_string(&SavedEvaluation::from(sums().mean(&names()))).unwrap();
        let kept: Evaluation = serde_json::from_str::<SavedEvaluation>(&kept).unwrap().into();
        assert_eq!(kept.metrics["right"], 4.0 / 6.0);
        assert!(kept.metrics["close"].is_nan());
    }

    #[test]
    fn checkpoints_from_before_metrics_are_read() {
        let sums: Sums = serde_json::from_str(r#"{"sum":1.5,"terms":3}"#).unwrap();
        assert_eq!(sums, Sums { loss: 1.5, terms: 3, metrics: Vec::new() });
        let kept: SavedEvaluation = serde_json::from_str(r#"{"loss":0.5,"terms":3}"#).unwrap();
        assert_eq!(Evaluation::from(kept), Evaluation::of(1.5, 3));
    }
}
