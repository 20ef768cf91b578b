//! One class for each item: cross-entropy, accuracy, F1 and Matthews' correlation.

use super::{ClassCounts, numbers, ratio};
use burn::tensor::{FloatDType, Int, Tensor, activation};
use hydra_core::{Activation, Measures, Metric, Objective, Pass};

/// The fraction of items whose label is predicted.
pub const ACCURACY: &str = "accuracy";

/// One of several classes for each item. The last layer returns logits `[items, classes]`; part 0 of the targets is the
/// classes `[items]`.
///
/// Metrics: `accuracy`; `f1_macro`, the mean over all classes, 0 for a class that is neither predicted nor labelled;
/// `f1_micro`, which equals the accuracy; `matthews_correlation`, for several classes as Gorodkin defines it (Computational
/// Biology and Chemistry 28, 2004), 0 where its denominator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SingleLabel {
    /// The number of classes.
    pub classes: usize,
}

impl Objective for SingleLabel {
    fn name(&self) -> String {
        format!("single-label classification of {}", self.classes)
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        classification_loss(outputs.part(0).into_float(), pass.targets().part(0).into_int())
    }

    fn metrics(&self) -> Vec<Metric> {
        [ACCURACY, "f1_macro", "f1_micro", "matthews_correlation"].map(Metric::higher).to_vec()
    }

    fn measure(&self, outputs: &Activation, pass: &Pass) -> Measures {
        let (logits, labels) = (outputs.part(0).into_float::<2>(), pass.targets().part(0).into_int::<1>());
        let ([items, classes], device) = (logits.dims(), labels.device());
        let each = Tensor::<1, Int>::arange(0..classes as i64, &device).reshape([1, classes]);
        let one_hot = |class: Tensor<2, Int>| {
            numbers(class.expand([items, classes]).equal(each.clone().expand([items, classes])))
        };
        let predicted = one_hot(logits.argmax(1));
        let labelled = one_hot(labels.reshape([items, 1]));
        Measures { sums: Some(ClassCounts::sums(predicted, labelled)), rows: None }
    }

    fn values(&self, sums: &[f64], _: &[f32], items: u64) -> Vec<f64> {
        let classes = ClassCounts::of(sums);
        let total = ClassCounts::total(&classes);
        let accuracy = ratio(total.both, items as f64);
        vec![
            accuracy,
            ClassCounts::macro_f1(&classes),
            total.f1(),
            matthews(&classes, total.both, items as f64),
        ]
    }
}

/// Matthews' correlation of the predictions and labels of `items` items; `right` of them agree.
fn matthews(classes: &[ClassCounts], right: f64, items: f64) -> f64 {
    let sum = |of: fn(&ClassCounts) -> f64| classes.iter().map(of).sum::<f64>();
    let covariance = right * items - sum(|class| class.predicted * class.labelled);
    let predicted = items * items - sum(|class| class.predicted * class.predicted);
    let labelled = items * items - sum(|class| class.labelled * class.labelled);
    ratio(covariance, (predicted * labelled).sqrt())
}

/// The mean cross-entropy, `F32` of shape `[1]`, of logits `[items, classes]` against classes `[items]`.
///
/// # Panics
/// If there is not exactly one class per item.
pub fn classification_loss(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    let ([items, _], [count]) = (logits.dims(), classes.dims());
    assert!(items == count && items > 0, "expected a class for each of {items} items, found {count}");
    let logits = logits.cast(FloatDType::F32);
    let chosen = activation::log_softmax(logits, 1).gather(1, classes.unsqueeze_dim(1));
    // Along a dimension, Burn sums in a fixed order; over a whole tensor it may not.
    chosen.mean_dim(0).reshape([1]).neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;
    use burn::tensor::{DType, TensorData};

    fn assert_mean_surprise(floats: Floats, bound: f64) {
        let logits = floats.leaf(normal(1, [5, 3]));
        let classes = [0, 2, 1, 1, 0];
        let device = burn::tensor::Device::flex().autodiff();
        let targets = Tensor::from_data(TensorData::new(classes.to_vec(), [5]), (&device, DType::I32));
        let loss = classification_loss(logits.clone(), targets);
        assert_eq!(loss.dtype(), DType::F32);
        let rows = values(&logits);
        let row = |(row, class): (&[f32], usize)| {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            sum.ln() - f64::from(row[class])
        };
        let expected = rows.chunks(3).zip(classes.map(|c| c as usize)).map(row).sum::<f64>() / 5.0;
        assert!((f64::from(values(&loss)[0]) - expected).abs() < 1e-6);
        let gradient = gradient(&logits, &loss.backward());
        let sum: f64 = rows[..3].iter().map(|&x| f64::from(x).exp()).sum();
        let first = (f64::from(rows[0]).exp() / sum - 1.0) / 5.0;
        assert!((f64::from(gradient[0]) - first).abs() < bound, "{} for {first}", gradient[0]);
    }

    #[test]
    fn the_loss_is_the_mean_surprise() {
        assert_mean_surprise(Floats::F32, 1e-6);
    }

    #[test]
    fn metrics_are_those_of_the_counts() {
        let device = burn::tensor::Device::flex().autodiff();
        let logits = Tensor::<2>::from_data([[0.0, 2.0], [3.0, 1.0], [0.5, 0.1], [-1.0, -2.0]], &device);
        let pass = Pass::evaluate(Activation::of(Tensor::<1, Int>::from_data([1, 0, 1, 0], &device)));
        let objective = SingleLabel { classes: 2 };
        let measures = objective.measure(&Activation::of(logits), &pass);
        let sums: Vec<f64> = values(&measures.sums.unwrap()).into_iter().map(f64::from).collect();
        assert_eq!(sums, [2.0, 3.0, 2.0, 1.0, 1.0, 2.0]);
        let found = objective.values(&sums, &[], 4);
        assert_eq!(found[..3], [0.75, (4.0 / 5.0 + 2.0 / 3.0) / 2.0, 0.75]);
        assert!((found[3] - 1.0 / 3f64.sqrt()).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn a_class_that_is_nowhere_counts_as_zero() {
        // One of three classes is always predicted, and right half of the time.
        let sums = [1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
        let found = SingleLabel { classes: 3 }.values(&sums, &[], 2);
        assert_eq!(found, [0.5, (2.0 / 3.0) / 3.0, 0.5, 0.0]);
    }

    #[test]
    fn the_loss_of_bf16_is_that_of_the_same_logits_in_f32() {
        // An element of the gradient is at most a fifth, and rounded once.
        assert_mean_surprise(Floats::Bf16, 0.2 * ROUNDING);
    }
}
