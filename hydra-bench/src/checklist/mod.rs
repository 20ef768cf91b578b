//! `hydra check`: whether a device does what training needs, item by item, each with figures and a verdict.

mod copies;
mod kernels;
mod memory;
mod optimizer;
mod precision;
mod subject;
mod training;

use crate::run_dir::spec::DevicesSpec;
use crate::session::orchestrator::{Surroundings, devices};
use crate::settings::args::DeviceArgs;
use crate::settings::values::DevicesArg;
use crate::terminal::error::{Outcome, Usage, print};
use crate::terminal::progress::interactive;
use crate::terminal::table::{Align, Table};
use anyhow::{Context, Result, bail};
use clap::Args;
use hydra_core::{ByteSize, panic_message};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use subject::Subject;

/// The page-locked memory when nobody says how much: enough for the largest copies and what stages others.
const PAGE_LOCKED: ByteSize = ByteSize::mib(1024);

/// `hydra check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// One device: cuda:0, wgpu:0, or cpu:1 (all cores) or cpu:1xT [default: cpu:1]
    #[arg(long, value_name = "SPEC")]
    devices: Option<DevicesArg>,
    /// The memory that it may use, such as 16GiB [default: as a run's]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    device_memory: Option<ByteSize>,
    /// The host memory that may be page-locked for it [default: 1GiB]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pinned_memory: Option<ByteSize>,
    /// Only these items, by number
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    only: Vec<usize>,
    /// Smaller sizes and fewer repetitions: whether all works, in seconds
    #[arg(long)]
    quick: bool,
    /// Also allocate until the device refuses
    #[arg(long)]
    oom: bool,
    /// Print a line of JSON for each item as soon as it is done, and one for the whole, alone on standard output
    #[arg(long)]
    json: bool,
}

/// How an item ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Verdict {
    #[serde(rename = "pass")]
    Pass,
    #[serde(rename = "fails")]
    Fails,
    #[serde(rename = "not applicable")]
    NotApplicable,
}

impl Verdict {
    fn of(passes: bool) -> Self {
        if passes { Self::Pass } else { Self::Fails }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fails => "fails",
            Self::NotApplicable => "not applicable",
        }
    }
}

/// What an item found.
#[derive(Clone, Debug, Serialize)]
struct Found {
    verdict: Verdict,
    /// Why.
    says: String,
    /// The figure that stands for the item.
    figure: String,
    /// Everything that was measured.
    rows: Vec<Value>,
}

impl Found {
    fn new(verdict: Verdict, figure: impl Into<String>, says: impl Into<String>, rows: Vec<Value>) -> Self {
        Self { verdict, says: says.into(), figure: figure.into(), rows }
    }

    fn not_applicable(says: impl Into<String>) -> Self {
        Self::new(Verdict::NotApplicable, "-", says, Vec::new())
    }
}

struct Item {
    number: usize,
    name: &'static str,
    run: fn(&Subject) -> Result<Found>,
}

/// The items in the order in which they run: the cold start can be seen only before everything else, and what most
/// depends on comes before what takes long.
const ITEMS: [Item; 12] = [
    Item { number: 9, name: "first step against later steps", run: training::cold_start },
    Item { number: 1, name: "kernels compile, the loss falls, same bits", run: training::learns },
    Item { number: 2, name: "bandwidth of the link", run: copies::bandwidth },
    Item { number: 3, name: "copies beside computation", run: copies::overlap },
    Item { number: 10, name: "spilled step against resident step", run: training::spilled },
    Item { number: 4, name: "swaps with checksums", run: copies::swaps },
    Item { number: 11, name: "optimizer on the device", run: optimizer::steps },
    Item { number: 7, name: "matrix products", run: kernels::products },
    Item { number: 8, name: "attention and head by context", run: kernels::contexts },
    Item { number: 6, name: "reserved memory stays", run: memory::plateau },
    Item { number: 12, name: "losses beside the CPU's", run: precision::losses },
    // Last, because a device may take it badly.
    Item { number: 5, name: "out of memory", run: memory::out_of_memory },
];

/// An item that was run.
#[derive(Clone, Debug, Serialize)]
struct Done {
    item: usize,
    name: &'static str,
    #[serde(flatten)]
    found: Found,
    /// What panicked meanwhile, also on threads of the device's runtime.
    panics: Vec<String>,
    seconds: f64,
}

