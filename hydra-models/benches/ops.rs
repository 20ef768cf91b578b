//! The fused operations on one thread, compared with their reference implementations in Burn's own operations.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, module};
use criterion::Criterion;
use hydra_core::{Activation, Key, Pass};
use hydra_models::ops::{
    self, Attention, GroupedAttention, Rotary, RotaryScaling, causal_attention, reference,
};

/// Normal numbers, as a tracked leaf.
fn normal<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    let key = Key::new(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| key.normal(i as u64) as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff()).require_grad()
}

fn attention(c: &mut Criterion) {
    type Attend = fn(Tensor<3>, Attention, &Pass) -> Tensor<3>;
    let pass = Pass::train(Pass::key_of(0, 0, 0), Activation::default());
    for [batch, tokens, heads, head_width] in [[1, 512, 12, 64], [8, 128, 4, 64]] {
        let mut group = c.benchmark_group(format!("attention, [{batch}, {tokens}, {heads} * {head_width}]"));
        group.sample_size(10);
        let width = heads * head_width;
        let qkv = normal(1, [batch, tokens, 3 * width]);
        let untracked = qkv.clone().inner().autodiff();
        let upstream = normal(2, [batch, tokens, width]).inner().autodiff();
        let kinds: [(&str, Attend); 2] =
            [("fused", causal_attention), ("reference", reference::causal_attention)];
        for ((name, attend), dropout) in kinds.into_iter().flat_map(|kind| [(kind, 0.0), (kind, 0.1)]) {
            let options = Attention { heads, scale: 0.125, dropout, site: 0 };
            group.bench_function(format!("{name}, dropout {dropout}, forward"), |b| {
                b.iter(|| attend(untracked.clone(), options, &pass));
            });
            group.bench_function(format!("{name}, dropout {dropout}, forward and backward"), |b| {
                b.iter(|| (attend(qkv.clone(), options, &pass) * upstream.clone()).sum().backward());
            });
        }
        group.finish();
    }
}

/// Head shapes of SmolLM2 and of Llama 3.2 (1B), the latter also with a window.
fn grouped(c: &mut Criterion) {
    let pass = Pass::train(Pass::key_of(0, 0, 0), Activation::default());
    for (heads, key_heads, window) in [(9, 3, None), (32, 8, None), (32, 8, Some(128))] {
        let rotary = Some(Rotary::new(64, 1e4, RotaryScaling::Default));
        let options = GroupedAttention {
            heads,
            key_heads,
            scale: 0.125,
            causal: true,
            window,
            rotary,
            dropout: 0.0,
            site: 0,
        };
        let [queries, keys, values] = [(1, heads), (2, key_heads), (3, key_heads)]
            .map(|(seed, heads)| normal(seed, [1, 512, heads * 64]));
        let inputs = |t| [input(&queries, t), input(&keys, t), input(&values, t)];
        let fused = |t| {
            let [queries, keys, values] = inputs(t);
            ops::grouped_attention(queries, keys, values, &options, &pass)
        };
        let composed = |t| {
            let [queries, keys, values] = inputs(t);
            reference::grouped_attention(queries, keys, values, &options, &pass)
        };
        let name = format!("grouped attention, {heads} heads on {key_heads}, window {window:?}");
        compare(c, &name, [("fused", &fused), ("reference", &composed)]);
    }
}

/// An input: a leaf of the graph, or outside of any.
fn input<const D: usize>(leaf: &Tensor<D>, tracked: bool) -> Tensor<D> {
    if tracked { leaf.clone() } else { leaf.clone().inner().autodiff() }
}

/// An operation, with its inputs tracked or not.
type Side<'a> = (&'a str, &'a dyn Fn(bool) -> Tensor<3>);

