//! The rotary position embedding.

use std::f64::consts::TAU;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The scaling of a [`Rotary`]'s frequencies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RotaryScaling {
    /// Unscaled.
    #[default]
    Default,
    /// Llama 3.1's: waves longer than the original context are stretched, short ones are unchanged, with a smooth
    /// transition in between (transformers, `modeling_rope_utils.py`).
    Llama3 {
        /// The factor by which long waves are stretched.
        factor: f64,
        /// Waves that fit at most this often into the original context are long.
        low_freq_factor: f64,
        /// Waves that fit at least this often into it are short.
        high_freq_factor: f64,
        /// The original context in tokens.
        original_positions: usize,
    },
}

/// The rotary position embedding (Su et al., "RoFormer", 2021): the pairs of elements `i` and `i + width / 2` of each
/// head's query and key are rotated by angles proportional to the position. Cloning is cheap.
#[derive(Clone)]
pub struct Rotary {
    width: usize,
    theta: f64,
    scaling: RotaryScaling,
    /// The angles of the positions computed so far.
    known: Arc<Mutex<Rotation>>,
}

impl fmt::Debug for Rotary {
    // Prints what determines the angles, regardless of how many were computed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { width, theta, scaling, known: _ } = self;
        let mut text = f.debug_struct("Rotary");
        text.field("width", width).field("theta", theta).field("scaling", scaling).finish()
    }
}

/// The angles of all live embeddings.
type RotationCache = Vec<(usize, f64, RotaryScaling, Weak<Mutex<Rotation>>)>;

/// The angles of an embedding, shared by all models with the same embedding: they are computed once, during the pilot
/// pass of the first of these models, and devices hold no table per model.
fn known(width: usize, theta: f64, scaling: RotaryScaling) -> Arc<Mutex<Rotation>> {
    static KNOWN: Mutex<RotationCache> = Mutex::new(Vec::new());
    let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(.., known)| known.strong_count() > 0);
    let same = |of: &&(usize, f64, RotaryScaling, _)| (of.0, of.1, of.2) == (width, theta, scaling);
    if let Some(known) = all.iter().find(same).and_then(|(.., known)| known.upgrade()) {
        return known;
    }
    let known = Arc::new(Mutex::new(Rotation { width, angles: Arc::from([]) }));
    all.push((width, theta, scaling, Arc::downgrade(&known)));
    known
}

impl Rotary {
    /// The embedding for heads of `width` with the frequencies `theta^(-2i / width)`, scaled.
    ///
    /// # Panics
    /// If the width is odd or zero.
    pub fn new(width: usize, theta: f64, scaling: RotaryScaling) -> Self {
        assert!(
            width > 0 && width.is_multiple_of(2),
            "a rotary embedding requires an even, nonzero width, found {width}"
        );
        let known = known(width, theta, scaling);
        Self { width, theta, scaling, known }
    }

    /// The width of the heads.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The angle in radians from one position to the next, of each pair. Frequencies and angles are 32-bit, as in
    /// Transformers.
    fn frequencies(&self) -> Vec<f32> {
        let pairs = (0..self.width).step_by(2);
        let frequency = |i: usize| self.theta.powf(-(i as f64) / self.width as f64);
        pairs.map(|i| self.scaled(frequency(i)) as f32).collect()
    }

    fn scaled(&self, frequency: f64) -> f64 {
        let RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } =
            self.scaling
        else {
            return frequency;
        };
        // Waves that fit into the original context.
        let waves = original_positions as f64 * frequency / TAU;
        let smooth = (waves - low_freq_factor) / (high_freq_factor - low_freq_factor);
        match () {
            () if waves < low_freq_factor => frequency / factor,
            () if waves > high_freq_factor => frequency,
            () => (1.0 - smooth) * frequency / factor + smooth * frequency,
        }
    }

    /// The rotation for at least `positions` positions. A position's angles do not depend on this number.
    pub(crate) fn rotation(&self, positions: usize) -> Rotation {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.positions() < positions {
            let frequencies = self.frequencies();
            let position = |position: usize| {
                let angles = frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency));
                let (cosines, sines) = (angles.clone().map(f64::cos), angles.map(f64::sin));
                cosines.chain(sines).map(|x| x as f32)
            };
            known.angles = (0..positions).flat_map(position).collect();
        }
        known.clone()
    }
}

/// Cosines and sines by position.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    width: usize,
    /// For each position the cosines of all pairs, then their sines.
    angles: Arc<[f32]>,
}

impl Rotation {
    fn positions(&self) -> usize {
        self.angles.len() / self.width
    }

