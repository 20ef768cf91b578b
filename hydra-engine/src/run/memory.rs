//! The host memory and the disk of a run.

use crate::admission::{Admission, DiskTier};
use crate::error::EngineError;
use crate::protocol::HostRoom;
use hydra_core::ByteSize;
use hydra_spill::{Reservation, SpillError};

/// The memory that a run was admitted with.
pub(super) struct RunMemory {
    /// Its part of the host's memory, which is `budget`.
    pub host: HostRoom,
    pub budget: ByteSize,
    pub admitted: u64,
    pub disk: DiskTier,
    /// Host memory in which the disk's masters are used, whoever of its users needs how much.
    _working: Reservation,
}

impl RunMemory {
    pub(super) fn new(admission: &Admission, disk: DiskTier) -> Result<Self, EngineError> {
        let host = HostRoom::new(admission.host_admitted_bytes, admission.host_ahead_bytes);
        let working = host.reserve(disk.working.capacity() + disk.writing, disk.working.name());
        let _working = working.map_err(SpillError::from)?;
        let budget = ByteSize(admission.host_budget_bytes);
        Ok(Self { host, budget, admitted: admission.host_admitted_bytes, disk, _working })
    }
}
