//! Frozen buffers that are read in place: the same bits as from host memory, in memory that does not count them.

use crate::common::Classifier;
use crate::common::{Settings, StopAfter, adamw, spirals};
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{
    ByteSize, Chain, FileSpan, FloatType, Length, PartReader, SeededInit, TrainSpec, WeightError,
    WeightSource,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, EngineError, FrozenWeights, Observer, Orchestrator, RunEvent, RunReport,
    StopFlag, TaskState, TrainTask, plain,
};
use hydra_models::mlp::Dense;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const WIDTH: usize = 96;
/// Bytes before the first value, so that values are not aligned.
const HEADER: usize = 13;

/// The initial weights of a chain in a file: the values of each parameter one after the other.
#[derive(Clone)]
struct InFile {
    path: Arc<Path>,
    float: FloatType,
}

impl InFile {
    /// The offset of the first value of each parameter of a buffer.
    fn offsets(&self, chain: &Chain, buffer: usize) -> Vec<u64> {
        let before = chain.buffers()[..buffer].iter().map(|buffer| buffer.parameters()).sum::<u64>();
        let mut end = before as usize;
        let mut offset = |len: usize| {
            let start = end;
            end += len;
            (HEADER + start * self.float.bytes()) as u64
        };
        chain.buffers()[buffer].params.iter().map(|param| offset(param.len)).collect()
    }

    fn bytes(chain: &Chain, float: FloatType) -> Vec<u8> {
        let mut bytes = vec![9; HEADER];
        for (index, buffer) in chain.buffers().iter().enumerate() {
            let mut values = vec![0.0; buffer.elements];
            SeededInit.fill(chain, index, 77, &mut values).expect("values");
            for param in &buffer.params {
                let values = &values[param.range()];
                if float == FloatType::F32 {
                    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
                } else {
                    let mut bits = vec![0; values.len()];
                    float.narrow(values, &mut bits);
                    bits.iter().for_each(|bits| bytes.extend(bits.to_le_bytes()));
                }
            }
        }
        bytes
    }

    fn read(&self, offset: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let file = fs::read(&self.path);
        let file =
            file.map_err(|error| WeightError::Read { param: "any".to_owned(), source: error.into() })?;
        let bytes = &file[offset as usize..][..out.len() * self.float.bytes()];
        match self.float {
            FloatType::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
            float => float.widen(&bytemuck::pod_collect_to_vec::<u8, u16>(bytes), out),
        }
        Ok(())
    }
}

impl WeightSource for InFile {
    fn fill(&self, chain: &Chain, buffer: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let mut params = chain.buffers()[buffer].params.iter().zip(self.offsets(chain, buffer));
        params.try_for_each(|(param, offset)| self.read(offset, &mut out[param.range()]))
    }

    fn parts<'a>(&'a self, chain: &'a Chain, buffer: usize) -> Option<PartReader<'a>> {
        let (offsets, each) = (self.offsets(chain, buffer), self.float.bytes());
        Some(Box::new(move |slot, first, out| self.read(offsets[slot] + (first * each) as u64, out)))
    }

    fn origin(&self, _: &Chain, _: usize, _: u64) -> Option<String> {
        Some(self.path.display().to_string())
    }

    fn float_type(&self, _: &Chain, _: usize) -> FloatType {
        self.float
    }

    fn spans(&self, chain: &Chain, buffer: usize) -> Option<Vec<FileSpan>> {
        let span = |offset| FileSpan { path: self.path.clone(), offset };
        Some(self.offsets(chain, buffer).into_iter().map(span).collect())
    }
}

/// A perceptron whose last two layers are trained, with weights in a file of a temporary directory.
struct Model {
    dir: TempDir,
    chain: Arc<Chain>,
    bytes: Vec<u8>,
}

impl Model {
    /// A model that computes in the type of its file.
    fn new(float: FloatType) -> Self {
        Self::of(float, |chain| chain.with_float_type(float))
    }

