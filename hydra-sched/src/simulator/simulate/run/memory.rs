//! The memory of a device: copies of parameters, and what shard tasks take beside them, which may wait for room.

use super::{Active, Claim, Run};
use crate::policy::ShardTaskKind;
use crate::simulator::WorkingBytes;
use crate::simulator::cached::Part;
use crate::simulator::program::ShardTask;

/// Bytes of a device beside copies that stay.
#[derive(Clone, Copy, Default)]
pub(super) struct Beside {
    /// Parameters that go with their shard task: of the one that computes, and of the next one.
    parameters: [u64; 2],
    /// What the shard task that computes takes.
    computing: u64,
    /// Inputs that have come with the promotion of the next one.
    inputs: u64,
    /// Outputs and gradients that are downloaded.
    leaving: u64,
    sums: Option<Sums>,
    /// The next shard task has what it takes, and waits for its turn.
    is_taken: bool,
}

/// Gradients that wait on a device for those of the next microbatch.
#[derive(Clone, Copy)]
struct Sums {
    model: usize,
    replica: usize,
    /// The backward that made the last of them.
    task: ShardTask,
    bytes: u64,
    /// The backwards that they are of.
    backwards: u64,
    /// The next backward adds to them: it computes, or will.
    is_taken: bool,
}

impl Sums {
    /// Returns whether a shard task of a model's replica can add its gradients to them.
    fn is_before(&self, replica: (usize, usize), next: &ShardTask) -> bool {
        let follows = ShardTask { microbatch_pass: self.task.microbatch_pass + 1, ..self.task } == *next;
        (self.model, self.replica) == replica && follows
    }
}

