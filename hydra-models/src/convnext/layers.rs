//! The layers before the head: patch embeddings, downsampling layers, and blocks.
//!
//! Activations between layers are `[items, height, width, channels]`, so that normalizations and linear layers work on
//! rows.

use super::ConvNextConfig;
use crate::ops;
use crate::parts::{Activate, Linear, Norm, Projection, check_images, initial, uninitialized};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// The epsilon of all normalizations except the last.
const EPSILON: f64 = 1e-6;
/// The side of a block's kernels.
const SIDE: usize = 7;

/// The first layer: embeds the patches of images `[items, channels, side, side]` as `[items, height, width, channels]`.
#[derive(Module, Debug)]
pub struct ConvNextEmbeddings {
    /// A convolution whose stride is the side of a patch.
    pub patch_embeddings: Projection,
    /// The normalization.
    pub layernorm: Norm,
    /// The side of an image in pixels.
    pub side: usize,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl ConvNextEmbeddings {
    /// The layer without values.
    pub fn new(config: &ConvNextConfig) -> Self {
        let width = config.hidden_sizes[0];
        Self {
            patch_embeddings: Projection::new(config.num_channels, width, config.patch_size),
            layernorm: Norm::new(width, EPSILON),
            side: config.image_size,
            deviation: config.initializer_range,
        }
    }
}

impl Forward for ConvNextEmbeddings {
    /// # Panics
    /// If images do not have the model's size.
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let images = x.into_float::<4>();
        let ([items, _, height, width], [_, channels, patch, _]) =
            (images.dims(), self.patch_embeddings.weight.val().dims());
        check_images(&images, channels, self.side);
        let x = self.layernorm.forward(self.patch_embeddings.channels_first(images));
        let [.., channels] = x.dims();
        Activation::of(x.reshape([items, height / patch, width / patch, channels]))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, channels, height, width] = *inputs.first()?.as_slice() else { return None };
        let [own, _, patch, _] = self.patch_embeddings.weight.lazy_shape().dims();
        let places = items * (height / patch) * (width / patch);
        Some(((4 * items * channels * height * width + 12 * places * own) * size_of::<f32>()) as u64)
    }
}

/// A layer between two stages that halves height and width of `[items, height, width, channels]`.
#[derive(Module, Debug)]
pub struct Downsampling {
    /// Normalizes the previous stage's output.
    pub norm: Norm,
    /// A convolution with stride two.
    pub reduction: Projection,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl Downsampling {
    /// The layer before `stage`, without values.
    pub fn new(config: &ConvNextConfig, stage: usize) -> Self {
        let [inputs, outputs] = [config.hidden_sizes[stage - 1], config.hidden_sizes[stage]];
        Self {
            norm: Norm::new(inputs, EPSILON),
            reduction: Projection::new(inputs, outputs, 2),
            deviation: config.initializer_range,
        }
    }
}

impl Forward for Downsampling {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let x = x.into_float::<4>();
        let shape @ [items, height, width, channels] = x.dims();
        let x = self.norm.forward(x.reshape([items, height * width, channels]));
        let x = self.reduction.channels_last(x.reshape(shape));
        let [.., channels] = x.dims();
        Activation::of(x.reshape([items, height / 2, width / 2, channels]))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, height, width, channels] = *inputs.first()?.as_slice() else { return None };
        let [own, ..] = self.reduction.weight.lazy_shape().dims::<4>();
        let elements = items * height * width * (8 * channels + 2 * own);
        Some((elements * size_of::<f32>()) as u64)
    }
}

/// A depthwise convolution.
#[derive(Module, Debug)]
pub struct Depthwise {
    /// `[channels, 1, side, side]`.
    pub weight: Param<Tensor<4>>,
    /// `[channels]`.
    pub bias: Param<Tensor<1>>,
}

/// A block over `[items, height, width, channels]`: a depthwise convolution and a pointwise feed-forward network.
#[derive(Module, Debug)]
pub struct ConvNextBlock {
    /// The convolution.
    pub dwconv: Depthwise,
    /// Before the feed-forward network.
    pub layernorm: Norm,
    /// The network's first layer, to four times as many channels.
    pub pwconv1: Linear,
    /// The network's second layer.
    pub pwconv2: Linear,
    /// The layer scale: a factor per channel on the output before the residual is added, if the model has it.
    pub layer_scale_parameter: Option<Param<Tensor<1>>>,
    #[module(skip)]
    options: ConvNextOptions,
}

