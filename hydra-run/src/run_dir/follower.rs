//! Follows a running run: its journal, with each line of `metrics.jsonl` as soon as the line is complete.

use crate::run_dir::directory::METRICS;
use crate::run_dir::journal::Journal;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Reads a run directory incrementally.
#[derive(Debug)]
pub struct Follower {
    dir: PathBuf,
    journal: Journal,
    read: u64,
}

impl Follower {
    /// Returns a follower that has read nothing yet.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), journal: Journal::begin(dir), read: 0 }
    }

    /// Reads the new complete lines. If another run has replaced the one that was read, its lines are read from the first one.
    pub fn follow(&mut self) -> io::Result<()> {
        let path = self.dir.join(METRICS);
        if length(&path)? < self.read {
            *self = Self::new(&self.dir);
        }
        let journal = &mut self.journal;
        self.read = lines_from(&path, self.read, u64::MAX, |line| journal.read_line(line))?;
        self.journal.count_shards(&self.dir);
        Ok(())
    }

    /// What has been read so far.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Returns the number of bytes read, all of complete lines.
    pub(crate) fn read(&self) -> u64 {
        self.read
    }
}

/// Passes the complete lines from byte `from` on to `each`, about `most` bytes of them, and returns the end of the last one.
/// A missing file has no lines.
pub(crate) fn lines_from(path: &Path, from: u64, most: u64, mut each: impl FnMut(&[u8])) -> io::Result<u64> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(from),
        file => file?,
    };
    file.seek(SeekFrom::Start(from))?;
    let (mut lines, mut line, mut end) = (BufReader::new(file), Vec::new(), from);
    while end - from < most {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\n") {
            break;
        }
        each(&line);
        end += bytes as u64;
    }
    Ok(end)
}

/// Returns the length of a file, zero if it is missing.
pub(crate) fn length(path: &Path) -> io::Result<u64> {
    match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        found => Ok(found?.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn line(step: u64) -> String {
        let line = serde_json::json!({
            "event": "minibatch", "task": "a", "step": step, "steps": 9, "loss": 1.0, "units": 8, "at_s": step,
        });
        format!("{line}\n")
    }

    #[test]
    fn each_line_is_read_once_and_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut run = Follower::new(dir.path());
        let trained = |run: &mut Follower| {
            run.follow().unwrap();
            run.journal().trained()
        };
        assert_eq!(trained(&mut run), 0, "nothing is there");
        let two = line(0) + &line(1);
        fs::write(&path, &two[..two.len() - 4]).unwrap();
        assert_eq!((trained(&mut run), run.read()), (1, line(0).len() as u64));
        fs::write(&path, &two).unwrap();
        assert_eq!((trained(&mut run), run.read()), (2, two.len() as u64));
        assert_eq!(trained(&mut run), 2);
        assert_eq!(run.journal().tasks[0].units, [8, 8]);
        fs::write(&path, line(0)).unwrap();
        assert_eq!(trained(&mut run), 1, "another run");
    }

    #[test]
    fn so_many_bytes_are_read_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        fs::write(&path, line(0) + &line(1) + &line(2)).unwrap();
        let mut count = 0;
        let end = lines_from(&path, 0, 1, |_| count += 1).unwrap();
        assert_eq!((end, count), (line(0).len() as u64, 1), "a line at least");
        lines_from(&path, end, u64::MAX, |_| count += 1).unwrap();
        assert_eq!(count, 3);
    }
}
