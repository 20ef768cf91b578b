//! Sizes of parameter buffers in their stores and in promotions, and of pending gradients.

use crate::train_task::TrainTask;
use hydra_core::{Chain, Encoding, FloatType, ParamBufferLayout, TrainSpec};
use hydra_partition::{PartitionPlan, ShardPlan};
use hydra_sched::ParamBufferCost;
use hydra_spill::{PIECE, ParamBufferId, covering};
use std::ops::Range;

/// The bytes of a buffer's masters: parameters, their narrow (rounded) copy if any, and optimizer moments.
pub(super) fn master_bytes(buffer: &ParamBufferLayout, spec: &TrainSpec) -> u64 {
    buffer.master_bytes() + moment_bytes(buffer, spec, 0..buffer.elements)
}

/// The bytes of the moments of some elements of a buffer.
fn moment_bytes(buffer: &ParamBufferLayout, spec: &TrainSpec, elements: Range<usize>) -> u64 {
    let layouts = spec.optimizer.moment_layouts(buffer);
    layouts.iter().map(|layout| layout.bytes_of(elements.clone()).len() as u64).sum()
}

/// Returns whether the initial values of the buffer at `buffer` are in host memory as `f32` as a whole before they are
/// stored in a narrower form.
pub(crate) fn is_narrowed(chain: &Chain, buffer: usize) -> bool {
    chain.buffers()[buffer].encoding != Encoding::Masters && chain.source().parts(chain, buffer).is_none()
}

/// The bytes of a buffer's initial parameters in host memory: as they are stored, and the `f32` values that they are
/// rounded from.
pub(crate) fn initial_bytes(chain: &Chain, buffer: usize) -> u64 {
    let layout = &chain.buffers()[buffer];
    layout.master_bytes() + if is_narrowed(chain, buffer) { layout.moment_bytes() } else { 0 }
}

/// The bytes of a buffer that the writer has in memory at a time: `f32` values, of a piece or of the `whole` buffer, and
/// the words that a piece is widened from.
pub(super) fn read_bytes(buffer: &ParamBufferLayout, whole: bool) -> u64 {
    let wide = if whole { buffer.elements } else { buffer.elements.min(PIECE) };
    let narrow = if buffer.encoding == Encoding::Masters { 0 } else { widened_words(buffer) };
    (wide * size_of::<f32>() + narrow * size_of::<u16>()) as u64
}

/// The most words that are read to widen a piece of a buffer: a disk is read in whole pieces of words, and a piece of a
/// quantized buffer has words within one or two of them.
fn widened_words(buffer: &ParamBufferLayout) -> usize {
    let all = buffer.words_of(0..buffer.elements).end;
    let of_piece = |start: usize| {
        let words = buffer.words_of(start..buffer.elements.min(start + PIECE));
        covering(&words, all, PIECE).len()
    };
    (0..buffer.elements).step_by(PIECE).map(of_piece).max().unwrap_or(0)
}

/// Returns whether the writer of a task's model reads whole buffers.
pub(super) fn writes_whole(task: &TrainTask) -> bool {
    task.output.as_ref().is_some_and(|(writer, _)| !writer.reads_parts())
}

/// The bytes of the snapshot of a buffer's best parameters, if the task takes one.
pub(crate) fn best_bytes(buffer: &ParamBufferLayout, spec: &TrainSpec) -> Option<u64> {
    (buffer.trained && spec.keeps_best()).then(|| buffer.moment_bytes())
}

/// The bytes that a store holds for a buffer: its masters and the snapshot of its best parameters.
pub(crate) fn stored_bytes(buffer: &ParamBufferLayout, spec: &TrainSpec) -> u64 {
    master_bytes(buffer, spec) + best_bytes(buffer, spec).unwrap_or(0)
}

/// The bytes of a buffer on the disk that the optimizer has in host memory at the same time.
pub(crate) fn stepped_bytes(buffer: &ParamBufferLayout, spec: &TrainSpec) -> u64 {
    let (elements, piece) = (buffer.elements as u64, buffer.elements.min(PIECE) as u64);
    let others = buffer.master_bytes() + best_bytes(buffer, spec).unwrap_or(0);
    let pieces = (0..buffer.elements).step_by(PIECE).map(|start| start..buffer.elements.min(start + PIECE));
    let moments = pieces.map(|piece| moment_bytes(buffer, spec, piece)).max().unwrap_or(0);
    (others * piece).checked_div(elements).unwrap_or(0) + moments
}

