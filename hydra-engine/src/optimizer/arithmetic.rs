//! Steps of buffers in host memory, and clipping.
//!
//! The formulas are those of [`hydra_core::optimizer`], applied element by element, so chunks and threads do not
//! change a bit. The only reduction is the global norm, in `f64`, over fixed blocks in chain order.

use super::gradient::{CHUNK, ParamGradient};
use hydra_core::optimizer::{Elements, MomentMut, Optimizer, Step};
use hydra_core::{BufferParam, Chain, FloatType, ParamBufferLayout, TrainSpec};
use hydra_spill::{Masters, Moment, NarrowFloats};
use rayon::prelude::*;

/// One step of a task, the same for all its buffers.
pub(crate) struct TaskStep<'a> {
    pub spec: &'a TrainSpec,
    /// The learning rate.
    pub rate: f64,
    /// The minibatch, from zero.
    pub index: usize,
    /// The factor that clips the gradient.
    pub clip: Option<f32>,
}

impl<'a> TaskStep<'a> {
    /// The step of minibatch `index` of `steps`.
    pub(crate) fn new(spec: &'a TrainSpec, index: usize, steps: usize, clip: Option<f32>) -> Self {
        Self { spec, rate: spec.rate(index, steps), index, clip }
    }

    /// The step of a parameter.
    pub(crate) fn of(&self, param: &BufferParam) -> Step {
        Step { index: self.index, rate: self.rate, decays: self.spec.decays(param) }
    }

    /// Steps a piece of a buffer, starting at this element, in parallel on the current thread pool.
    pub(crate) fn piece(
        &self,
        layout: &ParamBufferLayout,
        start: usize,
        masters: &mut Masters,
        gradient: &[ParamGradient],
    ) {
        if layout.is_state() {
            return advance_piece(layout, start, masters, gradient);
        }
        let Masters { params, narrow, moments, .. } = masters;
        let float = narrow.as_ref().map(NarrowFloats::float_type);
        let piece = start..start + params.len();
        for (param, gradient) in layout.params.iter().zip(gradient) {
            let Some(elements) = param.among(&piece) else { continue };
            let before = elements.start - param.offset;
            let range = elements.start - start..elements.end - start;
            let moments = moments.iter_mut();
            let moments = moments
                .map(|Moment { words, layout }| layout.slice(words, start, elements.clone()))
                .collect();
            let narrow = narrow.as_mut().map(|narrow| &mut narrow[range.clone()]);
            let stepped = Stepped { params: &mut params[range], narrow: float.zip(narrow), moments };
            step_param(&*self.spec.optimizer, self.of(param), stepped, (gradient, before), self.clip);
        }
    }
}

/// Applies the observations of all microbatches to a piece of a buffer of state, starting at this element.
fn advance_piece(
    layout: &ParamBufferLayout,
    start: usize,
    masters: &mut Masters,
    gradient: &[ParamGradient],
) {
    let piece = start..start + masters.params.len();
    for (param, gradient) in layout.params.iter().zip(gradient) {
        let (Some(elements), Some(rule)) = (param.among(&piece), param.state) else { continue };
        let before = elements.start - param.offset;
        let states = &mut masters.params[elements.start - start..elements.end - start];
        for (index, states) in states.chunks_mut(CHUNK).enumerate() {
            let from = before + index * CHUNK;
            gradient.advance(rule, from..from + states.len(), states);
        }
    }
    masters.round();
}

/// Consecutive elements of a parameter, with the other outputs of a step: rounded values and moments.
struct Stepped<'a> {
    params: &'a mut [f32],
    narrow: Option<(FloatType, &'a mut [u16])>,
    moments: Vec<MomentMut<'a>>,
}

