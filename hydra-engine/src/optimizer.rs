//! The arithmetic of optimizer steps, on host memory.
//!
//! Every element is a function of its own parameter, gradient and moments, so a step gives the same bits
//! whatever the chunks and threads. The only reduction is the global norm, in `f64`, over fixed blocks in
//! chain order. AdamW follows PyTorch's `torch.optim.AdamW`, SGD its `torch.optim.SGD`, in `f32`.

use hydra_core::{Chain, Decay, ImageLayout, OptimizerSpec, TrainSpec};
use hydra_spill::Masters;
use rayon::prelude::*;
use std::ops::Range;

/// Elements that one parallel piece of work covers.
const CHUNK: usize = 1 << 14;

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

/// Steps one run of elements of a parameter; `factor` scales the gradient first (clipping).
/// `moments` are AdamW's two, SGD's momentum, or none.
fn step_slice(
    update: Update,
    params: &mut [f32],
    grads: &[f32],
    factor: Option<f32>,
    moments: &mut [&mut [f32]],
) {
    let scaled = |g: f32| factor.map_or(g, |f| g * f);
    match (update, moments) {
        (Update::AdamW { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps }, [m, v]) => {
            for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m.iter_mut()).zip(v.iter_mut()) {
                let g = scaled(*g);
                *m = beta1 * *m + rest1 * g;
                *v = beta2 * *v + rest2 * (g * g);
                *p = *p * shrink - step_size * (*m / (v.sqrt() / root2 + eps));
            }
        }
        (Update::Sgd { rate, decay, momentum, first }, [buffer]) => {
            for ((p, g), buffer) in params.iter_mut().zip(grads).zip(buffer.iter_mut()) {
                let g = scaled(*g) + decay * *p;
                *buffer = if first { g } else { momentum * *buffer + g };
                *p -= rate * *buffer;
            }
        }
        (Update::Sgd { rate, decay, .. }, _) => {
            for (p, g) in params.iter_mut().zip(grads) {
                *p -= rate * (scaled(*g) + decay * *p);
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
    /// Steps a whole image, in parallel over the current thread pool.
    pub(crate) fn image(&self, layout: &ImageLayout, masters: &mut Masters, grads: &[f32]) {
        let Masters { params, moments } = masters;
        for param in &layout.params {
            let decays = self.spec.decay == Decay::All || !param.is_vector();
            let update = Update::new(&self.spec.optimizer, self.rate, self.step, decays);
            let range = param.range();
            let moments: Vec<&mut [f32]> = moments.iter_mut().map(|m| &mut m[range.clone()]).collect();
            step_param(update, &mut params[range.clone()], &grads[range], self.factor, moments);
        }
    }
}

fn step_param(
    update: Update,
    params: &mut [f32],
    grads: &[f32],
    factor: Option<f32>,
    moments: Vec<&mut [f32]>,
) {
    if params.len() <= CHUNK {
        let mut moments = moments;
        return step_slice(update, params, grads, factor, &mut moments);
    }
    let chunks = params.len().div_ceil(CHUNK);
    let mut split: Vec<Vec<&mut [f32]>> = (0..chunks).map(|_| Vec::with_capacity(moments.len())).collect();
    for moment in moments {
        moment.chunks_mut(CHUNK).zip(&mut split).for_each(|(chunk, of)| of.push(chunk));
    }
    let work = params.par_chunks_mut(CHUNK).zip(grads.par_chunks(CHUNK)).zip(split);
    work.for_each(|((params, grads), mut moments)| step_slice(update, params, grads, factor, &mut moments));
}

/// The sum of the squares of a gradient: `f64` sums of fixed blocks, added in order.
fn sum_of_squares(grads: &[f32]) -> f64 {
    let blocks: Vec<f64> = grads.par_chunks(CHUNK).map(block_of_squares).collect();
    blocks.iter().sum()
}

fn block_of_squares(block: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    for eight in block.chunks(8) {
        eight.iter().zip(&mut lanes).for_each(|(g, lane)| *lane += f64::from(*g) * f64::from(*g));
    }
    lanes.iter().sum()
}

/// The global norm of all gradients of a chain, in chain order; `gradient` gives those of an image.
pub(crate) fn global_norm<'a>(chain: &Chain, gradient: impl Fn(usize) -> &'a [f32]) -> f64 {
    let images = chain.images().iter().enumerate().filter(|(_, image)| image.trained);
    let ranges = images.flat_map(|(i, image)| image.params.iter().map(move |p| (i, p.range())));
    ranges.map(|(i, range): (usize, Range<usize>)| sum_of_squares(&gradient(i)[range])).sum::<f64>().sqrt()
}

/// The factor that scales a gradient of this norm down to `clip`, as `torch.nn.utils.clip_grad_norm_`.
pub(crate) fn clip_factor(clip: f64, norm: f64) -> f32 {
    (clip / (norm + 1e-6)).min(1.0) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::optim::{AdamWConfig, Optimizer};
    use burn::tensor::{Device, Tensor, TensorData};
    use hydra_core::Key;

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
            step_param(update, &mut params, &grads, None, vec![&mut m, &mut v]);
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
                    let moments = moments.iter_mut().map(Vec::as_mut_slice).collect();
                    pool.install(|| step_param(update, &mut params, &numbers(2, n), Some(0.5), moments));
                }
                (params, pool.install(|| sum_of_squares(&numbers(3, n))))
            };
            assert_eq!(run(1), run(3));
        }
    }

    #[test]
    fn the_first_warmup_step_moves_nothing_but_moments() {
        let (mut params, mut m, mut v) = (numbers(1, 10), vec![0.0; 10], vec![0.0; 10]);
        let before = params.clone();
        let update = Update::new(&OptimizerSpec::adamw(1e-3), 0.0, 0, true);
        step_param(update, &mut params, &numbers(2, 10), None, vec![&mut m, &mut v]);
        assert_eq!(params, before);
        assert!(m.iter().all(|m| *m != 0.0));
    }

    #[test]
    fn sgd_follows_its_definition() {
        let spec = OptimizerSpec::Sgd { lr: 0.1, momentum: 0.5, weight_decay: 0.0 };
        let (mut p, mut buffer) = (vec![1.0f32], vec![0.0f32]);
        for step in 0..2 {
            step_param(Update::new(&spec, 0.1, step, true), &mut p, &[2.0], None, vec![&mut buffer]);
        }
        assert_eq!(buffer, [3.0]);
        assert!((p[0] - (1.0 - 0.2 - 0.3)).abs() < 1e-6);
    }

    #[test]
    fn clipping_scales_down_only() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert!((clip_factor(1.0, 4.0) - 0.25).abs() < 1e-6);
    }
}
