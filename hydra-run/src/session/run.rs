//! `hydra select` and `hydra train`: trains a grid of configurations, or a single one.

use crate::control::Control;
use crate::machine::kind;
use crate::machine::process_memory::{ProcessGrowth, ProcessMemory};
use crate::run_dir::{
    BestModels, ConfiguredTask, Inputs, Journal, PlannedTask, REPORT, Report, RunDir, RunSpec, SearchLog,
    SharedRunLog, TRACE, TrialNames, WORKLOAD, check_not_read, could_not, lies_in, without_removed,
};
use crate::session::best::KeepBest;
use crate::session::controlled::{
    begin_commands, is_needed, is_stopped_by_command, listen, note_of_commands, report_text,
};
use crate::session::controller::Controller;
use crate::session::data::Data;
use crate::session::endings;
use crate::session::forks::Forks;
use crate::session::logged::RunLogs;
use crate::session::memory_plan;
use crate::session::model::Model;
use crate::session::orchestrator::{
    Both, Environment, admit, decode_memory, devices, note_of_cuts, note_of_decoding, note_of_memory,
    orchestrator, share_of_host_memory,
};
use crate::session::prediction::Prediction;
use crate::session::reference::{Reference, references};
use crate::session::search::Searcher;
use crate::session::tasks::{TaskMaker, described};
use crate::session::times::Times;
use crate::session::watching::{self, Trackers};
use crate::session::ways_out::{Refused, ways_out};
use crate::settings::{
    CheckpointArg, Configuration, ModelSettings, OutSettings, ResultSettings, TaskName, is_own,
};
use crate::terminal::{Interrupted, Outcome, Preparation, RequestedMinibatches, Show, Usage, render, tell};
use anyhow::{Context, Result, bail, ensure};
use hydra_engine::{
    Admission, AdmittedRun, AdmittedTask, CheckpointEvery, Command, Measurements, Orchestrator, RunControl,
    RunReport, StopFlag,
};
use hydra_models::data::DecodeMemory;
use hydra_search::{Search, TrialId};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The part of host memory that the key-value cache of a task may take.
const CACHE_PART: u64 = 8;

/// Runs a spec, or prints its plan (`--dry-run`).
pub fn run(spec: RunSpec, out: &OutSettings, around: &Environment) -> Result<Outcome> {
    let mut spec = spec.checkpointed(out.checkpoints);
    if let Some(path) = &out.out {
        check_inputs(&spec, path)?;
    }
    if let Some(file) = &out.results.record {
        check_record(file)?;
        check_record_replaces_nothing(file, &spec)?;
    }
    let dir = out.out.as_deref().map(|path| RunDir::at(path, out.force)).transpose()?;
    if out.dry_run {
        let dir = dir.map_or_else(RunDir::parent_of_next, Ok)?;
        // A dry run has no directory, and prints its lines itself.
        let show = if out.results.progress.show() == Show::Bars { Show::Bars } else { Show::Nothing };
        return dry_run(&mut spec, dir.path(), out.results.json, &around.showing(show));
    }
    let dir = dir.map_or_else(|| RunDir::next(spec.command.name()), Ok)?;
    run_in(dir, &mut spec, &out.results, None, around)
}

/// Returns the text of `spec.toml` for a run started now, with its context and the hashes of its inputs.
pub fn initial_spec(mut spec: RunSpec, around: &Environment) -> Result<String> {
    let memory = decode_memory(&spec.devices, &around.machine);
    let models = load(&mut spec, &memory, false)?;
    spec.inputs = Some(inputs_of(&spec, &models)?);
    spec.to_toml()
}

/// Prints the memory plan and the prediction of a run, without a run directory.
pub fn explain(mut spec: RunSpec, json: bool, around: &Environment) -> Result<Outcome> {
    dry_run(&mut spec, RunDir::parent_of_next()?.path(), json, around)
}

