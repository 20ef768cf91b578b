//! What a device that asks for its next shard task may wait for.

use super::Run;
use crate::task::Model;
use hydra_sched::{Asking, ModelIndex, ModelView};

impl Run {
    /// The device, and the models whose masters it may wait for. They become final, or the task fails or
    /// stops; each of these is an event, after which every device without a next shard task asks again.
    pub(crate) fn asking(&self, device: usize) -> Asking {
        let asking = Asking::new(device, self.devices.len(), self.decisions);
        if !self.policy.waits() {
            return asking;
        }
        let asking = Asking { soon: self.soon(device), ..asking };
        let last = self.devices[device].last.map(|task| &self.models[task.0]);
        let Some(model) = last.filter(|model| model.awaits_masters()) else { return asking };
        let left_s = self.models.iter().filter(|model| model.ended.is_none()).map(Model::remaining_s);
        Asking {
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
        Asking::longest_in_time(self.models.iter().filter_map(waits), end_s)
    }
}

fn awaited(model: &Model) -> Option<ModelView> {
    Some(ModelView {
        model: ModelIndex(model.id.0),
        remaining_s: model.remaining_s(),
        submitted: model.id.0 as u64,
        next_shard: model.cursor.peek()?.shard,
        resident: false,
        continues: model.running.is_some(),
    })
}
