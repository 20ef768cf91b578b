//! Training a small GPT-2: the plain loop, one resident shard, and four shards.

use criterion::Criterion;
use hydra_core::{ByteSize, Chain, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{DeviceSpec, Orchestrator, TrainTask, plain};
use hydra_models::data::{BlockSpec, Corpus, Split, TokenBlocks};
use hydra_models::gpt2::{self, Gpt2Config};
use hydra_models::tokenizer::Tokenizer;
use std::sync::Arc;

fn spilled(chain: &Arc<Chain>, data: &Arc<TokenBlocks>, spec: &TrainSpec, cuts: &[usize]) {
    let devices = vec![DeviceSpec::cpu(ByteSize::mib(512))];
    let mut run = Orchestrator::new(devices).expect("a device");
    let task = TrainTask::new("task", chain.clone(), data.clone(), spec.clone());
    run.submit(task.cuts(cuts.to_vec())).expect("a task");
    assert!(run.run().expect("a run").all_done());
}

fn training(c: &mut Criterion) {
    let config = Gpt2Config::preset("bytes-tiny").expect("a preset");
    let chain = Arc::new(gpt2::chain(&config, None).expect("a chain"));
    let tokenizer = Tokenizer::for_model(None, config.vocab_size).expect("a tokenizer");
    let form = BlockSpec { context: 64, vocab_size: config.vocab_size };
    let blocks = Corpus::builtin().blocks(Split::Train, &tokenizer, form).expect("blocks");
    let data = Arc::new(blocks);
    let spec = TrainSpec { length: Length::Steps(4), ..TrainSpec::new(OptimizerSpec::adamw(1e-3), 8) };
    let mut group = c.benchmark_group("four minibatches of bytes-tiny, with set-up");
    group.sample_size(10);
    group.bench_function("plain", |b| b.iter(|| plain::train(&chain, data.as_ref(), &spec).expect("trains")));
    group.bench_function("one shard", |b| b.iter(|| spilled(&chain, &data, &spec, &[])));
    group.bench_function("four shards", |b| b.iter(|| spilled(&chain, &data, &spec, &[1, 3, 5])));
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    training(&mut criterion);
    criterion.final_summary();
}
