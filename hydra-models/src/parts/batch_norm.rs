//! Batch normalization with running statistics.

use crate::ops;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Tensor};
use hydra_core::{Pass, State, StateRule};

/// Batch normalization (Ioffe and Szegedy, 2015), with the parameters, the running statistics and the arithmetic of PyTorch's
/// `BatchNorm1d` to `BatchNorm3d`.
///
/// A training pass normalizes by the statistics of its microbatch, and the running statistics follow them, once for each
/// microbatch. Evaluations normalize by the running statistics, and so do the training passes of a frozen one, which keeps
/// them. Burn's `BatchNorm` updates its statistics in every forward pass and is refused.
///
/// ```
/// # use burn::module::Module;
/// # use burn::nn::conv::{Conv2d, Conv2dConfig};
/// # use burn::tensor::{Device, activation};
/// # use hydra_core::{Activation, Forward, Pass};
/// # use hydra_models::BatchNorm;
/// #[derive(Module, Debug)]
/// struct Hidden {
///     conv: Conv2d,
///     norm: BatchNorm,
/// }
///
/// impl Forward for Hidden {
///     fn forward(&self, x: Activation, pass: &Pass) -> Activation {
///         let x = self.conv.forward(x.into_float::<4>());
///         Activation::of(activation::relu(self.norm.forward(x, pass)))
///     }
/// }
///
/// let conv = Conv2dConfig::new([3, 8], [3, 3]).with_bias(false).init(&Device::flex());
/// let hidden = Hidden { conv, norm: BatchNorm::new(8) };
/// # let _ = hidden;
/// ```
#[derive(Module, Debug)]
pub struct BatchNorm {
    /// The factor on each channel, `[channels]`; 1 at first.
    pub weight: Param<Tensor<1>>,
    /// What is added to each channel, `[channels]`; 0 at first.
    pub bias: Param<Tensor<1>>,
    /// The running means, `[channels]`; 0 at first.
    pub running_mean: State<1>,
    /// The running variances, with Bessel's correction, `[channels]`; 1 at first.
    pub running_var: State<1>,
    /// The number of microbatches that the statistics have seen, `[1]`. It is exact up to 2^24.
    pub num_batches_tracked: State<1>,
    /// The epsilon added to the variance.
    pub epsilon: f64,
}

impl BatchNorm {
    /// A normalization of this many channels, with PyTorch's defaults: epsilon 1e-5 and momentum 0.1.
    pub fn new(channels: usize) -> Self {
        Self::with(channels, 1e-5, 0.1)
    }

    /// A normalization with this epsilon and momentum, the weight of a microbatch in the running statistics.
    pub fn with(channels: usize, epsilon: f64, momentum: f64) -> Self {
        let filled = |with: Initializer, len: usize| with.init::<1, _>([len], &Device::flex());
        let average = |with| State::new(filled(with, channels), StateRule::average(momentum));
        Self {
            weight: filled(Initializer::Ones, channels),
            bias: filled(Initializer::Zeros, channels),
            running_mean: average(Initializer::Zeros),
            running_var: average(Initializer::Ones),
            num_batches_tracked: State::new(filled(Initializer::Zeros, 1), StateRule::SUM),
            epsilon,
        }
    }

    /// Normalizes each channel of `[items, channels, ..]`.
    ///
    /// # Panics
    /// If the second dimension is not the number of channels, or a training pass has a single value for a channel.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, pass: &Pass) -> Tensor<D> {
        let (shape, [channels]) = (x.dims(), self.weight.dims());
        assert!(
            D > 1 && shape[1] == channels,
            "a batch normalization expects a shape [items, {channels}, ..], found {shape:?}"
        );
        let x = x.reshape([shape[0], channels, shape[2..].iter().product()]);
        match self.running_mean.is_observed(pass) {
            true => self.by_batch(x).reshape(shape),
            false => self.by_running(x).reshape(shape),
        }
    }

    fn by_batch(&self, x: Tensor<3>) -> Tensor<3> {
        let (y, of) = ops::batch_norm(x, self.weight.val(), self.bias.val(), self.epsilon);
        let one = Tensor::ones([1], &of.mean.device());
        let y = self.running_mean.observe(y, of.mean);
        let y = self.running_var.observe(y, of.unbiased);
        self.num_batches_tracked.observe(y, one)
    }

    /// Normalizes by the running statistics, rounded once.
    fn by_running(&self, x: Tensor<3>) -> Tensor<3> {
        let stored = x.dtype();
        let wide = |tensor: Tensor<1>| tensor.cast(DType::F32);
        let deviation = (wide(self.running_var.val()) + self.epsilon).sqrt();
        let scale = wide(self.weight.val()) / deviation;
        let shift = wide(self.bias.val()) - wide(self.running_mean.val()) * scale.clone();
        let channel = |of: Tensor<1>| of.reshape([1, -1, 1]);
        (x.cast(DType::F32) * channel(scale) + channel(shift)).cast(stored)
    }
}
