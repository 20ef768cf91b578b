//! The face of the engine: submit tasks, admit them, run them.
//!
//! [`Orchestrator`] collects devices, tasks and options. `admit` measures and cuts every model and adds up
//! the memory, so that a run that cannot fit is refused before it starts. `run` then hands over to the event
//! loop (`run.rs`): one thread that alone decides, over one closed enum of events.

use crate::admission::{
    Admission, AdmittedTask, DiskSpec, DiskTier, HostMemory, Identities, OptimizerPlacement, Plans, admit,
};
use crate::checkpoint::{self, CheckpointEvery, Identity};
use crate::device::{DeviceSpec, LogicalDevice, OwnLink, PageLocked};
use crate::error::{EngineError, guarded, refused};
use crate::observer::{Observer, RunEvent, Silent};
use crate::protocol::{Evaluation, StopFlag};
use crate::report::RunReport;
use crate::run::{self, Admitted, Chosen, Setup};
use crate::train_task::TrainTask;
use hydra_core::optimizer::Sgd;
use hydra_core::{ByteSize, Chain, Dataset, DeviceId, MemoryProbe, TaskId, TrainSpec};
use hydra_sched::{Policy, PolicyKind};
use hydra_spill::{DeviceLink, DiskStore, DramStore, ResidentStore, TierStore, alloc::AllocatorProbe};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The host memory that a run may use when it is not told: effectively no limit.
const UNLIMITED: ByteSize = ByteSize(u64::MAX / 4);

/// The page-locked memory that a run may have when it is not told.
const PAGE_LOCKED: ByteSize = ByteSize::mib(1024);

/// Trains many models on few devices.
pub struct Orchestrator {
    devices: Vec<DeviceSpec>,
    host_memory: ByteSize,
    page_locked: ByteSize,
    disk: Option<DiskSpec>,
    policy: Chosen,
    prefetch: bool,
    placement: OptimizerPlacement,
    every: CheckpointEvery,
    seed: u64,
    plans: Plans,
    probe: Arc<dyn MemoryProbe>,
    own_link: Option<Box<OwnLink>>,
    stop: StopFlag,
    observer: Box<dyn Observer>,
    tasks: Vec<TrainTask>,
    admitted: Option<Admitted>,
}

impl std::fmt::Debug for Orchestrator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tasks: Vec<&str> = self.tasks.iter().map(|t| t.name.as_str()).collect();
        f.debug_struct("Orchestrator").field("devices", &self.devices).field("tasks", &tasks).finish()
    }
}

impl Orchestrator {
    /// A run on these devices, of which there must be at least one.
    pub fn new(devices: Vec<DeviceSpec>) -> Result<Self, EngineError> {
        let Some(first) = devices.first() else { return Err(EngineError::NoDevice) };
        let kind = |spec: &DeviceSpec| std::mem::discriminant(&spec.kind);
        if let Some(other) = devices.iter().find(|other| kind(other) != kind(first)) {
            let (first, other) = (first.name.clone(), other.name.clone());
            return Err(EngineError::MixedDevices { first, other });
        }
        Ok(Self {
            devices,
            host_memory: UNLIMITED,
            page_locked: PAGE_LOCKED,
            disk: None,
            policy: Chosen::Kind(PolicyKind::default()),
            prefetch: true,
            placement: OptimizerPlacement::default(),
            every: CheckpointEvery::default(),
            seed: 0,
            plans: Plans::default(),
            probe: Arc::new(AllocatorProbe),
            own_link: None,
            stop: StopFlag::new(),
            observer: Box::new(Silent),
            tasks: Vec::new(),
            admitted: None,
        })
    }

    /// The host memory that masters, optimizer state, gradients and boundary activations may use.
    pub fn host_memory(mut self, bytes: ByteSize) -> Self {
        self.host_memory = bytes;
        self.admitted = None;
        self
    }

    /// The part of the host's memory that may be page-locked for NVIDIA's cards, 1 GiB by default: masters live
    /// there as far as it goes, and gradients come down there. The rest is copied once more.
    pub fn page_locked_memory(mut self, bytes: ByteSize) -> Self {
        self.page_locked = bytes;
        self.admitted = None;
        self
    }

    /// A directory in which masters and optimizer state may live that host memory has no room for, up to `budget`. They
    /// are in files without a name, so that nothing is left there. What lives there is read for every promotion, and
    /// read and written for every step; it changes no bit.
    pub fn disk(mut self, dir: PathBuf, budget: ByteSize) -> Self {
        self.disk = Some(DiskSpec { dir, budget });
        self.admitted = None;
        self
    }

