//! The arguments of a layer besides its input.

use crate::{Activation, Key};
use burn::tensor::{DType, Tensor, TensorData};

/// The kind of a pass.
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
/// for any cut of the chain, and the targets for the loss.
#[derive(Clone, Debug)]
pub struct Pass {
    mode: Mode,
    key: Key,
    targets: Activation,
    worst_case: bool,
    by_row: bool,
    statistic: Option<f64>,
}

impl Pass {
    /// Returns a training pass. `key` is that of (task seed, step, microbatch).
    pub fn train(key: Key, targets: Activation) -> Self {
        Self { mode: Mode::Train, key, targets, worst_case: false, by_row: false, statistic: None }
    }

    /// Returns an evaluation pass.
    pub fn evaluate(targets: Activation) -> Self {
        Self { mode: Mode::Evaluate, ..Self::train(Key::new(0), targets) }
    }

    /// Returns the key of a training pass: a function of the task's seed, the step and the microbatch.
    pub fn key_of(seed: u64, step: usize, microbatch: usize) -> Key {
        Key::new(seed).fold(0x6472_6F70).fold(step as u64).fold(microbatch as u64)
    }

    /// Returns this pass in worst-case mode: layers compute everything that any batch of these shapes could
    /// require.
    ///
    /// Pilot passes use it, so that their measurements hold for every batch. Otherwise a layer may skip work
    /// that the values of a batch make unnecessary, such as logits of positions without a target. Skipping
    /// must not take more memory than the worst case and must not change any result.
    pub fn worst_case(self) -> Self {
        Self { worst_case: true, ..self }
    }

    /// Returns whether layers must not skip work; see [`worst_case`](Self::worst_case).
    pub fn is_worst_case(&self) -> bool {
        self.worst_case
    }

    /// Returns this pass for a few rows of different sequences: the bits of a row must not depend on the other rows. Linear
    /// layers then compute products that read each weight once, as generation needs them.
    pub fn by_row(self) -> Self {
        Self { by_row: true, ..self }
    }

    /// Returns whether the bits of a row must not depend on the other rows; see [`by_row`](Self::by_row).
    pub fn is_by_row(&self) -> bool {
        self.by_row
    }

    /// Returns this pass with the [statistic](crate::Objective::statistic) of its minibatch.
    pub fn with_statistic(self, statistic: Option<f64>) -> Self {
        Self { statistic, ..self }
    }

    /// The objective's [statistic](crate::Objective::statistic) of the minibatch; `None` if the pass holds the whole
    /// minibatch, and in evaluations.
    pub fn statistic(&self) -> Option<f64> {
        self.statistic
    }

    /// Returns this pass for the layer at `index` of the chain.
    pub fn for_layer(&self, index: usize) -> Self {
        Self { key: self.key.fold(index as u64), ..self.clone() }
    }

    /// Returns whether the pass trains.
    pub fn is_training(&self) -> bool {
        self.mode == Mode::Train
    }

    /// The targets of the loss. Empty for every layer but the last and those that declare that they read it
    /// ([`Forward::reads_targets`](crate::Forward::reads_targets)).
    pub fn targets(&self) -> &Activation {
        &self.targets
    }

    /// Returns a point in the layer at which random numbers are drawn; a layer numbers its own sites.
    pub fn site(&self, number: u64) -> Site {
        Site { key: self.key.fold(number), trains: self.is_training() }
    }
}

/// One random site of one layer in one pass.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    key: Key,
    trains: bool,
}

impl Site {
    /// The key of the site's random numbers.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Inverted dropout (Srivastava et al., 2014): while training, sets each element to zero with
    /// `probability` and scales the rest by `1 / (1 - probability)`. The mask is a function of the pass,
    /// the layer, the site and the element's index in row-major order.
    ///
    /// # Panics
    /// If `probability` is not in `0..=1`.
    pub fn dropout<const D: usize>(&self, x: Tensor<D>, probability: f64) -> Tensor<D> {
        let Some(mask) = self.dropout_mask(probability) else { return x };
        let mut factors = vec![0.0; x.dims().iter().product()];
        mask.fill(0, &mut factors);
        let factors = TensorData::new(factors, x.dims());
        let factors = Tensor::<D>::from_data(factors, (&x.device(), DType::F32));
        match x.dtype() {
            DType::F32 => x * factors,
            // Rounded once, because 16 bits do not represent the factors exactly.
            narrow => (x.cast(DType::F32) * factors).cast(narrow),
        }
    }

