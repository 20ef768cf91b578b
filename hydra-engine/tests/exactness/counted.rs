//! Positions without a target: the engine skips them in the head, and the plain loop does not.

use crate::common::{Settings, adamw};
use hydra_core::{
    Batch, ByteSize, Chain, Dataset, DatasetError, HostActivation, HostTensor, Key, Length, TrainSpec,
};
use hydra_engine::{TrainTask, plain};
use hydra_models::family::Model;
use hydra_models::gpt2::{Gpt2, Gpt2Config};
use hydra_models::lora::Lora;
use hydra_models::ops::IGNORED;
use hydra_partition::PartitionPlan;
use std::sync::Arc;

const CONTEXT: usize = 40;
const VOCABULARY: usize = 300;

/// Rows of ids with few counted positions, except every `full`-th, where all count.
#[derive(Clone, Copy)]
struct Answers {
    every: usize,
}

impl Dataset for Answers {
    fn name(&self) -> &str {
        "answers"
    }

    fn len(&self) -> usize {
        20
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let id = |item: usize, at: usize| (Key::new(item as u64).bits(at as u64) % VOCABULARY as u64) as i32;
        let all: Vec<(usize, usize)> =
            items.iter().flat_map(|item| (0..CONTEXT).map(move |at| (*item, at))).collect();
        let counts = |(item, at): (usize, usize)| {
            item % self.every == self.every - 1 || (item + 20..item + 23).contains(&at)
        };
        let inputs = all.iter().map(|(item, at)| id(*item, *at)).collect();
        let targets = all.iter().map(|of| if counts(*of) { id(of.0, of.1) } else { IGNORED });
        let loss_targets = all.iter().filter(|of| of.1 > 0 && counts(**of)).count();
        let of = |ids| HostActivation::of(HostTensor::int(ids, [items.len(), CONTEXT]));
        let (inputs, targets) = (of(inputs), of(targets.collect()));
        Ok(Batch { inputs, targets, items: items.len(), loss_targets, units: items.len() * CONTEXT })
    }
}

fn config() -> Gpt2Config {
    let mut config = Gpt2Config::preset("bytes-tiny").expect("a preset");
    (config.n_embd, config.n_layer, config.n_head, config.n_positions) = (72, 2, 2, CONTEXT);
    config.vocab_size = VOCABULARY;
    config
}

/// A fully trained model, and one with trained adapters.
fn chains() -> [Arc<Chain>; 2] {
    let model = Gpt2::new(config());
    let whole = model.chain().expect("a chain");
    let lora = Lora { rank: 2, targets: vec!["c_attn".to_owned()].into(), ..Lora::default() };
    let adapted = model.adapted(&lora, None).expect("a chain");
    [whole, adapted].map(Arc::new)
}

fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(7), shuffle: false, ..adamw(3) }
}

fn task(chain: &Arc<Chain>, data: Answers) -> TrainTask {
    TrainTask::new("task", chain.clone(), Arc::new(data), spec())
}

fn plan(chain: &Arc<Chain>, data: Answers) -> Arc<PartitionPlan> {
    let mut run = Settings::default().orchestrator();
    run.submit(task(chain, data)).expect("a task");
    run.admit().expect("it fits").admission().tasks[0].plan.clone()
}

#[test]
fn positions_that_are_left_out_change_no_bit() {
    let data = Answers { every: 4 };
    for chain in chains() {
        let plain = plain::train(&chain, &data, &spec()).expect("the plain loop");
        let plan = plan(&chain, data);
        let [least, single] = [plan.min_device_memory_bytes, plan.single_shard_bytes];
        for memory in [least + least / 16, single + single / 16] {
            let settings = Settings { memory: ByteSize(memory), ..Settings::default() };
            let report = settings.run(task(&chain, data));
            let (device, task) = (&report.devices[0], &report.tasks[0]);
            assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{device:?}");
            assert_eq!((&task.error, &task.losses), (&None, &plain.losses));
            assert_eq!(task.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()));
        }
    }
}

// A first batch with few counted positions does not reduce the memory of later batches where all count.
#[test]
fn what_is_admitted_is_enough_for_any_batch() {
    for chain in chains() {
        let [few, all] = [4, 1].map(|every| plan(&chain, Answers { every }));
        for (few, all) in few.layers.iter().zip(&all.layers) {
            let differ = few.peak_bytes.abs_diff(all.peak_bytes);
            assert!(differ <= 8192, "{}: {} and {}", few.name, few.peak_bytes, all.peak_bytes);
        }
        let logits = (3 * CONTEXT * VOCABULARY * size_of::<f32>()) as u64;
        assert!(few.layers.last().is_some_and(|head| head.peak_bytes > logits));
    }
}
