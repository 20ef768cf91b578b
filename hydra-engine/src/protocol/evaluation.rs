//! The evaluation of a chain on a dataset: the means of its loss and its metrics over all loss targets.

use crate::error::{EngineError, guarded};
use hydra_core::{Batch, Chain, Measured, Metric, Statistic, TrainSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The loss and the metrics of a chain over a dataset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The mean loss over all loss targets (natural logarithm).
    pub loss: f64,
    /// `exp(loss)` if the chain is a [language model](hydra_core::ChainBuilder::language_model), otherwise `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// The number of loss targets: predicted tokens of a language model, items of most other chains.
    #[serde(rename = "predicted_tokens")]
    pub loss_targets: u64,
    /// The values of the metrics of the chain's [objective](hydra_core::Objective), by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// The metric that decides which of the task's evaluations is the best one; the loss if `None`
    /// ([`TrainSpec::metric`](hydra_core::TrainSpec::metric)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selected_by: Option<Metric>,
    /// The rows of all items, one item after the other, if the objective [keeps](hydra_core::Objective::keeps_rows) them.
    /// Reports and checkpoints do not have them.
    #[serde(skip)]
    pub rows: Vec<f32>,
    /// What the data of its [rounds](hydra_core::Rounds::report) reports, as JSON. Reports and checkpoints do not have it.
    #[serde(skip)]
    pub rounds: Option<String>,
}

impl Evaluation {
    /// The figure by which evaluations of a task are compared, smaller being better: the loss, or the metric that the task
    /// is selected by, with the other sign if larger values are better. Infinite if it is not a number.
    pub fn cost(&self) -> f64 {
        let cost = match &self.selected_by {
            None => self.loss,
            Some(metric) => {
                // The order of perplexities is that of losses.
                let is_loss = metric.name == "loss" || metric.name == "perplexity";
                let value = if is_loss { Some(self.loss) } else { self.metrics.get(&metric.name).copied() };
                let value = value.unwrap_or(f64::NAN);
                if metric.higher_is_better { -value } else { value }
            }
        };
        if cost.is_nan() { f64::INFINITY } else { cost }
    }
}

/// A partial evaluation: the sums over the loss targets of the batches so far, and the rows of their items.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    #[serde(rename = "sum")]
    loss: f64,
    #[serde(alias = "terms")]
    loss_targets: u64,
    /// The objective's sums; empty before the first batch.
    #[serde(rename = "metrics", default, skip_serializing_if = "Vec::is_empty", with = "numbers")]
    sums: Vec<f64>,
    /// The objective's rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "rows")]
    rows: Vec<f32>,
}

/// The statistic of the chain's objective that follows from the targets of a minibatch of several microbatches; `None`
/// if there is none.
///
/// # Errors
/// An objective that panics.
pub(crate) fn statistic_of_targets(chain: &Chain, batches: &[Batch]) -> Result<Option<f64>, EngineError> {
    let objective = chain.objective();
    if objective.statistic() != Statistic::OfTargets || batches.len() < 2 {
        return Ok(None);
    }
    guarded("the statistic of the objective", || {
        let mut sums = Vec::new();
        for batch in batches {
            let of_batch = objective.measure_targets(&batch.targets);
            sums.resize(of_batch.len(), 0.0);
            sums.iter_mut().zip(of_batch).for_each(|(sum, of_batch)| *sum += of_batch);
        }
        let loss_targets = batches.iter().map(|batch| batch.loss_targets as u64).sum();
        Ok(Some(objective.statistic_of(&sums, loss_targets)))
    })
}

impl Sums {
    /// Adds a batch with `loss_targets` loss targets.
    ///
    /// # Errors
    /// Another number of sums than in the batches before.
    pub(crate) fn add(&mut self, batch: &Measured, loss_targets: usize) -> Result<(), EngineError> {
        let (expected, found) = (self.sums.len(), batch.sums.len());
        if self.loss_targets > 0 && expected != found {
            return Err(EngineError::Figures { what: "sums of a batch", expected, found });
        }
        self.loss += f64::from(batch.loss) * loss_targets as f64;
        self.loss_targets += loss_targets as u64;
        self.sums.resize(found, 0.0);
        self.sums.iter_mut().zip(&batch.sums).for_each(|(sum, of_batch)| *sum += f64::from(*of_batch));
        self.rows.extend_from_slice(&batch.rows);
        Ok(())
    }

    /// Adds the sums of the next batch; the result has the same bits as with [`add`](Self::add).
    pub(crate) fn append(&mut self, batch: &Self) {
        self.loss += batch.loss;
        self.loss_targets += batch.loss_targets;
        self.sums.resize(batch.sums.len(), 0.0);
        self.sums.iter_mut().zip(&batch.sums).for_each(|(sum, of_batch)| *sum += of_batch);
        self.rows.extend_from_slice(&batch.rows);
    }

