//! Lower bounds on the makespan of all schedules.

use super::{ParamBufferCost, TaskCost, Workload, WorkloadError};
use crate::policy::ShardTaskKind;
use crate::program::{Program, ShardTask};

/// The maximum number of shard tasks for the packing bound, which sorts them all.
const PACKED: u64 = 4096;

/// Lower bounds on a workload's makespan, in seconds. Each holds for every schedule that satisfies the
/// rules of the [simulator](crate::simulate), for any policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct LowerBounds {
    /// The longest model alone on the fastest device: its shard tasks in sequence, with the promotions that
    /// nothing can hide, because the optimizer has just updated the master weights or nothing ran before. For
    /// a model that several devices may compute concurrently, the compute of each of its minibatches and
    /// evaluations is divided over them, but no microbatch pass and no step between them is.
    pub chain_s: f64,
    /// All compute, divided evenly over the devices' speeds, from the arrival of the first model and its
    /// first promotion on.
    pub work_s: f64,
    /// The longest `k` models on the fastest `k` devices, for every `k`, and with the models that arrive
    /// late, for every arrival. It is the relevant bound if there are fewer models than devices, or a few
    /// that are much longer than the others. Source for the first part: Horvath, Lam and Sethi, "A Level
    /// Algorithm for Preemptive Scheduling", 1977.
    pub level_s: f64,
    /// The promotions that cannot be saved, in sequence on the links.
    pub link_s: f64,
    /// The steps of the host optimizer that a shard task waits for, in sequence: all except those of each
    /// task's last minibatch, which count only if an evaluation follows. Before them is a first minibatch up
    /// to its first backward, and after them a last minibatch, or that evaluation. 0 if no shard task waits
    /// for a step.
    pub host_s: f64,
    /// Of the `k m + 1` longest shard tasks on `m` equal devices, `k + 1` share a device; 0 for unequal
    /// devices and for workloads of more than a few thousand shard tasks, for which it is a weak bound.
    pub packing_s: f64,
    /// All compute and the idle time that one model of many short minibatches forces. After each of its
    /// minibatches its next shard task waits for its master weights and their promotion. Its device is
    /// idle meanwhile, or starts a shard task of another model; each of those can fill only one such
    /// gap. If there are more gaps than shard tasks of other models, the difference stays idle.
    pub time_slices_s: f64,
}

impl LowerBounds {
    /// Returns the bounds of a workload; `prefetch` as in [`SimulationOptions`](crate::SimulationOptions).
    ///
    /// # Errors
    /// [`WorkloadError`] if the workload violates a rule of [`Workload::check`]: invalid costs, or no task or
    /// device, have no bound.
    pub fn of(workload: &Workload, prefetch: bool) -> Result<Self, WorkloadError> {
        workload.check()?;
        Ok(Self::of_valid(workload, prefetch))
    }

    /// Returns the bounds of a checked workload.
    pub(crate) fn of_valid(workload: &Workload, prefetch: bool) -> Self {
        let mut speeds: Vec<f64> = workload.devices.iter().map(|device| device.speed).collect();
        speeds.sort_by(|a, b| b.total_cmp(a));
        let jobs: Vec<Job> = (0..workload.tasks.len()).map(|task| Job::of(workload, task)).collect();
        let fastest = speeds.first().copied().unwrap_or(1.0);
        let chain = |task: usize| match workload.tasks[task].replicas {
            1 => chain_s(workload, task, fastest, prefetch),
            _ => replicas_s(workload, task, &speeds),
        };
        Self {
            chain_s: (0..jobs.len()).map(chain).fold(0.0, f64::max),
            work_s: first_s(&jobs)
                + jobs.iter().map(|job| job.work_s).sum::<f64>() / speeds.iter().sum::<f64>(),
            level_s: level_s(&jobs, &speeds, |job| job.work_s)
                .max(level_s(&jobs, &speeds, |job| job.first_s)),
            link_s: link_s(workload),
            host_s: host_s(workload, fastest),
            packing_s: packing_s(workload),
            time_slices_s: time_slices_s(workload, &jobs, &speeds),
        }
    }

    /// The largest of them.
    pub fn best_s(&self) -> f64 {
        let others =
            [self.work_s, self.level_s, self.link_s, self.host_s, self.packing_s, self.time_slices_s];
        others.into_iter().fold(self.chain_s, f64::max)
    }
}

