//! The arithmetic of optimizer steps, on host memory.
//!
//! Every element is a function of its own parameter, gradient and moments, so a step gives the same bits
//! whatever the chunks and threads. The only reduction is the global norm, in `f64`, over fixed blocks in
//! chain order. AdamW follows PyTorch's `torch.optim.AdamW`, SGD its `torch.optim.SGD`, in `f32`.
//!
//! A sum with a product is a fused multiply-add, written as such; where both operands are products, the other one
//! is rounded first. So there is nothing left that a compiler may contract, as those of GPUs do unasked, and a
//! formula means the same on every device.

use super::gradient::{CHUNK, ImageGradient, ParamGradient, vectorized};
use hydra_core::{Chain, Decay, FloatType, ImageLayout, ImageParam, OptimizerSpec, TrainSpec};
use hydra_spill::{Masters, NarrowFloats};
use rayon::prelude::*;

/// The constants of one optimizer step of one parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Update {
    AdamW {
        shrink: f32,
        beta1: f32,
        beta2: f32,
        rest1: f32,
        rest2: f32,
        step_size: f32,
        root2: f32,
        eps: f32,
    },
    Sgd {
        rate: f32,
        decay: f32,
        momentum: f32,
        first: bool,
    },
}

impl Update {
    /// The constants for `step` (from zero) at learning rate `rate`; `decays` says whether the parameter
    /// is in the group with weight decay.
    pub(crate) fn new(spec: &OptimizerSpec, rate: f64, step: usize, decays: bool) -> Self {
        match *spec {
            OptimizerSpec::AdamW { beta1, beta2, eps, weight_decay, .. } => {
                let decay = if decays { weight_decay } else { 0.0 };
                let power = i32::try_from(step + 1).unwrap_or(i32::MAX);
                Self::AdamW {
                    shrink: (1.0 - rate * decay) as f32,
                    beta1: beta1 as f32,
                    beta2: beta2 as f32,
                    rest1: (1.0 - beta1) as f32,
                    rest2: (1.0 - beta2) as f32,
                    step_size: (rate / (1.0 - beta1.powi(power))) as f32,
                    root2: (1.0 - beta2.powi(power)).sqrt() as f32,
                    eps: eps as f32,
                }
            }
            OptimizerSpec::Sgd { momentum, weight_decay, .. } => Self::Sgd {
                rate: rate as f32,
                decay: if decays { weight_decay as f32 } else { 0.0 },
                momentum: momentum as f32,
                first: step == 0,
            },
        }
    }
}

/// One run of elements of a parameter with its gradient, which `factor` scales first (clipping).
/// `moments` are AdamW's two, SGD's momentum, or none.
struct StepSlice<'a, 'b> {
    update: Update,
    params: &'a mut [f32],
    grads: &'a [f32],
    factor: Option<f32>,
    moments: &'a mut [&'b mut [f32]],
}

impl pulp::NullaryFnOnce for StepSlice<'_, '_> {
    type Output = ();

    // A closure would be too long to be inlined by itself, and only what is inlined gets vectors.
    #[inline(always)]
    fn call(self) {
        let Self { update, params, grads, factor, moments } = self;
        match factor {
            None => step_elements(update, params, grads, |g| g, moments),
            Some(factor) => step_elements(update, params, grads, |g| g * factor, moments),
        }
    }
}

/// Steps a run of elements of a parameter on the calling thread.
pub(crate) fn step_slice(
    update: Update,
    params: &mut [f32],
    grads: &[f32],
    factor: Option<f32>,
    moments: &mut [&mut [f32]],
) {
    vectorized(StepSlice { update, params, grads, factor, moments });
}

#[inline(always)]
fn step_elements(
    update: Update,
    params: &mut [f32],
    grads: &[f32],
    scaled: impl Fn(f32) -> f32,
    moments: &mut [&mut [f32]],
) {
    match (update, moments) {
        (Update::AdamW { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps }, [m, v]) => {
            for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m.iter_mut()).zip(v.iter_mut()) {
                let g = scaled(*g);
                *m = beta1.mul_add(*m, rest1 * g);
                *v = beta2.mul_add(*v, rest2 * (g * g));
                *p = (-step_size).mul_add(*m / (v.sqrt() / root2 + eps), *p * shrink);
            }
        }
        (Update::Sgd { rate, decay, momentum, first }, [buffer]) => {
            for ((p, g), buffer) in params.iter_mut().zip(grads).zip(buffer.iter_mut()) {
                let g = decay.mul_add(*p, scaled(*g));
                *buffer = if first { g } else { momentum.mul_add(*buffer, g) };
                *p = (-rate).mul_add(*buffer, *p);
            }
        }
        (Update::Sgd { rate, decay, .. }, _) => {
            for (p, g) in params.iter_mut().zip(grads) {
                *p = (-rate).mul_add(decay.mul_add(*p, scaled(*g)), *p);
            }
        }
        (Update::AdamW { .. }, _) => {
            unreachable!("AdamW keeps two moments; the store makes as many as the spec says")
        }
    }
}

