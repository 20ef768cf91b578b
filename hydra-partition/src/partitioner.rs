//! The partitioner, which measures, cuts and verifies.

use crate::cut::{cut_from, shard_too_large, too_large};
use crate::equal::Measurements;
use crate::pilot::{Pilot, PilotValues, Ran, Repetitions};
use crate::{
    Fingerprint, LayerCost, PartitionError, PartitionPlan, PilotDevice, Profile, Rules, ShardPlan,
    check_cuts, cut,
};
use hydra_core::{Batch, Chain, DeviceError, FloatType, HostActivation};
use std::ops::Range;

/// If memory cannot be measured and a layer does not declare its working bytes, its saved state is estimated
/// as this multiple of its input and output, plus its parameters once more. (A GPT-2 block that saves every
/// intermediate holds about 34 times its input, at half precision, and its attention scores: Korthikanti et
/// al., "Reducing activation recomputation in large transformer models", 2022.)
const GENEROUS: u64 = 24;

/// Measured bytes are rounded up to a multiple of this: threads split their work differently from run to run,
/// and a few dozen bytes of bookkeeping must not change the plan.
const GRAIN: u64 = 4096;

/// Cuts chains by the measured memory of their layers: Algorithm 1 of the paper, with a verification at the
/// end.
///
/// [`measure`](Self::measure) runs a microbatch layer by layer; [`choose_reserve`](crate::choose_reserve)
/// then sizes the double buffer for all tasks of a device; [`plan`](Self::plan) cuts under the resulting
/// rules; [`verify`](Self::verify) runs the shards as they are cut.
#[derive(Clone, Copy)]
pub struct PilotPartitioner<'a> {
    buffers: &'a dyn PilotValues,
    also: Option<(&'a Chain, &'a Batch)>,
    on_progress: &'a dyn Fn(PilotProgress),
    is_stopped: &'a dyn Fn() -> bool,
}

/// The progress of a pilot pass. `layers` is always the number of the chain's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PilotProgress {
    /// Layers have been measured.
    Measured {
        /// The number of measured layers, from the first.
        done: usize,
        /// The number of layers.
        layers: usize,
    },
    /// Shards have been run as they are cut.
    Verified {
        /// The number of layers of these shards, from the first.
        done: usize,
        /// The number of layers.
        layers: usize,
    },
}

impl std::fmt::Debug for PilotPartitioner<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PilotPartitioner").finish_non_exhaustive()
    }
}

impl<'a> PilotPartitioner<'a> {
    /// Returns a partitioner that reads parameters from `buffers`, such as
    /// [`InitialValues`](crate::InitialValues).
    pub fn new(buffers: &'a dyn PilotValues) -> Self {
        Self { buffers, also: None, on_progress: &|_| {}, is_stopped: &|| false }
    }

    /// Makes shards fit another pass too: of a chain with the same layers and parameters, all frozen, on a batch of its own.
    /// [`measure`](Self::measure) returns costs whose memory is that of the larger pass of each layer, and
    /// [`verify`](Self::verify) runs each shard of both. Times remain those of the chain itself.
    pub fn also(self, chain: &'a Chain, batch: &'a Batch) -> Self {
        Self { also: Some((chain, batch)), ..self }
    }

    /// Sets a callback that [`measure`](Self::measure) and [`verify`](Self::verify) call with their progress
    /// between two layers or shards.
    pub fn with_progress(self, on_progress: &'a dyn Fn(PilotProgress)) -> Self {
        Self { on_progress, ..self }
    }

    /// Makes [`measure`](Self::measure) and [`verify`](Self::verify) return [`PartitionError::Stopped`]
    /// between two layers or shards when `is_stopped` returns true.
    pub fn with_stop(self, is_stopped: &'a dyn Fn() -> bool) -> Self {
        Self { is_stopped, ..self }
    }

    /// Reports the progress of the pass.
    ///
    /// # Errors
    /// [`PartitionError::Stopped`].
    fn report(&self, progress: PilotProgress) -> Result<(), PartitionError> {
        (self.on_progress)(progress);
        if (self.is_stopped)() { Err(PartitionError::Stopped) } else { Ok(()) }
    }

