//! The disk as a tier of a run: its budget, its files, and the host memory that it works in.

use super::admit::{Admission, AdmittedTask};
use super::host_memory::DiskSpec;
use super::images::{best_bytes, master_bytes, stored_bytes};
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, TaskId};
use hydra_spill::{Budget, DiskStore, ImageId, Reservation, SpillError};
use std::sync::Arc;

/// What a run has on the disk.
pub(crate) struct DiskTier {
    pub store: Arc<DiskStore>,
    /// Host memory for what is read and written, but by the writer.
    pub working: Budget,
    /// Bytes of host memory for what the writer reads.
    pub writing: u64,
    /// For each task, the disk's bytes of its images that are not there yet.
    rooms: Vec<Option<Reservation>>,
}

impl DiskTier {
    /// Makes the files in which the images of these tasks live that do not stay in host memory.
    pub(crate) fn new(
        store: Arc<DiskStore>,
        spec: Option<&DiskSpec>,
        tasks: &[TrainTask],
        admission: &Admission,
    ) -> Result<Self, EngineError> {
        let writing = tasks.iter().zip(&admission.tasks).flat_map(largest_on_disk).max().unwrap_or(0);
        let working = ByteSize(admission.host_working_bytes.saturating_sub(writing));
        let working = Budget::new("host memory for masters on the disk", working);
        let mut rooms: Vec<Option<Reservation>> = tasks.iter().map(|_| None).collect();
        if let Some(DiskSpec { dir, budget }) = spec {
            let budget = Budget::new(format!("disk `{}`", dir.display()), *budget);
            let mut images = Vec::new();
            for (index, (task, admitted)) in tasks.iter().zip(&admission.tasks).enumerate() {
                let room = budget.reserve(admitted.disk_bytes, &task.name).map_err(SpillError::from)?;
                rooms[index] = Some(room);
                images.extend(images_of(TaskId(index), task, admitted));
            }
            store.settle(dir, &working, &images)?;
        }
        Ok(Self { store, working, writing, rooms })
    }

    /// The disk's part of an image that comes there now.
    pub(crate) fn room(&mut self, task: TaskId, bytes: u64) -> Result<Reservation, EngineError> {
        let room = self.rooms[task.0].as_mut().map(|room| room.split(bytes));
        Ok(room.ok_or(SpillError::ImageMissing { image: ImageId::new(task, 0) })?)
    }

    /// Gives up what a task has not taken.
    pub(crate) fn release(&mut self, task: TaskId) {
        self.rooms[task.0] = None;
    }
}

/// The bytes of the largest image of a task that lives on the disk: what the writer has there at once.
fn largest_on_disk((task, admitted): (&TrainTask, &AdmittedTask)) -> Option<u64> {
    let images = task.chain.images().iter().zip(&admitted.on_disk);
    images.filter(|(_, on_disk)| **on_disk).map(|(layout, _)| stored_bytes(layout, &task.spec)).max()
}

/// The images of a task that live on the disk, each with its copy where one is kept, and their bytes.
fn images_of<'a>(
    id: TaskId,
    task: &'a TrainTask,
    admitted: &'a AdmittedTask,
) -> impl Iterator<Item = (ImageId, u64)> + 'a {
    let images = task.chain.images().iter().zip(&admitted.on_disk).enumerate();
    images.filter(|(_, (_, on_disk))| **on_disk).flat_map(move |(image, (layout, _))| {
        let masters = ImageId::new(id, image);
        let copy = best_bytes(layout, &task.spec).map(|bytes| (masters.best(), bytes));
        std::iter::once((masters, master_bytes(layout, &task.spec))).chain(copy)
    })
}