    /// A model whose file has values of this type.
    fn of(float: FloatType, typed: impl FnOnce(Chain) -> Chain) -> Self {
        let dir = TempDir::new().expect("a directory");
        let path: Arc<Path> = dir.path().join("base.safetensors").into();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
        let dense = |inputs, outputs| Dense { linear: linear(inputs, outputs) };
        let builder = Chain::builder("wide").layer("in", dense(2, WIDTH));
        let builder = (0..4).fold(builder, |builder, k| builder.layer(format!("b.{k}"), dense(WIDTH, WIDTH)));
        let builder = builder.layer("head", Classifier { linear: linear(WIDTH, 3) }).metrics(["accuracy"]);
        let chain = builder.weights(InFile { path: path.clone(), float }).build();
        let chain = chain.and_then(|chain| chain.training_only(&["b.3", "head"])).expect("a chain");
        let chain = Arc::new(typed(chain));
        let bytes = InFile::bytes(&chain, float);
        fs::write(&path, &bytes).expect("a file");
        Self { dir, chain, bytes }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("base.safetensors")
    }

    /// Inverts the bits of one value of the second layer.
    fn damage(&self) {
        let mut file = fs::File::options().write(true).open(self.path()).expect("the file");
        file.seek(SeekFrom::Start(4000)).expect("a position");
        file.write_all(&[!self.bytes[4000]]).expect("a change");
    }

    fn restore(&self) {
        fs::write(self.path(), &self.bytes).expect("a file");
    }

    fn frozen_bytes(&self) -> u64 {
        let frozen = self.chain.buffers().iter().filter(|buffer| !buffer.trained);
        frozen.map(|buffer| buffer.bytes()).sum()
    }

    fn task(&self, name: &str, seed: u64) -> TrainTask {
        TrainTask::new(name, self.chain.clone(), spirals(), spec(seed)).cuts(vec![2, 4])
    }

    fn plain(&self, seed: u64) -> String {
        let plain = plain::train(&self.chain, spirals().as_ref(), &spec(seed));
        plain.expect("the plain loop").weights_sha256
    }
}

fn spec(seed: u64) -> TrainSpec {
    TrainSpec { length: Length::Steps(6), accumulate: 2, seed, ..adamw(8) }
}

/// Settings under which every promotion reads its parameters again.
fn settings() -> Settings {
    Settings { cuts: Some(vec![2, 4]), cache: false, ..Settings::default() }
}

/// Runs tasks and returns the bytes that are read in place, and the report.
fn run(mut orchestrator: Orchestrator, tasks: Vec<TrainTask>) -> (u64, RunReport) {
    for task in tasks {
        orchestrator.submit(task).expect("a task");
    }
    let admitted = orchestrator.admit().expect("it fits");
    let in_place = admitted.admission().tasks.iter().map(|task| task.storage.in_place_bytes).sum();
    let report = admitted.start().expect("a run");
    assert!(report.host_peak_bytes <= report.host_admitted_bytes, "{report:?}");
    for device in &report.devices {
        assert!(device.peak_bytes <= device.budget_bytes, "{device:?}");
    }
    (in_place, report)
}

fn hash(report: &RunReport, task: usize) -> &str {
    let task = &report.tasks[task];
    assert_eq!((task.state, &task.error), (TaskState::Done, &None), "{}", task.name);
    task.weights_sha256.as_deref().expect("a hash")
}

/// The host memory that a task needs with its frozen weights in these places.
fn needed(task: &TrainTask, frozen: FrozenWeights) -> u64 {
    let mut run = settings().orchestrator().host_memory(ByteSize(1)).frozen_weights(frozen);
    run.submit(task.clone()).expect("a task");
    match run.admit() {
        Err(EngineError::HostMemory { needed, .. }) => needed,
        other => panic!("expected too little host memory, found {other:?}"),
    }
}

