//! The search for room in host memory and on the disk for each task of a run: a pure function of sizes.

use super::division::{Division, Promoters, StoredBuffers, compared_bytes, divide, shared_bytes};
use super::gradients::FLOWING;
use super::sizes::TaskSizes;
use crate::error::EngineError;
use hydra_core::ByteSize;
use std::cmp::Reverse;
use std::path::PathBuf;

/// A directory for masters, and how many bytes of them.
#[derive(Clone, Debug)]
pub(crate) struct DiskSpec {
    pub dir: PathBuf,
    pub budget: ByteSize,
}

/// Memory for a run.
#[derive(Clone, Copy)]
pub(super) struct HostMemory<'a> {
    /// Bytes of host memory.
    pub budget: u64,
    /// The disk for masters for which they have no room.
    pub disk: Option<&'a DiskSpec>,
    /// Devices that want a model each.
    pub devices: usize,
    /// Promotions of a device that have what they read of the disk in host memory at once.
    pub promotions: usize,
    /// The most tasks that begin before others have ended; `None` if all begin at the start.
    pub concurrent: Option<usize>,
}

/// The room that a run takes.
#[derive(Clone, Debug)]
pub(super) struct Room {
    /// The most host bytes that are reserved at once.
    pub admitted: u64,
    /// Those of them for batches that are read ahead.
    pub ahead: u64,
    /// The most models that are within a minibatch at once.
    pub active_models: usize,
    /// Host bytes of each task while it is within a minibatch; none of one that is finished.
    pub active: Vec<u64>,
    /// The shards of a model for whose gradients there is room.
    pub gradient_shards: usize,
    /// The homes of masters.
    pub division: Division,
    /// The most tasks that have begun at once, where they begin in turn, as host memory has room.
    pub queued: Option<usize>,
}

