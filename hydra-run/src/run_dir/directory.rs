//! The run directory: the files of a run. Each file is replaced atomically, so that readers never see a partial one.

use super::former::current_report;
use crate::run_dir::paths::*;
use anyhow::{Context, Result, bail, ensure};
use hydra_core::{ByteSize, UNFINISHED, replace_file};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The parent of run directories if `--out` is not given.
const DEFAULT_PARENT: &str = "runs";
/// Every file and folder that a run may create, which is what `--force` removes.
const CONTENTS: [&str; 21] = [
    SPEC,
    REPORT,
    METRICS,
    TRACE,
    SCHEDULE,
    LOSSES,
    LEADERBOARD,
    MEMORY,
    PAGE,
    WORKLOAD,
    PLANS,
    MODELS,
    CHECKPOINTS,
    STATES,
    REFERENCE,
    SEARCH,
    TENSORBOARD,
    MLFLOW,
    CONTROL,
    SOCKET,
    // The socket before it accepts connections.
    "control.new",
];
/// The settings of a run.
pub const SPEC: &str = "spec.toml";
/// The results of a run, once it has ended.
pub const REPORT: &str = "report.json";
/// The events of a run, one JSON object a line.
pub const METRICS: &str = "metrics.jsonl";
/// The shard tasks of a run, for trace viewers.
pub const TRACE: &str = "trace.json";
pub(crate) const SCHEDULE: &str = "schedule.svg";
pub(crate) const LOSSES: &str = "losses.svg";
pub(crate) const LEADERBOARD: &str = "leaderboard.svg";
pub(crate) const MEMORY: &str = "memory.svg";
/// The report as a page.
pub const PAGE: &str = "report.html";
pub(crate) const WORKLOAD: &str = "workload.json";
pub(crate) const PLANS: &str = "plans";
pub(crate) const MODELS: &str = "models";
const CHECKPOINTS: &str = "checkpoints";
const STATES: &str = "states";
/// The log-probabilities of preference data by the reference, a file for each model and data.
pub(crate) const REFERENCE: &str = "reference";
/// TensorBoard event files of the tasks, if requested.
pub(crate) const TENSORBOARD: &str = "tensorboard";
/// The part of the run that the MLflow server already has.
pub(crate) const MLFLOW: &str = "mlflow.json";
/// The results reported to a search.
pub(crate) const SEARCH: &str = "search.jsonl";
/// Run-control commands that took effect.
pub(crate) const CONTROL: &str = "control.jsonl";
/// The socket for run-control commands.
pub const SOCKET: &str = "control.sock";

/// The directory of one run. It is checked on construction; earlier contents are removed only when a run begins.
#[derive(Debug, Default)]
pub struct RunDir {
    path: PathBuf,
    force: bool,
    /// True if this run made the directory.
    created: bool,
    /// True if the run files in the directory belong to this run.
    begun: bool,
    /// True if an earlier run is resumed here: its files stay.
    pub(crate) resumed: bool,
    /// The directory, locked until this is dropped or the process ends.
    lock: Option<File>,
}

/// Absolute paths of the per-task files.
#[derive(Clone, Debug)]
pub(crate) struct TaskFiles {
    checkpoints: PathBuf,
    models: PathBuf,
    states: PathBuf,
}

impl TaskFiles {
    /// Returns the checkpoint file of a task: `checkpoints/<task>.safetensors`.
    pub(crate) fn checkpoint_file(&self, task: &str) -> PathBuf {
        self.checkpoints.join(format!("{}.safetensors", safe_name(task)))
    }

    /// Returns the folder of all models.
    pub(crate) fn models(&self) -> &Path {
        &self.models
    }

    /// Returns the model directory of a task.
    pub(crate) fn model_dir(&self, task: &str) -> PathBuf {
        self.models.join(safe_name(task))
    }

