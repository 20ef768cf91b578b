//! Equal layers: a plan is the same whether they are measured once or one by one.

use crate::common::Settings;
use burn::module::Module;
use hydra_core::{Activation, ByteSize, Chain, Dataset, Forward, Init, OptimizerSpec, Pass, TrainSpec};
use hydra_engine::TrainTask;
use hydra_models::data::{BlockSpec, TokenBlocks};
use hydra_models::gpt2::{self, Embed, Gpt2Block, Gpt2Config, Head};
use hydra_partition::PartitionPlan;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A block without a cost key.
#[derive(Module, Debug)]
struct Silent {
    block: Gpt2Block,
}

impl Forward for Silent {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        Forward::forward(&self.block, x, pass)
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        Forward::init(&self.block, name.trim_start_matches("block."), shape)
    }
}

/// A GPT-2 whose blocks are measured one by one.
fn silent(config: &Gpt2Config) -> Chain {
    let rows = 0..config.vocab_size;
    let embed = Embed::new(config, &rows);
    let head = Head::new(config, &rows, &embed.wte);
    let builder = Chain::builder("silent").layer("embed", embed);
    let block = |index| Silent { block: Gpt2Block::new(config, index) };
    let builder = (0..config.n_layer).fold(builder, |b, index| b.layer(format!("h.{index}"), block(index)));
    builder.layer("head", head).language_model().build().expect("a chain")
}

/// The plan of a chain on a device with `memory` bytes, without its seconds, and the verified bytes of its shards.
fn plan(chain: &Arc<Chain>, data: &Arc<dyn Dataset>, memory: u64) -> (PartitionPlan, Vec<u64>) {
    let spec = TrainSpec::new(OptimizerSpec::adamw(1e-3), 2);
    let mut run = Settings { memory: ByteSize(memory), ..Settings::default() }.orchestrator();
    run.submit(TrainTask::new("task", chain.clone(), data.clone(), spec)).expect("a task");
    let run = run.admit().expect("a run");
    let mut plan = PartitionPlan::clone(&run.admission().tasks[0].plan);
    plan.layers.iter_mut().for_each(|layer| (layer.forward_s, layer.backward_s) = (0.0, 0.0));
    plan.shards.iter_mut().for_each(|shard| (shard.forward_s, shard.backward_s) = (0.0, 0.0));
    let verified = plan.shards.iter_mut().map(|shard| shard.verified_bytes.take().expect("a measurement"));
    let verified = verified.collect();
    (plan, verified)
}

#[test]
fn plans_of_gpt2_are_those_of_blocks_that_are_measured_each() {
    in_own_process!();
    for preset in ["bytes-tiny", "bytes-small", "gpt2-mini"] {
        let config = Gpt2Config::preset(preset).unwrap();
        let form = BlockSpec { context: 32, vocab_size: config.vocab_size };
        let ids: Vec<u32> = (0..8 * 32).map(|i| i * 7 % 256).collect();
        let data: Arc<dyn Dataset> = Arc::new(TokenBlocks::new(ids, form).unwrap());
        let (once, each) = (Arc::new(gpt2::chain(&config, None).unwrap()), Arc::new(silent(&config)));
        let (ample, _) = plan(&each, &data, 1 << 30);
        let (least, whole) = (ample.min_device_memory_bytes, ample.single_shard_bytes);
        for memory in [least, (3 * least + whole) / 4, least.midpoint(whole), whole] {
            let [(once, took), (each, expected)] = [&once, &each].map(|chain| plan(chain, &data, memory));
            assert_eq!(once.layers, each.layers, "{preset} in {memory}");
            assert_eq!(once.shards, each.shards, "{preset} in {memory}");
            assert_eq!((once.rules, once.cut_points), (each.rules, each.cut_points), "{preset} in {memory}");
            // Standing bytes vary by some dozen bytes from run to run, and by some KB for the blocks through which
            // threads of a pool pass work. A transformer block takes more.
            let close = |(a, b): (&u64, &u64)| a.abs_diff(*b) < 16 << 10;
            assert!(took.iter().zip(&expected).all(close), "{preset} in {memory}: {took:?} {expected:?}");
        }
    }
}

#[test]
fn blocks_of_gpt2_say_the_same_unless_they_compute_something_else() {
    let cost_keys = |config: &Gpt2Config| {
        let chain = gpt2::chain(config, None).unwrap();
        let cost_key = |layer: usize| chain.layers()[layer].cost_key.clone().expect("a cost key").text;
        (1..=config.n_layer).map(cost_key).collect::<BTreeSet<String>>()
    };
    let tiny = Gpt2Config::preset("bytes-tiny").unwrap();
    assert_eq!(cost_keys(&tiny).len(), 1);
    let by_layer = Gpt2Config { scale_attn_by_inverse_layer_idx: true, ..tiny.clone() };
    assert_eq!(cost_keys(&by_layer).len(), by_layer.n_layer);
    let others = [
        Gpt2Config { n_head: 2, ..tiny.clone() },
        Gpt2Config { attn_pdrop: 0.3, ..tiny.clone() },
        Gpt2Config { resid_pdrop: 0.3, ..tiny.clone() },
        Gpt2Config { layer_norm_epsilon: 1e-3, ..tiny.clone() },
        Gpt2Config { activation_function: "relu".to_owned(), ..tiny.clone() },
    ];
    for other in others {
        assert!(cost_keys(&other).is_disjoint(&cost_keys(&tiny)), "{other:?}");
    }
}