/// Runs a spec in its directory, from the start or from its checkpoints. `note` is printed once the run is admitted.
pub fn run_in(
    mut dir: RunDir,
    spec: &mut RunSpec,
    results: &ResultSettings,
    note: Option<&str>,
    around: &Environment,
) -> Result<Outcome> {
    let around = &around.showing(results.progress.show());
    around.control.iter().for_each(|control| control.in_directory(dir.path()));
    if around.show != Show::Nothing {
        tell(&format!("run directory: {}", dir.path().display()));
    }
    let mut begin = || {
        let dashboard = watching::dashboard(dir.path(), &results.watching)?;
        let prepared = Prepared::new(spec, &mut dir, around)?;
        Ok((dashboard, prepared, Trackers::begin(dir.path(), &results.watching)?))
    };
    let (_dashboard, prepared, trackers) = match begin() {
        Ok(begun) => begun,
        Err(error) => {
            dir.discard();
            return Err(error);
        }
    };
    note.into_iter().for_each(tell);
    let outcome = prepared.run(&dir, results, around);
    trackers.end();
    outcome
}

/// Fails if an input of the run is inside its run directory, which the run clears first.
fn check_inputs(spec: &RunSpec, out: &Path) -> Result<(), Usage> {
    let plan = spec.devices.plan.as_deref();
    let disk = spec.devices.disk.as_deref().filter(|disk| !lies_in(out, disk));
    let adapter = spec.adapters.adapter.as_deref().map(Path::new);
    let prompts = spec.training.sample_prompts.as_deref();
    let others = [("--adapter", adapter), ("--plan", plan), ("--disk", disk), ("--sample-prompts", prompts)];
    let others = others.into_iter().filter_map(|(flag, path)| Some((flag, path?)));
    for (flag, path) in read_by_models(spec).chain(others) {
        if path.exists() && lies_in(path, out) {
            let (path, out) = (path.display(), out.display());
            return Err(Usage::new(format!(
                "{flag} `{path}` is inside the run directory `{out}`, which the run replaces: pass another --out"
            )));
        }
    }
    Ok(())
}

/// Returns the paths that the models are read from, with their flags.
fn read_by_models(spec: &RunSpec) -> impl Iterator<Item = (&'static str, &Path)> {
    spec.all_models()
        .flat_map(|model| [("--model", Path::new(model.name())), ("--data", Path::new(model.text()))])
}

/// Checks that a file can be written at the end of the run, without changing it.
pub fn check_record(file: &Path) -> Result<(), Usage> {
    let shown = file.display();
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if file.is_dir() || !parent.is_dir() {
        return Err(Usage::new(format!("--record `{shown}` must be a file in an existing directory")));
    }
    let opened = match file.metadata() {
        Ok(found) if found.is_file() => OpenOptions::new().append(true).open(file).map(drop),
        // Opening a pipe or a device has side effects.
        Ok(_) => Ok(()),
        Err(_) => File::create_new(file).and_then(|_| fs::remove_file(file)),
    };
    opened.map_err(|error| Usage::new(format!("--record `{shown}` could not be written: {error}")))
}

/// Fails if the file is an input of the run.
pub fn check_record_replaces_nothing(file: &Path, spec: &RunSpec) -> Result<(), Usage> {
    let mut read: Vec<_> = read_by_models(spec).collect();
    read.extend(spec.devices.plan.as_deref().map(|plan| ("--plan", plan)));
    check_not_read("--record", file, &read)
}

/// Writes the measured costs of the run to the run directory, and to `file` if given.
fn record(dir: &RunDir, report: &RunReport, file: Option<&Path>) -> Vec<Result<()>> {
    let Some(workload) = &report.workload else {
        file.into_iter().for_each(note_unrecorded);
        return Vec::new();
    };
    let json = format!("{}\n", workload.to_json());
    let write = |file: &Path| fs::write(file, &json).with_context(|| could_not(file, "written"));
    std::iter::once(dir.write(WORKLOAD, &json)).chain(file.map(write)).collect()
}

/// Prints a note that the run trained nothing, so that there are no costs to record.
pub fn note_unrecorded(file: &Path) {
    tell(&format!("note: nothing was trained, so nothing was recorded to `{}`", file.display()));
}

