//! The policy port.

use super::claimable::Listed;
use super::{Claimable, ModelIndex, ModelView, Priority, Request, View};

/// Decides which model's next shard task a device takes.
///
/// The decision is about one device and one shard task, taken when the device needs it, and not about a whole
/// schedule: measured times differ from estimates, models fail, and a plan made beforehand would have to be repaired.
/// What has to hold in every schedule (a model is claimed at most once, its shard tasks run in order, its masters are
/// final) is not left to the policy; it is in the choice of the models that the [`View`] shows.
///
/// An implementation is a function of what it is shown, of its own seed and, for [`RoundRobin`](crate::RoundRobin), of its earlier
/// answers. It reads no clock and no global generator, so that a recorded run can be replayed. The results of
/// training never depend on it, only their order in time.
///
/// A policy is written once and asked in two ways. It says in which order it would take the models
/// ([`Policy::priority`]) and, where that is not all, how it picks from what is ordered
/// ([`Policy::pick`]). [`Policy::choose`] does that with a list, in one pass, as a run with a few
/// models needs it; a [`Queue`](crate::Queue) keeps thousands of models in order between
/// decisions, so that a decision costs a logarithm.
///
/// # Example
/// A policy of one's own: each model is to be done by a time, and the one with the least time to spare goes
/// first. Of those that have up to a second more, one whose next shard is on the device is as good.
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
///     /// The same for all models but for the present time, which does not change their order.
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
/// // Three hours of work for one device, and the shortest of three models is wanted soon.
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
    /// The name the policy is chosen by and reported under.
    fn name(&self) -> &'static str;

    /// The model's place in the policy's order: the least comes first. It depends on the model alone and neither on
    /// where it is cached nor on earlier answers. Unless a policy says otherwise, it is the order of submission.
    fn priority(&self, model: &ModelView) -> Priority {
        Priority::first_submitted(model)
    }

    /// The model that the device takes, or `None` to leave it with what it computes until something happens. Unless a
    /// policy says otherwise, it is the first in its order, and `None` only when nothing is claimable; a policy may
    /// hold a device back only for [`Request::awaited`] or [`Request::soon`], which are sure to become claimable or
    /// to end. Whoever asks does so again when that happens, so that a device that is held back never stays so.
    ///
    /// An answer that `from` does not show, and a device that is held back for nothing, end a simulation with
    /// [`SimulationError`](crate::SimulationError).
    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        let _ = request;
        from.first().map(|model| model.model)
    }

    /// True if [`Policy::pick`] looks at what [`Request`] says of models to wait for. Unless a policy says
    /// so, whoever asks it need not work that out; a policy around another one passes the other's answer on.
    fn waits(&self) -> bool {
        false
    }

    /// The model whose next shard task the device takes, one of `view.claimable`; `None` as [`Policy::pick`] says.
    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        let listed = Listed::new(view.claimable, view.request.device, |model| self.priority(model));
        self.pick(&view.request, &listed)
    }
}
