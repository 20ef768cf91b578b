//! A small residual network over images, without running statistics.

use crate::ModelError;
use crate::objective::SingleLabel;
use crate::synthetic::{self, recorded_init};
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{Device, Tensor, activation};
use hydra_core::{Activation, Batch, Chain, Dataset, DatasetError, Forward, Key, Pass};

/// A 3x3 convolution, a group normalization and an optional ReLU.
#[derive(Module, Debug)]
pub struct ConvNorm {
    /// The convolution; it has no bias because the normalization would cancel it.
    pub conv: Conv2d,
    /// The normalization.
    pub norm: GroupNorm,
}

impl ConvNorm {
    fn new(inputs: usize, outputs: usize, stride: usize) -> Self {
        let conv = Conv2dConfig::new([inputs, outputs], [3, 3])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_bias(false);
        let norm = GroupNormConfig::new(groups(outputs), outputs);
        Self { conv: conv.init(&Device::flex()), norm: norm.init(&Device::flex()) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

/// Groups of four channels if that divides evenly, else one group.
fn groups(channels: usize) -> usize {
    if channels.is_multiple_of(4) { channels / 4 } else { 1 }
}

/// A layer that changes the number of channels or halves the image: `[items, in, h, w]` to `[items, out, h / stride, w
/// / stride]`.
#[derive(Module, Debug)]
pub struct Stem {
    /// Convolution and normalization.
    pub body: ConvNorm,
}

impl Forward for Stem {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(activation::relu(self.body.forward(x.into_float::<4>())))
    }

    recorded_init!();
}

/// Two convolutions with a residual connection around them (He et al., 2016); the shape is unchanged.
#[derive(Module, Debug)]
pub struct Residual {
    /// The first convolution.
    pub first: ConvNorm,
    /// The second.
    pub second: ConvNorm,
}

impl Forward for Residual {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let x = x.into_float::<4>();
        let y = activation::relu(self.first.forward(x.clone()));
        Activation::of(activation::relu(x + self.second.forward(y)))
    }

    recorded_init!();
}

/// The last layer: global average pooling and a linear layer, `[items, channels, h, w]` to logits `[items, classes]`.
#[derive(Module, Debug)]
pub struct Pool {
    /// The classifier.
    pub linear: Linear,
}

impl Forward for Pool {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let x = x.into_float::<4>();
        let [items, channels, height, width] = x.dims();
        let mean = x.reshape([items, channels, height * width]).mean_dim(2).squeeze_dim::<2>(2);
        Activation::of(self.linear.forward(mean))
    }

    recorded_init!();
}

/// The shape of a residual network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CnnConfig {
    /// Channels of the input images.
    pub inputs: usize,
    /// Channels of the first stage; each further stage doubles them and halves the image.
    pub channels: usize,
    /// The number of stages.
    pub stages: usize,
    /// Residual layers in each stage.
    pub blocks: usize,
    /// The number of classes.
    pub classes: usize,
}

impl Default for CnnConfig {
    fn default() -> Self {
        Self { inputs: 3, channels: 16, stages: 3, blocks: 2, classes: 10 }
    }
}

/// The network as a chain: layers `stage.{s}.stem` and `stage.{s}.block.{b}`, then `pool`.
///
/// # Errors
/// A number other than `blocks` is zero.
pub fn chain(config: CnnConfig) -> Result<Chain, ModelError> {
    let CnnConfig { inputs, channels, stages, blocks, classes } = config;
    let numbers = [("inputs", inputs), ("channels", channels), ("stages", stages), ("classes", classes)];
    if let Some((name, _)) = numbers.into_iter().find(|(_, n)| *n == 0) {
        return Err(ModelError::Config { name, found: "0".to_owned(), expected: "at least 1".to_owned() });
    }
    let mut chain = Chain::builder("cnn");
    let (mut from, mut to) = (inputs, channels);
    for stage in 0..stages {
        let stride = if stage == 0 { 1 } else { 2 };
        chain = chain.layer(format!("stage.{stage}.stem"), Stem { body: ConvNorm::new(from, to, stride) });
        for block in 0..blocks {
            let residual = Residual { first: ConvNorm::new(to, to, 1), second: ConvNorm::new(to, to, 1) };
            chain = chain.layer(format!("stage.{stage}.block.{block}"), residual);
        }
        (from, to) = (to, 2 * to);
    }
    let linear = LinearConfig::new(from, classes).init(&Device::flex());
    Ok(chain.layer("pool", Pool { linear }).objective(SingleLabel { classes }).build()?)
}

