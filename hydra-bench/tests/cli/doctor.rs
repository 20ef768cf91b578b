//! `hydra doctor`, and runs on a GPU on a machine that has none.

use crate::common::{fails, hydra, says, text};
use serde_json::Value;
use std::path::Path;

/// The output of `hydra doctor --json`, and its exit status.
fn report() -> (Value, i32) {
    let output = hydra(&["doctor", "--json"]).output().unwrap();
    assert_eq!(text(&output.stderr), "");
    let report = serde_json::from_str(&text(&output.stdout)).expect("JSON alone on standard output");
    (report, output.status.code().expect("an exit status"))
}

/// The verdict, if no GPU can be used.
fn refusal() -> Option<String> {
    let (report, _) = report();
    let verdict = report["verdict"].as_str().unwrap().to_owned();
    (report["usable"] == false).then_some(verdict)
}

#[test]
fn the_exit_status_is_the_verdict() {
    let (report, status) = report();
    let usable = report["usable"].as_bool().unwrap();
    assert_eq!(status, if usable { 0 } else { 1 });
    assert_eq!(report["missing"].as_array().unwrap().is_empty(), usable);
    assert_eq!(report["findings"]["cuda_in_build"], cfg!(feature = "cuda"));

    let output = hydra(&["doctor"]).output().unwrap();
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(status), "{out}");
    assert_eq!(text(&output.stderr), "");
    assert!(out.ends_with(&format!("{}\n", report["verdict"].as_str().unwrap())), "{out}");
    assert!(out.contains("docs/cuda.md"), "{out}");
    for row in report["rows"].as_array().unwrap() {
        let (about, says) = (row["about"].as_str().unwrap(), row["says"].as_str().unwrap());
        // Free memory may differ between two runs.
        let steady = !["host memory", "CPU devices"].contains(&about) && !about.starts_with("GPU");
        assert!(out.contains(about) && (!steady || out.contains(says)), "{about}: {says} in\n{out}");
    }
}

#[test]
fn the_help_says_what_the_exit_status_means() {
    let help = says(&["doctor", "--help"]);
    assert!(help.contains("exit status is 0 if `--devices cuda:0` can be used, 1 if not"), "{help}");
}

#[test]
fn a_gpu_that_cannot_be_used_is_refused_in_the_same_words_before_anything_else() {
    let Some(refusal) = refusal() else {
        println!("skipped: a GPU can be used here");
        return;
    };
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("run");
    let out = out.to_str().unwrap();
    let on_cuda = ["--devices", "cuda:0"];
    for command in [
        &["--steps", "1", "--out", out][..],
        &["train", "--steps", "1", "--out", out],
        &["train", "--dry-run", "--device-memory", "1GiB", "--out", out],
        // The model is not loaded.
        &["eval", "--model", "no-such-model"],
        &["partition"],
        &["step", "--config", "a"],
    ] {
        let arguments = [command, &on_cuda].concat();
        let output = hydra(&arguments).output().unwrap();
        assert_eq!(text(&output.stderr), format!("error: {refusal}\n"), "{arguments:?}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(!Path::new(out).exists(), "{arguments:?} left a run directory");
    }
    fails(&["--devices", "cuda:0,1/2"], 1, &["`--devices cuda:0,1/2` cannot be used here"]);
}

#[cfg(not(feature = "wgpu"))]
#[test]
fn vulkan_is_refused_in_a_build_without_it() {
    let build = "cargo build --release -p hydra-bench --features wgpu";
    fails(
        &["--devices", "wgpu:0/2"],
        1,
        &["`--devices wgpu:0/2` cannot be used here", "feature `wgpu`", build],
    );
}

#[test]
fn what_is_no_list_of_cards_is_a_usage_error_in_every_build() {
    for devices in ["cuda:", "cuda:x", "cuda:0/0", "wgpu:0,0", "gpu:0"] {
        fails(&["--devices", devices], 2, &[&format!("`{devices}`"), "cpu:NxT", "cuda:GPU,../L", "wgpu:"]);
    }
}

/// A folder with an empty file of each of these names.
fn folder_of(names: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    names.iter().for_each(|name| std::fs::write(root.path().join(name), "").unwrap());
    root
}

#[test]
fn libraries_that_are_none_are_found_and_refused_without_a_panic() {
    if refusal().is_none() {
        println!("skipped: a GPU can be used here");
        return;
    }
    let libraries = folder_of(&["libcuda.so.1", "libnvrtc.so.13"]);
    let headers = folder_of(&[]);
    let mut doctor = hydra(&["doctor"]);
    doctor.env("LD_LIBRARY_PATH", libraries.path()).env("CUDA_PATH", headers.path());
    let output = doctor.output().unwrap();
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{out}");
    assert_eq!(text(&output.stderr), "");
    for name in ["libcuda.so.1", "libnvrtc.so.13"] {
        assert!(out.contains(libraries.path().join(name).to_str().unwrap()), "{name} in\n{out}");
    }
    let lacks = format!("`{}` lacks the headers include/cuda_runtime.h", headers.path().display());
    assert!(out.contains(&lacks), "{out}");
    assert_eq!(out.contains("could not be loaded"), cfg!(feature = "cuda"), "{out}");
}
