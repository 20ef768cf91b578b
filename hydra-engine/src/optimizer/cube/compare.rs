//! Compares the bits of a device's optimizer with the host's.

use super::{CubeFloats, add, round, rules, sum};
use crate::optimizer::check::{OptimizerCheck, RuleCheck, Tried};
use burn::tensor::Device;
use bytes::Bytes;
use hydra_core::cube::CubeBytes;
use hydra_core::optimizer::{AdamW, Elements, MomentMut, Optimizer, Sgd, Step};
use hydra_core::{DeviceBytes, FloatType, HostTensor, Key, OptimizerSpec, finish};
use hydra_spill::{DeviceLink, Direction, LinkError, SpillError};
use std::ops::Range;
use std::sync::Arc;

/// Elements of each kind in each rule.
const ELEMENTS: usize = 1 << 14;

/// The steps to run, one after another, counted from zero.
const STEPS: [usize; 4] = [0, 1, 2, 5000];

struct Rule {
    name: &'static str,
    spec: OptimizerSpec,
    clip: Option<f32>,
}

fn rules() -> [Rule; 6] {
    let rule = |name, spec, clip| Rule { name, spec, clip };
    let adamw = || OptimizerSpec::adamw(1e-3);
    let other = AdamW { lr: 0.03, beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.1 };
    let sgd = |momentum| OptimizerSpec::from(Sgd { lr: 0.05, momentum, weight_decay: 1e-3 });
    [
        rule("AdamW", adamw(), None),
        rule("AdamW, clipped", adamw(), Some(0.37)),
        rule("AdamW, other constants", other.into(), None),
        rule("SGD with momentum", sgd(0.9), None),
        rule("SGD with momentum, clipped", sgd(0.9), Some(0.37)),
        rule("SGD", sgd(0.0), None),
    ]
}

/// Random values: the first half as in training, the second of any size.
fn drawn(key: Key, scale: f64) -> Vec<f32> {
    let ordinary = (0..ELEMENTS as u64).map(|i| (scale * key.normal(i)) as f32);
    ordinary.chain((0..ELEMENTS as u64).map(|i| extreme(key.fold(1).bits(i)))).collect()
}

/// Random values of AdamW's second moment, which is never negative.
fn drawn_squares(key: Key, scale: f64) -> Vec<f32> {
    let ordinary = (0..ELEMENTS as u64).map(|i| (scale * key.normal(i)).powi(2) as f32);
    ordinary.chain((0..ELEMENTS as u64).map(|i| extreme(key.fold(1).bits(i)).abs())).collect()
}

/// A finite number of any size, including zeros and denormal numbers of either sign.
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

/// Gradients of this type. The second half of 16-bit gradients is drawn from all values of the type.
fn gradient(key: Key, float: FloatType) -> HostTensor {
    let ordinary = HostTensor::float(drawn(key, 1e-2), [2 * ELEMENTS]).in_type(float);
    if float == FloatType::F32 {
        return ordinary;
    }
    let (mut bytes, bits) = (ordinary.bytes.to_vec(), key.fold(2));
    for (i, element) in bytes.chunks_exact_mut(2).enumerate().skip(ELEMENTS) {
        element.copy_from_slice(&(bits.bits(i as u64) as u16).to_ne_bytes());
    }
    HostTensor::view(Bytes::from(bytes), ordinary.shape, ordinary.dtype)
}

/// Values to round to a 16-bit type: parameters as in training, values of any size, and values at or next to the
/// midpoint of two neighbours.
fn unrounded(key: Key, float: FloatType) -> Vec<f32> {
    let middle = |i: u64| {
        let bits = (i / 3 * 7) as u16;
        let mut neighbours = [0.0; 2];
        float.widen(&[bits, bits.wrapping_add(1)], &mut neighbours);
        let [a, b] = neighbours.map(f64::from);
        // A neighbour that is infinite or not a number has no midpoint.
        let middle = ((a + b) / 2.0) as f32;
        match i % 3 {
            0 => middle,
            1 => middle.next_up(),
            _ => middle.next_down(),
        }
    };
    let mut values = drawn(key, 0.1);
    values.extend((0..2 * ELEMENTS as u64).map(middle));
    values
}

impl Rule {
    /// Returns true if a task with this optimizer and without clipping uses the rule.
    fn serves(&self, spec: &OptimizerSpec) -> bool {
        let alike = self.spec.name() == spec.name() && self.spec.moments() == spec.moments();
        alike && self.clip.is_none()
    }
}

/// Steps, adds and rounds random elements on the device `burn`, reached over `link`, and on the host.
pub(super) fn compare(
    link: &dyn DeviceLink,
    burn: &Device,
    tried: Tried<'_>,
) -> Result<OptimizerCheck, SpillError> {
    let update = |rule: &dyn Optimizer, step: &Step, elements: Elements<'_, '_>| rule.update(step, elements);
    compare_with(&update, link, burn, tried)
}

