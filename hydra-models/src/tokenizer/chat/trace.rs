//! What is known of one rendering beside its text.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Records while a template is rendered.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// Bytes of the text that are written.
    written: AtomicUsize,
    seen: Mutex<Seen>,
}

/// What was recorded.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// What the template marks as generated, in bytes.
    pub(super) generated: Vec<Range<usize>>,
    /// Columns and other names that were looked up.
    pub(super) columns: BTreeSet<String>,
    /// Fields of messages that were read.
    pub(super) fields: BTreeSet<String>,
    /// True if the template asked for the date.
    pub(super) dated: bool,
    entered: Vec<Entered>,
}

/// A loop that has come to a message.
#[derive(Clone, Copy, Debug)]
struct Entered {
    number: usize,
    message: usize,
    /// The bytes that were written before.
    at: usize,
}

impl Trace {
    pub(super) fn note(&self, record: impl FnOnce(&mut Seen, usize)) {
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
        self.note(|seen, at| seen.entered.push(Entered { number, message, at }));
    }

    pub(super) fn take(&self) -> Seen {
        std::mem::take(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Seen {
    /// The place of each message in a text of so many bytes: from where a loop comes to it to where it comes to the next
    /// one. `None` where no loop writes these messages one after the other.
    pub(super) fn turns(&self, messages: &[usize], length: usize) -> Option<Vec<Range<usize>>> {
        let loops = self.entered.iter().map(|entered| entered.number).collect::<BTreeSet<_>>();
        let in_order = |number: &usize| -> Option<(usize, Vec<Entered>)> {
            let entered: Vec<Entered> =
                self.entered.iter().filter(|entered| entered.number == *number).copied().collect();
            let rising = entered.windows(2).all(|pair| pair[0].message < pair[1].message);
            let all = messages.iter().all(|one| entered.iter().any(|entered| entered.message == *one));
            let (first, last) = (entered.first()?, entered.last()?);
            // A loop that only looks writes nothing; one message alone is written from there to the end.
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

/// A text that is written, and the count of its bytes.
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
