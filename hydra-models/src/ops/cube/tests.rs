//! The ops on the software Vulkan driver against the ops on the CPU.

use crate::gpt2::{self, Gpt2Config};
use crate::ops::testing::{distance, values};
use crate::ops::{self, Attention, IGNORED};
use crate::synthetic::testing::{backward_on, shards_agree_on};
use crate::{cnn, mlp};
use burn::tensor::{DType, Device, DeviceKind, Int, Tensor, TensorData};
use cubecl::device::WgpuDeviceKind;
use hydra_core::{Activation, Batch, Chain, Dataset, HostActivation, HostTensor, Key, Pass};

/// The software Vulkan driver, where there is one.
pub(super) fn device() -> Option<Device> {
    match cubecl::Device::vulkan(WgpuDeviceKind::Cpu) {
        Ok(_) => Some(Device::wgpu(DeviceKind::Cpu)),
        Err(error) => {
            println!("skipped: no software Vulkan driver: {error}");
            None
        }
    }
}

/// Normal numbers of a deviation, on a device.
pub(super) fn normal<const D: usize>(device: &Device, seed: u64, shape: [usize; D], size: f64) -> Tensor<D> {
    let key = Key::new(seed);
    let count = shape.iter().product::<usize>() as u64;
    let numbers: Vec<f32> = (0..count).map(|i| (key.normal(i) * size) as f32).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

/// Where an op runs: a plain device, on whose autodiff device leaves are tracked or not.
#[derive(Clone, Copy)]
struct On<'a> {
    device: &'a Device,
    tracked: bool,
}

impl On<'_> {
    fn normal<const D: usize>(self, seed: u64, shape: [usize; D], size: f64) -> Tensor<D> {
        normal(&self.device.clone().autodiff(), seed, shape, size)
    }

    fn leaf<const D: usize>(self, seed: u64, shape: [usize; D], size: f64) -> Tensor<D> {
        let tensor = self.normal(seed, shape, size);
        if self.tracked { tensor.require_grad() } else { tensor }
    }

    fn ids<const D: usize>(self, ids: Vec<i32>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(ids, shape), (&self.device.clone().autodiff(), DType::I32))
    }
}

/// The gradients of leaves of one rank for that of `y`, after its values.
fn pulled<const D: usize>(on: On<'_>, y: Tensor<D>, leaves: Vec<Leaf>) -> Vec<Vec<f32>> {
    let mut found = vec![values(&y)];
    if on.tracked {
        let upstream = on.normal(99, y.dims(), 1.0);
        let gradients = (y * upstream).sum().backward();
        found.extend(leaves.into_iter().map(|leaf| match leaf {
            Leaf::One(t) => values(&t.grad(&gradients).expect("a gradient")),
            Leaf::Two(t) => values(&t.grad(&gradients).expect("a gradient")),
            Leaf::Three(t) => values(&t.grad(&gradients).expect("a gradient")),
        }));
    }
    found
}

enum Leaf {
    One(Tensor<1>),
    Two(Tensor<2>),
    Three(Tensor<3>),
}

/// Asserts that `op` gives the CPU's values and gradients on the device, the same bits each time, and the
/// values' bits also where nothing is tracked.
fn assert_equal(name: &str, bound: f64, op: impl Fn(On<'_>) -> Vec<Vec<f32>>) {
    let Some(device) = device() else { return };
    let (flex, tracked) = (Device::flex(), On { device: &device, tracked: true });
    let (found, expected) = (op(tracked), op(On { device: &flex, tracked: true }));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let error = distance(found, expected);
        assert!(error < bound, "{name}, {i}: {error}");
    }
    let bits = |found: &Vec<Vec<f32>>| -> Vec<Vec<u32>> {
        found.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
    };
    assert_eq!(bits(&op(tracked)), bits(&found), "{name}: run twice");
    let untracked = op(On { tracked: false, ..tracked });
    assert_eq!(bits(&untracked)[..], bits(&found)[..1], "{name}: untracked");
}

fn pass() -> Pass {
    Pass::train(Pass::key_of(1, 2, 3), Activation::default())
}

#[test]
fn gelu_equals_that_of_the_cpu() {
    for shape in [[1, 1, 1], [3, 7, 5], [2, 33, 129]] {
        assert_equal("gelu", 1e-6, |on| {
            let x = on.leaf(1, shape, 3.0);
            pulled(on, ops::gelu_tanh(x.clone()), vec![Leaf::Three(x)])
        });
    }
}