/// One step of a task, the same for all its images.
pub(crate) struct Step<'a> {
    pub spec: &'a TrainSpec,
    /// The learning rate.
    pub rate: f64,
    /// The minibatch, from zero.
    pub step: usize,
    /// The factor that clips the gradient.
    pub factor: Option<f32>,
}

impl Step<'_> {
    /// The constants for a parameter.
    pub(crate) fn update(&self, param: &ImageParam) -> Update {
        let decays = self.spec.decay == Decay::All || !param.is_vector();
        Update::new(&self.spec.optimizer, self.rate, self.step, decays)
    }

    /// Steps a whole image, in parallel over the current thread pool.
    pub(crate) fn image(&self, layout: &ImageLayout, masters: &mut Masters, gradient: &ImageGradient) {
        let Masters { params, narrow, moments } = masters;
        let float = narrow.as_ref().map(NarrowFloats::float_type);
        for (param, gradient) in layout.params.iter().zip(&gradient.params) {
            let range = param.range();
            let moments: Vec<&mut [f32]> = moments.iter_mut().map(|m| &mut m[range.clone()]).collect();
            let narrow = narrow.as_mut().map(|narrow| &mut narrow[range.clone()]);
            let stepped = Stepped { params: &mut params[range], narrow: float.zip(narrow), moments };
            step_param(self.update(param), stepped, gradient, self.factor);
        }
    }
}

/// A parameter with what a step of it writes beside it: what it is rounded to, and moments.
struct Stepped<'a> {
    params: &'a mut [f32],
    narrow: Option<(FloatType, &'a mut [u16])>,
    moments: Vec<&'a mut [f32]>,
}

impl<'a> Stepped<'a> {
    /// Pieces of [`CHUNK`] elements, in order.
    fn chunks(self) -> Vec<Stepped<'a>> {
        let chunks = self.params.chunks_mut(CHUNK);
        let mut chunks: Vec<Stepped<'a>> =
            chunks.map(|params| Stepped { params, narrow: None, moments: Vec::new() }).collect();
        if let Some((float, narrow)) = self.narrow {
            let pieces = chunks.iter_mut().zip(narrow.chunks_mut(CHUNK));
            pieces.for_each(|(chunk, narrow)| chunk.narrow = Some((float, narrow)));
        }
        for moments in self.moments {
            let pieces = chunks.iter_mut().zip(moments.chunks_mut(CHUNK));
            pieces.for_each(|(chunk, moments)| chunk.moments.push(moments));
        }
        chunks
    }
}

fn step_param(update: Update, stepped: Stepped<'_>, gradient: &ParamGradient, factor: Option<f32>) {
    stepped.chunks().into_par_iter().enumerate().for_each(|(index, chunk)| {
        let Stepped { params, narrow, mut moments } = chunk;
        let start = index * CHUNK;
        let range = start..start + params.len();
        gradient.chunk(range, |grads| step_slice(update, params, grads, factor, &mut moments));
        if let Some((float, narrow)) = narrow {
            float.narrow(params, narrow);
        }
    });
}

/// The global norm of all gradients of a chain, in chain order; `squares` gives the sum of squares of the
/// gradient of a parameter, by image and slot.
pub(crate) fn global_norm(chain: &Chain, squares: impl Fn(usize, usize) -> f64) -> f64 {
    let images = chain.images().iter().enumerate().filter(|(_, image)| image.trained);
    let slots = images.flat_map(|(i, image)| (0..image.params.len()).map(move |slot| (i, slot)));
    slots.map(|(image, slot)| squares(image, slot)).sum::<f64>().sqrt()
}

