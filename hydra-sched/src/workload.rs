//! What is scheduled, as stated costs: the JSON format and its rules.

use std::collections::BTreeSet;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::random::{keyed, unit};
use crate::{CostModel, ShardTaskKind, WorkloadError};

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
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared_link: bool,
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
    /// How many minibatches it trains: training sweeps over its shards. At least one.
    pub minibatches: u64,
    /// Its shards, in the order of the forward pass.
    pub shards: Vec<ShardCost>,
    /// When it is submitted, in seconds from the start of the run.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub arrival_s: f64,
    /// Seconds of the host optimizer for one minibatch, spread evenly over the shards. There is one optimizer for
    /// all tasks, and it steps one shard after another, in the order in which their backwards end.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub optimizer_s: f64,
    /// Seconds from the end of a shard's backward, or of its step where `optimizer_s` is stated too, until its
    /// masters are final, whatever other tasks do. What a recorded run waited is stated here: it has the queue before
    /// the host optimizer in it, which `optimizer_s` would count again.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub step_wait_s: f64,
    /// What the policy is told at first, as a multiple of the stated costs; 1 where nothing is said.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub estimate_factor: f64,
    /// How much longer the last minibatch takes than the first, as a share of it; the costs grow
    /// (or shrink, down to -1) evenly in between. Evaluations cost what the minibatch after them does, and
    /// those at the end what the last one did.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub drift: f64,
    /// Evaluation sweeps between the minibatches, in the order of `after`, each place once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluations: Vec<EvaluationCost>,
}

/// Evaluation sweeps of a task: the forward of every shard, as often as there are batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationCost {
    /// Minibatches trained before them; 0 is before training.
    pub after: u64,
    /// How many.
    pub sweeps: u64,
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
    /// Seconds of bringing its parameters to a device, whichever the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promote_s: Option<f64>,
    /// Bytes of its parameters: what `memory_bytes` is compared with, and instead of `promote_s`
    /// divided by `link_bytes_per_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Seconds from the end of a shard task until what it made for the next one of its sweep is on the
    /// host. Before that, only the device that made it can go on with the model. 0 where nothing is said.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub take_down_s: f64,
}

/// One logical device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCost {
    /// How many seconds of the stated compute it does in a second; 1 where nothing is said.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub speed: f64,
    /// Bytes for copies of parameters. Without it a device has room for two shards of any size:
    /// the one that computes and the one that is prefetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bandwidth from the host to the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bytes_per_s: Option<f64>,
    /// Copies of parameters stay until their place is needed. Where it is false, as in the engine, one goes
    /// when its shard task ends, and every shard task is promoted anew. True where nothing is said.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub keeps_copies: bool,
    /// Seconds from the moment at which it can commit to a shard task until that one's promotion begins:
    /// the time of decisions, and of threads that have to wake up. 0 where nothing is said.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub latency_s: f64,
}

