//! The elements that an optimizer updates, and the loop over them.

use super::MomentMut;
use super::dynamic8::BLOCK;

/// Some elements of one parameter with their gradients and moments, all of equal length. If a moment is quantized, they begin
/// with a block, and end with one or with the parameter.
#[derive(Debug)]
pub struct Elements<'a, 'b> {
    params: &'a mut [f32],
    grads: &'a [f32],
    moments: &'a mut [MomentMut<'b>],
    clip: Option<f32>,
    arch: pulp::Arch,
}

impl<'a, 'b> Elements<'a, 'b> {
    /// Combines elements with their gradients and one slice for each moment; `clip` is the factor that scales
    /// every gradient first.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn new(
        params: &'a mut [f32],
        grads: &'a [f32],
        moments: &'a mut [MomentMut<'b>],
        clip: Option<f32>,
    ) -> Self {
        let len = params.len();
        assert!(grads.len() == len && moments.iter().all(|m| m.len() == len), "the slices differ in length");
        Self { params, grads, moments, clip, arch: pulp::Arch::new() }
    }

    /// Replaces every parameter and its `N` moments by the result of `formula` for them and the gradient.
    ///
    /// Write a product plus a sum as [`f32::mul_add`] if it should be a fused multiply-add: nothing is
    /// contracted or reordered here, so the result is bitwise equal on every processor.
    ///
    /// # Panics
    /// If `N` is not [`Optimizer::moments`](super::Optimizer::moments).
    pub fn update<const N: usize>(self, formula: impl Fn(f32, f32, [f32; N]) -> (f32, [f32; N])) {
        let Self { params, grads, moments, clip, arch } = self;
        let found = moments.len();
        let Ok(moments) = <&mut [MomentMut<'_>; N]>::try_from(moments) else {
            panic!("an optimizer that declares {found} moments updates {N}");
        };
        if moments.iter().any(|moment| matches!(moment, MomentMut::Blocks(..))) {
            return match clip {
                None => arch.dispatch(UpdateBlocks { params, grads, moments, scaled: |g| g, formula }),
                Some(clip) => {
                    arch.dispatch(UpdateBlocks { params, grads, moments, scaled: |g| g * clip, formula });
                }
            };
        }
        let moments = moments.each_mut().map(|moment| match moment {
            MomentMut::Floats(values) => &mut **values,
            MomentMut::Blocks(..) => unreachable!("no moment is quantized"),
        });
        match clip {
            None => arch.dispatch(Update { params, grads, moments, scaled: |g| g, formula }),
            Some(clip) => arch.dispatch(Update { params, grads, moments, scaled: |g| g * clip, formula }),
        }
    }
}

/// An update of elements some of whose moments are quantized: block by block, with the values of the moments.
struct UpdateBlocks<'a, 'b, S, F, const N: usize> {
    params: &'a mut [f32],
    grads: &'a [f32],
    moments: &'a mut [MomentMut<'b>; N],
    scaled: S,
    formula: F,
}

impl<S, F, const N: usize> pulp::NullaryFnOnce for UpdateBlocks<'_, '_, S, F, N>
where
    S: Fn(f32) -> f32,
    F: Fn(f32, f32, [f32; N]) -> (f32, [f32; N]),
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { params, grads, moments, scaled, formula } = self;
        let mut values = [[0.0; BLOCK]; N];
        for (block, (params, grads)) in params.chunks_mut(BLOCK).zip(grads.chunks(BLOCK)).enumerate() {
            let len = params.len();
            for (moment, values) in moments.iter_mut().zip(&mut values) {
                moment.read(block, &mut values[..len]);
            }
            let slices = values.each_mut().map(|values| &mut values[..len]);
            Update { params, grads, moments: slices, scaled: &scaled, formula: &formula }.call();
            for (moment, values) in moments.iter_mut().zip(&values) {
                moment.write(block, &values[..len]);
            }
        }
    }
}