    /// Returns the file of a task's state after `step` minibatches, from which other tasks are forked:
    /// `states/<task>-<step>.safetensors`.
    pub(crate) fn state_file(&self, task: &str, step: usize) -> PathBuf {
        self.states.join(format!("{}-{step}.safetensors", safe_name(task)))
    }

    /// Removes the checkpoint and the model of a task, but not its states, from which other tasks are forked.
    pub(crate) fn remove_task(&self, task: &str) -> Result<()> {
        remove(&self.checkpoint_file(task))?;
        remove(&self.model_dir(task))
    }
}

/// Bytes that a run may write to its directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileBytes {
    /// One checkpoint of each task.
    pub(crate) checkpoints: u64,
    /// A checkpoint being written, while the one that it replaces still exists.
    pub(crate) next: u64,
    /// All models.
    pub(crate) models: u64,
}

impl FileBytes {
    /// Returns the peak of the bytes in addition to `checkpoints`. A checkpoint and a model are never written at the same time.
    fn beyond_checkpoints(&self) -> u64 {
        self.models.max(self.next)
    }
}

impl RunDir {
    /// Checks `out`, which must be writable, and empty or missing unless `force`. Creates and changes nothing.
    pub(crate) fn at(out: &Path, force: bool) -> Result<Self> {
        check_utf8(out)?;
        let mut dir = Self { path: out.to_owned(), force, ..Self::default() };
        dir.check_usable()?;
        if out.is_dir() {
            dir.check_replaceable()?;
            // `begin` takes the lock again, and keeps it.
            dir.take()?;
            dir.lock = None;
        }
        Ok(dir)
    }

    /// Opens and locks the directory of a run to resume.
    pub fn resume(path: &Path) -> Result<Self> {
        let shown = path.display();
        ensure!(path.is_dir(), "`{shown}` is not a run directory: there is no such directory");
        check_utf8(path)?;
        let mut dir = Self { path: path.to_owned(), resumed: true, ..Self::default() };
        ensure!(dir.file(SPEC).is_file(), "`{shown}` is not a run directory: it has no {SPEC}");
        check_writable(path).with_context(|| format!("the run directory `{shown}` cannot be written to"))?;
        dir.take()?;
        Ok(dir)
    }

    /// Locks the directory against other runs until this one has ended.
    fn take(&mut self) -> Result<()> {
        let shown = self.path.display();
        // Some systems cannot open directories, and some file systems have no locks.
        let Ok(dir) = File::open(&self.path) else { return Ok(()) };
        match dir.try_lock() {
            Err(TryLockError::WouldBlock) => {
                bail!("another run is using the directory `{shown}`: wait until it has ended, or stop it")
            }
            Ok(()) | Err(TryLockError::Error(_)) => self.lock = Some(dir),
        }
        Ok(())
    }

    /// Checks that a default run directory could be created, without creating it.
    pub(crate) fn parent_of_next() -> Result<Self> {
        let dir = Self { path: DEFAULT_PARENT.into(), force: true, ..Self::default() };
        check_utf8(&dir.path)?;
        dir.check_usable()?;
        Ok(dir)
    }

    fn check_usable(&self) -> Result<()> {
        let shown = self.path.display();
        check_writable(&self.check_vacant()?)
            .with_context(|| format!("the run directory `{shown}` is not writable: pass another --out"))
    }

    /// Creates the directory, or removes the files of the run in it; foreign files stay.
    pub(crate) fn begin(&mut self) -> Result<()> {
        if self.resumed {
            self.remove_partial_files()?;
            // It would be taken for the report of the resumed run.
            return remove(&self.file(REPORT));
        }
        let made = !self.path.exists();
        fs::create_dir_all(&self.path)
            .with_context(|| format!("the run directory `{}` could not be created", self.path.display()))?;
        self.take()?;
        self.created |= made;
        // Another run may have started here while this one was measuring.
        self.check_usable()?;
        self.check_replaceable()?;
        self.clear()?;
        self.begun = true;
        Ok(())
    }

