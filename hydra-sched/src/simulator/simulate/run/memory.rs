//! The memory of a device: cached copies, and the working bytes of shard tasks, which may wait for memory.

use super::{Active, Claim, SimulatedRun};
use crate::policy::ShardTaskKind;
use crate::program::ShardTask;
use crate::simulator::WorkingBytes;
use crate::simulator::cached::CachedPart;

/// Bytes of a device that are not in the parameter cache.
#[derive(Clone, Copy, Default)]
pub(super) struct UncachedBytes {
    /// Uncached parameters of the running shard task and of the next one.
    parameters: [u64; 2],
    /// The working bytes of the running shard task.
    computing: u64,
    /// Inputs that were uploaded with the promotion of the next one.
    inputs: u64,
    /// Outputs and gradients that are being downloaded.
    leaving: u64,
    sums: Option<WaitingGradients>,
    /// Whether the next shard task has its memory, and waits for processors.
    is_taken: bool,
}

/// Accumulated gradients on a device that wait for those of the next microbatch.
#[derive(Clone, Copy)]
struct WaitingGradients {
    model: usize,
    replica: usize,
    /// The backward that computed the last of them.
    task: ShardTask,
    bytes: u64,
    /// The number of backwards that they include.
    backwards: u64,
    /// Whether the next backward, running or claimed, adds to them.
    is_taken: bool,
}

impl WaitingGradients {
    /// Returns whether a shard task of a model's replica can add its gradients to them.
    fn is_before(&self, replica: (usize, usize), next: &ShardTask) -> bool {
        (self.model, self.replica) == replica && self.task.is_microbatch_before(next)
    }
}

