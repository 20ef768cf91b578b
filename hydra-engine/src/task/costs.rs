//! The seconds that shard tasks are estimated to take.

use hydra_partition::PartitionPlan;
use hydra_sched::{CostError, CostModel, ShardTaskKind};
use std::cell::{Ref, RefCell};
use std::rc::Rc;

/// The estimates of a plan, which all tasks with that plan have in common: they compute the same, and what one of them took in a
/// moment in which the machine was slow puts it before none of the others.
#[derive(Clone)]
pub(crate) struct Costs(Rc<RefCell<CostModel>>);

impl Costs {
    /// Those of the pilot pass.
    ///
    /// # Errors
    /// Seconds that are none.
    pub(crate) fn of(plan: &PartitionPlan) -> Result<Self, CostError> {
        let forward: Vec<f64> = plan.shards.iter().map(|shard| shard.forward_s).collect();
        let backward = plan.shards.iter().map(|shard| shard.backward_s).collect();
        Ok(Self(Rc::new(RefCell::new(CostModel::new(forward.clone(), backward, forward)?))))
    }

    /// The estimates as they are now.
    pub(crate) fn now(&self) -> Ref<'_, CostModel> {
        self.0.borrow()
    }

    /// Corrects them by what a shard task took.
    pub(crate) fn observe(&self, kind: ShardTaskKind, shard: usize, seconds: f64) {
        self.0.borrow_mut().observe(kind, shard, seconds);
    }
}
