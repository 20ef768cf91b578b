//! The disk as a tier of a run: its budget, its files, and the host memory that it works in.

use super::admit::{Admission, AdmittedTask};
use super::host_memory::DiskSpec;
use super::images::{best_bytes, master_bytes};
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, TaskId};
use hydra_spill::{Budget, BudgetError, DiskStore, ImageId, Reservation, SpillError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The disk of a run, and the host memory in which it is used.
pub(crate) struct DiskTier {
    pub store: Arc<DiskStore>,
    /// Host memory for what is read and written, but by the writer.
    pub working: Budget,
    /// Bytes of host memory for what the writer reads.
    pub writing: u64,
    /// The space for masters, from when it is reserved.
    pub budget: Option<Budget>,
    /// Space for the images of each task that are not there yet.
    rooms: Vec<Option<Reservation>>,
    /// Space for those that tasks have in common.
    shared: BTreeMap<ImageId, Reservation>,
    /// The directory in which space is to be reserved yet.
    wanted: Option<DiskSpec>,
}

impl DiskTier {
    /// The disk for these tasks, on which nothing is reserved.
    pub(crate) fn new(
        store: Arc<DiskStore>,
        spec: Option<DiskSpec>,
        tasks: &[TrainTask],
        admission: &Admission,
    ) -> Self {
        let writing = tasks.iter().zip(&admission.tasks).filter_map(largest_on_disk).max().unwrap_or(0);
        let working = ByteSize(admission.host_working_bytes.saturating_sub(writing));
        Self {
            store,
            working: Budget::new("host memory for masters on the disk", working),
            writing,
            budget: None,
            rooms: tasks.iter().map(|_| None).collect(),
            shared: BTreeMap::new(),
            wanted: spec.filter(|_| admission.disk_bytes > 0),
        }
    }

    /// The directory in which no space is reserved yet.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.wanted.as_ref().map(|wanted| &*wanted.dir)
    }

    /// Makes the files of the images on the disk, unless they exist. Where the disk has no room, none is made.
    pub(crate) fn reserve(&mut self, tasks: &[TrainTask], admission: &Admission) -> Result<(), EngineError> {
        let Some(DiskSpec { dir, budget }) = &self.wanted else { return Ok(()) };
        let budget = Budget::new(format!("disk `{}`", dir.display()), *budget);
        let rooms = admission.tasks.iter().map(|task| budget.reserve(task.disk_bytes, &task.name).map(Some));
        let rooms = rooms.collect::<Result<_, _>>().map_err(SpillError::from)?;
        let on_disk = admission.tasks.iter().flat_map(AdmittedTask::shared).filter(|(.., on_disk)| *on_disk);
        let shared: BTreeMap<ImageId, u64> = on_disk.map(|(_, image, _)| (image.id, image.bytes)).collect();
        let room = |(id, bytes): (&ImageId, &u64)| Ok((*id, budget.reserve(*bytes, id.to_string())?));
        let in_common = shared.iter().map(room).collect::<Result<_, BudgetError>>();
        let in_common = in_common.map_err(SpillError::from)?;
        let images = |(index, (task, admitted))| images_of(TaskId(index), task, admitted);
        let images = tasks.iter().zip(&admission.tasks).enumerate().flat_map(images).chain(shared);
        self.store.assign(dir, &self.working, &images.collect::<Vec<_>>())?;
        (self.rooms, self.shared, self.budget, self.wanted) = (rooms, in_common, Some(budget), None);
        Ok(())
    }

    /// Takes the space of an image that tasks have in common.
    pub(crate) fn take_shared_room(&mut self, image: ImageId) -> Option<Reservation> {
        self.shared.remove(&image)
    }

    /// Takes the space of a task that begins, or that will not.
    pub(crate) fn take_room(&mut self, task: TaskId) -> Option<Reservation> {
        self.rooms.get_mut(task.0)?.take()
    }
}

/// The bytes of the parameters of a task's largest image on the disk, which the writer reads at once.
fn largest_on_disk((task, admitted): (&TrainTask, &AdmittedTask)) -> Option<u64> {
    let images = task.chain.images().iter().zip(&admitted.on_disk);
    images.filter(|(_, on_disk)| **on_disk).map(|(layout, _)| layout.moment_bytes()).max()
}

/// The images of a task on the disk that are its own, each with the snapshot of its best parameters if it has one, and
/// their bytes.
fn images_of<'a>(
    id: TaskId,
    task: &'a TrainTask,
    admitted: &'a AdmittedTask,
) -> impl Iterator<Item = (ImageId, u64)> + 'a {
    let images = task.chain.images().iter().zip(&admitted.on_disk).enumerate();
    let own =
        move |(image, (_, on_disk)): &(usize, (_, &bool))| **on_disk && admitted.shared[*image].is_none();
    images.filter(own).flat_map(move |(image, (layout, _))| {
        let masters = ImageId::new(id, image);
        let copy = best_bytes(layout, &task.spec).map(|bytes| (masters.snapshot(), bytes));
        std::iter::once((masters, master_bytes(layout, &task.spec))).chain(copy)
    })
}