    /// The scheduling policy; Sharded-LRTF by default.
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = Chosen::Kind(policy);
        self
    }

    /// A scheduling policy of one's own. One that panics, chooses what cannot be claimed or holds devices back although
    /// nothing runs is dismissed, which the log says, and the run goes on with Sharded-LRTF: results depend on none.
    pub fn own_policy(mut self, policy: Box<dyn Policy>) -> Self {
        self.policy = Chosen::Own(policy);
        self
    }

    /// Whether the next shard task is promoted while one computes (double buffering); on by default.
    pub fn prefetch(mut self, on: bool) -> Self {
        self.prefetch = on;
        self
    }

    /// Where optimizers step; by default on the device where all stays there and the bits are the host's.
    pub fn optimizer_placement(mut self, placement: OptimizerPlacement) -> Self {
        self.placement = placement;
        self.admitted = None;
        self
    }

    /// When tasks with a file for it ([`TrainTask::checkpoint_to`]) are kept; by default every ten minutes.
    pub fn checkpoint_every(mut self, every: CheckpointEvery) -> Self {
        self.every = every;
        self
    }

    /// The seed of the random policy. Tasks have seeds of their own.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// A plan file, or a directory of them, to look into before a pilot pass is run.
    pub fn plans(mut self, path: PathBuf) -> Self {
        self.plans.path = Some(path);
        self.admitted = None;
        self
    }

    /// What decides costs and shows neither in the chains nor in the devices, such as a precision of products:
    /// part of every plan's fingerprint.
    pub fn config(mut self, config: impl Into<String>) -> Self {
        self.plans.config = config.into();
        self.admitted = None;
        self
    }

    /// What measures device memory; the counting allocator, where the program installed it, by default.
    pub fn probe(mut self, probe: Arc<dyn MemoryProbe>) -> Self {
        self.probe = probe;
        self.admitted = None;
        self
    }

    /// Ways to the devices' memory of one's own: `own` is given each device and the link that it has, which it may count,
    /// slow down, let fail, or replace. The pilot pass goes by the device's own.
    pub fn own_link(
        mut self,
        own: impl Fn(&DeviceSpec, Arc<dyn DeviceLink>) -> Arc<dyn DeviceLink> + Send + Sync + 'static,
    ) -> Self {
        self.own_link = Some(Box::new(own));
        self.admitted = None;
        self
    }

    /// A flag that stops the run at the end of the minibatches that have begun. A task has its own
    /// ([`TrainTask::stop_flag`]).
    pub fn stop_flag(mut self, stop: StopFlag) -> Self {
        self.stop = stop;
        self
    }

    /// Who hears what happens.
    pub fn observer(mut self, observer: Box<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Adds a task.
    pub fn submit(&mut self, task: TrainTask) -> Result<TaskId, EngineError> {
        if self.tasks.iter().any(|other| other.name == task.name) {
            return Err(EngineError::DuplicateTask { name: task.name });
        }
        task.spec.validate().map_err(EngineError::from).map_err(refused(&task.name))?;
        if let Some((first, path)) = self.other_with(&task, TrainTask::checkpoint_file) {
            return Err(EngineError::SameCheckpoint { first, second: task.name, path });
        }
        if let Some((first, path)) = self.other_with(&task, TrainTask::output_dir) {
            return Err(EngineError::SameOutput { first, second: task.name, path });
        }
        self.admitted = None;
        self.tasks.push(task);
        Ok(TaskId(self.tasks.len() - 1))
    }

    /// The task that has the same path as this one, and the path.
    fn other_with(&self, task: &TrainTask, of: fn(&TrainTask) -> Option<&Path>) -> Option<(String, PathBuf)> {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let path = of(task)?;
        let same = |other: &&TrainTask| of(other).map(absolute) == Some(absolute(path));
        self.tasks.iter().find(same).map(|other| (other.name.clone(), path.to_owned()))
    }

    /// Measures, cuts and adds up; trains nothing.
    pub fn admit(&mut self) -> Result<Admission, EngineError> {
        if let Some(admitted) = &self.admitted {
            return Ok(admitted.admission.clone());
        }
        let on_disk = Arc::new(DiskStore::new(Arc::new(DramStore::new())));
        let residence = Arc::new(ResidentStore::new(on_disk.clone()));
        let store: Arc<dyn TierStore> = residence.clone();
        let locked = PageLocked::new(self.page_locked);
        let device = |(i, spec): (usize, &DeviceSpec)| {
            let (spec, probe, own_link) = (spec.clone(), self.probe.clone(), self.own_link.as_deref());
            LogicalDevice::new(DeviceId(i), spec, store.clone(), probe, &locked, own_link)
        };
        let devices: Vec<LogicalDevice> =
            self.devices.iter().enumerate().map(device).collect::<Result<_, _>>()?;
        if let Some(other) = devices.iter().find(|other| other.model != devices[0].model) {
            let named = |device: &LogicalDevice| format!("{} ({})", device.spec.name, device.model);
            return Err(EngineError::MixedDevices { first: named(&devices[0]), other: named(other) });
        }
        let (budget, disk) = (self.host_memory.bytes(), self.disk.as_ref());
        let host = HostMemory { budget, disk, devices: devices.len() };
        let observer = RefCell::new(&mut self.observer);
        let tell = |task: &str, progress| {
            let told = guarded("an observer", || {
                observer.borrow_mut().observe(&RunEvent::Pilot { task, progress });
                Ok(())
            });
            if let Err(error) = told {
                tracing::error!("{error}: the pilot pass goes on");
            }
        };
        let admission = admit(&self.tasks, &devices, &host, &self.plans, self.placement, &tell)?;
        let identities = self.identities(&admission, &devices[0])?;
        let stays = |(i, task): (usize, &AdmittedTask)| task.optimizer.on_device().then_some(TaskId(i));
        let there = &devices[0].manager;
        let staying = admission.tasks.iter().enumerate().filter_map(stays);
        residence.settle(staying, there.shared_link(), there.budget().clone());
        let admitted = Admitted { admission, devices, store, residence, on_disk, disk: None, identities };
        Ok(self.admitted.insert(admitted).admission.clone())
    }

    /// Takes the space on the disk that masters are to live in, as [`run`](Self::run) does where nobody did before.
    ///
    /// # Errors
    /// As [`admit`](Self::admit), and [`SpillError::DiskRoom`](hydra_spill::SpillError::DiskRoom) where the disk has no
    /// room.
    pub fn make_room(&mut self) -> Result<(), EngineError> {
        self.admit()?;
        if let Some(admitted) = self.admitted.as_mut().filter(|admitted| admitted.disk.is_none()) {
            let Admitted { admission, on_disk, .. } = admitted;
            let there = self.disk.as_ref().filter(|_| admission.disk_bytes > 0);
            admitted.disk = Some(DiskTier::new(on_disk.clone(), there, &self.tasks, admission)?);
        }
        Ok(())
    }

    /// What each task's checkpoints say of it; refuses one that does not belong to its task.
    fn identities(
        &self,
        admission: &Admission,
        device: &LogicalDevice,
    ) -> Result<Vec<Option<Identity>>, EngineError> {
        let mut identities = Identities::default();
        let mut identity = |(task, admitted): (&TrainTask, &AdmittedTask)| {
            if task.checkpoint.is_none() && task.resume.is_none() {
                return Ok(None);
            }
            let identity = identities.of(task, device, &self.plans.config, &admitted.optimizer)?;
            if let Some(checkpoint) = &task.resume {
                checkpoint.state().identity.check(checkpoint.path(), &identity)?;
            }
            Ok(Some(identity))
        };
        let named = |(task, admitted): (&TrainTask, &AdmittedTask)| {
            identity((task, admitted)).map_err(refused(&task.name))
        };
        self.tasks.iter().zip(&admission.tasks).map(named).collect()
    }

    /// Trains every task and reports. A task that fails is set aside and reported; an error is returned only
    /// if the run could not start.
    pub fn run(mut self) -> Result<RunReport, EngineError> {
        self.make_room()?;
        for task in self.tasks.iter().filter(|task| !task.is_finished()) {
            let prepared = task.checkpoint_file().map_or(Ok(()), checkpoint::prepare);
            prepared.map_err(EngineError::from).map_err(refused(&task.name))?;
        }
        let Some(admitted) = self.admitted.take() else { return Err(EngineError::NoTask) };
        run::run(Setup {
            admitted,
            tasks: self.tasks,
            host_memory: self.host_memory,
            policy: self.policy,
            prefetch: self.prefetch,
            every: self.every,
            seed: self.seed,
            stop: self.stop,
            observer: self.observer,
        })
    }

    /// Evaluates a chain on a dataset in batches of `batch`, with the devices and options of this run.
    /// Tasks that were submitted are not run.
    pub fn evaluate(
        mut self,
        chain: Arc<Chain>,
        data: Arc<dyn Dataset>,
        batch: usize,
        seed: u64,
    ) -> Result<Evaluation, EngineError> {
        let optimizer = Sgd { lr: 0.0, momentum: 0.0, weight_decay: 0.0 };
        let spec = TrainSpec { seed, ..TrainSpec::new(optimizer, batch) };
        let mut task = TrainTask::new("evaluate", chain, data.clone(), spec).test(data);
        task.evaluate_only = true;
        self.tasks = vec![task];
        self.admitted = None;
        let report = self.run()?;
        let Some(task) = report.tasks.into_iter().next() else { return Err(EngineError::NoTask) };
        match (task.test, task.failure) {
            (Some(result), _) => Ok(result),
            (None, Some(source)) => Err(EngineError::Failed { task: task.name, source }),
            (None, None) => Err(EngineError::Stopped),
        }
    }
}
