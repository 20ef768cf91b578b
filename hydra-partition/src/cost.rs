//! What layers cost, and what a range of them needs on a device.

use hydra_core::Chain;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What one layer costs for one microbatch. Bytes are those on the device.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// The layer's name.
    pub name: String,
    /// Bytes of the images that the layer names, as if it were alone.
    pub param_bytes: u64,
    /// Bytes of its parameters' gradients.
    pub gradient_bytes: u64,
    /// Bytes of its input, float and integer tensors.
    pub input_bytes: u64,
    /// Bytes of its output, float and integer tensors.
    pub output_bytes: u64,
    /// Bytes of the gradient of its input: the float tensors', and none up to the first trained layer,
    /// where backward passes end.
    pub input_gradient_bytes: u64,
    /// Bytes of the gradient of its output: the float tensors', and none where nothing upstream is trained
    /// or the output is the loss.
    pub output_gradient_bytes: u64,
    /// Bytes of state that the graph holds after the layer's tracked forward, beyond input, output and
    /// parameters; for the last layer also the targets.
    pub saved_bytes: u64,
    /// The peak of forward and backward beyond parameters, gradients, boundaries and saved state.
    pub workspace_bytes: u64,
    /// Seconds of the forward without a graph.
    pub forward_s: f64,
    /// Seconds of the recomputed forward with the backward; zero for layers that have none.
    pub backward_s: f64,
}

/// An image that several layers name. A shard that holds several of them promotes it once.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TiedImage {
    /// Bytes of the image.
    pub bytes: u64,
    /// The layers that name it, ascending.
    pub layers: Vec<usize>,
}

/// The costs of a chain's layers: what a pilot pass finds, and all that cutting needs to know.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// The layers, in chain order.
    pub layers: Vec<LayerCost>,
    /// The images that count once for all layers of a shard.
    pub tied: Vec<TiedImage>,
    /// Bytes that stay in use on the device while nothing of a model is there, such as the buffers that
    /// its threads keep for matrix products. Every shard needs them.
    pub standing_bytes: u64,
    /// Whether memory was measured; otherwise it is estimated from shapes.
    pub measured: bool,
}

/// What a range of layers needs on a device when it is one shard.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShardNeeds {
    /// Bytes that are in use whatever is on the device.
    pub standing_bytes: u64,
    /// Bytes of the images that the layers name, a shared one once.
    pub param_bytes: u64,
    /// Bytes of all parameters' gradients.
    pub gradient_bytes: u64,
    /// Bytes of the shard's input.
    pub input_bytes: u64,
    /// Bytes of all layers' outputs: those inside the shard are alive until its backward.
    pub output_bytes: u64,
    /// Bytes of all layers' saved state.
    pub saved_bytes: u64,
    /// The largest sum, over the layers, of workspace and of the gradients of input and output.
    pub workspace_bytes: u64,
    /// Seconds of the forward.
    pub forward_s: f64,
    /// Seconds of the backward.
    pub backward_s: f64,
}

