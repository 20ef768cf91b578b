//! Random workloads, for tests, experiments and benches.

use super::{DeviceCost, ShardCost, TaskCost, Workload};
use crate::policy::random::{below, keyed, unit};

/// The ranges of random workloads. A workload is a function of these and of a seed.
///
/// Lengths are heavy-tailed: the number of a model's shard tasks follows a Pareto distribution of index 1.3,
/// so a few models are much longer than the others. Each model has its own scale for the times of its shard
/// tasks, drawn uniformly on a logarithmic axis, and its shards differ from it by up to a fifth, like shards
/// that are cut for one device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Minimum and maximum number of models.
    pub models: (usize, usize),
    /// Minimum and maximum number of devices; at most the number of models.
    pub devices: (usize, usize),
    /// Minimum and maximum number of shards of a model, drawn uniformly on a logarithmic axis.
    pub shards: (usize, usize),
    /// Minimum and maximum number of shard tasks of a model, rounded to whole minibatches, at least one.
    pub shard_tasks: (u64, u64),
    /// Minimum and maximum scale of a model's forwards, in seconds; a backward takes two to three times as
    /// long.
    pub forward_s: (f64, f64),
    /// Seconds of every promotion.
    pub promote_s: f64,
    /// Seconds of the host optimizer, as a fraction of a minibatch's compute.
    pub optimizer: f64,
}

impl Default for Draw {
    /// 2 to 64 models of 1 to 50 shards on 1 to 16 devices, nothing to promote.
    fn default() -> Self {
        Self {
            models: (2, 64),
            devices: (1, 16),
            shards: (1, 50),
            shard_tasks: (100, 5_000),
            forward_s: (0.1, 1.0),
            promote_s: 0.0,
            optimizer: 0.0,
        }
    }
}

impl Draw {
    /// 3 to 16 models of 1 to 12 shards on 2 to 4 devices. Each promotion takes 0.05 s (the shortest forward
    /// takes 0.08 s), and the host's optimizer a twentieth of a minibatch's compute.
    pub fn few_devices() -> Self {
        let (promote_s, optimizer) = (0.05, 0.05);
        Self { models: (3, 16), devices: (2, 4), shards: (1, 12), promote_s, optimizer, ..Self::default() }
    }

    /// Returns the workloads in which one model is longer than an even share of all work, with their seeds,
    /// from seed 0 on.
    pub fn with_a_long_model(self) -> impl Iterator<Item = (u64, Workload)> {
        let drawn = (0..).map(move |seed| (seed, self.workload(seed)));
        drawn.filter(|(_, workload)| {
            let longest_s = (0..workload.tasks.len()).map(|task| workload.task_s(task)).fold(0.0, f64::max);
            longest_s * workload.devices.len() as f64 > workload.total_s()
        })
    }

    /// Returns the workload of this seed.
    pub fn workload(&self, seed: u64) -> Workload {
        let mut numbers = Numbers { seed, drawn: 0 };
        let models = numbers.whole(self.models.0, self.models.1);
        let devices = numbers.whole(self.devices.0, self.devices.1.min(models));
        let task = |index| self.task(index, &mut numbers);
        Workload::new((0..models).map(task).collect(), vec![DeviceCost::default(); devices])
    }

    fn task(&self, index: usize, numbers: &mut Numbers) -> TaskCost {
        let (fewest, most) = self.shards;
        let shards = (numbers.between_logs(fewest as f64, most as f64 + 1.0) as usize).clamp(fewest, most);
        let (short, long) = self.shard_tasks;
        let pareto = short as f64 * (1.0 - numbers.unit()).powf(-1.0 / 1.3);
        let minibatches = (pareto.min(long as f64) / (2 * shards - 1) as f64).round().max(1.0) as u64;
        let scale = numbers.between_logs(self.forward_s.0, self.forward_s.1);
        let shard = |_| {
            let forward_s = scale * numbers.between(0.8, 1.2);
            ShardCost::new(forward_s, forward_s * numbers.between(2.0, 3.0), self.promote_s)
        };
        let mut task = TaskCost::new(format!("model-{index}"), minibatches, (0..shards).map(shard).collect());
        task.optimizer_s = self.optimizer * task.pass_s();
        task
    }
}

/// A sequence of numbers from one seed.
struct Numbers {
    seed: u64,
    drawn: u64,
}

impl Numbers {
    fn bits(&mut self) -> u64 {
        self.drawn += 1;
        keyed(self.seed, &[self.drawn])
    }

    fn unit(&mut self) -> f64 {
        unit(self.bits())
    }

    fn whole(&mut self, least: usize, most: usize) -> usize {
        least + below(self.bits(), (most + 1).saturating_sub(least))
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    fn between_logs(&mut self, low: f64, high: f64) -> f64 {
        (low.ln() + (high.ln() - low.ln()) * self.unit()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_workloads_are_valid_and_as_asked() {
        let draw = Draw::default();
        for seed in 0..200 {
            let workload = draw.workload(seed);
            workload.check().unwrap();
            assert_eq!(workload, draw.workload(seed));
            assert!((2..=64).contains(&workload.tasks.len()));
            assert!((1..=16).contains(&workload.devices.len()));
            assert!(workload.devices.len() <= workload.tasks.len());
            assert!(workload.tasks.iter().all(|task| (1..=50).contains(&task.shards.len())));
            assert!(workload.tasks.iter().all(|task| task.shard_tasks() <= 5_100));
        }
        assert_ne!(draw.workload(0), draw.workload(1));
    }
}
