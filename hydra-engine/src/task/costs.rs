//! Estimated seconds of shard tasks.

use hydra_partition::PartitionPlan;
use hydra_sched::{CostError, CostModel, ShardTaskKind};
use std::cell::{Ref, RefCell};
use std::rc::Rc;

/// The estimates of a partition plan, shared by all tasks with that plan. They compute the same shard tasks, so a
/// slow moment of the machine must not change the order among them.
#[derive(Clone)]
pub(crate) struct Costs(Rc<RefCell<CostModel>>);

impl Costs {
    /// The estimates of the pilot pass.
    ///
    /// # Errors
    /// A time that is negative or not finite.
    pub(crate) fn of(plan: &PartitionPlan) -> Result<Self, CostError> {
        let forward: Vec<f64> = plan.shards.iter().map(|shard| shard.forward_s).collect();
        let backward = plan.shards.iter().map(|shard| shard.backward_s).collect();
        Ok(Self(Rc::new(RefCell::new(CostModel::new(forward.clone(), backward, forward)?))))
    }

    /// The current estimates.
    pub(crate) fn now(&self) -> Ref<'_, CostModel> {
        self.0.borrow()
    }

    /// Corrects the estimates with the measured seconds of a shard task.
    pub(crate) fn observe(&self, kind: ShardTaskKind, shard: usize, seconds: f64) {
        self.0.borrow_mut().observe(kind, shard, seconds);
    }
}
