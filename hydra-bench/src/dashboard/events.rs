//! The stream of what is new of a run: lines of `metrics.jsonl`, and the standings after them.

use super::connections::Stream;
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

/// How often a run is looked at, and the most bytes of lines that are sent at once.
const EVERY: Duration = Duration::from_millis(500);
const AT_ONCE: u64 = 1 << 20;

/// A run that is followed for one connection.
pub(super) struct Followed {
    pub(super) dir: PathBuf,
    pub(super) run: Arc<Mutex<Follower>>,
    /// The byte of `metrics.jsonl` up to which lines have been sent.
    pub(super) from: u64,
    /// The state of the run that was sent last.
    pub(super) state: &'static str,
    /// Held as long as the connection is a stream.
    pub(super) _stream: Stream,
}

/// The events, each with the byte from which the next ones go on as its name.
pub(super) fn of(followed: Followed) -> impl Events<Item = Result<Event, Infallible>> {
    stream::unfold(followed, |mut followed| async {
        loop {
            tokio::time::sleep(EVERY).await;
            // Files are read where they keep nobody else waiting.
            let looked = tokio::task::spawn_blocking(move || {
                let news = followed.news();
                (followed, news)
            });
            let news;
            (followed, news) = looked.await.ok()?;
            if let Some(event) = news {
                return Some((Ok(event), followed));
            }
        }
    })
}

impl Followed {
    /// What is new, if anything is.
    fn news(&mut self) -> Option<Event> {
        let metrics = self.dir.join(METRICS);
        if length(&metrics).ok()? < self.from {
            self.from = 0;
            // Another run is in the directory: the page begins anew.
            return Some(Event::default().event("begin").data("{}"));
        }
        let mut lines: Vec<Value> = Vec::new();
        let read = lines_from(&metrics, self.from, AT_ONCE, |line| {
            lines.extend(serde_json::from_slice::<Value>(line))
        });
        let (end, state) = (read.ok()?, state(&self.dir));
        if end == self.from && state == self.state {
            return None;
        }
        (self.from, self.state) = (end, state);
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        run.follow(|_| {}).ok()?;
        let mut news = standings(&run, &self.dir).ok()?;
        news["lines"] = lines.into();
        Some(Event::default().event("news").id(end.to_string()).data(news.to_string()))
    }
}
