//! Checks of the device's memory: recovery from a failed allocation, and growth of reserved memory.

use super::found::{Finding, Verdict, guarded};
use super::subject::{Subject, computes};
use super::training::{SmallModel, each_model};
use anyhow::{Context, Result};
use burn::tensor::{Device, Tensor};
use hydra_core::{AnyTensor, ByteSize, DeviceError, DeviceTensor, finish};
use hydra_engine::{Observer, OpenDevice, RunEvent, Track, Work};
use hydra_run::machine::procfs;
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// An upper bound of the memory of any GPU.
const BEYOND_ALL_CARDS: u64 = 4 << 40;

/// Allocates until the device refuses, and then checks that it still computes.
pub(super) fn out_of_memory(subject: &Subject) -> Result<Finding> {
    if subject.is_cpu() {
        return Ok(Finding::not_applicable(
            "a CPU device uses host memory, which the check does not exhaust",
        ));
    }
    if !subject.oom {
        return Ok(Finding::not_applicable("only with --oom, because it allocates all memory of the device"));
    }
    let device = subject.open()?;
    let (chunk, bound) = match subject.is_cuda() {
        // CubeCL refuses allocations above a share of the GPU's memory, however much is free; small GPUs count too.
        true => (256 << 20, BEYOND_ALL_CARDS),
        // A software device would exhaust host memory, and be killed by the system.
        false => (64 << 20, subject.device.memory.bytes()),
    };
    let (held, end) = allocate_until_refused(&device.burn, chunk, bound);
    device.probe.reset_peak(device.measured_as());
    let reserved = device.probe.peak(device.measured_as());
    let after = guarded(|| computes(&device.burn));
    let rows = vec![json!({
        "allocated_bytes": held, "bound_bytes": bound, "refusal": end.words(),
        "reserved_after_bytes": reserved,
        "computes_after": after.as_ref().err().map_or("yes".to_owned(), |error| format!("{error:#}")),
    })];
    Ok(judge_refusal(ByteSize(held), end, after, rows))
}

/// The reason why allocation ended.
enum AllocationEnd {
    /// All requested memory was allocated.
    Bound,
    /// The device returned an error.
    Refused(DeviceError),
    Panicked(anyhow::Error),
}

impl AllocationEnd {
    fn words(&self) -> Option<String> {
        match self {
            Self::Bound => None,
            Self::Refused(error) => Some(error.to_string()),
            Self::Panicked(error) => Some(format!("{error:#}")),
        }
    }
}

fn judge_refusal(held: ByteSize, end: AllocationEnd, after: Result<()>, rows: Vec<Value>) -> Finding {
    let figure = format!("{held} allocated");
    let (verdict, says) = match (end, after) {
        (_, Err(error)) => (Verdict::Fails, format!("the device does not compute afterwards: {error:#}")),
        (AllocationEnd::Bound, Ok(())) => {
            (Verdict::NotApplicable, format!("the device allocated all {held} that were requested"))
        }
        (AllocationEnd::Panicked(error), Ok(())) => {
            (Verdict::Fails, format!("the refusal is not an error value: {error:#}"))
        }
        (AllocationEnd::Refused(error), Ok(())) if held.bytes() == 0 => {
            (Verdict::Fails, format!("the device refused the first allocation: {error}"))
        }
        (AllocationEnd::Refused(error @ DeviceError::OutOfMemory { .. }), Ok(())) => {
            (Verdict::Pass, format!("refused with an error, and the device still computes: {error}"))
        }
        (AllocationEnd::Refused(error), Ok(())) => {
            (Verdict::Fails, format!("not reported as out of memory: {error}"))
        }
    };
    Finding::new(verdict, figure, says, rows)
}

/// Returns the bytes allocated, and why allocation ended.
fn allocate_until_refused(device: &Device, chunk: u64, bound: u64) -> (u64, AllocationEnd) {
    let mut held: Vec<DeviceTensor> = Vec::new();
    loop {
        let bytes = held.iter().map(DeviceTensor::len_bytes).sum::<u64>();
        if bytes + chunk > bound {
            return (bytes, AllocationEnd::Bound);
        }
        match guarded(|| Ok(allocate(device, chunk))) {
            Ok(Ok(tensor)) => held.push(tensor),
            Ok(Err(error)) => return (bytes, AllocationEnd::Refused(error)),
            Err(error) => return (bytes, AllocationEnd::Panicked(error)),
        }
    }
}

fn allocate(device: &Device, bytes: u64) -> Result<DeviceTensor, DeviceError> {
    let zeros = Tensor::<1>::zeros([bytes as usize / size_of::<f32>()], device);
    let tensor = AnyTensor::from(zeros).into_device_tensor();
    finish(device, &[&tensor])?;
    Ok(tensor)
}

