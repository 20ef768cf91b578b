//! Experiment trackers: `--tensorboard` and `--mlflow`.

use crate::common::{grid, hydra, notes, says, text};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the event file of each task, by name.
fn events(dir: &Path) -> Vec<PathBuf> {
    let entries = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries(dir).flat_map(|task| entries(&task)).collect();
    files.sort();
    files
}

#[test]
fn a_run_is_tracked_and_what_nobody_takes_is_said() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let out = dir.to_str().unwrap();
    // No server listens on the reserved port.
    let uri = "http://127.0.0.1:1";
    let more = ["--out", out, "--tensorboard", "--mlflow", uri];
    let output = hydra(&[&grid("--steps 3 --cuts 2,4")[..], &more].concat()).output().unwrap();
    let (err, done) = (notes(&text(&output.stderr)), output.status.success());
    assert!(done, "no tracker ends a run: {err}");
    let says_so = err.starts_with("warning: MLflow: ") && err.contains("metrics could not be sent");
    assert!(says_so && err.contains(&format!("`hydra resume {out} --mlflow {uri}` sends them")), "{err}");
    let written = events(&dir.join("tensorboard"));
    assert_eq!(written.len(), 2);

    // Nothing is left to train, and another tracker receives everything anyway.
    let later = root.path().join("later");
    let command = ["resume", out, "--tensorboard", later.to_str().unwrap()];
    assert!(hydra(&command).output().unwrap().status.success());
    let read = |files: &[PathBuf]| files.iter().map(|file| fs::read(file).unwrap()).collect::<Vec<_>>();
    assert!(read(&events(&later)) == read(&written));
    says(&[&grid("--steps 1 --cuts 2,4")[..], &["--out", out, "--force"]].concat());
    assert!(!dir.join("tensorboard").exists());
}
