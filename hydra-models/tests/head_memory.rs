//! The head's logits are never whole in memory: measured by an allocator that counts.

use burn::tensor::{DType, Device, Tensor, TensorData};
use hydra_models::ops::head_loss;

mod alloc {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// The system's allocator, with counters.
    pub struct Counting;

    static IN_USE: AtomicUsize = AtomicUsize::new(0);
    static PEAK: AtomicUsize = AtomicUsize::new(0);

    // SAFETY: every call goes to the system's allocator with the same arguments.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            let now = IN_USE.fetch_add(layout.size(), Relaxed) + layout.size();
            PEAK.fetch_max(now, Relaxed);
            // SAFETY: the caller keeps `alloc`'s contract.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
            IN_USE.fetch_sub(layout.size(), Relaxed);
            // SAFETY: the caller keeps `dealloc`'s contract.
            unsafe { System.dealloc(ptr, layout) }
        }
    }

    /// The most bytes in use at once while `f` ran, beside those in use before.
    pub fn peak_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
        let before = IN_USE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let out = f();
        (out, PEAK.load(Relaxed) - before)
    }
}

#[global_allocator]
static ALLOCATOR: alloc::Counting = alloc::Counting;

// The only test of this program: another one's memory would be counted too.
#[test]
fn logits_are_never_whole() {
    let (positions, width, vocabulary, chunk_rows) = (512, 8, 10_000, 16);
    let device = Device::flex().autodiff();
    let floats = |rows: usize| -> Tensor<2> {
        let values: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32 * 0.01).collect();
        Tensor::from_data(TensorData::new(values, [rows, width]), &device).require_grad()
    };
    let (hidden, table) = (floats(positions), floats(vocabulary));
    let ids: Vec<i32> = (0..positions as i32).collect();
    let targets = Tensor::from_data(TensorData::new(ids, [positions]), (&device, DType::I32));
    let run = || head_loss(hidden.clone(), table.clone(), targets.clone(), chunk_rows).backward();
    drop(run());
    let (gradients, peak) = alloc::peak_of(run);
    assert!(hidden.grad(&gradients).is_some());
    let whole = positions * vocabulary * size_of::<f32>();
    assert!(peak < whole / 4, "{peak} bytes; all logits would take {whole}");
}
