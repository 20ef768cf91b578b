//! What a run needs of host memory, and what it leaves to the disk.

use super::AdmittedTask;
use super::disk::DiskSpec;
use super::division::{Division, StoredImages, divide};
use crate::error::EngineError;

/// Host memory for a run.
pub(crate) struct HostMemory<'a> {
    /// Bytes there are.
    pub budget: u64,
    /// What may take masters that find no room in them.
    pub disk: Option<&'a DiskSpec>,
    /// Devices that want a model each.
    pub devices: usize,
}

/// What a run needs of it.
pub(crate) struct HostNeeds {
    /// The most bytes that are reserved at once.
    pub admitted: u64,
    /// How many of them are for batches that are read ahead.
    pub ahead: u64,
    /// The most models that are within a minibatch at once.
    pub active_models: usize,
    /// Which masters live where.
    pub division: Division,
}

impl HostMemory<'_> {
    /// Masters are there for the whole run, in host memory or on the disk; as many models as fit beside those in host
    /// memory may be within a minibatch at once, and at least the largest one must.
    ///
    /// # Errors
    /// [`EngineError::HostMemory`] and [`EngineError::DiskMemory`], with what is needed.
    pub(crate) fn needs(
        &self,
        tasks: &[AdmittedTask],
        stored: &[StoredImages],
    ) -> Result<HostNeeds, EngineError> {
        let budget = self.budget;
        let masters: u64 = tasks.iter().map(|t| t.master_bytes).sum();
        let mut active: Vec<u64> = tasks.iter().map(|t| t.active_bytes).filter(|bytes| *bytes > 0).collect();
        active.sort_unstable_by(|a, b| b.cmp(a));
        let largest = active.first().copied().unwrap_or(0);
        let needed = masters.saturating_add(largest);
        let for_all_devices =
            active.iter().take(self.devices).fold(masters, |sum, bytes| sum.saturating_add(*bytes));
        let division = match self.disk {
            Some(disk) if for_all_devices > budget => self.on_disk(stored, &active, disk)?,
            _ if needed <= budget => Division { in_memory: masters, ..Division::default() },
            _ => {
                let (tasks, working, active) = (tasks.len(), None, largest);
                return Err(EngineError::HostMemory { needed, masters, working, active, tasks, budget });
            }
        };
        let standing = masters - division.disk + division.working;
        let mut smallest = standing;
        let fits = |bytes: &&u64| {
            smallest = smallest.saturating_add(**bytes);
            smallest <= budget
        };
        // As many as the smallest are at most; and no more bytes than the largest of so many have.
        let active_models = active.iter().rev().take_while(fits).count();
        let most = active.iter().take(active_models).fold(standing, |sum, bytes| sum.saturating_add(*bytes));
        let most = most.min(budget);
        // Reading ahead has what nobody else can need.
        let batches = tasks.iter().filter(|task| task.active_bytes > 0).map(|task| task.batch_bytes);
        let ahead = batches.fold(0, u64::saturating_add).min(budget - most);
        Ok(HostNeeds { admitted: most + ahead, ahead, active_models, division })
    }

    /// Leaves to the disk what host memory has no room for beside, if that can be, one model within a minibatch for
    /// each device, the largest first: a device without a model costs more than what the disk moves.
    fn on_disk(
        &self,
        stored: &[StoredImages],
        active: &[u64],
        disk: &DiskSpec,
    ) -> Result<Division, EngineError> {
        let (budget, devices) = (self.budget, self.devices);
        let with = |models: usize| {
            let beside = active.iter().take(models).fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
            divide(stored, budget.saturating_sub(beside), devices).map_err(|least| (least, beside)).and_then(
                |division| match beside.saturating_add(division.needed()) <= budget {
                    true => Ok(division),
                    false => Err((division, beside)),
                },
            )
        };
        let fits = |division: &Division| division.disk <= disk.budget.bytes();
        let several = (2..=devices.min(stored.len())).rev().find_map(|models| with(models).ok().filter(fits));
        if let Some(division) = several {
            return Ok(division);
        }
        let refused = |(least, beside): (Division, u64)| EngineError::HostMemory {
            needed: least.needed().saturating_add(beside),
            masters: least.in_memory,
            working: Some(least.working),
            active: beside,
            tasks: stored.len(),
            budget,
        };
        let division = with(1).map_err(refused)?;
        match fits(&division) {
            true => Ok(division),
            false => Err(EngineError::DiskMemory {
                dir: disk.dir.clone(),
                needed: division.disk,
                budget: disk.budget.bytes(),
                host: budget,
            }),
        }
    }
}
