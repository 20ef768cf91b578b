//! Suggestions for a run refused for lack of memory: settings with which it fits. Each suggestion is planned before it is made,
//! with pilot passes if it changes the measurements.

use crate::machine::DevicesArg;
use crate::machine::gpus;
use crate::run_dir::paths::free_bytes_at;
use crate::run_dir::{PlannedTask, RunSpec};
use crate::session::orchestrator::{Environment, orchestrator};
use crate::session::tasks::{DataStats, TaskMaker};
use crate::settings::DeviceSettings;
use crate::terminal::{Show, quietly, tell};
use anyhow::Result;
use hydra_core::{ByteSize, FloatType};
use hydra_engine::{Admission, EngineError, Measurements, Observer, RunEvent, StopFlag};
use hydra_models::data::Cut;
use hydra_partition::PartitionError;
use std::path::Path;
use std::time::{Duration, Instant};

/// The time limits of the search and of one plan.
const LIMIT: Duration = Duration::from_secs(60);
const LIMIT_OF_ONE: Duration = Duration::from_secs(20);
/// The maximum number of plans for one kind of memory, each with the size that the previous one required.
const SIZES: usize = 5;
/// The number of bisection steps between a value that fits and one that does not.
const BETWEEN: usize = 2;
/// The shortest context to try.
const SHORTEST: usize = 8;
/// The maximum number of parts of a vocabulary table.
const MOST_PARTS: usize = 32;
/// An unlimited disk budget.
const ANY_DISK: ByteSize = ByteSize(u64::MAX / 4);

/// A refused run, with the inputs of its plans.
pub(super) struct Refused<'a> {
    pub(super) spec: &'a RunSpec,
    pub(super) planned: Vec<PlannedTask>,
    /// The run directory, or its parent.
    pub(super) dir: &'a Path,
    /// Measurements made before the run was refused.
    pub(super) measurements: Measurements,
    /// Seconds spent on reading models and data.
    pub(super) reading_s: f64,
    /// Stops the search.
    pub(super) stop: StopFlag,
}

/// Returns the suggestions as a continuation of the error: `; it fits with (each planned): ..`.
pub(super) fn ways_out(
    error: &EngineError,
    refused: Refused<'_>,
    maker: &mut TaskMaker,
    around: &Environment,
) -> String {
    maker.plan_only();
    if around.show != Show::Nothing {
        tell(&format!("searching for settings with which the run fits (at most {} s)", LIMIT.as_secs()));
    }
    let until = Instant::now() + LIMIT;
    let around = around.showing(Show::Nothing);
    let mut search =
        SettingsSearch { refused, maker, around, until, found: Vec::new(), too_large: Vec::new() };
    quietly(|| search.look(error));
    search.text()
}

/// A search for settings that fit.
struct SettingsSearch<'a> {
    refused: Refused<'a>,
    maker: &'a mut TaskMaker,
    around: Environment,
    until: Instant,
    found: Vec<String>,
    /// Settings that were tried and do not fit either.
    too_large: Vec<String>,
}

/// The result of a plan.
enum PlanResult {
    Fits(Box<Admission>),
    /// Does not fit; requires this many bytes of the scarce memory, if known.
    TooLarge(Option<u64>),
    /// Took too long, or was refused for another reason.
    Unknown,
}

/// The memory that is too small.
#[derive(Clone, Copy)]
enum ScarceMemory {
    /// Device memory. `needed` is the missing rest if `is_rest`, and the total otherwise. `of_vocabulary` is true if a
    /// vocabulary table is too large.
    Device {
        needed: u64,
        is_rest: bool,
        of_vocabulary: bool,
    },
    /// Host memory. `masters_alone` is true if master weights and optimizer state alone exceed it.
    Host {
        needed: u64,
        masters_alone: bool,
    },
    Disk {
        needed: u64,
    },
}

impl ScarceMemory {
    fn from_error(error: &EngineError) -> Option<Self> {
        match error {
            EngineError::Task { source, .. } => Self::from_error(source),
            EngineError::Partition(PartitionError::LayerTooLarge { needed, layer, .. }) => {
                let of_vocabulary = ["embed", "head"].iter().any(|name| layer.contains(name));
                Some(Self::Device { needed: *needed, is_rest: false, of_vocabulary })
            }
            EngineError::Partition(PartitionError::ShardTooLarge { need, available, .. }) => {
                let needed = need.saturating_sub(*available);
                Some(Self::Device { needed, is_rest: true, of_vocabulary: false })
            }
            EngineError::HostMemory { needed, masters, budget, .. } => {
                Some(Self::Host { needed: *needed, masters_alone: masters >= budget })
            }
            EngineError::DiskMemory { needed, .. } => Some(Self::Disk { needed: *needed }),
            _ => None,
        }
    }