/// A model as a single job.
struct Job {
    /// The earliest start of its first shard task.
    first_s: f64,
    /// Seconds of compute on a device of speed 1.
    work_s: f64,
    /// The maximum number of devices that compute it concurrently.
    replicas: usize,
}

impl Job {
    fn of(workload: &Workload, task: usize) -> Self {
        let first_s = workload.tasks[task].arrival_s + shortest_promote_s(workload, task, 0);
        Self { first_s, work_s: workload.task_s(task), replicas: workload.tasks[task].replicas }
    }
}

fn first_s<'a>(jobs: impl IntoIterator<Item = &'a Job>) -> f64 {
    jobs.into_iter().map(|job| job.first_s).fold(f64::INFINITY, f64::min)
}

/// The jobs with the largest keys on the same number of the fastest devices, for every number.
fn level_s(jobs: &[Job], speeds: &[f64], key: impl Fn(&Job) -> f64) -> f64 {
    let mut largest: Vec<&Job> = jobs.iter().collect();
    largest.sort_by(|a, b| key(b).total_cmp(&key(a)));
    let (mut work, mut speed, mut first, mut best) = (0.0, 0.0, f64::INFINITY, 0.0f64);
    let mut idle = speeds.iter();
    for job in largest {
        work += job.work_s;
        speed += idle.by_ref().take(job.replicas).sum::<f64>();
        first = first.min(job.first_s);
        best = best.max(first + work / speed);
    }
    best
}

/// The shortest promotion of a shard over all devices. If some of its buffers may already be there for other
/// tasks, only the rest counts: zero if there is no rest, regardless of the stated promotion time.
fn shortest_promote_s(workload: &Workload, task: usize, shard: usize) -> f64 {
    let cost = &workload.tasks[task].shards[shard];
    let (own, keeps) = (alone_bytes(&workload.tasks[task], shard), keeps_copies(workload));
    if keeps && own == 0 && cost.is_in_parts() {
        return 0.0;
    }
    let promote_s = |device| match keeps {
        true => workload.promote_part_s(device, task, shard, own),
        false => workload.promote_s(device, task, shard),
    };
    // Stated seconds are the same on all devices, so one suffices; the time of a part depends on the link.
    let stated = cost.promote_s.is_some() && !cost.is_in_parts();
    let devices = if stated { 1 } else { workload.devices.len() };
    (0..devices).map(promote_s).fold(f64::INFINITY, f64::min)
}

/// Bytes of a trained shard, without buffers that other shards read too.
fn alone_bytes(cost: &TaskCost, shard: usize) -> u64 {
    let others = || cost.shards.iter().enumerate().filter(|(other, _)| *other != shard);
    let is_elsewhere =
        |buffer: &&ParamBufferCost| others().any(|(_, of)| of.buffers.iter().any(|of| of.id == buffer.id));
    let shared = cost.shards[shard].buffers.iter().filter(is_elsewhere).map(|buffer| buffer.bytes);
    cost.shards[shard].own_bytes().saturating_sub(shared.fold(0, u64::saturating_add))
}

/// The earliest end of a model that has all devices to itself.
///
/// A shard task is committed to at the earliest when the previous one starts and when its master weights are
/// final; then come its promotion and its compute. A shard that was on a device since its last step may still
/// be cached. The host optimizer updates its shards in sequence, in an unknown order if their gradients are
/// downloaded.
fn chain_s(workload: &Workload, task: usize, speed: f64, prefetch: bool) -> f64 {
    let cost = &workload.tasks[task];
    let shards = cost.shards.len();
    let promote: Vec<f64> = (0..shards).map(|shard| shortest_promote_s(workload, task, shard)).collect();
    let (keeps, step_s, mut host_s) = (keeps_copies(workload), cost.step_s(), 0.0f64);
    let mut final_s = vec![cost.arrival_s; shards];
    let mut promoted: Vec<Option<usize>> = vec![None; shards];
    let (mut start_s, mut end_s) = (cost.arrival_s, cost.arrival_s);
    let program = cost.program();
    let in_order = steps_in_order(cost);
    for of in cost.tasks_from(0) {
        let shard = of.shard;
        let commit_s = final_s[shard].max(if prefetch { start_s } else { end_s });
        let version = program.version(shard, of.step);
        let stays = keeps && promoted[shard].replace(version) == Some(version);
        start_s = end_s.max(commit_s + if stays { 0.0 } else { promote[shard] });
        end_s = start_s + workload.shard_task_s(task, &of) / speed;
        if ends_backwards(&program, &of) {
            host_s = if step_s > 0.0 && in_order { host_s.max(end_s) + step_s } else { end_s + step_s };
            final_s[shard] = host_s + cost.shards[shard].gradients_s + cost.step_wait_s;
        }
    }
    end_s
}

