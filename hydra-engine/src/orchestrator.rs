//! The face of the engine: submit tasks, admit them, run them.
//!
//! [`Orchestrator`] collects devices, settings and tasks. [`admit`](Orchestrator::admit) measures and cuts every model
//! and adds up the memory, so that a run that cannot fit is refused before it starts. The [`AdmittedRun`] that it returns
//! can only be started, which hands over to the event loop (`run/mod.rs`): one thread that alone decides, over one closed
//! enum of events.

use crate::admission::{
    AdmissionSettings, AdmittedTask, DiskSpec, DiskTier, Measurements, OptimizerPlacement, admit, identities,
};
use crate::ahead_of_time::Drawing;
use crate::checkpoint::CheckpointEvery;
use crate::control::RunControl;
use crate::device::{DeviceSpec, LogicalDevice};
use crate::error::{EngineError, guarded, refused};
use crate::observer::{Observer, RunEvent};
use crate::protocol::{Evaluation, StopFlag};
use crate::report::RunReport;
use crate::run::{AdmittedRun, PolicyChoice, RunSettings};
use crate::task::TaskInfo;
use crate::train_task::{EvaluationTask, TrainTask};
use hydra_core::optimizer::Sgd;
use hydra_core::{ByteSize, MemoryProbe, TaskId, TrainSpec};
use hydra_partition::{PartitionError, PartitionPlan, PilotProgress};
use hydra_sched::{Policy, PolicyKind};
use hydra_spill::{DeviceLink, DeviceResidentStore, DiskStore, DramStore, SharedStore, TierStore};
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

/// Trains many models on few devices.
pub struct Orchestrator {
    admission: AdmissionSettings,
    run: RunSettings,
    tasks: Vec<TrainTask>,
    shapes: Vec<TrainTask>,
}

impl std::fmt::Debug for Orchestrator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tasks: Vec<&str> = self.tasks.iter().map(|t| t.name.as_str()).collect();
        f.debug_struct("Orchestrator")
            .field("devices", &self.admission.devices)
            .field("tasks", &tasks)
            .finish_non_exhaustive()
    }
}

impl Orchestrator {
    /// A run on these devices, of which there must be at least one.
    ///
    /// # Errors
    /// [`EngineError::NoDevice`], and [`EngineError::MixedDevices`] where not all are of one kind.
    pub fn new(devices: Vec<DeviceSpec>) -> Result<Self, EngineError> {
        let admission = AdmissionSettings::new(devices)?;
        Ok(Self { admission, run: RunSettings::default(), tasks: Vec::new(), shapes: Vec::new() })
    }

    /// The host memory that masters, optimizer state, gradients and boundary activations may use.
    pub fn host_memory(mut self, bytes: ByteSize) -> Self {
        self.admission.host_memory = bytes;
        self
    }

    /// Takes so much of the host memory away, which the program needs beside the run.
    pub fn keep_host_memory(&mut self, bytes: ByteSize) {
        let left = self.admission.host_memory.bytes().saturating_sub(bytes.bytes());
        self.admission.host_memory = ByteSize(left);
    }

    /// The part of the host's memory that may be page-locked for NVIDIA's cards, 1 GiB by default: masters live
    /// there as far as it goes, and gradients are downloaded there. The rest is copied once more.
    pub fn page_locked_memory(mut self, bytes: ByteSize) -> Self {
        self.admission.page_locked = bytes;
        self
    }

    /// A directory in which masters and optimizer state may live that host memory has no room for, up to `budget`. They
    /// are in files without a name, so that nothing is left there. What lives there is read for every promotion, and
    /// read and written for every step; it changes no bit.
    pub fn disk(mut self, dir: PathBuf, budget: ByteSize) -> Self {
        self.admission.disk = Some(DiskSpec { dir, budget });
        self
    }

    /// Lets tasks wait: those for whose masters host memory has no room begin when others have ended, in the order of the
    /// policy, and at most `concurrent` tasks have begun at once. First values are drawn, and files of weights read, when a
    /// task begins. Without this all tasks begin at the start, and a run for which there is no room is refused.
    pub fn queued(mut self, concurrent: usize) -> Self {
        self.admission.concurrent = Some(concurrent.max(1));
        self
    }

    /// Leaves out of the run a task that can never fit, in the memory of a device or of the host, instead of refusing the run;
    /// [`RunReport::skipped`] says which and why. The run is refused if nothing is left of it.
    pub fn leave_out_what_never_fits(mut self) -> Self {
        self.admission.leave_out = true;
        self
    }

