//! The policy port, and the policies by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::claimable::Listed;
use crate::{
    Asking, Claimable, Fifo, ModelIndex, ModelView, PolicyError, Priority, Random, RoundRobin, ShardedLrtf,
    ShardedLrtfLocal, ShardedLrtfPatient, Srtf, View,
};

/// Decides which model's next shard task a device takes.
///
/// The decision is about one device and one shard task, taken when the device needs it, and not
/// about a whole schedule: measured times differ from estimates, models fail, and a plan made
/// beforehand would have to be repaired. What has to hold in every schedule (a model is claimed at
/// most once, its shard tasks run in order, its masters are final) is not left to the policy; it
/// is in the choice of the models that the [`View`] shows.
///
/// An implementation is a function of what it is shown, of its own seed and, for
/// [`RoundRobin`], of its earlier answers. It reads no clock and no global generator, so that a
/// recorded run can be replayed. The results of training never depend on it, only their order in
/// time.
///
/// A policy is written once and asked in two ways. It says in which order it would take the models
/// ([`Policy::priority`]) and, where that is not all, how it picks from what is ordered
/// ([`Policy::pick`]). [`Policy::choose`] does that with a list, in one pass, as a run with a few
/// models needs it; a [`Queue`](crate::Queue) keeps thousands of models in order between
/// decisions, so that a decision costs a logarithm.
///
/// # Example
///
/// A policy of one's own: each model is to be done by a time, and the one with the least time to spare goes
/// first. Of those that have up to a second more, one whose next shard is on the device is as good.
///
/// ```
/// use hydra_sched::{
///     Asking, Claimable, ModelIndex, ModelView, Policy, Priority, ShardedLrtf, SimulationOptions, Workload, simulate,
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
///     fn pick(&mut self, _: &Asking, from: &dyn Claimable) -> Option<ModelIndex> {
///         let first = from.first()?;
///         let most_s = self.slack_s(&first) + 1.0;
///         let near = from.iter().find(|model| model.resident && self.slack_s(model) <= most_s);
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

    /// The model's place in the policy's order: the least comes first. It depends on the model
    /// alone and neither on where it is resident nor on earlier answers.
    fn priority(&self, model: &ModelView) -> Priority;

    /// The model that the device takes, or `None` to leave it with what it computes until
    /// something happens. Unless a policy says otherwise, it is the first in its order, and `None`
    /// only when nothing is claimable; a policy may hold a device back only for
    /// [`Asking::awaited`] or [`Asking::soon`], which are sure to become claimable or to end. Whoever
    /// asks does so again when that happens, so that a device that is held back never stays so.
    ///
    /// An answer that `from` does not show, and a device that is held back for nothing, end a simulation with
    /// [`SimulationError`](crate::SimulationError).
    fn pick(&mut self, asking: &Asking, from: &dyn Claimable) -> Option<ModelIndex> {
        let _ = asking;
        from.first().map(|model| model.model)
    }

    /// Whether [`Policy::pick`] looks at what [`Asking`] says of models to wait for. Unless a policy says
    /// so, whoever asks it need not work that out; a policy around another one passes the other's answer on.
    fn waits(&self) -> bool {
        false
    }

    /// The model whose next shard task the device takes, one of `view.claimable`; `None` as
    /// [`Policy::pick`] says.
    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        let listed = Listed::new(view.claimable, |model| self.priority(model));
        self.pick(&view.asking, &listed)
    }
}

/// The policies that can be asked for by name, in specs and on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Longest remaining time first: [`ShardedLrtf`].
    #[default]
    ShardedLrtf,
    /// First submitted first: [`Fifo`].
    Fifo,
    /// Shortest remaining time first: [`Srtf`].
    Srtf,
    /// Uniformly at random, from a seed: [`Random`].
    Random,
    /// In turns: [`RoundRobin`].
    RoundRobin,
    /// Longest remaining time first, but what is resident where that costs little:
    /// [`ShardedLrtfLocal`].
    ShardedLrtfLocal,
    /// Longest remaining time first, but waiting for the model that decides when the run ends:
    /// [`ShardedLrtfPatient`].
    ShardedLrtfPatient,
}

impl PolicyKind {
    /// Every policy, the default first.
    pub const ALL: [Self; 7] = [
        Self::ShardedLrtf,
        Self::Fifo,
        Self::Srtf,
        Self::Random,
        Self::RoundRobin,
        Self::ShardedLrtfLocal,
        Self::ShardedLrtfPatient,
    ];

    /// The name in specs, flags and reports, such as `sharded-lrtf`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ShardedLrtf => "sharded-lrtf",
            Self::Fifo => "fifo",
            Self::Srtf => "srtf",
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::ShardedLrtfLocal => "sharded-lrtf-local",
            Self::ShardedLrtfPatient => "sharded-lrtf-patient",
        }
    }

    /// A policy of this kind. Only [`PolicyKind::Random`] uses the seed.
    pub fn build(self, seed: u64) -> Box<dyn Policy> {
        match self {
            Self::ShardedLrtf => Box::new(ShardedLrtf),
            Self::Fifo => Box::new(Fifo),
            Self::Srtf => Box::new(Srtf),
            Self::Random => Box::new(Random::new(seed)),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::ShardedLrtfLocal => Box::new(ShardedLrtfLocal::default()),
            Self::ShardedLrtfPatient => Box::new(ShardedLrtfPatient::default()),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| PolicyError::Unknown {
            found: text.to_owned(),
            expected: Self::ALL.map(Self::name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StrDeserializer};

    use super::*;

    /// serde writes a unit variant into a formatter as its bare name.
    struct SerdeName(PolicyKind);

    impl fmt::Display for SerdeName {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.serialize(f)
        }
    }

    #[test]
    fn every_way_to_name_a_policy_agrees() {
        for kind in PolicyKind::ALL {
            let name = kind.name();
            assert_eq!(kind.to_string(), name);
            assert_eq!(name.parse(), Ok(kind));
            assert_eq!(kind.build(0).name(), name);
            assert_eq!(SerdeName(kind).to_string(), name);
            let read: StrDeserializer<'_, Error> = name.into_deserializer();
            assert_eq!(PolicyKind::deserialize(read), Ok(kind));
        }
    }

    #[test]
    fn the_names_are_the_documented_ones() {
        let names = PolicyKind::ALL.map(PolicyKind::name);
        let expected =
            "sharded-lrtf, fifo, srtf, random, round-robin, sharded-lrtf-local, sharded-lrtf-patient";
        assert_eq!(names.join(", "), expected);
        assert_eq!(PolicyKind::default(), PolicyKind::ShardedLrtf);
        assert_eq!(format!("[{:>6}]", PolicyKind::Fifo), "[  fifo]");
    }

    #[test]
    fn an_unknown_name_is_told_what_there_is() {
        for found in ["lrtf", "", "FIFO", " srtf"] {
            let error = found.parse::<PolicyKind>().unwrap_err();
            assert_eq!(
                error,
                PolicyError::Unknown {
                    found: found.to_owned(),
                    expected: PolicyKind::ALL.map(PolicyKind::name).join(", "),
                }
            );
            assert!(error.to_string().contains(&format!("`{found}`")));
            assert!(error.to_string().contains("sharded-lrtf, fifo, srtf, random"));
        }
    }
}
