//! The link of the device: how fast it copies, whether it copies beside computation, and whether what arrives
//! is what was sent.

use super::found::{Found, Verdict, best_of, timed};
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
/// Copies in both directions at once must each keep so much of what they have alone.
const BOTH: f64 = 0.8;
/// Computation with copies beside it may take so much longer than the longer of both alone.
const OVERLAP: f64 = 1.15;
/// One after another they must take so much longer, or nothing is shown by how long they take at once.
const APART: f64 = 1.5;
/// More repetitions than any device needs.
const MOST: usize = 100_000;

/// Host memory that is copied from and to.
struct Ends {
    locked: bool,
    from: Bytes,
    into: Vec<f32>,
}

/// Bytes a second in each direction, alone and beside the other.
struct Rates {
    up: f64,
    down: f64,
    up_beside: f64,
    down_beside: f64,
}

/// Copies of several sizes, from and to page-locked and ordinary memory.
pub(super) fn bandwidth(subject: &Subject) -> Result<Found> {
    let device = subject.open()?;
    let sizes = subject.pick(&[1, 16, 256][..], &[1, 4]);
    device.link.prepare((sizes[sizes.len() - 1] * MIB) as u64)?;
    let locks = locks_pages(&device, MIB);
    let (mut rows, mut largest) = (Vec::new(), None);
    for &mib in sizes {
        for locked in [true, false] {
            // Both ends and one copy on its way are page-locked at once.
            let room = subject.page_locked.bytes() >= (3 * mib * MIB) as u64;
            if locked && !(locks && room) {
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
        "down_gb_per_s": rates.down * 1e-9, "up_beside_down_gb_per_s": rates.up_beside * 1e-9,
        "down_beside_up_gb_per_s": rates.down_beside * 1e-9,
    })
}

fn judge(must: bool, locks: bool, (mib, rates): (usize, &Rates), rows: Vec<Value>) -> Found {
    let gb = |rate: f64| rate * 1e-9;
    let [up, down] = [rates.up, rates.down].map(gb);
    let [up_beside, down_beside] = [rates.up_beside, rates.down_beside].map(gb);
    let figure = format!("{up:.1} GB/s up, {down:.1} down, {up_beside:.1} and {down_beside:.1} at once");
    if !must {
        let why = "only an NVIDIA card has page-locked memory and a lane for each direction; the figures are of \
                   ordinary memory";
        return Found::new(Verdict::NotApplicable, figure, why, rows);
    }
    let part = (rates.up_beside / rates.up).min(rates.down_beside / rates.down);
    let passes = locks && part >= BOTH;
    let (part, asked) = (100.0 * part, 100.0 * BOTH);
    let says = match locks {
        false => "too little could be page-locked: see `ulimit -l` and --pinned-memory".to_owned(),
        true => format!(
            "with {mib} MiB of page-locked memory, both directions at once each keep {part:.0} % or more of what they \
             have alone; {asked:.0} % is asked for"
        ),
    };
    Found::new(Verdict::of(passes), figure, says, rows)
}

/// The rates of copies of so many bytes.
fn rates(subject: &Subject, link: &dyn DeviceLink, bytes: usize, locked: bool) -> Result<Rates> {
    let repetitions = subject.pick(8, 2);
    let uploaded = link.upload(&bytes_of(pattern(0, bytes / 4)))?;
    let mut ends = ends(link, &uploaded, locked)?;
    let up = best_of(repetitions, || upload(link, &ends.from))?;
    let down = best_of(repetitions, || download(link, &uploaded, &mut ends))?;
    let (up_beside, down_beside) = both(link, &uploaded, &mut ends, repetitions.max(4))?;
    let rate = |seconds: f64| bytes as f64 / seconds;
    Ok(Rates { up: rate(up), down: rate(down), up_beside: rate(up_beside), down_beside: rate(down_beside) })
}

/// Ordinary or page-locked memory of this size. A link downloads into page-locked memory, as far as there is some.
fn ends(link: &dyn DeviceLink, uploaded: &DeviceBytes, locked: bool) -> Result<Ends> {
    let from = if locked { link.download(uploaded)? } else { bytes_of(pattern(0, uploaded.len() / 4)) };
    Ok(Ends { locked, from, into: if locked { Vec::new() } else { vec![0.0; uploaded.len() / 4] } })
}

fn upload(link: &dyn DeviceLink, from: &Bytes) -> Result<()> {
    link.upload(from)?;
    Ok(())
}

fn download(link: &dyn DeviceLink, uploaded: &DeviceBytes, ends: &mut Ends) -> Result<()> {
    match ends.locked {
        true => drop(link.download(uploaded)?),
        false => link.download_into(uploaded, &mut ends.into)?,
    }
    Ok(())
}

/// Seconds of a copy up and of a copy down while the other direction is busy all the time.
fn both(link: &dyn DeviceLink, uploaded: &DeviceBytes, ends: &mut Ends, times: usize) -> Result<(f64, f64)> {
    let from = ends.from.clone();
    let (both, busy) = (Barrier::new(2), AtomicUsize::new(2));
    let repeated = || Repeated { both: &both, busy: &busy };
    let (up, down) = (repeated(), repeated());
    beside(
        || up.seconds(times, || upload(link, &from)),
        || down.seconds(times, || download(link, uploaded, ends)),
    )
}

/// One of two that begin together and repeat until each has done so often enough: neither is ever alone.
struct Repeated<'a> {
    both: &'a Barrier,
    /// The number of those that have not yet.
    busy: &'a AtomicUsize,
}