/// The earliest end of a model whose microbatch passes several devices may compute concurrently, and that has
/// all devices to itself: each minibatch, and the evaluations at each point, take at least as long as one
/// microbatch pass on the fastest device, and as all of them divided over the fastest devices, as many as
/// there are replicas. Between two minibatches the first shard is updated, unless it is frozen.
fn replicas_s(workload: &Workload, task: usize, speeds: &[f64]) -> f64 {
    let cost = &workload.tasks[task];
    let fastest = speeds.first().copied().unwrap_or(1.0);
    let together: f64 = speeds.iter().take(cost.replicas).sum();
    let place_s = |pass_s: f64, microbatch_passes: u64| {
        (pass_s / fastest).max(pass_s * microbatch_passes as f64 / together)
    };
    let seconds = |minibatch, kind, shard| workload.seconds(task, minibatch, kind, shard);
    let trained = (0..cost.minibatches).map(|minibatch| {
        let pass_s = cost.microbatch_pass().map(|(kind, shard)| seconds(minibatch, kind, shard)).sum();
        place_s(pass_s, cost.microbatches().of(minibatch as usize) as u64)
    });
    let evaluated = cost.evaluations.iter().filter(|of| of.microbatch_passes > 0).map(|of| {
        let shards = 0..cost.shards.len();
        let pass_s = shards.map(|shard| seconds(of.after, ShardTaskKind::Evaluate, shard)).sum();
        place_s(pass_s, of.microbatch_passes)
    });
    let waits = if cost.first_trained == 0 { cost.minibatches - 1 } else { 0 };
    let first_s = cost.arrival_s + shortest_promote_s(workload, task, 0);
    first_s + trained.sum::<f64>() + evaluated.sum::<f64>() + waits as f64 * cost.least_step_s()
}

/// Every trained shard is promoted at least once per minibatch, because the previous step made its copies
/// stale, and a frozen one once; without a parameter cache, every shard task promotes.
fn link_s(workload: &Workload) -> f64 {
    let links = if workload.shared_link { 1 } else { workload.devices.len() };
    let keeps = keeps_copies(workload);
    let all = |(task, cost): (usize, &TaskCost)| {
        let promote: Vec<f64> =
            (0..cost.shards.len()).map(|shard| shortest_promote_s(workload, task, shard)).collect();
        let (frozen, trained) = promote.split_at(cost.first_trained);
        if keeps {
            return cost.minibatches as f64 * trained.iter().sum::<f64>() + frozen.iter().sum::<f64>();
        }
        let pass_s: f64 = cost.microbatch_pass().map(|(_, shard)| promote[shard]).sum();
        let evaluations_s = cost.evaluation_passes() as f64 * promote.iter().sum::<f64>();
        cost.training_passes() as f64 * pass_s + evaluations_s
    };
    workload.tasks.iter().enumerate().map(all).sum::<f64>() / links as f64
}

/// Returns whether a shard's master weights are updated when the shard task ends, if microbatch groups run in
/// sequence: it is the last backward of its minibatch.
fn ends_backwards(program: &Program, task: &ShardTask) -> bool {
    let all = program.microbatches.of(task.step);
    task.kind == ShardTaskKind::Backward && task.microbatch_pass() + 1 == all
}

/// Returns whether a task's shards are updated in the order of their backwards: downloaded gradients reach
/// the host optimizer when they arrive.
fn steps_in_order(cost: &TaskCost) -> bool {
    cost.shards.iter().all(|shard| shard.gradients_s == 0.0)
}

/// Returns whether any device caches copies, so that promotions may be saved.
fn keeps_copies(workload: &Workload) -> bool {
    workload.devices.iter().any(|device| device.keeps_copies)
}

