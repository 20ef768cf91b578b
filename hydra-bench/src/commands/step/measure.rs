//! Measurements of training steps: times, page faults and allocations.

use anyhow::{Context, Result};
use burn::tensor::{Device, Tensor};
use hydra_core::DeviceId;
use hydra_core::profile::{self, Part};
use hydra_engine::{Observer, RunEvent, Track};
use hydra_models::ops::linear_transposed;
use hydra_run::machine::procfs;
use hydra_spill::alloc::{self, MAX_DEVICES};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The side of the square matrices whose product is timed, and the number of products.
const SIDE: usize = 2048;
const PRODUCTS: usize = 6;

/// The readings at the end of a minibatch.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at_s: f64,
    page_faults: u64,
    allocations: u64,
    compute_s: f64,
    /// Seconds since the previous sample, in the order of [`profile::Part::ALL`].
    parts: [f64; profile::Part::ALL.len()],
}

impl Sample {
    fn take(at_s: f64, compute_s: f64) -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            at_s,
            page_faults: minor_faults(&stat).unwrap_or(0),
            allocations: (0..MAX_DEVICES).map(|device| alloc::allocations(DeviceId(device))).sum(),
            compute_s,
            parts: profile::take().map(|(_, seconds)| seconds),
        }
    }
}

#[derive(Debug, Default)]
struct Samples {
    /// Before the first minibatch.
    start: Option<Sample>,
    minibatches: Vec<Sample>,
    compute_s: f64,
}

/// Takes a sample at the end of every minibatch. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Meter(Arc<Mutex<Samples>>);

impl Meter {
    fn samples(&self) -> MutexGuard<'_, Samples> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The costs of the minibatches after the first `warmup`, and on a CPU device the rate of large matrix products.
    pub(super) fn measured(&self, warmup: usize, threads: Option<usize>) -> Result<StepCosts> {
        let peak_rss_bytes = procfs::of_this_process("VmHWM").unwrap_or_default().bytes();
        let samples = self.samples();
        let all: Vec<Sample> = samples.start.iter().chain(&samples.minibatches).copied().collect();
        let measured = all.get(warmup..).filter(|samples| samples.len() > 1);
        let measured = measured.context("the run ended before a minibatch was measured")?;
        let measured = StepCosts::of(measured, threads.is_some());
        let matmul_peak_gflops = threads.map(matmul_peak).transpose()?;
        Ok(StepCosts { peak_rss_bytes, matmul_peak_gflops, ..measured })
    }
}

impl Observer for Meter {
    fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Admitted(_) => {
                profile::start();
                profile::take();
                self.samples().start = Some(Sample::take(0.0, 0.0));
            }
            // The first minibatch starts with the first shard task.
            RunEvent::Span(span) if matches!(span.track, Track::Compute(_)) => {
                let mut samples = self.samples();
                samples.compute_s += span.end_s - span.start_s;
                if samples.minibatches.is_empty()
                    && let Some(start) = &mut samples.start
                    && start.at_s == 0.0
                {
                    start.at_s = span.start_s;
                }
            }
            RunEvent::Minibatch { at_s, .. } => {
                let mut samples = self.samples();
                let sample = Sample::take(*at_s, samples.compute_s);
                samples.minibatches.push(sample);
            }
            _ => {}
        }
    }
}