impl Repeated<'_> {
    /// The seconds of a repetition, of which there are at least so many.
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

impl Drop for Repeated<'_> {
    fn drop(&mut self) {
        // Also by an error or a panic, which the other one need not outlast.
        self.busy.fetch_sub(1, Release);
    }
}

/// Runs both at once, the first on a thread of its own.
fn beside<A: Send, B>(
    first: impl FnOnce() -> Result<A> + Send,
    second: impl FnOnce() -> Result<B>,
) -> Result<(A, B)> {
    let thread = std::thread::Builder::new().name("hydra-check-beside".to_owned());
    std::thread::scope(|scope| {
        let first = thread.spawn_scoped(scope, first)?;
        let second = second()?;
        let first = first.join().unwrap_or_else(|panic| bail!("it panicked: {}", panic_message(&*panic)));
        Ok((first?, second))
    })
}

/// Computation alone, copies alone, both at once.
pub(super) fn overlap(subject: &Subject) -> Result<Found> {
    let device = subject.open()?;
    let (bytes, side) = (subject.pick(64, 4) * MIB, subject.pick(2048, 256));
    device.link.prepare(bytes as u64)?;
    let uploaded = device.link.upload(&bytes_of(pattern(0, bytes / 4)))?;
    let from = device.link.download(&uploaded)?;
    drop(uploaded);
    let ones = Tensor::<2>::ones([side, side], &device.burn);
    let compute = |products| multiply(&device.burn, &ones, products);
    let copy = |copies| (0..copies).try_for_each(|_| upload(device.link.as_ref(), &from));
    // Long beside the start of a thread, and as long as each other.
    let rounds = subject.pick(5, 3);
    let products = times_for(subject.pick(20e-3, 5e-3), compute)?;
    let compute_alone = best_of(rounds, || compute(products))?;
    let copies = times_for(compute_alone, copy)?;
    let copy_alone = best_of(rounds, || copy(copies))?;
    // This thread computes, as before: another one would have a stream and pools of its own, still empty.
    let together = best_of(rounds, || beside(|| copy(copies), || compute(products)).map(drop))?;
    let rows = vec![json!({
        "copies": copies, "mib": bytes / MIB, "products": products, "side": side,
        "compute_alone_s": compute_alone, "copy_alone_s": copy_alone, "together_s": together,
        "over_the_longer": together / compute_alone.max(copy_alone),
        "over_the_sum": together / (compute_alone + copy_alone),
    })];
    Ok(judge_overlap(subject.is_cuda(), [compute_alone, copy_alone], together, rows))
}

/// The repetitions with which `f`, which is told them, takes so many seconds or more.
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

fn judge_overlap(must: bool, alone: [f64; 2], together: f64, rows: Vec<Value>) -> Found {
    let longer = alone[0].max(alone[1]);
    let (ratio, apart) = (together / longer, (alone[0] + alone[1]) / longer);
    let figure = format!("{ratio:.2} of the longer of both");
    if !must {
        let why = "only the link to an NVIDIA card has streams of its own; elsewhere copies share with computation \
                   the processor, or CubeCL's stream";
        return Found::new(Verdict::NotApplicable, figure, why, rows);
    }
    if apart < APART {
        let [compute, copies] = alone;
        let says = format!(
            "alone, computation took {compute:.4} s and copies {copies:.4} s: too different to tell whether one \
             runs beside the other"
        );
        return Found::new(Verdict::Fails, figure, says, rows);
    }
    let says = format!(
        "copies and products at once take {ratio:.2} of what the longer takes alone; {OVERLAP} is allowed, and one \
         after another it would be {apart:.2}"
    );
    Found::new(Verdict::of(ratio <= OVERLAP), figure, says, rows)
}

