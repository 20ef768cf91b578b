//! The rules of workloads.

use std::collections::{BTreeMap, BTreeSet};

use crate::simulator::{
    DeviceCost, Epoch, EvaluationCost, ParamBufferCost, ShardCost, TaskCost, WorkingBytes, Workload,
    WorkloadError,
};

impl Workload {
    /// Checks all conditions that the functions of this crate rely on.
    ///
    /// # Errors
    /// [`WorkloadError`] with the first violation.
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
        self.check_buffers()?;
        self.check_host()?;
        let found = self.shard_tasks();
        if found > MOST_SHARD_TASKS {
            return Err(WorkloadError::TooManyShardTasks { found, most: MOST_SHARD_TASKS });
        }
        if let Some(variation) = self.variation {
            let allowed = (0.0..1.0).contains(&variation.relative);
            require(allowed, "variation", "relative", variation.relative, "at least 0 and less than 1")?;
        }
        // Of consecutive equal devices, only the first is checked.
        let differs =
            |(index, device): &(usize, &DeviceCost)| *index == 0 || self.devices[*index - 1] != **device;
        let mut devices = self.devices.iter().enumerate().filter(differs);
        devices.try_for_each(|(index, device)| self.check_device(index, device))?;
        let total_s = self.at_most_s();
        require(total_s.is_finite(), "all shard tasks", "the time", total_s, "a finite number of seconds")
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

    /// Checks that the host has memory for all master weights and any one task within a minibatch, and
    /// processors if they are shared.
    fn check_host(&self) -> Result<(), WorkloadError> {
        let masters = self.tasks.iter().map(|task| task.masters_bytes).fold(0, u64::saturating_add);
        let largest = self.tasks.iter().map(|task| task.active_bytes).max().unwrap_or(0);
        let (needed, found) = (masters.saturating_add(largest), self.host_bytes.unwrap_or(u64::MAX));
        const HEADROOM: &str = "at least all `masters_bytes` and the largest `active_bytes`";
        require(needed <= found, "the host", "host_bytes", found as f64, HEADROOM)?;
        let processors = self.processors.unwrap_or(1);
        require(processors > 0, "the host", "processors", processors as f64, "at least 1")?;
        let threads = self.devices.iter().map(|device| device.threads).chain([self.optimizer_threads]);
        let threads = threads.max().unwrap_or(0);
        require(threads <= MOST_THREADS, "the host", "threads", threads as f64, "at most a million")
    }

    /// Checks that buffers fit in their shard, and have the same size wherever their id is used.
    fn check_buffers(&self) -> Result<(), WorkloadError> {
        let mut sizes = BTreeMap::new();
        for (task, shard, cost) in self.all_shards() {
            let of = || format!("shard {shard} of task `{}`", task.name);
            let sum = |buffers: &[ParamBufferCost]| {
                buffers.iter().map(|buffer| buffer.bytes).fold(0, u64::saturating_add)
            };
            let (frozen, others) = (sum(&cost.frozen), sum(&cost.buffers));
            let fits = cost.bytes.map_or(frozen == 0, |bytes| frozen <= bytes);
            require(fits, &of(), "the sum of `frozen`", frozen as f64, "at most its `bytes`")?;
            let all = cost.buffers.is_empty() || cost.bytes == Some(frozen.saturating_add(others));
            require(all, &of(), "the sum of `buffers`", others as f64, "its `bytes` without `frozen`")?;
            let own = cost.buffers.iter().map(|buffer| ("buffers.bytes", Some(&task.name), buffer));
            for (field, of_task, buffer) in
                cost.frozen.iter().map(|buffer| ("frozen.bytes", None, buffer)).chain(own)
            {
                let same = *sizes.entry((of_task, buffer.id)).or_insert(buffer.bytes) == buffer.bytes;
                const EXPECTED: &str = "the same as for earlier uses of its `id`";
                require(same, &of(), field, buffer.bytes as f64, EXPECTED)?;
            }
        }
        let unknown = |device: &DeviceCost| device.keeps_copies && device.memory_bytes.is_none();
        match self.devices.iter().position(unknown).filter(|_| !sizes.is_empty()) {
            Some(device) => Err(WorkloadError::NoMemory { device }),
            None => Ok(()),
        }
    }

    /// Checks that two shards fit together: the prefetched one may be any model's largest.
    fn check_memory(&self, index: usize, device: &DeviceCost) -> Result<(), WorkloadError> {
        let Some(memory) = device.memory_bytes else { return Ok(()) };
        for (task, shard, cost) in self.all_shards() {
            let Some(bytes) = cost.bytes else {
                return Err(WorkloadError::NoBytes { task: task.name.clone(), shard, device: index });
            };
            let needed = bytes.saturating_mul(2);
            if needed > memory && device.working_bytes.is_none() {
                return Err(WorkloadError::Memory {
                    task: task.name.clone(),
                    shard,
                    device: index,
                    needed,
                    memory,
                });
            }
        }
        self.check_working(index, device)
    }

