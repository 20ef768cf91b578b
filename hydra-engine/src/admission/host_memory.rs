//! Fits the tasks of a run into host memory and onto the disk: a pure function of sizes.

use super::division::{Division, Promoters, StoredBuffers, compared_bytes, divide, shared_bytes};
use super::gradients::FLOWING;
use super::search::{Cost, StartOrder, Tier, best};
use super::sizes::TaskSizes;
use crate::error::EngineError;
use hydra_core::ByteSize;
use std::cmp::Reverse;
use std::path::PathBuf;

/// A directory for masters, and the most bytes that they may take there.
#[derive(Clone, Debug)]
pub(crate) struct DiskSpec {
    pub dir: PathBuf,
    pub budget: ByteSize,
}

/// The numbers of shards of a model whose gradients may have memory at the same time.
const SHARDS: [usize; 5] = [usize::MAX, FLOWING, 3, 2, 1];

/// The host memory that a run may use.
#[derive(Clone, Copy)]
pub(super) struct HostMemory<'a> {
    /// Bytes of host memory.
    pub budget: u64,
    /// The disk for masters that do not fit.
    pub disk: Option<&'a DiskSpec>,
    /// Devices of the run; each should have a model to compute.
    pub devices: usize,
    /// Promotions of one device whose reads from the disk are in host memory at the same time.
    pub promotions: usize,
    /// Whether buffers that are read in place pass through host memory on their way to a device.
    pub stages: bool,
    /// The most tasks that run at the same time; `None` if all start at the beginning.
    pub concurrent: Option<usize>,
}

/// The host memory that a run takes, and its parts.
#[derive(Clone, Debug)]
pub(super) struct HostMemoryPlan {
    /// The most host bytes reserved at the same time.
    pub admitted: u64,
    /// The part of `admitted` for batches that are read ahead.
    pub ahead: u64,
    /// The most models that are within a minibatch at the same time.
    pub active_models: usize,
    /// For each task, its host bytes within a minibatch; 0 for a finished task.
    pub active: Vec<u64>,
    /// The number of shards per model whose gradients fit.
    pub gradient_shards: usize,
    /// Which masters are in host memory and which on the disk.
    pub division: Division,
    /// The most tasks that run at the same time if tasks are queued for memory.
    pub max_concurrent: Option<usize>,
}