/// It is a type instead of a closure, because only code that is certainly inlined is compiled for the
/// processor's vector instructions.
struct Update<'a, S, F, const N: usize> {
    params: &'a mut [f32],
    grads: &'a [f32],
    moments: [&'a mut [f32]; N],
    scaled: S,
    formula: F,
}

impl<S, F, const N: usize> pulp::NullaryFnOnce for Update<'_, S, F, N>
where
    S: Fn(f32) -> f32,
    F: Fn(f32, f32, [f32; N]) -> (f32, [f32; N]),
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { params, grads, moments, scaled, formula } = self;
        let len = params.len();
        let (params, grads) = (&mut params[..len], &grads[..len]);
        let mut moments = moments.map(|moment| &mut moment[..len]);
        for i in 0..len {
            let (param, next) =
                formula(params[i], scaled(grads[i]), std::array::from_fn(|moment| moments[moment][i]));
            params[i] = param;
            for (moment, next) in moments.iter_mut().zip(next) {
                moment[i] = next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{Sgd, Step};
    use crate::{Key, OptimizerSpec};

    fn numbers(key: u64, n: usize) -> Vec<f32> {
        (0..n as u64).map(|i| Key::new(key).normal(i) as f32).collect()
    }

    #[test]
    fn vectors_give_the_bits_of_one_element_at_a_time() {
        let n = 1003;
        for (rule, clip) in [
            (OptimizerSpec::adamw(1e-3), None),
            (OptimizerSpec::adamw(1e-3), Some(0.3)),
            (OptimizerSpec::sgd(1e-2), Some(0.3)),
            (Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.01 }.into(), None),
        ] {
            let (grads, step) = (numbers(2, n), Step { index: 4, rate: rule.lr(), decays: true });
            let run = |width: usize, arch: pulp::Arch| {
                let mut params = numbers(1, n);
                let mut moments: Vec<Vec<f32>> = (0..rule.moments() as u64)
                    .map(|i| numbers(5 + i, n).iter().map(|x| x.abs()).collect())
                    .collect();
                for start in (0..n).step_by(width) {
                    let range = start..(start + width).min(n);
                    let mut moments: Vec<MomentMut<'_>> =
                        moments.iter_mut().map(|m| MomentMut::Floats(&mut m[range.clone()])).collect();
                    let (params, grads) = (&mut params[range.clone()], &grads[range]);
                    rule.update(&step, Elements { arch, ..Elements::new(params, grads, &mut moments, clip) });
                }
                let bits = |values: &Vec<f32>| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                (bits(&params), moments.iter().map(bits).collect::<Vec<_>>())
            };
            let vectors = run(n, pulp::Arch::new());
            assert_ne!(vectors.0, numbers(1, n).iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            // Matches a processor with neither wide vectors nor fused multiply-add.
            let plain = run(n, pulp::Arch::Scalar);
            assert_eq!((&run(1, pulp::Arch::new()), &plain), (&vectors, &vectors));
        }
    }

    #[test]
    fn every_element_follows_the_formula_and_clipping_comes_first() {
        let (mut params, mut moment) = (vec![1.0, 2.0, 3.0], vec![0.0, 1.0, 2.0]);
        let mut moments = [MomentMut::Floats(&mut moment)];
        let elements = Elements::new(&mut params, &[10.0, 20.0, 30.0], &mut moments, Some(0.5));
        elements.update(|p, g, [m]| (p + g, [m - g]));
        assert_eq!((params, moment), (vec![6.0, 12.0, 18.0], vec![-5.0, -9.0, -13.0]));
    }

    #[test]
    #[should_panic(expected = "declares 0 moments updates 1")]
    fn other_moments_than_were_declared_are_refused() {
        Elements::new(&mut [1.0], &[1.0], &mut [], None).update(|p, _, [m]| (p, [m]));
    }

    #[test]
    #[should_panic(expected = "the slices differ in length")]
    fn slices_of_other_lengths_are_refused() {
        let _ = Elements::new(&mut [1.0, 2.0], &[1.0], &mut [], None);
    }
}
