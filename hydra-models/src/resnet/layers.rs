//! The layers before the head: the first convolution with its pooling, and blocks. Activations between layers are `[items,
//! channels, height, width]`.

use super::ResNetConfig;
use super::config::REDUCTION;
use crate::parts::{Activate, BatchNorm, check_images, uninitialized};
use burn::module::{Module, Param};
use burn::tensor::ops::{ConvOptions, MaxPoolOptions};
use burn::tensor::{Tensor, module};
use hydra_core::{Activation, Forward, Init, Pass};

/// A convolution without a bias, padded so that a stride of one keeps the size.
#[derive(Module, Debug)]
pub struct Convolution {
    /// `[out, in, side, side]`.
    pub weight: Param<Tensor<4>>,
    /// The stride along both dimensions.
    pub stride: usize,
}

impl Convolution {
    /// A convolution without values.
    pub fn new(inputs: usize, outputs: usize, side: usize, stride: usize) -> Self {
        Self { weight: uninitialized([outputs, inputs, side, side]), stride }
    }

    /// Convolves `[items, in, height, width]`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let weight = self.weight.val();
        let [.., side] = weight.dims();
        let options = ConvOptions::new([self.stride; 2], [side / 2; 2], [1, 1], 1);
        module::conv2d(x, weight, None, options)
    }

    /// The elements of its output and the size of its feature maps, for items of this size.
    fn elements(&self, items: usize, [height, width]: [usize; 2]) -> (usize, [usize; 2]) {
        let [outputs, ..] = self.weight.lazy_shape().dims::<4>();
        let [height, width] = [height, width].map(|side| side.div_ceil(self.stride));
        (items * outputs * height * width, [height, width])
    }
}

/// A convolution and its batch normalization.
#[derive(Module, Debug)]
pub struct ConvLayer {
    /// The convolution.
    pub convolution: Convolution,
    /// The normalization.
    pub normalization: BatchNorm,
}

impl ConvLayer {
    /// A layer without weights of the convolution.
    pub fn new(inputs: usize, outputs: usize, side: usize, stride: usize) -> Self {
        Self {
            convolution: Convolution::new(inputs, outputs, side, stride),
            normalization: BatchNorm::new(outputs),
        }
    }

    /// The normalized convolution, without an activation function.
    pub fn forward(&self, x: Tensor<4>, pass: &Pass) -> Tensor<4> {
        self.normalization.forward(self.convolution.forward(x), pass)
    }
}

fn activated(x: Tensor<4>, activate: Activate) -> Tensor<4> {
    let shape @ [items, channels, height, width] = x.dims();
    activate.forward(x.reshape([items, channels, height * width])).reshape(shape)
}

/// The activation function of a configuration; validation accepts only supported ones.
fn activation(config: &ResNetConfig) -> Activate {
    Activate::named(&config.hidden_act).unwrap_or(Activate::Relu)
}

/// The first layer: a convolution of 7 x 7 with stride two, and a maximum over 3 x 3 with stride two.
#[derive(Module, Debug)]
pub struct Embedder {
    /// The convolution.
    pub embedder: ConvLayer,
    /// The side of an image in pixels.
    pub side: usize,
    #[module(skip)]
    activate: Activate,
}

impl Embedder {
    /// The layer without weights.
    pub fn new(config: &ResNetConfig) -> Self {
        let embedder = ConvLayer::new(config.num_channels, config.embedding_size, 7, 2);
        Self { embedder, side: config.image_side(), activate: activation(config) }
    }
}

impl Forward for Embedder {
    /// # Panics
    /// If images do not have the model's size.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let images = x.into_float::<4>();
        let [_, channels, ..] = self.embedder.convolution.weight.dims();
        check_images(&images, channels, self.side);
        let x = activated(self.embedder.forward(images, pass), self.activate);
        let pool = MaxPoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([1, 1]);
        Activation::of(module::max_pool2d(x, pool))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        init(name, shape)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, channels, height, width] = *inputs.first()?.as_slice() else { return None };
        let (own, _) = self.embedder.convolution.elements(items, [height, width]);
        // The windows of 7 x 7 are a matrix while the convolution's weight gets its gradient.
        let windows = 49 * items * channels * height.div_ceil(2) * width.div_ceil(2);
        Some(((8 * own + 4 * items * channels * height * width + windows) * size_of::<f32>()) as u64)
    }
}

/// A block with a residual connection around its convolutions (He et al., 2016).
#[derive(Module, Debug)]
pub struct ResNetBlock {
    /// The shortcut, a convolution of 1 x 1, if the shape changes.
    pub shortcut: Option<ConvLayer>,
    /// The convolutions: two of 3 x 3, or one between two of 1 x 1.
    pub layer: Vec<ConvLayer>,
    #[module(skip)]
    activate: Activate,
}

impl ResNetBlock {
    /// Block `number` of `stage`, without weights.
    pub fn new(config: &ResNetConfig, stage: usize, number: usize) -> Self {
        let outputs = config.hidden_sizes[stage];
        let (inputs, stride) = match number {
            0 => (config.inputs(stage), config.stride(stage)),
            _ => (outputs, 1),
        };
        let shortcut = (inputs != outputs || stride != 1).then(|| ConvLayer::new(inputs, outputs, 1, stride));
        let layer = match config.has_bottlenecks() {
            true => {
                let inner = outputs / REDUCTION;
                let [first, second] = if config.downsample_in_bottleneck { [stride, 1] } else { [1, stride] };
                vec![
                    ConvLayer::new(inputs, inner, 1, first),
                    ConvLayer::new(inner, inner, 3, second),
                    ConvLayer::new(inner, outputs, 1, 1),
                ]
            }
            false => vec![ConvLayer::new(inputs, outputs, 3, stride), ConvLayer::new(outputs, outputs, 3, 1)],
        };
        Self { shortcut, layer, activate: activation(config) }
    }
}

impl Forward for ResNetBlock {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let [residual, x] = crate::ops::fork(x.into_float::<4>());
        let last = self.layer.len() - 1;
        let inner = self.layer.iter().enumerate().fold(x, |x, (index, layer)| {
            let x = layer.forward(x, pass);
            // Those within a block are ReLUs in Transformers, whatever `hidden_act` is.
            if index < last { activated(x, Activate::Relu) } else { x }
        });
        let residual = match &self.shortcut {
            Some(shortcut) => shortcut.forward(residual, pass),
            None => residual,
        };
        Activation::of(activated(inner + residual, self.activate))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        init(name, shape)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, channels, height, width] = *inputs.first()?.as_slice() else { return None };
        let (mut elements, mut size, mut read) = (0, [height, width], items * channels * height * width);
        for layer in &self.layer {
            let [.., side] = layer.convolution.weight.lazy_shape().dims::<4>();
            let (own, next) = layer.convolution.elements(items, size);
            elements += 8 * own + 2 * read * side * side;
            (size, read) = (next, own);
        }
        Some(((elements + 4 * read) * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        let strides: Vec<usize> = self.layer.iter().map(|layer| layer.convolution.stride).collect();
        Some(format!("{:?}, strides {strides:?}", self.activate))
    }
}

/// The initial weights of parameters, by name, as in Transformers.
fn init(name: &str, shape: &[usize]) -> Init {
    match shape {
        // Kaiming's for ReLUs, by the number of outputs (He et al., "Delving Deep into Rectifiers", 2015).
        [outputs, _, height, width] => Init::Normal((2.0 / (outputs * height * width) as f64).sqrt()),
        _ if name.ends_with("running_var") || name.ends_with("normalization.weight") => Init::Ones,
        _ => Init::Zeros,
    }
}
