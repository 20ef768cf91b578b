//! Run-control commands, and `control.jsonl`, which records those that took effect.

use crate::run_dir::directory::CONTROL;
use crate::run_dir::paths::could_not;
use crate::settings::flags::Texts;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A command to a run. `at` is the number of minibatches that its task has trained when the command takes effect. A request may
/// omit it (the next opportunity); a recorded command has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum RunCommand {
    /// Pauses a task.
    Pause {
        /// The name of the task.
        task: String,
        /// The minibatch after which it takes effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<usize>,
    },
    /// Continues a paused task to its end, or until it pauses again.
    Resume {
        /// The name of the task.
        task: String,
        /// The minibatch after which the task pauses again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<usize>,
        /// The minibatch after which it takes effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<usize>,
    },
    /// Ends a task and keeps its files.
    Stop {
        /// The name of the task.
        task: String,
        /// The minibatch after which it takes effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<usize>,
    },
    /// Ends a task and removes its files.
    Delete {
        /// The name of the task.
        task: String,
        /// The minibatch after which it takes effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<usize>,
    },
    /// Ends a task, and continues it as a new task with a total of `steps` minibatches.
    Extend {
        /// The name of the task.
        task: String,
        /// The total of minibatches.
        steps: usize,
        /// The minibatch after which it takes effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<usize>,
        /// The name of the new task.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// Starts a new task from the state of this one, with other settings.
    Fork {
        /// The name of the task.
        task: String,
        /// The minibatch after which it takes effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<usize>,
        /// The settings that differ, as texts.
        #[serde(default, skip_serializing_if = "Texts::is_empty")]
        changes: Texts,
        /// Whether the optimizer starts anew.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        weights_only: bool,
        /// The name of the new task.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
}

impl RunCommand {
    /// Returns the task that the command addresses.
    pub(crate) fn task(&self) -> &str {
        match self {
            Self::Pause { task, .. }
            | Self::Resume { task, .. }
            | Self::Stop { task, .. }
            | Self::Delete { task, .. }
            | Self::Extend { task, .. }
            | Self::Fork { task, .. } => task,
        }
    }

    /// Returns the minibatch at which the command takes effect, if given.
    pub(crate) fn at(&self) -> Option<usize> {
        match self {
            Self::Pause { at, .. }
            | Self::Resume { at, .. }
            | Self::Stop { at, .. }
            | Self::Delete { at, .. }
            | Self::Extend { at, .. }
            | Self::Fork { at, .. } => *at,
        }
    }

    /// Returns the task that the command starts: its name, its changed settings, and whether it inherits the weights alone.
    pub(super) fn started_task(&self) -> Option<(&str, Texts, bool)> {
        match self {
            Self::Fork { name, changes, weights_only, .. } => {
                Some((name.as_deref()?, changes.clone(), *weights_only))
            }
            Self::Extend { name, steps, .. } => {
                let changes = Texts::from([("steps".to_owned(), steps.to_string())]);
                Some((name.as_deref()?, changes, false))
            }
            _ => None,
        }
    }
}

/// Reads the commands in a file in order. An incomplete last line is ignored: it was never acknowledged.
pub fn read_commands(path: &Path) -> Result<Vec<RunCommand>> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        read => read.with_context(|| could_not(path, "read"))?,
    };
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let lines = text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let read = |(number, line): (usize, &[u8])| {
        let broken = || format!("line {} of `{}` is not a command", number + 1, path.display());
        let mut line: Value = serde_json::from_slice(line).with_context(broken)?;
        line.as_object_mut().into_iter().for_each(|line| drop(line.remove("time")));
        serde_json::from_value(line).with_context(broken)
    };
    lines.enumerate().map(read).collect()
}

/// The log of commands. Each line is synced to disk before the command is acknowledged. The file is created with the first
/// command.
pub(crate) struct CommandLog(PathBuf);

impl CommandLog {
    /// Returns the log in a run directory.
    pub(crate) fn in_dir(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    pub(crate) fn push(&mut self, run_command: &RunCommand) -> Result<()> {
        let mut line = serde_json::to_value(run_command).context("a command could not be written as JSON")?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        line["time"] = now.map_or(0.0, |now| now.as_millis() as f64 / 1e3).into();
        let path = self.0.join(CONTROL);
        self.append(&path, &line).with_context(|| could_not(&path, "written"))
    }

    /// Appends a line after the last complete one.
    fn append(&self, path: &Path, line: &Value) -> io::Result<()> {
        let mut file = File::options().create(true).append(true).read(true).open(path)?;
        let text = fs::read(path)?;
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1) as u64;
        file.set_len(whole)?;
        let written = file.write_all(format!("{line}\n").as_bytes()).and_then(|()| file.sync_data());
        if written.is_err() {
            // A partial line would corrupt the next one.
            let _ = file.set_len(whole);
        }
        // Syncing the directory makes the file's name durable.
        written.and_then(|()| File::open(&self.0)?.sync_all())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_command(json: &str) -> RunCommand {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_line_that_is_half_written_counts_for_nothing_and_a_broken_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CONTROL);
        assert!(read_commands(&path).unwrap().is_empty());
        let stop = run_command(r#"{"command":"stop","task":"a","at":1}"#);
        CommandLog::in_dir(dir.path()).push(&stop).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{whole}{{\"command\":\"pau")).unwrap();
        assert_eq!(read_commands(&path).unwrap(), std::slice::from_ref(&stop));
        CommandLog::in_dir(dir.path()).push(&stop).unwrap();
        assert_eq!(read_commands(&path).unwrap(), [stop.clone(), stop]);
        fs::write(&path, "{}\n").unwrap();
        assert!(read_commands(&path).unwrap_err().to_string().starts_with("line 1 of "));
    }
}
