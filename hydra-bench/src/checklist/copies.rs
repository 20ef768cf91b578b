//! Checks of the device's link: bandwidth, overlap of copies with computation, and integrity of the data.

use super::found::{Finding, Verdict, best_of, timed};
use super::subject::{Subject, bytes_of, floats_of, locks_pages, pattern, sync, values};
use anyhow::{Context, Result, bail};
use burn::tensor::{Device, Tensor};
use bytes::Bytes;
use hydra_core::{ByteSize, DeviceBytes, panic_message};
use hydra_engine::OpenDevice;
use hydra_spill::DeviceLink;
use serde_json::{Value, json};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

const MIB: usize = 1 << 20;
/// The minimum share of its bandwidth that each direction must keep while both are busy.
const BOTH: f64 = 0.8;
/// The maximum time of overlapped computation and copies, relative to the longer of both alone.
const OVERLAP: f64 = 1.15;
/// The minimum time of both in sequence, relative to the longer one; below it the overlap cannot be judged.
const APART: f64 = 1.5;
/// The maximum number of repetitions.
const MOST: usize = 100_000;

/// Host memory: the source and destination of copies.
struct HostBuffers {
    locked: bool,
    from: Bytes,
    into: Vec<f32>,
}

/// Bytes per second in each direction, alone and with the other direction busy.
struct Rates {
    up: f64,
    down: f64,
    up_concurrent: f64,
    down_concurrent: f64,
}

/// Measures copies of several sizes with page-locked and pageable memory.
pub(super) fn bandwidth(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let sizes = subject.pick(&[1, 16, 256][..], &[1, 4]);
    device.link.prepare((sizes[sizes.len() - 1] * MIB) as u64)?;
    let locks = locks_pages(&device, MIB);
    let (mut rows, mut largest) = (Vec::new(), None);
    for &mib in sizes {
        for locked in [true, false] {
            // Source, destination and one copy in flight are page-locked at the same time.
            let fits = subject.page_locked.bytes() >= (3 * mib * MIB) as u64;
            if locked && !(locks && fits) {
                continue;
            }
            let rates = rates(subject, device.link.as_ref(), mib * MIB, locked)?;
            rows.push(row(mib, locked, &rates));
            largest = if locked || !locks { Some((mib, rates)) } else { largest };
        }
    }
    let (mib, rates) = largest.context("no size was measured")?;
    Ok(judge(subject.is_cuda(), locks, (mib, &rates), rows))
}

fn row(mib: usize, locked: bool, rates: &Rates) -> Value {
    json!({
        "mib": mib, "page_locked": locked, "up_gb_per_s": rates.up * 1e-9,
        "down_gb_per_s": rates.down * 1e-9, "up_beside_down_gb_per_s": rates.up_concurrent * 1e-9,
        "down_beside_up_gb_per_s": rates.down_concurrent * 1e-9,
    })
}

fn judge(must: bool, locks: bool, (mib, rates): (usize, &Rates), rows: Vec<Value>) -> Finding {
    let gb = |rate: f64| rate * 1e-9;
    let [up, down] = [rates.up, rates.down].map(gb);
    let [up_concurrent, down_concurrent] = [rates.up_concurrent, rates.down_concurrent].map(gb);
    let figure = format!(
        "{up:.1} GB/s to the device, {down:.1} to the host, {up_concurrent:.1} and {down_concurrent:.1} concurrently"
    );
    if !must {
        let why = "only NVIDIA GPUs have page-locked memory and a copy engine for each direction; the figures are for \
        pageable memory";
        return Finding::new(Verdict::NotApplicable, figure, why, rows);
    }
    let part = (rates.up_concurrent / rates.up).min(rates.down_concurrent / rates.down);
    let passes = locks && part >= BOTH;
    let (part, asked) = (100.0 * part, 100.0 * BOTH);
    let says = match locks {
        false => "not enough memory could be page-locked: check `ulimit -l` and --pinned-memory".to_owned(),
        true => format!(
            "with {mib} MiB of page-locked memory, each direction keeps at least {part:.0} % of its bandwidth while both \
            are busy; {asked:.0} % is required"
        ),
    };
    Finding::new(Verdict::of(passes), figure, says, rows)
}

