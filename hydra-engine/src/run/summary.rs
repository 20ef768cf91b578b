//! Builds the report of a run that has ended.

use super::Run;
use crate::device::DeviceKind;
use crate::error::with_causes;
use crate::protocol::TaskState;
use crate::report::{
    CheckpointReport, DeviceReport, PlanReport, REPORT_SCHEMA, RunReport, TaskReport, TaskTimes, Trained,
    Transfers, Validations,
};
use crate::task::LiveTask;
use hydra_spill::alloc;

pub(super) fn report(run: &Run) -> RunReport {
    let makespan_s = run.journal.makespan_s();
    let devices: Vec<DeviceReport> =
        (0..run.devices.len()).map(|device| device_report(run, device, makespan_s)).collect();
    let compute: f64 = devices.iter().map(|d| d.compute_s).sum();
    // Shard tasks of a model are sequential only within a replica.
    let chain_s = |task: &LiveTask| {
        task.results.compute_s / task.cursor.replicas() as f64 + task.results.optimizer_stall_s
    };
    let longest = run.tasks.iter().map(chain_s).fold(0.0, f64::max);
    let units: u64 = run.tasks.iter().map(|task| task.results.units).sum();
    let managers = || run.threads.devices.iter().map(|d| &d.device.manager);
    RunReport {
        schema: REPORT_SCHEMA,
        makespan_s,
        lower_bound_s: longest.max(compute / devices.len().max(1) as f64),
        tokens_per_s: if makespan_s > 0.0 { units as f64 / makespan_s } else { 0.0 },
        policy: run.claiming.policy_name.to_owned(),
        prefetch: run.claiming.prefetch,
        tasks: run.tasks.iter().map(task_report).collect(),
        skipped: run.skipped.clone(),
        devices,
        transfers: Transfers {
            promoted_bytes: managers().map(|m| m.uploaded_bytes()).sum(),
            parameter_bytes: run.devices.iter().map(|device| device.parameters.promoted).sum(),
            cached_bytes: run.devices.iter().map(|device| device.parameters.cached).sum(),
            demoted_bytes: managers().map(|m| m.downloaded_bytes()).sum(),
            disk_read_bytes: run.memory.disk.store.bytes_read(),
            disk_written_bytes: run.memory.disk.store.bytes_written(),
        },
        host_admitted_bytes: run.memory.admitted,
        host_budget_bytes: run.memory.budget.bytes(),
        host_peak_bytes: run.memory.host.peak(),
        replay_s: None,
        workload: None,
    }
}

fn device_report(run: &Run, index: usize, makespan_s: f64) -> DeviceReport {
    let state = &run.devices[index];
    let device = &run.threads.devices[index].device;
    // A GPU's measurement includes all processes that share it.
    let measured = device.probe.measures() && device.spec.sharing == 1;
    let budget = device.manager.budget();
    // With a zero-copy link, gradients wait in host memory for the optimizer without a reservation on the device.
    let counts = device.spec.kind == DeviceKind::Cpu && !device.manager.link().zero_copy();
    DeviceReport {
        name: device.spec.name.clone(),
        threads: device.spec.threads,
        budget_bytes: budget.capacity(),
        peak_bytes: if measured { device.probe.peak(device.measured_as()) } else { budget.peak() },
        peak_measured: measured,
        unreserved_bytes: (measured && counts).then(|| alloc::unreserved(device.measured_as())),
        compute_s: state.compute_s,
        copy_s: state.copy_s,
        stall_s: state.stall_s,
        utilization: if makespan_s > 0.0 { state.compute_s / makespan_s } else { 0.0 },
        shard_tasks: state.shard_tasks,
    }
}

fn task_report(task: &LiveTask) -> TaskReport {
    let (info, results, failure) = (&task.info, &task.results, task.phase.failure());
    TaskReport {
        name: info.task.name.clone(),
        config: info.task.config.clone(),
        state: task.phase.state().unwrap_or(TaskState::Failed),
        error: failure.map(|error| with_causes(error.as_ref())),
        failure: failure.cloned(),
        plan: PlanReport {
            parameters: info.chain().parameters(),
            shards: info.shards.len(),
            cut_points: info.admitted.plan.cut_points.clone(),
            disk_bytes: info.admitted.storage.disk_bytes,
            optimizer: info.admitted.optimizer.clone(),
        },
        trained: Trained {
            steps: results.losses.len(),
            unit: info.admitted.data.unit.clone(),
            units: results.units,
        },
        losses: results.losses.clone(),
        validations: Validations {
            initial_validation: results.initial.clone(),
            initial_validation_by: results.initial_by.clone(),
            evaluations: results.periodic.clone(),
            best_step: results.best.as_ref().map(|(step, _)| *step),
            stopped_early: task.stopped_early(),
        },
        validation: results.validation.clone(),
        test: results.test.clone(),
        weights_sha256: results.sha256.clone(),
        model_dir: results.dir.clone(),
        checkpoints: CheckpointReport {
            resumed_at: info.resumed_at,
            checkpoint_error: results.checkpoint_error.clone(),
        },
        times: TaskTimes { compute_s: results.compute_s, optimizer_stall_s: results.optimizer_stall_s },
    }
}