/// Trains with spilling, and records the reserved memory after every minibatch.
pub(super) fn plateau(subject: &Subject) -> Result<Finding> {
    let mut rows = Vec::new();
    let (mut grown, mut most) = (Vec::new(), 0);
    let problems = each_model(subject, &mut rows, |model| {
        let watched = watched(subject, model)?;
        most = most.max(watched.most(2..4));
        grown.extend(watched.grown().then_some(model.name));
        let ReservedMemory { reserved, swaps } = watched;
        Ok(json!({
            "model": model.name, "swaps": swaps, "minibatches": reserved.len(), "reserved_bytes": reserved,
        }))
    })?;
    let swaps: u64 = rows.iter().filter_map(|row| row["swaps"].as_u64()).sum();
    let figure = format!("{} after {swaps} swaps", ByteSize(most));
    let (problems, growing) = (problems.join("; "), grown.join(", "));
    let (verdict, says) = if !problems.is_empty() {
        (Verdict::Fails, format!("some models failed to train: {problems}"))
    } else if subject.is_cpu() {
        (
            Verdict::NotApplicable,
            "a CPU device has no memory pools; the figure is the memory of the process".into(),
        )
    } else if growing.is_empty() {
        (Verdict::Pass, "reserved memory did not keep growing in the second half of each run".into())
    } else {
        (Verdict::Fails, format!("reserved memory still grows in the second half: {growing}"))
    };
    Ok(Finding::new(verdict, figure, says, rows))
}

/// Bytes reserved after each minibatch, and the number of promotions.
#[derive(Clone, Debug, Default)]
struct ReservedMemory {
    reserved: Vec<u64>,
    swaps: u64,
}

impl ReservedMemory {
    /// Returns the maximum within a range of quarters of the run.
    fn most(&self, quarters: Range<usize>) -> u64 {
        let at = |quarter: usize| quarter * self.reserved.len() / 4;
        self.reserved[at(quarters.start)..at(quarters.end)].iter().copied().max().unwrap_or(0)
    }

    /// Returns true if each of the last two quarters reserves more than all before it, or one of them twice as much as the
    /// first half. Memory is freed some time after its last use, so a single increase is not significant.
    fn grown(&self) -> bool {
        let (first, third, last) = (self.most(0..2), self.most(2..3), self.most(3..4));
        (third > first && last > third) || third.max(last) >= (2 * first).max(1)
    }
}

struct MemoryWatcher {
    device: OpenDevice,
    cpu: bool,
    seen: Arc<Mutex<ReservedMemory>>,
}

impl Observer for MemoryWatcher {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            RunEvent::Span(span) if matches!(span.track, Track::Copy(_)) && span.work == Work::Promote => {
                seen.swaps += 1;
            }
            RunEvent::Minibatch { .. } => seen.reserved.push(match self.cpu {
                true => procfs::of_this_process("VmRSS").unwrap_or_default().bytes(),
                false => self.device.probe.peak(self.device.measured_as()),
            }),
            _ => {}
        }
    }
}

fn watched(subject: &Subject, model: &SmallModel) -> Result<ReservedMemory> {
    // A shard is promoted for the forward and for the backward pass; the last one once for both.
    let swaps = 2 * model.cuts.len() + 1;
    let steps = subject.pick(500usize, 40).div_ceil(swaps).max(4);
    let seen = Arc::new(Mutex::new(ReservedMemory::default()));
    let watch = MemoryWatcher { device: subject.open()?, cpu: subject.is_cpu(), seen: seen.clone() };
    let run = subject.orchestrator(subject.device.memory)?.observer(Box::new(watch));
    model.train(run, model.spec(steps))?;
    let watched = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (watched.reserved.len() == steps).then_some(watched).context("a minibatch was not seen")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_what_the_second_half_has_more() {
        let of = |reserved: &[u64]| ReservedMemory { reserved: reserved.to_vec(), swaps: 1 };
        assert!(!of(&[1, 5, 5, 4]).grown() && !of(&[0; 4]).grown());
        assert!(!of(&[1, 5, 5, 6]).grown() && !of(&[1, 5, 6, 6]).grown(), "a page more, once");
        assert!(of(&[1, 5, 5, 10]).grown() && of(&[1, 5, 50, 5]).grown(), "once, and far more than a page");
        assert!(of(&[1, 5, 6, 7]).grown() && of(&[1, 2, 3, 4, 5, 6, 7, 8]).grown());
        assert_eq!(of(&[4, 5, 6, 3]).most(2..4), 6);
        assert!(procfs::of_this_process("VmRSS").unwrap().bytes() > 1 << 20);
    }

    #[test]
    fn a_refusal_passes_only_as_an_error_that_the_device_survives() {
        let verdict = |end, after: Result<()>| judge_refusal(ByteSize(1), end, after, Vec::new()).verdict;
        let refused = || AllocationEnd::Refused(DeviceError::OutOfMemory { bytes: 1 });
        assert_eq!(verdict(refused(), Ok(())), Verdict::Pass);
        assert_eq!(verdict(AllocationEnd::Refused(DeviceError::new("no room")), Ok(())), Verdict::Fails);
        assert_eq!(verdict(AllocationEnd::Panicked(anyhow::anyhow!("no room")), Ok(())), Verdict::Fails);
        assert_eq!(verdict(AllocationEnd::Bound, Ok(())), Verdict::NotApplicable);
        assert_eq!(verdict(refused(), Err(anyhow::anyhow!("dead"))), Verdict::Fails);
    }

    #[test]
    fn allocation_ends_at_the_bound() {
        let device = Device::flex();
        let (held, end) = allocate_until_refused(&device, 1 << 20, 5 << 19);
        assert_eq!((held, end.words()), (2 << 20, None));
        computes(&device).unwrap();
    }
}