/// Steps a run of elements on the host.
type Stepper = dyn Fn(&dyn Optimizer, &Step, Elements<'_, '_>);

fn compare_with(
    here: &Stepper,
    link: &dyn DeviceLink,
    burn: &Device,
    tried: Tried<'_>,
) -> Result<OptimizerCheck, SpillError> {
    let device = OnDevice { link, burn };
    let mut found = Vec::new();
    for float in [FloatType::F32, FloatType::Bf16, FloatType::F16].into_iter().filter(|f| tried.has(*f)) {
        for rule in rules().iter().filter(|rule| tried.wants(rule, float)) {
            found.push(device.rule(rule, float, here)?);
        }
        found.push(device.sums(float)?);
        if float != FloatType::F32 {
            found.push(device.rounding(float)?);
        }
    }
    Ok(OptimizerCheck { rules: found })
}

impl Tried<'_> {
    fn has(self, float: FloatType) -> bool {
        match self {
            Self::Every(floats) => floats.contains(&float),
            Self::Tasks(tasks) => tasks.iter().any(|(_, of)| *of == float),
        }
    }

    fn wants(self, rule: &Rule, float: FloatType) -> bool {
        match self {
            Self::Every(floats) => floats.contains(&float),
            Self::Tasks(tasks) => tasks.iter().any(|(spec, of)| *of == float && rule.serves(spec)),
        }
    }
}

/// The device.
struct OnDevice<'a> {
    link: &'a dyn DeviceLink,
    burn: &'a Device,
}

impl OnDevice<'_> {
    fn up(&self, values: &[f32]) -> Result<CubeBytes, SpillError> {
        let tensor = HostTensor::float(values.to_vec(), [values.len()]);
        Ok(self.tensor_up(&tensor, FloatType::F32)?.bytes)
    }

    fn tensor_up(&self, tensor: &HostTensor, float: FloatType) -> Result<CubeFloats, SpillError> {
        let uploaded = self.link.upload(&tensor.bytes)?;
        let elsewhere = || LinkError::Elsewhere { link: self.link.name().to_owned() };
        let bytes = uploaded.as_buffer::<CubeBytes>().ok_or_else(elsewhere)?.clone();
        Ok(CubeFloats { bytes, float })
    }

    fn down(&self, there: &CubeBytes) -> Result<Vec<f32>, SpillError> {
        self.floats_down(&CubeFloats::wide(there.clone()))
    }

    /// The values of floats of any type.
    fn floats_down(&self, there: &CubeFloats) -> Result<Vec<f32>, SpillError> {
        let bytes = DeviceBytes::Buffer(Arc::new(there.bytes.clone()));
        let elements = bytes.len() / there.float.bytes();
        let here = HostTensor::view(self.link.download(&bytes)?, [elements], there.float.dtype());
        Ok(here.floats(0..elements).into_owned())
    }

    /// Waits until the device has finished.
    fn finish(&self) -> Result<(), SpillError> {
        finish(self.burn, &[]).map_err(|error| {
            let link = self.link.name().to_owned();
            LinkError::Transfer { link, direction: Direction::Upload, bytes: 0, source: error.into() }.into()
        })
    }

    fn rule(&self, rule: &Rule, float: FloatType, here: &Stepper) -> Result<RuleCheck, SpillError> {
        let key = Key::new(4);
        let kernel = rules::kernel(&*rule.spec).expect("a rule with a kernel");
        let mut params = drawn(key.fold(0), 0.1);
        let drawn = [drawn(key.fold(1), 1e-2), drawn_squares(key.fold(2), 1e-2)];
        let mut moments: Vec<Vec<f32>> = drawn.into_iter().take(rule.spec.moments()).collect();
        let params_there = self.up(&params)?;
        let moments_there = moments.iter().map(|m| self.up(m)).collect::<Result<Vec<_>, _>>()?;
        let mut found = RuleCheck::of(rule.name, float);
        for index in STEPS {
            let grads = gradient(key.fold(3 + index as u64), float);
            let step = Step { index, rate: rule.spec.lr(), decays: true };
            let grads_there = self.tensor_up(&grads, float)?;
            kernel.launch(&step, rule.clip, &params_there, &grads_there, &moments_there);
            self.finish()?;
            let mut stored: Vec<MomentMut<'_>> = moments.iter_mut().map(|m| MomentMut::Floats(m)).collect();
            let grads = grads.floats(0..2 * ELEMENTS);
            here(&*rule.spec, &step, Elements::new(&mut params, &grads, &mut stored, rule.clip));
            found.count(&params, &self.down(&params_there)?);
            for (here, there) in moments.iter().zip(&moments_there) {
                found.count(here, &self.down(there)?);
            }
        }
        Ok(found)
    }

    /// Sums of gradients, including one with an earlier sum.
    fn sums(&self, float: FloatType) -> Result<RuleCheck, SpillError> {
        let key = Key::new(5);
        let parts = [0, 1, 2].map(|i| gradient(key.fold(i), float));
        let wide = drawn(key.fold(3), 1e-2);
        let [a, b, c] = parts.each_ref().map(|part| part.floats(0..2 * ELEMENTS));
        let [a_there, b_there, c_there] = parts.each_ref().map(|part| self.tensor_up(part, float));
        let (a_there, b_there, c_there) = (a_there?, b_there?, c_there?);
        let sum_there = sum(&a_there, &b_there);
        add(&sum_there, &c_there);
        let mixed_there = sum(&a_there, &CubeFloats::wide(self.up(&wide)?));
        self.finish()?;
        let here: Vec<f32> = a.iter().zip(&*b).zip(&*c).map(|((a, b), c)| (a + b) + c).collect();
        let mixed: Vec<f32> = a.iter().zip(&wide).map(|(a, wide)| a + wide).collect();
        let mut found = RuleCheck::of("sums of gradients", float);
        found.count(&here, &self.down(&sum_there)?);
        found.count(&mixed, &self.down(&mixed_there)?);
        Ok(found)
    }

    /// Master weights rounded to the type that shard tasks read.
    fn rounding(&self, float: FloatType) -> Result<RuleCheck, SpillError> {
        let values = unrounded(Key::new(6), float);
        let here = HostTensor::float(values.clone(), [values.len()]).in_type(float);
        let zeros = HostTensor::float(vec![0.0; values.len()], [values.len()]).in_type(float);
        let there = self.tensor_up(&zeros, float)?;
        round(&self.up(&values)?, &there);
        self.finish()?;
        let mut found = RuleCheck::of("rounding", float);
        found.count(&here.floats(0..values.len()), &self.floats_down(&there)?);
        Ok(found)
    }
}