#[derive(Clone, Debug)]
struct ConvNextOptions {
    activate: Activate,
    /// The initial layer scale.
    scale: f64,
    /// The probability of dropping the block for an item.
    drop_path: f64,
    deviation: f64,
}

impl ConvNextBlock {
    /// Block `number` of the whole model, in `stage`, without values.
    pub fn new(config: &ConvNextConfig, stage: usize, number: usize) -> Self {
        let channels = config.hidden_sizes[stage];
        let scale = config.layer_scale_init_value;
        let options = ConvNextOptions {
            // Validation accepts only supported activations.
            activate: Activate::named(&config.hidden_act).unwrap_or(Activate::Gelu),
            scale,
            drop_path: config.drop_path(number),
            deviation: config.initializer_range,
        };
        Self {
            dwconv: Depthwise {
                weight: uninitialized([channels, 1, SIDE, SIDE]),
                bias: uninitialized([channels]),
            },
            layernorm: Norm::new(channels, EPSILON),
            pwconv1: Linear::new(channels, 4 * channels, true),
            pwconv2: Linear::new(4 * channels, channels, true),
            layer_scale_parameter: (scale > 0.0).then(|| uninitialized([channels])),
            options,
        }
    }

    /// The second layer with the layer scale folded in: the work is proportional to its weights instead of to the
    /// positions.
    fn scaled(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = (self.pwconv2.weight.val(), self.pwconv2.bias.as_ref().map(Param::val));
        match self.layer_scale_parameter.as_ref().map(Param::val) {
            Some(scale) => (weight * scale.clone().unsqueeze_dim::<2>(1), bias.map(|bias| bias * scale)),
            None => (weight, bias),
        }
    }
}

impl Forward for ConvNextBlock {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let [residual, x] = ops::fork(x.into_float::<4>());
        let shape @ [items, height, width, channels] = x.dims();
        let rows = |x: Tensor<4>| x.reshape([items, height * width, channels]);
        let inner = ops::depthwise(x, self.dwconv.weight.val(), self.dwconv.bias.val());
        let inner = self.pwconv1.forward(self.layernorm.forward(rows(inner)), pass);
        let (inner, (weight, bias)) = (self.options.activate.forward(inner), self.scaled());
        let y = match item_factors(items, self.options.drop_path, pass, &residual) {
            Some(factors) => rows(residual) + scaled(ops::linear_transposed(inner, weight, bias), factors),
            None => ops::linear_transposed_onto(rows(residual), inner, weight, bias),
        };
        Activation::of(y.reshape(shape))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        match name {
            "layer_scale_parameter" => Init::Constant(self.options.scale as f32),
            _ => initial(name, shape, self.options.deviation),
        }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, height, width, channels] = *inputs.first()?.as_slice() else { return None };
        let elements = items * height * width * 40 * channels + 16 * channels * channels;
        Some((elements * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        Some(format!("{:?}, epsilon {}", self.options, self.layernorm.epsilon))
    }
}

/// The drop path factor of each item, `F32` of shape `[items, 1, 1]`: zero, or one over the keep probability. `None` if
/// nothing is dropped.
fn item_factors(items: usize, probability: f64, pass: &Pass, like: &Tensor<4>) -> Option<Tensor<3>> {
    let mask = pass.site(0).dropout_mask(probability)?;
    let mut factors = vec![0.0; items];
    mask.fill(0, &mut factors);
    let device: Device = like.device();
    Some(Tensor::from_data(burn::tensor::TensorData::new(factors, [items, 1, 1]), (&device, DType::F32)))
}

/// `x` times the factors, rounded once.
fn scaled(x: Tensor<3>, factors: Tensor<3>) -> Tensor<3> {
    match x.dtype() {
        DType::F32 => x * factors,
        narrow => (x.cast(DType::F32) * factors).cast(narrow),
    }
}