/// The host optimizer receives nothing before the last backward of a first shard has ended. The last of its
/// steps that a shard task waits for is that of some task's first trained shard, whose backward is the last
/// of its minibatch, or of any trained shard if gradients are downloaded: that task promotes the shard again
/// and runs everything that follows, except the frozen shards before it.
fn host_s(workload: &Workload, speed: f64) -> f64 {
    let (mut head_s, mut steps_s, mut tail_s) = (f64::INFINITY, 0.0, f64::INFINITY);
    for (task, cost) in workload.tasks.iter().enumerate() {
        let followed = cost
            .evaluations
            .last()
            .is_some_and(|of| of.after == cost.minibatches && of.microbatch_passes > 0);
        let awaited = if followed { cost.minibatches } else { cost.minibatches - 1 };
        if awaited == 0 || cost.optimizer_s == 0.0 {
            continue;
        }
        let first = cost.first_trained;
        // The compute before and after may be on several devices.
        let together = speed * cost.replicas.min(workload.devices.len()) as f64;
        let seconds = |of: &ShardTask| workload.shard_task_s(task, of) / together;
        let program = cost.program();
        let mut before_s = cost.arrival_s + shortest_promote_s(workload, task, 0);
        for of in cost.tasks_from(0) {
            before_s += seconds(&of);
            if ends_backwards(&program, &of) {
                break;
            }
        }
        let last = if steps_in_order(cost) { first + 1 } else { cost.shards.len() };
        let after_s = |shard: usize| {
            let waits = cost.tasks_from(awaited).skip_while(|of| of.shard != shard);
            shortest_promote_s(workload, task, shard) + waits.map(|of| seconds(&of)).sum::<f64>()
        };
        let after_s = (first..last).map(after_s).fold(f64::INFINITY, f64::min);
        head_s = head_s.min(before_s);
        steps_s += awaited as f64 * cost.optimizer_s;
        tail_s = tail_s.min(cost.step_wait_s + after_s);
    }
    if steps_s > 0.0 { head_s + steps_s + tail_s } else { 0.0 }
}

fn time_slices_s(workload: &Workload, jobs: &[Job], speeds: &[f64]) -> f64 {
    let all = workload.shard_tasks();
    let idle_s = |task: usize| {
        let cost = &workload.tasks[task];
        if cost.first_trained > 0 {
            // Its frozen shards never wait.
            return 0.0;
        }
        let gap_s = cost.least_step_s() + shortest_promote_s(workload, task, 0);
        let filled = all - cost.shard_tasks();
        (cost.minibatches - 1).saturating_sub(filled) as f64 * gap_s
    };
    let most_idle_s = (0..jobs.len()).map(idle_s).fold(0.0, f64::max);
    let work: f64 = jobs.iter().map(|job| job.work_s).sum();
    let slowest = speeds.last().copied().unwrap_or(1.0);
    first_s(jobs) + (work + most_idle_s * slowest) / speeds.iter().sum::<f64>()
}