    /// The scheduling policy; Sharded-LRTF by default.
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.run.policy = PolicyChoice::Kind(policy);
        self
    }

    /// A scheduling policy of one's own. One that panics, chooses what cannot be claimed or holds devices back although
    /// nothing runs is dismissed, which the log says, and the run goes on with Sharded-LRTF: results depend on none.
    pub fn own_policy(mut self, policy: Box<dyn Policy>) -> Self {
        self.run.policy = PolicyChoice::Own(policy);
        self
    }

    /// Promotes the next shard task while one computes (double buffering), or does not; on by default.
    pub fn prefetch(mut self, on: bool) -> Self {
        self.run.prefetch = on;
        self
    }

    /// The place where optimizers step; by default the device where all tasks can be device-homed and the bits are the
    /// host's.
    pub fn optimizer_placement(mut self, placement: OptimizerPlacement) -> Self {
        self.admission.placement = placement;
        self
    }

    /// The interval of checkpoints, of tasks with a file for them ([`TrainTask::checkpoint_to`]);
    /// [`CheckpointEvery::Auto`] by default.
    pub fn checkpoint_every(mut self, every: CheckpointEvery) -> Self {
        self.run.every = every;
        self
    }

    /// The seed of the random policy. Tasks have seeds of their own.
    pub fn seed(mut self, seed: u64) -> Self {
        self.run.seed = seed;
        self
    }

    /// A plan file, or a directory of them, to look into before a pilot pass is run.
    pub fn plans(mut self, path: PathBuf) -> Self {
        self.admission.plans.path = Some(path);
        self
    }

    /// Options that decide costs and show neither in the chains nor in the devices, such as a precision of products: part of
    /// every plan's fingerprint.
    pub fn config(mut self, config: impl Into<String>) -> Self {
        self.admission.plans.config = config.into();
        self
    }

    /// Measurements to use and to add to: orchestrators that share them, on devices of one kind, measure a chain and a microbatch
    /// once.
    pub fn measurements(mut self, measurements: &Measurements) -> Self {
        self.admission.plans.measurements = measurements.clone();
        self
    }

    /// A flag that ends [`admit`](Self::admit) with [`EngineError::Stopped`], between two layers of a pilot pass.
    pub fn stop_admission(mut self, stop: StopFlag) -> Self {
        self.admission.stop = stop;
        self
    }

    /// The probe that measures device memory; the counting allocator, where the program installed it, by default.
    pub fn probe(mut self, probe: Arc<dyn MemoryProbe>) -> Self {
        self.admission.probe = probe;
        self
    }

    /// Links of one's own: `own` is given each device and the link that it has, which it may count, slow down, let fail, or
    /// replace. The pilot pass goes by the device's own.
    pub fn own_link(
        mut self,
        own: impl Fn(&DeviceSpec, Arc<dyn DeviceLink>) -> Arc<dyn DeviceLink> + Send + Sync + 'static,
    ) -> Self {
        self.admission.own_link = Some(Box::new(own));
        self
    }

    /// A flag that stops the run at the end of the minibatches that have begun. A task has its own
    /// ([`TrainTask::stop_flag`]).
    pub fn stop_flag(mut self, stop: StopFlag) -> Self {
        self.run.stop = stop;
        self
    }

    /// The control by which the run is steered while it goes on. Optimizers then step on the host where nothing else is
    /// asked for, and the run has all of its host memory, for tasks that are added. It ends when every task has, so one that
    /// stays paused keeps it from ending.
    pub fn control(mut self, control: &RunControl) -> Self {
        (self.admission.controlled, self.run.grows) = (true, true);
        self.run.control = Some(control.clone());
        self
    }

    /// The same for a run that nobody may ever steer: it is admitted as without a control, and a task that is added begins
    /// when others have left room for it.
    pub fn listen(mut self, control: &RunControl) -> Self {
        self.run.control = Some(control.clone());
        self
    }

    /// The observer that hears what happens, from the pilot passes on.
    pub fn observer(mut self, observer: Box<dyn Observer>) -> Self {
        self.run.observer = observer;
        self
    }

    /// Adds a task.
    pub fn submit(&mut self, task: TrainTask) -> Result<TaskId, EngineError> {
        self.check(&task)?;
        self.tasks.push(task);
        Ok(TaskId(self.tasks.len() - 1))
    }

    /// Has measured what a task needs that is not trained itself: tasks of its shape can be added while the run goes on
    /// ([`Command::Submit`](crate::Command::Submit) names it as what they are like).
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit).
    pub fn submit_shape(&mut self, task: TrainTask) -> Result<(), EngineError> {
        self.check(&task)?;
        self.shapes.push(task);
        Ok(())
    }

    fn check(&self, task: &TrainTask) -> Result<(), EngineError> {
        task.check_beside(self.tasks.iter().chain(&self.shapes))?;
        task.spec.validate().map_err(EngineError::from).map_err(refused(&task.name))
    }

    /// Measures and cuts every model and finds room for all of them; trains nothing. The observer hears how far pilot
    /// passes are.
    ///
    /// # Errors
    /// A device that cannot be had, a task that is refused, memory that does not suffice
    /// ([`EngineError::HostMemory`], [`EngineError::DiskMemory`]), and [`EngineError::Stopped`].
    pub fn admit(self) -> Result<AdmittedRun, EngineError> {
        let Self { admission: settings, run: mut run_settings, mut tasks, mut shapes } = self;
        let on_disk = Arc::new(DiskStore::new(Arc::new(DramStore::new())));
        let device_resident = Arc::new(DeviceResidentStore::new(on_disk.clone()));
        let store = Arc::new(SharedStore::new(device_resident.clone()));
        let tiers: Arc<dyn TierStore> = store.clone();
        let mut devices = settings.open_devices(&tiers)?;
        let drawing = Drawing::begin(&tasks, settings.idle_threads(&tasks));
        let told = pilot_progress(run_settings.observer.as_mut());
        let (admission, shaped) = admit((&tasks, &shapes), &devices, &settings, &told).map_err(stopped)?;
        drop(told);
        set_aside(&mut devices, admission.tasks.iter().chain(&shaped).map(|task| &*task.plan))?;
        let ahead_of_time = drawing.end();
        let stays = |task: &TrainTask| admission.skipped.iter().all(|left| left.name != task.name);
        tasks.retain(stays);
        shapes.retain(stays);
        let controlled = run_settings.control.is_some();
        let all = tasks.iter().chain(&shapes).zip(admission.tasks.iter().chain(&shaped));
        let mut identities = identities(all, &devices[0], &settings.plans.config, controlled)?;
        let of_shapes = identities.split_off(tasks.len());
        let shaped = shapes.into_iter().zip(shaped).zip(of_shapes).zip((tasks.len()..).map(TaskId));
        let shapes =
            shaped.map(|(((task, admitted), identity), id)| TaskInfo::new(id, task, admitted, identity));
        let shapes = shapes.collect();
        let on_device = |(i, task): (usize, &AdmittedTask)| task.optimizer.on_device().then_some(TaskId(i));
        let on_device = admission.tasks.iter().enumerate().filter_map(on_device);
        let manager = &devices[0].manager;
        device_resident.assign(on_device, manager.link().clone(), manager.budget().clone());
        let disk = DiskTier::new(on_disk, settings.disk, &tasks, &admission);
        let settings = run_settings;
        Ok(AdmittedRun {
            tasks,
            shapes,
            admission,
            devices,
            store,
            device_resident,
            disk,
            identities,
            ahead_of_time,
            settings,
        })
    }

    /// Admits the tasks, trains every one and reports. A task that fails is set aside and reported.
    ///
    /// # Errors
    /// Those for which the run could not start: of [`admit`](Self::admit) and of [`AdmittedRun::start`].
    pub fn run(self) -> Result<RunReport, EngineError> {
        self.admit()?.start()
    }

    /// Evaluates a chain on a dataset with the devices and options of this run. Tasks that were submitted are not run.
    pub fn evaluate(mut self, task: EvaluationTask) -> Result<Evaluation, EngineError> {
        let EvaluationTask { chain, data, batch, seed } = task;
        let optimizer = Sgd { lr: 0.0, momentum: 0.0, weight_decay: 0.0 };
        let spec = TrainSpec { seed, ..TrainSpec::new(optimizer, batch) };
        let mut task = TrainTask::new("evaluate", chain, data.clone(), spec).test(data);
        task.evaluate_only = true;
        self.tasks.clear();
        self.submit(task)?;
        let report = self.run()?;
        let Some(task) = report.tasks.into_iter().next() else { return Err(EngineError::NoTask) };
        match (task.test, task.failure) {
            (Some(result), _) => Ok(result),
            (None, Some(source)) => Err(EngineError::Failed { task: task.name, source }),
            (None, None) => Err(EngineError::Stopped),
        }
    }
}

