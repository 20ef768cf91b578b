//! Compares the ops on any Vulkan driver with those on the CPU.

use crate::decoder::{self, DecoderConfig};
use crate::gpt2::{self, Gpt2Config};
use crate::ops::testing::{distance, values};
use crate::ops::{self, Attention, GroupedAttention, IGNORED, Rotary, RotaryScaling, supports};
use crate::synthetic::testing::{backward_on, shards_agree_on};
use crate::{cnn, mlp};
use burn::tensor::{DType, Device, FloatDType, Gradients, Int, Tensor, TensorData};
use half::f16;
use hydra_core::cube::CubeAdapter;
use hydra_core::{Activation, Batch, Chain, Dataset, HostActivation, HostTensor, Key, Pass, nf4};

/// The device; prints the reason if there is none.
pub(super) fn device() -> Option<Device> {
    let adapter = CubeAdapter::wgpu(0).inspect_err(|error| println!("skipped: {error}"));
    adapter.ok().map(|adapter| adapter.burn)
}

/// Normal numbers of a deviation, on a device.
pub(super) fn normal<const D: usize>(device: &Device, seed: u64, shape: [usize; D], size: f64) -> Tensor<D> {
    Tensor::from_data(TensorData::new(numbers(seed, shape.iter().product(), size), shape), device)
}

fn numbers(seed: u64, count: usize, size: f64) -> Vec<f32> {
    let key = Key::new(seed);
    (0..count).map(|i| (key.normal(i as u64) * size) as f32).collect()
}

/// The elements on the host, as `f32`.
fn widened<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    values(&tensor.clone().cast(FloatDType::F32))
}

/// The device of an op: a plain one, on whose autodiff device leaves are tracked or not.
#[derive(Clone, Copy)]
struct On<'a> {
    device: &'a Device,
    tracked: bool,
    /// The type that floats are stored in.
    stored: DType,
    /// Whether their values are rounded to `f16`, regardless of the stored type.
    half: bool,
}

impl On<'_> {
    fn normal<const D: usize>(self, seed: u64, shape: [usize; D], size: f64) -> Tensor<D> {
        let mut numbers = numbers(seed, shape.iter().product(), size);
        if self.half {
            numbers.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
        }
        let data = TensorData::new(numbers, shape);
        Tensor::from_data(data, (&self.device.clone().autodiff(), self.stored))
    }

    fn leaf<const D: usize>(self, seed: u64, shape: [usize; D], size: f64) -> Tensor<D> {
        let tensor = self.normal(seed, shape, size);
        if self.tracked { tensor.require_grad() } else { tensor }
    }

    fn ids<const D: usize>(self, ids: Vec<i32>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(ids, shape), (&self.device.clone().autodiff(), DType::I32))
    }
}

/// The values of `y`, and the gradients of leaves of one rank given that of `y`.
fn pulled<const D: usize>(on: On<'_>, y: Tensor<D>, leaves: Vec<Leaf>) -> Vec<Vec<f32>> {
    assert_eq!(y.dtype(), on.stored);
    let mut found = vec![widened(&y)];
    if on.tracked {
        let upstream = on.normal(99, y.dims(), 1.0);
        let gradients = (y * upstream).sum().backward();
        found.extend(leaves.into_iter().map(|leaf| match leaf {
            Leaf::One(t) => gradient(t, &gradients),
            Leaf::Two(t) => gradient(t, &gradients),
            Leaf::Three(t) => gradient(t, &gradients),
        }));
    }
    found
}

fn gradient<const D: usize>(leaf: Tensor<D>, gradients: &Gradients) -> Vec<f32> {
    let gradient = leaf.grad(gradients).expect("a gradient");
    assert_eq!(gradient.dtype(), leaf.dtype());
    widened(&gradient)
}

enum Leaf {
    One(Tensor<1>),
    Two(Tensor<2>),
    Three(Tensor<3>),
}

/// The maximum relative error of numbers rounded to `f16`, with its 11-bit mantissa, that are products of matrices
/// rounded to `f16`.
const ROUNDED_TWICE: f64 = 2.0 / 2048.0;

