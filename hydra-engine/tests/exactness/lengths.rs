//! Batches of different lengths: no bit depends on the device, and memory is planned for the longest.

use crate::common::{Settings, adamw};
use hydra_core::{
    Batch, ByteSize, Chain, Dataset, DatasetError, HostActivation, HostTensor, Key, Length, TrainSpec,
};
use hydra_engine::{TrainTask, plain};
use hydra_models::decoder::{self, DecoderConfig};
use hydra_models::gpt2::{self, Gpt2Config};
use hydra_models::ops::IGNORED;
use std::sync::Arc;

const CONTEXT: usize = 40;
const ITEMS: usize = 22;

/// Examples with these numbers of tokens, in batches of one row.
#[derive(Clone, Copy)]
struct Lengths;

impl Lengths {
    fn of(item: usize) -> usize {
        4 + item * 7 % (CONTEXT - 3)
    }

    fn laid(items: &[usize], length: impl Fn(usize) -> usize) -> Batch {
        let id = |item: usize, at: usize| (Key::new(item as u64).bits(at as u64) % 256) as i32;
        let tokens = || items.iter().flat_map(|item| (0..length(*item)).map(move |at| (*item, at)));
        let count = tokens().count();
        let target = |(item, at): (usize, usize)| {
            if at > 0 && at < Self::of(item) { id(item, at) } else { IGNORED }
        };
        let part = |values: Vec<i32>| HostTensor::int(values, [1, count]);
        let ids = part(tokens().map(|(item, at)| id(item, at)).collect());
        let inputs = HostActivation { parts: vec![ids, part(tokens().map(|(_, at)| at as i32).collect())] };
        let units: usize = items.iter().map(|item| Self::of(*item)).sum();
        let targets = HostActivation::of(part(tokens().map(target).collect()));
        Batch { inputs, targets, items: items.len(), loss_targets: units - items.len(), units }
    }
}

impl Dataset for Lengths {
    fn name(&self) -> &str {
        "lengths"
    }

    fn len(&self) -> usize {
        ITEMS
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        Ok(Self::laid(items, Self::of))
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        Ok(Self::laid(&(0..items.min(ITEMS)).collect::<Vec<_>>(), |_| CONTEXT))
    }

    fn mean_part(&self) -> f64 {
        (0..ITEMS).map(Self::of).sum::<usize>() as f64 / (ITEMS * CONTEXT) as f64
    }
}

/// A GPT-2 and a Llama, both with dropout.
fn chains() -> [Arc<Chain>; 2] {
    let mut config = Gpt2Config::preset("bytes-tiny").expect("a preset");
    (config.n_embd, config.n_layer, config.n_head, config.n_positions) = (64, 2, 2, CONTEXT);
    (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) = (0.1, 0.1, 0.1);
    let mut llama = DecoderConfig::preset("bytes-llama-tiny").expect("a preset");
    llama.attention_dropout = 0.1;
    [gpt2::chain(&config, None), decoder::chain(&llama, None)].map(|chain| Arc::new(chain.expect("a chain")))
}

#[test]
fn batches_of_any_lengths_have_the_bits_of_the_plain_loop() {
    for chain in chains() {
        let spec = TrainSpec { length: Length::Steps(7), accumulate: 2, ..adamw(4) };
        let task = || {
            let data = Arc::new(Lengths);
            TrainTask::new("task", chain.clone(), data.clone(), spec.clone()).validation(data)
        };
        let plain = plain::train(&chain, &Lengths, &spec).expect("the plain loop");
        let plan = {
            let mut run = Settings::default().orchestrator();
            run.submit(task()).expect("a task");
            run.admit().expect("it fits").admission().tasks[0].plan.clone()
        };
        let [least, single] = [plan.min_device_memory_bytes, plan.single_shard_bytes];
        let mut evaluations = Vec::new();
        for (devices, threads, memory) in
            [(1, 2, single * 2), (1, 1, least + least / 16), (3, 1, least + least / 16)]
        {
            let settings = Settings { devices, threads, memory: ByteSize(memory), ..Settings::default() };
            let report = settings.run(task());
            for device in &report.devices {
                assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{device:?}");
            }
            let task = &report.tasks[0];
            assert_eq!((&task.error, &task.losses), (&None, &plain.losses), "{devices} of {threads}");
            assert_eq!(task.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()));
            evaluations.push(format!("{:?}", (&task.validation, &task.validations.evaluations)));
        }
        assert!(evaluations.iter().all(|of| *of == evaluations[0]), "{evaluations:?}");
    }
}

/// The reported tokens are those trained, independent of the first batch.
#[test]
fn tokens_are_counted_as_they_are() {
    let spec = TrainSpec { length: Length::Epochs(2), ..adamw(4) };
    let [chain, _] = chains();
    let report = Settings::default().run(TrainTask::new("task", chain, Arc::new(Lengths), spec));
    let tokens: usize = (0..ITEMS).map(Lengths::of).sum();
    assert_eq!(report.tasks[0].trained.units, 2 * tokens as u64);
}