fn dry_run(spec: &mut RunSpec, dir: &Path, json: bool, around: &Environment) -> Result<Outcome> {
    let devices = spec.devices.with_disk_in(dir);
    around.release_planning_lock();
    let orchestrator = orchestrator(&devices, spec.model.dtype, spec.model.seed, around)?;
    let (run, submitted, preparation) = prepare(orchestrator, spec, (dir, None), &StopFlag::new(), around)?;
    if !spec.search.is_none() {
        tell(
            "note: the times assume that all trials are trained to their ends; a search stops some, depending on losses",
        );
    }
    if submitted.search.is_some() && !submitted.missing.is_empty() {
        let (forks, all) = (submitted.missing.len(), submitted.planned.len());
        tell(&format!(
            "note: {forks} of the first {all} trials are forked from others, and are not included in these figures"
        ));
    }
    let largest = spec.training.batch.iter().max().copied().unwrap_or(1);
    let prediction = Prediction::of_run(&run, largest)?;
    let (admission, prediction) = (run.admission(), prediction.as_ref());
    let files = submitted.maker.file_bytes(admission, spec, &submitted.planned);
    let running_s = prediction.map_or(admission.estimated_s, |prediction| prediction.makespan_s);
    let times = Times::new(&run, (preparation, running_s), (dir, files.models), spec.checkpoint_every);
    // Unreadable weights are reported by the run, not here.
    let times = times.ok();
    around.print(&match json {
        true => memory_plan::json(admission, files, prediction, times.as_ref())?,
        false => memory_plan::render(admission, files, prediction, times.as_ref()),
    })?;
    Ok(Outcome::Done)
}

/// Loads the inputs of a run, measures and admits it. Returns the time that this took. A run that does not fit in memory is
/// refused with suggestions of settings that fit, unless `stop` is set.
fn prepare(
    orchestrator: Orchestrator,
    spec: &mut RunSpec,
    (path, dir): (&Path, Option<&RunDir>),
    stop: &StopFlag,
    around: &Environment,
) -> Result<(AdmittedRun, Submitted, Preparation)> {
    let (begun, measurements) = (Instant::now(), Measurements::default());
    let mut orchestrator = orchestrator.measurements(&measurements).stop_admission(stop.clone());
    let mut submitted = submit(&mut orchestrator, spec, dir, around)?;
    let reading_s = begun.elapsed().as_secs_f64();
    let run = admit(orchestrator, around, |error| {
        let is_missing = |one: &PlannedTask| {
            submitted.missing.iter().any(|of| of.configuration.name == one.configuration.name)
        };
        let planned =
            submitted.planned.iter().filter(|one| !one.deleted && !is_missing(one)).cloned().collect();
        let (stop, spec) = (stop.clone(), &*spec);
        let refused = Refused { spec, planned, dir: path, measurements, reading_s, stop };
        ways_out(error, refused, &mut submitted.maker, around)
    })?;
    let measuring_s = begun.elapsed().as_secs_f64() - reading_s;
    Ok((run, submitted, Preparation { reading_s, measuring_s }))
}

