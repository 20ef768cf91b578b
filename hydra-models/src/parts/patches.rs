//! Convolutions without overlapping windows.

use super::uninitialized;
use crate::ops;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// A convolution whose stride equals the side of its kernels: a linear layer over each window. Rows and columns beyond
/// the last whole window are ignored.
#[derive(Module, Debug)]
pub struct Projection {
    /// `[width, channels, window side, window side]`.
    pub weight: Param<Tensor<4>>,
    /// `[width]`.
    pub bias: Param<Tensor<1>>,
}

impl Projection {
    /// A convolution without values.
    pub fn new(channels: usize, width: usize, side: usize) -> Self {
        Self { weight: uninitialized([width, channels, side, side]), bias: uninitialized([width]) }
    }

    /// The vectors `[items, windows, width]` of the windows of `[items, channels, height, width]`, row by row.
    pub fn channels_first(&self, x: Tensor<4>) -> Tensor<3> {
        let [_, channels, side, _] = self.weight.val().dims();
        let x = whole(whole(x, 2, side), 3, side);
        let [items, _, height, width] = x.dims();
        let (rows, columns) = (height / side, width / side);
        let windows = x.reshape([items, channels, rows, side, columns, side]).permute([0, 2, 4, 1, 3, 5]);
        self.map(windows.reshape([items, rows * columns, channels * side * side]))
    }

    /// The vectors `[items, windows, width]` of the windows of `[items, height, width, channels]`, row by row.
    pub fn channels_last(&self, x: Tensor<4>) -> Tensor<3> {
        let [_, channels, side, _] = self.weight.val().dims();
        let x = whole(whole(x, 1, side), 2, side);
        let [items, height, width, _] = x.dims();
        let (rows, columns) = (height / side, width / side);
        let windows = x.reshape([items, rows, side, columns, side, channels]).permute([0, 1, 3, 5, 2, 4]);
        self.map(windows.reshape([items, rows * columns, channels * side * side]))
    }

    /// Maps windows `[items, windows, channels * side * side]`.
    fn map(&self, windows: Tensor<3>) -> Tensor<3> {
        let weight = self.weight.val();
        let [width, channels, side, _] = weight.dims();
        ops::linear_transposed(
            windows,
            weight.reshape([width, channels * side * side]),
            Some(self.bias.val()),
        )
    }
}

/// Checks the shape of images `[items, channels, height, width]`.
///
/// # Panics
/// If they do not have the model's channels or its size.
#[track_caller]
pub(crate) fn check_images(images: &Tensor<4>, channels: usize, side: usize) {
    let ([_, found @ ..], expected) = (images.dims(), [channels, side, side]);
    assert!(
        found == expected,
        "the model expects images of shape {expected:?}, found {found:?}: resize them"
    );
}

/// Drops the remainder after the last whole window along a dimension.
fn whole(x: Tensor<4>, dimension: usize, side: usize) -> Tensor<4> {
    let found = x.dims()[dimension];
    match found % side {
        0 => x,
        rest => x.narrow(dimension, 0, found - rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{distance, normal, values};
    use burn::tensor::{module, ops::ConvOptions};

    #[test]
    fn windows_are_those_of_a_convolution_in_either_order() {
        for (height, width) in [(8, 12), (9, 11), (4, 4)] {
            let (weight, bias) = (normal(2, [5, 3, 4, 4]), normal(3, [5]));
            let map = Projection {
                weight: Param::from_tensor(weight.clone()),
                bias: Param::from_tensor(bias.clone()),
            };
            let x = normal(1, [2, 3, height, width]);
            let options = ConvOptions::new([4, 4], [0, 0], [1, 1], 1);
            let expected = module::conv2d(x.clone(), weight, Some(bias), options);
            let expected = values(&expected.reshape([2, 5, -1]).swap_dims(1, 2));
            let (first, last) = (map.channels_first(x.clone()), map.channels_last(x.permute([0, 2, 3, 1])));
            assert!(distance(&values(&first), &expected) < 1e-6);
            assert_eq!(values(&first), values(&last));
        }
    }
}
