//! A tracker's thread: it hands on every line of `metrics.jsonl`, those that were there first, until the run has ended.

use crate::run_dir::{METRICS, lines_from};
use crate::terminal::render;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// How often new lines are looked for.
const EVERY: Duration = Duration::from_millis(500);
/// The bytes of lines between two times at which what was handed on is written.
const AT_ONCE: u64 = 1 << 20;

/// What becomes of lines.
pub(crate) trait Sink: Send + 'static {
    /// Takes a line; one of an earlier part of the run comes again.
    fn take(&mut self, line: &Value) -> Result<()>;

    /// Writes or sends what was taken.
    fn flush(&mut self) -> Result<()>;

    /// The same for the last time; says what is left undone, if anything is.
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
    /// Begins with the lines of the run in this directory.
    pub(crate) fn start(dir: &Path, name: &str, sink: impl Sink) -> Result<Self> {
        let (ended, waits) = channel();
        let mut reader = Reader { metrics: dir.join(METRICS), read: 0, sink };
        let thread = Builder::new().name(name.to_owned()).spawn(move || {
            while waits.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                reader.hand_on()?;
            }
            reader.hand_on()?;
            reader.sink.end()
        });
        Ok(Self {
            ended,
            thread: thread.with_context(|| format!("the thread of {name} could not be begun"))?,
        })
    }

    /// Waits until the last line is handed on, and returns what could not be done, in words.
    pub(crate) fn finish(self) -> Option<String> {
        drop(self.ended);
        match self.thread.join() {
            Ok(Ok(left)) => left,
            Ok(Err(error)) => Some(render(&error).trim_end().trim_start_matches("error: ").to_owned()),
            Err(_) => Some("its thread has failed".to_owned()),
        }
    }
}

struct Reader<S> {
    metrics: PathBuf,
    read: u64,
    sink: S,
}

impl<S: Sink> Reader<S> {
    fn hand_on(&mut self) -> Result<()> {
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
    struct Kept(Arc<Mutex<Vec<Value>>>);

    impl Sink for Kept {
        fn take(&mut self, line: &Value) -> Result<()> {
            anyhow::ensure!(*line != 13, "unlucky");
            self.0.lock().unwrap().push(line.clone());
            Ok(())
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    fn mirrored(lines: &str) -> (Vec<Value>, Option<String>) {
        let (dir, kept) = (tempfile::tempdir().unwrap(), Kept::default());
        let mirror = Mirror::start(dir.path(), "kept", kept.clone()).unwrap();
        std::fs::write(dir.path().join(METRICS), lines).unwrap();
        let said = mirror.finish();
        (kept.0.lock().unwrap().clone(), said)
    }

    #[test]
    fn every_whole_line_is_handed_on_before_the_end() {
        assert_eq!(mirrored("1\n2\nnone\n3\n4"), (vec![1.into(), 2.into(), 3.into()], None));
    }

    #[test]
    fn what_fails_is_said_and_ends_nothing_else() {
        assert_eq!(mirrored("1\n13\n2\n"), (vec![1.into()], Some("unlucky".to_owned())));
    }
}
