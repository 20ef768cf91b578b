//! Numbers for each item: the squared error and correlations.

use super::{operands, ratio};
use burn::tensor::Tensor;
use hydra_core::{Activation, Measures, Metric, Objective, Pass};

/// Numbers for each item. The last layer returns predictions `[items, numbers]`; part 0 of the targets is the labels of
/// the same shape. The loss is the mean over items and numbers of the squared error.
///
/// Metrics, computed in `f64` from the predictions of all items: `mse`; `pearson` and `spearman`, the means over the
/// numbers of an item of the correlation of predictions and labels, and of their ranks, 0 where either is constant; ties
/// have their mean rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regression {
    /// The numbers of an item.
    pub numbers: usize,
}

impl Objective for Regression {
    fn name(&self) -> String {
        format!("regression of {}", self.numbers)
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let (predicted, labels) = operands("predictions", outputs, pass);
        let error = predicted - labels;
        (error.clone() * error).mean_dim(1).mean_dim(0).reshape([1])
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric::lower("mse"), Metric::higher("pearson"), Metric::higher("spearman")]
    }

    fn measure(&self, outputs: &Activation, pass: &Pass) -> Measures {
        let (predicted, labels) = operands("predictions", outputs, pass);
        Measures { sums: None, rows: Some(Tensor::cat(vec![predicted, labels], 1)) }
    }

    fn values(&self, _: &[f64], rows: &[f32], _: u64) -> Vec<f64> {
        let column =
            |at: usize| rows.iter().skip(at).step_by(2 * self.numbers).map(|x| f64::from(*x)).collect();
        let columns: Vec<(Vec<f64>, Vec<f64>)> =
            (0..self.numbers).map(|at| (column(at), column(self.numbers + at))).collect();
        let mean = |of: &dyn Fn(&[f64], &[f64]) -> f64| {
            ratio(columns.iter().map(|(x, y)| of(x, y)).sum(), columns.len() as f64)
        };
        let ranked = |x: &[f64], y: &[f64]| pearson(&ranks(x), &ranks(y));
        vec![mean(&squared_error), mean(&pearson), mean(&ranked)]
    }
}

fn squared_error(x: &[f64], y: &[f64]) -> f64 {
    ratio(x.iter().zip(y).map(|(x, y)| (x - y) * (x - y)).sum(), x.len() as f64)
}

/// The correlation of two columns; 0 where either is constant.
fn pearson(x: &[f64], y: &[f64]) -> f64 {
    let mean = |of: &[f64]| ratio(of.iter().sum(), of.len() as f64);
    let (x_mean, y_mean) = (mean(x), mean(y));
    let product = |x: &[f64], y: &[f64], (a, b): (f64, f64)| {
        x.iter().zip(y).map(|(x, y)| (x - a) * (y - b)).sum::<f64>()
    };
    let (xx, yy) = (product(x, x, (x_mean, x_mean)), product(y, y, (y_mean, y_mean)));
    ratio(product(x, y, (x_mean, y_mean)), xx.sqrt() * yy.sqrt())
}

/// The rank of each number, from 1; equal numbers have the mean of their ranks.
fn ranks(of: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..of.len()).collect();
    order.sort_by(|a, b| of[*a].total_cmp(&of[*b]));
    let mut ranks = vec![0.0; of.len()];
    let mut before = 0;
    for tied in order.chunk_by(|a, b| of[*a] == of[*b]) {
        // The mean of `before + 1` to `before + tied.len()`.
        let rank = before as f64 + (tied.len() + 1) as f64 / 2.0;
        tied.iter().for_each(|at| ranks[*at] = rank);
        before += tied.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::values;
    use burn::tensor::Device;

    #[test]
    fn the_loss_is_the_mean_squared_error() {
        let device = Device::flex().autodiff();
        let tensor = |rows: [[f32; 2]; 2]| Tensor::<2>::from_data(rows, &device);
        let pass = Pass::evaluate(Activation::of(tensor([[1.0, 2.0], [3.0, 4.0]])));
        let outputs = Activation::of(tensor([[1.5, 2.0], [2.0, 4.0]]));
        let objective = Regression { numbers: 2 };
        assert_eq!(values(&objective.loss(&outputs, &pass)), [(0.25 + 1.0) / 4.0]);
        let rows = objective.measure(&outputs, &pass).rows.unwrap();
        assert_eq!(rows.dims(), [2, 4]);
        let rows = rows.into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(rows, [1.5, 2.0, 1.0, 2.0, 2.0, 4.0, 3.0, 4.0]);
        let found = objective.values(&[], &rows, 2);
        let expected = [(0.25 + 1.0) / 4.0, 1.0, 1.0];
        assert!(found.iter().zip(expected).all(|(found, of)| (found - of).abs() < 1e-12), "{found:?}");
    }

    #[test]
    fn correlations_are_those_of_numpy() {
        // `corrcoef` of these columns, and of their mean ranks.
        let (x, y) = ([1.0_f32, 2.0, 2.0, 4.0, 3.0], [2.0_f32, 1.0, 3.0, 3.0, 5.0]);
        let rows: Vec<f32> = x.iter().zip(&y).flat_map(|(x, y)| [*x, *y]).collect();
        let [mse, pearson, spearman] = Regression { numbers: 1 }.values(&[], &rows, 5)[..] else {
            panic!("three metrics")
        };
        assert_eq!(mse, 8.0 / 5.0);
        assert!((pearson - 0.502_615_536_6).abs() < 1e-9, "{pearson}");
        assert!((spearman - 0.605_263_157_9).abs() < 1e-9, "{spearman}");
        let constant: Vec<f32> = y.iter().flat_map(|y| [1.0, *y]).collect();
        assert_eq!(Regression { numbers: 1 }.values(&[], &constant, 5)[1..], [0.0, 0.0]);
    }
}
