//! The memory tiers, and transfers between them.
//!
//! A [`Budget`] counts the bytes of one memory; a [`Reservation`] is a share of it, released when dropped. A
//! [`TierStore`] keeps *master weights*: the parameters and optimizer moments of each buffer. A
//! [`DeviceLink`] copies bytes to a device and back, or shares them with a device that has no memory of its
//! own. The [`SpillManager`] of a device promotes buffers from the store into [`ResidentCopy`] copies, and
//! the [`DoubleBuffer`] lets one shard's copy be filled while another's is computed on. A resident copy is
//! never modified, so it is evicted by dropping it. A [`DeviceResidentStore`] keeps the master weights of
//! some tasks on a device instead, if everything fits there, and a [`DiskStore`] keeps buffers in files if
//! host memory does not suffice. Frozen buffers can be [read in place](InPlaceParams) from the files of a pretrained model
//! instead. A [`SharedStore`] over them keeps one copy of buffers that tasks share.
//!
//! ```
//! use hydra_core::{ByteSize, DeviceId, TaskId};
//! use hydra_spill::{Budget, DramStore, HeldCopies, HostCopyLink, ParamBufferId, Masters, SpillManager, TierStore};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), hydra_spill::SpillError> {
//! // Master weights on the host: 256 parameters and one moment.
//! let host = Budget::new("host memory", ByteSize::mib(1));
//! let store = Arc::new(DramStore::new());
//! let id = ParamBufferId::new(TaskId(0), 0);
//! let masters = Masters::new(vec![1.0; 256], vec![vec![0.0; 256]]);
//! let reservation = host.reserve(masters.len_bytes(), "task 0")?;
//! store.insert(id, masters, reservation)?;
//!
//! // The device has memory for the parameters and not a byte more.
//! let (device, budget) = (DeviceId(0), Budget::new("cpu:0", ByteSize(1024)));
//! let link = Arc::new(HostCopyLink::new(device));
//! let manager = SpillManager::new(device, budget.clone(), store.clone(), link);
//! let reservation = budget.reserve(1024, "task 0")?;
//! let (resident, _) = manager.promote(id.task, &[id.buffer], &[], HeldCopies::default(), reservation)?;
//! assert_eq!(resident.bytes(), 1024);
//! assert!(budget.reserve(1, "task 1").is_err());
//!
//! // The optimizer updates the master weights; the copy on the device keeps its version.
//! let mut writer = store.write(id)?;
//! writer.params.fill(2.0);
//! writer.commit();
//! assert_eq!((store.version(id)?, resident.version(0)), (1, Some(0)));
//!
//! drop(resident);
//! assert_eq!(budget.used(), 0);
//! # Ok(())
//! # }
//! ```
//!
//! Invariants: this crate never decides what runs or moves next, spawns no thread except the one that detects
//! NVIDIA GPUs and is joined immediately (`cuda::detect`), opens no file except the unnamed ones that hold
//! master weights and those that it is asked to read in place, never lets a buffer be written while it is read, and never writes a device's copy back to
//! the master weights on the host.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "a global allocator is an unsafe trait")]
pub mod alloc;
mod copies;
#[allow(unsafe_code, reason = "the driver is C")]
pub mod cuda;
mod double_buffer;
mod link;
mod manager;
mod memory;
mod monitor;
mod store;

pub use copies::HeldCopies;
pub use double_buffer::{BufferError, DoubleBuffer, FillGuard, SlotState, Ticket};
#[cfg(feature = "cube")]
pub use link::CubeLink;
pub use link::{DeviceLink, Direction, HostCopyLink, LinkError, SimulatedLink, ZeroCopyLink};
pub use manager::{ResidentCopy, SpillManager};
pub use memory::{Budget, BudgetError, ELEMENT_ALIGN, Floats, NarrowFloats, PinnedMemory, Reservation};
pub use monitor::{Monitor, StdMonitor};
pub use store::{
    DeviceMasters, DeviceMoment, DeviceNarrow, DeviceResidentStore, DeviceWriter, DiskStore, DramStore,
    Files, Hashes, InPlaceParam, InPlaceParams, Masters, MastersPart, Moment, PIECE, ParamBufferId,
    ParamBufferKind, ParamBufferView, ParamBufferWriter, Rewrite, SharedStore, SourceFile, SpillError,
    TierStore, ViewOf, covering,
};
