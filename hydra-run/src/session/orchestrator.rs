//! Builds the orchestrator and its devices from settings.

use crate::control::Control;
use crate::machine::{DevicesArg, Gpus, Machine, MachineReservations, PlanningLock, threads_of_each};
use crate::run_dir::paths;
use crate::session::reservations::{Registrar, unseen};
use crate::settings::DeviceSettings;
use crate::terminal::{Interrupted, Progress, Show, Usage, print, stop, tell};
use anyhow::{Context, Result};
use hydra_core::{ByteSize, FloatType};
use hydra_engine::{
    AdmittedRun, DeviceKind, DeviceSpec, EngineError, Observer, Orchestrator, RunEvent, StopFlag,
};
use hydra_models::data::DecodeMemory;
use hydra_models::ops::{Precision, set_precision};
use hydra_partition::{PartitionError, PartitionPlan};
use std::path::PathBuf;
use std::sync::Arc;

/// The environment of a command.
#[derive(Clone)]
pub struct Environment {
    /// The machine, with the memory that is free.
    pub machine: Machine,
    /// The bars of the terminal, through which everything is printed meanwhile.
    pub terminal: indicatif::MultiProgress,
    /// How progress is shown.
    pub show: Show,
    /// The program that embeds the command, if it is not `hydra`.
    pub control: Option<Control>,
    /// The lock under which this run plans, if it holds one.
    planning_lock: Option<Arc<PlanningLock>>,
}

impl Environment {
    /// Returns the environment of a command that does not train. It sees the memory that other runs have not admitted.
    pub fn look(show: Show) -> Self {
        let machine = Machine::look(MachineReservations::of_user().as_ref());
        Self { machine, terminal: indicatif::MultiProgress::new(), show, control: None, planning_lock: None }
    }

    /// Returns the environment of a command that trains. It takes the planning lock, waiting for a run that holds it, so that no
    /// other run plans until this one has registered its memory.
    pub fn planning(&self) -> Self {
        let reservations = MachineReservations::of_user();
        let planning_lock = reservations
            .as_ref()
            .map(|reservations| reservations.planning_lock(|process| tell(&waiting(process))))
            .transpose();
        let planning_lock = planning_lock.unwrap_or_else(|error| {
            tell(&unseen(&error.into()));
            None
        });
        let machine = Machine::look(reservations.as_ref());
        Self { machine, planning_lock: planning_lock.map(Arc::new), ..self.clone() }
    }

    /// Prints a note on other runs of the machine. Refusals include it already.
    pub fn print_note_of_others(&self) {
        self.machine.note_of_others().iter().for_each(|note| tell(note));
    }

    /// Releases the planning lock of a command that admits nothing.
    pub(crate) fn release_planning_lock(&self) {
        self.planning_lock.iter().for_each(|planning_lock| planning_lock.end());
    }

    /// Returns an observer that registers the memory of a run on these devices in the machine-wide reservations.
    pub fn registrar(&self, spec: &DeviceSettings, run: &str) -> Registrar {
        Registrar::new(
            self.planning_lock.clone(),
            devices(spec, &self.machine),
            run.to_owned(),
            self.terminal.clone(),
        )
    }

    /// Returns this environment embedded in another program.
    pub fn inside(self, control: Control) -> Self {
        Self { control: Some(control), ..self }
    }

    /// Returns the flag that stops the run: set by the embedding program, or by an interrupt of this one.
    pub fn stop_flag(&self) -> Result<StopFlag> {
        if let Some(control) = &self.control {
            return Ok(control.stop_flag());
        }
        let stop = StopFlag::new();
        stop::on_interrupt(stop.clone(), self.terminal.clone())?;
        Ok(stop)
    }

    /// Passes a result to the embedding program, or prints it.
    pub fn print(&self, text: &str) -> Result<()> {
        match &self.control {
            Some(control) => control.print(text),
            None => print(text)?,
        }
        Ok(())
    }

    /// Passes error lines to the embedding program, or prints them.
    pub(crate) fn print_errors(&self, lines: Vec<String>) {
        match &self.control {
            Some(control) => control.errors(lines),
            None => lines.iter().for_each(|line| tell(line)),
        }
    }

    /// Returns this environment with another kind of progress output.
    pub fn showing(&self, show: Show) -> Self {
        Self { show, ..self.clone() }
    }

    /// Returns an observer that shows the progress of a run.
    pub fn progress(&self) -> Progress {
        Progress::new(self.terminal.clone(), self.show)
    }
}

fn waiting(process: Option<u32>) -> String {
    let planner = process.map_or("another run".to_owned(), |process| format!("the run of process {process}"));
    format!("note: waiting for {planner} to finish planning its memory")
}

/// Two observers of one run.
pub struct Both<A, B>(pub A, pub B);

