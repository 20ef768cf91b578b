//! The event stream of a run: new lines of `metrics.jsonl`, and the state of the run and its tasks after them.

use super::connections::EventStream;
use super::runs::state;
use super::snapshot::standings;
use crate::run_dir::{Follower, METRICS, length, lines_from};
use axum::response::sse::Event;
use futures_util::stream::{self, Stream as Events};
use serde_json::Value;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The polling interval, and the maximum number of bytes of lines in one event.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const MAX_BYTES: u64 = 1 << 20;

/// A run that one connection follows.
pub(super) struct Followed {
    pub(super) dir: PathBuf,
    pub(super) run: Arc<Mutex<Follower>>,
    /// The offset in `metrics.jsonl` up to which lines have been sent.
    pub(super) from: u64,
    /// The last state of the run that was sent.
    pub(super) state: &'static str,
    /// Marks the connection as an event stream.
    pub(super) _stream: EventStream,
}

/// Returns the events. The id of each is the offset from which the next one continues.
pub(super) fn stream_of(followed: Followed) -> impl Events<Item = Result<Event, Infallible>> {
    stream::unfold(followed, |mut followed| async {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            // Files are read on another thread, so that other connections do not wait.
            let read = tokio::task::spawn_blocking(move || {
                let news = followed.news();
                (followed, news)
            });
            let news;
            (followed, news) = read.await.ok()?;
            if let Some(event) = news {
                return Some((Ok(event), followed));
            }
        }
    })
}

impl Followed {
    /// Returns what is new since the last event, or `None`.
    fn news(&mut self) -> Option<Event> {
        let metrics = self.dir.join(METRICS);
        if length(&metrics).ok()? < self.from {
            self.from = 0;
            // Another run has replaced this one in the directory: the dashboard loads it anew.
            return Some(Event::default().event("begin").data("{}"));
        }
        let mut lines: Vec<Value> = Vec::new();
        let read = lines_from(&metrics, self.from, MAX_BYTES, |line| {
            lines.extend(serde_json::from_slice::<Value>(line))
        });
        let (end, state) = (read.ok()?, state(&self.dir));
        if end == self.from && state == self.state {
            return None;
        }
        (self.from, self.state) = (end, state);
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        run.follow().ok()?;
        let mut news = standings(&run, &self.dir).ok()?;
        news["lines"] = lines.into();
        Some(Event::default().event("news").id(end.to_string()).data(news.to_string()))
    }
}
