//! The checklist's items, and running them.

use super::found::{Finding, Verdict, guarded};
use super::subject::{Subject, computes};
use super::{copies, kernels, memory, optimizer, precision, training};
use anyhow::Result;
use hydra_core::panic_message;
use hydra_run::terminal::{interactive, print};
use indicatif::ProgressBar;
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) struct ChecklistItem {
    pub(crate) number: usize,
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Subject) -> Result<Finding>,
}

/// The items in execution order: the cold start, then the most important ones, then the long ones.
pub(crate) const ITEMS: [ChecklistItem; 12] = [
    ChecklistItem { number: 9, name: "first step vs. later steps", run: training::cold_start },
    ChecklistItem { number: 1, name: "kernels compile, loss falls, same bits", run: training::learns },
    ChecklistItem { number: 2, name: "link bandwidth", run: copies::bandwidth },
    ChecklistItem { number: 3, name: "overlap of copies and computation", run: copies::overlap },
    ChecklistItem { number: 10, name: "spilled step vs. resident step", run: training::spilled },
    ChecklistItem { number: 4, name: "swaps with checksums", run: copies::swaps },
    ChecklistItem { number: 11, name: "optimizer on the device", run: optimizer::steps },
    ChecklistItem { number: 7, name: "matrix products", run: kernels::products },
    ChecklistItem { number: 8, name: "attention and head by context", run: kernels::contexts },
    ChecklistItem { number: 6, name: "reserved memory does not grow", run: memory::plateau },
    ChecklistItem { number: 12, name: "losses vs. the CPU's", run: precision::losses },
    // Last, because a device may not recover.
    ChecklistItem { number: 5, name: "out of memory", run: memory::out_of_memory },
];

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ItemResult {
    pub(crate) item: usize,
    pub(crate) name: &'static str,
    #[serde(flatten)]
    pub(crate) found: Finding,
    /// Panics during the item, also on threads of the device's runtime.
    pub(crate) panics: Vec<String>,
    pub(crate) seconds: f64,
}

/// Messages of panics, which are collected instead of printed.
pub(crate) struct Panics(Arc<Mutex<Vec<String>>>);

impl Panics {
    pub(crate) fn collect() -> Self {
        let messages = Arc::new(Mutex::new(Vec::new()));
        let to = messages.clone();
        std::panic::set_hook(Box::new(move |info| {
            let mut messages = to.lock().unwrap_or_else(PoisonError::into_inner);
            let text = panic_message(info.payload());
            if !messages.contains(&text) {
                messages.push(text);
            }
        }));
        Self(messages)
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The results of the items, and the error that ended the check early.
pub(crate) type CheckResults = (Vec<ItemResult>, Option<anyhow::Error>);

/// Runs the items until the device stops computing: a failing kernel can make it unusable for the whole process.
pub(crate) fn run_items(
    items: &[&ChecklistItem],
    json: bool,
    subject: &Subject,
    panics: &Panics,
) -> Result<CheckResults> {
    let bar = if interactive() { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    bar.enable_steady_tick(Duration::from_millis(200));
    let (mut done, mut unusable) = (Vec::new(), None);
    for (at, item) in items.iter().enumerate() {
        bar.set_message(format!("{}. {}", item.number, item.name));
        let since = Instant::now();
        let found = guarded(|| (item.run)(subject))
            .unwrap_or_else(|error| Finding::new(Verdict::Fails, "-", format!("{error:#}"), Vec::new()));
        let seconds = since.elapsed().as_secs_f64();
        let panics = panics.take();
        let result = ItemResult { item: item.number, name: item.name, found, panics, seconds };
        if json {
            print(&format!("{}\n", serde_json::to_string(&result)?))?;
        }
        let failed = result.found.verdict == Verdict::Fails;
        done.push(result);
        if let (true, Err(error)) = (failed, guarded(|| computes(&subject.open()?.burn))) {
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
        [] => "no items are left".to_owned(),
        left => format!("run the others in another process: --only {}", left.join(",")),
    };
    error.context(format!("the device is unusable after item {after}; {rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use hydra_core::ByteSize;

    #[test]
    fn every_item_is_there_once_and_the_cold_start_is_first() {
        let mut numbers: Vec<usize> = ITEMS.iter().map(|item| item.number).collect();
        assert_eq!((numbers[0], numbers[ITEMS.len() - 1]), (9, 5));
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=ITEMS.len()).collect::<Vec<_>>());
    }

    #[test]
    fn a_failed_item_ends_the_check_only_where_the_device_does_not_compute_any_more() {
        let fails = ChecklistItem { number: 4, name: "fails", run: |_| bail!("a bad kernel") };
        let passes =
            ChecklistItem { number: 11, name: "passes", run: |_| Ok(Finding::not_applicable("fine")) };
        let nothing = Panics(Arc::default());
        let (done, unusable) =
            run_items(&[&fails, &passes], false, &Subject::cpu(ByteSize::mib(1)), &nothing).unwrap();
        assert_eq!(done.iter().map(|done| done.item).collect::<Vec<_>>(), [4, 11]);
        assert!(unusable.is_none());
        // This build does not have the device.
        let lost = hydra_engine::DeviceSpec::wgpu(usize::MAX, ByteSize::mib(1));
        let lost = Subject { device: lost, ..Subject::cpu(ByteSize::mib(1)) };
        let (done, unusable) = run_items(&[&fails, &passes], false, &lost, &nothing).unwrap();
        assert_eq!(done.iter().map(|done| done.item).collect::<Vec<_>>(), [4]);
        assert_eq!(
            unusable.unwrap().to_string(),
            "the device is unusable after item 4; run the others in another process: --only 11"
        );
        let (done, unusable) = run_items(&[&passes, &fails], false, &lost, &nothing).unwrap();
        assert_eq!(done.len(), 2);
        assert!(unusable.unwrap().to_string().ends_with("; no items are left"));
    }
}