/// Asserts that `op` gives the CPU's values and gradients on the device, with the same bits every time, and the same
/// value bits without tracking.
fn assert_equal(name: &str, bound: f64, op: impl Fn(On<'_>) -> Vec<Vec<f32>>) {
    let Some(device) = device() else { return };
    let tracked = On { device: &device, tracked: true, stored: DType::F32, half: false };
    assert_equal_on(name, bound, tracked, op);
}

/// The same for 16-bit floats, against the CPU's `f32` from the same numbers.
fn assert_halves(name: &str, bound: f64, op: impl Fn(On<'_>) -> Vec<Vec<f32>>) {
    let Some(device) = device() else { return };
    assert!(supports(&device, DType::F16), "the software driver has floats of 16 bits");
    let tracked = On { device: &device, tracked: true, stored: DType::F16, half: true };
    assert_equal_on(name, bound, tracked, op);
}

/// Asserts that `op` gives for 16-bit floats the result for `f32` from the same numbers, rounded once.
fn assert_rounded(name: &str, op: impl Fn(On<'_>) -> Vec<Vec<f32>>) {
    let Some(device) = device() else { return };
    let wide = On { device: &device, tracked: true, stored: DType::F32, half: true };
    let mut expected = op(wide);
    expected.iter_mut().flatten().for_each(|x| *x = f16::from_f32(*x).to_f32());
    let halves = On { stored: DType::F16, ..wide };
    let found = op(halves);
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "{name}, {i}");
    }
    assert_repeated(name, halves, &found, op);
}

fn assert_equal_on(name: &str, bound: f64, tracked: On<'_>, op: impl Fn(On<'_>) -> Vec<Vec<f32>>) {
    let flex = Device::flex();
    let (found, expected) = (op(tracked), op(On { device: &flex, stored: DType::F32, ..tracked }));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let error = distance(found, expected);
        assert!(error < bound, "{name}, {i}: {error}");
    }
    assert_repeated(name, tracked, &found, op);
}

/// Asserts that `op` gives the same bits every time, and the same value bits without tracking.
fn assert_repeated(name: &str, on: On<'_>, found: &Vec<Vec<f32>>, op: impl Fn(On<'_>) -> Vec<Vec<f32>>) {
    let bits = |found: &Vec<Vec<f32>>| -> Vec<Vec<u32>> {
        found.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
    };
    assert_eq!(bits(&op(on)), bits(found), "{name}: run twice");
    let untracked = op(On { tracked: false, ..on });
    assert_eq!(bits(&untracked)[..], bits(found)[..1], "{name}: untracked");
}

fn pass() -> Pass {
    Pass::train(Pass::key_of(1, 2, 3), Activation::default())
}

#[test]
fn gelu_equals_that_of_the_cpu() {
    for shape in [[1, 1, 1], [3, 7, 5], [2, 33, 129]] {
        let op = |on: On<'_>| {
            let x = on.leaf(1, shape, 3.0);
            pulled(on, ops::gelu_tanh(x.clone()), vec![Leaf::Three(x)])
        };
        assert_equal("gelu", 1e-6, op);
        assert_rounded("gelu", op);
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
        let op = |on: On<'_>| {
            let (x, weight, bias) =
                (on.leaf(1, shape, 3.0), on.leaf(2, [shape[2]], 1.0), on.leaf(3, [shape[2]], 1.0));
            // A sum by Burn in 16 bits would be rounded.
            let moved = if on.half { x.clone() } else { x.clone() + 2.0 };
            let y = ops::layer_norm(moved, weight.clone(), bias.clone(), 1e-5);
            pulled(on, y, vec![Leaf::Three(x), Leaf::One(weight), Leaf::One(bias)])
        };
        assert_equal("layer norm", 2e-6, op);
        assert_rounded("layer norm", op);
    }
}

#[test]
fn rms_norm_equals_that_of_the_cpu() {
    for (shape, width) in [([1, 1, 3], 3), ([3, 50, 48], 48), ([2, 70, 48], 16), ([1, 7, 1100], 1100)] {
        let op = |on: On<'_>| {
            let (x, weight) = (on.leaf(1, shape, 3.0), on.leaf(2, [width], 1.0));
            let y = ops::rms_norm(x.clone(), weight.clone(), 1e-5);
            pulled(on, y, vec![Leaf::Three(x), Leaf::One(weight)])
        };
        assert_equal("rms norm", 2e-6, op);
        assert_rounded("rms norm", op);
    }
}

#[test]
fn swiglu_equals_that_of_the_cpu() {
    for shape in [[1, 1, 1], [3, 7, 5], [2, 33, 129]] {
        let op = |on: On<'_>| {
            let (gate, up) = (on.leaf(1, shape, 3.0), on.leaf(2, shape, 1.0));
            let y = ops::swiglu(gate.clone(), up.clone());
            pulled(on, y, vec![Leaf::Three(gate), Leaf::Three(up)])
        };
        assert_equal("swiglu", 1e-6, op);
        assert_rounded("swiglu", op);
    }
}