/// Loads models and data, submits every configuration, and sets the contexts of the spec.
fn submit(
    orchestrator: &mut Orchestrator,
    spec: &mut RunSpec,
    dir: Option<&RunDir>,
    around: &Environment,
) -> Result<Submitted> {
    spec.devices.check_group(spec.training.accumulate)?;
    let memory = decode_memory(&spec.devices, &around.machine);
    let models = load(spec, &memory, dir.is_some_and(|dir| dir.resumed))?;
    let kept = memory.keep_largest();
    orchestrator.keep_host_memory(kept);
    note_of_decoding(kept).as_deref().into_iter().for_each(tell);
    let notes = notes_of_lengths(spec, &models)?;
    let notes = notes.into_iter().chain(note_of_cuts(&spec.devices));
    notes.chain(note_of_memory(&spec.devices, &around.machine)).for_each(|note| tell(&note));
    if let Some(dir) = dir {
        check_inputs_of(spec, dir, &models)?;
    }
    let references = references(spec, &models)?;
    if dir.is_none() && !references.is_empty() {
        tell("note: the time to score the answers with the reference, once before training, is not included");
    }
    let search = match dir.filter(|dir| dir.resumed) {
        Some(dir) => spec.search_in(dir.path())?,
        None => spec.search()?,
    };
    let planned = match &search {
        Some(search) => spec.planned(search)?,
        None => spec.controlled()?,
    };
    note_of_part(spec, &planned)?.as_deref().into_iter().for_each(tell);
    let cache_bytes = share_of_host_memory(&spec.devices, &around.machine, CACHE_PART);
    let mut maker = TaskMaker::new(models, spec, dir, (around.control.clone(), cache_bytes))?;
    if maker.generates() && !spec.devices.are_cpus() {
        bail!(Usage::new(
            "texts are generated at evaluations on CPUs alone: omit --sample-prompts and metrics of texts, or pass --devices cpu"
        ));
    }
    maker.notes_of_samples().into_iter().for_each(|note| tell(note));
    if dir.is_none() && maker.generates() {
        tell("note: the time to generate texts at evaluations is not included");
    }
    let (mut missing, all) = (Vec::new(), &planned);
    for planned in &planned {
        // Other tasks may still need a state of a deleted one.
        if planned.deleted && dir.is_some_and(|dir| dir.resumed) && !is_needed(&maker, all, planned)? {
            continue;
        }
        match maker.can_start(planned)? {
            true => drop(orchestrator.submit(maker.first(spec, planned)?)?),
            false => missing.push(planned.clone()),
        }
    }
    for one in spec.search.shapes(&spec.training, &spec.adapters)? {
        if let Some(shape) = maker.shape(spec, one)? {
            orchestrator.submit_shape(shape)?;
        }
    }
    maker.notes_of_types(spec).iter().for_each(|note| tell(note));
    Ok(Submitted { search, planned, missing, references, maker })
}

/// Loads the models of a spec with their data, and prints the notes on their origin. Images are decoded in `memory`.
fn load(spec: &mut RunSpec, memory: &Arc<DecodeMemory>, resumed: bool) -> Result<Vec<(Model, Data)>> {
    let evaluated = spec.training.is_evaluated();
    let (seeds, several) = (spec.grid.seeds(), !spec.models.is_empty());
    let (mut models, mut notes) = (Vec::new(), BTreeSet::new());
    for settings in std::iter::once(&mut spec.model).chain(&mut spec.models) {
        let mut model = Model::load(settings, memory)?;
        model.take_classes(&spec.adapters)?;
        let seeds = seeds.clone().unwrap_or_else(|| vec![settings.seed]);
        let of = if several { format!(" of {}", settings.short_name()) } else { String::new() };
        let which = format!("{of}{}", if resumed { " at the start" } else { "" });
        let note = model.note_of_origin(&spec.adapters, &seeds, &which);
        if notes.insert(note.clone()) {
            tell(&note);
        }
        let data = model.data(settings.text())?;
        settings.context = data.context;
        // The spec and the report name what is trained, also where the model's head decides it.
        settings.task = settings.task.or(model.classifies_texts().then_some(TaskName::Classify));
        if evaluated && data.validation.is_none() {
            let text = settings.text();
            let flag = if spec.search.is_none() { "--eval-every" } else { "a search" };
            bail!(Usage::new(format!("{flag} requires validation data, and `{text}` has none")));
        }
        models.push((model, data));
    }
    Ok(models)
}

