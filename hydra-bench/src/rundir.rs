//! The run directory: what a run leaves behind, each file written so that a reader never sees half of it.

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Where run directories are made when nobody says where.
const DEFAULT_PARENT: &str = "runs";
/// Everything a run puts into its directory, and so what `--force` removes.
const CONTENTS: [&str; 9] =
    [SPEC, REPORT, METRICS, TRACE, SCHEDULE, LOSSES, PLANS, MODELS, "report.json.tmp"];
const SPEC: &str = "spec.toml";
const REPORT: &str = "report.json";
const METRICS: &str = "metrics.jsonl";
const TRACE: &str = "trace.json";
const SCHEDULE: &str = "schedule.svg";
const LOSSES: &str = "losses.svg";
const PLANS: &str = "plans";
const MODELS: &str = "models";

/// The directory of one run.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    created: bool,
}

impl RunDir {
    /// Takes the directory `out`, which must be empty or missing unless `force`; then the run that is in it
    /// is removed, and nothing else that may be there.
    pub(crate) fn take(out: &Path, force: bool) -> Result<Self> {
        let shown = out.display();
        let created = !out.exists();
        if !created && !out.is_dir() {
            bail!("the run directory `{shown}` is a file: give another --out");
        }
        fs::create_dir_all(out).with_context(|| format!("the run directory `{shown}` could not be made"))?;
        let entries =
            fs::read_dir(out).with_context(|| format!("the run directory `{shown}` could not be read"))?;
        if entries.count() > 0 && !force {
            bail!(
                "the run directory `{shown}` is not empty: give another --out, or --force to replace the run in it"
            );
        }
        let dir = Self { path: out.to_owned(), created };
        dir.clear()?;
        dir.check_writable()?;
        Ok(dir)
    }

    /// Makes `runs/<command>-<n>` with the first free number.
    pub(crate) fn next(command: &str) -> Result<Self> {
        Self::next_in(Path::new(DEFAULT_PARENT), command)
    }

