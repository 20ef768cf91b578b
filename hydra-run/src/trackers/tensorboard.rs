//! TensorBoard event files: a folder for each task with one file of TFRecords of the protocol buffer `Event`.
//!
//! A file is a function of the lines of `metrics.jsonl`, so resuming requires no state: the records of all lines are generated
//! again, and those that are in the file already are not written again. A record that was partially written when a run was
//! killed is completed.

use super::crc::masked;
use super::figures::{Figure, figures};
use super::mirror::Sink;
use crate::run_dir::{LogLine, could_not, paths::safe_name};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const VERSION: &str = "brain.Event:2";
/// The prefix of file names, followed by the time of the first line and the program's name.
const PREFIX: &str = "events.out.tfevents";

/// The event files of a run's tasks.
pub(crate) struct TensorBoard {
    dir: PathBuf,
    tasks: BTreeMap<String, EventFile>,
}

impl TensorBoard {
    /// Writes below `dir`, which is created.
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| could_not(dir, "created"))?;
        Ok(Self { dir: dir.to_owned(), tasks: BTreeMap::new() })
    }
}

impl Sink for TensorBoard {
    fn take(&mut self, line: &LogLine) -> Result<()> {
        let (Some(task), Some((step, scalars))) = (line.event.task(), figures(&line.event)) else {
            return Ok(());
        };
        let time = line.time.unwrap_or_default();
        if !self.tasks.contains_key(task) {
            let events = EventFile::open(&self.dir.join(safe_name(task)), time)?;
            self.tasks.insert(task.to_owned(), events);
        }
        let Some(events) = self.tasks.get_mut(task) else { return Ok(()) };
        scalars.into_iter().try_for_each(|Figure { name, on, value }| {
            let tag = on.map_or_else(|| name.to_owned(), |on| format!("{name}/{on}"));
            events.scalar(tag, step, value as f32, time)
        })
    }

    fn flush(&mut self) -> Result<()> {
        self.tasks.values_mut().try_for_each(EventFile::flush)
    }
}

/// The event file of a task.
struct EventFile {
    path: PathBuf,
    out: BufWriter<File>,
    /// The earlier content of the file until it is generated again, and the length generated so far.
    had: Vec<u8>,
    made: usize,
    /// The last step of each tag. Minibatches trained again after a kill have the same losses, and are skipped.
    last: BTreeMap<String, u64>,
}

impl EventFile {
    /// Opens the file in a folder, or creates it.
    fn open(dir: &Path, time: f64) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| could_not(dir, "created"))?;
        let path = dir.join(format!("{PREFIX}.{time:010.0}.hydra"));
        let open = || -> io::Result<(File, Vec<u8>)> {
            let mut file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            let mut had = Vec::new();
            file.read_to_end(&mut had)?;
            Ok((file, had))
        };
        let (file, had) = open().with_context(|| could_not(&path, "opened"))?;
        let mut events = Self { out: BufWriter::new(file), had, made: 0, last: BTreeMap::new(), path };
        events.record(&event(time, None, &bytes(3, VERSION.as_bytes())))?;
        Ok(events)
    }

    fn scalar(&mut self, tag: String, step: u64, value: f32, time: f64) -> Result<()> {
        if self.last.get(&tag).is_some_and(|last| step <= *last) {
            return Ok(());
        }
        // The fields `tag` and `simple_value` of `Summary.Value`, in the field `value` of `Summary`.
        let value = [&bytes(1, tag.as_bytes())[..], &[2 << 3 | FOUR_BYTES], &value.to_le_bytes()].concat();
        self.last.insert(tag, step);
        self.record(&event(time, Some(step), &bytes(5, &bytes(1, &value))))
    }

    /// Writes a TFRecord: length, checksum of the length, data, checksum of the data.
    fn record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let sums = [masked(&length), masked(data)].map(u32::to_le_bytes);
        let record = [&length, &sums[0][..], data, &sums[1]].concat();
        self.write(&record).with_context(|| could_not(&self.path, "written"))
    }

    /// Writes bytes, except those that are in the file already. Differing content is from another run, or partial, and is
    /// overwritten.
    fn write(&mut self, record: &[u8]) -> io::Result<()> {
        let left = &self.had[self.made..];
        let same = record.iter().zip(left).take_while(|(a, b)| a == b).count();
        self.made += same;
        if same == record.len() {
            return Ok(());
        }
        if !self.had.is_empty() {
            self.out.get_mut().set_len(self.made as u64)?;
            self.out.seek(SeekFrom::Start(self.made as u64))?;
            (self.had, self.made) = (Vec::new(), 0);
        }
        self.out.write_all(&record[same..])
    }

    fn flush(&mut self) -> Result<()> {
        self.out.flush().with_context(|| could_not(&self.path, "written"))
    }
}