#[test]
fn gelu_at_its_far_ends_is_zero_and_the_identity() {
    let Some(device) = device() else { return };
    let device = device.autodiff();
    let x = Tensor::<1>::from_floats([-40.0, -1e6, -1e30, 0.0, 40.0, 1e6, 1e30], &device).require_grad();
    let y = ops::gelu_tanh(x.clone());
    let (found, gradient) = (values(&y), values(&x.grad(&y.sum().backward()).unwrap()));
    assert!(found[..3].iter().all(|y| y.abs() < 1e-20), "{found:?}");
    assert_eq!(found[3..], [0.0, 40.0, 1e6, 1e30]);
    assert!(gradient[..3].iter().all(|g| g.abs() < 1e-20), "{gradient:?}");
    assert_eq!(gradient[4..], [1.0; 3]);
}

#[test]
fn layer_norm_equals_that_of_the_cpu() {
    for shape in [[1, 1, 3], [2, 3, 5], [3, 50, 48], [1, 7, 1100]] {
        assert_equal("layer norm", 2e-6, |on| {
            let (x, weight, bias) =
                (on.leaf(1, shape, 3.0), on.leaf(2, [shape[2]], 1.0), on.leaf(3, [shape[2]], 1.0));
            let y = ops::layer_norm(x.clone() + 2.0, weight.clone(), bias.clone(), 1e-5);
            pulled(on, y, vec![Leaf::Three(x), Leaf::One(weight), Leaf::One(bias)])
        });
    }
}

#[test]
fn masks_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    for probability in [1e-9, 0.1, 0.5, 0.999, 1.0] {
        let mask = pass().dropout_mask(probability, 7).unwrap();
        let mut expected = vec![0.0; 3 * 101 * 67];
        mask.fill(0, &mut expected);
        let on = On { device: &device, tracked: false };
        let ones = on.normal(1, [3, 101, 67], 1.0).ones_like();
        assert_eq!(values(&ops::dropout(ones.clone(), probability, 7, &pass())), expected);
        assert_eq!(values(&ops::dropout_onto(ones.zeros_like(), ones, mask)), expected);
    }
}

#[test]
fn dropout_equals_that_of_the_cpu() {
    let mask = pass().dropout_mask(0.3, 7).unwrap();
    assert_equal("dropout", 1e-7, |on| {
        let x = on.leaf(1, [3, 101, 67], 1.0);
        pulled(on, ops::dropout(x.clone(), 0.3, 7, &pass()), vec![Leaf::Three(x)])
    });
    assert_equal("dropout onto a residual", 1e-7, |on| {
        let (residual, x) = (on.leaf(1, [3, 101, 67], 1.0), on.leaf(2, [3, 101, 67], 1.0));
        let y = ops::dropout_onto(residual.clone(), x.clone(), mask);
        pulled(on, y, vec![Leaf::Three(residual), Leaf::Three(x)])
    });
}

#[test]
fn linear_equals_that_of_the_cpu() {
    for (shape, outputs) in
        [([1, 1, 1], 1), ([2, 5, 7], 3), ([3, 33, 48], 65), ([1, 70, 129], 200), ([2, 150, 300], 513)]
    {
        for onto in [false, true] {
            assert_equal("linear", 1e-6, |on| {
                let residual = on.leaf(1, [shape[0], shape[1], outputs], 1.0);
                let x = on.leaf(2, shape, 1.0);
                let (w, b) = (on.leaf(3, [shape[2], outputs], 1.0), on.leaf(4, [outputs], 1.0));
                let leaves = vec![Leaf::Three(x.clone()), Leaf::Two(w.clone()), Leaf::One(b.clone())];
                match onto {
                    true => {
                        let y = ops::linear_onto(residual.clone(), x, w, b);
                        pulled(on, y, [vec![Leaf::Three(residual)], leaves].into_iter().flatten().collect())
                    }
                    false => pulled(on, ops::linear(x, w, b), leaves),
                }
            });
        }
    }
}

#[test]
fn attention_equals_that_of_the_cpu() {
    for (batch, tokens) in [(1, 1), (2, 2), (1, 31), (2, 33), (1, 300)] {
        for (heads, head_width, scale, dropout) in [(1, 1, 1.0, 0.0), (3, 5, -0.75, 0.25), (2, 16, 0.25, 0.1)]
        {
            assert_equal("attention", 5e-6, |on| {
                let qkv = on.leaf(1, [batch, tokens, 3 * heads * head_width], 1.0);
                let options = Attention { heads, scale, dropout, site: 7 };
                let y = ops::causal_attention(qkv.clone(), options, &pass());
                pulled(on, y, vec![Leaf::Three(qkv)])
            });
        }
    }
}

