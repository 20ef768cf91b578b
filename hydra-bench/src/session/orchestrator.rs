//! An orchestrator with the devices that a spec names.

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

/// The surroundings of every command.
#[derive(Clone)]
pub(crate) struct Environment {
    pub(crate) machine: Machine,
    pub(crate) terminal: indicatif::MultiProgress,
    /// The way in which an orchestrator shows how far it is.
    pub(crate) show: Show,
    /// The program inside of which the command runs, if it is not `hydra`.
    pub(crate) control: Option<Control>,
    /// The planning_lock of this run to plan, if it has one.
    planning_lock: Option<Arc<PlanningLock>>,
}

impl Environment {
    /// The surroundings of a command that does not train: other runs leave it what they have not admitted.
    pub(crate) fn look(show: Show) -> Self {
        let machine = Machine::look(MachineReservations::of_user().as_ref());
        Self { machine, terminal: indicatif::MultiProgress::new(), show, control: None, planning_lock: None }
    }

    /// The surroundings of a command that trains: no other run plans until this one has said what it admits, and one that
    /// does already is waited for.
    pub(crate) fn planning(&self) -> Self {
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

    /// Names the other runs of the machine, which a refusal names itself.
    pub(crate) fn tell_of_others(&self) {
        self.machine.note_of_others().iter().for_each(|note| tell(note));
    }

    /// Lets other runs plan before this command has said what it admits: it admits nothing.
    pub(crate) fn end_turn(&self) {
        self.planning_lock.iter().for_each(|planning_lock| planning_lock.end());
    }

    /// An observer that enters into the machine-wide reservations what a run of this name on these devices admits.
    pub(crate) fn registrar(&self, spec: &DeviceSettings, run: &str) -> Registrar {
        Registrar::new(
            self.planning_lock.clone(),
            devices(spec, &self.machine),
            run.to_owned(),
            self.terminal.clone(),
        )
    }

    /// The same inside of another program.
    pub(crate) fn inside(self, control: Control) -> Self {
        Self { control: Some(control), ..self }
    }

    /// The flag of who may stop the run: the program around it, or whoever interrupts this one.
    pub(crate) fn stop_flag(&self) -> Result<StopFlag> {
        if let Some(control) = &self.control {
            return Ok(control.stop_flag());
        }
        let stop = StopFlag::new();
        stop::on_interrupt(stop.clone(), self.terminal.clone())?;
        Ok(stop)
    }

    /// Gives a result to the program around the command, or prints it.
    pub(crate) fn print(&self, text: &str) -> Result<()> {
        match &self.control {
            Some(control) => control.print(text),
            None => print(text)?,
        }
        Ok(())
    }

    /// Says what went wrong beside the result.
    pub(crate) fn tell_errors(&self, lines: Vec<String>) {
        match &self.control {
            Some(control) => control.errors(lines),
            None => lines.iter().for_each(|line| tell(line)),
        }
    }

    /// The same with another way to show progress.
    pub(crate) fn showing(&self, show: Show) -> Self {
        Self { show, ..self.clone() }
    }

    /// An observer that shows how far a run is.
    pub(crate) fn progress(&self) -> Progress {
        Progress::new(self.terminal.clone(), self.show)
    }
}

fn waiting(process: Option<u32>) -> String {
    let planner = process.map_or("another run".to_owned(), |process| format!("the run of process {process}"));
    format!("note: {planner} is planning: this one waits until that has said how much memory it needs")
}

/// Two observers of one run.
pub(crate) struct Both<A, B>(pub(crate) A, pub(crate) B);

impl<A: Observer, B: Observer> Observer for Both<A, B> {
    fn observe(&mut self, event: &RunEvent<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// The logical devices of a spec, named `cpu:0`, `cpu:1` and so on.
pub(crate) fn devices(spec: &DeviceSettings, machine: &Machine) -> Vec<DeviceSpec> {
    let memory = spec.memory();
    // A build without GPUs, or a machine, has refused them before it came here.
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

/// Refuses a type of floats that a GPU neither stores nor computes with; CPUs widen it.
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
        ensure!(
            supported,
            "`{name}` does not compute with {dtype}: leave --dtype out, or give another device"
        );
    }
    Ok(())
}

#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
fn check_floats(_: &[DeviceSpec], _: FloatType) -> Result<()> {
    Ok(())
}

/// The budget of host memory: the one that is given, or the machine's part for it.
fn host_memory(spec: &DeviceSettings, machine: &Machine) -> Option<ByteSize> {
    let devices = devices(spec, machine);
    // NVIDIA's cards have memory of their own, so their devices take none of the host's.
    let on_host = devices.iter().filter(|device| !matches!(device.kind, DeviceKind::Cuda { .. }));
    let budgets = on_host.map(|device| device.memory.bytes()).sum();
    spec.host_memory.or_else(|| machine.host_share(ByteSize(budgets)))
}

/// The host memory that images are decoded in while no model is in it.
pub(crate) fn decode_memory(spec: &DeviceSettings, machine: &Machine) -> Arc<DecodeMemory> {
    Arc::new(DecodeMemory::new(host_memory(spec, machine).unwrap_or(ByteSize(u64::MAX))))
}

/// The note on host memory that images are decoded in while models are in the rest, of which so much is kept.
pub(crate) fn note_of_decoding(kept: ByteSize) -> Option<String> {
    (kept.bytes() > 0).then(|| {
        format!(
            "note: {kept} of the host memory are kept for decoding images while the run goes on, as much as the largest needs"
        )
    })
}

/// An orchestrator on the devices of a spec, for chains of a type of floats, with nothing submitted. It shows its progress.
pub(crate) fn orchestrator(
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
    let mut orchestrator = orchestrator.observer(progress).optimizer_placement(spec.optimizer_placement);
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
    // Half of what is free when nobody says how much, for the system needs the rest to be its own.
    let half = || around.machine.available.map(|free| ByteSize(free.bytes() / 2));
    if let Some(memory) = spec.pinned_memory.or_else(half) {
        orchestrator = orchestrator.page_locked_memory(memory);
    }
    // A plan of the default, which is all that CPUs have, does not say so.
    if spec.precision == Precision::Tf32 {
        orchestrator = orchestrator.config("tf32");
    }
    if let Some(plan) = &spec.plan {
        orchestrator = orchestrator.plans(plan.clone());
    }
    Ok(orchestrator)
}

/// Admits a run. A refusal for want of memory names the settings with which the run fits, which `ways_out` gives in words, and
/// the runs that have the rest of the memory.
pub(crate) fn admit(
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
    around.tell_of_others();
    Ok(admitted)
}

/// Returns true if an error says that there is too little memory.
pub(crate) fn lacks_memory(error: &EngineError) -> bool {
    use PartitionError::{LayerTooLarge, ShardTooLarge};
    match error {
        EngineError::Task { source, .. } => lacks_memory(source),
        EngineError::Partition(cause) => matches!(cause, LayerTooLarge { .. } | ShardTooLarge { .. }),
        error => matches!(error, EngineError::HostMemory { .. } | EngineError::DiskMemory { .. }),
    }
}

/// The directory for masters that host memory has no room for, and how much may be there.
fn disk(spec: &DeviceSettings) -> Result<Option<(PathBuf, ByteSize)>> {
    let Some(memory) = spec.disk_memory else { return Ok(None) };
    let no_dir = "--disk-memory is in the run directory, and this command has none: give --disk DIR too";
    let dir = spec.disk.clone().ok_or_else(|| Usage::new(no_dir))?;
    // A run directory is made, and looked at, when the run begins.
    if dir.is_dir() {
        paths::check_writable(&dir)
            .with_context(|| format!("`{}` cannot be written to: give another --disk", dir.display()))?;
    }
    Ok(Some((dir, memory)))
}

/// The note on budgets that are larger than what is free. NVIDIA's cards have memory of their own.
pub(crate) fn note_of_memory(spec: &DeviceSettings, machine: &Machine) -> Option<String> {
    let devices = match spec.devices() {
        // What nobody gave is a share of what is free.
        DevicesArg::Cpu { count, .. } if !spec.zero_copy => Some((count, spec.memory())),
        _ => None,
    };
    machine.note_of_budgets(spec.host_memory, devices)
}

/// The note on cuts by hand when there is also a plan, and none that has these cuts.
pub(crate) fn note_of_cuts(spec: &DeviceSettings) -> Option<String> {
    let (cuts, path) = (spec.cuts.as_ref()?, spec.plan.as_ref()?);
    // What cannot be read is an error when the plans are used.
    let has_them = |file: &PathBuf| PartitionPlan::load(file).is_ok_and(|plan| plan.cut_points == *cuts);
    let files: Vec<PathBuf> = if path.is_dir() { paths::entries(path).collect() } else { vec![path.clone()] };
    if files.iter().any(has_them) {
        return None;
    }
    let cuts: Vec<String> = cuts.iter().map(ToString::to_string).collect();
    let (cuts, path) = (cuts.join(","), path.display());
    Some(format!(
        "note: --cuts {cuts} decide where the model is cut; no plan at `{path}` has these cut-points, and at most its \
         measurements are used"
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
