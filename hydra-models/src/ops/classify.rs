//! The loss of a classifier with few classes, and its number of correct answers.

use burn::tensor::{FloatDType, Int, Tensor, activation};
use hydra_core::{Activation, Pass};

/// The metric of [`classified`].
pub const ACCURACY: &str = "accuracy";

/// The output of a classifier's last layer, for logits `[items, classes]` and the pass's targets, the classes
/// `[items]`: the loss, and in an evaluation pass also the number of [`right_answers`], whose fraction evaluations
/// report.
///
/// # Panics
/// If there is not exactly one class per item.
pub fn classified(logits: Tensor<2>, pass: &Pass) -> Activation {
    let classes = pass.targets().part(0).into_int::<1>();
    let loss = classification_loss(logits.clone(), classes.clone());
    let loss = Activation::of(loss);
    if pass.is_training() { loss } else { loss.and(right_answers(logits, classes)) }
}

/// The number of items whose class has the largest logit, `F32` of shape `[1]`: exact up to 2^24.
pub fn right_answers(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    let right = logits.argmax(1).squeeze_dim::<1>(1).equal(classes);
    right.float().cast(FloatDType::F32).sum_dim(0)
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
    use super::super::testing::*;
    use super::*;
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
    fn right_answers_have_the_largest_logits() {
        let device = burn::tensor::Device::flex().autodiff();
        let logits = Tensor::<2>::from_data([[0.0, 2.0], [3.0, 1.0], [0.5, 0.1], [-1.0, -2.0]], &device);
        let classes = Tensor::<1, Int>::from_data([1, 0, 1, 0], &device);
        assert_eq!(values(&right_answers(logits.clone(), classes.clone())), [3.0]);
        let targets = || Activation::of(classes.clone());
        let evaluated = classified(logits.clone(), &Pass::evaluate(targets()));
        assert_eq!(evaluated.parts().len(), 2);
        let trained = classified(logits, &Pass::train(hydra_core::Key::new(1), targets()));
        assert_eq!(values(&trained.into_float::<1>()), values(&evaluated.part(0).into_float::<1>()));
    }

    #[test]
    fn the_loss_of_bf16_is_that_of_the_same_logits_in_f32() {
        // An element of the gradient is at most a fifth, and rounded once.
        assert_mean_surprise(Floats::Bf16, 0.2 * ROUNDING);
    }
}