/// Measures copies of `bytes` bytes.
fn rates(subject: &Subject, link: &dyn DeviceLink, bytes: usize, locked: bool) -> Result<Rates> {
    let repetitions = subject.pick(8, 2);
    let uploaded = link.upload(&bytes_of(pattern(0, bytes / 4)))?;
    let mut ends = ends(link, &uploaded, locked)?;
    let up = best_of(repetitions, || upload(link, &ends.from))?;
    let down = best_of(repetitions, || download(link, &uploaded, &mut ends))?;
    let (up_concurrent, down_concurrent) = both(link, &uploaded, &mut ends, repetitions.max(4))?;
    let rate = |seconds: f64| bytes as f64 / seconds;
    Ok(Rates {
        up: rate(up),
        down: rate(down),
        up_concurrent: rate(up_concurrent),
        down_concurrent: rate(down_concurrent),
    })
}

/// Allocates pageable or page-locked memory. A link downloads into page-locked memory, if there is enough.
fn ends(link: &dyn DeviceLink, uploaded: &DeviceBytes, locked: bool) -> Result<HostBuffers> {
    let from = if locked { link.download(uploaded)? } else { bytes_of(pattern(0, uploaded.len() / 4)) };
    Ok(HostBuffers { locked, from, into: if locked { Vec::new() } else { vec![0.0; uploaded.len() / 4] } })
}

fn upload(link: &dyn DeviceLink, from: &Bytes) -> Result<()> {
    link.upload(from)?;
    Ok(())
}

fn download(link: &dyn DeviceLink, uploaded: &DeviceBytes, ends: &mut HostBuffers) -> Result<()> {
    match ends.locked {
        true => drop(link.download(uploaded)?),
        false => link.download_into(uploaded, &mut ends.into)?,
    }
    Ok(())
}

/// Returns the seconds of an upload and of a download while the other direction is always busy.
fn both(
    link: &dyn DeviceLink,
    uploaded: &DeviceBytes,
    ends: &mut HostBuffers,
    times: usize,
) -> Result<(f64, f64)> {
    let from = ends.from.clone();
    let (both, busy) = (Barrier::new(2), AtomicUsize::new(2));
    let repeated = || RepeatedCopies { both: &both, busy: &busy };
    let (up, down) = (repeated(), repeated());
    concurrently(
        || up.seconds(times, || upload(link, &from)),
        || down.seconds(times, || download(link, uploaded, ends)),
    )
}

/// One of two loops that start together and repeat until both have enough repetitions, so that they always overlap.
struct RepeatedCopies<'a> {
    both: &'a Barrier,
    /// The number of loops without enough repetitions.
    busy: &'a AtomicUsize,
}

impl RepeatedCopies<'_> {
    /// Returns the seconds of a repetition, from at least `repetitions` of them.
    fn seconds(self, repetitions: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
        let (both, busy) = (self.both, self.busy);
        let mut not_yet = Some(self);
        both.wait();
        let (made, seconds) = timed(|| {
            let mut made = 0;
            while busy.load(Acquire) > 0 {
                f()?;
                made += 1;
                not_yet.take_if(|_| made == repetitions);
            }
            Ok(made)
        })?;
        Ok(seconds / made as f64)
    }
}

impl Drop for RepeatedCopies<'_> {
    fn drop(&mut self) {
        // Also on an error or a panic, so that the other loop ends.
        self.busy.fetch_sub(1, Release);
    }
}

/// Runs both concurrently, the first one on a thread of its own.
fn concurrently<A: Send, B>(
    first: impl FnOnce() -> Result<A> + Send,
    second: impl FnOnce() -> Result<B>,
) -> Result<(A, B)> {
    let thread = std::thread::Builder::new().name("hydra-check-copies".to_owned());
    std::thread::scope(|scope| {
        let first = thread.spawn_scoped(scope, first)?;
        let second = second()?;
        let first = first.join().unwrap_or_else(|panic| bail!("panicked: {}", panic_message(&*panic)));
        Ok((first?, second))
    })
}

