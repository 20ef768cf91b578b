//! The machine: cores, free memory, the memory reservations of other runs, and the GPU setup.
//!
//! The module reads system files, queries drivers, and writes machine-wide memory reservations. It imports nothing of this crate,
//! never opens a device for training, and never changes the system.

pub(crate) mod findings;
pub(crate) mod gpus;
mod kind;
pub(crate) mod names;
pub(crate) mod process_memory;
pub mod procfs;
pub(crate) mod report;
pub(crate) mod reservations;
pub(crate) mod resources;

pub use findings::Findings;
pub(crate) use kind::kind;
pub use names::DevicesArg;
pub(crate) use names::{Gpus, text_in_files, threads_of_each};
pub use report::DoctorReport;
pub(crate) use reservations::{Admitted, MachineReservations, PlanningLock, ReservationEntry};
pub use resources::Machine;
