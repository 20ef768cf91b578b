//! Records facts about a rendering.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Records while a template renders.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// Bytes written so far.
    written: AtomicUsize,
    seen: Mutex<Recorded>,
}

/// The recorded facts.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// Byte ranges of `{% generation %}` blocks.
    pub(super) generated: Vec<Range<usize>>,
    /// Columns and other variables that were read.
    pub(super) columns: BTreeSet<String>,
    /// Message fields that were read.
    pub(super) fields: BTreeSet<String>,
    /// Whether the template used the date.
    pub(super) dated: bool,
    entered: Vec<LoopEntry>,
}

/// A loop iteration that starts a message.
#[derive(Clone, Copy, Debug)]
struct LoopEntry {
    number: usize,
    message: usize,
    /// The bytes written before it.
    at: usize,
}

impl Trace {
    pub(super) fn note(&self, record: impl FnOnce(&mut Recorded, usize)) {
        let written = self.written.load(Ordering::Relaxed);
        record(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner), written);
    }

    pub(super) fn read_field(&self, name: &str) {
        self.note(|seen, _| {
            if !seen.fields.contains(name) {
                seen.fields.insert(name.to_owned());
            }
        });
    }

    pub(super) fn enter(&self, number: usize, message: usize) {
        self.note(|seen, at| seen.entered.push(LoopEntry { number, message, at }));
    }

    pub(super) fn take(&self) -> Recorded {
        std::mem::take(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Recorded {
    /// The range of each message in a text of `length` bytes: from where a loop reaches it to where it reaches the next
    /// one. `None` if no loop writes these messages one after the other.
    pub(super) fn turns(&self, messages: &[usize], length: usize) -> Option<Vec<Range<usize>>> {
        let loops = self.entered.iter().map(|entered| entered.number).collect::<BTreeSet<_>>();
        let in_order = |number: &usize| -> Option<(usize, Vec<LoopEntry>)> {
            let entered: Vec<LoopEntry> =
                self.entered.iter().filter(|entered| entered.number == *number).copied().collect();
            let rising = entered.windows(2).all(|pair| pair[0].message < pair[1].message);
            let all = messages.iter().all(|one| entered.iter().any(|entered| entered.message == *one));
            let (first, last) = (entered.first()?, entered.last()?);
            // A loop that only inspects messages writes nothing; a single message extends to the end of the text.
            let covered = if entered.len() == 1 { length - first.at } else { last.at - first.at };
            (rising && all && covered > 0).then_some((covered, entered))
        };
        let found = loops.iter().filter_map(in_order).max_by_key(|(covered, _)| *covered)?.1;
        let turn = |message: &usize| {
            let at = found.iter().position(|entered| entered.message == *message)?;
            Some(found[at].at..found.get(at + 1).map_or(length, |next| next.at))
        };
        messages.iter().map(turn).collect()
    }
}

/// An output that counts its bytes.
pub(super) struct Counted {
    pub(super) text: Vec<u8>,
    pub(super) trace: Arc<Trace>,
}

impl io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        self.trace.written.store(self.text.len(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
