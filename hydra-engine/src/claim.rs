//! Claiming: which device runs what next, and what it is given to do so.

use crate::cursor::ShardTask;
use crate::error::{EngineError, guarded};
use crate::inputs::Inputs;
use crate::model::Model;
use crate::run::{Next, Run};
use crate::worker::{ComputeJob, PromoteJob};
use hydra_core::DeviceId;
use hydra_sched::{ModelIndex, ModelView, ShardTaskKind, View};
use hydra_spill::SpillError;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

impl Run {
    /// Claims what devices run next: first for those that have nothing, then, as far as there is room in the
    /// double buffers, for those that compute.
    pub(crate) fn fill(&mut self) {
        for busy in [false, true] {
            for device in 0..self.devices.len() {
                let state = &self.devices[device];
                let has_room = state.next.is_none() && !state.lost;
                if has_room && state.active.is_some() == busy && (self.prefetch || !busy) {
                    self.claim(device);
                }
            }
        }
    }

    /// Claims a shard task for the device, if one can be, and sends it to the workers.
    fn claim(&mut self, device: usize) {
        let views: Vec<ModelView> = self.models.iter().filter_map(|m| self.view(m, device)).collect();
        let choose = || {
            let view = View { request: self.asking(device), claimable: &views };
            Ok(self.policy.choose(&view))
        };
        let index = match guarded("the policy", choose) {
            Ok(None) => {
                self.held_back |= !views.is_empty();
                return;
            }
            Ok(Some(ModelIndex(index))) if views.iter().any(|view| view.model.0 == index) => index,
            Ok(Some(ModelIndex(index))) => {
                let why = format!("chose model {index} of {}, which cannot be claimed", self.models.len());
                return self.dismiss(&why);
            }
            Err(error) => return self.dismiss(&format!("failed ({error})")),
        };
        let Some(next) = self.models[index].claimable(DeviceId(device), self.prefetch) else { return };
        if !self.activate(index) {
            return;
        }
        if let Err(error) = self.begin_claim(index, device, next) {
            self.fail(index, error);
        }
    }

    pub(crate) fn view(&self, model: &Model, device: usize) -> Option<ModelView> {
        let next = model.claimable(DeviceId(device), self.prefetch)?;
        if model.active.is_none() && self.host_budget.available() < self.active_bytes[model.id.0] {
            return None;
        }
        Some(ModelView {
            model: ModelIndex(model.id.0),
            remaining_s: model.remaining_s(),
            submitted: model.id.0 as u64,
            next_shard: next.shard,
            cached: false,
            continues: model.running.is_some(),
        })
    }

    /// Reserves the host memory of a model within a sweep; whether it has it.
    fn activate(&mut self, index: usize) -> bool {
        let model = &mut self.models[index];
        if model.active.is_none() {
            model.active = self.host_budget.try_reserve(self.active_bytes[index], &model.task.name);
        }
        model.active.is_some()
    }

    /// Does nothing if device memory for the promotion is not there yet.
    fn begin_claim(&mut self, index: usize, device: usize, next: ShardTask) -> Result<(), EngineError> {
        let threads = &self.threads.devices[device];
        let model = &mut self.models[index];
        let shard = &model.plan.shards[next.shard];
        let budget = threads.device.manager.budget();
        // The parameters first: the rules leave room for them beside any shard that computes.
        // Those that stay on the device have theirs.
        let staying = if model.placement.on_device() { shard.param_bytes } else { 0 };
        let Some(mut reservation) = budget.try_reserve(shard.param_bytes - staying, &model.task.name) else {
            return Ok(());
        };
        let ticket = self.tickets;
        let (claim, inputs) = match model.claim(ticket, DeviceId(device), next) {
            Ok(claimed) => claimed,
            // Its data cannot be read. When what is under way has ended, what it has trained is kept.
            Err(error) => {
                model.cannot_go_on = Some(error);
                return Ok(());
            }
        };
        self.tickets += 1;
        self.decisions += 1;
        let (inputs, late) = match budget.try_reserve(inputs.bytes(), &model.task.name) {
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
            chain: model.chain().clone(),
            work: claim.work.clone(),
            follows: claim.from_handoff,
            late,
            rest: need_bytes(&model.plan, next.shard, next.kind)
                .saturating_sub(staying + reservation.bytes()),
            abandoned: abandoned.clone(),
        };
        let images = model.images_of_shard(next.shard).to_vec();
        let promote = PromoteJob { ticket, task: model.id, fill, images, inputs, reservation };
        // A worker's channel closes only with the run.
        let _ = threads.promote.send(promote);
        let _ = threads.compute.send(compute);
        self.devices[device].next = Some(Next { claim, abandoned });
        Ok(())
    }
}

/// Device bytes of a shard task. A forward without a graph keeps and makes less than a backward.
fn need_bytes(plan: &hydra_partition::PartitionPlan, shard: usize, kind: ShardTaskKind) -> u64 {
    let shard = &plan.shards[shard];
    match kind {
        ShardTaskKind::Backward => shard.need_bytes.max(shard.verified_bytes.unwrap_or(0)),
        ShardTaskKind::Forward | ShardTaskKind::Evaluate => shard.forward_need_bytes,
    }
}