/// The factor that scales a gradient of this norm down to `clip`, as `torch.nn.utils.clip_grad_norm_`. That of a norm
/// that is no number is none either, so that the next loss shows it.
pub(crate) fn clip_factor(clip: f64, norm: f64) -> f32 {
    let factor = clip / (norm + 1e-6);
    if factor > 1.0 { 1.0 } else { factor as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::optim::{AdamWConfig, Optimizer};
    use burn::tensor::{Device, Tensor, TensorData};
    use hydra_core::{HostTensor, Key};

    fn gradient(values: &[f32]) -> ParamGradient {
        let tensor = HostTensor::float(values.to_vec(), [values.len()]);
        ParamGradient::Uses { len: values.len(), tensors: vec![Some(tensor)] }
    }

    fn stepped<'a>(params: &'a mut [f32], moments: Vec<&'a mut [f32]>) -> Stepped<'a> {
        Stepped { params, narrow: None, moments }
    }

    fn numbers(key: u64, n: usize) -> Vec<f32> {
        (0..n as u64).map(|i| Key::new(key).normal(i) as f32).collect()
    }

    #[test]
    fn adamw_agrees_with_burns() {
        let n = 40_000;
        let spec = OptimizerSpec::AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        let (mut params, mut m, mut v) = (numbers(1, n), vec![0.0; n], vec![0.0; n]);
        let device = Device::flex();
        let burn = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).build();
        let mut theirs = Tensor::<1>::from_data(TensorData::new(params.clone(), [n]), &device);
        let mut state = None;
        for step in 0..5 {
            let grads = numbers(10 + step as u64, n);
            let update = Update::new(&spec, 1e-2, step, true);
            step_param(update, stepped(&mut params, vec![&mut m, &mut v]), &gradient(&grads), None);
            let grads = Tensor::from_data(TensorData::new(grads, [n]), &device);
            (theirs, state) = Optimizer::step(&burn, 1e-2, theirs, grads, state);
        }
        let theirs = theirs.into_data().try_into_vec::<f32>().unwrap();
        let worst = params.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "{worst}");
    }

    #[test]
    fn a_step_gives_the_same_bits_in_parallel() {
        let n = 100_003;
        for spec in [OptimizerSpec::adamw(1e-3), OptimizerSpec::sgd(1e-2)] {
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut params = numbers(1, n);
                let mut moments = vec![vec![0.0f32; n]; spec.moments()];
                for step in 0..3 {
                    let update = Update::new(&spec, spec.lr(), step, true);
                    let moments = moments.iter_mut().map(|m| &mut m[..]).collect();
                    let gradient = gradient(&numbers(2, n));
                    pool.install(|| step_param(update, stepped(&mut params, moments), &gradient, Some(0.5)));
                }
                (params, moments)
            };
            assert_eq!(run(1), run(3));
        }
    }

    #[test]
    fn what_moves_is_rounded_after_the_step() {
        let n = 2 * CHUNK + 77;
        let spec = OptimizerSpec::adamw(1e-2);
        let (mut params, mut m, mut v) = (numbers(1, n), vec![0.0; n], vec![0.0; n]);
        let mut narrow = vec![0; n];
        let stepped = Stepped {
            narrow: Some((FloatType::Bf16, &mut narrow)),
            ..stepped(&mut params, vec![&mut m, &mut v])
        };
        step_param(Update::new(&spec, 1e-2, 0, true), stepped, &gradient(&numbers(2, n)), None);
        let mut expected = vec![1; n];
        FloatType::Bf16.narrow(&params, &mut expected);
        assert!(params != numbers(1, n) && narrow == expected);
    }

    #[test]
    fn vectors_give_the_bits_of_one_element_at_a_time() {
        let n = 1003;
        for (spec, factor) in [
            (OptimizerSpec::adamw(1e-3), None),
            (OptimizerSpec::adamw(1e-3), Some(0.3)),
            (OptimizerSpec::sgd(1e-2), Some(0.3)),
            (OptimizerSpec::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.01 }, None),
        ] {
            let (grads, update) = (numbers(2, n), Update::new(&spec, spec.lr(), 4, true));
            let run = |width: usize, stepper: Stepper| {
                let mut params = numbers(1, n);
                let mut moments: Vec<Vec<f32>> = (0..spec.moments() as u64)
                    .map(|i| numbers(5 + i, n).iter().map(|x| x.abs()).collect())
                    .collect();
                for start in (0..n).step_by(width) {
                    let range = start..(start + width).min(n);
                    let mut moments: Vec<&mut [f32]> =
                        moments.iter_mut().map(|m| &mut m[range.clone()]).collect();
                    stepper(update, &mut params[range.clone()], &grads[range], factor, &mut moments);
                }
                let bits = |values: &Vec<f32>| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                (bits(&params), moments.iter().map(bits).collect::<Vec<_>>())
            };
            // As on a processor that has neither wide vectors nor a fused multiply-add.
            let plain: Stepper = |update, params, grads, factor, moments| {
                pulp::NullaryFnOnce::call(StepSlice { update, params, grads, factor, moments });
            };
            let vectors = run(n, step_slice);
            assert_eq!((&run(1, step_slice), &run(n, plain)), (&vectors, &vectors));
        }
    }

    type Stepper = fn(Update, &mut [f32], &[f32], Option<f32>, &mut [&mut [f32]]);

    #[test]
    fn the_first_warmup_step_moves_nothing_but_moments() {
        let (mut params, mut m, mut v) = (numbers(1, 10), vec![0.0; 10], vec![0.0; 10]);
        let before = params.clone();
        let update = Update::new(&OptimizerSpec::adamw(1e-3), 0.0, 0, true);
        step_param(update, stepped(&mut params, vec![&mut m, &mut v]), &gradient(&numbers(2, 10)), None);
        assert_eq!(params, before);
        assert!(m.iter().all(|m| *m != 0.0));
    }

    #[test]
    fn sgd_follows_its_definition() {
        let spec = OptimizerSpec::Sgd { lr: 0.1, momentum: 0.5, weight_decay: 0.0 };
        let (mut p, mut buffer) = (vec![1.0f32], vec![0.0f32]);
        for step in 0..2 {
            let update = Update::new(&spec, 0.1, step, true);
            step_param(update, stepped(&mut p, vec![&mut buffer]), &gradient(&[2.0]), None);
        }
        assert_eq!(buffer, [3.0]);
        assert!((p[0] - (1.0 - 0.2 - 0.3)).abs() < 1e-6);
    }

    #[test]
    fn clipping_scales_down_only() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert!((clip_factor(1.0, 4.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(1.0, f64::INFINITY), 0.0);
        assert!(clip_factor(1.0, f64::NAN).is_nan());
    }
}
