//! Several classes for each item: binary cross-entropy, accuracy and F1.

use super::{ClassCounts, numbers, operands, ratio};
use burn::tensor::{Tensor, activation};
use hydra_core::{Activation, Measures, Metric, Objective, Pass};

/// Any number of the classes for each item. The last layer returns logits `[items, classes]`; part 0 of the targets is
/// `[items, classes]` of zeros and ones. The loss is the mean over items and classes of the binary cross-entropy.
///
/// A class is predicted where its logit is above 0, that is, its probability above a half. Metrics: `accuracy`, the
/// fraction of items whose classes are all right; `f1_macro`, the mean over all classes, 0 for a class that is
/// neither predicted nor labelled; `f1_micro`, of the counts of all classes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiLabel {
    /// The number of classes.
    pub classes: usize,
}

impl Objective for MultiLabel {
    fn name(&self) -> String {
        format!("multi-label classification of {}", self.classes)
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let (logits, labels) = operands("logits", outputs, pass);
        let there = activation::log_sigmoid(logits.clone()) * labels.clone();
        let absent = activation::log_sigmoid(logits.neg()) * (labels.neg() + 1.0);
        (there + absent).mean_dim(1).mean_dim(0).reshape([1]).neg()
    }

    fn metrics(&self) -> Vec<Metric> {
        ["accuracy", "f1_macro", "f1_micro"].map(Metric::higher).to_vec()
    }

    fn measure(&self, outputs: &Activation, pass: &Pass) -> Measures {
        let (logits, labels) = operands("logits", outputs, pass);
        let predicted = numbers(logits.greater_elem(0.0));
        let wrong = (predicted.clone() - labels.clone()).abs().sum_dim(1);
        let right = numbers(wrong.equal_elem(0.0)).sum_dim(0).reshape([1]);
        Measures { sums: Some(Tensor::cat(vec![ClassCounts::sums(predicted, labels), right], 0)), rows: None }
    }

    fn values(&self, sums: &[f64], _: &[f32], items: u64) -> Vec<f64> {
        let classes = ClassCounts::of(sums);
        let right = sums.last().copied().unwrap_or(0.0);
        vec![ratio(right, items as f64), ClassCounts::macro_f1(&classes), ClassCounts::total(&classes).f1()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{gradient, values};
    use burn::tensor::Device;

    #[test]
    fn loss_and_metrics_are_those_of_the_definition() {
        let device = Device::flex().autodiff();
        let rows = [[0.5, -1.0, 0.0], [2.0, 3.0, -4.0]];
        let labels = [[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]];
        let logits = Tensor::<2>::from_data(rows, &device).require_grad();
        let pass = Pass::evaluate(Activation::of(Tensor::<2>::from_data(labels, &device)));
        let (objective, outputs) = (MultiLabel { classes: 3 }, Activation::of(logits.clone()));
        let loss = objective.loss(&outputs, &pass);
        let entropy = |(x, y): (&f64, &f64)| (1.0 + (-x).exp()).ln() * y + (1.0 + x.exp()).ln() * (1.0 - y);
        let expected = rows.as_flattened().iter().zip(labels.as_flattened()).map(entropy).sum::<f64>() / 6.0;
        assert!((f64::from(values(&loss)[0]) - expected).abs() < 1e-6);
        let slopes = gradient(&logits, &loss.backward());
        let slope = |(x, y): (&f64, &f64)| (1.0 / (1.0 + (-x).exp()) - y) / 6.0;
        let expected = rows.as_flattened().iter().zip(labels.as_flattened()).map(slope);
        assert!(slopes.iter().zip(expected).all(|(found, of)| (f64::from(*found) - of).abs() < 1e-7));

        let sums: Vec<f64> =
            values(&objective.measure(&outputs, &pass).sums.unwrap()).into_iter().map(f64::from).collect();
        // The first class is right twice, the second predicted once, and the third, which has a logit of 0, is missed.
        assert_eq!(sums, [2.0, 2.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        assert_eq!(objective.values(&sums, &[], 2), [0.0, 1.0 / 3.0, 4.0 / 6.0]);
    }
}