    /// Returns the bytes of the scarce memory that a run with this spec requires.
    fn bytes(self, spec: &RunSpec) -> u64 {
        match self {
            Self::Device { needed, is_rest: true, .. } => {
                spec.devices.memory().bytes().saturating_add(needed)
            }
            Self::Device { needed, .. } | Self::Host { needed, .. } | Self::Disk { needed } => needed,
        }
    }
}

impl SettingsSearch<'_> {
    fn text(self) -> String {
        let tried = match self.too_large.is_empty() {
            true => String::new(),
            false => format!("; still too large: {}", self.too_large.join(", ")),
        };
        match self.found.is_empty() {
            true if tried.is_empty() => String::new(),
            true => format!("; no settings were found with which it fits{tried}"),
            false => {
                format!("; it fits with one of these (each was planned): {}{tried}", self.found.join("; "))
            }
        }
    }

    fn look(&mut self, error: &EngineError) {
        let Some(lack) = ScarceMemory::from_error(error) else { return };
        // Settings without further pilot passes come first, and those that read data again last.
        match lack {
            ScarceMemory::Device { of_vocabulary, .. } => {
                self.device_memory(lack.bytes(self.refused.spec));
                self.batch();
                if of_vocabulary {
                    self.vocabulary_parts();
                }
                self.float_type();
                self.context();
            }
            ScarceMemory::Host { needed, masters_alone } => {
                self.host_memory(needed);
                self.disk_memory();
                self.frozen_type();
                if !masters_alone {
                    self.batch();
                    self.float_type();
                    self.context();
                }
            }
            ScarceMemory::Disk { needed } => {
                self.memory_of_disk(needed);
                self.host_memory(self.host_budget().saturating_add(needed));
            }
        }
    }

    fn has_time(&self) -> bool {
        Instant::now() < self.until && !self.refused.stop.is_stopped()
    }

    /// Plans the run with another spec, or with other tasks.
    fn plan(&mut self, spec: &RunSpec, planned: &[PlannedTask]) -> PlanResult {
        if !self.has_time() {
            return PlanResult::Unknown;
        }
        match self.admission(spec, planned) {
            Ok(Ok(admission)) => PlanResult::Fits(Box::new(admission)),
            Ok(Err(error)) => match ScarceMemory::from_error(&error) {
                Some(lack) => PlanResult::TooLarge(Some(lack.bytes(spec))),
                None => PlanResult::Unknown,
            },
            Err(_) => PlanResult::Unknown,
        }
    }

    fn admission(
        &mut self,
        spec: &RunSpec,
        planned: &[PlannedTask],
    ) -> Result<Result<Admission, EngineError>> {
        let on = DeviceSettings { strict: true, ..spec.devices.with_disk_in(self.refused.dir) };
        let stop = StopFlag::new();
        let until = self.until.min(Instant::now() + LIMIT_OF_ONE);
        let watch = PlanTimer { until, run_stop: self.refused.stop.clone(), stop: stop.clone() };
        let mut orchestrator = orchestrator(&on, spec.model.dtype, spec.model.seed, &self.around)?
            .measurements(&self.refused.measurements)
            .stop_admission(stop)
            .observer(Box::new(watch));
        for one in planned {
            orchestrator.submit(self.maker.first(spec, one)?)?;
        }
        Ok(orchestrator.admit().map(|run| run.admission().clone()))
    }

    /// Returns the host memory budget of the run.
    fn host_budget(&self) -> u64 {
        self.refused.spec.devices.host_memory.map_or(0, |memory| memory.bytes())
    }

    fn spec(&self) -> RunSpec {
        self.refused.spec.clone()
    }

    /// Records settings that fit, with their memory.
    fn fits(&mut self, flags: String, memory: &str) {
        self.found.push(if memory.is_empty() { flags } else { format!("{flags} ({memory})") });
    }

    /// Tries memory sizes, each as large as the previous plan required. `with` sets a size, or returns false if the machine does
    /// not have it.
    fn sizes(&mut self, flag: &str, needed: u64, with: impl Fn(&Self, &mut RunSpec, ByteSize) -> bool) {
        let mut needed = needed;
        for _ in 0..SIZES {
            let (text, size) = rounded_up(needed);
            let mut spec = self.spec();
            if !with(self, &mut spec, size) {
                return;
            }
            match self.plan(&spec, &self.refused.planned.clone()) {
                PlanResult::Fits(_) => return self.fits(format!("{flag} {text}"), ""),
                // A whole plan may require slightly more than the measured layers.
                PlanResult::TooLarge(Some(more)) => needed = more.max(size.bytes() + size.bytes() / 50),
                PlanResult::TooLarge(None) | PlanResult::Unknown => return,
            }
        }
    }

    fn device_memory(&mut self, needed: u64) {
        self.sizes("--device-memory", needed, |this, spec, size| {
            spec.devices.device_memory = Some(size);
            spec.devices.zero_copy = false;
            let machine = &this.around.machine;
            match spec.devices.devices() {
                devices @ DevicesArg::Cuda(_) => gpus::memory(&devices, Some(size), machine).is_ok(),
                DevicesArg::Wgpu(gpus) => this.is_free(size.bytes().saturating_mul(gpus.count() as u64)),
                DevicesArg::Cpu { count, .. } => this.is_free(size.bytes().saturating_mul(count as u64)),
            }
        });
    }

    /// Returns true if the machine has this much memory available.
    fn is_free(&self, bytes: u64) -> bool {
        self.around.machine.available.is_none_or(|available| bytes <= available.bytes())
    }

    fn host_memory(&mut self, needed: u64) {
        self.sizes("--host-memory", needed, |this, spec, size| {
            spec.devices.host_memory = Some(size);
            this.is_free(size.bytes())
        });
    }

    /// Tries a larger disk budget.
    fn memory_of_disk(&mut self, needed: u64) {
        self.sizes("--disk-memory", needed, |this, spec, size| {
            spec.devices.disk_memory = Some(size);
            this.has_disk(spec, size.bytes())
        });
    }

    /// Tries a disk budget for a run without one, as large as the plan requires.
    fn disk_memory(&mut self) {
        if self.refused.spec.devices.disk_memory.is_some() {
            return;
        }
        let mut spec = self.spec();
        spec.devices.disk_memory = Some(ANY_DISK);
        match self.plan(&spec, &self.refused.planned.clone()) {
            PlanResult::Fits(admission) if admission.disk_bytes > 0 => {
                self.memory_of_disk(admission.disk_bytes)
            }
            PlanResult::TooLarge(_) => self.too_large.push("--disk-memory of any size".to_owned()),
            PlanResult::Fits(_) | PlanResult::Unknown => {}
        }
    }

    fn has_disk(&self, spec: &RunSpec, bytes: u64) -> bool {
        let dir = spec.devices.disk.as_deref().unwrap_or(self.refused.dir);
        free_bytes_at(dir).is_none_or(|free| bytes <= free)
    }

    /// Tries smaller batch sizes, and the same ones with more microbatches.
    fn batch(&mut self) {
        let (spec, planned) = (self.spec(), self.refused.planned.clone());
        let accumulate = spec.training.accumulate.max(1);
        let largest = planned.iter().map(|one| one.configuration.batch).max().unwrap_or(1);
        let microbatch = largest.div_ceil(accumulate);
        let plan = |this: &mut Self, microbatch: usize| {
            let smaller = with_batch_at_most(&planned, microbatch * accumulate);
            this.plan(&spec, &smaller)
        };
        let Some((fits, admission)) = self.largest("--batch", microbatch, (1, 1), accumulate, &plan) else {
            return;
        };
        self.fits(format!("--batch {}", fits * accumulate), &memory_of(&admission));
        let (parts, smallest) =
            (largest.div_ceil(fits), planned.iter().map(|one| one.configuration.batch).min().unwrap_or(1));
        if parts > smallest {
            return;
        }
        let mut spec = self.spec();
        spec.training.accumulate = parts;
        if let PlanResult::Fits(admission) = self.plan(&spec, &planned) {
            let batches: Vec<String> = self.batches();
            self.fits(format!("--batch {} --accumulate {parts}", batches.join(",")), &memory_of(&admission));
        }
    }

    /// Returns the distinct batch sizes of the run.
    fn batches(&self) -> Vec<String> {
        let mut batches: Vec<usize> = Vec::new();
        for one in &self.refused.planned {
            if !batches.contains(&one.configuration.batch) {
                batches.push(one.configuration.batch);
            }
        }
        batches.iter().map(ToString::to_string).collect()
    }

    /// Returns the largest tried value below `too_large` that fits: first halves of it down to `least`, then values in between, in
    /// multiples of `grain`. The flag's value is `times` the tried value.
    fn largest(
        &mut self,
        flag: &str,
        too_large: usize,
        (least, grain): (usize, usize),
        times: usize,
        plan: &dyn Fn(&mut Self, usize) -> PlanResult,
    ) -> Option<(usize, Box<Admission>)> {
        let (mut over, mut value, mut best) = (too_large, too_large / 2, None);
        while value >= least && best.is_none() {
            match plan(self, value) {
                PlanResult::Fits(admission) => best = Some((value, admission)),
                PlanResult::TooLarge(_) => (over, value) = (value, value / 2),
                PlanResult::Unknown => break,
            }
        }
        if best.is_none() && over < too_large {
            self.too_large.push(format!("{flag} {}", over * times));
        }
        for _ in 0..BETWEEN {
            let Some((fits, _)) = &best else { break };
            let between = (fits + over) / 2 / grain * grain;
            // A slightly larger value is not worth a pilot pass.
            if between <= fits + fits / 8 || !self.has_time() {
                break;
            }
            match plan(self, between) {
                PlanResult::Fits(admission) => best = Some((between, admission)),
                PlanResult::TooLarge(_) => over = between,
                PlanResult::Unknown => break,
            }
        }
        best
    }

    fn float_type(&mut self) {
        let mut spec = self.spec();
        if spec.model.dtype == FloatType::Bf16 {
            return;
        }
        let before = spec.model.dtype;
        spec.model.dtype = FloatType::Bf16;
        spec.models.iter_mut().for_each(|model| model.dtype = FloatType::Bf16);
        let planned = self.refused.planned.clone();
        let plan = self.with_models(
            |model| {
                model.set_float_type(FloatType::Bf16);
                Ok(())
            },
            |this| this.plan(&spec, &planned),
        );
        let without = if spec.model.frozen_dtype.is_some() { " without --frozen-dtype" } else { "" };
        self.note(format!("--dtype bf16{without}"), plan);
        // Restores the original type.
        let _ = self.maker.change_models(|model| {
            model.set_float_type(before);
            Ok(())
        });
    }

    /// Tries the 16-bit type that the weights have that are not trained, if there are any.
    fn frozen_type(&mut self) {
        let (spec, planned) = (self.spec(), self.refused.planned.clone());
        if spec.model.dtype != FloatType::F32 || spec.model.frozen_dtype.is_some() {
            return;
        }
        for float in [FloatType::Bf16, FloatType::F16] {
            let change = |model: &mut crate::session::model::Model| {
                model.set_frozen_float_type(Some(float));
                Ok(())
            };
            let plan = self.with_models(change, |this| this.plan(&spec, &planned));
            let applies = !matches!(plan, PlanResult::Unknown);
            self.note(format!("--frozen-dtype {float}"), plan);
            if applies {
                break;
            }
        }
        let _ = self.maker.change_models(|model| {
            model.set_frozen_float_type(None);
            Ok(())
        });
    }

    fn vocabulary_parts(&mut self) {
        // A model in parts generates no texts.
        if self.maker.generates() {
            return;
        }
        let now = self.refused.spec.model.vocabulary_parts.unwrap_or(1);
        let (spec, planned) = (self.spec(), self.refused.planned.clone());
        let mut parts = 2 * now;
        while parts <= MOST_PARTS {
            let plan =
                self.with_models(|model| model.cut_vocabulary(parts), |this| this.plan(&spec, &planned));
            let is_over = !matches!(plan, PlanResult::TooLarge(_));
            if is_over || 2 * parts > MOST_PARTS {
                self.note(format!("--vocabulary-parts {parts}"), plan);
            }
            if is_over {
                break;
            }
            parts *= 2;
        }
        let _ = self.maker.change_models(|model| model.cut_vocabulary(now));
    }

    /// Plans with changed models, if the change is possible.
    fn with_models(
        &mut self,
        change: impl Fn(&mut crate::session::model::Model) -> Result<()>,
        plan: impl FnOnce(&mut Self) -> PlanResult,
    ) -> PlanResult {
        match self.maker.change_models(change) {
            Ok(()) => plan(self),
            Err(_) => PlanResult::Unknown,
        }
    }

    fn note(&mut self, flags: String, plan: PlanResult) {
        match plan {
            PlanResult::Fits(admission) => self.fits(flags, &memory_of(&admission)),
            PlanResult::TooLarge(_) => self.too_large.push(flags),
            PlanResult::Unknown => {}
        }
    }

    /// Tries shorter contexts, which requires reading the data again.
    fn context(&mut self) {
        let before: Vec<DataStats> = self.maker.read().collect();
        let Some(longest) = before.iter().filter_map(|read| read.context).max() else { return };
        let (mut spec, planned) = (self.spec(), self.refused.planned.clone());
        let plan = |this: &mut Self, context: usize| {
            if Duration::from_secs_f64(this.refused.reading_s) > LIMIT_OF_ONE || !this.has_time() {
                return PlanResult::Unknown;
            }
            let mut spec = this.spec();
            set_context(&mut spec, context);
            match this.maker.read_again(&spec) {
                Ok(()) => this.plan(&spec, &planned),
                Err(_) => PlanResult::Unknown,
            }
        };
        let Some((context, admission)) = self.largest("--context", longest, (SHORTEST, 8), 1, &plan) else {
            return;
        };
        set_context(&mut spec, context);
        let cut =
            self.maker.read_again(&spec).ok().and_then(|()| self.maker.read().find_map(|read| cut(read.cut)));
        let details = [Some(memory_of(&admission)), cut].into_iter().flatten().collect::<Vec<_>>().join(", ");
        self.fits(format!("--context {context}"), &details);
    }
}