impl<'a> Stepped<'a> {
    /// Pieces of [`CHUNK`] elements, which begin with a block of quantized moments, in order.
    fn chunks(self) -> Vec<Stepped<'a>> {
        let chunks = self.params.chunks_mut(CHUNK);
        let mut chunks: Vec<Stepped<'a>> =
            chunks.map(|params| Stepped { params, narrow: None, moments: Vec::new() }).collect();
        if let Some((float, narrow)) = self.narrow {
            let pieces = chunks.iter_mut().zip(narrow.chunks_mut(CHUNK));
            pieces.for_each(|(chunk, narrow)| chunk.narrow = Some((float, narrow)));
        }
        for moments in self.moments {
            let pieces = chunks.iter_mut().zip(moments.chunks(CHUNK));
            pieces.for_each(|(chunk, moments)| chunk.moments.push(moments));
        }
        chunks
    }
}

/// Steps elements of a parameter, from this index on.
fn step_param(
    optimizer: &dyn Optimizer,
    step: Step,
    stepped: Stepped<'_>,
    (gradient, before): (&ParamGradient, usize),
    clip: Option<f32>,
) {
    stepped.chunks().into_par_iter().enumerate().for_each(|(index, chunk)| {
        let Stepped { params, narrow, mut moments } = chunk;
        let start = before + index * CHUNK;
        let range = start..start + params.len();
        gradient.chunk(range, |grads| {
            optimizer.update(&step, Elements::new(params, grads, &mut moments, clip));
        });
        if let Some((float, narrow)) = narrow {
            float.narrow(params, narrow);
        }
    });
}

/// The global norm of all gradients of a chain; `squares` returns a gradient's sum of squares by buffer and slot.
pub(crate) fn global_norm(chain: &Chain, squares: impl Fn(usize, usize) -> f64) -> f64 {
    let buffers = chain.buffers().iter().enumerate().filter(|(_, buffer)| buffer.is_optimized());
    let slots = buffers.flat_map(|(i, buffer)| (0..buffer.params.len()).map(move |slot| (i, slot)));
    slots.map(|(buffer, slot)| squares(buffer, slot)).sum::<f64>().sqrt()
}