    /// Returns the directory or its nearest existing ancestor. Fails if it is not empty and must not be replaced, or cannot be
    /// created.
    fn check_vacant(&self) -> Result<PathBuf> {
        let shown = self.path.display();
        let path = std::path::absolute(&self.path)
            .with_context(|| format!("the run directory `{shown}` could not be created"))?;
        // A dangling link exists, and is not a directory.
        let exists = |path: &&Path| fs::symlink_metadata(path).is_ok();
        let existing = path.ancestors().find(exists).unwrap_or(&path);
        if existing != path && !existing.is_dir() {
            bail!("the run directory `{shown}` could not be created: `{}` is a file", existing.display());
        }
        ensure!(existing.is_dir(), "the run directory `{shown}` is a file: pass another --out");
        if existing == path && !self.force {
            let entries = fs::read_dir(&path);
            let entries =
                entries.with_context(|| format!("the run directory `{shown}` could not be read"))?;
            ensure!(
                entries.count() == 0,
                "the run directory `{shown}` is not empty: pass another --out, or --force to replace the run in it"
            );
        }
        Ok(existing.to_owned())
    }

    /// Fails if the directory has no run but an entry with the name of a run's file, such as a user's own `models`.
    fn check_replaceable(&self) -> Result<()> {
        let (shown, exists) =
            (self.path.display(), |name: &&str| fs::symlink_metadata(self.file(name)).is_ok());
        match CONTENTS.into_iter().find(exists) {
            Some(name) if !exists(&SPEC) => bail!(
                "`{shown}` is not a run directory (it has no {SPEC}), and its `{name}` would be lost: pass another \
                --out, or move `{name}` away"
            ),
            _ => Ok(()),
        }
    }

    /// Creates `runs/<command>-<n>` with the first unused number.
    pub(crate) fn next(command: &str) -> Result<Self> {
        Self::next_in(Path::new(DEFAULT_PARENT), command)
    }

