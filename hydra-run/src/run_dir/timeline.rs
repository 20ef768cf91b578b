//! The last spans of the devices, from the end of `trace.json`, which is written while the run trains.

use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes read from the start of the file, where the tracks are named, and from its end.
const HEAD: u64 = 1 << 16;
const TAIL: u64 = 1 << 20;
/// The maximum number of spans returned.
const SPANS: usize = 6000;

/// Returns the tracks by name, and the last spans: track, start and end in seconds, task, work, and shard or buffer.
pub fn last_spans(trace: &Path) -> io::Result<Value> {
    let mut file = match File::open(trace) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(json!({ "tracks": [], "spans": [] })),
        file => file?,
    };
    let head = part(&mut file, 0, HEAD)?;
    let named = events(&head).filter(|event| event["name"] == "thread_name");
    let tracks: Vec<Value> = named.map(|event| json!([event["tid"], event["args"]["name"]])).collect();
    let length = file.seek(SeekFrom::End(0))?;
    let tail = part(&mut file, length.saturating_sub(TAIL), TAIL)?;
    let mut spans: Vec<Value> = events(&tail).filter(|event| event["ph"] == "X").filter_map(span).collect();
    spans.drain(..spans.len().saturating_sub(SPANS));
    Ok(json!({ "tracks": tracks, "spans": spans }))
}

fn part(file: &mut File, from: u64, most: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the events on complete lines.
fn events(text: &[u8]) -> impl Iterator<Item = Value> {
    let lines = text.split(|byte| *byte == b'\n');
    lines.filter_map(|line| serde_json::from_slice(line.strip_suffix(b",").unwrap_or(line)).ok())
}

fn span(event: Value) -> Option<Value> {
    let (start, length) = (event["ts"].as_f64()? / 1e6, event["dur"].as_f64()? / 1e6);
    let args = &event["args"];
    // Traces of earlier versions have `image` instead of `buffer`.
    let part = args.get("shard").or(args.get("buffer")).or(args.get("image"));
    Some(json!([event["tid"], start, start + length, args["task"], event["cat"], part]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_is_being_written_is_read_as_far_as_it_goes() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace.json");
        assert_eq!(last_spans(&trace).unwrap()["spans"], json!([]));
        let name = r#"{"ph":"M","tid":1,"name":"thread_name","args":{"name":"cpu:0 compute"}}"#;
        let span = |at: u32| {
            let args = json!({ "task": "a", "shard": 2 });
            json!({ "ph": "X", "tid": 1, "ts": f64::from(at) * 1e6, "dur": 5e5, "cat": "forward", "args": args })
        };
        let spans: Vec<String> = (0..20_000).map(|at| span(at).to_string()).collect();
        let text = format!("{{\"traceEvents\":[\n{name},\n{}", spans.join(",\n"));
        std::fs::write(&trace, &text[..text.len() - 9]).unwrap();
        let read = last_spans(&trace).unwrap();
        assert_eq!(read["tracks"], json!([[1, "cpu:0 compute"]]));
        let spans = read["spans"].as_array().unwrap();
        assert_eq!(spans.len(), SPANS);
        assert_eq!(spans.last(), Some(&json!([1, 19_998.0, 19_998.5, "a", "forward", 2])));
    }
}
