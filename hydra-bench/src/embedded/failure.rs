//! What went wrong, as a value.

use crate::terminal::error::{INTERRUPTED, status};
use clap::error::{ContextKind, ContextValue};
use hydra_engine::EngineError;
use hydra_partition::PartitionError;
use std::any::Any;

/// Why a command could not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Who is to do something about it.
    pub kind: Kind,
    /// What went wrong.
    pub message: String,
    /// Its causes, the nearest first.
    pub causes: Vec<String>,
    /// The keyword whose value is refused, if the arguments say which.
    pub keyword: Option<String>,
    /// Of memory that does not suffice: the bytes needed at least, and those that there are.
    pub memory: Option<(u64, u64)>,
}

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The arguments are wrong.
    Usage,
    /// There is too little memory for the run, which has trained nothing.
    Memory,
    /// The run was stopped before it trained anything.
    Stopped,
    /// Anything else.
    Failed,
}

impl Failure {
    pub(super) fn new(kind: Kind, message: String) -> Self {
        Self { kind, message, causes: Vec::new(), keyword: None, memory: None }
    }

    pub(super) fn of_arguments(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        // How the command line is used is of no use here.
        let said = text.split("\n\nUsage:").next().unwrap_or(&text);
        let said = said.split("\n\nFor more information").next().unwrap_or(said).trim();
        let message = said.strip_prefix("error: ").unwrap_or(said).to_owned();
        let keyword = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(flag)) => keyword_of(flag),
            _ => None,
        };
        Self { keyword, ..Self::new(Kind::Usage, message) }
    }

    pub(super) fn of_command(error: &anyhow::Error) -> Self {
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

    pub(super) fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason is known");
        Self::new(Kind::Failed, format!("the command panicked, which is a mistake in Hydra: {said}"))
    }
}

/// `lr` of `--lr <RATE,..>`.
fn keyword_of(flag: &str) -> Option<String> {
    let long = flag.strip_prefix("--")?.split([' ', '=']).next()?;
    Some(long.replace('-', "_"))
}

/// The bytes needed and those that there are.
fn memory_of(error: &EngineError) -> Option<(u64, u64)> {
    match error {
        EngineError::Task { source, .. } => memory_of(source),
        EngineError::HostMemory { needed, budget, .. } => Some((*needed, *budget)),
        EngineError::Partition(PartitionError::LayerTooLarge { needed, budget, .. }) => {
            Some((*needed, *budget))
        }
        EngineError::Partition(PartitionError::ShardTooLarge { need, room, .. }) => Some((*need, *room)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::terminal::Usage;
    use clap::Parser;

    #[test]
    fn a_refused_argument_is_named_without_words_about_command_lines() {
        let error = Cli::try_parse_from(["hydra", "select", "--device-memory=lots"]).unwrap_err();
        let failure = Failure::of_arguments(&error);
        assert_eq!((failure.kind, failure.keyword.as_deref()), (Kind::Usage, Some("device_memory")));
        let message = failure.message;
        assert!(message.starts_with("invalid value 'lots'") && !message.contains("Usage"), "{message}");
        assert!(!message.contains("more information"), "{message}");
    }

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
        assert!(Failure::of_panic(&"broke").message.ends_with("in Hydra: broke"));
    }
}