/// Sets aside on devices what plans have found to stand there, and what they leave free.
fn set_aside<'a>(
    devices: &mut [LogicalDevice],
    plans: impl Iterator<Item = &'a PartitionPlan> + Clone,
) -> Result<(), EngineError> {
    let standing = plans.clone().map(|plan| plan.standing_bytes).max().unwrap_or(0);
    let spare = plans.map(|plan| plan.rules.spare()).max().unwrap_or(0);
    devices.iter_mut().try_for_each(|device| device.set_aside(standing, spare))
}

/// The error of an admission; that of a task whose pilot pass was stopped is that of the whole.
fn stopped(error: EngineError) -> EngineError {
    let cause = match &error {
        EngineError::Task { source, .. } => source,
        error => error,
    };
    match cause {
        EngineError::Partition(PartitionError::Stopped) => EngineError::Stopped,
        _ => error,
    }
}

/// Tells an observer how far pilot passes are. They go on if it panics, which the log says.
fn pilot_progress(observer: &mut dyn Observer) -> impl Fn(&str, PilotProgress) {
    let observer = RefCell::new(observer);
    move |task, progress| {
        let told = guarded("an observer", || {
            observer.borrow_mut().observe(&RunEvent::Pilot { task, progress });
            Ok(())
        });
        if let Err(error) = told {
            tracing::error!("{error}: the pilot pass goes on");
        }
    }
}
