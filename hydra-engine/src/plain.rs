//! The plain training loop: one resident, unsharded model, one step after another.
//!
//! This is the reference that spilled training is compared with, bit for bit. The whole chain is one graph, the
//! optimizer is a scalar loop, and nothing overlaps. It shares only data order, schedule and the optimizer's formula
//! with the engine.

use crate::error::{EngineError, guarded};
use crate::optimizer::{TaskStep, clip_factor, global_norm, sum_of_squares};
use crate::protocol::{Sums, statistic_of_targets};
use crate::weights::{WeightHash, initial_buffer, param_hashes};
use burn::tensor::Device;
use hydra_core::optimizer::dynamic8::BLOCK;
use hydra_core::optimizer::{Elements, MomentLayout, MomentMut};
use hydra_core::{
    Activation, AnyTensor, Batch, Chain, Dataset, DeviceBytes, Encoding, FloatType, HostTensor, Layer,
    Length, Measured, ParamBufferLayout, Pass, Sampler, Statistic, TrainSpec, forward_range, gather,
    loss_value, nf4,
};

/// The results of the plain loop.
#[derive(Clone, Debug)]
pub struct PlainRun {
    /// The mean loss of each minibatch, before its update.
    pub losses: Vec<f64>,
    /// The global norm of each minibatch's gradient, before clipping.
    pub gradient_norms: Vec<f64>,
    /// The final master weights, by buffer.
    pub buffers: Vec<Vec<f32>>,
    /// SHA-256 over the final master weights, as in a report.
    pub weights_sha256: String,
}

/// Trains `chain` on `data` according to `spec`, on the CPU.
///
/// # Errors
/// As [`train_on`].
pub fn train(chain: &Chain, data: &dyn Dataset, spec: &TrainSpec) -> Result<PlainRun, EngineError> {
    train_on(chain, data, spec, &Device::flex())
}

/// Trains `chain` on `data` according to `spec`, on a plain (not autodiff) device.
///
/// # Errors
/// Those of the spec, of the dataset and of the initial weights, and [`EngineError::Panicked`] if a layer or the
/// dataset panics.
pub fn train_on(
    chain: &Chain,
    data: &dyn Dataset,
    spec: &TrainSpec,
    device: &Device,
) -> Result<PlainRun, EngineError> {
    train_forked(chain, data, (spec, 0), spec, device)
}

/// Trains as [`train_on`], with the spec `first` for `at` minibatches and then with `spec`, whose schedule counts
/// these minibatches too: the result of a [forked](crate::TrainTask::fork_from) task.
///
/// # Errors
/// As [`train_on`].
pub fn train_forked(
    chain: &Chain,
    data: &dyn Dataset,
    (first, at): (&TrainSpec, usize),
    spec: &TrainSpec,
    device: &Device,
) -> Result<PlainRun, EngineError> {
    guarded("the plain loop", || train_with(chain, data, (first, at), spec, device, None))
}

fn train_with(
    chain: &Chain,
    data: &dyn Dataset,
    (first, at): (&TrainSpec, usize),
    spec: &TrainSpec,
    device: &Device,
    weights: Option<Vec<Vec<f32>>>,
) -> Result<PlainRun, EngineError> {
    spec.validate()?;
    let mut model = PlainModel::new(chain, first, device.clone().autodiff())?;
    model.buffers = weights.unwrap_or(model.buffers);
    let mut sampler = Sampler::new(data.len(), spec.batch, spec.seed, spec.shuffle);
    let (mut losses, mut gradient_norms) = (Vec::new(), Vec::new());
    for step in 0..spec.steps(data.len()) {
        model.spec = if step < at { first } else { spec };
        let steps = model.spec.steps(data.len());
        let items = sampler.items(step);
        let (loss, grads) = model.gradients(data, &items, step)?;
        losses.push(loss);
        gradient_norms.push(model.update(grads, step, steps));
    }
    let mut hash = WeightHash::default();
    model.buffers.iter().enumerate().for_each(|(i, buffer)| hash.add(&param_hashes(chain, i, buffer)));
    Ok(PlainRun { losses, gradient_norms, buffers: model.buffers, weights_sha256: hash.finish() })
}

/// Trains with the spec `first` for `at` minibatches, then with `spec` from its first minibatch on, with the trained
/// weights and fresh moments: the result of a task that takes [only the weights](crate::TrainTask::weights_from) of
/// another one.
///
/// # Errors
/// As [`train_on`].
pub fn train_from(
    chain: &Chain,
    data: &dyn Dataset,
    (first, at): (&TrainSpec, usize),
    spec: &TrainSpec,
    device: &Device,
) -> Result<PlainRun, EngineError> {
    let until = TrainSpec { length: Length::Steps(at), ..first.clone() };
    let weights = train_forked(chain, data, (first, at), &until, device)?.buffers;
    guarded("the plain loop", || train_with(chain, data, (spec, 0), spec, device, Some(weights)))
}