    /// The statistic of the chain's objective, if these are the sums of a minibatch.
    ///
    /// # Errors
    /// An objective that panics.
    pub(crate) fn statistic(&self, chain: &Chain) -> Result<f64, EngineError> {
        guarded("the statistic of the objective", || {
            Ok(chain.objective().statistic_of(&self.sums, self.loss_targets))
        })
    }

    /// The mean loss, and the metrics of the chain's objective, for a task of this spec.
    ///
    /// # Errors
    /// An objective that panics, or that does not give a value for each metric.
    pub(crate) fn mean(&self, chain: &Chain, spec: &TrainSpec) -> Result<Evaluation, EngineError> {
        let over = self.loss_targets.max(1) as f64;
        let loss = self.loss / over;
        let (metrics, values) = guarded("the metrics of the objective", || {
            let objective = chain.objective();
            Ok((objective.metrics(), objective.values(&self.sums, &self.rows, self.loss_targets)))
        })?;
        if metrics.len() != values.len() {
            let (expected, found) = (metrics.len(), values.len());
            return Err(EngineError::Figures { what: "values of metrics", expected, found });
        }
        let metrics = metrics.into_iter().map(|metric| metric.name).zip(values);
        Ok(Evaluation {
            loss,
            perplexity: perplexity(chain, loss),
            loss_targets: self.loss_targets,
            metrics: metrics.collect(),
            selected_by: selected_by(chain, spec),
            rows: if chain.objective().keeps_rows() { self.rows.clone() } else { Vec::new() },
            rounds: None,
        })
    }
}

fn selected_by(chain: &Chain, spec: &TrainSpec) -> Option<Metric> {
    spec.metric.as_ref().and_then(|name| chain.metric(name).ok())
}

fn perplexity(chain: &Chain, loss: f64) -> Option<f64> {
    chain.objective().is_language_model().then(|| loss.exp())
}

/// An evaluation in a checkpoint, without derived values: a perplexity may be infinite, which JSON cannot express.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedEvaluation {
    pub loss: f64,
    #[serde(alias = "terms")]
    loss_targets: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    metrics: BTreeMap<String, Option<f64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    selected_by: Option<Metric>,
}

impl From<Evaluation> for SavedEvaluation {
    fn from(evaluation: Evaluation) -> Self {
        let Evaluation { loss, loss_targets, metrics, selected_by, .. } = evaluation;
        Self {
            selected_by,
            loss,
            loss_targets,
            metrics: metrics.into_iter().map(|(name, mean)| (name, finite(mean))).collect(),
        }
    }
}

impl SavedEvaluation {
    /// The evaluation of a model of this chain.
    pub(crate) fn evaluation(self, chain: &Chain) -> Evaluation {
        self.with_perplexity(|loss| perplexity(chain, loss))
    }

    /// The figure by which it is compared ([`Evaluation::cost`]).
    pub(crate) fn cost(&self) -> f64 {
        self.clone().with_perplexity(|_| None).cost()
    }

    fn with_perplexity(self, perplexity: impl FnOnce(f64) -> Option<f64>) -> Evaluation {
        let Self { loss, loss_targets, metrics, selected_by } = self;
        let metrics = metrics.into_iter().map(|(name, mean)| (name, mean.unwrap_or(f64::NAN))).collect();
        Evaluation {
            loss,
            perplexity: perplexity(loss),
            loss_targets,
            metrics,
            selected_by,
            rows: Vec::new(),
            rounds: None,
        }
    }
}

fn finite(number: f64) -> Option<f64> {
    number.is_finite().then_some(number)
}

/// Serializes rows; a figure that is not finite becomes `null` in JSON.
mod rows {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(rows: &[f32], to: S) -> Result<S::Ok, S::Error> {
        rows.iter().map(|figure| figure.is_finite().then_some(*figure)).collect::<Vec<_>>().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f32>, D::Error> {
        let rows = Vec::<Option<f32>>::deserialize(from)?;
        Ok(rows.into_iter().map(|figure| figure.unwrap_or(f32::NAN)).collect())
    }
}

/// Serializes numbers; one that is not finite becomes `null` in JSON.
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
    use burn::module::Module;
    use hydra_core::{Activation, ChainBuilder, Forward, OptimizerSpec, Pass};

    #[derive(Module, Debug)]
    struct Loss;

    impl Forward for Loss {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    fn chain() -> ChainBuilder {
        Chain::builder("test").layer("loss", Loss).metrics(["right", "close"])
    }

    fn spec() -> TrainSpec {
        TrainSpec::new(OptimizerSpec::adamw(1e-3), 1)
    }

    fn mean(chain: &Chain) -> Evaluation {
        sums().mean(chain, &spec()).unwrap()
    }

