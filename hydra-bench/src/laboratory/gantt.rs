//! The picture of a simulation.

use crate::pictures::schedule::{self, Timeline};
use anyhow::Result;
use hydra_sched::{Simulation, Workload};

/// The Gantt picture of a simulation whose spans were recorded.
pub(crate) fn gantt(workload: &Workload, run: &Simulation) -> Result<String> {
    let devices = workload.devices.len();
    let timeline = Timeline::simulated(format!("Simulated under {}", run.policy), devices, &run.spans);
    schedule::draw(&timeline, &device_names(devices), &run.utilization(), &task_names(workload))
}

/// The names of a workload's tasks, in its order.
fn task_names(workload: &Workload) -> Vec<String> {
    workload.tasks.iter().map(|task| task.name.clone()).collect()
}

/// The names of so many devices.
fn device_names(count: usize) -> Vec<String> {
    (0..count).map(|device| format!("device {device}")).collect()
}
