//! Claiming: selects the next shard task of each device and prepares its jobs.

use super::devices::{DeviceState, NextClaim};
use super::threads::DeviceThreads;
use crate::device::{Adding, ComputeJob, PromoteJob};
use crate::error::{EngineError, guarded};
use crate::protocol::{HostHeadroom, Inputs, Made, Ticket};
use crate::task::Next as Claimable;
use crate::task::{Claim, LiveTask, ParameterBytes};
use hydra_core::{DeviceId, HostTensor, TaskId};
use hydra_sched::program::ShardTask;
use hydra_sched::{ModelIndex, ModelView, Policy, PolicyKind, Request, ShardTaskKind, View};
use hydra_spill::{HeldCopies, ParamBufferId, ParamBufferKind, Reservation, SpillError};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The policy of a run and the state of its claims.
pub(super) struct Claiming {
    policy: Box<dyn Policy>,
    pub policy_name: &'static str,
    /// True if the next shard task is promoted while one computes.
    pub prefetch: bool,
    /// The ticket of the next claim, which is the number of claims so far.
    pub tickets: Ticket,
    /// True if the policy held back a device that could have claimed something.
    held_back: bool,
}

/// The state of the run that claims read and change.
pub(super) struct ClaimContext<'a> {
    pub tasks: &'a mut [LiveTask],
    pub devices: &'a mut [DeviceState],
    pub threads: &'a [DeviceThreads],
    pub host: &'a HostHeadroom,
}

/// The jobs of a claim, for the workers of its device.
pub(super) struct Jobs {
    pub device: usize,
    pub promote: PromoteJob,
    pub compute: ComputeJob,
    /// Gradient sums to download now, with their devices: the shard task that would have been added to them was not
    /// claimed next.
    pub sums: Vec<(usize, Claim, Made)>,
}

impl Claiming {
    /// Starts without claims.
    ///
    /// # Errors
    /// A policy that panics when asked for its name.
    pub(super) fn new(policy: Box<dyn Policy>, prefetch: bool) -> Result<Self, EngineError> {
        let policy_name = guarded("the policy", || Ok(policy.name()))?;
        Ok(Self { policy, policy_name, prefetch, tickets: 0, held_back: false })
    }

    /// Replaces a policy that breaks its contract by the default policy.
    fn dismiss(&mut self, why: &str) {
        let other = PolicyKind::default().build(0);
        tracing::error!("policy `{}` {why}: the run goes on with `{}`", self.policy_name, other.name());
        (self.policy_name, self.policy) = (other.name(), other);
    }

    /// Claims when nothing runs and nothing is awaited. A policy that then holds back every device is replaced.
    pub(super) fn claim_or_replace_policy(
        &mut self,
        context: &mut ClaimContext<'_>,
    ) -> Vec<Result<Jobs, (usize, EngineError)>> {
        self.held_back = false;
        let jobs = self.claim_all(context);
        if self.held_back && context.devices.iter().all(|device| device.next.is_none()) {
            self.dismiss("holds back every device although nothing runs");
        }
        jobs
    }

    /// Claims the next shard tasks: first for idle devices, then for devices that compute, if the double buffer has
    /// memory for a second one. Returns jobs, or the index of a failed task with its error.
    pub(super) fn claim_all(
        &mut self,
        context: &mut ClaimContext<'_>,
    ) -> Vec<Result<Jobs, (usize, EngineError)>> {
        let mut claimed = Vec::new();
        for busy in [false, true] {
            for device in 0..context.devices.len() {
                let state = &context.devices[device];
                let has_space = state.next.is_none() && !state.lost;
                if has_space && state.active.is_some() == busy && (self.prefetch || !busy) {
                    claimed.extend(self.claim(context, device));
                }
            }
        }
        claimed
    }