/// Returns the notes on unused data, and on batch sizes and warmups that exceed the data, without duplicates.
fn notes_of_lengths(spec: &RunSpec, models: &[(Model, Data)]) -> Result<Vec<String>> {
    let mut notes: Vec<String> = notes_of_pairs(spec).map(str::to_owned).collect();
    let grid = spec.grid()?;
    for (_, data) in models {
        let batches = spec.training.batch.iter().filter_map(|batch| data.note_of_batch(*batch));
        let warmup = spec.training.note_of_warmup(&grid, data.train.len())?;
        for note in data.notes.iter().cloned().chain(batches).chain(warmup) {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
    }
    Ok(notes)
}

/// Returns the notes on what is decided for preferences and rewards.
fn notes_of_pairs(spec: &RunSpec) -> impl Iterator<Item = &'static str> {
    let reads_pairs = |model: &ModelSettings| model.task.is_some_and(TaskName::reads_pairs);
    let without = |model: &ModelSettings| reads_pairs(model) && model.dropout.is_none();
    let dropout = spec.all_models().any(without) && !spec.grid.has("dropout");
    let settings = ["beta", "gamma"].iter().any(|name| spec.grid.has(name)) && spec.training.metric.is_none();
    let notes = [
        (dropout, "note: dropout is off for preferences and rewards, as in TRL: --dropout P sets it"),
        (
            settings,
            "note: losses of different --beta and --gamma do not compare, and they rank the tasks: --metric reward_accuracy ranks by \
             the preferences",
        ),
    ];
    notes.into_iter().filter(|(applies, _)| *applies).map(|(_, note)| note)
}

/// The tasks of a run at its start.
struct Submitted {
    search: Option<Search>,
    planned: Vec<PlannedTask>,
    /// The tasks among them that start when their parents' states are saved.
    missing: Vec<PlannedTask>,
    /// The references of preference losses, to be scored before the run starts.
    references: Vec<Reference>,
    maker: TaskMaker,
}

/// Returns the note on the tasks of a run that trains a part of its grid.
fn note_of_part(spec: &RunSpec, planned: &[PlannedTask]) -> Result<Option<String>> {
    if spec.tasks.is_none() {
        return Ok(None);
    }
    let part = spec.tasks.part.map_or("--only".to_owned(), |part| format!("part {part}"));
    let names: Vec<&str> = planned.iter().map(|planned| planned.configuration.name.as_str()).collect();
    let (some, all, names) = (names.len(), spec.whole_grid()?.len(), names.join(", "));
    Ok(Some(format!("note: {part}: {some} of the grid's {all} tasks: {names}")))
}

/// Returns the note on samples of a search that are the same trial.
fn note_of_repeats(spec: &RunSpec, search: &Search) -> Option<String> {
    let repeats = search.repeats();
    let first = repeats.first()?;
    Some(format!(
        "note: {} of the search's samples repeat earlier ones and share their trials; sample {} is {}",
        repeats.len(),
        first.draw,
        name_of_trial(spec, search, first.trial)
    ))
}

/// Hashes the inputs of a run of these models.
fn inputs_of(spec: &RunSpec, models: &[(Model, Data)]) -> Result<Inputs> {
    let of = |(model, data): &(Model, Data)| {
        Inputs::of(&model.described()?, &model.files(&spec.adapters)?, data.splits())
    };
    let each = models.iter().map(of).collect::<Result<Vec<_>>>()?;
    Inputs::of_all(each).context("a run has a model")
}

/// Records the inputs of a new run. For a resumed run, fails if they have changed and a task starts from the beginning.
fn check_inputs_of(spec: &mut RunSpec, dir: &RunDir, models: &[(Model, Data)]) -> Result<()> {
    if !dir.resumed {
        spec.inputs = Some(inputs_of(spec, models)?);
        return Ok(());
    }
    // Runs of earlier versions have no recorded inputs.
    let Some(begun) = &spec.inputs else { return Ok(()) };
    for Configuration { name, .. } in spec.grid_in(dir.path())? {
        if !dir.checkpoint_file(&name)?.exists() {
            let now = inputs_of(spec, models)?;
            return begun.check(&name, &now, &spec.all_models().collect::<Vec<_>>());
        }
    }
    Ok(())
}

/// An admitted run with open files.
struct Prepared {
    run: AdmittedRun,
    logged: RunLogs,
    stop: StopFlag,
    checkpoints: bool,
    spec: RunSpec,
    /// True if it has no search, so that commands control it.
    controlled: bool,
    controller: Controller,
}

