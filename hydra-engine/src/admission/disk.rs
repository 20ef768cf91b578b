//! The disk tier of a run: its budget, its files, and the host memory that it works in.

use super::admit::{Admission, AdmittedTask, Storage};
use super::buffers::{best_bytes, master_bytes, read_bytes, writes_whole};
use super::host_memory::DiskSpec;
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, Encoding, ParamBufferLayout, TaskId};
use hydra_spill::{Budget, BudgetError, DiskStore, ParamBufferId, Reservation, SpillError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The disk of a run and the host memory through which it is used.
pub(crate) struct DiskTier {
    pub store: Arc<DiskStore>,
    /// Host memory for reads and writes other than those of the writer.
    pub working: Budget,
    /// Host bytes for the reads of the writer.
    pub writing: u64,
    /// The budget of the disk, once space is reserved.
    pub budget: Option<Budget>,
    /// For each task, the disk space of its buffers that are not written yet.
    spaces: Vec<Option<Reservation>>,
    /// Disk space of buffers that tasks share.
    shared: BTreeMap<ParamBufferId, Reservation>,
    /// The directory and budget, until space is reserved.
    wanted: Option<DiskSpec>,
}

impl DiskTier {
    /// Creates the tier for these tasks without reserving disk space.
    pub(crate) fn new(
        store: Arc<DiskStore>,
        spec: Option<DiskSpec>,
        tasks: &[TrainTask],
        admission: &Admission,
    ) -> Self {
        let writing = tasks.iter().zip(&admission.tasks).filter_map(largest_read).max().unwrap_or(0);
        let working = ByteSize(admission.host_working_bytes.saturating_sub(writing));
        Self {
            store,
            working: Budget::new("host memory for masters on the disk", working),
            writing,
            budget: None,
            spaces: tasks.iter().map(|_| None).collect(),
            shared: BTreeMap::new(),
            wanted: spec.filter(|_| admission.disk_bytes > 0),
        }
    }

    /// The directory, while no space is reserved in it.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.wanted.as_ref().map(|wanted| &*wanted.dir)
    }

    /// Creates the files of the buffers on the disk, unless they exist. If the disk has too little space, none is
    /// created.
    pub(crate) fn reserve(&mut self, tasks: &[TrainTask], admission: &Admission) -> Result<(), EngineError> {
        let Some(DiskSpec { dir, budget }) = &self.wanted else { return Ok(()) };
        let budget = Budget::new(format!("disk `{}`", dir.display()), *budget);
        let space = |task: &AdmittedTask| budget.reserve(task.storage.disk_bytes, &task.name).map(Some);
        let spaces = admission.tasks.iter().map(space).collect::<Result<_, _>>().map_err(SpillError::from)?;
        let shared = admission.tasks.iter().flat_map(|task| task.storage.shared_on_disk());
        let shared: BTreeMap<ParamBufferId, u64> = shared.map(|buffer| (buffer.id, buffer.bytes)).collect();
        let space = |(id, bytes): (&ParamBufferId, &u64)| Ok((*id, budget.reserve(*bytes, id.to_string())?));
        let shared_space = shared.iter().map(space).collect::<Result<_, BudgetError>>();
        let shared_space = shared_space.map_err(SpillError::from)?;
        let buffers = |(index, (task, admitted))| buffers_of(TaskId(index), task, admitted);
        let buffers = tasks.iter().zip(&admission.tasks).enumerate().flat_map(buffers).chain(shared);
        self.store.assign(dir, &self.working, &buffers.collect::<Vec<_>>())?;
        (self.spaces, self.shared, self.budget, self.wanted) = (spaces, shared_space, Some(budget), None);
        Ok(())
    }

    /// Takes the space of a buffer that tasks share.
    pub(crate) fn take_shared_space(&mut self, buffer: ParamBufferId) -> Option<Reservation> {
        self.shared.remove(&buffer)
    }

    /// Takes the space of a task that starts, or that never will.
    pub(crate) fn take_space(&mut self, task: TaskId) -> Option<Reservation> {
        self.spaces.get_mut(task.0)?.take()
    }
}

/// The most bytes that the writer has in memory of a buffer of a task that is not in host memory as `f32`: it is on the
/// disk, read in place, or stored in a narrower type.
fn largest_read((task, admitted): (&TrainTask, &AdmittedTask)) -> Option<u64> {
    let elsewhere = admitted.storage.on_disk.iter().zip(&admitted.storage.in_place);
    let buffers = task.chain.buffers().iter().zip(elsewhere.map(|(on_disk, in_place)| *on_disk || *in_place));
    let is_read =
        |(layout, elsewhere): &(&ParamBufferLayout, bool)| *elsewhere || layout.encoding != Encoding::Masters;
    buffers.filter(is_read).map(|(layout, _)| read_bytes(layout, writes_whole(task))).max()
}

/// The unshared buffers of a task on the disk with their bytes; the snapshot of a buffer's best parameters follows
/// it.
fn buffers_of<'a>(
    id: TaskId,
    task: &'a TrainTask,
    admitted: &'a AdmittedTask,
) -> impl Iterator<Item = (ParamBufferId, u64)> + 'a {
    let Storage { shared, on_disk, .. } = &admitted.storage;
    let own = move |buffer: usize| on_disk[buffer] && shared[buffer].is_none();
    let buffers = task.chain.buffers().iter().enumerate().filter(move |(buffer, _)| own(*buffer));
    buffers.flat_map(move |(buffer, layout)| {
        let masters = ParamBufferId::new(id, buffer);
        let copy = best_bytes(layout, &task.spec).map(|bytes| (masters.snapshot(), bytes));
        std::iter::once((masters, master_bytes(layout, &task.spec))).chain(copy)
    })
}
