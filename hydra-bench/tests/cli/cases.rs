//! Inputs modelled on public bug reports, each with its expected value or refusal: the folder `../shared/cases`, whose
//! README defines the expectations.

use crate::common::{hydra, json, text};
use hydra_core::ByteSize;
use rayon::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;
use tempfile::TempDir;

/// The default tolerance of a loss.
const TOLERANCE: f64 = 1e-5;

#[test]
fn inputs_after_public_reports_have_their_values_or_their_refusals() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/cases");
    if !folder.is_dir() {
        return println!("skipped: the cases are read from `{}`, which is missing", folder.display());
    }
    let inputs = TempDir::new().unwrap();
    unpack(&folder, inputs.path());
    let cases = json(&folder.join("cases.json"));
    let short = cases.as_array().unwrap().par_iter().filter_map(|case| {
        let short = shortfall(case, inputs.path())?;
        Some(format!("{}: {short}", case["id"].as_str().unwrap()))
    });
    let short: Vec<String> = short.collect();
    assert!(short.is_empty(), "{} cases fall short:\n{}", short.len(), short.join("\n"));
}

/// Lays out the folder with its larger files, which are stored once.
fn unpack(folder: &Path, target: &Path) {
    copy(folder, target);
    for (path, name) in json(&folder.join("files.json")).as_object().unwrap() {
        let path = target.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(folder.join("files").join(name.as_str().unwrap()), path).unwrap();
    }
}

fn copy(folder: &Path, target: &Path) {
    fs::create_dir_all(target).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let to = target.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// Returns the expectations of a case that do not hold.
fn shortfall(case: &Value, inputs: &Path) -> Option<String> {
    let out = TempDir::new().unwrap();
    let arguments = case["args"].as_array().unwrap().iter();
    let out = out.path().join("out");
    let arguments = arguments.map(|word| word.as_str().unwrap().replace("{out}", out.to_str().unwrap()));
    let arguments: Vec<String> = arguments.collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = hydra(&arguments).current_dir(inputs).output().unwrap();
    Run::of(&output).shortfall(&case["expect"])
}

/// One run of the program.
struct Run {
    status: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    fn of(output: &Output) -> Self {
        Self { status: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    /// Returns true if standard error has one of these words.
    fn names(&self, words: &Value) -> bool {
        let err = self.err.to_lowercase();
        words
            .as_array()
            .into_iter()
            .flatten()
            .any(|word| err.contains(&word.as_str().unwrap().to_lowercase()))
    }

    /// What matrix products hold of a device, which depends on the processor, if a run was refused and they hold more
    /// than half of its budget.
    fn held_by_products(&self) -> Option<ByteSize> {
        let (before, _) = self.err.split_once(" that are always in use on the device")?;
        let (_, held) = before.rsplit_once("including ")?;
        let (_, budget) = self.err.split_once("and the budget is ")?;
        let (budget, _) = budget.split_once(" bytes")?;
        let held: ByteSize = held.replace(' ', "").parse().ok()?;
        (held.bytes() > budget.parse::<u64>().ok()? / 2).then_some(held)
    }

    fn shortfall(&self, expect: &Value) -> Option<String> {
        let refused = matches!(self.status, Some(1 | 2));
        if self.err.contains("panicked") {
            return Some(format!("a panic: {}", self.err));
        }
        if !expect["refuse"].is_null() {
            let held = (refused && self.names(&expect["refuse"])) || (!refused && expect["or_runs"] == true);
            return (!held).then(|| format!("expected a refusal, found {:?}: {}", self.status, self.err));
        }
        if refused && self.names(&expect["or_refuse"]) {
            return None;
        }
        if let Some(held) = self.held_by_products() {
            println!(
                "skipped: matrix products hold {held} of each device on this processor, more than half of the budget"
            );
            return None;
        }
        if self.status != Some(0) {
            return Some(format!("status {:?}: {}", self.status, self.err));
        }
        if !expect["note"].is_null() {
            return (!self.names(&expect["note"])).then(|| format!("no note in: {}", self.err));
        }
        if self.names(&expect["or_note"]) {
            return None;
        }
        figures(&serde_json::from_str(&self.out).unwrap(), expect)
    }
}

/// Returns the figures of a successful run that differ from the expected ones.
fn figures(report: &Value, expect: &Value) -> Option<String> {
    if let Some(expected) = expect["loss"].as_f64() {
        let found = report["loss"].as_f64().unwrap();
        let tolerance = expect["tolerance"].as_f64().unwrap_or(TOLERANCE);
        if (found - expected).abs() > tolerance {
            return Some(format!("loss {found}, expected {expected}"));
        }
    }
    let targets = &report["predicted_tokens"];
    if !expect["targets"].is_null() && *targets != expect["targets"] {
        return Some(format!("{targets} targets, expected {}", expect["targets"]));
    }
    if expect["min_targets"].as_u64() > targets.as_u64() {
        return Some(format!("{targets} targets and no note, expected {} at least", expect["min_targets"]));
    }
    if expect["validated"] == true && report["tasks"][0]["validation"].is_null() {
        return Some("no validation loss".to_owned());
    }
    let devices = report["devices"].as_array().into_iter().flatten().filter(|_| expect["budget"] == true);
    let over = devices.filter(|device| device["peak_bytes"].as_u64() > device["budget_bytes"].as_u64());
    let over: Vec<String> = over.map(Value::to_string).collect();
    (!over.is_empty()).then(|| format!("a peak above its budget: {}", over.join(", ")))
}
