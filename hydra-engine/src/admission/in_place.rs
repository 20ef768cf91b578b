//! Chooses the frozen buffers that are read in place, from the files that their weight sources name, instead of being
//! stored.

use super::cut::CutTask;
use super::placement::Placement;
use crate::train_task::TrainTask;
use hydra_core::Encoding;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Where frozen weights are while a run trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrozenWeights {
    /// In host memory if everything fits there, else in the files that have them.
    #[default]
    Auto,
    /// In host memory, or on the disk that the run may use.
    Memory,
    /// In the files that have them: they are read for every promotion, and take no host memory.
    Files,
}

/// Returns whether the values of a buffer can be read in place: it is frozen, and files have its values in the type that
/// is promoted, in the order of the buffer.
fn can_be_read(task: &TrainTask, buffer: usize) -> bool {
    let (chain, layout) = (&task.chain, &task.chain.buffers()[buffer]);
    // Files are little-endian, and promotions are of native order.
    let same_order = cfg!(target_endian = "little");
    let source = chain.source();
    same_order
        && !layout.trained
        && layout.encoding != Encoding::Nf4
        && source.float_type(chain, buffer) == layout.float
        && source.spans(chain, buffer).is_some()
}

/// Returns whether a task has buffers that can be read in place.
pub(super) fn has_readable(cut: &[CutTask<'_>]) -> bool {
    let mut unfinished = cut.iter().map(|cut| cut.task).filter(|task| !task.is_finished());
    unfinished.any(|task| (0..task.chain.buffers().len()).any(|buffer| can_be_read(task, buffer)))
}

/// Sets which buffers of the tasks, and of the shapes of tasks that may be added, are read in place: all that can be, or
/// none. Buffers that are resident on the device, and those of finished tasks, are not.
pub(super) fn choose<'a>(
    cut: &mut [CutTask<'a>],
    shaped: &mut [CutTask<'a>],
    placed: &[Placement],
    in_place: bool,
) {
    let placed = placed.iter().map(Some).chain(std::iter::repeat(None));
    for (cut, placed) in cut.iter_mut().chain(&mut *shaped).zip(placed) {
        let may_be = in_place && !cut.task.is_finished();
        let is_resident = |buffer| placed.is_some_and(|on| on.is_resident(buffer));
        let buffers = 0..cut.task.chain.buffers().len();
        let can_be = |buffer| may_be && !is_resident(buffer) && can_be_read(cut.task, buffer);
        cut.in_place = buffers.map(can_be).collect();
    }
    // A buffer that tasks share is in one place.
    let all = || cut.iter().chain(&*shaped);
    let buffers = all().flat_map(|cut| cut.shared.iter().zip(&cut.in_place));
    let stored: BTreeSet<_> = buffers.filter_map(|(id, in_place)| id.filter(|_| !in_place)).collect();
    for cut in cut.iter_mut().chain(shaped) {
        for (id, in_place) in cut.shared.iter().zip(&mut cut.in_place) {
            *in_place &= id.is_none_or(|id| !stored.contains(&id));
        }
    }
}