impl HostMemory<'_> {
    /// The plan of the lowest cost ([`cheapest`](Self::cheapest)).
    pub(super) fn find_space(&self, tasks: &[TaskSizes]) -> Result<HostMemoryPlan, EngineError> {
        self.cheapest(tasks).map(|(_, plan)| plan)
    }

    /// Fits all tasks of a run together or, if they may be queued, a part of them at a time, with memory for the
    /// gradients of as many shards of a model as fit.
    pub(super) fn cheapest(&self, tasks: &[TaskSizes]) -> Result<(Cost, HostMemoryPlan), EngineError> {
        let starts = std::iter::once(StartOrder::Together).chain(self.concurrent.map(|_| StartOrder::Queued));
        let bound = |start, shards| Cost { start, gradients: usize::MAX - shards, ..Cost::default() };
        let with_shards = |start| SHARDS.map(|shards| (bound(start, shards), (start, shards)));
        let found = best(starts.flat_map(with_shards), |(start, shards)| {
            let plan = match start {
                StartOrder::Queued => self.plan_queued(shards, tasks)?,
                _ => self.plan_together(shards, tasks)?,
            };
            Ok((self.cost(start, &plan, tasks), plan))
        });
        found.map_err(|alone| match self.disk {
            // More fits with the disk than in host memory alone, so that its error is reported.
            Some(_) => self.plan_together(1, tasks).err().unwrap_or(alone),
            None => alone,
        })
    }

    fn cost(&self, start: StartOrder, plan: &HostMemoryPlan, tasks: &[TaskSizes]) -> Cost {
        let most = open(tasks).count().min(self.concurrent.unwrap_or(usize::MAX));
        let missing = |wanted: usize| wanted.min(most).saturating_sub(plan.active_models);
        let (idle, on_disk) = (missing(self.devices), plan.division.disk > 0);
        let reads_files = || tasks.iter().any(|task| task.buffers.in_place.iter().any(|bytes| *bytes > 0));
        Cost {
            start: match (plan.max_concurrent, on_disk) {
                (None, _) => start,
                (Some(_), false) => StartOrder::Queued,
                (Some(_), true) => StartOrder::OnDisk,
            },
            idle,
            tier: match on_disk {
                true => Tier::Disk,
                false if reads_files() => Tier::Files,
                false => Tier::Memory,
            },
            gradients: match plan.gradient_shards {
                usize::MAX if on_disk && idle == 0 => usize::MAX,
                shards => usize::MAX - shards,
            },
            disk: plan.division.disk,
            waits: missing(self.devices + 1),
            ..Cost::default()
        }
    }

    /// Fits queued tasks, all of them in host memory: up to the tasks that may run at the same time, in any combination
    /// that fits, with memory for the gradients of `shards` shards.
    fn plan_queued(&self, shards: usize, tasks: &[TaskSizes]) -> Result<HostMemoryPlan, EngineError> {
        let concurrent = self.concurrent.unwrap_or(usize::MAX);
        let stored: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
        let in_memory = tasks.iter().map(|task| vec![false; task.buffers.masters.len()]).collect();
        let mut division = Division::of(&stored, in_memory, self.promoters());
        if open(tasks).next().is_none() {
            division.working = 0;
        }
        // Working memory is reserved for the whole run, before any task starts.
        let working = division.working.min(self.budget);
        let budget = self.budget - working;
        let peaks = HostPeaks::of(open(tasks), shards);
        let models = peaks.together(budget).min(concurrent);
        if let Some(largest) = peaks.largest.first().filter(|_| models == 0) {
            return Err(largest.refused(self.budget, division.working));
        }
        // Read-ahead takes the memory that computing models leave.
        let wanted = self.devices.min(concurrent).min(open(tasks).count());
        let mut batches: Vec<u64> = open(tasks).map(|task| task.batches).collect();
        batches.sort_unstable_by(|a, b| b.cmp(a));
        let ahead = with_largest(0, &batches, wanted).min(budget - peaks.of_any(models.min(wanted)));
        Ok(HostMemoryPlan {
            admitted: working + peaks.of_any(concurrent).min(budget - ahead) + ahead,
            ahead,
            active_models: models,
            active: tasks.iter().map(|task| task.active(shards)).collect(),
            gradient_shards: shards,
            division,
            max_concurrent: self.concurrent,
        })
    }

    /// Fits tasks that all start at the beginning, with memory for the gradients of `shards` shards of a model. Masters
    /// are there for the whole run, in host memory or on the disk. As many models as fit with the masters in host memory
    /// may be within a minibatch at the same time, and the largest one must fit. The error names the bytes that are
    /// needed.
    fn plan_together(&self, shards: usize, tasks: &[TaskSizes]) -> Result<HostMemoryPlan, EngineError> {
        let active: Vec<u64> = tasks.iter().map(|task| task.active(shards)).collect();
        let mut descending: Vec<u64> = active.iter().copied().filter(|bytes| *bytes > 0).collect();
        descending.sort_unstable_by(|a, b| b.cmp(a));
        let stored: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
        let division = self.divide(&stored, &descending)?;
        // The number of models is the number of smallest ones that fit; their bytes are bounded by those of the same
        // number of largest ones.
        let mut smallest = division.needed();
        let fits = |bytes: &&u64| {
            smallest = smallest.saturating_add(**bytes);
            smallest <= self.budget
        };
        let active_models = descending.iter().rev().take_while(fits).count();
        let beginning = division.needed().saturating_add(compared_bytes(&stored));
        let most =
            with_largest(division.needed(), &descending, active_models).max(beginning).min(self.budget);
        // Read-ahead takes the memory that nothing else can use.
        let batches =
            tasks.iter().zip(&active).filter(|(_, active)| **active > 0).map(|(task, _)| task.batches);
        let ahead = batches.fold(0, u64::saturating_add).min(self.budget - most);
        let (admitted, gradient_shards) = (most + ahead, shards);
        Ok(HostMemoryPlan {
            admitted,
            ahead,
            active_models,
            active,
            gradient_shards,
            division,
            max_concurrent: self.concurrent.filter(|most| *most < open(tasks).count()),
        })
    }

    /// Divides masters so that models within a minibatch fit too. `active` has the bytes of these models, largest
    /// first.
    fn divide(&self, tasks: &[&StoredBuffers], active: &[u64]) -> Result<Division, EngineError> {
        let nothing = tasks.iter().map(|task| vec![false; task.masters.len()]).collect();
        let all = Division::of(tasks, nothing, self.promoters());
        match self.disk {
            Some(disk) if with_largest(all.needed(), active, self.devices) > self.budget => {
                self.divide_with(disk, tasks, active)
            }
            _ => {
                let working = (all.working > 0).then_some(all.working);
                self.check_fits(all, working, beyond_masters(tasks, active, 1), tasks.len())
            }
        }
    }

    /// Moves masters to the disk until the largest models fit within a minibatch, one for each device if possible: an
    /// idle device costs more than the traffic of the disk.
    fn divide_with(
        &self,
        disk: &DiskSpec,
        tasks: &[&StoredBuffers],
        active: &[u64],
    ) -> Result<Division, EngineError> {
        let fits = |division: &Division| division.disk <= disk.budget.bytes();
        let with = |models: usize| self.divide_next_to(beyond_masters(tasks, active, models), tasks);
        let mut several = (2..=self.devices.min(tasks.len())).rev();
        if let Some(division) = several.find_map(|models| with(models).ok().filter(fits)) {
            return Ok(division);
        }
        let division = with(1)?;
        match fits(&division) {
            true => Ok(division),
            false => Err(EngineError::DiskMemory {
                dir: disk.dir.clone(),
                needed: division.disk,
                budget: disk.budget.bytes(),
                host: self.budget,
            }),
        }
    }

    /// Divides masters between the disk and the host memory that `active` bytes leave.
    fn divide_next_to(&self, active: u64, tasks: &[&StoredBuffers]) -> Result<Division, EngineError> {
        let divided = divide(tasks, self.budget.saturating_sub(active), self.promoters());
        let (Ok(division) | Err(division)) = divided;
        let working = Some(division.working);
        self.check_fits(division, working, active, tasks.len())
    }

    fn promoters(&self) -> Promoters {
        Promoters { devices: self.devices, each: self.promotions, stages: self.stages }
    }

    /// Returns `division` if it fits together with `active` bytes, else the error for `tasks` tasks.
    fn check_fits(
        &self,
        division: Division,
        working: Option<u64>,
        active: u64,
        tasks: usize,
    ) -> Result<Division, EngineError> {
        let (needed, masters) = (active.saturating_add(division.needed()), division.in_memory);
        match needed <= self.budget {
            true => Ok(division),
            false => {
                let budget = self.budget;
                Err(EngineError::HostMemory { needed, masters, working, active, tasks, budget })
            }
        }
    }
}