struct PlainModel<'a> {
    chain: &'a Chain,
    spec: &'a TrainSpec,
    /// The autodiff device.
    device: Device,
    buffers: Vec<Vec<f32>>,
    /// The words of each moment of each buffer.
    moments: Vec<Vec<(Vec<f32>, MomentLayout)>>,
}

impl<'a> PlainModel<'a> {
    fn new(chain: &'a Chain, spec: &'a TrainSpec, device: Device) -> Result<Self, EngineError> {
        let buffers =
            (0..chain.buffers().len()).map(|i| quantized(chain, i, initial_buffer(chain, i, spec.seed)?));
        let buffers = buffers.collect::<Result<Vec<_>, EngineError>>()?;
        let zeros = |layout: &ParamBufferLayout| {
            let moments = spec.optimizer.moment_layouts(layout).into_iter();
            moments.map(|of| (vec![0.0; of.words_of(0..layout.elements).len()], of)).collect()
        };
        let moments = chain.buffers().iter().map(zeros).collect();
        Ok(Self { chain, spec, device, buffers, moments })
    }

    /// The loss of one minibatch and its gradients, by buffer.
    fn gradients(
        &self,
        data: &dyn Dataset,
        items: &[usize],
        step: usize,
    ) -> Result<(f64, Vec<Vec<f32>>), EngineError> {
        let parts = self.spec.microbatches(items).into_iter();
        let batches = parts.map(|part| Ok(gather(data, part)?.in_type(self.chain.float_type())));
        let batches: Vec<Batch> = batches.collect::<Result<_, EngineError>>()?;
        let loss_targets: usize = batches.iter().map(|b| b.loss_targets).sum();
        // Observations change state one microbatch after the other; the total of its buffers is the state itself.
        let zeros = |(i, values): (usize, &Vec<f32>)| match self.chain.buffers()[i].is_state() {
            true => values.clone(),
            false => vec![0.0; values.len()],
        };
        let mut total: Vec<Vec<f32>> = self.buffers.iter().enumerate().map(zeros).collect();
        let mut loss = 0.0;
        let statistic = self.statistic(&batches)?;
        for (index, batch) in batches.iter().enumerate() {
            let weight = batch.loss_targets as f64 / loss_targets as f64;
            let key = Pass::key_of(self.spec.seed, step, index);
            // The engine may skip a part of a batch that this loop computes.
            let targets = batch.targets.to_device(&self.device);
            let pass = Pass::train(key, targets).with_statistic(statistic).worst_case();
            let (value, uses) =
                backward(&self.layers(true), batch.inputs.to_device(&self.device), &pass, weight);
            loss += weight * f64::from(value);
            self.add(&mut total, uses, index == 0);
        }
        Ok((loss, total))
    }

    /// The objective's statistic of a minibatch of several microbatches.
    fn statistic(&self, batches: &[Batch]) -> Result<Option<f64>, EngineError> {
        if self.chain.objective().statistic() != Statistic::OfOutputs || batches.len() < 2 {
            return statistic_of_targets(self.chain, batches);
        }
        let mut sums = Sums::default();
        for batch in batches {
            let pass = Pass::evaluate(batch.targets.to_device(&self.device));
            let inputs = batch.inputs.to_device(&self.device);
            let outputs = forward_range(&self.layers(false), 0, inputs, &pass);
            sums.add(&Measured::from_output(outputs), batch.loss_targets)?;
        }
        sums.statistic(self.chain).map(Some)
    }

    /// The layers on the device; the graph records their trained parameters if it `tracks` them.
    fn layers(&self, tracks: bool) -> Vec<Box<dyn Layer>> {
        let buffer = |i: usize| {
            let (layout, values) = (&self.chain.buffers()[i], &self.buffers[i]);
            if layout.encoding == Encoding::Nf4 {
                let words: Vec<i32> = bytemuck::pod_collect_to_vec(&blocks(layout, values, true));
                let len = words.len();
                return DeviceBytes::from(HostTensor::int(words, [len]).bytes);
            }
            let masters = HostTensor::float(values.clone(), [values.len()]);
            DeviceBytes::from(masters.in_type(layout.float).bytes)
        };
        let layer = |(index, layer): (usize, &hydra_core::ChainLayer)| {
            let trained: Vec<bool> =
                self.chain.trained_params(index).map(|trained| trained && tracks).collect();
            let params = self.chain.layer_params(index, &buffer, &self.device);
            layer.layer().promote(&params, &self.device, &trained)
        };
        self.chain.layers().iter().enumerate().map(layer).collect()
    }

