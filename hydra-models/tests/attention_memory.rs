//! Attention's weights are never whole in memory and none are kept; measured with a counting allocator.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use hydra_core::{Activation, DeviceId, MemoryProbe, Pass};
use hydra_models::ops::{
    Attention, GroupedAttention, Rotary, RotaryScaling, causal_attention, grouped_attention,
};
use hydra_spill::alloc::{AllocatorProbe, CountingAllocator, tag_thread};
use rayon::{ThreadPool, ThreadPoolBuilder};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

const DEVICE: DeviceId = DeviceId(0);

/// The peak bytes while `f` ran on a thread of `pool`, and the bytes after it, both relative to those before.
fn bytes_of<T: Send>(pool: &ThreadPool, f: impl FnOnce() -> T + Send) -> (T, u64, u64) {
    AllocatorProbe.reset_peak(DEVICE);
    let before = AllocatorProbe.in_use(DEVICE);
    let out = pool.install(f);
    (out, AllocatorProbe.peak(DEVICE) - before, AllocatorProbe.in_use(DEVICE).saturating_sub(before))
}

const TOKENS: usize = 512;
const HEADS: usize = 16;
const HEAD_WIDTH: usize = 4;

/// A leaf `[1, TOKENS, width]`.
fn leaf(width: usize, dtype: FloatDType) -> Tensor<3> {
    let values: Vec<f32> = (0..TOKENS * width).map(|i| (i % 17) as f32 * 0.01).collect();
    let data = TensorData::new(values, [1, TOKENS, width]);
    Tensor::<3>::from_data(data, &Device::flex().autodiff()).cast(dtype).detach().require_grad()
}

fn assert_never_whole(leaf: &Tensor<3>, dtype: FloatDType, attend: &(dyn Fn() -> Tensor<3> + Sync)) {
    let square = (TOKENS * TOKENS * size_of::<f32>()) as u64;
    // One thread, so that the per-thread memory of matrix products is allocated before the measurement.
    let pool = ThreadPoolBuilder::new().num_threads(1).start_handler(|_| tag_thread(Some(DEVICE)));
    let pool = pool.build().expect("a thread");
    let forward = || attend().sum();
    pool.install(|| drop(forward().backward()));
    let (out, forward_peak, kept) = bytes_of(&pool, forward);
    let (gradients, backward_peak, _) = bytes_of(&pool, || out.backward());
    assert!(leaf.grad(&gradients).is_some());
    // The output and two numbers per head and row stay; the weights of one head alone would be more.
    assert!((1..square / 4).contains(&kept), "{kept} bytes are kept");
    let peak = forward_peak.max(backward_peak);
    // With bf16, widened copies of the inputs are added.
    let few = if dtype == FloatDType::F32 { 1 } else { 2 };
    assert!(peak < few * square, "{peak} bytes; the weights of one of {HEADS} heads would take {square}");
}

/// A single test, because the measurement covers the process.
#[test]
fn weights_are_never_whole() {
    let pass = Pass::train(Pass::key_of(0, 0, 0), Activation::default());
    for (dropout, dtype) in [(0.0, FloatDType::F32), (0.1, FloatDType::F32), (0.1, FloatDType::BF16)] {
        let qkv = leaf(3 * HEADS * HEAD_WIDTH, dtype);
        let options = Attention { heads: HEADS, scale: 0.5, dropout, site: 0 };
        assert_never_whole(&qkv, dtype, &|| causal_attention(qkv.clone(), options, &pass));

        let options = GroupedAttention {
            heads: HEADS,
            key_heads: HEADS / 4,
            scale: 0.5,
            causal: true,
            window: None,
            rotary: Some(Rotary::new(HEAD_WIDTH, 1e4, RotaryScaling::Default)),
            dropout,
            site: 0,
        };
        let queries = leaf(HEADS * HEAD_WIDTH, dtype);
        let [keys, values] = [(); 2].map(|()| leaf(HEADS / 4 * HEAD_WIDTH, dtype));
        let attend = || grouped_attention(queries.clone(), keys.clone(), values.clone(), &options, &pass);
        assert_never_whole(&queries, dtype, &attend);
    }
}
