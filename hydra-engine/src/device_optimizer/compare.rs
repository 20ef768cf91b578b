//! Trying whether a device's optimizer has the host's bits.

use super::{add, elements, step, sum};
use crate::optimizer::{Update, step_slice};
use crate::optimizer_check::{OptimizerCheck, RuleCheck};
use burn::tensor::Device;
use hydra_core::cube::CubeBytes;
use hydra_core::{DeviceBytes, DeviceError, HostTensor, Key, OptimizerSpec, finish};
use hydra_spill::{DeviceLink, Direction, LinkError, SpillError};
use std::ops::Range;
use std::sync::Arc;

/// Elements of each kind in each rule.
const ELEMENTS: usize = 1 << 14;

/// The steps that are taken one after another, counted from zero.
const STEPS: [usize; 4] = [0, 1, 2, 5000];

struct Rule {
    name: &'static str,
    spec: OptimizerSpec,
    factor: Option<f32>,
}

fn rules() -> [Rule; 6] {
    let adamw = OptimizerSpec::adamw(1e-3);
    let other = OptimizerSpec::AdamW { lr: 0.03, beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.1 };
    let sgd = OptimizerSpec::Sgd { lr: 0.05, momentum: 0.9, weight_decay: 1e-3 };
    let plain = OptimizerSpec::Sgd { lr: 0.05, momentum: 0.0, weight_decay: 1e-3 };
    let clip = Some(0.37);
    [
        Rule { name: "AdamW", spec: adamw, factor: None },
        Rule { name: "AdamW, clipped", spec: adamw, factor: clip },
        Rule { name: "AdamW, other constants", spec: other, factor: None },
        Rule { name: "SGD with momentum", spec: sgd, factor: None },
        Rule { name: "SGD with momentum, clipped", spec: sgd, factor: clip },
        Rule { name: "SGD", spec: plain, factor: None },
    ]
}

/// What values are drawn for.
#[derive(Clone, Copy)]
enum What {
    /// Parameters, gradients, SGD's momentum and AdamW's first moment.
    Signed,
    /// AdamW's second moment, which is never negative.
    Square,
}

/// Drawn values: in the first half as in training, in the second from everywhere.
fn drawn(key: Key, scale: f64, what: What) -> Vec<f32> {
    let ordinary = |i: u64| match what {
        What::Signed => (scale * key.normal(i)) as f32,
        What::Square => (scale * key.normal(i)).powi(2) as f32,
    };
    let signed = |i: u64| match what {
        What::Signed => extreme(key.fold(1).bits(i)),
        What::Square => extreme(key.fold(1).bits(i)).abs(),
    };
    (0..ELEMENTS as u64).map(ordinary).chain((0..ELEMENTS as u64).map(signed)).collect()
}

/// A finite number of any size: also zeros and denormal numbers, of either sign.
fn extreme(bits: u64) -> f32 {
    let (kind, raw) = (bits >> 61, bits as u32);
    let sign = raw & 0x8000_0000;
    match kind {
        0 => f32::from_bits(sign),
        1 | 2 => f32::from_bits(raw & 0x807f_ffff),
        3 => f32::from_bits(sign | 0x0080_0000 | raw & 0x00ff_ffff),
        4 => f32::from_bits(sign | 0x7e00_0000 | raw & 0x00ff_ffff),
        _ => Some(f32::from_bits(raw)).filter(|x| x.is_finite()).unwrap_or(1.0),
    }
}

impl Rule {
    /// Whether a task with this optimizer, whose gradients are not clipped, is stepped by it.
    fn serves(&self, spec: &OptimizerSpec) -> bool {
        let alike = std::mem::discriminant(&self.spec) == std::mem::discriminant(spec);
        alike && self.spec.moments() == spec.moments() && self.factor.is_none()
    }
}

/// Steps drawn elements on the device of `link`, on which `burn` computes, and on the host: by the rules that tasks
/// with these optimizers need, or by every rule.
///
/// # Errors
/// What the device says, and [`LinkError::Elsewhere`] if it is none of CubeCL's.
pub(crate) fn compare(
    link: &dyn DeviceLink,
    burn: &Device,
    of: Option<&[OptimizerSpec]>,
) -> Result<OptimizerCheck, SpillError> {
    compare_with(&step_slice, link, burn, of)
}

/// What steps a run of elements on the host.
type Stepper = dyn Fn(Update, &mut [f32], &[f32], Option<f32>, &mut [&mut [f32]]);