/// Measures computation alone, copies alone, and both concurrently.
pub(super) fn overlap(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let (bytes, side) = (subject.pick(64, 4) * MIB, subject.pick(2048, 256));
    device.link.prepare(bytes as u64)?;
    let uploaded = device.link.upload(&bytes_of(pattern(0, bytes / 4)))?;
    let from = device.link.download(&uploaded)?;
    drop(uploaded);
    let ones = Tensor::<2>::ones([side, side], &device.burn);
    let compute = |products| multiply(&device.burn, &ones, products);
    let copy = |copies| (0..copies).try_for_each(|_| upload(device.link.as_ref(), &from));
    // Long compared to the start of a thread, and equally long.
    let rounds = subject.pick(5, 3);
    let products = times_for(subject.pick(20e-3, 5e-3), compute)?;
    let compute_alone = best_of(rounds, || compute(products))?;
    let copies = times_for(compute_alone, copy)?;
    let copy_alone = best_of(rounds, || copy(copies))?;
    // This thread computes, as before: another one would have its own stream with empty pools.
    let together = best_of(rounds, || concurrently(|| copy(copies), || compute(products)).map(drop))?;
    let rows = vec![json!({
        "copies": copies, "mib": bytes / MIB, "products": products, "side": side,
        "compute_alone_s": compute_alone, "copy_alone_s": copy_alone, "together_s": together,
        "over_the_longer": together / compute_alone.max(copy_alone),
        "over_the_sum": together / (compute_alone + copy_alone),
    })];
    Ok(judge_overlap(subject.is_cuda(), [compute_alone, copy_alone], together, rows))
}

/// Returns a number of repetitions for which `f` takes at least `seconds`.
fn times_for(seconds: f64, mut f: impl FnMut(usize) -> Result<()>) -> Result<usize> {
    let mut times = 1;
    loop {
        let taken = best_of(2, || f(times))?;
        if taken >= seconds || times == MOST {
            return Ok(times);
        }
        let wanted = times as f64 * seconds / taken;
        times = (wanted.ceil() as usize).clamp(times + 1, MOST);
    }
}

fn judge_overlap(must: bool, alone: [f64; 2], together: f64, rows: Vec<Value>) -> Finding {
    let longer = alone[0].max(alone[1]);
    let (ratio, apart) = (together / longer, (alone[0] + alone[1]) / longer);
    let figure = format!("{ratio:.2} of the longer one");
    if !must {
        let why = "only links to NVIDIA GPUs have streams of their own; on other devices copies share the processor or \
        CubeCL's stream with computation";
        return Finding::new(Verdict::NotApplicable, figure, why, rows);
    }
    if apart < APART {
        let [compute, copies] = alone;
        let says = format!(
            "computation took {compute:.4} s and copies {copies:.4} s alone: too different to judge the overlap"
        );
        return Finding::new(Verdict::Fails, figure, says, rows);
    }
    let says = format!(
        "concurrent copies and products take {ratio:.2} of the time of the longer one alone; {OVERLAP} is allowed, and \
        {apart:.2} would be no overlap"
    );
    Finding::new(Verdict::of(ratio <= OVERLAP), figure, says, rows)
}

fn multiply(device: &Device, ones: &Tensor<2>, times: usize) -> Result<()> {
    (0..times).for_each(|_| drop(ones.clone().matmul(ones.clone())));
    sync(device)
}

/// Elements of the parts of a swap: a large one, and one of odd size.
const PARTS: [usize; 2] = [1 << 20, 777];

/// Makes promotions in sequence, each while the device computes on the previous one.
pub(super) fn swaps(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let count = subject.pick(1000, 100);
    device.link.prepare(PARTS.iter().map(|elements| (elements * 4).next_multiple_of(512) as u64).sum())?;
    let (sender, receiver) = sync_channel(0);
    let send = || promote(device.link.as_ref(), count, sender);
    let ((sent, wrong), seconds) = timed(|| concurrently(send, || inspect(&device, &receiver)))?;
    let bytes = (count * PARTS.iter().sum::<usize>() * 4) as u64;
    let rows = vec![json!({
        "swaps": sent, "bytes_each_way": bytes, "wrong": wrong.len(), "first_wrong": wrong.first(),
        "seconds": seconds,
    })];
    let says = match wrong.first() {
        None => format!(
            "{count} swaps, {} in each direction: all bytes and all sums computed on the device are correct",
            ByteSize(bytes)
        ),
        Some(first) => format!("{} of {count} swaps are wrong; the first: {first}", wrong.len()),
    };
    Ok(Finding::new(Verdict::of(wrong.is_empty() && sent == count), format!("{sent} swaps"), says, rows))
}