impl Beside {
    fn bytes(&self) -> u64 {
        let sums = self.sums.map_or(0, |sums| sums.bytes);
        let [computed, next] = self.parameters;
        [computed, next, self.computing, self.inputs, self.leaving, sums]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

impl Run<'_> {
    /// The bytes that copies may have on a device now; `None` where no memory is stated.
    pub(super) fn copy_bytes(&self, device: usize) -> Option<u64> {
        let of = &self.workload.devices[device];
        let memory = of.memory_bytes?;
        let Some(working) = self.working_bytes(device) else { return Some(memory) };
        Some(memory.saturating_add(working).saturating_sub(self.devices[device].beside.bytes()))
    }

    /// What a device has for what shard tasks take beside parameters, if they wait for it.
    fn working_bytes(&self, device: usize) -> Option<u64> {
        let of = &self.workload.devices[device];
        of.memory_bytes.and(of.working_bytes)
    }

    /// Makes room for the parameters of what a device would commit to of a model; whether there is some. Sums of gradients that
    /// are in the way are downloaded.
    pub(super) fn find_space(&mut self, device: usize, model: usize) -> bool {
        if self.working_bytes(device).is_none() {
            return true;
        }
        let Some((replica, next)) = self.models[model].claimable(Some(device), self.now_s) else {
            return true;
        };
        let (cost, version) =
            (&self.workload.tasks[model].shards[next.shard], self.models[model].program.version(&next));
        let copies = &self.devices[device].copies;
        let missing =
            Part::of((model, next.shard), cost, version).filter(|part| !copies.has([*part].into_iter()));
        let missing = missing.map(|part| part.bytes).fold(0, u64::saturating_add);
        let fits = missing == 0 || self.make_room(device, missing, Some((model, next.shard)));
        let sums = &mut self.devices[device].beside.sums;
        let in_the_way =
            |sums: &mut Sums| !fits && !sums.is_taken && !sums.is_before((model, replica), &next);
        if let Some(sums) = sums.take_if(in_the_way) {
            self.download_sums(device, sums);
        }
        fits
    }

    /// The parameters of what a device has just committed to come, and with them its inputs if there is room for them.
    pub(super) fn promote_inputs(&mut self, device: usize, claim: &Claim) {
        let active = self.devices[device].active.as_ref().map(|Active { claim, .. }| claim);
        let before = active.filter(|active| active.model == claim.model && active.replica == claim.replica);
        let inputs =
            match before.is_some_and(|before| before.task.microbatch_pass == claim.task.microbatch_pass) {
                true => 0,
                false => self.inputs(claim),
            };
        if !self.workload.devices[device].keeps_copies {
            let bytes = self.workload.tasks[claim.model].shards[claim.task.shard].bytes;
            self.devices[device].beside.parameters[1] = bytes.unwrap_or(0);
        }
        if self.working_bytes(device).is_none() || self.make_room(device, inputs, None) {
            self.devices[device].beside.inputs = inputs;
        }
        self.note_peak(device, false);
    }

    /// Takes what the next shard task of a device needs beside its parameters and what came with them, if that is there.
    pub(super) fn take_memory(&mut self, device: usize, claim: &Claim) -> bool {
        let beside = &self.devices[device].beside;
        if beside.is_taken {
            return true;
        }
        let working = self.working(claim, 0);
        let computing = match claim.task.kind {
            // A sum has room of its own beside the gradients of both.
            ShardTaskKind::Backward if beside.sums.is_some() => working.backward.saturating_add(working.sums),
            ShardTaskKind::Backward => working.backward,
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => working.forward,
        };
        let missing = computing.saturating_sub(beside.inputs);
        if self.working_bytes(device).is_some() && !self.make_room(device, missing, None) {
            return false;
        }
        let beside = &mut self.devices[device].beside;
        (beside.computing, beside.inputs, beside.is_taken) = (computing, 0, true);
        beside.parameters = [beside.parameters[1], 0];
        self.note_peak(device, false);
        true
    }

    /// Lets go of what a shard task took that has ended, but for its output and its gradients, which are downloaded.
    pub(super) fn leave_memory(&mut self, device: usize, claim: &Claim) {
        self.note_peak(device, true);
        let beside = &mut self.devices[device].beside;
        (beside.computing, beside.is_taken, beside.parameters[0]) = (0, false, 0);
        let working = self.working(claim, 0);
        let task = &claim.task;
        let goes_on = self.models[claim.model].program.following(task).is_some();
        let is_handed = self.is_handed(device, claim);
        // A later shard task of the microbatch pass reads it again.
        let is_read_again = task.kind == ShardTaskKind::Forward
            && task.shard + 2 < self.workload.tasks[claim.model].shards.len();
        if goes_on && (!is_handed || is_read_again) {
            let bytes = match task.kind {
                // The next shard task has it among what it takes.
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

    /// Whether the next shard task of the microbatch pass takes over on the device what a shard task leaves that has ended.
    fn is_handed(&self, device: usize, claim: &Claim) -> bool {
        let next = self.devices[device].next.as_ref();
        let next = next.filter(|next| next.model == claim.model && next.replica == claim.replica);
        next.is_some_and(|next| next.task.microbatch_pass == claim.task.microbatch_pass)
    }

    /// The gradients of a backward that has ended go down, but for sums that those of the next microbatch are added to.
    fn leave_gradients(&mut self, device: usize, claim: &Claim, working: WorkingBytes) {
        let Claim { model, replica, task, .. } = *claim;
        let program = &self.models[model].program;
        let microbatch_group = program.visited(&task);
        let is_before = |sums: &mut Sums| sums.is_before((model, replica), &task);
        let before = self.devices[device].beside.sums.take_if(is_before);
        let backwards = 1 + before.map_or(0, |sums| sums.backwards);
        let adds_up = microbatch_group.start == 0 && (task.microbatch_pass == 0 || before.is_some());
        let comes = ShardTask { microbatch_pass: task.microbatch_pass + 1, ..task };
        let next = self.devices[device].next.as_ref();
        let may_add =
            next.is_none_or(|next| (next.model, next.replica, next.task) == (model, replica, comes));
        let may_add = may_add && self.devices[device].beside.sums.is_none();
        if adds_up && may_add && working.sums > 0 && comes.microbatch_pass < microbatch_group.end {
            let is_taken = next.is_some();
            let sums = Sums { model, replica, task, bytes: working.sums, backwards, is_taken };
            self.devices[device].beside.sums = Some(sums);
            return self.download_gradients(device, (model, task), working.gradients - working.sums, 0);
        }
        self.download_gradients(device, (model, task), working.gradients, backwards);
    }

    /// Downloads sums to which nothing will be added any more where a device commits to this shard task of a model's replica.
    pub(super) fn release_sums(&mut self, device: usize, (model, replica): (usize, usize), next: &ShardTask) {
        // Other devices have sums of this model at most.
        let adds_up = self.models[model].adds_up;
        for index in if adds_up { 0..self.devices.len() } else { device..device + 1 } {
            let sums = &mut self.devices[index].beside.sums;
            let goes_on = |sums: &&mut Sums| index == device && sums.is_before((model, replica), next);
            if let Some(sums) = sums.as_mut().filter(goes_on) {
                sums.is_taken = true;
            }
            let is_over = |sums: &mut Sums| {
                !sums.is_taken && (index == device || (sums.model, sums.replica) == (model, replica))
            };
            if let Some(sums) = sums.take_if(is_over) {
                self.download_sums(index, sums);
            }
        }
    }

    fn download_sums(&mut self, device: usize, Sums { model, task, bytes, backwards, .. }: Sums) {
        self.download_gradients(device, (model, task), bytes, backwards);
    }

    /// Something is downloaded, or has been.
    pub(super) fn leaves(&mut self, device: usize, bytes: u64, over: bool) {
        let leaving = &mut self.devices[device].beside.leaving;
        *leaving = if over { leaving.saturating_sub(bytes) } else { leaving.saturating_add(bytes) };
    }

    /// Notes what is on a device that keeps copies, when something has come there or begun, or, with what is `leaving` then, ends:
    /// what leaves while a shard task computes has left before most of that is there.
    fn note_peak(&mut self, device: usize, leaving: bool) {
        if !self.workload.devices[device].keeps_copies {
            return;
        }
        let state = &self.devices[device];
        let beside = Beside { leaving: if leaving { state.beside.leaving } else { 0 }, ..state.beside };
        let all = state.copies.held_bytes().saturating_add(beside.bytes());
        let peak = &mut self.result.peak_bytes[device];
        *peak = (*peak).max(all);
    }

    /// What is uploaded for a shard task beside parameters: its input, and for a backward the gradient of its output.
    fn inputs(&self, claim: &Claim) -> u64 {
        let gradient =
            if claim.task.kind == ShardTaskKind::Backward { self.working(claim, 1).input } else { 0 };
        self.working(claim, 0).input.saturating_add(gradient)
    }

    /// The bytes of the claimed shard, or of one that comes so many after it.
    fn working(&self, claim: &Claim, after: usize) -> WorkingBytes {
        let shards = &self.workload.tasks[claim.model].shards;
        shards.get(claim.task.shard + after).map_or_else(WorkingBytes::default, |shard| shard.working)
    }
}
