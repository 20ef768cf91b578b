//! The work to schedule, as stated costs: the JSON format and its rules.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::WorkloadError;

mod check;
mod costs;

pub(crate) use costs::Microbatches;

/// Tasks and devices, as stated or measured costs. `docs/scheduling.md` describes the format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// The models to train, in submission order.
    pub tasks: Vec<TaskCost>,
    /// The devices. In JSON a number stands for that many equal ones.
    #[serde(deserialize_with = "devices")]
    pub devices: Vec<DeviceCost>,
    /// All devices are fed over one link, and not each over its own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_link: bool,
    /// Bytes of host memory for masters and for tasks within a minibatch or an evaluation. A task that begins one waits until
    /// there is room for it. Where nothing is said there is room for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<u64>,
    /// Processors that the threads of devices and of the host optimizer share: devices take turns, so that each of their threads has
    /// one, or shares it with the optimizer's while that steps. Where nothing is said nothing is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<usize>,
    /// Threads of the host optimizer on the `processors`; 0, which it is where nothing is said, for one that has its own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optimizer_threads: usize,
    /// Random variation of the times of shard tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variation: Option<Variation>,
}

/// One model and its training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskCost {
    /// Its name, unlike that of every other task.
    pub name: String,
    /// The number of minibatches that it trains. At least one.
    pub minibatches: u64,
    /// Its shards, in the order of the forward pass.
    pub shards: Vec<ShardCost>,
    /// The number of microbatches of a minibatch: training microbatch passes over its shards before its masters are stepped. At least
    /// one, which it is where nothing is said.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub microbatches: u64,
    /// The epochs, where the last minibatch of each has fewer microbatches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// The microbatches of a minibatch that a promoted shard takes before the next shard has its turn. At least one, which
    /// it is where nothing is said.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    #[serde(alias = "visit")]
    pub microbatch_group: u64,
    /// The same of evaluation microbatch passes that have one place.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    #[serde(alias = "evaluation_visit")]
    pub evaluation_group: u64,
    /// The most microbatch groups of a minibatch, or of the evaluations of one place, that are under way at once, each on a device of its
    /// own. At least one, which it is where nothing is said.
    #[serde(default = "one_replica", skip_serializing_if = "is_one_replica")]
    #[serde(alias = "lanes")]
    pub replicas: usize,
    /// The first shard that is trained: backward passes end there, and those below are frozen. They are never stepped, and
    /// copies of them stay valid. 0 where nothing is said.
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_trained: usize,
    /// When it is submitted, in seconds from the start of the run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub arrival_s: f64,
    /// Seconds of the host optimizer for one minibatch, spread evenly over the shards. There is one optimizer for
    /// all tasks, and it steps one shard after another, in the order in which their backwards end.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optimizer_s: f64,
    /// Seconds from the end of a shard's backward, or of its step where `optimizer_s` is stated too, until its
    /// masters are final, whatever other tasks do. What a recorded run waited is stated here: it has the queue before
    /// the host optimizer in it, which `optimizer_s` would count again.
    #[serde(default, skip_serializing_if = "is_default")]
    pub step_wait_s: f64,
    /// The first estimates that the policy is told, as a multiple of the stated costs; 1 where nothing is said.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub estimate_factor: f64,
    /// The time by which the last minibatch is longer than the first, as a share of it; the costs grow
    /// (or shrink, down to -1) evenly in between. Evaluations cost what the minibatch after them does, and
    /// those at the end what the last one did.
    #[serde(default, skip_serializing_if = "is_default")]
    pub drift: f64,
    /// Bytes of host memory that its masters take until it has ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub masters_bytes: u64,
    /// Bytes of host memory that it takes beside them while it is within a minibatch or a microbatch pass of an evaluation, until its
    /// masters are final.
    #[serde(default, skip_serializing_if = "is_default")]
    pub active_bytes: u64,
    /// Evaluation microbatch passes between the minibatches, in the order of `after`, each place once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluations: Vec<EvaluationCost>,
}

