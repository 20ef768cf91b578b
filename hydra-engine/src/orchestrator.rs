//! The entry point of the engine: submit tasks, admit them, run them.
//!
//! [`Orchestrator`] collects devices, settings and tasks. [`admit`](Orchestrator::admit) measures and cuts every
//! model and adds up the memory, so that a run that cannot fit is refused before it starts. It returns an
//! [`AdmittedRun`], which [`start`](AdmittedRun::start) runs in the event loop (`run/mod.rs`): one thread that makes
//! all decisions over one closed enum of events.

use crate::admission::{
    AdmissionSettings, DiskSpec, DiskTier, FrozenWeights, Measurements, OptimizerPlacement, admit, identities,
};
use crate::ahead_of_time::Drawing;
use crate::checkpoint::CheckpointEvery;
use crate::control::RunControl;
use crate::device::{DeviceSpec, LogicalDevice};
use crate::error::{EngineError, guarded, refused};
use crate::observer::{Observer, RunEvent};
use crate::protocol::{Evaluation, StopFlag};
use crate::report::{RunReport, TaskReport};
use crate::run::{AdmittedRun, PolicyChoice, RunSettings};
use crate::task::TaskInfo;
use crate::train_task::{EvaluationTask, Execution, RoundsTask, TrainTask};
use hydra_core::optimizer::Sgd;
use hydra_core::{ByteSize, Chain, Dataset, MemoryProbe, TaskId, TrainSpec};
use hydra_partition::{PartitionError, PartitionPlan, PilotProgress};
use hydra_sched::{Policy, PolicyKind};
use hydra_spill::alloc::ReturnsFreed;
use hydra_spill::{
    DeviceLink, DeviceResidentStore, DiskStore, DramStore, SharedStore, SpillError, TierStore,
};
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

/// Trains many models on few devices.
pub struct Orchestrator {
    admission: AdmissionSettings,
    run: RunSettings,
    tasks: Vec<TrainTask>,
    shapes: Vec<TrainTask>,
    /// The cut-points of evaluations, and the most devices that compute one at a time.
    cuts: Option<Vec<usize>>,
    most_devices: Option<usize>,
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
    /// Creates a run on these devices.
    ///
    /// # Errors
    /// [`EngineError::NoDevice`] if there is none, and [`EngineError::MixedDevices`] if they are of different kinds.
    pub fn new(devices: Vec<DeviceSpec>) -> Result<Self, EngineError> {
        let (admission, run) = (AdmissionSettings::new(devices)?, RunSettings::default());
        let (tasks, shapes) = (Vec::new(), Vec::new());
        Ok(Self { admission, run, tasks, shapes, cuts: None, most_devices: None })
    }

    /// Sets the host memory for masters, optimizer state, gradients and boundary activations.
    pub fn host_memory(mut self, bytes: ByteSize) -> Self {
        self.admission.host_memory = bytes;
        self
    }

    /// Subtracts `bytes` from the host memory, for other uses by the program.
    pub fn keep_host_memory(&mut self, bytes: ByteSize) {
        let left = self.admission.host_memory.bytes().saturating_sub(bytes.bytes());
        self.admission.host_memory = ByteSize(left);
    }

    /// Sets the most host memory that may be page-locked for NVIDIA GPUs, 1 GiB by default. Masters are page-locked
    /// up to this limit, and gradients are downloaded into page-locked memory; the rest takes an additional copy.
    pub fn page_locked_memory(mut self, bytes: ByteSize) -> Self {
        self.admission.page_locked = bytes;
        self
    }

    /// Allows masters and optimizer state that do not fit in host memory to be stored in `dir`, up to `budget`. The
    /// files are unlinked, so nothing is left there. Data on the disk is read for every promotion, and read and
    /// written for every step; results are the same bit for bit.
    pub fn disk(mut self, dir: PathBuf, budget: ByteSize) -> Self {
        self.admission.disk = Some(DiskSpec { dir, budget });
        self
    }

