//! Workloads as stated costs: the JSON format and its rules.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::WorkloadError;

mod check;
mod costs;

/// Tasks and devices, as stated or measured costs. `docs/scheduling.md` describes the format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// The models to train, in submission order.
    pub tasks: Vec<TaskCost>,
    /// The devices. In JSON a number stands for that many equal ones.
    #[serde(deserialize_with = "devices")]
    pub devices: Vec<DeviceCost>,
    /// Whether all devices share one link instead of having one each.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_link: bool,
    /// Bytes of host memory for master weights and for tasks within a minibatch or an evaluation. A task
    /// waits to start one until its memory is free. Unlimited by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<u64>,
    /// Processors that the threads of devices and of the host optimizer share. Devices wait until each of
    /// their threads has one; during an optimizer step they share them with its threads. By default nothing
    /// is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<usize>,
    /// Threads of the host optimizer on the `processors`; 0, the default, means that it has its own.
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
    /// The unique name.
    pub name: String,
    /// The number of minibatches to train, at least one.
    pub minibatches: u64,
    /// The shards, in the order of the forward pass.
    pub shards: Vec<ShardCost>,
    /// The number of microbatches per minibatch: training microbatch passes before the master weights are
    /// updated. At least one, the default.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub microbatches: u64,
    /// The epochs, if the last minibatch of each has fewer microbatches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// The number of microbatches of a minibatch that a promoted shard processes before the next shard. At
    /// least one, the default.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    #[serde(alias = "visit")]
    pub microbatch_group: u64,
    /// The same for evaluation microbatch passes at one point.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    #[serde(alias = "evaluation_visit")]
    pub evaluation_group: u64,
    /// The maximum number of microbatch groups of a minibatch, or of the evaluations at one point, in
    /// progress at the same time, each on its own device. At least one, the default.
    #[serde(default = "one_replica", skip_serializing_if = "is_one_replica")]
    #[serde(alias = "lanes")]
    pub replicas: usize,
    /// The first trained shard: backward passes end there, and earlier shards are frozen. They are never
    /// updated, and copies of them stay valid. 0 by default.
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_trained: usize,
    /// The submission time, in seconds from the start of the run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub arrival_s: f64,
    /// Seconds of the host optimizer per minibatch, divided evenly over the shards. There is one optimizer
    /// for all tasks, which updates one shard after another, in the order in which their backwards end.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optimizer_s: f64,
    /// Seconds from the end of a shard's backward, or of its step if `optimizer_s` is also stated, until its
    /// master weights are final, independent of other tasks. The waits of a recorded run are stated here:
    /// they include the queue of the host optimizer, which `optimizer_s` would count again.
    #[serde(default, skip_serializing_if = "is_default")]
    pub step_wait_s: f64,
    /// The policy's initial estimates as a multiple of the stated costs; 1 by default.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub estimate_factor: f64,
    /// The relative increase of the duration of the last minibatch over the first; the costs grow (or shrink,
    /// down to -1) linearly in between. Evaluations cost what the next minibatch does, and those at the end
    /// what the last one did.
    #[serde(default, skip_serializing_if = "is_default")]
    pub drift: f64,
    /// Bytes of host memory for its master weights, until it has ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub masters_bytes: u64,
    /// Further bytes of host memory while it is within a minibatch or a microbatch pass of an evaluation,
    /// until its master weights are final.
    #[serde(default, skip_serializing_if = "is_default")]
    pub active_bytes: u64,
    /// Evaluation microbatch passes between the minibatches, by ascending `after`, without duplicates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluations: Vec<EvaluationCost>,
}

/// The epochs of a task whose last minibatches are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epoch {
    /// The number of minibatches per epoch, at least one.
    pub minibatches: u64,
    /// The number of microbatches of the last of them: at least one, and at most that of the others.
    pub last_microbatches: u64,
}

/// Evaluation microbatch passes of a task: the forward of every shard, once per batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationCost {
    /// The number of minibatches trained before them; 0 is before training.
    pub after: u64,
    /// The number of microbatch passes.
    #[serde(alias = "sweeps")]
    pub microbatch_passes: u64,
}

