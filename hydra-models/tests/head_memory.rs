//! The head's logits are never whole in memory: measured by an allocator that counts.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use hydra_core::{DeviceId, MemoryProbe};
use hydra_models::ops::head_loss;
use hydra_spill::alloc::{AllocatorProbe, CountingAllocator, tag_thread};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

const DEVICE: DeviceId = DeviceId(0);

/// The most bytes in use at once while `f` ran on threads of its own, beside those in use before.
fn peak_of<T: Send>(f: impl FnOnce() -> T + Send) -> (T, u64) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).start_handler(|_| tag_thread(Some(DEVICE)));
    let pool = pool.build().expect("threads");
    AllocatorProbe.reset_peak(DEVICE);
    let before = AllocatorProbe.in_use(DEVICE);
    let out = pool.install(f);
    (out, AllocatorProbe.peak(DEVICE) - before)
}

#[test]
fn logits_are_never_whole() {
    assert_logits_are_never_whole(FloatDType::F32);
    assert_logits_are_never_whole(FloatDType::BF16);
}

fn assert_logits_are_never_whole(dtype: FloatDType) {
    // Beside so many, the scratch memory of matrix products is little, whatever cache of the processor it is as large as.
    let (positions, width, vocabulary, chunk_rows) = (4096, 8, 10_000, 16);
    let device = Device::flex().autodiff();
    let floats = |rows: usize| -> Tensor<2> {
        let values: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32 * 0.01).collect();
        let floats = Tensor::<2>::from_data(TensorData::new(values, [rows, width]), &device);
        floats.cast(dtype).detach().require_grad()
    };
    let (hidden, table) = (floats(positions), floats(vocabulary));
    let ids: Vec<i32> = (0..positions as i32).collect();
    let targets = Tensor::from_data(TensorData::new(ids, [positions]), (&device, DType::I32));
    let run = || head_loss(hidden.clone(), table.clone(), targets.clone(), chunk_rows).backward();
    drop(run());
    let (gradients, peak) = peak_of(run);
    assert!(hidden.grad(&gradients).is_some());
    let whole = (positions * vocabulary * size_of::<f32>()) as u64;
    assert!(peak < whole / 4, "{peak} bytes; all logits would take {whole}");
}