impl Default for DeviceCost {
    fn default() -> Self {
        Self { speed: 1.0, memory_bytes: None, link_bytes_per_s: None, keeps_copies: true, latency_s: 0.0 }
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
    ///
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

    /// Checks everything that the functions of this crate rely on.
    ///
    /// # Errors
    ///
    /// [`WorkloadError`] with what is wrong first.
    pub fn check(&self) -> Result<(), WorkloadError> {
        if self.tasks.is_empty() {
            return Err(WorkloadError::NoTasks);
        }
        if self.devices.is_empty() {
            return Err(WorkloadError::NoDevices);
        }
        let mut names = BTreeSet::new();
        for task in &self.tasks {
            if !names.insert(task.name.as_str()) {
                return Err(WorkloadError::DuplicateName { name: task.name.clone() });
            }
            check_task(task)?;
        }
        let found = self.shard_tasks();
        if found > MOST_SHARD_TASKS {
            return Err(WorkloadError::TooManyShardTasks { found, most: MOST_SHARD_TASKS });
        }
        if let Some(variation) = self.variation {
            let allowed = (0.0..1.0).contains(&variation.relative);
            require(allowed, "variation", "relative", variation.relative, "at least 0 and less than 1")?;
        }
        // Of equal devices in a row, the first speaks for all.
        let differs =
            |(index, device): &(usize, &DeviceCost)| *index == 0 || self.devices[*index - 1] != **device;
        let mut devices = self.devices.iter().enumerate().filter(differs);
        devices.try_for_each(|(index, device)| self.check_device(index, device))?;
        let total_s = self.at_most_s();
        require(total_s.is_finite(), "all shard tasks", "the time", total_s, "a finite number of seconds")
    }

    /// More seconds than any schedule can take, infinite where they exceed what a number can hold.
    pub(crate) fn at_most_s(&self) -> f64 {
        let slowest = self.devices.iter().map(|device| device.speed).fold(f64::INFINITY, f64::min);
        let links = self.devices.iter().filter_map(|device| device.link_bytes_per_s);
        let link = links.fold(f64::INFINITY, f64::min);
        let promote_s =
            |s: &ShardCost| s.promote_s.unwrap_or(s.bytes.map_or(0.0, |bytes| bytes as f64 / link));
        let latency_s = self.devices.iter().map(|device| device.latency_s).fold(0.0, f64::max);
        let of = |task: &TaskCost| {
            let sweeps = 2.0 * (task.minibatches as f64 + task.evaluation_sweeps() as f64);
            let compute_s = (task.sweep_s() + task.evaluation_s()) * (1.0 + task.drift.max(0.0)) / slowest;
            let moved_s = |s: &ShardCost| latency_s + promote_s(s) + s.take_down_s;
            let promotions_s: f64 = task.shards.iter().map(moved_s).sum();
            let steps_s = task.optimizer_s + task.shards.len() as f64 * task.step_wait_s;
            task.arrival_s + sweeps * (compute_s + promotions_s + steps_s)
        };
        self.tasks.iter().map(of).sum()
    }

    fn check_device(&self, index: usize, device: &DeviceCost) -> Result<(), WorkloadError> {
        let of = format!("device {index}");
        let positive = |x: f64| x.is_finite() && x > 0.0;
        require(positive(device.speed), &of, "speed", device.speed, "finite and more than 0")?;
        let latency = device.latency_s.is_finite() && device.latency_s >= 0.0;
        require(latency, &of, "latency_s", device.latency_s, "finite and not negative")?;
        if let Some(link) = device.link_bytes_per_s {
            require(positive(link), &of, "link_bytes_per_s", link, "finite and more than 0")?;
        }
        for (task, shard, cost) in self.all_shards() {
            if cost.promote_s.is_none() && cost.bytes.is_some() && device.link_bytes_per_s.is_none() {
                return Err(WorkloadError::NoLink { task: task.name.clone(), shard, device: index });
            }
        }
        self.check_memory(index, device)
    }

    /// Two shards must fit beside each other: what is prefetched may be any model's largest.
    fn check_memory(&self, index: usize, device: &DeviceCost) -> Result<(), WorkloadError> {
        let Some(memory) = device.memory_bytes else { return Ok(()) };
        for (task, shard, cost) in self.all_shards() {
            let Some(bytes) = cost.bytes else {
                return Err(WorkloadError::NoBytes { task: task.name.clone(), shard, device: index });
            };
            let needed = bytes.saturating_mul(2);
            if needed > memory {
                return Err(WorkloadError::Memory {
                    task: task.name.clone(),
                    shard,
                    device: index,
                    needed,
                    memory,
                });
            }
        }
        Ok(())
    }

    fn all_shards(&self) -> impl Iterator<Item = (&TaskCost, usize, &ShardCost)> {
        let of = |task| move |(index, shard)| (task, index, shard);
        self.tasks.iter().flat_map(move |task| task.shards.iter().enumerate().map(of(task)))
    }

    /// How many shard tasks the workload has.
    pub fn shard_tasks(&self) -> u64 {
        self.tasks.iter().map(TaskCost::shard_tasks).fold(0, u64::saturating_add)
    }

    /// Seconds of compute of all shard tasks on a device of speed 1, as they turn out.
    pub fn total_s(&self) -> f64 {
        (0..self.tasks.len()).map(|task| self.task_s(task)).sum()
    }

    /// Seconds of compute of one task on a device of speed 1, as they turn out.
    ///
    /// # Panics
    ///
    /// When the workload has no such task, as indexing does.
    pub fn task_s(&self, task: usize) -> f64 {
        let cost = &self.tasks[task];
        if self.variation.is_none() && cost.drift == 0.0 {
            return cost.sweep_s() * cost.minibatches as f64
                + cost.evaluation_s() * cost.evaluation_sweeps() as f64;
        }
        let evaluation = |after| {
            let shards = 0..cost.shards.len();
            shards.map(|shard| self.seconds(task, after, ShardTaskKind::Evaluate, shard)).sum::<f64>()
        };
        let evaluations: f64 =
            cost.evaluations.iter().map(|of| of.sweeps as f64 * evaluation(of.after)).sum();
        let minibatch = |m| cost.sweep().map(|(kind, shard)| self.seconds(task, m, kind, shard)).sum::<f64>();
        evaluations + (0..cost.minibatches).map(minibatch).sum::<f64>()
    }

    /// Seconds that a shard task turns out to take on a device of speed 1: its stated cost with
    /// drift and variation.
    ///
    /// # Panics
    ///
    /// When the workload has no such task or the task no such shard, as indexing does.
    pub fn seconds(&self, task: usize, minibatch: u64, kind: ShardTaskKind, shard: usize) -> f64 {
        let cost = &self.tasks[task];
        let stated = cost.shards[shard].seconds(kind);
        let drifted = if cost.drift == 0.0 { stated } else { stated * cost.drift_at(minibatch) };
        let Some(Variation { seed, relative }) = self.variation else { return drifted };
        let draw = keyed(seed, &[task as u64, minibatch, shard as u64, kind as u64]);
        drifted * (1.0 + relative * (2.0 * unit(draw) - 1.0))
    }

    /// Seconds of bringing a shard's parameters to a device.
    ///
    /// # Panics
    ///
    /// When the workload has no such device or task, or the task no such shard, as indexing does.
    pub fn promote_s(&self, device: usize, task: usize, shard: usize) -> f64 {
        let cost = &self.tasks[task].shards[shard];
        match (cost.promote_s, cost.bytes, self.devices[device].link_bytes_per_s) {
            (Some(seconds), ..) => seconds,
            (None, Some(bytes), Some(link)) => bytes as f64 / link,
            _ => 0.0,
        }
    }
}

impl TaskCost {
    /// A task of this name, with nothing said but its shards.
    pub fn new(name: impl Into<String>, minibatches: u64, shards: Vec<ShardCost>) -> Self {
        let name = name.into();
        Self {
            name,
            minibatches,
            shards,
            arrival_s: 0.0,
            optimizer_s: 0.0,
            step_wait_s: 0.0,
            estimate_factor: 1.0,
            drift: 0.0,
            evaluations: Vec::new(),
        }
    }

