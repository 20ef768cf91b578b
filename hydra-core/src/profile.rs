//! The time of a training step by part, in seconds, summed over the whole process.
//!
//! Off unless [`start`] is called; then it costs a few atomic additions per operation. Parts do not nest:
//! time is charged to the outermost part, so a matrix product within the head counts as head.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Matrix products of affine maps, forward and backward.
    Matmul,
    /// Attention.
    Attention,
    /// Layer normalization.
    Norm,
    /// Activation functions.
    Activation,
    /// Embedding lookups and their gradient.
    Embedding,
    /// The output head and its loss.
    Head,
    /// The optimizer step on the host.
    Optimizer,
    /// Copies between host and device.
    Transfer,
}

impl Part {
    /// Every part.
    pub const ALL: [Self; 8] = {
        use Part::{Activation, Attention, Embedding, Head, Matmul, Norm, Optimizer, Transfer};
        [Matmul, Attention, Norm, Activation, Embedding, Head, Optimizer, Transfer]
    };

    /// The part's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Matmul => "matmul",
            Self::Attention => "attention",
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Embedding => "embedding",
            Self::Head => "head_and_loss",
            Self::Optimizer => "optimizer",
            Self::Transfer => "transfer",
        }
    }
}

static ON: AtomicBool = AtomicBool::new(false);
static NANOSECONDS: [AtomicU64; Part::ALL.len()] = [const { AtomicU64::new(0) }; Part::ALL.len()];

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Ends a measurement when it is dropped, also by a panic.
struct Measuring {
    part: Part,
    since: Instant,
}

impl Drop for Measuring {
    fn drop(&mut self) {
        let spent = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        NANOSECONDS[self.part as usize].fetch_add(spent, Relaxed);
        INSIDE.set(false);
    }
}

/// Starts measuring. Measuring does not change any result.
pub fn start() {
    ON.store(true, Relaxed);
}

/// Runs `f` and, while measuring, charges the time to `part` unless this thread is already within a part.
pub fn time<R>(part: Part, f: impl FnOnce() -> R) -> R {
    if !ON.load(Relaxed) || INSIDE.replace(true) {
        return f();
    }
    let _measuring = Measuring { part, since: Instant::now() };
    f()
}

/// Returns the seconds of each part since the last call, in the order of [`Part::ALL`].
pub fn take() -> [(Part, f64); Part::ALL.len()] {
    Part::ALL.map(|part| (part, NANOSECONDS[part as usize].swap(0, Relaxed) as f64 * 1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spin() {
        let since = Instant::now();
        while since.elapsed().as_micros() < 200 {}
    }

    #[test]
    fn the_outer_part_is_charged_and_a_panic_ends_it() {
        start();
        time(Part::Head, || time(Part::Matmul, spin));
        let panicked = std::panic::catch_unwind(|| time(Part::Norm, || panic!("on purpose")));
        assert!(panicked.is_err());
        time(Part::Attention, spin);
        let taken = take();
        let seconds = |part| taken.iter().find(|(of, _)| *of == part).unwrap().1;
        assert_eq!(seconds(Part::Matmul), 0.0);
        assert!(seconds(Part::Head) >= 2e-4 && seconds(Part::Attention) >= 2e-4 && seconds(Part::Norm) > 0.0);
        assert_eq!(take().map(|(_, s)| s), [0.0; Part::ALL.len()]);
    }
}
