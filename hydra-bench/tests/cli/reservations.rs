//! Runs that share a machine: each sees the memory that the others have reserved.

use crate::common::{grid, hydra, json, notes, spawn_with, text, wait_for};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

const HOST: [&str; 2] = ["--host-memory", "1GiB"];

fn with_reservations(folder: &Path, arguments: &[&str]) -> Output {
    hydra(arguments).env("HYDRA_RESERVATIONS", folder).output().unwrap()
}

/// The entries in a folder of reservations.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|ending| ending == "json")).collect()
}

#[test]
fn what_a_run_has_admitted_is_visible_until_it_ends_however_it_does() {
    let root = tempfile::tempdir().unwrap();
    let (folder, out) = (root.path().join("reservations"), root.path().join("first"));
    let needs = hydra(&[&grid("--dry-run --json")[..], &HOST].concat()).output().unwrap();
    let needs: serde_json::Value = serde_json::from_str(&text(&needs.stdout)).unwrap();
    let named = ["--out", out.to_str().unwrap()];
    let endless = [&grid("--steps 1000000 --progress none")[..], &HOST, &named].concat();
    let mut first = spawn_with(&endless, folder.to_str().unwrap(), Stdio::null());
    wait_for(|| !entries(&folder).is_empty());
    let entry = json(&entries(&folder)[0]);
    assert_eq!(entry["run"], out.to_str().unwrap());
    // The budgets of two CPU devices are host memory too.
    let admitted = needs["host_admitted_bytes"].as_u64().unwrap() + (128 << 20);
    assert_eq!(entry["host_bytes"], admitted);

    let named = format!("run `{}` (process {}) has reserved ", out.display(), first.id());
    let dry = with_reservations(&folder, &grid("--dry-run"));
    let said = notes(&text(&dry.stderr));
    assert!(dry.status.success() && said.starts_with(&format!("note: {named}")), "{said}");
    assert!(said.ends_with(" of host memory are available\n") && said.lines().count() == 1, "{said}");
    let refused = with_reservations(&folder, &grid("--dry-run --host-memory 1KiB"));
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains("(each was planned): --host-memory"), "{said}");
    assert!(said.contains(&format!("; {named}")), "{said}");
    assert_eq!(said.matches(&named).count(), 1, "other runs are named once: {said}");
    let doctor = text(&with_reservations(&folder, &["doctor"]).stdout);
    assert!(doctor.lines().any(|line| line.starts_with("other runs") && line.contains(&named)), "{doctor}");
    assert_eq!(entries(&folder).len(), 1, "what trains nothing has no entry");

    first.kill().unwrap();
    first.wait().unwrap();
    let out = root.path().join("second");
    let second =
        with_reservations(&folder, &[&grid("--steps 1")[..], &["--out", out.to_str().unwrap()]].concat());
    assert!(second.status.success(), "{}", text(&second.stderr));
    assert_eq!(notes(&text(&second.stderr)), "", "a run that was killed has admitted nothing");
    assert_eq!(entries(&folder).len(), 0, "and one that has ended leaves nothing");
}

#[test]
fn a_run_goes_on_where_there_can_be_no_reservations() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    let output = with_reservations(&file.join("below"), &grid("--dry-run"));
    let said = notes(&text(&output.stderr));
    assert!(output.status.success() && said.starts_with("warning: "), "{said}");
    assert!(said.contains("/file/below` could not be used") && said.contains("HYDRA_RESERVATIONS"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    // The variable's old name works, too.
    let mut old = hydra(&grid("--dry-run"));
    old.env_remove("HYDRA_RESERVATIONS").env("HYDRA_LEDGER", file.join("below"));
    assert_eq!(notes(&text(&old.output().unwrap().stderr)), said);
}