    /// Allows tasks to be queued for memory: at most `concurrent` tasks run at the same time, and a task whose
    /// masters do not fit in host memory starts when others have ended, in the order of the policy. Its initial
    /// weights are drawn or read when it starts. Without this setting all tasks start at the beginning, and a run
    /// that does not fit is refused.
    pub fn queued(mut self, concurrent: usize) -> Self {
        self.admission.concurrent = Some(concurrent.max(1));
        self
    }

    /// Skips a task that can never fit in the memory of a device or of the host, instead of refusing the run;
    /// [`RunReport::skipped`] lists the tasks and reasons. The run is refused if no task remains.
    pub fn leave_out_what_never_fits(mut self) -> Self {
        self.admission.leave_out = true;
        self
    }

    /// Sets the scheduling policy; Sharded-LRTF by default.
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.run.policy = PolicyChoice::Kind(policy);
        self
    }

    /// Sets a custom scheduling policy. If it panics, chooses a task that cannot be claimed, or holds devices back
    /// although nothing runs, it is replaced by Sharded-LRTF and the log reports this. Results do not depend on the
    /// policy.
    pub fn own_policy(mut self, policy: Box<dyn Policy>) -> Self {
        self.run.policy = PolicyChoice::Own(policy);
        self
    }

    /// Sets whether the next shard task is promoted while one computes (double buffering); on by default.
    pub fn prefetch(mut self, on: bool) -> Self {
        self.run.prefetch = on;
        self
    }

    /// Sets where optimizers step. By default on a GPU for the masters that can be resident there if the results are
    /// bit-exact with the host's ([`OptimizerPlacement::Auto`]).
    pub fn optimizer_placement(mut self, placement: OptimizerPlacement) -> Self {
        self.admission.placement = placement;
        self
    }

    /// Sets where frozen weights are: by default in host memory if everything fits there, else in the files that have
    /// them ([`WeightSource::spans`](hydra_core::WeightSource::spans)), from which they are then read for every promotion.
    pub fn frozen_weights(mut self, frozen: FrozenWeights) -> Self {
        self.admission.frozen = frozen;
        self
    }

    /// Sets the interval of checkpoints, for tasks with a checkpoint file ([`TrainTask::checkpoint_to`]);
    /// [`CheckpointEvery::Auto`] by default.
    pub fn checkpoint_every(mut self, every: CheckpointEvery) -> Self {
        self.run.every = every;
        self
    }

    /// Sets the seed of the random policy. Tasks have their own seeds.
    pub fn seed(mut self, seed: u64) -> Self {
        self.run.seed = seed;
        self
    }

    /// Sets a plan file or directory that is searched before a pilot pass runs.
    pub fn plans(mut self, path: PathBuf) -> Self {
        self.admission.plans.path = Some(path);
        self
    }

    /// Sets options that affect costs and are visible neither in the chains nor in the devices, such as the precision
    /// of matrix products. They are part of every plan's fingerprint.
    pub fn config(mut self, config: impl Into<String>) -> Self {
        self.admission.plans.config = config.into();
        self
    }

    /// Shares measurements: orchestrators that share them, on devices of one kind, measure each chain and microbatch
    /// once.
    pub fn measurements(mut self, measurements: &Measurements) -> Self {
        self.admission.plans.measurements = measurements.clone();
        self
    }

    /// Sets a flag that makes [`admit`](Self::admit) return [`EngineError::Stopped`] between two layers of a pilot
    /// pass.
    pub fn stop_admission(mut self, stop: StopFlag) -> Self {
        self.admission.stop = stop;
        self
    }

    /// Sets the probe that measures device memory. The default is the counting allocator, if the program has
    /// installed it.
    pub fn probe(mut self, probe: Arc<dyn MemoryProbe>) -> Self {
        self.admission.probe = probe;
        self
    }

    /// Wraps or replaces the links of devices: `own` gets each device and its link and returns the link to use, for
    /// example to count, slow down or fail transfers. Pilot passes use the device's own link.
    pub fn own_link(
        mut self,
        own: impl Fn(&DeviceSpec, Arc<dyn DeviceLink>) -> Arc<dyn DeviceLink> + Send + Sync + 'static,
    ) -> Self {
        self.admission.own_link = Some(Box::new(own));
        self
    }

    /// Sets a flag that stops the run at the end of the current minibatches. Each task has its own flag too
    /// ([`TrainTask::stop_flag`]).
    pub fn stop_flag(mut self, stop: StopFlag) -> Self {
        self.run.stop = stop;
        self
    }

    /// Sets the run control through which commands reach the run. Optimizers then step on the host unless set
    /// otherwise, and the run takes all of its host memory, for tasks that are added. The run ends when every task
    /// has ended, so a paused task keeps it open.
    pub fn control(mut self, control: &RunControl) -> Self {
        (self.admission.controlled, self.run.grows) = (true, true);
        self.run.control = Some(control.clone());
        self
    }

    /// Like [`control`](Self::control), for a run that may never get a command: it is admitted as without a control,
    /// and an added task starts when others have freed enough memory.
    pub fn listen(mut self, control: &RunControl) -> Self {
        self.run.control = Some(control.clone());
        self
    }

    /// Sets the observer of all events, from the pilot passes on.
    pub fn observer(mut self, observer: Box<dyn Observer>) -> Self {
        self.run.observer = observer;
        self
    }

    /// Sets the cut-points of evaluations, as [`TrainTask::cuts`] does for a task.
    pub fn evaluation_cuts(self, cuts: Vec<usize>) -> Self {
        Self { cuts: Some(cuts), ..self }
    }

    /// Limits the devices that compute an evaluation at a time, as [`TrainTask::most_devices`] does for a task.
    pub fn evaluation_devices(self, most: usize) -> Self {
        Self { most_devices: Some(most.max(1)), ..self }
    }

    /// Adds a task.
    pub fn submit(&mut self, task: TrainTask) -> Result<TaskId, EngineError> {
        self.check(&task)?;
        self.tasks.push(task);
        Ok(TaskId(self.tasks.len() - 1))
    }

    /// Adds the shape of a task that is measured but not trained: tasks of this shape can be added during the run
    /// ([`Command::Submit`](crate::Command::Submit) names it in `like`).
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit).
    pub fn submit_shape(&mut self, task: TrainTask) -> Result<(), EngineError> {
        self.check(&task)?;
        self.shapes.push(task);
        Ok(())
    }

    fn check(&self, task: &TrainTask) -> Result<(), EngineError> {
        task.check_conflicts(self.tasks.iter().chain(&self.shapes))?;
        task.spec.validate().map_err(EngineError::from).map_err(refused(&task.name))
    }

    /// Measures and cuts every model and fits all of them into memory; trains nothing. The observer receives the
    /// progress of pilot passes.
    ///
    /// # Errors
    /// A device that cannot be opened, a task that is refused, insufficient memory ([`EngineError::HostMemory`],
    /// [`EngineError::DiskMemory`]), and [`EngineError::Stopped`].
    pub fn admit(self) -> Result<AdmittedRun, EngineError> {
        let Self { admission: settings, run: mut run_settings, mut tasks, mut shapes, .. } = self;
        let returns_freed = ReturnsFreed::start();
        let on_disk = Arc::new(DiskStore::new(Arc::new(DramStore::new())));
        let device_resident = Arc::new(DeviceResidentStore::new(on_disk.clone()));
        let store = Arc::new(SharedStore::new(device_resident.clone()));
        let tiers: Arc<dyn TierStore> = store.clone();
        let mut devices = settings.open_devices(&tiers)?;
        let drawing = Drawing::begin(&tasks, settings.idle_threads(&tasks));
        let on_progress = pilot_progress(run_settings.observer.as_mut());
        let (admission, shaped) =
            admit((&tasks, &shapes), &devices, &settings, &on_progress).map_err(stopped)?;
        drop(on_progress);
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
        let manager = &devices[0].manager;
        let bytes = admission.resident_bytes();
        let reserved = manager.budget().reserve(bytes, "resident masters").map_err(SpillError::from)?;
        let buffers = admission.resident_buffers().into_keys();
        device_resident.assign(buffers, manager.link().clone(), reserved);
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
            returns_freed,
        })
    }

    /// Admits the tasks, trains every one and returns the report. A task that fails is reported as failed; the others
    /// go on.
    ///
    /// # Errors
    /// Errors that prevent the start: those of [`admit`](Self::admit) and of [`AdmittedRun::start`].
    pub fn run(self) -> Result<RunReport, EngineError> {
        self.admit()?.start()
    }

    /// Evaluates a chain on a dataset with the devices and options of this run. Submitted tasks are not run.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), and that of an evaluation that failed or was stopped.
    pub fn evaluate(self, task: EvaluationTask) -> Result<Evaluation, EngineError> {
        Ok(self.evaluate_and_report(task)?.0)
    }

    /// Like [`evaluate`](Self::evaluate), with the report of the run, which has the time and the bytes that it took.
    ///
    /// # Errors
    /// Those of `evaluate`.
    pub fn evaluate_and_report(
        mut self,
        task: EvaluationTask,
    ) -> Result<(Evaluation, RunReport), EngineError> {
        let EvaluationTask { chain, data, batch, seed } = task;
        self.tasks.clear();
        self.submit(self.evaluation("evaluate", chain, data, (batch, seed)))?;
        let mut report = self.run()?;
        let task = report.tasks.first_mut().ok_or(EngineError::NoTask)?;
        match task.test.take() {
            Some(result) => Ok((result, report)),
            None => Err(unfinished(report.tasks.swap_remove(0))),
        }
    }

    /// Evaluates chains in rounds, until none has another round. What each shard promotes serves all items of a round. The
    /// results are those that the data receives; the report is that of the run. Submitted tasks are not run.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), and that of the first task that failed or was stopped.
    pub fn evaluate_in_rounds(mut self, tasks: Vec<RoundsTask>) -> Result<RunReport, EngineError> {
        self.tasks.clear();
        for RoundsTask { name, chain, data, seed } in tasks {
            let task = self.evaluation(&name, chain.clone(), data.clone(), (1, seed));
            self.submit(TrainTask { test: None, ..task.rounds(chain, data) })?;
        }
        let mut report = self.run()?;
        match report.tasks.iter().position(|task| task.test.is_none()) {
            Some(task) => Err(unfinished(report.tasks.swap_remove(task))),
            None => Ok(report),
        }
    }

    /// A task that evaluates a chain on data.
    fn evaluation(
        &self,
        name: &str,
        chain: Arc<Chain>,
        data: Arc<dyn Dataset>,
        (batch, seed): (usize, u64),
    ) -> TrainTask {
        let optimizer = Sgd { lr: 0.0, momentum: 0.0, weight_decay: 0.0 };
        let spec = TrainSpec { seed, ..TrainSpec::new(optimizer, batch) };
        let task = TrainTask::new(name, chain, data.clone(), spec).test(data);
        let (cuts, most_devices) = (self.cuts.clone(), self.most_devices);
        let execution = Execution { cuts, most_devices, ..task.execution };
        TrainTask { evaluate_only: true, execution, ..task }
    }
}