#[test]
fn maps_of_transposed_weights_equal_those_of_the_cpu() {
    for (shape, outputs) in [([2, 5, 7], 3), ([1, 70, 129], 200), ([2, 512, 256], 40)] {
        for (onto, bias) in [(false, false), (false, true), (true, false), (true, true)] {
            let op = |on: On<'_>| {
                let residual = on.leaf(1, [shape[0], shape[1], outputs], 1.0);
                let (x, w) = (on.leaf(2, shape, 1.0), on.leaf(3, [outputs, shape[2]], 1.0));
                let b = bias.then(|| on.leaf(4, [outputs], 1.0));
                let mut leaves = vec![Leaf::Three(x.clone()), Leaf::Two(w.clone())];
                leaves.extend(b.clone().map(Leaf::One));
                let y = match onto {
                    true => {
                        leaves.push(Leaf::Three(residual.clone()));
                        ops::linear_transposed_onto(residual, x, w, b)
                    }
                    false => ops::linear_transposed(x, w, b),
                };
                pulled(on, y, leaves)
            };
            assert_equal("linear transposed", 1e-6, op);
            assert_rounded("linear transposed", op);
        }
    }
}

#[test]
fn a_lookup_equals_that_of_the_cpu() {
    let ids: Vec<i32> = (0..3 * 40).map(|i| i * i % 29).collect();
    let op = |on: On<'_>| {
        let tokens = on.leaf(1, [29, 33], 1.0);
        let y = ops::lookup(tokens.clone(), on.ids(ids.clone(), [3, 40]));
        pulled(on, y, vec![Leaf::Two(tokens)])
    };
    assert_equal("lookup", 1e-6, op);
    assert_rounded("lookup", op);
}

#[test]
fn grouped_attention_equals_that_of_the_cpu() {
    for (batch, tokens) in [(2, 2), (1, 31), (2, 33), (1, 300)] {
        for (heads, key_heads, causal, window, dropout) in [
            (6, 2, true, None, 0.0),
            (4, 4, true, Some(1), 0.0),
            (6, 3, true, Some(20), 0.25),
            (3, 1, true, Some(400), 0.1),
            (4, 2, false, None, 0.1),
            (4, 2, false, Some(20), 0.1),
        ] {
            let op = |on: On<'_>| {
                let rotary = Some(Rotary::new(8, 50.0, RotaryScaling::Default));
                let options = GroupedAttention {
                    heads,
                    key_heads,
                    scale: 0.5,
                    causal,
                    window,
                    rotary,
                    dropout,
                    site: 7,
                };
                let leaf = |seed, heads: usize| on.leaf(seed, [batch, tokens, heads * 8], 1.0);
                let [queries, keys, values] = [leaf(1, heads), leaf(2, key_heads), leaf(3, key_heads)];
                let leaves = [&queries, &keys, &values].map(|leaf| Leaf::Three(leaf.clone()));
                pulled(on, ops::grouped_attention(queries, keys, values, &options, &pass()), leaves.into())
            };
            // If a token attends only to itself, gradients are rounding noise without a relative error.
            if window != Some(1) {
                assert_equal("grouped attention", 5e-6, op);
            }
            assert_equal("grouped attention, forward", 5e-6, |on| op(On { tracked: false, ..on }));
        }
    }
}

#[test]
fn masks_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    for probability in [1e-9, 0.1, 0.5, 0.999, 1.0] {
        let mask = pass().site(7).dropout_mask(probability).unwrap();
        let mut expected = vec![0.0; 3 * 101 * 67];
        mask.fill(0, &mut expected);
        let on = On { device: &device, tracked: false, stored: DType::F32, half: false };
        let ones = on.normal(1, [3, 101, 67], 1.0).ones_like();
        assert_eq!(values(&ops::dropout(ones.clone(), probability, pass().site(7))), expected);
        assert_eq!(values(&ops::dropout_onto(ones.zeros_like(), ones, mask)), expected);
    }
}

