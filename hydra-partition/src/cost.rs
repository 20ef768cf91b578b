//! Costs of layers, and the device memory of a shard.

use hydra_core::Chain;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The cost of one layer for one microbatch. Bytes are in device memory.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// The layer's name.
    pub name: String,
    /// Bytes of the buffers that the layer uses, including shared ones.
    pub param_bytes: u64,
    /// Bytes of its parameters' gradients.
    pub gradient_bytes: u64,
    /// Bytes of its input, float and integer tensors.
    pub input_bytes: u64,
    /// Bytes of its output, float and integer tensors.
    pub output_bytes: u64,
    /// Bytes of the gradient of its float inputs; zero up to the first trained layer, where backward passes
    /// end.
    pub input_gradient_bytes: u64,
    /// Bytes of the gradient of its float outputs; zero if no earlier layer is trained or the output is the
    /// loss.
    pub output_gradient_bytes: u64,
    /// Overhead of the tensors of parameters, input and targets: shapes, reference counts and graph nodes.
    /// About 2 KB per parameter on a CPU, and zero on a device with its own memory.
    #[serde(default)]
    pub wrapping_bytes: u64,
    /// Bytes of state that the graph holds after the layer's tracked forward, beyond input, output and
    /// parameters; for the last layer also the targets.
    pub saved_bytes: u64,
    /// The peak of the layer's recomputed forward and its backward: output, saved state, workspace and
    /// gradients, as far as they are live at the same time, and the targets. It excludes parameters, input
    /// and the upstream gradient.
    pub peak_bytes: u64,
    /// The peak of its forward without a graph, including output and targets, with the same exclusions.
    pub forward_peak_bytes: u64,
    /// Seconds of the forward without a graph.
    pub forward_s: f64,
    /// Seconds of the recomputed forward and backward; zero for layers without a backward.
    pub backward_s: f64,
}

/// A buffer that several layers share. A shard with several of them promotes it once.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TiedBuffer {
    /// Bytes of the buffer.
    pub bytes: u64,
    /// The layers that use it, ascending.
    pub layers: Vec<usize>,
}

/// The costs of a chain's layers: the result of a pilot pass and the input of cutting.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// The layers, in chain order.
    pub layers: Vec<LayerCost>,
    /// The buffers that count once for all layers of a shard.
    pub tied: Vec<TiedBuffer>,
    /// Bytes that stay in use on the device while no model is on it, such as the buffers that its threads
    /// keep for matrix products. They count in every shard's peak.
    pub standing_bytes: u64,
    /// Whether memory was measured; otherwise it is estimated from shapes.
    pub measured: bool,
}

impl Profile {
    /// These costs with the memory that `other`, a pass through the same layers, needs too.
    pub(crate) fn with_memory_of(mut self, other: &Self) -> Self {
        for (cost, other) in self.layers.iter_mut().zip(&other.layers) {
            let of = |cost: &mut u64, other: u64| *cost = other.max(*cost);
            of(&mut cost.input_bytes, other.input_bytes);
            of(&mut cost.output_bytes, other.output_bytes);
            of(&mut cost.wrapping_bytes, other.wrapping_bytes);
            of(&mut cost.peak_bytes, other.peak_bytes);
            of(&mut cost.forward_peak_bytes, other.forward_peak_bytes);
        }
        self.standing_bytes = self.standing_bytes.max(other.standing_bytes);
        self
    }
}

/// The device memory of a range of layers as one shard.
///
/// Saved state of early layers is live while late layers run backward, and gradients of late layers while
/// early layers do. The peak is therefore the maximum, over the layers, of the layer's own peak, the saved
/// state of the layers before it and the gradients of the layers after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShardMemory {
    /// Bytes that are always in use on the device.
    pub standing_bytes: u64,
    /// Bytes of the buffers that the layers use; a shared one counts once.
    pub param_bytes: u64,
    /// Overhead of the tensors of all layers.
    pub wrapping_bytes: u64,
    /// Bytes of all parameters' gradients.
    pub gradient_bytes: u64,
    /// Bytes of the shard's input.
    pub input_bytes: u64,
    /// Bytes of all layers' outputs and saved state.
    pub held_bytes: u64,
    /// The largest gradient of an output.
    pub upstream_bytes: u64,
    /// The largest input and the largest output of a layer: one boundary of each may be in transfer between
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
    /// Bytes that the last layer holds at its peak, including what layers before it saved. If another layer
    /// follows, the gradient of its output is added.
    last_bytes: u64,
    last_upstream_bytes: u64,
}

impl ShardMemory {
    /// The predicted peak in bytes of the shard's forward and backward.
    pub fn peak_bytes(&self) -> u64 {
        let beyond = self.upstream_bytes.saturating_add(self.backward_bytes);
        self.resident_bytes().saturating_add(beyond).max(self.forward_peak_bytes())
    }

