//! The head's logits are never whole in memory; measured with a counting allocator.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use hydra_core::{Activation, DeviceId, Key, MemoryProbe, Pass};
use hydra_models::ops::head_loss;
use hydra_spill::alloc::{AllocatorProbe, CountingAllocator, tag_thread};
use rayon::{ThreadPool, ThreadPoolBuilder};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

/// A pool of threads tagged with a device.
fn threads_of(device: DeviceId, threads: usize) -> ThreadPool {
    let pool = ThreadPoolBuilder::new().num_threads(threads);
    pool.start_handler(move |_| tag_thread(Some(device))).build().expect("threads")
}

/// The peak bytes on a device while `f` ran on its threads, relative to those before.
fn peak_of<T: Send>(device: DeviceId, pool: &ThreadPool, f: impl FnOnce() -> T + Send) -> (T, u64) {
    AllocatorProbe.reset_peak(device);
    let before = AllocatorProbe.in_use(device);
    let out = pool.install(f);
    (out, AllocatorProbe.peak(device) - before)
}

fn pass() -> Pass {
    Pass::train(Key::new(0), Activation::default())
}

#[test]
fn logits_are_never_whole() {
    assert_logits_are_never_whole(FloatDType::F32);
    assert_logits_are_never_whole(FloatDType::BF16);
}

fn assert_logits_are_never_whole(dtype: FloatDType) {
    // Large enough that the scratch memory of matrix products is small in comparison, even if it fills a processor
    // cache.
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
    let run = || head_loss(hidden.clone(), table.clone(), targets.clone(), chunk_rows, &pass()).backward();
    drop(run());
    let (gradients, peak) = peak_of(DeviceId(0), &threads_of(DeviceId(0), 2), run);
    assert!(hidden.grad(&gradients).is_some());
    let whole = (positions * vocabulary * size_of::<f32>()) as u64;
    assert!(peak < whole / 4, "{peak} bytes; all logits would take {whole}");
}

/// A batch takes no more memory than one with all positions computed, regardless of the number of targets.
#[test]
fn no_batch_takes_more_than_one_in_full() {
    let (width, chunk_rows, pool) = (80, 256, threads_of(DeviceId(1), 1));
    let device = Device::flex().autodiff();
    // Several chunks, one, less than one; large tables, and one whose rows are hardly longer than the vectors.
    for (positions, vocabulary) in [(900, 20_000), (256, 20_000), (100, 20_000), (700, 200)] {
        for trained in [true, false] {
            let floats = |rows: usize| {
                let values: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32 * 0.01).collect();
                Tensor::<2>::from_data(TensorData::new(values, [rows, width]), &device)
            };
            let (hidden, table) = (floats(positions).require_grad(), floats(vocabulary));
            let table = if trained { table.require_grad() } else { table };
            let peak = |every: usize, pass: Pass| {
                let ids =
                    (0..positions).map(|i| if i * 13 % 60 < every { 7 } else { -1 }).collect::<Vec<i32>>();
                let ids = Tensor::from_data(TensorData::new(ids, [positions]), (&device, DType::I32));
                let run =
                    || head_loss(hidden.clone(), table.clone(), ids.clone(), chunk_rows, &pass).backward();
                // One thread, which keeps the scratch memory of products: several threads would share the work
                // differently each time.
                drop(pool.install(run));
                peak_of(DeviceId(1), &pool, run).1
            };
            let full = peak(1, pass().worst_case());
            for every in [1, 2, 7, 15, 29, 42, 55, 57, 58, 59, 60] {
                let found = peak(every, pass());
                // Threads share their work differently from run to run, so a few bytes of bookkeeping vary.
                assert!(
                    found <= full + 4096,
                    "{every} of 60 of {positions} to {vocabulary}: {found} of {full}"
                );
            }
        }
    }
}
