//! Helpers shared by the integration tests: small chains, data, and runs with given settings.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, activation};
use hydra_core::{
    Activation, Batch, ByteSize, Chain, Dataset, DatasetError, Forward, HostActivation, HostTensor, Init,
    OptimizerSpec, Pass, TrainSpec,
};
use hydra_engine::{
    CheckpointEvery, DeviceSpec, Observer, Orchestrator, RunEvent, RunReport, StopFlag, TaskReport, TrainTask,
};
use hydra_models::data::{BlockSpec, TokenBlocks};
use hydra_models::gpt2::{self, Gpt2Config};
use hydra_models::objective::{SingleLabel, classification_loss};
use hydra_models::{cnn, mlp};
use hydra_sched::PolicyKind;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A last layer that computes its loss itself: the cross-entropy of `[items, in]` against the pass's classes `[items]`, and
/// in an evaluation also the number of right answers.
#[derive(Module, Debug)]
pub struct Classifier {
    pub linear: Linear,
}

impl Forward for Classifier {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let logits = self.linear.forward(x.into_float::<2>());
        let classes = pass.targets().part(0).into_int::<1>();
        let loss = Activation::of(classification_loss(logits.clone(), classes.clone()));
        if pass.is_training() {
            return loss;
        }
        let right = logits.argmax(1).squeeze_dim::<1>(1).equal(classes);
        loss.and(right.float().cast(FloatDType::F32).sum_dim(0))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        Init::default_for(name, shape)
    }
}

/// Enough memory for every model of the tests.
pub const PLENTY: ByteSize = ByteSize::mib(256);

/// A GPT-2 of four layers with dropout everywhere.
pub fn config() -> Gpt2Config {
    let mut config = Gpt2Config::preset("bytes-tiny").expect("a preset");
    (config.n_embd, config.n_layer, config.n_head, config.n_positions) = (16, 3, 2, 12);
    config.vocab_size = 40;
    (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) = (0.1, 0.1, 0.1);
    config
}

pub fn gpt2_chain() -> Arc<Chain> {
    Arc::new(gpt2::chain(&config(), None).expect("a chain"))
}

/// Tokens that follow a rule that can be learned.
pub fn tokens(blocks: usize, seed: u32) -> Arc<dyn Dataset> {
    let context = 12;
    let rule = |i: usize| ((i as u32).wrapping_mul(7).wrapping_add(seed) ^ (i as u32 / 5)) % 40;
    let tokens: Vec<u32> = (0..blocks * context).map(rule).collect();
    Arc::new(TokenBlocks::new(tokens, BlockSpec { context, vocab_size: 40 }).expect("blocks"))
}

pub fn adamw(batch: usize) -> TrainSpec {
    TrainSpec { clip: Some(0.7), ..TrainSpec::new(OptimizerSpec::adamw(3e-3), batch) }
}

/// Settings of a run that must not change a task's results.
#[derive(Clone, Debug)]
pub struct Settings {
    pub devices: usize,
    pub threads: usize,
    pub memory: ByteSize,
    pub zero_copy: bool,
    pub cuts: Option<Vec<usize>>,
    pub policy: PolicyKind,
    pub prefetch: bool,
    pub cache: bool,
    pub microbatch_group: Option<usize>,
    pub replicas: Option<usize>,
    pub others: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 1,
            threads: 1,
            memory: PLENTY,
            zero_copy: false,
            cuts: None,
            policy: PolicyKind::ShardedLrtf,
            prefetch: true,
            cache: true,
            microbatch_group: None,
            replicas: None,
            others: 0,
        }
    }
}

impl Settings {
    pub fn orchestrator(&self) -> Orchestrator {
        let device = DeviceSpec::cpu(self.memory).threads(self.threads).cache_copies(self.cache);
        let device = if self.zero_copy { device.zero_copy() } else { device };
        let orchestrator = Orchestrator::new(device.times(self.devices)).expect("devices");
        // No checkpoint is due within the time of a test.
        let orchestrator = orchestrator.checkpoint_every(CheckpointEvery::Time(Duration::from_secs(3600)));
        orchestrator.policy(self.policy).prefetch(self.prefetch).seed(5)
    }

    /// Runs the task together with `others` and returns the report; the task comes first.
    pub fn run(&self, task: TrainTask) -> RunReport {
        let mut run = self.orchestrator();
        let task = match &self.cuts {
            Some(cuts) => task.cuts(cuts.clone()),
            None => task,
        };
        let task = match self.microbatch_group {
            Some(microbatch_group) => task.microbatch_group(microbatch_group),
            None => task,
        };
        let task = match self.replicas {
            Some(most) => task.most_devices(most),
            None => task,
        };
        run.submit(task).expect("a task");
        for other in 0..self.others {
            let spec = TrainSpec { seed: 99 + other as u64, ..adamw(3) };
            let data = tokens(7, other as u32);
            run.submit(TrainTask::new(format!("other-{other}"), gpt2_chain(), data, spec)).expect("a task");
        }
        run.run().expect("a run")
    }

    pub fn task(&self, task: TrainTask) -> TaskReport {
        self.run(task).tasks.into_iter().next().expect("the task")
    }
}

