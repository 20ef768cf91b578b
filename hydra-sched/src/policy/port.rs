//! The policy interface.

use super::claimable::Listed;
use super::{Claimable, ModelIndex, ModelView, Priority, Request, View};

/// Chooses the model whose next shard task a device takes.
///
/// A decision is about one device and one shard task, made when the device needs it, instead of a whole
/// schedule: measured times differ from estimates, models fail, and a precomputed plan would have to be
/// repaired. Invariants of every schedule (a model is claimed at most once, its shard tasks run in order, its
/// master weights are final) do not depend on the policy; the [`View`] lists only models that satisfy them.
///
/// An implementation is a function of its arguments, of its own seed and, for
/// [`RoundRobin`](crate::RoundRobin), of its earlier choices. It reads no clock and no global generator, so
/// that a recorded run can be replayed. The results of training never depend on it, only their order in time.
///
/// A policy is written once and used in two ways. It defines the order of the models ([`Policy::priority`])
/// and, if the first is not always chosen, how it picks from the ordered models ([`Policy::pick`]).
/// [`Policy::choose`] does that with a list, in one pass, for runs with a few models; a
/// [`Queue`](crate::Queue) keeps thousands of models in order between decisions, so that a decision takes
/// logarithmic time.
/// # Example
/// A custom policy: each model has a deadline, and the one with the least slack goes first. Among models with
/// up to a second more slack, one whose next shard is cached on the device is preferred.
///
/// ```
/// use hydra_sched::{
///     Claimable, ModelIndex, ModelView, Policy, Priority, Request, ShardedLrtf, SimulationOptions, Workload, simulate,
/// };
///
/// struct LeastSlack {
///     due_s: Vec<f64>,
/// }
///
/// impl LeastSlack {
///     /// The slack, except for the present time, which is the same for all models and does not change their order.
///     fn slack_s(&self, model: &ModelView) -> f64 {
///         self.due_s[model.model.0] - model.remaining_s
///     }
/// }
///
/// impl Policy for LeastSlack {
///     fn name(&self) -> &'static str {
///         "least-slack"
///     }
///
///     fn priority(&self, model: &ModelView) -> Priority {
///         Priority::least_first(self.slack_s(model), model)
///     }
///
///     fn pick(&mut self, _: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
///         let first = from.first()?;
///         let most_s = self.slack_s(&first) + 1.0;
///         let near = from.iter().find(|model| model.cached && self.slack_s(model) <= most_s);
///         Some(near.unwrap_or(first).model)
///     }
/// }
///
/// // Three hours of work for one device, and the shortest of three models has an early deadline.
/// let workload = Workload::from_json(r#"{
///     "tasks": [
///         {"name": "long", "minibatches": 100, "shards": [{"forward_s": 10, "backward_s": 20, "promote_s": 1},
///                                                         {"forward_s": 10, "backward_s": 30, "promote_s": 1}]},
///         {"name": "also long", "minibatches": 100, "shards": [{"forward_s": 10, "backward_s": 40, "promote_s": 1}]},
///         {"name": "soon", "minibatches": 20, "shards": [{"forward_s": 10, "backward_s": 30, "promote_s": 1}]}
///     ],
///     "devices": 1
/// }"#)?;
/// let mut policy = LeastSlack { due_s: vec![20_000.0, 20_000.0, 2_000.0] };
/// let options = SimulationOptions::default();
/// let run = simulate(&workload, &mut policy, options)?;
/// assert_eq!((run.policy, run.shard_tasks), ("least-slack", 300 + 100 + 20));
/// assert!(run.finished_s[2] < 2_000.0);
/// assert!(simulate(&workload, &mut ShardedLrtf, options)?.finished_s[2] > 2_000.0);
/// # Ok::<(), hydra_sched::SimulationError>(())
/// ```
pub trait Policy: Send {
    /// The policy's name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// The model's position in the policy's order; the smallest comes first. It depends only on the model,
    /// neither on where it is cached nor on earlier choices. The default is the order of submission.
    fn priority(&self, model: &ModelView) -> Priority {
        Priority::first_submitted(model)
    }

    /// Chooses the model that the device takes, or returns `None` to hold the device back until an event. The
    /// default returns the first in the policy's order, and `None` only if nothing is claimable. A policy may
    /// hold a device back only for [`Request::awaited`] or [`Request::soon`], which are certain to become
    /// claimable or to end. The caller repeats the request when that happens, so a device is never held back
    /// forever.
    ///
    /// A choice that is not in `from`, and holding a device back without an awaited model, end a simulation
    /// with [`SimulationError`](crate::SimulationError).
    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        let _ = request;
        from.first().map(|model| model.model)
    }

    /// Returns whether [`Policy::pick`] uses the models to wait for in [`Request`]. The default is false, and
    /// callers then need not compute them; a policy that wraps another one must forward this method.
    fn waits(&self) -> bool {
        false
    }

    /// Chooses the model whose next shard task the device takes, one of `view.claimable`; `None` as in
    /// [`Policy::pick`].
    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        let listed = Listed::new(view.claimable, view.request.device, |model| self.priority(model));
        self.pick(&view.request, &listed)
    }
}