    /// The mask that [`dropout`](Self::dropout) multiplies with; `None` if it changes nothing.
    ///
    /// # Panics
    /// If `probability` is not in `0..=1`.
    pub fn dropout_mask(&self, probability: f64) -> Option<DropoutMask> {
        let valid = (0.0..=1.0).contains(&probability);
        assert!(valid, "expected a probability of dropout from 0 to 1, found {probability}");
        let drops = self.trains && probability > 0.0;
        drops.then(|| DropoutMask::new(self.key, probability))
    }
}

/// The factors of inverted dropout at one site of one pass, each a function of its element's index: zero, or
/// `1 / (1 - probability)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    key: Key,
    /// 32-bit draws below this value drop their element.
    dropped: u64,
    keep: f32,
}

/// The number of 64-bit draws per block; each covers two neighbors, its lower half the even one.
const DRAWS: usize = 8;

impl DropoutMask {
    fn new(key: Key, probability: f64) -> Self {
        let dropped = (probability * (1u64 << 32) as f64) as u64;
        Self { key, dropped, keep: (1.0 / (1.0 - probability)) as f32 }
    }

    /// Returns the numbers from which a device computes the same factors: the key, the drop threshold and the
    /// factor of kept elements. The draw for the neighbors `2i` and `2i + 1` is SplitMix64's finalizer of the
    /// key plus `i` times `0x9E3779B97F4A7C15`; a 32-bit half below the threshold drops its element.
    pub fn numbers(self) -> (u64, u64, f32) {
        (self.key.number(), self.dropped, self.keep)
    }

    /// The factor of the element at `index` in row-major order.
    #[inline]
    pub fn factor(self, index: u64) -> f32 {
        let draw = (self.key.bits(index >> 1) >> (32 * (index & 1))) & 0xFFFF_FFFF;
        if draw < self.dropped { 0.0 } else { self.keep }
    }

    /// Writes the factors of the elements from `start` on.
    pub fn fill(self, start: u64, out: &mut [f32]) {
        // Every draw is below a threshold that exceeds 32 bits.
        let Ok(dropped) = u32::try_from(self.dropped) else { return out.fill(0.0) };
        let (before, out) = out.split_at_mut(out.len().min((start % 2) as usize));
        let (blocks, after) = out.split_at_mut(out.len() - out.len() % (2 * DRAWS));
        let (first, last) = (start + before.len() as u64, start + (before.len() + blocks.len()) as u64);
        before.iter_mut().for_each(|out| *out = self.factor(start));
        pulp::Arch::new().dispatch(Blocks { mask: self, first: first / 2, dropped, out: blocks });
        after.iter_mut().zip(last..).for_each(|(out, index)| *out = self.factor(index));
    }
}

/// Writes the factors of whole blocks, from the draw `first` on. It is a type instead of a closure, because
/// only code that is certainly inlined is compiled for the processor's vector instructions.
struct Blocks<'a> {
    mask: DropoutMask,
    first: u64,
    dropped: u32,
    out: &'a mut [f32],
}

