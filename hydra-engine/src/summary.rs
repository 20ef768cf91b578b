//! The report of a run that has ended.

use crate::checkpoint::Checkpoint;
use crate::error::with_causes;
use crate::model::Model;
use crate::report::{DeviceReport, REPORT_SCHEMA, RunReport, TaskReport, TaskState, Transfers};
use crate::run::Run;

impl Run {
    pub(crate) fn report(&self) -> RunReport {
        let makespan_s = (self.last_end_s - self.first_start_s.unwrap_or(self.last_end_s)).max(0.0);
        let devices: Vec<DeviceReport> =
            (0..self.devices.len()).map(|device| self.device_report(device, makespan_s)).collect();
        let compute: f64 = devices.iter().map(|d| d.compute_s).sum();
        let chain_s = |m: &Model| m.results.compute_s + m.results.optimizer_stall_s;
        let longest = self.models.iter().map(chain_s).fold(0.0, f64::max);
        let units: u64 = self.models.iter().map(|m| m.results.units).sum();
        let managers = || self.threads.devices.iter().map(|d| &d.device.manager);
        RunReport {
            schema: REPORT_SCHEMA,
            makespan_s,
            lower_bound_s: longest.max(compute / devices.len().max(1) as f64),
            tokens_per_s: if makespan_s > 0.0 { units as f64 / makespan_s } else { 0.0 },
            policy: self.policy_name.to_owned(),
            prefetch: self.prefetch,
            tasks: self.models.iter().map(task_report).collect(),
            devices,
            transfers: Transfers {
                promoted_bytes: managers().map(|m| m.uploaded_bytes()).sum(),
                demoted_bytes: managers().map(|m| m.downloaded_bytes()).sum(),
                disk_read_bytes: self.disk.store.bytes_read(),
                disk_written_bytes: self.disk.store.bytes_written(),
            },
            host_admitted_bytes: self.host_admitted,
            host_budget_bytes: self.host_memory.bytes(),
            host_peak_bytes: self.host_budget.peak(),
            replay_s: None,
            workload: None,
        }
    }

    fn device_report(&self, index: usize, makespan_s: f64) -> DeviceReport {
        let state = &self.devices[index];
        let device = &self.threads.devices[index].device;
        // What is measured of a GPU is that of all who share it.
        let measured = device.probe.measures() && device.spec.sharing == 1;
        let budget = device.manager.budget();
        DeviceReport {
            name: device.spec.name.clone(),
            threads: device.spec.threads,
            budget_bytes: budget.capacity(),
            peak_bytes: if measured { device.probe.peak(device.measured_as()) } else { budget.peak() },
            peak_measured: measured,
            compute_s: state.compute_s,
            copy_s: state.copy_s,
            stall_s: state.stall_s,
            utilization: if makespan_s > 0.0 { state.compute_s / makespan_s } else { 0.0 },
            shard_tasks: state.shard_tasks,
        }
    }
}

fn task_report(model: &Model) -> TaskReport {
    let results = &model.results;
    TaskReport {
        name: model.task.name.clone(),
        config: model.task.config.clone(),
        state: model.ended.unwrap_or(TaskState::Failed),
        error: results.failure.as_deref().map(|error| with_causes(error)),
        failure: results.failure.clone(),
        shards: model.shards.len(),
        cut_points: model.plan.cut_points.clone(),
        steps: results.losses.len(),
        resumed_at: model.task.resume.as_ref().map(Checkpoint::step),
        losses: results.losses.clone(),
        initial_validation: results.initial.clone(),
        validation: results.validation.clone(),
        test: results.test.clone(),
        evaluations: results.periodic.clone(),
        stopped_early: model.stopped_early(),
        best_step: results.best.as_ref().map(|(step, _)| *step),
        weights_sha256: results.sha256.clone(),
        model_dir: results.dir.clone(),
        compute_s: results.compute_s,
        optimizer_stall_s: results.optimizer_stall_s,
        parameters: model.chain().parameters(),
        checkpoint_error: results.checkpoint_error.clone(),
        disk_bytes: model.disk_bytes,
        optimizer: model.placement.clone(),
    }
}