/// The failure of a task whose evaluation did not end.
fn unfinished(report: TaskReport) -> EngineError {
    match report.failure {
        Some(source) => EngineError::Failed { task: report.name, source },
        None => EngineError::Stopped,
    }
}

/// Reserves on devices the standing bytes and the margin of the plans.
fn set_aside<'a>(
    devices: &mut [LogicalDevice],
    plans: impl Iterator<Item = &'a PartitionPlan> + Clone,
) -> Result<(), EngineError> {
    let standing = plans.clone().map(|plan| plan.standing_bytes).max().unwrap_or(0);
    let spare = plans.map(|plan| plan.rules.spare()).max().unwrap_or(0);
    devices.iter_mut().try_for_each(|device| device.set_aside(standing, spare))
}

/// Turns the error of a task whose pilot pass was stopped into [`EngineError::Stopped`].
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

/// Reports the progress of pilot passes to an observer. If it panics, the passes go on and the log reports it.
fn pilot_progress(observer: &mut dyn Observer) -> impl Fn(&str, PilotProgress) {
    let observer = RefCell::new(observer);
    move |task, progress| {
        let result = guarded("an observer", || {
            observer.borrow_mut().observe(&RunEvent::Pilot { task, progress });
            Ok(())
        });
        if let Err(error) = result {
            tracing::error!("{error}: the pilot pass goes on");
        }
    }
}