fn multiply(device: &Device, ones: &Tensor<2>, times: usize) -> Result<()> {
    (0..times).for_each(|_| drop(ones.clone().matmul(ones.clone())));
    sync(device)
}

/// Elements of the parts of a swap: a large one, and one of odd size behind it.
const PARTS: [usize; 2] = [1 << 20, 777];

/// Promotions one after another, the next made while the device computes on the last.
pub(super) fn swaps(subject: &Subject) -> Result<Found> {
    let device = subject.open()?;
    let count = subject.pick(1000, 100);
    device.link.prepare(PARTS.iter().map(|elements| (elements * 4).next_multiple_of(512) as u64).sum())?;
    let (sender, receiver) = sync_channel(0);
    let send = || promote(device.link.as_ref(), count, sender);
    let ((sent, wrong), seconds) = timed(|| beside(send, || inspect(&device, &receiver)))?;
    let bytes = (count * PARTS.iter().sum::<usize>() * 4) as u64;
    let rows = vec![json!({
        "swaps": sent, "bytes_each_way": bytes, "wrong": wrong.len(), "first_wrong": wrong.first(),
        "seconds": seconds,
    })];
    let says = match wrong.first() {
        None => format!(
            "{count} swaps, {} each way: every byte came back, and every sum that the device made is the exact one",
            ByteSize(bytes)
        ),
        Some(first) => format!("{} of {count} swaps are wrong; the first: {first}", wrong.len()),
    };
    Ok(Found::new(Verdict::of(wrong.is_empty() && sent == count), format!("{sent} swaps"), says, rows))
}

fn parts(swap: usize) -> Vec<Vec<f32>> {
    PARTS.iter().enumerate().map(|(part, elements)| pattern(swap * PARTS.len() + part, *elements)).collect()
}

fn promote(link: &dyn DeviceLink, count: usize, to: SyncSender<Vec<DeviceBytes>>) -> Result<usize> {
    for swap in 0..count {
        let host: Vec<Bytes> = parts(swap).into_iter().map(bytes_of).collect();
        let promoted = link.upload_all(&host)?;
        // Whoever inspects has failed and says why.
        if to.send(promoted).is_err() {
            return Ok(swap);
        }
    }
    Ok(count)
}

/// Returns the faults of the swaps that come.
fn inspect(device: &OpenDevice, from: &Receiver<Vec<DeviceBytes>>) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (swap, promoted) in from.iter().enumerate() {
        for (part, (uploaded, sent)) in promoted.iter().zip(parts(swap)).enumerate() {
            let exact: u64 = sent.iter().map(|value| *value as u64).sum();
            // Reading it back waits for the device, so that the range may be filled again.
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
            // So long that a busy machine, which wakes a thread some milliseconds late, does not make five of one.
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
        let rates = |up_beside, down_beside| Rates { up: 5e10, down: 4e10, up_beside, down_beside };
        let judged = |must, locks, up, down| judge(must, locks, (16, &rates(up, down)), Vec::new());
        let good = judged(true, true, 4.5e10, 3.4e10);
        assert_eq!(good.figure, "50.0 GB/s up, 40.0 down, 45.0 and 34.0 at once");
        assert!(good.verdict == Verdict::Pass, "{good:?}");
        assert!(good.says.contains("with 16 MiB of page-locked"), "{good:?}");
        assert!(good.says.contains("85 % or more"), "the worse of both: {good:?}");
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
        let repeated = || Repeated { both: &both, busy: &busy };
        let (sender, receiver) = sync_channel(0);
        let (mut quick, mut slow) = (0, 0);
        let quicker = || {
            repeated().seconds(3, || {
                quick += 1;
                // Whoever has received enough has ended.
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
        beside(quicker, slower).unwrap();
        assert!(quick >= 10 && slow == 2, "{quick}, {slow}");
    }

    #[test]
    fn what_fails_beside_something_ends_it_too() {
        let (both, busy) = (Barrier::new(2), AtomicUsize::new(2));
        let repeated = || Repeated { both: &both, busy: &busy };
        let fails = || repeated().seconds(100, || bail!("the card is gone"));
        let error = beside(fails, || repeated().seconds(1, || Ok(()))).unwrap_err();
        assert_eq!(error.to_string(), "the card is gone");
    }

    /// A link that brings something else than it was given.
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
            beside(|| promote(link.as_ref(), 2, sender), || inspect(&device, &receiver)).unwrap();
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