impl ShardNeeds {
    /// The predicted peak in bytes while the shard computes: the sum of all the parts. It counts gradients
    /// and saved state as if both were whole at once, which is a bound on what a backward pass holds.
    pub fn need_bytes(&self) -> u64 {
        let parts = [
            self.standing_bytes,
            self.param_bytes,
            self.gradient_bytes,
            self.input_bytes,
            self.output_bytes,
            self.saved_bytes,
            self.workspace_bytes,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// The needs of the range that starts at `first` and ends with `layer`, from those (`self`) of the
    /// range that ends before it. What a longer range needs is never less.
    pub(crate) fn with(self, profile: &Profile, first: usize, layer: usize) -> Self {
        let cost = &profile.layers[layer];
        let gradients = cost.input_gradient_bytes.saturating_add(cost.output_gradient_bytes);
        let params = cost.param_bytes.saturating_sub(profile.resident_already(first, layer));
        Self {
            standing_bytes: profile.standing_bytes,
            param_bytes: self.param_bytes.saturating_add(params),
            gradient_bytes: self.gradient_bytes.saturating_add(cost.gradient_bytes),
            input_bytes: if layer == first { cost.input_bytes } else { self.input_bytes },
            output_bytes: self.output_bytes.saturating_add(cost.output_bytes),
            saved_bytes: self.saved_bytes.saturating_add(cost.saved_bytes),
            workspace_bytes: self.workspace_bytes.max(cost.workspace_bytes.saturating_add(gradients)),
            forward_s: self.forward_s + cost.forward_s,
            backward_s: self.backward_s + cost.backward_s,
        }
    }
}

impl Profile {
    /// The images of `chain` that several layers name.
    pub fn tied_images(chain: &Chain) -> Vec<TiedImage> {
        let tied = chain.images().iter().filter(|image| image.layers.len() > 1);
        tied.map(|image| TiedImage { bytes: image.bytes(), layers: image.layers.clone() }).collect()
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// What these layers need as one shard.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn needs(&self, layers: Range<usize>) -> ShardNeeds {
        let first = layers.start;
        layers.fold(ShardNeeds::default(), |needs, layer| needs.with(self, first, layer))
    }

    /// Bytes of the largest layer's parameters: the least that a double buffer holds.
    pub fn largest_layer(&self) -> u64 {
        self.layers.iter().map(|layer| layer.param_bytes).max().unwrap_or(0)
    }

    /// Bytes of images that `layer` names and a layer from `first` up to it has brought already.
    fn resident_already(&self, first: usize, layer: usize) -> u64 {
        let shared = |tied: &&TiedImage| {
            tied.layers.contains(&layer) && tied.layers.iter().any(|other| (first..layer).contains(other))
        };
        self.tied.iter().filter(shared).map(|tied| tied.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy;

    #[test]
    fn a_range_adds_up_and_takes_the_largest_workspace() {
        let cost = |workspace| LayerCost {
            param_bytes: 100,
            gradient_bytes: 90,
            input_bytes: 8,
            output_bytes: 8,
            input_gradient_bytes: 7,
            output_gradient_bytes: 6,
            saved_bytes: 50,
            workspace_bytes: workspace,
            forward_s: 1.0,
            backward_s: 2.0,
            ..LayerCost::default()
        };
        let layers = vec![cost(5), cost(30), cost(1)];
        let profile = Profile { layers, standing_bytes: 1000, ..Profile::default() };
        let needs = profile.needs(0..3);
        assert_eq!((needs.param_bytes, needs.gradient_bytes, needs.saved_bytes), (300, 270, 150));
        assert_eq!((needs.input_bytes, needs.output_bytes, needs.workspace_bytes), (8, 24, 30 + 7 + 6));
        assert_eq!(needs.need_bytes(), 1000 + 300 + 270 + 150 + 8 + 24 + 43);
        assert_eq!((needs.forward_s, needs.backward_s), (3.0, 6.0));
    }

    #[test]
    fn a_shared_image_counts_once_as_the_chain_says() {
        let chain = toy::tied_chain();
        let n = chain.len();
        let cost = |k: usize| LayerCost {
            param_bytes: chain.param_bytes(k..k + 1),
            gradient_bytes: chain.gradient_bytes(k..k + 1),
            ..LayerCost::default()
        };
        let layers = (0..n).map(cost).collect();
        let profile = Profile { layers, tied: Profile::tied_images(&chain), ..Profile::default() };
        assert_eq!(profile.tied.len(), 1);
        for first in 0..n {
            for end in first + 1..=n {
                let needs = profile.needs(first..end);
                assert_eq!(needs.param_bytes, chain.param_bytes(first..end), "{first}..{end}");
                assert_eq!(needs.gradient_bytes, chain.gradient_bytes(first..end), "{first}..{end}");
            }
        }
    }
}