/// The epochs of a task, the last minibatches of which are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epoch {
    /// Minibatches of an epoch. At least one.
    pub minibatches: u64,
    /// Microbatches of the last of them: at least one, and at most as many as of the others.
    pub last_microbatches: u64,
}

/// Evaluation microbatch passes of a task: the forward of every shard, as often as there are batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationCost {
    /// Minibatches trained before them; 0 is before training.
    pub after: u64,
    /// The number of microbatch passes.
    #[serde(alias = "sweeps")]
    pub microbatch_passes: u64,
}

/// The costs of one shard on a device of speed 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardCost {
    /// Seconds of its forward. That of a model's last shard is no part of training, because its
    /// `backward_s` is that of the fused forward and backward; it counts in evaluations where `evaluate_s` is not
    /// given, and says which share of the fused task a pipeline does in its forwards.
    pub forward_s: f64,
    /// Seconds of its backward, the recomputed forward included.
    pub backward_s: f64,
    /// Seconds of its forward in an evaluation; `forward_s` where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluate_s: Option<f64>,
    /// Seconds of a promotion of its parameters, whichever the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promote_s: Option<f64>,
    /// Bytes of its parameters: what `memory_bytes` is compared with, and instead of `promote_s`
    /// divided by `link_bytes_per_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Seconds in which the output of a shard task for the next one of its microbatch pass is downloaded to the host, after what its
    /// device downloads already. Before that, only the device that made it can go on with the model. 0 where nothing is said.
    #[serde(rename = "take_down_s", default, skip_serializing_if = "is_default")]
    pub download_s: f64,
    /// Seconds in which the gradients of a backward are downloaded to the host, after its output. Before that, its masters are
    /// not stepped. 0 where nothing is said.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gradients_s: f64,
    /// What its shard tasks take of a device beside its parameters. It is in
    /// [`Simulation::peak_bytes`](crate::Simulation::peak_bytes), and is waited for where the device says how much there is of it
    /// ([`DeviceCost::working_bytes`]).
    #[serde(default, skip_serializing_if = "is_default")]
    pub working: WorkingBytes,
    /// The buffers of `bytes` that are never stepped, each with a copy of its own on a device. Those of one `id`, of whichever
    /// shards and tasks, are the same parameters: a copy is there for all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<ParamBufferCost>,
    /// The other buffers of `bytes`, each with a copy of its own on a device; one of all of them where nothing is said. Those of
    /// one `id` in shards of a task are the same parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(alias = "images")]
    pub buffers: Vec<ParamBufferCost>,
}

/// Bytes of a device that shard tasks take beside parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkingBytes {
    /// While its forward computes, its input and output included; also in evaluations.
    pub forward: u64,
    /// While its backward computes, its gradients included, but no sums of them.
    pub backward: u64,
    /// Of its input, which comes with its promotion unless the shard task before makes it there.
    pub input: u64,
    /// Of the gradients that a backward makes: they stay until they have been downloaded.
    pub gradients: u64,
    /// Of these, those that add up on the device over the first microbatch group of a minibatch: one sum is downloaded.
    pub sums: u64,
}

/// Parameters of a shard with a copy of their own on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamBufferCost {
    /// Its number.
    pub id: u64,
    /// Bytes, the same wherever it is named.
    pub bytes: u64,
}

