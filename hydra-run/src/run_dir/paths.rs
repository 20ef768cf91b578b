//! Path helpers: containment, writability, free disk space, safe names.

use crate::terminal::Usage;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Returns the error context "`path` could not be `what`".
pub fn could_not(path: &Path, what: &str) -> String {
    format!("`{}` could not be {what}", path.display())
}

/// Returns the absolute form of a path.
pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("`{}` is not a usable path", path.display()))
}

/// Fails if the path is not UTF-8, which the JSON report could not express.
pub(super) fn check_utf8(path: &Path) -> Result<()> {
    let whole = absolute(path)?;
    let shown = whole.display();
    ensure!(
        whole.to_str().is_some(),
        "the path of the run directory `{shown}` is not valid UTF-8, which reports require: pass another --out"
    );
    Ok(())
}

/// Removes a file or a directory, if it exists.
pub(super) fn remove(path: &Path) -> Result<()> {
    match path.is_dir() {
        true => fs::remove_dir_all(path).with_context(|| could_not(path, "removed")),
        false => remove_file(path),
    }
}

/// Removes a file, if it exists. Fails on a directory.
pub fn remove_file(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| could_not(file, "removed")),
    }
}

/// Returns the entries of a directory; none if it cannot be listed.
pub(crate) fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Returns the bytes free on the disk of a directory for unprivileged users.
#[cfg(unix)]
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(dir).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(not(unix))]
pub(super) fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// Returns the bytes free where a directory is or would be created.
pub(crate) fn free_bytes_at(dir: &Path) -> Option<u64> {
    free_bytes(existing(dir))
}

/// Returns the length of a file up to and including its last newline.
pub(super) fn end_of_lines(file: &mut File) -> std::io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut byte = [0];
    while end > 0 {
        file.seek(SeekFrom::Start(end - 1))?;
        file.read_exact(&mut byte)?;
        if byte == [b'\n'] {
            break;
        }
        end -= 1;
    }
    Ok(end)
}

/// Returns true if `path` is `dir` or is inside it, lexically or after resolving links.
pub(crate) fn lies_in(path: &Path, dir: &Path) -> bool {
    let by = |place: fn(&Path) -> std::io::Result<PathBuf>| match (place(path), place(dir)) {
        (Ok(path), Ok(dir)) => path.starts_with(dir),
        _ => false,
    };
    by(|path| std::path::absolute(path)) || by(|path| fs::canonicalize(path))
}

/// Fails if `file` is one of the files in `read`, each given with its flag.
pub fn check_not_read(flag: &str, file: &Path, read: &[(&str, &Path)]) -> Result<(), Usage> {
    // Writing to a terminal or a pipe overwrites nothing.
    let Some(written) = fs::canonicalize(file).ok().filter(|path| path.is_file()) else { return Ok(()) };
    let is_it = |(_, path): &&(&str, &Path)| fs::canonicalize(path).is_ok_and(|path| path == written);
    let Some((of, _)) = read.iter().find(is_it) else { return Ok(()) };
    let file = file.display();
    Err(Usage::new(format!("{flag} `{file}` would overwrite the file given by {of}: pass another path")))
}

/// Checks that a directory is writable by creating and removing a file.
pub(crate) fn check_writable(dir: &Path) -> std::io::Result<()> {
    let probe = dir.join(format!(".hydra-probe-{}", std::process::id()));
    File::create_new(&probe).and_then(|_| fs::remove_file(&probe))
}

/// Measures the seconds per byte of writing to the disk of a directory, with a temporary file. Returns `None` if the directory
/// is not writable.
pub(crate) fn seconds_of_byte(dir: &Path) -> Option<f64> {
    const BYTES: usize = 16 << 20;
    let file = existing(dir).join(format!(".hydra-timing-{}", std::process::id()));
    let begun = Instant::now();
    let written = File::create_new(&file).and_then(|mut open| {
        open.write_all(&vec![1; BYTES])?;
        open.sync_data()
    });
    let seconds = begun.elapsed().as_secs_f64();
    let removed = fs::remove_file(&file);
    written.and(removed).ok().map(|()| seconds / BYTES as f64)
}

/// Returns the directory or its nearest existing ancestor.
pub(super) fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("."))
}

/// Returns true if two directories are on one file system.
#[cfg(unix)]
pub(super) fn same_disk(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let disk = |path: &Path| path.metadata().map(|found| found.dev()).ok();
    disk(one) == disk(other)
}

#[cfg(not(unix))]
pub(super) fn same_disk(_: &Path, _: &Path) -> bool {
    true
}

/// Returns a task's name in a form that is a valid file name on any system.
pub(crate) fn safe_name(task: &str) -> String {
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
    fn a_directory_is_not_removed_for_a_file_of_its_name() {
        let root = tempfile::tempdir().unwrap();
        let plot = root.path().join("schedule.svg");
        remove_file(&plot).unwrap();
        fs::create_dir(&plot).unwrap();
        assert!(remove_file(&plot).unwrap_err().to_string().ends_with("could not be removed"));
        assert!(plot.is_dir());
        remove(&plot).unwrap();
        fs::write(&plot, "old").unwrap();
        remove_file(&plot).unwrap();
        assert!(!plot.exists());
    }

    #[test]
    fn what_lies_in_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let (dir, beside) = (root.path().join("run"), root.path().join("run-2"));
        fs::create_dir_all(dir.join("models/a")).unwrap();
        fs::create_dir(&beside).unwrap();
        assert!(lies_in(&dir.join("models/a"), &dir) && lies_in(&dir, &dir));
        assert!(lies_in(&beside.join("../run/models"), &dir));
        assert!(!lies_in(&beside, &dir) && !lies_in(root.path(), &dir));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&dir, root.path().join("link")).unwrap();
            assert!(lies_in(&root.path().join("link/models"), &dir));
            assert!(lies_in(&dir.join("models"), &root.path().join("link")));
        }
    }
}
