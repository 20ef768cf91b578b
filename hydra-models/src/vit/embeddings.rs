//! The first layer: embeds the patches of images.

use super::VitConfig;
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::{Projection, check_images, initial, uninitialized};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::{Activation, Forward, Init, Pass};

/// The patch projection.
#[derive(Module, Debug)]
pub struct PatchEmbeddings {
    /// A convolution whose stride is the side of a patch.
    pub projection: Projection,
}

/// The embeddings: images `[items, channels, side, side]` become `[items, 1 + patches, width]`, the class token first,
/// then the patches row by row.
#[derive(Module, Debug)]
pub struct VitEmbeddings {
    /// The class token, `[1, 1, width]`.
    pub cls_token: Param<Tensor<3>>,
    /// Position embeddings, `[1, 1 + patches, width]`.
    pub position_embeddings: Param<Tensor<3>>,
    /// The patch projection.
    pub patch_embeddings: PatchEmbeddings,
    /// The side of an image in pixels.
    pub side: usize,
    /// The dropout probability.
    pub dropout: f64,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl VitEmbeddings {
    /// The layer without values.
    pub fn new(config: &VitConfig) -> Self {
        let (width, patch) = (config.hidden_size, config.patch_size);
        let projection = Projection::new(config.num_channels, width, patch);
        Self {
            cls_token: uninitialized([1, 1, width]),
            position_embeddings: uninitialized([1, 1 + config.patches(), width]),
            patch_embeddings: PatchEmbeddings { projection },
            side: config.image_size,
            dropout: config.hidden_dropout_prob,
            deviation: config.initializer_range,
        }
    }
}

impl Adaptable for VitEmbeddings {}

impl Forward for VitEmbeddings {
    /// # Panics
    /// If images do not have the model's size.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let images = x.into_float::<4>();
        let ([items, ..], [_, channels, ..]) =
            (images.dims(), self.patch_embeddings.projection.weight.val().dims());
        check_images(&images, channels, self.side);
        let patches = self.patch_embeddings.projection.channels_first(images);
        let token = self.cls_token.val().repeat_dim(0, items);
        let x = Tensor::cat(vec![token, patches], 1) + self.position_embeddings.val();
        Activation::of(ops::dropout(x, self.dropout, pass.site(0)))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, channels, height, width] = *inputs.first()?.as_slice() else { return None };
        let [_, places, own] = self.position_embeddings.lazy_shape().dims();
        let elements = 4 * items * channels * height * width + 12 * items * places * own;
        Some((elements * size_of::<f32>()) as u64)
    }
}