    /// Adds one microbatch's gradients to the total; those of a tied parameter are first added in chain order.
    fn add(&self, total: &mut [Vec<f32>], uses: Vec<Vec<Option<AnyTensor>>>, first: bool) {
        let mut sum: Vec<Vec<f32>> = self.buffers.iter().map(|i| vec![0.0; i.len()]).collect();
        let mut seen = vec![vec![]; sum.len()];
        for (layer, grads) in self.chain.layers().iter().zip(uses) {
            for (at, grad) in layer.params.iter().zip(grads) {
                let (is_state, param) = (
                    self.chain.buffers()[at.buffer].is_state(),
                    &self.chain.buffers()[at.buffer].params[at.slot],
                );
                let range = param.range();
                let grad = grad.map(|grad| grad.into_host().in_type(FloatType::F32));
                if let (true, Some(rule)) = (is_state, param.state) {
                    let observed = grad.iter().map(HostTensor::as_f32);
                    observed.for_each(|observed| rule.apply(&mut total[at.buffer][range.clone()], observed));
                    continue;
                }
                let again = seen[at.buffer].contains(&at.slot);
                seen[at.buffer].push(at.slot);
                let Some(grad) = grad else { continue };
                add_into(&mut sum[at.buffer][range], grad.as_f32(), !again);
            }
        }
        let sums = total.iter_mut().zip(&sum).zip(self.chain.buffers());
        let sums = sums.filter(|(_, layout)| !layout.is_state());
        sums.for_each(|((total, sum), _)| add_into(total, sum, first));
    }

    fn update(&mut self, grads: Vec<Vec<f32>>, step: usize, steps: usize) -> f64 {
        let squares = |buffer: usize, slot: usize| {
            sum_of_squares(&grads[buffer][self.chain.buffers()[buffer].params[slot].range()])
        };
        let norm = global_norm(self.chain, squares);
        let factor = self.spec.clip.map(|clip| clip_factor(clip, norm));
        let step = TaskStep::new(self.spec, step, steps, factor);
        let layouts = self.chain.buffers().iter();
        for (i, _) in layouts.enumerate().filter(|(_, layout)| layout.is_state()) {
            self.buffers[i].clone_from(&grads[i]);
        }
        for (i, layout) in self.chain.buffers().iter().enumerate().filter(|(_, l)| l.is_optimized()) {
            for param in &layout.params {
                let is_quantized = self.moments[i].iter().any(|(_, layout)| layout.is_quantized(param));
                // One element at a time, or one block.
                let unit = if is_quantized { BLOCK } else { 1 };
                for start in param.range().step_by(unit) {
                    let at = start..param.range().end.min(start + unit);
                    let moments = self.moments[i].iter_mut();
                    let mut moments: Vec<MomentMut<'_>> =
                        moments.map(|(words, layout)| layout.slice(words, 0, at.clone())).collect();
                    let (params, grads) = (&mut self.buffers[i][at.clone()], &grads[i][at]);
                    let element = Elements::new(params, grads, &mut moments, factor);
                    self.spec.optimizer.update(&step.of(param), element);
                }
            }
        }
        norm
    }
}

/// The values that the blocks of a quantized buffer have; other values are unchanged.
fn quantized(chain: &Chain, buffer: usize, mut values: Vec<f32>) -> Result<Vec<f32>, EngineError> {
    let layout = &chain.buffers()[buffer];
    if layout.encoding == Encoding::Nf4 {
        let are_exact = chain.source().is_quantized(chain, buffer);
        nf4::dequantize(&blocks(layout, &values, are_exact), 0, &mut values);
    }
    Ok(values)
}

/// The blocks of a quantized buffer.
fn blocks(layout: &ParamBufferLayout, values: &[f32], are_exact: bool) -> Vec<u8> {
    let mut blocks = vec![0; nf4::bytes_of(0..layout.elements).len()];
    for param in &layout.params {
        let (values, blocks) = (&values[param.range()], &mut blocks[nf4::bytes_of(param.range())]);
        match are_exact {
            true => _ = nf4::requantize(values, blocks),
            false => nf4::quantize(values, blocks),
        }
    }
    blocks
}

/// Sets (`replace`) or adds element by element.
fn add_into(total: &mut [f32], part: &[f32], replace: bool) {
    for (total, part) in total.iter_mut().zip(part) {
        *total = if replace { *part } else { *total + *part };
    }
}

fn backward(
    layers: &[Box<dyn Layer>],
    x: Activation,
    pass: &Pass,
    weight: f64,
) -> (f32, Vec<Vec<Option<AnyTensor>>>) {
    let forward = |x, (i, layer): (usize, &dyn Layer)| layer.forward(x, &pass.for_layer(i));
    let loss = layers.iter().map(Box::as_ref).enumerate().fold(x, forward).into_float::<1>();
    let value = loss_value(&loss);
    let loss = if weight == 1.0 { loss } else { loss.mul_scalar(weight as f32) };
    let mut gradients = loss.backward();
    (value, layers.iter().map(|layer| layer.take_gradients(&mut gradients)).collect())
}
