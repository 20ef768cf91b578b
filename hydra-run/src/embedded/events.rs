//! The events of a run, read from its `metrics.jsonl` while it is written.

use crate::control::{Control, State};
use crate::run_dir::METRICS;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

/// Reads the lines of a run's `metrics.jsonl` from its start, each as soon as it is complete. Lines are not kept in memory.
#[derive(Debug)]
pub struct Events {
    control: Control,
    /// The file, once it has a line, and the position read up to.
    file: Option<(BufReader<File>, u64)>,
}

/// The next item of [`Events`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// An event, as a JSON object.
    Event(String),
    /// No event yet.
    Later,
    /// The run has ended.
    End,
}

impl Events {
    pub(super) fn new(control: Control) -> Self {
        Self { control, file: None }
    }

    /// Waits for the next event, for at most `patience`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn next(&mut self, patience: Duration) -> io::Result<Next> {
        let read = self.file.as_ref().map(|(_, at)| *at);
        let more = |state: &State| state.lines.is_some_and(|lines| read.unwrap_or(lines.first) < lines.whole);
        let state = self.control.until(patience, |state| state.ended || more(state));
        if !more(&state) {
            return Ok(if state.ended { Next::End } else { Next::Later });
        }
        let (Some(lines), Some(directory)) = (state.lines, state.directory.clone()) else {
            return Ok(Next::Later);
        };
        drop(state);
        self.read(directory.join(METRICS), lines.first)
    }

    fn read(&mut self, path: PathBuf, first: u64) -> io::Result<Next> {
        if self.file.is_none() {
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(first))?;
            self.file = Some((BufReader::new(file), first));
        }
        let Some((file, at)) = &mut self.file else { return Ok(Next::Later) };
        let mut line = String::new();
        *at += file.read_line(&mut line)? as u64;
        line.truncate(line.trim_end().len());
        Ok(Next::Event(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_of_this_run_are_read_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        std::fs::write(&path, "{\"of\":\"before\"}\n").unwrap();
        let control = Control::default();
        let mut events = Events::new(control.clone());
        assert_eq!(events.next(Duration::ZERO).unwrap(), Next::Later);
        control.in_directory(dir.path());
        control.written(16);
        assert_eq!(events.next(Duration::ZERO).unwrap(), Next::Later);
        std::fs::write(&path, "{\"of\":\"before\"}\n{\"a\":1}\n{\"a\":2}\n{\"a\"").unwrap();
        control.written(32);
        let next = |events: &mut Events| events.next(Duration::ZERO).unwrap();
        assert_eq!(next(&mut events), Next::Event("{\"a\":1}".to_owned()));
        assert_eq!(next(&mut events), Next::Event("{\"a\":2}".to_owned()));
        assert_eq!(next(&mut events), Next::Later, "half a line");
        control.end();
        assert_eq!(next(&mut events), Next::End);
        assert_eq!(
            next(&mut Events::new(control)),
            Next::Event("{\"a\":1}".to_owned()),
            "again from the start"
        );
    }
}
