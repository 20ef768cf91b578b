//! The folder of the machine-wide reservations, and the entries of running runs.

use crate::machine::procfs::ProcessMemory;
use crate::machine::reservations::admitted::{Admitted, OtherRun};
use hydra_core::ByteSize;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The variable that names the folder. If it is empty, the run ignores other runs and is invisible to them.
pub(crate) const VARIABLE: &str = "HYDRA_RESERVATIONS";
/// The variable's name before version 0.2, which is read if [`VARIABLE`] is not set, until version 0.3.
const OLD_VARIABLE: &str = "HYDRA_LEDGER";
/// The extension of entries. A run keeps its entry locked.
pub(super) const ENTRY: &str = "json";
/// The extension of an entry before it is renamed to its final name.
pub(super) const PART: &str = "part";

/// The reservations of one user. The folder is created when a run [plans](MachineReservations::planning_lock).
#[derive(Clone, Debug)]
pub(crate) struct MachineReservations {
    pub(super) folder: PathBuf,
}

/// The reason why reservations are unavailable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReservationsError {
    /// The folder, or a file in it, could not be created or locked.
    #[error("`{}` could not be used", folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    /// The folder is a file or a link, has another owner, or is writable by others.
    #[error("`{}` is not a folder that only you can write to", folder.display())]
    NotOwn { folder: PathBuf },
}

impl MachineReservations {
    /// Returns the reservations in this folder.
    pub(crate) fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Returns the user's reservations: in the folder named by [`VARIABLE`], or in the folder for temporary files, which
    /// outlives logins as runs do.
    #[cfg(unix)]
    pub(crate) fn of_user() -> Option<Self> {
        let user = rustix::process::geteuid().as_raw();
        let usual = || std::env::temp_dir().join(format!("hydra-{user}"));
        let named = std::env::var_os(VARIABLE).or_else(|| std::env::var_os(OLD_VARIABLE));
        let folder = named.map_or_else(usual, PathBuf::from);
        (!folder.as_os_str().is_empty()).then(|| Self::at(&folder))
    }

    /// Other systems do not report the owner of a folder.
    #[cfg(not(unix))]
    pub(crate) fn of_user() -> Option<Self> {
        None
    }

    /// Returns the running runs in admission order; none if the folder is unusable. `root` is the root of the file system with
    /// `proc`.
    pub(crate) fn others(&self, root: &Path) -> Vec<OtherRun> {
        if self.check().is_err() {
            return Vec::new();
        }
        let of = |path: PathBuf| serde_json::from_slice(&read_if_locked(&path)?).ok();
        let mut entries: Vec<Admitted> = self.files(ENTRY).filter_map(of).collect();
        entries.sort_by_key(|entry| (entry.at_s, entry.process));
        let other = |entry: Admitted| match ProcessMemory::of_process(root, entry.process) {
            ProcessMemory::Bytes(held) => Some(OtherRun::new(entry, held)),
            ProcessMemory::Unknown => Some(OtherRun::new(entry, ByteSize(0))),
            // A large process releases its lock long after its memory.
            ProcessMemory::Ending => None,
        };
        entries.into_iter().filter_map(other).collect()
    }

    /// Creates the folder, which must belong to the user.
    pub(super) fn make(&self) -> Result<(), ReservationsError> {
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(&self.folder).map_err(|error| self.error(error))?;
        self.check()
    }

    #[cfg(unix)]
    fn check(&self) -> Result<(), ReservationsError> {
        use std::os::unix::fs::MetadataExt;
        let found = fs::symlink_metadata(&self.folder).map_err(|error| self.error(error))?;
        let own =
            found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0;
        if own { Ok(()) } else { Err(ReservationsError::NotOwn { folder: self.folder.clone() }) }
    }

    #[cfg(not(unix))]
    fn check(&self) -> Result<(), ReservationsError> {
        Ok(())
    }

    pub(super) fn error(&self, source: io::Error) -> ReservationsError {
        ReservationsError::Folder { folder: self.folder.clone(), source }
    }

    /// Returns the files with this extension.
    fn files(&self, ending: &'static str) -> impl Iterator<Item = PathBuf> + use<> {
        let paths = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        paths.filter(move |path| path.extension().is_some_and(|found| found == ending))
    }

    /// Removes the entries of runs that were killed. Requires the planning lock, under which entries are created and locked.
    pub(super) fn remove_stale_entries(&self) {
        for path in self.files(ENTRY).chain(self.files(PART)).filter(|path| read_if_locked(path).is_none()) {
            // A stale entry that remains is ignored, because it is not locked.
            let _ = fs::remove_file(path);
        }
    }
}

/// Reads a file if a process holds a lock on it. The system releases the lock when the process ends in any way.
fn read_if_locked(path: &Path) -> Option<Vec<u8>> {
    let file = File::open(path).ok()?;
    // The lock is released immediately; a shared one allows concurrent checks.
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => fs::read(path).ok(),
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}