impl pulp::NullaryFnOnce for Blocks<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let DropoutMask { key, keep, .. } = self.mask;
        for (block, out) in self.out.chunks_exact_mut(2 * DRAWS).enumerate() {
            let first = self.first + (block * DRAWS) as u64;
            let mut draws = [0; DRAWS];
            for (draw, index) in draws.iter_mut().zip(first..) {
                *draw = key.bits(index).to_le();
            }
            let draws: [u32; 2 * DRAWS] = bytemuck::cast(draws);
            for (out, draw) in out.iter_mut().zip(draws) {
                *out = if u32::from_le(draw) < self.dropped { 0.0 } else { keep };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, HostTensor};
    use std::panic::AssertUnwindSafe;

    #[test]
    fn the_mask_is_a_function_of_its_key_and_keeps_the_mean() {
        let mask = |key, len| {
            let mut factors = vec![f32::NAN; len];
            DropoutMask::new(key, 0.1).fill(0, &mut factors);
            factors
        };
        let key = Pass::key_of(1, 2, 3);
        let factors = mask(key, 10_000);
        assert_eq!(factors, mask(key, 10_000));
        assert_eq!(factors[..5000], mask(key, 5000)[..]);
        assert_ne!(factors, mask(Pass::key_of(1, 2, 4), 10_000));
        let mean = factors.iter().sum::<f32>() / 10_000.0;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
    }

    #[test]
    fn any_stretch_of_the_mask_holds_the_factors_of_its_indices() {
        for probability in [0.1, 0.5, 0.999, 1.0] {
            let mask = DropoutMask::new(Key::new(4), probability);
            for (start, len) in [(0, 0), (1, 0), (1, 1), (0, 16), (7, 40), (8, 41), ((1 << 40) + 1, 100)] {
                let mut factors = vec![f32::NAN; len];
                mask.fill(start, &mut factors);
                let expected: Vec<f32> = (start..).take(len).map(|index| mask.factor(index)).collect();
                assert_eq!(factors, expected, "{probability}, {start}");
            }
        }
    }

    #[test]
    fn the_mask_stays_what_it_was() {
        // Interrupted runs resume with the same masks.
        let mask =
            Pass::train(Pass::key_of(1, 2, 3), Activation::default()).for_layer(4).site(5).dropout_mask(0.5);
        let mut factors = [f32::NAN; 40];
        mask.expect("a training pass drops").fill(3, &mut factors);
        let kept = (0..40).filter(|&i| factors[i] == 2.0).fold(0u64, |bits, i| bits | 1 << i);
        assert!(factors.iter().all(|&x| x == 0.0 || x == 2.0));
        assert_eq!(kept, 0x1E_8AAD_9E89);
    }

    #[test]
    fn the_numbers_give_the_factors() {
        // As a device computes them.
        let factor = |(key, dropped, keep): (u64, u64, f32), index: u64| {
            let mut z = key.wrapping_add((index >> 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let draw = ((z ^ (z >> 31)) >> (32 * (index & 1))) & 0xFFFF_FFFF;
            if draw < dropped { 0.0 } else { keep }
        };
        for (seed, probability) in [(0, 1e-9), (1, 0.1), (2, 0.5), (3, 0.999), (4, 1.0)] {
            let mask = DropoutMask::new(Key::new(seed), probability);
            for index in (0..200).chain((1 << 40)..(1 << 40) + 200) {
                assert_eq!(factor(mask.numbers(), index), mask.factor(index));
            }
        }
    }

    #[test]
    fn sixteen_bits_are_dropped_out_in_32_and_rounded_once() {
        let values: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).exp2()).collect();
        let pass = Pass::train(Key::new(3), Activation::default());
        let dropped = |tensor: HostTensor| {
            let x = tensor.to_device(&burn::tensor::Device::flex()).into_float::<1>();
            crate::AnyTensor::from(pass.site(0).dropout(x, 0.1)).into_host()
        };
        let narrow = HostTensor::float(values, [64]).in_type(FloatType::Bf16);
        let wide = dropped(narrow.clone().in_type(FloatType::F32));
        assert!(wide.as_f32().contains(&0.0) && wide.as_f32().iter().any(|x| *x > 0.0));
        assert_eq!(dropped(narrow), wide.in_type(FloatType::Bf16));
    }

    #[test]
    fn what_is_no_probability_is_refused() {
        for probability in [f64::NAN, -0.1, 15.0] {
            for pass in
                [Pass::train(Key::new(1), Activation::default()), Pass::evaluate(Activation::default())]
            {
                let panic =
                    std::panic::catch_unwind(AssertUnwindSafe(|| pass.site(0).dropout_mask(probability)))
                        .unwrap_err();
                let message = crate::panic_message(panic.as_ref());
                assert!(message.contains("from 0 to 1, found"), "{message}");
            }
        }
    }

    #[test]
    fn an_evaluation_pass_drops_nothing() {
        let x = Tensor::<2>::ones([4, 4], &burn::tensor::Device::flex());
        let y = Pass::evaluate(Activation::default()).site(0).dropout(x.clone(), 0.9);
        assert_eq!(x.into_data(), y.into_data());
    }
}
