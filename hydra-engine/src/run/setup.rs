//! A run that was admitted: all that the event loop starts from.

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
use hydra_spill::{DeviceResidentStore, SharedStore};
use std::fmt;
use std::sync::Arc;

/// The policy that was chosen.
pub(crate) enum PolicyChoice {
    Kind(PolicyKind),
    Own(Box<dyn Policy>),
}

/// The settings of a run on which admission does not depend.
pub(crate) struct RunSettings {
    pub policy: PolicyChoice,
    pub prefetch: bool,
    pub every: CheckpointEvery,
    pub seed: u64,
    pub stop: StopFlag,
    pub control: Option<RunControl>,
    /// True if it has all of its host memory, for tasks that are added.
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

/// A run that fits, and has not started. Its devices are open.
pub struct AdmittedRun {
    pub(crate) tasks: Vec<TrainTask>,
    /// What tasks may be like that are added later; none of these is a task of the run.
    pub(crate) shapes: Vec<TaskInfo>,
    pub(crate) admission: Admission,
    pub(crate) devices: Vec<LogicalDevice>,
    pub(crate) store: Arc<SharedStore>,
    pub(crate) device_resident: Arc<DeviceResidentStore>,
    pub(crate) disk: DiskTier,
    /// The identity of each task that has checkpoints.
    pub(crate) identities: Vec<Option<Identity>>,
    /// First values that were drawn meanwhile.
    pub(crate) ahead_of_time: Arc<AheadOfTimeInit>,
    pub(crate) settings: RunSettings,
}

impl fmt::Debug for AdmittedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdmittedRun").field("admission", &self.admission).finish_non_exhaustive()
    }
}

impl AdmittedRun {
    /// The needs of the run.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Hears what happens from here on, in the place of who heard the pilot passes.
    pub fn observer(mut self, observer: Box<dyn Observer>) -> Self {
        self.settings.observer = observer;
        self
    }

    /// Reserves the space on the disk that masters are to live in, as [`start`](Self::start) does where nobody did
    /// before.
    ///
    /// # Errors
    /// [`SpillError::DiskHeadroom`](hydra_spill::SpillError::DiskRoom) where the disk has no room; it can be tried again.
    pub fn reserve_disk(&mut self) -> Result<(), EngineError> {
        self.disk.reserve(&self.tasks, &self.admission)
    }

    /// Trains every task and reports. A task that fails is set aside and reported.
    ///
    /// # Errors
    /// Those for which the run could not start: as [`reserve_disk`](Self::reserve_disk), and a checkpoint's file or a
    /// thread that cannot be made.
    pub fn start(mut self) -> Result<RunReport, EngineError> {
        self.reserve_disk()?;
        for task in self.tasks.iter().filter(|task| !task.is_finished()) {
            let prepared = task.checkpoint_file().map_or(Ok(()), checkpoint::prepare);
            prepared.map_err(EngineError::from).map_err(refused(&task.name))?;
        }
        super::run(self)
    }
}
