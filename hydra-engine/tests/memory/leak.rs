//! Leaks: memory that a shard task allocated is freed when it ends.

use crate::common::gpt2_chain;
use hydra_core::{DeviceId, HostActivation, HostTensor, MemoryProbe, Pass, forward_range, promote_layers};
use hydra_spill::alloc::{AllocatorProbe, with_tag};

#[test]
fn forwards_without_a_graph_leave_nothing_behind() {
    in_own_process!();
    let chain = gpt2_chain();
    let device = burn::tensor::Device::flex();
    let buffer = |i: usize| {
        let mut values = vec![0.0f32; chain.buffers()[i].elements];
        chain.source().fill(&chain, i, 0, &mut values).unwrap();
        bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&values)).into()
    };
    let ids = HostActivation::of(HostTensor::int((0..24).map(|i| i % 40).collect(), [2, 12]));
    let autodiff = device.clone().autodiff();
    let in_use = |times: usize, training: bool, layer: usize, x: &HostActivation| {
        with_tag(Some(DeviceId(40)), || {
            for _ in 0..times {
                let layers = promote_layers(&chain, layer..layer + 1, &buffer, &device, false);
                let targets = ids.to_device(&autodiff);
                let pass = match training {
                    true => Pass::train(Pass::key_of(0, 0, 0), targets),
                    false => Pass::evaluate(targets),
                };
                let y = forward_range(&layers, layer, x.to_device(&autodiff), &pass);
                drop(y.into_host());
            }
        });
        AllocatorProbe.in_use(DeviceId(40))
    };
    let mut x = ids.clone();
    let mut leaks = Vec::new();
    for layer in 0..chain.len() {
        for training in [true, false] {
            // A leak grows with every hundred. A block of the thread pool's queue is charged once to the thread that
            // first needed it, at a time that depends on earlier tests.
            let [before, after, again] =
                [20, 100, 100].map(|times| in_use(times, training, layer, &x) as i64);
            let grown = (after - before).min(again - after);
            leaks.push((chain.layers()[layer].name.clone(), training, grown));
        }
        let layers = promote_layers(&chain, layer..layer + 1, &buffer, &device, false);
        let pass = Pass::evaluate(ids.to_device(&autodiff));
        x = forward_range(&layers, layer, x.to_device(&autodiff), &pass).into_host();
    }
    assert!(leaks.iter().all(|(_, _, bytes)| *bytes <= 0), "bytes of a hundred forwards: {leaks:?}");
}