fn compare_with(
    here: &Stepper,
    link: &dyn DeviceLink,
    burn: &Device,
    of: Option<&[OptimizerSpec]>,
) -> Result<OptimizerCheck, SpillError> {
    let there = There { link, burn };
    let wanted = |rule: &&Rule| of.is_none_or(|of| of.iter().any(|spec| rule.serves(spec)));
    let rules = rules();
    let rules = rules.iter().filter(wanted).map(|rule| there.rule(rule, here));
    let mut rules = rules.collect::<Result<Vec<_>, _>>()?;
    rules.push(there.sums()?);
    Ok(OptimizerCheck { rules })
}

/// The device.
struct There<'a> {
    link: &'a dyn DeviceLink,
    burn: &'a Device,
}

impl There<'_> {
    fn up(&self, values: &[f32]) -> Result<CubeBytes, SpillError> {
        let host = HostTensor::float(values.to_vec(), [values.len()]).bytes;
        let there = self.link.copy_in(&host)?;
        let elsewhere = || LinkError::Elsewhere { link: self.link.name().to_owned() };
        Ok(there.as_buffer::<CubeBytes>().ok_or_else(elsewhere)?.clone())
    }

    fn down(&self, there: &CubeBytes) -> Result<Vec<f32>, SpillError> {
        let mut values = vec![0.0; elements(there)];
        let there = DeviceBytes::Buffer(Arc::new(there.clone()));
        self.link.copy_out_into(&there, &mut values, false)?;
        Ok(values)
    }

    /// Waits until the device has finished.
    fn finish(&self) -> Result<(), SpillError> {
        finish(self.burn, &[]).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: DeviceError) -> SpillError {
        let link = self.link.name().to_owned();
        LinkError::Transfer { link, direction: Direction::Up, bytes: 0, source: error.into() }.into()
    }

    fn rule(&self, rule: &Rule, here: &Stepper) -> Result<RuleCheck, SpillError> {
        let key = Key::new(4);
        let mut params = drawn(key.fold(0), 0.1, What::Signed);
        let mut moments = match rule.spec {
            OptimizerSpec::AdamW { .. } => {
                vec![drawn(key.fold(1), 1e-2, What::Signed), drawn(key.fold(2), 1e-2, What::Square)]
            }
            OptimizerSpec::Sgd { .. } => {
                vec![drawn(key.fold(1), 1e-2, What::Signed); rule.spec.moments()]
            }
        };
        let params_there = self.up(&params)?;
        let moments_there = moments.iter().map(|m| self.up(m)).collect::<Result<Vec<_>, _>>()?;
        let mut found = Found::new(rule.name);
        for index in STEPS {
            let grads = drawn(key.fold(3 + index as u64), 1e-2, What::Signed);
            let update = Update::new(&rule.spec, rule.spec.lr(), index, true);
            let grads_there = self.up(&grads)?;
            step(update, &params_there, &grads_there, rule.factor, &moments_there);
            self.finish()?;
            let mut moments: Vec<&mut [f32]> = moments.iter_mut().map(|m| &mut m[..]).collect();
            here(update, &mut params, &grads, rule.factor, &mut moments);
            found.compare(&params, &self.down(&params_there)?);
            for (here, there) in moments.iter().zip(&moments_there) {
                found.compare(here, &self.down(there)?);
            }
        }
        Ok(found.0)
    }

    /// Sums of gradients.
    fn sums(&self) -> Result<RuleCheck, SpillError> {
        let key = Key::new(5);
        let [a, b, c] = [0, 1, 2].map(|i| drawn(key.fold(i), 1e-2, What::Signed));
        let sum_there = sum(&self.up(&a)?, &self.up(&b)?);
        add(&sum_there, &self.up(&c)?);
        self.finish()?;
        let here: Vec<f32> = a.iter().zip(&b).zip(&c).map(|((a, b), c)| (a + b) + c).collect();
        let mut found = Found::new("sums of gradients");
        found.compare(&here, &self.down(&sum_there)?);
        Ok(found.0)
    }
}

struct Found(RuleCheck);

impl Found {
    fn new(rule: &'static str) -> Self {
        let (ordinary, ordinary_differing, extreme, extreme_differing) = (0, 0, 0, 0);
        Self(RuleCheck { rule, ordinary, ordinary_differing, extreme, extreme_differing, example: None })
    }