    /// The queued task that starts next: the one whose first shard task the policy chooses.
    pub(super) fn choose_next(&mut self, devices: usize, waiting: &[&LiveTask]) -> Option<TaskId> {
        let views: Vec<ModelView> = waiting.iter().map(|task| task.first_view()).collect();
        let view = View { request: Request::new(0, devices, self.tickets), claimable: &views };
        let chosen = guarded("the policy", || Ok(self.policy.choose(&view)));
        let chosen = chosen.ok().flatten().map(|model| TaskId(model.0));
        let is_one = |id: &TaskId| waiting.iter().any(|task| task.id() == *id);
        chosen.filter(is_one).or_else(|| waiting.first().map(|task| task.id()))
    }

    /// Claims a shard task for the device, if possible.
    fn claim(
        &mut self,
        context: &mut ClaimContext<'_>,
        device: usize,
    ) -> Option<Result<Jobs, (usize, EngineError)>> {
        let index = self.choose(context, device)?;
        context.rate_copies(device, index);
        let task = &mut context.tasks[index];
        let next = task.claimable(DeviceId(device), self.prefetch)?;
        if task.memory.active.is_none() {
            task.memory.active =
                context.host.try_reserve(task.info.admitted.memory.active_bytes, task.info.name());
        }
        task.memory.active.as_ref()?;
        let sums_wait = context.devices[device].sums_wait_for(task.id(), &next.what);
        let jobs = self.begin(task, &context.threads[device], next, sums_wait).transpose()?;
        Some(jobs.map_err(|error| (index, error)).map(|(jobs, claimed)| {
            let sums = context.release_sums(device, &claimed.claim);
            context.devices[device].next = Some(claimed);
            Jobs { sums, ..jobs }
        }))
    }

    /// The index of the task that the policy chooses for a device.
    fn choose(&mut self, context: &ClaimContext<'_>, device: usize) -> Option<usize> {
        let views = context.views(device, self.prefetch);
        let request = Request::new(device, context.devices.len(), self.tickets);
        let choose = || {
            let request = if self.policy.waits() { context.awaiting(request, device) } else { request };
            Ok(self.policy.choose(&View { request, claimable: &views }))
        };
        match guarded("the policy", choose) {
            Ok(Some(ModelIndex(index))) if views.iter().any(|view| view.model.0 == index) => {
                return Some(index);
            }
            Ok(None) => self.held_back |= !views.is_empty(),
            Ok(Some(ModelIndex(index))) => {
                let of = context.tasks.len();
                self.dismiss(&format!("chose model {index} of {of}, which cannot be claimed"));
            }
            Err(error) => self.dismiss(&format!("failed ({error})")),
        }
        None
    }

    /// Claims a shard task; `None` if device memory for the promotion is not free yet.
    fn begin(
        &mut self,
        task: &mut LiveTask,
        threads: &DeviceThreads,
        next: Claimable,
        sums_wait: bool,
    ) -> Result<Option<(Jobs, NextClaim)>, EngineError> {
        let (manager, what) = (&threads.device.manager, &next.what);
        let held = manager.hold(task.id(), &task.info.buffers[what.shard]);
        // Parameters are reserved first: the partition rules leave memory for them next to any shard task.
        let params = task.info.admitted.promoted_bytes(what.shard) - held.bytes();
        let Some(reservation) = manager.try_reserve(params, task.info.name()) else { return Ok(None) };
        let (ticket, device) = (self.tickets, threads.device.id);
        let (claim, inputs) = match task.claim(ticket, device, next, sums_wait) {
            Ok(claimed) => claimed,
            // The task's data cannot be read. It is saved after the work in flight.
            Err(error) => {
                task.mark_failed(error);
                return Ok(None);
            }
        };
        self.tickets += 1;
        let promoted = if manager.link().zero_copy() { 0 } else { params };
        let parameters = ParameterBytes { promoted, cached: held.bytes() };
        jobs(task, threads, Claim { parameters, ..claim }, inputs, (held, reservation)).map(Some)
    }
}

