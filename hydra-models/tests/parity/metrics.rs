//! Metrics of classifiers, against scikit-learn and SciPy. `hydra-bench/experiments/peers/make_classifiers.py` drew the logits and
//! the labels.

use burn::tensor::Device;
use hydra_core::{AnyTensor, HostActivation, HostTensor, Measures, Objective, Pass};
use hydra_models::objective::{MultiLabel, ProblemType, Regression, SingleLabel};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// Items of one problem, and their metrics by name.
#[derive(Deserialize)]
struct Case {
    problem_type: ProblemType,
    metrics: BTreeMap<String, f64>,
    logits: Vec<Vec<f32>>,
    labels: Labels,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Labels {
    Classes(Vec<i32>),
    Numbers(Vec<Vec<f32>>),
}

/// A tensor of rows.
fn of_rows(rows: &[Vec<f32>]) -> HostTensor {
    HostTensor::float(rows.concat(), [rows.len(), rows[0].len()])
}

impl Case {
    fn objective(&self) -> Box<dyn Objective> {
        let outputs = self.logits[0].len();
        match self.problem_type {
            ProblemType::Regression => Box::new(Regression { numbers: outputs }),
            ProblemType::SingleLabelClassification => Box::new(SingleLabel { classes: outputs }),
            ProblemType::MultiLabelClassification => Box::new(MultiLabel { classes: outputs }),
        }
    }

    /// Measures these items as one batch.
    fn measure(&self, items: Range<usize>) -> Measures {
        let device = Device::flex().autodiff();
        let labels = match &self.labels {
            Labels::Classes(classes) => HostTensor::int(classes[items.clone()].to_vec(), [items.len()]),
            Labels::Numbers(rows) => of_rows(&rows[items.clone()]),
        };
        let [outputs, labels] =
            [of_rows(&self.logits[items]), labels].map(|host| HostActivation::of(host).to_device(&device));
        self.objective().measure(&outputs, &Pass::evaluate(labels))
    }

    /// The metrics of all items in batches of this size, in the order of the objective.
    fn values(&self, size: usize) -> Vec<f64> {
        let (mut sums, mut rows) = (Vec::new(), Vec::new());
        let items = self.logits.len();
        for first in (0..items).step_by(size) {
            let measures = self.measure(first..items.min(first + size));
            if let Some(found) = measures.sums {
                let found = AnyTensor::from(found).into_host();
                sums.resize(found.as_f32().len(), 0.0);
                sums.iter_mut().zip(found.as_f32()).for_each(|(sum, found)| *sum += f64::from(*found));
            }
            if let Some(found) = measures.rows {
                rows.extend_from_slice(AnyTensor::from(found).into_host().as_f32());
            }
        }
        self.objective().values(&sums, &rows, items as u64)
    }
}

#[test]
fn metrics_are_those_of_scikit_learn_and_scipy_in_batches_of_any_size() {
    let text = include_str!("../fixtures/parity/metrics.json");
    let cases: BTreeMap<String, Case> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 5);
    for (name, case) in &cases {
        let whole = case.values(case.logits.len());
        let metrics = case.objective().metrics();
        assert_eq!((metrics.len(), whole.len()), (case.metrics.len(), case.metrics.len()), "{name}");
        for (metric, found) in metrics.iter().zip(&whole) {
            let expected = case.metrics[&metric.name];
            let error = (found - expected).abs() / expected.abs();
            assert!(error < 1e-9, "{name}: {} is {found}, expected {expected}", metric.name);
        }
        for size in [1, 7, 32] {
            assert_eq!(case.values(size), whole, "{name} in batches of {size}");
        }
    }
}
