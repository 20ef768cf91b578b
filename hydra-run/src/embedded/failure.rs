//! Failures of commands as values.

use crate::terminal::error::{INTERRUPTED, status};
use clap::error::{ContextKind, ContextValue};
use hydra_engine::EngineError;
use hydra_partition::PartitionError;
use std::any::Any;
use std::io;

/// The failure of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind of the failure.
    pub kind: Kind,
    /// The error message.
    pub message: String,
    /// The causes, the nearest first.
    pub causes: Vec<String>,
    /// The keyword whose value was rejected, if known.
    pub keyword: Option<String>,
    /// For a lack of memory: the minimum bytes required, and the bytes available.
    pub memory: Option<(u64, u64)>,
}

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The arguments are invalid.
    Usage,
    /// The run does not fit in memory, and has trained nothing.
    Memory,
    /// The run was stopped before it trained anything.
    Stopped,
    /// Any other failure.
    Failed,
}

impl Failure {
    /// A failure without causes.
    pub fn new(kind: Kind, message: String) -> Self {
        Self { kind, message, causes: Vec::new(), keyword: None, memory: None }
    }

    /// The failure to read arguments, without hints that apply to command lines alone.
    pub fn of_arguments(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        // The usage of the command line does not apply here.
        let message = text.split("\n\nUsage:").next().unwrap_or(&text);
        let message = message.split("\n\nFor more information").next().unwrap_or(message).trim();
        let message = message.strip_prefix("error: ").unwrap_or(message).to_owned();
        let keyword = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(flag)) => keyword_of(flag),
            _ => None,
        };
        Self { keyword, ..Self::new(Kind::Usage, message) }
    }

    /// The failure of a command, with its causes.
    pub fn of_command(error: &anyhow::Error) -> Self {
        let memory = error.chain().find_map(|cause| cause.downcast_ref().and_then(memory_of));
        let kind = match (status(error), memory) {
            (2, _) => Kind::Usage,
            (INTERRUPTED, _) => Kind::Stopped,
            (_, Some(_)) => Kind::Memory,
            (_, None) => Kind::Failed,
        };
        let causes = error.chain().skip(1).map(ToString::to_string).collect();
        Self { causes, memory, ..Self::new(kind, error.to_string()) }
    }

    pub(super) fn of_thread(error: &io::Error) -> Self {
        Self::new(Kind::Failed, format!("a thread for the command could not be started: {error}"))
    }

    pub(super) fn from_panic(panic: &(dyn Any + Send)) -> Self {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown reason");
        Self::new(Kind::Failed, format!("the command panicked, which is a bug in Hydra: {message}"))
    }
}

/// Returns the keyword of a flag, such as `lr` for `--lr <RATE,..>`.
fn keyword_of(flag: &str) -> Option<String> {
    let long = flag.strip_prefix("--")?.split([' ', '=']).next()?;
    Some(long.replace('-', "_"))
}

/// Returns the bytes required and available, for a lack of memory.
fn memory_of(error: &EngineError) -> Option<(u64, u64)> {
    match error {
        EngineError::Task { source, .. } => memory_of(source),
        EngineError::HostMemory { needed, budget, .. } => Some((*needed, *budget)),
        EngineError::Partition(PartitionError::LayerTooLarge { needed, budget, .. }) => {
            Some((*needed, *budget))
        }
        EngineError::Partition(PartitionError::ShardTooLarge { need, available, .. }) => {
            Some((*need, *available))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::Usage;

    #[test]
    fn causes_memory_and_panics_are_values() {
        let refused =
            EngineError::HostMemory { needed: 5, masters: 4, working: None, active: 1, tasks: 2, budget: 3 };
        let refused = EngineError::Task { task: "one".to_owned(), source: Box::new(refused) };
        let failure = Failure::of_command(&anyhow::Error::from(refused).context("the run was refused"));
        assert_eq!((failure.kind, failure.memory), (Kind::Memory, Some((5, 3))));
        assert_eq!((failure.message.as_str(), failure.causes.len()), ("the run was refused", 2));
        assert_eq!(failure.causes[0], "task `one` was refused");
        let usage = Failure::of_command(&Usage::new("no such thing").into());
        assert_eq!((usage.kind, usage.causes.len()), (Kind::Usage, 0));
        assert!(Failure::from_panic(&"broke").message.ends_with("in Hydra: broke"));
    }
}
