//! Ways out of a refusal for want of memory: settings with which the run fits. Each of them is planned, with pilot passes where
//! they change what is measured, before it is named.

use crate::machine::DevicesArg;
use crate::machine::gpus;
use crate::run_dir::paths::free_bytes_at;
use crate::run_dir::{Planned, RunSpec};
use crate::session::orchestrator::{Environment, orchestrator};
use crate::session::tasks::{Read, TaskMaker};
use crate::settings::DeviceSettings;
use crate::terminal::{Show, quietly, tell};
use anyhow::Result;
use hydra_core::{ByteSize, FloatType};
use hydra_engine::{Admission, EngineError, Measurements, Observer, RunEvent, StopFlag};
use hydra_models::data::Cut;
use hydra_partition::PartitionError;
use std::path::Path;
use std::time::{Duration, Instant};

/// The time in which ways out are looked for, and that of one plan.
const LIMIT: Duration = Duration::from_secs(60);
const LIMIT_OF_ONE: Duration = Duration::from_secs(20);
/// Plans for one size of memory, each with what the one before has needed.
const SIZES: usize = 5;
/// Plans between a value that fits and one that does not.
const BETWEEN: usize = 2;
/// The shortest context that is tried.
const SHORTEST: usize = 8;
/// The most layers that tables of a vocabulary are cut into.
const MOST_PARTS: usize = 32;
/// More of a disk than there is.
const ANY_DISK: ByteSize = ByteSize(u64::MAX / 4);

/// What a run was refused with, and what its plans need.
pub(super) struct Refused<'a> {
    pub(super) spec: &'a RunSpec,
    pub(super) planned: Vec<Planned>,
    /// The run directory, or where it would be.
    pub(super) dir: &'a Path,
    /// What was measured before the run was refused.
    pub(super) measurements: Measurements,
    /// Seconds of reading models and data.
    pub(super) reading_s: f64,
    /// Stops looking.
    pub(super) stop: StopFlag,
}

/// The ways out of a refusal in words that follow it: `; ways out ..`.
pub(super) fn ways_out(
    error: &EngineError,
    refused: Refused<'_>,
    maker: &mut TaskMaker,
    around: &Environment,
) -> String {
    maker.plan_only();
    if around.show != Show::Nothing {
        tell(&format!("trying settings with which the run fits, for {} s at most", LIMIT.as_secs()));
    }
    let until = Instant::now() + LIMIT;
    let around = around.showing(Show::Nothing);
    let mut search = Search { refused, maker, around, until, found: Vec::new(), too_large: Vec::new() };
    quietly(|| search.look(error));
    search.words()
}

/// A search for settings that fit.
struct Search<'a> {
    refused: Refused<'a>,
    maker: &'a mut TaskMaker,
    around: Environment,
    until: Instant,
    found: Vec<String>,
    /// What was tried, and is too large too.
    too_large: Vec<String>,
}

/// What came of a plan.
enum Plan {
    Fits(Box<Admission>),
    /// It needs more of what was refused: so many bytes, where that is known.
    TooLarge(Option<u64>),
    /// It took too long, or is refused for another reason.
    Unknown,
}

/// What memory there is too little of.
#[derive(Clone, Copy)]
enum Lack {
    /// Of a device; true if `needed` is what there is too little, and if a table of a vocabulary needs it.
    Device {
        needed: u64,
        is_rest: bool,
        of_vocabulary: bool,
    },
    /// Of the host; true if masters alone have no room.
    Host {
        needed: u64,
        masters_alone: bool,
    },
    Disk {
        needed: u64,
    },
}

impl Lack {
    fn of(error: &EngineError) -> Option<Self> {
        match error {
            EngineError::Task { source, .. } => Self::of(source),
            EngineError::Partition(PartitionError::LayerTooLarge { needed, layer, .. }) => {
                let of_vocabulary = ["embed", "head"].iter().any(|name| layer.contains(name));
                Some(Self::Device { needed: *needed, is_rest: false, of_vocabulary })
            }
            EngineError::Partition(PartitionError::ShardTooLarge { need, room, .. }) => {
                let needed = need.saturating_sub(*room);
                Some(Self::Device { needed, is_rest: true, of_vocabulary: false })
            }
            EngineError::HostMemory { needed, masters, budget, .. } => {
                Some(Self::Host { needed: *needed, masters_alone: masters >= budget })
            }
            EngineError::DiskMemory { needed, .. } => Some(Self::Disk { needed: *needed }),
            _ => None,
        }
    }