impl UncachedBytes {
    fn bytes(&self) -> u64 {
        let sums = self.sums.map_or(0, |sums| sums.bytes);
        let [computed, next] = self.parameters;
        [computed, next, self.computing, self.inputs, self.leaving, sums]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

impl SimulatedRun<'_> {
    /// The current limit of cached bytes on a device; `None` if no memory is stated.
    pub(super) fn copy_bytes(&self, device: usize) -> Option<u64> {
        let of = &self.workload.devices[device];
        let memory = of.memory_bytes?;
        let Some(working) = self.working_bytes(device) else { return Some(memory) };
        Some(memory.saturating_add(working).saturating_sub(self.devices[device].uncached.bytes()))
    }

    /// The working memory of a device, if it is limited.
    fn working_bytes(&self, device: usize) -> Option<u64> {
        let of = &self.workload.devices[device];
        of.memory_bytes.and(of.working_bytes)
    }

    /// Frees memory for the parameters of the shard task that a device would commit to; returns whether that
    /// succeeded. Accumulated gradients that are in the way are downloaded.
    pub(super) fn find_space(&mut self, device: usize, model: usize) -> bool {
        if self.working_bytes(device).is_none() {
            return true;
        }
        let Some((replica, next)) = self.models[model].claimable(Some(device), self.now_s) else {
            return true;
        };
        let (cost, version) =
            (&self.workload.tasks[model].shards[next.shard], self.models[model].version(&next));
        let copies = &self.devices[device].copies;
        let missing = CachedPart::of((model, next.shard), cost, version)
            .filter(|part| !copies.has([*part].into_iter()));
        let missing = missing.map(|part| part.bytes).fold(0, u64::saturating_add);
        let fits = missing == 0 || self.evict_for(device, missing, Some((model, next.shard)));
        let sums = &mut self.devices[device].uncached.sums;
        let in_the_way =
            |sums: &mut WaitingGradients| !fits && !sums.is_taken && !sums.is_before((model, replica), &next);
        if let Some(sums) = sums.take_if(in_the_way) {
            self.download_sums(device, sums);
        }
        fits
    }

    /// Adds the parameters of a device's new commitment, and its inputs if they fit.
    pub(super) fn promote_inputs(&mut self, device: usize, claim: &Claim) {
        let active = self.devices[device].active.as_ref().map(|Active { claim, .. }| claim);
        let before = active.filter(|active| active.model == claim.model && active.replica == claim.replica);
        let inputs = match before
            .is_some_and(|before| before.task.microbatch_pass() == claim.task.microbatch_pass())
        {
            true => 0,
            false => self.inputs(claim),
        };
        if !self.workload.devices[device].keeps_copies {
            let bytes = self.workload.tasks[claim.model].shards[claim.task.shard].bytes;
            self.devices[device].uncached.parameters[1] = bytes.unwrap_or(0);
        }
        if self.working_bytes(device).is_none() || self.evict_for(device, inputs, None) {
            self.devices[device].uncached.inputs = inputs;
        }
        self.note_peak(device, false);
    }

    /// Reserves the working bytes of a device's next shard task, if they fit.
    pub(super) fn take_memory(&mut self, device: usize, claim: &Claim) -> bool {
        let uncached = &self.devices[device].uncached;
        if uncached.is_taken {
            return true;
        }
        let working = self.working(claim, 0);
        let computing = match claim.task.kind {
            // The new sum takes memory in addition to the old sum and the new gradients.
            ShardTaskKind::Backward if uncached.sums.is_some() => {
                working.backward.saturating_add(working.accumulation)
            }
            ShardTaskKind::Backward => working.backward,
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => working.forward,
        };
        let missing = computing.saturating_sub(uncached.inputs);
        if self.working_bytes(device).is_some() && !self.evict_for(device, missing, None) {
            return false;
        }
        let uncached = &mut self.devices[device].uncached;
        (uncached.computing, uncached.inputs, uncached.is_taken) = (computing, 0, true);
        uncached.parameters = [uncached.parameters[1], 0];
        self.note_peak(device, false);
        true
    }

    /// Releases the memory of a shard task that has ended, except its output and its gradients, which are
    /// downloaded.
    pub(super) fn leave_memory(&mut self, device: usize, claim: &Claim) {
        self.note_peak(device, true);
        let uncached = &mut self.devices[device].uncached;
        (uncached.computing, uncached.is_taken, uncached.parameters[0]) = (0, false, 0);
        let working = self.working(claim, 0);
        let task = &claim.task;
        let goes_on = self.models[claim.model].program().following(task.kind, task.shard).is_some();
        let is_handed = self.is_handed(device, claim);
        // A later shard task of the microbatch pass reads it again.
        let is_read_again = task.kind == ShardTaskKind::Forward
            && task.shard + 2 < self.workload.tasks[claim.model].shards.len();
        if goes_on && (!is_handed || is_read_again) {
            let bytes = match task.kind {
                // It is part of the next shard task's working bytes.
                _ if is_handed => 0,
                ShardTaskKind::Backward => working.input,
                ShardTaskKind::Forward | ShardTaskKind::Evaluate => self.working(claim, 1).input,
            };
            self.download_output(device, claim, bytes);
        }
        if task.kind == ShardTaskKind::Backward {
            self.leave_gradients(device, claim, working);
        }
    }

    /// Returns whether the next shard task of the microbatch pass uses the output of one that has ended
    /// directly on the device.
    fn is_handed(&self, device: usize, claim: &Claim) -> bool {
        let next = self.devices[device].next.as_ref();
        let next = next.filter(|next| next.model == claim.model && next.replica == claim.replica);
        next.is_some_and(|next| next.task.microbatch_pass() == claim.task.microbatch_pass())
    }

    /// Downloads the gradients of a backward that has ended, unless those of the next microbatch are added to
    /// them.
    fn leave_gradients(&mut self, device: usize, claim: &Claim, working: WorkingBytes) {
        let Claim { model, replica, task, .. } = *claim;
        let is_before = |sums: &mut WaitingGradients| sums.is_before((model, replica), &task);
        let before = self.devices[device].uncached.sums.take_if(is_before);
        let backwards = 1 + before.map_or(0, |sums| sums.backwards);
        // Those of the first microbatch group are added up, but for the last of them.
        let is_before_others =
            task.microbatch_pass() + 1 < self.models[model].program().minibatch_group(task.step);
        let adds_up = is_before_others && (task.microbatch_pass() == 0 || before.is_some());
        let next = self.devices[device].next.as_ref();
        let may_add = next.is_none_or(|next| {
            (next.model, next.replica) == (model, replica) && task.is_microbatch_before(&next.task)
        });
        let may_add = may_add && self.devices[device].uncached.sums.is_none();
        if adds_up && may_add && working.accumulation > 0 {
            let is_taken = next.is_some();
            let sums =
                WaitingGradients { model, replica, task, bytes: working.accumulation, backwards, is_taken };
            self.devices[device].uncached.sums = Some(sums);
            return self.download_gradients(
                device,
                (model, task),
                working.gradients - working.accumulation,
                0,
            );
        }
        self.download_gradients(device, (model, task), working.gradients, backwards);
    }

    /// Downloads accumulated gradients that are complete if a device commits to this shard task of a model's
    /// replica.
    pub(super) fn release_sums(&mut self, device: usize, (model, replica): (usize, usize), next: &ShardTask) {
        // Accumulated gradients on other devices are at most those of this model.
        let adds_up = self.models[model].adds_up;
        for index in if adds_up { 0..self.devices.len() } else { device..device + 1 } {
            let sums = &mut self.devices[index].uncached.sums;
            let goes_on =
                |sums: &&mut WaitingGradients| index == device && sums.is_before((model, replica), next);
            if let Some(sums) = sums.as_mut().filter(goes_on) {
                sums.is_taken = true;
            }
            let is_over = |sums: &mut WaitingGradients| {
                !sums.is_taken && (index == device || (sums.model, sums.replica) == (model, replica))
            };
            if let Some(sums) = sums.take_if(is_over) {
                self.download_sums(index, sums);
            }
        }
    }

    fn download_sums(
        &mut self,
        device: usize,
        WaitingGradients { model, task, bytes, backwards, .. }: WaitingGradients,
    ) {
        self.download_gradients(device, (model, task), bytes, backwards);
    }

    /// Starts or ends a download of bytes.
    pub(super) fn leaves(&mut self, device: usize, bytes: u64, over: bool) {
        let leaving = &mut self.devices[device].uncached.leaving;
        *leaving = if over { leaving.saturating_sub(bytes) } else { leaving.saturating_add(bytes) };
    }

    /// Updates the peak of a device with a parameter cache, when bytes were added or a shard task started,
    /// or, with `leaving`, ends: downloads that start while a shard task computes are done before most of its
    /// memory is in use.
    fn note_peak(&mut self, device: usize, leaving: bool) {
        if !self.workload.devices[device].keeps_copies {
            return;
        }
        let state = &self.devices[device];
        let uncached =
            UncachedBytes { leaving: if leaving { state.uncached.leaving } else { 0 }, ..state.uncached };
        let all = state.copies.held_bytes().saturating_add(uncached.bytes());
        let peak = &mut self.result.peak_bytes[device];
        *peak = (*peak).max(all);
    }

    /// The bytes uploaded for a shard task besides parameters: its input, and for a backward the gradient of
    /// its output.
    fn inputs(&self, claim: &Claim) -> u64 {
        let gradient =
            if claim.task.kind == ShardTaskKind::Backward { self.working(claim, 1).input } else { 0 };
        self.working(claim, 0).input.saturating_add(gradient)
    }

    /// The working bytes of the claimed shard, or of the one `after` shards later.
    fn working(&self, claim: &Claim, after: usize) -> WorkingBytes {
        let shards = &self.workload.tasks[claim.model].shards;
        shards.get(claim.task.shard + after).map_or_else(WorkingBytes::default, |shard| shard.working)
    }
}
