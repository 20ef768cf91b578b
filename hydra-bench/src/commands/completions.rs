//! `hydra completions`: completion scripts for shells.

use anyhow::{Context, Result};
use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;
use hydra_run::terminal::{Outcome, print};

/// `hydra completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell to complete in
    pub(crate) shell: ShellName,
}

/// The supported shells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShellName {
    Bash,
    Zsh,
    Fish,
}

/// Prints the script that completes this command line.
pub(crate) fn run(args: &CompletionsArgs, mut line: Command) -> Result<Outcome> {
    let shell = match args.shell {
        ShellName::Bash => Shell::Bash,
        ShellName::Zsh => Shell::Zsh,
        ShellName::Fish => Shell::Fish,
    };
    let (mut script, name) = (Vec::new(), line.get_name().to_owned());
    clap_complete::generate(shell, &mut line, name, &mut script);
    print(&String::from_utf8(script).context("the script is not UTF-8")?)?;
    Ok(Outcome::Done)
}
