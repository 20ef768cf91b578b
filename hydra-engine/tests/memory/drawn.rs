//! Runs with random models, budgets, devices, links, disks and policies. No device exceeds its budget, its unreserved
//! bytes are less than the margin, and every result is bit-exact with the plain loop.
//!
//! `HYDRA_DRAWS` is the number of runs, twelve by default.

use crate::common::{Settings, adamw, adapted_chain, spirals};
use hydra_core::optimizer::Sgd;
use hydra_core::{Bandwidth, ByteSize, Chain, Dataset, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{DeviceSpec, EngineError, Orchestrator, RunReport, TrainTask, plain};
use hydra_models::cnn;
use hydra_models::data::{BlockSpec, TokenBlocks};
use hydra_models::decoder::{self, DecoderConfig};
use hydra_models::gpt2::{self, Gpt2Config};
use hydra_sched::PolicyKind;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// Attempts, each with a sixteenth more device memory, until a run is admitted.
const ATTEMPTS: usize = 60;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Gpt2,
    LastLayers,
    Llama,
    Adapted,
    Convolutions,
}

/// A model with its data.
#[derive(Clone, Debug)]
struct Model {
    kind: Kind,
    /// In units of eight.
    width: usize,
    blocks: usize,
    context: usize,
    dropout: bool,
}

/// The training settings shared by the tasks of a run.
#[derive(Clone, Debug)]
struct Training {
    batch: usize,
    accumulate: usize,
    steps: usize,
    eval_every: Option<usize>,
    clip: Option<f64>,
    sgd: bool,
    microbatch_group: Option<usize>,
}

/// A run of several tasks.
#[derive(Clone, Debug)]
struct Drawn {
    models: Vec<Model>,
    tasks: usize,
    training: Training,
    settings: Settings,
    link: Option<(f64, u64)>,
    /// Device memory and, with a disk, host memory: percent of the way from the least that fits to what needs no cut
    /// or disk.
    memory: u64,
    host: Option<u64>,
}

impl Model {
    fn chain(&self) -> Arc<Chain> {
        let chain = match self.kind {
            Kind::Gpt2 => gpt2::chain(&self.gpt2(), None),
            Kind::LastLayers => {
                let last = format!("h.{}", self.blocks - 1);
                let chain = gpt2::chain(&self.gpt2(), None).expect("a chain");
                return Arc::new(chain.training_only(&[last.as_str(), "head"]).expect("layers to train"));
            }
            Kind::Llama => decoder::chain(&self.llama(), None),
            Kind::Adapted => return adapted_chain(),
            Kind::Convolutions => {
                cnn::chain(cnn::CnnConfig { channels: 2 * self.width, ..cnn::CnnConfig::default() })
            }
        };
        Arc::new(chain.expect("a chain"))
    }

    fn gpt2(&self) -> Gpt2Config {
        let p = if self.dropout { 0.1 } else { 0.0 };
        Gpt2Config {
            n_embd: 8 * self.width,
            n_layer: self.blocks,
            n_head: 2,
            n_positions: self.context,
            vocab_size: 40,
            embd_pdrop: p,
            resid_pdrop: p,
            attn_pdrop: p,
            ..Gpt2Config::preset("bytes-tiny").expect("a preset")
        }
    }

    fn llama(&self) -> DecoderConfig {
        DecoderConfig {
            hidden_size: 8 * self.width,
            intermediate_size: 16 * self.width,
            num_hidden_layers: self.blocks,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 4 * self.width,
            max_position_embeddings: self.context,
            vocab_size: 40,
            ..DecoderConfig::preset("bytes-llama-tiny").expect("a preset")
        }
    }

    /// A dataset of `items` items.
    fn data(&self, items: usize, seed: u32) -> Arc<dyn Dataset> {
        match self.kind {
            Kind::Adapted => spirals(),
            Kind::Convolutions => Arc::new(cnn::Waves::new(seed.into(), items, 3, 16, 10)),
            Kind::Gpt2 | Kind::LastLayers | Kind::Llama => {
                let rule = |i: usize| ((i as u32).wrapping_mul(7).wrapping_add(seed) ^ (i as u32 / 5)) % 40;
                let tokens: Vec<u32> = (0..items * self.context).map(rule).collect();
                let form = BlockSpec { context: self.context, vocab_size: 40 };
                Arc::new(TokenBlocks::new(tokens, form).expect("blocks"))
            }
        }
    }
}

impl Drawn {
    fn spec(&self, task: usize) -> TrainSpec {
        let Training { batch, accumulate, steps, eval_every, clip, sgd, .. } = self.training;
        let rate = 1e-3 * (1 + task) as f64;
        let optimizer = match sgd {
            true => OptimizerSpec::from(Sgd { lr: rate, momentum: 0.9, weight_decay: 0.0 }),
            false => OptimizerSpec::adamw(rate),
        };
        let accumulate = accumulate.min(batch);
        let length = Length::Steps(steps);
        TrainSpec { optimizer, accumulate, eval_every, clip, length, seed: task as u64 / 2, ..adamw(batch) }
    }

    fn model(&self, task: usize) -> &Model {
        &self.models[task % self.models.len()]
    }

    fn tasks(&self) -> Vec<TrainTask> {
        let task = |index: usize| {
            let (model, spec) = (self.model(index), self.spec(index));
            let microbatch_group =
                self.training.microbatch_group.map(|microbatch_group| microbatch_group.min(spec.accumulate));
            let task = TrainTask::new(format!("task {index}"), model.chain(), model.data(11, 1), spec);
            let task = task.validation(model.data(5, 3)).test(model.data(4, 2));
            microbatch_group.into_iter().fold(task, TrainTask::microbatch_group)
        };
        (0..self.tasks).map(task).collect()
    }