#[test]
fn dropout_equals_that_of_the_cpu() {
    let mask = pass().site(7).dropout_mask(0.3).unwrap();
    let alone = |on: On<'_>| {
        let x = on.leaf(1, [3, 101, 67], 1.0);
        pulled(on, ops::dropout(x.clone(), 0.3, pass().site(7)), vec![Leaf::Three(x)])
    };
    let onto = |on: On<'_>| {
        let (residual, x) = (on.leaf(1, [3, 101, 67], 1.0), on.leaf(2, [3, 101, 67], 1.0));
        let y = ops::dropout_onto(residual.clone(), x.clone(), mask);
        pulled(on, y, vec![Leaf::Three(residual), Leaf::Three(x)])
    };
    assert_equal("dropout", 1e-7, alone);
    assert_rounded("dropout", alone);
    assert_equal("dropout onto a residual", 1e-7, onto);
    assert_rounded("dropout onto a residual", onto);
}

#[test]
fn linear_equals_that_of_the_cpu() {
    for (shape, outputs) in [
        ([1, 1, 1], 1),
        ([2, 5, 7], 3),
        ([3, 33, 48], 65),
        ([1, 70, 129], 200),
        ([2, 150, 300], 513),
        ([2, 512, 200], 40),
        ([2, 512, 256], 40),
    ] {
        for onto in [false, true] {
            let op = |on: On<'_>| {
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
            };
            assert_equal("linear", 1e-6, op);
            // The software driver has no matrix units: halves are multiplied like `f32`.
            assert_rounded("linear", op);
        }
    }
}

#[test]
fn linear_of_a_quantized_weight_equals_that_of_the_cpu() {
    // The last block of the second weight is not full.
    for (batch, tokens, inputs, outputs) in [(2, 3, 64, 32), (1, 5, 37, 11), (2, 40, 128, 130)] {
        let op = |on: On<'_>| {
            let mut blocks = vec![0; nf4::bytes_of(0..inputs * outputs).len()];
            nf4::quantize(&numbers(3, inputs * outputs, 1.0), &mut blocks);
            let words: Vec<f32> = bytemuck::pod_collect_to_vec(&blocks);
            let words = TensorData::new(words, nf4::shape(inputs * outputs));
            let words = || Tensor::from_data(words.clone(), (&on.device.clone().autodiff(), DType::F32));
            let (x, bias) = (on.leaf(1, [batch, tokens, inputs], 1.0), on.leaf(2, [outputs], 1.0));
            let residual = on.leaf(4, [batch, tokens, outputs], 1.0);
            let shape = [outputs, inputs];
            let y = ops::linear_nf4(x.clone(), words(), shape, Some(bias.clone()));
            let y = ops::linear_nf4_onto(residual.clone() + y, x.clone(), words(), shape, None);
            pulled(on, y, vec![Leaf::Three(x), Leaf::One(bias), Leaf::Three(residual)])
        };
        assert_equal("quantized linear", 5e-6, op);
        assert_halves("quantized linear in halves", ROUNDED_TWICE, op);
    }
}

#[test]
fn attention_equals_that_of_the_cpu() {
    for (batch, tokens) in [(1, 1), (2, 2), (1, 31), (2, 33), (1, 300)] {
        for (heads, head_width, scale, dropout) in [(1, 1, 1.0, 0.0), (3, 5, -0.75, 0.25), (2, 16, 0.25, 0.1)]
        {
            let op = |on: On<'_>| {
                let qkv = on.leaf(1, [batch, tokens, 3 * heads * head_width], 1.0);
                let options = Attention { heads, scale, dropout, site: 7 };
                let y = ops::causal_attention(qkv.clone(), options, &pass());
                pulled(on, y, vec![Leaf::Three(qkv)])
            };
            assert_equal("attention", 5e-6, op);
            assert_halves("attention in halves", ROUNDED_TWICE, op);
        }
    }
}

/// Each token's position if rows of `tokens` tokens hold examples of 7, or of 40.
fn positions(on: On<'_>, [batch, tokens]: [usize; 2]) -> Tensor<2, Int> {
    let row = |row: usize| {
        let lengths: &[i32] = if row.is_multiple_of(2) { &[7, 2, 3, 40, 1] } else { &[40] };
        lengths.iter().flat_map(|length| 0..*length).cycle().take(tokens)
    };
    on.ids((0..batch).flat_map(row).collect(), [batch, tokens])
}