    /// How many shard tasks it has.
    pub fn shard_tasks(&self) -> u64 {
        let shards = self.shards.len() as u64;
        let training = self.minibatches.saturating_mul((2 * shards).saturating_sub(1));
        training.saturating_add(self.evaluation_sweeps().saturating_mul(shards))
    }

    /// How many evaluation sweeps it has.
    pub fn evaluation_sweeps(&self) -> u64 {
        self.evaluations.iter().map(|of| of.sweeps).fold(0, u64::saturating_add)
    }

    /// Stated seconds of compute of an evaluation sweep.
    pub fn evaluation_s(&self) -> f64 {
        self.shards.iter().map(|shard| shard.seconds(ShardTaskKind::Evaluate)).sum()
    }

    /// The shard tasks of a minibatch, in their order; none where there is no shard.
    pub fn sweep(&self) -> impl Iterator<Item = (ShardTaskKind, usize)> + use<> {
        let shards = self.shards.len();
        let start = (shards > 0).then(|| ShardTaskKind::training_start(shards));
        std::iter::successors(start, move |&(kind, shard)| kind.following(shard, shards))
    }

    /// Stated seconds of compute of a minibatch.
    pub fn sweep_s(&self) -> f64 {
        self.sweep().map(|(kind, shard)| self.shards[shard].seconds(kind)).sum()
    }

    /// Seconds that the host optimizer takes for one shard of one minibatch.
    pub(crate) fn step_s(&self) -> f64 {
        self.optimizer_s / self.shards.len() as f64
    }

    /// Seconds from the end of a shard's backward until its masters are final, where no other task is before it.
    pub(crate) fn least_step_s(&self) -> f64 {
        self.step_s() + self.step_wait_s
    }

    /// The policy's first estimates.
    pub(crate) fn estimates(&self) -> Result<CostModel, WorkloadError> {
        let of = |kind| self.shards.iter().map(|s| s.seconds(kind) * self.estimate_factor).collect();
        let (forward, backward) = (of(ShardTaskKind::Forward), of(ShardTaskKind::Backward));
        CostModel::new(forward, backward, of(ShardTaskKind::Evaluate))
            .map_err(|source| WorkloadError::Costs { task: self.name.clone(), source })
    }