    /// Runs the pilot pass: runs `batch`, one microbatch in the chain's type ([`Batch::in_type`]), layer by
    /// layer on `device`, forward and backward, and measures each layer. The boundary between two layers is
    /// kept on the host, so at most one layer is on the device.
    ///
    /// A layer with the same [cost key](hydra_core::Forward::cost_key) as an earlier one gets that layer's
    /// cost: it is not run, and the next layer receives its input, which has the form of its output.
    ///
    /// If the device's probe does not measure, bytes are estimated from shapes, and a warning is logged.
    ///
    /// # Errors
    /// [`PartitionError::Unrepeatable`] if a layer returns a different output when it is run again,
    /// [`PartitionError::Layer`] if one panics, [`PartitionError::Weights`] if a buffer cannot be read,
    /// [`PartitionError::Device`] if the device does not run the pass.
    pub fn measure(
        &self,
        chain: &Chain,
        batch: &Batch,
        device: &dyn PilotDevice,
    ) -> Result<Profile, PartitionError> {
        let measured = device.probe().measures();
        if !measured {
            tracing::warn!(
                chain = chain.name(),
                "memory on {} is not measured: the chain is cut by estimates from shapes, with a larger margin",
                device.id()
            );
        }
        let pilot = self.pilot(chain, batch, device);
        let mut x = batch.inputs.clone();
        let mut layers: Vec<LayerCost> = Vec::with_capacity(chain.len());
        let mut known: Measurements<usize> = Measurements::new();
        for layer in 0..chain.len() {
            let kind = pilot.kind(layer..layer + 1, &x);
            let cost = match known.get(kind.as_ref()) {
                Some(equal) => {
                    LayerCost { name: chain.layers()[layer].name.clone(), ..layers[*equal].clone() }
                }
                None => {
                    let (cost, output) = pilot.layer_cost(layer, &x, measured)?;
                    known.add(kind, &output, layer);
                    x = output;
                    cost
                }
            };
            layers.push(cost);
            self.report(PilotProgress::Measured { done: layer + 1, layers: chain.len() })?;
        }
        let standing_bytes = pilot.standing_bytes().next_multiple_of(GRAIN);
        let profile = Profile { layers, tied: Profile::tied_buffers(chain), standing_bytes, measured };
        let Some((chain, batch)) = self.also else { return Ok(profile) };
        Ok(profile.with_memory_of(&Self { also: None, ..*self }.measure(chain, batch, device)?))
    }

    /// Returns the plan for these costs under these rules: cut greedily, or at `cuts`. Completes the
    /// fingerprint with budget, reserve and cuts.
    ///
    /// # Errors
    /// [`PartitionError::LayerTooLarge`] if a layer does not fit alone; for user-specified cuts those of
    /// [`check_cuts`](crate::check_cuts).
    pub fn plan(
        &self,
        profile: &Profile,
        fingerprint: Fingerprint,
        rules: Rules,
        cuts: Option<&[usize]>,
    ) -> Result<PartitionPlan, PartitionError> {
        let shards = match cuts {
            None => cut(profile, &rules)?,
            Some(cuts) => check_cuts(profile, cuts, &rules)?,
        };
        let fingerprint = fingerprint.under(rules.budget, rules.reserve).cut_at(cuts);
        Ok(PartitionPlan::new(profile, fingerprint, rules, &shards))
    }

    /// Runs every shard of the plan, forward and backward, with real data, and records the measured peak and
    /// times. If a shard exceeds the available bytes plus half of the margin, its last layer is moved to the
    /// next shard, all following layers are cut again, and the shard is retried. Does nothing if the probe
    /// does not measure.
    ///
    /// A shard whose layers equal those of an earlier one, in order, gets that shard's measurements, as in
    /// [`measure`](Self::measure).
    ///
    /// # Errors
    /// [`PartitionError::LayerTooLarge`] if a single layer does not fit, [`PartitionError::ShardTooLarge`]
    /// if a user-specified shard does not, [`PartitionError::OtherChain`] if the plan is for another
    /// chain, and those of [`measure`](Self::measure).
    pub fn verify(
        &self,
        plan: &mut PartitionPlan,
        chain: &Chain,
        batch: &Batch,
        device: &dyn PilotDevice,
    ) -> Result<(), PartitionError> {
        plan.check_layers(chain)?;
        if !device.probe().measures() {
            tracing::debug!(chain = chain.name(), "memory is not measured: shards are not verified");
            return Ok(());
        }
        let mut runs: Vec<Verified<'_>> = std::iter::once((chain, batch))
            .chain(self.also)
            .map(|(chain, batch)| Verified::new(self.pilot(chain, batch, device)))
            .collect();
        let mut shard = 0;
        while let Some(range) = plan.shards.get(shard).map(ShardPlan::range) {
            let cuttable = range.len() > 1 && plan.fingerprint.cuts.is_none();
            let ran = runs.iter_mut().map(|run| run.shard(range.clone())).collect::<Result<Vec<Ran>, _>>();
            let ran = match ran {
                // The budget may exceed the device's memory.
                Err(PartitionError::Unfinished { source: DeviceError::OutOfMemory { .. }, .. })
                    if cuttable =>
                {
                    roll_back(plan, shard, plan.rules.available() + 1)?;
                    continue;
                }
                ran => ran?,
            };
            let peak = ran.iter().map(Ran::peak).max().unwrap_or(0);
            if !plan.rules.tolerates(peak) {
                roll_back(plan, shard, peak)?;
                continue;
            }
            let verified = &mut plan.shards[shard];
            verified.verified_bytes = Some(peak);
            verified.verified_forward_bytes = ran.iter().map(Ran::forward_bytes).max();
            (verified.forward_s, verified.backward_s) = (ran[0].forward_s, ran[0].backward_s);
            runs.iter_mut().zip(ran).for_each(|(run, ran)| run.x = ran.output);
            self.report(PilotProgress::Verified { done: verified.end, layers: chain.len() })?;
            shard += 1;
        }
        Ok(())
    }

