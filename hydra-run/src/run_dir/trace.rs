//! The trace of a run in the Chrome trace event format, for Perfetto and `chrome://tracing`.
//!
//! The trace has one process, with a compute track and a copy track for each device, and a track for the host optimizer.

use hydra_engine::{Span, Track, Work};
use serde_json::json;
use std::io::{self, Write};

const PROCESS: u32 = 1;
/// The track of the optimizer, sorted below the tracks of all devices.
const OPTIMIZER_THREAD: usize = 1_000_000;

/// Streams trace events to a writer, so that their memory does not grow with the run.
pub(crate) struct TraceWriter<W: Write> {
    out: W,
    first: bool,
}

impl<W: Write> TraceWriter<W> {
    /// Starts the trace of a run on these devices.
    pub(crate) fn new(out: W, devices: &[String]) -> io::Result<Self> {
        let mut trace = Self { out, first: true };
        trace.out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
        let args = json!({"name": "hydra"});
        trace.event(&json!({"ph": "M", "pid": PROCESS, "name": "process_name", "args": args}))?;
        for (index, device) in devices.iter().enumerate() {
            trace.name_track(1 + 2 * index, &format!("{device} compute"))?;
            trace.name_track(2 + 2 * index, &format!("{device} copy"))?;
        }
        trace.name_track(OPTIMIZER_THREAD, "host optimizer")?;
        Ok(trace)
    }

    fn name_track(&mut self, thread: usize, name: &str) -> io::Result<()> {
        let parts =
            [("thread_name", json!({"name": name})), ("thread_sort_index", json!({"sort_index": thread}))];
        parts.into_iter().try_for_each(|(name, args)| {
            self.event(&json!({"ph": "M", "pid": PROCESS, "tid": thread, "name": name, "args": args}))
        })
    }

    /// Writes a span of the task called `task`.
    pub(crate) fn span(&mut self, span: &Span, task: &str) -> io::Result<()> {
        let work = work_name(span.work);
        let part = if span.work == Work::Step { "buffer" } else { "shard" };
        let micros = |seconds: f64| (seconds * 1e9).round() / 1e3;
        let mut args = json!({ "task": task, "step": span.step, part: span.shard });
        if let Some(key) = pass_key(span.work) {
            args[key] = json!(span.microbatch_pass);
        }
        self.event(&json!({
            "ph": "X", "pid": PROCESS, "tid": thread(span.track), "ts": micros(span.start_s),
            "dur": micros((span.end_s - span.start_s).max(0.0)),
            "name": format!("{task} {work} {}", span.shard), "cat": work,
            "args": args,
        }))
    }

    fn event(&mut self, event: &serde_json::Value) -> io::Result<()> {
        let separator: &[u8] = if std::mem::take(&mut self.first) { b"" } else { b",\n" };
        self.out.write_all(separator)?;
        serde_json::to_writer(&mut self.out, event)?;
        Ok(())
    }

    /// Finishes the trace and returns the writer.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()?;
        Ok(self.out)
    }
}

fn thread(track: Track) -> usize {
    match track {
        Track::Compute(device) => 1 + 2 * device.0,
        Track::Copy(device) => 2 + 2 * device.0,
        Track::Optimizer => OPTIMIZER_THREAD,
    }
}

/// Returns the argument key for the index of the microbatch or batch of a shard task.
fn pass_key(work: Work) -> Option<&'static str> {
    match work {
        Work::Forward | Work::Backward => Some("microbatch"),
        Work::Evaluate => Some("batch"),
        Work::Promote | Work::TakeDown | Work::Step => None,
    }
}

/// Returns the name of a kind of work.
pub(crate) fn work_name(work: Work) -> &'static str {
    match work {
        Work::Forward => "forward",
        Work::Backward => "backward",
        Work::Evaluate => "evaluate",
        Work::Promote => "promote",
        Work::TakeDown => "take down",
        Work::Step => "step",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{DeviceId, TaskId};

    #[test]
    fn a_trace_is_json_with_named_tracks_and_microseconds() {
        let devices = ["cpu:0".to_owned(), "cpu:1".to_owned()];
        let mut trace = TraceWriter::new(Vec::new(), &devices).unwrap();
        let span = |track, work| Span {
            track,
            task: TaskId(0),
            work,
            shard: 2,
            step: 5,
            microbatch_pass: 3,
            start_s: 0.5,
            end_s: 0.75,
        };
        trace.span(&span(Track::Compute(DeviceId(1)), Work::Backward), "a \"b\"").unwrap();
        trace.span(&span(Track::Copy(DeviceId(1)), Work::Promote), "a").unwrap();
        trace.span(&span(Track::Optimizer, Work::Step), "a").unwrap();
        let bytes = trace.finish().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let names: Vec<&str> = events
            .iter()
            .filter(|event| event["name"] == "thread_name")
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["cpu:0 compute", "cpu:0 copy", "cpu:1 compute", "cpu:1 copy", "host optimizer"]);
        let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), 3);
        assert_eq!((spans[0]["ts"].as_f64(), spans[0]["dur"].as_f64()), (Some(500_000.0), Some(250_000.0)));
        assert_eq!(spans[0]["args"]["shard"], 2);
        assert_eq!(spans[2]["args"]["buffer"], 2);
        for span in spans {
            let named = events.iter().any(|e| e["name"] == "thread_name" && e["tid"] == span["tid"]);
            assert!(named, "a span on a track without a name");
        }
    }
}