impl Prepared {
    fn new(spec: &mut RunSpec, dir: &mut RunDir, around: &Environment) -> Result<Self> {
        let stop = around.stop_flag()?;
        let devices = devices(&spec.devices, &around.machine).into_iter().map(|device| device.name);
        let devices: Vec<String> = devices.collect();
        let on = spec.devices.with_disk_in(dir.path());
        let orchestrator = orchestrator(&on, spec.model.dtype, spec.model.seed, around)?;
        let CheckpointArg(every) = spec.checkpoint_every;
        let checkpoints = every.is_some();
        let every = every.unwrap_or(CheckpointEvery::Time(Duration::MAX));
        let orchestrator = orchestrator.stop_flag(stop.clone()).checkpoint_every(every);
        let run_control = RunControl::new();
        let orchestrator = match spec.search.is_none() && !spec.devices.reserve_for_forks {
            true => orchestrator.listen(&run_control),
            false => orchestrator.control(&run_control),
        };
        let path = dir.path().to_owned();
        let (mut run, submitted, preparation) =
            prepare(orchestrator, spec, (&path, Some(dir)), &stop, around)?;
        let admission = run.admission().clone();
        let files = submitted.maker.file_bytes(&admission, spec, &submitted.planned);
        let Submitted { search, planned, missing, references, maker } = submitted;
        let tasks: Vec<String> = admission.tasks.iter().map(|task| task.name.clone()).collect();
        let disk = on.disk.as_deref().filter(|_| admission.disk_bytes > 0);
        dir.check_disk_space(&files, disk.map(|disk| (disk, admission.disk_bytes)))?;
        ensure!(!stop.is_stopped(), Interrupted);
        let text = spec.to_toml()?;
        if disk.is_some_and(Path::is_dir) {
            run.reserve_disk().context("the run was refused")?;
        }
        // Earlier contents are removed only here, after every other check.
        dir.begin()?;
        run.reserve_disk().context("the run was refused")?;
        dir.write_spec(&text)?;
        write_plans(dir, &admission)?;
        references.iter().try_for_each(|one| one.score(spec, dir.path(), &stop, around))?;
        let from_s = if dir.resumed { Journal::read(dir.path())?.at_s } else { 0.0 };
        let (metrics, trace) = (dir.metrics()?, dir.open(TRACE)?);
        let control = around.control.clone();
        let log = SharedRunLog::new(metrics, trace, tasks.clone(), &devices, from_s, control)
            .context("the run log could not be opened")?;
        log.configurations(configurations(spec, &planned, &admission)?);
        log.machine(&kind());
        let registrar = around.registrar(&spec.devices, &shown(dir.path()));
        let asked = RequestedMinibatches::default();
        let progress = around.progress().after(preparation);
        let progress = if search.is_some() { progress.of_search(asked.clone()) } else { progress };
        let best = KeepBest::new(dir, spec.save.keep_best)?;
        let observer = Both(registrar, Both(Both(log.clone(), best), progress));
        for task in planned.iter().filter(|planned| planned.stopped) {
            drop(run_control.send(Command::Stop { task: task.configuration.name.clone() }));
        }
        let waits =
            |one: &PlannedTask| missing.iter().any(|of| of.configuration.name == one.configuration.name);
        let begun = planned.iter().filter(|one| !waits(one));
        let forks = Forks::new(spec.clone(), maker, run_control.clone(), begun);
        let controlled = search.is_none();
        let (run, controller) = match search {
            Some(search) => {
                note_of_repeats(spec, &search).as_deref().into_iter().for_each(tell);
                let (log, controller) =
                    (SearchLog::open(dir.path())?, Controller::for_search(run_control.clone()));
                let searcher = Searcher::new(search, log, run_control, forks, missing, asked)?;
                (run.observer(Box::new(Both(Both(observer, searcher), controller.clone()))), controller)
            }
            None => {
                note_of_commands(&planned).as_deref().into_iter().for_each(tell);
                let log = begin_commands(dir, spec, &tasks, &planned, &forks)?;
                let controller = Controller::for_tasks(run_control, planned, forks, missing, log)?;
                (run.observer(Box::new(Both(observer, controller.clone()))), controller)
            }
        };
        let logged = RunLogs { log, tasks, devices, spec: text };
        Ok(Self { run, logged, stop, checkpoints, spec: spec.clone(), controlled, controller })
    }