/// Protocol buffer wire types: varint, 64 bits, length-delimited, 32 bits.
const NUMBER: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const BYTES: u8 = 2;
const FOUR_BYTES: u8 = 5;

/// Encodes an `Event`: `wall_time`, `step` and another field.
fn event(time: f64, step: Option<u64>, more: &[u8]) -> Vec<u8> {
    let mut event = vec![1 << 3 | EIGHT_BYTES];
    event.extend(time.to_le_bytes());
    if let Some(step) = step {
        event.push(2 << 3 | NUMBER);
        event.extend(varint(step));
    }
    event.extend(more);
    event
}

/// Encodes a length-delimited field.
fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    [&[field << 3 | BYTES], &varint(value.len() as u64)[..], value].concat()
}

/// Encodes a varint: groups of seven bits, the lowest first.
fn varint(mut value: u64) -> Vec<u8> {
    let mut groups = Vec::new();
    while value >= 0x80 {
        groups.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    groups.push(value as u8);
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// An independent reader: returns (step, tag, value) of every record, and checks its checksums.
    fn read(file: &Path) -> Vec<(u64, String, f32)> {
        let (mut at, file) = (0, fs::read(file).unwrap());
        let mut found = Vec::new();
        while at < file.len() {
            let number = |from: usize| u32::from_le_bytes(file[from..from + 4].try_into().unwrap());
            let length = u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
            assert_eq!(number(at + 8), masked(&file[at..at + 8]));
            let data = &file[at + 12..at + 12 + length];
            assert_eq!(number(at + 12 + length), masked(data));
            found.extend(scalar_of(data));
            at += 16 + length;
        }
        found
    }

    /// Returns the fields of a message: numbers, and values as bytes.
    fn fields(mut message: &[u8]) -> Vec<(u8, Vec<u8>)> {
        let mut fields = Vec::new();
        let take = |message: &mut &[u8], count: usize| message.split_off(..count).unwrap().to_vec();
        let number = |message: &mut &[u8]| {
            let end = message.iter().position(|byte| byte & 0x80 == 0).unwrap();
            let groups = take(message, end + 1);
            groups.iter().rev().fold(0_u64, |value, group| value << 7 | u64::from(group & 0x7f))
        };
        while let Some(key) = message.split_off_first() {
            let value = match key & 7 {
                0 => number(&mut message).to_le_bytes().to_vec(),
                1 => take(&mut message, 8),
                2 => {
                    let length = number(&mut message) as usize;
                    take(&mut message, length)
                }
                5 => take(&mut message, 4),
                other => panic!("wire type {other}"),
            };
            fields.push((key >> 3, value));
        }
        fields
    }

    fn scalar_of(event: &[u8]) -> Option<(u64, String, f32)> {
        let of = |fields: &[(u8, Vec<u8>)], number: u8| {
            fields.iter().find(|(field, _)| *field == number).map(|(_, value)| value.clone())
        };
        let event = fields(event);
        assert!(f64::from_le_bytes(of(&event, 1)?.try_into().unwrap()) > 0.0);
        let value = fields(&of(&fields(&of(&event, 5)?), 1)?);
        let step = u64::from_le_bytes(of(&event, 2)?.try_into().unwrap());
        let number = f32::from_le_bytes(of(&value, 2)?.try_into().unwrap());
        Some((step, String::from_utf8(of(&value, 1)?).unwrap(), number))
    }

    fn minibatch(step: u64, loss: f64) -> Value {
        let at = 1e9 + step as f64;
        json!({ "event": "minibatch", "task": "a/b", "step": step, "loss": loss, "rate": 0.5, "time": at })
    }

    fn lines() -> Vec<Value> {
        let validation = |kind: &str, step: u64, loss: f64| json!({ "event": "evaluation", "task": "a/b", "kind": kind, "step": step, "loss": loss, "time": 1e9 });
        let begin = json!({ "event": "task", "task": "a/b", "steps": 300, "time": 1e9 });
        let trained = (0..300).map(|step| minibatch(step, 1.0 / (step + 1) as f64));
        let first = [begin, validation("initial", 0, 9.0)];
        first
            .into_iter()
            .chain(trained)
            .chain([validation("validation", 300, 0.5), validation("test", 300, 0.25)])
            .collect()
    }

    fn write(dir: &Path, lines: &[Value]) {
        let mut task_table = TensorBoard::new(dir).unwrap();
        let lines = lines.iter().map(|line| serde_json::from_value(line.clone()).unwrap());
        lines.for_each(|line: LogLine| task_table.take(&line).unwrap());
        task_table.flush().unwrap();
    }

    fn file(dir: &Path) -> PathBuf {
        dir.join("a_b/events.out.tfevents.1000000000.hydra")
    }

    #[test]
    fn another_reader_finds_every_loss_and_rate() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &lines());
        let read = read(&file(dir.path()));
        assert_eq!(read.len(), 1 + 600 + 2);
        let of = |name: &str| -> Vec<(u64, f32)> {
            read.iter().filter(|(_, tag, _)| tag == name).map(|(step, _, value)| (*step, *value)).collect()
        };
        let losses: Vec<(u64, f32)> = (0..300).map(|step| (step, (1.0 / (step + 1) as f64) as f32)).collect();
        assert_eq!(of("loss/training"), losses);
        assert!(of("learning_rate").iter().all(|(_, rate)| *rate == 0.5));
        assert_eq!(of("loss/validation"), [(0, 9.0), (300, 0.5)]);
        assert_eq!(of("loss/test"), [(300, 0.25)]);
    }

    #[test]
    fn a_file_goes_on_wherever_it_was_left() {
        let [whole, torn] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let lines = lines();
        write(whole.path(), &lines);
        let bytes = fs::read(file(whole.path())).unwrap();
        for left in [0, 3, 40, 4000, bytes.len() - 1, bytes.len()] {
            fs::create_dir_all(torn.path().join("a_b")).unwrap();
            fs::write(file(torn.path()), &bytes[..left]).unwrap();
            // Minibatches after the last checkpoint are trained again, so their lines occur twice.
            let again =
                [&lines[..200], &[json!({ "event": "resumed", "task": "a/b", "step": 100 })], &lines[102..]];
            write(torn.path(), &again.concat());
            assert!(fs::read(file(torn.path())).unwrap() == bytes, "{left}");
        }
        let other = [&bytes[..4000], b"what is not of this run, and longer than what is written", &bytes[..]]
            .concat();
        fs::write(file(torn.path()), other).unwrap();
        write(torn.path(), &lines);
        assert!(fs::read(file(torn.path())).unwrap() == bytes);
    }

    #[test]
    fn a_loss_that_is_no_number_is_none() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[minibatch(0, f64::NAN)]);
        assert!(read(&file(dir.path()))[0].2.is_nan());
    }
}