impl HostMemory<'_> {
    /// Finds the room of a run: at once for all of its tasks, or else, where tasks may wait, for those that begin together.
    pub(super) fn find_space(&self, tasks: &[TaskSizes]) -> Result<Room, EngineError> {
        let at_once = self.room_at_once(tasks);
        let Some(concurrent) = self.concurrent else { return at_once };
        let limited = concurrent < tasks.iter().filter(|task| !task.is_finished()).count();
        match at_once {
            Ok(room) if !limited => Ok(room),
            Ok(room) if room.division.disk == 0 => Ok(Room { queued: Some(concurrent), ..room }),
            at_once => self.room_queued(tasks, concurrent).or_else(|alone| match at_once {
                Ok(room) => Ok(Room { queued: limited.then_some(concurrent), ..room }),
                // On the disk more has room than beside it.
                Err(all) => Err(if self.disk.is_some() { all } else { alone }),
            }),
        }
    }

    /// The room of tasks that begin in turn, all of them in host memory: any that fit together may have begun at once, at
    /// most `concurrent`. Gradients have as much room as lets each device have a model.
    fn room_queued(&self, tasks: &[TaskSizes], concurrent: usize) -> Result<Room, EngineError> {
        let open = || tasks.iter().filter(|task| !task.is_finished());
        let wanted = self.devices.min(concurrent).min(open().count());
        let mut most: Option<(usize, usize)> = None;
        for shards in [usize::MAX, FLOWING, 3, 2, 1] {
            let models = self.together(&TaskPeaks2::of(open(), shards));
            if most.is_none_or(|(_, before)| models > before) {
                most = Some((shards, models));
            }
            if models >= wanted {
                break;
            }
        }
        let (shards, models) = most.filter(|(_, models)| *models > 0).unwrap_or((1, 0));
        let needs = TaskPeaks2::of(open(), shards);
        if models == 0
            && let Some(largest) = needs.largest.first()
        {
            return Err(largest.refused(self.budget));
        }
        let models = models.min(concurrent);
        // Reading ahead has what those that compute leave.
        let mut batches: Vec<u64> = open().map(|task| task.batches).collect();
        batches.sort_unstable_by(|a, b| b.cmp(a));
        let batches = batches.iter().take(wanted).fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let ahead = batches.min(self.budget - needs.of_any(models.min(wanted)));
        let stored: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
        let in_memory = tasks.iter().map(|task| vec![false; task.buffers.masters.len()]).collect();
        Ok(Room {
            admitted: needs.of_any(concurrent).min(self.budget - ahead) + ahead,
            ahead,
            active_models: models,
            active: tasks.iter().map(|task| task.active(shards)).collect(),
            gradient_shards: shards,
            division: Division::of(&stored, in_memory, self.promoters()),
            queued: Some(concurrent),
        })
    }

    /// The number of tasks that fit together, whichever they are.
    fn together(&self, needs: &TaskPeaks2) -> usize {
        (1..=needs.largest.len()).take_while(|count| needs.of_any(*count) <= self.budget).count()
    }

    /// Finds the room of tasks that all begin at the start. A model within a minibatch has room for all of its gradients if
    /// then nothing has to leave host memory and each device can have a model; otherwise for those of some shards, at
    /// least of one.
    fn room_at_once(&self, tasks: &[TaskSizes]) -> Result<Room, EngineError> {
        let wanted = self.devices.min(tasks.iter().filter(|task| !task.is_finished()).count());
        let mut most: Option<Room> = None;
        for shards in [usize::MAX, FLOWING, 3, 2] {
            let Ok(room) = self.room_with(shards, tasks) else { continue };
            if room.active_models >= wanted && (shards < usize::MAX || room.division.disk == 0) {
                return Ok(room);
            }
            if most.as_ref().is_none_or(|most| most.active_models < room.active_models) {
                most = Some(room);
            }
        }
        let least = self.room_with(1, tasks);
        match most {
            Some(most) => {
                Ok(least.ok().filter(|least| least.active_models > most.active_models).unwrap_or(most))
            }
            None => least,
        }
    }

    /// The room of a run in which a model has room for the gradients of so many shards. Masters are there for the whole
    /// run, in host memory or on the disk; as many models as fit beside those in host memory may be within a minibatch
    /// at once, and at least the largest one must. An error says what is needed.
    fn room_with(&self, shards: usize, tasks: &[TaskSizes]) -> Result<Room, EngineError> {
        let active: Vec<u64> = tasks.iter().map(|task| task.active(shards)).collect();
        let mut descending: Vec<u64> = active.iter().copied().filter(|bytes| *bytes > 0).collect();
        descending.sort_unstable_by(|a, b| b.cmp(a));
        let stored: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
        let division = self.divide(&stored, &descending)?;
        // As many as the smallest are at most; and no more bytes than the largest of so many have.
        let mut smallest = division.needed();
        let fits = |bytes: &&u64| {
            smallest = smallest.saturating_add(**bytes);
            smallest <= self.budget
        };
        let active_models = descending.iter().rev().take_while(fits).count();
        let beginning = division.needed().saturating_add(compared_bytes(&stored));
        let most =
            with_largest(division.needed(), &descending, active_models).max(beginning).min(self.budget);
        // Reading ahead has what nobody else can need.
        let batches =
            tasks.iter().zip(&active).filter(|(_, active)| **active > 0).map(|(task, _)| task.batches);
        let ahead = batches.fold(0, u64::saturating_add).min(self.budget - most);
        let (admitted, gradient_shards) = (most + ahead, shards);
        Ok(Room { admitted, ahead, active_models, active, gradient_shards, division, queued: None })
    }

    /// Divides masters beside models within a minibatch, whose bytes come largest first.
    fn divide(&self, tasks: &[&StoredBuffers], active: &[u64]) -> Result<Division, EngineError> {
        let nothing = tasks.iter().map(|task| vec![false; task.masters.len()]).collect();
        let all = Division::of(tasks, nothing, self.promoters());
        match self.disk {
            Some(disk) if with_largest(all.in_memory, active, self.devices) > self.budget => {
                self.divide_with(disk, tasks, active)
            }
            _ => self.beside(all, None, beside_masters(tasks, active, 1), tasks.len()),
        }
    }

    /// Leaves to the disk what host memory has no room for beside, if that can be, one model within a minibatch for
    /// each device, the largest first: a device without a model costs more than what the disk moves.
    fn divide_with(
        &self,
        disk: &DiskSpec,
        tasks: &[&StoredBuffers],
        active: &[u64],
    ) -> Result<Division, EngineError> {
        let fits = |division: &Division| division.disk <= disk.budget.bytes();
        let beside = |models: usize| self.divide_beside(beside_masters(tasks, active, models), tasks);
        let mut several = (2..=self.devices.min(tasks.len())).rev();
        if let Some(division) = several.find_map(|models| beside(models).ok().filter(fits)) {
            return Ok(division);
        }
        let division = beside(1)?;
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

    /// Divides masters between the disk and what host memory has beside so many `active` bytes.
    fn divide_beside(&self, active: u64, tasks: &[&StoredBuffers]) -> Result<Division, EngineError> {
        let divided = divide(tasks, self.budget.saturating_sub(active), self.promoters());
        let (Ok(division) | Err(division)) = divided;
        let working = Some(division.working);
        self.beside(division, working, active, tasks.len())
    }

    fn promoters(&self) -> Promoters {
        Promoters { devices: self.devices, each: self.promotions }
    }

    /// The division of so many tasks, if it has room beside so many `active` bytes.
    fn beside(
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

/// The host memory that a task needs by itself.
struct TaskPeak {
    masters: u64,
    /// Those of its masters that no other task has too.
    own: u64,
    active: u64,
}

impl TaskPeak {
    fn bytes(&self) -> u64 {
        self.masters.saturating_add(self.active)
    }

    /// The bytes without what others have too.
    fn own_bytes(&self) -> u64 {
        self.own.saturating_add(self.active)
    }

    /// The refusal of a task that does not fit by itself.
    fn refused(&self, budget: u64) -> EngineError {
        let Self { masters, active, .. } = *self;
        EngineError::HostMemory { needed: self.bytes(), masters, working: None, active, tasks: 1, budget }
    }
}

/// The needs of tasks that may begin together.
struct TaskPeaks2 {
    /// Of each task by itself, the largest first.
    largest: Vec<TaskPeak>,
    /// The bytes of each without what others have too, the largest first.
    own: Vec<u64>,
    /// Bytes of all that tasks have in common.
    shared: u64,
    /// Bytes for comparing that, when a task begins after another.
    compared: u64,
}

impl TaskPeaks2 {
    /// The needs of tasks with room for the gradients of so many shards.
    fn of<'a>(tasks: impl Iterator<Item = &'a TaskSizes>, shards: usize) -> Self {
        let tasks: Vec<&TaskSizes> = tasks.collect();
        let need = |task: &&TaskSizes| TaskPeak {
            masters: task.buffers.masters.iter().sum(),
            own: task.buffers.own_bytes(),
            active: task.active(shards),
        };
        let mut largest: Vec<TaskPeak> = tasks.iter().map(need).collect();
        largest.sort_unstable_by_key(|need| Reverse(need.bytes()));
        let mut own: Vec<u64> = largest.iter().map(TaskPeak::own_bytes).collect();
        own.sort_unstable_by_key(|bytes| Reverse(*bytes));
        let buffers: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
        Self { largest, own, shared: shared_bytes(&buffers), compared: compared_bytes(&buffers) }
    }

    /// The bytes that any so many of the tasks need together at most.
    fn of_any(&self, count: usize) -> u64 {
        let alone = self.largest.iter().take(count).map(TaskPeak::bytes).fold(0, u64::saturating_add);
        let own = self.own.iter().take(count).fold(self.shared, |sum, bytes| sum.saturating_add(*bytes));
        let compared = if count > 1 { self.compared } else { 0 };
        alone.min(own).saturating_add(compared)
    }
}

/// Bytes of host memory beside masters: of so many models within a minibatch, whose bytes come largest first, or of what is
/// compared when tasks begin, before there are such.
fn beside_masters(tasks: &[&StoredBuffers], active: &[u64], models: usize) -> u64 {
    with_largest(0, active, models).max(compared_bytes(tasks))
}

/// The bytes of the first `models` models within a minibatch, in the order of their sizes, beside others.
fn with_largest(others: u64, descending: &[u64], models: usize) -> u64 {
    descending.iter().take(models).fold(others, |sum, bytes| sum.saturating_add(*bytes))
}

#[cfg(test)]
mod tests {
    use super::super::gradients::{GradientBytes, Window};
    use super::super::sizes::Remaining;
    use super::*;
    use crate::stages::MicrobatchGroup;
    use hydra_core::TaskId;
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
                shards: shards().map(|(buffer, _)| vec![buffer]).collect(),
                shared: vec![None; buffers.len()],
                replicas: 1,
                may_leave: !finished,
            },
            batches: others,
            boundaries: others,
            gradients: GradientBytes::made_by(
                shards().map(|shard| vec![(shard.0, *shard.1)]).collect(),
                false,
            ),
            remaining,
            microbatch_group: MicrobatchGroup::ONE,
            replicas: 1,
            window: Window::OPEN,
            device_resident: false,
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
        fn drawn()(buffers in prop::collection::vec(1_u64..100, 1..7), others in 1_u64..20, remaining in remainders()) -> TaskSizes {
            task(&buffers, others, remaining)
        }
    }

    fn disk(bytes: u64) -> DiskSpec {
        DiskSpec { dir: "scratch".into(), budget: ByteSize(bytes) }
    }

    #[test]
    fn gradients_have_the_room_that_is_left() {
        let two = [0; 2].map(|_| task(&[10; 8], 1, Remaining::Training));
        let found = |budget: u64| {
            let room = HostMemory { budget, disk: None, devices: 2, promotions: 2, concurrent: None }
                .find_space(&two)
                .unwrap();
            (room.gradient_shards, room.active_models)
        };
        // Masters of 480, and within a minibatch 2 beside gradients of 10 a shard.
        assert_eq!([644, 643, 564, 563].map(found), [(usize::MAX, 2), (4, 2), (4, 2), (3, 2)]);
        assert_eq!([524, 523, 504, 503].map(found), [(2, 2), (1, 2), (1, 2), (2, 1)]);
        assert_eq!(found(492), (1, 1));
        let little = HostMemory { budget: 491, disk: None, devices: 2, promotions: 2, concurrent: None }
            .find_space(&two)
            .unwrap_err();
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
            let host = HostMemory { budget, disk: disk.as_ref(), devices, promotions: 2, concurrent: None };
            match host.find_space(&tasks) {
                Ok(room) => {
                    let mut active: Vec<u64> = room.active.iter().copied().filter(|bytes| *bytes > 0).collect();
                    active.sort_unstable();
                    let largest = active.iter().rev().take(1).sum::<u64>();
                    prop_assert!(room.admitted <= budget && room.ahead <= room.admitted);
                    prop_assert!(room.division.needed() + largest <= budget, "the largest model finds room");
                    let models: u64 = active.iter().take(room.active_models).sum();
                    prop_assert!(room.division.needed() + models <= budget);
                    prop_assert!(room.active_models > 0 || active.is_empty());
                    prop_assert!(room.division.disk <= on_disk.unwrap_or(0));
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
        fn any_tasks_need_no_more_than_is_said_of_them(
            tasks in prop::collection::vec((drawn(), prop::option::of(0_usize..3)), 1..6),
        ) {
            // The first buffer of some is one of three that tasks have in common.
            let share = |(mut task, shared): (TaskSizes, Option<usize>)| {
                if let Some(shared) = shared.filter(|_| !task.is_finished()) {
                    task.buffers.masters[0] = 40 * (1 + shared as u64);
                    task.buffers.shared[0] = Some(ParamBufferId::new(TaskId(shared), 0).shared());
                }
                task
            };
            let tasks: Vec<TaskSizes> = tasks.into_iter().map(share).collect();
            let needs = TaskPeaks2::of(tasks.iter(), 2);
            for some in 1_usize..1 << tasks.len() {
                let some: Vec<&TaskSizes> = (0..tasks.len()).filter(|task| some >> task & 1 == 1).map(|task| &tasks[task]).collect();
                let buffers: Vec<&StoredBuffers> = some.iter().map(|task| &task.buffers).collect();
                let own: u64 = some.iter().map(|task| task.buffers.own_bytes() + task.active(2)).sum();
                let exact = own + shared_bytes(&buffers) + compared_bytes(&buffers);
                prop_assert!(exact <= needs.of_any(some.len()));
            }
            let host = HostMemory { budget: 1500, disk: None, devices: 1, promotions: 2, concurrent: None };
            if let Ok(room) = host.find_space(&tasks) {
                let buffers: Vec<&StoredBuffers> = tasks.iter().map(|task| &task.buffers).collect();
                let own: u64 = buffers.iter().map(|buffers| buffers.own_bytes()).sum();
                prop_assert_eq!(room.division.in_memory, own + shared_bytes(&buffers));
                prop_assert!(room.admitted >= room.division.in_memory + compared_bytes(&buffers));
            }
        }

        #[test]
        fn tasks_that_begin_in_turn_fit_if_each_does(
            tasks in prop::collection::vec(drawn(), 1..6),
            budget in 0_u64..3000,
            devices in 1_usize..4,
            concurrent in 1_usize..7,
        ) {
            let host = HostMemory { budget, disk: None, devices, promotions: 2, concurrent: Some(concurrent) };
            let needs = TaskPeaks2::of(tasks.iter().filter(|task| !task.is_finished()), 1);
            match host.find_space(&tasks) {
                Ok(room) => {
                    prop_assert!(room.admitted <= budget && room.ahead <= room.admitted);
                    let needs = tasks.iter().zip(&room.active).map(|(task, active)| task.buffers.masters.iter().sum::<u64>() + active);
                    prop_assert!(needs.max().unwrap_or(0) <= room.admitted - room.ahead, "each has room by itself");
                    let all = HostMemory { concurrent: None, ..host }.find_space(&tasks);
                    prop_assert!(room.queued.is_some() || all.is_ok());
                }
                Err(EngineError::HostMemory { needed, tasks, .. }) => {
                    prop_assert_eq!((needed, tasks), (needs.largest[0].bytes(), 1));
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
                let room = HostMemory { budget, disk: None, devices, promotions: 2, concurrent: None }.find_space(&tasks);
                room.map_or(0, |room| room.active_models.min(devices))
            };
            prop_assert!(models(budget) <= models(budget + more));
        }
    }
}
