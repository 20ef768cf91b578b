//! The folder of the machine-wide reservations, and the entries of runs that are under way.

use crate::machine::procfs::Held;
use crate::machine::reservations::admitted::{Admitted, OtherRun};
use hydra_core::ByteSize;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The variable that names the folder; an empty one is for a run that neither looks at others nor is seen.
pub(crate) const VARIABLE: &str = "HYDRA_LEDGER";
/// The ending of entries, each of which its run keeps locked.
pub(super) const ENTRY: &str = "json";
/// The ending of an entry that has not got its name yet.
pub(super) const PART: &str = "part";

/// The ledger of one user. Its folder is made when a run [plans](Ledger::turn).
#[derive(Clone, Debug)]
pub(crate) struct MachineReservations {
    pub(super) folder: PathBuf,
}

/// The reason why there is no ledger.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReservationsError {
    /// The folder, or a file in it, could not be made or locked.
    #[error("`{}` could not be used", folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    /// The folder is a file or a link, is somebody else's, or others may write to it.
    #[error("`{}` is not a folder that you alone may write to", folder.display())]
    NotOwn { folder: PathBuf },
}

impl MachineReservations {
    /// The ledger in this folder.
    pub(crate) fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The user's ledger: the folder that [`VARIABLE`] names, or one in the folder for temporary files. It outlives
    /// logins, as runs do.
    #[cfg(unix)]
    pub(crate) fn of_user() -> Option<Self> {
        let user = rustix::process::geteuid().as_raw();
        let usual = || std::env::temp_dir().join(format!("hydra-{user}"));
        let folder = std::env::var_os(VARIABLE).map_or_else(usual, PathBuf::from);
        (!folder.as_os_str().is_empty()).then(|| Self::at(&folder))
    }

    /// Elsewhere nobody says whose a folder is.
    #[cfg(not(unix))]
    pub(crate) fn of_user() -> Option<Self> {
        None
    }

    /// The runs that are under way, in the order in which they were admitted; none where the folder cannot be used.
    /// `root` is where the file system begins that says what processes hold.
    pub(crate) fn others(&self, root: &Path) -> Vec<OtherRun> {
        if self.check().is_err() {
            return Vec::new();
        }
        let of = |path: PathBuf| serde_json::from_slice(&read_if_locked(&path)?).ok();
        let mut entries: Vec<Admitted> = self.files(ENTRY).filter_map(of).collect();
        entries.sort_by_key(|entry| (entry.at_s, entry.process));
        let other = |entry: Admitted| match Held::by(root, entry.process) {
            Held::Bytes(held) => Some(OtherRun::new(entry, held)),
            Held::Unknown => Some(OtherRun::new(entry, ByteSize(0))),
            // The lock of a large process goes long after its memory.
            Held::Ending => None,
        };
        entries.into_iter().filter_map(other).collect()
    }

    /// Makes the folder, which must be the user's own.
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

    /// The files with this ending.
    fn files(&self, ending: &'static str) -> impl Iterator<Item = PathBuf> + use<> {
        let paths = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        paths.filter(move |path| path.extension().is_some_and(|found| found == ending))
    }

    /// Removes what runs have left that ended without doing so. Only who plans may: a file is made and locked in one's turn.
    pub(super) fn microbatch_pass(&self) {
        for path in self.files(ENTRY).chain(self.files(PART)).filter(|path| read_if_locked(path).is_none()) {
            // One that stays is passed over, because nobody has locked it.
            let _ = fs::remove_file(path);
        }
    }
}

/// The bytes of a file that a process has locked, which its end undoes however it comes.
fn read_if_locked(path: &Path) -> Option<Vec<u8>> {
    let file = File::open(path).ok()?;
    // The lock that is tried goes at once; a shared one lets others ask at the same time.
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => fs::read(path).ok(),
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}