    fn next_in(parent: &Path, command: &str) -> Result<Self> {
        let make = |path: &Path| {
            format!("the run directory `{}` could not be created: pass --out DIR", path.display())
        };
        check_utf8(parent)?;
        fs::create_dir_all(parent).with_context(|| make(parent))?;
        for number in 1_u32.. {
            let path = parent.join(format!("{command}-{number}"));
            // `create_dir` is atomic: of two programs that try one number, one succeeds.
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, created: true, ..Self::default() }),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| make(&path)),
            }
        }
        bail!("no unused run number in `{}`: pass --out DIR", parent.display())
    }

    fn clear(&self) -> Result<()> {
        // The spec marks a run directory, so it is removed last.
        CONTENTS.iter().rev().try_for_each(|name| {
            remove(&self.file(name))?;
            // A partial file of a run that was killed.
            remove(&self.file(&format!("{name}{UNFINISHED}")))
        })
    }

    /// Removes the partial files of a run that was killed.
    fn remove_partial_files(&self) -> Result<()> {
        let inside = [PLANS, CHECKPOINTS, STATES, REFERENCE].map(|name| self.path.join(name));
        let inside = inside.into_iter().chain(entries(&self.path.join(MODELS)));
        let parts = inside.flat_map(|dir| entries(&dir)).filter(|path| path.is_file());
        let here = CONTENTS.iter().map(|name| self.path.join(format!("{name}{UNFINISHED}")));
        let mut parts = parts.filter(|path| path.to_string_lossy().ends_with(UNFINISHED)).chain(here);
        parts.try_for_each(|path| remove(&path))
    }

    /// Removes the files of a run that failed to start, and the directory if this run created it.
    pub(crate) fn discard(self) {
        if self.begun {
            // The error that ended the run is reported, not this one.
            let _ = self.clear();
        }
        if self.created {
            // Fails if the directory has other files by now, which stay.
            let _ = fs::remove_dir(&self.path);
        }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Fails if the disk has too little free space for checkpoints and models, or for `masters` (a directory and its bytes).
    pub(crate) fn check_disk_space(&self, files: &FileBytes, masters: Option<(&Path, u64)>) -> Result<()> {
        // A resumed run replaces its checkpoints.
        let replaced = entries(&self.file(CHECKPOINTS)).filter_map(|path| path.metadata().ok());
        let replaced: u64 = replaced.map(|file| file.len()).sum();
        let more = files.checkpoints.saturating_sub(replaced).saturating_add(files.beyond_checkpoints());
        let here = existing(&self.path);
        let same_disk_masters =
            masters.filter(|(dir, _)| same_disk(existing(dir), here)).map_or(0, |(_, bytes)| bytes);
        match free_bytes(here) {
            Some(free) if more > 0 && more.saturating_add(same_disk_masters) > free => bail!(
                "not enough disk space: the run directory `{}` may grow by {} of checkpoints and models, with {} of master \
                weights on the same disk, and {} are free: pass another --out{}",
                self.path.display(),
                ByteSize(more),
                ByteSize(same_disk_masters),
                ByteSize(free),
                if files.checkpoints > 0 { ", or --checkpoint-every never" } else { "" }
            ),
            _ => {}
        }
        match masters.and_then(|(dir, bytes)| Some((dir, bytes, free_bytes(existing(dir))?))) {
            Some((dir, bytes, free)) if bytes > free => bail!(
                "not enough disk space: master weights and optimizer state take {} in `{}`, and {} are free: pass another \
                --disk, or a larger --host-memory",
                ByteSize(bytes),
                dir.display(),
                ByteSize(free)
            ),
            _ => Ok(()),
        }
    }

    /// Returns the paths of the per-task files.
    pub(crate) fn task_files(&self) -> Result<TaskFiles> {
        let folder = |name: &str| absolute(&self.file(name));
        Ok(TaskFiles { checkpoints: folder(CHECKPOINTS)?, models: folder(MODELS)?, states: folder(STATES)? })
    }

    /// Removes the states from which tasks were forked; ignores errors.
    pub(crate) fn remove_states(&self) {
        // Leftover states do no harm.
        let _ = remove(&self.file(STATES));
    }

    /// Returns the checkpoint file of a task: `checkpoints/<task>.safetensors`.
    pub fn checkpoint_file(&self, task: &str) -> Result<PathBuf> {
        Ok(self.task_files()?.checkpoint_file(task))
    }

    /// Writes `spec.toml`. A resumed run keeps the spec that it has.
    pub(crate) fn write_spec(&self, text: &str) -> Result<()> {
        if self.resumed { Ok(()) } else { self.write(SPEC, text) }
    }

    /// Returns the plan file of a task, `plans/<task>.json`, and creates its folder.
    pub(crate) fn plan_file(&self, task: &str) -> Result<PathBuf> {
        let dir = self.file(PLANS);
        fs::create_dir_all(&dir).with_context(|| could_not(&dir, "created"))?;
        Ok(dir.join(format!("{}.json", safe_name(task))))
    }

    /// Returns the model directory of a task as an absolute path.
    pub fn model_dir(&self, task: &str) -> Result<PathBuf> {
        Ok(self.task_files()?.model_dir(task))
    }

    /// Opens `metrics.jsonl`. A resumed run appends after the last complete line.
    pub(crate) fn metrics(&self) -> Result<File> {
        if !self.resumed {
            return self.open(METRICS);
        }
        let path = self.file(METRICS);
        let open = || {
            let mut file = File::options().create(true).read(true).append(true).open(&path)?;
            let whole = end_of_lines(&mut file)?;
            file.set_len(whole)?;
            Ok::<_, std::io::Error>(file)
        };
        open().with_context(|| could_not(&path, "opened"))
    }

    pub(crate) fn open(&self, name: &str) -> Result<File> {
        let path = self.file(name);
        File::create(&path).with_context(|| could_not(&path, "created"))
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> Result<()> {
        write_in(&self.path, name, text)
    }
}

/// Writes a file of a run directory, without regard to its lock.
pub fn write_in(dir: &Path, name: &str, text: &str) -> Result<()> {
    let path = dir.join(name);
    let written = replace_file(&path, |file| file.write_all(text.as_bytes()));
    written.with_context(|| could_not(&path, "written"))
}

/// Returns true if a run holds the lock of a directory now. False if the system has no such locks.
pub fn is_taken(dir: &Path) -> bool {
    // The lock is released immediately; a shared one allows concurrent checks.
    File::open(dir).is_ok_and(|dir| matches!(dir.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Returns true if a directory has a run that has started and has no report yet.
pub fn is_unfinished(dir: &Path) -> bool {
    dir.join(SPEC).is_file() && !dir.join(REPORT).exists()
}

/// Reads `report.json` of a run directory, with the current spellings.
pub fn read_report(dir: &Path) -> Result<String> {
    let (path, shown) = (dir.join(REPORT), dir.display());
    ensure!(dir.is_dir(), "`{shown}` is not a run directory: there is no such directory");
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound && dir.join(SPEC).is_file() => bail!(
            "`{shown}` has no {REPORT}: the run has not ended; if it was interrupted, continue it with: hydra resume {shown}"
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("`{shown}` is not a run directory: it has neither {SPEC} nor {REPORT}")
        }
        result => result.map(current_report).with_context(|| could_not(&path, "read")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_is_taken_once() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("deep/run");
        let mut dir = RunDir::at(&path, false).unwrap();
        let [mut late, late_again] = [(); 2].map(|()| RunDir::at(&path, false).unwrap());
        assert!(!root.path().join("deep").exists(), "it is made when the run begins");
        dir.begin().unwrap();
        dir.write_spec("x = 1").unwrap();
        assert!(late.begin().unwrap_err().to_string().contains("another run is using the directory"));
        late.discard();
        assert!(
            RunDir::at(&path, true).unwrap_err().to_string().contains("another run is using the directory")
        );
        assert!(
            RunDir::resume(&path).unwrap_err().to_string().contains("another run is using the directory")
        );
        assert!(path.join(SPEC).exists(), "who could not take it leaves it as it was");
        drop(dir);
        let mut late = late_again;
        for error in [RunDir::at(&path, false).unwrap_err(), late.begin().unwrap_err()] {
            assert!(error.to_string().contains("--force"), "{error}");
        }
        drop(late);
        fs::write(path.join("notes.txt"), "mine").unwrap();
        fs::create_dir_all(path.join("models/old")).unwrap();
        RunDir::at(&path, true).unwrap().discard();
        assert!(
            path.join(SPEC).exists() && path.join("models/old").exists(),
            "nothing goes before it begins"
        );
        RunDir::at(&path, true).unwrap().begin().unwrap();
        assert!(!path.join(SPEC).exists() && !path.join(MODELS).exists());
        assert!(path.join("notes.txt").exists(), "only the run is removed");
    }

    #[test]
    fn what_only_has_the_name_of_a_runs_file_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let mine = root.path().join("models/mine");
        fs::create_dir_all(&mine).unwrap();
        let error = RunDir::at(root.path(), true).unwrap_err().to_string();
        let says = ["is not a run directory", "`models` would be lost"];
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
        fs::rename(root.path().join(MODELS), root.path().join("kept")).unwrap();
        let mut dir = RunDir::at(root.path(), true).unwrap();
        fs::create_dir_all(&mine).unwrap();
        assert!(dir.begin().unwrap_err().to_string().contains("would be lost"), "nor what has come since");
        dir.discard();
        assert!(mine.is_dir());
    }

    #[test]
    fn a_run_that_goes_on_leaves_what_is_there() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let mut dir = RunDir::at(&path, false).unwrap();
        dir.begin().unwrap();
        dir.write_spec("x = 1").unwrap();
        dir.write(REPORT, "{}").unwrap();
        dir.metrics().unwrap().write_all(b"{\"a\": 1}\n{\"half").unwrap();
        drop(dir);
        let dir = RunDir::resume(&path).unwrap();
        assert!(dir.file(REPORT).is_file());
        dir.discard();
        assert!(path.join(REPORT).exists(), "one that is refused removes nothing");
        let mut dir = RunDir::resume(&path).unwrap();
        let half = ["schedule.svg.part", "plans/a.json.part", "models/a/model.safetensors.part"];
        let mine = ["notes.part", "plans/a.json", "checkpoints/a.safetensors.part/it"];
        for name in half.iter().chain(&mine).map(|name| path.join(name)) {
            fs::create_dir_all(name.parent().unwrap()).unwrap();
            fs::write(name, "").unwrap();
        }
        dir.begin().unwrap();
        assert!(!dir.file(REPORT).is_file(), "the report of the run before is not this one's");
        assert!(!half.iter().any(|name| path.join(name).exists()), "what is half written goes");
        assert!(mine.iter().all(|name| path.join(name).exists()), "and nothing else");
        dir.write_spec("x = 2").unwrap();
        dir.metrics().unwrap().write_all(b"{\"b\": 2}\n").unwrap();
        assert_eq!(fs::read_to_string(path.join(SPEC)).unwrap(), "x = 1");
        assert_eq!(fs::read_to_string(path.join(METRICS)).unwrap(), "{\"a\": 1}\n{\"b\": 2}\n");
    }

    #[test]
    fn a_run_whose_checkpoints_find_no_room_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let dir = RunDir::at(&root.path().join("deep/run"), false).unwrap();
        let files = |checkpoints, models| FileBytes { checkpoints, next: 0, models };
        dir.check_disk_space(&files(1, 1), Some((root.path(), 1))).unwrap();
        if free_bytes(root.path()).is_some() {
            let masters = Some((root.path(), u64::MAX / 2));
            let refused = |files, masters| dir.check_disk_space(&files, masters).unwrap_err().to_string();
            let said = refused(files(1, 0), masters);
            assert!(
                said.contains(" of checkpoints and models, with ") && said.contains(" of master weights"),
                "{said}"
            );
            let said = refused(files(0, 0), masters);
            assert!(said.contains("master weights and optimizer state take"), "{said}");
            let said = refused(files(u64::MAX / 2, 0), None);
            assert!(said.contains(" of checkpoints and models, with "), "{said}");
            assert!(said.contains("--checkpoint-every never"), "{said}");
        }
    }

    #[test]
    fn a_file_is_no_run_directory() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        fs::write(&path, "").unwrap();
        assert!(RunDir::at(&path, true).unwrap_err().to_string().contains("is a file"));
        let error = RunDir::at(&path.join("below/it"), false).unwrap_err().to_string();
        assert!(error.contains("could not be created") && error.contains("is a file"), "{error}");
    }

    #[test]
    fn numbers_are_given_one_after_the_other_and_given_back() {
        let root = tempfile::tempdir().unwrap();
        let parent = root.path().join("runs");
        let mut one = RunDir::next_in(&parent, "select").unwrap();
        assert!(one.path().ends_with("runs/select-1"));
        let two = RunDir::next_in(&parent, "select").unwrap();
        assert!(two.path().ends_with("runs/select-2"));
        one.begin().unwrap();
        one.write_spec("x = 1").unwrap();
        one.discard();
        assert!(RunDir::next_in(&parent, "select").unwrap().path().ends_with("runs/select-1"));
        let root = tempfile::tempdir().unwrap();
        let mut dir = RunDir::at(root.path(), false).unwrap();
        dir.begin().unwrap();
        dir.discard();
        assert!(root.path().is_dir(), "a directory that was there is not discarded");
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
        let names = ["b16-lr3e-4", "../../etc/passwd", "...", "a b/c\\d:é"].map(safe_name);
        assert_eq!(names, ["b16-lr3e-4", "_.._etc_passwd", "task", "a_b_c_d__"]);
    }
}