    /// Counts the values that differ. Any two that are no numbers are alike: a task with such fails.
    fn compare(&mut self, here: &[f32], there: &[f32]) {
        let differs = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
        let count =
            |range: Range<usize>| here[range.clone()].iter().zip(&there[range]).filter(differs).count();
        self.0.ordinary += ELEMENTS;
        self.0.ordinary_differing += count(0..ELEMENTS);
        self.0.extreme += here.len() - ELEMENTS;
        self.0.extreme_differing += count(ELEMENTS..here.len());
        if self.0.example.is_none() {
            let first = here.iter().zip(there).find(|pair| differs(pair));
            self.0.example = first.map(|(here, there)| format!("{here:e} on the host, {there:e} there"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_drawn_from_everywhere() {
        let (signed, square) = (drawn(Key::new(1), 0.1, What::Signed), drawn(Key::new(1), 0.1, What::Square));
        let (ordinary, extreme) = signed.split_at(ELEMENTS);
        assert!(ordinary.iter().all(|x| x.abs() < 1.0) && signed.iter().all(|x| x.is_finite()));
        assert!(square.iter().all(|x| x.is_finite() && *x >= 0.0));
        for kind in [
            |x: f32| x == 0.0 && x.is_sign_negative(),
            |x: f32| x.is_subnormal(),
            |x: f32| x.is_normal() && x.abs() < 1e-37,
            |x: f32| x.abs() > 1e37,
        ] {
            assert!(extreme.iter().filter(|x| kind(**x)).count() > ELEMENTS / 20);
        }
        assert!(square.contains(&0.0) && square.iter().any(|x| x.is_subnormal()));
    }

    #[test]
    fn a_bit_that_differs_is_found() {
        let here = vec![1.0; ELEMENTS + 3];
        let mut there = here.clone();
        let mut found = Found::new("rule");
        found.compare(&here, &there);
        assert!(OptimizerCheck { rules: vec![found.0.clone()] }.is_exact());
        (there[7], there[ELEMENTS]) = (1.0 + f32::EPSILON, -1.0);
        found.compare(&here, &there);
        let check = OptimizerCheck { rules: vec![found.0] };
        assert_eq!((check.is_exact(), check.differing(), check.values()), (false, 2, 2 * here.len()));
        let example = check.rules[0].example.as_deref();
        assert_eq!(example, Some("1e0 on the host, 1.0000001e0 there"));
    }

    /// The formulas of the host with a fused operation that rounds twice, as a device has that has none.
    #[cfg(feature = "wgpu")]
    fn step_rounding_twice(
        update: Update,
        params: &mut [f32],
        grads: &[f32],
        factor: Option<f32>,
        moments: &mut [&mut [f32]],
    ) {
        let fma = |a: f32, b: f32, c: f32| a * b + c;
        for (i, p) in params.iter_mut().enumerate() {
            let g = factor.map_or(grads[i], |factor| grads[i] * factor);
            *p = match (update, &mut *moments) {
                (Update::AdamW { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps }, [m, v]) => {
                    m[i] = fma(beta1, m[i], rest1 * g);
                    v[i] = fma(beta2, v[i], rest2 * (g * g));
                    fma(-step_size, m[i] / (v[i].sqrt() / root2 + eps), *p * shrink)
                }
                (Update::Sgd { rate, decay, momentum, first }, [buffer]) => {
                    let g = fma(decay, *p, g);
                    buffer[i] = if first { g } else { fma(momentum, buffer[i], g) };
                    fma(-rate, buffer[i], *p)
                }
                (Update::Sgd { rate, decay, .. }, _) => fma(-rate, fma(decay, *p, g), *p),
                (Update::AdamW { .. }, _) => unreachable!("it has two moments"),
            };
        }
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn the_kernels_are_the_formulas_of_the_host() {
        let adapter = hydra_core::cube::CubeAdapter::wgpu(0);
        let Ok(adapter) = adapter.inspect_err(|error| eprintln!("skipped: {error}")) else { return };
        let burn = adapter.burn.clone();
        let link = hydra_spill::CubeLink::new("wgpu:0", adapter);
        let fused = compare(&link, &burn, None).unwrap();
        let twice = compare_with(&step_rounding_twice, &link, &burn, None).unwrap();
        for rule in fused.rules.iter().chain(&twice.rules) {
            eprintln!("{rule:?}");
        }
        // Whether its fused operation rounds once is the device's; a device whose operation rounds twice is found.
        let ordinary =
            |check: &OptimizerCheck| check.rules.iter().map(|rule| rule.ordinary_differing).sum::<usize>();
        assert!(ordinary(&fused) == 0 || ordinary(&twice) == 0 && !fused.is_exact());
        assert!(fused.values() > 1_000_000);
        let of = |spec| {
            let rules = compare(&link, &burn, Some(&[spec])).unwrap().rules;
            rules.iter().map(|rule| rule.rule).collect::<Vec<_>>()
        };
        assert_eq!(of(OptimizerSpec::adamw(1.0)), ["AdamW", "AdamW, other constants", "sums of gradients"]);
        assert_eq!(of(OptimizerSpec::sgd(1.0)), ["SGD with momentum", "sums of gradients"]);
    }
}