    fn at(&self, position: usize) -> (&[f32], &[f32]) {
        self.angles[position * self.width..][..self.width].split_at(self.width / 2)
    }

    /// The cosines and sines of the first `positions`.
    pub(crate) fn first(&self, positions: usize) -> &[f32] {
        &self.angles[..positions * self.width]
    }

    /// Rotates a head's query or key at a position.
    #[inline(always)]
    pub(crate) fn turn(&self, row: &mut [f32], position: usize) {
        let (a, b) = row.split_at_mut(self.width / 2);
        let (cosines, sines) = self.at(position);
        for (((a, b), cosine), sine) in a.iter_mut().zip(b).zip(cosines).zip(sines) {
            (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
        }
    }

    /// The inverse rotation, which also maps the gradient of a rotated vector back.
    #[inline(always)]
    pub(crate) fn turn_back(&self, row: &mut [f32], position: usize) {
        let (a, b) = row.split_at_mut(self.width / 2);
        let (cosines, sines) = self.at(position);
        for (((a, b), cosine), sine) in a.iter_mut().zip(b).zip(cosines).zip(sines) {
            (*a, *b) = (*a * cosine + *b * sine, *b * cosine - *a * sine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: RotaryScaling = RotaryScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192,
    };

    #[test]
    fn angles_grow_with_the_position_and_fall_with_the_pair() {
        let rotary = Rotary::new(8, 10_000.0, RotaryScaling::Default);
        assert_eq!(rotary.frequencies(), [1.0, 0.1, 0.01, 0.001]);
        let (cosines, sines) = (rotary.rotation(6), rotary.rotation(3));
        for position in 0..3 {
            for (i, angle) in [1.0, 0.1, 0.01, 0.001].into_iter().enumerate() {
                let angle = f64::from(position as f32 * angle);
                assert!((f64::from(cosines.at(position).0[i]) - angle.cos()).abs() < 1e-7);
                assert!((f64::from(sines.at(position).1[i]) - angle.sin()).abs() < 1e-7);
            }
        }
        assert_eq!(cosines.at(2), rotary.rotation(100).at(2), "more positions change none");
    }

    #[test]
    fn a_turn_keeps_lengths_and_can_be_taken_back() {
        let rotation = Rotary::new(6, 100.0, LLAMA3).rotation(20);
        let row = [1.0f32, -2.0, 3.0, 0.5, 0.25, -4.0];
        let mut turned = row;
        rotation.turn(&mut turned, 19);
        let square = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
        assert!(turned != row && (square(&turned) - square(&row)).abs() < 1e-4);
        rotation.turn_back(&mut turned, 19);
        assert!(turned.iter().zip(row).all(|(a, b)| (a - b).abs() < 1e-5), "{turned:?}");
    }

    /// Expected values are from Transformers' `_compute_llama3_parameters`.
    #[test]
    fn long_waves_are_made_longer_and_short_ones_stay() {
        let plain = Rotary::new(16, 500_000.0, RotaryScaling::Default).frequencies();
        let scaled = Rotary::new(16, 500_000.0, LLAMA3).frequencies();
        for (i, (plain, scaled)) in plain.iter().zip(&scaled).enumerate() {
            let wave = TAU / f64::from(*plain);
            match i {
                0..4 => assert!(scaled == plain && wave < 2048.0, "{i}"),
                4 => {
                    let smooth = (8192.0 / wave - 1.0) / 3.0;
                    let expected = f64::from(*plain) * ((1.0 - smooth) / 8.0 + smooth);
                    assert!((f64::from(*scaled) - expected).abs() < 1e-6 * expected, "{scaled} {expected}");
                    assert!((2048.0..8192.0).contains(&wave));
                }
                _ => assert!((scaled * 8.0 - plain).abs() < 1e-6 * plain && wave > 8192.0, "{i}"),
            }
        }
    }

    #[test]
    fn equal_embeddings_have_their_angles_in_common() {
        let of = |theta: f64| Rotary::new(6, theta, LLAMA3);
        let (one, other, apart) = (of(123.0), of(123.0), of(321.0));
        one.rotation(5);
        let positions = |of: &Rotary| of.known.lock().unwrap().positions();
        assert_eq!([&one, &other, &apart].map(positions), [5, 5, 0]);
    }

    #[test]
    fn what_is_shown_does_not_depend_on_what_was_computed() {
        let rotary = Rotary::new(4, 10_000.0, LLAMA3);
        let before = format!("{rotary:?}");
        rotary.rotation(9);
        assert_eq!(format!("{rotary:?}"), before);
        assert!(before.contains("theta: 10000.0") && before.contains("factor: 8.0"), "{before}");
    }
}
