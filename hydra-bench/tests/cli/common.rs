//! Running the program as a user does.

use assert_cmd::Command;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Output, Stdio};

/// The program with these arguments, in a separate folder for default run directories, and without memory reservations, so
/// that tests do not wait for each other.
pub fn hydra(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("hydra").unwrap();
    command.args(arguments).env_remove("HYDRA_LOG").env("HYDRA_RESERVATIONS", "").env("RUST_BACKTRACE", "1");
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    command
}

/// The program where every file is limited to 64 KiB, as on a disk that is full.
#[cfg(target_os = "linux")]
pub fn with_small_files(arguments: &[&str]) -> Output {
    let mut command = std::process::Command::new("sh");
    // POSIX shells count in blocks of 512 bytes.
    command.args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_hydra")]);
    command.args(arguments).env_remove("HYDRA_LOG").env("HYDRA_RESERVATIONS", "").output().unwrap()
}

/// The lines on standard error without progress, and without the notes about initial weights and about the last block of a text,
/// which is hardly ever whole in the short texts of tests.
pub fn notes(err: &str) -> String {
    let is_progress = |line: &&str| {
        let of_run = [
            "run directory: ",
            "total: ",
            "note: weights",
            "note: the last ",
            "note: by default --",
            "prepared in ",
            "reading models and data, ",
            "searching for settings ",
        ]
        .iter()
        .any(|start| line.starts_with(start));
        let of_task = [": validation ", ": test ", ": done ", ": stopped after ", ": failed after "];
        let is_note = ["note: ", "error: ", "warning: ", "  "].iter().any(|start| line.starts_with(start));
        let of_task = of_task.iter().any(|part| line.contains(part)) || line.contains(" layers ");
        of_run || (of_task && !is_note)
    };
    err.split_inclusive('\n').filter(|line| !is_progress(line)).collect()
}

/// Standard output of a command that succeeds, and the [notes] on standard error. Arguments are separated by white space.
pub fn noted(command: &str) -> [String; 2] {
    let output = hydra(&command.split_whitespace().collect::<Vec<_>>()).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "{command}: {err}");
    [text(&output.stdout), notes(&err)]
}

/// Standard output of a run that succeeds and prints only progress on standard error.
pub fn says(arguments: &[&str]) -> String {
    let output = hydra(arguments).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {err}{out}");
    assert_eq!(notes(&err), "", "{arguments:?} is not quiet in a pipe");
    out
}

/// Asserts that a run fails with this status and prints all of `parts` on standard error, without a backtrace and with nothing
/// on standard output.
pub fn fails(arguments: &[&str], status: i32, parts: &[&str]) {
    let output = hydra(arguments).output().unwrap();
    let (out, err) = (text(&output.stdout), notes(&text(&output.stderr)));
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {err}{out}");
    assert_eq!(out, "", "{arguments:?}");
    assert!(err.starts_with("error: "), "{arguments:?}: {err}");
    assert!(!err.contains("backtrace") && !err.contains("panicked"), "{arguments:?}: {err}");
    for part in parts {
        assert!(err.contains(part), "{arguments:?}: {part:?} in {err}");
    }
}

/// The arguments of a small grid: two configurations on two devices, and `more`.
pub fn grid(more: &'static str) -> Vec<&'static str> {
    let base = "select --batch 4 --lr 1e-3,3e-4 --context 32 --devices cpu:2x1 --device-memory 64MiB";
    base.split_whitespace().chain(more.split_whitespace()).collect()
}

/// A file of JSON.
pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The results of a task that must depend neither on devices nor on interruptions.
pub fn results(task: &Value) -> [Value; 4] {
    ["weights_sha256", "losses", "evaluations", "test"].map(|key| task[key].clone())
}

/// Asserts that `hydra eval` measures the accuracy and the loss of a model's task on the test split of this data.
pub fn assert_evaluates_as_tested(model: &str, data: &str, task: &Value) {
    let said = says(&["eval", "--model", model, "--data", data, "--devices", "cpu:1x1", "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["metrics"]["accuracy"], task["test"]["metrics"]["accuracy"]);
    let (loss, tested) = (said["loss"].as_f64().unwrap(), task["test"]["loss"].as_f64().unwrap());
    assert!((loss - tested).abs() <= 1e-5 * tested, "{loss} for {tested}");
}

/// Bytes that must be text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The program with these arguments, while it runs.
pub fn spawn(arguments: &[&str], out: Stdio) -> Child {
    spawn_with(arguments, "", out)
}

/// The same with memory reservations in this folder.
pub fn spawn_with(arguments: &[&str], reservations: &str, out: Stdio) -> Child {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_hydra"));
    command.args(arguments).env_remove("HYDRA_LOG").env("HYDRA_RESERVATIONS", reservations);
    command.stdout(out).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Presses Ctrl-C.
pub fn interrupt(child: &Child) {
    signal(child, "INT");
}

/// A program in the background, which ends with the test, however that ends.
pub struct Running(Option<Child>);

impl Running {
    pub fn new(child: Child) -> Self {
        Self(Some(child))
    }

    /// Waits for its end and returns its output.
    pub fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Kills it and returns its output.
    pub fn killed(mut self) -> Output {
        self.0.as_mut().unwrap().kill().unwrap();
        self.output()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // The program may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A stopped program, which keeps its files and locks until it is killed when this is dropped.
pub struct Halted(Child);

impl Halted {
    pub fn new(child: Child) -> Self {
        let halted = Self(child);
        signal(&halted.0, "STOP");
        halted
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn signal(child: &Child, name: &str) {
    let to = child.id().to_string();
    let sent = std::process::Command::new("kill").args(["-s", name, &to]).status().unwrap();
    assert!(sent.success());
}

/// Waits until `done` returns true, at most two minutes.
#[expect(clippy::disallowed_methods, reason = "the progress of another process is visible only in its files")]
pub fn wait_for(done: impl Fn() -> bool) {
    for _ in 0..2400 {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("the run did not start within two minutes");
}

/// Begins a run in `out`, kills it when its events are `enough`, and resumes it behind a faster link. It must still be training
/// when it is killed: it has fewer than `all` events of this kind.
pub fn kill_and_resume(command: &str, out: &Path, enough: impl Fn(&str) -> bool, (kind, all): (&str, usize)) {
    let command = format!("{command} --out {}", out.display());
    let mut child = spawn(&command.split_whitespace().collect::<Vec<_>>(), Stdio::piped());
    let events = || std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    wait_for(|| enough(&events()));
    child.kill().unwrap();
    child.wait().unwrap();
    let found = events().matches(&format!("\"{kind}\"")).count();
    assert!(found < all, "the run was killed before its end: {found} of {all} events `{kind}`");
    noted(&format!("resume {} --link 8GiB/s", out.display()));
}
