//! Costs of layers, and the needs of a range of them on a device.

use hydra_core::Chain;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The cost of one layer for one microbatch. Bytes are those on the device.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// The layer's name.
    pub name: String,
    /// Bytes of the buffers that the layer names, as if it were alone.
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
    /// Bytes that parameters, input and targets take beside their own while they are tensors: shapes, who holds them,
    /// nodes of the graph. It is some 2 KB a parameter on a CPU, and nothing on a device with memory of its own.
    #[serde(default)]
    pub wrapping_bytes: u64,
    /// Bytes of state that the graph holds after the layer's tracked forward, beyond input, output and
    /// parameters; for the last layer also the targets.
    pub saved_bytes: u64,
    /// The most that the layer alone holds at once in its recomputed forward and its backward: its output,
    /// saved state, workspace and gradients as far as they are alive together, and the targets; without its
    /// parameters, its input and the gradient from downstream.
    pub peak_bytes: u64,
    /// The most that its forward without a graph holds at once, output and targets included; likewise.
    pub forward_peak_bytes: u64,
    /// Seconds of the forward without a graph.
    pub forward_s: f64,
    /// Seconds of the recomputed forward with the backward; zero for layers that have none.
    pub backward_s: f64,
}

/// A buffer that several layers name. A shard that holds several of them promotes it once.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TiedBuffer {
    /// Bytes of the buffer.
    pub bytes: u64,
    /// The layers that name it, ascending.
    pub layers: Vec<usize>,
}

/// The costs of a chain's layers: what a pilot pass finds, and all that cutting needs to know.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// The layers, in chain order.
    pub layers: Vec<LayerCost>,
    /// The buffers that count once for all layers of a shard.
    pub tied: Vec<TiedBuffer>,
    /// Bytes that stay in use on the device while nothing of a model is there, such as the buffers that
    /// its threads keep for matrix products. Every shard needs them.
    pub standing_bytes: u64,
    /// True if memory was measured; otherwise it is estimated from shapes.
    pub measured: bool,
}

/// The needs of a range of layers on a device when it is one shard.
///
/// Saved state of early layers is alive while late ones run backward, and gradients of late layers while
/// early ones do, so the peak is the largest, over the layers, of what the layer holds itself, what the
/// layers before it have saved, and the gradients of those after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShardMemory {
    /// Bytes that are in use whatever is on the device.
    pub standing_bytes: u64,
    /// Bytes of the buffers that the layers name, a shared one once.
    pub param_bytes: u64,
    /// Bytes that all tensors of the layers take beside their own.
    pub wrapping_bytes: u64,
    /// Bytes of all parameters' gradients.
    pub gradient_bytes: u64,
    /// Bytes of the shard's input.
    pub input_bytes: u64,
    /// Bytes of all layers' outputs and saved state.
    pub held_bytes: u64,
    /// The largest gradient of an output.
    pub upstream_bytes: u64,
    /// The largest input of a layer and the largest output: one boundary of each may be on its way between
    /// host and device while the shard computes.
    pub transit_bytes: [u64; 2],
    /// The peak of the backward pass beyond parameters, input and upstream gradient.
    pub backward_bytes: u64,
    /// The peak of the forward without a graph beyond parameters and input.
    pub forward_bytes: u64,
    /// Seconds of the forward.
    pub forward_s: f64,
    /// Seconds of the backward.
    pub backward_s: f64,
    /// Bytes that the last layer holds at its peak, with what was saved before it. Its part of the peak grows by the
    /// gradient of its output once it is no longer the last.
    last_bytes: u64,
    last_upstream_bytes: u64,
}

impl ShardMemory {
    /// The predicted peak in bytes while the shard runs backward, or forward and backward.
    pub fn peak_bytes(&self) -> u64 {
        let beyond = self.upstream_bytes.saturating_add(self.backward_bytes);
        self.resident_bytes().saturating_add(beyond).max(self.forward_peak_bytes())
    }

    /// The predicted peak in bytes of the shard's forward without a graph.
    pub fn forward_peak_bytes(&self) -> u64 {
        self.resident_bytes().saturating_add(self.forward_bytes)
    }