#[test]
fn attention_within_examples_equals_that_of_the_cpu() {
    for (batch, tokens, scale, dropout) in
        [(2, 2, 1.0, 0.0), (2, 33, -0.75, 0.25), (3, 130, 0.25, 0.1), (1, 5, 0.5, 0.2), (1, 95, 0.25, 0.1)]
    {
        let op = |on: On<'_>| {
            let qkv = on.leaf(1, [batch, tokens, 3 * 3 * 8], 1.0);
            let options = Attention { heads: 3, scale, dropout, site: 7 };
            let at = positions(on, [batch, tokens]);
            let y = ops::causal_attention_within(qkv.clone(), at, options, &pass());
            pulled(on, y, vec![Leaf::Three(qkv)])
        };
        assert_equal("attention within examples", 5e-6, op);
        let rotary = Some(Rotary::new(8, 50.0, RotaryScaling::Default));
        for (causal, window) in [(true, Some(20)), (false, None), (false, Some(5))] {
            let attention = GroupedAttention {
                heads: 6,
                key_heads: 2,
                scale,
                causal,
                window,
                rotary: rotary.clone(),
                dropout,
                site: 7,
            };
            let op = |on: On<'_>| {
                let queries = on.leaf(1, [batch, tokens, 6 * 8], 1.0);
                let [keys, values] = [2, 3].map(|seed| on.leaf(seed, [batch, tokens, 2 * 8], 1.0));
                let inputs = [&queries, &keys, &values].map(|x| Leaf::Three(x.clone()));
                let at = positions(on, [batch, tokens]);
                let y = ops::grouped_attention_within(queries, keys, values, at, &attention, &pass());
                pulled(on, y, inputs.into())
            };
            assert_equal("grouped attention within examples", 5e-6, op);
        }
    }
}

#[test]
fn embedding_equals_that_of_the_cpu() {
    for (batch, length, rows, width) in [(2, 3, 5, 4), (1, 1, 1, 1), (3, 40, 29, 33), (2, 100, 300, 65)] {
        let key = Key::new(5);
        let ids: Vec<i32> = (0..batch * length).map(|i| (key.bits(i as u64) % rows as u64) as i32).collect();
        let op = |on: On<'_>| {
            let (tokens, positions) = (on.leaf(1, [rows, width], 1.0), on.leaf(2, [length + 3, width], 1.0));
            let y = ops::embedding(tokens.clone(), positions.clone(), on.ids(ids.clone(), [batch, length]));
            pulled(on, y, vec![Leaf::Two(tokens), Leaf::Two(positions)])
        };
        assert_equal("embedding", 1e-6, op);
        assert_rounded("embedding", op);
    }
}

/// Every fourth position but the first has no target.
fn targets(positions: usize, vocabulary: usize) -> Vec<i32> {
    let id = |i: usize| (Key::new(3).bits(i as u64) % vocabulary as u64) as i32;
    (0..positions).map(|i| if i % 4 == 3 { IGNORED } else { id(i) }).collect()
}

/// [`ops::head_loss`] or [`ops::token_losses`].
type Head = fn(Tensor<2>, Tensor<2>, Tensor<1, Int>, usize, &Pass) -> Tensor<1>;

#[test]
fn the_head_equals_that_of_the_cpu() {
    for (positions, width, vocabulary) in [(7, 5, 11), (1, 1, 2), (13, 16, 4099), (5, 8, 4096), (30, 33, 257)]
    {
        for chunk_rows in [1, 3, 1000] {
            for (name, head) in [("head", ops::head_loss as Head), ("losses of tokens", ops::token_losses)] {
                let op = |on: On<'_>| {
                    let (hidden, table) =
                        (on.leaf(1, [positions, width], 2.0), on.leaf(2, [vocabulary, width], 1.0));
                    let targets = on.ids(targets(positions, vocabulary), [positions]);
                    let losses = head(hidden.clone(), table.clone(), targets, chunk_rows, &pass());
                    assert_eq!(losses.dtype(), DType::F32);
                    pulled(On { stored: DType::F32, ..on }, losses, vec![Leaf::Two(hidden), Leaf::Two(table)])
                };
                assert_equal(name, 2e-6, op);
                assert_halves(&format!("{name} in halves"), ROUNDED_TWICE, op);
            }
        }
    }
}

#[test]
fn sums_of_segments_equal_those_of_the_cpu() {
    for (positions, count) in [(1, 1), (7, 4), (600, 3), (1000, 300)] {
        assert_equal("sums of segments", 1e-6, |on| {
            let values = on.leaf(1, [positions], 1.0);
            // Some values belong to no segment, and some segments have no value.
            let segment = |i: usize| (Key::new(5).bits(i as u64) % (count as u64 + 1)) as i32 - 1;
            let segments = on.ids((0..positions).map(segment).collect(), [positions]);
            pulled(on, ops::segment_sums(values.clone(), segments, count), vec![Leaf::One(values)])
        });
    }
}