fn packing_s(workload: &Workload) -> f64 {
    let devices = workload.devices.len();
    let speed = workload.devices.first().map_or(1.0, |device| device.speed);
    let equal = workload.devices.iter().all(|device| device.speed == speed);
    if !equal || workload.shard_tasks() > PACKED {
        return 0.0;
    }
    let mut longest = Vec::new();
    for (task, cost) in workload.tasks.iter().enumerate() {
        longest.extend(cost.tasks_from(0).map(|of| workload.shard_task_s(task, &of)));
    }
    longest.sort_by(|a, b| b.total_cmp(a));
    let mut best = 0.0f64;
    for last in (0..longest.len()).step_by(devices) {
        let meet = last / devices + 1;
        best = best.max(longest[last + 1 - meet..=last].iter().sum::<f64>() / speed);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::ShardedLrtfEager;
    use crate::simulator::{DeviceCost, ShardCost, SimulationOptions, simulate};

    fn workload(tasks: Vec<TaskCost>, devices: usize) -> Workload {
        Workload::new(tasks, vec![DeviceCost::default(); devices])
    }

    fn plain(name: &str, minibatches: u64, shards: &[(f64, f64)]) -> TaskCost {
        let shards =
            shards.iter().map(|&(forward, backward)| ShardCost::new(forward, backward, 0.0)).collect();
        TaskCost::new(name, minibatches, shards)
    }

    #[test]
    fn each_bound_has_a_case_of_its_own() {
        let long = plain("long", 10, &[(0.0, 3.0)]);
        let short = plain("short", 1, &[(0.0, 3.0)]);
        let bounds = LowerBounds::of(&workload(vec![long, short.clone()], 2), true).unwrap();
        assert_eq!((bounds.chain_s, bounds.work_s, bounds.level_s), (30.0, 16.5, 30.0));
        // Two models keep only two of three devices busy.
        let two = vec![plain("a", 4, &[(1.0, 2.0), (0.0, 3.0)]), plain("b", 4, &[(1.0, 2.0), (0.0, 3.0)])];
        let mut unequal = workload(two, 3);
        unequal.devices[0].speed = 2.0;
        let bounds = LowerBounds::of(&unequal, true).unwrap();
        assert_eq!((bounds.chain_s, bounds.work_s, bounds.level_s), (12.0, 12.0, 16.0));
        // Three shard tasks of 3 seconds on two devices: two share one.
        let three: Vec<TaskCost> =
            ["x", "y", "z"].map(|name| TaskCost { name: name.into(), ..short.clone() }).into();
        let bounds = LowerBounds::of(&workload(three, 2), true).unwrap();
        assert_eq!((bounds.work_s, bounds.packing_s, bounds.best_s()), (4.5, 6.0, 6.0));
    }

    /// A workload that [`Workload::check`] refuses has no bounds; such workloads caused panics, infinities or
    /// bounds that were too small.
    #[test]
    fn what_is_no_workload_has_no_bounds() {
        let sound = workload(vec![plain("a", 2, &[(1.0, 2.0), (0.0, 3.0)])], 2);
        type Change = fn(&mut Workload);
        let refused = |change: Change| {
            let mut broken = sound.clone();
            change(&mut broken);
            [true, false].map(|prefetch| LowerBounds::of(&broken, prefetch).unwrap_err().to_string())
        };
        let cases: [(Change, &str); 7] = [
            (|w| w.devices.clear(), "no device"),
            (|w| w.tasks.clear(), "no task"),
            (|w| w.tasks[0].shards.clear(), "task `a`"),
            (|w| w.tasks[0].minibatches = 0, "no minibatch"),
            (|w| w.tasks[0].shards[0].forward_s = f64::NAN, "forward_s of shard 0 of task `a` is NaN"),
            (|w| w.tasks[0].shards[1].backward_s = f64::INFINITY, "backward_s of shard 1"),
            (|w| w.devices[1].speed = 0.0, "speed of device 1 is 0"),
        ];
        for (change, words) in cases {
            for said in refused(change) {
                assert!(said.contains(words), "`{words}` is not in: {said}");
            }
        }
        assert_eq!(LowerBounds::of(&sound, true).unwrap(), LowerBounds::of_valid(&sound, true));
    }

    /// Ten gaps of a second and a half, and three shard tasks to fill them, on one device and on two.
    #[test]
    fn gaps_that_nothing_fills_count() {
        let shard = ShardCost::new(0.0, 2.0, 1.0);
        let mut long = TaskCost::new("long", 11, vec![shard]);
        long.optimizer_s = 0.5;
        let short = plain("short", 1, &[(5.0, 5.0), (0.0, 5.0)]);
        let mut both = workload(vec![long, short], 1);
        let bounds = LowerBounds::of(&both, true).unwrap();
        assert_eq!((bounds.work_s, bounds.time_slices_s), (37.0, 37.0 + 7.0 * 1.5));
        let result = simulate(&both, &mut ShardedLrtfEager, SimulationOptions::default());
        assert!(result.unwrap().makespan_s >= bounds.time_slices_s);
        both.devices = vec![DeviceCost::default(); 2];
        assert_eq!(LowerBounds::of(&both, true).unwrap().time_slices_s, (37.0 + 7.0 * 1.5) / 2.0);
    }

    #[test]
    fn arrivals_and_links_count() {
        let mut late = plain("late", 2, &[(0.0, 3.0)]);
        late.arrival_s = 10.0;
        let mut both = workload(
            vec![plain("early", 1, &[(0.0, 1.0)]), late.clone(), TaskCost { name: "too".into(), ..late }],
            1,
        );
        assert_eq!(LowerBounds::of(&both, true).unwrap().level_s, 10.0 + 12.0);
        both.tasks[0].shards[0].promote_s = Some(50.0);
        assert_eq!(LowerBounds::of(&both, true).unwrap().link_s, 50.0);
    }

    /// A step takes longer than a backward, so that the first shard waits for the step of the second one, and
    /// then for its own.
    #[test]
    fn a_model_waits_for_the_steps_of_all_its_shards() {
        let slow = TaskCost { optimizer_s: 6.0, ..plain("slow", 2, &[(1.0, 2.0), (0.0, 3.0)]) };
        let alone = workload(vec![slow], 1);
        let bounds = LowerBounds::of(&alone, true).unwrap();
        // The backwards end at 4 and 6, the steps at 7 and 10.
        assert_eq!((bounds.chain_s, bounds.host_s), (10.0 + 6.0, 4.0 + 6.0 + 6.0));
        let result = simulate(&alone, &mut ShardedLrtfEager, SimulationOptions::default());
        assert_eq!(result.unwrap().gap(), 1.0);
    }

    /// The copy of a one-shard model is stale after every minibatch, and nothing hides its promotion; of two
    /// shards, the second one's is hidden behind the first one's shard tasks.
    #[test]
    fn promotions_that_cannot_be_hidden_count_in_the_chain() {
        let one = TaskCost::new("one", 3, vec![ShardCost::new(0.0, 4.0, 0.5)]);
        assert_eq!(LowerBounds::of(&workload(vec![one.clone()], 1), true).unwrap().chain_s, 3.0 * 4.5);
        let stepped = TaskCost { optimizer_s: 0.25, ..one };
        assert_eq!(
            LowerBounds::of(&workload(vec![stepped], 1), true).unwrap().chain_s,
            3.0 * 4.5 + 2.0 * 0.25
        );
        let two = TaskCost::new("two", 2, vec![ShardCost::new(1.0, 2.0, 0.5), ShardCost::new(0.0, 3.0, 0.5)]);
        let mut two = workload(vec![two], 1);
        let chains =
            |of: &Workload| [true, false].map(|prefetch| LowerBounds::of(of, prefetch).unwrap().chain_s);
        assert_eq!((chains(&two), LowerBounds::of(&two, true).unwrap().link_s), ([13.0, 15.0], 3.0));
        two.devices[0].keeps_copies = true;
        assert_eq!((chains(&two), LowerBounds::of(&two, true).unwrap().link_s), ([13.0, 14.0], 2.0));
    }

    /// The rest of a partly frozen shard is promoted faster over the slow link, whose stated seconds include
    /// the frozen byte.
    #[test]
    fn what_is_not_frozen_of_a_shard_is_promoted_over_the_best_link() {
        let mut shard = ShardCost::new(0.0, 1.0, 0.125);
        (shard.bytes, shard.frozen) = (Some(2), vec![ParamBufferCost { id: 1, bytes: 1 }]);
        let mut workload = workload(vec![TaskCost::new("a", 2, vec![shard])], 2);
        for (device, link) in workload.devices.iter_mut().zip([32.0, 16.0]) {
            (device.link_bytes_per_s, device.memory_bytes, device.keeps_copies) = (Some(link), Some(9), true);
        }
        workload.devices[0].speed = 0.5;
        let result = simulate(&workload, &mut ShardedLrtfEager, SimulationOptions::default()).unwrap();
        let bound = LowerBounds::of(&workload, true).unwrap().best_s();
        assert_eq!((result.makespan_s, bound), (2.0 + 0.125 + 0.0625, 2.0 + 2.0 * 0.0625));
    }

    /// Its copy is that of the frozen part, which no step changes, regardless of the stated promotion time.
    #[test]
    fn a_shard_of_frozen_parts_alone_is_promoted_once() {
        let mut shard = ShardCost::new(0.0, 1.0, 0.125);
        (shard.bytes, shard.frozen) = (Some(3), vec![ParamBufferCost { id: 1, bytes: 3 }]);
        let mut frozen = workload(vec![TaskCost::new("frozen", 3, vec![shard])], 1);
        let kept = DeviceCost {
            memory_bytes: Some(9),
            link_bytes_per_s: Some(13.0),
            keeps_copies: true,
            ..frozen.devices[0].clone()
        };
        frozen.devices = vec![kept];
        let result = simulate(&frozen, &mut ShardedLrtfEager, SimulationOptions::default()).unwrap();
        assert_eq!((result.makespan_s, LowerBounds::of(&frozen, true).unwrap().best_s()), (3.125, 3.0));
    }
}