/// Sets the context of all models that have one.
fn set_context(spec: &mut RunSpec, context: usize) {
    let models = std::iter::once(&mut spec.model).chain(&mut spec.models);
    models.filter(|model| model.context.is_some()).for_each(|model| model.context = Some(context));
}

/// Returns the note on truncated training examples. Text blocks only become shorter.
fn cut(Cut { examples, tokens, of_examples, of_tokens, .. }: Cut) -> Option<String> {
    (examples > 0).then(|| {
        format!(
            "truncates {examples} of {of_examples} training examples, losing {tokens} of {of_tokens} tokens"
        )
    })
}

/// Returns the tasks with batch sizes of at most `batch`, without duplicates.
fn with_batch_at_most(planned: &[PlannedTask], batch: usize) -> Vec<PlannedTask> {
    let mut smaller: Vec<PlannedTask> = Vec::new();
    for one in planned {
        let mut one = one.clone();
        one.configuration.batch = one.configuration.batch.min(batch);
        let same = |other: &PlannedTask| {
            let (one, other) = (&one.configuration, &other.configuration);
            (one.model, one.batch, one.lora, &one.changes)
                == (other.model, other.batch, other.lora, &other.changes)
        };
        if !smaller.iter().any(same) {
            smaller.push(one);
        }
    }
    smaller
}