    fn run(self, dir: &RunDir, asked: &ResultSettings, around: &Environment) -> Result<Outcome> {
        let Self { run, logged, stop, checkpoints, spec, controlled, controller } = self;
        let server = listen(dir, controller.clone());
        if let Some(control) = &around.control {
            let controller = controller.clone();
            control.listen(move |line| controller.answer(line));
        }
        let process = ProcessMemory::begin();
        let report = run.start();
        around.control.iter().for_each(Control::stop_listening);
        let report = report.context("the run ended early")?;
        drop(server);
        let process = process.filter(|_| spec.devices.are_cpus());
        let process = process.and_then(|memory| memory.growth(peak_bytes(&report)));
        note_of_process(&spec, process.as_ref()).as_deref().into_iter().for_each(tell);
        let keep = spec.save.keep_best;
        let prune = |keep: usize| BestModels::new(dir, keep)?.prune(!stop.is_stopped());
        let pruned = keep.map_or(Ok(()), prune);
        let planned = controller.planned();
        let (text, unknown) = match report_text(&report, process.as_ref(), &planned, dir) {
            Ok(text) => (text, None),
            // Only the details of deleted tasks are missing then.
            Err(error) => (report_text(&report, process.as_ref(), &[], dir)?, Some(error)),
        };
        let text = if keep.is_some() { without_removed(&text)? } else { text };
        let readable = Report::parse(&text)?;
        let search = if controlled { Ok(None) } else { spec.search_in(dir.path()) };
        let (search, unread) = search.map_or_else(|error| (None, Some(error)), |search| (search, None));
        let all_ended = controlled && !readable.stopped_but(|task| is_stopped_by_command(&planned, task));
        let is_over = all_ended || search.as_ref().is_some_and(|search| search.outcome().is_some());
        if is_over && !stop.is_stopped() && (!controlled || readable.failures().is_empty()) {
            // No more tasks will be forked.
            dir.remove_states();
        }
        let searched = search.as_ref().map(|search| searched_line(&spec, search)).unwrap_or_default();
        // A failure to write one file does not prevent the report and the other files.
        let mut results = logged.end(dir, &report, &readable);
        results.extend(record(dir, &report, asked.record.as_deref()));
        let is_whole = readable.failures().is_empty() && results.iter().all(Result::is_ok);
        let at = match is_whole {
            true => format!("results in {}\n{}", dir.path().display(), readable.best_lines(dir.path())),
            false => String::new(),
        };
        let shown = match asked.json {
            true => format!("{text}\n"),
            false => format!("{}\n{searched}{at}", readable.render()),
        };
        // The report is the last file: without it, the run counts as unfinished and can be resumed.
        results.push(dir.write(REPORT, &format!("{text}\n")));
        results.push(around.print(&shown));
        results.extend([unknown, unread].into_iter().flatten().map(Err));
        results.push(pruned);
        let errors: Vec<anyhow::Error> = results.into_iter().filter_map(Result::err).collect();
        let last = endings::last_line(&readable, &errors, dir);
        around.print_errors(error_lines(&readable, &errors).into_iter().chain(last).collect());
        let outcome = outcome(&readable, &errors, stop.is_stopped(), is_over);
        if around.control.is_none() && outcome == Outcome::Interrupted && checkpoints && !report.all_done() {
            tell(&format!("note: continue with: hydra resume {}", dir.path().display()));
        }
        Ok(outcome)
    }
}

/// Returns the peak of the memory that a run on CPUs reserved, on the host and on its devices.
fn peak_bytes(report: &RunReport) -> u64 {
    report.host_peak_bytes + report.devices.iter().map(|device| device.peak_bytes).sum::<u64>()
}

