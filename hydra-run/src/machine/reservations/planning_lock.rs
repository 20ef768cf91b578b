//! The planning lock, which one run holds at a time, and the entry that it registers.

use crate::machine::reservations::admitted::Admitted;
use crate::machine::reservations::folder::{ENTRY, MachineReservations, PART, ReservationsError};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::PathBuf;

/// The file that a run locks while it plans, with its process ID.
const PLANNING: &str = "planning";

/// The lock under which a run reads the free memory, plans, and registers what it admits. Released by [`admit`](Self::admit),
/// [`end`](Self::end) or on drop.
#[derive(Debug)]
pub(crate) struct PlanningLock {
    reservations: MachineReservations,
    lock: File,
}

/// The entry of a run in the machine-wide reservations. It counts until this is dropped or the process ends in any way.
#[derive(Debug)]
pub(crate) struct ReservationEntry {
    path: PathBuf,
    _locked: File,
    /// The folder, locked so that it is not removed for its age.
    _folder: Option<File>,
}

impl MachineReservations {
    /// Waits until no other run plans. If one does, `waiting` is called first with its process ID, if known.
    ///
    /// # Errors
    /// If the folder cannot be created, does not belong to the user, or is on a file system without locks.
    pub(crate) fn planning_lock(
        &self,
        waiting: impl FnOnce(Option<u32>),
    ) -> Result<PlanningLock, ReservationsError> {
        self.make()?;
        let lock = self.lock(waiting).map_err(|error| self.error(error))?;
        self.remove_stale_entries();
        Ok(PlanningLock { reservations: self.clone(), lock })
    }

    fn lock(&self, waiting: impl FnOnce(Option<u32>)) -> io::Result<File> {
        let path = self.folder.join(PLANNING);
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {
                waiting(fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()));
                while let Err(error) = file.lock() {
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())?;
        Ok(file)
    }
}

impl PlanningLock {
    /// Registers the memory that this run has admitted, and releases the lock.
    ///
    /// # Errors
    /// If the entry cannot be written. The lock is released anyway.
    pub(crate) fn admit(&self, admitted: &Admitted) -> Result<ReservationEntry, ReservationsError> {
        let entry = self.write(admitted).map_err(|error| self.reservations.error(error));
        self.end();
        entry
    }

    /// Releases the lock without an entry.
    pub(crate) fn end(&self) {
        // On failure the lock is released on drop, or with the process.
        let _ = self.lock.unlock();
    }

    /// Writes the entry, which is locked before it is renamed to its final name.
    fn write(&self, admitted: &Admitted) -> io::Result<ReservationEntry> {
        let folder = &self.reservations.folder;
        let named = |number: u32| folder.join(format!("{}-{number}.{ENTRY}", admitted.process));
        let free = (0..).map(named).find(|path| !path.exists());
        let path = free.ok_or(io::ErrorKind::AlreadyExists)?;
        let part = path.with_extension(PART);
        let mut file = File::create(&part)?;
        file.try_lock()?;
        file.write_all(&serde_json::to_vec(admitted)?)?;
        fs::rename(&part, &path)?;
        let shared = |folder: File| folder.try_lock_shared().is_ok().then_some(folder);
        Ok(ReservationEntry { _locked: file, _folder: File::open(folder).ok().and_then(shared), path })
    }
}

impl Drop for ReservationEntry {
    fn drop(&mut self) {
        // An entry that remains is ignored, because it is not locked.
        let _ = fs::remove_file(&self.path);
    }
}