/// The tasks that are not finished.
fn open(tasks: &[TaskSizes]) -> impl Iterator<Item = &TaskSizes> {
    tasks.iter().filter(|task| !task.is_finished())
}

/// The host memory that one task takes by itself.
struct HostPeak {
    masters: u64,
    /// The part of `masters` that no other task shares.
    own: u64,
    active: u64,
}

impl HostPeak {
    fn bytes(&self) -> u64 {
        self.masters.saturating_add(self.active)
    }

    /// The bytes without shared masters.
    fn own_bytes(&self) -> u64 {
        self.own.saturating_add(self.active)
    }

    /// The error for a task that does not fit by itself, with the working memory of the run.
    fn refused(&self, budget: u64, working: u64) -> EngineError {
        let Self { masters, active, .. } = *self;
        let needed = self.bytes().saturating_add(working);
        let working = (working > 0).then_some(working);
        EngineError::HostMemory { needed, masters, working, active, tasks: 1, budget }
    }
}

/// The host memory that any combination of tasks takes together.
struct HostPeaks {
    /// Each task by itself, the largest first.
    largest: Vec<HostPeak>,
    /// The bytes of each task without shared masters, the largest first.
    own: Vec<u64>,
    /// Bytes of all shared masters.
    shared: u64,
    /// Bytes for comparing shared masters with those of a task that starts later.
    compared: u64,
}

