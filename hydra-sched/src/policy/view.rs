//! The view of a policy: a device that asks, and the models it could take.

use serde::{Deserialize, Serialize};

use super::Priority;

/// Index of a model (task) in submission order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelIndex(pub usize);

/// One model as a policy sees it, from the side of the device that asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelView {
    /// The model.
    pub model: ModelIndex,
    /// Estimated seconds of compute left, over all shard tasks from the next one on; see
    /// [`CostModel::remaining_s`](crate::CostModel::remaining_s).
    pub remaining_s: f64,
    /// When the model was submitted, as a count; breaks ties.
    pub submitted: u64,
    /// The shard whose parameters the model's next shard task reads.
    pub next_shard: usize,
    /// True if a copy of the next shard is on the asking device, so that nothing has to be moved.
    pub cached: bool,
    /// It is computing on the asking device right now, so that its next shard task can follow there.
    pub continues: bool,
    /// The device that committed to it last, if copies stay there: those of what it reads again are there rather than
    /// elsewhere. None for a model that is as good anywhere.
    pub ran_on: Option<usize>,
}

/// The view that a policy decides from: a device that asks, and the models that it can claim now.
///
/// A model that is claimed already, or whose masters are not final for the shard task it needs next, is never in
/// `claimable`: the policy cannot break that rule because it cannot take such a model.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The device, and what it may wait for.
    pub request: Request,
    /// The models of which the device may take the next shard task, each once, in any order.
    pub claimable: &'a [ModelView],
}

/// The request of a device for its next shard task: what a decision rests on beside the claimable models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// The device that asks, below `devices`.
    pub device: usize,
    /// The number of devices of the run.
    pub devices: usize,
    /// The number of shard tasks that were claimed in this run before: decisions that came to something. A device that
    /// is asked again because it took none is asked with the same number.
    pub decision: u64,
    /// The model that the device computes or computed last, if no other device has computed it since, and if no
    /// device can claim it yet because its masters are not final. It is sure to become claimable, or to end.
    pub awaited: Option<ModelView>,
    /// Estimated seconds until the awaited model could be over if it never waited for a device: its
    /// compute, and in each minibatch its waits for the optimizer, as long as the last one was, and for
    /// the first promotion after it, which nothing hides. 0 where nothing is awaited.
    pub awaited_s: f64,
    /// The longest of the models that wait for their masters and can be claimed soon enough that the device does not
    /// have to wait: their parameters can still be promoted before the shard task that the device computes has ended.
    /// See [`Request::longest_in_time`]. A model that waits only for what its last shard task made is none of them.
    /// `None` where the device computes nothing. It is sure to become claimable, or to end.
    pub soon: Option<ModelView>,
    /// Estimated seconds until all devices together could have done all work that is left, that of
    /// running models included; infinite where that is not known.
    pub even_s: f64,
}

impl Request {
    /// The request of a device about which no more is known.
    pub const fn new(device: usize, devices: usize, decision: u64) -> Self {
        Self { device, devices, decision, awaited: None, awaited_s: 0.0, soon: None, even_s: f64::INFINITY }
    }

    /// The longest of the models that could have been promoted by `end_s`, the first submitted of equal ones: what
    /// [`Request::soon`] is, from the models that wait for their masters, each with that time.
    pub fn longest_in_time(
        waiting: impl IntoIterator<Item = (ModelView, f64)>,
        end_s: f64,
    ) -> Option<ModelView> {
        let in_time = waiting.into_iter().filter(|(_, promoted_s)| *promoted_s <= end_s);
        in_time.map(|(model, _)| model).min_by_key(Priority::longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::cases::models;

    /// A model that is late does not hide one that comes in time, and equal ones go by submission.
    #[test]
    fn the_longest_in_time_is_not_the_longest() {
        let of = |of: &[(f64, u64, f64)], end_s| {
            let views = models(&of.iter().map(|(left_s, at, _)| (*left_s, *at)).collect::<Vec<_>>());
            let times = of.iter().map(|(.., promoted_s)| *promoted_s);
            Request::longest_in_time(views.into_iter().zip(times), end_s).map(|found| found.model.0)
        };
        let waiting = [(9.0, 0, 5.1), (7.0, 2, 5.0), (7.0, 1, 4.0), (3.0, 3, 1.0)];
        assert_eq!(of(&waiting, 5.0), Some(2));
        assert_eq!(of(&waiting, 5.1), Some(0));
        assert_eq!(of(&waiting, 3.0), Some(3));
        assert_eq!(of(&waiting, 0.5), None);
        assert_eq!(of(&[], 0.5), None);
    }
}