    /// Checks that any shard task fits on the device alone.
    fn check_working(&self, index: usize, device: &DeviceCost) -> Result<(), WorkloadError> {
        let (Some(memory), Some(working)) = (device.memory_bytes, device.working_bytes) else {
            return Ok(());
        };
        let all = u128::from(memory) + u128::from(working);
        for (task, shard, cost) in self.all_shards() {
            let needed = u128::from(cost.bytes.unwrap_or(0)) + u128::from(cost.working.most());
            let of =
                format!("shard {shard} of task `{}` with its `working` bytes, on device {index},", task.name);
            const EXPECTED: &str = "at most the device's `memory_bytes` and `working_bytes`";
            require(needed <= all, &of, "bytes", needed as f64, EXPECTED)?;
        }
        Ok(())
    }

    fn all_shards(&self) -> impl Iterator<Item = (&TaskCost, usize, &ShardCost)> {
        let of = |task| move |(index, shard)| (task, index, shard);
        self.tasks.iter().flat_map(move |task| task.shards.iter().enumerate().map(of(task)))
    }
}

fn check_task(task: &TaskCost) -> Result<(), WorkloadError> {
    let of = format!("task `{}`", task.name);
    let time = |x: f64| x.is_finite() && x >= 0.0;
    const TIME: &str = "finite and not negative";
    if task.minibatches == 0 {
        return Err(WorkloadError::NoMinibatches { task: task.name.clone() });
    }
    check_passes(task, &of)?;
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
        const EXPECTED: &str = "more than in the previous entry and at most `minibatches`";
        require(rising, &of, "evaluations.after", after as f64, EXPECTED)?;
        before = Some(after);
    }
    for (index, shard) in task.shards.iter().enumerate() {
        let of = format!("shard {index} of task `{}`", task.name);
        require(time(shard.forward_s), &of, "forward_s", shard.forward_s, TIME)?;
        require(time(shard.backward_s), &of, "backward_s", shard.backward_s, TIME)?;
        let evaluate_s = shard.evaluate_s.unwrap_or(0.0);
        require(time(evaluate_s), &of, "evaluate_s", evaluate_s, TIME)?;
        require(time(shard.download_s), &of, "take_down_s", shard.download_s, TIME)?;
        require(time(shard.gradients_s), &of, "gradients_s", shard.gradients_s, TIME)?;
        let WorkingBytes { gradients, accumulation, .. } = shard.working;
        let most = "at most `working.gradients`";
        require(accumulation <= gradients, &of, "working.accumulation", accumulation as f64, most)?;
        let promote_s = shard.promote_s.unwrap_or(0.0);
        require(time(promote_s), &of, "promote_s", promote_s, TIME)?;
    }
    task.estimates().map(drop)
}

/// Checks the numbers of microbatches, and the first trained shard.
fn check_passes(task: &TaskCost, of: &str) -> Result<(), WorkloadError> {
    const ONCE: &str = "at least 1";
    require(task.microbatches > 0, of, "microbatches", task.microbatches as f64, ONCE)?;
    require(task.microbatch_group > 0, of, "microbatch_group", task.microbatch_group as f64, ONCE)?;
    require(task.evaluation_group > 0, of, "evaluation_group", task.evaluation_group as f64, ONCE)?;
    let replicas = (1..=MOST_REPLICAS).contains(&task.replicas);
    require(replicas, of, "replicas", task.replicas as f64, "at least 1 and at most a million")?;
    if let Some(Epoch { minibatches, last_microbatches: last }) = task.epoch {
        require(minibatches > 0, of, "epoch.minibatches", minibatches as f64, ONCE)?;
        let fewer = (1..=task.microbatches).contains(&last);
        require(fewer, of, "epoch.last_microbatches", last as f64, "at least 1 and at most `microbatches`")?;
    }
    let trains = task.first_trained == 0 || task.first_trained < task.shards.len();
    let found = task.first_trained as f64;
    require(
        trains,
        of,
        "first_trained",
        found,
        "less than the number of shards, because the last one is trained",
    )
}

/// Returns an error unless the rule holds.
fn require(
    holds: bool,
    of: &str,
    field: &'static str,
    found: f64,
    expected: &'static str,
) -> Result<(), WorkloadError> {
    if holds { Ok(()) } else { Err(WorkloadError::Value { of: of.to_owned(), field, found, expected }) }
}

/// More shard tasks than this, which take hours to simulate, are assumed to be a mistake.
const MOST_SHARD_TASKS: u64 = 10_000_000_000;

/// More replicas than this are assumed to be a mistake.
const MOST_REPLICAS: usize = 1_000_000;

/// More threads than this are assumed to be a mistake.
const MOST_THREADS: usize = 1_000_000;

/// Estimates that are wrong by more than this are assumed to be a mistake.
const MOST_ESTIMATE_FACTOR: f64 = 1e6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_places_of_evaluations_rise_and_are_in_the_task() {
        let check = |evaluations: &[(u64, u64)]| {
            let mut task = TaskCost::new("a", 3, vec![ShardCost::new(1.0, 2.0, 0.0)]);
            let evaluation =
                |&(after, microbatch_passes): &(u64, u64)| EvaluationCost { after, microbatch_passes };
            task.evaluations = evaluations.iter().map(evaluation).collect();
            Workload::new(vec![task], vec![DeviceCost::default()]).check()
        };
        assert!(check(&[(0, 1), (2, 0), (3, 9)]).is_ok());
        for wrong in [&[(1, 1), (1, 1)][..], &[(2, 1), (1, 1)], &[(4, 1)]] {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("evaluations.after") && error.contains("`a`"), "{error}");
        }
    }
}