impl HostPeaks {
    /// The memory of `tasks` if each has memory for the gradients of `shards` shards.
    fn of<'a>(tasks: impl Iterator<Item = &'a TaskSizes>, shards: usize) -> Self {
        let tasks: Vec<&TaskSizes> = tasks.collect();
        let peak = |task: &&TaskSizes| HostPeak {
            masters: task.buffers.masters.iter().sum(),
            own: task.buffers.own_bytes(),
            active: task.active(shards),
        };
        let mut largest: Vec<HostPeak> = tasks.iter().map(peak).collect();
        largest.sort_unstable_by_key(|peak| Reverse(peak.bytes()));
        let mut own: Vec<u64> = largest.iter().map(HostPeak::own_bytes).collect();
        own.sort_unstable_by_key(|bytes| Reverse(*bytes));
        let buffers: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
        Self { largest, own, shared: shared_bytes(&buffers), compared: compared_bytes(&buffers) }
    }

    /// The number of tasks that fit into `budget` bytes together in any combination.
    fn together(&self, budget: u64) -> usize {
        (1..=self.largest.len()).take_while(|count| self.of_any(*count) <= budget).count()
    }

    /// The most bytes that any `count` of the tasks take together.
    fn of_any(&self, count: usize) -> u64 {
        let alone = self.largest.iter().take(count).map(HostPeak::bytes).fold(0, u64::saturating_add);
        let own = self.own.iter().take(count).fold(self.shared, |sum, bytes| sum.saturating_add(*bytes));
        let compared = if count > 1 { self.compared } else { 0 };
        alone.min(own).saturating_add(compared)
    }
}

/// Bytes of host memory in addition to masters: those of the largest `models` models within a minibatch (`active` is
/// sorted, largest first), or those of the comparison when tasks start, which comes before.
fn beyond_masters(tasks: &[&StoredBuffers], active: &[u64], models: usize) -> u64 {
    with_largest(0, active, models).max(compared_bytes(tasks))
}

/// `others` plus the bytes of the first `models` models within a minibatch, which are sorted by size.
pub(super) fn with_largest(others: u64, descending: &[u64], models: usize) -> u64 {
    descending.iter().take(models).fold(others, |sum, bytes| sum.saturating_add(*bytes))
}

#[cfg(test)]
mod tests {
    use super::super::gradients::{GradientBytes, Window};
    use super::super::running::{HostShare, RunningTasks};
    use super::super::shared::SharedBuffer;
    use super::super::sizes::Remaining;
    use super::*;
    use hydra_core::TaskId;
    use hydra_sched::program::MicrobatchGroup;
    use hydra_spill::ParamBufferId;
    use proptest::prelude::*;

    /// A task of AdamW in `f32`, each buffer a shard.
    fn task(buffers: &[u64], others: u64, remaining: Remaining) -> TaskSizes {
        let shards = || buffers.iter().enumerate();
        let finished = matches!(remaining, Remaining::Nothing);
        TaskSizes {
            buffers: StoredBuffers {
                masters: buffers.iter().map(|bytes| if finished { 0 } else { 3 * bytes }).collect(),
                promoted: buffers.to_vec(),
                first: buffers.to_vec(),
                stepped: buffers.iter().map(|bytes| 3 * bytes).collect(),
                written: buffers.to_vec(),
                narrowed: vec![false; buffers.len()],
                narrow: vec![false; buffers.len()],
                in_place: vec![0; buffers.len()],
                shards: shards().map(|(buffer, _)| vec![buffer]).collect(),
                shared: vec![None; buffers.len()],
                replicas: 1,
                may_leave: !finished,
            },
            batches: others,
            rounds: 0,
            boundaries: others,
            gradients: GradientBytes::from_shards(
                shards().map(|shard| vec![(shard.0, *shard.1)]).collect(),
                false,
            ),
            remaining,
            microbatch_group: MicrobatchGroup::ONE,
            replicas: 1,
            window: Window::OPEN,
        }
    }

    fn remainders() -> impl Strategy<Value = Remaining> {
        prop_oneof![
            Just(()).prop_map(|()| Remaining::Nothing),
            Just(()).prop_map(|()| Remaining::Evaluation),
            Just(()).prop_map(|()| Remaining::Training),
            (0_u64..500).prop_map(Remaining::Accumulation),
        ]
    }

    prop_compose! {
        fn drawn()(
            buffers in prop::collection::vec(1_u64..100, 1..7),
            others in 1_u64..20,
            remaining in remainders(),
            narrow in any::<bool>(),
        ) -> TaskSizes {
            let mut task = task(&buffers, others, remaining);
            task.buffers.narrow[0] = narrow;
            task
        }
    }

