//! The ledger: a folder of a user's in which every run on the machine says what memory it has admitted, for a run that
//! has just begun has not touched most of it yet, and what is free looks free to the next.
//! It may read, write and lock files of that folder, and read what the system tells of other processes.
//! It never waits for anything but the plans of other runs, and a run goes on where there is no ledger.

pub(crate) mod admitted;
pub(crate) mod folder;
pub(crate) mod planning_lock;

#[cfg(test)]
mod tests;

pub(crate) use admitted::{Admitted, OtherRun, card_name, in_one_line};
pub(crate) use folder::{MachineReservations, VARIABLE};
pub(crate) use planning_lock::{Entry, PlanningLock};