/// The costs of steps; single numbers are averages.
#[derive(Debug, Default)]
pub(super) struct StepCosts {
    /// Seconds from the end of one minibatch to the end of the next, with the optimizer step of the earlier one.
    pub(super) step_s: Vec<f64>,
    /// Seconds by name. On a CPU device `other` is the rest of the step, at least zero: parts on concurrent threads may add up to
    /// more than the step. On a GPU all compute is one part.
    pub(super) parts: Vec<(&'static str, f64)>,
    pub(super) page_faults: f64,
    /// Allocations for CPU devices.
    pub(super) allocations: Option<f64>,
    /// The peak of the process, without the timed matrix products.
    pub(super) peak_rss_bytes: u64,
    pub(super) matmul_peak_gflops: Option<f64>,
}

impl StepCosts {
    /// Of two or more samples, of a CPU device or a GPU.
    fn of(samples: &[Sample], cpu: bool) -> Self {
        let (first, last) = (&samples[0], &samples[samples.len() - 1]);
        let steps = (samples.len() - 1) as f64;
        let step_s: Vec<f64> = samples.windows(2).map(|pair| pair[1].at_s - pair[0].at_s).collect();
        let seconds = |part: usize| samples[1..].iter().map(|sample| sample.parts[part]).sum::<f64>() / steps;
        let all = profile::Part::ALL.iter().enumerate();
        let host = |part: &Part| matches!(part, Part::Optimizer | Part::Transfer);
        let shown = all.filter(|(_, part)| cpu || host(part));
        let mut parts: Vec<(&'static str, f64)> = shown.map(|(i, part)| (part.name(), seconds(i))).collect();
        if cpu {
            let known = parts.iter().map(|(_, seconds)| seconds).sum::<f64>();
            parts.push(("other", ((last.at_s - first.at_s) / steps - known).max(0.0)));
        } else {
            parts.insert(0, ("compute", (last.compute_s - first.compute_s) / steps));
        }
        let each = |from: u64, to: u64| to.saturating_sub(from) as f64 / steps;
        Self {
            step_s,
            parts,
            page_faults: each(first.page_faults, last.page_faults),
            allocations: cpu.then(|| each(first.allocations, last.allocations)),
            ..Self::default()
        }
    }

    pub(super) fn best_s(&self) -> f64 {
        self.step_s.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The median of the steps.
    pub(super) fn median_s(&self) -> f64 {
        let mut sorted = self.step_s.clone();
        sorted.sort_by(f64::total_cmp);
        let (below, above) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        (below + above) / 2.0
    }
}

/// The best rate of several products of large square matrices on `threads` threads, in GFLOP/s.
fn matmul_peak(threads: usize) -> Result<f64> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.context("the threads for matrix products could not be started")?;
    let flops = 2.0 * (SIDE as f64).powi(3);
    let seconds = pool.install(|| {
        let device = Device::flex();
        let (a, b) = (Tensor::<3>::ones([1, SIDE, SIDE], &device), Tensor::<2>::ones([SIDE, SIDE], &device));
        let product = |_| {
            let since = Instant::now();
            // Reading the value forces the product.
            std::hint::black_box(linear_transposed(a.clone(), b.clone(), None).into_data());
            since.elapsed().as_secs_f64()
        };
        (0..PRODUCTS).map(product).fold(f64::INFINITY, f64::min)
    });
    Ok(flops / seconds * 1e-9)
}

/// The minor faults in `/proc/self/stat`: the tenth field. The second field, the program's name in parentheses, may have blanks.
fn minor_faults(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_faults_are_read() {
        let stat = "77 (a (strange) name) S 1 2 3 4 5 6 4242 0 7 0 1 2";
        assert_eq!(minor_faults(stat), Some(4242));
        assert_eq!(minor_faults("77"), None);
    }

    #[test]
    fn steps_are_differences_and_other_is_what_is_left() {
        let sample = |at_s, page_faults, seconds| Sample {
            at_s,
            page_faults,
            allocations: page_faults * 2,
            compute_s: at_s * 0.75,
            parts: [seconds; profile::Part::ALL.len()],
        };
        let samples = [sample(1.0, 10, 9.0), sample(3.0, 14, 0.125), sample(4.0, 20, 0.0625)];
        let measured = StepCosts::of(&samples, true);
        assert_eq!(measured.step_s, [2.0, 1.0]);
        assert_eq!((measured.best_s(), measured.median_s()), (1.0, 1.5));
        assert_eq!((measured.page_faults, measured.allocations), (5.0, Some(10.0)));
        assert_eq!(measured.parts[0], ("matmul", 0.09375));
        assert_eq!(measured.parts.last(), Some(&("other", 0.75)));
        let gpu = StepCosts::of(&samples, false);
        assert_eq!(gpu.parts, [("compute", 1.125), ("optimizer", 0.09375), ("transfer", 0.09375)]);
        assert_eq!((gpu.step_s, gpu.allocations), (measured.step_s, None));
        let busy = StepCosts::of(&[sample(1.0, 0, 0.0), sample(2.0, 0, 1.0)], true);
        assert_eq!(busy.parts.last(), Some(&("other", 0.0)), "overlapped parts leave nothing");
    }
}