/// The factor that scales a gradient with this norm down to `clip`, as in `torch.nn.utils.clip_grad_norm_`. A norm
/// that is not finite gives a factor that is not finite, so the next loss reports it.
pub(crate) fn clip_factor(clip: f64, norm: f64) -> f32 {
    let factor = clip / (norm + 1e-6);
    if factor > 1.0 { 1.0 } else { factor as f32 }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{numbers, tied};
    use super::*;
    use burn::optim::AdamWConfig;
    use burn::tensor::{Device, Tensor, TensorData};
    use hydra_core::optimizer::{AdamW, Sgd};
    use hydra_core::{HostTensor, OptimizerSpec};
    use hydra_spill::Floats;
    use std::ops::Range;

    fn gradient(values: &[f32]) -> ParamGradient {
        let tensor = HostTensor::float(values.to_vec(), [values.len()]);
        ParamGradient::Uses { len: values.len(), tensors: vec![Some(tensor)] }
    }

    fn stepped<'a>(params: &'a mut [f32], moments: Vec<&'a mut [f32]>) -> Stepped<'a> {
        let moments = moments.into_iter().map(MomentMut::Floats).collect();
        Stepped { params, narrow: None, moments }
    }

    /// A step of a parameter with weight decay.
    fn at(index: usize, rate: f64) -> Step {
        Step { index, rate, decays: true }
    }

    #[test]
    fn adamw_agrees_with_burns() {
        let n = 40_000;
        let rule = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        let (mut params, mut m, mut v) = (numbers(1, n), vec![0.0; n], vec![0.0; n]);
        let device = Device::flex();
        let burn = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).build();
        let mut theirs = Tensor::<1>::from_data(TensorData::new(params.clone(), [n]), &device);
        let mut state = None;
        for step in 0..5 {
            let grads = numbers(10 + step as u64, n);
            let masters = stepped(&mut params, vec![&mut m, &mut v]);
            step_param(&rule, at(step, 1e-2), masters, (&gradient(&grads), 0), None);
            let grads = Tensor::from_data(TensorData::new(grads, [n]), &device);
            (theirs, state) = burn::optim::Optimizer::step(&burn, 1e-2, theirs, grads, state);
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
                    let moments = moments.iter_mut().map(|m| &mut m[..]).collect();
                    let (masters, gradient) = (stepped(&mut params, moments), gradient(&numbers(2, n)));
                    let step = at(step, spec.lr());
                    pool.install(|| step_param(&*spec, step, masters, (&gradient, 0), Some(0.5)));
                }
                (params, moments)
            };
            assert_eq!(run(1), run(3));
        }
    }

    #[test]
    fn pieces_of_any_length_are_stepped_as_the_whole_buffer() {
        let (n, float) = (CHUNK + 300, FloatType::Bf16);
        let layout = tied(2, n, float);
        let spec = TrainSpec::new(OptimizerSpec::adamw(1e-2), 1);
        let step = TaskStep { spec: &spec, rate: 1e-2, index: 3, clip: Some(0.7) };
        let gradient = [1, 2].map(|key| gradient(&numbers(key, n)));
        let part = |key: u64, of: Range<usize>| -> Vec<f32> {
            numbers(key, layout.elements)[of].iter().map(|value| value.abs()).collect()
        };
        let stepped = |piece: usize| {
            let (mut params, mut narrow, mut moments) = (Vec::new(), Vec::new(), vec![Vec::new(); 2]);
            for start in (0..layout.elements).step_by(piece) {
                let of = start..layout.elements.min(start + piece);
                let rounded = NarrowFloats::of(&part(3, of.clone()), float, Floats::from);
                let values = Masters::new(part(3, of.clone()), vec![part(4, of.clone()), part(5, of)]);
                let mut masters = Masters { narrow: Some(rounded), ..values };
                step.piece(&layout, start, &mut masters, &gradient);
                params.extend_from_slice(&masters.params);
                narrow.extend_from_slice(&masters.narrow.unwrap());
                moments.iter_mut().zip(masters.moments).for_each(|(all, piece)| all.extend(piece.words));
            }
            (params, narrow, moments)
        };
        let whole = stepped(layout.elements);
        assert_ne!(whole.0, part(3, 0..layout.elements));
        for piece in [999, CHUNK - 1, CHUNK, n] {
            assert!(stepped(piece) == whole, "{piece}");
        }
    }

    #[test]
    fn what_moves_is_rounded_after_the_step() {
        let n = 2 * CHUNK + 77;
        let (mut params, mut m, mut v) = (numbers(1, n), vec![0.0; n], vec![0.0; n]);
        let mut narrow = vec![0; n];
        let stepped = Stepped {
            narrow: Some((FloatType::Bf16, &mut narrow)),
            ..stepped(&mut params, vec![&mut m, &mut v])
        };
        step_param(&AdamW::new(1e-2), at(0, 1e-2), stepped, (&gradient(&numbers(2, n)), 0), None);
        let mut expected = vec![1; n];
        FloatType::Bf16.narrow(&params, &mut expected);
        assert!(params != numbers(1, n) && narrow == expected);
    }

    #[test]
    fn the_first_warmup_step_moves_nothing_but_moments() {
        let (mut params, mut m, mut v) = (numbers(1, 10), vec![0.0; 10], vec![0.0; 10]);
        let before = params.clone();
        let masters = stepped(&mut params, vec![&mut m, &mut v]);
        step_param(&AdamW::new(1e-3), at(0, 0.0), masters, (&gradient(&numbers(2, 10)), 0), None);
        assert_eq!(params, before);
        assert!(m.iter().all(|m| *m != 0.0));
    }

    #[test]
    fn sgd_follows_its_definition() {
        let rule = Sgd { lr: 0.1, momentum: 0.5, weight_decay: 0.0 };
        let (mut p, mut buffer) = (vec![1.0f32], vec![0.0f32]);
        for step in 0..2 {
            step_param(
                &rule,
                at(step, 0.1),
                stepped(&mut p, vec![&mut buffer]),
                (&gradient(&[2.0]), 0),
                None,
            );
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
