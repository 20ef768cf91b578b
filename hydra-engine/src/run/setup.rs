//! An admitted run: everything that the event loop starts from.

use crate::admission::{Admission, DiskTier};
use crate::ahead_of_time::AheadOfTimeInit;
use crate::checkpoint::{self, CheckpointEvery, Identity};
use crate::control::RunControl;
use crate::device::LogicalDevice;
use crate::error::{EngineError, refused};
use crate::observer::{Observer, Silent};
use crate::protocol::StopFlag;
use crate::report::RunReport;
use crate::task::TaskInfo;
use crate::train_task::TrainTask;
use hydra_sched::{Policy, PolicyKind};
use hydra_spill::alloc::ReturnsFreed;
use hydra_spill::{DeviceResidentStore, SharedStore};
use std::fmt;
use std::sync::Arc;

/// The chosen policy.
pub(crate) enum PolicyChoice {
    Kind(PolicyKind),
    Own(Box<dyn Policy>),
}

/// The settings of a run that admission does not depend on.
pub(crate) struct RunSettings {
    pub policy: PolicyChoice,
    pub prefetch: bool,
    pub every: CheckpointEvery,
    pub seed: u64,
    pub stop: StopFlag,
    pub control: Option<RunControl>,
    /// True if the run takes all of its host memory, for tasks that are added.
    pub grows: bool,
    pub observer: Box<dyn Observer>,
}

impl Default for RunSettings {
    fn default() -> Self {
        Self {
            policy: PolicyChoice::Kind(PolicyKind::default()),
            prefetch: true,
            every: CheckpointEvery::default(),
            seed: 0,
            stop: StopFlag::new(),
            control: None,
            grows: false,
            observer: Box::new(Silent),
        }
    }
}

/// A run that fits and has not started. Its devices are open.
pub struct AdmittedRun {
    pub(crate) tasks: Vec<TrainTask>,
    /// Shapes of tasks that may be added later; they are not tasks of the run.
    pub(crate) shapes: Vec<TaskInfo>,
    pub(crate) admission: Admission,
    pub(crate) devices: Vec<LogicalDevice>,
    pub(crate) store: Arc<SharedStore>,
    pub(crate) device_resident: Arc<DeviceResidentStore>,
    pub(crate) disk: DiskTier,
    /// The identity of each task that has checkpoints.
    pub(crate) identities: Vec<Option<Identity>>,
    /// Initial weights drawn during admission.
    pub(crate) ahead_of_time: Arc<AheadOfTimeInit>,
    pub(crate) settings: RunSettings,
    /// Pilot passes and initial weights use memory that training does not use again.
    pub(crate) returns_freed: ReturnsFreed,
}

impl fmt::Debug for AdmittedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdmittedRun").field("admission", &self.admission).finish_non_exhaustive()
    }
}

impl AdmittedRun {
    /// The memory of the run.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Sets the observer of the run, in place of the one that received the pilot passes.
    pub fn observer(mut self, observer: Box<dyn Observer>) -> Self {
        self.settings.observer = observer;
        self
    }

    /// Reserves the disk space for masters. [`start`](Self::start) does this if it was not done before.
    ///
    /// # Errors
    /// [`SpillError::DiskHeadroom`](hydra_spill::SpillError::DiskHeadroom) if the disk has too little space. The call can be
    /// repeated.
    pub fn reserve_disk(&mut self) -> Result<(), EngineError> {
        self.disk.reserve(&self.tasks, &self.admission)
    }

    /// Trains every task and returns the report. A task that fails is reported as failed; the others go on.
    ///
    /// # Errors
    /// Errors that prevent the start: those of [`reserve_disk`](Self::reserve_disk), and a checkpoint file or thread
    /// that cannot be created.
    pub fn start(mut self) -> Result<RunReport, EngineError> {
        self.reserve_disk()?;
        for task in self.tasks.iter().filter(|task| !task.is_finished()) {
            let prepared = task.checkpoint_file().map_or(Ok(()), checkpoint::prepare);
            prepared.map_err(EngineError::from).map_err(refused(&task.name))?;
        }
        super::run(self)
    }
}