    /// Host memory without a disk, for tasks that all start at the beginning.
    fn memory(budget: u64, devices: usize) -> HostMemory<'static> {
        HostMemory { budget, disk: None, devices, promotions: 2, stages: false, concurrent: None }
    }

    fn disk(bytes: u64) -> DiskSpec {
        DiskSpec { dir: "scratch".into(), budget: ByteSize(bytes) }
    }

    #[test]
    fn gradients_have_the_room_that_is_left() {
        let two = [0; 2].map(|_| task(&[10; 8], 1, Remaining::Training));
        let found = |budget: u64| {
            let plan = memory(budget, 2).find_space(&two).unwrap();
            (plan.gradient_shards, plan.active_models)
        };
        // Masters of 480; within a minibatch 2, and gradients of 10 a shard.
        assert_eq!([644, 643, 564, 563].map(found), [(usize::MAX, 2), (4, 2), (4, 2), (3, 2)]);
        assert_eq!([524, 523, 504, 503].map(found), [(2, 2), (1, 2), (1, 2), (2, 1)]);
        assert_eq!(found(492), (1, 1));
        let little = memory(491, 2).find_space(&two).unwrap_err();
        assert!(matches!(little, EngineError::HostMemory { needed: 492, masters: 480, active: 12, .. }));
    }

    proptest! {
        #[test]
        fn a_room_keeps_to_what_there_is_or_says_what_is_missing(
            tasks in prop::collection::vec(drawn(), 1..5),
            budget in 0_u64..3000,
            on_disk in prop::option::of(0_u64..1500),
            devices in 1_usize..4,
        ) {
            let disk = on_disk.map(disk);
            let host = HostMemory { disk: disk.as_ref(), ..memory(budget, devices) };
            match host.find_space(&tasks) {
                Ok(plan) => {
                    let mut active: Vec<u64> = plan.active.iter().copied().filter(|bytes| *bytes > 0).collect();
                    active.sort_unstable();
                    let largest = active.iter().rev().take(1).sum::<u64>();
                    prop_assert!(plan.admitted <= budget && plan.ahead <= plan.admitted);
                    prop_assert!(plan.division.needed() + largest <= budget, "the largest model fits");
                    let models: u64 = active.iter().take(plan.active_models).sum();
                    prop_assert!(plan.division.needed() + models <= budget);
                    prop_assert!(plan.active_models > 0 || active.is_empty());
                    prop_assert!(plan.division.disk <= on_disk.unwrap_or(0));
                }
                Err(EngineError::HostMemory { needed, .. }) => {
                    prop_assert!(needed > budget);
                    let enough = HostMemory { budget: needed, ..host }.find_space(&tasks);
                    prop_assert!(
                        matches!(enough, Ok(_) | Err(EngineError::DiskMemory { .. })),
                        "what is missing suffices"
                    );
                }
                Err(EngineError::DiskMemory { needed, .. }) => prop_assert!(Some(needed) > on_disk),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }

        #[test]
        fn no_plan_costs_less_than_the_chosen_one(
            tasks in prop::collection::vec((drawn(), 1_usize..3, 0_u64..20), 1..5),
            budget in 0_u64..3000,
            on_disk in prop::option::of(0_u64..1500),
            concurrent in prop::option::of(1_usize..6),
            devices in 1_usize..4,
        ) {
            let disk = on_disk.map(disk);
            let host = HostMemory { disk: disk.as_ref(), concurrent, ..memory(budget, devices) };
            let (least, more): (Vec<_>, Vec<_>) = tasks.into_iter().map(|(task, replicas, boundaries)| (task, (replicas, boundaries))).unzip();
            let chosen = host.cheapest(&least).map(|(cost, _)| cost);
            for shards in SHARDS {
                let together = host.plan_together(shards, &least).map(|plan| host.cost(StartOrder::Together, &plan, &least));
                let queued = host.plan_queued(shards, &least).map(|plan| host.cost(StartOrder::Queued, &plan, &least));
                let queued = queued.ok().filter(|_| concurrent.is_some());
                for cost in together.ok().into_iter().chain(queued) {
                    prop_assert!(matches!(&chosen, Ok(chosen) if *chosen <= cost), "{chosen:?} {cost:?}");
                }
            }
            if on_disk.is_some() {
                // What goes to the disk is chosen buffer by buffer: more concurrency may put fewer bytes there by chance.
                return Ok(());
            }
            // What the least concurrency costs is a bound of what more of it costs.
            let widen = |(mut task, (replicas, boundaries)): (TaskSizes, (usize, u64))| {
                (task.buffers.replicas, task.boundaries) = (replicas, task.boundaries + boundaries);
                task
            };
            let wide: Vec<TaskSizes> = least.into_iter().zip(more).map(widen).collect();
            if let Ok((cost, _)) = host.cheapest(&wide) {
                prop_assert!(matches!(&chosen, Ok(chosen) if *chosen <= cost), "{chosen:?} {cost:?}");
            }
        }

        #[test]
        fn any_tasks_need_no_more_than_is_said_of_them(
            tasks in prop::collection::vec((drawn(), prop::option::of(0_usize..3)), 1..6),
        ) {
            // The first buffer of some tasks is one of three shared buffers.
            let share = |(mut task, shared): (TaskSizes, Option<usize>)| {
                if let Some(shared) = shared.filter(|_| !task.is_finished()) {
                    task.buffers.masters[0] = 40 * (1 + shared as u64);
                    task.buffers.shared[0] = Some(ParamBufferId::new(TaskId(shared), 0).shared());
                }
                task
            };
            let tasks: Vec<TaskSizes> = tasks.into_iter().map(share).collect();
            let peaks = HostPeaks::of(tasks.iter(), 2);
            let share = |task: &TaskSizes| {
                let shared = |(id, bytes): (&Option<ParamBufferId>, &u64)| id.map(|id| SharedBuffer { id, bytes: *bytes });
                let shared = task.buffers.shared.iter().zip(&task.buffers.masters).filter_map(shared);
                HostShare { own: task.buffers.own_bytes(), shared: shared.collect(), active: task.active(2) }
            };
            for some in 1_usize..1 << tasks.len() {
                let some: Vec<&TaskSizes> = (0..tasks.len()).filter(|task| some >> task & 1 == 1).map(|task| &tasks[task]).collect();
                let buffers: Vec<&StoredBuffers> = some.iter().map(|task| &task.buffers).collect();
                let (one, others) = some.split_last().unwrap();
                let running = RunningTasks::new(others.iter().map(|task| share(task)), some.len());
                let exact = running.bytes_with(&share(one)) + compared_bytes(&buffers);
                prop_assert!(exact <= peaks.of_any(some.len()));
            }
            if let Ok(plan) = memory(1500, 1).find_space(&tasks) {
                let buffers: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
                let own: u64 = buffers.iter().map(|buffers| buffers.own_bytes()).sum();
                prop_assert_eq!(plan.division.in_memory, own + shared_bytes(&buffers));
                prop_assert!(plan.admitted >= plan.division.in_memory + compared_bytes(&buffers));
            }
        }

        #[test]
        fn tasks_that_begin_in_turn_fit_if_each_does(
            tasks in prop::collection::vec(drawn(), 1..6),
            budget in 0_u64..3000,
            devices in 1_usize..4,
            concurrent in 1_usize..7,
        ) {
            let host = HostMemory { concurrent: Some(concurrent), ..memory(budget, devices) };
            let peaks = HostPeaks::of(tasks.iter().filter(|task| !task.is_finished()), 1);
            let by_task = &tasks;
            match host.find_space(by_task) {
                Ok(plan) => {
                    prop_assert!(plan.admitted <= budget && plan.ahead <= plan.admitted);
                    let peaks = tasks.iter().zip(&plan.active).map(|(task, active)| task.buffers.masters.iter().sum::<u64>() + active);
                    let others = plan.ahead + plan.division.working;
                    prop_assert!(peaks.max().unwrap_or(0) + others <= plan.admitted, "each fits by itself");
                    let all = HostMemory { concurrent: None, ..host }.find_space(&tasks);
                    prop_assert!(plan.max_concurrent.is_some() || all.is_ok());
                }
                Err(EngineError::HostMemory { needed, tasks, .. }) => {
                    let narrow = by_task.iter().filter(|task| task.buffers.narrow[0]);
                    let working = narrow.map(|task| task.buffers.written[0]).max().unwrap_or(0);
                    prop_assert_eq!((needed, tasks), (peaks.largest[0].bytes() + working, 1));
                    prop_assert!(needed > budget);
                }
                Err(error) => prop_assert!(false, "{error}"),
            }
        }

        #[test]
        fn more_host_memory_never_leaves_a_device_without_a_model(
            tasks in prop::collection::vec(drawn(), 1..5),
            budget in 0_u64..3000,
            more in 1_u64..500,
            devices in 1_usize..4,
        ) {
            let models = |budget: u64| {
                let plan = memory(budget, devices).find_space(&tasks);
                plan.map_or(0, |plan| plan.active_models.min(devices))
            };
            prop_assert!(models(budget) <= models(budget + more));
        }
    }
}