    /// Runs every shard of the plan on a batch as it is, after a forward to warm up, and records the times of its
    /// passes; [`verify`](Self::verify) runs the worst case. Equal shards are run once, as there.
    ///
    /// # Errors
    /// [`PartitionError::OtherChain`] if the plan is for another chain, and those of
    /// [`measure`](Self::measure).
    pub fn time(
        &self,
        plan: &mut PartitionPlan,
        chain: &Chain,
        batch: &Batch,
        device: &dyn PilotDevice,
    ) -> Result<(), PartitionError> {
        plan.check_layers(chain)?;
        let pilot = self.pilot(chain, batch, device);
        let (mut x, mut known) = (batch.inputs.clone(), Measurements::new());
        for shard in &mut plan.shards {
            let ran = pilot.run_shard(shard.range(), &x, Repetitions::Timed, &mut known)?;
            (shard.forward_s, shard.backward_s) = (ran.forward_s, ran.backward_s);
            x = ran.output;
        }
        Ok(())
    }

    fn pilot<'b>(&self, chain: &'b Chain, batch: &'b Batch, device: &'b dyn PilotDevice) -> Pilot<'b>
    where
        'a: 'b,
    {
        Pilot { chain, batch, buffers: self.buffers, device }
    }
}

/// A pass that is verified shard by shard.
struct Verified<'a> {
    pilot: Pilot<'a>,
    /// The input of the next shard.
    x: HostActivation,
    known: Measurements<Ran>,
}

impl<'a> Verified<'a> {
    fn new(pilot: Pilot<'a>) -> Self {
        Self { x: pilot.batch.inputs.clone(), known: Measurements::new(), pilot }
    }

    fn shard(&mut self, range: Range<usize>) -> Result<Ran, PartitionError> {
        self.pilot.run_shard(range, &self.x, Repetitions::Plain, &mut self.known)
    }
}

impl Pilot<'_> {
    /// Runs a layer and returns its cost, from measured memory or from shapes, and its output.
    fn layer_cost(
        &self,
        layer: usize,
        x: &HostActivation,
        measured: bool,
    ) -> Result<(LayerCost, HostActivation), PartitionError> {
        let repetitions = if measured { Repetitions::Rehearsed } else { Repetitions::Repeated };
        let ran = self.run(layer..layer + 1, x, repetitions)?;
        let cost = self.boundary_cost(layer, x, &ran);
        let cost = if measured { measured_cost(cost, &ran) } else { self.estimate(layer, cost, x, &ran) };
        tracing::debug!(layer = cost.name, ?cost, "measured a layer");
        Ok((cost, ran.output))
    }

    /// Runs a shard, or returns the measurements of an equal one and its input as its output.
    fn run_shard(
        &self,
        range: Range<usize>,
        x: &HostActivation,
        repetitions: Repetitions,
        known: &mut Measurements<Ran>,
    ) -> Result<Ran, PartitionError> {
        let kind = self.kind(range.clone(), x);
        if let Some(equal) = known.get(kind.as_ref()) {
            return Ok(Ran { output: x.clone(), ..equal.clone() });
        }
        let ran = self.run(range, x, repetitions)?;
        known.add(kind, &ran.output, Ran { output: HostActivation::default(), ..ran.clone() });
        Ok(ran)
    }

    /// The cost of a layer that ran, without its memory: names, shapes and times.
    fn boundary_cost(&self, layer: usize, x: &HostActivation, ran: &Ran) -> LayerCost {
        let range = layer..layer + 1;
        let has_input_gradient = self.has_input_gradient(layer);
        LayerCost {
            name: self.chain.layers()[layer].name.clone(),
            param_bytes: self.chain.param_bytes(range.clone()),
            gradient_bytes: self.chain.gradient_bytes(range),
            input_bytes: x.len_bytes(),
            output_bytes: ran.output.len_bytes(),
            input_gradient_bytes: if has_input_gradient { float_bytes(x) } else { 0 },
            output_gradient_bytes: ran.upstream_bytes,
            saved_bytes: ran.target_bytes,
            forward_s: ran.forward_s,
            backward_s: ran.backward_s,
            ..LayerCost::default()
        }
    }

    /// The cost of a layer whose memory was not measured.
    fn estimate(&self, layer: usize, cost: LayerCost, x: &HostActivation, ran: &Ran) -> LayerCost {
        let shapes: Vec<Vec<usize>> = x.parts.iter().map(|part| part.shape.clone()).collect();
        let declared = self.chain.layers()[layer].layer().working_bytes(&shapes);
        let boundary = cost.input_bytes + ran.output.len_bytes();
        let working = declared.unwrap_or(GENEROUS.saturating_mul(boundary).saturating_add(cost.param_bytes));
        // Processors without 16-bit arithmetic convert parameters and their gradients to `f32` for computing.
        let widened = if self.chain.float_type() == FloatType::F32 { 0 } else { 4 * cost.param_bytes };
        let working = working.saturating_add(widened);
        let cost = LayerCost { wrapping_bytes: self.chain.widened_bytes(layer..layer + 1), ..cost };
        let output = ran.output.len_bytes() + ran.target_bytes;
        let forward_peak_bytes = output.saturating_add(working);
        if !self.has_backward(layer + 1) {
            return LayerCost { peak_bytes: forward_peak_bytes, forward_peak_bytes, ..cost };
        }
        let gradients = cost.gradient_bytes.saturating_add(cost.input_gradient_bytes);
        LayerCost {
            saved_bytes: cost.saved_bytes.saturating_add(working),
            peak_bytes: forward_peak_bytes.saturating_add(gradients),
            forward_peak_bytes,
            ..cost
        }
    }
}