    /// The factor of drift after so many minibatches. Evaluations after the last one cost what it did, and
    /// the only minibatch of a task is its first.
    fn drift_at(&self, minibatch: u64) -> f64 {
        let last = self.minibatches.saturating_sub(1);
        let share = if last == 0 { 0.0 } else { minibatch.min(last) as f64 / last as f64 };
        1.0 + self.drift * share
    }
}

impl ShardCost {
    /// A shard of these seconds, the parameters of which take `promote_s` to a device.
    pub fn new(forward_s: f64, backward_s: f64, promote_s: f64) -> Self {
        Self { forward_s, backward_s, promote_s: Some(promote_s), ..Self::default() }
    }

    /// Stated seconds of a shard task.
    pub fn seconds(&self, kind: ShardTaskKind) -> f64 {
        match kind {
            ShardTaskKind::Forward => self.forward_s,
            ShardTaskKind::Evaluate => self.evaluate_s.unwrap_or(self.forward_s),
            ShardTaskKind::Backward => self.backward_s,
        }
    }
}

fn check_task(task: &TaskCost) -> Result<(), WorkloadError> {
    let of = format!("task `{}`", task.name);
    let time = |x: f64| x.is_finite() && x >= 0.0;
    const TIME: &str = "finite and not negative";
    if task.minibatches == 0 {
        return Err(WorkloadError::NoMinibatches { task: task.name.clone() });
    }
    require(time(task.arrival_s), &of, "arrival_s", task.arrival_s, TIME)?;
    require(time(task.optimizer_s), &of, "optimizer_s", task.optimizer_s, TIME)?;
    require(time(task.step_wait_s), &of, "step_wait_s", task.step_wait_s, TIME)?;
    let factor = (0.0..=MOST_ESTIMATE_FACTOR).contains(&task.estimate_factor);
    require(factor, &of, "estimate_factor", task.estimate_factor, "at least 0 and at most a million")?;
    let drift = task.drift.is_finite() && task.drift >= -1.0;
    require(drift, &of, "drift", task.drift, "finite and at least -1")?;
    let mut before = None;
    for &EvaluationCost { after, .. } in &task.evaluations {
        let rising = before.is_none_or(|before| before < after) && after <= task.minibatches;
        const EXPECTED: &str = "more than in the entry before and at most `minibatches`";
        require(rising, &of, "evaluations.after", after as f64, EXPECTED)?;
        before = Some(after);
    }
    for (index, shard) in task.shards.iter().enumerate() {
        let of = format!("shard {index} of task `{}`", task.name);
        require(time(shard.forward_s), &of, "forward_s", shard.forward_s, TIME)?;
        require(time(shard.backward_s), &of, "backward_s", shard.backward_s, TIME)?;
        let evaluate_s = shard.evaluate_s.unwrap_or(0.0);
        require(time(evaluate_s), &of, "evaluate_s", evaluate_s, TIME)?;
        require(time(shard.take_down_s), &of, "take_down_s", shard.take_down_s, TIME)?;
        let promote_s = shard.promote_s.unwrap_or(0.0);
        require(time(promote_s), &of, "promote_s", promote_s, TIME)?;
    }
    task.estimates().map(drop)
}

/// The error that says which rule does not hold.
fn require(
    holds: bool,
    of: &str,
    field: &'static str,
    found: f64,
    expected: &'static str,
) -> Result<(), WorkloadError> {
    if holds { Ok(()) } else { Err(WorkloadError::Value { of: of.to_owned(), field, found, expected }) }
}

/// More shard tasks than this, which take hours to simulate, are taken for a slip of the keyboard.
const MOST_SHARD_TASKS: u64 = 10_000_000_000;

/// Estimates that are wrong by more than this are taken for a slip of the keyboard.
const MOST_ESTIMATE_FACTOR: f64 = 1e6;

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

const fn yes() -> bool {
    true
}

fn is_one(x: &f64) -> bool {
    *x == 1.0
}

fn is_zero(x: &f64) -> bool {
    *x == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(x: &bool) -> bool {
    !x
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = r#"{
        "tasks": [
            {"name": "a", "minibatches": 3, "arrival_s": 2.5, "optimizer_s": 0.5, "step_wait_s": 0.1, "estimate_factor": 2.0, "drift": 1.0,
             "shards": [{"forward_s": 1.0, "backward_s": 2.0, "bytes": 100},
                        {"forward_s": 1.5, "backward_s": 4.0, "bytes": 50, "promote_s": 0.25}]},
            {"name": "b", "minibatches": 1, "shards": [{"forward_s": 0, "backward_s": 8, "bytes": 10}]}
        ],
        "devices": [{"speed": 2.0, "memory_bytes": 200, "link_bytes_per_s": 50.0}, {"link_bytes_per_s": 100}],
        "shared_link": true,
        "variation": {"seed": 7, "relative": 0.1}
    }"#;

    fn with(change: impl FnOnce(&mut Workload)) -> WorkloadError {
        let mut workload = Workload::from_json(FULL).unwrap();
        change(&mut workload);
        workload.check().unwrap_err()
    }

    #[test]
    fn reads_everything_and_writes_it_again() {
        let workload = Workload::from_json(FULL).unwrap();
        assert_eq!(Workload::from_json(&workload.to_json()).unwrap(), workload);
        assert_eq!(workload.shard_tasks(), 3 * 3 + 1);
        assert_eq!(workload.promote_s(0, 0, 0), 2.0);
        assert_eq!(workload.promote_s(1, 0, 0), 1.0);
        assert_eq!(workload.promote_s(1, 0, 1), 0.25, "stated seconds come before bytes");
        assert_eq!(workload.tasks[0].sweep_s(), 1.0 + 4.0 + 2.0);
        assert_eq!(workload.tasks[1].sweep_s(), 8.0);
    }

    #[test]
    fn a_number_of_devices_is_that_many_equal_ones() {
        let text = r#"{"tasks": [{"name": "a", "minibatches": 1, "shards": [{"forward_s": 1, "backward_s": 1}]}], "devices": 3}"#;
        assert_eq!(Workload::from_json(text).unwrap().devices, vec![DeviceCost::default(); 3]);
    }

    /// A task that is being put together can be asked for its sums; `check` refuses it later.
    #[test]
    fn a_task_without_shards_has_no_work() {
        let task = TaskCost::new("a", 3, Vec::new());
        assert_eq!((task.sweep().count(), task.sweep_s(), task.shard_tasks()), (0, 0.0, 0));
        let workload =
            Workload { tasks: vec![task], devices: Vec::new(), shared_link: false, variation: None };
        assert_eq!(workload.total_s(), 0.0);
    }

    #[test]
    fn drift_and_variation_change_the_times_within_their_limits() {
        let workload = Workload::from_json(FULL).unwrap();
        let steady = Workload { variation: None, ..workload.clone() };
        let last =
            |workload: &Workload, minibatch| workload.seconds(0, minibatch, ShardTaskKind::Backward, 1);
        assert_eq!([last(&steady, 0), last(&steady, 1), last(&steady, 2)], [4.0, 6.0, 8.0]);
        let ratios: Vec<f64> = (0..3).map(|m| last(&workload, m) / last(&steady, m)).collect();
        assert!(ratios.iter().all(|ratio| (0.9..1.1).contains(ratio)), "{ratios:?}");
        assert!(ratios[0] != ratios[1] && ratios[1] != ratios[2]);
        assert_eq!(last(&workload, 1), last(&workload, 1));
        let walked: f64 = (0..3)
            .map(|m| {
                steady.tasks[0].sweep().map(|(kind, shard)| steady.seconds(0, m, kind, shard)).sum::<f64>()
            })
            .sum();
        assert_eq!(steady.task_s(0), walked);
    }

    /// Evaluations at the end stand at a place that no minibatch has.
    #[test]
    fn drift_ends_with_the_last_minibatch() {
        let task = |minibatches, drift| {
            let text = format!(
                r#"{{"tasks": [{{"name": "a", "minibatches": {minibatches}, "drift": {drift},
                    "evaluations": [{{"after": {minibatches}, "sweeps": 1}}],
                    "shards": [{{"forward_s": 1, "backward_s": 1, "promote_s": 0}}]}}], "devices": 1}}"#
            );
            Workload::from_json(&text).unwrap()
        };
        let times = |workload: &Workload| {
            let minibatches = workload.tasks[0].minibatches;
            let training = (0..minibatches).map(|m| workload.seconds(0, m, ShardTaskKind::Backward, 0));
            let evaluation = workload.seconds(0, minibatches, ShardTaskKind::Evaluate, 0);
            training.chain([evaluation]).collect::<Vec<f64>>()
        };
        for (minibatches, drift, expected) in [
            (2, -1.0, vec![1.0, 0.0, 0.0]),
            (2, 1.0, vec![1.0, 2.0, 2.0]),
            (3, 1.0, vec![1.0, 1.5, 2.0, 2.0]),
            (1, 1.0, vec![1.0, 1.0]),
        ] {
            let workload = task(minibatches, drift);
            assert_eq!(times(&workload), expected, "{minibatches} minibatches, drift {drift}");
            assert_eq!(workload.task_s(0), expected.iter().sum::<f64>());
            let run =
                crate::simulate(&workload, &mut crate::ShardedLrtf, crate::SimulationOptions::default());
            assert_eq!(run.unwrap().makespan_s, workload.task_s(0));
        }
    }

    #[test]
    fn what_is_no_such_json_is_told_where() {
        for (text, says) in [
            ("", "not a workload"),
            ("tasks: []", "line 1"),
            (r#"{"tasks": [], "device": 1}"#, "device"),
            (r#"{"tasks": []}"#, "devices"),
            (r#"{"tasks": [], "devices": -1}"#, "found -1"),
            (r#"{"tasks": [], "devices": 1.5}"#, "found 1.5"),
            (r#"{"tasks": [], "devices": 99999999999}"#, "found 99999999999"),
            (r#"{"tasks": [], "devices": "two"}"#, "found \"two\""),
            (r#"{"tasks": [], "devices": [{"sped": 1}]}"#, "sped"),
            (r#"{"tasks": [{"name": "a", "minibatches": -1, "shards": []}], "devices": 1}"#, "-1"),
            (
                r#"{"tasks": [{"name": "a", "minibatches": 1, "shards": [{"forward_s": 1e999}]}], "devices": 1}"#,
                "range",
            ),
        ] {
            let error = Workload::from_json(text).unwrap_err();
            assert!(matches!(error, WorkloadError::Json(_)), "{text}: {error:?}");
            let message = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(format!("{error}: {message}").contains(says), "{text}: {error}: {message}");
        }
    }

    #[test]
    fn every_rule_names_what_breaks_it() {
        let cases = [
            (with(|w| w.tasks.clear()), "no task"),
            (with(|w| w.devices.clear()), "no device"),
            (with(|w| w.tasks[1].name = "a".into()), "`a`"),
            (with(|w| w.tasks[1].minibatches = 0), "`b`"),
            (with(|w| w.tasks[1].shards.clear()), "`b`"),
            (with(|w| w.tasks[1].minibatches = u64::MAX), "shard tasks"),
            (with(|w| w.tasks[0].shards[1].backward_s = -2.0), "backward_s of shard 1 of task `a` is -2"),
            (with(|w| w.tasks[0].shards[1].forward_s = f64::NAN), "forward_s of shard 1 of task `a` is NaN"),
            (with(|w| w.tasks[0].shards[0].promote_s = Some(f64::INFINITY)), "promote_s of shard 0"),
            (with(|w| w.tasks[0].arrival_s = -1.0), "arrival_s of task `a` is -1"),
            (with(|w| w.tasks[0].optimizer_s = f64::NAN), "optimizer_s of task `a`"),
            (with(|w| w.tasks[0].step_wait_s = -1.0), "step_wait_s of task `a` is -1"),
            (with(|w| w.tasks[0].estimate_factor = -0.5), "estimate_factor of task `a` is -0.5"),
            (with(|w| w.tasks[0].estimate_factor = f64::NAN), "estimate_factor of task `a` is NaN"),
            (with(|w| w.tasks[0].estimate_factor = 1e307), "at most a million"),
            (with(|w| w.tasks[0].drift = -1.5), "drift of task `a` is -1.5"),
            (with(|w| w.devices[1].speed = 0.0), "speed of device 1 is 0"),
            (with(|w| w.devices[1].speed = 1e-308), "the time of all shard tasks is inf"),
            (with(|w| w.tasks[0].shards[0].backward_s = 8e307), "the time of all shard tasks is inf"),
            (with(|w| w.devices[0].link_bytes_per_s = Some(f64::NAN)), "link_bytes_per_s of device 0"),
            (with(|w| w.devices[1].link_bytes_per_s = None), "device 1 has no `link_bytes_per_s`"),
            (with(|w| w.devices[0].memory_bytes = Some(199)), "200"),
            (with(|w| w.tasks[0].shards[1].bytes = None), "`bytes`"),
            (
                with(|w| w.variation = Some(Variation { seed: 0, relative: 1.0 })),
                "relative of variation is 1",
            ),
        ];
        for (error, says) in cases {
            assert!(error.to_string().contains(says), "{error} does not say {says}");
        }
    }
}