/// Returns the note on a process that grew by more than was reserved, if its own modules train: the engine does not allocate
/// what they take outside of tensors.
fn note_of_process(spec: &RunSpec, process: Option<&ProcessGrowth>) -> Option<String> {
    let trains_own = spec.all_models().any(|model| is_own(model.name()));
    process.filter(|_| trains_own).and_then(ProcessGrowth::note)
}

/// Returns the absolute path of the run directory, as shown to other runs.
fn shown(dir: &Path) -> String {
    std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()).display().to_string()
}

/// Returns the configuration and the minibatches of each admitted task.
fn configurations(
    spec: &RunSpec,
    planned: &[PlannedTask],
    admission: &Admission,
) -> Result<Vec<ConfiguredTask>> {
    let described = |task: &AdmittedTask| {
        let one = planned.iter().find(|one| one.configuration.name == task.name);
        let training = |one: &PlannedTask| {
            let one = &one.configuration;
            spec.training.of(one, spec.model_of(one).seed, task.data.items)
        };
        let train = one.map(training).transpose()?;
        let config = one.zip(train).map_or(Value::Null, |(one, train)| described(spec, one, &train));
        let (name, unit) = (task.name.clone(), task.data.unit.clone());
        Ok(ConfiguredTask { task: name, config, steps: task.steps, unit })
    };
    admission.tasks.iter().map(described).collect()
}

fn write_plans(dir: &RunDir, admission: &Admission) -> Result<()> {
    for task in &admission.tasks {
        task.plan.save(&dir.plan_file(&task.name)?)?;
        tracing::info!("{}: {}", task.name, task.plan);
    }
    Ok(())
}

/// Returns the name of a trial's task.
fn name_of_trial(spec: &RunSpec, search: &Search, trial: TrialId) -> String {
    let found = spec.configuration(search, trial, &mut TrialNames::default());
    found.map_or_else(|_| format!("trial {trial}"), |one| one.name)
}

/// Returns the line on the result of a search.
fn searched_line(spec: &RunSpec, search: &Search) -> String {
    let best = |trial: TrialId| search.trial(trial).map_or(String::new(), |view| view.settings.to_string());
    // The task that has the trial's weights.
    let task = |trial: TrialId| search.trial(trial).map_or(trial, |view| view.task);
    let best = match search.outcome().map(|outcome| outcome.best) {
        Some(Some(trial)) => {
            format!("the best is {} ({})", name_of_trial(spec, search, task(trial)), best(trial))
        }
        Some(None) => "every trial failed".to_owned(),
        None => "it is not finished".to_owned(),
    };
    let (trials, work) = (search.trials().len(), search.work());
    let apart = match work.apart.checked_sub(work.trained) {
        Some(shared @ 1..) => format!(" ({shared} saved by sharing common prefixes)"),
        _ => String::new(),
    };
    let same = match search.trials().filter(|view| view.same_as.is_some()).count() {
        0 => String::new(),
        same => format!(" ({same} of them equal to others)"),
    };
    format!("search: {trials} trials{same}, {} minibatches{apart}; {best}\n\n", work.trained)
}

/// Returns the lines on failed tasks and `errors`.
fn error_lines(report: &Report, errors: &[anyhow::Error]) -> Vec<String> {
    let failures = report.failures();
    let count = format!("error: {} of {} tasks failed", failures.len(), report.task_count());
    let mut lines = Vec::from_iter((!failures.is_empty()).then_some(count));
    lines.extend(failures.iter().map(|failure| format!("  {failure}")));
    lines.extend(errors.iter().map(|error| render(error).trim_end().to_owned()));
    lines
}

/// Returns the outcome of the run.
fn outcome(report: &Report, errors: &[anyhow::Error], interrupted: bool, is_over: bool) -> Outcome {
    // A finished search has stopped its losing trials.
    if interrupted || report.stopped() && !is_over {
        return Outcome::Interrupted;
    }
    if report.failures().is_empty() && errors.is_empty() { Outcome::Done } else { Outcome::Failed }
}