#[test]
fn buffers_that_are_read_in_place_train_to_the_same_bits() {
    for float in [FloatType::Bf16, FloatType::F32] {
        let model = Model::new(float);
        let plain = model.plain(1);
        for cuts in [vec![], vec![2, 4], (1..6).collect()] {
            for (devices, zero_copy, cache) in
                [(1, false, true), (1, true, true), (2, false, false), (2, true, false), (1, true, false)]
            {
                let settings = Settings { devices, zero_copy, cache, ..Settings::default() };
                let [in_memory, in_place] = [FrozenWeights::Memory, FrozenWeights::Files].map(|frozen| {
                    let task = model.task("a", 1).cuts(cuts.clone());
                    run(settings.orchestrator().frozen_weights(frozen), vec![task])
                });
                assert_eq!((in_memory.0, in_place.0), (0, model.frozen_bytes()), "{settings:?}");
                assert_eq!(hash(&in_place.1, 0), plain, "{float} {cuts:?} {settings:?}");
                assert_eq!(in_place.1.tasks[0].losses, in_memory.1.tasks[0].losses);
                let [memory, files] = [in_memory.1.host_peak_bytes, in_place.1.host_peak_bytes];
                assert!(files < memory, "{files} of {memory} bytes");
            }
        }
    }
}

#[test]
fn frozen_weights_of_16_bits_are_widened_to_the_bits_that_f32_has() {
    for float in [FloatType::Bf16, FloatType::F16] {
        let wide = Model::of(float, |chain| chain);
        let narrow = Model::of(float, |chain| chain.with_frozen_float_type(float));
        let expected = wide.plain(1);
        assert_eq!(narrow.plain(1), expected);
        assert_eq!(2 * narrow.frozen_bytes(), wide.frozen_bytes());
        for frozen in [FrozenWeights::Memory, FrozenWeights::Files] {
            for (devices, threads, zero_copy) in [(1, 1, false), (1, 2, true), (2, 1, false)] {
                let settings = Settings { devices, threads, zero_copy, ..settings() };
                let run = |model: &Model| {
                    run(settings.orchestrator().frozen_weights(frozen), vec![model.task("a", 1)])
                };
                let ((in_place, ours), (_, theirs)) = (run(&narrow), run(&wide));
                let of_file = if frozen == FrozenWeights::Files { narrow.frozen_bytes() } else { 0 };
                assert_eq!(in_place, of_file, "{settings:?}");
                assert_eq!(hash(&ours, 0), expected, "{float} {frozen:?} {settings:?}");
                assert_eq!(ours.tasks[0].losses, theirs.tasks[0].losses);
                if !zero_copy {
                    assert!(ours.transfers.promoted_bytes < theirs.transfers.promoted_bytes);
                }
            }
        }
        let stored = |model: &Model| model.chain.buffers().iter().map(|b| b.master_bytes()).sum::<u64>();
        assert_eq!(stored(&wide) - stored(&narrow), narrow.frozen_bytes());
    }
}

#[test]
fn a_base_that_does_not_fit_host_memory_is_read_in_place_before_a_disk_is_used() {
    for float in [FloatType::Bf16, FloatType::F32] {
        let model = Model::new(float);
        let task = model.task("a", 1);
        let [memory, files] =
            [FrozenWeights::Memory, FrozenWeights::Files].map(|frozen| needed(&task, frozen));
        assert!(files + model.frozen_bytes() / 2 <= memory, "{files} and {memory} bytes");
        assert_eq!(needed(&task, FrozenWeights::Auto), files);
        let disk = TempDir::new().expect("a directory");
        for host in [memory, memory - 1, files] {
            let orchestrator = settings().orchestrator().host_memory(ByteSize(host));
            let orchestrator = orchestrator.disk(disk.path().to_owned(), ByteSize::mib(64));
            let (in_place, report) = run(orchestrator, vec![task.clone()]);
            assert_eq!(in_place > 0, host < memory, "{host} of {memory} bytes");
            assert_eq!(hash(&report, 0), model.plain(1));
            assert_eq!(report.tasks[0].plan.disk_bytes, 0);
        }
        let refused = settings().orchestrator().host_memory(ByteSize(memory - 1));
        let mut refused = refused.frozen_weights(FrozenWeights::Memory);
        refused.submit(task).expect("a task");
        assert!(matches!(refused.admit(), Err(EngineError::HostMemory { .. })));
    }
}

#[test]
fn tasks_share_a_base_that_is_read_in_place() {
    let model = Model::new(FloatType::Bf16);
    let tasks = || (1..4).map(|seed| model.task(&format!("{seed}"), seed)).collect();
    let in_files = || settings().orchestrator().frozen_weights(FrozenWeights::Files);
    let (_, report) = run(in_files(), tasks());
    (0..3).for_each(|task| assert_eq!(hash(&report, task), model.plain(task as u64 + 1)));
    let queued = in_files().queued(1);
    let (_, report) = run(queued, tasks());
    (0..3).for_each(|task| assert_eq!(hash(&report, task), model.plain(task as u64 + 1)));
}

