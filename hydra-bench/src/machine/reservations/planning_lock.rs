//! The turn to plan, which one run has at a time, and the entry that it leaves.

use crate::machine::reservations::admitted::Admitted;
use crate::machine::reservations::folder::{ENTRY, MachineReservations, PART, ReservationsError};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::PathBuf;

/// The file that a run keeps locked while it plans, with the number of its process.
const PLANNING: &str = "planning";

/// The turn of a run to plan: from before it looks at what is free until it has said what it admitted, or this is dropped.
#[derive(Debug)]
pub(crate) struct PlanningLock {
    reservations: MachineReservations,
    lock: File,
}

/// The entry of a run in the machine-wide reservations, which counts until this is dropped or the process ends, however it does.
#[derive(Debug)]
pub(crate) struct Entry {
    path: PathBuf,
    _locked: File,
    /// The folder: what is locked is not cleared away for its age.
    _folder: Option<File>,
}

impl MachineReservations {
    /// Waits until no other run plans. If there is one, `waiting` is told its process, where that is known, before.
    ///
    /// # Errors
    /// A folder that cannot be made, is not the user's own, or is on a file system without locks.
    pub(crate) fn planning_lock(
        &self,
        waiting: impl FnOnce(Option<u32>),
    ) -> Result<PlanningLock, ReservationsError> {
        self.make()?;
        let lock = self.lock(waiting).map_err(|error| self.error(error))?;
        self.microbatch_pass();
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
    /// Writes down what this run has admitted, and ends the turn.
    ///
    /// # Errors
    /// An entry that cannot be written; the turn ends all the same.
    pub(crate) fn admit(&self, admitted: &Admitted) -> Result<Entry, ReservationsError> {
        let entry = self.write(admitted).map_err(|error| self.reservations.error(error));
        self.end();
        entry
    }

    /// Ends the turn of a run that says no more than it did: others may plan.
    pub(crate) fn end(&self) {
        // A lock that stays goes with this, or with the process.
        let _ = self.lock.unlock();
    }

    /// Writes the entry, which is locked before it gets its name.
    fn write(&self, admitted: &Admitted) -> io::Result<Entry> {
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
        Ok(Entry { _locked: file, _folder: File::open(folder).ok().and_then(shared), path })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // One that stays counts no more, because nobody has locked it.
        let _ = fs::remove_file(&self.path);
    }
}