/// The costs of one shard on a device of speed 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardCost {
    /// Seconds of its forward. That of a model's last shard is not part of training, because its `backward_s`
    /// is that of the fused forward and backward; it counts in evaluations if `evaluate_s` is not given, and
    /// determines the share of the fused task that a pipeline computes in its forwards.
    pub forward_s: f64,
    /// Seconds of its backward, including the recomputed forward.
    pub backward_s: f64,
    /// Seconds of its forward in an evaluation; `forward_s` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluate_s: Option<f64>,
    /// Seconds of a promotion of its parameters, on any link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promote_s: Option<f64>,
    /// Bytes of its parameters, which are compared with `memory_bytes`, and divided by `link_bytes_per_s` if
    /// `promote_s` is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Seconds of the download of a shard task's output to the host, after earlier downloads of its device.
    /// Until its end, only the device that computed it can continue with the model. 0 by default.
    #[serde(rename = "take_down_s", default, skip_serializing_if = "is_default")]
    pub download_s: f64,
    /// Seconds of the download of the gradients of a backward to the host, after its output. Until its end,
    /// the master weights are not updated. 0 by default.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gradients_s: f64,
    /// Device memory of its shard tasks besides parameters. It counts in
    /// [`Simulation::peak_bytes`](crate::Simulation::peak_bytes), and shard tasks wait for it if the device
    /// limits it ([`DeviceCost::working_bytes`]).
    #[serde(default, skip_serializing_if = "is_default")]
    pub working: WorkingBytes,
    /// The frozen buffers in `bytes`, each cached separately on a device. Those with the same `id`, of any
    /// shards and tasks, are the same parameters and share one copy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<ParamBufferCost>,
    /// The other buffers in `bytes`, each cached separately on a device; by default one for all of them.
    /// Those with the same `id` in shards of a task are the same parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(alias = "images")]
    pub buffers: Vec<ParamBufferCost>,
}

/// Device memory of shard tasks besides parameters, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkingBytes {
    /// While its forward computes, including its input and output; also in evaluations.
    pub forward: u64,
    /// While its backward computes, including its gradients but not accumulated ones.
    pub backward: u64,
    /// Of its input, which is uploaded with its promotion unless the previous shard task computes it there.
    pub input: u64,
    /// Of the gradients of a backward, which stay until they have been downloaded.
    pub gradients: u64,
    /// The part of `gradients` that is accumulated on the device over the first microbatch group of a
    /// minibatch and downloaded once.
    #[serde(alias = "sums")]
    pub accumulation: u64,
}

/// Parameters of a shard that are cached separately on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamBufferCost {
    /// The id.
    pub id: u64,
    /// The bytes, the same for every use of the id.
    pub bytes: u64,
}

/// One logical device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCost {
    /// Seconds of the stated compute per second; 1 by default.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub speed: f64,
    /// Bytes for copies of parameters. Without it a device has memory for two shards of any size: the running
    /// one and the prefetched one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Further bytes for the working memory of shard tasks. Each may use what the other leaves free: copies
    /// are evicted for computations, and a shard task that does not fit waits until something has been
    /// downloaded. Unlimited by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_bytes: Option<u64>,
    /// Bandwidth from the host to the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bytes_per_s: Option<f64>,
    /// Whether copies of parameters are cached until their memory is needed. Without a cache, as by default
    /// in the engine, a copy is dropped when its shard task ends, and every shard task promotes its
    /// parameters.
    #[serde(default)]
    pub keeps_copies: bool,
    /// The cache replacement.
    #[serde(default, skip_serializing_if = "is_default")]
    pub replacement: Replacement,
    /// Seconds from the moment at which it can commit to a shard task until the promotion starts: the time of
    /// decisions and thread wake-ups. 0 by default.
    #[serde(default, skip_serializing_if = "is_default")]
    pub latency_s: f64,
    /// Threads on the workload's `processors`; 0, the default, means that the device has its own.
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

/// The cache replacement of a device. Copies that are in use are never evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// Evicts the copy that is worth least by what is known of the future, as in the engine; see
    /// [`CopyUse`](crate::CopyUse).
    #[default]
    NextUse,
    /// Evicts the least recently used copy, for comparison.
    LeastRecent,
}

impl Replacement {
    /// All replacements.
    pub const ALL: [Self; 2] = [Self::NextUse, Self::LeastRecent];

    /// The name in workloads and on the command line.
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
    /// The seed of the draws. A draw is a function of the seed, the task's index, the minibatch, the
    /// shard and the kind of shard task, and independent of the policy's decisions.
    pub seed: u64,
    /// A time is multiplied by a number drawn uniformly from `1 - relative .. 1 + relative`.
    pub relative: f64,
}

impl Workload {
    /// Parses and checks a workload.
    ///
    /// # Errors
    /// [`WorkloadError`] if the text is not JSON of this format, or violates a rule.
    pub fn from_json(text: &str) -> Result<Self, WorkloadError> {
        let workload: Self = serde_json::from_str(text)?;
        workload.check()?;
        Ok(workload)
    }

    /// Returns the workload as multi-line JSON. Times that are not numbers become `null`.
    pub fn to_json(&self) -> String {
        // Writing into a string fails only for keys that are not strings, and there are none.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Returns the same tasks on `count` equal devices: each like the first one, if there is one.
    pub fn on_devices(&self, count: usize) -> Self {
        let device = self.devices.first().cloned().unwrap_or_default();
        Self { devices: vec![device; count], ..self.clone() }
    }
}

/// More devices than this are assumed to be a mistake.
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
            "`devices` must be a list of devices or their number, up to {MOST_DEVICES}; found {value}"
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
