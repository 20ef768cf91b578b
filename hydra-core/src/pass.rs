//! What a layer is told beside its input.

use crate::{Activation, Key};
use burn::tensor::{Tensor, TensorData};

/// Whether a pass trains or evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Dropout is on.
    Train,
    /// Dropout is off.
    Evaluate,
}

/// One pass of one microbatch through the chain, as a layer sees it.
///
/// It carries the key for random numbers, so that a recomputed forward draws the same dropout mask
/// however the chain is cut, and the targets for the loss.
#[derive(Clone, Debug)]
pub struct Pass {
    mode: Mode,
    key: Key,
    targets: Activation,
}

impl Pass {
    /// A training pass. `key` is that of (task seed, step, microbatch).
    pub fn train(key: Key, targets: Activation) -> Self {
        Self { mode: Mode::Train, key, targets }
    }

    /// An evaluation pass.
    pub fn evaluate(targets: Activation) -> Self {
        Self { mode: Mode::Evaluate, key: Key::new(0), targets }
    }

    /// The key of a training pass: a function of the task's seed, the step and the microbatch.
    pub fn key_of(seed: u64, step: usize, microbatch: usize) -> Key {
        Key::new(seed).fold(0x6472_6F70).fold(step as u64).fold(microbatch as u64)
    }

    /// This pass for the layer at `index` of the chain.
    pub fn for_layer(&self, index: usize) -> Self {
        Self { key: self.key.fold(index as u64), ..self.clone() }
    }

    /// Whether the pass trains.
    pub fn is_training(&self) -> bool {
        self.mode == Mode::Train
    }

    /// The key of a random site within the layer; a layer numbers its sites itself.
    pub fn key(&self, site: u64) -> Key {
        self.key.fold(site)
    }

    /// What the loss compares with. Empty for every layer but the last.
    pub fn targets(&self) -> &Activation {
        &self.targets
    }

    /// Inverted dropout (Srivastava et al., 2014): while training, sets each element to zero with
    /// `probability` and scales the rest by `1 / (1 - probability)`. The mask is a function of the pass,
    /// the layer, the `site` and the element's index in row-major order.
    pub fn dropout<const D: usize>(&self, x: Tensor<D>, probability: f64, site: u64) -> Tensor<D> {
        if !self.is_training() || probability <= 0.0 {
            return x;
        }
        let mask = dropout_mask(self.key(site), x.dims().iter().product(), probability);
        let mask = Tensor::<D>::from_data(TensorData::new(mask, x.dims()), &x.device());
        x * mask
    }
}

/// The factors of inverted dropout for `len` elements: zero or `1 / (1 - probability)`.
fn dropout_mask(key: Key, len: usize, probability: f64) -> Vec<f32> {
    let dropped = (probability * (1u64 << 32) as f64) as u64;
    let keep = (1.0 / (1.0 - probability)) as f32;
    // Each draw of 64 bits serves two neighbours.
    (0..len as u64)
        .map(|i| (key.bits(i >> 1) >> (32 * (i & 1))) & 0xFFFF_FFFF)
        .map(|draw| if draw < dropped { 0.0 } else { keep })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_a_function_of_its_key_and_keeps_the_mean() {
        let key = Pass::key_of(1, 2, 3);
        let mask = dropout_mask(key, 10_000, 0.1);
        assert_eq!(mask, dropout_mask(key, 10_000, 0.1));
        assert_eq!(mask[..5000], dropout_mask(key, 5000, 0.1)[..]);
        assert_ne!(mask, dropout_mask(Pass::key_of(1, 2, 4), 10_000, 0.1));
        let mean = mask.iter().sum::<f32>() / 10_000.0;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
    }

    #[test]
    fn an_evaluation_pass_drops_nothing() {
        let x = Tensor::<2>::ones([4, 4], &burn::tensor::Device::flex());
        let y = Pass::evaluate(Activation::default()).dropout(x.clone(), 0.9, 0);
        assert_eq!(x.into_data(), y.into_data());
    }
}