impl<A: Observer, B: Observer> Observer for Both<A, B> {
    fn observe(&mut self, event: &RunEvent<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Returns the logical devices of a spec, named `cpu:0`, `cpu:1` and so on.
pub fn devices(spec: &DeviceSettings, machine: &Machine) -> Vec<DeviceSpec> {
    let memory = spec.memory();
    // GPUs that the build or the machine lacks have been refused earlier.
    let on_gpus = |gpus: &Gpus, device: fn(usize, ByteSize) -> DeviceSpec| {
        gpus.cards.iter().flat_map(|card| device(*card, memory).times(gpus.logical)).collect()
    };
    match spec.devices() {
        DevicesArg::Cpu { count, threads } => {
            let device = DeviceSpec::cpu(memory).threads(threads_of_each(count, threads, machine.cores));
            DeviceSpec { link: spec.link, zero_copy: spec.zero_copy, caches: spec.cache, ..device }
                .times(count)
        }
        DevicesArg::Cuda(gpus) => on_gpus(&gpus, DeviceSpec::cuda),
        DevicesArg::Wgpu(gpus) => on_gpus(&gpus, DeviceSpec::wgpu),
    }
}

/// Fails if a GPU does not support the float type. CPUs widen it.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn check_floats(devices: &[DeviceSpec], dtype: FloatType) -> Result<()> {
    use anyhow::ensure;
    use hydra_core::cube::CubeAdapter;
    for device in devices.iter().filter(|_| dtype != FloatType::F32) {
        let adapter = match device.kind {
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda { card } => CubeAdapter::cuda(card)?,
            #[cfg(feature = "wgpu")]
            DeviceKind::Wgpu { adapter } => CubeAdapter::wgpu(adapter)?,
            _ => continue,
        };
        let (name, supported) = (&device.name, hydra_models::ops::supports(&adapter.burn, dtype.dtype()));
        ensure!(supported, "`{name}` does not support {dtype}: omit --dtype, or pass another device");
    }
    Ok(())
}

#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
fn check_floats(_: &[DeviceSpec], _: FloatType) -> Result<()> {
    Ok(())
}

/// Returns the host memory budget: the given one, or the machine's default share.
fn host_memory(spec: &DeviceSettings, machine: &Machine) -> Option<ByteSize> {
    let devices = devices(spec, machine);
    // CUDA devices have memory of their own.
    let on_host = devices.iter().filter(|device| !matches!(device.kind, DeviceKind::Cuda { .. }));
    let budgets = on_host.map(|device| device.memory.bytes()).sum();
    spec.host_memory.or_else(|| machine.host_share(ByteSize(budgets)))
}

/// Returns one of `parts` equal parts of the host memory budget, in bytes.
pub(super) fn share_of_host_memory(spec: &DeviceSettings, machine: &Machine, parts: u64) -> u64 {
    host_memory(spec, machine).map_or(u64::MAX, ByteSize::bytes) / parts
}

/// Returns the host memory for decoding images while no model is loaded.
pub fn decode_memory(spec: &DeviceSettings, machine: &Machine) -> Arc<DecodeMemory> {
    Arc::new(DecodeMemory::new(host_memory(spec, machine).unwrap_or(ByteSize(u64::MAX))))
}

/// Returns the note on the `kept` bytes of host memory reserved for decoding images during the run.
pub fn note_of_decoding(kept: ByteSize) -> Option<String> {
    (kept.bytes() > 0).then(|| {
        format!(
            "note: {kept} of host memory are reserved for decoding images during the run, enough for the largest one"
        )
    })
}

/// Returns an orchestrator on the devices of a spec for chains of a float type, with progress output and no tasks.
pub fn orchestrator(
    spec: &DeviceSettings,
    dtype: FloatType,
    seed: u64,
    around: &Environment,
) -> Result<Orchestrator> {
    let devices = devices(spec, &around.machine);
    check_floats(&devices, dtype)?;
    set_precision(spec.precision);
    let progress = Box::new(around.progress());
    let orchestrator = Orchestrator::new(devices)?.policy(spec.policy).prefetch(spec.prefetch).seed(seed);
    let orchestrator = orchestrator.observer(progress).optimizer_placement(spec.optimizer_placement);
    let mut orchestrator = orchestrator.frozen_weights(spec.frozen_weights);
    if let Some(memory) = host_memory(spec, &around.machine) {
        orchestrator = orchestrator.host_memory(memory);
    }
    orchestrator = orchestrator.queued(spec.concurrent.unwrap_or(usize::MAX));
    if !spec.strict {
        orchestrator = orchestrator.leave_out_what_never_fits();
    }
    if let Some((dir, memory)) = disk(spec)? {
        orchestrator = orchestrator.disk(dir, memory);
    }
    // By default half of the free memory, because the system must be able to page the rest.
    let half = || around.machine.available.map(|free| ByteSize(free.bytes() / 2));
    if let Some(memory) = spec.pinned_memory.or_else(half) {
        orchestrator = orchestrator.page_locked_memory(memory);
    }
    // Plans with the default precision, the only one of CPUs, do not name it.
    if spec.precision == Precision::Tf32 {
        orchestrator = orchestrator.config("tf32");
    }
    if let Some(plan) = &spec.plan {
        orchestrator = orchestrator.plans(plan.clone());
    }
    Ok(orchestrator)
}

/// Returns an [`orchestrator`] of evaluations, with the cut-points and the replicas of the spec.
pub fn evaluating(
    spec: &DeviceSettings,
    dtype: FloatType,
    seed: u64,
    around: &Environment,
) -> Result<Orchestrator> {
    let mut orchestrator = orchestrator(spec, dtype, seed, around)?;
    if let Some(cuts) = &spec.cuts {
        orchestrator = orchestrator.evaluation_cuts(cuts.clone());
    }
    if let Some(most) = spec.replicas {
        orchestrator = orchestrator.evaluation_devices(most);
    }
    Ok(orchestrator)
}

/// Returns the cause of an error, without the task of an evaluation, which the user has not named, and the task's name.
pub fn without_task(error: EngineError) -> (Option<String>, anyhow::Error) {
    match error {
        EngineError::Task { task, source } => (Some(task), anyhow::Error::new(*source)),
        EngineError::Failed { task, source } => (Some(task), anyhow::Error::new(source)),
        error => (None, anyhow::Error::new(error)),
    }
}

/// Admits a run. A refusal for lack of memory includes the suggestions of `ways_out` and the runs that hold the rest of the
/// memory.
pub fn admit(
    orchestrator: Orchestrator,
    around: &Environment,
    ways_out: impl FnOnce(&EngineError) -> String,
) -> Result<AdmittedRun> {
    let admitted = orchestrator.admit().map_err(|error| {
        if matches!(error, EngineError::Stopped) {
            return Interrupted.into();
        }
        let because = match lacks_memory(&error) {
            true => ways_out(&error) + &around.machine.because_of_others(),
            false => String::new(),
        };
        anyhow::Error::from(error).context(format!("the run was refused{because}"))
    })?;
    around.print_note_of_others();
    Ok(admitted)
}

/// Returns true if an error is a lack of memory.
pub(crate) fn lacks_memory(error: &EngineError) -> bool {
    use PartitionError::{LayerTooLarge, ShardTooLarge};
    match error {
        EngineError::Task { source, .. } => lacks_memory(source),
        EngineError::Partition(cause) => matches!(cause, LayerTooLarge { .. } | ShardTooLarge { .. }),
        error => matches!(error, EngineError::HostMemory { .. } | EngineError::DiskMemory { .. }),
    }
}

/// Returns the directory for master weights that do not fit in host memory, and its budget.
fn disk(spec: &DeviceSettings) -> Result<Option<(PathBuf, ByteSize)>> {
    let Some(memory) = spec.disk_memory else { return Ok(None) };
    let no_dir = "--disk-memory uses the run directory by default, and this command has none: add --disk DIR";
    let dir = spec.disk.clone().ok_or_else(|| Usage::new(no_dir))?;
    // A run directory is created and checked when the run starts.
    if dir.is_dir() {
        paths::check_writable(&dir)
            .with_context(|| format!("`{}` is not writable: pass another --disk", dir.display()))?;
    }
    Ok(Some((dir, memory)))
}

/// Returns the note on budgets that exceed the free host memory. CUDA devices have memory of their own.
pub fn note_of_memory(spec: &DeviceSettings, machine: &Machine) -> Option<String> {
    let devices = match spec.devices() {
        // A default budget is a share of the free memory.
        DevicesArg::Cpu { count, .. } if !spec.zero_copy => Some((count, spec.memory())),
        _ => None,
    };
    machine.note_of_budgets(spec.host_memory, devices)
}

/// Returns the note on `--cuts` together with `--plan` if no plan has these cut-points.
pub fn note_of_cuts(spec: &DeviceSettings) -> Option<String> {
    let (cuts, path) = (spec.cuts.as_ref()?, spec.plan.as_ref()?);
    // An unreadable plan is an error when the plans are used.
    let has_them = |file: &PathBuf| PartitionPlan::load(file).is_ok_and(|plan| plan.cut_points == *cuts);
    let files: Vec<PathBuf> = if path.is_dir() { paths::entries(path).collect() } else { vec![path.clone()] };
    if files.iter().any(has_them) {
        return None;
    }
    let cuts: Vec<String> = cuts.iter().map(ToString::to_string).collect();
    let (cuts, path) = (cuts.join(","), path.display());
    Some(format!(
        "note: --cuts {cuts} takes precedence: no plan at `{path}` has these cut-points, so only its measurements are used"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::Bandwidth;

    #[test]
    fn devices_have_names_threads_and_budgets() {
        let spec = DeviceSettings {
            devices: Some("cpu:2".parse().unwrap()),
            device_memory: Some(ByteSize::mib(3)),
            link: Some(Bandwidth(1e9)),
            ..crate::settings::flags::defaults()
        };
        let machine = Machine { cores: 6, ..Machine::default() };
        let devices = devices(&spec, &machine);
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["cpu:0", "cpu:1"]);
        assert!(devices.iter().all(|d| d.threads == 3 && d.memory == ByteSize::mib(3)));
        assert_eq!(devices[0].link, Some(Bandwidth(1e9)));
    }
}
