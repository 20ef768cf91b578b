//! Atomic replacement of files.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The suffix of a file's name while it is written.
pub const UNFINISHED: &str = ".part";

/// Writes a file under a temporary name, with the suffix [`UNFINISHED`], syncs it and then renames it. A file
/// that already has the name is unchanged until the rename, also if the process is killed; the unfinished
/// file then remains under the temporary name. There must be no other writer of the file at the same time.
///
/// # Errors
/// Those of `write` and of the file system; the unfinished file is removed.
pub fn replace_file<E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let mut part = path.as_os_str().to_owned();
    part.push(UNFINISHED);
    let mut part = UnfinishedFile { path: PathBuf::from(part), named: false };
    let mut file = File::create(&part.path)?;
    write(&mut file)?;
    file.sync_all()?;
    fs::rename(&part.path, path)?;
    part.named = true;
    sync_parent(path);
    Ok(())
}

/// An unfinished file that is removed when dropped, also by a panic, unless it was renamed.
struct UnfinishedFile {
    path: PathBuf,
    named: bool,
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.named {
            // The error that is returned matters more than one of this.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Syncs the directory entry, if the system supports syncing a directory.
fn sync_parent(path: &Path) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The content is synced under one of its names; a power failure can only affect which of them survives.
    let _ = File::open(parent).and_then(|dir| dir.sync_all());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_write_that_fails_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace_file(&path, |file| file.write_all(b"one")).unwrap();
        let fails = |file: &mut File| {
            file.write_all(b"half")?;
            Err(io::Error::other("no room"))
        };
        assert_eq!(replace_file(&path, fails).unwrap_err().to_string(), "no room");
        let panics = |_: &mut File| -> io::Result<()> { panic!("a writer's") };
        std::panic::catch_unwind(|| replace_file(&path, panics)).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no part is left");
        replace_file(&path, |file| file.write_all(b"two")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no part is left");
    }
}