/// `bytes` in addition to the standing bytes of a device, such as the scratch memory of matrix products, which
/// depends on the processor's cache.
pub fn plus_standing_bytes(bytes: u64) -> ByteSize {
    static STANDING: OnceLock<u64> = OnceLock::new();
    let measured = || {
        let mut run = Settings { memory: ByteSize::mib(256), ..Settings::default() }.orchestrator();
        run.submit(TrainTask::new("any", gpt2_chain(), tokens(11, 1), adamw(4))).expect("a task");
        run.admit().expect("a run").admission().tasks[0].plan.standing_bytes
    };
    ByteSize(bytes + *STANDING.get_or_init(measured))
}

/// Stops a run after a number of minibatches.
pub struct StopAfter(pub StopFlag, pub usize);

impl Observer for StopAfter {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { .. }) {
            self.1 = self.1.saturating_sub(1);
            if self.1 == 0 {
                self.0.stop();
            }
        }
    }
}

pub fn mlp_chain() -> Arc<Chain> {
    Arc::new(mlp::chain(&[2, 16, 16, 16], 3).expect("a chain"))
}

pub fn spirals() -> Arc<dyn Dataset> {
    Arc::new(mlp::Spirals::new(1, 60, 3))
}

pub fn cnn_chain() -> Arc<Chain> {
    Arc::new(cnn::chain(cnn::CnnConfig::default()).expect("a chain"))
}

/// A frozen linear layer with a trained low-rank adapter.
#[derive(Module, Debug)]
pub struct Adapted {
    base: Linear,
    down: Linear,
    up: Linear,
}

impl Adapted {
    /// A square layer of this width with an adapter of this rank.
    pub fn new(width: usize, rank: usize) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
        Self { base: linear(width, width).no_grad(), down: linear(width, rank), up: linear(rank, width) }
    }
}

impl Forward for Adapted {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let x = x.into_float::<2>();
        let adapter = self.up.forward(self.down.forward(x.clone()));
        Activation::of(activation::relu(self.base.forward(x) + adapter))
    }
}

/// A perceptron of five layers: the first is frozen, three train an adapter, and the last is fully trained.
pub fn adapted_chain() -> Arc<Chain> {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let adapted = || Adapted::new(16, 2);
    let chain = Chain::builder("adapted").frozen("in", mlp::Dense { linear: linear(2, 16) });
    let chain = chain.layer("a", adapted()).layer("b", adapted()).layer("c", adapted());
    let chain =
        chain.layer("out", mlp::Classifier { linear: linear(16, 3) }).objective(SingleLabel { classes: 3 });
    Arc::new(chain.build().expect("a chain"))
}

/// A GPT-2 that trains its last block and its head, except for the tied embedding.
pub fn last_layers() -> Arc<Chain> {
    let chain = gpt2::chain(&config(), None).expect("a chain");
    Arc::new(chain.training_only(&["h.2", "head"]).expect("layers to train"))
}

/// The unlinked files that this process has open in a directory, sorted by size.
#[cfg(target_os = "linux")]
pub fn scratch_files(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    use std::fs;
    let dir = dir.canonicalize().expect("a directory");
    let open = fs::read_dir("/proc/self/fd").expect("open files").flatten().map(|file| file.path());
    let mut there: Vec<_> =
        open.filter(|file| fs::read_link(file).is_ok_and(|at| at.starts_with(&dir))).collect();
    there.sort_by_key(|file| fs::metadata(file).map_or(0, |file| file.len()));
    there
}

/// A layer without parameters that panics on a value above its limit.
#[derive(Module, Debug)]
pub struct Fragile {
    #[module(skip)]
    pub limit: f64,
}

impl Forward for Fragile {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let tensor = x.into_float::<2>();
        let largest = tensor.clone().inner().max().into_data().try_to_vec::<f32>().expect("a number")[0];
        assert!(f64::from(largest) <= self.limit, "met {largest}, which is above {}", self.limit);
        Activation::of(tensor)
    }
}

/// Points with two coordinates. From item `bad` on they are out of range, or reading them panics.
pub struct Points {
    pub len: usize,
    pub bad: usize,
    pub panics: bool,
}

impl Dataset for Points {
    fn name(&self) -> &str {
        "points"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        assert!(!self.panics || items.iter().all(|i| *i < self.bad), "unreadable items");
        Ok(points(self.len, items, |item| item >= self.bad))
    }
}

/// A batch of the given items of `len` points; those for which `bad` holds are out of range.
pub fn points(len: usize, items: &[usize], bad: impl Fn(usize) -> bool) -> Batch {
    let x = |i: &usize| [if bad(*i) { 1000.0 } else { *i as f32 / len as f32 }, 1.0];
    let inputs = HostTensor::float(items.iter().flat_map(x).collect(), [items.len(), 2]);
    let targets = HostTensor::int(items.iter().map(|i| (i % 3) as i32).collect(), [items.len()]);
    let (inputs, targets) = (HostActivation::of(inputs), HostActivation::of(targets));
    Batch { inputs, targets, items: items.len(), loss_targets: items.len(), units: items.len() }
}

/// A dataset that reads `data` through the function `how`.
pub struct Read<F> {
    pub data: Arc<dyn Dataset>,
    pub how: F,
}

impl<F> Dataset for Read<F>
where
    F: Fn(&dyn Dataset, &[usize]) -> Result<Batch, DatasetError> + Send + Sync,
{
    fn name(&self) -> &str {
        self.data.name()
    }

    fn len(&self) -> usize {
        self.data.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        (self.how)(self.data.as_ref(), items)
    }
}
