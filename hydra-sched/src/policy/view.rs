//! The input of a policy: a device's request, and the models that it can claim.

use serde::{Deserialize, Serialize};

use super::Priority;

/// The index of a model (task) in submission order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelIndex(pub usize);

/// One model as a policy sees it, relative to the requesting device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelView {
    /// The model.
    pub model: ModelIndex,
    /// Estimated seconds of compute left, over all shard tasks from the next one on; see
    /// [`CostModel::remaining_s`](crate::CostModel::remaining_s).
    pub remaining_s: f64,
    /// The submission count of the model, which breaks ties.
    pub submitted: u64,
    /// The shard whose parameters the model's next shard task reads.
    pub next_shard: usize,
    /// Whether the next shard is cached on the requesting device, so that nothing needs to be promoted.
    pub cached: bool,
    /// Whether it is computing on the requesting device now, so that its next shard task can follow there.
    pub continues: bool,
    /// The device that last committed to it, if devices have a parameter cache, where its parameters are most
    /// likely cached. `None` for a model without a preferred device.
    pub ran_on: Option<usize>,
}

/// The input of a decision: a device's request, and the models that it can claim now.
///
/// A model that is already claimed, or whose master weights are not final for its next shard task, is never
/// in `claimable`, so a policy cannot violate these rules.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The device, and the models that it may wait for.
    pub request: Request,
    /// The models whose next shard task the device may take, each once, in any order.
    pub claimable: &'a [ModelView],
}

/// A device's request for its next shard task: the inputs of a decision besides the claimable models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// The requesting device, below `devices`.
    pub device: usize,
    /// The number of devices of the run.
    pub devices: usize,
    /// The number of shard tasks claimed in this run before. A repeated request of a device that was held
    /// back has the same number.
    pub decision: u64,
    /// The model that the device computes or last computed, if no other device has computed it since and no
    /// device can claim it yet because its master weights are not final. It is certain to become claimable,
    /// or to end.
    pub awaited: Option<ModelView>,
    /// Estimated seconds until the awaited model could end if it never waited for a device: its
    /// compute, and in each minibatch its waits for the optimizer, estimated by the last one, and for
    /// the first promotion after it, which nothing hides. 0 if no model is awaited.
    pub awaited_s: f64,
    /// The longest of the models that wait for their master weights and become claimable soon enough that the
    /// device never idles: their parameters can still be promoted before the device's current shard task
    /// ends. See [`Request::longest_in_time`]. Models that wait only for the output of their last shard task
    /// are excluded. `None` if the device is idle. It is certain to become claimable, or to end.
    pub soon: Option<ModelView>,
    /// Estimated seconds until all devices together could complete all remaining work, including that of
    /// running models; infinite if unknown.
    pub even_s: f64,
}

impl Request {
    /// Returns the request of a device without models to wait for.
    pub const fn new(device: usize, devices: usize, decision: u64) -> Self {
        Self { device, devices, decision, awaited: None, awaited_s: 0.0, soon: None, even_s: f64::INFINITY }
    }

    /// Returns the longest of the models that could be promoted by `end_s`, and the first submitted of equal
    /// ones. This is [`Request::soon`] if the arguments are the models that wait for their master weights,
    /// each with that time.
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

    /// A model that is late does not hide one that comes in time, and equal ones are ordered by submission.
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
