//! The machine: cores, free memory, what other runs on it have admitted, and what a GPU needs and finds here.
//! It may read the system's files, ask drivers, and write the machine-wide reservations of runs; of this crate it imports nothing.
//! It never opens a device for training and never changes the system.

pub(crate) mod findings;
pub(crate) mod gpus;
mod kind;
pub(crate) mod names;
pub(crate) mod procfs;
pub(crate) mod report;
pub(crate) mod reservations;
pub(crate) mod resources;

pub(crate) use findings::Findings;
pub(crate) use kind::kind;
pub(crate) use names::{DevicesArg, Gpus, text_in_files, threads_of_each};
pub(crate) use report::Report;
pub(crate) use reservations::{Admitted, Entry, MachineReservations, PlanningLock};
pub(crate) use resources::Machine;
