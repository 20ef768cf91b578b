//! The first layer: pictures become vectors of patches.

use super::VitConfig;
use crate::ops;
use crate::parts::hollow;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::{Activation, Forward, Init, Pass};

/// The convolution that makes a vector of each patch.
#[derive(Module, Debug)]
pub struct Projection {
    /// `[width, channels, side of a patch, side of a patch]`.
    pub weight: Param<Tensor<4>>,
    /// `[width]`.
    pub bias: Param<Tensor<1>>,
}

/// The map of patches.
#[derive(Module, Debug)]
pub struct PatchEmbeddings {
    /// The convolution, whose stride is the side of a patch.
    pub projection: Projection,
}

/// The embeddings: pictures `[items, channels, side, side]` become `[items, 1 + patches, width]`, the class token first
/// and then the patches, row by row.
#[derive(Module, Debug)]
pub struct Embeddings {
    /// The class token, `[1, 1, width]`.
    pub cls_token: Param<Tensor<3>>,
    /// What tells places apart, `[1, 1 + patches, width]`.
    pub position_embeddings: Param<Tensor<3>>,
    /// Of the patches.
    pub patch_embeddings: PatchEmbeddings,
    /// The side of a picture.
    pub side: usize,
    /// The probability of dropout.
    pub dropout: f64,
    /// The standard deviation of first values.
    pub deviation: f64,
}

impl Embeddings {
    /// The layer without values.
    pub fn new(config: &VitConfig) -> Self {
        let (width, patch) = (config.hidden_size, config.patch_size);
        let projection =
            Projection { weight: hollow([width, config.num_channels, patch, patch]), bias: hollow([width]) };
        Self {
            cls_token: hollow([1, 1, width]),
            position_embeddings: hollow([1, 1 + config.patches(), width]),
            patch_embeddings: PatchEmbeddings { projection },
            side: config.image_size,
            dropout: config.hidden_dropout_prob,
            deviation: config.initializer_range,
        }
    }
}

impl Projection {
    /// The vectors of the patches of pictures, `[items, patches, width]`. A convolution whose windows do not overlap is
    /// a linear map of each.
    fn forward(&self, pictures: Tensor<4>) -> Tensor<3> {
        let weight = self.weight.val();
        let ([items, channels, side, _], [width, _, patch, _]) = (pictures.dims(), weight.dims());
        let (count, pixels) = (side / patch, channels * patch * patch);
        let patches = pictures.reshape([items, channels, count, patch, count, patch]);
        let patches = patches.permute([0, 2, 4, 1, 3, 5]).reshape([items, count * count, pixels]);
        ops::linear_transposed(patches, weight.reshape([width, pixels]), Some(self.bias.val()))
    }
}

impl Forward for Embeddings {
    /// # Panics
    /// If pictures have another size than the model's.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let pictures = x.into_float::<4>();
        let [items, channels, height, width] = pictures.dims();
        let [_, colours, ..] = self.patch_embeddings.projection.weight.val().dims();
        let (expected, found) = ([colours, self.side, self.side], [channels, height, width]);
        assert!(
            found == expected,
            "the model expects pictures of shape {expected:?}, found {found:?}: resize them"
        );
        let patches = self.patch_embeddings.projection.forward(pictures);
        let token = self.cls_token.val().repeat_dim(0, items);
        let x = Tensor::cat(vec![token, patches], 1) + self.position_embeddings.val();
        Activation::of(ops::dropout(x, self.dropout, pass.site(0)))
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        if name.ends_with("bias") { Init::Zeros } else { Init::Normal(self.deviation) }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, channels, height, width] = *inputs.first()?.as_slice() else { return None };
        let [_, places, own] = self.position_embeddings.lazy_shape().dims();
        let elements = 4 * items * channels * height * width + 12 * items * places * own;
        Some((elements * size_of::<f32>()) as u64)
    }
}