    #[test]
    fn evaluations_are_compared_by_the_metric_of_the_spec() {
        let chain = Chain::builder("test")
            .layer("loss", Loss)
            .metrics([Metric::higher("right"), Metric::lower("close")]);
        let chain = chain.build().unwrap();
        let by =
            |name: &str| sums().mean(&chain, &TrainSpec { metric: Some(name.to_owned()), ..spec() }).unwrap();
        assert_eq!((mean(&chain).cost(), by("right").cost()), (3.0, -4.0 / 6.0));
        assert_eq!(by("close").cost(), f64::INFINITY, "not a number");
        assert_eq!((by("loss").cost(), by("loss").selected_by.unwrap()), (3.0, Metric::lower("loss")));
        let saved = SavedEvaluation::from(by("right")).evaluation(&chain);
        assert_eq!(saved.cost(), by("right").cost());
        let error = chain.metric("wrong").unwrap_err().to_string();
        assert!(error.contains("no metric `wrong`; its evaluations have right, close, loss"), "{error}");
    }

    fn sums() -> Sums {
        let mut sums = Sums::default();
        sums.add(&Measured { loss: 2.0, sums: vec![2.0, f32::NAN], rows: vec![0.5, f32::NAN] }, 4).unwrap();
        sums.add(&Measured { loss: 5.0, sums: vec![2.0, 2.0], rows: vec![0.25] }, 2).unwrap();
        sums
    }

    #[test]
    fn batches_that_are_appended_are_added_to_the_bit() {
        let batches: Vec<(Measured, usize)> = (0..40_u32)
            .map(|i| {
                (
                    Measured {
                        loss: (i as f32 * 0.37).sin(),
                        sums: vec![0.1 * i as f32, -0.0],
                        rows: vec![i as f32],
                    },
                    1 + i as usize % 5,
                )
            })
            .collect();
        let (mut added, mut appended) = (Sums::default(), Sums::default());
        for (batch, loss_targets) in &batches {
            added.add(batch, *loss_targets).unwrap();
            let mut alone = Sums::default();
            alone.add(batch, *loss_targets).unwrap();
            appended.append(&alone);
        }
        let bits = |sums: &Sums| {
            let metrics = sums.sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>();
            (sums.loss.to_bits(), sums.loss_targets, metrics, sums.rows.clone())
        };
        assert_eq!(bits(&appended), bits(&added));
    }

    #[test]
    fn batches_weigh_by_their_terms() {
        let mean = mean(&chain().build().unwrap());
        assert_eq!((mean.loss, mean.loss_targets, mean.perplexity), (3.0, 6, None));
        assert_eq!(mean.metrics["right"], 4.0 / 6.0);
        assert!(mean.metrics["close"].is_nan());
    }

    #[test]
    fn language_models_alone_have_a_perplexity() {
        let json = |chain: ChainBuilder| serde_json::to_value(mean(&chain.build().unwrap())).unwrap();
        assert_eq!(json(chain().language_model())["perplexity"], 3f64.exp());
        assert!(json(chain()).get("perplexity").is_none());
        let infinite = Evaluation { perplexity: Some(f64::INFINITY), ..mean(&chain().build().unwrap()) };
        assert!(serde_json::to_value(infinite).unwrap()["perplexity"].is_null());
    }

    #[test]
    fn what_is_saved_comes_back() {
        let text = serde_json::to_string(&sums()).unwrap();
        assert_eq!(text, r#"{"sum":18.0,"loss_targets":6,"metrics":[4.0,null],"rows":[0.5,null,0.25]}"#);
        let back: Sums = serde_json::from_str(&text).unwrap();
        assert_eq!((back.loss, back.loss_targets, back.sums[0]), (18.0, 6, 4.0));
        assert!(back.sums[1].is_nan());
        let chain = chain().language_model().build().unwrap();
        let saved = serde_json::to_string(&SavedEvaluation::from(mean(&chain))).unwrap();
        let saved = serde_json::from_str::<SavedEvaluation>(&saved).unwrap().evaluation(&chain);
        assert_eq!((saved.loss, saved.perplexity), (3.0, Some(3f64.exp())));
        assert_eq!(saved.metrics["right"], 4.0 / 6.0);
        assert!(saved.metrics["close"].is_nan());
    }

    #[test]
    fn checkpoints_from_before_metrics_are_read() {
        let sums: Sums = serde_json::from_str(r#"{"sum":1.5,"terms":3}"#).unwrap();
        assert_eq!(sums, Sums { loss: 1.5, loss_targets: 3, ..Sums::default() });
        let saved: SavedEvaluation = serde_json::from_str(r#"{"loss":0.5,"terms":3}"#).unwrap();
        let chain = Chain::builder("test").layer("loss", Loss).build().unwrap();
        assert_eq!(saved.evaluation(&chain), sums.mean(&chain, &spec()).unwrap());
    }
}