    /// Bytes that are in use the whole time, or may be.
    fn resident_bytes(&self) -> u64 {
        let [up, down] = self.transit_bytes;
        let parts = [self.standing_bytes, self.param_bytes, self.wrapping_bytes, self.input_bytes, up, down];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// The needs of the range that starts at `first` and ends with `layer`, from those (`self`) of the
    /// range that ends before it. What a longer range needs is never less.
    pub(crate) fn with(self, profile: &Profile, first: usize, layer: usize) -> Self {
        let cost = &profile.layers[layer];
        let params = cost.param_bytes.saturating_sub(profile.resident_already(first, layer));
        let before = self.backward_bytes.max(self.last_bytes.saturating_add(self.last_upstream_bytes));
        let last_bytes = self.held_bytes.saturating_add(cost.peak_bytes);
        let carried = if layer == first { 0 } else { cost.input_bytes };
        Self {
            standing_bytes: profile.standing_bytes,
            param_bytes: self.param_bytes.saturating_add(params),
            wrapping_bytes: self.wrapping_bytes.saturating_add(cost.wrapping_bytes),
            gradient_bytes: self.gradient_bytes.saturating_add(cost.gradient_bytes),
            input_bytes: if layer == first { cost.input_bytes } else { self.input_bytes },
            held_bytes: self.held_bytes.saturating_add(cost.output_bytes).saturating_add(cost.saved_bytes),
            upstream_bytes: self.upstream_bytes.max(cost.output_gradient_bytes),
            transit_bytes: [
                self.transit_bytes[0].max(cost.input_bytes),
                self.transit_bytes[1].max(cost.output_bytes),
            ],
            backward_bytes: before.saturating_add(cost.gradient_bytes).max(last_bytes),
            forward_bytes: self.forward_bytes.max(cost.forward_peak_bytes.saturating_add(carried)),
            forward_s: self.forward_s + cost.forward_s,
            backward_s: self.backward_s + cost.backward_s,
            last_bytes,
            last_upstream_bytes: cost.output_gradient_bytes,
        }
    }
}

impl Profile {
    /// The buffers of `chain` that several layers name.
    pub fn tied_buffers(chain: &Chain) -> Vec<TiedBuffer> {
        let tied = chain.buffers().iter().filter(|buffer| buffer.layers.len() > 1);
        tied.map(|buffer| TiedBuffer { bytes: buffer.bytes(), layers: buffer.layers.clone() }).collect()
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The needs of these layers as one shard.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn needs(&self, layers: Range<usize>) -> ShardMemory {
        let first = layers.start;
        layers.fold(ShardMemory::default(), |needs, layer| needs.with(self, first, layer))
    }

    /// These costs with room for sums of the gradients of several microbatches, of which a layer has so many bytes: while a shard
    /// makes those of a microbatch, the sum of those before it is there, and the one that comes of both. Cut with these, a model
    /// has shorter shards, on which gradients can add up.
    pub fn with_sums(&self, bytes: impl Fn(usize) -> u64) -> Self {
        let with_sum = |(index, layer): (usize, &LayerCost)| {
            let sums = bytes(index).saturating_mul(2);
            LayerCost { wrapping_bytes: layer.wrapping_bytes.saturating_add(sums), ..layer.clone() }
        };
        Self { layers: self.layers.iter().enumerate().map(with_sum).collect(), ..self.clone() }
    }

    /// Bytes of the largest layer's parameters: the least that a double buffer holds.
    pub fn largest_layer(&self) -> u64 {
        self.layers.iter().map(|layer| layer.param_bytes).max().unwrap_or(0)
    }

    /// Bytes of buffers that `layer` names and a layer from `first` up to it has brought already.
    fn resident_already(&self, first: usize, layer: usize) -> u64 {
        let shared = |tied: &&TiedBuffer| {
            tied.layers.contains(&layer) && tied.layers.iter().any(|other| (first..layer).contains(other))
        };
        self.tied.iter().filter(shared).map(|tied| tied.bytes).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy;

    fn cost(peak: u64) -> LayerCost {
        LayerCost {
            param_bytes: 100,
            gradient_bytes: 90,
            input_bytes: 8,
            output_bytes: 9,
            input_gradient_bytes: 7,
            output_gradient_bytes: 6,
            wrapping_bytes: 3,
            saved_bytes: 50,
            peak_bytes: peak,
            forward_peak_bytes: 30,
            forward_s: 1.0,
            backward_s: 2.0,
            ..LayerCost::default()
        }
    }

    fn profile(peaks: &[u64]) -> Profile {
        let layers = peaks.iter().map(|peak| cost(*peak)).collect();
        Profile { layers, standing_bytes: 1000, ..Profile::default() }
    }

    #[test]
    fn the_peak_is_where_saved_state_and_gradients_meet() {
        let needs = profile(&[170, 160, 200]).needs(0..3);
        assert_eq!((needs.param_bytes, needs.gradient_bytes, needs.held_bytes), (300, 270, 3 * 59));
        assert_eq!((needs.forward_s, needs.backward_s), (3.0, 6.0));
        // Backward through the last layer, the one before it, and the first.
        let through = [2 * 59 + 200, 59 + 160 + 6 + 90, 170 + 6 + 2 * 90];
        assert_eq!(needs.backward_bytes, *through.iter().max().unwrap());
        assert_eq!(needs.peak_bytes(), 1000 + 300 + 3 * 3 + 2 * 8 + 9 + 6 + 356);
        assert_eq!(needs.forward_peak_bytes(), 1000 + 300 + 3 * 3 + 2 * 8 + 9 + 8 + 30);
        let needs = profile(&[170, 160, 500]).needs(0..3);
        assert_eq!(needs.peak_bytes(), 1000 + 300 + 3 * 3 + 2 * 8 + 9 + 6 + 2 * 59 + 500);
        let alone = profile(&[170]).needs(0..1);
        assert_eq!(alone.peak_bytes(), 1000 + 100 + 3 + 2 * 8 + 9 + 6 + 170);
        assert_eq!(alone.forward_peak_bytes(), 1000 + 100 + 3 + 2 * 8 + 9 + 30);
        // An evaluation can need more than training does.
        let mut evaluated = profile(&[170]);
        evaluated.layers[0].forward_peak_bytes = 999;
        assert_eq!(evaluated.needs(0..1).peak_bytes(), 1000 + 100 + 3 + 2 * 8 + 9 + 999);
    }

    proptest::proptest! {
        #[test]
        fn a_longer_range_never_needs_less(
            sizes in proptest::collection::vec(proptest::array::uniform8(0u64..400), 2..9),
        ) {
            let last = sizes.len() - 1;
            let layer = |(k, [params, gradients, input, gradient, wrapping, saved, forward, more]): (usize, &[u64; 8])| {
                let output = if k == last { 4 } else { sizes[k + 1][2] };
                let output_gradient_bytes = if k == last { 0 } else { output.min(sizes[k + 1][3]) };
                LayerCost {
                    param_bytes: *params,
                    gradient_bytes: *gradients,
                    input_bytes: *input,
                    output_bytes: output,
                    input_gradient_bytes: *input.min(gradient),
                    output_gradient_bytes,
                    wrapping_bytes: *wrapping,
                    saved_bytes: *saved,
                    // As a pilot pass finds them: training a layer takes no less than its forward.
                    peak_bytes: (output + forward + more).saturating_sub(output_gradient_bytes),
                    forward_peak_bytes: output + forward,
                    ..LayerCost::default()
                }
            };
            let layers: Vec<LayerCost> = sizes.iter().enumerate().map(layer).collect();
            let profile = Profile { layers, standing_bytes: 100, ..Profile::default() };
            for end in 2..=sizes.len() {
                for first in 0..end - 1 {
                    let long = profile.needs(first..end);
                    proptest::prop_assert!(long.peak_bytes() >= long.forward_peak_bytes());
                    let short = profile.needs(first..end - 1);
                    proptest::prop_assert!(short.peak_bytes() <= long.peak_bytes());
                    proptest::prop_assert!(short.forward_peak_bytes() <= long.forward_peak_bytes());
                    let tail = profile.needs(first + 1..end);
                    proptest::prop_assert!(tail.peak_bytes() <= long.peak_bytes());
                }
            }
        }
    }

    #[test]
    fn sums_take_twice_the_gradients_beside_what_a_shard_needs() {
        let profile = profile(&[170, 160, 200]);
        let with_sums = profile.with_sums(|layer| [90, 0, 70][layer]);
        for (range, bytes) in [(0..1, 90), (1..2, 0), (0..3, 160)] {
            let (plain, sums) = (profile.needs(range.clone()), with_sums.needs(range));
            assert_eq!(sums.peak_bytes(), plain.peak_bytes() + 2 * bytes);
            assert_eq!((sums.param_bytes, sums.gradient_bytes), (plain.param_bytes, plain.gradient_bytes));
        }
    }

    #[test]
    fn a_shared_buffer_counts_once_as_the_chain_says() {
        let chain = toy::tied_chain();
        let n = chain.len();
        let cost = |k: usize| LayerCost {
            param_bytes: chain.param_bytes(k..k + 1),
            gradient_bytes: chain.gradient_bytes(k..k + 1),
            ..LayerCost::default()
        };
        let layers = (0..n).map(cost).collect();
        let profile = Profile { layers, tied: Profile::tied_buffers(&chain), ..Profile::default() };
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