    fn next_in(parent: &Path, command: &str) -> Result<Self> {
        let make =
            |path: &Path| format!("the run directory `{}` could not be made; give --out", path.display());
        fs::create_dir_all(parent).with_context(|| make(parent))?;
        for number in 1_u32.. {
            let path = parent.join(format!("{command}-{number}"));
            // `create_dir` decides between two programs that take the same number at the same time.
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, created: true }),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| make(&path)),
            }
        }
        bail!("`{}` has no free number left: give --out", parent.display())
    }

    fn clear(&self) -> Result<()> {
        for name in CONTENTS {
            let path = self.path.join(name);
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            match removed {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("`{}` could not be removed", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<()> {
        let probe = self.path.join(".hydra-probe");
        let written = File::create(&probe).and_then(|_| fs::remove_file(&probe));
        written.with_context(|| {
            format!("the run directory `{}` cannot be written to: give another --out", self.path.display())
        })
    }

    /// Gives the directory back after a run that did not begin: removes it, if this run made it.
    pub(crate) fn discard(self) {
        let cleared = self.clear();
        if self.created && cleared.is_ok() {
            // Fails when something else was put there meanwhile, which then stays.
            let _ = fs::remove_dir(&self.path);
        }
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `spec.toml`.
    pub(crate) fn write_spec(&self, text: &str) -> Result<()> {
        self.write(SPEC, text.as_bytes())
    }

    /// Writes `report.json`.
    pub(crate) fn write_report(&self, text: &str) -> Result<()> {
        self.write(REPORT, text.as_bytes())
    }

    /// Writes `schedule.svg`.
    pub(crate) fn write_schedule(&self, svg: &str) -> Result<()> {
        self.write(SCHEDULE, svg.as_bytes())
    }

    /// Writes `losses.svg`.
    pub(crate) fn write_losses(&self, svg: &str) -> Result<()> {
        self.write(LOSSES, svg.as_bytes())
    }

    /// Where the plan of a task is saved: `plans/<task>.json`.
    pub(crate) fn plan_file(&self, task: &str) -> Result<PathBuf> {
        let dir = self.path.join(PLANS);
        fs::create_dir_all(&dir).with_context(|| format!("`{}` could not be made", dir.display()))?;
        Ok(dir.join(format!("{}.json", safe_name(task))))
    }

    /// Where the model of a task is written.
    pub(crate) fn model_dir(&self, task: &str) -> PathBuf {
        self.path.join(MODELS).join(safe_name(task))
    }

    /// Opens `metrics.jsonl`.
    pub(crate) fn metrics(&self) -> Result<File> {
        self.open(METRICS)
    }

    /// Opens `trace.json`.
    pub(crate) fn trace(&self) -> Result<File> {
        self.open(TRACE)
    }

    fn open(&self, name: &str) -> Result<File> {
        let path = self.path.join(name);
        File::create(&path).with_context(|| format!("`{}` could not be made", path.display()))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_atomic(&self.path.join(name), bytes)
    }
}

/// Reads `report.json` of a run directory.
pub(crate) fn read_report(dir: &Path) -> Result<String> {
    if !dir.is_dir() {
        bail!("`{}` is not a run directory: there is no such directory", dir.display());
    }
    let path = dir.join(REPORT);
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound && dir.join(SPEC).is_file() => {
            bail!("`{}` has no {REPORT}: the run has not ended", dir.display())
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("`{}` is not a run directory: it has neither {SPEC} nor {REPORT}", dir.display())
        }
        result => result.with_context(|| format!("`{}` could not be read", path.display())),
    }
}

/// Writes a file under a temporary name, syncs it and renames it, so that nobody reads half of it.
fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let temporary = PathBuf::from(name);
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().with_context(|| format!("`{}` could not be written", path.display()))
}

/// A task's name as the name of a file or directory on any system.
fn safe_name(task: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = task.chars().take(100).map(safe).collect();
    match name.trim_start_matches('.') {
        "" => "task".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_is_taken_once() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("deep/run");
        let dir = RunDir::take(&path, false).unwrap();
        dir.write_spec("x = 1").unwrap();
        let error = RunDir::take(&path, false).unwrap_err();
        assert!(error.to_string().contains("--force"), "{error}");
        fs::write(path.join("notes.txt"), "mine").unwrap();
        fs::create_dir_all(path.join("models/old")).unwrap();
        RunDir::take(&path, true).unwrap();
        assert!(!path.join(SPEC).exists() && !path.join(MODELS).exists());
        assert!(path.join("notes.txt").exists(), "only the run is removed");
    }

    #[test]
    fn a_file_is_no_run_directory() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        fs::write(&path, "").unwrap();
        assert!(RunDir::take(&path, true).unwrap_err().to_string().contains("is a file"));
        assert!(
            RunDir::take(&path.join("below"), false).unwrap_err().to_string().contains("could not be made")
        );
    }

    #[test]
    fn numbers_are_given_one_after_the_other_and_given_back() {
        let root = tempfile::tempdir().unwrap();
        let parent = root.path().join("runs");
        let one = RunDir::next_in(&parent, "select").unwrap();
        assert!(one.path().ends_with("runs/select-1"));
        let two = RunDir::next_in(&parent, "select").unwrap();
        assert!(two.path().ends_with("runs/select-2"));
        one.write_spec("x = 1").unwrap();
        one.discard();
        assert!(RunDir::next_in(&parent, "select").unwrap().path().ends_with("runs/select-1"));
    }

    #[test]
    fn a_directory_that_was_there_is_not_discarded() {
        let root = tempfile::tempdir().unwrap();
        RunDir::take(root.path(), false).unwrap().discard();
        assert!(root.path().is_dir());
    }

    #[test]
    fn reports_are_missed_with_a_reason() {
        let root = tempfile::tempdir().unwrap();
        let says = |dir: &Path| read_report(dir).unwrap_err().to_string();
        assert!(says(&root.path().join("nowhere")).contains("no such directory"));
        assert!(says(root.path()).contains("neither"));
        fs::write(root.path().join(SPEC), "").unwrap();
        assert!(says(root.path()).contains("has not ended"));
        fs::write(root.path().join(REPORT), "{}").unwrap();
        assert_eq!(read_report(root.path()).unwrap(), "{}");
    }

    #[test]
    fn names_are_safe() {
        assert_eq!(safe_name("b16-lr3e-4"), "b16-lr3e-4");
        assert_eq!(safe_name("../../etc/passwd"), "_.._etc_passwd");
        assert_eq!(safe_name("..."), "task");
        assert_eq!(safe_name("a b/c\\d:é"), "a_b_c_d__");
    }
}