/// The jobs of a claim whose parameters have device memory. Inputs that do not fit yet are uploaded later.
fn jobs(
    task: &LiveTask,
    threads: &DeviceThreads,
    claim: Claim,
    inputs: Inputs<HostTensor>,
    (held, mut reservation): (HeldCopies, Reservation),
) -> Result<(Jobs, NextClaim), EngineError> {
    let (ticket, next) = (claim.ticket, &claim.what);
    let (inputs, late) = match threads.device.manager.try_reserve(inputs.bytes(), task.info.name()) {
        Some(more) => {
            reservation.merge(more);
            (inputs, Inputs::default())
        }
        None => (Inputs::default(), inputs),
    };
    let fill = threads.buffer.begin_fill(ticket).map_err(SpillError::from)?;
    let abandoned = Arc::new(AtomicBool::new(false));
    let compute = ComputeJob {
        ticket,
        chain: task.info.chain_of(next.stage).clone(),
        work: claim.work.clone(),
        follows: claim.from_handoff,
        adding: claim.adding,
        late,
        rest: (peak_bytes(task, next) + accumulation_bytes(task, &claim)).saturating_sub(
            task.info.admitted.storage.resident.shards[next.shard] + held.bytes() + reservation.bytes(),
        ),
        abandoned: abandoned.clone(),
    };
    let buffers = task.info.buffers[next.shard].to_vec();
    let promote = PromoteJob { ticket, task: task.id(), fill, buffers, held, inputs, reservation };
    let sums = Vec::new();
    Ok((Jobs { device: threads.device.id.0, promote, compute, sums }, NextClaim { claim, abandoned }))
}