/// Square images of waves in noise; the waves' direction is the class. Deterministic for a seed.
#[derive(Clone, Debug)]
pub struct Waves {
    key: Key,
    images: usize,
    channels: usize,
    side: usize,
    classes: usize,
}

impl Waves {
    /// This many images of `channels` by `side` by `side` with `classes` directions, at least one.
    pub fn new(seed: u64, images: usize, channels: usize, side: usize, classes: usize) -> Self {
        Self { key: Key::new(seed).fold(0x7761_7665), images, channels, side, classes: classes.max(1) }
    }

    fn image(&self, index: usize, out: &mut Vec<f32>) -> i32 {
        let class = index % self.classes;
        let key = self.key.fold(index as u64);
        let (sin, cos) = (std::f64::consts::PI * class as f64 / self.classes as f64).sin_cos();
        let noise = key.fold(1);
        for channel in 0..self.channels {
            let phase = std::f64::consts::TAU * key.uniform(channel as u64);
            for pixel in 0..self.side * self.side {
                let (x, y) = ((pixel % self.side) as f64, (pixel / self.side) as f64);
                let wave = (1.2 * (x * cos + y * sin) + phase).sin();
                let place = channel * self.side * self.side + pixel;
                out.push((wave + 0.3 * noise.normal(place as u64)) as f32);
            }
        }
        class as i32
    }
}

impl Dataset for Waves {
    fn name(&self) -> &str {
        "waves"
    }

    fn len(&self) -> usize {
        self.images
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let shape = [self.channels, self.side, self.side];
        synthetic::batch("waves", self.images, &shape, items, |index, out| self.image(index, out))
    }

    fn unit(&self) -> &'static str {
        "images"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::testing::{backward, bf16_agrees, descend, shards_agree, with_threads};
    use hydra_core::{FloatType, Init};

    fn small() -> Chain {
        chain(CnnConfig { inputs: 2, channels: 4, stages: 2, blocks: 1, classes: 3 }).unwrap()
    }

    #[test]
    fn the_network_learns_the_directions() {
        let (first, last) = descend(&small(), &Waves::new(1, 24, 2, 8, 3), 150, 0.3);
        assert!(last < 0.5 * first, "{first} to {last}");
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        let config = CnnConfig { inputs: 2, channels: 16, stages: 2, blocks: 1, classes: 3 };
        let (chain, data) = (chain(config).unwrap(), Waves::new(1, 12, 2, 16, 3));
        let batch = data.batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap();
        shards_agree(&chain, &batch, &[0, 1, 2, 4, 5]);
        let one = with_threads(1, || backward(&chain, &batch));
        assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
        assert!(one.1.iter().all(|g| g.iter().any(|x| *x != 0.0)), "the loss reaches every parameter");
    }

    #[test]
    fn the_network_computes_in_bf16() {
        let config = CnnConfig { inputs: 2, channels: 16, stages: 2, blocks: 1, classes: 3 };
        let (chain, data) = (|| chain(config).unwrap(), Waves::new(1, 12, 2, 16, 3));
        bf16_agrees(chain, &data.batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap(), &[0, 1, 2, 4, 5]);
        let small = small().with_float_type(FloatType::Bf16);
        let (first, last) = descend(&small, &Waves::new(1, 24, 2, 8, 3), 150, 0.3);
        assert!(last < 0.5 * first, "{first} to {last}");
    }

    #[test]
    fn images_are_a_function_of_the_seed() {
        let inputs = |seed| Waves::new(seed, 9, 1, 4, 3).batch(&[5]).unwrap().inputs;
        assert_eq!(inputs(1), inputs(1));
        assert_ne!(inputs(1), inputs(2));
        assert_eq!(inputs(1).parts[0].shape, [1, 1, 4, 4]);
    }

    #[test]
    fn numbers_of_zero_are_refused() {
        assert!(chain(CnnConfig { classes: 0, ..CnnConfig::default() }).is_err());
        assert!(chain(CnnConfig { stages: 0, ..CnnConfig::default() }).is_err());
        assert_eq!(chain(CnnConfig::default()).unwrap().len(), 10);
    }

    #[test]
    fn first_values_are_those_that_recorded_runs_began_with() {
        for param in small().buffers().iter().flat_map(|buffer| &buffer.params) {
            assert_eq!(param.init, Init::default_for(&param.name, &param.shape), "{}", param.name);
        }
    }
}
