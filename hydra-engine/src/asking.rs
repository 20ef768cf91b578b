//! What a device that asks for its next shard task may wait for.

use crate::model::Model;
use crate::run::Run;
use hydra_sched::{ModelIndex, ModelView, Request};

/// What a model waited for in its last minibatch, and would in each even without others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    /// From the end of a minibatch to that of its last optimizer step that something waits for.
    pub step_s: f64,
    /// The promotion of the first shard.
    pub promote_s: f64,
}

impl Run {
    /// The device, and the models whose masters it may wait for. They become final, or the task fails or
    /// stops; each of these is an event, after which every device without a next shard task asks again.
    pub(crate) fn asking(&self, device: usize) -> Request {
        let asking = Request::new(device, self.devices.len(), self.decisions);
        if !self.policy.waits() {
            return asking;
        }
        let asking = Request { soon: self.soon(device), ..asking };
        let last = self.devices[device].last.map(|task| &self.models[task.0]);
        let Some(model) = last.filter(|model| model.awaits_masters()) else { return asking };
        let left_s = self.models.iter().filter(|model| model.ended.is_none()).map(Model::remaining_s);
        Request {
            awaited: awaited(model),
            awaited_s: model.alone_s(),
            even_s: left_s.sum::<f64>() / self.devices.len() as f64,
            ..asking
        }
    }

    /// The longest of the models that will have been stepped and can be promoted before the device's shard
    /// task ends, by what these took before. Times are those that were measured; no clock is read.
    fn soon(&self, device: usize) -> Option<ModelView> {
        let state = &self.devices[device];
        let active = state.active.as_ref()?;
        let costs = &self.models[active.task.0].costs;
        let end_s = state.ended_s? + costs.of(active.what.kind, active.what.shard);
        let waits = |model: &Model| model.promoted_s().and_then(|s| Some((awaited(model)?, s)));
        Request::longest_in_time(self.models.iter().filter_map(waits), end_s)
    }
}

fn awaited(model: &Model) -> Option<ModelView> {
    Some(ModelView {
        model: ModelIndex(model.id.0),
        remaining_s: model.remaining_s(),
        submitted: model.id.0 as u64,
        next_shard: model.cursor.peek()?.shard,
        cached: false,
        continues: model.running.is_some(),
    })
}

impl Model {
    /// The next shard task waits for the optimizer, and any device may claim it afterwards.
    fn awaits_masters(&self) -> bool {
        let open = self.ended.is_none() && self.claimed.is_none();
        let stops_here = (self.stopping || self.keep_due) && self.between_sweeps();
        open && !stops_here && self.cursor.peek().is_some_and(|next| !self.masters_final(&next))
    }

    /// When the shard that waits for the optimizer can have been promoted, once that was measured.
    fn promoted_s(&self) -> Option<f64> {
        let measured = self.waits.step_s > 0.0 && self.running.is_none() && self.awaits_masters();
        let done_s = self.minibatch_done_s.filter(|_| measured)?;
        Some(done_s + self.waits.step_s + self.waits.promote_s)
    }

    /// Estimated seconds to the end of the task if it waits for no other.
    fn alone_s(&self) -> f64 {
        let minibatches = self.cursor.program().steps.saturating_sub(self.cursor.step());
        self.remaining_s() + minibatches as f64 * (self.waits.step_s + self.waits.promote_s)
    }
}