fn parts(swap: usize) -> Vec<Vec<f32>> {
    PARTS.iter().enumerate().map(|(part, elements)| pattern(swap * PARTS.len() + part, *elements)).collect()
}

fn promote(link: &dyn DeviceLink, count: usize, to: SyncSender<Vec<DeviceBytes>>) -> Result<usize> {
    for swap in 0..count {
        let host: Vec<Bytes> = parts(swap).into_iter().map(bytes_of).collect();
        let promoted = link.upload_all(&host)?;
        // The inspecting thread has failed, and reports the reason.
        if to.send(promoted).is_err() {
            return Ok(swap);
        }
    }
    Ok(count)
}

/// Checks the received swaps. Returns the faults.
fn inspect(device: &OpenDevice, from: &Receiver<Vec<DeviceBytes>>) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (swap, promoted) in from.iter().enumerate() {
        for (part, (uploaded, sent)) in promoted.iter().zip(parts(swap)).enumerate() {
            let exact: u64 = sent.iter().map(|value| *value as u64).sum();
            // Reading the sum waits for the device, so that the memory can be reused.
            let sum = values(floats_of(&device.burn, uploaded.clone()).sum())[0];
            if sum as u64 != exact {
                wrong.push(format!("swap {swap}, part {part}: the device's sum is {sum}, not {exact}"));
            } else if device.link.download(uploaded)? != bytes_of(sent) {
                wrong.push(format!("swap {swap}, part {part}: other bytes came back"));
            }
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_spill::{Direction, Floats, LinkError};

    #[test]
    fn patterns_differ_between_swaps_and_have_exact_sums() {
        let (a, b) = (pattern(0, PARTS[0]), pattern(8, PARTS[0]));
        assert_ne!(a, b);
        let exact: u64 = a.iter().map(|value| *value as u64).sum();
        assert_eq!(a.iter().sum::<f32>() as u64, exact);
        assert!(exact < 1 << 24 && a.iter().all(|value| (0.0..8.0).contains(value)));
    }

    #[test]
    fn repetitions_take_as_long_as_is_asked_for() {
        let (_kept, never) = sync_channel::<()>(0);
        let pause = |times: usize| -> Result<()> {
            // Long enough that a busy machine, which wakes a thread some milliseconds late, does not turn one into five.
            let ended = never.recv_timeout(std::time::Duration::from_millis(20 * times as u64));
            assert!(ended.is_err());
            Ok(())
        };
        let times = times_for(0.1, pause).unwrap();
        assert!((2..=10).contains(&times), "{times}");
        assert_eq!(times_for(0.0, |_| Ok(())).unwrap(), 1);
        assert!(times_for(1.0, |_| bail!("no")).is_err());
    }

    #[test]
    fn each_direction_must_keep_its_part() {
        let rates =
            |up_concurrent, down_concurrent| Rates { up: 5e10, down: 4e10, up_concurrent, down_concurrent };
        let judged = |must, locks, up, down| judge(must, locks, (16, &rates(up, down)), Vec::new());
        let good = judged(true, true, 4.5e10, 3.4e10);
        assert_eq!(good.figure, "50.0 GB/s to the device, 40.0 to the host, 45.0 and 34.0 concurrently");
        assert!(good.verdict == Verdict::Pass, "{good:?}");
        assert!(good.says.contains("with 16 MiB of page-locked"), "{good:?}");
        assert!(good.says.contains("at least 85 %"), "the worse of both: {good:?}");
        assert_eq!(judged(true, true, 5e10, 3e10).verdict, Verdict::Fails);
        assert_eq!(judged(true, false, 5e10, 4e10).verdict, Verdict::Fails, "not page-locked");
        assert_eq!(judged(false, false, 1e10, 1e10).verdict, Verdict::NotApplicable);
    }

    #[test]
    fn overlap_is_judged_only_where_there_could_be_none() {
        let verdict = |must, alone, together| judge_overlap(must, alone, together, Vec::new()).verdict;
        assert_eq!(verdict(true, [1.0, 0.9], 1.1), Verdict::Pass);
        assert_eq!(verdict(true, [1.0, 0.9], 1.9), Verdict::Fails);
        assert_eq!(verdict(true, [1.0, 0.1], 1.1), Verdict::Fails, "one after another would be as quick");
        assert_eq!(verdict(false, [1.0, 0.9], 1.1), Verdict::NotApplicable);
    }

    #[test]
    fn the_quicker_of_two_goes_on_until_the_other_has_done_its_part() {
        let (both, busy) = (Barrier::new(2), AtomicUsize::new(2));
        let repeated = || RepeatedCopies { both: &both, busy: &busy };
        let (sender, receiver) = sync_channel(0);
        let (mut quick, mut slow) = (0, 0);
        let quicker = || {
            repeated().seconds(3, || {
                quick += 1;
                // The receiver has ended.
                let _ = sender.send(());
                Ok(())
            })
        };
        let slower = || {
            let receiver = receiver;
            repeated().seconds(2, || {
                slow += 1;
                Ok((0..5).try_for_each(|_| receiver.recv())?)
            })
        };
        concurrently(quicker, slower).unwrap();
        assert!(quick >= 10 && slow == 2, "{quick}, {slow}");
    }

    #[test]
    fn what_fails_beside_something_ends_it_too() {
        let (both, busy) = (Barrier::new(2), AtomicUsize::new(2));
        let repeated = || RepeatedCopies { both: &both, busy: &busy };
        let fails = || repeated().seconds(100, || bail!("the card is gone"));
        let error = concurrently(fails, || repeated().seconds(1, || Ok(()))).unwrap_err();
        assert_eq!(error.to_string(), "the card is gone");
    }

    /// A link that corrupts data.
    struct Stale(hydra_spill::HostCopyLink);

    impl DeviceLink for Stale {
        fn name(&self) -> &str {
            "stale"
        }

        fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
            let floats = hydra_core::HostTensor::view(host.clone(), [], burn::tensor::DType::F32);
            let mut floats = floats.as_f32().to_vec();
            floats[0] += 1.0;
            self.0.upload(&bytes_of(floats))
        }

        fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
            self.0.download(device)
        }

        fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
            self.0.download_into(device, out)
        }

        fn pin(&self, floats: Vec<f32>) -> Floats {
            floats.into()
        }

        fn moved(&self, direction: Direction) -> u64 {
            self.0.moved(direction)
        }
    }

    #[test]
    fn a_link_that_brings_something_else_is_caught() {
        let spec = &hydra_engine::DeviceSpec::cpu(ByteSize::mib(64));
        let mut device = OpenDevice::new(spec, ByteSize::mib(1)).unwrap();
        device.link = std::sync::Arc::new(Stale(hydra_spill::HostCopyLink::new(device.measured_as())));
        let (sender, receiver) = sync_channel(0);
        let link = device.link.clone();
        let (sent, wrong) =
            concurrently(|| promote(link.as_ref(), 2, sender), || inspect(&device, &receiver)).unwrap();
        assert_eq!((sent, wrong.len()), (2, 4));
        assert!(wrong[0].starts_with("swap 0, part 0: the device's sum is "), "{}", wrong[0]);
    }

    #[test]
    fn a_tensor_of_the_device_is_a_view_of_what_was_promoted() {
        let device = Device::flex();
        let uploaded: DeviceBytes = bytes_of(vec![1.0, 2.0, 4.0]).into();
        assert_eq!(values(floats_of(&device, uploaded)), [1.0, 2.0, 4.0]);
        let tensor = crate::checklist::subject::tensor(&device, vec![3.0; 4], [2, 2]);
        assert_eq!(values(tensor), [3.0; 4]);
    }
}