    /// The predicted peak in bytes of the shard's forward without a graph.
    pub fn forward_peak_bytes(&self) -> u64 {
        self.resident_bytes().saturating_add(self.forward_bytes)
    }

    /// Bytes that are in use during the whole pass, or may be.
    fn resident_bytes(&self) -> u64 {
        let [up, down] = self.transit_bytes;
        let parts = [self.standing_bytes, self.param_bytes, self.wrapping_bytes, self.input_bytes, up, down];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Extends the range from `first` by `layer`, given the memory (`self`) of the range without it. The
    /// memory of a longer range is never smaller.
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
    /// The buffers of `chain` that several layers share.
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

    /// Returns the memory of these layers as one shard.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn shard_memory(&self, layers: Range<usize>) -> ShardMemory {
        let first = layers.start;
        layers.fold(ShardMemory::default(), |needs, layer| needs.with(self, first, layer))
    }

    /// Returns these costs with memory for accumulating the gradients of several microbatches, where layer
    /// `k` has `bytes(k)`. While a shard computes the gradients of a microbatch, the previous sum and the new
    /// sum are in memory. Plans cut with these costs have shorter shards, in which gradients can be
    /// accumulated.
    pub fn with_sums(&self, bytes: impl Fn(usize) -> u64) -> Self {
        let with_sum = |(index, layer): (usize, &LayerCost)| {
            let sums = bytes(index).saturating_mul(2);
            LayerCost { wrapping_bytes: layer.wrapping_bytes.saturating_add(sums), ..layer.clone() }
        };
        Self { layers: self.layers.iter().enumerate().map(with_sum).collect(), ..self.clone() }
    }

    /// Bytes of the largest layer's parameters, the minimum size of a double buffer.
    pub fn largest_layer(&self) -> u64 {
        self.layers.iter().map(|layer| layer.param_bytes).max().unwrap_or(0)
    }

    /// Bytes of the buffers that `layer` shares with a layer from `first` up to it.
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
        let needs = profile(&[170, 160, 200]).shard_memory(0..3);
        assert_eq!((needs.param_bytes, needs.gradient_bytes, needs.held_bytes), (300, 270, 3 * 59));
        assert_eq!((needs.forward_s, needs.backward_s), (3.0, 6.0));
        // Backward through the last layer, the second last, and the first.
        let through = [2 * 59 + 200, 59 + 160 + 6 + 90, 170 + 6 + 2 * 90];
        assert_eq!(needs.backward_bytes, *through.iter().max().unwrap());
        assert_eq!(needs.peak_bytes(), 1000 + 300 + 3 * 3 + 2 * 8 + 9 + 6 + 356);
        assert_eq!(needs.forward_peak_bytes(), 1000 + 300 + 3 * 3 + 2 * 8 + 9 + 8 + 30);
        let needs = profile(&[170, 160, 500]).shard_memory(0..3);
        assert_eq!(needs.peak_bytes(), 1000 + 300 + 3 * 3 + 2 * 8 + 9 + 6 + 2 * 59 + 500);
        let alone = profile(&[170]).shard_memory(0..1);
        assert_eq!(alone.peak_bytes(), 1000 + 100 + 3 + 2 * 8 + 9 + 6 + 170);
        assert_eq!(alone.forward_peak_bytes(), 1000 + 100 + 3 + 2 * 8 + 9 + 30);
        // An evaluation can take more than training.
        let mut evaluated = profile(&[170]);
        evaluated.layers[0].forward_peak_bytes = 999;
        assert_eq!(evaluated.shard_memory(0..1).peak_bytes(), 1000 + 100 + 3 + 2 * 8 + 9 + 999);
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
                    // As in a pilot pass: training a layer takes at least as much as its forward.
                    peak_bytes: (output + forward + more).saturating_sub(output_gradient_bytes),
                    forward_peak_bytes: output + forward,
                    ..LayerCost::default()
                }
            };
            let layers: Vec<LayerCost> = sizes.iter().enumerate().map(layer).collect();
            let profile = Profile { layers, standing_bytes: 100, ..Profile::default() };
            for end in 2..=sizes.len() {
                for first in 0..end - 1 {
                    let long = profile.shard_memory(first..end);
                    proptest::prop_assert!(long.peak_bytes() >= long.forward_peak_bytes());
                    let short = profile.shard_memory(first..end - 1);
                    proptest::prop_assert!(short.peak_bytes() <= long.peak_bytes());
                    proptest::prop_assert!(short.forward_peak_bytes() <= long.forward_peak_bytes());
                    let tail = profile.shard_memory(first + 1..end);
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
            let (plain, sums) = (profile.shard_memory(range.clone()), with_sums.shard_memory(range));
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
                let needs = profile.shard_memory(first..end);
                assert_eq!(needs.param_bytes, chain.param_bytes(first..end), "{first}..{end}");
                assert_eq!(needs.gradient_bytes, chain.gradient_bytes(first..end), "{first}..{end}");
            }
        }
    }
}
