//! One layer of GPT-2 (124M) and of SmolLM2 (135M): forward without a graph, and recomputed forward with backward.

use burn::tensor::Device;
use criterion::Criterion;
use hydra_core::{
    BackwardFrom, Chain, HostActivation, HostTensor, Pass, backward_range, forward_range, promote_layers,
};
use hydra_models::decoder::{self, DecoderConfig};
use hydra_models::gpt2::{self, Gpt2Config};

fn gpt2() -> Chain {
    let mut config = Gpt2Config::preset("gpt2").expect("a preset");
    (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) = (0.0, 0.0, 0.0);
    gpt2::chain(&config, None).expect("a chain")
}

fn smollm2() -> Chain {
    let config = DecoderConfig::preset("smollm2-135m").expect("a preset");
    decoder::chain(&config, None).expect("a chain")
}

fn layers(c: &mut Criterion, name: &str, chain: &Chain, width: usize) {
    let context = 512;
    let (device, autodiff) = (Device::flex(), Device::flex().autodiff());
    let ids = HostActivation::of(HostTensor::int((0..context as i32).collect(), [1, context]));
    let x = HostActivation::of(HostTensor::float(vec![0.1; context * width], [1, context, width]));
    let buffer = |i: usize| {
        let mut values = vec![0.0f32; chain.buffers()[i].elements];
        chain.source().fill(chain, i, 0, &mut values).expect("values");
        bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&values))
    };
    let mut group = c.benchmark_group(format!("{name}, 512 tokens"));
    group.sample_size(10);
    for (name, layer) in [("block", 1), ("head with its loss", chain.len() - 1)] {
        let buffers: Vec<bytes::Bytes> = (0..chain.buffers().len()).map(buffer).collect();
        let promote =
            |track| promote_layers(chain, layer..layer + 1, &|i| buffers[i].clone().into(), &device, track);
        let pass = || Pass::train(Pass::key_of(0, 0, 0), ids.to_device(&autodiff));
        group.bench_function(format!("{name}, forward"), |b| {
            b.iter(|| forward_range(&promote(false), layer, x.to_device(&autodiff), &pass()));
        });
        group.bench_function(format!("{name}, recomputed forward and backward"), |b| {
            b.iter(|| {
                let from = match layer + 1 == chain.len() {
                    true => BackwardFrom::Loss { weight: 1.0 },
                    false => BackwardFrom::Gradient(vec![Some(x.parts[0].to_device(&device))]),
                };
                backward_range(promote(true), layer, x.to_device(&autodiff), from, &pass(), true)
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    layers(&mut criterion, "gpt2", &gpt2(), 768);
    layers(&mut criterion, "smollm2-135m", &smollm2(), 576);
    criterion.final_summary();
}