#[test]
fn a_stopped_run_resumes_with_its_base_in_either_place() {
    use FrozenWeights::{Files, Memory};
    let model = Model::new(FloatType::Bf16);
    let plain = model.plain(1);
    for (before, after) in [(Memory, Files), (Files, Memory), (Files, Files)] {
        let dir = TempDir::new().expect("a directory");
        let file = dir.path().join("checkpoint.safetensors");
        let stop = StopFlag::new();
        let run_to = settings().orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
        let run_to = run_to.stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 2)));
        let task = || model.task("a", 1).checkpoint_to(file.clone());
        let (_, report) = run(run_to.frozen_weights(before), vec![task()]);
        assert_eq!(report.tasks[0].state, TaskState::Stopped);
        let resumed = || task().resume_from(Checkpoint::open(&file).expect("a checkpoint"));
        let saved = fs::read(&file).expect("a checkpoint");
        if after == Files {
            model.damage();
            let (_, report) = run(settings().orchestrator().frozen_weights(after), vec![resumed()]);
            model.restore();
            let error = report.tasks[0].error.clone().unwrap_or_default();
            assert!(error.contains("base.safetensors") && error.contains("differ from those in"), "{error}");
            assert_eq!(fs::read(&file).expect("a checkpoint"), saved, "nothing is lost");
        }
        let (_, report) = run(settings().orchestrator().frozen_weights(after), vec![resumed()]);
        assert!(report.tasks[0].checkpoints.resumed_at.is_some_and(|step| step > 0));
        assert_eq!(hash(&report, 0), plain, "{before:?} {after:?}");
    }
}

/// Calls a function after a number of minibatches.
struct After<F>(usize, F);

impl<F: FnMut() + Send> Observer for After<F> {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { .. }) {
            self.0 = self.0.saturating_sub(1);
            if self.0 == 0 {
                (self.1)();
            }
        }
    }
}

#[test]
fn a_file_that_changes_fails_the_task_and_loses_nothing() {
    let model = Arc::new(Model::new(FloatType::Bf16));
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("checkpoint.safetensors");
    let task = || model.task("a", 1).checkpoint_to(file.clone());
    let changes = model.clone();
    let orchestrator = settings().orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
    let orchestrator = orchestrator.observer(Box::new(After(2, move || changes.damage())));
    let (_, report) = run(orchestrator.frozen_weights(FrozenWeights::Files), vec![task()]);
    let failed = &report.tasks[0];
    let error = failed.error.as_deref().unwrap_or_default();
    assert_eq!(failed.state, TaskState::Failed);
    assert!(error.contains("base.safetensors") && error.contains("has changed since"), "{error}");
    model.restore();
    let resumed = task().resume_from(Checkpoint::open(&file).expect("a checkpoint"));
    let (_, report) = run(settings().orchestrator().frozen_weights(FrozenWeights::Files), vec![resumed]);
    assert!(report.tasks[0].checkpoints.resumed_at.is_some_and(|step| step > 0));
    assert_eq!(hash(&report, 0), model.plain(1));
}

#[test]
fn a_file_that_is_replaced_or_deleted_does_not_disturb_a_run_and_is_named_by_the_next() {
    let model = Model::new(FloatType::Bf16);
    let plain = model.plain(1);
    let path = model.path();
    let orchestrator = settings().orchestrator();
    let orchestrator =
        orchestrator.observer(Box::new(After(2, move || fs::remove_file(&path).expect("the file"))));
    let (_, report) = run(orchestrator.frozen_weights(FrozenWeights::Files), vec![model.task("a", 1)]);
    assert_eq!(hash(&report, 0), plain);
    let mut next = settings().orchestrator().frozen_weights(FrozenWeights::Files);
    next.submit(model.task("a", 1)).expect("a task");
    assert!(next.run().is_err(), "its pilot pass reads the file");
}