impl ClaimContext<'_> {
    /// Takes the gradient sums that no later shard task is added to once `claim` runs next on this device.
    fn release_sums(&mut self, device: usize, claim: &Claim) -> Vec<(usize, Claim, Made)> {
        let mut released = Vec::new();
        for (index, state) in self.devices.iter_mut().enumerate() {
            let is_taken = index == device && claim.adding == Adding::Next;
            let is_over = |(of, _): &mut (Claim, Made)| index == device || of.same_replica(claim);
            let sums = state.sums.take_if(is_over).filter(|_| !is_taken);
            released.extend(sums.map(|(of, made)| (index, of, made)));
        }
        released
    }

    /// The tasks with a shard task that the device can claim, as views for the policy. Tasks that another device
    /// computes are included only if there is no other task, so that no model uses several devices while an idle
    /// model can be claimed. A device that computes a different task waits for that task instead.
    fn views(&self, device: usize, prefetch: bool) -> Vec<ModelView> {
        let is_elsewhere = |task: &LiveTask| task.in_flight.is_elsewhere(DeviceId(device));
        let views = |of: &dyn Fn(&LiveTask) -> bool| -> Vec<ModelView> {
            let tasks = self.tasks.iter().filter(|task| of(task));
            tasks.filter_map(|task| self.view(task, device, prefetch)).collect()
        };
        let alone = views(&|task| !is_elsewhere(task));
        if !alone.is_empty() {
            return alone;
        }
        let active = self.devices[device].active.as_ref().map(|claim| claim.task);
        views(&|task| is_elsewhere(task) && active.is_none_or(|active| active == task.id()))
    }

    /// The view of a task, if the device can claim its next shard task.
    fn view(&self, task: &LiveTask, device: usize, prefetch: bool) -> Option<ModelView> {
        let next = task.claimable(DeviceId(device), prefetch)?.what;
        let needed = task.info.admitted.memory.active_bytes;
        let has_space = task.memory.active.is_some() || self.host.available() >= needed;
        let (continues, cached) =
            (task.in_flight.computing().any(|on| on.0 == device), || self.has_copies(task, &next, device));
        let keeps = |on: &DeviceId| self.threads[on.0].device.manager.caches_copies();
        let ran_on = task.in_flight.last_device().filter(keeps).map(|on| on.0);
        has_space.then(|| ModelView { cached: cached(), continues, ran_on, ..task.view(&next) })
    }

    /// Returns whether all parameters of a shard task are cached on the device.
    fn has_copies(&self, task: &LiveTask, next: &ShardTask, device: usize) -> bool {
        let buffers = &task.info.buffers[next.shard];
        let cached = self.threads[device].device.manager.cached_bytes(task.id(), buffers);
        cached > 0 && cached == task.info.admitted.promoted_bytes(next.shard)
    }

    /// Rates the worth of each cached copy on a device that is about to claim a shard task of `chosen`.
    fn rate_copies(&self, device: usize, chosen: usize) {
        let worth_of = |task: &LiveTask, buffer: usize| {
            let comes = task.id().0 == chosen || !task.in_flight.ran_elsewhere(DeviceId(device));
            task.copy_worth(buffer, if comes { 1 } else { self.devices.len() })
        };
        let worth = |id: ParamBufferId| match id.kind {
            // The task that reads a shared buffer next counts.
            ParamBufferKind::Shared => {
                let users = self.tasks.iter().filter(|task| task.has_begun());
                let users = users.filter_map(|task| Some(worth_of(task, task.info.buffer_of(id)?)));
                users.fold(0.0, f64::max)
            }
            ParamBufferKind::Masters | ParamBufferKind::Snapshot => {
                worth_of(&self.tasks[id.task.0], id.buffer)
            }
        };
        self.threads[device].device.manager.rate_copies(worth);
    }

    /// Returns whether any device could claim something.
    pub(super) fn has_claimable(&self, prefetch: bool) -> bool {
        let devices = || (0..self.devices.len()).filter(|device| !self.devices[*device].lost);
        let mut open = self.tasks.iter().filter(|task| !task.phase.is_over());
        open.any(|task| devices().any(|device| self.view(task, device, prefetch).is_some()))
    }

    /// Adds to a device's request the models whose step it may wait for. Each step ends in an event, as does a task
    /// that fails or stops, after which every device without a next shard task asks again.
    fn awaiting(&self, request: Request, device: usize) -> Request {
        let request = Request { soon: self.soon(device), ..request };
        let last = self.devices[device].last.map(|task| &self.tasks[task.0]);
        let Some((task, next)) = last.and_then(|task| Some((task, task.awaited()?))) else { return request };
        let open = self.tasks.iter().filter(|task| !task.phase.is_over());
        Request {
            awaited: Some(task.view(&next)),
            awaited_s: task.alone_s(),
            even_s: open.map(LiveTask::remaining_s).sum::<f64>() / self.devices.len() as f64,
            ..request
        }
    }

    /// The longest model that, by its earlier times, will be stepped and promoted before the device's current shard
    /// task ends. Only measured times are used; no clock is read.
    fn soon(&self, device: usize) -> Option<ModelView> {
        let state = &self.devices[device];
        let active = state.active.as_ref()?;
        let costs = self.tasks[active.task.0].costs.now();
        let end_s = state.started_s? + costs.seconds(active.what.kind, active.what.shard);
        let waits = |task: &LiveTask| Some((task.view(&task.awaited()?), task.promoted_s()?));
        Request::longest_in_time(self.tasks.iter().filter_map(waits), end_s)
    }
}

/// Device bytes of the sum of a shard task's gradients and earlier ones.
fn accumulation_bytes(task: &LiveTask, claim: &Claim) -> u64 {
    match claim.adding {
        Adding::Next => task.info.admitted.memory.accumulation_bytes[claim.what.shard],
        Adding::Nothing | Adding::First => 0,
    }
}

/// Device bytes of a shard task without standing bytes. A forward without a graph saves and creates less than a
/// backward.
fn peak_bytes(task: &LiveTask, next: &ShardTask) -> u64 {
    let [forward, backward] = task.info.admitted.plan.without_standing(next.shard);
    match next.kind {
        ShardTaskKind::Backward => backward,
        ShardTaskKind::Forward | ShardTaskKind::Evaluate => forward,
    }
}