/// Returns the memory that a plan requires, as text.
fn memory_of(admission: &Admission) -> String {
    let least = admission.tasks.iter().map(|task| task.plan.min_device_memory_bytes).max().unwrap_or(0);
    let host = ByteSize(admission.host_admitted_bytes);
    format!("requires {} per device and {host} on the host", ByteSize(least).at_least())
}

/// Rounds a size up to hundredths of its unit. Returns its text as a flag value, and its bytes.
fn rounded_up(bytes: u64) -> (String, ByteSize) {
    let text = ByteSize(bytes).at_least().replace(' ', "");
    let size = text.parse().unwrap_or(ByteSize(bytes));
    (text, size)
}

/// Stops a plan that exceeds its time limit, or when the run is stopped.
struct PlanTimer {
    until: Instant,
    run_stop: StopFlag,
    stop: StopFlag,
}

impl Observer for PlanTimer {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Pilot { .. })
            && (Instant::now() > self.until || self.run_stop.is_stopped())
        {
            self.stop.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_is_given_as_it_is_printed_is_enough() {
        for bytes in [1, 1023, 1025, 1_048_577, 78_643_201, 12_345_678_901] {
            let (text, size) = rounded_up(bytes);
            assert!(!text.contains(' ') && size.bytes() >= bytes, "{text}");
        }
    }

    #[test]
    fn what_a_context_cuts_off_is_said_where_it_cuts() {
        let of = Cut { of_examples: 9, of_tokens: 100, longest: 30, ..Cut::default() };
        assert_eq!(
            cut(Cut { examples: 3, tokens: 40, ..of }).unwrap(),
            "truncates 3 of 9 training examples, losing 40 of 100 tokens"
        );
        assert_eq!(cut(of), None);
    }
}