impl RuleCheck {
    fn of(rule: &str, float: FloatType) -> Self {
        let rule = match float {
            FloatType::F32 => rule.to_owned(),
            narrow => format!("{rule} in {narrow}"),
        };
        Self { rule, ..Self::default() }
    }

    /// Counts the values that differ. Two values that are not numbers count as equal: a task with such values fails.
    fn count(&mut self, here: &[f32], there: &[f32]) {
        let differs = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
        let differing =
            |range: Range<usize>| here[range.clone()].iter().zip(&there[range]).filter(differs).count();
        self.ordinary += ELEMENTS;
        self.ordinary_differing += differing(0..ELEMENTS);
        self.extreme += here.len() - ELEMENTS;
        self.extreme_differing += differing(ELEMENTS..here.len());
        if self.example.is_none() {
            let first = here.iter().zip(there).find(|pair| differs(pair));
            self.example = first.map(|(here, there)| format!("{here:e} on the host, {there:e} there"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_drawn_from_everywhere() {
        let (signed, square) = (drawn(Key::new(1), 0.1), drawn_squares(Key::new(1), 0.1));
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
    fn what_is_rounded_lies_on_both_sides_and_in_the_middle() {
        for float in [FloatType::Bf16, FloatType::F16] {
            let values = unrounded(Key::new(6), float);
            let mut bits = vec![0; values.len()];
            float.narrow(&values, &mut bits);
            let mut rounded = vec![0.0; values.len()];
            float.widen(&bits, &mut rounded);
            // Truncation never gives the larger of two neighbours.
            let larger = (0..values.len()).filter(|i| rounded[*i].abs() > values[*i].abs()).count();
            let smaller = (0..values.len()).filter(|i| rounded[*i].abs() < values[*i].abs()).count();
            assert!(larger > ELEMENTS / 2 && smaller > ELEMENTS / 2, "{float}: {larger}, {smaller}");
            // Ties: halfway between two neighbours, the even one is taken.
            let mut ties = 0;
            for i in 2 * ELEMENTS..values.len() {
                let tie =
                    (i - 2 * ELEMENTS).is_multiple_of(3) && values[i].is_finite() && rounded[i].is_finite();
                assert!(!tie || bits[i].is_multiple_of(2), "{float}: {} became {:#x}", values[i], bits[i]);
                ties += usize::from(tie);
            }
            assert!(ties > ELEMENTS / 3, "{float}: {ties}");
        }
        let gradient = gradient(Key::new(1), FloatType::F16);
        let extreme = gradient.floats(ELEMENTS..2 * ELEMENTS);
        let tiny = |x: &&f32| x.abs() < 6.0e-5 && **x != 0.0;
        let huge = |x: &&f32| x.abs() > 3e4;
        let count = |kind: &dyn Fn(&&f32) -> bool| extreme.iter().filter(kind).count();
        assert!(count(&tiny) > ELEMENTS / 100 && count(&huge) > ELEMENTS / 100, "denormal, and the largest");
    }

    #[test]
    fn a_bit_that_differs_is_found() {
        let here = vec![1.0; ELEMENTS + 3];
        let mut there = here.clone();
        let mut found = RuleCheck::of("rule", FloatType::F32);
        found.count(&here, &there);
        assert!(OptimizerCheck { rules: vec![found.clone()] }.is_exact());
        (there[7], there[ELEMENTS]) = (1.0 + f32::EPSILON, -1.0);
        found.count(&here, &there);
        let check = OptimizerCheck { rules: vec![found] };
        assert_eq!((check.is_exact(), check.differing(), check.values()), (false, 2, 2 * here.len()));
        let example = check.rules[0].example.as_deref();
        assert_eq!(example, Some("1e0 on the host, 1.0000001e0 there"));
    }

    /// The host's formulas with a fused operation that rounds twice, as on a device without one.
    #[cfg(feature = "cube")]
    fn step_rounding_twice(optimizer: &dyn Optimizer, step: &Step, elements: Elements<'_, '_>) {
        use hydra_core::optimizer::{AdamWConstants, SgdConstants};
        let fma = |a: f32, b: f32, c: f32| a * b + c;
        if let Some(rule) = optimizer.downcast_ref::<AdamW>() {
            let AdamWConstants { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps } =
                rule.constants(step);
            return elements.update(|p, g, [m, v]| {
                let m = fma(beta1, m, rest1 * g);
                let v = fma(beta2, v, rest2 * (g * g));
                (fma(-step_size, m / (v.sqrt() / root2 + eps), p * shrink), [m, v])
            });
        }
        let rule = optimizer.downcast_ref::<Sgd>().unwrap();
        let SgdConstants { rate, decay, momentum, first } = rule.constants(step);
        if rule.moments() == 0 {
            return elements.update(|p, g, []| (fma(-rate, fma(decay, p, g), p), []));
        }
        elements.update(|p, g, [buffer]| {
            let g = fma(decay, p, g);
            let buffer = if first { g } else { fma(momentum, buffer, g) };
            (fma(-rate, buffer, p), [buffer])
        });
    }

    #[cfg(feature = "cube")]
    #[test]
    fn the_kernels_are_the_formulas_of_the_host() {
        let adapter = hydra_core::cube::CubeAdapter::wgpu(0);
        let Ok(adapter) = adapter.inspect_err(|error| eprintln!("skipped: {error}")) else { return };
        let burn = adapter.burn.clone();
        let link = hydra_spill::CubeLink::new("wgpu:0", adapter);
        let floats = [FloatType::F32, FloatType::Bf16, FloatType::F16];
        let has = |float: &FloatType| hydra_models::ops::supports(&burn, float.dtype());
        let floats: Vec<FloatType> = floats.into_iter().filter(has).collect();
        let fused = compare(&link, &burn, Tried::Every(&floats)).unwrap();
        let twice = compare_with(&step_rounding_twice, &link, &burn, Tried::Every(&floats)).unwrap();
        for rule in fused.rules.iter().chain(&twice.rules) {
            eprintln!("{rule:?}");
        }
        // Whether a fused operation rounds once depends on the device; one that rounds twice is detected.
        let ordinary =
            |check: &OptimizerCheck| check.rules.iter().map(|rule| rule.ordinary_differing).sum::<usize>();
        assert!(ordinary(&fused) == 0 || ordinary(&twice) == 0 && !fused.is_exact());
        assert!(fused.values() > 1_000_000);
        let of = |tasks: &[(OptimizerSpec, FloatType)]| {
            let rules = compare(&link, &burn, Tried::Tasks(tasks)).unwrap().rules;
            rules.into_iter().map(|rule| rule.rule).collect::<Vec<_>>()
        };
        let (adamw, sgd) = (OptimizerSpec::adamw(1.0), OptimizerSpec::sgd(1.0));
        let wide = of(&[(adamw.clone(), FloatType::F32)]);
        assert_eq!(wide, ["AdamW", "AdamW, other constants", "sums of gradients"]);
        assert_eq!(of(&[(sgd.clone(), FloatType::F32)]), ["SGD with momentum", "sums of gradients"]);
        if let Some(narrow) = floats.last().filter(|float| **float != FloatType::F32) {
            let both = of(&[(adamw, FloatType::F32), (sgd, *narrow)]);
            let [momentum, sums, rounding] = ["SGD with momentum", "sums of gradients", "rounding"]
                .map(|rule| format!("{rule} in {narrow}"));
            assert_eq!(both, [wide, vec![momentum, sums, rounding]].concat());
        }
    }
}
