//! The thread of a tracker: passes every line of `metrics.jsonl` to it, including earlier ones, until the run has ended.

use crate::run_dir::{LogLine, METRICS, lines_from};
use crate::terminal::render;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The polling interval.
const EVERY: Duration = Duration::from_millis(500);
/// The approximate bytes of lines between two flushes.
const AT_ONCE: u64 = 1 << 20;

/// A receiver of lines.
pub(crate) trait Sink: Send + 'static {
    /// Takes a line. Lines from before an interruption are passed again.
    fn take(&mut self, line: &LogLine) -> Result<()>;

    /// Writes or sends the lines taken.
    fn flush(&mut self) -> Result<()>;

    /// Flushes for the last time. Returns a text on lines that could not be sent, if any.
    fn end(&mut self) -> Result<Option<String>> {
        self.flush().map(|()| None)
    }
}

/// A sink and its thread.
pub(crate) struct Mirror {
    ended: Sender<()>,
    thread: JoinHandle<Result<Option<String>>>,
}

impl Mirror {
    /// Starts with the lines of the run in this directory.
    pub(crate) fn start(dir: &Path, name: &str, sink: impl Sink) -> Result<Self> {
        let (ended, waits) = channel();
        let mut reader = LineReader { metrics: dir.join(METRICS), read: 0, sink };
        let thread = Builder::new().name(name.to_owned()).spawn(move || {
            while waits.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                reader.pass_lines()?;
            }
            reader.pass_lines()?;
            reader.sink.end()
        });
        Ok(Self {
            ended,
            thread: thread.with_context(|| format!("the thread for {name} could not be started"))?,
        })
    }

    /// Waits until the last line is passed. Returns a text on the failure, if any.
    pub(crate) fn finish(self) -> Option<String> {
        drop(self.ended);
        match self.thread.join() {
            Ok(Ok(left)) => left,
            Ok(Err(error)) => Some(render(&error).trim_end().trim_start_matches("error: ").to_owned()),
            Err(_) => Some("its thread has failed".to_owned()),
        }
    }
}

struct LineReader<S> {
    metrics: PathBuf,
    read: u64,
    sink: S,
}

impl<S: Sink> LineReader<S> {
    fn pass_lines(&mut self) -> Result<()> {
        loop {
            let (from, mut taken) = (self.read, Ok(()));
            let sink = &mut self.sink;
            self.read = lines_from(&self.metrics, from, AT_ONCE, |line| {
                if let (Ok(line), true) = (serde_json::from_slice(line), taken.is_ok()) {
                    taken = sink.take(&line);
                }
            })?;
            taken?;
            self.sink.flush()?;
            if self.read == from {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<f64>>>);

    impl Sink for Kept {
        fn take(&mut self, line: &LogLine) -> Result<()> {
            anyhow::ensure!(line.time != Some(13.0), "unlucky");
            self.0.lock().unwrap().extend(line.time);
            Ok(())
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    /// Passes on lines with these times; the last one is incomplete.
    fn mirrored(times: &[&str]) -> (Vec<f64>, Option<String>) {
        let (dir, kept) = (tempfile::tempdir().unwrap(), Kept::default());
        let mirror = Mirror::start(dir.path(), "kept", kept.clone()).unwrap();
        let lines: Vec<String> =
            times.iter().map(|time| format!("{{\"event\":\"stopping\",\"time\":{time}}}")).collect();
        std::fs::write(dir.path().join(METRICS), lines.join("\n")).unwrap();
        let said = mirror.finish();
        (kept.0.lock().unwrap().clone(), said)
    }

    #[test]
    fn every_whole_line_is_handed_on_before_the_end() {
        assert_eq!(mirrored(&["1", "2", "none", "3", "4"]), (vec![1.0, 2.0, 3.0], None));
    }

    #[test]
    fn what_fails_is_said_and_ends_nothing_else() {
        assert_eq!(mirrored(&["1", "13", "2", "3"]), (vec![1.0], Some("unlucky".to_owned())));
    }
}