/// Runs the items and prints what they found.
pub(crate) fn run(args: &CheckArgs, around: &Surroundings) -> Result<Outcome> {
    if let Some(wrong) = args.only.iter().find(|number| !ITEMS.iter().any(|item| item.number == **number)) {
        bail!(Usage::new(format!("--only {wrong}: the items are 1 to {}", ITEMS.len())));
    }
    let subject = subject(args, around)?;
    let panics = Panics::collect();
    let asked: Vec<&Item> =
        ITEMS.iter().filter(|item| args.only.is_empty() || args.only.contains(&item.number)).collect();
    // Named as the engine's threads are.
    let thread = std::thread::Builder::new().name("hydra-check".to_owned());
    let (done, unusable) = std::thread::scope(|scope| {
        let items = thread.spawn_scoped(scope, || run_items(&asked, args.json, &subject, &panics))?;
        items.join().unwrap_or_else(|panic| bail!("the check ended early: {}", panic_message(&*panic)))
    })?;
    let failed = done.iter().filter(|done| done.found.verdict == Verdict::Fails).count();
    print(&if args.json {
        format!("{}\n", whole(&subject, &done, failed))
    } else {
        render(&subject, &done)
    })?;
    match unusable {
        Some(unusable) => Err(unusable),
        None => Ok(if failed == 0 { Outcome::Done } else { Outcome::Failed }),
    }
}

fn subject(args: &CheckArgs, around: &Surroundings) -> Result<Subject> {
    let asked = DeviceArgs {
        devices: args.devices.clone(),
        device_memory: args.device_memory,
        host_memory: None,
        disk_memory: None,
        disk: None,
        pinned_memory: args.pinned_memory,
        precision: None,
        optimizer_placement: None,
        link: None,
        no_prefetch: false,
        policy: None,
        cuts: Vec::new(),
        plan: None,
    };
    let spec = DevicesSpec::new(&asked, false, &around.machine)?;
    let mut devices = devices(&spec, &around.machine)?;
    if devices.len() != 1 {
        let named = &spec.devices;
        bail!(Usage::new(format!("--devices {named} is {} devices: check one at a time", devices.len())));
    }
    let mut device = devices.remove(0);
    // What is checked is copies; a device that shares the host's memory makes none.
    device.resident = false;
    Ok(Subject {
        device,
        page_locked: args.pinned_memory.unwrap_or(PAGE_LOCKED),
        quick: args.quick,
        oom: args.oom,
    })
}

/// What panics, in place of what is printed of it: an item reports it.
struct Panics(Arc<Mutex<Vec<String>>>);

impl Panics {
    fn collect() -> Self {
        let said = Arc::new(Mutex::new(Vec::new()));
        let to = said.clone();
        std::panic::set_hook(Box::new(move |info| {
            let mut said = to.lock().unwrap_or_else(PoisonError::into_inner);
            let text = panic_message(info.payload());
            if !said.contains(&text) {
                said.push(text);
            }
        }));
        Self(said)
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the items found, and why those after the last one were not tried.
type Ran = (Vec<Done>, Option<anyhow::Error>);

/// Runs the items until the device does not compute any more. A kernel that fails can spoil it for the whole process, and
/// whatever came afterwards would fail in its stead.
fn run_items(items: &[&Item], json: bool, subject: &Subject, panics: &Panics) -> Result<Ran> {
    let bar = if interactive() { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    bar.enable_steady_tick(Duration::from_millis(200));
    let (mut done, mut unusable) = (Vec::new(), None);
    for (at, item) in items.iter().enumerate() {
        bar.set_message(format!("{}. {}", item.number, item.name));
        let since = Instant::now();
        let found = guarded(|| (item.run)(subject))
            .unwrap_or_else(|error| Found::new(Verdict::Fails, "-", format!("{error:#}"), Vec::new()));
        let seconds = since.elapsed().as_secs_f64();
        let panics = panics.take();
        let result = Done { item: item.number, name: item.name, found, panics, seconds };
        if json {
            print(&format!("{}\n", serde_json::to_string(&result)?))?;
        }
        let failed = result.found.verdict == Verdict::Fails;
        done.push(result);
        if let (true, Err(error)) = (failed, guarded(|| subject.computes())) {
            let left: Vec<String> = items[at + 1..].iter().map(|item| item.number.to_string()).collect();
            unusable = Some(gone(item.number, &left, error));
            break;
        }
    }
    bar.finish_and_clear();
    done.sort_by_key(|done| done.item);
    Ok((done, unusable))
}

fn gone(after: usize, left: &[String], error: anyhow::Error) -> anyhow::Error {
    let rest = match left {
        [] => "no item is left".to_owned(),
        left => format!("try the others in another process: --only {}", left.join(",")),
    };
    error.context(format!("after item {after} the device is unusable from here on; {rest}"))
}

/// Runs `f`; a panic of it, such as that of a layer that has no kernels for the device, is an error.
fn guarded<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| bail!("it panicked: {}", panic_message(&*panic)))
}

/// Runs `f` and gives its result and its seconds. Whoever computes in it waits for the device.
fn timed<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let since = Instant::now();
    let result = f()?;
    Ok((result, since.elapsed().as_secs_f64()))
}

