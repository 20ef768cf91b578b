//! The loss of a classifier with few classes.

use burn::tensor::{Int, Tensor, activation};

/// The mean cross-entropy, of shape `[1]`, of logits `[items, classes]` against classes `[items]`.
///
/// # Panics
/// If there is not one class for each item.
pub fn classification_loss(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    let ([items, _], [count]) = (logits.dims(), classes.dims());
    assert!(items == count && items > 0, "expected a class for each of {items} items, found {count}");
    let chosen = activation::log_softmax(logits, 1).gather(1, classes.unsqueeze_dim(1));
    // Along a dimension, Burn adds in one order; over a whole tensor it may not.
    chosen.mean_dim(0).reshape([1]).neg()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use burn::tensor::{DType, TensorData};

    #[test]
    fn the_loss_is_the_mean_surprise() {
        let logits = normal(1, [5, 3]).detach().require_grad();
        let classes = [0, 2, 1, 1, 0];
        let device = burn::tensor::Device::flex().autodiff();
        let targets = Tensor::from_data(TensorData::new(classes.to_vec(), [5]), (&device, DType::I32));
        let loss = classification_loss(logits.clone(), targets);
        let rows = values(&logits);
        let row = |(row, class): (&[f32], usize)| {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            sum.ln() - f64::from(row[class])
        };
        let expected = rows.chunks(3).zip(classes.map(|c| c as usize)).map(row).sum::<f64>() / 5.0;
        assert!((f64::from(values(&loss)[0]) - expected).abs() < 1e-6);
        let gradient = values(&logits.grad(&loss.backward()).unwrap());
        let sum: f64 = rows[..3].iter().map(|&x| f64::from(x).exp()).sum();
        let first = (f64::from(rows[0]).exp() / sum - 1.0) / 5.0;
        assert!((f64::from(gradient[0]) - first).abs() < 1e-6);
    }
}