/// One logical device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCost {
    /// Seconds of the stated compute that it does in a second; 1 where nothing is said.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub speed: f64,
    /// Bytes for copies of parameters. Without it a device has room for two shards of any size:
    /// the one that computes and the one that is prefetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes beside `memory_bytes` for what shard tasks take beside parameters. Either has what the other leaves: copies go for
    /// what computes, and what finds no room waits until something has been downloaded. Where nothing is said there is room for
    /// all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_bytes: Option<u64>,
    /// Bandwidth from the host to the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bytes_per_s: Option<f64>,
    /// Copies of parameters stay until their place is needed. Where nothing is said it is false, as in the engine: a copy
    /// goes when its shard task ends, and every shard task is promoted anew.
    #[serde(default)]
    pub keeps_copies: bool,
    /// The copy that goes when a device that keeps them needs its room.
    #[serde(default, skip_serializing_if = "is_default")]
    pub replacement: Replacement,
    /// Seconds from the moment at which it can commit to a shard task until that one's promotion begins:
    /// the time of decisions, and of threads that have to wake up. 0 where nothing is said.
    #[serde(default, skip_serializing_if = "is_default")]
    pub latency_s: f64,
    /// Threads on the workload's `processors`; 0, which it is where nothing is said, for a device that has its own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub threads: usize,
}

impl Default for DeviceCost {
    fn default() -> Self {
        Self {
            speed: 1.0,
            memory_bytes: None,
            working_bytes: None,
            link_bytes_per_s: None,
            keeps_copies: false,
            replacement: Replacement::default(),
            latency_s: 0.0,
            threads: 0,
        }
    }
}

/// The choice of the copy that goes when a device needs room for another one. One that computes never goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// The copy that is worth least by what is known of the future, as in the engine; see
    /// [`CopyUse`](crate::CopyUse).
    #[default]
    NextUse,
    /// The copy that was used longest ago: what is usual, to compare with.
    LeastRecent,
}

impl Replacement {
    /// Every choice.
    pub const ALL: [Self; 2] = [Self::NextUse, Self::LeastRecent];

    /// Its name in workloads and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NextUse => "next-use",
            Self::LeastRecent => "least-recent",
        }
    }
}

/// Random variation of the time of each shard task.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variation {
    /// Seed of the draws. A draw is a function of the seed, the task's index, the minibatch, the
    /// shard and the kind of shard task, and of nothing that a policy decides.
    pub seed: u64,
    /// A time is multiplied by a number drawn evenly from `1 - relative .. 1 + relative`.
    pub relative: f64,
}

impl Workload {
    /// Reads a workload and checks it.
    ///
    /// # Errors
    /// [`WorkloadError`] when the text is not JSON of this format, or says what cannot be.
    pub fn from_json(text: &str) -> Result<Self, WorkloadError> {
        let workload: Self = serde_json::from_str(text)?;
        workload.check()?;
        Ok(workload)
    }

    /// The workload as JSON, on several lines. Times that are no numbers become `null`.
    pub fn to_json(&self) -> String {
        // Writing into a string fails only for keys that are no strings, and there are none.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The same tasks on `count` equal devices: each like the first one, if there is one.
    pub fn on_devices(&self, count: usize) -> Self {
        let device = self.devices.first().cloned().unwrap_or_default();
        Self { devices: vec![device; count], ..self.clone() }
    }
}

/// More devices than this are taken for a slip of the keyboard.
const MOST_DEVICES: u64 = 1_000_000;

fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DeviceCost>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    if value.is_array() {
        return serde_json::from_value(value)
            .map_err(|error| D::Error::custom(format!("`devices`: {error}")));
    }
    match value.as_u64().filter(|count| *count <= MOST_DEVICES) {
        Some(count) => Ok(vec![DeviceCost::default(); count as usize]),
        None => Err(D::Error::custom(format!(
            "`devices` must be a list of devices or how many there are, up to {MOST_DEVICES}; found {value}"
        ))),
    }
}

const fn one() -> f64 {
    1.0
}

const fn one_replica() -> usize {
    1
}

fn is_one_replica(replicas: &usize) -> bool {
    *replicas == 1
}

const fn once() -> u64 {
    1
}

fn is_once(x: &u64) -> bool {
    *x == 1
}

fn is_one(x: &f64) -> bool {
    *x == 1.0
}

fn is_default<T: Default + PartialEq>(x: &T) -> bool {
    *x == T::default()
}