/// The cost of a layer whose memory was measured: the bytes that the tracked forward left beyond its output
/// are saved state.
fn measured_cost(cost: LayerCost, ran: &Ran) -> LayerCost {
    let forward = ran.forward_peak.saturating_sub(ran.upstream_bytes);
    LayerCost {
        wrapping_bytes: ran.wrapping_bytes,
        saved_bytes: cost.saved_bytes + ran.held_bytes.saturating_sub(cost.output_bytes),
        peak_bytes: ran.target_bytes + ran.backward_peak.max(forward),
        forward_peak_bytes: ran.target_bytes + ran.forward_peak,
        ..cost
    }
}

fn float_bytes(x: &HostActivation) -> u64 {
    x.parts.iter().filter(|part| part.is_float()).map(|part| part.len_bytes()).sum()
}

/// Moves the last layer of a shard with a measured peak of `peak` bytes to the next shard, and cuts the rest
/// again.
fn roll_back(plan: &mut PartitionPlan, shard: usize, peak: u64) -> Result<(), PartitionError> {
    let (profile, rules) = (plan.profile(), plan.rules);
    let range = plan.shards[shard].range();
    if plan.fingerprint.cuts.is_some() {
        return Err(shard_too_large(&rules, shard, &range, &profile.shard_memory(range.clone()), peak));
    }
    if range.len() == 1 {
        return Err(too_large(&profile, &rules, range.start, peak));
    }
    let end = range.end - 1;
    tracing::info!(
        shard,
        first = range.start,
        end = range.end,
        peak,
        available = rules.available(),
        "a shard exceeds its predicted memory: its last layer is moved to the next shard"
    );
    let mut shards: Vec<Range<usize>> = plan.shards().into_iter().take(shard).collect();
    shards.push(range.start..end);
    shards.extend(cut_from(&profile, &rules, end)?);
    plan.cut_again(&profile, shard, &shards);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::{self, BLIND, Inline, LogProbe, WIDTH};
    use crate::{InitialValues, choose_reserve, min_device_memory_bytes, single_shard_bytes};

    const SCRIPTED: Inline<LogProbe> = Inline(LogProbe);
    /// Bytes of a boundary of two items.
    const BOUNDARY: u64 = 2 * WIDTH as u64 * 4;
    /// Bytes of a layer's gradients: a matrix and a bias.
    const GRADIENT: u64 = (WIDTH as u64 + 1) * WIDTH as u64 * 4;

    fn measured(chain: &Chain, batch: &Batch, device: &dyn PilotDevice) -> Result<Profile, PartitionError> {
        PilotPartitioner::new(&InitialValues::new(chain, 0)).measure(chain, batch, device)
    }

    fn measure(chain: &Chain, device: &dyn PilotDevice) -> Profile {
        measured(chain, &toy::batch(2), device).unwrap()
    }

    /// A plan for the smallest budget with at most `most` shards.
    fn plan(chain: &Chain, profile: &Profile, most: usize, cuts: Option<&[usize]>) -> PartitionPlan {
        let buffers = InitialValues::new(chain, 0);
        let fingerprint = Fingerprint::new(chain, &toy::batch(2), "");
        (min_device_memory_bytes(profile)..=single_shard_bytes(profile))
            .map(|budget| {
                let reserve = choose_reserve(&[profile.into()], budget).unwrap();
                let rules = Rules::new(budget, reserve, profile.measured);
                PilotPartitioner::new(&buffers).plan(profile, fingerprint.clone(), rules, cuts)
            })
            .find_map(|plan| plan.ok().filter(|plan| plan.shards.len() <= most))
            .unwrap()
    }

    fn verify(plan: &mut PartitionPlan, chain: &Chain) -> Result<(), PartitionError> {
        let buffers = InitialValues::new(chain, 0);
        PilotPartitioner::new(&buffers).verify(plan, chain, &toy::batch(2), &SCRIPTED)
    }

    #[test]
    fn what_the_probe_shows_becomes_saved_state_and_workspace() {
        toy::set_standing_bytes(300);
        let chain = toy::chain(2);
        let profile = measure(&chain, &SCRIPTED);
        assert!(profile.measured);
        assert_eq!(profile.standing_bytes, GRAIN);
        let [first, second, loss] = profile.layers.as_slice() else { panic!("{profile:?}") };
        assert_eq!((first.name.as_str(), first.param_bytes, first.gradient_bytes), ("l0", 1024, GRADIENT));
        assert_eq!((first.input_bytes, first.output_bytes), (BOUNDARY, BOUNDARY));
        assert_eq!((first.input_gradient_bytes, first.output_gradient_bytes), (0, BOUNDARY));
        assert_eq!(first.saved_bytes, 1000 - BOUNDARY);
        assert_eq!((first.peak_bytes, first.forward_peak_bytes), (6000, 6000));
        assert_eq!(second.input_gradient_bytes, BOUNDARY);
        assert_eq!(second.peak_bytes, 6000);
        assert_eq!((loss.output_bytes, loss.output_gradient_bytes, loss.param_bytes), (4, 0, 0));
        assert_eq!(loss.saved_bytes, 500 - 4 + BOUNDARY, "including the targets");
        assert_eq!((loss.peak_bytes, loss.forward_peak_bytes), (500 + BOUNDARY, 500 + BOUNDARY));
        // A layer's peak includes the standing bytes, its parameters, its boundaries with the upstream
        // gradient and one more of each in transfer, and its own peak.
        assert_eq!(profile.shard_memory(1..2).peak_bytes(), GRAIN + 1024 + 4 * BOUNDARY + 6000);
        assert!(profile.layers.iter().all(|layer| layer.forward_s > 0.0 && layer.backward_s > 0.0));
    }

    #[test]
    fn a_layer_that_is_frozen_in_part_makes_gradients_of_the_rest() {
        let chain = toy::keyed_chain(&[Some(""), Some("%")]);
        let profile = measure(&chain, &SCRIPTED);
        let [trained, part, _] = profile.layers.as_slice() else { panic!("{profile:?}") };
        let bias = WIDTH as u64 * 4;
        assert_eq!((trained.gradient_bytes, part.gradient_bytes), (GRADIENT, bias));
        // Each of its two buffers has its aligned parameters.
        let aligned = |bytes: u64| bytes.next_multiple_of(512);
        assert_eq!(part.param_bytes, aligned(GRADIENT - bias) + aligned(bias));
        assert_eq!(part.input_gradient_bytes, BOUNDARY);
    }

    #[test]
    fn frozen_layers_before_the_first_trained_one_have_no_backward() {
        let chain = toy::frozen_chain();
        let profile = measure(&chain, &SCRIPTED);
        let [frozen, trained, _] = profile.layers.as_slice() else { panic!("{profile:?}") };
        assert_eq!((frozen.gradient_bytes, frozen.saved_bytes, frozen.backward_s), (0, 0, 0.0));
        assert_eq!((frozen.output_gradient_bytes, trained.input_gradient_bytes), (0, 0));
        assert_eq!((frozen.peak_bytes, frozen.forward_peak_bytes), (1000, 1000));
        assert_eq!(trained.saved_bytes, 1000 - BOUNDARY);
    }

    #[test]
    fn integers_that_ride_along_have_bytes_and_no_gradient() {
        let chain = toy::carrying_chain();
        let profile = measured(&chain, &toy::carrying_batch(2), &BLIND).unwrap();
        let bytes: Vec<[u64; 4]> = profile
            .layers
            .iter()
            .map(|l| [l.input_bytes, l.output_bytes, l.input_gradient_bytes, l.output_gradient_bytes])
            .collect();
        let (floats, both) = (BOUNDARY, BOUNDARY + 2 * 4);
        assert_eq!(bytes[..2], [[both, both, 0, floats], [both, both, floats, floats]]);
        assert_eq!(bytes[2..], [[both, floats, floats, floats], [floats, 4, floats, 0]]);
    }

    #[test]
    fn without_a_probe_costs_follow_from_shapes() {
        let chain = toy::working_bytes_chain();
        let profile = measure(&chain, &BLIND);
        assert!(!profile.measured);
        let [telling, mute, loss] = profile.layers.as_slice() else { panic!("{profile:?}") };
        assert_eq!((telling.saved_bytes, telling.forward_peak_bytes), (12_345, BOUNDARY + 12_345));
        assert_eq!(telling.peak_bytes, BOUNDARY + 12_345 + telling.gradient_bytes);
        assert_eq!(mute.saved_bytes, GENEROUS * 2 * BOUNDARY + 1024);
        assert_eq!(mute.param_bytes, chain.param_bytes(1..2));
        assert_eq!(loss.saved_bytes, BOUNDARY + GENEROUS * (BOUNDARY + 4));
        assert_eq!(loss.forward_peak_bytes, loss.saved_bytes + 4, "including the targets");
        let mut plan = plan(&chain, &profile, 2, None);
        let before = plan.clone();
        PilotPartitioner::new(&InitialValues::new(&chain, 0))
            .verify(&mut plan, &chain, &toy::batch(2), &BLIND)
            .unwrap();
        assert_eq!(plan, before);
    }

    #[test]
    fn a_pilot_pass_tells_how_far_it_is() {
        toy::set_standing_bytes(0);
        let (chain, batch) = (toy::chain(3), toy::batch(2));
        let (buffers, reported) = (InitialValues::new(&chain, 0), std::cell::RefCell::new(Vec::new()));
        let report = |progress| reported.borrow_mut().push(progress);
        let partitioner = PilotPartitioner::new(&buffers).with_progress(&report);
        let profile = partitioner.measure(&chain, &batch, &SCRIPTED).unwrap();
        let layers = chain.len();
        let measured = (1..=layers).map(|done| PilotProgress::Measured { done, layers });
        assert_eq!(reported.take(), measured.collect::<Vec<_>>());
        let mut plan = plan(&chain, &profile, 2, None);
        partitioner.verify(&mut plan, &chain, &batch, &SCRIPTED).unwrap();
        let verified = plan.shards.iter().map(|shard| PilotProgress::Verified { done: shard.end, layers });
        assert_eq!(reported.take(), verified.collect::<Vec<_>>());
        assert_eq!(plan.shards.last().unwrap().end, layers);
    }

    #[test]
    fn a_pilot_pass_that_is_stopped_ends_after_a_layer() {
        toy::set_standing_bytes(0);
        let (chain, batch) = (toy::chain(3), toy::batch(2));
        let (buffers, reported) = (InitialValues::new(&chain, 0), std::cell::Cell::new(0));
        let report = |_| reported.set(reported.get() + 1);
        let is_stopped = || reported.get() == 2;
        let partitioner = PilotPartitioner::new(&buffers).with_progress(&report).with_stop(&is_stopped);
        let stopped = partitioner.measure(&chain, &batch, &SCRIPTED);
        assert!(matches!(stopped, Err(PartitionError::Stopped)) && reported.get() == 2, "{stopped:?}");
    }

    #[test]
    fn what_an_evaluation_measures_beside_the_loss_counts() {
        toy::set_standing_bytes(0);
        let profile = measure(&toy::measuring_chain(), &SCRIPTED);
        assert_eq!(profile.layers[1].forward_peak_bytes, 500 + 9000 + BOUNDARY);
        assert!(profile.shard_memory(1..2).peak_bytes() >= profile.shard_memory(1..2).forward_peak_bytes());
    }

    #[test]
    fn sixteen_bits_are_widened_where_nothing_is_measured() {
        let wide = measure(&toy::working_bytes_chain(), &BLIND);
        let chain = toy::working_bytes_chain().with_float_type(FloatType::Bf16);
        let narrow = measured(&chain, &toy::batch(2).in_type(FloatType::Bf16), &BLIND).unwrap();
        let [wide, narrow] = [&wide, &narrow].map(|profile| &profile.layers[0]);
        assert_eq!((2 * narrow.param_bytes, 2 * narrow.output_bytes), (wide.param_bytes, wide.output_bytes));
        // Parameters and gradients in 32 bits, in addition to the layer's working bytes.
        assert_eq!(narrow.saved_bytes, wide.saved_bytes + 2 * wide.param_bytes);
    }

    #[test]
    fn a_layer_that_panics_is_named_with_its_message() {
        let chain = toy::broken_chain();
        let error = measured(&chain, &toy::batch(2), &BLIND).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("layer `bad` of chain `broken`"), "{message}");
        assert!(message.contains("this layer is broken"), "{message}");
    }

    #[test]
    fn a_layer_with_another_output_each_time_is_refused() {
        let chain = toy::counting_chain();
        let devices: [&dyn PilotDevice; 2] = [&BLIND, &SCRIPTED];
        for error in devices.map(|device| measured(&chain, &toy::batch(2), device).unwrap_err()) {
            assert!(
                matches!(&error, PartitionError::Unrepeatable { layer, .. } if layer == "counts"),
                "{error}"
            );
        }
    }

    /// Measuring and verifying use the worst case; timing uses the actual batch, and changes only times.
    #[test]
    fn shards_are_timed_as_they_are_run() {
        let chain = toy::chain(4);
        let mut plan = plan(&chain, &measure(&chain, &SCRIPTED), 2, None);
        verify(&mut plan, &chain).unwrap();
        let [full, other] = toy::passes();
        assert!(full > 0 && other == 0);
        let (buffers, mut timed) = (InitialValues::new(&chain, 0), plan.clone());
        timed.shards.iter_mut().for_each(|shard| (shard.forward_s, shard.backward_s) = (0.0, 0.0));
        PilotPartitioner::new(&buffers).time(&mut timed, &chain, &toy::batch(2), &SCRIPTED).unwrap();
        let [full, other] = toy::passes();
        assert!(full == 0 && other > 0);
        for (shard, of) in timed.shards.iter_mut().zip(&plan.shards) {
            assert!(shard.forward_s > 0.0 && shard.backward_s > 0.0, "{shard:?}");
            (shard.forward_s, shard.backward_s) = (of.forward_s, of.backward_s);
        }
        assert_eq!(timed, plan);
        let other = toy::chain(3);
        let refused = PilotPartitioner::new(&buffers).time(&mut plan, &other, &toy::batch(2), &SCRIPTED);
        assert!(matches!(refused, Err(PartitionError::OtherChain { .. })), "{refused:?}");
    }

    #[test]
    fn shards_that_fit_are_verified_and_stay() {
        toy::set_standing_bytes(300);
        let chain = toy::chain(4);
        let profile = measure(&chain, &SCRIPTED);
        let mut plan = plan(&chain, &profile, 2, None);
        let shards = plan.shards();
        verify(&mut plan, &chain).unwrap();
        assert_eq!(plan.shards(), shards);
        for shard in &plan.shards {
            let verified = shard.verified_bytes.unwrap();
            assert!(verified <= shard.peak_bytes && verified > shard.param_bytes, "{shard:?}");
        }
        // Standing bytes, two parameters, the input, the upstream gradient, what both layers hold, the last
        // bump.
        let two = Pilot {
            chain: &chain,
            batch: &toy::batch(2),
            buffers: &InitialValues::new(&chain, 0),
            device: &SCRIPTED,
        };
        let ran = |range| two.run(range, &toy::batch(2).inputs, Repetitions::Plain).unwrap().peak();
        assert_eq!(ran(1..3), 300 + 2 * 1024 + 2 * BOUNDARY + 2000 + 5000);
        // The targets are present with the loss.
        assert_eq!(ran(3..5), 300 + 1024 + 2 * BOUNDARY + 1000 + 5000);
        assert!(plan.shards.iter().all(|shard| shard.verified_bytes == Some(ran(shard.range()))));
    }

    #[test]
    fn a_shard_that_needs_more_than_predicted_gives_its_last_layer_away() {
        toy::set_standing_bytes(0);
        let chain = toy::chain(4);
        let profile = measure(&chain, &SCRIPTED);
        let mut plan = plan(&chain, &profile, 2, None);
        let before = plan.shards();
        assert!(before[0].len() > 1, "{before:?}");
        toy::crowd(1 << 20);
        verify(&mut plan, &chain).unwrap();
        assert_eq!(plan.shards(), [0..1, 1..2, 2..3, 3..4, 4..5]);
        assert_eq!(plan.cut_points, [1, 2, 3, 4]);
        assert!(plan.shards.iter().all(|shard| shard.verified_bytes.is_some()));
    }

    #[test]
    fn shards_fit_the_other_pass_too() {
        toy::set_standing_bytes(0);
        let (chain, large) = (toy::chain(4), toy::chain_of(4, 9000).evaluated_only());
        let (batch, buffers) = (toy::batch(2), InitialValues::new(&chain, 0));
        let partitioner = PilotPartitioner::new(&buffers).also(&large, &batch);
        let (alone, profile) =
            (measure(&chain, &SCRIPTED), partitioner.measure(&chain, &batch, &SCRIPTED).unwrap());
        for (layer, alone) in profile.layers.iter().zip(&alone.layers).take(4) {
            assert_eq!(
                (alone.peak_bytes, layer.peak_bytes, layer.forward_peak_bytes),
                (6000, 10_000, 10_000)
            );
            assert_eq!((layer.gradient_bytes, layer.saved_bytes), (alone.gradient_bytes, alone.saved_bytes));
        }
        let mut one = plan(&chain, &profile, 1, None);
        partitioner.verify(&mut one, &chain, &batch, &SCRIPTED).unwrap();
        let mut small = plan(&chain, &alone, 1, None);
        verify(&mut small, &chain).unwrap();
        let forward = |plan: &PartitionPlan| plan.shards[0].verified_forward_bytes.unwrap();
        assert_eq!((one.shards.len(), small.shards.len()), (1, 1));
        // The largest layer of the forward takes 4000 bytes more.
        assert_eq!(forward(&one), forward(&small) + 4000);
    }

    #[test]
    fn one_layer_at_a_time_is_rolled_back() {
        toy::set_standing_bytes(0);
        let chain = toy::chain(6);
        let profile = measure(&chain, &SCRIPTED);
        let mut plan = plan(&chain, &profile, 2, None);
        let before = plan.shards();
        assert!(before[0].len() >= 3, "{before:?}");
        // Each further layer adds this much, so that the first shard is just too large, and fits with one
        // layer less.
        let mut alone = plan.clone();
        verify(&mut alone, &chain).unwrap();
        let slack = plan.rules.available() + plan.rules.margin / 2 - alone.shards[0].verified_bytes.unwrap();
        let further = before[0].len() as u64 - 1;
        toy::crowd(slack / further + 1);
        verify(&mut plan, &chain).unwrap();
        assert_eq!(plan.shards()[0], 0..before[0].end - 1);
        assert_eq!(plan.shards.last().unwrap().end, chain.len());
        assert!(plan.shards.iter().all(|shard| plan.rules.tolerates(shard.verified_bytes.unwrap())));
        assert!(plan.shards.windows(2).all(|pair| pair[0].end == pair[1].first));
    }

    #[test]
    fn what_follows_a_shard_that_is_rolled_back_is_cut_anew_to_the_end() {
        toy::set_standing_bytes(0);
        let chain = toy::chain(11);
        let mut plan = plan(&chain, &measure(&chain, &SCRIPTED), 4, None);
        let before = plan.shards();
        assert!(before.len() > 2 && before[1].len() > 1, "{before:?}");
        verify(&mut plan, &chain).unwrap();
        roll_back(&mut plan, 1, 0).unwrap();
        let after = plan.shards();
        assert_eq!((&after[0], &after[1]), (&before[0], &(before[1].start..before[1].end - 1)));
        let rest = cut_from(&plan.profile(), &plan.rules, after[1].end).unwrap();
        assert_eq!((&after[2..], rest.last().unwrap().end), (&rest[..], chain.len()));
        let verified: Vec<bool> = plan.shards.iter().map(|shard| shard.verified_bytes.is_some()).collect();
        assert!(verified[0] && verified[1..].iter().all(|verified| !verified), "{verified:?}");
    }

    #[test]
    fn cuts_by_hand_that_fail_the_check_are_an_error() {
        toy::set_standing_bytes(0);
        let chain = toy::chain(4);
        let profile = measure(&chain, &SCRIPTED);
        let mut plan = plan(&chain, &profile, 2, Some(&[2]));
        assert_eq!(plan.fingerprint.cuts, Some(vec![2]));
        verify(&mut plan, &chain).unwrap();
        toy::crowd(1 << 20);
        let error = verify(&mut plan, &chain).unwrap_err();
        assert!(matches!(error, PartitionError::ShardTooLarge { shard: 0, first: 0, end: 2, .. }), "{error}");
    }

    #[test]
    fn a_device_that_runs_out_of_memory_gets_smaller_shards() {
        toy::set_standing_bytes(0);
        let chain = toy::chain(4);
        let profile = measure(&chain, &SCRIPTED);
        let mut large = plan(&chain, &profile, 1, None);
        assert_eq!(large.shards().len(), 1);
        toy::limit_layers(2);
        verify(&mut large, &chain).unwrap();
        assert!(large.shards().iter().all(|shard| shard.len() <= 2), "{:?}", large.shards());
        let by_hand = verify(&mut plan(&chain, &profile, 2, Some(&[4])), &chain).unwrap_err();
        let PartitionError::Unfinished { layer, source: DeviceError::OutOfMemory { .. }, .. } = &by_hand
        else {
            panic!("{by_hand}")
        };
        assert_eq!(layer, "l0..l3");
    }

    #[test]
    fn a_layer_that_needs_more_than_predicted_is_an_error() {
        toy::set_standing_bytes(0);
        let chain = toy::chain(2);
        let mut plan = plan(&chain, &measure(&chain, &SCRIPTED), 3, None);
        plan.rules.margin = 2 * (plan.rules.budget - plan.rules.reserve - 4000);
        let error = verify(&mut plan, &chain).unwrap_err();
        assert!(matches!(error, PartitionError::LayerTooLarge { ref layer, .. } if layer == "l0"), "{error}");
    }

    #[test]
    fn a_plan_of_another_chain_is_refused() {
        let chain = toy::chain(2);
        let mut plan = plan(&chain, &measure(&chain, &SCRIPTED), 1, None);
        let error = verify(&mut plan, &toy::chain(3)).unwrap_err();
        assert!(matches!(error, PartitionError::OtherChain { .. }), "{error}");
    }
}