/// The bytes of pending gradients for which a task reserves device memory over its whole life, if these buffers are
/// resident there. One parameter is counted once more: it is copied while it is summed or restored to its best values.
pub(crate) fn waiting(chain: &Chain, spec: &TrainSpec, is_resident: impl Fn(usize) -> bool) -> u64 {
    let accumulates = spec.accumulate > 1;
    let resident = || chain.buffers().iter().enumerate().filter(|(buffer, _)| is_resident(*buffer));
    let trained = || resident().map(|(_, buffer)| buffer).filter(|buffer| buffer.trained);
    let again = |buffer: &&ParamBufferLayout| accumulates || spec.keeps_best() || buffer.layers.len() > 1;
    let params = trained().filter(again).flat_map(|buffer| &buffer.params);
    let largest = params.map(|param| (param.len * size_of::<f32>()) as u64).max().unwrap_or(0);
    trained().map(|buffer| waiting_of(buffer, accumulates)).sum::<u64>() + largest
}

/// The bytes of pending gradients of a buffer: the uses of a tied parameter wait for each other, and microbatches for
/// their sum. Sums are `f32`, in separate memory if the gradients are narrower.
fn waiting_of(buffer: &ParamBufferLayout, accumulates: bool) -> u64 {
    let uses = buffer.layers.len() as u64;
    let sum = if buffer.float == FloatType::F32 { 0 } else { buffer.moment_bytes() };
    let tied = if uses > 1 { uses * buffer.bytes() + sum } else { 0 };
    tied + if accumulates { buffer.moment_bytes() } else { 0 }
}

/// The bytes of a task's buffers that are resident on the device.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResidentBytes {
    /// For each shard, those of its parameters, which are not promoted.
    pub shards: Vec<u64>,
    /// The resident buffers, with the bytes of their masters.
    pub masters: Vec<(usize, u64)>,
    /// Those of pending gradients over the life of the task.
    pub pending: u64,
}

impl ResidentBytes {
    pub(super) fn of(task: &TrainTask, plan: &PartitionPlan, is_resident: impl Fn(usize) -> bool) -> Self {
        let (chain, spec) = (&task.chain, &task.spec);
        let parameters = |shard: &ShardPlan| {
            let buffers = chain.buffers_of(shard.range()).into_iter().filter(|buffer| is_resident(*buffer));
            buffers.map(|buffer| chain.buffers()[buffer].bytes()).sum()
        };
        let resident: Vec<usize> = (0..chain.buffers().len()).filter(|buffer| is_resident(*buffer)).collect();
        let masters = resident.iter().map(|buffer| (*buffer, master_bytes(&chain.buffers()[*buffer], spec)));
        Self {
            shards: plan.shards.iter().map(parameters).collect(),
            masters: masters.collect(),
            pending: if resident.is_empty() { 0 } else { waiting(chain, spec, is_resident) },
        }
    }
}

/// The buffers of a shard, in the groups that devices cache separately.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShardBuffers {
    /// Buffers that are not trained, by their store ids, so that tasks can share one cached copy.
    pub frozen: Vec<ParamBufferCost>,
    /// Buffers that this task trains.
    pub stepped: Vec<ParamBufferCost>,
}

/// The promoted buffers of each shard.
pub(super) fn shard_buffers(
    chain: &Chain,
    plan: &PartitionPlan,
    is_promoted: impl Fn(usize) -> bool,
    name: impl Fn(usize) -> ParamBufferId,
) -> Vec<ShardBuffers> {
    let bytes = |buffer: usize| chain.buffers()[buffer].bytes();
    let frozen = |buffer: usize| {
        let id = name(buffer);
        ParamBufferCost { id: (id.task.0 as u64) << 32 | id.buffer as u64, bytes: bytes(buffer) }
    };
    let stepped = |buffer: usize| ParamBufferCost { id: buffer as u64, bytes: bytes(buffer) };
    let of = |shard: &ShardPlan| {
        let buffers = chain.buffers_of(shard.range()).into_iter().filter(|buffer| is_promoted(*buffer));
        let (trained, others): (Vec<usize>, Vec<usize>) =
            buffers.partition(|buffer| chain.buffers()[*buffer].trained);
        ShardBuffers {
            frozen: others.into_iter().map(frozen).collect(),
            stepped: trained.into_iter().map(stepped).collect(),
        }
    };
    plan.shards.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_counted_with_the_sums_that_it_is_added_up_in() {
        let buffer = |float, layers| ParamBufferLayout {
            name: "buffer".to_owned(),
            params: Vec::new(),
            elements: 100,
            layers,
            trained: true,
            float,
            encoding: Encoding::Masters,
        };
        let of = |float| {
            let (one, tied) = (buffer(float, vec![0]), buffer(float, vec![0, 3]));
            [(&one, false), (&one, true), (&tied, false), (&tied, true)]
                .map(|(buffer, sums)| waiting_of(buffer, sums))
        };
        assert_eq!(of(FloatType::F32), [0, 400, 800, 1200]);
        assert_eq!(of(FloatType::Bf16), [0, 400, 800, 1200]);
    }
}