/// Times both sides, forward and with the backward of the same upstream gradient.
fn compare(c: &mut Criterion, name: &str, sides: [Side<'_>; 2]) {
    let mut group = c.benchmark_group(name);
    group.sample_size(10);
    for (side, run) in sides {
        let upstream = normal(9, run(false).dims()).inner().autodiff();
        group.bench_function(format!("{side}, forward"), |b| b.iter(|| run(false)));
        group.bench_function(format!("{side}, forward and backward"), |b| {
            b.iter(|| (run(true) * upstream.clone()).sum().backward());
        });
    }
    group.finish();
}

fn linear(c: &mut Criterion) {
    for [tokens, inputs, outputs] in [[512, 768, 3072], [512, 3072, 768], [1024, 256, 1024]] {
        let (x, residual) = (normal(1, [1, tokens, inputs]), normal(2, [1, tokens, outputs]));
        let (weight, bias) = (normal(3, [inputs, outputs]), normal(4, [outputs]));
        let fused =
            |t| ops::linear_onto(input(&residual, t), input(&x, t), input(&weight, t), input(&bias, t));
        let composed =
            |t| input(&residual, t) + module::linear(input(&x, t), input(&weight, t), Some(input(&bias, t)));
        let name = format!("linear onto a residual, [{tokens}, {inputs}] to {outputs}");
        compare(c, &name, [("fused", &fused), ("reference", &composed)]);
        let turned = normal(3, [outputs, inputs]);
        let fused = |t| ops::linear_transposed(input(&x, t), input(&turned, t), None);
        let composed = |t| module::linear(input(&x, t), input(&turned, t).transpose(), None);
        let name = format!("linear transposed, [{tokens}, {inputs}] to {outputs}");
        compare(c, &name, [("fused", &fused), ("reference", &composed)]);
    }
}

fn linear_in_bf16(c: &mut Criterion) {
    for [tokens, inputs, outputs] in [[512, 768, 3072], [512, 3072, 768], [512, 576, 1536]] {
        let (x, weight) = (normal(1, [1, tokens, inputs]), normal(2, [outputs, inputs]));
        let narrow = |t| {
            let (x, weight) = (input(&x, t).cast(FloatDType::BF16), input(&weight, t).cast(FloatDType::BF16));
            ops::linear_transposed(x, weight, None).cast(FloatDType::F32)
        };
        let wide = |t| ops::linear_transposed(input(&x, t), input(&weight, t), None);
        let name = format!("linear transposed with casts, [{tokens}, {inputs}] to {outputs}");
        compare(c, &name, [("bf16", &narrow), ("f32", &wide)]);
    }
}

/// A product of matrices that are `bf16` already.
fn product_in_bf16(c: &mut Criterion) {
    let [tokens, inputs, outputs] = [512, 768, 3072];
    let mut group =
        c.benchmark_group(format!("a product of bf16 matrices, [{tokens}, {inputs}] to {outputs}"));
    let operand = |seed, shape: [usize; 2]| input(&normal(seed, shape), false).cast(FloatDType::BF16);
    let (x, weight) = (operand(1, [tokens, inputs]).unsqueeze_dim::<3>(0), operand(2, [outputs, inputs]));
    group.bench_function("forward", |b| {
        b.iter(|| ops::linear_transposed(x.clone(), weight.clone(), None));
    });
    group.finish();
}

fn rows(c: &mut Criterion) {
    let (x, weight, bias) = (normal(1, [1, 512, 768]), normal(2, [768]), normal(3, [768]));
    let fused = |t| ops::layer_norm(input(&x, t), input(&weight, t), input(&bias, t), 1e-5);
    let composed = |t| reference::layer_norm(input(&x, t), input(&weight, t), input(&bias, t), 1e-5);
    compare(c, "layer norm, [512, 768]", [("fused", &fused), ("reference", &composed)]);
    let x = normal(1, [1, 512, 3072]);
    let (fused, composed) = (|t| ops::gelu_tanh(input(&x, t)), |t| reference::gelu_tanh(input(&x, t)));
    compare(c, "gelu_new, [512, 3072]", [("fused", &fused), ("reference", &composed)]);
    let (x, weight) = (normal(1, [1, 512, 576]), normal(2, [576]));
    let fused = |t| ops::rms_norm(input(&x, t), input(&weight, t), 1e-5);
    let composed = |t| reference::rms_norm(input(&x, t), input(&weight, t), 1e-5);
    compare(c, "rms norm, [512, 576]", [("fused", &fused), ("reference", &composed)]);
    let (gate, up) = (normal(1, [1, 512, 1536]), normal(2, [1, 512, 1536]));
    let fused = |t| ops::swiglu(input(&gate, t), input(&up, t));
    let composed = |t| reference::swiglu(input(&gate, t), input(&up, t));
    compare(c, "swiglu, [512, 1536]", [("fused", &fused), ("reference", &composed)]);
}

fn dropout(c: &mut Criterion) {
    let pass = Pass::train(Pass::key_of(0, 0, 0), Activation::default());
    let mask = pass.site(0).dropout_mask(0.1).expect("a training pass drops");
    let (residual, x) = (normal(1, [1, 512, 768]), normal(2, [1, 512, 768]));
    let fused = |t| ops::dropout_onto(input(&residual, t), input(&x, t), mask);
    let composed = |t| input(&residual, t) + pass.site(0).dropout(input(&x, t), 0.1);
    compare(c, "dropout onto a residual, [512, 768]", [("fused", &fused), ("reference", &composed)]);
}

/// Ids below the vocabulary.
fn ids<const D: usize>(shape: [usize; D], vocabulary: u64) -> Tensor<D, Int> {
    let key = Key::new(7);
    let draw = |i: usize| (key.bits(i as u64) % vocabulary) as i32;
    let values: Vec<i32> = (0..shape.iter().product()).map(draw).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex().autodiff(), DType::I32))
}

fn tables(c: &mut Criterion) {
    let (vocabulary, width) = (50_257, 256);
    let (table, places) = (normal(1, [vocabulary, width]), normal(2, [128, width]));
    let tokens = ids([8, 128], vocabulary as u64);
    let fused = |t| ops::embedding(input(&table, t), input(&places, t), tokens.clone());
    let composed = |t| reference::embedding(input(&table, t), input(&places, t), tokens.clone());
    compare(c, "embedding, 1024 of [50257, 256]", [("fused", &fused), ("reference", &composed)]);
    let (hidden, targets) = (normal(3, [512, width]), ids([512], vocabulary as u64));
    let pass = Pass::train(Pass::key_of(0, 0, 0), Activation::default());
    let head = |t| ops::head_loss(input(&hidden, t), input(&table, t), targets.clone(), 256, &pass);
    let fused = |t| head(t).reshape([1, 1, 1]);
    let composed =
        |t| reference::head_loss(input(&hidden, t), input(&table, t), targets.clone()).reshape([1, 1, 1]);
    compare(c, "head with its loss, [512, 256] to 50257", [("fused", &fused), ("reference", &composed)]);
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("the pool of one thread");
    attention(&mut criterion);
    grouped(&mut criterion);
    linear(&mut criterion);
    linear_in_bf16(&mut criterion);
    product_in_bf16(&mut criterion);
    rows(&mut criterion);
    dropout(&mut criterion);
    tables(&mut criterion);
    criterion.final_summary();
}
