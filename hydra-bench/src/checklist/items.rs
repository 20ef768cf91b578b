//! The items in their order, run one by one.

use super::found::{Found, Verdict, guarded};
use super::subject::{Subject, computes};
use super::{copies, kernels, memory, optimizer, precision, training};
use crate::terminal::{interactive, print};
use anyhow::Result;
use hydra_core::panic_message;
use indicatif::ProgressBar;
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) struct Item {
    pub(crate) number: usize,
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Subject) -> Result<Found>,
}

/// The items in the order in which they run: the cold start, then those on which most depends, then those that take long.
pub(crate) const ITEMS: [Item; 12] = [
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

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Done {
    pub(crate) item: usize,
    pub(crate) name: &'static str,
    #[serde(flatten)]
    pub(crate) found: Found,
    /// The panics meanwhile, also on threads of the device's runtime.
    pub(crate) panics: Vec<String>,
    pub(crate) seconds: f64,
}

/// The messages of panics, which an item reports in place of printing them.
pub(crate) struct Panics(Arc<Mutex<Vec<String>>>);

impl Panics {
    pub(crate) fn collect() -> Self {
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

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The findings of the items, and why those after the last one were not tried.
pub(crate) type Ran = (Vec<Done>, Option<anyhow::Error>);

/// Runs the items until the device does not compute any more: a kernel that fails can spoil it for the whole process.
pub(crate) fn run_items(items: &[&Item], json: bool, subject: &Subject, panics: &Panics) -> Result<Ran> {
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
        [] => "no item is left".to_owned(),
        left => format!("try the others in another process: --only {}", left.join(",")),
    };
    error.context(format!("after item {after} the device is unusable from here on; {rest}"))
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
        let fails = Item { number: 4, name: "fails", run: |_| bail!("a bad kernel") };
        let passes = Item { number: 11, name: "passes", run: |_| Ok(Found::not_applicable("fine")) };
        let nothing = Panics(Arc::default());
        let (done, unusable) =
            run_items(&[&fails, &passes], false, &Subject::cpu(ByteSize::mib(1)), &nothing).unwrap();
        assert_eq!(done.iter().map(|done| done.item).collect::<Vec<_>>(), [4, 11]);
        assert!(unusable.is_none());
        // A device that this build lacks cannot be opened.
        let lost = hydra_engine::DeviceSpec::wgpu(usize::MAX, ByteSize::mib(1));
        let lost = Subject { device: lost, ..Subject::cpu(ByteSize::mib(1)) };
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
}