#[test]
fn what_names_nothing_makes_no_number() {
    let Some(device) = device() else { return };
    let on = On { device: &device, tracked: false, stored: DType::F32, half: false };
    let table = || on.normal(1, [5, 4], 1.0);
    for id in [5, -1] {
        let y = values(&ops::embedding(table(), on.normal(2, [3, 4], 1.0), on.ids(vec![4, id, 2], [1, 3])));
        assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (4..8).contains(&i)), "{y:?}");
    }
    let loss = |targets: Vec<i32>| {
        values(&ops::head_loss(on.normal(3, [3, 4], 1.0), table(), on.ids(targets, [3]), 2, &pass()))[0]
    };
    assert!(loss(vec![1, 5, 2]).is_nan() && loss(vec![IGNORED; 3]).is_nan());
    assert!(loss(vec![1, IGNORED, 2]).is_finite());
    let losses = |targets: Vec<i32>| {
        let targets = on.ids(targets, [3]);
        values(&ops::token_losses(on.normal(3, [3, 4], 1.0), table(), targets, 2, &pass()))
    };
    let [known, unknown] = [losses(vec![1, IGNORED, 2]), losses(vec![1, IGNORED, 5])];
    assert!(known[0] > 0.0 && known[1] == 0.0 && known[2].is_finite());
    assert!(unknown[..2] == known[..2] && unknown[2].is_nan());
    let sums = ops::segment_sums(on.normal(4, [3], 1.0), on.ids(vec![0, 2, 1], [3]), 2);
    assert!(values(&sums).iter().all(|sum| sum.is_nan()));
}

/// Asserts that loss and gradients of a chain on the device equal those on the CPU.
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
    let batch = Batch { inputs: ids.clone(), targets: ids, items: 2, loss_targets: 2 * 63, units: 2 * 64 };
    assert_chain(&chain, &batch, &[0, 1, 3, 6], 1e-4);
}

#[test]
fn a_llama_trains_as_on_the_cpu() {
    let chain = decoder::chain(&DecoderConfig::preset("bytes-llama-tiny").unwrap(), None).unwrap();
    let ids: Vec<i32> = (0..2 * 64).map(|i| (i * 31) % 256).collect();
    let ids = HostActivation::of(HostTensor::int(ids, [2, 64]));
    let batch = Batch { inputs: ids.clone(), targets: ids, items: 2, loss_targets: 2 * 63, units: 2 * 64 };
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
    let buffers = cnn::Waves::new(1, 12, 2, 16, 3);
    let config = cnn::CnnConfig { inputs: 2, channels: 8, stages: 2, blocks: 1, classes: 3 };
    let batch = buffers.batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap();
    assert_chain(&cnn::chain(config).unwrap(), &batch, &[0, 2, 5], 1e-4);
}

#[test]
fn two_streams_train_as_on_the_cpu() {
    assert_chain(&mlp::two_stream_chain(16, 3, 3).unwrap(), &spirals(), &[0, 2, 5], 1e-5);
}

#[test]
fn what_a_device_does_not_compute_with_is_refused() {
    let Some(device) = device() else { return };
    for device in [&device, &Device::flex()] {
        assert!(
            supports(device, DType::F32) && !supports(device, DType::F64) && !supports(device, DType::I32)
        );
    }
    assert!(supports(&Device::flex(), DType::BF16));
    let refusal = |floats: [DType; 2]| {
        let tensors = floats.map(|float| Tensor::<3>::zeros([1, 2, 3], (&device, float)));
        let run = || {
            let [residual, x] = tensors;
            ops::dropout_onto(residual, x, pass().site(7).dropout_mask(0.5).unwrap())
        };
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("a refusal");
        *panic.downcast::<String>().expect("a message")
    };
    let said = refusal([DType::F64; 2]);
    assert!(said.contains("found [F64, F64]"), "{said}");
    if !supports(&device, DType::BF16) {
        let said = refusal([DType::BF16; 2]);
        assert!(said.contains("do not compute with BF16"), "{said}");
    }
    let said = refusal([DType::F32, DType::F16]);
    assert!(said.contains("one type") && said.contains("F16"), "{said}");
}
