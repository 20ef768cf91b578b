//! `hydra check`: the checklist of a device, with figures and a verdict for each item.

use crate::checklist::found::Verdict;
use crate::checklist::items::{ChecklistItem, ITEMS, ItemResult, Panics, run_items};
use crate::checklist::subject::Subject;
use anyhow::{Result, bail};
use clap::Args;
use hydra_core::{ByteSize, panic_message};
use hydra_run::machine::DevicesArg;
use hydra_run::session::{Environment, devices};
use hydra_run::settings::{DeviceSettings, flags};
use hydra_run::terminal::{Outcome, Table, Usage, print};
use serde_json::{Value, json};

/// The default of `--pinned-memory`: enough for the largest copies and for staging buffers.
const PAGE_LOCKED: ByteSize = ByteSize::mib(1024);

/// `hydra check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The device to check: cuda:0, wgpu:0, cpu:1 (all cores) or cpu:1xT (T threads) [default: cpu:1]
    #[arg(long, value_name = "SPEC")]
    devices: Option<DevicesArg>,
    /// Memory budget of the device, such as 16GiB [default: as for a run]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    device_memory: Option<ByteSize>,
    /// Host memory that may be page-locked for transfers to the device [default: 1GiB]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pinned_memory: Option<ByteSize>,
    /// Check only these items: their numbers, separated by commas
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    only: Vec<usize>,
    /// Use small sizes and few repetitions, to check within seconds that everything works
    #[arg(long)]
    quick: bool,
    /// Also allocate memory until the device refuses
    #[arg(long)]
    oom: bool,
    /// Print one line of JSON for each item when it is done, and a summary line, and nothing else, on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the items and prints their findings.
pub(crate) fn run(args: CheckArgs, around: &Environment) -> Result<Outcome> {
    if let Some(wrong) = args.only.iter().find(|number| !ITEMS.iter().any(|item| item.number == **number)) {
        bail!(Usage::new(format!("--only {wrong}: expected items from 1 to {}", ITEMS.len())));
    }
    let subject = subject(&args, around)?;
    let panics = Panics::collect();
    let is_asked = |item: &&ChecklistItem| args.only.is_empty() || args.only.contains(&item.number);
    let asked: Vec<&ChecklistItem> = ITEMS.iter().filter(is_asked).collect();
    // The name marks a thread of Hydra, whose panics are reported as errors.
    let thread = std::thread::Builder::new().name("hydra-check".to_owned());
    let (done, unusable) = std::thread::scope(|scope| {
        let items = thread.spawn_scoped(scope, || run_items(&asked, args.json, &subject, &panics))?;
        items.join().unwrap_or_else(|panic| bail!("the check panicked: {}", panic_message(&*panic)))
    })?;
    let failed = done.iter().filter(|done| done.found.verdict == Verdict::Fails).count();
    print(&match args.json {
        true => format!("{}\n", whole(&subject, &done, failed)),
        false => render(&subject, &done),
    })?;
    unusable.map_or(Ok(if failed == 0 { Outcome::Done } else { Outcome::Failed }), Err)
}

fn subject(args: &CheckArgs, around: &Environment) -> Result<Subject> {
    let asked = DeviceSettings {
        devices: args.devices.clone(),
        device_memory: args.device_memory,
        pinned_memory: args.pinned_memory,
        ..flags::defaults()
    };
    let spec = asked.resolve(&around.machine)?;
    let mut devices = devices(&spec, &around.machine);
    if devices.len() != 1 {
        let named = spec.devices();
        bail!(Usage::new(format!("--devices {named} names {} devices; check one at a time", devices.len())));
    }
    let mut device = devices.remove(0);
    // The checklist measures copies, which a zero-copy device does not make.
    device.zero_copy = false;
    let page_locked = args.pinned_memory.unwrap_or(PAGE_LOCKED);
    Ok(Subject { device, page_locked, quick: args.quick, oom: args.oom })
}

fn whole(subject: &Subject, done: &[ItemResult], failed: usize) -> Value {
    let count = |verdict| done.iter().filter(|done| done.found.verdict == verdict).count();
    json!({
        "device": subject.device.name, "device_memory_bytes": subject.device.memory, "quick": subject.quick,
        "items": done.len(), "pass": count(Verdict::Pass), "fails": failed,
        "not_applicable": count(Verdict::NotApplicable),
        "seconds": done.iter().map(|done| done.seconds).sum::<f64>(),
    })
}

fn render(subject: &Subject, done: &[ItemResult]) -> String {
    let device = format!("<{}", subject.device.name);
    let mut table = Table::new([">", &device, "<verdict", "<figure"]);
    for ItemResult { item, name, found, .. } in done {
        let verdict = json!(found.verdict).as_str().unwrap_or_default().to_owned();
        table.row(vec![item.to_string(), (*name).to_owned(), verdict, found.figure.clone()]);
    }
    let reasons = done.iter().map(|ItemResult { item, found, .. }| format!("{item:>2}: {}\n", found.says));
    format!("{}\n{}", table.render(), reasons.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checklist::found::Finding;

    #[test]
    fn the_table_is_short_and_the_reasons_follow() {
        let found = Finding::new(Verdict::Fails, "2.0 GB/s", "too slow, by much", vec![json!({"a": 1})]);
        let done = [ItemResult { item: 2, name: "bandwidth", found, panics: Vec::new(), seconds: 1.0 }];
        let subject = Subject::cpu(ByteSize::mib(1));
        let text = render(&subject, &done);
        assert!(text.contains("2  bandwidth  fails    2.0 GB/s\n"), "{text}");
        assert!(text.ends_with("\n 2: too slow, by much\n"), "{text}");
        assert_eq!(whole(&subject, &done, 1)["fails"], 1);
        assert_eq!(serde_json::to_value(&done[0]).unwrap()["verdict"], "fails");
    }
}