    /// The bytes that a run with this spec needs of it.
    fn bytes(self, spec: &RunSpec) -> u64 {
        match self {
            Self::Device { needed, is_rest: true, .. } => {
                spec.devices.memory().bytes().saturating_add(needed)
            }
            Self::Device { needed, .. } | Self::Host { needed, .. } | Self::Disk { needed } => needed,
        }
    }
}

impl Search<'_> {
    fn words(self) -> String {
        let tried = match self.too_large.is_empty() {
            true => String::new(),
            false => format!("; too large still: {}", self.too_large.join(", ")),
        };
        match self.found.is_empty() {
            true if tried.is_empty() => String::new(),
            true => format!("; no way out was found{tried}"),
            false => {
                format!("; ways out, each of which was planned and fits: {}{tried}", self.found.join("; "))
            }
        }
    }

    fn look(&mut self, error: &EngineError) {
        let Some(lack) = Lack::of(error) else { return };
        // What takes no further pilot pass comes first, and what reads data again last.
        match lack {
            Lack::Device { of_vocabulary, .. } => {
                self.device_memory(lack.bytes(self.refused.spec));
                self.batch();
                if of_vocabulary {
                    self.vocabulary_parts();
                }
                self.float_type();
                self.context();
            }
            Lack::Host { needed, masters_alone } => {
                self.host_memory(needed);
                self.disk_memory();
                if !masters_alone {
                    self.batch();
                    self.float_type();
                    self.context();
                }
            }
            Lack::Disk { needed } => {
                self.memory_of_disk(needed);
                self.host_memory(self.host_budget().saturating_add(needed));
            }
        }
    }

    fn has_time(&self) -> bool {
        Instant::now() < self.until && !self.refused.stop.is_stopped()
    }

    /// Plans the run with another spec, or with other tasks.
    fn plan(&mut self, spec: &RunSpec, planned: &[Planned]) -> Plan {
        if !self.has_time() {
            return Plan::Unknown;
        }
        match self.admission(spec, planned) {
            Ok(Ok(admission)) => Plan::Fits(Box::new(admission)),
            Ok(Err(error)) => match Lack::of(&error) {
                Some(lack) => Plan::TooLarge(Some(lack.bytes(spec))),
                None => Plan::Unknown,
            },
            Err(_) => Plan::Unknown,
        }
    }

    fn admission(&mut self, spec: &RunSpec, planned: &[Planned]) -> Result<Result<Admission, EngineError>> {
        let on = DeviceSettings { strict: true, ..spec.devices.with_disk_in(self.refused.dir) };
        let stop = StopFlag::new();
        let until = self.until.min(Instant::now() + LIMIT_OF_ONE);
        let watch = Watch { until, by: self.refused.stop.clone(), stop: stop.clone() };
        let mut orchestrator = orchestrator(&on, spec.model.dtype, spec.model.seed, &self.around)?
            .measurements(&self.refused.measurements)
            .stop_admission(stop)
            .observer(Box::new(watch));
        for one in planned {
            orchestrator.submit(self.maker.first(spec, one)?)?;
        }
        Ok(orchestrator.admit().map(|run| run.admission().clone()))
    }

    /// The budget of the host in this run.
    fn host_budget(&self) -> u64 {
        self.refused.spec.devices.host_memory.map_or(0, |memory| memory.bytes())
    }

    fn spec(&self) -> RunSpec {
        self.refused.spec.clone()
    }

    /// A setting that fits, with what it needs.
    fn fits(&mut self, flags: String, needs: &str) {
        self.found.push(if needs.is_empty() { flags } else { format!("{flags} ({needs})") });
    }

    /// Tries sizes of memory, each as the plan before needs it; `with` sets one, if this machine has it.
    fn sizes(&mut self, flag: &str, needed: u64, with: impl Fn(&Self, &mut RunSpec, ByteSize) -> bool) {
        let mut needed = needed;
        for _ in 0..SIZES {
            let (text, size) = rounded_up(needed);
            let mut spec = self.spec();
            if !with(self, &mut spec, size) {
                return;
            }
            match self.plan(&spec, &self.refused.planned.clone()) {
                Plan::Fits(_) => return self.fits(format!("{flag} {text}"), ""),
                // A plan that is tried may need a little more than the layers that were measured.
                Plan::TooLarge(Some(more)) => needed = more.max(size.bytes() + size.bytes() / 50),
                Plan::TooLarge(None) | Plan::Unknown => return,
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

    /// Returns whether the machine has so much memory to plan with.
    fn is_free(&self, bytes: u64) -> bool {
        self.around.machine.available.is_none_or(|available| bytes <= available.bytes())
    }

    fn host_memory(&mut self, needed: u64) {
        self.sizes("--host-memory", needed, |this, spec, size| {
            spec.devices.host_memory = Some(size);
            this.is_free(size.bytes())
        });
    }

    /// Tries more of the disk that the run has.
    fn memory_of_disk(&mut self, needed: u64) {
        self.sizes("--disk-memory", needed, |this, spec, size| {
            spec.devices.disk_memory = Some(size);
            this.has_disk(spec, size.bytes())
        });
    }

    /// Tries a disk where the run has none: with as much of it as the plan takes.
    fn disk_memory(&mut self) {
        if self.refused.spec.devices.disk_memory.is_some() {
            return;
        }
        let mut spec = self.spec();
        spec.devices.disk_memory = Some(ANY_DISK);
        match self.plan(&spec, &self.refused.planned.clone()) {
            Plan::Fits(admission) if admission.disk_bytes > 0 => self.memory_of_disk(admission.disk_bytes),
            Plan::TooLarge(_) => self.too_large.push("--disk-memory of any size".to_owned()),
            Plan::Fits(_) | Plan::Unknown => {}
        }
    }

    fn has_disk(&self, spec: &RunSpec, bytes: u64) -> bool {
        let dir = spec.devices.disk.as_deref().unwrap_or(self.refused.dir);
        free_bytes_at(dir).is_none_or(|free| bytes <= free)
    }

    /// Tries smaller batches, and the same ones in more microbatches.
    fn batch(&mut self) {
        let (spec, planned) = (self.spec(), self.refused.planned.clone());
        let accumulate = spec.training.accumulate.max(1);
        let largest = planned.iter().map(|one| one.configuration.batch).max().unwrap_or(1);
        let microbatch = largest.div_ceil(accumulate);
        let plan = |this: &mut Self, microbatch: usize| {
            let smaller = of_batch(&planned, microbatch * accumulate);
            this.plan(&spec, &smaller)
        };
        let Some((fits, admission)) = self.largest("--batch", microbatch, (1, 1), accumulate, &plan) else {
            return;
        };
        self.fits(format!("--batch {}", fits * accumulate), &needs(&admission));
        let (parts, smallest) =
            (largest.div_ceil(fits), planned.iter().map(|one| one.configuration.batch).min().unwrap_or(1));
        if parts > smallest {
            return;
        }
        let mut spec = self.spec();
        spec.training.accumulate = parts;
        if let Plan::Fits(admission) = self.plan(&spec, &planned) {
            let batches: Vec<String> = self.batches();
            self.fits(format!("--batch {} --accumulate {parts}", batches.join(",")), &needs(&admission));
        }
    }

    /// The batches of the run, each once.
    fn batches(&self) -> Vec<String> {
        let mut batches: Vec<usize> = Vec::new();
        for one in &self.refused.planned {
            if !batches.contains(&one.configuration.batch) {
                batches.push(one.configuration.batch);
            }
        }
        batches.iter().map(ToString::to_string).collect()
    }

    /// The largest of the tried values below one that is too large: halves of it down to `least`, and then values between, in
    /// multiples of `grain`. A flag's value is `times` what is tried.
    fn largest(
        &mut self,
        flag: &str,
        too_large: usize,
        (least, grain): (usize, usize),
        times: usize,
        plan: &dyn Fn(&mut Self, usize) -> Plan,
    ) -> Option<(usize, Box<Admission>)> {
        let (mut over, mut value, mut best) = (too_large, too_large / 2, None);
        while value >= least && best.is_none() {
            match plan(self, value) {
                Plan::Fits(admission) => best = Some((value, admission)),
                Plan::TooLarge(_) => (over, value) = (value, value / 2),
                Plan::Unknown => break,
            }
        }
        if best.is_none() && over < too_large {
            self.too_large.push(format!("{flag} {}", over * times));
        }
        for _ in 0..BETWEEN {
            let Some((fits, _)) = &best else { break };
            let between = (fits + over) / 2 / grain * grain;
            // What is hardly larger is not worth a pilot pass.
            if between <= fits + fits / 8 || !self.has_time() {
                break;
            }
            match plan(self, between) {
                Plan::Fits(admission) => best = Some((between, admission)),
                Plan::TooLarge(_) => over = between,
                Plan::Unknown => break,
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
        self.note("--dtype bf16".to_owned(), plan);
        // A model whose type was changed can have it back.
        let _ = self.maker.change_models(|model| {
            model.set_float_type(before);
            Ok(())
        });
    }

    fn vocabulary_parts(&mut self) {
        let now = self.refused.spec.model.vocabulary_parts.unwrap_or(1);
        let (spec, planned) = (self.spec(), self.refused.planned.clone());
        let mut parts = 2 * now;
        while parts <= MOST_PARTS {
            let plan =
                self.with_models(|model| model.cut_vocabulary(parts), |this| this.plan(&spec, &planned));
            let is_over = !matches!(plan, Plan::TooLarge(_));
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

    /// Plans with models that were changed, if they can be.
    fn with_models(
        &mut self,
        change: impl Fn(&mut crate::session::model::Model) -> Result<()>,
        plan: impl FnOnce(&mut Self) -> Plan,
    ) -> Plan {
        match self.maker.change_models(change) {
            Ok(()) => plan(self),
            Err(_) => Plan::Unknown,
        }
    }

    fn note(&mut self, flags: String, plan: Plan) {
        match plan {
            Plan::Fits(admission) => self.fits(flags, &needs(&admission)),
            Plan::TooLarge(_) => self.too_large.push(flags),
            Plan::Unknown => {}
        }
    }

    /// Tries shorter contexts, for which data is read again.
    fn context(&mut self) {
        let before: Vec<Read> = self.maker.read().collect();
        let Some(longest) = before.iter().filter_map(|read| read.context).max() else { return };
        let (mut spec, planned) = (self.spec(), self.refused.planned.clone());
        let plan = |this: &mut Self, context: usize| {
            if Duration::from_secs_f64(this.refused.reading_s) > LIMIT_OF_ONE || !this.has_time() {
                return Plan::Unknown;
            }
            let mut spec = this.spec();
            set_context(&mut spec, context);
            match this.maker.read_again(&spec) {
                Ok(()) => this.plan(&spec, &planned),
                Err(_) => Plan::Unknown,
            }
        };
        let Some((context, admission)) = self.largest("--context", longest, (SHORTEST, 8), 1, &plan) else {
            return;
        };
        set_context(&mut spec, context);
        let cut =
            self.maker.read_again(&spec).ok().and_then(|()| self.maker.read().find_map(|read| cut(read.cut)));
        let needs = [Some(needs(&admission)), cut].into_iter().flatten().collect::<Vec<_>>().join(", ");
        self.fits(format!("--context {context}"), &needs);
    }
}

/// Sets the context of all models that have one.
fn set_context(spec: &mut RunSpec, context: usize) {
    let models = std::iter::once(&mut spec.model).chain(&mut spec.models);
    models.filter(|model| model.context.is_some()).for_each(|model| model.context = Some(context));
}

/// What a context cuts off the training data. Blocks of a text are only shorter.
fn cut(Cut { examples, tokens, of_examples, of_tokens, .. }: Cut) -> Option<String> {
    (examples > 0).then(|| {
        format!("it cuts {examples} of {of_examples} examples, {tokens} of {of_tokens} tokens of the training data off")
    })
}

/// The tasks with batches of at most this size, those that differ in nothing else once.
fn of_batch(planned: &[Planned], batch: usize) -> Vec<Planned> {
    let mut smaller: Vec<Planned> = Vec::new();
    for one in planned {
        let mut one = one.clone();
        one.configuration.batch = one.configuration.batch.min(batch);
        let same = |other: &Planned| {
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

/// What a plan needs, in words.
fn needs(admission: &Admission) -> String {
    let least = admission.tasks.iter().map(|task| task.plan.min_device_memory_bytes).max().unwrap_or(0);
    let host = ByteSize(admission.host_admitted_bytes);
    format!("a device needs {}, the host {host}", ByteSize(least).at_least())
}

/// A size as a flag takes it, rounded up to the hundredth of its unit, and its bytes.
fn rounded_up(bytes: u64) -> (String, ByteSize) {
    let text = ByteSize(bytes).at_least().replace(' ', "");
    let size = text.parse().unwrap_or(ByteSize(bytes));
    (text, size)
}

/// Stops a plan that takes too long, or when the run is stopped.
struct Watch {
    until: Instant,
    by: StopFlag,
    stop: StopFlag,
}

impl Observer for Watch {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Pilot { .. }) && (Instant::now() > self.until || self.by.is_stopped()) {
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
            "it cuts 3 of 9 examples, 40 of 100 tokens of the training data off"
        );
        assert_eq!(cut(of), None);
    }
}