    fn orchestrator(&self, memory: u64) -> Orchestrator {
        let Settings { threads, cache, devices, policy, prefetch, .. } = self.settings;
        let device = DeviceSpec::cpu(ByteSize(memory)).threads(threads).cache_copies(cache);
        let device = match self.link {
            Some((rate, latency)) => device.with_link(Bandwidth(rate), Duration::from_micros(latency)),
            None => device,
        };
        let run = Orchestrator::new(device.times(devices)).expect("devices");
        self.submitted(run.policy(policy).prefetch(prefetch).seed(5))
    }

    fn submitted(&self, run: Orchestrator) -> Orchestrator {
        self.tasks().into_iter().fold(run, |mut run, task| {
            run.submit(task).expect("a task");
            run
        })
    }

    /// Device memory between the least for all tasks and the amount that needs no cut.
    fn device_memory(&self) -> u64 {
        let run = self.orchestrator(256 << 20).admit().expect("it fits");
        let plans = || run.admission().tasks.iter().map(|task| &task.plan);
        let least = plans().map(|plan| plan.min_device_memory_bytes).max().expect("tasks");
        let most = plans().map(|plan| plan.single_shard_bytes).max().expect("tasks");
        least + (most - least) * self.memory / 100
    }

    /// Runs it. The least memory varies between measurements, so more is tried if a run is refused.
    fn run(&self) -> RunReport {
        let mut memory = self.device_memory();
        let dir = tempfile::tempdir().expect("a directory");
        let disk = |run: Orchestrator| run.disk(dir.path().to_owned(), ByteSize::mib(256));
        let host = self.host.map(|share| {
            let needed = |on_disk: bool| {
                let run = self.orchestrator(256 << 20).host_memory(ByteSize(1));
                match if on_disk { disk(run) } else { run }.admit() {
                    Err(EngineError::HostMemory { needed, .. }) => needed,
                    other => panic!("expected too little host memory, found {other:?}"),
                }
            };
            let [least, most] = [true, false].map(needed);
            // Cuts and microbatch groups for less device memory may take more.
            least + least / 4 + most.saturating_sub(least) * share / 100
        });
        let mut refusal = None;
        for _ in 0..ATTEMPTS {
            let run = self.orchestrator(memory);
            let run = host.into_iter().fold(run, |run, host| disk(run.host_memory(ByteSize(host))));
            match run.admit() {
                Ok(run) => return run.start().expect("a run"),
                Err(error) => {
                    memory += memory / 16;
                    refusal = Some(error);
                }
            }
        }
        panic!("it does not fit {memory} bytes: {refusal:?}");
    }

    fn check(&self) {
        let report = self.run();
        for device in &report.devices {
            assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{device:?}");
            assert!(device.unreserved_bytes.is_some(), "the allocator counts");
        }
        for (index, found) in report.tasks.iter().enumerate() {
            let (model, spec) = (self.model(index), self.spec(index));
            let plain =
                plain::train(&model.chain(), model.data(11, 1).as_ref(), &spec).expect("the plain loop");
            assert_eq!((&found.error, &found.losses), (&None, &plain.losses), "task {index}");
            if self.training.eval_every.is_none() {
                assert_eq!(found.weights_sha256.as_ref(), Some(&plain.weights_sha256), "task {index}");
            }
        }
    }
}

fn model() -> impl Strategy<Value = Model> {
    let kinds = prop::sample::select(vec![
        Kind::Gpt2,
        Kind::Gpt2,
        Kind::LastLayers,
        Kind::Llama,
        Kind::Llama,
        Kind::Adapted,
        Kind::Convolutions,
    ]);
    (kinds, 1_usize..=8, 1_usize..=5, prop::sample::select(vec![8, 12, 32]), any::<bool>())
        .prop_map(|(kind, width, blocks, context, dropout)| Model { kind, width, blocks, context, dropout })
}

prop_compose! {
    fn training()(
        batch in 1_usize..=6,
        accumulate in 1_usize..=4,
        steps in 1_usize..=6,
        eval_every in prop::option::of(1_usize..=3),
        clip in prop::option::of(Just(0.7)),
        sgd: bool,
        microbatch_group in prop::option::of(1_usize..=4),
    ) -> Training {
        Training { batch, accumulate, steps, eval_every, clip, sgd, microbatch_group }
    }
}

prop_compose! {
    fn drawn()(
        models in prop::collection::vec(model(), 1..=2),
        tasks in 1_usize..=4,
        training in training(),
        (devices, threads) in (1_usize..=3, 1_usize..=2),
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        prefetch in prop::bool::weighted(0.8),
        cache in prop::bool::weighted(0.8),
        link in prop::option::of((1e8_f64..4e9, 0_u64..100)),
        memory in 0_u64..=60,
        host in prop::option::weighted(0.3, 0_u64..=60),
    ) -> Drawn {
        let settings = Settings { devices, threads, policy, prefetch, cache, ..Settings::default() };
        Drawn { models, tasks, training, settings, link, memory, host }
    }
}

fn draws() -> ProptestConfig {
    let cases = std::env::var("HYDRA_DRAWS").ok().and_then(|draws| draws.parse().ok()).unwrap_or(12);
    // A failing run is shown as drawn: a smaller one would be a different run.
    ProptestConfig { cases, max_shrink_iters: 0, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(draws())]
    fn drawn_runs_keep_to_their_budgets(drawn in drawn()) {
        drawn.check();
    }
}

#[test]
fn no_run_takes_more_than_its_budgets() {
    in_own_process!();
    drawn_runs_keep_to_their_budgets();
}