#[test]
fn embedding_equals_that_of_the_cpu() {
    for (batch, length, rows, width) in [(2, 3, 5, 4), (1, 1, 1, 1), (3, 40, 29, 33), (2, 100, 300, 65)] {
        let key = Key::new(5);
        let ids: Vec<i32> = (0..batch * length).map(|i| (key.bits(i as u64) % rows as u64) as i32).collect();
        assert_equal("embedding", 1e-6, |on| {
            let (tokens, positions) = (on.leaf(1, [rows, width], 1.0), on.leaf(2, [length + 3, width], 1.0));
            let y = ops::embedding(tokens.clone(), positions.clone(), on.ids(ids.clone(), [batch, length]));
            pulled(on, y, vec![Leaf::Two(tokens), Leaf::Two(positions)])
        });
    }
}

/// Every fourth position but the first predicts nothing.
fn targets(positions: usize, vocabulary: usize) -> Vec<i32> {
    let id = |i: usize| (Key::new(3).bits(i as u64) % vocabulary as u64) as i32;
    (0..positions).map(|i| if i % 4 == 3 { IGNORED } else { id(i) }).collect()
}

#[test]
fn the_head_equals_that_of_the_cpu() {
    for (positions, width, vocabulary) in [(7, 5, 11), (1, 1, 2), (13, 16, 4099), (30, 33, 257)] {
        for chunk_rows in [1, 3, 1000] {
            assert_equal("head", 2e-6, |on| {
                let (hidden, table) =
                    (on.leaf(1, [positions, width], 2.0), on.leaf(2, [vocabulary, width], 1.0));
                let targets = on.ids(targets(positions, vocabulary), [positions]);
                let loss = ops::head_loss(hidden.clone(), table.clone(), targets, chunk_rows);
                pulled(on, loss, vec![Leaf::Two(hidden), Leaf::Two(table)])
            });
        }
    }
}

#[test]
fn what_names_nothing_makes_no_number() {
    let Some(device) = device() else { return };
    let on = On { device: &device, tracked: false };
    let table = || on.normal(1, [5, 4], 1.0);
    for id in [5, -1] {
        let y = values(&ops::embedding(table(), on.normal(2, [3, 4], 1.0), on.ids(vec![4, id, 2], [1, 3])));
        assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (4..8).contains(&i)), "{y:?}");
    }
    let loss = |targets: Vec<i32>| {
        values(&ops::head_loss(on.normal(3, [3, 4], 1.0), table(), on.ids(targets, [3]), 2))[0]
    };
    assert!(loss(vec![1, 5, 2]).is_nan() && loss(vec![IGNORED; 3]).is_nan());
    assert!(loss(vec![1, IGNORED, 2]).is_finite());
}

/// Asserts that the loss and the gradients of a chain on the device are those on the CPU.
fn assert_chain(chain: &Chain, batch: &Batch, cuts: &[usize], bound: f64) {
    let Some(device) = device() else { return };
    let (found, expected) = (backward_on(&device, chain, batch), backward_on(&Device::flex(), chain, batch));
    assert!((found.0 - expected.0).abs() <= bound as f32 * expected.0.abs(), "{} {}", found.0, expected.0);
    for (i, (found, expected)) in found.1.iter().zip(&expected.1).enumerate() {
        let error = distance(found, expected);
        assert!(error < bound, "parameter {i}: {error}");
    }
    shards_agree_on(&device, chain, batch, cuts);
    assert_eq!(backward_on(&device, chain, batch), found, "run twice");
}

#[test]
fn gpt2_trains_as_on_the_cpu() {
    let chain = gpt2::chain(&Gpt2Config::preset("bytes-tiny").unwrap(), None).unwrap();
    let ids: Vec<i32> = (0..2 * 64).map(|i| (i * 31) % 256).collect();
    let ids = HostActivation::of(HostTensor::int(ids, [2, 64]));
    let batch = Batch { inputs: ids.clone(), targets: ids, items: 2, terms: 2 * 63, units: 2 * 64 };
    assert_chain(&chain, &batch, &[0, 1, 3, 6], 1e-4);
}

fn spirals() -> Batch {
    mlp::Spirals::new(2, 40, 3).batch(&(0..40).collect::<Vec<_>>()).unwrap()
}

#[test]
fn perceptrons_train_as_on_the_cpu() {
    assert_chain(&mlp::chain(&[2, 32, 32], 3).unwrap(), &spirals(), &[0, 1, 3], 1e-5);
}

#[test]
fn convolutions_train_as_on_the_cpu() {
    let images = cnn::Waves::new(1, 12, 2, 16, 3);
    let config = cnn::CnnConfig { inputs: 2, channels: 8, stages: 2, blocks: 1, classes: 3 };
    let batch = images.batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap();
    assert_chain(&cnn::chain(config).unwrap(), &batch, &[0, 2, 5], 1e-4);
}

#[test]
fn two_streams_train_as_on_the_cpu() {
    assert_chain(&mlp::two_stream_chain(16, 3, 3).unwrap(), &spirals(), &[0, 2, 5], 1e-5);
}