/// The shortest of some repetitions, in seconds, after one that is not counted.
fn best_of(repetitions: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f().context("the repetition before the first")?;
    (0..repetitions).try_fold(f64::INFINITY, |best, _| Ok(best.min(timed(&mut f)?.1)))
}

fn whole(subject: &Subject, done: &[Done], failed: usize) -> Value {
    let count = |verdict| done.iter().filter(|done| done.found.verdict == verdict).count();
    json!({
        "device": subject.device.name,
        "device_memory_bytes": subject.device.memory,
        "quick": subject.quick,
        "items": done.len(),
        "pass": count(Verdict::Pass),
        "fails": failed,
        "not_applicable": count(Verdict::NotApplicable),
        "seconds": done.iter().map(|done| done.seconds).sum::<f64>(),
    })
}

fn render(subject: &Subject, done: &[Done]) -> String {
    let mut table = Table::new(&[
        ("", Align::Right),
        (&subject.device.name, Align::Left),
        ("verdict", Align::Left),
        ("figure", Align::Left),
    ]);
    for Done { item, name, found, .. } in done {
        let verdict = found.verdict.words().to_owned();
        table.row(vec![item.to_string(), (*name).to_owned(), verdict, found.figure.clone()]);
    }
    let mut text = table.render();
    text.push('\n');
    for Done { item, found, .. } in done {
        text.push_str(&format!("{item:>2}: {}\n", found.says));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_there_once_and_the_cold_start_is_first() {
        let mut numbers: Vec<usize> = ITEMS.iter().map(|item| item.number).collect();
        assert_eq!((numbers[0], numbers[ITEMS.len() - 1]), (9, 5));
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=ITEMS.len()).collect::<Vec<_>>());
    }

    fn cpu(memory: ByteSize) -> Subject {
        let device = hydra_engine::DeviceSpec::cpus(1, 1, memory).remove(0);
        Subject { device, page_locked: PAGE_LOCKED, quick: true, oom: false }
    }

    #[test]
    fn a_failed_item_ends_the_check_only_where_the_device_does_not_compute_any_more() {
        let fails = Item { number: 4, name: "fails", run: |_| bail!("a bad kernel") };
        let passes = Item { number: 11, name: "passes", run: |_| Ok(Found::not_applicable("fine")) };
        let nothing = Panics(Arc::default());
        let (done, unusable) =
            run_items(&[&fails, &passes], false, &cpu(ByteSize::mib(1)), &nothing).unwrap();
        assert_eq!(done.iter().map(|done| done.item).collect::<Vec<_>>(), [4, 11]);
        assert!(unusable.is_none());
        // A device that this build lacks cannot be opened.
        let lost = hydra_engine::DeviceSpec::wgpu(usize::MAX, 0, 1, ByteSize::mib(1));
        let lost = Subject { device: lost, ..cpu(ByteSize::mib(1)) };
        let (done, unusable) = run_items(&[&fails, &passes], false, &lost, &nothing).unwrap();
        assert_eq!(done.iter().map(|done| done.item).collect::<Vec<_>>(), [4]);
        assert_eq!(
            unusable.unwrap().to_string(),
            "after item 4 the device is unusable from here on; try the others in another process: --only 11"
        );
        let (done, unusable) = run_items(&[&passes, &fails], false, &lost, &nothing).unwrap();
        assert_eq!(done.len(), 2);
        assert!(unusable.unwrap().to_string().ends_with("; no item is left"));
    }

    #[test]
    fn what_panics_is_an_error_that_says_so() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let error = guarded(|| -> Result<()> { panic!("no kernel for {}", "it") }).unwrap_err();
        std::panic::set_hook(quiet);
        assert_eq!(error.to_string(), "it panicked: no kernel for it");
        assert_eq!(guarded(|| Ok(3)).unwrap(), 3);
    }

    #[test]
    fn the_table_is_short_and_the_reasons_follow() {
        let found = Found::new(Verdict::Fails, "2.0 GB/s", "too slow, by much", vec![json!({"a": 1})]);
        let done = [Done { item: 2, name: "bandwidth", found, panics: Vec::new(), seconds: 1.0 }];
        let subject = cpu(ByteSize::mib(1));
        let text = render(&subject, &done);
        assert!(text.contains("2  bandwidth  fails    2.0 GB/s\n"), "{text}");
        assert!(text.ends_with("\n 2: too slow, by much\n"), "{text}");
        assert_eq!(whole(&subject, &done, 1)["fails"], 1);
        assert_eq!(serde_json::to_value(&done[0]).unwrap()["verdict"], "fails");
    }
}
