//! Machine-wide memory reservations: a folder of the user in which every run registers the memory that it has admitted.
//! A run that has just started has not allocated most of its memory yet, so the system reports it as free to the next run.
//!
//! The module reads, writes and locks files in that folder, and reads the memory of other processes. It waits only for runs
//! that are planning. Runs continue without reservations if the folder is unusable.

pub(crate) mod admitted;
pub(crate) mod folder;
pub(crate) mod planning_lock;

#[cfg(test)]
mod tests;

pub(crate) use admitted::{Admitted, OtherRun, card_name, in_one_line};
pub(crate) use folder::{MachineReservations, VARIABLE};
pub(crate) use planning_lock::{PlanningLock, ReservationEntry};
